"""Register how operators are called in PyTorch, for campaigns that measure them.

An operator beyond those that the campaigns build in registers its call here, beside its definition.
The register needs the standard library alone and costs a prediction nothing: it stands apart from
the rows that campaigns write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

# (torch, take, operator as in workload JSON) -> a function that runs the operator once.
# ``take(dtype, *shape)`` hands out a tensor on the device, filled with the data of the row.
CallBuilder: TypeAlias = Callable[[Any, Callable[..., Any], Mapping[str, Any]], Callable[[], Any]]

_BUILDERS: dict[str, CallBuilder] = {}


def register_measured_call(kind: str, builder: CallBuilder) -> None:
    """Register how the operator called ``kind`` in workload JSON is called in PyTorch."""
    _BUILDERS[kind] = builder


def find_measured_call(kind: str) -> CallBuilder | None:
    """Return the call of the operator ``kind`` in PyTorch, or None where nobody registered it."""
    return _BUILDERS.get(kind)
