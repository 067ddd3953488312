"""Convolutions -> columns of work: implicit products with the layout kernels around them, and depthwise kernels.

An implicit product has M = batch·p·q, N = output channels, K = c·r·s, and reads the image, not the im2col matrix;
that of the image's gradient M = batch·h·w, N = c, K = k·r·s (of strides beyond one, the taps that meet a pixel), that
of the filter's M = k, N = c·r·s, K = batch·p·q.
Tensor kernels want channels last in multiples of 16 bytes, fp32 ones channels first: images and filters that lie
otherwise are turned by kernels of 32 by 32 elements a block, or padded. Blocks of all kernels are cuDNN's and
PyTorch's own, as the grids in the H200 database have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.choose import NOT_RUN, VECTOR, pick
from wattcast.kernels.depthwise import put_depthwise
from wattcast.kernels.gemm import fastest, features, tiled
from wattcast.kernels.picks import Label, Picks, blended
from wattcast.kernels.products import FAST_BYTE, SIMT, choice_columns, code_of
from wattcast.kernels.tiles import HOPPER, KINDS
from wattcast.kernels.work import Columns, Part, Reference, Style, Told, alignment, columns_of, log2, resident
from wattcast.workload.graph import Conv2d

_TURN = 32.0  # side of what a block of a layout kernel turns
# From the times of 300 layout kernels in the H200 database: how much slower than turning an element it is to pad one,
# to turn and pad one of a filter at once; and the fixed time of each over that of the kernel of the product.
_SLOW_PAD, _SLOW_TRANSFORM = 1.6, 7.5
_LIGHT, _LIGHT_TRANSFORM = 0.35, 2.0
_TAP_BYTE = (
    64.0  # of one filter tap that an implicit product takes at a time; twice as many of Hopper's with many channels
)
_WHOLE_TAPS = np.array([kind in ("direct", "simt", "plain") for kind in KINDS])
_MANY_PIXELS = 6000.0
CHOICE_COLUMNS = (
    "m",
    "n",
    "k",
    "small_m",
    "small_out",
    "dtype",
    "log_c",
    "log_rs",
    "stride",
    "channels_last",
    "align_c",
    "align_k",
    "log_batch",
    "log_side",
    "dgrad",
    "wgrad",
)


class _Sizes(NamedTuple):
    """Arrays ``(row,)``."""

    n: Array  # output channels of a group
    c: Array  # input channels of a group
    rs: Array
    product_m: Array  # sides of the implicit product of a group
    product_n: Array
    product_c: Array  # channels of a tap that it walks over; pixels, for the gradient of a filter
    product_rs: Array  # taps that it walks over
    groups: Array
    width: Array
    image: Array  # bytes
    weight: Array
    out: Array
    last: Array  # 1: channels lie last
    simt: Array  # 1: a format for CUDA cores
    depthwise: Array  # 1: a channel a group
    batch: Array
    side: Array  # pixels of an image
    out_side: Array
    high: Array
    stride: Array
    touched: Array  # share of the image's pixels under any filter: strides beyond the filter leave pixels out
    code: Array  # of the number format
    dgrad: Array  # 1: the gradient of the image
    wgrad: Array  # 1: the gradient of the filter
    read: Array  # bytes
    write: Array

    @property
    def product(self) -> tuple[Array, Array, Array, Array]:
        """The implicit products: how many, M, N and K."""
        return self.groups, self.product_m, self.product_n, self.product_c * self.product_rs


def convolutions(ops: Sequence[Conv2d], told: Told, rate: Array, reference: Reference) -> Part:
    """Groups, work columns and features."""
    s = _sizes(ops)
    read, write = s.read - s.image * (1.0 - s.touched) * (s.dgrad == 0), s.write
    step, product, simt = FAST_BYTE / s.width, s.product, s.simt > 0
    picks = _picks(ops, told, s, rate, reference)
    # kernels that walk a tap at a time pad its channels
    tap = np.where(picks.kind == HOPPER, np.where(s.product_c > 32, 128.0, 64.0)[:, np.newaxis], _TAP_BYTE)
    tap = np.maximum(tap / s.width[:, np.newaxis], 16.0)
    deep = s.product_c[:, np.newaxis]
    k = s.product_rs[:, np.newaxis] * np.where(_WHOLE_TAPS.take(picks.kind), deep, np.ceil(deep / tap) * tap)
    tile = tiled(*product[:3], k, s.width, s.width, rate, picks, reference)
    plain = 1.0 - picks.of_kind("plain")
    wide = plain - np.where(s.width <= 2, picks.of_kind("direct"), 0.0)
    dense = 1.0 - s.depthwise
    turned = dense * np.where(simt, s.last, 1.0 - s.last) * plain
    pads = dense * (1.0 - s.simt) * s.last * wide
    padded_in, padded_out = pads * (s.c % step != 0), pads * (s.n % step != 0)
    moved, turns, launches = _layouts(s, turned, padded_in, padded_out, step)
    kept = resident(read + write + moved, reference.l2_byte)
    work = {
        "units": tile["units"],
        "unit_flop": tile["unit_flop"],
        "steps": tile["steps"],
        "launches": launches,
        "l2_byte": tile["load_byte"],
        "store_byte": write,
        "between_byte": moved,
        "turn_element": turns,
        "shared_byte": tile["shared_byte"] + write,
        "dram_read_byte": read * (1.0 - kept) + s.weight * kept,
        "dram_write_byte": write * (1.0 - kept),
        "slots": tile["slots"],
    }
    padding = k[:, 0] / product[3]
    names = [""] * len(ops)
    if s.depthwise.any():
        work, padding = {name: values.copy() for name, values in work.items()}, padding * dense
        put_depthwise(work, names, ops, s.depthwise.nonzero()[0], read + write)
    group, blend = blended(_group, [(op.groups > 1, name) for op, name in zip(ops, names, strict=True)], picks)
    features_, logs, aligned = features(*product, tile, reference)
    logs |= {"log_turns": turns, "log_moved": moved, "log_groups": s.groups, "log_image": s.image, "log_out": s.out}
    aligned |= {"align_side": s.side} | _alignments(s)
    features_ |= _plain_shape(s) | {
        "turned": turned,
        "padded_in": padded_in,
        "padded_out": padded_out,
        "tap_padding": padding,
    }
    return Part(group, work, features_ | blend, logs | _logs(s), aligned)


def asked(ops: Sequence[Conv2d]) -> tuple[list[str], tuple[Array, ...], Columns]:
    """What the kernel choice sees of convolutions: their classes (none of depthwise ones), sizes and shapes."""
    s = _sizes(ops)
    return _classes(ops, s), s.product, _shape(s)


def _shape(s: _Sizes) -> Columns:
    logs, aligned = _logs(s), _alignments(s)
    found = choice_columns(*s.product) | _plain_shape(s)
    found |= zip(logs, log2(list(logs.values())), strict=True)
    return found | dict(zip(aligned, alignment(list(aligned.values())), strict=True))


def _logs(s: _Sizes) -> Columns:
    """Sizes that the choice and the residual see in logs."""
    return {"log_c": s.c, "log_rs": s.rs, "log_side": s.high, "log_batch": s.batch}


def _alignments(s: _Sizes) -> Columns:
    """Sizes of which they see what divides them."""
    return {"align_c": s.c, "align_k": s.n}


def _plain_shape(s: _Sizes) -> Columns:
    return {"stride": s.stride, "channels_last": s.last, "dtype": s.code, "dgrad": s.dgrad, "wgrad": s.wgrad}


def _classes(ops: Sequence[Conv2d], s: _Sizes) -> list[str]:
    return ["" if d else class_of(op.dtype) for op, d in zip(ops, s.depthwise.tolist(), strict=True)]


def _sizes(ops: Sequence[Conv2d]) -> _Sizes:
    return _Sizes(*columns_of([_row(op) for op in ops]))


def _row(op: Conv2d) -> tuple[float, ...]:
    """The columns of one convolution."""
    images, groups, r, stride, dtype = op.n, op.groups, op.r, op.stride, op.dtype
    width, taps, side, out_side = dtype.byte, r * op.s, op.h * op.w, op.p * op.q
    c, n, pixels = op.c // groups, op.k // groups, images * out_side
    image, weight, out = images * op.c * side * width, op.k * c * taps * width, op.k * pixels * width
    wgrad, dgrad = op.direction == "wgrad", op.direction == "dgrad"
    product: tuple[float, ...]
    if wgrad:
        whole = max(FAST_BYTE // width, 1)  # channels of an image are padded to 16 bytes
        product, read, write = (n, -(-c // whole) * whole * taps, pixels, 1), image + out, weight
    elif dgrad:
        all_ = images * side
        product, read, write = (all_, c, n, taps * min(pixels / all_, 1.0)), out + weight, image
    else:
        product, read, write = (pixels, n, c, taps), image + weight, out
    touched = min(r / stride, 1.0) * min(op.s / (op.stride_w or stride), 1.0)
    depthwise = groups > 1 and c == 1
    return (
        *(n, c, taps, *product, groups, width, image, weight, out, op.channels_last, dtype in SIMT, depthwise),
        *(images, side, out_side, op.h, stride, touched, code_of(dtype), dgrad, wgrad, read, write),
    )


def class_of(dtype: Dtype) -> str:
    """Convolutions among whose kernels cuDNN chooses alike."""
    return _CLASS.get(dtype, "conv2d-half")


_CLASS = {Dtype.TF32: "conv2d-tf32", Dtype.FP32: "conv2d-fp32", Dtype.FP64: "conv2d-fp32"}


def _picks(ops: Sequence[Conv2d], told: Told, s: _Sizes, rate: Array, reference: Reference) -> Picks:
    sizes, classes = s.product, _classes(ops, s)

    def usual() -> list[Label]:
        """Of those for which nothing was fitted; the others are not asked for."""
        rows = np.array([i for i, name in enumerate(classes) if name not in (reference.choice or ())])
        never = np.zeros(len(rows), dtype=bool)
        b, m, n, k, width, of_pipe = (values[rows] for values in (*sizes, s.width, rate))
        n, m, _ = fastest(b, m, n, k, width, of_pipe, never, ~never, reference)
        fast = "ampere" if reference.style is Style.AMPERE else "hopper"
        found = [VECTOR] * len(ops)
        for i, tile_n, tile_m in zip(rows.tolist(), n.tolist(), m.tolist(), strict=True):
            found[i] = Label("simt" if s.simt[i] else fast, int(tile_n), int(tile_m), False)
        return found

    ran = told.ran
    if not told.usual:
        ran = [NOT_RUN if d else of for of, d in zip(told.ran, s.depthwise.tolist(), strict=True)]
    picks = pick(reference.choice, classes, ran, sizes, _shape(s), usual, reference.sm_count)
    if not s.wgrad.any():
        return picks
    return replace(picks, split=np.where(_shares_k(picks, s, reference.sm_count), 0.0, picks.split))


def _shares_k(picks: Picks, s: _Sizes, sms: float) -> npt.NDArray[np.bool_]:
    """Hopper's kernels of a filter's gradient that share K among blocks, which their names do not say: few tiles and
    many pixels (a workspace is prepared for those)."""
    groups, m, n, k = (size[:, np.newaxis] for size in s.product)
    tiles = groups * np.ceil(n / picks.tile_n) * np.ceil(m / picks.tile_m)
    few = (picks.kind == HOPPER) & (tiles <= sms / 2.0)
    return np.asarray(few & (s.wgrad[:, np.newaxis] > 0) & (k > _MANY_PIXELS))


def _layouts(
    s: _Sizes, turned: Array, padded_in: Array, padded_out: Array, step: Array
) -> tuple[Array, Array, Array]:
    """Bytes that layout kernels read and write, elements they turn (whole blocks of them), and all kernels' starts.

    ``turned``, ``padded_in`` and ``padded_out`` say how likely each is. A layout kernel starts in part of the time
    that the product's takes.
    """
    c, n = s.c * s.groups, s.n * s.groups
    filters = turned * (s.rs > 1)
    padded = np.maximum(padded_in, padded_out)
    ragged = (s.simt == 0) & (n % step != 0)
    turn = turned * (_blocks(s.batch, s.side, c) + _blocks(s.batch, s.out_side, n))
    turn += filters * np.where(ragged, _SLOW_TRANSFORM * s.weight / s.width, _blocks(n, s.rs, s.c))
    pad = padded_in * s.image + padded_out * s.out + padded * s.weight
    byte = turned * (s.image + s.out) + filters * s.weight + pad
    starts = (
        2.0 * turned + filters * np.where(ragged, _LIGHT_TRANSFORM / _LIGHT, 1.0) + padded_in + padded_out + padded
    )
    return 2.0 * byte, turn + _SLOW_PAD * pad / s.width, 1.0 + _LIGHT * starts


def _blocks(batch: Array, side: Array, channels: Array) -> Array:
    """Elements of the whole blocks that turn ``batch`` images."""
    return np.asarray(batch * np.ceil(side / _TURN) * np.ceil(channels / _TURN) * _TURN**2)


@cache
def _group(form: tuple[bool, str], kind: str) -> str:
    """Convolutions share corrections by the kind of kernel cuDNN and PyTorch have for them."""
    grouped, depthwise = form
    if depthwise:
        return f"conv2d.depthwise.{depthwise}"
    return "conv2d.grouped" if grouped else f"conv2d.{kind}"
