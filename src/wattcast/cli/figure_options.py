"""The options of commands that draw: ``--plot``, ``--figure``, ``--figures`` and ``--format``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.core.errors import bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.whole_files import check_new_file


def check_plot_option(value: str | Path, where: str = "--plot") -> Path:
    """Return the file of ``--plot``, or raise: a wrong ending, a folder, one that is not there, no
    matplotlib.
    """
    from wattcast.report import figure_style

    path = Path(value)
    figure_style.check_figure_path(path)
    check_new_file(path, "--plot")
    figure_style.require_matplotlib()
    return path


def check_figures_option(value: str | Path, where: str = "--figures") -> Path:
    """Return the folder of ``--figures``, or raise where a file has that name or matplotlib is
    missing.
    """
    from wattcast.report import figure_style

    path = Path(value)
    if path.exists() and not path.is_dir():
        do = "One figure: --plot FILE."
        raise bad_value("--figures", "a folder, which may be new", f"the file {path}", do)
    figure_style.require_matplotlib()
    return path


def check_format_option(value: str, where: str = "--format") -> str:
    """Return the format of ``--format``, or raise an error that names the known ones."""
    from wattcast.report import figure_style

    return figure_style.check_figure_format(value)


FIGURES_FOLDER = Option("Save all figures into this folder.", parse=check_figures_option)
FIGURE_FORMAT = Option("Files of --figures: png|svg|pdf.", parse=check_format_option)
PLOT_FILE = Option("Save a figure (.png, .svg, .pdf).", parse=check_plot_option)


@dataclass(frozen=True)
class FigureOptions:
    """Figures asked for from a command: one in a file, all in a folder, or both."""

    plot: Annotated[Path | None, PLOT_FILE] = None
    figure: Annotated[
        str | None, Option("The figure that --plot draws, by name; default: the first.")
    ] = None
    figures: Annotated[Path | None, FIGURES_FOLDER] = None
    format: Annotated[str, FIGURE_FORMAT] = "png"

    def __post_init__(self) -> None:
        if self.figure is not None and self.plot is None:
            do = "All figures: --figures FOLDER."
            raise bad_value("--figure", "--plot FILE as well", "none", do)

    def save(
        self,
        env: Environment,
        output: CommandOutput,
    ) -> None:
        """Draw and write the figures, and say where."""
        if self.plot is None and self.figures is None:
            return
        from wattcast.report import figure_style

        makers = output.figures()
        if self.plot is not None and makers:
            env.save_plot(figure_style.draw_named(makers, self.figure), self.plot)
        if self.figures is not None:
            for path in figure_style.save_figures(makers, self.figures, self.format):
                env.say(f"figure saved: {path}")
