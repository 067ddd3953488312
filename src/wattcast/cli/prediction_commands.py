"""``wattcast predict``, ``compare`` and ``report``."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from wattcast.cli.command_builder import (
    COMPLETIONS,
    PLOT,
    command,
)
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import GPU, WORKLOAD
from wattcast.cli.figure_options import PLOT_FILE
from wattcast.core.errors import (
    bad_value,
    check_names,
    resolve_name,
)
from wattcast.core.option_declaration import Option
from wattcast.options.power_series_options import PowerOutput
from wattcast.options.run_options import OPTION_NAMES
from wattcast.options.setting_options import (
    COMPARE,
    PREDICT,
    REPORT,
)

_FORM_PANEL = "Forms of carbon and energy"

if TYPE_CHECKING:
    from rich.console import Console

    from wattcast.predictor.prediction import Prediction


def _gpu_names(incomplete: str) -> list[str]:
    from wattcast.hardware.catalogue_reader import gpu_names, list_boards

    return [name for name in (*gpu_names(), *list_boards()) if name.startswith(incomplete)]


def _model_names(incomplete: str) -> list[str]:
    """Return models that a shell may complete to; the shell itself completes files."""
    from wattcast.workload import model_catalogue

    return [name for name in model_catalogue.list_models() if name.startswith(incomplete)]


COMPLETIONS["gpu"] = _gpu_names
for _argument in ("workloads", "workload", "model"):
    COMPLETIONS[_argument] = _model_names


@dataclass(frozen=True)
class PredictionFigure:
    """What of a prediction is shown."""

    details: Annotated[bool, Option("Print everything.")] = False
    plot: Annotated[Path | None, PLOT_FILE] = None
    figure: Annotated[str, Option("breakdown|timeline|roofline|clocks")] = "breakdown"
    kernel: Annotated[
        int | None, Option("Look into the N-th operator of `ops`: tile, waves, bytes, phases.")
    ] = None


@command("predict", PREDICT)
def predict(
    env: Environment,
    workloads: Annotated[list[str], Option("Models, Hugging Face ids, or files.", positional=True)],
    gpu: Annotated[str, GPU],
    shown: PredictionFigure,
    series: PowerOutput,
    **options: Any,
) -> CommandOutput:
    """Predict speed, power and energy of each workload, in order, on GPUs of one kind.

    Example: wattcast predict llama3-8b --gpu h200 --phase decode --batch 32 --seq 4096
    """
    from wattcast.predictor import api

    if shown.plot is not None:
        from wattcast.report.prediction_figures import FIGURES

        check_names("figure", shown.figure, FIGURES)
        if len(workloads) != 1:
            raise bad_value("--plot", "one workload", f"{len(workloads)} workloads")
    if series.power_out is not None and len(workloads) != 1:
        raise bad_value("--power-out", "one workload", f"{len(workloads)} workloads")
    kinds = [name.strip() for name in gpu.split(",")]
    if len(kinds) > 1 and (shown.plot or series.power_out):
        raise bad_value("--gpu", "one kind of GPU with --plot or --power-out", gpu)
    if shown.kernel is not None and len(workloads) * len(kinds) != 1:
        raise bad_value("--kernel", "one workload on one kind of GPU", f"{workloads} on {gpu}")
    predictions = api.predict_many(workloads, kinds, **options)
    if shown.kernel is not None:
        return _show_kernel(env, predictions[0], shown)
    if series.power_out is not None:
        from wattcast.timeseries.series_files import write_as_asked
        from wattcast.timeseries.step_power import trace_prediction

        curve = trace_prediction(predictions[0])
        env.say(write_as_asked([curve], series, gpu, curve.length_s))
    if shown.plot is not None:
        from wattcast.report.configuration_view import ConfigurationView
        from wattcast.report.prediction_figures import draw_figure

        view = ConfigurationView(predictions[0])
        env.save_plot(draw_figure(shown.figure, view), shown.plot)

    def make_plain() -> object:
        from wattcast.predictor.prediction_json import predictions_to_output

        return predictions_to_output(predictions)

    def print_text(console: Console) -> None:
        from wattcast.report.text_tables import print_predictions

        print_predictions(console, predictions, shown.details)

    return CommandOutput(make_plain, print_text)


def _show_kernel(
    env: Environment,
    prediction: Prediction,
    shown: PredictionFigure,
) -> CommandOutput:
    """Return what is inside one kernel of a prediction, and draw its life where a figure is asked
    for.
    """
    from wattcast.report.kernel_report import (
        draw_kernel,
        kernel_to_plain,
        print_kernel,
        view_numbered_kernel,
    )

    assert shown.kernel is not None, "a kernel is asked for"
    view = view_numbered_kernel(prediction, shown.kernel)
    if shown.plot is not None:
        env.save_plot(draw_kernel(view), shown.plot)
    return CommandOutput.of(view, kernel_to_plain, print_kernel)


@command("compare", COMPARE, PLOT)
def compare(
    first: Annotated[
        str,
        Option(
            "A model, MODEL@GPU,key=value,... | FILE.json of `predict --json` "
            "(FILE.json#2: its second) or of `measure run --json` | row:ID or "
            "DATABASE#ID of `measure models` | `predicted`, beside a row.",
            "A",
            positional=True,
        ),
    ],
    second: Annotated[
        str,
        Option("Another run, or what differs from A: @GPU, or ,batch=16.", "B", positional=True),
    ],
    gpu: Annotated[
        str | None,
        Option("GPU of a run that names none, and whose rows row:ID means (default: h200)."),
    ] = None,
    iterations: Annotated[
        int, Option("How often the command of `measure run` ran the workload, warm-up excluded.")
    ] = 1,
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

    result = compare_sides(
        first,
        second,
        gpu=gpu,
        iterations=iterations,
        **options,
    )
    return CommandOutput.of(result, comparison_to_plain, print_comparison, draw_difference)


@dataclass(frozen=True)
class FormOptions:
    """A form to fill, and what it needs beyond the prediction."""

    form: Annotated[
        str | None,
        Option(
            "Fill a form: sci (ISO 21031), ghg (scopes 2 and 3), eu-ai-act (Annex XI).",
            panel=_FORM_PANEL,
        ),
    ] = None
    carbon: Annotated[
        str | None,
        Option("Carbon intensity, such as 400g/kWh, or a region: us.", panel=_FORM_PANEL),
    ] = None
    pue: Annotated[
        float, Option("Energy at the meter over energy of the GPUs (PUE).", panel=_FORM_PANEL)
    ] = 1.0
    embodied: Annotated[
        str | None, Option("Emissions of making one GPU, such as 150kg.", panel=_FORM_PANEL)
    ] = None
    lifetime: Annotated[
        str | None, Option("How long the hardware is used, such as 5y.", panel=_FORM_PANEL)
    ] = None
    hours: Annotated[
        float, Option("Period of the form ghg, in hours.", panel=_FORM_PANEL, above=0.0)
    ] = 8766.0
    gpus: Annotated[
        int, Option("GPUs of the training job of eu-ai-act.", panel=_FORM_PANEL, least=1)
    ] = 8
    training_tokens: Annotated[
        str, Option("Tokens of the training job of eu-ai-act.", panel=_FORM_PANEL)
    ] = "1B"

    def __post_init__(self) -> None:
        for name in ("carbon", "embodied", "lifetime"):
            value = getattr(self, name)
            if self.form is None and value is not None:
                raise bad_value(f"--{name}", "--form as well", value)


def write_form(
    env: Environment,
    workload: str,
    gpu: str,
    out: Path,
    wanted: FormOptions,
    options: dict[str, Any],
) -> CommandOutput:
    """Fill a form and write it with its JSON schema beside it."""
    from wattcast.core.strict_files import encode_json
    from wattcast.core.whole_files import check_new_file, write_whole
    from wattcast.predictor.api import predict as predict_one
    from wattcast.report import sustainability_forms as forms

    form = resolve_name("form", wanted.form or "", forms.FORMS)
    if out.suffix.lower() != ".json":
        raise bad_value("--out", "a name that ends in .json", out.name)
    check_new_file(out)
    carbon_inputs = forms.CarbonInputs(
        carbon=wanted.carbon,
        pue=wanted.pue,
        embodied_g=_read_grams(wanted.embodied),
        lifetime_h=_read_years(wanted.lifetime),
        period_h=wanted.hours,
    )
    filled: forms.SciForm | forms.GhgForm | forms.AiActForm
    if form == "eu-ai-act":
        from wattcast.training.train_job import train

        job = train(
            workload,
            gpu,
            gpus=wanted.gpus,
            tokens=wanted.training_tokens,
            pue=wanted.pue,
        )
        filled = forms.fill_ai_act(job.to_dict(), job.flop_per_token, carbon_inputs)
    else:
        fill = forms.fill_sci if form == "sci" else forms.fill_ghg
        filled = fill(predict_one(workload, gpu, **options), carbon_inputs)
    schema = out.with_suffix(".schema.json")
    write_whole(out, forms.encode_form(filled))
    write_whole(schema, encode_json(forms.make_schema(form)) + b"\n")
    env.say(f"form saved: {out}, its schema: {schema}")
    for name in filled.missing:
        env.say(f"missing: {name}")
    return CommandOutput(
        {
            "file": str(out),
            "schema": str(schema),
            "form": form,
        },
        "",
    )


def _read_grams(text: str | None) -> float | None:
    """Return grams of a mass such as 150kg; None where none is given."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([\d.]+)\s*(kg|g|t)\s*", text)
    if match is None:
        raise bad_value("embodied", "a mass such as 150kg", text)
    return (
        float(match[1])
        * {
            "g": 1.0,
            "kg": 1e3,
            "t": 1e6,
        }[match[2]]
    )


def _read_years(text: str | None) -> float | None:
    """Return hours of a lifetime such as 5y; None where none is given."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([\d.]+)\s*(y|years?)\s*", text)
    if match is None or float(match[1]) <= 0.0:
        raise bad_value("lifetime", "years such as 5y", text)
    return float(match[1]) * 8766.0


@command("report", REPORT)
def report(
    env: Environment,
    workload: Annotated[str, WORKLOAD],
    gpu: Annotated[
        str,
        Option(
            "Catalogue name or your own YAML file; more names with commas are compared with it."
        ),
    ],
    out: Annotated[
        Path,
        Option(
            "The file to write: report.html, report.pdf through Chromium, form.json with --form."
        ),
    ],
    form_options: FormOptions,
    paper: Annotated[str, Option("Paper of a PDF: A4|Letter.")] = "A4",
    **options: Any,
) -> CommandOutput:
    """Write a report: summary, memory, breakdown, timeline, clocks, other GPUs, intervals,
    assumptions, sources. Or fill a form: --form sci|ghg|eu-ai-act.

    Example: wattcast report llama3-8b --gpu h200,h100-sxm --batch 8 --seq 1024 --out report.html
    """
    if form_options.form is not None:
        return write_form(
            env,
            workload,
            gpu,
            out,
            form_options,
            options,
        )
    from wattcast.core.whole_files import check_new_file, write_whole
    from wattcast.predictor.api import find_gpu
    from wattcast.report.html_report import (
        PAPERS,
        build_report,
        print_report,
    )
    from wattcast.workload.model_options import ModelOptions

    kind = out.suffix.lower()
    if kind not in (".html", ".htm", ".pdf"):
        raise bad_value("--out", "a name that ends in .html or .pdf", out.name)
    check_new_file(out)
    if paper not in PAPERS:
        raise bad_value("--paper", " or ".join(PAPERS), paper)
    chips = [find_gpu(name.strip()) for name in gpu.split(",")]
    # the command line, as far as it decides what the page says
    line = ["wattcast", "report", workload, "--gpu", gpu]
    for name, value in options.items():
        line.append(f"--{name.replace('_', '-')}")
        if value is not True:
            line.append(str(value))
    chosen = {name: value for name, value in options.items() if name in OPTION_NAMES}
    settings: Any = {name: value for name, value in options.items() if name not in chosen}
    of_model = ModelOptions.from_names(**chosen)
    page = build_report(
        workload,
        chips,
        of_model,
        shlex.join(line),
        **settings,
    )
    data = print_report(page, paper) if kind == ".pdf" else page.encode()
    write_whole(out, data)
    env.say(f"report saved: {out}")
    return CommandOutput(
        {
            "file": str(out),
            "byte": len(data),
            "gpus": [chip.name for chip in chips],
        },
        "",
    )
