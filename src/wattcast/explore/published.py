"""The explorations of the EnergAIzer paper [Lee2026, VI-B to VI-D] with our own predictor, beside its measurements.

The measurements belong to others and lie outside the project (``reference.py``); nothing is fitted to
them here. The workloads are Hugging Face base models, so without a language-model head.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.api import predict
from wattcast.arrays import Array
from wattcast.errors import BadInput, MissingTool, WattcastError
from wattcast.explore.choices import Choice, gpus

GPU = "a100-pcie-40gb"
MODELS = {"gpt2": "gpt2", "opt-1p3b": "opt-1.3b", "qwen2-1p5b": "qwen2-1.5b", "large": "bert-large"}
# the six workloads of figure 11: model, batch, tokens
DVFS = (
    ("gpt2", 8, 128),
    ("opt-1.3b", 2, 128),
    ("qwen2-1.5b", 1, 128),
    ("gpt2", 32, 512),
    ("opt-1.3b", 8, 2048),
    ("qwen2-1.5b", 1, 4096),
)
# figure 13 compares number formats and attention at a thousand tokens and more; fp32 was measured at these
FORMATS = (("opt-1.3b", 1, 1024), ("opt-1.3b", 4, 1024), ("opt-1.3b", 8, 1024), ("opt-1.3b", 16, 1024))
FORECAST = ("a100-pcie-40gb", "a100-sxm-80gb", "h100-sxm", "l40s")
_NAME = re.compile(
    r"(?P<kind>\w+?)model_(?P<config>[\w.-]+?)_p(?P<dtype>\w+?)_b(?P<batch>\d+)_s(?P<seq>\d+)_modeprefill"
    r"(?:_attneager)?_freq(?P<clock>\d+)_iter\d+\.csv"
)


@dataclass(frozen=True)
class Measured:
    """One row of the published measurements."""

    model: str
    dtype: str
    batch: int
    seq: int
    clock_hz: float
    temperature_c: float
    latency_s: float
    power_w: float


@dataclass(frozen=True)
class Curve:
    """One workload over clocks: measured and predicted."""

    model: str
    batch: int
    seq: int
    clock_hz: Array
    measured_s: Array
    measured_w: Array
    predicted_s: Array
    predicted_w: Array

    @property
    def name(self) -> str:
        """What a figure calls it."""
        return f"{self.model}, batch {self.batch}, {self.seq} tokens"

    def mape(self) -> dict[str, float]:
        """Mean absolute percentage errors of latency, power and energy."""
        pairs = {
            "latency": (self.predicted_s, self.measured_s),
            "power": (self.predicted_w, self.measured_w),
            "energy": (self.predicted_s * self.predicted_w, self.measured_s * self.measured_w),
        }
        return {name: float(np.mean(np.abs(p / m - 1.0))) for name, (p, m) in pairs.items()}


@dataclass(frozen=True)
class Format:
    """One workload in one number format and attention; measured where somebody did."""

    model: str
    batch: int
    seq: int
    dtype: str
    attention: str
    predicted_s: float
    predicted_w: float
    measured_s: float | None
    measured_w: float | None


def measured(folder: Path | None) -> list[Measured]:
    """The published A100 rows."""
    if folder is None:
        raise MissingTool("the published measurements are not here. Set WATTCAST_REFERENCE to their folder.")
    rows = []
    for name in ("a100_pcie_40gb_900mhz.csv", "a100_pcie_40gb_dvfs.csv"):
        path = folder / "energaizer" / "measurements" / name
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror}).") from None
        rows += [row for line in csv.DictReader(lines) if (row := _row(line)) is not None]
    return rows


def _row(line: dict[str, str]) -> Measured | None:
    match = _NAME.fullmatch(line["workload"])
    if match is None or match["config"] not in MODELS:
        return None
    latency_s = float(line["time"]) / 1e3
    return Measured(
        model=MODELS[match["config"]],
        dtype=match["dtype"],
        batch=int(match["batch"]),
        seq=int(match["seq"]),
        clock_hz=float(line["avg_freq"]) * 1e6,
        temperature_c=float(line["temp"]),
        latency_s=latency_s,
        power_w=float(line["energy"]) / latency_s,
    )


def dvfs(rows: Sequence[Measured]) -> list[Curve]:
    """The six workloads over clocks, eager attention, bf16, at the clocks and temperatures measured."""
    curves = []
    for model, batch, seq in DVFS:
        mine = sorted(
            (r for r in rows if (r.model, r.batch, r.seq, r.dtype) == (model, batch, seq, "bf16")),
            key=lambda r: r.clock_hz,
        )
        if not mine:
            raise BadInput(f"{model}, batch {batch}, {seq} tokens: no published row. Is the data complete?")
        clock_hz = np.array([r.clock_hz for r in mine])
        found = predict(
            model,
            GPU,
            clock=np.minimum(clock_hz, 1410e6),
            temperature=np.array([r.temperature_c for r in mine]),
            batch=batch,
            seq=seq,
            attention="eager",
            head="none",
        )
        seconds, watts = np.array([r.latency_s for r in mine]), np.array([r.power_w for r in mine])
        curves.append(Curve(model, batch, seq, clock_hz, seconds, watts, found.latency_s, found.power_w))
    return curves


def formats(rows: Sequence[Measured]) -> list[Format]:
    """fp32, bf16 and bf16 with fused attention at 900 MHz."""
    found = []
    for model, batch, seq in FORMATS:
        for dtype, attention in (("fp32", "eager"), ("bf16", "eager"), ("bf16", "flash")):
            told = predict(
                model, GPU, clock=900e6, batch=batch, seq=seq, dtype=dtype, attention=attention, head="none"
            )
            alike = [r for r in rows if (r.model, r.batch, r.seq, r.dtype) == (model, batch, seq, dtype)]
            near = [r for r in alike if abs(r.clock_hz - 900e6) < 1e6 and attention == "eager"]
            seconds = float(np.mean([r.latency_s for r in near])) if near else None
            watts = float(np.mean([r.power_w for r in near])) if near else None
            row = (model, batch, seq, dtype, attention, float(told.latency_s), float(told.power_w), seconds, watts)
            found.append(Format(*row))
    return found


def forecast() -> list[Choice]:
    """One workload on the GPUs of the paper's Table IV; nothing was measured to compare with here."""
    found = gpus("bert-large", FORECAST, batch=32, seq=512, attention="eager", head="none")
    if any(choice.reason for choice in found):
        raise WattcastError(f"a forecast failed: {'; '.join(choice.reason for choice in found)}")
    return found
