"""Types and ranges of the columns of measured rows, by their names.

A column ends in its unit, so that its name says what it may hold: no latency is negative and no
card draws 1e300 W. The bounds are far beyond anything that was measured, and within what arithmetic
with them survives. The same table judges rows as they are written, packed and read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wattcast.core.errors import bad_value

MOST_COUNT = 10**9  # of anything that was counted in one row
LONGEST_TEXT = 100_000  # names of kernels take a few thousand letters


@dataclass(frozen=True)
class ColumnRange:
    """The numbers that a column may hold, both ends included."""

    low: float
    high: float
    words: str  # for errors


UNIT_RANGES = {
    "s": ColumnRange(0.0, 1e6, "seconds from 0 to 1e6"),
    "w": ColumnRange(0.0, 1e5, "watts from 0 to 1e5"),
    "j": ColumnRange(0.0, 1e10, "joules from 0 to 1e10"),
    "hz": ColumnRange(0.0, 1e11, "hertz from 0 to 1e11"),
    "c": ColumnRange(-60.0, 200.0, "degrees from -60 to 200"),
    "byte": ColumnRange(0.0, 1e16, "bytes from 0 to 1e16"),
}
_NEVER_ZERO = ("latency_s", "burst_latency_s")
NAMED_RANGES = {
    **{name: ColumnRange(1e-12, 1e6, "seconds above zero") for name in _NEVER_ZERO},
    "repeat": ColumnRange(0, 1e6, "a count from 0 to 1e6"),
    "duty": ColumnRange(0.0, 1.0, "a share from 0 to 1"),
    "parameters": ColumnRange(0, 1e15, "a count from 0 to 1e15"),
}
_COUNTS = ColumnRange(0, MOST_COUNT, f"a count from 0 to {MOST_COUNT:.0e}")
_UNIT = re.compile(r"_(s|w|j|hz|c|byte)$")
_OF_ELEMENTS = re.compile(r"tuple\[(.+), \.\.\.\]")


def find_range(column: str) -> ColumnRange | None:
    """Return what a column of this name may hold; None where its name does not say.

    A statistic of a column (``ttft_s.p90``) has the range of the column; a rate has none.

    >>> latency, rate = find_range("latency_spread_s"), find_range("tokens_per_s")
    >>> latency.words, rate, find_range("ttft_s.p90").high
    ('seconds from 0 to 1e6', None, 1000000.0)
    """
    name = column.partition(".")[0]
    if name in NAMED_RANGES:
        return NAMED_RANGES[name]
    unit = _UNIT.search(name)
    return None if unit is None or "_per_" in name else UNIT_RANGES[unit[1]]


def check_values(
    plain: Mapping[str, Any],
    types: Mapping[str, str],
    where: str,
) -> None:
    """Refuse the first value of a row whose type or range is not that of its column.

    ``types`` are the annotations of the row's dataclass, such as ``float | None``.
    """
    for name, value in plain.items():
        kind = types[name]
        if value is None and "None" in kind:
            continue
        _check_value(value, kind.removesuffix(" | None"), name, f"{where}: {name}")


def _check_value(
    value: Any,
    kind: str,
    name: str,
    where: str,
) -> None:
    elements = _OF_ELEMENTS.fullmatch(kind)
    if elements is not None:
        if not isinstance(value, list | tuple):
            raise bad_value(where, "a list", value)
        for element in value:
            _check_value(element, elements[1], name, where)
    elif kind in ("float", "int"):
        _check_number(value, kind, name, where)
    elif kind == "str":
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise bad_value(where, f"a text of at most {LONGEST_TEXT} letters", value)
    elif kind == "bool":
        if not isinstance(value, bool):
            raise bad_value(where, "true or false", value)
    elif kind == "Plain" and not isinstance(value, dict):
        raise bad_value(where, "an object", value)


def _check_number(
    value: Any,
    kind: str,
    name: str,
    where: str,
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, int) and abs(value) > 2**62:
        raise bad_value(where, "a number that 64 bits hold", value)
    if not is_number or (kind == "int" and not float(value).is_integer()):
        raise bad_value(where, "a whole number" if kind == "int" else "a number", value)
    limits = find_range(name) or (_COUNTS if kind == "int" else None)
    if not math.isfinite(value):
        raise bad_value(where, "a finite number", value)
    if limits is not None and not limits.low <= value <= limits.high:
        raise bad_value(where, limits.words, value)


def check_table(table: Any, where: str) -> None:
    """Refuse a table of polars with a column of another type or range than its name says."""
    import polars

    for name, dtype in table.schema.items():
        limits = find_range(name)
        if limits is None:
            continue
        column = table.get_column(name)
        while isinstance(dtype, polars.List):
            column = column.explode()
            dtype = column.dtype
        if dtype == polars.Null:
            continue
        if not dtype.is_numeric():
            raise bad_value(f"{where}: {name}", "a column of numbers", str(dtype))
        values = column.drop_nulls().cast(polars.Float64)
        if len(values) == 0:
            continue
        low = values.min()
        high = values.max()
        if values.is_nan().any() or not limits.low <= low or not high <= limits.high:
            wrong = values.filter(~values.is_between(limits.low, limits.high))
            raise bad_value(f"{where}: {name}", limits.words, wrong[0] if len(wrong) else low)
