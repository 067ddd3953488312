"""Convolutions -> columns of work: implicit products with the layout kernels around them, and depthwise kernels.

An implicit product has M = batch·p·q, N = output channels, K = c·r·s, and reads the image, not the im2col matrix.
Tensor kernels want channels last in multiples of 16 bytes, fp32 ones channels first: images and filters that lie
otherwise are turned by kernels of 32 by 32 elements a block, or padded. Blocks of all kernels are cuDNN's and
PyTorch's own, as the grids in the H200 database have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.choose import KINDS, NOT_RUN, Label, Picks, blended, pick
from wattcast.kernels.gemm import fastest, features, tiled
from wattcast.kernels.products import FAST_BYTE, choice_columns, code_of
from wattcast.kernels.work import Columns, Condition, Reference, Style, alignment, log2, resident
from wattcast.workload.graph import Conv2d

_TURN = 32.0  # side of what a block of a layout kernel turns
# From the times of 300 layout kernels in the H200 database: how much slower than turning an element it is to pad one,
# to turn and pad one of a filter at once; and the fixed time of each over that of the kernel of the product.
_SLOW_PAD, _SLOW_TRANSFORM = 1.6, 7.5
_LIGHT, _LIGHT_TRANSFORM = 0.35, 2.0
_TAP_BYTE = (
    64.0  # of one filter tap that an implicit product takes at a time; twice as many of Hopper's with many channels
)
_HOPPER = KINDS.index("hopper")
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
)


@dataclass(frozen=True)
class _Sizes:
    """Arrays ``(row,)``."""

    pixels: Array  # of all outputs' images
    n: Array  # output channels of a group
    c: Array  # input channels of a group
    rs: Array
    groups: Array
    width: Array
    image: Array  # bytes
    weight: Array
    out: Array
    last: npt.NDArray[np.bool_]
    simt: npt.NDArray[np.bool_]
    depthwise: npt.NDArray[np.bool_]


def convolutions(
    ops: Sequence[Conv2d], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features."""
    s = _sizes(ops)
    write = np.array([op.write_byte for op in ops])
    read = np.array([op.read_byte for op in ops]) - s.image * (1.0 - _touched(ops))
    step = FAST_BYTE / s.width
    extra = _shape(ops, s)
    picks = _picks(ops, conditions, s, extra, rate, reference)
    # kernels that walk a tap at a time pad its channels
    whole = np.isin(picks.kind, [KINDS.index(kind) for kind in ("direct", "simt", "plain")])
    tap = np.where(picks.kind == _HOPPER, np.where(s.c > 32, 128.0, 64.0)[:, np.newaxis], _TAP_BYTE)
    tap = np.maximum(tap / s.width[:, np.newaxis], 16.0)
    k = s.rs[:, np.newaxis] * np.where(whole, s.c[:, np.newaxis], np.ceil(s.c[:, np.newaxis] / tap) * tap)
    tile = tiled(s.groups, s.pixels, s.n, k, s.width, s.width, rate, picks, reference)
    plain = 1.0 - picks.of_kind("plain")
    wide = plain - np.where(s.width <= 2, picks.of_kind("direct"), 0.0)
    turned = (~s.depthwise & np.where(s.simt, s.last, ~s.last)) * plain
    pads = (~s.depthwise & ~s.simt & s.last) * wide
    moved, turns, launches = _layouts(ops, s, turned, pads * (s.c % step != 0), pads * (s.n % step != 0), step)
    kept = resident(read + write + moved, reference.l2_byte)
    depth_kind = np.array([_depthwise_kind(op) if d else "" for op, d in zip(ops, s.depthwise, strict=True)])
    units, threads_held, steps, shared = _depthwise(ops, s, depth_kind)
    d = s.depthwise
    taps = 2.0 * s.rs * s.out / s.width
    work = {
        "units": np.where(d, units, tile["units"]),
        "unit_flop": np.where(d, taps / units, tile["unit_flop"]),
        "steps": np.where(d, steps, tile["steps"]),
        "launches": launches,
        "l2_byte": np.where(
            d, read * np.where(np.isin(depth_kind, _TAPS), 1.0 + s.rs / 5.0, 1.0) + write, tile["load_byte"]
        ),
        "store_byte": np.where(d, 0.0, s.out),
        "between_byte": moved,
        "turn_element": turns,
        "shared_byte": np.where(d, shared, tile["shared_byte"] + s.out),
        "dram_read_byte": read * (1.0 - kept) + s.weight * kept,
        "dram_write_byte": write * (1.0 - kept),
        "slots": np.where(d, threads_held, tile["slots"]),
    }
    group, blend = blended(lambda i, kind: _group(ops[i], str(depth_kind[i]), kind), picks)
    extra |= {
        "turned": turned,
        "padded_in": pads * (s.c % step != 0),
        "padded_out": pads * (s.n % step != 0),
        "log_turns": log2(turns),
        "tap_padding": np.where(d, 0.0, k[:, 0] / (s.rs * s.c)),
        "log_moved": log2(moved),
    }
    return group, work, blend | features(s.groups, s.pixels, s.n, s.c * s.rs, tile, reference) | extra


def asked(ops: Sequence[Conv2d]) -> tuple[list[str], tuple[Array, ...], Columns]:
    """What the kernel choice sees of convolutions: their classes (none of depthwise ones), sizes and shapes."""
    s = _sizes(ops)
    sizes = (s.groups, s.pixels, s.n, s.c * s.rs)
    return _classes(ops, s), sizes, choice_columns(*sizes) | _shape(ops, s)


def _shape(ops: Sequence[Conv2d], s: _Sizes) -> Columns:
    return {
        "align_c": alignment(s.c),
        "align_k": alignment(s.n),
        "log_c": log2(s.c),
        "log_rs": log2(s.rs),
        "log_groups": log2(s.groups),
        "stride": np.array([float(op.stride) for op in ops]),
        "channels_last": s.last.astype(float),
        "dtype": np.array([code_of(op.dtype) for op in ops]),
        "align_side": alignment([op.h * op.w for op in ops]),
        "log_image": log2(s.image),
        "log_out": log2(s.out),
        "log_side": log2([op.h for op in ops]),
        "log_batch": log2([op.n for op in ops]),
        "direction": np.array([float(("forward", "dgrad", "wgrad").index(op.direction)) for op in ops]),
    }


def _classes(ops: Sequence[Conv2d], s: _Sizes) -> list[str]:
    return ["" if d else class_of(op.dtype) for op, d in zip(ops, s.depthwise, strict=True)]


def _sizes(ops: Sequence[Conv2d]) -> _Sizes:
    groups = np.array([float(op.groups) for op in ops])
    c = np.array([float(op.c) for op in ops]) / groups
    image, weight, out = (np.array(x, dtype=np.float64) for x in zip(*(op._tensors_byte for op in ops), strict=True))
    return _Sizes(
        pixels=np.array([float(op.n) * op.p * op.q for op in ops]),
        n=np.array([float(op.k) for op in ops]) / groups,
        c=c,
        rs=np.array([float(op.r) * op.s for op in ops]),
        groups=groups,
        width=np.array([float(op.dtype.byte) for op in ops]),
        image=image,
        weight=weight,
        out=out,
        last=np.array([op.channels_last for op in ops]),
        simt=np.array([op.dtype in (Dtype.FP32, Dtype.FP64) for op in ops]),
        depthwise=(groups > 1) & (c == 1),
    )


def class_of(dtype: Dtype) -> str:
    """Convolutions among whose kernels cuDNN chooses alike."""
    base = {Dtype.TF32: "tf32", Dtype.FP32: "fp32", Dtype.FP64: "fp32"}.get(dtype, "half")
    return f"conv2d-{base}"


def _picks(
    ops: Sequence[Conv2d],
    conditions: Sequence[Condition],
    s: _Sizes,
    extra: Columns,
    rate: Array,
    reference: Reference,
) -> Picks:
    sizes = (s.groups, s.pixels, s.n, s.c * s.rs)

    def usual() -> list[Label]:
        never = np.zeros(len(ops), dtype=bool)
        n, m, _ = fastest(*sizes, s.width, rate, never, ~never, reference)
        fast = "ampere" if reference.style is Style.AMPERE else "hopper"
        return [Label("simt" if x else fast, int(n[i]), int(m[i]), False) for i, x in enumerate(s.simt)]

    ran = [NOT_RUN if d else (c.kernels, c.parts) for c, d in zip(conditions, s.depthwise, strict=True)]
    shape = choice_columns(*sizes) | extra
    return pick(reference.choice, _classes(ops, s), ran, sizes, shape, usual, reference.sm_count)


def _touched(ops: Sequence[Conv2d]) -> Array:
    """Share of the image's pixels under any filter: strides beyond the filter leave pixels out."""
    across = np.array([min(op.s / (op.stride_w or op.stride), 1.0) for op in ops])
    return np.asarray(np.array([min(op.r / op.stride, 1.0) for op in ops]) * across)


def _layouts(
    ops: Sequence[Conv2d],
    s: _Sizes,
    turned: Array,
    padded_in: Array,
    padded_out: Array,
    step: Array,
) -> tuple[Array, Array, Array]:
    """Bytes that layout kernels read and write, elements they turn (whole blocks of them), and all kernels' starts.

    ``turned``, ``padded_in`` and ``padded_out`` say how likely each is. A layout kernel starts in part of the time
    that the product's takes.
    """
    batch = np.array([float(op.n) for op in ops])
    side, out_side = (
        np.array(x, dtype=np.float64) for x in zip(*((op.h * op.w, op.p * op.q) for op in ops), strict=True)
    )
    c, n = s.c * s.groups, s.n * s.groups
    filters = turned * (s.rs > 1)
    padded = np.maximum(padded_in, padded_out)
    ragged = ~s.simt & (n % step != 0)
    turn = turned * (_blocks(batch, side, c) + _blocks(batch, out_side, n))
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


_TAPS = ("last.plain", "last.wide")  # one kernel, which loads every tap; slower in half precision, which it widens


def _depthwise_kind(op: Conv2d) -> str:
    """The kernel that cuDNN and PyTorch have for a depthwise convolution."""
    half = op.dtype.byte <= 2
    if not op.channels_last:
        tiled_ = op.dtype is Dtype.FP16 and op.r * op.s <= 9 and op.stride == 1
        return "first.tiled" if tiled_ else "first.plain"
    if op.r * op.s == 1 and (op.stride > 1 or op.c <= 16):
        return "last.direct"
    if not half:
        return "last.wide"
    return "last.special" if op.n >= 8 and op.c % 4 == 0 else "last.plain"


def _depthwise(ops: Sequence[Conv2d], s: _Sizes, kind: npt.NDArray[np.str_]) -> tuple[Array, Array, Array, Array]:
    """Blocks, blocks an SM holds, dependent steps and bytes through shared memory of depthwise kernels."""
    elements = s.out / s.width
    tiles = np.array([op.n * np.ceil(op.q / 40.0) * op.c * np.ceil(op.p / 10.0) / 8.0 for op in ops])
    units = np.select([kind == "first.tiled", kind == "last.special"], [tiles, elements / 5000.0], elements / 1024.0)
    large = s.rs > 25
    held = np.select(
        [kind == "first.tiled", kind == "last.special", np.isin(kind, _TAPS)],
        [np.full(len(ops), 4.0), np.where(large, 2.0, 6.0), np.full(len(ops), 12.0)],
        2.0,
    )
    shared = np.select([kind == "last.special", np.isin(kind, _TAPS)], [0.6, 1.1], 1.2) * s.rs * s.image
    # the direct kernel takes elements of a pixel from lines far apart: as long as forty taps, whatever its filter
    steps = np.where(kind == "last.direct", 40.0, s.rs + 5.0)
    return np.maximum(np.ceil(units), 1.0), held, steps, shared


def _group(op: Conv2d, depthwise: str, kind: str) -> str:
    """Convolutions share corrections by the kind of kernel cuDNN and PyTorch have for them."""
    if depthwise:
        return f"conv2d.depthwise.{depthwise}"
    return "conv2d.grouped" if op.groups > 1 else f"conv2d.{kind}"
