"""The accuracy ledger: rows of every set that can be found, printed as text or written as a page.

A set is a function that returns rows. Sets that judge by measurements of others are in ``studies/public_checks`` and
are made where Wattcast runs from its repository. Rows that take minutes are made when asked for and kept, one JSON
file per section, in ``WATTCAST_CACHE`` or in ``wattcast`` of the user's cache. The file is named by what the rows
depend on: a change of the database, of a bundle or of any module that fitting and prediction run through gives
another name, so a kept result is never stale. Other studies leave their rows there too, and the ledger lists them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import database_folder
from wattcast.core.strict_files import load_study, reference_folder
from wattcast.core.whole_files import cache_root, write_whole
from wattcast.counter_models.counter_validation import make_counter_model_rows
from wattcast.fit.database_fit import fit_kernel_database, shipped_held_out
from wattcast.fit.held_out import HeldOutRows
from wattcast.fit.scoring import LedgerRow, make_absent_row, make_ledger_row
from wattcast.gpuwattch.energy_checks import make_energy_rows
from wattcast.gpuwattch.measured_energies import PARENT, judge_held_out
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.validate.kernel_checks import (
    card_rows,
    choice_rows,
    counter_rows,
    engine_kernel_rows,
    interval_rows,
    kernel_rows,
    layer_rows,
)
from wattcast.validate.model_checks import model_rows
from wattcast.validate.serving_checks import serving_rows

GPUS = ("h200",)  # with a fitted bundle and a database that ship
STUDIES = {  # section of the ledger -> the script below studies/ that makes its rows
    "learning": "learning_curves.py",
    "cards": "cards_left_out.py",
    "never-measured": "never_measured.py",
    "suggest": "suggested_rows.py",
    "few-rows": "few_rows.py",
    "ablations": "ablations.py",
}
Tell = Callable[[str], None]  # takes a line of progress
_PACKAGE = Path(__file__).resolve().parents[1]
# folders that a held-out error follows from
_INGREDIENTS = ("kernels", "power", "predictor", "fit", "hardware", "database", "workload", "validate")


def build_ledger(
    refit: bool = False,
    tell: Tell | None = None,
    *,
    long: bool = False,
    again: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[LedgerRow]:
    """Return the rows of every set that can be found.

    ``refit`` repeats the cross-validation instead of reading its results. ``long`` also makes the published sets that
    take minutes, ``again`` even where their results were kept. Rows of studies are listed where a study left them.
    """
    say = tell or (lambda _: None)
    env = os.environ if variables is None else variables
    reference = reference_folder(env)
    rows: list[LedgerRow] = []
    for gpu in GPUS:
        held = fit_kernel_database(gpu, gpu, tell)[1] if refit else load_held_out(gpu)
        rows += kernel_rows(held, gpu) + interval_rows(held, gpu)
        for make in (counter_rows, choice_rows, engine_kernel_rows, serving_rows, layer_rows, model_rows):
            rows += make(gpu)
        rows += make_counter_model_rows(gpu) + card_rows(gpu, held)
        for section, script in STUDIES.items():
            kept = load_rows(f"{section}-{gpu}", env)
            reason = f"takes minutes: run `python studies/{script}` in the repository"
            rows += [make_absent_row(f"{gpu} {section.replace('-', ' ')}", "all", reason)] if kept is None else kept
    judged = judge_held_out(database_folder(PARENT))
    where, quantity = f"{PARENT} components of AccelWattch", "power, operators never used"
    rows.append(make_ledger_row(where, quantity, judged.rows, judged.mape, judged.constant, None, 8.0))
    rows += [row for gpu in GPUS for row in make_energy_rows(gpu)]
    public = load_study("public_checks.public_sets")
    if public is None:
        reason = "judged where Wattcast runs from its repository (studies/public_checks)"
        return [*rows, make_absent_row("measurements of others", "all", reason)]
    for section, (where, quantity, make_long) in public.LONG_SETS.items():
        kept = load_rows(section, env)
        if long and (again or kept is None):
            say(f"{section}: working")
            kept = load_or_make_rows(section, partial(make_long, reference, say), env, again)
        reason = "takes minutes: run `wattcast lab validate --ablations`"
        rows += [make_absent_row(where, quantity, reason)] if kept is None else kept
    return rows + list(public.make_quick_rows(reference, say))


def load_held_out(gpu: str) -> HeldOutRows:
    """Return the held-out predictions that ship with a GPU's bundle."""
    held = shipped_held_out(gpu)
    if held is None:
        raise BadInput(f"no held-out results ship for {gpu}. Run `wattcast lab validate --refit`.")
    return held


def load_or_make_rows(
    section: str, make: Callable[[], list[LedgerRow]], variables: Mapping[str, str], again: bool = False
) -> list[LedgerRow]:
    """Return the rows of a section: read where they were kept, otherwise made and kept."""
    rows = None if again else load_rows(section, variables)
    if rows is None:
        rows = make()
        path = _section_file(section, variables)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps({"rows": rows}, indent=1).encode())
    return rows


def load_rows(section: str, variables: Mapping[str, str]) -> list[LedgerRow] | None:
    """Return the kept rows of a section, or None where there are none (or half a file)."""
    try:
        return list(json.loads(_section_file(section, variables).read_bytes())["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_study(section: str, make: Callable[[str, Tell], list[LedgerRow]]) -> None:
    """Run a study from the command line: make its rows, keep them for the ledger, and print them."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--gpu", default="h200", help="a GPU whose database ships")
    parser.add_argument("--again", action="store_true", help="even where results were kept")
    asked, _ = parser.parse_known_args()

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    rows = load_or_make_rows(f"{section}-{asked.gpu}", lambda: make(asked.gpu, tell), os.environ, asked.again)
    print(json.dumps({"rows": rows}, indent=1))


def _section_file(section: str, variables: Mapping[str, str]) -> Path:
    return cache_root(variables) / f"{section}-{source_digest()}.json"


@cache
def source_digest() -> str:
    """Return a hash of every file that a result depends on."""
    found = hashlib.sha256()
    for path in (path for part in _INGREDIENTS for path in sorted((_PACKAGE / part).rglob("*"))):
        if path.is_file() and path.suffix in (".py", ".yaml", ".csv", ".npz", ".parquet"):
            found.update(path.relative_to(_PACKAGE).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


_COLUMNS = ("set", "quantity", "n", "mape", "floor", "published", "must", "aim")


def format_ledger(rows: list[LedgerRow]) -> str:
    """Format rows as a plain table; further entries of a row stand at its end."""
    lines = [_cells(row) for row in rows]
    head = [*_COLUMNS, ""]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *lines]
    )


def ledger_to_markdown(rows: list[LedgerRow]) -> str:
    """Write ``docs/accuracy.md``: one table per set, and where the numbers come from."""
    text = [
        "# Accuracy",
        "",
        "Written by `wattcast lab validate --write docs/accuracy.md`. Fitted numbers are judged out of fold: on "
        "rows, shapes or models that no fit saw. About a hundred constants beside them (thresholds, knots, priors, "
        "factors of the forecast) were set by hand with rows in view.",
        "",
    ]
    for gpu in GPUS:
        bundle = shipped_bundle(gpu)
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
    "always the top clock for the clock; five fitted numbers, other model families only, for whole models; the full "
    "model itself beside an ablation. All rows of a shape lie in one of five folds; corrections, learned factors, "
    "energies, V(f) and the clock law are fitted inside the other four. Interval ends are checked against folds they "
    "were not taken from; width is high minus low end over the prediction, in percent."
)


def _cells(row: LedgerRow) -> list[str]:
    more = {k: v for k, v in row.items() if k not in _COLUMNS and v is not None}
    return [
        *(_text(row[name]) for name in _COLUMNS),
        ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in more.items()),
    ]


def _text(value: Any) -> str:
    if isinstance(value, float) and 0.0 < abs(value) < 0.05:
        return f"{value:.2g}"
    return "" if value is None else (f"{value:.1f}" if isinstance(value, float) else str(value))
