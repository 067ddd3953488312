"""Which whole models are measured, and how: rows in order of worth, in Wattcast's own terms.

``plan.csv`` lists the rows; ``models.csv`` has the published dimensions, so that a bare GPU node needs no
catalogue reader (a test holds both against ``workload/catalogue``). A tier is measured whole before the
next, and inside a tier rows of one model lie together, so that a model is built once a tier.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wattcast.errors import BadInput

_FOLDER = Path(__file__).parent
VISION = ("vit", "resnet")


@dataclass(frozen=True)
class Dims:
    """Published dimensions of one model; zero where an architecture has no such size."""

    model: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    tied: bool

    @property
    def vision(self) -> bool:
        """Whether it takes pictures."""
        return self.architecture in VISION


@dataclass(frozen=True)
class ModelSpec:
    """One row to measure: the options of ``wattcast predict``, and who launches the kernels.

    ``graph`` true: one CUDA graph of a whole iteration, so that the GPU never waits for the host.
    """

    model: str
    phase: str
    batch: int
    seq: int | None
    attention: str = "flash"
    graph: bool = True
    tier: int = 1
    dtype: str = "bf16"

    @property
    def id(self) -> str:
        """The same in every run, so that a campaign can be continued."""
        size = f"-s{self.seq}" if self.seq else ""
        run = "graph" if self.graph else "eager-launch"
        return f"model-{self.model}-{self.phase}-b{self.batch}{size}-{self.attention}-{self.dtype}-{run}"

    @property
    def head(self) -> str:
        """For which tokens the language-model head runs; empty for a model of pictures."""
        if dims_of(self.model).vision:
            return ""
        if self.phase == "train":
            return "all"
        return "none" if dims_of(self.model).architecture == "bert" else "last"

    @property
    def workload(self) -> dict[str, Any]:
        """The options of ``wattcast predict`` that say the same."""
        options = {
            "batch": self.batch,
            "seq": self.seq,
            "phase": self.phase,
            "dtype": self.dtype,
            "attention": self.attention,
            "head": self.head or None,
            "stack": "eager",
        }
        return {name: value for name, value in options.items() if value is not None}


@cache
def plan() -> tuple[ModelSpec, ...]:
    """Every row, the most valuable first."""
    rows = _table("plan.csv")
    specs = [
        ModelSpec(
            row["model"],
            row["phase"],
            int(row["batch"]),
            int(row["seq"]) if row["seq"] else None,
            row["attention"],
            row["run"] == "graph",
            int(row["tier"]),
        )
        for row in rows
    ]
    return tuple(sorted(specs, key=lambda spec: spec.tier))


@cache
def dims_of(model: str) -> Dims:
    """Published dimensions of a planned model."""
    for row in _table("models.csv"):
        if row["model"] == model:
            numbers = {name: int(row[name]) for name in Dims.__annotations__ if name in row and row[name].isdigit()}
            return Dims(model=model, architecture=row["architecture"], tied=row["tied"] == "yes", **numbers)
    known = ", ".join(row["model"] for row in _table("models.csv"))
    raise BadInput(f"no dimensions of {model} in models.csv, which has {known}.")


@cache
def _table(name: str) -> tuple[dict[str, str], ...]:
    with (_FOLDER / name).open(newline="", encoding="utf-8") as stream:
        return tuple(csv.DictReader(stream))
