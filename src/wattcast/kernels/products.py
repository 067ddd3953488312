"""Linear layers, batched products and point convolutions -> columns of work.

A convolution of one tap and stride is a product as it lies: pixels by channels where channels are last, a product
for each image where they are first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.choose import Label, Picks, blended, pick
from wattcast.kernels.gemm import fastest, features, reread, tiled
from wattcast.kernels.work import Columns, Condition, Reference, Style, resident
from wattcast.workload.graph import Bmm, Conv2d, Linear, Operator

FAST_BYTE = 16  # a row must be a multiple of this for the fast kernels: a 16-byte access on every row
_MANY_CHANNELS = 1 << 20  # input times output channels
_MOST_PARTS = 2.7  # bytes of sums of a filter's gradient, one for each image, over those of what it is made from
_SLIM = 16.0  # tokens up to which a Hopper product is bound by its weights


@dataclass(frozen=True)
class _Sizes:
    """Arrays ``(row,)`` of products ``b`` times ``[m, k] @ [k, n]``."""

    b: Array
    m: Array
    n: Array
    k: Array
    width: Array  # bytes of an element of the left operand
    weight_width: Array
    out_width: Array
    left_byte: Array  # of all products; a filter that all images share counts once
    linear: npt.NDArray[np.bool_]  # the right operand is a weight
    bias_byte: Array
    turned: npt.NDArray[np.bool_]  # the left operand lies with k outermost, so that its rows are m long
    straight: npt.NDArray[np.bool_]  # so does the right one, its rows n long, as far as its form says
    parts_byte: Array  # of one sum for each image, written and read again: a filter's gradient, channels first

    @property
    def row(self) -> Array:
        """Elements of a row of the left operand as it lies in memory."""
        return np.where(self.turned, self.m, self.k)


def products(
    ops: Sequence[Operator], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of products."""
    s = _sizes(ops)
    shape = _shape(ops, conditions, s)
    warm = shape["warm"] > 0
    picks = _picks(ops, conditions, s, shape, rate, reference)
    tile = tiled(s.b, s.m, s.n, s.k, s.width, s.out_width, rate, picks, reference)
    right = s.b * s.n * s.k * s.weight_width
    in_l2 = resident(s.left_byte + right + tile["out_byte"], reference.l2_byte)
    # weights come from DRAM unless measured warm; activations only where they outgrow L2
    kept = np.where(s.linear & ~warm, resident(s.left_byte + tile["out_byte"], reference.l2_byte), in_l2)
    read = right * (1.0 - np.where(s.linear & ~warm, 0.0, in_l2)) + s.left_byte * (1.0 - kept)
    read += reread(s.m, s.n, s.left_byte + right, tile["out_byte"], tile, reference) + s.bias_byte
    work = {
        "units": tile["units"],
        "unit_flop": tile["unit_flop"],
        "steps": tile["steps"],
        "launches": 1.0 + np.minimum(tile["split"] - 1.0, 1.0) + (s.parts_byte > 0),
        "l2_byte": tile["load_byte"],
        "store_byte": tile["out_byte"],
        "between_byte": np.where(tile["split"] > 1.01, 4.0 * tile["split"] * s.b * s.m * s.n, 0.0) + s.parts_byte,
        "shared_byte": tile["shared_byte"] + tile["out_byte"],
        "dram_read_byte": read,
        "dram_write_byte": tile["out_byte"] * (1.0 - kept),
        "slots": tile["slots"],
    }
    group, blend = blended(lambda i, kind: _group(ops[i].dtype, kind, float(s.m[i])), picks)
    found = blend | features(s.b, s.m, s.n, s.k, tile, reference)
    return group, work, found | {name: shape[name] for name in _OWN_FEATURES}


_OWN_FEATURES = ("linear", "straight", "left_turned", "warm", "odd", "half", "bias", "dtype", "weight_width")


def asked(ops: Sequence[Operator], conditions: Sequence[Condition]) -> tuple[list[str], tuple[Array, ...], Columns]:
    """What the kernel choice sees of products: their classes, sizes and shapes."""
    s = _sizes(ops)
    return _classes(ops, s), (s.b, s.m, s.n, s.k), _shape(ops, conditions, s)


def _shape(ops: Sequence[Operator], conditions: Sequence[Condition], s: _Sizes) -> Columns:
    columns = {
        "linear": s.linear,
        "straight": np.array([c.layout == "nn" for c in conditions]) | s.straight,
        "left_turned": s.turned,
        "warm": s.linear & np.array([c.rotated == "none" for c in conditions]),
        "odd": (s.row % 2 != 0) | (s.n % 2 != 0),
        "half": (s.row % 4 != 0) | (s.n % 4 != 0),
        "bias": s.bias_byte > 0,
        "dtype": np.array([code_of(op.dtype) for op in ops]),
        "weight_width": s.weight_width,
    }
    return choice_columns(s.b, s.m, s.n, s.k) | {name: np.asarray(v, dtype=np.float64) for name, v in columns.items()}


def _aligned(s: _Sizes) -> npt.NDArray[np.bool_]:
    """Rows of both operands in whole fast accesses; of operands that lie with k outermost, k makes none by itself."""
    whole = ((s.row * s.width) % FAST_BYTE == 0) & ((s.n * s.width) % FAST_BYTE == 0)
    return np.asarray(whole & (s.k * s.width >= FAST_BYTE))


def _classes(ops: Sequence[Operator], s: _Sizes) -> list[str]:
    return [class_of(op.dtype, bool(ok)) for op, ok in zip(ops, _aligned(s), strict=True)]


def _picks(
    ops: Sequence[Operator],
    conditions: Sequence[Condition],
    s: _Sizes,
    shape: Columns,
    rate: Array,
    reference: Reference,
) -> Picks:
    aligned, odd = _aligned(s), shape["odd"] > 0
    sizes = (s.b, s.m, s.n, s.k)

    def usual() -> list[Label]:
        simt = np.array([op.dtype in (Dtype.FP32, Dtype.FP64) for op in ops])
        sides = fastest(*sizes, s.width, rate, aligned & ~simt, simt, reference)
        flags = zip(simt, aligned, odd, s.m, *sides, strict=True)
        return [
            Label(_usual(bool(x), bool(ok), bool(o), float(rows), reference.style), int(n), int(m), bool(split > 1))
            for x, ok, o, rows, n, m, split in flags
        ]

    ran = [(c.kernels, c.parts) for c in conditions]
    return pick(reference.choice, _classes(ops, s), ran, sizes, shape, usual, reference.sm_count)


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
    log_m = np.log2(m)
    return {
        "b": np.log2(b),
        "m": log_m,
        "n": np.log2(n),
        "k": np.log2(k),
        "small_m": np.minimum(log_m, 7.0),
        "small_out": np.minimum(np.log2(b * m * n), 20.0),
    }


CHOICE_COLUMNS = (
    *(
        "b",
        "m",
        "n",
        "k",
        "small_m",
        "small_out",
        "linear",
        "straight",
        "left_turned",
        "odd",
        "half",
        "bias",
        "dtype",
    ),
)


def _group(dtype: Dtype, kind: str, rows: float) -> str:
    """Products share corrections by the kind of kernel and its pipe."""
    if kind == "hopper":
        return "gemm.row" if rows <= _SLIM else f"gemm.{_PIPE.get(dtype, 'tensor')}"
    wide = dtype in (Dtype.FP32, Dtype.FP64, Dtype.TF32)
    return f"gemm.{kind}.wide" if wide and kind in ("ampere", "vector") else f"gemm.{kind}"


_PIPE = {Dtype.FP8: "fp8", Dtype.INT8: "fp8", Dtype.TF32: "tf32"}


def code_of(dtype: Dtype) -> float:
    """A number for each pipe: trees cut between them."""
    return _CODE.get(dtype, 5.0)


_CODE = {Dtype.FP8: 0.0, Dtype.INT8: 0.0, Dtype.BF16: 1.0, Dtype.FP16: 2.0, Dtype.TF32: 3.0, Dtype.FP32: 4.0}


def is_point(op: Operator) -> bool:
    """Whether an operator is a convolution that libraries run as a plain product."""
    if not isinstance(op, Conv2d) or op.groups > 1 or op.dtype in (Dtype.FP32, Dtype.FP64):
        return False
    if not op.channels_last and op.n > 1 and op.h * op.w % 2 and op.c * op.k >= _MANY_CHANNELS:
        return False  # images of odd size would be read an element at a time: cuDNN turns them
    sums = 4.0 * op.n * op.k * op.c if op.direction == "wgrad" and not op.channels_last and op.n > 1 else 0.0
    if sums > _MOST_PARTS * op.read_byte:
        return False  # one for each image outgrow the images: cuDNN turns these instead
    return op.r == op.s == op.stride == 1 and (op.stride_w or 1) == 1 and not op.padding and not op.padding_w


def _sizes(ops: Sequence[Operator]) -> _Sizes:
    rows = np.array([_point(op) if isinstance(op, Conv2d) else _row(op) for op in ops], dtype=np.float64)
    b, m, n, k, width, weight, out, shared, linear, bias, turned, straight, parts = rows.T
    left_byte = np.where(shared > 0, 1.0, b) * m * k * width
    return _Sizes(b, m, n, k, width, weight, out, left_byte, linear > 0, bias, turned > 0, straight > 0, parts)


def _row(op: Operator) -> tuple[float, ...]:
    """b, m, n, k, element bytes of the three operands, is the left shared, is the right a weight, bias bytes, are the
    operands turned, bytes of parts."""
    assert isinstance(op, (Linear, Bmm))
    width = float(op.dtype.byte)
    weight = float((getattr(op, "weight_dtype", None) or op.dtype).byte)
    out = float((getattr(op, "out_dtype", None) or op.dtype).byte)
    if isinstance(op, Bmm):
        return op.b, op.m, op.n, op.k, width, weight, out, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    # the gradient of a weight is a product of activations: nothing of it comes from DRAM as weights do
    bias, turned = width * op.n * op.bias, float(op.turned)
    return 1.0, op.m, op.n, op.k, width, weight, out, 0.0, 1.0 - turned, bias, turned, turned, 0.0


def _point(op: Conv2d) -> tuple[float, ...]:
    """The same of a point convolution: forward, or the gradient of its image or its filter.

    Channels last: pixels by channels. Channels first: a product for each image, which all share the filter; its
    gradient is a sum over images, each in fp32.
    """
    width, side = float(op.dtype.byte), float(op.p * op.q)
    if op.direction == "wgrad":
        if op.channels_last:
            return 1.0, op.k, op.c, op.n * side, width, width, width, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0
        out, parts = (4.0, 8.0 * op.n * op.k * op.c) if op.n > 1 else (width, 0.0)
        return op.n, op.k, op.c, side, width, width, out, 0.0, 0.0, 0.0, 0.0, 0.0, parts
    back = op.direction == "dgrad"
    into, of = (op.c, op.k) if back else (op.k, op.c)
    if op.channels_last:
        return 1.0, op.n * side, into, of, width, width, width, 0.0, 1.0, 0.0, 0.0, float(back), 0.0
    return op.n, into, side, of, width, width, width, 1.0, 0.0, 0.0, float(back), 1.0, 0.0
