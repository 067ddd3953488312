"""Read the YAML files of coefficients and load them into dataclasses of their subject."""

from __future__ import annotations

import dataclasses
import os
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wattcast.core import units
from wattcast.core.errors import BadInput, bad_value, unknown_name

FOLDER = Path(__file__).parent
FACTOR_VARIABLE = "WATTCAST_COEFFICIENT"  # "governor.reaction=1.3" scales one, to see its effect

# How the name of a field ends -> the unit that its value is written in.
UNIT_OF_SUFFIX = {
    "_byte_per_s": "byte/s",
    "_flop_per_s": "flop/s",
    "_s": "s",
    "_hz": "Hz",
    "_w": "W",
    "_j": "J",
    "_v": "V",
    "_c": "C",
    "_byte": "byte",
}

Record = TypeVar("Record")


class Origin(StrEnum):
    """Where a number comes from."""

    FITTED = "fitted"  # by least squares or the like, to rows that the evidence names
    CHOSEN = "chosen"  # by a person who looked at evidence
    CONVENTION = "convention"  # an agreement that no measurement could prove wrong


class Coefficient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a file: the value as written, and why it is believed."""

    value: str | float | list[float]
    origin: Origin
    evidence: str
    used_by: str
    # The test of what the coefficient means that fails when it changes by a third, as pytest
    # names it. Empty: nothing notices it yet.
    noticed_by: str = ""


def list_subjects() -> list[str]:
    """Return the names of all subjects that have a file."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def read_subject(subject: str) -> dict[str, Coefficient]:
    """Return the entries of a subject by name."""
    path = FOLDER / f"{subject}.yaml"
    if not path.is_file():
        raise unknown_name("subject of coefficients", subject, list_subjects())
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, Coefficient])
    except msgspec.DecodeError as error:
        raise BadInput(f"{path.name}: {error}.") from None


def load_coefficients(subject: str, kind: type[Record]) -> Record:
    """Return the coefficients of a subject as ``kind``, a dataclass with a field for each of them.

    A file with an entry that no field takes, or a field without an entry, is an error: a number
    that nothing reads would look as if it mattered.
    """
    entries = read_subject(subject)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        key, unit = split_unit(field.name)
        if key not in entries:
            raise bad_value(f"{subject}.yaml", f"an entry {key}", "none")
        place = f"{subject}.{key}"
        values[field.name] = _scale_for_trial(place, _parse_value(entries[key].value, unit, place))
    unused = set(entries) - {split_unit(name)[0] for name in values}
    if unused:
        raise bad_value(f"{subject}.yaml", "only entries that the code reads", sorted(unused)[0])
    return kind(**values)


def split_unit(name: str) -> tuple[str, str]:
    """Split the name of a field into its key and its unit.

    >>> split_unit("reaction_s")
    ('reaction', 's')
    >>> split_unit("secant_steps")
    ('secant_steps', '')
    """
    for suffix, unit in UNIT_OF_SUFFIX.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), unit
    return name, ""


def _parse_value(value: str | float | list[float], unit: str, place: str) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str):
        return units.parse(value, unit, place)
    if unit:
        raise bad_value(place, f"a value with its unit ({unit})", str(value))
    return value


def _scale_for_trial(place: str, value: Any) -> Any:
    """Scale a coefficient by the factor that ``WATTCAST_COEFFICIENT`` names for it.

    ``python -m wattcast.lab.validate.coefficient_trials`` changes one at a time in this way to find
    out which tests and bounds notice it.
    """
    name, _, factor = os.environ.get(FACTOR_VARIABLE, "").partition("=")
    if name != place:
        return value
    if isinstance(value, tuple):
        return tuple(float(factor) * number for number in value)
    scaled = float(factor) * value
    return max(round(scaled), 1) if isinstance(value, int) else scaled
