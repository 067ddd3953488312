"""Measure a command in imagined time while the stand-in card lies, and print what came of each
fault.

Run as a program, because the stand-in is loaded by its name: ``simulated_faults.py SEED COUNT``
prints a JSON object a line. The card's time is a number in a file, which the poller's sleep moves
on, so that a run of ten seconds takes some milliseconds.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import struct
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wattcast.measure import polling_process
from wattcast.measure import sample_ring as layout
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.energy_sources import DeviceIdentity, NvmlSource, SlowReadings
from wattcast.measure.measured_run import RUNS, MeasuredRun
from wattcast.measure.sample_ring import SampleRing
from wattcast.measure.window_summary import summarise_window

LIMIT_W = 700.0
EPOCH_S = 1000.0  # of the card's time
RANGE_MJ = 2**32
KINDS = (
    *(
        "none",
        "frozen",
        "caught up",
        "jump",
        "fall",
        "restart",
        "restart near the top",
        "wrap",
        "rate",
    ),
    *(
        "negative",
        "absurd",
        "one absurd",
        "stale",
        "both stale",
        "lost",
        "hanging",
        "failing counter",
        "missing fields",
    ),
    *("clock forward", "clock back", "stalled poller"),
)


class ImaginedClock:
    """Time that only sleeping and calls of the driver move on.

    The machine may see it with an offset.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(struct.pack("d", EPOCH_S))
        with path.open("r+b") as stream:
            self._page = mmap.mmap(stream.fileno(), 8)
        self.card_s = 0.0
        self.offsets: list[
            tuple[float, float]
        ] = []  # from a moment of the card on, the machine's clock is so much ahead
        self.stalls: list[tuple[float, float]] = []  # at a moment, sleeping takes so much longer

    def restart(self) -> None:
        self.card_s = 0.0
        self.offsets = []
        self.stalls = []
        self.pass_time(0.0)

    def pass_time(self, seconds: float) -> None:
        before_s = self.card_s
        self.card_s += seconds
        for at_s, length_s in self.stalls:
            if before_s <= at_s < self.card_s:
                self.card_s += length_s
        self._page[:8] = struct.pack("d", EPOCH_S + self.card_s)

    def machine_s(self, card_s: float | None = None) -> float:
        """Return what the machine's clock says now, or says at a moment of the card."""
        moment_s = self.card_s if card_s is None else card_s
        return moment_s + sum(ahead_s for at_s, ahead_s in self.offsets if moment_s >= at_s)


class TimedNvml(NvmlSource):
    """The real source, whose calls take the milliseconds that they take on an H200."""

    def __init__(self, clock: ImaginedClock) -> None:
        super().__init__(0)
        self._clock = clock
        self.hangs_s: tuple[float, float] = (math.inf, math.inf)

    def energy_j(self) -> float:
        self._take(3e-3)
        return super().energy_j()

    def sm_clock_hz(self) -> float:
        self._take(3e-4)
        return super().sm_clock_hz()

    def slow(self) -> SlowReadings:
        self._take(6e-4)
        return super().slow()

    def _take(self, seconds: float) -> None:
        begin_s, end_s = self.hangs_s
        now_s = self._clock.card_s
        self._clock.pass_time(end_s - now_s if begin_s <= now_s < end_s else seconds)


@dataclass
class Fault:
    """One fault: lines of the stand-in's script, and what the machine itself does."""

    kind: str
    lines: list[str] = field(default_factory=list)
    offsets: list[tuple[float, float]] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    hangs_s: tuple[float, float] = (math.inf, math.inf)


def draw_load(chance: random.Random, start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Draw moments and the watts from then on: steady, a load amid idle, phases, or pulses."""
    kind = chance.choice(["steady", "load", "phases", "pulses"])
    if kind == "steady":
        return [(-10.0, chance.uniform(80.0, 680.0))]
    if kind == "load":
        return [(-10.0, 90.0), (start_s + 0.05, chance.uniform(200.0, 690.0)), (end_s - 0.05, 90.0)]
    step_s = chance.uniform(0.8, 3.0) if kind == "phases" else chance.uniform(0.15, 0.5)
    watts = [chance.uniform(100.0, 690.0) for _ in range(4)]
    moments = [-10.0]
    while moments[-1] < end_s + 2.0:
        moments.append(max(moments[-1], 0.0) + step_s * chance.uniform(0.7, 1.3))
    return [(at_s, chance.choice(watts)) for at_s in moments]


def draw_fault(
    chance: random.Random, kind: str, start_s: float, end_s: float, drawn_j: float
) -> Fault:
    """Draw the moment and the size of a fault of one kind."""
    length_s = end_s - start_s
    at_s = chance.uniform(start_s - 0.3, end_s + 0.1)
    to_s = at_s + chance.choice([chance.uniform(0.1, 3.0), length_s * chance.uniform(0.1, 1.0)])
    size_mj = 1e3 * drawn_j * 10.0 ** chance.uniform(-2.0, 2.0)
    name = chance.choice(["instant", "average"])
    whole = -10.0, 1e6
    factor = chance.choice([2.0, 0.5, chance.uniform(1.06, 3.0), chance.uniform(0.1, 0.94)])
    begin_s, stop_s = chance.choice([whole, (at_s, to_s), (at_s, 1e6)])
    watts = chance.choice([5000.0, 43_000.0, 4_294_967.0, 1e300])
    lines: dict[str, list[str]] = {
        "frozen": [f"freeze {at_s} {to_s} 0"],
        "caught up": [f"freeze {at_s} {to_s} 1"],
        "jump": [f"jump {at_s} {size_mj}"],
        "fall": [f"start_mj {1e9}", f"jump {at_s} {-min(size_mj, 9e8)}"],
        "restart": [f"start_mj {chance.uniform(1e6, 4e9)}", f"restart {at_s}"],
        "restart near the top": [
            f"start_mj {RANGE_MJ * chance.uniform(0.9, 0.9999)}",
            f"restart {at_s}",
        ],
        "wrap": [f"start_mj {RANGE_MJ - 1e3 * drawn_j * chance.random()}", f"wrap_mj {RANGE_MJ}"],
        "rate": [f"rate {begin_s} {stop_s} {factor}"],
        "absurd": [f"reading {name} {min(1e3 * watts, 4294967295)} {at_s} {to_s}"],
        "one absurd": [f"reading {name} {min(1e3 * watts, 4294967295)} {at_s} {at_s + 0.25}"],
        "negative": [f"reading {name} 4294962296 {at_s} {to_s}"],  # -5 W in 32 bits
        "stale": [f"stale {name} {at_s} {to_s}"],
        "both stale": [f"stale instant {at_s} {to_s}", f"stale average {at_s} {to_s}"],
        "lost": [f"lost {at_s}"],
        "failing counter": [f"error energy 999 {at_s} {to_s}"],
        "missing fields": [
            f"error fields 3 {begin_s} {stop_s}",
            f"error power 3 {begin_s} {stop_s}",
        ],
    }
    fault = Fault(kind, lines.get(kind, []))
    if kind == "hanging":
        fault.hangs_s = at_s, to_s
    if kind == "clock forward":
        fault.offsets = [(at_s, chance.choice([0.5, 2.0, 60.0, 3600.0]) * chance.random())]
    if kind == "clock back":
        fault.offsets = [(at_s, -length_s * chance.uniform(0.05, 0.9))]
    if kind == "stalled poller":
        fault.stalls = [(at_s, to_s - at_s)]
    return fault


def integrate_load(load: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    ends_s = [at_s for at_s, _ in load[1:]] + [math.inf]
    return sum(
        watts * max(min(stop_s, end_s) - max(at_s, start_s), 0.0)
        for (at_s, watts), stop_s in zip(load, ends_s, strict=True)
    )


def poll_run(
    clock: ImaginedClock, source: TimedNvml, ring: SampleRing, start_s: float, end_s: float
) -> tuple[EnergySamples, float, float]:
    """Poll as ``measure run`` does.

    Return the samples, and begin and end of the command by the machine's clock.
    """

    def sleep(seconds: float) -> None:
        clock.pass_time(seconds)
        now_s = clock.card_s
        ring.header[layout.QUICK] = int(RUNS.lead_s <= now_s < start_s + 1e-3 or now_s >= end_s)
        if now_s >= end_s + 0.35:
            ring.header[layout.STOP] = 1

    def monotonic() -> float:
        sleep(1e-5)
        return clock.machine_s()

    polling_process.time = SimpleNamespace(  # type: ignore[attr-defined]
        monotonic=monotonic, sleep=sleep, process_time_ns=lambda: 0
    )
    polling_process.poll_source(source, ring, 0.05, os.getppid(), relaxed=True, limit_w=LIMIT_W)
    return EnergySamples(ring.read()), clock.machine_s(start_s), clock.machine_s(end_s)


def measure_fault(
    chance: random.Random, kind: str, clock: ImaginedClock, folder: Path, script: Path
) -> dict[str, Any]:
    """Measure one run under a fault; return what was drawn and what was said."""
    clock.restart()
    start_s = 1.2 + chance.uniform(0.002, 0.01)
    end_s = start_s + chance.choice([1.0, 2.0, 4.0, 8.0, 20.0, 40.0]) * chance.uniform(0.9, 1.2)
    load = draw_load(chance, start_s, end_s)
    drawn_j = integrate_load(load, start_s, end_s)
    fault = draw_fault(chance, kind, start_s, end_s, drawn_j)
    lines = [f"epoch {EPOCH_S}", *(f"at {at_s} {watts} 1980" for at_s, watts in load), *fault.lines]
    defaults = ["start_mj 1000000", "wrap_mj 0"]
    fresh = script.with_suffix(".new")
    fresh.write_text("\n".join([*defaults, *lines]) + "\n")
    fresh.replace(script)
    ring_path = folder / "ring"
    ring = SampleRing.create(ring_path, 2**16)
    source = TimedNvml(clock)
    identity: DeviceIdentity = source.open()
    clock.offsets, clock.stalls, source.hangs_s = fault.offsets, fault.stalls, fault.hangs_s
    samples, began_s, ended_s = poll_run(clock, source, ring, start_s, end_s)
    source.close()
    lost = int(ring.header[layout.STATUS]) == layout.LOST
    ring_path.unlink()
    true_j = drawn_j
    result = summarise_window("run", samples, began_s, ended_s, limit_w=identity.power_limit_w)
    run = MeasuredRun((), 0, result, identity, samples, began_s)
    energy_j = result.energy_j
    off = None if energy_j is None else energy_j / true_j - 1.0
    return {
        "kind": kind,
        "script": fault.lines
        or [*map(str, fault.offsets), *map(str, fault.stalls), str(fault.hangs_s)],
        "length_s": end_s - start_s,
        "true_j": true_j,
        "energy_j": energy_j,
        "off": off,
        "flags": list(result.flags),
        "doubts": list(result.doubts),
        "believed": result.believed,
        "code": int(run.shell_code),
        "lost": lost,
    }


def main(seed: int, count: int) -> None:
    """Measure ``count`` runs, each with a fault of random kind, moment and size."""
    chance = random.Random(seed)
    script = Path(os.environ["WATTCAST_STANDIN"])
    clock = ImaginedClock(Path(os.environ["WATTCAST_STANDIN_CLOCK"]))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            kind = chance.choice(KINDS)
            print(json.dumps(measure_fault(chance, kind, clock, Path(folder), script)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
