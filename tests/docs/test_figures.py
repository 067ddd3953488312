"""Figures of README and docs have names, and are what their names mean."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from wattcast.calibrate import whole_models
from wattcast.core import BadInput
from wattcast.lab.validate import doc_figures
from wattcast.lab.validate.doc_figures import FigureSource
from wattcast.lab.validate.model_checks import ask_model_row
from wattcast.lab.validate.typed_commands import judge_rows

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = doc_figures.list_pages(ROOT)
MEND = "Run `wattcast lab validate --fill-docs`, or --write-docs where predictions changed."


@pytest.fixture(scope="module")
def source() -> FigureSource:
    return doc_figures.load_source(DOCS)


def name_page(page: Path) -> str:
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


def find_reason(page: Path, source: FigureSource) -> str:
    """Return why a page is a record; empty where it is none."""
    patterns = source.names.pages.items()
    return next((why for pattern, why in patterns if fnmatchcase(name_page(page), pattern)), "")


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_figures_are_what_their_names_mean(page: Path, source: FigureSource) -> None:
    """Twenty figures had gone stale: 80 models where there were 123, errors of three versions ago."""
    assert doc_figures.find_stale_figures(page.read_text(encoding="utf-8"), source) == [], MEND


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_no_figure_is_without_a_name(page: Path, source: FigureSource) -> None:
    if find_reason(page, source):
        return
    unnamed = doc_figures.find_unnamed_figures(page.read_text(encoding="utf-8"), source.names)
    assert unnamed == [], (
        "Name them (docs/figures.yaml), or list them there as inputs with a reason."
    )


def test_records_are_listed_with_a_reason(source: FigureSource) -> None:
    """A page cannot be a record in part: what is dated moves to the history of the method."""
    for pattern, why in source.names.pages.items():
        assert why, pattern
        assert any(fnmatchcase(name_page(page), pattern) for page in PAGES), pattern
    in_part = [
        name_page(page)
        for page in PAGES
        if not find_reason(page, source)
        and "*Figures below are a record" in page.read_text(encoding="utf-8")
    ]
    assert in_part == []


def test_names_and_inputs_are_used(source: FigureSource) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    used = {name.partition("/")[0] for name in re.findall(r"<!--fig:([^>\s]+?)-->", text)}
    sets = {name.partition(".")[0] for name in used}
    assert set(source.names.sets) <= sets
    assert set(source.names.studies) == {name for name in used if name.startswith("study.")}
    plain = " ".join(text.split())
    assert [words for words in source.names.inputs if words not in plain] == []


def test_the_page_is_the_ledger_behind_the_names(source: FigureSource) -> None:
    """docs/accuracy.md and docs/ledger.json come from one run."""
    text = (DOCS / "accuracy.md").read_text(encoding="utf-8")
    sets = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sets == list(dict.fromkeys(row["set"] for row in source.rows))


def test_the_ledger_is_not_stale(source: FigureSource) -> None:
    """One set that takes seconds is judged again: whole models, by their commands."""
    rows = [ask_model_row(case, "h200") for case in whole_models.load_models("h200")]
    rows = [row for row in rows if row.where == source.names.sets["models"]]
    predicted = judge_rows(rows)
    for quantity in ("latency", "power", "energy"):
        errors = [
            abs(one[quantity] / row.measured[quantity] - 1.0)
            for row, one in zip(rows, predicted, strict=True)
        ]
        kept = source.by_name[source.names.sets["models"], quantity]["mape"]
        assert 100.0 * sum(errors) / len(errors) == pytest.approx(kept, abs=0.051), MEND


def test_figures_are_filled_and_found(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    names = (
        "sets: {s: a set}\nstudies: {}\nchanges: {}\ninputs: {90 % interval: level}\npages: {}\n"
    )
    (docs / "figures.yaml").write_text(names)
    row = {"set": "a set", "quantity": "time, long", "n": 1200, "mape": 2.94, "coverage": 91.25}
    (tmp_path / "README.md").write_text(
        "It is <!--fig:s.time-long-->9 %<!--/fig--> off (<!--fig:s.time-long/n-->1<!--/fig--> rows, "
        "<!--fig:s.time-long/coverage-->?<!--/fig-->), by a 90 % interval.\n\n"
        "```console\n$ wattcast gpus\nold\n```\n"
    )
    pages = doc_figures.write_docs(tmp_path, [row], lambda words: f"ran {words[0]}")
    text = (tmp_path / "README.md").read_text()
    assert pages == [tmp_path / "README.md"]
    assert "<!--fig:s.time-long-->2.9 %<!--/fig--> off" in text
    assert ">1,200<" in text
    assert ">91.2 %<" in text
    assert "$ wattcast gpus\nran gpus\n```" in text
    found = doc_figures.load_source(docs)
    assert doc_figures.find_unnamed_figures(text, found.names) == []
    for words in (
        *("It takes 5 ms.", "It draws 30 W.", "It lasts 12 s.", "A flop costs 0.6 pJ."),
        *(
            "It moves 20 GB/s.",
            "It runs at 1.2 GHz.",
            "It is 1.5 times as long.",
            "It fills 3 MiB.",
        ),
    ):
        assert len(doc_figures.find_unnamed_figures(words, found.names)) == 1, words
    assert doc_figures.find_stale_figures(text.replace("2.9 %", "3.1 %"), found) != []
    assert json.loads((docs / "ledger.json").read_text())["rows"] == [row]


def test_coefficients_are_quoted_as_their_files_have_them(source: FigureSource) -> None:
    assert source.show("coefficient.governor.reaction") == "90 ms"
    assert source.show("coefficient.engine_host.schedule") == "97 µs"
    with pytest.raises(BadInput, match="a coefficient of governor"):
        source.show("coefficient.governor.window")


def test_console_blocks_hold_what_commands_print() -> None:
    """Those of the README are golden files (tests/golden)."""
    from wattcast.cli.command_output import Environment
    from wattcast.cli.main import main

    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for line, printed in doc_figures.list_console_commands(text).items():
            found = doc_figures.run_command(shlex.split(line)[1:], main, Environment)
            assert found.strip() == printed.strip(), (page.name, line, MEND)
