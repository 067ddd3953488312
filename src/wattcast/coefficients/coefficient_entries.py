"""Read the entries of coefficients whole: value, origin, evidence, user and the test that notices.

The documentation and the trials of coefficients read them; predictions read the values alone, with
``coefficient_files``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from wattcast.coefficients import coefficient_files
from wattcast.core.errors import unknown_name
from wattcast.core.strict_files import decode_yaml


class Origin(StrEnum):
    """Where a number comes from."""

    FITTED = "fitted"  # by least squares or the like, to rows that the evidence names
    CHOSEN = "chosen"  # by a person who looked at evidence
    LIBRARY = (
        "library"  # from the source or the names of a library's kernels: another version differs
    )
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


@dataclass(frozen=True)
class TrialRecord:
    """What became of the test of a coefficient when the coefficient changed by a third."""

    subject: str
    name: str
    value: str  # as written when it was tried
    test: str
    noticed_factors: tuple[float, ...]  # with which the test failed

    def is_current(self, entry: Coefficient) -> bool:
        """Return whether value and test are still those that were tried."""
        return self.value == str(entry.value) and self.test == entry.noticed_by


_TRIALS_HEAD = ("subject", "name", "value", "test", "noticed_factors")


def read_trials() -> list[TrialRecord]:
    """Return the recorded trials of all coefficients (``lab.validate.coefficient_trials``)."""
    path = coefficient_files.FOLDER / "trials.csv"
    if not path.is_file():
        return []
    records = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            factors = tuple(float(factor) for factor in row["noticed_factors"].split())
            records.append(
                TrialRecord(
                    row["subject"],
                    row["name"],
                    row["value"],
                    row["test"],
                    factors,
                )
            )
    return records


def write_trials(records: Iterable[TrialRecord]) -> None:
    """Write the table of trials."""
    path = coefficient_files.FOLDER / "trials.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(_TRIALS_HEAD)
        for record in records:
            factors = " ".join(str(factor) for factor in record.noticed_factors)
            table.writerow([record.subject, record.name, record.value, record.test, factors])


def is_noticed(
    subject: str,
    name: str,
    records: Iterable[TrialRecord],
) -> bool:
    """Return whether a current record says that a test notices the coefficient."""
    entry = read_subject(subject)[name]
    for record in records:
        if (record.subject, record.name) == (subject, name):
            return record.is_current(entry) and bool(record.noticed_factors)
    return False
