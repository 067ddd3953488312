"""Find the settled power of rows under the power cap whose windows are shorter than a cycle of the
governor.

Run: ``python -m wattcast.lab.campaigns.settle_capped_rows CAMPAIGN DATABASE`` (adds it to the
packed rows of the campaign's runs).

The first rows of the H200's card A hold half a second, which shows 715 W where the load settles at
695 W. The raw samples of a run hold the whole load, so power and clock over whole cycles can be
computed afterwards. A row keeps its own power, clock and latency, because these belong to one
window."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.measured_rows import KernelRow, Plain
from wattcast.core.row_tables import (
    ROWS_FILE,
    read_table,
    write_table,
)
from wattcast.lab.campaigns.database_files import CYCLE_TICKS
from wattcast.measure.counter_ticks import find_sightings, find_ticks
from wattcast.measure.energy_samples import Array, EnergySamples

SKIP_S = 0.35  # from the begin of the load until the governor has answered
QUEUED_S = 0.05  # the load runs on this long after its window has closed
NEARBY_S = 4.0  # windows end within this long of the usual time after their row was begun
CLOSE = 1e-3  # relative difference in power between a row and its own window, evaluated again


def settle_database(campaign: Path, database: Path) -> int:
    """Add the settled fields to the packed rows of the runs whose samples a campaign kept; return
    to how many.
    """
    rows = read_table(database / ROWS_FILE)
    count = 0
    for path in sorted(campaign.rglob("samples-*.npz")):
        here = [row for row in rows if row["run"] == path.stem.removeprefix("samples-")]
        records: list[Any] = [SimpleNamespace(**row) for row in here]
        fields_of_row = settle_capped_rows(records, EnergySamples.load(path))
        for row in here:
            row.update(fields_of_row.get(row["id"], {}))
        count += len(fields_of_row)
    write_table(database / ROWS_FILE, rows)
    return count


def settle_capped_rows(rows: list[KernelRow], samples: EnergySamples) -> dict[str, Plain]:
    """Compute the settled fields of capped rows of one run whose windows the samples hold, by row
    id.

    Power and reported clock are means over at least one governor cycle.
    """
    fields_of_row: dict[str, Plain] = {}
    capped = [
        row
        for row in rows
        if row.kind == "sustained" and not row.error and "sw_power_cap" in row.throttle
        if row.power_w and (row.ticks or 0) < CYCLE_TICKS
    ]
    seen = find_sightings(samples)
    grid_s = find_ticks(samples).time_s
    energy_j = seen.energy_j
    if not capped or len(grid_s) != len(energy_j) or len(grid_s) < CYCLE_TICKS:
        return fields_of_row
    matches = {row.id: _match_windows(row, seen.middle_s, grid_s, energy_j) for row in capped}
    begun_s = {row.id: datetime.fromisoformat(row.date).timestamp() for row in capped}
    # Sampler time minus calendar time is the same for all rows of a run: the densest place among
    # all windows that match some row closely, since chance matches scatter and true ones agree.
    every_s = np.sort(
        np.concatenate(
            [grid_s[last[error < CLOSE]] - begun_s[name] for name, (error, last) in matches.items()]
        )
    )
    if not len(every_s):
        return fields_of_row
    inside = np.searchsorted(every_s, every_s + NEARBY_S) - np.arange(len(every_s))
    densest = int(np.argmax(inside))
    offset_s = float(np.median(every_s[densest : densest + inside[densest]]))
    for row in capped:
        error, last = matches[row.id]
        late_s = grid_s[last] - (begun_s[row.id] + offset_s)
        error = np.where(np.abs(late_s) < NEARBY_S, error, np.inf)
        place = int(np.argmin(error))  # the counter step that closed the row's window
        if error[place] >= CLOSE:
            continue
        end = int(last[place])
        length_s = (row.replays or 0) * (row.copies or 0) * (row.latency_s or 0.0)
        first = int(np.searchsorted(grid_s, grid_s[end] + QUEUED_S - length_s + SKIP_S))
        if end - first < CYCLE_TICKS:
            continue
        clock = samples.between(float(grid_s[first]), float(grid_s[end])).known("sm_clock_hz")
        if len(clock):
            power_w = (energy_j[end] - energy_j[first]) / (grid_s[end] - grid_s[first])
            settled = {"settled_power_w": float(power_w), "settled_clock_hz": float(clock.mean())}
            fields_of_row[row.id] = settled | {"settled_ticks": end - first}
    return fields_of_row


def _match_windows(
    row: KernelRow,
    seen_s: Array,
    grid_s: Array,
    energy_j: Array,
) -> tuple[Array, npt.NDArray[np.intp]]:
    """Compare the row's power with that of every window as long as the row's; return differences by
    last step.
    """
    count = row.ticks or 0
    joules = energy_j[count:] - energy_j[:-count]
    wanted_w = row.power_w or float("nan")
    seen, grid = (
        np.abs(joules / (t[count:] - t[:-count]) / wanted_w - 1.0) for t in (seen_s, grid_s)
    )
    return np.minimum(seen, grid), np.arange(count, len(energy_j), dtype=np.intp)


if __name__ == "__main__":
    print(settle_database(Path(sys.argv[1]), Path(sys.argv[2])), "rows")
