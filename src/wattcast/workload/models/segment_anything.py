"""Segment Anything: an image encoder with windows, and a decoder of masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from wattcast.core import Dtype, bad_value
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.image_models import (
    cut_windows,
    join_windows,
    norm_channels,
    pad_picture,
)
from wattcast.workload.operator_types import Conv2d, Layout
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    fill,
    pointwise,
)

_MASKS = 4  # one mask, and three to choose from
_DECODER_HEADS = 8
_DECODER_LAYERS = 2
_TERMS = layers.ScoreTerms(wide_softmax=True)


@dataclass(frozen=True)
class SamDims:
    """Published dimensions of Segment Anything."""

    layers: int
    full_layers: int  # that see the whole picture
    hidden: int
    heads: int
    intermediate: int
    window: int = 14
    patch: int = 16
    image: int = 1024
    channels: int = 3
    out: int = 256  # channels of the encoded picture, and width of the decoder
    decoder_intermediate: int = 2048


def trace_sam(
    dims: SamDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace the image encoder, and the decoder of masks for one point of each picture."""
    if run.training:
        raise bad_value("phase", "forward: gradients of Segment Anything are not known", "train")
    side = run.image // dims.patch

    def embed_places(tape: Tape) -> Tensor:
        return _embed_grid(run, tape, side, dims.out)

    def embed(tape: Tape) -> Tensor:
        x = layers.cut_patches(
            run,
            tape,
            dims.channels,
            dims.hidden,
            dims.patch,
        )
        places = tape.parameter(
            1,
            side,
            side,
            dims.hidden,
            dtype=run.dtype,
        )
        return x.permute(0, 2, 3, 1) + places

    def layer(
        tape: Tape,
        x: Tensor,
        window: int,
    ) -> Tensor:
        """Attend inside windows (0: everywhere), then feed forward."""

        def attention(y: Tensor) -> Tensor:
            return _attend_in_windows(dims, run, y, window) if window else _attend(dims, run, y)

        def mlp(y: Tensor) -> Tensor:
            return layers.feed_forward(run, y, dims.intermediate, "gelu")

        return layers.add_parts(run, x, attention=attention, mlp=mlp)

    def neck(tape: Tape, x: Tensor) -> Tensor:
        x = norm_channels(run, functional.convolve(x.permute(0, 3, 1, 2), dims.out, 1))
        return norm_channels(run, functional.convolve(x, dims.out, 3))

    def decode(
        tape: Tape,
        x: Tensor,
        places: Tensor,
    ) -> Tensor:
        return _decode_masks(dims, run, x, places)

    (places,) = program.section("positions", embed_places)
    (x,) = program.section("embedding", embed)
    window_layer = partial(layer, window=dims.window)
    full_layer = partial(layer, window=0)
    window_layers = dims.layers - dims.full_layers
    if window_layers:
        (x,) = program.section("window layers", window_layer, x, repeat=window_layers)
    if dims.full_layers:
        (x,) = program.section("layers", full_layer, x, repeat=dims.full_layers)
    (x,) = program.section("neck", neck, x)
    program.section("masks", decode, x, places)


def _attend_in_windows(
    dims: SamDims,
    run: PassSettings,
    x: Tensor,
    window: int,
) -> Tensor:
    side = x.shape[1]
    windows = cut_windows(pad_picture(x, window), window)
    y = join_windows(_attend(dims, run, windows), run.batch, window)
    return y.slice(1, 0, side).slice(2, 0, side).contiguous()


def _attend(
    dims: SamDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    """Attend over ``[n, s, s, c]``.

    A bias of the distance of rows and of columns depends on the query."""
    n, side, _, width = x.shape
    heads = dims.heads
    dim = dims.hidden // heads
    tokens = side * side
    fused = layers.project(run, x, 3 * width, bias=True).view(
        n,
        tokens,
        3,
        heads,
        dim,
    )
    parts = fused.permute(
        2,
        0,
        3,
        1,
        4,
    ).reshape(3, n * heads, tokens, dim)
    q = parts.select(0)
    k = parts.select(0)
    v = parts.select(0)
    bias = _bias_distances(run, q.view(n * heads, side, side, dim))
    if run.flash:
        bias.reshape(n, heads, tokens, tokens)
        shape = (n, heads, tokens, dim)
        out = functional.attention(
            q.view(*shape),
            k.view(*shape),
            v.view(*shape),
            causal=False,
            masked=True,
        )
    else:
        scores = functional.matmul(q * 0.125, k.transpose(1, 2))
        scores = scores + bias.reshape(n * heads, tokens, tokens)
        weights = functional.softmax(scores, wide=True).to(x.dtype)
        out = functional.matmul(weights, v).view(n, heads, tokens, dim)
    merged = out.transpose(1, 2).reshape(n, side, side, width)
    return layers.project(run, merged, width, bias=True)


def _bias_distances(run: PassSettings, q: Tensor) -> Tensor:
    """Return the bias of rows and columns of queries ``[n·heads, s, s, dim]``."""
    many, side, _, dim = q.shape
    row_table = _distance_table(run, q.tape, side, dim)
    column_table = _distance_table(run, q.tape, side, dim)
    by_row = q.permute(1, 0, 2, 3).reshape(side, -1, dim)
    rows = functional.matmul(by_row, row_table.transpose(1, 2))
    by_column = q.permute(2, 0, 1, 3).reshape(side, -1, dim)
    columns = functional.matmul(by_column, column_table.transpose(1, 2))
    rows = rows.view(side, many, side, side).permute(1, 0, 2, 3)
    columns = columns.view(side, many, side, side).permute(1, 2, 0, 3)
    return rows.unsqueeze(4) + columns.unsqueeze(3)


def _distance_table(
    run: PassSettings,
    tape: Tape,
    side: int,
    dim: int,
) -> Tensor:
    """Return a learned vector for each pair of places along a side, ``[s, s, dim]``."""
    weight = tape.parameter(2 * side - 1, dim, dtype=run.dtype)
    table = pointwise("copy", weight.view(1, dim, -1)).view(-1, dim)
    query = pointwise("scale", fill(tape, (side,), Dtype.INT64), out_dtype=Dtype.FP32)
    key = pointwise("scale", fill(tape, (side,), Dtype.INT64), out_dtype=Dtype.FP32)
    distance = pointwise("sub", query.view(side, 1), key.view(1, side))
    pointwise("cast", pointwise("shift", distance), out_dtype=Dtype.INT64)
    return functional.pick_rows(table, side * side).view(side, side, dim)


def _embed_places(
    run: PassSettings,
    places: Tensor,
    width: int,
    tied: bool = False,
) -> Tensor:
    """Turn places ``[..., 2]`` into sines and cosines of random frequencies."""
    weight = places.tape.parameter(width // 2, 2, dtype=run.dtype, tied=tied)
    for name in ("copy", "scale", "shift"):
        places = pointwise(name, places)
    angle = pointwise("scale", functional.linear(places.to(run.dtype), weight))
    return cat([pointwise("sin", angle), pointwise("cos", angle)], -1)


def _embed_grid(
    run: PassSettings,
    tape: Tape,
    side: int,
    width: int,
) -> Tensor:
    """Return the vectors of all places of the encoded picture, a copy for each picture."""
    ones = fill(tape, (side, side), run.dtype)
    rows = pointwise("shift", pointwise("cumsum", ones))
    columns = pointwise("shift", pointwise("cumsum", ones))
    ways = [pointwise("scale", way).unsqueeze(-1) for way in (rows, columns)]
    vectors = _embed_places(run, cat(ways, -1), width).permute(2, 0, 1).unsqueeze(0)
    return vectors.expand(run.batch, width, side, side).clone()


def _embed_point(
    run: PassSettings,
    tape: Tape,
    width: int,
) -> Tensor:
    """Return the vectors of a point and of the one that pads it, ``[n, 2, width]``.

    Their labels choose what is added: no point, outside, inside, two corners."""
    fill(tape, (run.batch,), Dtype.INT32)
    corners = fill(tape, (run.batch, 2, 2), Dtype.FP32)
    for name in ("shift", "neg", "cat", "cat", "scale", "copy", "scale", "copy"):
        corners = pointwise(name, corners)
    x = _embed_places(run, corners, width, tied=True)
    no_point, outside, inside, _, _ = [tape.parameter(1, width, dtype=run.dtype) for _ in range(5)]
    label = tape.empty((run.batch, 2, 1), Dtype.FP32)

    def choose(choice: Tensor) -> Tensor:
        is_labelled = pointwise("compare", label, out_dtype=Dtype.BOOL)
        return pointwise("where", x, is_labelled, choice)

    x = choose(no_point)
    x = choose(fill(tape, x.shape, run.dtype))
    x = choose(x + outside)
    return choose(x + inside)


def _decode_masks(
    dims: SamDims,
    run: PassSettings,
    x: Tensor,
    places: Tensor,
) -> Tensor:
    """Let tokens of masks and points and the picture attend to each other twice.

    Each mask is a product of a token and the picture."""
    tape = x.tape
    width = dims.out
    n, _, side, _ = x.shape
    points = _embed_point(run, tape, width)
    quality_token = tape.parameter(1, width, dtype=run.dtype)
    mask_tokens = tape.parameter(_MASKS, width, dtype=run.dtype)
    learned = cat([quality_token, mask_tokens], 0).view(1, _MASKS + 1, width)
    prompt = cat([learned.expand(n, _MASKS + 1, width).clone(), points], 1)

    picture = (x + _embed_no_mask(run, tape, width)).clone()
    places = places.clone()
    picture = picture.view(n, width, side * side).transpose(1, 2)
    places = places.view(n, width, side * side).transpose(1, 2)

    tokens = prompt
    for number in range(_DECODER_LAYERS):
        query = tokens + prompt if number else tokens
        out = _cross_attend(
            run,
            query,
            query,
            tokens,
            width,
        )
        tokens = layers.layer_norm(run, tokens + out if number else out)
        query = tokens + prompt
        key = picture + places
        out = _cross_attend(
            run,
            query,
            key,
            picture,
            width // 2,
        )
        tokens = layers.layer_norm(run, tokens + out)
        inner = layers.feed_forward(run, tokens, dims.decoder_intermediate, "relu")
        tokens = layers.layer_norm(run, tokens + inner)
        query = tokens + prompt
        key = picture + places
        out = _cross_attend(
            run,
            key,
            query,
            tokens,
            width // 2,
        )
        picture = layers.layer_norm(run, picture + out)
    query = tokens + prompt
    key = picture + places
    out = _cross_attend(
        run,
        query,
        key,
        picture,
        width // 2,
    )
    tokens = layers.layer_norm(run, tokens + out)

    with tape.scope("upscale"):
        y = _double_sides(picture.transpose(1, 2).view(n, width, side, side), width // 4)
        y = functional.activation("gelu", norm_channels(run, y))
        y = functional.activation("gelu", _double_sides(y, width // 8))
    masks = cat([_predict(run, tokens, width, width // 8) for _ in range(_MASKS)], 1)
    _predict(run, tokens, width, _MASKS)  # how good each mask is
    return functional.matmul(masks, y.view(n, width // 8, -1))


def _embed_no_mask(
    run: PassSettings,
    tape: Tape,
    width: int,
) -> Tensor:
    """Return the vector that stands for no mask as an input.

    The weights of layers for a mask exist and do not run."""
    no_mask = tape.parameter(
        1,
        width,
        1,
        1,
        dtype=run.dtype,
    )
    for size in ((4, 4), (4, 1), (16, 16), (16, 1), (width, 17), (4, 2), (16, 2)):
        tape.parameter(*size, dtype=run.dtype)
    return no_mask


def _cross_attend(
    run: PassSettings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: int,
) -> Tensor:
    """Attend with heads that share a width of ``inner``."""
    width = q.shape[-1]
    dim = inner // _DECODER_HEADS
    heads = [
        layers.split_heads(layers.project(run, part, inner, bias=True), dim) for part in (q, k, v)
    ]
    out = layers.attend(run, *heads, causal=False, terms=_TERMS)
    return layers.project(run, out, width, bias=True)


def _predict(
    run: PassSettings,
    tokens: Tensor,
    width: int,
    features: int,
) -> Tensor:
    """Run three layers over one token."""
    h = tokens.slice(1, 0, 1)
    for _ in range(2):
        h = functional.activation("relu", layers.project(run, h, width, bias=True))
    return layers.project(run, h, features, bias=True)


def _double_sides(x: Tensor, filters: int) -> Tensor:
    """Run a transposed convolution of 2 by 2 with stride 2, and add its bias."""
    tape = x.tape
    n, c, h, w = x.shape
    weight = tape.parameter(
        c,
        filters,
        2,
        2,
        dtype=x.dtype,
    )
    bias = tape.parameter(filters, dtype=x.dtype)
    op = Conv2d(
        n=n,
        c=filters,
        k=c,
        h=2 * h,
        w=2 * w,
        r=2,
        s=2,
        stride=2,
        direction="dgrad",
        dtype=tape.convolution_dtype(x.dtype),
    )
    out = tape.launch(op, (x, weight), (n, filters, 2 * h, 2 * w))
    tape.emit_pointwise(
        "add",
        (out, bias),
        out,
        Layout.BROADCAST,
        (n * filters, None),
    )
    return out
