"""Define a study (one workload on one chip, what varies, what is asked of each point) and evaluate
its points.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import (
    dataclass,
    field,
    fields,
    is_dataclass,
    replace,
)
from enum import Enum
from functools import (
    cached_property,
    lru_cache,
    partial,
)
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Sweepable,
    as_sweep,
    sweep_values,
)
from wattcast.explore.design_kernels import (
    analyse_design,
    find_used_programs,
    keep_programs,
    lower_for_designs,
)
from wattcast.explore.design_physics import (
    design_energies,
    follow_sms,
    read_axes,
    sms_at_equal_area,
)
from wattcast.explore.design_programs import DesignKernels
from wattcast.explore.search_space import (
    Constraint,
    FieldKind,
    SearchSpace,
)
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import (
    AskedRun,
    GovernedRun,
    run_at_asked_clock,
    run_governed,
)
from wattcast.predictor.pipeline import (
    WorkloadTotals,
    analyse_graph,
)
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.timeline import Timeline
from wattcast.workload.graph import Graph, count_operators

_PICKLE_PROTOCOL = 5


def pack_value(value: Any) -> bytes:
    """Pack a value as bytes.

    They are a pickle: read those of your own processes, and nobody else's.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=_PICKLE_PROTOCOL).dump(value)
    return zlib.compress(stream.getvalue(), 1)


@lru_cache(maxsize=1)
def unpack_value(data: bytes) -> Any:
    """Return the packed value.

    The same bytes give the same object, so that its caches are filled once.
    """
    return pickle.loads(zlib.decompress(data))  # noqa: S301 - what this program packed


class _Pickler(pickle.Pickler):
    """Pickle dataclasses by the fields they are made from, without their caches."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a value again; ``NotImplemented`` pickles it as usual."""
        if not is_dataclass(value) or isinstance(value, type):
            return NotImplemented
        return partial(type(value), **_list_deciding_fields(value)), ()


def _list_deciding_fields(value: Any) -> dict[str, Any]:
    """Return the fields a dataclass is made from, without private ones."""
    names = (item.name for item in fields(value) if item.init and not item.name.startswith("_"))
    return {name: getattr(value, name) for name in names}


def _feed_hash(hashed: Any, value: Any) -> None:
    """Feed every field of a value into a hash, arrays by their bytes."""
    hashed.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        form = str((value.dtype.str, value.shape))
        hashed.update(form.encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Enum):
        hashed.update(str(value.value).encode())
    elif is_dataclass(value):
        for name, item in _list_deciding_fields(value).items():
            hashed.update(name.encode())
            _feed_hash(hashed, item)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            hashed.update(str(key).encode())
            _feed_hash(hashed, value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            _feed_hash(hashed, item)
    else:
        hashed.update(repr(value).encode() + b";")


# A table: column name -> values, all of one length.
Columns: TypeAlias = dict[str, npt.NDArray[Any]]

# Points times kernels evaluated together: few megabytes an array, which stay in cache.
CELLS = 300_000
# Numbers; less than the 32 MiB above which glibc gives back any memory that is freed.
_LARGE = 4_000_000


@dataclass(frozen=True)
class Study:
    """Hold everything that decides the results of a sweep."""

    graph: Graph
    gpu: Gpu
    bundle: Bundle
    space: SearchSpace
    settings: OperatingPoint = field(default_factory=OperatingPoint)
    constraints: tuple[Constraint, ...] = ()
    holds_area: bool = False  # SMs give way so that the die stays as large as the base's

    def digest(self) -> str:
        """Hash everything that decides results; equal studies have equal hashes in every
        process.
        """
        hashed = hashlib.sha256()
        _feed_hash(hashed, self)
        return hashed.hexdigest()

    def __reduce__(self) -> tuple[Callable[[bytes], Study], tuple[bytes]]:
        return unpack_value, (self._packed,)

    @cached_property
    def design(self) -> DesignKernels | None:
        """The programs that kernels may run on designs; None where no axis changes the chip."""
        kinds = {axis.field.kind for axis in self.space.axes}
        columns = set(self.space.columns)
        if not kinds - {FieldKind.SETTING}:
            return None
        needs_programs = self.holds_area or bool(columns - _KEPT_PROGRAMS)
        design = lower_for_designs(
            self.graph,
            self.gpu,
            self.bundle,
            programs=needs_programs,
            capacities="l2.capacity_byte" in columns,
        )
        return _without_idle_programs(self, design) if needs_programs else design

    @cached_property
    def _packed(self) -> bytes:
        """Pack the study once, as workers are sent it part after part."""
        return pack_value(self)


def tabulate_points(
    study: Study,
    start: int,
    stop: int,
) -> Columns:
    """Evaluate the points from ``start`` to ``stop``.

    Those that meet every constraint are returned, as columns.
    """
    axes = study.space.points(start, stop)
    columns = _meet_constraints(study, {"point": np.arange(start, stop), **axes})
    points = {name: columns[name] for name in study.space.columns}
    if columns["point"].size:
        evaluated = columns | evaluate_points(study, points)
        return _name_choices(study, _meet_constraints(study, evaluated))
    # the columns that one point would have, empty
    one_point = evaluate_points(study, study.space.points(0, 1))
    empty = columns | {name: values[:0] for name, values in one_point.items()}
    return _name_choices(study, empty)


def _name_choices(study: Study, columns: Columns) -> Columns:
    """Return columns with the words of choices in place of their numbers."""
    named = dict(columns)
    for axis in study.space.axes:
        if axis.field.choices:
            words = np.array(axis.field.choices)
            named[axis.field.column] = words[columns[axis.field.column].astype(np.intp)]
    return named


def _meet_constraints(study: Study, columns: Columns) -> Columns:
    """Keep the rows that meet every constraint on these columns."""
    for constraint in study.constraints:
        if constraint.column in columns:
            is_met = constraint.holds(columns)
            columns = {name: values[is_met] for name, values in columns.items()}
    return columns


def evaluate_points(study: Study, columns: Columns) -> Columns:
    """Return latency, power, energy and clock of each point, with the governor.

    Points that keep to the power limit at the clock asked for are done after one step. Where most
    points of a chunk exceed it, all of them go through the governor at once; where many do, these
    do; the few of other chunks are collected. The governor does the same with each point alone, so
    results are those of single predictions.
    """
    result = _evaluate_in_chunks(_evaluate_asked_clock, study, columns)
    rows = np.flatnonzero(result.pop(_UNSETTLED))
    if rows.size:
        over = {name: values[rows] for name, values in columns.items()}
        for name, values in _evaluate_in_chunks(_evaluate_governed, study, over).items():
            result[name][rows] = values
    return result


_UNSETTLED = "unsettled"  # a column of points that still have to go through the governor
_MOSTLY_OVER = 0.5  # share of points above the limit from which a whole chunk is governed at once
_FEW_OVER = 0.02  # ... up to which they are collected, as calls take longer than laying them out


def _evaluate_in_chunks(
    step: Callable[[Study, Columns], Columns],
    study: Study,
    columns: Columns,
) -> Columns:
    """Apply ``step`` to a few points at a time.

    A value that is the same for all points is repeated for each.
    """
    size = len(next(iter(columns.values())))
    most = max(CELLS // len(count_operators(study.graph)), 1)
    chunk_count = max(math.ceil(size / most), 1)
    count = math.ceil(size / chunk_count)  # chunks of one size: a small one costs as many calls
    # From a large block that is freed glibc learns to keep blocks up to its size (mallopt(3),
    # M_MMAP_THRESHOLD). Otherwise every chunk's arrays come from the system and go back to it: a
    # third of a sweep's time.
    np.empty(_LARGE)
    result: Columns = {}
    for first in range(0, size, count):
        rows = slice(first, first + count)
        chunk = {name: values[rows] for name, values in columns.items()}
        for name, values in step(study, chunk).items():
            result.setdefault(name, np.empty(size, values.dtype))[rows] = values
    return result


def _evaluate_asked_clock(study: Study, columns: Columns) -> Columns:
    """Evaluate each point at the clock asked for, and most of those that take too much power.

    The last column tells which points the governor still has to slow down.
    """
    chip, at, bundle = configure_points(study, columns)
    timeline = analyse_points(
        study,
        columns,
        chip,
        at,
        bundle,
    )
    clocked_run = run_at_asked_clock(timeline, chip, at, bundle)
    governed = clocked_run.hold_stretches()
    unsettled = clocked_run.is_over
    share = float(np.mean(unsettled))
    if governed is None and share > _MOSTLY_OVER:
        governed = clocked_run.hold_whole()

    if governed is not None:
        result = _governed_columns(study, governed)
        unsettled = np.array(False)
    else:
        asked_hz = sweep_values(clocked_run.bounds.asked_hz)
        result = _total_columns(clocked_run.totals, asked_hz, study.graph.gpu_count)
        result |= {"capped": np.array(False), "limit_met": np.array(True)}
        if share > _FEW_OVER:
            _govern_points(study, columns, clocked_run, result)
            unsettled = np.array(False)
    result[_UNSETTLED] = unsettled
    if study.holds_area:
        result["sm_count"] = complete_columns(study, columns)["sm_count"]
    if study.graph.memory_byte is not None:
        capacity_byte = sweep_values(chip.memory.capacity_byte)
        result["fits"] = np.asarray(study.graph.memory_byte <= capacity_byte)
    return result


def _govern_points(
    study: Study,
    columns: Columns,
    asked: AskedRun,
    result: Columns,
) -> None:
    """Put the columns of points that exceed their limit, at the clocks that the governor settles
    at, in place of those at the clock asked for.
    """
    rows = np.flatnonzero(asked.is_over)
    size = asked.is_over.size
    over = {name: values[rows] for name, values in columns.items()}
    governed = asked.select_points(rows, *configure_points(study, over)).hold_whole()
    for name, values in _governed_columns(study, governed).items():
        column = np.array(np.broadcast_to(result[name], size))
        column[rows] = values
        result[name] = column


_COLUMN_OF_SETTING = {
    "clock_hz": "asked_clock_hz",
    "power_limit_w": "asked_power_limit_w",
    "temperature_c": "temperature_c",
}


# Columns that change the energy or the rate of what kernels do, and not which programs they run
_KEPT_PROGRAMS = frozenset(
    {
        *_COLUMN_OF_SETTING.values(),
        "voltage_scale",
        "memory_kind",
        "memory.byte_per_s",
        "memory.capacity_byte",
        "l2.capacity_byte",
        "clocks.max_hz",
        "links.nvlink_byte_per_s",
        "links.pcie_byte_per_s",
        "die_link_byte_per_s",
    }
)


def configure_points(
    study: Study, columns: Mapping[str, npt.NDArray[Any]]
) -> tuple[Gpu, OperatingPoint, Bundle]:
    """Return the chip, settings and bundle of these points."""
    complete = complete_columns(study, columns)
    chip, at = _configure_chip(study, complete)
    return chip, at, _design_bundle(study, complete)


def _configure_chip(study: Study, columns: Columns) -> tuple[Gpu, OperatingPoint]:
    """Return the chip and the settings of points."""
    chip_fields = {name: values for name, values in columns.items() if _is_chip_field(name)}
    if "tensor_scale" in columns:
        for dtype, rate in study.gpu.pipes.tensor_flop_per_cycle.items():
            path = f"pipes.tensor_flop_per_cycle.{dtype}"
            chip_fields.setdefault(path, rate * columns["tensor_scale"])
    l2_rate = study.bundle.reference.l2_byte_per_cycle
    chip_fields |= follow_sms(study.gpu, columns, l2_rate)
    chip = study.gpu.with_fields(chip_fields)
    settings: dict[str, Any] = {}
    for name, column in _COLUMN_OF_SETTING.items():
        if column in columns:
            settings[name] = as_sweep(columns[column])
    return chip, replace(study.settings, **settings)


def complete_columns(study: Study, columns: Mapping[str, npt.NDArray[Any]]) -> Columns:
    """Return the columns of points with those that give way to hold a budget."""
    complete = dict(columns)
    if study.holds_area:
        complete["sm_count"] = sms_at_equal_area(study.gpu, columns)
    return complete


def _is_chip_field(column: str) -> bool:
    return "." in column or column == "sm_count"


def _design_bundle(study: Study, columns: Columns) -> Bundle:
    """Return the bundle with the voltage and the energies of these designs."""
    bundle = study.bundle
    power = bundle.power
    if "voltage_scale" in columns:
        power = power.with_voltage_factor(as_sweep(columns["voltage_scale"]))
    if "clocks.max_hz" in columns:
        power = power.with_voltage_beyond(float(columns["clocks.max_hz"].max()))
    if study.design is not None:
        power = power.for_design(design_energies(study.gpu, columns))
    return bundle if power is bundle.power else replace(bundle, power=power)


# Points, spread over a study, whose designs decide which programs it keeps
_SAMPLED_POINTS = 1024


def _without_idle_programs(study: Study, design: DesignKernels) -> DesignKernels:
    """Return the design without programs that no kernel runs on designs spread over the study.

    All points then choose among the same programs, so that what holds of two designs holds of all.
    """
    count = max(min(CELLS // len(design.row_of), _SAMPLED_POINTS), 2)
    points = study.space.spread_points(count)
    columns = complete_columns(study, points)
    chip, at = _configure_chip(study, columns)
    clock_hz: Sweepable = chip.clocks.max_hz if at.clock_hz is None else at.clock_hz
    axes = read_axes(study.gpu, columns)
    return keep_programs(design, find_used_programs(design, chip, axes, clock_hz))


def analyse_points(
    study: Study,
    columns: Mapping[str, npt.NDArray[Any]],
    chip: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> Timeline:
    """Return the timeline of these points, whose kernels run the programs of each design."""
    if study.design is None:
        return analyse_graph(study.graph, chip, bundle)
    clock_hz: Sweepable = chip.clocks.max_hz if at.clock_hz is None else at.clock_hz
    axes = read_axes(study.gpu, complete_columns(study, columns))
    return analyse_design(study.design, chip, axes, clock_hz)


def describe_designs(study: Study) -> list[str]:
    """Say what designs assume beyond what the base does."""
    base = study.gpu.name
    columns = set(study.space.columns)
    if study.holds_area:
        columns.add("sm_count")
    notes = [
        f"idle power, leakage and the energy of L2 follow the area of each design; "
        f"energies of other parts stay those of the {base}"
    ]
    if "sm_count" in columns and "l2.byte_per_cycle" not in columns:
        notes.append("the width of L2 goes with the SMs")
    if columns - _KEPT_PROGRAMS:
        notes.append(
            "each kernel runs the fastest program for its design: tiles, waves and splits follow it"
        )
    if "memory_kind" in columns:
        notes.append("memory.kind changes the energy of a byte; vary memory.bandwidth beside it")
    if "weight_sparsity" in columns:
        notes.append(
            "sparsity=2: 2:4 weights at twice the rate, which is the most that tensor cores give; "
            "what pruning does to answers is not predicted"
        )
    if "dies" in columns and "die_link_byte_per_s" not in columns:
        notes.append("dies are joined at 10 TB/s a die, as NVIDIA states for Blackwell")
    if study.holds_area:
        notes.append(f"every die is as large as the {base}'s: the SMs give way")
    return notes


def find_unused_fields(study: Study) -> list[str]:
    """Name the axes that change nothing between their ends, the other axes in the middle."""
    middle = {}
    for axis in study.space.axes:
        middle[axis.field.column] = np.full(2, axis.values[axis.values.size // 2])
    unused = []
    for axis in study.space.axes:
        ends = np.array([axis.values.min(), axis.values.max()])
        if ends[0] < ends[1]:
            results = evaluate_points(study, {**middle, axis.field.column: ends})
            if all(values[0] == values[1] for values in results.values()):
                unused.append(axis.field.name)
    return unused


def _evaluate_governed(study: Study, columns: Columns) -> Columns:
    """Evaluate points where the governor lowers the clock; return the columns that change."""
    chip, at, bundle = configure_points(study, columns)
    timeline = analyse_points(
        study,
        columns,
        chip,
        at,
        bundle,
    )
    return _governed_columns(study, run_governed(timeline, chip, at, bundle))


def _governed_columns(study: Study, governed: GovernedRun) -> Columns:
    """Return the columns of points at the clocks that the governor settles at."""
    settled, totals, _ = governed
    settled_columns = {"capped": settled.capped, "limit_met": settled.met}
    clock_hz = settled.clock_hz[..., 0]
    return _total_columns(totals, clock_hz, study.graph.gpu_count) | settled_columns


def _total_columns(
    totals: WorkloadTotals,
    clock_hz: Array,
    gpus: int,
) -> Columns:
    """Return the columns of results: power and energy of one GPU, and of all that share a run."""
    one_gpu = take_fields(totals, "latency_s", "power_w", "energy_j")
    return {
        **one_gpu,
        "total_power_w": gpus * one_gpu["power_w"],
        "total_energy_j": gpus * one_gpu["energy_j"],
        "clock_hz": clock_hz,
        "effective_clock_hz": totals.effective_hz,
        "busy_s": totals.busy_s,
    }
