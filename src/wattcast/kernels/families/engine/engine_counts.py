"""Count the work of an engine's operators one by one, each as the kernel that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from wattcast.core.arrays import Array
from wattcast.kernels.families import KernelMapping
from wattcast.kernels.kernel_table import (
    Columns,
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    as_columns,
    resident_share,
)


class EngineWork(NamedTuple):
    """Work of one operator; the fields are columns of ``KernelWork``, which says what they mean."""

    units: float
    unit_flop: float
    steps: float
    launches: float
    l2_byte: float
    shared_byte: float
    dram_read_byte: float
    dram_write_byte: float
    store_byte: float = 0.0
    between_byte: float = 0.0
    slots: float = 1.0
    padded_flop: float = 0.0


class CountedKernel(NamedTuple):
    """The kernel of one operator: its family, its work, and features plain and as logarithms."""

    family: str
    work: EngineWork
    plain: dict[str, float]
    logs: dict[str, float]


class OperatorRun(NamedTuple):
    """How one operator runs: on which chip, and where its operands lie."""

    is_cold: bool  # all operands come from device memory
    is_warm: bool  # none does
    flop_per_cycle: float  # of an SM, on the pipe of the operator
    chip: ReferenceChip

    def missing_share(
        self,
        byte: float,
        streams: bool = False,
    ) -> float:
        """Return the share of a working set that L2 does not hold when the operator starts.

        Weights and caches stream from device memory (``streams``) unless they are warm.
        """
        if self.is_cold or (streams and not self.is_warm):
            return 1.0
        return 1.0 - float(resident_share(byte, self.chip.l2_byte))


KernelCounter = Callable[[Any, OperatorRun], CountedKernel]


def count_each(count: KernelCounter, tensor_cores: bool = True) -> KernelMapping:
    """Return the mapping of operators that ``count`` turns into kernels one by one."""

    @wraps(count)
    def work(
        ops: Sequence[Any],
        conditions: ConditionColumns,
        rate: Array,
        reference: ReferenceChip,
    ) -> FamilyColumns:
        runs = zip(conditions.cold.tolist(), conditions.warm.tolist(), rate.tolist(), strict=True)
        kernels = [
            count(op, OperatorRun(*run, reference)) for op, run in zip(ops, runs, strict=True)
        ]
        table = as_columns([kernel.work for kernel in kernels])
        return FamilyColumns(
            [kernel.family for kernel in kernels],
            dict(zip(EngineWork._fields, table, strict=True)),
            _stack_features([kernel.plain for kernel in kernels]),
            _stack_features([kernel.logs for kernel in kernels]),
            {},
        )

    return KernelMapping(work, tensor_cores=tensor_cores)


def _stack_features(rows: Sequence[dict[str, float]]) -> Columns:
    """Return the features of all operators as columns; all rows have the names of the first."""
    return {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}


def fill_slots(units: float, slots: float) -> float:
    """Return the share of slots that have work, over all waves of units.

    >>> fill_slots(198.0, 132.0)
    0.75
    """
    return units / (slots * ceil(units / slots))
