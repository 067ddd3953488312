"""Linear layers, batched products and point convolutions -> columns of work.

A convolution of one tap and stride is a product as it lies: pixels by channels where channels are last, a product
for each image where they are first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.choose import pick
from wattcast.kernels.gemm import fastest, features, reread, tiled
from wattcast.kernels.picks import Label, Picks, blended
from wattcast.kernels.work import Columns, Part, Reference, Style, Told, columns_of, resident
from wattcast.workload.graph import Bmm, Conv2d, Linear, Operator

FAST_BYTE = 16  # a row must be a multiple of this for the fast kernels: a 16-byte access on every row
_MANY_CHANNELS = 1 << 20  # input times output channels
_MOST_PARTS = 2.7  # bytes of sums of a filter's gradient, one for each image, over those of what it is made from
SIMT = (Dtype.FP32, Dtype.FP64)  # formats for CUDA cores
_SLIM = 16.0  # tokens up to which a Hopper product is bound by its weights


class _Sizes(NamedTuple):
    """Arrays ``(row,)`` of products ``b`` times ``[m, k] @ [k, n]``."""

    b: Array
    m: Array
    n: Array
    k: Array
    width: Array  # bytes of an element of the left operand
    weight_width: Array
    out_width: Array
    shared: Array  # 1: all products share the left operand, a filter
    linear: Array  # 1: the right operand is a weight
    bias_byte: Array
    turned: Array  # 1: the left operand lies with k outermost, so that its rows are m long
    straight: Array  # 1: so does the right one, its rows n long, as far as its form says
    parts_byte: Array  # of one sum for each image, written and read again: a filter's gradient, channels first
    odd: Array  # 1: two does not divide the rows of both operands as they lie
    half: Array  # 1: nor does four
    aligned: Array  # 1: rows of both operands in whole fast accesses, and so is k
    code: Array  # of the number format


def products(ops: Sequence[Operator], told: Told, rate: Array, reference: Reference) -> Part:
    """Groups, work columns and features of products."""
    s = _sizes(ops)
    shape = _shape(told, s)
    picks = _picks(ops, told, s, shape, rate, reference)
    tile = tiled(s.b, s.m, s.n, s.k, s.width, s.out_width, rate, picks, reference)
    right, out = s.b * s.n * s.k * s.weight_width, tile["out_byte"]
    left = np.where(s.shared > 0, 1.0, s.b) * s.m * s.k * s.width  # a filter that all images share counts once
    both = left + right
    whole, without_weights = resident(np.array([both, left]) + out, reference.l2_byte)
    # weights come from DRAM unless measured warm; activations only where they outgrow L2
    streams = (s.linear > 0) & ~told.warm
    kept = np.where(streams, without_weights, whole)
    read = right * (1.0 - np.where(streams, 0.0, whole)) + left * (1.0 - kept)
    read += reread(s.m, s.n, both, whole, tile) + s.bias_byte
    split, launches, between = tile["split"], 1.0 + (s.parts_byte > 0), s.parts_byte
    if (split > 1.0).any():
        launches = launches + np.minimum(split - 1.0, 1.0)
        between = np.where(split > 1.01, 4.0 * split * s.b * s.m * s.n, 0.0) + between
    work = {
        "units": tile["units"],
        "unit_flop": tile["unit_flop"],
        "steps": tile["steps"],
        "launches": launches,
        "l2_byte": tile["load_byte"],
        "store_byte": out,
        "between_byte": between,
        "shared_byte": tile["shared_byte"] + out,
        "dram_read_byte": read,
        "dram_write_byte": out * (1.0 - kept),
        "slots": tile["slots"],
    }
    forms = [(op.dtype, slim) for op, slim in zip(ops, (s.m <= _SLIM).tolist(), strict=True)]
    group, blend = blended(_group, forms, picks)
    plain, logs, aligned = features(s.b, s.m, s.n, s.k, tile, reference)
    plain |= {name: shape[name] for name in _OWN_FEATURES}
    return Part(group, work, plain | blend, logs, aligned)


_OWN_FEATURES = ("linear", "straight", "left_turned", "warm", "odd", "half", "bias", "dtype", "weight_width")


def asked(ops: Sequence[Operator], told: Told) -> tuple[list[str], tuple[Array, ...], Columns]:
    """What the kernel choice sees of products: their classes, sizes and shapes."""
    s = _sizes(ops)
    return _classes(ops, s), (s.b, s.m, s.n, s.k), _shape(told, s)


def _shape(told: Told, s: _Sizes) -> Columns:
    return choice_columns(s.b, s.m, s.n, s.k) | {
        "linear": s.linear,
        "straight": s.straight if told.usual else np.maximum(s.straight, told.straight),
        "left_turned": s.turned,
        "warm": s.linear * told.warm,
        "odd": s.odd,
        "half": s.half,
        "bias": (s.bias_byte > 0).astype(np.float64),
        "dtype": s.code,
        "weight_width": s.weight_width,
    }


def _classes(ops: Sequence[Operator], s: _Sizes) -> list[str]:
    return [class_of(op.dtype, whole > 0) for op, whole in zip(ops, s.aligned.tolist(), strict=True)]


def _picks(
    ops: Sequence[Operator], told: Told, s: _Sizes, shape: Columns, rate: Array, reference: Reference
) -> Picks:
    sizes = (s.b, s.m, s.n, s.k)

    def usual() -> list[Label]:
        simt = np.array([op.dtype in SIMT for op in ops])
        sides = fastest(*sizes, s.width, rate, (s.aligned > 0) & ~simt, simt, reference)
        flags = zip(simt, s.aligned > 0, s.odd > 0, s.m, *sides, strict=True)
        return [
            Label(_usual(bool(x), bool(ok), bool(o), float(rows), reference.style), int(n), int(m), bool(split > 1))
            for x, ok, o, rows, n, m, split in flags
        ]

    return pick(reference.choice, _classes(ops, s), told.ran, sizes, shape, usual, reference.sm_count)


def _usual(simt: bool, aligned: bool, odd: bool, rows: float, style: Style) -> str:
    """The kind of kernel where nothing was fitted.

    Hopper's need 16-byte rows of both operands and of the result; odd sizes fall back furthest. Before Hopper fast
    kernels are those of the style before.
    """
    if rows <= 1 and (simt or not aligned):
        return "vector"
    if simt:
        return "simt"
    if style is Style.AMPERE:
        return "ampere" if aligned else "turing"
    return "hopper" if aligned else ("turing" if odd else "ampere")


def class_of(dtype: Dtype, aligned: bool) -> str:
    """Products among whose kernels the library chooses alike."""
    base = _CLASS.get(dtype, "half")
    return base if aligned or base in ("fp32", "tf32") else f"{base}-unaligned"


_CLASS = {Dtype.FP8: "fp8", Dtype.INT8: "fp8", Dtype.TF32: "tf32", Dtype.FP32: "fp32", Dtype.FP64: "fp64"}


def choice_columns(b: Array, m: Array, n: Array, k: Array) -> Columns:
    """Sizes as the kernel choice sees them, in log2."""
    log_b, log_m, log_n, log_k, log_out = np.log2(np.array([b, m, n, k, b * m * n]))
    small_m, small_out = np.minimum(log_m, 7.0), np.minimum(log_out, 20.0)
    return {"b": log_b, "m": log_m, "n": log_n, "k": log_k, "small_m": small_m, "small_out": small_out}


CHOICE_COLUMNS = (
    *("b", "m", "n", "k", "small_m", "small_out"),
    *("linear", "straight", "left_turned", "odd", "half", "bias", "dtype"),
)


@cache
def _group(form: tuple[Dtype, bool], kind: str) -> str:
    """Products share corrections by the kind of kernel and its pipe; those of a few tokens have their own."""
    dtype, slim = form
    if kind == "hopper":
        return "gemm.row" if slim else f"gemm.{_PIPE.get(dtype, 'tensor')}"
    wide = dtype in (Dtype.FP32, Dtype.FP64, Dtype.TF32)
    return f"gemm.{kind}.wide" if wide and kind in ("ampere", "vector") else f"gemm.{kind}"


_PIPE = {Dtype.FP8: "fp8", Dtype.INT8: "fp8", Dtype.TF32: "tf32"}


def code_of(dtype: Dtype) -> float:
    """A number for each pipe: trees cut between them."""
    return _CODE.get(dtype, 5.0)


_CODE = {Dtype.FP8: 0.0, Dtype.INT8: 0.0, Dtype.BF16: 1.0, Dtype.FP16: 2.0, Dtype.TF32: 3.0, Dtype.FP32: 4.0}


def is_point(op: Operator) -> bool:
    """Whether an operator is a convolution that libraries run as a plain product."""
    if not isinstance(op, Conv2d) or op.r != 1 or op.s != 1 or op.stride != 1 or op.groups > 1:
        return False
    if (op.stride_w or 1) != 1 or op.padding or op.padding_w or op.dtype in SIMT:
        return False
    if op.channels_last or op.n == 1:
        return True
    if op.h * op.w % 2 and op.c * op.k >= _MANY_CHANNELS:
        return False  # images of odd size would be read an element at a time: cuDNN turns them
    # sums for each image that outgrow the images: cuDNN turns these instead
    return op.direction != "wgrad" or 4.0 * op.n * op.k * op.c <= _MOST_PARTS * op.read_byte


_TURNED = _Sizes._fields.index("turned")


def _sizes(ops: Sequence[Operator]) -> _Sizes:
    return _Sizes(*columns_of([_row(op) for op in ops]))


def _row(op: Operator) -> tuple[float, ...]:
    """The columns of one product; how it is aligned follows from whole numbers."""
    found = _point(op) if isinstance(op, Conv2d) else _plain(op)
    n, k, width = found[2], found[3], found[4]
    row = found[1] if found[_TURNED] else k
    # rows of both operands; of operands that lie with k outermost, k makes no fast access by itself
    aligned = row * width % FAST_BYTE == n * width % FAST_BYTE == 0 and k * width >= FAST_BYTE
    return *found, (row | n) & 1, (row | n) & 3 > 0, aligned, code_of(op.dtype)


def _plain(op: Operator) -> tuple[int, ...]:
    """The columns of :class:`_Sizes` up to ``parts_byte``."""
    assert isinstance(op, (Linear, Bmm))
    width = op.dtype.byte
    weight = width if op.weight_dtype is None else op.weight_dtype.byte
    out = width if op.out_dtype is None else op.out_dtype.byte
    if isinstance(op, Bmm):
        return op.b, op.m, op.n, op.k, width, weight, out, 0, 0, 0, 0, 0, 0
    # the gradient of a weight is a product of activations: nothing of it comes from DRAM as weights do
    bias = width * op.n if op.bias else 0
    return 1, op.m, op.n, op.k, width, weight, out, 0, not op.turned, bias, op.turned, op.turned, 0


def _point(op: Conv2d) -> tuple[int, ...]:
    """The same of a point convolution: forward, or the gradient of its image or its filter.

    Channels last: pixels by channels. Channels first: a product for each image, which all share the filter; its
    gradient is a sum over images, each in fp32.
    """
    width, side = op.dtype.byte, op.p * op.q
    if op.direction == "wgrad":
        if op.channels_last:
            return 1, op.k, op.c, op.n * side, width, width, width, 0, 0, 0, 1, 1, 0
        out, parts = (4, 8 * op.n * op.k * op.c) if op.n > 1 else (width, 0)
        return op.n, op.k, op.c, side, width, width, out, 0, 0, 0, 0, 0, parts
    back = op.direction == "dgrad"
    into, of = (op.c, op.k) if back else (op.k, op.c)
    if op.channels_last:
        return 1, op.n * side, into, of, width, width, width, 0, 1, 0, 0, back, 0
    return op.n, into, side, of, width, width, width, 1, 0, 0, back, 1, 0
