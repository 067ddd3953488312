"""``wattcast models [show NAME]``"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wattcast.cli.environment import Environment

app = typer.Typer(help="The models Wattcast knows, and who published their dimensions.", invoke_without_command=True)


@app.callback()
def _list(ctx: typer.Context, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the catalogue."""
    if ctx.invoked_subcommand is not None:
        return
    from wattcast.workload import models

    env: Environment = ctx.obj
    rows = [_summary(name) for name in models.names()]
    if json:
        env.json({"models": rows})
        return
    from wattcast.report.text import table

    listing = table("model", "title", "kind", "architecture", "parameters")
    for column in listing.columns[1:4]:
        column.justify = "left"
    for row in rows:
        listing.add_row(
            row["name"], row["title"], row["kind"], row["architecture"], f"{row['parameters'] / 1e9:.4g} G"
        )
    env.console().print(listing)


@app.command("show")
def show_model(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Catalogue name; case, '-', '_', '.' and blanks do not matter.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The published dimensions of one model, with their source."""
    from dataclasses import asdict

    from wattcast.workload import models

    env: Environment = ctx.obj
    model = models.load(name)
    summary = _summary(model.name) | {"dims": asdict(model.dims)}
    if json:
        env.json(summary)
        return
    from rich.markup import escape

    from wattcast.report.text import table

    console = env.console()
    console.print(f"[bold]{escape(model.name)}[/bold]  {escape(model.title)}", highlight=False)
    listing = table("dimension", "value")
    for key, value in summary["dims"].items():
        listing.add_row(key, escape(str(value)))
    console.print(listing)
    console.print(f"source: {escape(model.source)}", style="dim", highlight=False)


def _summary(name: str) -> dict[str, Any]:
    from wattcast.workload import models
    from wattcast.workload.build import parameter_count

    model = models.load(name)
    return {
        "name": model.name,
        "title": model.title,
        "kind": str(model.kind),
        "architecture": model.architecture,
        "parameters": parameter_count(model),
        "source": model.source,
        "note": model.note,
    }
