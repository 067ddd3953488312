"""One call into ATen, PyTorch's library of operators, with its tensors as shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.workload.symbolic import Tensor


@dataclass(frozen=True)
class Call:
    """One ATen call: name without namespace and overload, arguments and results with tensors replaced."""

    name: str
    args: tuple[Any, ...]
    outs: tuple[Tensor, ...]
    tf32: bool = False
    placed: int | None = None  # arguments given by place, before those given by name; None: all

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors given, those inside lists too."""
        return list(_tensors(self.args))

    @property
    def out(self) -> Tensor:
        return self.outs[0]

    def math(self, tensor: Tensor) -> Dtype:
        """The format a product is computed in."""
        return Dtype.TF32 if self.tf32 and tensor.dtype is Dtype.FP32 else tensor.dtype

    @property
    def wide(self) -> Dtype | None:
        return Dtype.FP32 if self.tf32 and self.out.dtype is Dtype.FP32 else None


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
