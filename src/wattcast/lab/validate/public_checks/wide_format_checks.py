"""Ledger rows of single cards in fp32, TF32 and fp16, through ``wattcast predict`` with options a
user can type.

Whole models in fp32 were measured on an A100 at 900 MHz and at ten other clocks, and on an A10
[Lee2026, artifact]. They have no operator lists, so they are judged as ``predict`` builds the
models. The training speeds of one V100, A10, A100 or RTX A6000 (Lambda's benchmark) are runs of
minutes at the card's own clock and limit: nothing of Wattcast was fitted to them.
Run: ``wattcast lab validate`` in the repository (WATTCAST_REFERENCE names the measurements).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.calibrate.scoring import (
    LedgerRow,
    make_ledger_row,
    mean_percent_error,
)
from wattcast.core.arrays import Array, Mask
from wattcast.lab.validate.public_checks.published_commands import AS_BUILT, ask_by_name
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_GPU,
    PublishedRun,
    fp32_runs,
    read_other_gpus,
    read_published_runs,
)
from wattcast.lab.validate.public_checks.wide_format_intervals import (
    WideRows,
    find_ends_without_networks,
)
from wattcast.lab.validate.typed_commands import (
    JudgedRow,
    TypedCommand,
    answer_commands,
    judge_rows,
)
from wattcast.predictor.prediction import Prediction

INSIDE = (82.0, 97.0)  # percent of the rows inside the interval
MUST = {"latency": 12.0, "power": 8.0}
SPEED = f"training time of one card, {AS_BUILT}"
_MUST_LONG = 8.0  # of the time of long runs


def fp32_rows(folder: Path) -> list[LedgerRow]:
    """Return errors and coverage of fp32 models on an A100 and an A10.

    ``inside`` counts intervals of latency that were learned without the network, and
    ``inside_as_shipped`` those that ``predict`` prints.
    """
    rows = ask_fp32_rows(folder)
    return judge_fp32_rows(folder, rows, answer_commands([row.command for row in rows]))


def judge_fp32_rows(
    folder: Path,
    rows: Sequence[JudgedRow],
    predictions: Sequence[Prediction],
) -> list[LedgerRow]:
    """Return the same of what was predicted for the rows of ``ask_fp32_rows``."""
    sets = _list_sets(folder)
    wide_rows = WideRows.from_judged(rows, predictions)
    low_s, high_s = find_ends_without_networks(wide_rows).T
    inside = (low_s <= wide_rows.measured_s) & (wide_rows.measured_s <= high_s)
    wheres = np.array([row.where for row in rows])
    ledger_rows = []
    for (where, _), runs in sets.items():
        places = np.flatnonzero(wheres == where)
        ledger_rows += _judge_runs(
            where,
            runs,
            [predictions[place] for place in places.tolist()],
            inside[places],
        )
    return ledger_rows


def ask_fp32_rows(folder: Path) -> list[JudgedRow]:
    """Return every published run in fp32 with the command that predicts it."""
    sets = _list_sets(folder)
    return [ask_by_name(run, gpu, where) for (where, gpu), runs in sets.items() for run in runs]


def _list_sets(folder: Path) -> dict[tuple[str, str], list[PublishedRun]]:
    """Return the runs of each set of the ledger, by its name and the GPU."""
    a100 = {
        where: fp32_runs(read_published_runs(folder, which))
        for where, which in (("A100 900 MHz", "900"), ("A100 other clocks", "clocks"))
    }
    sets = {(f"{where}, fp32, {AS_BUILT}", PUBLISHED_GPU): runs for where, runs in a100.items()}
    for gpu, runs in read_other_gpus(folder, fp32_runs).items():
        if runs:
            sets[f"{gpu}, fp32, {AS_BUILT}", gpu] = runs
    return sets


def _judge_runs(
    where: str,
    runs: Sequence[PublishedRun],
    predictions: Sequence[Prediction],
    without_network: Mask,
) -> list[LedgerRow]:
    ledger_rows = []
    for quantity, name, published in (
        ("latency", "latency_s", "published_s"),
        ("power", "power_w", "published_w"),
    ):
        predicted = np.array([float(getattr(p, name)) for p in predictions])
        low, high = np.array([getattr(p.interval, name) for p in predictions]).T
        true = np.array([getattr(run, name) for run in runs])
        as_shipped = (low <= true) & (true <= high)
        inside: dict[str, Any] = {"inside": _percent(as_shipped)}
        if quantity == "latency":
            inside = {
                "inside": _percent(without_network),
                "inside_as_shipped": _percent(as_shipped),
            }
        raw = mean_percent_error(predicted, np.array([getattr(run, published) for run in runs]))
        ledger_rows.append(
            make_ledger_row(
                where,
                quantity,
                len(runs),
                mean_percent_error(predicted, true),
                must=MUST[quantity],
                **inside,
                wanted=list(INSIDE),
                over_the_whole_window=None if raw is None else round(raw, 2),
            )
        )
    return ledger_rows


def _percent(inside: Mask) -> float:
    return round(100.0 * float(inside.mean()), 1)


_TASKS = {
    "resnet50": ("resnet50", None),
    "bert_base_squad": ("bert-base", 384),
    "bert_large_squad": ("bert-large", 384),
}
_LONG_CARDS = ("v100-sxm", "a100-pcie-40gb")


def training_speed_rows(folder: Path) -> list[LedgerRow]:
    """Return errors of the time of a training step on one card, by card and by network."""
    rows = ask_speed_rows(folder)
    predicted = np.array([answer["latency"] for answer in judge_rows(rows)])
    true = np.array([row.measured["latency"] for row in rows])
    gpus = np.array([row.command.options["gpu"] for row in rows])
    bert = np.array([row.command.subject.startswith("bert") for row in rows])
    long = np.isin(gpus, _LONG_CARDS)
    sets = {gpu: gpus == gpu for gpu in dict.fromkeys(gpus.tolist())}
    sets |= {"BERT on V100 and A100": bert & long, "ResNet-50 on V100 and A100": ~bert & long}
    return [
        _judge_speed(name, predicted[at], true[at], bool(np.all(long[at])))
        for name, at in sets.items()
    ]


def ask_speed_rows(folder: Path) -> list[JudgedRow]:
    """Return every published training speed with the command that predicts the time of a step."""
    with open(folder / "lambda" / "rows.csv", newline="", encoding="utf-8") as file:
        return [_ask_speed(row) for row in csv.DictReader(file)]


def _ask_speed(row: dict[str, str]) -> JudgedRow:
    """Return a row as PyTorch trains the model, in its format, without a compiler.

    Mixed precision is training in fp16. ResNet-50 keeps channels first: the benchmark's scripts do
    not set ``--memory-format`` of NVIDIA's ``main.py``, and their pictures are synthetic. SQuAD
    asks BERT where an answer begins and ends, so that no logits of the vocabulary are computed.
    ``run_squad.py`` updates masters of weights in fp16 (apex O2), and weights in fp32 operator by
    operator (``BertAdam``).
    """
    model, seq = _TASKS[row["task"]]
    batch = int(row["batch"])
    options: dict[str, Any] = {
        "gpu": row["gpu"],
        "batch": batch,
        "dtype": row["precision"],
    }
    if row["precision"] == "fp16":
        options |= {"update": "masters"}
    elif seq is not None:
        options |= {"update": "separate"}
    if seq is not None:
        options |= {
            "seq": seq,
            "attention": "eager",
            "head": "none",
        }
    options |= {
        "phase": "train",
        "stack": "eager",
        "force": True,
    }
    name = f"{row['task']} {row['precision']} on {row['gpu']}"
    measured = {"latency": batch / float(row["items_per_s"])}
    command = TypedCommand("predict", model, options)
    return JudgedRow(
        SPEED,
        name,
        command,
        measured,
        {"latency": "latency_s"},
    )


def _judge_speed(
    name: str,
    predicted_s: Array,
    true_s: Array,
    long: bool,
) -> LedgerRow:
    return make_ledger_row(
        SPEED,
        f"latency, {name}",
        len(true_s),
        mean_percent_error(predicted_s, true_s),
        must=_MUST_LONG if long else None,
        bias=round(100.0 * float(np.median(predicted_s / true_s - 1.0)), 1),
    )
