"""Golden predictions of 200 configurations; ``python tests/golden/predictions.py`` writes the
table.

A change that is not meant to change predictions leaves all of them within a millionth. One that is
meant to makes the table anew and says in its commit which rows moved, and why."""

from __future__ import annotations

import csv
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import wattcast
from wattcast.core.errors import WattcastError
from wattcast.workload import model_catalogue
from wattcast.workload.model_catalogue import ModelKind

TABLE = Path(__file__).resolve().with_name("predictions.csv")
COUNT = 200
RTOL = 1e-6
COLUMNS = (
    "model",
    "gpu",
    "options",
    "latency_s",
    "power_w",
    "energy_j",
    "clock_hz",
    "low_s",
    "high_s",
    "low_w",
    "high_w",
)
GPUS = "h200 h200 h200 h100-sxm a100-pcie-40gb a100-sxm-80gb l40s b200 a10 v100-sxm l4".split()
# Named, so that a new catalogue model draws no other configurations; new ones have tests of their
# own.
MODELS = (
    "bert-base bert-large clip-base clip-large deepseek-v3 dit-xl-2 gemma-2b gemma-7b gpt2 gpt2-large "
    "gpt2-medium gpt2-xl llama2-13b llama2-70b llama2-7b llama3-70b llama3-8b mistral-7b mixtral-8x7b "
    "mobilevit-s opt-1.3b opt-30b opt-6.7b phi-2 phi-3-mini qwen2-1.5b qwen2-7b qwen3-0.6b qwen3-1.7b "
    "qwen3-14b qwen3-30b-a3b qwen3-32b qwen3-4b qwen3-8b resnet101 resnet50 sd1.5-unet vit-base vit-large "
    "whisper-base whisper-large-v3 whisper-medium whisper-small whisper-tiny "
).split()


Row = tuple[str, str, dict[str, object], list[float] | str]


def draw_configurations() -> list[tuple[str, str, dict[str, object]]]:
    """Draw the same configurations each time: all of ``MODELS`` with phases, stacks, clocks and
    parallelism.
    """
    rng = random.Random(20261115)
    known = sorted(MODELS)
    drawn = []
    for i in range(COUNT):
        model, gpu = known[i % len(known)], rng.choice(GPUS)
        kind = model_catalogue.load_model(model).kind
        options: dict[str, object] = {"batch": rng.choice([1, 2, 8, 32])}
        if kind is ModelKind.LANGUAGE:
            options |= {
                "phase": rng.choice(["prefill", "decode", "train"]),
                "seq": rng.choice([128, 512, 2048]),
            }
            stacks = (
                ["eager", "compiled", "engine"]
                if options["phase"] != "train"
                else ["eager", "compiled"]
            )
            options["stack"] = rng.choice(stacks)
        else:
            options |= {
                "phase": rng.choice(["forward", "train"]),
                "stack": rng.choice(["eager", "compiled"]),
            }
        if rng.random() < 0.2:
            options["clock"] = rng.choice(["900MHz", "1.2GHz"])
        if rng.random() < 0.15 and options.get("phase") != "train" and kind is ModelKind.LANGUAGE:
            options["tp"] = 2
        drawn.append((model, gpu, options))
    return drawn


def predict_row(model: str, gpu: str, options: dict[str, object]) -> list[float] | str:
    """Latency, power, energy, clock and the ends of the intervals; or the refusal, in its first
    words.
    """
    try:
        p = wattcast.predict(model, gpu=gpu, force=True, **options)
    except WattcastError as error:
        return type(error).__name__
    return _list_figures(p)


def _list_figures(prediction: wattcast.Prediction) -> list[float]:
    p, ends = prediction, prediction.interval
    values = [p.latency_s, p.power_w, p.energy_j, p.clock_hz, *ends.latency_s, *ends.power_w]
    return [float(np.asarray(value)) for value in values]


def predict_table(rows: Sequence[Row]) -> list[list[float] | str]:
    """Predict rows in the order of the table; those of one GPU at one clock in one call, which
    takes half the time and gives the same figures.
    """
    groups = defaultdict[tuple[str, object], list[int]](list)
    found: list[list[float] | str] = [""] * len(rows)
    for place, (model, gpu, options, expected) in enumerate(rows):
        if isinstance(expected, str):  # a refusal, which would refuse the whole call
            found[place] = predict_row(model, gpu, options)
        else:
            groups[gpu, options.get("clock")].append(place)
    for (gpu, clock), places in groups.items():
        shared = {} if clock is None else {"clock": clock}
        workloads = []
        for place in places:
            model, _, options, _ = rows[place]
            own = {name: value for name, value in options.items() if name != "clock"}
            workloads.append((model, own))
        several = wattcast.predict_many(workloads, gpu, force=True, **shared)
        for place, prediction in zip(places, several, strict=True):
            found[place] = _list_figures(prediction)
    return found


def read_table() -> list[Row]:
    """The rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))[1:]
    return [
        (
            model,
            gpu,
            json.loads(options),
            values[0] if len(set(values)) == 1 else [float(v) for v in values],
        )
        for model, gpu, options, *values in rows
    ]


if __name__ == "__main__":
    with TABLE.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for model, gpu, options in draw_configurations():
            found = predict_row(model, gpu, options)
            values = (
                [found] * (len(COLUMNS) - 3) if isinstance(found, str) else [repr(v) for v in found]
            )
            writer.writerow([model, gpu, json.dumps(options, sort_keys=True), *values])
    sys.stdout.write(f"{COUNT} predictions in {TABLE.name}\n")
