"""Efficiency factors on a bundle: what a user knows better, or what ``calibrate`` learned [Lee2026, VI-C].

On time: ``launch`` (host's cost of an operator), ``compute`` (cycles on chip), ``products`` (cycles of products,
convolutions and attention, besides), ``memory`` (seconds of device memory). On energy: ``energy`` (every operation),
``<module>_energy`` (tensor, cuda, sfu, shared, l2, sm, dram, link, besides). Above 1 is slower, or more joules.
``idle_offset`` adds watts to idle power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from wattcast.activity import events
from wattcast.errors import bad_value, unknown_name
from wattcast.fitted.bundle import Bundle
from wattcast.power.module import ModulePower
from wattcast.timeline.phases import Correction

TIME = ("launch", "compute", "products", "memory")
PRODUCTS = ("gemm", "conv2d", "attention")
IDLE = "idle_offset"
LEAST, MOST = 0.02, 50.0  # beyond these a factor is a slip of the finger, or of a unit


def names() -> tuple[str, ...]:
    """All factors a bundle takes."""
    modules = dict.fromkeys(event.module for event in events().values() if not event.is_mean)
    return (*TIME, "energy", *(f"{module}_energy" for module in modules), IDLE)


def with_factors(bundle: Bundle, factors: Mapping[str, float]) -> Bundle:
    """The bundle with factors applied; each is noted among its assumptions."""
    if not factors:
        return bundle
    check(factors)
    notes = tuple(f"factor of your own: {name} {value:g}" for name, value in factors.items())
    return replace(
        bundle,
        corrections={name: _corrected(name, c, factors) for name, c in bundle.corrections.items()},
        launch=replace(
            bundle.launch, host_s_per_operator=bundle.launch.host_s_per_operator * factors.get("launch", 1.0)
        ),
        power=_power(bundle, factors),
        assumptions=(*bundle.assumptions, *notes),
    )


def check(factors: Mapping[str, float]) -> None:
    """Refuse unknown names and values out of reason."""
    known = names()
    for name, value in factors.items():
        if name not in known:
            raise unknown_name("factor", name, known, f"Known: {', '.join(known)}.")
        if not np.isfinite(value):
            raise bad_value(f"factor {name}", "a finite number", value)
        if name != IDLE and not LEAST <= value <= MOST:
            raise bad_value(f"factor {name}", f"a factor between {LEAST:g} and {MOST:g}, 1 for no change", value)


def _corrected(group: str, c: Correction, factors: Mapping[str, float]) -> Correction:
    on_chip = factors.get("compute", 1.0)
    if group.partition(".")[0] in PRODUCTS:
        on_chip *= factors.get("products", 1.0)
    return replace(
        c,
        compute=c.compute * on_chip,
        l2=c.l2 * on_chip,
        serial_cycle=c.serial_cycle * on_chip,
        memory=c.memory * factors.get("memory", 1.0),
    )


def _power(bundle: Bundle, factors: Mapping[str, float]) -> ModulePower:
    power = bundle.power
    if not isinstance(power, ModulePower):
        raise bad_value(f"bundle {bundle.gpu}", "a module power model, which factors apply to", type(power).__name__)
    known = events()
    energy_j = {
        event: joules * factors.get("energy", 1.0) * factors.get(f"{known[event].module}_energy", 1.0)
        for event, joules in power.energy_j.items()
    }
    idle_w = power.idle.power_w + factors.get(IDLE, 0.0)
    if (idle_w <= 0).any():
        raise bad_value(
            f"factor {IDLE}", f"less than the idle power of {power.idle.power_w.min():.0f} W taken away", IDLE
        )
    return replace(power, energy_j=energy_j, idle=replace(power.idle, power_w=idle_w))
