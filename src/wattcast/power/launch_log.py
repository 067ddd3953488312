"""Launches and counters from files: profiler traces and Nsight Compute exports, to estimate a program's power.

A PyTorch profiler trace (``export_chrome_trace``, gzipped or not) tells when each kernel ran; an export of
``ncu --csv`` tells what one launch of it counts. Both name the kernel and its launch configuration, which is
what joins them [Stokke2016, figure 7].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wattcast.activity.profiled import read_ncu_launches
from wattcast.errors import bad_value
from wattcast.files import from_json, read_bytes, unzipped
from wattcast.power.launches import CounterBook, Launch, LaunchKey, load

MAX_TRACE_BYTE = 512 << 20


@dataclass(frozen=True)
class LaunchLog:
    """Launches of a program in order of their start; ``epoch_s`` is the Unix time that starts count from."""

    launches: tuple[Launch, ...]
    epoch_s: float | None  # None where the trace does not say

    @property
    def span_s(self) -> tuple[float, float]:
        """First start and last end, on the trace's own clock."""
        return self.launches[0].start_s, max(x.start_s + (x.duration_s or 0.0) for x in self.launches)


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]
    baseTimeNanoseconds: int | None = None


def read_launches(path: Path) -> LaunchLog:
    """Kernels of a profiler trace. Copies and fills have no counters of their own and are left out."""
    data = unzipped(read_bytes(path, MAX_TRACE_BYTE), path.name, MAX_TRACE_BYTE)
    trace = from_json(data, _Trace, path.name)
    kernels = [e for e in trace.traceEvents if e.ph == "X" and e.cat == "kernel" and e.dur > 0]
    if not kernels:
        seen = sorted({e.cat for e in trace.traceEvents if e.cat})[:6]
        raise bad_value(
            path.name, "kernels (events of category kernel)", ", ".join(seen) or "none", "Profile CUDA activity too."
        )
    launches = [Launch(_key(e, path.name), 1e-6 * e.ts, 1e-6 * e.dur) for e in kernels]
    launches.sort(key=lambda launch: launch.start_s)
    epoch_s = None if trace.baseTimeNanoseconds is None else 1e-9 * trace.baseTimeNanoseconds
    return LaunchLog(tuple(launches), epoch_s)


def read_book(path: Path, sm_count: float | None = None) -> CounterBook:
    """A counter book (JSON, :func:`wattcast.power.launches.save`) or an export of ``ncu --csv``."""
    if path.suffix == ".json":
        return _normal(load(path))
    book = CounterBook()
    for launch, counts in read_ncu_launches(path, sm_count):
        if len(launch.grid) != 3 or len(launch.block) != 3:
            raise bad_value(
                path.name, "columns Grid Size and Block Size", "none", "Export with ncu --csv --page raw."
            )
        book = book.with_pass(_named(launch.kernel, launch.grid, launch.block), counts)
    return book


def plain_name(kernel: str) -> str:
    """A kernel's name without the marks that tools differ in: spaces, return type, parameters.

    >>> plain_name("void at::native::add<float, 4>(int, float*)")
    'at::native::add<float,4>'
    >>> plain_name("dct8x8")
    'dct8x8'
    """
    name = re.sub(r"\(anonymous namespace\)::", "", kernel.strip())
    depth, end = 0, len(name)
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = place
            break
    return re.sub(r"\s+", "", name[:end].removeprefix("void "))


def _normal(book: CounterBook) -> CounterBook:
    """Keys as the traces have them: dynamic shared memory is in few of the tools' exports, and left out."""
    keys = {key: LaunchKey(plain_name(key.kernel), key.grid, key.block) for key in book.count}
    return CounterBook({keys[k]: v for k, v in book.count.items()}, {keys[k]: v for k, v in book.passes.items()})


def _key(event: _Event, where: str) -> LaunchKey:
    grid, block = (tuple(event.args.get(name, ())) for name in ("grid", "block"))
    if len(grid) != 3 or len(block) != 3 or not all(isinstance(n, int) for n in (*grid, *block)):
        raise bad_value(f"{where}: {event.name}", "grid and block of three numbers each", f"{grid} and {block}")
    return _named(event.name, grid, block)


def _named(kernel: str, grid: tuple[int, ...], block: tuple[int, ...]) -> LaunchKey:
    return LaunchKey(plain_name(kernel), (grid[0], grid[1], grid[2]), (block[0], block[1], block[2]))
