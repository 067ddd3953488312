"""Fit the corrections of kernel phases and the learned residual of latency.

There are two stages. First λ by group: the scaffold's five non-negative corrections, fitted to the
logarithm of the latency (relative error, so small kernels count as much as large), robustly, and
pulled towards the family's own fit where a group has few rows. Then trees and a Gaussian process
learn what remains, by family.

The Gaussian process is ours rather than scikit-learn's: its length scales have a prior, its noise
varies by row, and distances are in single precision. It fits some forty features to 300 rows in a
second, and shipped bundles rest on it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.tree_ensemble import TreeEnsemble
from wattcast.kernels import Kernels
from wattcast.kernels.kernel_table import root_family
from wattcast.predictor.gaussian_process import GaussianProcess
from wattcast.predictor.ideal_terms import IdealTerms
from wattcast.predictor.kernel_phases import Correction
from wattcast.predictor.learned_factors import LearnedFactor


def fit_trees(
    names: tuple[str, ...],
    rows: Array,
    target: Array,
    weight: Array | None = None,
    trees: int = 150,
    leaves: int = 12,
    least_rows: int = 6,
    loss: str = "absolute_error",
) -> TreeEnsemble:
    """Fit boosted trees to features ``(row, name)``; small and slow-learning, since rows are few."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        loss=loss,
        max_iter=trees,
        max_leaf_nodes=leaves,
        min_samples_leaf=least_rows,
        learning_rate=TREE_RATE,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=0,
    )
    model.fit(rows, target, sample_weight=weight)
    return _export_trees(model, names)


def _export_trees(model: Any, names: tuple[str, ...]) -> TreeEnsemble:
    grown = []
    for (stage,) in model._predictors:
        nodes = stage.nodes
        leaf = stage.nodes["is_leaf"] != 0
        inner = [nodes[name] for name in ("feature_idx", "num_threshold", "left", "right")]
        grown.append((leaf, *inner, np.where(leaf, nodes["value"], 0.0)))
    return TreeEnsemble(names, float(np.ravel(model._baseline_prediction)[0]), *pack_trees(grown))


def pack_trees(grown: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Pack trees into feature, threshold, left, right and value of their nodes, ``(tree, node)``
    each.

    A tree is given by which of its nodes are leaves, and these five of its nodes. A leaf is its own
    child."""
    shape = len(grown), max((len(leaf) for leaf, *_ in grown), default=1)
    itself = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    feature = np.zeros(shape, np.int32)
    threshold = np.zeros(shape)
    value = np.zeros(shape)
    left = itself.copy()
    right = itself.copy()
    for i, (leaf, *inner, values) in enumerate(grown):
        at = np.flatnonzero(~leaf)
        feature[i, at], threshold[i, at], left[i, at], right[i, at] = (
            column[at] for column in inner
        )
        value[i, : len(leaf)] = values
    return feature, threshold, left, right, value


LENGTH_ROWS = 300  # rows the lengths are fitted on; all rows are used for the mean
_STEPS = 25


def fit_gaussian_process(
    names: tuple[str, ...],
    raw: Array,
    target: Array,
    sure: Array | None = None,
    length_rows: int = LENGTH_ROWS,
) -> GaussianProcess:
    """Fit lengths, signal and noise by maximum marginal likelihood [Rasmussen2006, Eq. 5.8-5.9],
    then the mean.

    ``raw`` are features ``(row, name)``. ``sure`` is how well each target is known: its noise goes
    with the inverse, with the same mean."""
    from scipy.linalg import cho_factor, cho_solve

    spread = raw.std(axis=0)
    kept = spread > 1e-9
    if not kept.any():  # rows all alike: one column stands for them
        kept[0], spread[0] = True, 1.0
    names = tuple(name for name, keep in zip(names, kept, strict=True) if keep)
    raw = raw[:, kept]
    spread = spread[kept]
    mean = float(np.median(target))
    rows = raw / spread
    picked = np.random.default_rng(0).permutation(len(target))[:length_rows]
    length, variance, noise = _fit_lengths(rows[picked], target[picked] - mean)
    points = rows * length
    norms = (points**2).sum(axis=-1)
    distance = np.sqrt(np.maximum(norms[:, None] + norms - 2.0 * points @ points.T, 0.0))
    near = variance * np.exp(-distance)
    near[np.diag_indices_from(near)] += (
        noise if sure is None else noise * (sure**2).mean() / sure**2
    )
    alpha = cho_solve(cho_factor(near, lower=True), target - mean)
    return GaussianProcess(names, length / spread, points, np.asarray(alpha), mean, variance)


def _fit_lengths(rows: Array, target: Array) -> tuple[Array, float, float]:
    from scipy.linalg import LinAlgError, cho_factor, cho_solve
    from scipy.optimize import minimize

    count, width = rows.shape
    # (feature, row, row); single precision: half the memory to walk over, and lengths need no more
    apart = ((rows.T[:, :, None] - rows.T[:, None, :]) ** 2).astype(np.float32)
    flat = apart.reshape(width, -1)
    spread = max(float(target.var()), 1e-6)

    def worse(value: Array) -> tuple[float, Array]:
        weight = np.exp(2.0 * value[:width])
        variance = np.exp(value[width])
        noise = np.exp(value[width + 1])
        squared = (weight.astype(np.float32) @ flat).reshape(count, count).astype(np.float64)
        radius = np.sqrt(np.maximum(squared, 1e-12))
        signal = variance * np.exp(-radius)
        try:
            factor = cho_factor(signal + noise * np.eye(count), lower=True)
        except LinAlgError:
            return 1e10, np.zeros_like(value)
        alpha = cho_solve(factor, target)
        inverse = cho_solve(factor, np.eye(count))
        inner = inverse - np.outer(alpha, alpha)
        shrink = -signal / radius * inner
        slope = np.empty_like(value)
        slope[:width] = 0.5 * weight * (flat @ shrink.ravel().astype(np.float32))
        slope[width] = 0.5 * (inner * signal).sum()
        slope[width + 1] = 0.5 * noise * np.trace(inner)
        pull = value[:width] - _START_LENGTH
        cost = 0.5 * target @ alpha + np.log(np.diag(factor[0])).sum() + 0.25 * (pull**2).sum()
        slope[:width] += 0.5 * pull
        return float(cost), slope

    start = np.concatenate([np.full(width, _START_LENGTH), [np.log(spread), np.log(0.05 * spread)]])
    bounds = [(-6.0, 1.5)] * width + [(np.log(1e-4), np.log(20.0)), (np.log(2e-5), np.log(0.5))]
    done = minimize(
        worse, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS}
    )
    return np.exp(done.x[:width]), float(np.exp(done.x[width])), float(np.exp(done.x[width + 1]))


_START_LENGTH = -1.5  # log of one over the length, in standard deviations of a feature


# log λ: compute, memory, fixed (s), L2, cycles a step; where a fit starts and how far it may go
_START = np.log([1.2, 1.2, 2e-6, 1.0, 20.0])
_LOW = np.log([0.1, 0.5, 3e-7, 0.05, 0.1])
_HIGH = np.log([20.0, 10.0, 3e-5, 20.0, 3000.0])
_PULL = 0.3  # weight of the family's value against one row's relative error, per unit of log λ
_LOOSE = 0.02  # and of where a family's search begins


def fit_corrections(
    terms: IdealTerms,
    group: Sequence[str],
    latency_s: Array,
    effective_hz: Array,
    begin: Mapping[str, Correction] = MappingProxyType({}),
) -> dict[str, Correction]:
    """Fit corrections of each family (the part of a group before its dot; depthwise apart), then of
    each group.

    A family's search begins at its entry of ``begin``, a forecast, where it has one.
    """
    groups = np.array(group)
    families = np.array([_name_family(name) for name in group])
    found: dict[str, Array] = {}
    for family in dict.fromkeys(families.tolist()):
        rows = np.flatnonzero(families == family)
        start = _START
        if (c := begin.get(family)) is not None:
            start = np.log(
                np.maximum([c.compute, c.memory, c.fixed_s, c.l2, c.serial_cycle], np.exp(_LOW))
            )
        found[family] = _fit_group(
            terms.select_rows(rows), latency_s[rows], effective_hz[rows], start, _LOOSE
        )
        for name in dict.fromkeys(groups[rows].tolist()):
            if name != family:
                inside = np.flatnonzero(groups == name)
                found[name] = _fit_group(
                    terms.select_rows(inside),
                    latency_s[inside],
                    effective_hz[inside],
                    found[family],
                    _PULL,
                )
    return {name: Correction(*map(float, np.exp(value))) for name, value in found.items()}


def _name_family(group: str) -> str:
    if root_family(group) == "depthwise":
        return "conv2d.depthwise"
    words = group.split(".")
    return ".".join(words[:3]) if words[1:2] == ["engine"] else words[0]


def _fit_group(
    terms: IdealTerms, latency_s: Array, effective_hz: Array, start: Array, weight: float
) -> Array:
    from scipy.optimize import least_squares

    def misfit(value: Array) -> Array:
        error = np.log(terms.seconds(value, effective_hz)) - np.log(latency_s)
        return np.concatenate([error, (value - start) * weight])

    inside = np.clip(start, _LOW + 1e-6, _HIGH - 1e-6)
    done = least_squares(
        misfit,
        inside,
        bounds=(_LOW, _HIGH),
        loss="soft_l1",
        f_scale=0.2,
        diff_step=1e-3,
        max_nfev=60,
    )
    return np.asarray(done.x)


FEATURES = {  # of each family's kernels, that its residual is learned from
    row["family"]: tuple(row["features"].split())
    for row in read_shipped_table("wattcast.calibrate", "residual_features.csv")
}
COMMON = ("ideal_compute", "ideal_l2", "ideal_dram", "ideal_bound", "ideal_between", "steps")


@dataclass(frozen=True)
class ResidualSample:
    """Kernels with measured over scaffold of each, and further features."""

    kernels: Kernels
    ratio: Array
    more: Mapping[str, Array] = field(default_factory=dict)
    again: bool = False  # its rows are in other samples too
    sure: Array | None = None  # how well each ratio is known, above 0 to 1; None: all alike

    def select_families(
        self, families: Sequence[str], names: Sequence[str]
    ) -> tuple[Array, Array, Array]:
        """Return features ``(row, name)``, target and how well it is known; features that are
        missing are zero.
        """
        at = np.flatnonzero(np.isin(self.kernels.work.root_family, families))
        known = {**self.kernels.work.features, **self.more}
        nothing = np.zeros(len(at))
        rows = np.stack(
            [known[n][at] if n in known else nothing for n in names], axis=-1, dtype=np.float64
        )
        return (
            rows,
            np.log(self.ratio[at]),
            np.ones(len(at)) if self.sure is None else self.sure[at],
        )


def fit_residuals(
    samples: Sequence[ResidualSample],
    *,
    pools: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    trees: int = 150,
    leaves: int = 12,
    hold_in: bool = True,
    loss: str = "absolute_error",
    length_rows: int = LENGTH_ROWS,
) -> dict[str, LearnedFactor]:
    """Fit log(measured over scaffold) by family; factors are held within the range that was seen.

    ``pools``: further families whose rows a family learns from, alike in features. A row may be in
    several samples. ``hold_in``: the process sees outliers of products and convolutions drawn in.
    ``loss`` is the trees', ``length_rows`` the number of rows that the process fits its lengths to.
    """
    found = {}
    for family in dict.fromkeys(
        name for sample in samples for name in sample.kernels.work.root_family
    ):
        pool = pools.get(family, (family,))
        names = tuple(
            dict.fromkeys(
                name
                for s in samples
                for other in pool
                for name in (*residual_features(other, s.kernels), *s.more)
            )
        )
        parts = [sample.select_families(pool, names) for sample in samples]
        rows, target, sure = map(np.concatenate, zip(*parts, strict=True))
        if len(target) < LEAST_FOR_PROCESS:
            continue  # too few to learn from: the scaffold's word stands
        grown = trees and len(target) >= LEAST_FOR_TREES
        again = any(
            sample.again and len(part[1]) for sample, part in zip(samples, parts, strict=True)
        )
        # |predicted / measured - 1| is what is scored: for a median, a row far above the scaffold
        # weighs less
        tilt = (
            1.0
            if loss == "squared_error"
            else np.exp(np.clip(np.median(target) - target, -1.0, 1.0))
        )
        ensemble = None
        drawn_in = target
        if grown:
            least = LEAST_LEAF_ROWS * (2 if again else 1)
            ensemble = fit_trees(names, rows, target, tilt * sure, trees, leaves, least, loss)
        if (
            hold_in and family in _RAGGED
        ):  # outliers are drawn in, since a process takes errors as Gaussian
            middle = np.median(target)
            spread = max(1.4826 * float(np.median(np.abs(target - middle))), 1e-3)
            drawn_in = np.clip(target, middle - _OUTLIER * spread, middle + _OUTLIER * spread)
        process = fit_gaussian_process(names, rows, drawn_in, sure, length_rows)
        found[family] = LearnedFactor(ensemble, process, float(target.min()), float(target.max()))
    return found


LEAST_FOR_TREES = 40
LEAST_FOR_PROCESS = 8
LEAST_LEAF_ROWS = 6  # measured rows in a leaf
TREE_RATE = 0.12  # at which trees learn
_RAGGED = ("gemm", "conv2d", "depthwise")  # where a kernel not foreseen leaves a row far off
_OUTLIER = 3.0  # in robust standard deviations: beyond, a row says that it is far, not how far


def residual_features(family: str, kernels: Kernels) -> tuple[str, ...]:
    """List the columns that a family's residual reads: its shape, the scaffold's ideal terms, its
    group.
    """
    groups = sorted({g for g in kernels.work.kernel_family if root_family(g) == family})
    return (*FEATURES[family], *COMMON, *(f"is {group}" for group in groups))


def one_thread() -> Any:
    """Limit fits to one thread: on a few hundred rows several threads only wait for one another.

    Only libraries already loaded are held to one thread, so the one that grows trees is loaded
    first."""
    importlib.import_module("sklearn.ensemble")
    return importlib.import_module("threadpoolctl").threadpool_limits(
        limits=1
    )  # comes with scikit-learn
