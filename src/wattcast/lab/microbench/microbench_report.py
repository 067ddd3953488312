"""Show microbenchmark results and tuning advice as tables (MIPP paper, I to IV) and figures (6 to
8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from wattcast.core.regular_files import read_shipped_table
from wattcast.hardware import Gpu
from wattcast.lab.campaigns.database_files import make_pipe_table
from wattcast.lab.microbench import microbench_results
from wattcast.lab.microbench.microbench_results import (
    MicroRow,
    find_curve,
    find_fault,
    find_levels,
    keep_first_rounds,
)
from wattcast.lab.microbench.tuning import TuningReport
from wattcast.report.figure_style import (
    MODULE_COLOURS,
    FigureMaker,
    add_caption,
    new_axes,
    new_figure,
)
from wattcast.report.text_tables import new_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUPS = ("arithmetic", "tensor", "memory", "transfer", "structure", "mix", "multimedia", "idle")
SPECIFIED = "specified_per_cycle_sm"
# name in JSON: attribute of a row, heading in the table (none: not shown), scale and digits there
NUMBERS: dict[str, tuple[str, str, float, int]] = {
    row["name"]: (row["attribute"], row["heading"], float(row["scale"]), int(row["digits"]))
    for row in read_shipped_table("wattcast.lab.microbench", "report_columns.csv")
}
COLUMNS = (
    "benchmark",
    "counted",
    *(heading for _, heading, _, _ in NUMBERS.values() if heading),
    "ticks",
)
FOOTNOTE = (
    "* the largest of the sensor's readings in the window, which may miss shorter peaks; "
    "rates are per true cycle and SM; "
    "† not what its name says, ‡ below its unit's limit: why is told in "
    "microbench/microbench_faults.csv"
)
COMPARED = {
    "per_cycle_sm": 1.0,
    "above_idle_j": 1e9,
}  # of two devices: name in JSON, scale in the table
Row = list[str]


def _read_numbers(r: MicroRow, gpu: Gpu) -> dict[str, float | None]:
    return {
        name: microbench_results.find_specified_rate(gpu, r)
        if name == SPECIFIED
        else getattr(r, attribute)
        for name, (attribute, _, _, _) in NUMBERS.items()
    }


def mark_name(r: MicroRow) -> str:
    """Return a benchmark's name, with a mark where its kernel is known to have a fault."""
    fault = find_fault(r)
    return r.name + ("" if fault is None else " †" if fault.kind == "wrong" else " ‡")


def _format_number(
    value: float | None,
    scale: float = 1.0,
    digits: int = 4,
) -> str:
    return "-" if value is None else f"{value * scale:.{digits}g}"


def list_tables(results: Sequence[MicroRow], gpu: Gpu) -> dict[str, list[Row]]:
    """Return the head and rows of every table by its title: one a group, latencies, devices and
    what must hold.
    """
    groups: dict[str, list[Row]] = {group: [list(COLUMNS)] for group in GROUPS}
    for r in keep_first_rounds(results).values():  # of a benchmark that was measured twice
        if r.group in groups:
            shown = [(value, *NUMBERS[name][1:]) for name, value in _read_numbers(r, gpu).items()]
            cells = [
                _format_number(value, scale, digits)
                for value, heading, scale, digits in shown
                if heading
            ]
            groups[r.group].append(
                [mark_name(r), r.operation, *cells, str(r.ticks) if r.ticks else "-"]
            )
    return {
        **groups,
        "Latencies": make_latency_rows(results, gpu),
        "Devices side by side": make_device_rows(results, gpu),
        "What must hold": make_truth_rows(results, gpu),
    }


def make_tables(results: Sequence[MicroRow], gpu: Gpu) -> list[Table]:
    """Return all tables for a terminal; the last two have no title and are always there."""
    tables = []
    titles = [*(f"{group} on {gpu.name}" for group in (*GROUPS, "latency")), None, None]
    for title, rows in zip(titles, list_tables(results, gpu).values(), strict=True):
        if len(rows) > 1 or title is None:
            tables.append(new_table(*rows[0], title=title, rows=rows[1:]))
            for column in tables[-1].columns[: 2 if title else 0]:
                column.no_wrap = True
    return tables


def make_device_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Compare this device with the paper's two: operations per cycle and SM, and nJ per operation.

    Memory benchmarks of the paper count transactions of a warp or less, ours accesses of a thread:
    they are not comparable one to one, and only arithmetic stands here."""
    devices = ("gtx-660", "tegra-k1")
    head = [
        "benchmark",
        *(f"{d} {what}" for d in (*devices, gpu.name) for what in ("/cycle/SM", "nJ")),
    ]
    by_name = keep_first_rounds(results)
    rows = [head]
    for ours in dict.fromkeys(
        p.ours for p in microbench_results.read_mipp_values() if p.table in ("I", "II")
    ):
        cells = [ours]
        for device in devices:
            p = next(
                p
                for p in microbench_results.read_mipp_values()
                if p.device == device and p.ours == ours
            )
            cells += [f"{p.real_per_cycle_sm:g}", f"{p.operation_j * 1e9:.3g}"]
        r = by_name.get(ours)
        our_figures = (r.operations_per_cycle_sm, r.operation_j) if r else (None, None)
        rows.append([*cells, _format_number(our_figures[0]), _format_number(our_figures[1], 1e9)])
    return rows


def make_latency_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """List cycles and nanoseconds of each latency, and what others measured on cards of the same
    architecture.
    """
    rows: list[Row] = [["latency", "of", "cycles", "ns", "others"]]
    for r in keep_first_rounds(results).values():
        if not r.latency_cycles or r.curve in LATENCY_CURVES:
            continue
        figures = _format_number(r.latency_cycles), _format_number(r.latency_s, 1e9, 3)
        rows.append([r.name.removeprefix("latency_"), r.operation, *figures, _quote_others(r, gpu)])
    for curve, (_, title) in LATENCY_CURVES.items():
        points = {r.at: r for r in find_curve(results, curve)}
        for level in find_levels(results, curve):
            inside = [r for at, r in points.items() if level.least_byte <= at <= level.most_byte]
            quoted = ", ".join(filter(None, (_quote_others(r, gpu) for r in inside)))
            ns = 1e9 * level.cycles / (inside[0].effective_clock_hz or float("nan"))
            sizes = " to ".join(_format_size(byte) for byte in (level.least_byte, level.most_byte))
            rows.append([f"{title}, {sizes}", "load", f"{level.cycles:.4g}", f"{ns:.3g}", quoted])
    return rows


def _format_size(byte: float) -> str:
    power = min(int(byte).bit_length() - 1, 30) // 10
    return f"{byte / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _quote_others(r: MicroRow, gpu: Gpu) -> str:
    """Name what others measured on the architecture of ``gpu``."""
    if gpu.compute_capability != "9.0":
        return ""
    published = [
        row
        for row in microbench_results.read_published("hopper_latencies.csv")
        if row["ours"] == r.name
    ]
    return ", ".join(f"{row['value']} ({row['device']})" for row in published)


def compare_results(
    results: Sequence[MicroRow], second_results: Sequence[MicroRow]
) -> list[dict[str, object]]:
    """Set two devices side by side: benchmarks of both, rates of an SM, energies above idle, and
    ratios.
    """
    theirs = keep_first_rounds(second_results)
    rows = []
    for name, a in keep_first_rounds(results).items():
        b = theirs.get(name)
        if b is None or a.version != b.version:
            continue
        times = (a.operation_s or a.latency_s, b.operation_s or b.latency_s)
        if not (times[0] and times[1]):
            continue
        row: dict[str, object] = {
            "benchmark": name,
            "operation": a.operation,
            "time_ratio": times[1] / times[0],
        }
        if a.operation_above_idle_j and b.operation_above_idle_j:
            row["energy_ratio"] = b.operation_above_idle_j / a.operation_above_idle_j
        for which, r in (("first", a), ("second", b)):
            latency = {"latency_cycles": r.latency_cycles} if r.latency_cycles else {}
            values = r.operations_per_cycle_sm, r.operation_above_idle_j
            row[which] = latency | dict(zip(COMPARED, values, strict=True))
        rows.append(row)
    return rows


def draw_comparison(
    rows: Sequence[dict[str, Any]],
    first: str,
    second: str,
) -> Figure:
    """Draw time and energy above idle of every benchmark on the second device over the first."""
    figure, axes = new_axes(8.0, 1.2 + 0.2 * len(rows))
    for key, label, colour in (
        ("time_ratio", "time", "dram"),
        ("energy_ratio", "energy above idle", "tensor"),
    ):
        points = [(row[key], place) for place, row in enumerate(rows) if row.get(key)]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                "o",
                markersize=4,
                color=MODULE_COLOURS[colour],
                label=label,
            )
    axes.axvline(1.0, color="black", linewidth=0.8)
    ratios = [
        float(row[key]) for row in rows for key in ("time_ratio", "energy_ratio") if row.get(key)
    ]
    if max(ratios) > 3.0 * min(ratios):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(rows)), [row["benchmark"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_xlabel(f"{second} over {first}: an operation, of which less is better")
    axes.legend(frameon=False, loc="lower right")
    return add_caption(figure, f"`wattcast lab microbench --show {first} --against {second}`")


def make_comparison_table(
    rows: Sequence[dict[str, Any]],
    first: str,
    second: str,
) -> Table:
    """Return the table of ``compare_results``: second over first."""
    heads = [f"{name} {what}" for name in (first, second) for what in ("/cycle/SM", "nJ")]
    built = new_table("benchmark", *heads, "time", "energy", title=f"{second} over {first}")
    for row in rows:
        numbers = (
            (row[which][name], scale)
            for which in ("first", "second")
            for name, scale in COMPARED.items()
        )
        cells = [_format_number(value, scale) for value, scale in numbers]
        built.add_row(
            row["benchmark"],
            *cells,
            f"{row['time_ratio']:.3f}",
            _format_number(row.get("energy_ratio")),
        )
    return built


def make_truth_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """List what measurements must confirm, and whether they do."""
    head: Row = ["must hold", "found", "at most", ""]
    truths = microbench_results.check_truths(results, gpu)
    return [
        head,
        *(
            [t.statement, f"{t.deviation:.2%}", f"{t.must:.0%}", "yes" if t.holds else "NO"]
            for t in truths
        ),
    ]


def make_results_page(results: Sequence[MicroRow], gpu: Gpu) -> str:
    """Write all tables as a Markdown page."""
    tables = list_tables(results, gpu).items()
    parts = [f"## {title}\n\n{make_pipe_table(rows)}" for title, rows in tables if len(rows) > 1]
    return "\n\n".join(parts) + f"\n\n{FOOTNOTE}\n"


def results_to_plain(results: Sequence[MicroRow], gpu: Gpu) -> dict[str, object]:
    """Return the results as JSON-ready values."""
    rows = []
    for r in results:
        base: dict[str, object] = {
            "name": r.name,
            "group": r.group,
            "repeat": r.repeat,
            "operation": r.operation,
        }
        at = {"curve": r.curve, "at": r.at} if r.curve else {}
        numbers = {
            name: value for name, value in _read_numbers(r, gpu).items() if value is not None
        }
        rows.append(base | at | numbers | {"ticks": r.ticks or 0})
    truths = [asdict(t) | {"holds": t.holds} for t in microbench_results.check_truths(results, gpu)]
    return {
        "gpu": gpu.name,
        "results": rows,
        "truths": truths,
        "repeatability": microbench_results.compare_rounds(results),
    }


MOST_COMBINED = 3  # pairs of changes shown below the single ones


def make_advice_table(tuning: TuningReport) -> Table:
    """Return the bottlenecks that matter, most joules first, and the best pairs of changes."""
    nothing = "Nothing this profile shows would change time or energy by more than half a percent."
    title = None if tuning.advice else nothing
    built = new_table(
        "kernel",
        "bottleneck",
        "seen",
        "time",
        "between",
        "power",
        "energy",
        title=title,
        left=("seen",),
    )
    for a in (*tuning.advice, *tuning.combined[:MOST_COMBINED]):
        between = "{:+.0%} and {:+.0%}".format(*a.time_range)
        changes = (f"{a.time:+.1%}", between, f"{a.power:+.1%}", f"{a.energy:+.1%}")
        built.add_row(a.kernel[:60], a.bottleneck, a.seen, *changes)
    return built


def tuning_to_plain(tuning: TuningReport) -> dict[str, object]:
    """Return the advice as JSON-ready values."""
    return {
        "kernels": [
            {
                "name": p.name,
                "time_s": p.time_s,
                "busiest": p.busiest,
                "energy_j": p.energy_j,
            }
            for p in tuning.profiles
        ],
        "advice": tuning.advice,
        "combined": tuning.combined,
        "not_judged": tuning.missing,
    }


LATENCY_CURVES = {  # curve: title of its panel, name of a plateau
    "ring": ("Ring of lines", "ring of lines"),
    "pages": ("One line in every 2 MiB", "one line a page"),
}
CURVES = {
    row.pop("curve"): row for row in read_shipped_table("wattcast.lab.microbench", "curves.csv")
}
BY_BYTE = ("access",)  # an operation moves as many bytes as the axis says


def draw_curve(
    results: Sequence[MicroRow],
    name: str,
    gpu: Gpu,
    source: str,
) -> Figure:
    """Draw time and energy of an operation, and mean and maximum power, along a curve (figures 6 to
    8).
    """
    title, axis, logarithmic = CURVES[name].values()
    points = [r for r in find_curve(results, name) if r.operation_s and r.operation_j and r.power_w]
    figure = new_figure(9.0, 3.8)
    cost_axes, power_axes = figure.subplots(1, 2)
    x = [r.at for r in points]
    amounts = [r.at if name in BY_BYTE else 1.0 for r in points]
    time = [(r.operation_s or 0.0) / n for r, n in zip(points, amounts, strict=True)]
    energy = [(r.operation_j or 0.0) / n for r, n in zip(points, amounts, strict=True)]
    cost_axes.plot(
        x,
        [seconds / min(time) for seconds in time],
        "o-",
        color=MODULE_COLOURS["dram"],
        label="time",
    )
    cost_axes.plot(
        x,
        [joules / min(energy) for joules in energy],
        "s--",
        color=MODULE_COLOURS["tensor"],
        label="energy",
    )
    cost_axes.set_ylabel(
        f"Of {'a byte' if name in BY_BYTE else 'an operation'}, over the best point"
    )
    power_axes.plot(
        x, [r.power_w or 0.0 for r in points], "o-", color=MODULE_COLOURS["shared"], label="average"
    )
    largest = [(r.at, r.max_power_w) for r in points if r.max_power_w]
    if largest:
        power_axes.plot(
            *zip(*largest, strict=True),
            "^:",
            color=MODULE_COLOURS["link"],
            label="largest sensor reading",
        )
    power_axes.set_ylabel("Power (W)")
    power_axes.set_ylim(
        0.0, 1.2 * max((r.max_power_w or r.power_w or 1.0 for r in points), default=1.0)
    )
    for axes in (cost_axes, power_axes):
        axes.set_xlabel(axis)
        axes.legend(frameon=False)
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_xticks(
                x, [f"{value / 1024:g}" if name == "icache" else f"{value:g}" for value in x]
            )
    if max(time) / min(time) > 6.0:
        cost_axes.set_yscale("log", base=2)
        cost_axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.suptitle(f"{title}: {gpu.title}")
    faults = [fault for r in points if (fault := find_fault(r)) is not None]
    return add_caption(
        figure, source + (f". To be measured again: {faults[0].why}" if faults else "")
    )


def draw_latencies(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> Figure:
    """Draw cycles of a load over the memory that a ring of addresses takes: caches, and address
    translation.
    """
    figure = new_figure(9.0, 3.8)
    for axes, (curve, (title, _)) in zip(
        figure.subplots(1, 2), LATENCY_CURVES.items(), strict=True
    ):
        points = [r for r in find_curve(results, curve) if r.latency_cycles]
        axes.plot(
            [r.at for r in points],
            [r.latency_cycles for r in points],
            "o",
            color=MODULE_COLOURS["dram"],
        )
        for level in find_levels(results, curve):
            axes.hlines(
                level.cycles,
                level.least_byte,
                level.most_byte,
                color=MODULE_COLOURS["tensor"],
                linewidth=1,
            )
            axes.annotate(
                f"{level.cycles:.0f}",
                (level.least_byte, level.cycles),
                (0, 5),
                textcoords="offset points",
            )
        axes.set_xscale("log", base=2)
        ticks = [r.at for r in points if np.log2(r.at) % 4 == 0]
        axes.set_xticks(ticks, [_format_size(at) for at in ticks])
        axes.set_ylim(0.0, 1.15 * max(r.latency_cycles or 0.0 for r in points))
        axes.set_xlabel("Size")
        axes.set_ylabel("Latency of a load (cycles)")
        axes.set_title(title)
    figure.suptitle(gpu.title)
    return add_caption(figure, source)


def draw_throughput(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> Figure:
    """Draw operations per cycle and SM against the specification, where one is stated."""
    measured = [r for r in keep_first_rounds(results).values() if r.operations_per_cycle_sm]
    specified = [
        (r, spec) for r in measured if (spec := microbench_results.find_specified_rate(gpu, r))
    ]
    figure, axes = new_axes(8.0, 0.9 + 0.24 * len(specified))
    share = [(r.operations_per_cycle_sm or 0.0) / spec for r, spec in specified]
    axes.barh(range(len(specified)), share, color=MODULE_COLOURS["l2"])
    axes.axvline(1.0, color="black", linewidth=0.8)
    for place, (r, spec) in enumerate(specified):
        axes.text(0.02, place, f"{r.operations_per_cycle_sm:.4g} of {spec:g}", va="center")
    axes.set_yticks(range(len(specified)), [r.name for r, _ in specified])
    axes.set_ylim(len(specified) - 0.4, -0.6)
    axes.set_xlabel("Measured over specified, operations per true cycle and SM")
    axes.set_title(gpu.title)
    return add_caption(figure, source)


def draw_energy(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> Figure:
    """Draw the energy of an arithmetic operation and of a byte, with idle power and above it."""
    rows = [r for r in keep_first_rounds(results).values() if not r.curve and r.operation_j]
    rows = [r for r in rows if not mark_name(r).endswith("†")]
    arithmetic = sorted(
        (r for r in rows if r.group == "arithmetic"), key=lambda r: r.operation_j or 0.0
    )
    memory = sorted(
        (r for r in rows if r.group == "memory" and r.byte),
        key=lambda r: (r.energy_j or 0.0) / (r.byte or 1.0),
    )
    figure = new_figure(9.6, 1.2 + 0.22 * max(len(arithmetic), len(memory)))
    arithmetic_axes, memory_axes = figure.subplots(1, 2)
    _plot_energies(
        arithmetic_axes,
        arithmetic,
        [1.0] * len(arithmetic),
        [f"{r.name} ({r.operation})" for r in arithmetic],
    )
    _plot_energies(
        memory_axes,
        memory,
        [(r.byte or 1.0) / (r.operations or 1.0) for r in memory],
        [r.name for r in memory],
    )
    arithmetic_axes.set_xlabel("Energy (pJ) of an operation of one thread")
    memory_axes.set_xlabel("Energy (pJ) of a byte")
    arithmetic_axes.legend(frameon=False, loc="lower right")
    figure.suptitle(gpu.title)
    return add_caption(figure, source)


def _plot_energies(
    axes: Axes,
    rows: Sequence[MicroRow],
    amounts: Sequence[float],
    labels: Sequence[str],
) -> None:
    """Plot two dots a row: its joules over ``each``, with idle power and above it."""
    total = [1e12 * (r.operation_j or 0.0) / n for r, n in zip(rows, amounts, strict=True)]
    above = [
        1e12 * (r.operation_above_idle_j or 0.0) / n for r, n in zip(rows, amounts, strict=True)
    ]
    axes.plot(
        total, range(len(rows)), "o", color=MODULE_COLOURS["static"], label="idle power included"
    )
    axes.plot(above, range(len(rows)), "o", color=MODULE_COLOURS["tensor"], label="above idle")
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xscale("log")
    axes.grid(axis="y", linewidth=0.3)


def draw_devices(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> Figure:
    """Draw the energy of an arithmetic operation on the paper's devices and on this one."""
    names = list(
        dict.fromkeys(
            p.ours for p in microbench_results.read_mipp_values() if p.table in ("I", "II")
        )
    )
    by_name = keep_first_rounds(results)
    figure, axes = new_axes(8.0, 4.2)
    for device, colour, shift in (("gtx-660", "dram", -0.25), ("tegra-k1", "shared", 0.0)):
        of = {
            p.ours: p.operation_j * 1e9
            for p in microbench_results.read_mipp_values()
            if p.device == device
        }
        shifted = [i + shift for i in range(len(names))]
        axes.bar(shifted, [of[n] for n in names], 0.24, color=MODULE_COLOURS[colour], label=device)
    our_energies = [
        (i + 0.25, 1e9 * (by_name[n].operation_j or 0.0))
        for i, n in enumerate(names)
        if n in by_name
    ]
    if our_energies:
        places, heights = zip(*our_energies, strict=True)
        axes.bar(places, heights, 0.24, color=MODULE_COLOURS["tensor"], label=gpu.name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    axes.set_ylabel("Energy (nJ) of an operation, idle included")
    axes.legend(frameon=False)
    return add_caption(
        figure, source + "; GTX 660 and TK1: MIPP (2016), Tables I and II, errata applied"
    )


def make_microbench_figures(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> dict[str, FigureMaker]:
    """Return every figure that the results have points for, by file name."""
    figures: dict[str, FigureMaker] = {
        f"microbench-{name}": partial(draw_curve, results, name, gpu, source)
        for name in CURVES
        if len([r for r in find_curve(results, name) if r.operation_s and r.operation_j]) > 1
    }
    if all(find_curve(results, curve) for curve in LATENCY_CURVES):
        figures["microbench-latencies"] = partial(draw_latencies, results, gpu, source)
    figures["microbench-throughput"] = partial(draw_throughput, results, gpu, source)
    figures["microbench-energy"] = partial(draw_energy, results, gpu, source)
    figures["microbench-devices"] = partial(draw_devices, results, gpu, source)
    return figures
