"""Share requests among a few worker processes, and limit how much one client may take.

A worker that takes too long is ended and replaced. Large requests use half of the workers at most,
so that small ones need not wait for them. A thread cannot be stopped, a process can: that makes the
time limit real, keeps the server's own loop free, and lets two cores work. Answers are kept on this
side of the pipe: who asks what was asked before waits for no worker.

``python -m wattcast.web.worker_pool`` is a worker: it answers framed requests from stdin on stdout
until stdin ends. A frame is its length in four bytes, then MessagePack of a request (kind, body) or
of its answer. No pickle crosses the pipe. Memory is limited, so that a request that asks for too
much fails alone.

A client is an address (of IPv6 the network, since one machine has all of it). Hosts, connections,
headers and running requests are limited: whoever is slow or asks for much waits behind its own
requests, not in front of those of others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import msgspec

from wattcast.core.errors import MissingTool, Refused, bad_value
from wattcast.measure.sampler import make_child_environment
from wattcast.web.answers import FIRST_QUESTIONS, Answer, answer_request, make_refusal

MOST_MEMORY_BYTE = 6 << 30  # of a worker
READY = b"ready"
LIMIT_S = 15.0  # of one request
START_S = 300.0  # for a worker, which takes 1 s of a processor that others may hold
MOST_WAITING = 128
RENEWALS = 30
REMEMBERED, REMEMBERED_BYTE = 256, 64 << 20
LARGE_KINDS = (
    "figure",
    "report",
    "plan",
    "simulate",
    "train",
)  # a second or more each, whatever is asked
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HEADER_S = 10.0  # for the headers of a request to arrive
MOST_CONNECTIONS = 1024  # of all clients
CLIENT_CONNECTIONS = 32  # five browsers open six each; a proxy in front of many shares its own
CLIENT_REQUESTS = 2  # running; others of the client wait
SLOT_S = 30.0  # that a request waits for those of the same client
LARGE_BYTE = 64 << 10  # a larger body leaves one of the client's requests to small ones


class AnswerCache:
    """Keeps answers by request within a number of bytes, so that the same question costs nothing
    the second time.
    """

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

    def __init__(self, workers: int = 2, limit_s: float = LIMIT_S) -> None:
        self._wanted, self._limit_s = workers, limit_s
        self._free: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._all: set[asyncio.subprocess.Process] = set()
        self._renewing: set[asyncio.Task[None]] = set()
        self._large = asyncio.Semaphore(max(workers // 2, 1))
        self._waiting = 0
        self._answers = AnswerCache()
        self.ended = 0  # workers that had to be ended

    async def __aenter__(self) -> WorkerPool:
        for process in await asyncio.gather(*(self._start_worker() for _ in range(self._wanted))):
            self._give_back(process, large=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._renewing):
            task.cancel()
        for process in list(self._all):
            await self._end(process)

    async def ask(self, kind: str, body: bytes) -> Answer:
        """Return the answer that is kept, or send the request to the next free worker within the
        time limit.
        """
        if (known := self._answers.find(kind, body)) is not None:
            return known
        if self._waiting >= MOST_WAITING:
            return make_refusal(503, "the server is busy; try again in a moment.")
        large = kind in LARGE_KINDS or len(body) > LARGE_BYTE
        self._waiting += 1
        try:
            async with asyncio.timeout(2.0 * self._limit_s), contextlib.AsyncExitStack() as held:
                if large:
                    await held.enter_async_context(self._large)
                process = await self._free.get()
                held.pop_all()  # until the worker is given back
        except TimeoutError:
            return make_refusal(503, "the server is busy; try again in a moment.")
        finally:
            self._waiting -= 1
        reply = await self._with(process, kind, body, large)
        self._answers.keep(kind, body, reply)
        return reply

    def _give_back(self, process: asyncio.subprocess.Process, large: bool) -> None:
        self._free.put_nowait(process)
        if large:
            self._large.release()

    async def _with(
        self, process: asyncio.subprocess.Process, kind: str, body: bytes, large: bool
    ) -> Answer:
        try:
            async with asyncio.timeout(self._limit_s):
                assert process.stdin is not None
                asked = msgspec.msgpack.encode((kind, body))
                process.stdin.write(struct.pack("!I", len(asked)) + asked)
                await process.stdin.drain()
                reply = msgspec.msgpack.decode(await _frame(process), type=Answer)
        except TimeoutError:
            self._replace(process, large)
            return make_refusal(
                503, f"this request took longer than {self._limit_s:g} s and was stopped."
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            self._replace(process, large)
            return make_refusal(500, "internal error; the server's log says more.")
        except (
            asyncio.CancelledError
        ):  # whoever asked is gone: the worker is in the middle of an answer
            self._replace(process, large)
            raise
        self._give_back(process, large)
        return reply

    def _replace(self, process: asyncio.subprocess.Process, large: bool) -> None:
        """Replace a worker in the background; until another is ready no further large request takes
        its place.
        """
        self.ended += 1
        task = asyncio.ensure_future(self._renew(process, large))
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _renew(self, process: asyncio.subprocess.Process, large: bool) -> None:
        """End a worker and start another; a machine that cannot start one now may a little later."""
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
                said = await _frame(process)
        except (TimeoutError, asyncio.IncompleteReadError):
            await self._end(process)
            raise MissingTool(
                "a worker of the server did not start in time, or ended as said above."
            ) from None
        assert said == READY
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


def run_worker() -> int:
    """Answer until the pipe closes; the first frame says that everything is loaded."""
    with contextlib.suppress(
        ImportError, ValueError, OSError
    ):  # not on every platform, not above a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTE, MOST_MEMORY_BYTE))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the pipe
    for question in FIRST_QUESTIONS:  # so that the first requests are as quick as later ones
        answer_request(*question)
    write_frame(answers, READY)
    while len(head := requests.read(4)) == 4:
        (length,) = struct.unpack("!I", head)
        if len(asked := requests.read(length)) < length:
            break
        kind, body = msgspec.msgpack.decode(asked, type=tuple[str, bytes])
        write_frame(answers, msgspec.msgpack.encode(answer_request(kind, body)))
    return 0


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Write one frame and send it at once."""
    stream.write(struct.pack("!I", len(data)) + data)
    stream.flush()


def host_name(host: str) -> str:
    """Return the host of ``host:port``, ``[::1]:port`` or ``host``, in lower case."""
    host = host.strip().lower()
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def known_hosts(host: str, allowed: Sequence[str]) -> frozenset[str]:
    """Return the names that a server on ``host`` answers to; one that others reach needs
    ``--allow-host``.
    """
    if not is_loopback(host) and not allowed:
        raise bad_value(
            "--allow-host", "the name others will type, beside a --host that others reach", "none",
            "The server answers only to names it knows.",
        )  # fmt: skip
    return frozenset(
        host_name(name) for name in (*LOOPBACK, f"[{host}]" if ":" in host else host, *allowed)
    )


def is_known_host(given: Sequence[str], hosts: Iterable[str]) -> bool:
    """Tell whether a request's ``Host`` headers are one, and one of ours: no other site's name
    leads here.
    """
    return len(given) == 1 and host_name(given[0]) in hosts


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("localhost")
    (True, True, False, True)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, or raise an error that says what is in the way; port 0 takes a free
    one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(512)  # whoever comes before the workers are ready waits, and is not refused
    except (OSError, OverflowError) as error:
        bound.close()
        raise Refused(
            f"{host}:{port} cannot be served on ({error}). Choose another --port."
        ) from None
    return bound


def client_key(host: str) -> str:
    """Return what counts as one client: an IPv4 address, or the first 64 bits of an IPv6 address.

    >>> client_key("10.0.0.1"), client_key("2001:db8::1") == client_key("2001:db8::2:3")
    ('10.0.0.1', True)
    """
    if ":" not in host:
        return host
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).packed[:8].hex()
    return host


class ClientBusy(Exception):
    """Too many requests of one client run for another to begin."""


class _Slots:
    """The running requests of one client."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(CLIENT_REQUESTS)
        self.large = asyncio.Semaphore(CLIENT_REQUESTS - 1)


class ClientSlots:
    """Lets ``CLIENT_REQUESTS`` requests of each client run, all but one of them with a large body."""

    def __init__(self, wait_s: float = SLOT_S) -> None:
        self._wait_s = wait_s
        self._clients: WeakValueDictionary[str, _Slots] = (
            WeakValueDictionary()
        )  # gone with their last request

    @contextlib.asynccontextmanager
    async def running(self, host: str, large: bool) -> AsyncIterator[None]:
        """Wait until this request of a client may run; ClientBusy when that takes too long."""
        slots = self._clients.setdefault(client_key(host), _Slots())
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._wait_s):
                    if large:
                        await held.enter_async_context(slots.large)
                    await held.enter_async_context(slots.all)
            except TimeoutError:
                ran = f"{CLIENT_REQUESTS} requests of this client are running; others had to wait too long."
                raise ClientBusy(f"{ran} Try again when they are done.") from None
            yield


class ConnectionTable:
    """Open connections by client. A client that opens too many loses the one that has waited
    longest for headers.
    """

    def __init__(self, each: int = CLIENT_CONNECTIONS, most: int = MOST_CONNECTIONS) -> None:
        self._each, self._most = each, most
        self._open: dict[str, dict[Any, None]] = {}  # in the order in which they came

    def add(self, host: str, connection: Any) -> bool:
        """Take a connection in; False where there is no room for it and none that may be closed."""
        own = self._open.get(client_key(host), {})
        if len(own) >= self._each and not self._close_one(own):
            return False
        if sum(map(len, self._open.values())) >= self._most:
            greediest_first = sorted(self._open.values(), key=len, reverse=True)
            if not any(self._close_one(others) for others in greediest_first):
                return False
        self._open.setdefault(client_key(host), {})[connection] = None
        return True

    def remove(self, host: str, connection: Any) -> None:
        """Forget a connection that is closed."""
        own = self._open.get(client_key(host), {})
        own.pop(connection, None)
        if not own:
            self._open.pop(client_key(host), None)

    def _close_one(self, connections: Iterable[Any]) -> bool:
        waiting = next((one for one in connections if one.awaits_headers), None)
        if waiting is None:
            return False
        waiting.give_up()
        return True


def make_protocol(table: ConnectionTable, header_s: float = HEADER_S) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a limit on the time for headers and on connections of a
    client.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class LimitedProtocol(H11Protocol):
        """One connection; a timer runs whenever it owes the rest of its headers."""

        _timer: asyncio.TimerHandle | None = None

        @property
        def awaits_headers(self) -> bool:
            return self.conn.their_state is h11.IDLE

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if table.add(self._host, self):
                self._watch()
            else:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            table.remove(self._host, self)
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def give_up(self) -> None:
            """Close the connection at once, whatever it still has to say."""
            table.remove(self._host, self)
            self.transport.abort()

        @property
        def _host(self) -> str:
            return self.client[0] if self.client else ""

        def _watch(self) -> None:
            if self.awaits_headers and self._timer is None:
                self._timer = self.loop.call_later(header_s, self.give_up)
            elif not self.awaits_headers and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return LimitedProtocol


if __name__ == "__main__":
    sys.exit(run_worker())
