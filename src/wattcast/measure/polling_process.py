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
from dataclasses import asdict, astuple
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from wattcast.core.errors import BadInput, MissingTool
from wattcast.measure import sample_ring as layout
from wattcast.measure.counter_ticks import UnwrappedCounter
from wattcast.measure.energy_sources import EnergySource, ReadError, SlowReadings, open_source
from wattcast.measure.sample_ring import SampleRing

FINE_S = 0.001  # between polls when the counter is about to step
EARLY_S = 0.008  # how long before the expected step fine polling begins
SHARP_S = 0.008  # between the polls around a step, for its time to be known
QUICK_S = (
    0.002  # between polls while the counter's period is being learnt, or when asked to be quick
)
LEARNT = 8  # steps seen before the counter is taken as known
# between readings of the clock, and of everything else; longer beside a program
CLOCK_S = 0.0045
OTHER_S = 0.018
SLOWEST_S = 0.5
WAKE_S = 0.01  # between looks whether to stop or to be quick
TOO_LONG_S = (
    0.02,
    0.1,
)  # a call that took longer does not say when the counter was read; longest on a slow driver
BACK_OFF_S = 0.05, 1.0  # between attempts to read a lost device: at first, and at most
GOLDEN = 0.618033988749895  # its multiples spread evenly over a turn
# a counter that rises faster has not wrapped; where a card tells no limit
ABOVE_LIMIT = 3.0
MOST_W = 5000.0
AGE_SHARE = 0.02  # a relaxed sampler waits this share of its age


class PollingPace:
    """When to read the counter next."""

    def __init__(self, period_s: float, relaxed: bool = False) -> None:
        self._period_s = period_s
        self._relaxed = relaxed
        self._steps: list[float] = []
        self._begun_s = math.nan
        self._step_s = math.inf
        self._phase_s = math.nan  # of the last step that was seen sharply
        self._watching = False  # polling finely for the next one
        self._tried_s = -math.inf  # when the last attempt to see one failed
        self._lost = False  # it failed: look through a whole period
        self._read_s = math.nan
        self._energy_j = math.nan

    def wait_s(self, now_s: float, energy_j: float, quick: bool = False) -> float:
        """Time until the next reading, given the one just made."""
        self._note(now_s, energy_j)
        if self._period_s <= 2.0 * FINE_S:
            return self._period_s
        if quick or len(self._steps) < LEARNT:
            return min(self._period_s, QUICK_S)
        usual_s = self._period_s
        if self._relaxed:
            usual_s = min(
                max(AGE_SHARE * (now_s - self._begun_s), self._period_s, self._step_s), SLOWEST_S
            )
        if self._lost and now_s - self._tried_s < 2.5 * self._step_s:
            return QUICK_S
        if now_s - max(self._phase_s, self._tried_s) < 8.0 * usual_s:
            self._watching = False
            if usual_s < 0.4 * self._step_s:
                return usual_s
            place = (
                now_s + usual_s - self._phase_s
            ) / self._step_s  # moved between steps, to belong to one of them
            return max(usual_s + (math.floor(place) + 0.5 - place) * self._step_s, QUICK_S)
        due_s = (
            self._phase_s - now_s
        ) % self._step_s  # the next step, wherever the last one was seen
        if self._watching and EARLY_S < due_s < self._step_s - EARLY_S:  # it has passed unseen
            self._watching = False
            self._tried_s = now_s
            self._lost = True
            return QUICK_S
        if due_s <= EARLY_S or (self._watching and due_s >= self._step_s - EARLY_S):
            self._watching = True
            return FINE_S
        return due_s - EARLY_S

    def _note(self, now_s: float, energy_j: float) -> None:
        """Remember when the counter stepped, if this reading and the one before saw it closely.

        Its period is the usual time between steps, then, more exactly, that from the first step to
        the latest."""
        self._begun_s = now_s if math.isnan(self._begun_s) else self._begun_s
        stepped = (
            math.isfinite(energy_j) and math.isfinite(self._energy_j) and energy_j != self._energy_j
        )
        if stepped and now_s - self._read_s <= SHARP_S:
            self._phase_s, self._lost = 0.5 * (self._read_s + now_s), False
            if len(self._steps) < LEARNT:
                self._steps.append(self._phase_s)
                self._step_s = median([b - a for a, b in pairwise(self._steps)] or [math.inf])
            if len(self._steps) == LEARNT:
                passed_s = self._phase_s - self._steps[0]
                self._step_s = passed_s / round(passed_s / self._step_s)
        self._read_s = now_s
        self._energy_j = energy_j if math.isfinite(energy_j) else self._energy_j


def poll_source(
    source: EnergySource,
    ring: SampleRing,
    period_s: float,
    parent: int,
    relaxed: bool = False,
    limit_w: float | None = None,
) -> None:
    """Read until told to stop or orphaned; never raises for what the driver does."""
    pace = PollingPace(period_s, relaxed)
    counter = UnwrappedCounter(source.energy_range_j, ABOVE_LIMIT * (limit_w or MOST_W))
    quickest_s = math.inf
    clock_s, other_s = (0.2, 0.2) if relaxed else (max(CLOCK_S, period_s), max(OTHER_S, period_s))
    energy_due_s = clock_due_s = other_due_s = 0.0
    failed = 0  # readings in a row
    readings = 0
    born_ns = time.process_time_ns()
    while not ring.header[layout.STOP] and os.getppid() == parent:
        began_s = read_s = time.monotonic()
        energy_j = math.nan
        clock_hz = math.nan
        slow = SlowReadings()
        try:
            if began_s >= energy_due_s or ring.header[layout.QUICK]:
                energy_j = counter.follow(source.energy_j(), began_s)
                took_s = time.monotonic() - began_s
                read_s = began_s + 0.5 * took_s
                quickest_s = min(quickest_s, took_s)
                if took_s > min(max(TOO_LONG_S[0], 5.0 * quickest_s), TOO_LONG_S[1]):
                    energy_j = math.nan  # a call that hung leaves open to which moment it belongs
                energy_due_s = read_s + pace.wait_s(
                    read_s, energy_j, bool(ring.header[layout.QUICK])
                )
            if began_s >= clock_due_s:
                clock_hz = source.sm_clock_hz()
                clock_due_s = began_s + clock_s
            if began_s >= other_due_s:
                slow = source.slow()
                readings += 1
                # never in step with a load: readings every 0.2 s of one that pulses every 0.2 s see
                # one phase of it
                uneven = 0.75 + 0.5 * (readings * GOLDEN % 1.0)
                other_due_s = began_s + (OTHER_S if ring.header[layout.QUICK] else other_s * uneven)
            ring.header[layout.STATUS] = layout.SAMPLING
            failed = 0
        except ReadError as error:
            ring.header[layout.ERRORS] += 1
            ring.header[layout.STATUS] = layout.LOST if error.lost else layout.SAMPLING
            first_s, longest_s = BACK_OFF_S if error.lost else (FINE_S, BACK_OFF_S[0])
            energy_due_s = clock_due_s = other_due_s = began_s + min(
                first_s * 2.0 ** min(failed, 20), longest_s
            )
            failed += 1
        ring.write((read_s, energy_j, clock_hz, *astuple(slow)))
        ring.header[layout.PROCESSOR_NS] = time.process_time_ns() - born_ns
        quick = ring.header[layout.QUICK]
        due_s = min(energy_due_s, clock_due_s, other_due_s)
        while (left_s := due_s - time.monotonic()) > 0.0:
            if ring.header[layout.STOP] or ring.header[layout.QUICK] != quick:
                break
            time.sleep(min(left_s, WAKE_S))
    ring.header[layout.STATUS] = layout.STOPPED


def main(order: dict[str, Any]) -> int:
    """Run the process as ``Sampler.start`` orders it."""
    parent = os.getppid()
    ring = SampleRing.attach(Path(order["ring"]))
    try:
        source, identity = open_source(order["source"], order["index"])
    except (MissingTool, BadInput) as error:
        told = {"missing": str(error), "is_users": isinstance(error, BadInput)}
        print(json.dumps(told), flush=True)
        return int(error.exit_code)
    print(json.dumps(asdict(identity)), flush=True)
    try:
        poll_source(
            source, ring, order["period_s"], parent, order["relaxed"], identity.power_limit_w
        )
    finally:
        source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
