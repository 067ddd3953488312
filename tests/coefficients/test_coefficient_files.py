"""Every coefficient has its evidence, is read by the file that it names, and stands in the docs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from wattcast.coefficients import coefficient_files, list_subjects, load_coefficients
from wattcast.coefficients.coefficient_entries import read_subject
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
# A subject for these tests.
delay:
  value: 3 ms
  origin: chosen
  evidence: made up
  used_by: nowhere
count:
  value: 7
  origin: convention
  evidence: >-
    made up
  used_by: nowhere
"""
EXTRA_ENTRY = "extra:\n  value: 1\n  origin: chosen\n  evidence: made up\n  used_by: nowhere\n"


@pytest.fixture
def made_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(coefficient_files, "FOLDER", tmp_path)
    path = tmp_path / "made.yaml"
    path.write_text(MADE)
    return path


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
        ("value: 7", "value: [7, many]"),
        ("  value: 7", "  number: 7"),
        ("count:", "number:"),
        ("count:", "delay:"),
        ("count:", EXTRA_ENTRY + "count:"),
    ],
)
def test_a_wrong_file_is_refused(made_file: Path, before: str, after: str) -> None:
    made_file.write_text(MADE.replace(before, after, 1))
    with pytest.raises(WattcastError):
        load_coefficients("made", Made)


def test_an_unknown_subject_names_the_known_ones(made_file: Path) -> None:
    with pytest.raises(WattcastError, match="made"):
        load_coefficients("mad", Made)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("origin: chosen", "origin: guessed"),
        ("  evidence: made up\n", ""),
        ("count:", "delay:"),
        ("  origin: chosen", "  oddity: chosen"),
    ],
)
def test_an_incomplete_entry_is_refused(made_file: Path, before: str, after: str) -> None:
    made_file.write_text(MADE.replace(before, after, 1))
    with pytest.raises(WattcastError):
        read_subject("made")


@pytest.mark.parametrize("subject", list_subjects())
def test_values_are_those_that_a_yaml_parser_finds(subject: str) -> None:
    """Predictions read values by the form of their lines, to start without a YAML parser."""
    entries = read_subject(subject)
    values = coefficient_files.read_values(subject)
    assert list(values) == list(entries)
    for name, value in values.items():
        written = entries[name].value
        if isinstance(written, str) and not isinstance(value, str):
            # YAML takes 1e-3, a number without a point, for a text.
            written = float(written)
        assert value == written
