"""``wattcast fit kernels`` when rows are few: inherit from the card's forecast, or stand alone where that is better.

Both are judged on rows held out in folds by shape; the fit that stands alone is taken where its latency and its power
both come closer. Intervals start from the forecast's and follow held-out rows as these grow in number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.calibrate import shrunk_ends
from wattcast.fit.inherit_kernels import Idle, Inherited, inherit, moved_by
from wattcast.fit.kernels import bundle_of, fit_rows, idle_curve
from wattcast.fit.kernels_data import Rows
from wattcast.fit.kernels_interval import quantiles, scaled
from wattcast.fit.kernels_split import FOLDS, HeldOut, _held_out, folds_of, hold_out, near_rows, predict_with
from wattcast.fit.nearness import near_of
from wattcast.fitted.bundle import FAMILIES, Bundle, Residual
from wattcast.fitted.widening import usual
from wattcast.hardware import Gpu
from wattcast.provenance import Provenance, Status

FEW = 1000  # bursts; below, what the forecast knows is worth more than what they say by themselves
LEAST_ALONE = 100  # bursts, to try a fit that inherits nothing
Tell = Callable[[str], None]


def fit_few(rows: Rows, gpu: Gpu, forecast: Bundle, idle: Idle, tell: Tell) -> tuple[Bundle, HeldOut]:
    """A bundle from few rows of a card, and its held-out predictions."""
    found = inherit(rows, gpu, forecast, idle)
    held = hold_out_inherited(rows, gpu, forecast, idle, found)
    bundle = _bundle(found, held, rows, forecast)
    for said in (f"latency: {_said(held, 'latency')}", f"power: {_said(held, 'power')}"):
        tell(f"inheriting from the forecast, held out: {said}")
    if rows.is_kind("burst").sum() < LEAST_ALONE or not rows.is_kind("sustained").any() or not idle:
        return bundle, held
    alone = hold_out(rows, gpu, idle_curve(idle, gpu))
    for said in (f"latency: {_said(alone, 'latency')}", f"power: {_said(alone, 'power')}"):
        tell(f"inheriting nothing, held out: {said}")
    if not all(error(alone, quantity) < error(held, quantity) for quantity in ("latency", "power")):
        return bundle, held
    note = f"{len(rows)} rows, nothing inherited: held out, that came closer than the forecast moved by them"
    near = near_of(alone)
    found_alone = bundle_of(fit_rows(rows, gpu, idle_curve(idle, gpu)), rows, gpu, quantiles(alone, near=near), note)
    return replace(found_alone, widening=replace(usual(), near=near[0], near_power=near[1])), alone


def hold_out_inherited(rows: Rows, gpu: Gpu, forecast: Bundle, idle: Idle, found: Inherited) -> HeldOut:
    """Predictions of burst and sustained rows from a forecast moved, at the levels found, by the other folds."""
    fold = folds_of(rows, FOLDS)
    wanted = rows.is_kind("burst", "sustained") & rows.fit & (rows.repeat == 0)
    wanted &= np.array([data in forecast.toggling for data in rows.data])
    predicted, near = np.full((len(rows), 3), np.nan), np.full((2, len(rows)), np.nan)
    for k in np.unique(fold[wanted]):
        test = wanted & (fold == k)
        moved = moved_by(rows.where(fold != k), gpu, forecast, idle, found.latency.levels, found.power.levels)
        predicted[test] = predict_with(moved, rows.where(test), gpu)
        near[:, test] = near_rows(moved, rows.where(test), gpu)
    return _held_out(rows, wanted, fold, predicted, np.full(len(rows), np.nan), [""] * len(rows), near, gpu)


def error(held: HeldOut, quantity: str) -> float:
    """Mean absolute error in percent on random data: latency of bursts, power of sustained rows; infinite of none."""
    ratio = _ratio(held, quantity)
    return float(100.0 * np.mean(np.abs(1.0 / ratio - 1.0))) if ratio.size else float("inf")


def _said(held: HeldOut, quantity: str) -> str:
    count = _ratio(held, quantity).size
    return f"{error(held, quantity):.1f} % over {count} rows" if count else "no rows"


def _ratio(held: HeldOut, quantity: str, family: str = "") -> Array:
    """Measured over predicted."""
    burst = np.array([kind == "burst" for kind in held.kind], dtype=bool)
    time = quantity == "latency"
    ratio = held.latency_s / held.predicted_latency_s if time else held.power_w / held.predicted_power_w
    at = (burst if time else ~burst) & (np.array(held.data) == "random") & np.isfinite(ratio)
    at &= np.array([family in ("", own) for own in held.family], dtype=bool)
    return np.asarray(ratio[at])


def _typical(held: HeldOut, forecast: Bundle) -> HeldOut:
    """Held-out figures as of rows at a typical distance from what the forecast's parent measured."""
    time = scaled(held.latency_s / held.predicted_latency_s, held.near, forecast.widening.near)
    power = scaled(held.power_w / held.predicted_power_w, held.near_power, forecast.widening.near_power)
    return replace(held, latency_s=held.predicted_latency_s * time, power_w=held.predicted_power_w * power)


def _bundle(found: Inherited, held: HeldOut, rows: Rows, forecast: Bundle) -> Bundle:
    moved = {
        quantity: " and ".join(what.levels) or "nothing"
        for quantity, what in (("time", found.latency), ("energy", found.power))
    }
    note = (
        f"{len(rows)} rows moved the forecast: time by {moved['time']}, energy by {moved['energy']}; "
        f"intervals from {len(held.kind)} rows held out in {FOLDS} folds and the forecast's own"
    )
    typical = _typical(held, forecast)
    residuals = {
        family: Residual(
            shrunk_ends(forecast.residuals[family].latency, np.log(_ratio(typical, "latency", family))),
            shrunk_ends(forecast.residuals[family].power, np.log(_ratio(typical, "power", family))),
            forecast.residuals[family].rows,
        )
        for family in FAMILIES
    }
    return replace(
        found.bundle,
        status=Status.INHERITED,
        provenance=Provenance(f"wattcast fit kernels {rows.source}", device=rows.card, note=note),
        residuals=residuals,
        assumptions=(*(a for a in forecast.assumptions if not a.startswith("forecast:")), note),
    )
