"""Read the published whole-model measurements [Lee2026, artifact] from the folder of reference
data.

The sets of ``public_checks`` import it. The data belong to others and stay
outside the project.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from wattcast.calibrate.calibration import MeasuredModel
from wattcast.calibrate.calibration_rows import (
    PUBLISHED_MODELS,
    PUBLISHED_NAME,
    parse_published_run,
)
from wattcast.core.errors import BadInput

PUBLISHED_GPU = "a100-pcie-40gb"
PUBLISHED_FILES = {"900": "a100_pcie_40gb_900mhz.csv", "clocks": "a100_pcie_40gb_dvfs.csv"}


@dataclass(frozen=True, kw_only=True)
class PublishedRun(MeasuredModel):
    """One published measurement, and what its name says of it."""

    model: str
    dtype: str
    batch: int
    seq: int | None
    set_hz: float
    listed: bool  # the artifact has an operator list for it

    @property
    def corrupt(self) -> bool:
        """Near-idle power and a time far too short (README of the reference data)."""
        return (self.model, self.batch, self.seq) == ("qwen2-1.5b", 8, 4096)

    @property
    def energy_j(self) -> float:
        """Joules of an iteration."""
        assert self.latency_s is not None
        assert self.power_w is not None
        return self.power_w * self.latency_s


def parse_run(line: dict[str, str], lists: Collection[str]) -> PublishedRun:
    """Parse a row; ``lists`` are names of the runs that the artifact has operators of."""
    measured = parse_published_run(line)
    match = PUBLISHED_NAME.fullmatch(line["workload"])
    if match is None:
        raise BadInput(f"{line['workload']}: not the name of a published run")
    stem = line["workload"].split("_iter")[0]
    return PublishedRun(
        **vars(measured),
        model=PUBLISHED_MODELS[match["kind"], match["config"]],
        dtype=match["dtype"],
        batch=int(match["batch"]),
        seq=int(match["seq"]) if match["seq"] else None,
        set_hz=float(match["clock"]) * 1e6,
        listed=stem in lists or re.sub(r"(_attneager)?_freq\d+$", "", stem) in lists,
    )


def read_published_runs(folder: Path, which: str) -> list[PublishedRun]:
    """Read the published rows at 900 MHz (``900``) or over clocks (``clocks``)."""
    path = folder / "energaizer" / "measurements" / PUBLISHED_FILES[which]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"{path.name}: cannot be read ({error.strerror}).") from None
    lists = _lists(folder)
    return [parse_run(line, lists) for line in csv.DictReader(lines)]


def _lists(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "energaizer" / "workloads").glob("*.json")}


# Near-idle power and times far too short (README of the reference data).
_CORRUPT = {"a10": (("opt-1.3b", 8, 2048), ("qwen2-1.5b", 4, 4096))}
_OTHERS = {"a100_sxm": "a100-sxm-80gb", "h100": "h100-sxm", "l40s": "l40s", "a10": "a10"}


def read_other_gpus(folder: Path) -> dict[str, list[PublishedRun]]:
    """Read clean rows of other GPUs from files of the same form (``h100*.csv`` ...), by catalogue
    name.
    """
    lists = _lists(folder)
    found: dict[str, list[PublishedRun]] = {}
    for path in sorted((folder / "energaizer" / "measurements").glob("*.csv")):
        names = [
            gpu
            for start, gpu in _OTHERS.items()
            if path.name.startswith(start) and path.name[len(start) :][:1] in "_."
        ]
        if names:
            lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
            runs = [parse_run(line, lists) for line in lines]
            whole = [r for r in runs if (r.model, r.batch, r.seq) not in _CORRUPT.get(names[0], ())]
            found.setdefault(names[0], []).extend(clean_runs(whole))
    return found


def select_reported_runs(folder: Path, clean_rows: list[PublishedRun]) -> list[PublishedRun]:
    """Select the rows over clocks that the artifact's own report covers."""
    path = folder / "energaizer" / "measurements" / "artifact_dvfs_report.csv"
    report = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    keys = set()
    for row in report:
        model = PUBLISHED_MODELS[row["model"], row["config"]]
        keys.add((model, int(row["batch"]), int(row["seq"]), row["prec"], int(row["freq"])))
    return [
        r for r in clean_rows if (r.model, r.batch, r.seq, r.dtype, round(r.set_hz / 1e6)) in keys
    ]


def clean_runs(found: list[PublishedRun]) -> list[PublishedRun]:
    """Select rows that have an operator list and are not corrupt, and average repeats.

    There are 68 workloads at 900 MHz, and 163 rows over clocks.
    """
    groups: dict[tuple[str, float], list[PublishedRun]] = {}
    for r in found:
        if r.listed and not r.corrupt:
            groups.setdefault((r.name, r.set_hz), []).append(r)
    averaged = ("clock_hz", "temperature_c", "latency_s", "power_w")
    return [
        replace(
            alike[0],
            **{name: sum(getattr(r, name) for r in alike) / len(alike) for name in averaged},
        )
        for alike in groups.values()
    ]
