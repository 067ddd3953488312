"""Show microbenchmark results and tuning advice as tables (MIPP paper, I to IV) and figures (6 to
8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from wattcast.core.regular_files import read_shipped_table
from wattcast.core.units import show
from wattcast.hardware import Gpu
from wattcast.lab.campaigns.database_files import make_pipe_table
from wattcast.lab.microbench import microbench_results
from wattcast.lab.microbench.curve_findings import LATENCY_FINDINGS, list_findings
from wattcast.lab.microbench.microbench_results import (
    MicroRow,
    compute_costs,
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

    from wattcast.lab.microbench.source_page import HotLine

GROUPS = (
    *("arithmetic", "tensor", "memory", "transfer", "launch", "structure", "mix"),
    *("multimedia", "idle"),
)
SPECIFIED = "specified_per_cycle_sm"


@dataclass(frozen=True)
class ReportColumn:
    """A number of a row: its name in JSON, and how a table shows it."""

    name: str
    attribute: str  # of a row; empty: the specified rate
    heading: str  # empty: in no table
    scale: float
    digits: int


COLUMNS = tuple(
    ReportColumn(
        row["name"],
        row["attribute"],
        row["heading"],
        float(row["scale"]),
        int(row["digits"]),
    )
    for row in read_shipped_table("wattcast.lab.microbench", "report_columns.csv")
)
SHOWN_COLUMNS = tuple(column for column in COLUMNS if column.heading)
HEAD = ("benchmark", "counted", *(column.heading for column in SHOWN_COLUMNS), "ticks")
FOOTNOTE = (
    "* the largest of the sensor's readings in the window, which may miss shorter peaks; "
    "rates are per true cycle and SM; "
    "† not what its name says: why is told in microbench/microbench_faults.csv"
)
COMPARED = {
    "per_cycle_sm": 1.0,
    "above_idle_j": 1e9,
}  # of two devices: name in JSON, scale in the table
Row = list[str]


def _read_number(
    r: MicroRow,
    column: ReportColumn,
    gpu: Gpu,
) -> float | None:
    if column.name == SPECIFIED:
        return microbench_results.find_specified_rate(gpu, r)
    number: float | None = getattr(r, column.attribute)
    return number


def mark_name(r: MicroRow) -> str:
    """Return a benchmark's name, with a mark where its kernel is known to have a fault."""
    return r.name if find_fault(r) is None else f"{r.name} †"


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
    groups: dict[str, list[Row]] = {}
    for group in GROUPS:
        groups[group] = [list(HEAD)]
    for r in keep_first_rounds(results).values():  # of a benchmark that was measured twice
        if r.group not in groups:
            continue
        cells = [mark_name(r), r.operation]
        for column in SHOWN_COLUMNS:
            number = _read_number(r, column, gpu)
            cells.append(_format_number(number, column.scale, column.digits))
        cells.append(str(r.ticks) if r.ticks else "-")
        groups[r.group].append(cells)
    return {
        **groups,
        "Latencies": make_latency_rows(results, gpu),
        "Devices side by side": make_device_rows(results, gpu),
        "What curves tell": make_finding_rows(results),
        "What must hold": make_truth_rows(results, gpu),
    }


def make_tables(results: Sequence[MicroRow], gpu: Gpu) -> list[Table]:
    """Return all tables for a terminal; those of devices and of what must hold are always there,
    without a title.
    """
    tables = []
    titles: list[str | None] = [f"{group} on {gpu.name}" for group in (*GROUPS, "latency")]
    titles += [None, f"what curves of {gpu.name} tell", None]
    for title, rows in zip(titles, list_tables(results, gpu).values(), strict=True):
        if len(rows) == 1 and title is not None:
            continue
        table = new_table(*rows[0], title=title, rows=rows[1:])
        if title is not None:
            table.columns[0].no_wrap = True
            table.columns[1].no_wrap = True
        tables.append(table)
    return tables


def make_finding_rows(results: Sequence[MicroRow]) -> list[Row]:
    """List what curves tell, and why where they do not."""
    rows: list[Row] = [["of curves", "found", "how"]]
    rows += [[found.name, found.describe(), found.reason] for found in list_findings(results)]
    return rows


def make_device_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """Compare this device with the paper's two: operations per cycle and SM, and nJ per operation.

    Memory benchmarks of the paper count transactions of a warp or less, ours accesses of a thread:
    they are not comparable one to one, and only arithmetic stands here."""
    devices = ("gtx-660", "tegra-k1")
    head = ["benchmark"]
    for device in (*devices, gpu.name):
        head += [f"{device} /cycle/SM", f"{device} nJ"]
    by_name = keep_first_rounds(results)
    rows = [head]
    for name in _paper_benchmarks():
        cells = [name]
        for device in devices:
            value = _find_paper_value(device, name)
            cells += [f"{value.real_per_cycle_sm:g}", f"{value.operation_j * 1e9:.3g}"]
        r = by_name.get(name)
        if r is None:
            cells += ["-", "-"]
        else:
            cells.append(_format_number(r.operations_per_cycle_sm))
            cells.append(_format_number(r.operation_j, 1e9))
        rows.append(cells)
    return rows


def make_latency_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """List cycles and nanoseconds of each latency, and what others measured on cards of the same
    architecture.
    """
    rows: list[Row] = [["latency", "of", "cycles", "ns", "others"]]
    for r in keep_first_rounds(results).values():
        if not r.latency_cycles or r.curve in (*LATENCY_CURVES, *LATENCY_FINDINGS):
            continue
        name = r.name.removeprefix("latency_")
        cycles = _format_number(r.latency_cycles)
        latency_ns = _format_number(r.latency_s, 1e9, 3)
        rows.append([name, r.operation, cycles, latency_ns, _quote_others(r, gpu)])
    for curve, (_, title) in LATENCY_CURVES.items():
        points = find_curve(results, curve)
        for level in find_levels(results, curve):
            inside = [r for r in points if level.least_byte <= r.at <= level.most_byte]
            quotes = [_quote_others(r, gpu) for r in inside]
            level_ns = 1e9 * level.cycles / (inside[0].effective_clock_hz or np.nan)
            sizes = f"{_format_size(level.least_byte)} to {_format_size(level.most_byte)}"
            rows.append(
                [
                    f"{title}, {sizes}",
                    "load",
                    f"{level.cycles:.4g}",
                    f"{level_ns:.3g}",
                    ", ".join(filter(None, quotes)),
                ]
            )
    return rows


def _format_size(byte: float) -> str:
    power = min(int(byte).bit_length() - 1, 30) // 10
    return f"{byte / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _quote_others(r: MicroRow, gpu: Gpu) -> str:
    """Name what others measured on the architecture of ``gpu``."""
    if gpu.compute_capability != "9.0":
        return ""
    published = microbench_results.read_published("hopper_latencies.csv")
    alike = [row for row in published if row["ours"] == r.name]
    return ", ".join(f"{row['value']} ({row['device']})" for row in alike)


def compare_results(
    results: Sequence[MicroRow], second_results: Sequence[MicroRow]
) -> list[dict[str, object]]:
    """Set two devices side by side: benchmarks of both, rates of an SM, energies above idle, and
    ratios.
    """
    second_of_name = keep_first_rounds(second_results)
    rows = []
    for name, first in keep_first_rounds(results).items():
        second = second_of_name.get(name)
        if second is None or first.version != second.version:
            continue
        first_s = first.operation_s or first.latency_s
        second_s = second.operation_s or second.latency_s
        if not (first_s and second_s):
            continue
        row: dict[str, object] = {
            "benchmark": name,
            "operation": first.operation,
            "time_ratio": second_s / first_s,
        }
        if first.operation_above_idle_j and second.operation_above_idle_j:
            row["energy_ratio"] = second.operation_above_idle_j / first.operation_above_idle_j
        row["first"] = _compared_figures(first)
        row["second"] = _compared_figures(second)
        rows.append(row)
    return rows


def _compared_figures(r: MicroRow) -> dict[str, float | None]:
    """Return the figures of a device that stand beside those of another."""
    figures: dict[str, float | None] = {}
    if r.latency_cycles:
        figures["latency_cycles"] = r.latency_cycles
    figures["per_cycle_sm"] = r.operations_per_cycle_sm
    figures["above_idle_j"] = r.operation_above_idle_j
    return figures


def draw_comparison(
    rows: Sequence[dict[str, Any]],
    first: str,
    second: str,
) -> Figure:
    """Draw time and energy above idle of every benchmark on the second device over the first."""
    figure, axes = new_axes(8.0, 1.2 + 0.2 * len(rows))
    every_ratio: list[float] = []
    for key, label, colour in (
        ("time_ratio", "time", "dram"),
        ("energy_ratio", "energy above idle", "tensor"),
    ):
        places = [place for place, row in enumerate(rows) if row.get(key)]
        ratios = [float(rows[place][key]) for place in places]
        every_ratio += ratios
        if places:
            axes.plot(
                ratios,
                places,
                "o",
                markersize=4,
                color=MODULE_COLOURS[colour],
                label=label,
            )
    axes.axvline(1.0, color="black", linewidth=0.8)
    if max(every_ratio) > 3.0 * min(every_ratio):
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
    built = new_table(
        "benchmark",
        f"{first} /cycle/SM",
        f"{first} nJ",
        f"{second} /cycle/SM",
        f"{second} nJ",
        "time",
        "energy",
        title=f"{second} over {first}",
    )
    for row in rows:
        cells = []
        for which in ("first", "second"):
            for name, scale in COMPARED.items():
                cells.append(_format_number(row[which][name], scale))
        built.add_row(
            row["benchmark"],
            *cells,
            f"{row['time_ratio']:.3f}",
            _format_number(row.get("energy_ratio")),
        )
    return built


def make_truth_rows(results: Sequence[MicroRow], gpu: Gpu) -> list[Row]:
    """List what measurements must confirm, and whether they do."""
    rows: list[Row] = [["must hold", "found", "at most", ""]]
    for truth in microbench_results.check_truths(results, gpu):
        answer = "yes" if truth.holds else "NO"
        rows.append([truth.statement, f"{truth.deviation:.2%}", f"{truth.must:.0%}", answer])
    return rows


def make_results_page(results: Sequence[MicroRow], gpu: Gpu) -> str:
    """Write all tables as a Markdown page."""
    parts = []
    for title, rows in list_tables(results, gpu).items():
        if len(rows) > 1:
            parts.append(f"## {title}\n\n{make_pipe_table(rows)}")
    return "\n\n".join(parts) + f"\n\n{FOOTNOTE}\n"


def results_to_plain(results: Sequence[MicroRow], gpu: Gpu) -> dict[str, object]:
    """Return the results as JSON-ready values."""
    rows = []
    for r in results:
        row: dict[str, object] = {
            "name": r.name,
            "group": r.group,
            "repeat": r.repeat,
            "operation": r.operation,
        }
        if r.curve:
            row |= {"curve": r.curve, "at": r.at}
        for column in COLUMNS:
            number = _read_number(r, column, gpu)
            if number is not None:
                row[column.name] = number
        row["ticks"] = r.ticks or 0
        rows.append(row)
    truths = [asdict(t) | {"holds": t.holds} for t in microbench_results.check_truths(results, gpu)]
    return {
        "gpu": gpu.name,
        "results": rows,
        "truths": truths,
        "repeatability": microbench_results.compare_rounds(results),
        "findings": [asdict(finding) for finding in list_findings(results)],
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


def make_source_table(lines: Sequence[HotLine]) -> Table:
    """Return the instructions at which most warps were, with why they waited there."""
    built = new_table(
        "kernel",
        "line",
        "instruction",
        "samples",
        "waits for",
        "executed",
        title="Where warps wait",
        left=("instruction", "waits for"),
    )
    for hot in lines:
        line = hot.line
        cells = (f"{line.place}", line.instruction[:60], f"{hot.share:.0%}", line.reason)
        built.add_row(hot.kernel[:60], *cells, f"{line.executed:.3g}")
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
    curve = CURVES[name]
    points = [r for r in find_curve(results, name) if r.operation_s and r.operation_j and r.power_w]
    figure = new_figure(9.0, 3.8)
    cost_axes, power_axes = figure.subplots(1, 2)
    _plot_costs(cost_axes, points, by_byte=name in BY_BYTE)
    _plot_powers(power_axes, points)
    places = [r.at for r in points]
    tick_scale = 1.0 / 1024 if name == "icache" else 1.0
    for axes in (cost_axes, power_axes):
        axes.set_xlabel(curve["axis"])
        axes.legend(frameon=False)
        if curve["logarithmic"]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{place * tick_scale:g}" for place in places])
    figure.suptitle(f"{curve['title']}: {gpu.title}")
    caption = source
    for r in points:
        fault = find_fault(r)
        if fault is not None:
            caption += f". To be measured again: {fault}"
            break
    return add_caption(figure, caption)


def _plot_costs(
    axes: Axes,
    points: Sequence[MicroRow],
    by_byte: bool,
) -> None:
    """Plot time and energy of an operation, or of a byte, over those of the best point."""
    costs = compute_costs(points, by_byte)
    axes.plot(
        costs.at,
        costs.time_s / costs.time_s.min(),
        "o-",
        color=MODULE_COLOURS["dram"],
        label="time",
    )
    axes.plot(
        costs.at,
        costs.energy_j / costs.energy_j.min(),
        "s--",
        color=MODULE_COLOURS["tensor"],
        label="energy",
    )
    axes.set_ylabel(f"Of {'a byte' if by_byte else 'an operation'}, over the best point")
    if costs.time_s.max() / costs.time_s.min() > 6.0:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _plot_powers(axes: Axes, points: Sequence[MicroRow]) -> None:
    """Plot mean power, and the largest reading where there is one."""
    axes.plot(
        [r.at for r in points],
        [r.power_w or 0.0 for r in points],
        "o-",
        color=MODULE_COLOURS["shared"],
        label="average",
    )
    with_largest = [r for r in points if r.max_power_w]
    if with_largest:
        axes.plot(
            [r.at for r in with_largest],
            [r.max_power_w or 0.0 for r in with_largest],
            "^:",
            color=MODULE_COLOURS["link"],
            label="largest sensor reading",
        )
    axes.set_ylabel("Power (W)")
    highest_w = max((r.max_power_w or r.power_w or 1.0 for r in points), default=1.0)
    axes.set_ylim(0.0, 1.2 * highest_w)


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
        sizes = [r.at for r in points]
        cycles = [r.latency_cycles or 0.0 for r in points]
        axes.plot(sizes, cycles, "o", color=MODULE_COLOURS["dram"])
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
        ticks = [size for size in sizes if np.log2(size) % 4 == 0]
        axes.set_xticks(ticks, [_format_size(at) for at in ticks])
        axes.set_ylim(0.0, 1.15 * max(cycles))
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
    rates = _specified_rates(results, gpu)
    names = list(rates)
    shares = [rate / specified for rate, specified in rates.values()]
    texts = [f"{rate:.4g} of {specified:g}" for rate, specified in rates.values()]
    figure, axes = new_axes(8.0, 0.9 + 0.24 * len(names))
    axes.barh(range(len(names)), shares, color=MODULE_COLOURS["l2"])
    axes.axvline(1.0, color="black", linewidth=0.8)
    for place, text in enumerate(texts):
        axes.text(0.02, place, text, va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("Measured over specified, operations per true cycle and SM")
    axes.set_title(gpu.title)
    return add_caption(figure, source)


def _specified_rates(results: Sequence[MicroRow], gpu: Gpu) -> dict[str, tuple[float, float]]:
    """Return measured and specified rates of benchmarks that have both, by name."""
    rates = {}
    for name, r in keep_first_rounds(results).items():
        rate = r.operations_per_cycle_sm
        specified = microbench_results.find_specified_rate(gpu, r)
        if rate and specified:
            rates[name] = (rate, specified)
    return rates


def draw_energy(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> Figure:
    """Draw the energy of an arithmetic operation and of a byte, with idle power and above it."""
    arithmetic, memory = _list_energies(results)
    figure = new_figure(9.6, 1.2 + 0.22 * max(len(arithmetic), len(memory)))
    arithmetic_axes, memory_axes = figure.subplots(1, 2)
    _plot_energies(arithmetic_axes, arithmetic)
    _plot_energies(memory_axes, memory)
    arithmetic_axes.set_xlabel("Energy (pJ) of an operation of one thread")
    memory_axes.set_xlabel("Energy (pJ) of a byte")
    arithmetic_axes.legend(frameon=False, loc="lower right")
    figure.suptitle(gpu.title)
    return add_caption(figure, source)


def _list_energies(
    results: Sequence[MicroRow],
) -> tuple[list[PlottedEnergy], list[PlottedEnergy]]:
    """Return the energies of operations and of bytes that the figure shows."""
    arithmetic = []
    memory = []
    for r in keep_first_rounds(results).values():
        if r.curve or not r.operation_j or find_fault(r) is not None:
            continue
        if r.group == "arithmetic":
            arithmetic.append(_operation_energy(r))
        elif r.group == "memory" and r.byte:
            memory.append(_byte_energy(r))
    return arithmetic, memory


@dataclass(frozen=True)
class PlottedEnergy:
    """The energy of one operation or byte, with idle power and above it."""

    label: str
    total_pj: float
    above_idle_pj: float


def _operation_energy(r: MicroRow) -> PlottedEnergy:
    return PlottedEnergy(
        f"{r.name} ({r.operation})",
        1e12 * (r.operation_j or 0.0),
        1e12 * (r.operation_above_idle_j or 0.0),
    )


def _byte_energy(r: MicroRow) -> PlottedEnergy:
    operation_byte = (r.byte or 1.0) / (r.operations or 1.0)
    return PlottedEnergy(
        r.name,
        1e12 * (r.operation_j or 0.0) / operation_byte,
        1e12 * (r.operation_above_idle_j or 0.0) / operation_byte,
    )


def _plot_energies(axes: Axes, energies: Sequence[PlottedEnergy]) -> None:
    """Plot two dots a row, the least energy first: with idle power and above it."""
    rows = sorted(energies, key=lambda energy: energy.total_pj)
    axes.plot(
        [row.total_pj for row in rows],
        range(len(rows)),
        "o",
        color=MODULE_COLOURS["static"],
        label="idle power included",
    )
    axes.plot(
        [row.above_idle_pj for row in rows],
        range(len(rows)),
        "o",
        color=MODULE_COLOURS["tensor"],
        label="above idle",
    )
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xscale("log")
    axes.grid(axis="y", linewidth=0.3)


def draw_devices(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> Figure:
    """Draw the energy of an arithmetic operation on the paper's devices and on this one."""
    names = _paper_benchmarks()
    figure, axes = new_axes(8.0, 4.2)
    for device, colour, shift in (("gtx-660", "dram", -0.25), ("tegra-k1", "shared", 0.0)):
        axes.bar(
            [place + shift for place in range(len(names))],
            [1e9 * _find_paper_value(device, name).operation_j for name in names],
            0.24,
            color=MODULE_COLOURS[colour],
            label=device,
        )
    by_name = keep_first_rounds(results)
    measured_places = [place for place, name in enumerate(names) if name in by_name]
    if measured_places:
        axes.bar(
            [place + 0.25 for place in measured_places],
            [1e9 * (by_name[names[place]].operation_j or 0.0) for place in measured_places],
            0.24,
            color=MODULE_COLOURS["tensor"],
            label=gpu.name,
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    axes.set_ylabel("Energy (nJ) of an operation, idle included")
    axes.legend(frameon=False)
    return add_caption(
        figure, source + "; GTX 660 and TK1: MIPP (2016), Tables I and II, errata applied"
    )


def make_paper_table(values: Sequence[microbench_results.MippValue]) -> Table:
    """Return what a paper printed of one device, beside the name of the benchmark of ours that is
    nearest.

    Joules of an operation are power times time over operations of the whole chip; those printed
    count one multiprocessor of the GTX 660 alone."""
    built = new_table(
        "table",
        "benchmark",
        "ours",
        "a cycle and SM",
        "time",
        "power",
        "most",
        "energy",
        "operation",
        "printed",
        "erratum",
        left=("table", "benchmark", "ours", "erratum"),
    )
    for value in values:
        built.add_row(
            value.table,
            value.benchmark,
            value.ours,
            f"{value.real_per_cycle_sm:.1f}",
            show(value.time_s, "s"),
            show(value.power_w, "W"),
            show(value.max_power_w, "W"),
            show(value.energy_j, "J"),
            f"{1e9 * value.operation_j:.3g} nJ",
            f"{value.nj_printed:g} nJ",
            value.erratum,
        )
    return built


def _paper_benchmarks() -> list[str]:
    """Return the benchmarks of ours that the paper's arithmetic ones (Tables I and II) are nearest
    to.
    """
    values = microbench_results.read_mipp_values()
    return list(dict.fromkeys(value.ours for value in values if value.table in ("I", "II")))


def _find_paper_value(device: str, name: str) -> microbench_results.MippValue:
    values = microbench_results.read_mipp_values()
    return next(value for value in values if value.device == device and value.ours == name)


def make_microbench_figures(
    results: Sequence[MicroRow],
    gpu: Gpu,
    source: str,
) -> dict[str, FigureMaker]:
    """Return every figure that the results have points for, by file name."""
    figures: dict[str, FigureMaker] = {}
    for name in CURVES:
        points = [r for r in find_curve(results, name) if r.operation_s and r.operation_j]
        if len(points) > 1:
            figures[f"microbench-{name}"] = partial(
                draw_curve,
                results,
                name,
                gpu,
                source,
            )
    if all(find_curve(results, curve) for curve in LATENCY_CURVES):
        figures["microbench-latencies"] = partial(draw_latencies, results, gpu, source)
    if _specified_rates(results, gpu):
        figures["microbench-throughput"] = partial(draw_throughput, results, gpu, source)
    if all(_list_energies(results)):
        figures["microbench-energy"] = partial(draw_energy, results, gpu, source)
    figures["microbench-devices"] = partial(draw_devices, results, gpu, source)
    return figures
