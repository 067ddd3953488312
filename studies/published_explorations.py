"""Repeat the explorations of the EnergAIzer paper [Lee2026, VI-B to VI-D] and compare with its
measurements.

Run: ``python studies/published_explorations.py --figures docs/images`` (the result:
docs/method/explorations.md).

The measurements belong to others and lie outside the project: WATTCAST_REFERENCE names their
folder. Nothing is fitted to them here. The workloads are Hugging Face base models, so without a
language-model head."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, MissingTool, WattcastError
from wattcast.core.strict_files import reference_folder
from wattcast.explore.exploration_figures import draw_gpus
from wattcast.explore.explorations import Alternative, explore
from wattcast.predictor.api import find_gpu, predict
from wattcast.predictor.bundle import bundle_for
from wattcast.report.figure_style import (
    MEASURED,
    PREDICTED,
    SERIES_COLOURS,
    FigureMaker,
    add_caption,
    describe_origin,
    new_figure,
    save_figure,
)
from wattcast.report.text_tables import print_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

GPU = "a100-pcie-40gb"
MODELS = {"gpt2": "gpt2", "opt-1p3b": "opt-1.3b", "qwen2-1p5b": "qwen2-1.5b", "large": "bert-large"}
# the six workloads of figure 11: model, batch, tokens
DVFS = (
    ("gpt2", 8, 128),
    ("opt-1.3b", 2, 128),
    ("qwen2-1.5b", 1, 128),
    ("gpt2", 32, 512),
    ("opt-1.3b", 8, 2048),
    ("qwen2-1.5b", 1, 4096),
)
# figure 13 compares number formats and attention at a thousand tokens and more; fp32 was measured
# at these
FORMATS = (
    ("opt-1.3b", 1, 1024),
    ("opt-1.3b", 4, 1024),
    ("opt-1.3b", 8, 1024),
    ("opt-1.3b", 16, 1024),
)
FORECAST = ("a100-pcie-40gb", "a100-sxm-80gb", "h100-sxm", "l40s")
_NAME = re.compile(
    r"(?P<kind>\w+?)model_(?P<config>[\w.-]+?)_p(?P<dtype>\w+?)_b(?P<batch>\d+)_s(?P<seq>\d+)_modeprefill"
    r"(?:_attneager)?_freq(?P<clock>\d+)_iter\d+\.csv"
)


@dataclass(frozen=True)
class Measured:
    """One row of the published measurements."""

    model: str
    dtype: str
    batch: int
    seq: int
    clock_hz: float
    temperature_c: float
    latency_s: float
    power_w: float


@dataclass(frozen=True)
class Curve:
    """One workload over clocks: measured and predicted."""

    model: str
    batch: int
    seq: int
    clock_hz: Array
    measured_s: Array
    measured_w: Array
    predicted_s: Array
    predicted_w: Array

    @property
    def name(self) -> str:
        """What a figure calls it."""
        return f"{self.model}, batch {self.batch}, {self.seq} tokens"

    def mape(self) -> dict[str, float]:
        """Mean absolute percentage errors of latency, power and energy."""
        pairs = {
            "latency": (self.predicted_s, self.measured_s),
            "power": (self.predicted_w, self.measured_w),
            "energy": (self.predicted_s * self.predicted_w, self.measured_s * self.measured_w),
        }
        return {name: float(np.mean(np.abs(p / m - 1.0))) for name, (p, m) in pairs.items()}


@dataclass(frozen=True)
class Format:
    """One workload in one number format and attention; measured where somebody did."""

    model: str
    batch: int
    seq: int
    dtype: str
    attention: str
    predicted_s: float
    predicted_w: float
    measured_s: float | None
    measured_w: float | None


def measured(folder: Path | None) -> list[Measured]:
    """The published A100 rows."""
    if folder is None:
        raise MissingTool(
            "the published measurements are not here. Set WATTCAST_REFERENCE to their folder."
        )
    rows = []
    for name in ("a100_pcie_40gb_900mhz.csv", "a100_pcie_40gb_dvfs.csv"):
        path = folder / "energaizer" / "measurements" / name
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror}).") from None
        rows += [row for line in csv.DictReader(lines) if (row := _row(line)) is not None]
    return rows


def _row(line: dict[str, str]) -> Measured | None:
    match = _NAME.fullmatch(line["workload"])
    if match is None or match["config"] not in MODELS:
        return None
    latency_s = float(line["time"]) / 1e3
    return Measured(
        model=MODELS[match["config"]],
        dtype=match["dtype"],
        batch=int(match["batch"]),
        seq=int(match["seq"]),
        clock_hz=float(line["avg_freq"]) * 1e6,
        temperature_c=float(line["temp"]),
        latency_s=latency_s,
        power_w=float(line["energy"]) / latency_s,
    )


def dvfs(rows: Sequence[Measured]) -> list[Curve]:
    """The six workloads over clocks, eager attention, bf16, at the clocks and temperatures
    measured.
    """
    curves = []
    for model, batch, seq in DVFS:
        mine = sorted(
            (r for r in rows if (r.model, r.batch, r.seq, r.dtype) == (model, batch, seq, "bf16")),
            key=lambda r: r.clock_hz,
        )
        if not mine:
            raise BadInput(
                f"{model}, batch {batch}, {seq} tokens: no published row. Is the data complete?"
            )
        clock_hz = np.array([r.clock_hz for r in mine])
        found = predict(
            model,
            GPU,
            clock=np.minimum(clock_hz, 1410e6),
            temperature=np.array([r.temperature_c for r in mine]),
            batch=batch,
            seq=seq,
            attention="eager",
            head="none",
        )
        seconds, watts = np.array([r.latency_s for r in mine]), np.array([r.power_w for r in mine])
        curves.append(
            Curve(model, batch, seq, clock_hz, seconds, watts, found.latency_s, found.power_w)
        )
    return curves


def formats(rows: Sequence[Measured]) -> list[Format]:
    """fp32, bf16 and bf16 with fused attention at 900 MHz."""
    found = []
    for model, batch, seq in FORMATS:
        for dtype, attention in (("fp32", "eager"), ("bf16", "eager"), ("bf16", "flash")):
            told = predict(
                model,
                GPU,
                clock=900e6,
                batch=batch,
                seq=seq,
                dtype=dtype,
                attention=attention,
                head="none",
            )
            alike = [
                r for r in rows if (r.model, r.batch, r.seq, r.dtype) == (model, batch, seq, dtype)
            ]
            near = [r for r in alike if abs(r.clock_hz - 900e6) < 1e6 and attention == "eager"]
            seconds = float(np.mean([r.latency_s for r in near])) if near else None
            watts = float(np.mean([r.power_w for r in near])) if near else None
            row = (
                model,
                batch,
                seq,
                dtype,
                attention,
                float(told.latency_s),
                float(told.power_w),
                seconds,
                watts,
            )
            found.append(Format(*row))
    return found


def forecast() -> list[Alternative]:
    """One workload on the GPUs of the paper's Table IV; nothing was measured to compare with here."""
    found = list(
        explore("bert-large", FORECAST, batch=32, seq=512, attention="eager", head="none").points
    )
    if any(choice.reason for choice in found):
        raise WattcastError(f"a forecast failed: {'; '.join(choice.reason for choice in found)}")
    return found


def results_json(
    curves: Sequence[Curve], formats: Sequence[Format], forecasts: Sequence[Alternative]
) -> dict[str, Any]:
    """The published explorations: errors, and predictions beside measurements."""
    return {
        "gpu": GPU,
        "status": str(bundle_for(find_gpu(GPU)).status),
        "dvfs": [
            {
                "workload": c.name,
                "n": len(c.clock_hz),
                **{f"{k}_mape": v for k, v in c.mape().items()},
            }
            for c in curves
        ],
        "formats": [asdict(row) for row in formats],
        "forecasts": [choice.row for choice in forecasts],
    }


def print_published(console: Console, told: Mapping[str, Any]) -> None:
    """Errors over clocks, number formats, forecasts."""
    errors = {"latency_mape": "latency", "power_mape": "power", "energy_mape": "energy"}
    shown = [row | {name: f"{row[name]:.1%}" for name in errors} for row in told["dvfs"]]
    title = f"Clocks of the {told['gpu']} ({told['status']} coefficients): mean absolute error"
    print_rows(console, shown, {"workload": "workload", "n": "clocks"} | errors, title)
    columns = {
        "model": "model",
        "batch": "batch",
        "seq": "tokens",
        "dtype": "format",
        "attention": "attention",
        "predicted_s": "predicted",
        "measured_s": "measured",
        "predicted_w": "predicted ",
        "measured_w": "measured ",
    }
    print_rows(console, told["formats"], columns, "Number formats and attention at 900 MHz")
    forecast = {
        "gpu": "gpu",
        "latency_s": "latency",
        "power_w": "power",
        "clock_hz": "clock",
        "capped": "capped",
    }
    print_rows(
        console,
        told["forecasts"],
        forecast,
        "bert-large, batch 32, 512 tokens, on other GPUs: forecasts",
    )


def published_dvfs(found: Sequence[Curve]) -> Figure:
    """Power over clocks of the published workloads: measured dots, predicted line."""
    figure = new_figure(9.0, 5.2)
    for axes, curve in zip(np.ravel(figure.subplots(2, 3)), found, strict=True):
        axes.plot(
            curve.clock_hz / 1e6,
            curve.measured_w,
            "o",
            ms=4.0,
            color=MEASURED,
            label="measured",
            zorder=5,
        )
        axes.plot(
            curve.clock_hz / 1e6,
            curve.predicted_w,
            "-",
            color=PREDICTED,
            label="predicted",
            zorder=4,
        )
        axes.set_title(f"{curve.name}: {curve.mape()['power']:.0%}")
        axes.set(xlabel="Clock (MHz)", ylabel="Power (W)")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    bundle = bundle_for(find_gpu(GPU))
    return add_caption(
        figure,
        "A100-PCIE-40GB; measured: EnergAIzer artifact (a100_pcie_40gb_dvfs.csv, a100_pcie_40gb_900mhz.csv); "
        f"predicted: {describe_origin(bundle)}",
    )


def published_formats(found: Sequence[Format]) -> Figure:
    """Speed-up over fp32, and power, by number format and attention: bars predicted, dots measured."""
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    kinds = list(dict.fromkeys((row.dtype, row.attention) for row in found))
    cases = list(dict.fromkeys((row.model, row.batch, row.seq) for row in found))
    base = {(r.model, r.batch, r.seq): r for r in found if (r.dtype, r.attention) == kinds[0]}
    for index, kind in enumerate(kinds):
        mine = [row for row in found if (row.dtype, row.attention) == kind]
        at = np.arange(len(cases)) + 0.27 * (index - 1)
        colour = SERIES_COLOURS[index % 8]
        first = [base[(r.model, r.batch, r.seq)] for r in mine]
        speed = [b.predicted_s / r.predicted_s for r, b in zip(mine, first, strict=True)]
        left.bar(at, speed, 0.25, color=colour, label=" ".join(kind))
        right.bar(at, [r.predicted_w for r in mine], 0.25, color=colour, label=" ".join(kind))
        for x, r, b in zip(at, mine, first, strict=True):
            if r.measured_s is not None and b.measured_s is not None and r.measured_w is not None:
                left.plot(x, b.measured_s / r.measured_s, "o", ms=5.0, color=MEASURED, zorder=5)
                right.plot(x, r.measured_w, "o", ms=5.0, color=MEASURED, zorder=5)
    for axes, said in ((left, "Speed-up over fp32"), (right, "Power (W)")):
        axes.set_xticks(range(len(cases)), [f"{m}\nb{b} s{s}" for m, b, s in cases])
        axes.set_ylabel(said)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False)
    return add_caption(
        figure, "A100-PCIE-40GB at 900 MHz; bars predicted, dots measured (EnergAIzer artifact)"
    )


def published_figures(
    curves: Sequence[Curve], formats: Sequence[Format], forecasts: Sequence[Alternative]
) -> dict[str, FigureMaker]:
    """The figures of ``explore published``, by file name."""
    asked = {"batch": 32, "seq": 512, "attention": "eager", "head": "none"}
    return {
        "explore-dvfs": lambda: published_dvfs(curves),
        "explore-formats": lambda: published_formats(formats),
        "explore-forecasts": lambda: draw_gpus("bert-large", forecasts, asked),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison, and save its figures where ``--figures`` names a folder."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--figures", type=Path, help="save the figures into this folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    rows = measured(reference_folder(os.environ))
    curves, found, forecasts = dvfs(rows), formats(rows), forecast()
    if asked.figures is not None:
        asked.figures.mkdir(parents=True, exist_ok=True)
        for name, draw in published_figures(curves, found, forecasts).items():
            save_figure(draw(), asked.figures / f"{name}.png")
    told = results_json(curves, found, forecasts)
    if asked.json:
        print(json.dumps(told))
    else:
        print_published(Console(), told)


if __name__ == "__main__":
    main()
