"""Add the time that an operator takes inside a model, where its operands are not in cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array, map_distinct
from wattcast.kernels import Kernels
from wattcast.kernels.kernel_table import streamed_share

# families that no burst keeps in L2
_STREAMED = frozenset({"gemm", "conv2d", "attention", "collective"})


@dataclass(frozen=True)
class ColdCacheDelay:
    """Extra time of an operator inside a model, where other operators have pushed its operands out
    of L2.

    Δt = λ_o·M·w + λ_b·M·w·B for an operator of B bytes, of which a share w would stay in L2 if it
    ran alone again and again, and M is the share of L2 that others overwrite between two runs.
    Fitted to measured layers; products, convolutions and attention stream their operands and have
    no such time.
    """

    operator_s: float  # λ_o
    s_per_byte: float  # λ_b
    layers: int = 0  # that it was fitted to

    def __post_init__(self) -> None:
        if not (self.operator_s >= 0.0 and self.s_per_byte >= 0.0):
            raise bad_value("cold", "seconds of zero or more", (self.operator_s, self.s_per_byte))

    def extra_s(
        self,
        kernels: Kernels,
        l2_byte: float,
    ) -> Array:
        """Return the extra seconds of one run of each kernel, ``(kernel,)``."""
        operators, byte = cold_cache_terms(kernels, l2_byte)
        return np.asarray(self.operator_s * operators + self.s_per_byte * byte)


def cold_cache_terms(kernels: Kernels, l2_byte: float) -> Array:
    """Return M·w and M·w·B of one run of each kernel, ``(2, kernel)``, which λ_o and λ_b multiply.

    M is a mean over the runs of a kernel. Between two runs of a kernel in a block that repeats pass
    the bytes of that block; between two runs of any other kernel pass the bytes of all blocks.
    """
    work = kernels.work
    segments = kernels.segments
    kernel_byte = work.dram_read_byte + work.dram_write_byte + work.between_dram_byte
    block_byte = np.array([kernel_byte.take(block.rows) @ block.counts for block in segments])
    repeats = np.array([block.repeat for block in segments], np.float64)
    passed_byte = np.where(repeats > 1.0, block_byte, block_byte @ repeats)

    overwritten = 1.0 - streamed_share(passed_byte, l2_byte)
    overwritten_mean = kernels.sum_over_runs(overwritten.tolist()) / np.maximum(kernels.calls, 1.0)
    is_cached = ~map_distinct(_STREAMED.__contains__, kernels.family)
    cold_share = is_cached * streamed_share(work.l2_byte, l2_byte) * overwritten_mean
    return np.array([cold_share, cold_share * work.l2_byte])
