"""Draw predictions that were held out of the fit against what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wattcast import hardware
from wattcast.calibrate import whole_models
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, check_names
from wattcast.lab.fit.database_fit import load_held_out
from wattcast.lab.validate.model_checks import compare_models
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.report.figure_style import add_caption, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Tol's muted set (2021): not the colours of modules
OURS = "#332288"
DOT = "#000000"
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
    held_rows = load_held_out(gpu)
    true = getattr(held_rows, column) * scale
    predicted = getattr(held_rows, f"predicted_{column}") * scale
    at = held_rows.is_random(kind) & np.isfinite(true)
    families = list(dict.fromkeys(held_rows.family))
    figure = new_figure(11.0, 5.8)
    panels = figure.subplots(2, -(-len(families) // 2)).ravel()
    for axes, family in zip(panels, families, strict=False):
        here = at & (np.array(held_rows.family) == family)
        _draw_band(
            axes,
            true[here],
            predicted[here],
            band,
            logarithmic,
        )
        axes.plot(
            true[here],
            predicted[here],
            "o",
            ms=1.8,
            color=DOT,
            alpha=0.5,
            mew=0,
        )
        error = 100 * np.mean(np.abs(predicted[here] / true[here] - 1.0))
        axes.set_title(f"{family}: {error:.1f} % of {int(here.sum())}")
    for axes in panels[len(families) :]:
        axes.set_visible(False)
    figure.supylabel(f"Predicted {what}")
    figure.suptitle(
        f"Measured {what} across, predicted up; line: equal; band: ±{band:.0%}", fontsize=10
    )
    return add_caption(figure, describe_rows(gpu, "held-out predictions, five folds by shape"))


def _draw_band(
    axes: Axes,
    measured: Array,
    predicted: Array,
    band: float,
    logarithmic: bool,
) -> None:
    """Draw the line on which predictions equal measurements, and a band of relative errors around
    it.
    """
    ends = np.array([min(measured.min(), predicted.min()), max(measured.max(), predicted.max())])
    axes.fill_between(
        ends,
        ends * (1 - band),
        ends * (1 + band),
        color=OURS,
        alpha=0.15,
        lw=0,
    )
    axes.plot(
        ends,
        ends,
        "-",
        color=OURS,
        lw=1.0,
    )
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
    compared = compare_models(cases, chip, bundle_for(chip))
    figure = new_figure(11.0, 4.2)
    panels = figure.subplots(1, 3)
    energy_j = compared.predicted_s * compared.predicted_w
    for axes, name, measured, predicted, logarithmic in (
        (panels[0], "latency (ms)", 1e3 * compared.latency_s, 1e3 * compared.predicted_s, True),
        (panels[1], "power (W)", compared.power_w, compared.predicted_w, False),
        (panels[2], "energy (J)", compared.energy_j, energy_j, True),
    ):
        _draw_band(
            axes,
            measured,
            predicted,
            0.1,
            logarithmic,
        )
        for label, at, mark in (
            ("GPU-bound, capped", compared.graph & compared.capped, "o"),
            ("GPU-bound", compared.graph & ~compared.capped, "^"),
            ("launched by the host", ~compared.graph, "x"),
        ):
            axes.plot(
                measured[at],
                predicted[at],
                mark,
                ms=4,
                color=DOT,
                alpha=0.7,
                label=label,
                mew=0.8,
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
    sources = (
        [bundle.provenance.source, bundle.provenance.device, bundle.provenance.date]
        if bundle
        else []
    )
    return f"{gpu}: {note}. {', '.join(text for text in sources if text)}"
