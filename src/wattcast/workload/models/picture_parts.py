"""Networks around a denoiser: the text tower of CLIP, and the decoder that turns a latent into a
picture.
"""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    fill,
    pointwise,
)


@dataclass(frozen=True)
class ClipTextDims:
    """Published dimensions of CLIP's text tower, as pipelines of pictures use it."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int = 49408
    max_positions: int = 77
    projection: int = 0  # width that the summary of the text is projected to; 0: it is left as is
    activation: str = "quick_gelu"


def trace_clip_text(
    dims: ClipTextDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace the tokens of every text, and the vector of its last one."""
    style = layers.PrenormStyle(
        heads=dims.heads,
        width=dims.intermediate,
        activation=dims.activation,
        causal=True,
        wide_softmax=True,
    )

    def embed(tape: Tape) -> list[Tensor]:
        x = layers.embed(run, tape, dims.vocab, dims.hidden)
        table = tape.parameter(dims.max_positions, dims.hidden, dtype=run.dtype)
        x = x + functional.embedding(table, (1, run.length))
        return [x, *layers.build_mask(tape, run)]

    def layer(
        tape: Tape,
        x: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        return layers.prenorm_layer(run, style, x, mask)

    def head(tape: Tape, x: Tensor) -> Tensor:
        x = layers.layer_norm(run, x)
        last = functional.pick_rows(x.view(-1, dims.hidden), _find_last_tokens(run, tape))
        return layers.project(run, last, dims.projection) if dims.projection else last

    program.stack(embed, layer, head, dims.layers)


def _find_last_tokens(run: PassSettings, tape: Tape) -> int:
    """Find the end of every text, which has the largest number of all tokens; return their
    count.
    """
    fill(tape, (run.batch,), Dtype.INT64)
    tokens = tape.empty((run.batch, run.length), Dtype.INT64)
    ids = pointwise("cast", tokens, out_dtype=Dtype.INT32)
    write = run.batch * Dtype.INT64.byte
    find_largest = Elementwise("max", ids.numel, dtype=Dtype.INT32, write=write)
    tape.launch(find_largest, (ids,), (run.batch,), Dtype.INT64)
    return run.batch


@dataclass(frozen=True)
class VaeDecoderDims:
    """Published dimensions of the decoder of AutoencoderKL: each level but the last doubles the
    sides.
    """

    widths: tuple[int, ...] = (128, 256, 512, 512)  # from the picture down to the latent
    blocks: int = 2  # residual blocks a level of the encoder; one more on the way up
    channels: int = 4  # of the latent
    mixed: bool = True  # channels of the latent are mixed by a 1x1 convolution first
    image: int = 64  # latent pixels


def trace_vae_decoder(
    dims: VaeDecoderDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace the pictures of ``run.batch`` latents."""
    widest = dims.widths[-1]

    def enter(tape: Tape) -> Tensor:
        x = tape.picture((run.batch, dims.channels, run.image, run.image), run.dtype)
        if dims.mixed:
            x = functional.convolve(x, dims.channels, 1, bias=True)
        x = functional.convolve(x, widest, 3, bias=True)
        x = _add_residual(x, widest)
        x = _attend_pixels(run, x)
        return _add_residual(x, widest)

    def level(
        tape: Tape,
        x: Tensor,
        width: int,
        doubled: bool,
    ) -> Tensor:
        for _ in range(dims.blocks + 1):
            x = _add_residual(x, width)
        if doubled:
            x = functional.convolve(functional.upsample(x), width, 3, bias=True)
        return x

    (x,) = program.section("middle", enter)
    for number, width in reversed(list(enumerate(dims.widths))):
        (x,) = program.section(
            f"up{number}",
            lambda tape, x, width=width, number=number: level(tape, x, width, number > 0),
            x,
        )
    program.section("head", lambda tape, x: _norm_convolve(x, 3), x)


def _norm_convolve(x: Tensor, width: int) -> Tensor:
    normed = functional.activation("silu", functional.group_norm(x))
    return functional.convolve(normed, width, 3, bias=True)


def _add_residual(x: Tensor, width: int) -> Tensor:
    """Convolve twice and add the input, through a 1x1 where the width changes.

    The sum is scaled in a kernel of its own, as diffusers does even by 1.
    """
    with x.tape.scope("residual"):
        y = _norm_convolve(_norm_convolve(x, width), width)
        kept = x if x.shape[1] == width else functional.convolve(x, width, 1, bias=True)
        return (kept + y) * 1.0


def _attend_pixels(run: PassSettings, x: Tensor) -> Tensor:
    """Let all pixels attend to one another, in a single head as wide as the network."""
    n, c, h, w = x.shape
    with x.tape.scope("attention"):
        pixels = x.view(n, c, h * w)
        normed = functional.group_norm(pixels).transpose(1, 2)
        q, k, v = [
            layers.split_heads(layers.project(run, normed, c, bias=True), c) for _ in range(3)
        ]
        out = layers.attend(run, q, k, v, causal=False)
        out = layers.project(run, out, c, bias=True)
        return (out.transpose(1, 2).view(n, c, h, w) + x) * 1.0
