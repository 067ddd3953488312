"""What every verb returns can be carried away: plain data, JSON, a table and a figure.

A result names the functions that make these by module and function, because the packages that write
and draw stand above those that compute (docs/architecture.md). They are imported when they are
used.
"""

from __future__ import annotations

import sys
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from importlib import import_module
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    TypeVar,
)

from wattcast.core.errors import MissingTool, check_names

FRAME_LIBRARIES = ("polars", "pandas")
MOST_SHOWN = 300  # characters of a result in a console
MOST_LISTED = 3  # results of a list that its repr names
_PROGRESS_WIDTH = 78  # characters of a line of progress, so that it hides the one before

Row = Mapping[str, Any]


def load_function(place: str) -> Any:
    """Return the function that ``package.module:function`` names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


class UserResult:
    """Base of what verbs return: a short repr, plain data, a table and a figure."""

    plain_by: ClassVar[str] = ""  # "module:function" that makes plain data
    drawn_by: ClassVar[str] = ""  # "module:function" that draws a figure
    rows_in: ClassVar[str] = ""  # the entry of the plain data that has a row each; none: one row

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        return ""

    def __repr__(self) -> str:
        text = f"{type(self).__name__} {self.summary_line}".strip()
        if len(text) > MOST_SHOWN:
            text = text[: MOST_SHOWN - 1] + "…"
        return f"<{text}>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what the command prints with ``--json``."""
        plain: dict[str, Any] = load_function(self.plain_by)(self)
        return plain

    def to_json(self) -> str:
        """Return ``to_dict()`` as JSON text."""
        import msgspec

        return msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=1).decode()

    def table_rows(self) -> Sequence[Row]:
        """Return the rows of ``to_frame()``; nested figures are named with dots."""
        plain = self.to_dict()
        rows = plain[self.rows_in] if self.rows_in else [plain]
        return [flatten_row(row) for row in rows]

    def to_frame(self, library: str | None = None) -> Any:
        """Return a table, in ``polars`` or ``pandas``; by default in the one that is installed."""
        return make_frame(self.table_rows(), library)

    def plot(self, path: str | Path | None = None) -> Any:
        """Return a Matplotlib figure, and save it where ``path`` (.png, .svg, .pdf) is given."""
        style = import_module("wattcast.report.figure_style")
        style.require_matplotlib()
        figure = load_function(self.drawn_by)(self)
        if path is not None:
            style.save_figure(figure, Path(path))
        return figure


Held = TypeVar("Held", bound=UserResult)


class ResultList(UserResult, list[Held]):
    """Results of several workloads or GPUs, in the order asked."""

    drawn_by = "wattcast.report.result_figures:draw_results"

    def __repr__(self) -> str:
        shown = [repr(result)[:70] for result in self[:MOST_LISTED]]
        if len(self) > MOST_LISTED:
            shown.append(f"... {len(self)} in all")
        return f"[{', '.join(shown)}]"

    def to_dict(self) -> dict[str, Any]:
        """Return the plain data of each result."""
        return {"results": [result.to_dict() for result in self]}

    def table_rows(self) -> Sequence[Row]:
        """Return the rows of all results below one another."""
        return [row for result in self for row in result.table_rows()]


def find_notebook_progress() -> Callable[[str], None] | None:
    """Return what shows a line of progress below a notebook's cell; None outside a notebook.

    Each line takes the place of the one before.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):
        return None
    return lambda line: print(
        f"\r{line:<{_PROGRESS_WIDTH}}",
        end="",
        file=sys.stderr,
        flush=True,
    )


def flatten_row(plain: Row, prefix: str = "") -> dict[str, Any]:
    """Return nested plain data as one row; lists stay in ``to_dict()``.

    >>> flatten_row({"gpu": "h200", "ttft_s": {"p50": 0.1}, "notes": ["a"]})
    {'gpu': 'h200', 'ttft_s.p50': 0.1}
    """
    row: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Mapping):
            row |= flatten_row(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            row[f"{prefix}{name}"] = value
    return row


def make_frame(rows: Iterable[Row], library: str | None = None) -> Any:
    """Return rows as a data frame; a column that a row lacks is null in it."""
    if library is not None:
        check_names("library of data frames", library, FRAME_LIBRARIES)
    listed = [dict(row) for row in rows]
    names = dict.fromkeys(name for row in listed for name in row)
    columns = {name: [row.get(name) for row in listed] for name in names}
    for module in FRAME_LIBRARIES if library is None else (library,):
        try:
            frames = import_module(module)
        except ImportError:
            continue
        if module == "polars":
            return frames.DataFrame(columns, strict=False)
        return frames.DataFrame(columns)
    if library == "pandas":
        raise MissingTool(
            "a pandas data frame needs pandas, which is not installed. Install it: "
            "pip install 'wattcast[pandas]'."
        )
    raise MissingTool(
        "a data frame needs polars or pandas. Install it: pip install 'wattcast[explore]', "
        "or pandas."
    )
