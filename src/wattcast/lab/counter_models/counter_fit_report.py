"""Report a fit of counter models: as plain values for JSON, and as a model file with its errors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from wattcast import __version__
from wattcast.core.arrays import Array
from wattcast.core.strict_files import Provenance
from wattcast.lab.counter_models.counter_fit import (
    CounterFit,
    FittedModelKind,
    HeldBackRows,
    RailVoltageReport,
    main_model_kind,
)
from wattcast.lab.counter_models.counter_table import CounterPredictor, CounterTable
from wattcast.lab.counter_models.fit_diagnostics import smallest_sufficient_clocks
from wattcast.lab.counter_models.model_selection import HeldOutPrediction, average_error_plane
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.power.power_model import SavedModel


def counter_fit_to_plain(result: CounterFit) -> dict[str, Any]:
    """Return the result as plain mappings for JSON; numbers are SI, errors in percent."""
    table = result.table
    main = main_model_kind(result)
    models = [_describe_model_kind(kind, table, result.tested) for kind in result.kinds.values()]
    return {
        "wattcast": __version__,
        "table": _describe_table(table, result.clusters),
        "models": models,
        "coefficients": [vars(cost) for cost in main.diagnosis.coefficients],
        "condition": main.diagnosis.condition,
        "voltage": [_describe_voltage(rail) for rail in result.rails],
        "voltage_by_memory_clock": _list_voltages_by_memory_clock(main),
        "training_clocks": _describe_training_clocks(result),
        "test": _list_tested(result.tested, main.model),
        "warnings": list(result.warnings),
        "assumptions": list(table.notes),
    }


def _describe_table(table: CounterTable, clusters: int) -> dict[str, Any]:
    """Return the sizes of the table that was trained on, and its predictors."""
    return {
        "name": table.name,
        "rows": table.rows,
        "benchmarks": table.benchmarks,
        "groups": int(np.unique(table.group).size),
        "clusters": clusters,
        "core_clocks": int(np.unique(table.clock_hz).size),
        "memory_clocks": int(np.unique(table.memory_clock_hz).size),
        "predictors": [_describe_predictor(predictor) for predictor in table.predictors],
    }


def _describe_predictor(predictor: CounterPredictor) -> dict[str, str]:
    """Return the event of a column of activity, its name in the source, and its rail."""
    return {
        "event": predictor.event,
        "column": predictor.column,
        "rail": predictor.rail,
    }


def _describe_model_kind(
    kind: FittedModelKind,
    table: CounterTable,
    tested: HeldBackRows | None,
) -> dict[str, Any]:
    """Return the errors of one kind of model: in sample, held out, and over the clock plane."""
    held_out = {by: _describe_held_out(prediction) for by, prediction in kind.held_out.items()}
    described: dict[str, Any] = {
        "kind": str(kind.model),
        "in_sample": vars(kind.in_sample),
        "held_out": held_out,
        "settings": vars(kind.settings),
    }
    if tested is not None:
        described["test_mape"] = tested.mape(kind.model)
    described["plane"] = _describe_error_plane(table, kind.held_out["benchmark"].predicted_w)
    return described


def _describe_held_out(prediction: HeldOutPrediction) -> dict[str, Any]:
    """Return the errors on held-out rows, without and with the power at the default clocks."""
    anchored = vars(prediction.anchored) if prediction.anchored else None
    return vars(prediction.score) | {"default_known": anchored}


def _describe_error_plane(table: CounterTable, predicted_w: Array) -> dict[str, Any]:
    """Return mean absolute and mean signed error at each pair of clocks."""
    core_hz, memory_hz, mape = average_error_plane(table, predicted_w)
    _, _, bias = average_error_plane(table, predicted_w, signed=True)
    return {
        "core_hz": core_hz.tolist(),
        "memory_hz": memory_hz.tolist(),
        "mape": _list_finite(mape),
        "bias": _list_finite(bias),
    }


def _list_finite(plane: Array) -> list[list[float | None]]:
    """Return a plane as nested lists, with None where nothing was measured."""
    cells = plane.astype(object)
    cells[~np.isfinite(plane)] = None
    nested: list[list[float | None]] = cells.tolist()
    return nested


def _describe_voltage(rail: RailVoltageReport) -> dict[str, Any]:
    """Return the inferred voltage of a rail, its arrays as lists."""
    return {
        "rail": rail.rail,
        "clock_hz": rail.clock_hz.tolist(),
        "relative": rail.relative.tolist(),
        "standard_error": rail.standard_error.tolist(),
        "identifiable": rail.identifiable,
        "reason": rail.reason,
    }


def _list_voltages_by_memory_clock(main: FittedModelKind) -> list[dict[str, Any]]:
    """Return the inferred core voltage over the core clock, once for each memory clock."""
    how = main.fit.how
    if main.model is not CounterModelKind.HYBRID or not how.core.inferred:
        return []
    core_curve, _ = how.curves(main.fit.inferred.theta)
    voltages = []
    for memory_clock_hz in how.memory.hz.tolist():
        level = core_curve.level_at(how.core.hz, memory_clock_hz)
        voltages.append(
            {
                "memory_clock_hz": memory_clock_hz,
                "clock_hz": how.core.hz.tolist(),
                "relative": [float(value) for value in level],
            }
        )
    return voltages


def _describe_training_clocks(result: CounterFit) -> dict[str, Any] | None:
    """Return the error by number of training clocks, and how many of them are enough."""
    if not result.training_clocks:
        return None
    subsets = list(result.training_clocks)
    return {
        "subsets": [vars(subset) for subset in subsets],
        "enough": smallest_sufficient_clocks(subsets).points,
    }


def _list_tested(tested: HeldBackRows | None, model: CounterModelKind) -> list[dict[str, Any]]:
    """Return the rows that were never trained on, with the watts of one model."""
    if tested is None:
        return []
    return list_test_rows(tested.names, tested.power_w, tested.predicted_w[model])


def list_test_rows(
    names: Sequence[str],
    measured_w: Array,
    predicted_w: Array,
) -> list[dict[str, Any]]:
    """Return measured and predicted watts of rows that were never trained on, as plain values for
    JSON.
    """
    rows = []
    pairs_w = zip(measured_w.tolist(), predicted_w.tolist(), strict=True)
    for name, (row_measured_w, row_predicted_w) in zip(names, pairs_w, strict=True):
        rows.append(
            {
                "benchmark": name,
                "measured_w": row_measured_w,
                "predicted_w": row_predicted_w,
            }
        )
    return rows


def make_saved_model(
    result: CounterFit,
    name: str,
    device: str = "",
) -> SavedModel:
    """Return the main model with its held-out errors, ready to be written."""
    main = main_model_kind(result)
    table = result.table
    errors = {
        f"held out by {by}": prediction.score.mape for by, prediction in main.held_out.items()
    }
    anchored = main.held_out["benchmark"].anchored
    if result.tested is not None:
        errors["never trained on"] = result.tested.mape(main.model)
    if anchored is not None:
        errors["held out by benchmark, power at the default clocks known"] = anchored.mape
    rows = f"{table.rows} rows of {table.benchmarks} benchmarks"
    source = f"wattcast lab fit counters {__version__}, {table.name}: {rows}"
    origin = Provenance(source, datetime.now(tz=UTC).date().isoformat(), device)
    return SavedModel(
        name,
        main.power,
        origin,
        errors,
        (*table.notes, *result.warnings),
        table.scaling,
    )
