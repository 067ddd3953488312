"""Load on ``wattcast serve``: many users with the page's own requests, over loopback.

    python benchmarks/load_serve.py --users 50 --seconds 60
    python benchmarks/load_serve.py --users 5 --seconds 30 --attack

A user opens the page as a browser does (its files over six connections, the first screen's
prediction, the catalogue, the memory), then changes something once a second: an example, a GPU, an
amount, a clock. Each change asks for a view and, a quarter of a second later, for the memory;
amounts and clocks are ones that nobody asked before. Prints the time to the first answer (from the
first byte asked to the prediction there); median, 99th percentile and failures of what follows; the
processor time of server and workers in a second of load, which is the cores that are needed; and
the processor time of the clients, who share the machine. Exit code 1 when a request failed. With
``--attack``, eight clients upload long lists of operators without a pause, and 256 connections send
headers and never end them, all from addresses of their own on loopback."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIRST = {
    "gpu": "h200",
    "model": "llama3-8b",
    "batch": 16,
    "seq": 1024,
    "tokens": 256,
    "phase": "generate",
    "stack": "engine",
}
PRESETS: list[dict[str, Any]] = [
    FIRST,
    FIRST | {"model": "qwen2.5-7b", "batch": 4, "seq": 16384, "tokens": 512},
    FIRST | {"batch": 256, "seq": 512},
    {"gpu": "h200", "model": "vit-large", "batch": 64},
]
MODELS = "llama3-8b qwen2-7b mistral-7b llama3-70b mixtral-8x7b opt-6.7b".split()
GPUS = "h200 h100-sxm a100-sxm-80gb l40s a10 b200".split()
MONEY = {"price_per_h": 2}
ROOM_AFTER_S = 0.25  # the page waits so long for the next change before it asks about memory
SETTLE_S = 3.0  # for what attackers asked last, before a lone user's requests are timed again
CONNECTIONS = 6  # of a browser to one server
ANSWER_S = 60.0  # after which an answer counts as lost

Times = dict[str, list[tuple[float, int]]]  # seconds and status by kind of request


class Client:
    """A browser: up to six connections that stay open, each with one request at a time."""

    def __init__(self, port: int, address: str, found: Times) -> None:
        self._port, self._address, self._found = port, address, found
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._made: list[asyncio.StreamWriter] = []
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._known: set[str] = set()

    async def ask_once(self, kind: str, path: str, plain: object) -> None:
        """Ask as the page does, which remembers its answers."""
        if (key := path + json.dumps(plain)) not in self._known:
            self._known.add(key)
            await self.ask(kind, path, plain)

    async def ask(self, kind: str, path: str, plain: object = None) -> bytes:
        """Ask, note how long it took, and return the body; a connection that the server closed is
        opened again.
        """
        began_s = time.perf_counter()
        body = b"" if plain is None else json.dumps(plain, separators=(",", ":")).encode()
        head = f"{'GET' if plain is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip\r\n"
        if plain is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        status, answer = 0, b""
        async with self._places:
            for fresh in (False, True):
                try:
                    pair = self._free.pop() if self._free and not fresh else await self._connect()
                    pair[1].write(head.encode() + b"\r\n" + body)
                    async with asyncio.timeout(ANSWER_S):
                        status, answer, keep = await read_answer(pair[0])
                except (
                    OSError,
                    asyncio.IncompleteReadError,
                ):  # an OSError where no answer came in time too
                    continue
                if keep:
                    self._free.append(pair)
                else:
                    pair[1].close()
                break
        self._found[kind].append((time.perf_counter() - began_s, status))
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pair = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(self._address, 0))
        self._made.append(pair[1])
        return pair

    def close(self) -> None:
        """Close all connections."""
        for writer in self._made:  # those of requests that failed or were cancelled too
            writer.close()
        self._free.clear()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Return status, body and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None, head
    return (
        int(head.split(b" ", 2)[1]),
        await reader.readexactly(int(length[1])),
        b"connection: close" not in head,
    )


def page_files() -> list[str]:
    """Paths of the files that a browser loads for the page."""
    page = (
        Path(__file__).resolve().parents[1] / "src" / "wattcast" / "web" / "assets" / "index.html"
    )
    return sorted(set(re.findall(r"/assets/[\w.]+", page.read_text())))


async def open_page(client: Client) -> None:
    """Load the page and its files, ask for the first screen, then for what comes below it."""
    began_s = time.perf_counter()
    await client.ask("file", "/")
    await asyncio.gather(*(client.ask("file", path) for path in page_files()))

    async def first_answer() -> None:
        await client.ask("first view", "/api/view", FIRST | MONEY)
        client._found["first screen"].append(
            (time.perf_counter() - began_s, client._found["first view"][-1][1])
        )
        await asyncio.sleep(ROOM_AFTER_S)
        await client.ask_once("room", "/api/room", FIRST)

    await asyncio.gather(first_answer(), client.ask("catalogue", "/api/catalogue"))
    await client.ask("file", "/api/live/about")


def changes(rng: random.Random) -> Iterator[dict[str, Any]]:
    """What a user looks at, one change after another."""
    asked = dict(FIRST)
    while True:
        kind = rng.choice(
            ("preset", "gpu", "model", "amount", "amount", "amount", "clock", "clock")
        )
        language = "seq" in asked
        if kind == "preset":
            asked = rng.choice(PRESETS) | {"gpu": asked["gpu"]}
        elif kind == "gpu":
            asked = {k: v for k, v in asked.items() if k != "clock_hz"} | {"gpu": rng.choice(GPUS)}
        elif kind == "model" and language:
            asked = asked | {
                "model": rng.choice(MODELS),
                "seq": min(asked["seq"], 1500),
                "tokens": 256,
            }
        elif kind == "amount":
            asked = asked | {"batch": rng.randint(1, 256)}
            if language and rng.random() < 0.5:
                asked = asked | {"seq": rng.randint(64, 1500)}
        elif kind == "clock":
            asked = asked | {"clock_hz": rng.randint(1000, 1400) * 1e6}
        yield asked


async def use_page(client: Client, seconds: float, rng: random.Random) -> None:
    """Open the page at a moment of one's own, then change something once a second."""
    await asyncio.sleep(rng.random())
    end_s = time.perf_counter() + seconds
    await open_page(client)
    for asked in changes(rng):
        if time.perf_counter() > end_s:
            break
        began_s = time.perf_counter()
        await client.ask_once("view", "/api/view", asked | MONEY)
        await asyncio.sleep(ROOM_AFTER_S)
        await client.ask_once(
            "room", "/api/room", {k: v for k, v in asked.items() if k != "clock_hz"}
        )
        await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - began_s)))
    client.close()


async def upload(port: int, number: int) -> None:
    """Send 20,000 distinct operators, which is what one upload may hold, again and again."""
    ops = [{"op": "linear", "m": 16 + number + 8 * i, "n": 4096, "k": 4096} for i in range(20_000)]
    client = Client(port, f"127.0.0.{2 + number}", defaultdict(list))
    content = {"name": "x", "ops": ops}
    with contextlib.closing(client):
        while True:
            await client.ask(
                "upload", "/api/view", {"gpu": "h200", "file": {"name": "w", "content": content}}
            )
            await asyncio.sleep(0.05)


async def drip(port: int, number: int) -> None:
    """Send a header every half second and never the last one; come back when the server hangs up."""
    while True:
        with contextlib.suppress(OSError):
            address = (f"127.0.0.{10 + number // 32}", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address)
            with contextlib.closing(writer):
                writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                while not reader.at_eof():
                    writer.write(b"X-More: 1\r\n")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(
                            0.5
                        ):  # wait_for of Python 3.11 may lose a cancellation
                            await reader.read(1)
        await asyncio.sleep(0.5)


async def run(port: int, users: int, seconds: float, attack: bool, server: int) -> dict[str, float]:
    """The figures of a whole run."""
    alone: Times = defaultdict(list)
    first = Client(port, "127.0.0.1", alone)
    await open_page(first)
    for asked in itertools.islice(changes(random.Random(1)), 40):  # workers meet the models
        await first.ask("warm", "/api/view", asked)
    for asked in itertools.islice(changes(random.Random(2)), 20):
        await first.ask("before", "/api/view", asked)
    first.close()
    attackers = (
        [upload(port, i) for i in range(8)] + [drip(port, i) for i in range(256)] if attack else []
    )
    tasks = [asyncio.ensure_future(attacker) for attacker in attackers]
    found: Times = defaultdict(list)
    spent_s, own_s, began_s = tree_s(server), time.process_time(), time.perf_counter()
    clients = [Client(port, f"127.0.1.{1 + i % 250}", found) for i in range(users)]
    await asyncio.gather(
        *(use_page(client, seconds, random.Random(100 + i)) for i, client in enumerate(clients))
    )
    lasted_s = time.perf_counter() - began_s
    cores = {
        "server_cores": (tree_s(server) - spent_s) / lasted_s,
        "client_cores": (time.process_time() - own_s) / lasted_s,
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)
    last = Client(port, "127.0.0.1", alone)
    for asked in itertools.islice(changes(random.Random(3)), 20):
        await last.ask("after", "/api/view", asked)
    last.close()
    failed = sum(status != 200 for kind in found.values() for _, status in kind)
    asked_count = sum(len(times) for kind, times in found.items() if kind != "first screen")
    figures = {
        "requests": asked_count,
        "failed": failed,
        "alone_ms": 1e3
        * max(statistics.median(t for t, _ in alone[when]) for when in ("before", "after")),
    }
    return (
        figures
        | cores
        | {
            k: v
            for kind in ("first screen", "view", "room", "file")
            for k, v in spread(kind, found[kind])
        }
    )


def spread(kind: str, times: list[tuple[float, int]]) -> list[tuple[str, float]]:
    """Median, 99th percentile and worst of a kind of request, in milliseconds."""
    ordered, name = sorted(t for t, _ in times), kind.replace(" ", "_")
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    figures = {"median": statistics.median(ordered), "p99": p99, "worst": ordered[-1]}
    return [(f"{name}_{word}_ms", 1e3 * value) for word, value in figures.items()]


def tree_s(process: int) -> float:
    """Processor time so far of a process and its children (Linux)."""
    tick = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if process in (int(stat.parent.name), int(fields[1])):
                total += (int(fields[11]) + int(fields[12])) / tick
    return total


def measure(users: int, seconds: float, workers: int, attack: bool = False) -> dict[str, float]:
    """Start a server, load it, end it."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    command = [
        sys.executable,
        "-m",
        "wattcast",
        "serve",
        "--port",
        "0",
        "--live",
        "replay",
        "--workers",
        str(workers),
    ]
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source}
    )
    try:
        assert server.stderr is not None
        said = server.stderr.readline()
        port = re.search(r":(\d+)/", said)
        assert port is not None, said
        return asyncio.run(run(int(port[1]), users, seconds, attack, server.pid))
    finally:
        server.terminate()
        server.communicate(timeout=60)  # which closes what it was heard through


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--attack", action="store_true")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    found = measure(options.users, options.seconds, options.workers, options.attack)
    loads = {"load_before": before, "load_after": os.getloadavg()[0]}
    print(json.dumps({name: round(value, 2) for name, value in (found | loads).items()}, indent=1))
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
