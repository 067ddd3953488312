"""Rows that an H200 measured, and what is predicted of them: times, watts, bytes and grids."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from wattcast.calibrate.kernel_rows import (
    UNFIT_FLAGS,
    load_kernel_rows,
    read_condition,
    read_plain_rows,
)
from wattcast.calibrate.row_prediction import predict_bursts_s
from wattcast.coefficients.coefficient_files import change_coefficient
from wattcast.core.arrays import Array, Mask
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import COUNTERS_FILE, database_folder, read_table
from wattcast.hardware import Gpu, OperatingPoint, load_gpu
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import COUNTED_ROTATION, RunCondition
from wattcast.power.power_model import interval_energy_j
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.kernel_phases import count_events
from wattcast.predictor.pipeline import analyse_kernels, kernel_activity
from wattcast.predictor.timeline import compute_effective_hz, compute_kernel_s
from wattcast.workload.operator_base import Operator

TOP_HZ = 1.98e9
UNCAPPED_W = 670.0  # below it the power limit of 700 W does not lower the clock
BANK_BYTE = 4.0  # a bank of shared memory and L1 is 4 bytes wide
LEAST_BYTE = 1e5  # less than this is noise of the profiler
MOST_ROWS = 600  # a sample, so that a test takes seconds
LAUNCH_QUANTITIES = ("blocks", "launches")


@dataclass(frozen=True, eq=False)
class MeasuredKernels:
    """Kernels with a measured figure of each, ``(row,)``."""

    ops: tuple[Operator, ...]
    conditions: tuple[RunCondition, ...]
    measured: Array


@cache
def load_h200() -> tuple[Gpu, Bundle]:
    """Return the chip and its bundle without a host that holds up what runs."""
    gpu = load_gpu("h200")
    bundle = shipped_bundle("h200")
    assert bundle is not None
    return gpu, replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))


@dataclass(frozen=True)
class MeasuredKernel:
    """A row of a database with its operator, the family of its kernel, and a measured figure."""

    place: int  # in the database
    op: Operator
    condition: RunCondition
    kernel_family: str
    figure: float


@cache
def load_measured(database: str, quantity: str, kernels: str) -> MeasuredKernels:
    """Return rows with their latency, watts or counted bytes.

    ``kernels`` are the beginnings of the names of kernel families, separated by blanks.
    """
    prefixes = tuple(kernels.split())
    families = sorted({"engine", *(name.partition(".")[0] for name in prefixes)})
    chosen = []
    for family in families:
        measured = list_measured(database, quantity, family)
        chosen += [kernel for kernel in measured if kernel.kernel_family.startswith(prefixes)]
    chosen.sort(key=lambda kernel: kernel.place)
    if len(chosen) > MOST_ROWS:
        places = np.random.default_rng(0).choice(len(chosen), MOST_ROWS, replace=False)
        chosen = [chosen[place] for place in sorted(places.tolist())]
    return MeasuredKernels(
        tuple(kernel.op for kernel in chosen),
        tuple(kernel.condition for kernel in chosen),
        np.array([kernel.figure for kernel in chosen]),
    )


@cache
def list_measured(database: str, quantity: str, family: str) -> list[MeasuredKernel]:
    """Return what a database measured of a family of operators, parsed once for all coefficients.

    Operators of engines are one family.
    """
    rows = [row for row in select_rows(database, quantity) if row.family == family]
    if not rows:
        return []
    conditions = [read_condition(row.row) for row in rows]
    if quantity not in ("latency", "power", *LAUNCH_QUANTITIES):
        conditions = [replace(condition, rotated=COUNTED_ROTATION) for condition in conditions]
    operators = _find_operators(database)
    ops = tuple(operators[id(row.row)] for row in rows)

    gpu, bundle = load_h200()
    forget_kernels(bundle)  # which an earlier test may have built with a changed coefficient
    names = build_kernels(ops, tuple(conditions), gpu, bundle.reference, ()).work.kernel_family
    kernel_families = [names.values[place] for place in names.place.tolist()]
    columns = zip(rows, ops, conditions, kernel_families, strict=True)
    return [
        MeasuredKernel(row.place, op, condition, kernel_family, row.figure)
        for row, op, condition, kernel_family in columns
    ]


@dataclass(frozen=True)
class SelectedRow:
    """A row of a database, with its place there, its family and the figure that was measured."""

    place: int
    row: Plain
    family: str
    figure: float


@cache
def select_rows(database: str, quantity: str) -> list[SelectedRow]:
    """Return the rows of a database that have a figure, whatever their family."""
    if quantity in ("latency", "power"):
        rows, figures = _select_runs(database, quantity)
    elif quantity in LAUNCH_QUANTITIES:
        rows, figures = _select_launched(database, quantity)
    else:
        rows, figures = _select_counted(database, quantity)
    columns = enumerate(zip(rows, figures, strict=True))
    return [SelectedRow(place, row, _name_family(row), figure) for place, (row, figure) in columns]


def _name_family(row: Plain) -> str:
    family = str(row["family"])
    if family.startswith("engine_"):
        return "engine"
    return "gemm" if family in ("linear", "bmm") else family


@cache
def _read_rows(database: str) -> list[Plain]:
    return read_plain_rows(database)


@cache
def _find_operators(database: str) -> dict[int, Operator]:
    """Return the operators of rows by their identity, as other tests have parsed them already."""
    measured = [row for row in _read_rows(database) if row["kind"] != "idle" and not row["error"]]
    operators = load_kernel_rows(database).ops
    return {id(row): op for row, op in zip(measured, operators, strict=True)}


def _select_runs(database: str, quantity: str) -> tuple[list[Plain], list[float]]:
    """Select bursts for their latency, and sustained rows below the power limit for their watts."""
    kind = "burst" if quantity == "latency" else "sustained"
    column = "latency_s" if quantity == "latency" else "power_w"
    rows = []
    for row in _read_rows(database):
        if row.get("error") or row.get("kind") != kind or not row.get(column):
            continue
        is_plain = (row.get("data") or "random") == "random"
        is_capped = quantity == "power" and row[column] > UNCAPPED_W
        if is_plain and not is_capped and not set(UNFIT_FLAGS) & set(row.get("flags") or ()):
            rows.append(row)
    return rows, [float(row[column]) for row in rows]


def _select_launched(database: str, quantity: str) -> tuple[list[Plain], list[float]]:
    """Select operators with the blocks of their longest kernel, or with the number of kernels."""
    rows: dict[str, Plain] = {}
    for row in _read_rows(database):
        is_listed = row.get("kernel_grids") and row.get("kernel_s") and not row.get("error")
        if is_listed and row["kind"] == "burst":
            rows.setdefault(f"{row['operator']} {row['layout']} {row['detail']}", row)
    if quantity == "launches":
        return list(rows.values()), [float(len(row["kernel_grids"])) for row in rows.values()]
    figures = []
    for row in rows.values():
        longest = int(np.argmax(row["kernel_s"]))
        figures.append(float(np.prod(row["kernel_grids"][longest])))
    return list(rows.values()), figures


def _select_counted(database: str, quantity: str) -> tuple[list[Plain], list[float]]:
    """Select operators whose bytes a profiler counted."""
    counted_byte: defaultdict[str, float] = defaultdict(float)
    for kernel in read_table(database_folder(database) / COUNTERS_FILE):
        counted_byte[kernel["spec"]] += _count_bytes(kernel, quantity)
    rows: dict[str, Plain] = {}
    for row in _read_rows(database):
        spec = row.get("spec") or ""
        if spec in counted_byte and not row.get("error"):
            rows.setdefault(spec, row)
    return list(rows.values()), [counted_byte[spec] for spec in rows]


def _count_bytes(kernel: Plain, quantity: str) -> float:
    """Return the bytes that crossed shared memory, or left L2 or device memory, in a kernel."""
    if quantity == "shared":
        banks = kernel["l1tex__data_bank_reads_sum"] + kernel["l1tex__data_bank_writes_sum"]
        return float(BANK_BYTE * banks)
    if quantity == "l2":
        read = kernel["l1tex__m_xbar2l1tex_read_bytes_sum"]
        return float(read + kernel["l1tex__m_l1tex2xbar_write_bytes_sum"])
    return float(kernel["dram__bytes_read_sum"] + kernel["dram__bytes_write_sum"])


def predict_measured(rows: MeasuredKernels, quantity: str) -> Array:
    """Predict the measured figure of each row at the top clock."""
    gpu, bundle = load_h200()
    forget_kernels(bundle)
    kernels = build_kernels(rows.ops, rows.conditions, gpu, bundle.reference, ())
    if quantity == "latency":
        return predict_bursts_s(kernels, gpu, bundle)
    if quantity == "power":
        return _predict_watts(kernels, gpu, bundle)
    if quantity in LAUNCH_QUANTITIES:
        columns = {"blocks": kernels.work.units, "launches": kernels.work.launches}
        return np.asarray(columns[quantity], dtype=np.float64)
    events, count = count_events(kernels)
    names = {"shared": ["shared_byte"], "l2": ["l2_byte"]}
    columns = names.get(quantity, ["dram_read_byte", "dram_write_byte"])
    byte = np.zeros(len(rows.ops))
    for name in columns:
        byte += count[:, events.index(name)]
    return byte


@cache
def predict_unchanged(rows: MeasuredKernels, quantity: str) -> Array:
    """Predict the measured figure of each row once for all coefficients that are tried on them."""
    return predict_measured(rows, quantity)


def forget_kernels(bundle: Bundle) -> None:
    """Forget what was computed of kernels before a coefficient was changed."""
    bundle.reference.known_work.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("wattcast.kernels"):
            for function in vars(module).values():
                is_of_module = getattr(function, "__module__", "") == name
                if is_of_module and hasattr(function, "cache_clear"):
                    function.cache_clear()


def _predict_watts(kernels: Kernels, gpu: Gpu, bundle: Bundle) -> Array:
    """Predict the power of each kernel as it runs again and again."""
    timeline = analyse_kernels(kernels, gpu, bundle)
    running_hz = compute_effective_hz(timeline, np.array([TOP_HZ]), bundle.clock_law)
    kernel_s = compute_kernel_s(timeline.phases, running_hz)
    at = OperatingPoint(TOP_HZ, 1e9)
    no_gap_s = np.zeros(kernel_s.shape[:-1])
    activity = kernel_activity(timeline, kernel_s, running_hz, no_gap_s, at, priced=True)
    joules = interval_energy_j(bundle.power.power(activity), activity.duration_s)
    return np.asarray(joules[..., :-1] / kernel_s)


@dataclass(frozen=True)
class Dependence:
    """Errors of the rows whose prediction depends on a coefficient: logs of predicted/measured."""

    log_errors: Array

    @property
    def bias(self) -> float:
        """By how much the predictions are too large or too small at the median."""
        return abs(float(np.median(self.log_errors)))

    @property
    def error(self) -> float:
        """The mean of the errors without their sign."""
        return float(np.abs(self.log_errors).mean())


def judge_all(rows: MeasuredKernels, quantity: str) -> Dependence:
    """Judge all rows."""
    predicted = predict_unchanged(rows, quantity)
    is_usable = _is_large_enough(rows, predicted, quantity)
    return Dependence(np.log(predicted[is_usable] / rows.measured[is_usable]))


def _is_large_enough(rows: MeasuredKernels, predicted: Array, quantity: str) -> Mask:
    is_of_bytes = quantity not in ("latency", "power", *LAUNCH_QUANTITIES)
    least = LEAST_BYTE if is_of_bytes else 0.0
    return np.asarray((rows.measured > least) & (predicted > least))


def judge_dependent(
    rows: MeasuredKernels, quantity: str, coefficient: str, least_move: float = 0.01
) -> Dependence:
    """Judge the rows whose prediction moves by ``least_move`` if a coefficient grows by a tenth."""
    predicted = predict_unchanged(rows, quantity)
    with change_coefficient(coefficient, 1.1):
        moved = predict_measured(rows, quantity)
    is_usable = _is_large_enough(rows, predicted, quantity)
    ratio = np.divide(moved, predicted, out=np.ones_like(moved), where=is_usable)
    is_dependent = is_usable & (np.abs(np.log(ratio)) > least_move)
    return Dependence(np.log(predicted[is_dependent] / rows.measured[is_dependent]))
