"""``python -m wattcast.measure``: measuring on a bare GPU node, with the standard library's argument parser."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from wattcast.errors import ExitCode, WattcastError
from wattcast.units import parse


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
    verbs = parser.add_subparsers(required=True)
    kernels = verbs.add_parser("kernels", help="measure operators of the plan into --out")
    kernels.add_argument("--out", type=Path, required=True)
    kernels.add_argument(
        "--steps", default="idle,burst,repeat-burst,sustained,repeat-sustained,duty,pattern,clock,names"
    )
    kernels.add_argument("--budget", default="540s")
    kernels.add_argument("--few", type=int, default=0, help="only this many operators per family: a smoke test")
    kernels.set_defaults(call=_kernels)
    counters = verbs.add_parser("counters", help="hardware counters of a sample, through ncu")
    counters.add_argument("--out", type=Path, required=True)
    counters.add_argument("--budget", default="150s")
    counters.add_argument("--few", type=int, default=0)
    counters.add_argument("--target", action="store_true", help="the part that runs under ncu")
    counters.set_defaults(call=_counters)
    sensor = verbs.add_parser("sensor", help="update period and averaging window of the power sensor")
    sensor.add_argument("--out", type=Path)
    sensor.set_defaults(call=_sensor)
    return parser


def _kernels(options: argparse.Namespace) -> int:
    from wattcast.measure.kernels.campaign import run_campaign

    began_s = time.monotonic()
    budget_s = parse(options.budget, "s", "--budget")
    counts = run_campaign(options.out, options.steps.split(","), budget_s, options.few)
    print(json.dumps({**dict(sorted(counts.items())), "seconds": round(time.monotonic() - began_s, 1)}, indent=1))
    return int(ExitCode.OK)


def _counters(options: argparse.Namespace) -> int:
    from wattcast.measure.kernels import counters

    budget_s = parse(options.budget, "s", "--budget")
    if options.target:
        print(f"counted {counters.target(budget_s, options.few)} operators", file=sys.stderr)
        return int(ExitCode.OK)
    print(json.dumps(counters.collect(options.out, budget_s, options.few)))
    return int(ExitCode.OK)


def _sensor(options: argparse.Namespace) -> int:
    from wattcast.measure.sensor_run import probe

    sensor, samples = probe()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        samples.save(options.out / "sensor_samples.npz")
        (options.out / "sensor.json").write_text(json.dumps(sensor.plain(), indent=1))
    print(json.dumps(sensor.plain(), indent=1))
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
