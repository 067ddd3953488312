"""The verbs of campaigns: one function each, whose signature is its options on both command lines.

``python -m wattcast.lab`` (the standard library's parser, for a bare GPU node) and ``wattcast lab``
and ``wattcast measure`` (typer) build their options from these signatures. No verb changes a clock,
a limit or a mode of a card."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from wattcast.core.errors import ExitCode, bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse, parse_seconds
from wattcast.core.whole_files import hold_folder
from wattcast.measure.measure_verbs import Verb, VerbResult

Out = Annotated[Path, Option("Folder for JSON Lines; a re-run continues there.")]


Budget = Annotated[str, Option("Stop in time, such as 240s.")]


Few = Annotated[
    int, Option("Measure only so many rows, or operators of each family: a smoke test.")
]


Target = Annotated[bool, Option("The process that runs under ncu.", hidden=True)]


def kernels(
    out: Out,
    steps: Annotated[
        str,
        Option(
            "Some of idle, burst, repeat-burst, sustained, repeat-sustained, duty, "
            "pattern, clock, names."
        ),
    ] = "",
    budget: Budget = "540s",
    plan: Annotated[
        Path | None, Option("Operators in place of the plan, one a line (from --suggest).")
    ] = None,
    round_: Annotated[
        int, Option("Round of the plan, 1 to 4: each has other operators.", "round")
    ] = 1,
    few: Few = 0,
    after: Annotated[int, Option("Skip this many operators measured elsewhere.")] = 0,
) -> VerbResult:
    """Measure the operators of the plan: bursts, sustained, duty-cycled, data patterns, clocks,
    names.
    """
    from wattcast.lab.campaigns.kernel_campaign import (
        DEFAULT_STEPS,
        read_listed,
        run_kernel_campaign,
    )
    from wattcast.lab.campaigns.kernel_plan import read_kernel_plan

    began_s = time.monotonic()
    budget_s = parse(budget, "s", "--budget")
    listed = read_listed(plan) if plan else None
    read_kernel_plan(round_)  # a round that is not planned is told before anything is started
    step_names = (steps or DEFAULT_STEPS).split(",")
    return _report_counts(
        run_kernel_campaign(
            out,
            step_names,
            budget_s,
            few,
            after,
            listed,
            round_,
        ),
        began_s,
    )


def models(
    out: Out,
    budget: Budget = "420s",
    steps: Annotated[str, Option("Steps to run, with commas: models, profile.")] = "models,profile",
    only: Annotated[str, Option("One model of the plan.")] = "",
    tier: Annotated[int, Option("One tier of the plan: what no other card has.")] = 0,
    few: Few = 0,
) -> VerbResult:
    """Measure whole models (random weights): time, power, energy and clock of one iteration
    each.
    """
    from wattcast.lab.campaigns.model_campaign import run_models

    began_s = time.monotonic()
    budget_s = parse(budget, "s", "--budget")
    return _report_counts(
        run_models(
            out,
            budget_s,
            tuple(steps.split(",")),
            only,
            few,
            tier,
        ),
        began_s,
    )


def engine(
    out: Out,
    budget: Budget = "540s",
    models: Annotated[
        str,
        Option(
            "Planned models in this order, commas between (NAME:brief+talk: with parts of "
            "its own); default: all."
        ),
    ] = "",
    parts: Annotated[
        str,
        Option(
            "Commas between: steps, brief, sampling, long, traffic, load, or a load by its name."
        ),
    ] = "steps,traffic",
    loads: Annotated[str, Option("Arrival rates as shares of the capacity.")] = "0.8,0.5,1.1",
    traffic_seconds: Annotated[
        str, Option("Arrivals of one serving run, such as 12 or 1min.")
    ] = "12",
    done: Annotated[
        Path | None, Option("Folder of an earlier call, whose rows are not measured again.")
    ] = None,
    own: Annotated[Path | None, Option("Folder with a config.json in place of the plan.")] = None,
    quantization: Annotated[str, Option("With --own: fp8, for example.")] = "",
    kv_dtype: Annotated[str, Option("With --own: fp8, for example.")] = "auto",
    smoke: Annotated[
        bool, Option("Run a tiny model and a few rows, to see whether everything works.")
    ] = False,
    together: Annotated[
        int, Option("Number of engines that start at once; they are measured one by one.")
    ] = 1,
    cache_gib: Annotated[float, Option("Cache of each engine with --together.")] = 16.0,
    listed: Annotated[bool, Option("Name the planned models and the split.", "list")] = False,
) -> VerbResult:
    """Measure vLLM with random weights: single steps, and serving under arrivals.

    Example: wattcast measure engine --own ./my-model --out rows --budget 300s
    """
    from wattcast.core.row_journals import read_lines
    from wattcast.lab.campaigns import engine_campaign

    if listed:
        planned = engine_campaign.choose_models()
        lines = [f"{m.name:26} {'held out' if m.held_out else 'fitted':9} {m.why}" for m in planned]
        return VerbResult(lines, "\n".join(lines))
    options = engine_campaign.EngineCampaignOptions(
        out=out,
        seconds=parse(budget, "s", "--budget"),
        models=models,
        parts=parts,
        loads=loads,
        traffic_seconds=parse_seconds(traffic_seconds, "--traffic-seconds"),
        done=done,
        own=own,
        quantization=quantization,
        kv_dtype=kv_dtype,
        smoke=smoke,
        together=together,
        cache_gib=cache_gib,
    )
    request = options.to_request()
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
    from wattcast.lab.campaigns import nsight_counters

    budget_s = parse(budget, "s", "--budget")
    if target:
        counted = nsight_counters.count_operators(budget_s, few, plan)
        return VerbResult(note=f"counted {counted} operators")
    if out is None:
        raise bad_value("--out", "a folder for the raw table", "none")
    with hold_folder(out):
        return VerbResult(nsight_counters.collect_counters(out, budget_s, few, plan))


def kit(
    out: Annotated[Path, Option("File to write, such as h100.kit.json.gz.", positional=True)],
    budget: Annotated[str, Option("Stop in time, such as 15min.")] = "900s",
    few: Few = 0,
) -> VerbResult:
    """Measure this card for a quarter of an hour without privileges, and write one file.

    `wattcast calibrate` takes the file as a table of the card.

    Example: wattcast lab kit mine.kit.json.gz
    """
    from wattcast.calibrate.kit_files import KIT_SUFFIX, is_kit
    from wattcast.lab.campaigns import card_kit

    if not is_kit(out):
        raise bad_value("OUT", f"a name that ends in {KIT_SUFFIX}", out.name)
    began_s = time.monotonic()
    return _report_counts(card_kit.measure_card(out, parse(budget, "s", "--budget"), few), began_s)


def pack(
    folders: Annotated[list[Path], Option("Folders of campaigns.", positional=True)],
    out: Annotated[Path, Option("Folder of the database.")],
) -> VerbResult:
    """Pack the JSON Lines of campaigns into the tables of a database."""
    from wattcast.lab.campaigns.database_files import pack_database

    return VerbResult(pack_database(folders, out))


def summary(
    database: Annotated[
        str, Option("Folder of a database, or a GPU Wattcast ships one for.", positional=True)
    ] = "h200",
) -> VerbResult:
    """Summarise a database: rows by kind and family, kernels named, and repeatability."""
    from wattcast.core.row_tables import database_folder
    from wattcast.lab.campaigns.database_files import make_summary_page, summarise_database

    contents = summarise_database(
        Path(database) if Path(database).exists() else database_folder(database)
    )
    return VerbResult(contents, make_summary_page(contents).removesuffix("\n"))


def _report_counts(counts: Mapping[str, int], began_s: float) -> VerbResult:
    plain = {**dict(sorted(counts.items())), "seconds": round(time.monotonic() - began_s, 1)}
    return VerbResult(plain, "\n".join(f"{name}: {count}" for name, count in plain.items()))


VERBS: tuple[Verb, ...] = (kernels, models, counters, engine, kit, pack, summary)
