"""Positions and attention masks, as Hugging Face builds them once a pass."""

from __future__ import annotations

from wattcast.dtypes import Dtype
from wattcast.workload.functional import cat, fill, reduce
from wattcast.workload.pointwise import pointwise
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


def positions(tape: Tape, run: Run) -> None:
    """Position numbers of the new tokens; without a cache Hugging Face also looks for packed sequences in them."""
    if run.engine:
        return
    place = pointwise("shift", fill(tape, (run.length,), Dtype.INT64)).unsqueeze(0)
    if run.cached:
        return
    with tape.at("packing"):
        place = place.expand(run.batch, run.length)
        before = pointwise("shift", place.slice(1, 0, 1))
        joined = cat([before, place], 1)
        step = pointwise("sub", joined.slice(1, 1, run.length + 1), joined.slice(1, 0, run.length))
        jump = pointwise("compare", step, out_dtype=Dtype.BOOL)
        found = pointwise("cumsum", jump, out_dtype=Dtype.INT64)
        reduce("sum", pointwise("compare", found.slice(1, 0, 1).select(1), out_dtype=Dtype.BOOL), (1,))


def needs_mask(run: Run, window: int = 0) -> bool:
    """Eager attention always adds a mask; fused attention only where a window cuts the context short."""
    if run.engine:
        return False
    return not run.flash or bool(window and run.context >= window)


def causal(tape: Tape, run: Run, window: int = 0) -> Tensor:
    """Ranges and comparisons; yes or no for fused attention, numbers to add for eager attention."""
    q_len, kv_len = run.length, run.context
    with tape.at("mask"):
        for size in (run.batch, 1):
            fill(tape, (size,), Dtype.INT64)
        query, key = (pointwise("shift", fill(tape, (size,), Dtype.INT64)) for size in (q_len, kv_len))
        query, key = query.view(1, 1, q_len, 1), key.view(1, 1, 1, kv_len)
        keep = pointwise("compare", key, query, out_dtype=Dtype.BOOL)
        if window:
            near = pointwise("compare", key, pointwise("shift", query), out_dtype=Dtype.BOOL)
            keep = pointwise("compare", near, keep, out_dtype=Dtype.BOOL)
            keep = pointwise("compare", fill(tape, (), Dtype.BOOL), keep, out_dtype=Dtype.BOOL)
        keep = keep.expand(run.batch, 1, q_len, kv_len)
        return keep if run.flash else additive(keep, run.dtype)


def additive(keep: Tensor, dtype: Dtype) -> Tensor:
    """0 where a key may be seen, the lowest number where not."""
    zero, low = fill(keep.tape, (), dtype), fill(keep.tape, (), dtype)
    return pointwise("where", keep, zero, low, out_dtype=dtype)
