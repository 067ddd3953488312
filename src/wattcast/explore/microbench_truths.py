"""What microbenchmarks must bear out: specifications met, curves that rise, two rounds alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.explore.microbench import Result, curve, first, specified
from wattcast.hardware import Gpu

SAME_TIME, SAME_ENERGY = 0.02, 0.03  # how far two rounds may be apart


@dataclass(frozen=True)
class Truth:
    """A statement that measurements must bear out."""

    statement: str
    found: float  # relative difference, or the share of points that go the wrong way
    must: float

    @property
    def holds(self) -> bool:
        """Whether they do."""
        return self.found <= self.must


def truths(results: Sequence[Result], gpu: Gpu) -> list[Truth]:
    """Throughput by the specification, the copy by the driver's, curves that must rise, two rounds alike."""
    by_name, found = first(results), []
    limits = {"fp32_fma": 0.03, "fp64_fma": 0.03, "int32_add": 0.03, "fp32_exp2_log2": 0.03, "wgmma_bf16": 0.08}
    for name, must in limits.items():
        result = by_name.get(name)
        wanted = specified(gpu, result) if result is not None else None
        if result is not None and result.per_cycle_sm and wanted:
            off = abs(result.per_cycle_sm / wanted - 1.0)
            found.append(Truth(f"{name}: {result.per_cycle_sm:.4g} of {wanted:g} per cycle and SM", off, must))
    found += _dram_truths(by_name, gpu)
    for name, rising in (("conflicts", True), ("divergence", True), ("coalescence", False)):
        points = [r.operation_s for r in curve(results, name) if r.operation_s]
        if len(points) > 1:
            steps = np.diff(points) * (1.0 if rising else -1.0)
            wrong = float((steps < -0.02 * np.array(points[:-1])).mean())
            found.append(
                Truth(f"{name}: time an operation {'rises' if rising else 'falls'} along the curve", wrong, 0.0)
            )
    return found + _round_truths(repeatability(results))


def _round_truths(pairs: Sequence[Pair]) -> list[Truth]:
    """The two rounds furthest apart; in words how far apart they are mostly, and which rows are further."""
    found = []
    for what, apart, must in (
        ("time", {p.name: p.time for p in pairs}, SAME_TIME),
        ("energy", {p.name: p.energy for p in pairs}, SAME_ENERGY),
    ):
        if apart:
            beyond = [name for name in sorted(apart, key=lambda name: -apart[name]) if apart[name] > must]
            text = f"two rounds, {what}: median {np.median(list(apart.values())):.2%} of {len(apart)} rows"
            text += f"; further apart are {len(beyond)}: {', '.join(beyond)}" if beyond else ", none further apart"
            found.append(Truth(text, max(apart.values()), must))
    return found


def best_copy(results: Iterable[Result]) -> Result | None:
    """The fastest of our ways to copy DRAM."""
    ways = [r for r in first(results).values() if r.name.startswith("dram_copy") and r.byte_per_s]
    return max(ways, key=lambda r: r.byte_per_s or 0.0, default=None)


def _dram_truths(by_name: Mapping[str, Result], gpu: Gpu) -> list[Truth]:
    """Our best copy by the driver's; nothing faster than DRAM can be, or it did not come from there."""
    found, most = [], float(gpu.memory.byte_per_s)
    copy, driver = best_copy(by_name.values()), by_name.get("dram_memcpy")
    if copy is not None and driver is not None and copy.byte_per_s and driver.byte_per_s:
        text = f"{copy.name} {copy.byte_per_s / 1e12:.3f} TB/s ({copy.byte_per_s / most:.0%} of the specification), "
        text += f"the driver's {driver.byte_per_s / 1e12:.3f} TB/s"
        found.append(Truth(text, abs(copy.byte_per_s / driver.byte_per_s - 1.0), 0.05))
    rows = [r for r in by_name.values() if r.group in ("memory", "structure") and r.byte_per_s and "dram" in r.name]
    if rows:
        top = max(rows, key=lambda r: r.byte_per_s or 0.0)
        rate = top.byte_per_s or 0.0
        text = f"no DRAM row above the specification: {top.name} {rate / 1e12:.3f} of {most / 1e12:.3g} TB/s"
        found.append(Truth(text, max(rate / most - 1.0, 0.0), 0.0))
    return found


@dataclass(frozen=True)
class Pair:
    """One benchmark measured twice; differences relative to the mean."""

    name: str
    time: float
    energy: float


def repeatability(results: Sequence[Result]) -> list[Pair]:
    """First and second round of every benchmark that has both, on one card; energies at the time of each."""
    again = {r.name: r for r in results if r.repeat == 1}
    pairs = []
    for name, a in first(results).items():
        b = again.get(name)
        if b is None or not (a.operation_s and b.operation_s and a.operation_j and b.operation_j):
            continue
        if a.card and b.card and a.card != b.card:
            continue
        pairs.append(Pair(name, _apart(a.operation_s, b.operation_s), _apart(a.operation_j, b.operation_j)))
    return pairs


def _apart(a: float, b: float) -> float:
    return abs(a - b) / (0.5 * (a + b))
