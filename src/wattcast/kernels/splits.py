"""How attention with few queries cuts its cache, so that blocks fill the chip: cuDNN's way and FlashAttention's.

cuDNN's rule is read off the grids of 150 kernels on an H200: powers of two, with 128 keys or more each, about two
blocks an SM, and none at all up to 512 keys or where fewer than four would fit. FlashAttention's is its own
``num_splits_heuristic``: the fewest parts whose waves are filled to 85 % of what the best number fills.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor, log2

_KEYS, _UNCUT_KEYS, _MOST, _FEWEST = 128.0, 512, 64.0, 4.0
_FLASH_MOST, _FLASH_FULL, _FLASH_NEAR = 128, 0.8, 0.85


def cudnn_parts(blocks: float, keys: int, sm_count: float) -> float:
    """Parts of the cache for ``blocks`` heads of keys of all batches.

    >>> cudnn_parts(16, 2048, 132), cudnn_parts(40, 8192, 132), cudnn_parts(128, 8192, 132), cudnn_parts(4, 512, 132)
    (16.0, 4.0, 1.0, 1.0)
    """
    if keys <= _UNCUT_KEYS:
        return 1.0
    parts = min(_power(keys / _KEYS), _power(2.0 * sm_count / blocks), _MOST)
    return parts if parts >= _FEWEST else 1.0


def _power(size: float) -> float:
    return float(2.0 ** floor(log2(max(size, 1.0))))


@lru_cache(maxsize=4096)
def flash_parts(blocks: float, keys: int, head_dim: int, sm_count: float) -> float:
    """Parts of the cache for ``blocks`` of queries.

    >>> flash_parts(96, 8192, 64, 132), flash_parts(64, 4096, 128, 132), flash_parts(512, 4096, 64, 132)
    (5.0, 4.0, 1.0)
    """
    slots = 2.0 * sm_count
    steps = ceil(keys / flash_keys(head_dim))
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


def flash_keys(head_dim: int) -> float:
    """Keys that a block of FlashAttention's split kernel takes at a time."""
    return 256.0 if head_dim <= 64 else 128.0 if head_dim <= 128 else 64.0
