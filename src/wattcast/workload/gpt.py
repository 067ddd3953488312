"""Decoders with learned positions and layer norm: GPT-2 and OPT."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.dtypes import Dtype
from wattcast.workload import engine, layers, masks, products
from wattcast.workload.functional import dropout, fill
from wattcast.workload.options import Head
from wattcast.workload.pointwise import pointwise
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


@dataclass(frozen=True)
class GptDims:
    """Published dimensions."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    max_positions: int
    style: str = "gpt2"  # or "opt"
    activation: str = "gelu_new"
    tied: bool = True
    dropout: float = 0.1

    @property
    def dim(self) -> int:
        return self.hidden // self.heads

    @property
    def places(self) -> int:
        """Rows of the position table; OPT keeps two more than it has positions."""
        return self.max_positions + (2 if self.style == "opt" else 0)


def trace(dims: GptDims, run: Run, stages: int = 1) -> Program:
    """One pass over ``run.length`` new tokens a sequence."""
    program = Program(run.training, run.tf32)
    hidden, *mask = program.section("embedding", lambda tape: embedding(dims, run, tape))
    repeat = -(-dims.layers // stages)
    (hidden,) = program.section("layers", lambda tape, x, *m: layer(dims, run, x, *m), hidden, *mask, repeat=repeat)
    program.section("head", lambda tape, x: head(dims, run, x), hidden)
    return program


def embedding(dims: GptDims, run: Run, tape: Tape) -> list[Tensor]:
    """Token and position rows added up; the mask that eager attention adds."""
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    if dims.style == "opt":
        positions = _opt_positions(run, tape)
    else:
        masks.positions(tape, run)
        positions = 1
    places = layers.embed(run, tape, dims.places, dims.hidden, batch=positions)
    mask = [masks.causal(tape, run)] if masks.needs_mask(run) else []
    x = x + places
    return [dropout(x, dims.dropout) if dims.style == "gpt2" else x, *mask]


def _opt_positions(run: Run, tape: Tape) -> int:
    """OPT counts its positions from an attention mask of ones: cumulative sum, product, shift."""
    ones = fill(tape, (run.batch, run.context), Dtype.FP32)
    count = pointwise("cumsum", ones)
    place = pointwise("cast", pointwise("shift", pointwise("mul", count, ones)), out_dtype=Dtype.INT64)
    pointwise("shift", place.slice(1, run.past, run.context))
    return run.batch


def layer(dims: GptDims, run: Run, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    if run.engine:
        return engine.gpt_layer(dims, run, x)
    with x.tape.at("attention"):
        x = x + self_attention(dims, run, layers.layer_norm(run, x), mask)
    with x.tape.at("mlp"):
        return x + feed_forward(dims, run, layers.layer_norm(run, x))


def self_attention(dims: GptDims, run: Run, x: Tensor, mask: Tensor | None) -> Tensor:
    """GPT-2 projects q, k and v at once and splits (strided views); OPT one by one and scales q first."""
    x = products.enter_parallel(x, run.tp)
    width = dims.hidden // run.tp
    opt = dims.style == "opt"
    if opt:
        parts = [layers.project(run, x, width, bias=True) for _ in range(3)]
        parts[0] = parts[0] * 0.125
    else:
        parts = list(layers.project(run, x, 3 * width, bias=True, in_major=True).split(width, width, width))
    q, k, v = (layers.split_heads(part, dims.dim) for part in parts)
    k, v = layers.append_cache(run, k), layers.append_cache(run, v)
    out = layers.attend(run, q, k, v, causal=True, mask=mask, wide_softmax=opt, p=0.0 if opt else dims.dropout)
    out = products.leave_parallel(layers.project(run, out, dims.hidden, bias=True, in_major=not opt), run.tp)
    return dropout(out, dims.dropout)


def feed_forward(dims: GptDims, run: Run, x: Tensor) -> Tensor:
    """down(act(up(x)))."""
    x = products.enter_parallel(x, run.tp)
    gpt2 = dims.style == "gpt2"
    inner = layers.project(run, x, dims.intermediate // run.tp, bias=True, in_major=gpt2)
    inner = layers.activate(dims.activation, inner)
    out = products.leave_parallel(layers.project(run, inner, dims.hidden, bias=True, in_major=gpt2), run.tp)
    return dropout(out, dims.dropout)


def head(dims: GptDims, run: Run, x: Tensor) -> Tensor:
    """Final norm and, where asked, the logits."""
    x = layers.layer_norm(run, x)
    return layers.language_head(run, x, dims.vocab, tied=dims.tied) if run.head is not Head.NONE else x
