"""Draw the figures of the EnergAIzer paper [Lee2026] from all public rows, and print the errors
that it reports beside ours.

Run: ``python -m wattcast.lab.paper_figures.energaizer_figures FOLDER [FIGURE ...]``. The measured
whole models belong to others: WATTCAST_REFERENCE names their folder. Nothing is fitted to them
here; the cards are forecast from the H200.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from wattcast.calibrate.calibration_rows import PUBLISHED_MODELS
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import BadInput, MissingTool, check_names
from wattcast.core.strict_files import (
    REFERENCE_VARIABLE,
    decode_yaml,
    reference_folder,
)
from wattcast.explore.exploration_figures import draw_gpus
from wattcast.explore.explorations import explore
from wattcast.lab.fit.database_fit import load_held_out
from wattcast.lab.fit.held_out import HeldOutRows
from wattcast.lab.module_commands import run_module
from wattcast.lab.paper_figures import validation_figures
from wattcast.lab.validate.ledger_figures import draw_held_out
from wattcast.lab.validate.public_checks.published_commands import ask_by_name
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_GPU,
    PublishedRun,
    clean_runs,
    fp32_runs,
    read_published_file,
    read_published_runs,
)
from wattcast.lab.validate.typed_commands import judge_rows
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
from wattcast.report.kernel_report import draw_kernel, view_numbered_kernel
from wattcast.report.text_tables import print_rows
from wattcast.workload.readers.one_operator import graph_of_operator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

OTHER_GPU = "a10"
KERNEL_GPU = "h200"  # whose kernels are in our own database
LIFE_SIZES = "4096x4096x4096"
# Figure 13 compares formats and attention at 1,024 tokens and more, where fp32 was measured too.
FORMAT_RUNS = tuple(("opt-1.3b", batch, 1024) for batch in (1, 4, 8, 16))
FORMAT_KINDS = (("fp32", "eager"), ("bf16", "eager"), ("bf16", "flash"))
FORMAT_CLOCK_HZ = 900e6
# The GPUs of Table IV
FORECAST_GPUS = ("a100-pcie-40gb", "a100-sxm-80gb", "h100-sxm", "l40s")
FORECAST_OPTIONS: dict[str, Any] = {"batch": 32, "seq": 512, "attention": "eager", "head": "none"}
_NAMED_BARS = 24  # workloads, up to which each bar has its name


class PrintedError(msgspec.Struct, forbid_unknown_fields=True):
    """Errors that the paper prints of a predictor on some rows, in percent."""

    rows: str
    predictor: str
    where: str
    note: str
    latency: str | None = None
    power: str | None = None


def read_printed_errors() -> list[PrintedError]:
    """Return the errors that the paper prints."""
    path = Path(__file__).with_name("energaizer_printed.yaml")
    return decode_yaml(path.read_bytes(), list[PrintedError], path.name)


@dataclass(frozen=True)
class JudgedRuns:
    """Published runs of one card, as the commands that name them predict each."""

    gpu: str
    label: str
    runs: tuple[PublishedRun, ...]
    predicted_s: Array
    predicted_w: Array

    @property
    def measured_s(self) -> Array:
        """Seconds of an iteration."""
        return np.array([run.latency_s for run in self.runs])

    @property
    def measured_w(self) -> Array:
        """Mean watts of an iteration."""
        return np.array([run.power_w for run in self.runs], dtype=np.float64)

    def percent_errors(self, quantity: str) -> Array:
        """Return the absolute error of each run in ``latency`` or ``power``."""
        if quantity == "latency":
            return 100.0 * np.abs(self.predicted_s / self.measured_s - 1.0)
        return 100.0 * np.abs(self.predicted_w / self.measured_w - 1.0)

    def select(self, rows: Mask, label: str) -> JudgedRuns:
        """Return some of the runs."""
        chosen = tuple(run for run, is_chosen in zip(self.runs, rows, strict=True) if is_chosen)
        return JudgedRuns(self.gpu, label, chosen, self.predicted_s[rows], self.predicted_w[rows])


def judge_runs(runs: Sequence[PublishedRun], gpu: str, label: str) -> JudgedRuns:
    """Return published runs with what the commands that name them predict."""
    if not runs:
        raise BadInput(f"{label}: no published row. Is the folder of measurements complete?")
    ordered = sorted(runs, key=lambda run: (run.model, run.batch, run.seq or 0, run.set_hz))
    predicted = judge_rows([ask_by_name(run, gpu, label) for run in ordered])
    return JudgedRuns(
        gpu=gpu,
        label=label,
        runs=tuple(ordered),
        predicted_s=np.array([one["latency"] for one in predicted]),
        predicted_w=np.array([one["power"] for one in predicted]),
    )


@dataclass(frozen=True)
class PublicRows:
    """Every published run, judged."""

    models: tuple[JudgedRuns, ...]  # by card and format, at 900 MHz
    clocks: JudgedRuns  # over the clocks of an A100
    artifact_percent: dict[str, float]  # its own errors in the rows over clocks that it reports
    reported: Mask  # of the rows over clocks


def judge_public_rows(folder: Path) -> PublicRows:
    """Judge all published whole models: an A100 and an A10 at 900 MHz, and an A100 over clocks."""
    models = []
    for gpu, runs in (
        (PUBLISHED_GPU, read_published_runs(folder, "900")),
        (OTHER_GPU, read_published_file(folder, OTHER_GPU)),
    ):
        models.append(judge_runs(clean_runs(runs), gpu, f"{gpu} bf16"))
        models.append(judge_runs(fp32_runs(runs), gpu, f"{gpu} fp32"))
    over_clocks = read_published_runs(folder, "clocks")
    clocks = judge_runs(
        [*clean_runs(over_clocks), *fp32_runs(over_clocks)],
        PUBLISHED_GPU,
        f"{PUBLISHED_GPU} clocks",
    )
    reported, percents = read_report(folder, clocks.runs)
    return PublicRows(tuple(models), clocks, percents, reported)


def read_report(
    folder: Path,
    runs: Sequence[PublishedRun],
) -> tuple[Mask, dict[str, float]]:
    """Tell which runs the artifact's own report covers, and return its mean errors on those."""
    path = folder / "energaizer" / "measurements" / "artifact_dvfs_report.csv"
    percents: dict[str, list[float]] = {"latency": [], "energy": [], "power": []}
    keys = set()
    with path.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            model = PUBLISHED_MODELS[line["model"], line["config"]]
            clock_mhz = int(line["freq"])
            keys.add((model, int(line["batch"]), int(line["seq"]), line["prec"], clock_mhz))
            time_ratio = float(line["gee_time"]) / float(line["measured_time"])
            energy_ratio = float(line["gee_energy"]) / float(line["measured_energy"])
            ratios = (time_ratio, energy_ratio, energy_ratio / time_ratio)
            for values, ratio in zip(percents.values(), ratios, strict=True):
                values.append(100.0 * abs(ratio - 1.0))
    is_reported = [
        (run.model, run.batch, run.seq, run.dtype, round(run.set_hz / 1e6)) in keys for run in runs
    ]
    means = {quantity: float(np.mean(values)) for quantity, values in percents.items()}
    return np.array(is_reported), means


# ---- the table


def compare_errors(public: PublicRows) -> list[dict[str, Any]]:
    """Return a row for each set and predictor: its errors, and where they are printed."""
    printed = read_printed_errors()
    rows = []
    sets = [*public.models, public.clocks]
    for judged in sets:
        rows.append(_describe_ours(judged))
        rows += [_describe_printed(error) for error in printed if error.rows == judged.label]
    same = public.clocks.select(public.reported, f"{PUBLISHED_GPU} clocks, rows of its report")
    theirs = {name: round(public.artifact_percent[name], 1) for name in ("latency", "power")}
    rows.append(_describe_ours(same))
    where = "artifact, ae_dvfs report"
    rows.append({"rows": same.label, "predictor": "EnergAIzer", **theirs, "where": where})
    rows += _compare_kernels(printed)
    rows += [_describe_printed(error) for error in printed if error.rows == "other cards"]
    return rows


def _describe_ours(judged: JudgedRuns) -> dict[str, Any]:
    return {
        "rows": judged.label,
        "predictor": "Wattcast",
        "count": len(judged.runs),
        "latency": round(float(judged.percent_errors("latency").mean()), 1),
        "power": round(float(judged.percent_errors("power").mean()), 1),
        "where": "forecast from an H200",
    }


def _describe_printed(error: PrintedError) -> dict[str, Any]:
    return {
        "rows": error.rows,
        "predictor": error.predictor,
        "latency": error.latency,
        "power": error.power,
        "where": f"{error.where}: {error.note}",
    }


def _compare_kernels(printed: Sequence[PrintedError]) -> list[dict[str, Any]]:
    """Return the errors of kernels: ours, held out, and those of a line in FLOPs and bytes for each
    family on the same rows, which is how Li et al. predict.
    """
    held_rows = load_held_out(KERNEL_GPU)
    bursts = held_rows.is_random("burst")
    line_s = np.full(len(bursts), np.nan)
    line_s[bursts] = validation_figures.predict_simply(KERNEL_GPU, int(bursts.sum()))[1]
    rows = []
    for name, here in (
        ("kernels, products bf16", bursts & _is_bf16_product(held_rows)),
        ("kernels, all", bursts),
    ):
        for predictor, predicted_s in (
            ("Wattcast", held_rows.predicted_latency_s),
            ("a line in FLOPs and bytes for each family, as Li et al.", line_s),
        ):
            percent = 100.0 * np.abs(predicted_s[here] / held_rows.latency_s[here] - 1.0)
            rows.append(
                {
                    "rows": name,
                    "predictor": predictor,
                    "count": int(here.sum()),
                    "latency": round(float(percent.mean()), 1),
                    "where": "kernels of an H200, held out",
                }
            )
        rows += [_describe_printed(error) for error in printed if error.rows == name]
    return rows


def _is_bf16_product(held_rows: HeldOutRows) -> Mask:
    pairs = zip(held_rows.family, held_rows.work, strict=True)
    return np.array([family == "gemm" and "bf16" in work for family, work in pairs])


def print_errors(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the errors of every predictor on every set."""
    headings = {
        "rows": "rows",
        "predictor": "predictor",
        "count": "n",
        "latency": "latency, %",
        "power": "power, %",
        "where": "where",
    }
    texts = [{name: None if x is None else str(x) for name, x in row.items()} for row in rows]
    print_rows(console, texts, headings, "Mean absolute errors", ["rows", "predictor", "where"])


# ---- the figures


def draw_whole_models(public: PublicRows) -> Figure:
    """Draw the errors of every whole model by card and format, after figure 9."""
    figure = new_figure(12.0, 2.6 * len(public.models))
    panels = figure.subplots(len(public.models), 1)
    for axes, judged in zip(panels, public.models, strict=True):
        _draw_error_bars(axes, judged)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        frameon=False,
        ncols=2,
        loc="outside upper right",
    )
    return add_caption(
        figure,
        "error of each public row at 900 MHz (EnergAIzer artifact), predicted by its model's name; "
        f"{describe_origin(bundle_for(find_gpu(PUBLISHED_GPU)))}; after EnergAIzer, figure 9",
    )


def _draw_error_bars(axes: Axes, judged: JudgedRuns) -> None:
    places = np.arange(len(judged.runs))
    for offset, quantity in ((-0.2, "latency"), (0.2, "power")):
        percent = judged.percent_errors(quantity)
        axes.bar(places + offset, percent, 0.4, label=f"{quantity}")
    names = [_short_name(run) for run in judged.runs]
    size = 7 if len(names) > _NAMED_BARS else 8
    axes.set_xticks(places, names, rotation=90, fontsize=size)
    axes.set_xlim(-1, len(names))
    axes.set_ylabel("Error (%)")
    latency = judged.percent_errors("latency").mean()
    power = judged.percent_errors("power").mean()
    axes.set_title(f"{judged.label}: latency {latency:.1f} %, power {power:.1f} %")


def _short_name(run: PublishedRun) -> str:
    length = "" if run.seq is None else f" s{run.seq}"
    return f"{run.model} b{run.batch}{length}"


def draw_clocks(clocks: JudgedRuns) -> Figure:
    """Draw power over clocks of every published workload, after figure 11: dots were measured."""
    keys = [(run.model, run.dtype, run.batch, run.seq) for run in clocks.runs]
    workloads = list(dict.fromkeys(keys))
    columns = 4
    rows = -(-len(workloads) // columns)
    figure = new_figure(12.0, 2.4 * rows)
    panels = np.ravel(figure.subplots(rows, columns))
    for axes, workload in zip(panels, workloads, strict=False):
        here = clocks.select(np.array([key == workload for key in keys]), "")
        clock_mhz = np.array([run.clock_hz for run in here.runs], dtype=np.float64) / 1e6
        order = np.argsort(clock_mhz)
        axes.plot(clock_mhz, here.measured_w, "o", ms=4.0, color=MEASURED, label="measured")
        axes.plot(
            clock_mhz[order], here.predicted_w[order], "-", color=PREDICTED, label="predicted"
        )
        model, dtype, batch, seq = workload
        percent = here.percent_errors("power").mean()
        axes.set_title(f"{model} {dtype} b{batch} s{seq}: {percent:.1f} %", fontsize=9)
        axes.set_ylim(bottom=0)
    for axes in panels[len(workloads) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False)
    figure.supylabel("Power (W)")
    figure.suptitle("Power over the core clock (MHz)", fontsize=10)
    return add_caption(
        figure,
        f"{PUBLISHED_GPU}; measured: EnergAIzer artifact; predicted: "
        f"{describe_origin(bundle_for(find_gpu(PUBLISHED_GPU)))}; after EnergAIzer, figure 11",
    )


def draw_other_cards(public: PublicRows) -> Figure:
    """Draw the power error of cards that nothing was fitted to, after figure 12."""
    bars = []
    for judged in public.models:
        name = "\n".join([*judged.label.split(), "from an H200"])
        bars.append((name, float(judged.percent_errors("power").mean()), PREDICTED))
    for error in read_printed_errors():
        if error.rows == "other cards" and error.power is not None:
            name = f"{error.note.replace(' from', chr(10) + 'from')}\n({error.predictor})"
            bars.append((name, float(error.power), "#999999"))
    figure = new_figure(9.0, 3.4)
    axes = figure.subplots()
    axes.bar(
        range(len(bars)), [height for _, height, _ in bars], color=[colour for *_, colour in bars]
    )
    for place, (_, height, _) in enumerate(bars):
        axes.text(place, height, f"{height:.1f}", ha="center", va="bottom")
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.set_ylabel("Power error (%)")
    return add_caption(
        figure,
        "power of whole models, forecast from another card; grey: as printed in EnergAIzer, VI-C "
        "and figure 12, whose rows are not public",
    )


@dataclass(frozen=True)
class FormatRow:
    """One workload in one number format and attention; measured where somebody did."""

    workload: tuple[str, int, int]
    kind: tuple[str, str]
    predicted_s: float
    predicted_w: float
    measured_s: float | None
    measured_w: float | None


def list_formats(folder: Path) -> list[FormatRow]:
    """Return fp32, bf16 and bf16 with fused attention at 900 MHz."""
    runs = read_published_runs(folder, "900")
    rows = []
    for model, batch, seq in FORMAT_RUNS:
        for dtype, attention in FORMAT_KINDS:
            prediction = predict(
                model,
                PUBLISHED_GPU,
                clock=FORMAT_CLOCK_HZ,
                batch=batch,
                seq=seq,
                dtype=dtype,
                attention=attention,
                head="none",
            )
            key = (model, batch, seq, dtype)
            alike = [run for run in runs if (run.model, run.batch, run.seq, run.dtype) == key]
            measured_s = measured_w = None
            if alike and attention == "eager":
                measured_s = float(np.mean([run.latency_s for run in alike]))
                measured_w = float(np.mean([run.power_w or np.nan for run in alike]))
            rows.append(
                FormatRow(
                    workload=(model, batch, seq),
                    kind=(dtype, attention),
                    predicted_s=float(prediction.latency_s),
                    predicted_w=float(prediction.power_w),
                    measured_s=measured_s,
                    measured_w=measured_w,
                )
            )
    return rows


def draw_formats(rows: Sequence[FormatRow]) -> Figure:
    """Draw the speed-up over fp32 and the power by format and attention, after figure 13."""
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    workloads = list(dict.fromkeys(row.workload for row in rows))
    base = {row.workload: row for row in rows if row.kind == FORMAT_KINDS[0]}
    for index, kind in enumerate(FORMAT_KINDS):
        of_kind = [row for row in rows if row.kind == kind]
        places = np.arange(len(workloads)) + 0.27 * (index - 1)
        colour = SERIES_COLOURS[index]
        speedups = [base[row.workload].predicted_s / row.predicted_s for row in of_kind]
        left.bar(places, speedups, 0.25, color=colour, label=" ".join(kind))
        right.bar(places, [row.predicted_w for row in of_kind], 0.25, color=colour)
        for place, row in zip(places, of_kind, strict=True):
            base_s = base[row.workload].measured_s
            if row.measured_s is not None and base_s is not None:
                left.plot(place, base_s / row.measured_s, "o", ms=5.0, color=MEASURED)
                right.plot(place, row.measured_w, "o", ms=5.0, color=MEASURED)
    for axes, label in ((left, "Speed-up over fp32"), (right, "Power (W)")):
        axes.set_xticks(range(len(workloads)), [f"{m}\nb{b} s{s}" for m, b, s in workloads])
        axes.set_ylabel(label)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return add_caption(
        figure,
        f"{PUBLISHED_GPU} at 900 MHz; bars predicted, dots measured (EnergAIzer artifact); after "
        "EnergAIzer, figure 13",
    )


def draw_kernel_life() -> Figure:
    """Draw what is busy when inside a product, after figure 5."""
    graph = graph_of_operator("linear", LIFE_SIZES)
    return draw_kernel(view_numbered_kernel(predict(graph, KERNEL_GPU, host_launch="0us"), 1))


def draw_forecasts() -> Figure:
    """Draw one workload over the clocks of the GPUs of Table IV."""
    exploration = explore("bert-large", FORECAST_GPUS, **FORECAST_OPTIONS)
    return draw_gpus("bert-large", list(exploration.points), FORECAST_OPTIONS)


def list_figures(folder: Path, public: PublicRows) -> dict[str, FigureMaker]:
    """Return all figures, by name."""
    of_kernels = validation_figures.list_figures(load_held_out(KERNEL_GPU), KERNEL_GPU)
    return {
        "figure-01-kinds": of_kernels["validation-kinds"],
        "figure-02-equal-latency": of_kernels["validation-equal-latency"],
        "figure-05-inside-a-kernel": draw_kernel_life,
        "figure-06-10-error-by-size": of_kernels["validation-size"],
        "figure-07-kernel-power": partial(draw_held_out, "power", KERNEL_GPU),
        "figure-09-whole-models": partial(draw_whole_models, public),
        "figure-10-kernel-latency": partial(draw_held_out, "latency", KERNEL_GPU),
        "figure-11-clocks": partial(draw_clocks, public.clocks),
        "figure-12-other-cards": partial(draw_other_cards, public),
        "figure-13-formats": lambda: draw_formats(list_formats(folder)),
        "table-4-forecasts": draw_forecasts,
    }


def main() -> None:
    """Print the errors and save the figures, or those that are named."""
    from rich.console import Console

    folder = reference_folder(os.environ)
    if folder is None:
        raise MissingTool(f"no reference data: set {REFERENCE_VARIABLE} to their folder")
    if len(sys.argv) < 2:
        raise BadInput("wanted a folder for the figures, then names of figures if not all")
    public = judge_public_rows(folder)
    figures = list_figures(folder, public)
    names = sys.argv[2:] or list(figures)
    for name in names:
        check_names("figure", name, list(figures))
    print_errors(Console(width=160), compare_errors(public))
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = target / f"{name}.png"
        save_figure(figures[name](), path)
        print(f"figure saved: {path}", file=sys.stderr)


if __name__ == "__main__":
    run_module(main)
