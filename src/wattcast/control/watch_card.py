"""Watch a card and estimate from its readings which clock would save energy. Nothing is set.

How time follows the core clock is the predictor's law for the card: the share of the time in which
memory is busy goes as a decode step, which memory holds back until L2 slows down with the clock,
and the rest as a product of large matrices. Power is idle power, which follows the clock, plus switched power, which follows
V² f and the rate of work. Idle power and V(f) come from the card's bundle: fitted where the card
was measured, carried over elsewhere. A card the catalogue does not know gets the A100's voltage
curve, a share of the present power, and a way to device memory that follows the clock below a knee. The result is advice to try, not a forecast, and is labelled
so wherever it is shown."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast import hardware
from wattcast.control.plants import KnobRole, Lattice, Settings, build_card_lattice, move_knob
from wattcast.control.search_problem import Objective
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.power.module_power import ModulePower
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.timeline import MEMORY_KNEE

if TYPE_CHECKING:
    from rich.console import Console

# Of the top clock; the A100-PCIE's published V(f): 0.694 V to 1020 MHz, 0.894 V at 1410 MHz.
FLAT_TO = 0.72
TOP_OVER_FLAT = 1.29
IDLE_SHARE = 0.2  # of present power, where the catalogue gives no idle power
LABEL = "an estimate from readings; nothing was set"
SHOWN = {  # quantities shown of a card: name and unit, % for shares
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
    if not all(math.isfinite(x) for x in readings) or power_w <= 0 or core_hz <= 0:
        return None
    levels = levels_hz[levels_hz <= core_hz * 1.0001]
    if levels.size == 0:
        return None
    share = min(max(memory_busy, 0.0), 1.0)
    clocks = np.append(levels, core_hz)
    slower, note = follow_clock(clocks, share, float(levels_hz[-1]), gpu)
    notes = [note]
    bundle = None if gpu is None else bundle_for(gpu)
    if bundle is not None:
        curve = np.minimum(bundle.power.idle_power_w(clocks), power_w)
        idle = curve[:-1]
        idle_now = float(curve[-1])
        notes.append(f"idle power by clock from the {bundle.status} bundle of {bundle.gpu}")
    else:
        idle = np.full(levels.shape, IDLE_SHARE * power_w)
        idle_now = IDLE_SHARE * power_w
        notes.append(f"idle power taken as {IDLE_SHARE:.0%} of the power now")
    if bundle is not None and isinstance(bundle.power, ModulePower):
        voltage = bundle.power.voltage.level_at(clocks)
        notes.append(f"voltage by clock from the {bundle.status} bundle of {bundle.gpu}")
    else:
        voltage = np.interp(clocks / float(levels_hz[-1]), [FLAT_TO, 1.0], [1.0, TOP_OVER_FLAT])
        notes.append("voltage by clock as published for the A100-PCIE")
    duration = slower[:-1] / slower[-1]
    power = idle + max(power_w - idle_now, 0.0) * (voltage[:-1] / voltage[-1]) ** 2 / duration
    best = int(np.argmin(objective.log_scores(duration, power, np.asarray(1.0))))
    t = float(duration[best])
    p = float(power[best] / power_w)
    gains = {
        "slowdown": t - 1,
        "power_saving": 1 - p,
        "energy_saving": 1 - p * t,
        "ed2_gain": 1 - p * t**3,
    }
    return {"core_hz": float(levels[best]), **gains, "assumptions": notes}


_DECODE: dict[str, Any] = {"phase": "decode", "batch": 8, "seq": 1024}  # of llama3-8b
_PRODUCT = {"name": "product", "ops": [{"op": "linear", "m": 8192, "n": 8192, "k": 8192}]}


def follow_clock(
    clocks_hz: Array, memory_share: float, top_hz: float, gpu: Gpu | None
) -> tuple[Array, str]:
    """Return the time at each clock, up to a factor, and a sentence about where it comes from."""
    if gpu is None:
        stretch = top_hz / clocks_hz
        memory = np.maximum(1.0, MEMORY_KNEE * stretch)
        said = f"time follows the core clock, that of memory below {MEMORY_KNEE:.0%} of the top"
        return memory_share * memory + (1.0 - memory_share) * stretch, said
    from wattcast.predictor import api  # a card that is not in the catalogue needs no predictor

    # a card may reach clocks that its catalogue entry does not name: take the nearest that it does
    lowest_hz = float(np.min(gpu.clocks.lowest_hz))
    highest_hz = float(np.max(gpu.clocks.max_hz))
    asked_hz = np.clip(clocks_hz, lowest_hz, highest_hz)
    shared: dict[str, Any] = {"clock": asked_hz, "power_limit": 1e6, "force": True}
    decode_s = np.asarray(api.predict("llama3-8b", gpu, **_DECODE, **shared).latency_s)
    product_s = np.asarray(api.predict(_PRODUCT, gpu, **shared).latency_s)
    mixed = (
        memory_share * decode_s / decode_s[-1] + (1.0 - memory_share) * product_s / product_s[-1]
    )
    said = (
        f"time as predicted for the {gpu.name}: {memory_share:.0%} (memory utilisation) as a decode "
        "step, the rest as a large product"
    )
    return np.asarray(mixed), said


def make_advice(objective: Objective, gpu: Gpu | None) -> Callable[[Any, Lattice], Settings | None]:
    """Return a function that guesses settings of a card's lattice from a reading, for a controller
    to start with.
    """

    def advise(reading: Any, lattice: Lattice) -> Settings | None:
        which = lattice.find_knob(KnobRole.CORE_CLOCK)
        if which is None:
            return None
        levels = np.asarray(lattice.knobs[which].levels)
        found = advise_clock(
            reading.power_w, reading.core_hz, reading.memory_busy, levels, objective, gpu
        )
        if found is None or found["core_hz"] >= reading.core_hz:
            return None
        return move_knob(lattice.top, which, int(np.argmin(abs(levels - found["core_hz"]))))

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
    readings: list[Any] = [card.read()]
    try:
        while count == 0 or len(readings) <= count:
            sleep(period_s)
            readings.append(card.read())
            now = readings[-1]
            first = ("", now.power_w, "{:.1f} W"), ("core ", now.core_hz / 1e6, "{:.0f} MHz")
            parts = (*first, ("memory busy ", now.memory_busy, "{:.0%}"))
            say(
                ", ".join(
                    name + (form.format(v) if math.isfinite(v) else "unknown")
                    for name, v, form in parts
                )
            )
    except KeyboardInterrupt:
        say("interrupted")
    read_values = {
        name: [v for r in readings[1:] if math.isfinite(v := getattr(r, name))] for name in SHOWN
    }
    mean = {
        name: sum(known) / len(known) if known else math.nan for name, known in read_values.items()
    }
    joules = readings[-1].energy_j - readings[0].energy_j
    seconds = readings[-1].at_s - readings[0].at_s
    if math.isfinite(joules) and joules > 0 and seconds > 0:
        mean["power_w"] = float(joules / seconds)
    read = mean["power_w"], mean["core_hz"], mean["memory_busy"]
    advice = advise_clock(*read, np.asarray(lattice.knobs[0].levels), objective, chip)
    why_not = None
    if advice is None:
        names = ("power", "the core clock", "memory utilisation")
        missing = [
            name for name, value in zip(names, read, strict=True) if not math.isfinite(value)
        ]
        why_not = (
            f"the card does not tell {', '.join(missing)}"
            if missing
            else "no lower clock can be locked"
        )
    phases = [phase for r in readings[1:] if (phase := r.phase) is not None]
    named = f"curves of {chip.name}" if chip is not None else "the card is not in the catalogue"
    return {
        "card": card.name,
        "readings": len(readings) - 1,
        **{name: value if math.isfinite(value) else None for name, value in mean.items()},
        "phases": {
            phase: phases.count(phase) / (len(readings) - 1) for phase in dict.fromkeys(phases)
        },
        "advice": advice and {**advice, "assumptions": [LABEL, named, *advice["assumptions"]]},
        "why_no_advice": why_not,
    }


def print_watched(console: Console, found: dict[str, Any]) -> None:
    """Print what ``watch_card`` found for people."""
    said = []
    for key, (word, unit) in SHOWN.items():
        value = found[key]
        shown = (
            "unknown"
            if value is None
            else f"{value:.0%}"
            if unit == "%"
            else units.show(value, unit)
        )
        said.append(f"{word} {shown}")
    said += [f"{phase} phase {share:.0%} of the time" for phase, share in found["phases"].items()]
    console.print(f"{found['card']}: {', '.join(said)}")
    advice = found["advice"]
    if advice is None:
        console.print(f"no advice: {found['why_no_advice']}")
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
