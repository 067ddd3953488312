"""Define a study (one workload on one chip, what varies, what is asked of each point) and evaluate
its points.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Sweepable, as_sweep, sweep_values
from wattcast.explore.search_space import Constraint, FieldKind, SearchSpace
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import REACTION_S, run_governed
from wattcast.predictor.pipeline import WorkloadTotals, analyse_graph, total_at_clock
from wattcast.predictor.prediction_json import take_fields
from wattcast.workload.graph import Graph, count_operators


def pack_value(value: Any) -> bytes:
    """Pack a value as bytes.

    They are a pickle: read those of your own processes, and nobody else's.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
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

    def digest(self) -> str:
        """Hash everything that decides results; equal studies have equal hashes in every process."""
        hashed = hashlib.sha256()
        _feed_hash(hashed, self)
        return hashed.hexdigest()

    def __reduce__(self) -> tuple[Callable[[bytes], Study], tuple[bytes]]:
        return unpack_value, (self._packed,)

    @cached_property
    def _packed(self) -> bytes:
        """Pack the study once, as workers are sent it part after part."""
        return pack_value(self)


def tabulate_points(study: Study, start: int, stop: int) -> Columns:
    """Evaluate the points from ``start`` to ``stop``.

    Those that meet every constraint are returned, as columns.
    """
    axes = study.space.points(start, stop)
    columns = _meet_constraints(study, {"point": np.arange(start, stop), **axes})
    points = {name: columns[name] for name in study.space.columns}
    if columns["point"].size:
        return _meet_constraints(study, columns | evaluate_points(study, points))
    # the columns that one point would have, empty
    one_point = evaluate_points(study, study.space.points(0, 1))
    return columns | {name: values[:0] for name, values in one_point.items()}


def _meet_constraints(study: Study, columns: Columns) -> Columns:
    """Keep the rows that meet every constraint on these columns."""
    for constraint in study.constraints:
        if constraint.column in columns:
            is_met = constraint.holds(columns)
            columns = {name: values[is_met] for name, values in columns.items()}
    return columns


def evaluate_points(study: Study, columns: Columns) -> Columns:
    """Return latency, power, energy and clock of each point, with the governor.

    Points whose power at the clock asked for is within the limit, in runs shorter than the
    governor's window, are done after one step; only the others go through the governor. The
    governor does the same with each point alone, so results are those of single predictions.
    """
    result = _evaluate_in_chunks(_evaluate_asked_clock, study, columns)
    may_have_stretches = result["latency_s"] > REACTION_S
    rows = np.flatnonzero(result["capped"] | may_have_stretches)
    if rows.size:
        over = {name: values[rows] for name, values in columns.items()}
        for name, values in _evaluate_in_chunks(_evaluate_governed, study, over).items():
            result[name][rows] = values
    return result


def _evaluate_in_chunks(
    step: Callable[[Study, Columns], Columns], study: Study, columns: Columns
) -> Columns:
    """Apply ``step`` to a few points at a time.

    A value that is the same for all points is repeated for each.
    """
    size = len(next(iter(columns.values())))
    count = max(CELLS // len(count_operators(study.graph)), 1)
    # From a large block that is freed glibc learns to keep blocks up to its size (mallopt(3),
    # M_MMAP_THRESHOLD). Otherwise every chunk's arrays come from the system and go back to it: a
    # third of a sweep's
    # time.
    np.empty(_LARGE)
    result: Columns = {}
    for first in range(0, size, count):
        rows = slice(first, first + count)
        chunk = {name: values[rows] for name, values in columns.items()}
        for name, values in step(study, chunk).items():
            result.setdefault(name, np.empty(size, values.dtype))[rows] = values
    return result


def _evaluate_asked_clock(study: Study, columns: Columns) -> Columns:
    """Evaluate each point at the clock asked for, and tell whether that takes too much power."""
    chip, at, bundle = configure_points(study, columns)
    timeline = analyse_graph(study.graph, chip, bundle)
    top_hz: Sweepable = chip.clocks.max_hz if at.clock_hz is None else at.clock_hz
    totals = total_at_clock(timeline, replace(at, clock_hz=top_hz), bundle)
    set_limit_w = chip.power.limit_w if at.power_limit_w is None else at.power_limit_w
    limit_w = bundle.governor_share * sweep_values(set_limit_w)
    result = _total_columns(totals, sweep_values(top_hz), study.graph.gpu_count)
    result["capped"] = totals.power_w - limit_w > 0
    result["limit_met"] = np.array(True)
    if study.graph.memory_byte is not None:
        capacity_byte = sweep_values(chip.memory.capacity_byte)
        result["fits"] = np.asarray(study.graph.memory_byte <= capacity_byte)
    return result


_COLUMN_OF_SETTING = {
    "clock_hz": "asked_clock_hz",
    "power_limit_w": "asked_power_limit_w",
    "temperature_c": "temperature_c",
}


def configure_points(
    study: Study, columns: Mapping[str, npt.NDArray[Any]]
) -> tuple[Gpu, OperatingPoint, Bundle]:
    """Return the chip, settings and bundle of these points."""
    kind = {axis.field.column: axis.field.kind for axis in study.space.axes}
    chip_fields = {name: values for name, values in columns.items() if kind[name] is FieldKind.CHIP}
    if "tensor_scale" in columns:
        for dtype, rate in study.gpu.pipes.tensor_flop_per_cycle.items():
            path = f"pipes.tensor_flop_per_cycle.{dtype}"
            chip_fields.setdefault(path, rate * columns["tensor_scale"])
    chip = study.gpu.with_fields(chip_fields)
    bundle = study.bundle
    if "voltage_scale" in columns:
        factor = as_sweep(columns["voltage_scale"])
        bundle = replace(bundle, power=bundle.power.with_voltage_factor(factor))
    settings: dict[str, Any] = {}
    for name, column in _COLUMN_OF_SETTING.items():
        if column in columns:
            settings[name] = as_sweep(columns[column])
    return chip, replace(study.settings, **settings), bundle


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
    settled, totals, _ = run_governed(analyse_graph(study.graph, chip, bundle), chip, at, bundle)
    settled_columns = {"limit_met": settled.met, "capped": settled.capped}
    clock_hz = settled.clock_hz[..., 0]
    return _total_columns(totals, clock_hz, study.graph.gpu_count) | settled_columns


def _total_columns(totals: WorkloadTotals, clock_hz: Array, gpus: int) -> Columns:
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
