"""Fused attention -> columns of work: prefill tiles queries over SMs, decode splits the cache.

Prefill: blocks of 128 queries (64 for short ones) of one head walk over keys in steps of 128; a causal mask leaves
out blocks above the diagonal, and the longest block sets the tail. Decode: few queries, so the cache
is cut along its length to fill the SMs; a memory-bound reduction. Backward: a kernel for the products of gradient and
result by row, the five products with gradients of queries added up in fp32, and one that casts those.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.splits import cudnn_parts, flash_parts
from wattcast.kernels.work import Columns, Condition, Reference, fill, log2, resident
from wattcast.workload.graph import Attention

Mask = npt.NDArray[np.bool_]
DECODE_QUERIES = 16  # up to here the kernels split the cache rather than the queries
_BLOCK_Q, _BLOCK_KV = 128.0, 128.0
_BACKWARD_LAUNCHES, _HEAD_LAUNCHES = 4.0, 2.0  # cuDNN's, and those that add up heads which share keys
_PAD_LAUNCHES = 6.0  # PyTorch's, where a head's dimension is no multiple of eight: zeros and a copy, of q, k and v
# What a score costs beside its products (its exponential, a random number), in head dimensions of a product: from
# times of heads of 40, 64 and 128 on an H200
_SCORE, _DROPPED_SCORE, _BACKWARD_SCORE, _DROPPED_BACKWARD_SCORE = 110.0, 385.0, 166.0, 210.0


def attentions(
    ops: Sequence[Attention], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of fused attention."""

    table = np.array([[getattr(op, name) for name in _COLUMNS] for op in ops], dtype=np.float64)
    batch, heads, kv_heads, q, kv, dim, kept, read, write, flop, backward, causal = table.T
    width = np.array([float(op.dtype.byte) for op in ops])
    decode = q <= DECODE_QUERIES
    rows = np.where(decode, 1.0, np.ceil(q / _BLOCK_Q))
    odd = np.array([op.head_dim % 8 != 0 for op in ops])
    flash = np.maximum([float(c.backend == "flash") for c in conditions], odd)  # which takes any head once padded
    cut = np.array([_parts(op, bool(f), reference.sm_count) for op, f in zip(ops, flash, strict=True)])
    units = batch * np.where(decode, kv_heads, heads) * rows * cut
    keys = np.ceil(kv / cut / _BLOCK_KV)
    padded_q = np.where(decode & ((flash == 0) | (cut > 1)), 64.0, _BLOCK_Q)
    products = flop / np.maximum(2.0 * batch * heads * q * kv * kept, 1.0)  # head dimensions of all products
    products = products + np.array([_score(op) for op in ops])
    met = _met(causal > 0, kept, rows, keys)
    unit_flop = 2.0 * padded_q * keys * _BLOCK_KV * products * met
    cold = np.array(
        [c.rotated == "all" or (c.rotated != "none" and bool(d)) for c, d in zip(conditions, decode, strict=True)]
    )
    share = np.where(cold, 1.0, 1.0 - resident(read + write, reference.l2_byte))
    loads = np.where(decode, read, units * keys * _BLOCK_KV * met * 2.0 * dim * width + read)
    shares = heads > kv_heads
    slots = np.where(decode, np.where(flash > 0, 2.0, 4.0), 1.0)
    rounds = np.maximum(units / (slots * reference.sm_count), 1.0)
    whole = np.where(decode & (flash > 0), np.ceil(rounds) / rounds, 1.0)  # of blocks equally long
    work = {
        "units": units,
        "unit_flop": unit_flop,
        "steps": keys * np.where(decode, 1.0, met) * whole,
        "launches": np.where(backward > 0, _BACKWARD_LAUNCHES + shares * _HEAD_LAUNCHES, 1.0 + (decode & (cut > 1)))
        + odd * _PAD_LAUNCHES,
        # gradients of queries in fp32, of keys and values by head; operands with zeros behind each head
        "between_byte": np.where(backward > 0, (8.0 * q + shares * 4.0 * width * kv) * batch * heads * dim, 0.0)
        + np.where(odd, 3.0 * read, 0.0),
        "l2_byte": loads + write,
        # how often a byte crosses shared memory; FlashAttention's Ampere kernels load operands each warp for itself
        "shared_byte": np.where(decode, read, loads)
        * np.where(decode, 2.6, 3.6)
        * np.where(flash > 0, 1.9, 1.0)
        * np.where(backward > 0, 2.5, 1.0),  # five products of a block in place of two
        "dram_read_byte": read * share,
        "dram_write_byte": write * share,
        "slots": slots,
    }
    group = [_group(op, bool(d), bool(f)) for op, d, f in zip(ops, decode, flash, strict=True)]
    features = {
        "log_batch": log2(batch),
        "log_heads": log2(heads),
        "log_group": log2(heads / kv_heads),
        "log_q": log2(q),
        "log_kv": log2(kv),
        "head_dim": dim,
        "causal": causal,
        "flash": flash,
        "cudnn": np.array([float(c.backend == "cudnn") for c in conditions]),
        "split_heads": np.array([float(c.layout == "bhsd") for c in conditions]),
        "cold": cold.astype(float),
        "log_units": log2(units),
        "fill": fill(units, reference.sm_count),
        "fill_2": fill(units, 2.0 * reference.sm_count),
        "pad_q": q / (rows * _BLOCK_Q),
        "log_cut": log2(cut),
    }
    return group, work, features


_COLUMNS = (
    *("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"),
    *("kept", "read_byte", "write_byte", "flop", "backward", "causal"),
)


def _parts(op: Attention, flash: bool, sm_count: float) -> float:
    """Parts that the keys are cut into."""
    if op.q_len > DECODE_QUERIES or op.backward:
        return 1.0
    blocks = float(op.batch * op.kv_heads)
    if flash:
        return flash_parts(blocks, op.kv_len, op.head_dim, sm_count)
    return cudnn_parts(blocks, op.kv_len, sm_count)


def _met(causal: Mask, kept: Array, rows: Array, keys: Array) -> Array:
    """Share of the blocks of keys that blocks of queries walk over: those on a causal diagonal count whole."""
    whole = (keys - np.minimum(rows, keys) + (np.minimum(rows, keys) + 1.0) / 2.0) / keys
    return np.where(causal & (rows > 1), np.maximum(kept, whole), kept)


def _score(op: Attention) -> float:
    """Head dimensions of a product that cost as much as what a score costs beside them."""
    if op.backward:
        return _BACKWARD_SCORE + (_DROPPED_BACKWARD_SCORE if op.dropout else 0.0)
    return _DROPPED_SCORE if op.dropout else _SCORE


def _group(op: Attention, decode: bool, flash: bool) -> str:
    """Gradients and dropped weights are kernels of their own, as is each library's."""
    if op.backward:
        name = "attention.backward"
    else:
        name = f"attention.{'decode' if decode else 'prefill'}{'.flash' if flash else ''}"
    return f"{name}.dropout" if op.dropout else name
