"""The two-rail counter model of a GPU, trained on its microbenchmarks only, against work it has never seen.

Multimedia workloads; what a kernel adds to moving frames; what a cheaper DCT saves at a fixed frame rate
[Stokke2016, sections 6.2 and 6.4]; and the counted operators of the kernel database, measured on other cards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from wattcast import hardware
from wattcast.activity import Activity, Source
from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.fit.counters_rails import solve_rails
from wattcast.fit.counters_table import MOVED, NO_KERNEL, SECTOR_BYTE, events_of, moves_frames
from wattcast.fit.counters_two_rails import RailsFit, shipped_fit
from wattcast.hardware import OperatingPoint
from wattcast.records import COUNTERS_FILE, ROWS_FILE, Plain, database_folder, read_table
from wattcast.validate.counter_rounds import side_reports
from wattcast.validate.rows import Mask, Row, percent, row

AT_RATE = "_at_rate"
IDLE = "multimedia_idle"  # the card with a context open, just before the multimedia rows
PUBLISHED = "about 1 (Tegra K1, Stokke 2016)"
SAVINGS = (  # what changes, from, to
    ("fp64 to fp32, cached", "dct_fp64_cached", "dct_fp32_cached"),
    ("fp64 to fp32, past L1", "dct_fp64_uncached", "dct_fp32_uncached"),
    ("caching in L1, fp32", "dct_fp32_uncached", "dct_fp32_cached"),
    ("caching in L1, fp64", "dct_fp64_uncached", "dct_fp64_cached"),
    ("both", "dct_fp64_uncached", "dct_fp32_cached"),
)
FULL_WARP = 32.0  # threads a warp; the database's counters do not say how many were active


def counter_model_rows(gpu: str) -> list[Row]:
    """Every test of the counter model."""
    fit = shipped_fit(gpu)
    return [*_multimedia(fit, gpu), *_savings(fit, gpu), *_differences(fit, gpu), *_database(fit, gpu)]


@dataclass(frozen=True)
class Pair:
    """Something measured and predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def off_percent(self) -> float:
        """Predicted over measured, less one."""
        return 100.0 * (self.predicted / self.measured - 1.0)


def multimedia(fit: RailsFit) -> list[Pair]:
    """Watts of every multimedia row without transfers."""
    return [Pair(name, *watts) for name, watts in _watts(fit).items() if not moves_frames(name)]


def savings(fit: RailsFit) -> list[Pair]:
    """Watts saved at a fixed frame rate by a cheaper DCT."""
    found = _watts(fit)
    rows = []
    for what, before, after in SAVINGS:
        measured_w, predicted_w = (found[before + AT_RATE][i] - found[after + AT_RATE][i] for i in (0, 1))
        rows.append(Pair(what, measured_w, predicted_w))
    return rows


def differences(fit: RailsFit) -> list[Pair]:
    """Joules above idle that a kernel adds to moving the frames it works on.

    Measured: energy of a pass with the kernel, less one without, less what the idle card draws in the time it takes
    longer. Predicted: the events that the kernel's own counters show, times their costs.
    """
    table = fit.table
    at = {table.benchmark_names[b]: i for i, b in enumerate(table.benchmark)}
    bare, idle_w = at[NO_KERNEL], float(table.power_w[at[IDLE]])
    if table.duration_s is None:
        raise bad_value(table.name, "durations", "none")
    rows = []
    for name, i in at.items():
        if not name.endswith(MOVED):
            continue
        pass_s, bare_s = table.duration_s[i], table.duration_s[bare]
        measured_j = table.power_w[i] * pass_s - table.power_w[bare] * bare_s - idle_w * (pass_s - bare_s)
        predicted_j = (fit.predicted_w[i] - fit.predicted_w[bare]) * pass_s
        rows.append(Pair(name.removesuffix(MOVED), float(measured_j), float(predicted_j)))
    return rows


def _watts(fit: RailsFit) -> dict[str, tuple[float, float]]:
    table = fit.table
    return {
        table.benchmark_names[table.benchmark[i]]: (float(table.power_w[i]), float(fit.predicted_w[i]))
        for i in np.flatnonzero(fit.test)
    }


def _multimedia(fit: RailsFit, gpu: str) -> list[Row]:
    pairs = multimedia(fit)
    measured = np.array([p.measured for p in pairs])
    predicted = np.array([p.predicted for p in pairs])
    queued = np.array([not p.name.endswith(AT_RATE) for p in pairs])
    worst = max(pairs, key=lambda p: abs(p.off_percent))
    floor = percent(np.full(measured.size, fit.table.power_w[fit.train].mean()), measured)
    where = f"{gpu.upper()} multimedia, trained on microbenchmarks only"
    return [
        row(
            where,
            "power",
            len(pairs),
            percent(predicted, measured),
            floor,
            PUBLISHED,
            5.0,
            1.0,
            back_to_back=_rounded(percent(predicted[queued], measured[queued])),
            at_a_frame_rate=_rounded(percent(predicted[~queued], measured[~queued])),
            worst=f"{worst.name} {worst.off_percent:+.1f} %",
            plain_least_squares=_rounded(_plain(fit)),
            **{what: _rounded(error) for what, error in side_reports(fit, gpu).items()},
        ),
        row(
            f"{gpu.upper()} microbenchmarks",
            "power, leave one benchmark out",
            int(fit.train.sum()),
            fit.error_percent(fit.train, held_out=True),
            percent(np.full(int(fit.train.sum()), fit.table.power_w[fit.train].mean()), fit.table.power_w[fit.train]),
            leaning=fit.leaning,
            left_out=len(fit.table.left_out),
        ),
    ]


def _plain(fit: RailsFit) -> float | None:
    """The same error where the fit does not lean."""
    found_w = solve_rails(fit.design, fit.train, 0.5).total_w(fit.design)
    rows = [
        i for i in np.flatnonzero(fit.test) if not moves_frames(fit.table.benchmark_names[fit.table.benchmark[i]])
    ]
    return percent(found_w[rows], fit.table.power_w[rows])


def _savings(fit: RailsFit, gpu: str) -> list[Row]:
    where = f"{gpu.upper()} DCT at a fixed frame rate"
    return [
        row(
            where,
            f"saving, {p.name}",
            1,
            abs(p.off_percent),
            must=30.0,
            aim=10.0,
            measured_w=_rounded(p.measured),
            predicted_w=_rounded(p.predicted),
        )
        for p in savings(fit)
    ]


def _differences(fit: RailsFit, gpu: str) -> list[Row]:
    where = f"{gpu.upper()} kernel beside moving frames"
    return [
        row(
            where,
            f"energy of {p.name}",
            1,
            abs(p.off_percent),
            measured_mj=_rounded(1e3 * p.measured),
            predicted_mj=_rounded(1e3 * p.predicted),
        )
        for p in differences(fit)
    ]


def _database(fit: RailsFit, gpu: str) -> list[Row]:
    """All counted operators, and those whose operands are larger than L2.

    Under the profiler operands come from DRAM; an operator that fits L2 and is run again and again finds them there.
    """
    found, l2_byte = database_pairs(fit, gpu), hardware.load(gpu).l2.capacity_byte
    large = found.footprint_byte > (np.inf if l2_byte is None else float(np.mean(l2_byte)))
    where = f"{gpu.upper()} counted operators, other cards, trained on microbenchmarks only"
    sets = {"power": np.ones(large.size, dtype=bool), "power, operands larger than L2": large}
    return [_database_row(where, quantity, found, rows, fit) for quantity, rows in sets.items()]


def _database_row(where: str, quantity: str, found: Counted, rows: Mask, fit: RailsFit) -> Row:
    measured, predicted, card, family = (
        found.measured_w[rows],
        found.predicted_w[rows],
        found.card[rows],
        found.family[rows],
    )
    factor = {one: float(np.median((measured / predicted)[card == one])) for one in np.unique(card)}
    corrected = predicted * np.array([factor[one] for one in card])
    families: Row = {
        str(one): _rounded(percent(predicted[family == one], measured[family == one])) for one in np.unique(family)
    }
    return row(
        where,
        quantity,
        measured.size,
        percent(predicted, measured),
        percent(np.full(measured.size, fit.table.power_w[fit.train].mean()), measured),
        one_factor_a_card=_rounded(percent(corrected, measured)),
        factors=", ".join(f"{value:.2f}" for value in factor.values()),
        **families,
    )


@dataclass(frozen=True)
class Counted:
    """Sustained rows of the kernel database whose operators were counted."""

    measured_w: Array
    predicted_w: Array
    footprint_byte: Array
    card: Array
    family: Array


def database_pairs(fit: RailsFit, gpu: str) -> Counted:
    """Watts of sustained rows on random data, measured and from the counters of their kernels.

    The database counts fewer metrics: warps are taken as full, shared-memory conflicts and products of integers or
    fp64 as none.
    """
    folder, sm_count = database_folder(gpu), float(hardware.load(gpu).sm_count)
    events = _operator_events(read_table(folder / COUNTERS_FILE), sm_count)
    rows = [
        r
        for r in read_table(folder / ROWS_FILE)
        if r["kind"] == "sustained" and r["spec"] in events and r["data"] == "random" and r["power_w"]
    ]
    names = fit.model.required_events
    value = np.array([[events[r["spec"]][name] for name in names] for r in rows])
    clock_hz = np.array([r["sm_clock_hz"] for r in rows], dtype=float)
    at = OperatingPoint(clock_hz=clock_hz, memory_clock_hz=float(fit.table.memory_clock_hz[0]))
    duration_s = np.array([r["latency_s"] for r in rows])
    activity = Activity(duration_s, value, names, at, Source.PROFILED)
    return Counted(
        np.array([r["power_w"] for r in rows]),
        fit.model.power(activity).total_w,
        np.array([float(r["footprint_byte"] or 0.0) for r in rows]),
        np.array([str(r["card_serial"]) for r in rows]),
        np.array([str(r["family"]) for r in rows]),
    )


def _operator_events(kernels: Iterable[Plain], sm_count: float) -> dict[str, dict[str, float]]:
    """Events of each operator: the sum over the kernels of one call."""
    total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel in kernels:
        metrics = {_metric(name): float(value) for name, value in kernel.items() if "__" in name}
        metrics |= {
            "sm__pipe_tensor_cycles_active.sum": sm_count * metrics["sm__pipe_tensor_cycles_active.avg"],
            "smsp__thread_inst_executed_per_inst_executed.ratio": FULL_WARP,
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 0.0,
            "sm__inst_executed_pipe_tensor_op_imma.sum": 0.0,
            "sm__inst_executed_pipe_tensor_op_dmma.sum": 0.0,
        }
        for way in ("read", "write"):
            metrics[f"dram__sectors_{way}.sum"] = metrics[f"dram__bytes_{way}.sum"] / SECTOR_BYTE
        for name, value in events_of(metrics).items():
            total[kernel["spec"]][name] += value
    return total


def _metric(column: str) -> str:
    """A metric's name from that of its column: the last mark before the roll-up is a point."""
    stem, _, last = column.rpartition("_")
    return f"{stem}.{last}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
