"""``wattcast predict``, ``compare``, ``report``, ``simulate`` (serving under traffic) and ``train``
(one job).
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli import shared_options
from wattcast.cli.shared_options import (
    MODEL_OPTIONS,
    PLOT,
    PRICES,
    SETTINGS,
    CommandOutput,
    Environment,
    command,
)
from wattcast.core.errors import bad_value, check_names

if TYPE_CHECKING:
    from rich.console import Console


def _gpu_names(incomplete: str) -> list[str]:
    from wattcast.hardware.catalogue_reader import gpu_names, list_boards

    return [name for name in (*gpu_names(), *list_boards()) if name.startswith(incomplete)]


def _model_names(incomplete: str) -> list[str]:
    """Return models that a shell may complete to; the shell itself completes files."""
    from wattcast.workload import model_catalogue

    return [name for name in model_catalogue.list_models() if name.startswith(incomplete)]


@command("predict", MODEL_OPTIONS, SETTINGS, PRICES)
def predict(
    env: Environment,
    workloads: Annotated[
        list[str],
        typer.Argument(help="Models, Hugging Face ids, or files.", autocompletion=_model_names),
    ],
    gpu: Annotated[str, typer.Option(help="GPU, board or YAML file.", autocompletion=_gpu_names)],
    operands: str | None = None,
    bundle: Path | None = None,
    factor: list[str] | None = None,
    card: str = "another",
    node: str | None = None,
    force: bool = False,
    details: bool = False,
    plot: Path | None = None,
    figure: str = "breakdown",
    **options: Any,
) -> CommandOutput:
    """Predict speed, power and energy of each workload, in order, on GPUs of one kind.

    Example: wattcast predict llama3-8b --gpu h200 --phase decode --batch 32 --seq 4096
    """
    from wattcast.predictor import api

    if plot is not None:
        from wattcast.report.prediction_figures import FIGURES

        check_names("figure", figure, FIGURES)
        if len(workloads) != 1:
            raise bad_value("--plot", "one workload", f"{len(workloads)} workloads")
    chip = api.find_gpu(gpu, node)
    own: dict[str, Any] = {"operands": operands, "bundle": bundle, "card": card, "force": force}
    own["factors"] = shared_options.parse_factors(factor)
    predictions = api.predict_many(workloads, chip, **options, **own)
    if plot is not None:
        from wattcast.report.configuration_view import ConfigurationView
        from wattcast.report.prediction_figures import draw_figure

        env.save_plot(draw_figure(figure, ConfigurationView(predictions[0])), plot)

    def make_plain() -> object:
        from wattcast.predictor.prediction_json import predictions_to_output

        return predictions_to_output(predictions)

    def print_text(console: Console) -> None:
        from wattcast.report.text_tables import print_predictions

        print_predictions(console, predictions, details)

    return CommandOutput(make_plain, print_text)


@command("compare", MODEL_OPTIONS, SETTINGS, PLOT)
def compare(
    env: Environment,
    first: str,
    second: str,
    gpu: str | None = None,
    iterations: int = 1,
    **options: Any,
) -> CommandOutput:
    """Explain the difference between two runs, B - A, by operators, modules and clock; it adds up
    exactly.

    Options hold for both runs; a run may say otherwise after its name.

    Examples: wattcast compare llama3-8b@h200 @h100-sxm --batch 8 --seq 512
    ... compare llama3-8b qwen3-8b --gpu h200 --phase decode --batch 32
    ... compare llama3-8b@h200,batch=8,seq=512 ,power_limit=500W
    """
    from wattcast.report.comparison_report import (
        comparison_to_plain,
        draw_difference,
        print_comparison,
    )
    from wattcast.report.comparison_sides import compare as compare_sides

    given = {name: value for name, value in options.items() if name in env.given}
    result = compare_sides(first, second, gpu=gpu, iterations=iterations, **given)
    return CommandOutput.of(result, comparison_to_plain, print_comparison, draw_difference)


@command("report", MODEL_OPTIONS, SETTINGS)
def report(
    env: Environment,
    workload: str,
    gpu: str,
    out: Path,
    paper: str = "A4",
    force: bool = False,
    **options: Any,
) -> CommandOutput:
    """Write a report: summary, memory, breakdown, timeline, clocks, other GPUs, intervals,
    assumptions, sources.

    Example: wattcast report llama3-8b --gpu h200,h100-sxm --batch 8 --seq 1024 --out report.html
    """
    from wattcast.core.whole_files import write_whole
    from wattcast.predictor.api import find_gpu
    from wattcast.report.html_report import PAPERS, build_report, print_report
    from wattcast.workload.model_options import ModelOptions

    kind = out.suffix.lower()
    if kind not in (".html", ".htm", ".pdf"):
        raise bad_value("--out", "a name that ends in .html or .pdf", out.name)
    if paper not in PAPERS:
        raise bad_value("--paper", " or ".join(PAPERS), paper)
    chips = [find_gpu(name.strip()) for name in gpu.split(",")]
    line = [
        "wattcast",
        "report",
        workload,
    ]  # the command line, as far as it decides what the page says
    for name, value in {"gpu": gpu, "force": force, **options}.items():
        if name in env.given:
            line += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    settings: Any = {name: options.pop(name) for name in SETTINGS}
    of_model = ModelOptions.from_names(**options)
    page = build_report(workload, chips, of_model, shlex.join(line), force=force, **settings)
    data = print_report(page, paper) if kind == ".pdf" else page.encode()
    write_whole(out, data)
    env.say(f"report saved: {out}")
    return CommandOutput(
        {"file": str(out), "byte": len(data), "gpus": [chip.name for chip in chips]}, ""
    )


SERVED = (
    "dtype",
    "quantization",
    "tp",
    "clock",
    "power_limit",
    "weights",
    "kv_dtype",
    "pp",
    "dp",
    "ep",
)


@command("simulate", *SERVED, PRICES, PLOT, library="wattcast.serving.simulate_serving:simulate")
def simulate(
    env: Environment, model: str, gpu: str, out: Path | None = None, **asked: Any
) -> CommandOutput:
    """Serve requests as vLLM would and say how long they take and what they draw.

    Example: wattcast simulate llama3-8b --gpu h200 --rate 8/s --prompt 512 --output 128 --seconds
    600"""
    from wattcast.serving.serving_report import draw_serving, print_serving
    from wattcast.serving.serving_result import ServingResult
    from wattcast.serving.simulate_serving import simulate as simulate_serving

    result = simulate_serving(model, gpu, **asked)
    if out is not None:
        for path in result.write_requests_and_steps(out):
            env.say(f"written: {path}")
    return CommandOutput.of(result, ServingResult.summarise, print_serving, draw_serving)


@command("train", "clock", "power_limit", PRICES, PLOT, library="wattcast.training.train_job:train")
def train(
    model: str, gpu: str, search: bool = False, details: bool = False, **asked: Any
) -> CommandOutput:
    """Say how long a training job takes, how many kWh, what it costs and how to share it over GPUs.

    Example: wattcast train llama3-8b --gpu h100-sxm --gpus 8 --tokens 1B --price 2.50/h --carbon
    germany"""
    from wattcast.training.train_job import train as train_job
    from wattcast.training.training_report import draw_training, print_training, summarise_training

    text = partial(print_training, details=details, search=search)
    return CommandOutput.of(train_job(model, gpu, **asked), summarise_training, text, draw_training)
