"""CLIP: a picture tower and a text tower that meet in one space."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wattcast.dtypes import Dtype
from wattcast.workload import layers, masks, products
from wattcast.workload.encoder import patches, prenorm_layer
from wattcast.workload.functional import divide, fill, power, total_last, unary
from wattcast.workload.graph import Elementwise
from wattcast.workload.pointwise import pointwise
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


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


def trace(dims: ClipDims, run: Run, stages: int = 1) -> Program:
    """As many texts as pictures, each through its tower; similarities of all pairs."""
    program = Program(run.training, run.tf32)
    text = replace(run, length=dims.text_length, past=0)

    def look(tape: Tape, x: Tensor) -> Tensor:
        return prenorm_layer(run, x, dims.vision_heads, 4 * dims.vision_hidden, dims.activation, wide_softmax=True)

    def read(tape: Tape, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return prenorm_layer(
            text, y, dims.text_heads, 4 * dims.text_hidden, dims.activation, causal=True, mask=mask,
            wide_softmax=True,
        )  # fmt: skip

    (x,) = program.section("vision.embedding", lambda tape: picture(dims, run, tape))
    (x,) = program.section("vision.layers", look, x, repeat=-(-dims.vision_layers // stages))
    (seen,) = program.section("vision.head", lambda tape, x: picture_vector(dims, run, x), x)
    y, *mask = program.section("text.embedding", lambda tape: words(dims, text, tape))
    (y,) = program.section("text.layers", read, y, *mask, repeat=-(-dims.text_layers // stages))
    program.section("head", lambda tape, y, seen: match(dims, text, y, seen), y, seen)
    return program


def picture(dims: ClipDims, run: Run, tape: Tape) -> Tensor:
    """Patches with positions, normed."""
    return layers.layer_norm(run, patches(run, tape, dims.channels, dims.vision_hidden, dims.patch, bias=False))


def picture_vector(dims: ClipDims, run: Run, x: Tensor) -> Tensor:
    """The class token in the shared space."""
    return layers.project(run, layers.layer_norm(run, x.select(1)), dims.shared)


def words(dims: ClipDims, run: Run, tape: Tape) -> list[Tensor]:
    """Token and position rows; the mask where one is needed."""
    x = layers.embed(run, tape, dims.vocab, dims.text_hidden)
    x = x + layers.embed(run, tape, dims.text_length, dims.text_hidden, batch=1)
    return [x, *([masks.causal(tape, run)] if masks.needs_mask(run) else [])]


def match(dims: ClipDims, run: Run, y: Tensor, seen: Tensor) -> Tensor:
    """The text's last token, both vectors scaled to length one, all dot products."""
    y = layers.layer_norm(run, y)
    told = layers.project(run, last_word(dims, run, y), dims.shared)
    logits = products.linear(unit(told), unit(seen))
    scale = unary("exp", y.tape.parameter(1, dtype=run.dtype), lambda g: g * 1.0)
    logits = logits * scale
    if not run.training:
        return logits
    return products.cross_entropy(logits) + products.cross_entropy(logits.transpose(0, 1).contiguous())


def last_word(dims: ClipDims, run: Run, y: Tensor) -> Tensor:
    """The row of the end-of-text token, found by comparing all token numbers."""
    fill(y.tape, (run.batch,), Dtype.INT64)
    ids = pointwise("cast", y.tape.empty(y.shape[:2], Dtype.INT64), out_dtype=Dtype.INT32)
    found = pointwise("cast", pointwise("compare", ids, out_dtype=Dtype.BOOL), out_dtype=Dtype.INT32)
    places = found.tape.empty((run.batch,), Dtype.INT64)
    found.tape.emit(Elementwise("max", found.numel, dtype=Dtype.INT32, write=places.byte), (found,), (places,))
    return products.pick_rows(y.view(-1, dims.text_hidden), run.batch)


def unit(x: Tensor) -> Tensor:
    """x over its length."""
    square = total_last(power(x, 2))
    return divide(x, unary("sqrt", square, lambda g: pointwise("div", g, square * 2.0)))
