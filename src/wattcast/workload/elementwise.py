"""The elementwise functions: how many inputs each reads and what it computes per element."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from wattcast.errors import unknown_name


@dataclass(frozen=True)
class Function:
    """One row of ``elementwise.csv``; work is per output element."""

    name: str
    inputs: int
    flop: float
    sfu_op: float
    meaning: str


@cache
def functions() -> dict[str, Function]:
    """All known elementwise functions by name."""
    text = files("wattcast.workload").joinpath("elementwise.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        row["function"]: Function(
            row["function"], int(row["inputs"]), float(row["flop"]), float(row["sfu_op"]), row["meaning"]
        )
        for row in rows
    }


def function_of(name: str) -> Function:
    """The function called ``name``, or an error with the nearest names."""
    table = functions()
    if name not in table:
        raise unknown_name("elementwise function", name, table, f"Known: {', '.join(sorted(table))}.")
    return table[name]
