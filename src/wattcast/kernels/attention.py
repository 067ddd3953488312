"""Fused attention -> columns of work: prefill tiles queries over SMs, decode splits the cache.

Prefill: blocks of 128 queries (64 for short ones) of one head walk over keys in steps of 128; a causal mask leaves
out blocks above the diagonal, and the longest block sets the tail. Decode: few queries, so the cache
is cut along its length to fill the SMs; a memory-bound reduction. Backward: a kernel for the products of gradient and
result by row, the five products with gradients of queries added up in fp32, and one that casts those.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from wattcast.arrays import Array
from wattcast.kernels.splits import cudnn_parts, flash_parts
from wattcast.kernels.work import Part, Reference, Told, columns_of, resident_share
from wattcast.workload.graph import Attention

DECODE_QUERIES = 16  # up to here the kernels split the cache rather than the queries
_BLOCK_Q, _BLOCK_KV = 128.0, 128.0
_BACKWARD_LAUNCHES, _HEAD_LAUNCHES = 4.0, 2.0  # cuDNN's, and those that add up heads which share keys
_PAD_LAUNCHES = 6.0  # PyTorch's, where a head's dimension is no multiple of eight: zeros and a copy, of q, k and v
# What a score costs beside its products (its exponential, a random number), in head dimensions of a product: from
# times of heads of 40, 64 and 128 on an H200
_SCORE, _DROPPED_SCORE, _BACKWARD_SCORE, _DROPPED_BACKWARD_SCORE = 110.0, 385.0, 166.0, 210.0


def attentions(ops: Sequence[Attention], told: Told, rate: Array, reference: Reference) -> Part:
    """Groups, work columns and features of fused attention."""
    # which takes any head once padded
    flash = [asked or op.head_dim % 8 != 0 for op, asked in zip(ops, told.flash.tolist(), strict=True)]
    cold = [
        made or (op.q_len <= DECODE_QUERIES and not warm)
        for op, made, warm in zip(ops, told.cold.tolist(), told.warm.tolist(), strict=True)
    ]
    table = columns_of([_row(*of, reference) for of in zip(ops, flash, cold, strict=True)])
    work, logs = dict(zip(_WORK, table, strict=False)), dict(zip(_LOGS, table[len(_WORK) :], strict=False))
    plain = dict(zip(_PLAIN, table[len(_WORK) + len(_LOGS) :], strict=True))
    plain |= {"cudnn": told.cudnn.astype(np.float64), "split_heads": told.split_heads.astype(np.float64)}
    return Part([_group(op, by_flash) for op, by_flash in zip(ops, flash, strict=True)], work, plain, logs, {})


_WORK = (
    *("units", "unit_flop", "steps", "launches", "between_byte", "l2_byte", "shared_byte", "slots"),
    *("dram_read_byte", "dram_write_byte"),
)
_LOGS = ("log_batch", "log_heads", "log_group", "log_q", "log_kv", "log_cut", "log_units")
_PLAIN = ("head_dim", "causal", "fill", "fill_2", "pad_q", "flash", "cold")


def _row(op: Attention, flash: bool, cold: bool, reference: Reference) -> tuple[float, ...]:
    """The columns of one operator: a workload has a few, for which plain numbers are faster than arrays."""
    batch, heads, q, dim, width = op.batch, op.heads, float(op.q_len), float(op.head_dim), float(op.dtype.byte)
    kept, read, write, sm_count = op.kept, op.read_byte, op.write_byte, reference.sm_count
    decode = op.q_len <= DECODE_QUERIES
    rows = 1.0 if decode else float(ceil(q / _BLOCK_Q))
    cut = _parts(op, flash, sm_count)
    units = batch * (op.kv_heads if decode else heads) * rows * cut
    keys = float(ceil(op.kv_len / cut / _BLOCK_KV))
    padded_q = 64.0 if decode and (not flash or cut > 1) else _BLOCK_Q
    products = op.flop / max(2.0 * batch * heads * q * op.kv_len * kept, 1.0)  # head dimensions of all products
    met = _met(kept, rows, keys) if op.causal else kept
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
    unit_flop = 2.0 * padded_q * keys * _BLOCK_KV * (products + _score(op)) * met
    steps = keys * (1.0 if decode else met) * whole
    missing = 1.0 if cold else 1.0 - resident_share(read + write, reference.l2_byte)
    waves = units / sm_count
    return (
        *(units, unit_flop, steps, launches, between, loads + write, loads * crossings, slots),
        *(read * missing, write * missing),
        *(batch, heads, heads / op.kv_heads, q, op.kv_len, cut, units),
        *(dim, op.causal, _filled(waves), _filled(waves / 2.0), q / (rows * _BLOCK_Q), flash, cold),
    )


def _filled(waves: float) -> float:
    """Share of whole waves that has work."""
    return waves / max(ceil(waves), 1)


def _parts(op: Attention, flash: bool, sm_count: float) -> float:
    """Parts that the keys are cut into."""
    if op.q_len > DECODE_QUERIES or op.backward:
        return 1.0
    blocks = float(op.batch * op.kv_heads)
    if flash:
        return flash_parts(blocks, op.kv_len, op.head_dim, sm_count)
    return cudnn_parts(blocks, op.kv_len, sm_count)


def _met(kept: float, rows: float, keys: float) -> float:
    """Share of the blocks of keys that blocks of queries walk over: those on a causal diagonal count whole."""
    if rows <= 1:
        return kept
    least = min(rows, keys)
    return max(kept, (keys - least + (least + 1.0) / 2.0) / keys)


def _score(op: Attention) -> float:
    """Head dimensions of a product that cost as much as what a score costs beside them."""
    if op.backward:
        return _BACKWARD_SCORE + (_DROPPED_BACKWARD_SCORE if op.dropout else 0.0)
    return _DROPPED_SCORE if op.dropout else _SCORE


def _group(op: Attention, flash: bool) -> str:
    """Gradients and dropped weights are kernels of their own, as is each library's."""
    if op.backward:
        name = "attention.backward"
    else:
        decode = op.q_len <= DECODE_QUERIES
        name = f"attention.{'decode' if decode else 'prefill'}{'.flash' if flash else ''}"
    return f"{name}.dropout" if op.dropout else name
