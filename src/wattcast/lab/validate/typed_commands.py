"""Commands that a user can type, as data: the ledger asks them, and `lab validate --explain` prints
them.

A command has a verb, what it is about (a model or a file) and its options as they are typed. The
ledger answers it by the public function behind the verb, with the same texts and numbers, so that
what is judged is what a user gets. Files that a command reads (a configuration, a trace of
requests, a list of operators, a GPU of one's own) come with it: ``write_files`` puts them where the
command is typed."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import (
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wattcast.core.errors import bad_value
from wattcast.core.whole_files import write_whole
from wattcast.predictor.api import SETTING_NAMES, predict_many
from wattcast.serving.simulate_serving import simulate
from wattcast.training.train_job import train

VERBS = ("predict", "simulate", "train")


@dataclass(frozen=True)
class TypedCommand:
    """A command line of Wattcast and the files it reads."""

    verb: str
    subject: str  # a model's name, or one of the files
    options: Mapping[str, Any]  # texts, numbers and flags, in the order in which they are typed
    files: Mapping[str, bytes] = field(default_factory=dict)  # name -> content

    @property
    def words(self) -> list[str]:
        """The command line in words, without ``wattcast`` itself."""
        words = [self.verb, self.subject]
        for name, value in self.options.items():
            dashed = name.replace("_", "-")
            if value is True:
                words.append(f"--{dashed}")
            elif value is False:
                words.append(f"--no-{dashed}")
            else:
                words += [f"--{dashed}", str(value)]
        return words

    @property
    def line(self) -> str:
        """The command line as it is typed into a shell."""
        return shlex.join(["wattcast", *self.words])


@dataclass(frozen=True)
class JudgedRow:
    """A measured row, the command that predicts it, and where in its ``--json`` each quantity
    stands.
    """

    where: str  # set of the ledger
    id: str
    command: TypedCommand
    measured: Mapping[str, float]  # quantity -> value
    places: Mapping[str, str]  # quantity -> place, such as "latency_s" or "ttft_s.p50"

    @property
    def name(self) -> str:
        """The name under which ``--explain`` finds the row."""
        return f"{self.where}: {self.id}"


def write_files(commands: Iterable[TypedCommand], folder: Path) -> list[Path]:
    """Write the files that commands read into a folder, which is made where it is missing."""
    contents: dict[Path, bytes] = {}
    for command in commands:
        contents |= {folder / name: content for name, content in command.files.items()}
    if contents:
        folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        write_whole(path, content)
    return list(contents)


def answer_commands(commands: Sequence[TypedCommand]) -> list[Any]:
    """Return what the public functions behind the commands return, in order.

    Predictions with equal settings are made in one pass, which changes none of them.
    """
    answers: list[Any] = [None] * len(commands)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(commands, folder)
        groups: dict[str, list[int]] = {}
        for place, command in enumerate(commands):
            if command.verb == "predict":
                groups.setdefault(repr(_list_settings(command)), []).append(place)
            else:
                answers[place] = _answer_alone(command, folder)
        for places in groups.values():
            some = [commands[place] for place in places]
            for place, answer in zip(places, _predict_together(some, folder), strict=True):
                answers[place] = answer
    return answers


def read_answer(answer: Any, place: str) -> float:
    """Return the number of an answer that ``--json`` prints at a place."""
    value = answer
    if hasattr(
        answer, "headline"
    ):  # of a simulation, whose summary takes longer than the figures that are judged
        return float(answer.headline[place])
    if place == "tokens_per_s_per_gpu":
        return float(answer.tokens_per_s / answer.gpus)
    for part in place.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return float(value)


def read_printed(plain: Any, place: str) -> float:
    """Return the number at a place of what a command printed as JSON; of predictions, the first."""
    value = plain["predictions"][0] if "predictions" in plain else plain
    for part in place.split("."):
        value = value[int(part) if part.isdigit() else part]
    return float(value)


def judge_rows(rows: Sequence[JudgedRow]) -> list[dict[str, float]]:
    """Return what the commands of rows predict, by quantity."""
    answers = answer_commands([row.command for row in rows])
    return [
        {quantity: read_answer(answer, place) for quantity, place in row.places.items()}
        for row, answer in zip(rows, answers, strict=True)
    ]


def find_rows(rows: Sequence[JudgedRow], name: str) -> list[JudgedRow]:
    """Return the rows of the set, or the one row, that is asked for by its name or a part of it."""
    folded = _fold(name)
    exact = [row for row in rows if folded in map(_fold, (row.where, row.id, row.name))]
    return exact or [row for row in rows if folded in _fold(row.name)]


def make_file_name(text: str, ending: str) -> str:
    """Return a name for a file that needs no quotes in a shell.

    >>> make_file_name("llama-3.1-8b/traffic-0.8 s1", "csv")
    'llama-3.1-8b-traffic-0.8-s1.csv'
    """
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', text).strip('-')}.{ending}"


def show_clock(clock_hz: float) -> str:
    """Return a clock as it is typed, to a kilohertz.

    >>> show_clock(899954321.2)
    '899.954MHz'
    """
    return f"{round(clock_hz / 1e6, 3):.10g}MHz"


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


def _list_settings(command: TypedCommand) -> list[tuple[str, Any]]:
    named = ("gpu", *SETTING_NAMES)
    return [(name, value) for name, value in command.options.items() if name in named]


def _predict_together(commands: Sequence[TypedCommand], folder: Path) -> list[Any]:
    settings = {
        name: _find_file(value, commands[0], folder) for name, value in _list_settings(commands[0])
    }
    workloads: list[Any] = []
    for command in commands:
        options = {name: value for name, value in command.options.items() if name not in settings}
        workloads.append((_find_file(command.subject, command, folder), options))
    return list(predict_many(workloads, settings.pop("gpu"), **settings))


def _answer_alone(command: TypedCommand, folder: Path) -> Any:
    options = {name: _find_file(value, command, folder) for name, value in command.options.items()}
    subject = _find_file(command.subject, command, folder)
    gpu = options.pop("gpu")
    if command.verb == "simulate":
        return simulate(subject, gpu, **options)
    if command.verb == "train":
        return train(subject, gpu, **options)
    raise bad_value("verb", ", ".join(VERBS), command.verb)


def _find_file(
    value: Any,
    command: TypedCommand,
    folder: Path,
) -> Any:
    return str(folder / value) if isinstance(value, str) and value in command.files else value
