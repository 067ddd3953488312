"""Calibrate a card on tables of kernel latencies: corrections and learned factors on top of its
forecast.

The fit is the latency half of ``wattcast fit kernels`` (``fit_corrections``, ``fit_residuals``)
with the forecast as its start. One shape in five is held out by a hash of the shape before anything
is fitted, and judges the result. Bursts are taken at the card's top clock, with the effective clock
of the forecast under load: corrections then mean cycles, and a prediction still lowers the clock
where power meets the limit. Energies move only by rows whose watts can be believed; V(f), idle
power and all families without rows stay forecast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.calibrate.forecast_shift import LEAST_MOVING_ROWS, shift_energies
from wattcast.calibrate.kernel_rows import on_random_data
from wattcast.calibrate.latency_fit import (
    ResidualSample,
    fit_corrections,
    fit_residuals,
    one_thread,
)
from wattcast.calibrate.row_prediction import (
    conformal_ends,
    loaded_clock_hz,
    measured_ranges,
    predict_bursts_s,
    predict_with_bundle,
)
from wattcast.calibrate.scoring import mean_percent_error
from wattcast.calibrate.table_rows import BANDS_MS, RUN_S, TableRows, held_out, read_tables
from wattcast.core.arrays import Array, sweep_values
from wattcast.core.errors import BadInput
from wattcast.core.strict_files import FitStatus, Provenance
from wattcast.hardware import Gpu
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_table import USUAL_CONDITION
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import Bundle, bundle_for, forecast_bundle, shipped_bundle
from wattcast.predictor.bundle.bundle_file import ResidualEnds
from wattcast.predictor.ideal_terms import compute_ideal_terms
from wattcast.predictor.kernel_phases import blend_corrections
from wattcast.predictor.learned_factors import LayeredFactors, LearnedFactors
from wattcast.workload import engine_operators
from wattcast.workload.operator_base import Operator

LEAST_ROWS = 40  # of a family, to calibrate it
LEAST_OWN_SHARE = (
    0.3  # of a latency that a row's own kernel keeps when what was timed beside it is taken off
)
BAND_NAMES = ("below 0.02 ms", "0.02 to 0.1 ms", "0.1 ms and above")
# with believed watts, of which at most so many move energies: each takes a search for its clock
_POWER_ROWS = 40


@dataclass(frozen=True)
class TableError:
    """Mean absolute error in percent on rows that no fit saw: of the forecast, and calibrated."""

    what: str  # products bf16, attention decode ...
    engine: str
    band: str
    rows: int
    forecast: float
    calibrated: float


@dataclass(frozen=True)
class TableCalibration:
    """A bundle calibrated on tables, how far it is off rows held out, and what was read."""

    bundle: Bundle
    errors: tuple[TableError, ...]
    fitted: int
    held_out: int
    notes: tuple[str, ...]


def calibrate_tables(
    tables: str | Path | Sequence[str | Path],
    gpu: str | Path | Gpu,
    tell: Callable[[str], None] = lambda _: None,
) -> TableCalibration:
    """Calibrate a GPU on public kernel tables (or kernel rows of our own): files, folders, or
    several of them.

    It is ``wattcast.calibrate(gpu=..., table=...)``; ``wattcast.predict(..., bundle=found.bundle)``
    uses the result."""
    chip = find_gpu(gpu)
    paths = [tables] if isinstance(tables, (str, Path)) else list(tables)
    return calibrate_rows(read_tables(paths, chip), chip, tell)


def check_tables(tables: Sequence[str | Path], gpu: str | Path | Gpu) -> TableCalibration:
    """Compare the bundle that a GPU has with all rows of tables, and its forecast beside it;
    nothing is fitted.
    """
    chip = find_gpu(gpu)
    table = read_tables(list(tables), chip)
    timed = np.isfinite(table.rows.column("latency_s"))
    judged = table.select_rows(on_random_data(table.rows) & table.rows.fit & timed)
    bundle = bundle_for(chip)
    return TableCalibration(
        bundle,
        judge_tables(judged, chip, forecast_bundle(chip), bundle),
        0,
        len(judged.rows),
        table.notes,
    )


def calibrate_rows(
    table: TableRows, gpu: Gpu, tell: Callable[[str], None] = lambda _: None
) -> TableCalibration:
    """Calibrate a GPU on rows that were read already: times by bursts, energies by watts, where
    there are enough.
    """
    start = shipped_bundle(gpu.name) or forecast_bundle(gpu)
    away = held_out(table.rows.ops)
    usable = table.rows.is_kind("burst") & on_random_data(table.rows) & table.rows.fit
    is_timed = (fitted := int((usable & ~away).sum())) >= LEAST_ROWS
    powered = (
        np.isfinite(table.rows.column("power_w"))
        & table.rows.is_kind("sustained")
        & (~away | (not is_timed))
    )
    if not is_timed and powered.sum() < LEAST_MOVING_ROWS:
        raise BadInput(
            f"{usable.sum()} burst rows of the {gpu.name} and {powered.sum()} sustained ones with watts: at least "
            f"{LEAST_ROWS} of the first, of shapes that are not held out, or {LEAST_MOVING_ROWS} of the second are "
            "needed. Give more tables, or calibrate on whole models: `wattcast calibrate FILE`."
        )
    judged = table.select_rows(usable & away & is_timed)
    bundle = start
    note = "times: as before"
    if is_timed:
        tell(f"{fitted} rows to fit, {len(judged.rows)} held out")
        with one_thread():
            bundle = fit_table_latency(table.select_rows(usable & ~away), gpu, start)
        assert isinstance(bundle.learned, LayeredFactors), "a fit has factors of its own"
        families = ", ".join(bundle.learned.own.time)
        note = f"{fitted} bursts of {families} fitted on the forecast, {len(judged.rows)} of other shapes held out"
    bundle, power_note = _fit_power(table.select_rows(powered), gpu, bundle)
    is_own = (
        start.status is FitStatus.MEASURED and not is_timed
    )  # a card of a measured GPU, whose watts alone moved
    note += f"; {power_note}" + (
        "" if is_own else "; V(f), idle power and other families: forecast"
    )
    bundle = replace(
        bundle,
        status=FitStatus.MEASURED if is_own else FitStatus.CALIBRATED,
        provenance=Provenance(
            f"kernel tables: {table.rows.source}", device=table.rows.card or gpu.name, note=note
        ),
        residuals={**bundle.residuals, **_interval_ends(judged, gpu, bundle)},
        assumptions=(
            f"calibrated: {note}",
            *(a for a in start.assumptions if not a.startswith("forecast:")),
        ),
    )
    counts = fitted if is_timed else 0, len(judged.rows)
    return TableCalibration(bundle, judge_tables(judged, gpu, start, bundle), *counts, table.notes)


def fit_table_latency(table: TableRows, gpu: Gpu, start: Bundle) -> Bundle:
    """Fit corrections and learned factors on time to bursts; families with few rows stay as they
    are.
    """
    reference = start.reference
    learner = build_kernels(
        table.rows.ops, table.rows.conditions, gpu, reference, ()
    ).work.root_family
    table = table.select_rows(
        np.array([learner.count(family) >= LEAST_ROWS for family in learner], dtype=bool)
    )
    rows = table.rows
    kernels = build_kernels(rows.ops, rows.conditions, gpu, reference, ())
    latency_s = rows.column(
        "latency_s"
    )  # without the predicted time of what ran beside each row's own kernel
    own_s = np.maximum(latency_s - beside_s(table, gpu, start), LEAST_OWN_SHARE * latency_s)
    top_hz = float(sweep_values(gpu.clocks.max_hz))
    clock_hz = np.full(len(rows), top_hz)
    law = start.for_bursts().clock_law
    if law is not None:
        clock_hz = loaded_clock_hz(law, kernels, own_s, top_hz, reference.sm_count)
    terms = compute_ideal_terms(kernels, reference)
    fitted = fit_corrections(terms, kernels.work.kernel_family, own_s, clock_hz, start.corrections)
    ran = set(kernels.work.kernel_family)
    corrections = {**start.corrections, **{group: c for group, c in fitted.items() if group in ran}}
    scaffold_s = terms.seconds(np.log(blend_corrections(kernels.work, corrections)), clock_hz)
    time = fit_residuals([ResidualSample(kernels, own_s / scaffold_s)])
    own = LearnedFactors(reference, time, {})
    return replace(
        start,
        corrections=corrections,
        learned=LayeredFactors(reference, time, {}, own=own, carried=start.learned),
        seen={**start.seen, **measured_ranges(rows, kernels)},
    )


def beside_s(table: TableRows, gpu: Gpu, bundle: Bundle) -> Array:
    """Predict the seconds of the operators that each row was timed together with, at the top clock."""
    found = np.zeros(len(table.beside))
    pairs = [(i, op) for i, ops in enumerate(table.beside) for op in ops]
    if pairs:
        rows, ops = zip(*pairs, strict=True)
        kernels = build_kernels(ops, (USUAL_CONDITION,) * len(ops), gpu, bundle.reference, ())
        np.add.at(found, list(rows), predict_bursts_s(kernels, gpu, bundle))
    return found


def predict_tables_s(table: TableRows, gpu: Gpu, bundle: Bundle) -> Array:
    """Predict the latency of each row as it was timed: bursts at the top clock, others over a
    second.
    """
    return np.asarray(
        predict_with_bundle(bundle, table.rows, gpu, RUN_S)[:, 0] + beside_s(table, gpu, bundle)
    )


def judge_tables(
    table: TableRows, gpu: Gpu, forecast: Bundle, calibrated: Bundle
) -> tuple[TableError, ...]:
    """Compare both bundles with rows, by what ran, engine and band of latency."""
    measured_s = table.rows.column("latency_s")
    before_s, after_s = (predict_tables_s(table, gpu, bundle) for bundle in (forecast, calibrated))
    band = np.digitize(measured_s * 1e3, BANDS_MS)
    found = []
    names = [
        (describe_work(op), engine) for op, engine in zip(table.rows.ops, table.engine, strict=True)
    ]
    for what, engine in sorted(set(names)):
        alike = np.array([name == (what, engine) for name in names], dtype=bool)
        for place, name in enumerate(BAND_NAMES):
            at = alike & (band == place)
            if at.any():
                errors = (
                    mean_percent_error(said[at], measured_s[at]) for said in (before_s, after_s)
                )
                found.append(
                    TableError(
                        what, engine, name, int(at.sum()), *(float(e or 0.0) for e in errors)
                    )
                )
    return tuple(found)


def describe_work(op: Operator) -> str:
    """Name what a row timed, as errors are told: products and experts by format, attention by phase
    and cache.
    """
    if isinstance(op, engine_operators.PagedAttention):
        return f"attention {op.kind_of_batch} over {op.kv_dtype}"
    if isinstance(op, engine_operators.FusedExperts):
        return f"experts {op.weights}" + (f" by {op.scales}" if op.scales != "none" else "")
    if isinstance(op, engine_operators.WeightOnlyProduct):
        return f"products with {op.weights} weights"
    scaled = (engine_operators.ScaledProduct, engine_operators.BlockProduct)
    scales = f" by {op.scales}" if isinstance(op, scaled) else ""
    return f"{'products' if op.family == 'gemm' else op.kind} {op.dtype}{scales}"


def _fit_power(table: TableRows, gpu: Gpu, bundle: Bundle) -> tuple[Bundle, str]:
    """Move energies by the rows with believed watts, as ``fit kernels`` does with few rows."""
    if not len(table.rows):
        return bundle, "energies: forecast"
    few = table.select_rows(
        np.arange(len(table.rows)) % max(len(table.rows) // _POWER_ROWS, 1) == 0
    )
    found, moved = shift_energies(few.rows, gpu, bundle)
    if not found.levels:
        return moved, f"energies: forecast ({len(few.rows)} rows of watts did not move them)"
    gain = f"{found.forecast:.1f} to {found.held_out:.1f} % held out"
    return moved, f"energies moved by {len(few.rows)} rows of watts ({gain})"


def _interval_ends(table: TableRows, gpu: Gpu, bundle: Bundle) -> dict[str, ResidualEnds]:
    """Return the interval ends of each family from its rows held out; power keeps the forecast's."""
    ratio = table.rows.column("latency_s") / predict_tables_s(table, gpu, bundle)
    families = np.array(table.rows.family)
    return {
        family: ResidualEnds(
            conformal_ends(ratio[families == family]),
            bundle.residuals[family].power,
            int((families == family).sum()),
        )
        for family in dict.fromkeys(table.rows.family)
    }
