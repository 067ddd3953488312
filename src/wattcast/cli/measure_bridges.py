"""Connect ``wattcast measure`` with models: power from kernel launches, and rows worth measuring
next.

A command writes a profiler trace; counters of its kernels were collected once per kernel and launch
configuration, and are reused for every launch [Stokke2016, figure 7]. Commands import this file
when they need it, since it loads most of Wattcast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.calibrate import kernel_rows, row_suggestions
from wattcast.calibrate.row_suggestions import RowCandidate, RowSuggestion
from wattcast.core.errors import WattcastError, bad_value
from wattcast.core.units import show
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.kernels.kernel_table import RunCondition
from wattcast.lab.campaigns import kernel_plan
from wattcast.lab.campaigns.database_files import make_workload_form
from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.lab.campaigns.nsight_counters import make_collect_command
from wattcast.lab.counter_models import launch_power
from wattcast.lab.counter_models.busy_share_logs import read_nsys_activity
from wattcast.lab.counter_models.profiler_counters import list_ncu_metrics
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.measured_run import MeasuredRun
from wattcast.measure.window_summary import Measurement, summarise_window
from wattcast.power.power_model import SavedModel, load_saved_model
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.forecast import forecast_rule
from wattcast.report.figure_style import Figure
from wattcast.workload.readers.from_json import operator_to_plain


@dataclass(frozen=True)
class LaunchEstimate:
    """Power from launches, and the measurement of the same stretch where the two clocks can be
    joined.
    """

    estimate: launch_power.PowerEstimate
    same_stretch: Measurement | None
    origin_s: float | None  # of the estimate's time on the sampler's clock

    @property
    def is_lower_bound(self) -> bool:
        """Tell whether kernels without counters ran, whose energy is in no sum."""
        return bool(self.estimate.unknown)

    def plain(self) -> dict[str, Any]:
        """Return plain data for JSON; energy that lacks kernels is a lower bound and no total."""
        estimate = self.estimate
        known_s = estimate.activity.duration_s * estimate.counted
        traced_s = float(estimate.activity.duration_s.sum())
        total_known_s = float(known_s.sum())
        part_j = (estimate.power.part_w.T * known_s).sum(axis=-1)
        part_w = (part_j / (total_known_s or 1.0)).tolist()
        is_partial = self.is_lower_bound
        plain: dict[str, Any] = {
            "power_w": None if is_partial else estimate.mean_w,
            "energy_j": None if is_partial else estimate.energy_j,
            "traced_s": traced_s,
            "known_share": total_known_s / traced_s,
            "part_w": dict(zip(estimate.power.parts, part_w, strict=True)),
            "without_counters": [
                {
                    "kernel": key.kernel,
                    "grid": key.grid,
                    "block": key.block,
                }
                for key in estimate.unknown
            ],
        }
        if is_partial:
            plain["known_mean_w"] = estimate.mean_w
            plain["energy_at_least_j"] = estimate.energy_j
            plain["missing_events"] = list(estimate.missing_events)
        if self.same_stretch is not None:
            plain["measured_w"] = self.same_stretch.power_w
            plain["measured_flags"] = list(self.same_stretch.flags)
        return plain

    @property
    def summary(self) -> str:
        """Say what the model gives, and for which kernels there are no counters."""
        plain = self.plain()
        traced = show(plain["traced_s"], "s")
        if not self.is_lower_bound:
            return f"model: mean {show(self.estimate.mean_w, 'W')} over {traced} of the trace"
        missing = plain["without_counters"]
        first = missing[0]
        known_share = f"{100 * plain['known_share']:.0f} % of {traced}"
        text = (
            f"model: no mean power of the trace, at least {show(self.estimate.energy_j, 'J')}: "
            f"{show(self.estimate.mean_w, 'W')} over the {known_share} in which all that ran has "
            "counters"
        )
        if not self.estimate.has_known_kernels:
            text += ", which is the idle time between kernels"
        lack = "1 kernel lacks" if len(missing) == 1 else f"{len(missing)} kernels lack"
        text += (
            f"; {lack} counters, "
            f"the first: {first['kernel'][:60]} grid {first['grid']} block {first['block']}"
        )
        lacking = self.estimate.missing_events
        if lacking:
            more = " ..." if len(lacking) > 6 else ""
            text += f"; the model needs {', '.join(lacking[:6])}{more} besides"
        return text

    @property
    def sentence(self) -> str:
        """Say the result beside the measurement in one sentence."""
        text = self.summary
        if self.same_stretch is None:
            return (
                text + "; the trace does not say when it was taken, so it cannot be set beside "
                "the measurement."
            )
        if self.is_lower_bound:
            return text + "; a lower bound is not compared with the measurement."
        if self.same_stretch.power_w is None:
            return (
                text
                + f"; the same stretch was not measured ({', '.join(self.same_stretch.flags)})."
            )
        off = self.estimate.mean_w / self.same_stretch.power_w - 1.0
        return (
            text + f"; measured {show(self.same_stretch.power_w, 'W')} over the same "
            f"({100 * off:+.1f} %)."
        )

    def figure(self, run: MeasuredRun | None = None) -> Figure:
        """Draw the parts stacked over time, with the measured power of a run as dots."""
        from wattcast.lab.counter_models.counter_figures import draw_launch_power

        dots = None
        if run is not None and self.origin_s is not None:
            stepped = find_ticks(run.samples)
            middle_s = 0.5 * (stepped.time_s[:-1] + stepped.time_s[1:]) - self.origin_s
            inside = (middle_s >= 0.0) & (
                middle_s <= float(self.estimate.activity.duration_s.sum())
            )
            dots = (middle_s[inside], stepped.interval_w[inside])
        return draw_launch_power(self.estimate, dots)


def prepare_estimate(
    model: Path,
    counters: Path | None,
    trace: Path | None,
    gpu: str | None,
    command: list[str],
) -> tuple[SavedModel, launch_power.CounterBook, Path]:
    """Read the model and the counters; raise before the command runs where something is missing.

    Counters that are not there yet are collected: the command runs once more, under ncu.
    """
    if counters is None:
        raise bad_value(
            "--model",
            "--counters FILE as well",
            "none",
            "It is a counter book, or an export of ncu --csv.",
        )
    if trace is None:
        raise bad_value(
            "--model",
            "--launches FILE as well",
            "none",
            "It is the profiler trace that the command writes.",
        )
    sm_count = None if gpu is None else float(load_gpu(gpu).sm_count)
    saved = load_saved_model(model)
    if command and not counters.exists() and counters.suffix != ".json":
        make_collect_command(command, counters, list_ncu_metrics(saved.model.required_events))
    return saved, launch_power.read_counter_book(counters, sm_count), trace


def estimate_offline(
    model: Path,
    counters: Path,
    trace: Path,
    gpu: str | None,
    clock_hz: float | None,
    memory_clock_hz: float | None,
) -> tuple[LaunchEstimate, float]:
    """Estimate the power of a run from files alone; return it and the clock, by default that of
    counted cycles.
    """
    if launch_power.is_database(counters):  # sampled over time, not per kernel
        power_model = load_saved_model(model).model
        start_s, activity = read_nsys_activity(
            counters, power_model.required_events, clock_hz, memory_clock_hz
        )
        power_estimate = launch_power.PowerEstimate(
            start_s,
            activity,
            power_model.power(activity),
            np.ones(start_s.shape),
            (),
            (),
            True,
        )
        return LaunchEstimate(power_estimate, None, None), float(
            np.mean(np.asarray(activity.at.clock_hz))
        )
    saved, book, _ = prepare_estimate(
        model,
        counters,
        trace,
        gpu,
        [],
    )
    log = launch_power.read_launches(trace)
    found_hz = clock_hz or launch_power.find_clock_hz(log.launches, book)
    if found_hz is None:
        raise bad_value(
            "--clock",
            "the core clock of the run",
            "none",
            "The counters hold no cycles of its kernels.",
        )
    at = OperatingPoint(clock_hz=found_hz, memory_clock_hz=memory_clock_hz)
    return LaunchEstimate(_estimate_from_zero(log, saved, book, at), None, None), found_hz


def estimate_power(
    saved: SavedModel,
    book: launch_power.CounterBook,
    trace: Path,
    run: MeasuredRun,
) -> LaunchEstimate:
    """Estimate power from the trace that the command wrote, at the clocks that were measured."""
    log = launch_power.read_launches(trace)
    first_s, last_s = log.span_s
    # the first launch on the sampler's clock; traces count from a Unix time
    now_s = (
        None if log.epoch_s is None else log.epoch_s + first_s - (time.time() - time.monotonic())
    )
    inside = (
        now_s is not None and run.started_s <= now_s <= run.started_s + run.measurement.duration_s
    )
    stretch = (
        summarise_window("launches", run.samples, now_s, now_s + last_s - first_s)
        if inside and now_s
        else None
    )
    clocks = stretch or run.measurement
    samples = (
        run.samples
        if stretch is None or now_s is None
        else run.samples.between(now_s, now_s + last_s - first_s)
    )
    at = OperatingPoint(
        clock_hz=clocks.sm_clock_hz, memory_clock_hz=samples.mean("memory_clock_hz")
    )
    return LaunchEstimate(
        _estimate_from_zero(log, saved, book, at), stretch, now_s if inside else None
    )


def _estimate_from_zero(
    log: launch_power.LaunchLog,
    saved: SavedModel,
    book: launch_power.CounterBook,
    at: OperatingPoint,
) -> launch_power.PowerEstimate:
    launches = [replace(launch, start_s=launch.start_s - log.span_s[0]) for launch in log.launches]
    return launch_power.estimate_launch_power(launches, book, saved.model, at)


ROUNDS = 4  # rounds of the plan that candidates come from


def suggest_rows(
    count: int,
    gpu: str,
    database: str,
    tell: Callable[[str], None],
) -> tuple[list[RowSuggestion], list[OperatorSpec]]:
    """Return the rows worth most that are not in the database yet, and how the campaign runs
    each.
    """
    chip = load_gpu(gpu)
    rows = _load_measured_rows(gpu, database, tell)
    bundle = bundle_for(chip)
    measured = set(rows.spec)
    spec_of_operator: dict[str, OperatorSpec] = {}
    candidates: list[RowCandidate] = []
    shares, left_out = _operators_of_models(gpu, tell)
    planned = []
    for plan_round in range(1, ROUNDS + 1):
        for spec in kernel_plan.read_kernel_plan(plan_round):
            suggested = replace(spec, chosen="suggested")
            planned.append((suggested, 0.0, "plan"))
    for spec, share, source in [*shares, *planned]:
        fits = spec.guessed_s <= kernel_plan.LONGEST_S and spec.byte <= kernel_plan.LARGEST_BYTE
        if spec.id not in measured and spec.id not in spec_of_operator and fits:
            spec_of_operator[spec.id] = spec
            condition = RunCondition(spec.layout, spec.rotated, str(spec.detail.get("backend", "")))
            candidates.append(
                RowCandidate(make_workload_form(spec.operator), condition, share, source)
            )
    tell(
        f"{len(candidates)} candidates; {left_out:.1%} of the models' time is in operators "
        "no row can stand for"
    )
    suggestions = row_suggestions.suggest_rows(
        candidates,
        count,
        rows,
        chip,
        bundle,
    )
    place = {
        id(candidate): spec
        for candidate, spec in zip(candidates, spec_of_operator.values(), strict=True)
    }
    return suggestions, [place[id(suggestion.candidate)] for suggestion in suggestions]


def _load_measured_rows(
    gpu: str,
    database: str,
    tell: Callable[[str], None],
) -> kernel_rows.KernelRows:
    """Return the rows so far; none for a GPU without a database where none is named."""
    try:
        return kernel_rows.load_kernel_rows(database)
    except WattcastError:
        if database != gpu:
            raise
        tell(f"no database of the {gpu} was named or ships: as if nothing was measured")
        shipped_rows = kernel_rows.load_kernel_rows(forecast_rule().parent)
        return shipped_rows.select_rows(np.zeros(len(shipped_rows), dtype=bool))


def _operators_of_models(
    gpu: str, tell: Callable[[str], None]
) -> tuple[list[tuple[OperatorSpec, float, str]], float]:
    """Return operators of catalogue models with their share of time, and the share that cannot be
    measured.
    """
    shares: dict[str, float] = {}
    specs: dict[str, tuple[OperatorSpec, str]] = {}
    model_operators = row_suggestions.list_model_operators(gpu, tell)
    lost = 0.0
    for item in model_operators:
        plain = operator_to_plain(item.op)
        spec = kernel_plan.spec_from_operator(
            {name: str(v) if isinstance(v, str) else v for name, v in plain.items()}
        )
        if spec is None:
            lost += item.share
            continue
        spec = replace(spec, chosen="models")
        shares[spec.id] = shares.get(spec.id, 0.0) + item.share
        specs.setdefault(spec.id, (spec, item.run))
    listed = [(spec, shares[key], source) for key, (spec, source) in specs.items()]
    return listed, lost / max(sum(item.share for item in model_operators), 1e-30)
