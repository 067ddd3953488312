"""Fused attention: blocks of queries walk over keys and values, and scores never leave the chip.

With few queries (decode), libraries cut the cache of keys instead, so that blocks fill the chip.
cuDNN's rule is read off the grids of 150 kernels on an H200: powers of two, with 128 keys or more
each, about two blocks an SM, and no cut at all up to 512 keys or where fewer than four parts would
fit. FlashAttention's is its own ``num_splits_heuristic``: the fewest parts whose waves are filled
to 85 % of what the best number fills. Both are for formats of 16 bits and less. PyTorch runs others
with its memory-efficient kernel, which cuts no cache and takes a block for each head of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from operator import attrgetter

import numpy as np

from wattcast.core.arrays import Array, CodedColumn
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.special_grids import power_of_two
from wattcast.kernels.kernel_table import (
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    count_columns,
    resident_share,
    wave_fill,
)
from wattcast.workload.operator_types import Attention

_KEYS = 128.0
_UNCUT_KEYS = 512
_MOST = 64.0
_FEWEST = 4.0
_FLASH_MOST = 128
_FLASH_FULL = 0.8
_FLASH_NEAR = 0.85


def cudnn_parts(blocks: float, keys: int, sm_count: float) -> float:
    """Return the parts that cuDNN cuts the cache into, for ``blocks`` heads of keys of all batches.

    >>> cudnn_parts(16, 2048, 132), cudnn_parts(40, 8192, 132), cudnn_parts(128, 8192, 132), cudnn_parts(4, 512, 132)
    (16.0, 4.0, 1.0, 1.0)
    """
    if keys <= _UNCUT_KEYS:
        return 1.0
    parts = min(power_of_two(keys / _KEYS, _MOST), power_of_two(2.0 * sm_count / blocks, _MOST))
    return parts if parts >= _FEWEST else 1.0


@lru_cache(maxsize=4096)
def flash_parts(blocks: float, keys: int, head_dim: int, sm_count: float) -> float:
    """Return the parts that FlashAttention cuts the cache into, for ``blocks`` of queries.

    >>> flash_parts(96, 8192, 64, 132), flash_parts(64, 4096, 128, 132), flash_parts(512, 4096, 64, 132)
    (5.0, 4.0, 1.0)
    """
    at_once = (
        256.0 if head_dim <= 64 else 128.0 if head_dim <= 128 else 64.0
    )  # keys that a block takes
    return float(fill_with_parts(blocks, ceil(keys / at_once), 2.0 * sm_count))


def fill_with_parts(tiles: float, steps: int, slots: float, any_number: bool = False) -> int:
    """Return FlashAttention's parts of ``steps`` blocks of keys, for ``tiles`` on a chip with
    ``slots`` for tiles.

    Numbers of parts that do not shorten the longest one are passed over, unless ``any_number`` will
    do (version 3)."""
    if tiles >= _FLASH_FULL * slots:
        return 1
    parts = np.arange(1, min(_FLASH_MOST, int(slots), steps) + 1)
    waves = tiles * parts / slots
    shortens = any_number | (np.diff(np.ceil(steps / parts), prepend=np.inf) < 0)
    filled = np.where(shortens, waves / np.ceil(waves), 0.0)
    return int(np.argmax(filled >= _FLASH_NEAR * filled.max())) + 1


_DECODE_QUERIES = 16  # up to here the kernels split the cache rather than the queries
_BLOCK_Q = 128.0
_BLOCK_KV = 128.0
_HALF_BYTE = 2  # of an element: the widest format of cuDNN and FlashAttention
# cuDNN's, and those that add up heads which share keys
_BACKWARD_LAUNCHES = 4.0
_HEAD_LAUNCHES = 2.0
# PyTorch's, where a head's dimension is no multiple of eight: zeros and a copy, of q, k and v
_PAD_LAUNCHES = 6.0
# What a score costs on top of its products (its exponential, a random number), in head dimensions
# of a product: from times of heads of 40, 64 and 128 on an H200
_SCORE = 110.0
_DROPPED_SCORE = 385.0
_BACKWARD_SCORE = 166.0
_DROPPED_BACKWARD_SCORE = 210.0


def attention_work(
    ops: Sequence[Attention], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return kernel families, work columns and features of fused attention."""
    columns = count_columns(ops, _read_columns)
    (
        batch,
        heads,
        kv_heads,
        q,
        kv,
        dim,
        causal,
        backward,
        dropout,
        width,
        flop,
        read,
        write,
        kept,
    ) = columns
    decode = q <= _DECODE_QUERIES
    sm_count = reference.sm_count
    flash = told.flash | (dim % 8 != 0)  # FlashAttention takes any head once it is padded
    cold = told.cold | (decode & ~told.warm)
    cuts = decode & (backward == 0) & (width <= _HALF_BYTE)
    cut = np.ones(len(ops))
    for i in cuts.nonzero()[0].tolist():
        blocks = float(batch[i] * kv_heads[i])
        keys = int(kv[i])
        wide = int(dim[i])
        cut[i] = (
            flash_parts(blocks, keys, wide, sm_count)
            if flash[i]
            else cudnn_parts(blocks, keys, sm_count)
        )
    rows = np.where(decode, 1.0, np.ceil(q / _BLOCK_Q))
    units = batch * np.where(decode & (width <= _HALF_BYTE), kv_heads, heads) * rows * cut
    keys = np.ceil(kv / cut / _BLOCK_KV)
    padded_q = np.where(decode & (~flash | (cut > 1)), 64.0, _BLOCK_Q)
    products = flop / np.maximum(
        2.0 * batch * heads * q * kv * kept, 1.0
    )  # head dimensions of all products
    least = np.minimum(rows, keys)
    whole_blocks = np.maximum(
        kept, (keys - least + (least + 1.0) / 2.0) / keys
    )  # those on a causal diagonal
    met = np.where(
        (causal > 0) & (rows > 1), whole_blocks, kept
    )  # share of key blocks that query blocks walk over
    loads = np.where(decode, read, units * keys * _BLOCK_KV * met * 2.0 * dim * width + read)
    # how often a byte crosses shared memory; FlashAttention's Ampere kernels load operands each
    # warp for itself
    crossings = (
        np.where(decode, 2.6, 3.6) * np.where(flash, 1.9, 1.0) * np.where(backward > 0, 2.5, 1.0)
    )
    # gradients of queries in fp32, of keys and values by head; five products of a block for two
    shares = heads > kv_heads
    launches = np.where(
        backward > 0, _BACKWARD_LAUNCHES + shares * _HEAD_LAUNCHES, 1.0 + (decode & (cut > 1))
    )
    between = backward * (8.0 * q + shares * 4.0 * width * kv) * batch * heads * dim
    padded = dim % 8 != 0  # operands with zeros behind each head
    launches = launches + padded * _PAD_LAUNCHES
    between = between + padded * 3.0 * read
    slots = np.where(decode, np.where(flash, 2.0, 4.0), 1.0)
    rounds = np.maximum(units / (slots * sm_count), 1.0)
    whole = np.where(decode & flash, np.ceil(rounds) / rounds, 1.0)  # blocks equally long
    score = np.where(backward > 0, _BACKWARD_SCORE, _SCORE)
    dropped = np.where(backward > 0, _BACKWARD_SCORE + _DROPPED_BACKWARD_SCORE, _DROPPED_SCORE)
    score = np.where(dropout > 0, dropped, score)
    missing = np.where(cold, 1.0, 1.0 - resident_share(read + write, reference.l2_byte))
    work = {
        "units": units,
        "unit_flop": 2.0 * padded_q * keys * _BLOCK_KV * (products + score) * met,
        "steps": keys * np.where(decode, 1.0, met) * whole,
        "launches": launches,
        "between_byte": between,
        "l2_byte": loads + write,
        "shared_byte": loads * crossings,
        "slots": slots,
        "dram_read_byte": read * missing,
        "dram_write_byte": write * missing,
    }
    logs = {
        "log_batch": batch,
        "log_heads": heads,
        "log_group": heads / kv_heads,
        "log_q": q,
        "log_kv": kv,
    }
    logs |= {"log_cut": cut, "log_units": units}
    plain = {
        "head_dim": dim,
        "causal": causal,
        "fill": wave_fill(units, sm_count),
        "fill_2": wave_fill(units, 2.0 * sm_count),
        "pad_q": q / (rows * _BLOCK_Q),
        "flash": flash.astype(np.float64),
        "cold": cold.astype(np.float64),
        "cudnn": told.cudnn.astype(np.float64),
        "split_heads": told.split_heads.astype(np.float64),
    }
    kinds = [_kernel_family(*map(bool, bits)) for bits in np.ndindex(2, 2, 2, 2)]
    kind = np.ravel_multi_index((backward > 0, decode, flash, dropout > 0), (2, 2, 2, 2))
    return FamilyColumns(CodedColumn(kinds, kind), work, plain, logs, {})


_read_columns: Callable[[Attention], tuple[float, ...]] = attrgetter(
    *(
        "batch",
        "heads",
        "kv_heads",
        "q_len",
        "kv_len",
        "head_dim",
        "causal",
        "backward",
        "dropout",
        "dtype.byte",
    ),
    *("flop", "read_byte", "write_byte", "kept"),
)


def _kernel_family(backward: bool, decode: bool, flash: bool, dropout: bool) -> str:
    """Return the kernel family: gradients and dropped weights are kernels of their own, as is each
    library's.
    """
    name = (
        "backward"
        if backward
        else f"{'decode' if decode else 'prefill'}{'.flash' if flash else ''}"
    )
    return f"attention.{name}.dropout" if dropout else f"attention.{name}"


register_kernels(Attention, mapping=KernelMapping(attention_work, tensor_cores=True))
