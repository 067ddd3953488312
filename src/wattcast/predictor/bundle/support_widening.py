"""How much wider intervals are away from what was measured: other cards, kernels, clocks, limits,
hosts and GPUs.

    log(measured on another card / predicted) = error of the model + card + card x kernel

``CardSpread`` is the standard deviation of the last two terms together. ``Widening`` holds what the
interval of a kernel gains with its distance from measured rows and with a reason to be outside of
them (``OutsideReason``). ``LearnedDistances`` is ``distances.yaml``: these two where a bundle has
none of its own, and what was learned from rows of several GPUs, clocks, limits and hosts
(``wattcast/lab/validate/public_checks/learn_distances.py``). YAML is read into the classes as they
stand.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache, cached_property
from typing import Any

import msgspec
import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.core.strict_files import read_shipped_yaml

# of |x|, x standard normal
NORMAL_MEDIAN = 0.6745
NORMAL_P90 = 1.6449
_WIDEST = 5.0  # half-width of logs; a factor of 150 is a damaged file


class CardSpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Standard deviations of the logarithm of one kernel's figure on another card over that on this
    one.
    """

    latency: float
    power: float
    cards: int  # that were measured; 1: the figures are those of ``cards.yaml``
    source: str

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("power", self.power)):
            if not 0.0 <= value < 1.0:
                expected = "a standard deviation of logs, from 0 to below 1"
                raise bad_value(f"cards.{name}", expected, value)


WIDEST_SPREAD = 0.99  # that a ``CardSpread`` may hold
THIS_CARD = CardSpread(0.0, 0.0, 1, "the card that was measured")


class PublishedSpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Differences between two runs of the same kernels: latency at the median, power at the 90th
    percentile.
    """

    latency_median: float
    power_p90: float
    # differences between cards that these figures weigh as much as, beside measured ones
    counts_for: float
    source: str


def published_spread() -> CardSpread:
    """Return the spread of cards to assume where only one card was measured."""
    published = learned_distances().cards
    return CardSpread(
        latency=published.latency_median / NORMAL_MEDIAN,
        power=published.power_p90 / NORMAL_P90,
        cards=1,
        source=published.source,
    )


NearnessLine = tuple[float, float, float]  # a, b, c of ``nearness_scale``
UNSCALED: NearnessLine = (1.0, 0.0, 1.0)
OUTWARD = np.array([-1.0, 1.0])  # directions in which a low and a high end move out


class OutsideReason(StrEnum):
    """Why a kernel is outside what was measured."""

    KIND = "kind"  # no kernel of its kind, or too few functions of that kind to speak for another
    FORM = "form"  # its function, where many others of the same kernel were measured
    DTYPE = "dtype"  # its number format
    SIZE = "size"  # a size beyond the range


class ReasonWidening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Half-widths in logs by which the ends of an interval move out for one reason, and what they
    rest on.
    """

    latency: float
    power: float
    rows: int = 0  # left out, of bursts and sustained rows together
    kinds: int = 0  # things left out in turn

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("power", self.power)):
            if not 0.0 <= value < _WIDEST:
                expected = "a half-width of logs, from 0 to below 5"
                raise bad_value(f"widening.{name}", expected, value)


class Widening(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """What distance from measured rows and unmeasured things add to the interval of a kernel."""

    near: NearnessLine  # of latency
    apart: dict[OutsideReason, ReasonWidening]
    source: str
    near_power: NearnessLine = UNSCALED
    # of older bundles, and unused: ``LearnedDistances.together``
    among: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for line in (self.near, self.near_power):
            if not (line[0] > 0.0 and line[1] >= 0.0 and 0.0 <= line[2] <= 1.0):
                raise bad_value("widening.near", "a above 0, b of 0 or more, c from 0 to 1", line)
        missing = [str(reason) for reason in OutsideReason if reason not in self.apart]
        if missing:
            lacking = f"none for {', '.join(missing)}"
            raise bad_value("widening.apart", "a half-width for every reason", lacking)

    def with_nearness(self, near: tuple[NearnessLine, NearnessLine]) -> Widening:
        """Return this widening with other nearness lines of latency and of power."""
        return msgspec.structs.replace(self, near=near[0], near_power=near[1])

    def without_sizes(self) -> Widening:
        """Return this widening for ends that hold rows of every size and function of a kind."""
        nothing = ReasonWidening(0.0, 0.0)
        apart = {
            **self.apart,
            OutsideReason.SIZE: nothing,
            OutsideReason.FORM: nothing,
        }
        return msgspec.structs.replace(self, apart=apart)

    def scale(self, near: Array | None) -> Array | None:
        """Return the factors on log-ends of latency and of power, ``(2, kernel)``; None where all
        are 1.

        ``near`` is the nearness of each kernel, ``(2, kernel)``, NaN where nothing was learned.

        >>> default_widening().scale(np.array([[0.5], [0.5]])) is None
        True
        """
        if near is None or self.near == self.near_power == UNSCALED:
            return None
        return nearness_scale(near, self._lines)

    @cached_property
    def _lines(self) -> Array:
        return np.array([self.near, self.near_power]).T[..., np.newaxis]


def nearness_scale(near: Array, line: NearnessLine | Array) -> Array:
    """Return a + b·(1 - min(near, c)) of ``line`` = (a, b, c); 1 where the nearness is NaN.

    >>> nearness_scale(np.array([1.0, 0.5, np.nan]), (0.5, 1.0, 0.75)).tolist()
    [0.75, 1.0, 1.0]
    """
    scale = line[0] + line[1] * (1.0 - np.minimum(near, line[2]))
    return np.asarray(np.where(np.isnan(scale), 1.0, scale))


def default_widening() -> Widening:
    """Return the widening of a bundle whose rows are too few to learn its own."""
    return learned_distances().widening


class ConditionWidening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Half-widths in logs that one unit of distance adds, and the distance up to which a prediction
    is near.
    """

    unit: str
    near: float
    latency: float
    power: float
    rows: int
    source: str


class LearnedPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number for latency and one for power, learned from so many rows."""

    latency: float
    power: float
    rows: int
    source: str


class LatencySpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A half-width of the latency in logs, learned from so many rows."""

    latency: float
    rows: int
    source: str


class HostSpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a host over the one assumed: low and high ends of 90 % of runs that it holds
    up.
    """

    low: float
    high: float
    rows: int
    source: str


class ForecastEnds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Low and high end of measured over forecast on GPUs that were left out; power None: those of
    all kernels.
    """

    latency: tuple[float, float]
    rows: int
    gpus: int
    power: tuple[float, float] | None = None


class LearnedDistances(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ships in ``distances.yaml``."""

    cards: PublishedSpread
    widening: Widening
    together: LearnedPair  # correlation of the errors of two kernels in one workload
    # half-widths in logs of steps of the measured engine that the GPU bounds, by
    # ``prediction_interval.find_step_kind``
    steps: dict[str, LearnedPair]
    # ends under the limit over those of bursts: a slower kernel draws less, is clocked higher
    capped: LearnedPair
    host: HostSpread
    own_host: HostSpread  # of one machine: how far its cost differs from model to model
    engine_host: HostSpread  # the same of the host of an engine
    conditions: dict[str, ConditionWidening]  # clock, power limit, ...
    forecast: dict[str, ForecastEnds]  # by family of kernels, ``other`` for the rest
    forecast_source: str
    # of models in fp32 or TF32 on a GPU that is forecast, by GPU; ``other``: of GPUs on which none
    # was measured
    wide: dict[str, LatencySpread]
    # kinds of an engine's kernels on a measured card, by other versions of it
    engines: dict[str, ForecastEnds] = {}


@cache
def learned_distances() -> LearnedDistances:
    """Return the distances that ship with Wattcast."""
    return read_shipped_yaml(LearnedDistances, "wattcast.predictor.bundle", "distances.yaml")
