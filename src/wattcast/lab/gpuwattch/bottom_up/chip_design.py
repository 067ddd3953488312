"""Chips for the bottom-up model: their design, from an architecture file or a catalogue GPU, and
the chip built so.

A built chip has the cost of every memory, crossbar and unit of an SM and of the parts around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import (
    dataclass,
    field,
    fields,
    replace,
)
from functools import cache
from math import (
    ceil,
    log2,
    prod,
    sqrt,
)
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from wattcast.core.arrays import Sweepable
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import (
    read_number,
    read_shipped_table,
    read_shipped_yaml,
)
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import strip_board
from wattcast.lab.gpuwattch.architecture import ChipArchitecture
from wattcast.lab.gpuwattch.bottom_up import chip_units, technology
from wattcast.lab.gpuwattch.bottom_up.bank_costs import ArrayPorts
from wattcast.lab.gpuwattch.bottom_up.chip_units import MemoryController, RouterShape
from wattcast.lab.gpuwattch.bottom_up.memory_array import (
    ArrayCost,
    SramArray,
    sram_cost,
)
from wattcast.lab.gpuwattch.bottom_up.searched_buffers import SearchedBuffer, searched_buffer_cost
from wattcast.lab.gpuwattch.bottom_up.technology import (
    CircuitCost,
    Technology,
    to_float,
)
from wattcast.power.component_power import Leakage

Chosen = TypeVar("Chosen")
_BUFFERS = (
    16,
    16,
    16,
    0,
)  # miss, fill, prefetch, write-back entries of a cache, where a file says nothing


@dataclass(frozen=True)
class CacheShape:
    """The shape of a cache or shared memory of one SM, or of one L2 slice."""

    capacity_byte: int
    block_byte: int
    ways: int = 1
    banks: int = 1
    write_back: bool = False
    buffers: tuple[int, int, int, int] = _BUFFERS

    def __post_init__(self) -> None:
        shape = {
            "capacity": self.capacity_byte,
            "block": self.block_byte,
            "ways": self.ways,
            "banks": self.banks,
        }
        technology.check_at_least_one("cache", **shape)
        if self.capacity_byte < self.block_byte * self.ways:
            expectation = f"at least one set of {self.ways} blocks of {self.block_byte} bytes"
            raise bad_value("cache: capacity", expectation, f"{self.capacity_byte} bytes")


@dataclass(frozen=True)
class RegisterFile:
    """The shape of an SM's registers and of their crossbar to the operand collectors."""

    registers: int
    banks: int
    bank_bit: int
    collectors: int
    crossbar_ports: int  # banks and collectors that the crossbar joins at once
    read_share: float = 1.0  # of a bank's energy that an operand is charged
    arrays: int = 1  # the registers lie in so many arrays, each with its own banks and crossbar
    operands: float = 32.0  # that one passage through the crossbar and the arbiter carries


@dataclass(frozen=True)
class ChipDesign:
    """Everything that determines energies, leakage and area. Counts are per SM unless the name
    tells otherwise.
    """

    name: str
    feature_nm: float
    sm_count: int
    clock_hz: float
    registers: RegisterFile
    instruction: CacheShape
    data: CacheShape
    constant: CacheShape
    texture: CacheShape
    shared: CacheShape
    l2: CacheShape | None
    l2_count: int
    router: RouterShape
    router_count: int
    controller: MemoryController
    dram_read_j: float | None = None  # of a request
    dram_write_j: float | None = None
    dram_precharge_j: float | None = None
    device: technology.TransistorType = technology.TransistorType.HIGH_PERFORMANCE
    projection: technology.WireProjection = technology.WireProjection.AGGRESSIVE
    long_channel: bool = True
    temperature_k: float = 360.0
    voltage_v: float | None = None
    clock_ratio: float = 1.0  # of the units and registers, over the clock that counts
    warps: int = 32
    issue: int = 1
    decode: int = 1
    window: int = 16  # instructions waiting to issue
    pipelines: int = 1
    depth: int = 8
    opcode_bit: int = 9
    instruction_bit: int = 32
    address_bit: int = 32
    lanes: int = 32  # of the floating-point unit
    integer_lanes: int = 32
    sfu_lanes: int = 4
    warp_size: int = 32
    ports: int = 1
    pending: int = 32  # entries of the coalescer's table
    # bank words and crossbar lanes one shared-memory access moves; GPUWattch counts one
    words_of_access: int = 1
    crossbar_lanes: int = 32  # of shared memory's crossbar
    link_um: float = 0.0  # wire between SMs and L2, beyond the network's crossbar
    toggle: float = 1.0  # share of data wires that charge in a use; McPAT counts all
    fpu: str = "fpu"  # row of units.csv
    one_l1: bool = False  # L1 and texture cache lie in shared memory's array
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        counts = ("sm_count", "warps", "issue", "lanes", "warp_size", "ports", "pending", "depth")
        technology.check_at_least_one(self.name, **{what: getattr(self, what) for what in counts})
        if not self.clock_hz > 0:
            raise bad_value(f"{self.name}: clock", "above zero", self.clock_hz)
        rf = self.registers
        if (
            rf.banks < 1
            or rf.arrays < 1
            or (4 * rf.registers) % (rf.arrays * rf.banks * rf.bank_bit // 8)
        ):
            expectation = f"{rf.arrays * rf.banks} banks of whole {rf.bank_bit}-bit lines"
            do = "Change the registers or the banks so that they divide."
            raise bad_value(
                f"{self.name}: register file", expectation, f"{rf.registers} registers", do
            )


# GPUWattch charges an operand a third of a bank's read where integer and floating point have
# pipelines of their own, and 55 % where they share one (RegFU in core.cc of GPGPU-Sim); its
# crossbar then has half as many ports.
_SHARE = {1: 0.33, 2: 0.55}
_GPUWATTCH_BANK_BIT = 128


def design_from_architecture(
    architecture: ChipArchitecture, sm_count: int | None = None
) -> ChipDesign:
    """Return the design that an architecture file describes, read as GPUWattch's McPAT reads it.

    Numbers that the file leaves out have McPAT's defaults, which become notes of the design.
    ``sm_count`` is the simulator's, for files that do not hold it: McPAT counts the SMs of its own
    file, also where the simulator has fewer."""
    p = _FileNumbers(architecture)
    kind = p.choice("architecture", {number: number for number in _SHARE})
    router = p.part("router")
    controller = p.part("controller")
    controller["clock_hz"] = 2e6 * controller.pop("clock_mhz")  # both edges
    registers = p.part("registers") | {"bank_bit": _GPUWATTCH_BANK_BIT, "read_share": _SHARE[kind]}
    listed = "number_of_cores" in architecture.parameters
    has_clock = "target_core_clockrate" in architecture.parameters
    mhz = (
        p.number("target_core_clockrate")
        if has_clock
        else p.unread("system.core0", "clock_rate", 1000.0)
    )
    sms = int(p.number("number_of_cores", 1)) if listed or not sm_count else sm_count
    pipelines = architecture.parameters["pipelines_per_core"]
    sizes = p.part("design")
    lanes = max(sizes["lanes"], 1)
    sizes |= {
        "window": max(16, sizes["window"]),
        "lanes": lanes,
        "crossbar_lanes": lanes,
    }
    return ChipDesign(
        name=architecture.name,
        sm_count=sms,
        clock_hz=mhz * 1e6,
        registers=RegisterFile(
            crossbar_ports=registers["banks"] // (2 if kind == 1 else 1), **registers
        ),
        instruction=p.cache("icache", (16384, 32, 4, 1, 1, 3, 8, 0)),
        data=p.cache("dcache"),
        constant=p.cache("ccache"),
        texture=p.cache("tcache"),
        shared=p.cache("sharedmemory"),
        l2=p.cache("L2") if sizes["l2_count"] else None,
        router=RouterShape(**router),
        router_count=int(p.number("horizontal_nodes")) * int(p.number("vertical_nodes")),
        controller=MemoryController(**controller),
        device=p.choice("device_type", dict(enumerate(technology.TransistorType))),
        projection=p.choice(
            "interconnect_projection_type", dict(enumerate(technology.WireProjection))
        ),
        long_channel=bool(p.number("longer_channel_device")),
        pipelines=int(pipelines[0] if isinstance(pipelines, tuple) else pipelines),
        notes=tuple(p.defaults),
        **sizes,
    )


class _FileNumbers:
    """Reads numbers of an architecture file and notes where McPAT's defaults fill gaps."""

    def __init__(self, architecture: ChipArchitecture) -> None:
        self.architecture = architecture
        self.defaults: list[str] = []

    def number(
        self,
        name: str,
        default: float | None = None,
    ) -> float:
        value = self.architecture.parameters.get(name)
        if isinstance(value, (int, float)):
            return float(value)
        if default is None:
            return self.architecture.number(name)
        self.defaults.append(f"{name} is not in the file: {default:g}")
        return default

    def part(self, name: str) -> dict[str, Any]:
        """Return the fields of a part of the design that ``data/design.csv`` finds in a file."""
        fields_of_part: dict[str, Any] = {}
        for row in read_shipped_table(technology.BOTTOM_UP_PACKAGE, "data", "design.csv"):
            if row["part"] == name:
                default = float(row["default"]) if row["default"] else None
                if row["component"]:
                    number = self.unread(row["component"], row["parameter"], default or 0.0)
                else:
                    number = self.number(row["parameter"], default)
                fields_of_part[row["field"]] = int(number) if row["whole"] else number
        return fields_of_part

    def choice(
        self,
        name: str,
        of: Mapping[int, Chosen],
    ) -> Chosen:
        """Return the option that a number of the file selects."""
        number = self.number(name)
        if number not in of:
            raise bad_value(
                f"{self.architecture.name}: {name}",
                f"one of {', '.join(map(str, of))}",
                f"{number:g}",
            )
        return of[int(number)]

    def unread(
        self,
        component: str,
        name: str,
        default: float,
    ) -> float:
        """Return a number that the reader keeps as text because the component model does not need
        it.
        """
        text = self.architecture.other.get(component, {}).get(name)
        if text is None:
            self.defaults.append(f"{component}.{name} is not in the file: {default:g}")
            return default
        return read_number(text.split(",")[0], f"{self.architecture.name}: {component}/{name}")

    def cache(
        self,
        name: str,
        default: tuple[int, ...] | None = None,
    ) -> CacheShape:
        """Return the shape of a cache from its ``_config`` and the sizes of its buffers."""
        config = self.architecture.parameters.get(f"{name}_config", default)
        assert isinstance(config, tuple)
        where = "system.L20" if name == "L2" else f"system.core0.{name}"
        text = self.architecture.other.get(where, {}).get("buffer_sizes", "")
        sizes = [int(piece) for piece in text.split(",") if piece.strip().isdigit()]
        a, b, c, d = sizes if len(sizes) == 4 else _BUFFERS
        capacity, block, ways, banks = config[:4]
        return CacheShape(
            capacity,
            block,
            max(ways, 1),
            banks,
            config[7] == 1,
            (a, b, c, d),
        )


class Assumption(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One assumption with its source."""

    value: int | float
    source: str


@cache
def known_assumptions() -> dict[str, Assumption]:
    """Return the numbers that the catalogue does not hold, by name."""
    return read_shipped_yaml(
        dict[str, Assumption], technology.BOTTOM_UP_PACKAGE, "data", "assumed.yaml"
    )


def design_from_gpu(
    gpu: Gpu,
    feature_nm: float | None = None,
    voltage_v: float | None = None,
    temperature_k: float | None = None,
) -> ChipDesign:
    """Return the design of a catalogue GPU.

    The node is that of its process (or ``feature_nm``). The voltage is the given one, else the
    published one at the top clock, else the process's stand-in, else nominal. A number that the
    catalogue lacks is an error that names it."""
    node = _choose_node(gpu, feature_nm, voltage_v)
    notes = list(node.notes)
    assumed = list_assumed_values()
    if temperature_k is not None:
        assumed["temperature_k"] = temperature_k
    line = assumed["line_byte"]
    sector = assumed["sector_byte"]
    ways = assumed["cache_ways"]
    words = assumed["warp_size"]

    read_j, write_j, source = chip_units.find_dram_energy(gpu.memory.kind)
    if read_j is None:
        notes.append(f"{gpu.memory.kind}: {source}; device memory is left out")
    link_um, link_note = _find_link(gpu)
    notes.append(link_note)

    sms = _round_whole(gpu.sm_count)
    shared = _round_whole(gpu.need("sm.shared_byte"))
    l1 = CacheShape(_round_down(shared // 2, line * ways), line, ways)
    l2, slices = _shape_l2(gpu, assumed)
    return ChipDesign(
        name=gpu.name,
        feature_nm=node.feature_nm,
        sm_count=sms,
        clock_hz=float(np.mean(gpu.clocks.max_hz)),
        registers=_shape_registers(gpu, assumed),
        instruction=CacheShape(assumed["instruction_cache_byte"], line, ways),
        data=l1,
        constant=CacheShape(assumed["constant_cache_byte"], 64, ways),
        texture=l1,
        shared=CacheShape(shared // words // 16 * 16, assumed["shared_bank_byte"]),
        l2=l2,
        l2_count=slices,
        router=RouterShape(8 * sector, ceil(sms / 2), slices),
        router_count=1,
        controller=_shape_controller(gpu, assumed),
        dram_read_j=None if read_j is None else read_j * sector,
        dram_write_j=None if write_j is None else write_j * sector,
        voltage_v=node.voltage_v,
        warps=max(_round_whole(gpu.need("sm.thread_count")) // words, 1),
        lanes=max(_round_whole(gpu.pipes.cuda_flop_per_cycle.get(Dtype.FP32, 64.0)) // 2, 1),
        integer_lanes=_round_whole(gpu.pipes.int32_op_per_cycle or 32.0),
        sfu_lanes=_round_whole(gpu.pipes.sfu_op_per_cycle or 4.0),
        words_of_access=words,
        crossbar_lanes=words,
        fpu="fpu_dense",
        one_l1=True,
        link_um=link_um,
        notes=tuple(notes),
        **{item.name: assumed[item.name] for item in fields(ChipDesign) if item.name in assumed},
    )


def list_assumed_values() -> dict[str, Any]:
    """Return the value of everything that is assumed of a catalogue GPU, by name."""
    return {name: assumption.value for name, assumption in known_assumptions().items()}


@dataclass(frozen=True)
class _ChosenNode:
    """Feature size and voltage of a design, with notes on where they come from."""

    feature_nm: float
    voltage_v: float | None
    notes: tuple[str, ...]


def _choose_node(
    gpu: Gpu,
    feature_nm: float | None,
    voltage_v: float | None,
) -> _ChosenNode:
    notes = []
    volts = voltage_v
    if feature_nm is None:
        feature_nm, row = technology.find_process(gpu.process)
        cell = f"from an SRAM cell of {row['cell_um2']} um2 ({row['source']})"
        notes.append(f"{gpu.process}: F = {feature_nm:g} nm, {cell}")
        if volts is None and row["top_clock_v"]:
            volts = float(row["top_clock_v"])
    if voltage_v is None and gpu.power.voltage_v is not None:
        volts = float(np.max(gpu.power.voltage_v.value_at(gpu.clocks.max_hz)))
        notes.append(f"{volts:g} V at the top clock, published")
    elif voltage_v is None and volts is not None:
        notes.append(f"{volts:g} V at the top clock, a stand-in")
    return _ChosenNode(feature_nm, volts, tuple(notes))


def _find_link(gpu: Gpu) -> tuple[float, str]:
    """Return the mean wire between SM and L2 in µm, 0 for an unknown die, and a note that says so.

    The wire is a quarter of a square die's side each way to the middle."""
    name = strip_board(gpu.name)
    for die in read_shipped_table(technology.BOTTOM_UP_PACKAGE, "data", "dies.csv"):
        if die["gpu"] == name:
            note = f"die of {die['area_mm2']} mm2 ({die['source']}): wires between SMs and L2"
            return 0.5e3 * sqrt(float(die["area_mm2"])), note
    return 0.0, "the die's area is not in the table: wires between SMs and L2 are left out"


def _shape_l2(gpu: Gpu, assumed: Mapping[str, Any]) -> tuple[CacheShape, int]:
    """Return the shape of an L2 slice, and their number."""
    line = assumed["line_byte"]
    ways = assumed["l2_ways"]
    capacity_byte = _round_whole(gpu.need("l2.capacity_byte"))
    slices = max(round(capacity_byte / assumed["l2_slice_byte"]), 1)
    slice_byte = _round_down(capacity_byte // slices, line * ways)
    shape = CacheShape(
        slice_byte,
        line,
        ways,
        write_back=True,
        buffers=(16, 16, 16, 16),
    )
    return shape, slices


def _shape_registers(gpu: Gpu, assumed: Mapping[str, Any]) -> RegisterFile:
    banks = assumed["register_banks"]
    bank_bit = assumed["register_bank_bit"]
    return RegisterFile(
        _round_whole(gpu.need("sm.register_count")),
        banks,
        bank_bit,
        assumed["collectors"],
        banks,
        arrays=assumed["issue"] * assumed["warp_size"],
        operands=bank_bit / 32.0,
    )


def _shape_controller(gpu: Gpu, assumed: Mapping[str, Any]) -> MemoryController:
    """Return 64-bit controllers that share the bandwidth, at the rate their pins need for it."""
    bus = assumed["controller_bus_bit"]
    queue = assumed["controller_queue"]
    byte_per_s = float(np.mean(gpu.memory.byte_per_s))
    clock_hz = 1e9
    if gpu.memory.clock_hz is not None:
        clock_hz = float(np.mean(gpu.memory.clock_hz))
    count = max(round(byte_per_s / (2.0 * clock_hz * bus / 8.0)), 1)
    return MemoryController(
        controllers=count,
        channels=1,
        bus_bit=bus,
        address_bit=assumed["address_bit"],
        window=queue,
        buffers=queue,
        block_byte=assumed["sector_byte"],
        peak_mbyte_per_s=byte_per_s / count / 1e6,
        clock_hz=2.0 * clock_hz,
    )


def _round_down(size: int, step: int) -> int:
    """Return the largest multiple of ``step`` up to ``size``, at least one step."""
    return max(size // step, 1) * step


def _round_whole(value: Sweepable) -> int:
    return round(float(np.mean(value)))


BOTTOM_UP_METHOD = "bottom-up from the architecture (docs/method/component-energies.md)"
_STATE_BIT = 5
# Share of long-channel devices by group (McPAT 0.8; Niagara, Nehalem)
_LONG = {
    "sm": 0.80,
    "noc": 0.82,
    "memory controller": 0.82,
    "l2": 1.0,
}
_COLLECTOR_ENTRIES = 8  # of an operand collector (manual 2.2.4)
_UM2_PER_MM2 = 1e6
_WORD_BIT = 32
_READ_AND_WRITE = ArrayPorts(0, 1, 1)  # one port to read and one to write


@dataclass(frozen=True)
class CacheCost:
    """The cost of a cache and its buffers."""

    array: ArrayCost
    missed_j: float  # searching and writing the miss, fill and prefetch buffers
    written_back_j: float  # the same for the write-back buffer
    subthreshold_w: float
    gate_w: float
    area_um2: float
    write_back: (
        bool  # of the L1 data cache, by which the misses of all first-level caches are charged
    )

    @property
    def read_miss_j(self) -> float:
        """Energy of a read that misses; a write-back cache is charged for its buffers when it
        writes.
        """
        return self.array.read_j + (0.0 if self.write_back else self.missed_j)

    @property
    def write_miss_j(self) -> float:
        """Energy of a write that misses."""
        array_j = self.array.write_j + self.array.tag_read_j
        return array_j + (
            self.array.write_j + self.missed_j + self.written_back_j if self.write_back else 0.0
        )


class BuiltChip:
    """The costs of every structure of a design; tables in ``data`` name them."""

    def __init__(self, design: ChipDesign) -> None:
        self.design = design
        self.tech = technology.find_technology(
            design.feature_nm,
            design.device,
            design.temperature_k,
            design.projection,
            design.voltage_v,
        )
        self._build_caches()
        self._build_shared_memory()
        self._build_registers()
        self._build_front_end()
        self._build_execution_units()
        self._build_memory_system()

    def _build_caches(self) -> None:
        """Build the caches of an SM, with as many ports as the design has, and an L2 slice.

        The instruction cache and the L2 have one port."""
        d = self.design
        one_port = ArrayPorts(1)
        ports = ArrayPorts(d.ports)
        tech = self.tech
        self.instruction = _cache_cost(
            tech,
            d,
            d.instruction,
            "instruction cache",
            one_port,
        )
        self.data = _cache_cost(
            tech,
            d,
            d.data,
            "L1 data cache",
            ports,
        )
        self.constant = _cache_cost(
            tech,
            d,
            d.constant,
            "constant cache",
            ports,
        )
        self.texture = _cache_cost(
            tech,
            d,
            d.texture,
            "texture cache",
            ports,
        )
        self.l2 = None
        if d.l2:
            self.l2 = _cache_cost(
                tech,
                d,
                d.l2,
                "L2 cache",
                one_port,
                is_l2=True,
            )

    def _build_shared_memory(self) -> None:
        """Build shared memory and the crossbar from its banks to the lanes."""
        d = self.design
        lanes = d.crossbar_lanes
        array = _cache_array(d.shared, "shared memory", ArrayPorts(d.ports), toggle=d.toggle)
        self.shared = sram_cost(self.tech, array)
        crossbar = chip_units.crossbar_cost(self.tech, lanes, lanes, _WORD_BIT)
        self.shared_crossbar = crossbar.times(d.toggle, 1.0)

    def _build_registers(self) -> None:
        """Build the register file, its crossbar to the operand collectors and its arbiter."""
        toggle = self.design.toggle
        rf = self.design.registers
        tech = self.tech
        bank = SramArray(
            "register file",
            4 * rf.registers // rf.arrays,
            rf.bank_bit // 8,
            1,
            rf.banks,
            _READ_AND_WRITE,
            rf.bank_bit,
            toggle=toggle,
        )
        self.registers = sram_cost(tech, bank)
        outputs = max(rf.collectors * rf.crossbar_ports // rf.banks, 1)
        crossbar = chip_units.crossbar_cost(tech, rf.crossbar_ports, outputs, rf.bank_bit)
        self.register_crossbar = crossbar.times(toggle, 1.0)
        # the arbiter's wires are as long as a side of the crossbar
        side_um = to_float(self.register_crossbar.area_um2) ** 0.5
        self.register_arbiter = chip_units.arbiter_cost(tech, rf.banks, side_um)
        collector = SramArray(
            "operand collector",
            4 * _COLLECTOR_ENTRIES,
            4,
            ports=_READ_AND_WRITE,
            output_bit=4,
        )
        self.collector = sram_cost(tech, collector)

    def _build_front_end(self) -> None:
        """Build what fetches, decodes and selects instructions, and the pipeline's latches."""
        d = self.design
        tech = self.tech
        fetched_byte = d.instruction_bit // 8
        buffer_byte = max(fetched_byte * d.warps, 64)
        self.buffer = sram_cost(tech, SramArray("instruction buffer", buffer_byte, fetched_byte))
        window = SearchedBuffer(
            "instruction window",
            d.window,
            max(8 * int(log2(max(d.warps, 2))), 8),
            d.instruction_bit,
            ArrayPorts(0, 1, 1, 1),
        )
        self.window = searched_buffer_cost(tech, window)
        self.selection = chip_units.warp_selection_cost(tech, d.warps)
        register_bit = ceil(log2(d.registers.registers))
        decoded_bits = (d.opcode_bit, register_bit, 8)
        decoders = [chip_units.decoder_cost(tech, bits) for bits in decoded_bits]
        self.decoders = sum(decoders, CircuitCost())
        self.latch = chip_units.latch_cost(tech)
        self.latches = chip_units.count_pipeline_latches(
            d.warps,
            d.issue,
            d.decode,
            d.opcode_bit,
            register_bit,
            d.instruction_bit,
            d.depth,
        )

    def _build_execution_units(self) -> None:
        """Build one lane of every kind of unit, and what McPAT leaves unmodelled of an SM."""
        d = self.design
        self.alu = chip_units.functional_unit_cost(self.tech, "alu")
        self.fpu = chip_units.functional_unit_cost(self.tech, d.fpu)
        self.sfu = chip_units.functional_unit_cost(self.tech, "sfu")
        self.rest = chip_units.unmodelled_core_cost(self.tech, d.depth, d.warps)

    def _build_memory_system(self) -> None:
        """Build coalescer, network and memory controller."""
        d = self.design
        self.coalescer = chip_units.coalescer_cost(self.tech, d.pending)  # of one SM's tables
        self.router = chip_units.router_cost(self.tech, d.router)
        wire = self.tech.repeated_wire().cost(d.link_um, d.router.flit_bit)
        self.link_j = d.toggle * to_float(wire.energy_j)  # of a flit, beyond the router
        self.controller = chip_units.memory_controller_cost(self.tech, d.controller)

    @property
    def provenance(self) -> str:
        """Method, node, voltage, temperature and sources in one sentence."""
        tech = self.tech
        design = self.design
        return (
            f"{BOTTOM_UP_METHOD}; {design.name}, F = {design.feature_nm:g} nm {tech.device.value}, "
            f"{tech.voltage_v:.4g} V, {tech.temperature_k:g} K, {tech.projection.value} "
            f"wires; devices: {tech.source}"
        )

    @property
    def operand_j(self) -> Sweepable:
        """Energy of one thread's operand on its way through crossbar, arbiter and collector."""
        passage_j = self.register_crossbar.energy_j + self.register_arbiter.energy_j
        return self.design.clock_ratio * (
            passage_j / self.design.registers.operands + self.collector.read_j
        )

    @property
    def operand_share(self) -> float:
        """Share of a register bank's energy that one thread's operand is charged."""
        rf = self.design.registers
        return self.design.clock_ratio * rf.read_share * _WORD_BIT / rf.bank_bit


build_chip = cache(BuiltChip)


def _cache_array(
    shape: CacheShape,
    name: str,
    ports: ArrayPorts,
    **more: Any,
) -> SramArray:
    return SramArray(
        name,
        shape.capacity_byte,
        shape.block_byte,
        shape.ways,
        shape.banks,
        ports,
        **more,
    )


def _cache_cost(
    tech: Technology,
    design: ChipDesign,
    shape: CacheShape,
    name: str,
    ports: ArrayPorts,
    is_l2: bool = False,
) -> CacheCost:
    """Return the cost of a cache with its miss, fill, prefetch and write-back buffers, each
    searched by address.

    A first-level cache reads all ways while it looks up the tags; an L2 slice reads its tags first,
    then one way, half a line at a time."""
    # the tag of a way is the address less index and offset, and state bits, in groups of four
    # (CACTI 6.5)
    sets = shape.capacity_byte // (shape.block_byte * shape.ways)
    tag_bit = design.address_bit - ceil(log2(sets)) - ceil(log2(shape.block_byte)) + _STATE_BIT
    how: dict[str, Any] = {
        "tag_bit": 4 * ceil(max(tag_bit, 1) / 4),
        "sequential": is_l2,
        "toggle": design.toggle,
    }
    how["output_bit"] = 4 * shape.block_byte if is_l2 else None
    array = sram_cost(tech, _cache_array(shape, name, ports, **how))
    line_bit = 8 * shape.block_byte
    missed_bit = design.address_bit + ceil(log2(shape.capacity_byte // shape.block_byte))
    missed_bit += shape.block_byte if is_l2 else line_bit
    search = replace(ports, search=ports.read_write)
    tag_bit = 4 * ceil((design.address_bit + _STATE_BIT) / 4)
    built = [array]
    used_j = [0.0] * 4
    for i, (entries, bits) in enumerate(
        zip(shape.buffers, (missed_bit, line_bit, line_bit, line_bit), strict=True)
    ):
        if entries:
            shape_of = SearchedBuffer(
                f"{name} buffer",
                entries,
                tag_bit,
                bits,
                search,
            )
            cost = searched_buffer_cost(tech, shape_of)
            built.append(cost)
            used_j[i] = cost.search_j + cost.write_j
    figures = ("subthreshold_w", "gate_w", "area_um2")
    off_w, gate_w, area_um2 = (sum(getattr(cost, what) for cost in built) for what in figures)
    return CacheCost(
        array,
        sum(used_j[:3]),
        used_j[3],
        off_w,
        gate_w,
        area_um2,
        design.data.write_back,
    )


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

    ``data/parts.csv`` names its cost and the numbers, multiplied, that tell how many of it make up
    an instance."""
    d = chip.design
    parts = []
    counts = {
        "sm": d.sm_count,
        "l2": d.l2_count,
        "noc": d.router_count,
    }
    counts["memory controller"] = d.controller.controllers
    for row in read_shipped_table(technology.BOTTOM_UP_PACKAGE, "data", "parts.csv"):
        cost = attrgetter(row["cost"])(chip)
        group = row["group"]
        if cost is None or (
            d.one_l1 and row["cost"] in ("data", "texture")
        ):  # those lie in shared memory's array
            continue
        copies = float(prod(attrgetter(name)(chip) for name in row["each"].split()))
        long = _LONG[group] if d.long_channel else 0.0
        off_w = cost.subthreshold_w * (1.0 - long + long * chip.tech.long_channel_leakage) * copies
        figures = map(
            to_float, (off_w, cost.gate_w * copies, cost.area_um2 * copies / _UM2_PER_MM2)
        )
        parts.append(ChipPart(row["part"], group, counts[group], *figures))
    return tuple(parts)
