"""Measure what each part of the kernel model is worth: leave it out, or give it the truth, and
predict held-out rows.

Run: ``python -m wattcast.lab.validate.long_checks.ablations`` (minutes; ``wattcast lab validate``
then lists the rows).

Every ablation runs the whole fit on altered rows and is compared with the full model on the same
test rows, whose predictions ship with the bundle:

- tile oracle: rows say which kernels ran, so that tiles are known and not chosen (in the
  cross-validation itself);
- NVML clock: the effective clock of every row is set to the reported one, so that no clock law is
  learned;
- half the database: half of the training shapes, three draws;
- no correction: the scaffold's ideal terms alone, with nothing fitted;
- FLOPs and bytes: a non-negative regression by family in place of the scaffold.

Power models are compared at measured time and clock, so that only they differ. The rate-based model
[Stokke2016, Eq. 1] has one cost per event and a base power, whatever the voltage. Alpha-C
[Stokke2016, Eq. 3] has one activity factor per rail, times V²·f: the busiest unit's share of its
peak on the core rail, DRAM's share of its bandwidth on the memory rail. Ours is module power
without its learned factor: energies of events times V², plus an idle curve.

The time of a prediction is processor time of this process, warm: the median of several predictions
of one model whose graph and factors are forgotten between them. Paper 003 gives 1.8 s a workload
for its own tool (Table II)."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import (
    CARD,
    KernelRows,
    assign_folds,
    on_random_data,
    settled_figures,
    shape_name,
)
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.calibrate.row_prediction import predict_with_bundle
from wattcast.calibrate.scoring import (
    LedgerRow,
    make_ledger_row,
    mean_percent_error,
)
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.hardware.gpu import DEFAULT_TEMPERATURE_C
from wattcast.kernels import build_kernels
from wattcast.lab.fit.database_fit import load_held_out
from wattcast.lab.fit.held_out import HeldOutRows
from wattcast.lab.fit.kernel_fit import (
    KernelFit,
    PowerRows,
    build_bundle,
    fit_idle_curve,
    fit_kernel_rows,
    fit_module_power,
)
from wattcast.lab.validate.kernel_checks import solve_relative
from wattcast.power.activity import known_events
from wattcast.power.module_power import ModulePower, as_module_power
from wattcast.power.power_model import IdlePower, VoltageCurve
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import (
    FAMILIES,
    Bundle,
    shipped_bundle,
)
from wattcast.predictor.kernel_phases import Correction, count_events
from wattcast.predictor.learned_factors import LearnedFactors
from wattcast.predictor.pipeline import BUSY_EVENT
from wattcast.predictor.prediction import predict_graph
from wattcast.predictor.timeline import count_active_sms, count_waves
from wattcast.workload.build_model import _build_graph, build_graph
from wattcast.workload.model_options import ModelOptions, SoftwareStack

Tell = Callable[[str], None]
FOLDS = (0, 1)  # of five: a fit takes a minute or two
DRAWS = 3


def quick_rows(gpu: str, held_rows: HeldOutRows) -> list[LedgerRow]:
    """Ablations without a fit of the whole: no correction, and a regression on FLOPs and bytes."""
    chip = hardware.load_gpu(gpu)
    bundle = shipped_bundle(gpu)
    rows = kernel_rows.load_kernel_rows(gpu)
    where = f"{gpu} ablations, latency"
    test = rows.to_judge() & rows.is_kind("burst") & on_random_data(rows)
    measured = rows.column("latency_s")[test]
    full = _full(held_rows, None, "burst")
    out = [make_ledger_row(where, "full model", full[1], full[0])]
    if bundle is not None:
        bare = predict_with_fit(ideal_scaffold(bundle), rows.select_rows(test), chip)[:, 0]
        out.append(
            make_ledger_row(
                where,
                "no correction: the ideal scaffold",
                int(test.sum()),
                mean_percent_error(bare, measured),
                full[0],
            )
        )
    out.append(_oracle(where, held_rows))
    by_size = regress_by_family(rows.select_rows(test), assign_folds(rows)[test])
    out.append(
        make_ledger_row(
            where,
            "FLOPs-and-bytes regression by family",
            int(test.sum()),
            mean_percent_error(by_size, measured),
            full[0],
        )
    )
    return out


def _oracle(where: str, held_rows: HeldOutRows) -> LedgerRow:
    """Latency of products with the kernels that ran, beside the full model on those rows."""
    oracle_s = held_rows.oracle_latency_s
    at = np.isfinite(oracle_s)
    error, full = (
        mean_percent_error(s[at], held_rows.latency_s[at])
        for s in (oracle_s, held_rows.predicted_latency_s)
    )
    return make_ledger_row(
        where,
        "tile oracle: the kernels that ran",
        int(at.sum()),
        error,
        full,
    )


def long_rows(
    gpu: str,
    held_rows: HeldOutRows,
    tell: Tell,
) -> list[LedgerRow]:
    """Ablations that fit the whole again, several times; minutes each."""
    chip = hardware.load_gpu(gpu)
    rows = kernel_rows.load_kernel_rows(gpu)
    idle = fit_idle_curve(kernel_rows.load_idle_rows(gpu), chip)
    out = []
    with one_thread():
        out += _refitted(
            gpu,
            "NVML clock for the effective clock",
            _reported(rows),
            held_rows,
            chip,
            idle,
            tell,
        )
        out += _halved(
            gpu,
            rows,
            held_rows,
            chip,
            idle,
            tell,
        )
    return out


def _reported(rows: KernelRows) -> KernelRows:
    """Rows that know no clock but the one NVML reports."""
    clock = rows.column("sm_clock_hz")
    effective = np.where(np.isfinite(rows.column("effective_clock_hz")), clock, np.nan)
    return replace(rows, number={**rows.number, "effective_clock_hz": effective})


def _refitted(
    gpu: str,
    name: str,
    rows: KernelRows,
    held_rows: HeldOutRows,
    chip: Gpu,
    idle: IdlePower,
    tell: Tell,
) -> list[LedgerRow]:
    """Latency, power and clock of the test folds from fits of altered rows; the floor is the full
    model.
    """
    fold = assign_folds(rows)
    predicted = np.full((len(rows), 4), np.nan)
    for k in FOLDS:
        tell(f"ablation: {name}, fold {k + 1} of {len(FOLDS)}")
        test = rows.to_judge() & (fold == k)
        predicted[test] = predict_with_fit(
            fit_kernel_rows(rows.select_rows(fold != k), chip, idle), rows.select_rows(test), chip
        )
    return _compared(
        gpu,
        name,
        rows,
        predicted,
        held_rows,
        np.isin(fold, FOLDS),
        FOLDS,
    )


def _halved(
    gpu: str,
    rows: KernelRows,
    held_rows: HeldOutRows,
    chip: Gpu,
    idle: IdlePower,
    tell: Tell,
) -> list[LedgerRow]:
    """Half of the training shapes, a draw for each of three test folds."""
    fold = assign_folds(rows)
    _, shape = np.unique([shape_name(op) for op in rows.ops], return_inverse=True)
    predicted = np.full((len(rows), 4), np.nan)
    draw_errors = []
    for draw in range(DRAWS):
        tell(f"ablation: half the database, draw {draw + 1} of {DRAWS}")
        in_half = np.random.default_rng(draw).permutation(int(shape.max()) + 1)[shape] % 2 == 0
        test = rows.to_judge() & (fold == draw)
        predicted[test] = predict_with_fit(
            fit_kernel_rows(rows.select_rows((fold != draw) & in_half), chip, idle),
            rows.select_rows(test),
            chip,
        )
        one = test & rows.is_kind("burst") & on_random_data(rows)
        draw_errors.append(
            round(mean_percent_error(predicted[one, 0], rows.column("latency_s")[one]) or 0.0, 2)
        )
    draws = tuple(range(DRAWS))
    out = _compared(
        gpu,
        "half the database",
        rows,
        predicted,
        held_rows,
        np.isin(fold, draws),
        draws,
    )
    out[0]["draws"] = draw_errors
    return out


def _compared(
    gpu: str,
    name: str,
    rows: KernelRows,
    predicted: Array,
    held_rows: HeldOutRows,
    inside: Mask,
    folds: tuple[int, ...],
) -> list[LedgerRow]:
    from wattcast.calibrate.kernel_rows import settled_figures

    power_w, clock_hz, latency_s = settled_figures(rows)
    ran = rows.to_judge() & on_random_data(rows) & inside
    burst = ran & rows.is_kind("burst")
    sustained = ran & rows.is_kind("sustained")
    out = []
    for quantity, at, column, true in (
        ("latency", burst, 0, latency_s),
        ("latency, sustained", sustained, 0, latency_s),
        ("power", sustained, 1, power_w),
        ("clock", sustained, 2, clock_hz),
    ):
        measured = at & np.isfinite(predicted[:, column]) & np.isfinite(true)
        error = mean_percent_error(predicted[measured, column], true[measured])
        full = _full(held_rows, folds, "burst" if quantity == "latency" else quantity)
        out.append(
            make_ledger_row(
                f"{gpu} ablations, {quantity}",
                name,
                int(measured.sum()),
                error,
                full[0],
            )
        )
    return out


def _full(
    held_rows: HeldOutRows,
    folds: tuple[int, ...] | None,
    what: str,
) -> tuple[float | None, int]:
    """Error of the full model on the same rows, and how many."""
    at = np.array(held_rows.data) == "random"
    at &= np.ones(len(at), dtype=bool) if folds is None else np.isin(held_rows.fold, folds)
    burst = np.array([kind == "burst" for kind in held_rows.kind])
    if what == "burst":
        at &= burst
        return mean_percent_error(held_rows.predicted_latency_s[at], held_rows.latency_s[at]), int(
            at.sum()
        )
    at &= ~burst
    predicted, true = {
        "latency, sustained": (held_rows.predicted_latency_s, held_rows.latency_s),
        "power": (held_rows.predicted_power_w, held_rows.power_w),
        "clock": (held_rows.predicted_clock_hz, held_rows.clock_hz),
    }[what]
    at &= np.isfinite(predicted) & np.isfinite(true)
    return mean_percent_error(predicted[at], true[at]), int(at.sum())


_FIXED_S = 2e-6  # of a launch, in which no SM works


_POWER_LABELS = (
    "module power (ours, no learned factor)",
    "alpha-C power",
    "rate-based power",
)


def power_rows(
    rows: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
) -> list[LedgerRow]:
    """Return the held-out error of each power model on sustained rows of random data."""
    power_w, clock_hz, latency_s = settled_figures(rows)
    at = (
        rows.is_kind("sustained", "duty")
        & rows.fit
        & on_random_data(rows)
        & np.isfinite(power_w)
        & np.isfinite(clock_hz)
    )
    some = rows.select_rows(at)
    priced, alpha = _rates(
        some,
        gpu,
        power_w[at],
        clock_hz[at],
        latency_s[at],
    )
    predicted_w = _predict_by_models(priced, alpha, assign_folds(rows)[at], idle)

    tested = some.is_kind("sustained") & (some.repeat == 0)
    measured_w = priced.power_w[tested]
    capped = priced.clock_hz[tested] < TOP_CLOCK_SHARE * float(np.mean(gpu.clocks.max_hz))
    where = f"{gpu.name} ablations, power at measured time and clock"
    ledger_rows = []
    for label, watts in zip(_POWER_LABELS, predicted_w[:, tested], strict=True):
        capped_error = mean_percent_error(watts[capped], measured_w[capped])
        free_error = mean_percent_error(watts[~capped], measured_w[~capped])
        row = make_ledger_row(
            where,
            label,
            len(capped),
            mean_percent_error(watts, measured_w),
            capped=_round(capped_error),
            not_capped=_round(free_error),
        )
        ledger_rows.append(row)
    return ledger_rows


def _predict_by_models(
    priced: PowerRows,
    alpha: Array,
    fold: npt.NDArray[np.int64],
    idle: IdlePower,
) -> Array:
    """Return the watts of each row by each power model, fitted to the other folds, ``(model,
    row)``.
    """
    predicted_w = np.full((len(_POWER_LABELS), len(priced.power_w)), np.nan)
    for number in np.unique(fold):
        train = fold != number
        test = fold == number
        model, _ = fit_module_power(_select_rows(priced, train), idle, DEFAULT_TEMPERATURE_C)
        alpha_terms = _alpha_terms(alpha, priced.clock_hz, model.voltage)
        predicted_w[0, test] = _module(model, _select_rows(priced, test))
        predicted_w[1, test] = _linear(alpha_terms, priced.power_w, train, test)
        predicted_w[2, test] = _linear(_rate_terms(priced), priced.power_w, train, test)
    return predicted_w


def _rates(
    rows: KernelRows,
    gpu: Gpu,
    power_w: Array,
    clock_hz: Array,
    latency_s: Array,
) -> tuple[PowerRows, Array]:
    """Events a second of every row, and its two activity factors ``(row, 2)``."""
    reference = bundle_for(gpu).reference
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        reference,
        (),
    )
    names, counted = count_events(kernels)
    sms = float(np.mean(gpu.sm_count))
    effective = rows.column("effective_clock_hz")
    effective_hz = np.where(np.isfinite(effective), effective, clock_hz)
    fixed_s = np.minimum(_FIXED_S * kernels.work.launches, latency_s)
    busy = (
        count_active_sms(kernels, count_waves(kernels, sms)) * (latency_s - fixed_s) * effective_hz
    )
    value = np.column_stack([counted, busy])
    events = (*names, BUSY_EVENT)
    used = [i for i, name in enumerate(events) if value[:, i].any() and name != "link_byte"]
    priced = PowerRows(
        value[:, used] / latency_s[:, None],
        tuple(events[i] for i in used),
        tuple(known_events()[events[i]].module for i in used),
        clock_hz,
        power_w,
        rows.data,
        rows.column(CARD),
        rows.is_kind("sustained"),
    )
    cycles = latency_s * effective_hz
    pipe = kernels.flop / (np.asarray(kernels.pipe_per_cycle) * sms * cycles)
    l2 = (kernels.work.l2_byte + kernels.work.between_byte) / (reference.l2_byte_per_cycle * cycles)
    moved = (
        kernels.work.dram_read_byte + kernels.work.dram_write_byte + kernels.work.between_dram_byte
    )
    dram = moved / (float(np.mean(gpu.memory.byte_per_s)) * latency_s)
    return priced, np.column_stack(
        [np.clip(np.maximum(pipe, l2), 0.0, 1.0), np.clip(dram, 0.0, 1.0)]
    )


def _select_rows(rows: PowerRows, mask: Mask) -> PowerRows:
    data = [d for d, keep in zip(rows.data, mask, strict=True) if keep]
    figures = rows.clock_hz[mask], rows.power_w[mask], data, rows.card[mask], rows.sustained[mask]
    return PowerRows(rows.rate[mask], rows.events, rows.modules, *figures)


def _module(model: ModulePower, rows: PowerRows) -> Array:
    from wattcast.power.module_power import OWN_RAIL

    on_own_rail = np.array([module in OWN_RAIL for module in rows.modules])
    squared = model.voltage.level_at(rows.clock_hz)[:, None] ** 2
    energy = np.array([model.energy_j[name] for name in rows.events])
    dynamic = (rows.rate * energy * np.where(on_own_rail, 1.0, squared)).sum(axis=1)
    return np.asarray(model.idle.power_at(rows.clock_hz, DEFAULT_TEMPERATURE_C) + dynamic)


def _rate_terms(rows: PowerRows) -> Array:
    return np.column_stack([np.ones(len(rows.power_w)), rows.rate])


def _alpha_terms(
    alpha: Array,
    clock_hz: Array,
    voltage: VoltageCurve,
) -> Array:
    switched = voltage.level_at(clock_hz) ** 2 * clock_hz
    return np.column_stack(
        [
            np.ones(len(clock_hz)),
            voltage.level_at(clock_hz),
            switched,
            alpha[:, 0] * switched,
            alpha[:, 1],
        ]
    )


def _linear(
    terms: Array,
    power_w: Array,
    train: npt.NDArray[np.bool_],
    test: npt.NDArray[np.bool_],
) -> Array:
    """Non-negative least squares on relative error."""
    from scipy.optimize import nnls

    size = np.maximum(np.abs(terms[train]).max(axis=0), 1e-300)
    coefficients, _ = nnls(terms[train] / size / power_w[train, None], np.ones(int(train.sum())))
    return np.asarray(terms[test] / size @ coefficients)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


WHERE = "wall time of one prediction"
TIMES = 5
PUBLISHED = "EnergAIzer 1.8 s (Table II)"


def prediction_time_rows(gpu: str) -> list[LedgerRow]:
    """Seconds of each model of ``prediction_time.csv``."""
    chip = hardware.load_gpu(gpu)
    bundle = bundle_for(chip)
    out = []
    with (
        Path(__file__).with_name("prediction_time.csv").open(newline="", encoding="utf-8") as stream
    ):
        table = list(csv.DictReader(stream))
    for entry in table:
        options = ModelOptions(
            batch=int(entry["batch"]),
            seq=int(entry["seq"]) if entry["seq"] else None,
            stack=SoftwareStack.EAGER,
        )
        seconds = []
        for _ in range(TIMES + 1):
            _build_graph.cache_clear()
            if bundle.learned is not None:
                bundle.learned.forget()
            began_s = time.process_time()
            predict_graph(build_graph(entry["model"], options), chip, OperatingPoint(), bundle)
            seconds.append(time.process_time() - began_s)
        taken_s = float(np.median(seconds[1:]))
        more: dict[str, Any] = {
            "seconds": round(taken_s, 4),
            "profiled_s": float(entry["profiled_s"]),
        }
        if entry["simulated_s"]:
            more["simulated_s"] = float(entry["simulated_s"])
        more["profiling_over_ours"] = round(more["profiled_s"] / taken_s)
        out.append(
            make_ledger_row(
                WHERE,
                entry["model"],
                TIMES,
                None,
                None,
                PUBLISHED,
                **more,
            )
        )
    return out


def ablation_rows(gpu: str, tell: Tell) -> list[LedgerRow]:
    """Return all ledger rows of this study."""
    held_rows = load_held_out(gpu)
    chip = hardware.load_gpu(gpu)
    rows = kernel_rows.load_kernel_rows(gpu)
    tell(f"{gpu}: quick ablations")
    study_rows = quick_rows(gpu, held_rows) + power_rows(
        rows, chip, fit_idle_curve(kernel_rows.load_idle_rows(gpu), chip)
    )
    return study_rows + prediction_time_rows(gpu) + long_rows(gpu, held_rows, tell)


def predict_with_fit(
    fit: KernelFit,
    rows: KernelRows,
    gpu: Gpu,
) -> Array:
    """Predict the figures of each row from a fit, as ``predict_with_bundle`` does."""
    return predict_with_bundle(
        build_bundle(
            fit,
            rows,
            gpu,
            {},
            "",
        ),
        rows,
        gpu,
    )


def ideal_scaffold(bundle: Bundle) -> KernelFit:
    """Return the shipped clock law and energies with every λ one, no fixed time and nothing
    learned.
    """
    assert bundle.clock_law is not None
    ideal = dict.fromkeys(FAMILIES, Correction(1.0, 1.0, 0.0))
    nothing = LearnedFactors(bundle.reference, {}, {})
    return KernelFit(
        ideal,
        bundle.clock_law,
        as_module_power(bundle.power),
        dict(bundle.toggling),
        nothing,
    )


def regress_by_family(rows: KernelRows, fold: npt.NDArray[np.int64]) -> Array:
    """Return latency from FLOPs and bytes, by family, out of fold."""
    flop = np.array([op.flop for op in rows.ops])
    byte = np.array([op.read_byte + op.write_byte for op in rows.ops])
    family = np.array(rows.family)
    predicted_s = np.full(len(rows), np.nan)
    for name in dict.fromkeys(rows.family):
        at = family == name
        predicted_s[at] = flop_byte_regression(
            flop[at] + 1.0, byte[at] + 1.0, rows.column("latency_s")[at], fold[at]
        )
    return predicted_s


def flop_byte_regression(
    flop: Array,
    byte: Array,
    latency_s: Array,
    fold: npt.NDArray[np.int64],
) -> Array:
    """Return latency from a regression on FLOPs, bytes and a constant, out of fold, fitted to
    relative error.
    """
    terms = np.column_stack([np.ones(len(flop)), flop / flop.max(), byte / byte.max()])
    predicted_s = np.full(len(flop), np.nan)
    for k in np.unique(fold):
        training = fold != k
        predicted_s[~training] = terms[~training] @ solve_relative(
            terms[training], latency_s[training]
        )
    return predicted_s


if __name__ == "__main__":
    from wattcast.lab.validate.long_checks.ledger_rows import run_study

    run_study("ablations", ablation_rows)
