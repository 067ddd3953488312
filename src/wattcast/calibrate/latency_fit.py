"""Fit the corrections of kernel phases and the learned residual of latency.

There are two stages. First λ by group: the scaffold's five non-negative corrections, fitted to the
logarithm of the latency (relative error, so small kernels count as much as large), robustly, and
pulled towards the family's own fit where a group has few rows. Then trees and a Gaussian process
learn what remains, by family.

The Gaussian process is ours rather than scikit-learn's: its length scales have a prior, its noise
varies by row, and distances are in single precision. It fits some forty features to 300 rows in a
second, and shipped bundles rest on it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array, Mask
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.tree_ensemble import TreeEnsemble
from wattcast.kernels import Kernels
from wattcast.kernels.kernel_table import root_family
from wattcast.predictor.gaussian_process import GaussianProcess
from wattcast.predictor.ideal_terms import IdealTerms
from wattcast.predictor.kernel_phases import Correction
from wattcast.predictor.learned_factors import LearnedFactor


class LatencyFitCoefficients(Coefficients):
    """How strongly fits of latency follow their rows."""

    pull: float  # weight of the family's log λ against the relative error of one row
    tree_rate: float  # at which trees learn
    least_tree_rows: int  # of a family, for trees
    least_process_rows: int  # of a family, for a Gaussian process
    least_leaf_rows: int  # measured rows in a leaf
    outlier: float  # robust deviations beyond which a row says that it is far, not how far
    usual_length: float  # log of one over the length of a feature, in its deviations
    length_pull: float  # weight of a length that is unlike the usual
    length_bounds: tuple[float, float]  # of the log of one over a length
    variance_bounds: tuple[float, float]  # of the signal, in squares of logs
    noise_bounds: tuple[float, float]  # of the noise, in squares of logs
    start: tuple[float, ...]  # compute, memory, fixed seconds, L2, cycles a step
    lowest: tuple[float, ...]  # below which no correction goes, in the same order
    highest: tuple[float, ...]  # beyond which none goes
    large_error: float  # of a log, beyond which a row counts less than its square
    trees: int  # of a residual
    leaves: int  # of a tree at most
    leaf_pull: float  # rows of no error that a leaf counts besides its own


LATENCY_FIT = load_coefficients("latency_fit", LatencyFitCoefficients)


def fit_trees(
    names: tuple[str, ...],
    rows: Array,
    target: Array,
    weight: Array | None = None,
    trees: int = LATENCY_FIT.trees,
    leaves: int = LATENCY_FIT.leaves,
    least_rows: int = LATENCY_FIT.least_leaf_rows,
    loss: str = "absolute_error",
) -> TreeEnsemble:
    """Fit boosted trees to features ``(row, name)``; small and slow-learning, since rows are
    few.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        loss=loss,
        max_iter=trees,
        max_leaf_nodes=leaves,
        min_samples_leaf=least_rows,
        learning_rate=LATENCY_FIT.tree_rate,
        l2_regularization=LATENCY_FIT.leaf_pull,
        early_stopping=False,
        random_state=0,
    )
    model.fit(rows, target, sample_weight=weight)
    return _export_trees(model, names)


def _export_trees(model: Any, names: tuple[str, ...]) -> TreeEnsemble:
    """Return the trees of a fitted model of scikit-learn as arrays."""
    trees = []
    for (stage,) in model._predictors:
        nodes = stage.nodes
        is_leaf = nodes["is_leaf"] != 0
        trees.append(
            (
                is_leaf,
                nodes["feature_idx"],
                nodes["num_threshold"],
                nodes["left"],
                nodes["right"],
                np.where(is_leaf, nodes["value"], 0.0),
            )
        )
    baseline = float(np.ravel(model._baseline_prediction)[0])
    return TreeEnsemble(names, baseline, *pack_trees(trees))


def pack_trees(trees: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Pack trees into feature, threshold, left, right and value of their nodes, ``(tree, node)``
    each.

    A tree is given by which of its nodes are leaves, and these five of its nodes. A leaf is its own
    child.
    """
    most_nodes = max((len(is_leaf) for is_leaf, *_ in trees), default=1)
    shape = (len(trees), most_nodes)
    itself = np.broadcast_to(np.arange(most_nodes, dtype=np.int32), shape)
    feature = np.zeros(shape, np.int32)
    threshold = np.zeros(shape)
    value = np.zeros(shape)
    left = itself.copy()
    right = itself.copy()
    for tree, (is_leaf, features, thresholds, lefts, rights, values) in enumerate(trees):
        inner = np.flatnonzero(~is_leaf)
        feature[tree, inner] = features[inner]
        threshold[tree, inner] = thresholds[inner]
        left[tree, inner] = lefts[inner]
        right[tree, inner] = rights[inner]
        value[tree, : len(is_leaf)] = values
    return feature, threshold, left, right, value


LENGTH_ROWS = (
    300  # that lengths are fitted on, whose time grows with the cube; all rows give the mean
)
_STEPS = 25
_NO_EVIDENCE = 1e10  # cost of lengths whose covariance is singular
_FIRST_NOISE = 0.05  # of the variance, where the search for it begins
_SLOPE_STEP = 1e-3  # of a logarithm, by which slopes are taken
_MOST_CALLS = 60
_NORMAL_SPREAD = 1.4826  # standard deviation over the median absolute deviation
_LEAST_DEVIATION = 1e-3  # of logs, where most targets are equal


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

    deviation = raw.std(axis=0)
    varies = deviation > 1e-9
    if not varies.any():  # rows all alike: one column stands for them
        varies[0] = True
        deviation[0] = 1.0
    columns = np.flatnonzero(varies)
    deviation = deviation[columns]
    rows = raw[:, columns] / deviation

    mean = float(np.median(target))
    some_rows = np.random.default_rng(0).permutation(len(target))[:length_rows]
    length, variance, noise = _fit_lengths(rows[some_rows], target[some_rows] - mean)
    points = rows * length
    norms = (points**2).sum(axis=-1)
    squares = norms[:, None] + norms - 2.0 * points @ points.T
    covariance = variance * np.exp(-np.sqrt(np.maximum(squares, 0.0)))
    row_noise = noise if sure is None else noise * (sure**2).mean() / sure**2
    covariance[np.diag_indices_from(covariance)] += row_noise
    alpha = cho_solve(cho_factor(covariance, lower=True), target - mean)
    return GaussianProcess(
        features=tuple(names[column] for column in columns),
        scale=length / deviation,
        points=points,
        alpha=np.asarray(alpha),
        mean=mean,
        variance=variance,
    )


def _fit_lengths(rows: Array, target: Array) -> tuple[Array, float, float]:
    """Return the inverse lengths, the variance of the signal and that of the noise."""
    from scipy.linalg import (
        LinAlgError,
        cho_factor,
        cho_solve,
    )
    from scipy.optimize import minimize

    count, width = rows.shape
    # (feature, row, row); single precision: half the memory to walk over, and lengths need no more
    squares = ((rows.T[:, :, None] - rows.T[:, None, :]) ** 2).astype(np.float32)
    flat_squares = squares.reshape(width, -1)
    spread = max(float(target.var()), 1e-6)

    def negative_evidence(value: Array) -> tuple[float, Array]:
        log_length = value[:width]
        weight = np.exp(2.0 * log_length)
        variance = np.exp(value[width])
        noise = np.exp(value[width + 1])
        squared = (weight.astype(np.float32) @ flat_squares).reshape(count, count)
        radius = np.sqrt(np.maximum(squared.astype(np.float64), 1e-12))
        signal = variance * np.exp(-radius)
        try:
            factor = cho_factor(signal + noise * np.eye(count), lower=True)
        except LinAlgError:
            return _NO_EVIDENCE, np.zeros_like(value)

        alpha = cho_solve(factor, target)
        inverse = cho_solve(factor, np.eye(count))
        inner = inverse - np.outer(alpha, alpha)
        shrink = -signal / radius * inner
        pull = log_length - LATENCY_FIT.usual_length
        slope = np.empty_like(value)
        slope[:width] = 0.5 * weight * (flat_squares @ shrink.ravel().astype(np.float32))
        slope[:width] += LATENCY_FIT.length_pull * pull
        slope[width] = 0.5 * (inner * signal).sum()
        slope[width + 1] = 0.5 * noise * np.trace(inner)
        log_determinant = np.log(np.diag(factor[0])).sum()
        prior = 0.5 * LATENCY_FIT.length_pull * (pull**2).sum()
        cost = 0.5 * target @ alpha + log_determinant + prior
        return float(cost), slope

    start_noise = _FIRST_NOISE * spread  # where the search begins
    start_lengths = np.full(width, LATENCY_FIT.usual_length)
    start = np.concatenate([start_lengths, [np.log(spread), np.log(start_noise)]])
    variance_bounds = tuple(np.log(LATENCY_FIT.variance_bounds))
    noise_bounds = tuple(np.log(LATENCY_FIT.noise_bounds))
    result = minimize(
        negative_evidence,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[LATENCY_FIT.length_bounds] * width + [variance_bounds, noise_bounds],
        options={"maxiter": _STEPS},
    )
    best = np.exp(result.x)
    return best[:width], float(best[width]), float(best[width + 1])


# log λ: compute, memory, fixed (s), L2, cycles a step; where a fit starts and how far it may go
_START = np.log(LATENCY_FIT.start)
_LOW = np.log(LATENCY_FIT.lowest)
_HIGH = np.log(LATENCY_FIT.highest)
_LOOSE = 0.02  # pull of a family's start: what no row tells stays there


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
    values: dict[str, Array] = {}

    def fit_rows(
        is_member: Mask,
        start: Array,
        weight: float,
    ) -> Array:
        rows = np.flatnonzero(is_member)
        return _fit_group(
            terms.select_rows(rows),
            latency_s[rows],
            effective_hz[rows],
            start,
            weight,
        )

    for family in dict.fromkeys(families.tolist()):
        of_family = families == family
        start = _read_start(begin[family]) if family in begin else _START
        values[family] = fit_rows(of_family, start, _LOOSE)
        for name in dict.fromkeys(groups[of_family].tolist()):
            if name != family:
                values[name] = fit_rows(groups == name, values[family], LATENCY_FIT.pull)
    return {name: Correction(*np.exp(value).tolist()) for name, value in values.items()}


def _read_start(c: Correction) -> Array:
    """Return log λ of a correction, none of them below where a fit may go."""
    lambdas = [c.compute, c.memory, c.fixed_s, c.l2, c.serial_cycle]
    return np.asarray(np.log(np.maximum(lambdas, np.exp(_LOW))))


def _name_family(group: str) -> str:
    if root_family(group) == "depthwise":
        return "conv2d.depthwise"
    words = group.split(".")
    return ".".join(words[:3]) if words[1:2] == ["engine"] else words[0]


def refit_correction(
    terms: IdealTerms,
    latency_s: Array,
    effective_hz: Array,
    begin: Correction,
) -> Correction:
    """Fit the corrections of one group of kernels, pulled towards those that it has."""
    value = _fit_group(
        terms,
        latency_s,
        effective_hz,
        _read_start(begin),
        LATENCY_FIT.pull,
    )
    return Correction(*np.exp(value).tolist())


def _fit_group(
    terms: IdealTerms,
    latency_s: Array,
    effective_hz: Array,
    start: Array,
    weight: float,
) -> Array:
    from scipy.optimize import least_squares

    def misfit(value: Array) -> Array:
        error = np.log(terms.seconds(value, effective_hz)) - np.log(latency_s)
        return np.concatenate([error, (value - start) * weight])

    result = least_squares(
        misfit,
        np.clip(start, _LOW + 1e-6, _HIGH - 1e-6),
        bounds=(_LOW, _HIGH),
        loss="soft_l1",
        f_scale=LATENCY_FIT.large_error,
        diff_step=_SLOPE_STEP,
        max_nfev=_MOST_CALLS,
    )
    return np.asarray(result.x)


_FEATURE_ROWS = read_shipped_table("wattcast.calibrate", "residual_features.csv")
# of each family's kernels, that its residual is learned from
FEATURES = {row["family"]: tuple(row["features"].split()) for row in _FEATURE_ROWS}
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
        self,
        families: Sequence[str],
        names: Sequence[str],
    ) -> tuple[Array, Array, Array]:
        """Return features ``(row, name)``, target and how well it is known; features that are
        missing are zero.
        """
        members = np.flatnonzero(np.isin(self.kernels.work.root_family, families))
        features = {**self.kernels.work.features, **self.more}
        rows = np.zeros((len(members), len(names)))
        for column, name in enumerate(names):
            if name in features:
                rows[:, column] = features[name][members]
        sure = np.ones(len(members)) if self.sure is None else self.sure[members]
        return rows, np.log(self.ratio[members]), sure


def fit_residuals(
    samples: Sequence[ResidualSample],
    *,
    pools: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    trees: int = LATENCY_FIT.trees,
    leaves: int = LATENCY_FIT.leaves,
    hold_in: bool = True,
    loss: str = "absolute_error",
    length_rows: int = LENGTH_ROWS,
) -> dict[str, LearnedFactor]:
    """Fit log(measured over scaffold) by family; factors are held within the range that was seen.

    ``pools``: further families whose rows a family learns from, alike in features. A row may be in
    several samples. ``hold_in``: the process sees outliers of products and convolutions drawn in.
    ``loss`` is the trees', ``length_rows`` the number of rows that the process fits its lengths to.
    """
    factors = {}
    for family in _list_families(samples):
        rows = _pool_rows(samples, pools.get(family, (family,)))
        if len(rows.target) < LATENCY_FIT.least_process_rows:
            continue  # too few to learn from: the scaffold's word stands
        ensemble = None
        if trees and len(rows.target) >= LATENCY_FIT.least_tree_rows:
            weight = _weigh_rows(rows.target, loss) * rows.sure
            least = LATENCY_FIT.least_leaf_rows * (2 if rows.is_doubled else 1)
            ensemble = fit_trees(
                rows.names,
                rows.features,
                rows.target,
                weight,
                trees,
                leaves,
                least,
                loss,
            )
        smooth_target = rows.target
        if hold_in and family in _RAGGED:
            smooth_target = _draw_outliers_in(rows.target)
        process = fit_gaussian_process(
            rows.names,
            rows.features,
            smooth_target,
            rows.sure,
            length_rows,
        )
        factors[family] = LearnedFactor(
            ensemble,
            process,
            float(rows.target.min()),
            float(rows.target.max()),
        )
    return factors


@dataclass(frozen=True)
class _PooledRows:
    """The rows that a family learns from, of all samples."""

    names: tuple[str, ...]  # of the features
    features: Array  # (row, name)
    target: Array  # (row,): log(measured over scaffold)
    sure: Array  # (row,): how well each target is known
    is_doubled: bool  # whether rows of one sample are in another too


def _pool_rows(samples: Sequence[ResidualSample], pool: tuple[str, ...]) -> _PooledRows:
    """Collect the rows of some families from all samples."""
    names = _list_features(samples, pool)
    features = []
    targets = []
    sures = []
    is_doubled = False
    for sample in samples:
        sample_features, sample_target, sample_sure = sample.select_families(pool, names)
        features.append(sample_features)
        targets.append(sample_target)
        sures.append(sample_sure)
        is_doubled |= sample.again and len(sample_target) > 0
    return _PooledRows(
        names=names,
        features=np.concatenate(features),
        target=np.concatenate(targets),
        sure=np.concatenate(sures),
        is_doubled=is_doubled,
    )


def _list_families(samples: Sequence[ResidualSample]) -> list[str]:
    """List the families of kernels in any of the samples, as they come."""
    families: dict[str, None] = {}
    for sample in samples:
        families.update(dict.fromkeys(sample.kernels.work.root_family))
    return list(families)


def _list_features(samples: Sequence[ResidualSample], pool: Sequence[str]) -> tuple[str, ...]:
    """List the columns that the residual of a family reads in any of the samples."""
    names: list[str] = []
    for sample in samples:
        for family in pool:
            names += residual_features(family, sample.kernels)
            names += sample.more
    return tuple(dict.fromkeys(names))


def _weigh_rows(target: Array, loss: str) -> Array | float:
    """Return the weight of rows for the trees.

    |predicted / measured - 1| is what is scored: for a median, a row far above the scaffold weighs
    less.
    """
    if loss == "squared_error":
        return 1.0
    return np.asarray(np.exp(np.clip(np.median(target) - target, -1.0, 1.0)))


def _draw_outliers_in(target: Array) -> Array:
    """Draw outliers in, since a process takes errors as Gaussian."""
    middle = np.median(target)
    robust_deviation = _NORMAL_SPREAD * float(np.median(np.abs(target - middle)))
    reach = LATENCY_FIT.outlier * max(robust_deviation, _LEAST_DEVIATION)
    return np.clip(target, middle - reach, middle + reach)


_RAGGED = ("gemm", "conv2d", "depthwise")  # where a kernel not foreseen leaves a row far off


def residual_features(family: str, kernels: Kernels) -> tuple[str, ...]:
    """List the columns that a family's residual reads: its shape, the scaffold's ideal terms, its
    group.
    """
    groups = {group for group in kernels.work.kernel_family if root_family(group) == family}
    columns = [f"is {group}" for group in sorted(groups)]
    return (*FEATURES[family], *COMMON, *columns)


def one_thread() -> Any:
    """Limit fits to one thread: on a few hundred rows several threads only wait for one another.

    Only libraries already loaded are limited to one thread, so the one that grows trees is loaded
    first.
    """
    importlib.import_module("sklearn.ensemble")
    threadpoolctl = importlib.import_module("threadpoolctl")  # comes with scikit-learn
    return threadpoolctl.threadpool_limits(limits=1)
