"""Compute energy, delay, leakage and size of a bank of memory cells, for every way to cut it.

After CACTI (HPL-2008-20, sections 4 to 6): a bank is cut into subarrays; up to four of them share
their decoding in a mat; mats hang on an H-tree. In a partition every quantity is an array with one
element per way to cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Sweepable
from wattcast.core.errors import bad_value
from wattcast.lab.gpuwattch.bottom_up import technology
from wattcast.lab.gpuwattch.bottom_up.technology import CircuitCost, Technology

# bitline swing a sense amplifier needs (CACTI 6.5)
_SENSE_SHARE = 0.05
_SENSE_LEAST_V = 0.08
_CELL_ASPECT = 1.46  # height over width of a cell (CACTI 6.5)
# transistor widths of a cell in features
ACCESS = 1.31
PULL_DOWN = 2.08
PULL_UP = 1.23
# its transistors in features
SENSE_N = 3.75
SENSE_P = 7.5
SENSE_ISO = 12.5
SENSE_ENABLE = 5.0
MUX_WIDTH = 9.0  # column and sense multiplexers in features: six minimum widths


@dataclass(frozen=True)
class ArrayPorts:
    """The ports of a cell, by kind."""

    read_write: int = 1
    read: int = 0
    write: int = 0
    search: int = 0

    def __post_init__(self) -> None:
        if min(counts := tuple(vars(self).values())) < 0:
            raise bad_value("ports", "zero or more of each kind", counts)

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
    """Return width and height of a six-transistor cell, two wires wider and higher for each further
    port.
    """
    side_um = tech.feature_um * (technology.CELL_AREA_FEATURE2 / _CELL_ASPECT) ** 0.5
    further = 2.0 * tech.local.pitch_um * (ports.all - 1 + max(ports.search - 1, 0))
    return side_um + further, side_um * _CELL_ASPECT + further


def _folded_um(
    tech: Technology,
    width_um: float,
    pitch_um: Array,
) -> Array:
    """Return the height of a transistor that is folded to fit a pitch."""
    fingers = np.ceil(width_um / pitch_um)
    return np.asarray((fingers + (fingers + 1.0) * 3.0) * tech.feature_um)


def mat_sides_um(
    tech: Technology,
    ports: ArrayPorts,
    part: ArrayPartition,
    rows_um2: Sweepable,
    wide_um: float,
    high_um: float,
) -> tuple[Array, Array]:
    """Return width and height of a mat: cells, column circuits below them, decoders and wires at
    their side.
    """
    feature = tech.feature_um
    pitch = tech.wide.pitch_um
    column_um = np.asarray(wide_um * part.column_mux / ports.reading)
    half_um = np.full_like(column_um, wide_um / (2.0 * ports.reading))
    precharge = 6.0 * tech.p_to_n * tech.min_width_um
    circuits_um = _folded_um(tech, precharge, half_um) + _folded_um(
        tech, precharge / 6.0, 2.0 * half_um
    )
    circuits_um = circuits_um + np.where(
        part.column_mux > 1, _folded_um(tech, MUX_WIDTH * feature, half_um), 0.0
    )
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


@dataclass(frozen=True)
class _Bitlines:
    """Energy of a pair of bitlines and of its sense amplifier, and the time that a read takes."""

    pair_read_j: Array
    pair_write_j: Array
    amplifier_j: Sweepable
    delay_s: Array


def _bitline_cost(
    tech: Technology,
    ports: ArrayPorts,
    part: ArrayPartition,
    wide_um: float,
    high_um: float,
) -> _Bitlines:
    feature = tech.feature_um
    volts = tech.voltage_v
    column_um = wide_um * part.column_mux / ports.reading
    # bitlines have half a drain and a length of local wire for every row, then multiplexer and
    # sense amplifier
    line_f = part.row * (tech.drain_f(ACCESS * feature) / 2.0 + high_um * tech.local.f_per_um())
    mux_f = tech.folded_drain_f(MUX_WIDTH * feature, column_um)
    iso_f = tech.folded_drain_f(SENSE_ISO * feature, column_um)
    n_f = tech.folded_drain_f(SENSE_N * feature, column_um)
    p_f = tech.folded_drain_f(SENSE_P * feature, column_um)
    latch_f = tech.gate_f((SENSE_N + SENSE_P) * feature) + n_f + p_f
    behind_f = 2.0 * iso_f + latch_f + mux_f
    amplifier_f = latch_f + iso_f + mux_f
    muxed_f = np.where(part.column_mux > 1, 2.0 * mux_f, 0.0)
    swing_v = bitline_swing_v(tech)

    # a cell pulls its bitline down by the swing in 2·τ·ln(V / (V - ΔV)); a latch amplifies that in
    # C/g_m · ln(V/ΔV)
    cell_ohm = tech.n_resistance_ohm_um * (1.0 / (PULL_DOWN * feature) + 1.0 / (ACCESS * feature))
    line_ohm = part.row * high_um * tech.local.ohm_per_um()
    tau_s = cell_ohm * (line_f + 2.0 * mux_f + behind_f) + line_ohm * (line_f / 2.0 + behind_f)
    delay_s = tau_s * np.log(volts / (volts - swing_v)) * 2.0
    latch_ohm = SENSE_N * feature / tech.n_resistance_ohm_um
    delay_s += amplifier_f / latch_ohm * np.log(volts / swing_v)
    return _Bitlines(
        pair_read_j=2.0 * swing_v * volts * (line_f + muxed_f + behind_f / part.column_mux),
        pair_write_j=2.0 * tech.vdd2 * (line_f + muxed_f),
        amplifier_j=amplifier_f * tech.vdd2,
        delay_s=delay_s,
    )


@dataclass(frozen=True)
class _MatCircuits:
    """The circuits of one mat around its cells."""

    decode: CircuitCost
    bitlines: _Bitlines
    precharge: CircuitCost
    out: CircuitCost
    compare: CircuitCost

    @property
    def opening_j(self) -> Array:
        """Energy of decoding, precharging and comparing, in a read as in a write."""
        return np.asarray(self.decode.energy_j + self.precharge.energy_j + self.compare.energy_j)

    @property
    def delay_s(self) -> Array:
        """Seconds from an address at the mat to data at its edge."""
        inside_s = self.decode.delay_s + self.bitlines.delay_s
        return np.asarray(inside_s + self.out.delay_s + self.compare.delay_s)

    def leakage_w(
        self,
        tech: Technology,
        ports: ArrayPorts,
        part: ArrayPartition,
    ) -> tuple[Array, Array]:
        """Return subthreshold and gate leakage of the cells and of the circuits around them."""
        feature = tech.feature_um
        # leakage of a cell is that of two inverters and the access transistors of its ports
        pair_um = (PULL_DOWN + PULL_UP) * feature
        access_um = ACCESS * feature * ((ports.read_write + ports.write) / 2.0 + ports.read * 0.55)
        gated_um = (pair_um + ports.read * ACCESS * feature) / 2.0
        cell_off_w, cell_gate_w = tech.leakage_w(pair_um + access_um, gated_um)
        cells = part.row * part.column * part.per_mat

        read_out = self.out.times(1.0, ports.reading)
        around = self.decode.times(1.0, ports.all) + self.precharge + read_out + self.compare
        sensed = _sensed_columns(part) * ports.reading
        sense_w = tech.off_a_per_um * SENSE_ENABLE * feature * tech.voltage_v * sensed
        return (
            np.asarray(cells * cell_off_w + around.subthreshold_w + sense_w),
            np.asarray(cells * cell_gate_w + around.gate_w),
        )


def _sensed_columns(part: ArrayPartition) -> Array:
    """Return how many sense amplifiers of a mat work at once."""
    return np.asarray(part.column / part.column_mux * part.per_mat)


def _mat_circuits(
    tech: Technology,
    ports: ArrayPorts,
    part: ArrayPartition,
    tag_ways: int,
) -> _MatCircuits:
    wide_um, high_um = cell_sides_um(tech, ports)
    # a line switches the precharge and equalising transistors of every column
    column_f = tech.gate_f(13.0 * tech.p_to_n * tech.min_width_um) + wide_um * tech.wide.f_per_um()
    column_ohm = wide_um * tech.wide.ohm_per_um()
    precharge = tech.driver_chain(part.column * column_f, part.column * column_ohm)
    # of tags only hits leave a mat
    leaving = tag_ways / part.active_mats if tag_ways else part.mat_bit
    return _MatCircuits(
        decode=_decoder_cost(tech, part, wide_um, high_um),
        bitlines=_bitline_cost(
            tech,
            ports,
            part,
            wide_um,
            high_um,
        ),
        precharge=precharge.times(part.per_mat),
        out=_output_cost(tech, part, high_um).times(leaving),
        compare=_comparator_cost(tech, part, tag_ways),
    )


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

    E_read = active mats · (decoder + precharge + bitlines at the read swing + sense amplifiers +
    output) + H-trees for address and data; a write swings the bitlines of its bits fully.
    ``tag_ways`` above zero puts comparators behind the sense amplifiers. ``toggle`` is the share of
    data wires that charge in an access; bitlines swing whatever the data."""
    mat = _mat_circuits(tech, ports, part, tag_ways)

    # energies of one mat; data goes in the way it comes out
    read_j = mat.opening_j + mat.bitlines.pair_read_j * part.column * part.per_mat
    read_j = read_j + mat.bitlines.amplifier_j * _sensed_columns(part) + toggle * mat.out.energy_j
    write_j = mat.opening_j + mat.bitlines.pair_write_j * part.mat_bit + toggle * mat.out.energy_j

    # H-trees between the edge of the bank and its mats
    across = part.mats_across
    down = part.mats_down
    width_um, height_um = mat_sides_um(
        tech,
        ports,
        part,
        mat.decode.area_um2,
        *cell_sides_um(tech, ports),
    )
    route = partial(
        wire_tree_cost,
        tech,
        across,
        down,
        width_um,
        height_um,
    )
    address = route(address_bit * ports.all)
    data_out = route(out_bit * ports.reading)
    data_in = route(in_bit * ports.writing)
    trees = address + data_out + data_in
    tree_um = (address_bit + in_bit + out_bit) * tech.wide.pitch_um

    off_w, gate_w = mat.leakage_w(tech, ports, part)
    return BankCost(
        read_j=read_j * part.active_mats + address.energy_j + toggle * data_out.energy_j,
        write_j=write_j * part.active_mats + address.energy_j + toggle * data_in.energy_j,
        delay_s=np.asarray(address.delay_s + mat.delay_s + data_out.delay_s),
        subthreshold_w=np.asarray(across * down * off_w + trees.subthreshold_w),
        gate_w=np.asarray(across * down * gate_w + trees.gate_w),
        width_um=across * width_um + tree_um * np.log2(down),
        height_um=down * height_um + tree_um * np.log2(across),
    )


def wire_tree_cost(
    tech: Technology,
    across: Sweepable,
    down: Sweepable,
    width_um: Sweepable,
    height_um: Sweepable,
    bits: Sweepable,
) -> CircuitCost:
    """Return the cost of an H-tree of ``bits`` wires from an edge of a block of ``across`` by
    ``down`` mats to a mat.

    The root runs half the width from the middle of the edge to the centre; each fork halves the
    rest: W·(1 - 1/n) in all, with n mats across, and half of H·(1 - 1/m) down. The wires of every
    port count as switching, as in McPAT: an access to a structure with several ports is one in
    which all of them work."""
    wire = tech.repeated_wire()
    across_um = across * width_um * (1.0 - 1.0 / across)
    down_um = 0.5 * down * height_um * (1.0 - 1.0 / down)
    node_j = 0.5 * wire.input_f * tech.vdd2 * np.log2(across * down) * bits
    return wire.cost(across_um + down_um, bits) + CircuitCost(node_j)


def _decoder_cost(
    tech: Technology,
    part: ArrayPartition,
    wide_um: float,
    high_um: float,
) -> CircuitCost:
    """Return the cost of two predecoders of half the address each, the row gates that join them,
    and the wordline.
    """
    line_f = part.column * (
        2.0 * tech.gate_f(ACCESS * tech.feature_um) + wide_um * tech.local.f_per_um()
    )
    line_ohm = part.column * wide_um * tech.local.ohm_per_um()
    row_gate = tech.driver_chain(line_f, line_ohm, inputs=2)
    bits = np.maximum(np.log2(part.row), 1.0)
    gate_in_f = tech.gate_f(tech.min_width_um * (2.0 + tech.p_to_n))
    spine_um = part.per_mat_row * part.row * high_um
    fan_f = 2.0 ** (bits / 2.0) * part.per_mat * gate_in_f + spine_um * tech.wide.f_per_um()
    predecode = tech.driver_chain(fan_f, spine_um * tech.wide.ohm_per_um(), inputs=3)
    drivers = tech.driver_chain(8.0 * gate_in_f).times(0.5 * bits, bits)
    predecoders = predecode.times(2.0, 2.0 * 2.0 ** (bits / 2.0))
    rows = row_gate.times(part.per_mat, part.row * part.per_mat)
    return replace(drivers + predecoders + rows, area_um2=rows.area_um2)


def _output_cost(
    tech: Technology,
    part: ArrayPartition,
    high_um: float,
) -> CircuitCost:
    """Return the cost of moving a bit of a mat from its sense amplifier through multiplexers down
    the subarray.
    """
    min_um = tech.min_width_um
    inverter_f = tech.gate_f(min_um * (1 + tech.p_to_n)) + tech.drain_f(min_um) * (1 + tech.p_to_n)
    inside_j = (
        0.5 * (3.0 * inverter_f + 4.0 * tech.drain_f(MUX_WIDTH * tech.feature_um)) * tech.vdd2
    )
    stage_s = 4.0 * tech.n_resistance_ohm_um / min_um * inverter_f
    return CircuitCost(inside_j, delay_s=stage_s) + tech.repeated_wire().cost(part.row * high_um)


def _comparator_cost(
    tech: Technology,
    part: ArrayPartition,
    ways: int,
) -> CircuitCost:
    """Return the cost of four quarter comparators per way, sized as in CACTI 6.5."""
    if not ways:
        return CircuitCost()
    feature = tech.feature_um
    inverters_um = np.array([20.0, 40.0, 80.0, 150.0]) * feature
    stages_f = sum(tech.gate_f(w) + tech.drain_f(w) for w in inverters_um)
    tag_bit = np.maximum(part.column * part.per_mat / ways, 1.0)
    match_f = tag_bit / 4.0 * 2.0 * tech.drain_f(12.5 * feature, stack=2)
    energy_j = (0.5 * 4.0 * ways * (stages_f + match_f) + match_f * (ways - 1)) * tech.vdd2
    wide_um = 4.0 * ways * (inverters_um.sum() + 25.0 * feature) / 2.0
    delay_s = 6.0 * tech.n_resistance_ohm_um * (match_f + stages_f / 4.0) / (50.0 * feature)
    return CircuitCost(
        energy_j / part.active_mats, *tech.leakage_w(wide_um, wide_um), delay_s=delay_s
    )
