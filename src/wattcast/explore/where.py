"""Constraints on points: ``power_w<=400``, ``latency<=50ms``, ``sm_count<150``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import naming, units
from wattcast.errors import BadInput, bad_value, unknown_name
from wattcast.explore.fields import find
from wattcast.hardware import Gpu

RESULTS = {  # column -> unit
    "latency_s": "s",
    "power_w": "W",
    "energy_j": "J",
    "clock_hz": "Hz",
    "effective_clock_hz": "Hz",
    "busy_s": "s",
}
_SHORT = {"latency": "latency_s", "power": "power_w", "energy": "energy_j", "busy": "busy_s"}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*([\w.\- ]+?)\s*(<=|>=|==|<|>)\s*(\S.*?)\s*")


@dataclass(frozen=True)
class Where:
    """One constraint: ``column sign bound``, the bound in the column's own unit."""

    column: str
    sign: str
    bound: float
    unit: str

    def holds(self, columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Which points meet it."""
        return np.asarray(_OPERATORS[self.sign](columns[self.column], self.bound))

    def best(self, values: npt.NDArray[Any]) -> float:
        """The value that comes closest to meeting it."""
        if self.sign == "==":
            return float(values[np.argmin(np.abs(values - self.bound))])
        return float(values.min() if self.sign.startswith("<") else values.max())

    def __str__(self) -> str:
        return f"{self.column}{self.sign}{units.show(self.bound, self.unit) if self.unit else f'{self.bound:g}'}"


def parse(texts: Sequence[str], gpu: Gpu, axes: Iterable[str]) -> tuple[Where, ...]:
    """Constraints from what people type; ``axes`` are the columns that vary."""
    return tuple(_one(text, gpu, tuple(axes)) for text in texts)


def _one(text: str, gpu: Gpu, axes: tuple[str, ...]) -> Where:
    match = _FORM.fullmatch(text) if len(text) <= 200 else None
    if match is None:
        raise bad_value("where", "name, <= < >= > or ==, and a value, such as power_w<=400", text)
    column, unit = _column(match[1], gpu, axes)
    return Where(column, match[2], _bound(match[3], unit, match[1], column), unit)


def _column(name: str, gpu: Gpu, axes: tuple[str, ...]) -> tuple[str, str]:
    folded = {naming.fold(column): column for column in RESULTS} | {naming.fold(s): c for s, c in _SHORT.items()}
    if (column := folded.get(naming.fold(name))) is not None:
        return column, RESULTS[column]
    known = [*RESULTS, *axes]
    try:
        field = find(name, gpu)
    except BadInput:
        raise unknown_name("column", name, known, f"Known here: {', '.join(known)}.") from None
    if field.column not in axes:
        raise bad_value("where", f"a result or a field that varies ({', '.join(known)})", name)
    return field.column, field.unit


def _bound(text: str, unit: str, name: str, column: str) -> float:
    """A bare number is welcome where the name typed carries the unit: ``power_w<=400``."""
    bare = unit and naming.fold(name) == naming.fold(column)
    return units.parse(text, "" if bare and _is_number(text) else unit, f"where {name}")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text) is not None
