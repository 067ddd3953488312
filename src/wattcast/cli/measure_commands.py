"""``wattcast measure``: power of commands, campaigns and databases.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.shared_options import (
    Environment,
    Json,
    Plot,
    takes_model_options,
)

if TYPE_CHECKING:
    from wattcast.cli.measure_bridges import LaunchEstimate
    from wattcast.measure.measured_run import MeasuredRun

measure_app = typer.Typer(
    add_completion=False, help="Measure time, power and energy; build a kernel database.", no_args_is_help=True
)

ReadingSource = Annotated[str, typer.Option(help="auto|nvml|amd|rapl: where readings come from.")]
Device = Annotated[int, typer.Option(help="Which device, counted from 0.")]


@measure_app.command()
@takes_model_options("batch", "seq", "phase", "dtype", "attention")
def run(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    against: Annotated[
        str | None,
        typer.Option(help="Model, workload file, or output of `wattcast predict --json`: say which term is off."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="With --against MODEL: the GPU it is predicted on; the options below are predict's."),
    ] = None,
    iterations: Annotated[int, typer.Option(help="How often the command runs the predicted workload.")] = 1,
    model: Annotated[
        Path | None,
        typer.Option(help="Power model of `lab fit counters --out`, or h200: estimate power from kernel launches."),
    ] = None,
    counters: Annotated[
        Path | None,
        typer.Option(help="With --model: counter book (.json) or ncu export (.csv), collected if it is not there."),
    ] = None,
    launches: Annotated[
        Path | None, typer.Option(help="With --model: the PyTorch profiler trace that the command writes.")
    ] = None,
    source: ReadingSource = "auto",
    device: Device = 0,
    json: Json = False,
    plot: Plot = None,
    save: Annotated[Path | None, typer.Option(help="Keep the samples (.npz) for `wattcast serve --replay`.")] = None,
    **options: Any,
) -> None:
    """Time, joules, mean and peak watts and clock of a command; its exit code passes through.

    Example: wattcast measure run --against gpt2 --gpu h200 --batch 8 --seq 1024 --iterations 50 -- python loop.py
    Example: wattcast measure run --model m.yaml --counters ncu.csv --launches trace.json -- python traced.py
    """
    from wattcast.measure.measured_run import compare_with_prediction, run_command

    env: Environment = ctx.obj
    _check_samples(save)
    predicted = _predicted(against, gpu, options) if against else {}  # before the run: a bad name costs nothing
    prepared = _prepared(model, counters, launches, gpu, command)
    done = run_command(command, source, device, pass_output=not json)
    from_launches = None if prepared is None else prepared(done)
    verdict = compare_with_prediction(done.measurement, predicted, iterations, against) if against else None
    if plot is not None:
        _plot(plot, done, predicted, from_launches)
    if save is not None:
        done.samples.save(save)
        env.say(f"samples saved: {save}")
    if json:
        beside = {"against": verdict.plain()} if verdict else {}
        env.json(done.plain() | beside | ({"model": from_launches.plain()} if from_launches else {}))
    else:
        env.stdout.write(done.measurement.sentence + "\n")
        env.say(f"the sampler took {100 * (done.measurement.overhead or 0.0):.2f} % of the processors")
        if verdict:
            env.stdout.write(verdict.sentence + "\n")
        if from_launches:
            env.stdout.write(from_launches.sentence + "\n")
    raise typer.Exit(done.exit_code)


def _prepared(
    model: Path | None, counters: Path | None, launches: Path | None, gpu: str | None, command: list[str]
) -> Callable[[MeasuredRun], LaunchEstimate] | None:
    """Read the files of ``--model`` before the run; return what takes the finished run."""
    from wattcast.core.errors import bad_value

    if model is None:
        if counters or launches:
            raise bad_value("--counters and --launches", "--model FILE beside them", "none")
        return None
    from wattcast.cli.measure_bridges import estimate_power, prepare_estimate

    ready = prepare_estimate(model, counters, launches, gpu, command)
    return lambda run: estimate_power(ready, run)


def _check_samples(save: Path | None) -> None:
    """Refuse a bad file name before the run, where it costs nothing."""
    from wattcast.core.errors import bad_value

    if save is not None and save.suffix != ".npz":
        raise bad_value("--save", "a name that ends in .npz", save.name)


def _plot(path: Path, done: MeasuredRun, predicted: dict[str, Any], from_launches: LaunchEstimate | None) -> None:
    from wattcast.measure.energy_samples import find_ticks
    from wattcast.report.figure_style import save_figure
    from wattcast.report.prediction_figures import PredictedLevel, RecordedRun, draw_recorded_run

    if from_launches is not None:
        save_figure(from_launches.figure(done), path)
        return
    stepped, samples = find_ticks(done.samples), done.samples
    recording = RecordedRun(
        edge_s=stepped.time_s - done.started_s,
        step_w=stepped.interval_w if stepped.intervals else stepped.time_s[:0],
        time_s=samples["time_s"] - done.started_s,
        instant_w=samples["instant_w"],
        clock_hz=samples["sm_clock_hz"],
        device=f"{done.identity.name}, driver {done.identity.driver or 'unknown'}",
    )
    level = PredictedLevel.of(predicted["predictions"][0]) if predicted else None
    title = " ".join(done.command)[:80]
    save_figure(draw_recorded_run(recording, title, (0.0, done.measurement.duration_s), level), path)


def _predicted(against: str, gpu: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the output of `predict --json` from a file that holds it, or predict now."""
    import msgspec

    from wattcast.core.errors import bad_value
    from wattcast.core.strict_files import decode_json, read_bytes
    from wattcast.predictor import api
    from wattcast.predictor.prediction_json import predictions_to_output

    if against.endswith(".json"):
        plain: Any = decode_json(read_bytes(Path(against)), object, against)
        if isinstance(plain, dict) and "predictions" in plain:
            return plain
    if gpu is None:
        raise bad_value("--against", "a --gpu beside a model", "none", "Name the GPU the command runs on.")
    found: dict[str, Any] = msgspec.to_builtins(predictions_to_output([api.predict(against, gpu, **options)]))
    return found


@measure_app.command()
def idle(
    ctx: typer.Context,
    seconds: Annotated[float, typer.Option(help="How long to watch.")] = 3.0,
    source: ReadingSource = "auto",
    device: Device = 0,
    json: Json = False,
) -> None:
    """Power with nothing to do, at the clock the device rests at."""
    from wattcast.measure.measured_run import measure_idle

    env: Environment = ctx.obj
    result, identity = measure_idle(seconds, source, device)
    if json:
        env.json({"device": identity.name} | result.plain())
    else:
        env.stdout.write(result.sentence + "\n")


@measure_app.command()
def sensor(ctx: typer.Context, source: ReadingSource = "auto", device: Device = 0, json: Json = False) -> None:
    """Update period and averaging window of the power sensor, and what they imply."""
    from wattcast.measure.measuring_checks import probe_sensor

    env: Environment = ctx.obj
    found, _ = probe_sensor(source, device)
    if json:
        env.json(found.plain())
    else:
        env.stdout.write("\n".join(found.implies) + "\n")


def kernels(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for JSON Lines; a re-run continues there.")],
    steps: Annotated[
        str,
        typer.Option(
            help="Commas between: idle, burst, repeat-burst, sustained, repeat-sustained, duty, pattern, clock, "
            "names (these by default), chain, stack (operators among others)."
        ),
    ] = "",
    budget: Annotated[str, typer.Option(help="Stop in time, such as 540s.")] = "540s",
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Operators in place of the plan (from --suggest), or: training, chains, common, common-sustained."
        ),
    ] = None,
    round_: Annotated[int, typer.Option("--round", min=1, help="Of the plan: each holds other operators.")] = 1,
    suggest: Annotated[
        int, typer.Option(min=0, help="Measure nothing: write the N rows that would help most to OUT/plan.jsonl.")
    ] = 0,
    gpu: Annotated[str, typer.Option(help="With --suggest: the GPU to be predicted.")] = "h200",
    database: Annotated[str, typer.Option(help="With --suggest: the rows measured so far; default: the GPU's.")] = "",
    json: Json = False,
) -> None:
    """Measure the operators of the plan: bursts, sustained, duty-cycled, data patterns, clocks, names."""
    from wattcast.core.units import parse
    from wattcast.measure.campaigns.kernel_campaign import DEFAULT_STEPS, read_listed, run_kernel_campaign

    env: Environment = ctx.obj
    if suggest:
        _suggest(env, suggest, gpu, database or gpu, out, json)
        return
    listed = read_listed(plan) if plan is not None else None
    wanted = (steps or DEFAULT_STEPS).split(",")
    counts = run_kernel_campaign(out, wanted, parse(budget, "s", "--budget"), listed=listed, round_=round_)
    if json:
        env.json(dict(sorted(counts.items())))
    else:
        env.stdout.writelines(f"{name}: {count}\n" for name, count in sorted(counts.items()))


@measure_app.command()
def engine(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for JSON Lines; a re-run continues there.")],
    seconds: Annotated[float, typer.Option(help="Time for everything; it ends itself inside.")] = 540.0,
    models: Annotated[str, typer.Option(help="Planned models in this order, commas between; default: all.")] = "",
    parts: Annotated[str, typer.Option(help="Commas between: steps, traffic.")] = "steps,traffic",
    loads: Annotated[str, typer.Option(help="Arrival rates as shares of the capacity.")] = "0.8,0.5,1.1",
    traffic_seconds: Annotated[float, typer.Option(help="Arrivals of one serving run.")] = 12.0,
    done: Annotated[Path | None, typer.Option(help="Folder of an earlier call: not measured again.")] = None,
    own: Annotated[Path | None, typer.Option(help="Folder with a config.json in place of the plan.")] = None,
    quantization: Annotated[str, typer.Option(help="With --own: fp8, for example.")] = "",
    kv_dtype: Annotated[str, typer.Option(help="With --own: fp8, for example.")] = "auto",
    smoke: Annotated[bool, typer.Option(help="A tiny model and a few rows.")] = False,
    json: Json = False,
) -> None:
    """Measure vLLM with dummy weights: single steps, and serving under arrivals.

    Example: wattcast measure engine --own ./my-model --out rows --seconds 300
    """
    from wattcast.measure.engine.engine_campaign import describe_rows, request_campaign, run_engine_campaign

    env: Environment = ctx.obj
    request = request_campaign(
        out, seconds, models, parts, loads, traffic_seconds, done, own, quantization, kv_dtype, smoke
    )
    counts = run_engine_campaign(request)
    if json:
        env.json(dict(sorted(counts.items())))
    else:
        env.stdout.writelines(f"{line}\n" for line in describe_rows(out))


def _suggest(env: Environment, count: int, gpu: str, database: str, out: Path, as_json: bool) -> None:
    """Write the rows that would help most as a list for --plan, and say why each would."""
    from wattcast.cli.measure_bridges import suggest_rows, write_suggestions
    from wattcast.report.text_tables import new_table

    found, specs = suggest_rows(count, gpu, database, env.say)
    path = write_suggestions(out, found, specs)
    env.say(f"saved: {path}; measure it with `python -m wattcast.measure kernels --plan {path} --out DIR`")
    if as_json:
        entries = [
            {"operator": s.operator, "family": s.family, "why": f.candidate.source, "score": f.score,
             "distance": f.distance if f.distance < 1e9 else None}
            for f, s in zip(found, specs, strict=True)
        ]  # fmt: skip
        env.json({"suggestions": entries, "from_models": sum(f.candidate.share > 0 for f in found)})
        return
    rows = new_table("operator", "why", "doublings from a measured row", "worth")
    for f, s in zip(found, specs, strict=True):
        sizes = " ".join(f"{k}={v}" for k, v in s.operator.items() if k not in ("op", "function", "bias"))
        away = "none of its kind" if f.distance > 1e9 else f"{f.distance:.1f}"
        name = s.operator.get("function", s.operator["op"])
        rows.add_row(f"{name} {sizes}", f.candidate.source, away, f"{1e3 * f.score:.3g}")
    env.console().print(rows)
    real = sum(f.candidate.share > 0 for f in found)
    env.stdout.write(
        f"{real} of {len(found)} are operators of real models, {len(found) - real} of the plan's own shapes\n"
    )


@measure_app.command()
def models(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for JSON Lines; a re-run continues there.")],
    budget: Annotated[str, typer.Option(help="Stop in time, such as 420s.")] = "420s",
    steps: Annotated[str, typer.Option(help="Comma-separated: models, profile.")] = "models,profile",
    only: Annotated[str, typer.Option(help="One model of the plan.")] = "",
    tier: Annotated[int, typer.Option(help="One tier of the plan: what no other card has.")] = 0,
    few: Annotated[int, typer.Option(help="Only so many rows: a smoke test.")] = 0,
    json: Json = False,
) -> None:
    """Measure whole models (random weights): time, power, energy and clock of one iteration each."""
    from wattcast.core.units import parse
    from wattcast.measure.campaigns.model_campaign import run_models

    env: Environment = ctx.obj
    counts = run_models(out, parse(budget, "s", "--budget"), tuple(steps.split(",")), only, few, tier)
    if json:
        env.json(dict(sorted(counts.items())))
    else:
        env.stdout.writelines(f"{name}: {count}\n" for name, count in sorted(counts.items()))


def counters(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the raw table.")],
    budget: Annotated[str, typer.Option(help="Stop in time, such as 120s.")] = "150s",
    plan: Annotated[str, typer.Option(help="Operators in place of the sample, a JSON object a line.")] = "",
) -> None:
    """Hardware counters of a sample of operators, through ncu."""
    from wattcast.core.units import parse
    from wattcast.measure.campaigns import nsight_counters as library

    env: Environment = ctx.obj
    env.json(library.collect_counters(out, parse(budget, "s", "--budget"), listed=plan))


def pack(
    ctx: typer.Context,
    folders: Annotated[list[Path], typer.Argument(help="Folders of campaigns.")],
    out: Annotated[Path, typer.Option(help="Folder of the database.")],
) -> None:
    """JSON Lines of campaigns into the tables of a database."""
    from wattcast.measure.database_files import pack_database as library

    env: Environment = ctx.obj
    env.json(library(folders, out))


def summary(
    ctx: typer.Context,
    database: Annotated[str, typer.Argument(help="Folder of a database, or a GPU Wattcast ships one for.")] = "h200",
    json: Json = False,
) -> None:
    """Rows by kind and family, kernels named, and repeatability."""
    from wattcast.core.measured_rows import database_folder
    from wattcast.measure.database_files import make_summary_page, summarise_database

    env: Environment = ctx.obj
    found = summarise_database(Path(database) if Path(database).exists() else database_folder(database))
    if json:
        env.json(found)
    else:
        env.stdout.write(make_summary_page(found))
