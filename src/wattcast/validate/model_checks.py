"""Ledger rows of whole models, a test set that nothing was fitted on.

GPU-bound rows were captured in CUDA graphs; rows launched by the host are counted apart. Power has two further
baselines: the cap for every row, and min(P, cap) with P our own power at the top clock, which is what a model without
a governor would say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.core.arrays import Array, Mask
from wattcast.fit import whole_models
from wattcast.fit.scoring import LedgerRow, make_absent_row, mean_percent_error, score_row
from wattcast.fit.whole_models import ModelCase, fit_host_cost
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.pipeline import total_at_clock
from wattcast.predictor.prediction import predict_graph
from wattcast.validate.kernel_checks import five_number_floor


@dataclass(frozen=True)
class ComparedModels:
    """Measured and predicted values, one entry per case."""

    cases: tuple[ModelCase, ...]
    latency_s: Array
    power_w: Array
    clock_hz: Array
    predicted_s: Array
    predicted_w: Array
    predicted_hz: Array
    top_w: Array  # our own power at the top clock, uncapped
    graph: Mask
    capped: Mask

    @property
    def energy_j(self) -> Array:
        """Measured joules of one iteration."""
        return self.power_w * self.latency_s


def compare_models(cases: list[ModelCase], gpu: Gpu, bundle: Bundle) -> ComparedModels:
    """Predict every case as it was run; captured ones without a host."""
    top_hz = float(np.mean(gpu.clocks.max_hz))
    found = [_predicted(case, gpu, bundle, top_hz) for case in cases]
    seconds, watts, hertz, top_w = (np.array(c) for c in zip(*found, strict=True))
    return ComparedModels(
        tuple(cases),
        whole_models.measured_column(cases, lambda r: r.latency_s),
        whole_models.measured_column(cases, lambda r: r.power_w),
        whole_models.measured_column(cases, lambda r: r.sm_clock_hz),
        seconds,
        watts,
        hertz,
        top_w,
        np.array([case.row.graph for case in cases]),
        np.array([whole_models.was_capped(case.row, top_hz) for case in cases]),
    )


def _predicted(case: ModelCase, gpu: Gpu, bundle: Bundle, top_hz: float) -> tuple[float, ...]:
    if case.row.graph:
        bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    p = predict_graph(case.graph, gpu, OperatingPoint(), bundle)
    top_w = float(total_at_clock(p.basis.timeline, OperatingPoint(clock_hz=top_hz), bundle).power_w)
    return p.latency_s, p.power_w, p.clock_hz, top_w


def model_rows(gpu: str, database: str | Path | None = None, bundle: Bundle | None = None) -> list[LedgerRow]:
    """Return the rows of a GPU's whole models, or one that says what is missing."""
    where = f"{gpu} whole models"
    reason = whole_models.why_no_models(database or gpu)
    if reason:
        return [
            make_absent_row(f"{where}, GPU-bound", "latency", reason, must=11.0, aim=7.0),
            make_absent_row(f"{where}, GPU-bound", "power", reason, must=4.5, aim=3.0),
        ]
    chip = hardware.load_gpu(gpu)
    bundle = bundle or bundle_for(chip)
    found = compare_models(whole_models.load_models(database or gpu), chip, bundle)
    limit_w = float(np.mean(chip.power.limit_w))
    rows = _bound_rows(found, f"{where}, GPU-bound", chip, limit_w)
    return rows + _launched_rows(found, f"{where}, launched by the host", chip, bundle)


def _bound_rows(found: ComparedModels, where: str, gpu: Gpu, limit_w: float) -> list[LedgerRow]:
    at = found.graph & np.isfinite(found.power_w)
    floor_s, floor_w = five_number_floor([found.cases[i] for i in np.flatnonzero(at)], gpu)
    whole = np.full((2, len(at)), np.nan)
    whole[:, at] = floor_s, floor_w
    floor_s, floor_w = whole
    capped, free = at & found.capped, at & ~found.capped

    def score(found_: Array, true: Array, floor: Array, quantity: str, mask: Mask, **more: Any) -> LedgerRow:
        return score_row(where, quantity, found_[mask], true[mask], floor[mask], **more)

    def latency(quantity: str, mask: Mask, **more: Any) -> LedgerRow:
        if mask.any():
            more["median_ratio"] = round(float(np.median((found.predicted_s / found.latency_s)[mask])), 3)
        return score(found.predicted_s, found.latency_s, floor_s, quantity, mask, **more)

    def power(quantity: str, mask: Mask, **more: Any) -> LedgerRow:
        baselines = {"min_of_P_and_cap": np.minimum(found.top_w, limit_w), "the_cap": np.full(len(at), limit_w)}
        for name, watts in baselines.items():
            error = mean_percent_error(watts[mask], found.power_w[mask])
            more[name] = None if error is None else round(error, 2)
        return score(found.predicted_w, found.power_w, floor_w, quantity, mask, **more)

    energy_j, floor_j = found.predicted_s * found.predicted_w, floor_s * floor_w
    top_hz = np.full(len(at), float(np.mean(gpu.clocks.max_hz)))
    return [
        latency("latency", at, must=11.0, aim=7.0),
        *(latency(f"latency, {name}", at & mask) for name, mask in _kinds(found).items()),
        latency("latency, not capped", free),
        latency("latency, capped", capped),
        power("power", at, must=4.5, aim=3.0),
        power("power, not capped", free),
        power("power, capped", capped),
        score(energy_j, found.energy_j, floor_j, "energy", at),
        score(found.predicted_hz, found.clock_hz, top_hz, "clock", at & np.isfinite(found.clock_hz)),
    ]


def _kinds(found: ComparedModels) -> dict[str, Mask]:
    """Return a mask for each phase, kind of attention and model."""
    rows = [case.row for case in found.cases]
    phases = {name: np.array([r.phase == name for r in rows]) for name in dict.fromkeys(r.phase for r in rows)}
    kinds = {f"{name} attention": np.array([r.attention == name for r in rows]) for name in ("eager", "flash")}
    models = {name: np.array([r.model == name for r in rows]) for name in dict.fromkeys(r.model for r in rows)}
    return {name: mask for name, mask in {**phases, **kinds, **models}.items() if mask.any()}


def _launched_rows(found: ComparedModels, where: str, gpu: Gpu, bundle: Bundle) -> list[LedgerRow]:
    """Return rows of host launches, with the default launch cost and with one fitted on the other models."""
    at = ~found.graph
    cases = [found.cases[i] for i in np.flatnonzero(at)]
    if not cases:
        return [make_absent_row(where, "latency", "no row was launched by the host")]
    host = fit_host_cost(cases, gpu, bundle)
    measured = np.array([r.latency_s for r in host.rows])
    left_out, default = (np.array([getattr(r, name) for r in host.rows]) for name in ("left_out_s", "default_s"))
    asked = [f"{r.host_s * 1e6:.1f}" for r in host.rows if r.host_s is not None]
    more: dict[str, Any] = {"host_us_per_operator": round(host.host_s * 1e6, 2), "rows_ask_for": " ".join(asked)}
    return [
        score_row(where, "latency, launch cost from the other models", left_out, measured, default, **more),
        score_row(where, "latency, default launch cost", default, measured),
        score_row(where, "power, default launch cost", found.predicted_w[at], found.power_w[at]),
    ]
