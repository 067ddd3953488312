"""Clients that leave, hide behind a proxy, or send what two servers would read differently."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="no uvicorn: pip install 'wattcast[serve]'")

from serving import Server
from wattcast.core.errors import BadInput
from wattcast.web.answers import Answer
from wattcast.web.client_limits import ConnectionTable, LogLimit, TrustedProxies
from wattcast.web.http_app import make_app
from wattcast.web.live_stream import FeedWatchers, TooManyStreams, recorded_feed
from wattcast.web.worker_pool import MOST_MEMORY_BYTE, WorkerPool

HEAVY_OPERATORS = [{"op": "linear", "m": 16 + i, "n": 4096, "k": 4096} for i in range(15_000)]
HEAVY = {"gpu": "h200", "file": {"name": "w", "content": {"name": "x", "ops": HEAVY_OPERATORS}}}
CASE = {"gpu": "h200", "model": "gpt2", "seq": 128}


def test_work_ends_within_a_second_after_its_client_left() -> None:
    """Two requests of clients that had left held both workers until their time limit."""
    heavy = json.dumps(HEAVY).encode()

    async def run() -> None:
        async with WorkerPool(1, limit_s=600.0) as pool:
            (process,) = pool._all
            asking = asyncio.ensure_future(pool.ask("view", heavy))
            await _let_work(process.pid)
            began_s = time.monotonic()
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            while pool.stopped + pool.ended == 0:
                await asyncio.sleep(0.01)
            assert time.monotonic() - began_s < 1.0
            assert (await pool.ask("room", json.dumps(CASE).encode())).status == 200

    asyncio.run(run())


async def _let_work(pid: int) -> None:
    """Wait until a process has used a fifth of a second of a processor."""
    begin_s = _read_processor_s(pid)
    while _read_processor_s(pid) < begin_s + 0.2:
        await asyncio.sleep(0.02)


def _read_processor_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_worker_whose_request_was_stopped_answers_the_next() -> None:
    """On a busy machine a worker that was replaced is not ready for long: a request that ended
    before then was never with a worker.
    """

    async def run() -> None:
        async with WorkerPool(1, limit_s=600.0) as pool:
            for _ in range(3):
                while pool._free.empty():
                    await asyncio.sleep(0.01)
                (process,) = pool._all
                asking = asyncio.ensure_future(pool.ask("view", json.dumps(HEAVY).encode()))
                await _let_work(process.pid)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            answer = await pool.ask("view", json.dumps(CASE).encode())
            assert answer.status == 200
            assert pool.stopped + pool.ended == 3

    asyncio.run(run())


def test_a_client_that_leaves_cancels_its_request() -> None:
    """The server went on with a request after its client had closed the connection."""

    async def run() -> None:
        cancelled, asked = asyncio.Event(), asyncio.Event()

        class Endless(WorkerPool):
            async def ask(self, kind: str, body: bytes) -> Answer:
                asked.set()
                try:
                    await asyncio.sleep(600.0)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
                raise AssertionError

        guard = make_app(Endless(), recorded_feed())
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asked.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            assert message

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/view",
            "headers": headers,
            "query_string": b"",
        }
        await asyncio.wait_for(guard(scope, receive, send), 20.0)
        assert cancelled.is_set()

    asyncio.run(run())


def test_a_worker_has_a_memory_limit() -> None:
    """A request that took 24 GB took them from everybody on the machine."""

    async def run() -> None:
        async with WorkerPool(1) as pool:
            (process,) = pool._all
            with open(f"/proc/{process.pid}/limits") as stream:
                limits = stream.read()
            assert str(MOST_MEMORY_BYTE) in limits
            with open(f"/proc/{process.pid}/status") as stream:
                peak = next(line for line in stream if line.startswith("VmPeak"))
            assert int(peak.split()[1]) * 1024 < 0.75 * MOST_MEMORY_BYTE

    if not os.path.isdir("/proc/self"):
        pytest.skip("no /proc on this platform")
    asyncio.run(run())


def test_the_client_behind_a_trusted_proxy_is_the_one_that_counts() -> None:
    """Behind a proxy all users counted as one, and shared two requests and 32 connections."""
    proxies = TrustedProxies(["127.0.0.1", "10.0.0.0/8", "::1"])
    assert proxies.find_client("127.0.0.1", ["203.0.113.9"]) == "203.0.113.9"
    assert proxies.find_client("127.0.0.1", ["1.2.3.4, 203.0.113.9", "10.1.1.1"]) == "203.0.113.9"
    assert proxies.find_client("127.0.0.1", []) == "127.0.0.1"
    assert proxies.find_client("127.0.0.1", ["nonsense"]) == "127.0.0.1"
    assert proxies.find_client("192.0.2.7", ["203.0.113.9"]) == "192.0.2.7", (
        "anybody may write the header"
    )
    assert TrustedProxies().find_client("127.0.0.1", ["203.0.113.9"]) == "127.0.0.1"
    with pytest.raises(BadInput, match="--trust-proxy"):
        TrustedProxies(["proxy.example"])


class Busy:
    """A connection that is being answered."""

    awaits_client = False


def test_a_trusted_proxy_may_open_more_connections_than_a_client() -> None:
    table = ConnectionTable(each=2, most=8, proxies=TrustedProxies(["10.0.0.1"]))
    assert all(table.add("10.0.0.1", Busy()) for _ in range(5))
    assert [table.add("10.0.0.2", Busy()) for _ in range(3)] == [True, True, False]
    assert len(table) == 7


class Slow:
    """A connection whose client owes the rest of its request."""

    def __init__(self, table: ConnectionTable, host: str) -> None:
        self.table, self.host, self.awaits_client, self.closed = table, host, True, False

    def give_up(self) -> None:
        self.table.remove(self.host, self)
        self.closed = True


def test_a_full_server_closes_the_connection_that_waits_longest() -> None:
    """1,100 connections that dripped bodies from many addresses made 114 of 120 others fail."""
    table = ConnectionTable(each=4, most=50)
    slow = [Slow(table, f"127.0.{i // 250}.{i % 250 + 1}") for i in range(50)]
    assert all(table.add(one.host, one) for one in slow)
    slow[0].awaits_client = False  # complete, and being answered
    assert table.add("192.0.2.1", Busy())
    assert [one.closed for one in slow[:4]] == [False, True, False, False]
    assert len(table) == 50


def _ask_raw(server: Server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
        return answer


def test_a_length_said_in_two_ways_is_refused(server: Server) -> None:
    """Of Content-Length and Transfer-Encoding one was believed; a proxy in front may believe the
    other.
    """
    head = b"POST /api/room HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    both = head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = _ask_raw(server, both)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answer.lower()


def test_head_is_answered_like_get_without_a_body(server: Server) -> None:
    """HEAD gave 405; monitors and link checkers ask so."""
    for path in (
        "/",
        "/assets/app.js",
        "/api/health",
        "/api/catalogue",
        "/api/live",
        "/openapi.json",
        "/nothing",
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert answer.status == (404 if path == "/nothing" else 200), path
        assert answer.read() == b""
        connection.close()


def test_one_client_does_not_hold_all_live_streams() -> None:
    """One client held all eight live streams for an hour."""
    watchers = FeedWatchers(recorded_feed(), most=3, secure_s=0.0)
    first = watchers.begin("a")
    watchers.begin("a")
    with pytest.raises(TooManyStreams, match="this client"):
        watchers.begin("a")
    watchers.begin("b")
    watchers.begin("c")
    assert first.must_end.is_set(), "the oldest makes room"
    patient = FeedWatchers(recorded_feed(), most=1, secure_s=600.0)
    patient.begin("a")
    with pytest.raises(TooManyStreams, match="as many are watching"):
        patient.begin("b")


def test_a_stream_that_must_end_ends() -> None:
    async def run() -> None:
        watchers = FeedWatchers(recorded_feed(), most=1, secure_s=0.0)
        place = watchers.begin("a")
        stream: AsyncIterator[bytes] = watchers.events(0.1, None, place)
        assert b"event: about" in await anext(stream)
        watchers.begin("b")
        rest = [event async for event in stream]
        assert rest[-1].startswith(b"event: end")
        assert watchers.now == 1

    asyncio.run(run())


def test_refused_requests_are_logged_a_few_times_a_minute() -> None:
    """Every malformed request wrote a line: a client decided how fast the disk filled."""
    now_s = 0.0
    limit = LogLimit(lines=3, window_s=60.0, now=lambda: now_s)
    lines = [
        logging.LogRecord("x", logging.WARNING, "", 1, "Invalid HTTP request", (), None)
        for _ in range(12)
    ]
    assert [limit.filter(line) for line in lines[:11]] == [True] * 3 + [False] * 8
    now_s = 61.0
    assert limit.filter(lines[11])
    assert "8 more lines were not written" in lines[11].getMessage()
