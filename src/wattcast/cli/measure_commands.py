"""``wattcast measure``: power of commands, campaigns and databases.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from wattcast.cli.shared_options import (
    Environment,
    Json,
    Plot,
    argument,
    make_command,
    option,
    print_result,
    takes_options,
    takes_verb_options,
)
from wattcast.core.errors import ExitCode, WattcastError, bad_value
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.core.whole_files import check_writable, write_somewhere
from wattcast.measure import measure_verbs

measure_app = typer.Typer(
    add_completion=False, help="Measure time, power and energy; build a kernel database.", no_args_is_help=True
)


@measure_app.command()
@takes_options("batch", "seq", "phase", "dtype", "attention")
def run(
    ctx: typer.Context,
    command: Annotated[list[str], argument("The command, after --.")],
    against: Annotated[
        str | None, option("Model, workload file, or output of `wattcast predict --json`: say which term is off.")
    ] = None,
    gpu: Annotated[
        str | None, option("With --against MODEL: the GPU it is predicted on; the options below are predict's.")
    ] = None,
    iterations: Annotated[int, option("How often the command runs the predicted workload.")] = 1,
    model: Annotated[
        Path | None,
        option("Power model of `lab fit counters --out`, or h200 or tegra-k1: estimate power from kernel launches."),
    ] = None,
    counters: Annotated[
        Path | None, option("With --model: counter book (.json) or ncu export (.csv), collected if it is not there.")
    ] = None,
    launches: Annotated[
        Path | None, option("With --model: the PyTorch profiler trace that the command writes.")
    ] = None,
    source: Annotated[str, option("auto|nvml|amd|rapl: where readings come from.")] = "auto",
    device: Annotated[int, option("Which device, counted from 0.")] = 0,
    json: Json = False,
    plot: Plot = None,
    save: Annotated[Path | None, option("Keep the samples (.npz) for `wattcast serve --replay`.")] = None,
    **options: Any,
) -> None:
    """Measure time, joules, mean and peak watts and clock of a command; its exit code passes through.

    A command that ended well and whose energy could not be measured, because the device was lost or its driver hung,
    exits with 5.

    Example: wattcast measure run --against gpt2 --gpu h200 --batch 8 --seq 1024 --iterations 50 -- python loop.py
    Example: wattcast measure run --model m.yaml --counters ncu.csv --launches trace.json -- python traced.py
    """
    from wattcast.measure.measured_run import compare_with_prediction, draw_run_power, run_command
    from wattcast.report.figure_style import save_figure

    env: Environment = ctx.obj
    # before the run, where a bad name costs nothing
    if save is not None and save.suffix != ".npz":
        raise bad_value("--save", "a name that ends in .npz", save.name)
    for path in (path for path in (save, plot) if path is not None):
        check_writable(path)
    if model is None and (counters or launches):
        raise bad_value("--counters and --launches", "--model FILE beside them", "none")
    predicted = _load_prediction(against, gpu, options) if against else {}
    prepared = None
    if model is not None:
        from wattcast.cli.measure_bridges import estimate_power, prepare_estimate

        prepared = prepare_estimate(model, counters, launches, gpu, command)
    done = run_command(command, source, device, pass_output=not json)
    code, trouble = done.shell_code, None
    if save is not None:
        kept = write_somewhere(save, done.samples.to_bytes())
        env.say(f"samples saved: {kept}" + (f", because {save} could not be written" if kept != save else ""))
        code = code if kept == save else code or ExitCode.FAILED
    verdict = from_launches = None
    try:  # whatever goes wrong from here on, the measurement is printed
        from_launches = None if prepared is None else estimate_power(prepared, done)
        verdict = compare_with_prediction(done.measurement, predicted, iterations, against) if against else None
        if plot is not None:
            drawn = draw_run_power(done, predicted["predictions"][0] if predicted else None)
            save_figure(from_launches.figure(done) if from_launches else drawn, plot)
    except WattcastError as error:
        trouble = error
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
    if trouble is not None:
        raise trouble
    raise typer.Exit(code)


def _load_prediction(against: str, gpu: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the output of `predict --json` from a file that holds it, or predict now."""
    import msgspec

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


def estimate(
    ctx: typer.Context,
    launches: Annotated[Path, argument("Trace of PyTorch's profiler, or of nsys export --type sqlite.")],
    model: Annotated[Path, option("Power model of `lab fit counters --out`, or h200 or tegra-k1.")],
    counters: Annotated[
        Path,
        option("Counters: a book (.json), ncu's .csv or .ncu-rep, nvprof's .csv, or GPU metrics in nsys's .sqlite."),
    ],
    clock: Annotated[str | None, option("Core clock; default: counted cycles over the trace's time.")] = None,
    memory_clock: Annotated[str | None, option("Memory clock, where the model needs it.")] = None,
    gpu: Annotated[str | None, option("The device, for models that need its number of SMs.")] = None,
    json: Json = False,
) -> None:
    """Estimate the watts of a run that is over from its kernel launches and counters of each kernel.

    Example: wattcast lab estimate run.sqlite --model h200 --counters kernels.ncu-rep --memory-clock 3201MHz
    Example: wattcast lab estimate run.sqlite --model dcgm.yaml --counters run.sqlite --memory-clock 3201MHz
    """
    from wattcast.cli.measure_bridges import estimate_offline
    from wattcast.core.units import parse, show

    clocks = [parse(c, "Hz", n) if c else None for c, n in ((clock, "--clock"), (memory_clock, "--memory-clock"))]
    found, clock_hz = estimate_offline(model, counters, launches, gpu, clocks[0], clocks[1])
    if json:
        ctx.obj.json(found.plain() | {"clock_hz": clock_hz})
        return
    parts = ", ".join(f"{name} {show(watts, 'W')}" for name, watts in found.plain()["part_w"].items() if watts)
    ctx.obj.stdout.write(f"{found.summary}, at {show(clock_hz, 'Hz')}: {parts}\n")


@takes_verb_options(measure_verbs.kernels)
def kernels(
    ctx: typer.Context,
    suggest: Annotated[
        int, option("Measure nothing: write the N rows that would help most to OUT/plan.jsonl.", min=0)
    ] = 0,
    gpu: Annotated[str, option("With --suggest: the GPU to be predicted.")] = "h200",
    database: Annotated[str, option("With --suggest: the rows measured so far; default: the GPU's.")] = "",
    json: Json = False,
    **options: Any,
) -> None:
    """Measure the operators of the plan: bursts, sustained, duty-cycled, data patterns, clocks, names."""
    if suggest:
        _write_suggestions(ctx.obj, suggest, gpu, database or gpu, options["out"], json)
    else:
        print_result(ctx.obj, measure_verbs.kernels(**options), json)


def _write_suggestions(env: Environment, count: int, gpu: str, database: str, out: Path, as_json: bool) -> None:
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


def pack_engine(
    ctx: typer.Context,
    folders: Annotated[list[Path], argument("Folders of `measure engine`.")],
    out: Annotated[Path, option("Folder of the tables; what they hold is kept.")],
) -> None:
    """Pack steps, requests and serving runs of an engine into tables that `lab validate` reads."""
    from wattcast.serving.host_times import pack_engine_folders

    found = pack_engine_folders(folders, out)
    env: Environment = ctx.obj
    runs = len(found.select_kind("traffic"))
    env.stdout.write(f"{out}: {len(found.rows)} rows, {runs} serving runs, {len(found.requests)} requests\n")


@takes_verb_options(measure_verbs.counters)
def counters(
    ctx: typer.Context,
    design: Annotated[
        str | None, option("Instead: the fewest counters that identify a power model, by a GPU's table or a file.")
    ] = None,
    columns: Annotated[Path | None, option("With --design FILE: YAML map of its columns.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Collect hardware counters of a sample of operators, through ncu; or say which a power model needs.

    Examples: wattcast lab counters --out rows;  wattcast lab counters --design h200
    """
    if design is None:
        if columns is not None:
            raise bad_value("--columns", "--design FILE beside it", "none")
        print_result(ctx.obj, measure_verbs.counters(**options), json)
        return
    from wattcast.counter_models.counter_table import read_counter_table
    from wattcast.counter_models.two_rails import design_counters, read_shipped_table
    from wattcast.predictor.api import find_gpu
    from wattcast.report.text_tables import new_table

    env: Environment = ctx.obj
    if Path(design).is_file() and columns is None:
        raise bad_value("--columns", "a YAML map of the table's columns", "none", "As `lab fit counters` takes it.")
    rows = read_counter_table(Path(design), columns) if columns else read_shipped_table(find_gpu(design).name)
    found = design_counters(rows)
    expected = found.steps[found.enough - 1].error
    if json:
        env.json({"events": found.events, "expected_error_percent": expected} | asdict(found))
        return
    title = f"{found.table}: {', '.join(found.always)} always" if found.always else found.table
    table = new_table("", "event", "metrics", "error, held out", "never trained on", title=title)
    for n, step in enumerate(found.steps, 1):
        error = f"{step.error:.1f} ± {step.standard_error:.1f} %"
        tested = "-" if step.tested is None else f"{step.tested:.1f} %"
        table.add_row(f"{n} *" if n == found.enough else str(n), step.event, str(step.metrics), error, tested)
    env.console().print(table)
    env.stdout.write(f"* enough: {len(found.events)} events in all, expected error {expected:.1f} %\n")


pack = make_command(measure_verbs.pack)
summary = make_command(measure_verbs.summary)
for _verb in (
    measure_verbs.idle,
    measure_verbs.sensor,
    measure_verbs.log,
    measure_verbs.models,
    measure_verbs.engine,
):
    measure_app.command()(make_command(_verb))
