"""Whole models against prediction: a test set that nothing was fitted on.

GPU-bound rows are those captured in CUDA graphs; rows the host launched are apart. Power has two
baselines besides: "the cap" for every row, and min(P, cap) with P our own power at the top clock, which
is what a model without a governor would say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.fit import models_data
from wattcast.fit.host import calibrate
from wattcast.fit.models_data import Case
from wattcast.fitted import Bundle, bundle_for
from wattcast.flow import analyse, at_clock, in_detail
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.uncertainty import interval
from wattcast.validate.floors import five_numbers
from wattcast.validate.rows import Mask, Row, absent, percent, row


@dataclass(frozen=True)
class Compared:
    """Measured beside predicted, one entry a case."""

    cases: tuple[Case, ...]
    latency_s: Array
    power_w: Array
    clock_hz: Array
    predicted_s: Array
    predicted_w: Array
    predicted_hz: Array
    top_w: Array  # our own power at the top clock, uncapped
    low_s: Array
    high_s: Array
    low_w: Array
    high_w: Array
    graph: Mask
    capped: Mask

    @property
    def energy_j(self) -> Array:
        """Joules of one iteration, measured."""
        return self.power_w * self.latency_s


def compare(cases: list[Case], gpu: Gpu, bundle: Bundle) -> Compared:
    """Predict every case as it was run: captured ones without a host."""
    top_hz = float(np.mean(gpu.clocks.max_hz))
    found = [_predicted(case, gpu, bundle, top_hz) for case in cases]
    seconds, watts, hertz, top_w, low_s, high_s, low_w, high_w = (np.array(c) for c in zip(*found, strict=True))
    return Compared(
        tuple(cases),
        models_data.number(cases, lambda r: r.latency_s),
        models_data.number(cases, lambda r: r.power_w),
        models_data.number(cases, lambda r: r.sm_clock_hz),
        seconds,
        watts,
        hertz,
        top_w,
        low_s,
        high_s,
        low_w,
        high_w,
        np.array([case.row.graph for case in cases]),
        np.array([models_data.capped(case.row, top_hz) for case in cases]),
    )


def _predicted(case: Case, gpu: Gpu, bundle: Bundle, top_hz: float) -> tuple[float, ...]:
    if case.row.graph:
        bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    timeline = analyse(case.graph, gpu, bundle)
    totals, clock_hz = models_data.governed(timeline, gpu, bundle)
    at = OperatingPoint(clock_hz=clock_hz)
    ends = interval(timeline, totals, in_detail(timeline, at, bundle), bundle)
    top_w = float(at_clock(timeline, OperatingPoint(clock_hz=top_hz), bundle).power_w)
    latency, power = ends.latency_s.reshape(-1), ends.power_w.reshape(-1)
    return (float(totals.latency_s), float(totals.power_w), clock_hz, top_w, *map(float, (*latency, *power)))


def model_rows(gpu: str, database: str | Path | None = None, bundle: Bundle | None = None) -> list[Row]:
    """Ledger rows of the whole models of a GPU's database, or one that says what is missing."""
    where = f"{gpu} whole models"
    reason = models_data.missing(database or gpu)
    if reason:
        return [
            absent(f"{where}, GPU-bound", "latency", reason, must=11.0, aim=7.0),
            absent(f"{where}, GPU-bound", "power", reason, must=4.5, aim=3.0),
        ]
    chip = hardware.load(gpu)
    bundle = bundle or bundle_for(chip)
    found = compare(models_data.load(database or gpu), chip, bundle)
    limit_w = float(np.mean(chip.power.limit_w))
    rows = _bound_rows(found, f"{where}, GPU-bound", chip, limit_w)
    return rows + _launched_rows(found, f"{where}, launched by the host", chip, bundle)


def _bound_rows(found: Compared, where: str, gpu: Gpu, limit_w: float) -> list[Row]:
    at = found.graph & np.isfinite(found.power_w)
    floor_s, floor_w = five_numbers([found.cases[i] for i in np.flatnonzero(at)], gpu)
    whole = np.full((2, len(at)), np.nan)
    whole[:, at] = floor_s, floor_w
    floor_s, floor_w = whole
    capped, free = at & found.capped, at & ~found.capped
    rows = [_row(where, "latency", found, at, floor_s, must=11.0, aim=7.0)]
    rows += [_row(where, f"latency, {name}", found, at & mask, floor_s) for name, mask in _kinds(found).items()]
    rows += [_row(where, f"latency, {n}", found, m, floor_s) for n, m in (("not capped", free), ("capped", capped))]
    for name, mask in (("power", at), ("power, not capped", free), ("power, capped", capped)):
        goals = {"must": 4.5, "aim": 3.0} if mask is at else {}
        rows.append(
            _power(where, name, found, mask, floor_w)
            | goals
            | {
                "min_of_P_and_cap": _rounded(percent(np.minimum(found.top_w, limit_w)[mask], found.power_w[mask])),
                "the_cap": _rounded(percent(np.full(int(mask.sum()), limit_w), found.power_w[mask])),
            }
        )
    rows.append(_energy(where, found, at, floor_s * floor_w))
    clock = at & np.isfinite(found.clock_hz)
    top = np.full(len(at), float(np.mean(gpu.clocks.max_hz)))
    off = percent(found.predicted_hz[clock], found.clock_hz[clock])
    rows.append(row(where, "clock", int(clock.sum()), off, percent(top[clock], found.clock_hz[clock])))
    return [*rows, *_coverage(where, found, at)]


def _kinds(found: Compared) -> dict[str, Mask]:
    """Phases, attention and models, each a mask."""
    rows = [case.row for case in found.cases]
    phases = {name: np.array([r.phase == name for r in rows]) for name in dict.fromkeys(r.phase for r in rows)}
    kinds = {f"{name} attention": np.array([r.attention == name for r in rows]) for name in ("eager", "flash")}
    models = {name: np.array([r.model == name for r in rows]) for name in dict.fromkeys(r.model for r in rows)}
    return {name: mask for name, mask in {**phases, **kinds, **models}.items() if mask.any()}


def _row(
    where: str,
    name: str,
    found: Compared,
    at: Mask,
    floor_s: Array,
    must: float | None = None,
    aim: float | None = None,
) -> Row:
    error, floor = percent(found.predicted_s[at], found.latency_s[at]), percent(floor_s[at], found.latency_s[at])
    ratio = found.predicted_s[at] / found.latency_s[at]
    more = {"median_ratio": round(float(np.median(ratio)), 3)} if at.any() else {}
    return row(where, name, int(at.sum()), error, floor, None, must, aim, **more)


def _power(where: str, name: str, found: Compared, at: Mask, floor_w: Array) -> Row:
    error, floor = percent(found.predicted_w[at], found.power_w[at]), percent(floor_w[at], found.power_w[at])
    return row(where, name, int(at.sum()), error, floor)


def _energy(where: str, found: Compared, at: Mask, floor_j: Array) -> Row:
    predicted = (found.predicted_s * found.predicted_w)[at]
    measured = found.energy_j[at]
    return row(where, "energy", int(at.sum()), percent(predicted, measured), percent(floor_j[at], measured))


def _coverage(where: str, found: Compared, at: Mask) -> list[Row]:
    rows = []
    for name, value, low, high, middle in (
        ("latency", found.latency_s, found.low_s, found.high_s, found.predicted_s),
        ("power", found.power_w, found.low_w, found.high_w, found.predicted_w),
    ):
        inside = float(np.mean((value >= low)[at] & (value <= high)[at])) if at.any() else float("nan")
        width = float(np.mean((high - low)[at] / middle[at])) if at.any() else float("nan")
        more: dict[str, Any] = {
            "coverage": round(100 * inside, 1),
            "width": round(100 * width, 1),
            "wanted": [85.0, 95.0],
        }
        rows.append(row(where, f"{name}, interval of 90%", int(at.sum()), None, **more))
    return rows


def _launched_rows(found: Compared, where: str, gpu: Gpu, bundle: Bundle) -> list[Row]:
    """Rows the host launched: with the default launch cost, and with one fitted on the other models' rows."""
    at = ~found.graph
    cases = [found.cases[i] for i in np.flatnonzero(at)]
    if not cases:
        return [absent(where, "latency", "no row was launched by the host")]
    host = calibrate(cases, gpu, bundle)
    measured = np.array([r.latency_s for r in host.rows])
    left_out, default = (np.array([getattr(r, name) for r in host.rows]) for name in ("left_out_s", "default_s"))
    asked = [f"{r.host_s * 1e6:.1f}" for r in host.rows if r.host_s is not None]
    more: dict[str, Any] = {"host_us_per_operator": round(host.host_s * 1e6, 2), "rows_ask_for": " ".join(asked)}
    name = "latency, launch cost from the other models"
    return [
        row(where, name, len(cases), percent(left_out, measured), percent(default, measured), **more),
        row(where, "latency, default launch cost", len(cases), percent(default, measured)),
        row(where, "power, default launch cost", len(cases), percent(found.predicted_w[at], found.power_w[at])),
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
