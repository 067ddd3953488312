"""``wattcast gpus`` and ``wattcast models``: what the catalogue and workload files hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from wattcast.cli.component_commands import print_bottom_up
from wattcast.cli.shared_options import (
    MODEL_OPTIONS,
    Environment,
    Json,
    Plot,
    Source,
    argument,
    option,
    takes_options,
)
from wattcast.core.errors import bad_value
from wattcast.core.units import parse, show

if TYPE_CHECKING:
    from wattcast.hardware import Gpu
    from wattcast.workload.graph import Graph
    from wattcast.workload.model_catalogue import ModelSpec
    from wattcast.workload.model_options import ModelOptions


class _CatalogueGroup(TyperGroup):
    """A group whose argument may be a name of the catalogue: ``gpus h200`` is ``gpus show h200``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        shown = args if args[0] in self.commands or args[0].startswith("-") else ["show", *args]
        return super().resolve_command(ctx, shown)


gpus_app = typer.Typer(
    add_completion=False,
    cls=_CatalogueGroup,
    invoke_without_command=True,
    help="The GPUs Wattcast knows, and who says so.",
)


@gpus_app.callback()
def _gpus(ctx: typer.Context, json: Json = False) -> None:
    """List the GPUs Wattcast knows, or show one: wattcast gpus h200."""
    if ctx.invoked_subcommand is None:
        list_gpus(ctx, json)


@gpus_app.command("list")
def list_gpus(ctx: typer.Context, json: Json = False) -> None:
    """List the catalogue: data-centre cards, then workstations, then cards that only papers measured."""
    from wattcast import hardware
    from wattcast.hardware.gpu import CardUse
    from wattcast.predictor.bundle import bundle_for

    env: Environment = ctx.obj
    gpus = sorted(map(hardware.load_gpu, hardware.gpu_names()), key=lambda gpu: list(CardUse).index(gpu.use))
    rows = [_gpu_summary(gpu) | {"coefficients": str(bundle_for(gpu).status)} for gpu in gpus]
    if json:
        env.json({"gpus": rows})
        return
    from wattcast.report.text_tables import print_rows

    columns = {"name": "gpu", "architecture": "architecture", "sm_count": "SMs", "max_clock_hz": "top clock"}
    columns |= {
        "memory": "memory",
        "bandwidth": "bandwidth",
        "power_limit_w": "limit",
        "coefficients": "coefficients",
    }
    for row in rows:
        row["memory"] = f"{show(row['memory_byte'], 'byte', 3)} {row['memory_kind']}"
        row["bandwidth"], row["limit"] = show(row["memory_byte_per_s"], "byte/s", 3), show(row["power_limit_w"], "W")
    print_rows(env.console(), rows, columns)


@gpus_app.command("nodes")
def list_nodes(ctx: typer.Context, json: Json = False) -> None:
    """List the nodes: how GPUs are joined, and the network between nodes (`predict --node`)."""
    from wattcast.hardware.catalogue_reader import load_node, node_names

    env: Environment = ctx.obj
    nodes = [load_node(name) for name in node_names()]
    if json:
        keys = ("name", "title", "gpus", "gpu_count", "fabric", "multicast", "network", "network_byte_per_s")
        rows = [{key: getattr(node, key) for key in keys} for node in nodes]
        sources = [{key: claim.source for key, claim in node.claims.items()} for node in nodes]
        env.json({"nodes": [row | {"sources": source} for row, source in zip(rows, sources, strict=True)]})
        return
    from wattcast.report.text_tables import new_table

    listing = new_table("node", "GPUs", "of", "fabric", "network of each GPU, one way")
    for node in nodes:
        rate = node.network_byte_per_s
        network = "unknown" if rate is None else f"{show(rate, 'byte/s', 3)}, {node.network}"
        listing.add_row(node.name, str(node.gpu_count), ", ".join(node.gpus) or "any", str(node.fabric), network)
    env.console().print(listing)


@gpus_app.command("show")
def show_gpu(
    ctx: typer.Context,
    name: Annotated[
        str, argument("Catalogue name or your own YAML file; with --energies also an architecture file.")
    ],
    json: Json = False,
    energies: Annotated[
        bool, option("Energies per event, leakage and area, built from the architecture.", "--energies")
    ] = False,
    feature_size: Annotated[str | None, option("With --energies: of the process, such as 28nm.")] = None,
    voltage: Annotated[str | None, option("With --energies: core voltage, such as 0.9V.")] = None,
    temperature: Annotated[str | None, option("With --energies: of the die, such as 80C.")] = None,
    change: Annotated[
        list[str] | None,
        option("With --energies: PART=FACTOR, PART one of registers, l1, shared, l2, sms; may repeat."),
    ] = None,
    save: Annotated[
        Path | None, option("With --energies: also write them as a table for power-trace, .yaml.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Show every number of one GPU with its source; what is unknown, and why.

    Example: wattcast gpus show h200 --energies --change registers=2
    """
    from wattcast.hardware.gpu import list_published_numbers
    from wattcast.predictor.api import find_gpu

    env: Environment = ctx.obj
    if energies:
        print_bottom_up(env, name, feature_size, voltage, temperature, change or [], save, plot, json)
        return
    if any(option is not None for option in (feature_size, voltage, temperature, change, save, plot)):
        raise bad_value(
            "--feature-size, --voltage, --temperature, --change, --save, --plot", "--energies beside them", "none"
        )
    gpu = find_gpu(name)
    known = list_published_numbers(gpu)
    if json:
        env.json(_gpu_summary(gpu) | {"numbers": known, "unknown": dict(gpu.unknown)})
        return
    from rich.markup import escape

    from wattcast.report.text_tables import new_table

    console = env.console()
    console.print(f"[bold]{escape(gpu.name)}[/bold]  {escape(gpu.title)}, {escape(gpu.process)}", highlight=False)
    listing = new_table("field", "value", "source", left=("source",))
    for row in known:
        others = "".join(f"; disputed: {value} by {source}" for value, source in row["disputed"])
        note = f" ({row['note']})" if row["note"] else ""
        listing.add_row(str(row["field"]), f"{row['value']:.6g}", escape(f"{row['source']}{note}{others}"))
    console.print(listing)
    for path, why in gpu.unknown.items():
        console.print(f"unknown: {path}: {escape(why)}", style="dim", highlight=False)


def _gpu_summary(gpu: Gpu) -> dict[str, Any]:
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


models_app = typer.Typer(
    add_completion=False,
    cls=_CatalogueGroup,
    invoke_without_command=True,
    help="The models Wattcast knows, and what they compute.",
)


@models_app.callback()
def _models(ctx: typer.Context, json: Json = False) -> None:
    """List the models Wattcast knows, or show one: wattcast models llama3-8b."""
    if ctx.invoked_subcommand is None:
        list_models(ctx, json)


@models_app.command("list")
def list_models(ctx: typer.Context, json: Json = False) -> None:
    """List the models of the catalogue with their kind, architecture and parameters."""
    from wattcast.workload import model_catalogue

    env: Environment = ctx.obj
    rows = [_model_summary(model_catalogue.load_model(name)) for name in model_catalogue.list_models()]
    if json:
        env.json({"models": rows})
        return
    from wattcast.report.text_tables import print_rows

    columns = {"name": "model", **{name: name for name in ("title", "kind", "architecture", "parameters")}}
    shown = [row | {"parameters": f"{row['parameters'] / 1e9:.4g} G"} for row in rows]
    print_rows(env.console(), shown, columns, left=("title", "kind", "architecture"))


def _model_summary(model: ModelSpec) -> dict[str, Any]:
    from wattcast.workload.build_model import count_parameters

    return {
        "name": model.name,
        "title": model.title,
        "kind": str(model.kind),
        "architecture": model.architecture,
        "parameters": count_parameters(model),
        "source": model.source,
        "note": model.note,
    }


MOST_ROWS = 60


@models_app.command("show")
@takes_options(MODEL_OPTIONS)
def show_model(
    ctx: typer.Context,
    workload: Source,
    capacity: Annotated[
        str | None, option("Device memory, such as 80GB: does it fit, and the largest batch that does.")
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Show dimensions and source of a model; operators, FLOPs and bytes of a workload; memory by purpose.

    Example: wattcast models show llama3-8b --batch 8 --seq 1024 --phase decode --capacity 80GB
    """
    from dataclasses import asdict

    from wattcast.workload.model_options import ModelOptions
    from wattcast.workload.readers import load_workload

    env: Environment = ctx.obj
    chosen = ModelOptions.from_names(**options)
    graph, model = load_workload.load_workload(workload, chosen), load_workload.find_model(workload)
    held = _describe_memory(model, chosen, capacity)
    about = None if model is None else _model_summary(model) | {"dims": asdict(model.dims)}
    if json:
        env.json(summarise_graph(graph) | {"model": about, "memory": held})
        return
    _print_graph(env, graph, about, held)


@models_app.command("save")
@takes_options(MODEL_OPTIONS)
def save_model(
    ctx: typer.Context,
    workload: Source,
    file: Annotated[Path, argument("Workload JSON to write.")],
    json: Json = False,
    **options: Any,
) -> None:
    """Save a workload as JSON that `predict` and `models show` take back."""
    from wattcast.workload.model_options import ModelOptions
    from wattcast.workload.readers import from_json, load_workload

    env: Environment = ctx.obj
    graph = load_workload.load_workload(workload, ModelOptions.from_names(**options))
    from_json.write_workload_file(graph, file)
    if json:
        env.json({"name": graph.name, "file": str(file), "blocks": len(graph.blocks)})
    else:
        env.say(f"{graph.name} saved: {file}")


def _describe_memory(model: ModelSpec | None, options: ModelOptions, capacity: str | None) -> dict[str, Any] | None:
    """Return bytes by purpose and what fits; None for a list of operators, which does not say."""
    from wattcast.workload import build_model

    if model is None:
        if capacity is not None:
            raise bad_value("--capacity", "a model", "a list of operators", "A list does not say what it holds.")
        return None
    footprint = build_model.compute_footprint(model, options)
    held: dict[str, Any] = {**vars(footprint), "total_byte": footprint.total_byte}
    if capacity is not None:
        byte = parse(capacity, "byte", "--capacity")
        largest = build_model.find_largest_batch(model, options, byte)
        held |= {"capacity_byte": byte, "fits": footprint.fits(byte), "largest_batch": largest}
    return held


def summarise_graph(graph: Graph) -> dict[str, Any]:
    """Return a graph as plain data: totals, then each distinct operator with the work of all its calls."""
    from wattcast.workload.graph import compute_totals, count_operators
    from wattcast.workload.readers.from_json import operator_to_plain

    ops = [
        {
            "name": op.name,
            "shape": {k: v for k, v in operator_to_plain(op).items() if k not in ("op", "count", "label")},
            "label": op.label,
            "count": calls,
            "flop": op.flop * calls,
            "byte": (op.read_byte + op.write_byte) * calls,
            "flop_per_call": op.flop,
            "read_byte_per_call": op.read_byte,
            "write_byte_per_call": op.write_byte,
        }
        for op, calls in count_operators(graph).items()
    ]
    return {
        "name": graph.name,
        **vars(compute_totals(graph)),
        "memory_byte": graph.memory_byte,
        "assumptions": list(graph.assumptions),
        "ops": ops,
    }


def _print_graph(env: Environment, graph: Graph, about: dict[str, Any] | None, held: dict[str, Any] | None) -> None:
    from rich.markup import escape

    from wattcast.report.text_tables import new_table
    from wattcast.workload.graph import compute_totals, count_operators

    console, sums = env.console(), compute_totals(graph)
    if about is not None:
        console.print(
            f"[bold]{escape(about['title'])}[/bold], {about['parameters'] / 1e9:.4g} G parameters", highlight=False
        )
        dims = ", ".join(f"{name} {value}" for name, value in about["dims"].items() if value)
        console.print(f"{escape(dims)}\nsource: {escape(about['source'])}\n", style="dim", highlight=False)
    console.print(f"[bold]{escape(graph.name)}[/bold]", highlight=False)
    head = new_table("", "")
    head.add_row("operators issued", str(sums.calls))
    head.add_row("arithmetic", show(sums.flop, "flop"))
    head.add_row("products, as run", show(sums.product_flop, "flop"))
    head.add_row("products, causal mask ignored", show(sums.product_flop_dense, "flop"))
    head.add_row("bytes read and written", show(sums.byte, "byte"))
    for key, value in (held or {}).items():
        words = key.removesuffix("_byte").replace("_", " ")
        head.add_row(f"memory: {words}", show(value, "byte") if key.endswith("_byte") else str(value))
    console.print(head)
    rows = new_table("operator", "where", "calls", "FLOP", "bytes", left=("where",))
    ranked = list(count_operators(graph).items())
    for op, count in ranked[:MOST_ROWS]:
        work = show(op.flop * count, "flop", 3), show((op.read_byte + op.write_byte) * count, "byte", 3)
        rows.add_row(escape(str(op)), escape(op.label), str(count), *work)
    if len(ranked) > MOST_ROWS:
        rows.add_row(f"... {len(ranked) - MOST_ROWS} more (all in --json)", "", "", "", "")
    console.print(rows)
    console.print("Assumed", style="bold")
    for note in graph.assumptions:
        console.print(f"  - {escape(note)}", style="dim", highlight=False)
