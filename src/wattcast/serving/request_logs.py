"""Find arrival, prompt and output in request logs of others: by the names of columns, in any table.

Names are compared in small letters, without their unit and without a plural's s: ``Request Time
(ms)``, ``request_time_ms`` and ``request_times`` are one name. The unit scales the times.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from wattcast.core import bad_value, clip_text
from wattcast.core.strict_files import decode_json

Row = Sequence[str]

_ARRIVALS = (
    *("arrival_time", "arrival", "arrived_at", "request_time", "request_start_time"),
    *("start_time", "submit_time", "submitted_at", "send_time", "timestamp", "time", "ts"),
)
_PROMPTS = (
    *("prompt_token", "input_token", "num_prompt_token", "num_input_token", "context_token"),
    *("num_prefill_token", "request_token", "prompt_len", "input_len", "input_length"),
    *("prompt_length", "context_length", "prompt_size", "input_size", "isl"),
)
_OUTPUTS = (
    *("output_token", "generated_token", "completion_token", "num_output_token"),
    *("num_generated_token", "num_completion_token", "num_decode_token", "response_token"),
    *("decode_token", "output_len", "output_length", "response_length", "response_len"),
    *("generation_length", "output_size", "osl"),
)
_SECONDS = {
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "ms": 1e-3,
    "msec": 1e-3,
    "millisecond": 1e-3,
    "us": 1e-6,
    "microsecond": 1e-6,
    "ns": 1e-9,
    "nanosecond": 1e-9,
}
_BRACKETS = re.compile(r"[(\[]\s*(\w+)\s*[)\]]\s*$")
_DELIMITERS = ",;\t"


@dataclass(frozen=True)
class LogColumns:
    """Where a log has arrival, prompt and output, and what its times are counted in."""

    places: tuple[int, int, int]
    unit_s: float | None  # None: not named


def split_table(text: str, where: str) -> list[list[str]]:
    """Return the rows of a table, whose fields a comma, a semicolon or a tab parts.

    >>> split_table("time;prompt_tokens\\n1;20", "log.csv")
    [['time', 'prompt_tokens'], ['1', '20']]
    """
    first_line = text.lstrip().partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first_line.count)
    try:
        return list(csv.reader(io.StringIO(text, newline=None), delimiter=delimiter))
    except csv.Error:  # a field without an end
        raise bad_value(where, "a table with a header and commas", clip_text(text)) from None


def tabulate_json(data: bytes, where: str) -> list[list[str]]:
    """Return a header and rows: of a list of objects, or of one object whose lists are columns."""
    plain: Any = decode_json(data, object, where)
    if isinstance(plain, list):
        return tabulate_objects(plain, where)
    columns = {}
    if isinstance(plain, dict):
        columns = {name: values for name, values in plain.items() if isinstance(values, list)}
    found = find_log_columns(list(columns))
    if found is None:
        raise bad_value(where, _describe_wanted(list(columns)), clip_text(data.decode()))
    names = [list(columns)[place] for place in found.places]
    lengths = [len(columns[name]) for name in names]
    if len(set(lengths)) > 1:
        raise bad_value(where, f"as many values of each of {', '.join(names)}", lengths)
    rows = zip(*(columns[name] for name in names), strict=True)
    return [names, *([_write_field(value) for value in row] for row in rows)]


def tabulate_objects(objects: Sequence[Any], where: str) -> list[list[str]]:
    """Return a header and rows of objects that have the fields of the first one."""
    if not objects:
        raise bad_value(where, "at least one request", "none")
    for number, one in enumerate(objects, start=1):
        if not isinstance(one, dict):
            raise bad_value(f"{where}: request {number}", "a JSON object", clip_text(str(one)))
    header = list(objects[0])
    rows = [[_write_field(one.get(name)) for name in header] for one in objects]
    return [header, *rows]


def _write_field(value: Any) -> str:
    """Return a value of JSON as the text that a table would hold; nothing stays empty."""
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()


def find_log_columns(header: Row) -> LogColumns | None:
    """Return the columns of arrival, prompt and output, or None where one is missing."""
    folded = [_fold_name(column) for column in header]
    names = [name for name, _ in folded]
    places = []
    for usual in (_ARRIVALS, _PROMPTS, _OUTPUTS):
        place = next((names.index(name) for name in usual if name in names), None)
        if place is None:
            return None
        places.append(place)
    arrival, prompt, output = places
    return LogColumns((arrival, prompt, output), folded[arrival][1])


def refuse_header(header: Row, where: str) -> Exception:
    """Return the error of a table in which a column is missing."""
    return bad_value(where, _describe_wanted(header), clip_text(",".join(header)))


def _describe_wanted(header: Row) -> str:
    names = [_fold_name(column)[0] for column in header]
    wanted = (
        ("arrival", "arrival_s", _ARRIVALS),
        ("prompt tokens", "prompt_tokens", _PROMPTS),
        ("output tokens", "output_tokens", _OUTPUTS),
    )
    missing = [
        f"{what} (such as {like})" for what, like, usual in wanted if not set(usual) & set(names)
    ]
    return f"a header of a known form, also with a column of {' and of '.join(missing)}"


def _fold_name(column: str) -> tuple[str, float | None]:
    """Return a name without its unit, and the seconds of the unit.

    >>> _fold_name("Arrival Time (ms)"), _fold_name("start_times"), _fold_name("arrival_s")
    (('arrival_time', 0.001), ('start_time', None), ('arrival', 1.0))
    """
    name = column.strip().lower()
    unit_s = None
    bracket = _BRACKETS.search(name)
    if bracket:
        unit_s = _SECONDS.get(_fold_plural(bracket[1]))
        name = name[: bracket.start()]
    name = re.sub(r"[\s.\-/]+", "_", name.strip())
    stem, _, last = name.rpartition("_")
    if stem and _fold_plural(last) in _SECONDS:
        unit_s = _SECONDS[_fold_plural(last)]
        name = stem
    return _fold_plural(name), unit_s


def _fold_plural(name: str) -> str:
    is_plural = len(name) > 2 and name.endswith("s") and not name.endswith("ss")
    return name[:-1] if is_plural else name
