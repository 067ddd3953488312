"""Transformers that denoise pictures and attend to a text apart from them: PixArt and HunyuanDiT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.denoisers import (
    add_table,
    embed_vector,
    embed_waves,
    modulate_rows,
    rotate_pairs,
)
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    pointwise,
    reduce,
)


@dataclass(frozen=True)
class PixartDims:
    """Published dimensions of PixArt: a diffusion transformer with one signal for all layers."""

    layers: int
    hidden: int
    heads: int
    text_hidden: int = 4096
    text_length: int = 300
    patch: int = 2
    channels: int = 4
    mlp_ratio: float = 4.0
    image: int = 128  # latent pixels


def trace_pixart(
    dims: PixartDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace noise and variance of every latent pixel, from the latent, the time and the text."""
    hidden = dims.hidden

    def embed(tape: Tape) -> list[Tensor]:
        """Return patches, text, its mask, six signals for every layer, and the time."""
        mask = _mask_padding(run, tape, dims.text_length)
        x = layers.cut_patches(
            run,
            tape,
            dims.channels,
            hidden,
            dims.patch,
        )
        x = x.view(run.batch, hidden, -1).transpose(1, 2)
        x = x + tape.empty((1, x.shape[1], hidden), run.dtype)
        with tape.scope("time"):
            time = embed_waves(run, tape, hidden)
            signal = functional.activation("silu", time)
            signal = layers.project(run, signal, 6 * hidden, bias=True)
        text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
        text = embed_vector(run, text, hidden, "gelu_tanh")
        return [x, text, mask, signal.view(run.batch, 6, hidden), time]

    def layer(
        tape: Tape,
        x: Tensor,
        text: Tensor,
        mask: Tensor,
        signal: Tensor,
    ) -> Tensor:
        parts = add_table(tape, run, signal, 6)
        with tape.scope("attention"):
            normed = modulate_rows(x, parts[0], parts[1])
            x = parts[2] * _attend(run, dims.heads, normed, normed) + x
        with tape.scope("text"):
            x = _attend(run, dims.heads, x, text, mask) + x
        with tape.scope("mlp"):
            normed = modulate_rows(x, parts[3], parts[4])
            width = int(hidden * dims.mlp_ratio)
            return parts[5] * layers.feed_forward(run, normed, width, "gelu_tanh") + x

    def head(
        tape: Tape,
        x: Tensor,
        time: Tensor,
    ) -> Tensor:
        shift, scale = add_table(tape, run, time.unsqueeze(1), 2)
        pixels = dims.patch * dims.patch * 2 * dims.channels
        return layers.project(run, modulate_rows(x, shift, scale), pixels, bias=True).clone()

    x, *conditions, time = program.section("embedding", embed)
    (x,) = program.section(
        "layers",
        layer,
        x,
        *conditions,
        repeat=dims.layers,
    )
    program.section("head", head, x, time)


def _mask_padding(
    run: PassSettings,
    tape: Tape,
    length: int,
) -> Tensor:
    """Return large negative numbers where a text is padding, ``[batch, 1, 1, length]``."""
    mask = tape.empty((run.batch, length), Dtype.INT64).to(run.dtype)
    mask = pointwise("scale", pointwise("shift", mask))
    return mask.view(run.batch, 1, 1, length)


def _attend(
    run: PassSettings,
    heads: int,
    x: Tensor,
    source: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend with queries from ``x``, keys and values from ``source``; the result is scaled by 1,
    as diffusers does.
    """
    width = x.shape[-1]
    parts = [layers.project(run, t, width, bias=True) for t in (x, source, source)]
    q, k, v = [layers.split_heads(part, width // heads) for part in parts]
    bias = None
    if mask is not None:
        bias = mask.expand(run.batch, heads, 1, mask.shape[-1]).contiguous()
    out = layers.attend(
        run,
        q,
        k,
        v,
        causal=False,
        terms=layers.ScoreTerms(bias=bias),
    )
    return layers.project(run, out, width, bias=True) * 1.0


@dataclass(frozen=True)
class HunyuanDitDims:
    """Published dimensions of HunyuanDiT: layers of its second half also take what those of the
    first left.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    text_hidden: int = 1024  # of the first text encoder, and of both together
    text_length: int = 77
    second_hidden: int = 2048  # of the second one
    second_length: int = 256
    pooled: int = 1024
    pool_heads: int = 8
    patch: int = 2
    channels: int = 4
    image: int = 128  # latent pixels

    @property
    def skipped(self) -> int:
        """Layers that take the result of an earlier one as well."""
        return (self.layers - 1) // 2


def trace_hunyuan_dit(
    dims: HunyuanDitDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace noise and variance of every latent pixel, from the latent, the time and two texts."""
    x, *conditions = program.section("embedding", partial(_embed_hunyuan, dims, run))
    layer = partial(_hunyuan_layer, dims, run)
    (x,) = program.section(
        "layers",
        layer,
        x,
        *conditions,
        repeat=dims.layers - dims.skipped,
    )
    (x,) = program.section(
        "skipping layers",
        partial(layer, skips=True),
        x,
        *conditions,
        repeat=dims.skipped,
    )

    def head(
        tape: Tape,
        x: Tensor,
        signal: Tensor,
    ) -> Tensor:
        control = functional.activation("silu", signal.to(Dtype.FP32)).to(run.dtype)
        control = layers.project(run, control, 2 * dims.hidden, bias=True)
        scale, shift = [part.unsqueeze(1) for part in control.split(dims.hidden, dims.hidden)]
        pixels = dims.patch**2 * 2 * dims.channels
        return layers.project(run, modulate_rows(x, shift, scale), pixels, bias=True).clone()

    program.section("head", head, x, conditions[1])


def _embed_hunyuan(
    dims: HunyuanDitDims,
    run: PassSettings,
    tape: Tape,
) -> list[Tensor]:
    """Return patches, both texts in a row, the signal of time and text, and the rotary tables."""
    x = layers.cut_patches(
        run,
        tape,
        dims.channels,
        dims.hidden,
        dims.patch,
    )
    x = x.view(run.batch, dims.hidden, -1).transpose(1, 2)
    second = tape.empty((run.batch, dims.second_length, dims.second_hidden), run.dtype)
    with tape.scope("time"):
        signal = embed_waves(run, tape, dims.hidden)
        with tape.scope("pooler"):
            pooled = _pool_text(dims, run, second)
        signal = signal + _embed_wide(run, pooled, 4 * dims.hidden, dims.hidden)
    with tape.scope("text"):
        second = _embed_wide(run, second, 4 * dims.second_hidden, dims.text_hidden)
        first = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
        text = cat([first, second], 1)
        mask = tape.empty((run.batch, text.shape[1]), Dtype.INT64)
        mask = pointwise("cast", mask, out_dtype=Dtype.BOOL).unsqueeze(2)
        padding = tape.parameter(text.shape[1], dims.text_hidden, dtype=run.dtype)
        text = pointwise("where", text, mask, padding)
    head_dim = dims.hidden // dims.heads
    tables = [tape.empty((x.shape[1], head_dim), Dtype.FP32) for _ in range(2)]
    return [x, text, signal, *tables]


def _embed_wide(
    run: PassSettings,
    x: Tensor,
    width: int,
    out_width: int,
) -> Tensor:
    """Pass a text through two layers with an activation in fp32 between."""
    inner = layers.project(run, x, width, bias=True).to(Dtype.FP32)
    inner = functional.activation("silu", inner).to(run.dtype)
    return layers.project(run, inner, out_width, bias=True)


def _pool_text(
    dims: HunyuanDitDims,
    run: PassSettings,
    text: Tensor,
) -> Tensor:
    """Let the mean of a text attend to all of it and return the result."""
    batch, length, width = text.shape
    tokens = cat([reduce("mean", text, (batch, 1, width), across=True), text], 1)
    places = text.tape.parameter(length + 1, width, dtype=run.dtype)
    tokens = tokens + places
    first = tokens.slice(1, 0, 1)
    q, k, v = [
        layers.split_heads(layers.project(run, part, width, bias=True), width // dims.pool_heads)
        for part in (first, tokens, tokens)
    ]
    out = layers.attend(run, q, k, v, causal=False)
    return layers.project(run, out, dims.pooled, bias=True).view(batch, dims.pooled)


def _hunyuan_layer(
    dims: HunyuanDitDims,
    run: PassSettings,
    tape: Tape,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    skips: bool = False,
) -> Tensor:
    """Attend to the picture, then to the text, then feed forward; norms are computed in fp32."""
    if skips:
        with tape.scope("skip"):
            earlier = tape.empty(x.shape, run.dtype)
            joined = _norm_wide(run, cat([x, earlier], -1))
            x = layers.project(run, joined, dims.hidden, bias=True)
    with tape.scope("attention"):
        shift = functional.activation("silu", signal.to(Dtype.FP32)).to(run.dtype)
        shift = layers.project(run, shift, dims.hidden, bias=True).unsqueeze(1)
        normed = _norm_wide(run, x) + shift
        x = x + _attend_rotated(dims, run, normed, normed, (cos, sin))
    with tape.scope("text"):
        x = x + _attend_rotated(dims, run, _norm_wide(run, x), text, (cos, sin))
    with tape.scope("mlp"):
        normed = _norm_wide(run, x)
        return x + layers.feed_forward(run, normed, dims.intermediate, "gelu_tanh")


def _norm_wide(run: PassSettings, x: Tensor) -> Tensor:
    """Norm rows in fp32, with weights that are widened as well."""
    width = x.shape[-1]
    weights = [x.tape.parameter(width, dtype=run.dtype).to(Dtype.FP32) for _ in range(2)]
    return functional.layer_norm(x.to(Dtype.FP32), *weights).to(run.dtype)


def _attend_rotated(
    dims: HunyuanDitDims,
    run: PassSettings,
    x: Tensor,
    source: Tensor,
    tables: tuple[Tensor, Tensor],
) -> Tensor:
    """Attend with normed heads; queries are rotated, and keys of the picture as well."""
    head_dim = dims.hidden // dims.heads
    parts = [layers.project(run, t, dims.hidden, bias=True) for t in (x, source, source)]
    q, k, v = [layers.split_heads(part, head_dim) for part in parts]
    q = rotate_pairs(layers.layer_norm(run, q), *tables)
    k = layers.layer_norm(run, k)
    if source is x:
        k = rotate_pairs(k, *tables)
    out = layers.attend(run, q, k, v, causal=False)
    return layers.project(run, out, dims.hidden, bias=True) * 1.0
