"""Measure a stretch of a program, a whole command or an idle device, and compare it with a
prediction.

Energy is read off the steps of the energy counter. What the steps at both ends of a window leave
open is bounded by the power around them. A window with fewer than five whole steps keeps its time
and gets no power, and neither does one in which the counter stopped: a lost device or a hanging
driver draws power that nobody counted. ``flags`` name the reasons to doubt a result."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from wattcast.core.errors import BadInput, ExitCode, MissingTool, Refused, bad_value
from wattcast.core.units import show
from wattcast.core.whole_files import check_writable, write_whole
from wattcast.measure.energy_samples import BENIGN, Array, CounterTicks, EnergySamples, find_ticks
from wattcast.measure.energy_sources import DeviceIdentity
from wattcast.measure.sampler import Sampler
from wattcast.measure.source_check import MOST_W, BelievedSource, check_sources, drop_impossible

LEAST_TICKS = 5
# of the power or energy that late polls, or steps at both ends, may have cost without a flag
LATE_SHARE = 0.01
USUAL_STEP_S = 0.1  # of a counter whose period is not known
BLUR_S = 0.002  # by which polls misplace a step
ONE_LEVEL = 1.03  # between two powers, for them to be one level seen twice
STOPPED_S = (
    0.5  # without a step of a counter whose period is not known, beyond which it has stopped
)
BUSY_S = 0.2  # a step that is missing for less may only have been read late, on a busy machine
CARRIED_SHARE = 1e-3  # of a window that may lie beyond the counter's steps without a flag
DOUBTFUL_SHARE = 0.05  # of the energy: what may be further off makes a result doubtful
TOLERANCE = 0.05  # between a run and its prediction, relative
COARSE_S = (
    0.15  # between readings of a counter whose period is not known, beyond which power is doubtful
)


@dataclass(frozen=True)
class SteadyStretch:
    """A plateau: consecutive counter steps whose power stays within a few percent."""

    start_s: float  # from the beginning of the measurement
    duration_s: float
    power_w: float


@dataclass(frozen=True)
class Measurement:
    """One named window. ``None`` means it could not be measured; ``flags`` say why to be careful."""

    name: str
    duration_s: float
    energy_j: float | None = None
    power_w: float | None = None
    power_spread_w: float | None = None
    peak_w: float | None = None  # largest of the sensor's samples, not of the power itself
    peak_of: str = ""
    sm_clock_hz: float | None = None
    memory_power_w: float | None = None
    temperature_c: float | None = None
    ticks: int = 0
    throttle: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    steady: tuple[SteadyStretch, ...] = ()
    overhead: float | None = (
        None  # share of the processors that the sampler took while the window ran
    )
    unmeasured_s: float | None = (
        None  # of the window in which the counter had stopped, so that there is no energy
    )
    doubts: tuple[str, ...] = ()  # the flags for which energy and power may be off by more than 5 %
    believed: str = (
        ""  # where the joules come from: counter, readings, or neither where they contradict
    )
    readings_j: float | None = (
        None  # joules by power readings, which the counter was checked against
    )

    def require(self) -> Measurement:
        """Return the measurement, or raise ``Refused`` with the reasons when power cannot be
        trusted.
        """
        if self.power_w is None or self.flags:
            raise Refused(f"{self.name}: {', '.join(self.flags) or 'no power'}.")
        return self

    def plain(self) -> dict[str, object]:
        """Return plain data for JSON; what was not measured is left out."""
        values = asdict(self).items()
        return {
            name: v
            for name, v in values
            if v is not None and not (isinstance(v, float) and math.isnan(v))
        }

    @property
    def sentence(self) -> str:
        """One line for people."""
        each = [
            ("{}", self.duration_s, "s"),
            ("{}", self.energy_j, "J"),
            ("mean {}", self.power_w, "W"),
        ]
        each += [
            (f"largest sample {{}} ({self.peak_of})", self.peak_w, "W"),
            ("clock {}", self.sm_clock_hz, "Hz"),
        ]
        parts = ", ".join(
            text.format(show(value, unit)) for text, value, unit in each if value is not None
        )
        return f"{self.name}: {parts}" + (f" [{', '.join(self.flags)}]" if self.flags else "")


def summarise_window(
    name: str,
    samples: EnergySamples,
    start_s: float,
    end_s: float,
    overhead: float | None = None,
    limit_w: float | None = None,
) -> Measurement:
    """Evaluate the window from ``start_s`` to ``end_s``; ``samples`` should reach a step beyond
    both ends.

    ``limit_w`` is the card's power limit, which the counter and the readings are checked against.
    """
    most_w = limit_w or MOST_W
    samples, impossible = drop_impossible(samples, most_w, (start_s, end_s))
    ticks = find_ticks(samples)
    seen = samples.between(start_s, end_s)
    inside = ticks.between(start_s, end_s)
    duration_s = end_s - start_s
    flags, stopped_s = _find_flags(seen, inside, ticks, start_s, end_s)
    if not ticks.intervals and len(samples.known("energy_j")) and duration_s > STOPPED_S:
        stopped_s = duration_s  # a counter that was read and never stepped
    is_reset = "counter_reset" in flags
    has_energy = inside.intervals >= LEAST_TICKS and not is_reset and not stopped_s
    doubts = [f for f in flags if f == "counter_reset"]
    needed_s = 2.0 * LEAST_TICKS * (ticks.step_s or USUAL_STEP_S)
    if not has_energy and len(samples.known("energy_j")) and duration_s > needed_s:
        doubts += [f for f in flags if f.endswith("needed")]
    if has_energy and _uncounted_s(ticks, start_s, end_s) > DOUBTFUL_SHARE * duration_s:
        doubts += [f for f in flags if f.startswith(("counter started", "counter stopped"))]
    energy_j, doubt_j = (
        bound_energy_j(ticks, samples, start_s, end_s) if has_energy else (None, 0.0)
    )
    check = check_sources(samples, ticks, (start_s, end_s), energy_j, limit_w)
    if energy_j is not None and doubt_j > LATE_SHARE * energy_j:
        flags += (f"energy known only to {show(doubt_j, 'J')}: power changed at the start or end",)
        if doubt_j > DOUBTFUL_SHARE * energy_j:
            doubts.append(flags[-1])
    if inside.power_doubt > DOUBTFUL_SHARE:
        doubts.append("late_polls")
    believed = check.believed
    if (
        energy_j is not None
        and believed is BelievedSource.READINGS
        and check.readings_j is not None
    ):
        energy_j = check.readings_j
    peak_w, peak_of = _find_peak(seen, inside)
    return Measurement(
        name,
        duration_s,
        energy_j=energy_j,
        power_w=energy_j / duration_s if energy_j is not None else None,
        power_spread_w=inside.spread_w if has_energy else None,
        peak_w=peak_w,
        peak_of=peak_of,
        sm_clock_hz=seen.mean("sm_clock_hz"),
        memory_power_w=seen.mean("memory_w"),
        temperature_c=seen.mean("temperature_c"),
        ticks=inside.intervals,
        throttle=seen.throttle,
        flags=(*flags, *impossible, *check.flags, *check.doubts),
        steady=find_stretches(inside, start_s) if has_energy else (),
        overhead=overhead,
        unmeasured_s=stopped_s or None,
        doubts=(*doubts, *check.doubts),
        believed=str(believed),
        readings_j=check.readings_j,
    )


def _uncounted_s(ticks: CounterTicks, start_s: float, end_s: float) -> float:
    """Return how much of a window lies before the first step of the counter and after the last."""
    before_s = max(float(ticks.time_s[0]) - start_s, 0.0)
    after_s = max(end_s - float(ticks.time_s[-1]), 0.0)
    return before_s + after_s


def _find_peak(seen: EnergySamples, inside: CounterTicks) -> tuple[float | None, str]:
    """Return the largest power that was seen, and by which sensor."""
    instant_w = seen.known("instant_w")
    if len(instant_w):
        return float(instant_w.max()), "instant readings"
    if inside.intervals:
        return float(inside.interval_w.max()), "counter steps"
    return None, ""


def bound_energy_j(
    stepped: CounterTicks, samples: EnergySamples, start_s: float, end_s: float
) -> tuple[float, float]:
    """Return the joules between two moments, and by how many they may be off."""
    begun = _locate_energy(stepped, samples, start_s, False)
    ended = _locate_energy(stepped, samples, end_s, True)
    best_j, least_j, most_j = ended - begun[[0, 2, 1]]
    return float(best_j), float(max(best_j - least_j, most_j - best_j))


def _locate_energy(
    stepped: CounterTicks, samples: EnergySamples, moment_s: float, ends: bool
) -> Array:
    """Return what the counter would say at a moment inside a step: the best guess, the least and
    the most.

    Power is taken to jump once in the step, from that of the step before to that of the step after.
    Where this does not give the step's energy, power outside the window is that of the next step
    there. Its bounds are the lowest and the highest level of two steps on either side and of the
    readings there, or of all where one of these was missed. A level was seen twice, because a pulse
    may lie across two steps. Beyond the steps power goes on as it was."""
    time_s = stepped.time_s
    energy_j = stepped.energy_j
    watts = stepped.interval_w
    place = int(np.clip(np.searchsorted(time_s, moment_s) - 1, 0, len(watts) - 1))
    passed_s = moment_s - time_s[place]
    left_s = time_s[place + 1] - moment_s
    own_w = watts[place]
    if passed_s < 0.0 or left_s < 0.0:
        return np.full(3, energy_j[place] + own_w * passed_s)
    first = max(place - 2, 0)
    last = min(place + 3, len(watts))
    if time_s[last] - time_s[first] > 1.2 * (last - first) * (
        stepped.step_s or np.median(np.diff(time_s))
    ):
        first = 0
        last = len(watts)
    read_w = samples.between(time_s[first], time_s[last]).known("instant_w")
    around_w = np.sort(np.concatenate([watts[first:place], watts[place + 1 : last], read_w]))
    # without a limit
    lowest_w = 0.0
    highest_w = 1e9
    for seen_w in (np.sort(np.delete(watts, place)), around_w):
        if len(seen_w) > 1 and ONE_LEVEL * own_w >= seen_w[0] >= seen_w[1] / ONE_LEVEL:
            lowest_w = min(own_w, seen_w[0])
    if len(around_w) > 1 and own_w / ONE_LEVEL <= around_w[-1] <= ONE_LEVEL * around_w[-2]:
        highest_w = max(own_w, around_w[-1])
    counted_j = own_w * (passed_s + left_s)
    blur_j = BLUR_S * (max([own_w, *around_w]) - lowest_w)
    least_j = max(lowest_w * passed_s, counted_j - highest_w * left_s) - blur_j
    most_j = min(highest_w * passed_s, counted_j - lowest_w * left_s) + blur_j
    before_w = watts[max(place - 1, 0)]
    after_w = watts[min(place + 1, len(watts) - 1)]
    by_before_j = before_w * passed_s
    by_after_j = counted_j - after_w * left_s
    best_j = by_after_j if ends else by_before_j
    if min(before_w, after_w) <= own_w <= max(before_w, after_w):
        best_j = (max if before_w < after_w else min)(by_before_j, by_after_j)
    return np.array([np.clip(best_j, least_j, most_j), least_j, most_j]) + float(energy_j[place])


def find_stretches(inside: CounterTicks, origin_s: float) -> tuple[SteadyStretch, ...]:
    """Return the plateaus of at least eight steps within 4 % of their median power.

    Steps at either end of a plateau are mixed with what lies outside and are left out.
    """
    watts = inside.interval_w
    found: list[SteadyStretch] = []
    first = 0
    for place in range(1, len(watts) + 1):
        stretch = watts[first:place]
        ended = place == len(watts)
        if not ended and abs(watts[place] - np.median(stretch)) <= 0.04 * np.median(stretch):
            continue
        if place - first >= 8:
            begin = first + 1
            end = place - 1
            length_s = inside.time_s[end] - inside.time_s[begin]
            power_w = (inside.energy_j[end] - inside.energy_j[begin]) / length_s
            found.append(
                SteadyStretch(
                    float(inside.time_s[begin] - origin_s), float(length_s), float(power_w)
                )
            )
        first = place
    return tuple(found)


def _find_flags(
    held: EnergySamples, inside: CounterTicks, stepped: CounterTicks, start_s: float, end_s: float
) -> tuple[tuple[str, ...], float]:
    """Return the reasons to doubt a window, and how long the counter had stopped in it: 0 where it
    had not.
    """
    flags = []
    stopped_s = 0.0
    if inside.intervals < LEAST_TICKS:
        flags.append(f"{inside.intervals} counter steps, {LEAST_TICKS} needed")
    step_s = stepped.step_s or BUSY_S
    around = stepped.between(start_s - step_s, end_s + step_s)
    if (np.diff(around.energy_j) < 0.0).any():
        flags.append("counter_reset")
    apart_s = float(np.median(np.diff(inside.time_s))) if inside.intervals else 0.0
    if inside.step_s is None and apart_s > COARSE_S:
        flags.append(f"steps of the counter known only to {apart_s:.2f} s")
    if inside.power_doubt > LATE_SHARE:
        flags.append("late_polls")
    gap_s = np.diff(held["time_s"]).max(initial=0.0) if len(held) else end_s - start_s
    if gap_s > 1.0:
        flags.append(f"no samples for {gap_s:.1f} s")
    flags += [f"throttle_{reason}" for reason in held.throttle if reason not in BENIGN]
    if stepped.intervals:
        late_s = max(float(stepped.time_s[0]) - start_s, 0.0)
        early_s = max(end_s - float(stepped.time_s[-1]), 0.0)
        allowed_s = max(2.0 * stepped.step_s, BUSY_S) if stepped.step_s else STOPPED_S
        for apart_s, what in (
            (late_s, "started {:.2f} s late"),
            (early_s, "stopped {:.2f} s before the end"),
        ):
            if apart_s > allowed_s:
                stopped_s += apart_s
            if apart_s > CARRIED_SHARE * (end_s - start_s):
                flags.append("counter " + what.format(apart_s))
        if stopped_s and inside.intervals and "counter_reset" not in flags:
            flags.append(f"{inside.energy_j[-1] - inside.energy_j[0]:.0f} J counted until then")
    return tuple(flags), stopped_s


LEAD_S = 1.1  # before the outermost window, to learn the counter's period
TAIL_S = 0.25  # samples beyond the end, so that the counter steps once more
LONGEST_TAIL_S = 1.0  # on a machine too busy to see that step in time


@dataclass
class OpenWindow:
    """A window while it runs; ``result`` is filled when the block ends."""

    name: str
    started_s: float
    inner: list[OpenWindow] = field(default_factory=list)
    _result: Measurement | None = None

    @property
    def result(self) -> Measurement:
        """What was measured; refused while the block still runs."""
        if self._result is None:
            raise Refused(f"{self.name}: still running; read the result after the block.")
        return self._result

    @property
    def duration_s(self) -> float:
        """Seconds from the begin to the end of the block."""
        return self.result.duration_s

    @property
    def energy_j(self) -> float | None:
        """Joules of the device; None where they could not be measured."""
        return self.result.energy_j

    @property
    def power_w(self) -> float | None:
        """Mean watts of the device; None where they could not be measured."""
        return self.result.power_w


_open: list[
    tuple[Sampler, list[OpenWindow]]
] = []  # the sampler of the outermost window, and all that run inside it


@contextmanager
def measure(
    name: str = "block", source: str = "auto", device: int | None = None, period_s: float = 0.05
) -> Iterator[OpenWindow]:
    """Measure time, energy, mean power and clock of a block; blocks may be nested.

        with wattcast.measure("prefill") as run:
            ...  # synchronise the GPU before the block ends
        run.energy_j, run.power_w, run.duration_s

    ``source`` is ``auto``, ``nvml``, ``amd`` or ``rapl``; ``device`` counts as
    the driver does, from 0; without it, the first card that ``CUDA_VISIBLE_DEVICES`` shows. Raises
    ``MissingTool`` when nothing here can be measured. The first block waits 1.1 s to learn the
    counter's period. A block with too few steps of the counter carries a flag in
    ``run.result.flags``; energy or power is None where it is unknown."""
    outermost = not _open
    if outermost:
        started = Sampler(source, device, period_s)
        started.start()
        time.sleep(LEAD_S)
        _await_step(started, 0.0)
        started.quick(False)
        _open.append((started, []))
    sampler, running = _open[-1]
    live = OpenWindow(name, time.monotonic())
    if running:
        running[-1].inner.append(live)
    running.append(live)
    try:
        yield live
    finally:
        end_s = time.monotonic()
        running.remove(live)
        live._result = Measurement(live.name, end_s - live.started_s, flags=("not evaluated",))
        try:
            if outermost:
                _await_step(sampler)
            samples = sampler.since(0)
            limit_w = sampler.identity.power_limit_w
            live._result = summarise_window(
                live.name, samples, live.started_s, end_s, limit_w=limit_w
            )
            for inner in live.inner:  # with the samples that came after they ended
                inner_end_s = inner.started_s + inner.result.duration_s
                inner._result = summarise_window(
                    inner.name, samples, inner.started_s, inner_end_s, limit_w=limit_w
                )
        finally:
            if outermost:
                _open.pop()
                sampler.stop()


def _await_step(sampler: Sampler, least_s: float = TAIL_S) -> None:
    """Poll quickly for ``least_s`` and until the counter has stepped, or cannot be expected to."""
    mark = sampler.head
    began_s = time.monotonic()
    sampler.quick(True)
    time.sleep(least_s)
    while time.monotonic() - began_s < LONGEST_TAIL_S and not sampler.lost:
        seen_j = sampler.since(mark).known("energy_j")
        if len(seen_j) and seen_j[-1] != seen_j[0]:
            break
        time.sleep(0.002)


@dataclass(frozen=True)
class MeasuredRun:
    """A finished command: its measurement, its exit code, the device and the samples."""

    command: tuple[str, ...]
    exit_code: int
    measurement: Measurement
    identity: DeviceIdentity
    samples: EnergySamples
    started_s: float

    @property
    def shell_code(self) -> int:
        """The command's exit code; 5 where it ended well and its energy is unknown or doubtful."""
        is_doubtful = self.measurement.unmeasured_s or self.measurement.doubts
        return self.exit_code or (ExitCode.REFUSED if is_doubtful else ExitCode.OK)

    def plain(self) -> dict[str, object]:
        """Return plain data for JSON."""
        device = {
            name: getattr(self.identity, name) for name in ("index", "name", "uuid", "driver")
        }
        told = {"command": list(self.command), "exit_code": self.exit_code, "device": device}
        return told | self.measurement.plain()


def run_command(
    command: list[str],
    source: str = "auto",
    index: int | None = None,
    period_s: float = 0.05,
    pass_output: bool = True,
) -> MeasuredRun:
    """Run ``command`` to its end beside the sampler; with ``pass_output`` false its stdout goes to
    our stderr.
    """
    if not command:
        raise BadInput(
            "measure run: expected a command after --, got none. Example: measure run -- python train.py"
        )
    with Sampler(source, index, period_s, relaxed=True) as sampler:
        time.sleep(LEAD_S)
        _await_step(sampler, 0.0)  # so that next to nothing of the step before belongs to the run
        spent_s = sampler.processor_s
        started_s = time.monotonic()
        with PassedSignals() as signals:
            try:
                started = signals.start_program(command, stdout=None if pass_output else 2)
                sampler.quick(False)
                code = started.wait()
            except FileNotFoundError:
                raise BadInput(f"measure run: there is no command {command[0]!r}.") from None
            except PermissionError:
                raise BadInput(f"measure run: {command[0]!r} may not be run.") from None
            ended_s = time.monotonic()
            processors = (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            )
            overhead = (sampler.processor_s - spent_s) / (ended_s - started_s) / processors
            _await_step(sampler)
            samples = sampler.since(0)
            identity = sampler.identity
            lost = sampler.lost
    # as a shell gives it
    label = command[0].rsplit("/", 1)[-1]
    exit_code = code if code >= 0 else 128 - code
    result = summarise_window(label, samples, started_s, ended_s, overhead, identity.power_limit_w)
    if identity.flag:
        result = replace(result, flags=(*result.flags, identity.flag))
    if lost:
        unmeasured_s = result.unmeasured_s or (
            result.duration_s if result.energy_j is None else None
        )
        result = replace(result, flags=("device lost", *result.flags), unmeasured_s=unmeasured_s)
    return MeasuredRun(tuple(command), exit_code, result, identity, samples, started_s)


class PassedSignals:
    """Pass signals that would end this process on to a program and remember that one came.

    The way out is then the usual one, with all that is to be done on it.
    """

    ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.came = False  # no Event: its lock may be held by the very code a signal interrupts
        self.process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> PassedSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._note_signal) for number in self.ENDING
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start_program(self, words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start the program that signals are passed on to; ``options`` are those of ``Popen``."""
        self.process = subprocess.Popen(list(words), **options)
        return self.process

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        self.came = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def measure_idle(
    length_s: float = 3.0, source: str = "auto", index: int | None = None
) -> tuple[Measurement, DeviceIdentity]:
    """Measure mean power over ``length_s``; refuse when someone else's work made it drift."""
    with Sampler(source, index, period_s=0.02) as sampler:
        time.sleep(1.1)
        began_s = time.monotonic()
        time.sleep(length_s)
        ended_s = time.monotonic()
        _await_step(sampler)
        sampler.check()
        identity = sampler.identity
        result = summarise_window(
            "idle", sampler.since(0), began_s, ended_s, limit_w=identity.power_limit_w
        )
    if result.unmeasured_s or result.doubts:
        raise Refused(f"idle: {', '.join(result.flags)}.")
    spread_w = result.power_spread_w or 0.0
    if result.power_w is not None and spread_w > 0.1 * result.power_w + 2.0:
        raise Refused(
            f"idle power spread by {spread_w:.0f} W around {result.power_w:.0f} W: something else is running on "
            f"{identity.name}. Stop it, or measure later."
        )
    return result, identity


class ModelTerm(StrEnum):
    """What to look at first."""

    NONE = "none"
    CLOCK = "clock"
    HOST = "host"
    KERNELS = "kernels"
    ENERGY = "energy"


@dataclass(frozen=True)
class RunVerdict:
    """Ratios measured over predicted, the term that is off most, and a sentence that says so."""

    latency: float
    power: float
    energy: float
    clock: float | None
    term: ModelTerm
    sentence: str

    def plain(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def compare_with_prediction(
    measurement: Measurement,
    predicted: Mapping[str, Any],
    iterations: int = 1,
    where: str = "prediction",
) -> RunVerdict:
    """Compare a measured window with the first prediction of ``wattcast predict --json``, and name
    the term at fault.

    ``iterations`` is how often the window ran the predicted workload. Power is the mean over the
    window, so start-up and loading belong outside it.

    The time ratio is split into a clock part and a cycle part (time = cycles / clock); the rest
    points at a term:

    - the clock differs and cycles agree: the governor (power under the cap, or the clock law);
    - cycles differ and power fell: the GPU waited for the host (launch cost, gaps, missing graph);
    - cycles differ and power did not fall: the kernels (tiles, traffic, missing operators);
    - time agrees and power differs: the energies, or the assumed data (toggling).
    """
    try:
        first = predicted["predictions"][0]
        figures = {name: float(first[name]) for name in ("latency_s", "power_w", "clock_hz")}
        busy_s = float(first.get("busy_s", figures["latency_s"]))
    except (KeyError, IndexError, TypeError, ValueError):
        raise BadInput(f"{where}: expected the output of `wattcast predict --json`.") from None
    for name, value in figures.items():
        if not 0.0 < value < math.inf:
            raise bad_value(f"{where}: {name}", "a finite number above zero", value)
    if iterations < 1:
        raise bad_value("--iterations", "a whole number of at least 1", iterations)
    if not measurement.power_w:
        raise Refused(
            f"{measurement.name}: {', '.join(measurement.flags) or 'no power'}; nothing to compare."
        )
    latency = measurement.duration_s / iterations / figures["latency_s"]
    power = measurement.power_w / figures["power_w"]
    seen_hz = measurement.sm_clock_hz
    clock = seen_hz / figures["clock_hz"] if seen_hz else None
    host_share = 1.0 - busy_s / figures["latency_s"]
    cycles = latency * (clock or 1.0)
    if abs(latency - 1.0) <= TOLERANCE:
        term = ModelTerm.ENERGY if abs(power - 1.0) > TOLERANCE else ModelTerm.NONE
    elif clock is not None and 2.0 * abs(clock - 1.0) > abs(latency - 1.0) > abs(cycles - 1.0):
        term = ModelTerm.CLOCK
    elif (latency > 1.0 and power < 1.0 - 0.5 * TOLERANCE) or host_share > 0.3:
        term = ModelTerm.HOST
    else:
        term = ModelTerm.KERNELS
    ratios = {
        "measured time is": latency,
        "power": power,
        "energy": latency * power,
        "clock": clock,
    }
    parts = ", ".join(
        f"{name} {100.0 * (r - 1.0):+.1f} %" for name, r in ratios.items() if r is not None
    )
    share = (
        f" ({100 * host_share:.0f} % of it was predicted as host time)" if host_share > 0.0 else ""
    )
    sentence = f"{parts} against the prediction{share}. {_ADVICE[term]}"
    return RunVerdict(latency, power, latency * power, clock, term, sentence)


_ADVICE = {
    ModelTerm.NONE: "Both agree within the tolerance.",
    ModelTerm.CLOCK: "The clock explains it: look at the power cap, the power limit and the clock law.",
    ModelTerm.HOST: "The GPU waited for the host: calibrate the launch cost (--host-launch).",
    ModelTerm.KERNELS: "The kernels took other cycles than predicted: look for missing operators, tiles and traffic.",
    ModelTerm.ENERGY: "Time agrees and power does not: look at the energies, the data (toggling) and temperature.",
}


ENDINGS = (".png", ".svg", ".pdf")


def check_figure_path(path: Path) -> None:
    """Raise an error, before anything is measured, where a figure could not be saved under this
    name.
    """
    if path.suffix.lower() not in ENDINGS or path.is_dir():
        raise bad_value(
            "--plot", f"a file that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}", str(path)
        )
    if not path.absolute().parent.is_dir():
        raise bad_value(
            "--plot", "a file in a folder that exists", str(path), "Create the folder first."
        )
    check_writable(path)


def save_run_figure(figure: Any, path: Path) -> None:
    """Write a figure by the ending of its name; whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lower().lstrip("."), dpi=150)
    write_whole(path, drawn.getvalue())


def draw_run_power(run: MeasuredRun, predicted: Mapping[str, Any] | None = None) -> Any:
    """Draw power above and clock below: measured as dots, what ``predict --json`` says as a line
    and interval.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingTool(
            "--plot needs matplotlib, which is not installed (pip install 'wattcast[plot]')."
        ) from None
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    power, clock = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    stepped = find_ticks(run.samples)
    samples = run.samples
    time_s = samples["time_s"] - run.started_s
    edge_s = stepped.time_s - run.started_s
    if stepped.intervals:
        label = "measured, steps of the energy counter"
        power.plot(
            0.5 * (edge_s[1:] + edge_s[:-1]),
            stepped.interval_w,
            "o",
            ms=4,
            color="#000000",
            label=label,
        )
    power.plot(time_s, samples["instant_w"], ".", ms=3, color="#888888", label="instant readings")
    clock.plot(time_s, samples["sm_clock_hz"] / 1e6, ".", ms=3, color="#000000")
    if predicted is not None:
        name = f"predicted: {predicted['name']} on {predicted['gpu']}"
        power.axhline(predicted["power_w"], color="#332288", label=name)
        power.axhspan(*predicted["interval"]["power_w"], color="#332288", alpha=0.12, lw=0)
        clock.axhline(predicted["clock_hz"] / 1e6, color="#332288")
    for axes in (power, clock):
        axes.axvspan(0.0, run.measurement.duration_s, color="0.94", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0.0)
    power.set(ylabel="Power (W)", title=" ".join(run.command)[:80])
    clock.set(ylabel="SM clock (MHz)", xlabel="Time (s)")
    power.legend(frameon=False, loc="lower right")
    figure.supxlabel(f"{run.identity.name}, driver {run.identity.driver or 'unknown'}")
    return figure
