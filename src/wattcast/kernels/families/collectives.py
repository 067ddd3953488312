"""Collectives: bytes over links, and the SMs that copy and poll; ``predictor/link_laws.py`` has
their time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattcast.core.arrays import Array
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_table import (
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    resident_share,
)
from wattcast.workload.operator_types import Collective

# SMs that a collective occupies on a GPU with fast links, whatever its size: the number DeepEP's
# public benchmarks settle on (pplx-kernels issue 10: "SMs 24"). NCCL takes fewer for small buffers;
# nobody measured
# their power here.
COPYING_SMS = 24.0


def sent_byte(op: Collective) -> float:
    """Return the bytes each GPU sends: 2·S·(n-1)/n in an all-reduce, S in a send, else S·(n-1)/n
    [Thakur2005].

    >>> sent_byte(Collective("all_reduce", 800, 8))
    1400.0
    """
    if op.collective == "send":
        return float(op.bytes)
    share = op.bytes * (op.gpus - 1) / op.gpus
    return 2.0 * share if op.collective == "all_reduce" else share


def collective_work(
    ops: Sequence[Collective], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return the work of one kernel for each collective: SMs that copy, bytes sent and received
    through L2 and DRAM.

    Its time hides behind the links, and its launch is part of theirs.
    """
    one = np.ones(len(ops))
    byte = np.array([sent_byte(op) for op in ops])
    missing = 1.0 - resident_share(np.array([float(op.bytes) for op in ops]), reference.l2_byte)
    work = {
        "units": COPYING_SMS * one,
        "slots": one,
        "l2_byte": 2.0 * byte,
        "dram_read_byte": byte * missing,
        "dram_write_byte": byte * missing,
    }
    return FamilyColumns(["collective"] * len(ops), work, {}, {}, {})


register_kernels(Collective, mapping=KernelMapping(collective_work, link_traffic=sent_byte))
