"""Correct kernels by factors learned from measured rows.

The scaffold (``kernel_phases``) gives each kernel ideal terms, which fitted λ scale. What it misses
is learned: trees and a Gaussian process per family of kernels predict log(measured / scaffold) of
time and of energy. ``ColdCacheDelay`` adds the time that an operator takes inside a model, where
its operands are not in cache."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import bad_value
from wattcast.core.arrays import Array, Mask, Sweepable, index_distinct, map_blocks, map_distinct
from wattcast.core.tree_ensemble import TreeEnsemble
from wattcast.kernels import Kernels, ReferenceChip
from wattcast.kernels.kernel_table import KernelWork, root_family, streamed_share
from wattcast.kernels.lowering import compute_work
from wattcast.predictor.timeline import count_rounds, count_waves
from wattcast.workload.operator_base import select_operators

# multiplications of a product: no library gives so few to threads, which wait for one another
_PRODUCT = 500_000
_FEWEST_ROWS = 16  # of such a product, with fewer points where they are many
_PAIRS = 2**16  # of rows and points whose distances stay in a cache
_LOG2_E = np.log2(np.e)  # scales coordinates so that 2^-r stands for exp(-r), which takes longer


@dataclass(frozen=True)
class GaussianProcess:
    """Points in scaled coordinates, and what each adds."""

    features: tuple[str, ...]
    scale: Array  # (feature,) multiplies a column
    points: Array  # (point, feature), already scaled
    alpha: Array  # (point,)
    mean: float
    variance: float

    def __post_init__(self) -> None:
        shape = (len(self.alpha), len(self.features))
        if self.points.shape != shape or self.scale.shape != shape[1:]:
            raise bad_value("kriging", f"points of shape {shape}", self.points.shape)
        if not (np.isfinite(self.points).all() and np.isfinite(self.alpha).all()):
            raise bad_value("kriging", "finite numbers", "others")

    def predict_rows(self, rows: Array, nearest_out: Array) -> Array:
        """Return the mean for each row ``(row, feature)``, columns in the order of ``features``.

        ``nearest_out`` takes r² of the nearest point.

        r² = |x|² + |p|² - 2x·p as one product of a few rows at a time, [x, |x|², 1]·[-2p, 1, |p|²],
        all from the middle of the points. Where a row is a point, what is left is rounding, some
        1e-15 of |x|², maybe below zero."""
        table = np.zeros(
            (len(rows) + 1, len(self.features) + 2)
        )  # a product of one row would round otherwise
        scaled = np.multiply(rows, self.scale, out=table[:-1, :-2])
        scaled -= self._middle
        scaled *= _LOG2_E
        np.einsum("ij,ij->i", scaled, scaled, out=table[:-1, -2])
        table[:, -1] = 1.0
        points, weights = self._factors
        found, nearest = _sum_decays(table, points, weights)
        np.divide(nearest[:-1], _LOG2_E**2, out=nearest_out)
        return self.mean + found[:-1]

    @cached_property
    def _factors(self) -> tuple[Array, Array]:
        """Factors of r² for 2^-r to each point, ``(feature + 2, point)``, and what the point adds."""
        points = np.empty((len(self.features) + 2, len(self.points)))
        np.multiply((self.points - self._middle).T, -2.0 * _LOG2_E, out=points[:-2])
        points[-2] = 1.0
        np.einsum("ij,ij->j", points[:-2], points[:-2], out=points[-1])
        points[-1] *= 0.25
        return points, self.variance * self.alpha

    @cached_property
    def _middle(self) -> Array:
        """From where distances are worked out: squares of small numbers leave little to round."""
        return (
            np.asarray(self.points.mean(axis=0))
            if len(self.points)
            else np.zeros(len(self.features))
        )

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Arrays to save beside a bundle; points in single precision, those in one place as one."""
        points, which = np.unique(self.points.astype(np.float32), axis=0, return_inverse=True)
        return {
            f"{prefix}.features": np.array(self.features),
            f"{prefix}.scale": self.scale,
            f"{prefix}.points": points,
            f"{prefix}.alpha": np.bincount(which.ravel(), weights=self.alpha),
            f"{prefix}.mean": np.array([self.mean, self.variance]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> GaussianProcess:
        """A process from what ``to_arrays`` saved."""
        mean, variance = (float(x) for x in arrays[f"{prefix}.mean"])
        names = ("scale", "points", "alpha")
        scale, points, alpha = (
            np.asarray(arrays[f"{prefix}.{name}"], np.float64) for name in names
        )
        return cls(
            tuple(map(str, arrays[f"{prefix}.features"])), scale, points, alpha, mean, variance
        )


def _sum_decays(table: Array, points: Array, weights: Array) -> tuple[Array, Array]:
    """Return Σ w·2^-r of each row and the lowest r²; ``table @ points`` are the squares r², ``(row,
    point)``.
    """
    few = min(len(table), max(_PRODUCT // max(points.size, 1), _FEWEST_ROWS))
    wide = len(weights) // (points.size * few // _PRODUCT + 1) + 1  # points in parts of one size
    most = few * max(_PAIRS // (few * wide), 1)
    space = np.empty(min(most, len(table)) * min(wide, len(weights)))
    found = np.zeros(len(table))
    nearest = np.full(len(table), np.inf)
    for j in range(0, len(weights), wide):  # points stay in the cache for all rows
        some = points[:, j : j + wide]
        weight = weights[j : j + wide]
        for i in range(0, len(table), most):
            rows = table[i : i + most]
            low = nearest[i : i + most]
            square = space[: len(rows) * len(weight)].reshape(len(rows), -1)
            for k in range(0, len(rows), few):
                np.matmul(rows[k : k + few], some, out=square[k : k + few])
            np.minimum(low, np.minimum.reduce(square, axis=1), out=low)
            if np.minimum.reduce(low) < 0.0:
                np.maximum(square, 0.0, out=square)
            np.negative(np.sqrt(square, out=square), out=square)
            found[i : i + most] += np.exp2(square, out=square) @ weight
    return found, nearest


# Elements of a layout kernel that an SM turns in a cycle: 575e9 a second on 132 SMs at 1.98 GHz, of
# two and of four bytes alike, from the times of layout kernels in the H200 database.
TURNS_PER_CYCLE = 2.2


@dataclass(frozen=True)
class IdealTerms:
    """Ideal terms of the phases of each kernel, ``(kernel,)``; ``predictor.kernel_phases`` says how
    λ scale them.
    """

    compute_cycle: Array
    l2_cycle: Array
    dram_s: Array
    serial_step: Array
    launches: Array
    between_cycle: Array
    between_s: Array
    turn_cycle: Array
    store_cycle: Array
    store_s: Array

    def seconds(self, log_corrections: Array, effective_hz: Array | float) -> Array:
        """Compute latency from log λ of compute, memory, fixed seconds, L2 and steps, ``(kernel,
        5)`` or ``(5,)``.
        """
        return self.corrected(np.moveaxis(np.exp(log_corrections), -1, 0), effective_hz)

    def corrected(self, corrections: Array, effective_hz: Array | float) -> Array:
        """Return the latency with the five λ themselves, on the first axis."""
        compute, memory, fixed, l2, serial = corrections
        on_chip = np.maximum(compute * self.compute_cycle, l2 * self.l2_cycle)
        main = np.maximum(on_chip / effective_hz, memory * self.dram_s)
        on_chip = np.maximum(l2 * self.between_cycle, self.turn_cycle)
        between = np.maximum(on_chip / effective_hz, memory * self.between_s)
        store = np.maximum(l2 * self.store_cycle / effective_hz, memory * self.store_s)
        return np.asarray(
            fixed * self.launches
            + serial * self.serial_step / effective_hz
            + main
            + between
            + store
        )

    def select_rows(self, rows: npt.NDArray[np.int64]) -> IdealTerms:
        """Return the terms of some of the kernels."""
        return IdealTerms(*(column[rows] for column in vars(self).values()))


def compute_ideal_terms(kernels: Kernels, reference: ReferenceChip) -> IdealTerms:
    """Compute the ideal terms of every kernel on the reference chip."""
    work = kernels.work
    sms = reference.sm_count
    in_waves = count_waves(kernels, sms)
    cycles = in_waves * work.unit_flop / _take_rate(kernels, reference)
    if reference.sfu_per_cycle > 0:
        cycles = np.maximum(cycles, kernels.sfu_op / (sms * reference.sfu_per_cycle))
    dram = reference.dram_byte_per_cycle * reference.top_hz
    stored_byte = late_dram_byte(work)
    return IdealTerms(
        compute_cycle=cycles,
        l2_cycle=work.l2_byte
        * load_imbalance(kernels, sms, in_waves)
        / reference.l2_byte_per_cycle,
        dram_s=memory_tail(kernels, sms)
        * (work.dram_read_byte + (work.dram_write_byte - stored_byte))
        / dram,
        serial_step=work.steps * count_rounds(kernels, sms),
        launches=work.launches,
        between_cycle=work.between_byte / reference.l2_byte_per_cycle,
        between_s=work.between_dram_byte / dram,
        turn_cycle=work.turn_element / (TURNS_PER_CYCLE * sms),
        store_cycle=work.store_byte / reference.l2_byte_per_cycle,
        store_s=stored_byte / dram,
    )


def load_imbalance(kernels: Kernels, sms: Sweepable, in_waves: Array) -> Sweepable:
    """Return what the busiest SM loads over what an SM loads on average, ``(*sweep, kernel)``.

    It is above 1 for tiles of convolutions only. Products have it too, but their loads hide behind
    more arithmetic: it fitted them worse."""
    if "conv2d" not in kernels.family.values:
        return 1.0
    uneven = np.asarray(in_waves * sms / np.maximum(kernels.work.units, 1.0))
    uneven[..., map_distinct("conv2d".__ne__, kernels.work.root_family)] = 1.0
    return uneven


_LONE_SHARE = 2.0  # of an even share of the memory's rate: what an SM reads at when few others do


def memory_tail(kernels: Kernels, sms: Sweepable) -> Sweepable:
    """Return the time that decode attention reads its cache over that of an even load, ``(*sweep,
    kernel)``.

    Tiles of U/S = w + r waves keep all SMs busy for w; in the rest an SM reads at most κ times its
    even share of the rate, so the factor is (w + max(r, 1/κ)) / (w + r), for sequences of one
    length."""
    paged = [
        name.startswith("attention.engine.paged.decode")
        for name in kernels.work.kernel_family.values
    ]
    if not any(paged):
        return 1.0
    even = np.array(paged).take(kernels.work.kernel_family.place) & (
        kernels.work.features["kinds"] == 1.0
    )
    waves = np.asarray(kernels.work.units / sms)
    left = waves % 1.0
    return np.where(
        even & (left > 0.0), (waves - left + np.maximum(left, 1.0 / _LONE_SHARE)) / waves, 1.0
    )


def late_dram_byte(work: KernelWork) -> Array:
    """Return the bytes of device memory that results take after a kernel's main loop; all others
    overlap it.
    """
    return np.where(work.store_byte > 0, work.dram_write_byte, 0.0)


RATE_FEATURES = ("log_time", "rate_dram", "rate_l2", "rate_pipe", "rate_active")


def busy_rates(kernels: Kernels, reference: ReferenceChip, seconds: Array, fixed_s: Array) -> Array:
    """Return the log of the time and shares of the reference chip's peak rates, ``(RATE_FEATURES,
    kernel)``.
    """
    work = kernels.work
    sms = reference.sm_count
    cycles = np.maximum(seconds * reference.top_hz, 1.0)
    dram_byte = work.dram_read_byte + work.dram_write_byte + work.between_dram_byte
    l2_byte = work.l2_byte + work.store_byte + work.between_byte
    share = work.units / (sms * np.maximum(count_waves(kernels, sms), 1e-30))
    drawn_in = np.minimum(np.maximum(1.0 - fixed_s / np.maximum(seconds, 1e-12), 0.0), 1.0)
    found = (
        np.log2(np.maximum(seconds * 1e6, 1e-3)),
        dram_byte / (cycles * reference.dram_byte_per_cycle),
        l2_byte / (cycles * reference.l2_byte_per_cycle),
        kernels.flop / (cycles * (sms * _take_rate(kernels, reference))),
        share * drawn_in,
    )
    return np.array(found)


def _take_rate(kernels: Kernels, reference: ReferenceChip) -> Array:
    """Return the arithmetic of an SM per cycle on each kernel's pipe."""
    return map_distinct(reference.per_cycle.__getitem__, kernels.pipe_event)


PROCESS_SHARE = 0.6  # of the process in the average with the trees: chosen on held-out folds
_TREE_DIGITS = 9  # of a feature that trees see: a share of 1 less rounding goes the way of 1
# workloads kept, and kernels of one worth keeping
_MOST_KEPT = 256
_MOST_ROWS = 1024


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
        models = (model for model in (self.forest, self.kriging) if model is not None)
        return tuple(dict.fromkeys(name for model in models for name in model.features))

    def predict_logs(self, table: Array, nearest_out: Array) -> Array:
        """Return the log of the factor of each row of ``features``, held within the range that was
        seen.

        ``nearest_out`` takes the squared distance to the nearest measured row
        (``GaussianProcess.predict_rows``)."""
        logs = (
            np.zeros(len(table))
            if self.forest is None
            else self.forest.sum_trees(table.round(_TREE_DIGITS))
        )
        if self.kriging is not None:
            smooth = self.kriging.predict_rows(table[:, self._kriging_columns], nearest_out)
            logs = (
                smooth
                if self.forest is None
                else PROCESS_SHARE * smooth + (1.0 - PROCESS_SHARE) * logs
            )
        return np.minimum(np.maximum(logs, self.low), self.high)

    @cached_property
    def _kriging_columns(self) -> list[int]:
        return [self.features.index(name) for name in self.kriging.features] if self.kriging else []


def evaluate_factors(
    models: Mapping[str, LearnedFactor], families: Sequence[str], features: Mapping[str, Array]
) -> tuple[Array, Array]:
    """Evaluate the learned factor of each kernel and its nearness to measured rows, each
    ``(kernel,)``.

    ``families`` names the model of each kernel; without one the factor is 1 and the nearness NaN.
    ``features`` are columns ``(kernel,)``. A kind of kernel that a model knows and the features
    lack counts as zero. A kind that a model never met counts as the nearest kind above it, as
    ``cat.append`` counts as ``cat``."""
    factor = np.ones(len(families))
    near = np.full(len(families), np.nan)
    names, family = index_distinct(families)
    for which, name in enumerate(names):
        if name not in models:
            continue
        model = models[name]
        rows = np.flatnonzero(family == which)
        place = {each: i for i, each in enumerate(model.features)}
        columns = [
            (place[known], values)
            for each, values in features.items()
            if (known := find_known_kind(each, place))
        ]
        map_blocks(partial(_evaluate_rows, model, columns, rows, factor, near), len(rows))
    return factor, near


def find_known_kind(name: str, known: Mapping[str, object]) -> str:
    """Return a name where it is known, of a kind of kernel that of the nearest kind above it, else
    "".

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
    some = rows[block]
    table = np.zeros((len(model.features), len(some)))
    squares = np.full(len(some), np.nan)
    for place, values in columns:
        table[place] += values.take(some)
    factor_out[some] = np.exp(model.predict_logs(table.T, squares))
    near_out[some] = np.exp(-np.sqrt(np.maximum(squares, 0.0)))


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
    _kept: dict[Hashable, tuple[Array, Array, Array]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def factors(
        self, kernels: Kernels, corrections: Array, energy: bool = True
    ) -> tuple[Array, Array, Array]:
        """Return factors on time and on energy, ``(kernel,)``, and nearness; ``corrections`` are
        the five λ.

        Nearness, ``(2, kernel)``, is that of the nearest row that the factor on time and the one on
        energy were learned from, 1 to 0; NaN where nothing was. The model of energy sees, besides
        the shape, how busy the reference chip would be at its top clock; without ``energy`` it is
        not asked."""
        work = kernels.work
        count = len(kernels.ops)
        kept = self._kept.get(kernels.key) if count <= _MOST_ROWS else None
        if kept is not None:
            return kept
        time, near_time = evaluate_factors(self.time, work.root_family, work.features)
        if not energy:
            return time, np.ones(count), np.array([near_time, np.full(count, np.nan)])
        terms = compute_ideal_terms(kernels, self.reference)
        seconds = time * terms.corrected(corrections.T, self.reference.top_hz)
        fixed_s = time * corrections[:, 2] * work.launches
        rates = zip(
            RATE_FEATURES, busy_rates(kernels, self.reference, seconds, fixed_s), strict=True
        )
        cost, near_energy = evaluate_factors(
            self.energy, work.root_family, {**work.features, **dict(rates)}
        )
        found = time, cost, np.array([near_time, near_energy])
        if count <= _MOST_ROWS:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[kernels.key] = found
        return found

    def off_chip(self, kernels: Kernels, time: Array) -> Array:
        """Return the part of the factor on time that seconds of device memory take: here all of it."""
        return time


@dataclass(frozen=True)
class CarriedFactors(LearnedFactors):
    """Learned factors carried over from another chip, ``reference``, for the families it has models
    of.
    """

    def factors(
        self, kernels: Kernels, corrections: Array, energy: bool = True
    ) -> tuple[Array, Array, Array]:
        """Return factors on time and on energy, ``(kernel,)``, and nearness, as the other chip
        would have them.
        """
        known = map_distinct(
            {*self.time, *(self.energy if energy else ())}.__contains__, kernels.work.root_family
        )
        rows = np.flatnonzero(
            known & map_distinct(self.reference.per_cycle.__contains__, kernels.pipe_event)
        )
        time = np.ones(len(kernels.ops))
        cost = np.ones(len(kernels.ops))
        near = np.full((2, len(kernels.ops)), np.nan)
        if not rows.size:
            return time, cost, near
        some = kernels.select_rows(rows, select_operators(kernels.ops, rows))
        found = self._kept.get(some.key) if len(rows) <= _MOST_ROWS else None
        if found is None:
            some = replace(
                some, work=compute_work(some.ops, some.conditions, some.pipe_event, self.reference)
            )
            found = super().factors(some, corrections[rows], energy)
        time[rows], cost[rows], near[:, rows] = found
        return time, cost, near

    def off_chip(self, kernels: Kernels, time: Array) -> Array:
        """Scale seconds of device memory down by what was learned, never up."""
        return np.minimum(time, 1.0)


@dataclass(frozen=True)
class LayeredFactors(LearnedFactors):
    """Factors on time that ``own`` learned for some kinds of kernels, over those that another chip
    has for the rest.

    Energy is the other chip's throughout: a table of latencies says nothing about it.
    """

    own: LearnedFactors = field(kw_only=True)
    carried: LearnedFactors | None = field(kw_only=True)

    def factors(
        self, kernels: Kernels, corrections: Array, energy: bool = True
    ) -> tuple[Array, Array, Array]:
        """Return factors on time and on energy, ``(kernel,)``, and nearness, each from the layer
        that has them.
        """
        time, _, near = self.own.factors(kernels, corrections, energy)
        cost = np.ones(len(kernels.ops))
        if self.carried is not None:
            below = self.carried.factors(kernels, corrections, energy)
            mine = self._is_own(kernels)
            time = np.where(mine, time, below[0])
            cost = below[1]
            near = np.array([np.where(mine, near[0], below[2][0]), below[2][1]])
        return time, cost, near

    def off_chip(self, kernels: Kernels, time: Array) -> Array:
        """Return the part of the factor on time that device memory takes, by layer."""
        found = self.own.off_chip(kernels, time)
        if self.carried is None:
            return found
        return np.where(self._is_own(kernels), found, self.carried.off_chip(kernels, time))

    def _is_own(self, kernels: Kernels) -> Mask:
        models = {family: frozenset(model.features) for family, model in self.own.time.items()}
        groups = kernels.work.kernel_family
        return map_distinct(
            lambda group: f"is {group}" in models.get(root_family(group), ()), groups
        )


_STREAMED = frozenset(
    {"gemm", "conv2d", "attention", "collective"}
)  # families that no burst keeps in L2


@dataclass(frozen=True)
class ColdCacheDelay:
    """Extra time of an operator inside a model, where other operators have pushed its operands out
    of L2.

    Δt = λ_o·M·w + λ_b·M·w·B for an operator of B bytes, of which a share w would stay in L2 if it
    ran alone again and again, and M is the share of L2 that others overwrite between two runs.
    Fitted to measured layers; products, convolutions and attention stream their operands and have
    no such time."""

    operator_s: float  # λ_o
    s_per_byte: float  # λ_b
    layers: int = 0  # that it was fitted to

    def __post_init__(self) -> None:
        if not (self.operator_s >= 0.0 and self.s_per_byte >= 0.0):
            raise bad_value("cold", "seconds of zero or more", (self.operator_s, self.s_per_byte))

    def extra_s(self, kernels: Kernels, l2_byte: float) -> Array:
        """Return the extra seconds of one run of each kernel, ``(kernel,)``."""
        operators, byte = cold_cache_terms(kernels, l2_byte)
        return np.asarray(self.operator_s * operators + self.s_per_byte * byte)


def cold_cache_terms(kernels: Kernels, l2_byte: float) -> Array:
    """Return M·w and M·w·B of one run of each kernel, ``(2, kernel)``, which λ_o and λ_b multiply.

    M is a mean over the runs of a kernel: repeated blocks see their own bytes pass, others all
    bytes."""
    work = kernels.work
    segments = kernels.segments
    passed = work.dram_read_byte + work.dram_write_byte + work.between_dram_byte
    each = np.array([passed.take(segment.rows) @ segment.counts for segment in segments])
    repeats = np.array([segment.repeat for segment in segments], np.float64)
    share = 1.0 - streamed_share(np.where(repeats > 1.0, each, each @ repeats), l2_byte)
    pushed_out = kernels.sum_over_runs(share.tolist()) / np.maximum(kernels.calls, 1.0)
    once = ~map_distinct(_STREAMED.__contains__, kernels.family)
    met = once * streamed_share(work.l2_byte, l2_byte) * pushed_out
    return np.array([met, met * work.l2_byte])
