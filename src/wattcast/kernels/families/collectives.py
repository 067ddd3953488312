"""Collectives: bytes over links, and the SMs that copy and poll.

``predictor/link_laws.py`` has their time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_table import (
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    resident_share,
)
from wattcast.workload.operator_types import Collective


class CollectiveCoefficients(Coefficients):
    """What a collective occupies."""

    copying_sms: float  # of a GPU with fast links, whatever the size
    fused_exchange_byte: float  # of the largest all-reduce that TensorRT-LLM fuses with a norm


COLLECTIVES = load_coefficients("collective_kernels", CollectiveCoefficients)
COPYING_SMS = COLLECTIVES.copying_sms


def sent_byte(op: Collective) -> float:
    """Return the bytes each GPU sends [Thakur2005].

    They are 2·S·(n-1)/n in an all-reduce, S in a send, else S·(n-1)/n.

    >>> sent_byte(Collective("all_reduce", 800, 8))
    1400.0
    """
    if op.collective == "send":
        return float(op.bytes)
    share = op.bytes * (op.gpus - 1) / op.gpus
    return 2.0 * share if op.collective == "all_reduce" else share


def collective_work(
    ops: Sequence[Collective],
    conditions: ConditionColumns,
    rate: Array,
    reference: ReferenceChip,
) -> FamilyColumns:
    """Return the work of a kernel for each collective: SMs that copy, and bytes through L2 and
    DRAM.

    Its time hides behind the links, and its launch is part of theirs.
    """
    one = np.ones(len(ops))
    byte = np.array([sent_byte(op) for op in ops])
    buffer_byte = np.array([float(op.bytes) for op in ops])
    missing = 1.0 - resident_share(buffer_byte, reference.l2_byte)
    work = {
        "units": COPYING_SMS * one,
        "slots": one,
        "l2_byte": 2.0 * byte,
        "dram_read_byte": byte * missing,
        "dram_write_byte": byte * missing,
    }
    return FamilyColumns(
        ["collective"] * len(ops),
        work,
        {},
        {},
        {},
    )


register_kernels(Collective, mapping=KernelMapping(collective_work, link_traffic=sent_byte))
