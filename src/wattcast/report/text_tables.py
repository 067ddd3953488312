"""Print predictions as tables in a terminal, and make the plain tables that all commands print."""

from __future__ import annotations

import textwrap
from collections.abc import (
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattcast.core.units import show, show_plain

if TYPE_CHECKING:  # commands import this file before they know whether they predict
    from wattcast.predictor.answer_lines import AnswerLine
    from wattcast.predictor.prediction import Prediction

FEW_OPS = 5  # operators of a first screen
FEW_NOTES = 3  # assumptions of a first screen
_UNIT_BY_ENDING = (
    ("byte_per_s", "byte/s"),
    ("byte_per_cycle", "byte/cycle"),
    ("_per_s", ""),
    ("_per_j", ""),
    ("_js", ""),
    ("_hz", "Hz"),
    ("_byte", "byte"),
    ("_s", "s"),
    ("_w", "W"),
    ("_j", "J"),
)


def new_table(
    *columns: str,
    title: str | None = None,
    rows: Iterable[Sequence[str]] = (),
    left: Collection[str] = (),
) -> Table:
    """Return a plain table of ``rows``.

    The first column and those of ``left`` are left-aligned, the others right.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
    )
    for index, column in enumerate(columns):
        is_text = index == 0 or column in left
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def format_cell(column: str, value: Any) -> str:
    """Format one value in the unit that its column names.

    >>> format_cell("power_w", 412.04), format_cell("capped", True), format_cell("sm_count", 132.0)
    ('412 W', 'yes', '132')
    """
    if value is None:
        return ""
    if column.endswith("_share"):
        return f"{value:.0%}"
    value = value.item() if hasattr(value, "item") else value  # of NumPy
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, str):
        return escape(value)
    for ending, unit in _UNIT_BY_ENDING:
        if column.endswith(ending):
            if unit:
                return show(float(value), unit)
            break
    return f"{show_plain(value, 4)}" if isinstance(value, float) else f"{value:,}"


def print_rows(
    console: Console,
    records: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    title: str | None = None,
    left: Collection[str] = (),
) -> None:
    """Print records as a table.

    ``columns`` maps columns to headings, ``left`` names those that hold text. Columns that are
    empty everywhere are left out.
    """
    filled = []
    headings = []
    for name, heading in columns.items():
        if any(row.get(name) is not None for row in records):
            filled.append(name)
            headings.append(heading)
    table = new_table(*headings, title=title, left=[columns[name] for name in left])
    for row in records:
        table.add_row(*(format_cell(name, row.get(name)) for name in filled))
    console.print(table)


def print_notes(
    console: Console,
    notes: Sequence[str],
    title: str = "Assumed",
) -> None:
    """Print what was assumed, or warnings, in small type."""
    if notes and title:
        console.print(title, style="bold")
    for note in dict.fromkeys(notes):
        console.print(f"  - {escape(note)}", style="dim")


def print_predictions(
    console: Console,
    predictions: Sequence[Prediction],
    details: bool = False,
) -> None:
    """Print one prediction as one screen, or several as one table.

    ``details`` prints everything about each.
    """
    if len(predictions) == 1:
        _print_one(console, predictions[0], details)
        return
    console.print(_table_predictions(predictions))
    far = [p.support.reason for p in predictions if not p.support.inside]
    for reason in dict.fromkeys(far):
        console.print(f"Far from what was measured: {escape(reason)}")
    if details:
        for p in predictions:
            _print_one(console, p, details)
    else:
        notes: list[str] = []
        for prediction in predictions:
            notes += prediction.assumptions
        print_notes(console, notes)


def _table_predictions(predictions: Sequence[Prediction]) -> Table:
    """Return the answers of several predictions, a row each."""
    from wattcast.predictor.answer_lines import judge_confidence, list_answers

    first = predictions[0]
    title = f"{len(predictions)} workloads on {first.gpu}, which is {first.status}"
    names = ("per second", "energy", "total power", "latency", "memory", "sure", "support")
    rows = new_table("workload", "GPUs", *names, title=title)
    labels = ("throughput", "energy", "total power", "latency", "memory")
    for p in predictions:
        values = {line.label: line.value for line in reversed(list_answers(p))}
        answers = [values.get(label, "") for label in labels]
        confidence = judge_confidence(p).value
        rows.add_row(
            escape(p.name),
            str(p.gpu_count),
            *answers,
            confidence,
            p.support.word,
        )
    return rows


def print_answers(
    console: Console,
    title: str,
    lines: Iterable[AnswerLine],
) -> None:
    """Print a title and the answers below it, each with its remark beside it."""
    console.print(f"[bold]{escape(title)}[/bold]")
    for line in lines:
        value = f"{line.value:<26}" if line.remark else line.value
        text = f"  {line.label:<12} [bold]{escape(value)}[/bold]"
        remark = f"\n{'':42}".join(textwrap.wrap(line.remark, max(console.width - 42, 20)))
        console.print(f"{text} [dim]{escape(remark)}[/dim]" if line.remark else text)


_CAPPED = "held down by the power limit"


def describe_clock(p: Prediction) -> str:
    """Say what decides the clock of a run.

    It is a mean where parts of the run have clocks of their own.
    """
    cause = _CAPPED if p.capped else ""
    return f"mean over the time; {cause}" if p.phases else cause


def _table_phases(p: Prediction) -> Table:
    """Return the parts of a run that settle at clocks of their own."""
    rows = new_table(
        "phase, one GPU",
        "time",
        "share",
        "power",
        "clock",
        "",
    )
    for phase in p.phases:
        rows.add_row(
            escape(phase.name),
            show(float(phase.latency_s), "s", 3),
            f"{float(phase.latency_s) / float(p.latency_s):.0%}",
            show(float(phase.power_w), "W", 3),
            show(float(phase.clock_hz), "Hz", 3),
            _CAPPED if phase.capped else "",
        )
    return rows


def _table_parts(p: Prediction) -> Table:
    """Return the parts of a picture, which add up to it."""
    rows = new_table(
        "part, one GPU",
        "runs",
        "time",
        "share",
        "power",
        "energy",
        "share",
    )
    for part in p.parts:
        seconds = float(part.latency_s)
        joules = float(part.energy_j)
        rows.add_row(
            escape(part.name),
            str(part.runs),
            show(seconds, "s", 3),
            f"{seconds / float(p.latency_s):.1%}",
            show(float(part.power_w), "W", 3),
            show(joules, "J", 3),
            f"{joules / float(p.energy_j):.1%}",
        )
    return rows


def _print_one(
    console: Console,
    p: Prediction,
    details: bool,
) -> None:
    """Print the answer first, then modules, operators and assumptions: the most important, or
    all.
    """
    from wattcast.predictor import answer_lines

    lines = (
        *answer_lines.list_answers(p),
        answer_lines.judge_confidence(p),
        answer_lines.support_line(p),
    )
    print_answers(console, answer_lines.title_of(p), lines)
    console.print(_table_modules(p))
    if p.parts:
        console.print(_table_parts(p))
    if p.phases and (details or not p.parts):
        console.print(_table_phases(p))
    console.print(_table_operators(p, None if details else FEW_OPS))
    if details:
        console.print(_table_one_gpu(p))
    notes = answer_lines.rank_assumptions(p)
    shown = notes if details else notes[:FEW_NOTES]
    print_notes(console, shown)
    if not details:
        hidden = len(notes) - len(shown)
        ops = len(p.basis.timeline.calls)
        more = f"{hidden} more assumptions, all {ops} operators, intervals and clocks: --details"
        console.print(f"  {more}", style="dim")


def _table_modules(p: Prediction) -> Table:
    """Return the power of each module, the largest first."""
    rows = new_table("power of one GPU", "", "share", "busy")
    for module in sorted(p.modules, key=lambda m: -float(m.power_w)):
        busy = "" if module.utilisation is None else f"{float(module.utilisation):.0%}"
        power_w = float(module.power_w)
        share = f"{power_w / float(p.power_w):.0%}"
        rows.add_row(module.name, show(power_w, "W", 2), share, busy)
    return rows


def _table_operators(p: Prediction, most: int | None) -> Table:
    """Return the operators that take most energy."""
    rows = new_table(
        "operators by energy",
        "calls",
        "time",
        "share",
        "power",
        "energy",
        "share",
    )
    for share in p.rank_ops(most):
        seconds = float(share.latency_s)
        joules = float(share.energy_j)
        rows.add_row(
            escape(str(share.op)),
            str(share.count),
            show(seconds, "s", 2),
            f"{seconds / float(p.latency_s):.0%}",
            show(float(share.power_w), "W", 2),
            show(joules, "J", 2),
            f"{joules / float(p.energy_j):.0%}",
        )
    return rows


def _table_one_gpu(p: Prediction) -> Table:
    """Return latency, power, energy and clocks of one GPU, with their intervals."""
    from wattcast.predictor import answer_lines

    rows = new_table("", "predicted", f"{p.interval.level:.0%} interval", title="One GPU")
    for name, value, ends, unit in (
        ("latency", p.latency_s, p.interval.latency_s, "s"),
        ("power", p.power_w, p.interval.power_w, "W"),
        ("energy", p.energy_j, p.interval.energy_j, "J"),
    ):
        interval = answer_lines.show_between(value, ends, unit)[1]
        rows.add_row(name, show(float(value), unit), interval)
    rows.add_row("highest power", show(float(p.peak_power_w), "W"), "of any kernel")
    rows.add_row("clock", show(float(p.clock_hz), "Hz"), describe_clock(p))
    rows.add_row("effective clock", show(float(p.effective_clock_hz), "Hz"), "")
    waiting = 1.0 - float(p.busy_s) / float(p.latency_s)
    rows.add_row("waiting for the host", f"{waiting:.1%}", "")
    origin = ", ".join(filter(None, (p.provenance.source, p.provenance.device)))
    rows.add_row("coefficients", str(p.status), escape(origin))
    return rows
