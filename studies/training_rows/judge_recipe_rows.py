"""Predict the training steps of ``recipe_plan.csv``, and compare predictions with what was measured.

``python studies/training_rows/judge_recipe_rows.py`` prints errors of both sets: of
``recipe_predictions.csv``, which has the held-out set as it was written (``--write held-out``) before
any row of it was measured, and of this tree, against ``recipe_measured.csv``, which has what was
measured on an H200 (``--keep DIR`` takes it from a campaign's folder). Only rows of the fitting set
were fitted to."""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from judge_training_rows import read_columns, write_columns

from wattcast import predict, train
from wattcast.core.row_journals import read_lines
from wattcast.workload.model_catalogue import load_model

PLAN = Path(__file__).with_name("recipe_plan.csv")
PREDICTIONS = PLAN.with_name("recipe_predictions.csv")
MEASURED = PLAN.with_name("recipe_measured.csv")
COLUMNS = ("latency_s", "power_w", "energy_j")
# FlashAttention-2, which PyTorch's attention of packed documents is, against cuDNN [Shah2024]
FLASH_2 = 1.8


def read_plan() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the planned rows by set and name."""
    sets: dict[str, dict[str, dict[str, Any]]] = {}
    with PLAN.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            sets.setdefault(row["set"], {})[row["id"]] = row
    return sets


def predict_row(plan: dict[str, Any]) -> dict[str, float]:
    """Predict one row as it is measured: a step in one CUDA graph, bf16 moments and gradients, no
    master weights.
    """
    return predict_network(plan) if plan["id"].startswith("conv-") else predict_job(plan)


def predict_network(plan: dict[str, Any]) -> dict[str, float]:
    """Predict a step of a convolutional network with channels last."""
    step = predict(
        plan["model"],
        gpu="h200",
        phase="train",
        batch=int(plan["batch"]),
        image=int(plan["seq"]),
        dtype="fp32" if plan["recipe"] == "tf32" else "bf16",
        stack="eager",
        channels_last=True,
        host_launch="0s",
        force=True,
    )
    return {
        "latency_s": float(step.latency_s),
        "power_w": float(step.power_w),
        "energy_j": float(step.energy_j),
    }


def predict_job(plan: dict[str, Any]) -> dict[str, float]:
    """Predict a step of a language model."""
    model = load_model(plan["model"])
    batch = int(plan["batch"])
    seq = int(plan["seq"])
    recipe = plan["recipe"]
    options: dict[str, Any] = {}
    if recipe.startswith("fp8"):
        options = {"dtype": "fp8", "fp8_scales": recipe.removeprefix("fp8-")}
    if recipe == "nf4":
        options = {"lora": int(plan["lora"]), "base_bits": 4}
    if recipe == "packed":
        from recipe_variants import draw_lengths  # PyTorch, which other rows do not need

        lengths = draw_lengths(batch * seq, int(plan["documents"]))
        options = {"documents": lengths, "attention_slowdown": FLASH_2}
    window = getattr(model.dims, "window", 0)
    # transformers 5 writes a window's mask out; a compiled step would leave it out elsewhere
    has_window_mask = plan["stack"] == "compiled" and 0 < window <= seq
    if recipe == "padded" or has_window_mask:
        options["mask_padding"] = True
    job = train(
        replace(model, dims=replace(model.dims, layers=int(plan["layers"]))),
        "h200",
        gpus=1,
        seq=seq,
        global_batch=batch,
        micro_batch=batch,
        recompute=plan["recompute"],
        stack=plan["stack"],
        master_weights=False,
        gradient_byte=2,
        fused_loss=plan["stack"] == "compiled",
        graphs=True,
        force=True,
        **options,
    )
    return {
        "latency_s": job.step_s,
        "power_w": float(job.step.power_w),
        "energy_j": float(job.step.energy_j),
    }


def keep_measured(folder: Path) -> None:
    """Take the rows of a campaign's folder that were captured and are numbers."""
    known = read_columns(MEASURED) if MEASURED.exists() else {}
    for row in read_lines(folder / "models.jsonl"):
        if row["graph"] and not row.get("error"):
            known[row["id"]] = {name: row[name] for name in COLUMNS}
    write_columns(MEASURED, known)


def judge_rows(chosen: str) -> None:
    """Print errors of time, power and energy row by row, and their means without sign."""
    measured = read_columns(MEASURED)
    written = read_columns(PREDICTIONS) if PREDICTIONS.exists() else {}
    for name, plans in read_plan().items():
        if chosen not in ("", name):
            continue
        rows = {row: measured[row] for row in plans if row in measured}
        sources = {"this tree": {row: predict_row(plans[row]) for row in rows}}
        if rows and set(rows) <= set(written):
            sources = {"before the measurement": written} | sources
        for words, predicted in sources.items():
            print(f"\n{name} set, {words}: {len(rows)} of {len(plans)} rows measured")
            print_errors(rows, predicted)


def print_errors(
    rows: dict[str, dict[str, float]],
    predicted: dict[str, dict[str, float]],
) -> None:
    """Print a line for each row and one for the mean of each column."""
    print(f"{'row':34} {'ms':>9} {'W':>6} {'time':>7} {'power':>7} {'energy':>7}")
    errors = []
    for row, true in rows.items():
        own = [predicted[row][name] / true[name] - 1.0 for name in COLUMNS]
        errors.append(own)
        shown = " ".join(f"{100 * error:+6.1f}%" for error in own)
        print(f"{row:34} {1e3 * true['latency_s']:9.2f} {true['power_w']:6.0f} {shown}")
    if errors:
        means = " ".join(f"{100 * value:6.1f}%" for value in np.mean(np.abs(errors), axis=0))
        print(f"{'mean':34} {'':16} {means}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", choices=read_plan(), help="write this tree's predictions")
    parser.add_argument("--keep", type=Path, help="take measured rows from this folder")
    parser.add_argument("--set", default="", help="judge this set alone")
    options = parser.parse_args()
    if options.write is not None:
        known = read_columns(PREDICTIONS) if PREDICTIONS.exists() else {}
        plans = read_plan()[options.write]
        write_columns(PREDICTIONS, known | {row: predict_row(plans[row]) for row in plans})
        return
    if options.keep is not None:
        keep_measured(options.keep)
    if MEASURED.exists():
        judge_rows(options.set)


if __name__ == "__main__":
    main()
