"""A study: one workload on one chip, what varies, and what is asked of each point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array, Scalar, per_sweep, swept
from wattcast.equilibrium import settle
from wattcast.errors import MissingSpecification
from wattcast.explore.fields import Kind
from wattcast.explore.identity import fingerprint, packed, unpacked
from wattcast.explore.space import Space
from wattcast.explore.where import Where
from wattcast.fitted import Bundle
from wattcast.flow import analyse, at_clock
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.power.module import ModulePower
from wattcast.power.static import VoltageCurve
from wattcast.workload.graph import Graph
from wattcast.workload.totals import distinct

Columns: TypeAlias = dict[str, npt.NDArray[Any]]  # a table: column name -> values, all of one length

CELLS = 300_000  # points times kernels evaluated together: few megabytes an array, which stay in cache
_LARGE = 4_000_000  # numbers; less than the 32 MiB above which glibc gives back any memory that is freed


@dataclass(frozen=True)
class Study:
    """Everything that decides the results of a sweep."""

    graph: Graph
    gpu: Gpu
    bundle: Bundle
    space: Space
    at: OperatingPoint = field(default_factory=OperatingPoint)
    where: tuple[Where, ...] = ()

    def digest(self) -> str:
        """A fingerprint: equal studies have equal results."""
        return fingerprint(self)

    def __reduce__(self) -> tuple[Callable[[bytes], Study], tuple[bytes]]:
        return unpacked, (self._packed,)

    @cached_property
    def _packed(self) -> bytes:
        """What workers are sent, part after part."""
        return packed(self)


@dataclass(frozen=True)
class ScaledVoltage(VoltageCurve):
    """A voltage curve times a factor for each point of a sweep, ``(*sweep, 1)``."""

    factor: Scalar = 1.0

    def at(self, clock_hz: Scalar) -> Array:
        """Relative voltage at each set clock."""
        return np.asarray(super().at(clock_hz) * self.factor)


def table(study: Study, start: int, stop: int) -> Columns:
    """The points from ``start`` to ``stop`` that meet every constraint, as columns."""
    points = study.space.points(start, stop)
    number = np.arange(start, stop)
    for where in study.where:
        if where.column in points:
            kept = where.holds(points)
            points, number = {name: values[kept] for name, values in points.items()}, number[kept]
    results = evaluate(study, points) if number.size else _nothing(study)
    columns: Columns = {"point": number, **points, **results}
    for where in study.where:
        if where.column in results:
            kept = where.holds(columns)
            columns = {name: values[kept] for name, values in columns.items()}
    return columns


def evaluate(study: Study, columns: Columns) -> Columns:
    """Latency, power, energy and clock of each point, with the governor, in chunks.

    Points whose power at the clock asked for is within the limit are done after one step; only the
    others go through :func:`~wattcast.equilibrium.settle`. That is what ``settle`` does with each point
    alone, so results are those of single predictions.
    """
    result = _chunked(_asked, study, columns)
    rows = np.flatnonzero(result["capped"])
    if rows.size:
        over = {name: values[rows] for name, values in columns.items()}
        for name, values in _chunked(_governed, study, over).items():
            result[name][rows] = values
    return result


def _chunked(step: Callable[[Study, Columns], Columns], study: Study, columns: Columns) -> Columns:
    """What ``step`` finds for all points, a few at a time; what it finds for all alike, for each of them."""
    size = len(next(iter(columns.values())))
    count = max(CELLS // len(distinct(study.graph)), 1)
    # From a large block that is freed glibc learns to keep blocks up to its size (mallopt(3), M_MMAP_THRESHOLD).
    # Otherwise every chunk's arrays come from the system and go back to it: a third of a sweep's time.
    np.empty(_LARGE)
    result: Columns = {}
    for first in range(0, size, count):
        some = slice(first, first + count)
        for name, values in step(study, {name: values[some] for name, values in columns.items()}).items():
            result.setdefault(name, np.empty(size, values.dtype))[some] = values
    return result


def _asked(study: Study, columns: Columns) -> Columns:
    """Each point at the clock asked for, and whether that takes too much power."""
    chip, at, bundle = configured(study, columns)
    timeline = analyse(study.graph, chip, bundle)
    top_hz: Scalar = chip.clocks.max_hz if at.clock_hz is None else at.clock_hz
    totals = at_clock(timeline, replace(at, clock_hz=top_hz), bundle)
    limit_w = bundle.settles * per_sweep(chip.power.limit_w if at.power_limit_w is None else at.power_limit_w)
    return {
        "latency_s": totals.latency_s,
        "power_w": totals.power_w,
        "energy_j": totals.energy_j,
        "clock_hz": per_sweep(top_hz),
        "effective_clock_hz": totals.effective_hz,
        "busy_s": totals.busy_s,
        "capped": totals.power_w - limit_w > 0,
        "limit_met": np.array(True),
        **_fits(study.graph, chip),
    }


def configured(study: Study, columns: Mapping[str, npt.NDArray[Any]]) -> tuple[Gpu, OperatingPoint, Bundle]:
    """The chip, settings and bundle of these points."""
    kind = {axis.field.column: axis.field.kind for axis in study.space.axes}
    chip = study.gpu.with_fields({name: values for name, values in columns.items() if kind[name] is Kind.CHIP})
    at, bundle = study.at, study.bundle
    if "tensor_scale" in columns:
        rates = {
            f"pipes.tensor_flop_per_cycle.{dtype}": rate * columns["tensor_scale"]
            for dtype, rate in study.gpu.pipes.tensor_flop_per_cycle.items()
        }
        swept_already = {name for name in columns if name.startswith("pipes.tensor")}
        chip = chip.with_fields({path: value for path, value in rates.items() if path not in swept_already})
    if "voltage_scale" in columns:
        bundle = _with_voltage(bundle, columns["voltage_scale"])
    if "asked_clock_hz" in columns:
        at = replace(at, clock_hz=swept(columns["asked_clock_hz"]))
    if "asked_power_limit_w" in columns:
        at = replace(at, power_limit_w=swept(columns["asked_power_limit_w"]))
    if "temperature_c" in columns:
        at = replace(at, temperature_c=swept(columns["temperature_c"]))
    return chip, at, bundle


def idle_fields(study: Study) -> list[str]:
    """Axes that change nothing between their ends, the other axes in the middle: the models do not use them."""
    middle = {axis.field.column: axis.values[axis.values.size // 2] for axis in study.space.axes}
    unused = []
    for axis in study.space.axes:
        ends = np.array([axis.values.min(), axis.values.max()])
        if ends[0] < ends[1]:
            found = evaluate(study, {c: ends if c == axis.field.column else np.full(2, v) for c, v in middle.items()})
            if all(values[0] == values[1] for values in found.values()):
                unused.append(axis.field.name)
    return unused


def _nothing(study: Study) -> Columns:
    """The result columns of no points."""
    one = evaluate(study, study.space.points(0, 1))
    return {name: values[:0] for name, values in one.items()}


def _governed(study: Study, columns: Columns) -> Columns:
    """What differs where the governor lowers the clock."""
    chip, at, bundle = configured(study, columns)
    timeline = analyse(study.graph, chip, bundle)
    settled = settle(timeline, chip, at, bundle)
    totals = at_clock(timeline, settled.at, bundle)
    return {
        "latency_s": totals.latency_s,
        "power_w": totals.power_w,
        "energy_j": totals.energy_j,
        "clock_hz": settled.clock_hz[..., 0],
        "effective_clock_hz": totals.effective_hz,
        "busy_s": totals.busy_s,
        "limit_met": settled.met,
    }


def _fits(graph: Graph, chip: Gpu) -> Columns:
    """Whether the workload fits in memory; no column where nobody knows."""
    if graph.memory_byte is None:
        return {}
    return {"fits": np.asarray(graph.memory_byte <= per_sweep(chip.memory.capacity_byte))}


def _with_voltage(bundle: Bundle, factor: Array) -> Bundle:
    power = bundle.power
    if not isinstance(power, ModulePower):
        raise MissingSpecification(
            f"vary voltage: the power model of {bundle.gpu} has no voltage curve to scale. Vary another field."
        )
    scaled = ScaledVoltage(power.voltage.clock_hz, power.voltage.relative, swept(factor))
    return replace(bundle, power=replace(power, voltage=scaled))
