"""The registry of kernels: which function turns operators of a class into kernels.

There is one file a family of kernels, which registers its operators when it is imported.
``load_families`` imports those of frameworks. Those of inference engines, in ``engine``, are
imported when the first operator of an engine appears.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.core.measured_calls import CallBuilder, register_measured_call
from wattcast.kernels.kernel_table import (
    Columns,
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
)
from wattcast.workload.operator_base import Operator

# (operators, their conditions, FLOP per cycle and SM of the pipe of each, the reference chip)
# -> columns of all
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


MappingChoice: TypeAlias = Callable[[Any], KernelMapping]

_MAPPINGS: dict[type[Operator], KernelMapping | MappingChoice] = {}


def register_kernels(
    *operators: type[Operator],
    mapping: KernelMapping | MappingChoice,
    measured_call: CallBuilder | None = None,
) -> None:
    """Register how operators of some classes become kernels.

    Where operators of one class become different kernels, ``mapping`` is a function that says
    which. ``measured_call`` is how the measuring campaign calls them in PyTorch.
    """
    for operator in operators:
        _MAPPINGS[operator] = mapping
        if measured_call is not None:
            register_measured_call(operator.kind, measured_call)


def kernel_mapping(op: Operator) -> KernelMapping:
    """Return how an operator becomes kernels."""
    if op.__class__ not in _MAPPINGS:
        _import_files(f"{__name__}.engine")
    if op.__class__ not in _MAPPINGS:
        raise bad_value(
            op.name, "an operator that a file of kernels/families registers", op.__class__.__name__
        )
    mapping = _MAPPINGS[op.__class__]
    if isinstance(mapping, KernelMapping):
        return mapping
    return mapping(op)


def load_families() -> None:
    """Import the families of frameworks, so that their operators are registered."""
    _import_files(__name__)


def _import_files(package: str) -> None:
    """Import all files of a package, but not its subpackages."""
    for module in pkgutil.iter_modules(import_module(package).__path__, f"{package}."):
        if not module.ispkg:
            import_module(module.name)
