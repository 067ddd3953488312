"""Models of two kinds of input: CLIP (pictures and texts) and Whisper (sound to text)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wattcast.core.units import Dtype
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.classic_transformers import embed_patches
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.tracing import tensor_functions as functional
from wattcast.workload.tracing.program import PassSettings, Program
from wattcast.workload.tracing.symbolic_tensor import Tape, Tensor, fill, pointwise, unary


@dataclass(frozen=True)
class ClipDims:
    """Published dimensions of CLIP: a picture tower and a text tower."""

    vision_layers: int
    vision_hidden: int
    vision_heads: int
    patch: int
    text_layers: int
    text_hidden: int
    text_heads: int
    shared: int
    vocab: int
    text_length: int = 77
    image: int = 224
    channels: int = 3
    activation: str = "quick_gelu"


def trace_clip(dims: ClipDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace as many texts as pictures, each through its tower, and the similarities of all pairs."""
    program = run.new_program()
    text = replace(run, length=dims.text_length, past=0)

    def embed_picture(tape: Tape) -> Tensor:
        patches = embed_patches(run, tape, dims.channels, dims.vision_hidden, dims.patch, bias=False, looked_up=True)
        return layers.layer_norm(run, patches)

    def vision_layer(tape: Tape, x: Tensor) -> Tensor:
        width = 4 * dims.vision_hidden
        return layers.prenorm_layer(run, x, dims.vision_heads, width, dims.activation, wide_softmax=True)

    def vision_head(tape: Tape, x: Tensor) -> Tensor:
        return layers.project(run, layers.layer_norm(run, x.select(1)), dims.shared)

    def embed_text(tape: Tape) -> list[Tensor]:
        y = layers.embed(text, tape, dims.vocab, dims.text_hidden)
        y = y + layers.embed(text, tape, dims.text_length, dims.text_hidden, batch=1)
        return [y, *layers.build_mask(tape, text)]

    def text_layer(tape: Tape, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return layers.prenorm_layer(
            text, y, dims.text_heads, 4 * dims.text_hidden, dims.activation, causal=True, mask=mask,
            wide_softmax=True,
        )  # fmt: skip

    (x,) = program.section("vision.embedding", embed_picture)
    (x,) = program.section("vision.layers", vision_layer, x, repeat=-(-dims.vision_layers // stages))
    (seen,) = program.section("vision.head", vision_head, x)
    y, *mask = program.section("text.embedding", embed_text)
    (y,) = program.section("text.layers", text_layer, y, *mask, repeat=-(-dims.text_layers // stages))
    program.section("head", lambda tape, y, seen: _compare_towers(dims, text, y, seen), y, seen)
    return program


def _compare_towers(dims: ClipDims, run: PassSettings, y: Tensor, seen: Tensor) -> Tensor:
    """Scale the vectors of texts and pictures to length one and compute all dot products."""
    tape = y.tape
    y = layers.layer_norm(run, y)
    # the end-of-text token is found by comparing all token numbers
    fill(tape, (run.batch,), Dtype.INT64)
    ids = pointwise("cast", tape.empty(y.shape[:2], Dtype.INT64), out_dtype=Dtype.INT32)
    found = pointwise("cast", pointwise("compare", ids, out_dtype=Dtype.BOOL), out_dtype=Dtype.INT32)
    places = tape.empty((run.batch,), Dtype.INT64)
    tape.emit(Elementwise("max", found.numel, dtype=Dtype.INT32, write=places.byte), (found,), (places,))
    last = functional.pick_rows(y.view(-1, dims.text_hidden), run.batch)
    logits = functional.linear(_to_unit_length(layers.project(run, last, dims.shared)), _to_unit_length(seen))
    logits = logits * unary("exp", tape.parameter(1, dtype=run.dtype), lambda g: g * 1.0)
    if not run.training:
        return logits
    return functional.cross_entropy(logits) + functional.cross_entropy(logits.transpose(0, 1).contiguous())


def _to_unit_length(x: Tensor) -> Tensor:
    square = functional.sum_last(functional.power(x, 2))
    return functional.divide(x, unary("sqrt", square, lambda g: pointwise("div", g, square * 2.0)))


@dataclass(frozen=True)
class WhisperDims:
    """Published dimensions of Whisper."""

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
        """Elements of a head."""
        return self.hidden // self.heads


def trace_whisper(dims: WhisperDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace the encoder once (not in decode, where its keys and values are cached) and the decoder's new tokens."""
    program = run.new_program()
    sound: list[Tensor] = []

    def encoder_layer(tape: Tape, x: Tensor) -> Tensor:
        with tape.scope("attention"):
            normed = layers.layer_norm(run, x)
            x = x + _attention(dims, run, normed, normed, causal=False)
        return _feed_forward(dims, run, x)

    if not run.past:
        sound = program.section("encoder.embedding", lambda tape: _embed_sound(dims, run, tape))
        repeat = -(-dims.encoder_layers // stages)
        sound = program.section("encoder.layers", encoder_layer, *sound, repeat=repeat)
        sound = program.section("encoder.norm", lambda tape, x: layers.layer_norm(run, x), *sound)
    x, *mask = program.section("decoder.embedding", lambda tape: _embed_text(dims, run, tape))

    def decoder_layer(tape: Tape, x: Tensor, *given: Tensor) -> Tensor:
        with tape.scope("attention"):
            normed = layers.layer_norm(run, x)
            shown = given[0] if mask else None
            x = x + _attention(dims, run, normed, normed, causal=True, mask=shown, cached=True)
        with tape.scope("cross"):
            heard = given[-1] if sound else None
            x = x + _attention(dims, run, layers.layer_norm(run, x), heard, causal=False, cached=True)
        return _feed_forward(dims, run, x)

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.language_head(run, layers.layer_norm(run, x), dims.vocab, tied=True)

    repeat = -(-dims.decoder_layers // stages)
    (x,) = program.section("decoder.layers", decoder_layer, x, *mask, *sound, repeat=repeat)
    program.section("head", head, x)
    return program


def _embed_sound(dims: WhisperDims, run: PassSettings, tape: Tape) -> Tensor:
    """Convolve twice over time, halving it the second time; add positions."""
    x = tape.empty((run.batch, dims.mel_bins, 2 * dims.frames), run.dtype)
    x = functional.activation("gelu", functional.conv1d(x, dims.hidden, 3))
    x = functional.activation("gelu", functional.conv1d(x, dims.hidden, 3, stride=2)).permute(0, 2, 1)
    fill(tape, (dims.frames,), Dtype.INT64)
    places = tape.parameter(dims.frames, dims.hidden, dtype=run.dtype)
    return functional.dropout(x + functional.embedding(places, (dims.frames,)), dims.dropout)


def _embed_text(dims: WhisperDims, run: PassSettings, tape: Tape) -> list[Tensor]:
    """Add token and position rows; build the mask where one is needed."""
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    layers.build_positions(tape, run)
    tape.empty((1, run.length), Dtype.INT64).expand(run.batch, run.length).clone()
    x = x + layers.embed(run, tape, dims.max_positions, dims.hidden)
    return [functional.dropout(x, dims.dropout), *layers.build_mask(tape, run)]


def _feed_forward(dims: WhisperDims, run: PassSettings, x: Tensor) -> Tensor:
    with x.tape.scope("mlp"):
        out = layers.feed_forward(run, layers.layer_norm(run, x), dims.intermediate, dims.activation)
        return x + functional.dropout(out, dims.dropout)


def _attention(
    dims: WhisperDims, run: PassSettings, x: Tensor, source: Tensor | None, *, causal: bool,
    mask: Tensor | None = None, cached: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with queries from ``x``; keys (without bias) and values come from ``source``, or the cache if None."""
    width = dims.hidden // run.tp
    x = functional.enter_parallel(x, run.tp)
    q = layers.split_heads(layers.project(run, x, width, bias=True) * 0.125, dims.dim).contiguous()
    if source is None:
        k, v = (x.tape.empty((run.batch, width // dims.dim, dims.frames, dims.dim), run.dtype) for _ in range(2))
        x.tape.cache_byte += 2 * k.byte
    else:
        source = functional.enter_parallel(source, run.tp) if source is not x else x
        k, v = (
            layers.split_heads(layers.project(run, source, width, bias=bias), dims.dim).contiguous()
            for bias in (False, True)
        )
        if cached:
            here = run if causal else replace(run, past=0)
            k, v = layers.append_cache(here, k), layers.append_cache(here, v)
    out = layers.attend(run, q, k, v, causal=causal, mask=mask)
    out = functional.leave_parallel(layers.project(run, out, dims.hidden, bias=True), run.tp)
    return functional.dropout(out, dims.dropout)
