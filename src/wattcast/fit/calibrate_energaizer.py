"""Published whole-model rows [Lee2026, artifact]: by clock, on an A100 and others, with their known defects marked.

The rows belong to others and stay outside the project (``reference.py``). ``workload`` names model, number format,
batch, length and clock; ``energy`` is J and ``time`` ms per iteration. Models are built from our own templates
(Hugging Face base models, eager attention, no head; ``calibrate_operators.py``), since the artifact's operator lists
leave copies and casts out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from wattcast.errors import BadInput, clip
from wattcast.fit.calibrate_operators import run_graph
from wattcast.workload.graph import Graph

GPU = "a100-pcie-40gb"
HEADER = ("workload", "energy", "time", "avg_freq", "temp")
FILES = {"900": "a100_pcie_40gb_900mhz.csv", "clocks": "a100_pcie_40gb_dvfs.csv"}
_MODELS = {
    ("gpt2model", "gpt2"): "gpt2",
    ("optmodel", "opt-1p3b"): "opt-1.3b",
    ("qwen2model", "qwen2-1p5b"): "qwen2-1.5b",
    ("bertmodel", "large"): "bert-large",
    ("vitmodel", "large"): "vit-large",
    ("mobilevitmodel", "small"): "mobilevit-s",
    ("resnet101", ""): "resnet101",
}
_LIKE = "gpt2model_gpt2_pbf16_b8_s128_modeprefill_freq900_iter4001.csv"
_NAME = re.compile(
    r"(?P<kind>[a-z0-9]+)_(?P<config>[\w.-]*?)_p(?P<dtype>bf16|fp32)_b(?P<batch>\d+)(?:_s(?P<seq>\d+)_modeprefill)?"
    r"(?:_attneager)?_freq(?P<clock>\d+)_iter\d+\.csv"
)


@dataclass(frozen=True)
class RunRow:
    """One measured row, in SI units."""

    model: str
    dtype: str
    batch: int
    seq: int | None
    set_hz: float
    clock_hz: float  # mean really run
    temperature_c: float
    latency_s: float
    power_w: float
    listed: bool  # the artifact has an operator list for it
    corrupt: bool

    @property
    def energy_j(self) -> float:
        """Joules of an iteration."""
        return self.power_w * self.latency_s

    @property
    def name(self) -> str:
        """What a figure calls it."""
        length = f" s{self.seq}" if self.seq else ""
        return f"{self.model} {self.dtype} b{self.batch}{length}"

    @property
    def graph(self) -> Graph:
        """The operators of it."""
        return _graph(self.model, self.batch, self.seq, self.dtype)


def rows(folder: Path, which: str) -> list[RunRow]:
    """The rows at 900 MHz (``900``) or over clocks (``clocks``)."""
    path = folder / "energaizer" / "measurements" / FILES[which]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"{path.name}: cannot be read ({error.strerror}).") from None
    lists = _lists(folder)
    return [_row(line, lists) for line in csv.DictReader(lines)]


def _lists(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "energaizer" / "workloads").glob("*.json")}


def run_rows(lines: Iterable[dict[str, str]]) -> list[RunRow]:
    """Rows of this form from anywhere."""
    return [_row(line, set()) for line in lines]


_OTHERS = {"a100_sxm": "a100-sxm-80gb", "h100": "h100-sxm", "l40s": "l40s", "a10": "a10"}


def others(folder: Path) -> dict[str, list[RunRow]]:
    """Clean rows of other GPUs in files of the same form (``h100*.csv`` ...), by catalogue name, where there are."""
    lists = _lists(folder)
    found: dict[str, list[RunRow]] = {}
    for path in sorted((folder / "energaizer" / "measurements").glob("*.csv")):
        names = [
            gpu
            for start, gpu in _OTHERS.items()
            if path.name.startswith(start) and path.name[len(start) :][:1] in "_."
        ]
        if names:
            lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
            found.setdefault(names[0], []).extend(clean([_row(line, lists) for line in lines]))
    return found


def published(folder: Path, clean_rows: list[RunRow]) -> list[RunRow]:
    """Those of the rows over clocks that the artifact's own report covers."""
    path = folder / "energaizer" / "measurements" / "artifact_dvfs_report.csv"
    report = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    keys = {
        (_MODELS[r["model"], r["config"]], int(r["batch"]), int(r["seq"]), r["prec"], int(r["freq"])) for r in report
    }
    return [r for r in clean_rows if (r.model, r.batch, r.seq, r.dtype, round(r.set_hz / 1e6)) in keys]


def clean(found: list[RunRow]) -> list[RunRow]:
    """Rows that are joinable to an operator list and not corrupt; repeats become their mean.

    That leaves 68 workloads at 900 MHz, and 163 rows over clocks.
    """
    groups: dict[tuple[str, float], list[RunRow]] = {}
    for r in found:
        if r.listed and not r.corrupt:
            groups.setdefault((r.name, r.set_hz), []).append(r)
    return [_mean(alike) for alike in groups.values()]


def _mean(alike: list[RunRow]) -> RunRow:
    means = {
        name: sum(getattr(r, name) for r in alike) / len(alike)
        for name in ("clock_hz", "temperature_c", "latency_s", "power_w")
    }
    return replace(alike[0], **means)


def _row(line: dict[str, str], lists: set[str]) -> RunRow:
    match = _NAME.fullmatch(line["workload"])
    if match is None or (match["kind"], match["config"]) not in _MODELS:
        raise BadInput(f"a run named {clip(line['workload'])} is not understood: wanted a name such as {_LIKE}.")
    model, batch = _MODELS[match["kind"], match["config"]], int(match["batch"])
    seq = int(match["seq"]) if match["seq"] else None
    try:
        latency_s, energy_j, mhz, celsius = (float(line[k]) for k in ("time", "energy", "avg_freq", "temp"))
    except ValueError:
        raise BadInput(f"{line['workload']}: time, energy, avg_freq and temp have to be numbers.") from None
    if not (latency_s > 0 and energy_j > 0 and mhz > 0):
        raise BadInput(f"{line['workload']}: time, energy and avg_freq have to be above zero.")
    latency_s /= 1e3
    stem = line["workload"].split("_iter")[0]
    return RunRow(
        model=model,
        dtype=match["dtype"],
        batch=batch,
        seq=seq,
        set_hz=float(match["clock"]) * 1e6,
        clock_hz=mhz * 1e6,
        temperature_c=celsius,
        latency_s=latency_s,
        power_w=energy_j / latency_s,
        listed=stem in lists or re.sub(r"(_attneager)?_freq\d+$", "", stem) in lists,
        corrupt=(model, batch, seq) == ("qwen2-1.5b", 8, 4096),
    )


@lru_cache(maxsize=256)
def _graph(model: str, batch: int, seq: int | None, dtype: str) -> Graph:
    return run_graph(model, batch, seq, dtype)
