"""Read the published whole-model measurements [Lee2026, artifact] from the folder of reference
data.

The sets of ``public_checks`` import it. The data belong to others and stay
outside the project.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection
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


@dataclass(frozen=True)
class PollingWindow:
    """How long a run was polled beyond its iterations, and what the card drew meanwhile."""

    beyond_s: float
    power_w: float

    def remove(
        self,
        latency_s: float,
        power_w: float,
        iterations: int,
    ) -> tuple[float, float]:
        """Return time and power of the iterations alone, from time and power of the whole window
        over them.
        """
        window_s = latency_s * iterations
        busy_s = window_s - self.beyond_s
        if busy_s < self.beyond_s:  # a run that failed: nothing but the window is left
            return latency_s, power_w
        return busy_s / iterations, (power_w * window_s - self.power_w * self.beyond_s) / busy_s


# Iterations were chosen to take 30 s, and windows are 31.6 s (A100) and 31.1 s (A10) long, whatever
# the model and the clock. Runs that failed at once show
# the rest alone: 1.6 to 2.3 s at 56 to 93 W, in the median 61 W, on the A100, 1.3 and 1.5 s at 49
# and 53 W on the A10. Without it, runs that the A100's limit of 250 W slowed down have drawn 250 W;
# as published 242 W.
_WINDOWS = {"a100": PollingWindow(1.6, 60.0), "a10": PollingWindow(1.1, 50.0)}


def find_window(gpu: str) -> PollingWindow:
    """Return the polling window of the runs of a GPU; none is known of others."""
    return _WINDOWS.get(gpu.partition("-")[0], PollingWindow(0.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class PublishedRun(MeasuredModel):
    """One published measurement, and what its name says of it.

    Time and power are those of its iterations, without the rest of the polling window.
    """

    model: str
    dtype: str
    batch: int
    seq: int | None
    set_hz: float
    listed: bool  # the artifact has an operator list for it
    published_s: float  # time and power as they were published, over the whole window
    published_w: float

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


def parse_run(
    line: dict[str, str],
    lists: Collection[str],
    gpu: str,
) -> PublishedRun:
    """Parse a row of a GPU; ``lists`` are names of the runs that the artifact has operators of."""
    measured = parse_published_run(line)
    match = PUBLISHED_NAME.fullmatch(line["workload"])
    if match is None or measured.power_w is None:
        raise BadInput(f"{line['workload']}: not the name of a published run")
    stem, _, ending = line["workload"].partition("_iter")
    iterations = int(ending.removesuffix(".csv"))
    latency_s, power_w = find_window(gpu).remove(measured.latency_s, measured.power_w, iterations)
    return PublishedRun(
        **(vars(measured) | {"latency_s": latency_s, "power_w": power_w}),
        published_s=measured.latency_s,
        published_w=measured.power_w,
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
    return [parse_run(line, lists, PUBLISHED_GPU) for line in csv.DictReader(lines)]


def _lists(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "energaizer" / "workloads").glob("*.json")}


# Near-idle power and times far too short (README of the reference data).
_CORRUPT = {"a10": (("opt-1.3b", 8, 2048), ("qwen2-1.5b", 4, 4096))}
_OTHERS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100": "h100-sxm",
    "l40s": "l40s",
    "a10": "a10",
}


def read_other_gpus(
    folder: Path, select: Callable[[list[PublishedRun]], list[PublishedRun]] | None = None
) -> dict[str, list[PublishedRun]]:
    """Read clean rows of other GPUs from files of the same form (``h100*.csv`` ...), by catalogue
    name.
    """
    select = select or clean_runs
    lists = _lists(folder)
    runs_of_gpu: dict[str, list[PublishedRun]] = {}
    for path in sorted((folder / "energaizer" / "measurements").glob("*.csv")):
        names = [
            gpu
            for start, gpu in _OTHERS.items()
            if path.name.startswith(start) and path.name[len(start) :][:1] in "_."
        ]
        if names:
            lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
            runs = [parse_run(line, lists, names[0]) for line in lines]
            whole = [r for r in runs if (r.model, r.batch, r.seq) not in _CORRUPT.get(names[0], ())]
            runs_of_gpu.setdefault(names[0], []).extend(select(whole))
    return runs_of_gpu


def read_published_file(folder: Path, gpu: str) -> list[PublishedRun]:
    """Read all rows of another GPU that are not corrupt, with or without an operator list."""
    lists = _lists(folder)
    runs: list[PublishedRun] = []
    for path in sorted((folder / "energaizer" / "measurements").glob(f"{gpu}_*.csv")):
        lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        runs += [parse_run(line, lists, gpu) for line in lines]
    corrupt = _CORRUPT.get(gpu, ())
    return [run for run in runs if (run.model, run.batch, run.seq) not in corrupt]


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


def clean_runs(runs: list[PublishedRun]) -> list[PublishedRun]:
    """Select rows that have an operator list and are not corrupt, and average repeats.

    There are 68 workloads at 900 MHz, and 163 rows over clocks.
    """
    return _average_repeats([r for r in runs if r.listed and not r.corrupt])


def fp32_runs(runs: list[PublishedRun]) -> list[PublishedRun]:
    """Select the rows in fp32, none of which has an operator list, and average repeats."""
    return _average_repeats([r for r in runs if r.dtype == "fp32" and not r.corrupt])


def _average_repeats(runs: list[PublishedRun]) -> list[PublishedRun]:
    groups: dict[tuple[str, float], list[PublishedRun]] = {}
    for r in runs:
        groups.setdefault((r.name, r.set_hz), []).append(r)
    averaged = ("clock_hz", "temperature_c", "latency_s", "power_w", "published_s", "published_w")
    return [
        replace(
            alike[0],
            **{name: sum(getattr(r, name) for r in alike) / len(alike) for name in averaged},
        )
        for alike in groups.values()
    ]
