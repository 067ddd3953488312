"""The verbs of ``measure``: one function each, whose signature is its options on both command
lines.

``python -m wattcast.measure`` (the standard library's parser, for a bare GPU node) and ``wattcast
measure`` and ``wattcast lab`` (typer) build their options from these signatures, so that names,
defaults and help are the same. No verb changes a clock, a limit or a mode of a card."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from wattcast.core.errors import CannotWrite, ExitCode, bad_value
from wattcast.core.records import asdict, dataclass
from wattcast.core.units import parse, parse_seconds
from wattcast.core.whole_files import check_writable, hold_folder, write_whole


@dataclass(frozen=True)
class Option:
    """Describe one parameter of a verb on a command line."""

    help: str
    name: str = ""  # on the command line, where it is not the parameter's own
    hidden: bool = False
    positional: bool = False


@dataclass(frozen=True)
class VerbResult:
    """Hold what a verb prints: ``plain`` with ``--json`` or where there is no ``text``; ``note``
    goes to stderr.
    """

    plain: Any = None
    text: str | None = None
    note: str = ""
    exit_code: int = 0


Verb = Callable[..., VerbResult]
Out = Annotated[Path, Option("Folder for JSON Lines; a re-run continues there.")]
Budget = Annotated[str, Option("Stop in time, such as 240s.")]
Few = Annotated[int, Option("Only so many rows, or operators of each family: a smoke test.")]
Source = Annotated[str, Option("auto|nvml|amd|rapl: where readings come from.")]
Device = Annotated[int, Option("Which device, counted from 0.")]
Target = Annotated[bool, Option("The process that runs under ncu.", hidden=True)]


def list_options(verb: Verb) -> Iterator[tuple[inspect.Parameter, Any, Option]]:
    """Yield each parameter of a verb with its type and its description."""
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        kind, option = get_args(parameter.annotation)
        yield parameter, kind, option


def run(
    command: Annotated[list[str], Option("The command, after --.")],
    source: Source = "auto",
    device: Device = 0,
    plot: Annotated[Path | None, Option("Save power over time (.png, .svg, .pdf).")] = None,
    json: Annotated[bool, Option("Print JSON; the command's output goes to stderr.")] = False,
) -> VerbResult:
    """Measure time, joules, mean and peak watts and clock of a command; its exit code passes
    through.
    """
    from wattcast.measure.measured_run import (
        check_figure_path,
        draw_run_power,
        run_command,
        save_run_figure,
    )

    if plot:
        check_figure_path(plot)
    done = run_command(
        command[1:] if command[:1] == ["--"] else command, source, device, pass_output=not json
    )
    code, note = done.shell_code, ""
    if plot:
        try:
            save_run_figure(draw_run_power(done), plot)
        except CannotWrite as error:
            code, note = code or error.exit_code, f"{error}\n"
    took = f"the sampler took {100 * (done.measurement.overhead or 0.0):.2f} % of the processors"
    return VerbResult(
        done.plain(), "", note + ("" if json else f"{done.measurement.sentence}\n{took}"), code
    )


def idle(
    seconds: Annotated[str, Option("How long to watch, such as 3 or 1min.")] = "3",
    source: Source = "auto",
    device: Device = 0,
) -> VerbResult:
    """Measure power with nothing to do, at the clock the device rests at."""
    from wattcast.measure.measured_run import measure_idle

    result, identity = measure_idle(parse_seconds(seconds, "--seconds"), source, device)
    return VerbResult({"device": identity.name} | result.plain(), result.sentence)


def sensor(
    out: Annotated[Path | None, Option("Folder for what was found and its samples.")] = None,
    source: Source = "auto",
    device: Device = 0,
) -> VerbResult:
    """Find update period and averaging window of the power sensor, and what they imply."""
    import json

    from wattcast.measure.sampler import probe_sensor

    code, note = 0, ""
    if out:
        check_writable(out / "sensor.json")
    found, samples = probe_sensor(source, device)
    try:
        if out:
            samples.save(out / "sensor_samples.npz")
            write_whole(out / "sensor.json", json.dumps(found.plain(), indent=1).encode())
    except CannotWrite as error:
        code, note = error.exit_code, str(error)
    return VerbResult(found.plain(), "\n".join(found.implies), note, code)


def kernels(
    out: Out,
    steps: Annotated[
        str,
        Option(
            "Some of idle, burst, repeat-burst, sustained, repeat-sustained, duty, pattern, clock, names."
        ),
    ] = "",
    budget: Budget = "540s",
    plan: Annotated[
        Path | None, Option("Operators in place of the plan, one a line (from --suggest).")
    ] = None,
    round_: Annotated[int, Option("Of the plan, 1 to 4: each holds other operators.", "round")] = 1,
    few: Few = 0,
    after: Annotated[int, Option("Skip this many operators measured elsewhere.")] = 0,
) -> VerbResult:
    """Measure the operators of the plan: bursts, sustained, duty-cycled, data patterns, clocks,
    names.
    """
    from wattcast.measure.campaigns.kernel_campaign import (
        DEFAULT_STEPS,
        read_listed,
        run_kernel_campaign,
    )
    from wattcast.measure.campaigns.kernel_plan import read_kernel_plan

    began_s, budget_s = time.monotonic(), parse(budget, "s", "--budget")
    listed = read_listed(plan) if plan else None
    read_kernel_plan(round_)  # a round that is not planned is told before anything is started
    wanted = (steps or DEFAULT_STEPS).split(",")
    return _report_counts(
        run_kernel_campaign(out, wanted, budget_s, few, after, listed, round_), began_s
    )


def models(
    out: Out,
    budget: Budget = "420s",
    steps: Annotated[str, Option("Commas between: models, profile.")] = "models,profile",
    only: Annotated[str, Option("One model of the plan.")] = "",
    tier: Annotated[int, Option("One tier of the plan: what no other card has.")] = 0,
    few: Few = 0,
) -> VerbResult:
    """Measure whole models (random weights): time, power, energy and clock of one iteration each."""
    from wattcast.measure.campaigns.model_campaign import run_models

    began_s, budget_s = time.monotonic(), parse(budget, "s", "--budget")
    return _report_counts(
        run_models(out, budget_s, tuple(steps.split(",")), only, few, tier), began_s
    )


def engine(
    out: Out,
    budget: Budget = "540s",
    models: Annotated[
        str, Option("Planned models in this order, commas between; default: all.")
    ] = "",
    parts: Annotated[str, Option("Commas between: steps, traffic.")] = "steps,traffic",
    loads: Annotated[str, Option("Arrival rates as shares of the capacity.")] = "0.8,0.5,1.1",
    traffic_seconds: Annotated[
        str, Option("Arrivals of one serving run, such as 12 or 1min.")
    ] = "12",
    done: Annotated[Path | None, Option("Folder of an earlier call: not measured again.")] = None,
    own: Annotated[Path | None, Option("Folder with a config.json in place of the plan.")] = None,
    quantization: Annotated[str, Option("With --own: fp8, for example.")] = "",
    kv_dtype: Annotated[str, Option("With --own: fp8, for example.")] = "auto",
    smoke: Annotated[bool, Option("A tiny model and a few rows: does everything work?")] = False,
    listed: Annotated[bool, Option("Name the planned models and the split.", "list")] = False,
) -> VerbResult:
    """Measure vLLM with random weights: single steps, and serving under arrivals.

    Example: wattcast measure engine --own ./my-model --out rows --budget 300s
    """
    from wattcast.core.measured_rows import read_lines
    from wattcast.measure.campaigns import engine_campaign

    if listed:
        planned = engine_campaign.choose_models()
        lines = [f"{m.name:26} {'held out' if m.held_out else 'fitted':9} {m.why}" for m in planned]
        return VerbResult(lines, "\n".join(lines))
    budget_s, traffic_s = (
        parse(budget, "s", "--budget"),
        parse_seconds(traffic_seconds, "--traffic-seconds"),
    )
    request = engine_campaign.request_campaign(
        out, budget_s, models, parts, loads, traffic_s, done, own, quantization, kv_dtype, smoke
    )
    with hold_folder(out):
        counts = dict(sorted(engine_campaign.run_engine_campaign(request).items()))
    rows = read_lines(out / "rows.jsonl", missing_ok=True)
    lines = [
        *map(engine_campaign.describe_row, rows),
        *(f"{name}: {count}" for name, count in counts.items()),
    ]
    code = ExitCode.FAILED if counts.get("models broken off") else ExitCode.OK
    return VerbResult(counts, "\n".join(lines), exit_code=code)


def counters(
    out: Annotated[Path | None, Option("Folder for the raw table.")] = None,
    budget: Budget = "150s",
    few: Few = 0,
    plan: Annotated[str, Option("Operators in place of the sample, a JSON object a line.")] = "",
    target: Target = False,
) -> VerbResult:
    """Collect hardware counters of a sample of operators, through ncu."""
    from wattcast.measure.campaigns import nsight_counters

    budget_s = parse(budget, "s", "--budget")
    if target:
        counted = nsight_counters.count_operators(budget_s, few, plan)
        return VerbResult(note=f"counted {counted} operators")
    if out is None:
        raise bad_value("--out", "a folder for the raw table", "none")
    with hold_folder(out):
        return VerbResult(nsight_counters.collect_counters(out, budget_s, few, plan))


def pack(
    folders: Annotated[list[Path], Option("Folders of campaigns.")],
    out: Annotated[Path, Option("Folder of the database.")],
) -> VerbResult:
    """Pack the JSON Lines of campaigns into the tables of a database."""
    from wattcast.measure.database_files import pack_database

    return VerbResult(pack_database(folders, out))


def summary(
    database: Annotated[
        str, Option("Folder of a database, or a GPU Wattcast ships one for.", positional=True)
    ] = "h200",
) -> VerbResult:
    """Summarise a database: rows by kind and family, kernels named, and repeatability."""
    from wattcast.core.measured_rows import database_folder
    from wattcast.measure.database_files import make_summary_page, summarise_database

    found = summarise_database(
        Path(database) if Path(database).exists() else database_folder(database)
    )
    return VerbResult(found, make_summary_page(found).removesuffix("\n"))


def log(
    file: Annotated[
        Path,
        Option(
            "Log of nvidia-smi, dcgmi, amd-smi, tegrastats or jtop, or CSV of a meter.",
            positional=True,
        ),
    ],
    interval: Annotated[
        str, Option("Time between lines, such as 100ms; for lines without a time of their own.")
    ] = "",
    time_format: Annotated[
        str, Option("How times are written: s, ms, us, ns, or such as '%d/%m/%Y %H:%M:%S'.")
    ] = "",
    start: Annotated[str, Option("Leave out what came before this time.", "from")] = "",
    end: Annotated[str, Option("Leave out what came after this time.", "to")] = "",
) -> VerbResult:
    """Read mean and largest watts and joules of each rail from a log that another tool wrote.

    A time or a value that cannot be read is refused with its line. A log with gaps, repeated times
    or impossible readings is summed up without these, with a flag that names them, and exits with
    5."""
    from wattcast.measure.power_logs import read_power_log

    interval_s = parse(interval, "s", "--interval") if interval else None
    start_s = parse(start, "s", "--from") if start else 0.0
    end_s = parse(end, "s", "--to") if end else float("inf")
    power_log = read_power_log(file, interval_s, time_format)
    rails = power_log.summarise(start_s, end_s)
    lines = []
    for name, rail in rails.items():
        flags = f" [{'; '.join(rail.flags)}]" if rail.flags else ""
        lines.append(
            f"{name}: {rail.power_w:.4g} W, at most {rail.largest_w:.4g} W, "
            f"{rail.energy_j:.4g} J in {rail.duration_s:.4g} s{flags}"
        )
    is_doubtful = any(rail.flags for rail in rails.values())
    plain = {"form": power_log.form, "rails": {name: asdict(rail) for name, rail in rails.items()}}
    return VerbResult(
        plain,
        "\n".join(lines),
        note=f"{file.name}: {power_log.form}",
        exit_code=ExitCode.REFUSED if is_doubtful else ExitCode.OK,
    )


VERBS: tuple[Verb, ...] = (run, idle, sensor, kernels, models, counters, engine, pack, summary, log)


def _report_counts(counts: Mapping[str, int], began_s: float) -> VerbResult:
    plain = {**dict(sorted(counts.items())), "seconds": round(time.monotonic() - began_s, 1)}
    return VerbResult(plain, "\n".join(f"{name}: {count}" for name, count in plain.items()))
