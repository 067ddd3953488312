"""A fit in terms of columns -> a frozen power model in terms of events."""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.choose import Fit
from wattcast.fit.table import RAILS, CounterTable
from wattcast.fit.terms import ACTIVE, Model, offset_name
from wattcast.power.hybrid_rail import EventRail, HybridRail
from wattcast.power.interface import PowerModel
from wattcast.power.rail import Clock, Rail, RailVoltage
from wattcast.power.rate import RatePower
from wattcast.power.switched_capacitance import AlphaRail, SwitchedCapacitance

CLOCKS = {"core": Clock.CORE, "memory": Clock.MEMORY, "host": Clock.FIXED}
ALPHA = {"core": "core_busy_share", "memory": "memory_busy_share"}


def power_model(fit: Fit, table: CounterTable) -> PowerModel:
    """The power model that predicts what the fit predicts."""
    found = dict(zip(fit.design.names, (float(c) for c in fit.coefficient), strict=True))
    if fit.model in (Model.RATE, Model.LINEAR):
        events = {e: c for rail in RAILS for e, c in _events(fit, table, rail).items()}
        return RatePower(found["base"], events, found.get("core clock", 0.0), found.get("memory clock", 0.0))
    rails = {name: _rail(fit, table, name, found) for name in RAILS}
    if fit.model is Model.ALPHA_C:
        pairs = [(rails[n], ALPHA[n], found[f"{n} dynamic"]) for n in ALPHA if f"{n} dynamic" in found]
        return SwitchedCapacitance(found["base"], tuple(AlphaRail(*pair) for pair in pairs))
    events_of = {name: _events(fit, table, name) for name in RAILS}
    if ACTIVE in found:
        events_of["core"] = {ACTIVE: found[ACTIVE]} | events_of["core"]
    used = [name for name in RAILS if name != "host" or events_of[name]]
    return HybridRail(found["base"], tuple(EventRail(rails[name], events_of[name]) for name in used))


def _events(fit: Fit, table: CounterTable, rail: str) -> dict[str, float]:
    return {
        table.predictors[i].event: float(coefficient)
        for members, coefficient in zip(fit.design.members, fit.coefficient, strict=True)
        for i in members
        if table.predictors[i].rail == rail
    }


def _rail(fit: Fit, table: CounterTable, name: str, found: dict[str, float]) -> Rail:
    clock = CLOCKS[name]
    clocks = np.unique(table.memory_clock_hz).tolist() if name == "memory" else []
    offsets = tuple((hz, found[offset_name(hz)]) for hz in clocks if offset_name(hz) in found)
    return Rail(
        name,
        clock,
        _voltage(fit, table, name),
        found.get(f"{name} leakage", 0.0),
        found.get(f"{name} clock", 0.0),
        offsets,
    )


def _voltage(fit: Fit, table: CounterTable, rail: str) -> RailVoltage:
    if rail in table.voltage_v:
        clock_hz = {"core": table.clock_hz, "memory": table.memory_clock_hz, "host": np.ones(table.rows)}[rail]
        return measured_curve(clock_hz, table.voltage_v[rail])
    core, memory = fit.how.curves(fit.inferred.theta)
    return {"core": core, "memory": memory}.get(rail, RailVoltage.constant())


def measured_curve(clock_hz: Array, voltage_v: Array) -> RailVoltage:
    """Mean measured voltage by clock, made to never fall."""
    clocks, at = np.unique(clock_hz, return_inverse=True)
    mean = np.bincount(at.reshape(-1), voltage_v) / np.bincount(at.reshape(-1))
    return RailVoltage(clocks, np.maximum.accumulate(mean))
