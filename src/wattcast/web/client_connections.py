"""Who may connect, and how much one client may take: hosts, connections, headers and running requests.

A client is an address (of IPv6 the network, since one machine has all of it). Whoever is slow or asks for much waits
behind its own requests, not in front of those of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from wattcast.core.errors import Refused, bad_value

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HEADER_S = 10.0  # for the headers of a request to arrive
MOST_CONNECTIONS = 1024  # of all clients
CLIENT_CONNECTIONS = 32  # five browsers open six each; a proxy in front of many shares its own
CLIENT_REQUESTS = 2  # running; others of the client wait
SLOT_S = 30.0  # that a request waits for those of the same client
LARGE_BYTE = 64 << 10  # a larger body leaves one of the client's requests to small ones


def host_name(host: str) -> str:
    """Return the host of ``host:port``, ``[::1]:port`` or ``host``, in lower case."""
    host = host.strip().lower()
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def known_hosts(host: str, allowed: Sequence[str]) -> frozenset[str]:
    """Return the names that a server on ``host`` answers to; one that others reach needs ``--allow-host``."""
    if not is_loopback(host) and not allowed:
        raise bad_value(
            "--allow-host", "the name others will type, beside a --host that others reach", "none",
            "The server answers only to names it knows.",
        )  # fmt: skip
    return frozenset(host_name(name) for name in (*LOOPBACK, f"[{host}]" if ":" in host else host, *allowed))


def is_known_host(given: Sequence[str], hosts: Iterable[str]) -> bool:
    """Tell whether a request's ``Host`` headers are one, and one of ours: no other site's name leads here."""
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
    """Return a bound socket, or raise an error that says what is in the way; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(512)  # whoever comes before the workers are ready waits, and is not refused
    except (OSError, OverflowError) as error:
        bound.close()
        raise Refused(f"{host}:{port} cannot be served on ({error}). Choose another --port.") from None
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
        self._clients: WeakValueDictionary[str, _Slots] = WeakValueDictionary()  # gone with their last request

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
    """Open connections by client. A client that opens too many loses the one that has waited longest for headers."""

    def __init__(self, each: int = CLIENT_CONNECTIONS, most: int = MOST_CONNECTIONS) -> None:
        self._each, self._most = each, most
        self._open: dict[str, dict[Any, None]] = {}  # in the order in which they came
        self._count = 0

    def add(self, host: str, connection: Any) -> bool:
        """Take a connection in; False where there is no room for it and none that may be closed."""
        own = self._open.get(client_key(host), {})
        if len(own) >= self._each and not self._close_one(own):
            return False
        greediest_first = sorted(self._open.values(), key=len, reverse=True) if self._count >= self._most else []
        if greediest_first and not any(self._close_one(others) for others in greediest_first):
            return False
        self._open.setdefault(client_key(host), {})[connection] = None
        self._count += 1
        return True

    def remove(self, host: str, connection: Any) -> None:
        """Forget a connection that is closed."""
        own = self._open.get(client_key(host), {})
        if connection in own:
            del own[connection]
            self._count -= 1
            if not own:
                del self._open[client_key(host)]

    def _close_one(self, connections: Iterable[Any]) -> bool:
        waiting = next((one for one in connections if one.awaits_headers), None)
        if waiting is None:
            return False
        waiting.give_up()
        return True


def make_protocol(table: ConnectionTable, header_s: float = HEADER_S) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a limit on the time for headers and on connections of a client."""
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
