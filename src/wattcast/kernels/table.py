"""Kernels: what the device will be asked to run, as a struct of arrays.

Equal operators become one row; the issue order keeps how often and when each runs. Work is stated
before any clock is known; ``timeline/`` turns it into cycles and seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array, Scalar
from wattcast.kernels.work import Condition, Work
from wattcast.workload.graph import Operator

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """A stretch of the issue order that runs ``repeat`` times: rows of ``Kernels`` with their counts."""

    rows: Index  # (position,)
    counts: Array  # (position,) how often in a row each is issued
    repeat: int

    @cached_property
    def many(self) -> bool:
        """Whether any kernel is issued several times in a row."""
        return bool((self.counts > 1).any())


@dataclass(frozen=True)
class Kernels:
    """Distinct kernels on the last axis, and the order in which the host issues them."""

    ops: tuple[Operator, ...]  # what each row stands for
    family: tuple[str, ...]  # gemm, conv2d, attention, softmax, layernorm, rmsnorm, elementwise, collective
    pipe_event: tuple[str, ...]  # the event that counts each row's arithmetic, e.g. "tensor_fp16_flop"
    pipe_per_cycle: Scalar  # (*sweep, kernel) arithmetic of one SM per cycle on that pipe
    flop: Array  # (kernel,)
    sfu_op: Array  # (kernel,)
    work: Work  # columns (kernel,)
    link_byte: Array  # (kernel,) bytes that leave the device
    link_hops: Array  # (kernel,) messages in sequence
    segments: tuple[Segment, ...]
    conditions: tuple[Condition, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def memo(self) -> tuple[tuple[Operator, ...], tuple[Condition, ...]]:
        """What the shapes of all rows follow from."""
        return self.ops, self.conditions

    @cached_property
    def calls(self) -> Array:
        """How often each row runs in the whole workload, ``(kernel,)``."""
        total = np.zeros(len(self.ops))
        for segment in self.segments:
            np.add.at(total, segment.rows, segment.counts * segment.repeat)
        return total
