"""What a command works with: the streams of a call, and the result that it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    TextIO,
    TypeVar,
)

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from wattcast.measure.measure_verbs import VerbResult
    from wattcast.report.figure_style import Figure, FigureMaker

Result = TypeVar("Result")


@dataclass
class Environment:
    """Streams and variables of one call of the command line, given by tests where they need
    others.
    """

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    traceback: bool = False
    help_all: bool = False
    typed_options: frozenset[str] = frozenset()  # options that stand on the command line

    def console(self) -> Console:
        """Return a console for results; away from a terminal it is wide enough that nothing is
        cut.
        """
        from rich.console import Console

        width = None if self.stdout.isatty() else 160
        return Console(
            file=self.stdout,
            width=width,
            soft_wrap=False,
            highlight=False,
            emoji=False,
        )

    def json(self, out: object) -> None:
        """Write results as JSON to stdout."""
        from wattcast.core.strict_files import encode_json

        self.stdout.write(encode_json(out).decode() + "\n")

    def say(self, text: str) -> None:
        """Write progress and warnings to stderr."""
        self.stderr.write(text + "\n")

    def tell_progress(self, text: str) -> None:
        """Write a line of progress to stderr; on a terminal it replaces the one before."""
        if self.stderr.isatty():
            self.stderr.write(f"\r\x1b[2K{text}\r")
            self.stderr.flush()
        else:
            self.say(text)

    def save_plot(
        self,
        figure: Figure,
        path: Path,
    ) -> None:
        """Write a figure and say so."""
        from wattcast.report.figure_style import save_figure

        save_figure(figure, path)
        self.say(f"figure saved: {path}")


@dataclass(frozen=True)
class CommandOutput:
    """The result of a command: data for ``--json``, text for readers, and figures where the command
    draws.
    """

    plain: Any  # or a function that makes it
    text: str | Callable[[Console], object] | None  # None: always JSON
    figures: Callable[[], Mapping[str, FigureMaker]] = dict  # of --plot, --figure and --figures
    notes: Sequence[str] = ()  # for stderr, after the result
    exit_code: int = 0
    fault: Exception | None = None  # raised at the end

    def show(
        self,
        env: Environment,
        as_json: bool,
    ) -> None:
        """Print the result as text or JSON, and end with its exit code."""
        if self.plain is not None and (as_json or self.text is None):
            env.json(self.plain() if callable(self.plain) else self.plain)
        elif callable(self.text):
            self.text(env.console())
        elif self.text:
            env.stdout.write(self.text.rstrip("\n") + "\n")
        for note in self.notes:
            if note:
                env.say(note)
        if self.fault is not None:
            raise self.fault
        if self.exit_code:
            raise typer.Exit(self.exit_code)

    @classmethod
    def of(
        cls,
        result: Result,
        plain: Callable[[Result], object],
        text: Callable[[Console, Result], None],
        figure: Callable[[Result], Figure] | None = None,
        notes: Sequence[str] = (),
    ) -> CommandOutput:
        """Return a result with the functions that make data, text and a figure of it."""
        figures = {} if figure is None else {"figure": partial(figure, result)}

        def print_text(console: Console) -> None:
            text(console, result)

        return cls(partial(plain, result), print_text, lambda: figures, notes)

    @classmethod
    def from_verb(cls, result: VerbResult) -> CommandOutput:
        """Return the result of a verb of ``measure``."""
        return cls(result.plain, result.text, notes=[result.note], exit_code=result.exit_code)
