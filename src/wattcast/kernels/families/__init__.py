"""The registry of kernels: which function turns operators of a class into kernels. One file a
family of kernels.

A file of this package registers its operators when it is imported, and all files are imported by
``load_families``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.core.measured_calls import CallBuilder, register_measured_call
from wattcast.kernels.kernel_table import Columns, ConditionColumns, FamilyColumns, ReferenceChip
from wattcast.workload.operator_base import Operator

# (operators, their conditions, FLOP per cycle and SM of the pipe of each, the reference chip) ->
# columns of all
WorkFunction: TypeAlias = Callable[
    [Sequence[Any], ConditionColumns, Array, ReferenceChip], FamilyColumns
]
# (operators, their conditions) -> names of choosers, sizes b, m, n and k, and shape columns, of all
ChoiceInputs: TypeAlias = Callable[
    [Sequence[Any], ConditionColumns], tuple[Any, tuple[Array, ...], Columns]
]


@dataclass(frozen=True, eq=False)
class KernelMapping:
    """How an operator becomes kernels."""

    work: WorkFunction
    tensor_cores: bool = False  # where the chip has them for the number format; else CUDA cores
    choice_inputs: ChoiceInputs | None = None  # None: the library has one kernel for it
    link_traffic: Callable[[Any], float] | None = None  # bytes sent to other GPUs


_MAPPINGS: dict[type[Operator], KernelMapping | Callable[[Any], KernelMapping]] = {}


def register_kernels(
    *operators: type[Operator],
    mapping: KernelMapping | Callable[[Any], KernelMapping],
    measured_call: CallBuilder | None = None,
) -> None:
    """Register how operators of some classes become kernels, and how the measuring campaign calls
    them in PyTorch.

    Where operators of one class become different kernels, ``mapping`` is a function that says
    which."""
    for operator in operators:
        _MAPPINGS[operator] = mapping
        if measured_call is not None:
            register_measured_call(operator.kind, measured_call)


def kernel_mapping(op: Operator) -> KernelMapping:
    """Return how an operator becomes kernels."""
    if op.__class__ not in _MAPPINGS:
        raise bad_value(
            op.name, "an operator that a file of kernels/families registers", op.__class__.__name__
        )
    found = _MAPPINGS[op.__class__]
    return found if isinstance(found, KernelMapping) else found(op)


def load_families() -> None:
    """Import all files of this package, so that their operators are registered."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
