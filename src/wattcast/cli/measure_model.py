"""``measure run --model``: power of a command estimated from its kernel launches, beside what was measured.

The command writes a profiler trace; counters of its kernels were collected once, per kernel and launch
configuration, and are reused for every launch [Stokke2016, figure 7].
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattcast.activity.profiled import metrics_for
from wattcast.errors import bad_value
from wattcast.hardware import OperatingPoint
from wattcast.hardware import load as load_gpu
from wattcast.measure.kernels.counters import collect_command
from wattcast.measure.measurement import Measurement, measured
from wattcast.measure.run import Run
from wattcast.power.launch_log import LaunchLog, read_book, read_launches
from wattcast.power.launches import CounterBook, Estimate, Launch, estimate
from wattcast.power.saved import SavedModel, load
from wattcast.units import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Prepared:
    """What can be read before the command runs, so that a bad file costs nothing."""

    saved: SavedModel
    book: CounterBook
    trace: Path


@dataclass(frozen=True)
class Estimated:
    """Power from launches, and the measurement of the same stretch where the two clocks can be joined."""

    estimate: Estimate
    same_stretch: Measurement | None
    origin_s: float | None  # of the estimate's time on the sampler's clock

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        whole_s = float(self.estimate.activity.duration_s.sum())
        known_s = float((self.estimate.activity.duration_s * self.estimate.known).sum())
        watts = self.estimate.power.part_w
        share = (watts.T * self.estimate.activity.duration_s * self.estimate.known).sum(axis=-1)
        parts = dict(zip(self.estimate.power.parts, (share / known_s if known_s else share).tolist(), strict=True))
        plain: dict[str, Any] = {
            "power_w": self.estimate.mean_w,
            "energy_j": self.estimate.energy_j,
            "traced_s": whole_s,
            "known_share": known_s / whole_s,
            "part_w": parts,
            "without_counters": [
                {"kernel": key.kernel, "grid": key.grid, "block": key.block} for key in self.estimate.unknown
            ],
        }
        if self.same_stretch is not None:
            plain["measured_w"] = self.same_stretch.power_w
            plain["measured_flags"] = list(self.same_stretch.flags)
        return plain

    @property
    def sentence(self) -> str:
        """For people."""
        plain = self.plain()
        text = f"model: mean {show(self.estimate.mean_w, 'W')} over {show(plain['traced_s'], 's')} of kernel launches"
        missing = plain["without_counters"]
        if missing:
            text += (
                f"; {len(missing)} kernels have no counters ({100 * (1 - plain['known_share']):.0f} % of the time), "
                f"the first: {missing[0]['kernel'][:60]} grid {missing[0]['grid']} block {missing[0]['block']}"
            )
        if self.same_stretch is None:
            return text + "; the trace does not say when it was taken, so it cannot be set beside the measurement."
        if self.same_stretch.power_w is None:
            return text + f"; the same stretch was not measured ({', '.join(self.same_stretch.flags)})."
        off = self.estimate.mean_w / self.same_stretch.power_w - 1.0
        return text + f"; measured {show(self.same_stretch.power_w, 'W')} over the same ({100 * off:+.1f} %)."

    def figure(self, run: Run) -> Figure:
        """Parts stacked over time, measured power as dots."""
        return _figure(self, run)


def prepare(model: Path, counters: Path | None, trace: Path | None, gpu: str | None, command: list[str]) -> Prepared:
    """Read the model and the counters; say what is missing before the command runs.

    Counters that are not there yet are collected: the command runs once more, under ncu.
    """
    if counters is None:
        raise bad_value("--model", "--counters FILE beside it", "none", "A counter book, or an export of ncu --csv.")
    if trace is None:
        raise bad_value("--model", "--launches FILE beside it", "none", "The profiler trace that the command writes.")
    sm_count: float | None = None
    if gpu is not None:
        sm_count = float(load_gpu(gpu).sm_count)
    saved = load(model)
    if not counters.exists() and counters.suffix != ".json":
        collect_command(command, counters, metrics_for(saved.model.required_events))
    return Prepared(saved, read_book(counters, sm_count), trace)


def estimated(prepared: Prepared, run: Run) -> Estimated:
    """Power from the trace that the command wrote, at the clocks that were measured."""
    log = read_launches(prepared.trace)
    first_s, last_s = log.span_s
    now_s = _sampler_start(log)
    inside = now_s is not None and run.started_s <= now_s <= run.started_s + run.measurement.duration_s
    stretch = measured("launches", run.samples, now_s, now_s + last_s - first_s) if inside and now_s else None
    clocks = stretch or run.measurement
    held = run.samples if stretch is None or now_s is None else run.samples.between(now_s, now_s + last_s - first_s)
    at = OperatingPoint(clock_hz=clocks.sm_clock_hz, memory_clock_hz=held.mean("memory_clock_hz"))
    launches = [_from_zero(launch, first_s) for launch in log.launches]
    found = estimate(launches, prepared.book, prepared.saved.model, at)
    return Estimated(found, stretch, now_s if inside else None)


def _figure(found: Estimated, run: Run) -> Figure:
    import numpy as np

    from wattcast.measure.samples import ticks
    from wattcast.report.counters import power_over_time

    dots = None
    if found.origin_s is not None:
        stepped = ticks(run.samples)
        middle_s = 0.5 * (stepped.time_s[:-1] + stepped.time_s[1:]) - found.origin_s
        length_s = float(found.estimate.activity.duration_s.sum())
        inside = (middle_s >= 0.0) & (middle_s <= length_s)
        dots = (np.asarray(middle_s[inside]), np.asarray(stepped.interval_w[inside]))
    return power_over_time(found.estimate, dots)


def _sampler_start(log: LaunchLog) -> float | None:
    """The first launch on the sampler's clock; traces count from a Unix time."""
    if log.epoch_s is None:
        return None
    return log.epoch_s + log.span_s[0] - (time.time() - time.monotonic())


def _from_zero(launch: Launch, first_s: float) -> Launch:
    return replace(launch, start_s=launch.start_s - first_s)
