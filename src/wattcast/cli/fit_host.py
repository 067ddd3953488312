"""``wattcast fit host DB --gpu NAME``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment


def command(
    ctx: typer.Context,
    database: Annotated[
        str, typer.Argument(help="Whole-model rows: a database, models.parquet, journals, or a CSV of your own.")
    ],
    gpu: Annotated[str, typer.Option(help="The catalogue GPU they were measured on.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the GPU's bundle with this launch cost.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What issuing an operator costs the host, from rows launched eagerly.

    Example: wattcast fit host mine.csv --gpu h200     (columns model, batch, seq, phase, latency_s: "2.9 ms")
    """
    from dataclasses import asdict

    from wattcast import hardware
    from wattcast.fit.host import fit_host, with_launch
    from wattcast.fitted import bundle, bundle_for
    from wattcast.report.text import table
    from wattcast.units import show

    env: Environment = ctx.obj
    found = fit_host(database, gpu)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        bundle.write(with_launch(bundle_for(hardware.load(gpu)), found.host_s), out / "bundle.yaml")
        env.say(f"bundle saved: {out / 'bundle.yaml'}")
    errors = {name: found.error(f"{name}_s") for name in ("predicted", "default", "left_out")}
    if json:
        env.json({"host_s": found.host_s, "error": errors, "rows": [asdict(row) for row in found.rows]})
        return
    rows = table("workload", "operators", "measured", "fitted", "default", "asks for")
    for row in found.rows:
        asks = "GPU-bound" if row.host_s is None else show(row.host_s, "s", 3)
        seconds = (show(s, "s", 3) for s in (row.latency_s, row.predicted_s, row.default_s))
        rows.add_row(row.name, str(row.operators), *seconds, asks)
    env.console().print(rows)
    env.stdout.write(
        f"{show(found.host_s, 's', 3)} an operator (use: --host-launch {found.host_s * 1e6:.3g}us); mean error "
        f"{errors['predicted']:.1%}, model left out {errors['left_out']:.1%}, with the default "
        f"{show(found.default_s, 's', 3)} {errors['default']:.1%}\n"
    )
