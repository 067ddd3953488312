"""Microbenchmark results as tables like those of the MIPP paper (I to IV), and tuning advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from wattcast.explore.microbench import Result, fault_of, first, specified
from wattcast.explore.microbench_truths import repeatability, truths
from wattcast.explore.mipp import published
from wattcast.explore.tune import Tuning
from wattcast.hardware import Gpu
from wattcast.report.text import table

GROUPS = ("arithmetic", "tensor", "memory", "structure", "mix", "multimedia", "idle")
COLUMNS = (
    *("benchmark", "counted", "time ms", "spec /cycle", "real /cycle", "avg W", "max W*", "energy J"),
    *("Gop/J", "nJ/op", "nJ/op above idle", "TB/s", "clock MHz", "true MHz", "ticks"),
)
FOOTNOTE = (
    "* the largest of the sensor's readings in the window, which may miss shorter peaks; "
    "rates are per true cycle and SM; "
    "† not what its name says, ‡ below its unit's limit: why is told in explore/microbench_faults.csv"
)
Row = list[str]


def rows_of(results: Sequence[Result], gpu: Gpu, group: str) -> list[Row]:
    """Cells of one group's table; a benchmark that was measured twice shows its first round."""
    return [_cells(r, specified(gpu, r)) for r in first(results).values() if r.group == group]


def _cells(r: Result, spec: float | None) -> Row:
    return [
        named(r),
        r.operation,
        _shown(r.time_s, 1e3),
        _shown(spec, 1.0),
        _shown(r.per_cycle_sm, 1.0),
        _shown(r.power_w, 1.0),
        _shown(r.max_power_w, 1.0),
        _shown(r.energy_j, 1.0, 3),
        _shown(r.operations_per_j, 1e-9, 3),
        _shown(r.operation_j, 1e9, 3),
        _shown(r.operation_above_idle_j, 1e9, 3),
        _shown(r.byte_per_s, 1e-12),
        _shown(r.clock_hz, 1e-6),
        _shown(r.effective_clock_hz, 1e-6),
        str(r.ticks) if r.ticks else "-",
    ]


def named(r: Result) -> str:
    """A benchmark's name, with a mark where its kernel is known to have a fault."""
    fault = fault_of(r)
    return r.name + ("" if fault is None else " †" if fault.kind == "wrong" else " ‡")


def _shown(value: float | None, scale: float, digits: int = 4) -> str:
    return "-" if value is None else f"{value * scale:.{digits}g}"


def tables(results: Sequence[Result], gpu: Gpu) -> list[Table]:
    """One table a group, then devices side by side and what must hold."""
    found = []
    for group in GROUPS:
        rows = rows_of(results, gpu, group)
        if rows:
            built = table(*COLUMNS, title=f"{group} on {gpu.name}")
            for column in built.columns[:2]:
                column.no_wrap = True
            for row in rows:
                built.add_row(*row)
            found.append(built)
    return [*found, _table(side_by_side_rows(results, gpu)), _table(truth_rows(results, gpu))]


def _table(rows: list[Row]) -> Table:
    built = table(*rows[0])
    for row in rows[1:]:
        built.add_row(*row)
    return built


def side_by_side_rows(results: Sequence[Result], gpu: Gpu) -> list[Row]:
    """This device beside the paper's two: operations per cycle and SM, and nJ per operation of the whole chip.

    Memory benchmarks of the paper count transactions of a warp or less, ours accesses of a thread: they are
    not comparable one to one, and only arithmetic stands here.
    """
    devices = ("gtx-660", "tegra-k1")
    head = ["benchmark", *(f"{d} {what}" for d in (*devices, gpu.name) for what in ("/cycle/SM", "nJ"))]
    by_name, rows = first(results), [head]
    for ours in dict.fromkeys(p.ours for p in published() if p.table in ("I", "II")):
        cells = [ours]
        for device in devices:
            p = next(p for p in published() if p.device == device and p.ours == ours)
            cells += [f"{p.real_per_cycle_sm:g}", f"{p.operation_j * 1e9:.3g}"]
        r = by_name.get(ours)
        cells += [_shown(r.per_cycle_sm if r else None, 1.0), _shown(r.operation_j if r else None, 1e9)]
        rows.append(cells)
    return rows


def truth_rows(results: Sequence[Result], gpu: Gpu) -> list[Row]:
    """What measurements must bear out, and whether they do."""
    head: Row = ["must hold", "found", "at most", ""]
    held = truths(results, gpu)
    return [head, *([t.statement, f"{t.found:.2%}", f"{t.must:.0%}", "yes" if t.holds else "NO"] for t in held)]


def markdown(results: Sequence[Result], gpu: Gpu) -> str:
    """All tables as a page."""
    parts = []
    for group in GROUPS:
        rows = rows_of(results, gpu, group)
        if rows:
            parts.append(f"## {group}\n\n{pipes([list(COLUMNS), *rows])}")
    parts += [f"## Devices side by side\n\n{pipes(side_by_side_rows(results, gpu))}"]
    parts += [f"## What must hold\n\n{pipes(truth_rows(results, gpu))}"]
    return "\n\n".join(parts) + f"\n\n{FOOTNOTE}\n"


def pipes(rows: list[Row]) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def plain(results: Sequence[Result], gpu: Gpu) -> dict[str, object]:
    """For JSON."""
    numbers: dict[str, Callable[[Result], float | None]] = {
        "time_s": lambda r: r.time_s,
        "operations": lambda r: r.operations,
        "operations_per_cycle_sm": lambda r: r.per_cycle_sm,
        "specified_per_cycle_sm": lambda r: specified(gpu, r),
        "power_w": lambda r: r.power_w,
        "max_power_w": lambda r: r.max_power_w,
        "energy_j": lambda r: r.energy_j,
        "operations_per_j": lambda r: r.operations_per_j,
        "energy_j_per_operation": lambda r: r.operation_j,
        "energy_above_idle_j_per_operation": lambda r: r.operation_above_idle_j,
        "byte_per_s": lambda r: r.byte_per_s,
        "memory_power_w": lambda r: r.memory_power_w,
        "clock_hz": lambda r: r.clock_hz,
        "effective_clock_hz": lambda r: r.effective_clock_hz,
    }
    rows = []
    for r in results:
        values = {name: read(r) for name, read in numbers.items()}
        base: dict[str, object] = {"name": r.name, "group": r.group, "repeat": r.repeat, "operation": r.operation}
        at = {"curve": r.curve, "at": r.at} if r.curve else {}
        rows.append(base | at | {k: v for k, v in values.items() if v is not None} | {"ticks": r.ticks})
    held = [
        {"statement": t.statement, "found": t.found, "must": t.must, "holds": t.holds} for t in truths(results, gpu)
    ]
    pairs = [{"name": p.name, "time": p.time, "energy": p.energy} for p in repeatability(results)]
    return {"gpu": gpu.name, "results": rows, "truths": held, "repeatability": pairs}


def advice_table(tuning: Tuning) -> Table:
    """Bottlenecks that matter, most joules first."""
    title = (
        None
        if tuning.advice
        else "Nothing this profile shows would change time or energy by more than half a percent."
    )
    built = table("kernel", "bottleneck", "seen", "time", "power", "energy", title=title)
    built.columns[2].justify = "left"
    for a in tuning.advice:
        built.add_row(a.kernel[:60], a.bottleneck, a.seen, f"{a.time:+.1%}", f"{a.power:+.1%}", f"{a.energy:+.1%}")
    return built


def tuning_plain(tuning: Tuning) -> dict[str, object]:
    """For JSON."""
    return {
        "kernels": [
            {"name": p.name, "time_s": p.time_s, "busiest": p.busiest, "energy_j": p.energy_j}
            for p in tuning.profiles
        ],
        "advice": [
            {
                **{"kernel": a.kernel, "bottleneck": a.bottleneck, "seen": a.seen},
                **{"time": a.time, "power": a.power, "energy": a.energy, "saved_j": a.joules},
            }
            for a in tuning.advice
        ],
        "not_judged": {name: list(metrics) for name, metrics in tuning.missing.items()},
    }
