"""Ledger rows of forecasts for other GPUs against published whole-model measurements.

The rows cover forecasts with nothing fitted, with one and eight rows fitted, and at other clocks.
No row chooses anything in the forecast; the rule and its history are in
``docs/method/other-gpus.md``. Run: ``wattcast lab validate`` in the repository (WATTCAST_REFERENCE
names the measurements)."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.calibration import AnalysedModel as AnalysedRow
from wattcast.calibrate.calibration import (
    MeasuredModel,
    analyse_models,
    calibrate_bundle,
    predict_models,
)
from wattcast.calibrate.kernel_rows import on_random_data
from wattcast.calibrate.scoring import (
    LedgerRow,
    make_absent_row,
    make_ledger_row,
    mean_percent_error,
)
from wattcast.calibrate.table_fit import (
    calibrate_rows,
    describe_work,
    forecast_tables_s,
    predict_tables_s,
)
from wattcast.calibrate.table_rows import (
    TableRows,
    held_out,
    read_tables,
)
from wattcast.core.arrays import Array, sweep_values
from wattcast.core.strict_files import FitStatus
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu
from wattcast.lab.validate.public_checks.published_commands import (
    AS_BUILT,
    ask_by_name,
    ask_by_operators,
    list_errors,
)
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_GPU,
    PublishedRun,
    clean_runs,
    read_other_gpus,
    read_published_runs,
    select_reported_runs,
)
from wattcast.lab.validate.typed_commands import JudgedRow, judge_rows
from wattcast.predictor.bundle import bundle_for, forecast_bundle
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.workload.graph import Graph
from wattcast.workload.operator_base import Operator


@dataclass(frozen=True)
class RooflineTerms:
    """Rows in the terms of a trivial floor: operators, and seconds by roofline, compute and
    memory.
    """

    ops: Array
    roof_s: Array
    compute_s: Array
    memory_s: Array
    clock: Array  # V²·f against the top clock's


def roofline_terms(measured: Sequence[MeasuredModel], gpu: Gpu) -> RooflineTerms:
    """Return the roofline terms of whole models."""
    top_hz = float(sweep_values(gpu.clocks.max_hz))
    columns = [_graph_terms(m.graph, gpu, m.clock_hz or top_hz) for m in measured]
    ops, roof, compute, memory = (np.array(c) for c in zip(*columns, strict=True))
    clock_hz = np.array([m.clock_hz or top_hz for m in measured])
    volts = gpu.power.voltage_v
    squared = 1.0 if volts is None else (volts.value_at(clock_hz) / volts.value.max()) ** 2
    return RooflineTerms(
        ops,
        roof,
        compute,
        memory,
        squared * clock_hz / top_hz,
    )


def _graph_terms(
    graph: Graph,
    gpu: Gpu,
    clock_hz: float,
) -> tuple[float, float, float, float]:
    count = roof = compute = memory = 0.0
    for block in graph.blocks:
        for op in block.ops:
            calls = block.repeat * op.count
            c, m = _operator_terms(op, gpu, clock_hz)
            count = count + calls
            roof = roof + calls * max(c, m)
            compute = compute + calls * c
            memory = memory + calls * m
    return count, roof, compute, memory


def _operator_terms(
    op: Operator,
    gpu: Gpu,
    clock_hz: float,
) -> tuple[float, float]:
    tensor = gpu.pipes.tensor_flop_per_cycle
    cuda = gpu.pipes.cuda_flop_per_cycle
    product = op.kind in ("linear", "bmm", "conv2d", "attention")
    rate = (
        tensor.get(op.dtype, cuda.get(op.dtype, cuda[Dtype.FP32])) if product else cuda[Dtype.FP32]
    )
    flop_per_s = float(sweep_values(rate)) * float(sweep_values(gpu.sm_count)) * clock_hz
    return op.flop / flop_per_s, (op.read_byte + op.write_byte) / float(
        sweep_values(gpu.memory.byte_per_s)
    )


def fit_floor_in_domain(
    measured: Sequence[MeasuredModel],
    family: Sequence[str],
    gpu: Gpu,
) -> tuple[Array, Array]:
    """Return latency and power of every row from a floor fitted to other model families.

    t = max(launch · operators, Σ max(F/π, Q/β) / efficiency),   P = c0 + c1·u_compute·V²f +
    c2·u_memory"""
    work = roofline_terms(measured, gpu)
    names = np.array(family)
    seconds, watts = (
        np.array([getattr(m, n) for m in measured], dtype=float) for n in ("latency_s", "power_w")
    )
    said_s = np.zeros(len(names))
    said_w = np.zeros(len(names))
    for name in dict.fromkeys(family):
        mine = names == name
        launch_s, efficiency = _fit_time(work, seconds, ~mine)
        time = np.maximum(launch_s * work.ops, work.roof_s / efficiency)
        said_s[mine] = time[mine]
        coefficients = _solve(_columns(work, seconds)[~mine], watts[~mine])
        said_w[mine] = (_columns(work, time) @ coefficients)[mine]
    return said_s, said_w


def transfer_floor(measured: Sequence[MeasuredModel], gpu: Gpu) -> tuple[Array, Array]:
    """Return latency and power of every row from a floor fitted to the H200's kernels and scaled by
    specification.
    """
    parent = hardware.load_gpu("h200")
    rows = kernel_rows.load_kernel_rows("h200")
    random_rows = rows.select_rows(on_random_data(rows) & (rows.repeat == 0))
    top_hz = float(sweep_values(parent.clocks.max_hz))
    terms_s = np.array([_operator_terms(op, parent, top_hz) for op in random_rows.ops])
    seconds = random_rows.column("latency_s")
    burst = random_rows.is_kind("burst") & (np.nan_to_num(seconds) > LONG_S)
    efficiency = float(np.exp(np.median(np.log(terms_s.max(axis=1)[burst] / seconds[burst]))))
    steady = (
        ~random_rows.is_kind("burst")
        & np.isfinite(random_rows.column("power_w"))
        & np.isfinite(seconds)
    )
    rates = terms_s[steady] / seconds[steady, np.newaxis]
    watts = random_rows.column("power_w")[steady]
    coefficients = _solve(np.column_stack([np.ones(len(watts)), rates]), watts)
    scale = float(sweep_values(gpu.power.limit_w)) / float(sweep_values(parent.power.limit_w))
    work = roofline_terms(measured, gpu)
    time = np.maximum(LAUNCH_S * work.ops, work.roof_s / efficiency)
    return time, scale * (_columns(work, time) @ coefficients)


LAUNCH_S = 12e-6  # of the host of an H100 (DESIGN, section 4)
LONG_S = 100e-6  # shorter kernels are mostly start and drain


def _fit_time(
    work: RooflineTerms,
    seconds: Array,
    use: Array,
) -> tuple[float, float]:
    """Search launch cost and efficiency on a small grid, by relative error."""
    best = (np.inf, 0.0, 1.0)
    for launch_s in np.linspace(4e-6, 40e-6, 37):
        for efficiency in np.linspace(0.2, 1.0, 41):
            predicted_s = np.maximum(launch_s * work.ops, work.roof_s / efficiency)
            error = float(np.mean(np.abs(predicted_s / seconds - 1.0)[use]))
            best = min(best, (error, float(launch_s), float(efficiency)))
    return best[1], best[2]


def _columns(work: RooflineTerms, seconds: Array) -> Array:
    return np.column_stack(
        [np.ones(len(seconds)), work.compute_s / seconds * work.clock, work.memory_s / seconds]
    )


def _solve(columns: Array, watts: Array) -> Array:
    """Solve least squares on relative error."""
    return np.asarray(
        np.linalg.lstsq(columns / watts[:, np.newaxis], np.ones(len(watts)), rcond=None)[0]
    )


# draws of eight rows; the seed was not varied
DRAWS = 20
ANCHORS = 8
SEED = 6
_EIGHT = "calibrated on 8 rows, mean of 20 draws"


def other_gpu_rows(folder: Path) -> list[LedgerRow]:
    """Return the rows of every set of whole models that is here."""
    gpu = hardware.load_gpu(PUBLISHED_GPU)
    bundle = bundle_for(gpu)
    at_900 = clean_runs(read_published_runs(folder, "900"))
    judged_runs = [r for r in at_900 if r.model != "resnet101"]
    ledger_rows = _zero_shot(judged_runs, at_900, gpu, bundle)
    ledger_rows += _score_asked(
        [ask_by_name(r, gpu.name, f"{A100_FORECAST}, {AS_BUILT}") for r in judged_runs]
    )
    ledger_rows += _anchored(
        [to_calibration_row(r, gpu) for r in judged_runs],
        [r.model for r in judged_runs],
        gpu,
        bundle,
    )
    ledger_rows += _clocks(folder, judged_runs, gpu, bundle)
    clocks = clean_runs(read_published_runs(folder, "clocks"))
    ledger_rows += _score_asked(
        [ask_by_name(r, gpu.name, f"{A100_CLOCKS}, {AS_BUILT}") for r in clocks]
    )
    for name, some in read_other_gpus(folder).items():
        musts = _OTHER_MUSTS.get(name, (None,) * 3)
        listed = _score_asked([ask_by_operators(r, name, f"{name} {OTHER}") for r in some], musts)
        chip = hardware.load_gpu(name)
        window = _window_errors(some, chip, bundle_for(chip))
        for row, error in zip(listed, window, strict=True):
            ledger_rows.append(row | {"over_the_whole_window": _rounded(error)})
        ledger_rows += _score_asked(
            [ask_by_name(r, name, f"{name} {OTHER}, {AS_BUILT}") for r in some]
        )
    return ledger_rows


def list_published_rows(folder: Path) -> list[JudgedRow]:
    """Return every published whole model that is judged, with its commands."""
    gpu = PUBLISHED_GPU
    at_900 = [r for r in clean_runs(read_published_runs(folder, "900")) if r.model != "resnet101"]
    clocks = clean_runs(read_published_runs(folder, "clocks"))
    rows = [ask_by_operators(r, gpu, ZERO_SHOT) for r in at_900]
    rows += [ask_by_name(r, gpu, f"{A100_FORECAST}, {AS_BUILT}") for r in at_900]
    rows += [ask_by_name(r, gpu, f"{A100_CLOCKS}, {AS_BUILT}") for r in clocks]
    for name, some in read_other_gpus(folder).items():
        rows += [ask_by_operators(r, name, f"{name} {OTHER}") for r in some]
        rows += [ask_by_name(r, name, f"{name} {OTHER}, {AS_BUILT}") for r in some]
    return rows


def _score_asked(
    rows: Sequence[JudgedRow], musts: Sequence[float | None] = (None, None, None)
) -> list[LedgerRow]:
    """Return the mean error of each quantity of one set, predicted by its commands."""
    if not rows:
        return []
    predicted = judge_rows(rows)
    return [
        make_ledger_row(
            rows[0].where,
            quantity,
            len(rows),
            float(np.mean(list_errors(rows, predicted, quantity))),
            must=must,
        )
        for quantity, must in zip(_QUANTITIES, musts, strict=True)
    ]


A100_FORECAST = "A100 900 MHz, forecast"
A100_CLOCKS = "A100 other clocks, forecast"
ZERO_SHOT = f"{A100_FORECAST}, no A100 rows"
OTHER = "whole models, forecast"
_OTHER_MUSTS = {"a10": (9.0, 9.0, 7.0)}
TABLE_GPUS = ("a100-sxm-80gb", "b200", "l40s", "h200")
_LONG_S = 1e-4
_SHORT_S = 2e-5


def kernel_table_rows(folder: Path) -> list[LedgerRow]:
    """Return the errors on rows of public kernel tables that no fit saw, and of the forecast rule
    on all of them.

    The H200's bundle is fitted to our own rows, so all rows of its tables are new to it; they time
    other libraries (FlashInfer, Marlin) and have no goal. ``calibrated_table_rows`` judges a
    calibration on them."""
    ledger_rows = []
    for name in TABLE_GPUS:
        chip = hardware.load_gpu(name)
        table = _read_bursts(folder, chip)
        away = held_out(table.rows.ops)
        bundle = bundle_for(chip)
        judged = judge_kernels(
            f"{name} kernel tables, held out, {bundle.status}",
            table.select_rows(away),
            chip,
            bundle,
        )
        ledger_rows += (
            judged
            if bundle.status is not FitStatus.MEASURED
            else [row | {"must": None} for row in judged]
        )
        if bundle.status is not FitStatus.MEASURED:
            products = np.array([op.kind == "linear" for op in table.rows.ops], dtype=bool)
            rule = judge_kernels(
                f"{name} kernel tables, all rows, forecast rule",
                table.select_rows(products),
                chip,
                forecast_bundle(chip),
            )
            ledger_rows += [row | {"must": 12.0} for row in rule if "0.1 ms" in row["quantity"]]
    return ledger_rows


def calibrated_table_rows(folder: Path | None, tell: Callable[[str], None]) -> list[LedgerRow]:
    """Return held-out errors of the H200 calibrated on its tables, as ``wattcast calibrate
    --table`` does.
    """
    where = "h200 kernel tables, held out, calibrated on the other rows"
    if folder is None or not (folder / "aiconfigurator").is_dir():
        return [make_absent_row(where, "latency", "no reference data")]
    chip = hardware.load_gpu("h200")
    table = _read_bursts(folder, chip)
    bundle = calibrate_rows(table, chip, tell).bundle
    return judge_kernels(where, table.select_rows(held_out(table.rows.ops)), chip, bundle)


def _read_bursts(folder: Path, chip: Gpu) -> TableRows:
    table = read_tables([folder / "aiconfigurator"], chip)
    return table.select_rows(table.rows.is_kind("burst"))


def judge_kernels(
    where: str,
    table: TableRows,
    gpu: Gpu,
    bundle: Bundle,
) -> list[LedgerRow]:
    """Return the errors of products, attention and experts of a table, with their goals."""
    true_s = table.rows.column("latency_s")
    if bundle.status is FitStatus.FORECAST:
        said_s = forecast_tables_s(table, gpu, bundle)
    else:
        said_s = predict_tables_s(table, gpu, bundle)
    what = np.array([describe_work(op) for op in table.rows.ops])
    plain = what == "products bf16"
    starts = {
        start: np.char.startswith(what, start) for start in ("products", "attention", "experts")
    }
    sets = {
        "products bf16, 0.1 ms and above": (plain & (true_s >= _LONG_S), 8.0),
        "products bf16, below 0.02 ms": (plain & (true_s < _SHORT_S), 20.0),
        "other products": (starts["products"] & ~plain, None),
        "attention": (starts["attention"], 12.0),
        "experts": (starts["experts"], 12.0),
    }
    return [
        make_ledger_row(
            where, name, int(at.sum()), mean_percent_error(said_s[at], true_s[at]), must=must,
            bias=_rounded(100.0 * float(np.median(np.log(said_s[at] / true_s[at])))),
        )
        for name, (at, must) in sets.items()
        if at.any()
    ]  # fmt: skip


def to_calibration_row(r: PublishedRun, gpu: Gpu) -> MeasuredModel:
    """Convert a published row to a calibration row at the clock that really ran."""
    assert r.clock_hz is not None
    clock_hz = min(r.clock_hz, float(sweep_values(gpu.clocks.max_hz)))
    return MeasuredModel(
        r.name,
        r.graph,
        r.latency_s,
        r.power_w,
        clock_hz,
        r.temperature_c,
    )


_QUANTITIES = ("latency", "power", "energy")


def _errors(
    measured: Sequence[MeasuredModel],
    factors: Mapping[str, float],
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[float | None, ...]:
    return _row_errors(analyse_models(measured, gpu, bundle), factors, gpu, bundle)


def _window_errors(
    runs: Sequence[PublishedRun],
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[float | None, ...]:
    """Return errors against time and power as published, over the whole polling window."""
    rows = [
        replace(to_calibration_row(r, gpu), latency_s=r.published_s, power_w=r.published_w)
        for r in runs
    ]
    return _errors(rows, {}, gpu, bundle)


def _row_errors(
    some: Sequence[AnalysedRow],
    factors: Mapping[str, float],
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[float | None, ...]:
    return _against([r.measured for r in some], *predict_models(some, factors, gpu, bundle))


def _against(
    measured: Sequence[MeasuredModel],
    seconds: Array,
    watts: Array,
) -> tuple[float | None, ...]:
    true_s, true_w = (
        np.array([getattr(m, n) for m in measured], dtype=float) for n in ("latency_s", "power_w")
    )
    return (
        mean_percent_error(seconds, true_s),
        mean_percent_error(watts, true_w),
        mean_percent_error(seconds * watts, true_s * true_w),
    )


def _zero_shot(
    judged_runs: list[PublishedRun],
    everything: list[PublishedRun],
    gpu: Gpu,
    bundle: Bundle,
) -> list[LedgerRow]:
    mine, all_rows = (
        [to_calibration_row(r, gpu) for r in some] for some in (judged_runs, everything)
    )
    judged = [ask_by_operators(r, gpu.name, ZERO_SHOT) for r in judged_runs]
    predicted = judge_rows(judged)
    error = [float(np.mean(list_errors(judged, predicted, quantity))) for quantity in _QUANTITIES]
    whole = _errors(all_rows, {}, gpu, bundle)
    floor = _against(mine, *transfer_floor(mine, gpu))
    young = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=12e-6))
    faster = _errors(mine, {}, gpu, young)
    window = _window_errors(judged_runs, gpu, bundle)
    where = ZERO_SHOT
    goals = (("11.7", 8.0, 7.0), ("8.3", 8.0, 7.0))
    return [
        make_ledger_row(
            where,
            quantity,
            len(mine),
            error[i],
            floor[i],
            f"{best} with an A100 kernel database",
            must,
            aim,
            with_resnet=_rounded(whole[i]),
            host_12_us=_rounded(faster[i]),
            over_the_whole_window=_rounded(window[i]),
        )
        for i, (quantity, (best, must, aim)) in enumerate(zip(_QUANTITIES, goals, strict=False))
    ]


def _anchored(
    measured: list[MeasuredModel],
    family: list[str],
    gpu: Gpu,
    bundle: Bundle,
) -> list[LedgerRow]:
    floor = _against(measured, *fit_floor_in_domain(measured, family, gpu))
    count = len(measured)
    analysed = analyse_models(measured, gpu, bundle)
    draw = np.random.default_rng(SEED)
    one = np.array([_drawn(analysed, [i], gpu, bundle) for i in range(count)])
    eight = np.array(
        [
            _drawn(analysed, draw.choice(count, ANCHORS, replace=False).tolist(), gpu, bundle)
            for _ in range(DRAWS)
        ]
    )
    moved = _against(measured, *transfer_floor(measured, gpu))
    anchor = "A100 900 MHz, one row as anchor, mean of all"
    eighths = f"A100 900 MHz, {_EIGHT}"
    errors = eight.mean(axis=0)
    judged_count = count - ANCHORS
    seconds = _rounded(one[:, 0].mean())
    return [
        make_ledger_row(
            anchor,
            "power",
            count - 1,
            float(one[:, 1].mean()),
            moved[1],
            None,
            8.0,
            6.0,
            latency=seconds,
        ),
        make_ledger_row(
            eighths,
            "latency",
            judged_count,
            float(errors[0]),
            floor[0],
            "11.7",
            11.0,
            8.0,
        ),
        make_ledger_row(
            eighths,
            "power",
            judged_count,
            float(errors[1]),
            floor[1],
            "8.3",
            5.8,
            4.5,
        ),
        make_ledger_row(
            eighths,
            "energy",
            judged_count,
            float(errors[2]),
            must=_rounded(_row_errors(analysed, {}, gpu, bundle)[2]),
        ),
    ]


def _drawn(
    analysed: list[AnalysedRow],
    chosen: list[int],
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[float | None, ...]:
    """Return errors on the other rows after calibrating on some."""
    some = calibrate_bundle([analysed[i] for i in chosen], gpu, bundle, "drawn rows")
    return _row_errors(
        [r for i, r in enumerate(analysed) if i not in set(chosen)], some.factors, gpu, bundle
    )


def _clocks(
    folder: Path,
    judged_runs: list[PublishedRun],
    gpu: Gpu,
    bundle: Bundle,
) -> list[LedgerRow]:
    clocks = clean_runs(read_published_runs(folder, "clocks"))
    at_900 = analyse_models([to_calibration_row(r, gpu) for r in judged_runs], gpu, bundle)
    factors = calibrate_bundle(at_900, gpu, bundle, "rows at 900 MHz").factors
    goals = (("17.2", 8.0, 7.0), ("7.7", 5.5, 4.5), ("14.2", 6.5, 6.0))
    ledger_rows = []
    for name, some in (("clean", clocks), ("of the paper", select_reported_runs(folder, clocks))):
        mine = [to_calibration_row(r, gpu) for r in some]
        error = _errors(mine, factors, gpu, bundle)
        raw = _errors(mine, {}, gpu, bundle)
        floor = _against(mine, *fit_floor_in_domain(mine, [r.model for r in some], gpu))
        ledger_rows += [
            make_ledger_row(
                f"A100 other clocks, calibrated at 900 MHz, rows {name}",
                quantity,
                len(mine),
                error[i],
                floor[i],
                best,
                must,
                aim,
                no_A100_rows=_rounded(raw[i]),
            )
            for i, (quantity, (best, must, aim)) in enumerate(zip(_QUANTITIES, goals, strict=True))
        ]
    return ledger_rows


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 2)
