"""Share requests among a few worker processes; one that takes too long is ended and replaced.

Large requests use half of the workers at most, so that small ones need not wait for them. A thread cannot be stopped,
a process can: that makes the time limit real, keeps the server's own loop free, and lets two cores work. Answers are
kept on this side of the pipe: who asks what was asked before waits for no worker.

``python -m wattcast.web.worker_pool`` is a worker: it answers framed requests from stdin on stdout until stdin ends.
A frame is its length in four bytes, then the bytes. A request is two frames (kind, body), an answer two (a JSON
header with status and type, then the body). No pickle crosses the pipe. Memory is limited, so that a request that
asks for too much fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import struct
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import BinaryIO

import msgspec

from wattcast.core.errors import MissingTool
from wattcast.web.answers import FIRST_QUESTIONS, Answer, answer_request, make_refusal
from wattcast.web.client_connections import LARGE_BYTE

MOST_MEMORY_BYTE = 6 << 30  # of a worker
READY = b"ready"
LIMIT_S = 15.0  # of one request
START_S = 60.0
MOST_WAITING = 128
RENEWALS = 30
REMEMBERED, REMEMBERED_BYTE = 256, 64 << 20
LARGE_KINDS = ("figure", "report", "plan", "simulate", "train")  # a second or more each, whatever is asked


class AnswerCache:
    """Keeps answers by request within a number of bytes, so that the same question costs nothing the second time."""

    def __init__(self, most: int = REMEMBERED, most_byte: int = REMEMBERED_BYTE) -> None:
        self._most, self._most_byte = most, most_byte
        self._kept: OrderedDict[tuple[str, bytes], Answer] = OrderedDict()
        self._byte = 0

    def find(self, kind: str, body: bytes) -> Answer | None:
        """Return the answer to a request that was asked before, or None."""
        key = kind, hashlib.sha256(body).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, kind: str, body: bytes, answer: Answer) -> None:
        """Keep a good answer and drop those that were not asked for longest."""
        key = kind, hashlib.sha256(body).digest()
        if answer.status != 200 or kind == "report" or key in self._kept:  # a report carries the time it was written
            return
        self._kept[key] = answer
        self._byte += len(answer.body)
        while self._kept and (len(self._kept) > self._most or self._byte > self._most_byte):
            self._byte -= len(self._kept.popitem(last=False)[1].body)


class WorkerPool:
    """Workers that ``start`` starts; many tasks may call ``ask`` at once."""

    def __init__(self, workers: int = 2, limit_s: float = LIMIT_S) -> None:
        self._wanted, self._limit_s = workers, limit_s
        self._free: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._all: set[asyncio.subprocess.Process] = set()
        self._renewing: set[asyncio.Task[None]] = set()
        self._large = asyncio.Semaphore(max(workers // 2, 1))
        self._waiting = 0
        self._answers = AnswerCache()
        self.ended = 0  # workers that had to be ended

    async def start(self) -> None:
        """Start all workers and return when they are ready."""
        for process in await asyncio.gather(*(self._start_worker() for _ in range(self._wanted))):
            self._give_back(process, large=False)

    async def stop(self) -> None:
        """End all workers."""
        for task in list(self._renewing):
            task.cancel()
        for process in list(self._all):
            await self._end(process)

    async def ask(self, kind: str, body: bytes) -> Answer:
        """Return the answer that is kept, or send the request to the next free worker within the time limit."""
        if (known := self._answers.find(kind, body)) is not None:
            return known
        if self._waiting >= MOST_WAITING:
            return make_refusal(503, "the server is busy; try again in a moment.")
        large = kind in LARGE_KINDS or len(body) > LARGE_BYTE
        self._waiting += 1
        try:
            async with asyncio.timeout(2.0 * self._limit_s):
                process = await self._take(large)
        except TimeoutError:
            return make_refusal(503, "the server is busy; try again in a moment.")
        finally:
            self._waiting -= 1
        reply = await self._with(process, kind, body, large)
        self._answers.keep(kind, body, reply)
        return reply

    async def _take(self, large: bool) -> asyncio.subprocess.Process:
        if not large:
            return await self._free.get()
        await self._large.acquire()
        try:
            return await self._free.get()
        except BaseException:
            self._large.release()
            raise

    def _give_back(self, process: asyncio.subprocess.Process, large: bool) -> None:
        self._free.put_nowait(process)
        if large:
            self._large.release()

    async def _with(self, process: asyncio.subprocess.Process, kind: str, body: bytes, large: bool) -> Answer:
        try:
            async with asyncio.timeout(self._limit_s):
                reply = await _exchange(process, kind, body)
        except TimeoutError:
            await self._replace(process, large)
            return make_refusal(503, f"this request took longer than {self._limit_s:g} s and was stopped.")
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._replace(process, large)
            return make_refusal(500, "internal error; the server's log says more.")
        except asyncio.CancelledError:  # whoever asked is gone: the worker is in the middle of an answer
            self._later(self._replace(process, large))
            raise
        self._give_back(process, large)
        return reply

    async def _replace(self, process: asyncio.subprocess.Process, large: bool) -> None:
        """End a worker and start another; until that is ready no further large request takes its place."""
        self.ended += 1
        await self._end(process)
        self._later(self._renew(large))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _renew(self, large: bool) -> None:
        """Replace a worker that was ended; a machine that cannot start one now may a little later."""
        for _ in range(RENEWALS):
            with contextlib.suppress(MissingTool, OSError):
                self._give_back(await self._start_worker(), large)
                return
            await asyncio.sleep(1.0)

    async def _start_worker(self) -> asyncio.subprocess.Process:
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "wattcast.web.worker_pool"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | one | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self._all.add(process)
        try:
            async with asyncio.timeout(START_S):
                said = await _frame(process)
        except (TimeoutError, asyncio.IncompleteReadError):
            await self._end(process)
            raise MissingTool("a worker of the server did not start; its complaint stands above.") from None
        assert said == READY
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _exchange(process: asyncio.subprocess.Process, kind: str, body: bytes) -> Answer:
    assert process.stdin is not None
    for data in (kind.encode(), body):
        process.stdin.write(struct.pack("!I", len(data)) + data)
    await process.stdin.drain()
    header = msgspec.json.decode(await _frame(process), type=Answer)
    return Answer(header.status, header.type, await _frame(process))


async def _frame(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    (length,) = struct.unpack("!I", await process.stdout.readexactly(4))
    return await process.stdout.readexactly(length)


@contextlib.asynccontextmanager
async def run_pool(pool: WorkerPool) -> AsyncIterator[WorkerPool]:
    """Run a pool for the length of a block."""
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def run_worker() -> int:
    """Answer until the pipe closes; the first frame says that everything is loaded."""
    _limit_memory()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the pipe
    for question in FIRST_QUESTIONS:  # so that the first requests are as quick as later ones
        answer_request(*question)
    write_frame(answers, READY)
    while True:
        kind = read_frame(requests)
        body = read_frame(requests) if kind is not None else None
        if kind is None or body is None:
            return 0
        found = answer_request(kind.decode(), body)
        write_frame(answers, json.dumps({"status": found.status, "type": found.type}).encode())
        write_frame(answers, found.body)


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next frame; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("!I", head)
    data = stream.read(length)
    return data if len(data) == length else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Write one frame and send it at once."""
    stream.write(struct.pack("!I", len(data)) + data)
    stream.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every platform, not above a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTE, MOST_MEMORY_BYTE))


if __name__ == "__main__":
    sys.exit(run_worker())
