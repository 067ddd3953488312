"""Corrections of the scaffold and the learned residual of time, from measured latencies.

Two stages. First λ by group: the scaffold's five non-negative corrections, fitted to the logarithm
of the latency (relative error, so small kernels count as much as large), robustly, and pulled
towards the family's own fit where a group has few rows. Then trees on what is left, by family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.kriging import fit_kriging
from wattcast.fit.trees import fit_forest
from wattcast.kernels import Kernels
from wattcast.kernels.work import learner_of
from wattcast.timeline.ideal import Terms
from wattcast.timeline.phases import Correction
from wattcast.timeline.residual import Learned

# log λ: compute, memory, fixed (s), L2, cycles a step; where a fit starts and how far it may go
_START = np.log([1.2, 1.2, 2e-6, 1.0, 20.0])
_LOW = np.log([0.1, 0.5, 3e-7, 0.05, 0.1])
_HIGH = np.log([20.0, 10.0, 3e-5, 20.0, 3000.0])
_PULL = 0.3  # weight of the family's value against one row's relative error, per unit of log λ


def fit_corrections(
    terms: Terms, group: Sequence[str], latency_s: Array, effective_hz: Array
) -> dict[str, Correction]:
    """Corrections of each family (the part of a group before its dot; depthwise convolutions apart), then of each
    group."""
    groups = np.array(group)
    families = np.array([_family(name) for name in group])
    found: dict[str, Array] = {}
    for family in dict.fromkeys(families.tolist()):
        rows = np.flatnonzero(families == family)
        found[family] = _fit(terms.at(rows), latency_s[rows], effective_hz[rows], None)
        for name in dict.fromkeys(groups[rows].tolist()):
            if name != family:
                inside = np.flatnonzero(groups == name)
                found[name] = _fit(terms.at(inside), latency_s[inside], effective_hz[inside], found[family])
    return {name: _correction(value) for name, value in found.items()}


def _family(group: str) -> str:
    return "conv2d.depthwise" if learner_of(group) == "depthwise" else group.partition(".")[0]


def _fit(terms: Terms, latency_s: Array, effective_hz: Array, towards: Array | None) -> Array:
    from scipy.optimize import least_squares

    start = _START if towards is None else towards

    def misfit(value: Array) -> Array:
        error = np.log(terms.seconds(value, effective_hz)) - np.log(latency_s)
        pull = (value - start) * (_PULL if towards is not None else 0.02)
        return np.concatenate([error, pull])

    inside = np.clip(start, _LOW + 1e-6, _HIGH - 1e-6)
    done = least_squares(
        misfit, inside, bounds=(_LOW, _HIGH), loss="soft_l1", f_scale=0.2, diff_step=1e-3, max_nfev=60
    )
    return np.asarray(done.x)


def _correction(value: Array) -> Correction:
    compute, memory, fixed, l2, serial = (float(x) for x in np.exp(value))
    return Correction(compute, memory, fixed, l2, serial)


def log_corrections(corrections: Sequence[Correction]) -> Array:
    """Corrections as rows of log λ, ``(row, 5)``."""
    return np.log([[c.compute, c.memory, c.fixed_s, c.l2, c.serial_cycle] for c in corrections])


FEATURES = {
    "gemm": (
        *("log_b", "log_m", "log_n", "log_k", "align_m", "align_n", "align_k", "tile_n", "tile_m", "split", "fill"),
        *(
            "log_units",
            "rounds",
            "fill_128x128",
            "waves_128x128",
            "linear",
            "straight",
            "left_turned",
            "warm",
            "odd",
            "bias",
            "dtype",
        ),
    ),
    "conv2d": (
        *("log_m", "log_n", "log_k", "align_n", "align_c", "tile_n", "tile_m", "fill", "log_units", "rounds"),
        *("log_groups", "turned", "padded_in", "padded_out", "align_side", "tap_padding", "log_turns", "log_c"),
        *("log_rs", "stride", "channels_last", "log_image", "log_out", "log_batch", "dtype", "dgrad", "wgrad"),
    ),
    "depthwise": (
        *(
            "log_rs",
            "stride",
            "channels_last",
            "log_image",
            "log_out",
            "log_side",
            "log_batch",
            "log_groups",
            "dtype",
            "dgrad",
            "wgrad",
        ),
    ),
    "attention": (
        *("log_batch", "log_heads", "log_group", "log_q", "log_kv", "head_dim", "causal", "flash", "cudnn"),
        *("split_heads", "cold", "log_units", "fill", "fill_2", "pad_q", "log_cut"),
    ),
    "softmax": (
        *("log_rows", "log_dim", "align_dim", "pow2_dim", "width", "out_width", "cold", "log_byte", "fill", "waves"),
    ),
    "elementwise": (
        *("log_n", "log_read", "log_write", "log_byte", "read_per_write", "byte_per_element", "width", "out_width"),
        *("flop_per_element", "sfu_per_element", "layout", "align_n", "moving", "reducing", "cold", "fill"),
        *("widest", "masked", "rounds", "extent_rows", "extent_columns", "align_columns", "run"),
    ),
}
FEATURES["layernorm"] = FEATURES["rmsnorm"] = FEATURES["softmax"]
COMMON = ("ideal_compute", "ideal_l2", "ideal_dram", "ideal_bound", "ideal_between", "steps")


@dataclass(frozen=True)
class Sample:
    """Kernels, measured over scaffold of each, and further features."""

    kernels: Kernels
    ratio: Array
    more: Mapping[str, Array] = field(default_factory=dict)
    again: bool = False  # its rows are in other samples too
    sure: Array | None = None  # how well each ratio is known, above 0 to 1; None: all alike

    def of(self, families: Sequence[str], names: Sequence[str]) -> tuple[dict[str, Array], Array, Array]:
        """Columns ``names``, target and how well it is known, of some families; a column that is not here is zero."""
        at = np.flatnonzero(np.isin(self.kernels.work.learner, families))
        known = {**self.kernels.work.features, **self.more}
        nothing = np.zeros(len(at))
        sure = np.ones(len(at)) if self.sure is None else self.sure[at]
        return {n: known[n][at] if n in known else nothing for n in names}, np.log(self.ratio[at]), sure


def fit_residuals(
    samples: Sequence[Sample],
    *,
    pools: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    seed: int = 0,
    trees: int = 150,
    leaves: int = 12,
    rate: float = 0.12,
    hold_in: bool = True,
) -> dict[str, Learned]:
    """What is left of log(measured over scaffold), by learner; factors are held within the range seen.

    ``pools``: further families whose rows a family learns from, alike in features. A row may be in several samples.
    ``hold_in``: the process sees outliers of products and convolutions drawn in.
    """
    found = {}
    for family in dict.fromkeys(name for sample in samples for name in sample.kernels.work.learner):
        pool = pools.get(family, (family,))
        names = tuple(
            dict.fromkeys(
                name for s in samples for other in pool for name in (*feature_names(other, s.kernels), *s.more)
            )
        )
        parts = [sample.of(pool, names) for sample in samples]
        columns = {name: np.concatenate([part[name] for part, *_ in parts]) for name in names}
        target, sure = (np.concatenate([part[place] for part in parts]) for place in (1, 2))
        if len(target) < LEAST_FOR_PROCESS:
            continue  # too few to learn from: the scaffold's word stands
        grown = trees and len(target) >= LEAST_FOR_TREES
        again = any(sample.again and len(part[1]) for sample, part in zip(samples, parts, strict=True))
        # |predicted / measured - 1| is what is scored: a row far above the scaffold weighs less than one below it
        weight = np.exp(np.clip(np.median(target) - target, -1.0, 1.0)) * sure
        found[family] = Learned(
            fit_forest(
                columns,
                target,
                weight,
                trees=trees,
                leaves=leaves,
                least_rows=LEAST_ROWS * (2 if again else 1),
                rate=rate,
                seed=seed,
            )
            if grown
            else None,
            fit_kriging(columns, _held_in(target) if hold_in and family in _RAGGED else target, sure=sure, seed=seed),
            float(target.min()),
            float(target.max()),
        )
    return found


LEAST_FOR_TREES = 40
LEAST_FOR_PROCESS = 8
LEAST_ROWS = 6  # measured rows in a leaf
_RAGGED = ("gemm", "conv2d", "depthwise")  # where a kernel not foreseen leaves a row far off
_OUTLIER = 3.0  # in robust standard deviations: beyond, a row says that it is far, not how far


def _held_in(target: Array) -> Array:
    """Targets with outliers drawn in, for a process that takes errors as Gaussian."""
    middle = np.median(target)
    spread = max(1.4826 * float(np.median(np.abs(target - middle))), 1e-3)
    return np.asarray(np.clip(target, middle - _OUTLIER * spread, middle + _OUTLIER * spread))


def feature_names(family: str, kernels: Kernels) -> tuple[str, ...]:
    """Columns a family's residual sees: its shape, the scaffold's ideal terms, its group."""
    groups = sorted({g for g in kernels.work.group if learner_of(g) == family})
    return (*FEATURES[family], *COMMON, *(f"is {group}" for group in groups))
