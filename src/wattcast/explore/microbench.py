"""What microbenchmarks found on a device: rates and energies from their rows, curves, known faults.

A row holds what was read (docs/method/microbenchmarks.md). Energy of a launch is mean power times its time;
energy above idle leaves out what the card draws with a context open and no work.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from wattcast.dtypes import Dtype
from wattcast.errors import BadInput, MissingSpecification, bad_value
from wattcast.hardware import Gpu
from wattcast.records import Plain, read_lines

RESULTS_FILE = "microbench.jsonl"


@dataclass(frozen=True)
class Result:
    """One measured row and what follows from it. ``None`` means not measured."""

    name: str
    group: str
    operation: str
    curve: str
    at: float
    repeat: int
    version: int  # of the kernel
    specification: str
    operations: float | None
    byte: float | None
    flop: float | None
    time_s: float | None  # of a launch
    per_cycle_sm: float | None
    power_w: float | None
    max_power_w: float | None
    idle_power_w: float | None
    memory_power_w: float | None
    clock_hz: float | None  # as NVML reports it
    effective_clock_hz: float | None
    cycles: float | None  # of a launch, on a multiprocessor
    ticks: int
    flags: tuple[str, ...]
    card: str = ""  # its UUID, where the file of runs beside the rows names it

    @property
    def energy_j(self) -> float | None:
        """Of a launch."""
        return self.power_w * self.time_s if self.power_w and self.time_s else None

    @property
    def operation_s(self) -> float | None:
        """Time an operation takes when the whole chip does them side by side."""
        return self.time_s / self.operations if self.time_s and self.operations else None

    @property
    def operation_j(self) -> float | None:
        """Energy of an operation, idle power included."""
        return self.energy_j / self.operations if self.energy_j and self.operations else None

    @property
    def operation_above_idle_j(self) -> float | None:
        """Energy of an operation above idle."""
        if self.operation_s is None or self.power_w is None or self.idle_power_w is None:
            return None
        return max(self.power_w - self.idle_power_w, 0.0) * self.operation_s

    @property
    def operations_per_j(self) -> float | None:
        """What a joule buys."""
        return 1.0 / self.operation_j if self.operation_j else None

    @property
    def byte_per_s(self) -> float | None:
        """Bytes moved in a second, as the source counts them."""
        return self.byte / self.time_s if self.byte and self.time_s else None


def read_results(path: Path) -> tuple[Result, ...]:
    """Rows of a file, or of ``microbench.jsonl`` in a folder.

    Failed rows are left out; the last of an id counts, and of a name only its newest kernel.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise bad_value(str(path), f"a folder with {RESULTS_FILE}, or such a file", "none")
    latest: dict[str, Plain] = {}
    for row in read_lines(file):
        if not row.get("error"):
            latest[str(row.get("id"))] = row
    if not latest:
        raise BadInput(f"{file.name} holds no row without an error: measure again (wattcast measure microbench).")
    cards = _cards(file.parent)
    found = [_result(row, file.name, cards.get(str(row.get("run")), "")) for row in latest.values()]
    newest: dict[str, int] = {}
    for r in found:
        newest[r.name] = max(newest.get(r.name, 1), r.version)
    return tuple(r for r in found if r.version == newest[r.name])


def _cards(folder: Path) -> dict[str, str]:
    """The card of every run."""
    file = folder / "runs.jsonl"
    return {str(r.get("run")): str(r.get("card_uuid", "")) for r in read_lines(file)} if file.is_file() else {}


def _result(row: Plain, where: str, card: str) -> Result:
    def number(name: str) -> float | None:
        value = row.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or not np.isfinite(value) or value < 0:
            raise bad_value(f"{where}: {row.get('id')}: {name}", "a number, zero or more", value)
        return float(value)

    return Result(
        name=str(row.get("name", "")),
        group=str(row.get("group", "")),
        operation=str(row.get("operation", "")),
        curve=str(row.get("curve", "")),
        at=number("at") or 0.0,
        repeat=int(row.get("repeat", 0)),
        version=int(row.get("version", 1)),
        specification=str(row.get("specification", "")),
        operations=number("operations"),
        byte=number("byte"),
        flop=number("flop"),
        time_s=number("launch_s"),
        per_cycle_sm=number("operations_per_cycle_sm"),
        power_w=number("power_w"),
        max_power_w=number("max_power_w"),
        idle_power_w=number("idle_power_w"),
        memory_power_w=number("memory_power_w"),
        clock_hz=number("sm_clock_hz"),
        effective_clock_hz=number("effective_clock_hz"),
        cycles=number("cycles"),
        ticks=int(row.get("ticks", 0)),
        flags=tuple(row.get("flags", ())),
        card=card,
    )


def described(path: Path) -> str:
    """Card, driver and date of the runs beside results, for captions; nothing where they are not on file."""
    file = (path if path.is_dir() else path.parent) / "runs.jsonl"
    runs = list(read_lines(file)) if file.is_file() else []
    if not runs:
        return ""
    last = runs[-1]
    return f"{last.get('card_name', '')}, driver {last.get('driver', '')}, {str(last.get('date', ''))[:10]}"


def results_of(gpu: Gpu) -> tuple[Result, ...]:
    """Results that ship with Wattcast for a GPU; a sentence when there are none yet."""
    folder = results_folder(gpu)
    if not (folder / RESULTS_FILE).is_file():
        raise MissingSpecification(
            f"no microbenchmark results of the {gpu.name} are here yet. Measure them on one (wattcast measure "
            f"microbench --out DIR) and say --results DIR."
        )
    return read_results(folder)


def results_folder(gpu: Gpu) -> Path:
    """Where results that ship would lie."""
    return Path(str(files("wattcast"))) / "database" / gpu.name


def first(results: Iterable[Result]) -> dict[str, Result]:
    """Results of the first round, by name."""
    return {r.name: r for r in results if r.repeat == 0}


def curve(results: Iterable[Result], name: str) -> list[Result]:
    """Points of a curve, in order."""
    return sorted((r for r in results if r.curve == name and r.repeat == 0), key=lambda r: r.at)


@cache
def _stated() -> dict[tuple[str, str], float]:
    text = files("wattcast.explore").joinpath("throughput.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {(row["compute_capability"], row["key"]): float(row["per_cycle_sm"]) for row in rows}


def specified(gpu: Gpu, result: Result) -> float | None:
    """Operations per cycle and SM the vendor states for a benchmark, or None where none is stated."""
    key = result.specification
    cuda, tensor = gpu.pipes.cuda_flop_per_cycle, gpu.pipes.tensor_flop_per_cycle
    halves = {
        "fp32": (Dtype.FP32, 2.0),
        "fp64": (Dtype.FP64, 2.0),
        "fp16x2": (Dtype.FP16, 4.0),
        "bf16x2": (Dtype.BF16, 4.0),
    }
    if key in halves:
        dtype, flop = halves[key]
        return float(cuda[dtype]) / flop if dtype in cuda else None
    if key.startswith("tensor_"):
        dtype = Dtype.of(key.removeprefix("tensor_"))
        return float(tensor[dtype]) if dtype in tensor else None
    if key == "shared":
        wide = result.byte / result.operations if result.byte and result.operations else None
        rate = gpu.sm.shared_byte_per_cycle
        return float(rate) / wide if rate is not None and wide else None
    plain = {"int32": gpu.pipes.int32_op_per_cycle, "sfu": gpu.pipes.sfu_op_per_cycle}
    if key in plain:
        return None if plain[key] is None else float(plain[key])  # type: ignore[arg-type]
    if key == "sfu_pair":
        return None if plain["sfu"] is None else float(plain["sfu"]) / 2.0
    return _stated().get((gpu.compute_capability, key))


@dataclass(frozen=True)
class Fault:
    """What is known against a kernel's rows: ``wrong`` (not what its name says) or ``slow`` (short of its unit)."""

    kind: str
    why: str


@cache
def _faults() -> dict[tuple[str, int], Fault]:
    text = files("wattcast.explore").joinpath("microbench_faults.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    told = {(row["name"], int(row["version"])): row for row in rows}
    like = {key: told.get((row["why"].removeprefix("as "), key[1]), row)["why"] for key, row in told.items()}
    return {key: Fault(row["kind"], like[key]) for key, row in told.items()}


def fault_of(result: Result) -> Fault | None:
    """The known fault of the kernel that measured a row."""
    return _faults().get((result.name, result.version))
