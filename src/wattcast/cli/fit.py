"""``wattcast fit``: records -> a bundle."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import typer

app = typer.Typer(no_args_is_help=True, help="Fit models to measurements.")


@app.callback()
def _fit() -> None:
    """Fit models to measurements."""


@app.command()
def kernels(
    database: str = typer.Argument(..., help="A kernel database: its folder, its rows.parquet, or a shipped name."),
    gpu: str = typer.Option(..., "--gpu", help="The catalogue GPU it was measured on."),
    out: str = typer.Option(".", "--out", help="Folder for bundle.yaml, arrays.npz and out_of_fold.parquet."),
    inherit: bool | None = typer.Option(
        None,
        "--inherit/--alone",
        help="Move the card's forecast by the rows, or fit from nothing; default: inherit below 1000 burst rows.",
    ),
    leave_out: bool = typer.Option(
        False,
        "--leave-out",
        help="Learn anew how far intervals reach for what was never measured: fifteen more fits, minutes.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the held-out ledger as JSON."),
) -> None:
    """Latency, power and clock of kernels: corrections, energies, V(f), clock law, intervals."""
    from wattcast.fit.kernels_run import fit_database, write
    from wattcast.validate import kernel_rows, show

    bundle, held = fit_database(database, gpu, lambda text: typer.echo(text, err=True), inherit, leave_out)
    write(bundle, held, Path(out))
    rows = kernel_rows(held, gpu)
    typer.echo(json.dumps({"rows": rows}, indent=1) if as_json else show(rows))
    typer.echo(f"{Path(out) / 'bundle.yaml'} written", err=True)


def _register() -> None:
    """Other fits live in modules of their own and join when they are there."""
    for name in ("counters", "component", "sensitivity", "host"):
        module = f"wattcast.cli.fit_{name}"
        if importlib.util.find_spec(module) is not None:
            app.command(name)(importlib.import_module(module).command)


_register()
