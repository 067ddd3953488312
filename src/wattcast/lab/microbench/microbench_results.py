"""The row of a microbenchmark, as measured and read back: rates and energies, curves, known faults,
what must hold.

Energy of a launch is mean power times its time; energy above idle leaves out what the card draws
with a context open and no work (docs/method/microbenchmarks.md)."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    files,
)
from wattcast.core.arrays import Array
from wattcast.core.errors import MissingSpecification
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.row_journals import read_lines

if TYPE_CHECKING:
    from wattcast.hardware import Gpu

RESULTS_FILE = "microbench.jsonl"
# how far two rounds may be apart
SAME_TIME = 0.02
SAME_ENERGY = 0.03
SAME_COPY = 0.05  # how far our best copy of DRAM may be from the driver's
# benchmark: how far its rate may be from the vendor's
RATE_LIMITS = {
    "fp32_fma": 0.03,
    "fp64_fma": 0.03,
    "int32_add": 0.03,
    "fp32_exp2_log2": 0.03,
    "wgmma_bf16": 0.08,
}


@dataclass(frozen=True)
class MicroRow:
    """One measurement and what follows from it. ``None`` means not measured, never zero."""

    id: str  # name, version and repeat: the same in every run
    name: str
    group: str = ""  # arithmetic, tensor, memory, structure, mix, idle, multimedia
    operation: str = ""  # what is counted
    curve: str = ""
    at: float = 0.0  # place on that curve
    repeat: int = 0
    # of the kernel: rows of an older one are kept, and count only while there is no newer one
    version: int = 1
    specification: str = ""  # which of the vendor's rates it is compared with
    run: str = ""
    card: str = ""  # UUID, where the file of runs beside the rows names it
    date: str = ""
    threads: int | None = None
    blocks: int | None = None
    iterations: int | None = None
    operations: float | None = None  # of one launch, all threads
    parts: dict[str, float] = field(default_factory=dict)  # operations of every unit of a mix
    byte: float | None = None  # moved by one launch
    flop: float | None = None
    # in the window; rows of version 0.1.0 have the stretches of about 20 ms that were timed instead
    launches: int | None = None
    launch_s: float | None = None  # mean time of a launch, by events
    launch_spread_s: float | None = None
    cycles: float | None = None  # of a launch on a multiprocessor, by its own counter
    active_sms: int | None = None
    operations_per_cycle_sm: float | None = None
    latency_cycles: float | None = None  # from an operation to the next, which waits for it
    # cycles over the nanosecond timer, or over the mean time where capped
    effective_clock_hz: float | None = None
    sm_clock_hz: float | None = None  # as NVML reports it
    duration_s: float | None = None  # of the window
    power_w: float | None = None
    power_spread_w: float | None = None
    max_power_w: float | None = None
    max_power_of: str = ""
    idle_power_w: float | None = None  # a context open, no work, near in time
    memory_power_w: float | None = None
    temperature_c: float | None = None
    ticks: int | None = None
    throttle: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    checked: str = ""  # "passed", or "" where no self-check applies
    error: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and value < 0.0 and name != "temperature_c":
                raise ValueError(f"{name}: expected zero or more, got {value:g}")

    @property
    def latency_s(self) -> float | None:
        """Seconds from an operation to the next, which waits for it."""
        hz = self.effective_clock_hz
        return self.latency_cycles / hz if self.latency_cycles and hz else None

    @property
    def energy_j(self) -> float | None:
        """Energy of a launch."""
        return self.power_w * self.launch_s if self.power_w and self.launch_s else None

    @property
    def operation_s(self) -> float | None:
        """Time an operation takes when the whole chip does them side by side."""
        return self.launch_s / self.operations if self.launch_s and self.operations else None

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
        """Operations that one joule pays for."""
        return 1.0 / self.operation_j if self.operation_j else None

    @property
    def byte_per_s(self) -> float | None:
        """Bytes moved in a second, as the source counts them."""
        return self.byte / self.launch_s if self.byte and self.launch_s else None


def micro_row_id(
    name: str,
    repeat: int,
    version: int = 1,
) -> str:
    """Return an id that is the same in every run until the kernel changes."""
    return name + (f"-v{version}" if version > 1 else "") + (f"-r{repeat}" if repeat else "")


def read_results(path: Path) -> tuple[MicroRow, ...]:
    """Read the rows of a file, or of ``microbench.jsonl`` in a folder.

    Failed rows are left out; the last of an id counts, and of a name only its newest kernel.
    """
    from wattcast.core.strict_files import (
        convert_plain,  # needs msgspec, which a bare node may lack
    )

    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise bad_value(str(path), f"a folder with {RESULTS_FILE}, or such a file", "none")
    latest = {}
    for row in read_lines(file):
        if not row.get("error"):
            latest[str(row.get("id"))] = row
    if not latest:
        raise BadInput(
            f"{file.name} holds no row without an error: measure again (wattcast lab microbench)."
        )
    rows = [convert_plain(row, MicroRow, f"{file.name}: {name}") for name, row in latest.items()]
    newest: dict[str, int] = {}
    for r in rows:
        newest[r.name] = max(newest.get(r.name, 1), r.version)
    runs = read_lines(file.parent / "runs.jsonl", missing_ok=True)
    cards = {str(run.get("run")): str(run.get("card_uuid", "")) for run in runs}
    newest_rows = [r for r in rows if r.version == newest[r.name]]
    return tuple(replace(r, card=cards.get(r.run, "")) for r in newest_rows)


def describe_card(path: Path) -> str:
    """Describe card, driver and date of the runs in a folder, for captions; empty where they are
    not on file.
    """
    runs = list(
        read_lines((path if path.is_dir() else path.parent) / "runs.jsonl", missing_ok=True)
    )
    if not runs:
        return ""
    last = runs[-1]
    return (
        f"{last.get('card_name', '')}, driver {last.get('driver', '')}, "
        f"{str(last.get('date', ''))[:10]}"
    )


def read_shipped_results(gpu: Gpu) -> tuple[MicroRow, ...]:
    """Read the results that ship for a GPU; raise when there are none yet."""
    folder = results_folder(gpu)
    if not (folder / RESULTS_FILE).is_file():
        raise MissingSpecification(
            f"no microbenchmark results of the {gpu.name} are here yet. Measure them on "
            "one (wattcast lab "
            f"microbench --out DIR), and give DIR instead of the name (`lab tune`: --results DIR)."
        )
    return read_results(folder)


def results_folder(gpu: Gpu) -> Path:
    """Return the folder where shipped results lie."""
    from wattcast.hardware.catalogue_reader import strip_board  # not on machines that only measure

    return Path(str(files("wattcast"))) / "database" / strip_board(gpu.name)


def keep_first_rounds(results: Iterable[MicroRow]) -> dict[str, MicroRow]:
    """Return the results of the first round by name."""
    return {r.name: r for r in results if r.repeat == 0}


def find_curve(results: Iterable[MicroRow], name: str) -> list[MicroRow]:
    """Return the points of a curve, in order."""
    return sorted((r for r in results if r.curve == name and r.repeat == 0), key=lambda r: r.at)


@dataclass(frozen=True)
class CurveCosts:
    """The places of a curve, with time and energy of an operation or of a byte; NaN where one was
    not measured.
    """

    at: Array
    time_s: Array
    energy_j: Array
    above_idle_j: Array


def compute_costs(points: Iterable[MicroRow], by_byte: bool = False) -> CurveCosts:
    """Return the costs of points; ``by_byte`` where an operation moves as many bytes as its place
    says.
    """
    rows = []
    for r in points:
        amount = r.at if by_byte else 1.0
        rows.append((r.at, amount, r.operation_s, r.operation_j, r.operation_above_idle_j))
    at, amounts, time_s, energy_j, above_idle_j = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return CurveCosts(at, time_s / amounts, energy_j / amounts, above_idle_j / amounts)


_read_table = cache(partial(read_shipped_table, "wattcast.lab.microbench"))
read_published = cache(
    partial(read_shipped_table, "wattcast", "database", "published")
)  # by others


def find_specified_rate(gpu: Gpu, result: MicroRow) -> float | None:
    """Return the operations per cycle and SM that the vendor states, or None."""
    key = result.specification
    pipes = gpu.pipes
    cuda = pipes.cuda_flop_per_cycle
    wide = result.byte if result.operations else None
    rates = {  # what an SM does in a cycle, and how much of it an operation takes
        "fp32": (cuda.get(Dtype.FP32), 2.0),
        "fp64": (cuda.get(Dtype.FP64), 2.0),
        "fp16x2": (cuda.get(Dtype.FP16), 4.0),
        "bf16x2": (cuda.get(Dtype.BF16), 4.0),
        "int32": (pipes.int32_op_per_cycle, 1.0),
        "sfu": (pipes.sfu_op_per_cycle, 1.0),
        "sfu_pair": (pipes.sfu_op_per_cycle, 2.0),
        "shared": (
            gpu.sm.shared_byte_per_cycle if wide else None,
            (wide or 1.0) / (result.operations or 1.0),
        ),
    }
    if key.startswith("tensor_"):
        dtype = Dtype.parse(key.removeprefix("tensor_").removesuffix("_sparse"))
        # two of four are skipped [NVIDIA H100 whitepaper]
        rates[key] = pipes.tensor_flop_per_cycle.get(dtype), 0.5 if key.endswith("_sparse") else 1.0
    if key in rates:
        rate, per_operation = rates[key]
        return None if rate is None else float(rate) / per_operation
    for row in _read_table("throughput.csv"):
        if row["compute_capability"] == gpu.compute_capability and row["key"] == key:
            return float(row["per_cycle_sm"])
    return None


def find_fault(result: MicroRow) -> str | None:
    """Return why a row is not what its name says, where that is known of the kernel that measured
    it.
    """
    for row in _read_table("microbench_faults.csv"):
        if (row["name"], int(row["version"])) == (result.name, result.version):
            return str(row["why"])
    return None


@dataclass(frozen=True)
class ExpectedTruth:
    """A statement that measurements must bear out."""

    statement: str
    deviation: float  # relative difference, or the share of points that go the wrong way
    must: float

    @property
    def holds(self) -> bool:
        """Whether they do."""
        return self.deviation <= self.must


# How many times as long an operation takes at the end of a curve as at its beginning, at least; a
# part of what the passes through memory and the paths of a branch alone would make of it. Below 1:
# the time falls.
CURVE_RISES = {
    "conflicts": 2.0,
    "divergence": 1.5,
    "coalescence": 1.0 / 1.5,
}


def _check_curve(
    name: str,
    operation_s: Array,
    least: float,
) -> ExpectedTruth:
    """Check that the time of an operation rises, or falls, at every point of a curve, and enough in
    all.

    A flat curve never falls, and passed for rising.
    """
    rises = least > 1.0
    sign = 1.0 if rises else -1.0
    wrong = float((sign * np.diff(operation_s) < -0.02 * operation_s[:-1]).mean())
    ratio = float(operation_s[-1] / operation_s[0])
    missing = max(least - ratio, 0.0) / least if rises else max(ratio - least, 0.0) / least
    text = (
        f"{name}: time an operation {'rises' if rises else 'falls'} along the curve, "
        f"{ratio:.3g} times from end to end (at {'least' if rises else 'most'} {least:.2g})"
    )
    return ExpectedTruth(text, max(wrong, missing), 0.0)


def check_truths(results: Sequence[MicroRow], gpu: Gpu) -> list[ExpectedTruth]:
    """Check throughput against the specification, the copy against the driver's, curves and two
    rounds.
    """
    return [
        *_check_rates(results, gpu),
        *_check_copy(results, gpu),
        *_check_dram(results, gpu),
        *_check_curves(results),
        *_check_rounds(results),
    ]


def _check_rates(results: Sequence[MicroRow], gpu: Gpu) -> Iterator[ExpectedTruth]:
    """Compare rates with the vendor's, per cycle and SM."""
    by_name = keep_first_rounds(results)
    for name, must in RATE_LIMITS.items():
        result = by_name.get(name)
        if result is None:
            continue
        rate = result.operations_per_cycle_sm
        specified = find_specified_rate(gpu, result)
        if rate and specified:
            text = f"{name}: {rate:.4g} of {specified:g} per cycle and SM"
            yield ExpectedTruth(text, abs(rate / specified - 1.0), must)


def _check_copy(results: Sequence[MicroRow], gpu: Gpu) -> Iterator[ExpectedTruth]:
    """Compare our fastest copy of DRAM with the driver's."""
    copy = find_best_copy(results)
    driver = keep_first_rounds(results).get("dram_memcpy")
    if copy is None or driver is None or not (copy.byte_per_s and driver.byte_per_s):
        return
    share = copy.byte_per_s / float(gpu.memory.byte_per_s)
    text = (
        f"{copy.name} {copy.byte_per_s / 1e12:.3f} TB/s ({share:.0%} of the specification), "
        f"the driver's {driver.byte_per_s / 1e12:.3f} TB/s"
    )
    yield ExpectedTruth(text, abs(copy.byte_per_s / driver.byte_per_s - 1.0), SAME_COPY)


def _check_dram(results: Sequence[MicroRow], gpu: Gpu) -> Iterator[ExpectedTruth]:
    """Check that no row is faster than DRAM can be: it would not come from there."""
    limit = float(gpu.memory.byte_per_s)
    fastest: MicroRow | None = None
    fastest_byte_per_s = 0.0
    for r in keep_first_rounds(results).values():
        is_dram = r.group in ("memory", "structure") and "dram" in r.name
        if is_dram and r.byte_per_s and r.byte_per_s > fastest_byte_per_s:
            fastest = r
            fastest_byte_per_s = r.byte_per_s
    if fastest is not None:
        text = (
            f"no DRAM row above the specification: {fastest.name} "
            f"{fastest_byte_per_s / 1e12:.3f} of {limit / 1e12:.3g} TB/s"
        )
        yield ExpectedTruth(text, max(fastest_byte_per_s / limit - 1.0, 0.0), 0.0)


def _check_curves(results: Sequence[MicroRow]) -> Iterator[ExpectedTruth]:
    for name, least in CURVE_RISES.items():
        operation_s = [r.operation_s for r in find_curve(results, name) if r.operation_s]
        if len(operation_s) > 1:
            yield _check_curve(name, np.array(operation_s), least)


def _check_rounds(results: Sequence[MicroRow]) -> Iterator[ExpectedTruth]:
    """Check that two rounds give the same time and energy."""
    pairs = compare_rounds(results)
    if not pairs:
        return
    time_apart = {pair.name: pair.time for pair in pairs}
    energy_apart = {pair.name: pair.energy for pair in pairs}
    for quantity, apart, must in (
        ("time", time_apart, SAME_TIME),
        ("energy", energy_apart, SAME_ENERGY),
    ):
        farthest_first = sorted(apart, key=lambda name: -apart[name])
        beyond = [name for name in farthest_first if apart[name] > must]
        median = np.median(list(apart.values()))
        text = f"two rounds, {quantity}: median {median:.2%} of {len(apart)} rows"
        if beyond:
            text += f"; further apart are {len(beyond)}: {', '.join(beyond)}"
        else:
            text += ", none further apart"
        yield ExpectedTruth(text, max(apart.values()), must)


def find_best_copy(results: Iterable[MicroRow]) -> MicroRow | None:
    """Return the fastest of our ways to copy DRAM."""
    first_rounds = keep_first_rounds(results).values()
    copies = [r for r in first_rounds if r.name.startswith("dram_copy") and r.byte_per_s]
    return max(copies, key=lambda r: r.byte_per_s or 0.0, default=None)


@dataclass(frozen=True)
class RoundPair:
    """One benchmark measured twice; differences relative to the mean."""

    name: str
    time: float
    energy: float


def compare_rounds(results: Sequence[MicroRow]) -> list[RoundPair]:
    """Pair the first and second round of every benchmark that has both on one card."""

    def apart(a: float, b: float) -> float:
        return abs(a - b) / (0.5 * (a + b))

    again = {r.name: r for r in results if r.repeat == 1}
    pairs = []
    for name, a in keep_first_rounds(results).items():
        b = again.get(name)
        if b is None or not (a.operation_s and b.operation_s and a.operation_j and b.operation_j):
            continue
        if not (a.card and b.card and a.card != b.card):
            pairs.append(
                RoundPair(
                    name, apart(a.operation_s, b.operation_s), apart(a.operation_j, b.operation_j)
                )
            )
    return pairs


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
    import msgspec

    return msgspec.convert(read_published("mipp.csv"), tuple[MippValue, ...], strict=False)


@dataclass(frozen=True)
class MemoryLevel:
    """Sizes over which the latency of memory stays the same: a cache, or the reach of address
    translation.
    """

    least_byte: float
    most_byte: float
    cycles: float


def find_levels(results: Iterable[MicroRow], curve: str) -> list[MemoryLevel]:
    """Find plateaus of two or more sizes along ``ring`` or ``pages``, each within 4 % of its
    mean.
    """
    levels: list[MemoryLevel] = []
    sizes: list[float] = []  # of the plateau that is being followed
    latencies: list[float] = []
    for r in find_curve(results, curve):
        if not r.latency_cycles:
            continue
        with_next = [*latencies, r.latency_cycles]
        if max(with_next) - min(with_next) > 0.08 * np.mean(with_next):
            levels += _end_level(sizes, latencies)
            sizes = []
            latencies = []
        sizes.append(r.at)
        latencies.append(r.latency_cycles)
    return [*levels, *_end_level(sizes, latencies)]


def _end_level(sizes: list[float], latencies: list[float]) -> list[MemoryLevel]:
    """Return a plateau, or nothing where one size stands alone."""
    if len(sizes) < 2:
        return []
    return [MemoryLevel(sizes[0], sizes[-1], float(np.mean(latencies)))]
