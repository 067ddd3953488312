"""Switched-capacitance (alpha-C) power: one activity factor a rail, times V²·f.

    P = P_base + Σ_R ( I_leak·V + (C_clk + α·C)·V²·f )        [Stokke2016, Eq. 2 and 3]

over supply rails R with voltage V and clock f; α is the share of its peak at which a rail works,
from 0 to 1. It follows the voltage, but one factor cannot tell kinds of work apart, and α is taken
to stay the same at every clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wattcast.core import bad_value
from wattcast.power.hybrid_rail import HybridRail


@dataclass(frozen=True)
class SwitchedCapacitance(HybridRail):
    """Rails with one activity factor each, and a base power."""

    kind: ClassVar[str] = "switched_capacitance"

    def __post_init__(self) -> None:
        super().__post_init__()
        for rail in self.rails:
            if not rail.alpha:
                raise bad_value(
                    f"rail {rail.name}: alpha", "the event that is its activity factor", "none"
                )
