"""Elementwise operators whose kernels cut the work their own way: sums over rows, caches, batch norm, training.

Blocks, threads and launches are those of PyTorch's source (``Reduce.cuh``, ``Shape.cu``, ``Normalization.cuh``,
``multi_tensor_apply``, ``Embedding.cu``), checked against the kernels an H200 ran in whole models. Each kind is a
group of its own, so that rows measured for one do not speak for another; until then it takes the corrections of the
name above it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from wattcast.workload.graph import Elementwise, Layout

_THREADS = 2048.0  # of an SM
_CAT_BLOCKS_PER_SM, _CAT_THREADS = 2.0, 512.0  # for each part
_SMALL_PART = 0.25  # of a row: below, one part's blocks carry the work
_CHUNK, _CHUNK_THREADS, _CHUNK_VECTOR = 65536.0, 512.0, 4.0  # of a tensor list
_FEW_INDICES = 3072.0  # up to here the gradient of a table is one kernel
_SORTED_LAUNCHES = 18.0  # beyond, indices are sorted: eight passes, their set-up, and the sums
_POOL_THREADS = 256.0


@dataclass(frozen=True)
class Grid:
    """Blocks, dependent steps of one, blocks an SM holds, kernels, and bytes they hand one another."""

    units: float
    steps: float
    slots: float
    launches: float = 1.0
    between_byte: float = 0.0


def special(op: Elementwise) -> str:
    """The kind of kernel below ``elementwise`` that has a grid of its own here, or nothing."""
    if op.function in ("sum", "mean", "max") and op.layout is Layout.TRANSPOSED:
        return "reduce.columns"
    if op.function == "cat" and op.layout is Layout.CONTIGUOUS:
        return "vector.cat"
    if joins_cache(op):
        return "cat.append"
    if op.function == "dropout":
        return "vector.dropout"
    return _BY_FUNCTION.get(op.function, "")


def joins_cache(op: Elementwise) -> bool:
    """Whether a little is put behind a lot: a cache, which no kernel before has touched in this pass."""
    return op.function == "cat" and bool(op.rows and op.run and op.run < _SMALL_PART * op.n / op.rows)


_BY_FUNCTION = {
    "batchnorm": "batchnorm",
    "batchnorm_train": "batchnorm.train",
    "batchnorm_grad": "batchnorm.backward",
    "pool": "pool",
    "pool_grad": "pool.backward",
    "adamw": "optimizer",
    "scatter_add": "scatter",
}


def grid_of(kind: str, op: Elementwise, sm_count: float) -> Grid | None:
    """How the work of ``op`` is cut; None: as any other kernel that streams."""
    maker = _GRIDS.get(kind)
    return maker(op, sm_count) if maker else None


def _columns(op: Elementwise, sm_count: float) -> Grid:
    """PyTorch's reduction where neighbours belong to different results (``setReduceConfig``).

    A thread takes up to four results side by side; 32 threads lie along the results and the others along what is
    added up. With 256 values or more left to a thread, blocks share a result and meet in memory.
    """
    results = op.write_byte / (op.out_dtype or op.dtype).byte
    length = max(op.n / results, 1.0)
    vector = next(v for v in (4.0, 2.0, 1.0) if results % v == 0 or v == 1.0)
    most = 512.0 / vector
    along = _power(results / vector, most)
    high = min(_power(length, most), most / min(along, 32.0))
    wide = min(along, most / high)
    shared = length >= 16.0 * high or length >= 256.0
    blocks = ceil(results / (vector * wide * (1.0 if shared else high)))
    values = length / high if shared else length
    slots = _THREADS / (wide * high)
    parts = 1.0
    if shared and values >= 256.0 and blocks <= sm_count * slots:
        parts = max(min(ceil(sm_count * slots / blocks), ceil(values / 16.0)), ceil(values / 256.0))
    steps = 2.0 + ceil(values / parts / 4.0)
    met = parts > 1
    return Grid(blocks * parts, steps + met * ceil(parts / high), slots, 1.0 + met, met * 8.0 * results * parts)


def _append(op: Elementwise, sm_count: float) -> Grid:
    """Two blocks an SM for each part, an element at a time: those of the small part have nothing to do."""
    blocks = _CAT_BLOCKS_PER_SM * sm_count
    return Grid(blocks, max(op.n / (blocks * _CAT_THREADS), 1.0), _THREADS / _CAT_THREADS)


def _batch_norm(op: Elementwise, sm_count: float) -> Grid | None:
    """A block a channel and picture (or a few), single elements; before it, a kernel over the channels."""
    if op.layout is not Layout.CONTIGUOUS or not op.rows or not op.run:
        return None
    pixels, channels = float(op.run), float(op.rows)
    pictures = op.n / (pixels * channels)
    threads = max(next((t for t in (32.0, 64.0, 128.0, 256.0) if pixels / 4.0 <= t), 512.0), 32.0)
    high = max(64.0 // threads, 1.0)
    groups = max(1.0, min(262144.0 // channels, ceil(pictures / high)))
    steps = ceil(pixels / threads) * max(pictures / (high * groups), 1.0)
    return Grid(channels * groups, steps, _THREADS / (threads * high), 2.0)


def _pool(op: Elementwise, sm_count: float) -> Grid:
    """A thread a result (with its place, an int64), which walks over its window."""
    results = max(op.write_byte / (op.dtype.byte + 8.0), 1.0)
    return Grid(ceil(results / _POOL_THREADS), max(op.n / results, 1.0), _THREADS / _POOL_THREADS)


def _optimizer(op: Elementwise, sm_count: float) -> Grid:
    """A block a chunk of 65,536 parameters, four of them a thread at a time."""
    each = min(_CHUNK, float(op.n))
    steps = ceil(each / (_CHUNK_THREADS * _CHUNK_VECTOR))
    return Grid(ceil(op.n / _CHUNK), steps, _THREADS / _CHUNK_THREADS)


def _scatter(op: Elementwise, sm_count: float) -> Grid | None:
    """Few rows: one kernel, a block for 32 columns, that walks over all indices; many: sorted first."""
    indices = (op.read_byte - 2.0 * op.n * op.dtype.byte) / 8.0
    if indices < 1.0 or op.n < indices:
        return None
    columns = op.n / indices
    if indices > _FEW_INDICES:
        return Grid(ceil(op.n / 1024.0), 1.0, 16.0, _SORTED_LAUNCHES, _SORTED_LAUNCHES * 16.0 * indices)
    return Grid(ceil(columns / 32.0), 1.0 + ceil(indices / 32.0), 2.0)


_GRIDS: dict[str, Callable[[Elementwise, float], Grid | None]] = {
    "reduce.columns": _columns,
    "cat.append": _append,
    "batchnorm": _batch_norm,
    "pool": _pool,
    "optimizer": _optimizer,
    "scatter": _scatter,
}


def _power(size: float, most: float) -> float:
    """The largest power of two within a size and ``most``."""
    return float(2.0 ** int(log2(min(max(size, 1.0), most))))
