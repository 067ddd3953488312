"""Compute the cost of fully associative buffers, whose tags are searched (CACTI 6.5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from wattcast.core.arrays import Sweepable
from wattcast.lab.gpuwattch.bottom_up import technology
from wattcast.lab.gpuwattch.bottom_up.bank_costs import (
    ACCESS,
    PULL_DOWN,
    PULL_UP,
    ArrayPorts,
    bitline_swing_v,
    cell_sides_um,
)
from wattcast.lab.gpuwattch.bottom_up.memory_array import LAYOUT_OVERHEAD, ArrayCost
from wattcast.lab.gpuwattch.bottom_up.technology import (
    Technology,
    check_at_least_one,
    to_float,
)

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
        counts = {
            "entries": self.entries,
            "tag": self.tag_bit,
            "data": self.data_bit,
        }
        check_at_least_one(self.name, **counts, **{"search ports": self.ports.search})


@dataclass(frozen=True)
class _BufferHalf:
    """Rows, columns and sides of the cells of one half of a searched buffer."""

    rows: int
    columns: int
    data_wide_um: float
    tag_wide_um: float
    high_um: float

    @property
    def lines(self) -> int:
        """Rows, and one that times the others."""
        return self.rows + 1


def _cut_in_halves(tech: Technology, cam: SearchedBuffer) -> _BufferHalf:
    data_wide_um, high_um = cell_sides_um(tech, cam.ports)
    # a tag cell has a comparator and twice the area of a plain one (CACTI 6.5)
    side_um = tech.feature_um * (2.0 * technology.CELL_AREA_FEATURE2 / 2.92) ** 0.5
    further_um = 2.0 * tech.local.pitch_um * (cam.ports.all - 1 + cam.ports.search - 1)
    return _BufferHalf(
        rows=max(cam.entries // _HALVES, 1),
        columns=cam.tag_bit + cam.data_bit,
        data_wide_um=data_wide_um,
        tag_wide_um=side_um + further_um,
        high_um=max(high_um, side_um * 2.92 + further_um),
    )


@cache
def searched_buffer_cost(tech: Technology, cam: SearchedBuffer) -> ArrayCost:
    """Return the energy of a search, a read and a write, leakage and area, after CACTI 6.5's
    associative cache.

    A search drives the search lines of every tag bit and discharges the matchlines of all rows but
    one, then reads the matching entry."""
    half = _cut_in_halves(tech, cam)
    feature = tech.feature_um
    local_f = tech.local.f_per_um()

    # bitlines and their sense amplifiers
    bitline_f = half.lines * (tech.drain_f(ACCESS * feature) / 2.0 + half.high_um * local_f)
    latch_f = tech.gate_f(11.25 * feature) + tech.drain_f(11.25 * feature)
    amplifier_j = (latch_f + tech.drain_f(21.5 * feature)) * tech.vdd2
    read_column_j = 2.0 * bitline_swing_v(tech) * tech.voltage_v * bitline_f + amplifier_j

    # the wordline, and what precharges the columns
    wordline_f = (cam.tag_bit * half.tag_wide_um + cam.data_bit * half.data_wide_um) * local_f
    wordline_f += half.columns * 2.0 * tech.gate_f(ACCESS * feature)
    decode = tech.driver_chain(wordline_f, inputs=2)
    precharge = tech.driver_chain(half.columns * (_precharge_f(tech) + half.data_wide_um * local_f))
    opened_j = decode.energy_j + precharge.energy_j

    height_um = half.lines * half.high_um + 60.0 * feature
    out_j = tech.repeated_wire().cost(height_um, cam.data_bit).energy_j
    entry_j = cam.data_bit * read_column_j + out_j + tech.driver_chain(wordline_f).energy_j
    share = tech.short_circuit * LAYOUT_OVERHEAD
    off_w, gate_w = _buffer_leakage_w(tech, cam, half)
    around = precharge + decode.times(0.0, half.rows)
    return ArrayCost(
        read_j=to_float(share * (opened_j + half.columns * read_column_j + out_j)),
        write_j=to_float(share * (opened_j + half.columns * 2.0 * tech.vdd2 * bitline_f)),
        subthreshold_w=to_float(off_w + _HALVES * around.subthreshold_w),
        gate_w=to_float(gate_w + _HALVES * around.gate_w),
        area_um2=to_float(_buffer_area_um2(tech, cam, half, height_um)),
        delay_s=to_float(decode.delay_s * 3.0),
        search_j=to_float(share * (_HALVES * _search_lines_j(tech, cam, half) + entry_j)),
    )


def _precharge_f(tech: Technology) -> float:
    """Return the gates of the transistors that precharge and equalise one column."""
    return tech.gate_f(13.0 * tech.p_to_n * tech.min_width_um)


def _search_lines_j(
    tech: Technology,
    cam: SearchedBuffer,
    half: _BufferHalf,
) -> Sweepable:
    """Return the energy of the search lines of every tag bit, and of the matchlines of a half."""
    feature = tech.feature_um
    local_f = tech.local.f_per_um()
    ready_f = tech.gate_f(6.0 * tech.p_to_n * tech.min_width_um)
    line = tech.driver_chain(
        half.lines * (tech.gate_f(PULL_DOWN * feature) + half.high_um * local_f)
    )
    tags = tech.driver_chain(cam.tag_bit * (_precharge_f(tech) + half.tag_wide_um * local_f))
    ready = tech.driver_chain(half.lines * ready_f)
    tag_f = tech.drain_f(PULL_DOWN * feature, stack=2) + half.tag_wide_um * local_f
    match_f = cam.tag_bit * tag_f
    gates_f = tech.gate_f(125.0 * feature) + tech.drain_f(62.5 * feature, stack=2) * 3.0
    driven_j = line.energy_j * cam.tag_bit + tags.energy_j + ready.energy_j
    return driven_j + half.lines * (match_f + gates_f) * tech.vdd2


def _buffer_area_um2(
    tech: Technology,
    cam: SearchedBuffer,
    half: _BufferHalf,
    height_um: float,
) -> float:
    """Return the area of both halves with the wires in and out of them, and those of the search."""
    cells_um = cam.tag_bit * half.tag_wide_um + cam.data_bit * half.data_wide_um
    width_um = cells_um + 144.0 * tech.local.pitch_um
    tracks_um = half.columns * tech.wide.pitch_um * (cam.ports.all + 0.5 * cam.ports.search)
    return LAYOUT_OVERHEAD * _HALVES * width_um * (height_um + tracks_um)


def _buffer_leakage_w(
    tech: Technology,
    cam: SearchedBuffer,
    half: _BufferHalf,
) -> tuple[Sweepable, Sweepable]:
    """Return the leakage of cells, comparators of the tags, and the gates behind the matchlines."""
    feature = tech.feature_um
    cells = _HALVES * half.lines
    cell_um = (PULL_DOWN + PULL_UP + ACCESS * cam.ports.all / 2.0) * feature
    tags_um = cam.tag_bit * PULL_DOWN * feature
    off_um = cells * (half.columns * cell_um + 2.0 * tags_um + 80.0 * feature)
    on_um = cells * (half.columns * (PULL_DOWN + PULL_UP) * feature / 2.0 + tags_um)
    return tech.leakage_w(off_um, on_um)
