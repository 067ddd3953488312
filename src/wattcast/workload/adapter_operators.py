"""The operator of LoRA adapters in an engine that serves several of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from wattcast.core import bad_value
from wattcast.workload.operator_base import (
    Operator,
    OperatorWork,
    register_operator,
)

_SUM_BYTE = 4.0  # sums between both products are in fp32


@register_operator("engine_lora", family="gemm")
class AdapterProduct(Operator):
    """Add ``(x @ A) @ B`` to the results of a linear layer, with the A and B of each token's
    adapter.

    ``x`` has ``m`` tokens of ``k`` values and the layer ``n`` outputs, which are several layers
    side by side (``slices``: queries, keys and values, or gate and up), each with adapters of its
    own. ``adapters`` is how many the tokens of a step use.
    """

    is_product: ClassVar[bool] = True
    form_text: ClassVar[str] = "{op.kind} of rank {op.rank}"
    form_words: ClassVar[Mapping[str, str]] = {}
    m: int
    n: int
    k: int
    rank: int
    slices: int = 1
    adapters: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapters > self.m:
            raise bad_value(
                "engine_lora.adapters", f"at most one a token ({self.m})", self.adapters
            )

    @property
    def weight_byte(self) -> float:
        """Bytes of the adapters that the tokens use."""
        values = self.rank * (self.k * self.slices + self.n)
        return float(self.adapters) * values * self.dtype.byte

    @cached_property
    def work(self) -> OperatorWork:
        sums_byte = _SUM_BYTE * self.m * self.rank * self.slices
        inputs_byte = float(self.m) * self.k * self.slices * self.dtype.byte
        outputs_byte = float(self.m) * self.n * self.dtype.byte
        return OperatorWork(
            flop=2.0 * self.m * self.rank * (self.k * self.slices + self.n),
            read_byte=self.weight_byte + inputs_byte + outputs_byte + sums_byte,
            write_byte=outputs_byte + sums_byte,
        )
