"""The whole ledger, as rows, as text and as a page.

A section is a function that returns rows; quick ones run every time, long ones when asked for, and their
results are kept (:mod:`wattcast.validate.store`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from wattcast import hardware
from wattcast.errors import BadInput
from wattcast.fit import kernels_data
from wattcast.fit.kernels import idle_curve
from wattcast.fit.kernels_run import fit_database, held_out_of
from wattcast.fit.kernels_split import HeldOut
from wattcast.fitted import fitted
from wattcast.reference import reference_folder
from wattcast.validate import ablations, published
from wattcast.validate.a100 import a100_rows
from wattcast.validate.cards import card_rows, coverage_rows
from wattcast.validate.choice import choice_rows
from wattcast.validate.component_energies import energy_rows
from wattcast.validate.counter_model import counter_model_rows
from wattcast.validate.counters import counter_rows
from wattcast.validate.kernels import coverage, kernel_rows
from wattcast.validate.layers import layer_rows
from wattcast.validate.learning import learning_rows
from wattcast.validate.models import model_rows
from wattcast.validate.power_baselines import power_rows
from wattcast.validate.pretended import CARDS, few_rows
from wattcast.validate.rows import Row, absent
from wattcast.validate.store import kept, seen
from wattcast.validate.suggesting import suggest_rows
from wattcast.validate.unseen import unseen_rows
from wattcast.validate.walltime import wall_rows
from wattcast.validate.zeus import zeus_rows

GPUS = ("h200",)  # with a fitted bundle and a database that ship
Tell = Callable[[str], None]


def ledger(
    refit: bool = False,
    tell: Tell | None = None,
    *,
    long: bool = False,
    learning: bool = False,
    again: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[Row]:
    """Every set that can be found.

    ``refit`` repeats the cross-validation instead of reading its results; ``long`` adds the ablations and
    sets that take minutes, ``learning`` the learning curves (``again``: even where their results were kept).
    """
    say = tell or (lambda _: None)
    env = os.environ if variables is None else variables
    reference = reference_folder(env)
    rows: list[Row] = []
    for gpu in GPUS:
        held = fit_database(gpu, gpu, tell)[1] if refit else held_out(gpu)
        rows += kernel_rows(held, gpu) + coverage(held, gpu) + counter_rows(gpu) + choice_rows(gpu)
        rows += layer_rows(gpu)
        rows += model_rows(gpu) + counter_model_rows(gpu)
        rows += learning_rows(gpu, env, say, learning, again) + card_rows(gpu, held)
        studies = {
            f"cards-{gpu}": partial(coverage_rows, gpu, say),
            f"never-measured-{gpu}": partial(unseen_rows, gpu, held, say),
            f"suggest-{gpu}": partial(suggest_rows, gpu, say),
        }
        studies |= {f"few-rows-{i}-{gpu}": partial(few_rows, gpu, card, say) for i, card in enumerate(CARDS)}
        for section, study in studies.items():
            rows += _long(section, study, learning, again, env, say)
        rows += _long(f"ablations-{gpu}", partial(_ablations, gpu, held, say), long, again, env, say)
    rows += _long("titanx", partial(published.titanx_rows, reference, say), long, again, env, say)
    rows += _long("v100", partial(published.v100_rows, reference, say), long, again, env, say)
    rows += published.component_rows(reference, say) + energy_rows(reference)
    return rows + _forecasts(reference)


def _forecasts(reference: Path | None) -> list[Row]:
    """Forecasts against measurements that belong to others, where those are here."""
    if reference is None:
        return []
    rows = a100_rows(reference) if (reference / "energaizer").is_dir() else []
    return rows + (zeus_rows(reference) if (reference / "zeus").is_dir() else [])


_GOALS = {
    "titanx": (published.TITANX, "power, leave one benchmark out, V inferred"),
    "v100": (published.V100, "power, leave one kernel out"),
}


def _long(
    section: str, make: Callable[[], list[Row]], long: bool, again: bool, env: Mapping[str, str], say: Tell
) -> list[Row]:
    """A section that takes minutes: its kept rows, or made where asked for, or a row that says how to get them."""
    if long or seen(section, env):
        if long and (again or not seen(section, env)):
            say(f"{section}: working")
        return kept(section, make, env, again and long)
    if section.startswith(("suggest-", "few-rows-", "cards-", "never-measured-")):
        name, _, gpu = section.rpartition("-")
        where = f"{gpu} {name.replace('-', ' ').rstrip(' 0123456789')}"
        return [absent(where, "all", "takes minutes: run `wattcast validate --learning`")]
    where, quantity = _GOALS.get(section, (section.replace("ablations-", "") + " ablations", "all"))
    return [absent(where, quantity, "takes minutes: run `wattcast validate --ablations`")]


def _ablations(gpu: str, held: HeldOut, say: Tell) -> list[Row]:
    chip, rows = hardware.load(gpu), kernels_data.load(gpu)
    say(f"{gpu}: quick ablations")
    found = ablations.quick_rows(gpu, held) + power_rows(rows, chip, idle_curve(kernels_data.idle(gpu), chip))
    return found + wall_rows(gpu) + ablations.long_rows(gpu, held, say)


def held_out(gpu: str) -> HeldOut:
    """The held-out predictions that ship with a GPU's bundle."""
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
    "always the top clock for the clock; five fitted numbers, other model families only, for whole models; the full "
    "model itself beside an ablation. All rows of a shape lie in one of five folds; corrections, learned factors, "
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
    if isinstance(value, float) and 0.0 < abs(value) < 0.05:
        return f"{value:.2g}"
    return "" if value is None else (f"{value:.1f}" if isinstance(value, float) else str(value))
