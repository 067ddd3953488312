"""``wattcast gpus`` and ``wattcast models``: what the catalogue and workload files hold."""

from __future__ import annotations

from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from rich.console import Console
from rich.markup import escape

from wattcast.cli.command_builder import command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import WORKLOAD
from wattcast.cli.component_commands import EnergyOptions, show_bottom_up
from wattcast.core.errors import bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse, show
from wattcast.core.whole_files import write_whole
from wattcast.options.power_series_options import NodeConditions
from wattcast.options.run_options import ModelOptions
from wattcast.report.text_tables import (
    new_table,
    print_notes,
    print_rows,
)

if TYPE_CHECKING:
    from wattcast.hardware import Gpu
    from wattcast.predictor.bundle import Bundle
    from wattcast.workload.graph import Graph
    from wattcast.workload.model_catalogue import ModelSpec
    from wattcast.workload.model_options import ModelOptions


@command("gpus list")
def list_gpus() -> CommandOutput:
    """List the catalogue: data-centre cards, then workstations, then cards that only papers
    measured.
    """
    from wattcast import hardware
    from wattcast.hardware.gpu import CardUse
    from wattcast.predictor.bundle import bundle_for

    gpus = sorted(
        map(hardware.load_gpu, hardware.gpu_names()), key=lambda gpu: list(CardUse).index(gpu.use)
    )
    rows = [_gpu_summary(gpu) | _describe_coefficients(gpu, bundle_for(gpu)) for gpu in gpus]
    columns = {
        "name": "gpu",
        "architecture": "architecture",
        "sm_count": "SMs",
        "max_clock_hz": "top clock",
    }
    columns |= {name: name for name in ("memory", "bandwidth")}
    columns |= {"power_limit_w": "limit", "coefficients": "coefficients"}
    columns |= {"held_out": "held out, %"}
    shown = [row | {"bandwidth": show(row["memory_byte_per_s"], "byte/s", 3)} for row in rows]
    shown = [
        row | {"memory": f"{show(row['memory_byte'], 'byte', 3)} {row['memory_kind']}"}
        for row in shown
    ]
    for row in shown:
        errors = row["errors_percent"].items()
        row["held_out"] = ", ".join(f"{family} {percent:.0f}" for family, percent in errors)
    return CommandOutput({"gpus": rows}, lambda console: print_rows(console, shown, columns))


def _describe_coefficients(gpu: Gpu, bundle: Bundle) -> dict[str, Any]:
    """Say whether a card was measured, calibrated or forecast, by what rows, with which errors."""
    from wattcast.predictor.bundle.held_out_errors import read_held_out_errors

    errors = read_held_out_errors(gpu.name)
    return {
        "coefficients": str(bundle.status),
        "rows": bundle.provenance.source,
        "rows_note": bundle.provenance.note,
        "errors_percent": {error.family: error.percent for error in errors},
        "rows_held_out": {error.family: error.rows for error in errors},
    }


@command("gpus nodes")
def list_nodes() -> CommandOutput:
    """List the nodes: how GPUs are joined, and the network between nodes (`predict --node`)."""
    from wattcast.hardware.catalogue_reader import load_node, node_names

    nodes = [load_node(name) for name in node_names()]
    keys = (
        "name",
        "title",
        "gpus",
        "gpu_count",
        "fabric",
        "multicast",
        "network",
        "network_byte_per_s",
    )
    plain = []
    listing = new_table(
        "node",
        "GPUs",
        "of",
        "fabric",
        "network of each GPU, one way",
    )
    for node in nodes:
        row = {key: getattr(node, key) for key in keys}
        row["sources"] = {key: claim.source for key, claim in node.claims.items()}
        plain.append(row)
        rate = node.network_byte_per_s
        network = "unknown" if rate is None else f"{show(rate, 'byte/s', 3)}, {node.network}"
        listing.add_row(
            node.name,
            str(node.gpu_count),
            ", ".join(node.gpus) or "any",
            str(node.fabric),
            network,
        )
    return CommandOutput({"nodes": plain}, lambda console: console.print(listing))


@command("gpus systems")
def list_systems(
    conditions: NodeConditions,
    system: Annotated[
        str | None, Option("Show one system, part by part: dgx-h100, or your own YAML file.")
    ] = None,
) -> CommandOutput:
    """List servers with all that stands around the GPUs, and what they draw at the plug.

    Example: wattcast gpus systems --system dgx-h100 --gpu-power 650W --inlet 30C
    """
    from wattcast.hardware.node_systems import (
        find_system,
        load_system,
        system_names,
    )
    from wattcast.timeseries.node_report import (
        describe_node,
        print_node,
        print_nodes,
    )

    if system is not None:
        drawn = describe_node(
            find_system(system, Path()), conditions.gpu_power_w, conditions.inlet_c
        )
        return CommandOutput(drawn.to_dict(), lambda console: print_node(console, drawn))
    listed = [
        describe_node(load_system(n), conditions.gpu_power_w, conditions.inlet_c)
        for n in system_names()
    ]
    plain = {"systems": [node.to_dict() for node in listed]}
    return CommandOutput(plain, lambda console: print_nodes(console, listed))


@command("gpus show")
def show_gpu(
    env: Environment,
    name: Annotated[
        str,
        Option(
            "Catalogue name or your own YAML file; with --energies also an architecture file.",
            positional=True,
        ),
    ],
    build: EnergyOptions,
) -> CommandOutput:
    """Show every number of one GPU with its source; what is unknown, and why.

    Example: wattcast gpus show h200 --energies --change registers=2
    """
    from wattcast.hardware.catalogue_reader import list_boards
    from wattcast.hardware.gpu import list_published_numbers
    from wattcast.predictor.api import find_gpu
    from wattcast.predictor.bundle import bundle_for

    if build.energies:
        return show_bottom_up(env, name, build)
    if build != EnergyOptions():
        settings = "--feature-size, --voltage, --temperature, --change, --dialect, --save, --plot"
        raise bad_value(settings, "--energies as well", "none")
    gpu = find_gpu(name)
    numbers = list_published_numbers(gpu)
    boards = list_boards(gpu.name)
    fitted = _describe_coefficients(gpu, bundle_for(gpu))
    plain = _gpu_summary(gpu) | fitted
    plain |= {
        "numbers": numbers,
        "unknown": dict(gpu.unknown),
        "boards": boards,
    }

    def print_text(console: Console) -> None:
        _print_gpu(console, gpu, numbers, boards)
        console.print(_word_coefficients(fitted))

    return CommandOutput(plain, print_text)


def _word_coefficients(fitted: dict[str, Any]) -> str:
    """Say in a sentence what stands behind the predictions of a card."""
    words = [f"coefficients: {fitted['coefficients']}", fitted["rows"], fitted["rows_note"]]
    for family, percent in fitted["errors_percent"].items():
        count = fitted["rows_held_out"][family]
        words.append(f"{family} {percent:g} % off on {count} rows held out")
    return escape("; ".join(word for word in words if word))


def _print_gpu(
    console: Console,
    gpu: Gpu,
    numbers: list[dict[str, Any]],
    boards: dict[str, str],
) -> None:
    console.print(f"[bold]{escape(gpu.name)}[/bold]  {escape(gpu.title)}, {escape(gpu.process)}")
    listing = new_table("field", "value", "source", left=("source",))
    for row in numbers:
        disputes = "".join(f"; disputed: {value} by {source}" for value, source in row["disputed"])
        note = f" ({row['note']})" if row["note"] else ""
        listing.add_row(
            str(row["field"]), f"{row['value']:.6g}", escape(f"{row['source']}{note}{disputes}")
        )
    console.print(listing)
    for path, why in gpu.unknown.items():
        console.print(f"unknown: {path}: {escape(why)}", style="dim")
    for board, part_number in boards.items():
        console.print(
            f"board {part_number} (by `nvidia-smi -q`) was measured apart: `--gpu {board}`"
        )


def _gpu_summary(gpu: Gpu) -> dict[str, Any]:
    return {
        **{name: getattr(gpu, name) for name in ("name", "title", "vendor", "architecture")},
        "sm_count": float(gpu.sm_count),
        "max_clock_hz": float(gpu.clocks.max_hz),
        "memory_kind": gpu.memory.kind,
        "memory_byte": float(gpu.memory.capacity_byte),
        "memory_byte_per_s": float(gpu.memory.byte_per_s),
        "power_limit_w": float(gpu.power.limit_w),
    }


@command("models list")
def list_models() -> CommandOutput:
    """List the models of the catalogue with their kind, architecture and parameters."""
    from wattcast.workload import model_catalogue

    rows = [
        _model_summary(model_catalogue.load_model(name)) for name in model_catalogue.list_models()
    ]
    columns = {
        "name": "model",
        **{name: name for name in ("title", "kind", "architecture", "parameters")},
    }
    shown = [row | {"parameters": f"{row['parameters'] / 1e9:.4g} G"} for row in rows]
    text_columns = ("title", "kind", "architecture")
    return CommandOutput(
        {"models": rows}, lambda console: print_rows(console, shown, columns, left=text_columns)
    )


def _model_summary(model: ModelSpec) -> dict[str, Any]:
    from wattcast.workload.build_model import count_parameters

    names = ("name", "title", "kind", "architecture", "parameters", "source", "note")
    summary = {name: getattr(model, name, None) for name in names}
    return summary | {"kind": str(model.kind), "parameters": count_parameters(model)}


MOST_ROWS = 60


@command("models show", ModelOptions)
def show_model(
    workload: Annotated[str, WORKLOAD],
    capacity: Annotated[
        str | None,
        Option(
            "Device memory, such as 80GB: say whether it fits, and the largest batch that does."
        ),
    ] = None,
    **options: Any,
) -> CommandOutput:
    """Show dimensions and source of a model; operators, FLOPs and bytes of a workload; memory by
    purpose.

    Example: wattcast models show llama3-8b --batch 8 --seq 1024 --phase decode --capacity 80GB
    """
    from dataclasses import asdict

    from wattcast.workload.model_options import ModelOptions
    from wattcast.workload.readers import load_workload

    chosen = ModelOptions.from_names(**options)
    graph = load_workload.load_workload(workload, chosen)
    model = load_workload.find_model(workload)
    memory = _describe_memory(model, chosen, capacity)
    about = None
    if model is not None:
        pipeline = None if model.pipeline is None else asdict(model.pipeline)
        about = _model_summary(model) | {"dims": asdict(model.dims), "pipeline": pipeline}
    return CommandOutput(
        lambda: summarise_graph(graph) | {"model": about, "memory": memory},
        lambda console: _print_graph(console, graph, about, memory),
    )


@command("models save", ModelOptions)
def save_model(
    env: Environment,
    workload: Annotated[str, WORKLOAD],
    file: Annotated[Path, Option("Workload JSON to write.", positional=True)],
    **options: Any,
) -> CommandOutput:
    """Save a workload as JSON that `predict` and `models show` take back."""
    import msgspec

    from wattcast.workload.model_options import ModelOptions
    from wattcast.workload.readers import from_json, load_workload

    graph = load_workload.load_workload(workload, ModelOptions.from_names(**options))
    plain = msgspec.json.encode(from_json.graph_to_plain(graph))
    write_whole(file, msgspec.json.format(plain, indent=1) + b"\n")
    env.say(f"{graph.name} saved: {file}")
    return CommandOutput(
        {
            "name": graph.name,
            "file": str(file),
            "blocks": len(graph.blocks),
        },
        "",
    )


def _describe_memory(
    model: ModelSpec | None,
    options: ModelOptions,
    capacity: str | None,
) -> dict[str, Any] | None:
    """Return bytes by purpose and what fits; None for a list of operators, which does not say."""
    from wattcast.workload import build_model

    if model is None:
        if capacity is not None:
            raise bad_value(
                "--capacity",
                "a model",
                "a list of operators",
                "A list does not say what memory it holds.",
            )
        return None
    footprint = build_model.compute_footprint(model, options)
    memory: dict[str, Any] = {**vars(footprint), "total_byte": footprint.total_byte}
    if capacity is not None:
        byte = parse(capacity, "byte", "--capacity")
        largest = build_model.find_largest_batch(model, options, byte)
        memory |= {
            "capacity_byte": byte,
            "fits": footprint.fits(byte),
            "largest_batch": largest,
        }
    return memory


def summarise_graph(graph: Graph) -> dict[str, Any]:
    """Return a graph as plain data: totals, then each distinct operator with the work of all its
    calls.
    """
    from wattcast.workload.graph import compute_totals, count_operators
    from wattcast.workload.readers.from_json import operator_to_plain

    ops = []
    for op, calls in count_operators(graph).items():
        shape = operator_to_plain(op)
        for not_shape in ("op", "count", "label"):
            shape.pop(not_shape, None)
        ops.append(
            {
                "name": op.name,
                "shape": shape,
                "label": op.label,
                "count": calls,
                "flop": op.flop * calls,
                "byte": (op.read_byte + op.write_byte) * calls,
                "flop_per_call": op.flop,
                "read_byte_per_call": op.read_byte,
                "write_byte_per_call": op.write_byte,
            }
        )
    return {
        "name": graph.name,
        **vars(compute_totals(graph)),
        "memory_byte": graph.memory_byte,
        "assumptions": list(graph.assumptions),
        "ops": ops,
    }


def _describe_pipeline(pipeline: dict[str, Any]) -> str:
    """Say what makes a whole picture with a denoiser, and where that is from."""
    encoders = [f"{part['model']} on {part['tokens']} tokens" for part in pipeline["encoders"]]
    decoder = pipeline["decoder"] or "no decoder here"
    parts = ", ".join([*encoders, f"{pipeline['steps']} denoising steps", decoder])
    return escape(f"a {pipeline['item']}: {parts}\nsource: {pipeline['source']}\n")


def _print_graph(
    console: Console,
    graph: Graph,
    about: dict[str, Any] | None,
    held: dict[str, Any] | None,
) -> None:
    from wattcast.workload.graph import compute_totals, count_operators

    sums = compute_totals(graph)
    if about is not None:
        console.print(
            f"[bold]{escape(about['title'])}[/bold], {about['parameters'] / 1e9:.4g} G parameters"
        )
        dims = ", ".join(f"{name} {value}" for name, value in about["dims"].items() if value)
        console.print(f"{escape(dims)}\nsource: {escape(about['source'])}\n", style="dim")
        if about["pipeline"] is not None:
            console.print(_describe_pipeline(about["pipeline"]), style="dim")
    console.print(f"[bold]{escape(graph.name)}[/bold]")
    totals = {"operators issued": str(sums.calls), "arithmetic": show(sums.flop, "flop")}
    totals |= {"products, as run": show(sums.product_flop, "flop")}
    totals |= {"products, causal mask ignored": show(sums.product_flop_dense, "flop")}
    totals |= {"bytes read and written": show(sums.byte, "byte")}
    for key, value in (held or {}).items():
        words = key.removesuffix("_byte").replace("_", " ")
        totals[f"memory: {words}"] = show(value, "byte") if key.endswith("_byte") else str(value)
    console.print(new_table("", "", rows=totals.items()))
    rows = new_table(
        "operator",
        "where",
        "calls",
        "FLOP",
        "bytes",
        left=("where",),
    )
    ranked = list(count_operators(graph).items())
    for op, count in ranked[:MOST_ROWS]:
        work = (
            show(op.flop * count, "flop", 3),
            show((op.read_byte + op.write_byte) * count, "byte", 3),
        )
        rows.add_row(escape(str(op)), escape(op.label), str(count), *work)
    if len(ranked) > MOST_ROWS:
        rows.add_row(
            f"... {len(ranked) - MOST_ROWS} more (all in --json)",
            "",
            "",
            "",
            "",
        )
    console.print(rows)
    print_notes(console, graph.assumptions)
