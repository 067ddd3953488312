"""Measure what control saves, with an interval: periods at the chosen settings beside periods as it
was before.

Once the controller has settled, or has searched for long, periods come in pairs, one at the chosen
settings and one at the reference, in random order, so that neither a drift of the program or the
card nor a rhythm of its work favours one side. With d the difference of the logarithms in a pair,
the saving is exp(mean d) - 1 and its 95 % interval exp(mean d ± t·s/√n) - 1, with Student's t for n
- 1 degrees of freedom. Nothing that was measured during the search enters it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.control.live_plant import LIVE
from wattcast.control.plants import Observation, Settings
from wattcast.control.run_memory import log_time_per_work

TWO_SIDED_Z = 1.959964  # 97.5 % quantile of the normal distribution
# Factors of powers of z, and the divisor, of each term of Student's t.
STUDENT_SERIES: tuple[tuple[dict[int, int], int], ...] = (
    ({3: 1, 1: 1}, 4),
    ({5: 5, 3: 16, 1: 3}, 96),
    ({7: 3, 5: 19, 3: 17, 1: -15}, 384),
)
LARGEST_LOG = 700.0  # whose exponential a float can hold


@dataclass(frozen=True)
class SavingsInterval:
    """Hold a relative change with its 95 % interval: -0.1 is ten percent less."""

    change: float
    low: float
    high: float
    pairs: int

    @property
    def is_shown(self) -> bool:
        """Tell whether the data show any change: there are enough pairs and the interval does not
        hold zero.
        """
        return self.pairs >= LIVE.least_pairs and not self.low <= 0.0 <= self.high

    def __str__(self) -> str:
        return f"{self.change:+.1%} (95 %: {self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True)
class MeasuredSavings:
    """Hold the changes of energy and time per unit of work at settings, against what the card had
    before.
    """

    settings: Settings
    energy: SavingsInterval
    time: SavingsInterval

    def describe(self, where: str) -> str:
        """Say what was saved, for people."""
        energy = self.energy
        time = self.time
        if energy.pairs < LIVE.least_pairs:
            return (
                f"No change shown: {energy.pairs} of the {LIVE.least_pairs} pairs of "
                "periods that it takes."
            )
        if not energy.is_shown:
            return (
                f"No change shown: energy {energy} per unit of work at {where}, "
                f"{energy.pairs} pairs of periods."
            )
        return (
            f"{where}: energy {energy}, time {time} per unit of work against before, "
            f"{energy.pairs} pairs of periods."
        )


class ReferencePairs:
    """Interleave reference periods with periods at the settings that are judged, and collect the
    differences.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._judged: Settings | None = None
        self._queue: list[Settings] = []  # of the pair under way
        self._half: dict[Settings, Observation] = {}
        self._rest = 0
        # By settings: differences of log energy and time.
        self._differences: dict[Settings, list[tuple[float, float]]] = {}

    def is_enough(self, settings: Settings) -> bool:
        """Tell whether the saving of these settings is known as well as it has to be."""
        return len(self._differences.get(settings, ())) >= LIVE.least_pairs

    def choose(
        self,
        settings: Settings,
        default: Settings,
    ) -> Settings:
        """Return the settings of the next period: one half of a pair, or those that are judged."""
        if settings != self._judged:
            self._judged = settings
            self._queue = []
            self._half = {}
            self._rest = 0
        if settings == default:
            return settings
        if not self._queue:
            if self._rest > 0:
                self._rest -= 1
                return settings
            order = self._random.choice((-1, 1))
            self._queue = [settings, default][::order]
            self._half = {}
            pairs = len(self._differences.get(settings, ())) + 1
            self._rest = LIVE.rest_periods if pairs >= LIVE.least_pairs else 0
        return self._queue[-1]

    def record(self, observation: Observation) -> None:
        """Note a period that ran; a pair counts when both of its periods are usable."""
        if not self._queue or observation.settings != self._queue[-1]:
            return
        if not observation.usable:
            self._queue = []
            self._half = {}
            return
        self._half[self._queue.pop()] = observation
        if not self._queue and self._judged is not None:
            chosen = self._half.pop(self._judged)
            (reference,) = self._half.values()
            time = log_time_per_work(chosen) - log_time_per_work(reference)
            energy = time + math.log(chosen.power_w) - math.log(reference.power_w)
            self._differences.setdefault(self._judged, []).append((energy, time))

    def measure(self) -> MeasuredSavings | None:
        """Return the savings at the settings judged last, or with the most pairs where those have
        too few.
        """
        if not self._differences:
            return None
        settings = self._judged
        if settings is None or not self.is_enough(settings):
            settings = max(self._differences, key=lambda s: len(self._differences[s]))
        energy, time = zip(*self._differences[settings], strict=True)
        return MeasuredSavings(settings, estimate_change(energy), estimate_change(time))


def estimate_change(differences: Sequence[float]) -> SavingsInterval:
    """Return the relative change that paired differences of logarithms show, with its 95 %
    interval.
    """
    pairs = len(differences)
    if pairs < 2:
        return SavingsInterval(math.expm1(sum(differences)), -1.0, math.inf, pairs)
    mean = sum(differences) / pairs
    variance = sum((difference - mean) ** 2 for difference in differences) / (pairs - 1)
    half = student_t(pairs - 1) * math.sqrt(variance / pairs)
    high = math.expm1(min(mean + half, LARGEST_LOG))
    return SavingsInterval(math.expm1(mean), math.expm1(mean - half), high, pairs)


def student_t(freedom: int, z: float = TWO_SIDED_Z) -> float:
    """Return a quantile of Student's t, 97.5 % by default, from the normal one z (Abramowitz and
    Stegun 26.7.5).

    t = z + (z³ + z)/(4ν) + (5z⁵ + 16z³ + 3z)/(96ν²) + (3z⁷ + 19z⁵ + 17z³ - 15z)/(384ν³); within 0.3
    % from ν = 4.

    >>> round(student_t(9), 2)
    2.26
    """
    v = max(freedom, 1)
    t = z
    for power, (terms, divisor) in enumerate(STUDENT_SERIES, start=1):
        numerator = sum(factor * z**exponent for exponent, factor in terms.items())
        t += numerator / divisor / v**power
    return t
