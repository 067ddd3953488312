"""Transformers that denoise videos by attention over the tokens of a text and of all frames in one
row: CogVideoX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.denoisers import (
    embed_waves,
    modulate,
    split_signal,
)
from wattcast.workload.models.text_denoisers import rotate_pairs
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import Tape, Tensor, cat, pointwise


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
