"""Transformers that denoise videos by attention over the tokens of a text and of all frames in one
row: CogVideoX and HunyuanVideo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.denoisers import (
    embed_vector,
    embed_waves,
    modulate,
    modulate_rows,
    rotate_pairs,
    split_signal,
    spread_tables,
)
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    fill,
    pointwise,
    reduce,
)


@dataclass(frozen=True)
class CogvideoDims:
    """Published dimensions of CogVideoX."""

    layers: int
    heads: int
    head_dim: int = 64
    text_hidden: int = 4096
    text_length: int = 226
    time_hidden: int = 512
    channels: int = 16
    patch: int = 2
    patch_frames: int = 1  # latent frames of a patch
    rotated: bool = False  # places rotate queries and keys; else they are added
    frames: int = 13  # of the latent video: one, and one for every four after it
    image: int = 60  # latent rows
    columns: int = 90  # latent columns at that number of rows

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim


def trace_cogvideo(
    dims: CogvideoDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one denoising step of a whole video."""
    x, text, signal, *tables = program.section("embedding", partial(_embed_video, dims, run))
    x, text = program.section(
        "layers",
        partial(_cogvideo_layer, dims, run),
        x,
        text,
        signal,
        *tables,
        repeat=dims.layers,
    )

    def head(
        tape: Tape,
        x: Tensor,
        signal: Tensor,
    ) -> Tensor:
        x = layers.layer_norm(run, x)
        shift, scale = split_signal(run, signal, 2, dims.hidden)
        x = modulate(layers.layer_norm(run, x), shift, scale)
        pixels = dims.patch**2 * dims.patch_frames * dims.channels
        return layers.project(run, x, pixels, bias=True).clone()

    program.section("head", head, x, signal)


def _embed_video(
    dims: CogvideoDims,
    run: PassSettings,
    tape: Tape,
) -> list[Tensor]:
    """Return patches, text, the signal of the time, and the rotary tables where places rotate."""
    rows = run.image // dims.patch
    columns = dims.columns * run.image // dims.image // dims.patch
    with tape.scope("time"):
        time = embed_waves(run, tape, dims.time_hidden, dims.hidden)
    text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
    text = layers.project(run, text, dims.hidden, bias=True)

    groups = dims.frames // dims.patch_frames
    tokens = groups * rows * columns
    if dims.patch_frames == 1:
        frames = run.batch * dims.frames
        sides = (rows * dims.patch, columns * dims.patch)
        x = functional.convolve(
            tape.empty((frames, dims.channels, *sides), run.dtype),
            dims.hidden,
            dims.patch,
            stride=dims.patch,
            padding=0,
            bias=True,
        )
        x = x.view(run.batch, dims.frames, dims.hidden, rows * columns).transpose(2, 3)
        x = x.reshape(run.batch, tokens, dims.hidden)
    else:
        values = dims.channels * dims.patch**2 * dims.patch_frames
        x = tape.empty((run.batch, tokens, values), run.dtype).clone()
        x = layers.project(run, x, dims.hidden, bias=True)
    joined = cat([text, x], 1)
    if not dims.rotated:
        joined = joined + tape.empty((1, *joined.shape[1:]), run.dtype)
    length = dims.text_length
    parts = [joined.slice(1, length, joined.shape[1]), joined.slice(1, 0, length), time]
    if dims.rotated:
        parts += [tape.empty((tokens, dims.head_dim), Dtype.FP32) for _ in range(2)]
    return parts


def _cogvideo_layer(
    dims: CogvideoDims,
    run: PassSettings,
    tape: Tape,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
    *tables: Tensor,
) -> list[Tensor]:
    """Attend over text and video as one row of tokens, then feed forward; each has shifts and gates
    of its own.
    """
    length = text.shape[1]
    for name in ("attention", "mlp"):
        with tape.scope(name):
            video_parts, text_parts, joined = _norm_both(dims, run, x, text, signal)
            if name == "attention":
                out = _attend_row(dims, run, joined, tables)
            else:
                out = layers.feed_forward(run, joined, 4 * dims.hidden, "gelu_tanh")
            x = x + video_parts * out.slice(1, length, out.shape[1])
            text = text + text_parts * out.slice(1, 0, length)
    return [x, text]


def _norm_both(
    dims: CogvideoDims,
    run: PassSettings,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and modulate video and text; return the gates of both, and both in a row."""
    parts = split_signal(run, signal, 6, dims.hidden)
    weights = [x.tape.parameter(dims.hidden, dtype=run.dtype) for _ in range(2)]
    normed = modulate(functional.layer_norm(x, *weights), parts[0], parts[1])
    normed_text = modulate(functional.layer_norm(text, *weights), parts[3], parts[4])
    return parts[2], parts[5], cat([normed_text, normed], 1)


def _attend_row(
    dims: CogvideoDims,
    run: PassSettings,
    joined: Tensor,
    tables: Sequence[Tensor],
) -> Tensor:
    """Attend with normed heads over a row of text and video; places rotate those of the video."""
    parts = [layers.project(run, joined, dims.hidden, bias=True) for _ in range(3)]
    q, k, v = [layers.split_heads(part, dims.head_dim) for part in parts]
    q, k = [layers.layer_norm(run, part) for part in (q, k)]
    if dims.rotated:
        length = dims.text_length
        for part in (q, k):
            video = part.slice(2, length, part.shape[2])
            pointwise("copy", rotate_pairs(video, *tables))
    out = layers.attend(run, q, k, v, causal=False)
    return layers.project(run, out, dims.hidden, bias=True)


@dataclass(frozen=True)
class HunyuanVideoDims:
    """Published dimensions of HunyuanVideo: layers of two streams, then of one, over all frames."""

    layers: int  # with weights of their own for video and text
    single_layers: int
    heads: int
    head_dim: int = 128
    refiner_layers: int = 2  # over the text alone
    text_hidden: int = 4096
    text_length: int = 256
    pooled: int = 768
    channels: int = 16
    patch: int = 2
    mlp_ratio: float = 4.0
    axes: tuple[int, ...] = (16, 56, 56)  # values of a head that each axis of places rotates
    frames: int = 33  # of the latent video: one, and one for every four after it
    image: int = 90  # latent rows
    columns: int = 160  # latent columns at that number of rows

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim


def trace_hunyuan_video(
    dims: HunyuanVideoDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one denoising step of a whole video."""
    x, text, *conditions = program.section("embedding", partial(_embed_hunyuan, dims, run))
    (text,) = program.section(
        "text layers",
        partial(_refine_text, dims, run),
        text,
        conditions.pop(),
        repeat=dims.refiner_layers,
    )
    x, text = program.section(
        "layers",
        partial(_attend_two, dims, run),
        x,
        text,
        *conditions,
        repeat=dims.layers,
    )
    x, text = program.section(
        "single layers",
        partial(_attend_one, dims, run),
        x,
        text,
        *conditions,
        repeat=dims.single_layers,
    )

    def head(
        tape: Tape,
        x: Tensor,
        signal: Tensor,
    ) -> Tensor:
        scale, shift = split_signal(run, signal, 2)
        pixels = dims.patch**2 * dims.channels
        return layers.project(run, modulate_rows(x, shift, scale), pixels, bias=True).clone()

    program.section("head", head, x, conditions[0])


def _embed_hunyuan(
    dims: HunyuanVideoDims,
    run: PassSettings,
    tape: Tape,
) -> list[Tensor]:
    """Return patches, text, the signal of all layers, the mask of padding, both rotary tables and
    the signal of the text's own layers.
    """
    rows = run.image // dims.patch
    columns = dims.columns * run.image // dims.image // dims.patch
    frames = run.batch * dims.frames  # a patch holds one frame, so that frames are pictures
    sides = (rows * dims.patch, columns * dims.patch)
    x = functional.convolve(
        tape.empty((frames, dims.channels, *sides), run.dtype),
        dims.hidden,
        dims.patch,
        stride=dims.patch,
        padding=0,
        bias=True,
    )
    tokens = dims.frames * rows * columns
    x = x.view(run.batch, dims.frames, dims.hidden, rows * columns).transpose(2, 3)
    x = x.reshape(run.batch, tokens, dims.hidden)

    with tape.scope("time"):
        signal = embed_waves(run, tape, dims.hidden) + embed_waves(run, tape, dims.hidden)
        summary = tape.empty((run.batch, dims.pooled), run.dtype)
        signal = signal + embed_vector(run, summary, dims.hidden)
    text = tape.empty((run.batch, dims.text_length, dims.text_hidden), run.dtype)
    with tape.scope("text"):
        pooled = _mean_of_tokens(run, text)
        text_signal = embed_waves(run, tape, dims.hidden)
        text_signal = text_signal + embed_vector(run, pooled, dims.hidden)
        text = layers.project(run, text, dims.hidden, bias=True)
    tables = _rotate_places(dims, tape, (dims.frames, rows, columns))
    mask = _mask_text(run, tape, tokens + dims.text_length)
    return [x, text, signal, mask, *tables, text_signal]


def _mean_of_tokens(run: PassSettings, text: Tensor) -> Tensor:
    """Return the mean of the tokens that are no padding, computed in fp32."""
    batch, length, width = text.shape
    is_token = text.tape.empty((batch, length), Dtype.INT64).to(Dtype.FP32).unsqueeze(-1)
    tokens = pointwise("mul", text, is_token, out_dtype=Dtype.FP32)
    total = reduce("sum", tokens, (batch, width), across=True)
    count = reduce("sum", is_token, (batch, 1))
    return pointwise("div", total, count).to(run.dtype)


def _rotate_places(
    dims: HunyuanVideoDims,
    tape: Tape,
    sides: tuple[int, int, int],
) -> list[Tensor]:
    """Return cosines and sines of every token's place, an axis at a time."""
    tokens = sides[0] * sides[1] * sides[2]
    with tape.scope("rotary"):
        places = [fill(tape, (side,), Dtype.FP32) for side in sides]
        grid = tape.empty((tokens, len(places)), Dtype.FP32).clone()
        cosines: list[Tensor] = []
        sines: list[Tensor] = []
        for size in dims.axes:
            rates = fill(tape, (size // 2,), Dtype.FP32)
            for step in ("scale", "scale", "pow", "div", "scale"):
                rates = pointwise(step, rates)
            angle = pointwise("mul", grid.slice(1, 0, 1), rates)
            for function, waves in (("cos", cosines), ("sin", sines)):
                wave = pointwise(function, angle).unsqueeze(2)
                waves.append(wave.expand(tokens, size // 2, 2).reshape(tokens, size))
        return [cat(cosines, -1), cat(sines, -1)]


def _mask_text(
    run: PassSettings,
    tape: Tape,
    length: int,
) -> Tensor:
    """Return which tokens of a row of video and text are no padding."""
    ones = fill(tape, (run.batch, length), Dtype.BOOL)
    places = fill(tape, (1, length), Dtype.INT64)
    ends = pointwise("shift", tape.empty((run.batch, 1), Dtype.INT32))
    is_padding = pointwise("compare", places, ends, out_dtype=Dtype.BOOL)
    mask = pointwise("masked_fill", ones, is_padding)
    return mask.view(run.batch, 1, 1, length)


def _refine_text(
    dims: HunyuanVideoDims,
    run: PassSettings,
    tape: Tape,
    text: Tensor,
    signal: Tensor,
) -> Tensor:
    """Attend over the text and feed forward; the signal of the time gates both."""
    length = text.shape[1]
    mask = tape.empty((run.batch, 1, length, length), Dtype.BOOL)
    normed = layers.layer_norm(run, text)
    terms = layers.ScoreTerms(mask=mask)
    out = layers.self_attention(run, normed, dims.heads, terms=terms) * 1.0
    gates = split_signal(run, signal, 2)
    text = text + out * gates[0]
    out = layers.feed_forward(run, layers.layer_norm(run, text), 4 * dims.hidden, "silu")
    return text + out * gates[1]


def _attend_two(
    dims: HunyuanVideoDims,
    run: PassSettings,
    tape: Tape,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
    mask: Tensor,
    *tables: Tensor,
) -> list[Tensor]:
    """Attend over video and text together, and feed each forward by weights of its own."""
    gates = []
    heads = []
    for stream, rotates in ((x, True), (text, False)):
        parts = split_signal(run, signal, 6)
        normed = modulate_rows(stream, parts[0], parts[1])
        heads.append(_project_heads(dims, run, normed, tables if rotates else ()))
        gates.append(parts)
    q, k, v = [cat(pair, 1) for pair in zip(*heads, strict=True)]
    out = _attend_masked(run, q, k, v, mask)

    results = []
    video_tokens = x.shape[1]
    spans = ((0, video_tokens), (video_tokens, out.shape[1]))
    for stream, parts, span in zip((x, text), gates, spans, strict=True):
        attended = layers.project(run, out.slice(1, *span), dims.hidden, bias=True)
        stream = stream + attended * parts[2]
        width = int(dims.hidden * dims.mlp_ratio)
        normed = modulate_rows(stream, parts[3], parts[4])
        results.append(stream + parts[5] * layers.feed_forward(run, normed, width, "gelu_tanh"))
    return results


def _attend_one(
    dims: HunyuanVideoDims,
    run: PassSettings,
    tape: Tape,
    x: Tensor,
    text: Tensor,
    signal: Tensor,
    mask: Tensor,
    *tables: Tensor,
) -> list[Tensor]:
    """Attend and feed forward side by side over video and text as one row of tokens."""
    joined = cat([x, text], 1)
    shift, scale, gate = split_signal(run, signal, 3)
    normed = modulate_rows(joined, shift, scale)
    wide = layers.project(run, normed, int(dims.hidden * dims.mlp_ratio), bias=True)
    wide = functional.activation("gelu_tanh", wide)

    video_tokens = x.shape[1]
    tokens = joined.shape[1]
    pieces = [normed.slice(1, 0, video_tokens), normed.slice(1, video_tokens, tokens)]
    q, k, v = _project_heads(dims, run, cat(pieces, 1), ())
    q, k = [_rotate_video(part, video_tokens, tables) for part in (q, k)]
    out = _attend_masked(run, q, k, v, mask)
    merged = cat(
        [cat([out.slice(1, 0, video_tokens), out.slice(1, video_tokens, tokens)], 1), wide], 2
    )
    joined = gate * layers.project(run, merged, dims.hidden, bias=True) + joined
    return [joined.slice(1, 0, video_tokens), joined.slice(1, video_tokens, tokens)]


def _rotate_video(
    heads: Tensor,
    video_tokens: int,
    tables: Sequence[Tensor],
) -> Tensor:
    """Rotate the tokens of the video, which come first, and join those of the text again."""
    video = rotate_pairs(heads.slice(1, 0, video_tokens), *spread_tables(tables))
    return cat([video, heads.slice(1, video_tokens, heads.shape[1])], 1)


def _project_heads(
    dims: HunyuanVideoDims,
    run: PassSettings,
    x: Tensor,
    tables: Sequence[Tensor],
) -> list[Tensor]:
    """Return queries, keys and values, ``[batch, length, heads, dim]``; the first two are normed,
    and rotated where there are tables.
    """
    parts = [layers.project(run, x, dims.hidden, bias=True) for _ in range(3)]
    q, k, v = [part.view(*part.shape[:2], dims.heads, dims.head_dim) for part in parts]
    q, k = [layers.rms_norm(run, part) for part in (q, k)]
    if tables:
        q, k = [rotate_pairs(part, *spread_tables(tables)) for part in (q, k)]
    return [q, k, v]


def _attend_masked(
    run: PassSettings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
) -> Tensor:
    heads_first = [part.transpose(1, 2) for part in (q, k, v)]
    return layers.attend(run, *heads_first, causal=False, terms=layers.ScoreTerms(mask=mask))
