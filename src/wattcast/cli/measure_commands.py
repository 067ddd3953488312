"""``wattcast measure``: power of commands, campaigns and databases. Nothing here changes clocks, limits or modes.

Some verbs connect measurements with models: power from kernel launches, and rows worth measuring next. A command
writes a profiler trace; counters of its kernels were collected once per kernel and launch configuration, and are
reused for every launch [Stokke2016, figure 7].
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from wattcast import hardware
from wattcast.cli.shared_options import (
    Environment,
    Json,
    Plot,
    make_command,
    print_result,
    takes_options,
    takes_verb_options,
)
from wattcast.core.errors import ExitCode, WattcastError, bad_value
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.core.units import show
from wattcast.core.whole_files import check_writable, write_somewhere
from wattcast.counter_models.gpmtool_files import read_nsys_activity
from wattcast.counter_models.launch_power import (
    CounterBook,
    KernelLaunch,
    PowerEstimate,
    estimate_launch_power,
    find_clock_hz,
    is_database,
    read_counter_book,
    read_launches,
)
from wattcast.counter_models.profiler_counters import list_ncu_metrics
from wattcast.fit import kernel_rows
from wattcast.fit.kernel_rows import KernelRows
from wattcast.fit.row_suggestions import RowCandidate, RowSuggestion, list_model_operators
from wattcast.fit.row_suggestions import suggest_rows as suggest
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.kernels.kernel_table import RunCondition
from wattcast.measure import measure_verbs
from wattcast.measure.campaigns.kernel_campaign import write_listed
from wattcast.measure.campaigns.kernel_plan import (
    LARGEST_BYTE,
    LONGEST_S,
    OperatorSpec,
    read_kernel_plan,
    spec_from_operator,
)
from wattcast.measure.campaigns.nsight_counters import make_collect_command
from wattcast.measure.database_files import make_workload_form
from wattcast.measure.energy_samples import find_ticks
from wattcast.measure.measured_run import MeasuredRun, Measurement, summarise_window
from wattcast.power.power_model import SavedModel, load_saved_model
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.forecast import forecast_rule
from wattcast.workload.readers.from_json import operator_to_plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

measure_app = typer.Typer(
    add_completion=False, help="Measure time, power and energy; build a kernel database.", no_args_is_help=True
)


@measure_app.command()
@takes_options("batch", "seq", "phase", "dtype", "attention")
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
        typer.Option(
            help="Power model of `lab fit counters --out`, or h200 or tegra-k1: estimate power from kernel launches."
        ),
    ] = None,
    counters: Annotated[
        Path | None,
        typer.Option(help="With --model: counter book (.json) or ncu export (.csv), collected if it is not there."),
    ] = None,
    launches: Annotated[
        Path | None, typer.Option(help="With --model: the PyTorch profiler trace that the command writes.")
    ] = None,
    source: Annotated[str, typer.Option(help="auto|nvml|amd|rapl: where readings come from.")] = "auto",
    device: Annotated[int, typer.Option(help="Which device, counted from 0.")] = 0,
    json: Json = False,
    plot: Plot = None,
    save: Annotated[Path | None, typer.Option(help="Keep the samples (.npz) for `wattcast serve --replay`.")] = None,
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
    predicted = _predicted(against, gpu, options) if against else {}
    prepared = None
    if model is not None:
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


def _predicted(against: str, gpu: str | None, options: dict[str, Any]) -> dict[str, Any]:
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
    launches: Annotated[Path, typer.Argument(help="Trace of PyTorch's profiler, or of nsys export --type sqlite.")],
    model: Annotated[Path, typer.Option(help="Power model of `lab fit counters --out`, or h200 or tegra-k1.")],
    counters: Annotated[
        Path,
        typer.Option(
            help="Counters: a book (.json), ncu's .csv or .ncu-rep, nvprof's .csv, or GPU metrics in nsys's .sqlite."
        ),
    ],
    clock: Annotated[
        str | None, typer.Option(help="Core clock; default: counted cycles over the trace's time.")
    ] = None,
    memory_clock: Annotated[str | None, typer.Option(help="Memory clock, where the model needs it.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The device, for models that need its number of SMs.")] = None,
    json: Json = False,
) -> None:
    """Estimate the watts of a run that is over from its kernel launches and counters of each kernel.

    Example: wattcast lab estimate run.sqlite --model h200 --counters kernels.ncu-rep --memory-clock 3201MHz
    Example: wattcast lab estimate run.sqlite --model dcgm.yaml --counters run.sqlite --memory-clock 3201MHz
    """
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
        int, typer.Option(min=0, help="Measure nothing: write the N rows that would help most to OUT/plan.jsonl.")
    ] = 0,
    gpu: Annotated[str, typer.Option(help="With --suggest: the GPU to be predicted.")] = "h200",
    database: Annotated[str, typer.Option(help="With --suggest: the rows measured so far; default: the GPU's.")] = "",
    json: Json = False,
    **options: Any,
) -> None:
    """Measure the operators of the plan: bursts, sustained, duty-cycled, data patterns, clocks, names."""
    if suggest:
        _suggest(ctx.obj, suggest, gpu, database or gpu, options["out"], json)
    else:
        print_result(ctx.obj, measure_verbs.kernels(**options), json)


def _suggest(env: Environment, count: int, gpu: str, database: str, out: Path, as_json: bool) -> None:
    """Write the rows that would help most as a list for --plan, and say why each would."""
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
    folders: Annotated[list[Path], typer.Argument(help="Folders of `measure engine`.")],
    out: Annotated[Path, typer.Option(help="Folder of the tables; what they hold is kept.")],
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
        str | None,
        typer.Option(help="Instead: the fewest counters that identify a power model, by a GPU's table or a file."),
    ] = None,
    columns: Annotated[Path | None, typer.Option(help="With --design FILE: YAML map of its columns.")] = None,
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


@dataclass(frozen=True)
class PreparedEstimate:
    """What is read before the command runs, so that a bad file costs nothing."""

    saved: SavedModel
    book: CounterBook
    trace: Path


@dataclass(frozen=True)
class LaunchEstimate:
    """Power from launches, and the measurement of the same stretch where the two clocks can be joined."""

    estimate: PowerEstimate
    same_stretch: Measurement | None
    origin_s: float | None  # of the estimate's time on the sampler's clock

    def plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        whole_s = float(self.estimate.activity.duration_s.sum())
        known_s = float((self.estimate.activity.duration_s * self.estimate.known).sum())
        watts = self.estimate.power.part_w
        share = (watts.T * self.estimate.activity.duration_s * self.estimate.known).sum(axis=-1)
        parts = dict(zip(self.estimate.power.parts, (share / known_s if known_s else share).tolist(), strict=True))
        plain: dict[str, Any] = {
            "power_w": self.estimate.mean_w,
            "energy_j": self.estimate.energy_j,
            "traced_s": whole_s,
            "known_share": known_s / whole_s,
            "part_w": parts,
            "without_counters": [
                {"kernel": key.kernel, "grid": key.grid, "block": key.block} for key in self.estimate.unknown
            ],
        }
        if self.same_stretch is not None:
            plain["measured_w"] = self.same_stretch.power_w
            plain["measured_flags"] = list(self.same_stretch.flags)
        return plain

    @property
    def summary(self) -> str:
        """Say what the model gives, and for which kernels there are no counters."""
        plain = self.plain()
        text = f"model: mean {show(self.estimate.mean_w, 'W')} over {show(plain['traced_s'], 's')} of the trace"
        missing = plain["without_counters"]
        if missing:
            text += (
                f"; {len(missing)} kernels have no counters ({100 * (1 - plain['known_share']):.0f} % of the time), "
                f"the first: {missing[0]['kernel'][:60]} grid {missing[0]['grid']} block {missing[0]['block']}"
            )
        return text

    @property
    def sentence(self) -> str:
        """Say the result beside the measurement in one sentence."""
        text = self.summary
        if self.same_stretch is None:
            return text + "; the trace does not say when it was taken, so it cannot be set beside the measurement."
        if self.same_stretch.power_w is None:
            return text + f"; the same stretch was not measured ({', '.join(self.same_stretch.flags)})."
        off = self.estimate.mean_w / self.same_stretch.power_w - 1.0
        return text + f"; measured {show(self.same_stretch.power_w, 'W')} over the same ({100 * off:+.1f} %)."

    def figure(self, run: MeasuredRun) -> Figure:
        """Draw the parts stacked over time, with measured power as dots."""
        from wattcast.counter_models.counter_figures import draw_launch_power

        dots = None
        if self.origin_s is not None:
            stepped = find_ticks(run.samples)
            middle_s = 0.5 * (stepped.time_s[:-1] + stepped.time_s[1:]) - self.origin_s
            inside = (middle_s >= 0.0) & (middle_s <= float(self.estimate.activity.duration_s.sum()))
            dots = (middle_s[inside], stepped.interval_w[inside])
        return draw_launch_power(self.estimate, dots)


def prepare_estimate(
    model: Path, counters: Path | None, trace: Path | None, gpu: str | None, command: list[str]
) -> PreparedEstimate:
    """Read the model and the counters; raise before the command runs where something is missing.

    Counters that are not there yet are collected: the command runs once more, under ncu.
    """
    if counters is None:
        raise bad_value("--model", "--counters FILE beside it", "none", "A counter book, or an export of ncu --csv.")
    if trace is None:
        raise bad_value("--model", "--launches FILE beside it", "none", "The profiler trace that the command writes.")
    sm_count: float | None = None
    if gpu is not None:
        sm_count = float(load_gpu(gpu).sm_count)
    saved = load_saved_model(model)
    if command and not counters.exists() and counters.suffix != ".json":
        make_collect_command(command, counters, list_ncu_metrics(saved.model.required_events))
    return PreparedEstimate(saved, read_counter_book(counters, sm_count), trace)


def estimate_offline(
    model: Path, counters: Path, trace: Path, gpu: str | None, clock_hz: float | None, memory_clock_hz: float | None
) -> tuple[LaunchEstimate, float]:
    """Estimate the power of a run from files alone; return it and the clock, by default that of counted cycles."""
    if is_database(counters):  # sampled over time, not per kernel
        known = load_saved_model(model).model
        start_s, activity = read_nsys_activity(counters, known.required_events, clock_hz, memory_clock_hz)
        found = PowerEstimate(start_s, activity, known.power(activity), np.ones(start_s.shape), ())
        return LaunchEstimate(found, None, None), float(np.mean(np.asarray(activity.at.clock_hz)))
    ready = prepare_estimate(model, counters, trace, gpu, [])
    log = read_launches(trace)
    found_hz = clock_hz or find_clock_hz(log.launches, ready.book)
    if found_hz is None:
        raise bad_value("--clock", "the core clock of the run", "none", "The counters hold no cycles of its kernels.")
    launches = [_from_zero(launch, log.span_s[0]) for launch in log.launches]
    at = OperatingPoint(clock_hz=found_hz, memory_clock_hz=memory_clock_hz)
    return LaunchEstimate(estimate_launch_power(launches, ready.book, ready.saved.model, at), None, None), found_hz


def estimate_power(prepared: PreparedEstimate, run: MeasuredRun) -> LaunchEstimate:
    """Estimate power from the trace that the command wrote, at the clocks that were measured."""
    log = read_launches(prepared.trace)
    first_s, last_s = log.span_s
    # the first launch on the sampler's clock; traces count from a Unix time
    now_s = None if log.epoch_s is None else log.epoch_s + first_s - (time.time() - time.monotonic())
    inside = now_s is not None and run.started_s <= now_s <= run.started_s + run.measurement.duration_s
    stretch = summarise_window("launches", run.samples, now_s, now_s + last_s - first_s) if inside and now_s else None
    clocks = stretch or run.measurement
    held = run.samples if stretch is None or now_s is None else run.samples.between(now_s, now_s + last_s - first_s)
    at = OperatingPoint(clock_hz=clocks.sm_clock_hz, memory_clock_hz=held.mean("memory_clock_hz"))
    launches = [_from_zero(launch, first_s) for launch in log.launches]
    found = estimate_launch_power(launches, prepared.book, prepared.saved.model, at)
    return LaunchEstimate(found, stretch, now_s if inside else None)


def _from_zero(launch: KernelLaunch, first_s: float) -> KernelLaunch:
    return replace(launch, start_s=launch.start_s - first_s)


ROUNDS = 4  # rounds of the plan that candidates come from


def suggest_rows(
    count: int, gpu: str, database: str, tell: Callable[[str], None]
) -> tuple[list[RowSuggestion], list[OperatorSpec]]:
    """Return the rows worth most that are not in the database yet, and how the campaign runs each."""
    chip = hardware.load_gpu(gpu)
    rows, bundle = _measured(gpu, database, tell), bundle_for(chip)
    measured = set(rows.spec)
    known: dict[str, OperatorSpec] = {}
    candidates: list[RowCandidate] = []
    shares, left_out = _operators_of_models(gpu, tell)
    spread = (
        replace(spec, chosen="suggested") for round_ in range(1, ROUNDS + 1) for spec in read_kernel_plan(round_)
    )
    for spec, share, source in [*shares, *((spec, 0.0, "plan") for spec in spread)]:
        fits = spec.guessed_s <= LONGEST_S and spec.byte <= LARGEST_BYTE
        if spec.id not in measured and spec.id not in known and fits:
            known[spec.id] = spec
            told = RunCondition(spec.layout, spec.rotated, str(spec.detail.get("backend", "")))
            candidates.append(RowCandidate(make_workload_form(spec.operator), told, share, source))
    tell(f"{len(candidates)} candidates; {left_out:.1%} of the models' time is in operators no row can stand for")
    found = suggest(candidates, count, rows, chip, bundle)
    place = {id(candidate): spec for candidate, spec in zip(candidates, known.values(), strict=True)}
    return found, [place[id(suggestion.candidate)] for suggestion in found]


def _measured(gpu: str, database: str, tell: Callable[[str], None]) -> KernelRows:
    """Return the rows so far; none for a GPU without a database where none is named."""
    try:
        return kernel_rows.load_kernel_rows(database)
    except WattcastError:
        if database != gpu:
            raise
        tell(f"no database of the {gpu} was named or ships: as if nothing was measured")
        known = kernel_rows.load_kernel_rows(forecast_rule().parent)
        return known.select_rows(np.zeros(len(known), dtype=bool))


def write_suggestions(out: Path, found: list[RowSuggestion], specs: list[OperatorSpec]) -> Path:
    """Write the list for ``lab kernels --plan``."""
    path = out / "plan.jsonl"
    write_listed(
        path, [(s, {"why": f.candidate.source, "score": f.score}) for s, f in zip(specs, found, strict=True)]
    )
    return path


def _operators_of_models(
    gpu: str, tell: Callable[[str], None]
) -> tuple[list[tuple[OperatorSpec, float, str]], float]:
    """Return operators of catalogue models with their share of time, and the share that cannot be measured."""
    shares: dict[str, float] = {}
    specs: dict[str, tuple[OperatorSpec, str]] = {}
    found = list_model_operators(gpu, tell)
    lost = 0.0
    for item in found:
        plain = operator_to_plain(item.op)
        spec = spec_from_operator({name: str(v) if isinstance(v, str) else v for name, v in plain.items()})
        if spec is None:
            lost += item.share
            continue
        spec = replace(spec, chosen="models")
        shares[spec.id] = shares.get(spec.id, 0.0) + item.share
        specs.setdefault(spec.id, (spec, item.run))
    listed = [(spec, shares[key], source) for key, (spec, source) in specs.items()]
    return listed, lost / max(sum(item.share for item in found), 1e-30)
