"""Measure a stretch of a program, a whole command or an idle device.

``measure`` is a context manager for a block of Python, ``run_command`` runs a program to its end,
and ``measure_idle`` watches a card that has nothing to do. Each starts a sampler, waits until the
energy counter's period is known, and summarises the samples in a window (``window_summary``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import (
    dataclass,
    field,
    replace,
)
from types import FrameType
from typing import Any

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.errors import (
    BadInput,
    ExitCode,
    Refused,
)
from wattcast.core.user_results import UserResult
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.energy_sources import DeviceIdentity
from wattcast.measure.sampler import Sampler
from wattcast.measure.window_summary import Measurement, summarise_window


class MeasuredRunCoefficients(Coefficients):
    """How long a counter is watched around a run, and when a card is idle."""

    lead_s: float  # before the outermost window, to learn the counter's period
    tail_s: float  # samples beyond the end, so that the counter steps once more
    longest_tail_s: float  # on a machine too busy to see that step in time
    idle_spread_share: float  # of the mean, by which idle power may spread
    idle_spread_w: float  # beside that share, by which idle power may spread


RUNS = load_coefficients("measured_runs", MeasuredRunCoefficients)


TAIL_POLL_S = 0.002  # between looks for that step
IDLE_PERIOD_S = 0.02  # between polls of an idle card


@dataclass(repr=False)
class OpenWindow(UserResult):
    """A window while it runs; ``result`` is filled when the block ends."""

    drawn_by = "wattcast.report.result_figures:draw_window"

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
    def summary_line(self) -> str:
        """The answer in a line, or that the block still runs."""
        if self._result is None:
            return f"{self.name}: still running"
        return self._result.summary_line

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; what was not measured is left out."""
        return self.result.to_dict()

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

    def _evaluate(
        self,
        samples: EnergySamples,
        end_s: float,
        limit_w: float | None,
    ) -> None:
        """Summarise this window, and again those inside it, with the samples since they ended."""
        self._result = summarise_window(
            self.name,
            samples,
            self.started_s,
            end_s,
            limit_w=limit_w,
        )
        for window in self.inner:
            window_end_s = window.started_s + window.result.duration_s
            window._result = summarise_window(
                window.name,
                samples,
                window.started_s,
                window_end_s,
                limit_w=limit_w,
            )


# The sampler of the outermost window, and all windows that run inside it.
_open: list[tuple[Sampler, list[OpenWindow]]] = []


@contextmanager
def measure(
    name: str = "block",
    source: str = "auto",
    device: int | None = None,
    period_s: float = 0.05,
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
    is_outermost = not _open
    if is_outermost:
        _open.append((_start_sampler(source, device, period_s), []))
    sampler, running = _open[-1]
    window = OpenWindow(name, time.monotonic())
    if running:
        running[-1].inner.append(window)
    running.append(window)
    try:
        yield window
    finally:
        end_s = time.monotonic()
        running.remove(window)
        window._result = Measurement(name, end_s - window.started_s, flags=("not evaluated",))
        try:
            if is_outermost:
                _await_step(sampler)
            samples = sampler.since(0)
            window._evaluate(samples, end_s, sampler.identity.power_limit_w)
        finally:
            if is_outermost:
                _open.pop()
                sampler.stop()


def _start_sampler(
    source: str,
    device: int | None,
    period_s: float,
) -> Sampler:
    """Start a sampler and wait until it knows the period of the energy counter."""
    sampler = Sampler(source, device, period_s)
    sampler.start()
    time.sleep(RUNS.lead_s)
    _await_step(sampler, 0.0)
    sampler.quick(False)
    return sampler


def _await_step(sampler: Sampler, least_s: float = RUNS.tail_s) -> None:
    """Poll quickly for ``least_s`` and until the counter has stepped, or cannot be expected to."""
    mark = sampler.head
    began_s = time.monotonic()
    sampler.quick(True)
    time.sleep(least_s)
    while time.monotonic() - began_s < RUNS.longest_tail_s and not sampler.lost:
        seen_j = sampler.since(mark).known("energy_j")
        if len(seen_j) and seen_j[-1] != seen_j[0]:
            break
        time.sleep(TAIL_POLL_S)


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
        identity = self.identity
        device = {
            "index": identity.index,
            "name": identity.name,
            "uuid": identity.uuid,
            "driver": identity.driver,
        }
        run = {
            "command": list(self.command),
            "exit_code": self.exit_code,
            "device": device,
        }
        return run | self.measurement.plain()


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
            "measure run: expected a command after --, got none. Example: measure run -- "
            "python train.py"
        )
    with Sampler(source, index, period_s, relaxed=True) as sampler:
        time.sleep(RUNS.lead_s)
        _await_step(sampler, 0.0)  # so that next to nothing of the step before belongs to the run
        processor_before_s = sampler.processor_s
        started_s = time.monotonic()
        with PassedSignals() as signals:
            code = _wait_for_command(signals, command, sampler, pass_output)
            ended_s = time.monotonic()
            processor_s = sampler.processor_s - processor_before_s
            overhead = processor_s / (ended_s - started_s) / _count_processors()
            _await_step(sampler)
            samples = sampler.since(0)
            identity = sampler.identity
            is_lost = sampler.lost

    label = command[0].rsplit("/", 1)[-1]
    result = summarise_window(
        label,
        samples,
        started_s,
        ended_s,
        overhead,
        identity.power_limit_w,
    )
    if identity.flag:
        result = replace(result, flags=(*result.flags, identity.flag))
    if is_lost:
        result = _mark_lost(result)
    exit_code = code if code >= 0 else 128 - code  # a signal's number, as a shell gives it
    return MeasuredRun(
        tuple(command),
        exit_code,
        result,
        identity,
        samples,
        started_s,
    )


def _wait_for_command(
    signals: PassedSignals,
    command: list[str],
    sampler: Sampler,
    pass_output: bool,
) -> int:
    """Run a command to its end and return its code; the sampler polls at its usual pace."""
    stdout = None if pass_output else 2
    try:
        process = signals.start_program(command, stdout=stdout)
        sampler.quick(False)
        return process.wait()
    except FileNotFoundError:
        raise BadInput(f"measure run: there is no command {command[0]!r}.") from None
    except PermissionError:
        raise BadInput(f"measure run: {command[0]!r} may not be run.") from None


def _count_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _mark_lost(result: Measurement) -> Measurement:
    """Flag a measurement during which the device vanished."""
    unmeasured_s = result.unmeasured_s
    if not unmeasured_s and result.energy_j is None:
        unmeasured_s = result.duration_s
    return replace(result, flags=("device lost", *result.flags), unmeasured_s=unmeasured_s)


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
            for number in self.ENDING:
                self._before[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start_program(
        self,
        words: Sequence[str],
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start the program that signals are passed on to; ``options`` are those of ``Popen``."""
        self.process = subprocess.Popen(list(words), **options)
        return self.process

    def _note_signal(
        self,
        number: int,
        _: FrameType | None,
    ) -> None:
        self.came = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def measure_idle(
    length_s: float = 3.0,
    source: str = "auto",
    index: int | None = None,
) -> tuple[Measurement, DeviceIdentity]:
    """Measure mean power over ``length_s``; refuse when someone else's work made it drift."""
    with Sampler(source, index, IDLE_PERIOD_S) as sampler:
        time.sleep(RUNS.lead_s)
        began_s = time.monotonic()
        time.sleep(length_s)
        ended_s = time.monotonic()
        _await_step(sampler)
        sampler.check()
        samples = sampler.since(0)
        identity = sampler.identity
        limit_w = identity.power_limit_w
        result = summarise_window(
            "idle",
            samples,
            began_s,
            ended_s,
            limit_w=limit_w,
        )
    if result.unmeasured_s or result.doubts:
        raise Refused(f"idle: {', '.join(result.flags)}.")
    power_w = result.power_w
    spread_w = result.power_spread_w or 0.0
    if power_w is not None and spread_w > RUNS.idle_spread_share * power_w + RUNS.idle_spread_w:
        raise Refused(
            f"idle power spread by {spread_w:.0f} W around {power_w:.0f} W: something else is "
            f"running on {identity.name}. Stop it, or measure later."
        )
    return result, identity
