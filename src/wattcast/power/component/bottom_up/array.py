"""One partition of a memory array: decoder, wordline, bitline, sense amplifier, output, and the tree between mats.

After CACTI (HPL-2008-20, sections 4 to 6). Every function takes arrays of partitions at once, so that ``organise.py``
can look at all of them in one go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.power.component.bottom_up.circuits import (
    Cost,
    chain,
    drain_f,
    gate_f,
    repeated_wire,
    wire_f_per_um,
    wire_ohm_per_um,
)
from wattcast.power.component.bottom_up.geometry import (
    ACCESS,
    MUX,
    PULL_DOWN,
    PULL_UP,
    SENSE_ENABLE,
    SENSE_ISO,
    SENSE_N,
    SENSE_P,
    Partition,
    Ports,
    bank_um,
    cell_um,
    mat_um,
    sensed_v,
)
from wattcast.power.component.bottom_up.technology import Technology


@dataclass(frozen=True)
class Access:
    """What one partition costs. Leakage and area of the whole bank."""

    read_j: Array
    write_j: Array
    delay_s: Array
    subthreshold_w: Array
    gate_w: Array
    width_um: Array
    height_um: Array


def evaluate(
    tech: Technology,
    ports: Ports,
    part: Partition,
    address_bit: Array,
    in_bit: int,
    out_bit: int,
    tag_ways: int = 0,
    toggle: float = 1.0,
) -> Access:
    """Energy of a read and a write, delay, leakage and size of a bank, for every partition.

    ``tag_ways`` above zero puts comparators behind the sense amplifiers. ``toggle`` is the share of data wires that
    charge in an access; bitlines swing whatever the data.
    """
    wide_um, high_um = cell_um(tech, ports)
    swing_v = sensed_v(tech)
    column_um = wide_um * part.column_mux / ports.reading
    decode = _decoder(tech, part, wide_um, high_um)
    read, write = _bitline_j(tech, part, high_um, column_um, swing_v)
    amplifier_f = _amplifier_f(tech, column_um)
    sensed = part.column / part.column_mux * part.per_mat
    precharge = _precharge(tech, part, wide_um)
    leaving = part.mat_bit if not tag_ways else tag_ways / part.active_mats  # of tags only hits leave a mat
    out = _output(tech, part, high_um, leaving)
    compare = _comparators(tech, part, tag_ways)
    mat_width_um, mat_height_um = mat_um(tech, ports, part, decode.area_um2, wide_um, high_um)
    # what is common to reading and writing in one mat, and what is not
    both_j = decode.energy_j + precharge.energy_j + compare.energy_j
    read_j = both_j + read * part.column * part.per_mat + amplifier_f * tech.vdd2 * sensed + toggle * out.energy_j
    write_j = both_j + write * part.mat_bit + toggle * out.energy_j  # data goes in along the way it comes out
    to, back, into = (
        tree(tech, part, mat_width_um, mat_height_um, bits * share)
        for bits, share in ((address_bit, ports.all), (out_bit, ports.reading), (in_bit, ports.writing))
    )
    bitline_s = _bitline_s(tech, part, high_um, column_um, swing_v)
    inside_s = bitline_s + _sense_s(tech, amplifier_f, swing_v)
    leak_sub_w, leak_gate_w = _cell_leakage_w(tech, ports)
    cells = part.row * part.column * part.per_mat
    mats = part.mats_across * part.mats_down
    around = decode.times(1.0, ports.all) + precharge + out.times(1.0, ports.reading) + compare
    idle_w = tech.off_a_per_um * SENSE_ENABLE * tech.feature_um * tech.voltage_v * sensed * ports.reading
    width_um, height_um = bank_um(tech, part, mat_width_um, mat_height_um, address_bit + in_bit + out_bit)
    return Access(
        read_j * part.active_mats + to.energy_j + toggle * back.energy_j,
        write_j * part.active_mats + to.energy_j + toggle * into.energy_j,
        to.delay_s + decode.delay_s + inside_s + out.delay_s + back.delay_s + compare.delay_s,
        mats * (cells * leak_sub_w + around.subthreshold_w + idle_w) + (to + back + into).subthreshold_w,
        mats * (cells * leak_gate_w + around.gate_w) + (to + back + into).gate_w,
        width_um,
        height_um,
    )


def tree(tech: Technology, part: Partition, width_um: Scalar, height_um: Scalar, bits: Scalar) -> Cost:
    """An H-tree of ``bits`` wires from the middle of one edge of a block of mats to a mat.

    The root runs half the width to the centre; each fork then halves what is left: W·(1 - 1/n) across in all,
    and half of H·(1 - 1/m) down. The wires of every port are counted as switching, as in McPAT: an
    access to a structure with several ports is one in which all of them work.
    """
    wire = repeated_wire(tech)
    across = part.mats_across * width_um * (1.0 - 1.0 / part.mats_across)
    down = 0.5 * part.mats_down * height_um * (1.0 - 1.0 / part.mats_down)
    forks = np.log2(part.mats_across * part.mats_down)
    run = wire.cost(across + down, bits)
    node_j = 0.5 * wire.input_f * tech.vdd2 * forks * bits
    return Cost(run.energy_j + node_j, run.delay_s, run.subthreshold_w, run.gate_w)


def _decoder(tech: Technology, part: Partition, wide_um: float, high_um: float) -> Cost:
    """Two predecoders of half the address each, a row gate that joins them, and the driver of the wordline."""
    line_f = part.column * (2.0 * gate_f(tech, ACCESS * tech.feature_um) + wide_um * wire_f_per_um(tech, tech.local))
    line_ohm = part.column * wide_um * wire_ohm_per_um(tech.local)
    row_gate = chain(tech, line_f, line_ohm, inputs=2)
    bits = np.maximum(np.log2(part.row), 1.0)
    gate_in_f = gate_f(tech, tech.min_width_um * (2.0 + tech.p_to_n))
    spine_um = part.per_mat_row * part.row * high_um
    fan_f = 2.0 ** (bits / 2.0) * part.per_mat * gate_in_f + spine_um * wire_f_per_um(tech, tech.wide)
    predecode = chain(tech, fan_f, spine_um * wire_ohm_per_um(tech.wide), inputs=3)
    drivers = chain(tech, 8.0 * gate_in_f).times(0.5 * bits, bits)
    predecoders = predecode.times(2.0, 2.0 * 2.0 ** (bits / 2.0))
    rows = row_gate.times(part.per_mat, part.row * part.per_mat)
    both = drivers + predecoders + rows
    return Cost(both.energy_j, both.delay_s, both.subthreshold_w, both.gate_w, rows.area_um2)


def _bitline_f(tech: Technology, part: Partition, high_um: float) -> Array:
    """A bitline: a shared drain contact and a length of local wire for every row."""
    drain = float(drain_f(tech, ACCESS * tech.feature_um)) / 2.0
    return np.asarray(part.row * (drain + high_um * wire_f_per_um(tech, tech.local)))


def _column_f(tech: Technology, column_um: Array) -> tuple[Scalar, Scalar]:
    """What hangs on a bitline: the column multiplexer, and behind it the sense amplifier's inputs."""
    mux = drain_f(tech, MUX * tech.feature_um, fold_um=column_um)
    iso = drain_f(tech, SENSE_ISO * tech.feature_um, fold_um=column_um)
    return mux, 2.0 * iso + _latch_f(tech, column_um) + mux


def _bitline_j(
    tech: Technology, part: Partition, high_um: float, column_um: Array, swing_v: float
) -> tuple[Array, Array]:
    """Energy of a pair in a read (a small swing) and in a write (a full one)."""
    line_f = _bitline_f(tech, part, high_um)
    mux_f, behind_f = _column_f(tech, column_um)
    muxed = np.where(part.column_mux > 1, 2.0 * mux_f, 0.0)
    read_j = 2.0 * swing_v * tech.voltage_v * (line_f + muxed + behind_f / part.column_mux)
    return np.asarray(read_j), np.asarray(2.0 * tech.vdd2 * (line_f + muxed))


def _bitline_s(tech: Technology, part: Partition, high_um: float, column_um: Array, swing_v: float) -> Array:
    """Time for a cell to pull its bitline down by the swing."""
    feature = tech.feature_um
    cell_ohm = tech.n_resistance_ohm_um * (1.0 / (PULL_DOWN * feature) + 1.0 / (ACCESS * feature))
    line_f = _bitline_f(tech, part, high_um)
    mux_f, behind_f = _column_f(tech, column_um)
    line_ohm = part.row * high_um * wire_ohm_per_um(tech.local)
    tau_s = cell_ohm * (line_f + 2.0 * mux_f + behind_f) + line_ohm * (line_f / 2.0 + behind_f)
    return np.asarray(tau_s * np.log(tech.voltage_v / (tech.voltage_v - swing_v)) * 2.0)


def _latch_f(tech: Technology, column_um: Array) -> Scalar:
    feature = tech.feature_um
    return (
        gate_f(tech, (SENSE_N + SENSE_P) * feature)
        + drain_f(tech, SENSE_N * feature, fold_um=column_um)
        + drain_f(tech, SENSE_P * feature, fold_um=column_um)
    )


def _amplifier_f(tech: Technology, column_um: Array) -> Scalar:
    """What a sense amplifier swings fully: its latch, its isolation and the multiplexer behind it."""
    mux = drain_f(tech, MUX * tech.feature_um, fold_um=column_um)
    return _latch_f(tech, column_um) + drain_f(tech, SENSE_ISO * tech.feature_um, fold_um=column_um) + mux


def _sense_s(tech: Technology, load_f: Scalar, swing_v: float) -> Array:
    """A latch grows its input exponentially: C/g_m · ln(V/swing)."""
    transconductance = SENSE_N * tech.feature_um / tech.n_resistance_ohm_um
    return np.asarray(load_f / transconductance * np.log(tech.voltage_v / swing_v))


def _precharge(tech: Technology, part: Partition, wide_um: float) -> Cost:
    """The line that switches the precharge and equalising transistors of every column."""
    min_um = tech.min_width_um
    column_f = gate_f(tech, (2.0 * 6.0 + 1.0) * tech.p_to_n * min_um) + wide_um * wire_f_per_um(tech, tech.wide)
    line = chain(tech, part.column * column_f, part.column * wide_um * wire_ohm_per_um(tech.wide))
    return line.times(part.per_mat, part.per_mat)


def _output(tech: Technology, part: Partition, high_um: float, bits: Array) -> Cost:
    """From a sense amplifier through the multiplexers and down the subarray, for so many bits of a mat."""
    feature, min_um = tech.feature_um, tech.min_width_um
    inverter_f = float(gate_f(tech, min_um * (1 + tech.p_to_n)) + drain_f(tech, min_um) * (1 + tech.p_to_n))
    mux_f = float(drain_f(tech, MUX * feature))
    inside_j = 0.5 * (3.0 * inverter_f + 4.0 * mux_f) * tech.vdd2
    down = repeated_wire(tech).cost(part.row * high_um)
    stage_s = 4.0 * tech.n_resistance_ohm_um / min_um * inverter_f
    one = Cost(inside_j + down.energy_j, stage_s + down.delay_s, down.subthreshold_w, down.gate_w)
    return one.times(bits, bits)


def _comparators(tech: Technology, part: Partition, ways: int) -> Cost:
    """Four quarter comparators a way, whose inverters and match transistors are sized as in CACTI."""
    if not ways:
        return Cost()
    feature = tech.feature_um
    inverters_um = np.array([20.0, 40.0, 80.0, 150.0]) * feature
    stages_f = sum(float(gate_f(tech, w) + drain_f(tech, w)) for w in inverters_um)
    tag_bit = np.maximum(part.column * part.per_mat / ways, 1.0)
    match_f = tag_bit / 4.0 * 2.0 * float(drain_f(tech, 12.5 * feature, stack=2))
    energy_j = (0.5 * 4.0 * ways * (stages_f + match_f) + match_f * (ways - 1)) * tech.vdd2
    wide_um = 4.0 * ways * (inverters_um.sum() + 25.0 * feature) / 2.0
    delay_s = 6.0 * tech.n_resistance_ohm_um * (match_f + stages_f / 4.0) / (50.0 * feature)
    return Cost(
        energy_j / part.active_mats,
        delay_s,
        tech.off_a_per_um * wide_um * tech.voltage_v,
        tech.gate_leak_a_per_um * wide_um * tech.voltage_v,
    )


def _cell_leakage_w(tech: Technology, ports: Ports) -> tuple[float, float]:
    """A cell: two inverters, of which one transistor each is off, and the access transistors of its ports."""
    feature = tech.feature_um
    pair_um = (PULL_DOWN + PULL_UP) * feature
    access_um = ACCESS * feature * ((ports.read_write + ports.write) / 2.0 + ports.read * 0.55)
    sub_w = tech.off_a_per_um * (pair_um + access_um) * tech.voltage_v
    gate_w = tech.gate_leak_a_per_um * (pair_um + ports.read * ACCESS * feature) / 2.0 * tech.voltage_v
    return sub_w, gate_w
