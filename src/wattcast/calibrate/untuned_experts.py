"""Find the rows of TensorRT-LLM's experts that were timed without their tuned tactics.

TensorRT-LLM tunes the tactics of its CUTLASS experts as an engine starts. The collector of the
public tables does so once for a format and the sizes of one GPU's experts, and keeps the tactics in
a file named after these. They are valid for one number of chosen experts and one way to divide a
layer, so that another model or split of the same sizes finds the file, does not tune, and runs
fallback tactics, three to eighteen times as long as the hardware needs (aiconfigurator,
``collector/trtllm/collect_moe.py``: ``cache_path``).

A row does not say so. But all rows of a model and a split share it, whatever their tokens, so that
those that are fitted tell of the others: where their median takes a multiple of what their format
does beside the forecast, all of them are *untuned*. Engines that serve are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wattcast.calibrate.row_prediction import predict_with_bundle
from wattcast.calibrate.table_coefficients import TABLE
from wattcast.calibrate.table_rows import (
    RUN_S,
    TableRows,
    held_out,
)
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu
from wattcast.predictor.bundle import forecast_bundle
from wattcast.workload.engine_operators import UNTUNED, FusedExperts
from wattcast.workload.operator_base import Operator

_TUNED_LIBRARY = "cutlass"
_TUNED_SCALES = ("none", "tensor")  # DeepGEMM multiplies blocks, without tactics
_UNTUNED_LIBRARY = f"{_TUNED_LIBRARY}_{UNTUNED}"


def mark_untuned(table: TableRows, gpu: Gpu) -> TableRows:
    """Return the rows with the library of experts that were not tuned named so.

    Rows that are held out take what the fitted rows of their model and split say, and say nothing
    themselves.
    """
    places = [place for place, op in enumerate(table.rows.ops) if _may_be_untuned(table, place, op)]
    if not places:
        return table
    mask = np.zeros(len(table.rows), dtype=bool)
    mask[places] = True
    experts = table.rows.select_rows(mask)
    predicted_s = predict_with_bundle(forecast_bundle(gpu), experts, gpu, RUN_S)[:, 0]
    ratio = experts.column("latency_s") / predicted_s
    is_untuned = _find_untuned(experts.ops, ratio, ~held_out(experts.ops))

    ops = list(table.rows.ops)
    for place, untuned in zip(places, is_untuned.tolist(), strict=True):
        op = ops[place]
        if untuned and isinstance(op, FusedExperts):
            ops[place] = replace(op, kernel=_UNTUNED_LIBRARY)
    return replace(table, rows=replace(table.rows, ops=tuple(ops)))


def _may_be_untuned(table: TableRows, place: int, op: Operator) -> bool:
    """Tell whether a row is of experts that TensorRT-LLM tunes."""
    if table.engine[place] != "trtllm" or not isinstance(op, FusedExperts):
        return False
    return op.kernel == _TUNED_LIBRARY and op.scales in _TUNED_SCALES


def _find_untuned(
    ops: Sequence[Operator],
    ratio: Array,
    is_fitted: Mask,
) -> Mask:
    """Mark the rows of models and splits whose fitted rows take a multiple of what others do."""
    formats = [_name_format(op) for op in ops]
    usual = {}
    for name in dict.fromkeys(formats):
        is_alike = np.array([other == name for other in formats]) & is_fitted
        usual[name] = float(np.median(ratio[is_alike])) if is_alike.any() else np.inf
    excess = ratio / np.array([usual[name] for name in formats])

    series = [_name_series(op) for op in ops]
    witnesses: dict[str, list[float]] = defaultdict(list)
    for place in np.flatnonzero(is_fitted):
        witnesses[series[place]].append(float(excess[place]))
    slow = {
        name: float(np.median(values)) > TABLE.untuned_excess for name, values in witnesses.items()
    }
    return np.array([slow.get(name, False) for name in series], dtype=bool)


def _name_format(op: Operator) -> str:
    assert isinstance(op, FusedExperts), op
    return f"{op.weights} {op.scales}"


def _name_series(op: Operator) -> str:
    """Name the model and the split of a row, which were tuned or not for all tokens."""
    assert isinstance(op, FusedExperts), op
    return f"{_name_format(op)} {op.hidden} {op.intermediate} {op.experts} {op.gpus}"
