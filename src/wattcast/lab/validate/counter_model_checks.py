"""Ledger rows of the counter model that ships, which was trained on microbenchmarks only.

They test it on other work: multimedia workloads, savings between variants, energies of single
kernels, and the operators of the kernel database (docs/method/counters.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate.scoring import (
    LedgerRow,
    make_ledger_row,
    mean_percent_error,
    score_row,
)
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import (
    ROWS_FILE,
    database_folder,
    read_table,
)
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models import microbench_lines
from wattcast.lab.counter_models.microbench_lines import events_of_launch
from wattcast.lab.counter_models.rails_apart import RailsFit, shipped_fit
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
    """Return the ledger rows of every test of the counter model; floors predict the mean power of
    training.
    """
    fit = shipped_fit(gpu)
    score = partial(_score_against_mean, gpu.upper(), fit.table.power_w[fit.train])
    return [
        _multimedia_row(fit, score),
        _left_out_row(fit, score),
        *_saving_rows(fit, gpu.upper()),
        *_operator_rows(fit, gpu, score),
    ]


def _score_against_mean(
    card: str,
    trained_w: Array,
    where: str,
    quantity: str,
    estimate: Array,
    measured: Array,
    *goals: Any,
    **more: Any,
) -> LedgerRow:
    floor = np.full(measured.size, trained_w.mean())
    return score_row(
        f"{card} {where}",
        quantity,
        estimate,
        measured,
        floor,
        *goals,
        **more,
    )


def _round_error(predicted: Array, measured: Array) -> float | None:
    return _round_percent(mean_percent_error(predicted, measured))


def _multimedia_row(fit: RailsFit, score: Callable[..., LedgerRow]) -> LedgerRow:
    media = multimedia_power(fit)
    worst = max(media, key=lambda program: abs(program.off_percent))
    predicted = np.array([program.predicted for program in media])
    measured = np.array([program.measured for program in media])
    at_rate = np.array([program.name.endswith(AT_RATE) for program in media])
    kinds = {
        "back_to_back": _round_error(predicted[~at_rate], measured[~at_rate]),
        "at_a_frame_rate": _round_error(predicted[at_rate], measured[at_rate]),
        "worst": f"{worst.name} {worst.off_percent:+.1f} %",
    }
    where = "multimedia, trained on microbenchmarks only"
    return score(
        where,
        "power",
        predicted,
        measured,
        PUBLISHED_ERROR,
        3.0,
        2.0,
        **kinds,
    )


def _left_out_row(fit: RailsFit, score: Callable[..., LedgerRow]) -> LedgerRow:
    shape: LedgerRow = {"leaning": fit.leaning, "left_out": len(fit.table.left_out)}
    predicted_w = fit.held_out_w[fit.train]
    measured_w = fit.table.power_w[fit.train]
    name = "power, leave one benchmark out"
    return score(
        "microbenchmarks",
        name,
        predicted_w,
        measured_w,
        **shape,
    )


def _saving_rows(fit: RailsFit, card: str) -> list[LedgerRow]:
    """Return rows of what a cheaper DCT saves, and of the energy of kernels beside moving
    frames.
    """
    ledger_rows = []
    for saving in dct_savings(fit):
        watts: LedgerRow = {
            "measured_w": _round_percent(saving.measured),
            "predicted_w": _round_percent(saving.predicted),
        }
        where = f"{card} DCT at a fixed frame rate"
        name = f"saving, {saving.name}"
        off = abs(saving.off_percent)
        ledger_rows.append(
            make_ledger_row(
                where,
                name,
                1,
                off,
                must=30.0,
                aim=10.0,
                **watts,
            )
        )
    for kernel in kernel_energies_above_idle(fit):
        joules: LedgerRow = {
            "measured_mj": _round_percent(1e3 * kernel.measured),
            "predicted_mj": _round_percent(1e3 * kernel.predicted),
        }
        where = f"{card} kernel beside moving frames"
        name = f"energy of {kernel.name}"
        ledger_rows.append(
            make_ledger_row(
                where,
                name,
                1,
                abs(kernel.off_percent),
                **joules,
            )
        )
    return ledger_rows


def _operator_rows(
    fit: RailsFit,
    gpu: str,
    score: Callable[..., LedgerRow],
) -> list[LedgerRow]:
    """Return rows of counted operators, all and those whose operands are larger than L2.

    Under the profiler operands come from DRAM; repeated runs of an operator that fits L2 find them
    in L2."""
    operators, predicted_w = predict_database_operators(fit, gpu)
    l2_byte = hardware.load_gpu(gpu).l2.capacity_byte
    footprint_byte = np.array([row["footprint_byte"] or 0.0 for row in operators])
    large = footprint_byte > (np.inf if l2_byte is None else float(np.mean(l2_byte)))
    measured_w = np.array([row["power_w"] for row in operators])
    card_of = np.array([row["card_serial"] for row in operators])
    family_of = np.array([row["family"] for row in operators])
    where = "counted operators, other cards, trained on microbenchmarks only"
    ledger_rows = []
    sets: dict[str, Mask] = {"power": np.ones_like(large), "power, operands larger than L2": large}
    for quantity, in_set in sets.items():
        measured = measured_w[in_set]
        predicted = predicted_w[in_set]
        more = _error_with_card_factors(predicted, measured, card_of[in_set])
        for family in np.unique(family_of[in_set]):
            at = family_of[in_set] == family
            more[str(family)] = _round_error(predicted[at], measured[at])
        ledger_rows.append(
            score(
                where,
                quantity,
                predicted,
                measured,
                **more,
            )
        )
    return ledger_rows


def _error_with_card_factors(
    predicted: Array,
    measured: Array,
    cards: Array,
) -> LedgerRow:
    """Return the error where each card's predictions are scaled by its median ratio."""
    corrected = predicted.copy()
    factors = []
    for card in np.unique(cards):
        of_card = cards == card
        factor = float(np.median((measured / predicted)[of_card]))
        corrected[of_card] *= factor
        factors.append(f"{factor:.2f}")
    return {
        "one_factor_a_card": _round_error(corrected, measured),
        "factors": ", ".join(factors),
    }


def _round_percent(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _tested_watts(fit: RailsFit) -> dict[str, tuple[float, float]]:
    """Return measured and predicted watts of the rows never trained on, by name."""
    table = fit.table
    return {
        table.benchmark_names[table.benchmark[i]]: (
            float(table.power_w[i]),
            float(fit.predicted_w[i]),
        )
        for i in np.flatnonzero(fit.test)
    }


def multimedia_power(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts of every multimedia row without transfers."""
    return [
        PredictedPair(name, *watts)
        for name, watts in _tested_watts(fit).items()
        if not microbench_lines.moves_frames(name)
    ]


def dct_savings(fit: RailsFit) -> list[PredictedPair]:
    """Return the watts saved at a fixed frame rate by a cheaper DCT."""
    watts_of = _tested_watts(fit)
    rows = []
    for what, before, after in DCT_SAVINGS:
        measured_before_w, predicted_before_w = watts_of[before + AT_RATE]
        measured_after_w, predicted_after_w = watts_of[after + AT_RATE]
        measured_w = measured_before_w - measured_after_w
        rows.append(PredictedPair(what, measured_w, predicted_before_w - predicted_after_w))
    return rows


def kernel_energies_above_idle(fit: RailsFit) -> list[PredictedPair]:
    """Return the joules above idle that each kernel adds to moving its frames.

    Measured: energy of a pass with the kernel, less one without, less idle power times the longer
    duration. Predicted: the events of the kernel's own counters times their costs."""
    table = fit.table
    at = {table.benchmark_names[b]: i for i, b in enumerate(table.benchmark)}
    bare = at[microbench_lines.MOVE_FRAMES]
    idle_w = float(table.power_w[at[IDLE_ROW]])
    if table.duration_s is None:
        raise bad_value(table.name, "durations", "none")
    rows = []
    for name, i in at.items():
        if not name.endswith(microbench_lines.MOVED_SUFFIX):
            continue
        pass_s = table.duration_s[i]
        bare_s = table.duration_s[bare]
        measured_j = (
            table.power_w[i] * pass_s - table.power_w[bare] * bare_s - idle_w * (pass_s - bare_s)
        )
        predicted_j = (fit.predicted_w[i] - fit.predicted_w[bare]) * pass_s
        rows.append(
            PredictedPair(
                name.removesuffix(microbench_lines.MOVED_SUFFIX),
                float(measured_j),
                float(predicted_j),
            )
        )
    return rows


def predict_database_operators(fit: RailsFit, gpu: str) -> tuple[list[Plain], Array]:
    """Return the sustained rows of counted operators on random data, and the watts that their
    counters give.

    The database counts fewer metrics: warps are taken as full, and shared-memory conflicts and
    tensor products of integers or fp64 as absent."""
    folder = database_folder(gpu)
    sm_count = float(hardware.load_gpu(gpu).sm_count)
    counted = microbench_lines.read_operator_metrics(folder, sm_count)
    events = {spec: sum_events(kernels) for spec, kernels in counted.items()}
    rows = [
        row
        for row in read_table(folder / ROWS_FILE, "sustained")
        if row["spec"] in events and row["data"] == "random" and row["power_w"]
    ]
    names = fit.model.required_events
    counts = np.zeros((len(rows), len(names)))
    for i, row in enumerate(rows):
        events_of_row = events[row["spec"]]
        counts[i] = [events_of_row.get(name, 0.0) for name in names]
    clock_hz = np.array([row["sm_clock_hz"] for row in rows], dtype=float)
    at = OperatingPoint(clock_hz=clock_hz, memory_clock_hz=float(fit.table.memory_clock_hz[0]))
    duration_s = np.array([row["latency_s"] for row in rows])
    activity = Activity(
        duration_s,
        counts,
        names,
        at,
        ActivitySource.PROFILED,
    )
    return rows, fit.model.power(activity).total_w


def sum_events(kernels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the events of an operator, from the metrics of its kernels."""
    total: dict[str, float] = defaultdict(float)
    for metrics in kernels:
        for name, count in events_of_launch(metrics).items():
            total[name] += count
    return total
