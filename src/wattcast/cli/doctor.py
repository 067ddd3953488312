"""``wattcast doctor``: what is installed, and what it can do."""

from __future__ import annotations

from typing import Annotated

import typer

from wattcast.cli.environment import Environment

app = typer.Typer(help="What is installed, and what it can do.", invoke_without_command=True)


@app.callback()
def doctor(ctx: typer.Context, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Look at this machine: libraries, data, devices; say what works and how to get the rest."""
    from wattcast import doctor as library

    env: Environment = ctx.obj
    checks = library.examine(env.variables)
    if json:
        env.json({"checks": [vars(check) for check in checks]})
        return
    from rich.markup import escape

    from wattcast.report.text import table

    listing = table("", "found", "what it is for")
    for column in listing.columns[1:]:
        column.justify = "left"
    for check in checks:
        found = check.found if check.ok else f"missing: {check.advice}"
        listing.add_row(("ok   " if check.ok else "--   ") + check.name, escape(found), escape(check.purpose))
    env.console().print(listing)
