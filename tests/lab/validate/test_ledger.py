"""Sections of the ledger: what takes long is kept, what is missing says so, and figures show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from wattcast.calibrate.scoring import LedgerRow, make_ledger_row
from wattcast.lab.paper_figures.validation_figures import save_ledger_figures
from wattcast.lab.validate import ledger
from wattcast.lab.validate.kernel_checks import layer_rows
from wattcast.lab.validate.ledger import LONG_CHECKS, build_ledger
from wattcast.lab.validate.public_checks import public_sets

QUICK_SETS = "kernel_rows interval_rows counter_rows choice_rows engine_kernel_rows serving_rows layer_rows model_rows"


@pytest.fixture
def _no_quick_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the sets that every ledger computes, which ``test_kernel_checks.py`` looks at."""
    for name in (*QUICK_SETS.split(), "make_counter_model_rows", "card_rows", "make_energy_rows"):
        monkeypatch.setattr(
            ledger if hasattr(ledger, name) else ledger.checks, name, lambda *given: []
        )
    public_sets_path = "wattcast.lab.validate.public_checks.public_sets"
    monkeypatch.setattr(f"{public_sets_path}.published_collective_rows", list)
    monkeypatch.setattr(f"{public_sets_path}.amd_rows", list)


@pytest.mark.usefixtures("_no_quick_sets")
def test_long_sections_are_named_until_they_are_made(elsewhere: dict[str, str]) -> None:
    rows = {r["set"]: r for r in build_ledger(variables=elsewhere)}
    assert "wattcast.lab.validate.long_checks.ablations" in rows["h200 ablations"]["missing"]
    assert sum("long_checks." in str(r.get("missing")) for r in rows.values()) == len(LONG_CHECKS)
    assert "--ablations" in rows["Titan X clock plane"]["missing"]
    assert "WATTCAST_REFERENCE" in rows["simulator power traces"]["missing"]


def counted() -> tuple[list[int], Callable[[], list[LedgerRow]]]:
    made: list[int] = []

    def make() -> list[LedgerRow]:
        made.append(1)
        return [make_ledger_row("a set", "a quantity", len(made), 1.25)]

    return made, make


def test_a_long_section_is_made_once_and_kept(elsewhere: dict[str, str]) -> None:
    made, make = counted()
    assert ledger.load_rows("x", elsewhere) is None
    first = ledger.load_or_make_rows("x", make, elsewhere)
    assert ledger.load_rows("x", elsewhere) == first
    assert ledger.load_or_make_rows("x", make, elsewhere) == first
    assert len(made) == 1
    assert ledger.load_or_make_rows("x", make, elsewhere, again=True) != first
    assert len(made) == 2


@pytest.mark.usefixtures("_no_quick_sets")
def test_rows_that_a_study_left_are_listed(elsewhere: dict[str, str]) -> None:
    for section in LONG_CHECKS:
        one = make_ledger_row(f"h200 {section}, a set", "a quantity", 1, 2.0)
        ledger.load_or_make_rows(f"{section}-h200", lambda one=one: [one], elsewhere)
    rows = build_ledger(variables=elsewhere)
    assert {f"h200 {section}, a set" for section in LONG_CHECKS} <= {r["set"] for r in rows}
    assert not any("long_checks." in str(r.get("missing")) for r in rows)


@pytest.mark.usefixtures("_no_quick_sets")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_asking_for_published_sets_runs_them(
    every: bool, elsewhere: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sets take longer than all others; tests of coverage and tables look at their parts."""
    longest = ("tables", "cards", "newer-tables", "served-points", "chips-left-out", "coverage")
    for section in () if every else longest:
        where, quantity, _ = public_sets.LONG_SETS[section]
        one = [make_ledger_row(where, quantity, 1, 1.25)]
        monkeypatch.setitem(
            public_sets.LONG_SETS, section, (where, quantity, lambda *_, one=one: one)
        )
    said: list[str] = []
    build_ledger(tell=said.append, long=True, variables=elsewhere)
    sections = ["titanx", "v100", "training", "tables", "cards", "newer-tables", "served-points"]
    sections += ["chips-left-out", "served-watts", "coverage"]
    assert [text for text in said if "working" in text] == [
        f"{section}: working" for section in sections
    ]
    for section in sections:
        assert ledger.load_rows(section, elsewhere)


def test_half_a_file_is_made_again(elsewhere: dict[str, str]) -> None:
    made, make = counted()
    ledger.load_or_make_rows("x", make, elsewhere)
    (path,) = Path(elsewhere["WATTCAST_CACHE"]).glob("x-*.json")
    path.write_text('{"rows": [')
    assert ledger.load_or_make_rows("x", make, elsewhere)[0]["n"] == 2
    assert len(made) == 2


@pytest.mark.slow
def test_every_figure_is_drawn(tmp_path: Path) -> None:
    made = save_ledger_figures(tmp_path)
    assert {path.stem for path in made} >= {
        "validation-latency",
        "validation-power",
        "validation-size",
        "validation-kinds",
        "validation-equal-latency",
    }
    assert all(path.stat().st_size > 20_000 for path in made)


def test_layers_are_in_the_ledger_and_the_law_beats_the_sum_of_operators() -> None:
    (found,) = layer_rows("h200")
    assert found["n"] >= 36
    assert found["mape"] < 0.5 * found["floor"]
