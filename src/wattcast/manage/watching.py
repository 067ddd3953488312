"""Observe a card, and say what the controller would try there. Sets nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast import hardware, units
from wattcast.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.manage.advice import Advice, advise
from wattcast.manage.live import ControlledCard, lattice_of
from wattcast.manage.objective import Objective

if TYPE_CHECKING:
    from rich.console import Console

READ = {  # what is shown of a card: name and unit, % for shares
    "power_w": ("power", "W"),
    "core_hz": ("core clock", "Hz"),
    "busy": ("utilisation", "%"),
    "memory_busy": ("memory utilisation", "%"),
}
LABEL = "an estimate from readings; nothing was set"


def watch(
    card: ControlledCard,
    period_s: float,
    count: int,
    objective: Objective,
    gpu: str | None,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Readings over ``count`` periods (0: until interrupted), their means, and advice where they allow it."""
    lattice = lattice_of(*card.clocks_hz())
    chip = chip_named(card.name) if gpu is None else hardware.load(gpu)
    readings: list[Any] = [card.read()]
    try:
        while count == 0 or len(readings) <= count:
            sleep(period_s)
            readings.append(card.read())
            say(_line(readings[-1]))
    except KeyboardInterrupt:
        say("interrupted")
    power_w = _mean_power(readings)
    core_hz = _mean([r.core_hz for r in readings[1:]])
    memory_busy = _mean([r.memory_busy for r in readings[1:]])
    advice = advise(power_w, core_hz, memory_busy, np.asarray(lattice.knobs[0].levels), objective, chip)
    return {
        "card": card.name,
        "readings": len(readings) - 1,
        "power_w": _known(power_w),
        "core_hz": _known(core_hz),
        "busy": _known(_mean([r.busy for r in readings[1:]])),
        "memory_busy": _known(memory_busy),
        "advice": None if advice is None else _plain(advice, chip),
        "why_no_advice": None if advice is not None else _why_not(power_w, core_hz, memory_busy),
    }


def print_watched(console: Console, found: dict[str, Any]) -> None:
    """The outcome for people."""
    said = [f"{word} {_shown(found[key], unit)}" for key, (word, unit) in READ.items()]
    console.print(f"{found['card']}: {', '.join(said)}")
    advice = found["advice"]
    if advice is None:
        console.print(f"no advice: {found['why_no_advice']}")
        return
    console.print(
        f"would try {advice['core_hz'] / 1e6:.0f} MHz: time {advice['slowdown']:+.1%}, "
        f"power {-advice['power_saving']:+.1%}, energy {-advice['energy_saving']:+.1%}, "
        f"ED² {-advice['ed2_gain']:+.1%} ({LABEL})"
    )
    for note in advice["assumptions"]:
        console.print(f"  {note}")


def _plain(advice: Advice, chip: Gpu | None) -> dict[str, Any]:
    named = f"curves of {chip.name}" if chip is not None else "the card is not in the catalogue"
    return {
        "core_hz": advice.core_hz,
        "slowdown": advice.slowdown,
        "power_saving": advice.power_saving,
        "energy_saving": advice.energy_saving,
        "ed2_gain": advice.ed2_gain,
        "assumptions": [LABEL, named, *advice.assumptions],
    }


def chip_named(name: str) -> Gpu | None:
    """The catalogue's card, guessed from what the driver calls it; None: not there."""
    words = name.lower().replace("nvidia", "").split()
    for guess in ("-".join(words), words[0] if words else ""):
        try:
            return hardware.load(guess)
        except WattcastError:
            continue
    return None


def _mean_power(readings: list[Any]) -> float:
    joules = readings[-1].energy_j - readings[0].energy_j
    seconds = readings[-1].at_s - readings[0].at_s
    if math.isfinite(joules) and joules > 0 and seconds > 0:
        return float(joules / seconds)
    return _mean([r.power_w for r in readings[1:]])


def _mean(values: list[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def _shown(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0%}" if unit == "%" else units.show(value, unit)


def _why_not(power_w: float, core_hz: float, memory_busy: float) -> str:
    read = {"power": power_w, "the core clock": core_hz, "memory utilisation": memory_busy}
    missing = [name for name, value in read.items() if not math.isfinite(value)]
    return f"the card does not tell {', '.join(missing)}" if missing else "no lower clock can be locked"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _line(reading: Any) -> str:
    known = {
        "": (reading.power_w, "{:.1f} W"),
        "core ": (reading.core_hz / 1e6, "{:.0f} MHz"),
        "memory busy ": (reading.memory_busy, "{:.0%}"),
    }
    return ", ".join(
        f"{name}{form.format(v) if math.isfinite(v) else 'unknown'}" for name, (v, form) in known.items()
    )
