"""Poll an energy source into the sample ring, in a process of its own, until told to stop.

The process outlives errors of the driver (a failed reading is NaN and counted), reports when the
device is gone, and ends with its parent. Reading the energy counter of an H200 takes about 3 ms of
a processor, other readings a tenth of that. When ``relaxed``, for a user's program, the counter is
read ever more rarely as the run grows longer, and quickly only now and then around a step, which
keeps the counter's phase known."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import (
    asdict,
    dataclass,
)
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.errors import BadInput, MissingTool
from wattcast.measure import sample_ring as layout
from wattcast.measure.counter_ticks import UnwrappedCounter
from wattcast.measure.energy_sources import (
    EnergySource,
    ReadError,
    SlowReadings,
    open_source,
)
from wattcast.measure.sample_ring import SampleRing
from wattcast.measure.source_check import CHECKS


class PollingCoefficients(Coefficients):
    """How often a card is read, and which readings are used."""

    fine_s: float  # between polls when the counter is about to step
    early_s: float  # how long before the expected step fine polling begins
    sharp_s: float  # between the polls around a step, for its time to be known
    # between polls while the counter's period is being learnt, or when asked to be quick
    quick_s: float
    learnt: int  # steps seen before the counter is taken as known
    clock_s: float  # between readings of the clock
    other_s: float  # between readings of everything else
    relaxed_s: float  # between readings of clock and everything else, beside a user's program
    slowest_s: float  # a relaxed sampler reads the counter at least this often
    slow_call: float  # times the quickest call, beyond which a call took long
    age_share: float  # a relaxed sampler waits this share of its age
    watch_every: float  # usual waits between two steps of the counter that are watched closely
    retry_periods: float  # of the counter, through which a step that was missed is looked for
    # share of the counter's period, beyond which a wait ends in the middle of a period
    long_wait: float


POLLING = load_coefficients("polling", PollingCoefficients)


WAKE_S = 0.01  # between looks whether to stop or to be quick
# A call that took longer does not say when the counter was read: at least the first, and at most
# the second on a driver that is slow in all its calls.
TOO_LONG_S = (0.02, 0.1)
BACK_OFF_S = (0.05, 1.0)  # between attempts to read a lost device: at first, and at most
GOLDEN = 0.618033988749895  # its multiples spread evenly over a turn


class PollingPace:
    """When to read the counter next."""

    def __init__(
        self,
        period_s: float,
        relaxed: bool = False,
    ) -> None:
        self._period_s = period_s
        self._relaxed = relaxed
        self._steps: list[float] = []
        self._begun_s = math.nan
        self._step_s = math.inf
        self._phase_s = math.nan  # of the last step that was seen sharply
        self._is_watching = False  # polling finely for the next one
        self._tried_s = -math.inf  # when the last attempt to see one failed
        self._is_missed = False  # it failed: look through a whole period
        self._read_s = math.nan
        self._energy_j = math.nan

    def wait_s(
        self,
        now_s: float,
        energy_j: float,
        quick: bool = False,
    ) -> float:
        """Time until the next reading, given the one just made."""
        self._note_reading(now_s, energy_j)
        if self._period_s <= 2.0 * POLLING.fine_s:
            return self._period_s
        if quick or len(self._steps) < POLLING.learnt:
            return min(self._period_s, POLLING.quick_s)
        if self._is_missed and now_s - self._tried_s < POLLING.retry_periods * self._step_s:
            return POLLING.quick_s
        usual_s = self._usual_wait_s(now_s)
        if now_s - max(self._phase_s, self._tried_s) < POLLING.watch_every * usual_s:
            self._is_watching = False
            return self._wait_between_steps_s(now_s, usual_s)
        return self._wait_for_step_s(now_s)

    def _usual_wait_s(self, now_s: float) -> float:
        """Return the time between readings, which grows with the age of a relaxed sampler."""
        if not self._relaxed:
            return self._period_s
        age_s = now_s - self._begun_s
        return min(max(POLLING.age_share * age_s, self._period_s, self._step_s), POLLING.slowest_s)

    def _wait_between_steps_s(
        self,
        now_s: float,
        usual_s: float,
    ) -> float:
        """Return a wait of about the usual time that ends in the middle of a period, so that the
        reading belongs to one step.
        """
        if usual_s < POLLING.long_wait * self._step_s:
            return usual_s
        periods = (now_s + usual_s - self._phase_s) / self._step_s
        to_middle = math.floor(periods) + 0.5 - periods
        return max(usual_s + to_middle * self._step_s, POLLING.quick_s)

    def _wait_for_step_s(self, now_s: float) -> float:
        """Return the wait until fine polling begins, or between fine polls around a step."""
        due_s = (self._phase_s - now_s) % self._step_s  # the next step, wherever the last one was
        is_past = due_s >= self._step_s - POLLING.early_s
        if due_s <= POLLING.early_s or (self._is_watching and is_past):
            self._is_watching = True
            return POLLING.fine_s
        if self._is_watching:  # it has passed unseen
            self._is_watching = False
            self._tried_s = now_s
            self._is_missed = True
            return POLLING.quick_s
        return due_s - POLLING.early_s

    def _note_reading(
        self,
        now_s: float,
        energy_j: float,
    ) -> None:
        """Remember when the counter stepped, if this reading and the one before saw it closely."""
        if math.isnan(self._begun_s):
            self._begun_s = now_s
        if math.isfinite(energy_j):
            has_stepped = math.isfinite(self._energy_j) and energy_j != self._energy_j
            if has_stepped and now_s - self._read_s <= POLLING.sharp_s:
                self._note_step(0.5 * (self._read_s + now_s))
            self._energy_j = energy_j
        self._read_s = now_s

    def _note_step(self, step_at_s: float) -> None:
        """Learn the counter's period from the moment of a step.

        It is the usual time between steps, then, more exactly, that from the first step to the
        latest.
        """
        self._phase_s = step_at_s
        self._is_missed = False
        if len(self._steps) < POLLING.learnt:
            self._steps.append(step_at_s)
            apart_s = [later - earlier for earlier, later in pairwise(self._steps)]
            self._step_s = median(apart_s or [math.inf])
        if len(self._steps) == POLLING.learnt:
            passed_s = step_at_s - self._steps[0]
            self._step_s = passed_s / round(passed_s / self._step_s)


@dataclass
class _Schedule:
    """When the counter, the clock and everything else are to be read next."""

    clock_s: float  # between readings of the clock
    other_s: float  # between readings of everything else
    energy_due_s: float = 0.0
    clock_due_s: float = 0.0
    other_due_s: float = 0.0
    readings: int = 0  # of everything else

    @property
    def due_s(self) -> float:
        return min(self.energy_due_s, self.clock_due_s, self.other_due_s)

    def plan_other(
        self,
        now_s: float,
        is_quick: bool,
    ) -> None:
        """Choose when to read everything else next, at uneven times.

        Readings in step with a load, such as every 0.2 s of one that pulses every 0.2 s, would see
        one phase of it.
        """
        self.readings += 1
        uneven = 0.75 + 0.5 * (self.readings * GOLDEN % 1.0)
        self.other_due_s = now_s + (POLLING.other_s if is_quick else self.other_s * uneven)

    def back_off(
        self,
        now_s: float,
        failed: int,
        is_lost: bool,
    ) -> None:
        """Wait ever longer after readings that failed in a row."""
        first_s, longest_s = BACK_OFF_S if is_lost else (POLLING.fine_s, BACK_OFF_S[0])
        due_s = now_s + min(first_s * 2.0 ** min(failed, 20), longest_s)
        self.energy_due_s = due_s
        self.clock_due_s = due_s
        self.other_due_s = due_s


class _TimedCounter:
    """Read the energy counter of a source, with the moment that each value belongs to."""

    def __init__(
        self,
        source: EnergySource,
        limit_w: float | None,
    ) -> None:
        self._source = source
        most_w = CHECKS.peak_above_limit * (limit_w or CHECKS.most_w)
        self._counter = UnwrappedCounter(source.energy_range_j, most_w)
        self._quickest_s = math.inf

    def read(self, began_s: float) -> tuple[float, float]:
        """Return the moment and the joules; NaN where a call that hung leaves the moment open."""
        energy_j = self._counter.follow(self._source.energy_j(), began_s)
        took_s = time.monotonic() - began_s
        self._quickest_s = min(self._quickest_s, took_s)
        least_s, most_s = TOO_LONG_S
        if took_s > min(max(least_s, POLLING.slow_call * self._quickest_s), most_s):
            energy_j = math.nan
        return began_s + 0.5 * took_s, energy_j


def poll_source(
    source: EnergySource,
    ring: SampleRing,
    period_s: float,
    parent: int,
    relaxed: bool = False,
    limit_w: float | None = None,
) -> None:
    """Read until told to stop or orphaned; never raises for what the driver does."""
    header = ring.header
    pace = PollingPace(period_s, relaxed)
    counter = _TimedCounter(source, limit_w)
    schedule = _Schedule(POLLING.relaxed_s, POLLING.relaxed_s)
    if not relaxed:
        schedule = _Schedule(max(POLLING.clock_s, period_s), max(POLLING.other_s, period_s))
    failed = 0  # readings in a row
    born_ns = time.process_time_ns()
    while not header[layout.STOP] and os.getppid() == parent:
        began_s = time.monotonic()
        read_s = began_s
        energy_j = math.nan
        clock_hz = math.nan
        slow = SlowReadings()
        try:
            if began_s >= schedule.energy_due_s or header[layout.QUICK]:
                read_s, energy_j = counter.read(began_s)
                wait_s = pace.wait_s(read_s, energy_j, bool(header[layout.QUICK]))
                schedule.energy_due_s = read_s + wait_s
            if began_s >= schedule.clock_due_s:
                clock_hz = source.sm_clock_hz()
                schedule.clock_due_s = began_s + schedule.clock_s
            if began_s >= schedule.other_due_s:
                slow = source.slow()
                schedule.plan_other(began_s, bool(header[layout.QUICK]))
            header[layout.STATUS] = layout.SAMPLING
            failed = 0
        except ReadError as error:
            header[layout.ERRORS] += 1
            header[layout.STATUS] = layout.LOST if error.lost else layout.SAMPLING
            schedule.back_off(began_s, failed, error.lost)
            failed += 1
        ring.write((read_s, energy_j, clock_hz, *vars(slow).values()))  # astuple copies each
        header[layout.PROCESSOR_NS] = time.process_time_ns() - born_ns
        _sleep_until(schedule.due_s, ring)
    header[layout.STATUS] = layout.STOPPED


def _sleep_until(due_s: float, ring: SampleRing) -> None:
    """Sleep until a moment, or until the reader asks to stop or changes how quickly to read."""
    header = ring.header
    quick = header[layout.QUICK]
    while (remaining_s := due_s - time.monotonic()) > 0.0:
        if header[layout.STOP] or header[layout.QUICK] != quick:
            break
        time.sleep(min(remaining_s, WAKE_S))


def main(order: dict[str, Any]) -> int:
    """Run the process as ``Sampler.start`` orders it."""
    parent = os.getppid()
    ring = SampleRing.attach(Path(order["ring"]))
    try:
        source, identity = open_source(order["source"], order["index"])
    except (MissingTool, BadInput) as error:
        refusal = {"missing": str(error), "is_users": isinstance(error, BadInput)}
        print(json.dumps(refusal), flush=True)
        return int(error.exit_code)
    print(json.dumps(asdict(identity)), flush=True)
    try:
        poll_source(
            source,
            ring,
            order["period_s"],
            parent,
            order["relaxed"],
            identity.power_limit_w,
        )
    finally:
        source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
