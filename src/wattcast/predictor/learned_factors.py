"""Correct kernels by factors learned from measured rows.

The scaffold (``kernel_phases``) gives each kernel ideal terms, which fitted λ scale. What it misses
is learned: trees and a Gaussian process per family of kernels predict log(measured / scaffold) of
time and of energy.
"""

from __future__ import annotations

from collections.abc import (
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Mask,
    index_distinct,
    map_blocks,
    map_distinct,
)
from wattcast.core.tree_ensemble import TreeEnsemble
from wattcast.kernels import Kernels, ReferenceChip
from wattcast.kernels.kernel_table import root_family
from wattcast.kernels.lowering import compute_work
from wattcast.predictor.gaussian_process import GaussianProcess
from wattcast.predictor.ideal_terms import (
    RATE_FEATURES,
    busy_rates,
    compute_ideal_terms,
)
from wattcast.predictor.kernel_coefficients import KERNEL_TIMES
from wattcast.workload.operator_base import select_operators

_TREE_DIGITS = 9  # of a feature that trees see: a share of 1 less rounding goes the way of 1
# workloads whose factors are remembered, and kernels of one worth remembering
_MOST_REMEMBERED = 256
_MOST_ROWS = 1024

# Factors on time and on energy, ``(kernel,)``, and nearness, ``(2, kernel)``
Factors: TypeAlias = tuple[Array, Array, Array]


@dataclass(frozen=True)
class LearnedFactor:
    """Trees and a Gaussian process on log(measured over scaffold), averaged, and the range that was
    seen.
    """

    forest: TreeEnsemble | None
    kriging: GaussianProcess | None
    low: float
    high: float

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Columns that trees or process read, those of the trees first."""
        names: list[str] = []
        for model in (self.forest, self.kriging):
            if model is not None:
                names += model.features
        return tuple(dict.fromkeys(names))

    def predict_logs(
        self,
        table: Array,
        nearest_out: Array,
    ) -> Array:
        """Return the log of the factor of each row of ``features``, kept within the range that was
        seen.

        ``nearest_out`` takes the squared distance to the nearest measured row
        (``GaussianProcess.predict_rows``).
        """
        logs = np.zeros(len(table))
        if self.forest is not None:
            logs = self.forest.sum_trees(table.round(_TREE_DIGITS))
        if self.kriging is not None:
            smooth = self.kriging.predict_rows(table[:, self._kriging_columns], nearest_out)
            if self.forest is None:
                logs = smooth
            else:
                share = KERNEL_TIMES.process_share
                logs = share * smooth + (1.0 - share) * logs
        return np.minimum(np.maximum(logs, self.low), self.high)

    @cached_property
    def _kriging_columns(self) -> list[int]:
        if self.kriging is None:
            return []
        return [self.features.index(name) for name in self.kriging.features]


def evaluate_factors(
    models: Mapping[str, LearnedFactor],
    families: Sequence[str],
    features: Mapping[str, Array],
) -> tuple[Array, Array]:
    """Evaluate the learned factor of each kernel and its nearness to measured rows, each
    ``(kernel,)``.

    ``families`` names the model of each kernel; without one the factor is 1 and the nearness NaN.
    ``features`` are columns ``(kernel,)``. A kind of kernel that a model has and the features lack
    counts as zero. A kind that a model never met counts as the nearest kind above it, as
    ``cat.append`` counts as ``cat``.
    """
    factor = np.ones(len(families))
    near = np.full(len(families), np.nan)
    names, family = index_distinct(families)
    for number, name in enumerate(names):
        if name not in models:
            continue
        model = models[name]
        rows = np.flatnonzero(family == number)
        places = {feature: place for place, feature in enumerate(model.features)}
        columns = []
        for feature, values in features.items():
            kind = find_known_kind(feature, places)
            if kind:
                columns.append((places[kind], values))
        evaluate = partial(
            _evaluate_rows,
            model,
            columns,
            rows,
            factor,
            near,
        )
        map_blocks(evaluate, len(rows))
    return factor, near


def find_known_kind(name: str, known: Mapping[str, object]) -> str:
    """Return a name that is known, or the nearest kind above it that is, or "".

    >>> find_known_kind("is elementwise.cat.append", {"is elementwise.cat": None})
    'is elementwise.cat'
    """
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _evaluate_rows(
    model: LearnedFactor,
    columns: Sequence[tuple[int, Array]],
    rows: npt.NDArray[np.intp],
    factor_out: Array,
    near_out: Array,
    block: slice,
) -> None:
    """Set factor and nearness of a block of the rows; ``columns`` are places in the model's table
    and features.

    Nearness is exp(-r) of the nearest point: 1 at a measured row, towards 0 far from all of them.
    """
    block_rows = rows[block]
    table = np.zeros((len(model.features), len(block_rows)))
    squares = np.full(len(block_rows), np.nan)
    for place, values in columns:
        table[place] += values.take(block_rows)
    factor_out[block_rows] = np.exp(model.predict_logs(table.T, squares))
    near_out[block_rows] = np.exp(-np.sqrt(np.maximum(squares, 0.0)))


@dataclass(frozen=True)
class LearnedFactors:
    """Learned factors on time and energy by family; a family without any keeps what the scaffold
    gives.
    """

    reference: ReferenceChip
    time: Mapping[str, LearnedFactor]
    energy: Mapping[str, LearnedFactor]
    # by operators met before: factors depend on shapes alone, and take most of the time of a
    # prediction
    _remembered: dict[Hashable, Factors] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    def factors(
        self,
        kernels: Kernels,
        corrections: Array,
        energy: bool = True,
    ) -> Factors:
        """Return factors on time and on energy, ``(kernel,)``, and nearness; ``corrections`` are
        the five λ.

        Nearness, ``(2, kernel)``, is that of the nearest row that the factor on time and the one on
        energy were learned from, 1 to 0; NaN where nothing was. The model of energy sees, besides
        the shape, how busy the reference chip would be at its top clock; without ``energy`` it is
        not evaluated.
        """
        remembered = self._recall(kernels)
        if remembered is not None:
            return remembered
        work = kernels.work
        time, near_time = evaluate_factors(self.time, work.root_family, work.features)
        if not energy:
            count = len(kernels.ops)
            return time, np.ones(count), np.array([near_time, np.full(count, np.nan)])

        terms = compute_ideal_terms(kernels, self.reference)
        seconds = time * terms.corrected(corrections.T, self.reference.top_hz)
        fixed_s = time * corrections[:, 2] * work.launches
        rates = busy_rates(kernels, self.reference, seconds, fixed_s)
        features = {**work.features, **dict(zip(RATE_FEATURES, rates, strict=True))}
        cost, near_energy = evaluate_factors(self.energy, work.root_family, features)
        evaluated = time, cost, np.array([near_time, near_energy])
        self._remember(kernels, evaluated)
        return evaluated

    def _recall(self, kernels: Kernels) -> Factors | None:
        if len(kernels.ops) > _MOST_ROWS:
            return None
        return self._remembered.get(kernels.key)

    def _remember(
        self,
        kernels: Kernels,
        factors: Factors,
    ) -> None:
        if len(kernels.ops) > _MOST_ROWS:
            return
        if len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)), None)
        self._remembered[kernels.key] = factors

    def forget(self) -> None:
        """Forget the factors of workloads met before, as a measurement of time needs it."""
        self._remembered.clear()

    def off_chip(
        self,
        kernels: Kernels,
        time: Array,
    ) -> Array:
        """Return the part of the factor on time that seconds of device memory take: here all of
        it.
        """
        return time


@dataclass(frozen=True)
class CarriedFactors(LearnedFactors):
    """Learned factors carried over from another chip, ``reference``, for the families it has models
    of.
    """

    def factors(
        self,
        kernels: Kernels,
        corrections: Array,
        energy: bool = True,
    ) -> Factors:
        """Return factors on time and on energy, ``(kernel,)``, and nearness, as the other chip
        would have them.
        """
        count = len(kernels.ops)
        time = np.ones(count)
        cost = np.ones(count)
        near = np.full((2, count), np.nan)
        families = {*self.time, *self.energy} if energy else {*self.time}
        has_model = map_distinct(families.__contains__, kernels.work.root_family)
        has_pipe = map_distinct(self.reference.per_cycle.__contains__, kernels.pipe_event)
        rows = np.flatnonzero(has_model & has_pipe)
        if not rows.size:
            return time, cost, near

        carried = kernels.select_rows(rows, select_operators(kernels.ops, rows))
        factors = self._recall(carried)
        if factors is None:
            work = compute_work(carried.ops, carried.conditions, carried.pipe_event, self.reference)
            factors = super().factors(replace(carried, work=work), corrections[rows], energy)
        time[rows], cost[rows], near[:, rows] = factors
        return time, cost, near

    def off_chip(
        self,
        kernels: Kernels,
        time: Array,
    ) -> Array:
        """Scale seconds of device memory down by what was learned, never up."""
        return np.minimum(time, 1.0)


@dataclass(frozen=True)
class LayeredFactors(LearnedFactors):
    """Factors on time that a card's ``own`` rows taught for some kinds of kernels, over those of
    another chip for all other kinds.

    Energy is the other chip's throughout: a table of latencies says nothing about it.
    """

    own: LearnedFactors = field(kw_only=True)
    carried: LearnedFactors | None = field(kw_only=True)

    def factors(
        self,
        kernels: Kernels,
        corrections: Array,
        energy: bool = True,
    ) -> Factors:
        """Return factors on time and on energy, ``(kernel,)``, and nearness, each from the layer
        that has them.
        """
        time, _, near = self.own.factors(kernels, corrections, energy)
        if self.carried is None:
            return time, np.ones(len(kernels.ops)), near
        carried_time, cost, carried_near = self.carried.factors(kernels, corrections, energy)
        is_own = self._is_own(kernels)
        near_time = np.where(is_own, near[0], carried_near[0])
        return np.where(is_own, time, carried_time), cost, np.array([near_time, carried_near[1]])

    def off_chip(
        self,
        kernels: Kernels,
        time: Array,
    ) -> Array:
        """Return the part of the factor on time that device memory takes, by layer."""
        own_factors = self.own.off_chip(kernels, time)
        if self.carried is None:
            return own_factors
        return np.where(self._is_own(kernels), own_factors, self.carried.off_chip(kernels, time))

    def _is_own(self, kernels: Kernels) -> Mask:
        """Tell for which kernels the card's own rows taught a factor."""
        features = {family: frozenset(model.features) for family, model in self.own.time.items()}

        def has_group(group: str) -> bool:
            return f"is {group}" in features.get(root_family(group), ())

        return map_distinct(has_group, kernels.work.kernel_family)
