"""Figures of the accuracy ledger: predicted against measured kernels and whole models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wattcast import hardware
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import unknown_name
from wattcast.core.strict_files import load_study
from wattcast.fit import whole_models
from wattcast.fit.held_out import HeldOutRows
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.report.figure_style import add_caption, new_figure, save_figure
from wattcast.validate.ledger import load_held_out
from wattcast.validate.model_checks import compare_models

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, DOT = "#332288", "#000000"  # Tol's muted set (2021): not the colours of modules


def save_ledger_figures(folder: Path, gpu: str = "h200", ending: str = "png") -> list[Path]:
    """Save every figure whose data are there into ``folder``; in the repository, also those after paper 003."""
    study = load_study("validation_figures")
    makers: dict[str, Callable[[], Figure | None]] = {
        "validation-latency": lambda: draw_held_out("latency", gpu),
        "validation-power": lambda: draw_held_out("power", gpu),
        **({} if study is None else study.list_figures(load_held_out(gpu), gpu)),
        "validation-models": lambda: draw_whole_models(gpu),
    }
    made: list[Path] = []
    for name, make in makers.items():
        figure = make()
        if figure is not None:
            made.append(folder / f"{name}.{ending}")
            save_figure(figure, made[-1])
    return made


HELD_OUT_QUANTITIES = {  # kind of rows, column and its scale, what axes say, share of the band, whether in logarithms
    "latency": ("burst", "latency_s", 1e6, "latency (µs)", 0.15, True),
    "power": ("sustained", "power_w", 1.0, "power (W)", 0.05, False),
    "clock": ("sustained", "clock_hz", 1e-6, "clock (MHz)", 0.05, False),
}


def draw_held_out(quantity: str = "latency", gpu: str = "h200") -> Figure:
    """Draw predicted against measured kernels that were held out of the fit, on random data, one panel per family."""
    if quantity not in HELD_OUT_QUANTITIES:
        raise unknown_name("quantity", quantity, HELD_OUT_QUANTITIES, f"Known: {', '.join(HELD_OUT_QUANTITIES)}.")
    kind, column, scale, what, band, logarithmic = HELD_OUT_QUANTITIES[quantity]
    held = load_held_out(gpu)
    true, said = getattr(held, column) * scale, getattr(held, f"predicted_{column}") * scale
    at = is_random_kind(held, kind) & np.isfinite(true)
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
    figure.suptitle(f"Measured {what} across, predicted up; line: equal; band: ±{band:.0%}", fontsize=10)
    return add_caption(figure, describe_rows(gpu, "held-out predictions, five folds by shape"))


def is_random_kind(held: HeldOutRows, kind: str) -> Mask:
    """Tell which rows are of a kind and ran on random data."""
    return np.asarray((np.array(held.kind) == kind) & (np.array(held.data) == "random"))


def _draw_band(axes: Axes, measured: Array, predicted: Array, band: float, logarithmic: bool) -> None:
    """Draw the line on which predictions equal measurements, and a band of relative errors around it."""
    ends = np.array([min(measured.min(), predicted.min()), max(measured.max(), predicted.max())])
    axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=OURS, alpha=0.15, lw=0)
    axes.plot(ends, ends, "-", color=OURS, lw=1.0)
    if logarithmic:
        axes.set(xscale="log", yscale="log")


def draw_whole_models(gpu: str, database: str | Path | None = None) -> Figure | None:
    """Draw latency, power and energy of whole models, predicted against measured; None where none was measured."""
    if whole_models.why_no_models(database or gpu):
        return None
    chip = hardware.load_gpu(gpu)
    found = compare_models(whole_models.load_models(database or gpu), chip, bundle_for(chip))
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
            axes.plot(measured[at], predicted[at], mark, ms=4, color=DOT, alpha=0.7, label=label, mew=0.8)
        axes.set_xlabel(f"Measured {name}")
        axes.set_ylabel(f"Predicted {name}")
    panels[0].legend(frameon=False)
    return add_caption(figure, describe_rows(gpu, "whole models, nothing fitted on them; line: equal, band: ±10 %"))


def describe_rows(gpu: str, note: str) -> str:
    """Say in a caption which rows a figure shows, and where the GPU's coefficients come from."""
    bundle = shipped_bundle(gpu)
    known = [bundle.provenance.source, bundle.provenance.device, bundle.provenance.date] if bundle else []
    return f"{gpu}: {note}. {', '.join(text for text in known if text)}"
