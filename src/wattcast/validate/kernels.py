"""Kernels of one GPU, held-out shapes: latency, power, clock, and whether intervals cover what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.fit.kernels_interval import LEVEL, conformal, power_ends, scaled
from wattcast.fit.kernels_split import HeldOut
from wattcast.fit.nearness import fit_near
from wattcast.fitted.widening import scale_of
from wattcast.validate.rows import Mask, Row, percent, row


def kernel_rows(held: HeldOut, gpu: str) -> list[Row]:
    """Errors overall, by family, capped and uncapped apart."""
    where = f"{gpu} kernels, held-out shapes"
    family, data = np.array(held.family), np.array(held.data)
    burst = np.array([kind == "burst" for kind in held.kind])
    random = data == "random"
    top_hz = float(np.mean(hardware.load(gpu).clocks.max_hz))
    capped = ~burst & (held.clock_hz < 0.995 * top_hz)
    open_, shut = ~burst & ~capped & random, capped & random
    names = list(dict.fromkeys(held.family))
    rows = [_latency(held, where, "latency", burst & random, "4-20 at a locked clock", 9.0, 5.5)]
    rows += [_latency(held, where, f"latency, {f}", burst & random & (family == f), None, 15.0, None) for f in names]
    rows += [
        _latency(held, where, "latency, sustained, not capped", open_),
        _latency(held, where, "latency, sustained, capped", shut),
        _power(held, where, "power", ~burst & random, "3-4 at a locked clock", 5.0, 3.2),
        _power(held, where, "power, not capped", open_),
        _power(held, where, "power, capped", shut),
    ]
    rows += [_power(held, where, f"power, {f}", ~burst & random & (family == f)) for f in names]
    rows += [
        _clock(held, where, "clock as NVML reports it", ~burst & random, top_hz, 2.5, 1.3),
        _clock(held, where, "clock, capped", shut, top_hz, 5.0, 3.0),
    ]
    other = ~burst & ~random
    rows += [_power(held, where, "power, zeros, ones and rectified data", other)]
    return rows


def coverage(held: HeldOut, gpu: str) -> list[Row]:
    """Share of held-out rows inside intervals whose ends come from the other folds alone, and their width."""
    where = f"{gpu} kernels, intervals of {LEVEL:.0%}"
    family = np.array(held.family)
    random = np.array(held.data) == "random"
    burst = np.array([kind == "burst" for kind in held.kind])
    rows = []
    found = {}
    for quantity, ratio, kept in (
        ("latency", held.latency_s / held.predicted_latency_s, burst),
        ("power", held.power_w / held.predicted_power_w, ~burst),
    ):
        known = random & kept & np.isfinite(ratio)
        found[quantity] = known, *_covered(quantity, ratio, held, family, known)
    for name in dict.fromkeys(held.family):
        for quantity, (known, inside, width) in found.items():
            at = known & (family == name)
            rows.append(row(where, f"{quantity}, {name}", int(at.sum()), None, **_share(inside[at], width[at])))
    for quantity, near in (("latency", held.near), ("power", held.near_power)):
        known, inside, width = found[quantity]
        for label, part in _by_distance(near, known).items():
            share = _share(inside[part], width[part])
            rows.append(row(where, f"{quantity}, {label}", int(part.sum()), None, **share))
    return rows


def _share(inside: Mask, width: Array) -> dict[str, Any]:
    return {
        "coverage": round(100 * float(inside.mean()), 1),
        "width": round(100 * float(width.mean()), 1),
        "median_width": round(100 * float(np.median(width)), 1),
        "wanted": [85.0, 95.0],
    }


def _by_distance(near: Array, known: Mask) -> dict[str, Mask]:
    """Quarters of the rows by how like the nearest other row they are; none where that was not kept."""
    if not np.isfinite(near[known]).any():
        return {}
    edges = np.quantile(near[known & np.isfinite(near)], [0.25, 0.5, 0.75])
    quarter = np.where(np.isfinite(near), np.searchsorted(edges, near), -1)
    labels = ("farthest quarter from other rows", "second quarter", "third quarter", "nearest quarter")
    return {label: known & (quarter == i) for i, label in enumerate(labels)}


def _covered(
    quantity: str, ratio: Array, held: HeldOut, family: npt.NDArray[np.str_], known: Mask
) -> tuple[Mask, Array]:
    """Which rows lie inside ends from the other folds' rows, and the width of each."""
    near = held.near if quantity == "latency" else held.near_power
    inside, width = np.zeros(len(ratio), dtype=bool), np.full(len(ratio), np.nan)
    for k in np.unique(held.fold[known]):
        others = known & (held.fold != k)
        line = fit_near(np.log(ratio[others]), family[others], near[others])
        typical = scaled(ratio[others], near[others], line)
        for name in np.unique(family[known & (held.fold == k)]):
            here = known & (held.fold == k) & (family == name)
            if quantity == "latency":
                low, high = conformal(typical[family[others] == name])
            else:
                low, high = power_ends(typical, family[others], str(name))
            scale = scale_of(near[here], line)
            inside[here] = (ratio[here] >= low**scale) & (ratio[here] <= high**scale)
            width[here] = high**scale - low**scale
    return inside, width


def _latency(
    held: HeldOut,
    where: str,
    quantity: str,
    at: Mask,
    published: str | None = None,
    must: float | None = None,
    aim: float | None = None,
) -> Row:
    error = percent(held.predicted_latency_s[at], held.latency_s[at])
    floor = percent(held.roofline_s[at], held.latency_s[at])
    return row(where, quantity, int(at.sum()), error, floor, published, must, aim, median=_median(held, at))


def _median(held: HeldOut, at: Mask) -> float | None:
    if not at.any():
        return None
    return round(float(100 * np.median(np.abs(held.predicted_latency_s[at] / held.latency_s[at] - 1))), 2)


def _power(
    held: HeldOut,
    where: str,
    quantity: str,
    at: Mask,
    published: str | None = None,
    must: float | None = None,
    aim: float | None = None,
) -> Row:
    error = percent(held.predicted_power_w[at], held.power_w[at])
    floor = percent(_family_mean(held)[at], held.power_w[at])
    return row(where, quantity, int(at.sum()), error, floor, published, must, aim)


def _family_mean(held: HeldOut) -> Array:
    """Mean power of a row's family over the other folds: the floor."""
    family, found = np.array(held.family), np.full(len(held.kind), np.nan)
    known = np.isfinite(held.power_w) & (np.array(held.data) == "random")
    for i in np.flatnonzero(np.isfinite(held.power_w)):
        others = known & (family == family[i]) & (held.fold != held.fold[i])
        found[i] = held.power_w[others].mean() if others.any() else np.nan
    return found


def _clock(held: HeldOut, where: str, quantity: str, at: Mask, top_hz: float, must: float, aim: float) -> Row:
    error = percent(held.predicted_clock_hz[at], held.clock_hz[at])
    floor = percent(np.full(int(at.sum()), top_hz), held.clock_hz[at])
    return row(where, quantity, int(at.sum()), error, floor, "nobody", must, aim)
