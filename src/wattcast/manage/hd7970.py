"""The HD 7970 of paper 004, simulated: 448 settings, 25 kernels of 14 applications.

A kernel's time is vector-ALU and DRAM time, overlapped as far as occupancy hides latency, plus a serial
path and a fixed part. Bandwidth is a smooth minimum of the memory bus, the crossing from the L2's clock
domain to the memory's, and what the waves in flight can ask for. All 448 settings of all kernels are one
array expression. Numbers are in ``data/hd7970*.yaml``, with the sentence of the paper each stands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from wattcast import hardware, units
from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.manage.hd7970_data import CardFile, KernelData, Levels, Phase, card_data, kernel_data
from wattcast.manage.knobs import Knob, Lattice, Role
from wattcast.manage.plant import Tables

STRESS = ("MaxFlops", "DeviceMemory")  # left out of the second geometric mean, as in the paper


@dataclass(frozen=True)
class Card:
    """Coefficients of the card: powers in W at 1.19 V, 1 GHz, 1375 MHz."""

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
class Work:
    """What the phases of all kernels ask for, each ``(phase,)``. Times in s at the top settings."""

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
class Settled:
    """Settings as columns, each ``(setting,)``, and voltage relative to the top."""

    unit_count: Array
    core_hz: Array
    memory_hz: Array
    relative_v: Array
    bus_byte_per_s: Array


@dataclass(frozen=True)
class Simulated:
    """All that is known of the simulated card; :meth:`tables` runs it."""

    card: Card
    lattice: Lattice
    at: Settled
    default: tuple[int, ...]
    kernels: tuple[str, ...]  # of each phase
    applications: dict[str, npt.NDArray[np.int64]]
    work: Work

    def tables(self, name: str = "hd-7970") -> Tables:
        """Time, power and counters at all settings, at once."""
        time_s, parts_s, dram_byte_per_s = duration_s(self.card, self.work, self.at)
        gpu_w, memory_w = power_w(self.card, self.at, parts_s["valu"] / time_s, dram_byte_per_s)
        return Tables(
            name=name,
            lattice=self.lattice,
            default=self.default,
            kernels=self.kernels,
            time_s=time_s,
            power_w=self.card.board_w + gpu_w + memory_w,
            applications=self.applications,
            work=self.work.work,
            counters=counters(self.work, self.at, time_s, parts_s, dram_byte_per_s),
            memory_w=memory_w,
            board_w=self.card.board_w,
            idle_w=self.card.idle_w,
            source="simulated from paper 004 (data/hd7970.yaml, data/hd7970_kernels.yaml)",
        )


def duration_s(card: Card, work: Work, at: Settled) -> tuple[Array, dict[str, Array], Array]:
    """Time of each phase at each setting, its parts, and the mean DRAM bandwidth; ``(phase, setting)``.

    t = (t_valu^p + t_dram^p)^(1/p) + t_serial + t_fixed, with p rising with occupancy. Valid between the
    card's lowest and highest settings; one kernel at a time.
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


def bandwidth_byte_per_s(card: Card, occupancy: Array, at: Settled) -> Array:
    """What DRAM can give: bus, clock-domain crossing and requests in flight, as a smooth minimum."""
    bus = card.efficiency * at.bus_byte_per_s
    crossing = card.crossing_byte_per_cycle * at.core_hz
    latency_s = card.latency_core_cycle / at.core_hz + card.latency_memory_cycle / at.memory_hz
    asked = at.unit_count * card.waves_per_unit * occupancy * card.byte_per_wave / latency_s
    sharp = card.sharpness
    return np.asarray((bus**-sharp + crossing**-sharp + asked**-sharp) ** (-1.0 / sharp))


def power_w(card: Card, at: Settled, valu_duty: Array, dram_byte_per_s: Array) -> tuple[Array, Array]:
    """Chip and memory power, W, ``(phase, setting)``; the board's constant part is not in them."""
    v2, f = at.relative_v**2, at.core_hz / at.core_hz.max()
    rate = dram_byte_per_s / at.bus_byte_per_s.max()
    leakage = (card.uncore_leakage_w + at.unit_count * card.unit_leakage_w) * v2
    alu = card.unit_alu_w * np.minimum(valu_duty, 1.0)
    switching = card.uncore_clock_w + at.unit_count * (card.unit_clock_w + alu)
    gpu = leakage + v2 * f * switching + v2 * card.fabric_w * rate
    slow = at.memory_hz.max() / at.memory_hz
    access = card.memory_access_w * rate * (1.0 + card.memory_stretch * (slow - 1.0))
    return gpu, card.memory_floor_w + card.memory_bus_w / slow + access


def counters(
    work: Work, at: Settled, time_s: Array, parts_s: dict[str, Array], byte_per_s: Array
) -> dict[str, Array]:
    """The counters of the paper's Table 2, in its units, ``(phase, setting)``."""
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


@cache
def simulated() -> Simulated:
    """The card and kernels as shipped."""
    return _build(card_data(), kernel_data())


@cache
def tables() -> Tables:
    """The simulated card as tables."""
    return simulated().tables()


def _build(file: CardFile, kernels: Sequence[KernelData]) -> Simulated:
    gpu = hardware.load(file.gpu)
    lattice = Lattice(
        (
            Knob(Role.COMPUTE_UNITS, tuple(float(v) for v in file.units.value)),
            Knob(Role.CORE_CLOCK, _hertz(file.core_clock, "core_clock")),
            Knob(Role.MEMORY_CLOCK, _hertz(file.memory_clock, "memory_clock")),
        )
    )
    clocks = lattice.table(Role.MEMORY_CLOCK)
    core_hz = lattice.table(Role.CORE_CLOCK)
    voltage = gpu.power.voltage_v
    if voltage is None:
        raise bad_value(file.gpu, "a voltage curve in the catalogue", "none")
    volts = voltage.at(core_hz)
    at = Settled(
        lattice.table(Role.COMPUTE_UNITS),
        core_hz,
        clocks,
        volts / volts.max(),
        float(np.asarray(gpu.memory.byte_per_s)) * clocks / clocks.max(),
    )
    card = _card(file)
    names, work, applications = _phases(card, kernels)
    top = file.default.value
    default = lattice.nearest(float(top[0]), units.parse(top[1], "Hz"), units.parse(top[2], "Hz"))
    return Simulated(card, lattice, at, default, names, applications, work)


def _hertz(levels: Levels, where: str) -> tuple[float, ...]:
    return tuple(units.parse(v, "Hz", f"hd7970.yaml: {where}") for v in levels.value)


def _card(file: CardFile) -> Card:
    watts = {f"{k}_w": units.parse(p.value, "W", k) for k, p in file.power.items() if k != "memory_stretch"}
    return Card(
        **{k: n.value for k, n in file.memory.items()},
        overlap_base=file.overlap.base,
        overlap_per_occupancy=file.overlap.per_occupancy,
        memory_stretch=float(file.power["memory_stretch"].value),
        **watts,
    )


def _phases(
    card: Card, kernels: Sequence[KernelData]
) -> tuple[tuple[str, ...], Work, dict[str, npt.NDArray[np.int64]]]:
    """Kernels -> one row per phase, and the order each application runs them in."""
    rows: list[dict[str, float]] = []
    names: list[str] = []
    order: dict[str, npt.NDArray[np.int64]] = {}
    for application, group in groupby(kernels, key=lambda k: k.name.split(".")[0]):
        columns = []
        for kernel in group:
            first = len(rows)
            rows += [_row(card, kernel, phase) for phase in kernel.phases or [Phase(1.0)]]
            names += [kernel.name] * (len(rows) - first)
            columns.append(first + np.arange(kernel.iterations) % (len(rows) - first))
        order[application] = np.stack(columns, axis=1).ravel()
    return tuple(names), Work(**{k: np.array([row[k] for row in rows]) for k in rows[0]}), order


def _row(card: Card, kernel: KernelData, phase: Phase) -> dict[str, float]:
    valu, dram = kernel.valu * phase.valu, kernel.dram * phase.dram
    exponent = card.overlap_base + card.overlap_per_occupancy * kernel.occupancy
    total = (valu**exponent + dram**exponent) ** (1.0 / exponent) + kernel.serial + kernel.fixed
    scale = units.parse(kernel.time, "s", kernel.name) * phase.work / total
    return {
        "valu_s": valu * scale,
        "dram_s": dram * scale,
        "fetch_s": kernel.fetch * phase.dram * scale,
        "serial_s": kernel.serial * scale,
        "fixed_s": kernel.fixed * scale,
        "occupancy": kernel.occupancy,
        "divergence": kernel.divergence,
        "vgpr": kernel.vgpr,
        "sgpr": kernel.sgpr,
        "write_stall": kernel.write_stall,
        "thrash": kernel.thrash,
        "fits": kernel.fits,
        "work": phase.work,
    }
