"""Read how busy each unit was over time: logs of DCGM, and GPU metrics that Nsight Systems sampled.

Both report the share of time u in which a unit worked. Its busy cycles are u·f·t, with the clock f
of its rail and the time t. ``map_dcgm.csv`` maps the columns of both sources to events, so a model
that was fitted to a log of DCGM applies to samples of Nsight Systems."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wattcast.core.arrays import Array, index_distinct
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import read_bytes, read_shipped_table
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.counter_table import (
    CounterPredictor,
    CounterRates,
    CounterTable,
)
from wattcast.lab.counter_models.gpmtool_files import MHZ, check_shares
from wattcast.lab.counter_models.launch_power import query_nsys
from wattcast.lab.counter_models.rail_terms import ACTIVE_CYCLE
from wattcast.measure.power_log_forms import Rounds, read_dcgm_rounds
from wattcast.power.activity import Activity, ActivitySource

STRETCH = 10  # rounds of a DCGM log that are held out together
POWER_COLUMN = "POWER"
CORE_CLOCK_COLUMN = "SMCLK"
MEMORY_CLOCK_COLUMN = "MMCLK"
DCGM_COMMAND = "dcgmi dmon -e 155,100,101,1002,1004,1005"
# clocks below this are in MHz, as the name of the metric says; nsys writes them in Hz
LEAST_CLOCK_HZ = 1e5
NSYS_SAMPLES = """
SELECT m.typeId & 255, m.timestamp, i.metricName, m.value FROM GPU_METRICS m
JOIN TARGET_INFO_GPU_METRICS i ON i.typeId = m.typeId AND i.metricId = m.metricId
ORDER BY m.timestamp"""


@cache
def _read_map() -> list[dict[str, str]]:
    """Read the columns of DCGM: field of the exporter, event, rail and metrics of nsys."""
    return read_shipped_table("wattcast.lab.counter_models", "map_dcgm.csv")


class _SampleLabel(NamedTuple):
    """The GPU of a sample, and its round in the log, counted from 1."""

    gpu: str
    number: int

    def __str__(self) -> str:
        return f"{self.gpu}, round {self.number}"

    @property
    def stretch(self) -> str:
        """Name the rounds that are held out together with this one."""
        first = (self.number - 1) // STRETCH * STRETCH + 1
        return f"{self.gpu}, rounds {first} on"


@dataclass(frozen=True)
class _DcgmSamples:
    """Samples of a log with a number in every column that is needed."""

    labels: tuple[_SampleLabel, ...]
    power_w: Array | None  # (sample,), where logged
    clock_hz: Array  # (sample,)
    memory_clock_hz: Array  # (sample,)
    share: Array  # (sample, unit) of the time in which a unit was busy
    units: tuple[Mapping[str, str], ...]  # their rows of the map
    log_size: int  # samples of the log, incomplete ones among them

    @property
    def busy_cycles_per_s(self) -> Array:
        """Busy cycles of each unit per second, ``(sample, unit)``."""
        clock_of_rail = {"core": self.clock_hz, "memory": self.memory_clock_hz}
        unit_clock_hz = [clock_of_rail[unit["rail"]] for unit in self.units]
        return self.share * np.stack(unit_clock_hz, axis=1)

    @property
    def predictors(self) -> tuple[CounterPredictor, ...]:
        """The event, rail and column of each unit."""
        return tuple(
            CounterPredictor(unit["event"], unit["rail"], "", unit["column"]) for unit in self.units
        )


def _read_dcgm_samples(path: Path, *, needs_power: bool) -> _DcgmSamples:
    """Read the samples of a log that have a number in every column."""
    rounds = _read_rounds(path)
    columns = _list_columns(rounds)
    units = [row for row in _read_map() if row["event"] and row["column"] in columns]
    unit_columns = [unit["column"] for unit in units]
    needed = [CORE_CLOCK_COLUMN, MEMORY_CLOCK_COLUMN, *unit_columns]
    has_power = needs_power or POWER_COLUMN in columns
    if has_power:
        needed.append(POWER_COLUMN)
    if not units or not columns.issuperset(needed):
        expectation = (
            f"columns POWER, SMCLK, MMCLK and units such as TENSO and DRAMA ({DCGM_COMMAND})"
        )
        raise bad_value(path.name, expectation, ", ".join(sorted(columns)) or "none")

    labels, cells = _collect_cells(rounds, needed)
    is_whole = np.isfinite(cells).all(axis=1)
    if not is_whole.any():
        raise bad_value(path.name, "a round with a number in every column", "none")
    whole_labels = [labels[place] for place in np.flatnonzero(is_whole)]
    figures = dict(zip(needed, cells[is_whole].T, strict=True))
    share = np.stack([figures[column] for column in unit_columns], axis=1)
    check_shares(share, unit_columns, [str(label) for label in whole_labels], path.name)
    return _DcgmSamples(
        labels=tuple(whole_labels),
        power_w=figures[POWER_COLUMN] if has_power else None,
        clock_hz=figures[CORE_CLOCK_COLUMN] * MHZ,
        memory_clock_hz=figures[MEMORY_CLOCK_COLUMN] * MHZ,
        share=share,
        units=tuple(units),
        log_size=len(labels),
    )


def _read_rounds(path: Path) -> Rounds:
    """Read the columns of each GPU in each round of a log."""
    text = read_bytes(path).decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    column_of_field = {row["field"]: row["column"] for row in _read_map()}
    return read_dcgm_rounds(lines, column_of_field)


def _collect_cells(
    rounds: Rounds,
    columns: Sequence[str],
) -> tuple[list[_SampleLabel], Array]:
    """Return the label of each sample of a log and its columns, NaN where it lacks one."""
    labels = []
    cells = []
    for number, values_by_gpu in enumerate(rounds, 1):
        for gpu, values in values_by_gpu.items():
            labels.append(_SampleLabel(gpu, number))
            cells.append([values.get(column, np.nan) for column in columns])
    return labels, np.array(cells)


def _list_columns(rounds: Rounds) -> set[str]:
    """Return every column that some round of a log has for some GPU."""
    columns: set[str] = set()
    for values_by_gpu in rounds:
        for values in values_by_gpu.values():
            columns.update(values)
    return columns


def read_dcgm_rates(path: Path) -> CounterRates:
    """Read a log of ``dcgmi dmon`` as rows to apply a model to; it may lack the watts."""
    samples = _read_dcgm_samples(path, needs_power=False)
    return CounterRates(
        names=tuple(str(label) for label in samples.labels),
        clock_hz=samples.clock_hz,
        memory_clock_hz=samples.memory_clock_hz,
        duration_s=np.ones(len(samples.labels)),
        occurrence=samples.busy_cycles_per_s,
        predictors=samples.predictors,
        power_w=samples.power_w,
    )


def read_dcgm_table(path: Path) -> CounterTable:
    """Read a log of ``dcgmi dmon`` or scrapes of its exporter: watts, clocks and how busy each unit
    was.

    A share of time times the unit's clock is its busy cycles a second. ``STRETCH`` rounds of a GPU
    are one benchmark, because neighbouring rounds resemble each other; a round without all of its
    columns is left out."""
    samples = _read_dcgm_samples(path, needs_power=True)
    assert samples.power_w is not None, "a log without watts was refused"
    names, benchmark = index_distinct([label.stretch for label in samples.labels])
    left_out = samples.log_size - len(samples.labels)
    return CounterTable(
        name=path.name,
        power_w=samples.power_w,
        clock_hz=samples.clock_hz,
        memory_clock_hz=samples.memory_clock_hz,
        occurrence=samples.busy_cycles_per_s,
        predictors=samples.predictors,
        benchmark=benchmark,
        benchmark_names=tuple(names),
        group=np.arange(len(names)),
        group_names=tuple(names),
        default_hz=(float(samples.clock_hz.max()), float(samples.memory_clock_hz.max())),
        notes=(f"{left_out} of {samples.log_size} samples lack a column and are left out.",),
    )


@dataclass(frozen=True)
class _NsysUnit:
    """One column of the map, with the metrics that Nsight Systems sampled for it."""

    column: str
    event: str  # empty for a clock
    rail: str
    metrics: tuple[str, ...]  # whose values add up to the column


def read_nsys_activity(
    path: Path,
    wanted: Sequence[str],
    clock_hz: float | None,
    memory_clock_hz: float | None,
) -> tuple[Array, Activity]:
    """Read the GPU metrics that Nsight Systems sampled: begin of each interval, and busy cycles of
    units in it.

    A sample stands for the time since the one before. Shares are those of DCGM (``map_dcgm.csv``),
    so models of ``--form dcgm`` apply. The GPC clock is kept in Hz although its name says MHz."""
    metrics = _query_nsys_metrics(path)
    columns = _find_sampled_columns(metrics)
    units = [column for column in columns.values() if column.event]
    _check_nsys_events(path, wanted, units, metrics)
    if clock_hz is None and CORE_CLOCK_COLUMN not in columns:
        raise bad_value(
            "--clock",
            "the core clock of the run",
            "none",
            "The metrics hold no GPC Clock Frequency.",
        )
    wants_memory = any(unit.event in wanted and unit.rail == "memory" for unit in units)
    if memory_clock_hz is None and wants_memory:
        raise bad_value(
            "--memory-clock", "the memory clock of the run, which nsys does not sample", "none"
        )

    times_ns = _find_common_times(metrics, columns.values())
    if len(times_ns) < 2:
        raise bad_value(path.name, "two samples with every metric", f"{len(times_ns)}")
    if clock_hz:
        core_hz = np.full(len(times_ns) - 1, clock_hz)
    else:
        core_hz = _sum_metrics(metrics, columns[CORE_CLOCK_COLUMN], times_ns)
    core_hz = np.where(core_hz < LEAST_CLOCK_HZ, core_hz * MHZ, core_hz)
    duration_s = 1e-9 * np.diff(times_ns)
    cycles_of_rail = {
        "core": core_hz * duration_s,
        "memory": (memory_clock_hz or 0.0) * duration_s,
    }
    shares = [_sum_metrics(metrics, unit, times_ns) / 100.0 for unit in units]
    busy_cycles = [
        share * cycles_of_rail[unit.rail] for unit, share in zip(units, shares, strict=True)
    ]
    is_active = np.max(shares, axis=0) > 0.0
    busy_cycles.append(cycles_of_rail["core"] * is_active)
    activity = Activity(
        duration_s,
        np.stack(busy_cycles, axis=-1),
        (*(unit.event for unit in units), ACTIVE_CYCLE),
        OperatingPoint(clock_hz=core_hz, memory_clock_hz=memory_clock_hz),
        ActivitySource.PROFILED,
    )
    start_s = 1e-9 * (times_ns[:-1] - times_ns[0])
    return start_s, activity


def _query_nsys_metrics(path: Path) -> dict[str, dict[int, float]]:
    """Return the values of each metric by time in nanoseconds; one GPU alone may be sampled."""
    rows = query_nsys(path, NSYS_SAMPLES, "GPU metrics (nsys profile --gpu-metrics-devices 0)")
    gpus = {gpu for gpu, *_ in rows}
    if len(gpus) != 1:
        raise bad_value(
            path.name,
            "GPU metrics of one GPU",
            f"{len(gpus)}",
            "Profile with --gpu-metrics-devices 0.",
        )
    metrics: dict[str, dict[int, float]] = {}
    for _, time_ns, name, value in rows:
        name_without_unit = name.split(" [")[0]
        metrics.setdefault(name_without_unit, {}).setdefault(time_ns, float(value))
    return metrics


def _find_sampled_columns(metrics: Mapping[str, object]) -> dict[str, _NsysUnit]:
    """Return the columns of the map all of whose metrics were sampled."""
    columns = {}
    for row in _read_map():
        needed = tuple(row["nsys"].split(" + "))
        if row["nsys"] and all(name in metrics for name in needed):
            columns[row["column"]] = _NsysUnit(row["column"], row["event"], row["rail"], needed)
    return columns


def _check_nsys_events(
    path: Path,
    wanted: Sequence[str],
    units: Sequence[_NsysUnit],
    metrics: Mapping[str, object],
) -> None:
    """Refuse samples without the metrics of an event that a model needs."""
    sampled = {unit.event for unit in units} | {ACTIVE_CYCLE}
    lacking = [event for event in wanted if event not in sampled]
    if lacking:
        raise bad_value(path.name, f"metrics for {', '.join(lacking)}", ", ".join(sorted(metrics)))


def _find_common_times(
    metrics: Mapping[str, Mapping[int, float]],
    columns: Iterable[_NsysUnit],
) -> Array:
    """Return the times in nanoseconds at which every metric of the columns was sampled."""
    used = [set(metrics[name]) for column in columns for name in column.metrics]
    return np.array(sorted(set.intersection(*used)))


def _sum_metrics(
    metrics: Mapping[str, Mapping[int, float]],
    column: _NsysUnit,
    times_ns: Array,
) -> Array:
    """Return a column in each interval, the sum of its metrics at the interval's end."""
    ends_ns = times_ns[1:].tolist()
    values = [[metrics[name][time_ns] for time_ns in ends_ns] for name in column.metrics]
    return np.asarray(np.sum(values, axis=0))
