"""``wattcast predict``, ``compare``, ``report``, ``simulate`` (serving under traffic) and ``train`` (one job)."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from wattcast.cli.shared_options import (
    MODEL_OPTIONS,
    PRICES,
    SETTINGS,
    Arrivals,
    Environment,
    Force,
    GpuName,
    Json,
    Lengths,
    Model,
    Plot,
    Source,
    argument,
    folded,
    option,
    options_besides,
    parse_factors,
    save_plot,
    takes_options,
    was_given,
)

_own = folded("Coefficients and intervals")
_engine = folded("The engine")
_share = folded("How GPUs share it (chosen where not given)")
_recipe = folded("The recipe")
_pause = folded("Hosts and pauses")


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
    workloads: Annotated[list[str], argument("Models, Hugging Face ids, or files.", autocompletion=_model_names)],
    gpu: Annotated[str, option("GPU name or YAML file.", autocompletion=_gpu_names)],
    operands: Annotated[str | None, _own("cold|warm operands of a list (memory|L2).")] = None,
    bundle: Annotated[Path | None, _own("Folder that `calibrate` saved.")] = None,
    factor: Annotated[list[str] | None, _own("Your own factor, such as compute=0.9.")] = None,
    card: Annotated[str, _own("Ends for another|this card.")] = "another",
    node: Annotated[str | None, option("Where GPUs stand: a name of `gpus nodes`, or YAML.")] = None,
    force: Force = False,
    details: Annotated[bool, option("Print everything.", "--details")] = False,
    json: Json = False,
    plot: Plot = None,
    figure: Annotated[str, option("breakdown|timeline|roofline|clocks")] = "breakdown",
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
    a: Annotated[str, argument(_SIDE, metavar="A")],
    b: Annotated[str, argument("The same, or what differs from A: @GPU, or ,batch=16.", metavar="B")],
    gpu: Annotated[
        str | None, option("GPU of a run that names none, and whose rows row:ID means (default: h200).")
    ] = None,
    iterations: Annotated[
        int, option("How often the command of `measure run` ran the workload, warm-up excluded.")
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
    gpu: Annotated[str, option("Catalogue name or your own YAML file; more names with commas are compared with it.")],
    out: Annotated[Path, option("The file to write: report.html, or report.pdf through Chromium.")],
    paper: Annotated[str, option("Of a PDF: A4|Letter.")] = "A4",
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


@takes_options("dtype", "quantization", "tp", "clock", "power_limit", "weights", "kv_dtype", "pp", "dp", "ep", PRICES)
def simulate(
    ctx: typer.Context,
    model: Model,
    gpu: GpuName,
    rate: Annotated[str | None, option("Requests, such as 8/s or 600/min.")] = None,
    trace: Annotated[Path | None, option("Requests of a CSV or JSON Lines file.")] = None,
    prompt: Lengths = "512",
    output: Lengths = "128",
    arrivals: Arrivals = "poisson",
    seconds: Annotated[str, option("Time of arrivals, such as 600 or 1h.")] = "600",
    requests: Annotated[int | None, option("So many, in place of --seconds.")] = None,
    seed: Annotated[int, option("Of the drawn arrivals and lengths.", min=0)] = 1,
    seeds: Annotated[int, option("Draws to repeat, for the spread.", min=1, max=100)] = 1,
    replicas: Annotated[int, option("Engines that share requests.", min=1)] = 1,
    ttft: Annotated[str | None, option("To first token: 500ms, p99:500ms.")] = None,
    tpot: Annotated[str | None, option("Per output token: 50ms, p90:50ms.")] = None,
    router: Annotated[str, _engine("round-robin|least-loaded")] = "round-robin",
    prefill_replicas: Annotated[int, _engine("Engines for prompts alone; others decode.", min=0)] = 0,
    transfer: Annotated[str, _engine("Speed of sending a prompt's cache on.")] = "50GB/s",
    max_batched_tokens: Annotated[int, _engine("Tokens of a step at most.", min=1)] = 8192,
    max_seqs: Annotated[int, _engine("Sequences of a step at most.", min=1)] = 256,
    block_tokens: Annotated[int, _engine("Tokens of a cache block.", min=1)] = 16,
    cache_tokens: Annotated[int | None, _engine("Room of the cache; default: what the memory leaves.", min=1)] = None,
    memory_utilisation: Annotated[str, _engine("Share of the memory an engine takes.")] = "90%",
    prefix_hit_rate: Annotated[str, _engine("Share of each prompt found in the cache.")] = "0%",
    speculative_tokens: Annotated[int, _engine("Tokens drafted a step.", min=0, max=64)] = 0,
    acceptance_rate: Annotated[str, _engine("Chance that a drafted token is kept.")] = "70%",
    plot: Plot = None,
    out: Annotated[Path | None, option("Every request and step, as .parquet.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Serve requests as vLLM would and say how long they take and what they draw.

    Example: wattcast simulate llama3-8b --gpu h200 --rate 8/s --prompt 512 --output 128 --seconds 600
    """
    from wattcast.serving.serving_result import ServingResult, draw_serving, print_serving
    from wattcast.serving.simulate_serving import simulate as simulate_serving

    env: Environment = ctx.obj
    if (rate is None) == (trace is None):
        raise typer.BadParameter("give either --rate or --trace", param_hint="'--rate' / '--trace'")
    result = simulate_serving(**options_besides(ctx, "plot", "out", "json"))
    if out is not None:
        for path in result.write_requests_and_steps(out):
            env.say(f"written: {path}")
    env.show(result, json, ServingResult.summarise, print_serving, plot, draw_serving)


@takes_options("clock", "power_limit", PRICES)
def train(
    ctx: typer.Context,
    model: Model,
    gpu: GpuName,
    gpus: Annotated[int, option("GPUs in all.", min=1)] = 8,
    tokens: Annotated[str, option("Tokens to train on: 1B, 300M, 15T.")] = "1B",
    seq: Annotated[int | None, option("Tokens of a sequence; default 4096.", min=1)] = None,
    global_batch: Annotated[int | None, option("Sequences a step; default: 524,288 tokens.", min=1)] = None,
    dtype: Annotated[str, option("bf16|fp16|fp32|fp8|nvfp4")] = "bf16",
    optimizer: Annotated[str, option("adamw|adamw8bit|adafactor|muon|sgd")] = "adamw",
    stack: Annotated[str, option("compiled|eager kernels.")] = "compiled",
    minimise: Annotated[str, option("time|energy|cost: what decides.")] = "time",
    lora: Annotated[int, _recipe("Rank of LoRA adapters; 0 trains all weights.", min=0)] = 0,
    base_bits: Annotated[int, _recipe("Bits of frozen weights: 16, 8, or 4 (QLoRA).")] = 16,
    fused_loss: Annotated[bool, _recipe("The loss never keeps all logits.", "--fused-loss")] = False,
    graphs: Annotated[bool, _recipe("CUDA graphs replay the step; the host costs nothing.", "--graphs")] = False,
    loss_share: Annotated[str, _recipe("Of compute, lost to input and uneven clocks.")] = "5%",
    micro_batch: Annotated[int | None, _share("Sequences computed at a time.")] = None,
    tp: Annotated[int | None, _share("Tensor-parallel GPUs.")] = None,
    pp: Annotated[int | None, _share("Pipeline stages.")] = None,
    cp: Annotated[int, _share("GPUs that share a sequence.")] = 1,
    ep: Annotated[int, _share("GPUs that share the experts.")] = 1,
    interleave: Annotated[int, _share("Model chunks of a pipeline stage.")] = 1,
    sharding: Annotated[str | None, _share("none|zero1|zero2|zero3 (FSDP).")] = None,
    recompute: Annotated[str | None, _share("none|selective|full|offload activations.")] = None,
    offload: Annotated[bool, _share("Activations may wait in the host's memory.", "--offload")] = False,
    node: Annotated[str | None, _share("Where GPUs stand: a name of `gpus nodes`, or YAML.")] = None,
    network: Annotated[str | None, _share("Network of one GPU and direction, such as 50GB/s.")] = None,
    host_share: Annotated[str, _pause("Hosts, network and fans, of the GPUs' energy.")] = "25%",
    padding: Annotated[str, _pause("Share of tokens that are padding.")] = "0%",
    pause_share: Annotated[str, _pause("Share of evaluation, checkpoints and stalls.")] = "0%",
    failures_per_gpu_day: Annotated[float, _pause("Failures per GPU and day.", "--failures")] = 0.0,
    lost_minutes: Annotated[float, _pause("Work repeated after each failure, in minutes.")] = 30.0,
    search: Annotated[bool, option("Show the ways to share it.", "--search")] = False,
    details: Annotated[bool, option("Print every assumption.", "--details")] = False,
    force: Force = False,
    plot: Plot = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Say how long a training job takes, how many kWh, what it costs and how to share it over GPUs.

    Example: wattcast train llama3-8b --gpu h100-sxm --gpus 8 --tokens 1B --price 2.50/h --carbon germany
    """
    from wattcast.training.train_job import train as train_job
    from wattcast.training.training_report import draw_training, print_training, summarise_training

    env: Environment = ctx.obj
    result = train_job(**options_besides(ctx, "search", "details", "plot", "json"))
    text = partial(print_training, details=details, search=search)
    env.show(result, json, summarise_training, text, plot, draw_training)
