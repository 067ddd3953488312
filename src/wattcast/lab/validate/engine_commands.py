"""The commands that predict measured steps and traffic of vLLM.

A step that decodes or computes prompts is asked of ``predict``, requests under arrivals of
``simulate``. Steps that do both at once are no workload of a command: `simulate` adds them up, and
the ledger judges them by its table of steps.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from wattcast.core import BadInput, files
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import read_lines
from wattcast.hardware import load_gpu
from wattcast.lab.fit.engine_records import COMPILED, EngineRecords
from wattcast.lab.validate.typed_commands import (
    JudgedRow,
    TypedCommand,
    make_file_name,
)
from wattcast.workload.model_catalogue import list_models, load_model
from wattcast.workload.readers.from_huggingface import convert_config

STEP_PLACES = {
    "latency": "latency_s",
    "power": "power_w",
    "energy": "energy_j",
}
TRAFFIC_PLACES = {
    "TPOT p50": "tpot_s.p50",
    "TPOT p99": "tpot_s.p99",
    "TTFT p50": "ttft_s.p50",
    "TTFT p99": "ttft_s.p99",
    "throughput": "output_tokens_per_s",
    "power": "power_w",
    "energy per token": "energy_j_per_token",
}
STEP_KINDS = ("decode", "prefill")
ASKED_KINDS = (*STEP_KINDS, "traffic")


def select_judged_rows(records: EngineRecords, *kinds: str) -> list[Plain]:
    """Return the measured rows of some kinds that can judge.

    Two kinds of rows are left out: runs in which the engine compiled a kernel, and steps of an
    engine on dummy weights where the same engine was measured with weights that tell tokens apart.
    Traffic is judged by itself: a dense model's time under it hardly depends on the weights."""
    random_weight_groups = {
        (row["model"], row["kind"] == "traffic")
        for row in records.rows
        if row.get("normal_weights")
    }
    rows = [row for row in records.select_kind(*kinds) if COMPILED not in (row["flags"] or "")]
    return [
        row
        for row in rows
        if row["normal_weights"]
        or (row["model"], row["kind"] == "traffic") not in random_weight_groups
    ]


def is_held_out(row: Plain) -> bool:
    """Tell whether nothing was fitted or chosen on a row: its model, or its load, is held out."""
    return bool(row["held_out"] or row.get("held_out_load"))


def make_engine_rows(
    records: EngineRecords,
    gpu: str,
    labels: Mapping[bool, str],
    board: str = "",
) -> list[JudgedRow]:
    """Return measured rows with their commands; ``labels`` name the sides of the split that are
    asked for.

    With a ``board`` of the GPU, steps on cards on which it was read are asked of it.
    """
    engines = {row["model"]: row for row in records.select_kind("engine")}
    part_number = load_gpu(board).board if board else ""
    judged_rows = []
    for row in select_judged_rows(records, *(STEP_KINDS if board else ASKED_KINDS)):
        side = is_held_out(row)
        elsewhere = board and row.get("card_board") != part_number
        if side in labels and not elsewhere:
            where = f"{gpu} engine {row['kind']}, {labels[side]}"
            judged_rows.append(
                ask_engine_row(
                    row,
                    engines[row["model"]],
                    records,
                    board or gpu,
                    where,
                )
            )
    return judged_rows


def ask_engine_row(
    row: Plain,
    engine: Plain,
    records: EngineRecords,
    gpu: str,
    where: str,
) -> JudgedRow:
    """Return a measured row of a set with the command that predicts it."""
    if row["kind"] == "traffic":
        command = _ask_simulation(row, engine, records, gpu)
        measured = {quantity: float(row[place]) for quantity, place in TRAFFIC_PLACES.items()}
        return JudgedRow(
            where,
            row["id"],
            command,
            measured,
            TRAFFIC_PLACES,
        )
    steps = count_steps(row, engine)
    measured = {
        "latency": steps * row["latency_s"],
        "power": row["power_w"],
        "energy": steps * row["energy_j"],
    }
    return JudgedRow(
        where,
        row["id"],
        _ask_prediction(row, engine, gpu),
        measured,
        STEP_PLACES,
    )


def count_steps(row: Plain, engine: Plain) -> int:
    """Return how many steps the prompt of a measured row takes; more than one where it is longer
    than a step.

    Such a row was measured as the mean of the steps of one prompt; the command predicts the whole
    prompt."""
    if not row["prompts"]:
        return 1
    tokens = int(row["prompt_tokens"])
    room = int(engine["max_batched_tokens"])
    return -(-tokens // room) if int(row["prompts"]) * tokens > room else 1


def _ask_prediction(
    row: Plain,
    engine: Plain,
    gpu: str,
) -> TypedCommand:
    subject, contents = _find_subject(row["model"])
    prefill = row["kind"] == "prefill"
    options: dict[str, Any] = {
        "gpu": gpu,
        "phase": row["kind"],
        "batch": int(row["prompts"] if prefill else row["batch"]),
        "seq": int(row["prompt_tokens"]) if prefill else round(row["context_mean"]),
    }
    return TypedCommand("predict", subject, options | _list_formats(engine), contents)


def _ask_simulation(
    row: Plain,
    engine: Plain,
    records: EngineRecords,
    gpu: str,
) -> TypedCommand:
    subject, contents = _find_subject(row["model"])
    trace = make_file_name(row["id"], "csv")
    options: dict[str, Any] = {
        "gpu": gpu,
        "trace": trace,
        "max_batched_tokens": int(engine["max_batched_tokens"]),
        "max_seqs": int(engine["max_seqs"]),
        "block_tokens": int(engine["block_tokens"]),
    }
    contents = {**contents, trace: _write_trace(records.requests_of(row["id"]))}
    return TypedCommand("simulate", subject, options | _list_formats(engine), contents)


def _list_formats(engine: Plain) -> dict[str, str]:
    return {name: "fp8" for name in ("quantization", "kv_dtype") if engine[name] == "fp8"}


def _write_trace(requests: Sequence[Plain]) -> bytes:
    columns = ("arrival_s", "prompt_tokens", "output_tokens")
    text = io.StringIO()
    text.write(",".join(columns) + "\n")
    for request in requests:
        text.write(",".join(repr(request[name]) for name in columns) + "\n")
    return text.getvalue().encode()


@cache
def _find_subject(name: str) -> tuple[str, dict[str, bytes]]:
    """Return how a user names the model of a measured engine, and the file that takes where it has
    no name.

    A catalogue model counts where its sizes, and the format that its weights are published in, are
    those of the configuration that the engine was started with."""
    lines = read_lines(files("wattcast.lab.campaigns").joinpath("engine_models.jsonl"))
    config = {line["name"]: line["config"] for line in lines}[name]
    spec = convert_config(config, f"engine_models.jsonl: {name}", name)
    for catalogue_name in (re.sub("(-fp8|-kv8)+$", "", name), *list_models()):
        try:
            model = load_model(catalogue_name)
        except BadInput:  # not of the catalogue by that name
            continue
        is_same_size = model.architecture == spec.architecture and model.dims == spec.dims
        if is_same_size and model.quantization == spec.quantization:
            return catalogue_name, {}
    file = make_file_name(name, "json")
    return file, {file: json.dumps(config, indent=1).encode()}
