"""Every coefficient has its evidence, is read by the file that it names, and stands in the docs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from wattcast.coefficients import coefficient_files, list_subjects, load_coefficients, read_subject
from wattcast.core.errors import WattcastError
from wattcast.lab.coefficient_page import make_page

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = [(subject, name) for subject in list_subjects() for name in read_subject(subject)]


@pytest.mark.parametrize(("subject", "name"), ENTRIES)
def test_an_entry_names_its_evidence_and_its_user(subject: str, name: str) -> None:
    entry = read_subject(subject)[name]
    assert len(entry.evidence.split()) >= 4
    for path in entry.used_by.split(","):
        text = (ROOT / "src" / "wattcast" / path.strip()).read_text(encoding="utf-8")
        assert f'"{subject}"' in text or name in text


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "coefficients.md").read_text(encoding="utf-8")
    assert page == make_page(), "run python -m wattcast.lab.coefficient_page docs/coefficients.md"


@dataclass(frozen=True)
class Made:
    delay_s: float
    count: int


MADE = """
delay: {value: 3 ms, origin: chosen, evidence: made up, used_by: nowhere}
count: {value: 7, origin: convention, evidence: made up, used_by: nowhere}
"""


@pytest.fixture
def made_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(coefficient_files, "FOLDER", tmp_path)
    coefficient_files.read_subject.cache_clear()
    path = tmp_path / "made.yaml"
    path.write_text(MADE)
    yield path
    coefficient_files.read_subject.cache_clear()


def test_values_are_read_in_the_unit_of_their_field(made_file: Path) -> None:
    assert load_coefficients("made", Made) == Made(delay_s=0.003, count=7)


def test_one_coefficient_can_be_scaled(made_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coefficient_files.FACTOR_VARIABLE, "made.delay=2")
    assert load_coefficients("made", Made) == Made(delay_s=0.006, count=7)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("3 ms", "3 MHz"),
        ("3 ms", "3"),
        ("origin: chosen", "origin: guessed"),
        ("evidence: made up, used_by", "used_by"),
        ("count:", "number:"),
        ("count:", "extra: {value: 1, origin: chosen, evidence: e, used_by: u}\ncount:"),
    ],
)
def test_a_wrong_file_is_refused(made_file: Path, before: str, after: str) -> None:
    made_file.write_text(MADE.replace(before, after, 1))
    with pytest.raises(WattcastError):
        load_coefficients("made", Made)


def test_an_unknown_subject_names_the_known_ones(made_file: Path) -> None:
    with pytest.raises(WattcastError, match="made"):
        load_coefficients("mad", Made)
