"""Measurement beside prediction: how far off, and which term of the model to look at first.

Plain numbers on both sides, so that whoever predicts need not be known here. The time ratio is split
into a clock part and a cycle part (time = cycles / clock); what is left over points at a term:

- the clock is off and cycles agree: the governor (power under the cap, or the clock law);
- cycles are off and power fell: the GPU waited, so the host (launch cost, gaps, missing graph);
- cycles are off and power did not fall: the kernels (tiles, traffic, operators that are missing);
- time agrees and power is off: the energies, or the data (toggling) assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from wattcast.errors import BadInput, Refused, bad_value
from wattcast.measure.measurement import Measurement


class Term(StrEnum):
    """What to look at first."""

    NONE = "none"
    CLOCK = "clock"
    HOST = "host"
    KERNELS = "kernels"
    ENERGY = "energy"


@dataclass(frozen=True)
class Figures:
    """One side of the comparison; ``clock_hz`` as NVML reports it, ``host_share`` of time the GPU waits."""

    latency_s: float
    power_w: float
    clock_hz: float | None = None
    host_share: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            wrong = value is not None and not (math.isfinite(value) and value >= 0.0)
            if wrong or (name in ("latency_s", "power_w", "clock_hz") and value == 0.0):
                raise bad_value(f"comparison.{name}", "a finite number above zero", value)


@dataclass(frozen=True)
class Verdict:
    """Ratios measured over predicted, the term that is off most, and a sentence that says so."""

    latency: float
    power: float
    energy: float
    clock: float | None
    term: Term
    sentence: str

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def compare(measured: Figures, predicted: Figures, tolerance: float = 0.05) -> Verdict:
    """Which term explains the difference; within ``tolerance`` none does."""
    latency, power = measured.latency_s / predicted.latency_s, measured.power_w / predicted.power_w
    clock = measured.clock_hz / predicted.clock_hz if measured.clock_hz and predicted.clock_hz else None
    term = _term(latency, power, clock, predicted.host_share, tolerance)
    return Verdict(latency, power, latency * power, clock, term, _sentence(latency, power, clock, term, predicted))


def against_prediction(
    measurement: Measurement, predicted: Mapping[str, Any], iterations: int = 1, where: str = "prediction"
) -> Verdict:
    """A measured window against the first prediction of ``wattcast predict --json``.

    ``iterations`` is how often the window ran the predicted workload. Power is the mean over the window,
    so start-up and loading belong outside it.
    """
    try:
        first = predicted["predictions"][0]
        latency_s = float(first["latency_s"])
        waiting = max(1.0 - float(first.get("busy_s", latency_s)) / latency_s, 0.0)
        figures = Figures(latency_s, float(first["power_w"]), float(first["clock_hz"]), waiting)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        raise BadInput(f"{where}: expected the output of `wattcast predict --json`.") from None
    if iterations < 1:
        raise bad_value("--iterations", "a whole number of at least 1", iterations)
    if measurement.power_w is None:
        raise Refused(f"{measurement.name}: {', '.join(measurement.flags) or 'no power'}; nothing to compare.")
    seen = Figures(measurement.duration_s / iterations, measurement.power_w, measurement.sm_clock_hz)
    return compare(seen, figures)


def _term(latency: float, power: float, clock: float | None, host_share: float | None, tolerance: float) -> Term:
    late, hot = abs(latency - 1.0) > tolerance, abs(power - 1.0) > tolerance
    if not late and not hot:
        return Term.NONE
    if not late:
        return Term.ENERGY
    cycles = latency * (clock or 1.0)
    if clock is not None and abs(clock - 1.0) > 0.5 * abs(latency - 1.0) and abs(cycles - 1.0) < abs(latency - 1.0):
        return Term.CLOCK
    waited = latency > 1.0 and power < 1.0 - 0.5 * tolerance
    bound = (host_share or 0.0) > 0.3
    return Term.HOST if waited or bound else Term.KERNELS


_ADVICE = {
    Term.NONE: "Both agree within the tolerance.",
    Term.CLOCK: "The clock explains it: look at the power cap, the power limit and the clock law.",
    Term.HOST: "The GPU waited for the host: calibrate the launch cost (--host-launch).",
    Term.KERNELS: "The kernels took other cycles than predicted: look for missing operators, tiles and traffic.",
    Term.ENERGY: "Time agrees and power does not: look at the energies, the data (toggling) and the temperature.",
}


def _sentence(latency: float, power: float, clock: float | None, term: Term, predicted: Figures) -> str:
    parts = [f"measured time is {_off(latency)}", f"power {_off(power)}", f"energy {_off(latency * power)}"]
    if clock is not None:
        parts.append(f"clock {_off(clock)}")
    share = f" ({100 * predicted.host_share:.0f} % of it was predicted as host time)" if predicted.host_share else ""
    return f"{', '.join(parts)} against the prediction{share}. {_ADVICE[term]}"


def _off(ratio: float) -> str:
    """``+3.1 %``."""
    return f"{100.0 * (ratio - 1.0):+.1f} %"
