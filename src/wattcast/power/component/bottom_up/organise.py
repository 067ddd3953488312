"""The layout of a memory array: banks, ports, ways, tag and data, found by looking at all partitions.

The measure is energy times delay among partitions of reasonable area. A layout is drawn once, for one port at 45 nm
and nominal voltage, and shrunk or given more ports after that: so energies rise with ports, node and voltage without
steps that a new layout would bring. (McPAT searches anew for each, by energy times delay squared.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.power.component.bottom_up.array import Access, evaluate, tree
from wattcast.power.component.bottom_up.circuits import as_float
from wattcast.power.component.bottom_up.geometry import Partition, Ports
from wattcast.power.component.bottom_up.technology import Technology, technology

LAYOUT_OVERHEAD = 1.1 * 1.2  # placement in a macro, macros on a chip: area, and wires with it (McPAT 0.8)
_AREA_LIMIT = 2.0  # times the smallest: without it large arrays come out at thrice the area they need
_DRAWN_NM = 45.0
_ONE_PORT = Ports()
_LEAST_ROW, _MOST_ROW, _LEAST_COLUMN, _MOST_COLUMN = 8, 4096, 2, 4096


@dataclass(frozen=True)
class Sram:
    """A memory array as an architect sees it."""

    name: str
    capacity_byte: int
    block_byte: int
    ways: int = 1
    banks: int = 1
    ports: Ports = _ONE_PORT
    output_bit: int | None = None  # bits of an access; default: a block
    tag_bit: int = 0  # of a way; 0: no tags
    sequential: bool = False  # the tag first, then one way of data
    toggle: float = 1.0  # share of data wires that charge in an access

    def __post_init__(self) -> None:
        where = f"{self.name}: "
        for what, value in (
            ("capacity", self.capacity_byte),
            ("block", self.block_byte),
            ("ways", self.ways),
            ("banks", self.banks),
            ("ports that read", self.ports.reading),
            ("ports that write", self.ports.writing),
        ):
            if value < 1:
                raise bad_value(where + what, "at least one", value)
        if self.output_bit is not None and self.output_bit < 1:
            raise bad_value(where + "output", "at least one bit", self.output_bit)
        if self.capacity_byte % (self.banks * self.block_byte * self.ways):
            raise bad_value(
                where + "geometry",
                f"{self.banks} banks of whole sets of {self.ways} blocks of {self.block_byte} bytes",
                f"{self.capacity_byte} bytes",
                "Change capacity, banks, ways or block so that they divide.",
            )

    @property
    def bits(self) -> int:
        """Bits of an access."""
        return self.output_bit or 8 * self.block_byte

    @property
    def blocks(self) -> int:
        """Blocks of a bank."""
        return self.capacity_byte // (self.banks * self.block_byte)


@dataclass(frozen=True)
class ArrayCost:
    """Energy of an access, leakage and area of a whole structure."""

    read_j: float
    write_j: float
    subthreshold_w: float
    gate_w: float
    area_um2: float
    delay_s: float
    tag_read_j: float = 0.0
    tag_write_j: float = 0.0
    search_j: float = 0.0
    rows: int = 0
    columns: int = 0
    mats: int = 0


@dataclass(frozen=True)
class _Cells:
    """Rows and columns of a bank, and the bits that go in and out of it."""

    rows: int
    columns: int
    select: int  # ways that leave all at once and of which one is taken
    in_bit: int
    out_bit: int
    banks: int
    tag_ways: int = 0  # above zero: tags, of which only hits leave

    @property
    def leaving(self) -> int:
        return self.tag_ways or self.out_bit


@dataclass(frozen=True)
class _Layout:
    """The partition chosen, its address bits, and its delay as drawn."""

    part: Partition
    address_bit: Array
    delay_s: float


@cache
def array_cost(tech: Technology, sram: Sram) -> ArrayCost:
    """The best organisation of data and, where there are tags, of them; short-circuit and layout shares included."""
    ways = 1 if sram.sequential else sram.ways
    tags, tag = None, None
    if sram.tag_bit:
        width = sram.tag_bit * sram.ways
        cells = _Cells(sram.blocks // sram.ways, width, 1, sram.tag_bit, width, sram.banks, sram.ways)
        tags = _layout(cells, sram.name)
        tag = _built(tech, sram, cells, tags)
    first = tags if sram.sequential else None  # the data's layout knows that it comes second
    cells = _Cells(sram.blocks // ways, 8 * sram.block_byte * ways, ways, sram.bits, sram.bits, sram.banks)
    data = _built(tech, sram, cells, _layout(cells, sram.name, first.delay_s if first else 0.0))
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
        0.0,
        data.rows,
        data.columns,
        data.mats,
    )


@cache
def _layout(cells: _Cells, name: str, before_s: float = 0.0) -> _Layout:
    """The best of all partitions; ``before_s`` passes before the access begins."""
    part = _partitions(cells.rows, cells.columns, cells.select, cells.out_bit)
    if part.row.size == 0:
        raise bad_value(
            f"{name}: geometry",
            f"subarrays of {_LEAST_ROW} to {_MOST_ROW} rows",
            f"{cells.rows} rows of {cells.columns} bits",
            "The structure is too small or too oddly shaped for a memory array.",
        )
    address = np.log2(part.row) + np.log2(part.column_mux) + np.log2(part.mats_across * part.mats_down)
    bits = np.maximum(address, 1.0)
    drawn = technology(_DRAWN_NM)
    one = evaluate(drawn, _ONE_PORT, part, bits, cells.in_bit, cells.leaving, cells.tag_ways)
    one = _banked(drawn, _ONE_PORT, one, bits, cells, 1.0)
    area = one.width_um * one.height_um
    measure = one.read_j * (one.delay_s + before_s)
    best = int(np.argmin(np.where(area <= _AREA_LIMIT * area.min(), measure, np.inf)))
    return _Layout(part.at(best), bits[[best]], float(one.delay_s[best]))


def _built(tech: Technology, sram: Sram, cells: _Cells, layout: _Layout) -> ArrayCost:
    """A layout at a node and a voltage, with all its ports."""
    part, bits = layout.part, layout.address_bit
    found = evaluate(tech, sram.ports, part, bits, cells.in_bit, cells.leaving, cells.tag_ways, sram.toggle)
    found = _banked(tech, sram.ports, found, bits, cells, sram.toggle)
    return ArrayCost(
        as_float(found.read_j),
        as_float(found.write_j),
        as_float(found.subthreshold_w),
        as_float(found.gate_w),
        as_float(found.width_um * found.height_um),
        as_float(found.delay_s),
        rows=int(part.row[0]),
        columns=int(part.column[0]),
        mats=int(part.mats_across[0] * part.mats_down[0]),
    )


def _banked(tech: Technology, ports: Ports, bank: Access, address: Array, cells: _Cells, toggle: float) -> Access:
    """All banks and the tree between them, which lies along or across, whichever takes less."""
    if cells.banks == 1:
        return bank
    less = 2.0 ** int(np.log2(cells.banks) / 2)
    ways = [_laid(tech, ports, bank, address, cells, toggle, down) for down in (less, cells.banks / less)]
    first = ways[0].read_j <= ways[1].read_j
    return Access(*(np.where(first, a, b) for a, b in zip(*(vars(way).values() for way in ways), strict=True)))


def _laid(
    tech: Technology, ports: Ports, bank: Access, address: Array, cells: _Cells, toggle: float, down: float
) -> Access:
    """Banks ``down`` one above the other and the rest beside them."""
    across, one = cells.banks / down, np.ones_like(bank.read_j)
    banks = Partition(one, one, one, one, across * one, down * one, one, one, one)
    bits = (address * ports.all, cells.leaving * ports.reading * one, cells.in_bit * ports.writing * one)
    to, back, into = (tree(tech, banks, bank.width_um, bank.height_um, count) for count in bits)
    routed = to + back + into
    wires_um = sum(bits) * tech.wide.pitch_um
    return Access(
        bank.read_j + to.energy_j + toggle * back.energy_j,
        bank.write_j + to.energy_j + toggle * into.energy_j,
        np.asarray(bank.delay_s + (to + back).delay_s),
        np.asarray(cells.banks * bank.subthreshold_w + routed.subthreshold_w),
        np.asarray(cells.banks * bank.gate_w + routed.gate_w),
        across * bank.width_um + wires_um,
        down * bank.height_um + wires_um,
    )


def _partitions(rows: int, columns: int, select: int, out_bit: int) -> Partition:
    """Every way to cut a bank: across, down, sets beside one another, and columns to a sense amplifier."""
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
    at = np.flatnonzero(fits)
    one: tuple[Array, ...] = (
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
    return Partition(*(values[at] for values in one))
