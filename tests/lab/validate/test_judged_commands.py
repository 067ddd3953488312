"""The ledger judges what a user gets: its rows repeat through the command line."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from wattcast.core.strict_files import reference_folder
from wattcast.lab.validate.judged_sets import find_other_set, list_judged_rows, list_other_sets
from wattcast.lab.validate.typed_commands import JudgedRow, judge_rows, read_printed, write_files

SEED = 58
DRAWN = 20
PAGE = Path(__file__).resolve().parents[3] / "docs" / "accuracy.md"


@pytest.fixture(scope="module")
def judged_rows() -> list[JudgedRow]:
    import os

    return list_judged_rows(reference_folder(os.environ))


def draw_rows(rows: list[JudgedRow], count: int) -> list[JudgedRow]:
    """Draw rows at random, one of every set before a second of any."""
    dice = random.Random(SEED)
    sets: dict[str, list[JudgedRow]] = {}
    for row in rows:
        sets.setdefault(row.where, []).append(row)
    order = list(sets)
    dice.shuffle(order)
    drawn: list[JudgedRow] = []
    while len(drawn) < count:
        name = order[len(drawn) % len(order)]
        drawn.append(sets[name].pop(dice.randrange(len(sets[name]))))
    return drawn


@pytest.mark.parametrize("count", [6, pytest.param(DRAWN, marks=pytest.mark.slow)])
def test_drawn_rows_repeat_through_the_command_line(
    judged_rows: list[JudgedRow], count: int, call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger once had step costs and graphs of its own, and printed errors of numbers that no
    command gave.

    It said 6.0 % of prefill steps of vLLM, where `predict` was 9.1 % off.
    """
    rows = draw_rows(judged_rows, count)
    judged = judge_rows(rows)  # in one batch, as the ledger does
    monkeypatch.chdir(tmp_path)
    write_files((row.command for row in rows), tmp_path)
    for row, predicted in zip(rows, judged, strict=True):
        done = call(*row.command.words, "--json")
        assert done.code == 0, (row.command.line, done.err)
        printed = json.loads(done.out)
        for quantity, place in row.places.items():
            found = read_printed(printed, place)
            assert found == pytest.approx(predicted[quantity], rel=1e-9), (row.name, quantity)


def test_explain_prints_the_command_of_a_row_and_of_a_set(
    judged_rows: list[JudgedRow], call, tmp_path: Path
) -> None:
    row = next(row for row in judged_rows if row.command.files)
    plain = json.loads(
        call("lab", "validate", "--explain", row.name, "--files", str(tmp_path), "--json").out
    )
    assert [one["command"] for one in plain["rows"]] == [row.command.line]
    assert {path.name for path in tmp_path.iterdir()} == set(row.command.files)
    text = call("lab", "validate", "--explain", row.where).out
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [one.command.line for one in judged_rows if one.where == row.where]


def test_explain_says_what_other_sets_judge(call) -> None:
    plain = json.loads(call("lab", "validate", "--explain", "simulator power traces", "--json").out)
    assert plain["command"] == "wattcast lab power-trace"
    done = call("lab", "validate", "--explain", "no such set")
    assert done.code == 2
    assert "unknown row or set" in done.err


def test_every_set_of_the_page_is_asked_of_a_command_or_named(judged_rows: list[JudgedRow]) -> None:
    """A set that neither has commands nor a line in ``other_sets.csv`` would judge something nobody
    can repeat.
    """
    asked = {row.where for row in judged_rows}
    sets = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(sets) > 50
    assert [name for name in sets if name not in asked and find_other_set(name) is None] == []


def test_no_set_with_commands_is_named_as_another(judged_rows: list[JudgedRow]) -> None:
    asked = dict.fromkeys(row.where for row in judged_rows)
    assert [name for name in asked if find_other_set(name) is not None] == []


def test_commands_nearest_to_other_sets_exist(call) -> None:
    commands = {other.command for other in list_other_sets() if other.command}
    for command in commands:
        words = command.partition(" --")[0].split()[1:]
        assert call(*words, "--help").code == 0, command
