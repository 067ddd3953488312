"""``wattcast measure run|idle|sensor|kernels|microbench|...``: thin over :mod:`wattcast.measure`.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.measure_microbench import microbench, multimedia
from wattcast.cli.options import AttentionName, Batch, DtypeName, PhaseName, Seq

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
    source: Source = "auto",
    device: Device = 0,
    json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Save power over time (.png, .svg, .pdf).")] = None,
) -> None:
    """Time, joules, mean and peak watts and clock of a command; its exit code passes through.

    Example: wattcast measure run --against gpt2 --gpu h200 --batch 8 --seq 1024 --iterations 50 -- python loop.py
    """
    from wattcast.measure.compare import against_prediction
    from wattcast.measure.run import run_command

    env: Environment = ctx.obj
    options = {"batch": batch, "seq": seq, "phase": phase, "dtype": dtype, "attention": attention}
    predicted = _predicted(against, gpu, options) if against else {}  # before the run: a bad name costs nothing
    done = run_command(command, source, device, pass_output=not json)
    verdict = against_prediction(done.measurement, predicted, iterations, against) if against else None
    if plot is not None:
        from wattcast.measure.plot import power_figure

        power_figure(done).savefig(plot, dpi=150)
    if json:
        env.json(done.plain() | ({"against": verdict.plain()} if verdict else {}))
    else:
        env.stdout.write(done.measurement.sentence + "\n")
        env.say(f"the sampler took {100 * (done.measurement.overhead or 0.0):.2f} % of the processors")
        if verdict:
            env.stdout.write(verdict.sentence + "\n")
    raise typer.Exit(done.exit_code)


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
    steps: Annotated[str, typer.Option(help="Comma-separated; default all.")] = "",
    budget: Annotated[str, typer.Option(help="Stop in time, such as 540s.")] = "540s",
    json: Json = False,
) -> None:
    """Measure the operators of the plan: bursts, sustained, duty-cycled, data patterns, clocks, names."""
    from wattcast.measure.kernels.campaign import STEPS, run_campaign
    from wattcast.units import parse

    env: Environment = ctx.obj
    counts = run_campaign(out, steps.split(",") if steps else list(STEPS), parse(budget, "s", "--budget"))
    if json:
        env.json(dict(sorted(counts.items())))
    else:
        env.stdout.writelines(f"{name}: {count}\n" for name, count in sorted(counts.items()))


@app.command()
def counters(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the raw table.")],
    budget: Annotated[str, typer.Option(help="Stop in time, such as 120s.")] = "150s",
) -> None:
    """Hardware counters of a sample of operators, through ncu."""
    from wattcast.measure.kernels import counters as library
    from wattcast.units import parse

    env: Environment = ctx.obj
    env.json(library.collect(out, parse(budget, "s", "--budget")))


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
