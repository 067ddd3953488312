"""scikit-learn's gradient-boosted trees -> :class:`~wattcast.forest.Forest`, plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.forest import Forest, depth_of


def fit_forest(
    columns: Mapping[str, npt.ArrayLike],
    target: Array,
    weight: Array | None = None,
    *,
    trees: int = 150,
    leaves: int = 12,
    least_rows: int = 6,
    rate: float = 0.06,
    loss: str = "absolute_error",
    seed: int = 0,
) -> Forest:
    """Boosted trees of ``target`` on ``columns``; small and slow-learning, since rows are few."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    names = tuple(columns)
    rows = np.stack([np.asarray(columns[name], dtype=np.float64) for name in names], axis=-1)
    model = HistGradientBoostingRegressor(
        loss=loss,
        max_iter=trees,
        max_leaf_nodes=leaves,
        min_samples_leaf=least_rows,
        learning_rate=rate,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=seed,
    )
    model.fit(rows, target, sample_weight=weight)
    return _export(model, names)


def _export(model: Any, names: tuple[str, ...]) -> Forest:
    grown = [stage[0].nodes for stage in model._predictors]
    most = max((len(nodes) for nodes in grown), default=1)
    shape = (len(grown), most)
    itself = np.broadcast_to(np.arange(most, dtype=np.int32), shape)
    feature, value = np.zeros(shape, np.int32), np.zeros(shape)
    threshold, left, right = np.zeros(shape), itself.copy(), itself.copy()
    for i, nodes in enumerate(grown):
        inner = nodes["is_leaf"] == 0
        at = np.flatnonzero(inner)
        feature[i, at] = nodes["feature_idx"][inner]
        threshold[i, at] = nodes["num_threshold"][inner]
        left[i, at], right[i, at] = nodes["left"][inner], nodes["right"][inner]
        value[i, : len(nodes)] = np.where(inner, 0.0, nodes["value"])
    base = float(np.ravel(model._baseline_prediction)[0])
    return Forest(names, base, feature, threshold, left, right, value, depth_of(left, right))
