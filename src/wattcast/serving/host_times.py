"""Give the time a serving engine spends on its host: scheduling, launching kernels, handing out
tokens.

The host works while the GPU computes the step before (asynchronous scheduling), so its time counts
only where it is longer than the GPU's. Steps that only decode replay one CUDA graph; a step with
prompts of up to 512 tokens replays one graph a layer; a larger step launches every operator by
itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from wattcast.core import BadInput, bad_value, dataclass, units
from wattcast.core.measured_rows import (
    STEPS_FILE,
    Plain,
    database_folder,
    read_lines,
    read_table,
    write_table,
)
from wattcast.core.strict_files import read_shipped_yaml
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


@dataclass(frozen=True)
class HostTimes:
    """Host times of one engine. Launches of layers come on top of ``launch_graph_s``."""

    engine: str
    schedule_s: float
    schedule_per_sequence_s: float
    launch_graph_s: float
    launch_graph_per_sequence_s: float
    launch_layer_s: float  # of a step with prompts whose layers are graphs
    launch_same_layer_s: float  # of such a step, when the one before replayed the same graphs
    launch_loose_layer_s: float  # of a step without graphs
    launch_scan_s: (
        float  # of a step with prompts, on top: the scan of a layer, which no graph holds
    )
    output_s: float
    output_per_sequence_s: float
    admit_s: float  # to take in one request
    # GPU time that the first decode-only step after one with prompts takes more than later ones
    switch_s: float
    sample_s: float  # GPU time of a step outside the model: sampling, bookkeeping
    governor_s: float  # time over which the power limit averages
    waiting_power: float  # power between kernels, as a multiple of idle power
    expert_layers: (
        float  # layers that launching the fused experts of a layer is worth, without graphs
    )
    packed_expert_layers: float  # the same of experts in mxfp4 (OpenAI's Triton kernels)
    latent_layers: (
        float  # layers that latent attention of a layer is worth beside a plain one, without graphs
    )
    shared_layers: float  # layers that a shared expert of a layer is worth, without graphs
    scan_layers: float  # layers that a layer with a scan is worth, without graphs
    launch_spread: float  # standard deviation of the logarithm of a launch layer by layer
    launch_memory: float  # correlation of that logarithm with the one of the step before
    visible_memory: float  # memory an engine sees, as a multiple of the nominal one
    capture_sizes: tuple[int, ...]


class _Sourced(msgspec.Struct, forbid_unknown_fields=True):
    value: str | float
    source: str


class _HostFile(msgspec.Struct, forbid_unknown_fields=True):
    engine: str
    values: dict[str, _Sourced]
    ratios: dict[str, _Sourced]
    capture_sizes: tuple[int, ...]


@cache
def load_host_times() -> HostTimes:
    """Read the host times that ship with Wattcast."""
    where = "engine_host.yaml"
    found = read_shipped_yaml(_HostFile, "wattcast.serving", where)
    times = {
        f"{n}_s": units.parse(str(item.value), "s", f"{where}: {n}")
        for n, item in found.values.items()
    }
    ratios = {name: float(item.value) for name, item in found.ratios.items()}
    return HostTimes(found.engine, **times, **ratios, capture_sizes=found.capture_sizes)
