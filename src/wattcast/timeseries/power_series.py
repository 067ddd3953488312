"""Power on a grid of time: watts by GPU and by part, and what the GPUs did in each interval."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core import bad_value, units
from wattcast.core.arrays import Array
from wattcast.core.row_tables import import_polars
from wattcast.core.whole_files import replace_whole, write_whole
from wattcast.timeseries.power_curve import STATES, PowerCurve

MOST_INTERVALS = 5_000_000
MOST_GPU_COLUMNS = 64  # beyond which GPUs that draw alike share a column
SUFFIXES = (".csv", ".parquet")
_CHUNK_ROWS = 4096  # of a table that are written at once, so that a long one needs little memory
_GRID_SLACK = 1e-9  # of an interval, by which a run may pass the last edge of the grid


@dataclass(frozen=True)
class PowerSeries:
    """Intervals of equal length that begin at 0; the last one ends with the run."""

    grid_s: float
    length_s: float
    part_j: Array  # (interval, part) of all GPUs
    group_j: Array  # (interval, group) of all GPUs of a group
    state_s: Array  # (interval, state) mean over the GPUs
    parts: tuple[str, ...]
    group_gpus: tuple[int, ...]  # GPUs of each group, which draw alike
    sensor_w: Array | None = None  # (interval,) what sensors show as an interval begins

    @property
    def start_s(self) -> Array:
        """When each interval begins."""
        return np.asarray(np.arange(len(self.part_j)) * self.grid_s)

    @cached_property
    def duration_s(self) -> Array:
        """Length of each interval: the grid, but for the last one."""
        return np.diff(np.append(self.start_s, self.length_s))

    @cached_property
    def interval_j(self) -> Array:
        """Joules of all GPUs in each interval."""
        return np.asarray(self.part_j.sum(axis=-1))

    @property
    def power_w(self) -> Array:
        """Mean power of all GPUs in each interval."""
        return np.asarray(self.interval_j / self.duration_s)

    @property
    def energy_j(self) -> float:
        """Joules of all GPUs over the whole series."""
        return math.fsum(self.interval_j.tolist())

    def coarsen(self, factor: int) -> PowerSeries:
        """Return the series on a grid that is ``factor`` times as coarse; sensors are left out."""
        begins = np.arange(0, len(self.part_j), factor)
        return replace(
            self,
            grid_s=self.grid_s * factor,
            part_j=np.add.reduceat(self.part_j, begins, axis=0),
            group_j=np.add.reduceat(self.group_j, begins, axis=0),
            state_s=np.add.reduceat(self.state_s, begins, axis=0),
            sensor_w=None,
        )

    def list_columns(self) -> dict[str, Any]:
        """Return the columns of the table, by name, as arrays."""
        duration_s = self.duration_s
        columns: dict[str, Any] = {
            "time_s": self.start_s,
            "duration_s": duration_s,
            "state": np.array(STATES)[self.state_s.argmax(axis=-1)],
            "power_w": self.power_w,
            "energy_j": self.interval_j,
        }
        if self.sensor_w is not None:
            columns["sensor_w"] = self.sensor_w
        for place, part in enumerate(self.parts):
            columns[f"{part}_w"] = self.part_j[:, place] / duration_s
        for place, state in enumerate(STATES):
            if self.state_s[:, place].any():
                columns[f"{state}_share"] = self.state_s[:, place] / duration_s
        columns |= self._list_gpu_columns()
        return columns

    def _list_gpu_columns(self) -> dict[str, Array]:
        """Return the watts of each GPU, or of one GPU of each group where there are many."""
        columns: dict[str, Array] = {}
        is_few = sum(self.group_gpus) <= MOST_GPU_COLUMNS
        first = 0
        for place, gpus in enumerate(self.group_gpus):
            gpu_w = self.group_j[:, place] / self.duration_s / gpus
            last = first + gpus - 1
            if is_few:
                columns |= {f"gpu{number}_w": gpu_w for number in range(first, last + 1)}
            else:
                columns[f"gpu{first}-{last}_w"] = gpu_w
            first = last + 1
        return columns

    def write(self, path: Path) -> None:
        """Write the series as CSV or as Parquet, as the ending of the file says."""
        check_series_path(path)
        write_columns(path, self.list_columns())

    def describe(self) -> str:
        """Return one line: rows, length, energy, mean, 95th percentile and peak of the power."""
        rows = len(self.part_j)
        mean_w = self.energy_j / self.length_s if self.length_s else 0.0
        figures = ", ".join(
            [
                units.show(self.energy_j, "J", 6),
                f"mean {units.show(mean_w, 'W')}",
                f"p95 {units.show(float(np.percentile(self.power_w, 95)), 'W')}",
                f"peak {units.show(float(self.power_w.max()), 'W')}",
            ]
        )
        return f"{rows} intervals of {units.show(self.grid_s, 's')}, {figures}"


def check_series_path(path: Path) -> None:
    """Raise an error where a file of a series ends in neither .csv nor .parquet."""
    if path.suffix not in SUFFIXES:
        raise bad_value("--power-out", "a name that ends in .csv or .parquet", path.name)


def write_columns(path: Path, columns: dict[str, Any]) -> None:
    """Write columns of equal length as CSV or as Parquet, whole or not at all."""
    if path.suffix == ".parquet":
        table = import_polars().DataFrame(columns)
        buffer = io.BytesIO()
        table.write_parquet(buffer, compression="zstd")
        write_whole(path, buffer.getvalue())
        return
    arrays = [np.asarray(column) for column in columns.values()]
    with replace_whole(path) as beside, beside.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        for first in range(0, len(arrays[0]), _CHUNK_ROWS):
            lists = [array[first : first + _CHUNK_ROWS].tolist() for array in arrays]
            writer.writerows(zip(*lists, strict=True))


def sample_curves(
    curves: Sequence[PowerCurve],
    grid_s: float,
    length_s: float | None = None,
) -> PowerSeries:
    """Return the power of all curves together on a grid.

    Without ``length_s`` the series ends with the longest curve.
    """
    if length_s is None:
        length_s = max(curve.length_s for curve in curves)
    count = max(math.ceil(length_s / grid_s - _GRID_SLACK), 1)
    if count > MOST_INTERVALS:
        least = units.show(length_s / MOST_INTERVALS, "s", 2)
        actual = f"{units.show(grid_s, 's')}, which makes {count} of them"
        expected = f"at most {MOST_INTERVALS} intervals (a grid of {least} or more)"
        raise bad_value(
            "--grid", expected, actual, "Or take a part of the run: --power-span 10min."
        )
    edges_s = np.append(np.arange(count) * grid_s, length_s)
    parts = tuple(dict.fromkeys(part for curve in curves for part in curve.parts))
    part_j = np.zeros((count, len(parts)))
    state_s = np.zeros((count, len(STATES)))
    group_j = []
    gpus = sum(curve.gpus for curve in curves)
    for curve in curves:
        curve_j = np.diff(curve.energy_until(edges_s), axis=0)
        places = [parts.index(part) for part in curve.parts]
        part_j[:, places] += curve_j
        group_j.append(curve_j.sum(axis=-1))
        state_s += curve.gpus / gpus * np.diff(curve.state_until(edges_s), axis=0)
    return PowerSeries(
        grid_s=grid_s,
        length_s=length_s,
        part_j=part_j,
        group_j=np.stack(group_j, axis=-1),
        state_s=state_s,
        parts=parts,
        group_gpus=tuple(curve.gpus for curve in curves),
    )
