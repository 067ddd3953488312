"""The tiles that libraries take by the sizes of a product, as ``tile_rules.csv`` lists them.

A kernel has several lines; the first whose bounds hold is taken. Each line names the source file of
the library, or says that the names and grids of kernels which ran show its tile.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import inf
from typing import NamedTuple

from wattcast.core.strict_files import read_shipped_table


class RuleTile(NamedTuple):
    """The sides of a tile."""

    rows: float  # tokens, or packed rows of queries
    outputs: float  # or keys
    depth: float  # elements of k that a step takes; 0: the table does not say


class _TileRule(NamedTuple):
    """One line of the table: a tile, and the largest sizes that it is taken for."""

    most_m: float
    most_n: float
    most_k: float
    tile: RuleTile


@lru_cache(maxsize=4096)
def choose_tile(
    kernel: str,
    m: float = 0.0,
    n: float = 0.0,
    k: float = 0.0,
) -> RuleTile:
    """Return the tile of a kernel for so many tokens, outputs and inputs.

    >>> choose_tile("scaled.fp8", m=48)
    RuleTile(rows=64.0, outputs=64.0, depth=256.0)
    """
    for rule in _read_rules()[kernel]:
        if m <= rule.most_m and n <= rule.most_n and k <= rule.most_k:
            return rule.tile
    raise AssertionError(f"tile_rules.csv: the last line of {kernel} has bounds")


@cache
def _read_rules() -> dict[str, list[_TileRule]]:
    """Read the lines of each kernel, in their order."""
    rules: dict[str, list[_TileRule]] = {}
    for row in read_shipped_table("wattcast.kernels", "tile_rules.csv"):
        rule = _TileRule(
            most_m=float(row["most_m"] or inf),
            most_n=float(row["most_n"] or inf),
            most_k=float(row["most_k"] or inf),
            tile=RuleTile(float(row["rows"]), float(row["outputs"]), float(row["depth"] or 0.0)),
        )
        rules.setdefault(row["kernel"], []).append(rule)
    return rules
