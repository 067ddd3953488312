"""``wattcast validate``: the accuracy ledger."""

from __future__ import annotations

import json
from pathlib import Path

import typer

app = typer.Typer(help="How accurate Wattcast is, on rows not used for fitting.")


@app.callback(invoke_without_command=True)
def validate(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    refit: bool = typer.Option(False, "--refit", help="Repeat the cross-validation instead of reading its results."),
    plot: str = typer.Option("", "--plot", help="Save predicted against measured, held out (.png, .svg, .pdf)."),
    quantity: str = typer.Option("latency", "--quantity", help="What --plot draws: latency|power|clock."),
    write: str = typer.Option("", "--write", help="Write the ledger as a page, such as docs/accuracy.md."),
) -> None:
    """Held-out errors beside trivial floors, published numbers and goals."""
    from wattcast.files import write_whole
    from wattcast.validate import ledger, show, to_markdown

    rows = ledger(refit, tell=lambda text: typer.echo(text, err=True))
    if write:
        write_whole(Path(write), to_markdown(rows).encode())
    if plot:
        from wattcast.report.figure import save
        from wattcast.report.heldout import held_out

        save(held_out(quantity), Path(plot))
        typer.echo(f"figure saved: {plot}", err=True)
    typer.echo(json.dumps({"rows": rows}, indent=1) if as_json else show(rows))
