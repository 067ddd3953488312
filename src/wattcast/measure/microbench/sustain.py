"""A load kept up without gaps until power, clock and time of its launches have settled.

The rule is the kernel campaign's (steady.py) with more counter steps, and a load lasts long enough for
the sensor's one-second average of memory power to hold nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from wattcast.measure.microbench.device import Device, Event
from wattcast.measure.microbench.row import MAX_POWER_OF, MicroRow
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady import Rule, Window, settled, window

RULE = Rule(settle_s=0.35, least_ticks=8, longest_s=4.5)
LEAST_S = 1.2  # of load before a row may end: the memory sensor averages over a second
AGAIN_TICKS, AGAIN_S = 5, 0.85  # the same of a repetition, which says nothing of memory power
MEMORY_S = 1.1  # of load, below which the memory sensor's average holds what went before
LINGER_S = 0.25  # that the power cap of the load before may still be reported
CHUNK_S = 0.02
LOOK_S = 0.04  # between looks at the samples, which take the host a millisecond or more
AHEAD = 4  # chunks queued before the host waits


@dataclass
class Load:
    """Something to run again and again. ``enqueue`` puts one unit of it on the stream."""

    device: Device
    enqueue: Callable[[], None]
    once_s: float  # how long a unit takes
    period_s: float = 0.0  # begin one unit every so often instead of back to back


@dataclass
class Bench:
    """What measuring a row needs."""

    device: Device
    sampler: Sampler
    run: str
    idle_power_w: float | None = None
    rule: Rule = field(default_factory=lambda: RULE)
    least_s: float = LEAST_S

    def again(self) -> Bench:
        """The same for a repetition: shorter where the power cap is not met."""
        rule = replace(self.rule, least_ticks=min(self.rule.least_ticks, AGAIN_TICKS))
        return replace(self, rule=rule, least_s=min(self.least_s, AGAIN_S))


def sustain(bench: Bench, load: Load, row: MicroRow) -> MicroRow:
    """The row with time, power, clock and memory power of the settled load."""
    bench.sampler.check()
    mark = bench.sampler.head
    zero = load.device.mark()
    zero.synchronize()
    started_s = time.monotonic()
    kept = _keep_up(bench, load, mark, zero, started_s)
    load.device.synchronize()
    late = kept.held is None
    ended_s = time.monotonic()
    held = kept.held or window(bench.sampler.since(mark), started_s + bench.rule.capped_settle_s, ended_s, bench.rule)
    edges_s = started_s + np.array([zero.elapsed_time(event) for event in kept.marks]) / 1e3
    load.device.recycle(kept.marks)
    unit_s = held.whole(edges_s) / kept.per_chunk
    return _seen(bench, row, held, started_s, unit_s, late)


@dataclass
class _Kept:
    """Events at the chunks' ends, and the settled window if there was one."""

    marks: list[Event]
    per_chunk: int
    held: Window | None = None


def _keep_up(bench: Bench, load: Load, mark: int, zero: Event, started_s: float) -> _Kept:
    per_chunk = 1 if load.period_s else max(round(CHUNK_S / load.once_s), 1)
    kept = _Kept([zero], per_chunk)
    waiting: deque[Event] = deque([zero])
    looked_s = started_s
    while time.monotonic() - started_s < bench.rule.longest_s:
        while len(waiting) < (1 if load.period_s else AHEAD) + 1:
            if load.period_s:
                time.sleep(max(0.0, started_s + (len(kept.marks) - 1) * load.period_s - time.monotonic()))
            for _ in range(per_chunk):
                load.enqueue()
            kept.marks.append(load.device.mark())
            waiting.append(kept.marks[-1])
        waiting.popleft().synchronize()
        bench.sampler.check()
        if time.monotonic() - started_s < bench.least_s or time.monotonic() - looked_s < LOOK_S:
            continue
        looked_s = time.monotonic()
        recent = bench.sampler.since(mark).between(started_s + LINGER_S, np.inf)
        kept.held = settled(recent, started_s, bench.rule)
        if kept.held is not None:
            break
    return kept


def _seen(
    bench: Bench, row: MicroRow, held: Window, started_s: float, unit_s: npt.NDArray[np.float64], late: bool
) -> MicroRow:
    clock, instant = held.samples.known("sm_clock_hz"), held.samples.known("instant_w")
    return replace(
        row,
        launches=len(unit_s),
        launch_s=float(unit_s.mean()),
        launch_spread_s=float(unit_s.std(ddof=1)) if len(unit_s) > 1 else None,
        duration_s=held.duration_s,
        power_w=held.ticks.power_w,
        power_spread_w=held.ticks.spread_w,
        max_power_w=float(instant.max()) if len(instant) else None,
        max_power_of=MAX_POWER_OF if len(instant) else "",
        idle_power_w=bench.idle_power_w,
        memory_power_w=held.samples.last("memory_w") if held.end_s - started_s >= MEMORY_S else None,
        sm_clock_hz=float(clock.mean()) if len(clock) else None,
        temperature_c=held.samples.mean("temperature_c"),
        ticks=held.ticks.intervals,
        throttle=held.samples.throttle,
        flags=(*held.flags, *(("unsettled",) if late else ())),
    )
