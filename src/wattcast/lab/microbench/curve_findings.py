"""Read off curves what they tell of a card: the roofline, lines, sectors, ways, slices, launches.

Every finding says how it follows. Where a curve is flat, noisy or ends too early, its finding is
unknown and says why: no number is then given. The analyses were tried on made-up curves with known
truth (``tests/lab/microbench/test_curve_findings.py``); of a card, the rings of 128-byte lines and
the atomics of an H200 alone were measured so far.

| curve | what is found |
|---|---|
| ``intensity`` | DRAM and fp32 reads off the two roofs, flops a byte where they meet, J of each |
| ``walk`` | bytes that the L1 fetches at once: steps below it hit what the last one brought |
| ``walk_dram`` | bytes that come from DRAM at once, past the L1 |
| ``dense``, ``ring`` | bytes of a line of the L1, by its capacity in bytes and in lines |
| ``ways_*`` | ways of the L1: lines that fit where all have one set |
| ``atomic_lines`` | slices of the L2: how many times one slice's rate all of them reach |
| ``graph`` | time of a node and of a launch of a graph |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.units import show
from wattcast.lab.microbench.launch_times import GRAPH_CURVE
from wattcast.lab.microbench.microbench_results import (
    MicroRow,
    find_curve,
    keep_first_rounds,
)

WALKS = {"walk": "L1 sector", "walk_dram": "DRAM fetch"}
WAYS = {"ways_16k": 16384, "ways_64k": 65536, "ways_256k": 262144}
# Curves of latency that are no rows of their own in the table of latencies
LATENCY_FINDINGS = (*WALKS, *WAYS, "dense", "lines")
DENSE_BYTE, RING_BYTE = 32, 128  # from node to node of the two rings
# A roof is reached where two neighbouring points agree as well as two rounds do, with reserve
SAME_RATE = 0.05
LEAST_RISE = 1.5  # of a curve from end to end, below which it is flat
MOST_SCATTER = 0.1  # root of the mean square about the fitted curve, over its rise
CLEARER = 2.0  # times as much scatter as the best step has, of the next best
PLATEAU = 0.08  # spread of latencies that are the same level
SLOWER = 1.2  # latency beyond a level over that on it, at least
# Two groups of latencies: the gap between them over the widest other one, and over the fastest
CLEAR_GAP = 3.0
LEAST_GAP = 0.05
FEWEST_LINES = 8
MOST_FIT_ERROR = 0.15  # of a point on a straight line, relative


@dataclass(frozen=True)
class Finding:
    """What a curve tells; ``value`` is None where it does not."""

    name: str
    value: float | None
    unit: str
    reason: str  # how it follows, or why it is unknown
    at_least: bool = False

    def describe(self) -> str:
        """Return the value in words."""
        if self.value is None:
            return "unknown"
        number = show(self.value, self.unit) if self.unit else f"{self.value:.4g}"
        return f"at least {number}" if self.at_least else number


def unknown(
    name: str,
    why: str,
    unit: str = "",
) -> Finding:
    """Return a finding without a value."""
    return Finding(name, None, unit, why)


def list_findings(results: Sequence[MicroRow]) -> list[Finding]:
    """Return a finding for every curve that has points."""
    findings: list[Finding] = []
    points = find_curve(results, "intensity")
    if points:
        findings += fit_roofline(points)
    for curve, name in WALKS.items():
        sizes, cycles = _read_latencies(results, curve)
        if len(sizes):
            findings.append(find_step(name, sizes, cycles))
    findings += _find_caches(results)
    _, cycles = _read_latencies(results, "lines")
    if len(cycles):
        findings += find_parts(cycles)
    points = find_curve(results, "atomic_lines")
    if points:
        lines = np.array([r.at for r in points])
        rates = np.array([r.operations_per_cycle_sm or np.nan for r in points])
        findings.append(find_slices(lines, rates))
    findings += _list_launches(results)
    return findings


def _read_latencies(results: Sequence[MicroRow], curve: str) -> tuple[Array, Array]:
    """Return places and cycles of a curve of latencies."""
    points = [r for r in find_curve(results, curve) if r.latency_cycles]
    places = np.array([r.at for r in points])
    return places, np.array([r.latency_cycles for r in points], dtype=np.float64)


def fit_roofline(points: Sequence[MicroRow]) -> Iterator[Finding]:
    """Yield the roofs of a sweep of flops a byte, where they meet, and joules of byte and flop.

    A roof is known where the two points at its end agree. Joules above idle of a byte are
    e_byte + e_flop · I, by least squares on relative error; points under the power cap are left
    out, since their clock is another."""
    names = ("DRAM roof", "fp32 roof", "flops a byte where roofs meet")
    free = [r for r in points if r.flop and r.byte and r.launch_s]
    free = [r for r in free if "sw_power_cap" not in r.throttle]
    if len(free) < 4:
        why = f"{len(free)} points below the power cap; four are needed"
        yield from (unknown(name, why) for name in (*names, "energy of a byte", "energy of a flop"))
        return
    byte = np.array([r.byte for r in free], dtype=np.float64)
    flop = np.array([r.flop for r in free], dtype=np.float64)
    seconds = np.array([r.launch_s for r in free], dtype=np.float64)
    byte_roof = _read_roof(names[0], byte / seconds, "byte/s", from_start=True)
    flop_roof = _read_roof(names[1], flop / seconds, "flop/s", from_start=False)
    yield byte_roof
    yield flop_roof
    if byte_roof.value is None or flop_roof.value is None:
        yield unknown(names[2], "a roof is not reached")
    else:
        ridge = flop_roof.value / byte_roof.value
        yield Finding(names[2], ridge, "", "one roof over the other")
    joules = np.array([r.operation_above_idle_j or np.nan for r in free])
    operations = np.array([r.operations for r in free], dtype=np.float64)
    yield from _fit_energies(flop / byte, joules * operations / byte)


def _read_roof(
    name: str,
    rates: Array,
    unit: str,
    from_start: bool,
) -> Finding:
    """Return the rate at one end of a sweep, where two points agree and none is faster."""
    first, second = (rates[0], rates[1]) if from_start else (rates[-1], rates[-2])
    apart = abs(first / second - 1.0)
    if apart > SAME_RATE:
        return unknown(name, f"the last two points differ by {apart:.0%}: it is not reached", unit)
    roof = 0.5 * (first + second)
    over = float(rates.max() / roof - 1.0)
    if over > SAME_RATE:
        return unknown(name, f"a point in between is {over:.0%} faster", unit)
    return Finding(name, float(roof), unit, f"two points within {apart:.1%}")


def _fit_energies(intensity: Array, byte_j: Array) -> Iterator[Finding]:
    """Yield joules above idle of a byte and of a flop from those of a byte with its flops."""
    from scipy.optimize import nnls

    names = ("energy of a byte", "energy of a flop")
    known = np.isfinite(byte_j) & (byte_j > 0.0)
    if known.sum() < 4:
        yield from (unknown(name, "watts of fewer than four points", "J") for name in names)
        return
    design = np.stack([np.ones(int(known.sum())), intensity[known]], axis=1)
    relative = design / byte_j[known][:, np.newaxis]
    fitted = nnls(relative, np.ones(len(relative)))[0]
    worst = float(np.abs(relative @ fitted - 1.0).max())
    if worst > MOST_FIT_ERROR:
        why = f"a point is {worst:.0%} off the line of joules over flops a byte"
        yield from (unknown(name, why, "J") for name in names)
        return
    for name, value in zip(names, fitted, strict=True):
        yield Finding(name, float(value), "J", f"above idle; all points within {worst:.0%}")


def find_step(
    name: str,
    stride_byte: Array,
    cycles: Array,
) -> Finding:
    """Find how many bytes come at once, from latencies of a walk in steps of ``stride_byte``.

    With steps s below the fetched size g, only s / g of the loads miss:
    t = t_hit + (t_miss - t_hit) · min(s / g, 1). Of the measured strides the g with the least
    scatter is taken, where it is clearly better than the next one and two points lie on the
    plateau."""
    if len(stride_byte) < 5:
        return unknown(name, f"{len(stride_byte)} strides; five are needed", "byte")
    rise = float(cycles[-1] / cycles[0])
    if rise < LEAST_RISE:
        return unknown(name, f"flat: {rise:.2f} times from the shortest to the longest", "byte")
    candidates = stride_byte[1:-1]
    scatter = np.array([_scatter_of_step(stride_byte, cycles, g) for g in candidates])
    order = np.argsort(scatter)
    best = float(scatter[order[0]])
    if best > MOST_SCATTER:
        return unknown(name, f"no step explains the curve: {best:.0%} of its rise is left", "byte")
    if scatter[order[1]] < CLEARER * best or scatter[order[1]] < MOST_SCATTER / CLEARER:
        two = " and ".join(f"{candidates[place]:g}" for place in sorted(order[:2]))
        return unknown(name, f"{two} bytes explain the curve about as well", "byte")
    return Finding(
        name,
        float(candidates[order[0]]),
        "byte",
        f"latency of a walk rises up to this step; {best:.1%} of the rise is left",
    )


def _scatter_of_step(
    stride_byte: Array,
    cycles: Array,
    step_byte: float,
) -> float:
    """Return what a step of this size leaves of a curve, over the curve's rise."""
    share = np.minimum(stride_byte / step_byte, 1.0)
    design = np.stack([np.ones(len(share)), share], axis=1)
    fitted = design @ np.linalg.lstsq(design, cycles, rcond=None)[0]
    return float(np.sqrt(np.mean((fitted - cycles) ** 2)) / np.ptp(cycles))


@dataclass(frozen=True)
class LevelEnd:
    """The end of the first level of a ring: the last size on it, and the first beyond."""

    last: float
    beyond: float


def find_level_end(sizes: Array, cycles: Array) -> LevelEnd | str:
    """Return where the first level of a ring ends, or why nobody can tell.

    Every point beyond must be slower than the level by ``SLOWER``: a curve that comes back was
    disturbed."""
    if len(sizes) < 3:
        return f"{len(sizes)} sizes; three are needed"
    on_level = np.abs(cycles / cycles[0] - 1.0) <= PLATEAU
    if on_level.all():
        return f"no latency rises up to {sizes[-1]:g}"
    place = int(np.argmin(on_level))
    if place < 2:
        return "the smallest sizes already differ"
    level = float(np.median(cycles[:place]))
    if (cycles[place:] < SLOWER * level).any():
        return "latencies beyond the first level come back to it: noise, or another cache"
    return LevelEnd(float(sizes[place - 1]), float(sizes[place]))


def _find_caches(results: Sequence[MicroRow]) -> Iterator[Finding]:
    """Yield the line of the L1, and its ways, where their curves have points."""
    dense_byte, dense_cycles = _read_latencies(results, "dense")
    ring_byte, ring_cycles = _read_latencies(results, "ring")
    line = None
    if len(dense_byte) and len(ring_byte):
        found = find_line(
            find_level_end(dense_byte, dense_cycles),
            find_level_end(ring_byte / RING_BYTE, ring_cycles),
        )
        line = found.value
        yield found
    ends = {}
    for curve, stride_byte in WAYS.items():
        sizes, cycles = _read_latencies(results, curve)
        if len(sizes):
            ends[stride_byte] = find_level_end(sizes / stride_byte, cycles)
    if ends:
        ways = find_ways(ends)
        yield ways
        yield find_sets(find_level_end(dense_byte, dense_cycles), line, ways)


def find_line(capacity_byte: LevelEnd | str, lines: LevelEnd | str) -> Finding:
    """Find the bytes of a line, from the capacity in bytes and in lines one of whose words is used.

    It is known where one power of two alone lies between the two brackets."""
    name = "L1 line"
    for end, what in ((capacity_byte, "dense"), (lines, "ring")):
        if isinstance(end, str):
            return unknown(name, f"capacity by the curve {what}: {end}", "byte")
    assert isinstance(capacity_byte, LevelEnd)
    assert isinstance(lines, LevelEnd)
    least = capacity_byte.last / lines.beyond
    most = capacity_byte.beyond / lines.last
    sizes = [float(size) for size in 2.0 ** np.arange(3, 13) if least <= size <= most]
    if len(sizes) != 1:
        return unknown(name, f"between {least:.0f} and {most:.0f} bytes", "byte")
    reason = (
        f"{capacity_byte.last:.0f} to {capacity_byte.beyond:.0f} bytes fit, and "
        f"{lines.last:.0f} to {lines.beyond:.0f} lines"
    )
    return Finding(name, sizes[0], "byte", reason)


def find_ways(ends: dict[int, LevelEnd | str]) -> Finding:
    """Find the ways, from how many lines fit at strides in bytes that are powers of two.

    As the stride grows lines share fewer sets, until all share one: from there on as many fit as
    there are ways, whatever the stride. An index that hashes addresses spreads them over all
    sets."""
    name = "L1 ways"
    strides = sorted(ends)
    if len(strides) < 2:
        return unknown(name, "one stride alone")
    last, before = ends[strides[-1]], ends[strides[-2]]
    if isinstance(last, str):
        return unknown(
            name, f"at {strides[-1]} bytes {last}: the index of a set may hash addresses"
        )
    if isinstance(before, str):
        return unknown(name, f"at {strides[-2]} bytes {before}, at more bytes lines conflict")
    if last != before:
        return unknown(
            name,
            f"{before.last:g} lines fit at {strides[-2]} bytes, {last.last:g} at {strides[-1]}: "
            "the longest stride does not reach one set, or the index hashes addresses",
        )
    return Finding(
        name,
        last.last,
        "",
        f"as many lines fit at strides of {strides[-2]} and {strides[-1]} bytes, and "
        f"{last.beyond:g} do not",
    )


def find_sets(
    capacity_byte: LevelEnd | str,
    line_byte: float | None,
    ways: Finding,
) -> Finding:
    """Find the sets, from capacity, line and ways: a power of two that lies in their bracket."""
    name = "L1 sets"
    if ways.value is None or line_byte is None or isinstance(capacity_byte, str):
        return unknown(name, "needs capacity, line and ways, of which one is unknown")
    row_byte = ways.value * line_byte
    least, most = capacity_byte.last / row_byte, capacity_byte.beyond / row_byte
    counts = [float(count) for count in 2.0 ** np.arange(0, 16) if least <= count < most]
    if len(counts) != 1:
        return unknown(name, f"between {least:.0f} and {most:.0f}")
    return Finding(name, counts[0], "", "capacity over the bytes of a line in every way")


def find_parts(cycles: Array) -> Iterator[Finding]:
    """Yield latencies of the near and the far part of the L2, from those of single lines.

    The lines come from one SM, each over and over. They fall into two groups where one gap between
    neighbours in order is ``CLEAR_GAP`` times the widest other one and both sides have two lines or
    more; slices of a part differ a little."""
    names = ("near part of the L2, cycles", "far part of the L2, cycles")
    why = ""
    ordered = np.sort(cycles)
    gaps = np.diff(ordered)
    if len(ordered) < FEWEST_LINES:
        why = f"{len(ordered)} lines; {FEWEST_LINES} are needed"
    elif gaps.max() < LEAST_GAP * ordered[0]:
        why = f"lines lie within {np.ptp(ordered) / ordered[0]:.0%}: one part, or none is told"
    else:
        place = int(np.argmax(gaps)) + 1
        others = np.delete(gaps, place - 1)
        if gaps.max() < CLEAR_GAP * others.max():
            why = "no gap between latencies is clear"
        elif not 2 <= place <= len(ordered) - 2:
            why = "a single line lies apart"
    if why:
        yield from (unknown(name, why) for name in names)
        return
    for name, group in zip(names, (ordered[:place], ordered[place:]), strict=True):
        yield Finding(name, float(np.median(group)), "", f"{len(group)} of {len(ordered)} lines")


def find_slices(lines: Array, rates: Array) -> Finding:
    """Find the slices of the L2, from rates of atomic additions spread over more and more lines.

    A line is in one slice, which adds at its own rate; many lines keep all of them at work. Where
    the rate still grows at the end, or something else limits it, there may be more. That one line
    is as fast as its slice is taken for granted: where a slice adds to several lines at once, there
    are fewer."""
    name = "L2 slices"
    if len(lines) < 4 or not np.isfinite(rates).all():
        return unknown(name, "four rates or more are needed")
    if lines[0] != 1.0:
        return unknown(name, "the rate of one line is not measured")
    ratio = float(rates.max() / rates[0])
    if ratio < LEAST_RISE:
        return unknown(name, f"flat: {ratio:.2f} times the rate of one line")
    falls = float((1.0 - rates[1:] / rates[:-1]).max())
    if falls > MOST_SCATTER:
        return unknown(name, f"the rate falls by {falls:.0%} where lines are added: noise")
    grows = float(rates[-1] / rates[-2] - 1.0)
    is_reached = abs(grows) <= SAME_RATE
    reason = "rate of additions to many lines over that of one, taken as that of its slice"
    if not is_reached:
        reason += f"; it still grows by {grows:.0%} at the end"
    return Finding(name, float(np.floor(ratio)), "", reason, at_least=not is_reached)


def _list_launches(results: Sequence[MicroRow]) -> Iterator[Finding]:
    """Yield times of launches, and those of a node and of a launch of a graph."""
    by_name = keep_first_rounds(results)
    for name, title in (
        ("launch_queued", "launch in a queue"),
        ("launch_waited", "launch that is waited for"),
    ):
        row = by_name.get(name)
        if row is not None and row.launch_s:
            yield judge_launch(title, row.launch_s, row.launch_spread_s)
    points = [r for r in find_curve(results, GRAPH_CURVE) if r.launch_s]
    if points:
        nodes = np.array([r.at for r in points])
        seconds = np.array([r.launch_s for r in points], dtype=np.float64)
        yield from fit_graph(nodes, seconds)


def judge_launch(
    name: str,
    launch_s: float,
    spread_s: float | None,
) -> Finding:
    """Return the time of a launch; unknown where stretches differ by half of it."""
    if spread_s is not None and spread_s > 0.5 * launch_s:
        return unknown(name, f"stretches differ by {spread_s / launch_s:.0%}", "s")
    return Finding(name, launch_s, "s", "median of stretches")


def fit_graph(nodes: Array, seconds: Array) -> Iterator[Finding]:
    """Yield the time of a node and of the launch itself: t = t_launch + n · t_node."""
    names = ("node of a graph", "launch of a graph")
    why = ""
    if len(nodes) < 4:
        why = f"{len(nodes)} graphs; four are needed"
    elif seconds[-1] < LEAST_RISE * seconds[0]:
        why = "flat: more nodes take no longer"
    if why:
        yield from (unknown(name, why, "s") for name in names)
        return
    design = np.stack([nodes, np.ones(len(nodes))], axis=1) / seconds[:, np.newaxis]
    fitted = np.linalg.lstsq(design, np.ones(len(nodes)), rcond=None)[0]
    worst = float(np.abs(design @ fitted - 1.0).max())
    if worst > MOST_FIT_ERROR or fitted.min() < 0.0:
        why = f"a graph is {worst:.0%} off a straight line"
        yield from (unknown(name, why, "s") for name in names)
        return
    for name, value in zip(names, fitted, strict=True):
        yield Finding(name, float(value), "s", f"straight line; all graphs within {worst:.0%}")
