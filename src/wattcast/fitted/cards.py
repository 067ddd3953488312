"""How far another card of the same kind may be from the one that was measured.

    log(measured on another card / predicted) = error of the model + card + card x kernel

``CardSpread`` is the standard deviation of the last two together, for latency and for power. Cards of a kind differ
in leakage, voltage and cooling, so a bundle's residuals, which are of its own card, are too narrow for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec

from wattcast.errors import bad_value
from wattcast.files import from_yaml

NORMAL_MEDIAN, NORMAL_P90 = 0.6745, 1.6449  # of |x|, x standard normal


@dataclass(frozen=True)
class CardSpread:
    """Standard deviations of the logarithm of one kernel's figure on another card over that on this one."""

    latency: float
    power: float
    cards: int  # that were measured; 1: the figures are those of ``cards.yaml``
    source: str

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("power", self.power)):
            if not 0.0 <= value < 1.0:
                raise bad_value(f"cards.{name}", "a standard deviation of logs, from 0 to below 1", value)


THIS_CARD = CardSpread(0.0, 0.0, 1, "the card that was measured")


class Published(msgspec.Struct, forbid_unknown_fields=True):
    """The file: |difference| of the same kernels in two runs."""

    latency_median: float
    power_p90: float
    counts_for: float
    source: str


@cache
def published() -> Published:
    """The shipped figures."""
    return from_yaml(files("wattcast.fitted").joinpath("cards.yaml").read_bytes(), Published, "cards.yaml")


def published_spread() -> CardSpread:
    """What is taken where one card alone was measured."""
    seen = published()
    return CardSpread(seen.latency_median / NORMAL_MEDIAN, seen.power_p90 / NORMAL_P90, 1, seen.source)
