"""Predict measured rows with a bundle, and describe what rows cover and how far off they are.

Both the calibration of a card and the fits of the lab judge bundles by these functions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wattcast.calibrate.burst_limiter import time_burst_s
from wattcast.calibrate.kernel_rows import KernelRows, settled_figures
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import IssueSegment
from wattcast.predictor.bundle.bundle_file import Bundle, MeasuredRange
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_kernels, kernel_activity
from wattcast.predictor.timeline import (
    ClockLaw,
    Timeline,
    compute_effective_hz,
)


def predict_with_bundle(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
    run_s: float | None = None,
) -> Array:
    """Predict latency, power, clock and power at the top clock of each row; of bursts latency at
    the top clock.

    ``run_s`` is how long the other rows ran after a pause; None: until the governor had settled.
    """
    bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    result = np.full((len(rows), len(_RESULTS)), np.nan)
    burst = rows.is_kind("burst")
    data = np.array(rows.data)
    for name in dict.fromkeys(data[burst].tolist()):
        of_data = burst & (data == name)
        bursts = rows.select_rows(of_data)
        kernels = build_kernels(
            bursts.ops,
            bursts.conditions,
            gpu,
            bundle.reference,
            (),
        )
        result[of_data, 0] = predict_bursts_s(kernels, gpu, bundle.for_data(name))
        result[of_data, 2] = float(np.mean(gpu.clocks.max_hz))
    at = OperatingPoint(duration_s=run_s)
    for row in np.flatnonzero(~burst).tolist():
        row_bundle = bundle.for_data(rows.data[row])
        timeline = analyse_row(rows, row, gpu, row_bundle)
        governed, totals, _ = run_governed(timeline, gpu, at, row_bundle)
        clock_hz = governed.clock_hz[..., 0]
        result[row] = totals.latency_s, totals.power_w, clock_hz, governed.asked_w
    return result


def row_nearness(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
) -> Array:
    """Return the nearness of each row to those that time and energy were learned from, ``(2,
    row)``; NaN: none.
    """
    near = analyse_rows(bundle, rows, gpu).near
    if near is None:
        return np.full((2, len(rows)), np.nan)
    return near


def analyse_rows(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
) -> Timeline:
    """Analyse the kernels of rows, one each, without any issue order."""
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        bundle.reference,
        (),
    )
    return analyse_kernels(kernels, gpu, bundle)


def predict_bursts_s(
    kernels: Kernels,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    """Predict the seconds of kernels that run for some milliseconds at the top clock,
    ``(kernel,)``.
    """
    timeline = analyse_kernels(kernels, gpu, bundle)
    return time_burst_s(timeline, float(np.mean(gpu.clocks.max_hz)), bundle)


def analyse_row(
    rows: KernelRows,
    i: int,
    gpu: Gpu,
    bundle: Bundle,
) -> Timeline:
    """Analyse the kernel of one row, issued once."""
    segment = IssueSegment(np.array([0]), np.array([1.0]), 1)
    kernels = build_kernels(
        (rows.ops[i],),
        (rows.conditions[i],),
        gpu,
        bundle.reference,
        (segment,),
    )
    return analyse_kernels(kernels, gpu, bundle)


INTERVAL_LEVEL = 0.9
_RESULTS = ("latency_s", "power_w", "clock_hz", "asked_w")  # of a row
_NOTHING_MEASURED = (0.5, 2.0)  # a factor of two either way where no ratio is known
_SAME_CLOCK_HZ = 1e7  # up to which two clocks are rounded to one


def conformal_ends(ratio: Array, level: float = INTERVAL_LEVEL) -> tuple[float, float]:
    """Return ends between which a new ratio falls with ``level``, a tail of (1 - level)/2 at each
    side.
    """
    if ratio.size == 0:
        return _NOTHING_MEASURED
    ordered = np.sort(ratio)
    tail = (1.0 - level) / 2.0
    low_rank = np.floor(tail * (ratio.size + 1)) - 1
    high_rank = np.ceil((1.0 - tail) * (ratio.size + 1)) - 1
    low, high = np.clip([low_rank, high_rank], 0, ratio.size - 1).astype(int)
    return float(ordered[low]), float(ordered[high])


def uses_tensor_cores(kernels: Kernels) -> Mask:
    """Return the mask of kernels that issue tensor instructions."""
    return np.array([event.startswith("tensor") for event in kernels.pipe_event])


def loaded_clock_hz(
    law: ClockLaw,
    kernels: Kernels,
    latency_s: Array,
    set_hz: float,
    sm_count: float,
) -> Array:
    """Compute the effective clock of kernels whose latency is known, at one set clock."""
    flop = kernels.flop + kernels.work.padded_flop
    busy_cycles = flop / (np.asarray(kernels.pipe_per_cycle) * sm_count)
    # activity in cycles of the effective clock; one step from the ratio without load: further ones
    # run away from what spin kernels see under the densest products
    activity = np.clip(busy_cycles / (latency_s * set_hz * law.ratio[0]), 0.0, 1.0)
    loaded = np.interp(activity * law.load(np.asarray(set_hz)), law.activity, law.ratio)
    return np.asarray(set_hz * np.where(uses_tensor_cores(kernels), loaded, law.without))


def find_ends(values: Array, step: float) -> tuple[float, float] | None:
    """Return the lowest and the highest value, rounded outwards to ``step``; None where none is
    known.
    """
    steps = values[np.isfinite(values)] / step
    if not steps.size:
        return None
    return float(np.floor(steps.min()) * step), float(np.ceil(steps.max()) * step)


def measured_ranges(rows: KernelRows, kernels: Kernels) -> dict[str, MeasuredRange]:
    """Collect formats, kinds of kernels, sizes and forms that were measured, by family."""
    ranges = {}
    learners = np.array(kernels.work.root_family)
    clock_hz = np.where(rows.is_kind("burst", "sustained"), settled_figures(rows)[1], np.nan)
    for family in dict.fromkeys(kernels.work.root_family):
        members = np.flatnonzero(learners == family)
        groups = []
        sizes = {}
        for name, column in kernels.work.features.items():
            values = column[members]
            if not values.any():
                continue
            if name.startswith("log_"):
                sizes[name] = (round(float(values.min()), 4), round(float(values.max()), 4))
            elif name.startswith("is "):
                groups.append(name.removeprefix("is "))
        forms: dict[str, set[str]] = {}
        for row in members:
            forms.setdefault(kernels.work.kernel_family[row], set()).add(rows.ops[row].form)
        ranges[family] = MeasuredRange(
            dtypes=tuple(sorted({str(rows.ops[row].dtype) for row in members})),
            groups=tuple(sorted(groups)),
            sizes=sizes,
            forms={group: tuple(sorted(names)) for group, names in sorted(forms.items())},
            clock_hz=find_ends(clock_hz[members], _SAME_CLOCK_HZ),
        )
    return ranges


def measure_parts(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    """Return the watts of each row and part at its measured clock and latency, so that errors of
    time stay out, ``(row, part)``.
    """
    _, clock_hz, latency_s = settled_figures(rows)
    part_w = []
    for row in range(len(rows)):
        timeline = analyse_row(rows, row, gpu, bundle)
        kernel_s = latency_s[row : row + 1]
        set_hz = clock_hz[row : row + 1]
        running_hz = compute_effective_hz(timeline, set_hz, bundle.clock_law)
        at = OperatingPoint(clock_hz=set_hz)
        activity = kernel_activity(
            timeline,
            kernel_s,
            running_hz,
            np.zeros(()),
            at,
            priced=True,
        )
        part_w.append(bundle.power.power(activity).part_w[0])
    return np.array(part_w)
