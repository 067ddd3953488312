"""``wattcast gpus [list|show NAME|check-energies]``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Plot

if TYPE_CHECKING:
    from wattcast.hardware import Gpu

app = typer.Typer(help="The GPUs Wattcast knows, and who says so.", invoke_without_command=True)


@app.callback()
def _list(ctx: typer.Context, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the catalogue."""
    if ctx.invoked_subcommand is not None:
        return
    from wattcast import hardware
    from wattcast.fitted import bundle_for

    env: Environment = ctx.obj
    gpus = [hardware.load(name) for name in hardware.names()]
    rows = [_summary(gpu) | {"coefficients": str(bundle_for(gpu).status)} for gpu in gpus]
    if json:
        env.json({"gpus": rows})
        return
    from wattcast.report.text import table
    from wattcast.units import show

    listing = table("gpu", "architecture", "SMs", "top clock", "memory", "bandwidth", "limit", "coefficients")
    for row in rows:
        listing.add_row(
            row["name"],
            row["architecture"],
            f"{row['sm_count']:.0f}",
            show(row["max_clock_hz"], "Hz"),
            f"{show(row['memory_byte'], 'byte', 3)} {row['memory_kind']}",
            show(row["memory_byte_per_s"], "byte/s", 3),
            show(row["power_limit_w"], "W"),
            row["coefficients"],
        )
    env.console().print(listing)


@app.command("show")
def show_gpu(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Catalogue name or your own YAML file; with --energies also an architecture file.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    energies: Annotated[
        bool, typer.Option("--energies", help="Energies per event, leakage and area, built from the architecture.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="With --energies: feature size, such as 28nm.")] = None,
    voltage: Annotated[str | None, typer.Option(help="With --energies: core voltage, such as 0.9V.")] = None,
    temperature: Annotated[str | None, typer.Option(help="With --energies: of the die, such as 80C.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(help="With --energies: PART=FACTOR, PART one of registers, l1, shared, l2, sms; may repeat."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="With --energies: also write them as a table for power-trace, .yaml.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Every number of one GPU with its source; what is unknown, and why.

    Example: wattcast gpus show h200 --energies --change registers=2
    """
    from wattcast.api import find_gpu
    from wattcast.hardware.gpu import numbers

    env: Environment = ctx.obj
    if energies:
        from wattcast.cli.gpus_energies import Asked, show_bottom_up

        show_bottom_up(env, Asked.read(name, node, voltage, temperature, change or [], save, plot), json)
        return
    if any(option is not None for option in (node, voltage, temperature, change, save, plot)):
        from wattcast.errors import bad_value

        raise bad_value(
            "--node, --voltage, --temperature, --change, --save, --plot", "--energies beside them", "none"
        )
    gpu = find_gpu(name)
    known = [
        {
            "field": path,
            "value": float(value),
            "source": gpu.claims[path].source if path in gpu.claims else "",
            "note": gpu.claims[path].note if path in gpu.claims else "",
            "disputed": [list(pair) for pair in gpu.claims[path].disputed] if path in gpu.claims else [],
        }
        for path, value in numbers(gpu)
    ]
    if json:
        env.json(_summary(gpu) | {"numbers": known, "unknown": dict(gpu.unknown)})
        return
    from rich.markup import escape

    from wattcast.report.text import table

    console = env.console()
    console.print(f"[bold]{escape(gpu.name)}[/bold]  {escape(gpu.title)}, {escape(gpu.process)}", highlight=False)
    listing = table("field", "value", "source")
    listing.columns[2].justify = "left"
    for row in known:
        others = "".join(f"; disputed: {value} by {source}" for value, source in row["disputed"])  # type: ignore[attr-defined]
        note = f" ({row['note']})" if row["note"] else ""
        listing.add_row(str(row["field"]), f"{row['value']:.6g}", escape(f"{row['source']}{note}{others}"))
    console.print(listing)
    for path, why in gpu.unknown.items():
        console.print(f"unknown: {path}: {escape(why)}", style="dim", highlight=False)


@app.command("check-energies")
def check_energies(
    ctx: typer.Context,
    reference: Annotated[
        Path | None,
        typer.Option(help="Folder with accelwattch/ and simulator_runs/; default: WATTCAST_REFERENCE."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU whose fitted energies to compare with.")] = "h200",
    plot: Plot = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every bottom-up energy beside one dumped from a simulator or fitted to a measured GPU: ratios and medians."""
    from wattcast.cli.gpus_energies import show_check

    show_check(ctx.obj, reference, gpu, plot, json)


def _summary(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "title": gpu.title,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "sm_count": float(gpu.sm_count),
        "max_clock_hz": float(gpu.clocks.max_hz),
        "memory_kind": gpu.memory.kind,
        "memory_byte": float(gpu.memory.capacity_byte),
        "memory_byte_per_s": float(gpu.memory.byte_per_s),
        "power_limit_w": float(gpu.power.limit_w),
    }
