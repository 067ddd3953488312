"""Kernels of an inference engine (vLLM on Hopper): paged and latent attention, narrow products,
experts, small ones.

Tiles are read off the names and grids of the kernels that an H200 ran. Attention packs the query
heads that share keys into the rows of a tile and splits a sequence as FlashAttention 3's scheduler
does, or on other chips as what vLLM runs there. Experts pad the tokens of each expert to whole
blocks of the sizes that vLLM's Triton kernels take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, expm1, log2
from typing import Any

import numpy as np

from wattcast.coefficients import load_coefficients
from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.attention import fill_with_parts
from wattcast.kernels.kernel_table import (
    ConditionColumns,
    FamilyColumns,
    KernelWork,
    LibraryStyle,
    ReferenceChip,
    as_columns,
    resident_share,
    streamed_share,
)
from wattcast.workload import engine_operators as engine

_WORK = (
    *(
        "units",
        "unit_flop",
        "steps",
        "launches",
        "l2_byte",
        "shared_byte",
        "dram_read_byte",
        "dram_write_byte",
    ),
    *("store_byte", "between_byte", "slots", "padded_flop"),
)
_Row = tuple[
    str, tuple[float, ...], dict[str, float], dict[str, float]
]  # kernel family, work, plain, logs


def _by_row(count: Callable[[Any, bool, bool, float, ReferenceChip], _Row]) -> KernelMapping:
    """Return the mapping of operators that ``count`` lowers one by one.

    It sees whether all operands are cold or warm, and the FLOP per cycle and SM of the operator's
    pipe."""

    def work(
        ops: Sequence[Any], told: ConditionColumns, rate: Array, reference: ReferenceChip
    ) -> FamilyColumns:
        known = zip(ops, told.cold.tolist(), told.warm.tolist(), rate.tolist(), strict=True)
        families, *tables = zip(*(count(*one, reference) for one in known), strict=True)
        plain, logs = (
            {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}
            for rows in tables[1:]
        )
        return FamilyColumns(
            families, dict(zip(_WORK, as_columns(tables[0]), strict=True)), plain, logs, {}
        )

    work.__qualname__ = work.__name__ = count.__name__.lstrip("_")
    return KernelMapping(work, tensor_cores=count is not _count_rows)


# Cycles of an SM for a score's exponential, as far as products do not hide it, and to turn a value
# of an fp8 block for the second product (heads above 192 spill registers); from times on an H200
_SCORE_CYCLE = 0.045
_TURN_CYCLE = 0.1
_WIDE_TURN_CYCLE = 0.25
_SPLIT_MARGIN = 1.1  # of the scheduler, over an even share of the blocks
_TILE_STEPS = 4.0  # that starting and ending a tile takes; what one costs is fitted
NVIDIA_TILE_STEPS = (
    0.8  # of TensorRT-LLM's decode kernels, learned on their table of the H200 (fp8, 531 rows)
)
_OWN_DIMS = (
    64,
    128,
    256,
    512,
)  # heads for which FlashInfer and TensorRT-LLM have kernels; others run Triton's


def _attention_tile(
    op: engine.PagedAttention, decode: bool, old: bool, blackwell: bool
) -> tuple[float, float]:
    """Return the packed rows of queries and the keys of a block, as the kernels' names show.

    Before Hopper (``old``) vLLM runs FlashAttention 2 (``run_mha_fwd_splitkv_dispatch``), and
    FlashInfer over caches in fp8 (``FA2DetermineCtaTileQ``). On Blackwell it decodes with
    TensorRT-LLM's kernels, whose names show tiles of 8 or 16 rows."""
    dim = op.head_dim
    fp8 = op.kv_dtype is Dtype.FP8
    if blackwell and decode:
        return 8.0 if op.heads <= 8 * op.kv_heads else 16.0, 128.0
    if old and fp8:
        packed = max(q for _, q, _ in op.groups) * op.heads // op.kv_heads
        return (
            (16.0, 128.0) if packed <= 16 else (128.0 if packed > 64 and dim < 256 else 64.0, 64.0)
        )
    if old:
        return 64.0, 256.0 if dim <= 64 else 128.0 if dim <= 128 else 64.0
    if decode and not op.window and dim in (64, 128):  # one group of warps
        return 64.0, (128.0 if dim == 64 else 96.0) if fp8 else (192.0 if dim == 64 else 128.0)
    rows = 192.0 if dim <= 64 or (dim <= 96 and not fp8) else 128.0
    if dim > 192:
        return rows, 64.0 if op.window else 128.0 if fp8 else 80.0
    return rows, 96.0 if dim > 128 else 192.0 if fp8 and dim > 96 else 128.0


def _count_paged(
    op: engine.PagedAttention, cold: bool, warm: bool, rate: float, reference: ReferenceChip
) -> _Row:
    """Return the columns of paged attention.

    A tile of packed query rows walks over the blocks of keys that its tokens see. A sequence of n
    blocks is cut into ⌈n/s⌉ parts, with s = ⌈1.1 · all blocks / SMs⌉ (FlashAttention 3,
    ``prepare_varlen_num_blocks``); blocks hidden by the mask or a window count as well. The busiest
    SM decides the time.

    FlashAttention 2 packs heads and cuts sequences for single tokens without a window alone
    (``mha_varlen_fwd``), and copies queries and results where it packs; two of its tiles share an
    SM where shared memory holds both. FlashInfer widens fp8 to 16 bit. Both load no keys behind the
    last one. Blackwell's kernels cut until every SM has a part, and turn no fp8 values."""
    group = op.heads // op.kv_heads
    dim = float(op.head_dim)
    sms = reference.sm_count
    kind = op.kind_of_batch
    fp8 = op.kv_dtype is Dtype.FP8
    old = reference.style is LibraryStyle.AMPERE
    blackwell = "tensor_fp4_flop" in reference.per_cycle
    second = old and not fp8
    tile_m, tile_n = _attention_tile(op, kind == "decode", old, blackwell)
    packed = replace(op, kv_heads=op.heads) if second and (op.window or kind != "decode") else op
    parts = [
        _walk_tiles(packed, q, kv, tile_m, tile_n) for _, q, kv in op.groups
    ]  # blocks of keys of each tile
    many = [float(count * packed.kv_heads) for count, _, _ in op.groups]
    total = sum(times * float(walks.sum()) for times, walks in zip(many, parts, strict=True))
    whole = [
        ceil(kv / tile_n) for _, _, kv in op.groups
    ]  # the scheduler counts hidden blocks as well
    counted = sum(
        times * len(walks) * blocks for times, walks, blocks in zip(many, parts, whole, strict=True)
    )
    share = ceil(_SPLIT_MARGIN * counted / sms)
    most = float(op.splits or _most_splits(op, tile_m, tile_n, sms))
    slots = 1.0
    copies = 0.0
    if second:
        cut = packed is op and group > 1
        share = 1
        most = float(_most_splits(op, tile_m, tile_n, 2.0 * sms, batch=op.tokens)) if cut else 1.0
        copies = 2.0 * (cut and op.tokens > 1 and op.kv_heads > 1)
        held_byte = (tile_m * op.dtype.byte + 2.0 * tile_n * op.kv_dtype.byte) * dim
        slots = min(max(reference.shared_byte // held_byte, 1.0), 2.0) if kind == "decode" else 1.0
    elif blackwell and kind == "decode":
        share = 1
        most = max(
            sms // sum(times * len(walks) for times, walks in zip(many, parts, strict=True)),
            1.0,
        )
    cuts = [min(max(ceil(blocks / share), 1.0), most) for blocks in whole]
    units = sum(
        times * len(walks) * cut for times, walks, cut in zip(many, parts, cuts, strict=True)
    )
    if units > _LISTED_WAVES * sms:  # many waves: an even share, and the end of the last tiles
        busiest = total / sms + 0.5 * min(float(walks[0]) for walks in parts)
    else:
        listed = zip(many, parts, cuts, strict=True)
        tiles = [np.repeat(np.ceil(walks / cut), int(times * cut)) for times, walks, cut in listed]
        busiest = _busiest_share(np.concatenate(tiles), int(sms))
    rounds = max(units / sms, 1.0)
    turned = (
        (fp8 and not (old or blackwell))
        * (_TURN_CYCLE if dim <= 192 else _WIDE_TURN_CYCLE)
        * tile_n
        * dim
    )
    slower = rate / reference.per_cycle.get("tensor_fp16_flop", rate) if old and fp8 else 1.0
    tile_flop = slower * 4.0 * tile_m * tile_n * dim
    block_flop = tile_flop + rate * (_SCORE_CYCLE * tile_m * tile_n + turned)
    read = op.read_byte
    write = op.write_byte
    rows = float(op.tokens * op.heads)
    gone = 1.0 - float(resident_share(read + write, reference.l2_byte))
    if cold or (not warm and kind != "prefill"):
        gone = 1.0
    loaded = total * tile_n
    if old:
        sizes = zip(many, parts, op.groups, strict=True)
        loaded = sum(
            times * float(np.minimum(walks * tile_n, kv).sum())
            for times, walks, (_, _, kv) in sizes
        )
    load_byte = 2.0 * loaded * dim * op.math_dtype.byte
    between = 8.0 * rows * dim * max(cuts) if max(cuts) > 1.0 else 4.0 * rows * dim * (most > 1.0)
    between += copies * 2.0 * rows * dim * op.dtype.byte
    tile_steps = NVIDIA_TILE_STEPS if blackwell and kind == "decode" else _TILE_STEPS
    waves = max(units / (sms * slots), 1.0)
    launches = 1.0 + (most > 1.0) + (not op.scheduled) + copies
    work = (
        *(units, block_flop * busiest / rounds, tile_steps * ceil(waves) / waves, launches),
        *(load_byte + read - op.cache_byte + write, 3.0 * load_byte, read * gone, write * gone),
        *(0.0, between, slots, max(tile_flop * total - op.flop, 0.0)),
    )
    batch = float(sum(count for count, _, _ in op.groups))
    plain = {
        "head_dim": dim, "fp8": fp8, "windowed": op.window > 0, "cold": cold, "sink": op.sink,
        "softcap": op.softcap > 0, "scheduled": op.scheduled, "fill": total / (sms * busiest),
        "kinds": len(op.groups), "pad_m": min(group * op.tokens / batch / tile_m, 1.0),
    }  # fmt: skip
    logs = {
        "log_batch": batch, "log_q": op.tokens / batch, "log_kv": op.keys / batch, "log_heads": op.heads,
        "log_group": group, "log_cut": max(cuts), "log_units": units, "log_busiest": busiest,
        "log_longest": max(kv for _, _, kv in op.groups),
    }  # fmt: skip
    triton = fp8 and (old or blackwell) and op.head_dim not in _OWN_DIMS
    return f"attention.engine.paged.{kind}{'.fp8' * fp8}{'.triton' * triton}", work, plain, logs


def _most_splits(
    op: engine.PagedAttention, tile_m: float, tile_n: float, sms: float, batch: int = 0
) -> int:
    """Return how often a sequence may be cut where the caller sets no limit.

    FlashAttention 3 (``get_num_splits``) looks at the longest sequence alone, and cuts none of four
    blocks of keys. FlashAttention 2 (``num_splits_heuristic``) counts the tiles of the whole
    ``batch``, and cuts four blocks too."""
    longest_q, longest_kv = (max(sizes[place] for sizes in op.groups) for place in (1, 2))
    tiles = max(batch, 1) * op.kv_heads * ceil(longest_q * (op.heads // op.kv_heads) / tile_m)
    seen = min(longest_kv, op.window + 1 + tile_m) if op.window else longest_kv
    blocks = ceil(seen / tile_n)
    return (
        1
        if blocks <= 4 and not batch
        else fill_with_parts(tiles, blocks, sms, any_number=not batch)
    )


_LISTED_WAVES = 16.0  # tiles a SM up to which each is placed


def _walk_tiles(op: engine.PagedAttention, q: int, kv: int, tile_m: float, tile_n: float) -> Array:
    """Return the blocks of keys that each tile of a sequence walks over, the last tile's last,
    ``(tile,)``.
    """
    group = op.heads // op.kv_heads
    last = np.minimum(
        np.arange(1, ceil(q * group / tile_m) + 1) * tile_m / group, q
    )  # tokens up to a tile's end
    end = kv - q + np.ceil(last)
    start = (
        np.maximum(kv - q + np.floor(last - tile_m / group) - op.window, 0.0) if op.window else 0.0
    )
    return np.asarray(np.maximum(np.ceil(end / tile_n) - np.floor(start / tile_n), 1.0))


def _busiest_share(walks: Array, sms: int) -> float:
    """Return the blocks of the busiest SM where long tiles are dealt out first, to and fro."""
    dealt = np.zeros((ceil(len(walks) / sms), sms))
    dealt.ravel()[: len(walks)] = np.sort(walks)[::-1]
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return float(dealt.sum(axis=0).max())


_PREFILL_TILE = 128.0
_LATENT_TILE = 64.0
_LATENT_KEYS = 64.0


def _count_latent(
    op: engine.LatentAttention, cold: bool, warm: bool, rate: float, reference: ReferenceChip
) -> _Row:
    """Return the columns of latent attention: tiles of 64 heads walk over a cache that all of them
    share.
    """
    sms, (qk, v), width = reference.sm_count, op.dims, float(op.math_dtype.byte)
    decode = op.phase == "decode"
    if decode:
        tiles = op.batch * ceil(op.heads * op.q_len / _LATENT_TILE)
        walked = ceil(op.kv_len / _LATENT_KEYS)
        cut = min(max(ceil(walked / max(ceil(_SPLIT_MARGIN * tiles * walked / sms), 1)), 1), 32)
        rows = _LATENT_TILE
        keys = _LATENT_KEYS
    else:
        tiles = op.batch * op.heads * ceil(op.q_len / _PREFILL_TILE)
        walked = max(
            ceil(0.5 * (op.kv_len + op.kv_len / max(op.q_len / _PREFILL_TILE, 1.0)) / 128.0), 1
        )
        cut = 1
        rows = _PREFILL_TILE
        keys = 128.0
    units = float(tiles * cut)
    busiest = max(float(ceil(walked / cut)), tiles * walked / sms)
    waves = max(units / sms, 1.0)
    out_rows = float(op.batch * op.heads * op.q_len)
    between = 8.0 * out_rows * v * cut if cut > 1 else 0.0
    read = op.read_byte
    write = op.write_byte
    gone = (
        1.0
        if cold or (decode and not warm)
        else 1.0 - float(resident_share(read + write, reference.l2_byte))
    )
    load_byte = tiles * walked * keys * ((op.latent + op.rope) if decode else qk + v) * width
    launches = (3.0 if op.kernel == "flashmla" and width > 1 else 2.0) if decode else 1.0
    work = (
        *(
            units,
            rows * keys * (2.0 * (qk + v) + rate * _SCORE_CYCLE) * busiest / waves,
            busiest / waves,
            launches,
        ),
        *(
            load_byte + read - op.cache_byte + write,
            3.0 * load_byte,
            read * gone,
            write * gone,
            0.0,
            between,
            1.0,
        ),
        max(2.0 * rows * keys * (qk + v) * tiles * walked - op.flop, 0.0),
    )
    plain = {"fp8": width < 2, "cold": cold, "fill": tiles * walked / (sms * busiest)}
    logs = {
        "log_batch": op.batch, "log_heads": op.heads, "log_kv": op.kv_len, "log_q": op.q_len, "log_cut": cut,
        "log_units": units, "log_busiest": busiest,
    }  # fmt: skip
    kernel = f"{op.phase}.{op.kernel}{'.fp8' if width < 2 else ''}" if decode else "prefill"
    return f"attention.engine.latent.{kernel}", work, plain, logs


_SLICE_STEPS = 6.0
_LEAST_STEPS = 8.0  # along k that a block of Machete's takes (CUTLASS, stream-K)
# Machete shares out the steps of all tiles where they fill few waves and leave the last one short.
# A kernel that does so clears a workspace first, which is a second launch: of the 17 products of
# the H200's database that are not held out, the rule says of 15 what they did.
_SHARED_WAVES = 4.0
_FULL_WAVE = 0.875


@dataclass(frozen=True)
class MacheteCoefficients:
    """What Machete's kernels do besides multiplying."""

    weights_per_cycle: float  # that an SM widens from int4 to bf16
    toggling: float  # energy of its arithmetic in a step, over that of the same on random numbers
    even_tokens: float  # of a product whose arithmetic takes half of its energy


MACHETE_FAMILY = "weight_only.machete"
MACHETE = load_coefficients("machete", MacheteCoefficients)


def _count_product(
    op: engine.NarrowProduct, cold: bool, warm: bool, rate: float, reference: ReferenceChip
) -> _Row:
    """Return the columns of a product with narrow weights."""
    if op.kernel == "machete" and not _runs_machete(reference):
        op = replace(op, kernel="marlin")
    m = float(op.m)
    n = float(op.n)
    k = float(op.k)
    sms = reference.sm_count
    width = float(op.dtype.byte)
    group, tile_m, tile_n, tile_k = _product_tile(op)
    together = (
        2 if isinstance(op, engine.ScaledProduct) and m > 64 else 1
    )  # tiles along tokens that run as a cluster
    rows = together * ceil(m / (together * tile_m))
    tiles = rows * ceil(n / tile_n)
    machete = op.kernel == "machete"
    streamed = op.kernel == "marlin"
    units = float(tiles)
    steps = k / tile_k
    launches = 1.0
    unit_flop = 2.0 * tile_m * tile_n * k
    between = 0.0
    if machete:
        # The warps that widen the weights of a tile also issue its products, one after the other.
        unit_flop += rate * tile_n * k / MACHETE.weights_per_cycle
        waves = tiles / sms
        streamed = waves < _SHARED_WAVES and not waves % 1.0 >= _FULL_WAVE
    if streamed:  # blocks share out all steps of all tiles
        launches += machete and steps > _LEAST_STEPS
        units = min(sms, max(tiles * steps / _LEAST_STEPS, 1.0)) if machete else sms
        steps = steps * tiles / units
        unit_flop = unit_flop * tiles / units
        between = 8.0 * m * n * min(sms / tiles, 4.0) if tiles < sms else 0.0
        # slices of a tile add up in turn; a kernel takes 16 tiles of rows, or 128, the rest others
        if not machete:
            steps += _SLICE_STEPS * sms / tiles
            full, rest = divmod(op.m, 1024 if op.n > 4096 else 8192)
            launches = float(full + (rest >= 64) + (rest % 64 > 0))
    weight = op.weight_byte
    left = m * k * width
    out = op.write_byte
    whole, without = (
        float(resident_share(byte, reference.l2_byte)) for byte in (weight + left + out, left + out)
    )
    load_byte = tiles * k * (tile_m * width + tile_n * weight / (n * k))
    work = (
        *(units, unit_flop, steps, launches, load_byte, 2.5 * load_byte + out),
        *(weight * (1.0 - whole if warm else 1.0) + left * (1.0 - without), out * (1.0 - without)),
        *(out, between, 1.0, 0.0),
    )
    plain = {
        "tile_m": tile_m, "tile_n": tile_n, "fill": _fill_slots(tiles, sms), "pad_m": m / (rows * tile_m),
        "scaled_tensor": isinstance(op, engine.ScaledProduct) and op.scales == "tensor",
        "zero_points": isinstance(op, engine.WeightOnlyProduct) and op.zero_points,
        "narrow": isinstance(op, engine.WeightOnlyProduct) and op.weights in ("int4", "fp4"),
        **{f"fill_{side}": _fill_slots(ceil(m / side) * ceil(n / 128.0), sms) for side in (128, 256)},
    }  # fmt: skip
    return (
        f"gemm.engine.{group}",
        work,
        plain,
        {"log_m": m, "log_n": n, "log_k": k, "log_units": tiles},
    )


def _runs_machete(reference: ReferenceChip) -> bool:
    """Tell whether vLLM has Machete's kernels for a chip: they are made of Hopper's instructions."""
    is_blackwell = "tensor_fp4_flop" in reference.per_cycle
    return reference.style is LibraryStyle.HOPPER and not is_blackwell


def machete_energy(work: KernelWork) -> Array:
    """Return the energy of kernels in an engine's step over that of the same alone, ``(kernel,)``.

    It is 1 of all but Machete's products. With m tokens their arithmetic is a share of m / (m + M)
    of the energy, and costs τ of what it does on random numbers: an int4 weight has few values, so
    that fewer bits change from one product to the next. M = ``even_tokens``, τ = ``toggling``.
    """
    by_machete = [name.endswith(MACHETE_FAMILY) for name in work.kernel_family.values]
    if not any(by_machete):
        return np.ones(len(work.units))
    tokens = np.exp2(work.features["log_m"])
    share = tokens / (tokens + MACHETE.even_tokens)
    is_product = np.array(by_machete).take(work.kernel_family.place)
    return np.where(is_product, 1.0 - (1.0 - MACHETE.toggling) * share, 1.0)


def _fill_slots(units: float, slots: float) -> float:
    """Return the share of slots that have work over all waves."""
    return units / (slots * ceil(units / slots))


def _product_tile(op: engine.NarrowProduct) -> tuple[str, float, float, float]:
    """Return the kind of kernel and the sides of its tile along tokens, outputs and k, as names and
    grids show.
    """
    m = op.m
    if isinstance(op, engine.ScaledProduct):
        tile = (
            (16.0, 64.0, 256.0)
            if m <= 16
            else (64.0, 64.0, 256.0)
            if m <= 64
            else (64.0, 128.0, 128.0)
        )
        return "scaled.fp8", *(tile if m <= 128 else (128.0, 128.0, 128.0))
    if isinstance(op, engine.BlockProduct):
        if (
            op.dtype is Dtype.FP4
        ):  # Blackwell's tensor cores apply the scales: nothing is promoted between steps
            # the part of an SM in tiles that two share (``sm100_fp4_config_default`` of vLLM)
            return "block.fp4", 128.0, (128.0 if m <= 256 else 256.0), 256.0
        if op.kernel == "deepgemm":
            side_m = 16.0 if m <= 16 else 32.0 if m <= 32 else 64.0 if m <= 64 else 128.0
            return "block.deepgemm", side_m, 96.0 if m <= 64 else 128.0, 128.0
        return "block.cutlass", (64.0 if m <= 128 else 128.0), 128.0, 128.0
    assert isinstance(op, engine.WeightOnlyProduct)
    if op.kernel == "marlin":
        side = "int4" if op.weights != "fp8" else "fp8"
        return f"weight_only.marlin.{side}", min(max(16.0 * ceil(m / 16), 16.0), 64.0), 256.0, 64.0
    return MACHETE_FAMILY, *_machete_tile(op.m, op.n, op.k), 64.0


def _machete_tile(m: int, n: int, k: int) -> tuple[float, float]:
    """Return the sides of Machete's tile along tokens and outputs.

    vLLM chooses by size (``csrc/quantization/machete/generate.py``). Between 33 and 64 tokens small
    weights get tiles of 16 tokens, so that each weight is widened three or four times.
    """
    if m > 256:
        return (128.0 if k <= 16384 and n <= 4096 else 256.0), 128.0
    if m > 128:
        small = k <= 4096 and n <= 4096
        medium = k <= 8192 and n <= 8192
        return (64.0 if small else 128.0 if medium else 256.0), 128.0
    if m > 64:
        if k <= 4069 and n <= 8192:
            return (32.0 if n <= 4069 else 64.0), 128.0
        return 128.0, (256.0 if k >= 8192 and n >= 12288 else 128.0)
    if m > 32:
        if k <= 6144 and n <= 6144:
            return 16.0, 128.0
        return 64.0, (256.0 if k >= 16384 and n >= 12288 else 128.0)
    if m > 16:
        return 32.0, (128.0 if k <= 12288 and n <= 8192 else 256.0)
    return 16.0, (256.0 if n >= 26624 else 128.0)


def expert_tile(op: engine.FusedExperts, kernel: str = "triton") -> tuple[int, float]:
    """Return the rows of a block of tokens and the outputs of a tile, as vLLM chooses without a
    tuned table.

    It looks at the tokens of all GPUs that share the experts (``get_default_config``).
    """
    tokens = op.all_tokens or op.tokens
    if (
        kernel == "marlin"
    ):  # the smallest block that an expert's tokens fill to less than nine tenths
        each = (op.picks + op.elsewhere) / op.experts
        return next((rows for rows in (8, 16, 32, 48) if each < 0.9 * rows), 64), 128.0
    if (
        kernel == "oai"
    ):  # the power of two above the mean tokens of an expert, visits to other GPUs included
        each = max((op.picks + op.elsewhere) // op.experts, 1)
        return min(max(1 << (each - 1).bit_length(), 16), 128), 256.0
    if op.scales == "block":
        return (16, 64.0 if tokens < 16 else 128.0) if tokens <= 64 else (64, 128.0)
    if kernel == engine.SMALL_TILES:
        return (16, 32.0) if tokens <= op.experts else (64, 64.0)
    if tokens <= 32:
        return 16, 64.0
    if tokens <= 96:
        return 32, 64.0 if tokens <= 64 else 128.0
    return (64 if tokens <= 512 else 128), 128.0


# Flops of padded tiles and bytes of weights that an SM gets through a cycle in Marlin's kernels,
# whatever its tensor cores and memory could do (mma.sync, weights widened in between): least error
# on 537 public rows
# of an H200
_MARLIN_FLOP = 1300.0
_MARLIN_BYTE = 14.0
# Weights that an SM widens a cycle in OpenAI's Triton kernels, before it multiplies; kernels of a
# layer, and more of them where experts are shared: least error on 283 public rows of an H200
_OAI_WEIGHTS = 34.0
_OAI_LAUNCHES = 10.0
_OAI_SHARING = 9.0
# Bytes of shared memory that widening a weight draws as much as: 12 layers of gpt-oss-20b in vLLM
# on an H200, random against zero weights, batches of 1 to 256 (9 to 22)
_OAI_SHARED = 15.0
_EXPERT_SLOTS = 2.0  # tiles that an SM runs at once
# that a tile of zeros takes: least error on public rows of 2 and more GPUs (vLLM 0.22, H200)
_ZERO_STEPS = 20.0


def _count_zero_tiles(op: engine.FusedExperts, block: int, across: float) -> float:
    """Return the tiles of zeros that vLLM's Triton kernels write for visits to experts of other
    GPUs.

    ``moe_align_block_size`` pads the tokens of those experts to whole blocks too; ``across``: tiles
    of a block."""
    others = float(op.experts * (op.gpus - 1))
    if not (others and op.elsewhere):
        return 0.0
    visited = others * -expm1(-op.elsewhere / others)
    return max(visited, op.elsewhere / block + 0.5 * visited) * across


def _count_experts(
    op: engine.FusedExperts, cold: bool, warm: bool, rate: float, reference: ReferenceChip
) -> _Row:
    """Return the columns of fused experts: padded blocks of tokens of each visited expert, twice
    multiplied.
    """
    sms = reference.sm_count
    picks = float(op.picks)
    width = float(op.dtype.byte)
    hidden = float(op.hidden)
    inner = float(op.intermediate)
    narrow = op.weights in ("int4", "fp4")
    kernel = op.kernel
    if not kernel:  # as vLLM chooses by chip and weights
        hopper = reference.style is LibraryStyle.HOPPER
        blackwell = "tensor_fp4_flop" in reference.per_cycle
        kernel = "triton" if not narrow else "oai" if hopper and op.weights == "fp4" else "marlin"
        kernel = "trtllm" if blackwell and op.weights != "int4" else kernel
    block, side = expert_tile(op, kernel)
    blocks = max(op.count_blocks(block), 1.0)
    across = ceil(2.0 * inner / side) + ceil(hidden / side)
    tiles = blocks * across
    own = kernel.startswith("triton")
    padded = blocks * block
    fp8 = op.dtype is Dtype.FP8
    # results of the first product, of the gate and of the second, each written and read again
    between = (
        2.0 * 2.0 * picks * (2.0 * inner + hidden)
        + (2.0 + width) * picks * inner
        + 3.0 * fp8 * (picks * inner + op.tokens * hidden)
    )
    steps = (hidden + inner) / 128.0
    launches = 6.0 + (2.0 if op.scales == "block" else 6.0 if fp8 else 0.0)
    if (
        kernel == "trtllm"
    ):  # gates in the first product but for scales of blocks; a tensor's scales are known before
        gates = op.scales == "block"
        launches = 6.0 + fp8 + gates
        between = (
            picks * (4.0 * hidden + (2.0 * width + 8.0 * gates) * inner)
            + 3.0 * fp8 * op.tokens * hidden
        )
    if (
        own or kernel == "marlin"
    ):  # zeros of visits to other GPUs, written by products, gated and summed up
        between += op.elsewhere * (4.0 * hidden + (6.0 + 4.0 * own + 3.0 * fp8) * inner)
    if own:
        steps += (
            _ZERO_STEPS * _count_zero_tiles(op, block, across) / max(tiles, _EXPERT_SLOTS * sms)
        )
    weight = op.active * op.expert_byte
    loads = blocks * (ceil(2.0 * inner / side) * hidden + ceil(hidden / side) * inner)
    load_byte = loads * (block * width + side * op.expert_byte / (3.0 * hidden * inner))
    gone = 1.0 - float(resident_share(weight, reference.l2_byte)) if warm else 1.0
    outer = (
        4.0
        * op.tokens
        * hidden
        * (1.0 - float(streamed_share(4.0 * op.tokens * hidden, reference.l2_byte)))
    )
    unit_flop = 6.0 * padded * hidden * inner / tiles
    slots = _EXPERT_SLOTS
    shared_byte = 3.0 * load_byte
    if kernel == "oai":  # gates in the first product
        slots = 1.0
        steps = 6.0
        launches = _OAI_LAUNCHES + _OAI_SHARING * (op.gpus > 1)
        between = 4.0 * picks * (hidden + inner)
        unit_flop += rate * loads * side / (tiles * _OAI_WEIGHTS)
        shared_byte += _OAI_SHARED * loads * side
    if kernel == "marlin":
        unit_flop = max(
            unit_flop,
            rate * max(unit_flop / _MARLIN_FLOP, op.expert_byte / (across * _MARLIN_BYTE)),
        )
    work = (
        *(tiles, unit_flop, steps, launches),
        *(load_byte, shared_byte),
        *(weight * gone + 0.5 * outer, 0.5 * outer, 0.0, between, slots, 0.0),
    )
    kind = "narrow" if narrow else "block" if op.scales == "block" else "fp8" if fp8 else "half"
    plain = {
        "top_k": op.top_k, "fp8": fp8, "blockwise": op.scales == "block", "narrow": narrow,
        "tuned": has_tuned_tiles(op.experts, op.intermediate, kind),
        "skewed": engine.RANK_EXPONENTS.get(op.routing, 0.0) + op.skew, "fill": _fill_slots(tiles, sms),
        "padding": picks / padded, "active_share": op.active / op.experts, "block_m": block,
        "held": min(weight / reference.l2_byte, 3.0),
        **{name: name in kernel for name in engine.EXPERT_LIBRARIES},
    }  # fmt: skip
    logs = {
        "log_tokens": op.tokens, "log_experts": op.experts, "log_hidden": hidden, "log_inner": inner,
        "log_active": op.active, "log_each": picks / op.active, "log_units": tiles,
        "log_elsewhere": 1.0 + op.elsewhere,
    }  # fmt: skip
    return f"gemm.engine.experts.{kind}", work, plain, logs


def has_tuned_tiles(experts: int, intermediate: int, kind: str, gpu: str = "h200") -> bool:
    """Tell whether vLLM ships tiles of its Triton kernels that were tuned on a GPU for these
    experts.

    ``kind`` is half, fp8 (scales of a tensor) or block. Names are those of 0.25.1 on the H200, of
    0.27.1 on the A100."""
    return (gpu, experts, intermediate, kind) in _tuned_experts()


@cache
def _tuned_experts() -> frozenset[tuple[str, int, int, str]]:
    rows = read_shipped_table("wattcast.kernels.families", "tuned_experts.csv")
    return frozenset(
        (row["gpu"], int(row["experts"]), int(row["intermediate"]), row["kind"]) for row in rows
    )


_REGISTERS = 65536.0  # of an SM
_BLOCK_VALUES = 128.0  # that share a scale
_BUSY_GROUPS = 8.0  # of them, below which a block is as slow as one of so many
_ROUTE_SCORES = 1024.0  # that a block of the routing kernel takes


@cache
def _row_costs() -> dict[str, tuple[float, ...]]:
    """Read what small kernels cost, by names, grids, registers and times of those that an H200 ran.

    Of each: cycles of an SM for an element (most where single values become fp8), the most threads
    of a block, values for which it has one, values that a thread takes at once, registers of a
    thread, and passes over a row."""
    names = ("element_cycle", "threads", "values_each", "vector", "registers", "passes")
    rows = read_shipped_table("wattcast.kernels.families", "row_costs.csv")
    return {row["kernel"]: tuple(float(row[name]) for name in names) for row in rows}


def _count_rows(
    op: engine.RowKernel, cold: bool, warm: bool, rate: float, reference: ReferenceChip
) -> _Row:
    """Return the columns of a small kernel with a block a token.

    Its dependent steps are the loads of a thread in each pass; from device memory they take twice
    as long as from L2."""
    read = op.read_byte
    write = op.write_byte
    elements = op.elements
    sms = reference.sm_count
    kind = op.kind.removeprefix("engine_")
    detail = getattr(op, "quant", "") or getattr(op, "mode", "")
    units = float(op.rows)
    launches = 1.0
    padded = elements
    slots = 16.0
    residual = bool(getattr(op, "residual", False))
    if isinstance(op, engine.CompiledRows):
        detail = (
            "gate" if op.function.startswith("silu") else "norm"
        ) + "_quant" * op.function.endswith("quant")
        residual = op.function.startswith("add")
    elif isinstance(op, engine.CacheWrite):
        detail = "fp8" * (op.kv_dtype is Dtype.FP8)
    drawn = kind == "sampling" and detail != "greedy"
    in_place = isinstance(op, engine.EngineRotary) or residual
    held = (
        read
        if in_place
        else read + write
        if kind != "sampling"
        else elements * (14.0 if drawn else 6.0)
    )
    gone = 1.0 if cold else 1.0 - float(resident_share(held, reference.l2_byte))
    if isinstance(
        op, engine.Sampling
    ):  # 512 threads find a row's maximum, of 2^17 logits and more several blocks;
        # then softmax is one block's, and one of 128 threads looks for the likeliest
        each = op.dim / 512.0
        split = op.dim >= 2**17
        top = detail == "top_p"
        cycles = 0.0
        slots = 2.0
        launches = 2.0 + split + 4.0 * drawn + top
        steps = (
            (56.0 if split else 24.0 + each) + drawn * (24.0 + each) + top * (500.0 + 5.0 * each)
        )
    elif isinstance(op, engine.Route):  # for each pick the threads of a token find their maximum
        whole = not op.experts & (op.experts - 1)
        cycles = 0.4 * op.top_k
        launches = 2.0 - whole
        steps = op.top_k * (
            1.0 if detail == "grouped" else log2(op.experts) * (0.5 if whole else 1.0)
        )
        units = max(op.rows * op.experts / _ROUTE_SCORES, 1.0)
    elif isinstance(
        op, engine.AlignTokens
    ):  # one block sorts, few choices with a warp or a thread an expert
        few = elements < 1024.0 and op.experts <= 64
        units = launches = 2.0 - few
        cycles = 0.0
        steps = elements / (max(op.experts, 32.0) if few else 1024.0)
    else:
        cycles, threads, values_each, vector, registers, passes = _row_costs()[
            f"{kind} {detail}".strip()
        ]
        if detail in ("block", "gate", "gate_quant"):
            units = max(elements / (threads * vector), 1.0)
        elif kind == "rms_norm" and detail != "token" and op.rows >= 256:
            threads = 256.0
        threads = min(ceil(elements / units / values_each), threads)
        loops = ceil(elements / units / (threads * vector))
        slots = min(_REGISTERS // (registers * threads), 32.0)
        steps = passes * (1.0 + loops * (1.0 + residual)) * (1.0 + gone)
        padded = (
            loops * threads * vector * units * ceil(units / sms) / max(units / sms, 1.0)
        )  # on the busiest SM
        if (
            f"{kind} {detail}" == "quantize block"
        ):  # up to 16 groups a block, as many as divide them
            groups = max(int(elements / _BLOCK_VALUES), 1)
            padded *= max(_BUSY_GROUPS / (groups & -groups), 1.0)
        launches = 3.0 if detail == "tensor" else 1.0
    work = (
        *(
            units,
            rate * cycles * padded / units,
            steps,
            launches,
            read + write,
            2.0 * (read + write),
        ),
        *(read * gone, write * gone, 0.0, 0.0, slots, 0.0),
    )
    plain = {
        "cold": cold,
        "residual": residual,
        "byte_per_element": (read + write) / max(elements, 1.0),
    }
    plain["fill"] = _fill_slots(units, slots * sms)
    logs = {"log_rows": op.rows, "log_dim": op.dim, "log_byte": read + write, "log_n": elements}
    root = "rmsnorm" if isinstance(op, engine.EngineRmsNorm) else "elementwise"
    return f"{root}.engine.rows.{kind}{'.' + detail if detail else ''}", work, plain, logs


register_kernels(engine.PagedAttention, mapping=_by_row(_count_paged))
register_kernels(engine.LatentAttention, mapping=_by_row(_count_latent))
register_kernels(*engine.NarrowProduct.__subclasses__(), mapping=_by_row(_count_product))
register_kernels(engine.FusedExperts, mapping=_by_row(_count_experts))
register_kernels(*engine.RowKernel.__subclasses__(), mapping=_by_row(_count_rows))


_SCAN_TILE = (
    4096.0  # values of a block of a convolution, or of the state that a single token changes
)


def _count_scan(
    op: engine.CausalConv | engine.StateScan,
    cold: bool,
    warm: bool,
    rate: float,
    reference: ReferenceChip,
) -> _Row:
    """Return the columns of a short convolution or a scan, from bytes and FLOPs alone: neither was
    measured.

    A prompt's scan is cut as the Triton code of mamba-ssm and flash-linear-attention is: five
    kernels (decay, states of the chunks, states passed along, scores, outputs), six by the delta
    rule. States of chunks pass in fp32. Mamba's first rule is one kernel, with a block for each
    channel of each sequence."""
    units = 1.0
    launches = 1.0
    between = 0.0
    read = op.read_byte
    write = op.write_byte
    if isinstance(op, engine.StateScan) and op.rule == "mamba":
        units = float(op.batch * op.heads)
    elif isinstance(op, engine.StateScan) and op.length > 1:
        units = float(op.batch * -(-op.length // op.chunk) * op.heads)
        launches = 6.0 if op.rule == "delta" else 5.0
        between = 8.0 * units * op.key_dim * op.value_dim
    else:
        units = max(write / op.dtype.byte / _SCAN_TILE, 1.0)
    gone = 1.0 if cold else 1.0 - float(resident_share(read + write + between, reference.l2_byte))
    work = (
        *(units, op.flop / units, 1.0, launches, read + write, 2.0 * (read + write + between)),
        *(read * gone, write * gone, 0.0, between, 2.0, 0.0),
    )
    return "gemm.scan" if between else "elementwise.scan", work, {}, {}


register_kernels(engine.CausalConv, engine.StateScan, mapping=_by_row(_count_scan))
