"""No public row is forgotten: every file of the reference data is judged, or the list says why."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from wattcast.core.errors import WattcastError
from wattcast.lab.validate.public_checks.reference_list import (
    ReferenceEntry,
    find_entry,
    list_entries,
    unjudged_rows,
)

ACCURACY = Path(__file__).resolve().parents[3] / "docs" / "accuracy.md"


def _list_files(folder: Path) -> list[str]:
    return [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]


def test_every_file_is_judged_or_has_a_reason(reference: Path) -> None:
    """40 fp32 rows and several whole sets were in no ledger, and nobody could see it."""
    assert [file for file in _list_files(reference) if find_entry(file) is None] == []


def test_every_entry_still_has_files(reference: Path) -> None:
    files = _list_files(reference)
    stale = [
        entry.files
        for entry in list_entries()
        if not any(fnmatch(file, entry.files) for file in files)
    ]
    assert stale == []


def test_every_set_that_judges_is_in_the_ledger() -> None:
    sets = [line for line in ACCURACY.read_text(encoding="utf-8").splitlines() if line[:3] == "## "]
    for entry in list_entries():
        assert not entry.judged or any(entry.judged in line for line in sets), entry


def test_the_ledger_prints_the_reasons(reference: Path) -> None:
    rows = unjudged_rows(reference)
    assert all(row["missing"] for row in rows)
    reasons = {entry.reason for entry in list_entries() if entry.reason}
    assert {row["missing"] for row in rows} == reasons


def test_an_entry_says_one_thing() -> None:
    with pytest.raises(WattcastError, match="one of judged, used and reason"):
        ReferenceEntry("a.csv")
    with pytest.raises(WattcastError, match="one of judged, used and reason"):
        ReferenceEntry("a.csv", judged="A100", reason="old")
