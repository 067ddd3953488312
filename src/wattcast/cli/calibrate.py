"""``wattcast calibrate --gpu NAME FILE``: a forecast adjusted to measurements of your card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.environment import Environment

if TYPE_CHECKING:
    from wattcast.fit.calibrate import Calibration

app = typer.Typer(help="Adjust a GPU's coefficients to whole-model measurements of your card.")


@app.command()
def calibrate(
    ctx: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV or JSON rows: workload, batch, seq ..., latency_ms, energy_j or power_w, clock_mhz."
        ),
    ],
    gpu: Annotated[str, typer.Option(help="Catalogue name (`wattcast gpus`) or your own YAML file.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the bundle; default: calibrated/GPU.")] = None,
    factor: Annotated[
        list[str] | None, typer.Option(help="Your own efficiency factor to start from, such as dram_energy=1.2.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Launch cost, efficiencies, energy scale and idle offset: as many as the rows support, never more.

    Example: wattcast calibrate --gpu a100-sxm mine.csv; then predict with --bundle calibrated/a100-sxm-80gb
    """
    from wattcast import api
    from wattcast.cli.factors import factors_of
    from wattcast.fit import calibrate as fitting
    from wattcast.fit import calibrate_rows
    from wattcast.fitted import bundle_for
    from wattcast.fitted.bundle import write
    from wattcast.fitted.factors import with_factors

    env: Environment = ctx.obj
    chip = api.find_gpu(gpu)
    bundle = with_factors(bundle_for(chip), factors_of(factor or []))
    rows = calibrate_rows.read(file, chip)
    notes = calibrate_rows.check(rows, chip, bundle)
    found = fitting.calibrate(rows, chip, bundle, file.name, notes)
    folder = out or Path("calibrated") / chip.name
    folder.mkdir(parents=True, exist_ok=True)
    write(found.bundle, folder / "bundle.yaml")
    if json:
        env.json(_plain(found, chip.name, folder))
    else:
        _print(env, found, chip.name)
    env.say(f"{folder / 'bundle.yaml'} written; use it with --bundle {folder}")


def _plain(found: Calibration, gpu: str, folder: Path) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "rows": found.rows,
        "learned": [vars(item) for item in found.learned],
        "not_supported": list(found.left),
        "latency_error_percent": vars(found.latency),
        "power_error_percent": vars(found.power),
        "notes": list(found.notes),
        "bundle": str(folder),
    }


def _print(env: Environment, found: Calibration, gpu: str) -> None:
    from rich.markup import escape

    from wattcast.report.text import table

    console = env.console()
    console.print(f"[bold]{escape(gpu)}[/bold], {found.rows} row{'s' if found.rows > 1 else ''}", highlight=False)
    learned = table("learned", "value", "90% interval", "surer than before by")
    for item in found.learned:
        unit = " W" if item.name == "idle_offset" else ""
        ends = f"{item.low:.3g} to {item.high:.3g}{unit}"
        learned.add_row(item.name, f"{item.value:.3g}{unit}", ends, f"{max(item.sure, 0.0):.0%}")
    console.print(learned)
    if found.left:
        console.print(f"Left as forecast, for want of rows that tell: {', '.join(found.left)}", highlight=False)
    errors = table("mean error", "forecast", "calibrated", "left out one at a time")
    for name, e in (("latency", found.latency), ("power", found.power)):
        errors.add_row(name, *("-" if x is None else f"{x:.1f} %" for x in (e.forecast, e.fitted, e.left_out)))
    console.print(errors)
    for note in found.notes:
        console.print(f"  - {escape(note)}", style="dim", highlight=False)
