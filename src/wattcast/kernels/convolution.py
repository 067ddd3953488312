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
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.choose import KINDS, NOT_RUN, Label, Picks, blended, pick
from wattcast.kernels.gemm import fastest, features, tiled
from wattcast.kernels.products import FAST_BYTE, choice_columns, code_of
from wattcast.kernels.work import Columns, Reference, Style, Told, alignment, log2, resident
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


@dataclass(frozen=True)
class _Sizes:
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
    last: npt.NDArray[np.bool_]
    simt: npt.NDArray[np.bool_]
    depthwise: npt.NDArray[np.bool_]

    @property
    def product(self) -> tuple[Array, Array, Array, Array]:
        """The implicit products: how many, M, N and K."""
        return self.groups, self.product_m, self.product_n, self.product_c * self.product_rs


def convolutions(
    ops: Sequence[Conv2d], told: Told, rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features."""
    s = _sizes(ops)
    extra = _shape(ops, s)
    write = np.array([op.write_byte for op in ops])
    read = np.array([op.read_byte for op in ops]) - s.image * (1.0 - _touched(ops)) * (extra["dgrad"] == 0)
    step = FAST_BYTE / s.width
    picks = _picks(ops, told, s, extra, rate, reference)
    # kernels that walk a tap at a time pad its channels
    whole = _WHOLE_TAPS[picks.kind]
    tap = np.where(picks.kind == _HOPPER, np.where(s.product_c > 32, 128.0, 64.0)[:, np.newaxis], _TAP_BYTE)
    tap = np.maximum(tap / s.width[:, np.newaxis], 16.0)
    deep = s.product_c[:, np.newaxis]
    k = s.product_rs[:, np.newaxis] * np.where(whole, deep, np.ceil(deep / tap) * tap)
    tile = tiled(s.groups, s.product_m, s.product_n, k, s.width, s.width, rate, picks, reference)
    plain = 1.0 - picks.of_kind("plain")
    wide = plain - np.where(s.width <= 2, picks.of_kind("direct"), 0.0)
    turned = (~s.depthwise & np.where(s.simt, s.last, ~s.last)) * plain
    pads = (~s.depthwise & ~s.simt & s.last) * wide
    moved, turns, launches = _layouts(ops, s, turned, pads * (s.c % step != 0), pads * (s.n % step != 0), step)
    kept = resident(read + write + moved, reference.l2_byte)
    depth_kind = np.array([_depthwise_kind(op) if d else "" for op, d in zip(ops, s.depthwise, strict=True)])
    d = s.depthwise
    none = np.ones(len(ops))
    units, threads_held, steps, shared, again = _depthwise(ops, s, depth_kind) if d.any() else (none,) * 5
    taps = 2.0 * s.rs * np.where(extra["dgrad"] > 0, s.image, s.out) / s.width  # strides leave none out of an image's
    work = {
        "units": np.where(d, units, tile["units"]),
        "unit_flop": np.where(d, taps / units, tile["unit_flop"]),
        "steps": np.where(d, steps, tile["steps"]),
        "launches": launches + (depth_kind == "last.filter"),  # of parts and of their sum
        "l2_byte": np.where(d, read + write + again, tile["load_byte"]),
        "store_byte": np.where(d, 0.0, write),
        "between_byte": moved,
        "turn_element": turns,
        "shared_byte": np.where(d, shared, tile["shared_byte"] + write),
        "dram_read_byte": read * (1.0 - kept) + s.weight * kept,
        "dram_write_byte": write * (1.0 - kept),
        "slots": np.where(d, threads_held, tile["slots"]),
    }
    group, blend = blended(
        _group, [(op.groups > 1, kind) for op, kind in zip(ops, depth_kind.tolist(), strict=True)], picks
    )
    extra |= {
        "turned": turned,
        "padded_in": pads * (s.c % step != 0),
        "padded_out": pads * (s.n % step != 0),
        "log_turns": log2(turns),
        "tap_padding": np.where(d, 0.0, k[:, 0] / s.product[3]),
        "log_moved": log2(moved),
    }
    return group, work, blend | features(*s.product, tile, reference) | extra


def asked(ops: Sequence[Conv2d]) -> tuple[list[str], tuple[Array, ...], Columns]:
    """What the kernel choice sees of convolutions: their classes (none of depthwise ones), sizes and shapes."""
    s = _sizes(ops)
    sizes = s.product
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
        "dgrad": np.array([float(op.direction == "dgrad") for op in ops]),
        "wgrad": np.array([float(op.direction == "wgrad") for op in ops]),
    }


def _classes(ops: Sequence[Conv2d], s: _Sizes) -> list[str]:
    return ["" if d else class_of(op.dtype) for op, d in zip(ops, s.depthwise, strict=True)]


def _sizes(ops: Sequence[Conv2d]) -> _Sizes:
    groups = np.array([float(op.groups) for op in ops])
    c = np.array([float(op.c) for op in ops]) / groups
    image, weight, out = (np.array(x, dtype=np.float64) for x in zip(*(op._tensors_byte for op in ops), strict=True))
    m, across, deep, walked = np.array([_product(op) for op in ops], dtype=np.float64).T
    return _Sizes(
        n=np.array([float(op.k) for op in ops]) / groups,
        c=c,
        rs=np.array([float(op.r) * op.s for op in ops]),
        product_m=m,
        product_n=across,
        product_c=deep,
        product_rs=walked,
        groups=groups,
        width=np.array([float(op.dtype.byte) for op in ops]),
        image=image,
        weight=weight,
        out=out,
        last=np.array([op.channels_last for op in ops]),
        simt=np.array([op.dtype in (Dtype.FP32, Dtype.FP64) for op in ops]),
        depthwise=(groups > 1) & (c == 1),
    )


def _product(op: Conv2d) -> tuple[float, float, float, float]:
    """M, N, and K as channels and taps, of the implicit product of a group."""
    c, k, taps, pixels = op.c // op.groups, op.k // op.groups, float(op.r * op.s), float(op.n) * op.p * op.q
    if op.direction == "wgrad":
        whole = max(FAST_BYTE // op.dtype.byte, 1)  # channels of an image are padded to 16 bytes
        return k, -(-c // whole) * whole * taps, pixels, 1.0
    if op.direction == "dgrad":
        image = float(op.n) * op.h * op.w
        return image, c, k, taps * min(pixels / image, 1.0)
    return pixels, k, c, taps


def class_of(dtype: Dtype) -> str:
    """Convolutions among whose kernels cuDNN chooses alike."""
    return _CLASS.get(dtype, "conv2d-half")


_CLASS = {Dtype.TF32: "conv2d-tf32", Dtype.FP32: "conv2d-fp32", Dtype.FP64: "conv2d-fp32"}


def _picks(
    ops: Sequence[Conv2d],
    told: Told,
    s: _Sizes,
    extra: Columns,
    rate: Array,
    reference: Reference,
) -> Picks:
    sizes = s.product

    def usual() -> list[Label]:
        never = np.zeros(len(ops), dtype=bool)
        n, m, _ = fastest(*sizes, s.width, rate, never, ~never, reference)
        fast = "ampere" if reference.style is Style.AMPERE else "hopper"
        return [Label("simt" if x else fast, int(n[i]), int(m[i]), False) for i, x in enumerate(s.simt)]

    ran = [NOT_RUN if d else of for of, d in zip(told.ran, s.depthwise.tolist(), strict=True)]
    shape = choice_columns(*sizes) | extra
    picks = pick(reference.choice, _classes(ops, s), ran, sizes, shape, usual, reference.sm_count)
    return replace(picks, split=np.where(_shares_k(picks, s, extra["wgrad"], reference.sm_count), 0.0, picks.split))


def _shares_k(picks: Picks, s: _Sizes, wgrad: Array, sms: float) -> npt.NDArray[np.bool_]:
    """Hopper's kernels of a filter's gradient that share K among blocks, which their names do not say: few tiles and
    many pixels (a workspace is prepared for those)."""
    groups, m, n, k = (size[:, np.newaxis] for size in s.product)
    tiles = groups * np.ceil(n / picks.tile_n) * np.ceil(m / picks.tile_m)
    few = (picks.kind == _HOPPER) & (tiles <= sms / 2.0)
    return np.asarray(few & (wgrad[:, np.newaxis] > 0) & (k > _MANY_PIXELS))


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


def _again(kind: npt.NDArray[np.str_], s: _Sizes) -> Array:
    """Bytes that depthwise kernels load through L2 beyond each operand once: a part of the taps of each result, and
    all operands for each weight of a filter's gradient."""
    taps, weights = s.rs / 5.0 * s.out, (s.rs - 1.0) * (s.image + s.out)
    return np.select([np.isin(kind, _TAPS), kind == "first.filter"], [taps, weights], 0.0)


def _depthwise(ops: Sequence[Conv2d], s: _Sizes, kind: npt.NDArray[np.str_]) -> tuple[Array, ...]:
    """Blocks, blocks an SM holds, dependent steps, bytes through shared memory and again of depthwise kernels."""
    out, image = s.out / s.width, s.image / s.width
    tiles = np.array([op.n * np.ceil(op.q / 40.0) * op.c * np.ceil(op.p / 10.0) / 8.0 for op in ops])
    units = np.select(
        [kind == name for name in ("first.tiled", "last.special", "first.back", "last.back", "first.filter")],
        [tiles, out / 5000.0, image / 1024.0, image / 4096.0, s.groups * s.rs],
        out / 1024.0,
    )
    large = s.rs > 25
    warps = np.array([min(op.n, 8.0) for op in ops])
    held = np.select(
        [
            kind == "first.tiled",
            np.isin(kind, ("last.special", "last.back")),
            np.isin(kind, _TAPS),
            kind == "first.filter",
        ],
        [np.full(len(ops), 4.0), np.where(large, 2.0, 6.0), np.full(len(ops), 12.0), np.minimum(64.0 / warps, 32.0)],
        2.0,
    )
    shared = np.select([kind == "last.special", np.isin(kind, _TAPS)], [0.6, 1.1], 1.2) * s.rs * s.image
    # The direct kernel takes elements of a pixel from lines far apart: as long as forty taps, whatever its filter.
    # That of a filter's gradient has a block for each weight; up to eight warps walk over images, and to begin with
    # one is as long as four steps: eleven launches of the H200 database.
    rows = np.array([np.ceil(op.n / 8.0) * (np.ceil(op.p * op.q / 32.0) + 4.0) + 5.0 for op in ops])
    steps = np.select([kind == "last.direct", kind == "first.filter"], [np.full(len(ops), 40.0), rows], s.rs + 5.0)
    return np.maximum(np.ceil(units), 1.0), held, steps, shared, _again(kind, s)


def _group(form: tuple[bool, str], kind: str) -> str:
    """Convolutions share corrections by the kind of kernel cuDNN and PyTorch have for them."""
    grouped, depthwise = form
    if depthwise:
        return f"conv2d.depthwise.{depthwise}"
    return "conv2d.grouped" if grouped else f"conv2d.{kind}"
