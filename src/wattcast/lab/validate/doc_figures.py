"""Fill the figures that README and docs quote, and find those that have no name.

A figure stands between two comments that a reader does not see:
``<!--fig:engine-decode.latency-->2.9 %<!--/fig-->``. Its name has a set of the ledger by the short
name of ``docs/figures.yaml``, a quantity, and after a slash how it is shown: ``/bare`` (no unit),
``/0`` (digits after the point), ``/n`` (rows), or another entry of the row, such as ``/coverage``.
Other names are counts of the catalogue (``count.models``), coefficients
(``coefficient.governor.reaction``, its value in ``wattcast/coefficients/governor.yaml``) and
figures of studies (``study.tune-sixth``), each of which a command works out from measurements in
the repository and keeps in ``docs/study-figures.json``. Figures of one day that nothing can repeat
stand in the history of the method, without a name.

The ledger behind the names is ``docs/ledger.json``, which `lab validate --write-docs` makes anew.
Console blocks that begin with ``$ wattcast`` hold what that command prints.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import textwrap
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from wattcast import hardware
from wattcast.calibrate.scoring import LedgerRow
from wattcast.coefficients.coefficient_entries import read_subject
from wattcast.core.errors import BadInput, bad_value
from wattcast.core.strict_files import decode_yaml
from wattcast.core.whole_files import write_whole
from wattcast.lab.validate.typed_commands import (
    TypedCommand,
    answer_commands,
    read_answer,
)
from wattcast.workload.model_catalogue import list_models

LEDGER_FILE = "ledger.json"
FIGURES_FILE = "figures.yaml"
STUDIES_FILE = "study-figures.json"
_STUDY = "study."  # begins the names of figures that studies work out
_COEFFICIENT = "coefficient."  # begins the names of coefficients
_MARK = re.compile(r"<!--fig:([^>\s]+?)-->(.*?)<!--/fig-->", re.DOTALL)
_CONSOLE = re.compile(r"(```console\n\$ (wattcast [^\n]*)\n)(.*?)(```)", re.DOTALL)
# Numbers with a unit of time, power, energy, memory, clock or speed, shares and factors; not a part
# of a longer number or word.
_UNITS = (
    *("%", "s", "ms", "µs", "us", "seconds", "kW", "MW", "W", "watts"),
    *("pJ", "nJ", "mJ", "kJ", "J", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"),
    *("KB/s", "MB/s", "GB/s", "TB/s", "Hz", "kHz", "MHz", "GHz", "times"),
)
_FIGURE = re.compile(
    r"(?<![\w.,-])[±+-]?\d[\d,]*(?:\.\d+)?\s?"
    rf"(?:{'|'.join(sorted(_UNITS, key=len, reverse=True))})(?![\w/='’])"
)


class PredictedChange(msgspec.Struct, forbid_unknown_fields=True, rename={"against": "from"}):
    """By how much the answer of one command differs from that of another, at a place of its
    JSON.
    """

    of: str
    against: str
    place: str


class FigureNames(msgspec.Struct, forbid_unknown_fields=True):
    """What ``docs/figures.yaml`` holds."""

    sets: dict[str, str]  # short name -> set of the ledger
    studies: dict[str, str]  # name -> what works it out from which measurements
    changes: dict[str, PredictedChange]
    inputs: dict[str, str]  # words with a number that is chosen, published or asked for -> why
    pages: dict[str, str]  # pages that are records as a whole -> why


@dataclass(frozen=True)
class FigureSource:
    """Everything that a figure's name can mean."""

    names: FigureNames
    rows: Sequence[LedgerRow]
    studies: Mapping[str, str]  # name -> the text that a study worked out

    @cached_property
    def by_name(self) -> Mapping[tuple[str, str], LedgerRow]:
        """Rows of the ledger by set and quantity, the latter as it is written in names."""
        return {(row["set"], make_slug(row["quantity"])): row for row in self.rows}

    def show(self, name: str) -> str:
        """Return the text of a figure."""
        if name.startswith(_STUDY):
            return self._show_study(name)
        if name in self.names.changes:
            return _show_change(self.names.changes[name])
        if name in _COUNTS:
            return _COUNTS[name](self)
        if name.startswith(_COEFFICIENT):
            return _show_coefficient(name)
        figure, _, form = name.partition("/")
        short, _, quantity = figure.partition(".")
        where = self.names.sets.get(short)
        if where is None:
            raise bad_value(f"figure {name}", f"a set of {FIGURES_FILE}", short)
        row = self.by_name.get((where, quantity))
        if row is None:
            quantities = [slug for set_name, slug in self.by_name if set_name == where]
            raise bad_value(
                f"figure {name}", f"a quantity of {where} ({', '.join(quantities)})", quantity
            )
        return _show_entry(row, form, name)

    def _show_study(self, name: str) -> str:
        """Return the text that a study worked out and kept."""
        if name not in self.studies:
            raise bad_value(f"figure {name}", f"a figure of {STUDIES_FILE}", "none")
        return self.studies[name]


def load_source(docs: Path) -> FigureSource:
    """Read the names and the ledger of a documentation folder."""
    names = decode_yaml((docs / FIGURES_FILE).read_bytes(), FigureNames, FIGURES_FILE)
    rows = json.loads((docs / LEDGER_FILE).read_bytes())["rows"]
    kept = docs / STUDIES_FILE
    studies = json.loads(kept.read_bytes()) if kept.is_file() else {}
    return FigureSource(names, rows, studies)


def list_pages(root: Path) -> list[Path]:
    """Return README, the paper and the pages below docs/, without those that other commands write
    whole.
    """
    written = ("accuracy.md", "coefficients.md")
    pages = sorted((root / "docs").rglob("*.md"))
    paper = sorted((root / "paper").glob("*.md"))
    return [root / "README.md", *paper, *(page for page in pages if page.name not in written)]


def fill_figures(text: str, source: FigureSource) -> str:
    """Return a page with the figures that its names mean today."""
    return _MARK.sub(lambda mark: f"<!--fig:{mark[1]}-->{source.show(mark[1])}<!--/fig-->", text)


def fill_consoles(text: str, run: Callable[[Sequence[str]], str]) -> str:
    """Return a page whose console blocks hold what their commands print now."""

    def fill(block: re.Match[str]) -> str:
        printed = run(shlex.split(block[2])[1:])
        return f"{block[1]}{printed.rstrip()}\n{block[4]}"

    return _CONSOLE.sub(fill, text)


def list_console_commands(text: str) -> dict[str, str]:
    """Return the command of every console block that begins with one, and what the page prints."""
    return {block[2]: block[3] for block in _CONSOLE.finditer(text)}


def write_docs(
    root: Path,
    rows: Sequence[LedgerRow] | None,
    run: Callable[[Sequence[str]], str],
) -> list[Path]:
    """Write the ledger's figures into README and docs, and return the pages that changed.

    Without ``rows`` the ledger that ``docs/ledger.json`` holds is quoted.
    """
    docs = root / "docs"
    if not (docs / FIGURES_FILE).is_file():
        raise BadInput(f"{root}: no docs/{FIGURES_FILE}. Run this in a clone of the repository.")
    if rows is not None:
        plain = json.dumps({"rows": list(rows)}, indent=1, ensure_ascii=False)
        write_whole(docs / LEDGER_FILE, f"{plain}\n".encode())
    source = load_source(docs)
    changed = []
    for page in list_pages(root):
        before = page.read_text(encoding="utf-8")
        after = fill_consoles(fill_figures(before, source), run)
        if after != before:
            write_whole(page, after.encode())
            changed.append(page)
    return changed


def run_command(
    words: Sequence[str],
    main: Callable[..., Any],
    make_environment: Callable[..., Any],
) -> str:
    """Return what a page shows of a command: a prediction's first lines, a first table, an
    error.
    """
    stdout = io.StringIO()
    stderr = io.StringIO()
    if main(list(words), make_environment(stdout, stderr, {})):
        return "\n".join(textwrap.wrap(stderr.getvalue(), 118))
    lines = [line.rstrip() for line in stdout.getvalue().splitlines()]
    gaps = [place for place, line in enumerate(lines) if not line]
    return "\n".join(lines[: gaps[0 if words[0] == "predict" else 1]])


def find_stale_figures(text: str, source: FigureSource) -> list[str]:
    """Return the figures of a page that are not what their names mean, with both."""
    stale = []
    for mark in _MARK.finditer(text):
        today = source.show(mark[1])
        if mark[2] != today:
            stale.append(f"{mark[1]}: {mark[2]!r} on the page, {today!r} in the ledger")
    return stale


def find_unnamed_figures(text: str, names: FigureNames) -> list[str]:
    """Return figures of a page that have neither a name nor a line among the inputs, with
    context.
    """
    live = text
    for pattern in (r"```.*?```", r"^ {4}[^\n]*$", r"`[^`]*`", r"\]\([^)]*\)"):
        live = re.sub(pattern, " ", live, flags=re.DOTALL | re.MULTILINE)
    live = _MARK.sub(" ", live)
    live = re.sub(r"<!--.*?-->", " ", live, flags=re.DOTALL)
    live = " ".join(live.split())
    for words in sorted(names.inputs, key=len, reverse=True):
        live = live.replace(words, " ")
    return [
        live[max(figure.start() - 30, 0) : figure.end() + 20] for figure in _FIGURE.finditer(live)
    ]


def make_slug(text: str) -> str:
    """Return a quantity as it is written in names.

    >>> make_slug("tokens/s, 90th percentile")
    'tokens-s-90th-percentile'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _show_change(change: PredictedChange) -> str:
    """Return the size of a change in whole percent."""
    values = []
    for line in (change.of, change.against):
        verb, subject, *words = shlex.split(line)
        pairs = zip(words[::2], words[1::2], strict=True)
        typed = {name[2:].replace("-", "_"): value for name, value in pairs}
        numbers = {name: int(value) if value.isdigit() else value for name, value in typed.items()}
        answer = answer_commands([TypedCommand(verb, subject, numbers)])[0]
        values.append(read_answer(answer, change.place))
    return f"{abs(100.0 * (values[0] / values[1] - 1.0)):.0f} %"


def _show_coefficient(name: str) -> str:
    """Return the value of a coefficient as its file has it."""
    subject, _, key = name.removeprefix(_COEFFICIENT).partition(".")
    entries = read_subject(subject)
    if key not in entries:
        raise bad_value(f"figure {name}", f"a coefficient of {subject}", key)
    value = entries[key].value
    written = " to ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else str(value)
    return written.replace(" us", " µs")


def _show_entry(
    row: LedgerRow,
    form: str,
    name: str,
) -> str:
    """Return an entry of a row: its error with one digit and a unit, unless the form asks
    otherwise.
    """
    if form in ("", "bare") or form.isdigit():
        value = row["mape"]
        if value is None:
            raise bad_value(f"figure {name}", "a row with an error", "none; run --write-docs")
        digits = int(form) if form.isdigit() else 1
        return f"{value:.{digits}f}" + ("" if form == "bare" else " %")
    if form == "n":
        return f"{row['n']:,}"
    entry = row.get(form.replace("-", "_"))
    if entry is None:
        raise bad_value(f"figure {name}", "an entry of its row", form)
    return f"{entry:.1f} %" if isinstance(entry, float) else str(entry)


def _list_public_coverage(source: FigureSource) -> list[float]:
    """Return the shares inside of the sets of measurements by others."""
    own_sets = ("coverage, h200 layers", "coverage, h200 whole", "coverage, h200 engine")
    return [
        row["coverage"]
        for row in source.rows
        if row["set"].startswith("coverage, ") and not row["set"].startswith(own_sets)
    ]


_COUNTS: Mapping[str, Callable[[FigureSource], str]] = {
    "count.models": lambda _: f"{len(list_models()):,}",
    "count.gpus": lambda _: f"{len(hardware.gpu_names()):,}",
    "coverage.public-sets": lambda source: f"{len(_list_public_coverage(source))}",
    "coverage.public-low": lambda source: f"{min(_list_public_coverage(source)):.0f}",
    "coverage.public-high": lambda source: f"{max(_list_public_coverage(source)):.0f} %",
}
