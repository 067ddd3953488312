"""Limit how much one client may take: names, addresses, connections, and requests at once.

A client is an address (of IPv6 the network, since one machine has all of it). Behind a proxy it is
the address that the proxy names, where the server was told to trust that proxy. Whoever is slow or
asks for much waits behind its own requests, not in front of those of others: a full server closes
the connection that has waited longest for its client, whether for headers, for a body, or for an
answer to be read."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import sys
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from typing import Any
from weakref import WeakValueDictionary

from wattcast.core.errors import Refused, bad_value

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HEADER_S = 10.0  # for the headers of a request to arrive
UNREAD_S = 20.0  # that an answer may wait for a client that does not read it
MOST_CONNECTIONS = 1024  # of all clients
SPARE_FILES = 64  # beside connections: pipes of workers, the listening socket, files that are read
CLIENT_CONNECTIONS = 32  # five browsers open six each
CLIENT_REQUESTS = 2  # running; others of the client wait
SLOT_S = 30.0  # that a request waits for those of the same client
# warnings of the server that are written in a minute
LOG_LINES = 20
LOG_WINDOW_S = 60.0


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
            "--allow-host",
            "the name others will type, beside a --host that others reach",
            "none",
            "The server answers only to names it knows.",
        )
    here = f"[{host}]" if ":" in host else host
    return frozenset(host_name(name) for name in (*LOOPBACK, here, *allowed))


def is_known_host(given: Sequence[str], hosts: Iterable[str]) -> bool:
    """Tell whether a request's ``Host`` headers are one, and one of ours: no other site's name
    leads here.
    """
    return len(given) == 1 and host_name(given[0]) in hosts


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address.

    >>> names = ["127.0.0.1", "::1", "0.0.0.0", "localhost"]
    >>> tuple(is_loopback(name) for name in names)
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
        bound.listen(2048)  # whoever comes before the workers are ready waits, and is not refused
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


def raise_file_limit(wanted: int = 2 * MOST_CONNECTIONS) -> int:
    """Allow this process as many open files as its connections need; return how many connections
    that gives room for.

    A server that may not open another file cannot even turn somebody away.
    """
    try:
        import resource
    except ImportError:
        return MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(min(MOST_CONNECTIONS, soft - SPARE_FILES), 1)


class TrustedProxies:
    """Proxies whose word is taken for the address of the client behind them.

    >>> proxies = TrustedProxies(["10.0.0.0/8"])
    >>> proxies.find_client("10.0.0.1", ["203.0.113.9, 198.51.100.7, 10.0.0.2"])
    '198.51.100.7'
    >>> # not a proxy of ours: it may say anything
    >>> proxies.find_client("192.0.2.1", ["203.0.113.9"])
    '192.0.2.1'
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        try:
            self._networks = [ipaddress.ip_network(text, strict=False) for text in networks]
        except ValueError as error:
            expected = "an address or a network such as 10.0.0.0/8"
            raise bad_value("--trust-proxy", expected, str(error)) from None

    def trusts(self, host: str) -> bool:
        """Tell whether an address is one of a proxy."""
        if not self._networks:
            return False
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def find_client(
        self,
        peer: str,
        forwarded: Iterable[str],
    ) -> str:
        """Return the address of the client: the last that ``X-Forwarded-For`` names and no proxy of
        ours has.

        Each proxy appends the address it saw, so what stands further left was written by a client,
        who may write anything."""
        if not self.trusts(peer):
            return peer
        named = [part.strip() for line in forwarded for part in line.split(",")]
        for text in reversed(named):
            try:
                address = str(ipaddress.ip_address(text))
            except ValueError:
                return peer
            if not self.trusts(address):
                return address
        return peer


class ClientBusy(Exception):
    """Too many requests of one client run for another to begin."""


class _Slots:
    """The running requests of one client."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(CLIENT_REQUESTS)
        self.large = asyncio.Semaphore(CLIENT_REQUESTS - 1)


class ClientSlots:
    """Lets ``CLIENT_REQUESTS`` requests of each client run, all but one of them with a large
    body.
    """

    def __init__(self, wait_s: float = SLOT_S) -> None:
        self._wait_s = wait_s
        # an entry is gone with the client's last request
        self._clients: WeakValueDictionary[str, _Slots] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def running(
        self,
        host: str,
        large: bool,
    ) -> AsyncIterator[None]:
        """Wait until this request of a client may run; ClientBusy when that takes too long."""
        slots = self._clients.setdefault(client_key(host), _Slots())
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._wait_s):
                    if large:
                        await stack.enter_async_context(slots.large)
                    await stack.enter_async_context(slots.all)
            except TimeoutError:
                running = f"{CLIENT_REQUESTS} requests of this client are running"
                why = f"{running}; others had to wait too long. Try again when they are done."
                raise ClientBusy(why) from None
            yield


class ConnectionTable:
    """Open connections by client. Where there is no room, the one that has waited longest for its
    client goes.

    A client that opens too many loses one of its own. A full server closes one of the client with
    the most, else the oldest that waits: a request that is complete is answered, whoever else is
    slow."""

    def __init__(
        self,
        each: int = CLIENT_CONNECTIONS,
        most: int = MOST_CONNECTIONS,
        proxies: TrustedProxies | None = None,
    ) -> None:
        self._each = each
        self._most = most
        self._proxies = proxies or TrustedProxies()
        self._open: dict[str, dict[Any, None]] = {}  # by client, in the order in which they came
        self._all: dict[Any, None] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._all)

    def add(
        self,
        host: str,
        connection: Any,
    ) -> bool:
        """Take a connection in; False where there is no room for it and none that may be closed."""
        key = client_key(host)
        siblings = self._open.get(key, {})
        is_greedy = len(siblings) >= self._each and not self._proxies.trusts(host)
        if is_greedy and not self._close_one(siblings):
            return False
        if len(self._all) >= self._most:
            greediest = max(self._open.values(), key=len)
            has_room = len(greediest) > 1 and self._close_one(greediest)
            if not has_room and not self._close_one(self._all):
                return False
        self._open.setdefault(key, {})[connection] = None
        self._all[connection] = None
        return True

    def remove(
        self,
        host: str,
        connection: Any,
    ) -> None:
        """Forget a connection that is closed."""
        self._all.pop(connection, None)
        key = client_key(host)
        siblings = self._open.get(key, {})
        siblings.pop(connection, None)
        if not siblings:
            self._open.pop(key, None)

    def _close_one(self, connections: Iterable[Any]) -> bool:
        waiting = next((one for one in connections if one.awaits_client), None)
        if waiting is None:
            return False
        waiting.give_up()
        return True


def make_protocol(
    table: ConnectionTable,
    header_s: float = HEADER_S,
    unread_s: float = UNREAD_S,
) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits on connections, and on the time a client lets it
    wait.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class LimitedProtocol(H11Protocol):
        """One connection; a timer runs whenever it owes the rest of its headers or does not read
        its answer.
        """

        _header_timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None

        @property
        def awaits_client(self) -> bool:
            """Whether the next step is the client's: headers, a body, or room for the answer."""
            return (
                self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self._unread_timer is not None
            )

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if table.add(self._host, self):
                self._watch_headers()
            else:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            table.remove(self._host, self)
            for timer in (self._header_timer, self._unread_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_headers()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_headers()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._unread_timer is None:
                self._unread_timer = self.loop.call_later(unread_s, self.give_up)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

        def give_up(self) -> None:
            """Close the connection at once, whatever it still has to say."""
            table.remove(self._host, self)
            self.transport.abort()

        @property
        def _host(self) -> str:
            return self.client[0] if self.client else ""

        def _watch_headers(self) -> None:
            awaits_headers = self.conn.their_state is h11.IDLE
            if awaits_headers and self._header_timer is None:
                self._header_timer = self.loop.call_later(header_s, self.give_up)
            elif not awaits_headers and self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return LimitedProtocol


class LogLimit(logging.Filter):
    """Lets so many lines of a logger through in a while, and then says how many it left out.

    Whoever sends nonsense decides how often the server has something to say about it; the disk
    under its log must not depend on that."""

    def __init__(
        self,
        lines: int = LOG_LINES,
        window_s: float = LOG_WINDOW_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._lines = lines
        self._window_s = window_s
        self._now = now
        self._began_s = now()
        self._written = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line is written."""
        if self._now() - self._began_s >= self._window_s:
            if self._left_out:
                record.msg = f"{record.getMessage()} ({self._left_out} more lines were not written)"
                record.args = ()
            self._began_s = self._now()
            self._written = 0
            self._left_out = 0
        self._written += 1
        if self._written > self._lines:
            self._left_out += 1
            return False
        return True
