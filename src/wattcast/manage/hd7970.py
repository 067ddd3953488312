"""Simulate the HD 7970 card of paper 004: 448 settings, 25 kernels of 14 applications.

A kernel's time is vector-ALU and DRAM time, overlapped as far as occupancy hides latency, plus a serial path and a
fixed part. Bandwidth is a smooth minimum of three limits: the memory bus, the crossing from the L2's clock domain to
the memory's, and what the waves in flight can ask for. All settings of all kernels are one array expression. Numbers
are in ``data/hd7970*.yaml``, each with the sentence of the paper it was derived from. ``perturb_simulation`` varies
card and kernels at random, for results on cards that the controller was not tuned on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import decode_yaml
from wattcast.manage.plants import Knob, KnobRole, Lattice, PlantTables

T = TypeVar("T")
STRESS_APPLICATIONS = ("MaxFlops", "DeviceMemory")  # left out of the second geometric mean, as in the paper


class SourcedValue(msgspec.Struct, forbid_unknown_fields=True):
    """Hold a number or the levels of a knob, and the sentence it was derived from."""

    value: Any
    because: str = msgspec.field(name="from")


class OverlapData(msgspec.Struct, forbid_unknown_fields=True):
    """Hold how compute and memory time overlap."""

    base: float
    per_occupancy: float
    because: str = msgspec.field(name="from")


class CardData(msgspec.Struct, forbid_unknown_fields=True):
    """Mirror ``hd7970.yaml``."""

    format: int
    gpu: str
    units: SourcedValue
    core_clock: SourcedValue
    memory_clock: SourcedValue
    default: SourcedValue
    memory: dict[str, SourcedValue]
    overlap: OverlapData
    power: dict[str, SourcedValue]


class PhaseData(msgspec.Struct, forbid_unknown_fields=True):
    """Say how one of a kernel's recurring iterations differs from its mean."""

    work: float
    valu: float = 1.0
    dram: float = 1.0


class KernelData(msgspec.Struct, forbid_unknown_fields=True):
    """Mirror one kernel of ``hd7970_kernels.yaml``."""

    name: str
    time: str
    valu: float
    dram: float
    fetch: float
    fixed: float
    occupancy: float
    divergence: float
    vgpr: float
    sgpr: float
    iterations: int = 60
    serial: float = 0.0
    write_stall: float = 0.0
    thrash: float = 0.0
    fits: float = 32.0
    phases: list[PhaseData] = []
    because: dict[str, str] = msgspec.field(name="from", default={})


class KernelFile(msgspec.Struct, forbid_unknown_fields=True):
    """Mirror ``hd7970_kernels.yaml``; ``assumed`` covers the numbers without a sentence of their own."""

    format: int
    assumed: dict[str, str]
    kernels: list[KernelData]


def read_kernel_file() -> KernelFile:
    """Read the 25 kernels with their sentences."""
    return _read_data("hd7970_kernels.yaml", KernelFile)


def _read_data(name: str, kind: type[T]) -> T:
    return decode_yaml(files("wattcast.manage").joinpath("data", name).read_bytes(), kind, name)


@dataclass(frozen=True)
class CardCoefficients:
    """Hold the coefficients of the card: powers in W at 1.19 V, 1 GHz, 1375 MHz."""

    efficiency: float
    crossing_byte_per_cycle: float
    latency_core_cycle: float
    latency_memory_cycle: float
    byte_per_wave: float
    waves_per_unit: float
    sharpness: float
    overlap_base: float
    overlap_per_occupancy: float
    board_w: float
    uncore_leakage_w: float
    unit_leakage_w: float
    uncore_clock_w: float
    unit_clock_w: float
    unit_alu_w: float
    fabric_w: float
    memory_floor_w: float
    memory_bus_w: float
    memory_access_w: float
    memory_stretch: float
    idle_w: float


@dataclass(frozen=True)
class KernelDemand:
    """Hold what the phases of all kernels ask for, each ``(phase,)``; times in s at the top settings."""

    valu_s: Array
    dram_s: Array
    fetch_s: Array
    serial_s: Array
    fixed_s: Array
    occupancy: Array
    divergence: Array
    vgpr: Array  # of 256
    sgpr: Array  # of 102
    write_stall: Array  # %
    thrash: Array  # share of the traffic that is interference between units
    fits: Array  # units at which there is none
    work: Array  # relative instructions


@dataclass(frozen=True)
class SettingColumns:
    """Hold all settings as columns, each ``(setting,)``, and voltage relative to the top."""

    unit_count: Array
    core_hz: Array
    memory_hz: Array
    relative_v: Array
    bus_byte_per_s: Array


@dataclass(frozen=True)
class SimulatedHd7970:
    """Hold all that is known of the simulated card."""

    card: CardCoefficients
    lattice: Lattice
    columns: SettingColumns
    default: tuple[int, ...]
    kernels: tuple[str, ...]  # of each phase
    applications: dict[str, npt.NDArray[np.int64]]
    work: KernelDemand

    def build_tables(self, name: str = "hd-7970") -> PlantTables:
        """Compute time, power and counters at all settings."""
        time_s, parts_s, dram_byte_per_s = duration_s(self.card, self.work, self.columns)
        gpu_w, memory_w = power_w(self.card, self.columns, parts_s["valu"] / time_s, dram_byte_per_s)
        return PlantTables(
            name=name,
            lattice=self.lattice,
            default=self.default,
            kernels=self.kernels,
            time_s=time_s,
            power_w=self.card.board_w + gpu_w + memory_w,
            applications=self.applications,
            work=self.work.work,
            counters=simulate_counters(self.work, self.columns, time_s, parts_s, dram_byte_per_s),
            memory_w=memory_w,
            board_w=self.card.board_w,
            idle_w=self.card.idle_w,
            source="simulated from paper 004 (data/hd7970.yaml, data/hd7970_kernels.yaml)",
        )


def duration_s(
    card: CardCoefficients, work: KernelDemand, at: SettingColumns
) -> tuple[Array, dict[str, Array], Array]:
    """Return the time of each phase at each setting, its parts, and mean DRAM bandwidth; ``(phase, setting)``.

    t = (t_valu^p + t_dram^p)^(1/p) + t_serial + t_fixed, with p rising with occupancy. Valid between the card's
    lowest and highest settings, for one kernel at a time.
    """
    col = {f.name: getattr(work, f.name)[:, np.newaxis] for f in fields(work)}
    top_hz, units_top = at.core_hz.max(), at.unit_count.max()
    per_unit = (units_top / at.unit_count) * (top_hz / at.core_hz)
    valu, fetch = col["valu_s"] * per_unit, col["fetch_s"] * per_unit
    crowd = np.clip((at.unit_count - col["fits"]) / np.maximum(units_top - col["fits"], 1.0), 0.0, 1.0)
    traffic = 1.0 - col["thrash"] * (1.0 - crowd)
    supply = bandwidth_byte_per_s(card, col["occupancy"], at)
    dram = col["dram_s"] * traffic * supply[:, -1:] / supply
    serial = col["serial_s"] * top_hz / at.core_hz
    exponent = card.overlap_base + card.overlap_per_occupancy * col["occupancy"]
    overlapped = (valu**exponent + dram**exponent) ** (1.0 / exponent)
    total = overlapped + serial + col["fixed_s"]
    moved_byte = col["dram_s"] * traffic * supply[:, -1:]
    return total, {"valu": valu, "fetch": fetch, "dram": dram, "serial": serial}, moved_byte / total


def bandwidth_byte_per_s(card: CardCoefficients, occupancy: Array, at: SettingColumns) -> Array:
    """Return what DRAM can give: the smooth minimum of bus, clock-domain crossing and requests in flight.

    B = (B_bus^-q + B_crossing^-q + B_asked^-q)^(-1/q), q the sharpness; requests in flight give waves × byte per wave
    over the latency of core and memory (Little's law).
    """
    bus = card.efficiency * at.bus_byte_per_s
    crossing = card.crossing_byte_per_cycle * at.core_hz
    latency_s = card.latency_core_cycle / at.core_hz + card.latency_memory_cycle / at.memory_hz
    asked = at.unit_count * card.waves_per_unit * occupancy * card.byte_per_wave / latency_s
    sharp = card.sharpness
    return np.asarray((bus**-sharp + crossing**-sharp + asked**-sharp) ** (-1.0 / sharp))


def power_w(
    card: CardCoefficients, at: SettingColumns, valu_duty: Array, dram_byte_per_s: Array
) -> tuple[Array, Array]:
    """Return chip and memory power in W, ``(phase, setting)``, without the board's constant part.

    Leakage scales with V², switching with V² f; memory power is a floor, a part that follows the bus clock, and
    energy per byte that grows as the bus slows down.
    """
    v2, f = at.relative_v**2, at.core_hz / at.core_hz.max()
    rate = dram_byte_per_s / at.bus_byte_per_s.max()
    leakage = (card.uncore_leakage_w + at.unit_count * card.unit_leakage_w) * v2
    alu = card.unit_alu_w * np.minimum(valu_duty, 1.0)
    switching = card.uncore_clock_w + at.unit_count * (card.unit_clock_w + alu)
    gpu = leakage + v2 * f * switching + v2 * card.fabric_w * rate
    slow = at.memory_hz.max() / at.memory_hz
    access = card.memory_access_w * rate * (1.0 + card.memory_stretch * (slow - 1.0))
    return gpu, card.memory_floor_w + card.memory_bus_w / slow + access


def simulate_counters(
    work: KernelDemand, at: SettingColumns, time_s: Array, parts_s: dict[str, Array], byte_per_s: Array
) -> dict[str, Array]:
    """Return the counters of the paper's Table 2, in its units, ``(phase, setting)``."""
    ones = np.ones_like(time_s)
    valu = np.minimum(parts_s["valu"] / time_s, 1.0)
    memory = np.minimum(np.maximum(parts_s["fetch"], parts_s["dram"]) / time_s, 1.0)
    stalled = np.clip(parts_s["dram"] - parts_s["fetch"], 0.0, None) / time_s
    return {
        "VALUBusy": 100.0 * valu,
        "VALUUtilization": 100.0 * (1.0 - work.divergence[:, np.newaxis]) * ones,
        "MemUnitBusy": 100.0 * memory,
        "MemUnitStalled": 100.0 * np.minimum(stalled, 1.0),
        "WriteUnitStalled": work.write_stall[:, np.newaxis] * ones,
        "NormVGPR": work.vgpr[:, np.newaxis] / 256.0 * ones,
        "NormSGPR": work.sgpr[:, np.newaxis] / 102.0 * ones,
        "icActivity": np.minimum(byte_per_s / at.bus_byte_per_s, 1.0),
    }


def read_paper_residency() -> dict[str, dict[float, float]]:
    """Return the shares of time that figure 16 of the paper gives for levels of each knob (Graph500)."""
    found = {}
    for role, shares in _read_data("hd7970_residency.yaml", dict[str, SourcedValue]).items():
        unit = "" if role == KnobRole.COMPUTE_UNITS else "Hz"
        found[role] = {units.parse(level, unit, role): share for level, share in shares.value.items()}
    return found


@cache
def load_tables() -> PlantTables:
    """Return the simulated card as tables."""
    return load_simulation().build_tables()


@cache
def load_simulation() -> SimulatedHd7970:
    """Return the card and kernels as shipped."""
    file = _read_data("hd7970.yaml", CardData)
    gpu = hardware.load_gpu(file.gpu)
    clocks = {
        role: tuple(units.parse(v, "Hz", f"hd7970.yaml: {role}") for v in levels.value)
        for role, levels in ((KnobRole.CORE_CLOCK, file.core_clock), (KnobRole.MEMORY_CLOCK, file.memory_clock))
    }
    unit_counts = Knob(KnobRole.COMPUTE_UNITS, tuple(float(v) for v in file.units.value))
    lattice = Lattice((unit_counts, *(Knob(role, levels) for role, levels in clocks.items())))
    core_hz, memory_hz = lattice.knob_values(KnobRole.CORE_CLOCK), lattice.knob_values(KnobRole.MEMORY_CLOCK)
    voltage = gpu.power.voltage_v
    if voltage is None:
        raise bad_value(file.gpu, "a voltage curve in the catalogue", "none")
    volts = voltage.value_at(core_hz)
    columns = SettingColumns(
        lattice.knob_values(KnobRole.COMPUTE_UNITS),
        core_hz,
        memory_hz,
        volts / volts.max(),
        float(np.asarray(gpu.memory.byte_per_s)) * memory_hz / memory_hz.max(),
    )
    watts = {f"{k}_w": units.parse(p.value, "W", k) for k, p in file.power.items() if k != "memory_stretch"}
    card = CardCoefficients(
        **{k: float(n.value) for k, n in file.memory.items()},
        overlap_base=file.overlap.base,
        overlap_per_occupancy=file.overlap.per_occupancy,
        memory_stretch=float(file.power["memory_stretch"].value),
        **watts,
    )
    names, work, applications = _list_phases(card, read_kernel_file().kernels)
    top = file.default.value
    default = lattice.nearest_settings(float(top[0]), units.parse(top[1], "Hz"), units.parse(top[2], "Hz"))
    return SimulatedHd7970(card, lattice, columns, default, names, applications, work)


def _list_phases(
    card: CardCoefficients, kernels: Sequence[KernelData]
) -> tuple[tuple[str, ...], KernelDemand, dict[str, npt.NDArray[np.int64]]]:
    """Return the kernel of each phase, what each phase asks for, and the order applications run phases in."""
    rows: list[dict[str, float]] = []
    names: list[str] = []
    order: dict[str, npt.NDArray[np.int64]] = {}
    for application, group in groupby(kernels, key=lambda k: k.name.split(".")[0]):
        columns = []
        for kernel in group:
            first = len(rows)
            rows += [_phase_demand(card, kernel, phase) for phase in kernel.phases or [PhaseData(1.0)]]
            names += [kernel.name] * (len(rows) - first)
            columns.append(first + np.arange(kernel.iterations) % (len(rows) - first))
        order[application] = np.stack(columns, axis=1).ravel()
    return tuple(names), KernelDemand(**{k: np.array([row[k] for row in rows]) for k in rows[0]}), order


def _phase_demand(card: CardCoefficients, kernel: KernelData, phase: PhaseData) -> dict[str, float]:
    """Scale a kernel's relative times so that the phase takes its stated time at the top settings."""
    valu, dram = kernel.valu * phase.valu, kernel.dram * phase.dram
    exponent = card.overlap_base + card.overlap_per_occupancy * kernel.occupancy
    total = (valu**exponent + dram**exponent) ** (1.0 / exponent) + kernel.serial + kernel.fixed
    scale = units.parse(kernel.time, "s", kernel.name) * phase.work / total
    same = ("occupancy", "divergence", "vgpr", "sgpr", "write_stall", "thrash", "fits")
    return {
        "valu_s": valu * scale,
        "dram_s": dram * scale,
        "fetch_s": kernel.fetch * phase.dram * scale,
        "serial_s": kernel.serial * scale,
        "fixed_s": kernel.fixed * scale,
        **{name: getattr(kernel, name) for name in same},
        "work": phase.work,
    }


# Standard deviations of the logarithm of each kind of number, for perturbed cards.
DEMAND_SPREAD = 0.15  # what kernels ask for, kernel by kernel
POWER_SPREAD = 0.15  # power coefficients
PATH_SPREAD = 0.10  # latencies, widths and efficiency of the memory path
COUNTER_SPREAD = 0.05  # counters, kernel by kernel
RANGES = {"occupancy": (0.1, 1.0), "divergence": (0.0, 0.95), "thrash": (0.0, 0.5)}  # shares stay inside these


def perturb_simulation(plant: SimulatedHd7970, seed: int) -> PlantTables:
    """Return one perturbed card with perturbed kernels; the same ``seed`` gives the same card.

    Every number is multiplied by exp(spread · z), z standard normal. A kernel's numbers have one factor each, the
    same for all its phases.
    """
    rng = np.random.default_rng(seed)
    card = {}
    for entry in fields(plant.card):
        spread = POWER_SPREAD if entry.name.endswith("_w") else PATH_SPREAD
        card[entry.name] = getattr(plant.card, entry.name) * float(np.exp(spread * rng.standard_normal()))
    card["efficiency"] = min(card["efficiency"], 0.95)
    names, which = np.unique(plant.kernels, return_inverse=True)
    work: dict[str, Array] = {}
    for entry in fields(plant.work):
        value = getattr(plant.work, entry.name)
        if entry.name not in ("work", "fits"):
            value = value * np.exp(DEMAND_SPREAD * rng.standard_normal(len(names)))[which]
        work[entry.name] = np.clip(value, *RANGES[entry.name]) if entry.name in RANGES else value
    perturbed = replace(plant, card=CardCoefficients(**card), work=KernelDemand(**work))
    tables = perturbed.build_tables(f"hd-7970 perturbed {seed}")
    counters = {}
    for name, table in tables.counters.items():
        factor = np.exp(COUNTER_SPREAD * rng.standard_normal(len(names)))[which][:, np.newaxis]
        counters[name] = np.clip(
            table * factor, 0.0, 1.0 if name in ("NormVGPR", "NormSGPR", "icActivity") else 100.0
        )
    return replace(tables, counters=counters)
