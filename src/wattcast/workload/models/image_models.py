"""Image models: ResNet, MobileViT, and two denoisers of latent pictures, the U-Net and the diffusion transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wattcast.core.units import Dtype
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.tracing import tensor_functions as functional
from wattcast.workload.tracing.program import PassSettings, Program
from wattcast.workload.tracing.symbolic_tensor import Tape, Tensor, cat, fill, pointwise


@dataclass(frozen=True)
class ResnetDims:
    """Published dimensions of a ResNet of bottleneck blocks."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    stem: int = 64
    channels: int = 3
    classes: int = 1000
    image: int = 224
    reduction: int = 4


def trace_resnet(dims: ResnetDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace one pass over ``run.batch`` pictures."""
    program = run.new_program()

    def stem(tape: Tape) -> Tensor:
        picture = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
        return functional.max_pool(_conv_norm(picture, dims.stem, 7, "relu", stride=2), 3, 2, 1)

    (x,) = program.section("stem", stem)
    for number, (count, width) in enumerate(zip(dims.blocks, dims.widths, strict=True)):
        first = _bottleneck(dims, width, stride=1 if number == 0 else 2, projected=True)
        (x,) = program.section(f"stage{number}.first", first, x)
        (x,) = program.section(f"stage{number}", _bottleneck(dims, width), x, repeat=count - 1)
    program.section("head", lambda tape, x: layers.classify(run, functional.mean_pool(x), dims.classes), x)
    return program


def _bottleneck(
    dims: ResnetDims, width: int, stride: int = 1, projected: bool = False
) -> Callable[[Tape, Tensor], Tensor]:
    """Return a block: 1x1 down, 3x3, 1x1 up, added to the input (projected where the shape changes)."""
    inner = width // dims.reduction

    def block(tape: Tape, x: Tensor) -> Tensor:
        shortcut = _conv_norm(x, width, 1, stride=stride) if projected else x
        y = _conv_norm(x, inner, 1, "relu")
        y = _conv_norm(y, inner, 3, "relu", stride=stride)
        return functional.activation("relu", _conv_norm(y, width, 1) + shortcut)

    return block


def _conv_norm(x: Tensor, filters: int, size: int, function: str = "", *, stride: int = 1, groups: int = 1) -> Tensor:
    """Convolve, norm over the batch, and activate where a function is given."""
    out = functional.batch_norm(functional.conv2d(x, filters, size, stride=stride, groups=groups))
    return functional.activation(function, out) if function else out


@dataclass(frozen=True)
class MobileVitDims:
    """Published dimensions of MobileViT: inverted residuals, then convolution and transformer in turn."""

    stem: int
    widths: tuple[int, ...]  # of the five stages
    hidden: tuple[int, ...]  # of the transformers in the last three
    depths: tuple[int, ...]  # transformer layers in each of them
    last: int  # width before the classifier
    heads: int = 4
    mlp_ratio: float = 2.0
    expand: float = 4.0
    patch: int = 2
    classes: int = 1000
    image: int = 256
    channels: int = 3


def trace_mobilevit(dims: MobileVitDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace one pass over ``run.batch`` pictures."""
    program = run.new_program()

    def whole(tape: Tape) -> Tensor:
        x = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
        x = _conv_norm(x, dims.stem, 3, "silu", stride=2)
        x = _inverted_residual(dims, x, dims.widths[0], 1)
        for step in range(3):
            x = _inverted_residual(dims, x, dims.widths[1], 2 if step == 0 else 1)
        for number, (hidden, depth) in enumerate(zip(dims.hidden, dims.depths, strict=True)):
            with tape.scope(f"stage{number + 2}"):
                x = _inverted_residual(dims, x, dims.widths[number + 2], 2)
                x = _attend_patches(dims, run, x, hidden, depth)
        x = _conv_norm(x, dims.last, 1, "silu")
        return layers.classify(run, functional.mean_pool(x), dims.classes)

    program.section("model", whole)
    return program


def _inverted_residual(dims: MobileVitDims, x: Tensor, width: int, stride: int) -> Tensor:
    """Convolve 1x1 to wider, 3x3 depthwise, 1x1 to narrower; add to the input where the shape stays."""
    wanted = round(x.shape[1] * dims.expand)
    inner = max(8, int(wanted + 4) // 8 * 8)  # the nearest multiple of 8, never a tenth below (as in MobileNet)
    inner = inner + 8 if inner < 0.9 * wanted else inner
    y = _conv_norm(x, inner, 1, "silu")
    y = _conv_norm(y, inner, 3, "silu", stride=stride, groups=inner)
    y = _conv_norm(y, width, 1)
    return x + y if stride == 1 and x.shape[1] == width else y


def _attend_patches(dims: MobileVitDims, run: PassSettings, x: Tensor, hidden: int, depth: int) -> Tensor:
    """Let pixels at the same place of every patch attend to one another; fold the result back and mix it in.

    Unfolding, ``[n, c, h, w]`` -> ``[n·patch², patches, c]``, takes two transposing copies, as Hugging Face does it.
    """
    n, width, h, w = x.shape
    patch, rows, columns = dims.patch, h // dims.patch, w // dims.patch
    y = functional.conv2d(_conv_norm(x, width, 3, "silu"), hidden, 1)
    y = y.reshape(n * hidden * rows, patch, columns, patch).transpose(1, 2)
    y = y.reshape(n, hidden, rows * columns, patch * patch).transpose(1, 3)
    y = y.reshape(n * patch * patch, rows * columns, hidden)
    for _ in range(depth):
        y = layers.prenorm_layer(run, y, dims.heads, int(hidden * dims.mlp_ratio), "silu")
    y = layers.layer_norm(run, y)
    y = y.contiguous().view(n, patch * patch, rows * columns, hidden).transpose(1, 3)
    y = y.reshape(n * hidden * rows, columns, patch, patch).transpose(1, 2)
    y = _conv_norm(y.reshape(n, hidden, h, w), width, 1, "silu")
    return _conv_norm(cat([x, y], 1), width, 3, "silu")


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


def trace_unet(dims: UnetDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace the noise of every latent pixel, from the latent, the time and the text."""
    program = run.new_program()
    program.section("unet", lambda tape: _unet(dims, run, tape))
    return program


def _unet(dims: UnetDims, run: PassSettings, tape: Tape) -> Tensor:
    """Go down through the levels, across the middle, and up again, joined by the tensors kept on the way down."""
    time = _embed_time(run, tape, dims.widths[0])
    text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
    latent = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
    x = functional.conv2d(latent, dims.widths[0], 3, bias=True)
    kept = [x]
    for level, width in enumerate(dims.widths):
        with tape.scope(f"down{level}"):
            for _ in range(dims.blocks):
                x = _residual(run, x, time, width)
                x = _attend_text(dims, run, x, text) if dims.attention[level] else x
                kept.append(x)
            if level < len(dims.widths) - 1:
                x = functional.conv2d(x, width, 3, stride=2, bias=True)
                kept.append(x)
    with tape.scope("middle"):
        x = _residual(run, x, time, x.shape[1])
        x = _residual(run, _attend_text(dims, run, x, text), time, x.shape[1])
    for level in reversed(range(len(dims.widths))):
        with tape.scope(f"up{level}"):
            for _ in range(dims.blocks + 1):
                x = _residual(run, cat([x, kept.pop()], 1), time, dims.widths[level])
                x = _attend_text(dims, run, x, text) if dims.attention[level] else x
            if level:
                x = functional.conv2d(functional.upsample(x), x.shape[1], 3, bias=True)
    return _norm_convolve(x, dims.channels)


def _embed_time(run: PassSettings, tape: Tape, width: int) -> Tensor:
    """Turn the step number into sines and cosines and pass them through two layers."""
    with tape.scope("time"):
        rates = pointwise("exp", pointwise("scale", fill(tape, (width // 2,), Dtype.FP32)))
        angle = pointwise("mul", tape.empty((run.batch, 1), Dtype.FP32), rates)
        waves = cat([pointwise("sin", angle), pointwise("cos", angle)], -1).to(run.dtype)
        x = functional.activation("silu", layers.project(run, waves, 4 * width, bias=True))
        return layers.project(run, x, 4 * width, bias=True)


def _norm_convolve(x: Tensor, width: int) -> Tensor:
    """Norm, apply SiLU and convolve 3x3."""
    return functional.conv2d(functional.activation("silu", functional.group_norm(x)), width, 3, bias=True)


def _residual(run: PassSettings, x: Tensor, time: Tensor, width: int) -> Tensor:
    """Convolve twice with the time added between; the input is added through a 1x1 where the width changes."""
    with x.tape.scope("residual"):
        y = _norm_convolve(x, width)
        shift = layers.project(run, functional.activation("silu", time), width, bias=True)
        y = _norm_convolve(y + shift.view(run.batch, width, 1, 1), width)
        return (x if x.shape[1] == width else functional.conv2d(x, width, 1, bias=True)) + y


def _attend_text(dims: UnetDims, run: PassSettings, x: Tensor, text: Tensor) -> Tensor:
    """Let pixels attend to one another and to the text, then run a gated feed-forward layer."""
    n, c, h, w = x.shape
    with x.tape.scope("transformer"):
        y = functional.conv2d(functional.group_norm(x), c, 1, bias=True)
        y = y.permute(0, 2, 3, 1).reshape(n, h * w, c)
        normed = layers.layer_norm(run, y)
        y = _cross_attention(dims, run, normed, normed) + y
        y = _cross_attention(dims, run, layers.layer_norm(run, y), text) + y
        wide = layers.project(run, layers.layer_norm(run, y), 8 * c, bias=True)
        value, gate = wide.split(4 * c, 4 * c)
        y = layers.project(run, value * functional.activation("gelu", gate), c, bias=True) + y
        y = y.reshape(n, h, w, c).permute(0, 3, 1, 2).contiguous()
        return functional.conv2d(y, c, 1, bias=True) + x


def _cross_attention(dims: UnetDims, run: PassSettings, x: Tensor, source: Tensor) -> Tensor:
    """Attend with queries from ``x``, keys and values from ``source``; only the output has a bias."""
    width = x.shape[-1]
    parts = (layers.project(run, t, width) for t in (x, source, source))
    q, k, v = (layers.split_heads(part, width // dims.heads) for part in parts)
    return layers.project(run, layers.attend(run, q, k, v, causal=False), width, bias=True)


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


def trace_dit(dims: DitDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace noise and variance of every latent pixel, from the latent, the time and the class."""
    program = run.new_program()
    x, signal = program.section("embedding", lambda tape: _embed_dit(dims, run, tape))
    repeat = -(-dims.layers // stages)
    (x,) = program.section("layers", lambda tape, *given: _dit_layer(dims, run, *given), x, signal, repeat=repeat)
    program.section("head", lambda tape, x, signal: _dit_head(dims, run, x, signal), x, signal)
    return program


def _embed_dit(dims: DitDims, run: PassSettings, tape: Tape) -> tuple[Tensor, Tensor]:
    """Return patches with positions, and the sum of time and class as one signal."""
    latent = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
    x = functional.conv2d(latent, dims.hidden, dims.patch, stride=dims.patch, padding=0, bias=True)
    tokens = (run.image // dims.patch) ** 2
    x = x.view(run.batch, dims.hidden, tokens).transpose(1, 2)
    x = x + tape.empty((1, tokens, dims.hidden), run.dtype)  # fixed sines, not learned
    with tape.scope("time"):
        waves = cat([tape.empty((run.batch, 128), run.dtype) for _ in range(2)], -1)
        hidden = functional.activation("silu", layers.project(run, waves, dims.hidden, bias=True))
        time = layers.project(run, hidden, dims.hidden, bias=True)
    label = functional.embedding(tape.parameter(dims.classes + 1, dims.hidden, dtype=run.dtype), (run.batch,))
    return x, time + label


def _dit_layer(dims: DitDims, run: PassSettings, x: Tensor, signal: Tensor) -> Tensor:
    """Attend, then feed forward, each shifted and scaled before and gated after by the signal."""
    parts = _split_signal(dims, run, signal, 6)
    with x.tape.scope("attention"):
        fused = layers.project(run, _modulate(x, parts[0], parts[1]), 3 * dims.hidden, bias=True)
        q, k, v = (layers.split_heads(p, dims.hidden // dims.heads) for p in fused.split(*[dims.hidden] * 3))
        out = layers.attend(run, q, k, v, causal=False)
        x = x + parts[2] * layers.project(run, out, dims.hidden, bias=True)
    with x.tape.scope("mlp"):
        width = int(dims.hidden * dims.mlp_ratio)
        return x + parts[5] * layers.feed_forward(run, _modulate(x, parts[3], parts[4]), width, "gelu_tanh")


def _dit_head(dims: DitDims, run: PassSettings, x: Tensor, signal: Tensor) -> Tensor:
    """Apply a last modulated norm, project to pixels, and put the patches back in place."""
    shift, scale = _split_signal(dims, run, signal, 2)
    pixels = dims.patch * dims.patch * 2 * dims.channels
    return layers.project(run, _modulate(x, shift, scale), pixels, bias=True).clone()


def _split_signal(dims: DitDims, run: PassSettings, signal: Tensor, count: int) -> list[Tensor]:
    """Project the signal to ``count`` shifts, scales and gates."""
    control = layers.project(run, functional.activation("silu", signal), count * dims.hidden, bias=True)
    return [part.unsqueeze(1) for part in control.split(*[dims.hidden] * count)]


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Compute norm(x)·(1 + scale) + shift, the norm without weights."""
    return functional.layer_norm(x, None, None) * (scale + 1.0) + shift
