"""The first screen: at most seventeen commands, and help that fits a page."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from wattcast.cli.main import COMMANDS, walk_commands

COMMAND_OF = dict(walk_commands())
WORDS = sorted(COMMAND_OF)
GROUPS = sorted({words.rpartition(" ")[0] for words in WORDS})


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer asks the terminal for its width; rich reads COLUMNS."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


@pytest.fixture(scope="module")
def show_help(call) -> Callable[[str], str]:
    """``show_help("gpus list")`` returns the short help of a command, which two tests look at."""

    @cache
    def show(words: str) -> str:
        done = call(*words.split(), "--help")
        assert done.code == 0, done.err
        return done.out

    return show


def test_there_are_at_most_eighteen_commands(call) -> None:
    assert len(COMMANDS) <= 18
    done = call("--help")
    assert [name for name in COMMANDS if f" {name} " not in done.out] == []


@pytest.mark.parametrize("words", [*GROUPS, *WORDS])
def test_help_fits_a_page(show_help, words: str) -> None:
    lines = show_help(words).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80


def list_options(words: str) -> list[Any]:
    """Return the options of a command that its help names."""
    params = COMMAND_OF[words].params
    return [one for one in params if one.param_type_name == "option" and not one.hidden]


@pytest.mark.parametrize("words", WORDS)
def test_help_names_every_option_that_has_a_description(show_help, words: str) -> None:
    short = show_help(words).replace("\n", " ")
    for option in list_options(words):
        assert f"{option.opts[0]} " in short
        assert option.help, option.opts


@pytest.mark.parametrize(
    "words",
    [
        words
        if place % 6 == 0 or words in COMMANDS
        else pytest.param(words, marks=pytest.mark.slow)
        for place, words in enumerate(WORDS)
    ],
)  # drawing the page of a command takes 40 ms
def test_help_all_describes_every_option(call, words: str) -> None:
    full = call("--traceback", *words.split(), "--help-all").out
    for option in list_options(words):
        assert f"{option.opts[0]} " in full
    assert "--help-all" not in full


def test_ranges_are_still_told(call) -> None:
    call("simulate", "--help")
    assert (
        "1<=x<=100"
        in call("simulate", "gpt2", "--gpu", "h200", "--rate", "1/s", "--seeds", "0").err
    )
