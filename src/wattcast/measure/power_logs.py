"""Read watts over time from logs that other tools wrote, and integrate them to joules.

- nvidia-smi: ``--query-gpu=timestamp,index,power.draw --format=csv``, and the columns of
  ``nvidia-smi dmon``;
- DCGM: ``dcgmi dmon``, or scrapes of its exporter one below the other: ``POWER`` of each ``GPU 0``
  in watts;
- AMD: ``amd-smi monitor`` and ``amd-smi metric --csv`` with ``--watch``, ``rocm-smi --showpower
  --csv`` in a loop;
- tegrastats: ``VDD_IN 3140/3208`` or ``VDD_IN 4025mW/4025mW``, now and mean in mW (NVIDIA, Appendix
  TegraStats);
- jtop: CSV with ``Power TOT``, ``Power VDD_IN`` in milliwatts (rbonghi/jetson_stats,
  examples/jtop_logger.py);
- INA3221: CSV with ``in1_input`` in millivolts and ``curr1_input`` in milliamperes (Linux, hwmon
  sysfs interface);
- IPMI: ``ipmitool dcmi power reading``, one block below the other;
- meter: CSV with units in its headings: ``Power (W)``, ``power_mw``, or ``Voltage (V)`` and
  ``Current (A)``.

Energy is the integral of power by trapezoids, so a sensor that reads seldom misses what happens in
between. A stretch without readings is left out of the integral and flagged, and so is a reading
that no card can have drawn. A stamp or a value that cannot be read is refused with its line
(``time_stamps`` says which can).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from wattcast.core.errors import BadInput, bad_value, clip_text
from wattcast.core.regular_files import open_regular
from wattcast.measure.time_stamps import (
    Array,
    Stamp,
    StampTimes,
    check_rising,
    place_whole_seconds,
    read_stamps,
)

MOST_BYTE = 2**28  # of a log: a device that is read as one has no end
MOST_W = 1e6  # a rack draws a tenth of this
MOST_GPU_W = 4000.0  # a GPU board draws at most a third of this
GAP_INTERVALS = 2.5  # a pause between readings that is longer than so many usual ones is a gap
DOUBTFUL_SHARE = 0.05  # of the energy: times that are known less well are flagged
WHAT_TO_DO = "Give the time between lines, such as --interval 100ms."
EXPORTED_NAMES = {"DCGM_FI_DEV_POWER_USAGE": "POWER"}
WANTED = (
    "a log of nvidia-smi, dcgmi dmon, amd-smi, rocm-smi, tegrastats or ipmitool, "
    "or a CSV with units in its headings, such as Power (W)"
)

_RAIL = re.compile(r"\b([A-Z]\w*) (\d+)(?:mW)?/\d+(?:mW)?(?=\s|$)")
_TEGRA_STAMP = re.compile(r"^(\d\d-\d\d-\d{4} \d\d:\d\d:\d\d)\s")
_TEGRA_FORMAT = "%m-%d-%Y %H:%M:%S"
_SCRAPED = re.compile(r'(DCGM_FI_\w+)\{[^}]*gpu="(\d+)"[^}]*\}\s+(\S+)')
_IPMI_WATTS = re.compile(r"\s*Instantaneous power reading:\s*(\S+)\s+Watts")
_IPMI_STAMP = re.compile(r"\s*IPMI timestamp:\s*(.+?)\s*$")
_UNIT = re.compile(
    r"(?:^|[\s_(\[])(kW|mW|W|mV|V|mA|A|kilowatts?|milliwatts?|watts?)[)\]]?$", re.IGNORECASE
)
_UNITS = {  # of a heading: quantity, factor to its SI unit
    "kw": ("power", 1e3),
    "w": ("power", 1.0),
    "mw": ("power", 1e-3),
    "v": ("voltage", 1.0),
    "mv": ("voltage", 1e-3),
    "a": ("current", 1.0),
    "ma": ("current", 1e-3),
}
_WATT_COLUMNS = (
    "socket_power",
    "power_usage",
    "power",
    "pwr",
    "avgpwr",
)  # of amd-smi and nvidia-smi dmon
# power that a card may draw, not what it drew
_NO_DRAW = re.compile(r"limit|\bcap\b|max_power|pwrcap", re.IGNORECASE)
_TIME = re.compile(r"time|date|uptime|t(\b|_)", re.IGNORECASE)
_CARD = re.compile(
    r"(gpu_?)?(index|idx|uuid|id)|device|card|(gpu_)?serial|(pci|gpu)[._]bus_id", re.IGNORECASE
)
_CELL = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(kW|mW|W)?")
_CELL_UNITS = {"kW": 1e3, "W": 1.0, "mW": 1e-3}
_ABSENT = re.compile(
    r"|-+|nan|n/?a|none|err!|\[?(not supported|n/a|unknown error|gpu is lost)\]?", re.IGNORECASE
)


@dataclass(frozen=True)
class LogLine:
    """What one line, or one round of lines, says: watts of every rail it names.

    NaN where it has no value.
    """

    line: int  # counted from 1
    turn: int  # how many readings of the same rails came before
    watts: Mapping[str, float]
    stamp: str | None = None  # None: the log has no times of its own


@dataclass(frozen=True)
class RailReadings:
    """Watts of one rail, card or meter over time, and what is wrong with its times."""

    time_s: Array  # from the first line of the log
    watts: Array  # NaN where a line did not say
    lines: tuple[int, ...]
    time_flags: tuple[str, ...] = ()
    most_w: float = MOST_W


@dataclass(frozen=True)
class RailSummary:
    """Joules and watts of one rail between two moments; ``flags`` say why they may be wrong."""

    power_w: float
    largest_w: float
    energy_j: float
    duration_s: float  # that readings cover, without the gaps
    samples: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class PowerLog:
    """A log of one form: readings of every rail that drew power."""

    form: str
    rails: Mapping[str, RailReadings]
    notes: tuple[str, ...] = field(default=())

    def summarise(self, start_s: float = 0.0, end_s: float = np.inf) -> dict[str, RailSummary]:
        """Return mean and largest watts, joules and seconds of every rail between two moments."""
        summaries = {}
        for name, rail in self.rails.items():
            summary = summarise_rail(rail, start_s, end_s)
            if summary is not None:
                summaries[name] = summary
        if not summaries:
            lines = sum(
                int(((r.time_s >= start_s) & (r.time_s <= end_s)).sum())
                for r in self.rails.values()
            )
            raise bad_value("log", "two readings or more between --from and --to", f"{lines} lines")
        return summaries


def summarise_rail(rail: RailReadings, start_s: float, end_s: float) -> RailSummary | None:
    """Integrate a rail by trapezoids over all stretches without a gap.

    None where fewer than two readings are left.
    """
    inside = (rail.time_s >= start_s) & (rail.time_s <= end_s)
    is_read = inside & np.isfinite(rail.watts)
    is_impossible = is_read & ((rail.watts < 0.0) | (rail.watts > rail.most_w))
    is_used = is_read & ~is_impossible
    flags = list(rail.time_flags)
    if is_impossible.any():
        first = int(np.flatnonzero(is_impossible)[0])
        flags.append(
            f"{int(is_impossible.sum())} impossible readings left out, "
            f"the first {rail.watts[first]:.6g} W in line {rail.lines[first]}"
        )
    if is_used.sum() < 2:
        return None
    places = np.flatnonzero(is_used)
    time_s = rail.time_s[places]
    watts = rail.watts[places]
    step_s = np.diff(time_s)
    is_gap = _find_gaps(rail.time_s[inside], step_s)
    flags += [
        f"no readings for {step_s[place]:.6g} s after line {rail.lines[places[place]]}, left out "
        "(a pause, or a clock that was set forward)"
        for place in np.flatnonzero(is_gap)[:3]
    ]
    if is_gap.sum() > 3:
        flags.append(f"{int(is_gap.sum())} such gaps, {step_s[is_gap].sum():.6g} s in all")
    covered_s = float(step_s[~is_gap].sum())
    if covered_s <= 0.0:
        return None
    trapezoids_j = 0.5 * (watts[1:] + watts[:-1]) * step_s
    energy_j = float(trapezoids_j[~is_gap].sum())
    return RailSummary(
        power_w=energy_j / covered_s,
        largest_w=float(watts.max()),
        energy_j=energy_j,
        duration_s=covered_s,
        samples=int(is_used.sum()),
        flags=tuple(flags),
    )


def _find_gaps(line_s: Array, step_s: Array) -> np.ndarray:
    """Tell which steps between readings are much longer than the usual one between lines."""
    between_s = np.diff(line_s)
    between_s = between_s[between_s > 0.0]
    if len(between_s) < 2:
        return np.zeros(len(step_s), dtype=bool)
    return step_s > GAP_INTERVALS * float(np.median(between_s))


def read_power_log(path: Path, interval_s: float | None = None, time_format: str = "") -> PowerLog:
    """Read a log of any form above.

    ``interval_s`` is the time between lines, in place of their own times; it is needed where lines
    have none. ``time_format`` says how times are written where that can be read in several ways.
    """
    if interval_s is not None and not 0.0 < interval_s < np.inf:
        raise bad_value("--interval", "a time above zero, such as 100ms", interval_s)
    lines = _read_lines(path)
    form, rows, heading, tool_format = _read_rows(
        [line for line in lines if line[1].strip()], path.name
    )
    rails = _make_rails(rows, form, interval_s, path.name, heading, time_format, tool_format)
    drawn = {
        name: rail
        for name, rail in rails.items()
        if np.nanmax(np.abs(rail.watts), initial=0.0) > 0.0
    }
    return PowerLog(form, drawn)


def _read_lines(path: Path) -> list[tuple[int, str]]:
    try:
        with open_regular(path) as stream:
            data = stream.read(MOST_BYTE)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}.") from None
    if len(data) == MOST_BYTE:
        raise bad_value(path.name, f"a log of less than {MOST_BYTE} bytes", "more")
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    return list(enumerate(text.splitlines(), start=1))


def _read_rows(lines: list[tuple[int, str]], name: str) -> tuple[str, list[LogLine], str, str]:
    """Return the form of a log, its lines, the heading of their times and the tool's pattern."""
    texts = [text for _, text in lines]
    if rounds := read_dcgm_rounds(texts):
        return "DCGM", _read_dcgm(rounds, name), "", ""
    if any(" RAM " in f" {text}" and _RAIL.search(text) for text in texts[:20]):
        return "tegrastats", _read_tegrastats(lines), "", _TEGRA_FORMAT
    if any(_IPMI_WATTS.match(text) for text in texts):
        return "IPMI", _read_ipmi(lines, name), "", ""
    form, head, cells = _split_table(lines, name)
    rows, heading = _read_table(form, head, cells, name)
    return form, rows, heading, ""


def read_dcgm_rounds(
    lines: Iterable[str], exported: Mapping[str, str] = EXPORTED_NAMES
) -> list[dict[str, dict[str, float]]]:
    """Return what each round of ``dcgmi dmon``, or each scrape of its exporter, says of every GPU,
    by column.

    ``exported`` has the column of each field that the exporter names. What is no number, such as
    N/A, is NaN.
    """
    head: list[str] = []
    rounds: list[dict[str, dict[str, float]]] = []
    for line in lines:
        words = line.replace("# Entity", "#Entity").split()  # as DCGM 3 writes it
        if words[0] == "#Entity":
            head = words[1:]
        elif (scraped := _SCRAPED.match(line)) and scraped[1] in exported:
            _add_to_round(
                rounds, f"GPU {scraped[2]}", {exported[scraped[1]]: _read_plain(scraped[3])}
            )
        elif head and words[0] in ("GPU", "GPU-I") and len(words) == len(head) + 2:
            values = dict(zip(head, map(_read_plain, words[2:]), strict=True))
            _add_to_round(rounds, " ".join(words[:2]), values)
    return rounds


def _add_to_round(
    rounds: list[dict[str, dict[str, float]]], entity: str, values: dict[str, float]
) -> None:
    """Add values of a GPU to the last round, or to a new one where that has them already."""
    if not rounds or rounds[-1].get(entity, {}).keys() & values.keys():
        rounds.append({})
    rounds[-1].setdefault(entity, {}).update(values)


def _read_plain(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _read_dcgm(rounds: list[dict[str, dict[str, float]]], name: str) -> list[LogLine]:
    rows = []
    for turn, each in enumerate(rounds):
        watts = {entity: values["POWER"] for entity, values in each.items() if "POWER" in values}
        rows.append(LogLine(turn + 1, turn, watts))
    if not any(row.watts for row in rows):
        raise bad_value(name, "a POWER column (dcgmi dmon -e 155)", "none")
    return rows


def _read_tegrastats(lines: list[tuple[int, str]]) -> list[LogLine]:
    rows: list[LogLine] = []
    stamps: list[str] = []
    for number, text in lines:
        rails = _RAIL.findall(text)
        if not rails:
            continue
        match = _TEGRA_STAMP.match(text)
        stamps.append(match[1] if match else "")
        rows.append(LogLine(number, len(rows), {rail: 1e-3 * float(mw) for rail, mw in rails}))
    if not any(stamps):  # boards before JetPack 5 write none
        return rows
    return [
        LogLine(row.line, row.turn, row.watts, stamp)
        for row, stamp in zip(rows, stamps, strict=True)
    ]


def _read_ipmi(lines: list[tuple[int, str]], name: str) -> list[LogLine]:
    """Read blocks of ``ipmitool dcmi power reading``, which have the time after the watts."""
    rows: list[LogLine] = []
    for number, text in lines:
        if match := _IPMI_WATTS.match(text):
            watts = read_watts(match[1], 1.0, f"{name}: line {number}")
            rows.append(LogLine(number, len(rows), {"power reading": watts}))
        elif rows and (match := _IPMI_STAMP.match(text)):
            last = rows[-1]
            rows[-1] = LogLine(last.line, last.turn, last.watts, match[1])
    if any(row.stamp for row in rows):
        return [LogLine(row.line, row.turn, row.watts, row.stamp or "") for row in rows]
    return rows


Cells = list[tuple[int, list[str]]]


def _split_table(lines: list[tuple[int, str]], name: str) -> tuple[str, list[str], Cells]:
    """Return the form of a table, its headings and the cells of each line."""
    if not lines:
        raise bad_value(name, WANTED, "nothing")
    first = lines[0][1]
    words = first.replace("#", " ").split()
    if first.lstrip().startswith("#") and "pwr" in words:
        cells = [
            (number, text.split())
            for number, text in lines[1:]
            if not text.lstrip().startswith("#")
        ]
        return "nvidia-smi dmon", words, cells
    delimiter = max(",;\t", key=first.count)
    if delimiter not in first and {"GPU", "POWER"} <= set(words):
        table = [(number, re.split(r"\s{2,}", text.strip())) for number, text in lines]
        return "amd-smi", table[0][1], table[1:]
    rows = csv.reader((text for _, text in lines), delimiter=delimiter, skipinitialspace=True)
    try:
        table = [(number, cells) for (number, _), cells in zip(lines, rows, strict=True)]
    except (csv.Error, ValueError) as error:
        raise BadInput(f"{name}: cannot be read as a table ({clip_text(error)}).") from None
    head = [cell.strip() for cell in table[0][1]]
    form = "jtop" if "Power TOT" in head else "CSV"
    if any(column.startswith("power.draw") for column in head):
        form = "nvidia-smi"
    elif {"gpu", "socket_power"} <= set(head) or {"gpu", "power_usage"} <= set(head):
        form = "amd-smi"
    elif head[0] == "device" and any("Package Power" in column for column in head):
        form = "rocm-smi"
    return form, head, table[1:]


def _read_table(form: str, head: list[str], cells: Cells, name: str) -> tuple[list[LogLine], str]:
    """Return the lines of a table, and the heading of its times."""
    quantities = {
        place: unit for place, column in enumerate(head) if (unit := _read_unit(column, form, name))
    }
    by_quantity = {
        q: [p for p in quantities if quantities[p][0] == q] for q in ("power", "voltage", "current")
    }
    pairs = _pair_volts_and_amperes(by_quantity, head, name) if not by_quantity["power"] else []
    if not by_quantity["power"] and not pairs:
        raise bad_value(name, WANTED, clip_text(", ".join(head) or "nothing", 200))
    if any(_CELL.fullmatch(column.strip()) and column.strip() for column in head):
        raise bad_value(
            name, "headings in the first line", clip_text(head[0]), "Log without noheader."
        )
    clocks = _find_time_columns(head)
    names_cards = form not in ("CSV", "jtop")  # where a column named GPU may hold its utilisation
    cards = [
        p
        for p, c in enumerate(head)
        if _CARD.fullmatch(c.strip()) or (names_cards and c.lower() == "gpu")
    ]
    card = cards[0] if cards else None
    rows: list[LogLine] = []
    turns: dict[str, int] = {}
    for number, values in cells:
        if [value.strip() for value in values] == head:
            continue  # a tool in a loop writes its headings again
        if len(values) != len(head):
            raise bad_value(
                f"{name}: line {number}", f"{len(head)} values", len(values), "Remove the line."
            )
        where = f"{name}: line {number}"
        number_of = {p: read_watts(values[p], scale, where) for p, (_, scale) in quantities.items()}
        watts = {head[p]: number_of[p] for p in by_quantity["power"]}
        watts |= {f"{head[v]} · {head[c]}": number_of[v] * number_of[c] for v, c in pairs}
        entity = "" if card is None else values[card].strip()
        if card is not None:
            label = f"GPU {entity}" if form != "CSV" else entity
            watts = {
                label if len(watts) == 1 else f"{label} {column}": w for column, w in watts.items()
            }
        turn = turns.get(entity, 0)
        turns[entity] = turn + 1
        stamp = " ".join(values[place].strip() for place in clocks) if clocks else None
        rows.append(LogLine(number, turn, watts, stamp))
    return rows, head[clocks[0]] if len(clocks) == 1 else ""


def _pair_volts_and_amperes(
    by_quantity: Mapping[str, list[int]], head: list[str], name: str
) -> list[tuple[int, int]]:
    volts = by_quantity["voltage"]
    amperes = by_quantity["current"]
    if len(volts) != len(amperes):
        raise bad_value(name, "a current for every voltage", clip_text(", ".join(head), 200))
    return list(zip(volts, amperes, strict=True))


def _find_time_columns(head: list[str]) -> list[int]:
    """Return the column that holds times, or those of the date and the time of day."""
    clocks = [place for place, column in enumerate(head) if _TIME.match(column.strip())]
    names = [head[place].strip().lower() for place in clocks]
    if len(clocks) > 1 and names[0] == "date" and names[1].startswith("time"):
        return clocks[:2]
    return clocks[:1]


def _read_unit(column: str, form: str, name: str) -> tuple[str, float] | None:
    """Return quantity and factor to its SI unit.

    None where a column holds neither watts nor volts nor amperes.
    """
    heading = column.strip()
    if _NO_DRAW.search(heading):
        return None
    sensor = re.fullmatch(r"(in|curr)\d+_input", heading)
    if sensor:
        return ("voltage" if sensor[1] == "in" else "current", 1e-3)
    if form in ("amd-smi", "nvidia-smi dmon"):
        return ("power", 1.0) if heading.lower() in _WATT_COLUMNS else None
    unit = _UNIT.search(heading)
    if unit is None:
        return ("power", 1e-3) if form == "jtop" and heading.startswith("Power ") else None
    if unit[1] == "MW":
        raise bad_value(
            f"{name}: column {heading!r}", "mW, W or kW", "MW", "Rename the heading: milli or mega?"
        )
    word = unit[1].lower().replace("milli", "m").replace("kilo", "k")
    return _UNITS[re.sub(r"watts?$", "w", word)]


def read_watts(text: str, scale: float, where: str) -> float:
    """Return a cell as a number in its SI unit; a unit in the cell counts before that of the
    heading.

    >>> read_watts("250.5 W", 1e-3, "log"), read_watts("1500", 1e-3, "log")
    (250.5, 1.5)
    """
    cell = text.strip()
    if _ABSENT.fullmatch(cell):
        return float("nan")
    match = _CELL.fullmatch(cell)
    if match is None:
        raise bad_value(where, "a number", cell, "Remove the line, or mend it.")
    return float(match[1]) * (_CELL_UNITS[match[2]] if match[2] else scale)


def _make_rails(
    rows: Sequence[LogLine],
    form: str,
    interval_s: float | None,
    name: str,
    heading: str,
    time_format: str,
    tool_format: str,
) -> dict[str, RailReadings]:
    """Give every line its time, and return the readings of each rail."""
    have_stamps = any(row.stamp is not None for row in rows)
    times: StampTimes | None = None
    if have_stamps and interval_s is None:
        stamps = [Stamp(row.line, row.stamp or "") for row in rows]
        times = read_stamps(stamps, name, heading, time_format, tool_format)
    elif interval_s is None:
        raise BadInput(f"{name}: its lines have no time. {WHAT_TO_DO}")
    is_gpu = form in ("DCGM", "nvidia-smi", "nvidia-smi dmon", "amd-smi", "rocm-smi")
    rails: dict[str, RailReadings] = {}
    for rail in dict.fromkeys(rail for row in rows for rail in row.watts):
        places = [place for place, row in enumerate(rows) if rail in row.watts]
        lines = tuple(rows[place].line for place in places)
        flags: tuple[str, ...] = ()
        if times is None:
            assert interval_s is not None
            time_s = np.array([rows[place].turn * interval_s for place in places])
            if have_stamps:
                flags = _compare_interval(
                    [rows[place] for place in places], interval_s, heading, time_format
                )
        else:
            time_s, flags = _check_times(times, places, lines, name)
        watts = np.array([rows[place].watts[rail] for place in places])
        rails[rail] = RailReadings(time_s, watts, lines, flags, MOST_GPU_W if is_gpu else MOST_W)
    return rails


def _compare_interval(
    rows: Sequence[LogLine], interval_s: float, heading: str, time_format: str
) -> tuple[str, ...]:
    """Flag an interval that the times in the log contradict, where these can be read."""
    stamps = [Stamp(row.line, row.stamp or "") for row in rows]
    try:
        times = read_stamps(stamps, "log", heading, time_format)
    except BadInput:
        return ()
    steps_s = np.diff(times.time_s)
    usual_s = (
        float(np.mean(steps_s) if times.are_whole else np.median(steps_s))
        if len(steps_s)
        else interval_s
    )
    if abs(usual_s - interval_s) <= DOUBTFUL_SHARE * interval_s or (
        times.are_whole and len(steps_s) < 20
    ):
        return ()
    return (
        f"the log's own times are {usual_s:.6g} s apart, not the {interval_s:.6g} s of --interval",
    )


def _check_times(
    times: StampTimes, places: list[int], lines: tuple[int, ...], name: str
) -> tuple[Array, tuple[str, ...]]:
    """Return the times of one rail with the reasons to doubt them.

    Times that run backwards are refused.
    """
    time_s = times.time_s[places]
    check_rising(time_s, lines, name)
    steps_s = np.diff(time_s)
    if times.are_whole and len(time_s) > 2 and np.ptp(steps_s) > 0.0:
        placed_s, doubt = place_whole_seconds(time_s)
        if doubt <= DOUBTFUL_SHARE:
            return placed_s, ()
        if np.isfinite(doubt):
            told = f"whole seconds leave the time open by {100 * doubt:.0f} %. {WHAT_TO_DO}"
            return placed_s, (told,)
    repeated = np.flatnonzero(steps_s == 0.0)
    if len(repeated):
        first = int(repeated[0])
        pair = f"{lines[first]} and {lines[first + 1]}"
        return time_s, (f"{len(repeated)} times stand twice, the first in lines {pair}",)
    return time_s, ()
