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
from wattcast.fit.scoring import LedgerRow, make_absent_row, make_ledger_row, mean_percent_error
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
    rows = [_latency_row(where, "latency", found, at, floor_s, must=11.0, aim=7.0)]
    rows += [
        _latency_row(where, f"latency, {name}", found, at & mask, floor_s) for name, mask in _kinds(found).items()
    ]
    rows += [
        _latency_row(where, f"latency, {n}", found, m, floor_s) for n, m in (("not capped", free), ("capped", capped))
    ]
    for name, mask in (("power", at), ("power, not capped", free), ("power, capped", capped)):
        goals = {"must": 4.5, "aim": 3.0} if mask is at else {}
        rows.append(
            _power_row(where, name, found, mask, floor_w)
            | goals
            | {
                "min_of_P_and_cap": _rounded(
                    mean_percent_error(np.minimum(found.top_w, limit_w)[mask], found.power_w[mask])
                ),
                "the_cap": _rounded(mean_percent_error(np.full(int(mask.sum()), limit_w), found.power_w[mask])),
            }
        )
    rows.append(_energy_row(where, found, at, floor_s * floor_w))
    clock = at & np.isfinite(found.clock_hz)
    top = np.full(len(at), float(np.mean(gpu.clocks.max_hz)))
    off = mean_percent_error(found.predicted_hz[clock], found.clock_hz[clock])
    rows.append(
        make_ledger_row(where, "clock", int(clock.sum()), off, mean_percent_error(top[clock], found.clock_hz[clock]))
    )
    return rows


def _kinds(found: ComparedModels) -> dict[str, Mask]:
    """Return a mask for each phase, kind of attention and model."""
    rows = [case.row for case in found.cases]
    phases = {name: np.array([r.phase == name for r in rows]) for name in dict.fromkeys(r.phase for r in rows)}
    kinds = {f"{name} attention": np.array([r.attention == name for r in rows]) for name in ("eager", "flash")}
    models = {name: np.array([r.model == name for r in rows]) for name in dict.fromkeys(r.model for r in rows)}
    return {name: mask for name, mask in {**phases, **kinds, **models}.items() if mask.any()}


def _latency_row(
    where: str,
    name: str,
    found: ComparedModels,
    at: Mask,
    floor_s: Array,
    must: float | None = None,
    aim: float | None = None,
) -> LedgerRow:
    error, floor = (
        mean_percent_error(found.predicted_s[at], found.latency_s[at]),
        mean_percent_error(floor_s[at], found.latency_s[at]),
    )
    ratio = found.predicted_s[at] / found.latency_s[at]
    more = {"median_ratio": round(float(np.median(ratio)), 3)} if at.any() else {}
    return make_ledger_row(where, name, int(at.sum()), error, floor, None, must, aim, **more)


def _power_row(where: str, name: str, found: ComparedModels, at: Mask, floor_w: Array) -> LedgerRow:
    error, floor = (
        mean_percent_error(found.predicted_w[at], found.power_w[at]),
        mean_percent_error(floor_w[at], found.power_w[at]),
    )
    return make_ledger_row(where, name, int(at.sum()), error, floor)


def _energy_row(where: str, found: ComparedModels, at: Mask, floor_j: Array) -> LedgerRow:
    predicted = (found.predicted_s * found.predicted_w)[at]
    measured = found.energy_j[at]
    return make_ledger_row(
        where,
        "energy",
        int(at.sum()),
        mean_percent_error(predicted, measured),
        mean_percent_error(floor_j[at], measured),
    )


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
    name = "latency, launch cost from the other models"
    return [
        make_ledger_row(
            where,
            name,
            len(cases),
            mean_percent_error(left_out, measured),
            mean_percent_error(default, measured),
            **more,
        ),
        make_ledger_row(where, "latency, default launch cost", len(cases), mean_percent_error(default, measured)),
        make_ledger_row(
            where,
            "power, default launch cost",
            len(cases),
            mean_percent_error(found.predicted_w[at], found.power_w[at]),
        ),
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
