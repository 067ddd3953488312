"""Validate the shipped counter model on work it was not trained on, as rows of the accuracy ledger.

The model is trained on microbenchmarks only and tested on multimedia workloads, savings between variants, energies of
single kernels, and the operators of the kernel database (docs/method/counters.md).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from wattcast import hardware
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.core.measured_rows import ROWS_FILE, database_folder, read_table
from wattcast.counter_models.profiler_counters import (
    MOVE_FRAMES,
    MOVED_SUFFIX,
    events_of_launch,
    moves_frames,
    read_operator_metrics,
)
from wattcast.counter_models.two_rails import RailsFit, shipped_fit
from wattcast.fit.scoring import LedgerRow, make_ledger_row, mean_percent_error
from wattcast.hardware import OperatingPoint
from wattcast.power.activity import Activity, ActivitySource

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


def make_counter_model_rows(gpu: str) -> list[LedgerRow]:
    """Return the ledger rows of every test of the counter model; floors predict the mean power of training."""
    fit, card = shipped_fit(gpu), gpu.upper()
    trained_w = fit.table.power_w[fit.train]

    def floor(measured: Array) -> float | None:
        return mean_percent_error(np.full(measured.size, trained_w.mean()), measured)

    def error(pairs: list[PredictedPair]) -> float | None:
        return mean_percent_error(np.array([p.predicted for p in pairs]), np.array([p.measured for p in pairs]))

    media = multimedia_power(fit)
    worst = max(media, key=lambda p: abs(p.off_percent))
    rows = [
        make_ledger_row(
            f"{card} multimedia, trained on microbenchmarks only",
            "power",
            len(media),
            error(media),
            floor(np.array([p.measured for p in media])),
            PUBLISHED_ERROR,
            3.0,
            2.0,
            back_to_back=_round_percent(error([p for p in media if not p.name.endswith(AT_RATE)])),
            at_a_frame_rate=_round_percent(error([p for p in media if p.name.endswith(AT_RATE)])),
            worst=f"{worst.name} {worst.off_percent:+.1f} %",
        ),
        make_ledger_row(
            f"{card} microbenchmarks",
            "power, leave one benchmark out",
            trained_w.size,
            fit.error_percent(fit.train, held_out=True),
            floor(trained_w),
            leaning=fit.leaning,
            left_out=len(fit.table.left_out),
        ),
    ]
    for p in dct_savings(fit):
        watts: LedgerRow = {"measured_w": _round_percent(p.measured), "predicted_w": _round_percent(p.predicted)}
        where, off = f"{card} DCT at a fixed frame rate", abs(p.off_percent)
        rows.append(make_ledger_row(where, f"saving, {p.name}", 1, off, must=30.0, aim=10.0, **watts))
    for p in kernel_energies_above_idle(fit):
        joules: LedgerRow = {
            "measured_mj": _round_percent(1e3 * p.measured),
            "predicted_mj": _round_percent(1e3 * p.predicted),
        }
        where = f"{card} kernel beside moving frames"
        rows.append(make_ledger_row(where, f"energy of {p.name}", 1, abs(p.off_percent), **joules))
    # under the profiler operands come from DRAM; repeated runs of an operator that fits L2 find them in L2
    found, l2_byte = predict_database_operators(fit, gpu), hardware.load_gpu(gpu).l2.capacity_byte
    large = found.footprint_byte > (np.inf if l2_byte is None else float(np.mean(l2_byte)))
    sets: dict[str, Mask] = {"power": np.ones_like(large), "power, operands larger than L2": large}
    for quantity, kept in sets.items():
        measured, predicted, cards = found.measured_w[kept], found.predicted_w[kept], found.card[kept]
        factor = {one: float(np.median((measured / predicted)[cards == one])) for one in np.unique(cards)}
        corrected = predicted * np.array([factor[one] for one in cards])
        families: LedgerRow = {}
        for family in np.unique(found.family[kept]):
            mine = found.family[kept] == family
            families[str(family)] = _round_percent(mean_percent_error(predicted[mine], measured[mine]))
        rows.append(
            make_ledger_row(
                f"{card} counted operators, other cards, trained on microbenchmarks only",
                quantity,
                measured.size,
                mean_percent_error(predicted, measured),
                floor(measured),
                one_factor_a_card=_round_percent(mean_percent_error(corrected, measured)),
                factors=", ".join(f"{value:.2f}" for value in factor.values()),
                **families,
            )
        )
    return rows


def _round_percent(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _tested_watts(fit: RailsFit) -> dict[str, tuple[float, float]]:
    """Return measured and predicted watts of the rows never trained on, by name."""
    table = fit.table
    return {
        table.benchmark_names[table.benchmark[i]]: (float(table.power_w[i]), float(fit.predicted_w[i]))
        for i in np.flatnonzero(fit.test)
    }


def multimedia_power(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts of every multimedia row without transfers."""
    return [PredictedPair(name, *watts) for name, watts in _tested_watts(fit).items() if not moves_frames(name)]


def dct_savings(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts saved at a fixed frame rate by a cheaper DCT."""
    found, rows = _tested_watts(fit), []
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
    events: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # of all kernels of an operator
    for spec, kernels in read_operator_metrics(folder, sm_count).items():
        for name, count in (item for metrics in kernels for item in events_of_launch(metrics).items()):
            events[spec][name] += count
    rows = [r for r in read_table(folder / ROWS_FILE) if r["kind"] == "sustained" and r["spec"] in events]
    rows = [r for r in rows if r["data"] == "random" and r["power_w"]]
    names = fit.model.required_events
    value = np.array([[events[r["spec"]][name] for name in names] for r in rows])
    clock_hz = np.array([r["sm_clock_hz"] for r in rows], dtype=float)
    at = OperatingPoint(clock_hz=clock_hz, memory_clock_hz=float(fit.table.memory_clock_hz[0]))
    activity = Activity(np.array([r["latency_s"] for r in rows]), value, names, at, ActivitySource.PROFILED)
    return CountedOperators(
        np.array([r["power_w"] for r in rows]),
        fit.model.power(activity).total_w,
        np.array([float(r["footprint_byte"] or 0.0) for r in rows]),
        np.array([str(r["card_serial"]) for r in rows]),
        np.array([str(r["family"]) for r in rows]),
    )
