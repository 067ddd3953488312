"""Sensitivities the controller believes in, and how far they may be off."""

from __future__ import annotations

from typing import NamedTuple

from wattcast.manage.knobs import Role


class Beliefs(NamedTuple):
    """Compute and bandwidth sensitivity, None where unknown, and how far they may be off."""

    compute: float | None
    bandwidth: float | None
    margin: float

    def of(self, role: Role) -> float | None:
        """The sensitivity that covers a knob."""
        return self.compute if role.is_compute else self.bandwidth

    def bounds(self, role: Role, has_units: bool) -> tuple[float, float]:
        """Lowest and highest sensitivity to a knob that the beliefs allow.

        Compute sensitivity is the mean of that to units and that to the clock. A kernel follows the clock at
        least as much as the units (what runs on all units runs on the clock), so the clock's lies between
        the mean and 1, and the units' between 2·mean - 1 and the mean.
        """
        mean = self.of(role)
        if mean is None:
            return 0.0, 1.0
        low = high = mean
        if role is Role.COMPUTE_UNITS:
            low = 2.0 * mean - 1.0
        elif role is Role.CORE_CLOCK and has_units:
            high = 2.0 * mean
        return max(low - self.margin, 0.0), min(high + self.margin, 1.0)
