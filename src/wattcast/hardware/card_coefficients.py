"""What a card or a system is taken to be where nobody published it."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class CardCoefficients(Coefficients):
    """What a card or a system is taken to be where nobody published it."""

    usual_temperature_c: float  # of a die: a data-centre card in light use
    lowest_clock: float  # share of the highest clock
    inlet_limit_c: float  # of the air of a system, from which it may not run
    node_drives: int  # of a server
    rack_dpus: int  # of a rack
    rack_drives: int  # of a rack
    rack_supplies: int  # of a rack
    rack_supply_w: float  # that each of them gives


CARDS = load_coefficients("cards", CardCoefficients)
