"""Ledger rows against measurements and simulator runs of others: counter models, components, power
limits.

The data stay outside the project (``core.strict_files.reference_folder``); where they are missing,
a row says so. Run: ``wattcast lab validate`` in the repository (WATTCAST_REFERENCE names the
measurements)."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.counter_fit import (
    CounterFitOptions,
    fit_counters,
    read_counter_tables,
)
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.lab.validate.public_checks.simulator_runs import (
    compare_simulator_runs,
    published_model_errors,
    refine_volta_components,
)
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.pipeline import analyse_graph, total_at_clock
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import load_workload

TITANX = "Titan X clock plane"
V100 = "V100 counters"
TRACES = "simulator power traces"
_MISSING = "no reference data: set WATTCAST_REFERENCE to their folder"


def component_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return errors of our power traces, and of refined components."""
    del tell
    runs = compare_simulator_runs(reference) if reference else []
    if not runs:
        return [
            make_absent_row(
                TRACES,
                "worst component, W",
                _MISSING,
                2e-5,
                1e-5,
            )
        ]
    rows = []
    for run in runs:
        name, worst = max(run.worst_w.items(), key=lambda item: item[1])
        goals = (2e-5, 1e-5) if "gpuwattch" in run.run else (None, None)
        more: dict[str, Any] = {"worst_w": float(f"{worst:.2g}"), "component": name}
        quantity = f"{run.run}, worst component, W" + (
            ", with its power report" if run.reported else ""
        )
        rows.append(
            make_ledger_row(
                TRACES,
                quantity,
                run.samples,
                None,
                None,
                None,
                *goals,
                **more,
            )
        )
    return [*rows, *_refined(reference)]


def _refined(reference: Path | None) -> list[LedgerRow]:
    refinement = refine_volta_components(reference) if reference else None
    if refinement is None or reference is None:
        return []
    kernels, score = refinement
    more: dict[str, Any] = {"in_sample": round(score.in_sample, 2), "before": round(score.start, 2)}
    where = "V100 components of AccelWattch"
    one_out = make_ledger_row(
        where,
        "power, leave one kernel out",
        kernels,
        score.leave_one_out,
        score.constant,
        **more,
    )
    by_application = make_ledger_row(
        where, "power, leave one application out", kernels, score.leave_application_out
    )
    path = reference / "accelwattch" / "accelwattch_validation_tidy.csv"
    theirs = published_model_errors(path) if path.is_file() else []
    refined_rows = [
        make_ledger_row("AccelWattch's own watts", e.config, e.kernels, e.mape) for e in theirs
    ]
    return [one_out, by_application, *refined_rows]


def v100_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return errors of 25 kernels with hardware counters, one left out at a time."""
    table = (
        reference / "accelwattch" / "volta_hw_counters_power_components.csv" if reference else None
    )
    if table is None or not table.is_file():
        return [
            make_absent_row(
                V100,
                "power, leave one kernel out",
                _MISSING,
                10.0,
                9.0,
            )
        ]
    columns = Path(__file__).with_name("volta.yaml")
    options = CounterFitOptions(models=(CounterModelKind.HYBRID,), advice=False)
    fit = fit_counters(read_counter_tables(table, "table", columns), options, tell)
    held_out = fit.kinds[CounterModelKind.HYBRID].held_out
    rows = fit.table.power_w
    floor = float(100 * abs((rows.sum() - rows) / (len(rows) - 1) / rows - 1).mean())
    n = len(rows)
    name = "power, leave one kernel out"
    out = [
        make_ledger_row(
            V100,
            name,
            n,
            held_out["benchmark"].score.mape,
            floor,
            "7.5 in sample",
            10.0,
            9.0,
        )
    ]
    if "group" in held_out:
        out.append(
            make_ledger_row(
                V100,
                "power, leave one application out",
                n,
                held_out["group"].score.mape,
                floor,
            )
        )
    return out


def titanx_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return errors of 102 microbenchmarks over 64 clock pairs, one left out at a time; takes about
    90 seconds.
    """
    path = reference / "titanx" / "micro_gtxtitanx.csv" if reference else None
    if path is None or not path.is_file():
        return [
            make_absent_row(
                TITANX,
                "power, leave one benchmark out, V inferred",
                _MISSING,
                6.5,
                5.8,
            ),
            make_absent_row(
                TITANX,
                "the same, power at the default clocks known",
                _MISSING,
                3.5,
                3.0,
            ),
        ]
    options = CounterFitOptions(
        models=(
            CounterModelKind.HYBRID,
            CounterModelKind.RATE,
            CounterModelKind.ALPHA_C,
            CounterModelKind.LINEAR,
        ),
        advice=False,
        hold=("benchmark",),
    )
    fit = fit_counters(read_counter_tables(path, "gpmtool", None), options, tell)
    held_out = {model: kind.held_out["benchmark"] for model, kind in fit.kinds.items()}
    main = held_out[CounterModelKind.HYBRID]
    floor = held_out[CounterModelKind.LINEAR].score
    n = main.score.rows
    name = "power, leave one benchmark out, V inferred"
    rows = [
        make_ledger_row(
            TITANX,
            name,
            n,
            main.score.mape,
            floor.mape,
            "6-7",
            6.5,
            5.8,
        )
    ]
    if main.anchored is not None:
        rows.append(
            make_ledger_row(
                TITANX,
                "the same, power at the default clocks known",
                n,
                main.anchored.mape,
                None,
                None,
                3.5,
                3.0,
            )
        )
    other_models = ((CounterModelKind.RATE, "rate-based"), (CounterModelKind.ALPHA_C, "alpha-C"))
    return rows + [
        make_ledger_row(TITANX, f"the same, {label} power", n, held_out[model].score.mape)
        for model, label in other_models
    ]


ZEUS_FILE = Path("zeus") / "zeus_powerlimit_batch_sweep.csv"
ZEUS_GPUS = {
    "v100": "v100-pcie",
    "a40": "a40",
    "rtx6000": "quadro-rtx-6000",
    "p100": "p100-pcie",
}
PROTOTYPE = {
    "resnet50": "resnet50",
    "shufflenetv2": "resnet50",
    "deepspeech2": "bert-base",
    "ncf": "bert-base",
    "bert_base_uncased": "bert-base",
}
CAPPED = 0.95  # mean power above this share of the limit: the limit held the clock down
LOWEST = 0.15  # of the top clock, where a card's lowest is not published
# Zeus ran PyTorch 1.10.1 [symbioticlab/zeus], whose products of fp32 tensors round to TF32 on cards
# that have it, by default.
FP32_PRODUCTS = {"a40": "tf32"}
WAITING = 0.85  # of the power at the highest limit: idle power is no more than this
HELD = 0.98  # of a limit that binds, where the highest one did not: cards stay a little below


@dataclass(frozen=True)
class TrainingEpoch:
    """One training configuration under one limit."""

    gpu: str
    network: str
    configuration: tuple[str, ...]
    limit_w: float
    time_s: float
    power_w: float


@dataclass(frozen=True)
class PredictedEpoch:
    """One row below the highest limit, measured and predicted; time is relative to the highest
    limit's.
    """

    epoch: TrainingEpoch
    highest: TrainingEpoch
    relative_time: float
    predicted_time: float
    predicted_w: float


def read_epochs(folder: Path) -> list[TrainingEpoch]:
    """Read the rows; repeats of one configuration and limit become their mean."""
    try:
        lines = (folder / ZEUS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"{ZEUS_FILE.name}: cannot be read ({error.strerror}).") from None
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for line in csv.DictReader(lines):
        key = (
            line["gpu"],
            line["network"],
            line["dataset"],
            line["batch_size"],
            line["optimizer"],
            line["power_limit"],
        )
        groups[key].append((float(line["time_per_epoch"]), float(line["average_power"])))
    return [
        TrainingEpoch(
            key[0],
            key[1],
            key[1:5],
            float(key[5]),
            *(float(np.mean(column)) for column in zip(*pairs, strict=True)),
        )
        for key, pairs in groups.items()
    ]


@dataclass(frozen=True)
class PrototypeCurves:
    """A prototype over rising clocks: relative time, power without a cap, idle power; each
    ``(clock,)``.
    """

    clock_hz: Array
    time: Array
    power_w: Array
    idle_w: Array


@cache
def prototype_curves(gpu: str, model: str) -> PrototypeCurves:
    """Predict the prototype's training step on the forecast of a card."""
    chip = hardware.load_gpu(ZEUS_GPUS[gpu])
    options = {
        "batch": 64,
        "phase": "train",
        "dtype": FP32_PRODUCTS.get(gpu, "fp32"),
    } | ({"seq": 128, "batch": 32} if "bert" in model else {})
    bundle = bundle_for(chip)
    timeline = analyse_graph(
        load_workload.load_workload(model, ModelOptions.from_names(**options)), chip, bundle
    )
    top_hz = float(np.max(chip.clocks.max_hz))
    lowest_hz = LOWEST * top_hz if chip.clocks.min_hz is None else float(np.min(chip.clocks.min_hz))
    clock_hz = np.linspace(lowest_hz, top_hz, 181)
    totals = total_at_clock(timeline, OperatingPoint(clock_hz[:, np.newaxis]), bundle)
    idle_w = bundle.power.idle_power_w(clock_hz, 45.0)
    return PrototypeCurves(
        clock_hz, totals.latency_s / totals.latency_s[-1], totals.power_w, idle_w
    )


def predict_epochs(epochs: Iterable[TrainingEpoch]) -> list[PredictedEpoch]:
    """Predict every row below its configuration's highest limit from the rows at the highest
    limits.
    """
    groups: dict[tuple[str, ...], list[TrainingEpoch]] = defaultdict(list)
    for epoch in epochs:
        groups[epoch.gpu, *epoch.configuration].append(epoch)
    highest_of = {key: max(alike, key=lambda e: e.limit_w) for key, alike in groups.items()}
    scales = _scale_energies(highest_of.values())
    rows = []
    for key, alike in groups.items():
        highest = highest_of[key]
        limited = [e for e in alike if e is not highest]
        time, power_w = _under(
            highest,
            prototype_curves(highest.gpu, PROTOTYPE[highest.network]),
            np.array([e.limit_w for e in limited]),
            scales[highest.gpu],
        )
        rows += [
            PredictedEpoch(
                e,
                highest,
                e.time_s / highest.time_s,
                float(t),
                float(w),
            )
            for e, t, w in zip(limited, time, power_w, strict=True)
        ]
    return rows


def _scale_energies(highest: Iterable[TrainingEpoch]) -> dict[str, float]:
    """Return the factor on the forecast's energies, for each card.

    The run that draws most of its forecast never waits for its host: what it draws less is the
    forecast's error, which all runs of the card share. What the others draw less is waiting.
    """
    scales: dict[str, float] = defaultdict(float)
    for epoch in highest:
        curves = prototype_curves(epoch.gpu, PROTOTYPE[epoch.network])
        above_w = curves.power_w[-1] - curves.idle_w[-1]
        drawn = (epoch.power_w - _idle_w(epoch, curves)[-1]) / above_w
        scales[epoch.gpu] = max(scales[epoch.gpu], float(drawn))
    return scales


def _idle_w(highest: TrainingEpoch, curves: PrototypeCurves) -> Array:
    """Return the idle power by clock, which a run that hardly computes bounds."""
    return np.asarray(curves.idle_w * min(1.0, WAITING * highest.power_w / curves.idle_w[-1]))


def _under(
    highest: TrainingEpoch,
    c: PrototypeCurves,
    limits_w: Array,
    scale: float,
) -> tuple[Array, Array]:
    """Return relative time and mean power under each limit; the row at the highest limit sets the
    share of time in which the card is busy, at energies ``scale`` times the forecast's.
    """
    capped = highest.power_w > CAPPED * highest.limit_w
    share = highest.power_w / highest.limit_w if capped else HELD
    idle_w = _idle_w(highest, c)
    busy_w = idle_w + scale * (c.power_w - c.idle_w)
    busy = float(np.clip((highest.power_w - idle_w[-1]) / (busy_w[-1] - idle_w[-1]), 0.0, 1.0))
    time = busy * c.time + 1.0 - busy
    mean_w = (busy * c.time * busy_w + (1.0 - busy) * idle_w) / time
    first = _governed(mean_w, share * highest.limit_w)
    at = np.array([_governed(mean_w, share * limit_w) for limit_w in limits_w], dtype=np.int64)
    return time[at] / time[first], mean_w[at]


def _governed(power_w: Array, limit_w: float) -> int:
    """Return the index of the highest clock at which mean power meets the limit; the lowest where
    none does.
    """
    within = np.flatnonzero(power_w <= limit_w)
    return int(within[-1]) if within.size else 0


def power_limit_rows(folder: Path) -> list[LedgerRow]:
    """Return errors of relative time and power by card; the floors are "time unchanged" and "power
    = limit".
    """
    predicted_epochs = predict_epochs(read_epochs(folder))
    rows = []
    for gpu in (*ZEUS_GPUS, "all"):
        some = [p for p in predicted_epochs if gpu in (p.epoch.gpu, "all")]
        if not some:
            continue
        true, predicted_time = (
            np.array(x)
            for x in zip(*((p.relative_time, p.predicted_time) for p in some), strict=True)
        )
        watts, predicted_w, limit, highest = (
            np.array(x)
            for x in zip(
                *(
                    (p.epoch.power_w, p.predicted_w, p.epoch.limit_w, p.highest.power_w)
                    for p in some
                ),
                strict=True,
            )
        )
        name = "Zeus, power limits" if gpu == "all" else f"Zeus, power limits, {ZEUS_GPUS[gpu]}"
        rows += [
            make_ledger_row(
                name,
                "relative time",
                len(some),
                _mean(predicted_time - true),
                _mean(1.0 - true),
                floor_is="time unchanged",
            ),
            make_ledger_row(
                name,
                "power",
                len(some),
                _mean(predicted_w / watts - 1),
                _mean(limit / watts - 1),
                floor_is="power = limit",
                never_above_the_highest_limits=round(
                    _mean(np.minimum(limit, highest) / watts - 1), 2
                ),
            ),
        ]
    return rows


def _mean(error: Array) -> float:
    return float(100.0 * np.mean(np.abs(error)))
