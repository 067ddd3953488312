"""Read the entries of coefficients whole: value, origin, evidence, user and the test that notices.

The documentation and the trials of coefficients read them; predictions read the values alone, with
``coefficient_files``.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from wattcast.coefficients import coefficient_files
from wattcast.core.errors import unknown_name
from wattcast.core.strict_files import decode_yaml


class Origin(StrEnum):
    """Where a number comes from."""

    FITTED = "fitted"  # by least squares or the like, to rows that the evidence names
    CHOSEN = "chosen"  # by a person who looked at evidence
    CONVENTION = "convention"  # an agreement that no measurement could prove wrong


class Coefficient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a file: the value as written, and why it is believed."""

    value: str | int | float | tuple[float, ...]
    origin: Origin
    evidence: str
    used_by: str
    # The test of what the coefficient means that fails when it changes by a third, as pytest
    # names it. Empty: nothing notices it yet.
    noticed_by: str = ""


def read_subject(subject: str) -> dict[str, Coefficient]:
    """Return the entries of a subject by name."""
    path = coefficient_files.FOLDER / f"{subject}.yaml"
    if not path.is_file():
        raise unknown_name("subject of coefficients", subject, coefficient_files.list_subjects())
    return decode_yaml(path.read_bytes(), dict[str, Coefficient], path.name)
