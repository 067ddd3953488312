"""``wattcast workload show|save WORKLOAD``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.options import (
    AttentionName,
    Batch,
    Dp,
    DtypeName,
    HeadName,
    Image,
    PhaseName,
    Pp,
    Recompute,
    Seq,
    Skew,
    Source,
    StackName,
    Tokens,
    Tp,
)

if TYPE_CHECKING:
    from wattcast.workload.graph import Graph
    from wattcast.workload.options import Options

app = typer.Typer(help="From a model to its operators.", no_args_is_help=True)

MOST_ROWS = 60


@app.command("show")
def show_workload(
    ctx: typer.Context,
    workload: Source,
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    capacity: Annotated[
        str | None, typer.Option(help="Device memory, such as 80GB: does it fit, and the largest batch that does.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Operators, FLOPs, bytes and counts of a workload; memory by purpose.

    Example: wattcast workload show llama3-8b --batch 8 --seq 1024 --phase decode --capacity 80GB
    """
    env: Environment = ctx.obj
    graph = _graph(workload, ctx.params)
    held = _memory(workload, ctx.params, capacity)
    if json:
        env.json(summary(graph) | {"memory": held})
        return
    _print(env, graph, held)


@app.command("save")
def save_workload(
    ctx: typer.Context,
    workload: Source,
    file: Annotated[Path, typer.Argument(help="Workload JSON to write.")],
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Save a workload as JSON that `predict` and `workload show` take back."""
    from wattcast.workload import from_json

    env: Environment = ctx.obj
    graph = _graph(workload, ctx.params)
    from_json.write(graph, file)
    if json:
        env.json({"name": graph.name, "file": str(file), "blocks": len(graph.blocks)})
    else:
        env.say(f"{graph.name} saved: {file}")


def _graph(workload: str, params: dict[str, Any]) -> Graph:
    from wattcast.workload import source

    return source.load(workload, _options(params))


def _options(params: dict[str, Any]) -> Options:
    from wattcast.workload.options import Options

    given = {key: value for key, value in params.items() if key not in ("workload", "file", "json", "capacity")}
    return Options(**given)


def _memory(workload: str, params: dict[str, Any], capacity: str | None) -> dict[str, Any] | None:
    """Bytes by purpose, and what fits; None for a list of operators, which does not say."""
    from wattcast.errors import bad_value
    from wattcast.units import parse
    from wattcast.workload import memory, source

    model = source.find_model(workload)
    if model is None:
        if capacity is not None:
            raise bad_value("--capacity", "a model", "a list of operators", "A list does not say what it holds.")
        return None
    options = _options(params)
    footprint = memory.footprint(model, options)
    held: dict[str, Any] = {**vars(footprint), "total_byte": footprint.total_byte}
    if capacity is not None:
        byte = parse(capacity, "byte", "--capacity")
        largest = memory.largest_batch(model, options, byte)
        held |= {"capacity_byte": byte, "fits": footprint.fits(byte), "largest_batch": largest}
    return held


def summary(graph: Graph) -> dict[str, Any]:
    """A graph as plain data: totals, then each distinct operator with the work of all its calls."""
    from wattcast.workload.from_json import operator_to_plain
    from wattcast.workload.totals import distinct, totals

    ops = [
        {
            "name": row.op.name,
            "shape": {k: v for k, v in operator_to_plain(row.op).items() if k not in ("op", "count", "label")},
            "label": row.op.label,
            "count": row.count,
            "flop": row.op.flop * row.count,
            "byte": (row.op.read_byte + row.op.write_byte) * row.count,
            "flop_per_call": row.op.flop,
            "read_byte_per_call": row.op.read_byte,
            "write_byte_per_call": row.op.write_byte,
        }
        for row in distinct(graph)
    ]
    return {
        "name": graph.name,
        **vars(totals(graph)),
        "memory_byte": graph.memory_byte,
        "assumptions": list(graph.assumptions),
        "ops": ops,
    }


def _print(env: Environment, graph: Graph, held: dict[str, Any] | None) -> None:
    from rich.markup import escape

    from wattcast.report.text import table
    from wattcast.units import show
    from wattcast.workload.totals import distinct, totals

    console, sums = env.console(), totals(graph)
    console.print(f"[bold]{escape(graph.name)}[/bold]", highlight=False)
    head = table("", "")
    head.add_row("operators issued", str(sums.calls))
    head.add_row("arithmetic", show(sums.flop, "flop"))
    head.add_row("products, as run", show(sums.product_flop, "flop"))
    head.add_row("products, causal mask ignored", show(sums.product_flop_dense, "flop"))
    head.add_row("bytes read and written", show(sums.byte, "byte"))
    for key, value in (held or {}).items():
        words = key.removesuffix("_byte").replace("_", " ")
        head.add_row(f"memory: {words}", show(value, "byte") if key.endswith("_byte") else str(value))
    console.print(head)
    rows = table("operator", "where", "calls", "FLOP", "bytes")
    rows.columns[1].justify = "left"
    ranked = distinct(graph)
    for row in ranked[:MOST_ROWS]:
        byte = (row.op.read_byte + row.op.write_byte) * row.count
        flop = show(row.op.flop * row.count, "flop", 3)
        rows.add_row(escape(str(row.op)), escape(row.op.label), str(row.count), flop, show(byte, "byte", 3))
    if len(ranked) > MOST_ROWS:
        rows.add_row(f"... {len(ranked) - MOST_ROWS} more (all in --json)", "", "", "", "")
    console.print(rows)
    console.print("Assumed", style="bold")
    for note in graph.assumptions:
        console.print(f"  - {escape(note)}", style="dim", highlight=False)
