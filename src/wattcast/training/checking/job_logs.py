"""Read the logs of a training job: step times, watts and clocks of its GPUs, tokens.

Files that are understood, several of which may belong to one job:

- ``trainer_state.json`` of transformers;
- histories and system metrics of Weights & Biases, as lines of JSON, a JSON list, or the CSV that
  its page exports;
- metrics of MLflow: the folder of a run or its ``metrics``, a table with ``key`` and ``value``, or
  the answer of its REST interface;
- text that Megatron-LM prints, whose lines have ``elapsed time per iteration``;
- any CSV or lines of JSON with such columns (``log_columns``), like those of Wattcast's callback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, bad_value, clip_text
from wattcast.core.strict_files import decode_json, decode_text, parse_csv, read_bytes
from wattcast.training.checking.log_columns import (
    KNOWN_NAMES,
    LogColumn,
    Quantity,
    is_of_other_loop,
    recognise_column,
)

DAY_HOURS = 24
MOST_FILES = 2000  # of a folder of metrics
MILLISECONDS = 1e11  # a time since 1970 that is larger counts milliseconds
_FORMS = (
    "trainer_state.json, a history or system metrics of W&B (JSON lines or CSV), "
    "MLflow's metrics, Megatron's lines, or a CSV with a heading"
)
_SYSTEM = "system/"  # metrics of MLflow whose steps count its own readings
_PRINTED = re.compile(
    r"iteration\s+(\d+)\s*/\s*\d+\s*\|.*?(elapsed time per iteration \(ms\)): ([\d.]+)"
)
_ELAPSED = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)")

LogRecord = dict[str, float]  # numbers by name of column


@dataclass(frozen=True)
class LogSeries:
    """A quantity over a job, in SI units."""

    values: Array
    steps: Array  # NaN where a line did not say
    times_s: Array  # NaN where a line did not say


@dataclass(frozen=True)
class JobLog:
    """The series of a job, by quantity and GPU (None: of the job)."""

    series: dict[tuple[Quantity, int | None], LogSeries] = field(default_factory=dict)

    def find(self, quantity: Quantity, gpu: int | None = None) -> LogSeries | None:
        """Return a series, or None where no file has it."""
        return self.series.get((quantity, gpu))

    def list_gpus(self, quantity: Quantity) -> list[int]:
        """Return the GPUs that have a quantity."""
        return sorted(gpu for what, gpu in self.series if what is quantity and gpu is not None)


def read_job_logs(paths: Sequence[Path]) -> JobLog:
    """Read the files and folders of one job; those that add nothing are refused."""
    series: dict[tuple[Quantity, int | None], LogSeries] = {}
    for path in paths:
        added = _build_series(_read_records(path))
        if not added:
            expected = f"columns such as {KNOWN_NAMES}"
            raise bad_value(str(path), expected, "none of them")
        for key, one in added.items():
            series.setdefault(key, one)
    return JobLog(series)


def _read_records(path: Path) -> list[LogRecord]:
    """Return the records of a file, or of a folder of MLflow's metrics."""
    if path.is_dir():
        return _read_folder(path)
    data = read_bytes(path)
    where = path.name
    text = decode_text(data, where).strip()
    if not text:
        raise bad_value(where, _FORMS, "an empty file")
    printed = [_PRINTED.search(line) for line in text.splitlines()]
    if any(printed):
        records = [
            {"iteration": float(match[1]), match[2]: float(match[3])} for match in printed if match
        ]
    elif re.match(r"\[\s*[A-Za-z]", text):  # printed lines often begin so
        raise bad_value(where, _FORMS, clip_text(text, 60))
    elif text[0] in "{[":
        records = _take_records(_decode_lines(text, where), where)
    else:
        records = [_to_numbers(row) for row in _widen_rows(parse_csv(data, where))]
    if not any(records):
        raise bad_value(where, _FORMS, clip_text(text, 60))
    return records


def _decode_lines(text: str, where: str) -> list[Any]:
    """Return the value of a JSON file as a list, or those of its lines."""
    lines = text.splitlines()
    if len(lines) > 1 and text[0] == "{" and lines[0].rstrip().endswith("}"):
        values = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                values.append(decode_json(line.encode(), dict, f"{where}, line {number}"))
        return values
    plain = decode_json(text.encode(), Any, where)
    return plain if isinstance(plain, list) else [plain]


def _take_records(values: Sequence[Any], where: str) -> list[LogRecord]:
    """Return the records inside JSON values: those of a Trainer's history, or the values."""
    if len(values) == 1 and isinstance(values[0], dict) and "log_history" in values[0]:
        values = values[0]["log_history"]
    if (
        len(values) == 1
        and isinstance(values[0], dict)
        and isinstance(values[0].get("metrics"), list)
    ):
        values = values[0]["metrics"]
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise bad_value(where, f"objects of a log ({_FORMS})", "other values")
    return [_to_numbers(_flatten(value)) for value in _widen_rows(values)]


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested objects as one, with names joined by dots."""
    flat: dict[str, Any] = {}
    for name, part in value.items():
        if isinstance(part, dict):
            flat |= _flatten(part, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = part
    return flat


def _widen_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a long table (MLflow: ``key``, ``value``) with the key as a column."""
    wide = []
    for row in rows:
        if "key" not in row or "value" not in row:
            wide.append(row)
            continue
        stamps = ["timestamp"]
        if not str(row["key"]).startswith(_SYSTEM) and not is_of_other_loop(str(row["key"])):
            stamps.append("step")
        wide_row: dict[str, Any] = {name: row[name] for name in stamps if name in row}
        wide_row[str(row["key"])] = row["value"]
        wide.append(wide_row)
    return wide


def _read_folder(folder: Path) -> list[LogRecord]:
    """Return the records of MLflow's ``metrics``: a file a metric, ``timestamp value step``.

    Every metric of training says when its steps were done, a loss as well.
    """
    if (folder / "metrics").is_dir():
        folder = folder / "metrics"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files or len(files) > MOST_FILES:
        raise bad_value(str(folder), "the folder metrics of a run of MLflow", f"{len(files)} files")
    records = []
    for path in files:
        name = path.relative_to(folder).as_posix()
        is_of_system = name.startswith(_SYSTEM)
        if is_of_other_loop(name) or (is_of_system and recognise_column(name) is None):
            continue
        for time_ms, value, step in _read_metric(path):
            record = {name: value, "timestamp": time_ms}
            records.append(record if is_of_system else {**record, "step": step})
    return records


def _read_metric(path: Path) -> Iterator[tuple[float, float, float]]:
    """Read the time in ms, the value and the step of each line of a metric's file."""
    text = decode_text(read_bytes(path), str(path))
    for place, line in enumerate(text.splitlines(), 1):
        numbers = [number for word in line.split() if (number := _to_number(word)) is not None]
        if not len(numbers) == len(line.split()) == 3:
            where = f"{path}, line {place}"
            raise bad_value(where, "a time, a value and a step", clip_text(line, 60))
        time_ms, value, step = numbers
        yield time_ms, value, step


def _to_numbers(row: dict[str, Any]) -> LogRecord:
    """Return the cells of a row that are finite numbers."""
    numbers = {name: _to_number(value) for name, value in row.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _to_number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    elapsed = _ELAPSED.fullmatch(value) if isinstance(value, str) else None
    if elapsed is not None:  # h:mm:ss
        days, hours, minutes, seconds = (float(part or 0.0) for part in elapsed.groups())
        return ((days * DAY_HOURS + hours) * 60 + minutes) * 60 + seconds
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _build_series(records: Sequence[LogRecord]) -> dict[tuple[Quantity, int | None], LogSeries]:
    """Return the series of all quantities that records have."""
    columns = _choose_columns(records)
    points: dict[tuple[Quantity, int | None], list[tuple[float, float, float]]] = {}
    for record in records:
        values: dict[tuple[Quantity, int | None], float] = {}
        for name, value in record.items():
            column = columns.get(name)
            if column is not None:
                values.setdefault((column.quantity, column.gpu), value * column.factor)
        step = values.get((Quantity.STEP, None), math.nan)
        time_s = _find_time(values)
        for key, value in values.items():
            if key[0] not in (Quantity.TIME, Quantity.RUNTIME):
                points.setdefault(key, []).append((value, step, time_s))
    return {key: _make_series(key[0], rows) for key, rows in points.items()}


def _choose_columns(records: Iterable[LogRecord]) -> dict[str, LogColumn]:
    """Return the columns to read: of each quantity those of the lowest rank in the whole log."""
    names = dict.fromkeys(name for record in records for name in record)
    columns: dict[str, LogColumn] = {}
    least_rank: dict[tuple[Quantity, int | None], int] = {}
    for name in names:
        column = recognise_column(name)
        if column is None:
            continue
        columns[name] = column
        key = (column.quantity, column.gpu)
        least_rank[key] = min(column.rank, least_rank.get(key, column.rank))
    return {
        name: column
        for name, column in columns.items()
        if column.rank == least_rank[column.quantity, column.gpu]
    }


def _find_time(values: Mapping[tuple[Quantity, int | None], float]) -> float:
    """Return the time of a record in seconds; runtimes count from the begin of a job."""
    if (Quantity.TIME, None) in values:
        time_s = values[Quantity.TIME, None]
        return time_s / 1e3 if time_s > MILLISECONDS else time_s
    return values.get((Quantity.RUNTIME, None), math.nan)


_POSITIVE = (
    Quantity.STEP_TIME,
    Quantity.STEP_RATE,
    Quantity.SAMPLE_RATE,
    Quantity.TRAIN_TIME,
    Quantity.POWER,
    Quantity.TOTAL_POWER,
    Quantity.CLOCK,
    Quantity.LIMIT,
)


def _make_series(quantity: Quantity, rows: list[tuple[float, float, float]]) -> LogSeries:
    """Return points as a series, in the order of their times; refuse what cannot be."""
    table = np.array(rows)
    least = float(table[:, 0].min())
    if least < 0.0 and quantity in _POSITIVE:
        raise BadInput(f"a log says {quantity.replace('_', ' ')} {least:g}: it cannot be negative")
    if not np.isnan(table[:, 2]).any():
        table = table[np.argsort(table[:, 2], kind="stable")]
    return LogSeries(table[:, 0], table[:, 1], table[:, 2])
