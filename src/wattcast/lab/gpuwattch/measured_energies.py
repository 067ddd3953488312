"""Fit energies of AccelWattch's counters to measured watts, and write them into the XML file that
GPGPU-Sim and Accel-Sim read.

The power of a kernel is fitted as

    P = P_const + P_sm · V · a + V² · Σ_i E_i · n_i / t + Σ_d E_d · n_d / t

| symbol | here | unit |
|---|---|---|
| P | ``power_w`` | W |
| P_const | ``CONSTANT`` | W |
| P_sm | ``ACTIVE``: all SMs at work, beyond what their counters cost | W |
| V | ``relative_voltage``: core voltage over that at the top clock | - |
| a | ``active``: share of SMs at work | - |
| E_i, n_i | energy of a count, and counts in a launch, on the chip | J, - |
| E_d, n_d | those of device memory, whose voltage is fixed (exponent 0) | J, - |
| t | ``duration_s`` | s |

Rows are the microbenchmarks of a database and one half of the operators whose kernels a profiler
counted; the other half is kept for the judgement. Coefficients are zero or more (least squares on
relative error). Their intervals are the 5th and 95th percentile of fits to benchmarks and operators
drawn with replacement, all rows of one together.

A profiler sees fewer counters than a simulator writes. So kinds that it does not tell apart share a
coefficient, as reads and writes, hits and misses of a cache do (``measured_terms.csv``): a
simulator counts an access as one of them, a profile puts all into the first. Registers, instruction
cache and scheduler are in the instruction and in the unit that uses them, and have none of their
own.

Other GPUs have the H200's coefficients times the ratio of the module energies (J per flop or byte
of a part of the chip) in the two GPUs' bundles, which are the files of calibrated or forecast model
parameters that ``predict`` uses."""

from __future__ import annotations

from collections.abc import (
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from wattcast.calibrate.scoring import mean_percent_error
from wattcast.core import files
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import BadInput, unknown_name
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import ROWS_FILE, read_table
from wattcast.core.strict_files import read_shipped_table, read_shipped_yaml
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.hardware.catalogue_reader import strip_board
from wattcast.lab.counter_models import microbench_lines, profiler_counters
from wattcast.lab.counter_models.counter_table import read_column_map
from wattcast.lab.gpuwattch.architecture import (
    ChipArchitecture,
    architecture_texts,
    make_architecture,
)
from wattcast.lab.gpuwattch.bottom_up.chip_design import ChipDesign, design_from_gpu
from wattcast.lab.gpuwattch.bottom_up.event_energies import (
    build_architecture_chip,
    make_energy_table,
)
from wattcast.lab.gpuwattch.component_build import BuiltComponentModel, build_component_model
from wattcast.lab.gpuwattch.component_set import read_component_set
from wattcast.lab.gpuwattch.energy_table import EnergyTable
from wattcast.lab.gpuwattch.judged_files import (
    describe_judgement,
    find_judgements,
    worst_left_out,
)
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.component_power import STATIC_NAMES
from wattcast.power.module_power import as_module_power
from wattcast.power.power_model import VoltageCurve
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.bundle.calibrated import calibrated_bundle
from wattcast.predictor.bundle.forecast import forecast_bundle

PARENT = "h200"  # whose watts the coefficients are fitted to
# GPUs to which they are carried over
CARRIED = (
    *("a100-sxm-80gb", "a100-pcie-40gb", "h100-sxm", "b200", "h100-nvl", "gh200", "t4", "a10"),
    *("quadro-gv100", "rtx-3070", "rtx-3090", "rtx-4090"),
)
# Names of the two coefficients in W. AccelWattch calls the static power of an SM whose warps have
# one lane (thread) at work a first lane's, `static_..._flane`.
CONSTANT = "constant_power"
ACTIVE = "static_flane"


class _Term(NamedTuple):
    """A fitted energy: the counters that share it, and the module whose energy carries it to other
    GPUs.
    """

    counters: tuple[str, ...]
    module: str
    exponent: int  # of the core voltage: 2 on the chip, 0 of device memory


# Terms by name, which is that of their first counter in AccelWattch
TERMS = {
    row["term"]: _Term(tuple(row["counters"].split()), row["module"], int(row["exponent"]))
    for row in read_shipped_table("wattcast.lab.gpuwattch", "measured_terms.csv")
}
_WARP = 32.0  # threads
_SECTOR_BYTE = 32.0
# Tensor accesses a cycle of a sub-core's tensor pipe. AccelWattch counts 32, one a thread, for an
# m16n8k16 product of 16-bit inputs, and at the full rate of an H200 (512 multiply-adds a cycle and
# sub-core) that takes 4 cycles.
_TENSOR_ACCESSES_PER_CYCLE = 8.0
# Cycles of the tensor pipe for a warp's arithmetic on pairs of halves: an H200's counters show 2.0
# an instruction (`fp16x2_fma` of its microbenchmarks).
_PAIR_CYCLES = 2.0
# bytes that the SMs write towards L2: a kernel's results, and what it spills or adds up in parts
_WRITTEN_METRIC = "l1tex__m_l1tex2xbar_write_bytes.sum"
_RESAMPLES = 200  # fits to drawn benchmarks, of which intervals are percentiles
_SHARED_BANKS = 32  # of shared memory
# Tensor products of other energy than those of 16 bits and tf32, which TENSOR_ACC stands for
_OTHER_PRODUCTS = (
    "mma_int8",
    "wgmma_int8",
    "mma_fp64",
    "mma_fp64_884",
)
# Idle rows at 0.7 to 0.9 GHz, where the card rests without a kernel. The one that stays,
# `idle_context_on`, is at 1.98 GHz as kernels are.
_OTHER_IDLE = ("idle_context_off", "idle_host_busy")
# Module energies that watts measured on the GPU itself moved in its bundle: 57 runs of products and
# of served models (predictor/bundle/b200)
_MEASURED_ON = {
    "b200": ("tensor_fp16_flop", "l2_byte", "dram_read_byte", "dram_write_byte", "shared_byte")
}


@dataclass(frozen=True)
class MeasuredValue:
    """A coefficient with the 5th and 95th percentile of its resampled fits, in J per count or W."""

    value: float
    low: float
    high: float

    def scaled(
        self,
        factor: float,
        error: float = 0.0,
    ) -> MeasuredValue:
        """Return the value times a factor, its interval widened by a relative error.

        The error is added in quadrature to the distance of each end. It is a mean error where the
        ends are percentiles: the result says how far off carrying over was, and is no exact
        percentile."""
        return MeasuredValue(
            self.value * factor,
            max(self.value - np.hypot(self.value - self.low, error * self.value), 0.0) * factor,
            (self.value + np.hypot(self.high - self.value, error * self.value)) * factor,
        )


@dataclass(frozen=True)
class CountedLaunch:
    """One measured kernel with its counts."""

    name: str
    family: str
    power_w: float
    duration_s: float
    clock_hz: float
    relative_voltage: float  # of the core, over that at the top clock
    active: float  # share of SMs at work, over the time of the launch
    counts: list[float]  # of each term


@dataclass(frozen=True)
class CountedLaunches:
    """Measured kernels with their counts: rows of microbenchmarks and of operators."""

    names: tuple[str, ...]
    families: tuple[str, ...]
    power_w: Array
    duration_s: Array
    clock_hz: Array
    relative_voltage: Array
    active: Array
    counts: Array  # (row, term)

    @classmethod
    def gather(cls, launches: Sequence[CountedLaunch]) -> CountedLaunches:
        """Return launches as columns."""
        return cls(
            names=tuple(launch.name for launch in launches),
            families=tuple(launch.family for launch in launches),
            power_w=np.array([launch.power_w for launch in launches]),
            duration_s=np.array([launch.duration_s for launch in launches]),
            clock_hz=np.array([launch.clock_hz for launch in launches]),
            relative_voltage=np.array([launch.relative_voltage for launch in launches]),
            active=np.array([launch.active for launch in launches]),
            counts=np.array([launch.counts for launch in launches]),
        )

    def select(self, rows: Mask) -> CountedLaunches:
        """Return some of the rows."""
        return CountedLaunches(
            names=tuple(compress(self.names, rows)),
            families=tuple(compress(self.families, rows)),
            power_w=self.power_w[rows],
            duration_s=self.duration_s[rows],
            clock_hz=self.clock_hz[rows],
            relative_voltage=self.relative_voltage[rows],
            active=self.active[rows],
            counts=self.counts[rows],
        )

    def design(self) -> Array:
        """Return the factor of every coefficient in every row, ``(row, coefficient)``: those of
        ``CONSTANT``, ``ACTIVE`` and all ``TERMS``.
        """
        voltage = self.relative_voltage
        exponent = np.array([term.exponent for term in TERMS.values()])
        rates = self.counts / self.duration_s[:, np.newaxis] * voltage[:, np.newaxis] ** exponent
        return np.column_stack([np.ones(len(self.names)), self.active * voltage, rates])


def is_held_out(spec: str) -> bool:
    """Tell whether an operator of the database is kept for the judgement.

    ``spec`` is the operator's name in the database: 16 hexadecimal digits of a hash of its
    description. Those that end with an odd digit are kept."""
    return int(spec[-1], 16) % 2 == 1


def count_accesses(metrics: Mapping[str, float | Array]) -> dict[str, Array]:
    """Return the counts of ``TERMS`` from Nsight Compute metrics of a launch (dots as dots or as
    underscores).

    | term | what is counted |
    |---|---|
    | TOT_INST | instructions of warps |
    | INT_ACC, FPU_ACC, DPU_ACC | those of the pipes alu, fma and fp64, times active threads |
    | FP_EXP_ACC | those of the special unit, times a full warp |
    | TENSOR_ACC | cycles of tensor pipes times ``_TENSOR_ACCESSES_PER_CYCLE`` |
    | SHRD_ACC | passes through shared memory; repeats for bank conflicts are left out |
    | DC_RH | passes through the L1 for anything else, hits and misses, reads and writes |
    | NOC_A | sectors between SMs and L2, to and fro |
    | L2_RH | sectors that L2 read or wrote, hits and misses |
    | MEM_RD, MEM_WR | sectors of device memory |

    Integer products run in the fma pipe and so count as FPU_ACC. Arithmetic on pairs of halves runs
    in the tensor pipe for ``_PAIR_CYCLES`` and counts as two fp32 accesses. It is told by the
    metric of `hmma` instructions less those of `gmma`, in which a warp's ``mma.sync`` is as well:
    of its six cycles on an H200 two go to FPU_ACC and four stay, so that an m16n8k16 product has
    its 32 accesses, and 64 of FPU_ACC on top. Energies were fitted with it."""
    values = {
        name.replace(".", "_"): np.asarray(value, dtype=np.float64)
        for name, value in metrics.items()
    }

    def read(name: str) -> Array:
        return values.get(name, np.zeros(()))

    threads = values.get("smsp__thread_inst_executed_per_inst_executed_ratio", np.full((), _WARP))
    threads = np.where(threads > 0, threads, _WARP)
    hmma = read("sm__inst_executed_pipe_tensor_op_hmma_sum")
    gmma = read("sm__inst_executed_pipe_tensor_op_gmma_sum")
    pairs = np.maximum(hmma - gmma, 0.0)
    shared = read("l1tex__data_pipe_lsu_wavefronts_mem_shared_sum")
    conflicts = read("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_sum")
    tensor_cycles = read("sm__pipe_tensor_cycles_active_sum") - _PAIR_CYCLES * pairs
    crossed_byte = read("l1tex__m_l1tex2xbar_write_bytes_sum") + read(
        "l1tex__m_xbar2l1tex_read_bytes_sum"
    )
    return {
        "TOT_INST": read("smsp__inst_executed_sum"),
        "INT_ACC": threads * read("sm__inst_executed_pipe_alu_sum"),
        "FPU_ACC": threads * (read("sm__inst_executed_pipe_fma_sum") + 2.0 * pairs),
        "DPU_ACC": threads * read("sm__inst_executed_pipe_fp64_sum"),
        "FP_EXP_ACC": _WARP * read("sm__inst_executed_pipe_xu_sum"),
        "TENSOR_ACC": _TENSOR_ACCESSES_PER_CYCLE * np.maximum(tensor_cycles, 0.0),
        "SHRD_ACC": np.maximum(shared - conflicts, 0.0),
        "DC_RH": np.maximum(read("l1tex__data_pipe_lsu_wavefronts_sum") - shared, 0.0),
        "NOC_A": crossed_byte / _SECTOR_BYTE,
        "L2_RH": read("lts__t_sectors_op_read_sum") + read("lts__t_sectors_op_write_sum"),
        "MEM_RD": read("dram__bytes_read_sum") / _SECTOR_BYTE,
        "MEM_WR": read("dram__bytes_write_sum") / _SECTOR_BYTE,
    }


def read_benchmarks(folder: Path, gpu: str = PARENT) -> CountedLaunches:
    """Read the microbenchmarks that counter models are trained on, without integer and fp64 tensor
    products, multimedia workloads and rows at idle clocks.

    ``watts`` and ``seconds`` of a line are those of the measured launch, to which its counts are
    scaled. An idle row has no cycles, and so no SM at work."""
    skipped = read_column_map(
        files("wattcast.lab.counter_models").joinpath("columns", f"{gpu}.yaml")
    ).left_out
    skipped_names = {*skipped, *_OTHER_PRODUCTS, *_OTHER_IDLE}
    launches = []
    for line in microbench_lines.make_table_lines(folder, gpu):
        name = str(line["benchmark"])
        if str(line["group"]).startswith("multimedia") or name in skipped_names:
            continue
        numbers = {key: value for key, value in line.items() if isinstance(value, float)}
        elapsed = numbers.get("sm__cycles_elapsed.sum", 0.0)
        active = min(numbers["sm__cycles_active.sum"] / elapsed, 1.0) if elapsed else 0.0
        accesses = count_accesses(numbers)
        launches.append(
            CountedLaunch(
                name=name,
                family="microbenchmark",
                power_w=numbers["watts"],
                duration_s=numbers["seconds"],
                clock_hz=numbers["effective_clock_hz"],
                relative_voltage=numbers["relative_voltage"],
                active=active,
                counts=[float(accesses[name]) for name in TERMS],
            )
        )
    return CountedLaunches.gather(launches)


def counted_rows(folder: Path, gpu: str = PARENT) -> list[tuple[Plain, list[dict[str, float]]]]:
    """Return sustained rows of counted operators with random data, each with the metrics of its
    kernels.

    Counters were taken with cold caches, watts of an operator that is repeated. Operands of less
    than half of L2 stay there (each half of the chip keeps its own copies), so that nothing goes to
    device memory. Of larger ones every byte that the SMs write goes to device memory once: what the
    profiler saw less of it is added to the last kernel. Sectors of device memory, which other
    readers of these rows use, follow the corrected bytes."""
    chip = find_gpu(gpu)
    half_l2 = 0.5 * float(np.mean(chip.need("l2.capacity_byte")))
    counted = microbench_lines.read_operator_metrics(folder, float(np.mean(chip.sm_count)))
    pairs = []
    for row in read_table(folder / ROWS_FILE, "sustained"):
        is_settled = not row["error"] and "unsettled" not in (row["flags"] or [])
        if not (row["data"] == "random" and is_settled and row["spec"] in counted):
            continue
        kernels = [dict(metrics) for metrics in counted[row["spec"]]]
        if row["footprint_byte"] < half_l2:
            for metrics in kernels:
                metrics["dram__bytes_read.sum"] = 0.0
                metrics["dram__bytes_write.sum"] = 0.0
        else:
            written_byte = sum(metrics["dram__bytes_write.sum"] for metrics in kernels)
            result_byte = sum(metrics[_WRITTEN_METRIC] for metrics in kernels)
            kernels[-1]["dram__bytes_write.sum"] += max(result_byte - written_byte, 0.0)
        for metrics in kernels:
            for way in ("read", "write"):
                sectors = metrics[f"dram__bytes_{way}.sum"] / _SECTOR_BYTE
                metrics[f"dram__sectors_{way}.sum"] = sectors
        pairs.append((row, kernels))
    return pairs


def read_operators(folder: Path, gpu: str = PARENT) -> CountedLaunches:
    """Read the counted operators as launches, the counts of their kernels added up.

    The voltage is that at the clock NVML reported, as a bundle's V(f) is fitted; cycles are those
    of the effective clock, which is lower where the governor hunts."""
    sms = float(np.mean(find_gpu(gpu).sm_count))
    launches = []
    for row, kernels in counted_rows(folder, gpu):
        counts = dict.fromkeys(TERMS, 0.0)
        active_cycles = 0.0
        for metrics in kernels:
            active_cycles += metrics["sm__cycles_active.sum"]
            for name, count in count_accesses(metrics).items():
                counts[name] += float(count)
        cycles = sms * row["latency_s"] * row["effective_clock_hz"]
        relative_voltage = microbench_lines.bundle_voltage(gpu, row["sm_clock_hz"])
        assert relative_voltage is not None, "a GPU with counted operators has a voltage curve"
        launches.append(
            CountedLaunch(
                name=row["spec"],
                family=row["family"],
                power_w=row["power_w"],
                duration_s=row["latency_s"],
                clock_hz=row["effective_clock_hz"],
                relative_voltage=relative_voltage,
                active=min(active_cycles / cycles, 1.0),
                counts=list(counts.values()),
            )
        )
    return CountedLaunches.gather(launches)


def fit_measured_energies(folder: Path, gpu: str = PARENT) -> dict[str, MeasuredValue]:
    """Fit all coefficients to microbenchmarks and to the operators that are not held out.

    Every row is divided by its watts, so that the right side is 1 and residuals are relative. A
    column is divided by its largest entry while it is solved for, as counts span many powers of
    ten."""
    from scipy.optimize import nnls

    operators = read_operators(folder, gpu)
    is_training = np.array([not is_held_out(name) for name in operators.names])
    parts = (read_benchmarks(folder, gpu), operators.select(is_training))
    relative = np.concatenate([part.design() / part.power_w[:, np.newaxis] for part in parts])
    names = np.array([*parts[0].names, *parts[1].names])
    coefficients = (CONSTANT, ACTIVE, *TERMS)
    scale = relative.max(axis=0)
    _check_every_counter(coefficients, scale, folder)

    def solve(weight: Array) -> Array:
        root = np.sqrt(weight)
        return np.asarray(nnls(relative / scale * root[:, np.newaxis], root)[0] / scale)

    best = solve(np.ones(len(names)))
    drawn = [solve(weight) for weight in _resample_benchmarks(names)]
    low, high = np.percentile(np.array(drawn), [5.0, 95.0], axis=0)
    values = {}
    for place, name in enumerate(coefficients):
        ends = (best[place], min(low[place], best[place]), max(high[place], best[place]))
        values[name] = MeasuredValue(*(float(f"{end:.5g}") for end in ends))
    return values


def _check_every_counter(
    coefficients: Sequence[str],
    largest: Array,
    folder: Path,
) -> None:
    """Refuse a fit in which no row has something to fit a coefficient to."""
    absent = [name for name, size in zip(coefficients, largest, strict=True) if size <= 0.0]
    if absent:
        raise BadInput(
            f"{folder}: no row counts {', '.join(absent)}, so that no energy can be fitted to it. "
            "Add microbenchmarks or operators that do."
        )


def _resample_benchmarks(names: Array) -> Iterator[Array]:
    """Yield how often each row counts when benchmarks are drawn with replacement."""
    random = np.random.default_rng(0)
    benchmarks, place_of_row = np.unique(names, return_inverse=True)
    for _ in range(_RESAMPLES):
        chosen = random.choice(benchmarks.size, benchmarks.size)
        times = np.bincount(chosen, minlength=benchmarks.size)
        yield times[place_of_row].astype(np.float64)


class _MeasuredFile(msgspec.Struct, forbid_unknown_fields=True):
    """The shipped fit, ``measured_h200.yaml``, which ``lab accelwattch h200 --refit`` makes."""

    wattcast: str  # kind of file
    gpu: str
    source: str
    values: dict[str, MeasuredValue]
    # McPAT's parameters that the catalogue lacks, by component, as in AccelWattch's own files
    technology: dict[str, dict[str, str]]


@cache
def _read_measured_file() -> _MeasuredFile:
    return read_shipped_yaml(_MeasuredFile, "wattcast.lab.gpuwattch", "measured_h200.yaml")


@dataclass(frozen=True)
class MeasuredChip:
    """Coefficients of one GPU with their intervals, where they come from, and its bundle."""

    name: str
    values: Mapping[str, MeasuredValue]
    source: str
    bundle: Bundle
    design: ChipDesign

    @property
    def voltage(self) -> VoltageCurve:
        """Relative core voltage by clock."""
        return as_module_power(self.bundle.power).voltage

    @property
    def judgement(self) -> str:
        """How far watts by these coefficients are off, and on which rows, in words."""
        return describe_judgement(self.name)


@cache
def measured_chip(name: str) -> MeasuredChip:
    """Return the coefficients of a GPU: those of the H200 as fitted, of the GPUs of ``CARRIED``
    carried over.

    The name of a board means its GPU. A calibrated bundle stands on kernel times: no watt moved its
    energies unless ``_MEASURED_ON`` names them."""
    gpu = find_gpu(strip_board(name))
    file = _read_measured_file()
    parent = shipped_bundle(PARENT)
    design = design_from_gpu(gpu)
    assert parent is not None
    if gpu.name == PARENT:
        return MeasuredChip(
            gpu.name,
            file.values,
            file.source,
            parent,
            design,
        )
    if gpu.name not in CARRIED:
        do = (
            f"Energies are there for {', '.join((PARENT, *CARRIED))}; an architecture "
            "file may describe any GPU."
        )
        raise unknown_name("GPU with energies for AccelWattch", gpu.name, (PARENT, *CARRIED), do)
    bundle = calibrated_bundle(gpu) or forecast_bundle(gpu)
    return _carry_chip(gpu, bundle, _MEASURED_ON.get(gpu.name, ()))


def forecast_chip(name: str) -> MeasuredChip:
    """Return the coefficients of a GPU as if no watt of it had been measured."""
    gpu = find_gpu(name)
    return _carry_chip(gpu, forecast_bundle(gpu), ())


def _carry_chip(
    gpu: Gpu,
    bundle: Bundle,
    measured_modules: Collection[str],
) -> MeasuredChip:
    parent = shipped_bundle(PARENT)
    assert parent is not None
    origin = "no watt of it was used"
    if measured_modules:
        origin = f"{', '.join(measured_modules)} follow watts measured on it"
    return MeasuredChip(
        name=gpu.name,
        values=_carry_values(gpu, bundle, parent, measured_modules),
        source="energies of the H200 times the ratio of module energies in the bundles of "
        f"{gpu.name} and {PARENT}; {origin}",
        bundle=bundle,
        design=design_from_gpu(gpu),
    )


def _carry_values(
    gpu: Gpu,
    bundle: Bundle,
    parent: Bundle,
    measured_modules: Collection[str],
) -> dict[str, MeasuredValue]:
    """Return the H200's coefficients times the ratio of the module energies in two bundles.

    The constant goes with idle watts at the top clock (leakage included, at the temperature that
    the bundle's idle power is meant for). The watts of SMs at work go with their energy a cycle,
    their number and their top clock; the energy is that at the card's own top voltage. Intervals
    are widened by the error of the farthest card that was left out, and of modules that own watts
    moved by that of the card's file on its other watts."""
    carried_error = worst_left_out().mape / 100.0
    own = find_judgements(gpu.name)
    own_error = own[0].mape / 100.0 if own else carried_error
    parent_values = _read_measured_file().values
    parent_gpu = find_gpu(PARENT)
    parent_power = as_module_power(parent.power)
    power = as_module_power(bundle.power)
    values = {}
    for name, term in TERMS.items():
        energy_ratio = power.energy_j[term.module] / parent_power.energy_j[term.module]
        error = own_error if term.module in measured_modules else carried_error
        values[name] = parent_values[name].scaled(energy_ratio, error)
    top_hz = float(np.mean(gpu.clocks.max_hz))
    parent_top_hz = float(np.mean(parent_gpu.clocks.max_hz))
    idle_w = float(power.idle.power_at(top_hz, power.idle.reference_c))
    parent_idle = parent_power.idle
    parent_idle_w = float(parent_idle.power_at(parent_top_hz, parent_idle.reference_c))
    sm_ratio = float(np.mean(gpu.sm_count)) / float(np.mean(parent_gpu.sm_count))
    cycle_ratio = power.energy_j["busy_sm_cycle"] / parent_power.energy_j["busy_sm_cycle"]
    active_ratio = cycle_ratio * sm_ratio * top_hz / parent_top_hz
    values[CONSTANT] = parent_values[CONSTANT].scaled(idle_w / parent_idle_w, carried_error)
    values[ACTIVE] = parent_values[ACTIVE].scaled(active_ratio, carried_error)
    return values


def measured_architecture(
    chip: MeasuredChip, base: ChipArchitecture | None = None
) -> ChipArchitecture:
    """Return the AccelWattch architecture of a GPU whose scaling factors give its measured
    energies.

    A scaling factor is the measured energy over the one that McPAT computes from the file. McPAT is
    not run: our own bottom-up energies stand for its (docs/method/component-energies.md compares
    them). All counters of a term have its energy, since a simulator counts an access as one of
    them. ``base`` is a simulator's own file: its components, sizes and technology stay, so that the
    simulator reads it, and factors and powers are replaced.

    McPAT adds a constant for memory controllers, which the fitted constant has in it: it is taken
    off."""
    values = chip.values
    draft = _draft_architecture(chip, base)
    table = _unscaled_table(draft, chip)
    scaling = dict(draft.scaling)
    comments = {"": f"{chip.name}: {chip.source}. Error of watts: {chip.judgement}."}
    scaling_of_column = {
        c.column: c.scaling for c in dialect_counters(SimulatorDialect.ACCELWATTCH)
    }
    for term_name, term in TERMS.items():
        for counter in term.counters:
            unscaled_j = table.energy_j.get(counter, 0.0)
            measured_j = values[term_name].value
            if measured_j > 0.0 and unscaled_j <= 0.0:
                raise BadInput(
                    f"{draft.name}: {counter} has no energy by the sizes of this file, so that no "
                    "factor gives its measured one. Give the file the unit that it counts."
                )
            factor = measured_j / unscaled_j if unscaled_j else 0.0
            scaling[scaling_of_column[counter]] = factor
            interval = _format_interval(values[term_name], 1e12, "pJ")
            comments[scaling_of_column[counter]] = f"{interval} a count"
    scaling["constant_power"] = max(values[CONSTANT].value - table.mc_constant_w, 0.0)
    interval = _format_interval(values[CONSTANT], 1.0, "W")
    comments["constant_power"] = f"{interval} with the memory controllers' constant"
    for name in STATIC_NAMES:
        if name.endswith("_flane"):
            comments[name] = _format_interval(values[ACTIVE], 1.0, "W")
    return replace(draft, scaling=scaling, comments=comments)


def _draft_architecture(chip: MeasuredChip, base: ChipArchitecture | None) -> ChipArchitecture:
    """Return the architecture with measured static and DRAM energies, and all factors at zero."""
    texts = architecture_texts(base) if base is not None else _plain_texts(chip)
    system = texts["system"]
    for name in STATIC_NAMES:
        # W of the chip with all SMs at work, which the component model shares over those that are.
        # A first lane wakes its SM; further lanes cost nothing that was measured.
        system[name] = repr(chip.values[ACTIVE].value) if name.endswith("_flane") else "0.0"
    for counter in dialect_counters(SimulatorDialect.ACCELWATTCH):
        system[counter.scaling] = "0.0"
    system |= {
        "constant_power": "0.0",
        "idle_core_power": "0.0",
        "modeled_chip_voltage_ref": "1.0",  # voltages are relative to that at the top clock
    }
    # J of a sector, which AccelWattch counts; opening rows is in it
    texts.setdefault("system.mc", {}).update(
        dram_rd_coeff=repr(chip.values["MEM_RD"].value),
        dram_wr_coeff=repr(chip.values["MEM_WR"].value),
        dram_pre_coeff="0.0",
    )
    name = f"accelwattch_{chip.name}"
    if base is None:
        return make_architecture(name, texts)
    return make_architecture(name, texts, base.stats, base.titles)


def measured_table(chip: MeasuredChip, architecture: ChipArchitecture) -> EnergyTable:
    """Return the unscaled energies that the architecture's factors multiply.

    The interval of an energy is unscaled too: times its factor it is the measured interval."""
    table = _unscaled_table(architecture, chip)
    interval_j: dict[str, tuple[float, float]] = {}
    for name, term in TERMS.items():
        energy = chip.values[name]
        low_ratio = energy.low / energy.value if energy.value else 1.0
        high_ratio = energy.high / energy.value if energy.value else 1.0
        for counter in term.counters:
            unscaled_j = table.energy_j[counter]
            interval_j[counter] = (low_ratio * unscaled_j, high_ratio * unscaled_j)
    return replace(
        table,
        name=f"{chip.name}-measured",
        source=f"{chip.source}. Error of watts: {chip.judgement}",
        interval_j=interval_j,
    )


def measured_model(name: str) -> tuple[ChipArchitecture, EnergyTable, BuiltComponentModel]:
    """Return architecture, energies and the component model of a GPU by its name."""
    chip = measured_chip(name)
    architecture = measured_architecture(chip)
    table = measured_table(chip, architecture)
    components = read_component_set(SimulatorDialect.ACCELWATTCH)
    sms = chip.design.sm_count
    built = build_component_model(
        architecture,
        table,
        components,
        sm_count=sms,
        voltage=chip.voltage,
        capped=False,  # AccelWattch's original limits pipeline duty; the fit did not
    )
    return architecture, table, built


def launches_to_activity(launches: CountedLaunches, sm_count: float) -> Activity:
    """Return launches as intervals of AccelWattch's events.

    All counts of a term are in its first counter, whose name the term has. The others that share
    its energy are zero, or accesses would be paid for twice."""
    column_of_term = {name: place for place, name in enumerate(TERMS)}
    counted = {
        "idle_sm": sm_count * (1.0 - launches.active),
        "core_voltage": launches.relative_voltage,
    }
    nothing = np.zeros(len(launches.names))
    values: dict[str, Array] = {}
    for counter in dialect_counters(SimulatorDialect.ACCELWATTCH):
        if not counter.event:
            continue
        values[counter.event] = nothing
        if counter.column in column_of_term:
            values[counter.event] = launches.counts[:, column_of_term[counter.column]]
    values |= counted
    return Activity(
        launches.duration_s,
        np.stack(list(values.values()), axis=-1),
        tuple(values),
        OperatingPoint(clock_hz=launches.clock_hz),
        ActivitySource.PROFILED,
    )


def read_measured_counters(path: Path, chip: MeasuredChip) -> tuple[tuple[str, ...], Activity]:
    """Read an Nsight Compute export in the counts that the measured energies were fitted to.

    Counts are taken as the profiler saw them: caches that it emptied before a kernel show in the
    bytes of device memory. The reader has turned nanoseconds into seconds."""
    launches, metrics = profiler_counters.read_ncu_metrics(path)
    names = tuple(launch.kernel for launch in launches)
    needed = ("gpu__time_duration.sum", "sm__cycles_elapsed.max", "smsp__inst_executed.sum")
    if lost := [metric for metric in needed if metric not in metrics]:
        raise BadInput(
            f"{path.name}: metrics {', '.join(lost)} are missing. Collect them with ncu --metrics."
        )
    seconds = metrics["gpu__time_duration.sum"]
    cycles = metrics["sm__cycles_elapsed.max"]
    accesses = count_accesses(metrics)
    counts = np.stack(
        [np.broadcast_to(accesses[name], seconds.shape) for name in TERMS],
        axis=-1,
    )
    sms = float(chip.design.sm_count)
    active = np.clip(metrics.get("sm__cycles_active.sum", sms * cycles) / (sms * cycles), 0.0, 1.0)
    clock_hz = cycles / seconds
    counted_launches = CountedLaunches(
        names=names,
        families=tuple("" for _ in names),
        power_w=np.ones(len(names)),  # not measured here, and not read
        duration_s=seconds,
        clock_hz=clock_hz,
        relative_voltage=chip.voltage.level_at(clock_hz),
        active=active,
        counts=counts,
    )
    return names, launches_to_activity(counted_launches, sms)


@dataclass(frozen=True)
class HeldOutJudgement:
    """Errors of the component model on operators that no coefficient has seen, in percent."""

    rows: int
    operators: int
    mape: float | None  # mean absolute error; None without rows
    bias: float  # mean error; above zero is predicted too high
    by_family: Mapping[str, tuple[int, float | None]]  # rows and their mean absolute error
    # mean absolute error of the baseline that gives every row the mean power of training operators
    constant: float | None


def judge_held_out(folder: Path, gpu: str = PARENT) -> HeldOutJudgement:
    """Compare the model that ``lab power-trace --config h200`` builds with the operators that were
    held out.
    """
    operators = read_operators(folder, gpu)
    is_test = np.array([is_held_out(name) for name in operators.names])
    test = operators.select(is_test)
    training = operators.select(~is_test)
    chip = measured_chip(gpu)
    power_w = (
        measured_model(gpu)[2]
        .model.power(launches_to_activity(test, float(chip.design.sm_count)))
        .total_w
    )
    rows = len(test.names)
    baseline_w = np.full(len(test.names), training.power_w.mean())
    by_family = {}
    for name in dict.fromkeys(test.families):
        of_family = np.array(test.families) == name
        by_family[name] = (
            int(of_family.sum()),
            mean_percent_error(power_w[of_family], test.power_w[of_family]),
        )
    mape = mean_percent_error(power_w, test.power_w)
    baseline_mape = mean_percent_error(baseline_w, test.power_w)
    bias = float(100.0 * np.mean(power_w / test.power_w - 1.0))
    return HeldOutJudgement(
        rows=rows,
        operators=len(set(test.names)),
        mape=mape,
        bias=bias,
        by_family=by_family,
        constant=baseline_mape,
    )


def _format_interval(
    value: MeasuredValue,
    size: float,
    unit: str,
) -> str:
    return f"{value.value * size:.4g} {unit} ({value.low * size:.4g} to {value.high * size:.4g})"


def _unscaled_table(architecture: ChipArchitecture, chip: MeasuredChip) -> EnergyTable:
    clock_hz = float(np.mean(find_gpu(chip.name).clocks.max_hz))
    built = build_architecture_chip(architecture, chip.design.sm_count, clock_hz)
    return make_energy_table(built, SimulatorDialect.ACCELWATTCH)


def _plain_texts(chip: MeasuredChip) -> dict[str, dict[str, str]]:
    """Return an architecture with the GPU's sizes, in the technology of AccelWattch's own files.

    McPAT has no special function units: AccelWattch gives it theirs as multipliers (``MUL``). The
    texture cache is the L1. ``shared.capacity_byte`` is that of one of 32 banks of words, and
    ``l2.capacity_byte`` that of one of ``l2_count`` slices."""
    d = chip.design

    def cache_text(
        capacity: int,
        block: int,
        ways: int,
        write_back: bool = False,
    ) -> str:
        """Write what McPAT reads: capacity in whole sets, block, ways, banks, throughput and
        latency in cycles, output width, and whether it writes back.
        """
        whole_capacity = capacity // (block * ways) * block * ways
        return f"{whole_capacity},{block},{ways},1,1,3,{block},{int(write_back)}"

    fixed = _read_measured_file().technology
    sizes = {
        "number_hardware_threads": d.warps,
        "ALU_per_core": d.integer_lanes,
        "MUL_per_core": d.sfu_lanes,
        "FPU_per_core": d.lanes,
        "simd_width": d.warp_size,
        "warp_size": d.warp_size,
        "archi_Regs_IRF_size": d.registers.registers,
    }
    data = d.data
    constant = d.constant
    l2 = d.l2
    assert l2 is not None
    l1_text = cache_text(data.capacity_byte, data.block_byte, data.ways)
    constant_text = cache_text(constant.capacity_byte, constant.block_byte, constant.ways)
    shared_text = cache_text(_SHARED_BANKS * d.shared.capacity_byte, d.shared.block_byte, 1)
    l2_text = cache_text(l2.capacity_byte, l2.block_byte, l2.ways, True)
    counts = {"number_of_cores": str(d.sm_count), "number_of_L2s": str(d.l2_count)}
    return {
        "system": fixed["system"] | counts,
        "system.core0": fixed["system.core0"] | {name: str(size) for name, size in sizes.items()},
        "system.core0.ccache": {"ccache_config": constant_text},
        "system.core0.tcache": {"tcache_config": l1_text},
        "system.core0.sharedmemory": {"sharedmemory_config": shared_text},
        "system.core0.dcache": {"dcache_config": l1_text},
        "system.L20": {"L2_config": l2_text},
        "system.NoC0": fixed["system.NoC0"],
    }
