"""Turn the settings of a prediction, as people type them, into an operating point and a bundle.

A number may be SI or a string with its unit; clocks, power limits, temperatures and the host's time
may be arrays.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wattcast.core import (
    bad_value,
    check_names,
    units,
)
from wattcast.core.arrays import Sweepable, as_sweep
from wattcast.core.own_host import read_own_host
from wattcast.hardware import (
    DEFAULT_TEMPERATURE_C,
    Gpu,
    OperatingPoint,
)
from wattcast.options.setting_options import (
    CARDS,
    SUSTAINED,
    MachineOptions,
    SettingOptions,
)
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import REACTION_S
from wattcast.predictor.kernel_phases import LaunchCosts
from wattcast.predictor.machine_factors import (
    UNTOLD,
    MachineFactors,
    find_machine_factors,
)

LOWEST_C = 0.0  # of a die that predictions are made for
HIGHEST_C = 110.0
Quantity: TypeAlias = str | npt.ArrayLike  # "1830 MHz", 1.83e9, or an array in SI units


def resolve_settings(
    gpu: Gpu,
    bundle: Bundle,
    settings: SettingOptions,
    machine: MachineOptions = UNTOLD,
) -> tuple[list[str], OperatingPoint, Bundle]:
    """Return a note for every default taken, the operating point, and the bundle for these
    settings on this machine.
    """
    if settings.host_launch_s is not None:
        _check_host_alone(machine)
        machine = replace(machine, host_factor=1.0)
    factors = find_machine_factors(gpu.name, machine)
    bundle, host_note = _choose_host(bundle, settings.host_launch_s, factors, machine)
    bundle = bundle.for_measured_card(factors.power, factors.power_spread)
    if factors.power_note:
        bundle = replace(bundle, assumptions=(*bundle.assumptions, factors.power_note))
    defaults = []
    if settings.clock_hz is None:
        defaults.append("clock: left to the governor")
    if settings.power_limit_w is None:
        limit_w = float(np.mean(gpu.power.limit_w))
        defaults.append(f"power limit: the card's default, {units.show(limit_w, 'W')}")
    defaults += host_note
    if settings.scheduling == "sync":
        bundle = replace(bundle, launch=replace(bundle.launch, engine_waits=True))
        defaults.append("synchronous scheduling: an engine prepares a step after the one before")
    if settings.temperature_c is None:
        defaults.append(f"temperature: {DEFAULT_TEMPERATURE_C:g} C")

    if settings.data == "random":
        defaults.append("data: random-like")
    else:
        bundle = bundle.for_data(settings.data)

    question = "Is it the card the bundle was fitted on, or another of its kind?"
    check_names("card", settings.card, CARDS, question)
    if settings.card == "this":
        bundle = bundle.for_this_card()
    elif factors.power_spread is None:
        defaults.append("intervals: for another card of the kind")
    else:
        defaults.append("intervals: for a card whose watts were measured here")

    duration_s = _read_duration(settings.duration_s)
    defaults.append(_note_duration(duration_s))
    if duration_s is not None and duration_s <= REACTION_S:
        bundle = bundle.for_bursts()
    at = OperatingPoint(
        clock_hz=_read_clock(gpu, settings.clock_hz),
        power_limit_w=_read_power_limit(settings.power_limit_w),
        temperature_c=_read_temperature(settings.temperature_c),
        duration_s=duration_s,
    )
    return defaults, at, bundle


def _check_host_alone(machine: MachineOptions) -> None:
    """Refuse a factor on the host's time beside its time."""
    if machine.host_factor not in (None, 1.0):
        do = "Give one of the two."
        raise bad_value("host_factor", "none beside host_launch", machine.host_factor, do)


def _choose_host(
    bundle: Bundle,
    host_launch: Quantity | None,
    factors: MachineFactors,
    machine: MachineOptions,
) -> tuple[Bundle, list[str]]:
    """Return the bundle with the host that issues the operators, and a note where it is the
    default.
    """
    if host_launch is not None:
        host_s = _read_amount(host_launch, "s", "host_launch")
        if (np.asarray(host_s) < 0).any():
            raise bad_value("host_launch", "zero or more", f"{np.min(host_s)} s")
        return replace(bundle, launch=tell_host(bundle.launch, host_s)), []

    usual_s = float(np.mean(bundle.launch.host_s_per_operator))
    note = f"host: {units.show(usual_s, 's')} to issue an operator"
    host_notes = [factors.host_note] if factors.host_note else []
    if machine.host_factor is not None:
        if machine.host_factor == 1.0:
            return bundle, [note]
        own_s = machine.host_factor * bundle.launch.host_s_per_operator
        return replace(bundle, launch=tell_host(bundle.launch, own_s)), host_notes
    if factors.host != 1.0:
        launch = replace(bundle.launch, engine_factor=factors.host * bundle.launch.engine_factor)
        bundle = replace(bundle, launch=launch)
    own_host = read_own_host() if usual_s > 0.0 else None
    if own_host is None:
        return bundle, [note, *host_notes]
    # of eager models: nothing says how engines fare on it
    own_s = own_host.host_s_per_operator
    launch = replace(bundle.launch, host_s_per_operator=own_s, measured=True)
    note = (
        f"host: {units.show(own_s, 's')} to issue an operator, measured on "
        "this machine (undo: wattcast doctor --forget-host)"
    )
    return replace(bundle, launch=launch), [note, *host_notes]


def tell_host(launch: LaunchCosts, host_s_per_operator: Sweepable) -> LaunchCosts:
    """Return the launch costs of a host that takes so long for an operator.

    Its times for the steps of an engine change by the same factor.
    """
    usual_s = float(np.mean(launch.host_s_per_operator))
    factor = host_s_per_operator / usual_s if usual_s > 0.0 else 1.0
    return replace(
        launch,
        host_s_per_operator=host_s_per_operator,
        engine_factor=factor,
        measured=True,
    )


def _read_duration(duration: Quantity | None) -> float | None:
    """Return the duration of a run; None where the governor has settled."""
    if duration is None or (isinstance(duration, str) and duration == SUSTAINED):
        return None
    duration_s = _read_amount(duration, "s", "duration")
    if not (isinstance(duration_s, float) and 0.0 < duration_s < math.inf):
        do = "Leave it away: sustained."
        raise bad_value("duration", "one time above zero, such as 5ms", str(duration), do)
    return duration_s


def _note_duration(duration_s: float | None) -> str:
    if duration_s is None:
        return "duration: sustained, with the governor settled"
    reaction = "the governor answers after 90 ms"
    if duration_s <= REACTION_S:
        reaction = "the governor has no time to lower the clock"
    return f"duration: {units.show(duration_s, 's')}; {reaction}"


def _read_clock(gpu: Gpu, clock: Quantity | None) -> Sweepable | None:
    if clock is None:
        return None
    clock_hz = _read_amount(clock, "Hz", "clock")
    lowest_hz = np.asarray(gpu.clocks.min_hz or 1.0)
    highest_hz = np.asarray(gpu.clocks.max_hz)
    too_high = np.asarray(clock_hz) > highest_hz * (1 + 1e-9)
    too_low = np.asarray(clock_hz) < lowest_hz
    if too_high.any() or too_low.any():
        low = units.show(float(np.min(lowest_hz)), "Hz")
        high = units.show(float(np.max(highest_hz)), "Hz")
        worst_hz = float(np.max(np.where(clock_hz > highest_hz, clock_hz, np.min(clock_hz))))
        expected = f"a clock of the {gpu.name}, between {low} and {high}"
        raise bad_value("clock", expected, units.show(worst_hz, "Hz"))
    return clock_hz


def _read_power_limit(power_limit: Quantity | None) -> Sweepable | None:
    return None if power_limit is None else _read_amount(power_limit, "W", "power_limit")


def _read_temperature(temperature: Quantity | None) -> Sweepable:
    if temperature is None:
        return DEFAULT_TEMPERATURE_C
    celsius = _read_amount(temperature, "C", "temperature")
    low = float(np.min(celsius))
    high = float(np.max(celsius))
    if low < LOWEST_C or high > HIGHEST_C:
        expected = f"die temperatures between {LOWEST_C:g} and {HIGHEST_C:g} C"
        raise bad_value("temperature", expected, f"{low:g} to {high:g} C")
    return celsius


def _read_amount(
    value: Quantity,
    unit: str,
    where: str,
) -> Sweepable:
    if isinstance(value, str):
        return units.parse(value, unit, where)
    try:
        amount = as_sweep(value)
    except (TypeError, ValueError):
        expected = f"a number in {unit}, a string with its unit, or an array"
        raise bad_value(where, expected, value) from None
    if not np.isfinite(amount).all():
        raise bad_value(where, "finite numbers", value)
    return amount
