"""Softmax, layer norm and RMS norm over rows, and their gradients, as PyTorch 2 runs them.

They run on CUDA cores. PyTorch gives short softmax rows to a warp each, keeps longer ones in the
registers of a block, and walks the longest three times. Norms load four elements at a time where
four divides the row, else one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    Mask,
)
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_table import (
    MOVED_SUM_BYTE,
    SM_THREADS,
    WORK,
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    count_columns,
    resident_share,
    steps_with_misses,
    streamed_share,
    wave_fill,
)
from wattcast.workload.operator_base import index_words
from wattcast.workload.operator_types import (
    LayerNorm,
    RmsNorm,
    RowReduction,
    Softmax,
)


class RowReductionCoefficients(Coefficients):
    """What kernels of softmax and norms cost; cycles are those of an SM."""

    # Of a warp's row of softmax: each lane's place in it, each element, the row
    warp_cycles: tuple[float, float, float]
    widest_warp_cycles: tuple[float, float, float]  # the same of 2,048 places
    register_cycles: float  # of a thousand elements in registers, two blocks an SM
    lone_register_cycles: float  # the same with one block an SM
    walk_row_cycles: float  # of a row walked thrice
    walk_element_cycles: float  # of its elements
    cast_cycles: float  # of an element cast beforehand
    masked_cycles: float  # of an element whose exponential is zero
    softmax_gradient_cycles: float  # of an element
    # Of an element of a norm's gradient: always, per byte, and per byte that L1 has lost
    norm_gradient_cycles: tuple[float, float, float]
    # Of a norm: of a row, of its bytes, and of a row more in fp32; four elements at a time
    layernorm_cycles: tuple[float, float, float]
    rmsnorm_cycles: tuple[float, float, float]
    scalar_cycles: float  # of an element of a norm that is loaded alone
    scalar_slots: float  # blocks of such a norm that an SM holds
    reduce_steps: float  # loads that a reduction over a block takes as long as
    gradient_steps: float  # as many loads does the sum of a long row of softmax's gradient take
    rms_kept_byte: float  # of a row of RMS norm that L1 holds but for a part
    rms_spilling_byte: float  # by which a row must be longer for L1 to have lost all of it
    rms_least_reread: float  # that part
    rms_gradient_share: float  # of a step of a gradient without a mean
    overlapping_misses: float  # share of a miss that shows where a warp loads a row at once
    walking_misses: float  # the same where a block walks over rows
    softmax_crossings: float  # how often a byte crosses shared memory and L1
    norm_crossings: float  # the same of a norm
    # Through shared memory, of a norm that loads single elements
    scalar_row_byte: float  # of a row, where 512 threads add up moments
    scalar_element_byte: float  # of an element
    scalar_crossings: float  # of a byte of it
    scalar_passes: float  # of such a norm through L2
    l1_kept_byte: float  # of a row that L1 still holds whole when it is read again
    l1_spilling_byte: float  # by which a row must be longer for L1 to have lost all of it
    warp_row: int  # longest that one warp takes in softmax
    gradient_warp_row: int  # the same of a gradient or a fused cast
    register_row: int  # longest that a block keeps in registers
    block_threads: float  # of a block of softmax that takes a row
    twice_elements: float  # a thread may hold for an SM to take two blocks
    warp_block_threads: float  # of a block of warps that take a row each
    scalar_threads: float  # of a block of a norm that loads single elements
    gradient_rows: float  # that a block of the weights' gradient takes at a time
    softmax_walks: float  # over the longest rows
    log_gradient_passes: float  # over the operands of log-softmax's gradient
    gradient_start_steps: float  # of a norm's gradient, before it loads
    scalar_gradient_elements: float  # of a row for each step of a gradient that loads single ones
    pair_row: int  # longest of which a warp takes two
    register_steps: float  # for each element of a thread in registers


ROWS = load_coefficients("row_reductions", RowReductionCoefficients)

LANES = 32.0  # of a warp
_VECTOR_VALUES = 4  # that a thread loads at once
_MOVES = 3.0  # of a product that is written, and read again with the result
_KIND_CODES = {
    "softmax": 0.0,
    "layernorm": 1.0,
    "rmsnorm": 2.0,
}


class _RowColumns(NamedTuple):
    """What kernels of rows do, ``(row,)``; a number holds for all of them."""

    dim: Array
    units: Array
    sm_cycle: Array
    slots: Array | float
    steps: Array
    launches: Array | float
    l2_byte: Array
    between_byte: Array
    shared_byte: Array
    dram_read_byte: Array
    dram_write_byte: Array
    width: Array | float
    out_width: Array | float
    cold: Array | Mask
    kind: Array | float
    backward: Array | float
    rows: Array
    byte: Array


_WORK = (
    "units",
    "slots",
    "steps",
    "launches",
    "l2_byte",
    "between_byte",
    "shared_byte",
    "dram_read_byte",
    "dram_write_byte",
)
_PLAIN = ("width", "out_width", "cold", "kind", "backward")


def row_reduction_work(
    ops: Sequence[RowReduction],
    conditions: ConditionColumns,
    rate: Array,
    reference: ReferenceChip,
) -> FamilyColumns:
    """Return kernel families, work columns and features of softmax and norms."""
    groups = list(group_alike(ops))
    families = []
    table = np.empty((len(_RowColumns._fields), len(ops)))
    for places, alike in groups:
        columns = _count_work(alike, conditions.cold[places], reference)
        table[:, places] = np.array(np.broadcast_arrays(*columns), dtype=np.float64)
        families.append((places, [alike.kernel_family] * len(places)))
    column = dict(zip(_RowColumns._fields, table, strict=True))
    waves = column["units"] / reference.sm_count
    work = {name: column[name] for name in _WORK}
    work["unit_flop"] = rate * column["sm_cycle"] / np.maximum(waves, 1.0)
    plain = {name: column[name] for name in _PLAIN}
    plain |= {
        "pow2_dim": column["dim"] / _warp_places(column["dim"]),
        "fill": wave_fill(column["units"], 2.0 * reference.sm_count),
        "waves": np.log2(waves),
    }
    logs = {
        "log_rows": column["rows"],
        "log_dim": column["dim"],
        "log_byte": column["byte"],
    }
    return FamilyColumns(
        CodedColumn.from_parts(families, len(ops)),
        work,
        plain,
        logs,
        {"align_dim": column["dim"]},
    )


class AlikeRows(NamedTuple):
    """Operators that one kernel runs in the same formats; sizes are arrays ``(row,)``."""

    kernel: str  # of a softmax warp, block (a row in registers) or loop; of a norm vector or scalar
    kind: str
    dtype: Dtype
    out_dtype: Dtype
    backward: bool
    log: bool
    rows: Array
    dim: Array
    read_byte: Array
    write_byte: Array
    masked: Array  # share of the elements

    @property
    def elements(self) -> Array:
        """Elements read once by the forward pass."""
        return self.rows * self.dim

    @property
    def row_byte(self) -> Array:
        """Bytes of a row."""
        return self.dim * self.dtype.byte

    @property
    def kernel_family(self) -> str:
        """The family whose corrections they share."""
        return f"{self.kind}.{'backward' if self.backward else self.kernel}"

    @property
    def casts_apart(self) -> bool:
        """Whether another output format is a kernel of its own.

        PyTorch fuses the cast into softmax for fp16 alone.
        """
        fuses_cast = self.kind == "softmax" and self.dtype is Dtype.FP16
        return self.out_dtype is not self.dtype and not fuses_cast

    @property
    def multiplies_first(self) -> bool:
        """Whether a product is made first, in a kernel of its own: in the gradient of softmax."""
        return self.kind == "softmax" and self.backward and not self.log


def group_alike(ops: Sequence[RowReduction]) -> Iterator[tuple[npt.NDArray[np.intp], AlikeRows]]:
    """Yield operators that one kernel runs in the same formats, with their places among ``ops``."""
    forms = index_words(ops, _read_form)
    columns = count_columns(ops, _read_sizes)
    for which, form in enumerate(forms.values):
        places = np.flatnonzero(forms.place == which)
        sizes = columns[:, places]
        kernels = _choose_kernels(form, sizes[1])
        for kernel in np.unique(kernels).tolist():
            rows = (kernels == kernel).nonzero()[0]
            yield places[rows], AlikeRows(kernel, *form, *sizes[:, rows])


_Form = tuple[str, Dtype, Dtype, bool, bool]


def _choose_kernels(form: _Form, dim: Array) -> npt.NDArray[np.str_]:
    """Return the kernel of each operator of a form, by the length of its rows."""
    kind, dtype, out_dtype, is_backward, _ = form
    if kind != "softmax":
        return np.where(dim % _VECTOR_VALUES == 0, "vector", "scalar")
    fuses_cast = out_dtype is not dtype and dtype is Dtype.FP16
    longest = ROWS.gradient_warp_row if is_backward or fuses_cast else ROWS.warp_row
    fits_registers = (dim <= ROWS.register_row) & (not fuses_cast) & (not is_backward)
    return np.where(dim <= longest, "warp", np.where(fits_registers, "block", "loop"))


def _read_sizes(op: RowReduction) -> tuple[float, ...]:
    masked = op.masked if isinstance(op, Softmax) else 0.0
    return op.rows, op.dim, op.read_byte, op.write_byte, masked


def _read_form(op: RowReduction) -> _Form:
    is_log = isinstance(op, Softmax) and op.log
    return op.kind, op.dtype, op.out_dtype or op.dtype, op.backward, is_log


def _count_work(
    alike: AlikeRows,
    cold: Mask,
    reference: ReferenceChip,
) -> _RowColumns:
    """Return the columns of operators that one kernel runs."""
    is_softmax = alike.kind == "softmax"
    sm_count = reference.sm_count
    byte = alike.read_byte + alike.write_byte

    # Between kernels: a cast writes fp32 that is read again; a product is written, and read again
    # with the result.
    between_byte = (MOVED_SUM_BYTE if alike.casts_apart else 0.0) * alike.elements
    if alike.multiplies_first:
        between_byte = between_byte + _MOVES * alike.elements * alike.dtype.byte
    resident = streamed_share(byte + between_byte, reference.l2_byte)
    missing = np.where(cold, 1.0, 1.0 - resident)

    # Rows in flight come again from L2, or from device memory where they do not fit together.
    cut = _cut_softmax(alike, byte) if is_softmax else _cut_norm(alike, byte)
    flying_byte = np.minimum(alike.rows, cut.slots * sm_count) * alike.row_byte
    lost_share = 1.0 - resident_share(flying_byte, reference.l2_byte)
    reread = np.where(missing > 0, cut.rereads * lost_share, 0.0)

    walk = row_walk(alike, sm_count, missing)
    has_two_norms = not is_softmax and (alike.backward or alike.kernel == "scalar")
    return _RowColumns(
        dim=alike.dim,
        units=cut.units,
        sm_cycle=walk.sm_cycle,
        slots=cut.slots,
        steps=walk.steps / np.maximum(cut.units / (cut.slots * sm_count), 1.0),
        launches=1.0 + (alike.multiplies_first or has_two_norms) + alike.casts_apart,
        l2_byte=alike.read_byte * cut.passes * cut.reads + alike.write_byte,
        between_byte=between_byte,
        shared_byte=cut.crossed_byte + 2.0 * between_byte,
        dram_read_byte=alike.read_byte * missing * (cut.reads + reread),
        dram_write_byte=alike.write_byte * missing,
        width=alike.dtype.byte,
        out_width=alike.out_dtype.byte,
        cold=cold,
        kind=_KIND_CODES[alike.kind],
        backward=alike.backward,
        rows=alike.rows,
        byte=byte,
    )


class _Cut(NamedTuple):
    """How the rows of operators are cut into blocks, and what these move."""

    units: Array  # blocks
    slots: float  # blocks an SM holds
    crossed_byte: Array  # through shared memory
    passes: Array | float = 1.0  # of the operands through L2
    rereads: Array | float = 0.0  # how often a row in flight is read again
    reads: float = 1.0  # how often the operands are read by different kernels


def _cut_softmax(alike: AlikeRows, byte: Array) -> _Cut:
    """Cut softmax: a warp takes a row or two and a block four warps, or a block takes a row."""
    if alike.kernel == "warp":
        units = np.ceil(alike.rows / (ROWS.warp_block_threads / LANES * _rows_per_warp(alike.dim)))
        return _Cut(units, SM_THREADS / ROWS.warp_block_threads, byte * 2.0)
    threads = ROWS.warp_block_threads if alike.backward else ROWS.block_threads
    slots = SM_THREADS / threads
    passes = 1.0
    if alike.backward and alike.log:
        passes = ROWS.log_gradient_passes
    elif alike.kernel == "loop" and not alike.backward:
        passes = ROWS.softmax_walks
    return _Cut(
        alike.rows,
        slots,
        byte * ROWS.softmax_crossings,
        passes,
        passes - 1.0,
    )


def _cut_norm(alike: AlikeRows, byte: Array) -> _Cut:
    """Cut a norm into a block a row.

    Its gradient reads both operands for the gradient of the input, and again for the weights'.
    """
    is_layer = alike.kind == "layernorm"
    reads = 2.0 if alike.backward else 1.0
    slots = SM_THREADS / ROWS.warp_block_threads
    crossed_byte = byte * ROWS.norm_crossings
    if alike.kernel == "vector":
        # A long row of a layer norm is no longer in L1 when it is read again.
        if is_layer:
            reread = _l1_miss_share(alike.row_byte)
        else:
            lost = (alike.row_byte - ROWS.rms_kept_byte) / ROWS.rms_spilling_byte
            reread = np.clip(lost, ROWS.rms_least_reread, 1.0)
        return _Cut(
            alike.rows,
            slots,
            crossed_byte,
            1.0 + reread,
            reread,
            reads,
        )
    if alike.backward:
        return _Cut(
            alike.rows,
            slots,
            crossed_byte,
            1.0,
            1.0,
            reads,
        )
    element_byte = ROWS.scalar_element_byte + ROWS.scalar_crossings * alike.dtype.byte
    crossed_byte = alike.rows * (ROWS.scalar_row_byte + alike.dim * element_byte)
    passes = is_layer + ROWS.scalar_passes  # a layer norm loads weights too
    return _Cut(
        alike.rows,
        SM_THREADS / ROWS.scalar_threads,
        crossed_byte,
        passes,
        1.0,
        reads,
    )


class RowWalk(NamedTuple):
    """Dependent steps of all rounds of blocks together, and cycles of the busiest SM."""

    steps: Array
    sm_cycle: Array


def row_walk(
    alike: AlikeRows,
    sm_count: float,
    missing: Array,
) -> RowWalk:
    """Return how long blocks walk over rows; L2 lacks a share of ``missing`` of the bytes."""
    if alike.kind == "softmax":
        if alike.backward:
            return _walk_softmax_gradient(alike, sm_count, missing)
        walk = _walk_softmax(alike, sm_count, missing)
        extra_cycles = ROWS.masked_cycles * alike.masked + ROWS.cast_cycles * alike.casts_apart
        sm_cycle = walk.sm_cycle + extra_cycles * alike.elements / sm_count
        return RowWalk(walk.steps + 2.0 * alike.casts_apart, sm_cycle)
    if alike.backward:
        return _walk_norm_gradient(alike, sm_count, missing)
    return _walk_norm(alike, sm_count, missing)


def _walk_softmax_gradient(
    alike: AlikeRows,
    sm_count: float,
    missing: Array,
) -> RowWalk:
    if alike.kernel == "warp":
        loads = np.maximum(_warp_places(alike.dim) / LANES, 1.0)
    else:
        loads = ROWS.gradient_steps + 2.0 * np.ceil(alike.dim / ROWS.block_threads)
    steps = steps_with_misses(loads, ROWS.overlapping_misses * missing)
    return RowWalk(steps, ROWS.softmax_gradient_cycles * alike.elements / sm_count)


def _walk_norm_gradient(
    alike: AlikeRows,
    sm_count: float,
    missing: Array,
) -> RowWalk:
    """Return the walk for the gradient of the input, and then for that of the weights."""
    is_vector = alike.kernel == "vector"
    step_elements = ROWS.scalar_threads if is_vector else ROWS.scalar_gradient_elements
    input_steps = ROWS.gradient_start_steps + np.ceil(alike.dim / step_elements)
    row_share = ROWS.rms_gradient_share if alike.kind == "rmsnorm" else 1.0
    column_blocks = np.maximum(np.ceil(alike.dim / LANES) / sm_count, 1.0)
    weight_steps = np.ceil(alike.rows / ROWS.gradient_rows) * row_share * column_blocks

    always, of_byte, of_lost_byte = ROWS.norm_gradient_cycles
    byte_cycles = of_byte + of_lost_byte * _l1_miss_share(alike.row_byte)
    element_cycles = always + alike.dtype.byte * byte_cycles
    steps = input_steps + steps_with_misses(weight_steps, ROWS.walking_misses * missing)
    return RowWalk(steps, element_cycles * alike.elements / sm_count)


def _walk_norm(
    alike: AlikeRows,
    sm_count: float,
    missing: Array,
) -> RowWalk:
    loads = np.ceil(alike.dim / ROWS.scalar_threads)
    sm_rows = alike.rows / sm_count
    if alike.kernel == "scalar":
        # Blocks of 512 threads, which wait for one another's sums
        rounds = np.maximum(alike.rows / (ROWS.scalar_slots * sm_count), 1.0)
        steps = (ROWS.reduce_steps + loads) * rounds + loads * missing
        return RowWalk(steps, sm_rows * ROWS.scalar_cycles * alike.dim)
    is_layer = alike.kind == "layernorm"
    of_row, of_byte, of_wide_row = ROWS.layernorm_cycles if is_layer else ROWS.rmsnorm_cycles
    row_cycles = np.maximum(of_row + of_byte * alike.dim * alike.dtype.byte, WORK.block_cycles)
    if alike.dtype is Dtype.FP32:
        row_cycles = row_cycles + of_wide_row
    return RowWalk(ROWS.reduce_steps + steps_with_misses(loads, missing), sm_rows * row_cycles)


def _walk_softmax(
    alike: AlikeRows,
    sm_count: float,
    missing: Array,
) -> RowWalk:
    if alike.kernel == "warp":
        places = _warp_places(alike.dim)
        is_widest = (places >= ROWS.warp_row)[..., np.newaxis]
        cycles = np.where(is_widest, ROWS.widest_warp_cycles, ROWS.warp_cycles)
        of_place, of_element, of_row = cycles.T
        row_cycles = of_place * places + of_element * alike.dim + of_row
        loads = np.maximum(places / LANES, 1.0) * _rows_per_warp(alike.dim)
        steps = steps_with_misses(loads, ROWS.overlapping_misses * missing)
        return RowWalk(steps, np.maximum(alike.rows / sm_count, 1.0) * row_cycles)

    loads = np.ceil(alike.dim / ROWS.block_threads)
    if alike.kernel == "block":
        fits_twice = loads <= ROWS.twice_elements
        block_cycles = loads * np.where(fits_twice, ROWS.register_cycles, ROWS.lone_register_cycles)
        blocks = _busiest_sm_blocks(alike.rows, sm_count, np.where(fits_twice, 2.0, 1.0))
        steps = ROWS.reduce_steps + steps_with_misses(ROWS.register_steps * loads, missing)
        return RowWalk(steps, blocks * block_cycles)

    block_cycles = ROWS.walk_row_cycles + ROWS.walk_element_cycles * alike.dim
    blocks = _busiest_sm_blocks(alike.rows, sm_count, 2.0)
    reduce_steps = ROWS.softmax_walks * ROWS.reduce_steps
    steps = reduce_steps + steps_with_misses(2.0 * loads, ROWS.walking_misses * missing)
    return RowWalk(steps, blocks * block_cycles)


def _warp_places(dim: Array) -> Array:
    """Return the elements that the lanes of a warp have room for in a row: a power of two.

    >>> float(_warp_places(np.array(1500.0)))
    2048.0
    """
    return np.asarray(2.0 ** np.ceil(np.log2(dim)))


def _rows_per_warp(dim: Array) -> Array:
    return np.where(dim <= ROWS.pair_row, 2.0, 1.0)


def _busiest_sm_blocks(
    rows: Array,
    sm_count: float,
    blocks: Array | float,
) -> Array:
    """Return the blocks of the busiest SM, which runs so many ``blocks`` at a time.

    They are whole rounds once there is more than one; a single block takes no longer than its
    steps.
    """
    slots = sm_count * blocks
    few_blocks = np.where(rows > sm_count, rows / sm_count, 0.0)
    return np.where(rows > slots, blocks * np.ceil(rows / slots), few_blocks)


def _l1_miss_share(row_byte: Array) -> Array:
    """Return the share of a row that L1 no longer holds when a norm reads it again.

    >>> _l1_miss_share(np.array([4096.0, 16384.0])).tolist()
    [0.0, 1.0]
    """
    return np.clip((row_byte - ROWS.l1_kept_byte) / ROWS.l1_spilling_byte, 0.0, 1.0)


register_kernels(Softmax, LayerNorm, RmsNorm, mapping=KernelMapping(row_reduction_work))
