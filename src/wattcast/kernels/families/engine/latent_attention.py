"""Latent attention of an engine, whose heads share one narrow cache."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from wattcast.kernels.families import register_kernels
from wattcast.kernels.families.engine.engine_counts import (
    CountedKernel,
    EngineWork,
    OperatorRun,
    count_each,
)
from wattcast.kernels.families.engine.paged_attention import ENGINE_ATTENTION
from wattcast.kernels.kernel_table import MOVED_SUM_BYTE
from wattcast.workload.engine_operators import LatentAttention


class _Walk(NamedTuple):
    """How tiles walk over the cache."""

    rows: float  # of a tile, packed
    keys: float  # of a block
    tiles: int
    blocks: int  # of keys that a tile walks over
    parts: int  # that a sequence is cut into
    values_per_key: int  # that a tile loads for a key


def count_latent_attention(op: LatentAttention, run: OperatorRun) -> CountedKernel:
    """Return the kernel and the work of latent attention."""
    sm_count = run.chip.sm_count
    key_dim, value_dim = op.dims
    width = float(op.math_dtype.byte)
    is_decode = op.phase == "decode"
    walk = _walk_cache(op, sm_count) if is_decode else _walk_prompt(op)

    units = float(walk.tiles * walk.parts)
    walked_blocks = walk.tiles * walk.blocks
    busiest = max(float(ceil(walk.blocks / walk.parts)), walked_blocks / sm_count)
    waves = max(units / sm_count, 1.0)

    # A score costs its two products and its exponential.
    block_scores = walk.rows * walk.keys
    score_flop = 2.0 * (key_dim + value_dim)
    score_flop_with_exponential = score_flop + run.flop_per_cycle * ENGINE_ATTENTION.score_cycles

    load_byte = walked_blocks * walk.keys * walk.values_per_key * width
    missing = run.missing_share(op.read_byte + op.write_byte, streams=is_decode)
    work = EngineWork(
        units=units,
        unit_flop=block_scores * score_flop_with_exponential * busiest / waves,
        steps=busiest / waves,
        launches=_count_launches(op),
        l2_byte=load_byte + op.read_byte - op.cache_byte + op.write_byte,
        shared_byte=ENGINE_ATTENTION.crossings * load_byte,
        dram_read_byte=op.read_byte * missing,
        dram_write_byte=op.write_byte * missing,
        between_byte=_between_byte(op, walk),
        padded_flop=max(block_scores * score_flop * walked_blocks - op.flop, 0.0),
    )
    plain = {
        "fp8": _is_fp8(op),
        "cold": run.is_cold,
        "fill": walked_blocks / (sm_count * busiest),
    }
    logs = {
        "log_batch": op.batch,
        "log_heads": op.heads,
        "log_kv": op.kv_len,
        "log_q": op.q_len,
        "log_cut": walk.parts,
        "log_units": units,
        "log_busiest": busiest,
    }
    return CountedKernel(f"attention.engine.latent.{_name_kernel(op)}", work, plain, logs)


def _is_fp8(op: LatentAttention) -> bool:
    return op.math_dtype.byte < 2


def _name_kernel(op: LatentAttention) -> str:
    """Return the last part of the name of the kernel's family."""
    if op.phase != "decode":
        return "prefill"
    return f"decode.{op.kernel}{'.fp8' if _is_fp8(op) else ''}"


def _count_launches(op: LatentAttention) -> float:
    """Return the kernels of one call: decode has another that adds up the parts of sequences."""
    if op.phase != "decode":
        return 1.0
    if op.kernel == "flashmla" and not _is_fp8(op):
        return ENGINE_ATTENTION.flashmla_launches
    return ENGINE_ATTENTION.latent_decode_launches


def _between_byte(op: LatentAttention, walk: _Walk) -> float:
    """Return the bytes of partial results, which are written and read where a sequence is cut."""
    if walk.parts <= 1:
        return 0.0
    _, value_dim = op.dims
    return MOVED_SUM_BYTE * float(op.batch * op.heads * op.q_len) * value_dim * walk.parts


def _walk_cache(op: LatentAttention, sm_count: float) -> _Walk:
    """Return how decode walks: tiles of 64 heads, each sequence cut as FlashAttention 3 cuts it."""
    tiles = op.batch * ceil(op.heads * op.q_len / ENGINE_ATTENTION.latent_decode_rows)
    blocks = ceil(op.kv_len / ENGINE_ATTENTION.latent_decode_keys)
    part_blocks = max(ceil(ENGINE_ATTENTION.split_margin * tiles * blocks / sm_count), 1)
    parts = min(max(ceil(blocks / part_blocks), 1), ENGINE_ATTENTION.latent_parts)
    return _Walk(
        ENGINE_ATTENTION.latent_decode_rows,
        ENGINE_ATTENTION.latent_decode_keys,
        tiles,
        blocks,
        parts,
        op.latent + op.rope,
    )


def _walk_prompt(op: LatentAttention) -> _Walk:
    """Return how a prompt walks over expanded keys: on average from the first tile to the last."""
    tiles_of_head = max(op.q_len / ENGINE_ATTENTION.latent_prefill_rows, 1.0)
    mean_keys = 0.5 * (op.kv_len + op.kv_len / tiles_of_head)
    blocks = max(ceil(mean_keys / ENGINE_ATTENTION.latent_prefill_keys), 1)
    tiles = op.batch * op.heads * ceil(op.q_len / ENGINE_ATTENTION.latent_prefill_rows)
    return _Walk(
        ENGINE_ATTENTION.latent_prefill_rows,
        ENGINE_ATTENTION.latent_prefill_keys,
        tiles,
        blocks,
        1,
        sum(op.dims),
    )


register_kernels(LatentAttention, mapping=count_each(count_latent_attention))
