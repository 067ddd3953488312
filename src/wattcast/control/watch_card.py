"""Watch a card and estimate from its readings which clock would save energy. Nothing is set.

How time follows the core clock is the predictor's law for the card: the share of the time in which
memory is busy goes as a decode step, which memory holds back until L2 slows down with the clock,
and the remainder as a product of large matrices. Power is idle power, which follows the clock, plus
switched power, which follows V² f and the rate of work. Idle power and V(f) come from the card's
bundle: fitted where the card was measured, carried over elsewhere. A card the catalogue does not
have gets the A100's voltage curve, a share of the present power as idle power, and a way to device
memory that follows the clock below a knee. The result is advice to try, not a forecast, and is
labelled so wherever it is shown.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast import hardware
from wattcast.control.controller_coefficients import ESTIMATES
from wattcast.control.plants import (
    KnobRole,
    Lattice,
    Settings,
    build_card_lattice,
    move_knob,
)
from wattcast.control.search_problem import Objective
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.predictor.kernel_coefficients import MEMORY_KNEE

if TYPE_CHECKING:
    from rich.console import Console

    from wattcast.predictor.bundle import Bundle

_NO_LIMIT_W = 1e6
CLOCK_SLACK = 1e-4  # by which a level may lie above the clock that the card reports
LABEL = "an estimate from readings; nothing was set"
# Quantities shown of a card: name and unit, % for shares.
SHOWN = {
    "power_w": ("power", "W"),
    "core_hz": ("core clock", "Hz"),
    "busy": ("utilisation", "%"),
    "memory_busy": ("memory utilisation", "%"),
}


def advise_clock(
    power_w: float,
    core_hz: float,
    memory_busy: float,
    levels_hz: Array,
    objective: Objective,
    gpu: Gpu | None = None,
) -> dict[str, Any] | None:
    """Return the best of ``levels_hz`` by estimate and what to expect there, or None where readings
    do not allow one.

    With m = memory_busy and D and C the times of a decode step and of a product on this card, time
    at clock f relative to now is m·D(f)/D(f_now) + (1 - m)·C(f)/C(f_now), and power is idle(f) +
    switched power now · (V / V_now)² / time."""
    readings = (power_w, core_hz, memory_busy)
    if not all(map(math.isfinite, readings)) or power_w <= 0 or core_hz <= 0:
        return None
    levels = levels_hz[levels_hz <= core_hz * (1.0 + CLOCK_SLACK)]
    if levels.size == 0:
        return None
    top_hz = float(levels_hz[-1])
    clocks = np.append(levels, core_hz)  # the clock now stands last
    share = min(max(memory_busy, 0.0), 1.0)
    stretch, time_note = follow_clock(clocks, share, top_hz, gpu)
    bundle = _find_bundle(gpu)
    idle_w, idle_note = _follow_idle_power(clocks, power_w, bundle)
    voltage, voltage_note = _follow_voltage(clocks, top_hz, bundle)

    # Time relative to now, and power, at each level.
    duration = stretch[:-1] / stretch[-1]
    switched_w = max(power_w - float(idle_w[-1]), 0.0)
    voltage_ratio = voltage[:-1] / voltage[-1]
    level_w = idle_w[:-1] + switched_w * voltage_ratio**2 / duration
    best = int(np.argmin(objective.log_scores(duration, level_w, np.asarray(1.0))))
    time_ratio = float(duration[best])
    power_ratio = float(level_w[best] / power_w)
    return {
        "core_hz": float(levels[best]),
        "slowdown": time_ratio - 1,
        "power_saving": 1 - power_ratio,
        "energy_saving": 1 - power_ratio * time_ratio,
        "ed2_gain": 1 - power_ratio * time_ratio**3,
        "assumptions": [time_note, idle_note, voltage_note],
    }


def _find_bundle(gpu: Gpu | None) -> Bundle | None:
    """Return the bundle of a card that the catalogue knows; others need no predictor."""
    if gpu is None:
        return None
    from wattcast.predictor.bundle import bundle_for

    return bundle_for(gpu)


def _follow_idle_power(
    clocks_hz: Array,
    power_w: float,
    bundle: Bundle | None,
) -> tuple[Array, str]:
    """Return idle power at each clock, and a sentence about where it comes from."""
    if bundle is None:
        idle_w = np.full(clocks_hz.shape, ESTIMATES.idle_share * power_w)
        return idle_w, f"idle power taken as {ESTIMATES.idle_share:.0%} of the power now"
    idle_w = np.minimum(bundle.power.idle_power_w(clocks_hz), power_w)
    return idle_w, f"idle power by clock from the {bundle.status} bundle of {bundle.gpu}"


def _follow_voltage(
    clocks_hz: Array,
    top_hz: float,
    bundle: Bundle | None,
) -> tuple[Array, str]:
    """Return the voltage at each clock, up to a factor, and where it comes from."""
    if bundle is not None:
        from wattcast.power.module_power import ModulePower

        if isinstance(bundle.power, ModulePower):
            voltage = bundle.power.voltage.level_at(clocks_hz)
            return voltage, f"voltage by clock from the {bundle.status} bundle of {bundle.gpu}"
    voltage = np.interp(
        clocks_hz / top_hz, [ESTIMATES.flat_to, 1.0], [1.0, ESTIMATES.top_over_flat]
    )
    return voltage, "voltage by clock as published for the A100-PCIE"


_DECODE: dict[str, Any] = {
    "phase": "decode",
    "batch": 8,
    "seq": 1024,
}  # of llama3-8b
_PRODUCT = {
    "name": "product",
    "ops": [
        {
            "op": "linear",
            "m": 8192,
            "n": 8192,
            "k": 8192,
        }
    ],
}


def follow_clock(
    clocks_hz: Array,
    memory_share: float,
    top_hz: float,
    gpu: Gpu | None,
) -> tuple[Array, str]:
    """Return the time at each clock, up to a factor, and a sentence about where it comes from."""
    compute_share = 1.0 - memory_share
    if gpu is None:
        stretch = top_hz / clocks_hz
        memory = np.maximum(1.0, MEMORY_KNEE * stretch)
        note = f"time follows the core clock, that of memory below {MEMORY_KNEE:.0%} of the top"
        return memory_share * memory + compute_share * stretch, note
    from wattcast.predictor import api  # a card that is not in the catalogue needs no predictor

    # A card may reach clocks that its catalogue entry does not name: take the nearest that it does.
    lowest_hz = float(np.min(gpu.clocks.lowest_hz))
    highest_hz = float(np.max(gpu.clocks.max_hz))
    named_hz = np.clip(clocks_hz, lowest_hz, highest_hz)
    shared: dict[str, Any] = {
        "clock": named_hz,
        "power_limit": _NO_LIMIT_W,
        "force": True,
    }
    decode_s = np.asarray(api.predict("llama3-8b", gpu, **_DECODE, **shared).latency_s)
    product_s = np.asarray(api.predict(_PRODUCT, gpu, **shared).latency_s)
    memory = decode_s / decode_s[-1]
    compute = product_s / product_s[-1]
    note = (
        f"time as predicted for the {gpu.name}: {memory_share:.0%} (memory utilisation) as "
        "a decode "
        "step, the rest as a large product"
    )
    return np.asarray(memory_share * memory + compute_share * compute), note


def make_advice(objective: Objective, gpu: Gpu | None) -> Callable[[Any, Lattice], Settings | None]:
    """Return a function that guesses settings of a card's lattice from a reading, for a controller
    to start with.
    """

    def advise(reading: Any, lattice: Lattice) -> Settings | None:
        core = lattice.find_knob(KnobRole.CORE_CLOCK)
        if core is None:
            return None
        levels = np.asarray(lattice.knobs[core].levels)
        advice = advise_clock(
            reading.power_w,
            reading.core_hz,
            reading.memory_busy,
            levels,
            objective,
            gpu,
        )
        if advice is None or advice["core_hz"] >= reading.core_hz:
            return None
        level = int(np.argmin(abs(levels - advice["core_hz"])))
        return move_knob(lattice.top, core, level)

    return advise


def watch_card(
    card: Any,
    period_s: float,
    count: int,
    objective: Objective,
    gpu: str | None,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Read a card over ``count`` periods (0: until interrupted); return means, and advice where
    they allow it.
    """
    lattice = build_card_lattice(*card.clocks_hz())
    chip = find_catalogue_gpu(card.name) if gpu is None else hardware.load_gpu(gpu)
    first = card.read()
    readings: list[Any] = []
    try:
        while count == 0 or len(readings) < count:
            sleep(period_s)
            readings.append(card.read())
            say(_describe_reading(readings[-1]))
    except KeyboardInterrupt:
        say("interrupted")
    mean = _average_readings(first, readings)
    levels = np.asarray(lattice.knobs[0].levels)
    advice = advise_clock(
        mean["power_w"],
        mean["core_hz"],
        mean["memory_busy"],
        levels,
        objective,
        chip,
    )
    reason = None
    if advice is None:
        reason = _explain_no_advice(mean)
    else:
        curves = (
            f"curves of {chip.name}" if chip is not None else "the card is not in the catalogue"
        )
        advice["assumptions"] = [LABEL, curves, *advice["assumptions"]]
    return {
        "card": card.name,
        "readings": len(readings),
        **{name: value if math.isfinite(value) else None for name, value in mean.items()},
        "phases": _count_phases(readings),
        "advice": advice,
        "why_no_advice": reason,
    }


def _describe_reading(reading: Any) -> str:
    """Say in a line what a card reports."""
    parts = []
    for name, value, form in (
        ("", reading.power_w, "{:.1f} W"),
        ("core ", reading.core_hz / 1e6, "{:.0f} MHz"),
        ("memory busy ", reading.memory_busy, "{:.0%}"),
    ):
        shown = form.format(value) if math.isfinite(value) else "unknown"
        parts.append(name + shown)
    return ", ".join(parts)


def _average_readings(first: Any, readings: list[Any]) -> dict[str, float]:
    """Return the mean of each quantity where it was read, and power by the energy counter."""
    mean = {}
    for name in SHOWN:
        values = [getattr(reading, name) for reading in readings]
        finite = [value for value in values if math.isfinite(value)]
        mean[name] = sum(finite) / len(finite) if finite else math.nan
    last = readings[-1] if readings else first
    joules = last.energy_j - first.energy_j
    seconds = last.at_s - first.at_s
    if math.isfinite(joules) and joules > 0 and seconds > 0:
        mean["power_w"] = float(joules / seconds)
    return mean


def _explain_no_advice(mean: dict[str, float]) -> str:
    """Say why there is no advice."""
    needed = {
        "power_w": "power",
        "core_hz": "the core clock",
        "memory_busy": "memory utilisation",
    }
    missing = [word for name, word in needed.items() if not math.isfinite(mean[name])]
    if missing:
        return f"the card does not report {', '.join(missing)}"
    return "no lower clock can be locked"


def _count_phases(readings: list[Any]) -> dict[str, float]:
    """Return the share of readings in each phase that the card could tell."""
    counts: dict[str, int] = {}
    for reading in readings:
        phase = reading.phase
        if phase is not None:
            counts[phase] = counts.get(phase, 0) + 1
    return {phase: number / len(readings) for phase, number in counts.items()}


def print_watched(console: Console, watched: dict[str, Any]) -> None:
    """Print what ``watch_card`` returns for people."""
    parts = []
    for key, (word, unit) in SHOWN.items():
        value = watched[key]
        shown = "unknown"
        if value is not None:
            shown = f"{value:.0%}" if unit == "%" else units.show(value, unit)
        parts.append(f"{word} {shown}")
    for phase, share in watched["phases"].items():
        parts.append(f"{phase} phase {share:.0%} of the time")
    console.print(f"{watched['card']}: {', '.join(parts)}")
    advice = watched["advice"]
    if advice is None:
        console.print(f"no advice: {watched['why_no_advice']}")
        return
    console.print(
        f"would try {advice['core_hz'] / 1e6:.0f} MHz: time {advice['slowdown']:+.1%}, "
        f"power {-advice['power_saving']:+.1%}, energy {-advice['energy_saving']:+.1%}, "
        f"ED² {-advice['ed2_gain']:+.1%}"
    )
    for note in advice["assumptions"]:
        console.print(f"  {note}")


def find_catalogue_gpu(name: str) -> Gpu | None:
    """Find the catalogue's card by what the driver calls it; None where it is not there.

    Drivers write SXM2 to SXM5 where the catalogue has sxm, and tell an H100 of that form by its
    HBM3 alone."""
    short = re.sub(r"nvidia|tesla|geforce|(sxm)\d", lambda m: m[1] or "", name.lower())
    words = short.replace("-", " ").split()
    guesses = ["-".join(words[:n]) for n in range(len(words), 0, -1)]
    if words and words[-1] == "hbm3":
        guesses.insert(0, f"{words[0]}-sxm")
    for guess in guesses:
        try:
            return hardware.load_gpu(guess)
        except WattcastError:
            continue
    return None
