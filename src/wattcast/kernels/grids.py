"""Elementwise operators whose kernels cut the work their own way: sums over rows, caches, batch norm, training.

Blocks, threads and launches are those of PyTorch's source (``Reduce.cuh``, ``Shape.cu``, ``Normalization.cuh``,
``multi_tensor_apply``, ``Embedding.cu``), checked against the kernels an H200 ran in whole models. Each kind is a
group of its own, so that rows measured for one do not speak for another; until then it takes the corrections of the
name above it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from wattcast.kernels.batch_norm import batch_norm, batch_norm_grad, batch_norm_train
from wattcast.kernels.grid import BLOCK_CYCLE, SM_THREADS, Grid, waits
from wattcast.workload.graph import Elementwise, Layout

_CAT_BLOCKS_PER_SM, _CAT_THREADS = 2.0, 512.0  # for each part
_SMALL_PART = 0.25  # of a row: below, one part's blocks carry the work
_COLUMN_CYCLE = 0.08  # of an SM for an element of a sum over rows: ten instructions
_CHUNK, _CHUNK_THREADS, _CHUNK_VECTOR = 65536.0, 512.0, 4.0  # of a tensor list
_MOST_CHUNKS = 320.0  # of one kernel
_TENSORS = 16  # that a list is taken to have
_PARAMETER_CYCLE = 0.6  # of an SM for a parameter where sizes are even, from times on an H200
_FEW_INDICES = 3072.0  # up to here the gradient of a table is one kernel
_SORTED_LAUNCHES = 31.0  # beyond, indices are sorted: eight passes, their set-up, and the sums
_SORTED_CYCLE = 2.85  # of an SM for an element in those sums: 5.7 ns a block of 1024 threads, twice
_POOL_THREADS, _MOST_PLANES = 256.0, 65535.0
_POOL_CYCLE, _POOL_WARP_CYCLE = 3.9, 92.0  # of an SM for a result, and for a warp of pixels in the gradient


def special(op: Elementwise) -> str:
    """The kind of kernel below ``elementwise`` that has a grid of its own here, or nothing."""
    name = op.function
    if name in ("sum", "mean", "max"):
        return "reduce.columns" if op.layout is Layout.TRANSPOSED else ""
    if name == "cat" and op.layout is Layout.CONTIGUOUS:
        return "vector.cat"
    if name == "cat":
        return "cat.append" if joins_cache(op) else ""
    if name == "scatter_add" and indices_of(op) > _FEW_INDICES:
        return "scatter.sorted"
    return _BY_FUNCTION.get(name, "")


def joins_cache(op: Elementwise) -> bool:
    """Whether a little is put behind a lot: a cache, which no kernel before has touched in this pass."""
    return op.function == "cat" and bool(op.rows and op.run and op.run < _SMALL_PART * op.n / op.rows)


_BY_FUNCTION = {
    "dropout": "vector.dropout",
    "batchnorm": "batchnorm",
    "batchnorm_train": "batchnorm.train",
    "batchnorm_grad": "batchnorm.backward",
    "pool": "pool",
    "pool_grad": "pool.backward",
    "adamw": "optimizer",
    "scatter_add": "scatter",
}


SPECIAL = frozenset({*_BY_FUNCTION, "sum", "mean", "max", "cat"})  # functions that may have such a kind


def grid_of(kind: str, op: Elementwise, sm_count: float, missing: float) -> Grid | None:
    """How the work of ``op`` is cut; None: as any other kernel that streams.

    ``missing`` is the share of its bytes that L2 does not hold.
    """
    maker = _GRIDS.get(kind)
    return maker(op, sm_count, missing) if maker else None


def _columns(op: Elementwise, sm_count: float, missing: float) -> Grid:
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
    slots = SM_THREADS / (wide * high)
    parts = 1.0
    if shared and values >= 256.0 and blocks <= sm_count * slots:
        parts = max(min(ceil(sm_count * slots / blocks), ceil(values / 16.0)), ceil(values / 256.0))
    steps = 2.0 + waits(ceil(values / parts / 4.0), missing)
    met = parts > 1
    steps += met * ceil(parts / high)
    cycle = (_COLUMN_CYCLE * op.n + BLOCK_CYCLE * blocks * parts) / sm_count
    return Grid(blocks * parts, steps, slots, 1.0 + met, met * 8.0 * results * parts, cycle)


def _append(op: Elementwise, sm_count: float, missing: float) -> Grid:
    """Two blocks an SM for each part, an element at a time: those of the small part have nothing to do."""
    blocks = _CAT_BLOCKS_PER_SM * sm_count
    return Grid(blocks, max(op.n / (blocks * _CAT_THREADS), 1.0), SM_THREADS / _CAT_THREADS)


def _pool(op: Elementwise, sm_count: float, missing: float) -> Grid:
    """A thread a result (with its place, an int64), which walks over its window."""
    results = max(op.write_byte / (op.dtype.byte + 8.0), 1.0)
    cycle = _POOL_CYCLE * max(results / sm_count, _POOL_THREADS)
    return Grid(ceil(results / _POOL_THREADS), 4.0, SM_THREADS / _POOL_THREADS, 1.0, 0.0, cycle, True)


def _pool_grad(op: Elementwise, sm_count: float, missing: float) -> Grid:
    """Zeros first; then a block for 256 pixels of a plane, a thread a pixel, which walks over its windows."""
    planes = float(op.rows or 1)
    pixels = op.n / planes
    across = ceil(pixels / _POOL_THREADS)
    blocks = min(planes, _MOST_PLANES) * across
    again = 1.0 + (max(planes / _MOST_PLANES, 1.0) - 1.0) / 3.0  # a block's further planes load while it computes
    each = again * max(_POOL_WARP_CYCLE * ceil(pixels / 32.0) / across, 2.0 * BLOCK_CYCLE)
    return Grid(blocks, 4.0, SM_THREADS / _POOL_THREADS, 2.0, 0.0, each * max(blocks / sm_count, 1.0), True)


def _optimizer(op: Elementwise, sm_count: float, missing: float) -> Grid:
    """A block a chunk of 65,536 parameters of one tensor, four of them a thread at a time; 320 chunks a kernel.

    Tensors whose size four does not divide are loaded an element at a time, at twice the cost.
    """
    size = max(op.n // _TENSORS, 1)
    chunks = ceil((op.n / _TENSORS) / _CHUNK)
    blocks = float(min(_TENSORS, op.n) * chunks)
    longer = op.n % _TENSORS
    odd = sum(count for count, n in ((longer, size + 1), (_TENSORS - longer, size)) if n % 4) / _TENSORS
    steps = ceil(min(size, _CHUNK) / (_CHUNK_THREADS * _CHUNK_VECTOR))
    cycle = _PARAMETER_CYCLE * (1.0 + odd) * op.n / sm_count
    return Grid(blocks, steps, SM_THREADS / _CHUNK_THREADS, ceil(blocks / _MOST_CHUNKS), sm_cycle=cycle)


def _scatter(op: Elementwise, sm_count: float, missing: float) -> Grid | None:
    """Few rows: zeros, and one kernel, a block for 32 columns, that walks over all indices."""
    indices = indices_of(op)
    if indices < 1.0:
        return None
    return Grid(ceil(op.n / indices / 32.0), 1.0 + ceil(indices / 32.0), 2.0, 2.0)


def _sorted(op: Elementwise, sm_count: float, missing: float) -> Grid:
    """Many rows: indices are sorted, then a thread a column of each run of like indices, and one for each row."""
    cycle = _SORTED_CYCLE * op.n / sm_count
    return Grid(ceil(op.n / 1024.0), 1.0, 2.0, _SORTED_LAUNCHES, 0.0, cycle, True)


def indices_of(op: Elementwise) -> float:
    """Rows that a gradient of a table adds up, from its bytes; 0: they do not say."""
    indices = (op.read_byte - 2.0 * op.n * op.dtype.byte) / 8.0
    return indices if 1.0 <= indices <= op.n else 0.0


_GRIDS: dict[str, Callable[[Elementwise, float, float], Grid | None]] = {
    "reduce.columns": _columns,
    "cat.append": _append,
    "batchnorm": batch_norm,
    "batchnorm.train": batch_norm_train,
    "batchnorm.backward": batch_norm_grad,
    "pool": _pool,
    "pool.backward": _pool_grad,
    "optimizer": _optimizer,
    "scatter": _scatter,
    "scatter.sorted": _sorted,
}


def _power(size: float, most: float) -> float:
    """The largest power of two within a size and ``most``."""
    return float(2.0 ** int(log2(min(max(size, 1.0), most))))
