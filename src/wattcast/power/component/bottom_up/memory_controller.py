"""Memory controller and device memory.

The controller's transaction engine and PHY are fits of published controllers (McPAT 0.8; Cadence ChipEstimator,
Palmer ISSCC 2007, Niagara die photographs); its queues are memory arrays. Device memory is empirical: an architecture
file brings joules per read, write and precharge, a catalogue GPU joules per bit of its kind (``data/dram.csv``).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log

from wattcast.errors import bad_value, unknown_name
from wattcast.power.component.bottom_up.associative import Cam, cam_cost
from wattcast.power.component.bottom_up.geometry import Ports
from wattcast.power.component.bottom_up.logic import gates_leakage, selection
from wattcast.power.component.bottom_up.network import Block
from wattcast.power.component.bottom_up.organise import ArrayCost, Sram, array_cost
from wattcast.power.component.bottom_up.technology import PACKAGE, Technology

_TAG_EXTRA_BIT = 5  # state bits beside an address (CACTI)
_OPCODE_BIT = 16  # of a memory request
_ECC = 9.0 / 8.0
_ROUTINE = 0.1  # of the peak power goes on refresh, scrubbing and the like whatever is asked (McPAT 0.8)
_COALESCE_J = (
    0.443e-3 * 0.5e-9
)  # comparing the addresses of a warp: 0.443 mW for 0.5 ns at 1 V (GPUWattch, synthesis)
_REQUEST_BYTE, _MASK_BYTE, _MASKS, _COUNT_BYTE = 64, 2, 16, 1  # pending-request entry, masks, counters (manual 2.2.3)


@dataclass(frozen=True)
class Controller:
    """What a controller serves."""

    controllers: int
    channels: int  # of one controller
    bus_bit: int
    address_bit: int
    window: int  # requests waiting, a channel
    buffers: int  # words in flight, a channel
    block_byte: int  # of a request
    peak_mbyte_per_s: float  # of a controller
    clock_hz: float

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if not value > 0:
                raise bad_value(f"memory controller: {what}", "above zero", value)


@dataclass(frozen=True)
class ControllerCost:
    """Joules a request, without device memory; watts that are always there; leakage and area of one controller."""

    read_j: float
    write_j: float
    constant_w: float  # of all controllers
    front: Block
    engine: Block
    phy: Block


@cache
def controller_cost(tech: Technology, mc: Controller) -> ControllerCost:
    """Front end (a searched window, read and write buffers), transaction engine, PHY."""
    bus = mc.bus_bit * _ECC
    block_bit = mc.block_byte * _ECC * 8.0
    ports = Ports(0, mc.channels, mc.channels, mc.channels)
    tag = mc.address_bit + _TAG_EXTRA_BIT + _OPCODE_BIT
    window = cam_cost(tech, Cam("request window", mc.window, tag, 8 * -(-(mc.address_bit + _OPCODE_BIT) // 8), ports))
    bus_byte = -(-int(bus) // 8)
    word = array_cost(
        tech, Sram("data buffer", bus_byte * mc.buffers, bus_byte, 1, 1, Ports(0, mc.channels, mc.channels))
    )
    beats = block_bit / bus
    words = block_bit / 72.0
    engine, phy = _engine(tech, mc), _phy(tech, mc)
    buffered_j = beats * (word.read_j + word.write_j)
    common_j = engine.energy_j * beats + phy.energy_j * block_bit + buffered_j
    front_j = _peak_front_j(window, word, mc)
    front = Block(
        front_j,
        window.subthreshold_w + 2.0 * word.subthreshold_w,
        window.gate_w + 2.0 * word.gate_w,
        mc.channels * (window.area_um2 + 2.0 * word.area_um2),
    ) + selection(tech, 1).times(0.0, 1.0)
    peak_w = front_j * mc.clock_hz + engine.energy_j * mc.channels * mc.clock_hz
    peak_w += phy.energy_j * mc.peak_mbyte_per_s * 8e6 * bus / 72.0 * mc.channels
    return ControllerCost(
        words * (window.search_j + window.read_j) + common_j,
        words * (window.search_j + window.write_j) + common_j,
        _ROUTINE * peak_w * mc.controllers,
        front,
        engine,
        phy,
    )


def _peak_front_j(window: ArrayCost, word: ArrayCost, mc: Controller) -> float:
    """Front-end energy of a busy cycle: every port of the window, half the ports of the buffers."""
    searched = mc.channels * (2.0 * window.search_j + window.read_j + window.write_j)
    return searched + mc.channels * (word.read_j + word.write_j)


def _engine(tech: Technology, mc: Controller) -> Block:
    """Transaction engine: 0.432 W at 1 GHz, 65 nm, 1.1 V and 72 bits; area from Niagara's controllers.

    Energy of one beat of the bus; leakage and area of a controller.
    """
    bus = mc.bus_bit * _ECC
    beat_j = 0.432 / 1e9 / 72.0 / 1.1**2 * tech.feature_um / 0.065 * tech.vdd2 * bus
    area = (2.7927 * log(mc.peak_mbyte_per_s * 2.0) - 19.862) / 2.0 * bus / 128.0
    area_um2 = max(area, 0.0) * tech.feature_um / 0.09 * mc.channels * 1e6
    leak = gates_leakage(tech, area_um2 / 2.0 * tech.gate_density_per_um2, 1.0)
    return Block(beat_j, leak.subthreshold_w, leak.gate_w, area_um2)


def _phy(tech: Technology, mc: Controller) -> Block:
    """PHY: 10 mW per Gbit/s at 90 nm and 1.2 V (low-voltage differential), falling with the root of F; one bit."""
    bus = mc.bus_bit * _ECC
    bit_j = 0.01 * 1e-9 * (tech.feature_um / 0.09) ** 0.5 * tech.vdd2 / 1.2**2
    area = (6.4323 * log(mc.peak_mbyte_per_s * 2.0) - 48.134) * bus / 128.0
    area_um2 = max(area, 0.0) * tech.feature_um / 0.09 * mc.channels * 1e6 / 2.0
    leak = gates_leakage(tech, area_um2 / 2.0 * tech.gate_density_per_um2, 1.0)
    return Block(bit_j, leak.subthreshold_w, leak.gate_w, area_um2)


def coalescer(tech: Technology, entries: int) -> tuple[ArrayCost, ArrayCost, ArrayCost, float]:
    """Pending-request table, thread masks, request counters, and joules of the comparison (manual section 2.2.3)."""
    ports = Ports(0, 1, 1)
    table = array_cost(tech, Sram("pending-request table", _REQUEST_BYTE * entries, _REQUEST_BYTE, 1, 1, ports))
    masks = array_cost(tech, Sram("thread masks", _MASK_BYTE * _MASKS * entries, _MASK_BYTE, 1, 1, ports))
    counts = array_cost(tech, Sram("request counters", _COUNT_BYTE * max(entries, 16), _COUNT_BYTE, 1, 1, ports))
    return table, masks, counts, _COALESCE_J * tech.vdd2


@dataclass(frozen=True)
class Dram:
    """Device memory of a kind; None where nobody says."""

    kind: str
    read_j_per_byte: float | None
    write_j_per_byte: float | None
    source: str


def dram(kind: str) -> Dram:
    """Published energy of a kind of memory."""
    text = files(PACKAGE).joinpath("data", "dram.csv").read_text(encoding="utf-8")
    rows = {row["kind"]: row for row in csv.DictReader(text.splitlines())}
    if kind not in rows:
        raise unknown_name("kind of memory", kind, rows)
    row = rows[kind]
    read, write = (float(row[key]) * 8e-12 if row[key] else None for key in ("read_pj_per_bit", "write_pj_per_bit"))
    return Dram(kind, read, write, row["source"])
