"""How a card is set: clocks, power limit, temperature. Voltage follows from the clock, elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.arrays import Scalar, check_positive

DEFAULT_TEMPERATURE_C = 45.0  # a data-centre card in light use; heavier use runs warmer


@dataclass(frozen=True)
class OperatingPoint:
    """Settings of a card, each a float or ``(*sweep, 1)``.

    ``clock_hz`` None leaves the core clock to the governor: the highest at which the workload's
    mean power meets ``power_limit_w`` (None: the card's default limit). A locked clock is lowered
    too when the limit does not allow it, as cards do.
    """

    clock_hz: Scalar | None = None
    power_limit_w: Scalar | None = None
    temperature_c: Scalar = DEFAULT_TEMPERATURE_C
    memory_clock_hz: Scalar | None = None

    def __post_init__(self) -> None:
        check_positive("operating point", {"clock_hz": self.clock_hz, "power_limit_w": self.power_limit_w})
