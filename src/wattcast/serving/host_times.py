"""Read and write measurements of serving engines: rows of steps and runs, requests, and steps of
traffic.

Host times are fitted to these tables (``predictor.engine_host``), and `lab validate` compares with
them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattcast.core import BadInput, bad_value
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import STEPS_FILE, database_folder, read_table, write_table
from wattcast.core.whole_files import hold_folder

REQUESTS_FILE = "engine_requests.parquet"  # one row a request of a traffic run
SERVING_STEPS_FILE = "engine_serving_steps.parquet"  # one row a step of a traffic run
TABLES = STEPS_FILE, REQUESTS_FILE, SERVING_STEPS_FILE
# flag of a traffic run in which a launch took so long that it compiled a kernel
COMPILED = "compiled_inside"
COMPILING_S = 0.5  # the longest launch without was 0.1 s
_LONG_COLUMNS = ("why", "source", "date", "compile_s", "added_s", "run_s")  # of no use to a model


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
    """Read the three tables of a GPU's shipped database, or of a folder that holds them."""
    folder = database if isinstance(database, Path) else database_folder(database)
    missing = [name for name in TABLES if not (folder / name).exists()]
    if missing:
        raise BadInput(
            f"{folder.name}: {', '.join(missing)} not found. `wattcast lab pack-engine` writes them."
        )
    return EngineRecords(*(tuple(read_table(folder / name)) for name in TABLES))


def pack_engine_folders(folders: Sequence[Path], out: Path) -> EngineRecords:
    """Add folders of ``measure engine`` to the three tables in ``out``, and return what the tables
    then hold.

    Of rows with the same id the last one counts. A folder without traffic adds steps alone.
    """
    for folder in folders:
        missing = [name for name in ("rows.jsonl", "runs.jsonl") if not (folder / name).exists()]
        if missing:
            raise bad_value(
                str(folder), "a folder that `measure engine` wrote", f"no {missing[0]} in it"
            )
    known = load_engine_records(out) if (out / STEPS_FILE).exists() else EngineRecords((), (), ())
    by_id = {row["id"]: row for row in known.rows}
    requests: dict[str, dict[int, Plain]] = defaultdict(dict)
    steps: dict[str, list[Plain]] = defaultdict(list)
    for row in known.requests:
        requests[row["run"]][row["number"]] = row
    for row in known.serving_steps:
        steps[row["run"]].append(row)
    for folder in folders:
        runs = _read_named(folder / "runs.jsonl", "run")
        cards = {
            run["run"]: {name: run.get(name, "") for name in ("card_uuid", "card_board")}
            for run in runs
        }
        for row in _read_named(folder / "rows.jsonl", "id", "kind", "model"):
            by_id[row["id"]] = _flatten_row(row) | cards.get(str(row.get("run")), {"card_uuid": ""})
        served = [
            row
            for row in _read_named(folder / "requests.jsonl", "run", "number")
            if row["run"] in by_id
        ]
        requests |= {
            request["run"]: {} for request in served
        }  # a run measured again may have fewer
        for request in served:
            requests[request["run"]][request["number"]] = request
        for columns in _read_named(folder / "steps.jsonl", "run"):
            if columns["run"] not in by_id:  # a full disk kept a run from its row
                continue
            names = [name for name in columns if name != "run"]
            lengths = {
                len(columns[name]) if isinstance(columns[name], list) else -1 for name in names
            }
            if len(lengths) != 1 or -1 in lengths:
                raise bad_value(f"{folder}/steps.jsonl", "columns of one length", columns["run"])
            values = zip(*(columns[name] for name in names), strict=True)
            if max(columns.get("launch_s", (0.0,))) > COMPILING_S:
                row = by_id[columns["run"]]
                row["flags"] = f"{row.get('flags') or ''} {COMPILED}".strip()
            steps[columns["run"]] = [
                {"run": columns["run"], **dict(zip(names, row, strict=True))} for row in values
            ]
    found = EngineRecords(
        tuple(_with_same_keys(list(by_id.values()))),
        tuple(_with_same_keys([row for rows in requests.values() for row in rows.values()])),
        tuple(row for rows in steps.values() for row in rows),
    )
    with hold_folder(out):
        for name, table in zip(
            TABLES, (found.rows, found.requests, found.serving_steps), strict=True
        ):
            write_table(out / name, list(table))
    return found


def _read_named(path: Path, *names: str) -> list[Plain]:
    """Return the lines of a file, each of which has text or a number under these names."""
    rows = list(read_lines(path, missing_ok=True))
    for row in rows:
        if not all(isinstance(row.get(name), str | int) for name in names):
            raise bad_value(str(path), f"rows with {', '.join(names)}", ", ".join(row) or "none")
    return rows


def _flatten_row(row: Plain) -> Plain:
    """Turn nested values into columns (``ttft_s.p50``) or text, so that a table can hold them.

    Prompt chunks are written as ``tokens@context:milliseconds``, with blanks between.
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        match value:
            case _ if name in _LONG_COLUMNS:
                continue
            case dict():
                flat |= {f"{name}.{key}": item for key, item in value.items()}
            case list() if name == "groups":
                flat[name] = " ".join(
                    f"{of['prompt_tokens']:.0f}@{of['prompt_context']:.0f}:{1e3 * (of['device_median_s'] or 0):.4f}"
                    for of in value
                )
            case list():
                flat[name] = " ".join(map(str, value))
            case _:
                flat[name] = value
    return flat


def _with_same_keys(rows: list[Plain]) -> list[Plain]:
    """Return rows that all have the same columns, of whole numbers or of none."""
    names = dict.fromkeys(name for row in rows for name in row)
    broken = {name for name in names if any(isinstance(row.get(name), float) for row in rows)}
    return [
        {n: float(v) if n in broken and type(v := row.get(n)) is int else row.get(n) for n in names}
        for row in rows
    ]
