"""Suggest which rows to measure next: those that take away most uncertainty where predictions are
asked for.

The residual of a kernel is taken as a Gaussian process over its log2 sizes: kernels of one group
within a few doublings tell about one another, those of other groups of the family half as much. A
candidate is worth the variance it takes away from all targets [Cohn1996], each weighted by the
share of time it takes in real models (targets of the plan count alike). Rows are picked one by one;
each is taken as measured for the next. All families count as equally unsure: where errors are large
because the model is wrong, more rows do not help, and going by the width of intervals spends them
there (``docs/method/bigger-database.md`` has the comparison)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from wattcast.calibrate.kernel_rows import (
    KernelRows,
    parse_operators,
    select_kernels,
)
from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import RunCondition
from wattcast.predictor import api
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.workload import model_catalogue
from wattcast.workload.model_catalogue import ModelKind
from wattcast.workload.operator_base import Operator


class SuggestionCoefficients(Coefficients):
    """How much measured rows tell of others, and where suggestions are from."""

    # Within which a measured row tells about another: where the covariance has fallen to 1/e
    reach_doublings: float
    across_groups: float  # covariance of kernels of one size in two groups of a family
    row_noise: float  # of the variance: what a row does not tell even of itself
    plan_share: float  # of the suggestions, from the plan's random shapes


SUGGESTIONS = load_coefficients("row_suggestions", SuggestionCoefficients)

MOST_CANDIDATES = 1500  # of a family that are weighed against one another
MOST_KNOWN = 1500  # measured rows of a family that are looked at, those nearest to candidates first

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowCandidate:
    """An operator that can be measured, as a workload file writes it, and the share of time it
    takes.
    """

    operator: dict[str, Any]
    condition: RunCondition
    share: float  # of the time of real models; 0: a row of the plan
    source: str


@dataclass(frozen=True)
class RowSuggestion:
    """A candidate and its worth."""

    candidate: RowCandidate
    score: float
    distance: (
        float  # doublings to the nearest measured row of its kind; infinite: none was measured
    )
    width: float  # log-width of its family's interval


def suggest_rows(
    candidates: Sequence[RowCandidate],
    count: int,
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
    plan_share: float = SUGGESTIONS.plan_share,
) -> list[RowSuggestion]:
    """Suggest the ``count`` rows worth most: ``1 - plan_share`` of them from real models, the rest
    from the plan.
    """
    if not candidates:
        return []
    ops = parse_operators([c.operator for c in candidates])
    kernels = build_kernels(
        ops,
        [c.condition for c in candidates],
        gpu,
        bundle.reference,
        (),
    )
    known = select_kernels(kernels, np.zeros(len(ops), dtype=bool))
    if len(rows):
        known = build_kernels(
            rows.ops,
            rows.conditions,
            gpu,
            bundle.reference,
            (),
        )
    share = np.array([c.share for c in candidates])
    is_real = share > 0
    from_plan = min(round(plan_share * count), int((~is_real).sum()))
    picks = pick_candidates(
        kernels,
        known,
        share,
        is_real,
        count - from_plan,
    )
    # the plan's rows are judged by one another, with what was just picked as measured
    is_picked = np.isin(np.arange(len(share)), [place for place, _ in picks])
    is_open = ~is_real & ~is_picked
    plan_weight = (~is_real).astype(float)
    picks += pick_candidates(
        kernels,
        known,
        plan_weight,
        is_open,
        from_plan,
        is_picked,
    )

    distance = distances_to_known(kernels, known)
    width = interval_widths(kernels, bundle)
    suggestions = []
    for place, worth in picks:
        suggestions.append(
            RowSuggestion(candidates[place], worth, float(distance[place]), float(width[place]))
        )
    return suggestions


def interval_widths(kernels: Kernels, bundle: Bundle) -> Array:
    """Return the log-width of the interval of each kernel's family."""
    ends = np.array([bundle.residuals[family].latency for family in kernels.family])
    return np.asarray(np.log(ends[:, 1] / ends[:, 0]))


def pick_candidates(
    kernels: Kernels,
    known: Kernels,
    weight: Array,
    allowed: Mask,
    count: int,
    measured: Mask | None = None,
) -> list[tuple[int, float]]:
    """Pick candidates by their worth, the variance they take from targets of ``weight``; return
    both.

    ``measured`` are candidates to take as measured already. Families do not tell about one another,
    so each is a problem of its own; the best of any is picked next.
    """
    learners = np.array(kernels.work.root_family)
    known_learners = np.array(known.work.root_family)
    share = weight / max(float(weight.sum()), 1e-30)
    problems = []
    for name in dict.fromkeys(learners[allowed].tolist()):
        here = np.flatnonzero((learners == name) & (allowed | (weight > 0)))
        if len(here) > MOST_CANDIDATES:  # those of most worth stay, and evenly among equals
            evenly = np.random.default_rng(0).permutation(len(here))
            ranked = evenly[np.argsort(-share[here][evenly], kind="stable")]
            here = np.sort(here[ranked[:MOST_CANDIDATES]])
        extra = np.zeros(0, dtype=np.int64)
        if measured is not None:
            extra = np.flatnonzero((learners == name) & measured)
        there = np.flatnonzero(known_learners == name)
        problems.append(
            _FamilyProblem(
                kernels,
                here,
                known,
                there,
                extra,
                share,
                allowed[here],
            )
        )
    picks: list[tuple[int, float]] = []
    for _ in range(min(count, int(allowed.sum()))):
        best = max(problems, key=lambda problem: problem.worth)
        picks.append((best.place, best.worth))
        best.take()
    return picks


class _FamilyProblem:
    """The covariance of one family's candidates and targets given what was measured; it shrinks
    with every pick.
    """

    def __init__(
        self,
        kernels: Kernels,
        here: Index,
        known: Kernels,
        there: Index,
        extra: Index,
        share: Array,
        allowed: Mask,
    ) -> None:
        self._here = here
        self._open = allowed.copy()
        self._weight = share[here]
        features = {*kernels.work.features, *known.work.features}
        names = sorted(name for name in features if name.startswith("log_"))
        sizes, groups = _place_rows(kernels, here, names)

        # what was measured: known rows, and candidates taken as measured, the nearest of them
        known_sizes, known_groups = _place_rows(known, there, names)
        extra_sizes, extra_groups = _place_rows(kernels, extra, names)
        points = np.concatenate([known_sizes, extra_sizes])
        point_groups = np.concatenate([known_groups, extra_groups])
        if len(points) > MOST_KNOWN:
            nearest = _correlate_residuals(points, point_groups, sizes, groups).max(axis=1)
            order = np.argsort(-nearest, kind="stable")[:MOST_KNOWN]
            points = points[order]
            point_groups = point_groups[order]

        covariance = _correlate_residuals(sizes, groups, sizes, groups)
        if len(points):
            cross = _correlate_residuals(points, point_groups, sizes, groups)
            inner = _correlate_residuals(points, point_groups, points, point_groups)
            inner = inner + SUGGESTIONS.row_noise * np.eye(len(points))
            covariance = covariance - cross.T @ np.linalg.solve(inner, cross)
        self._covariance = covariance
        self._find_best()

    def take(self) -> None:
        """Take the best candidate as measured."""
        column = self._covariance[:, self._best].copy()
        self._covariance -= np.outer(column, column) / (column[self._best] + SUGGESTIONS.row_noise)
        self._open[self._best] = False
        self._find_best()

    def _find_best(self) -> None:
        variance = np.maximum(np.diag(self._covariance), 0.0) + SUGGESTIONS.row_noise
        gain = (self._covariance**2 @ self._weight) / variance
        gain = np.where(self._open, gain, -1.0)
        self._best = int(np.argmax(gain))
        self.worth = float(gain[self._best])
        self.place = int(self._here[self._best])


def _place_rows(
    kernels: Kernels,
    rows: Index,
    names: Sequence[str],
) -> tuple[Array, Index]:
    """Return log2 sizes ``(row, size)`` and groups as numbers."""
    nothing = np.zeros(len(kernels.ops))
    sizes = np.column_stack([kernels.work.features.get(name, nothing)[rows] for name in names])
    codes = [crc32(kernels.work.kernel_family[row].encode()) for row in rows]
    return sizes, np.array(codes, dtype=np.int64)


def _correlate_residuals(
    a: Array,
    group_a: Index,
    b: Array,
    group_b: Index,
) -> Array:
    """Return the covariance of residuals over the variance, ``(a, b)``."""
    squared = (a**2).sum(axis=-1)[:, None] + (b**2).sum(axis=-1) - 2.0 * a @ b.T
    alike = np.where(group_a[:, None] == group_b, 1.0, SUGGESTIONS.across_groups)
    return np.asarray(
        alike * np.exp(-np.sqrt(np.maximum(squared, 0.0)) / SUGGESTIONS.reach_doublings)
    )


def distances_to_known(kernels: Kernels, known: Kernels) -> Array:
    """Return the doublings from each kernel to the nearest known one of its group."""
    shared = set(kernels.work.features) & set(known.work.features)
    names = sorted(name for name in shared if name.startswith("log_"))
    sizes, groups = _place_rows(kernels, np.arange(len(kernels.ops)), names)
    known_sizes, known_groups = _place_rows(known, np.arange(len(known.ops)), names)
    distances = np.full(len(groups), np.inf)
    for group in set(groups.tolist()):
        here = np.flatnonzero(groups == group)
        there = np.flatnonzero(known_groups == group)
        if len(there):
            differences = sizes[here][:, None, :] - known_sizes[there][None, :, :]
            distances[here] = np.linalg.norm(differences, axis=-1).min(axis=1)
    return distances


_Runs = tuple[dict[str, Any], ...]
LANGUAGE_RUNS: _Runs = (
    {"batch": 4, "phase": "prefill"},
    {"batch": 16, "phase": "decode"},
    {"batch": 4, "attention": "eager"},
    {"batch": 64, "phase": "decode"},
    {
        "batch": 4,
        "phase": "train",
        "seq": 512,
    },
)
VISION_RUNS: _Runs = ({"batch": 1}, {"batch": 32}, {"batch": 128}, {"batch": 32, "phase": "train"})
ENCODER_RUNS: _Runs = (
    {"batch": 16},
    {"batch": 16, "attention": "eager"},
    {"batch": 16, "phase": "train"},
)


@dataclass(frozen=True)
class ModelOperator:
    """An operator, the share of one run's time in kernels it is predicted to take, and the run."""

    op: Operator
    share: float
    run: str


def list_model_operators(gpu: str, tell: Callable[[str], None]) -> list[ModelOperator]:
    """List every operator of every model and run; the shares of a run add up to one."""
    runs_of_kind = {ModelKind.VISION: VISION_RUNS, ModelKind.ENCODER: ENCODER_RUNS}
    operators = []
    for name in model_catalogue.list_models():
        kind = model_catalogue.load_model(name).kind
        for options in runs_of_kind.get(kind, LANGUAGE_RUNS):
            try:
                p = api.predict(
                    name,
                    gpu,
                    host_launch=0.0,
                    force=True,
                    stack="eager",
                    **options,
                )
            except WattcastError as error:  # a model that knows no such phase
                tell(f"{name}: {error}")
                continue
            for share in p.ops:
                time_share = float(share.latency_s) / float(p.busy_s)
                operators.append(ModelOperator(share.op, time_share, p.name))
    return operators
