"""Read and write measurements of serving engines: rows of steps and runs, requests, and steps of
traffic.

Host times are fitted to these tables (``lab.fit.engine_host_times``), and `lab validate` compares
predictions with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from wattcast.core import BadInput, bad_value
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import (
    STEPS_FILE,
    database_folder,
    read_table,
    write_table,
)
from wattcast.core.whole_files import hold_folder

REQUESTS_FILE = "engine_requests.parquet"  # one row for each request of a traffic run
SERVING_STEPS_FILE = "engine_serving_steps.parquet"  # one row for each step of a traffic run
TABLES = STEPS_FILE, REQUESTS_FILE, SERVING_STEPS_FILE
# The flag of a traffic run in which a launch took so long that it compiled a kernel.
COMPILED = "compiled_inside"
COMPILING_S = 0.5  # the longest launch that compiled nothing took 0.1 s
_LONG_COLUMNS = ("why", "source", "date", "compile_s", "added_s", "run_s")  # of no use to a model
_CARD_COLUMNS = ("card_uuid", "card_board")


@dataclass(frozen=True)
class EngineRecords:
    """Measurements of one GPU's engines, as tables of rows."""

    rows: tuple[Plain, ...]
    requests: tuple[Plain, ...]
    serving_steps: tuple[Plain, ...]

    def select_kind(self, *kinds: str) -> list[Plain]:
        """Return the rows of some kinds that were measured without an error."""
        return [
            row
            for row in self.rows
            if row["kind"] in kinds and not row.get("error") and not row.get("skipped")
        ]

    def requests_of(self, run: str) -> list[Plain]:
        """Return the requests of one traffic run, in order of arrival."""
        return [row for row in self.requests if row["run"] == run]


def load_engine_records(database: str | Path) -> EngineRecords:
    """Read the three tables of a GPU's shipped database, or of a folder that holds them.

    Those that ship are read once a process; each caller gets rows of its own.
    """
    folder = database if isinstance(database, Path) else database_folder(database)
    missing = [name for name in TABLES if not (folder / name).exists()]
    if missing:
        names = ", ".join(missing)
        raise BadInput(f"{folder.name}: {names} not found. `wattcast lab pack-engine` writes them.")
    if isinstance(database, Path):
        return EngineRecords(*(tuple(read_table(folder / name)) for name in TABLES))
    tables = []
    for name in TABLES:
        path = folder / name
        shipped_rows = _read_shipped_table(path, path.stat().st_mtime_ns)
        tables.append(tuple([row.copy() for row in shipped_rows]))
    return EngineRecords(*tables)


@lru_cache(maxsize=2 * len(TABLES))
def _read_shipped_table(path: Path, _written_ns: int) -> tuple[Plain, ...]:
    return tuple(read_table(path))


def pack_engine_folders(folders: Sequence[Path], out: Path) -> EngineRecords:
    """Add folders of ``measure engine`` to the three tables in ``out``, and return the tables.

    Of rows with the same id the last one counts. A folder without traffic adds steps only.
    """
    for folder in folders:
        _check_folder(folder)
    tables = _GrowingTables()
    with hold_folder(out):
        if (out / STEPS_FILE).exists():
            tables.add_records(load_engine_records(out))
        for folder in folders:
            tables.add_folder(folder)
        records = tables.to_records()
        write_table(out / STEPS_FILE, list(records.rows))
        write_table(out / REQUESTS_FILE, list(records.requests))
        write_table(out / SERVING_STEPS_FILE, list(records.serving_steps))
    return records


def _check_folder(folder: Path) -> None:
    for name in ("rows.jsonl", "runs.jsonl"):
        if not (folder / name).exists():
            expected = "a folder that `measure engine` wrote"
            raise bad_value(str(folder), expected, f"no {name} in it")


@dataclass
class _GrowingTables:
    """The three tables while folders are added, keyed so that what was measured again replaces
    what was there.
    """

    rows: dict[str, Plain] = field(default_factory=dict)  # by id
    # by run and number of the request
    requests: dict[str, dict[int, Plain]] = field(default_factory=lambda: defaultdict(dict))
    # by run
    serving_steps: dict[str, list[Plain]] = field(default_factory=lambda: defaultdict(list))

    def add_records(self, records: EngineRecords) -> None:
        """Add the rows of tables that were written before."""
        for row in records.rows:
            self.rows[row["id"]] = row
        for row in records.requests:
            self.requests[row["run"]][row["number"]] = row
        for row in records.serving_steps:
            self.serving_steps[row["run"]].append(row)

    def add_folder(self, folder: Path) -> None:
        """Add what ``measure engine`` wrote to a folder."""
        cards = {}
        for run in _read_named(folder / "runs.jsonl", "run"):
            cards[run["run"]] = {name: run.get(name, "") for name in _CARD_COLUMNS}
        for row in _read_named(folder / "rows.jsonl", "id", "kind", "model"):
            card = cards.get(str(row.get("run")), {"card_uuid": ""})
            self.rows[row["id"]] = _flatten_row(row) | card

        requests = _read_named(folder / "requests.jsonl", "run", "number")
        self._add_requests([row for row in requests if row["run"] in self.rows])

        for columns in _read_named(folder / "steps.jsonl", "run"):
            if columns["run"] in self.rows:  # a full disk may have kept a run's row from the file
                self._add_steps(columns, f"{folder}/steps.jsonl")

    def _add_requests(self, requests: Sequence[Plain]) -> None:
        for request in requests:
            self.requests[request["run"]] = {}  # a run that is measured again may have fewer
        for request in requests:
            self.requests[request["run"]][request["number"]] = request

    def _add_steps(
        self,
        columns: Plain,
        where: str,
    ) -> None:
        """Add the steps of a traffic run, and flag the run if a launch compiled a kernel."""
        run = columns["run"]
        names = [name for name in columns if name != "run"]
        lengths = set()
        for name in names:
            lengths.add(len(columns[name]) if isinstance(columns[name], list) else -1)
        if len(lengths) != 1 or -1 in lengths:
            raise bad_value(where, "columns of one length", run)
        if max(columns.get("launch_s", (0.0,))) > COMPILING_S:
            row = self.rows[run]
            row["flags"] = f"{row.get('flags') or ''} {COMPILED}".strip()
        table = zip(*(columns[name] for name in names), strict=True)
        self.serving_steps[run] = [
            {"run": run, **dict(zip(names, values, strict=True))} for values in table
        ]

    def to_records(self) -> EngineRecords:
        """Return the tables, whose rows all have the same columns."""
        requests: list[Plain] = []
        for numbered in self.requests.values():
            requests += numbered.values()
        steps: list[Plain] = []
        for steps_of_run in self.serving_steps.values():
            steps += steps_of_run
        return EngineRecords(
            tuple(_with_same_keys(list(self.rows.values()))),
            tuple(_with_same_keys(requests)),
            tuple(steps),
        )


def _read_named(path: Path, *names: str) -> list[Plain]:
    """Return the lines of a file, each of which has text or a number under these names."""
    rows = list(read_lines(path, missing_ok=True))
    for row in rows:
        if not all(isinstance(row.get(name), str | int) for name in names):
            raise bad_value(str(path), f"rows with {', '.join(names)}", ", ".join(row) or "none")
    return rows


def _flatten_row(row: Plain) -> Plain:
    """Turn nested values into columns (``ttft_s.p50``) or text, so that a table can hold them."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in _LONG_COLUMNS:
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        elif isinstance(value, list) and name == "groups":
            flat[name] = " ".join(_describe_chunks(group) for group in value)
        elif isinstance(value, list):
            flat[name] = " ".join(map(str, value))
        else:
            flat[name] = value
    return flat


def _describe_chunks(group: Plain) -> str:
    """Write prompt chunks of one size as ``tokens@context:milliseconds``."""
    device_ms = 1e3 * (group["device_median_s"] or 0)
    return f"{group['prompt_tokens']:.0f}@{group['prompt_context']:.0f}:{device_ms:.4f}"


def _with_same_keys(rows: Sequence[Plain]) -> list[Plain]:
    """Return rows that all have the same columns; a column with a fraction holds fractions only."""
    names = _list_columns(rows)
    fractional = {name for name in names if any(isinstance(row.get(name), float) for row in rows)}
    complete = []
    for row in rows:
        values = {name: row.get(name) for name in names}
        for name in fractional:
            value = values[name]
            if type(value) is int:
                values[name] = float(value)
        complete.append(values)
    return complete


def _list_columns(rows: Iterable[Plain]) -> list[str]:
    """Return the names of all columns in the order in which they first appear."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)
