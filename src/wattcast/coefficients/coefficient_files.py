"""Load the values of coefficients from the YAML files of their subjects into records.

A command that predicts needs the values alone, some hundred of them from dozens of files, and needs
them at once: they are read here line by line, without a YAML parser and with the standard library
only, so that a bare GPU node can read them too. ``coefficient_entries`` reads the same files whole
and strictly; a test holds that both find the same values.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from wattcast.core import units
from wattcast.core.errors import (
    BadInput,
    bad_value,
    unknown_name,
)

FOLDER = Path(__file__).parent
# "governor.reaction=1.3" in this variable scales one coefficient, to see what notices it.
FACTOR_VARIABLE = "WATTCAST_COEFFICIENT"

Value = str | int | float | tuple[float, ...]
Record = TypeVar("Record")


class Coefficients:
    """Base of a record of coefficients: a class of annotated fields, one for each entry of its
    file.

    Only ``load_coefficients`` makes one, and nothing assigns to it afterwards. It is no dataclass
    because Python takes most of a millisecond to make one, and a cold command needs dozens.
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is read from a file, not assigned")


# The end of a field's name -> the unit that its value is written in.
_UNIT_OF_SUFFIX = {
    "s": "s",
    "hz": "Hz",
    "w": "W",
    "j": "J",
    "v": "V",
    "c": "C",
    "byte": "byte",
    "flop": "flop",
}
_SUFFIX = "|".join(_UNIT_OF_SUFFIX)
_RATE_NAME = re.compile(rf"(\w+)_({_SUFFIX})_per_({_SUFFIX})")
_QUANTITY_NAME = re.compile(rf"(\w+)(?<!_per)_({_SUFFIX})")

# An entry begins with its name; its value comes first and may be a list over several lines.
_ENTRY = re.compile(r"^(\w+): *\n  value: +(\[[^\]]*\]|\S.*)$", re.MULTILINE)
_ENTRY_NAME = re.compile(r"^[^\s#][^:\n]*", re.MULTILINE)
_WHOLE_NUMBER = re.compile(r"[+-]?\d+")


def list_subjects() -> list[str]:
    """Return the names of all subjects that have a file."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_coefficients(subject: str, kind: type[Record]) -> Record:
    """Return the coefficients of a subject as ``kind``, a class with a field for each of them.

    A file with an entry that no field takes, or a field without an entry, is an error: a number
    that nothing reads would look as if it mattered.
    """
    values = read_values(subject)
    arguments: dict[str, Any] = {}
    for field in kind.__annotations__:
        key, unit = split_unit(field)
        if key not in values:
            raise bad_value(f"{subject}.yaml", f"an entry {key}", "none")
        place = f"{subject}.{key}"
        quantity = parse_value(values.pop(key), unit, place)
        arguments[field] = _scale_for_trial(place, quantity)
    if values:
        raise bad_value(f"{subject}.yaml", "only entries that the code reads", min(values))
    record = kind(**arguments)
    _loaded_records[subject].append(record)
    return record


# What was loaded of each subject, so that a coefficient can be changed for a while.
_loaded_records: defaultdict[str, list[Any]] = defaultdict(list)
_changes: list[tuple[str, float]] = []


def list_changes() -> tuple[tuple[str, float], ...]:
    """Return the coefficients that are changed now, with their factors."""
    return tuple(_changes)


@contextmanager
def change_coefficient(place: str, factor: float) -> Iterator[None]:
    """Multiply a coefficient, ``subject.name``, while the context lasts, to see what depends on it.

    This is for tests and trials. What was computed and cached before keeps the old value, unless
    ``list_changes`` is a part of its key.
    """
    subject, _, name = place.partition(".")
    earlier_values = []
    for record in _loaded_records[subject]:
        for field in vars(record):
            if split_unit(field)[0] == name:
                value = getattr(record, field)
                earlier_values.append((record, field, value))
                object.__setattr__(record, field, _multiply(value, factor))
    if not earlier_values:
        raise unknown_name("loaded coefficient", place, sorted(_loaded_records))
    _changes.append((place, factor))
    try:
        yield
    finally:
        _changes.remove((place, factor))
        for record, field, value in earlier_values:
            object.__setattr__(record, field, value)


def read_values(subject: str) -> dict[str, Value]:
    """Return the values of a subject by name, as they are written in its file."""
    path = FOLDER / f"{subject}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise unknown_name("subject of coefficients", subject, list_subjects()) from None
    values: dict[str, Value] = {}
    for name, written in _ENTRY.findall(text):
        if name in values:
            raise bad_value(f"{path.name}: {name}", "one entry of this name", "two")
        values[name] = _read_written(written, f"{path.name}: {name}")
    for name in _ENTRY_NAME.findall(text):
        if name not in values:
            form = "an entry that begins with its value in a line of its own"
            raise bad_value(f"{path.name}: {name}", form, "another form")
    return values


def _read_written(written: str, where: str) -> Value:
    """Return a value of a file as a number, a list of numbers or the text of a quantity."""
    plain = written.partition(" #")[0].strip()
    try:
        if plain.startswith("["):
            numbers = plain[1:-1].split(",")
            return tuple(float(number) for number in numbers if number.strip())
        if _WHOLE_NUMBER.fullmatch(plain):
            return int(plain)
        return float(plain)
    except ValueError:
        if plain.startswith("["):
            raise BadInput(f"{where}: expected a list of numbers, got {plain!r}.") from None
        return plain.strip("\"'")


def split_unit(name: str) -> tuple[str, str]:
    """Split the name of a field into its key and its unit.

    >>> split_unit("reaction_s")
    ('reaction', 's')
    >>> split_unit("dram_energy_j_per_byte")
    ('dram_energy', 'J/byte')
    >>> split_unit("secant_steps"), split_unit("steps_per_s")
    (('secant_steps', ''), ('steps_per_s', ''))
    """
    rate = _RATE_NAME.fullmatch(name)
    if rate is not None:
        return rate[1], f"{_UNIT_OF_SUFFIX[rate[2]]}/{_UNIT_OF_SUFFIX[rate[3]]}"
    quantity = _QUANTITY_NAME.fullmatch(name)
    if quantity is not None:
        return quantity[1], _UNIT_OF_SUFFIX[quantity[2]]
    return name, ""


def parse_value(
    value: Value,
    unit: str,
    place: str,
) -> Any:
    """Return a value in the unit of its field; a number without a unit has none."""
    if isinstance(value, str):
        return units.parse(value, unit, place)
    if isinstance(value, tuple):
        return value
    if unit:
        raise bad_value(place, f"a value with its unit ({unit})", str(value))
    if not math.isfinite(value):
        raise bad_value(place, "a finite number", value)
    return value


def _scale_for_trial(place: str, value: Any) -> Any:
    """Scale a coefficient by the factor that ``WATTCAST_COEFFICIENT`` names for it.

    ``python -m wattcast.lab.validate.coefficient_trials`` changes one at a time in this way to find
    out which tests and bounds notice it.
    """
    name, _, factor = os.environ.get(FACTOR_VARIABLE, "").partition("=")
    return _multiply(value, float(factor)) if name == place else value


def _multiply(value: Any, factor: float) -> Any:
    """Return a value times a factor: each number of a list, and whole numbers rounded."""
    if isinstance(value, tuple):
        return tuple(factor * number for number in value)
    scaled = factor * value
    return max(round(scaled), 1) if isinstance(value, int) else scaled
