"""Add the runs of a campaign to ``h200_runs.jsonl``.

Run: ``PYTHONPATH=src python studies/power_traces/collect_runs.py FOLDER [TRACE.json ...]``. FOLDER is
what ``wattcast measure engine`` wrote, each TRACE.json what ``measure_training_trace.py`` wrote. All
runs under load are taken, whatever came out; a run that is in the file already is refused."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from wattcast.core.row_journals import read_lines

RUNS = Path(__file__).with_name("h200_runs.jsonl")
LOAD_FIELDS = ("users", "think_s", "ramp_s", "turns", "duration_s")
SWING_FIELDS = ("load", "swing", "period_s", "capacity_per_s")
ENGINE_FIELDS = (
    "vllm",
    "cache_tokens",
    "cache_blocks",
    "block_tokens",
    "max_seqs",
    "max_batched_tokens",
    "max_model_len",
    "prefix_caching",
    "quantization",
    "kv_dtype",
)
MEASURED_FIELDS = (
    "length_s",
    "requests",
    "output_tokens_per_s",
    "power_w",
    "energy_j_per_token",
    "ttft_s",
    "tpot_s",
)
REQUEST_FIELDS = (
    "arrival_s",
    "user",
    "turn",
    "pause_s",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "first_token_s",
    "last_token_s",
)
CARD_FIELDS = ("name", "uuid", "board")
SENSORS = ("temperature_c", "memory_w", "sm_clock_hz")
SENSOR_S = 1.0  # of which a run keeps one reading: cards of one board differ, and these say why
GRAPH_TOKENS = 512  # of a step, beyond which layers are launched without graphs


def collect_serving(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs under load of a campaign."""
    rows = [dict(row) for row in read_lines(folder / "rows.jsonl")]
    cards = {row["run"]: row for row in read_lines(folder / "runs.jsonl")}
    power = {row["run"]: row for row in read_lines(folder / "power.jsonl")}
    steps = {row["run"]: row for row in read_lines(folder / "steps.jsonl")}
    requests: dict[str, list[Any]] = {}
    for request in read_lines(folder / "requests.jsonl"):
        requests.setdefault(str(request["run"]), []).append(request)
    engines = {row["model"]: row for row in rows if row["kind"] == "engine"}
    for row in rows:
        if row["kind"] != "load" or "power_w" not in row:
            continue
        engine = engines[row["model"]]
        card = cards[row["run"]]
        fields = LOAD_FIELDS if row["users"] else (*LOAD_FIELDS, *SWING_FIELDS)
        columns = {}
        for name in REQUEST_FIELDS:
            columns[name] = [request.get(name, 0) for request in requests[row["id"]]]
        if not row["users"]:
            del columns["pause_s"]
        yield {
            "id": row["id"],
            "kind": "serving",
            "card": {name: card[f"card_{name}"] for name in CARD_FIELDS}
            | {"driver": card["driver"], "power_limit_w": card["power_limit_w"]},
            "date": row["date"],
            "model": row["model"],
            "engine": {name: engine[name] for name in ENGINE_FIELDS},
            "load": {name: row[name] for name in fields},
            "measured": {name: row[name] for name in MEASURED_FIELDS},
            "requests": columns,
            "power": {name: power[row["id"]][name] for name in ("tick_s", "tick_w")},
            "sensors": thin_sensors(power[row["id"]]),
            "host": summarise_host(steps[row["id"]]),
        }


def thin_sensors(power: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the first reading of each second of what the card said beside its energy."""
    kept: dict[str, list[float]] = {}
    for name in SENSORS:
        readings: dict[int, float] = {}
        for at_s, value in zip(power[f"{name}_at_s"], power[name], strict=True):
            readings.setdefault(int(at_s // SENSOR_S), value)
        kept[name] = list(readings.values())
    return kept


def summarise_host(steps: dict[str, list[float]]) -> dict[str, float]:
    """Return how long the host launched steps in the median, by what it launches."""
    kinds: dict[str, list[float]] = {"decode_s": [], "prompts_s": [], "large_s": []}
    columns = (steps[name] for name in ("prompts", "tokens", "launch_s"))
    for prompts, tokens, launch_s in zip(*columns, strict=True):
        if launch_s is None:
            continue
        if not prompts:
            kinds["decode_s"].append(launch_s)
        elif tokens <= GRAPH_TOKENS:
            kinds["prompts_s"].append(launch_s)
        else:
            kinds["large_s"].append(launch_s)
    return {name: median(times) for name, times in kinds.items() if times}


def collect_training(path: Path, date: str) -> dict[str, Any]:
    """Return the run of a training trace."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    words = trace["job"]
    card = trace["card"]
    job = {name: int(words[name]) for name in ("batch", "seq", "accumulation")}
    job["checkpoint_every"] = int(words["every"])
    settings = {"optimizer": "adamw", "states": "bf16", "stack": "eager"}
    return {
        "id": f"{words['model']}/training-{float(words['seconds']):g}s",
        "kind": "training",
        "card": {name: card[name] for name in (*CARD_FIELDS, "driver", "power_limit_w")},
        "date": date,
        "model": words["model"],
        "job": job | settings,
        "steps_s": trace["step_s"],
        "checkpoints_s": trace["checkpoint_s"],
        "power": {name: trace["power"][name] for name in ("tick_s", "tick_w")},
        "sensors": thin_sensors(trace["power"]),
    }


def main() -> None:
    """Read the command line and add the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("traces", type=Path, nargs="*")
    options = parser.parse_args()
    runs = list(collect_serving(options.folder))
    date = runs[0]["date"][:10]
    runs += [collect_training(path, date) for path in options.traces]
    present = {run["id"] for run in read_lines(RUNS)}
    repeated = sorted(run["id"] for run in runs if run["id"] in present)
    if repeated:
        raise SystemExit(f"already in {RUNS.name}: {', '.join(repeated)}")
    with RUNS.open("a", encoding="utf-8") as file:
        for run in runs:
            file.write(json.dumps(run, separators=(",", ":")) + "\n")
    print(f"{len(runs)} runs added: {', '.join(run['id'] for run in runs)}")


if __name__ == "__main__":
    main()
