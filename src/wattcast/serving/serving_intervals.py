"""Hold how far measured traffic lies from its simulation: ``coefficients/serving_interval.yaml``.

The host makes most of it. Its launches take up to twice as long in one minute as in the next, on
the same machine, and nothing tells beforehand (``lab.fit.host_states``)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from wattcast.coefficients import Coefficients, load_coefficients


class ServingIntervals(Coefficients):
    """Half-widths of intervals that hold nine in ten runs, as shares of the figure."""

    ttft: float
    ttft_tail: float
    tpot: float
    tpot_tail: float
    throughput: float
    power: float
    energy: float


INTERVALS = load_coefficients("serving_interval", ServingIntervals)

# figure of a run -> its half-width, and the predictor's interval that goes into it
_RUN_FIGURES = {
    "ttft_s": ("ttft", "tpot_s"),
    "tpot_s": ("tpot", "tpot_s"),
    "power_w": ("power", "power_w"),
    "energy_j": ("energy", "energy_j"),
}


def widen_to_runs(
    model_interval: Mapping[str, tuple[float, float]],
) -> dict[str, tuple[float, float]]:
    """Return the factors on simulated figures between which nine in ten measured runs lie.

    ``model_interval`` is the predictor's interval of the mean decode step. What traffic adds is
    independent of it, so that both are added as squares of logarithms.

    >>> low, high = widen_to_runs({"tpot_s": (0.9, 1.1)})["tpot_s"]
    >>> low < 0.9, high > 1.1
    (True, True)
    """
    factors = {}
    for name, (serving, predicted) in _RUN_FIGURES.items():
        half = getattr(INTERVALS, serving)
        low, high = model_interval.get(predicted, (1.0, 1.0))
        factors[name] = (
            math.exp(-math.hypot(half, math.log(low))),
            math.exp(math.hypot(half, math.log(high))),
        )
    return factors
