"""Share one card between who limits it and who turns its clocks.

A card has two leases. ``control`` belongs to whoever runs a program: it sets clocks, and a power
limit of its own. ``limit`` belongs to whoever shares a site's power: it sets what the card may draw
at most. Where both want a limit, the lower wins. Nobody but the holder of ``limit`` raises a card
above the power limit that its administrator has set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import (
    dataclass,
    field,
    replace,
)
from typing import Literal

from wattcast.control.card_settings import CardSettings

LeaseKind = Literal["control", "limit"]


@dataclass
class CardLease:
    """Hold a client's claim on a card, and what it wants the card to have."""

    client: int  # number of its connection
    who: str
    heard_s: float
    wanted: CardSettings = field(default_factory=CardSettings)


def merge_leases(
    leases: Mapping[LeaseKind, CardLease], administrator_w: float | None
) -> CardSettings:
    """Return what a card is to have: the clocks that ``control`` wants, and the lower of the
    limits.

    ``administrator_w`` is the power limit that the card had before, where that is known. It bounds
    ``control`` while nobody has set another limit above it."""
    control = leases.get("control")
    limit = leases.get("limit")
    wanted_settings = CardSettings() if control is None else control.wanted
    ceiling_w = None if limit is None else limit.wanted.limit_w
    if wanted_settings.limit_w is None:
        return replace(wanted_settings, limit_w=ceiling_w)
    bounds_w = [wanted_settings.limit_w]
    highest_w = administrator_w if ceiling_w is None else ceiling_w
    if highest_w is not None:
        bounds_w.append(highest_w)
    return replace(wanted_settings, limit_w=min(bounds_w))


def name_holders(leases: Mapping[LeaseKind, CardLease]) -> str:
    """Name those who hold a card, for people; empty: nobody."""
    if len(leases) < 2:
        return "".join(lease.who for lease in leases.values())
    return " and ".join(f"{lease.who} ({kind})" for kind, lease in sorted(leases.items()))
