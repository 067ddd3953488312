"""Draw forecasts against published rows, after figures 9 and 11 of the EnergAIzer paper, and power
limits.

Run: ``python -m studies.other_gpu_figures docs/images`` (draws all three; WATTCAST_REFERENCE names
the measurements)."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wattcast import hardware
from wattcast.calibrate.calibration import analyse_models, calibrate_bundle, predict_models
from wattcast.core.errors import MissingTool
from wattcast.core.strict_files import reference_folder
from wattcast.lab.validate.public_checks import published_checks
from wattcast.lab.validate.public_checks.other_gpu_checks import to_calibration_row
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_GPU,
    PublishedRun,
    clean_runs,
    read_published_runs,
)
from wattcast.predictor.bundle import bundle_for
from wattcast.report.figure_style import MODULE_COLOURS, add_caption, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CLIP = 40.0  # percent, as in the paper's figure 9
PANELS = (("gpt2", 8, 128), ("opt-1.3b", 2, 128), ("qwen2-1.5b", 1, 128), ("gpt2", 32, 512), ("opt-1.3b", 8, 2048),
          ("qwen2-1.5b", 1, 4096))  # fmt: skip
_SOURCE = "Rows: EnergAIzer artifact (2026), A100-PCIE-40GB. {}: {}"


def errors(found: Sequence[PublishedRun]) -> Figure:
    """Signed errors of latency and power of every workload at 900 MHz, nothing fitted to the card
    (figure 9).
    """
    gpu = hardware.load_gpu(PUBLISHED_GPU)
    bundle = bundle_for(gpu)
    ordered = sorted(found, key=lambda r: (r.model, r.batch, r.seq or 0))
    measured = [to_calibration_row(r, gpu) for r in ordered]
    seconds, watts = predict_models(analyse_models(measured, gpu, bundle), {}, gpu, bundle)
    figure = new_figure(13.0, 6.0)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, name, said, true in (
        (panels[0], "Latency", seconds, [r.latency_s for r in ordered]),
        (panels[1], "Power", watts, [r.power_w for r in ordered]),
    ):
        error = 100.0 * (np.asarray(said) / np.asarray(true) - 1.0)
        colours = [MODULE_COLOURS["tensor"] if e > 0 else MODULE_COLOURS["dram"] for e in error]
        axes.bar(range(len(error)), np.clip(error, -CLIP, CLIP), color=colours)
        axes.axhline(0.0, color="#666666", lw=0.5)
        axes.set_ylabel(f"{name} error (%)")
        axes.set_title(f"{name}: mean absolute error {np.abs(error).mean():.1f} %", loc="left")
    panels[1].set_xticks(
        range(len(ordered)), [r.name.replace(" bf16", "") for r in ordered], rotation=90
    )
    text = f"Forecast against measured at 900 MHz; bars end at {CLIP:.0f} %. "
    return add_caption(figure, text + _SOURCE.format("Forecast", bundle.provenance.source))


def clocks(at_900: Sequence[PublishedRun], over: Sequence[PublishedRun]) -> Figure:
    """Power over clocks: measured, forecast, and calibrated at 900 MHz only (figure 11)."""
    gpu = hardware.load_gpu(PUBLISHED_GPU)
    bundle = bundle_for(gpu)
    kept = [to_calibration_row(r, gpu) for r in at_900 if r.model != "resnet101"]
    factors = calibrate_bundle(
        analyse_models(kept, gpu, bundle), gpu, bundle, "rows at 900 MHz"
    ).factors
    figure = new_figure(11.0, 6.0)
    for axes, (model, batch, seq) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        mine = sorted(
            (r for r in over if (r.model, r.batch, r.seq, r.dtype) == (model, batch, seq, "bf16")),
            key=lambda r: r.set_hz,
        )
        measured = [to_calibration_row(r, gpu) for r in mine]
        mhz, analysed = [r.set_hz / 1e6 for r in mine], analyse_models(measured, gpu, bundle)
        axes.plot(mhz, [r.power_w for r in mine], "o", ms=4, color="#333333", label="measured")
        for name, some, style in (("forecast", {}, "--"), ("calibrated at 900 MHz", factors, "-")):
            seconds, watts = predict_models(analysed, some, gpu, bundle)
            off = 100 * np.mean(np.abs(watts / [r.power_w for r in mine] - 1))
            late = 100 * np.mean(np.abs(seconds / [r.latency_s for r in mine] - 1))
            label = f"{name}: power {off:.0f} %, latency {late:.0f} %"
            axes.plot(mhz, watts, style, color=MODULE_COLOURS["tensor"], label=label)
        axes.set_title(f"{model}, batch {batch}, {seq} tokens")
        axes.set(xlabel="Set clock (MHz)", ylabel="Power (W)")
        axes.set_ylim(0)
        axes.legend(frameon=False, loc="lower right")
    text = "Predicted at the clock that really ran. "
    return add_caption(figure, text + _SOURCE.format("Forecast", bundle.provenance.source))


def limits(folder: Path) -> Figure:
    """Relative time and power under power limits: means over configurations of each network and
    card.
    """
    found = published_checks.predict_epochs(published_checks.read_epochs(folder))
    networks = list(published_checks.PROTOTYPE)
    figure = new_figure(12.0, 5.5)
    panels = figure.subplots(2, len(published_checks.ZEUS_GPUS), sharex="col")
    colours = [MODULE_COLOURS[name] for name in ("tensor", "cuda", "shared", "l2", "dram")]
    for column, gpu in enumerate(published_checks.ZEUS_GPUS):
        for network, colour in zip(networks, colours, strict=True):
            groups: dict[float, list[tuple[float, float, float, float]]] = defaultdict(list)
            for p in found:
                if (p.epoch.gpu, p.epoch.network) == (gpu, network):
                    row = (p.relative_time, p.predicted_time, p.epoch.power_w, p.predicted_w)
                    groups[p.epoch.limit_w].append(row)
            limit = sorted(groups)
            mean = np.array([np.mean(groups[w], axis=0) for w in limit])
            if not limit:
                continue
            for line, (true, said) in enumerate(((0, 1), (2, 3))):
                panels[line, column].plot(limit, mean[:, true], "o", ms=3, color=colour)
                panels[line, column].plot(limit, mean[:, said], "-", color=colour, label=network)
        panels[0, column].set_title(published_checks.ZEUS_GPUS[gpu])
        panels[1, column].set_xlabel("Power limit (W)")
    panels[0, 0].set_ylabel("Time (highest limit = 1)")
    panels[1, 0].set_ylabel("Power (W)")
    panels[1, 0].legend(frameon=False)
    text = "Training epochs of the Zeus data (You et al., NSDI 2023): dots measured, lines predicted from the row at "
    return add_caption(figure, text + "the highest limit; means over batch sizes and optimisers.")


def draw(folder: Path) -> list[Path]:
    """All figures into a folder."""
    reference = reference_folder(os.environ)
    if reference is None:
        raise MissingTool(
            "the published measurements are not here. Set WATTCAST_REFERENCE to their folder."
        )
    at_900, over = (
        clean_runs(read_published_runs(reference, "900")),
        clean_runs(read_published_runs(reference, "clocks")),
    )
    made = {
        "other-gpus-errors": errors(at_900),
        "other-gpus-clocks": clocks(at_900, over),
        "other-gpus-limits": limits(reference),
    }
    for name, figure in made.items():
        save_figure(figure, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in made]


if __name__ == "__main__":
    print("\n".join(str(path) for path in draw(Path(sys.argv[1]))))
