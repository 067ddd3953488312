"""Turn fitted terms into a power model of events, which predicts the same watts.

A fit has columns, each with a coefficient; a power model has a base power, rails with a voltage,
leakage, a clock tree and a cost for each event. This module sorts the first into the second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from wattcast.core.arrays import Array
from wattcast.lab.counter_models.counter_table import RAILS, CounterTable
from wattcast.lab.counter_models.gpmtool_files import BUSY_SHARE_EVENTS
from wattcast.lab.counter_models.model_selection import TermsFit
from wattcast.lab.counter_models.rail_terms import (
    ACTIVE_CYCLE,
    CounterModelKind,
    offset_name,
)
from wattcast.power.hybrid_rail import (
    EventRail,
    HybridRail,
    RailClock,
    RailVoltage,
)
from wattcast.power.power_model import PowerModel
from wattcast.power.rate_power import RatePower
from wattcast.power.switched_capacitance import SwitchedCapacitance

RAIL_CLOCKS = {
    "core": RailClock.CORE,
    "memory": RailClock.MEMORY,
    "host": RailClock.FIXED,
}


def make_power_model(fit: TermsFit, table: CounterTable) -> PowerModel:
    """Return the power model, in terms of events, that predicts the same watts as the fit."""
    coefficients = dict(zip(fit.terms.names, fit.coefficient.tolist(), strict=True))
    event_costs = _sort_event_costs(fit, table)
    if fit.model in (CounterModelKind.RATE, CounterModelKind.LINEAR):
        return _make_rate_power(coefficients, event_costs)
    rails = _make_rails(fit, table, coefficients)
    if fit.model is CounterModelKind.ALPHA_C:
        return _make_switched_capacitance(coefficients, rails)
    if ACTIVE_CYCLE in coefficients:
        event_costs["core"] = {ACTIVE_CYCLE: coefficients[ACTIVE_CYCLE]} | event_costs["core"]
    used_rails = [name for name in RAILS if name != "host" or event_costs[name]]
    hybrid_rails = [replace(rails[name], event_f=event_costs[name]) for name in used_rails]
    return HybridRail(coefficients["base"], tuple(hybrid_rails))


def _sort_event_costs(fit: TermsFit, table: CounterTable) -> dict[str, dict[str, float]]:
    """Return the cost of each event by rail; events of one term share its coefficient."""
    costs: dict[str, dict[str, float]] = {rail: {} for rail in RAILS}
    for members, coefficient in zip(fit.terms.members, fit.coefficient.tolist(), strict=True):
        for index in members:
            predictor = table.predictors[index]
            costs[predictor.rail][predictor.event] = coefficient
    return costs


def _make_rate_power(
    coefficients: Mapping[str, float],
    event_costs: Mapping[str, Mapping[str, float]],
) -> RatePower:
    """Return the model without voltages: a base, both clocks and a cost for each event."""
    events: dict[str, float] = {}
    for costs in event_costs.values():
        events.update(costs)
    return RatePower(
        coefficients["base"],
        events,
        coefficients.get("core clock", 0.0),
        coefficients.get("memory clock", 0.0),
    )


def _make_rails(
    fit: TermsFit,
    table: CounterTable,
    coefficients: Mapping[str, float],
) -> dict[str, EventRail]:
    """Return every rail with its voltage, leakage, clock tree and offsets, without events."""
    core_voltage, memory_voltage = fit.how.curves(fit.inferred.theta)
    voltages = {
        "core": core_voltage,
        "memory": memory_voltage,
        "host": RailVoltage.constant(),
    }
    clocks_hz = {
        "core": table.clock_hz,
        "memory": table.memory_clock_hz,
        "host": np.ones(table.rows),
    }
    for name, voltage_v in table.voltage_v.items():
        voltages[name] = average_measured_voltage(clocks_hz[name], voltage_v)

    rails = {}
    for name in RAILS:
        rails[name] = EventRail(
            name,
            RAIL_CLOCKS[name],
            voltages[name],
            coefficients.get(f"{name} leakage", 0.0),
            coefficients.get(f"{name} clock", 0.0),
            _list_memory_offsets(table, coefficients) if name == "memory" else (),
        )
    return rails


def _list_memory_offsets(
    table: CounterTable,
    coefficients: Mapping[str, float],
) -> tuple[tuple[float, float], ...]:
    """Return the memory clocks whose power is off the line, each with the watts it is off."""
    offsets = []
    for clock_hz in np.unique(table.memory_clock_hz).tolist():
        offset_w = coefficients.get(offset_name(clock_hz))
        if offset_w is not None:
            offsets.append((clock_hz, offset_w))
    return tuple(offsets)


def _make_switched_capacitance(
    coefficients: Mapping[str, float],
    rails: Mapping[str, EventRail],
) -> SwitchedCapacitance:
    """Return the model whose rails each switch one capacitance, by the share of busy cycles."""
    busy_rails = []
    for name, event in BUSY_SHARE_EVENTS.items():
        full_f = coefficients.get(f"{name} dynamic")
        if full_f is not None:
            busy_rails.append(replace(rails[name], alpha=event, full_f=full_f))
    return SwitchedCapacitance(coefficients["base"], tuple(busy_rails))


def average_measured_voltage(clock_hz: Array, voltage_v: Array) -> RailVoltage:
    """Return the mean measured voltage by clock, made non-decreasing."""
    clocks, at = np.unique(clock_hz, return_inverse=True)
    clock_of_row = at.reshape(-1)
    mean_v = np.bincount(clock_of_row, voltage_v) / np.bincount(clock_of_row)
    return RailVoltage(clocks, np.maximum.accumulate(mean_v))
