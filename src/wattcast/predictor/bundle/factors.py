"""Scale a bundle by efficiency factors that a user gives or ``calibrate`` learned [Lee2026, VI-C].

On time: ``launch`` (host's cost of an operator), ``compute`` (cycles on chip), ``products`` (cycles of products,
convolutions and attention, besides), ``memory`` (seconds of device memory). On energy: ``energy`` (every operation),
``<module>_energy`` (tensor, cuda, sfu, shared, l2, sm, dram, link, besides). Above 1 is slower, or more joules.
``idle_offset`` adds watts to idle power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from wattcast.core.errors import bad_value, unknown_name
from wattcast.power import PowerModel
from wattcast.power.activity import known_events
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.kernel_phases import Correction

TIME_FACTORS = ("launch", "compute", "products", "memory")
PRODUCT_FAMILIES = ("gemm", "conv2d", "attention")
IDLE_OFFSET = "idle_offset"
LEAST_FACTOR, MOST_FACTOR = 0.02, 50.0  # beyond these a factor is a slip of the finger, or of a unit


def factor_names() -> tuple[str, ...]:
    """List the factors that a bundle takes."""
    modules = dict.fromkeys(event.module for event in known_events().values() if not event.is_mean)
    return (*TIME_FACTORS, "energy", *(f"{module}_energy" for module in modules), IDLE_OFFSET)


def apply_factors(bundle: Bundle, factors: Mapping[str, float]) -> Bundle:
    """Apply factors to a bundle and note each among its assumptions."""
    if not factors:
        return bundle
    check_factors(factors)
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


def check_factors(factors: Mapping[str, float]) -> None:
    """Refuse unknown names and values out of reason."""
    known = factor_names()
    for name, value in factors.items():
        if name not in known:
            raise unknown_name("factor", name, known, f"Known: {', '.join(known)}.")
        if not np.isfinite(value):
            raise bad_value(f"factor {name}", "a finite number", value)
        if name != IDLE_OFFSET and not LEAST_FACTOR <= value <= MOST_FACTOR:
            raise bad_value(
                f"factor {name}", f"a factor between {LEAST_FACTOR:g} and {MOST_FACTOR:g}, 1 for no change", value
            )


def _corrected(group: str, c: Correction, factors: Mapping[str, float]) -> Correction:
    on_chip = factors.get("compute", 1.0)
    if group.partition(".")[0] in PRODUCT_FAMILIES:
        on_chip *= factors.get("products", 1.0)
    return replace(
        c,
        compute=c.compute * on_chip,
        l2=c.l2 * on_chip,
        serial_cycle=c.serial_cycle * on_chip,
        memory=c.memory * factors.get("memory", 1.0),
    )


def _power(bundle: Bundle, factors: Mapping[str, float]) -> PowerModel:
    """Scale the energies and the idle power of the bundle's power model."""
    if not any(name == IDLE_OFFSET or name.endswith("energy") for name in factors):
        return bundle.power
    on_all = factors.get("energy", 1.0)
    modules = dict.fromkeys(event.module for event in known_events().values())
    by_module = {module: on_all * factors.get(f"{module}_energy", 1.0) for module in modules}
    return bundle.power.scale_energy(by_module, idle_offset_w=factors.get(IDLE_OFFSET, 0.0))
