"""Two thousand clients that take their time, in a process of their own.

    python tests/web/slow_clients.py PORT COUNT SECONDS

Each has an address of its own in 127.0.0.0/8 and is of one of six kinds. One that is turned away
comes back a little later."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time

HEAD = b"POST /api/room HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PAUSE_S = 1.0  # between two bytes


async def drip(writer: asyncio.StreamWriter, first: bytes, piece: bytes) -> None:
    """Send a beginning, then a piece now and then, for ever."""
    writer.write(first)
    while True:
        await writer.drain()
        await asyncio.sleep(PAUSE_S)
        writer.write(piece)


async def drip_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(writer, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-More: ", b"x")


async def drip_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(writer, HEAD + b"Content-Length: 60000\r\n\r\n{", b" ")


async def drip_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(writer, HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n")


async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for large answers one after another, and read none of them."""
    await drip(writer, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8, b"")


async def stay_idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect, and say nothing until the server hangs up."""
    await reader.read()


async def hold_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Watch the live view at its slowest, or come back for it again and again."""
    writer.write(b"GET /api/live?speed=0.1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while await reader.read(64):
        await asyncio.sleep(PAUSE_S)


KINDS = (drip_headers, drip_body, drip_chunks, never_read, stay_idle, hold_stream)


async def act(number: int, port: int, end_s: float) -> None:
    """Be one slow client until the end."""
    chance = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    address = f"127.{1 + number // 60_000}.{number // 250 % 240}.{1 + number % 250}"
    await asyncio.sleep(chance.random() * 3.0)
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), limit=1024),
                30.0,
            )
            try:
                await asyncio.wait_for(kind(reader, writer), max(end_s - time.monotonic(), 0.1))
            finally:
                writer.transport.abort()
        await asyncio.sleep(1.0 + chance.random())


async def main(port: int, count: int, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    await asyncio.gather(
        *(act(number, port, end_s) for number in itertools.islice(itertools.count(), count))
    )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
