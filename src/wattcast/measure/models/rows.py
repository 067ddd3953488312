"""Measuring one whole model: a burst where it is short enough, then a load that runs until it has settled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np

from wattcast.measure.models.build import Built
from wattcast.measure.models.plan import ModelSpec
from wattcast.measure.sampler import Sampler
from wattcast.measure.spin import Spinner
from wattcast.measure.steady import Rule, Window, settled, window
from wattcast.records import ModelRow

CHUNK_S = 0.020  # iterations are queued in chunks of about this length, a few ahead
AHEAD = 4
LONGEST_BURST_S = 0.060  # the governor answers after about 90 ms
BURST_S = 0.020
SPIN_CYCLES = 12_000_000
REST_S = 0.05  # before a burst
CLIMB_S = 1.2  # to wait for the top clock
TOP_SHARE = 0.995  # of the top clock, below which a burst was not at the top
SETTLE = Rule(longest_s=5.0)


@dataclass
class Bench:
    """What measuring a row needs."""

    device: Any  # wattcast.measure.models.device.Device, or a stand-in
    sampler: Sampler
    run: str
    spinner: Spinner | None = None
    rule: Rule = field(default_factory=lambda: SETTLE)


def blank(bench: Bench, spec: ModelSpec) -> ModelRow:
    """A row that says what is to be measured, with nothing measured yet."""
    return ModelRow(
        spec.id,
        spec.model,
        spec.phase,
        spec.batch,
        spec.dtype,
        spec.attention,
        "eager",
        spec.graph,
        seq=spec.seq,
        head=spec.head,
        run=bench.run,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measure(bench: Bench, spec: ModelSpec, built: Built, run: Callable[[], Any]) -> ModelRow:
    """Time, power and clock of one iteration; captured in a graph where asked and possible."""
    row, device = replace(blank(bench, spec), parameters=built.parameters), bench.device
    flags: tuple[str, ...] = ()
    once_s = device.warm(run)
    load = run
    if spec.graph:
        try:
            load = device.capture(run)
        except Exception as error:  # an operation that no graph can hold: the row is still worth having
            device.synchronize()
            flags = (f"not captured: {type(error).__name__}: {error}"[:200],)
            row = replace(row, graph=False)
    try:
        burst_s, once_s = _burst(bench, load, once_s)
        row = _sustained(bench, load, once_s, replace(row, burst_latency_s=burst_s))
    finally:
        getattr(load, "drop", _nothing)()
    return replace(row, flags=(*flags, *row.flags), peak_memory_byte=device.peak_byte)


def _nothing() -> None:
    return None


def _burst(bench: Bench, load: Callable[[], Any], guess_s: float) -> tuple[float | None, float]:
    """Median time of an iteration after a rest, None where one is too long; and a time to plan with."""
    device = bench.device
    device.issue(load, 1)
    device.synchronize()
    time.sleep(REST_S)
    at_top = _await_top(bench)
    count = int(min(max(BURST_S / max(guess_s, 1e-6), 2), 40))
    if guess_s * (count + 1) > LONGEST_BURST_S:
        count = 1
    device.issue(load, 1)
    marks = [device.mark()]
    for _ in range(count):
        device.issue(load, 1)
        marks.append(device.mark())
    marks[-1].synchronize()
    each_s = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    median_s = float(np.median(each_s))
    return (median_s if at_top and median_s * 2 <= LONGEST_BURST_S else None), median_s


def _await_top(bench: Bench) -> bool:
    """Whether the reported clock is at the top; a capped load before leaves it low for about a second."""
    top_hz, deadline_s = bench.sampler.identity.top_clock_hz, time.monotonic() + CLIMB_S
    while top_hz:
        clock_hz = bench.sampler.since(bench.sampler.head - 12).last("sm_clock_hz")
        if clock_hz is not None and clock_hz >= TOP_SHARE * top_hz:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _sustained(bench: Bench, load: Callable[[], Any], once_s: float, row: ModelRow) -> ModelRow:
    device, rule = bench.device, bench.rule
    per_chunk = max(int(CHUNK_S / max(once_s, 1e-6)), 1)
    mark = bench.sampler.head
    zero = device.mark()
    zero.synchronize()
    started_s = time.monotonic()
    marks, waiting = [zero], deque([zero])
    seen, held = bench.sampler.since(mark), None
    while held is None and time.monotonic() - started_s < rule.longest_s:
        while len(waiting) < AHEAD:
            device.issue(load, per_chunk)
            marks.append(device.mark())
            waiting.append(marks[-1])
        waiting.popleft().synchronize()
        bench.sampler.check()
        seen = bench.sampler.since(mark)
        held = settled(seen, started_s, rule)
    late = held is None
    clock_hz = _spin_beside(bench, load, per_chunk)
    device.synchronize()
    held = held or window(seen, started_s + rule.capped_settle_s, time.monotonic(), rule)
    edges_s = started_s + np.array([zero.elapsed_time(m) for m in marks]) / 1e3
    each_s = held.whole(edges_s) / per_chunk
    measured = _seen(row, held, each_s)
    flags = (*measured.flags, *(("unsettled",) if late else ()))
    return replace(measured, effective_clock_hz=clock_hz, iterations=per_chunk * (len(marks) - 1), flags=flags)


def _spin_beside(bench: Bench, load: Callable[[], Any], per_chunk: int) -> float | None:
    """Effective clock while the load goes on, after the window has closed."""
    if bench.spinner is None:
        return None
    bench.device.issue(load, per_chunk)
    bench.spinner.start(SPIN_CYCLES)
    bench.device.issue(load, 2 * per_chunk)
    return bench.spinner.clock_hz()


def _seen(row: ModelRow, held: Window, each_s: np.ndarray) -> ModelRow:
    clock = held.samples.known("sm_clock_hz")
    latency_s, power_w = float(each_s.mean()), held.ticks.power_w
    return replace(
        row,
        latency_s=latency_s,
        latency_spread_s=float(each_s.std(ddof=1)) if len(each_s) > 1 else None,
        duration_s=held.duration_s,
        power_w=power_w,
        power_spread_w=held.ticks.spread_w,
        energy_j=power_w * latency_s,
        ticks=held.ticks.intervals,
        memory_power_w=held.samples.last("memory_w"),
        sm_clock_hz=float(clock.mean()) if len(clock) else None,
        sm_clock_spread_hz=float(clock.std()) if len(clock) else None,
        temperature_c=held.samples.mean("temperature_c"),
        throttle=held.samples.throttle,
        flags=held.flags,
    )
