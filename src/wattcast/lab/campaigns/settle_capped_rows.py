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
from collections.abc import Mapping
from dataclasses import dataclass
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
    counter = _EnergyCounter.read(samples)
    capped = [row for row in rows if _is_short_and_capped(row)]
    if not capped or counter is None:
        return {}
    matches = {row.id: _match_windows(row, counter) for row in capped}
    begun_s = {row.id: datetime.fromisoformat(row.date).timestamp() for row in capped}
    offset_s = _find_clock_offset_s(matches, begun_s, counter)
    if offset_s is None:
        return {}
    fields_of_row: dict[str, Plain] = {}
    for row in capped:
        last = _find_window(matches[row.id], begun_s[row.id] + offset_s, counter)
        if last is not None:
            fields = _settle_row(row, last, counter, samples)
            if fields:
                fields_of_row[row.id] = fields
    return fields_of_row


@dataclass(frozen=True)
class _EnergyCounter:
    """The steps of the energy counter in a run."""

    seen_s: Array  # when a step was seen
    step_s: Array  # when it happened, on the counter's own grid
    energy_j: Array

    @classmethod
    def read(cls, samples: EnergySamples) -> _EnergyCounter | None:
        """Return the steps, or None where they do not show a cycle of the governor."""
        sightings = find_sightings(samples)
        step_s = find_ticks(samples).time_s
        if len(step_s) != len(sightings.energy_j) or len(step_s) < CYCLE_TICKS:
            return None
        return cls(sightings.middle_s, step_s, sightings.energy_j)


def _is_short_and_capped(row: KernelRow) -> bool:
    is_capped = row.kind == "sustained" and not row.error and "sw_power_cap" in row.throttle
    return bool(is_capped and row.power_w and (row.ticks or 0) < CYCLE_TICKS)


@dataclass(frozen=True)
class _WindowMatch:
    """How near a row's power is to that of every window as long as the row's."""

    error: Array  # relative
    last: npt.NDArray[np.intp]  # the counter step that closes the window


def _find_clock_offset_s(
    matches: Mapping[str, _WindowMatch],
    begun_s: Mapping[str, float],
    counter: _EnergyCounter,
) -> float | None:
    """Return the sampler's time less calendar time, which is the same for all rows of a run.

    It is the densest place among all windows that match some row closely, since chance matches
    scatter and true ones agree."""
    offsets_s = []
    for name, match in matches.items():
        close = match.last[match.error < CLOSE]
        offsets_s.append(counter.step_s[close] - begun_s[name])
    every_s = np.sort(np.concatenate(offsets_s))
    if not len(every_s):
        return None
    first = np.arange(len(every_s))
    neighbours = np.searchsorted(every_s, every_s + NEARBY_S) - first
    densest = int(np.argmax(neighbours))
    return float(np.median(every_s[densest : densest + neighbours[densest]]))


def _find_window(
    match: _WindowMatch,
    begun_s: float,
    counter: _EnergyCounter,
) -> int | None:
    """Return the counter step that closed the row's window, begun at ``begun_s`` of the sampler."""
    late_s = counter.step_s[match.last] - begun_s
    error = np.where(np.abs(late_s) < NEARBY_S, match.error, np.inf)
    place = int(np.argmin(error))
    return int(match.last[place]) if error[place] < CLOSE else None


def _settle_row(
    row: KernelRow,
    last: int,
    counter: _EnergyCounter,
    samples: EnergySamples,
) -> Plain:
    """Return power and clock of a row after the governor has answered; nothing where that is
    shorter than its cycle.
    """
    load_s = (row.replays or 0) * (row.copies or 0) * (row.latency_s or 0.0)
    settled_s = counter.step_s[last] + QUEUED_S - load_s + SKIP_S
    first = int(np.searchsorted(counter.step_s, settled_s))
    if last - first < CYCLE_TICKS:
        return {}
    begin_s = float(counter.step_s[first])
    end_s = float(counter.step_s[last])
    clock_hz = samples.between(begin_s, end_s).known("sm_clock_hz")
    if not len(clock_hz):
        return {}
    energy_j = counter.energy_j[last] - counter.energy_j[first]
    return {
        "settled_power_w": float(energy_j / (counter.step_s[last] - counter.step_s[first])),
        "settled_clock_hz": float(clock_hz.mean()),
        "settled_ticks": last - first,
    }


def _match_windows(row: KernelRow, counter: _EnergyCounter) -> _WindowMatch:
    """Compare the row's power with that of every window as long as the row's."""
    count = row.ticks or 0
    window_j = counter.energy_j[count:] - counter.energy_j[:-count]
    seen_w = window_j / (counter.seen_s[count:] - counter.seen_s[:-count])
    step_w = window_j / (counter.step_s[count:] - counter.step_s[:-count])
    row_w = row.power_w or np.nan
    error = np.minimum(np.abs(seen_w / row_w - 1.0), np.abs(step_w / row_w - 1.0))
    return _WindowMatch(error, np.arange(count, len(counter.energy_j), dtype=np.intp))


if __name__ == "__main__":
    print(settle_database(Path(sys.argv[1]), Path(sys.argv[2])), "rows")
