"""Judge whole pictures by those that ML.ENERGY measured on a B200.

Run: ``python -m studies.published_pictures`` (seconds; WATTCAST_REFERENCE names the measurements).

Prints a row for each published run on one GPU of a model whose pictures have all large parts here,
and the mean errors of time, watts and joules. No time or power was fitted to these rows or chosen
by them, but the width of the intervals of pictures was (``coefficients/pictures.yaml``).
Videos are left out: their decoders are not included. The published rows name neither the version
of the software nor its kernel of attention.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

import wattcast
from wattcast.core.errors import MissingTool
from wattcast.core.strict_files import reference_folder

ROOT = Path(__file__).resolve().parents[1]
ROWS = "mlenergy/diffusion.csv.gz"
MODELS = {
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": "pixart-sigma",
    "Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers": "hunyuan-dit",
}


@dataclass(frozen=True)
class JudgedPicture:
    """A published run beside its prediction; each pair is measured and predicted."""

    model: str
    batch: int
    latency_s: tuple[float, float]
    power_w: tuple[float, float]
    energy_j: tuple[float, float]  # a picture
    ends: dict[str, tuple[float, float]]  # of the predicted intervals of a batch


@cache
def judge_pictures() -> tuple[JudgedPicture, ...]:
    """Predict each published run on one B200, at its steps, size and batch."""
    folder = reference_folder(os.environ, ROOT)
    if folder is None:
        raise MissingTool(
            "the measurements of others are not here. Set WATTCAST_REFERENCE to their folder."
        )
    return tuple(_judge_row(row) for row in _read_rows(folder / ROWS))


def _read_rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["model_id"] in MODELS and row["num_gpus"] == "1":
                yield row


def _judge_row(row: dict[str, str]) -> JudgedPicture:
    batch = int(row["batch_size"])
    p = wattcast.predict(
        MODELS[row["model_id"]],
        "b200",
        batch=batch,
        image=int(row["image_height"]),
        steps=int(row["inference_steps"]),
    )
    return JudgedPicture(
        MODELS[row["model_id"]],
        batch,
        (float(row["batch_latency_s"]), p.latency_s),
        (float(row["avg_power_watts"]), p.power_w),
        (float(row["energy_per_image_joules"]), p.energy_j_per_item),
        {
            "latency_s": tuple(p.interval.latency_s.tolist()),
            "power_w": tuple(p.interval.power_w.tolist()),
        },
    )


def show_error(column: str) -> str:
    """Return the mean absolute error of ``latency_s``, ``power_w`` or ``energy_j``."""
    ratios = [_divide(getattr(picture, column)) for picture in judge_pictures()]
    return f"{100.0 * np.mean(np.abs(np.array(ratios) - 1.0)):.0f} %"


def _divide(pair: tuple[float, float]) -> float:
    measured, predicted = pair
    return predicted / measured


def main() -> None:
    """Print the rows and the mean errors."""
    for picture in judge_pictures():
        pairs = [
            f"{measured:8.4g} {predicted:8.4g} {predicted / measured:5.2f}"
            for measured, predicted in (picture.latency_s, picture.power_w, picture.energy_j)
        ]
        print(
            f"{picture.model:14} batch {picture.batch:2}  s {pairs[0]}  W {pairs[1]}  J {pairs[2]}"
        )
    for column in ("latency_s", "power_w", "energy_j"):
        print(f"mean absolute error of {column}: {show_error(column)}")


if __name__ == "__main__":
    main()
