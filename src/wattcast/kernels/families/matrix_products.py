"""Matrix products as tiles: how many there are, what they move, and which tile a library takes.

A tile of ``tile_n`` outputs (weight rows) by ``tile_m`` tokens walks through K in steps. Where no
choice was fitted, the library is taken to pick the tile and split of K that is fastest under a
plain model [Lee2026, IV-A]:

    cycles = waves·tile_n·tile_m·2·K/split / (rate·ε) + split·(reduction)

with ε the share of the pipe's rate that a tile of that size can feed. Loads of all tiles pass L2;
device memory gives every operand once, and again where the operands of tiles in flight exceed L2.
Point convolutions are products too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from wattcast.core import Dtype
from wattcast.core.arrays import Array, CodedColumn, Mask, map_distinct
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_choice import (
    STANDARD_SIDE,
    STEP_K,
    TF32_CODE,
    VECTOR_KIND,
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
    count_columns,
    resident_share,
    wave_fill,
)
from wattcast.workload.operator_base import Operator, index_words
from wattcast.workload.operator_types import Bmm, Conv2d, Linear

# Sides of the tiles that cuBLAS's Hopper and Ampere kernels come in, along outputs and tokens.
_SIDE_N = np.array(
    [64, 128, 192, 256, 64, 128, 64, 128, 64, 64, 128, 256, 192, 128, 8, 16, 32, 32],
    dtype=np.float64,
)
_SIDE_M = np.array(
    [8, 8, 16, 16, 16, 32, 32, 64, 64, 128, 128, 128, 192, 256, 64, 64, 64, 32], dtype=np.float64
)
_SPLIT = np.array([1, 2, 4, 8, 16], dtype=np.float64)
_MULTICAST = {
    LibraryStyle.HOPPER: 0.5,
    LibraryStyle.AMPERE: 1.0,
}  # blocks of a cluster of two share what L2 sends
_AMPERE_AREA = 256.0 * 128.0  # outputs of the largest tile that registers hold before Hopper
# Before Hopper cuBLAS takes large tiles even where they leave more SMs idle: as if a tile beyond
# 128 x 128 were (area/128²)^x times as fast, which it is not. By the error of vLLM's products on an
# L40S
_LARGE_TILES = 0.5
_REDUCE_CYCLES = 1500.0  # of a split: another pass through L2
_TF32_REDUCE_CYCLES = (
    7000.0  # of a split in tf32: another launch, λ_f of the H200's gemm.ampere (3.6 us) at 1.98 GHz
)
_STEP_CYCLES = 60.0  # a step of K costs no less than its latency over the stages in flight
_LEAST_STEPS = 4.0  # of one part of a split K
# of a block of the kernels without a tile, and elements of K it loads at a time
_ROW_OUTPUTS = 8.0
_ROW_STEP = 512.0
# of operands read again: times all of them, and tiles of the scale
_MOST_AGAIN = 1.4
_TILES_AGAIN = 9.0
_SPLIT_K = 1500.0  # the most of K that a split leaves to a block; from grids
ProductSizes = tuple[Array, Array, Array, Array]  # b, m, n and k, each ``(row,)``


def tile_columns(
    sizes: ProductSizes, width: Array, out_width: Array, rate: Array, picks: KernelPicks, reference: ReferenceChip,
    least_feed: float = 0.0,
) -> Columns:  # fmt: skip
    """Return units, steps and traffic of ``b`` products ``[m, k] @ [k, n]``, averaged in logs over
    likely kernels.

    ``rate`` is FLOP per cycle and SM of the format's own pipe. The arithmetic of kernels on CUDA
    cores is counted as more by as much as those are slower, so that arithmetic over ``rate`` is
    right for both. ``k`` may be ``(row,)`` or ``(row, pick)``, where kernels pad it each in its own
    way. ``least_feed`` is the least that a tile's arithmetic counts over that of one of 128 x 128.
    """
    tile_n = picks.tile_n
    tile_m = picks.tile_m
    parts = picks.split
    step_byte, blocks, fewest, cuda, slots, feed, crossings = picks.constants
    b, m, n, k, width = (
        size[:, np.newaxis] if size.ndim == 1 else size for size in (*sizes, width)
    )
    tiles = b * np.ceil(n / tile_n) * np.ceil(m / tile_m)
    step = step_byte / width
    vector = None
    if not step_byte.all():  # kernels without a tile: a block takes some outputs of all rows
        vector = picks.kind == VECTOR_KIND
        step = np.where(vector, _ROW_STEP, step)
    if not parts.all():
        # parts of K that fill the chip; Hopper's kernels make two or more, others by the length of
        # K
        most = np.maximum(np.floor(k / (_LEAST_STEPS * step)), 1.0)
        by_length = np.where(fewest > 0, fewest, np.ceil(k / _SPLIT_K))
        filling = np.maximum(np.floor(reference.sm_count * blocks / tiles), by_length)
        parts = np.where(
            parts > 0, parts, np.minimum(np.maximum(filling, np.minimum(2.0, most)), most)
        )
    units = tiles * parts
    steps = np.ceil(k / parts / step)
    load = tiles * (tile_n + tile_m) * k * width
    unit_flop = 2.0 * tile_n * tile_m * steps * step * np.maximum(feed, least_feed)
    if vector is not None:
        units = np.where(vector, b * np.ceil(n / _ROW_OUTPUTS), units)
        load = np.where(vector, b * n * k * width, load)
        unit_flop = np.where(vector, 2.0 * _ROW_OUTPUTS * m * k, unit_flop)
    if cuda.any():
        unit_flop *= np.where(
            cuda > 0, np.maximum(feed, least_feed) ** (_crowd_slots(reference) - 1.0), 1.0
        )
        cores = reference.per_cycle.get("cuda_fp32_flop", 0.0)
        slower = rate[:, np.newaxis] / cores if cores > 0 else np.ones((len(rate), 1))
        unit_flop = unit_flop * np.where(cuda > 0, np.maximum(slower, 1.0), 1.0)
    shared = load * crossings
    each = (
        tile_n,
        tile_m,
        parts,
        units,
        steps,
        slots,
        unit_flop,
        load,
        shared,
        wave_fill(units, reference.sm_count),
    )
    return dict(zip(_TILED, _average_picks(each, picks), strict=True)) | {
        "out_byte": (b * m * n)[:, 0] * out_width
    }


_TILED = (
    *("tile_n", "tile_m", "split", "units", "steps", "slots"),
    *("unit_flop", "load_byte", "shared_byte", "fill"),
)


def _average_picks(each: Sequence[Array], picks: KernelPicks) -> Sequence[Array]:
    """Return columns ``(row,)`` from columns ``(row, pick)``, averaged in logs by likelihood.

    A row that is sure of its kernel stays as it is: a logarithm and back would turn 132 units into
    a little more."""
    if picks.share.shape[1] == 1:
        return [values[:, 0] for values in each]
    table = np.array(each)
    mean = np.exp((np.log(table) * picks.share).sum(axis=-1))
    return list(np.where(picks.sure, table[..., 0], mean))


def fastest_tile(
    sizes: ProductSizes, width: Array, rate: Array, slim: Mask, whole: Mask, reference: ReferenceChip,
    reduce_cycles: Array | float = _REDUCE_CYCLES, large_tiles: float = 0.0, cuda: Mask | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the sides of the fastest tile along outputs and tokens, and parts of K.

    ``slim`` says where tiles a few tokens wide exist: in Hopper's library, for aligned tensor
    formats. ``whole`` says where K is never split: on CUDA cores and in convolutions. A split takes
    ``reduce_cycles`` more. Tiles beyond 128 x 128 count as faster by their area to the power of
    ``large_tiles``. ``cuda`` says which products run on CUDA cores."""
    (b, m, n, k), one = sizes, (slice(None), None)
    split = np.repeat(_SPLIT, len(_SIDE_N))
    side_n = np.tile(_SIDE_N, len(_SPLIT))
    side_m = np.tile(_SIDE_M, len(_SPLIT))
    tiles = b[one] * np.ceil(n[one] / side_n) * np.ceil(m[one] / side_m)
    steps = np.ceil(k[one] / split / STEP_K)
    area = side_n * side_m / STANDARD_SIDE**2
    feed = np.minimum(1.0, 0.12 + 0.88 * np.sqrt(area)) * np.maximum(area, 1.0) ** large_tiles
    if cuda is not None:
        feed = np.where(cuda[one], _feed_cuda_cores(area, reference), feed)
    waves = np.ceil(tiles * split / reference.sm_count)
    compute = (
        waves
        * steps
        * np.maximum(2.0 * side_n * side_m * STEP_K / (rate[one] * feed), _STEP_CYCLES)
    )
    l2 = (
        _MULTICAST[reference.style]
        * tiles
        * (side_n + side_m)
        * k[one]
        * width[one]
        / reference.l2_byte_per_cycle
    )
    partial = 8.0 * split * (b * m * n)[one] / reference.l2_byte_per_cycle
    reduce = np.where(split > 1, np.broadcast_to(reduce_cycles, b.shape)[one] + partial, 0.0)
    hopper = reference.style is LibraryStyle.HOPPER
    barred = (split > 1) & (whole[one] | (steps < _LEAST_STEPS)) | (not hopper) & (
        side_n * side_m > _AMPERE_AREA
    )
    barred |= ~(slim[one] & hopper) & (np.minimum(side_n, side_m) < 32)
    best = np.argmin(np.where(barred, np.inf, np.maximum(compute, l2) + reduce), axis=-1)
    return side_n[best], side_m[best], split[best]


def _crowd_slots(reference: ReferenceChip) -> float:
    """Return how far multiply-adds crowd other instructions out: 0 of an SM of 64 fp32 lanes, 1 of
    one of 128.

    The four schedulers of an SM issue 128 lanes' worth of instructions a cycle. With 128 lanes
    multiply-adds take every slot, and each load of operands costs one of them; with 64 they take
    every other, and loads fit in between.
    """
    lanes = reference.per_cycle.get("cuda_fp32_flop", 0.0) / 2.0
    return float(np.clip(lanes / 64.0 - 1.0, 0.0, 1.0))


def _feed_cuda_cores(area: Array, reference: ReferenceChip) -> Array:
    """Return the share of the CUDA cores' rate that a tile reaches, by its area over that of 128 x
    128.

    A thread of a tile of 64 x 64 or more computes 8 x 8 results, one of a smaller tile fewer, so
    that it loads more for each multiply-add. On SMs of 128 lanes the share falls with the area from
    128 x 128 on (measured on an H200: 0.76 of the peak with tiles of 128 x 128, 0.65 with 128 x 64,
    0.55 with 64 x 64; the median of 9, 5 and 12 products). With 64 lanes smaller tiles are as fast,
    and libraries still prefer the larger one where the SMs are as full.
    """
    free = np.minimum(1.0, area / _THREAD_AREA) ** _CUDA_FEED * np.minimum(1.0, area) ** _LARGE_CUDA
    crowded = np.minimum(1.0, area) ** _CUDA_FEED
    share = _crowd_slots(reference)
    return np.asarray(free ** (1.0 - share) * crowded**share)


_THREAD_AREA = 0.25  # of a tile of 64 x 64 over 128 x 128
_CUDA_FEED = 0.3  # as ``simt`` kernels have it in ``kernel_choice``
# How much faster a library takes a tile to be for its area, where it is not. Chosen with fp32
# models on an A100 in view, by their watts, which small tiles raise; 0.06 to 0.15 are alike within
# a point in time and in power.
_LARGE_CUDA = 0.06


def _reread_byte(m: Array, n: Array, operand_byte: Array, in_l2: Array, tile: Columns) -> Array:
    """Return the bytes of the operands that device memory gives again because tiles in flight
    outgrow L2.

    None where all of a product stays in L2 (``in_l2`` is the share that does); else the more, the
    more tiles share an operand on its shorter side, up to 1.4 times the operands. From profiler
    counters of 25 products on an H200."""
    shorter = np.minimum(np.ceil(n / tile["tile_n"]), np.ceil(m / tile["tile_m"]))
    again = _MOST_AGAIN * (1.0 - np.exp(-(shorter - 1.0) / _TILES_AGAIN))
    return np.asarray(again * operand_byte * (1.0 - in_l2))


def product_features(
    b: Array, m: Array, n: Array, k: Array, tile: Columns, reference: ReferenceChip
) -> tuple[Columns, ...]:
    """Return features of a product's shape for the learned residual: plain, in logs, and by
    alignment.
    """
    units = b * np.ceil(n / STANDARD_SIDE) * np.ceil(m / STANDARD_SIDE)
    waves = np.array([tile["units"] / tile["slots"], units]) / reference.sm_count
    rounds, waves_128 = np.log2(waves)
    plain = {
        "tile_n": tile["tile_n"],
        "tile_m": tile["tile_m"],
        "fill": tile["fill"],
        "rounds": rounds,
        "fill_128x128": waves[1] / np.maximum(np.ceil(waves[1]), 1.0),
        "waves_128x128": waves_128,
    }
    logs = {
        "log_b": b,
        "log_m": m,
        "log_n": n,
        "log_k": k,
        "split": tile["split"],
        "log_units": tile["units"],
    }
    return plain, logs, {"align_m": m, "align_n": n, "align_k": k}


FAST_BYTE = (
    16  # a row must be a multiple of this for the fast kernels: a 16-byte access on every row
)
_MANY_CHANNELS = 1 << 20  # input times output channels
# bytes of sums of a filter's gradient, one for each image, over those of what it is made from
_MOST_PARTS = 2.7
CUDA_CORE_FORMATS = (Dtype.FP32, Dtype.FP64)  # formats for CUDA cores
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
    # of one sum for each image, written and read again: a filter's gradient, channels first
    parts_byte: Array
    odd: Array  # 1: two does not divide the rows of both operands as they lie
    half: Array  # 1: nor does four
    aligned: Array  # 1: rows of both operands in whole fast accesses, and so is k
    code: Array  # of the number format


def product_work(
    ops: Sequence[Operator], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return kernel families, work columns and features of products."""
    s = _collect_sizes(ops)
    shape = _describe_shape(told, s)
    picks = _pick_kernels(ops, told, s, shape, rate, reference)
    least_feed = 1.0 if reference.style is LibraryStyle.AMPERE else 0.0
    tile = tile_columns(s[:4], s.width, s.out_width, rate, picks, reference, least_feed)
    right = s.b * s.n * s.k * s.weight_width
    out = tile["out_byte"]
    left = (
        np.where(s.shared > 0, 1.0, s.b) * s.m * s.k * s.width
    )  # a filter that all images share counts once
    both = left + right
    whole, without_weights = (
        resident_share(np.array([both, left]) + out, reference.l2_byte) * ~told.cold
    )
    # weights come from DRAM unless measured warm; activations only where they outgrow L2
    streams = (s.linear > 0) & ~told.warm
    kept = np.where(streams, without_weights, whole)
    read = right * (1.0 - np.where(streams, 0.0, whole)) + left * (1.0 - kept)
    read += _reread_byte(s.m, s.n, both, whole, tile) + s.bias_byte
    split = tile["split"]
    launches = 1.0 + (s.parts_byte > 0)
    between = s.parts_byte
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
    dtypes = index_words(ops, attrgetter("dtype"))
    forms = [
        (dtype, slim, fast)
        for dtype in dtypes.values
        for slim in (False, True)
        for fast in (False, True)
    ]
    fast = (s.aligned > 0) & (reference.style is LibraryStyle.AMPERE)
    form = CodedColumn(forms, 4 * dtypes.place + 2 * (s.m <= _SLIM) + fast)
    group, blend = blend_families(_kernel_family, form, picks)
    plain, logs, aligned = product_features(*s[:4], tile, reference)
    plain |= {name: shape[name] for name in _OWN_FEATURES}
    return FamilyColumns(group, work, plain | blend, logs, aligned)


_OWN_FEATURES = (
    "linear",
    "straight",
    "left_turned",
    "warm",
    "odd",
    "half",
    "bias",
    "dtype",
    "weight_width",
)


def product_choice_inputs(
    ops: Sequence[Operator], told: ConditionColumns
) -> tuple[Sequence[str], tuple[Array, ...], Columns]:
    """Return what the kernel choice sees of products: their choosers, sizes and shapes."""
    s = _collect_sizes(ops)
    return _name_choosers(ops, s), s[:4], _describe_shape(told, s)


def _describe_shape(told: ConditionColumns, s: _Sizes) -> Columns:
    return choice_columns(*s[:4]) | {
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


def _name_choosers(ops: Sequence[Operator], s: _Sizes) -> CodedColumn[str]:
    """Return the chooser of each: products for which a library chooses among the same kernels share
    one.
    """
    dtypes = index_words(ops, attrgetter("dtype"))
    names = [_CHOOSER.get(dtype, "half") for dtype in dtypes.values]
    names += [name if name in ("fp32", "tf32") else f"{name}-unaligned" for name in names]
    return CodedColumn(
        names, np.where(s.aligned > 0, dtypes.place, dtypes.place + len(dtypes.values))
    )


def _pick_kernels(
    ops: Sequence[Operator],
    told: ConditionColumns,
    s: _Sizes,
    shape: Columns,
    rate: Array,
    reference: ReferenceChip,
) -> KernelPicks:
    def usual() -> list[KernelLabel]:
        simt = map_distinct(CUDA_CORE_FORMATS.__contains__, index_words(ops, attrgetter("dtype")))
        fast_tf32 = (s.code == TF32_CODE) & (
            s.aligned > 0
        )  # others take long over each step of K, and a split pays
        reduce_cycles = np.where(fast_tf32, _TF32_REDUCE_CYCLES, _REDUCE_CYCLES)
        large = _LARGE_TILES if reference.style is LibraryStyle.AMPERE else 0.0
        slim = (s.aligned > 0) & ~simt
        sides = fastest_tile(
            s[:4], s.width, rate, slim, simt, reference, reduce_cycles, large, simt
        )
        flags = zip(
            simt.tolist(), (s.aligned > 0).tolist(), (s.odd > 0).tolist(), s.m.tolist(), strict=True
        )
        kinds = [_choose_usual(*flag, reference.style) for flag in flags]
        labels = zip(kinds, *sides, strict=True)
        return [KernelLabel(kind, int(n), int(m), bool(split > 1)) for kind, n, m, split in labels]

    return pick_kernels(
        reference.choice, _name_choosers(ops, s), told.ran, s[:4], shape, usual, reference.sm_count
    )


def _choose_usual(simt: bool, aligned: bool, odd: bool, rows: float, style: LibraryStyle) -> str:
    """Return the kind of kernel where no choice was fitted.

    Hopper's kernels need 16-byte rows of both operands and of the result; odd sizes fall back
    furthest. Libraries before Hopper have Ampere's kernels as their fast ones."""
    if rows <= 1 and (simt or not aligned):
        return "vector"
    if simt:
        return "simt"
    if aligned:
        return "ampere" if style is LibraryStyle.AMPERE else "hopper"
    return "turing" if odd else "ampere"


_CHOOSER = {
    Dtype.FP8: "fp8",
    Dtype.INT8: "fp8",
    Dtype.TF32: "tf32",
    Dtype.FP32: "fp32",
    Dtype.FP64: "fp64",
}


def choice_columns(b: Array, m: Array, n: Array, k: Array) -> Columns:
    """Return sizes as the kernel choice sees them, in log2."""
    log_b, log_m, log_n, log_k, log_out = np.log2(np.array([b, m, n, k, b * m * n]))
    small_m = np.minimum(log_m, 7.0)
    small_out = np.minimum(log_out, 20.0)
    return {
        "b": log_b,
        "m": log_m,
        "n": log_n,
        "k": log_k,
        "small_m": small_m,
        "small_out": small_out,
    }


PRODUCT_CHOICE_COLUMNS = (
    *("b", "m", "n", "k", "small_m", "small_out"),
    *("linear", "straight", "left_turned", "odd", "half", "bias", "dtype"),
)


@cache
def _kernel_family(form: tuple[Dtype, bool, bool], kind: str) -> str:
    """Return the kernel family: by the kind of kernel and its pipe; products of a few tokens have
    their own.

    ``form`` is the number format, whether tokens are few, and whether Ampere's kernels are the
    library's fast ones."""
    dtype, slim, fast = form
    if kind == "hopper" and slim and dtype is not Dtype.TF32:  # in tf32 no tile is slim
        return "gemm.row"
    if kind == "hopper" or (fast and kind == "ampere"):
        return f"gemm.{_PIPE.get(dtype, 'tensor')}"
    wide = dtype in (Dtype.FP32, Dtype.FP64, Dtype.TF32)
    return f"gemm.{kind}.wide" if wide and kind in ("ampere", "vector") else f"gemm.{kind}"


_PIPE = {Dtype.FP8: "fp8", Dtype.INT8: "fp8", Dtype.TF32: "tf32"}


def pipe_code(dtype: Dtype) -> float:
    """Return a number for the pipe of a format, for trees to cut between."""
    return _CODE.get(dtype, 5.0)


_CODE = {
    Dtype.FP8: 0.0,
    Dtype.INT8: 0.0,
    Dtype.BF16: 1.0,
    Dtype.FP16: 2.0,
    Dtype.TF32: TF32_CODE,
    Dtype.FP32: 4.0,
}


def is_point_convolution(op: Operator) -> bool:
    """Return whether an operator is a convolution that libraries run as a plain product."""
    if not isinstance(op, Conv2d) or op.r != 1 or op.s != 1 or op.stride != 1 or op.groups > 1:
        return False
    if (op.stride_w or 1) != 1 or op.padding or op.padding_w or op.dtype in CUDA_CORE_FORMATS:
        return False
    if op.channels_last or op.n == 1:
        return True
    if op.h * op.w % 2 and op.c * op.k >= _MANY_CHANNELS:
        return False  # images of odd size would be read an element at a time: cuDNN turns them
    # sums for each image that outgrow the images: cuDNN turns these instead
    return op.direction != "wgrad" or 4.0 * op.n * op.k * op.c <= _MOST_PARTS * op.read_byte


_TURNED = _Sizes._fields.index("turned")


def _collect_sizes(ops: Sequence[Operator]) -> _Sizes:
    return _Sizes(*count_columns(ops, _fill_row))


def _fill_row(op: Operator) -> tuple[Any, ...]:
    """Return the columns of one product."""
    width = op.dtype.byte
    if isinstance(op, Conv2d):
        found = _fill_point_row(op)
    else:
        assert isinstance(op, (Linear, Bmm))
        weight = width if op.weight_dtype is None else op.weight_dtype.byte
        out = width if op.out_dtype is None else op.out_dtype.byte
        sizes = op.m, op.n, op.k, width, weight, out
        if isinstance(op, Bmm):
            found = op.b, *sizes, 0, 0, 0, op.turned, op.turned, 0
        else:
            # the gradient of a weight is a product of activations: nothing of it comes from DRAM as
            # weights do
            found = 1, *sizes, 0, not op.turned, width * op.n * op.bias, op.turned, op.turned, 0
    n = found[2]
    k = found[3]
    row = found[1] if found[_TURNED] else k
    # rows of both operands; where operands lie with k outermost, k must be long enough too
    aligned = (row * width % FAST_BYTE + n * width % FAST_BYTE == 0) & (k * width >= FAST_BYTE)
    return *found, (row % 2 + n % 2) > 0, (row % 4 + n % 4) > 0, aligned, pipe_code(op.dtype)


def _fill_point_row(op: Conv2d) -> tuple[int, ...]:
    """Return the columns of ``_Sizes`` up to ``parts_byte`` of a point convolution or of one of its
    gradients.

    Channels last: pixels by channels. Channels first: a product for each image, which all share the
    filter; its gradient is a sum over images, each in fp32."""
    width = op.dtype.byte
    side = op.p * op.q
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


PRODUCT_KERNELS = KernelMapping(
    product_work, tensor_cores=True, choice_inputs=product_choice_inputs
)
register_kernels(Linear, Bmm, mapping=PRODUCT_KERNELS)
