"""What operators take among others beyond runs of each by itself: others have been at the caches in between.

A burst repeats one operator, so its code, parameters and small operands stay in L2. In a workload a layer's weights
pass before the same operator comes again. With M the share of L2's content that they push out
(:func:`wattcast.kernels.work.kept`), w the share of its operands that a burst keeps there, and B their bytes,

    extra_s = M·w·(λ_o + λ_b·B)

for each run. Products, convolutions and attention take their weights and caches from device memory in bursts too, so
w = 0. One operator by itself moves nothing out that it needs, so M·w = 0 and it costs what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.kernels import Kernels
from wattcast.kernels.work import kept

_STREAMED = frozenset({"gemm", "conv2d", "attention", "collective"})  # families that no burst keeps in L2


@dataclass(frozen=True)
class Cold:
    """Seconds more of an operator met cold, and of each byte that it would have found in L2; from so many layers."""

    operator_s: float
    s_per_byte: float
    layers: int = 0

    def __post_init__(self) -> None:
        if not (self.operator_s >= 0.0 and self.s_per_byte >= 0.0):
            raise bad_value("cold", "seconds of zero or more", (self.operator_s, self.s_per_byte))

    def extra_s(self, kernels: Kernels, l2_byte: float) -> Array:
        """Seconds that one run of each kernel takes more among the others, ``(kernel,)``."""
        operators, byte = terms(kernels, l2_byte)
        return np.asarray(self.operator_s * operators + self.s_per_byte * byte)


def terms(kernels: Kernels, l2_byte: float) -> Array:
    """M·w and M·w·B of one run of each kernel, ``(2, kernel)``: what λ_o and λ_b multiply."""
    work = kernels.work
    once = np.array([family not in _STREAMED for family in kernels.family])
    met = once * kept(work.l2_byte, l2_byte) * _pushed_out(kernels, l2_byte)
    return np.array([met, met * work.l2_byte])


def _pushed_out(kernels: Kernels, l2_byte: float) -> Array:
    """M of each kernel, a mean over its runs: a block that repeats sees its own bytes pass, others the workload's."""
    work, segments = kernels.work, kernels.segments
    passed = work.dram_read_byte + work.dram_write_byte + work.between_dram_byte
    each = np.array([passed.take(segment.rows) @ segment.counts for segment in segments])
    repeats = np.array([segment.repeat for segment in segments], np.float64)
    share = 1.0 - kept(np.where(repeats > 1.0, each, each @ repeats), l2_byte)
    return np.asarray(kernels.added_up(share.tolist()) / np.maximum(kernels.calls, 1.0))
