"""Find the layout of a memory array (SRAM with banks, ways and tags; searched buffers) and its cost.

All partitions of a bank are evaluated; the best has the least energy times delay among those of at most twice the
smallest area. A layout is chosen once, for one port at 45 nm and nominal voltage, and then scaled or given more
ports: energies rise smoothly with ports, node and voltage, without steps where a new layout would win. (McPAT
searches anew for each, by energy times delay squared.)
"""

from __future__ import annotations

from functools import cache

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.core.records import dataclass
from wattcast.gpuwattch.bottom_up import memory_array, technology
from wattcast.gpuwattch.bottom_up.memory_array import ACCESS, PULL_DOWN, PULL_UP, ArrayPartition, ArrayPorts, BankCost
from wattcast.gpuwattch.bottom_up.technology import Technology, check_at_least_one, to_float

LAYOUT_OVERHEAD = 1.1 * 1.2  # placement in a macro, macros on a chip: area, and wires with it (McPAT 0.8)
_AREA_LIMIT = 2.0  # times the smallest: without it large arrays come out at thrice the area they need
_DRAWN_NM = 45.0
_ONE_PORT = ArrayPorts()
_LEAST_ROW, _MOST_ROW, _LEAST_COLUMN, _MOST_COLUMN = 8, 4096, 2, 4096


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
        shape = {"capacity": self.capacity_byte, "block": self.block_byte, "ways": self.ways, "banks": self.banks}
        ports = {"ports that read": self.ports.reading, "ports that write": self.ports.writing}
        check_at_least_one(self.name, **shape, **ports)
        if self.output_bit is not None and self.output_bit < 1:
            raise bad_value(f"{self.name}: output", "at least one bit", self.output_bit)
        if self.capacity_byte % (self.banks * self.block_byte * self.ways):
            wanted = f"{self.banks} banks of whole sets of {self.ways} blocks of {self.block_byte} bytes"
            do = "Change capacity, banks, ways or block so that they divide."
            raise bad_value(f"{self.name}: geometry", wanted, f"{self.capacity_byte} bytes", do)

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
    """Return the cost of data and tag arrays in their best layouts, with short-circuit and layout overheads."""
    ways = 1 if sram.sequential else sram.ways
    tag, before_s = None, 0.0
    if sram.tag_bit:
        width = sram.tag_bit * sram.ways
        cells = _BankCells(sram.blocks // sram.ways, width, 1, sram.tag_bit, width, sram.banks, sram.ways)
        tag, chosen_s = _build_array(tech, sram, cells)
        before_s = chosen_s if sram.sequential else 0.0  # data are read after the tags, which counts in their delay
    cells = _BankCells(sram.blocks // ways, 8 * sram.block_byte * ways, ways, sram.bits, sram.bits, sram.banks)
    data, _ = _build_array(tech, sram, cells, before_s)
    share = tech.short_circuit * LAYOUT_OVERHEAD
    tag_read, tag_write = (share * tag.read_j, share * tag.write_j) if tag else (0.0, 0.0)
    both = (data,) if tag is None else (data, tag)
    return ArrayCost(
        share * data.read_j + tag_read,
        share * data.write_j + tag_write,
        sum(part.subthreshold_w for part in both),
        sum(part.gate_w for part in both),
        LAYOUT_OVERHEAD * sum(part.area_um2 for part in both),
        data.delay_s + (tag.delay_s if tag and sram.sequential else 0.0),
        tag_read,
        tag_write,
    )


@cache
def _choose_layout(cells: _BankCells, name: str, before_s: float) -> tuple[ArrayPartition, Array, float]:
    """Return the best partition of a bank, its address bits, and its delay at the node of the choice.

    ``before_s`` passes before the access begins.
    """
    part = list_partitions(cells.rows, cells.columns, cells.select, cells.out_bit)
    if part.row.size == 0:
        wanted, found = f"subarrays of {_LEAST_ROW} to {_MOST_ROW} rows", f"{cells.rows} rows of {cells.columns} bits"
        do = "The structure is too small or too oddly shaped for a memory array."
        raise bad_value(f"{name}: geometry", wanted, found, do)
    address = np.log2(part.row) + np.log2(part.column_mux) + np.log2(part.mats_across * part.mats_down)
    bits = np.maximum(address, 1.0)
    drawn = technology.find_technology(_DRAWN_NM)
    one = memory_array.bank_cost(drawn, _ONE_PORT, part, bits, cells.in_bit, cells.leaving, cells.tag_ways)
    one = _join_banks(drawn, _ONE_PORT, one, bits, cells, 1.0)
    area = one.width_um * one.height_um
    measure = one.read_j * (one.delay_s + before_s)
    best = int(np.argmin(np.where(area <= _AREA_LIMIT * area.min(), measure, np.inf)))
    return part.select(np.array([best])), bits[[best]], float(one.delay_s[best])


def _build_array(
    tech: Technology, sram: SramArray, cells: _BankCells, before_s: float = 0.0
) -> tuple[ArrayCost, float]:
    """Return the cost of the best layout at a node and a voltage, with all its ports; and its delay when chosen."""
    part, bits, chosen_s = _choose_layout(cells, sram.name, before_s)
    moved = cells.in_bit, cells.leaving, cells.tag_ways, sram.toggle
    found = memory_array.bank_cost(tech, sram.ports, part, bits, *moved)
    found = _join_banks(tech, sram.ports, found, bits, cells, sram.toggle)
    read_j, write_j, delay_s, off_w, gate_w, width_um, height_um = map(to_float, vars(found).values())
    return ArrayCost(read_j, write_j, off_w, gate_w, width_um * height_um, delay_s), chosen_s


def _join_banks(
    tech: Technology, ports: ArrayPorts, bank: BankCost, address: Array, cells: _BankCells, toggle: float
) -> BankCost:
    """Return the cost of all banks and the tree between them, in the arrangement that reads with less energy."""
    if cells.banks == 1:
        return bank
    one, less = np.ones_like(bank.read_j), 2.0 ** int(np.log2(cells.banks) / 2)
    bits = (address * ports.all, cells.leaving * ports.reading * one, cells.in_bit * ports.writing * one)
    wires_um = sum(bits) * tech.wide.pitch_um
    ways = []
    for down in (less, cells.banks / less):  # banks in columns of so many, side by side
        across = cells.banks / down
        banks = ArrayPartition(one, one, one, one, across * one, down * one, one, one, one)
        sides = bank.width_um, bank.height_um
        to, back, into = (memory_array.wire_tree_cost(tech, banks, *sides, count) for count in bits)
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
    return BankCost(*(np.where(first, a, b) for a, b in zip(*(vars(way).values() for way in ways), strict=True)))


def list_partitions(rows: int, columns: int, select: int, out_bit: int) -> ArrayPartition:
    """List every way to cut a bank: across, down, sets per row, and columns per sense amplifier."""
    axes = (2.0 ** np.arange(0, 7), 2.0 ** np.arange(0, 8), 2.0 ** np.arange(-4, 6), 2.0 ** np.arange(0, 4))
    across, down, beside, mux, sense = (
        grid.ravel() for grid in np.meshgrid(*axes, 2.0 ** np.arange(0, 4) * select, indexing="ij")
    )
    row, column = np.ceil(rows / (down * beside)), np.ceil(columns * beside / across)
    mats_across, mats_down = np.maximum(across / 2, 1), np.maximum(down / 2, 1)
    per_mat = across * down / (mats_across * mats_down)
    mat_bit = np.maximum(np.floor(per_mat * column / (mux * sense)), 1.0)
    active = np.ceil(out_bit / mat_bit)
    fits = (row >= min(_LEAST_ROW, rows)) & (row <= _MOST_ROW) & (column >= _LEAST_COLUMN) & (column <= _MOST_COLUMN)
    fits &= (active <= mats_across) & (mat_bit <= out_bit) & (mat_bit >= per_mat)
    found = ArrayPartition(row, column, per_mat, across / mats_across, mats_across, mats_down, active, mux, mat_bit)
    return found.select(np.flatnonzero(fits))


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
    """Return the energy of a search, a read and a write, leakage and area, after CACTI 6.5's associative cache.

    A search drives the search lines of every tag bit and discharges the matchlines of all rows but one, then reads
    the matching entry.
    """
    rows, columns = max(cam.entries // _HALVES, 1), cam.tag_bit + cam.data_bit
    lines = rows + 1
    wide, high = memory_array.cell_sides_um(tech, cam.ports)
    # a tag cell has a comparator and twice the area of a plain one (CACTI 6.5)
    side_um = tech.feature_um * (2.0 * technology.CELL_AREA_FEATURE2 / 2.92) ** 0.5
    further_um = 2.0 * tech.local.pitch_um * (cam.ports.all - 1 + cam.ports.search - 1)
    tag_wide, high = side_um + further_um, max(high, side_um * 2.92 + further_um)
    v2, feature, local_f = tech.vdd2, tech.feature_um, tech.local.f_per_um()
    bitline_f = lines * (tech.drain_f(ACCESS * feature) / 2.0 + high * local_f)
    latch_f = tech.gate_f(11.25 * feature) + tech.drain_f(11.25 * feature)
    amplifier_j = (latch_f + tech.drain_f(21.5 * feature)) * v2
    read_column_j = 2.0 * memory_array.bitline_swing_v(tech) * tech.voltage_v * bitline_f + amplifier_j
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
    lines_j = line.energy_j * cam.tag_bit + tags.energy_j + ready.energy_j + lines * (match_f + gates_f) * v2
    width_um = cam.tag_bit * tag_wide + cam.data_bit * wide + 144.0 * tech.local.pitch_um
    # wires in and out of two subarrays, and those of the search
    tracks_um = columns * tech.wide.pitch_um * (cam.ports.all + 0.5 * cam.ports.search)
    height_um = lines * high + 60.0 * feature
    out_j = tech.repeated_wire().cost(height_um, cam.data_bit).energy_j
    entry_j = cam.data_bit * read_column_j + out_j + tech.driver_chain(wordline_f).energy_j
    share = tech.short_circuit * LAYOUT_OVERHEAD
    opened_j = decode.energy_j + precharge.energy_j
    # leakage of cells, comparators of the tags, and the gates behind the matchlines
    cell_um, cells = (PULL_DOWN + PULL_UP + ACCESS * cam.ports.all / 2.0) * feature, _HALVES * lines
    off_um = cells * (columns * cell_um + cam.tag_bit * 2.0 * PULL_DOWN * feature + 80.0 * feature)
    on_um = cells * (columns * (PULL_DOWN + PULL_UP) * feature / 2.0 + cam.tag_bit * PULL_DOWN * feature)
    off_w, gate_w = tech.leakage_w(off_um, on_um)
    around = precharge + decode.times(0.0, rows)
    found = (
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
    return ArrayCost(*map(to_float, found))
