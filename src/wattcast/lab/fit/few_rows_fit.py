"""Fit a bundle to few rows by moving the card's forecast as far as the rows support.

With 50 rows there are six per family: too few to fit corrections and energies from nothing. So the
card's forecast (carried over from a card that was measured well) is the prior mean, and its rows
move it at three levels, each drawn to the one above: the card, a family, a group of kernels. Near
the forecast, y = log(measured / forecast) is linear,

    y = J·θ + ε,   θ_j ~ N(0, τ_level(j)²),   ε_i ~ N(0, (σ·s_family(i))²)

with J the slopes of log time by the corrections of cycles, device memory and fixed time (of log
power by the energies of modules). The spreads τ and σ are those that make the rows likeliest, with
weak priors [Rasmussen2006, 5.4.1], so that rows without information leave the forecast as it is.

A fit from nothing is tried as well where rows suffice. Both are judged on rows held out in folds by
shape; the fit from nothing is taken where its latency and its power both come closer. Intervals
start from the forecast's and follow held-out rows as these grow in number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from wattcast.calibrate.calibration import describe_moved
from wattcast.calibrate.forecast_shift import (
    IdleRows,
    InheritedFit,
    move_forecast,
    scale_idle,
    shift_latency,
    shift_power,
    take_bursts,
    take_sustained,
)
from wattcast.calibrate.kernel_rows import (
    FOLDS,
    KernelRows,
    assign_folds,
)
from wattcast.calibrate.row_prediction import predict_with_bundle, row_nearness
from wattcast.core.strict_files import Provenance
from wattcast.hardware import Gpu
from wattcast.lab.fit import held_out
from wattcast.lab.fit.held_out import HeldOutRows
from wattcast.lab.fit.kernel_fit import (
    build_bundle,
    fit_idle_curve,
    fit_kernel_rows,
)
from wattcast.predictor.bundle.bundle_file import FAMILIES, Bundle
from wattcast.predictor.bundle.support_widening import default_widening

FEW_BURSTS = (
    1000  # bursts; below, what the forecast knows is worth more than what they say by themselves
)
LEAST_ALONE = 100  # bursts, to try a fit that inherits nothing
Tell = Callable[[str], None]


def fit_few_rows(
    rows: KernelRows,
    gpu: Gpu,
    forecast: Bundle,
    idle: IdleRows,
    tell: Tell,
) -> tuple[Bundle, HeldOutRows]:
    """Fit a bundle to few rows of a card; return it with its held-out predictions."""
    inherited = move_forecast(rows, gpu, forecast, idle)
    held_rows = hold_out_inherited(
        rows,
        gpu,
        forecast,
        idle,
        inherited,
    )
    bundle = _build_moved_bundle(inherited, held_rows, rows, forecast)
    errors = _tell_errors(held_rows, "from the forecast", tell)
    if rows.is_kind("burst").sum() < LEAST_ALONE or not rows.is_kind("sustained").any() or not idle:
        return bundle, held_rows
    alone = held_out.predict_held_out(rows, gpu, fit_idle_curve(idle, gpu))
    alone_errors = _tell_errors(alone, "nothing", tell)
    if not all(
        one < forecast_error for one, forecast_error in zip(alone_errors, errors, strict=True)
    ):
        return bundle, held_rows
    note = (
        f"{len(rows)} rows, nothing inherited: held out, that came closer than the "
        "forecast moved by them"
    )
    near = held_out.fit_nearness(alone)
    fitted = fit_kernel_rows(rows, gpu, fit_idle_curve(idle, gpu))
    found_alone = build_bundle(
        fitted,
        rows,
        gpu,
        held_out.fit_interval_ends(alone, near=near),
        note,
    )
    return replace(found_alone, widening=default_widening().with_nearness(near)), alone


def hold_out_inherited(
    rows: KernelRows,
    gpu: Gpu,
    forecast: Bundle,
    idle: IdleRows,
    inherited: InheritedFit,
) -> HeldOutRows:
    """Predict burst and sustained rows from a forecast that the other folds moved at the levels
    found.
    """
    fold = assign_folds(rows, FOLDS)
    judged = rows.to_judge()
    judged &= np.array([data in forecast.toggling for data in rows.data])
    figures = np.full((len(rows), 7), np.nan)
    unchosen = np.full(len(rows), "", dtype=object)
    for k in np.unique(fold[judged]):
        test = judged & (fold == k)
        training = rows.select_rows(fold != k)
        moved = shift_latency(
            take_bursts(training), gpu, scale_idle(forecast, idle), inherited.latency.levels
        )
        moved = shift_power(take_sustained(training), gpu, moved, inherited.power.levels)
        figures[test, :4] = predict_with_bundle(moved, rows.select_rows(test), gpu)
        figures[test, 4:6] = row_nearness(moved, rows.select_rows(test), gpu).T
    return held_out.collect_held_out(
        rows,
        judged,
        fold,
        figures,
        unchosen,
        gpu,
    )


def _tell_errors(
    held_rows: HeldOutRows,
    what: str,
    tell: Tell,
) -> list[float]:
    """Tell and return the mean absolute errors in percent: latency of bursts, power of sustained
    rows.
    """
    errors = []
    for quantity in ("latency", "power"):
        ratio, usable = held_rows.ratio(quantity)
        error = (
            float(100.0 * np.mean(np.abs(1.0 / ratio[usable] - 1.0)))
            if usable.any()
            else float("inf")
        )
        outcome = f"{error:.1f} % over {int(usable.sum())} rows" if usable.any() else "no rows"
        tell(f"inheriting {what}, held out: {quantity}: {outcome}")
        errors.append(error)
    return errors


def _build_moved_bundle(
    inherited: InheritedFit,
    held_rows: HeldOutRows,
    rows: KernelRows,
    forecast: Bundle,
) -> Bundle:
    by_time, by_energy = (
        " and ".join(what.levels) or "nothing" for what in (inherited.latency, inherited.power)
    )
    note = (
        f"{len(rows)} rows moved the forecast: time by {by_time}, energy by {by_energy}; "
        f"intervals from {len(held_rows.kind)} rows held out in {FOLDS} folds and the "
        "forecast's own"
    )
    # logs of ratios as of rows at a typical distance from the parent's, and the rows that tell them
    typical = []
    for quantity, line in (
        ("latency", forecast.widening.near),
        ("power", forecast.widening.near_power),
    ):
        ratio, usable = held_rows.ratio(quantity)
        near = held_rows.near if quantity == "latency" else held_rows.near_power
        typical.append((np.log(held_out.scale_ratios(ratio, near, line)), usable))
    rows_of_family = {
        family: np.array([name == family for name in held_rows.family], dtype=bool)
        for family in FAMILIES
    }
    (time, timed), (power, powered) = typical
    left_out = {
        family: (time[timed & at], power[powered & at]) for family, at in rows_of_family.items()
    }
    origin = Provenance(f"wattcast lab fit kernels {rows.source}", device=rows.card, note=note)
    return describe_moved(inherited.bundle, forecast, origin, left_out)
