"""Show what a sensor of the driver would have read of a power curve.

A sensor averages power over a window, publishes the average at every update, and the caller sees
the last one published. With E the energy up to a moment, window w, update period u and a call that
takes c, the reading at time t is

    P(t) = (E(n u) - E(n u - w)) / w    with n = floor((t - c) / u)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array
from wattcast.timeseries.power_curve import PowerCurve

# NVML's plain reading of these is the instant one; of all newer chips it is the average.
_INSTANT_ARCHITECTURES = ("kepler", "maxwell", "pascal", "volta", "turing")
_INSTANT_CHIPS = ("a100", "a30")  # GA100


class SensorCoefficients(Coefficients):
    """Windows and periods of the driver's power sensors."""

    instant_window_s: float
    average_window_s: float
    update_s: float
    call_s: float


SENSORS = load_coefficients("power_sensors", SensorCoefficients)


class SensorKind(StrEnum):
    """A way to read a card's power."""

    NVML = "nvml"  # what nvidia-smi shows: average or instant, by the card
    INSTANT = "instant"
    AVERAGE = "average"
    COUNTER = "counter"  # steps of the energy counter over the time between them


def sensor_window_s(
    kind: SensorKind,
    gpu: str,
    architecture: str,
) -> float:
    """Return the seconds that a sensor of a card averages over.

    >>> sensor_window_s(SensorKind.NVML, "a100-sxm-80gb", "ampere")
    0.025
    >>> sensor_window_s(SensorKind.NVML, "h200", "hopper")
    1.0
    """
    if kind is SensorKind.COUNTER:
        return SENSORS.update_s
    is_instant = architecture in _INSTANT_ARCHITECTURES or gpu.startswith(_INSTANT_CHIPS)
    if kind is SensorKind.INSTANT or (kind is SensorKind.NVML and is_instant):
        return SENSORS.instant_window_s
    return SENSORS.average_window_s


def read_sensor(
    curves: Sequence[PowerCurve],
    times_s: Array,
    window_s: float,
) -> Array:
    """Return what the sensors of all GPUs show together at each time, in watts."""
    updates = np.floor((times_s - SENSORS.call_s) / SENSORS.update_s)
    end_s = updates * SENSORS.update_s
    total_j = np.zeros(len(times_s))
    for curve in curves:
        ended_j = curve.energy_until(end_s).sum(axis=-1)
        begun_j = curve.energy_until(end_s - window_s).sum(axis=-1)
        total_j += ended_j - begun_j
    return np.asarray(total_j / window_s)
