"""Draw figures of the method pages that no command draws: engine and training steps, layers,
coverage and others.

Run: ``python -m studies.method_figures docs/images``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from studies.training_rows.judge_training_rows import MEASURED as TRAINING_MEASURED
from studies.training_rows.judge_training_rows import PREDICTIONS, read_columns

from wattcast import hardware
from wattcast.core.units import Dtype
from wattcast.lab.fit.database_fit import load_layers, predict_held_out_layers_s
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.lab.validate.model_checks import compare_serving
from wattcast.lab.validate.power_checks import MODELS, compare_power_models
from wattcast.report.figure_style import (
    SERIES_COLOURS,
    add_caption,
    new_axes,
    new_figure,
    save_figure,
)

LEDGER = Path(__file__).parents[1] / "docs" / "ledger.json"


def draw_engine_steps() -> Figure:
    """Draw latency and power of held-out engine steps, predicted against measured."""
    records = load_engine_records("h200")
    records = replace(records, rows=tuple(row for row in records.rows if row["kind"] != "traffic"))
    found = compare_serving(records, hardware.load_gpu("h200"), held_out=True)
    figure = new_figure(9.0, 4.2)
    for axes, quantity, unit, scale in zip(
        figure.subplots(1, 2), ("latency", "power"), ("ms", "W"), (1e3, 1.0), strict=True
    ):
        for kind in ("decode", "prefill"):
            pairs = scale * np.array([row.values[quantity] for row in found if row.kind == kind])
            _plot_pairs(axes, pairs, f"{kind} ({len(pairs)} steps)")
        _finish_pairs(axes, f"{quantity} ({unit})", 0.1, quantity == "latency")
    models = len({row.model for row in found})
    return add_caption(
        figure,
        f"vLLM on H200s, {models} models that nothing was fitted to; line: equal; band: ±10 %",
    )


def draw_training_steps() -> Figure:
    """Draw time and energy of training steps, as predicted before they were measured."""
    measured, predicted = read_columns(TRAINING_MEASURED), read_columns(PREDICTIONS)
    figure = new_figure(9.0, 4.2)
    for axes, column, label, scale in zip(
        figure.subplots(1, 2), ("latency_s", "energy_j"), ("time of a step (ms)", "energy of a step (J)"), (1e3, 1.0),
        strict=True,
    ):  # fmt: skip
        pairs = scale * np.array(
            [(row[column], predicted[name][column]) for name, row in measured.items()]
        )
        _plot_pairs(axes, pairs, f"{len(pairs)} steps")
        _finish_pairs(axes, label, 0.1, True)
    return add_caption(
        figure, "H200; predictions were committed before the measurement; line: equal; band: ±10 %"
    )


def draw_power_models() -> Figure:
    """Draw the watts that three models give to the same measured kernels."""
    views = compare_power_models("h200")
    figure, axes = new_axes(6.4, 5.2)
    for model in MODELS:
        _plot_pairs(
            axes, np.array([(view.measured_w, view.model_w[model]) for view in views]), model
        )
    _finish_pairs(axes, "power (W)", 0.1, False)
    return add_caption(figure, f"{len(views)} kernels of an H200; line: equal; band: ±10 %")


def draw_cold_layers() -> Figure:
    """Draw how far the time of a layer is from the sum of its operators, and from the law of cold
    caches.
    """
    layers = load_layers("h200", hardware.load_gpu("h200"))
    assert layers is not None, "the H200's database has layers"
    figure, axes = new_axes(9.0, 4.2)
    named = (
        ("sum of its operators alone", layers.alone_s),
        ("law, architecture unseen", predict_held_out_layers_s(layers)),
    )
    for label, predicted_s in named:
        error = 100 * (predicted_s / layers.layer_s - 1.0)
        said = f"{label}: {np.mean(np.abs(error)):.1f} % off"
        axes.plot(1e6 * layers.layer_s, error, "o", ms=5, alpha=0.75, label=said)
    axes.axhline(0.0, color="black", lw=0.8)
    axes.set(
        xscale="log", xlabel="Measured time of a layer (µs)", ylabel="Predicted over measured (%)"
    )
    axes.legend(frameon=False, loc="lower right")
    return add_caption(figure, f"{len(layers.layer_s)} rows of 48 layers on H200s")


def draw_catalogue() -> Figure:
    """Draw the 16-bit peak, memory bandwidth and power limit of all GPUs with tensor cores."""
    known = []
    for gpu in map(hardware.load_gpu, hardware.gpu_names()):
        rate = gpu.pipes.tensor_flop_per_cycle.get(Dtype.FP16)
        if rate is not None:
            peak = float(np.max(rate * gpu.sm_count * gpu.clocks.boost_hz))
            known.append(
                (
                    peak / 1e12,
                    float(gpu.memory.byte_per_s) / 1e12,
                    float(gpu.power.limit_w),
                    gpu.name,
                )
            )
    known.sort(reverse=True)
    figure = new_figure(9.0, 1.2 + 0.22 * len(known))
    labels = ("16-bit peak, dense (TFLOP/s)", "Memory bandwidth (TB/s)", "Power limit (W)")
    for column, (axes, label) in enumerate(
        zip(figure.subplots(1, 3, sharey=True), labels, strict=True)
    ):
        axes.plot(
            [row[column] for row in known], range(len(known)), "o", color=SERIES_COLOURS[column]
        )
        axes.grid(axis="y", lw=0.3)
        axes.set(xscale="log", xlabel=label)
        axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(known)), [row[3] for row in known])
    axes.set_ylim(len(known) - 0.4, -0.6)
    return add_caption(
        figure,
        "GPUs with tensor or matrix cores; `wattcast gpus show NAME` has the source of each number",
    )


def draw_coverage() -> Figure:
    """Draw the share of each set of the ledger that is inside its 90 % interval."""
    ledger = json.loads(LEDGER.read_bytes())["rows"]
    rows = [row for row in ledger if row["set"].startswith("coverage, ")]
    figure, axes = new_axes(9.0, 1.4 + 0.22 * len(rows))
    axes.axvspan(82.0, 97.0, color="#DDDDDD", label="wanted")
    for held, colour in ((True, SERIES_COLOURS[2]), (False, SERIES_COLOURS[1])):
        at = [place for place, row in enumerate(rows) if row["held"] == held]
        words = "holds" if held else "too narrow or too wide"
        axes.plot(
            [rows[place]["coverage"] for place in at],
            at,
            "o",
            color=colour,
            label=f"{words} ({len(at)})",
        )
    axes.axvline(90.0, color="black", lw=0.8)
    names = [row["set"].removeprefix("coverage, ") for row in rows]
    labels = [f"{name}: {row['quantity']}" for name, row in zip(names, rows, strict=True)]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", lw=0.3)
    axes.set_xlabel("Measurements inside the 90 % interval (%)")
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return add_caption(figure, "wattcast lab validate --ablations")


def _plot_pairs(axes: Axes, pairs: np.ndarray, label: str) -> None:
    error = 100 * np.mean(np.abs(pairs[:, 1] / pairs[:, 0] - 1.0))
    axes.plot(pairs[:, 0], pairs[:, 1], "o", ms=5, alpha=0.75, label=f"{label}: {error:.1f} % off")


def _finish_pairs(axes: Axes, label: str, band: float, logarithmic: bool) -> None:
    ends = np.array(
        [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
    )
    if logarithmic:
        shown = np.concatenate([np.asarray(line.get_data()).ravel() for line in axes.lines])
        ends = np.array([0.8 * shown.min(), 1.25 * shown.max()])
        axes.set(xscale="log", yscale="log")
    axes.fill_between(ends, (1 - band) * ends, (1 + band) * ends, color="#DDDDDD", lw=0, zorder=0)
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.set(xlabel=f"Measured {label}", ylabel=f"Predicted {label}", xlim=ends, ylim=ends)
    axes.legend(frameon=False, loc="upper left")


FIGURES = {
    "engine-steps": draw_engine_steps,
    "training-steps": draw_training_steps,
    "side-by-side": draw_power_models,
    "coverage": draw_coverage,
    "cold-layers": draw_cold_layers,
    "catalogue": draw_catalogue,
}


def main(argv: Sequence[str]) -> None:
    """Draw all figures, or those named after the folder."""
    for name in argv[1:] or FIGURES:
        save_figure(FIGURES[name](), Path(argv[0]) / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
