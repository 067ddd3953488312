"""``wattcast predict``, ``wattcast compare`` and ``wattcast report``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from wattcast.cli.shared_options import (
    MODEL_OPTIONS,
    PRICES,
    SETTINGS,
    Environment,
    Force,
    Json,
    Plot,
    Source,
    folded,
    options_besides,
    parse_factors,
    save_plot,
    takes_options,
    was_given,
)

_own = folded("Coefficients and intervals")


def _gpu_names(incomplete: str) -> list[str]:
    """Return GPUs that a shell may complete to."""
    from wattcast import hardware

    return [name for name in hardware.gpu_names() if name.startswith(incomplete)]


def _model_names(incomplete: str) -> list[str]:
    """Return models that a shell may complete to; the shell itself completes files."""
    from wattcast.workload import model_catalogue

    return [name for name in model_catalogue.list_models() if name.startswith(incomplete)]


@takes_options(MODEL_OPTIONS, SETTINGS, PRICES)
def predict(
    ctx: typer.Context,
    workloads: Annotated[
        list[str],
        typer.Argument(
            autocompletion=_model_names,
            help="Models, Hugging Face ids, or files.",
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(help="GPU name or YAML file.", autocompletion=_gpu_names),
    ],
    operands: Annotated[str | None, _own("cold|warm operands of a list (memory|L2).")] = None,
    bundle: Annotated[Path | None, _own("Folder that `calibrate` saved.")] = None,
    factor: Annotated[list[str] | None, _own("Your own factor, such as compute=0.9.")] = None,
    card: Annotated[str, _own("Ends for another|this card.")] = "another",
    node: Annotated[str | None, typer.Option(help="Where GPUs stand: a name of `gpus nodes`, or YAML.")] = None,
    force: Force = False,
    details: Annotated[bool, typer.Option("--details", help="Print everything.")] = False,
    json: Json = False,
    plot: Plot = None,
    figure: Annotated[str, typer.Option(help="breakdown|timeline|roofline|clocks")] = "breakdown",
    **options: Any,
) -> None:
    """Predict speed, power and energy of each workload, in order, on GPUs of one kind.

    Example: wattcast predict llama3-8b --gpu h200 --phase decode --batch 32 --seq 4096
    """
    from wattcast.core.errors import bad_value
    from wattcast.predictor import api
    from wattcast.workload.model_options import ModelOptions

    env: Environment = ctx.obj
    if plot is not None:
        from wattcast.report.prediction_figures import check_figure

        check_figure(figure, plot)
        if len(workloads) != 1:
            raise bad_value("--plot", "one workload", f"{len(workloads)} workloads")
    chip = api.find_gpu(gpu, node)
    given = options_besides(ctx, "workloads", "gpu", "node", "factor", "details", "json", "plot", "figure")
    given["factors"] = parse_factors(factor or [])
    predictions = api.predict_many(workloads, chip, **given)
    if plot is not None:
        from wattcast.report.configuration_view import RunSettings, view_configuration
        from wattcast.report.prediction_figures import draw_figure

        of_model = ModelOptions.from_names(**{name: options[name] for name in MODEL_OPTIONS})
        settings = {name: value for name, value in given.items() if name not in {**MODEL_OPTIONS, **PRICES}}
        view = view_configuration(workloads[0], chip, of_model, RunSettings(**settings))
        save_plot(env, draw_figure(figure, view), plot)
    if json:
        from wattcast.predictor.prediction_json import predictions_to_output

        env.json(predictions_to_output(predictions))
        return
    from wattcast.report.text_tables import print_predictions

    print_predictions(env.console(), predictions, details)


_SIDE = (
    "A model, MODEL@GPU,key=value,... | FILE.json of `predict --json` (FILE.json#2: its second) or of `measure run "
    "--json` | row:ID or DATABASE#ID of `measure models` | `predicted`, beside a row."
)


@takes_options(MODEL_OPTIONS, SETTINGS)
def compare(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, or what differs from A: @GPU, or ,batch=16.")],
    gpu: Annotated[
        str | None, typer.Option(help="GPU of a run that names none, and whose rows row:ID means (default: h200).")
    ] = None,
    iterations: Annotated[
        int, typer.Option(help="How often the command of `measure run` ran the workload, warm-up excluded.")
    ] = 1,
    json: Json = False,
    plot: Plot = None,
    **options: Any,
) -> None:
    """Explain the difference between two runs, B - A, by operators, modules and clock; it adds up exactly.

    Options hold for both runs; a run may say otherwise after its name.

    Examples: wattcast compare llama3-8b@h200 @h100-sxm --batch 8 --seq 512
    ... compare llama3-8b qwen3-8b --gpu h200 --phase decode --batch 32
    ... compare llama3-8b@h200,batch=8,seq=512 ,power_limit=500W
    """
    from wattcast.report import comparison_sides as sides

    env: Environment = ctx.obj
    given = {name: ctx.params[name] for name in sides.SPEC_KEYS if was_given(ctx, name)}
    found = sides.compare(a, b, gpu=gpu, iterations=iterations, **given)
    env.show(found, json, sides.comparison_to_plain, sides.print_comparison, plot, sides.draw_difference)


@takes_options(MODEL_OPTIONS, SETTINGS)
def report(
    ctx: typer.Context,
    workload: Source,
    gpu: Annotated[
        str, typer.Option(help="Catalogue name or your own YAML file; more names with commas are compared with it.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write: report.html, or report.pdf through Chromium.")],
    paper: Annotated[str, typer.Option(help="Of a PDF: A4|Letter.")] = "A4",
    force: Force = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Write a report: summary, memory, breakdown, timeline, clocks, other GPUs, intervals, assumptions, sources.

    Example: wattcast report llama3-8b --gpu h200,h100-sxm --batch 8 --seq 1024 --out report.html
    """
    from wattcast.core.errors import bad_value
    from wattcast.core.whole_files import write_whole
    from wattcast.predictor.api import find_gpu
    from wattcast.report.configuration_view import RunSettings
    from wattcast.report.html_report import PAPERS, build_report, print_report
    from wattcast.workload.model_options import ModelOptions

    env: Environment = ctx.obj
    kind = out.suffix.lower()
    if kind not in (".html", ".htm", ".pdf"):
        raise bad_value("--out", "a name that ends in .html or .pdf", out.name)
    if paper not in PAPERS:
        raise bad_value("--paper", " or ".join(PAPERS), paper)
    chips = [find_gpu(name.strip()) for name in gpu.split(",")]
    settings = RunSettings(**{name: options.pop(name) for name in SETTINGS}, force=force)
    page = build_report(workload, chips, ModelOptions.from_names(**options), settings, _command_line(ctx))
    data = print_report(page, paper) if kind == ".pdf" else page.encode()
    write_whole(out, data)
    if json:
        env.json({"file": str(out), "byte": len(data), "gpus": [chip.name for chip in chips]})
    else:
        env.say(f"report saved: {out}")


def _command_line(ctx: typer.Context) -> str:
    """Return the command line, as far as it decides what the page says."""
    words = ["wattcast", "report", str(ctx.params["workload"])]
    for name, value in ctx.params.items():
        if was_given(ctx, name) and name not in ("workload", "json", "out", "paper"):
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return shlex.join(words)
