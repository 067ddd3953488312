"""How much one client may take: slow headers, many connections, many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="no uvicorn: pip install 'wattcast[serve]'")

from wattcast.core.errors import BadInput
from wattcast.web.client_limits import (
    ClientBusy,
    ClientSlots,
    ConnectionTable,
    is_known_host,
    known_hosts,
    make_protocol,
    open_socket,
)

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def answer_hello(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
    )
    await send({"type": "http.response.body", "body": b"hello"})


@contextlib.asynccontextmanager
async def running_server(table: ConnectionTable, header_s: float) -> AsyncIterator[int]:
    listening = open_socket("127.0.0.1", 0)
    http = make_protocol(table, header_s)
    config = uvicorn.Config(
        answer_hello, http=http, lifespan="off", log_level="error", access_log=False
    )
    server = uvicorn.Server(config)
    with server.capture_signals():
        task = asyncio.ensure_future(server._serve([listening]))
        yield listening.getsockname()[1]
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def connected(
    port: int, data: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(-1), 60)
    return b""


def test_headers_that_never_end_lose_their_connection() -> None:
    """256 such connections denied service for as long as they were held."""

    async def run() -> None:
        async with running_server(ConnectionTable(), header_s=0.3) as port:
            async with connected(port, b"GET / HTTP/1.1\r\nHost: x\r\nX-More: ") as (reader, _):
                assert await read_to_end(reader) == b""
            async with connected(port, REQUEST) as (reader, _):
                assert (await read_to_end(reader)).endswith(b"hello")

    asyncio.run(run())


def test_the_second_request_of_a_connection_has_the_same_time() -> None:
    async def run() -> None:
        async with (
            running_server(ConnectionTable(), header_s=0.3) as port,
            connected(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, writer),
        ):
            await asyncio.wait_for(reader.readuntil(b"hello"), 60)
            writer.write(b"GET / HTTP/1.1\r\n")
            assert await read_to_end(reader) == b""

    asyncio.run(run())


def test_a_client_with_too_many_connections_loses_the_oldest_and_is_still_answered() -> None:
    async def run() -> None:
        async with (
            running_server(ConnectionTable(each=4), header_s=600.0) as port,
            contextlib.AsyncExitStack() as stack,
        ):
            slow = [
                await stack.enter_async_context(connected(port, b"GET / HTTP/1.1\r\n"))
                for _ in range(6)
            ]
            async with connected(port, REQUEST) as (reader, _):
                assert (await read_to_end(reader)).endswith(b"hello")
            for reader, _ in slow[:3]:
                assert await read_to_end(reader) == b""

    asyncio.run(run())


class Waiting:
    """A connection that owes its headers, or none."""

    def __init__(self, awaits_client: bool = True) -> None:
        self.awaits_client, self.closed = awaits_client, False

    def give_up(self) -> None:
        self.closed = True


def test_a_full_server_closes_a_connection_of_the_greediest_client() -> None:
    table = ConnectionTable(each=3, most=4)
    greedy, modest = [Waiting() for _ in range(3)], Waiting()
    assert table.add("10.0.0.2", modest)
    assert all(table.add("10.0.0.1", one) for one in greedy)
    assert table.add("10.0.0.3", Waiting())
    assert [one.closed for one in greedy] == [True, False, False]
    assert not modest.closed
    busy = ConnectionTable(each=1)
    assert busy.add("10.0.0.1", Waiting(awaits_client=False))
    assert not busy.add("10.0.0.1", Waiting())
    assert busy.add("10.0.0.2", Waiting())


def test_two_requests_of_a_client_run_and_large_ones_leave_room() -> None:
    async def run() -> None:
        slots = ClientSlots(wait_s=0.05)
        async with slots.running("10.0.0.1", large=True):
            with pytest.raises(ClientBusy, match="2 requests of this client"):
                async with slots.running("10.0.0.1", large=True):
                    pass
            async with (
                slots.running("10.0.0.1", large=False),
                slots.running("10.0.0.2", large=True),
            ):
                with pytest.raises(ClientBusy):
                    async with slots.running("10.0.0.1", large=False):
                        pass
        async with slots.running("10.0.0.1", large=True), slots.running("10.0.0.1", large=False):
            pass

    asyncio.run(run())


def test_a_server_answers_to_names_it_knows() -> None:
    with pytest.raises(BadInput, match="--allow-host"):
        known_hosts("0.0.0.0", [])
    hosts = known_hosts("0.0.0.0", ["Node7"])
    for given in ("node7:9835", "127.0.0.1", "[::1]:80", "0.0.0.0:1"):
        assert is_known_host([given], hosts)
    for given in ([], ["evil.example"], ["node7", "node7"], [""]):
        assert not is_known_host(given, hosts)
