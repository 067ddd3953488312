"""A user's whole-model measurements, read strictly: CSV or JSON rows -> ``Measured``.

A row names a workload (a model, or a file beside this one), how it was run (``batch``, ``seq``, ``dtype`` ... as
``predict`` takes them), and what was measured: ``latency``, ``energy`` or ``power``, ``clock``, ``temperature``,
``power_limit``. Units stand in the column's name (``latency_ms``, ``clock_mhz``) or in the cell (``12.3 ms``); a
number without either is refused. The public EnergAIzer form (``workload,energy,time,avg_freq,temp``) is read too.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import units
from wattcast.arrays import per_sweep
from wattcast.errors import BadInput, WattcastError, bad_unit, bad_value, unknown_name
from wattcast.files import from_json, read_bytes
from wattcast.fit.calibrate_energaizer import HEADER, run_rows
from wattcast.fit.calibrate_model import Measured, predict, rows_of
from wattcast.fitted import Bundle
from wattcast.hardware import Gpu
from wattcast.hardware.operating_point import DEFAULT_TEMPERATURE_C
from wattcast.workload import source
from wattcast.workload.options import Options

MAX_FILE_BYTE = 16 << 20
MOST_ROWS = 10_000
QUANTITIES = {"latency": "s", "energy": "J", "power": "W", "clock": "Hz", "temperature": "C", "power_limit": "W"}
_SUFFIX = {"s": "s", "ms": "ms", "us": "us", "j": "J", "mj": "mJ", "kj": "kJ", "w": "W", "kw": "kW", "mw": "mW",
           "hz": "Hz", "mhz": "MHz", "ghz": "GHz", "c": "C"}  # fmt: skip
_NUMBERS = ("batch", "seq", "tokens", "tp", "pp", "dp", "image")
FAR = 20.0  # measured over forecast beyond this factor: a unit was mixed up
CONTRADICTION = 1.5  # two rows of one thing further apart than this cannot both be right
APART = 1.15  # further apart than this, and they are noted


def read(path: Path, gpu: Gpu) -> list[Measured]:
    """The rows of a file; anything odd is named with its line."""
    data = read_bytes(path, MAX_FILE_BYTE)
    if data.lstrip()[:1] in (b"[", b"{"):
        plain = from_json(data, list[dict[str, Any]], path.name)
        lines = [(f"{path.name}: row {i}", entry) for i, entry in enumerate(plain, start=1)]
    else:
        lines = _csv(data, path.name)
    if not 1 <= len(lines) <= MOST_ROWS:
        raise bad_value(path.name, f"from 1 to {MOST_ROWS} rows", len(lines))
    if set(lines[0][1]) == set(HEADER):
        return [_checked(m, where, gpu) for (where, _), m in zip(lines, _runs(lines, gpu), strict=True)]
    return [_checked(_measured(entry, where, path.parent), where, gpu) for where, entry in lines]


def _csv(data: bytes, where: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_value(where, "UTF-8 text", f"byte {error.start} that is not") from None
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    if not reader.fieldnames or "workload" not in reader.fieldnames:
        found = ", ".join(reader.fieldnames or ["nothing"])
        raise bad_value(where, "a first line that names columns, workload among them", found)
    rows = []
    for number, line in enumerate(reader, start=2):
        if None in line or None in line.values():
            raise bad_value(f"{where}: line {number}", f"{len(reader.fieldnames)} cells", "more or fewer")
        rows.append((f"{where}: line {number}", {k: v for k, v in line.items() if v not in ("", None)}))
    return rows


def _runs(lines: Sequence[tuple[str, Mapping[str, Any]]], gpu: Gpu) -> list[Measured]:
    """Rows of the EnergAIzer form, at the clock that really ran."""
    top_hz = float(per_sweep(gpu.clocks.max_hz))
    return [
        Measured(r.name, r.graph, r.latency_s, r.power_w, min(r.clock_hz, top_hz), r.temperature_c)
        for r in run_rows([{k: str(v) for k, v in entry.items()} for _, entry in lines])
    ]


def _measured(entry: Mapping[str, Any], where: str, folder: Path) -> Measured:
    given, options = _quantities(entry, where), {}
    known = {item.name for item in fields(Options)}
    for key, value in entry.items():
        name = key.strip()
        if name == "workload" or _quantity(name) is not None:
            continue
        if name not in known:
            wanted = ["workload", *sorted(known), *QUANTITIES]
            raise unknown_name(f"column at {where}:", name, wanted, f"Known: {', '.join(wanted)}.")
        options[name] = _option(name, value, where)
    if "workload" not in entry:
        raise bad_value(where, "a workload", "none")
    if "latency" not in given:
        raise bad_value(where, "a latency (latency_ms, latency_s ...)", "none")
    graph = _graph(str(entry["workload"]), options, where, folder)
    latency_s = given["latency"]
    power_w = given.get("power", given["energy"] / latency_s if "energy" in given else None)
    if "power" in given and "energy" in given and abs(given["energy"] / (given["power"] * latency_s) - 1) > 0.05:
        found = f"{given['energy']:.4g} J, {given['power']:.4g} W and {latency_s:.4g} s"
        raise bad_value(where, "energy = power x latency", found, "Give one of the two, or mend the units.")
    return Measured(
        graph.name,
        graph,
        latency_s,
        power_w,
        given.get("clock"),
        given.get("temperature", DEFAULT_TEMPERATURE_C),
        given.get("power_limit"),
    )


def _quantity(column: str) -> tuple[str, str] | None:
    """``latency_ms`` -> latency, ms; ``latency`` -> latency, no unit; anything else -> None."""
    if column in QUANTITIES:
        return column, ""
    name, _, suffix = column.rpartition("_")
    return (name, _SUFFIX[suffix.lower()]) if name in QUANTITIES and suffix.lower() in _SUFFIX else None


def _quantities(entry: Mapping[str, Any], where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for column, cell in entry.items():
        known = _quantity(column.strip())
        if known is None:
            continue
        name, unit = known
        text = str(cell).strip()
        if not unit and not any(c.isalpha() for c in text.replace("e", "").replace("E", "")):
            raise bad_unit(f"{where}: {column}", f"a unit, as in {name}_{_like(name)} or {text} {_like(name)}", text)
        value = units.parse(f"{text} {unit}".strip(), QUANTITIES[name], f"{where}: {column}")
        if name in found:
            raise bad_value(where, f"one {name}", "two columns of it")
        if not np.isfinite(value) or (value <= 0 and name != "temperature"):
            raise bad_value(f"{where}: {column}", "a number above zero", cell)
        found[name] = value
    return found


def _like(name: str) -> str:
    return {"s": "ms", "Hz": "MHz", "C": "c"}.get(QUANTITIES[name], QUANTITIES[name])


def _option(name: str, value: Any, where: str) -> Any:
    if name in _NUMBERS:
        try:
            return int(value)
        except (TypeError, ValueError):
            raise bad_value(f"{where}: {name}", "a whole number", value) from None
    if name == "skew":
        return float(value)
    if name == "recompute":
        return str(value).lower() in ("1", "true", "yes")
    return str(value)


def _graph(workload: str, options: Mapping[str, Any], where: str, folder: Path) -> Any:
    path = folder / workload
    try:
        return source.load(path if path.is_file() else workload, Options(**options))
    except WattcastError as error:
        raise type(error)(f"{where}: {error}") from None


def _checked(m: Measured, where: str, gpu: Gpu) -> Measured:
    """A clock the card has, a power it can draw."""
    top_hz = float(per_sweep(gpu.clocks.max_hz))
    low_hz = float(per_sweep(gpu.clocks.min_hz)) if gpu.clocks.min_hz is not None else 0.05 * top_hz
    if m.clock_hz is not None and not 0.999 * low_hz <= m.clock_hz <= 1.001 * top_hz:
        span = f"a clock of the {gpu.name}, {units.show(low_hz, 'Hz')} to {units.show(top_hz, 'Hz')}"
        raise bad_value(f"{where}: clock", span, units.show(m.clock_hz, "Hz"), "Is the unit right, and the card?")
    limit_w = float(np.max(gpu.power.limit_w))
    if m.power_w is not None and not 0.02 * limit_w <= m.power_w <= 1.5 * limit_w:
        wanted = f"a mean power the {gpu.name} can draw, up to about {limit_w:.0f} W"
        raise bad_value(f"{where}: power", wanted, units.show(m.power_w, "W"), "Are energy and latency of one run?")
    return m


def check(measured: Sequence[Measured], gpu: Gpu, bundle: Bundle) -> tuple[str, ...]:
    """Refuse units mixed up and rows that contradict one another; note repeats that differ."""
    seconds, _ = predict(rows_of(measured, gpu, bundle), {}, gpu, bundle)
    ratio = np.array([m.latency_s for m in measured]) / seconds
    far = np.flatnonzero((ratio > FAR) | (ratio < 1.0 / FAR))
    if far.size:
        m, times = measured[far[0]], float(ratio[far[0]])
        said = f"measured {units.show(m.latency_s, 's')}, forecast {units.show(float(seconds[far[0]]), 's')}"
        prefix = abs(abs(np.log10(times)) - 3) < 0.7
        guess = " A factor of a thousand is a unit's prefix (s, ms, us)." if prefix else ""
        raise BadInput(
            f"{m.name}: {said}, a factor of {max(times, 1 / times):.3g}.{guess} Check units, workload and clock; a "
            f"calibration does not reach that far."
        )
    return tuple(note for a, b in combinations(measured, 2) if (note := _same(a, b)))


def _same(a: Measured, b: Measured) -> str:
    """A note on two rows of one thing; an error where they cannot both be right."""
    if a.graph is not b.graph and a.graph != b.graph:
        return ""
    if (a.clock_hz, a.power_limit_w) != (b.clock_hz, b.power_limit_w):
        return ""
    pairs = [("latency", a.latency_s, b.latency_s, "s")]
    if a.power_w is not None and b.power_w is not None:
        pairs.append(("power", a.power_w, b.power_w, "W"))
    for name, x, y, unit in pairs:
        apart = max(x, y) / min(x, y)
        said = f"{a.name}: two rows of the same run say {units.show(x, unit)} and {units.show(y, unit)}"
        if apart > CONTRADICTION:
            raise BadInput(f"{said} {name}. Remove the wrong one, or say what differs (clock, power limit, options).")
        if apart > APART:
            return f"{said} {name}; both are used"
    return ""
