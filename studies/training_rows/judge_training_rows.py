"""Predict the training steps of ``training_plan.csv``, and compare predictions with what was measured.

``python studies/training_rows/judge_training_rows.py --write`` writes ``training_predictions.csv``;
``python studies/training_rows/judge_training_rows.py --rows DIR`` prints errors of a measured folder, both for the
file, which was written before anything was measured, and for this tree.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import train
from wattcast.core.measured_rows import read_lines
from wattcast.hardware import load_gpu
from wattcast.predictor.api import find_bundle
from wattcast.training.train_job import TrainingResult
from wattcast.workload.model_catalogue import load_model

PLAN = Path(__file__).with_name("training_plan.csv")
PREDICTIONS = PLAN.with_name("training_predictions.csv")
COLUMNS = ("latency_s", "power_w", "energy_j", "memory_byte")


def predict_row(plan: dict[str, Any]) -> TrainingResult:
    """Predict one row as it is measured: a step in one CUDA graph, bf16 moments and gradients, no master weights."""
    model, gpu = load_model(plan["model"]), load_gpu("h200")
    fitted = find_bundle(None, gpu)
    return train(
        replace(model, dims=replace(model.dims, layers=int(plan["layers"]))),
        gpu,
        gpus=1,
        seq=int(plan["seq"]),
        global_batch=int(plan["batch"]) * int(plan["accumulation"]),
        micro_batch=int(plan["batch"]),
        recompute=plan["recompute"],
        precision=plan["precision"],
        optimizer=plan["optimizer"],
        stack=plan["stack"],
        lora=int(plan["lora"]),
        base_bits=int(plan["base_bits"]),
        master_weights=False,
        gradient_byte=2,
        bundle=replace(fitted, launch=replace(fitted.launch, host_s_per_operator=0.0)),
        force=True,
    )


def predict_plan() -> dict[str, dict[str, float]]:
    """Return the predictions of all rows by name."""
    with PLAN.open(newline="", encoding="utf-8") as stream:
        results = {plan["id"]: predict_row(plan) for plan in csv.DictReader(stream)}
    return {
        name: {
            "latency_s": found.step_s,
            "power_w": float(found.step.power_w),
            "energy_j": float(found.step.energy_j),
            "memory_byte": found.memory.total_byte,
        }
        for name, found in results.items()
    }


def write_predictions() -> None:
    """Write the predictions of this tree."""
    with PREDICTIONS.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("id", *COLUMNS))
        for name, found in predict_plan().items():
            writer.writerow((name, *(f"{found[column]:.6g}" for column in COLUMNS)))


def read_predictions() -> dict[str, dict[str, float]]:
    """Read the predictions that were written before the measurement."""
    with PREDICTIONS.open(newline="", encoding="utf-8") as stream:
        return {row["id"]: {c: float(row[c]) for c in COLUMNS} for row in csv.DictReader(stream)}


def judge_rows(folder: Path) -> None:
    """Print errors of time, power and energy row by row, and their means without sign."""
    lines = [row for row in read_lines(folder / "models.jsonl") if not row.get("error")]
    measured = {row["id"]: row for row in lines if not row["id"].endswith("-launched")}
    launched = {row["id"].removesuffix("-launched"): row for row in lines if row["id"].endswith("-launched")}
    for words, found in (("before the measurement", read_predictions()), ("this tree", predict_plan())):
        print(f"\n{words}\n{'row':32} {'ms':>9} {'launched':>9} {'time':>7} {'power':>7} {'energy':>7} {'memory':>7}")
        errors = []
        for name, row in measured.items():
            each = [found[name][column] / row[column] - 1.0 for column in COLUMNS[:3]]
            memory = found[name]["memory_byte"] / launched[name]["peak_memory_byte"] - 1.0
            host_s = launched[name]["latency_s"]
            shown = " ".join(f"{100 * error:+6.1f}%" for error in (*each, memory))
            print(f"{name:32} {1e3 * row['latency_s']:9.2f} {1e3 * host_s:9.2f} {shown} {row.get('flags', '')}")
            errors.append(each)
        mean, median = np.mean(np.abs(errors), axis=0), np.median(np.abs(errors), axis=0)
        for label, three in (("mean", mean), ("median", median)):
            print(f"{label:32} {'':19} " + " ".join(f"{100 * value:6.1f}%" for value in three))


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the predictions of this tree")
    parser.add_argument("--rows", type=Path, help="folder of measured rows")
    options = parser.parse_args()
    if options.write:
        write_predictions()
    if options.rows is not None:
        judge_rows(options.rows)


if __name__ == "__main__":
    main()
