"""``wattcast tune PROFILE --gpu NAME``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment

app = typer.Typer(help="What removing a profiled kernel's bottlenecks would change.")


@app.command()
def tune(
    ctx: typer.Context,
    profile: Annotated[Path, typer.Argument(help="CSV of Nsight Compute (ncu --csv, or --page raw).")],
    gpu: Annotated[str, typer.Option(help="The device; its microbenchmark results are used.")] = "h200",
    results: Annotated[
        Path | None, typer.Option(help="Folder or file of `measure microbench`, instead of what ships.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank bottlenecks (coalescing, conflicts, divergence, fp64, conversions, access size, occupancy) by joules.

    Example: wattcast tune profile.csv --gpu h200
    """
    from wattcast.api import find_gpu
    from wattcast.explore.microbench import read_results, results_of
    from wattcast.explore.tune import tune as library
    from wattcast.report.microbench import advice_table, tuning_plain

    env: Environment = ctx.obj
    measured = read_results(results) if results is not None else results_of(find_gpu(gpu))
    found = library(profile, measured)
    if json:
        env.json(tuning_plain(found))
        return
    env.console().print(advice_table(found))
    for name, metrics in found.missing.items():
        env.say(f"not judged: {name}, for want of {', '.join(metrics)}")
