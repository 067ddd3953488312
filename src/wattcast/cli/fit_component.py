"""``wattcast fit component RUNS.csv --measured COLUMN``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment

app = typer.Typer(help="Fit scaling factors or energies of the component model to measured power.")


@app.command()
def command(
    ctx: typer.Context,
    runs: Annotated[
        Path, typer.Argument(help="CSV, one line per kernel: components' watts (or counts) and measured watts.")
    ],
    measured: Annotated[str, typer.Option(help="Column of measured watts.")],
    prefix: Annotated[str, typer.Option(help="Component columns start with this.")] = "",
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="A column to fit; default: all with the prefix.")
    ] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="A column not to fit, such as a total.")] = None,
    energies: Annotated[
        bool, typer.Option("--energies", help="Columns are counts: fit joules per count, such as DRAM's.")
    ] = False,
    bottom_up: Annotated[
        Path | None,
        typer.Option(
            help="Architecture file: columns are counts, its bottom-up energies make them watts, factors are fitted."
        ),
    ] = None,
    kernel: Annotated[str, typer.Option(help="Column of kernel names.")] = "kernel",
    application: Annotated[
        str | None, typer.Option(help="Column of programs; default: from the kernel's name.")
    ] = None,
    duration: Annotated[str | None, typer.Option(help="Column of seconds.")] = None,
    cycles: Annotated[str | None, typer.Option(help="Column of cycles, with --clock, instead of seconds.")] = None,
    clock: Annotated[str | None, typer.Option(help="Core clock, such as 1447MHz.")] = None,
    shortest: Annotated[str, typer.Option(help="Kernels shorter than this are dropped.")] = "0.5 ms",
    bounds: Annotated[str, typer.Option(help="Bounds of every factor, declared beforehand.")] = "0.5:2",
    bound: Annotated[list[str] | None, typer.Option(help="Bounds of one: NAME=low:high; NAME=1:1 fixes it.")] = None,
    order: Annotated[list[str] | None, typer.Option(help="An ordering: 'A<=B' or 'A<=1.5*B'.")] = None,
    architecture: Annotated[Path | None, typer.Option(help="Architecture file to recalibrate.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write it, .xml or .yaml.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bounded least squares on relative error; held-out errors beside the in-sample one, always.

    Example: wattcast fit component runs.csv --measured watts --prefix part_ --leave-out total
    --architecture gpu.xml --out recalibrated.xml
    """
    from wattcast.errors import bad_value
    from wattcast.fit.component import ENERGIES, Constraints, Order, fit_energies, fit_scaling
    from wattcast.fit.component_runs import Columns, apply_factors, in_watts, read_runs
    from wattcast.power.component.architecture_yaml import read_architecture, write_architecture
    from wattcast.units import parse

    env: Environment = ctx.obj
    if (architecture is None) != (out is None):
        raise bad_value("--architecture and --out", "both or neither", "one")
    special = dict(_named_bounds(text) for text in bound or ())
    orders = tuple(Order.read(text) for text in order or ())
    layout = Columns(
        measured,
        kernel,
        application,
        duration,
        cycles,
        parse(clock, "Hz", "--clock") if clock else None,
        prefix,
        tuple(leave_out or ()),
    )
    if energies and bottom_up is not None:
        raise bad_value("--energies and --bottom-up", "one of them", "both")
    table = read_runs(runs, layout, columns, rates=energies or bottom_up is not None)
    if bottom_up is not None:
        from wattcast.power.component.bottom_up.table import energy_table, of_file

        built, dialect = of_file(bottom_up)
        table = in_watts(table, energy_table(built, dialect))
        env.say(f"note: {built.provenance}; its leakage and memory-controller constant are not fitted.")
    shortest_s = parse(shortest, "s", "--shortest")
    if energies:
        wide = Constraints(ENERGIES.bounds, special, orders, ENERGIES.prior_weight)
        found = fit_energies(table, wide, shortest_s)
    else:
        found = fit_scaling(table, Constraints(_bounds(bounds, "--bounds"), special, orders), shortest_s)
    if architecture is not None and out is not None:
        if energies:
            raise bad_value("--architecture", "factors", "energies", "Write energies into the architecture by hand.")
        factors = dict(zip(found.names, found.value.tolist(), strict=True))
        write_architecture(apply_factors(read_architecture(architecture), factors), out)
    if json:
        env.json(found.to_plain())
        return
    for name, value in zip(found.names, found.value.tolist(), strict=True):
        mark = " (at its bound)" if name in found.at_bound else "" if name in found.determined else " (not driven)"
        env.stdout.write(f"{name:16s} {value:12.5g}{' J' if energies else ''}{mark}\n")
    score = found.score
    env.stdout.write(
        f"MAPE over {found.kernels} kernels: {score.start:.2f} % before, {score.in_sample:.2f} % in sample, "
        f"{score.leave_one_out:.2f} % leave one out, {score.leave_application_out:.2f} % leave one application out; "
        f"a constant {score.constant:.2f} %\n"
    )
    if found.dropped:
        env.say(
            f"note: {len(found.dropped)} kernels shorter than {shortest} dropped: {', '.join(found.dropped[:5])} ..."
        )


def _named_bounds(text: str) -> tuple[str, tuple[float, float]]:
    from wattcast.errors import bad_value

    name, equals, rest = text.partition("=")
    if not equals:
        raise bad_value("--bound", "NAME=low:high", text)
    return name, _bounds(rest, "--bound")


def _bounds(text: str, where: str) -> tuple[float, float]:
    from wattcast.errors import bad_value

    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise bad_value(where, "low:high, such as 0.5:2", text) from None
