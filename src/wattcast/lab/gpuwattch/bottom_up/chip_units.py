"""Logic of a chip: crossbars, routers, functional units, pipelines, memory controllers, coalescer,
device memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import (
    ceil,
    log,
    log2,
)
from typing import NamedTuple

import msgspec
import numpy as np

from wattcast.core.errors import bad_value, check_names
from wattcast.core.strict_files import read_shipped_table
from wattcast.lab.gpuwattch.bottom_up import technology
from wattcast.lab.gpuwattch.bottom_up.bank_costs import (
    ArrayPartition,
    ArrayPorts,
    bank_cost,
)
from wattcast.lab.gpuwattch.bottom_up.memory_array import (
    ArrayCost,
    SramArray,
    sram_cost,
)
from wattcast.lab.gpuwattch.bottom_up.searched_buffers import SearchedBuffer, searched_buffer_cost
from wattcast.lab.gpuwattch.bottom_up.technology import (
    CircuitCost,
    Technology,
    check_at_least_one,
    to_float,
)

_WIDE = 4.0  # crossbar wires are this much wider and further apart than the global pitch (CACTI 6)
_NARROWEST = 0.8  # a crossbar flatter than this is stretched, in steps, until its sides are alike
_MOST_STRETCH = 4.0
_CUT_OFF = 0.2  # leakage of a buffer that is switched off: the stack factor (McPAT 0.8)


@cache
def crossbar_cost(
    tech: Technology,
    inputs: int,
    outputs: int,
    bits: int,
) -> CircuitCost:
    """Return the cost of a matrix crossbar of tri-state buffers: ``bits`` travel along a row and
    down a column.

    E = bits · (two wires + (C_in·outputs + C_out·inputs + C_internal + C_control)·V²) (CACTI 6)
    [Muralimanohar2007]. Idle crossing points leak through two transistors in series."""
    check_at_least_one(
        "crossbar",
        inputs=inputs,
        outputs=outputs,
        bits=bits,
    )
    wire = tech.repeated_wire(_WIDE)
    pitch = tech.wide.pitch_um
    p_to_n = tech.p_to_n

    # widths of the driver and of the gate before it, in minimum widths
    driver = wire.repeater * min(inputs * bits * pitch / wire.spacing_um, 1.0)
    first = max(driver * (1.0 + p_to_n) / (3.0 + 3.0 * p_to_n), 1.0)
    first_um = first * tech.min_width_um
    driver_um = driver * tech.min_width_um
    in_f = tech.gate_f(first_um * 3.0 * (1.0 + p_to_n))
    control_f = tech.gate_f(driver_um * (1.0 + p_to_n))
    inside_f = 3.0 * tech.drain_f(first_um) + 3.0 * tech.drain_f(first_um * p_to_n) + control_f
    out_f = tech.drain_f(driver_um) + tech.drain_f(driver_um * p_to_n)
    gates_um2 = to_float(
        2.0 * tech.gate_area_um2(driver_um) + 2.0 * tech.gate_area_um2(first_um, 2)
    )

    across_um, down_um = _crossbar_sides_um(
        tech,
        inputs,
        outputs,
        bits,
        gates_um2,
    )
    used_j = wire.cost(across_um + down_um).energy_j
    used_j += (in_f * outputs + out_f * inputs + inside_f + control_f) * tech.vdd2
    lines = wire.cost(across_um, 0.0, inputs * bits) + wire.cost(down_um, 0.0, outputs * bits)
    crossing = CircuitCost(0.0, *tech.inverter_leakage_w(2.0 * driver_um))
    crossing += CircuitCost(0.0, *tech.nand_leakage_w(3.0 * first_um, 2)).times(2.0)
    # of the crossing points all but one a column are cut off by two transistors in series
    points = inputs * outputs * bits
    used = CircuitCost(bits * used_j, area_um2=across_um * down_um)
    return used + crossing.times(points * _CUT_OFF) + lines


def _crossbar_sides_um(
    tech: Technology,
    inputs: int,
    outputs: int,
    bits: int,
    gates_um2: float,
) -> tuple[float, float]:
    """Return width and height of a crossbar, stretched in steps until its sides are alike."""
    pitch = tech.wide.pitch_um
    cell_um = 50.0 * tech.feature_um
    beside = ceil(cell_um / pitch)
    is_small = inputs <= 2 or outputs <= 2
    stretch = 1.0
    while True:
        height_um = stretch * cell_um
        across_um = max(gates_um2 / height_um * beside * outputs, bits * pitch * outputs)
        down_um = pitch * inputs * bits * stretch
        shape = down_um / across_um * outputs / inputs
        if is_small or stretch >= _MOST_STRETCH or min(shape, 1.0 / shape) >= _NARROWEST:
            return across_um, down_um
        stretch += 0.2


def arbiter_cost(
    tech: Technology,
    requests: int,
    line_um: float,
) -> CircuitCost:
    """Return the cost of a matrix arbiter: request and priority lines, an inner node, and a grant
    line.

    E = (n·(C_request + 2·C_priority)/2 + C_grant + C_inner/2)·V² (Orion, MICRO 2002); the grant
    line of ``line_um`` runs along the crossbar."""
    feature = tech.feature_um
    v2 = tech.vdd2
    nor_n = 6.75 * feature
    nor_p = 38.0 * feature
    inv_n = 6.25 * feature
    inv_p = 12.5 * feature
    nor_f = tech.gate_f(2.0 * nor_n + nor_p)
    inv_f = tech.gate_f(inv_n + inv_p) + tech.drain_f(inv_n) + tech.drain_f(inv_p)
    drains_f = 2.0 * tech.drain_f(nor_n) + tech.drain_f(nor_p)
    request_f = requests * nor_f + inv_f
    grant_f = drains_f + line_um * tech.wide.f_per_um(1.0, 3.0) + inv_f
    energy_j = (
        requests * (request_f + 2.0 * nor_f) / 2.0 + grant_f + (drains_f + nor_f) / 2.0
    ) * v2
    return CircuitCost(energy_j, *tech.inverter_leakage_w((nor_n + inv_n) * requests))


@dataclass(frozen=True)
class RouterShape:
    """The shape of a router of the network on chip."""

    flit_bit: int
    inputs: int
    outputs: int
    channels: int = 1
    depth: int = 1  # entries of a buffer

    def __post_init__(self) -> None:
        check_at_least_one("router", **vars(self))


class RouterCost(NamedTuple):
    """The parts of a router."""

    buffer: CircuitCost
    crossbar: CircuitCost
    arbiters: CircuitCost


@cache
def router_cost(tech: Technology, shape: RouterShape) -> RouterCost:
    """Return the costs of buffer (a write and a read), crossbar and arbiters for one flit that
    passes.

    The router's area is a box: its input buffers in a column, the crossbar at their side; arbiters
    fill the free room."""
    switch = crossbar_cost(tech, shape.inputs, shape.outputs, shape.flit_bit)
    one = np.ones(1)
    flit = shape.flit_bit
    part = ArrayPartition(
        shape.depth * one,
        shape.channels * flit * one,
        one,
        one,
        one,
        one,
        one,
        one,
        flit * one,
    )
    queue = bank_cost(
        tech,
        ArrayPorts(0, 1, shape.channels),
        part,
        one,
        flit,
        flit,
    )
    width_um = to_float(queue.width_um)
    height_um = to_float(queue.height_um)
    buffer = CircuitCost(
        to_float(queue.read_j) + to_float(queue.write_j),
        to_float(queue.subthreshold_w) * shape.inputs,
        to_float(queue.gate_w) * shape.inputs,
        width_um * height_um * shape.inputs,
    )
    vc = arbiter_cost(tech, shape.channels, 0.0).times(shape.inputs)
    switch_um2 = to_float(switch.area_um2)
    grant = arbiter_cost(tech, shape.inputs, switch_um2**0.5).times(shape.outputs)
    across_um = switch_um2 / (tech.wide.pitch_um * shape.inputs * shape.flit_bit)
    box_um2 = shape.inputs * height_um * (width_um + across_um)
    built_um2 = to_float(buffer.area_um2) + switch_um2
    # a box more than half empty would be laid out anew
    free_um2 = min(max(box_um2 - built_um2, 0.0), built_um2)
    return RouterCost(buffer, switch, vc + grant + CircuitCost(area_um2=free_um2))


MACRO_OVERHEAD = 1.1  # placement and routing inside a macro (McPAT 0.8)


@dataclass(frozen=True)
class FunctionalUnit:
    """One functional unit with its published figures, a row of ``units.csv``."""

    unit: str
    energy_pj: float  # of an operation, at ``feature_nm`` and ``voltage_v``
    factor: float  # of what the synthesis leaves out
    feature_nm: float
    voltage_v: float
    area_90nm_um2: float
    area_scaling: str  # linear: shrinks with F rather than F²
    leakage_w: float
    source: str


@cache
def functional_units() -> dict[str, FunctionalUnit]:
    """Return every functional unit of ``units.csv`` by name."""
    rows = read_shipped_table(technology.BOTTOM_UP_PACKAGE, "data", "units.csv")
    return {unit.unit: unit for unit in msgspec.convert(rows, list[FunctionalUnit], strict=False)}


def functional_unit_cost(tech: Technology, name: str) -> CircuitCost:
    """Return the cost of one operation of a unit, scaled from its published figures.

    E = E₀ · factor · (F/F₀) · (V/V₀)² · short circuit: capacitance scales with the feature size F,
    the factor covers the parts that the synthesis leaves out. Leakage, published for a 45 nm
    library, follows the off current, the width and the voltage."""
    check_names("functional unit", name, functional_units(), "")
    unit = functional_units()[name]
    feature_nm = tech.feature_um * 1e3
    scale = feature_nm / unit.feature_nm * (tech.voltage_v / unit.voltage_v) ** 2
    shrink = tech.logic_area_scale if unit.area_scaling == "linear" else (feature_nm / 90.0) ** 2
    # the leakage of ``units.csv`` holds for this library
    library = technology.find_technology(45.0, temperature_k=380.0)
    leak_w = unit.leakage_w * _gate_off_w(tech) / _gate_off_w(library)
    energy_j = unit.energy_pj * 1e-12 * unit.factor * scale * tech.short_circuit
    return CircuitCost(energy_j, leak_w, 0.0, unit.area_90nm_um2 * shrink * MACRO_OVERHEAD)


def _gate_off_w(tech: Technology) -> float:
    """Return the leakage of a gate one feature wide."""
    return tech.off_a_per_um * tech.feature_um * tech.voltage_v


def latch_cost(tech: Technology) -> CircuitCost:
    """Return the cost of a flip-flop of six NAND gates in one cycle.

    In a third each of the cycles it switches, keeps a one and keeps a zero. Widths of 25 and 37.5
    features (20 and 30 µm at 0.8 µm), a load of two such gates (McPAT 0.8)."""
    n_um = 25.0 * tech.feature_um
    p_um = 37.5 * tech.feature_um
    v2 = tech.vdd2
    gate = tech.gate_f(n_um + p_um)
    down = tech.drain_f(n_um, stack=2)
    up = tech.drain_f(p_um)

    def node(fan_in: int, fan_out: int) -> float:
        return down + fan_in * up + fan_out * gate

    switch_j = 0.5 * (3 * node(2, 1) + node(2, 3) + node(3, 2) + node(2, 2) + 4.0 * gate) * v2
    keep_j = (node(2, 3) + node(3, 2)) * v2
    energy_j = ((switch_j + keep_j) / 3.0 + 2.0 * gate * v2) * tech.short_circuit
    nand = CircuitCost(
        0.0, *tech.nand_leakage_w(n_um, 2), tech.gate_area_um2(n_um, 2) * MACRO_OVERHEAD
    )
    return CircuitCost(energy_j) + nand.times(6.0)


def count_pipeline_latches(
    warps: int,
    issue: int,
    decode: int,
    opcode_bit: int,
    register_bit: int,
    word_bit: int,
    depth: int,
) -> float:
    """Count the latches of an in-order multithreaded pipeline, half as many again for control
    (McPAT 0.8).

    Program counters, a fetched and the decoded instructions and thread states once a warp; operands
    once an issue."""
    per_warp = 4 * word_bit + 8 + decode * (4 * word_bit + 2**opcode_bit)
    per_issue = 3 * register_bit + 2 * (2**opcode_bit + 16 * word_bit) + 2 * word_bit
    bits = 1.5 * (per_warp * warps + per_issue * issue)
    return float(bits / 6.0 * max(depth, 6))


def warp_selection_cost(tech: Technology, candidates: int) -> CircuitCost:
    """Return the cost of the tree of four-input priority encoders that picks a ready warp
    (Palacharla, TR 1996).
    """
    check_at_least_one("scheduler", warps=candidates)
    feature = tech.feature_um
    small = 6.25 * feature
    middle = 12.5 * feature
    wide = 18.75 * feature
    any_f = 4.0 * tech.drain_f(middle) + tech.drain_f(50.0 * feature)
    encode_f = 10.0 * tech.drain_f(middle)
    encode_f += sum(tech.drain_f(wide, stack=stack) for stack in (1, 2, 3, 4))
    encode_f += 8.0 * tech.gate_f(small + middle) + 20.0 * tech.gate_f(middle + wide)
    encode_f += 4.0 * tech.drain_f(small) + 8.0 * tech.drain_f(middle)
    energy_j = 2.0 * candidates * (any_f + encode_f) * tech.vdd2 * tech.short_circuit
    return CircuitCost(
        energy_j, *tech.inverter_leakage_w(candidates * (3.0 * middle + 5.0 * small))
    )


def decoder_cost(tech: Technology, bits: int) -> CircuitCost:
    """Return the cost of a decoder: one of 2^bits lines switches, each with a driver 100 features
    wide.
    """
    last_um = 100.0 * tech.feature_um
    driver_um = last_um * (1.0 + 1.0 / 4.0 + 1.0 / 16.0)  # and two stages before it, a quarter each
    line = CircuitCost(0.0, *tech.inverter_leakage_w(driver_um), tech.gate_area_um2(last_um) * 1.4)
    return CircuitCost(tech.gate_f(driver_um * (1.0 + tech.p_to_n)) * tech.vdd2) + line.times(
        0.0, 2**bits
    )


def unmodelled_core_cost(
    tech: Technology,
    depth: int,
    warps: int,
) -> CircuitCost:
    """Return area and leakage of the parts of a core that no model covers, from die photographs
    (McPAT 0.8).

    A = (6.55 − 2.19·ln depth) mm² at 90 nm, 7 % more for each doubling of the warps.
    """
    at_90nm_mm2 = max(6.55 - 2.19 * log(depth), 0.0) * (1.0 + 0.0716 * log2(max(warps, 1)))
    area_um2 = at_90nm_mm2 * 1e6 * tech.logic_area_scale
    leak = gate_leakage_cost(tech, area_um2 * tech.gate_density_per_um2, 5.0)
    return leak + CircuitCost(area_um2=area_um2 * MACRO_OVERHEAD)


def gate_leakage_cost(
    tech: Technology,
    gates: float,
    width: float,
) -> CircuitCost:
    """Return the leakage of ``gates`` inverters, each ``width`` minimum widths wide."""
    return CircuitCost(0.0, *tech.inverter_leakage_w(width * tech.min_width_um)).times(gates)


_TAG_EXTRA_BIT = 5  # state bits beside an address (CACTI)
_OPCODE_BIT = 16  # of a memory request
_ECC = 9.0 / 8.0
# of the peak power goes on refresh, scrubbing and the like whatever is asked (McPAT 0.8)
_ROUTINE = 0.1
# comparing a warp's addresses: 0.443 mW for 0.5 ns at 1 V (GPUWattch, synthesis)
_COALESCE_J = 0.443e-3 * 0.5e-9
# pending-request entry, masks, counters (manual 2.2.3)
_REQUEST_BYTE = 64
_MASK_BYTE = 2
_MASKS = 16
_COUNT_BYTE = 1


@dataclass(frozen=True)
class MemoryController:
    """The memory controllers of a chip and the channels they serve."""

    controllers: int
    channels: int  # of one controller
    bus_bit: int
    address_bit: int
    window: int  # requests waiting, a channel
    buffers: int  # words in flight, a channel
    block_byte: int  # of a request
    peak_mbyte_per_s: float  # of a controller
    clock_hz: float

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if not value > 0:
                raise bad_value(f"memory controller: {what}", "above zero", value)


@dataclass(frozen=True)
class MemoryControllerCost:
    """Joules per request without device memory, constant watts, and leakage and area of one
    controller.
    """

    read_j: float
    write_j: float
    constant_w: float  # of all controllers
    front: CircuitCost
    engine: CircuitCost
    phy: CircuitCost


@cache
def memory_controller_cost(tech: Technology, mc: MemoryController) -> MemoryControllerCost:
    """Return the cost of memory controllers: front end (a searched window and data buffers),
    transaction engine, PHY.

    A request takes a search of the window per word, and buffers, engine and PHY per beat. A tenth
    of the peak power goes on refresh and scrubbing whatever is requested (McPAT 0.8)."""
    bus = mc.bus_bit * _ECC
    block_bit = mc.block_byte * _ECC * 8.0
    beats = block_bit / bus
    words = block_bit / 72.0
    window = _request_window_cost(tech, mc)
    bus_byte = -(-int(bus) // 8)
    plain = ArrayPorts(0, mc.channels, mc.channels)
    word = sram_cost(
        tech,
        SramArray(
            "data buffer",
            bus_byte * mc.buffers,
            bus_byte,
            1,
            1,
            plain,
        ),
    )

    # the engine takes 0.432 W at 1 GHz, 65 nm, 1.1 V and 72 bits, scaled with F·V²; the PHY 10 mW
    # per Gbit/s at 90 nm and 1.2 V (low-voltage differential), scaled with √F·V² (McPAT 0.8)
    feature = tech.feature_um
    beat_j = 0.432 / 1e9 / 72.0 / 1.1**2 * feature / 0.065 * tech.vdd2 * bus
    bit_j = 0.01 * 1e-9 * (feature / 0.09) ** 0.5 * tech.vdd2 / 1.2**2
    # areas in mm² at 90 nm are fitted to Niagara's controllers (McPAT 0.8)
    rate = log(mc.peak_mbyte_per_s * 2.0)
    engine_mm2 = (2.7927 * rate - 19.862) / 2.0 * bus / 128.0
    phy_mm2 = (6.4323 * rate - 48.134) * bus / 128.0 / 2.0

    # a busy cycle of the front end uses every port of the window and half the ports of the buffers
    front_j = mc.channels * (
        2.0 * window.search_j + window.read_j + window.write_j + word.read_j + word.write_j
    )
    front = CircuitCost(
        front_j,
        window.subthreshold_w + 2.0 * word.subthreshold_w,
        window.gate_w + 2.0 * word.gate_w,
        mc.channels * (window.area_um2 + 2.0 * word.area_um2),
    )
    front += warp_selection_cost(tech, 1).times(0.0, 1.0)
    peak_w = front_j * mc.clock_hz + beat_j * mc.channels * mc.clock_hz
    peak_w += bit_j * mc.peak_mbyte_per_s * 8e6 * bus / 72.0 * mc.channels
    common_j = beat_j * beats + bit_j * block_bit + beats * (word.read_j + word.write_j)
    return MemoryControllerCost(
        read_j=words * (window.search_j + window.read_j) + common_j,
        write_j=words * (window.search_j + window.write_j) + common_j,
        constant_w=_ROUTINE * peak_w * mc.controllers,
        front=front,
        engine=_controller_part(tech, mc, beat_j, engine_mm2),
        phy=_controller_part(tech, mc, bit_j, phy_mm2),
    )


def _request_window_cost(tech: Technology, mc: MemoryController) -> ArrayCost:
    """Return the cost of the buffer in which waiting requests are searched by address."""
    ports = ArrayPorts(0, mc.channels, mc.channels, mc.channels)
    tag_bit = mc.address_bit + _TAG_EXTRA_BIT + _OPCODE_BIT
    data_bit = 8 * -(-(mc.address_bit + _OPCODE_BIT) // 8)
    window = SearchedBuffer(
        "request window",
        mc.window,
        tag_bit,
        data_bit,
        ports,
    )
    return searched_buffer_cost(tech, window)


def _controller_part(
    tech: Technology,
    mc: MemoryController,
    energy_j: float,
    area_90nm_mm2: float,
) -> CircuitCost:
    """Return the cost of a part of synthesised logic, half of whose area are gates."""
    area_um2 = max(area_90nm_mm2, 0.0) * tech.feature_um / 0.09 * mc.channels * 1e6
    gates = area_um2 / 2.0 * tech.gate_density_per_um2
    return gate_leakage_cost(tech, gates, 1.0) + CircuitCost(energy_j, area_um2=area_um2)


def coalescer_cost(tech: Technology, entries: int) -> ArrayCost:
    """Return the cost of request table, thread masks and counters, with the comparison (manual
    2.2.3).
    """
    ports = ArrayPorts(0, 1, 1)

    def table(
        name: str,
        capacity_byte: int,
        block_byte: int,
    ) -> ArrayCost:
        return sram_cost(
            tech,
            SramArray(
                name,
                capacity_byte,
                block_byte,
                1,
                1,
                ports,
            ),
        )

    requests = table("pending-request table", _REQUEST_BYTE * entries, _REQUEST_BYTE)
    masks = table("thread masks", _MASK_BYTE * _MASKS * entries, _MASK_BYTE)
    counters = table("request counters", _COUNT_BYTE * max(entries, 16), _COUNT_BYTE)
    figures = np.array([list(vars(part).values()) for part in (requests, masks, counters)])
    total = ArrayCost(*figures.sum(axis=0).tolist())
    compare_j = _COALESCE_J * tech.vdd2
    return replace(total, read_j=total.read_j + compare_j, write_j=total.write_j + compare_j)


def find_dram_energy(kind: str) -> tuple[float | None, float | None, str]:
    """Return joules per byte read and written of a kind of device memory, None where unpublished,
    and the source.
    """
    table = read_shipped_table(technology.BOTTOM_UP_PACKAGE, "data", "dram.csv")
    rows = {row["kind"]: row for row in table}
    check_names("kind of memory", kind, rows, "")
    row = rows[kind]

    def joule_per_byte(pj_per_bit: str) -> float | None:
        return float(pj_per_bit) * 8e-12 if pj_per_bit else None

    read_j = joule_per_byte(row["read_pj_per_bit"])
    write_j = joule_per_byte(row["write_pj_per_bit"])
    return read_j, write_j, row["source"]
