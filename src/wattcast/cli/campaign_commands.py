"""Campaigns that measure many rows, their databases, and watts estimated from launches and
counters.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from rich.console import Console

from wattcast.cli.command_builder import (
    PLOT,
    command,
    declare_verb,
)
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.core.errors import ExitCode, bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse, show
from wattcast.lab.campaigns import campaign_verbs
from wattcast.report.text_tables import new_table

if TYPE_CHECKING:
    from wattcast.lab.counter_models.apply_model import AppliedModel


@command("lab apply", PLOT)
def apply(
    source: Annotated[
        Path, Option("Counters: a CSV or Parquet table, a DCGM log, ncu's export.", positional=True)
    ],
    model: Annotated[Path, Option("Power model of `lab fit counters --out`, or h200 or tegra-k1.")],
    form: Annotated[
        str, Option("table (with --columns)|dcgm|ncu.", choices=("table", "dcgm", "ncu"))
    ] = "table",
    columns: Annotated[
        Path | None,
        Option("YAML map of a table's columns, or the name of one that ships, such as h200."),
    ] = None,
    memory_clock: Annotated[
        str | None, Option("With --form ncu: the memory clock, where the model needs it.")
    ] = None,
    gpu: Annotated[
        str | None, Option("With --form ncu: the device, for models that need its number of SMs.")
    ] = None,
) -> CommandOutput:
    """Apply a saved counter model to counters of other work: watts of every row, beside measured
    ones where the source has them.

    Examples: wattcast lab fit counters dcgm.log --form dcgm --out mine.yaml; wattcast lab apply
    tomorrow.log --model mine.yaml --form dcgm --plot watts.png
    ... lab apply kernels.csv --model h200 --form ncu --memory-clock 3201MHz
    """
    from wattcast.lab.counter_models.apply_model import (
        AppliedModel,
        apply_model,
        draw_applied,
    )
    from wattcast.predictor.api import find_gpu

    memory_hz = None if memory_clock is None else parse(memory_clock, "Hz", "--memory-clock")
    sm_count = None if gpu is None else float(find_gpu(gpu).sm_count)
    applied = apply_model(
        model,
        source,
        form,
        columns=columns,
        memory_clock_hz=memory_hz,
        sm_count=sm_count,
    )
    return CommandOutput.of(applied, AppliedModel.to_plain, _print_applied, draw_applied)


_MOST_APPLIED_ROWS = 30


def _print_applied(console: Console, applied: AppliedModel) -> None:
    shown = min(len(applied.names), _MOST_APPLIED_ROWS)
    table = new_table(
        "row",
        "time",
        "power",
        "measured",
        title=applied.source,
        left=["row"],
    )
    for place in range(shown):
        measured = "-"
        if applied.measured_w is not None:
            measured = show(float(applied.measured_w[place]), "W")
        table.add_row(
            applied.names[place][:60],
            show(float(applied.duration_s[place]), "s"),
            show(float(applied.predicted_w[place]), "W"),
            measured,
        )
    console.print(table)
    text = f"{len(applied.names)} rows, mean {show(applied.mean_w, 'W')}"
    if applied.error_percent is not None:
        text += f", {applied.error_percent:.1f} % off what was measured"
    console.print(text)


@command("lab estimate", PLOT)
def estimate(
    launches: Annotated[
        Path,
        Option("Trace of PyTorch's profiler, or of nsys export --type sqlite.", positional=True),
    ],
    model: Annotated[Path, Option("Power model of `lab fit counters --out`, or h200 or tegra-k1.")],
    counters: Annotated[
        Path,
        Option(
            "Counters: a book (.json), ncu's .csv or .ncu-rep, nvprof's .csv, or GPU "
            "metrics in nsys's .sqlite."
        ),
    ],
    clock: Annotated[
        str | None, Option("Core clock; default: counted cycles over the trace's time.")
    ] = None,
    memory_clock: Annotated[str | None, Option("Memory clock, where the model needs it.")] = None,
    gpu: Annotated[
        str | None, Option("The device, for models that need its number of SMs.")
    ] = None,
) -> CommandOutput:
    """Estimate the watts of a run that is over from its kernel launches and counters of each
    kernel.

    Example: wattcast lab estimate run.sqlite --model h200 --counters kernels.ncu-rep --memory-clock
    3201MHz Example: wattcast lab estimate run.sqlite --model dcgm.yaml --counters run.sqlite
    --memory-clock 3201MHz"""
    from wattcast.cli.measure_bridges import estimate_offline

    clocks = [
        parse(c, "Hz", n) if c else None
        for c, n in ((clock, "--clock"), (memory_clock, "--memory-clock"))
    ]
    power_estimate, clock_hz = estimate_offline(
        model,
        counters,
        launches,
        gpu,
        clocks[0],
        clocks[1],
    )
    plain = power_estimate.plain() | {"clock_hz": clock_hz}
    parts = ", ".join(
        f"{name} {show(watts, 'W')}" for name, watts in plain["part_w"].items() if watts
    )
    return CommandOutput(
        plain,
        f"{power_estimate.summary}, at {show(clock_hz, 'Hz')}: {parts}",
        figures=lambda: {"figure": power_estimate.figure},
        exit_code=ExitCode.PARTIAL if power_estimate.is_lower_bound else ExitCode.OK,
    )


@command("lab kernels", campaign_verbs.kernels)
def kernels(
    env: Environment,
    suggest: Annotated[
        int,
        Option(
            "Measure nothing: write the N rows that would help most to OUT/plan.jsonl.", least=0
        ),
    ] = 0,
    gpu: Annotated[str, Option("With --suggest: the GPU to be predicted.")] = "h200",
    database: Annotated[
        str, Option("With --suggest: the rows measured so far; default: the GPU's.")
    ] = "",
    **options: Any,
) -> CommandOutput:
    """Measure the operators of the plan: bursts, sustained, duty-cycled, data patterns, clocks,
    names.
    """
    if suggest:
        return _write_suggestions(
            env,
            suggest,
            gpu,
            database or gpu,
            options["out"],
        )
    return CommandOutput.from_verb(campaign_verbs.kernels(**options))


def _write_suggestions(
    env: Environment,
    count: int,
    gpu: str,
    database: str,
    out: Path,
) -> CommandOutput:
    """Write the rows that would help most as a list for --plan, and say why each would."""
    from wattcast.cli.measure_bridges import suggest_rows
    from wattcast.lab.campaigns.kernel_campaign import write_listed

    suggestions, specs = suggest_rows(count, gpu, database, env.say)
    path = out / "plan.jsonl"
    reasons = [{"why": f.candidate.source, "score": f.score} for f in suggestions]
    write_listed(path, list(zip(specs, reasons, strict=True)))
    env.say(
        f"saved: {path}; measure it with `python -m wattcast.lab kernels --plan {path} --out DIR`"
    )
    pairs = list(zip(suggestions, specs, strict=True))
    entries = []
    for (f, s), reason in zip(pairs, reasons, strict=True):
        distance = f.distance if f.distance < 1e9 else None
        entries.append(
            {
                "operator": s.operator,
                "family": s.family,
                **reason,
                "distance": distance,
            }
        )
    real = sum(f.candidate.share > 0 for f in suggestions)
    summary = (
        f"{real} of {len(suggestions)} are operators of real models, {len(suggestions) - real} of "
        "the plan's own shapes"
    )

    def print_text(console: Console) -> None:
        rows = new_table("operator", "why", "doublings from a measured row", "worth")
        for f, s in pairs:
            sizes = " ".join(
                f"{k}={v}" for k, v in s.operator.items() if k not in ("op", "function", "bias")
            )
            away = "none of its kind" if f.distance > 1e9 else f"{f.distance:.1f}"
            name = s.operator.get("function", s.operator["op"])
            rows.add_row(f"{name} {sizes}", f.candidate.source, away, f"{1e3 * f.score:.3g}")
        console.print(rows)
        env.stdout.write(f"{summary}\n")

    return CommandOutput({"suggestions": entries, "from_models": real}, print_text)


@command("lab pack-engine")
def pack_engine(
    env: Environment,
    folders: Annotated[list[Path], Option("Folders of `measure engine`.", positional=True)],
    out: Annotated[Path, Option("Folder of the tables; what they hold is kept.")],
) -> None:
    """Pack steps, requests and serving runs of an engine into tables that `lab validate` reads."""
    from wattcast.lab.fit.engine_records import pack_engine_folders

    records = pack_engine_folders(folders, out)
    runs = len(records.select_kind("traffic"))
    env.stdout.write(
        f"{out}: {len(records.rows)} rows, {runs} serving runs, {len(records.requests)} requests\n"
    )


@command("lab counters", campaign_verbs.counters)
def counters(
    design: Annotated[
        str | None,
        Option(
            "Instead name the fewest counters that identify a power model, by a"
            " GPU's table or a file."
        ),
    ] = None,
    columns: Annotated[Path | None, Option("With --design FILE: YAML map of its columns.")] = None,
    **options: Any,
) -> CommandOutput:
    """Collect hardware counters of a sample of operators, through ncu; or say which a power model
    needs.

    Examples: wattcast lab counters --out rows;  wattcast lab counters --design h200
    """
    if design is None:
        if columns is not None:
            raise bad_value("--columns", "--design FILE as well", "none")
        return CommandOutput.from_verb(campaign_verbs.counters(**options))
    from wattcast.lab.counter_models.counter_design import design_counters
    from wattcast.lab.counter_models.counter_table import read_counter_table
    from wattcast.lab.counter_models.rails_apart import read_shipped_table
    from wattcast.predictor.api import find_gpu

    if Path(design).is_file() and columns is None:
        raise bad_value(
            "--columns",
            "a YAML map of the table's columns",
            "none",
            "Give the map that `lab fit counters` takes.",
        )
    rows = (
        read_counter_table(Path(design), columns)
        if columns
        else read_shipped_table(find_gpu(design).name)
    )
    counter_design = design_counters(rows)
    expected = counter_design.steps[counter_design.enough - 1].error
    title = (
        f"{counter_design.table}: {', '.join(counter_design.always)} always"
        if counter_design.always
        else counter_design.table
    )
    table = new_table(
        "",
        "event",
        "metrics",
        "error, held out",
        "never trained on",
        title=title,
    )
    for n, step in enumerate(counter_design.steps, 1):
        error = f"{step.error:.1f} ± {step.standard_error:.1f} %"
        tested = "-" if step.tested is None else f"{step.tested:.1f} %"
        table.add_row(
            f"{n} *" if n == counter_design.enough else str(n),
            step.event,
            str(step.metrics),
            error,
            tested,
        )
    last = f"* enough: {len(counter_design.events)} events in all, expected error {expected:.1f} %"
    plain = {"events": counter_design.events, "expected_error_percent": expected} | asdict(
        counter_design
    )
    return CommandOutput(plain, lambda console: console.print(table, last, sep="\n"))


declare_verb("lab kit", campaign_verbs.kit)
declare_verb("lab pack", campaign_verbs.pack)
declare_verb("lab summary", campaign_verbs.summary)
