"""Design -> structures with their costs: every memory, crossbar and unit of an SM, and what lies around the SMs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log2

from wattcast.power.component.bottom_up.associative import Cam, cam_cost
from wattcast.power.component.bottom_up.circuits import as_float, repeated_wire
from wattcast.power.component.bottom_up.design import Cache, Design, tag_bits
from wattcast.power.component.bottom_up.geometry import Ports
from wattcast.power.component.bottom_up.logic import (
    decoder,
    latch,
    pipeline_bits,
    rest_of_core,
    selection,
    unit_cost,
)
from wattcast.power.component.bottom_up.memory_controller import ControllerCost, coalescer, controller_cost
from wattcast.power.component.bottom_up.network import Block, arbiter, crossbar, router
from wattcast.power.component.bottom_up.organise import ArrayCost, Sram, array_cost
from wattcast.power.component.bottom_up.technology import Technology, technology

_STATE_BIT = 5
_LONG = {"core": 0.80, "uncore": 0.82, "cache": 1.0}  # share of long-channel devices (McPAT 0.8; Niagara, Nehalem)
_COLLECTOR_ENTRIES = 8  # of an operand collector (manual 2.2.4)


@dataclass(frozen=True)
class CacheCost:
    """A cache and its buffers."""

    array: ArrayCost
    missed_j: float  # searching and writing the miss, fill and prefetch buffers
    written_back_j: float  # the same for the write-back buffer
    subthreshold_w: float
    gate_w: float
    area_um2: float


@dataclass(frozen=True)
class Chip:
    """Costs of every structure of a design."""

    design: Design
    tech: Technology
    instruction: CacheCost
    data: CacheCost
    constant: CacheCost
    texture: CacheCost
    shared: ArrayCost
    shared_crossbar: Block
    registers: ArrayCost
    register_crossbar: Block
    register_arbiter: Block
    collector: ArrayCost
    buffer: ArrayCost  # instructions fetched
    window: ArrayCost
    selection: Block
    decoders: Block
    latch: Block
    latches: float
    alu: Block
    fpu: Block
    sfu: Block
    rest: Block
    l2: CacheCost | None
    router: tuple[Block, Block, Block]
    link_j: float  # of a flit, beyond the router
    controller: ControllerCost
    coalescer_read_j: float
    coalescer_write_j: float
    coalescer: Block  # of one SM's tables, leakage and area


def long_channel(design: Design, tech: Technology, where: str) -> float:
    """What long-channel devices leave of the subthreshold leakage of a part of the chip."""
    share = _LONG[where] if design.long_channel else 0.0
    return 1.0 - share + share * tech.long_channel_leakage


@cache
def build_chip(design: Design) -> Chip:
    """Look at every structure once."""
    tech = technology(design.feature_nm, design.device, design.temperature_k, design.projection, design.voltage_v)
    rf = design.registers
    banks = Sram(
        "register file",
        4 * rf.registers // rf.arrays,
        rf.bank_bit // 8,
        1,
        rf.banks,
        Ports(0, 1, 1),
        output_bit=rf.bank_bit,
        toggle=design.toggle,
    )
    ports, shared = Ports(design.ports), design.shared
    outputs = max(rf.collectors * rf.crossbar_ports // rf.banks, 1)
    register_switch = crossbar(tech, rf.crossbar_ports, outputs, rf.bank_bit).times(design.toggle, 1.0)
    table, masks, counts, compare_j = coalescer(tech, design.pending)
    depth = ceil(log2(rf.registers))
    fetched = design.instruction_bit // 8
    return Chip(
        design,
        tech,
        _cache(tech, design, design.instruction, "instruction cache", Ports(1)),
        _cache(tech, design, design.data, "L1 data cache", ports),
        _cache(tech, design, design.constant, "constant cache", ports),
        _cache(tech, design, design.texture, "texture cache", ports),
        array_cost(
            tech,
            Sram(
                "shared memory",
                shared.capacity_byte,
                shared.block_byte,
                shared.ways,
                shared.banks,
                ports,
                toggle=design.toggle,
            ),
        ),
        crossbar(tech, design.crossbar_lanes, design.crossbar_lanes, 32).times(design.toggle, 1.0),
        array_cost(tech, banks),
        register_switch,
        arbiter(tech, rf.banks, register_switch.area_um2**0.5),
        array_cost(tech, Sram("operand collector", 4 * _COLLECTOR_ENTRIES, 4, 1, 1, Ports(0, 1, 1), output_bit=4)),
        array_cost(tech, Sram("instruction buffer", max(fetched * design.warps, 64), fetched)),
        cam_cost(
            tech,
            Cam(
                "instruction window",
                design.window,
                max(8 * int(log2(max(design.warps, 2))), 8),
                design.instruction_bit,
                Ports(0, 1, 1, 1),
            ),
        ),
        selection(tech, design.warps),
        decoder(tech, design.opcode_bit) + decoder(tech, depth) + decoder(tech, 8),
        latch(tech),
        pipeline_bits(
            design.warps,
            design.issue,
            1,
            design.decode,
            design.opcode_bit,
            depth,
            design.instruction_bit,
            design.depth,
        ),
        unit_cost(tech, "alu"),
        unit_cost(tech, design.fpu),
        unit_cost(tech, "sfu"),
        rest_of_core(tech, design.depth, design.warps),
        _l2(tech, design),
        router(tech, design.router),
        design.toggle * as_float(repeated_wire(tech).cost(design.link_um, design.router.flit_bit).energy_j),
        controller_cost(tech, design.controller),
        table.read_j + masks.read_j + counts.read_j + compare_j,
        table.write_j + masks.write_j + counts.write_j + compare_j,
        Block(
            0.0,
            table.subthreshold_w + masks.subthreshold_w + counts.subthreshold_w,
            table.gate_w + masks.gate_w + counts.gate_w,
            table.area_um2 + masks.area_um2 + counts.area_um2,
        ),
    )


def _cache(tech: Technology, design: Design, cache_: Cache, name: str, ports: Ports) -> CacheCost:
    """A first-level cache: all ways are read while the tags are looked up."""
    tag = tag_bits(cache_, design.address_bit)
    sram = Sram(
        name,
        cache_.capacity_byte,
        cache_.block_byte,
        cache_.ways,
        cache_.banks,
        ports,
        tag_bit=tag,
        toggle=design.toggle,
    )
    found = array_cost(tech, sram)
    lines = cache_.capacity_byte // cache_.block_byte
    line_bit = 8 * cache_.block_byte
    return _with_buffers(
        tech, design, cache_, name, found, ports, design.address_bit + ceil(log2(lines)) + line_bit, line_bit
    )


def _l2(tech: Technology, design: Design) -> CacheCost | None:
    """The second-level cache: tags first, then one way, half a line at a time."""
    l2 = design.l2
    if l2 is None:
        return None
    sram = Sram(
        "L2 cache",
        l2.capacity_byte,
        l2.block_byte,
        l2.ways,
        l2.banks,
        Ports(1),
        4 * l2.block_byte,
        tag_bits(l2, design.address_bit),
        sequential=True,
        toggle=design.toggle,
    )
    found = array_cost(tech, sram)
    lines = l2.capacity_byte // l2.block_byte
    missed_bit = design.address_bit + ceil(log2(lines)) + l2.block_byte
    return _with_buffers(tech, design, l2, "L2 cache", found, Ports(1), missed_bit, 8 * l2.block_byte)


def _with_buffers(
    tech: Technology,
    design: Design,
    cache_: Cache,
    name: str,
    found: ArrayCost,
    ports: Ports,
    missed_bit: int,
    line_bit: int,
) -> CacheCost:
    """The cache with its miss, fill, prefetch and write-back buffers, each searched by address."""
    search = Ports(ports.read_write, ports.read, ports.write, ports.read_write)
    tag = 4 * ceil((design.address_bit + _STATE_BIT) / 4)
    costs = [
        cam_cost(tech, Cam(f"{name} buffer", entries, tag, bits, search)) if entries else None
        for entries, bits in zip(cache_.buffers, (missed_bit, line_bit, line_bit, line_bit), strict=True)
    ]
    there = [cost for cost in costs if cost is not None]
    used = [cost.search_j + cost.write_j if cost is not None else 0.0 for cost in costs]
    return CacheCost(
        found,
        sum(used[:3]),
        used[3],
        found.subthreshold_w + sum(cost.subthreshold_w for cost in there),
        found.gate_w + sum(cost.gate_w for cost in there),
        found.area_um2 + sum(cost.area_um2 for cost in there),
    )
