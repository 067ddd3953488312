"""Pointwise functions, reductions over all or part of a tensor, and plain data movement.

They run as PyTorch 2 runs them: ``elementwise_sizes`` finds the kernel of each and its sizes,
``elementwise_grids`` and ``special_grids`` cut it into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from wattcast.core.arrays import (
    Array,
    CodedColumn,
    map_distinct,
)
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.elementwise_grids import (
    make_streaming_grids,
    replace_grids,
    replace_row_grids,
)
from wattcast.kernels.families.elementwise_sizes import (
    ELEMENTWISE,
    KERNELS,
    TRANSPOSED,
    ElementwiseSizes,
    as_measured,
    read_sizes,
)
from wattcast.kernels.families.special_grids import (
    SPECIAL_FUNCTIONS,
    special_grid,
    special_kernel,
)
from wattcast.kernels.kernel_table import (
    Columns,
    ConditionColumns,
    FamilyColumns,
    LaunchGrid,
    ReferenceChip,
    streamed_share,
)
from wattcast.workload.operator_base import index_words
from wattcast.workload.operator_types import Elementwise

_KERNEL_FAMILIES = tuple(f"elementwise.{kernel}" for kernel in KERNELS)

_TENSORS_OF_TWO = 3.0  # two operands and a result


def elementwise_work(
    ops: Sequence[Elementwise],
    conditions: ConditionColumns,
    rate: Array,
    reference: ReferenceChip,
) -> FamilyColumns:
    """Return kernel families, work columns and features of pointwise functions and data
    movement.
    """
    ops = as_measured(ops, conditions)
    sizes = read_sizes(ops, conditions)
    form = sizes.form
    sm_count = reference.sm_count
    missing = 1.0 - streamed_share(sizes.byte - sizes.reread_byte, reference.l2_byte)
    missing[sizes.is_cold] = 1.0

    # Grids: those of kernels that stream, of kernels cut by rows, and of special functions
    issue, table = make_streaming_grids(sizes, missing, sm_count)
    replace_row_grids(
        table,
        sizes,
        issue,
        missing,
        sm_count,
    )
    special = _find_special_kernels(ops)
    replace_grids(table, _make_special_grids(special, ops, missing, sm_count))
    grid = dict(zip(LaunchGrid._fields, table, strict=True))

    rounds = grid["units"] / (grid["slots"] * sm_count)
    waves = grid["units"] / sm_count
    once_steps = grid["steps"] / np.maximum(rounds, 1.0)
    moved = _l2_byte(sizes)
    work = {
        "units": grid["units"],
        "slots": grid["slots"],
        # A masked fill is made in a copy, which is a kernel of its own.
        "launches": grid["launches"] + form.fills_copy,
        "between_byte": grid["between_byte"] + form.fills_copy * 2.0 * form.width * sizes.n,
        "steps": np.where(grid["once"] > 0, once_steps, grid["steps"]),
        "unit_flop": rate * grid["sm_cycle"] / np.maximum(waves, 1.0),
        "l2_byte": moved,
        "shared_byte": moved + sizes.byte,
        "dram_read_byte": sizes.read * missing,
        "dram_write_byte": sizes.write * missing,
    }
    logs = {
        "log_n": sizes.n,
        "log_read": sizes.read,
        "log_write": sizes.write,
        "log_byte": sizes.byte,
        "extent_rows": sizes.rows,
        "extent_columns": sizes.columns,
    }
    aligned = {"align_n": sizes.n, "align_columns": sizes.columns}
    families = _name_families(sizes, special)
    return FamilyColumns(
        families,
        work,
        _describe_rows(sizes, issue, rounds),
        logs,
        aligned,
    )


def _make_special_grids(
    special: Mapping[int, str],
    ops: Sequence[Elementwise],
    missing: Array,
    sm_count: float,
) -> dict[int, LaunchGrid]:
    """Return the grids of special functions by row, of those that have one of their own."""
    grids = {}
    for row, kernel in special.items():
        grid = special_grid(kernel, ops[row], sm_count, float(missing[row]))
        if grid is not None:
            grids[row] = grid
    return grids


def _find_special_kernels(ops: Sequence[Elementwise]) -> dict[int, str]:
    """Return the kernels of functions that have a grid of their own, by row."""
    functions = index_words(ops, attrgetter("function"))
    candidates = map_distinct(SPECIAL_FUNCTIONS.__contains__, functions).nonzero()[0]
    kernels = {}
    for row in candidates.tolist():
        kernel = special_kernel(ops[row])
        if kernel:
            kernels[row] = kernel
    return kernels


def _l2_byte(sizes: ElementwiseSizes) -> Array:
    """Return the bytes through L2, which moves most of a sector for each element that is turned.

    Short rows of one operand find the sector again.
    """
    turned = (sizes.kernel == TRANSPOSED).nonzero()[0]
    if not turned.size:
        return sizes.byte
    doublings = np.log2(np.maximum(sizes.columns[turned], 1.0) / ELEMENTWISE.short_row)
    least_share = ELEMENTWISE.sector_share
    share = np.clip(least_share + ELEMENTWISE.sector_growth * doublings, least_share, 1.0)
    has_one_operand = sizes.operands[turned] < _TENSORS_OF_TWO
    sector_byte = ELEMENTWISE.sector_byte * np.where(has_one_operand, share, 1.0)
    moved = sizes.byte.copy()
    moved[turned] += (sector_byte - sizes.form.width[turned]) * sizes.n[turned]
    return moved


def _describe_rows(
    sizes: ElementwiseSizes,
    issue: Array,
    rounds: Array,
) -> Columns:
    """Return features of the learned residual."""
    form = sizes.form
    ratio = np.maximum(sizes.read, 1.0) / np.maximum(sizes.write, 1.0)
    return {
        "read_per_write": np.log2(ratio),
        "byte_per_element": sizes.byte / sizes.n,
        "width": form.width,
        "out_width": form.out_width,
        "flop_per_element": issue,
        "sfu_per_element": form.start_cycle,
        "layout": form.layout,
        "moving": form.moving,
        "reducing": form.reducing,
        "widest": form.is_maximum,
        "masked": form.masked,
        "cold": sizes.is_cold.astype(np.float64),
        "fill": rounds / np.maximum(np.ceil(rounds), 1.0),
        "rounds": np.log2(rounds),
        "run": np.minimum(sizes.run, ELEMENTWISE.most_run),
    }


def _name_families(sizes: ElementwiseSizes, special: dict[int, str]) -> CodedColumn[str]:
    """Return the kernel family of each row."""
    families = CodedColumn(_KERNEL_FAMILIES, sizes.kernel)
    if not special:
        return families
    special_names = [f"elementwise.{name}" for name in special.values()]
    parts = [(slice(None), families), (list(special), special_names)]
    return CodedColumn.from_parts(parts, len(sizes.n))


register_kernels(Elementwise, mapping=KernelMapping(elementwise_work))
