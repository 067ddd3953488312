"""Linear layers, batched products and convolutions -> columns of work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.gemm import features, panel_reread, product
from wattcast.kernels.work import Columns, Condition, Reference, Style, alignment, log2, resident
from wattcast.workload.graph import Bmm, Conv2d, Linear, Operator

# Bytes an address must be a multiple of for the fast kernels: a 16-byte access on every row.
_FAST_BYTE = 16
# Warps of kernels before Hopper load their operands from shared memory each for themselves; from profiler counters.
_SIMT_CROSSINGS, _WARP_CROSSINGS = 3.5, 2.2
_FILTER_STEP = 32.0  # channels of one filter tap that an implicit product takes at a time


def products(
    ops: Sequence[Operator], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of linear layers and batched products."""
    b, m, n, k = (np.array(c, dtype=np.float64) for c in zip(*map(_sizes, ops), strict=True))
    width = np.array([float(op.dtype.byte) for op in ops])
    weight = np.array([float((_weight(op) or op.dtype).byte) for op in ops])
    out = np.array([float((_out(op) or op.dtype).byte) for op in ops])
    linear = np.array([isinstance(op, Linear) for op in ops])
    warm = np.array([c.rotated == "none" for c in conditions])
    straight = np.array([c.layout == "nn" for c in conditions])
    # the fast kernels need 16-byte rows of both operands and of the result; odd sizes fall back furthest
    aligned = ((k * width) % _FAST_BYTE == 0) & ((n * width) % _FAST_BYTE == 0)
    odd = (k % 2 != 0) | (n % 2 != 0)
    simt = np.array([op.dtype in (Dtype.FP32, Dtype.FP64) for op in ops])
    tile = product(b, m, n, k, width, out, rate, aligned & ~simt, simt, reference)
    operands = b * k * (m * width + n * weight)
    group = [_group(op, bool(ok), bool(o), float(rows)) for op, ok, o, rows in zip(ops, aligned, odd, m, strict=True)]
    activation = b * m * k * width
    in_l2 = resident(operands + tile["out_byte"], reference.l2_byte)
    # weights come from DRAM unless measured warm; activations only where they outgrow L2
    warm_share = np.where(linear & ~warm, resident(activation + tile["out_byte"], reference.l2_byte), in_l2)
    kept_weight = np.where(linear & ~warm, 0.0, in_l2)
    read = b * n * k * weight * (1.0 - kept_weight) + activation * (1.0 - warm_share)
    read += panel_reread(b, m, n, k, width, tile, reference) + np.array([_bias_byte(op) for op in ops])
    work = {
        "units": tile["units"],
        "unit_flop": tile["unit_flop"],
        "steps": tile["steps"],
        "launches": 1.0 + (tile["split"] > 1),
        "l2_byte": tile["load_byte"] + tile["out_byte"],
        "between_byte": np.where(tile["split"] > 1, 4.0 * tile["split"] * b * m * n, 0.0),
        "shared_byte": tile["shared_byte"]
        * np.where(simt, _SIMT_CROSSINGS, np.where(aligned | (reference.style is Style.AMPERE), 1.0, _WARP_CROSSINGS))
        + tile["out_byte"],
        "dram_read_byte": read,
        "dram_write_byte": tile["out_byte"] * (1.0 - np.where(linear & ~warm, warm_share, in_l2)),
        "slots": np.ones(len(ops)),
    }
    extra = {
        "linear": linear,
        "straight": straight,
        "warm": warm,
        "odd": odd,
        "bias": np.array([bool(getattr(op, "bias", False)) for op in ops]),
        "dtype": np.array([_code(op.dtype) for op in ops]),
        "weight_width": weight,
    }
    return group, work, features(b, m, n, k, tile, reference) | {k_: v.astype(float) for k_, v in extra.items()}


def convolutions(
    ops: Sequence[Conv2d], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Implicit products: M = batch·p·q, N = output channels, K = c·r·s of one group."""
    groups = np.array([float(op.groups) for op in ops])
    pixels = np.array([float(op.n) * op.p * op.q for op in ops])
    c = np.array([float(op.c) for op in ops]) / groups
    n = np.array([float(op.k) for op in ops]) / groups
    rs = np.array([float(op.r) * op.s for op in ops])
    width = np.array([float(op.dtype.byte) for op in ops])
    read, write = np.array([op.read_byte for op in ops]), np.array([op.write_byte for op in ops])
    image, weight, out = (np.array(x) for x in zip(*(op._tensors_byte for op in ops), strict=True))
    last = np.array([op.channels_last for op in ops])
    depthwise = (groups > 1) & (c == 1)
    simt = np.array([op.dtype in (Dtype.FP32, Dtype.FP64) for op in ops])
    point = np.array([op.r == op.s == op.stride == 1 for op in ops])
    # tensor kernels want channels last, fp32 ones channels first; a point convolution is a product as it lies
    turned = ~depthwise & np.where(simt, last & ~(rs > 49), ~last & ~point)
    step = _FAST_BYTE / width
    padded_in = ~depthwise & ~simt & ~point & (c % step != 0)
    padded_out = ~depthwise & ~simt & ~point & (n % step != 0)
    k = np.where(point, c, rs * np.ceil(c / _FILTER_STEP) * _FILTER_STEP)  # a tap at a time
    tile = product(groups, pixels, n, k, width, width, rate, point & ~simt, ~point | simt, reference)
    moved = 2.0 * (image * (turned | padded_in) + out * (turned | padded_out))
    kept = resident(read + write + moved, reference.l2_byte)
    wide = np.where(depthwise, 0.0, np.maximum(k / (rs * c), 1.0))
    work = {
        "units": np.where(depthwise, np.ceil(pixels * groups / 4096.0), tile["units"]),
        "unit_flop": np.where(depthwise, 2.0 * 4096.0 * rs, tile["unit_flop"]),
        "steps": np.where(depthwise, rs, tile["steps"]),
        "launches": 1.0 + 2.0 * turned + 2.0 * (padded_in & ~turned) + (padded_out & ~turned),
        "l2_byte": np.where(depthwise, read + write, tile["load_byte"] + out),
        "between_byte": moved,
        "shared_byte": np.where(depthwise, 2.0 * rs * image, tile["shared_byte"] + out),
        "dram_read_byte": read * (1.0 - kept) + weight * kept,
        "dram_write_byte": write * (1.0 - kept),
        "slots": np.where(depthwise, 8.0, 1.0),
    }
    group = [_conv_group(op, bool(t)) for op, t in zip(ops, turned, strict=True)]
    extra = {
        "turned": turned.astype(float),
        "padded_in": padded_in.astype(float),
        "padded_out": padded_out.astype(float),
        "align_side": alignment([op.h * op.w for op in ops]),
        "tap_padding": wide,
        "log_moved": log2(moved),
        "log_groups": log2(groups),
        "log_c": log2(c),
        "align_c": alignment(c),
        "log_rs": log2(rs),
        "stride": np.array([float(op.stride) for op in ops]),
        "channels_last": last.astype(float),
        "log_image": log2(image),
        "log_out": log2(out),
        "log_side": log2([op.h for op in ops]),
        "log_batch": log2([op.n for op in ops]),
        "dtype": np.array([_code(op.dtype) for op in ops]),
        "direction": np.array([float(("forward", "dgrad", "wgrad").index(op.direction)) for op in ops]),
    }
    return group, work, features(groups, pixels, n, c * rs, tile, reference) | extra


def _conv_group(op: Conv2d, turned: bool) -> str:
    """Convolutions share corrections by the kind of kernel cuDNN and PyTorch have for them."""
    wide = op.dtype.byte > 2
    if op.groups > 1 and op.c == op.groups:
        if op.channels_last:
            return f"conv2d.depthwise.last.{'wide' if wide else 'half'}"
        tiled = op.dtype is Dtype.FP16 and op.r * op.s <= 25 and op.stride == 1
        return f"conv2d.depthwise.first.{'tiled' if tiled else ('plain' if op.r in (1, 3, 5) else 'generic')}"
    if op.groups > 1:
        return "conv2d.grouped"
    if op.dtype in (Dtype.FP32, Dtype.FP64):
        return "conv2d.simt"
    step = _FAST_BYTE // op.dtype.byte
    if op.r == op.s == 1 and op.stride == 1:  # a plain product
        rows = (op.c, op.k) if op.channels_last else (op.h * op.w,)
        return "conv2d.point" if all(size % step == 0 for size in rows) else "conv2d.point.unaligned"
    return "conv2d.turned" if turned else "conv2d.direct"


def _sizes(op: Operator) -> tuple[int, int, int, int]:
    assert isinstance(op, (Linear, Bmm))
    return (op.b if isinstance(op, Bmm) else 1), op.m, op.n, op.k


def _weight(op: Operator) -> Dtype | None:
    return getattr(op, "weight_dtype", None)


def _out(op: Operator) -> Dtype | None:
    return getattr(op, "out_dtype", None)


def _bias_byte(op: Operator) -> float:
    return float(op.dtype.byte * op.n) if isinstance(op, Linear) and op.bias else 0.0


def _group(op: Operator, aligned: bool, odd: bool, rows: float) -> str:
    """Products share corrections by pipe and by whether the fast kernels may run."""
    if op.dtype in (Dtype.FP32, Dtype.FP64):
        return "gemm.simt.row" if rows <= 1 else "gemm.simt"
    if not aligned and rows <= 1:
        return "gemm.unaligned.row"
    if not aligned and op.dtype is Dtype.TF32:
        return "gemm.unaligned.tf32"
    if not aligned:
        return "gemm.unaligned.odd" if odd else "gemm.unaligned"
    return "gemm.row" if rows <= 16 else f"gemm.{_PIPE.get(op.dtype, 'tensor')}"


_PIPE = {Dtype.FP8: "fp8", Dtype.INT8: "fp8", Dtype.TF32: "tf32"}


def _code(dtype: Dtype) -> float:
    """A number for each pipe: trees cut between them."""
    return {Dtype.FP8: 0.0, Dtype.INT8: 0.0, Dtype.BF16: 1.0, Dtype.FP16: 2.0, Dtype.TF32: 3.0, Dtype.FP32: 4.0}.get(
        dtype, 5.0
    )
