"""Sensitivity of performance to the knobs of a card: measured, and fitted to counters (paper 004, section 4).

A sensitivity is the relative change of performance over the relative change of the knob: 1 when time is
inversely proportional to it, 0 when it does not matter. Linear models predict it from counters that a run
gives anyway; :func:`fit` builds them from a table of kernels run over a card's settings.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.files import from_yaml, read_bytes, write_whole

FORMAT = 1
STRONG = 0.5  # |correlation| at which the paper calls a counter strongly correlated (section 4.3)
KNOBS = ("compute_units", "core_clock", "memory_clock")
RAW, DERIVED = ("VALUBusy", "VALUUtilization", "MemUnitBusy"), "CtoMIntensity"
MOST_COUNTERS = 7  # as many as the longer of the paper's two models


@dataclass(frozen=True)
class LinearModel:
    """Sensitivity = intercept + Σ coefficient · counter, held between 0 and 1."""

    intercept: float
    coefficients: Mapping[str, float]

    def predict(self, counters: Mapping[str, float]) -> float:
        """One sensitivity from one set of counters."""
        raw = self.intercept
        for name, coefficient in self.coefficients.items():
            raw += coefficient * counters[name]
        return min(max(raw, 0.0), 1.0)


@dataclass(frozen=True)
class SensitivityModel:
    """Predictors of the two sensitivities the controller steers by."""

    name: str
    compute: LinearModel
    bandwidth: LinearModel
    source: str


@dataclass(frozen=True)
class Fitted:
    """A fitted model with its errors: mean absolute, of sensitivities between 0 and 1."""

    model: SensitivityModel
    rows: int
    error: Mapping[str, float]  # on the rows it was fitted to
    left_out_error: Mapping[str, float]  # on the applications left out in turn
    correlation: Mapping[str, float]  # of fitted and measured


def measured(time_low_s: Array, time_high_s: Array, knob_low: Array, knob_high: Array) -> Array:
    """Relative change of performance (1/time) over relative change of the knob; arrays broadcast.

    >>> float(measured(np.array(2.0), np.array(1.0), np.array(500.0), np.array(1000.0)))
    1.0
    """
    return np.asarray((time_low_s / time_high_s - 1.0) / (knob_high / knob_low - 1.0))


def aggregated(unit_sensitivity: Array, clock_sensitivity: Array) -> Array:
    """One compute sensitivity from that to compute units and that to the core clock: their mean.

    The paper aggregates the two without saying how (section 4.1). Throughput is their product, so a
    kernel that follows only one of them follows half of compute throughput, in logarithms.
    """
    return np.asarray(0.5 * (unit_sensitivity + clock_sensitivity))


def compute_to_memory(valu_busy: Array, valu_utilisation: Array, memory_busy: Array) -> Array:
    """Equation 3 in %: time the vector ALUs work on active lanes over time the memory unit works.

    The paper says "normalized to 100"; we take that as a percentage held at 100.

    >>> float(compute_to_memory(np.array(50.0), np.array(80.0), np.array(80.0)))
    50.0
    """
    active = valu_busy * valu_utilisation / 100.0
    return np.asarray(np.minimum(100.0 * active / np.maximum(memory_busy, 1e-9), 100.0))


def select(
    counters: Mapping[str, Array], target: Array, strong: float = STRONG, most: int = MOST_COUNTERS
) -> list[str]:
    """Counters strongly correlated with the target, strongest first; at least one (section 4.3)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        score = {name: abs(float(np.corrcoef(column, target)[0, 1])) for name, column in counters.items()}
    known = {name: value for name, value in score.items() if np.isfinite(value)}
    if not known:
        raise bad_value("counters", "one that varies between kernels", "none that does")
    ranked = sorted(known, key=lambda name: -known[name])
    return [name for i, name in enumerate(ranked) if i == 0 or known[name] >= strong][:most]


def fit(
    counters: Mapping[str, Array],
    sensitivity: Mapping[str, Array],
    groups: Sequence[str],
    name: str,
    source: str,
    chosen: Mapping[str, Sequence[str]] | None = None,
) -> Fitted:
    """Two linear models, ``compute`` and ``bandwidth``, by least squares; ``groups`` are left out in turn.

    Counters are chosen by correlation unless ``chosen`` names them.
    """
    models, error, left_out, correlation = {}, {}, {}, {}
    for which in ("compute", "bandwidth"):
        target = sensitivity[which]
        names = list(chosen[which]) if chosen else select(counters, target)
        models[which] = _least_squares(counters, target, names, np.ones(len(target), dtype=bool))
        predicted = predict_all(models[which], counters)
        error[which] = float(np.mean(np.abs(predicted - target)))
        left_out[which] = _left_out(counters, target, names, np.asarray(groups))
        spread = predicted.std() * target.std()
        correlation[which] = float(np.corrcoef(predicted, target)[0, 1]) if spread > 0 else 0.0
    model = SensitivityModel(name, models["compute"], models["bandwidth"], source)
    return Fitted(model, len(groups), error, left_out, correlation)


def predict_all(model: LinearModel, counters: Mapping[str, Array]) -> Array:
    """The model on columns of counters."""
    columns = [coefficient * counters[name] for name, coefficient in model.coefficients.items()]
    return np.asarray(np.clip(model.intercept + np.sum(columns, axis=0), 0.0, 1.0))


def _least_squares(
    counters: Mapping[str, Array], target: Array, names: Sequence[str], rows: npt.NDArray[np.bool_]
) -> LinearModel:
    columns = np.column_stack([np.ones(int(rows.sum())), *(counters[name][rows] for name in names)])
    solution = np.linalg.lstsq(columns, target[rows], rcond=None)[0]
    return LinearModel(float(solution[0]), dict(zip(names, map(float, solution[1:]), strict=True)))


def _left_out(
    counters: Mapping[str, Array], target: Array, names: Sequence[str], groups: npt.NDArray[np.str_]
) -> float:
    errors = []
    for group in dict.fromkeys(groups.tolist()):
        model = _least_squares(counters, target, names, groups != group)
        errors.append(np.abs(predict_all(model, counters) - target)[groups == group])
    return float(np.mean(np.concatenate(errors)))


@dataclass(frozen=True)
class Table:
    """Kernels with their mean counters and measured sensitivities, each ``(kernel,)``."""

    kernels: tuple[str, ...]
    counters: Mapping[str, Array]
    sensitivity: Mapping[str, Array]

    @property
    def groups(self) -> list[str]:
        """The application of each kernel: what stands before the first dot of its name."""
        return [name.split(".")[0] for name in self.kernels]


def read_table(path: Path) -> Table:
    """A CSV of kernels over settings: ``kernel``, ``time_s``, the knobs it has, and counters.

    Knobs are ``compute_units``, ``core_clock`` and ``memory_clock``; a column ``phase`` keeps behaviours of one
    kernel apart; ``power_w`` is not used; all other columns are counters.
    """
    names, rows = _csv(path)
    knobs = [k for k in KNOBS if k in names]
    if not {"kernel", "time_s"} <= set(names) or "memory_clock" not in knobs or len(knobs) < 2:
        wanted = "columns kernel, time_s, memory_clock and compute_units or core_clock"
        raise bad_value(path.name, wanted, ", ".join(names))
    keys = list(dict.fromkeys(zip(rows["kernel"], rows.get("phase", rows["kernel"]), strict=True)))
    which = np.array([keys.index(key) for key in zip(rows["kernel"], rows.get("phase", rows["kernel"]), strict=True)])
    number = {name: _floats(rows[name], f"{path.name}: {name}") for name in names if name not in ("kernel", "phase")}
    counters = {name: column for name, column in number.items() if name not in {*KNOBS, "time_s", "power_w"}}
    if set(RAW) <= set(counters):
        counters[DERIVED] = compute_to_memory(*(counters[name] for name in RAW))
    each = {
        knob: np.array([_knob(number, which == i, knob, knobs, key[0]) for i, key in enumerate(keys)])
        for knob in knobs
    }
    compute = [each[k] for k in ("compute_units", "core_clock") if k in each]
    return Table(
        tuple(key[0] for key in keys),
        {name: np.array([column[which == i].mean() for i in range(len(keys))]) for name, column in counters.items()},
        {"compute": aggregated(compute[0], compute[-1]), "bandwidth": each["memory_clock"]},
    )


def _knob(
    number: Mapping[str, Array], rows: npt.NDArray[np.bool_], knob: str, knobs: Sequence[str], kernel: str
) -> float:
    """Mean sensitivity to one knob, all others at their highest."""
    for other in knobs:
        if other != knob:
            rows = rows & (number[other] == number[other][rows].max())
    values, time_s = number[knob][rows], number["time_s"][rows]
    if len(np.unique(values)) < 2 or len(np.unique(values)) != len(values):
        raise bad_value(kernel, f"two or more levels of {knob} with the other knobs at their highest", len(values))
    top = int(values.argmax())
    rest = np.arange(len(values)) != top
    return float(measured(time_s[rest], time_s[top], values[rest], values[top]).mean())


def _csv(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    try:
        lines = list(csv.reader(read_bytes(path).decode("utf-8-sig").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise bad_value(path.name, "a CSV file in UTF-8", str(error)) from None
    if len(lines) < 2:
        raise bad_value(path.name, "a header and rows", f"{len(lines)} lines")
    names = lines[0]
    if len(set(names)) != len(names):
        raise bad_value(f"{path.name}: line 1", "columns of different names", ",".join(names))
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise bad_value(f"{path.name}: line {number}", f"{len(names)} cells", len(line))
    return names, {name: [line[i] for line in lines[1:]] for i, name in enumerate(names)}


def _floats(cells: Sequence[str], where: str) -> Array:
    try:
        column = np.array([float(cell) for cell in cells])
    except ValueError:
        raise bad_value(where, "numbers", next(c for c in cells if not _is_number(c))) from None
    if not np.isfinite(column).all():
        raise bad_value(where, "finite numbers", "NaN or infinity")
    return column


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


class _Linear(msgspec.Struct, forbid_unknown_fields=True):
    intercept: float
    coefficients: dict[str, float]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    name: str
    source: str
    compute: _Linear
    bandwidth: _Linear


def parse(data: bytes, where: str) -> SensitivityModel:
    """A sensitivity model from the bytes of its YAML file."""
    file = from_yaml(data, _File, where)
    if file.format != FORMAT:
        raise bad_value(f"{where}: format", f"{FORMAT}", file.format)
    compute, bandwidth = (LinearModel(m.intercept, m.coefficients) for m in (file.compute, file.bandwidth))
    return SensitivityModel(file.name, compute, bandwidth, file.source)


def read(path: Path) -> SensitivityModel:
    """A sensitivity model from its YAML file."""
    return parse(read_bytes(path), path.name)


def to_plain(model: SensitivityModel) -> dict[str, Any]:
    """As plain mappings; :func:`parse` takes the YAML of it back."""
    sides = {
        which: {"intercept": side.intercept, "coefficients": dict(side.coefficients)}
        for which, side in (("compute", model.compute), ("bandwidth", model.bandwidth))
    }
    return {"format": FORMAT, "name": model.name, "source": model.source, **sides}


def write(model: SensitivityModel, path: Path) -> None:
    """Save a model as YAML, whole or not at all."""
    import yaml

    write_whole(path, yaml.safe_dump(to_plain(model), sort_keys=False).encode())
