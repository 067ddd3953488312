"""Measure how performance follows a card's knobs, and fit linear models of it to counters (paper
004, section 4).

A sensitivity is the relative change of performance over the relative change of a knob: 1 when time
is inversely proportional to the knob, 0 when the knob does not matter. A linear model predicts it
from counters that a run gives anyway; ``fit_sensitivity`` makes such models from a table of kernels
that ran over a card's settings. Compute sensitivity stands for compute units and core clock
together, bandwidth sensitivity for the memory clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.control.plants import KnobRole
from wattcast.core import bad_value, files
from wattcast.core.arrays import Array
from wattcast.core.errors import MissingEvents, nearest_names
from wattcast.core.strict_files import (
    decode_yaml,
    parse_csv,
    read_bytes,
    read_number,
)

PERCENT = 100.0  # the largest intensity that counters state


class SensitivityCoefficients(Coefficients):
    """How sensitivities to clocks are binned and fitted."""

    low_edge: float  # below, a kernel is not sensitive to a knob
    high_edge: float  # above, it is highly sensitive
    most_counters: int  # of a model of sensitivity


SENSITIVITIES = load_coefficients("sensitivities", SensitivityCoefficients)


FORMAT = 1
STRONG_CORRELATION = (
    0.5  # |correlation| at which the paper calls a counter strongly correlated (section 4.3)
)
RAW_COUNTERS = ("VALUBusy", "VALUUtilization", "MemUnitBusy")
INTENSITY_COUNTER = "CtoMIntensity"


class SensitivityBin(IntEnum):
    """Say how much a knob matters."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


def bin_sensitivity(sensitivity: float) -> SensitivityBin:
    """Return the bin of a sensitivity; the edges belong to the middle one.

    >>> [bin_sensitivity(s).name for s in (0.29, 0.3, 0.7, 0.71)]
    ['LOW', 'MEDIUM', 'MEDIUM', 'HIGH']
    """
    if sensitivity < SENSITIVITIES.low_edge:
        return SensitivityBin.LOW
    return SensitivityBin.HIGH if sensitivity > SENSITIVITIES.high_edge else SensitivityBin.MEDIUM


class LinearModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Predict a sensitivity as intercept + Σ coefficient · counter, held between 0 and 1."""

    intercept: float
    coefficients: dict[str, float]

    def predict(self, counters: Mapping[str, float]) -> float:
        """Return the sensitivity for one set of counters."""
        raw = self.intercept
        for name, coefficient in self.coefficients.items():
            raw += coefficient * counters[name]
        return min(max(raw, 0.0), 1.0)

    def predict_columns(self, counters: Mapping[str, Array]) -> Array:
        """Return the sensitivities for columns of counters."""
        total = np.full(len(next(iter(counters.values()))), self.intercept)
        for name, coefficient in self.coefficients.items():
            total = total + coefficient * counters[name]
        return np.asarray(np.clip(total, 0.0, 1.0))


class SensitivityModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Predict the two sensitivities that the controller steers by. Its YAML file has the same
    fields.
    """

    format: int
    name: str
    source: str
    compute: LinearModel
    bandwidth: LinearModel

    def predict(self, counters: Mapping[str, float]) -> tuple[float, float]:
        """Return compute and bandwidth sensitivity of a run; ``MissingEvents`` where a counter is
        not there.

        Compute-to-memory intensity is worked out where its parts are there.
        """
        if (
            INTENSITY_COUNTER not in counters
            and "VALUBusy" in counters
            and "MemUnitBusy" in counters
        ):
            active = counters["VALUBusy"] * counters.get("VALUUtilization", 100.0) / 100.0
            intensity = min(100.0 * active / max(counters["MemUnitBusy"], 1e-9), PERCENT)
            counters = {**counters, INTENSITY_COUNTER: intensity}
        try:
            return self.compute.predict(counters), self.bandwidth.predict(counters)
        except KeyError:
            needed = {**self.compute.coefficients, **self.bandwidth.coefficients}
        missing = [name for name in needed if name not in counters]
        hint = nearest_names(missing[0], counters)
        raise MissingEvents(
            f"sensitivity model {self.name!r} needs {', '.join(missing)}"
            f"{f' (closest: {hint[0]})' if hint else ''}, absent from these counters: "
            f"{', '.join(counters)}. "
            "Collect the missing counters, or fit a model to those you have (wattcast lab "
            "sensitivity)."
        )


def read_sensitivity_model(path: Path) -> SensitivityModel:
    """Read a sensitivity model from its YAML file."""
    model = decode_yaml(read_bytes(path), SensitivityModel, path.name)
    if model.format != FORMAT:
        raise bad_value(f"{path.name}: format", f"{FORMAT}", model.format)
    return model


@cache
def load_shipped_model(name: str = "hd7970_table3") -> SensitivityModel:
    """Load a sensitivity model that ships with Wattcast."""
    return read_sensitivity_model(
        Path(str(files("wattcast.control").joinpath("data", f"{name}.yaml")))
    )


def measure_sensitivity(
    time_low_s: Array,
    time_high_s: Array,
    knob_low: Array,
    knob_high: Array,
) -> Array:
    """Return the relative change of performance (1 / time) over the relative change of a knob.

    s = (t_low / t_high - 1) / (k_high / k_low - 1), where t_low is the time at the lower knob value
    k_low. Arrays broadcast.

    >>> float(measure_sensitivity(np.array(2.0), np.array(1.0), np.array(500.0), np.array(1000.0)))
    1.0
    """
    return np.asarray((time_low_s / time_high_s - 1.0) / (knob_high / knob_low - 1.0))


def compute_to_memory_percent(
    valu_busy: Array,
    valu_utilisation: Array,
    memory_busy: Array,
) -> Array:
    """Return compute-to-memory intensity in % (paper 004, equation 3).

    It is the time the vector ALUs work on active lanes over the time the memory unit works. The
    paper says "normalized to 100"; we take that as a percentage held at 100.

    >>> float(compute_to_memory_percent(np.array(50.0), np.array(80.0), np.array(80.0)))
    50.0
    """
    active = valu_busy * valu_utilisation / 100.0
    return np.asarray(np.minimum(100.0 * active / np.maximum(memory_busy, 1e-9), PERCENT))


def combine_knobs(by_knob: Mapping[str, Array]) -> dict[str, Array]:
    """Return compute and bandwidth sensitivity from the sensitivities to single knobs.

    The paper aggregates the two compute knobs without saying how (section 4.1). We take their mean:
    throughput is the product of units and clock, so a kernel that follows one of them follows half
    of throughput, in logarithms."""
    compute_roles = (KnobRole.COMPUTE_UNITS, KnobRole.CORE_CLOCK)
    compute = [by_knob[role] for role in compute_roles if role in by_knob]
    bandwidth = by_knob.get(KnobRole.MEMORY_CLOCK, np.zeros_like(compute[0]))
    return {"compute": np.asarray(0.5 * (compute[0] + compute[-1])), "bandwidth": bandwidth}


def with_intensity(counters: Mapping[str, Array]) -> dict[str, Array]:
    """Return the counters, and compute-to-memory intensity where its parts are among them."""
    extended = dict(counters)
    if set(RAW_COUNTERS) <= set(counters):
        parts = [counters[name] for name in RAW_COUNTERS]
        extended[INTENSITY_COUNTER] = compute_to_memory_percent(*parts)
    return extended


@dataclass(frozen=True)
class SensitivityTable:
    """Hold kernels with their mean counters and measured sensitivities, each ``(kernel,)``.

    Counters are those at the highest settings. On a GPU whose compute units can be turned, they are
    means over all settings, as Harmonia's are, to which the shipped models were fitted.
    """

    kernels: tuple[str, ...]
    counters: Mapping[str, Array]
    sensitivity: Mapping[str, Array]

    @property
    def groups(self) -> list[str]:
        """Return the application of each kernel, which stands before the first dot of its name."""
        return [name.split(".")[0] for name in self.kernels]


def read_sensitivity_table(path: Path) -> SensitivityTable:
    """Read a CSV of kernels over settings: ``kernel``, ``time_s``, the card's knobs and counters.

    Knobs are ``compute_units``, ``core_clock`` and ``memory_clock``; bandwidth sensitivity is zero
    where the memory clock was not turned. A column ``phase`` keeps
    behaviours of one kernel apart, ``power_w`` is not used, and all other columns are counters."""
    rows = parse_csv(read_bytes(path), path.name)
    cells = {name: [row[name] for row in rows] for name in rows[0]}
    knobs = [str(role) for role in KnobRole if role in cells]
    has_columns = {"kernel", "time_s"} <= set(cells)
    if not has_columns or not set(knobs) & {KnobRole.COMPUTE_UNITS, KnobRole.CORE_CLOCK}:
        form = "columns kernel, time_s, and compute_units or core_clock"
        raise bad_value(path.name, form, ", ".join(cells))
    columns = _read_numbers(cells, path.name)
    # A card with one memory clock tells nothing of bandwidth.
    if KnobRole.MEMORY_CLOCK in knobs and len(np.unique(columns[KnobRole.MEMORY_CLOCK])) < 2:
        knobs.remove(KnobRole.MEMORY_CLOCK)
        columns.pop(KnobRole.MEMORY_CLOCK)
    masks = _find_phases(cells)
    by_knob = {knob: _measure_knob(columns, knobs, knob, masks) for knob in knobs}
    means = {}
    used_rows = list(masks.values())
    if KnobRole.COMPUTE_UNITS not in knobs:
        used_rows = [mask & _find_top_rows(columns, knobs, mask) for mask in used_rows]
    for name, column in with_intensity(_list_counters(columns, knobs)).items():
        means[name] = np.array([column[rows].mean() for rows in used_rows])
    kernels = tuple(kernel for kernel, _ in masks)
    return SensitivityTable(kernels, means, combine_knobs(by_knob))


def _find_top_rows(
    columns: Mapping[str, Array],
    knobs: Sequence[str],
    mask: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Return the rows in which every knob is at the highest level that some rows have.

    A controller reads its first counters there, and believes them until a phase changes. A model of
    means over all settings misreads them: busy shares of a card at its lowest clocks differ."""
    is_top = np.ones(len(mask), dtype=bool)
    for knob in knobs:
        is_top &= columns[knob] == columns[knob][mask].max()
    return is_top


def _find_phases(
    cells: Mapping[str, Sequence[str]],
) -> dict[tuple[str, str], npt.NDArray[np.bool_]]:
    """Return which rows are of each phase of a kernel; a phase is a row of the table."""
    phases = list(zip(cells["kernel"], cells.get("phase", cells["kernel"]), strict=True))
    masks = {}
    for phase in dict.fromkeys(phases):
        masks[phase] = np.array([row_phase == phase for row_phase in phases])
    return masks


def _read_numbers(cells: Mapping[str, Sequence[str]], where: str) -> dict[str, Array]:
    """Return the columns of numbers."""
    columns = {}
    for name, texts in cells.items():
        if name not in ("kernel", "phase"):
            place = f"{where}: {name}"
            columns[name] = np.array([read_number(text, place) for text in texts])
    return columns


def _list_counters(columns: Mapping[str, Array], knobs: Sequence[str]) -> dict[str, Array]:
    """Return the columns that are neither time, nor power, nor a knob."""
    not_counters = {*knobs, "time_s", "power_w"}
    return {name: column for name, column in columns.items() if name not in not_counters}


def _measure_knob(
    columns: Mapping[str, Array],
    knobs: Sequence[str],
    knob: str,
    masks: Mapping[tuple[str, str], npt.NDArray[np.bool_]],
) -> Array:
    """Return the mean sensitivity of each phase to a knob, ``(kernel,)``."""
    means = []
    for (kernel, _), mask in masks.items():
        means.append(
            _average_sensitivity(
                columns,
                knobs,
                knob,
                kernel,
                mask,
            )
        )
    return np.array(means)


def _average_sensitivity(
    columns: Mapping[str, Array],
    knobs: Sequence[str],
    knob: str,
    kernel: str,
    rows: npt.NDArray[np.bool_],
) -> float:
    """Return the mean sensitivity of some rows to one knob, all other knobs at their highest."""
    for fixed_knob in knobs:
        if fixed_knob != knob:
            column = columns[fixed_knob]
            rows = rows & (column == column[rows].max())
    values = columns[knob][rows]
    time_s = columns["time_s"][rows]
    levels = len(np.unique(values))
    if levels < 2 or levels != len(values):
        form = f"two or more levels of {knob} with the other knobs at their highest"
        raise bad_value(kernel, form, len(values))
    top = int(values.argmax())
    below = np.arange(len(values)) != top
    sensitivity = measure_sensitivity(time_s[below], time_s[top], values[below], values[top])
    return float(sensitivity.mean())


@dataclass(frozen=True)
class FittedSensitivity:
    """Hold a fitted model with its mean absolute errors, of sensitivities between 0 and 1."""

    model: SensitivityModel
    rows: int
    error: Mapping[str, float]  # on the rows it was fitted to
    left_out_error: Mapping[str, float]  # on the applications left out in turn
    correlation: Mapping[str, float]  # of fitted and measured


def fit_sensitivity(
    counters: Mapping[str, Array],
    sensitivity: Mapping[str, Array],
    groups: Sequence[str],
    name: str,
    source: str,
) -> FittedSensitivity:
    """Fit linear models of compute and bandwidth sensitivity by least squares; ``groups`` are left
    out in turn.
    """
    models = {}
    error = {}
    left_out_error = {}
    correlation = {}
    every_row = np.ones(len(groups), dtype=bool)
    for kind in ("compute", "bandwidth"):
        target = sensitivity[kind]
        # What was never turned, or matters to no kernel, has no counter that follows it.
        names = select_counters(counters, target) if np.ptp(target) > 0 else []
        models[kind] = _least_squares(counters, target, names, every_row)
        predicted = models[kind].predict_columns(counters)
        error[kind] = float(np.mean(np.abs(predicted - target)))
        left_out_error[kind] = _leave_groups_out(counters, target, names, groups)
        spread = predicted.std() * target.std()
        correlation[kind] = 0.0
        if spread > 0:
            correlation[kind] = float(np.corrcoef(predicted, target)[0, 1])
    model = SensitivityModel(
        FORMAT,
        name,
        source,
        models["compute"],
        models["bandwidth"],
    )
    return FittedSensitivity(
        model,
        len(groups),
        error,
        left_out_error,
        correlation,
    )


def _leave_groups_out(
    counters: Mapping[str, Array],
    target: Array,
    names: Sequence[str],
    groups: Sequence[str],
) -> float:
    """Return the mean error on each group of a model that was fitted to the others."""
    errors = []
    for group in dict.fromkeys(groups):
        is_here = np.array([row_group == group for row_group in groups])
        model = _least_squares(counters, target, names, ~is_here)
        errors.append(np.abs(model.predict_columns(counters) - target)[is_here])
    return float(np.mean(np.concatenate(errors)))


def select_counters(counters: Mapping[str, Array], target: Array) -> list[str]:
    """Return the counters strongly correlated with the target, strongest first, at least one
    (section 4.3).
    """
    strengths = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        for name, column in counters.items():
            correlation = float(np.corrcoef(column, target)[0, 1])
            if np.isfinite(correlation):
                strengths[name] = abs(correlation)
    if not strengths:
        raise bad_value("counters", "one that varies between kernels", "none that does")
    ranked = sorted(strengths, key=lambda name: -strengths[name])
    strong = [name for name in ranked if strengths[name] >= STRONG_CORRELATION]
    return strong[: SENSITIVITIES.most_counters] or ranked[:1]


def _least_squares(
    counters: Mapping[str, Array],
    target: Array,
    names: Sequence[str],
    rows: npt.NDArray[np.bool_],
) -> LinearModel:
    ones = np.ones(int(rows.sum()))
    columns = np.column_stack([ones, *(counters[name][rows] for name in names)])
    solution = np.linalg.lstsq(columns, target[rows], rcond=None)[0]
    constant, *coefficients = map(float, solution)
    return LinearModel(constant, dict(zip(names, coefficients, strict=True)))
