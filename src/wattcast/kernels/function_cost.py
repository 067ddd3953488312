"""What an SM spends on one element of an elementwise function, and how long its first result takes.

``function_cost.csv`` holds, for functions that cost more than moving their operands: ``issue``, instructions a thread
an element (slower pipes counted by the issue slots they block), from bursts on an H200 that fit L2 and have 0.6 to 12
million elements; and ``start_cycle``, by how much a kernel of up to 131,072 elements outlasts an addition. The
instructions agree with those a profiler counted: 16 (and 2 on the slow pipe, 8 slots each) for a division, 22 and 3
for SiLU.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

ISSUE_PER_CYCLE = 128.0  # instructions of threads that an SM issues: four warps
# Bytes that an SM stores in a cycle: 3.8 TB/s on 132 SMs at 1.85 GHz, whatever they read, as long as all stays in L2
STORE_BYTE_PER_CYCLE = 16.0


@dataclass(frozen=True)
class Cost:
    """Instructions an element, and cycles until the first result beyond those of an addition."""

    issue: float
    start_cycle: float


_USUAL = Cost(7.0, 0.0)  # an addition, a product


@cache
def _costs() -> dict[str, Cost]:
    text = files("wattcast.kernels").joinpath("function_cost.csv").read_text(encoding="utf-8")
    return {
        row["function"]: Cost(float(row["issue"]), float(row["start_cycle"]))
        for row in csv.DictReader(text.splitlines())
    }


def cost_of(function: str) -> Cost:
    """The cost of a function; of one not in the table, that of an addition.

    >>> cost_of("gelu").issue
    37.0
    """
    return _costs().get(function, _USUAL)
