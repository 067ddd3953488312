"""Compute the cost of memory arrays (SRAM with banks, ways and tags; searched buffers) in their
best layout.

After CACTI (HPL-2008-20, sections 4 to 6): a bank is cut into subarrays; up to four of them share
their decoding in a mat; mats hang on an H-tree. In a partition every quantity is an array with one
element per way to cut.

All partitions of a bank are evaluated; the best has the least energy times delay among those of at
most twice the smallest area. A layout is chosen once, for one port at 45 nm and nominal voltage,
and then scaled or given more ports: energies rise smoothly with ports, node and voltage, without
steps where a new layout would win. (McPAT searches anew for each, by energy times delay squared.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Sweepable
from wattcast.core.errors import bad_value
from wattcast.lab.gpuwattch.bottom_up import technology
from wattcast.lab.gpuwattch.bottom_up.technology import (
    CircuitCost,
    Technology,
    check_at_least_one,
    to_float,
)

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


def _folded_um(tech: Technology, width_um: float, pitch_um: Array) -> Array:
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
    feature = tech.feature_um
    volts = tech.voltage_v
    wide_um, high_um = cell_sides_um(tech, ports)
    column_um = wide_um * part.column_mux / ports.reading
    decode = _decoder_cost(tech, part, wide_um, high_um)
    # bitlines have half a drain and a length of local wire for every row, then multiplexer and
    # sense amplifier
    line_f = part.row * (tech.drain_f(ACCESS * feature) / 2.0 + high_um * tech.local.f_per_um())
    mux_f, iso_f, n_f, p_f = (
        tech.folded_drain_f(width * feature, column_um)
        for width in (MUX_WIDTH, SENSE_ISO, SENSE_N, SENSE_P)
    )
    latch_f = tech.gate_f((SENSE_N + SENSE_P) * feature) + n_f + p_f
    behind_f = 2.0 * iso_f + latch_f + mux_f
    amplifier_f = latch_f + iso_f + mux_f
    muxed_f = np.where(part.column_mux > 1, 2.0 * mux_f, 0.0)
    swing_v = bitline_swing_v(tech)
    pair_read_j = (
        2.0 * swing_v * volts * (line_f + muxed_f + behind_f / part.column_mux)
    )  # 2·C·V·ΔV
    pair_write_j = 2.0 * tech.vdd2 * (line_f + muxed_f)  # 2·C·V²
    # a cell pulls its bitline down by the swing in 2·τ·ln(V / (V - ΔV)); a latch amplifies that in
    # C/g_m · ln(V/ΔV)
    cell_ohm = tech.n_resistance_ohm_um * (1.0 / (PULL_DOWN * feature) + 1.0 / (ACCESS * feature))
    line_ohm = part.row * high_um * tech.local.ohm_per_um()
    tau_s = cell_ohm * (line_f + 2.0 * mux_f + behind_f) + line_ohm * (line_f / 2.0 + behind_f)
    inside_s = tau_s * np.log(volts / (volts - swing_v)) * 2.0
    inside_s += (
        amplifier_f / (SENSE_N * feature / tech.n_resistance_ohm_um) * np.log(volts / swing_v)
    )
    # a line switches the precharge and equalising transistors of every column
    column_f = tech.gate_f(13.0 * tech.p_to_n * tech.min_width_um) + wide_um * tech.wide.f_per_um()
    column_ohm = wide_um * tech.wide.ohm_per_um()
    precharge = tech.driver_chain(part.column * column_f, part.column * column_ohm).times(
        part.per_mat
    )
    leaving = (
        part.mat_bit if not tag_ways else tag_ways / part.active_mats
    )  # of tags only hits leave a mat
    out = _output_cost(tech, part, high_um).times(leaving)
    compare = _comparator_cost(tech, part, tag_ways)
    # energies of one mat
    sensed = part.column / part.column_mux * part.per_mat
    both_j = decode.energy_j + precharge.energy_j + compare.energy_j
    read_j = both_j + pair_read_j * part.column * part.per_mat + amplifier_f * tech.vdd2 * sensed
    read_j += toggle * out.energy_j
    write_j = (
        both_j + pair_write_j * part.mat_bit + toggle * out.energy_j
    )  # data goes in the way it comes out
    mat_width_um, mat_height_um = mat_sides_um(tech, ports, part, decode.area_um2, wide_um, high_um)
    to, back, into = (
        wire_tree_cost(
            tech, part.mats_across, part.mats_down, mat_width_um, mat_height_um, bits * share
        )
        for bits, share in (
            (address_bit, ports.all),
            (out_bit, ports.reading),
            (in_bit, ports.writing),
        )
    )
    # leakage of a cell is that of two inverters and the access transistors of its ports
    pair_um = (PULL_DOWN + PULL_UP) * feature
    access_um = ACCESS * feature * ((ports.read_write + ports.write) / 2.0 + ports.read * 0.55)
    cell_w = tech.leakage_w(pair_um + access_um, (pair_um + ports.read * ACCESS * feature) / 2.0)
    cells = part.row * part.column * part.per_mat
    mats = part.mats_across * part.mats_down
    around = decode.times(1.0, ports.all) + precharge + out.times(1.0, ports.reading) + compare
    trees = to + back + into
    idle_w = tech.off_a_per_um * SENSE_ENABLE * feature * volts * sensed * ports.reading
    wires_um = (address_bit + in_bit + out_bit) * tech.wide.pitch_um  # of the tree between the mats
    found = (
        read_j * part.active_mats + to.energy_j + toggle * back.energy_j,
        write_j * part.active_mats + to.energy_j + toggle * into.energy_j,
        to.delay_s + decode.delay_s + inside_s + out.delay_s + back.delay_s + compare.delay_s,
        mats * (cells * cell_w[0] + around.subthreshold_w + idle_w) + trees.subthreshold_w,
        mats * (cells * cell_w[1] + around.gate_w) + trees.gate_w,
        part.mats_across * mat_width_um + wires_um * np.log2(part.mats_down),
        part.mats_down * mat_height_um + wires_um * np.log2(part.mats_across),
    )
    return BankCost(*map(np.asarray, found))


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
    tech: Technology, part: ArrayPartition, wide_um: float, high_um: float
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


def _output_cost(tech: Technology, part: ArrayPartition, high_um: float) -> CircuitCost:
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


def _comparator_cost(tech: Technology, part: ArrayPartition, ways: int) -> CircuitCost:
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


LAYOUT_OVERHEAD = (
    1.1 * 1.2
)  # placement in a macro, macros on a chip: area, and wires with it (McPAT 0.8)
_AREA_LIMIT = (
    2.0  # times the smallest: without it large arrays come out at thrice the area they need
)
_DRAWN_NM = 45.0
_ONE_PORT = ArrayPorts()
_LEAST_ROW = 8
_MOST_ROW = 4096
_LEAST_COLUMN = 2
_MOST_COLUMN = 4096


@dataclass(frozen=True)
class SramArray:
    """The shape of a memory array as an architect gives it."""

    name: str
    capacity_byte: int
    block_byte: int
    ways: int = 1
    banks: int = 1
    ports: ArrayPorts = _ONE_PORT
    output_bit: int | None = None  # bits of an access; default: a block
    tag_bit: int = 0  # of a way; 0: no tags
    sequential: bool = False  # the tag first, then one way of data
    toggle: float = 1.0  # share of data wires that charge in an access

    def __post_init__(self) -> None:
        shape = {
            "capacity": self.capacity_byte,
            "block": self.block_byte,
            "ways": self.ways,
            "banks": self.banks,
        }
        ports = {"ports that read": self.ports.reading, "ports that write": self.ports.writing}
        check_at_least_one(self.name, **shape, **ports)
        if self.output_bit is not None and self.output_bit < 1:
            raise bad_value(f"{self.name}: output", "at least one bit", self.output_bit)
        if self.capacity_byte % (self.banks * self.block_byte * self.ways):
            expectation = (
                f"{self.banks} banks of whole sets of {self.ways} blocks of {self.block_byte} bytes"
            )
            do = "Change capacity, banks, ways or block so that they divide."
            raise bad_value(
                f"{self.name}: geometry", expectation, f"{self.capacity_byte} bytes", do
            )

    @property
    def bits(self) -> int:
        """Number of bits that an access moves."""
        return self.output_bit or 8 * self.block_byte

    @property
    def blocks(self) -> int:
        """Number of blocks in a bank."""
        return self.capacity_byte // (self.banks * self.block_byte)


@dataclass(frozen=True)
class ArrayCost:
    """Energy of an access, and leakage and area of a whole memory structure."""

    read_j: float
    write_j: float
    subthreshold_w: float
    gate_w: float
    area_um2: float
    delay_s: float
    tag_read_j: float = 0.0
    tag_write_j: float = 0.0
    search_j: float = 0.0


@dataclass(frozen=True)
class _BankCells:
    """Rows and columns of a bank, and the bits that an access moves in and out."""

    rows: int
    columns: int
    select: int  # ways that are read together and of which one is taken
    in_bit: int
    out_bit: int
    banks: int
    tag_ways: int = 0  # above zero: an array of tags, which gives out only hits

    @property
    def leaving(self) -> int:
        return self.tag_ways or self.out_bit


@cache
def sram_cost(tech: Technology, sram: SramArray) -> ArrayCost:
    """Return the cost of data and tag arrays in their best layouts, with short-circuit and layout
    overheads.
    """
    ways = 1 if sram.sequential else sram.ways
    tag = None
    before_s = 0.0
    if sram.tag_bit:
        width = sram.tag_bit * sram.ways
        cells = _BankCells(
            sram.blocks // sram.ways, width, 1, sram.tag_bit, width, sram.banks, sram.ways
        )
        tag, chosen_s = _build_array(tech, sram, cells)
        before_s = (
            chosen_s if sram.sequential else 0.0
        )  # data are read after the tags, which counts in their delay
    cells = _BankCells(
        sram.blocks // ways, 8 * sram.block_byte * ways, ways, sram.bits, sram.bits, sram.banks
    )
    data, _ = _build_array(tech, sram, cells, before_s)
    share = tech.short_circuit * LAYOUT_OVERHEAD
    tag_read, tag_write = (share * tag.read_j, share * tag.write_j) if tag else (0.0, 0.0)
    arrays = (data,) if tag is None else (data, tag)
    return ArrayCost(
        share * data.read_j + tag_read,
        share * data.write_j + tag_write,
        sum(part.subthreshold_w for part in arrays),
        sum(part.gate_w for part in arrays),
        LAYOUT_OVERHEAD * sum(part.area_um2 for part in arrays),
        data.delay_s + (tag.delay_s if tag and sram.sequential else 0.0),
        tag_read,
        tag_write,
    )


@cache
def _choose_layout(
    cells: _BankCells, name: str, before_s: float
) -> tuple[ArrayPartition, Array, float]:
    """Return the best partition of a bank, its address bits, and its delay at the node of the
    choice.

    ``before_s`` passes before the access begins.
    """
    part = list_partitions(cells.rows, cells.columns, cells.select, cells.out_bit)
    if part.row.size == 0:
        expectation = f"subarrays of {_LEAST_ROW} to {_MOST_ROW} rows"
        geometry = f"{cells.rows} rows of {cells.columns} bits"
        do = "The structure is too small or too oddly shaped for a memory array."
        raise bad_value(f"{name}: geometry", expectation, geometry, do)
    address = (
        np.log2(part.row) + np.log2(part.column_mux) + np.log2(part.mats_across * part.mats_down)
    )
    bits = np.maximum(address, 1.0)
    drawn = technology.find_technology(_DRAWN_NM)
    one = _all_banks_cost(drawn, _ONE_PORT, part, bits, cells)
    area = one.width_um * one.height_um
    measure = one.read_j * (one.delay_s + before_s)
    best = int(np.argmin(np.where(area <= _AREA_LIMIT * area.min(), measure, np.inf)))
    return part.select(np.array([best])), bits[[best]], float(one.delay_s[best])


def _build_array(
    tech: Technology, sram: SramArray, cells: _BankCells, before_s: float = 0.0
) -> tuple[ArrayCost, float]:
    """Return the cost of the best layout at a node and a voltage, with all its ports; and its delay
    when chosen.
    """
    part, bits, chosen_s = _choose_layout(cells, sram.name, before_s)
    bank = _all_banks_cost(tech, sram.ports, part, bits, cells, sram.toggle)
    read_j, write_j, delay_s, off_w, gate_w, width_um, height_um = map(
        to_float, vars(bank).values()
    )
    return ArrayCost(read_j, write_j, off_w, gate_w, width_um * height_um, delay_s), chosen_s


def _all_banks_cost(
    tech: Technology,
    ports: ArrayPorts,
    part: ArrayPartition,
    address: Array,
    cells: _BankCells,
    toggle: float = 1.0,
) -> BankCost:
    """Return the cost of all banks and the tree between them, in the arrangement that reads with
    less energy.
    """
    bank = bank_cost(
        tech, ports, part, address, cells.in_bit, cells.leaving, cells.tag_ways, toggle
    )
    if cells.banks == 1:
        return bank
    less = 2.0 ** int(np.log2(cells.banks) / 2)
    bits = (address * ports.all, cells.leaving * ports.reading, cells.in_bit * ports.writing)
    wires_um = (bits[0] + bits[1] + bits[2]) * tech.wide.pitch_um
    ways = []
    for down in (less, cells.banks / less):  # banks in columns of so many, side by side
        across = cells.banks / down
        to, back, into = (
            wire_tree_cost(tech, across, down, bank.width_um, bank.height_um, count)
            for count in bits
        )
        routed = to + back + into
        ways.append(
            BankCost(
                bank.read_j + to.energy_j + toggle * back.energy_j,
                bank.write_j + to.energy_j + toggle * into.energy_j,
                np.asarray(bank.delay_s + (to + back).delay_s),
                np.asarray(cells.banks * bank.subthreshold_w + routed.subthreshold_w),
                np.asarray(cells.banks * bank.gate_w + routed.gate_w),
                across * bank.width_um + wires_um,
                down * bank.height_um + wires_um,
            )
        )
    first = ways[0].read_j <= ways[1].read_j
    return BankCost(
        *(np.where(first, a, b) for a, b in zip(*(vars(way).values() for way in ways), strict=True))
    )


def list_partitions(rows: int, columns: int, select: int, out_bit: int) -> ArrayPartition:
    """List every way to cut a bank: across, down, sets per row, and columns per sense amplifier."""
    axes = (
        2.0 ** np.arange(0, 7),
        2.0 ** np.arange(0, 8),
        2.0 ** np.arange(-4, 6),
        2.0 ** np.arange(0, 4),
    )
    across, down, beside, mux, sense = (
        grid.ravel() for grid in np.meshgrid(*axes, 2.0 ** np.arange(0, 4) * select, indexing="ij")
    )
    row = np.ceil(rows / (down * beside))
    column = np.ceil(columns * beside / across)
    mats_across = np.maximum(across / 2, 1)
    mats_down = np.maximum(down / 2, 1)
    per_mat = across * down / (mats_across * mats_down)
    mat_bit = np.maximum(np.floor(per_mat * column / (mux * sense)), 1.0)
    active = np.ceil(out_bit / mat_bit)
    fits = (
        (row >= min(_LEAST_ROW, rows))
        & (row <= _MOST_ROW)
        & (column >= _LEAST_COLUMN)
        & (column <= _MOST_COLUMN)
    )
    fits &= (active <= mats_across) & (mat_bit <= out_bit) & (mat_bit >= per_mat)
    partitions = ArrayPartition(
        row, column, per_mat, across / mats_across, mats_across, mats_down, active, mux, mat_bit
    )
    return partitions.select(np.flatnonzero(fits))


_ONE_SEARCH_PORT = ArrayPorts(1, 0, 0, 1)
_HALVES = 2  # subarrays of a buffer


@dataclass(frozen=True)
class SearchedBuffer:
    """The shape of a fully associative buffer, whose tags are searched."""

    name: str
    entries: int
    tag_bit: int
    data_bit: int
    ports: ArrayPorts = _ONE_SEARCH_PORT

    def __post_init__(self) -> None:
        counts = {"entries": self.entries, "tag": self.tag_bit, "data": self.data_bit}
        check_at_least_one(self.name, **counts, **{"search ports": self.ports.search})


@cache
def searched_buffer_cost(tech: Technology, cam: SearchedBuffer) -> ArrayCost:
    """Return the energy of a search, a read and a write, leakage and area, after CACTI 6.5's
    associative cache.

    A search drives the search lines of every tag bit and discharges the matchlines of all rows but
    one, then reads the matching entry."""
    rows = max(cam.entries // _HALVES, 1)
    columns = cam.tag_bit + cam.data_bit
    lines = rows + 1
    wide, high = cell_sides_um(tech, cam.ports)
    # a tag cell has a comparator and twice the area of a plain one (CACTI 6.5)
    side_um = tech.feature_um * (2.0 * technology.CELL_AREA_FEATURE2 / 2.92) ** 0.5
    further_um = 2.0 * tech.local.pitch_um * (cam.ports.all - 1 + cam.ports.search - 1)
    tag_wide = side_um + further_um
    high = max(high, side_um * 2.92 + further_um)
    v2 = tech.vdd2
    feature = tech.feature_um
    local_f = tech.local.f_per_um()
    bitline_f = lines * (tech.drain_f(ACCESS * feature) / 2.0 + high * local_f)
    latch_f = tech.gate_f(11.25 * feature) + tech.drain_f(11.25 * feature)
    amplifier_j = (latch_f + tech.drain_f(21.5 * feature)) * v2
    read_column_j = 2.0 * bitline_swing_v(tech) * tech.voltage_v * bitline_f + amplifier_j
    wordline_f = (cam.tag_bit * tag_wide + cam.data_bit * wide) * local_f
    wordline_f += columns * 2.0 * tech.gate_f(ACCESS * feature)
    decode = tech.driver_chain(wordline_f, inputs=2)
    charged_f = tech.gate_f(13.0 * tech.p_to_n * tech.min_width_um)
    precharge = tech.driver_chain(columns * (charged_f + wide * local_f))
    # search lines of every tag bit, and matchlines, in both halves
    line = tech.driver_chain(lines * (tech.gate_f(PULL_DOWN * feature) + high * local_f))
    tags = tech.driver_chain(cam.tag_bit * (charged_f + tag_wide * local_f))
    ready = tech.driver_chain(lines * tech.gate_f(6.0 * tech.p_to_n * tech.min_width_um))
    match_f = cam.tag_bit * (tech.drain_f(PULL_DOWN * feature, stack=2) + tag_wide * local_f)
    gates_f = tech.gate_f(125.0 * feature) + tech.drain_f(62.5 * feature, stack=2) * 3.0
    lines_j = (
        line.energy_j * cam.tag_bit
        + tags.energy_j
        + ready.energy_j
        + lines * (match_f + gates_f) * v2
    )
    width_um = cam.tag_bit * tag_wide + cam.data_bit * wide + 144.0 * tech.local.pitch_um
    # wires in and out of two subarrays, and those of the search
    tracks_um = columns * tech.wide.pitch_um * (cam.ports.all + 0.5 * cam.ports.search)
    height_um = lines * high + 60.0 * feature
    out_j = tech.repeated_wire().cost(height_um, cam.data_bit).energy_j
    entry_j = cam.data_bit * read_column_j + out_j + tech.driver_chain(wordline_f).energy_j
    share = tech.short_circuit * LAYOUT_OVERHEAD
    opened_j = decode.energy_j + precharge.energy_j
    # leakage of cells, comparators of the tags, and the gates behind the matchlines
    cell_um = (PULL_DOWN + PULL_UP + ACCESS * cam.ports.all / 2.0) * feature
    cells = _HALVES * lines
    off_um = cells * (columns * cell_um + cam.tag_bit * 2.0 * PULL_DOWN * feature + 80.0 * feature)
    on_um = cells * (
        columns * (PULL_DOWN + PULL_UP) * feature / 2.0 + cam.tag_bit * PULL_DOWN * feature
    )
    off_w, gate_w = tech.leakage_w(off_um, on_um)
    around = precharge + decode.times(0.0, rows)
    figures = (
        share * (opened_j + columns * read_column_j + out_j),
        share * (opened_j + columns * 2.0 * v2 * bitline_f),
        off_w + _HALVES * around.subthreshold_w,
        gate_w + _HALVES * around.gate_w,
        LAYOUT_OVERHEAD * _HALVES * width_um * (height_um + tracks_um),
        decode.delay_s * 3.0,
        0.0,
        0.0,
        share * (_HALVES * lines_j + entry_j),
    )
    return ArrayCost(*map(to_float, figures))
