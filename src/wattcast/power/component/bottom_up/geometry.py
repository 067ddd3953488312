"""Cells, subarrays, mats and banks of a memory array: their shapes, and what of them works in an access.

After CACTI (HPL-2008-20, sections 4 to 6): an array is cut into subarrays; up to four of them share their decoding in
a mat; mats hang on an H-tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.errors import bad_value
from wattcast.power.component.bottom_up.technology import CELL_AREA_FEATURE2, Technology

_SENSE_SHARE, _SENSE_LEAST_V = 0.05, 0.08  # bitline swing a sense amplifier needs (CACTI 6.5)
_CELL_ASPECT = 1.46  # height over width of a cell (CACTI 6.5)
ACCESS, PULL_DOWN, PULL_UP = 1.31, 2.08, 1.23  # transistor widths of a cell in features
SENSE_N, SENSE_P, SENSE_ISO, SENSE_ENABLE = 3.75, 7.5, 12.5, 5.0  # its transistors in features
MUX = 9.0  # column and sense multiplexers in features: six minimum widths


@dataclass(frozen=True)
class Ports:
    """Ways into a cell."""

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
        """Those that need a wordline."""
        return self.read_write + self.read + self.write

    @property
    def reading(self) -> int:
        """Those with sense amplifiers."""
        return self.read_write + self.read

    @property
    def writing(self) -> int:
        """Those that data goes in by."""
        return self.read_write + self.write


@dataclass(frozen=True)
class Partition:
    """Subarrays of ``row`` by ``column`` cells, and how many there are and work at once."""

    row: Array
    column: Array
    per_mat: Array  # subarrays of a mat
    per_mat_row: Array  # of them side by side
    mats_across: Array
    mats_down: Array
    active_mats: Array
    column_mux: Array  # bitline pairs to a sense amplifier
    mat_bit: Array  # bits a mat gives out

    def at(self, index: int) -> Partition:
        """One of the partitions, still as arrays."""
        return Partition(*(values[[index]] for values in vars(self).values()))


def sensed_v(tech: Technology) -> float:
    """Swing of a bitline in a read."""
    return max(_SENSE_SHARE * tech.voltage_v, _SENSE_LEAST_V)


def cell_um(tech: Technology, ports: Ports) -> tuple[float, float]:
    """Width and height of a cell: a six-transistor cell, two wires wider and higher for each further port."""
    side_um = tech.feature_um * (CELL_AREA_FEATURE2 / _CELL_ASPECT) ** 0.5
    further = 2.0 * tech.local.pitch_um * (ports.all - 1 + max(ports.search - 1, 0))
    return side_um + further, side_um * _CELL_ASPECT + further


def _folded_um(tech: Technology, width_um: float, pitch_um: Array) -> Array:
    """Height of a transistor folded to fit a pitch."""
    fingers = np.ceil(width_um / pitch_um)
    return np.asarray((fingers + (fingers + 1.0) * 3.0) * tech.feature_um)


def mat_um(
    tech: Technology, ports: Ports, part: Partition, rows_um2: Scalar, wide_um: float, high_um: float
) -> tuple[Array, Array]:
    """Width and height of a mat: cells, column circuits below them, decoders and the wires of a mat beside them."""
    feature, pitch = tech.feature_um, tech.wide.pitch_um
    column_um = np.asarray(wide_um * part.column_mux / ports.reading)
    half_um = np.full_like(column_um, wide_um / (2.0 * ports.reading))
    precharge = 6.0 * tech.p_to_n * tech.min_width_um
    circuits_um = _folded_um(tech, precharge, half_um) + _folded_um(tech, precharge / 6.0, 2.0 * half_um)
    circuits_um = circuits_um + np.where(part.column_mux > 1, _folded_um(tech, MUX * feature, half_um), 0.0)
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


def bank_um(tech: Technology, part: Partition, width_um: Array, height_um: Array, bits: Array) -> tuple[Array, Array]:
    """A bank: its mats, and the wires of the tree between them."""
    pitch = tech.wide.pitch_um
    across = part.mats_across * width_um + bits * pitch * np.log2(part.mats_down)
    down = part.mats_down * height_um + bits * pitch * np.log2(part.mats_across)
    return np.asarray(across), np.asarray(down)
