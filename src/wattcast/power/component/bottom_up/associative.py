"""Small fully associative buffers: miss, fill and write-back buffers, the instruction window.

After the content-addressable array of CACTI 6.5: search lines drive every tag, matchlines that do not match
discharge, and the one that does opens the wordline of the data beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from wattcast.errors import bad_value
from wattcast.power.component.bottom_up.circuits import (
    as_float,
    chain,
    drain_f,
    gate_f,
    repeated_wire,
    wire_f_per_um,
)
from wattcast.power.component.bottom_up.geometry import ACCESS, PULL_DOWN, PULL_UP, Ports, cell_um, sensed_v
from wattcast.power.component.bottom_up.organise import LAYOUT_OVERHEAD, ArrayCost
from wattcast.power.component.bottom_up.technology import CELL_AREA_FEATURE2, Technology

_ONE_PORT = Ports(1, 0, 0, 1)
_HALVES = 2  # subarrays of a buffer


@dataclass(frozen=True)
class Cam:
    """A fully associative buffer."""

    name: str
    entries: int
    tag_bit: int
    data_bit: int
    ports: Ports = _ONE_PORT

    def __post_init__(self) -> None:
        for what, value in (("entries", self.entries), ("tag", self.tag_bit), ("data", self.data_bit)):
            if value < 1:
                raise bad_value(f"{self.name}: {what}", "at least one", value)
        if self.ports.search < 1:
            raise bad_value(f"{self.name}: search ports", "at least one", self.ports.search)


@cache
def cam_cost(tech: Technology, cam: Cam) -> ArrayCost:
    """Energy of a search, a read and a write; leakage and area."""
    rows = max(cam.entries // _HALVES, 1)
    wide, high = cell_um(tech, cam.ports)
    tag_wide, tag_high = _tag_cell_um(tech, cam.ports)
    high = max(high, tag_high)
    v2, feature = tech.vdd2, tech.feature_um
    local_f = wire_f_per_um(tech, tech.local)
    bitline_f = (rows + 1) * (as_float(drain_f(tech, ACCESS * feature)) / 2.0 + high * local_f)
    swing_v = sensed_v(tech)
    read_column_j = 2.0 * swing_v * tech.voltage_v * bitline_f + _amplifier_j(tech)
    write_column_j = 2.0 * v2 * bitline_f
    wordline_f = (cam.tag_bit * tag_wide + cam.data_bit * wide) * local_f
    wordline_f += (cam.tag_bit + cam.data_bit) * 2.0 * as_float(gate_f(tech, ACCESS * feature))
    decode = chain(tech, wordline_f, inputs=2)
    precharge_f = as_float(gate_f(tech, 13.0 * tech.p_to_n * tech.min_width_um)) + wide * local_f
    precharge = chain(tech, (cam.tag_bit + cam.data_bit) * precharge_f)
    search_j = _search_j(tech, cam, rows, tag_wide, high)
    width_um = cam.tag_bit * tag_wide + cam.data_bit * wide + 144.0 * tech.local.pitch_um
    # wires in and out of two subarrays, and those of the search
    tracks_um = (cam.tag_bit + cam.data_bit) * tech.wide.pitch_um * (cam.ports.all + 0.5 * cam.ports.search)
    height_um = (rows + 1) * high + 60.0 * feature
    out_j = repeated_wire(tech).cost(height_um, cam.data_bit).energy_j
    match_j = cam.data_bit * read_column_j + as_float(out_j) + as_float(chain(tech, wordline_f).energy_j)
    share = tech.short_circuit * LAYOUT_OVERHEAD
    columns = cam.tag_bit + cam.data_bit
    read_j = as_float(decode.energy_j + precharge.energy_j) + columns * read_column_j + as_float(out_j)
    write_j = as_float(decode.energy_j + precharge.energy_j) + columns * write_column_j
    sub_w, gate_w = _leakage_w(tech, cam, rows)
    return ArrayCost(
        share * read_j,
        share * write_j,
        sub_w + _HALVES * as_float(precharge.subthreshold_w + rows * decode.subthreshold_w),
        gate_w + _HALVES * as_float(precharge.gate_w + rows * decode.gate_w),
        LAYOUT_OVERHEAD * _HALVES * width_um * (height_um + tracks_um),
        as_float(decode.delay_s) * 3.0,
        search_j=share * (search_j + match_j),
        rows=rows,
        columns=columns,
        mats=1,
    )


def _tag_cell_um(tech: Technology, ports: Ports) -> tuple[float, float]:
    """A cell with its comparator: twice the area of a plain one, and twice as high for its width (CACTI 6.5)."""
    side_um = tech.feature_um * (2.0 * CELL_AREA_FEATURE2 / 2.92) ** 0.5
    further = 2.0 * tech.local.pitch_um * (ports.all - 1 + ports.search - 1)
    return side_um + further, side_um * 2.92 + further


def _search_j(tech: Technology, cam: Cam, rows: int, tag_wide: float, high: float) -> float:
    """Search lines of every tag bit, and the matchlines of all rows but one, in both halves."""
    feature, v2 = tech.feature_um, tech.vdd2
    local_f = wire_f_per_um(tech, tech.local)
    line_f = (rows + 1) * (as_float(gate_f(tech, PULL_DOWN * feature)) + high * local_f)
    lines_j = as_float(chain(tech, line_f).energy_j) * cam.tag_bit
    precharge_f = as_float(gate_f(tech, 13.0 * tech.p_to_n * tech.min_width_um)) + tag_wide * local_f
    precharge_j = as_float(chain(tech, cam.tag_bit * precharge_f).energy_j)
    match_f = cam.tag_bit * (as_float(drain_f(tech, PULL_DOWN * feature, stack=2)) + tag_wide * local_f)
    gates_f = as_float(gate_f(tech, 125.0 * feature)) + as_float(drain_f(tech, 62.5 * feature, stack=2)) * 3.0
    ready_f = (rows + 1) * as_float(gate_f(tech, 6.0 * tech.p_to_n * tech.min_width_um))
    ready_j = as_float(chain(tech, ready_f).energy_j)
    return _HALVES * (lines_j + precharge_j + ready_j + (rows + 1) * (match_f + gates_f) * v2)


def _amplifier_j(tech: Technology) -> float:
    """A sense amplifier and the precharge-free part of its column."""
    feature = tech.feature_um
    latch_f = as_float(gate_f(tech, 11.25 * feature)) + as_float(drain_f(tech, 11.25 * feature))
    return (latch_f + as_float(drain_f(tech, 21.5 * feature))) * tech.vdd2


def _leakage_w(tech: Technology, cam: Cam, rows: int) -> tuple[float, float]:
    """Cells, comparators of the tags, and the gates behind the matchlines."""
    feature, volts = tech.feature_um, tech.voltage_v
    cell_um_ = (PULL_DOWN + PULL_UP + ACCESS * cam.ports.all / 2.0) * feature
    columns = cam.tag_bit + cam.data_bit
    cells = _HALVES * (rows + 1)
    off_um = cells * (columns * cell_um_ + cam.tag_bit * 2.0 * PULL_DOWN * feature + 80.0 * feature)
    on_um = cells * (columns * (PULL_DOWN + PULL_UP) * feature / 2.0 + cam.tag_bit * PULL_DOWN * feature)
    return tech.off_a_per_um * off_um * volts, tech.gate_leak_a_per_um * on_um * volts
