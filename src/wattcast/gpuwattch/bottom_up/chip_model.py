"""Build a chip from its design: the cost of every memory, crossbar and unit of an SM and of the parts around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2

from wattcast.gpuwattch.bottom_up import chip_units
from wattcast.gpuwattch.bottom_up.array_layout import (
    ArrayCost,
    SearchedBuffer,
    SramArray,
    searched_buffer_cost,
    sram_cost,
)
from wattcast.gpuwattch.bottom_up.chip_design import CacheShape, ChipDesign, count_tag_bits
from wattcast.gpuwattch.bottom_up.memory_array import ArrayPorts
from wattcast.gpuwattch.bottom_up.technology import Technology, find_repeated_wire, find_technology, to_float
from wattcast.power.component_power import Leakage

_STATE_BIT = 5
_LONG = {"core": 0.80, "uncore": 0.82, "cache": 1.0}  # share of long-channel devices (McPAT 0.8; Niagara, Nehalem)
_COLLECTOR_ENTRIES = 8  # of an operand collector (manual 2.2.4)


@dataclass(frozen=True)
class CacheCost:
    """The cost of a cache and its buffers."""

    array: ArrayCost
    missed_j: float  # searching and writing the miss, fill and prefetch buffers
    written_back_j: float  # the same for the write-back buffer
    subthreshold_w: float
    gate_w: float
    area_um2: float


@dataclass(frozen=True)
class BuiltChip:
    """The costs of every structure of a design."""

    design: ChipDesign
    tech: Technology
    instruction: CacheCost
    data: CacheCost
    constant: CacheCost
    texture: CacheCost
    shared: ArrayCost
    shared_crossbar: chip_units.LogicCost
    registers: ArrayCost
    register_crossbar: chip_units.LogicCost
    register_arbiter: chip_units.LogicCost
    collector: ArrayCost
    buffer: ArrayCost  # instructions fetched
    window: ArrayCost
    selection: chip_units.LogicCost
    decoders: chip_units.LogicCost
    latch: chip_units.LogicCost
    latches: float
    alu: chip_units.LogicCost
    fpu: chip_units.LogicCost
    sfu: chip_units.LogicCost
    rest: chip_units.LogicCost
    l2: CacheCost | None
    router: tuple[chip_units.LogicCost, chip_units.LogicCost, chip_units.LogicCost]
    link_j: float  # of a flit, beyond the router
    controller: chip_units.MemoryControllerCost
    coalescer_read_j: float
    coalescer_write_j: float
    coalescer: chip_units.LogicCost  # of one SM's tables, leakage and area


def long_channel_leakage_share(design: ChipDesign, tech: Technology, where: str) -> float:
    """Return the subthreshold leakage of a part of the chip over that without long-channel devices."""
    share = _LONG[where] if design.long_channel else 0.0
    return 1.0 - share + share * tech.long_channel_leakage


@cache
def build_chip(design: ChipDesign) -> BuiltChip:
    """Compute the cost of every structure of a design."""
    tech = find_technology(
        design.feature_nm, design.device, design.temperature_k, design.projection, design.voltage_v
    )
    rf, ports, toggle = design.registers, ArrayPorts(design.ports), design.toggle
    read_and_write = ArrayPorts(0, 1, 1)
    bank_byte, line_byte = 4 * rf.registers // rf.arrays, rf.bank_bit // 8
    registers = SramArray(
        "register file", bank_byte, line_byte, 1, rf.banks, read_and_write, output_bit=rf.bank_bit, toggle=toggle
    )
    collector = SramArray("operand collector", 4 * _COLLECTOR_ENTRIES, 4, ports=read_and_write, output_bit=4)
    fetched_byte = design.instruction_bit // 8
    buffer = SramArray("instruction buffer", max(fetched_byte * design.warps, 64), fetched_byte)
    window_tag_bit = max(8 * int(log2(max(design.warps, 2))), 8)
    window = SearchedBuffer(
        "instruction window", design.window, window_tag_bit, design.instruction_bit, ArrayPorts(0, 1, 1, 1)
    )
    outputs = max(rf.collectors * rf.crossbar_ports // rf.banks, 1)
    register_crossbar = chip_units.crossbar_cost(tech, rf.crossbar_ports, outputs, rf.bank_bit).times(toggle, 1.0)
    *tables, compare_j = chip_units.coalescer_cost(tech, design.pending)
    register_bit = ceil(log2(rf.registers))
    link = find_repeated_wire(tech).cost(design.link_um, design.router.flit_bit)
    return BuiltChip(
        design=design,
        tech=tech,
        instruction=_cache_cost(tech, design, design.instruction, "instruction cache", ArrayPorts(1)),
        data=_cache_cost(tech, design, design.data, "L1 data cache", ports),
        constant=_cache_cost(tech, design, design.constant, "constant cache", ports),
        texture=_cache_cost(tech, design, design.texture, "texture cache", ports),
        shared=sram_cost(tech, _cache_array(design.shared, "shared memory", ports, toggle)),
        shared_crossbar=chip_units.crossbar_cost(tech, design.crossbar_lanes, design.crossbar_lanes, 32).times(
            toggle, 1.0
        ),
        registers=sram_cost(tech, registers),
        register_crossbar=register_crossbar,
        register_arbiter=chip_units.arbiter_cost(tech, rf.banks, register_crossbar.area_um2**0.5),
        collector=sram_cost(tech, collector),
        buffer=sram_cost(tech, buffer),
        window=searched_buffer_cost(tech, window),
        selection=chip_units.warp_selection_cost(tech, design.warps),
        decoders=chip_units.decoder_cost(tech, design.opcode_bit)
        + chip_units.decoder_cost(tech, register_bit)
        + chip_units.decoder_cost(tech, 8),
        latch=chip_units.latch_cost(tech),
        latches=chip_units.count_pipeline_latches(
            design.warps,
            design.issue,
            1,
            design.decode,
            design.opcode_bit,
            register_bit,
            design.instruction_bit,
            design.depth,
        ),
        alu=chip_units.functional_unit_cost(tech, "alu"),
        fpu=chip_units.functional_unit_cost(tech, design.fpu),
        sfu=chip_units.functional_unit_cost(tech, "sfu"),
        rest=chip_units.unmodelled_core_cost(tech, design.depth, design.warps),
        l2=_cache_cost(tech, design, design.l2, "L2 cache", ArrayPorts(1), is_l2=True) if design.l2 else None,
        router=chip_units.router_cost(tech, design.router),
        link_j=toggle * to_float(link.energy_j),
        controller=chip_units.memory_controller_cost(tech, design.controller),
        coalescer_read_j=sum(table.read_j for table in tables) + compare_j,
        coalescer_write_j=sum(table.write_j for table in tables) + compare_j,
        coalescer=chip_units.LogicCost(
            0.0,
            sum(table.subthreshold_w for table in tables),
            sum(table.gate_w for table in tables),
            sum(table.area_um2 for table in tables),
        ),
    )


def _cache_array(shape: CacheShape, name: str, ports: ArrayPorts, toggle: float) -> SramArray:
    size = (shape.capacity_byte, shape.block_byte, shape.ways, shape.banks)
    return SramArray(name, *size, ports, toggle=toggle)


def _cache_cost(
    tech: Technology, design: ChipDesign, shape: CacheShape, name: str, ports: ArrayPorts, is_l2: bool = False
) -> CacheCost:
    """Return the cost of a cache with its miss, fill, prefetch and write-back buffers, each searched by address.

    A first-level cache reads all ways while it looks up the tags; an L2 slice reads its tags first, then one way,
    half a line at a time.
    """
    sram = _cache_array(shape, name, ports, design.toggle)
    sram = replace(sram, tag_bit=count_tag_bits(shape, design.address_bit), sequential=is_l2)
    if is_l2:
        sram = replace(sram, output_bit=4 * shape.block_byte)
    array = sram_cost(tech, sram)
    line_bit = 8 * shape.block_byte
    missed_bit = design.address_bit + ceil(log2(shape.capacity_byte // shape.block_byte))
    missed_bit += shape.block_byte if is_l2 else line_bit
    search = replace(ports, search=ports.read_write)
    tag_bit = 4 * ceil((design.address_bit + _STATE_BIT) / 4)
    costs = [
        searched_buffer_cost(tech, SearchedBuffer(f"{name} buffer", entries, tag_bit, bits, search))
        if entries
        else None
        for entries, bits in zip(shape.buffers, (missed_bit, line_bit, line_bit, line_bit), strict=True)
    ]
    used_j = [cost.search_j + cost.write_j if cost is not None else 0.0 for cost in costs]
    built = [array, *(cost for cost in costs if cost is not None)]
    return CacheCost(
        array,
        sum(used_j[:3]),
        used_j[3],
        sum(cost.subthreshold_w for cost in built),
        sum(cost.gate_w for cost in built),
        sum(cost.area_um2 for cost in built),
    )


_UM2_PER_MM2 = 1e6


@dataclass(frozen=True)
class ChipPart:
    """One structure with the figures of one instance; ``count`` of them are on the chip."""

    name: str
    group: str  # sm, l2, noc, memory controller
    count: int
    subthreshold_w: float
    gate_w: float
    area_mm2: float

    @property
    def leakage_w(self) -> float:
        """Leakage of one instance."""
        return self.subthreshold_w + self.gate_w


def chip_leakage(chip: BuiltChip) -> Leakage:
    """Return the leakage of the SMs and of the rest, for a component model."""
    found = list_chip_parts(chip)
    sms = sum(part.count * part.leakage_w for part in found if part.group == "sm")
    whole = sum(part.count * part.leakage_w for part in found)
    return Leakage(sms, whole - sms, float(chip.design.sm_count))


def chip_area_mm2(chip: BuiltChip) -> float:
    """Return the area of all parts."""
    return sum(part.count * part.area_mm2 for part in list_chip_parts(chip))


def list_chip_parts(chip: BuiltChip) -> tuple[ChipPart, ...]:
    """Return every structure of the chip with its leakage and area."""
    design = chip.design
    core = long_channel_leakage_share(design, chip.tech, "core")
    uncore = long_channel_leakage_share(design, chip.tech, "uncore")
    last = long_channel_leakage_share(design, chip.tech, "cache")

    found: list[ChipPart] = []

    def add(
        name: str,
        group: str,
        cost: chip_units.LogicCost | ArrayCost | CacheCost,
        share: float,
        count: int,
        each: float = 1.0,
    ) -> None:
        leak_w = (cost.subthreshold_w * share * each, cost.gate_w * each)
        found.append(ChipPart(name, group, count, *leak_w, cost.area_um2 * each / _UM2_PER_MM2))

    sms = design.sm_count
    for name, memory in (
        ("instruction cache", chip.instruction),
        ("L1 data cache", chip.data),
        ("constant cache", chip.constant),
        ("texture cache", chip.texture),
    ):
        if not (design.one_l1 and name in ("L1 data cache", "texture cache")):
            add(name, "sm", memory, core, sms)
    inside: tuple[tuple[str, chip_units.LogicCost | ArrayCost, float], ...] = (
        ("shared memory", chip.shared, float(design.words_of_access)),
        ("shared-memory crossbar", chip.shared_crossbar, 1.0),
        ("register-file banks", chip.registers, float(design.registers.arrays)),
        ("register-file crossbar", chip.register_crossbar, float(design.registers.arrays)),
        ("operand collectors", chip.collector, float(design.registers.collectors * design.warp_size)),
        ("instruction buffer", chip.buffer, 1.0),
        ("instruction decoders", chip.decoders, 1.0),
        ("scheduler window", chip.window, 1.0),
        ("scheduler selection", chip.selection, 1.0),
        ("pipeline latches", chip.latch, chip.latches * design.pipelines),
        ("integer units", chip.alu, float(design.integer_lanes)),
        ("floating-point units", chip.fpu, float(design.lanes)),
        ("special-function units", chip.sfu, float(design.sfu_lanes)),
        ("memory coalescing logic", chip.coalescer, 1.0),
        ("rest of the SM", chip.rest, 1.0),
    )
    for name, cost, each in inside:
        add(name, "sm", cost, core, sms, each)
    if chip.l2 is not None:
        add("L2 cache", "l2", chip.l2, last, design.l2_count)
    for name, block in zip(("router buffers", "router crossbar", "router arbiters"), chip.router, strict=True):
        add(name, "noc", block, uncore, design.router_count)
    controller = chip.controller
    for name, block in (
        ("controller front end", controller.front),
        ("transaction engine", controller.engine),
        ("memory PHY", controller.phy),
    ):
        add(name, "memory controller", block, uncore, design.controller.controllers)
    return tuple(found)
