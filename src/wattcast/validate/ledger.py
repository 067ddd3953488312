"""The accuracy ledger: rows of every set that can be found, printed as text, written as a page or
drawn.

A set is a function that returns rows. Sets that judge by measurements of others are in
``studies/public_checks`` and are made where Wattcast runs from its repository. Rows that take
minutes are made when asked for and kept, one JSON file per section, in ``WATTCAST_CACHE`` or in
``wattcast`` of the user's cache. The file is named by what the rows depend on: a change of the
database, of a bundle or of any module that fitting and prediction run through gives another name,
so a kept result is never stale. Other studies leave their rows there too, and the ledger lists
them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast import hardware
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, check_names
from wattcast.core.measured_rows import database_folder
from wattcast.core.strict_files import load_study, reference_folder
from wattcast.core.whole_files import cache_root, write_whole
from wattcast.fit import whole_models
from wattcast.fit.database_fit import fit_kernel_database, shipped_held_out
from wattcast.fit.held_out import HeldOutRows
from wattcast.fit.scoring import LedgerRow, make_absent_row, make_ledger_row
from wattcast.gpuwattch.bottom_up.event_energies import make_energy_rows
from wattcast.gpuwattch.measured_energies import PARENT, judge_held_out
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.report.figure_style import add_caption, new_figure, save_figure
from wattcast.validate import kernel_checks as checks
from wattcast.validate.model_checks import compare_models, model_rows, serving_rows
from wattcast.validate.power_checks import make_counter_model_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_INGREDIENTS = (
    "kernels",
    "power",
    "predictor",
    "fit",
    "hardware",
    "database",
    "workload",
    "validate",
)
OURS, DOT = "#332288", "#000000"  # Tol's muted set (2021): not the colours of modules


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
    published sets that take minutes, ``again`` even where their results were kept. Rows of studies
    are listed where a study left them."""
    env = os.environ if variables is None else variables
    reference = reference_folder(env)
    rows: list[LedgerRow] = []
    for gpu in GPUS:
        held = fit_kernel_database(gpu, gpu, tell)[1] if refit else load_held_out(gpu)
        rows += checks.kernel_rows(held, gpu) + checks.interval_rows(held, gpu)
        rows += checks.counter_rows(gpu) + checks.choice_rows(held, gpu)
        for make in (checks.engine_kernel_rows, serving_rows, checks.layer_rows, model_rows):
            rows += make(gpu)
        rows += make_counter_model_rows(gpu) + checks.card_rows(gpu, held)
        for section, script in STUDIES.items():
            kept = load_rows(f"{section}-{gpu}", env)
            reason = f"takes minutes: run `python studies/{script}` in the repository"
            rows += (
                [make_absent_row(f"{gpu} {section.replace('-', ' ')}", "all", reason)]
                if kept is None
                else kept
            )
    judged = judge_held_out(database_folder(PARENT))
    where, quantity = f"{PARENT} components of AccelWattch", "power, operators never used"
    rows.append(
        make_ledger_row(where, quantity, judged.rows, judged.mape, judged.constant, None, 8.0)
    )
    rows += [row for gpu in GPUS for row in make_energy_rows(gpu)]
    public = load_study("public_checks.public_sets")
    if public is None:
        reason = "judged where Wattcast runs from its repository (studies/public_checks)"
        return [*rows, make_absent_row("measurements of others", "all", reason)]
    for section, (where, quantity, make_long) in public.LONG_SETS.items():
        kept = load_rows(section, env)
        if long and (again or kept is None):
            tell(f"{section}: working")
            kept = load_or_make_rows(section, partial(make_long, reference, tell), env, again)
        reason = "takes minutes: run `wattcast lab validate --ablations`"
        rows += [make_absent_row(where, quantity, reason)] if kept is None else kept
    return rows + list(public.make_quick_rows(reference, tell))


def load_held_out(gpu: str) -> HeldOutRows:
    """Return the held-out predictions that ship with a GPU's bundle."""
    held = shipped_held_out(gpu)
    if held is None:
        raise BadInput(f"no held-out results ship for {gpu}. Run `wattcast lab validate --refit`.")
    return held


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
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    found = hashlib.sha256()
    for path in (path for part in _INGREDIENTS for path in sorted((_PACKAGE / part).rglob("*"))):
        if path.is_file() and path.suffix in (".py", ".yaml", ".csv", ".npz", ".parquet"):
            found.update(path.relative_to(_PACKAGE).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


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
        "Written by `wattcast lab validate --write docs/accuracy.md`. Fitted numbers are judged out of fold: on "
        "rows, shapes or models that no fit saw. About a hundred constants beside them (thresholds, knots, priors, "
        "factors of the forecast) were set by hand with rows in view.",
        "",
    ]
    for gpu in GPUS:
        if (bundle := shipped_bundle(gpu)) is not None:
            origin = bundle.provenance
            text += [f"`{gpu}`: {origin.source}, {origin.device}. {origin.note}.", ""]
    text += [_LEGEND, ""]
    for name in dict.fromkeys(row["set"] for row in rows):
        text += [
            f"## {name}",
            "",
            f"| {' | '.join(_COLUMNS[1:])} | |",
            f"|{'---|' * len(_COLUMNS)}",
        ]
        text += [f"| {' | '.join(_format_row(row)[1:])} |" for row in rows if row["set"] == name]
        text.append("")
    return "\n".join(text)


_LEGEND = (
    "Errors are mean absolute percentages. Floors: a plain roofline for latency, the mean of the family for power, "
    "always the top clock for the clock; five fitted numbers, other model families only, for whole models; the full "
    "model itself beside an ablation. All rows of a shape lie in one of five folds; corrections, learned factors, "
    "energies, V(f) and the clock law are fitted inside the other four. Interval ends are checked against folds they "
    "were not taken from; width is high minus low end over the prediction, in percent."
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


def save_ledger_figures(folder: Path, gpu: str = "h200", ending: str = "png") -> list[Path]:
    """Save every figure whose data are there into ``folder``; in the repository, also those after
    paper 003.
    """
    study = load_study("validation_figures")
    makers: dict[str, Callable[[], Figure | None]] = {
        "validation-latency": lambda: draw_held_out("latency", gpu),
        "validation-power": lambda: draw_held_out("power", gpu),
        **({} if study is None else study.list_figures(load_held_out(gpu), gpu)),
        "validation-models": lambda: draw_whole_models(gpu),
    }
    drawn = {folder / f"{name}.{ending}": make() for name, make in makers.items()}
    made = {path: figure for path, figure in drawn.items() if figure is not None}
    for path, figure in made.items():
        save_figure(figure, path)
    return list(made)


# kind of rows, column and its scale, what axes say, share of the band, whether in logarithms
HELD_OUT_QUANTITIES = {
    "latency": ("burst", "latency_s", 1e6, "latency (µs)", 0.15, True),
    "power": ("sustained", "power_w", 1.0, "power (W)", 0.05, False),
    "clock": ("sustained", "clock_hz", 1e-6, "clock (MHz)", 0.05, False),
}


def draw_held_out(quantity: str = "latency", gpu: str = "h200") -> Figure:
    """Draw predicted against measured kernels that were held out of the fit, on random data, one
    panel per family.
    """
    check_names("quantity", quantity, HELD_OUT_QUANTITIES)
    kind, column, scale, what, band, logarithmic = HELD_OUT_QUANTITIES[quantity]
    held = load_held_out(gpu)
    true, said = getattr(held, column) * scale, getattr(held, f"predicted_{column}") * scale
    at = held.is_random(kind) & np.isfinite(true)
    families = list(dict.fromkeys(held.family))
    figure = new_figure(11.0, 5.8)
    panels = figure.subplots(2, -(-len(families) // 2)).ravel()
    for axes, family in zip(panels, families, strict=False):
        here = at & (np.array(held.family) == family)
        _draw_band(axes, true[here], said[here], band, logarithmic)
        axes.plot(true[here], said[here], "o", ms=1.8, color=DOT, alpha=0.5, mew=0)
        error = 100 * np.mean(np.abs(said[here] / true[here] - 1.0))
        axes.set_title(f"{family}: {error:.1f} % of {int(here.sum())}")
    for axes in panels[len(families) :]:
        axes.set_visible(False)
    figure.supylabel(f"Predicted {what}")
    figure.suptitle(
        f"Measured {what} across, predicted up; line: equal; band: ±{band:.0%}", fontsize=10
    )
    return add_caption(figure, describe_rows(gpu, "held-out predictions, five folds by shape"))


def _draw_band(
    axes: Axes, measured: Array, predicted: Array, band: float, logarithmic: bool
) -> None:
    """Draw the line on which predictions equal measurements, and a band of relative errors around
    it.
    """
    ends = np.array([min(measured.min(), predicted.min()), max(measured.max(), predicted.max())])
    axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=OURS, alpha=0.15, lw=0)
    axes.plot(ends, ends, "-", color=OURS, lw=1.0)
    if logarithmic:
        axes.set(xscale="log", yscale="log")


def draw_whole_models(gpu: str) -> Figure | None:
    """Draw latency, power and energy of whole models, predicted against measured; None where none
    was measured.
    """
    try:
        cases = whole_models.load_models(gpu)
    except BadInput:
        return None
    chip = hardware.load_gpu(gpu)
    found = compare_models(cases, chip, bundle_for(chip))
    figure = new_figure(11.0, 4.2)
    panels = figure.subplots(1, 3)
    energy_j = found.predicted_s * found.predicted_w
    for axes, name, measured, predicted, logarithmic in (
        (panels[0], "latency (ms)", 1e3 * found.latency_s, 1e3 * found.predicted_s, True),
        (panels[1], "power (W)", found.power_w, found.predicted_w, False),
        (panels[2], "energy (J)", found.energy_j, energy_j, True),
    ):
        _draw_band(axes, measured, predicted, 0.1, logarithmic)
        for label, at, mark in (
            ("GPU-bound, capped", found.graph & found.capped, "o"),
            ("GPU-bound", found.graph & ~found.capped, "^"),
            ("launched by the host", ~found.graph, "x"),
        ):
            axes.plot(
                measured[at], predicted[at], mark, ms=4, color=DOT, alpha=0.7, label=label, mew=0.8
            )
        axes.set_xlabel(f"Measured {name}")
        axes.set_ylabel(f"Predicted {name}")
    panels[0].legend(frameon=False)
    return add_caption(
        figure, describe_rows(gpu, "whole models, nothing fitted on them; line: equal, band: ±10 %")
    )


def describe_rows(gpu: str, note: str) -> str:
    """Say in a caption which rows a figure shows, and where the GPU's coefficients come from."""
    bundle = shipped_bundle(gpu)
    known = (
        [bundle.provenance.source, bundle.provenance.device, bundle.provenance.date]
        if bundle
        else []
    )
    return f"{gpu}: {note}. {', '.join(text for text in known if text)}"
