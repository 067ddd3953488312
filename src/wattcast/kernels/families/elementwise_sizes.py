"""Sizes of pointwise functions and data movement, and the kernel that runs each.

``function_cost.csv`` lists the functions that cost more than moving their operands. ``issue`` is
the instructions of a thread for an element (slower pipes counted by the issue slots they block),
from bursts on an H200 that fit L2 and have 0.6 to 12 million elements. ``start_cycle`` is by how
much a kernel of up to 131,072 elements outlasts an addition. The instructions agree with those a
profiler counted: 16 (and 2 on the slow pipe, 8 slots each) for a division, 22 and 3 for SiLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import nan
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.core.arrays import (
    Array,
    Mask,
    map_distinct,
)
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.families.special_grids import appends_to_cache
from wattcast.kernels.kernel_table import (
    ConditionColumns,
    as_columns,
    count_columns,
)
from wattcast.workload.operator_base import find_function, index_words
from wattcast.workload.operator_types import Elementwise, Layout


class ElementwiseCoefficients(Coefficients):
    """What pointwise functions cost beyond moving their operands, and sizes nobody stated."""

    store_byte_per_cycle: float  # that an SM stores, whatever it reads
    sum_issue: float  # instructions for an element of a reduction
    max_issue: float  # the same of a maximum, which looks for NaN
    reduce_block_cycles: float  # of an SM for a block of a reduction, on top of its elements
    start_step_cycles: float  # of a function's start that count as a step
    sector_byte: float  # that L2 moves for each element of a transposing walk
    sector_share: float  # of these, where rows are short and one operand finds the sector again
    sector_growth: float  # of this share with each doubling of a row beyond 32 elements
    usual_run: float  # of a turned operand that is not described: a head
    usual_columns: float  # of a row that is not described
    most_blocks: float  # of an SM in flight
    cat_blocks: float  # of a concatenation, whatever its size
    gather_threads: float  # of a block of a gather at most
    few_gather_threads: float  # of a block of a gather of few rows
    vector_columns: float  # of a row from which a reduction loads several at once
    few_rows: float  # up to which a gather loops over its rows
    one_batch_rows: int  # of a cache up to which it is taken to be of one batch
    short_row: float  # elements of a row up to which its turned sectors are found again
    most_run: float  # elements that lie side by side, beyond which corrections take all alike


ELEMENTWISE = load_coefficients("elementwise", ElementwiseCoefficients)

# Kernels in the order of ``elementwise_kernels.csv``; those from CAT on are cut by rows.
KERNELS = (
    "vector",
    "unrolled",
    "copy",
    "indexed",
    "transposed",
    "cat",
    "gather",
    "gather.few",
    "reduce",
)
VECTOR, UNROLLED, COPY, INDEXED, TRANSPOSED, CAT, GATHER, FEW_GATHER, REDUCE = range(len(KERNELS))
_INDEX_BYTE = 8.0
_LAYOUT_CODE = {layout: float(code) for code, layout in enumerate(Layout)}
_REDUCING = ("sum", "mean", "max", "topk", "pool", "cumsum")
_MOVING = ("gather", "cat", "copy", "cast", "scatter_add")
_MASKED = ("masked_fill", "where")
_REREAD_OPERANDS = {
    **{"batchnorm_train": 1.0, "batchnorm_grad": 2.0},
    **{"batchnorm_train_wide": 1.0, "batchnorm_grad_wide": 2.0},
}


class FunctionCost(NamedTuple):
    """What a function costs an element and a kernel."""

    issue: float  # instructions for an element
    start_cycle: float  # cycles until a first result, beyond those of an addition


_ADDITION = FunctionCost(7.0, 0.0)


@cache
def load_function_costs() -> dict[str, FunctionCost]:
    """Return the costs of functions by name; one that the table lacks costs as an addition does."""
    rows = read_shipped_table("wattcast.kernels.families", "function_cost.csv")
    return {
        row["function"]: FunctionCost(float(row["issue"]), float(row["start_cycle"]))
        for row in rows
    }


class FormColumns(NamedTuple):
    """What follows from function, layout and number formats, whatever the sizes, ``(row,)``."""

    inputs: Array  # operands
    reread: Array  # operands that are read twice
    kernel: Array  # position in KERNELS; of several, that of operands which do not lie whole
    whole_kernel: Array  # that of operands which do
    is_open: Array  # 1: the layout leaves it open which
    width: Array  # bytes of an element
    out_width: Array
    layout: Array
    issue: Array  # instructions for an element
    start_cycle: Array  # until a first result, beyond those of an addition
    moving: Array
    reducing: Array
    is_maximum: Array
    masked: Array
    fills_copy: Array  # 1: a masked fill, which is made in a copy
    is_wide: Array  # 1: elements of four bytes or more that are not cast


class ElementwiseSizes(NamedTuple):
    """Sizes of all rows, ``(row,)``."""

    n: Array
    read: Array  # bytes
    write: Array
    byte: Array  # read and written
    rows: Array
    columns: Array  # elements of a row
    operands: Array  # operands and results, as bytes say
    run: Array
    kernel: npt.NDArray[np.intp]  # position in KERNELS
    is_cold: Mask  # operands come from device memory
    reread_byte: Array
    form: FormColumns


def as_measured(ops: Sequence[Elementwise], conditions: ConditionColumns) -> Sequence[Elementwise]:
    """Return operators as the campaign ran them.

    The slice behind a cache of one batch has no holes.
    """
    if conditions.usual:
        return ops
    measured = []
    for op, rows in zip(ops, conditions.rows.tolist(), strict=True):
        is_one_batch = 0 < rows <= ELEMENTWISE.one_batch_rows
        if is_one_batch and op.layout is Layout.STRIDED and appends_to_cache(op):
            op = replace(op, layout=Layout.CONTIGUOUS)
        measured.append(op)
    return measured


def read_sizes(ops: Sequence[Elementwise], conditions: ConditionColumns) -> ElementwiseSizes:
    """Return the sizes of all rows.

    ``rows`` and ``run`` are as conditions say, else as bytes say (an index or a result each), else
    as the operator says, else as usual.
    """
    forms = index_words(ops, _read_form)
    form_table = as_columns([_describe_form(form) for form in forms.values])
    form = FormColumns(*form_table.take(forms.place, axis=1))
    n, read, write, rows, run = count_columns(ops, _read_stated_sizes)

    # Bytes that are not stated follow from the elements.
    read = np.where(np.isnan(read), form.inputs * form.width * n, read)
    write = np.where(np.isnan(write), n * form.out_width, write)

    # Elements that stay together, and rows
    is_turned = form.layout == _LAYOUT_CODE[Layout.TRANSPOSED]
    run = np.where(is_turned & (run > 0), run, ELEMENTWISE.usual_run)
    run = np.where(conditions.run > 0, conditions.run, run)
    rows = np.where(rows > 0, rows, n / ELEMENTWISE.usual_columns)
    rows = np.where(form.kernel == REDUCE, write / form.out_width, rows)
    is_gather = form.kernel == GATHER
    indices = (read - n * form.width) / _INDEX_BYTE
    rows = np.where(is_gather & (indices >= 1.0), indices, rows)
    rows = np.where(conditions.rows > 0, conditions.rows, rows)
    rows = np.minimum(np.maximum(rows, 1.0), n)

    # An operand of one row lies whole, as does a turned one whose rows stay together. One that is
    # spread over all rows does only next to another as large.
    is_open = form.is_open > 0
    is_spread = form.layout == _LAYOUT_CODE[Layout.BROADCAST]
    is_one_row = (rows <= 1.0) & (~is_spread | (read >= 2.0 * n * form.width))
    is_whole = is_open & (is_one_row | (is_turned & (rows <= run)))
    kernel = np.where(is_whole, form.whole_kernel, form.kernel).astype(np.intp)
    kernel[is_open & is_turned & (run <= 1.0) & ~is_whole] = TRANSPOSED
    kernel[is_gather & (rows <= ELEMENTWISE.few_rows)] = FEW_GATHER

    # Operands are cold on purpose, or because they are a cache.
    is_cold = conditions.cold | _find_caches(ops) & ~conditions.warm
    reread_byte = np.minimum(form.reread * form.width * n, read / 2.0)
    byte = read + write
    return ElementwiseSizes(
        n=n,
        read=read,
        write=write,
        byte=byte,
        rows=rows,
        columns=n / rows,
        operands=byte / (n * form.width),
        run=run,
        kernel=kernel,
        is_cold=is_cold,
        reread_byte=reread_byte,
        form=form,
    )


def _read_stated_sizes(op: Elementwise) -> tuple[float, ...]:
    """Return the sizes of an operator; not a number: not stated."""
    optional = (op.read, op.write, op.rows, op.run)
    return op.n, *(nan if size is None else size for size in optional)


def _find_caches(ops: Sequence[Elementwise]) -> Mask:
    """Return the rows that append to a cache."""
    appends = map_distinct("cat".__eq__, index_words(ops, attrgetter("function")))
    concatenations = np.flatnonzero(appends).tolist()
    appends[appends] = [appends_to_cache(ops[row]) for row in concatenations]
    return appends


_Form = tuple[str, Layout, Dtype, Dtype | None]
_read_form: Callable[[Elementwise], _Form] = attrgetter("function", "layout", "dtype", "out_dtype")


@cache
def _describe_form(form: _Form) -> tuple[float, ...]:
    """Return one row of ``FormColumns``."""
    name, layout, dtype, out_dtype = form
    cost = load_function_costs().get(name, _ADDITION)
    is_reducing = name in _REDUCING
    issue = cost.issue
    if is_reducing:
        issue = ELEMENTWISE.max_issue if name == "max" else ELEMENTWISE.sum_issue
    kernel, whole_kernel, is_open = _choose_kernels(name, layout, dtype)
    columns: dict[str, float] = {
        "inputs": find_function(name).inputs,
        "reread": _REREAD_OPERANDS.get(name, 0.0),
        "kernel": kernel,
        "whole_kernel": whole_kernel,
        "is_open": is_open,
        "width": dtype.byte,
        "out_width": (out_dtype or dtype).byte,
        "layout": _LAYOUT_CODE[layout],
        "issue": issue,
        "start_cycle": cost.start_cycle,
        "moving": _MOVING.index(name) + 1.0 if name in _MOVING else 0.0,
        "reducing": is_reducing,
        "is_maximum": name == "max",
        "masked": name in _MASKED,
        "fills_copy": name == "masked_fill",
        "is_wide": dtype.byte >= Dtype.FP32.byte and name != "cast",
    }
    return tuple(columns[field] for field in FormColumns._fields)


def _choose_kernels(
    name: str,
    layout: Layout,
    dtype: Dtype,
) -> tuple[int, int, bool]:
    """Return the kernel of a form, that of operands which lie whole, and whether both may run."""
    is_open = layout is not Layout.CONTIGUOUS
    whole_kernel = COPY if name == "copy" else VECTOR
    if name == "cast" and dtype is not Dtype.FP32:
        whole_kernel = UNROLLED
    if name in _REDUCING:
        return REDUCE, whole_kernel, False
    if name == "gather":
        return GATHER, whole_kernel, False
    if name == "cat":
        # Parts without holes are copied sixteen bytes at a time.
        return CAT if is_open else VECTOR, whole_kernel, False
    return INDEXED if is_open else whole_kernel, whole_kernel, is_open
