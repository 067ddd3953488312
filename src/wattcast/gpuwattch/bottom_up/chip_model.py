"""Build a chip from its design: the cost of every memory, crossbar and unit of an SM and of the parts around it."""

from __future__ import annotations

from functools import cache
from math import ceil, log2, prod
from operator import attrgetter

from wattcast.core.arrays import Sweepable
from wattcast.core.records import dataclass, replace
from wattcast.core.strict_files import read_shipped_table
from wattcast.gpuwattch.bottom_up import chip_units, memory_array, technology
from wattcast.gpuwattch.bottom_up.chip_design import CacheShape, ChipDesign, count_tag_bits
from wattcast.gpuwattch.bottom_up.memory_array import ArrayCost, ArrayPorts, SearchedBuffer, SramArray, sram_cost
from wattcast.gpuwattch.bottom_up.technology import CircuitCost, Technology, to_float
from wattcast.power.component_power import Leakage

BOTTOM_UP_METHOD = "bottom-up from the architecture (docs/method/component-energies.md)"
_STATE_BIT = 5
# Share of long-channel devices by group (McPAT 0.8; Niagara, Nehalem)
_LONG = {"sm": 0.80, "noc": 0.82, "memory controller": 0.82, "l2": 1.0}
_COLLECTOR_ENTRIES = 8  # of an operand collector (manual 2.2.4)
_UM2_PER_MM2 = 1e6
_WORD_BIT = 32


@dataclass(frozen=True)
class CacheCost:
    """The cost of a cache and its buffers."""

    array: ArrayCost
    missed_j: float  # searching and writing the miss, fill and prefetch buffers
    written_back_j: float  # the same for the write-back buffer
    subthreshold_w: float
    gate_w: float
    area_um2: float
    write_back: bool  # of the L1 data cache, by which the misses of all first-level caches are charged

    @property
    def read_miss_j(self) -> float:
        """Energy of a read that misses; a write-back cache is charged for its buffers when it writes."""
        return self.array.read_j + (0.0 if self.write_back else self.missed_j)

    @property
    def write_miss_j(self) -> float:
        """Energy of a write that misses."""
        found = self.array.write_j + self.array.tag_read_j
        return found + (self.array.write_j + self.missed_j + self.written_back_j if self.write_back else 0.0)


class BuiltChip:
    """The costs of every structure of a design; tables in ``data`` name them."""

    def __init__(self, design: ChipDesign) -> None:
        d, rf, toggle, warps = design, design.registers, design.toggle, design.warps
        tech = technology.find_technology(d.feature_nm, d.device, d.temperature_k, d.projection, d.voltage_v)
        ports, read_and_write = ArrayPorts(d.ports), ArrayPorts(0, 1, 1)
        self.design, self.tech = design, tech
        self.instruction = _cache_cost(tech, d, d.instruction, "instruction cache", ArrayPorts(1))
        self.data = _cache_cost(tech, d, d.data, "L1 data cache", ports)
        self.constant = _cache_cost(tech, d, d.constant, "constant cache", ports)
        self.texture = _cache_cost(tech, d, d.texture, "texture cache", ports)
        self.l2 = _cache_cost(tech, d, d.l2, "L2 cache", ArrayPorts(1), is_l2=True) if d.l2 else None
        lanes = d.crossbar_lanes
        self.shared = sram_cost(tech, _cache_array(d.shared, "shared memory", ports, toggle))
        self.shared_crossbar = chip_units.crossbar_cost(tech, lanes, lanes, 32).times(toggle, 1.0)
        bank = 4 * rf.registers // rf.arrays, rf.bank_bit // 8, 1, rf.banks, read_and_write, rf.bank_bit
        self.registers = sram_cost(tech, SramArray("register file", *bank, toggle=toggle))
        outputs = max(rf.collectors * rf.crossbar_ports // rf.banks, 1)
        crossbar = chip_units.crossbar_cost(tech, rf.crossbar_ports, outputs, rf.bank_bit).times(toggle, 1.0)
        self.register_crossbar = crossbar
        self.register_arbiter = chip_units.arbiter_cost(tech, rf.banks, to_float(crossbar.area_um2) ** 0.5)
        collector = SramArray("operand collector", 4 * _COLLECTOR_ENTRIES, 4, ports=read_and_write, output_bit=4)
        self.collector = sram_cost(tech, collector)
        fetched_byte = d.instruction_bit // 8
        self.buffer = sram_cost(tech, SramArray("instruction buffer", max(fetched_byte * warps, 64), fetched_byte))
        shape = d.window, max(8 * int(log2(max(warps, 2))), 8), d.instruction_bit, ArrayPorts(0, 1, 1, 1)
        self.window = memory_array.searched_buffer_cost(tech, SearchedBuffer("instruction window", *shape))
        self.selection = chip_units.warp_selection_cost(tech, warps)
        register_bit = ceil(log2(rf.registers))
        lines = [chip_units.decoder_cost(tech, bits) for bits in (d.opcode_bit, register_bit, 8)]
        self.decoders = sum(lines, CircuitCost())
        self.latch = chip_units.latch_cost(tech)
        self.latches = chip_units.count_pipeline_latches(
            warps, d.issue, 1, d.decode, d.opcode_bit, register_bit, d.instruction_bit, d.depth
        )
        self.alu, self.fpu, self.sfu = (chip_units.functional_unit_cost(tech, unit) for unit in ("alu", d.fpu, "sfu"))
        self.rest = chip_units.unmodelled_core_cost(tech, d.depth, warps)
        self.router = chip_units.router_cost(tech, d.router)
        # of a flit, beyond the router
        self.link_j = toggle * to_float(tech.repeated_wire().cost(d.link_um, d.router.flit_bit).energy_j)
        self.controller = chip_units.memory_controller_cost(tech, d.controller)
        self.coalescer = chip_units.coalescer_cost(tech, d.pending)  # of one SM's tables

    @property
    def provenance(self) -> str:
        """Method, node, voltage, temperature and sources in one sentence."""
        tech, design = self.tech, self.design
        return (
            f"{BOTTOM_UP_METHOD}; {design.name}, F = {design.feature_nm:g} nm {tech.device.value}, "
            f"{tech.voltage_v:.4g} V, {tech.temperature_k:g} K, {tech.projection.value} wires; devices: {tech.source}"
        )

    @property
    def operand_j(self) -> Sweepable:
        """Energy of one thread's operand on its way through crossbar, arbiter and collector."""
        passage_j = self.register_crossbar.energy_j + self.register_arbiter.energy_j
        return self.design.clock_ratio * (passage_j / self.design.registers.operands + self.collector.read_j)

    @property
    def operand_share(self) -> float:
        """Share of a register bank's energy that one thread's operand is charged."""
        rf = self.design.registers
        return self.design.clock_ratio * rf.read_share * _WORD_BIT / rf.bank_bit


build_chip = cache(BuiltChip)


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
    built, used_j = [array], [0.0] * 4
    for i, (entries, bits) in enumerate(zip(shape.buffers, (missed_bit, line_bit, line_bit, line_bit), strict=True)):
        if entries:
            shape_of = SearchedBuffer(f"{name} buffer", entries, tag_bit, bits, search)
            cost = memory_array.searched_buffer_cost(tech, shape_of)
            built.append(cost)
            used_j[i] = cost.search_j + cost.write_j
    figures = ("subthreshold_w", "gate_w", "area_um2")
    off_w, gate_w, area_um2 = (sum(getattr(cost, what) for cost in built) for what in figures)
    return CacheCost(array, sum(used_j[:3]), used_j[3], off_w, gate_w, area_um2, design.data.write_back)


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
    leaks_w = [(part.group == "sm", part.count * part.leakage_w) for part in list_chip_parts(chip)]
    sms = sum(watts for of_sm, watts in leaks_w if of_sm)
    return Leakage(sms, sum(watts for _, watts in leaks_w) - sms, float(chip.design.sm_count))


def chip_area_mm2(chip: BuiltChip) -> float:
    """Return the area of all parts."""
    return sum(part.count * part.area_mm2 for part in list_chip_parts(chip))


def list_chip_parts(chip: BuiltChip) -> tuple[ChipPart, ...]:
    """Return every structure of the chip with its leakage and area.

    ``data/parts.csv`` names its cost and the numbers, multiplied, that tell how many of it make up an instance.
    """
    d, found = chip.design, []
    counts = {"sm": d.sm_count, "l2": d.l2_count, "noc": d.router_count}
    counts["memory controller"] = d.controller.controllers
    for row in read_shipped_table(technology.BOTTOM_UP_PACKAGE, "data", "parts.csv"):
        cost, group = attrgetter(row["cost"])(chip), row["group"]
        if cost is None or (d.one_l1 and row["cost"] in ("data", "texture")):  # those lie in shared memory's array
            continue
        each = float(prod(attrgetter(name)(chip) for name in row["each"].split()))
        long = _LONG[group] if d.long_channel else 0.0
        off_w = cost.subthreshold_w * (1.0 - long + long * chip.tech.long_channel_leakage) * each
        figures = map(to_float, (off_w, cost.gate_w * each, cost.area_um2 * each / _UM2_PER_MM2))
        found.append(ChipPart(row["part"], group, counts[group], *figures))
    return tuple(found)
