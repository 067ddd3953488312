"""Whole-model rows as functions of efficiency factors: analysed once, then evaluated cheaply.

The factors are those of ``fitted/factors.py``; here they scale a clock-free timeline directly, which gives the same
numbers as a bundle with those factors (a test holds the two together) at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.arrays import Array
from wattcast.equilibrium import settle
from wattcast.fitted import Bundle
from wattcast.fitted.factors import IDLE, PRODUCTS, with_factors
from wattcast.flow import analyse, at_clock
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.timeline import Phase, Timeline
from wattcast.workload.graph import Graph

UNCAPPED_W = 1e9


@dataclass(frozen=True)
class Measured:
    """One whole-model measurement. ``power_w`` None: only time was measured. ``clock_hz`` None: the governor's."""

    name: str
    graph: Graph
    latency_s: float
    power_w: float | None
    clock_hz: float | None
    temperature_c: float
    power_limit_w: float | None = None


@dataclass(frozen=True)
class Row:
    """A measurement and its timeline under the forecast."""

    measured: Measured
    timeline: Timeline
    products: Array  # (kernel,) 1 where a kernel is a product


def rows_of(measured: Sequence[Measured], gpu: Gpu, bundle: Bundle) -> list[Row]:
    """Analyse every measured workload once."""
    timelines: dict[int, Timeline] = {}
    rows = []
    for m in measured:
        timeline = timelines.setdefault(id(m.graph), analyse(m.graph, gpu, bundle))
        products = np.array([float(family in PRODUCTS) for family in timeline.kernels.family])
        rows.append(Row(m, timeline, products))
    return rows


def predict(rows: Sequence[Row], factors: Mapping[str, float], gpu: Gpu, bundle: Bundle) -> tuple[Array, Array]:
    """Latency and mean power of every row, ``(row,)``, with factors applied."""
    priced = with_factors(bundle, {k: v for k, v in factors.items() if k == IDLE or k.endswith("energy")})
    found = [_row(row, factors, gpu, priced) for row in rows]
    return np.array([t for t, _ in found]), np.array([w for _, w in found])


def _row(row: Row, factors: Mapping[str, float], gpu: Gpu, bundle: Bundle) -> tuple[float, float]:
    m, timeline = row.measured, scaled(row, factors)
    at = OperatingPoint(m.clock_hz, m.power_limit_w, m.temperature_c)
    if m.clock_hz is None or m.power_limit_w is not None:
        at = settle(timeline, gpu, at, bundle).at
    totals = at_clock(timeline, at, bundle)
    return float(np.squeeze(totals.latency_s)), float(np.squeeze(totals.power_w))


def scaled(row: Row, factors: Mapping[str, float]) -> Timeline:
    """The row's timeline with factors on time applied."""
    on_chip = factors.get("compute", 1.0) * factors.get("products", 1.0) ** row.products
    memory, timeline = factors.get("memory", 1.0), row.timeline

    def phase(p: Phase, cycles: Array) -> Phase:
        fixed = p.name == "fixed"
        return Phase(
            p.name,
            None if p.cycles is None else p.cycles * cycles,
            p.seconds if p.seconds is None or fixed else p.seconds * memory,
        )

    return replace(
        timeline,
        phases=tuple(phase(p, on_chip) for p in timeline.phases),
        host_s=timeline.host_s * factors.get("launch", 1.0),
    )
