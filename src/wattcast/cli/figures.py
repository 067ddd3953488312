"""Options of figures, the same on every command that draws.

``--plot FILE`` saves one figure; a command that draws several also has ``--figure NAME``, which of them that is, and
``--figures FOLDER`` with ``--format`` for all of them. Names are checked while options are read, before any work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattcast.cli.environment import Environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from wattcast.report.figure import Maker


def checked_file(value: Path | None) -> Path | None:
    """The file of ``--plot``, or an error: a wrong ending, a folder, no matplotlib."""
    if value is not None:
        from wattcast.report.figure import check_path, check_tool

        check_path(value)
        check_tool()
    return value


def checked_folder(value: Path | None) -> Path | None:
    """The folder of ``--figures``, or an error where a file has that name or matplotlib is missing."""
    if value is not None:
        from wattcast.errors import bad_value
        from wattcast.report.figure import check_tool

        if value.exists() and not value.is_dir():
            raise bad_value(
                "--figures", "a folder, which may be new", f"the file {value}", "One figure: --plot FILE."
            )
        check_tool()
    return value


def checked_format(value: str) -> str:
    """The ending of ``--format``."""
    from wattcast.report.figure import check_ending

    return check_ending(value)


Plot = Annotated[Path | None, typer.Option("--plot", help="Save a figure (.png, .svg, .pdf).", callback=checked_file)]
Figures = Annotated[
    Path | None, typer.Option("--figures", help="Save all figures into this folder.", callback=checked_folder)
]
Format = Annotated[str, typer.Option("--format", help="Files of --figures: png|svg|pdf.", callback=checked_format)]
Which = Annotated[str | None, typer.Option("--figure", help="What --plot draws, by name; default: the first.")]


def save_one(env: Environment, figure: Figure, path: Path) -> None:
    """Write a figure and say so."""
    from wattcast.report.figure import save

    save(figure, path)
    env.say(f"figure saved: {path}")


@dataclass(frozen=True)
class Drawn:
    """What was asked for of a command that draws several figures: one in a file, all in a folder, or both."""

    plot: Path | None
    which: str | None  # of --plot; None: the first
    folder: Path | None
    ending: str

    def __post_init__(self) -> None:
        if self.which is not None and self.plot is None:
            from wattcast.errors import bad_value

            raise bad_value("--figure", "--plot FILE beside it", "none", "All figures: --figures FOLDER.")

    @property
    def any(self) -> bool:
        return self.plot is not None or self.folder is not None

    def save(self, env: Environment, made: Mapping[str, Maker]) -> None:
        """Draw and write them, and say where."""
        from wattcast.report.figure import drawn, save_set

        if self.plot is not None:
            save_one(env, drawn(made, self.which), self.plot)
        if self.folder is not None:
            for path in save_set(made, self.folder, self.ending):
                env.say(f"figure saved: {path}")
