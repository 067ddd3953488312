"""The whole ledger, as rows, as text and as a page."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from wattcast.errors import BadInput
from wattcast.fit.kernels_run import fit_database, held_out_of
from wattcast.fit.kernels_split import HeldOut
from wattcast.fitted import fitted
from wattcast.reference import reference_folder
from wattcast.validate.a100 import a100_rows
from wattcast.validate.choice import choice_rows
from wattcast.validate.counters import counter_rows
from wattcast.validate.kernels import coverage, kernel_rows
from wattcast.validate.rows import Row
from wattcast.validate.zeus import zeus_rows

GPUS = ("h200",)  # with a fitted bundle and a database that ship


def ledger(refit: bool = False, tell: Callable[[str], None] | None = None) -> list[Row]:
    """Every set that can be found; ``refit`` repeats the cross-validation instead of reading its results."""
    rows: list[Row] = []
    for gpu in GPUS:
        held = fit_database(gpu, gpu, tell)[1] if refit else _kept(gpu)
        rows += kernel_rows(held, gpu) + coverage(held, gpu) + counter_rows(gpu) + choice_rows(gpu)
    return rows + _of_others()


def _of_others() -> list[Row]:
    """Forecasts against measurements that belong to others, where those are here."""
    folder = reference_folder(os.environ)
    if folder is None:
        return []
    rows = a100_rows(folder) if (folder / "energaizer").is_dir() else []
    return rows + (zeus_rows(folder) if (folder / "zeus").is_dir() else [])


def _kept(gpu: str) -> HeldOut:
    held = held_out_of(gpu)
    if held is None:
        raise BadInput(f"no held-out results ship for {gpu}. Run `wattcast validate --refit`.")
    return held


_COLUMNS = ("set", "quantity", "n", "mape", "floor", "published", "must", "aim")


def show(rows: list[Row]) -> str:
    """A plain table; what further a row has to say follows at its end."""
    lines = [_cells(row) for row in rows]
    head = [*_COLUMNS, ""]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *lines]
    )


def to_markdown(rows: list[Row]) -> str:
    """``docs/accuracy.md``: one table a set, and where the numbers come from."""
    text = [
        "# Accuracy",
        "",
        "Written by `wattcast validate --write docs/accuracy.md`; every number is out of fold.",
        "",
    ]
    for gpu in GPUS:
        bundle = fitted(gpu)
        if bundle is not None:
            text += [
                f"`{gpu}`: {bundle.provenance.source}, {bundle.provenance.device}. {bundle.provenance.note}.",
                "",
            ]
    text += [_LEGEND, ""]
    for name in dict.fromkeys(row["set"] for row in rows):
        text += [f"## {name}", "", f"| {' | '.join(_COLUMNS[1:])} | |", f"|{'---|' * len(_COLUMNS)}"]
        text += [f"| {' | '.join(_cells(row)[1:])} |" for row in rows if row["set"] == name]
        text.append("")
    return "\n".join(text)


_LEGEND = (
    "Errors are mean absolute percentages. Floors: a plain roofline for latency, the mean of the family for power, "
    "always the top clock for the clock. All rows of a shape lie in one of five folds; corrections, learned factors, "
    "energies, V(f) and the clock law are fitted inside the other four. Interval ends are checked against folds they "
    "were not taken from; width is high minus low end over the prediction, in percent."
)


def _cells(row: Row) -> list[str]:
    more = {k: v for k, v in row.items() if k not in _COLUMNS and v is not None}
    return [
        *(_text(row[name]) for name in _COLUMNS),
        ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in more.items()),
    ]


def _text(value: Any) -> str:
    return "" if value is None else (f"{value:.1f}" if isinstance(value, float) else str(value))
