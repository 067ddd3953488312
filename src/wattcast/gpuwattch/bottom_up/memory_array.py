"""Compute shape, energy, delay and leakage of a bank of memory, for every way to cut it into subarrays.

After CACTI (HPL-2008-20, sections 4 to 6): a bank is cut into subarrays; up to four of them share their decoding in a
mat; mats hang on an H-tree. In a partition every quantity is an array with one element per way to cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Sweepable
from wattcast.core.errors import bad_value
from wattcast.gpuwattch.bottom_up.technology import (
    CELL_AREA_FEATURE2,
    CircuitCost,
    Technology,
    drain_capacitance_f,
    driver_chain_cost,
    find_repeated_wire,
    gate_capacitance_f,
    wire_f_per_um,
    wire_ohm_per_um,
)

_SENSE_SHARE, _SENSE_LEAST_V = 0.05, 0.08  # bitline swing a sense amplifier needs (CACTI 6.5)
_CELL_ASPECT = 1.46  # height over width of a cell (CACTI 6.5)
ACCESS, PULL_DOWN, PULL_UP = 1.31, 2.08, 1.23  # transistor widths of a cell in features
SENSE_N, SENSE_P, SENSE_ISO, SENSE_ENABLE = 3.75, 7.5, 12.5, 5.0  # its transistors in features
MUX_WIDTH = 9.0  # column and sense multiplexers in features: six minimum widths


@dataclass(frozen=True)
class ArrayPorts:
    """The ports of a cell, by kind."""

    read_write: int = 1
    read: int = 0
    write: int = 0
    search: int = 0

    def __post_init__(self) -> None:
        if min(self.read_write, self.read, self.write, self.search) < 0:
            raise bad_value(
                "ports", "zero or more of each kind", (self.read_write, self.read, self.write, self.search)
            )

    @property
    def all(self) -> int:
        """Ports with a wordline."""
        return self.read_write + self.read + self.write

    @property
    def reading(self) -> int:
        """Ports with sense amplifiers."""
        return self.read_write + self.read

    @property
    def writing(self) -> int:
        """Ports that data is written through."""
        return self.read_write + self.write


@dataclass(frozen=True)
class ArrayPartition:
    """Subarrays of ``row`` by ``column`` cells, their number, and how many work at once."""

    row: Array
    column: Array
    per_mat: Array  # subarrays of a mat
    per_mat_row: Array  # of them side by side
    mats_across: Array
    mats_down: Array
    active_mats: Array
    column_mux: Array  # bitline pairs to a sense amplifier
    mat_bit: Array  # bits a mat gives out

    def select(self, index: npt.NDArray[np.int64]) -> ArrayPartition:
        """Return some of the partitions."""
        return ArrayPartition(*(values[index] for values in vars(self).values()))


def bitline_swing_v(tech: Technology) -> float:
    """Return the bitline swing of a read: 5 % of the supply, at least 80 mV (CACTI 6.5)."""
    return max(_SENSE_SHARE * tech.voltage_v, _SENSE_LEAST_V)


def cell_sides_um(tech: Technology, ports: ArrayPorts) -> tuple[float, float]:
    """Return width and height of a six-transistor cell, two wires wider and higher for each further port."""
    side_um = tech.feature_um * (CELL_AREA_FEATURE2 / _CELL_ASPECT) ** 0.5
    further = 2.0 * tech.local.pitch_um * (ports.all - 1 + max(ports.search - 1, 0))
    return side_um + further, side_um * _CELL_ASPECT + further


def _folded_um(tech: Technology, width_um: float, pitch_um: Array) -> Array:
    """Return the height of a transistor that is folded to fit a pitch."""
    fingers = np.ceil(width_um / pitch_um)
    return np.asarray((fingers + (fingers + 1.0) * 3.0) * tech.feature_um)


def mat_sides_um(
    tech: Technology, ports: ArrayPorts, part: ArrayPartition, rows_um2: Sweepable, wide_um: float, high_um: float
) -> tuple[Array, Array]:
    """Return width and height of a mat: cells, column circuits below them, decoders and wires at their side."""
    feature, pitch = tech.feature_um, tech.wide.pitch_um
    column_um = np.asarray(wide_um * part.column_mux / ports.reading)
    half_um = np.full_like(column_um, wide_um / (2.0 * ports.reading))
    precharge = 6.0 * tech.p_to_n * tech.min_width_um
    circuits_um = _folded_um(tech, precharge, half_um) + _folded_um(tech, precharge / 6.0, 2.0 * half_um)
    circuits_um = circuits_um + np.where(part.column_mux > 1, _folded_um(tech, MUX_WIDTH * feature, half_um), 0.0)
    for share, count in ((SENSE_P, 2), (SENSE_ISO, 1), (SENSE_N, 2), (SENSE_ENABLE, 1)):
        circuits_um = circuits_um + count * _folded_um(tech, share * feature, column_um)
    circuits_um = circuits_um + 11.0 * feature
    stacked = part.per_mat / part.per_mat_row
    bits = np.log2(part.row) + np.log2(part.column_mux)
    wires_um = (bits + 2.0 * part.mat_bit / part.per_mat_row) * pitch * ports.all
    height_um = stacked * (part.row * high_um + circuits_um) + wires_um
    spine_um = 2.0 * 2.0 ** (np.log2(part.row) / 2.0) * pitch * ports.all
    rows_wide_um = rows_um2 * ports.all / (part.row * high_um * stacked)
    width_um = part.per_mat_row * part.column * wide_um * (1.0 + 7.5 * feature / (16.0 * wide_um))
    return np.asarray(width_um + np.maximum(spine_um, rows_wide_um)), np.asarray(height_um)


def bank_sides_um(
    tech: Technology, part: ArrayPartition, width_um: Array, height_um: Array, bits: Array
) -> tuple[Array, Array]:
    """Return width and height of a bank: its mats, and the wires of the tree between them."""
    pitch = tech.wide.pitch_um
    across = part.mats_across * width_um + bits * pitch * np.log2(part.mats_down)
    down = part.mats_down * height_um + bits * pitch * np.log2(part.mats_across)
    return np.asarray(across), np.asarray(down)


@dataclass(frozen=True)
class BankCost:
    """Energy of an access, delay, and leakage and size of the whole bank, by partition."""

    read_j: Array
    write_j: Array
    delay_s: Array
    subthreshold_w: Array
    gate_w: Array
    width_um: Array
    height_um: Array


def bank_cost(
    tech: Technology,
    ports: ArrayPorts,
    part: ArrayPartition,
    address_bit: Array,
    in_bit: int,
    out_bit: int,
    tag_ways: int = 0,
    toggle: float = 1.0,
) -> BankCost:
    """Return energy of a read and a write, delay, leakage and size of a bank, for every partition.

    E_read = active mats · (decoder + precharge + bitlines at the read swing + sense amplifiers + output) + H-trees
    for address and data; a write swings the bitlines of its bits fully. ``tag_ways`` above zero puts comparators
    behind the sense amplifiers. ``toggle`` is the share of data wires that charge in an access; bitlines swing
    whatever the data.
    """
    wide_um, high_um = cell_sides_um(tech, ports)
    swing_v = bitline_swing_v(tech)
    column_um = wide_um * part.column_mux / ports.reading
    decode = _decoder_cost(tech, part, wide_um, high_um)
    read, write = _bitline_j(tech, part, high_um, column_um, swing_v)
    amplifier_f = _amplifier_f(tech, column_um)
    sensed = part.column / part.column_mux * part.per_mat
    precharge = _precharge_cost(tech, part, wide_um)
    leaving = part.mat_bit if not tag_ways else tag_ways / part.active_mats  # of tags only hits leave a mat
    out = _output_cost(tech, part, high_um, leaving)
    compare = _comparator_cost(tech, part, tag_ways)
    mat_width_um, mat_height_um = mat_sides_um(tech, ports, part, decode.area_um2, wide_um, high_um)
    # energies of one mat
    both_j = decode.energy_j + precharge.energy_j + compare.energy_j
    read_j = both_j + read * part.column * part.per_mat + amplifier_f * tech.vdd2 * sensed + toggle * out.energy_j
    write_j = both_j + write * part.mat_bit + toggle * out.energy_j  # data goes in along the way it comes out
    to, back, into = (
        wire_tree_cost(tech, part, mat_width_um, mat_height_um, bits * share)
        for bits, share in ((address_bit, ports.all), (out_bit, ports.reading), (in_bit, ports.writing))
    )
    bitline_s = _bitline_s(tech, part, high_um, column_um, swing_v)
    inside_s = bitline_s + _sense_s(tech, amplifier_f, swing_v)
    leak_sub_w, leak_gate_w = _cell_leakage_w(tech, ports)
    cells = part.row * part.column * part.per_mat
    mats = part.mats_across * part.mats_down
    around = decode.times(1.0, ports.all) + precharge + out.times(1.0, ports.reading) + compare
    idle_w = tech.off_a_per_um * SENSE_ENABLE * tech.feature_um * tech.voltage_v * sensed * ports.reading
    width_um, height_um = bank_sides_um(tech, part, mat_width_um, mat_height_um, address_bit + in_bit + out_bit)
    return BankCost(
        read_j * part.active_mats + to.energy_j + toggle * back.energy_j,
        write_j * part.active_mats + to.energy_j + toggle * into.energy_j,
        to.delay_s + decode.delay_s + inside_s + out.delay_s + back.delay_s + compare.delay_s,
        mats * (cells * leak_sub_w + around.subthreshold_w + idle_w) + (to + back + into).subthreshold_w,
        mats * (cells * leak_gate_w + around.gate_w) + (to + back + into).gate_w,
        width_um,
        height_um,
    )


def wire_tree_cost(
    tech: Technology, part: ArrayPartition, width_um: Sweepable, height_um: Sweepable, bits: Sweepable
) -> CircuitCost:
    """Return the cost of an H-tree of ``bits`` wires from the middle of one edge of a block of mats to a mat.

    The root runs half the width to the centre; each fork halves the rest: W·(1 - 1/n) across in all, with n mats
    across, and half of H·(1 - 1/m) down. The wires of every port count as switching, as in McPAT: an access to a
    structure with several ports is one in which all of them work.
    """
    wire = find_repeated_wire(tech)
    across = part.mats_across * width_um * (1.0 - 1.0 / part.mats_across)
    down = 0.5 * part.mats_down * height_um * (1.0 - 1.0 / part.mats_down)
    forks = np.log2(part.mats_across * part.mats_down)
    run = wire.cost(across + down, bits)
    node_j = 0.5 * wire.input_f * tech.vdd2 * forks * bits
    return CircuitCost(run.energy_j + node_j, run.delay_s, run.subthreshold_w, run.gate_w)


def _decoder_cost(tech: Technology, part: ArrayPartition, wide_um: float, high_um: float) -> CircuitCost:
    """Return the cost of two predecoders of half the address each, the row gates that join them, and the wordline."""
    line_f = part.column * (
        2.0 * gate_capacitance_f(tech, ACCESS * tech.feature_um) + wide_um * wire_f_per_um(tech, tech.local)
    )
    line_ohm = part.column * wide_um * wire_ohm_per_um(tech.local)
    row_gate = driver_chain_cost(tech, line_f, line_ohm, inputs=2)
    bits = np.maximum(np.log2(part.row), 1.0)
    gate_in_f = gate_capacitance_f(tech, tech.min_width_um * (2.0 + tech.p_to_n))
    spine_um = part.per_mat_row * part.row * high_um
    fan_f = 2.0 ** (bits / 2.0) * part.per_mat * gate_in_f + spine_um * wire_f_per_um(tech, tech.wide)
    predecode = driver_chain_cost(tech, fan_f, spine_um * wire_ohm_per_um(tech.wide), inputs=3)
    drivers = driver_chain_cost(tech, 8.0 * gate_in_f).times(0.5 * bits, bits)
    predecoders = predecode.times(2.0, 2.0 * 2.0 ** (bits / 2.0))
    rows = row_gate.times(part.per_mat, part.row * part.per_mat)
    both = drivers + predecoders + rows
    return CircuitCost(both.energy_j, both.delay_s, both.subthreshold_w, both.gate_w, rows.area_um2)


def _bitline_f(tech: Technology, part: ArrayPartition, high_um: float) -> Array:
    """Return the capacitance of a bitline: half a drain and a length of local wire for every row."""
    drain = drain_capacitance_f(tech, ACCESS * tech.feature_um) / 2.0
    return np.asarray(part.row * (drain + high_um * wire_f_per_um(tech, tech.local)))


def _column_f(tech: Technology, column_um: Array) -> tuple[Sweepable, Sweepable]:
    """Return the capacitances of the column multiplexer, and of the sense amplifier's inputs behind it."""
    mux = drain_capacitance_f(tech, MUX_WIDTH * tech.feature_um, fold_um=column_um)
    iso = drain_capacitance_f(tech, SENSE_ISO * tech.feature_um, fold_um=column_um)
    return mux, 2.0 * iso + _latch_f(tech, column_um) + mux


def _bitline_j(
    tech: Technology, part: ArrayPartition, high_um: float, column_um: Array, swing_v: float
) -> tuple[Array, Array]:
    """Return the energy of a bitline pair in a read, 2·C·V·ΔV, and in a write, 2·C·V²."""
    line_f = _bitline_f(tech, part, high_um)
    mux_f, behind_f = _column_f(tech, column_um)
    muxed = np.where(part.column_mux > 1, 2.0 * mux_f, 0.0)
    read_j = 2.0 * swing_v * tech.voltage_v * (line_f + muxed + behind_f / part.column_mux)
    return np.asarray(read_j), np.asarray(2.0 * tech.vdd2 * (line_f + muxed))


def _bitline_s(tech: Technology, part: ArrayPartition, high_um: float, column_um: Array, swing_v: float) -> Array:
    """Return the time in which a cell pulls its bitline down by the swing, 2·τ·ln(V / (V - ΔV))."""
    feature = tech.feature_um
    cell_ohm = tech.n_resistance_ohm_um * (1.0 / (PULL_DOWN * feature) + 1.0 / (ACCESS * feature))
    line_f = _bitline_f(tech, part, high_um)
    mux_f, behind_f = _column_f(tech, column_um)
    line_ohm = part.row * high_um * wire_ohm_per_um(tech.local)
    tau_s = cell_ohm * (line_f + 2.0 * mux_f + behind_f) + line_ohm * (line_f / 2.0 + behind_f)
    return np.asarray(tau_s * np.log(tech.voltage_v / (tech.voltage_v - swing_v)) * 2.0)


def _latch_f(tech: Technology, column_um: Array) -> Sweepable:
    feature = tech.feature_um
    return (
        gate_capacitance_f(tech, (SENSE_N + SENSE_P) * feature)
        + drain_capacitance_f(tech, SENSE_N * feature, fold_um=column_um)
        + drain_capacitance_f(tech, SENSE_P * feature, fold_um=column_um)
    )


def _amplifier_f(tech: Technology, column_um: Array) -> Sweepable:
    """Return the capacitance that a sense amplifier swings fully: latch, isolation and the multiplexer behind it."""
    mux = drain_capacitance_f(tech, MUX_WIDTH * tech.feature_um, fold_um=column_um)
    return _latch_f(tech, column_um) + drain_capacitance_f(tech, SENSE_ISO * tech.feature_um, fold_um=column_um) + mux


def _sense_s(tech: Technology, load_f: Sweepable, swing_v: float) -> Array:
    """Return the time in which a latch amplifies its input to the supply, C/g_m · ln(V/ΔV)."""
    transconductance = SENSE_N * tech.feature_um / tech.n_resistance_ohm_um
    return np.asarray(load_f / transconductance * np.log(tech.voltage_v / swing_v))


def _precharge_cost(tech: Technology, part: ArrayPartition, wide_um: float) -> CircuitCost:
    """Return the cost of the line that switches precharge and equalising transistors of every column."""
    min_um = tech.min_width_um
    column_f = gate_capacitance_f(tech, (2.0 * 6.0 + 1.0) * tech.p_to_n * min_um) + wide_um * wire_f_per_um(
        tech, tech.wide
    )
    line = driver_chain_cost(tech, part.column * column_f, part.column * wide_um * wire_ohm_per_um(tech.wide))
    return line.times(part.per_mat, part.per_mat)


def _output_cost(tech: Technology, part: ArrayPartition, high_um: float, bits: Array) -> CircuitCost:
    """Return the cost of moving ``bits`` of a mat from sense amplifiers through multiplexers down the subarray."""
    feature, min_um = tech.feature_um, tech.min_width_um
    inverter_f = float(
        gate_capacitance_f(tech, min_um * (1 + tech.p_to_n)) + drain_capacitance_f(tech, min_um) * (1 + tech.p_to_n)
    )
    mux_f = drain_capacitance_f(tech, MUX_WIDTH * feature)
    inside_j = 0.5 * (3.0 * inverter_f + 4.0 * mux_f) * tech.vdd2
    down = find_repeated_wire(tech).cost(part.row * high_um)
    stage_s = 4.0 * tech.n_resistance_ohm_um / min_um * inverter_f
    one = CircuitCost(inside_j + down.energy_j, stage_s + down.delay_s, down.subthreshold_w, down.gate_w)
    return one.times(bits, bits)


def _comparator_cost(tech: Technology, part: ArrayPartition, ways: int) -> CircuitCost:
    """Return the cost of four quarter comparators per way, sized as in CACTI 6.5."""
    if not ways:
        return CircuitCost()
    feature = tech.feature_um
    inverters_um = np.array([20.0, 40.0, 80.0, 150.0]) * feature
    stages_f = sum((gate_capacitance_f(tech, w) + drain_capacitance_f(tech, w)) for w in inverters_um)
    tag_bit = np.maximum(part.column * part.per_mat / ways, 1.0)
    match_f = tag_bit / 4.0 * 2.0 * drain_capacitance_f(tech, 12.5 * feature, stack=2)
    energy_j = (0.5 * 4.0 * ways * (stages_f + match_f) + match_f * (ways - 1)) * tech.vdd2
    wide_um = 4.0 * ways * (inverters_um.sum() + 25.0 * feature) / 2.0
    delay_s = 6.0 * tech.n_resistance_ohm_um * (match_f + stages_f / 4.0) / (50.0 * feature)
    return CircuitCost(
        energy_j / part.active_mats,
        delay_s,
        tech.off_a_per_um * wide_um * tech.voltage_v,
        tech.gate_leak_a_per_um * wide_um * tech.voltage_v,
    )


def _cell_leakage_w(tech: Technology, ports: ArrayPorts) -> tuple[float, float]:
    """Return subthreshold and gate leakage of a cell: two inverters and the access transistors of its ports."""
    feature = tech.feature_um
    pair_um = (PULL_DOWN + PULL_UP) * feature
    access_um = ACCESS * feature * ((ports.read_write + ports.write) / 2.0 + ports.read * 0.55)
    sub_w = tech.off_a_per_um * (pair_um + access_um) * tech.voltage_v
    gate_w = tech.gate_leak_a_per_um * (pair_um + ports.read * ACCESS * feature) / 2.0 * tech.voltage_v
    return sub_w, gate_w
