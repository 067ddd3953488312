"""The architecture a component model speaks of: McPAT-style parameters, scaling factors, static power.

``parameters.csv`` lists the parameters of the manual's table (section 4.2, numbers 1 to 36) and the few
more this model uses, each with its place in the XML file, its kind and the range that makes sense.
Values keep the unit of the XML file, which the table names.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from wattcast.activity.simulated import Dialect, counters
from wattcast.errors import BadInput, bad_value, clip, nearest

Value = float | tuple[int, ...]
STATIC_MIXES = ("cat1", "cat2", "cat3", "cat4", "cat5", "cat6", "light", "intadd", "intmul", "geomean")
STATIC_NAMES = (
    *(f"static_{mix}_{lane}" for mix in STATIC_MIXES for lane in ("flane", "addlane")),
    *(f"static_{memory}_flane" for memory in ("shared", "l1", "l2")),
)
_MOST_COMPLAINTS = 8


@dataclass(frozen=True)
class Parameter:
    """One row of ``parameters.csv``."""

    index: int | None  # in the manual's table
    name: str
    component: str
    kind: str  # integer, number, integers:N
    minimum: float
    maximum: float
    needed_by: str  # both, gpuwattch, or empty
    unit: str
    manual: str  # the manual's spelling, where it is another
    meaning: str

    def read(self, text: str) -> Value:
        """The value written as ``text``, or BadInput that says what is wrong with it."""
        if self.kind.startswith("integers"):
            wanted = int(self.kind.partition(":")[2])
            numbers = [_number(piece) for piece in text.split(",")]
            if len(numbers) != wanted or any(n is None or n != int(n) for n in numbers):
                raise bad_value(self.where, f"{wanted} whole numbers", text)
            found: tuple[int, ...] = tuple(int(n) for n in numbers if n is not None)
            self._check_range(min(found), text)
            self._check_range(max(found), text)
            return found
        number = _number(text)
        if number is None or (self.kind == "integer" and number != int(number)):
            raise bad_value(self.where, "a whole number" if self.kind == "integer" else "a number", text)
        self._check_range(number, text)
        return number

    @property
    def where(self) -> str:
        """``system.core0/warp_size (threads of a warp)``."""
        return f"{self.component}/{self.name} ({self.meaning.split(';')[0]})"

    def _check_range(self, number: float, text: str) -> None:
        if not self.minimum <= number <= self.maximum:
            unit = f" {self.unit}" if self.unit else ""
            raise bad_value(self.where, f"{self.minimum:g} to {self.maximum:g}{unit}", text)


@cache
def parameters() -> dict[str, Parameter]:
    """Every parameter, by name."""
    text = files("wattcast.power.component").joinpath("parameters.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        r["name"]: Parameter(
            int(r["index"]) if r["index"] else None,
            r["name"],
            r["component"],
            r["kind"],
            float(r["minimum"]),
            float(r["maximum"]),
            r["needed"],
            r["unit"],
            r["manual"],
            r["meaning"],
        )
        for r in rows
    }


@dataclass(frozen=True)
class Architecture:
    """What an architecture file says, checked."""

    name: str
    dialect: Dialect
    parameters: Mapping[str, Value]
    scaling: Mapping[str, float]  # by name in the file; absent ones are 1 in AccelWattch
    static: Mapping[str, float] = field(default_factory=dict)  # AccelWattch's static_* watts
    other: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # component -> param -> text, kept as is
    stats: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)  # component id -> name, in file order

    def __post_init__(self) -> None:
        complaints = [*self._missing(), *self._senseless()]
        if complaints:
            more = len(complaints) - _MOST_COMPLAINTS
            shown = " ".join(complaints[:_MOST_COMPLAINTS]) + (f" And {more} more." if more > 0 else "")
            raise BadInput(f"{self.name}: {shown}")

    def number(self, name: str) -> float:
        """A scalar parameter that is there."""
        value = self.parameters[name]
        assert isinstance(value, (int, float))
        return float(value)

    def scaling_of(self, name: str) -> float:
        """The scaling factor of a counter, 1 where the file leaves it out."""
        return self.scaling.get(name, 1.0)

    def _missing(self) -> list[str]:
        needed = [
            p
            for p in parameters().values()
            if p.needed_by == "both" or (p.needed_by and p.needed_by == self.dialect.value)
        ]
        lost = [f"{p.where} is missing." for p in needed if p.name not in self.parameters]
        if self.dialect is Dialect.GPUWATTCH:
            lost += [f"scaling factor {s} is missing." for s in scaling_names(self.dialect) if s not in self.scaling]
        elif not self.static:
            lost += ["the static_* powers of AccelWattch are missing."]
        else:
            lost += [f"{s} is missing." for s in STATIC_NAMES if s not in self.static]
        return lost

    def _senseless(self) -> list[str]:
        said = [
            f"scaling factor {name} must be zero or more, got {value:g}."
            for name, value in self.scaling.items()
            if not 0 <= value < 1e9
        ]
        for name, value in self.parameters.items():
            if name.endswith("_config") and isinstance(value, tuple) and not self._unused(name):
                capacity, block, ways = value[:3]
                if capacity == 0 or block == 0 or value[3] == 0:
                    said.append(f"{name}: capacity, block and banks must be above zero, got {value}.")
                elif capacity % block or capacity < block * max(ways, 1):
                    said.append(f"{name}: {capacity} bytes do not hold whole sets of {ways} blocks of {block} bytes.")
        return said

    def _unused(self, name: str) -> bool:
        return name == "L2_config" and self.parameters.get("number_of_L2s") == 0


def scaling_names(dialect: Dialect) -> tuple[str, ...]:
    """Scaling factors of a dialect's counters, in order."""
    return tuple(c.scaling for c in counters(dialect))


def from_texts(
    name: str,
    params: Mapping[str, Mapping[str, str]],
    stats: Mapping[str, Mapping[str, str]] | None = None,
    titles: Mapping[str, str] | None = None,
) -> Architecture:
    """Component id -> parameter -> text, as XML and YAML hold it, to a checked Architecture."""
    system = params.get("system", {})
    dialect = Dialect.ACCELWATTCH if any(key.startswith("static_") for key in system) else Dialect.GPUWATTCH
    known = parameters()
    factors = set(scaling_names(Dialect.GPUWATTCH)) | set(scaling_names(Dialect.ACCELWATTCH))
    values: dict[str, Value] = {}
    scaling: dict[str, float] = {}
    static: dict[str, float] = {}
    other: dict[str, dict[str, str]] = {}
    for component, texts in params.items():
        for key, text in texts.items():
            where = f"{name}: {component}/{key}"
            if key in known and known[key].component == component:
                values[key] = _named(name, known[key], text)
            elif component == "system" and key in factors:
                scaling[key] = _finite(where, text)
            elif component == "system" and key.startswith("static_"):
                static[key] = _static(where, key, text)
            else:
                other.setdefault(component, {})[key] = text
    return Architecture(name, dialect, values, scaling, static, other, stats or {}, titles or {})


def _named(name: str, parameter: Parameter, text: str) -> Value:
    try:
        return parameter.read(text)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None


def _static(where: str, key: str, text: str) -> float:
    if key not in STATIC_NAMES:
        close = nearest(key, STATIC_NAMES)
        raise bad_value(where, f"one of AccelWattch's static powers{', such as ' + close[0] if close else ''}", key)
    return _finite(where, text)


def _finite(where: str, text: str) -> float:
    number = _number(text)
    if number is None:
        raise bad_value(where, "a number", clip(text))
    return number


def _number(text: str) -> float | None:
    """A number as C reads it: ``3.8475e-8f`` is one, ``nan`` and ``1_000`` are not."""
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)[fF]?\s*", text[:64])
    return float(match[1]) if match else None
