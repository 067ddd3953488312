"""Whisper: an encoder over half a minute of sound and a decoder that looks at it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wattcast.dtypes import Dtype
from wattcast.workload import encoder, layers, masks, products
from wattcast.workload.convolutions import conv1d
from wattcast.workload.functional import activation, dropout, fill
from wattcast.workload.options import Head
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


@dataclass(frozen=True)
class WhisperDims:
    """Published dimensions."""

    encoder_layers: int
    decoder_layers: int
    hidden: int
    heads: int
    intermediate: int
    mel_bins: int
    vocab: int
    frames: int = 1500  # thirty seconds after the stride-2 convolution
    max_positions: int = 448
    activation: str = "gelu"
    dropout: float = 0.0

    @property
    def dim(self) -> int:
        return self.hidden // self.heads


def trace(dims: WhisperDims, run: Run, stages: int = 1) -> Program:
    """The encoder once (not in decode, where its keys and values are cached) and the decoder's new tokens."""
    program = Program(run.training, run.tf32)
    sound: list[Tensor] = []
    if not run.past:
        sound = program.section("encoder.embedding", lambda tape: listen(dims, run, tape))
        repeat = -(-dims.encoder_layers // stages)
        sound = program.section("encoder.layers", lambda tape, x: encoder_layer(dims, run, x), *sound, repeat=repeat)
        sound = program.section("encoder.norm", lambda tape, x: layers.layer_norm(run, x), *sound)
    x, *mask = program.section("decoder.embedding", lambda tape: embedding(dims, run, tape))

    def body(tape: Tape, x: Tensor, *rest: Tensor) -> Tensor:
        return decoder_layer(dims, run, x, sound, *rest)

    (x,) = program.section("decoder.layers", body, x, *mask, *sound, repeat=-(-dims.decoder_layers // stages))
    program.section("head", lambda tape, x: head(dims, run, x), x)
    return program


def listen(dims: WhisperDims, run: Run, tape: Tape) -> Tensor:
    """Two convolutions over time, the second halving it; positions added."""
    x = tape.empty((run.batch, dims.mel_bins, 2 * dims.frames), run.dtype)
    x = activation("gelu", conv1d(run, x, dims.hidden, 3))
    x = activation("gelu", conv1d(run, x, dims.hidden, 3, stride=2)).permute(0, 2, 1)
    fill(tape, (dims.frames,), Dtype.INT64)
    places = tape.parameter(dims.frames, dims.hidden, dtype=run.dtype)
    return dropout(x + products.embedding(places, (dims.frames,)), dims.dropout)


def encoder_layer(dims: WhisperDims, run: Run, x: Tensor) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x)); keys have no bias."""
    with x.tape.at("attention"):
        normed = layers.layer_norm(run, x)
        x = x + dropout(attention(dims, run, normed, normed, causal=False), dims.dropout)
    return _mlp(dims, run, x)


def _mlp(dims: WhisperDims, run: Run, x: Tensor) -> Tensor:
    with x.tape.at("mlp"):
        out = encoder.feed_forward(run, layers.layer_norm(run, x), dims.intermediate, dims.activation)
        return x + dropout(out, dims.dropout)


def attention(
    dims: WhisperDims, run: Run, x: Tensor, source: Tensor | None, *, causal: bool, mask: Tensor | None = None,
    cached: bool = False,
) -> Tensor:  # fmt: skip
    """Queries from ``x``; keys and values from ``source``, or already cached where it is None."""
    width = dims.hidden // run.tp
    x = products.enter_parallel(x, run.tp)
    q = layers.split_heads(layers.project(run, x, width, bias=True) * 0.125, dims.dim).contiguous()
    if source is None:
        k, v = (x.tape.empty((run.batch, width // dims.dim, dims.frames, dims.dim), run.dtype) for _ in range(2))
        x.tape.cache_byte += 2 * k.byte
    else:
        source = products.enter_parallel(source, run.tp) if source is not x else x
        k, v = (
            layers.split_heads(layers.project(run, source, width, bias=bias), dims.dim).contiguous()
            for bias in (False, True)
        )
        if cached:
            here = run if causal else replace(run, past=0)
            k, v = layers.append_cache(here, k), layers.append_cache(here, v)
    out = layers.attend(run, q, k, v, causal=causal, mask=mask)
    return products.leave_parallel(layers.project(run, out, dims.hidden, bias=True), run.tp)


def embedding(dims: WhisperDims, run: Run, tape: Tape) -> list[Tensor]:
    """Token and position rows; the mask where one is needed."""
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    masks.positions(tape, run)
    repeated = tape.empty((1, run.length), Dtype.INT64).expand(run.batch, run.length)
    repeated.clone()
    x = x + layers.embed(run, tape, dims.max_positions, dims.hidden)
    return [dropout(x, dims.dropout), *([masks.causal(tape, run)] if masks.needs_mask(run) else [])]


def decoder_layer(dims: WhisperDims, run: Run, x: Tensor, sound: list[Tensor], *rest: Tensor) -> Tensor:
    """Self attention over the tokens, attention over the sound, feed-forward."""
    mask = rest[0] if masks.needs_mask(run) else None
    heard = rest[-1] if sound else None
    with x.tape.at("attention"):
        normed = layers.layer_norm(run, x)
        x = x + dropout(attention(dims, run, normed, normed, causal=True, mask=mask, cached=True), dims.dropout)
    with x.tape.at("cross"):
        normed = layers.layer_norm(run, x)
        x = x + dropout(attention(dims, run, normed, heard, causal=False, cached=True), dims.dropout)
    return _mlp(dims, run, x)


def head(dims: WhisperDims, run: Run, x: Tensor) -> Tensor:
    """Final norm and, where asked, the logits."""
    x = layers.layer_norm(run, x)
    return x if run.head is Head.NONE else layers.language_head(run, x, dims.vocab, tied=True)
