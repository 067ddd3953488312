"""One denoising step of latent diffusion: the U-Net of Stable Diffusion, and the diffusion transformer (DiT)."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.dtypes import Dtype
from wattcast.workload import encoder, layers, products
from wattcast.workload.convolutions import conv, group_norm, upsample
from wattcast.workload.functional import activation, cat, fill
from wattcast.workload.pointwise import pointwise
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


@dataclass(frozen=True)
class UnetDims:
    """Published dimensions of a U-Net with cross attention to a text."""

    widths: tuple[int, ...]
    blocks: int  # residual blocks a level on the way down; one more on the way up
    heads: int
    text_hidden: int
    attention: tuple[bool, ...]  # whether each level attends
    text_length: int = 77
    channels: int = 4
    image: int = 64  # latent pixels


def trace_unet(dims: UnetDims, run: Run, stages: int = 1) -> Program:
    """Noise of every latent pixel, from the latent, the time and the text."""
    program = Program(run.training, run.tf32)
    program.section("unet", lambda tape: unet(dims, run, tape))
    return program


def unet(dims: UnetDims, run: Run, tape: Tape) -> Tensor:
    """Down through the levels, across the middle, up again beside what was kept on the way down."""
    time = _time(run, tape, dims.widths[0], 4 * dims.widths[0])
    text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
    latent = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
    x = conv(run, latent, dims.widths[0], 3, bias=True)
    kept = [x]
    for level, width in enumerate(dims.widths):
        with tape.at(f"down{level}"):
            for _ in range(dims.blocks):
                x = residual(run, x, time, width)
                x = spatial_transformer(dims, run, x, text) if dims.attention[level] else x
                kept.append(x)
            if level < len(dims.widths) - 1:
                x = conv(run, x, width, 3, stride=2, bias=True)
                kept.append(x)
    with tape.at("middle"):
        x = residual(run, x, time, x.shape[1])
        x = residual(run, spatial_transformer(dims, run, x, text), time, x.shape[1])
    for level in reversed(range(len(dims.widths))):
        with tape.at(f"up{level}"):
            for _ in range(dims.blocks + 1):
                x = residual(run, cat([x, kept.pop()], 1), time, dims.widths[level])
                x = spatial_transformer(dims, run, x, text) if dims.attention[level] else x
            if level:
                x = conv(run, upsample(x), x.shape[1], 3, bias=True)
    x = activation("silu", group_norm(run, x))
    return conv(run, x, dims.channels, 3, bias=True)


def _time(run: Run, tape: Tape, width: int, wide: int) -> Tensor:
    """The step number as sines and cosines through two layers."""
    with tape.at("time"):
        rates = pointwise("exp", pointwise("scale", fill(tape, (width // 2,), Dtype.FP32)))
        angle = pointwise("mul", tape.empty((run.batch, 1), Dtype.FP32), rates)
        waves = cat([pointwise("sin", angle), pointwise("cos", angle)], -1).to(run.dtype)
        x = activation("silu", layers.project(run, waves, wide, bias=True))
        return layers.project(run, x, wide, bias=True)


def residual(run: Run, x: Tensor, time: Tensor, width: int) -> Tensor:
    """Norm, SiLU, 3x3 convolution, twice, with the time added between; a 1x1 where the width changes."""
    with x.tape.at("residual"):
        y = conv(run, activation("silu", group_norm(run, x)), width, 3, bias=True)
        shift = layers.project(run, activation("silu", time), width, bias=True)
        y = y + shift.view(run.batch, width, 1, 1)
        y = conv(run, activation("silu", group_norm(run, y)), width, 3, bias=True)
        return (x if x.shape[1] == width else conv(run, x, width, 1, bias=True)) + y


def spatial_transformer(dims: UnetDims, run: Run, x: Tensor, text: Tensor) -> Tensor:
    """Pixels attend to one another and to the text, then a gated feed-forward layer."""
    n, c, h, w = x.shape
    with x.tape.at("transformer"):
        y = conv(run, group_norm(run, x), c, 1, bias=True)
        y = y.permute(0, 2, 3, 1).reshape(n, h * w, c)
        normed = layers.layer_norm(run, y)
        y = cross_attention(dims, run, normed, normed) + y
        y = cross_attention(dims, run, layers.layer_norm(run, y), text) + y
        wide = layers.project(run, layers.layer_norm(run, y), 8 * c, bias=True)
        value, gate = wide.split(4 * c, 4 * c)
        y = layers.project(run, value * activation("gelu", gate), c, bias=True) + y
        y = y.reshape(n, h, w, c).permute(0, 3, 1, 2).contiguous()
        return conv(run, y, c, 1, bias=True) + x


def cross_attention(dims: UnetDims, run: Run, x: Tensor, source: Tensor) -> Tensor:
    """Queries from ``x``, keys and values from ``source``; only the output has a bias."""
    width = x.shape[-1]
    dim = width // dims.heads
    q, k, v = (layers.split_heads(layers.project(run, t, width), dim) for t in (x, source, source))
    out = layers.attend(run, q, k, v, causal=False)
    return layers.project(run, out, width, bias=True)


@dataclass(frozen=True)
class DitDims:
    """Published dimensions of a diffusion transformer with adaptive layer norm."""

    layers: int
    hidden: int
    heads: int
    patch: int
    channels: int = 4
    classes: int = 1000
    mlp_ratio: float = 4.0
    image: int = 32  # latent pixels


def trace_dit(dims: DitDims, run: Run, stages: int = 1) -> Program:
    """Noise and variance of every latent pixel, from the latent, the time and the class."""
    program = Program(run.training, run.tf32)
    x, signal = program.section("embedding", lambda tape: dit_embedding(dims, run, tape))

    def body(tape: Tape, x: Tensor, signal: Tensor) -> Tensor:
        return dit_layer(dims, run, x, signal)

    (x,) = program.section("layers", body, x, signal, repeat=-(-dims.layers // stages))
    program.section("head", lambda tape, x, c: dit_head(dims, run, x, c), x, signal)
    return program


def dit_embedding(dims: DitDims, run: Run, tape: Tape) -> tuple[Tensor, Tensor]:
    """Patches with positions; time and class added up to one signal."""
    latent = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
    x = conv(run, latent, dims.hidden, dims.patch, stride=dims.patch, padding=0, bias=True)
    side = run.image // dims.patch
    x = x.view(run.batch, dims.hidden, side * side).transpose(1, 2)
    x = x + tape.empty((1, side * side, dims.hidden), run.dtype)  # fixed sines, not learned
    with tape.at("time"):
        waves = cat([tape.empty((run.batch, 128), run.dtype) for _ in range(2)], -1)
        hidden = activation("silu", layers.project(run, waves, dims.hidden, bias=True))
        time = layers.project(run, hidden, dims.hidden, bias=True)
    label = products.embedding(tape.parameter(dims.classes + 1, dims.hidden, dtype=run.dtype), (run.batch,))
    return x, time + label


def dit_layer(dims: DitDims, run: Run, x: Tensor, signal: Tensor) -> Tensor:
    """Attention and feed-forward, each shifted and scaled before and gated after by the signal."""
    control = layers.project(run, activation("silu", signal), 6 * dims.hidden, bias=True)
    parts = [p.unsqueeze(1) for p in control.split(*[dims.hidden] * 6)]
    with x.tape.at("attention"):
        fused = layers.project(run, modulate(x, parts[0], parts[1]), 3 * dims.hidden, bias=True)
        dim = dims.hidden // dims.heads
        q, k, v = (layers.split_heads(p, dim) for p in fused.split(*[dims.hidden] * 3))
        out = layers.attend(run, q, k, v, causal=False)
        x = x + parts[2] * layers.project(run, out, dims.hidden, bias=True)
    with x.tape.at("mlp"):
        width = int(dims.hidden * dims.mlp_ratio)
        out = encoder.feed_forward(run, modulate(x, parts[3], parts[4]), width, "gelu_tanh")
        return x + parts[5] * out


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """norm(x)·(1 + scale) + shift, the norm without weights."""
    return products.layer_norm(x, None, None) * (scale + 1.0) + shift


def dit_head(dims: DitDims, run: Run, x: Tensor, signal: Tensor) -> Tensor:
    """A last modulated norm, a projection to pixels, and patches put back in place."""
    control = layers.project(run, activation("silu", signal), 2 * dims.hidden, bias=True)
    shift, scale = (p.unsqueeze(1) for p in control.split(dims.hidden, dims.hidden))
    pixels = dims.patch * dims.patch * 2 * dims.channels
    x = layers.project(run, modulate(x, shift, scale), pixels, bias=True)
    return x.clone()
