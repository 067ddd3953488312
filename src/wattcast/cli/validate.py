"""``wattcast validate``: the accuracy ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Figures, Format, Plot, save_one

app = typer.Typer(help="How accurate Wattcast is, on rows not used for fitting.")


@app.callback(invoke_without_command=True)
def validate(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Repeat the cross-validation instead of reading its results.")
    ] = False,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations", help="Ablations and the sets that take minutes; results are kept for the next call."
        ),
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="With --ablations: even where results were kept.")] = False,
    write: Annotated[str, typer.Option("--write", help="Write the ledger as a page, such as docs/accuracy.md.")] = "",
    figures: Figures = None,
    format: Format = "png",
    plot: Plot = None,
    quantity: Annotated[str, typer.Option("--quantity", help="What --plot draws: latency|power|clock.")] = "latency",
) -> None:
    """Held-out errors beside trivial floors, published numbers and goals."""
    from wattcast.files import write_whole
    from wattcast.validate import ledger, show, to_markdown

    env = ctx.obj if isinstance(ctx.obj, Environment) else Environment()
    rows = ledger(refit, env.say, long=ablations, again=again, variables=env.variables)
    if write:
        write_whole(Path(write), to_markdown(rows).encode())
    if figures is not None:
        from wattcast.report.validation import save_all

        for path in save_all(figures, ending=format):
            env.say(f"figure saved: {path}")
    if plot is not None:
        from wattcast.report.heldout import held_out

        save_one(env, held_out(quantity), plot)
    typer.echo(json.dumps({"rows": rows}, indent=1) if as_json else show(rows))
