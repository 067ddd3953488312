"""How one operator's work is cut into blocks."""

from __future__ import annotations

from typing import NamedTuple

SM_THREADS = 2048.0
# Cycles of an SM for a block however small: 0.62 ns a block on 132 SMs at 1.85 GHz, of gathers and batch norm
BLOCK_CYCLE = 150.0


class Grid(NamedTuple):
    """Blocks, dependent steps of one, blocks an SM holds, kernels, bytes they hand one another, and SM cycles.

    ``sm_cycle`` is what the blocks cost the busiest SM; 0: what their elements say. ``once``: that holds what rounds
    of blocks take, so that only the first pays for its steps.
    """

    units: float
    steps: float
    slots: float
    launches: float = 1.0
    between_byte: float = 0.0
    sm_cycle: float = 0.0
    once: bool = False


def waits(steps: float, missing: float) -> float:
    """Steps in loads from L2, where a share of them comes from device memory: that takes about twice as long.

    >>> waits(10.0, 0.5)
    15.0
    """
    return steps * (1.0 + missing)
