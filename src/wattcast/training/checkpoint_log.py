"""Read when a training job wrote checkpoints: a table with ``step`` and ``seconds``.

A log of a job knows after how many steps each was written and how long the GPUs waited. Checkpoints
of one job differ by seconds, so that one time for all of them puts later ones at wrong moments."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

from wattcast.core import bad_value, clip_text
from wattcast.core.strict_files import read_bytes, read_number

COLUMNS = ("step", "seconds")


class WrittenCheckpoint(NamedTuple):
    """A checkpoint for which the GPUs waited."""

    step: int  # after which it was written; the first step is 1
    seconds: float


def read_checkpoint_log(path: str | Path | None) -> tuple[WrittenCheckpoint, ...]:
    """Return the checkpoints of a file, in order; none without a file."""
    if path is None:
        return ()
    path = Path(path)
    text = read_bytes(path).decode("utf-8-sig", "replace")
    rows = [row for row in csv.reader(io.StringIO(text, newline=None)) if row]
    header = [column.strip() for column in rows.pop(0)] if rows else []
    if not set(COLUMNS) <= set(header):
        raise bad_value(path.name, f"a header with {' and '.join(COLUMNS)}", clip_text(text))
    places = [header.index(name) for name in COLUMNS]
    checkpoints: list[WrittenCheckpoint] = []
    for number, row in enumerate(rows, start=2):
        where = f"{path.name}: line {number}"
        if len(row) <= max(places):
            raise bad_value(where, "as many fields as the header", len(row))
        step, seconds = (read_number(row[place].strip(), where) for place in places)
        before = checkpoints[-1].step if checkpoints else 0
        if step != int(step) or step <= before:
            raise bad_value(where, f"a step after step {before}", row[places[0]])
        if seconds <= 0.0:
            raise bad_value(where, "seconds above 0", row[places[1]])
        checkpoints.append(WrittenCheckpoint(int(step), seconds))
    if not checkpoints:
        raise bad_value(path.name, "at least one checkpoint", "none")
    return tuple(checkpoints)
