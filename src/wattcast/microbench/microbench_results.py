"""Read microbenchmark rows and derive rates and energies, curves, known faults and what must hold.

Energy of a launch is mean power times its time; energy above idle leaves out what the card draws with a context
open and no work (docs/method/microbenchmarks.md).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from wattcast.core.errors import BadInput, MissingSpecification, bad_value
from wattcast.core.measured_rows import Plain, read_lines
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu

RESULTS_FILE = "microbench.jsonl"


@dataclass(frozen=True)
class MicrobenchResult:
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


def read_results(path: Path) -> tuple[MicrobenchResult, ...]:
    """Read the rows of a file, or of ``microbench.jsonl`` in a folder.

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
        raise BadInput(f"{file.name} holds no row without an error: measure again (wattcast lab microbench).")
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


def _result(row: Plain, where: str, card: str) -> MicrobenchResult:
    def number(name: str) -> float | None:
        value = row.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or not np.isfinite(value) or value < 0:
            raise bad_value(f"{where}: {row.get('id')}: {name}", "a number, zero or more", value)
        return float(value)

    return MicrobenchResult(
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


def describe_card(path: Path) -> str:
    """Describe card, driver and date of the runs in a folder, for captions; empty where they are not on file."""
    file = (path if path.is_dir() else path.parent) / "runs.jsonl"
    runs = list(read_lines(file)) if file.is_file() else []
    if not runs:
        return ""
    last = runs[-1]
    return f"{last.get('card_name', '')}, driver {last.get('driver', '')}, {str(last.get('date', ''))[:10]}"


def read_shipped_results(gpu: Gpu) -> tuple[MicrobenchResult, ...]:
    """Read the results that ship for a GPU; raise when there are none yet."""
    folder = results_folder(gpu)
    if not (folder / RESULTS_FILE).is_file():
        raise MissingSpecification(
            f"no microbenchmark results of the {gpu.name} are here yet. Measure them on one (wattcast measure "
            f"microbench --out DIR) and say --results DIR."
        )
    return read_results(folder)


def results_folder(gpu: Gpu) -> Path:
    """Return the folder where shipped results lie."""
    return Path(str(files("wattcast"))) / "database" / gpu.name


def keep_first_rounds(results: Iterable[MicrobenchResult]) -> dict[str, MicrobenchResult]:
    """Return the results of the first round by name."""
    return {r.name: r for r in results if r.repeat == 0}


def find_curve(results: Iterable[MicrobenchResult], name: str) -> list[MicrobenchResult]:
    """Return the points of a curve, in order."""
    return sorted((r for r in results if r.curve == name and r.repeat == 0), key=lambda r: r.at)


@cache
def _stated() -> dict[tuple[str, str], float]:
    text = files("wattcast.microbench").joinpath("throughput.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {(row["compute_capability"], row["key"]): float(row["per_cycle_sm"]) for row in rows}


def find_specified_rate(gpu: Gpu, result: MicrobenchResult) -> float | None:
    """Return the operations per cycle and SM that the vendor states, or None."""
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
        dtype = Dtype.parse(key.removeprefix("tensor_"))
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
class KnownFault:
    """What is known against a kernel's rows: ``wrong`` (not what its name says) or ``slow`` (short of its unit)."""

    kind: str
    why: str


@cache
def _faults() -> dict[tuple[str, int], KnownFault]:
    text = files("wattcast.microbench").joinpath("microbench_faults.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    told = {(row["name"], int(row["version"])): row for row in rows}
    like = {key: told.get((row["why"].removeprefix("as "), key[1]), row)["why"] for key, row in told.items()}
    return {key: KnownFault(row["kind"], like[key]) for key, row in told.items()}


def find_fault(result: MicrobenchResult) -> KnownFault | None:
    """Return the known fault of the kernel that measured a row, if any."""
    return _faults().get((result.name, result.version))


SAME_TIME, SAME_ENERGY = 0.02, 0.03  # how far two rounds may be apart


@dataclass(frozen=True)
class ExpectedTruth:
    """A statement that measurements must bear out."""

    statement: str
    found: float  # relative difference, or the share of points that go the wrong way
    must: float

    @property
    def holds(self) -> bool:
        """Whether they do."""
        return self.found <= self.must


def check_truths(results: Sequence[MicrobenchResult], gpu: Gpu) -> list[ExpectedTruth]:
    """Check throughput against the specification, the copy against the driver's, curves and two rounds."""
    by_name, found = keep_first_rounds(results), []
    limits = {"fp32_fma": 0.03, "fp64_fma": 0.03, "int32_add": 0.03, "fp32_exp2_log2": 0.03, "wgmma_bf16": 0.08}
    for name, must in limits.items():
        result = by_name.get(name)
        wanted = find_specified_rate(gpu, result) if result is not None else None
        if result is not None and result.per_cycle_sm and wanted:
            off = abs(result.per_cycle_sm / wanted - 1.0)
            found.append(
                ExpectedTruth(f"{name}: {result.per_cycle_sm:.4g} of {wanted:g} per cycle and SM", off, must)
            )
    found += _dram_truths(by_name, gpu)
    for name, rising in (("conflicts", True), ("divergence", True), ("coalescence", False)):
        points = [r.operation_s for r in find_curve(results, name) if r.operation_s]
        if len(points) > 1:
            steps = np.diff(points) * (1.0 if rising else -1.0)
            wrong = float((steps < -0.02 * np.array(points[:-1])).mean())
            found.append(
                ExpectedTruth(
                    f"{name}: time an operation {'rises' if rising else 'falls'} along the curve", wrong, 0.0
                )
            )
    return found + _round_truths(compare_rounds(results))


def _round_truths(pairs: Sequence[RoundPair]) -> list[ExpectedTruth]:
    """The two rounds furthest apart; in words how far apart they are mostly, and which rows are further."""
    found = []
    for what, apart, must in (
        ("time", {p.name: p.time for p in pairs}, SAME_TIME),
        ("energy", {p.name: p.energy for p in pairs}, SAME_ENERGY),
    ):
        if apart:
            beyond = [name for name in sorted(apart, key=lambda name: -apart[name]) if apart[name] > must]
            text = f"two rounds, {what}: median {np.median(list(apart.values())):.2%} of {len(apart)} rows"
            text += f"; further apart are {len(beyond)}: {', '.join(beyond)}" if beyond else ", none further apart"
            found.append(ExpectedTruth(text, max(apart.values()), must))
    return found


def find_best_copy(results: Iterable[MicrobenchResult]) -> MicrobenchResult | None:
    """Return the fastest of our ways to copy DRAM."""
    ways = [r for r in keep_first_rounds(results).values() if r.name.startswith("dram_copy") and r.byte_per_s]
    return max(ways, key=lambda r: r.byte_per_s or 0.0, default=None)


def _dram_truths(by_name: Mapping[str, MicrobenchResult], gpu: Gpu) -> list[ExpectedTruth]:
    """Our best copy by the driver's; nothing faster than DRAM can be, or it did not come from there."""
    found, most = [], float(gpu.memory.byte_per_s)
    copy, driver = find_best_copy(by_name.values()), by_name.get("dram_memcpy")
    if copy is not None and driver is not None and copy.byte_per_s and driver.byte_per_s:
        text = f"{copy.name} {copy.byte_per_s / 1e12:.3f} TB/s ({copy.byte_per_s / most:.0%} of the specification), "
        text += f"the driver's {driver.byte_per_s / 1e12:.3f} TB/s"
        found.append(ExpectedTruth(text, abs(copy.byte_per_s / driver.byte_per_s - 1.0), 0.05))
    rows = [r for r in by_name.values() if r.group in ("memory", "structure") and r.byte_per_s and "dram" in r.name]
    if rows:
        top = max(rows, key=lambda r: r.byte_per_s or 0.0)
        rate = top.byte_per_s or 0.0
        text = f"no DRAM row above the specification: {top.name} {rate / 1e12:.3f} of {most / 1e12:.3g} TB/s"
        found.append(ExpectedTruth(text, max(rate / most - 1.0, 0.0), 0.0))
    return found


@dataclass(frozen=True)
class RoundPair:
    """One benchmark measured twice; differences relative to the mean."""

    name: str
    time: float
    energy: float


def compare_rounds(results: Sequence[MicrobenchResult]) -> list[RoundPair]:
    """Pair the first and second round of every benchmark that has both on one card."""
    again = {r.name: r for r in results if r.repeat == 1}
    pairs = []
    for name, a in keep_first_rounds(results).items():
        b = again.get(name)
        if b is None or not (a.operation_s and b.operation_s and a.operation_j and b.operation_j):
            continue
        if a.card and b.card and a.card != b.card:
            continue
        pairs.append(RoundPair(name, _apart(a.operation_s, b.operation_s), _apart(a.operation_j, b.operation_j)))
    return pairs


def _apart(a: float, b: float) -> float:
    return abs(a - b) / (0.5 * (a + b))


@dataclass(frozen=True)
class MippValue:
    """A benchmark of the MIPP paper on an older device, errata applied."""

    device: str
    table: str
    benchmark: str
    ours: str  # the benchmark of ours that is nearest
    sm_count: int
    operations: float
    time_s: float
    spec_per_cycle_sm: float | None
    real_per_cycle_sm: float
    power_w: float
    max_power_w: float
    energy_j: float
    nj_printed: float
    erratum: str

    @property
    def operation_j(self) -> float:
        """Energy of an operation of the whole chip, from power and time."""
        return self.power_w * self.time_s / self.operations


@cache
def read_mipp_values() -> tuple[MippValue, ...]:
    """Read tables I to IV of the MIPP paper, errata applied."""
    path = Path(str(files("wattcast"))) / "database" / "published" / "mipp.csv"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = {"device", "table", "benchmark", "ours", "erratum"}
    rows = []
    for row in csv.DictReader(lines):
        values: Plain = {k: v if k in text else (float(v) if v else None) for k, v in row.items()}
        rows.append(MippValue(**values | {"sm_count": int(row["sm_count"])}))
    return tuple(rows)
