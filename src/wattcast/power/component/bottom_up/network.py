"""Crossbars, arbiters and routers, after the router of CACTI 6 (MICRO 2007) and Orion (MICRO 2002)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from wattcast.errors import bad_value
from wattcast.power.component.bottom_up.array import evaluate
from wattcast.power.component.bottom_up.circuits import (
    as_float,
    drain_f,
    gate_area_um2,
    gate_f,
    inverter_leakage_w,
    nand_leakage_w,
    repeated_wire,
    wire_f_per_um,
)
from wattcast.power.component.bottom_up.geometry import Partition, Ports
from wattcast.power.component.bottom_up.technology import Technology

_WIDE = 4.0  # crossbar wires are this much wider and further apart than the global pitch (CACTI 6)
_NARROWEST = 0.8  # a crossbar flatter than this is stretched, in steps, until its sides are alike
_MOST_STRETCH = 4.0
_CUT_OFF = 0.2  # leakage of a buffer that is switched off: the stack factor (McPAT 0.8)


@dataclass(frozen=True)
class Block:
    """Energy of a use, leakage and area of something that is no memory array."""

    energy_j: float
    subthreshold_w: float = 0.0
    gate_w: float = 0.0
    area_um2: float = 0.0

    def times(self, used: float, built: float | None = None) -> Block:
        """So many used at once, so many built."""
        there = used if built is None else built
        return Block(self.energy_j * used, self.subthreshold_w * there, self.gate_w * there, self.area_um2 * there)

    def __add__(self, other: Block) -> Block:
        return Block(
            self.energy_j + other.energy_j,
            self.subthreshold_w + other.subthreshold_w,
            self.gate_w + other.gate_w,
            self.area_um2 + other.area_um2,
        )


@cache
def crossbar(tech: Technology, inputs: int, outputs: int, bits: int) -> Block:
    """A matrix crossbar of tri-state buffers: one input's ``bits`` travel along a row and down a column.

    E = bits · (two wires + (C_in·outputs + C_out·inputs + C_internal + C_control)·V²) [Muralimanohar2007].
    """
    for what, value in (("inputs", inputs), ("outputs", outputs), ("bits", bits)):
        if value < 1:
            raise bad_value(f"crossbar: {what}", "at least one", value)
    wire = repeated_wire(tech, _WIDE)
    min_um, p_to_n, v2 = tech.min_width_um, tech.p_to_n, tech.vdd2
    reach_um = inputs * bits * tech.wide.pitch_um
    driver = wire.repeater * min(reach_um / wire.spacing_um, 1.0)  # in minimum widths
    first = max(driver * (1.0 + p_to_n) / (3.0 + 3.0 * p_to_n), 1.0)
    in_f = as_float(gate_f(tech, first * min_um * 3.0 * (1.0 + p_to_n)))
    inside_f = 3.0 * as_float(drain_f(tech, first * min_um)) + 3.0 * as_float(drain_f(tech, first * min_um * p_to_n))
    inside_f += as_float(gate_f(tech, driver * min_um * (1.0 + p_to_n)))
    out_f = as_float(drain_f(tech, driver * min_um)) + as_float(drain_f(tech, driver * min_um * p_to_n))
    control_f = as_float(gate_f(tech, driver * min_um * (1.0 + p_to_n)))
    gates_um2 = 2.0 * as_float(gate_area_um2(tech, driver * min_um)) + 2.0 * as_float(
        gate_area_um2(tech, first * min_um, 2)
    )
    across_um, down_um = _sides_um(tech, inputs, outputs, bits, gates_um2)
    wires_j = as_float(wire.cost(across_um + down_um).energy_j)
    switched_f = in_f * outputs + out_f * inputs + inside_f + control_f
    sub, gate = inverter_leakage_w(tech, 2.0 * driver * min_um)
    pair_sub, pair_gate = nand_leakage_w(tech, 3.0 * first * min_um, 2)
    points = inputs * outputs * bits  # of them all but one a column are cut off by two transistors in series
    rows, columns = (
        wire.cost(length, 1.0, lines * bits) for length, lines in ((across_um, inputs), (down_um, outputs))
    )
    lines_sub = as_float(rows.subthreshold_w + columns.subthreshold_w)
    lines_gate = as_float(rows.gate_w + columns.gate_w)
    return Block(
        bits * (wires_j + switched_f * v2),
        points * _CUT_OFF * (as_float(sub) + 2.0 * as_float(pair_sub)) + lines_sub,
        points * _CUT_OFF * (as_float(gate) + 2.0 * as_float(pair_gate)) + lines_gate,
        across_um * down_um,
    )


def _sides_um(tech: Technology, inputs: int, outputs: int, bits: int, gates_um2: float) -> tuple[float, float]:
    """Width and height: wires one way, buffers beside one another the other; stretched until they are alike."""
    pitch, cell_um = tech.wide.pitch_um, 50.0 * tech.feature_um
    beside = math.ceil(cell_um / pitch)
    stretch = 1.0
    while True:
        across = max(gates_um2 / (stretch * cell_um) * beside * outputs, bits * pitch * outputs)
        down = pitch * inputs * bits * stretch
        shape = down / across * outputs / inputs
        if min(shape, 1.0 / shape) >= _NARROWEST or stretch >= _MOST_STRETCH or inputs <= 2 or outputs <= 2:
            return across, down
        stretch += 0.2


def arbiter(tech: Technology, requests: int, line_um: float) -> Block:
    """A matrix arbiter (Orion): request and priority lines, an inner node, a grant that runs along the crossbar."""
    feature, v2 = tech.feature_um, tech.vdd2
    nor_n, nor_p, inv_n, inv_p = 6.75 * feature, 38.0 * feature, 6.25 * feature, 12.5 * feature
    nor_f = as_float(gate_f(tech, 2.0 * nor_n + nor_p))
    inv_f = as_float(gate_f(tech, inv_n + inv_p)) + as_float(drain_f(tech, inv_n)) + as_float(drain_f(tech, inv_p))
    drains_f = 2.0 * as_float(drain_f(tech, nor_n)) + as_float(drain_f(tech, nor_p))
    request_f = requests * nor_f + inv_f
    grant_f = drains_f + line_um * wire_f_per_um(tech, tech.wide, 1.0, 3.0) + inv_f
    energy_j = (requests * (request_f + 2.0 * nor_f) / 2.0 + grant_f + (drains_f + nor_f) / 2.0) * v2
    sub, gate = inverter_leakage_w(tech, (nor_n + inv_n) * requests)
    return Block(energy_j, as_float(sub), as_float(gate))


@dataclass(frozen=True)
class Router:
    """A router of the network on chip."""

    flit_bit: int
    inputs: int
    outputs: int
    channels: int = 1
    depth: int = 1  # entries of a buffer

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if value < 1:
                raise bad_value(f"router: {what}", "at least one", value)


@cache
def router(tech: Technology, shape: Router) -> tuple[Block, Block, Block]:
    """Buffer (a write and a read), crossbar and arbiters of one flit that passes.

    The router is a box: its input buffers above one another, the crossbar beside them, arbiters in what room is left.
    """
    switch = crossbar(tech, shape.inputs, shape.outputs, shape.flit_bit)
    buffer, width_um, height_um = _buffer(tech, shape)
    vc = arbiter(tech, shape.channels, 0.0).times(shape.inputs)
    grant = arbiter(tech, shape.inputs, switch.area_um2**0.5).times(shape.outputs)
    across_um = switch.area_um2 / (tech.wide.pitch_um * shape.inputs * shape.flit_bit)
    box_um2 = shape.inputs * height_um * (width_um + across_um)
    built_um2 = buffer.area_um2 + switch.area_um2
    left_um2 = min(max(box_um2 - built_um2, 0.0), built_um2)  # a box more than half empty would be laid out anew
    return buffer, switch, vc + grant + Block(0.0, area_um2=left_um2)


def _buffer(tech: Technology, shape: Router) -> tuple[Block, float, float]:
    """A small memory array of a few flits at every input, written and read once a flit; width and height of one."""
    one = np.ones(1)
    bits, rows = float(shape.flit_bit * shape.channels), float(shape.depth)
    part = Partition(rows * one, bits * one, one, one, one, one, one, one, shape.flit_bit * one)
    found = evaluate(tech, Ports(0, 1, shape.channels), part, one, shape.flit_bit, shape.flit_bit)
    width_um, height_um = float(found.width_um[0]), float(found.height_um[0])
    all_of_them = Block(
        float(found.read_j[0] + found.write_j[0]),
        float(found.subthreshold_w[0]) * shape.inputs,
        float(found.gate_w[0]) * shape.inputs,
        width_um * height_um * shape.inputs,
    )
    return all_of_them, width_um, height_um
