"""Predict the training steps of ``training_plan.csv``, and compare predictions with what was measured.

``python studies/training_rows/judge_training_rows.py`` prints errors, both of ``training_predictions.csv``, which was
written (``--write``) before anything was measured, and of this tree, against ``training_measured.csv``, which has
what was measured on an H200 (``--keep DIR`` takes it from the folder of a campaign).
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
from wattcast.training.train_job import TrainingResult
from wattcast.workload.model_catalogue import load_model

PLAN = Path(__file__).with_name("training_plan.csv")
PREDICTIONS, MEASURED = PLAN.with_name("training_predictions.csv"), PLAN.with_name("training_measured.csv")
COLUMNS = ("latency_s", "power_w", "energy_j", "memory_byte")


def predict_row(plan: dict[str, Any]) -> TrainingResult:
    """Predict one row as it is measured: a step in one CUDA graph, bf16 moments and gradients, no master weights."""
    model = load_model(plan["model"])
    return train(
        replace(model, dims=replace(model.dims, layers=int(plan["layers"]))),
        "h200",
        gpus=1,
        seq=int(plan["seq"]),
        global_batch=int(plan["batch"]) * int(plan["accumulation"]),
        micro_batch=int(plan["batch"]),
        recompute=plan["recompute"],
        dtype=plan["precision"],
        optimizer=plan["optimizer"],
        stack=plan["stack"],
        lora=int(plan["lora"]),
        base_bits=int(plan["base_bits"]),
        master_weights=False,
        gradient_byte=2,
        graphs=True,
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


def read_columns(path: Path) -> dict[str, dict[str, float]]:
    """Read the numbers of a file by row."""
    with path.open(newline="", encoding="utf-8") as stream:
        return {row.pop("id"): {c: float(v) for c, v in row.items()} for row in csv.DictReader(stream)}


def keep_measured(folder: Path) -> None:
    """Take the rows of a campaign's folder; memory and ``launched_s`` are of steps that the host launched."""
    lines = {row["id"]: row for row in read_lines(folder / "models.jsonl") if not row.get("error")}
    known = read_columns(MEASURED) if MEASURED.exists() else {}
    for name, row in lines.items():
        alone = lines.get(f"{name}-launched")
        if alone is not None:
            memory = alone["peak_memory_byte"]
            known[name] = {c: row[c] for c in COLUMNS[:3]} | {"memory_byte": memory, "launched_s": alone["latency_s"]}
    with MEASURED.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("id", *COLUMNS, "launched_s"))
        for name, found in known.items():
            writer.writerow((name, *(f"{value:.6g}" for value in found.values())))


def judge_rows() -> None:
    """Print errors of time, power, energy and memory row by row, and their means and medians without sign."""
    measured = read_columns(MEASURED)
    for words, found in (("before the measurement", read_columns(PREDICTIONS)), ("this tree", predict_plan())):
        print(f"\n{words}\n{'row':32} {'ms':>9} {'launched':>9} {'time':>7} {'power':>7} {'energy':>7} {'memory':>7}")
        errors = []
        for name, row in measured.items():
            errors.append([found[name][column] / row[column] - 1.0 for column in COLUMNS])
            shown = " ".join(f"{100 * error:+6.1f}%" for error in errors[-1])
            print(f"{name:32} {1e3 * row['latency_s']:9.2f} {1e3 * row['launched_s']:9.2f} {shown}")
        for label, three in (
            ("mean", np.mean(np.abs(errors), axis=0)),
            ("median", np.median(np.abs(errors), axis=0)),
        ):
            print(f"{label:32} {'':19} " + " ".join(f"{100 * value:6.1f}%" for value in three))


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the predictions of this tree")
    parser.add_argument("--keep", type=Path, help="take measured rows from this folder")
    options = parser.parse_args()
    if options.write:
        write_predictions()
    if options.keep is not None:
        keep_measured(options.keep)
    judge_rows()


if __name__ == "__main__":
    main()
