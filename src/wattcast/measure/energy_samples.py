"""Hold power samples in a ring shared between two processes, find energy steps in them, and read power logs.

One process writes the memory-mapped ring, any number read it. A row is complete before the head moves past it, so
a reader never sees half of one; a reader that is overtaken drops the rows it lost. The clock is ``time.monotonic``,
which all processes of one machine share.

Logs that other tools wrote give watts over time:

- tegrastats: ``VDD_IN 3140/3208`` or ``VDD_IN 4025mW/4025mW``, now and mean in mW (NVIDIA, Appendix TegraStats);
- DCGM: ``dcgmi dmon``, or scrapes of its exporter one below the other: ``POWER`` of each ``GPU 0`` in watts;
- jtop: CSV with ``Power TOT``, ``Power VDD_IN`` in milliwatts (rbonghi/jetson_stats, examples/jtop_logger.py);
- INA3221: CSV with ``in1_input`` in millivolts and ``curr1_input`` in milliamperes (Linux, hwmon sysfs interface);
- meter: CSV with units in its headings: ``Power (W)``, ``power_mw``, or ``Voltage (V)`` and ``Current (A)``.

Energy is the integral of power by trapezoids, so a sensor that reads seldom misses what happens in between.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import read_arrays
from wattcast.core.errors import BadInput, CannotWrite, bad_value, clip_text
from wattcast.core.records import dataclass
from wattcast.core.regular_files import open_regular
from wattcast.core.whole_files import write_whole

COLUMNS = (
    *("time_s", "energy_j", "sm_clock_hz", "memory_clock_hz", "instant_w", "average_w", "memory_w"),
    *("temperature_c", "throttle"),
)
Array = npt.NDArray[np.float64]
_MAGIC = 0x57415454
HEADER = 16  # int64 words
_MOST_BYTE = 2**28  # of a recording or a log: a device that is read as one has no end
MAGIC, CAPACITY, HEAD, STATUS, STOP, ERRORS, PROCESSOR_NS, QUICK = range(8)
STARTING, SAMPLING, LOST, STOPPED = range(4)
_RAIL = re.compile(r"\b([A-Z]\w*) (\d+)(?:mW)?/\d+(?:mW)?(?=\s|$)")
_STAMP = re.compile(r"^(\d\d-\d\d-\d{4} \d\d:\d\d:\d\d) ")
_UNIT = re.compile(r"(?:^|[\s_(\[])(mW|W|mV|V|mA|A|milliwatts?|watts?)[)\]]?$", re.IGNORECASE)
_UNITS = {  # of a heading: quantity, factor to its SI unit
    **{"mw": ("power", 1e-3), "w": ("power", 1.0), "mv": ("voltage", 1e-3), "v": ("voltage", 1.0)},
    **{"ma": ("current", 1e-3), "a": ("current", 1.0)},
}
_SCRAPED = re.compile(r'(DCGM_FI_\w+)\{[^}]*gpu="(\d+)"[^}]*\}\s+(\S+)')
EXPORTED_NAMES = {"DCGM_FI_DEV_POWER_USAGE": "POWER"}
_TIME = re.compile(r"time|date|uptime|t\b", re.IGNORECASE)


class SampleRing:
    """The mapped file. ``create`` makes one, ``attach`` opens what another process made."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path, self.capacity = path, capacity
        self.header = np.asarray(np.memmap(path, np.int64, "r+", shape=(HEADER,)))
        self._rows = np.asarray(np.memmap(path, np.float64, "r+", HEADER * 8, (capacity, len(COLUMNS))))

    @classmethod
    def create(cls, path: Path, capacity: int = 2**19) -> SampleRing:
        """Create a ring of ``capacity`` rows."""
        size = HEADER * 8 + capacity * len(COLUMNS) * 8
        try:
            with path.open("wb") as stream:
                stream.truncate(size)
                if hasattr(os, "posix_fallocate"):  # a page that a full disk has no room for would end the process
                    os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            raise CannotWrite(path, error) from error
        ring = cls(path, capacity)
        ring.header[[MAGIC, CAPACITY]] = _MAGIC, capacity
        return ring

    @classmethod
    def attach(cls, path: Path) -> SampleRing:
        """Open the ring that another process created at ``path``."""
        words = np.fromfile(path, np.int64, 2)
        if len(words) < 2 or words[0] != _MAGIC:
            raise BadInput(f"{path.name}: not a ring of samples.")
        return cls(path, int(words[1]))

    def write(self, row: Sequence[float]) -> None:
        """Append one row; the head moves last."""
        head = int(self.header[HEAD])
        self._rows[head % self.capacity] = row
        self.header[HEAD] = head + 1

    def read(self, since: int = 0) -> Array:
        """Return the rows from number ``since`` on that are still held."""
        head = int(self.header[HEAD])
        first = max(since, head - self.capacity + 64, 0)
        index = np.arange(first, head) % self.capacity
        rows = self._rows[index]
        overtaken = max(int(self.header[HEAD]) - self.capacity - first, 0)
        return rows[overtaken:]


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
MIN_STEPS = 6  # of a counter, before it may be called regular


@dataclass(frozen=True)
class EnergySamples:
    """What the sampler saw: one array per column of ``COLUMNS``."""

    rows: Array  # (sample, column)

    def __getitem__(self, column: str) -> Array:
        return self.rows[:, COLUMNS.index(column)]

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, start_s: float, end_s: float) -> EnergySamples:
        """Return the samples taken in the closed interval."""
        time_s = self["time_s"]
        return EnergySamples(self.rows[(time_s >= start_s) & (time_s <= end_s)])

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
        return name_throttle_reasons(int(np.bitwise_or.reduce(self.known("throttle").astype(np.int64))))

    def save(self, path: Path) -> None:
        """Keep the samples for a later replay, as a compressed NumPy file; whole or not at all."""
        write_whole(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the samples as a compressed NumPy file."""
        packed = io.BytesIO()
        np.savez_compressed(packed, columns=np.array(COLUMNS), rows=self.rows)
        return packed.getvalue()

    @classmethod
    def load(cls, path: Path) -> EnergySamples:
        """Read the samples that ``save`` kept."""
        try:
            with open_regular(path) as stream:
                kept = read_arrays(stream.read(_MOST_BYTE), path.name)
            order = [list(kept["columns"]).index(name) for name in COLUMNS]
            return cls(np.asarray(kept["rows"][:, order], dtype=np.float64))
        except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
            raise BadInput(f"{path.name}: not a recording of `measure run --save` ({clip_text(error)}).") from None


@dataclass(frozen=True)
class CounterTicks:
    """Times at which the energy counter stepped, and its value after each step.

    Slow polling sees only some of the steps; ``step_s`` is the counter's own period where it is regular.
    ``late_s`` is by how much a stalled poller may have misplaced each step; None where it could not.
    """

    time_s: Array
    energy_j: Array
    step_s: float | None = None
    late_s: Array | None = None

    def between(self, start_s: float, end_s: float) -> CounterTicks:
        """Return the steps inside the closed interval."""
        return self._part((self.time_s >= start_s) & (self.time_s <= end_s))

    def last(self, stretches: int) -> CounterTicks:
        """Return the latest stretches between steps that were seen."""
        return self._part(slice(-stretches - 1, None))

    def _part(self, which: slice | npt.NDArray[np.bool_]) -> CounterTicks:
        late_s = None if self.late_s is None else self.late_s[which]
        return CounterTicks(self.time_s[which], self.energy_j[which], self.step_s, late_s)

    @property
    def power_doubt(self) -> float:
        """Share of ``power_w`` that late polls at the first and the last step may have cost."""
        if self.late_s is None or len(self.time_s) < 2:
            return 0.0
        return float((self.late_s[0] + self.late_s[-1]) / (self.time_s[-1] - self.time_s[0]))

    @property
    def intervals(self) -> int:
        """Whole periods of the counter between the first step and the last."""
        if len(self.time_s) < 2:
            return 0
        length_s = float(self.time_s[-1] - self.time_s[0])
        return round(length_s / self.step_s) if self.step_s else len(self.time_s) - 1

    @property
    def interval_w(self) -> Array:
        """Mean power of each stretch between two steps that were seen."""
        return np.diff(self.energy_j) / np.diff(self.time_s)

    @property
    def power_w(self) -> float:
        """Energy between the first and the last step over the time between them."""
        return float((self.energy_j[-1] - self.energy_j[0]) / (self.time_s[-1] - self.time_s[0]))

    @property
    def spread_w(self) -> float:
        """Standard deviation of ``interval_w``."""
        return float(self.interval_w.std(ddof=1)) if len(self.time_s) > 2 else float("nan")


@dataclass(frozen=True)
class TickSightings:
    """Polls that met a new value of the counter."""

    before_s: Array  # the poll before, which still met the old value
    after_s: Array  # the poll that met the new one
    energy_j: Array

    @property
    def middle_s(self) -> Array:
        """The best guess at the step when nothing is known of the counter."""
        return 0.5 * (self.before_s + self.after_s)

    @property
    def late_s(self) -> Array:
        """By how much that guess may be off because the poller was stalled: half of a gap beyond the usual."""
        gap_s = self.after_s - self.before_s
        return 0.5 * np.maximum(gap_s - np.median(gap_s), 0.0) if len(gap_s) else gap_s


def find_sightings(samples: EnergySamples) -> TickSightings:
    """Find every change of the energy counter, as polling met it."""
    read = np.isfinite(samples["energy_j"])
    time_s, energy_j = samples["time_s"][read], samples["energy_j"][read]
    step = np.flatnonzero(np.diff(energy_j) != 0.0)
    return TickSightings(time_s[step], time_s[step + 1], energy_j[step + 1])


def find_ticks(samples: EnergySamples) -> CounterTicks:
    """Find the steps of the energy counter.

    Polls see a step some milliseconds late. Where the counter steps regularly, steps are put on the
    regular grid that the sharpest sightings lie on, and a poll between steps belongs to the step before
    it. Otherwise a step lies midway between the polls around it.
    """
    seen = find_sightings(samples)
    sharp_s = seen.middle_s[_find_sharp_sightings(seen)]
    if len(sharp_s) >= MIN_STEPS:
        apart_s = np.sort(np.diff(sharp_s))
        usual_s = float(np.median(apart_s[apart_s <= 1.5 * apart_s[2]]))  # most may be several steps apart
        for part in (1, 2, 3, 4, 5):
            if (found := _on_grid(seen, usual_s / part)) is not None:
                return found
    return CounterTicks(seen.middle_s, seen.energy_j, late_s=seen.late_s)


def _on_grid(seen: TickSightings, guess_s: float) -> CounterTicks | None:
    """Return the steps of a counter with a period near ``guess_s``; None when the sightings do not fit one."""
    sharp = _find_sharp_sightings(seen)
    sharp_s, gap_s = seen.middle_s[sharp], (seen.after_s - seen.before_s)[sharp]
    if guess_s < 4.0 * float(np.median(gap_s)):
        return None
    number = _step_numbers(sharp_s, guess_s)
    step_s, origin_s = (float(value) for value in np.polyfit(number, sharp_s, 1))
    if float(np.median(np.abs(sharp_s - (origin_s + step_s * number)))) > 0.05 * step_s:
        return None
    late = np.floor((seen.after_s - origin_s) / step_s + 0.02)
    every = np.where(sharp, np.round((seen.middle_s - origin_s) / step_s), late)
    if (np.diff(every) < 1.0).any():  # two steps in one period: the period is shorter
        return None
    return CounterTicks(origin_s + step_s * every, seen.energy_j, step_s)


def _find_sharp_sightings(seen: TickSightings) -> npt.NDArray[np.bool_]:
    """Tell which sightings lie between two polls that are close together, for the poller and for the counter."""
    gap_s = seen.after_s - seen.before_s
    if len(gap_s) < 2:
        return np.ones(len(gap_s), dtype=bool)
    closest_s = float(np.percentile(np.diff(seen.middle_s), 5.0))
    return gap_s <= max(3.0 * float(np.percentile(gap_s, 4.0)), 0.1 * closest_s)


def _step_numbers(seen_s: Array, step_s: float) -> Array:
    """Number the step of each sighting, following the phase slowly, so that one late poll does not shift the rest.

    Sightings may be seconds apart, so the period is learnt on the way: it is known ever better from the first
    sighting to the latest, and a percent of error in the first guess would miscount.
    """
    number, phase_s, numbers, period_s = 0.0, float(seen_s[0]), [0.0], step_s
    for at_s in seen_s[1:]:
        passed = max(round((float(at_s) - phase_s) / period_s), 1)
        number += passed
        phase_s += passed * period_s
        phase_s += 0.2 * (float(at_s) - phase_s)
        numbers.append(number)
        if number >= MIN_STEPS:
            period_s = (phase_s - float(seen_s[0])) / number
    return np.array(numbers)


class UnwrappedCounter:
    """Follow a counter of joules beyond the range at which it wraps.

    A fall to near zero from near the top is a wrap. Any other fall is a reset, after which energies before and after
    cannot be compared.

    >>> counter = UnwrappedCounter(4294967.296)
    >>> counter.follow(4294967.0), counter.follow(100.0), counter.follow(3.0)
    (4294967.0, 4295067.296, 4294970.296)
    """

    def __init__(self, range_j: float | None) -> None:
        self._range_j, self._previous_j, self._offset_j = range_j or np.inf, 0.0, 0.0

    def follow(self, now_j: float) -> float:
        """Return the counter without its wraps; NaN, a reading that failed, is passed over."""
        if self._previous_j > 0.9 * self._range_j and now_j < 0.1 * self._range_j:
            self._offset_j += self._range_j
        self._previous_j = now_j if np.isfinite(now_j) else self._previous_j
        return now_j + self._offset_j


def name_throttle_reasons(bits: int) -> tuple[str, ...]:
    """Name the clock event reasons set in ``bits``.

    >>> name_throttle_reasons(0x24)
    ('sw_power_cap', 'sw_thermal_slowdown')
    """
    unknown = bits & ~sum(REASONS)
    names = [name for bit, name in REASONS.items() if bits & bit]
    return (*names, *([f"unknown_{unknown:#x}"] if unknown else []))


@dataclass(frozen=True)
class PowerLog:
    """Watts of each rail, card or meter over time; NaN where a line did not say."""

    form: str
    time_s: Array  # from the first line
    watts: Mapping[str, Array]

    def summarise(self, start_s: float = 0.0, end_s: float = np.inf) -> dict[str, dict[str, float]]:
        """Return mean and largest watts, joules and seconds of every rail between two moments."""
        inside = (self.time_s >= start_s) & (self.time_s <= end_s)
        found = {}
        for rail, watts in self.watts.items():
            known = inside & np.isfinite(watts)
            if known.sum() < 2:
                continue
            time_s, power_w = self.time_s[known], watts[known]
            energy_j = float(np.sum(0.5 * (power_w[1:] + power_w[:-1]) * np.diff(time_s)))
            span_s = float(time_s[-1] - time_s[0])
            if span_s > 0.0:
                found[rail] = {"power_w": energy_j / span_s, "largest_w": float(power_w.max())}
                found[rail] |= {"energy_j": energy_j, "duration_s": span_s, "samples": float(known.sum())}
        if not found:
            raise bad_value("log", "two readings or more between --from and --to", f"{int(inside.sum())} lines")
        return found


def read_power_log(path: Path, interval_s: float = 1.0) -> PowerLog:
    """Read a log of any form above; ``interval_s`` is the time between lines where they have none of their own."""
    try:
        with open_regular(path) as stream:
            data = stream.read(_MOST_BYTE)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}.") from None
    if len(data) == _MOST_BYTE:
        raise bad_value(path.name, f"a log of less than {_MOST_BYTE} bytes", "more")
    text = data.decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    if rounds := read_dcgm_rounds(lines):
        known = [{e: v["POWER"] for e, v in each.items() if np.isfinite(v.get("POWER", np.nan))} for each in rounds]
        if not any(known):
            raise bad_value(path.name, "a POWER column (dcgmi dmon -e 155)", "none")
        return _make_log("DCGM", np.arange(len(known)) * interval_s, known)
    if any(" RAM " in f" {line}" and _RAIL.search(line) for line in lines[:20]):
        found = [(_STAMP.match(line), dict(_RAIL.findall(line))) for line in lines]
        rows = [(stamp, {rail: 1e-3 * float(mw) for rail, mw in rails.items()}) for stamp, rails in found if rails]
        stamps = [datetime.strptime(stamp[1], "%m-%d-%Y %H:%M:%S").timestamp() for stamp, _ in rows if stamp]
        if len(stamps) == len(rows) > 1 and stamps[-1] > stamps[0]:  # whole seconds: lines lie evenly between
            interval_s = (stamps[-1] - stamps[0]) / (len(rows) - 1)
        return _make_log("tegrastats", np.arange(len(rows)) * interval_s, [watts for _, watts in rows])
    return _read_csv(lines, interval_s, path.name)


def read_dcgm_rounds(
    lines: Iterable[str], exported: Mapping[str, str] = EXPORTED_NAMES
) -> list[dict[str, dict[str, float]]]:
    """Return what each round of ``dcgmi dmon``, or each scrape of its exporter, says of every GPU, by column.

    ``exported`` has the column of each field that the exporter names. What is no number, such as N/A, is NaN.
    """
    head: list[str] = []
    rounds: list[dict[str, dict[str, float]]] = []
    for line in lines:
        words = line.replace("# Entity", "#Entity").split()  # as DCGM 3 writes it
        if words[0] == "#Entity":
            head = words[1:]
        elif (scraped := _SCRAPED.match(line)) and scraped[1] in exported:
            _add_to_round(rounds, f"GPU {scraped[2]}", {exported[scraped[1]]: _read_number(scraped[3])})
        elif head and words[0] in ("GPU", "GPU-I") and len(words) == len(head) + 2:
            values = dict(zip(head, map(_read_number, words[2:]), strict=True))
            _add_to_round(rounds, " ".join(words[:2]), values)
    return rounds


def _add_to_round(rounds: list[dict[str, dict[str, float]]], entity: str, values: dict[str, float]) -> None:
    """Add values of a GPU to the last round, or to a new one where that has them already."""
    if not rounds or rounds[-1].get(entity, {}).keys() & values.keys():
        rounds.append({})
    rounds[-1].setdefault(entity, {}).update(values)


def _read_csv(lines: list[str], interval_s: float, name: str) -> PowerLog:
    delimiter = max(",;\t", key=lines[0].count) if lines else ","
    table = list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))
    head = [column for column in (table[0] if table else {}) if column]
    known = {column: unit for column in head if (unit := _read_unit(column))}
    by_quantity = {q: [c for c in known if known[c][0] == q] for q in ("power", "voltage", "current")}
    pairs = list(zip(by_quantity["voltage"], by_quantity["current"], strict=False))
    rows = []
    for row in table:
        value = {column: _read_number(row.get(column)) * scale for column, (_, scale) in known.items()}
        watts = {column: value[column] for column in by_quantity["power"]}
        rows.append(watts or {f"{v} · {c}": value[v] * value[c] for v, c in pairs})
    if not rows or not rows[0]:
        wanted = "a log of tegrastats or dcgmi dmon, or a CSV with units in its headings, such as Power (W)"
        raise bad_value(name, wanted, clip_text(", ".join(head) or "nothing", 200))
    clock = next((column for column in head if _TIME.match(column)), None)
    form = "jtop" if "Power TOT" in head else "CSV"
    times = _read_times([row.get(clock) for row in table], clock) if clock else None
    return _make_log(form, np.arange(len(rows)) * interval_s if times is None else times, rows)


def _read_unit(column: str) -> tuple[str, float] | None:
    """Return quantity and factor to its SI unit."""
    sensor = re.fullmatch(r"(in|curr)\d+_input", column)
    if sensor:
        return ("voltage" if sensor[1] == "in" else "current", 1e-3)
    unit = _UNIT.search(column)
    if unit is None:
        return ("power", 1e-3) if column.startswith("Power ") else None  # jtop
    return _UNITS[re.sub(r"watts?$", "w", unit[1].lower().replace("milli", "m"))]


def _read_number(text: str | None) -> float:
    try:
        return float((text or "").strip().removesuffix("W").removesuffix("m"))
    except ValueError:
        return float("nan")


def _read_times(texts: list[str | None], heading: str) -> Array | None:
    """Return seconds from the first line: numbers of seconds or milliseconds, or dates."""
    scale = 1e-3 if re.search(r"\bms\b|_ms$", heading) else 1.0
    try:
        values = np.array([float(text or "nan") * scale for text in texts])
    except ValueError:
        try:
            values = np.array([datetime.fromisoformat((text or "").strip()).timestamp() for text in texts])
        except ValueError:
            return None
    rises = len(values) and np.isfinite(values).all() and (np.diff(values) >= 0.0).all()
    return values - values[0] if rises else None


def _make_log(form: str, time_s: npt.ArrayLike, rows: list[dict[str, float]]) -> PowerLog:
    names = dict.fromkeys(name for row in rows for name in row)
    watts = {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
    drawn = {name: values for name, values in watts.items() if np.nanmax(values, initial=0.0) > 0.0}
    return PowerLog(form, np.asarray(time_s, dtype=np.float64), drawn)
