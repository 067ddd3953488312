"""Convolutions as cuDNN runs them: implicit matrix products, and kernels that turn or pad their
operands.

The product of a forward convolution has pixels as rows, filters as columns, and channels times
filter taps as K. Kernels walk over one tap at a time and pad its channels. Tensor-core kernels want
channels innermost, CUDA-core kernels channels outermost: other layouts are turned first. Depthwise
convolutions have no product in them; cuDNN and PyTorch have kernels of their own for those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np

from wattcast.core import Dtype
from wattcast.core.arrays import Array, CodedColumn, index_distinct
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.matrix_products import (
    CUDA_CORE_FORMATS,
    FAST_BYTE,
    PRODUCT_KERNELS,
    choice_columns,
    fastest_tile,
    is_point_convolution,
    pipe_code,
    product_features,
    tile_columns,
)
from wattcast.kernels.kernel_choice import (
    HOPPER_KIND,
    KERNEL_KINDS,
    NOT_RUN,
    VECTOR_LABEL,
    KernelLabel,
    KernelPicks,
    blend_families,
    pick_kernels,
)
from wattcast.kernels.kernel_table import (
    Columns,
    ConditionColumns,
    FamilyColumns,
    LibraryStyle,
    ReferenceChip,
    as_columns,
    log2_alignment,
    log2_size,
    resident_share,
)
from wattcast.workload.operator_types import Conv2d

_TAPS = (
    "last.plain",
    "last.wide",
)  # one kernel, which loads every tap; slower in half precision, which it widens


def _depthwise_kind(op: Conv2d) -> str:
    """Return the kernel that cuDNN or PyTorch has for a depthwise convolution."""
    half = op.dtype.byte <= 2
    if op.direction != "forward":
        return f"{'last' if op.channels_last else 'first'}.{'filter' if op.direction == 'wgrad' else 'back'}"
    if not op.channels_last:
        tiled_ = op.dtype is Dtype.FP16 and op.r * op.s <= 9 and op.stride == 1
        return "first.tiled" if tiled_ else "first.plain"
    if op.r * op.s == 1 and (op.stride > 1 or op.c <= 16):
        return "last.direct"
    if not half:
        return "last.wide"
    return "last.special" if op.n >= 8 and op.c % 4 == 0 else "last.plain"


def _take_depthwise(op: Conv2d, kind: str) -> tuple[float, ...]:
    """Return what a depthwise convolution takes.

    That is blocks, arithmetic of one, blocks an SM holds, dependent steps, bytes through shared
    memory, bytes that pass L2 once more, and further kernels."""
    width, taps, (image, _, out) = op.dtype.byte, op.r * op.s, op.tensors_byte
    pixels = out / width
    held = 2.0
    steps = taps + 5.0
    shared = 1.2
    again = 0.0
    launches = 0.0
    units = pixels / 1024.0
    if kind == "first.tiled":
        units = op.n * ceil(op.q / 40.0) * op.c * ceil(op.p / 10.0) / 8.0
        held = 4.0
    elif kind == "first.back":
        units = image / width / 1024.0
    elif kind == "first.filter":
        # A block for each weight; up to eight warps walk over images, and to begin with one is as
        # long as four steps: eleven launches of the H200 database. It loads all operands for each
        # weight.
        units = op.groups * taps
        held = min(64.0 / min(op.n, 8.0), 32.0)
        steps = ceil(op.n / 8.0) * (ceil(op.p * op.q / 32.0) + 4.0) + 5.0
        again = (taps - 1.0) * (image + out)
    elif kind in ("last.special", "last.back"):
        units = pixels / 5000.0 if kind == "last.special" else image / width / 4096.0
        held = 2.0 if taps > 25 else 6.0
        shared = 0.6 if kind == "last.special" else 1.2
    elif kind in _TAPS:
        # a part of the taps of each result
        held = 12.0
        shared = 1.1
        again = taps / 5.0 * out
    elif kind == "last.direct":
        # elements of a pixel lie in lines far apart: as long as forty taps, whatever its filter
        steps = 40.0
    elif kind == "last.filter":
        launches = 1.0  # of parts and of their sum
    units = max(ceil(units), 1.0)
    # strides leave none out of an image's gradient
    flop = 2.0 * taps * (image if op.direction == "dgrad" else out) / width / units
    return units, flop, held, steps, shared * taps * image, again, launches


_TURN = 32.0  # side of what a block of a layout kernel turns
# From the times of 300 layout kernels in the H200 database: how much slower than turning an element
# it is to pad one, to turn and pad one of a filter at once; and the fixed time of each over that of
# the kernel of the
# product.
_SLOW_PAD = 1.6
_SLOW_TRANSFORM = 7.5
_LIGHT = 0.35
_LIGHT_TRANSFORM = 2.0
# of a filter tap that an implicit product takes at a time; twice as many of Hopper's for many
# channels
_TAP_BYTE = 64.0
_WHOLE_TAPS = np.array([kind in ("direct", "simt", "plain") for kind in KERNEL_KINDS])
_MANY_PIXELS = 6000.0
_BLOCKS_OF_SM = 2.0  # that a split of K aims at, as products before Hopper do
CONVOLUTION_CHOICE_COLUMNS = (
    *(
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
    ),
    *("align_k", "log_batch", "log_side", "dgrad", "wgrad"),
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
    # share of the image's pixels under any filter: strides beyond the filter leave pixels out
    touched: Array
    code: Array  # of the number format
    dgrad: Array  # 1: the gradient of the image
    wgrad: Array  # 1: the gradient of the filter
    read: Array  # bytes
    write: Array

    @property
    def product(self) -> tuple[Array, Array, Array, Array]:
        """The implicit products: how many, M, N and K."""
        return self.groups, self.product_m, self.product_n, self.product_c * self.product_rs


def convolution_work(
    ops: Sequence[Conv2d], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return kernel families, work columns and features of convolutions that are not point
    convolutions.
    """
    s = _collect_sizes(ops)
    read = s.read - s.image * (1.0 - s.touched) * (s.dgrad == 0)
    write = s.write
    step = FAST_BYTE / s.width
    product = s.product
    simt = s.simt > 0
    picks = _pick_kernels(ops, told, s, rate, reference)
    # kernels that walk a tap at a time pad its channels
    tap = np.where(
        picks.kind == HOPPER_KIND, np.where(s.product_c > 32, 128.0, 64.0)[:, np.newaxis], _TAP_BYTE
    )
    tap = np.maximum(tap / s.width[:, np.newaxis], 16.0)
    deep = s.product_c[:, np.newaxis]
    k = s.product_rs[:, np.newaxis] * np.where(
        _WHOLE_TAPS.take(picks.kind), deep, np.ceil(deep / tap) * tap
    )
    tile = tile_columns((*product[:3], k), s.width, s.width, rate, picks, reference)
    plain = 1.0 - picks.of_kind("plain")
    wide = plain - np.where(s.width <= 2, picks.of_kind("direct"), 0.0)
    dense = 1.0 - s.depthwise
    turned = dense * np.where(simt, s.last, 1.0 - s.last) * plain
    pads = dense * (1.0 - s.simt) * s.last * wide
    padded_in = pads * (s.c % step != 0)
    padded_out = pads * (s.n % step != 0)
    moved, turns, launches = _turn_layouts(s, turned, padded_in, padded_out, step)
    kept = resident_share(read + write + moved, reference.l2_byte)
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
    names = [
        _depthwise_kind(op) if alone else ""
        for op, alone in zip(ops, s.depthwise.tolist(), strict=True)
    ]
    if (rows := s.depthwise.nonzero()[0]).size:
        work = {name: values.copy() for name, values in work.items()}
        padding = padding * dense
        *found, again, launches = as_columns(
            [_take_depthwise(ops[i], names[i]) for i in rows.tolist()]
        )
        for name, values in zip(
            ("units", "unit_flop", "slots", "steps", "shared_byte"), found, strict=True
        ):
            work[name][rows] = values
        work["l2_byte"][rows], work["store_byte"][rows] = (read + write)[rows] + again, 0.0
        work["launches"][rows] += launches
    forms = CodedColumn(
        *index_distinct((op.groups > 1, name) for op, name in zip(ops, names, strict=True))
    )
    group, blend = blend_families(_kernel_family, forms, picks)
    features_, logs, aligned = product_features(*product, tile, reference)
    logs |= {
        "log_turns": turns,
        "log_moved": moved,
        "log_groups": s.groups,
        "log_image": s.image,
        "log_out": s.out,
    }
    of_shape = _shape_features(s)
    aligned |= {"align_side": s.side} | of_shape[2]
    features_ |= of_shape[0]
    features_ |= {
        "turned": turned,
        "padded_in": padded_in,
        "padded_out": padded_out,
        "tap_padding": padding,
    }
    return FamilyColumns(group, work, features_ | blend, logs | of_shape[1], aligned)


def convolution_choice_inputs(
    ops: Sequence[Conv2d], told: ConditionColumns
) -> tuple[list[str], tuple[Array, ...], Columns]:
    """Return what the kernel choice sees of convolutions: choosers (none for depthwise ones), sizes
    and shapes.
    """
    s = _collect_sizes(ops)
    return _name_choosers(ops, s), s.product, _describe_shape(s)


def _describe_shape(s: _Sizes) -> Columns:
    plain, logs, aligned = _shape_features(s)
    found = choice_columns(*s.product) | plain
    found |= zip(logs, log2_size(list(logs.values())), strict=True)
    return found | dict(zip(aligned, log2_alignment(list(aligned.values())), strict=True))


def _shape_features(s: _Sizes) -> tuple[Columns, Columns, Columns]:
    """Return sizes that the choice and the residual see: as they are, in logs, and by what divides
    them.
    """
    plain = {
        "stride": s.stride,
        "channels_last": s.last,
        "dtype": s.code,
        "dgrad": s.dgrad,
        "wgrad": s.wgrad,
    }
    logs = {"log_c": s.c, "log_rs": s.rs, "log_side": s.high, "log_batch": s.batch}
    return plain, logs, {"align_c": s.c, "align_k": s.n}


def _name_choosers(ops: Sequence[Conv2d], s: _Sizes) -> list[str]:
    """Return the chooser of each: convolutions for which cuDNN chooses among the same kernels share
    one.
    """
    known = zip(ops, s.depthwise.tolist(), strict=True)
    return ["" if depthwise else _CHOOSER.get(op.dtype, "conv2d-half") for op, depthwise in known]


_CHOOSER = {Dtype.TF32: "conv2d-tf32", Dtype.FP32: "conv2d-fp32", Dtype.FP64: "conv2d-fp32"}


def _collect_sizes(ops: Sequence[Conv2d]) -> _Sizes:
    return _Sizes(*as_columns([_fill_row(op) for op in ops]))


def _fill_row(op: Conv2d) -> tuple[float, ...]:
    """Return the columns of one convolution."""
    images = op.n
    groups = op.groups
    r = op.r
    stride = op.stride
    dtype = op.dtype
    width = dtype.byte
    taps = r * op.s
    side = op.h * op.w
    out_side = op.p * op.q
    c = op.c // groups
    n = op.k // groups
    pixels = images * out_side
    image = images * op.c * side * width
    weight = op.k * c * taps * width
    out = op.k * pixels * width
    wgrad = op.direction == "wgrad"
    dgrad = op.direction == "dgrad"
    product: tuple[float, ...]
    if wgrad:
        whole = max(FAST_BYTE // width, 1)  # channels of an image are padded to 16 bytes
        product = (n, -(-c // whole) * whole * taps, pixels, 1)
        read = image + out
        write = weight
    elif dgrad:
        all_ = images * side
        product = (all_, c, n, taps * min(pixels / all_, 1.0))
        read = out + weight
        write = image
    else:
        product = (pixels, n, c, taps)
        read = image + weight
        write = out
    touched = min(r / stride, 1.0) * min(op.s / (op.stride_w or stride), 1.0)
    depthwise = groups > 1 and c == 1
    simt = dtype in CUDA_CORE_FORMATS
    return (
        *(
            n,
            c,
            taps,
            *product,
            groups,
            width,
            image,
            weight,
            out,
            op.channels_last,
            simt,
            depthwise,
        ),
        *(
            images,
            side,
            out_side,
            op.h,
            stride,
            touched,
            pipe_code(dtype),
            dgrad,
            wgrad,
            read,
            write,
        ),
    )


def _pick_kernels(
    ops: Sequence[Conv2d], told: ConditionColumns, s: _Sizes, rate: Array, reference: ReferenceChip
) -> KernelPicks:
    sizes = s.product
    classes = _name_choosers(ops, s)

    def usual() -> list[KernelLabel]:
        """Return labels of convolutions without a fitted choice; those of others are never looked
        at.
        """
        rows = np.array(
            [i for i, name in enumerate(classes) if name not in (reference.choice or ())]
        )
        never = np.zeros(len(rows), dtype=bool)
        b, m, n, k, width, of_pipe = (values[rows] for values in (*sizes, s.width, rate))
        on_cores = s.simt[rows] > 0
        n, m, _ = fastest_tile(
            (b, m, n, k), width, of_pipe, never, ~never, reference, cuda=on_cores
        )
        fast = "ampere" if reference.style is LibraryStyle.AMPERE else "hopper"
        found = [VECTOR_LABEL] * len(ops)
        for i, tile_n, tile_m in zip(rows.tolist(), n.tolist(), m.tolist(), strict=True):
            found[i] = KernelLabel("simt" if s.simt[i] else fast, int(tile_n), int(tile_m), False)
        return found

    ran = told.ran
    if not told.usual:
        ran = [NOT_RUN if d else of for of, d in zip(told.ran, s.depthwise.tolist(), strict=True)]
    picks = pick_kernels(
        reference.choice, classes, ran, sizes, _describe_shape(s), usual, reference.sm_count
    )
    if not s.wgrad.any():
        return picks
    # Hopper's kernels of a filter's gradient share K among blocks for few tiles and many pixels (a
    # workspace is prepared for those), which their names do not say
    groups, m, n, k = (size[:, np.newaxis] for size in s.product)
    tiles = groups * np.ceil(n / picks.tile_n) * np.ceil(m / picks.tile_m)
    few = (picks.kind == HOPPER_KIND) & (tiles <= reference.sm_count / 2.0)
    many = (s.wgrad[:, np.newaxis] > 0) & (k > _MANY_PIXELS)
    split = np.where(few & many, 0.0, picks.split)
    if reference.choice is None:
        # so do those of every library: without, a filter of 64 x 64 would keep one SM busy
        filling = np.maximum(np.floor(_BLOCKS_OF_SM * reference.sm_count / tiles), 1.0)
        split = np.where(many & (picks.kind != HOPPER_KIND), filling, split)
    return replace(picks, split=split)


def _turn_layouts(
    s: _Sizes, turned: Array, padded_in: Array, padded_out: Array, step: Array
) -> tuple[Array, Array, Array]:
    """Return bytes that layout kernels read and write, elements they turn (in whole blocks), and
    all kernels' starts.

    ``turned``, ``padded_in`` and ``padded_out`` say how likely each is. A layout kernel starts in
    part of the time that the product's takes."""
    c = s.c * s.groups
    n = s.n * s.groups
    filters = turned * (s.rs > 1)
    padded = np.maximum(padded_in, padded_out)
    ragged = (s.simt == 0) & (n % step != 0)
    turn = turned * (_count_turned(s.batch, s.side, c) + _count_turned(s.batch, s.out_side, n))
    turn += filters * np.where(
        ragged, _SLOW_TRANSFORM * s.weight / s.width, _count_turned(n, s.rs, s.c)
    )
    pad = padded_in * s.image + padded_out * s.out + padded * s.weight
    byte = turned * (s.image + s.out) + filters * s.weight + pad
    starts = (
        2.0 * turned
        + filters * np.where(ragged, _LIGHT_TRANSFORM / _LIGHT, 1.0)
        + padded_in
        + padded_out
        + padded
    )
    return 2.0 * byte, turn + _SLOW_PAD * pad / s.width, 1.0 + _LIGHT * starts


def _count_turned(batch: Array, side: Array, channels: Array) -> Array:
    """Return the elements of the whole blocks that turn ``batch`` images."""
    return np.asarray(batch * np.ceil(side / _TURN) * np.ceil(channels / _TURN) * _TURN**2)


@cache
def _kernel_family(form: tuple[bool, str], kind: str) -> str:
    """Return the kernel family: by the kind of kernel that cuDNN or PyTorch has."""
    grouped, depthwise = form
    if depthwise:
        return f"conv2d.depthwise.{depthwise}"
    return "conv2d.grouped" if grouped else f"conv2d.{kind}"


_DENSE = KernelMapping(convolution_work, tensor_cores=True, choice_inputs=convolution_choice_inputs)
_DEPTHWISE = KernelMapping(
    convolution_work, tensor_cores=False, choice_inputs=convolution_choice_inputs
)


def _convolution_kernels(op: Conv2d) -> KernelMapping:
    """Choose the kernels: a point convolution is a matrix product, a depthwise one has none and
    uses CUDA cores.
    """
    if is_point_convolution(op):
        return PRODUCT_KERNELS
    return _DEPTHWISE if op.groups > 1 and op.c == op.groups else _DENSE


register_kernels(Conv2d, mapping=_convolution_kernels)
