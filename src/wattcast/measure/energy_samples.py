"""Hold what a sampler saw of a card: a row for each poll, with a column for each reading."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import read_arrays
from wattcast.core.errors import BadInput, clip_text
from wattcast.core.regular_files import open_regular
from wattcast.core.whole_files import write_whole

Array = npt.NDArray[np.float64]
COLUMNS = (
    "time_s",
    "energy_j",
    "sm_clock_hz",
    "memory_clock_hz",
    "instant_w",
    "average_w",
    "memory_w",
    "temperature_c",
    "throttle",
)
_MOST_BYTE = 2**28  # of a recording: a device that is read as one has no end

# NVML's clock event reasons (nvml.h); those marked benign do not spoil a measurement.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
BENIGN = frozenset({"gpu_idle", "sw_power_cap"})


@dataclass(frozen=True)
class ColumnReadings:
    """The values of one column, at the moments they were read."""

    time_s: Array
    values: Array

    def between(
        self,
        start_s: float,
        end_s: float,
    ) -> ColumnReadings:
        """Return the readings in the closed interval."""
        is_inside = (self.time_s >= start_s) & (self.time_s <= end_s)
        return ColumnReadings(self.time_s[is_inside], self.values[is_inside])

    def __len__(self) -> int:
        return len(self.time_s)


@dataclass(frozen=True)
class EnergySamples:
    """What the sampler saw: one array per column of ``COLUMNS``."""

    rows: Array  # (sample, column)

    def __getitem__(self, column: str) -> Array:
        return self.rows[:, COLUMNS.index(column)]

    def __len__(self) -> int:
        return len(self.rows)

    def between(
        self,
        start_s: float,
        end_s: float,
    ) -> EnergySamples:
        """Return the samples taken in the closed interval."""
        time_s = self["time_s"]
        is_inside = (time_s >= start_s) & (time_s <= end_s)
        return EnergySamples(self.rows[is_inside])

    def read_column(self, column: str) -> ColumnReadings:
        """Return the readings of a column, without the polls that did not read it."""
        values = self[column]
        is_read = np.isfinite(values)
        return ColumnReadings(self["time_s"][is_read], values[is_read])

    def known(self, column: str) -> Array:
        """Return the values of a column where it was read."""
        values = self[column]
        return values[np.isfinite(values)]

    def mean(self, column: str) -> float | None:
        """Return the mean of a column, None where it was never read."""
        values = self.known(column)
        return float(values.mean()) if len(values) else None

    def last(self, column: str) -> float | None:
        """Return the latest value of a column, None where it was never read."""
        values = self.known(column)
        return float(values[-1]) if len(values) else None

    @property
    def throttle(self) -> tuple[str, ...]:
        """Names of all clock event reasons seen."""
        bits = np.bitwise_or.reduce(self.known("throttle").astype(np.int64))
        return name_throttle_reasons(int(bits))

    def save(self, path: Path) -> None:
        """Save the samples for a later replay, as a compressed NumPy file; whole or not at all."""
        write_whole(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the samples as a compressed NumPy file."""
        packed = io.BytesIO()
        np.savez_compressed(packed, columns=np.array(COLUMNS), rows=self.rows)
        return packed.getvalue()

    @classmethod
    def load(cls, path: Path) -> EnergySamples:
        """Read the samples that ``save`` wrote."""
        try:
            with open_regular(path) as stream:
                arrays = read_arrays(stream.read(_MOST_BYTE), path.name)
            columns = list(arrays["columns"])
            order = [columns.index(name) for name in COLUMNS]
            return cls(np.asarray(arrays["rows"][:, order], dtype=np.float64))
        except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
            raise BadInput(
                f"{path.name}: not a recording of `measure run --save` ({clip_text(error)})."
            ) from None


def name_throttle_reasons(bits: int) -> tuple[str, ...]:
    """Name the clock event reasons set in ``bits``.

    >>> name_throttle_reasons(0x24)
    ('sw_power_cap', 'sw_thermal_slowdown')
    """
    names = [name for bit, name in REASONS.items() if bits & bit]
    unknown = bits & ~sum(REASONS)
    if unknown:
        names.append(f"unknown_{unknown:#x}")
    return tuple(names)
