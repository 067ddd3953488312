"""The accuracy ledger: rows of every set that can be found, printed as text or written as a page.

A set is a function that returns rows. Quick sets are computed every time; sets that take minutes are computed when
asked for and kept (``ledger_store``); studies in the repository leave their rows there too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from wattcast.core.errors import BadInput
from wattcast.core.strict_files import reference_folder
from wattcast.counter_models.counter_validation import make_counter_model_rows
from wattcast.fit.database_fit import fit_kernel_database, shipped_held_out
from wattcast.fit.held_out import HeldOutRows
from wattcast.fit.scoring import LedgerRow, make_absent_row
from wattcast.gpuwattch.energy_checks import make_energy_rows
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.validate.collective_checks import collective_rows, public_rows
from wattcast.validate.coverage_checks import coverage_rows
from wattcast.validate.engine_checks import engine_kernel_rows, table_rows
from wattcast.validate.kernel_checks import (
    card_rows,
    choice_rows,
    counter_rows,
    interval_rows,
    kernel_rows,
    layer_rows,
)
from wattcast.validate.ledger_store import Tell, load_or_make_rows, load_rows
from wattcast.validate.model_checks import model_rows
from wattcast.validate.other_gpu_checks import kernel_table_rows, other_gpu_rows
from wattcast.validate.published_checks import TITANX, V100, component_rows, power_limit_rows, titanx_rows, v100_rows
from wattcast.validate.serving_checks import serving_rows
from wattcast.validate.training_checks import training_rows

GPUS = ("h200",)  # with a fitted bundle and a database that ship
STUDIES = {  # section of the ledger -> the script below studies/ that makes its rows
    "learning": "learning_curves.py",
    "cards": "cards_left_out.py",
    "never-measured": "never_measured.py",
    "suggest": "suggested_rows.py",
    "few-rows": "few_rows.py",
    "ablations": "ablations.py",
}


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
        rows += kernel_rows(held, gpu) + interval_rows(held, gpu) + counter_rows(gpu) + choice_rows(gpu)
        rows += (
            engine_kernel_rows(gpu)
            + serving_rows(gpu)
            + layer_rows(gpu)
            + model_rows(gpu)
            + make_counter_model_rows(gpu)
            + card_rows(gpu, held)
        )
        for section, script in STUDIES.items():
            kept = load_rows(f"{section}-{gpu}", env)
            reason = f"takes minutes: run `python studies/{script}` in the repository"
            rows += [make_absent_row(f"{gpu} {section.replace('-', ' ')}", "all", reason)] if kept is None else kept
    for section, make, where, quantity in (
        ("titanx", titanx_rows, TITANX, "power, leave one benchmark out, V inferred"),
        ("v100", v100_rows, V100, "power, leave one kernel out"),
        ("training", training_rows, "published training", "tokens/s"),
        ("coverage", coverage_rows, "coverage of 90 % intervals", "latency and power"),
    ):
        kept = load_rows(section, env)
        if long and (again or kept is None):
            say(f"{section}: working")
            kept = load_or_make_rows(section, partial(make, reference, say), env, again)
        reason = "takes minutes: run `wattcast lab validate --ablations`"
        rows += [make_absent_row(where, quantity, reason)] if kept is None else kept
    rows += component_rows(reference, say) + make_energy_rows(reference)
    if reference is not None and (reference / "energaizer").is_dir():
        rows += other_gpu_rows(reference)
    if reference is not None and (reference / "aiconfigurator").is_dir():
        rows += kernel_table_rows(reference) + collective_rows(reference) + table_rows(reference)
    rows += public_rows()
    if reference is not None and (reference / "zeus").is_dir():
        rows += power_limit_rows(reference)
    return rows


def load_held_out(gpu: str) -> HeldOutRows:
    """Return the held-out predictions that ship with a GPU's bundle."""
    held = shipped_held_out(gpu)
    if held is None:
        raise BadInput(f"no held-out results ship for {gpu}. Run `wattcast lab validate --refit`.")
    return held


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
