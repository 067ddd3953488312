"""The accuracy ledger: rows of every set that can be found, printed as text or written as a page.

A set is a function that returns rows. Sets that judge by measurements of others are in
``wattcast/lab/validate/public_checks`` and are made where Wattcast runs from its repository. Rows
that take minutes are made when asked for and kept, one JSON file per section, in ``WATTCAST_CACHE``
or in ``wattcast`` of the user's cache. The file is named by what the rows depend on: a change of
the database, of a bundle or of any module that fitting and prediction run through gives another
name, so a kept result is never stale. The long checks keep their rows there too, and the ledger
lists them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.core.row_tables import database_folder
from wattcast.core.strict_files import reference_folder
from wattcast.core.whole_files import cache_root, write_whole
from wattcast.lab.fit.database_fit import fit_kernel_database, load_held_out
from wattcast.lab.gpuwattch.bottom_up.event_energies import make_energy_rows
from wattcast.lab.gpuwattch.measured_energies import PARENT, judge_held_out
from wattcast.lab.validate import kernel_checks as checks
from wattcast.lab.validate.counter_model_checks import make_counter_model_rows
from wattcast.lab.validate.judged_sets import find_other_set, list_judged_rows
from wattcast.lab.validate.model_checks import model_rows, serving_rows
from wattcast.lab.validate.public_checks import public_sets
from wattcast.predictor.bundle.bundle_file import shipped_bundle

if TYPE_CHECKING:
    pass

GPUS = ("h200",)  # with a fitted bundle and a database that ship
LONG_CHECKS = {  # section of the ledger -> the module of long_checks that makes its rows
    "learning": "learning_curves",
    "cards": "cards_left_out",
    "never-measured": "never_measured",
    "suggest": "suggested_rows",
    "few-rows": "few_rows",
    "ablations": "ablations",
}
_PACKAGE = Path(__file__).resolve().parents[2]
# folders that a held-out error follows from
_INGREDIENTS = (
    *("kernels", "power", "predictor", "calibrate", "hardware", "database", "workload"),
    *("lab/fit", "lab/validate"),
)


def build_ledger(
    refit: bool = False,
    tell: Tell = lambda _: None,
    *,
    long: bool = False,
    again: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[LedgerRow]:
    """Return the rows of every set that can be found.

    ``refit`` repeats the cross-validation instead of reading its results. ``long`` also makes the
    published sets that take minutes, ``again`` even where their results were kept. Rows of
    ``long_checks`` are listed where a run kept them."""
    env = os.environ if variables is None else variables
    reference = reference_folder(env)
    rows: list[LedgerRow] = []
    for gpu in GPUS:
        held_rows = fit_kernel_database(gpu, gpu, tell)[1] if refit else load_held_out(gpu)
        rows += checks.kernel_rows(held_rows, gpu) + checks.interval_rows(held_rows, gpu)
        rows += checks.counter_rows(gpu) + checks.choice_rows(held_rows, gpu)
        for make in (checks.engine_kernel_rows, serving_rows, checks.layer_rows, model_rows):
            rows += make(gpu)
        rows += make_counter_model_rows(gpu) + checks.card_rows(gpu, held_rows)
        for section, module in LONG_CHECKS.items():
            stored_rows = load_rows(f"{section}-{gpu}", env)
            reason = f"takes minutes: run `python -m wattcast.lab.validate.long_checks.{module}`"
            rows += (
                [make_absent_row(f"{gpu} {section.replace('-', ' ')}", "all", reason)]
                if stored_rows is None
                else stored_rows
            )
    judged = judge_held_out(database_folder(PARENT))
    where = f"{PARENT} components of AccelWattch"
    quantity = "power, operators never used"
    rows.append(
        make_ledger_row(
            where,
            quantity,
            judged.rows,
            judged.mape,
            judged.constant,
            None,
            8.0,
        )
    )
    rows += [row for gpu in GPUS for row in make_energy_rows(gpu)]
    for section, (where, quantity, make_long) in public_sets.LONG_SETS.items():
        stored_rows = load_rows(section, env)
        if long and (again or stored_rows is None):
            tell(f"{section}: working")
            stored_rows = load_or_make_rows(
                section, partial(make_long, reference, tell), env, again
            )
        reason = "takes minutes: run `wattcast lab validate --ablations`"
        rows += [make_absent_row(where, quantity, reason)] if stored_rows is None else stored_rows
    return mark_asked(rows + list(public_sets.make_quick_rows(reference, tell)), reference)


def mark_asked(rows: list[LedgerRow], reference: Path | None) -> list[LedgerRow]:
    """Return rows that say what was asked: a command that users type, or what else is judged."""
    verbs = {row.where: row.command.verb for row in list_judged_rows(reference)}
    marked = []
    for row in rows:
        other_set = find_other_set(row["set"])
        command = verbs.get(row["set"]) or (other_set.question if other_set else "")
        marked.append({**row, "asked": command})
    return marked


def load_or_make_rows(
    section: str,
    make: Callable[[], list[LedgerRow]],
    variables: Mapping[str, str],
    again: bool = False,
) -> list[LedgerRow]:
    """Return the rows of a section: read where they were kept, otherwise made and kept."""
    rows = None if again else load_rows(section, variables)
    if rows is None:
        rows = make()
        path = _section_file(section, variables)
        path.parent.mkdir(
            mode=0o700,
            parents=True,
            exist_ok=True,
        )
        write_whole(path, json.dumps({"rows": rows}, indent=1).encode())
    return rows


def load_rows(section: str, variables: Mapping[str, str]) -> list[LedgerRow] | None:
    """Return the kept rows of a section, or None where there are none (or half a file)."""
    try:
        return list(json.loads(_section_file(section, variables).read_bytes())["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _section_file(section: str, variables: Mapping[str, str]) -> Path:
    return cache_root(variables) / f"{section}-{source_digest()}.json"


@cache
def source_digest() -> str:
    """Return a hash of every file that a result depends on."""
    digest = hashlib.sha256()
    for path in (path for part in _INGREDIENTS for path in sorted((_PACKAGE / part).rglob("*"))):
        if path.is_file() and path.suffix in (".py", ".yaml", ".csv", ".npz", ".parquet"):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_COLUMNS = ("set", "quantity", "n", "mape", "floor", "published", "must", "aim")


def format_ledger(rows: list[LedgerRow]) -> str:
    """Format rows as a plain table; further entries of a row stand at its end."""
    lines = [_format_row(row) for row in rows]
    head = [*_COLUMNS, ""]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in [head, *lines]
    )


def ledger_to_markdown(rows: list[LedgerRow]) -> str:
    """Write ``docs/accuracy.md``: one table per set, and where the numbers come from."""
    text = [
        "# Accuracy",
        "",
        "Written by `wattcast lab validate --write docs/accuracy.md`. Fitted numbers are "
        "judged out of fold: on "
        "rows, shapes or models that no fit saw. About a hundred constants beside them "
        "(thresholds, knots, priors, "
        "factors of the forecast) were set by hand with rows in view.",
        "",
    ]
    for gpu in GPUS:
        if (bundle := shipped_bundle(gpu)) is not None:
            origin = bundle.provenance
            text += [f"`{gpu}`: {origin.source}, {origin.device}. {origin.note}.", ""]
    text += [_LEGEND, ""]
    for name in dict.fromkeys(row["set"] for row in rows):
        text += [f"## {name}", "", _describe_asked(name, rows), ""]
        text += [f"| {' | '.join(_COLUMNS[1:])} | |", f"|{'---|' * len(_COLUMNS)}"]
        shown = [
            {key: row[key] for key in row if key != "asked"} for row in rows if row["set"] == name
        ]
        text += [f"| {' | '.join(_format_row(row)[1:])} |" for row in shown]
        text.append("")
    return "\n".join(text)


def _describe_asked(name: str, rows: list[LedgerRow]) -> str:
    """Say below the heading of a set where its predictions come from."""
    other_set = find_other_set(name)
    if other_set is not None:
        return f"*No command: {other_set.question}.* {other_set.sentence}"
    verb = next((row.get("asked") for row in rows if row["set"] == name), "")
    return (
        f'Predicted by `wattcast {verb}`; `wattcast lab validate --explain "{name}"` '
        "prints the commands."
    )


_LEGEND = (
    "Errors are mean absolute percentages. Floors: a plain roofline for latency, the mean "
    "of the family for power, "
    "always the top clock for the clock; five fitted numbers, other model families only, "
    "for whole models; the full "
    "model itself beside an ablation. All rows of a shape lie in one of five folds; "
    "corrections, learned factors, "
    "energies, V(f) and the clock law are fitted inside the other four. Interval ends are "
    "checked against folds they "
    "were not taken from; width is high minus low end over the prediction, in percent. "
    "Whole models of an A100 and an "
    "A10 are judged without the seconds of their polling windows in which nothing ran; the "
    "error over the whole window "
    "stands beside. Public rows that nothing judges stand last, with the reason."
)


def _format_row(row: LedgerRow) -> list[str]:
    more = (
        f"{k.replace('_', ' ')} {v}" for k, v in row.items() if k not in _COLUMNS and v is not None
    )
    return [*(_format_value(row[name]) for name in _COLUMNS), ", ".join(more)]


def _format_value(value: Any) -> str:
    if isinstance(value, float) and 0.0 < abs(value) < 0.05:
        return f"{value:.2g}"
    return "" if value is None else (f"{value:.1f}" if isinstance(value, float) else str(value))
