"""Compute the cost of memory arrays (SRAM with banks, ways and tags) in their best layouts.

All partitions of a bank are evaluated; the best has the least energy times delay among those of at
most twice the smallest area. A layout is chosen once, for one port at 45 nm and nominal voltage,
and then scaled or given more ports: energies rise smoothly with ports, node and voltage, without
steps where a new layout would win. (McPAT searches anew for each, by energy times delay squared.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.lab.gpuwattch.bottom_up import technology
from wattcast.lab.gpuwattch.bottom_up.bank_costs import (
    ArrayPartition,
    ArrayPorts,
    BankCost,
    bank_cost,
    wire_tree_cost,
)
from wattcast.lab.gpuwattch.bottom_up.technology import (
    Technology,
    check_at_least_one,
    to_float,
)

# placement in a macro, macros on a chip: area, and wires with it (McPAT 0.8)
LAYOUT_OVERHEAD = 1.1 * 1.2
# times the smallest: without it large arrays come out at thrice the area they need
_AREA_LIMIT = 2.0
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
            sram.blocks // sram.ways,
            width,
            1,
            sram.tag_bit,
            width,
            sram.banks,
            sram.ways,
        )
        tag, chosen_s = _build_array(tech, sram, cells)
        # data are read after the tags, which counts in their delay
        before_s = chosen_s if sram.sequential else 0.0
    cells = _BankCells(
        sram.blocks // ways,
        8 * sram.block_byte * ways,
        ways,
        sram.bits,
        sram.bits,
        sram.banks,
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
    cells: _BankCells,
    name: str,
    before_s: float,
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
    one = _all_banks_cost(
        drawn,
        _ONE_PORT,
        part,
        bits,
        cells,
    )
    area = one.width_um * one.height_um
    measure = one.read_j * (one.delay_s + before_s)
    best = int(np.argmin(np.where(area <= _AREA_LIMIT * area.min(), measure, np.inf)))
    return part.select(np.array([best])), bits[[best]], float(one.delay_s[best])


def _build_array(
    tech: Technology,
    sram: SramArray,
    cells: _BankCells,
    before_s: float = 0.0,
) -> tuple[ArrayCost, float]:
    """Return the cost of the best layout at a node and a voltage, with all its ports; and its delay
    when chosen.
    """
    part, bits, chosen_s = _choose_layout(cells, sram.name, before_s)
    bank = _all_banks_cost(
        tech,
        sram.ports,
        part,
        bits,
        cells,
        sram.toggle,
    )
    cost = ArrayCost(
        read_j=to_float(bank.read_j),
        write_j=to_float(bank.write_j),
        subthreshold_w=to_float(bank.subthreshold_w),
        gate_w=to_float(bank.gate_w),
        area_um2=to_float(bank.width_um) * to_float(bank.height_um),
        delay_s=to_float(bank.delay_s),
    )
    return cost, chosen_s


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
        tech,
        ports,
        part,
        address,
        cells.in_bit,
        cells.leaving,
        cells.tag_ways,
        toggle,
    )
    if cells.banks == 1:
        return bank
    address_bit = address * ports.all
    out_bit = cells.leaving * ports.reading
    in_bit = cells.in_bit * ports.writing
    tree_um = (address_bit + out_bit + in_bit) * tech.wide.pitch_um

    def arrange(down: float) -> BankCost:
        """Return the cost of banks in columns of ``down``, side by side."""
        across = cells.banks / down
        route = partial(
            wire_tree_cost,
            tech,
            across,
            down,
            bank.width_um,
            bank.height_um,
        )
        to_bank = route(address_bit)
        data_out = route(out_bit)
        data_in = route(in_bit)
        trees = to_bank + data_out + data_in
        return BankCost(
            bank.read_j + to_bank.energy_j + toggle * data_out.energy_j,
            bank.write_j + to_bank.energy_j + toggle * data_in.energy_j,
            np.asarray(bank.delay_s + (to_bank + data_out).delay_s),
            np.asarray(cells.banks * bank.subthreshold_w + trees.subthreshold_w),
            np.asarray(cells.banks * bank.gate_w + trees.gate_w),
            across * bank.width_um + tree_um,
            down * bank.height_um + tree_um,
        )

    fewer = 2.0 ** int(np.log2(cells.banks) / 2)
    flat = arrange(fewer)
    tall = arrange(cells.banks / fewer)
    is_flat = flat.read_j <= tall.read_j
    pairs = zip(vars(flat).values(), vars(tall).values(), strict=True)
    return BankCost(*(np.where(is_flat, *pair) for pair in pairs))


def list_partitions(
    rows: int,
    columns: int,
    select: int,
    out_bit: int,
) -> ArrayPartition:
    """List every way to cut a bank: across, down, sets per row, and columns per sense amplifier."""
    axes = (
        2.0 ** np.arange(0, 7),
        2.0 ** np.arange(0, 8),
        2.0 ** np.arange(-4, 6),
        2.0 ** np.arange(0, 4),
        2.0 ** np.arange(0, 4) * select,
    )
    across, down, beside, mux, sense = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(5, -1)
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
        row,
        column,
        per_mat,
        across / mats_across,
        mats_across,
        mats_down,
        active,
        mux,
        mat_bit,
    )
    return partitions.select(np.flatnonzero(fits))
