"""Read traces of requests from files.

Files are CSV or JSON Lines with ``arrival_s, prompt_tokens, output_tokens`` and optionally
``prefix_id``; the public traces of Azure (``TIMESTAMP, ContextTokens, GeneratedTokens``) and
BurstGPT (``Timestamp, Model, Request tokens, Response tokens``) are recognised by their header, and
Mooncake's JSON Lines (``timestamp`` in milliseconds, ``input_length``, ``output_length``,
``hash_ids``: equal names of blocks of 512 tokens are equal beginnings) by their first line. Logs of
others are read where their columns have one of the usual names (``request_logs``), be they tables
with commas, semicolons or tabs, JSON Lines, a list of JSON objects, or one object of columns such
as vLLM's benchmark saves.

Files of ours may say who asked: ``user``, ``pause_s`` (after the answer before) and, in
conversations, ``turn``. Requests then wait for answers as they did, whenever these come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from wattcast.core import (
    BadInput,
    bad_value,
    clip_text,
)
from wattcast.core.arrays import Array
from wattcast.core.strict_files import decode_json, read_bytes, read_number
from wattcast.serving.arrivals import (
    NO_PREFIX,
    Counts,
    Trace,
    make_trace,
)
from wattcast.serving.request_logs import (
    find_log_columns,
    refuse_header,
    split_table,
    tabulate_json,
    tabulate_objects,
)

MOST_TRACE_BYTE = 2**30
# Numbers above are times since 1970 in nanoseconds, microseconds, milliseconds.
_EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))

# The columns of arrival, prompt and output in each form of table.
_COLUMNS_OF_FORM = {
    "wattcast": ("arrival_s", "prompt_tokens", "output_tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}


def read_trace(path: str | Path) -> Trace:
    """Read a trace file: CSV or JSON Lines of ours, or the public CSV of Azure or BurstGPT."""
    path = Path(path)
    return parse_trace(read_bytes(path, MOST_TRACE_BYTE), path.name)


def parse_trace(data: bytes, name: str) -> Trace:
    """Read a trace from the bytes of a file called ``name``."""
    if name.endswith((".jsonl", ".ndjson")):
        return _read_json_lines(data, name)
    text = data.decode("utf-8-sig", "replace")
    if text.lstrip()[:1] in ("{", "["):
        rows = tabulate_json(text.encode(), name)
    else:
        rows = split_table(text, name)
    return _read_rows(rows, name)


def _read_rows(rows: list[list[str]], name: str) -> Trace:
    """Read rows, of which the first names the columns."""
    header = [column.strip() for column in rows.pop(0)] if rows else []
    for form, columns in _COLUMNS_OF_FORM.items():
        if not set(columns) <= set(header):
            continue
        places = [header.index(column) for column in columns]
        if form == "wattcast" and "prefix_id" in header:
            places.append(header.index("prefix_id"))
        trace = _read_table(rows, places, name, form)
        return _read_users(trace, rows, header, name) if form == "wattcast" else trace
    log_columns = find_log_columns(header)
    if log_columns is None:
        raise refuse_header(header, name)
    return _read_table(rows, list(log_columns.places), name, "log", log_columns.unit_s)


def _read_table(
    rows: Sequence[Sequence[str]],
    places: list[int],
    where: str,
    form: str,
    unit_s: float | None = None,
) -> Trace:
    """Read a table, whose ``places`` are the columns of arrival, prompt, output and prefix."""
    filled_rows = [row for row in rows if row]
    for number, row in enumerate(filled_rows, start=2):
        if len(row) <= max(places):
            raise bad_value(f"{where}: line {number}", "as many fields as the header", len(row))
    if not filled_rows:
        raise bad_value(where, "at least one request", "none")
    columns = [[row[place].strip() for row in filled_rows] for place in places]
    if form == "azure":
        arrival_s = _read_timestamps(columns[0], where)
    elif form == "log":
        arrival_s = _read_log_times(columns[0], where, unit_s)
    else:
        arrival_s = _read_numbers(columns[0], where, "arrival")
    prompts = _read_numbers(columns[1], where, "prompt")
    outputs = _read_numbers(columns[2], where, "output")
    prefixes = _number_prefixes(columns[3]) if len(columns) > 3 else None
    if form == "wattcast":
        return make_trace(
            arrival_s,
            prompts,
            outputs,
            prefixes,
            where,
        )

    # public traces and logs hold failed requests with no answer
    answered = (prompts >= 1) & (outputs >= 1)
    if not answered.any():
        raise bad_value(where, "at least one request with an answer", "none")
    answered_s = arrival_s[answered]
    if form != "log":  # which start at any hour
        answered_s = answered_s - answered_s.min()
    return make_trace(answered_s, prompts[answered], outputs[answered], name=where)


def _read_users(
    trace: Trace,
    rows: Sequence[Sequence[str]],
    header: list[str],
    where: str,
) -> Trace:
    """Add who asked and how long after the answer before, where a table has both columns."""
    if not {"user", "pause_s"} <= set(header):
        return trace
    filled_rows = [row for row in rows if row]
    columns = {}
    for name in ("arrival_s", "user", "pause_s", *({"turn"} & set(header))):
        place = header.index(name)
        if any(len(row) <= place for row in filled_rows):
            raise bad_value(where, f"a value of {name} in every line", "too few fields")
        columns[name] = [row[place].strip() for row in filled_rows]
    turns = _read_numbers(columns["turn"], where, "turn") if "turn" in columns else None
    return _add_users(
        trace,
        _read_numbers(columns["arrival_s"], where, "arrival"),
        columns["user"],
        _read_numbers(columns["pause_s"], where, "pause_s"),
        turns,
    )


def _add_users(
    trace: Trace,
    arrival_s: Array,
    users: Sequence[str | int],
    pause_s: Array,
    turns: Array | None,
) -> Trace:
    """Return a trace with who sent its requests; columns are in the order of the file.

    A turn of 0 begins a conversation. Without turns each request is one of its own.
    """
    order = np.argsort(arrival_s, kind="stable")
    numbers: dict[str, int] = {}
    user = np.array([numbers.setdefault(str(name), len(numbers)) for name in users])[order]
    turn = np.zeros(len(order)) if turns is None else turns[order]
    return replace(
        trace,
        user=user,
        pause_s=pause_s[order],
        turn=turn.astype(np.int64),
    )


def _read_numbers(
    texts: Sequence[str],
    where: str,
    column: str,
) -> Array:
    try:
        values = np.array(texts, dtype=np.float64)
    except ValueError:
        values = np.array([np.nan])
    if not np.isfinite(values).all():  # find the first that is wrong, which raises an error
        for number, text in enumerate(texts, start=2):
            read_number(text, f"{where}: line {number}: {column}")
    return values


def _read_timestamps(texts: Sequence[str], where: str) -> Array:
    """Return seconds since the first moment of the trace.

    A zone at the end is dropped, since all rows share it.
    """
    local_times = [text.strip().replace("Z", "").partition("+")[0] for text in texts]
    try:
        times = np.array(local_times, dtype="datetime64[ns]")
    except ValueError:
        expected = "times such as 2023-11-16 18:15:46.680590"
        raise bad_value(where, expected, clip_text(texts[0])) from None
    if np.isnat(times).any():
        raise bad_value(where, "a time in every row", "an empty one")
    return np.asarray((times - times.min()) / np.timedelta64(1, "ns") * 1e-9)


def _read_log_times(
    texts: Sequence[str],
    where: str,
    unit_s: float | None,
) -> Array:
    """Return seconds since the log's clock began.

    Dates, times since 1970 and those of a clock that began long before the first request count from
    the first one.
    """
    try:
        times = np.array(texts, dtype=np.float64)
    except ValueError:
        return _read_timestamps(texts, where)
    if not np.isfinite(times).all():
        return _read_numbers(texts, where, "arrival")
    if unit_s is None:
        unit_s = next((scale for above, scale in _EPOCHS if times.min() > above), 1.0)
    seconds = times * unit_s
    first_s = float(seconds.min())
    began_earlier = first_s > float(seconds.max()) - first_s
    return np.asarray(seconds - first_s) if began_earlier else seconds


def _number_prefixes(names: Sequence[str | int | None]) -> Counts:
    """Return a number for each name of a prefix; an empty name and -1 stand for none."""
    numbers: dict[str, int] = {}
    prefixes = []
    for name in names:
        text = "" if name is None else str(name)
        is_none = text in ("", "-1")
        prefixes.append(NO_PREFIX if is_none else numbers.setdefault(text, len(numbers)))
    return np.array(prefixes)


class _TraceLine(msgspec.Struct):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str | int | None = None
    user: str | int | None = None
    pause_s: float | None = None
    turn: int = 0


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_Line = TypeVar("_Line", _TraceLine, _MooncakeLine)


def _read_json_lines(data: bytes, where: str) -> Trace:
    filled = [line for line in enumerate(data.splitlines(), start=1) if line[1].strip()]
    if not filled:
        raise bad_value(where, "at least one request", "none")
    if b'"input_length"' in filled[0][1]:
        return _make_mooncake_trace(_decode_lines(filled, _MooncakeLine, where), where)
    if b'"arrival_s"' not in filled[0][1]:
        return _read_other_lines(filled, where)
    columns = zip(
        *map(msgspec.structs.astuple, _decode_lines(filled, _TraceLine, where)), strict=True
    )
    arrival_s, prompts, outputs, prefixes, users, pauses, turns = columns
    trace = make_trace(
        arrival_s,
        prompts,
        outputs,
        _number_prefixes(prefixes),
        where,
    )
    if None in users or None in pauses:
        return trace
    pause_s = np.array(pauses, dtype=np.float64)
    return _add_users(trace, np.array(arrival_s), users, pause_s, np.array(turns))


def _read_other_lines(filled: list[tuple[int, bytes]], where: str) -> Trace:
    """Read lines whose fields have names of others."""
    objects = []
    for number, line in filled:
        objects.append(decode_json(line, object, f"{where}: line {number}"))
    first = objects[0]
    if isinstance(first, dict) and find_log_columns(list(first)) is None:
        raise refuse_header(list(first), f"{where}: line {filled[0][0]}")
    return _read_rows(tabulate_objects(objects, where), where)


def _decode_lines(
    filled: Sequence[tuple[int, bytes]],
    kind: type[_Line],
    where: str,
) -> list[_Line]:
    """Decode numbered lines of JSON; an error names the line."""
    decoder = msgspec.json.Decoder(kind)
    lines = []
    for number, line in filled:
        try:
            lines.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{where}: line {number}: {clip_text(str(error), 200)}.") from None
    return lines


def _make_mooncake_trace(lines: Sequence[_MooncakeLine], where: str) -> Trace:
    """Return requests with the names of their prompts' blocks, which say what prompts share."""
    in_order = sorted(lines, key=lambda line: line.timestamp)
    trace = make_trace(
        [1e-3 * line.timestamp for line in in_order],
        [line.input_length for line in in_order],
        [line.output_length for line in in_order],
        name=where,
    )
    return replace(trace, hash_ids=tuple(line.hash_ids for line in in_order))
