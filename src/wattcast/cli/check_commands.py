"""``wattcast lab validate`` and ``wattcast doctor``: how accurate Wattcast is, and what this machine has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from wattcast import __version__
from wattcast.cli.shared_options import Environment, Figures, Format, Json, Plot, save_plot
from wattcast.core.strict_files import reference_folder


def validate(
    ctx: typer.Context,
    as_json: Json = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Repeat the cross-validation instead of reading its results.")
    ] = False,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations", help="Also published sets that take minutes; results are kept for the next call."
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
    from wattcast.core.strict_files import write_whole
    from wattcast.validate import build_ledger, format_ledger, ledger_to_markdown

    env = ctx.obj if isinstance(ctx.obj, Environment) else Environment()
    rows = build_ledger(refit, env.say, long=ablations, again=again, variables=env.variables)
    if write:
        write_whole(Path(write), ledger_to_markdown(rows).encode())
    if figures is not None:
        from wattcast.validate.ledger_figures import save_ledger_figures

        for path in save_ledger_figures(figures, ending=format):
            env.say(f"figure saved: {path}")
    if plot is not None:
        from wattcast.validate.ledger_figures import draw_held_out

        save_plot(env, draw_held_out(quantity), plot)
    typer.echo(json.dumps({"rows": rows}, indent=1) if as_json else format_ledger(rows))


def doctor(ctx: typer.Context, json: Json = False) -> None:
    """Look at this machine: libraries, data, devices; say what works and how to get the rest."""
    env: Environment = ctx.obj
    checks = examine_machine(env.variables)
    if json:
        env.json({"checks": [vars(check) for check in checks]})
        return
    from rich.markup import escape

    from wattcast.report.text_tables import new_table

    listing = new_table("", "found", "what it is for")
    for column in listing.columns[1:]:
        column.justify = "left"
    for check in checks:
        found = check.found if check.ok else f"missing: {check.advice}"
        listing.add_row(("ok   " if check.ok else "--   ") + check.name, escape(found), escape(check.purpose))
    env.console().print(listing)


@dataclass(frozen=True)
class ToolCheck:
    """One thing looked for: whether it is there, what was found, what it is for, how to get it."""

    name: str
    ok: bool
    found: str
    purpose: str
    advice: str


_LIBRARIES = {  # distribution -> (module, what it is for, extra that installs it)
    "numpy": ("numpy", "predict", ""),
    "msgspec": ("msgspec", "predict", ""),
    "PyYAML": ("yaml", "predict", ""),
    "typer": ("typer", "the command line", ""),
    "rich": ("rich", "tables", ""),
    "scipy": ("scipy", "fitting and fleet planning", "fit"),
    "polars": ("polars", "tables of measurements", "fit"),
    "matplotlib": ("matplotlib", "--plot", "plot"),
    "fastapi": ("fastapi", "serve", "serve"),
    "uvicorn": ("uvicorn", "serve", "serve"),
    "prometheus-client": ("prometheus_client", "export prometheus", "serve"),
    "nvidia-ml-py": ("pynvml", "measuring NVIDIA GPUs", "measure"),
    "torch": ("torch", "capturing PyTorch programs, measuring kernels", "torch"),
}


def examine_machine(variables: Mapping[str, str]) -> list[ToolCheck]:
    """Run all checks in a fixed order; none of them wakes a GPU."""
    checks = [ToolCheck("wattcast", True, f"{__version__}, Python {platform.python_version()}", "", "")]
    checks += [_library(name, *spec) for name, spec in _LIBRARIES.items()]
    checks.append(_driver())
    checks.append(_tool("ncu", "hardware counters of NVIDIA GPUs", "install Nsight Compute"))
    folder = reference_folder(variables)
    found = "found" if folder is not None else ""
    checks.append(
        ToolCheck("reference data", folder is not None, found, "validation", "set WATTCAST_REFERENCE to its folder")
    )
    checks.append(_card_settings())
    return checks


def _card_settings() -> ToolCheck:
    """Name cards that a dead process left changed; those a daemon tends to are not left."""
    from wattcast.manage.card_notes import NoteFolder, describe_leftover

    notes = NoteFolder()
    left = [describe_leftover(note) for note in notes.leftovers() if not notes.is_tended(note.uuid)]
    advice = "; ".join([*left, "run `wattcast manage restore` as root"])
    return ToolCheck("GPU settings", not left, "none left changed", "managing GPUs", advice)


def _library(name: str, module: str, purpose: str, extra: str) -> ToolCheck:
    advice = f"pip install 'wattcast[{extra}]'" if extra else "pip install --force-reinstall wattcast"
    if importlib.util.find_spec(module) is None:
        return ToolCheck(name, False, "", purpose, advice)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return ToolCheck(name, True, version, purpose, advice)


def _driver() -> ToolCheck:
    purpose, advice = "measuring and managing NVIDIA GPUs", "no NVIDIA driver on this machine; predictions need none"
    try:
        CDLL("libnvidia-ml.so.1")
    except OSError:
        return ToolCheck("NVIDIA driver", False, "", purpose, advice)
    return ToolCheck("NVIDIA driver", True, "libnvidia-ml.so.1", purpose, advice)


def _tool(name: str, purpose: str, advice: str) -> ToolCheck:
    path = shutil.which(name)
    return ToolCheck(name, path is not None, path or "", purpose, advice)
