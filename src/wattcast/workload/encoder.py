"""Encoders: BERT (norm after each half) and the vision transformer (norm before it)."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.dtypes import Dtype
from wattcast.workload import layers, products
from wattcast.workload.convolutions import conv
from wattcast.workload.functional import activation, cat, dropout
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


def trace_bert(dims: BertDims, run: Run, stages: int = 1) -> Program:
    """One pass over whole sequences, and the pooler or the masked-token head."""
    program = Program(run.training, run.tf32)
    (hidden,) = program.section("embedding", lambda tape: bert_embedding(dims, run, tape))
    repeat = -(-dims.layers // stages)
    (hidden,) = program.section("layers", lambda tape, x: bert_layer(dims, run, x), hidden, repeat=repeat)
    program.section("head", lambda tape, x: bert_head(dims, run, x), hidden)
    return program


def bert_embedding(dims: BertDims, run: Run, tape: Tape) -> Tensor:
    """Token, type and position rows added up and normed."""
    index = run.length * Dtype.INT64.byte
    picked = tape.empty((1, run.length), Dtype.INT64)
    tape.emit(Elementwise("gather", run.length, dtype=Dtype.INT64, read=2 * index), (), (picked,))
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    x = x + layers.embed(run, tape, dims.types, dims.hidden, same=True)
    x = x + layers.embed(run, tape, dims.max_positions, dims.hidden, batch=1)
    return dropout(layers.layer_norm(run, x), dims.dropout)


def bert_layer(dims: BertDims, run: Run, x: Tensor) -> Tensor:
    """norm(x + attention(x)), then norm(x + mlp(x))."""
    with x.tape.at("attention"):
        attended = self_attention(run, x, dims.heads, p=dims.dropout)
        x = layers.layer_norm(run, dropout(attended, dims.dropout) + x)
    with x.tape.at("mlp"):
        out = feed_forward(run, x, dims.intermediate, dims.activation)
        return layers.layer_norm(run, dropout(out, dims.dropout) + x)


def bert_head(dims: BertDims, run: Run, x: Tensor) -> Tensor:
    """The pooler over the first token; with a head, the masked-token head over all tokens instead."""
    if run.head is Head.NONE:
        with x.tape.at("pooler"):
            return activation("tanh", layers.project(run, x.select(1), dims.hidden, bias=True))
    with x.tape.at("transform"):
        x = activation(dims.activation, layers.project(run, x, dims.hidden, bias=True))
        x = layers.layer_norm(run, x)
    with x.tape.at("logits"):
        share = -(-dims.vocab // run.tp)
        weight = x.tape.parameter(share, dims.hidden, dtype=run.dtype, tied=True)
        bias = x.tape.parameter(share, dtype=run.dtype)
        logits = products.linear(products.enter_parallel(x, run.tp), weight, bias)
        products.gather_parts(logits, run.tp)
        return products.cross_entropy(logits.view(-1, share)) if run.training else logits


def self_attention(
    run: Run, x: Tensor, heads: int, *, causal: bool = False, mask: Tensor | None = None, p: float = 0.0,
    wide_softmax: bool = False, bias: bool = True,
) -> Tensor:  # fmt: skip
    """Attention with three projections, over the whole sequence (or what came before)."""
    hidden = x.shape[-1]
    x = products.enter_parallel(x, run.tp)
    width, dim = hidden // run.tp, hidden // heads
    q, k, v = (layers.split_heads(layers.project(run, x, width, bias), dim) for _ in range(3))
    out = layers.attend(run, q, k, v, causal=causal, mask=mask, p=p, wide_softmax=wide_softmax)
    return products.leave_parallel(layers.project(run, out, hidden, bias=True), run.tp)


def feed_forward(run: Run, x: Tensor, width: int, function: str) -> Tensor:
    """down(act(up(x)))."""
    hidden = x.shape[-1]
    inner = layers.project(run, products.enter_parallel(x, run.tp), width // run.tp, bias=True)
    inner = layers.activate(function, inner)
    return products.leave_parallel(layers.project(run, inner, hidden, bias=True), run.tp)


def prenorm_layer(
    run: Run, x: Tensor, heads: int, width: int, function: str, *, causal: bool = False, mask: Tensor | None = None,
    wide_softmax: bool = False, p: float = 0.0,
) -> Tensor:  # fmt: skip
    """x + attention(norm(x)), then x + mlp(norm(x)), with layer norms."""
    with x.tape.at("attention"):
        normed = layers.layer_norm(run, x)
        out = self_attention(run, normed, heads, causal=causal, mask=mask, wide_softmax=wide_softmax, p=p)
        x = dropout(out, p) + x
    with x.tape.at("mlp"):
        return dropout(feed_forward(run, layers.layer_norm(run, x), width, function), p) + x


@dataclass(frozen=True)
class VitDims:
    """Published dimensions of a vision transformer."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    image: int = 224
    channels: int = 3
    activation: str = "gelu"
    pooler: bool = True
    classes: int = 0


def trace_vit(dims: VitDims, run: Run, stages: int = 1) -> Program:
    """One pass over ``run.batch`` pictures."""
    program = Program(run.training, run.tf32)
    (x,) = program.section("embedding", lambda tape: patches(run, tape, dims.channels, dims.hidden, dims.patch, True))

    def body(tape: Tape, x: Tensor) -> Tensor:
        return prenorm_layer(run, x, dims.heads, dims.intermediate, dims.activation, wide_softmax=True)

    (x,) = program.section("layers", body, x, repeat=-(-dims.layers // stages))
    program.section("head", lambda tape, x: vit_head(dims, run, x), x)
    return program


def patches(run: Run, tape: Tape, channels: int, hidden: int, patch: int, bias: bool) -> Tensor:
    """A convolution that cuts the picture into patches, a class token before them, positions added."""
    picture = tape.empty((run.batch, channels, run.image, run.image), run.dtype)
    x = conv(run, picture, hidden, patch, stride=patch, padding=0, bias=bias)
    side = run.image // patch
    x = x.view(run.batch, hidden, side * side).transpose(1, 2)
    token = tape.parameter(1, 1, hidden, dtype=run.dtype).expand(run.batch, 1, hidden)
    x = cat([token, x], 1)
    if bias:
        return x + tape.parameter(1, side * side + 1, hidden, dtype=run.dtype)
    places = tape.parameter(side * side + 1, hidden, dtype=run.dtype)
    return x + products.embedding(places, (1, side * side + 1))


def vit_head(dims: VitDims, run: Run, x: Tensor) -> Tensor:
    """Final norm; the pooler over the class token, or a classifier."""
    x = layers.layer_norm(run, x)
    if dims.classes:
        return layers.classify(run, x.select(1), dims.classes)
    if not dims.pooler:
        return x
    return activation("tanh", layers.project(run, x.select(1), dims.hidden, bias=True))
