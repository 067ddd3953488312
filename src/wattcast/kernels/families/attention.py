"""Fused attention: blocks of queries walk over keys and values, and scores never leave the chip.

With few queries (decode), libraries cut the cache of keys instead, so that blocks fill the chip. cuDNN's rule is read
off the grids of 150 kernels on an H200: powers of two, with 128 keys or more each, about two blocks an SM, and no cut
at all up to 512 keys or where fewer than four parts would fit. FlashAttention's is its own
``num_splits_heuristic``: the fewest parts whose waves are filled to 85 % of what the best number fills. Both are for
formats of 16 bits and less. PyTorch runs others with its memory-efficient kernel, which cuts no cache and takes a
block for each head of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, floor, log2

import numpy as np

from wattcast.core.arrays import Array
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_table import (
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    as_columns,
    resident_share,
)
from wattcast.workload.operator_types import Attention

_KEYS, _UNCUT_KEYS, _MOST, _FEWEST = 128.0, 512, 64.0, 4.0
_FLASH_MOST, _FLASH_FULL, _FLASH_NEAR = 128, 0.8, 0.85


def cudnn_parts(blocks: float, keys: int, sm_count: float) -> float:
    """Return the parts that cuDNN cuts the cache into, for ``blocks`` heads of keys of all batches.

    >>> cudnn_parts(16, 2048, 132), cudnn_parts(40, 8192, 132), cudnn_parts(128, 8192, 132), cudnn_parts(4, 512, 132)
    (16.0, 4.0, 1.0, 1.0)
    """
    if keys <= _UNCUT_KEYS:
        return 1.0
    parts = min(_power_of_two(keys / _KEYS), _power_of_two(2.0 * sm_count / blocks), _MOST)
    return parts if parts >= _FEWEST else 1.0


def _power_of_two(size: float) -> float:
    return float(2.0 ** floor(log2(max(size, 1.0))))


@lru_cache(maxsize=4096)
def flash_parts(blocks: float, keys: int, head_dim: int, sm_count: float) -> float:
    """Return the parts that FlashAttention cuts the cache into, for ``blocks`` of queries.

    >>> flash_parts(96, 8192, 64, 132), flash_parts(64, 4096, 128, 132), flash_parts(512, 4096, 64, 132)
    (5.0, 4.0, 1.0)
    """
    slots = 2.0 * sm_count
    at_once = 256.0 if head_dim <= 64 else 128.0 if head_dim <= 128 else 64.0  # keys that a block takes
    steps = ceil(keys / at_once)
    if blocks >= _FLASH_FULL * slots:
        return 1.0
    most = int(min(_FLASH_MOST, slots, steps))
    filled = {}
    for parts in range(1, most + 1):
        if parts == 1 or ceil(steps / parts) != ceil(steps / (parts - 1)):
            waves = blocks * parts / slots
            filled[parts] = waves / ceil(waves)
    wanted = _FLASH_NEAR * max(filled.values())
    return float(next(parts for parts, share in filled.items() if share >= wanted))


_DECODE_QUERIES = 16  # up to here the kernels split the cache rather than the queries
_BLOCK_Q, _BLOCK_KV = 128.0, 128.0
_HALF_BYTE = 2  # of an element: the widest format of cuDNN and FlashAttention
_BACKWARD_LAUNCHES, _HEAD_LAUNCHES = 4.0, 2.0  # cuDNN's, and those that add up heads which share keys
_PAD_LAUNCHES = 6.0  # PyTorch's, where a head's dimension is no multiple of eight: zeros and a copy, of q, k and v
# What a score costs on top of its products (its exponential, a random number), in head dimensions of a product: from
# times of heads of 40, 64 and 128 on an H200
_SCORE, _DROPPED_SCORE, _BACKWARD_SCORE, _DROPPED_BACKWARD_SCORE = 110.0, 385.0, 166.0, 210.0


def attention_work(
    ops: Sequence[Attention], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return kernel families, work columns and features of fused attention."""
    # FlashAttention takes any head once it is padded
    flash = [asked or op.head_dim % 8 != 0 for op, asked in zip(ops, told.flash.tolist(), strict=True)]
    cold = [
        made or (op.q_len <= _DECODE_QUERIES and not warm)
        for op, made, warm in zip(ops, told.cold.tolist(), told.warm.tolist(), strict=True)
    ]
    table = as_columns([_fill_row(*of, reference) for of in zip(ops, flash, cold, strict=True)])
    work, logs = dict(zip(_WORK, table, strict=False)), dict(zip(_LOGS, table[len(_WORK) :], strict=False))
    plain = dict(zip(_PLAIN, table[len(_WORK) + len(_LOGS) :], strict=True))
    plain |= {"cudnn": told.cudnn.astype(np.float64), "split_heads": told.split_heads.astype(np.float64)}
    return FamilyColumns(
        [_kernel_family(op, by_flash) for op, by_flash in zip(ops, flash, strict=True)], work, plain, logs, {}
    )


_WORK = (
    *("units", "unit_flop", "steps", "launches", "between_byte", "l2_byte", "shared_byte", "slots"),
    *("dram_read_byte", "dram_write_byte"),
)
_LOGS = ("log_batch", "log_heads", "log_group", "log_q", "log_kv", "log_cut", "log_units")
_PLAIN = ("head_dim", "causal", "fill", "fill_2", "pad_q", "flash", "cold")


def _fill_row(op: Attention, flash: bool, cold: bool, reference: ReferenceChip) -> tuple[float, ...]:
    """Return the columns of one operator; a workload has a few, for which plain numbers are faster than arrays."""
    batch, heads, q, dim, width = op.batch, op.heads, float(op.q_len), float(op.head_dim), float(op.dtype.byte)
    kept, read, write, sm_count = op.kept, op.read_byte, op.write_byte, reference.sm_count
    decode = op.q_len <= _DECODE_QUERIES
    rows = 1.0 if decode else float(ceil(q / _BLOCK_Q))
    cut = _count_parts(op, flash, sm_count)
    units = batch * (op.kv_heads if decode and width <= _HALF_BYTE else heads) * rows * cut
    keys = float(ceil(op.kv_len / cut / _BLOCK_KV))
    padded_q = 64.0 if decode and (not flash or cut > 1) else _BLOCK_Q
    products = op.flop / max(2.0 * batch * heads * q * op.kv_len * kept, 1.0)  # head dimensions of all products
    met = _share_met(kept, rows, keys) if op.causal else kept
    loads = read if decode else units * keys * _BLOCK_KV * met * 2.0 * dim * width + read
    # how often a byte crosses shared memory; FlashAttention's Ampere kernels load operands each warp for itself
    crossings = (2.6 if decode else 3.6) * (1.9 if flash else 1.0)
    launches, between, whole = 1.0 + (decode and cut > 1), 0.0, 1.0
    if op.backward:  # gradients of queries in fp32, of keys and values by head; five products of a block for two
        shares = heads > op.kv_heads
        launches = _BACKWARD_LAUNCHES + shares * _HEAD_LAUNCHES
        between = (8.0 * q + shares * 4.0 * width * op.kv_len) * batch * heads * dim
        crossings *= 2.5
    if op.head_dim % 8:  # operands with zeros behind each head
        launches, between = launches + _PAD_LAUNCHES, between + 3.0 * read
    slots = (2.0 if flash else 4.0) if decode else 1.0
    if decode and flash:  # blocks equally long
        rounds = max(units / (slots * sm_count), 1.0)
        whole = ceil(rounds) / rounds
    unit_flop = 2.0 * padded_q * keys * _BLOCK_KV * (products + _price_score(op)) * met
    steps = keys * (1.0 if decode else met) * whole
    missing = 1.0 if cold else 1.0 - float(resident_share(read + write, reference.l2_byte))
    waves = units / sm_count
    return (
        *(units, unit_flop, steps, launches, between, loads + write, loads * crossings, slots),
        *(read * missing, write * missing),
        *(batch, heads, heads / op.kv_heads, q, op.kv_len, cut, units),
        *(dim, op.causal, _share_filled(waves), _share_filled(waves / 2.0), q / (rows * _BLOCK_Q), flash, cold),
    )


def _share_filled(waves: float) -> float:
    """Return the share of whole waves that has work."""
    return waves / max(ceil(waves), 1)


def _count_parts(op: Attention, flash: bool, sm_count: float) -> float:
    """Return the parts that the keys are cut into."""
    if op.q_len > _DECODE_QUERIES or op.backward or op.dtype.byte > _HALF_BYTE:
        return 1.0
    blocks = float(op.batch * op.kv_heads)
    if flash:
        return flash_parts(blocks, op.kv_len, op.head_dim, sm_count)
    return cudnn_parts(blocks, op.kv_len, sm_count)


def _share_met(kept: float, rows: float, keys: float) -> float:
    """Return the share of key blocks that query blocks walk over: those on a causal diagonal count whole."""
    if rows <= 1:
        return kept
    least = min(rows, keys)
    return max(kept, (keys - least + (least + 1.0) / 2.0) / keys)


def _price_score(op: Attention) -> float:
    """Return what a score costs on top of its products, in head dimensions of a product."""
    if op.backward:
        return _BACKWARD_SCORE + (_DROPPED_BACKWARD_SCORE if op.dropout else 0.0)
    return _DROPPED_SCORE if op.dropout else _SCORE


def _kernel_family(op: Attention, flash: bool) -> str:
    """Return the kernel family: gradients and dropped weights are kernels of their own, as is each library's."""
    if op.backward:
        name = "attention.backward"
    else:
        decode = op.q_len <= _DECODE_QUERIES
        name = f"attention.{'decode' if decode else 'prefill'}{'.flash' if flash else ''}"
    return f"{name}.dropout" if op.dropout else name


register_kernels(Attention, mapping=KernelMapping(attention_work, tensor_cores=True))
