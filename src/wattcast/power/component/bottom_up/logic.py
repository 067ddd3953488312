"""What is no memory: functional units, pipeline latches, the scheduler's selection, decoders, the rest of a core.

Functional units come from published synthesis results (``data/units.csv``), carried by F and V². The others are gates
with transistor widths in features, as McPAT has them (Li, MICRO 2009).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log, log2

from wattcast.errors import bad_value, unknown_name
from wattcast.power.component.bottom_up.circuits import (
    as_float,
    drain_f,
    gate_area_um2,
    gate_f,
    inverter_leakage_w,
    nand_leakage_w,
)
from wattcast.power.component.bottom_up.network import Block
from wattcast.power.component.bottom_up.technology import PACKAGE, Technology, technology

MACRO_OVERHEAD = 1.1  # placement and routing inside a macro (McPAT 0.8)


@dataclass(frozen=True)
class Unit:
    """One functional unit as published."""

    name: str
    energy_j: float  # of an operation, at ``feature_nm`` and ``voltage_v``
    factor: float  # of what the synthesis leaves out
    feature_nm: float
    voltage_v: float
    area_um2: float  # at 90 nm
    area_linear: bool  # shrinks with F rather than F²
    leakage_w: float
    source: str


@cache
def units() -> dict[str, Unit]:
    """Every unit of the table, by name."""
    text = files(PACKAGE).joinpath("data", "units.csv").read_text(encoding="utf-8")
    return {
        row["unit"]: Unit(
            row["unit"],
            float(row["energy_pj"]) * 1e-12,
            float(row["factor"]),
            float(row["feature_nm"]),
            float(row["voltage_v"]),
            float(row["area_90nm_um2"]),
            row["area_scaling"] == "linear",
            float(row["leakage_w"]),
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    }


def unit_cost(tech: Technology, name: str) -> Block:
    """An operation of a unit: E = E0 · factor · (F/F0) · (V/V0)² · short circuit.

    Its leakage, published for a 45 nm library, follows the off current, the width and the voltage.
    """
    if name not in units():
        raise unknown_name("functional unit", name, units())
    unit = units()[name]
    feature_nm = tech.feature_um * 1e3
    scale = feature_nm / unit.feature_nm * (tech.voltage_v / unit.voltage_v) ** 2
    shrink = tech.logic_area_scale if unit.area_linear else (feature_nm / 90.0) ** 2
    leak_w = unit.leakage_w * _off_w_per_gate(tech) / _off_w_per_gate(_library())
    return Block(
        unit.energy_j * unit.factor * scale * tech.short_circuit,
        leak_w,
        0.0,
        unit.area_um2 * shrink * MACRO_OVERHEAD,
    )


def _off_w_per_gate(tech: Technology) -> float:
    return tech.off_a_per_um * tech.feature_um * tech.voltage_v


def _library() -> Technology:
    """The technology the leakage of ``units.csv`` holds at: 45 nm high performance, 380 K."""
    return technology(45.0, temperature_k=380.0)


def latch(tech: Technology) -> Block:
    """A flip-flop of six NAND gates in one cycle: a third each of switching, keeping a one, keeping a zero.

    Widths of 25 and 37.5 features (20 and 30 µm at 0.8 µm), a load of two such gates (McPAT 0.8).
    """
    n_um, p_um, v2 = 25.0 * tech.feature_um, 37.5 * tech.feature_um, tech.vdd2
    gate = as_float(gate_f(tech, n_um + p_um))
    down, up = as_float(drain_f(tech, n_um, stack=2)), as_float(drain_f(tech, p_um))

    def node(fan_in: int, fan_out: int) -> float:
        return down + fan_in * up + fan_out * gate

    switch_j = 0.5 * (3 * node(2, 1) + node(2, 3) + node(3, 2) + node(2, 2) + 4.0 * gate) * v2
    keep_j = (node(2, 3) + node(3, 2)) * v2
    sub_n, gate_n = nand_leakage_w(tech, n_um, 2)
    energy_j = ((switch_j + keep_j) / 3.0 + 2.0 * gate * v2) * tech.short_circuit
    area = 6.0 * as_float(gate_area_um2(tech, n_um, 2)) * MACRO_OVERHEAD
    return Block(energy_j, 6.0 * as_float(sub_n), 6.0 * as_float(gate_n), area)


def pipeline_bits(
    warps: int, issue: int, fetch: int, decode: int, opcode_bit: int, register_bit: int, word_bit: int, depth: int
) -> float:
    """Latches of an in-order multithreaded pipeline, half as many again for control (McPAT 0.8).

    Program counters, fetched and decoded instructions and thread states once a warp; operands once an issue.
    """
    per_warp = 2 * word_bit + fetch * 2 * word_bit + 8 + decode * (4 * word_bit + 2**opcode_bit)
    per_issue = 3 * register_bit + 2 * (2**opcode_bit + 16 * word_bit) + 2 * word_bit
    bits = 1.5 * (per_warp * warps + per_issue * issue)
    return float(bits / 6.0 * max(depth, 6))


def selection(tech: Technology, candidates: int) -> Block:
    """The tree that picks one of the ready warps: four-input priority encoders (Palacharla, TR 1996)."""
    if candidates < 1:
        raise bad_value("scheduler: warps", "at least one", candidates)
    feature = tech.feature_um
    small, middle, wide = 6.25 * feature, 12.5 * feature, 18.75 * feature
    any_f = 4.0 * as_float(drain_f(tech, middle)) + as_float(drain_f(tech, 50.0 * feature))
    encode_f = 10.0 * as_float(drain_f(tech, middle))
    encode_f += sum(as_float(drain_f(tech, wide, stack=stack)) for stack in (1, 2, 3, 4))
    encode_f += 8.0 * as_float(gate_f(tech, small + middle)) + 20.0 * as_float(gate_f(tech, middle + wide))
    encode_f += 4.0 * as_float(drain_f(tech, small)) + 8.0 * as_float(drain_f(tech, middle))
    energy_j = 2.0 * candidates * (any_f + encode_f) * tech.vdd2 * tech.short_circuit
    sub, gate = inverter_leakage_w(tech, candidates * (3.0 * middle + 5.0 * small))
    return Block(energy_j, as_float(sub), as_float(gate))


def decoder(tech: Technology, bits: int) -> Block:
    """One of 2^bits decoded lines switches; all of them have a driver at the largest width, 100 features."""
    lines = 2**bits
    last_um = 100.0 * tech.feature_um
    driver_um = last_um * (1.0 + 1.0 / 4.0 + 1.0 / 16.0)  # and two stages before it, a quarter each
    sub, gate = inverter_leakage_w(tech, driver_um)
    energy_j = as_float(gate_f(tech, driver_um * (1.0 + tech.p_to_n))) * tech.vdd2
    area_um2 = as_float(gate_area_um2(tech, last_um)) * 1.4
    return Block(energy_j, as_float(sub) * lines, as_float(gate) * lines, area_um2 * lines)


def rest_of_core(tech: Technology, depth: int, warps: int) -> Block:
    """What nobody models one by one: area in-order cores have left on die photographs (McPAT 0.8), and its leakage.

    (6.55 − 2.19·ln depth) mm² at 90 nm, 7 % more for each doubling of the warps.
    """
    at_90nm_mm2 = max(6.55 - 2.19 * log(depth), 0.0) * (1.0 + 0.0716 * log2(max(warps, 1)))
    area_um2 = at_90nm_mm2 * 1e6 * tech.logic_area_scale
    leak = gates_leakage(tech, area_um2 * tech.gate_density_per_um2, 5.0)
    return Block(0.0, leak.subthreshold_w, leak.gate_w, area_um2 * MACRO_OVERHEAD)


def gates_leakage(tech: Technology, gates: float, width: float) -> Block:
    """Leakage of so many inverters, ``width`` minimum widths wide."""
    sub, gate = inverter_leakage_w(tech, width * tech.min_width_um)
    return Block(0.0, gates * as_float(sub), gates * as_float(gate))
