"""One pass as a template sees it: every default resolved."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.dtypes import Dtype
from wattcast.workload.options import AttentionMode, Head, Stack


@dataclass(frozen=True)
class Run:
    """One pass as a template sees it: every default resolved."""

    batch: int
    length: int  # new tokens a sequence
    past: int = 0  # tokens a sequence already has in the cache
    cached: bool = True  # keys and values are kept for later
    dtype: Dtype = Dtype.BF16  # of activations
    weight_dtype: Dtype = Dtype.BF16  # of the weights of linear layers
    attention: AttentionMode = AttentionMode.FLASH
    head: Head = Head.LAST
    stack: Stack = Stack.EAGER
    tp: int = 1
    training: bool = False
    skew: float = 0.0
    image: int = 0
    tf32: bool = False

    @property
    def flash(self) -> bool:
        return self.attention is AttentionMode.FLASH

    @property
    def engine(self) -> bool:
        return self.stack is Stack.ENGINE

    @property
    def context(self) -> int:
        """Keys each new token may look at."""
        return self.past + self.length
