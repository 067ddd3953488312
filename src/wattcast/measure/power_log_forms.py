"""Read the lines of power logs in the forms that other tools write.

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
"""

from __future__ import annotations

import csv
import re
from collections.abc import (
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace

from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
)

EXPORTED_NAMES = {"DCGM_FI_DEV_POWER_USAGE": "POWER"}
EXPECTED_LOG = (
    "a log of nvidia-smi, dcgmi dmon, amd-smi, rocm-smi, tegrastats or ipmitool, "
    "or a CSV with units in its headings, such as Power (W)"
)
GPU_FORMS = ("DCGM", "nvidia-smi", "nvidia-smi dmon", "amd-smi", "rocm-smi")
_LONGEST_QUOTE = 200  # characters of a log in an error

# now, mean, and in some logs a third value
_RAIL = re.compile(r"\b([A-Z]\w*) (\d+)(?:mW)?/\d+(?:mW)?(?:/\d+(?:mW)?)?(?=\s|$)")
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
_HWMON = re.compile(r"(in|curr)\d+_input")
# Columns of watts in the tables of amd-smi and nvidia-smi dmon.
_WATT_COLUMNS = ("socket_power", "power_usage", "power", "pwr", "avgpwr")
# Power that a card may draw, not what it drew.
_NO_DRAW = re.compile(r"limit|\bcap\b|max_power|pwrcap", re.IGNORECASE)
_TIME = re.compile(r"time|date|uptime|t(\b|_)", re.IGNORECASE)
_CARD = re.compile(
    r"(gpu_?)?(index|idx|uuid|id)|device|card|(gpu_)?serial|(pci|gpu)[._]bus_id", re.IGNORECASE
)
_CELL = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(kW|mW|W)?")
_CELL_UNITS = {
    "kW": 1e3,
    "W": 1.0,
    "mW": 1e-3,
}
_ABSENT = re.compile(
    r"|-+|nan|n/?a|none|err!|\[?(not supported|n/a|unknown error|gpu is lost)\]?", re.IGNORECASE
)

NumberedLine = tuple[int, str]  # counted from 1
Rounds = list[dict[str, dict[str, float]]]  # values by GPU and column


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
class LogLines:
    """The lines of a log, and how it writes its times."""

    form: str
    rows: Sequence[LogLine]
    heading: str = ""  # of the column of times
    tool_format: str = ""  # pattern in which the tool writes times


def read_log_lines(lines: list[NumberedLine], name: str) -> LogLines:
    """Find out the form of a log and read its lines; ``name`` is that of the file, in errors."""
    texts = [text for _, text in lines]
    rounds = read_dcgm_rounds(texts)
    if rounds:
        return LogLines("DCGM", _read_dcgm(rounds, name))
    if _is_tegrastats(texts):
        return LogLines("tegrastats", _read_tegrastats(lines), tool_format=_TEGRA_FORMAT)
    if any(_IPMI_WATTS.match(text) for text in texts):
        return LogLines("IPMI", _read_ipmi(lines, name))
    table = _split_table(lines, name)
    return _read_table(table, name)


def read_dcgm_rounds(lines: Iterable[str], exported: Mapping[str, str] = EXPORTED_NAMES) -> Rounds:
    """Return what each round of ``dcgmi dmon``, or each scrape of its exporter, says of every GPU,
    by column.

    ``exported`` has the column of each field that the exporter names. What is no number, such as
    N/A, is NaN.
    """
    head: list[str] = []
    rounds: Rounds = []
    for line in lines:
        words = line.replace("# Entity", "#Entity").split()  # as DCGM 3 writes it
        scraped = _SCRAPED.match(line)
        if words[0] == "#Entity":
            head = words[1:]
        elif scraped is not None and scraped[1] in exported:
            column = exported[scraped[1]]
            _add_to_round(rounds, f"GPU {scraped[2]}", {column: _read_plain(scraped[3])})
        elif head and words[0] in ("GPU", "GPU-I") and len(words) == len(head) + 2:
            values = map(_read_plain, words[2:])
            entity = " ".join(words[:2])
            _add_to_round(rounds, entity, dict(zip(head, values, strict=True)))
    return rounds


def _add_to_round(
    rounds: Rounds,
    entity: str,
    values: dict[str, float],
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


def _read_dcgm(rounds: Rounds, name: str) -> list[LogLine]:
    rows = []
    for turn, values_of_gpus in enumerate(rounds):
        watts = {}
        for entity, values in values_of_gpus.items():
            if "POWER" in values:
                watts[entity] = values["POWER"]
        rows.append(LogLine(turn + 1, turn, watts))
    if not any(row.watts for row in rows):
        raise bad_value(name, "a POWER column (dcgmi dmon -e 155)", "none")
    return rows


def _is_tegrastats(texts: list[str]) -> bool:
    """Tell whether one of the first lines names memory and the power of a rail."""
    return any(" RAM " in f" {text}" and _RAIL.search(text) for text in texts[:20])


def _read_tegrastats(lines: list[NumberedLine]) -> list[LogLine]:
    rows: list[LogLine] = []
    for number, text in lines:
        rails = _RAIL.findall(text)
        if not rails:
            continue
        stamp = _TEGRA_STAMP.match(text)
        watts = {rail: 1e-3 * float(milliwatts) for rail, milliwatts in rails}
        rows.append(LogLine(number, len(rows), watts, stamp[1] if stamp else None))
    return _fill_stamps(rows)  # boards before JetPack 5 write none


def _read_ipmi(lines: list[NumberedLine], name: str) -> list[LogLine]:
    """Read blocks of ``ipmitool dcmi power reading``, which have the time after the watts."""
    rows: list[LogLine] = []
    for number, text in lines:
        reading = _IPMI_WATTS.match(text)
        stamp = _IPMI_STAMP.match(text)
        if reading is not None:
            watts = read_watts(reading[1], 1.0, f"{name}: line {number}")
            rows.append(LogLine(number, len(rows), {"power reading": watts}))
        elif rows and stamp is not None:
            rows[-1] = replace(rows[-1], stamp=stamp[1])
    return _fill_stamps(rows)


def _fill_stamps(rows: list[LogLine]) -> list[LogLine]:
    """Return rows of which all have a stamp, empty where it is missing, or none has."""
    if not any(row.stamp for row in rows):
        return rows
    return [replace(row, stamp=row.stamp or "") for row in rows]


@dataclass(frozen=True)
class _Table:
    """The cells of a table."""

    form: str
    head: list[str]
    cells: list[tuple[int, list[str]]]  # of each line, with its number


def _split_table(lines: list[NumberedLine], name: str) -> _Table:
    """Return the headings of a table and the cells of each line."""
    if not lines:
        raise bad_value(name, EXPECTED_LOG, "nothing")
    first = lines[0][1]
    words = first.replace("#", " ").split()
    if first.lstrip().startswith("#") and "pwr" in words:
        values = [(number, text) for number, text in lines[1:] if not _is_comment(text)]
        cells = [(number, text.split()) for number, text in values]
        return _Table("nvidia-smi dmon", words, cells)
    delimiter = max(",;\t", key=first.count)
    if delimiter not in first and {"GPU", "POWER"} <= set(words):
        cells = [(number, re.split(r"\s{2,}", text.strip())) for number, text in lines]
        return _Table("amd-smi", cells[0][1], cells[1:])

    texts = [text for _, text in lines]
    reader = csv.reader(texts, delimiter=delimiter, skipinitialspace=True)
    try:
        cells = [(number, row) for (number, _), row in zip(lines, reader, strict=True)]
    except (csv.Error, ValueError) as error:
        raise BadInput(f"{name}: cannot be read as a table ({clip_text(error)}).") from None
    head = [cell.strip() for cell in cells[0][1]]
    return _Table(_name_form(head), head, cells[1:])


def _is_comment(text: str) -> bool:
    return text.lstrip().startswith("#")


def _name_form(head: list[str]) -> str:
    """Return the tool that writes a table with these headings."""
    names = set(head)
    if any(column.startswith("power.draw") for column in head):
        return "nvidia-smi"
    if {"gpu", "socket_power"} <= names or {"gpu", "power_usage"} <= names:
        return "amd-smi"
    if head[0] == "device" and any("Package Power" in column for column in head):
        return "rocm-smi"
    return "jtop" if "Power TOT" in names else "CSV"


@dataclass(frozen=True)
class _Columns:
    """Which columns of a table hold what, by place."""

    form: str
    head: list[str]
    scales: Mapping[int, float]  # of watts, volts and amperes: factors to SI units
    watts: Sequence[int]
    pairs: Sequence[tuple[int, int]]  # of volts and amperes
    clocks: Sequence[int]
    card: int | None

    def read_watts(
        self,
        values: list[str],
        where: str,
    ) -> dict[str, float]:
        """Return the watts of a line by rail."""
        numbers = {}
        for place, scale in self.scales.items():
            numbers[place] = read_watts(values[place], scale, where)
        watts = {self.head[place]: numbers[place] for place in self.watts}
        for volts, amperes in self.pairs:
            name = f"{self.head[volts]} · {self.head[amperes]}"
            watts[name] = numbers[volts] * numbers[amperes]
        if self.card is None:
            return watts

        # Rails of a table with many cards carry the name of their card.
        entity = values[self.card].strip()
        label = entity if self.form == "CSV" else f"GPU {entity}"
        if len(watts) == 1:
            return {label: next(iter(watts.values()))}
        return {f"{label} {column}": power_w for column, power_w in watts.items()}

    def read_stamp(self, values: list[str]) -> str | None:
        """Return the time of a line as it is written; None where the table has no times."""
        if not self.clocks:
            return None
        return " ".join(values[place].strip() for place in self.clocks)


def _read_table(table: _Table, name: str) -> LogLines:
    """Read the lines of a table."""
    columns = _find_columns(table, name)
    head = table.head
    rows: list[LogLine] = []
    turns: dict[str, int] = {}
    for number, values in table.cells:
        if [value.strip() for value in values] == head:
            continue  # a tool in a loop writes its headings again
        where = f"{name}: line {number}"
        if len(values) != len(head):
            raise bad_value(where, f"{len(head)} values", len(values), "Remove the line.")
        watts = columns.read_watts(values, where)
        entity = "" if columns.card is None else values[columns.card].strip()
        turn = turns.get(entity, 0)
        turns[entity] = turn + 1
        rows.append(LogLine(number, turn, watts, columns.read_stamp(values)))
    heading = head[columns.clocks[0]] if len(columns.clocks) == 1 else ""
    return LogLines(table.form, rows, heading)


def _find_columns(table: _Table, name: str) -> _Columns:
    """Find the columns of watts, volts, amperes, times and cards, or raise an error."""
    head = table.head
    scales: dict[int, float] = {}
    places: dict[str, list[int]] = {
        "power": [],
        "voltage": [],
        "current": [],
    }
    for place, column in enumerate(head):
        unit = _read_unit(column, table.form, name)
        if unit is not None:
            quantity, scales[place] = unit
            places[quantity].append(place)
    pairs: list[tuple[int, int]] = []
    if not places["power"]:
        pairs = _pair_volts_and_amperes(places["voltage"], places["current"], head, name)
    if not places["power"] and not pairs:
        headings = clip_text(", ".join(head) or "nothing", _LONGEST_QUOTE)
        raise bad_value(name, EXPECTED_LOG, headings)
    if any(column.strip() and _CELL.fullmatch(column.strip()) for column in head):
        headings = clip_text(head[0])
        raise bad_value(name, "headings in the first line", headings, "Log without noheader.")
    return _Columns(
        table.form,
        head,
        scales,
        places["power"],
        pairs,
        _find_time_columns(head),
        _find_card_column(table),
    )


def _pair_volts_and_amperes(
    volts: list[int],
    amperes: list[int],
    head: list[str],
    name: str,
) -> list[tuple[int, int]]:
    if len(volts) != len(amperes):
        headings = clip_text(", ".join(head), _LONGEST_QUOTE)
        raise bad_value(name, "a current for every voltage", headings)
    return list(zip(volts, amperes, strict=True))


def _find_time_columns(head: list[str]) -> list[int]:
    """Return the column that holds times, or those of the date and the time of day."""
    clocks = [place for place, column in enumerate(head) if _TIME.match(column.strip())]
    names = [head[place].strip().lower() for place in clocks]
    if len(clocks) > 1 and names[0] == "date" and names[1].startswith("time"):
        return clocks[:2]
    return clocks[:1]


def _find_card_column(table: _Table) -> int | None:
    """Return the first column that names cards; None where there is none.

    Only in the table of a tool is that a column called GPU: elsewhere it may hold utilisation.
    """
    is_of_tool = table.form not in ("CSV", "jtop")
    for place, column in enumerate(table.head):
        if _CARD.fullmatch(column.strip()) or (is_of_tool and column.lower() == "gpu"):
            return place
    return None


def _read_unit(
    column: str,
    form: str,
    name: str,
) -> tuple[str, float] | None:
    """Return quantity and factor to its SI unit.

    None where a column holds neither watts nor volts nor amperes.
    """
    heading = column.strip()
    if _NO_DRAW.search(heading):
        return None
    sensor = _HWMON.fullmatch(heading)
    if sensor is not None:
        return ("voltage" if sensor[1] == "in" else "current", 1e-3)
    if form in ("amd-smi", "nvidia-smi dmon"):
        return ("power", 1.0) if heading.lower() in _WATT_COLUMNS else None
    unit = _UNIT.search(heading)
    if unit is None:
        is_jtop = form == "jtop" and heading.startswith("Power ")
        return ("power", 1e-3) if is_jtop else None
    if unit[1] == "MW":
        where = f"{name}: column {heading!r}"
        raise bad_value(where, "mW, W or kW", "MW", "Rename the heading: milli or mega?")
    word = unit[1].lower().replace("milli", "m").replace("kilo", "k")
    return _UNITS[re.sub(r"watts?$", "w", word)]


def read_watts(
    text: str,
    scale: float,
    where: str,
) -> float:
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
    factor = _CELL_UNITS[match[2]] if match[2] else scale
    return float(match[1]) * factor
