"""Share requests among a few worker processes, each limited in time and memory.

A worker that takes too long is ended and replaced. Large requests use half of the workers at most,
so that small ones need not wait for them. A thread cannot be stopped, a process can: that makes the
time limit real, keeps the server's own loop free, and lets two cores work. Answers are kept on this
side of the pipe: who asks what was asked before waits for no worker.

``python -m wattcast.web.worker_pool`` is a worker: it answers framed requests from stdin on stdout
until stdin ends. A frame is its length in four bytes, then MessagePack of a request (kind, body) or
of its answer. No pickle crosses the pipe. Memory is limited, so that a request that asks for too
much fails alone. A request whose client left is interrupted by a signal; a worker that does not
stop is ended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, BinaryIO

import msgspec

from wattcast.core.errors import MissingTool
from wattcast.measure.sampler import make_child_environment
from wattcast.web.answers import (
    FIRST_QUESTIONS,
    Answer,
    answer_request,
    make_refusal,
)

# Address space of a worker. After one request of each kind, each as large as is accepted (20,000
# operators, 20,000 simulated requests, a plan of four cards), it had 773 MiB at most, of which 382
# MiB were resident.
MOST_MEMORY_BYTE = 3 << 29
READY = b"ready"
LIMIT_S = 15.0  # of one request
START_S = 300.0  # for a worker, which takes 1 s of a processor that others may hold
STOP_S = 0.5  # for a worker to stop a request whose client left, before it is ended
MOST_WAITING = 128
RENEWALS = 30
REMEMBERED = 256
REMEMBERED_BYTE = 64 << 20
LARGE_KINDS = (
    "figure",
    "report",
    "plan",
    "simulate",
    "train",
    "hall",
)  # a second or more each, whatever is asked
LARGE_BYTE = 64 << 10  # a larger body leaves one of the client's requests to small ones


class AnswerCache:
    """Keeps answers by request within a number of bytes, so that the same question costs nothing
    the second time.
    """

    def __init__(
        self,
        most: int = REMEMBERED,
        most_byte: int = REMEMBERED_BYTE,
    ) -> None:
        self._most = most
        self._most_byte = most_byte
        self._kept: OrderedDict[tuple[str, bytes], Answer] = OrderedDict()
        self._byte = 0

    def find(
        self,
        kind: str,
        body: bytes,
    ) -> Answer | None:
        """Return the answer to a request that was asked before, or None."""
        key = kind, hashlib.sha256(body).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(
        self,
        kind: str,
        body: bytes,
        answer: Answer,
    ) -> None:
        """Keep a good answer and drop those that were not asked for longest."""
        key = kind, hashlib.sha256(body).digest()
        if (
            answer.status != 200 or kind == "report" or key in self._kept
        ):  # a report carries the time it was written
            return
        self._kept[key] = answer
        self._byte += len(answer.body)
        while self._kept and (len(self._kept) > self._most or self._byte > self._most_byte):
            self._byte -= len(self._kept.popitem(last=False)[1].body)


class WorkerPool:
    """Workers that run for the length of an ``async with`` block, in which many tasks may call
    ``ask`` at once.
    """

    def __init__(
        self,
        workers: int = 2,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._wanted = workers
        self._limit_s = limit_s
        self._free: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._all: set[asyncio.subprocess.Process] = set()
        self._renewing: set[asyncio.Task[None]] = set()
        self._large = asyncio.Semaphore(max(workers // 2, 1))
        self._waiting = 0
        self._answers = AnswerCache()
        self.ended = 0  # workers that had to be ended
        self.stopped = 0  # requests that were stopped because their client left

    async def __aenter__(self) -> WorkerPool:
        for process in await asyncio.gather(*(self._start_worker() for _ in range(self._wanted))):
            self._give_back(process, large=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._renewing):
            task.cancel()
        for process in list(self._all):
            await self._end(process)

    async def ask(
        self,
        kind: str,
        body: bytes,
    ) -> Answer:
        """Return the answer that is kept, or send the request to the next free worker within the
        time limit.
        """
        if (answer := self._answers.find(kind, body)) is not None:
            return answer
        if self._waiting >= MOST_WAITING:
            return make_refusal(503, "the server is busy; try again in a moment.")
        large = kind in LARGE_KINDS or len(body) > LARGE_BYTE
        self._waiting += 1
        try:
            async with (
                asyncio.timeout(2.0 * self._limit_s),
                contextlib.AsyncExitStack() as resources,
            ):
                if large:
                    await resources.enter_async_context(self._large)
                process = await self._free.get()
                resources.pop_all()  # until the worker is given back
        except TimeoutError:
            return make_refusal(503, "the server is busy; try again in a moment.")
        finally:
            self._waiting -= 1
        reply = await self._with(process, kind, body, large)
        self._answers.keep(kind, body, reply)
        return reply

    def _give_back(
        self,
        process: asyncio.subprocess.Process,
        large: bool,
    ) -> None:
        self._free.put_nowait(process)
        if large:
            self._large.release()

    async def _with(
        self,
        process: asyncio.subprocess.Process,
        kind: str,
        body: bytes,
        large: bool,
    ) -> Answer:
        assert process.stdin is not None
        question = msgspec.msgpack.encode((kind, body))
        process.stdin.write(struct.pack("!I", len(question)) + question)
        reading = asyncio.ensure_future(_frame(process))
        try:
            async with asyncio.timeout(self._limit_s):
                await process.stdin.drain()
                reply = msgspec.msgpack.decode(await asyncio.shield(reading), type=Answer)
        except TimeoutError:
            reading.cancel()
            self._replace(process, large)
            return make_refusal(
                503, f"this request took longer than {self._limit_s:g} s and was stopped."
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            reading.cancel()
            self._replace(process, large)
            return make_refusal(500, "internal error; the server's log says more.")
        except (
            asyncio.CancelledError
        ):  # whoever asked is gone: the worker is in the middle of an answer
            self._run_behind(self._interrupt(process, reading, large))
            raise
        self._give_back(process, large)
        return reply

    async def _interrupt(
        self,
        process: asyncio.subprocess.Process,
        reading: asyncio.Future[bytes],
        large: bool,
    ) -> None:
        """Stop what a worker does for a client that left; one that does not stop is replaced."""
        try:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(STOP_SIGNAL)
            async with asyncio.timeout(STOP_S):
                await reading
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            self.ended += 1
            await self._renew(process, large)
            return
        self.stopped += 1
        self._give_back(process, large)

    def _replace(
        self,
        process: asyncio.subprocess.Process,
        large: bool,
    ) -> None:
        """Replace a worker in the background; until another is ready no further large request takes
        its place.
        """
        self.ended += 1
        self._run_behind(self._renew(process, large))

    def _run_behind(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task of its own, which is cancelled when the pool ends."""
        task = asyncio.ensure_future(work)
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _renew(
        self,
        process: asyncio.subprocess.Process,
        large: bool,
    ) -> None:
        """End a worker and start another; a machine that cannot start one now may a little
        later.
        """
        await self._end(process)
        for _ in range(RENEWALS):
            with contextlib.suppress(MissingTool, OSError):
                self._give_back(await self._start_worker(), large)
                return
            await asyncio.sleep(1.0)

    async def _start_worker(self) -> asyncio.subprocess.Process:
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "wattcast.web.worker_pool"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=make_child_environment() | one,
        )
        self._all.add(process)
        try:
            async with asyncio.timeout(START_S):
                first_frame = await _frame(process)
        except (TimeoutError, asyncio.IncompleteReadError):
            await self._end(process)
            raise MissingTool(
                "a worker of the server did not start in time, or ended as said above."
            ) from None
        assert first_frame == READY
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _frame(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    (length,) = struct.unpack("!I", await process.stdout.readexactly(4))
    return await process.stdout.readexactly(length)


class RequestStopped(BaseException):
    """The client of a request left. Not an ``Exception``, so that nothing on the way takes it for
    an error.
    """


STOP_SIGNAL = getattr(signal, "SIGUSR1", signal.SIGTERM)


def limit_memory(most_byte: int = MOST_MEMORY_BYTE) -> None:
    """Limit the address space of this process, where the platform has such a limit and none
    lower.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_byte, most_byte))


def run_worker() -> int:
    """Answer until the pipe closes; the first frame says that everything is loaded."""
    limit_memory()
    is_answering = False

    def stop(*_: object) -> None:
        nonlocal is_answering
        if is_answering:  # else the answer was ready when the client left
            is_answering = False
            raise RequestStopped

    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the pipe
    for kind, body in FIRST_QUESTIONS:  # so that the first requests are as quick as later ones
        if kind != "catalogue":  # which one worker is asked for once, and the server keeps
            answer_request(kind, body)
    signal.signal(STOP_SIGNAL, stop)
    write_frame(answers, READY)
    while len(head := requests.read(4)) == 4:
        (length,) = struct.unpack("!I", head)
        if len(request := requests.read(length)) < length:
            break
        kind, body = msgspec.msgpack.decode(request, type=tuple[str, bytes])
        try:
            is_answering = True
            answer = answer_request(kind, body)
            is_answering = False
        except RequestStopped:
            answer = make_refusal(503, "the client left.")
        write_frame(answers, msgspec.msgpack.encode(answer))
    return 0


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Write one frame and send it at once."""
    stream.write(struct.pack("!I", len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    sys.exit(run_worker())
