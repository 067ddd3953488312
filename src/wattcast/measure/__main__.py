"""Run ``python -m wattcast.measure`` on a bare GPU node, with the standard library's argument parser.

No command changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from wattcast.core.errors import ExitCode, WattcastError, bad_value
from wattcast.core.units import parse

if TYPE_CHECKING:
    from wattcast.microbench.microbench_sessions import MicrobenchRequest


def main(arguments: list[str] | None = None) -> int:
    """Parse, call one library function, print; errors are one paragraph on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.call(options))
    except WattcastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wattcast.measure", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run = verbs.add_parser("run", help="time, joules and watts of a command: run [options] -- COMMAND")
    run.add_argument("--json", action="store_true")
    run.add_argument("--plot", type=Path, metavar="FILE", help="save power over time (.png, .svg, .pdf)")
    _source(run)
    run.add_argument("command", nargs=argparse.REMAINDER)
    run.set_defaults(call=_run)
    idle = verbs.add_parser("idle", help="power with nothing to do")
    idle.add_argument("--seconds", type=float, default=3.0)
    idle.add_argument("--json", action="store_true")
    _source(idle)
    idle.set_defaults(call=_idle)
    sensor = verbs.add_parser("sensor", help="update period and averaging window of the power sensor")
    sensor.add_argument("--out", type=Path)
    sensor.add_argument("--json", action="store_true")
    _source(sensor)
    sensor.set_defaults(call=_sensor)
    kernels = verbs.add_parser("kernels", help="measure operators of the plan into --out")
    kernels.add_argument("--out", type=Path, required=True)
    kernels.add_argument(
        "--steps",
        default="",
        help="commas between: idle, burst, repeat-burst, sustained, repeat-sustained, duty, pattern, clock, names "
        "(these by default), chain, stack",
    )
    kernels.add_argument("--budget", default="540s")
    kernels.add_argument("--few", type=int, default=0, help="only this many operators per family: a smoke test")
    kernels.add_argument("--after", type=int, default=0, help="skip this many operators measured elsewhere")
    kernels.add_argument(
        "--plan",
        type=Path,
        help="operators in place of the plan, a JSON object a line; or: training, chains, common, common-sustained",
    )
    kernels.add_argument("--round", type=int, default=1, help="of the plan: each holds other operators")
    kernels.set_defaults(call=_kernels)
    models = verbs.add_parser("models", help="measure whole models of the plan into --out: a test set")
    models.add_argument("--out", type=Path, required=True)
    models.add_argument("--budget", default="420s")
    models.add_argument("--steps", default="models,profile")
    models.add_argument("--only", default="", help="one model of the plan")
    models.add_argument("--tier", type=int, default=0, help="one tier of the plan: what no other card has")
    models.add_argument("--few", type=int, default=0, help="only so many rows: a smoke test")
    models.set_defaults(call=_models)
    counters = verbs.add_parser("counters", help="hardware counters of a sample, through ncu")
    counters.add_argument("--out", type=Path, required=True)
    counters.add_argument("--budget", default="150s")
    counters.add_argument("--few", type=int, default=0)
    counters.add_argument("--plan", default="", help="operators in place of the sample, a JSON object a line")
    counters.add_argument("--target", action="store_true", help="the part that runs under ncu")
    counters.set_defaults(call=_counters)
    _micro(verbs.add_parser("microbench", help="time, power and energy of every unit of the GPU"), _microbench)
    _micro(verbs.add_parser("multimedia", help="rotation, motion search, DCT and debarreling of a clip"), _multimedia)
    _engine_options(verbs.add_parser("engine", help="steps and serving of vLLM with dummy weights into --out"))
    pack = verbs.add_parser("pack", help="JSON Lines of campaigns into the tables of a database")
    pack.add_argument("folders", nargs="+", type=Path)
    pack.add_argument("--out", type=Path, required=True)
    pack.set_defaults(call=_pack)
    summary = verbs.add_parser("summary", help="rows by kind and family, and repeatability")
    summary.add_argument("database", type=Path)
    summary.add_argument("--json", action="store_true")
    summary.set_defaults(call=_summary)
    load = verbs.add_parser("load", help="loads of known power, to check one way of measuring by another")
    load.add_argument("--seconds", type=float, default=4.0)
    load.add_argument("--agree", action="store_true", help="measure them by campaign, window and run")
    load.add_argument("--out", type=Path)
    load.add_argument("--marks", type=Path, help="write begin and end of each load here")
    load.set_defaults(call=_load)
    return parser


def _micro(parser: argparse.ArgumentParser, call: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--out", type=Path, help="folder for rows; a re-run continues there")
    parser.add_argument("--budget", default="480s", help="stop in time")
    parser.add_argument("--only", default="", help="names, groups or curves, comma-separated")
    parser.add_argument("--repeats", type=int, default=1, help="rounds; 2 measures everything a second time")
    parser.add_argument("--from", dest="before", type=Path, help="folder with rows measured before, to go on from")
    parser.add_argument("--list", action="store_true", help="name the benchmarks")
    parser.add_argument("--counters", action="store_true", help="hardware counters through ncu instead")
    parser.add_argument("--quick", action="store_true", help="shorter windows: a smoke test")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--since", default="", help=argparse.SUPPRESS)
    parser.add_argument("--frames", type=int, default=80, help="frames of the clip (multimedia)")
    parser.set_defaults(call=call)


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for rows; a re-run continues there")
    parser.add_argument("--seconds", type=float, default=540.0, help="time for everything; it ends itself inside")
    parser.add_argument("--models", default="", help="planned models in this order, commas between; by default all")
    parser.add_argument("--parts", default="steps,traffic", help="commas between; by default %(default)s")
    parser.add_argument("--loads", default="0.8,0.5,1.1", help="arrivals, shares of capacity; by default %(default)s")
    parser.add_argument("--traffic-seconds", type=float, default=12.0, help="arrivals of one serving run")
    parser.add_argument("--done", type=Path, help="folder of an earlier call: its rows are not measured again")
    parser.add_argument("--own", type=Path, help="folder with a config.json in place of the planned models")
    parser.add_argument("--quantization", default="", help="with --own: fp8, for example")
    parser.add_argument("--kv-dtype", default="auto", help="with --own: fp8, for example")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few rows: does everything work?")
    parser.add_argument("--list", action="store_true", help="name the planned models and the split")
    parser.set_defaults(call=_engine)


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default="auto", help="auto, nvml, amd or rapl")
    parser.add_argument("--device", type=int, default=0)


def _run(options: argparse.Namespace) -> int:
    from wattcast.measure.measured_run import run_command

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.plot:
        from wattcast.measure.measured_run import check_figure_path

        check_figure_path(options.plot)
    run = run_command(command, options.source, options.device, pass_output=not options.json)
    if options.plot:
        from wattcast.measure.measured_run import draw_run_power, save_run_figure

        save_run_figure(draw_run_power(run), options.plot)
    if options.json:
        print(json.dumps(run.plain()))
    else:
        print(run.measurement.sentence, file=sys.stderr)
        overhead = run.measurement.overhead or 0.0
        print(f"the sampler took {100 * overhead:.2f} % of the processors", file=sys.stderr)
    return run.exit_code


def _idle(options: argparse.Namespace) -> int:
    from wattcast.measure.measured_run import measure_idle

    result, identity = measure_idle(options.seconds, options.source, options.device)
    print(json.dumps({"device": identity.name, **result.plain()}) if options.json else result.sentence)
    return int(ExitCode.OK)


def _sensor(options: argparse.Namespace) -> int:
    from wattcast.measure.measuring_checks import probe_sensor

    sensor, samples = probe_sensor(options.source, options.device)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        samples.save(options.out / "sensor_samples.npz")
        (options.out / "sensor.json").write_text(json.dumps(sensor.plain(), indent=1))
    print(json.dumps(sensor.plain(), indent=1) if options.json else "\n".join(sensor.implies))
    return int(ExitCode.OK)


def _kernels(options: argparse.Namespace) -> int:
    from wattcast.measure.campaigns.kernel_campaign import DEFAULT_STEPS, read_listed, run_kernel_campaign

    began_s = time.monotonic()
    budget_s = parse(options.budget, "s", "--budget")
    listed = read_listed(options.plan) if options.plan else None
    if options.round < 1:
        raise bad_value("--round", "1 or more", options.round)
    counts = run_kernel_campaign(
        options.out,
        (options.steps or DEFAULT_STEPS).split(","),
        budget_s,
        options.few,
        options.after,
        listed,
        options.round,
    )
    print(json.dumps({**dict(sorted(counts.items())), "seconds": round(time.monotonic() - began_s, 1)}, indent=1))
    return int(ExitCode.OK)


def _models(options: argparse.Namespace) -> int:
    from wattcast.measure.campaigns.model_campaign import run_models

    began_s = time.monotonic()
    budget_s = parse(options.budget, "s", "--budget")
    steps = tuple(options.steps.split(","))
    counts = run_models(options.out, budget_s, steps, options.only, options.few, options.tier)
    print(json.dumps({**dict(sorted(counts.items())), "seconds": round(time.monotonic() - began_s, 1)}, indent=1))
    return int(ExitCode.OK)


def _counters(options: argparse.Namespace) -> int:
    from wattcast.measure.campaigns import nsight_counters

    budget_s = parse(options.budget, "s", "--budget")
    if options.target:
        print(
            f"counted {nsight_counters.count_operators(budget_s, options.few, options.plan)} operators",
            file=sys.stderr,
        )
        return int(ExitCode.OK)
    print(json.dumps(nsight_counters.collect_counters(options.out, budget_s, options.few, options.plan)))
    return int(ExitCode.OK)


def _microbench(options: argparse.Namespace) -> int:
    from wattcast.microbench import microbench_sessions

    return microbench_sessions.run_microbench(_request(options))


def _multimedia(options: argparse.Namespace) -> int:
    from wattcast.microbench import microbench_sessions

    return microbench_sessions.run_multimedia(_request(options))


def _request(options: argparse.Namespace) -> MicrobenchRequest:
    from wattcast.microbench.microbench_sessions import MicrobenchRequest

    return MicrobenchRequest(
        out=options.out,
        budget_s=parse(options.budget, "s", "--budget"),
        only=tuple(name for name in options.only.split(",") if name),
        repeats=options.repeats,
        before=options.before,
        listed=options.list,
        counters=options.counters,
        quick=options.quick,
        child=options.child,
        target=options.target,
        since=options.since,
        frames=options.frames,
    )


def _engine(options: argparse.Namespace) -> int:
    from wattcast.measure.engine import engine_campaign

    if options.list:
        print("\n".join(engine_campaign.list_models()))
        return int(ExitCode.OK)
    given = {name: value for name, value in vars(options).items() if name not in ("call", "list")}
    counts = engine_campaign.run_engine_campaign(engine_campaign.request_campaign(**given))
    print("\n".join(engine_campaign.describe_rows(options.out)))
    print(json.dumps(dict(sorted(counts.items())), indent=1))
    return int(ExitCode.OK)


def _pack(options: argparse.Namespace) -> int:
    from wattcast.measure.database_files import pack_database

    print(json.dumps(pack_database(options.folders, options.out)))
    return int(ExitCode.OK)


def _summary(options: argparse.Namespace) -> int:
    from wattcast.measure.database_files import make_summary_page, summarise_database

    found = summarise_database(options.database)
    print(json.dumps(found) if options.json else make_summary_page(found), end="\n" if options.json else "")
    return int(ExitCode.OK)


def _load(options: argparse.Namespace) -> int:
    from wattcast.measure import measuring_checks

    if not options.agree:
        measuring_checks.run_known_loads(options.seconds, options.marks)
        return int(ExitCode.OK)
    found = json.dumps(measuring_checks.compare_methods(), indent=1)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "agree.json").write_text(found)
    print(found)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
