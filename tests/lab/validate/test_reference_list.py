"""No public row is forgotten: every file of the reference data is judged, or the list says why."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from wattcast.calibrate.table_files import find_tables
from wattcast.core.errors import WattcastError
from wattcast.hardware import load_gpu
from wattcast.lab.fit import served_rows
from wattcast.lab.fit.ship_calibrations import CARDS, table_folder
from wattcast.lab.validate.public_checks import served_points
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


def test_tables_that_cards_are_calibrated_on_are_judged(reference: Path) -> None:
    """The tuned kernels of AMD, layers of an RTX 4090 and TensorRT-LLM's attention were listed as
    not yet judged, long after cards were calibrated on one half of them and judged on the other.
    """
    unjudged = []
    for card in CARDS:
        gpu, _, engine = card.partition(":")
        folder = table_folder(gpu, reference)
        tables, _ = find_tables([folder], load_gpu(gpu), engine or None)
        for table in tables:
            entry = find_entry(table.path.relative_to(reference).as_posix())
            # long runs are read for their watts alone
            if entry is not None and entry.reason and not table.sustained:
                unjudged.append((card, table.path.name))
    assert unjudged == []


@pytest.mark.parametrize("table", [served_points.TABLE, Path(served_rows.TABLE)])
def test_tables_of_services_that_are_judged_are_listed_so(table: Path) -> None:
    entry = find_entry(table.as_posix())
    assert entry is not None
    assert entry.judged


def test_every_set_of_the_page_has_a_command_or_says_why() -> None:
    """Of sets that were listed after the ledger was made, the page said "Predicted by `wattcast `"."""
    lines = ACCURACY.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("Predicted by `wattcast `")] == []
