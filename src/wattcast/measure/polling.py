"""The polling process: reads the energy source into the ring until told to stop.

It outlives errors of the driver (a failed reading is NaN and counted), says when the device is gone,
and ends with its parent. Once it knows the counter's step it polls quickly only around the next one:
steps are then timed to a millisecond at a small share of a processor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import deque
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median

from wattcast.errors import MissingTool
from wattcast.measure import ring as layout
from wattcast.measure.ring import Ring
from wattcast.measure.samples import unwrap
from wattcast.measure.source import EnergySource, ReadError, Slow, open_source

FINE_S = 0.001  # between polls when the counter is about to step
EARLY_S = 0.003  # how long before the expected step fine polling begins
CLOCK_POLLS, SLOW_POLLS = 3, 12  # quick polls per reading of the clock, and of everything else


class Pace:
    """When to poll next: evenly, or once steps are known, evenly with a fine comb around each step."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._steps: deque[float] = deque(maxlen=6)
        self._step_s = math.inf
        self._energy_j = math.nan

    def wait_s(self, now_s: float, energy_j: float) -> float:
        """Time until the next poll, given the one just made."""
        if energy_j != self._energy_j and math.isfinite(energy_j):
            if math.isfinite(self._energy_j):
                self._steps.append(now_s)
                self._step_s = median([b - a for a, b in pairwise(self._steps)] or [math.inf])
            self._energy_j = energy_j
        if self._period_s <= 2.0 * FINE_S or len(self._steps) < 3:
            return min(self._period_s, 0.004) if len(self._steps) < 3 else self._period_s
        due_s = self._steps[-1] + self._step_s - now_s
        if -2.0 * EARLY_S < due_s <= EARLY_S:
            return FINE_S
        return min(self._period_s, due_s - EARLY_S) if due_s > EARLY_S else self._period_s


def poll(source: EnergySource, ring: Ring, period_s: float, parent: int) -> None:
    """Read until told to stop or orphaned; never raises for what the driver does."""
    pace, offset_j, previous_j = Pace(period_s), 0.0, 0.0
    clock_s, slow_s = max(CLOCK_POLLS * 0.0015, period_s), max(SLOW_POLLS * 0.0015, 4.0 * period_s)
    clock_due_s = slow_due_s = 0.0
    born_ns = time.process_time_ns()
    while not ring.header[layout.STOP] and os.getppid() == parent:
        began_s = read_s = time.monotonic()
        energy_j, clock_hz, slow = math.nan, math.nan, Slow()
        try:
            energy_j = source.energy_j()
            read_s = 0.5 * (began_s + time.monotonic())
            if began_s >= clock_due_s:
                clock_hz, clock_due_s = source.sm_clock_hz(), began_s + clock_s
            if began_s >= slow_due_s:
                slow, slow_due_s = source.slow(), began_s + slow_s
            ring.header[layout.STATUS] = layout.SAMPLING
        except ReadError as error:
            ring.header[layout.ERRORS] += 1
            ring.header[layout.LAST_ERROR] = error.code
            ring.header[layout.STATUS] = layout.LOST if error.lost else layout.SAMPLING
            time.sleep(0.05 if error.lost else 0.0)
        if math.isfinite(energy_j):
            offset_j, reset = unwrap(previous_j, energy_j, offset_j, source.energy_range_j)
            previous_j = energy_j
            energy_j += offset_j
            ring.header[layout.RESETS] += reset
        ring.write((read_s, energy_j, clock_hz, *slow.values))
        ring.header[layout.PROCESSOR_NS] = time.process_time_ns() - born_ns
        time.sleep(max(pace.wait_s(read_s, energy_j) - (time.monotonic() - began_s), 0.0))
    ring.header[layout.STATUS] = layout.STOPPED


def main(arguments: list[str] | None = None) -> int:
    """Entry of the process: ring file, source, device number, period."""
    parser = argparse.ArgumentParser(prog="wattcast.measure.polling")
    parser.add_argument("ring", type=Path)
    parser.add_argument("source")
    parser.add_argument("index", type=int)
    parser.add_argument("period_s", type=float)
    options = parser.parse_args(arguments)
    parent = os.getppid()
    ring = Ring.attach(options.ring)
    try:
        source, identity = open_source(options.source, options.index)
    except MissingTool as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return int(error.exit_code)
    print(json.dumps(asdict(identity)), flush=True)
    try:
        poll(source, ring, options.period_s, parent)
    finally:
        source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
