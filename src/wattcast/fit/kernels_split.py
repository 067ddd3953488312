"""Held-out predictions: every stage of the fit inside the training folds, shapes never on both sides.

All rows of a shape (burst, sustained, duty, clock, pattern, every format of it) share a fold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.equilibrium import settle
from wattcast.fit.beside import each
from wattcast.fit.kernels import Fitted, as_ran, bundle_of, fit_rows, random, settled
from wattcast.fit.kernels_choice import chosen_for, labels_of
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_folds import FOLDS, folds_of, shape_of
from wattcast.fitted.bundle import Bundle
from wattcast.flow import analyse_kernels, at_clock
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import kernels_of, reference_of
from wattcast.kernels.table import Segment
from wattcast.power.static import IdlePower
from wattcast.timeline import Timeline, kernel_s
from wattcast.timeline.clock import effective_hz


@dataclass(frozen=True)
class HeldOut:
    """Measured beside predicted, one entry a row that was held out; NaN where a row has no such figure."""

    kind: tuple[str, ...]
    family: tuple[str, ...]
    group: tuple[str, ...]
    work: tuple[str, ...]  # the operator in words
    data: tuple[str, ...]
    fold: npt.NDArray[np.int64]
    latency_s: Array
    power_w: Array
    clock_hz: Array
    predicted_latency_s: Array
    predicted_power_w: Array
    predicted_clock_hz: Array
    roofline_s: Array
    ran: tuple[str, ...]  # kernel of a product, from the names; empty: none known
    chosen: tuple[str, ...]  # kernel the choice took without having seen the shape
    oracle_latency_s: Array  # predicted with the kernel that ran; bursts of products alone
    near: Array  # 1 to 0: how like the nearest row that was not held out, as the learned factor of time sees it
    near_power: Array  # the same, as that of energy does


def hold_out(
    rows: Rows,
    gpu: Gpu,
    idle: IdlePower,
    folds: int = FOLDS,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> HeldOut:
    """Predictions of every burst and sustained row from a fit that never saw its shape."""
    fold = folds_of(rows, folds, seed)
    wanted = rows.is_kind("burst", "sustained") & rows.fit & (rows.repeat == 0)
    predicted, oracle_s, near = (np.full(shape, np.nan) for shape in ((len(rows), 3), len(rows), (2, len(rows))))
    chosen: list[str] = [""] * len(rows)
    tests = [wanted & (fold == k) for k in range(folds)]
    work = ((rows.where(fold != k), rows.where(test), gpu, idle) for k, test in enumerate(tests))
    for k, (test, found) in enumerate(zip(tests, each(_fold, work, len(rows)), strict=True)):
        predicted[test], oracle_s[test], near[:, test] = found[0], found[1], found[3]
        for i, label in zip(np.flatnonzero(test), found[2], strict=True):
            chosen[i] = label
        if tell:
            tell(f"fold {k + 1} of {folds}")
    return _held_out(rows, wanted, fold, predicted, oracle_s, chosen, near, gpu)


def _fold(known: Rows, test: Rows, gpu: Gpu, idle: IdlePower) -> _Fold:
    found = fit_rows(known, gpu, idle)
    labels = [str(label or "") for label in chosen_for(test, found.learned.reference)]
    near = near_rows(bundle_of(found, test, gpu, {}, ""), test, gpu)
    return predict_rows(found, test, gpu), oracle_rows(found, test, gpu), labels, near


# latency, power and clock; latency by the kernels that ran; kernels chosen; nearness
_Fold = tuple[Array, Array, list[str], Array]


def oracle_rows(found: Fitted, rows: Rows, gpu: Gpu) -> Array:
    """Latency of bursts of products with the kernels that ran instead of those chosen; NaN elsewhere."""
    named = np.array([bool(names) for names in rows.names]) & np.isin(rows.family, ("gemm", "conv2d"))
    at = named & rows.is_kind("burst") & random(rows)
    result = np.full(len(rows), np.nan)
    if at.any():
        bundle = bundle_of(found, rows, gpu, {}, "")
        some = rows.where(at)
        result[at] = _at_top(replace(some, conditions=as_ran(some)), gpu, bundle, float(np.mean(gpu.clocks.max_hz)))
    return result


def predict_rows(found: Fitted, rows: Rows, gpu: Gpu) -> Array:
    """Latency, power and clock of each row as it was run: bursts at the top clock, the rest under the governor."""
    return predict_with(bundle_of(found, rows, gpu, {}, ""), rows, gpu)


def predict_with(bundle: Bundle, rows: Rows, gpu: Gpu) -> Array:
    """The same from a bundle."""
    bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    result = np.full((len(rows), 3), np.nan)
    burst = rows.is_kind("burst")
    top_hz = float(np.mean(gpu.clocks.max_hz))
    if burst.any():
        some = rows.where(burst)
        for name in dict.fromkeys(some.data):
            at = np.array([d == name for d in some.data])
            result[np.flatnonzero(burst)[at], 0] = _at_top(some.where(at), gpu, bundle.for_data(name), top_hz)
            result[np.flatnonzero(burst)[at], 2] = top_hz
    for i in np.flatnonzero(~burst):
        result[i] = _under_governor(rows, int(i), gpu, bundle.for_data(rows.data[i]))
    return result


def near_rows(bundle: Bundle, rows: Rows, gpu: Gpu) -> Array:
    """How like the nearest row that a bundle learned time and energy from each row is, ``(2, row)``; NaN: nothing."""
    near = analyse_rows(bundle, rows, gpu).near
    return np.full((2, len(rows)), np.nan) if near is None else near


def analyse_rows(bundle: Bundle, rows: Rows, gpu: Gpu) -> Timeline:
    """The kernels of rows, one each, without any issue order."""
    return analyse_kernels(kernels_of(rows.ops, rows.conditions, gpu, bundle.reference, ()), gpu, bundle)


def _at_top(rows: Rows, gpu: Gpu, bundle: Bundle, top_hz: float) -> Array:
    timeline = analyse_rows(bundle, rows, gpu)
    return kernel_s(timeline, effective_hz(timeline, np.asarray(top_hz), bundle.clock_law))


def _under_governor(rows: Rows, i: int, gpu: Gpu, bundle: Bundle) -> tuple[float, float, float]:
    segment = Segment(np.array([0]), np.array([1.0]), 1)
    kernels = kernels_of((rows.ops[i],), (rows.conditions[i],), gpu, bundle.reference, (segment,))
    timeline = analyse_kernels(kernels, gpu, bundle)
    governed = settle(timeline, gpu, OperatingPoint(), bundle)
    totals = at_clock(timeline, governed.at, bundle)
    return float(totals.latency_s), float(totals.power_w), float(governed.clock_hz[..., 0])


def _held_out(
    rows: Rows,
    wanted: Mask,
    fold: npt.NDArray[np.int64],
    predicted: Array,
    oracle_s: Array,
    chosen: list[str],
    near: Array,
    gpu: Gpu,
) -> HeldOut:
    some = rows.where(wanted)
    power_w, clock_hz, latency_s = settled(some)
    reference = reference_of(gpu)
    kernels = kernels_of(some.ops, some.conditions, gpu, reference, ())
    rate = np.asarray(kernels.pipe_per_cycle) * reference.sm_count * reference.top_hz
    byte = np.array([op.read_byte + op.write_byte for op in some.ops])
    burst = some.is_kind("burst")
    return HeldOut(
        kind=some.kind,
        family=some.family,
        group=kernels.work.group,
        work=tuple(str(op) for op in some.ops),
        data=some.data,
        fold=fold[wanted],
        latency_s=latency_s,
        power_w=np.where(burst, np.nan, power_w),
        clock_hz=np.where(burst, np.nan, clock_hz),
        predicted_latency_s=predicted[wanted, 0],
        predicted_power_w=predicted[wanted, 1],
        predicted_clock_hz=predicted[wanted, 2],
        roofline_s=np.maximum(kernels.flop / rate, byte / float(np.mean(gpu.memory.byte_per_s))),
        ran=tuple(str(label or "") for label in labels_of(some)),
        chosen=tuple(chosen[i] for i in np.flatnonzero(wanted)),
        oracle_latency_s=oracle_s[wanted],
        near=near[0, wanted],
        near_power=near[1, wanted],
    )


__all__ = ["FOLDS", "HeldOut", "folds_of", "hold_out", "predict_rows", "random", "shape_of"]
