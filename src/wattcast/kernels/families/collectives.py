"""Collectives: bytes over links and messages in sequence, by the ring algorithms NCCL uses.

Unverified: no multi-GPU run has been measured yet, and the predictions say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattcast.core.arrays import Array
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_table import ConditionColumns, FamilyColumns, ReferenceChip
from wattcast.workload.operator_types import Collective


def ring_traffic(op: Collective) -> tuple[float, float]:
    """Return the bytes each GPU sends and the number of messages in sequence.

    Ring algorithms over p GPUs on a buffer of S bytes [Thakur2005]: all-reduce sends 2·S·(p-1)/p in 2·(p-1) steps;
    all-gather, reduce-scatter and all-to-all send S·(p-1)/p in p-1 steps (S is the whole buffer); a send moves S in
    one. Libraries take trees instead of rings for small messages, which take fewer steps.

    >>> ring_traffic(Collective("all_reduce", 800, 8))
    (1400.0, 14.0)
    """
    size, gpus = float(op.bytes), op.gpus
    if op.collective == "send":
        return size, 1.0
    share = size * (gpus - 1) / gpus
    steps = float(gpus - 1)
    return (2.0 * share, 2.0 * steps) if op.collective == "all_reduce" else (share, steps)


def collective_work(
    ops: Sequence[Collective], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return one launch for each collective: what it does on the chip hides behind the links."""
    one = np.ones(len(ops))
    return FamilyColumns(["collective"] * len(ops), {"launches": one, "slots": one}, {}, {}, {})


register_kernels(Collective, mapping=KernelMapping(collective_work, link_traffic=ring_traffic))
