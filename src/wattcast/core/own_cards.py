"""Remember what was measured of the cards of this machine.

``wattcast doctor --card`` writes the file, predictions of that kind of card read it and say so, and
``wattcast doctor --forget-card`` removes it. ``WATTCAST_CARDS`` names another file; where it is
empty, none is read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from wattcast.core.remembered_files import RememberedFile

# beyond these a factor is a slip of the finger, or of a unit
Factor = Annotated[float, Meta(ge=0.1, le=10.0)]
Watts = Annotated[float, Meta(ge=0.0, le=1e5)]


class CardLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A load that ran on the card: watts as measured, and as predicted for the mean card."""

    name: str
    measured_w: Watts
    predicted_w: Watts
    is_capped: bool  # whether the power limit held the card
    clock_hz: Annotated[float, Meta(ge=0.0, le=1e11)]
    memory_w: Watts | None = None  # of its memory alone, which tells one make from another


class PowerFactor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The card's watts while it works over those predicted, and the spread that remains."""

    value: Factor
    # standard deviation of its logarithm
    spread: Annotated[float, Meta(ge=0.0, lt=1.0)]


class OwnCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A card of this machine, by what the driver tells of it."""

    uuid: str
    name: str
    board: str  # part number; empty where the driver does not tell
    date: str
    # by the names of the catalogue that predictions may ask for: the GPU's and its board's
    power: dict[str, PowerFactor]
    host_factor: Factor | None  # None: not measured
    idle_w: Watts
    loads: tuple[CardLoad, ...]


class OwnCards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All cards of this machine that were measured."""

    cards: tuple[OwnCard, ...]


_FILE = RememberedFile(
    "cards.json",
    "WATTCAST_CARDS",
    OwnCards,
    "card",
    "Measure it anew: wattcast doctor --card; or forget it: wattcast doctor --forget-card.",
)


def read_own_cards(gpu: str = "") -> tuple[OwnCard, ...]:
    """Return the cards that were measured on this machine: all, or those of one kind."""
    remembered = _FILE.read()
    if remembered is None:
        return ()
    return tuple(card for card in remembered.cards if not gpu or gpu in card.power)


def write_own_card(card: OwnCard) -> Path:
    """Remember a card beside the others, in place of what was known of it; return the file."""
    others = [other for other in read_own_cards() if other.uuid != card.uuid]
    return _FILE.write(OwnCards((*others, card)))


def forget_own_cards() -> bool:
    """Remove what was remembered, and tell whether there was any."""
    return _FILE.forget()


def average_factors(factors: list[float]) -> float:
    """Return the geometric mean of the factors of several cards.

    >>> average_factors([0.5, 2.0])
    1.0
    """
    return math.exp(sum(map(math.log, factors)) / len(factors))
