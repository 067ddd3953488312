"""Predicted against measured, on rows the fit never saw: what ``validate --plot`` draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wattcast.errors import BadInput, unknown_name
from wattcast.fit.kernels_run import held_out_of
from wattcast.report.predicted import against_measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES = {"latency": ("µs", 1e6), "power": ("W", 1.0), "clock": ("MHz", 1e-6)}


def held_out(quantity: str = "latency", gpu: str = "h200") -> Figure:
    """Held-out kernels on random data: latency of bursts, power and clock of sustained runs."""
    if quantity not in QUANTITIES:
        raise unknown_name("quantity", quantity, QUANTITIES, f"Known: {', '.join(QUANTITIES)}.")
    held = held_out_of(gpu)
    if held is None:
        raise BadInput(f"no held-out results ship for {gpu}. Run `wattcast validate --refit`.")
    burst = np.array([kind == "burst" for kind in held.kind])
    at = (np.array(held.data) == "random") & (burst if quantity == "latency" else ~burst)
    unit, scale = QUANTITIES[quantity]
    column = {"latency": "latency_s", "power": "power_w", "clock": "clock_hz"}[quantity]
    measured, predicted = getattr(held, column)[at] * scale, getattr(held, f"predicted_{column}")[at] * scale
    kinds = [kind for kind, kept in zip(held.family, at, strict=True) if kept]
    title = f"{quantity} of {gpu} kernels on shapes held out of the fit"
    return against_measured(measured, predicted, kinds, unit, title, "out of fold, five folds by shape")
