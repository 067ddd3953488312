"""Networks that read pictures: ResNet, ConvNeXt, MobileViT, CLIP and SigLIP, and Swin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from wattcast.core import Dtype, bad_value
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.classic_transformers import PatchStyle, embed_patches
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    fill,
    pointwise,
    reduce,
    unary,
)


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


def trace_resnet(
    dims: ResnetDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.batch`` pictures."""

    def stem(tape: Tape) -> Tensor:
        picture = tape.picture((run.batch, dims.channels, run.image, run.image), run.dtype)
        return functional.max_pool(
            _conv_norm(
                picture,
                dims.stem,
                7,
                "relu",
                stride=2,
            ),
            3,
            2,
            1,
        )

    def block(
        tape: Tape,
        x: Tensor,
        width: int,
        stride: int = 1,
        projected: bool = False,
    ) -> Tensor:
        """Convolve 1x1 down, 3x3, 1x1 up, and add the input (projected where the shape changes)."""
        shortcut = _conv_norm(x, width, 1, stride=stride) if projected else x
        y = _conv_norm(x, width // dims.reduction, 1, "relu")
        y = _conv_norm(
            y,
            width // dims.reduction,
            3,
            "relu",
            stride=stride,
        )
        return functional.activation("relu", _conv_norm(y, width, 1) + shortcut)

    (x,) = program.section("stem", stem)
    for number, (count, width) in enumerate(zip(dims.blocks, dims.widths, strict=True)):
        first = partial(
            block,
            width=width,
            stride=2 if number else 1,
            projected=True,
        )
        (x,) = program.section(f"stage{number}.first", first, x)
        (x,) = program.section(f"stage{number}", partial(block, width=width), x, repeat=count - 1)
    program.section(
        "head", lambda tape, x: layers.classify(run, functional.mean_pool(x), dims.classes), x
    )


def _conv_norm(
    x: Tensor,
    filters: int,
    size: int,
    function: str = "",
    *,
    stride: int = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve, norm over the batch, and activate where a function is given."""
    out = functional.batch_norm(
        functional.convolve(
            x,
            filters,
            size,
            stride=stride,
            groups=groups,
        )
    )
    return functional.activation(function, out) if function else out


@dataclass(frozen=True)
class ConvNextDims:
    """Published dimensions of ConvNeXt: depthwise convolutions, each with a feed-forward layer of
    its own.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    patch: int = 4
    channels: int = 3
    classes: int = 1000
    image: int = 224


def trace_convnext(
    dims: ConvNextDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.batch`` pictures."""

    def stem(tape: Tape) -> Tensor:
        return norm_channels(
            run,
            layers.cut_patches(
                run,
                tape,
                dims.channels,
                dims.widths[0],
                dims.patch,
            ),
        )

    def halve(
        tape: Tape,
        x: Tensor,
        width: int,
    ) -> Tensor:
        return functional.convolve(
            norm_channels(run, x),
            width,
            2,
            stride=2,
            padding=0,
            bias=True,
        )

    def block(tape: Tape, x: Tensor) -> Tensor:
        """Convolve each channel 7x7, norm, feed forward pixel by pixel, scale by learned factors,
        and add.
        """
        width = x.shape[1]
        y = functional.convolve(
            x,
            width,
            7,
            groups=width,
            bias=True,
        ).permute(0, 2, 3, 1)
        y = layers.feed_forward(run, layers.layer_norm(run, y), 4 * width, "gelu")
        y = y * tape.parameter(width, dtype=run.dtype)
        return x + y.permute(0, 3, 1, 2)

    (x,) = program.section("stem", stem)
    for number, (depth, width) in enumerate(zip(dims.depths, dims.widths, strict=True)):
        if number:
            (x,) = program.section(f"stage{number}.first", partial(halve, width=width), x)
        (x,) = program.section(f"stage{number}", block, x, repeat=depth)
    norm = partial(layers.layer_norm, run)
    program.section(
        "head", lambda _, x: layers.classify(run, norm(functional.mean_pool(x)), dims.classes), x
    )


def norm_channels(run: PassSettings, x: Tensor) -> Tensor:
    """Norm every pixel over its channels, which come last for it and first again after it."""
    return layers.layer_norm(run, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class MobileVitDims:
    """Published dimensions of MobileViT: inverted residuals, then convolution and transformer in
    turn.
    """

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


def trace_mobilevit(
    dims: MobileVitDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.batch`` pictures."""

    def whole(tape: Tape) -> Tensor:
        x = tape.picture((run.batch, dims.channels, run.image, run.image), run.dtype)
        x = _conv_norm(
            x,
            dims.stem,
            3,
            "silu",
            stride=2,
        )
        x = _inverted_residual(dims, x, dims.widths[0], 1)
        for step in range(3):
            x = _inverted_residual(dims, x, dims.widths[1], 2 if step == 0 else 1)
        for number, (hidden, depth) in enumerate(zip(dims.hidden, dims.depths, strict=True)):
            with tape.scope(f"stage{number + 2}"):
                x = _inverted_residual(dims, x, dims.widths[number + 2], 2)
                x = _attend_patches(
                    dims,
                    run,
                    x,
                    hidden,
                    depth,
                )
        x = _conv_norm(x, dims.last, 1, "silu")
        return layers.classify(run, functional.mean_pool(x), dims.classes)

    program.section("model", whole)


def _inverted_residual(
    dims: MobileVitDims,
    x: Tensor,
    width: int,
    stride: int,
) -> Tensor:
    """Convolve 1x1 to wider, 3x3 depthwise, 1x1 to narrower; add to the input where the shape
    stays.
    """
    expected = round(x.shape[1] * dims.expand)
    inner = max(
        8, int(expected + 4) // 8 * 8
    )  # the nearest multiple of 8, never a tenth below (as in MobileNet)
    inner = inner + 8 if inner < 0.9 * expected else inner
    y = _conv_norm(x, inner, 1, "silu")
    y = _conv_norm(
        y,
        inner,
        3,
        "silu",
        stride=stride,
        groups=inner,
    )
    y = _conv_norm(y, width, 1)
    return x + y if stride == 1 and x.shape[1] == width else y


def _attend_patches(
    dims: MobileVitDims,
    run: PassSettings,
    x: Tensor,
    hidden: int,
    depth: int,
) -> Tensor:
    """Let pixels at the same place of every patch attend to one another; fold the result back and
    mix it in.

    Unfolding, ``[n, c, h, w]`` -> ``[n·patch², patches, c]``, takes two transposing copies, as
    Hugging Face does it."""
    n, width, h, w = x.shape
    patch = dims.patch
    rows = h // dims.patch
    columns = w // dims.patch
    y = functional.convolve(_conv_norm(x, width, 3, "silu"), hidden, 1)
    y = y.reshape(n * hidden * rows, patch, columns, patch).transpose(1, 2)
    y = y.reshape(n, hidden, rows * columns, patch * patch).transpose(1, 3)
    y = y.reshape(n * patch * patch, rows * columns, hidden)
    style = layers.PrenormStyle(dims.heads, int(hidden * dims.mlp_ratio), "silu")
    for _ in range(depth):
        y = layers.prenorm_layer(run, style, y)
    y = layers.layer_norm(run, y)
    y = y.contiguous().view(n, patch * patch, rows * columns, hidden).transpose(1, 3)
    y = y.reshape(n * hidden * rows, columns, patch, patch).transpose(1, 2)
    y = _conv_norm(y.reshape(n, hidden, h, w), width, 1, "silu")
    return _conv_norm(cat([x, y], 1), width, 3, "silu")


@dataclass(frozen=True)
class ClipDims:
    """Published dimensions of CLIP or SigLIP: a picture tower and a text tower."""

    vision_layers: int
    vision_hidden: int
    vision_heads: int
    patch: int
    text_layers: int
    text_hidden: int
    text_heads: int
    shared: int
    vocab: int
    vision_intermediate: int = 0  # 0: four times the width
    text_intermediate: int = 0
    text_length: int = 77
    image: int = 224
    channels: int = 3
    activation: str = "quick_gelu"
    # SigLIP: attention pools a picture, texts are read both ways and end with their last token
    pooled: bool = False


def trace_clip(
    dims: ClipDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace as many texts as pictures, each through its tower, and the similarities of all
    pairs.
    """
    if dims.pooled and run.training:
        raise bad_value("phase", "forward: gradients of SigLIP's two towers are not known", "train")
    text = replace(run, length=dims.text_length, past=0)

    patch_style = PatchStyle(
        channels=dims.channels,
        hidden=dims.vision_hidden,
        patch=dims.patch,
        bias=dims.pooled,
        class_token=not dims.pooled,
        looked_up=True,
    )

    def embed_picture(tape: Tape) -> Tensor:
        patches = embed_patches(run, tape, patch_style)
        return patches if dims.pooled else layers.layer_norm(run, patches)

    def vision_head(tape: Tape, x: Tensor) -> Tensor:
        if dims.pooled:
            return _pool_by_attention(dims, run, layers.layer_norm(run, x))
        return layers.project(run, layers.layer_norm(run, x.select(1)), dims.shared)

    def embed_text(tape: Tape) -> list[Tensor]:
        y = layers.embed(text, tape, dims.vocab, dims.text_hidden)
        y = y + layers.embed(
            text,
            tape,
            dims.text_length,
            dims.text_hidden,
            batch=1,
        )
        return [y, *([] if dims.pooled else layers.build_mask(tape, text))]

    (x,) = program.section("vision.embedding", embed_picture)
    vision_style = layers.PrenormStyle(
        heads=dims.vision_heads,
        width=dims.vision_intermediate or 4 * dims.vision_hidden,
        activation=dims.activation,
        wide_softmax=True,
        input_first=dims.pooled,
    )
    text_style = layers.PrenormStyle(
        heads=dims.text_heads,
        width=dims.text_intermediate or 4 * dims.text_hidden,
        activation=dims.activation,
        causal=not dims.pooled,
        wide_softmax=True,
    )

    def vision_layer(tape: Tape, x: Tensor) -> Tensor:
        return layers.prenorm_layer(run, vision_style, x)

    def text_layer(
        tape: Tape,
        y: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        return layers.prenorm_layer(text, text_style, y, mask)

    (x,) = program.section("vision.layers", vision_layer, x, repeat=dims.vision_layers)
    (seen,) = program.section("vision.head", vision_head, x)
    y, *mask = program.section("text.embedding", embed_text)
    (y,) = program.section(
        "text.layers",
        text_layer,
        y,
        *mask,
        repeat=dims.text_layers,
    )
    program.section("head", lambda tape, y, seen: _compare_towers(dims, text, y, seen), y, seen)


def _pool_by_attention(
    dims: ClipDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    """Let a learned token attend to all patches, by torch.nn.MultiheadAttention, and add a
    feed-forward network.
    """
    tape, (batch, tokens, hidden) = x.tape, x.shape
    heads = dims.vision_heads
    dim = hidden // dims.vision_heads
    probe = tape.parameter(1, 1, hidden, dtype=run.dtype).expand(batch, 1, hidden).contiguous()
    q = layers.project(run, probe, hidden, bias=True) * 1.0
    offset = tape.parameter(2 * hidden, dtype=run.dtype)
    keys_and_values = layers.project(run, x.transpose(0, 1).contiguous(), 2 * hidden) + offset
    keys_and_values = pointwise("copy", keys_and_values).view(
        2, batch * heads, tokens, dim
    )  # keys, then values
    k, v = (
        keys_and_values.slice(0, place, place + 1).view(batch * heads, tokens, dim)
        for place in (0, 1)
    )
    weights = functional.softmax(
        functional.matmul(q.view(batch * heads, 1, dim), k.transpose(1, 2))
    )
    x = layers.project(run, functional.matmul(weights, v).view(batch, 1, hidden), hidden, bias=True)
    reduce("mean", weights, (batch, 1, tokens))  # the heads' mean is returned with it
    width = dims.vision_intermediate or 4 * hidden
    return (x + layers.feed_forward(run, layers.layer_norm(run, x), width, dims.activation)).select(
        1
    )


def _compare_towers(
    dims: ClipDims,
    run: PassSettings,
    y: Tensor,
    seen: Tensor,
) -> Tensor:
    """Scale the vectors of texts and pictures to length one and compute all dot products."""
    tape = y.tape
    y = layers.layer_norm(run, y)
    if dims.pooled:
        y = layers.project(run, y.select(1), dims.shared, bias=True)
        y, seen = (functional.divide(x, functional.reduce_last("sum", x)) for x in (y, seen))
        factor, offset = (tape.parameter(1, dtype=run.dtype) for _ in range(2))
        return functional.linear(y, seen) * unary("exp", factor, lambda g: g) + offset
    # the end-of-text token is found by comparing all token numbers
    fill(tape, (run.batch,), Dtype.INT64)
    ids = pointwise("cast", tape.empty(y.shape[:2], Dtype.INT64), out_dtype=Dtype.INT32)
    similarity = pointwise(
        "cast", pointwise("compare", ids, out_dtype=Dtype.BOOL), out_dtype=Dtype.INT32
    )
    write = run.batch * Dtype.INT64.byte
    tape.launch(
        Elementwise("max", similarity.numel, dtype=Dtype.INT32, write=write),
        (similarity,),
        (run.batch,),
        Dtype.INT64,
    )
    last = functional.pick_rows(y.view(-1, dims.text_hidden), run.batch)
    logits = functional.linear(
        _to_unit_length(layers.project(run, last, dims.shared)), _to_unit_length(seen)
    )
    logits = logits * unary("exp", tape.parameter(1, dtype=run.dtype), lambda g: g * 1.0)
    if not run.training:
        return logits
    return functional.cross_entropy(logits) + functional.cross_entropy(
        logits.transpose(0, 1).contiguous()
    )


def _to_unit_length(x: Tensor) -> Tensor:
    square = functional.reduce_last("sum", functional.power(x, 2))
    return functional.divide(x, unary("sqrt", square, lambda g: pointwise("div", g, square * 2.0)))


@dataclass(frozen=True)
class SwinDims:
    """Published dimensions of Swin: attention inside windows, which every second layer shifts by
    half of one.
    """

    hidden: int  # of the first stage; each further one has twice as much
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int = 7
    patch: int = 4
    image: int = 224
    channels: int = 3
    mlp_ratio: float = 4.0
    activation: str = "gelu"
    classes: int = 1000


def trace_swin(
    dims: SwinDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.batch`` pictures; sides that are no multiple of the window are
    padded.
    """
    side = run.image // dims.patch

    def embed(tape: Tape) -> Tensor:
        x = layers.cut_patches(
            run,
            tape,
            dims.channels,
            dims.hidden,
            dims.patch,
        )
        return layers.layer_norm(run, x.view(run.batch, dims.hidden, side * side).transpose(1, 2))

    def keep_as_picture(x: Tensor, side: int) -> None:
        x.view(run.batch, side, side, -1).permute(0, 3, 1, 2).contiguous()

    def merge(tape: Tape, x: Tensor) -> Tensor:
        """Join four neighbours to one token of twice the width."""
        x = x.view(
            run.batch,
            side,
            2,
            side,
            2,
            x.shape[-1],
        )
        x = cat([x.select(4).select(2) for _ in range(4)], -1).view(run.batch, side * side, -1)
        x = layers.project(run, layers.layer_norm(run, x), x.shape[-1] // 2)
        keep_as_picture(x, side)
        return x

    def head(tape: Tape, x: Tensor) -> Tensor:
        keep_as_picture(x, side)
        x = layers.layer_norm(run, x).transpose(1, 2)
        return layers.classify(run, functional.mean_pool(x.unsqueeze(-1)), dims.classes)

    (x,) = program.section("embedding", embed)
    for number, (depth, heads) in enumerate(zip(dims.depths, dims.heads, strict=True)):
        if number:
            side //= 2
            (x,) = program.section(f"stage{number}.first", merge, x)
        for label, repeat, shifted in (
            ("", (depth + 1) // 2, False),
            (".shifted", depth // 2, side > dims.window),
        ):
            if repeat:
                body = _swin_layer(
                    dims,
                    run,
                    heads,
                    side,
                    shifted,
                )
                (x,) = program.section(f"stage{number}{label}", body, x, repeat=repeat)
    program.section("head", head, x)


def _swin_layer(
    dims: SwinDims,
    run: PassSettings,
    heads: int,
    side: int,
    shifted: bool,
) -> Callable[[Tape, Tensor], Tensor]:
    """Return a layer: x + attention inside windows, with a bias for each distance, then
    feed_forward(norm(x)) + x.
    """
    window = min(dims.window, side)

    def shift(x: Tensor) -> Tensor:
        return unary("copy", x, lambda g: pointwise("copy", g)) if shifted else x

    def attention(x: Tensor) -> Tensor:
        shape = x.shape
        tape = x.tape
        y = x.view(run.batch, side, side, shape[-1])
        y = cut_windows(shift(pad_picture(y, window)), window).view(-1, window**2, shape[-1])
        table = tape.parameter((2 * window - 1) ** 2, heads, dtype=run.dtype)
        bias = (
            functional.pick_rows(table, window**4)
            .view(window**2, window**2, heads)
            .permute(2, 0, 1)
        )
        bias = bias.contiguous().unsqueeze(0)
        if shifted:
            bias = bias + _separate_regions(run, tape, -(-side // window) * window, window)
        terms = layers.ScoreTerms(bias=bias, wide_softmax=True)
        y = layers.self_attention(run, y, heads, terms=terms)
        y = shift(join_windows(y, run.batch, window))
        return (
            y if y.shape[1] == side else y.slice(1, 0, side).slice(2, 0, side).contiguous()
        ).view(*shape)

    def layer(tape: Tape, x: Tensor) -> Tensor:
        x = layers.add_parts(run, x, attention=attention)
        width = int(dims.mlp_ratio * x.shape[-1])
        mlp = partial(layers.feed_forward, run, width=width, function=dims.activation)
        return layers.add_parts(run, x, input_first=False, mlp=mlp)

    return layer


def pad_picture(x: Tensor, window: int) -> Tensor:
    """Copy ``[n, h, w, c]`` into zeros whose sides are multiples of the window.

    Hugging Face copies in any case.
    """
    n, h, w, c = x.shape
    rows = -(-h // window) * window
    columns = -(-w // window) * window
    out = x.pad_back((n, rows, columns, c))
    return out.with_gradient(lambda g: g.slice(1, 0, h).slice(2, 0, w), x)


def cut_windows(x: Tensor, window: int) -> Tensor:
    """Copy ``[n, h, w, c]`` to ``[n·windows, window, window, c]``."""
    n, h, w, c = x.shape
    x = (
        x.view(
            n,
            h // window,
            window,
            w // window,
            window,
            c,
        )
        .transpose(2, 3)
        .contiguous()
    )
    return x.view(-1, window, window, c)


def join_windows(
    x: Tensor,
    pictures: int,
    window: int,
) -> Tensor:
    """Copy windows of square pictures back to ``[n, h, w, c]``."""
    count = round((x.numel // (x.shape[-1] * pictures * window**2)) ** 0.5)
    x = (
        x.view(
            pictures,
            count,
            count,
            window,
            window,
            x.shape[-1],
        )
        .transpose(2, 3)
        .contiguous()
    )
    return x.view(pictures, count * window, count * window, x.shape[-1])


def _separate_regions(
    run: PassSettings,
    tape: Tape,
    side: int,
    window: int,
) -> Tensor:
    """Return what keeps tokens apart that a shift brought into one window.

    It is ``[n·windows, 1, tokens, tokens]``.
    """
    tokens = window**2
    rows = fill(tape, (side,), Dtype.INT64)
    columns = fill(tape, (side,), Dtype.INT64)
    row_region = _number_regions(rows)
    column_region = _number_regions(columns)
    row_region = pointwise("scale", row_region).view(1, side, 1, 1)
    regions = pointwise("add", row_region, column_region.view(1, 1, side, 1))
    region = cut_windows(pointwise("cast", regions, out_dtype=run.dtype), window)
    region = region.view(-1, tokens)
    apart = pointwise("sub", region.unsqueeze(1), region.unsqueeze(2))
    for _ in range(2):
        differs = pointwise("compare", apart, out_dtype=Dtype.BOOL)
        apart = pointwise("masked_fill", apart, differs)
    windows = apart.shape[0]
    apart = apart.view(
        1,
        windows,
        1,
        tokens,
        tokens,
    )
    apart = apart.expand(
        run.batch,
        windows,
        1,
        tokens,
        tokens,
    )
    return apart.reshape(run.batch * windows, 1, tokens, tokens)


def _number_regions(place: Tensor) -> Tensor:
    """Return which of three regions along a side each place belongs to."""
    is_in_second = pointwise("compare", place, out_dtype=Dtype.BOOL).to(Dtype.INT64)
    is_in_third = pointwise("compare", place, out_dtype=Dtype.BOOL).to(Dtype.INT64)
    return pointwise("add", is_in_second, is_in_third)
