"""What follows from the form of elementwise operators (function, layout, number format), whatever their sizes: which
kernel PyTorch has for them, and what it costs.

A workload of other sizes has operators of the same forms: they are looked up once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.function_cost import cost_of
from wattcast.kernels.grids import SPECIAL
from wattcast.kernels.work import Flags, columns_of
from wattcast.workload.elementwise import function_of
from wattcast.workload.graph import Elementwise, Layout

_SUM_ISSUE, _MAX_ISSUE = 8.0, 24.0  # of an element of a reduction: a maximum looks for NaN
_LAYOUT = {layout: float(i) for i, layout in enumerate(Layout)}
_REDUCING = ("sum", "mean", "max", "topk", "pool", "cumsum")
_MOVING = ("gather", "cat", "copy", "cast", "scatter_add")
KINDS = ("vector", "unrolled", "copy", "indexed", "transposed", "cat", "gather", "gather.few", "reduce")
VECTOR, UNROLLED, COPY, INDEXED, TRANSPOSED, CAT, GATHER, FEW, REDUCE = range(len(KINDS))
_MASKED = ("masked_fill", "where")
_TWICE = {"batchnorm_train": 1.0, "batchnorm_grad": 2.0}  # operands that are read a second time
Kinds = npt.NDArray[np.intp]
_Form = tuple[str, Layout, Dtype, Dtype | None]
_form: Callable[[Elementwise], _Form] = attrgetter("function", "layout", "dtype", "out_dtype")


def forms_of(ops: Sequence[Elementwise]) -> Forms:
    """Of all rows."""
    forms = tuple([_form(op) for op in ops])
    return _known_forms(forms) if len(ops) <= _MOST_ROWS else _forms(forms)


class Forms(NamedTuple):
    """What follows from the forms of all rows, whatever their sizes."""

    inputs: Array  # bytes of the operands of an element
    twice: Array  # of those read twice
    kind: Kinds  # the kernel; of several, that of operands which do not lie whole
    whole: Kinds  # that of operands which do
    open: Flags  # whether it is the layout that leaves this open
    spread: Flags  # an operand is broadcast
    turned: Flags
    reduces: Kinds  # places of reductions
    gathers: Kinds
    joins: list[int]  # places of what may join a cache
    special: list[int]  # places of what may have a grid of its own
    columns: Sequence[Array]  # of sizes, from ``width``


def _forms(forms: tuple[_Form, ...]) -> Forms:
    table = columns_of([_of_form(form) for form in forms])
    table.flags.writeable = False  # other workloads will take it
    inputs, twice, kinds, whole, open_ = table[:5]
    width, layout = table[5], table[7]
    kind = kinds.astype(np.intp)
    return Forms(
        inputs=inputs * width,
        twice=twice * width,
        kind=kind,
        whole=whole.astype(np.intp),
        open=open_ > 0,
        spread=layout == _LAYOUT[Layout.BROADCAST],
        turned=layout == _LAYOUT[Layout.TRANSPOSED],
        reduces=(kind == REDUCE).nonzero()[0],
        gathers=(kind == GATHER).nonzero()[0],
        joins=[i for i, form in enumerate(forms) if form[0] == "cat"],
        special=[i for i, form in enumerate(forms) if form[0] in SPECIAL],
        columns=list(table[5:]),
    )


_known_forms = lru_cache(maxsize=512)(_forms)
_MOST_ROWS = 1024  # of a workload whose forms are worth keeping


@cache
def _of_form(form: _Form) -> tuple[float, ...]:
    """Operands, those read twice, the kernel (of several, that of operands which do not lie whole), that of operands
    which do, whether a layout leaves it open; then columns of sizes, from ``width``."""
    name, layout, dtype, out_dtype = form
    cost = cost_of(name)
    whole, open_ = COPY if name == "copy" else VECTOR, layout is not Layout.CONTIGUOUS
    if name == "cast" and dtype is not Dtype.FP32:
        whole = UNROLLED
    kind = INDEXED if open_ else whole
    if name in _REDUCING:
        kind, open_ = REDUCE, False
    elif name == "gather":
        kind, open_ = GATHER, False
    elif name == "cat":  # parts without holes are copied sixteen bytes at a time
        kind, open_ = CAT if open_ else VECTOR, False
    return (
        function_of(name).inputs,
        _TWICE.get(name, 0.0),
        kind,
        whole,
        open_,
        dtype.byte,
        (out_dtype or dtype).byte,
        _LAYOUT[layout],
        (_MAX_ISSUE if name == "max" else _SUM_ISSUE) if name in _REDUCING else cost.issue,
        cost.start_cycle,
        _MOVING.index(name) + 1.0 if name in _MOVING else 0.0,
        name in _REDUCING,
        name == "max",
        name in _MASKED,
        name == "masked_fill",
        dtype.byte >= 4 and name != "cast",
    )
