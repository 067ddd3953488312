"""Compare serving with measurements of vLLM: single steps, and requests served under arrivals.

Fitting models and held-out ones are reported apart, and so are held-out loads: nothing of the simulator was fitted or
chosen on what is marked ``held_out`` or ``held_out_load`` in the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast import hardware
from wattcast.core.errors import WattcastError
from wattcast.core.measured_rows import Plain
from wattcast.fit.scoring import LedgerRow, make_absent_row, make_ledger_row
from wattcast.hardware import Gpu
from wattcast.serving.arrivals import make_trace
from wattcast.serving.engine_simulator import EngineSettings, predict_steady_step
from wattcast.serving.host_times import COMPILED, REQUESTS_FILE, EngineRecords, load_engine_records
from wattcast.serving.serving_result import ServingResult, percentiles
from wattcast.serving.simulate_serving import serve_trace
from wattcast.serving.step_costs import StepCosts, tabulate_step_costs
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions, SoftwareStack
from wattcast.workload.readers.from_huggingface import convert_config

STEP_GOALS = {  # must, aim: percent
    "decode": {"latency": (3.5, 2.0), "power": (3.0, 2.0), "energy": (4.0, 2.5)},
    "prefill": {"latency": (6.0, 2.0), "power": (3.0, 2.0), "energy": (6.0, 2.5)},
    "mixed": {},
}
TRAFFIC_GOALS = {
    "TPOT p50": (6.0, 3.0),
    "TPOT p99": (12.0, 6.0),
    "TTFT p50": (12.0, 6.0),
    "TTFT p99": (25.0, 12.0),
    "throughput": (4.0, 2.0),
    "power": (4.0, 2.5),
    "energy per token": (5.0, 3.0),
}


@dataclass(frozen=True)
class ServingComparison:
    """One measured row beside its prediction: quantity -> (measured, predicted)."""

    id: str
    model: str
    kind: str
    held_out: bool
    values: dict[str, tuple[float, float]] = field(default_factory=dict)

    def error_percent(self, quantity: str) -> float:
        """Return how far the prediction is above the measurement."""
        measured, predicted = self.values[quantity]
        return 100.0 * (predicted / measured - 1.0)


def compare_serving(
    records: EngineRecords, gpu: Gpu, models: Sequence[str] | None = None, held_out: bool | None = None
) -> list[ServingComparison]:
    """Predict every measured step and traffic run of some models; ``held_out`` keeps one side of the split.

    Two kinds of rows are left out: runs in which the engine compiled a kernel, and steps of an engine with experts on
    dummy weights where the same engine was measured with weights that tell tokens apart.
    """
    found = []
    told_apart = {row["model"] for row in records.rows if row.get("normal_weights")}
    engines = {row["model"]: row for row in records.select_kind("engine")}
    for model, engine in engines.items():
        rows = [row for row in records.select_kind("decode", "prefill", "mixed", "traffic") if row["model"] == model]
        rows = [row for row in rows if COMPILED not in (row["flags"] or "")]
        if model in told_apart:
            rows = [row for row in rows if row["normal_weights"]]
        kept = [row for row in rows if held_out is None or is_held_out(row) == held_out]
        if (models is not None and model not in models) or not kept:
            continue
        costs = tabulate_engine(engine, gpu)
        settings = EngineSettings(int(engine["max_batched_tokens"]), int(engine["max_seqs"]))
        for row in kept:
            compare = _compare_traffic if row["kind"] == "traffic" else _compare_step
            values = compare(row, records, costs, settings)
            found.append(ServingComparison(row["id"], model, row["kind"], is_held_out(row), values))
    return found


def is_held_out(row: Plain) -> bool:
    return bool(row["held_out"] or row.get("held_out_load"))


def tabulate_engine(engine: Plain, gpu: Gpu) -> StepCosts:
    """Tabulate the engine as it was started: number format, limits, longest context."""
    options = ModelOptions.from_names(
        stack=SoftwareStack.ENGINE,
        quantization="fp8" if engine["quantization"] == "fp8" else None,
        kv_dtype="fp8" if engine["kv_dtype"] == "fp8" else None,
    )
    return tabulate_step_costs(
        load_measured_model(engine["model"]),
        gpu,
        options,
        max_tokens=int(engine["max_batched_tokens"]),
        max_seqs=int(engine["max_seqs"]),
        longest_context=int(engine["max_model_len"]),
        block_tokens=int(engine["block_tokens"]),
    )


def load_measured_model(name: str) -> ModelSpec:
    """Return the model of a measured engine from the configuration it was started with."""
    lines = files("wattcast.measure.engine").joinpath("engine_models.jsonl").read_bytes().splitlines()
    found = (msgspec.json.decode(line) for line in lines if line.strip())
    known = {line["name"]: line["config"] for line in found}
    return convert_config(known[name], f"engine_models.jsonl: {name}", name)


def _compare_step(
    row: Plain, records: EngineRecords, costs: StepCosts, settings: EngineSettings
) -> dict[str, tuple[float, float]]:
    """Predict a repeated step; a prompt longer than a step is the mean over its chunks."""
    batch, context, prompts = int(row["batch"]), float(row["context_mean"]), int(row["prompts"] or 0)
    tokens, room = int(row["prompt_tokens"] or 0), settings.max_batched_tokens - batch
    if prompts and prompts * tokens > room:
        parts = [[(min(room, tokens - before), before)] for before in range(0, tokens, room)]
    else:
        parts = [[(tokens, 0)] * prompts]
    steps = [predict_steady_step(costs, batch, context, chunks, prompts / len(parts)) for chunks in parts]
    latency_s, energy_j = (float(np.mean([step[place] for step in steps])) for place in (0, 1))
    return {
        "latency": (row["latency_s"], latency_s),
        "power": (row["power_w"], energy_j / latency_s),
        "energy": (row["energy_j"], energy_j),
    }


def _compare_traffic(
    row: Plain, records: EngineRecords, costs: StepCosts, settings: EngineSettings
) -> dict[str, tuple[float, float]]:
    """Serve the requests that were measured, at the moments they arrived."""
    result = serve_again(row, records, costs, settings)
    ttft_s, tpot_s = percentiles(result.ttft_s), percentiles(result.tpot_s)
    return {
        "TPOT p50": (row["tpot_s.p50"], tpot_s["p50"]),
        "TPOT p99": (row["tpot_s.p99"], tpot_s["p99"]),
        "TTFT p50": (row["ttft_s.p50"], ttft_s["p50"]),
        "TTFT p99": (row["ttft_s.p99"], ttft_s["p99"]),
        "throughput": (row["output_tokens_per_s"], result.output_tokens_per_s),
        "power": (row["power_w"], result.power_w),
        "energy per token": (row["energy_j_per_token"], result.energy_j_per_token),
    }


def serve_again(row: Plain, records: EngineRecords, costs: StepCosts, settings: EngineSettings) -> ServingResult:
    requests = records.requests_of(row["id"])
    arrival_s, prompt, output = (
        [request[name] for request in requests] for name in ("arrival_s", "prompt_tokens", "output_tokens")
    )
    return serve_trace(make_trace(arrival_s, prompt, output, name=row["id"]), costs, settings)


def serving_rows(gpu: str, database: str | Path | None = None) -> list[LedgerRow]:
    """Return ledger rows of single steps and of traffic, fitting models and held-out ones apart."""
    try:
        records = load_engine_records(database or gpu)
    except WattcastError as error:  # no such database, or one without engines
        return [make_absent_row(f"{gpu} engine", "all", f"{REQUESTS_FILE}: {error}")]
    return make_serving_rows(gpu, compare_serving(records, hardware.load_gpu(gpu)))


def make_serving_rows(gpu: str, found: Sequence[ServingComparison]) -> list[LedgerRow]:
    """Return the mean absolute error of each quantity by kind of row and side of the split."""
    rows: list[LedgerRow] = []
    for side, label in ((False, "fitting models"), (True, "held-out models and loads")):
        for kind in ("decode", "prefill", "mixed", "traffic"):
            same = [one for one in found if one.kind == kind and one.held_out == side]
            goals: dict[str, Any] = TRAFFIC_GOALS if kind == "traffic" else STEP_GOALS[kind]
            for quantity in same[0].values if same else ():
                mape = float(np.mean([abs(one.error_percent(quantity)) for one in same]))
                must, aim = goals.get(quantity, (None, None)) if side else (None, None)
                where = f"{gpu} engine {kind}, {label}"
                rows.append(make_ledger_row(where, quantity, len(same), mape, must=must, aim=aim))
    return rows
