"""Energies of AccelWattch's counters from our own measurements, and the XML file that a simulator
reads.

The power of a kernel is fitted as

    P = P_const + P_sm · V · a + V² · Σ_i E_i · n_i / t + Σ_d E_d · n_d / t

with a the share of SMs at work, V the core voltage relative to that at the top clock, on-chip
counters i and device memory d. Rows are the microbenchmarks of a database and one half of its
counted operators; the other half is kept for the judgement. Coefficients are zero or more (least
squares on relative error), and their intervals are the 5th and 95th percentile of fits to resampled
benchmarks. A profiler sees fewer counters than a simulator writes, so counters that always come
together share a coefficient: registers, instruction cache and scheduler are in the instruction and
in the unit that uses them, and have none of their own.

Other GPUs have the H200's coefficients times the ratio of the module energies in the two GPUs'
bundles."""

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
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.component_power import STATIC_NAMES
from wattcast.power.power_model import VoltageCurve
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.bundle.calibrated import calibrated_bundle
from wattcast.predictor.bundle.forecast import forecast_bundle

PARENT = "h200"
CARRIED = (
    *("a100-sxm-80gb", "h100-sxm", "b200", "h100-nvl", "gh200", "t4"),
    *("rtx-3070", "rtx-3090", "rtx-4090"),
)
CONSTANT = "constant_power"
ACTIVE = "static_flane"


class _Term(NamedTuple):
    """A fitted energy: the counters that share it, and the module whose energy carries it to other
    GPUs.
    """

    counters: tuple[str, ...]
    module: str
    exponent: int  # of the core voltage


# A product of tensor cores counts as 32 accesses, one a thread, of 4 sub-core cycles (m16n8k16 of
# 16-bit inputs).
TERMS = {
    row["term"]: _Term(tuple(row["counters"].split()), row["module"], int(row["exponent"]))
    for row in read_shipped_table("wattcast.lab.gpuwattch", "measured_terms.csv")
}
_WARP = 32.0
_SECTOR_BYTE = 32.0
_CYCLE_ACCESS = 8.0
_RESULTS = "l1tex__m_l1tex2xbar_write_bytes.sum"
_RESAMPLES = 200
_NOT_COUNTED = (
    "mma_int8",
    "wgmma_int8",
    "mma_fp64",
    "mma_fp64_884",
)  # TENSOR_ACC is of 16-bit and tf32 products
_OTHER_IDLE = ("idle_context_off", "idle_host_busy")  # idle clocks, which no kernel runs at
# A forecast of the B200's watts was 32 % off before any of them was used
# (predictor/bundle/b200/calibration.yaml)
_CARRIED_ERROR = 0.32
_MEASURED_ON = {
    "b200": ("tensor_fp16_flop", "l2_byte", "dram_read_byte", "dram_write_byte", "shared_byte")
}
_MEASURED_ERROR = 0.063  # of the same rows held out, after they had moved the energies


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
        """Return the value times a factor, its interval widened by a relative error."""
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
    level: float  # core voltage relative to that at the top clock
    active: float  # share of SMs at work
    counts: list[float]  # of each term


@dataclass(frozen=True)
class CountedLaunches:
    """Measured kernels with their counts: rows of microbenchmarks and of operators."""

    names: tuple[str, ...]
    families: tuple[str, ...]
    power_w: Array
    duration_s: Array
    clock_hz: Array
    level: Array  # core voltage relative to that at the top clock
    active: Array  # share of SMs at work
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
            level=np.array([launch.level for launch in launches]),
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
            level=self.level[rows],
            active=self.active[rows],
            counts=self.counts[rows],
        )

    def design(self) -> Array:
        """Return the factor of every coefficient in every row, ``(row, coefficient)``."""
        exponent = np.array([term.exponent for term in TERMS.values()])
        rates = self.counts / self.duration_s[:, np.newaxis] * self.level[:, np.newaxis] ** exponent
        return np.column_stack([np.ones(len(self.names)), self.active * self.level, rates])


def is_held_out(spec: str) -> bool:
    """Tell whether an operator of the database is kept for the judgement: those whose name's hash
    ends odd.
    """
    return int(spec[-1], 16) % 2 == 1


def count_accesses(metrics: Mapping[str, float | Array]) -> dict[str, Array]:
    """Return the counts of ``TERMS`` from Nsight Compute metrics of a launch (dots as dots or as
    underscores).

    Unit accesses are of active threads. Arithmetic on pairs of halves runs in the tensor pipe for
    two cycles and counts as two fp32 accesses. Bank conflicts are not accesses."""
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
    halves = np.maximum(hmma - gmma, 0.0)
    shared = read("l1tex__data_pipe_lsu_wavefronts_mem_shared_sum")
    conflicts = read("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_sum")
    crossed = read("l1tex__m_l1tex2xbar_write_bytes_sum") + read(
        "l1tex__m_xbar2l1tex_read_bytes_sum"
    )
    return {
        "TOT_INST": read("smsp__inst_executed_sum"),
        "INT_ACC": threads * read("sm__inst_executed_pipe_alu_sum"),
        "FPU_ACC": threads * (read("sm__inst_executed_pipe_fma_sum") + 2.0 * halves),
        "DPU_ACC": threads * read("sm__inst_executed_pipe_fp64_sum"),
        "FP_EXP_ACC": _WARP * read("sm__inst_executed_pipe_xu_sum"),
        "TENSOR_ACC": _CYCLE_ACCESS
        * np.maximum(read("sm__pipe_tensor_cycles_active_sum") - 2.0 * halves, 0.0),
        "SHRD_ACC": np.maximum(shared - conflicts, 0.0),
        "DC_RH": np.maximum(read("l1tex__data_pipe_lsu_wavefronts_sum") - shared, 0.0),
        "NOC_A": crossed / _SECTOR_BYTE,
        "L2_RH": read("lts__t_sectors_op_read_sum") + read("lts__t_sectors_op_write_sum"),
        "MEM_RD": read("dram__bytes_read_sum") / _SECTOR_BYTE,
        "MEM_WR": read("dram__bytes_write_sum") / _SECTOR_BYTE,
    }


def read_benchmarks(folder: Path, gpu: str = PARENT) -> CountedLaunches:
    """Read the microbenchmarks that counter models are trained on, without integer and fp64 tensor
    products.
    """
    skipped = read_column_map(
        files("wattcast.lab.counter_models").joinpath("columns", f"{gpu}.yaml")
    ).left_out
    skipped_names = {*skipped, *_NOT_COUNTED, *_OTHER_IDLE}
    launches = []
    for line in microbench_lines.make_table_lines(folder, gpu):
        name = str(line["benchmark"])
        if str(line["group"]).startswith("multimedia") or name in skipped_names:
            continue
        numbers = {key: value for key, value in line.items() if isinstance(value, float)}
        elapsed = numbers.get("sm__cycles_elapsed.sum", 0.0)
        active = min(numbers["sm__cycles_active.sum"] / elapsed, 1.0) if elapsed else 0.0
        launches.append(
            CountedLaunch(
                name=name,
                family="microbenchmark",
                power_w=numbers["watts"],
                duration_s=numbers["seconds"],
                clock_hz=numbers["effective_clock_hz"],
                level=numbers["relative_voltage"],
                active=active,
                counts=[float(value) for value in count_accesses(numbers).values()],
            )
        )
    return CountedLaunches.gather(launches)


def counted_rows(folder: Path, gpu: str = PARENT) -> list[tuple[Plain, list[dict[str, float]]]]:
    """Return sustained rows of counted operators with random data, each with the metrics of its
    kernels.

    Counters were taken with cold caches. Operands of less than half of L2 stay there when an
    operator is repeated (each half of the chip keeps its own copies), so that nothing goes to
    device memory. Of larger ones every result goes there once."""
    chip = find_gpu(gpu)
    half_l2 = 0.5 * float(np.mean(chip.need("l2.capacity_byte")))
    counted = microbench_lines.read_operator_metrics(folder, float(np.mean(chip.sm_count)))
    pairs = []
    for row in read_table(folder / ROWS_FILE):
        is_sustained = row["kind"] == "sustained" and row["data"] == "random"
        is_settled = not row["error"] and "unsettled" not in (row["flags"] or [])
        if not (is_sustained and is_settled and row["spec"] in counted):
            continue
        kernels = [dict(metrics) for metrics in counted[row["spec"]]]
        if row["footprint_byte"] < half_l2:
            for metrics in kernels:
                metrics["dram__bytes_read.sum"] = 0.0
                metrics["dram__bytes_write.sum"] = 0.0
        else:
            written_byte = sum(metrics["dram__bytes_write.sum"] for metrics in kernels)
            result_byte = sum(metrics[_RESULTS] for metrics in kernels)
            kernels[-1]["dram__bytes_write.sum"] += max(result_byte - written_byte, 0.0)
        for metrics in kernels:
            for way in ("read", "write"):
                sectors = metrics[f"dram__bytes_{way}.sum"] / _SECTOR_BYTE
                metrics[f"dram__sectors_{way}.sum"] = sectors
        pairs.append((row, kernels))
    return pairs


def read_operators(folder: Path, gpu: str = PARENT) -> CountedLaunches:
    """Read the counted operators as launches."""
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
        level = microbench_lines.bundle_voltage(gpu, row["sm_clock_hz"])
        assert level is not None, "a GPU with counted operators has a voltage curve"
        launches.append(
            CountedLaunch(
                name=row["spec"],
                family=row["family"],
                power_w=row["power_w"],
                duration_s=row["latency_s"],
                clock_hz=row["effective_clock_hz"],
                level=level,
                active=min(active_cycles / cycles, 1.0),
                counts=list(counts.values()),
            )
        )
    return CountedLaunches.gather(launches)


def fit_measured_energies(folder: Path, gpu: str = PARENT) -> dict[str, MeasuredValue]:
    """Fit all coefficients to microbenchmarks and to the operators that are not held out."""
    from scipy.optimize import nnls

    operators = read_operators(folder, gpu)
    is_training = np.array([not is_held_out(name) for name in operators.names])
    parts = (read_benchmarks(folder, gpu), operators.select(is_training))
    relative = np.concatenate([part.design() / part.power_w[:, np.newaxis] for part in parts])
    names = np.array([*parts[0].names, *parts[1].names])
    scale = relative.max(axis=0)

    def solve(weight: Array) -> Array:
        root = np.sqrt(weight)
        return np.asarray(nnls(relative / scale * root[:, np.newaxis], root)[0] / scale)

    best = solve(np.ones(len(names)))
    drawn = [solve(weight) for weight in _resample_benchmarks(names)]
    low, high = np.percentile(np.array(drawn), [5.0, 95.0], axis=0)
    values = {}
    for place, name in enumerate((CONSTANT, ACTIVE, *TERMS)):
        ends = (best[place], min(low[place], best[place]), max(high[place], best[place]))
        values[name] = MeasuredValue(*(float(f"{end:.5g}") for end in ends))
    return values


def _resample_benchmarks(names: Array) -> Iterator[Array]:
    """Yield how often each row counts when benchmarks are drawn with replacement."""
    random = np.random.default_rng(0)
    benchmarks, place_of_row = np.unique(names, return_inverse=True)
    for _ in range(_RESAMPLES):
        chosen = random.choice(benchmarks.size, benchmarks.size)
        times = np.bincount(chosen, minlength=benchmarks.size)
        yield times[place_of_row].astype(np.float64)


class _MeasuredFile(msgspec.Struct, forbid_unknown_fields=True):
    wattcast: str
    gpu: str
    source: str
    values: dict[str, MeasuredValue]
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
        return self.bundle.power.as_module_power().voltage


@cache
def measured_chip(name: str) -> MeasuredChip:
    """Return the coefficients of a GPU: those of the H200 as fitted, of A100, H100 and B200 carried
    over.
    """
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
    measured_modules = _MEASURED_ON.get(gpu.name, ())
    origin = "no watt of it was used"
    if measured_modules:
        origin = f"{', '.join(measured_modules)} follow watts measured on it"
    return MeasuredChip(
        name=gpu.name,
        values=_carry_values(gpu, bundle, parent, measured_modules),
        source="energies of the H200 times the ratio of module energies in the bundles of "
        f"{gpu.name} and {PARENT}; {origin}",
        bundle=bundle,
        design=design,
    )


def _carry_values(
    gpu: Gpu,
    bundle: Bundle,
    parent: Bundle,
    measured_modules: Collection[str],
) -> dict[str, MeasuredValue]:
    """Return the H200's coefficients times the ratio of the module energies in two bundles.

    The constant goes with idle watts, the watts of SMs at work with their energy a cycle, their
    number and their clock."""
    parent_values = _read_measured_file().values
    parent_gpu = find_gpu(PARENT)
    parent_power = parent.power.as_module_power()
    power = bundle.power.as_module_power()
    values = {}
    for name, term in TERMS.items():
        energy_ratio = power.energy_j[term.module] / parent_power.energy_j[term.module]
        error = _MEASURED_ERROR if term.module in measured_modules else _CARRIED_ERROR
        values[name] = parent_values[name].scaled(energy_ratio, error)
    top_hz = float(np.mean(gpu.clocks.max_hz))
    parent_top_hz = float(np.mean(parent_gpu.clocks.max_hz))
    idle_w = float(power.idle.power_at(top_hz, power.idle.reference_c))
    parent_idle = parent_power.idle
    parent_idle_w = float(parent_idle.power_at(parent_top_hz, parent_idle.reference_c))
    sm_ratio = float(np.mean(gpu.sm_count)) / float(np.mean(parent_gpu.sm_count))
    cycle_ratio = power.energy_j["busy_sm_cycle"] / parent_power.energy_j["busy_sm_cycle"]
    active_ratio = cycle_ratio * sm_ratio * top_hz / parent_top_hz
    values[CONSTANT] = parent_values[CONSTANT].scaled(idle_w / parent_idle_w, _CARRIED_ERROR)
    values[ACTIVE] = parent_values[ACTIVE].scaled(active_ratio, _CARRIED_ERROR)
    return values


def measured_architecture(
    chip: MeasuredChip, base: ChipArchitecture | None = None
) -> ChipArchitecture:
    """Return the AccelWattch architecture of a GPU whose scaling factors give its measured
    energies.

    A scaling factor is the measured energy over the one that McPAT computes from the file, for
    which our bottom-up energies stand (docs/method/component-energies.md compares them). ``base``
    is a simulator's own file: its tree, sizes and technology stay, so that the simulator reads it,
    and factors and powers are replaced."""
    values = chip.values
    draft = _draft_architecture(chip, base)
    table = _unscaled_table(draft, chip)
    scaling = dict(draft.scaling)
    comments = {"": f"{chip.name}: {chip.source}"}
    scaling_of_column = {
        c.column: c.scaling for c in dialect_counters(SimulatorDialect.ACCELWATTCH)
    }
    for term_name, term in TERMS.items():
        for counter in term.counters:
            unscaled_j = table.energy_j.get(counter, 0.0)
            factor = values[term_name].value / unscaled_j if unscaled_j else 0.0
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
        # a first lane wakes its SM; further lanes cost nothing that was measured
        system[name] = repr(chip.values[ACTIVE].value) if name.endswith("_flane") else "0.0"
    for counter in dialect_counters(SimulatorDialect.ACCELWATTCH):
        system[counter.scaling] = "0.0"
    system |= {
        "constant_power": "0.0",
        "idle_core_power": "0.0",
        "modeled_chip_voltage_ref": "1.0",
    }
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
    """Return the energies that the architecture's factors multiply, with the interval of every
    product.
    """
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
        source=chip.source,
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
        capped=False,
    )
    return architecture, table, built


def launches_to_activity(launches: CountedLaunches, sm_count: float) -> Activity:
    """Return launches as intervals of AccelWattch's events. Counters without a term of their own
    are zero.
    """
    column_of_term = {name: place for place, name in enumerate(TERMS)}
    counted = {
        "idle_sm": sm_count * (1.0 - launches.active),
        "core_voltage": launches.level,
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
    """Read an Nsight Compute export in the counts that the measured energies were fitted to."""
    launches, metrics = profiler_counters.read_ncu_metrics(path)
    names = tuple(launch.kernel for launch in launches)
    needed = ("gpu__time_duration.sum", "sm__cycles_elapsed.max", "smsp__inst_executed.sum")
    if lost := [metric for metric in needed if metric not in metrics]:
        raise BadInput(
            f"{path.name}: metrics {', '.join(lost)} are missing. Collect them with ncu --metrics."
        )
    seconds = metrics["gpu__time_duration.sum"]
    cycles = metrics["sm__cycles_elapsed.max"]
    counts = np.stack(
        [np.broadcast_to(value, seconds.shape) for value in count_accesses(metrics).values()],
        axis=-1,
    )
    sms = float(chip.design.sm_count)
    active = np.clip(metrics.get("sm__cycles_active.sum", sms * cycles) / (sms * cycles), 0.0, 1.0)
    level = chip.voltage.level_at(cycles / seconds)
    families = tuple("" for _ in names)
    counted_launches = CountedLaunches(
        names,
        families,
        np.ones(len(names)),
        seconds,
        cycles / seconds,
        level,
        active,
        counts,
    )
    return names, launches_to_activity(counted_launches, sms)


@dataclass(frozen=True)
class HeldOutJudgement:
    """Errors of the component model on operators that no coefficient has seen, in percent."""

    rows: int
    operators: int
    mape: float | None
    bias: float
    by_family: Mapping[str, tuple[int, float | None]]
    constant: float | None  # the mean power of the training operators, for every row


def judge_held_out(folder: Path, gpu: str = PARENT) -> HeldOutJudgement:
    """Compare the model that ``--config`` builds with the operators that were held out."""
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
    flat = np.full(len(test.names), training.power_w.mean())
    by_family = {}
    for name in dict.fromkeys(test.families):
        of_family = np.array(test.families) == name
        by_family[name] = (
            int(of_family.sum()),
            mean_percent_error(power_w[of_family], test.power_w[of_family]),
        )
    error, floor = (mean_percent_error(watts, test.power_w) for watts in (power_w, flat))
    bias = float(100.0 * np.mean(power_w / test.power_w - 1.0))
    return HeldOutJudgement(
        rows,
        len(set(test.names)),
        error,
        bias,
        by_family,
        floor,
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
    """Return an architecture with the GPU's sizes, in the technology of AccelWattch's own files."""
    d = chip.design

    def cache_text(
        capacity: int,
        block: int,
        ways: int,
        write_back: bool = False,
    ) -> str:
        return f"{capacity // (block * ways) * block * ways},{block},{ways},1,1,3,{block},{int(write_back)}"

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
    l2 = d.l2
    assert l2 is not None
    l1_text = cache_text(data.capacity_byte, data.block_byte, data.ways)
    return {
        "system": fixed["system"]
        | {"number_of_cores": str(d.sm_count), "number_of_L2s": str(d.l2_count)},
        "system.core0": fixed["system.core0"] | {name: str(size) for name, size in sizes.items()},
        "system.core0.ccache": {"ccache_config": cache_text(d.constant.capacity_byte, 64, 4)},
        "system.core0.tcache": {"tcache_config": l1_text},
        "system.core0.sharedmemory": {
            "sharedmemory_config": cache_text(32 * d.shared.capacity_byte, 4, 1)
        },
        "system.core0.dcache": {"dcache_config": l1_text},
        "system.L20": {"L2_config": cache_text(l2.capacity_byte, l2.block_byte, l2.ways, True)},
        "system.NoC0": fixed["system.NoC0"],
    }
