"""Load on ``wattcast serve``: many users, one request a second each, over loopback.

    python benchmarks/load_serve.py --users 50 --seconds 60
    python benchmarks/load_serve.py --users 5 --seconds 30 --attack

Every request is a configuration that was not asked before (model, GPU, batch, sequence, clock differ), as when people
move sliders. Prints the median, the 99th percentile, failures, and both over the time of a lone request, which says
how much is waiting; and the processor time of server and workers a request, start included, which a busy machine
changes little: times the requests a second it is the cores that are needed. Exit code 1 when a request failed.
With ``--attack``, eight clients upload long lists of operators without a pause, and 256 connections send their
headers line by line and never end them, all from addresses of their own on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = "llama3-8b gpt2 bert-large qwen2-7b mistral-7b vit-base resnet50 opt-6.7b".split()
GPUS = "h200 h100-sxm a100-sxm-80gb l40s a10".split()


def configuration(rng: random.Random) -> dict[str, Any]:
    """One that nobody asked for yet, almost surely."""
    model = rng.choice(MODELS)
    asked: dict[str, Any] = {"gpu": rng.choice(GPUS), "model": model, "batch": rng.randint(1, 64)}
    if model not in ("vit-base", "resnet50"):
        asked["seq"] = rng.randint(16, 64) * 16 if model == "bert-large" else rng.randint(64, 4096)
    if model == "bert-large":
        asked["seq"] = min(asked["seq"], 512)
    if model == "gpt2":
        asked["seq"] = min(asked["seq"], 1024)
    asked["clock_hz"] = float(rng.randint(1000, 1400) * 1_000_000)
    return asked


async def request(port: int, asked: dict[str, Any]) -> tuple[float, int]:
    """Seconds and status of one request on a connection of its own."""
    body = json.dumps(asked).encode()
    head = (
        f"POST /api/view HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    await writer.drain()
    answer = await reader.read(-1)
    took_s = time.perf_counter() - began_s
    writer.close()
    return took_s, int(answer.split(b" ", 2)[1]) if answer else 0


async def user(port: int, seconds: float, rng: random.Random, found: list[tuple[float, int]]) -> None:
    """One request a second, from a moment of the user's own."""
    await asyncio.sleep(rng.random())
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        try:
            found.append(await request(port, configuration(rng)))
        except OSError:
            found.append((time.perf_counter() - began_s, 0))
        await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - began_s)))


async def upload(port: int, client: int) -> None:
    """Send 20,000 distinct operators, which is what one upload may hold, again and again."""
    ops = [{"op": "linear", "m": 16 + client + 8 * i, "n": 4096, "k": 4096} for i in range(20_000)]
    body = json.dumps({"gpu": "h200", "file": {"name": "w", "content": {"name": "x", "ops": ops}}}).encode()
    head = (
        f"POST /api/view HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{2 + client}", 0))
            writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
            await reader.read(-1)
            writer.close()
        await asyncio.sleep(0.05)


async def drip(port: int, client: int) -> None:
    """Send a header every half second and never the last one; come back when the server hangs up."""
    while True:
        with contextlib.suppress(OSError):
            address = (f"127.0.0.{10 + client // 32}", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address)
            writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            while not reader.at_eof():
                writer.write(b"X-More: 1\r\n")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.5)
            writer.close()
        await asyncio.sleep(0.5)


async def run(port: int, users: int, seconds: float, attack: bool = False) -> dict[str, float]:
    """The figures of a whole run."""
    rng = random.Random(1)
    for _ in range(20):  # workers meet every model once
        await request(port, configuration(rng))
    alone = statistics.median([(await request(port, configuration(rng)))[0] for _ in range(20)])
    found: list[tuple[float, int]] = []
    attackers = [upload(port, i) for i in range(8)] + [drip(port, i) for i in range(256)] if attack else []
    tasks = [asyncio.ensure_future(attacker) for attacker in attackers]
    await asyncio.gather(*(user(port, seconds, random.Random(100 + i), found) for i in range(users)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    times = sorted(t for t, _ in found)
    median, p99 = statistics.median(times), times[int(0.99 * (len(times) - 1))]
    return {
        "requests": len(found),
        "failed": sum(status != 200 for _, status in found),
        "alone_ms": 1e3 * alone,
        "median_ms": 1e3 * median,
        "p99_ms": 1e3 * p99,
        "worst_ms": 1e3 * times[-1],
        "median_over_alone": median / alone,
        "p99_over_alone": p99 / alone,
    }


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
    before_s = processor_s()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source})
    try:
        assert server.stderr is not None
        said = server.stderr.readline()
        port = re.search(r":(\d+)/", said)
        assert port is not None, said
        found = asyncio.run(run(int(port[1]), users, seconds, attack))
    finally:
        server.terminate()
        server.communicate(timeout=60)  # which closes what it was heard through
    each_s = (processor_s() - before_s) / found["requests"]
    return found | {"processor_ms": 1e3 * each_s, "cores_needed": users * each_s}


def processor_s() -> float:
    """Processor time of all processes this one started and saw end, and theirs."""
    spent = os.times()
    return spent.children_user + spent.children_system


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--attack", action="store_true")
    options = parser.parse_args()
    found = measure(options.users, options.seconds, options.workers, options.attack)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(json.dumps({name: round(value, 2) for name, value in found.items()} | {"load_after": round(load, 2)}))
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
