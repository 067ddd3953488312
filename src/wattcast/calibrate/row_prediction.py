"""Predict measured rows with a bundle, and describe what rows cover and how far off they are.

Both the calibration of a card and the fits of the lab judge bundles by these functions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wattcast.calibrate.kernel_rows import KernelRows, settled_figures
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import IssueSegment
from wattcast.predictor.bundle.bundle_file import Bundle, MeasuredRange
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_kernels
from wattcast.predictor.timeline import ClockLaw, Timeline, compute_effective_hz, compute_kernel_s


def predict_with_bundle(
    bundle: Bundle, rows: KernelRows, gpu: Gpu, run_s: float | None = None
) -> Array:
    """Predict latency, power, clock and power at the top clock of each row; of bursts latency at
    the top clock.

    ``run_s`` is how long the other rows ran after a pause; None: until the governor had settled.
    """
    bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    result = np.full((len(rows), 4), np.nan)
    burst = rows.is_kind("burst")
    data = np.array(rows.data)
    for name in dict.fromkeys(data[burst].tolist()):
        at = burst & (data == name)
        some = rows.select_rows(at)
        kernels = build_kernels(some.ops, some.conditions, gpu, bundle.reference, ())
        result[at, 0] = predict_bursts_s(kernels, gpu, bundle.for_data(name))
        result[at, 2] = float(np.mean(gpu.clocks.max_hz))
    for i in np.flatnonzero(~burst):
        own = bundle.for_data(rows.data[i])
        timeline = analyse_row(rows, int(i), gpu, own)
        governed, totals, _ = run_governed(timeline, gpu, OperatingPoint(duration_s=run_s), own)
        result[i] = totals.latency_s, totals.power_w, governed.clock_hz[..., 0], governed.asked_w
    return result


def row_nearness(bundle: Bundle, rows: KernelRows, gpu: Gpu) -> Array:
    """Return the nearness of each row to those that time and energy were learned from, ``(2,
    row)``; NaN: none.
    """
    near = analyse_rows(bundle, rows, gpu).near
    return np.full((2, len(rows)), np.nan) if near is None else near


def analyse_rows(bundle: Bundle, rows: KernelRows, gpu: Gpu) -> Timeline:
    """Analyse the kernels of rows, one each, without any issue order."""
    return analyse_kernels(
        build_kernels(rows.ops, rows.conditions, gpu, bundle.reference, ()), gpu, bundle
    )


def predict_bursts_s(kernels: Kernels, gpu: Gpu, bundle: Bundle) -> Array:
    """Predict the seconds of kernels that run for some milliseconds at the top clock,
    ``(kernel,)``.
    """
    timeline = analyse_kernels(kernels, gpu, bundle)
    law = bundle.for_bursts().clock_law
    return compute_kernel_s(
        timeline.phases, compute_effective_hz(timeline, float(np.mean(gpu.clocks.max_hz)), law)
    )


def analyse_row(rows: KernelRows, i: int, gpu: Gpu, bundle: Bundle) -> Timeline:
    """Analyse the kernel of one row, issued once."""
    segment = IssueSegment(np.array([0]), np.array([1.0]), 1)
    kernels = build_kernels(
        (rows.ops[i],), (rows.conditions[i],), gpu, bundle.reference, (segment,)
    )
    return analyse_kernels(kernels, gpu, bundle)


INTERVAL_LEVEL = 0.9


def conformal_ends(ratio: Array, level: float = INTERVAL_LEVEL) -> tuple[float, float]:
    """Return ends between which a new ratio falls with ``level``, a tail of (1 - level)/2 at each
    side.
    """
    if ratio.size == 0:
        return (0.5, 2.0)
    ordered = np.sort(ratio)
    tail = (1.0 - level) / 2.0
    low = int(np.clip(np.floor(tail * (ratio.size + 1)) - 1, 0, ratio.size - 1))
    high = int(np.clip(np.ceil((1.0 - tail) * (ratio.size + 1)) - 1, 0, ratio.size - 1))
    return float(ordered[low]), float(ordered[high])


def uses_tensor_cores(kernels: Kernels) -> Mask:
    """Return the mask of kernels that issue tensor instructions."""
    return np.array([event.startswith("tensor") for event in kernels.pipe_event])


def loaded_clock_hz(
    law: ClockLaw, kernels: Kernels, latency_s: Array, set_hz: float, sm_count: float
) -> Array:
    """Compute the effective clock of kernels whose latency is known, at one set clock."""
    busy_s = (kernels.flop + kernels.work.padded_flop) / (
        np.asarray(kernels.pipe_per_cycle) * sm_count
    )
    # activity in cycles of the effective clock; one step from the ratio without load: further ones
    # run away from what spin kernels see under the densest products
    activity = np.clip(busy_s / (latency_s * set_hz * law.ratio[0]), 0.0, 1.0)
    loaded = np.interp(activity * law.load(np.asarray(set_hz)), law.activity, law.ratio)
    return np.asarray(set_hz * np.where(uses_tensor_cores(kernels), loaded, law.without))


def find_ends(values: Array, step: float) -> tuple[float, float] | None:
    """Return the lowest and the highest value, rounded outwards to ``step``; None where none is
    known.
    """
    known = values[np.isfinite(values)] / step
    return (
        (float(np.floor(known.min()) * step), float(np.ceil(known.max()) * step))
        if known.size
        else None
    )


def measured_ranges(rows: KernelRows, kernels: Kernels) -> dict[str, MeasuredRange]:
    """Collect formats, kinds of kernels, sizes and forms that were measured, by family."""
    found = {}
    learners = np.array(kernels.work.root_family)
    clock_hz = np.where(rows.is_kind("burst", "sustained"), settled_figures(rows)[1], np.nan)
    for family in dict.fromkeys(kernels.work.root_family):
        at = np.flatnonzero(learners == family)
        own = {
            name: values[at] for name, values in kernels.work.features.items() if values[at].any()
        }
        sizes = {name: values for name, values in own.items() if name.startswith("log_")}
        forms: dict[str, set[str]] = {}
        for i in at:
            forms.setdefault(kernels.work.kernel_family[i], set()).add(rows.ops[i].form)
        found[family] = MeasuredRange(
            dtypes=tuple(sorted({str(rows.ops[i].dtype) for i in at})),
            groups=tuple(
                sorted(name.removeprefix("is ") for name in own if name.startswith("is "))
            ),
            sizes={
                n: (round(float(v.min()), 4), round(float(v.max()), 4)) for n, v in sizes.items()
            },
            forms={group: tuple(sorted(names)) for group, names in sorted(forms.items())},
            clock_hz=find_ends(clock_hz[at], 1e7),
        )
    return found
