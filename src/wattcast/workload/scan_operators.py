"""Operators of layers that carry a state along a sequence instead of attending to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from wattcast.workload.operator_base import (
    Operator,
    OperatorWork,
    register_operator,
)


@register_operator("causal_conv", family="elementwise")
class CausalConv(Operator):
    """Convolve every channel with its own few taps over earlier tokens, and apply an activation."""

    batch: int
    length: int
    channels: int
    kernel: int

    @cached_property
    def work(self) -> OperatorWork:
        values = float(self.batch) * self.length * self.channels
        tokens = self.length
        if self.length == 1:  # a decode moves the last tokens in the cache along
            tokens += self.kernel
        all_tokens = float(self.batch * tokens)
        token_byte = self.dtype.byte * self.channels
        return OperatorWork(
            flop=values * (2.0 * self.kernel + 4.0),
            read_byte=token_byte * (all_tokens + self.kernel),
            write_byte=token_byte * all_tokens,
        )


@register_operator("state_scan", family="gemm")
class StateScan(Operator):
    """Carry a state of ``key_dim`` by ``value_dim`` of each head along a sequence.

    A prompt is cut into chunks of Q tokens. With K = ``key_dim``, V = ``value_dim`` and g key heads
    for h heads, a token of a head costs 2QK·g/h (scores inside the chunk), 2QV (their sum of
    values) and 4KV (into and out of the state) [Dao2024, section 6]. The delta rule solves a
    triangle besides: 2QK·g/h + 2Q(K + V) + 2Q²/3 + 2KV more [Yang2024]. A single token costs 6KV,
    by the delta rule 8KV. ``resumed``: an earlier state is read. ``wide_state``: the state is kept
    in fp32.

    Mamba's first rule decays every value of the state by itself, so that heads are channels (V = 1)
    and tokens follow one another: 7K each, for exp(Δ·A), (Δ·x)·B, the state's a·h + b and the sum
    of C·h [Gu2023, algorithm 2]."""

    form_text: ClassVar[str] = "{op.kind} {op.rule}"
    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rule": ("mamba", "mamba2", "delta", "lightning")
    }
    batch: int
    length: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    rule: str = "mamba2"
    resumed: bool = False
    wide_state: bool = False

    @cached_property
    def work(self) -> OperatorWork:
        k = float(self.key_dim)
        v = float(self.value_dim)
        tokens = float(self.batch) * self.length
        state_value_byte = 4 if self.wide_state else self.dtype.byte
        state_byte = self.batch * self.heads * k * v * state_value_byte  # of all sequences
        heads_values = self.heads * self.value_dim
        keys_and_queries = 2 * self.key_heads * self.key_dim
        token_values = heads_values + keys_and_queries + 2 * self.heads
        read_byte = self.dtype.byte * tokens * token_values
        if self.resumed:
            read_byte += state_byte
        return OperatorWork(
            flop=tokens * self.heads * self._token_flop,
            read_byte=read_byte,
            write_byte=self.dtype.byte * tokens * self.heads * v + state_byte,
            sfu_op=tokens * self.heads * (k if self.rule == "mamba" else 1.0),
        )

    @property
    def _token_flop(self) -> float:
        """Operations of one token in one head."""
        k = float(self.key_dim)
        v = float(self.value_dim)
        chunk = float(self.chunk)
        is_delta = self.rule == "delta"
        if self.rule == "mamba":
            return 7.0 * k * v
        if self.length == 1:
            return (8.0 if is_delta else 6.0) * k * v
        scores = 2.0 * chunk * k * self.key_heads / self.heads
        flop = scores + 2.0 * chunk * v + 4.0 * k * v
        if is_delta:
            triangle = 2.0 * chunk * (k + v) + 2.0 * chunk * chunk / 3.0
            flop += scores + triangle + 2.0 * k * v
        return flop
