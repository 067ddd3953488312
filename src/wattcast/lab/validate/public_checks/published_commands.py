"""The commands that predict whole models which others measured [Lee2026, artifact; AMD].

A model is asked for twice: by its name, as a user would, and as the list of operators that the
run's own software issued, where the templates differ from it (``calibrate.calibration_rows``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from wattcast.calibrate.scoring import LedgerRow, make_ledger_row
from wattcast.hardware import load_gpu
from wattcast.lab.validate.public_checks.published_runs import PublishedRun
from wattcast.lab.validate.typed_commands import (
    JudgedRow,
    TypedCommand,
    judge_rows,
    make_file_name,
    show_clock,
)
from wattcast.workload.readers.from_json import graph_to_plain

PLACES = {
    "latency": "latency_s",
    "power": "power_w",
    "energy": "energy_j",
}
AS_BUILT = "as predict builds the models"
AMD = "AMD, published"
# seconds of a generation by batch: AMD, "Performance results with ROCm software" (amd.com), vLLM
# 0.8.5, 27 May 2025
AMD_GENERATION_S = {
    1: 15.851,
    2: 16.995,
    4: 17.578,
}


def ask_by_name(
    run: PublishedRun,
    gpu: str,
    where: str,
) -> JudgedRow:
    """Return a published run with the command that predicts its model by name."""
    options: dict[str, Any] = {"gpu": gpu, "batch": run.batch}
    if run.seq is not None:
        options |= {"seq": run.seq, "head": "none"}
    options |= {
        "dtype": run.dtype,
        "attention": "eager",
        "stack": "eager",
    }
    command = TypedCommand("predict", run.model, options | _list_conditions(run, gpu))
    return JudgedRow(
        where,
        _name_run(run),
        command,
        _list_figures(run),
        PLACES,
    )


def ask_by_operators(
    run: PublishedRun,
    gpu: str,
    where: str,
) -> JudgedRow:
    """Return a published run with the command that predicts the operators of its own software."""
    file = make_file_name(run.name, "json")
    content = msgspec.json.encode(graph_to_plain(run.graph))
    command = TypedCommand(
        "predict", file, {"gpu": gpu, **_list_conditions(run, gpu)}, {file: content}
    )
    return JudgedRow(
        where,
        _name_run(run),
        command,
        _list_figures(run),
        PLACES,
    )


def ask_amd_rows() -> list[JudgedRow]:
    """Return the generations that AMD published, with their commands."""
    rows = []
    for batch, seconds in AMD_GENERATION_S.items():
        options = {
            "gpu": "mi300x",
            "phase": "generate",
            "batch": batch,
            "seq": 128,
            "tokens": 2048,
        }
        command = TypedCommand(
            "predict",
            "llama3-70b",
            {
                **options,
                "dtype": "fp8",
                "tp": 8,
            },
        )
        rows.append(
            JudgedRow(
                AMD,
                f"batch {batch}",
                command,
                {"latency": seconds},
                {"latency": "latency_s"},
            )
        )
    return rows


def amd_rows() -> list[LedgerRow]:
    """Return a ledger row of AMD's generations: the mean error of their latencies in percent."""
    rows = ask_amd_rows()
    error = list_errors(rows, judge_rows(rows), "latency")
    what = "MI300X, Llama 3.1 70B fp8 over 8 GPUs, 128 tokens in, 2048 out, batch 1 to 4: latency"
    return [make_ledger_row(AMD, what, n=len(rows), mape=float(np.mean(error)))]


def _list_conditions(run: PublishedRun, gpu: str) -> dict[str, str]:
    """Return the clock that really ran and the temperature, as they are typed."""
    clock_hz = min(run.clock_hz or 0.0, float(load_gpu(gpu).clocks.max_hz))
    return {"clock": show_clock(clock_hz), "temperature": f"{run.temperature_c:.4g}C"}


def _name_run(run: PublishedRun) -> str:
    return f"{run.name} at {round(run.set_hz / 1e6)} MHz"


def _list_figures(run: PublishedRun) -> dict[str, float]:
    assert run.power_w is not None, "published runs have a power"
    return {
        "latency": run.latency_s,
        "power": run.power_w,
        "energy": run.energy_j,
    }


def list_errors(
    rows: Sequence[JudgedRow],
    predicted: Sequence[dict[str, float]],
    quantity: str,
) -> list[float]:
    """Return the absolute error of each row in percent."""
    pairs = zip(rows, predicted, strict=True)
    return [100.0 * abs(one[quantity] / row.measured[quantity] - 1.0) for row, one in pairs]
