"""Read watts over time from logs that other tools wrote: Jetson boards, DCGM, current sensors and external meters.

- tegrastats: ``VDD_IN 3140/3208`` or ``VDD_IN 4025mW/4025mW``, now and mean in mW (NVIDIA, Appendix TegraStats);
- DCGM: ``dcgmi dmon``, or scrapes of its exporter one below the other: ``POWER`` of each ``GPU 0`` in watts;
- jtop: CSV with ``Power TOT``, ``Power VDD_IN`` in milliwatts (rbonghi/jetson_stats, examples/jtop_logger.py);
- INA3221: CSV with ``in1_input`` in millivolts and ``curr1_input`` in milliamperes (Linux, hwmon sysfs interface);
- meter: CSV with units in its headings: ``Power (W)``, ``power_mw``, or ``Voltage (V)`` and ``Current (A)``.

Energy is the integral of power by trapezoids, so a sensor that reads seldom misses what happens in between.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.core.errors import BadInput, bad_value, clip_text

Array = npt.NDArray[np.float64]
_RAIL = re.compile(r"\b([A-Z]\w*) (\d+)(?:mW)?/\d+(?:mW)?(?=\s|$)")
_STAMP = re.compile(r"^(\d\d-\d\d-\d{4} \d\d:\d\d:\d\d) ")
_UNIT = re.compile(r"[\s_(\[](mW|W|mV|V|mA|A|milliwatts?|watts?)[)\]]?$", re.IGNORECASE)
_UNITS = {  # of a heading: quantity, factor to its SI unit
    **{"mw": ("power", 1e-3), "w": ("power", 1.0), "mv": ("voltage", 1e-3), "v": ("voltage", 1.0)},
    **{"ma": ("current", 1e-3), "a": ("current", 1.0)},
}
_SCRAPED = re.compile(r'(DCGM_FI_\w+)\{[^}]*gpu="(\d+)"[^}]*\}\s+(\S+)')
EXPORTED_NAMES = {"DCGM_FI_DEV_POWER_USAGE": "POWER"}
_TIME = re.compile(r"time|date|uptime|t\b", re.IGNORECASE)


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
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}.") from None
    lines = [line for line in lines if line.strip()]
    if rounds := read_dcgm_rounds(lines):
        return _read_dcgm(rounds, interval_s, path.name)
    if any(" RAM " in f" {line}" and _RAIL.search(line) for line in lines[:20]):
        return _read_tegrastats(lines, interval_s)
    return _read_csv(lines, interval_s, path.name)


def _read_tegrastats(lines: Iterable[str], interval_s: float) -> PowerLog:
    found = [(_STAMP.match(line), dict(_RAIL.findall(line))) for line in lines]
    rows = [(stamp, {rail: 1e-3 * float(mw) for rail, mw in rails.items()}) for stamp, rails in found if rails]
    stamps = [datetime.strptime(stamp[1], "%m-%d-%Y %H:%M:%S").timestamp() for stamp, _ in rows if stamp]
    if len(stamps) == len(rows) > 1 and stamps[-1] > stamps[0]:  # whole seconds: lines lie evenly between
        interval_s = (stamps[-1] - stamps[0]) / (len(rows) - 1)
    return _make_log("tegrastats", np.arange(len(rows)) * interval_s, [watts for _, watts in rows])


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


def _read_dcgm(rounds: list[dict[str, dict[str, float]]], interval_s: float, name: str) -> PowerLog:
    rows = [
        {entity: v["POWER"] for entity, v in each.items() if np.isfinite(v.get("POWER", np.nan))} for each in rounds
    ]
    if not any(rows):
        raise bad_value(name, "a POWER column (dcgmi dmon -e 155)", "none")
    return _make_log("DCGM", np.arange(len(rows)) * interval_s, rows)


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
    time_s = np.asarray(time_s, dtype=np.float64)
    return PowerLog(form, time_s, {name: values for name, values in watts.items() if np.nanmax(values) > 0.0})
