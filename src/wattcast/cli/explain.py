"""``wattcast explain A B``: what caused the difference."""

from __future__ import annotations

from typing import Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Plot, save_one

app = typer.Typer(help="What caused the difference between two predictions, or a prediction and a measured run.")

_SIDE = (
    "MODEL@GPU,key=value,... | FILE.json of `predict --json` (FILE.json#2: its second) or of `measure run --json` | "
    "row:ID or DATABASE#ID of `measure models` | `predicted`, beside a row. B may lean on A: @GPU, or ,batch=16."
)


@app.command()
def explain(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; differences are B - A.")],
    gpu: Annotated[str, typer.Option(help="The GPU whose database row:ID is looked up in.")] = "h200",
    iterations: Annotated[
        int, typer.Option(help="How often the command of `measure run` ran the workload, warm-up excluded.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Plot = None,
) -> None:
    """Which operators, modules and terms (clock, cycles, power, idle gaps) caused the difference; it adds up exactly.

    Examples: wattcast explain llama3-8b@h200,batch=8,seq=512 @h100-sxm
    ... explain llama3-8b@h200,batch=8,seq=512 ,power_limit=500W
    """
    from wattcast.explain import explain as split
    from wattcast.explain.read import read_pair
    from wattcast.explain.text import plain, print_explanation

    env: Environment = ctx.obj
    found = split(*read_pair(a, b, gpu, iterations))
    if plot is not None:
        from wattcast.explain.figure import difference

        save_one(env, difference(found), plot)
    if json:
        env.json(plain(found))
        return
    print_explanation(env.console(), found)
