"""Compare a measured run with its prediction, and name the part of the model that is most off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.errors import (
    BadInput,
    Refused,
    bad_value,
)
from wattcast.measure.window_summary import Measurement


class RunVerdictCoefficients(Coefficients):
    """When a measured run differs from its prediction, and by which term."""

    tolerance: float  # between a run and its prediction, relative
    host_share: float  # of a predicted time, above which a wrong time is first blamed on the host


VERDICTS = load_coefficients("run_verdicts", RunVerdictCoefficients)


class ModelTerm(StrEnum):
    """What to look at first."""

    NONE = "none"
    CLOCK = "clock"
    HOST = "host"
    KERNELS = "kernels"
    ENERGY = "energy"


_ADVICE = {
    ModelTerm.NONE: "Both agree within the tolerance.",
    ModelTerm.CLOCK: (
        "The clock explains it: look at the power cap, the power limit and the clock law."
    ),
    ModelTerm.HOST: "The GPU waited for the host: calibrate the launch cost (--host-launch).",
    ModelTerm.KERNELS: (
        "The kernels took other cycles than predicted: look for missing operators, tiles and "
        "traffic."
    ),
    ModelTerm.ENERGY: (
        "Time agrees and power does not: look at the energies, the data (toggling) and temperature."
    ),
}


@dataclass(frozen=True)
class RunVerdict:
    """Ratios measured over predicted, the term that is off most, and a sentence that says so."""

    latency: float
    power: float
    energy: float
    clock: float | None
    term: ModelTerm
    sentence: str

    def plain(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class _PredictedFigures:
    """The figures of a prediction that a run is compared with."""

    latency_s: float
    power_w: float
    clock_hz: float
    busy_s: float

    @property
    def host_share(self) -> float:
        """Share of the time in which the GPU waits for the host."""
        return 1.0 - self.busy_s / self.latency_s


def compare_with_prediction(
    measurement: Measurement,
    predicted: Mapping[str, Any],
    iterations: int = 1,
    where: str = "prediction",
) -> RunVerdict:
    """Compare a measured window with the first prediction of ``wattcast predict --json``, and name
    the term at fault.

    ``iterations`` is how often the window ran the predicted workload. Power is the mean over the
    window, so start-up and loading belong outside it.
    """
    figures = _read_figures(predicted, where)
    if iterations < 1:
        raise bad_value("--iterations", "a whole number of at least 1", iterations)
    if not measurement.power_w:
        reasons = ", ".join(measurement.flags) or "no power"
        raise Refused(f"{measurement.name}: {reasons}; nothing to compare.")

    latency = measurement.duration_s / iterations / figures.latency_s
    power = measurement.power_w / figures.power_w
    clock = None
    if measurement.sm_clock_hz:
        clock = measurement.sm_clock_hz / figures.clock_hz
    term = _choose_term(latency, power, clock, figures.host_share)
    sentence = _describe_ratios(latency, power, clock, figures.host_share)
    return RunVerdict(
        latency,
        power,
        latency * power,
        clock,
        term,
        f"{sentence} {_ADVICE[term]}",
    )


def _read_figures(predicted: Mapping[str, Any], where: str) -> _PredictedFigures:
    """Return the figures of the first prediction, or raise an error that says what is wrong."""
    try:
        first = predicted["predictions"][0]
        figures = {name: float(first[name]) for name in ("latency_s", "power_w", "clock_hz")}
        busy_s = float(first.get("busy_s", figures["latency_s"]))
    except (KeyError, IndexError, TypeError, ValueError):
        raise BadInput(f"{where}: expected the output of `wattcast predict --json`.") from None
    for name, value in figures.items():
        if not 0.0 < value < math.inf:
            raise bad_value(f"{where}: {name}", "a finite number above zero", value)
    return _PredictedFigures(**figures, busy_s=busy_s)


def _choose_term(
    latency: float,
    power: float,
    clock: float | None,
    host_share: float,
) -> ModelTerm:
    """Name the part of the model to look at first, from ratios of measured over predicted.

    The time ratio is split into a clock part and a cycle part (time = cycles / clock):

    - time agrees and power differs: the energies, or the assumed data (toggling);
    - the clock differs and cycles agree: the governor (power under the cap, or the clock law);
    - cycles differ and power fell: the GPU waited for the host (launch cost, gaps, missing graph);
    - cycles differ and power did not fall: the kernels (tiles, traffic, missing operators).
    """
    late = abs(latency - 1.0)
    if late <= VERDICTS.tolerance:
        return ModelTerm.ENERGY if abs(power - 1.0) > VERDICTS.tolerance else ModelTerm.NONE
    if clock is not None:
        cycles = latency * clock
        if 2.0 * abs(clock - 1.0) > late > abs(cycles - 1.0):
            return ModelTerm.CLOCK
    has_waited = latency > 1.0 and power < 1.0 - 0.5 * VERDICTS.tolerance
    if has_waited or host_share > VERDICTS.host_share:
        return ModelTerm.HOST
    return ModelTerm.KERNELS


def _describe_ratios(
    latency: float,
    power: float,
    clock: float | None,
    host_share: float,
) -> str:
    """Return a sentence with the differences between a run and its prediction."""
    ratios = [("measured time is", latency), ("power", power), ("energy", latency * power)]
    if clock is not None:
        ratios.append(("clock", clock))
    parts = [f"{name} {100.0 * (ratio - 1.0):+.1f} %" for name, ratio in ratios]
    share = ""
    if host_share > 0.0:
        share = f" ({100 * host_share:.0f} % of it was predicted as host time)"
    return f"{', '.join(parts)} against the prediction{share}."
