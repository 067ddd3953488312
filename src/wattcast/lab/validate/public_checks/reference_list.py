"""Which rows of the ledger judge by each file of the reference data, or why none does.

The list is ``reference_files.yaml``. The ledger prints the reasons, so that nobody has to guess
whether a set was forgotten or left out.
"""

from __future__ import annotations

from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import msgspec

from wattcast.calibrate.scoring import LedgerRow, make_absent_row
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import read_shipped_yaml

UNJUDGED = "public rows that nothing judges"


class ReferenceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files below the reference folder, and one of three words about them."""

    files: str  # a glob
    judged: str = ""  # part of the name of the ledger sets that judge by them
    used: str = ""  # they hold no measurements to judge by: what reads them
    reason: str = ""  # why no row judges by them

    def __post_init__(self) -> None:
        """Check that the entry says one thing."""
        if sum(map(bool, (self.judged, self.used, self.reason))) != 1:
            raise bad_value(self.files, "one of judged, used and reason", "none or several")


@cache
def list_entries() -> tuple[ReferenceEntry, ...]:
    """Return all entries, in the order in which they are looked through."""
    package = "wattcast.lab.validate.public_checks"
    return tuple(read_shipped_yaml(list[ReferenceEntry], package, "reference_files.yaml"))


def find_entry(file: str) -> ReferenceEntry | None:
    """Return the first entry that matches a path below the reference folder."""
    return next((entry for entry in list_entries() if fnmatch(file, entry.files)), None)


def unjudged_rows(folder: Path) -> list[LedgerRow]:
    """Return a row with the reason for every group of files that nothing judges."""
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    file_counts: dict[ReferenceEntry, int] = {}
    for entry in map(find_entry, files):
        if entry is not None and entry.reason:
            file_counts[entry] = file_counts.get(entry, 0) + 1
    return [
        make_absent_row(UNJUDGED, f"{entry.files}, {count} file(s)", entry.reason)
        for entry, count in sorted(file_counts.items(), key=lambda item: item[0].files)
    ]
