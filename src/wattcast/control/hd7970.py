"""Simulate the HD 7970 card of paper 004: 448 settings, 25 kernels of 14 applications.

A kernel's time is vector-ALU and DRAM time, overlapped as far as occupancy hides latency, plus a
serial path and a fixed part. Bandwidth is a smooth minimum of three limits: the memory bus, the
crossing from the L2's clock domain to the memory's, and what the waves in flight can ask for. All
settings of all kernels are one array expression. Numbers are in ``data/hd7970*.yaml``, each with
the sentence of the paper it was derived from. ``perturb_simulation`` varies card and kernels at
random, for results on cards that the controller was not tuned on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.control.plants import (
    Knob,
    KnobRole,
    Lattice,
    PlantTables,
)
from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.core import bad_value, units
from wattcast.core.arrays import Array
from wattcast.core.strict_files import read_shipped_yaml

STRESS_APPLICATIONS = (
    "MaxFlops",
    "DeviceMemory",
)  # left out of the second geometric mean, as in the paper
UNSAID = {
    "iterations": 60,
    "serial": 0.0,
    "write_stall": 0.0,
    "thrash": 0.0,
    "fits": 32.0,
}  # of a kernel
UNCHANGED = (
    "occupancy",
    "divergence",
    "vgpr",
    "sgpr",
    "write_stall",
    "thrash",
    "fits",
)  # in every phase of a kernel


def read_data(name: str) -> dict[str, Any]:
    """Read a file of ``data/``; beside each number stands the sentence it was derived from."""
    return read_shipped_yaml(dict[str, Any], "wattcast.control", "data", name)


@dataclass(frozen=True)
class SimulatedHd7970:
    """Hold all that is known of the simulated card.

    ``card`` has the coefficients of ``hd7970.yaml``, powers in W at 1.19 V, 1 GHz, 1375 MHz.
    ``work`` is what the phases of all kernels ask for, each ``(phase,)``: seconds at the top
    settings, and the rest as in ``hd7970_kernels.yaml``. ``columns`` has all settings, each
    ``(setting,)``, with voltage relative to the top."""

    card: Mapping[str, float]
    lattice: Lattice
    columns: Mapping[str, Array]  # unit_count, core_hz, memory_hz, relative_v, bus_byte_per_s
    default: tuple[int, ...]
    kernels: tuple[str, ...]  # of each phase
    applications: dict[str, npt.NDArray[np.int64]]
    work: Mapping[str, Array]

    def build_tables(self, name: str = "hd-7970") -> PlantTables:
        """Compute time, power and counters at all settings."""
        time_s, parts_s, dram_byte_per_s = duration_s(self.card, self.work, self.columns)
        gpu_w, memory_w = power_w(
            self.card, self.columns, parts_s["valu"] / time_s, dram_byte_per_s
        )
        return PlantTables(
            name=name,
            lattice=self.lattice,
            default=self.default,
            kernels=self.kernels,
            time_s=time_s,
            power_w=self.card["board_w"] + gpu_w + memory_w,
            applications=self.applications,
            work=self.work["work"],
            counters=simulate_counters(
                self.work,
                self.columns,
                time_s,
                parts_s,
                dram_byte_per_s,
            ),
            memory_w=memory_w,
            board_w=self.card["board_w"],
            idle_w=self.card["idle_w"],
            limit_w=self.card["limit_w"],
            source="simulated from paper 004 (data/hd7970.yaml, data/hd7970_kernels.yaml)",
        )


def duration_s(
    card: Mapping[str, float],
    work: Mapping[str, Array],
    at: Mapping[str, Array],
) -> tuple[Array, dict[str, Array], Array]:
    """Return the time of each phase at each setting, its parts, and mean DRAM bandwidth; ``(phase,
    setting)``.

    t = (t_valu^p + t_dram^p)^(1/p) + t_serial + t_fixed, with p rising with occupancy. Valid
    between the card's lowest and highest settings, for one kernel at a time."""
    demand = {name: values[:, np.newaxis] for name, values in work.items()}
    clock_ratio = at["core_hz"].max() / at["core_hz"]
    most_units = at["unit_count"].max()

    # Work of the units follows their number and their clock.
    per_unit = (most_units / at["unit_count"]) * clock_ratio
    valu = demand["valu_s"] * per_unit
    fetch = demand["fetch_s"] * per_unit
    serial = demand["serial_s"] * clock_ratio

    # Units beyond those whose working sets fit into the cache thrash it.
    crowding = at["unit_count"] - demand["fits"]
    most_crowding = np.maximum(most_units - demand["fits"], 1.0)
    crowded = np.clip(crowding / most_crowding, 0.0, 1.0)
    traffic = 1.0 - demand["thrash"] * (1.0 - crowded)
    supply = bandwidth_byte_per_s(card, demand["occupancy"], at)
    dram_byte = demand["dram_s"] * traffic * supply[:, -1:]
    dram = dram_byte / supply

    exponent = card["overlap_base"] + card["overlap_per_occupancy"] * demand["occupancy"]
    overlapped = (valu**exponent + dram**exponent) ** (1.0 / exponent)
    total = overlapped + serial + demand["fixed_s"]
    parts = {
        "valu": valu,
        "fetch": fetch,
        "dram": dram,
        "serial": serial,
    }
    return total, parts, dram_byte / total


def bandwidth_byte_per_s(
    card: Mapping[str, float],
    occupancy: Array,
    at: Mapping[str, Array],
) -> Array:
    """Return what DRAM can give: the smooth minimum of bus, clock-domain crossing and requests in
    flight.

    B = (B_bus^-q + B_crossing^-q + B_asked^-q)^(-1/q), q the sharpness; requests in flight give
    waves × byte per wave over the latency of core and memory (Little's law)."""
    bus = card["efficiency"] * at["bus_byte_per_s"]
    crossing = card["crossing_byte_per_cycle"] * at["core_hz"]
    latency_s = (
        card["latency_core_cycle"] / at["core_hz"] + card["latency_memory_cycle"] / at["memory_hz"]
    )
    requested_byte_per_s = (
        at["unit_count"] * card["waves_per_unit"] * occupancy * card["byte_per_wave"] / latency_s
    )
    sharp = card["sharpness"]
    return np.asarray(
        (bus**-sharp + crossing**-sharp + requested_byte_per_s**-sharp) ** (-1.0 / sharp)
    )


def power_w(
    card: Mapping[str, float],
    at: Mapping[str, Array],
    valu_duty: Array,
    dram_byte_per_s: Array,
) -> tuple[Array, Array]:
    """Return chip and memory power in W, ``(phase, setting)``, without the board's constant part.

    Leakage scales with V², switching with V² f; memory power is a floor, a part that follows the
    bus clock, and energy per byte that grows as the bus slows down."""
    v2 = at["relative_v"] ** 2
    f = at["core_hz"] / at["core_hz"].max()
    rate = dram_byte_per_s / at["bus_byte_per_s"].max()
    leakage = (card["uncore_leakage_w"] + at["unit_count"] * card["unit_leakage_w"]) * v2
    alu = card["unit_alu_w"] * np.minimum(valu_duty, 1.0)
    switching = card["uncore_clock_w"] + at["unit_count"] * (card["unit_clock_w"] + alu)
    gpu = leakage + v2 * f * switching + v2 * card["fabric_w"] * rate
    slow = at["memory_hz"].max() / at["memory_hz"]
    access = card["memory_access_w"] * rate * (1.0 + card["memory_stretch"] * (slow - 1.0))
    return gpu, card["memory_floor_w"] + card["memory_bus_w"] / slow + access


def simulate_counters(
    work: Mapping[str, Array],
    at: Mapping[str, Array],
    time_s: Array,
    parts_s: dict[str, Array],
    byte_per_s: Array,
) -> dict[str, Array]:
    """Return the counters of the paper's Table 2, in its units, ``(phase, setting)``."""
    ones = np.ones_like(time_s)
    valu = np.minimum(parts_s["valu"] / time_s, 1.0)
    memory = np.minimum(np.maximum(parts_s["fetch"], parts_s["dram"]) / time_s, 1.0)
    stalled = np.clip(parts_s["dram"] - parts_s["fetch"], 0.0, None) / time_s
    return {
        "VALUBusy": 100.0 * valu,
        "VALUUtilization": 100.0 * (1.0 - work["divergence"][:, np.newaxis]) * ones,
        "MemUnitBusy": 100.0 * memory,
        "MemUnitStalled": 100.0 * np.minimum(stalled, 1.0),
        "WriteUnitStalled": work["write_stall"][:, np.newaxis] * ones,
        "NormVGPR": work["vgpr"][:, np.newaxis] / MOST_VGPR * ones,
        "NormSGPR": work["sgpr"][:, np.newaxis] / MOST_SGPR * ones,
        "icActivity": np.minimum(byte_per_s / at["bus_byte_per_s"], 1.0),
    }


@cache
def load_tables() -> PlantTables:
    """Return the simulated card as tables."""
    return load_simulation().build_tables()


@cache
def load_simulation() -> SimulatedHd7970:
    """Return the card and kernels as shipped."""
    file = read_data("hd7970.yaml")
    lattice = _read_lattice(file)
    card = _read_card(file)
    kernels = _read_kernels(card)
    units_count, core_clock, memory_clock = file["default"]["value"]
    default = lattice.nearest_settings(
        float(units_count), units.parse(core_clock, "Hz"), units.parse(memory_clock, "Hz")
    )
    return SimulatedHd7970(
        card,
        lattice,
        _make_columns(file["gpu"], lattice),
        default,
        kernels.names,
        kernels.order,
        kernels.demand,
    )


def _read_lattice(file: Mapping[str, Any]) -> Lattice:
    """Return the knobs of the card."""
    unit_counts = tuple(map(float, file["units"]["value"]))
    knobs = [Knob(KnobRole.COMPUTE_UNITS, unit_counts)]
    for role in (KnobRole.CORE_CLOCK, KnobRole.MEMORY_CLOCK):
        place = f"hd7970.yaml: {role}"
        levels = tuple(units.parse(text, "Hz", place) for text in file[role]["value"])
        knobs.append(Knob(role, levels))
    return Lattice(tuple(knobs))


def _make_columns(gpu_name: str, lattice: Lattice) -> dict[str, Array]:
    """Return what each setting means for the card, ``(setting,)``."""
    gpu = hardware.load_gpu(gpu_name)
    voltage = gpu.power.voltage_v
    if voltage is None:
        raise bad_value(gpu_name, "a voltage curve in the catalogue", "none")
    unit_count, core_hz, memory_hz = (lattice.knob_values(knob.role) for knob in lattice.knobs)
    volts = voltage.value_at(core_hz)
    top_byte_per_s = float(np.asarray(gpu.memory.byte_per_s))
    return {
        "unit_count": unit_count,
        "core_hz": core_hz,
        "memory_hz": memory_hz,
        "relative_v": volts / volts.max(),
        "bus_byte_per_s": top_byte_per_s * memory_hz / memory_hz.max(),
    }


def _read_card(file: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of the card's memory, its overlap and its power."""
    card = {name: float(number["value"]) for name, number in file["memory"].items()}
    card["limit_w"] = float(np.max(hardware.load_gpu(file["gpu"]).power.limit_w))
    for name in ("base", "per_occupancy"):
        card[f"overlap_{name}"] = float(file["overlap"][name])
    for name, number in file["power"].items():
        if name == "memory_stretch":
            card[name] = float(number["value"])
        else:
            card[f"{name}_w"] = units.parse(number["value"], "W", name)
    return card


@dataclass(frozen=True)
class _SimulatedKernels:
    """The phases of all kernels, and the order in which applications run them."""

    names: tuple[str, ...]  # of the kernel of each phase
    order: dict[str, npt.NDArray[np.int64]]  # by application
    demand: dict[str, Array]  # (phase,)


def _read_kernels(card: Mapping[str, float]) -> _SimulatedKernels:
    """Return the kernels in the order of their file."""
    demands: list[dict[str, float]] = []
    names: list[str] = []
    order: dict[str, npt.NDArray[np.int64]] = {}
    kernels = [UNSAID | kernel for kernel in read_data("hd7970_kernels.yaml")["kernels"]]
    for application, group in groupby(kernels, key=_name_application):
        runs = []
        for kernel in group:
            phases = kernel.get("phases", [{"work": 1.0}])
            first = len(demands)
            runs.append(first + np.arange(kernel["iterations"]) % len(phases))
            demands += [_phase_demand(card, kernel, **phase) for phase in phases]
            names += [kernel["name"]] * len(phases)
        order[application] = np.stack(runs, axis=1).ravel()
    columns = {name: np.array([row[name] for row in demands]) for name in demands[0]}
    return _SimulatedKernels(tuple(names), order, columns)


def _name_application(kernel: Mapping[str, Any]) -> str:
    return str(kernel["name"]).split(".")[0]


def _phase_demand(
    card: Mapping[str, float],
    kernel: Mapping[str, Any],
    work: float,
    valu: float = 1.0,
    dram: float = 1.0,
) -> dict[str, float]:
    """Scale a kernel's relative times so that the phase takes its stated time at the top settings.

    ``valu`` and ``dram`` say how the phase differs from the kernel's mean, ``work`` how long it
    takes."""
    exponent = card["overlap_base"] + card["overlap_per_occupancy"] * kernel["occupancy"]
    valu_part = kernel["valu"] * valu
    dram_part = kernel["dram"] * dram
    overlapped = (valu_part**exponent + dram_part**exponent) ** (1.0 / exponent)
    relative = overlapped + kernel["serial"] + kernel["fixed"]
    scale = units.parse(kernel["time"], "s", kernel["name"]) * work / relative
    demand = {
        "valu_s": valu_part * scale,
        "dram_s": dram_part * scale,
        "fetch_s": kernel["fetch"] * dram * scale,
        "serial_s": kernel["serial"] * scale,
        "fixed_s": kernel["fixed"] * scale,
        "work": work,
    }
    for name in UNCHANGED:
        demand[name] = float(kernel[name])
    return demand


MOST_VGPR, MOST_SGPR = 256.0, 102.0  # registers of a wavefront of GCN
PERCENT = 100.0  # the largest value of a counter of shares of the time
RANGES = {
    "occupancy": (0.1, 1.0),
    "divergence": (0.0, 0.95),
    "thrash": (0.0, 0.5),
}  # shares stay inside these


def perturb_simulation(plant: SimulatedHd7970, seed: int) -> PlantTables:
    """Return one perturbed card with perturbed kernels; the same ``seed`` gives the same card.

    Every number is multiplied by exp(spread · z), z standard normal. A kernel's numbers have one
    factor each, the same for all its phases."""
    rng = np.random.default_rng(seed)
    card = {}
    for name, number in plant.card.items():
        if name == "limit_w":  # is told by the maker
            card[name] = number
            continue
        spread = REHEARSAL.power_spread if name.endswith("_w") else REHEARSAL.path_spread
        card[name] = number * float(np.exp(spread * rng.standard_normal()))
    card["efficiency"] = min(card["efficiency"], REHEARSAL.most_efficiency)
    names, which = np.unique(plant.kernels, return_inverse=True)
    work: dict[str, Array] = {}
    for name, value in plant.work.items():
        if name not in ("work", "fits"):
            value = value * np.exp(REHEARSAL.demand_spread * rng.standard_normal(len(names)))[which]
        work[name] = np.clip(value, *RANGES[name]) if name in RANGES else value
    perturbed = replace(plant, card=card, work=work)
    tables = perturbed.build_tables(f"hd-7970 perturbed {seed}")
    counters = {}
    for name, table in tables.counters.items():
        factor = np.exp(REHEARSAL.counter_spread * rng.standard_normal(len(names)))[which][
            :, np.newaxis
        ]
        most = 1.0 if name in ("NormVGPR", "NormSGPR", "icActivity") else PERCENT
        counters[name] = np.clip(table * factor, 0.0, most)
    return replace(tables, counters=counters)
