"""Attention of an engine over a paged cache, as each generation of chips runs it.

Attention packs the query heads that share keys into the rows of a tile. The tile walks over the
blocks of keys that its tokens see, blocks hidden by a mask or a window included. A sequence may be
cut into parts, which different SMs work on and a second kernel sums up:

- FlashAttention 3 (Hopper, and prompts on Blackwell) cuts a sequence of n blocks into ⌈n/s⌉ parts,
  with s = ⌈1.1 · all blocks / SMs⌉ (``prepare_varlen_num_blocks``).
- FlashAttention 2 (before Hopper) packs heads and cuts sequences only for single tokens without a
  window (``mha_varlen_fwd``). It copies queries and results where it packs, and two of its tiles
  share an SM where shared memory holds both.
- FlashInfer (before Hopper, fp8 caches) widens keys and values to 16 bits.
- TensorRT-LLM (decode on Blackwell) cuts until every SM has a part, and turns no fp8 values.
- TensorRT-LLM's own engine decodes on Hopper with XQA kernels: a tile has the query heads of one
  key head, and a sequence of n blocks of 128 keys is cut into √(8n) parts at most, up to eight
  waves of SMs (``computeMultiBlockCount``). Heads for which there is no XQA kernel read keys one
  by one. No two heads of a prompt share a tile, and a window that holds all is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.kernels.families import register_kernels
from wattcast.kernels.families.attention import fill_with_parts
from wattcast.kernels.families.engine.engine_counts import (
    CountedKernel,
    EngineWork,
    OperatorRun,
    count_each,
)
from wattcast.kernels.kernel_table import (
    MOVED_SUM_BYTE,
    SUM_BYTE,
    LibraryStyle,
    ReferenceChip,
)
from wattcast.kernels.tile_rules import RuleTile, choose_tile
from wattcast.workload.engine_operators import PagedAttention


class EngineAttentionCoefficients(Coefficients):
    """What a tile of attention does besides multiplying."""

    score_cycles: float  # of an SM for a score's exponential, as far as products do not hide it
    turn_cycles: float  # of an SM to turn a value of an fp8 block for the second product
    wide_turn_cycles: float  # the same where heads are so wide that registers spill
    tile_steps: float  # that starting and ending a tile takes
    tensorrt_tile_steps: float  # the same of TensorRT-LLM's decode kernels
    crossings: float  # how often a loaded byte crosses shared memory
    split_margin: float  # of a part over an even share of the blocks
    register_head: int  # widest whose fp8 values are turned without spilling
    most_grouped: int  # query heads a key head of XQA kernels' largest tile
    listed_waves: float  # up to which each tile is placed on its SM
    latent_decode_rows: float  # of a tile of latent attention's decode
    latent_decode_keys: float  # of a block of such a tile
    latent_prefill_rows: float  # of a tile of latent attention's prompts
    latent_prefill_keys: float  # of a block of such a tile
    latent_parts: int  # of a sequence at most
    latent_decode_launches: float  # kernels of latent attention's decode: another adds up the parts
    flashmla_launches: float  # likewise of FlashMLA, which plans its parts in a kernel besides
    xqa_keys: float  # of the least part of a sequence in TensorRT-LLM's XQA kernels
    xqa_rows: float  # of a tile of these, that query heads of a key head are padded to
    xqa_waves: float  # of parts that these cut a batch into at most
    xqa_root: float  # times the blocks of a sequence, whose root are the parts that these want
    flash_whole_blocks: int  # of keys, up to which FlashAttention 3 cuts no sequence


ENGINE_ATTENTION = load_coefficients("engine_attention", EngineAttentionCoefficients)

_FEW_GROUPED = 8  # query heads a key head, for which TensorRT-LLM has smaller tiles
_FLOP_PER_SCORE = 4.0  # and element of a head: two products of a multiply-add each
_XQA_HEAD_DIMS = (64, 128, 256)  # for which TensorRT-LLM has XQA kernels
_FLASH_DECODE_HEAD_DIMS = (64, 128)  # for which FlashAttention 3 has tiles of its own for decode
# Heads for which FlashInfer and TensorRT-LLM have kernels; others run Triton's.
_LIBRARY_HEAD_DIMS = (64, 128, 256, 512)


class _Library(NamedTuple):
    """Which library runs a batch on a chip, and what decides about its kernels."""

    is_decode: bool
    is_fp8: bool
    is_flash_2: bool
    is_flash_infer: bool
    is_blackwell: bool
    is_xqa: bool
    is_mmha: bool
    is_fmha: bool

    @classmethod
    def choose(
        cls,
        op: PagedAttention,
        chip: ReferenceChip,
    ) -> _Library:
        """Return the library that vLLM takes on a chip."""
        is_before_hopper = chip.style is LibraryStyle.AMPERE
        is_fp8 = op.kv_dtype is Dtype.FP8
        return cls(
            is_decode=op.kind_of_batch == "decode" and not _runs_fmha(op, chip),
            is_fp8=is_fp8,
            is_flash_2=is_before_hopper and not is_fp8,
            is_flash_infer=is_before_hopper and is_fp8,
            is_blackwell=chip.is_blackwell,
            is_xqa=_runs_xqa(op, chip),
            is_mmha=_runs_xqa(op, chip) and not _has_xqa(op),
            is_fmha=_runs_fmha(op, chip),
        )

    @property
    def is_before_hopper(self) -> bool:
        return self.is_flash_2 or self.is_flash_infer

    @property
    def is_tensorrt(self) -> bool:
        return self.is_blackwell and self.is_decode

    @property
    def turns_values(self) -> bool:
        """Whether fp8 values are turned in shared memory for the second product."""
        keeps_values = self.is_before_hopper or self.is_blackwell or self.is_xqa or self.is_fmha
        return self.is_fp8 and not keeps_values


def _runs_xqa(op: PagedAttention, chip: ReferenceChip) -> bool:
    """Tell whether TensorRT-LLM decodes on Hopper, where it has XQA kernels."""
    is_decode = op.kind_of_batch == "decode" and op.phase != "prefill"
    return _runs_tensorrt(chip) and is_decode


def _runs_tensorrt(chip: ReferenceChip) -> bool:
    """Tell whether TensorRT-LLM's own engine runs on Hopper."""
    is_hopper = chip.style is LibraryStyle.HOPPER and not chip.is_blackwell
    return chip.engine == "trtllm" and is_hopper


def _has_xqa(op: PagedAttention) -> bool:
    """Tell whether XQA kernels exist for the heads; others are decoded one by one."""
    return op.head_dim in _XQA_HEAD_DIMS and op.heads <= ENGINE_ATTENTION.most_grouped * op.kv_heads


def _runs_fmha(op: PagedAttention, chip: ReferenceChip) -> bool:
    """Tell whether TensorRT-LLM computes prompts, of one head in each tile."""
    is_prompt = op.kind_of_batch == "prefill" or op.phase == "prefill"
    return _runs_tensorrt(chip) and is_prompt


@dataclass(frozen=True, eq=False, repr=False)
class _Walks:
    """The blocks of keys that tiles walk over, one entry for each group of alike sequences."""

    heads: list[float]  # key heads of all sequences of the group
    tiles: list[Array]  # blocks that each tile of a head walks over, ``(tile,)``
    blocks: list[int]  # of all keys of a sequence, hidden ones as well

    @cached_property
    def walked_blocks(self) -> float:
        """Blocks that all tiles walk over."""
        walked = zip(self.heads, self.tiles, strict=True)
        return sum(heads * float(tiles.sum()) for heads, tiles in walked)

    @property
    def scheduled_blocks(self) -> float:
        """Blocks that the scheduler counts, which does not know what masks hide."""
        scheduled = zip(self.heads, self.tiles, self.blocks, strict=True)
        return sum(heads * len(tiles) * blocks for heads, tiles, blocks in scheduled)

    def count_units(self, parts: Sequence[float]) -> float:
        """Return the tiles of all sequences, each group cut into so many parts."""
        cut = zip(self.heads, self.tiles, parts, strict=True)
        return sum(heads * len(tiles) * part for heads, tiles, part in cut)


class _Split(NamedTuple):
    """How sequences are cut into parts, and what that brings with it."""

    parts: list[float]  # of each group
    most: float  # parts that the kernel allows for
    slots: float = 1.0  # tiles that an SM holds
    copies: float = 0.0  # kernels that copy queries and results


class _Schedule(NamedTuple):
    """How the tiles of all sequences are spread over SMs."""

    walks: _Walks
    split: _Split
    units: float  # tiles, with each part of a sequence counted
    busiest: float  # blocks that the busiest SM walks over


def count_paged_attention(op: PagedAttention, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of attention over a paged cache; the busiest SM decides."""
    chip = run.chip
    if _runs_tensorrt(chip) and op.window >= max(keys for _, _, keys in op.groups):
        op = replace(op, window=0)  # a window that holds all is none
    library = _Library.choose(op, chip)
    tile = _choose_tile(op, library)
    walks = _walk_sequences(op, library, tile)
    split = _split_sequences(
        op,
        library,
        tile,
        walks,
        chip,
    )
    units = walks.count_units(split.parts)
    busiest = _count_busiest(walks, split, units, chip.sm_count)
    schedule = _Schedule(walks, split, units, busiest)

    batch = float(sum(count for count, _, _ in op.groups))
    heads_per_key = op.heads // op.kv_heads
    plain = {
        "head_dim": float(op.head_dim),
        "fp8": library.is_fp8,
        "windowed": op.window > 0,
        "cold": run.is_cold,
        "sink": op.sink,
        "softcap": op.softcap > 0,
        "scheduled": op.scheduled,
        "fill": walks.walked_blocks / (chip.sm_count * busiest),
        "kinds": len(op.groups),
        "pad_m": min(heads_per_key * op.tokens / batch / tile.rows, 1.0),
    }
    logs = {
        "log_batch": batch,
        "log_q": op.tokens / batch,
        "log_kv": op.keys / batch,
        "log_heads": op.heads,
        "log_group": heads_per_key,
        "log_cut": max(split.parts),
        "log_units": units,
        "log_busiest": busiest,
        "log_longest": max(keys for _, _, keys in op.groups),
    }
    work = _count_work(
        op,
        run,
        library,
        tile,
        schedule,
    )
    return CountedKernel(_name_family(op, library), work, plain, logs)


def _count_work(
    op: PagedAttention,
    run: OperatorRun,
    library: _Library,
    tile: RuleTile,
    schedule: _Schedule,
) -> EngineWork:
    """Return the work of a kernel whose tiles are spread over SMs in this way."""
    walks, split, units, busiest = schedule
    sm_count = run.chip.sm_count
    head_dim = float(op.head_dim)

    # Arithmetic: that of a block of keys, times the blocks of the busiest SM in each round
    tile_flop = _FLOP_PER_SCORE * tile.rows * tile.outputs * head_dim
    if library.is_flash_infer:
        fp16_flop_per_cycle = run.chip.per_cycle.get("tensor_fp16_flop", run.flop_per_cycle)
        tile_flop *= run.flop_per_cycle / fp16_flop_per_cycle
    if library.is_mmha:  # on CUDA cores
        tile_flop *= run.flop_per_cycle / run.chip.per_cycle["cuda_fp32_flop"]
    block_flop = tile_flop + run.flop_per_cycle * _score_cycles(library, tile, head_dim)
    rounds = max(units / sm_count, 1.0)

    # Bytes: what tiles load, and what parts and copies hand one another
    load_byte = 2.0 * _loaded_keys(op, library, tile, walks) * head_dim * op.math_dtype.byte
    streams = op.kind_of_batch != "prefill"
    missing = run.missing_share(op.read_byte + op.write_byte, streams=streams)

    tile_steps = ENGINE_ATTENTION.tile_steps
    if library.is_tensorrt:
        tile_steps = ENGINE_ATTENTION.tensorrt_tile_steps
    waves = max(units / (sm_count * split.slots), 1.0)
    return EngineWork(
        units=units,
        unit_flop=block_flop * busiest / rounds,
        steps=tile_steps * ceil(waves) / waves,
        launches=1.0 + (split.most > 1.0) + (not op.scheduled) + split.copies,
        l2_byte=load_byte + op.read_byte - op.cache_byte + op.write_byte,
        shared_byte=ENGINE_ATTENTION.crossings * load_byte,
        dram_read_byte=op.read_byte * missing,
        dram_write_byte=op.write_byte * missing,
        between_byte=_between_byte(op, split),
        slots=split.slots,
        padded_flop=max(tile_flop * walks.walked_blocks - op.flop, 0.0),
    )


def _choose_tile(op: PagedAttention, library: _Library) -> RuleTile:
    """Return the tile of a library's kernel; ``outputs`` are the keys of a block."""
    if library.is_mmha:
        return RuleTile(1.0, ENGINE_ATTENTION.xqa_keys, 0.0)
    if library.is_xqa:
        rows = ENGINE_ATTENTION.xqa_rows
        padded_heads = rows * ceil(op.heads / op.kv_heads / rows)
        return RuleTile(padded_heads, ENGINE_ATTENTION.xqa_keys, 0.0)
    if library.is_tensorrt:
        has_few_heads = op.heads <= _FEW_GROUPED * op.kv_heads
        return choose_tile("attention.tensorrt_few" if has_few_heads else "attention.tensorrt")
    if library.is_flash_infer:
        longest = max(tokens for _, tokens, _ in op.groups)
        packed_rows = longest * op.heads // op.kv_heads
        return choose_tile("attention.flash_infer", packed_rows, k=op.head_dim)
    if library.is_flash_2:
        return choose_tile("attention.flash_2", k=op.head_dim)
    kernel = "attention.flash_3"
    if library.is_decode and not op.window and op.head_dim in _FLASH_DECODE_HEAD_DIMS:
        kernel += ".decode"
    if library.is_fp8:
        kernel += ".fp8"
    if op.window:
        kernel += ".window"
    return choose_tile(kernel, k=op.head_dim)


def _walk_sequences(
    op: PagedAttention,
    library: _Library,
    tile: RuleTile,
) -> _Walks:
    """Return what tiles walk over; FlashAttention 2 packs heads in plain decode alone."""
    one_head = library.is_flash_2 and (op.window or not library.is_decode)
    if one_head or library.is_fmha or library.is_mmha:
        op = replace(op, kv_heads=op.heads)
    heads = []
    tiles = []
    blocks = []
    for count, tokens, keys in op.groups:
        heads.append(float(count * op.kv_heads))
        tiles.append(_walk_tiles(op, tokens, keys, tile))
        blocks.append(ceil(keys / tile.outputs))
    return _Walks(heads, tiles, blocks)


def _walk_tiles(
    op: PagedAttention,
    tokens: int,
    keys: int,
    tile: RuleTile,
) -> Array:
    """Return the blocks of keys that each tile of a sequence walks over, ``(tile,)``."""
    heads_per_key = op.heads // op.kv_heads
    tile_count = ceil(tokens * heads_per_key / tile.rows)
    # New tokens up to the end of each tile
    last_token = np.minimum(np.arange(1, tile_count + 1) * tile.rows / heads_per_key, tokens)
    end_key = keys - tokens + np.ceil(last_token)
    first_block: Array | float = 0.0
    if op.window:
        first_token = np.floor(last_token - tile.rows / heads_per_key)
        first_key = np.maximum(keys - tokens + first_token - op.window, 0.0)
        first_block = np.floor(first_key / tile.outputs)
    return np.asarray(np.maximum(np.ceil(end_key / tile.outputs) - first_block, 1.0))


def _split_sequences(
    op: PagedAttention,
    library: _Library,
    tile: RuleTile,
    walks: _Walks,
    chip: ReferenceChip,
) -> _Split:
    """Return how the library cuts sequences into parts."""
    sm_count = chip.sm_count
    if library.is_flash_2:
        return _split_by_flash_2(
            op,
            library,
            tile,
            walks,
            chip,
        )
    if library.is_tensorrt:
        tile_count = walks.count_units([1.0] * len(walks.heads))
        most = max(sm_count // tile_count, 1.0)
        return _Split([min(max(blocks, 1.0), most) for blocks in walks.blocks], most)
    if library.is_xqa:
        tile_count = walks.count_units([1.0] * len(walks.heads))
        most = max(ENGINE_ATTENTION.xqa_waves * sm_count // tile_count, 1.0)
        parts = [min(_count_xqa_parts(keys), most) for _, _, keys in op.groups]
        return _Split(parts, max(parts))
    part_blocks = ceil(ENGINE_ATTENTION.split_margin * walks.scheduled_blocks / sm_count)
    most = float(op.splits or _most_parts(op, tile, sm_count))
    parts = [min(max(ceil(blocks / part_blocks), 1.0), most) for blocks in walks.blocks]
    return _Split(parts, most)


def _count_xqa_parts(keys: int) -> float:
    """Return the parts that XQA kernels want of a sequence, so that adding them up stays short."""
    blocks = max(keys // ENGINE_ATTENTION.xqa_keys, 1.0)
    return min(blocks, max(float(round(sqrt(ENGINE_ATTENTION.xqa_root * blocks))), 1.0))


def _split_by_flash_2(
    op: PagedAttention,
    library: _Library,
    tile: RuleTile,
    walks: _Walks,
    chip: ReferenceChip,
) -> _Split:
    """Return how FlashAttention 2 cuts sequences, which it does only where it packs heads."""
    packs_heads = library.is_decode and not op.window and op.heads > op.kv_heads
    most = 1.0
    if packs_heads:
        most = float(_most_parts(op, tile, 2.0 * chip.sm_count, batch=op.tokens))
    slots = 1.0
    if library.is_decode:
        tile_byte = tile.rows * op.dtype.byte + 2.0 * tile.outputs * op.kv_dtype.byte
        slots = min(max(chip.shared_byte // (tile_byte * op.head_dim), 1.0), 2.0)
    copies = 2.0 if packs_heads and op.tokens > 1 and op.kv_heads > 1 else 0.0
    parts = [min(max(blocks, 1.0), most) for blocks in walks.blocks]
    return _Split(parts, most, slots, copies)


def _most_parts(
    op: PagedAttention,
    tile: RuleTile,
    slots: float,
    batch: int = 0,
) -> int:
    """Return how many parts a sequence may be cut into where the caller sets no limit.

    FlashAttention 3 (``get_num_splits``) looks at the longest sequence alone and leaves up to four
    blocks of keys whole. FlashAttention 2 (``num_splits_heuristic``) counts the tiles of the whole
    ``batch`` and cuts four blocks too.
    """
    longest_tokens = max(tokens for _, tokens, _ in op.groups)
    longest_keys = max(keys for _, _, keys in op.groups)
    tile_rows = ceil(longest_tokens * (op.heads // op.kv_heads) / tile.rows)
    tiles = max(batch, 1) * op.kv_heads * tile_rows
    visible_keys: float = longest_keys
    if op.window:
        visible_keys = min(longest_keys, op.window + 1 + tile.rows)
    blocks = ceil(visible_keys / tile.outputs)
    if blocks <= ENGINE_ATTENTION.flash_whole_blocks and not batch:
        return 1
    return fill_with_parts(tiles, blocks, slots, any_number=not batch)


def _count_busiest(
    walks: _Walks,
    split: _Split,
    units: float,
    sm_count: float,
) -> float:
    """Return the blocks of keys that the busiest SM walks over."""
    if units > ENGINE_ATTENTION.listed_waves * sm_count:
        # An even share, and half of a first tile until the last ones end
        shortest = min(float(tiles[0]) for tiles in walks.tiles)
        return walks.walked_blocks / sm_count + 0.5 * shortest
    parts = []
    for heads, tiles, cut in zip(walks.heads, walks.tiles, split.parts, strict=True):
        parts.append(np.repeat(np.ceil(tiles / cut), int(heads * cut)))
    return _busiest_share(np.concatenate(parts), int(sm_count))


def _busiest_share(walks: Array, sm_count: int) -> float:
    """Return the blocks of the busiest SM where long tiles are dealt out first, to and fro."""
    dealt = np.zeros((ceil(len(walks) / sm_count), sm_count))
    dealt.ravel()[: len(walks)] = np.sort(walks)[::-1]
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return float(dealt.sum(axis=0).max())


def _score_cycles(
    library: _Library,
    tile: RuleTile,
    head_dim: float,
) -> float:
    """Return the cycles of an SM for the scores of a block, and to turn its fp8 values."""
    cycles = ENGINE_ATTENTION.score_cycles * tile.rows * tile.outputs
    if not library.turns_values:
        return cycles
    is_wide = head_dim > ENGINE_ATTENTION.register_head
    turn_cycles = ENGINE_ATTENTION.wide_turn_cycles if is_wide else ENGINE_ATTENTION.turn_cycles
    return cycles + turn_cycles * tile.outputs * head_dim


def _loaded_keys(
    op: PagedAttention,
    library: _Library,
    tile: RuleTile,
    walks: _Walks,
) -> float:
    """Return the keys that all tiles load; before Hopper none behind the last one."""
    if not library.is_before_hopper:
        return walks.walked_blocks * tile.outputs
    loaded = 0.0
    for heads, tiles, (_, _, keys) in zip(walks.heads, walks.tiles, op.groups, strict=True):
        loaded += heads * float(np.minimum(tiles * tile.outputs, keys).sum())
    return loaded


def _between_byte(op: PagedAttention, split: _Split) -> float:
    """Return the bytes of parts and copies: sums in fp32, each written and read again."""
    values = float(op.tokens * op.heads) * float(op.head_dim)
    parts = max(split.parts)
    between = 0.0
    if parts > 1.0:
        between = MOVED_SUM_BYTE * values * parts
    elif split.most > 1.0:
        between = SUM_BYTE * values
    return between + split.copies * 2.0 * values * op.dtype.byte


def _name_family(op: PagedAttention, library: _Library) -> str:
    """Return the kernel family: by batch, cache and, for odd heads, the language of the kernel.

    Decode with more than ``most_grouped`` query heads a key head is a kind of its own: TensorRT-LLM
    has no kernel there that reads keys once for all of them.
    """
    batch = "prefill" if library.is_fmha else op.kind_of_batch
    family = f"attention.engine.paged.{batch}"
    has_kernel = op.head_dim in _LIBRARY_HEAD_DIMS
    if library.is_fp8:
        family += ".fp8"
        if (library.is_before_hopper or library.is_blackwell) and not has_kernel:
            family += ".triton"
    is_ungrouped = op.heads > ENGINE_ATTENTION.most_grouped * op.kv_heads
    if library.is_mmha or (library.is_decode and is_ungrouped):
        family += ".ungrouped"
    return family


register_kernels(PagedAttention, mapping=count_each(count_paged_attention))
