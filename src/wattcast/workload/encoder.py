"""Encoders: BERT (norm after each half) and the vision transformer (norm before it)."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.dtypes import Dtype
from wattcast.workload import layers, products
from wattcast.workload.functional import activation, dropout
from wattcast.workload.graph import Elementwise
from wattcast.workload.options import Head
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


@dataclass(frozen=True)
class BertDims:
    """Published dimensions."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    max_positions: int
    types: int = 2
    activation: str = "gelu"
    dropout: float = 0.1

    @property
    def dim(self) -> int:
        return self.hidden // self.heads


def trace(dims: BertDims, run: Run, stages: int = 1) -> Program:
    """One pass over whole sequences, and the pooler or the masked-token head."""
    program = Program(run.training, run.tf32)
    (hidden,) = program.section("embedding", lambda tape: embedding(dims, run, tape))
    repeat = -(-dims.layers // stages)
    (hidden,) = program.section("layers", lambda tape, x: layer(dims, run, x), hidden, repeat=repeat)
    program.section("head", lambda tape, x: head(dims, run, x), hidden)
    return program


def embedding(dims: BertDims, run: Run, tape: Tape) -> Tensor:
    """Token, type and position rows added up and normed."""
    index = run.length * Dtype.INT64.byte
    picked = tape.empty((1, run.length), Dtype.INT64)
    tape.emit(Elementwise("gather", run.length, dtype=Dtype.INT64, read=2 * index), (), (picked,))
    x = layers.embed(run, tape, dims.vocab, dims.hidden)
    x = x + layers.embed(run, tape, dims.types, dims.hidden, same=True)
    x = x + layers.embed(run, tape, dims.max_positions, dims.hidden, batch=1)
    return dropout(layers.layer_norm(run, x), dims.dropout)


def layer(dims: BertDims, run: Run, x: Tensor) -> Tensor:
    """norm(x + attention(x)), then norm(x + mlp(x))."""
    with x.tape.at("attention"):
        x = layers.layer_norm(run, self_attention(dims, run, x) + x)
    with x.tape.at("mlp"):
        inner = layers.project(run, products.enter_parallel(x, run.tp), dims.intermediate // run.tp, bias=True)
        inner = activation(dims.activation, inner)
        out = products.leave_parallel(layers.project(run, inner, dims.hidden, bias=True), run.tp)
        return layers.layer_norm(run, dropout(out, dims.dropout) + x)


def self_attention(dims: BertDims, run: Run, x: Tensor) -> Tensor:
    """Attention over the whole sequence, both ways."""
    x = products.enter_parallel(x, run.tp)
    width = dims.hidden // run.tp
    q, k, v = (layers.split_heads(layers.project(run, x, width, bias=True), dims.dim) for _ in range(3))
    out = layers.attend(run, q, k, v, causal=False, p=dims.dropout)
    out = products.leave_parallel(layers.project(run, out, dims.hidden, bias=True), run.tp)
    return dropout(out, dims.dropout)


def head(dims: BertDims, run: Run, x: Tensor) -> Tensor:
    """The pooler over the first token; with a head, the masked-token head over all tokens instead."""
    if run.head is Head.NONE:
        with x.tape.at("pooler"):
            return activation("tanh", layers.project(run, x.select(1), dims.hidden, bias=True))
    with x.tape.at("transform"):
        x = activation(dims.activation, layers.project(run, x, dims.hidden, bias=True))
        x = layers.layer_norm(run, x)
    with x.tape.at("logits"):
        weight = x.tape.parameter(dims.vocab, dims.hidden, dtype=run.dtype, tied=True)
        bias = x.tape.parameter(dims.vocab, dtype=run.dtype)
        logits = products.linear(x, weight, bias)
        return products.cross_entropy(logits.view(-1, dims.vocab)) if run.training else logits
