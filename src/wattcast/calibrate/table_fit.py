"""Calibrate a card on tables of kernel latencies: corrections and learned factors on top of its
forecast.

The fit is the latency half of ``wattcast fit kernels`` (``fit_corrections``, ``fit_residuals``)
with the forecast as its start. One shape in five is held out by a hash of the shape before anything
is fitted, and judges the result. Bursts are taken at the card's top clock, with the effective clock
of the forecast under load: corrections then mean cycles, and a prediction still lowers the clock
where power meets the limit. Energies move only by rows whose watts can be believed; V(f), idle
power and all families without rows stay forecast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.calibrate.burst_limiter import added_by_limiter_s, skips_clocks
from wattcast.calibrate.energy_evidence import (
    EVIDENCE,
    kernel_evidence,
    scalable_modules,
    weigh_energies,
)
from wattcast.calibrate.forecast_shift import (
    LEAST_MOVING_ROWS,
    shift_energies,
    take_sustained,
)
from wattcast.calibrate.kernel_rows import KernelRows, on_random_data
from wattcast.calibrate.latency_fit import (
    ResidualSample,
    fit_corrections,
    fit_residuals,
    fit_trees,
    one_thread,
    refit_correction,
    residual_features,
)
from wattcast.calibrate.row_prediction import (
    analyse_rows,
    conformal_ends,
    loaded_clock_hz,
    measured_ranges,
    predict_bursts_s,
    predict_with_bundle,
)
from wattcast.calibrate.scoring import mean_percent_error
from wattcast.calibrate.table_coefficients import TABLE
from wattcast.calibrate.table_rows import (
    RUN_S,
    TableRows,
    halve_shapes,
    held_out,
    read_tables,
)
from wattcast.calibrate.untuned_experts import mark_untuned
from wattcast.core.arrays import (
    Array,
    Mask,
    sweep_values,
)
from wattcast.core.errors import BadInput
from wattcast.core.strict_files import FitStatus, Provenance
from wattcast.core.user_results import UserResult
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import USUAL_CONDITION
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import (
    Bundle,
    bundle_for,
    forecast_bundle,
    shipped_bundle,
)
from wattcast.predictor.bundle.bundle_file import ResidualEnds
from wattcast.predictor.bundle.calibrated import (
    USUAL_ENGINE,
    calibration_base,
    carry_sibling,
)
from wattcast.predictor.bundle.forecast import forecast_rule
from wattcast.predictor.ideal_terms import compute_ideal_terms
from wattcast.predictor.kernel_phases import (
    Correction,
    blend_corrections,
    find_correction,
)
from wattcast.predictor.learned_factors import LayeredFactors, LearnedFactors
from wattcast.workload import engine_operators
from wattcast.workload.operator_base import Operator, select_operators

BESIDE_ROUNDS = 2
SIBLING = "sibling"  # feature of rows of another card of the same processor
_SHORT_MS, _LONG_MS = TABLE.bands_ms
BAND_NAMES = (
    f"below {_SHORT_MS:g} ms",
    f"{_SHORT_MS:g} to {_LONG_MS:g} ms",
    f"{_LONG_MS:g} ms and above",
)
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


@dataclass(frozen=True, repr=False)
class TableCalibration(UserResult):
    """A bundle calibrated on tables, how far it is off rows held out, and what was read."""

    drawn_by = "wattcast.report.result_figures:draw_table_calibration"
    rows_in = "errors_percent"

    bundle: Bundle
    errors: tuple[TableError, ...]
    fitted: int
    held_out: int
    notes: tuple[str, ...]

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        return f"{self.bundle.gpu}: {self.fitted} rows fitted, {self.held_out} held out"

    def to_dict(self) -> dict[str, Any]:
        """Return the errors by family of kernels, as ``calibrate --json`` prints them."""
        return {
            "gpu": self.bundle.gpu,
            "rows": self.fitted,
            "held_out": self.held_out,
            "errors_percent": [vars(error) for error in self.errors],
            "notes": list(self.notes),
        }


def calibrate_tables(
    tables: str | Path | Sequence[str | Path],
    gpu: str | Path | Gpu,
    tell: Callable[[str], None] = lambda _: None,
    engine: str | None = None,
) -> TableCalibration:
    """Calibrate a GPU on public kernel tables (or kernel rows of our own): files, folders, or
    several of them; on those of one engine where it is named.

    It is ``wattcast.calibrate(gpu=..., table=...)``; ``wattcast.predict(...,
    bundle=result.bundle)`` uses the result.
    """
    chip = find_gpu(gpu)
    paths = [tables] if isinstance(tables, (str, Path)) else list(tables)
    return calibrate_rows(read_tables(paths, chip, engine=engine), chip, tell)


def check_tables(
    tables: Sequence[str | Path],
    gpu: str | Path | Gpu,
    engine: str | None = None,
    held_out_alone: bool = False,
) -> TableCalibration:
    """Compare the bundle that a GPU has with rows of tables, and its forecast beside it; nothing is
    fitted.

    All rows are compared, or the bursts of shapes that no calibration on the same tables saw.
    """
    chip = find_gpu(gpu)
    if engine and engine != USUAL_ENGINE:
        chip = replace(chip, engine=engine)
    table = mark_untuned(read_tables(list(tables), chip, engine=engine), chip)
    timed = np.isfinite(table.rows.column("latency_s"))
    chosen = on_random_data(table.rows) & table.rows.fit & timed
    if held_out_alone:
        chosen &= held_out(table.rows.ops) & table.rows.is_kind("burst")
    judged = table.select_rows(chosen)
    bundle = bundle_for(chip)
    return TableCalibration(
        bundle=bundle,
        errors=judge_tables(judged, chip, forecast_bundle(chip), bundle),
        fitted=0,
        held_out=len(judged.rows),
        notes=table.notes,
    )


@dataclass(frozen=True)
class SiblingRows:
    """Rows of a card of the same processor, on which libraries run the same kernels."""

    gpu: Gpu
    table: TableRows


def calibrate_rows(
    table: TableRows,
    gpu: Gpu,
    tell: Callable[[str], None] = lambda _: None,
    siblings: Sequence[SiblingRows] = (),
) -> TableCalibration:
    """Calibrate a GPU on rows that were read already: times by bursts, energies by watts, where
    there are enough.

    Rows of ``siblings`` say what corrections leave of kernels that this card has few rows of.
    """
    start = start_bundle(gpu)
    sample = _choose_rows(mark_untuned(table, gpu), gpu)
    bundle, note = _fit_times(sample, gpu, start, tell, siblings)
    bundle, power_note = _fit_power(sample.powered, gpu, bundle)
    note += f"; {power_note}"
    # of a card of a measured GPU watts alone may move
    stays_measured = start.status is FitStatus.MEASURED and not sample.is_timed
    if not stays_measured:
        note += "; V(f), idle power and other families: forecast"

    provenance = Provenance(
        f"kernel tables: {table.rows.source}", device=table.rows.card or gpu.name, note=note
    )
    assumptions = [text for text in start.assumptions if not text.startswith("forecast:")]
    bundle = replace(
        bundle,
        status=FitStatus.MEASURED if stays_measured else FitStatus.CALIBRATED,
        provenance=provenance,
        residuals={**bundle.residuals, **_interval_ends(sample.judged, gpu, bundle)},
        assumptions=(f"calibrated: {note}", *assumptions),
    )
    return TableCalibration(
        bundle=bundle,
        errors=judge_tables(sample.judged, gpu, start, bundle),
        fitted=len(sample.fitted.rows) if sample.is_timed else 0,
        held_out=len(sample.judged.rows),
        notes=table.notes,
    )


def start_bundle(gpu: Gpu) -> Bundle:
    """Return what a calibration starts from: the measured bundle of this name, else the forecast,
    with what a calibrated card of the same processor knows of kernels and energies.
    """
    base = calibration_base(gpu)
    measured = shipped_bundle(gpu.name)
    if measured is None:
        return carry_sibling(base, gpu)
    return replace(measured, reference=replace(measured.reference, engine=base.reference.engine))


@dataclass(frozen=True)
class _ChosenRows:
    """The rows that times and energies are fitted to, and those that judge the fit."""

    fitted: TableRows  # bursts
    judged: TableRows  # bursts of other shapes
    powered: TableRows  # with watts

    @property
    def is_timed(self) -> bool:
        """Whether there are enough bursts to fit times."""
        return len(self.fitted.rows) >= TABLE.least_rows


def _choose_rows(table: TableRows, gpu: Gpu) -> _ChosenRows:
    """Divide rows into those to fit and those to judge by; too few of both kinds are refused."""
    rows = table.rows
    is_held_out = held_out(rows.ops)
    is_burst = rows.is_kind("burst") & on_random_data(rows) & rows.fit
    is_timed = int((is_burst & ~is_held_out).sum()) >= TABLE.least_rows
    has_power = np.isfinite(rows.column("power_w")) & rows.is_kind("sustained")
    if is_timed:
        has_power &= ~is_held_out
    if not is_timed and has_power.sum() < LEAST_MOVING_ROWS:
        raise BadInput(
            f"{is_burst.sum()} burst rows of the {gpu.name} and {has_power.sum()} sustained ones "
            f"with watts: at least {TABLE.least_rows} of the first, of shapes that are not held "
            f"out, or {LEAST_MOVING_ROWS} of the second are needed. Give more tables, or calibrate "
            "on whole models: `wattcast calibrate FILE`."
        )
    return _ChosenRows(
        fitted=table.select_rows(is_burst & ~is_held_out),
        judged=table.select_rows(is_burst & is_held_out & is_timed),
        powered=table.select_rows(has_power),
    )


def _fit_times(
    sample: _ChosenRows,
    gpu: Gpu,
    start: Bundle,
    tell: Callable[[str], None],
    siblings: Sequence[SiblingRows],
) -> tuple[Bundle, str]:
    """Fit times to bursts where there are enough, and say what was fitted."""
    if not sample.is_timed:
        return start, "times: as before"
    fitted = len(sample.fitted.rows)
    judged = len(sample.judged.rows)
    tell(f"{fitted} rows to fit, {judged} held out")
    with one_thread():
        also = tuple(_sample_sibling(sibling) for sibling in siblings)
        bundle = fit_table_latency(sample.fitted, gpu, start, also)
    assert isinstance(bundle.learned, LayeredFactors), "a fit has factors of its own"
    families = ", ".join(bundle.learned.own.time)
    note = (
        f"{fitted} bursts of {families} fitted on the forecast, {judged} of other shapes held out"
    )
    if siblings:
        names = ", ".join(sibling.gpu.name for sibling in siblings)
        note += f"; learned factors with rows of {names} besides, the same processor"
    return bundle, note


def _sample_sibling(sibling: SiblingRows) -> ResidualSample:
    """Return what a sibling's own corrections leave of its rows, held-out shapes apart."""
    sample = _choose_rows(mark_untuned(sibling.table, sibling.gpu), sibling.gpu)
    start = fit_cache_writes(sample.fitted, sibling.gpu, start_bundle(sibling.gpu))
    start = fit_beside(sample.fitted, sibling.gpu, start, start)
    scaffold = _fit_scaffold(sample.fitted, sibling.gpu, start)
    count = len(scaffold.ratio)
    return ResidualSample(
        scaffold.kernels,
        scaffold.ratio,
        more={SIBLING: np.ones(count)},
        sure=np.full(count, TABLE.sibling_sure),
    )


def fit_table_latency(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
    siblings: Sequence[ResidualSample] = (),
) -> Bundle:
    """Fit corrections and learned factors on time to bursts; families with few rows stay as they
    are.

    Learned factors see what corrections leave of siblings' rows besides.

    Products are fitted first, then what was timed together with them, then products once more, as
    often as the latter says something new. How long writes into the cache take is found before.
    """
    start = fit_cache_writes(table, gpu, start)
    bundle = start
    for _ in range(BESIDE_ROUNDS):
        moved = fit_beside(table, gpu, start, bundle)
        bundle = _fit_own_times(table, gpu, moved, siblings)
        if moved.corrections == start.corrections:
            break
    return bundle


@dataclass(frozen=True)
class _Scaffold:
    """Rows of common kinds, the corrections fitted to them, and what these leave."""

    rows: KernelRows
    kernels: Kernels
    corrections: dict[str, Correction]
    ratio: Array  # of a row's own time to that of the corrected terms


def _fit_own_times(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
    siblings: Sequence[ResidualSample],
) -> Bundle:
    """Fit the times of rows' own kernels, with what ran beside them as the start has it."""
    reference = start.reference
    scaffold = _fit_scaffold(table, gpu, start)
    own_sample = ResidualSample(scaffold.kernels, scaffold.ratio)
    families = set(scaffold.kernels.work.root_family)
    alike = [_select_families(sample, families) for sample in siblings]
    time = fit_residuals([own_sample, *alike])
    own_factors = LearnedFactors(reference, time, {})
    return replace(
        start,
        corrections={**start.corrections, **scaffold.corrections},
        learned=LayeredFactors(
            reference,
            time,
            {},
            own=own_factors,
            carried=start.learned,
        ),
        seen={**start.seen, **measured_ranges(scaffold.rows, scaffold.kernels)},
    )


def _select_families(sample: ResidualSample, families: set[str]) -> ResidualSample:
    """Return the rows of a sample whose families are among these."""
    is_alike = np.isin(sample.kernels.work.root_family, sorted(families))
    rows = np.flatnonzero(is_alike)
    return replace(
        sample,
        kernels=sample.kernels.select_rows(rows, select_operators(sample.kernels.ops, rows)),
        ratio=sample.ratio[rows],
        more={name: values[rows] for name, values in sample.more.items()},
        sure=None if sample.sure is None else sample.sure[rows],
    )


def _fit_scaffold(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
) -> _Scaffold:
    """Fit the corrections of rows' own kernels, with what ran beside them as the start has it."""
    reference = start.reference
    table = _keep_common_kinds(table, gpu, start)
    rows = table.rows
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        reference,
        (),
    )

    # without the predicted time of what ran beside each row's own kernel
    latency_s = rows.column("latency_s")
    own_s = np.maximum(latency_s - beside_s(table, gpu, start), TABLE.least_own_share * latency_s)
    clock_hz = _estimate_clocks(kernels, own_s, gpu, start)
    terms = compute_ideal_terms(kernels, reference)
    groups = kernels.work.kernel_family
    group_corrections = fit_corrections(
        terms,
        groups,
        own_s,
        clock_hz,
        start.corrections,
    )
    of_groups = {group: value for group, value in group_corrections.items() if group in groups}
    blended = blend_corrections(kernels.work, {**start.corrections, **of_groups})
    scaffold_s = terms.seconds(np.log(blended), clock_hz)
    return _Scaffold(rows, kernels, of_groups, own_s / scaffold_s)


def _keep_common_kinds(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
) -> TableRows:
    """Return the rows whose family and group of kernels have enough rows to learn from."""
    return table.select_rows(_is_common_kind(table, gpu, start))


def _is_common_kind(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
) -> Mask:
    """Mark the rows whose family and group of kernels have enough rows to learn from."""
    rows = table.rows
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        start.reference,
        (),
    )
    family_count = Counter(kernels.work.root_family)
    group_count = Counter(kernels.work.kernel_family)
    kinds = zip(kernels.work.root_family, kernels.work.kernel_family, strict=True)
    has_many = [
        family_count[family] >= TABLE.least_rows and group_count[group] >= TABLE.least_group_rows
        for family, group in kinds
    ]
    return np.array(has_many, dtype=bool)


def _estimate_clocks(
    kernels: Kernels,
    own_s: Array,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    """Return the clock of each burst: the top clock, less what the load of a kernel takes off."""
    top_hz = float(sweep_values(gpu.clocks.max_hz))
    law = bundle.for_bursts().clock_law
    if law is None:
        return np.full(len(own_s), top_hz)
    return loaded_clock_hz(
        law,
        kernels,
        own_s,
        top_hz,
        bundle.reference.sm_count,
    )


def fit_beside(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
    fitted: Bundle,
) -> Bundle:
    """Fit the corrections of what products were timed together with, where it takes most of the
    time.

    Products of many tokens and few outputs are quick beside quantising their inputs. The product's
    time comes from ``fitted``, and what is left of the latency is the operator's. Kinds with few
    such rows keep their corrections.
    """
    is_long = table.rows.column("latency_s") >= TABLE.least_beside_s
    table = table.select_rows(_is_beside(table, "engine_quantize") & is_long)
    if not len(table.rows):
        return start
    ops = tuple(row_ops[0] for row_ops in table.beside)
    kernels = _build_usual(ops, gpu, start)
    latency_s = table.rows.column("latency_s")
    product_s = predict_with_bundle(fitted, table.rows, gpu, RUN_S)[:, 0]
    others = replace(table, beside=tuple(row_ops[1:] for row_ops in table.beside))
    product_s += beside_s(others, gpu, start)
    left_s = np.maximum(latency_s - product_s, TABLE.least_own_share * latency_s)
    predicted_s = predict_bursts_s(kernels, gpu, start)
    # by what is known of it, or since the product takes far less of a latency that is no launch's
    is_work = latency_s > 1e-3 * _LONG_MS
    likely_s = np.where(is_work, np.maximum(predicted_s, left_s), predicted_s)
    is_dominant = likely_s > TABLE.least_beside_share * latency_s

    groups = np.array(kernels.work.kernel_family)
    corrections = dict(start.corrections)
    for group in dict.fromkeys(groups.tolist()):
        rows = np.flatnonzero((groups == group) & is_dominant)
        if len(rows) < TABLE.least_beside_rows:
            continue
        group_kernels = _build_usual([ops[row] for row in rows], gpu, start)
        bundle = replace(start, corrections=corrections)
        correction = _refit_group(
            group,
            group_kernels,
            left_s[rows],
            predicted_s[rows],
            gpu,
            bundle,
        )
        corrections = {**corrections, group: correction}
    return replace(start, corrections=corrections)


def _refit_group(
    group: str,
    kernels: Kernels,
    measured_s: Array,
    predicted_s: Array,
    gpu: Gpu,
    start: Bundle,
) -> Correction:
    """Fit the corrections of one group of kernels again; its learned factors stay as they are."""
    terms = compute_ideal_terms(kernels, start.reference)
    clock_hz = np.full(len(measured_s), float(sweep_values(gpu.clocks.max_hz)))
    blended = blend_corrections(kernels.work, start.corrections)
    learned = predicted_s / terms.seconds(np.log(blended), clock_hz)
    begin = find_correction(group, start.corrections)
    correction = refit_correction(terms, measured_s / learned, clock_hz, begin)
    # rows this long do not tell how long a launch takes, nor a step of the few of a small input
    return replace(
        correction,
        fixed_s=min(correction.fixed_s, begin.fixed_s),
        serial_cycle=min(correction.serial_cycle, begin.serial_cycle),
    )


def _is_beside(table: TableRows, kind: str) -> Mask:
    """Mark the rows that timed an operator of a kind together with their own, before any other."""
    is_first = [len(ops) > 0 and ops[0].kind == kind for ops in table.beside]
    return np.array(is_first, dtype=bool)


def fit_cache_writes(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
) -> Bundle:
    """Find what share of their time in the start writes into the cache take where another engine
    makes them.

    The start knows those of vLLM; others are other kernels, and some overlap with attention. Each
    format of the cache takes the share with which prompts in half of the shapes are predicted best
    from the other half. Attention is timed together with its writes.
    """
    is_written = _is_beside(table, "engine_cache_write")
    if not start.reference.engine or is_written.sum() < TABLE.least_write_rows:
        return start
    table = table.select_rows(is_written)
    kinds = [_read_kind_of_batch(op) for op in table.rows.ops]
    is_prompt = np.array(kinds) == "prefill"
    writes = _build_usual([row_ops[0] for row_ops in table.beside], gpu, start)
    groups = np.array(writes.work.kernel_family)
    bundles = [_scale_groups(start, set(groups.tolist()), share) for share in TABLE.write_shares]
    errors = np.array([_halves_error(table, gpu, bundle) for bundle in bundles])  # (share, row)
    corrections = dict(start.corrections)
    for group in dict.fromkeys(groups.tolist()):
        of_group = (groups == group) & is_prompt & np.isfinite(errors[0])
        if of_group.sum() < TABLE.least_write_rows:
            continue
        best = int(errors[:, of_group].mean(axis=1).argmin())
        corrections[group] = bundles[best].corrections[group]
    return replace(start, corrections=corrections)


def _read_kind_of_batch(op: Operator) -> str:
    """Return whether an attention is of a prompt; cache writes are timed beside attention alone."""
    assert isinstance(op, engine_operators.PagedAttention), op
    return op.kind_of_batch


def _scale_groups(
    start: Bundle,
    groups: set[str],
    share: float,
) -> Bundle:
    """Return a bundle in which kernels of these groups take a share of their time."""
    scaled = {}
    for group in groups:
        before = find_correction(group, start.corrections)
        scaled[group] = Correction(
            compute=share * before.compute,
            memory=share * before.memory,
            fixed_s=share * before.fixed_s,
            l2=share * before.l2,
            serial_cycle=share * before.serial_cycle,
        )
    return replace(start, corrections={**start.corrections, **scaled})


def _halves_error(
    table: TableRows,
    gpu: Gpu,
    start: Bundle,
) -> Array:
    """Return how far each row is off by trees on the half of the shapes that it is not in; NaN
    where a row's kind is too rare.
    """
    is_common = _is_common_kind(table, gpu, start)
    common = table.select_rows(is_common)
    scaffold = _fit_scaffold(common, gpu, start)
    latency_s = common.rows.column("latency_s")
    written_s = beside_s(common, gpu, start)
    own_s = np.maximum(latency_s - written_s, TABLE.least_own_share * latency_s)
    sample = ResidualSample(scaffold.kernels, scaffold.ratio)
    family = scaffold.kernels.work.root_family[0]
    names = residual_features(family, scaffold.kernels)
    features, target, _ = sample.select_families((family,), names)
    is_second = halve_shapes(common.rows.ops)
    logs = np.zeros(len(target))
    for half in (is_second, ~is_second):
        trees = fit_trees(names, features[~half], target[~half])
        logs[half] = trees.sum_trees(features[half])
    predicted_s = own_s / scaffold.ratio * np.exp(logs) + written_s
    error = np.full(len(is_common), np.nan)
    error[is_common] = np.abs(predicted_s / latency_s - 1.0)
    return error


def _build_usual(
    ops: Sequence[Operator],
    gpu: Gpu,
    bundle: Bundle,
) -> Kernels:
    """Build the kernels of operators under usual conditions."""
    conditions = (USUAL_CONDITION,) * len(ops)
    return build_kernels(
        tuple(ops),
        conditions,
        gpu,
        bundle.reference,
        (),
    )


def beside_s(
    table: TableRows,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    """Predict the seconds of the operators that each row was timed together with, at the top
    clock.
    """
    seconds = np.zeros(len(table.beside))
    rows: list[int] = []
    ops: list[Operator] = []
    for row, row_ops in enumerate(table.beside):
        rows += [row] * len(row_ops)
        ops += row_ops
    if ops:
        kernels = _build_usual(ops, gpu, bundle)
        np.add.at(seconds, rows, predict_bursts_s(kernels, gpu, bundle))
    return seconds


def predict_tables_s(
    table: TableRows,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    """Predict the latency of each row as it was timed: bursts at the top clock, others over a
    second.
    """
    own_s = predict_with_bundle(bundle, table.rows, gpu, RUN_S)[:, 0]
    return np.asarray(own_s + beside_s(table, gpu, bundle))


def forecast_tables_s(
    table: TableRows,
    gpu: Gpu,
    forecast: Bundle,
) -> Array:
    """Predict the latency of each row as it was timed, by a bundle that was fitted to no burst: a
    card that limits its bursts is slower in them than at its top clock.
    """
    predicted_s = predict_tables_s(table, gpu, forecast)
    is_burst = table.rows.is_kind("burst")
    if skips_clocks(gpu) and is_burst.any():
        timeline = analyse_rows(forecast, table.rows.select_rows(is_burst), gpu)
        predicted_s[is_burst] += added_by_limiter_s(timeline, gpu, forecast)
    return predicted_s


def judge_tables(
    table: TableRows,
    gpu: Gpu,
    forecast: Bundle,
    calibrated: Bundle,
) -> tuple[TableError, ...]:
    """Compare both bundles with rows, by what ran, engine and band of latency."""
    measured_s = table.rows.column("latency_s")
    forecast_s = forecast_tables_s(table, gpu, forecast)
    calibrated_s = predict_tables_s(table, gpu, calibrated)
    band = np.digitize(measured_s * 1e3, TABLE.bands_ms)
    work = [describe_work(op) for op in table.rows.ops]
    names = list(zip(work, table.engine, strict=True))
    errors = []
    for what, engine in sorted(set(names)):
        is_alike = np.array([name == (what, engine) for name in names], dtype=bool)
        for place, band_name in enumerate(BAND_NAMES):
            chosen = is_alike & (band == place)
            if not chosen.any():
                continue
            errors.append(
                TableError(
                    what=what,
                    engine=engine,
                    band=band_name,
                    rows=int(chosen.sum()),
                    forecast=mean_percent_error(forecast_s[chosen], measured_s[chosen]) or 0.0,
                    calibrated=mean_percent_error(calibrated_s[chosen], measured_s[chosen]) or 0.0,
                )
            )
    return tuple(errors)


def describe_work(op: Operator) -> str:
    """Name what a row timed, as errors are told: products and experts by format, attention by phase
    and cache.
    """
    if isinstance(op, engine_operators.PagedAttention):
        return f"attention {op.kind_of_batch} over {op.kv_dtype}"
    if isinstance(op, engine_operators.FusedExperts):
        scales = f" by {op.scales}" if op.scales != "none" else ""
        return f"experts {op.weights}{scales}"
    if isinstance(op, engine_operators.WeightOnlyProduct):
        return f"products with {op.weights} weights"
    scales = ""
    if isinstance(op, (engine_operators.ScaledProduct, engine_operators.BlockProduct)):
        scales = f" by {op.scales}"
    what = "products" if op.family == "gemm" else op.kind
    return f"{what} {op.dtype}{scales}"


def _fit_power(
    table: TableRows,
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[Bundle, str]:
    """Weigh the energies of a bundle with rows whose watts can be believed.

    A bundle that was measured on other cards of this name is moved as ``fit kernels`` does it.
    """
    few = take_few_powered(table.rows)
    if bundle.status is not FitStatus.MEASURED:
        has_sibling = gpu.name in forecast_rule().energies_from
        distance = EVIDENCE.same_processor if has_sibling else 1.0
        evidence = kernel_evidence(few, gpu, bundle)
        weighed = weigh_energies(evidence, scalable_modules(bundle), distance)
        return weighed.move(bundle), weighed.describe()
    quantity, moved = shift_energies(few, gpu, bundle)
    if not quantity.levels:
        return moved, f"energies: as before ({len(few)} rows of watts did not move them)"
    gain = f"{quantity.forecast:.1f} to {quantity.held_out:.1f} % held out"
    return moved, f"energies moved by {len(few)} rows of watts ({gain})"


def take_few_powered(rows: KernelRows) -> KernelRows:
    """Return sustained rows with watts, evenly thinned to as many as are worth their time."""
    powered = take_sustained(rows)
    stride = max(len(powered) // _POWER_ROWS, 1)
    return powered.select_rows(np.arange(len(powered)) % stride == 0)


def _interval_ends(
    table: TableRows,
    gpu: Gpu,
    bundle: Bundle,
) -> dict[str, ResidualEnds]:
    """Return the interval ends of each family from its rows held out; power keeps the
    forecast's.
    """
    ratio = table.rows.column("latency_s") / predict_tables_s(table, gpu, bundle)
    families = np.array(table.rows.family)
    residuals = {}
    for family in dict.fromkeys(table.rows.family):
        family_ratio = ratio[families == family]
        residuals[family] = ResidualEnds(
            latency=conformal_ends(family_ratio),
            power=bundle.residuals[family].power,
            rows=len(family_ratio),
        )
    return residuals
