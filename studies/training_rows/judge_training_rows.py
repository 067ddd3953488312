"""Predict the training steps of ``training_plan.csv``, and compare predictions with what was
measured.

``python studies/training_rows/judge_training_rows.py`` prints errors set by set, of
``training_predictions.csv``, where a set was written (``--write SET``) before any row of it was
measured, and of this tree, against ``training_measured.csv``, which has what was measured on an
H200 (``--keep DIR`` takes it from a campaign's folder)."""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import train
from wattcast.core.row_journals import read_lines
from wattcast.training.train_job import TrainingResult
from wattcast.workload.model_catalogue import load_model

PLAN = Path(__file__).with_name("training_plan.csv")
PREDICTIONS, MEASURED = (
    PLAN.with_name("training_predictions.csv"),
    PLAN.with_name("training_measured.csv"),
)
COLUMNS = ("latency_s", "power_w", "energy_j", "memory_byte")


def predict_row(plan: dict[str, Any]) -> TrainingResult:
    """Predict one row as it is measured: a step in one CUDA graph, bf16 moments and gradients, no
    master weights.

    A compiled row compiles the loss too: its kernels read the logits twice and write the gradient
    once."""
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
        fused_loss=plan["stack"] == "compiled",
        graphs=True,
        force=True,
    )


def read_plan() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the planned rows by set and name."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with PLAN.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            found.setdefault(row["set"], {})[row["id"]] = row
    return found


def predict_plans(plans: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the predictions of rows by name."""
    results = {name: predict_row(plan) for name, plan in plans.items()}
    return {
        name: {
            "latency_s": found.step_s,
            "power_w": float(found.step.power_w),
            "energy_j": float(found.step.energy_j),
            "memory_byte": found.memory.total_byte,
        }
        for name, found in results.items()
    }


def write_predictions(chosen: str) -> None:
    """Write the predictions of this tree for a set, and leave those of other sets as they are."""
    write_columns(PREDICTIONS, read_columns(PREDICTIONS) | predict_plans(read_plan()[chosen]))


def read_columns(path: Path) -> dict[str, dict[str, float]]:
    """Read the numbers of a file by row."""
    with path.open(newline="", encoding="utf-8") as stream:
        return {
            row.pop("id"): {c: float(v) for c, v in row.items()} for row in csv.DictReader(stream)
        }


def write_columns(path: Path, rows: dict[str, dict[str, float]]) -> None:
    """Write numbers by row."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("id", *next(iter(rows.values()))))
        for name, found in rows.items():
            writer.writerow((name, *(f"{value:.6g}" for value in found.values())))


def keep_measured(folder: Path) -> None:
    """Take the rows of a campaign's folder; memory and ``launched_s`` are of steps that the host
    launched.
    """
    lines = {row["id"]: row for row in read_lines(folder / "models.jsonl") if not row.get("error")}
    known = read_columns(MEASURED)
    for name, row in lines.items():
        alone = lines.get(f"{name}-launched")
        if alone is not None and row["graph"]:
            memory = alone["peak_memory_byte"]
            known[name] = {c: row[c] for c in COLUMNS[:3]} | {
                "memory_byte": memory,
                "launched_s": alone["latency_s"],
            }
    write_columns(MEASURED, known)


def judge_rows() -> None:
    """Print errors of time, power, energy and memory row by row, and their means and medians
    without sign.
    """
    measured, predicted = read_columns(MEASURED), read_columns(PREDICTIONS)
    for chosen, plans in read_plan().items():
        rows = {name: measured[name] for name in plans if name in measured}
        if not rows:
            print(f"\n{chosen} set: {len(plans)} rows planned, none measured")
            continue
        for words, found in (
            ("before the measurement", predicted),
            ("this tree", predict_plans(plans)),
        ):
            print(f"\n{chosen} set, {words}")
            print(
                f"{'row':38} {'ms':>9} {'launched':>9} {'time':>7} {'power':>7} {'energy':>7} {'memory':>7}"
            )
            errors = [
                [found[name][column] / row[column] - 1.0 for column in COLUMNS]
                for name, row in rows.items()
            ]
            for (name, row), own in zip(rows.items(), errors, strict=True):
                shown = " ".join(f"{100 * error:+6.1f}%" for error in own)
                print(
                    f"{name:38} {1e3 * row['latency_s']:9.2f} {1e3 * row['launched_s']:9.2f} {shown}"
                )
            for label, mean in (("mean", np.mean), ("median", np.median)):
                shown = " ".join(f"{100 * value:6.1f}%" for value in mean(np.abs(errors), axis=0))
                print(f"{label:38} {'':19} {shown}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", choices=read_plan(), help="write this tree's predictions of a set"
    )
    parser.add_argument("--keep", type=Path, help="take measured rows from this folder")
    options = parser.parse_args()
    if options.write is not None:
        write_predictions(options.write)
    if options.keep is not None:
        keep_measured(options.keep)
    judge_rows()


if __name__ == "__main__":
    main()
