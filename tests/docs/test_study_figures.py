"""Figures that rest on studies are what the studies say today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import study_figures
from wattcast.core.errors import WattcastError
from wattcast.lab.validate import doc_figures

ROOT = Path(__file__).resolve().parents[2]
KEPT = json.loads(study_figures.KEPT.read_bytes())
MEND = "Run `python -m studies.study_figures NAME`, then `wattcast lab validate --fill-docs`."


def test_every_name_has_a_study_and_a_kept_text() -> None:
    """71 figures were typed by hand, each with a date."""
    names = doc_figures.load_source(ROOT / "docs").names.studies
    assert list(KEPT) == list(study_figures.FIGURES)
    assert set(names) == set(KEPT)


@pytest.mark.parametrize("name", study_figures.QUICK)
def test_quick_figures_are_what_their_studies_say(name: str) -> None:
    assert study_figures.work_out([name])[name] == KEPT[name], MEND


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(study_figures.FIGURES) - set(study_figures.QUICK)))
def test_figures_are_what_their_studies_say(name: str, reference: Path) -> None:
    assert study_figures.work_out([name])[name] == KEPT[name], MEND


def test_an_unknown_figure_is_refused() -> None:
    with pytest.raises(WattcastError, match="figure"):
        study_figures.work_out(["study.tune-nineth"])


def test_a_name_without_a_kept_text_is_refused() -> None:
    source = doc_figures.load_source(ROOT / "docs")
    with pytest.raises(WattcastError, match=r"study-figures\.json"):
        source.show("study.none")
