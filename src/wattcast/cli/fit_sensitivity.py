"""``wattcast fit sensitivity TABLE``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment


def command(
    ctx: typer.Context,
    table: Annotated[Path, typer.Argument(help="CSV of kernels over settings with counters.")],
    out: Annotated[Path | None, typer.Option(help="Save the model as YAML.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; default: the table's.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit predictors of compute and bandwidth sensitivity to counters, as paper 004 does.

    Example: wattcast manage simulate --export table.csv && wattcast fit sensitivity table.csv --out model.yaml
    """
    from wattcast.fit import sensitivity

    env: Environment = ctx.obj
    data = sensitivity.read_table(table)
    source = f"fitted by Wattcast to {table.name}, {len(data.kernels)} kernels"
    fitted = sensitivity.fit(data.counters, data.sensitivity, data.groups, name or table.stem, source)
    if out is not None:
        sensitivity.write(fitted.model, out)
        env.say(f"model saved: {out}")
    result = {
        "model": sensitivity.to_plain(fitted.model),
        "kernels": fitted.rows,
        "error": dict(fitted.error),
        "left_out_error": dict(fitted.left_out_error),
        "correlation": dict(fitted.correlation),
        "published": {"error": {"compute": 0.0571, "bandwidth": 0.0303}, "source": "paper 004, section 7.2"},
    }
    if json:
        env.json(result)
        return
    for which, side in (("compute", fitted.model.compute), ("bandwidth", fitted.model.bandwidth)):
        env.console().print(
            f"{which}: error {fitted.error[which]:.2%}, applications left out in turn "
            f"{fitted.left_out_error[which]:.2%}, correlation {fitted.correlation[which]:.2f}; "
            f"counters {', '.join(side.coefficients)}"
        )
