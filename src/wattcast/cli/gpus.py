"""``wattcast gpus [list|show NAME]``"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.environment import Environment

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
    name: Annotated[str, typer.Argument(help="Catalogue name or your own YAML file.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every number of one GPU with its source; what is unknown, and why."""
    from wattcast.api import find_gpu
    from wattcast.hardware.gpu import numbers

    env: Environment = ctx.obj
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
