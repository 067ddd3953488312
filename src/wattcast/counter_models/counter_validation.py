"""Validate the shipped counter model on work it was not trained on, as rows of the accuracy ledger.

The model is trained on microbenchmarks only and tested on multimedia workloads, savings between variants, energies of
single kernels, and the operators of the kernel database (docs/method/counters.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from wattcast import hardware
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.core.measured_rows import COUNTERS_FILE, ROWS_FILE, Plain, database_folder, read_lines, read_table
from wattcast.counter_models.profiler_counters import (
    MOVE_FRAMES,
    MOVED_SUFFIX,
    OTHER_CARD,
    RESULT_FILES,
    SECTOR_BYTE,
    events_of_launch,
    moves_frames,
)
from wattcast.counter_models.two_rails import RailsFit, leaning_errors, shipped_fit, solve_rails, table_activity
from wattcast.fit.scoring import LedgerRow, make_ledger_row, mean_percent_error
from wattcast.hardware import OperatingPoint
from wattcast.power.activity import Activity, ActivitySource

PARTIAL_RATES = ("dram_rate_", "dram_fma_")


def error_variants(fit: RailsFit, gpu: str) -> dict[str, float]:
    """Return the error on multimedia rows, in percent, of variants of the fit.

    They are: training also on kernels that were mended after the list of names to leave out was fixed; training
    without rows of DRAM at a part of its rate; and the model of the other shipped card, as it is and with one factor
    (the median over the training rows).
    """
    names = _names(fit)
    mended = np.isin(names, [name for name in fit.table.left_out if name in find_mended_kernels(gpu)])
    partial = np.array([name.startswith(PARTIAL_RATES) for name in names])
    found = {
        "mended_let_in": _error(fit, _refitted_w(fit, fit.train | mended)),
        "without_partial_dram_rates": _error(fit, _refitted_w(fit, fit.train & ~partial)),
    }
    if (database_folder(gpu) / OTHER_CARD).is_dir():
        model = shipped_fit(gpu, OTHER_CARD).model
        other_w = model.power(table_activity(fit.table, model.required_events)).total_w
        factor = float(np.median((fit.table.power_w / other_w)[fit.train]))
        found["model_of_the_other_card"] = _error(fit, other_w)
        found["the_same_with_one_factor"] = _error(fit, factor * other_w)
    return found


def find_mended_kernels(gpu: str) -> set[str]:
    """Return the benchmarks whose kernel is no longer its first version."""
    rows = read_lines(database_folder(gpu) / RESULT_FILES[0])
    return {str(row["name"]) for row in rows if int(row.get("version", 1)) > 1}


def _refitted_w(fit: RailsFit, train: Mask) -> Array:
    """Return the totals of a fit to other rows, with the leaning chosen anew in the same way."""
    trials = leaning_errors(fit.table, fit.design, train)
    return solve_rails(fit.design, train, min(trials, key=lambda lean: trials[lean])).total_w(fit.design)


def _error(fit: RailsFit, predicted_w: Array) -> float:
    """Return the mean absolute percentage error over multimedia rows without transfers."""
    rows = fit.test & np.array([not moves_frames(name) for name in _names(fit)])
    return float(100.0 * np.abs(predicted_w[rows] / fit.table.power_w[rows] - 1.0).mean())


def _names(fit: RailsFit) -> list[str]:
    return [fit.table.benchmark_names[b] for b in fit.table.benchmark]


AT_RATE = "_at_rate"
IDLE_ROW = "multimedia_idle"  # the card with a context open, just before the multimedia rows
PUBLISHED_ERROR = "about 1 (Tegra K1, Stokke 2016)"
DCT_SAVINGS = (  # what changes, from, to
    ("fp64 to fp32, cached", "dct_fp64_cached", "dct_fp32_cached"),
    ("fp64 to fp32, past L1", "dct_fp64_uncached", "dct_fp32_uncached"),
    ("caching in L1, fp32", "dct_fp32_uncached", "dct_fp32_cached"),
    ("caching in L1, fp64", "dct_fp64_uncached", "dct_fp64_cached"),
    ("both", "dct_fp64_uncached", "dct_fp32_cached"),
)
FULL_WARP = 32.0  # threads a warp; the database's counters do not say how many were active


def make_counter_model_rows(gpu: str) -> list[LedgerRow]:
    """Return the ledger rows of every test of the counter model."""
    fit = shipped_fit(gpu)
    return [*_multimedia(fit, gpu), *_savings(fit, gpu), *_differences(fit, gpu), *_database(fit, gpu)]


@dataclass(frozen=True)
class PredictedPair:
    """One quantity, measured and predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def off_percent(self) -> float:
        """Error of the prediction in percent."""
        return 100.0 * (self.predicted / self.measured - 1.0)


def multimedia_power(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts of every multimedia row without transfers."""
    return [PredictedPair(name, *watts) for name, watts in _watts(fit).items() if not moves_frames(name)]


def dct_savings(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts saved at a fixed frame rate by a cheaper DCT."""
    found = _watts(fit)
    rows = []
    for what, before, after in DCT_SAVINGS:
        measured_w, predicted_w = (found[before + AT_RATE][i] - found[after + AT_RATE][i] for i in (0, 1))
        rows.append(PredictedPair(what, measured_w, predicted_w))
    return rows


def kernel_energies_above_idle(fit: RailsFit) -> list[PredictedPair]:
    """Return the joules above idle that each kernel adds to moving its frames.

    Measured: energy of a pass with the kernel, less one without, less idle power times the longer duration.
    Predicted: the events of the kernel's own counters times their costs.
    """
    table = fit.table
    at = {table.benchmark_names[b]: i for i, b in enumerate(table.benchmark)}
    bare, idle_w = at[MOVE_FRAMES], float(table.power_w[at[IDLE_ROW]])
    if table.duration_s is None:
        raise bad_value(table.name, "durations", "none")
    rows = []
    for name, i in at.items():
        if not name.endswith(MOVED_SUFFIX):
            continue
        pass_s, bare_s = table.duration_s[i], table.duration_s[bare]
        measured_j = table.power_w[i] * pass_s - table.power_w[bare] * bare_s - idle_w * (pass_s - bare_s)
        predicted_j = (fit.predicted_w[i] - fit.predicted_w[bare]) * pass_s
        rows.append(PredictedPair(name.removesuffix(MOVED_SUFFIX), float(measured_j), float(predicted_j)))
    return rows


def _watts(fit: RailsFit) -> dict[str, tuple[float, float]]:
    table = fit.table
    return {
        table.benchmark_names[table.benchmark[i]]: (float(table.power_w[i]), float(fit.predicted_w[i]))
        for i in np.flatnonzero(fit.test)
    }


def _multimedia(fit: RailsFit, gpu: str) -> list[LedgerRow]:
    pairs = multimedia_power(fit)
    measured = np.array([p.measured for p in pairs])
    predicted = np.array([p.predicted for p in pairs])
    queued = np.array([not p.name.endswith(AT_RATE) for p in pairs])
    worst = max(pairs, key=lambda p: abs(p.off_percent))
    floor = mean_percent_error(np.full(measured.size, fit.table.power_w[fit.train].mean()), measured)
    where = f"{gpu.upper()} multimedia, trained on microbenchmarks only"
    return [
        make_ledger_row(
            where,
            "power",
            len(pairs),
            mean_percent_error(predicted, measured),
            floor,
            PUBLISHED_ERROR,
            5.0,
            1.0,
            back_to_back=_rounded(mean_percent_error(predicted[queued], measured[queued])),
            at_a_frame_rate=_rounded(mean_percent_error(predicted[~queued], measured[~queued])),
            worst=f"{worst.name} {worst.off_percent:+.1f} %",
            plain_least_squares=_rounded(_error(fit, solve_rails(fit.design, fit.train, 0.5).total_w(fit.design))),
            **{what: _rounded(error) for what, error in error_variants(fit, gpu).items()},
        ),
        make_ledger_row(
            f"{gpu.upper()} microbenchmarks",
            "power, leave one benchmark out",
            int(fit.train.sum()),
            fit.error_percent(fit.train, held_out=True),
            mean_percent_error(
                np.full(int(fit.train.sum()), fit.table.power_w[fit.train].mean()), fit.table.power_w[fit.train]
            ),
            leaning=fit.leaning,
            left_out=len(fit.table.left_out),
        ),
    ]


def _savings(fit: RailsFit, gpu: str) -> list[LedgerRow]:
    where = f"{gpu.upper()} DCT at a fixed frame rate"
    return [
        make_ledger_row(
            where,
            f"saving, {p.name}",
            1,
            abs(p.off_percent),
            must=30.0,
            aim=10.0,
            measured_w=_rounded(p.measured),
            predicted_w=_rounded(p.predicted),
        )
        for p in dct_savings(fit)
    ]


def _differences(fit: RailsFit, gpu: str) -> list[LedgerRow]:
    where = f"{gpu.upper()} kernel beside moving frames"
    return [
        make_ledger_row(
            where,
            f"energy of {p.name}",
            1,
            abs(p.off_percent),
            measured_mj=_rounded(1e3 * p.measured),
            predicted_mj=_rounded(1e3 * p.predicted),
        )
        for p in kernel_energies_above_idle(fit)
    ]


def _database(fit: RailsFit, gpu: str) -> list[LedgerRow]:
    """Return rows of all counted operators, and of those whose operands are larger than L2.

    Under the profiler operands come from DRAM; repeated runs of an operator that fits L2 find them in L2.
    """
    found, l2_byte = predict_database_operators(fit, gpu), hardware.load_gpu(gpu).l2.capacity_byte
    large = found.footprint_byte > (np.inf if l2_byte is None else float(np.mean(l2_byte)))
    where = f"{gpu.upper()} counted operators, other cards, trained on microbenchmarks only"
    sets = {"power": np.ones(large.size, dtype=bool), "power, operands larger than L2": large}
    return [_database_row(where, quantity, found, rows, fit) for quantity, rows in sets.items()]


def _database_row(where: str, quantity: str, found: CountedOperators, rows: Mask, fit: RailsFit) -> LedgerRow:
    measured, predicted, card, family = (
        found.measured_w[rows],
        found.predicted_w[rows],
        found.card[rows],
        found.family[rows],
    )
    factor = {one: float(np.median((measured / predicted)[card == one])) for one in np.unique(card)}
    corrected = predicted * np.array([factor[one] for one in card])
    families: LedgerRow = {
        str(one): _rounded(mean_percent_error(predicted[family == one], measured[family == one]))
        for one in np.unique(family)
    }
    return make_ledger_row(
        where,
        quantity,
        measured.size,
        mean_percent_error(predicted, measured),
        mean_percent_error(np.full(measured.size, fit.table.power_w[fit.train].mean()), measured),
        one_factor_a_card=_rounded(mean_percent_error(corrected, measured)),
        factors=", ".join(f"{value:.2f}" for value in factor.values()),
        **families,
    )


@dataclass(frozen=True)
class CountedOperators:
    """Sustained rows of the kernel database whose operators were counted."""

    measured_w: Array
    predicted_w: Array
    footprint_byte: Array
    card: Array
    family: Array


def predict_database_operators(fit: RailsFit, gpu: str) -> CountedOperators:
    """Return the watts of sustained rows on random data, measured and from the counters of their kernels.

    The database counts fewer metrics: warps are taken as full, and shared-memory conflicts and tensor products of
    integers or fp64 as absent.
    """
    folder, sm_count = database_folder(gpu), float(hardware.load_gpu(gpu).sm_count)
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
    activity = Activity(duration_s, value, names, at, ActivitySource.PROFILED)
    return CountedOperators(
        np.array([r["power_w"] for r in rows]),
        fit.model.power(activity).total_w,
        np.array([float(r["footprint_byte"] or 0.0) for r in rows]),
        np.array([str(r["card_serial"]) for r in rows]),
        np.array([str(r["family"]) for r in rows]),
    )


def _operator_events(kernels: Iterable[Plain], sm_count: float) -> dict[str, dict[str, float]]:
    """Return the events of each operator: the sum over the kernels of one call."""
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
        for name, value in events_of_launch(metrics).items():
            total[kernel["spec"]][name] += value
    return total


def _metric(column: str) -> str:
    """Return a metric's name from that of its column, in which the point before the roll-up is an underscore."""
    stem, _, last = column.rpartition("_")
    return f"{stem}.{last}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
