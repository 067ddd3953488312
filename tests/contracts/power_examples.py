"""One model of every kind with round coefficients, on which the contracts of power models are
tested.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wattcast.power.activity import known_events
from wattcast.power.component_power import ComponentPower, Drive, Leakage, Part, Term
from wattcast.power.hybrid_rail import EventRail, HybridRail, RailClock, RailVoltage
from wattcast.power.module_power import ModulePower
from wattcast.power.power_model import IdlePower, PowerModel, VoltageCurve
from wattcast.power.rate_power import RatePower
from wattcast.power.switched_capacitance import SwitchedCapacitance


def make_module() -> ModulePower:
    """Return a model with an energy for every event that is a count."""
    clock_hz = np.array([0.5e9, 1.0e9, 2.0e9])
    return ModulePower(
        {
            name: 1e-12 * (i + 1)
            for i, name in enumerate(known_events())
            if not known_events()[name].is_mean
        },
        IdlePower(clock_hz, np.array([50.0, 60.0, 90.0]), reference_c=45.0, per_c=0.01),
        VoltageCurve(clock_hz, np.array([0.7, 0.75, 1.0])),
    )


def make_rate() -> RatePower:
    """Return a model with round coefficients."""
    return RatePower(
        40.0, {"int_busy_cycle": 3e-8, "dram_busy_cycle": 2e-8, "pipe_duty": 30.0}, 1e-8, 5e-9
    )


def make_capacitance() -> SwitchedCapacitance:
    """Return a model of two rails with round coefficients."""
    voltage = RailVoltage(np.array([0.5e9, 1e9, 2e9]), np.array([0.8, 0.85, 1.1]))
    core = EventRail("core", RailClock.CORE, voltage, leakage_a=20.0, clock_f=1e-8)
    memory = EventRail("memory", RailClock.MEMORY, clock_f=5e-9)
    return SwitchedCapacitance(
        15.0,
        (
            replace(core, alpha="core_busy_share", full_f=5e-8),
            replace(memory, alpha="memory_busy_share", full_f=2e-8),
        ),
    )


def make_rails() -> HybridRail:
    """Return a model of three rails with round coefficients."""
    core = EventRail(
        "core",
        RailClock.CORE,
        RailVoltage(
            np.array([0.5e9, 1e9, 2e9]),
            np.array([0.8, 0.85, 1.1]),
            np.array([1e9, 3e9]),
            np.array([0.8, 0.9]),
        ),
        leakage_a=20.0,
        clock_f=1e-8,
    )
    memory = EventRail("memory", RailClock.MEMORY, clock_f=5e-9, offset_w=((0.81e9, 2.0),))
    host = EventRail("host", RailClock.FIXED, RailVoltage.constant(1.05), leakage_a=0.8)
    return HybridRail(
        15.0,
        (
            replace(
                core, event_f={"active_cycle": 1e-8, "int_busy_cycle": 3e-8, "l2_busy_cycle": 2e-8}
            ),
            replace(memory, event_f={"dram_busy_cycle": 2e-8}, awake_w=6.0, awake_per_s=2e8),
            replace(
                host, event_f={"host_instruction_per_cycle": 3.7e-3, "host_active_cycle": 1.7e-10}
            ),
        ),
    )


def make_components() -> ComponentPower:
    """Return a model of five parts with round coefficients."""
    return ComponentPower(
        (
            Term("l1_read_hit", "DCP", 3e-10, Drive.COUNT),
            Term("dram_read_access", "DRAMP", 2e-8, Drive.COUNT),
            Term("pipe_duty", "PIPEP", 25.0, Drive.DUTY),
            Term("idle_sm", "IDLE_COREP", 1.5, Drive.MEAN),
        ),
        (
            Part("DCP", 2),
            Part("DRAMP", 0),
            Part("PIPEP", 2),
            Part("IDLE_COREP", 1),
            Part("CONST", 2, 10.0, True),
        ),
        7e8,
        leakage=Leakage(30.0, 5.0, 16.0),
    )


def example_models() -> dict[str, PowerModel]:
    """Return a model of every kind that ships, by its kind."""
    made = (make_module(), make_rate(), make_capacitance(), make_rails(), make_components())
    return {model.kind: model for model in made}
