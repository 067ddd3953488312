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
from typing import NamedTuple

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    Mask,
)
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.special_grids import power_of_two
from wattcast.kernels.kernel_table import (
    MOVED_SUM_BYTE,
    SUM_BYTE,
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    count_columns,
    resident_share,
    wave_fill,
)
from wattcast.workload.operator_types import Attention


class AttentionCoefficients(Coefficients):
    """What fused attention costs besides its two products, and how often it moves a byte."""

    # A score beyond its products, in head dimensions of a product: its exponential, and with
    # dropout a random number
    score_dims: float
    dropped_score_dims: float
    backward_score_dims: float
    dropped_backward_score_dims: float  # on top of the one above
    # How often a loaded byte crosses shared memory
    decode_crossings: float
    prefill_crossings: float
    flash_crossings: float  # times the above
    backward_crossings: float  # times the above
    pad_launches: float  # PyTorch's where a head's dimension is no multiple of eight
    part_keys: float  # of a part of a cache at least, in cuDNN
    uncut_keys: int  # up to which cuDNN cuts no cache
    most_parts: float  # of a cache, in cuDNN
    fewest_parts: float  # below which cuDNN cuts no cache
    flash_most_parts: int  # of a cache, in FlashAttention
    flash_full: float  # share of the slots with a tile, from which it cuts nothing
    flash_near: float  # of the best filling, which is enough
    flash_keys: tuple[float, float, float]  # of a block: heads up to 64, up to 128, wider
    decode_queries: int  # up to which kernels split the cache, not the queries
    decode_rows: float  # of queries that a block of decode is padded to
    block_queries: float  # of a block of a prompt
    block_keys: float  # that a block takes at a time
    backward_launches: float  # cuDNN's kernels of a gradient
    head_launches: float  # cuDNN's that add up heads which share keys
    decode_slots: float  # blocks of decode that an SM holds, in cuDNN
    flash_decode_slots: float  # the same in FlashAttention
    flash_heads: tuple[float, float]  # widest heads of the first two blocks of keys


ATTENTION = load_coefficients("attention", AttentionCoefficients)

_WHOLE_HEAD = 8  # elements of a head that kernels load at once
_PADDED_TENSORS = 3.0  # queries, keys and values are copied with zeros behind each head
_HALF_BYTE = 2  # of an element: the widest format of cuDNN and FlashAttention


def cudnn_parts(
    blocks: float,
    keys: int,
    sm_count: float,
) -> float:
    """Return the parts that cuDNN cuts the cache into, for ``blocks`` heads of keys of all batches.

    >>> cudnn_parts(16, 2048, 132), cudnn_parts(40, 8192, 132)
    (16.0, 4.0)
    >>> cudnn_parts(128, 8192, 132), cudnn_parts(4, 512, 132)
    (1.0, 1.0)
    """
    if keys <= ATTENTION.uncut_keys:
        return 1.0
    by_length = power_of_two(keys / ATTENTION.part_keys, ATTENTION.most_parts)
    by_chip = power_of_two(2.0 * sm_count / blocks, ATTENTION.most_parts)
    parts = min(by_length, by_chip)
    return parts if parts >= ATTENTION.fewest_parts else 1.0


@lru_cache(maxsize=4096)
def flash_parts(
    blocks: float,
    keys: int,
    head_dim: int,
    sm_count: float,
) -> float:
    """Return the parts that FlashAttention cuts the cache into, for ``blocks`` of queries.

    >>> flash_parts(96, 8192, 64, 132), flash_parts(64, 4096, 128, 132)
    (5.0, 4.0)
    >>> flash_parts(512, 4096, 64, 132)
    1.0
    """
    narrow_keys, usual_keys, wide_keys = ATTENTION.flash_keys
    narrow_head, usual_head = ATTENTION.flash_heads
    block_keys = narrow_keys if head_dim <= narrow_head else usual_keys
    if head_dim > usual_head:
        block_keys = wide_keys
    return float(fill_with_parts(blocks, ceil(keys / block_keys), 2.0 * sm_count))


def fill_with_parts(
    tiles: float,
    steps: int,
    slots: float,
    any_number: bool = False,
) -> int:
    """Return the parts into which FlashAttention cuts ``steps`` blocks of keys.

    There are ``tiles`` on a chip with ``slots`` for tiles. Numbers of parts that do not shorten the
    longest one are passed over, unless ``any_number`` will do (version 3).
    """
    if tiles >= ATTENTION.flash_full * slots:
        return 1
    parts = np.arange(1, min(ATTENTION.flash_most_parts, int(slots), steps) + 1)
    waves = tiles * parts / slots
    shortens = any_number | (np.diff(np.ceil(steps / parts), prepend=np.inf) < 0)
    filling = np.where(shortens, waves / np.ceil(waves), 0.0)
    return int(np.argmax(filling >= ATTENTION.flash_near * filling.max())) + 1


class _Sizes(NamedTuple):
    """Columns of operators, each ``(row,)``, and what their kernels are chosen by."""

    batch: Array
    heads: Array
    kv_heads: Array
    queries: Array
    keys: Array
    head_dim: Array
    causal: Array
    backward: Array
    dropout: Array
    width: Array  # bytes of an element
    flop: Array
    read_byte: Array
    write_byte: Array
    visible_share: Array  # of the scores, by the causal mask

    @property
    def is_decode(self) -> Mask:
        return np.asarray(self.queries <= ATTENTION.decode_queries)

    @property
    def is_backward(self) -> Mask:
        return np.asarray(self.backward > 0)

    @property
    def is_half(self) -> Mask:
        """Formats that cuDNN and FlashAttention have kernels for."""
        return np.asarray(self.width <= _HALF_BYTE)

    @property
    def is_padded(self) -> Mask:
        """Heads that get zeros behind them."""
        return np.asarray(self.head_dim % _WHOLE_HEAD != 0)

    @property
    def shares_keys(self) -> Mask:
        """Heads of queries that share keys."""
        return np.asarray(self.heads > self.kv_heads)


class _Blocks(NamedTuple):
    """How attention is cut into blocks; columns ``(row,)``."""

    parts: Array  # of the cache
    rows: Array  # of blocks, along the queries
    units: Array
    keys: Array  # blocks of keys that a block of queries walks over
    met_share: Array  # share of these that a causal mask leaves
    slots: Array  # blocks that an SM holds


def attention_work(
    ops: Sequence[Attention],
    conditions: ConditionColumns,
    rate: Array,
    reference: ReferenceChip,
) -> FamilyColumns:
    """Return kernel families, work columns and features of fused attention."""
    sizes = _Sizes(*count_columns(ops, _read_columns))
    is_decode = sizes.is_decode
    # FlashAttention takes any head once it is padded.
    is_flash = conditions.flash | sizes.is_padded
    is_cold = conditions.cold | (is_decode & ~conditions.warm)
    blocks = _cut_blocks(sizes, is_flash, reference.sm_count)
    work = _count_steps(sizes, blocks, is_flash, reference)
    work |= _count_traffic(
        sizes,
        blocks,
        is_flash,
        is_cold,
        reference,
    )
    logs = {
        "log_batch": sizes.batch,
        "log_heads": sizes.heads,
        "log_group": sizes.heads / sizes.kv_heads,
        "log_q": sizes.queries,
        "log_kv": sizes.keys,
        "log_cut": blocks.parts,
        "log_units": blocks.units,
    }
    plain = {
        "head_dim": sizes.head_dim,
        "causal": sizes.causal,
        "fill": wave_fill(blocks.units, reference.sm_count),
        "fill_2": wave_fill(blocks.units, 2.0 * reference.sm_count),
        "pad_q": sizes.queries / (blocks.rows * ATTENTION.block_queries),
        "flash": is_flash.astype(np.float64),
        "cold": is_cold.astype(np.float64),
        "cudnn": conditions.cudnn.astype(np.float64),
        "split_heads": conditions.split_heads.astype(np.float64),
    }
    return FamilyColumns(
        _name_families(sizes, is_flash),
        work,
        plain,
        logs,
        {},
    )


def _count_steps(
    sizes: _Sizes,
    blocks: _Blocks,
    is_flash: Mask,
    reference: ReferenceChip,
) -> dict[str, Array]:
    """Return the columns of arithmetic: padded queries, whole blocks of keys, exponentials."""
    is_decode = sizes.is_decode
    is_cut = blocks.parts > 1
    products = sizes.batch * sizes.heads * sizes.queries * sizes.keys * sizes.visible_share
    product_dims = sizes.flop / np.maximum(2.0 * products, 1.0)
    padded_queries = np.where(
        is_decode & (~is_flash | is_cut), ATTENTION.decode_rows, ATTENTION.block_queries
    )
    score_flop = 2.0 * (product_dims + _score_dims(sizes))
    block_scores = padded_queries * blocks.keys * ATTENTION.block_keys * blocks.met_share

    # FlashAttention's blocks of decode are equally long, so that its last wave is whole
    rounds = np.maximum(blocks.units / (blocks.slots * reference.sm_count), 1.0)
    whole_rounds = np.where(is_decode & is_flash, np.ceil(rounds) / rounds, 1.0)

    launches = np.where(sizes.is_backward, ATTENTION.backward_launches, 1.0 + (is_decode & is_cut))
    launches += sizes.is_backward * sizes.shares_keys * ATTENTION.head_launches
    launches += sizes.is_padded * ATTENTION.pad_launches
    return {
        "units": blocks.units,
        "unit_flop": score_flop * block_scores,
        "steps": blocks.keys * np.where(is_decode, 1.0, blocks.met_share) * whole_rounds,
        "launches": launches,
        "slots": blocks.slots,
    }


def _count_traffic(
    sizes: _Sizes,
    blocks: _Blocks,
    is_flash: Mask,
    is_cold: Mask,
    reference: ReferenceChip,
) -> dict[str, Array]:
    """Return the columns of bytes; prompts load keys for each block of queries."""
    prompt_keys = blocks.units * blocks.keys * ATTENTION.block_keys * blocks.met_share
    prompt_byte = prompt_keys * 2.0 * sizes.head_dim * sizes.width + sizes.read_byte
    load_byte = np.where(sizes.is_decode, sizes.read_byte, prompt_byte)
    resident = resident_share(sizes.read_byte + sizes.write_byte, reference.l2_byte)
    missing = np.where(is_cold, 1.0, 1.0 - resident)
    return {
        "between_byte": _between_byte(sizes),
        "l2_byte": load_byte + sizes.write_byte,
        "shared_byte": load_byte * _count_crossings(sizes, is_flash),
        "dram_read_byte": sizes.read_byte * missing,
        "dram_write_byte": sizes.write_byte * missing,
    }


_read_columns: Callable[[Attention], tuple[float, ...]] = attrgetter(
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
    "flop",
    "read_byte",
    "write_byte",
    "visible_share",
)


def _cut_blocks(
    sizes: _Sizes,
    is_flash: Mask,
    sm_count: float,
) -> _Blocks:
    """Return how attention is cut: a block for 128 queries of a head, in decode for a part."""
    is_decode = sizes.is_decode
    parts = _cut_caches(sizes, is_flash, sm_count)
    rows = np.where(is_decode, 1.0, np.ceil(sizes.queries / ATTENTION.block_queries))
    heads = np.where(is_decode & sizes.is_half, sizes.kv_heads, sizes.heads)
    units = sizes.batch * heads * rows * parts
    keys = np.ceil(sizes.keys / parts / ATTENTION.block_keys)

    # On a causal diagonal blocks of keys count whole, however many of their scores are hidden.
    shorter = np.minimum(rows, keys)
    diagonal_share = (keys - shorter + (shorter + 1.0) / 2.0) / keys
    whole_share = np.maximum(sizes.visible_share, diagonal_share)
    has_diagonal = (sizes.causal > 0) & (rows > 1)
    met_share = np.where(has_diagonal, whole_share, sizes.visible_share)

    decode_slots = np.where(is_flash, ATTENTION.flash_decode_slots, ATTENTION.decode_slots)
    slots = np.where(is_decode, decode_slots, 1.0)
    return _Blocks(
        parts,
        rows,
        units,
        keys,
        met_share,
        slots,
    )


def _cut_caches(
    sizes: _Sizes,
    is_flash: Mask,
    sm_count: float,
) -> Array:
    """Return the parts that the library cuts each cache into."""
    parts = np.ones(len(sizes.batch))
    is_cut = sizes.is_decode & (sizes.backward == 0) & sizes.is_half
    for row in is_cut.nonzero()[0].tolist():
        blocks = float(sizes.batch[row] * sizes.kv_heads[row])
        keys = int(sizes.keys[row])
        if is_flash[row]:
            parts[row] = flash_parts(blocks, keys, int(sizes.head_dim[row]), sm_count)
        else:
            parts[row] = cudnn_parts(blocks, keys, sm_count)
    return parts


def _score_dims(sizes: _Sizes) -> Array:
    """Return what a score costs on top of its products, in head dimensions of a product."""
    is_backward = sizes.is_backward
    plain = np.where(is_backward, ATTENTION.backward_score_dims, ATTENTION.score_dims)
    dropped_backward = ATTENTION.backward_score_dims + ATTENTION.dropped_backward_score_dims
    dropped = np.where(is_backward, dropped_backward, ATTENTION.dropped_score_dims)
    return np.where(sizes.dropout > 0, dropped, plain)


def _count_crossings(sizes: _Sizes, is_flash: Mask) -> Array:
    """Return how often a loaded byte crosses shared memory.

    In FlashAttention's Ampere kernels each warp loads its own operands.
    """
    crossings = np.where(sizes.is_decode, ATTENTION.decode_crossings, ATTENTION.prefill_crossings)
    crossings = crossings * np.where(is_flash, ATTENTION.flash_crossings, 1.0)
    return crossings * np.where(sizes.is_backward, ATTENTION.backward_crossings, 1.0)


def _between_byte(sizes: _Sizes) -> Array:
    """Return the bytes that kernels hand one another.

    They are gradients of queries in fp32, those of keys and values by head, and operands with zeros
    behind each head.
    """
    head_values = sizes.batch * sizes.heads * sizes.head_dim
    query_byte = MOVED_SUM_BYTE * sizes.queries
    gradient_byte = query_byte + sizes.shares_keys * SUM_BYTE * sizes.width * sizes.keys
    return (
        sizes.backward * gradient_byte * head_values
        + sizes.is_padded * _PADDED_TENSORS * sizes.read_byte
    )


def _name_families(sizes: _Sizes, is_flash: Mask) -> CodedColumn[str]:
    """Return the kernel family of each row."""
    shape = (2, 2, 2, 2)
    names = [_kernel_family(*map(bool, bits)) for bits in np.ndindex(shape)]
    bits = (sizes.is_backward, sizes.is_decode, is_flash, sizes.dropout > 0)
    return CodedColumn(names, np.ravel_multi_index(bits, shape))


def _kernel_family(
    backward: bool,
    decode: bool,
    flash: bool,
    dropout: bool,
) -> str:
    """Return the kernel family.

    Gradients and dropped weights are kernels of their own, as is each library's.
    """
    if backward:
        name = "backward"
    else:
        name = "decode" if decode else "prefill"
        if flash:
            name += ".flash"
    return f"attention.{name}.dropout" if dropout else f"attention.{name}"


register_kernels(Attention, mapping=KernelMapping(attention_work, tensor_cores=True))
