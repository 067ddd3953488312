"""How the host and the cards of this machine differ from the usual ones.

What a user tells by ``--host-factor`` and ``--power-factor`` goes before what ``wattcast doctor
--card`` measured on this machine; 1 ignores it. Without either both factors are 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.core.own_cards import (
    OwnCard,
    average_factors,
    read_own_cards,
)
from wattcast.options.setting_options import MachineOptions

UNTOLD = MachineOptions()
_UNDO = "ignore it: --{option} 1; forget it: wattcast doctor --forget-card"


@dataclass(frozen=True)
class MachineFactors:
    """Factors on the host's time for a step and on the watts of a card that works."""

    host: float = 1.0
    power: float = 1.0
    # standard deviation of the logarithm of the card's watts that measurements leave; None: no card
    # was measured, or the factor was told
    power_spread: float | None = None
    host_note: str = ""
    power_note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of both."""
        return tuple(note for note in (self.host_note, self.power_note) if note)


def find_machine_factors(gpu: str, told: MachineOptions = UNTOLD) -> MachineFactors:
    """Return the factors that hold for a kind of GPU, as told or as measured on this machine.

    A host that was measured with another kind of card is ignored.
    """
    cards: Sequence[OwnCard] = ()
    if told.host_factor is None or told.power_factor is None:
        cards = read_own_cards(gpu)
    host, host_note = _choose_host(told.host_factor, cards)
    power, power_note, spread = _choose_power(told.power_factor, cards, gpu)
    return MachineFactors(host, power, spread, host_note, power_note)


def _choose_host(told: float | None, cards: Sequence[OwnCard]) -> tuple[float, str]:
    """Return the factor on the host's time, and a note where it is not 1."""
    if told is not None:
        note = "" if told == 1.0 else f"host factor: {told:g} times the usual time, as told"
        return told, note
    factors = [card.host_factor for card in cards if card.host_factor is not None]
    if not factors:
        return 1.0, ""
    factor = average_factors(factors)
    if factor == 1.0:
        return factor, ""
    takes = f"{factor:.2f} times the usual time"
    if f"{factor:.2f}" == "1.00":
        takes = "as long as usual"
    with_host = [card for card in cards if card.host_factor is not None]
    note = (
        f"this machine's host takes {takes} to launch: measured "
        f"{_last_date(with_host)} on an eager model, and taken for engines "
        f"({_UNDO.format(option='host-factor')})"
    )
    return factor, note


def _choose_power(
    told: float | None,
    cards: Sequence[OwnCard],
    gpu: str,
) -> tuple[float, str, float | None]:
    """Return the factor on watts, a note where it was told or measured, and its spread."""
    if told is not None:
        note = "" if told == 1.0 else f"power factor: {told:g} times the usual watts, as told"
        return told, note, None
    if not cards:
        return 1.0, "", None
    measured = [card.power[gpu] for card in cards]
    factor = average_factors([each.value for each in measured])
    # which of the cards will run is not known
    apart = float(np.std(np.log([each.value for each in measured])))
    spread = math.hypot(float(np.mean([each.spread for each in measured])), apart)
    percent = 100.0 * (factor - 1.0)
    subject = "this card draws" if len(cards) == 1 else f"the {len(cards)} cards measured here draw"
    amount = f"{abs(percent):.1f} % {'more' if percent > 0.0 else 'less'} than usual"
    if f"{abs(percent):.1f}" == "0.0":
        amount = "as much as usual"
    note = (
        f"{subject} {amount} while working: measured {_last_date(cards)} "
        f"({_UNDO.format(option='power-factor')})"
    )
    return factor, note, spread


def _last_date(cards: Sequence[OwnCard]) -> str:
    return max(card.date for card in cards)
