"""Networks that denoise latent pictures and videos: the U-Net and transformers that are told the
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    fill,
    pointwise,
)


@dataclass(frozen=True)
class UnetDims:
    """Published dimensions of a U-Net with cross attention to a text."""

    widths: tuple[int, ...]
    blocks: int  # residual blocks a level on the way down; one more on the way up
    text_hidden: int
    depths: tuple[int, ...]  # transformer layers behind each block of a level; 0: none
    middle: int  # transformer layers at the bottom
    heads: int = 0  # of every level; 0: heads of ``head_dim``
    head_dim: int = 64
    added: int = 0  # width of a summary of text and sizes that joins the time
    text_length: int = 77
    channels: int = 4
    image: int = 64  # latent pixels


def trace_unet(
    dims: UnetDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace the noise of every latent pixel, from the latent, the time and the text."""

    def whole(tape: Tape) -> Tensor:
        """Go down through the levels, across the middle, and up again, joined by the tensors kept
        on the way down.
        """
        with tape.scope("time"):  # sines and cosines of the step number, passed through two layers
            rates = pointwise(
                "exp", pointwise("scale", fill(tape, (dims.widths[0] // 2,), Dtype.FP32))
            )
            angle = pointwise("mul", tape.empty((run.batch, 1), Dtype.FP32), rates)
            waves = cat([pointwise("sin", angle), pointwise("cos", angle)], -1).to(run.dtype)
            time = embed_vector(run, waves, 4 * dims.widths[0])
        if dims.added:
            time = time + embed_vector(
                run, tape.empty((run.batch, dims.added), run.dtype), 4 * dims.widths[0]
            )
        text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
        latent = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
        x = functional.convolve(latent, dims.widths[0], 3, bias=True)
        skipped = [x]
        for level, width in enumerate(dims.widths):
            with tape.scope(f"down{level}"):
                for _ in range(dims.blocks):
                    x = _add_residual(run, x, time, width)
                    x = _attend_text(
                        dims,
                        run,
                        x,
                        text,
                        dims.depths[level],
                    )
                    skipped.append(x)
                if level < len(dims.widths) - 1:
                    x = functional.convolve(
                        x,
                        width,
                        3,
                        stride=2,
                        bias=True,
                    )
                    skipped.append(x)
        with tape.scope("middle"):
            x = _add_residual(run, x, time, x.shape[1])
            x = _add_residual(
                run,
                _attend_text(
                    dims,
                    run,
                    x,
                    text,
                    dims.middle,
                ),
                time,
                x.shape[1],
            )
        for level in reversed(range(len(dims.widths))):
            with tape.scope(f"up{level}"):
                for _ in range(dims.blocks + 1):
                    x = _add_residual(run, cat([x, skipped.pop()], 1), time, dims.widths[level])
                    x = _attend_text(
                        dims,
                        run,
                        x,
                        text,
                        dims.depths[level],
                    )
                if level:
                    x = functional.convolve(functional.upsample(x), x.shape[1], 3, bias=True)
        return _norm_convolve(x, dims.channels)

    program.section("unet", whole)


def embed_vector(
    run: PassSettings,
    x: Tensor,
    width: int,
    function: str = "silu",
) -> Tensor:
    inner = functional.activation(function, layers.project(run, x, width, bias=True))
    return layers.project(run, inner, width, bias=True)


def _norm_convolve(x: Tensor, width: int) -> Tensor:
    return functional.convolve(
        functional.activation("silu", functional.group_norm(x)), width, 3, bias=True
    )


def _add_residual(
    run: PassSettings,
    x: Tensor,
    time: Tensor,
    width: int,
) -> Tensor:
    """Convolve twice with the time added between; the input is added through a 1x1 where the width
    changes.

    Sums are scaled in a kernel of its own, here and after attention, as diffusers does even by 1.
    """
    with x.tape.scope("residual"):
        y = _norm_convolve(x, width)
        shift = layers.project(run, functional.activation("silu", time), width, bias=True)
        y = _norm_convolve(y + shift.view(run.batch, width, 1, 1), width)
        return (
            (x if x.shape[1] == width else functional.convolve(x, width, 1, bias=True)) + y
        ) * 1.0


def _attend_text(
    dims: UnetDims,
    run: PassSettings,
    x: Tensor,
    text: Tensor,
    depth: int,
) -> Tensor:
    """Let pixels attend to one another and to the text, then run a gated feed-forward layer,
    ``depth`` times.

    Networks with heads of one size enter and leave by a linear layer, those with a number of heads
    by a convolution."""
    if not depth:
        return x
    n, c, h, w = x.shape
    with x.tape.scope("transformer"):
        y = functional.group_norm(x)
        if dims.heads:
            y = functional.convolve(y, c, 1, bias=True).permute(0, 2, 3, 1).reshape(n, h * w, c)
        else:
            y = layers.project(run, y.permute(0, 2, 3, 1).reshape(n, h * w, c), c, bias=True)
        for _ in range(depth):
            normed = layers.layer_norm(run, y)
            y = _cross_attention(dims, run, normed, normed) + y
            y = _cross_attention(dims, run, layers.layer_norm(run, y), text) + y
            wide = layers.project(run, layers.layer_norm(run, y), 8 * c, bias=True)
            value, gate = wide.split(4 * c, 4 * c)
            y = layers.project(run, value * functional.activation("gelu", gate), c, bias=True) + y
        if not dims.heads:
            y = layers.project(run, y, c, bias=True)
        y = y.reshape(n, h, w, c).permute(0, 3, 1, 2).contiguous()
        return (functional.convolve(y, c, 1, bias=True) if dims.heads else y) + x


def _cross_attention(
    dims: UnetDims,
    run: PassSettings,
    x: Tensor,
    source: Tensor,
) -> Tensor:
    """Attend with queries from ``x``, keys and values from ``source``; only the output has a
    bias.
    """
    width = x.shape[-1]
    parts = (layers.project(run, t, width) for t in (x, source, source))
    head_dim = width // dims.heads if dims.heads else dims.head_dim
    q, k, v = (layers.split_heads(part, head_dim) for part in parts)
    return (
        layers.project(
            run,
            layers.attend(
                run,
                q,
                k,
                v,
                causal=False,
            ),
            width,
            bias=True,
        )
        * 1.0
    )


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


def trace_dit(
    dims: DitDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace noise and variance of every latent pixel, from the latent, the time and the class."""
    hidden = dims.hidden

    def embed(tape: Tape) -> tuple[Tensor, Tensor]:
        """Return patches with positions, and the sum of time and class as one signal."""
        x = layers.cut_patches(
            run,
            tape,
            dims.channels,
            hidden,
            dims.patch,
        )
        x = x.view(run.batch, hidden, -1).transpose(1, 2)
        x = x + tape.empty((1, x.shape[1], hidden), run.dtype)  # fixed sines, not learned
        with tape.scope("time"):
            waves = cat([tape.empty((run.batch, 128), run.dtype) for _ in range(2)], -1)
            time = embed_vector(run, waves, hidden)
        label = functional.embedding(
            tape.parameter(dims.classes + 1, hidden, dtype=run.dtype), (run.batch,)
        )
        return x, time + label

    def layer(
        tape: Tape,
        x: Tensor,
        signal: Tensor,
    ) -> Tensor:
        """Attend, then feed forward, each shifted and scaled before and gated after by the
        signal.
        """
        parts = split_signal(run, signal, 6)
        with tape.scope("attention"):
            fused = layers.project(run, modulate_rows(x, parts[0], parts[1]), 3 * hidden, bias=True)
            q, k, v = (
                layers.split_heads(p, hidden // dims.heads) for p in fused.split(*[hidden] * 3)
            )
            out = layers.attend(
                run,
                q,
                k,
                v,
                causal=False,
            )
            x = x + parts[2] * layers.project(run, out, hidden, bias=True)
        return _feed_gated(run, x, parts, dims.mlp_ratio)

    def head(
        tape: Tape,
        x: Tensor,
        signal: Tensor,
    ) -> Tensor:
        """Apply a last modulated norm, project to pixels, and put the patches back in place."""
        shift, scale = split_signal(run, signal, 2)
        pixels = dims.patch * dims.patch * 2 * dims.channels
        return layers.project(run, modulate_rows(x, shift, scale), pixels, bias=True).clone()

    program.stack(
        embed,
        layer,
        head,
        dims.layers,
        head_inputs=1,
    )


def split_signal(
    run: PassSettings,
    signal: Tensor,
    count: int,
    width: int = 0,
) -> list[Tensor]:
    """Project the signal to ``count`` shifts, scales and gates; by default each is as wide as the
    signal.
    """
    width = width or signal.shape[-1]
    control = layers.project(run, functional.activation("silu", signal), count * width, bias=True)
    return [part.unsqueeze(1) for part in control.split(*[width] * count)]


def modulate_rows(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
) -> Tensor:
    """Compute norm(x)·(1 + scale) + shift, the norm without weights."""
    return modulate(functional.layer_norm(x, None, None), shift, scale)


def modulate(
    normed: Tensor,
    shift: Tensor,
    scale: Tensor,
) -> Tensor:
    return normed * (scale + 1.0) + shift


@dataclass(frozen=True)
class JointDims:
    """Published dimensions of a transformer in which picture and text attend to one another (SD3,
    FLUX.1).
    """

    layers: int  # with weights of their own for picture and text
    heads: int
    head_dim: int
    text_length: int
    pooled: int  # width of a summary of the text
    single_layers: int = (
        0  # with one set of weights for both, the feed-forward layer beside the attention
    )
    normed: bool = False  # whether queries and keys are normed
    axes: tuple[
        int, ...
    ] = ()  # values of a head that each axis of positions rotates; none: positions are added
    guidance: bool = False  # whether the strength of guidance is given beside the time
    dual_layers: int = 0  # first ones, in which the picture attends to itself as well (SD3.5)
    text_hidden: int = 4096
    channels: int = 16
    patch: int = 2
    mlp_ratio: float = 4.0
    image: int = 128  # latent pixels

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim


def trace_joint(
    dims: JointDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one denoising step: layers of two streams, then layers of one, or a last one that
    leaves the text.
    """

    def embed(tape: Tape) -> list[Tensor]:
        return _embed_joint(dims, run, tape)

    def one_stream(
        tape: Tape,
        x: Tensor,
        text: Tensor,
        signal: Tensor,
        *angles: Tensor,
    ) -> list[Tensor]:
        return _run_one_stream(
            dims,
            run,
            tape,
            x,
            text,
            signal,
            *angles,
        )

    def head(
        tape: Tape,
        x: Tensor,
        signal: Tensor,
    ) -> Tensor:
        scale, shift = split_signal(run, signal, 2)
        modulated = modulate_rows(x, shift, scale)
        out = layers.project(run, modulated, dims.patch**2 * dims.channels, bias=True)
        return out if dims.axes else out.clone()

    two_streams = partial(_attend_two, dims, run)
    x, text, signal, *angles = program.section("embedding", embed)
    conditions = [signal, *angles]
    doubled = dims.layers - (not dims.single_layers) - dims.dual_layers
    if dims.dual_layers:
        x, text = program.section(
            "dual layers",
            partial(two_streams, dual=True),
            x,
            text,
            *conditions,
            repeat=dims.dual_layers,
        )
    x, text = program.section(
        "layers",
        two_streams,
        x,
        text,
        *conditions,
        repeat=doubled,
    )
    if dims.single_layers:
        x, _ = program.section(
            "single layers",
            one_stream,
            x,
            text,
            *conditions,
            repeat=dims.single_layers,
        )
    else:
        (x,) = program.section(
            "last layer",
            partial(two_streams, last=True),
            x,
            text,
            *conditions,
        )
    program.section("head", head, x, signal)


def _embed_joint(
    dims: JointDims,
    run: PassSettings,
    tape: Tape,
) -> list[Tensor]:
    """Return patches, text, the signal of time and summary, and the angles of positions where
    these rotate.
    """
    hidden = dims.hidden
    tokens = (run.image // dims.patch) ** 2
    if dims.axes:
        x = tape.empty((run.batch, tokens, dims.patch**2 * dims.channels), run.dtype)
        x = layers.project(run, x, hidden, bias=True)
    else:
        x = layers.cut_patches(
            run,
            tape,
            dims.channels,
            hidden,
            dims.patch,
        )
        x = x.view(run.batch, hidden, tokens).transpose(1, 2)
        x = (x + tape.empty((1, tokens, hidden), run.dtype).clone()).contiguous()
    with tape.scope("time"):
        signal = embed_waves(run, tape, hidden)
        for _ in range(dims.guidance):
            signal = signal + embed_waves(run, tape, hidden)
        summary = tape.empty((run.batch, dims.pooled), run.dtype)
        signal = signal + embed_vector(run, summary, hidden)
    text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
    text = layers.project(run, text, hidden, bias=True)
    if not dims.axes:
        return [x, text, signal]
    return [x, text, signal, *_rotate_axes(dims, tape, tokens + dims.text_length)]


def _run_one_stream(
    dims: JointDims,
    run: PassSettings,
    tape: Tape,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
    *angles: Tensor,
) -> list[Tensor]:
    """Attend and feed forward side by side over text and picture as one row of tokens."""
    hidden = dims.hidden
    joined = cat([text, x], 1)
    shift, scale, gate = split_signal(run, signal, 3)
    normed = modulate_rows(joined, shift, scale)
    wide = layers.project(run, normed, int(hidden * dims.mlp_ratio), bias=True)
    wide = functional.activation("gelu_tanh", wide)
    with tape.scope("attention"):
        stream = _project_thrice(run, normed, hidden)
        attended = _attend_joint(dims, run, [stream], angles)
    merged = layers.project(run, cat([attended, wide], 2), hidden, bias=True)
    out = joined + gate * merged
    text_length = text.shape[1]
    return [out.slice(1, text_length, out.shape[1]), out.slice(1, 0, text_length)]


def _project_thrice(
    run: PassSettings,
    x: Tensor,
    width: int,
) -> list[Tensor]:
    """Return queries, keys and values of a row of tokens."""
    return [layers.project(run, x, width, bias=True) for _ in range(3)]


def embed_waves(
    run: PassSettings,
    tape: Tape,
    width: int,
    waves: int = 256,
) -> Tensor:
    """Turn a number into sines and cosines, cosines first, and pass them through two layers."""
    rates = pointwise(
        "exp", pointwise("scale", pointwise("scale", fill(tape, (waves // 2,), Dtype.FP32)))
    )
    angle = pointwise(
        "scale", pointwise("mul", tape.empty((run.batch, 1), run.dtype).to(Dtype.FP32), rates)
    )
    sines_and_cosines = cat([pointwise("sin", angle), pointwise("cos", angle)], -1)
    halves = sines_and_cosines.split(waves // 2, waves // 2)
    return embed_vector(run, cat(halves[::-1], -1).to(run.dtype), width)


def _rotate_axes(
    dims: JointDims,
    tape: Tape,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every token's place, computed in fp64 an axis at a time."""
    with tape.scope("rotary"):
        cosines: list[Tensor] = []
        sines: list[Tensor] = []
        for size in dims.axes:
            rates = fill(tape, (size // 2,), Dtype.FP64)
            for step in ("scale", "pow", "div", "scale", "scale"):
                rates = pointwise(step, rates)
            angle = pointwise(
                "mul", tape.empty((tokens, 1), Dtype.FP32), rates, out_dtype=Dtype.FP64
            )
            for function, axes in (("cos", cosines), ("sin", sines)):
                wave_twice = cat([pointwise(function, angle)] * 2, -1)
                axes.append(wave_twice.to(Dtype.FP32))
        return cat(cosines, -1), cat(sines, -1)


def _attend_two(
    dims: JointDims,
    run: PassSettings,
    tape: Tape,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
    *angles: Tensor,
    last: bool = False,
    dual: bool = False,
) -> list[Tensor]:
    """Attend over picture and text together, feed each forward by weights of its own, and return
    both.

    ``last``: the picture alone. ``dual``: the picture also attends to itself alone.
    """
    picture_parts = split_signal(run, signal, 9 if dual else 6)
    text_parts = split_signal(run, signal, 2 if last else 6)
    normed = functional.layer_norm(x, None, None)
    normed_picture = modulate(normed, picture_parts[0], picture_parts[1])
    if dual:
        normed_alone = modulate(normed, picture_parts[6], picture_parts[7])
    normed_text = modulate_rows(text, text_parts[0], text_parts[1])
    with tape.scope("attention"):
        streams = [
            _project_thrice(run, normed_picture, dims.hidden),
            _project_thrice(run, normed_text, dims.hidden),
        ]
        picture_out, text_out = _attend_streams(dims, run, streams, angles)
        attended = layers.project(run, picture_out, dims.hidden, bias=True)
        if not last:
            attended_text = layers.project(run, text_out, dims.hidden, bias=True)
    x = x + picture_parts[2] * attended
    if dual:
        with tape.scope("attention2"):
            stream = _project_thrice(run, normed_alone, dims.hidden)
            alone = _attend_joint(dims, run, [stream], angles)
            x = x + picture_parts[8] * layers.project(run, alone, dims.hidden, bias=True)
    x = _feed_gated(run, x, picture_parts, dims.mlp_ratio)
    if last:
        return [x]
    text = text + text_parts[2] * attended_text
    return [x, _feed_gated(run, text, text_parts, dims.mlp_ratio)]


def _attend_streams(
    dims: JointDims,
    run: PassSettings,
    streams: list[list[Tensor]],
    angles: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Attend over the streams of a picture and of text as one row of tokens; part them again.

    Where positions rotate, the text comes first.
    """
    picture_tokens = streams[0][0].shape[1]
    text_tokens = streams[1][0].shape[1]
    if not dims.axes:
        out = _attend_joint(dims, run, streams, angles)
        picture_slice = out.slice(1, 0, picture_tokens)
        return picture_slice, out.slice(1, picture_tokens, picture_tokens + text_tokens)
    out = _attend_joint(dims, run, streams[::-1], angles)
    text_slice = out.slice(1, 0, text_tokens)
    picture_slice = out.slice(1, text_tokens, text_tokens + picture_tokens)
    return picture_slice.contiguous(), text_slice.contiguous()


def _feed_gated(
    run: PassSettings,
    x: Tensor,
    parts: list[Tensor],
    mlp_ratio: float,
) -> Tensor:
    """Add a feed-forward layer, modulated before and gated after."""
    with x.tape.scope("mlp"):
        width = int(x.shape[-1] * mlp_ratio)
        return x + parts[5] * layers.feed_forward(
            run, modulate_rows(x, parts[3], parts[4]), width, "gelu_tanh"
        )


def _attend_joint(
    dims: JointDims,
    run: PassSettings,
    streams: Sequence[Sequence[Tensor]],
    angles: Sequence[Tensor],
) -> Tensor:
    """Attend over queries, keys and values of all streams, ``[batch, length, hidden]``."""
    heads = [
        [part.view(*part.shape[:2], dims.heads, dims.head_dim) for part in parts]
        for parts in streams
    ]
    if dims.normed:  # PyTorch's norm, which is one kernel, or diffusers' own, which is several
        for parts in heads:
            parts[:2] = [layers.rms_norm(run, part, fused=bool(dims.axes)) for part in parts[:2]]
    if not dims.axes:  # heads come before tokens when streams are joined
        heads = [[part.transpose(1, 2) for part in parts] for parts in heads]
    axis = 1 if dims.axes else 2
    q, k, v = (
        heads[0] if len(heads) == 1 else [cat(same, axis) for same in zip(*heads, strict=True)]
    )
    if dims.axes:
        tables = spread_tables(angles)
        q, k, v = (
            t.transpose(1, 2) for t in (rotate_pairs(q, *tables), rotate_pairs(k, *tables), v)
        )
    return layers.attend(
        run,
        q,
        k,
        v,
        causal=False,
    )


def rotate_pairs(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate neighbouring values of every head in fp32; tables ``[length, dim]`` hold for all
    heads.
    """
    half = x.shape[-1] // 2
    odd = x.slice(-1, 0, half)
    even = x.slice(-1, half, 2 * half)
    turned = cat([-odd, even], -1)
    return (x.to(Dtype.FP32) * cos + turned.to(Dtype.FP32) * sin).to(x.dtype)


def spread_tables(tables: Sequence[Tensor]) -> list[Tensor]:
    """Return rotary tables for heads that come after tokens, ``[batch, length, heads, dim]``."""
    return [table.unsqueeze(1) for table in tables]


@dataclass(frozen=True)
class VideoDims:
    """Published dimensions of a transformer that denoises a video by attention over all frames (Wan
    2.1).
    """

    layers: int
    heads: int
    intermediate: int
    head_dim: int = 128
    text_hidden: int = 4096
    text_length: int = 512
    channels: int = 16
    patch: int = 2
    frames: int = 21  # of the latent video: one, and one for every four after it
    image: int = 60  # latent rows
    columns: int = 104  # latent columns at that number of rows

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim


def trace_video(
    dims: VideoDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one denoising step of a whole video."""
    x, text, signal, time = program.section("embedding", lambda tape: _embed_video(dims, run, tape))
    (x,) = program.section(
        "layers",
        partial(_video_layer, dims, run),
        x,
        text,
        signal,
        repeat=dims.layers,
    )

    def head(
        tape: Tape,
        x: Tensor,
        time: Tensor,
    ) -> Tensor:
        shift, scale = add_table(tape, run, time.unsqueeze(1), 2)
        out = modulate_rows(x.to(Dtype.FP32), shift, scale).to(x.dtype)
        return layers.project(run, out, dims.patch**2 * dims.channels, bias=True).clone()

    program.section("head", head, x, time)


def _embed_video(
    dims: VideoDims,
    run: PassSettings,
    tape: Tape,
) -> list[Tensor]:
    """Return patches, text, six signals for every layer, and the time they were made of."""
    rows = run.image // dims.patch
    columns = dims.columns * run.image // dims.image // dims.patch
    frames = run.batch * dims.frames  # a patch holds one frame, so that frames are pictures
    video = tape.empty((frames, dims.channels, rows * dims.patch, columns * dims.patch), run.dtype)
    x = functional.convolve(
        video,
        dims.hidden,
        dims.patch,
        stride=dims.patch,
        padding=0,
        bias=True,
    )
    x = x.view(run.batch, dims.frames, dims.hidden, rows * columns).transpose(2, 3)
    x = x.reshape(run.batch, dims.frames * rows * columns, dims.hidden)
    with tape.scope("time"):
        time = embed_waves(run, tape, dims.hidden)
        signal = layers.project(
            run, functional.activation("silu", time), 6 * dims.hidden, bias=True
        )
    text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
    text = embed_vector(run, text, dims.hidden, "gelu_tanh")
    return [x, text, signal.view(run.batch, 6, dims.hidden), time]


def _video_layer(
    dims: VideoDims,
    run: PassSettings,
    tape: Tape,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
) -> Tensor:
    """Attend over the video, then to the text, then feed forward; sums and norms are computed in
    fp32.
    """
    parts = add_table(tape, run, signal.to(Dtype.FP32), 6)
    with tape.scope("attention"):
        normed = modulate_rows(x.to(Dtype.FP32), parts[0], parts[1]).to(x.dtype)
        x = _add_wide(x, _attend_video(dims, run, normed, normed), parts[2])
    with tape.scope("text"):
        wide = x.to(Dtype.FP32)
        weights = [tape.parameter(dims.hidden, dtype=run.dtype).to(Dtype.FP32) for _ in range(2)]
        x = x + _attend_video(dims, run, functional.layer_norm(wide, *weights).to(run.dtype), text)
    with tape.scope("mlp"):
        out = layers.feed_forward(
            run,
            modulate_rows(x.to(Dtype.FP32), parts[3], parts[4]).to(x.dtype),
            dims.intermediate,
            "gelu_tanh",
        )
        return _add_wide(x, out.to(Dtype.FP32), parts[5])


def _attend_video(
    dims: VideoDims,
    run: PassSettings,
    x: Tensor,
    source: Tensor,
) -> Tensor:
    """Attend with queries from ``x``, keys and values from ``source``; places in the video rotate
    the heads.
    """
    q, k, v = (layers.project(run, t, dims.hidden, bias=True) for t in (x, source, source))
    q, k = (layers.rms_norm(run, t, fused=True) for t in (q, k))
    heads = [t.view(*t.shape[:2], dims.heads, dims.head_dim) for t in (q, k, v)]
    for i in (
        (0, 1) if source is x else ()
    ):  # neighbouring values; both results are written into one fresh tensor
        half = dims.head_dim // 2
        wave = x.tape.empty((1, x.shape[1], 1, half), x.dtype)
        even = heads[i].slice(-1, 0, half)
        odd = heads[i].slice(-1, half, 2 * half)
        turned = [pointwise("sub", even * wave, odd * wave), even * wave + odd * wave]
        heads[i] = cat([part.clone() for part in turned], -1)
    out = layers.attend(run, *(t.transpose(1, 2) for t in heads), causal=False)
    return layers.project(run, out, dims.hidden, bias=True)


def add_table(
    tape: Tape,
    run: PassSettings,
    signal: Tensor,
    count: int,
) -> list[Tensor]:
    """Add learned shifts, scales and gates to the signal, ``[batch, count, hidden]``, and part
    them.
    """
    width = signal.shape[-1]
    table = tape.parameter(1, count, width, dtype=run.dtype) + signal
    return [table.slice(1, at, at + 1) for at in range(count)]


def _add_wide(
    x: Tensor,
    out: Tensor,
    gate: Tensor,
) -> Tensor:
    """Compute x + out·gate in fp32 and return it as wide as ``x``."""
    return (x.to(Dtype.FP32) + out * gate).to(x.dtype)
