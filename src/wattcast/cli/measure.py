"""``wattcast measure run|idle|sensor|kernels|microbench|...``: thin over :mod:`wattcast.measure`.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Plot
from wattcast.cli.measure_microbench import microbench, multimedia
from wattcast.cli.options import AttentionName, Batch, DtypeName, PhaseName, Seq

if TYPE_CHECKING:
    from wattcast.cli.measure_model import Estimated
    from wattcast.measure.run import Run

app = typer.Typer(help="Measure time, power and energy; build a kernel database.", no_args_is_help=True)
app.command()(microbench)
app.command()(multimedia)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Source = Annotated[str, typer.Option(help="auto|nvml|amd|rapl: where readings come from.")]
Device = Annotated[int, typer.Option(help="Which device, counted from 0.")]


@app.command()
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
    batch: Batch = 1,
    seq: Seq = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    iterations: Annotated[int, typer.Option(help="How often the command runs the predicted workload.")] = 1,
    model: Annotated[
        Path | None,
        typer.Option(help="Power model of `fit counters --out`, or h200: estimate power from kernel launches."),
    ] = None,
    counters: Annotated[
        Path | None,
        typer.Option(help="With --model: counter book (.json) or ncu export (.csv), collected if it is not there."),
    ] = None,
    launches: Annotated[
        Path | None, typer.Option(help="With --model: the PyTorch profiler trace that the command writes.")
    ] = None,
    source: Source = "auto",
    device: Device = 0,
    json: Json = False,
    plot: Plot = None,
    save: Annotated[Path | None, typer.Option(help="Keep the samples (.npz) for `wattcast serve --replay`.")] = None,
) -> None:
    """Time, joules, mean and peak watts and clock of a command; its exit code passes through.

    Example: wattcast measure run --against gpt2 --gpu h200 --batch 8 --seq 1024 --iterations 50 -- python loop.py
    Example: wattcast measure run --model m.yaml --counters ncu.csv --launches trace.json -- python traced.py
    """
    from wattcast.measure.compare import against_prediction
    from wattcast.measure.run import run_command

    env: Environment = ctx.obj
    _check_samples(save)
    options = {"batch": batch, "seq": seq, "phase": phase, "dtype": dtype, "attention": attention}
    predicted = _predicted(against, gpu, options) if against else {}  # before the run: a bad name costs nothing
    prepared = _prepared(model, counters, launches, gpu, command)
    done = run_command(command, source, device, pass_output=not json)
    from_launches = None if prepared is None else prepared(done)
    verdict = against_prediction(done.measurement, predicted, iterations, against) if against else None
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
) -> Callable[[Run], Estimated] | None:
    """Files of ``--model`` read before the run; what remains takes the finished run."""
    from wattcast.errors import bad_value

    if model is None:
        if counters or launches:
            raise bad_value("--counters and --launches", "--model FILE beside them", "none")
        return None
    from wattcast.cli.measure_model import estimated, prepare

    ready = prepare(model, counters, launches, gpu, command)
    return lambda run: estimated(ready, run)


def _check_samples(save: Path | None) -> None:
    """A bad file name costs nothing when it is found before the run."""
    from wattcast.errors import bad_value

    if save is not None and save.suffix != ".npz":
        raise bad_value("--save", "a name that ends in .npz", save.name)


def _plot(path: Path, done: Run, predicted: dict[str, Any], from_launches: Estimated | None) -> None:
    from wattcast.measure.samples import ticks
    from wattcast.report.figure import save
    from wattcast.report.recorded import Level, Recording, power_over_time

    if from_launches is not None:
        save(from_launches.figure(done), path)
        return
    stepped, samples = ticks(done.samples), done.samples
    recording = Recording(
        edge_s=stepped.time_s - done.started_s,
        step_w=stepped.interval_w if stepped.intervals else stepped.time_s[:0],
        time_s=samples["time_s"] - done.started_s,
        instant_w=samples["instant_w"],
        clock_hz=samples["sm_clock_hz"],
        device=f"{done.identity.name}, driver {done.identity.driver or 'unknown'}",
    )
    level = Level.of(predicted["predictions"][0]) if predicted else None
    title = " ".join(done.command)[:80]
    save(power_over_time(recording, title, (0.0, done.measurement.duration_s), level), path)


def _predicted(against: str, gpu: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The output of `predict --json`: from a file that holds it, or predicted now."""
    import msgspec

    from wattcast import api
    from wattcast.errors import bad_value
    from wattcast.files import from_json, read_bytes
    from wattcast.report.plain import predictions_out

    if against.endswith(".json"):
        plain: Any = from_json(read_bytes(Path(against)), object, against)
        if isinstance(plain, dict) and "predictions" in plain:
            return plain
    if gpu is None:
        raise bad_value("--against", "a --gpu beside a model", "none", "Name the GPU the command runs on.")
    found: dict[str, Any] = msgspec.to_builtins(predictions_out([api.predict(against, gpu, **options)]))
    return found


@app.command()
def idle(
    ctx: typer.Context,
    seconds: Annotated[float, typer.Option(help="How long to watch.")] = 3.0,
    source: Source = "auto",
    device: Device = 0,
    json: Json = False,
) -> None:
    """Power with nothing to do, at the clock the device rests at."""
    from wattcast.measure.idle import measure_idle

    env: Environment = ctx.obj
    result, identity = measure_idle(seconds, source, device)
    if json:
        env.json({"device": identity.name} | result.plain())
    else:
        env.stdout.write(result.sentence + "\n")


@app.command()
def sensor(ctx: typer.Context, source: Source = "auto", device: Device = 0, json: Json = False) -> None:
    """Update period and averaging window of the power sensor, and what they imply."""
    from wattcast.measure.sensor_run import probe

    env: Environment = ctx.obj
    found, _ = probe(source, device)
    if json:
        env.json(found.plain())
    else:
        env.stdout.write("\n".join(found.implies) + "\n")


@app.command()
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
    from wattcast.measure.kernels.listed import read_listed
    from wattcast.measure.kernels.run import run_campaign
    from wattcast.measure.kernels.steps import STEPS
    from wattcast.units import parse

    env: Environment = ctx.obj
    if suggest:
        _suggest(env, suggest, gpu, database or gpu, out, json)
        return
    listed = read_listed(plan) if plan is not None else None
    wanted = steps.split(",") if steps else list(STEPS)
    counts = run_campaign(out, wanted, parse(budget, "s", "--budget"), listed=listed, round_=round_)
    if json:
        env.json(dict(sorted(counts.items())))
    else:
        env.stdout.writelines(f"{name}: {count}\n" for name, count in sorted(counts.items()))


def _suggest(env: Environment, count: int, gpu: str, database: str, out: Path, as_json: bool) -> None:
    """Rows that would help most: a list for --plan, and why each."""
    from wattcast.cli.measure_suggest import suggestions, write
    from wattcast.report.text import table

    found, specs = suggestions(count, gpu, database, env.say)
    path = write(out, found, specs)
    env.say(f"saved: {path}; measure it with `python -m wattcast.measure kernels --plan {path} --out DIR`")
    if as_json:
        entries = [
            {"operator": s.operator, "family": s.family, "why": f.candidate.source, "score": f.score,
             "distance": f.distance if f.distance < 1e9 else None}
            for f, s in zip(found, specs, strict=True)
        ]  # fmt: skip
        env.json({"suggestions": entries, "from_models": sum(f.candidate.share > 0 for f in found)})
        return
    rows = table("operator", "why", "doublings from a measured row", "worth")
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


@app.command()
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
    from wattcast.measure.models.campaign import run_models
    from wattcast.units import parse

    env: Environment = ctx.obj
    counts = run_models(out, parse(budget, "s", "--budget"), tuple(steps.split(",")), only, few, tier)
    if json:
        env.json(dict(sorted(counts.items())))
    else:
        env.stdout.writelines(f"{name}: {count}\n" for name, count in sorted(counts.items()))


@app.command()
def counters(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the raw table.")],
    budget: Annotated[str, typer.Option(help="Stop in time, such as 120s.")] = "150s",
    plan: Annotated[str, typer.Option(help="Operators in place of the sample, a JSON object a line.")] = "",
) -> None:
    """Hardware counters of a sample of operators, through ncu."""
    from wattcast.measure.kernels import counters as library
    from wattcast.units import parse

    env: Environment = ctx.obj
    env.json(library.collect(out, parse(budget, "s", "--budget"), listed=plan))


@app.command()
def pack(
    ctx: typer.Context,
    folders: Annotated[list[Path], typer.Argument(help="Folders of campaigns.")],
    out: Annotated[Path, typer.Option(help="Folder of the database.")],
) -> None:
    """JSON Lines of campaigns into the tables of a database."""
    from wattcast.measure.pack import pack as library

    env: Environment = ctx.obj
    env.json(library(folders, out))


@app.command()
def summary(
    ctx: typer.Context,
    database: Annotated[str, typer.Argument(help="Folder of a database, or a GPU Wattcast ships one for.")] = "h200",
    json: Json = False,
) -> None:
    """Rows by kind and family, kernels named, and repeatability."""
    from wattcast.measure.summary import markdown, summarise
    from wattcast.records import database_folder

    env: Environment = ctx.obj
    found = summarise(Path(database) if Path(database).exists() else database_folder(database))
    if json:
        env.json(found)
    else:
        env.stdout.write(markdown(found))
