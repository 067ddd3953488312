"""Apply a saved counter model to counters of other work: a table, a DCGM log, Nsight Compute
kernels.

A model is fitted once (``lab fit counters --out``) and then asked of rows it never saw. Each row is
one interval with its counts at its own clocks. Where a source has watts too, they are set beside
the model's; they change nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.busy_share_logs import read_dcgm_rates
from wattcast.lab.counter_models.counter_table import CounterRates, read_counter_rates
from wattcast.lab.counter_models.model_selection import percent_error
from wattcast.lab.counter_models.profiler_counters import list_ncu_metrics, read_ncu
from wattcast.lab.counter_models.rail_terms import ACTIVE_CYCLE
from wattcast.power.activity import (
    Activity,
    ActivitySource,
    known_events,
)
from wattcast.power.power_model import SavedModel, load_saved_model
from wattcast.report import figure_style
from wattcast.report.figure_style import Figure, add_caption

APPLIED_FORMS = ("table", "dcgm", "ncu")


@dataclass(frozen=True)
class AppliedModel:
    """Watts of rows by a saved model, and as measured where the source has them."""

    model: SavedModel
    source: str
    names: tuple[str, ...]
    duration_s: Array  # (row,)
    part_w: Array  # (row, part)
    measured_w: Array | None

    @property
    def predicted_w(self) -> Array:
        """Watts of each row, ``(row,)``."""
        return np.asarray(self.part_w.sum(axis=-1))

    @property
    def mean_w(self) -> float:
        """Mean power over the time of all rows."""
        return float(self.predicted_w @ self.duration_s / self.duration_s.sum())

    @property
    def error_percent(self) -> float | None:
        """Mean absolute error over rows with watts; None where there are none."""
        if self.measured_w is None:
            return None
        return float(np.abs(percent_error(self.predicted_w, self.measured_w)).mean())

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rows = []
        for place, name in enumerate(self.names):
            parts = self.part_w[place].tolist()
            row: dict[str, Any] = {
                "name": name,
                "duration_s": float(self.duration_s[place]),
                "power_w": float(self.predicted_w[place]),
                "part_w": dict(zip(self.model.model.parts, parts, strict=True)),
            }
            if self.measured_w is not None:
                row["measured_w"] = float(self.measured_w[place])
            rows.append(row)
        return {
            "model": self.model.name,
            "source": self.source,
            "mean_power_w": self.mean_w,
            "error_percent": self.error_percent,
            "rows": rows,
        }


def apply_model(
    model: Path,
    source: Path,
    form: str,
    *,
    columns: Path | None = None,
    memory_clock_hz: float | None = None,
    sm_count: float | None = None,
) -> AppliedModel:
    """Apply the saved model at ``model`` to the counters at ``source``."""
    saved = load_saved_model(model)
    needed = saved.model.required_events
    if form == "ncu":
        launches, activity = read_ncu(source, sm_count)
        names = [launch.kernel for launch in launches]
        lacking = [event for event in needed if event not in (*activity.events, ACTIVE_CYCLE)]
        _check_events(source.name, lacking, list_ncu_metrics(lacking))
        return _apply_to(saved, source.name, names, _complete_launches(activity, memory_clock_hz))
    if form == "table":
        if columns is None:
            raise bad_value("--columns", "a YAML map of the table's columns", "none")
        rates = read_counter_rates(source, columns)
    else:
        rates = read_dcgm_rates(source)
    events = [predictor.event for predictor in rates.predictors]
    _check_events(source.name, [e for e in needed if e not in (*events, ACTIVE_CYCLE)], [])
    applied = _apply_to(saved, source.name, rates.names, _activity_of_rates(rates))
    return AppliedModel(
        saved,
        source.name,
        applied.names,
        applied.duration_s,
        applied.part_w,
        rates.power_w,
    )


def _check_events(
    where: str,
    lacking: Sequence[str],
    metrics: Sequence[str],
) -> None:
    """Refuse a source without an event of the model: a sum that lacks a part is no total."""
    if not lacking:
        return
    do = "Map them, or choose a model that does not need them."
    if metrics:
        do = f"Collect them: ncu --metrics {','.join(metrics)}"
    raise bad_value(where, f"every event of the model ({', '.join(lacking)} besides)", "none", do)


def _complete_launches(activity: Activity, memory_clock_hz: float | None) -> Activity:
    """Return launches with busy cycles, which a kernel has throughout, and the memory's clock."""
    at = OperatingPoint(activity.at.clock_hz, memory_clock_hz=memory_clock_hz)
    value = activity.value
    events = activity.events
    if ACTIVE_CYCLE not in events:
        cycles = np.asarray(activity.at.clock_hz) * activity.duration_s
        value = np.concatenate([value, cycles[:, np.newaxis]], axis=-1)
        events = (*events, ACTIVE_CYCLE)
    return Activity(
        activity.duration_s,
        value,
        events,
        at,
        activity.source,
    )


def _activity_of_rates(rates: CounterRates) -> Activity:
    """Return the rows of a table as intervals, with busy cycles where anything happened."""
    duration_s = rates.duration_s
    columns = []
    for place, predictor in enumerate(rates.predictors):
        column = rates.occurrence[:, place]
        if not known_events()[predictor.event].is_mean:
            column = column * duration_s
        columns.append(column)
    is_device = [predictor.rail != "host" for predictor in rates.predictors]
    is_busy = (rates.occurrence[:, is_device] > 0).any(axis=1)
    events = [predictor.event for predictor in rates.predictors]
    if ACTIVE_CYCLE not in events:
        columns.append(rates.clock_hz * duration_s * is_busy)
        events.append(ACTIVE_CYCLE)
    at = OperatingPoint(rates.clock_hz, memory_clock_hz=rates.memory_clock_hz)
    value = np.stack(columns, axis=-1)
    return Activity(
        duration_s,
        value,
        tuple(events),
        at,
        ActivitySource.PROFILED,
    )


def _apply_to(
    saved: SavedModel,
    where: str,
    names: Sequence[str],
    activity: Activity,
) -> AppliedModel:
    power = saved.model.power(activity)
    return AppliedModel(
        saved,
        where,
        tuple(names),
        activity.duration_s,
        power.part_w,
        None,
    )


def draw_applied(applied: AppliedModel) -> Figure:
    """Draw the watts of rows in order, parts stacked, measured watts as dots."""
    figure, axes = figure_style.new_axes(9.0, 4.4)
    edges = np.arange(len(applied.names) + 1)
    below = np.zeros(len(applied.names))
    colours = figure_style.SERIES_COLOURS
    for place, part in enumerate(applied.model.model.parts):
        watts = applied.part_w[:, place]
        if (watts != 0).any():
            colour = colours[place % len(colours)]
            axes.stairs(
                below + watts,
                edges,
                baseline=below,
                fill=True,
                color=colour,
                label=part,
            )
        below = below + watts
    if applied.measured_w is not None:
        middle = edges[:-1] + 0.5
        axes.plot(
            middle,
            applied.measured_w,
            ".",
            color=figure_style.MEASURED,
            label="measured",
        )
    axes.set(xlabel="Row", ylabel="Power (W)")
    axes.set_ylim(bottom=0.0)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    error = applied.error_percent
    title = f"{applied.source}: mean {applied.mean_w:.4g} W"
    if error is not None:
        title += f", {error:.1f} % off"
    axes.set_title(title, fontsize=10)
    return add_caption(figure, f"model {applied.model.name}: {applied.model.provenance.source}")
