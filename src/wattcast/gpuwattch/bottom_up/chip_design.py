"""The design of a chip for the bottom-up model, from an architecture file or a catalogue GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import ceil, log2, sqrt
from typing import TypeVar

import msgspec
import numpy as np

from wattcast.core.arrays import Sweepable
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import decode_yaml, read_number, read_shipped_table
from wattcast.core.units import Dtype
from wattcast.gpuwattch.architecture import ChipArchitecture
from wattcast.gpuwattch.bottom_up import technology
from wattcast.gpuwattch.bottom_up.chip_units import MemoryController, RouterShape, find_dram_energy
from wattcast.hardware import Gpu

Chosen = TypeVar("Chosen")
_BUFFERS = (16, 16, 16, 0)  # miss, fill, prefetch, write-back entries of a cache, where a file says nothing


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
        shape = {"capacity": self.capacity_byte, "block": self.block_byte, "ways": self.ways, "banks": self.banks}
        technology.check_at_least_one("cache", **shape)
        if self.capacity_byte < self.block_byte * self.ways:
            wanted = f"at least one set of {self.ways} blocks of {self.block_byte} bytes"
            raise bad_value("cache: capacity", wanted, f"{self.capacity_byte} bytes")


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
    """Everything that determines energies, leakage and area. Counts are per SM unless the name tells otherwise."""

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
    words_of_access: int = 1  # bank words and crossbar lanes one shared-memory access moves; GPUWattch counts one
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
        if rf.banks < 1 or rf.arrays < 1 or (4 * rf.registers) % (rf.arrays * rf.banks * rf.bank_bit // 8):
            raise bad_value(
                f"{self.name}: register file",
                f"{rf.arrays * rf.banks} banks of whole {rf.bank_bit}-bit lines",
                f"{rf.registers} registers",
                "Change the registers or the banks so that they divide.",
            )


# GPUWattch charges an operand a third of a bank's read where integer and floating point have pipelines of their own,
# and 55 % where they share one (RegFU in core.cc of GPGPU-Sim); its crossbar then has half as many ports.
_SHARE = {1: 0.33, 2: 0.55}
_GPUWATTCH_BANK_BIT = 128


def design_from_architecture(architecture: ChipArchitecture, sm_count: int | None = None) -> ChipDesign:
    """Return the design that an architecture file describes, read as GPUWattch's McPAT reads it.

    Numbers that the file leaves out have McPAT's defaults, which become notes of the design. ``sm_count`` is the
    simulator's, for files that do not hold it: McPAT counts the SMs of its own file, also where the simulator has
    fewer.
    """
    p = _FileNumbers(architecture)
    kind = p.choice("architecture", {number: number for number in _SHARE})
    banks = p.whole("rf_banks")
    registers = RegisterFile(
        registers=p.whole("archi_Regs_IRF_size"),
        banks=banks,
        bank_bit=_GPUWATTCH_BANK_BIT,
        collectors=p.whole("collector_units"),
        crossbar_ports=banks // 2 if kind == 1 else banks,
        read_share=_SHARE[kind],
    )
    router = RouterShape(
        flit_bit=int(p.unread("system.NoC0", "flit_bits", 32)),
        inputs=int(p.unread("system.NoC0", "input_ports", 6)),
        outputs=int(p.unread("system.NoC0", "output_ports", 6)),
        channels=int(p.unread("system.NoC0", "virtual_channel_per_port", 1)),
        depth=int(p.unread("system.NoC0", "input_buffer_entries_per_vc", 1)),
    )
    controller = MemoryController(
        controllers=int(p.unread("system.mc", "number_mcs", 1)),
        channels=int(p.unread("system.mc", "memory_channels_per_mc", 1)),
        bus_bit=int(p.unread("system.mc", "databus_width", 64)),
        address_bit=int(p.unread("system.mc", "addressbus_width", 32)),
        window=int(p.unread("system.mc", "req_window_size_per_channel", 32)),
        buffers=int(p.unread("system.mc", "IO_buffer_size_per_channel", 32)),
        block_byte=int(p.unread("system.mc", "block_size", 64)),
        peak_mbyte_per_s=p.unread("system.mc", "peak_transfer_rate", 3200.0),
        clock_hz=2e6 * p.unread("system.mc", "mc_clock", 200.0),  # both edges
    )
    l2_count = p.whole("number_of_L2s")
    listed = "number_of_cores" in architecture.parameters
    given = "target_core_clockrate" in architecture.parameters
    mhz = p.number("target_core_clockrate") if given else p.unread("system.core0", "clock_rate", 1000.0)
    pipelines = architecture.parameters["pipelines_per_core"]
    lanes = max(p.whole("FPU_per_core"), 1)
    return ChipDesign(
        name=architecture.name,
        feature_nm=p.number("core_tech_node"),
        sm_count=p.whole("number_of_cores", 1) if listed or not sm_count else sm_count,
        clock_hz=mhz * 1e6,
        registers=registers,
        instruction=p.cache("icache", (16384, 32, 4, 1, 1, 3, 8, 0)),
        data=p.cache("dcache"),
        constant=p.cache("ccache"),
        texture=p.cache("tcache"),
        shared=p.cache("sharedmemory"),
        l2=p.cache("L2") if l2_count else None,
        l2_count=l2_count,
        router=router,
        router_count=p.whole("horizontal_nodes") * p.whole("vertical_nodes"),
        controller=controller,
        dram_read_j=p.number("dram_rd_coeff"),
        dram_write_j=p.number("dram_wr_coeff"),
        dram_precharge_j=p.number("dram_pre_coeff"),
        device=p.choice("device_type", dict(enumerate(technology.TransistorType))),
        projection=p.choice("interconnect_projection_type", dict(enumerate(technology.WireProjection))),
        long_channel=bool(p.number("longer_channel_device")),
        temperature_k=p.number("temperature", 380.0),
        clock_ratio=p.number("core_clock_ratio"),
        warps=p.whole("number_hardware_threads"),
        issue=p.whole("issue_width"),
        decode=int(p.unread("system.core0", "decode_width", 1)),
        window=max(16, int(p.unread("system.core0", "instruction_window_size", 16))),
        pipelines=int(pipelines[0] if isinstance(pipelines, tuple) else pipelines),
        depth=int(p.unread("system.core0", "pipeline_depth", 8)),
        opcode_bit=int(p.unread("system.core0", "opcode_width", 9)),
        instruction_bit=int(p.unread("system.core0", "instruction_length", 32)),
        address_bit=int(p.unread("system", "physical_address_width", 32)),
        lanes=lanes,
        integer_lanes=p.whole("ALU_per_core"),
        sfu_lanes=p.whole("MUL_per_core"),
        warp_size=p.whole("warp_size"),
        ports=p.whole("memory_ports"),
        pending=p.whole("PRT_entries", 32),
        crossbar_lanes=lanes,
        notes=tuple(p.defaults),
    )


def count_tag_bits(cache: CacheShape, address_bit: int) -> int:
    """Return the tag bits of a way: address less index and offset, five state bits, in groups of four (CACTI 6.5)."""
    sets = cache.capacity_byte // (cache.block_byte * cache.ways)
    bits = address_bit - ceil(log2(sets)) - ceil(log2(cache.block_byte)) + 5
    return 4 * ceil(max(bits, 1) / 4)


class _FileNumbers:
    """Reads numbers of an architecture file and notes where McPAT's defaults fill gaps."""

    def __init__(self, architecture: ChipArchitecture) -> None:
        self.architecture = architecture
        self.defaults: list[str] = []

    def number(self, name: str, default: float | None = None) -> float:
        value = self.architecture.parameters.get(name)
        if isinstance(value, (int, float)):
            return float(value)
        if default is None:
            return self.architecture.number(name)
        self.defaults.append(f"{name} is not in the file: {default:g}")
        return default

    def whole(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))

    def choice(self, name: str, of: Mapping[int, Chosen]) -> Chosen:
        """Return the option that a number of the file selects."""
        number = self.number(name)
        if number not in of:
            raise bad_value(f"{self.architecture.name}: {name}", f"one of {', '.join(map(str, of))}", f"{number:g}")
        return of[int(number)]

    def unread(self, component: str, name: str, default: float) -> float:
        """Return a number that the reader keeps as text because the component model does not need it."""
        text = self.architecture.other.get(component, {}).get(name)
        if text is None:
            self.defaults.append(f"{component}.{name} is not in the file: {default:g}")
            return default
        return read_number(text.split(",")[0], f"{self.architecture.name}: {component}/{name}")

    def cache(self, name: str, default: tuple[int, ...] | None = None) -> CacheShape:
        """Return the shape of a cache from its ``_config`` and the sizes of its buffers."""
        config = self.architecture.parameters.get(f"{name}_config", default)
        assert isinstance(config, tuple)
        where = "system.L20" if name == "L2" else f"system.core0.{name}"
        text = self.architecture.other.get(where, {}).get("buffer_sizes", "")
        sizes = [int(piece) for piece in text.split(",") if piece.strip().isdigit()]
        a, b, c, d = sizes if len(sizes) == 4 else _BUFFERS
        capacity, block, ways, banks = config[:4]
        return CacheShape(capacity, block, max(ways, 1), banks, config[7] == 1, (a, b, c, d))


_NO_WRITE_BACK = (16, 16, 16, 0)
_WRITE_BACK = (16, 16, 16, 16)


class Assumption(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One assumption with its source."""

    value: float
    source: str


@cache
def known_assumptions() -> dict[str, Assumption]:
    """Return the numbers that the catalogue does not hold, by name."""
    data = files(technology.BOTTOM_UP_PACKAGE).joinpath("data", "assumed.yaml").read_bytes()
    return decode_yaml(data, dict[str, Assumption], "assumed.yaml")


def assumed_value(name: str) -> float:
    """Return the value of one assumption."""
    return known_assumptions()[name].value


def design_from_gpu(
    gpu: Gpu, feature_nm: float | None = None, voltage_v: float | None = None, temperature_k: float | None = None
) -> ChipDesign:
    """Return the design of a catalogue GPU.

    The node is that of its process (or ``feature_nm``). The voltage is the given one, else the published one at the
    top clock, else the process's stand-in, else nominal. A number that the catalogue lacks is an error that names it.
    """
    notes: list[str] = []
    size, volts = feature_nm, voltage_v
    if size is None:
        of = technology.find_process(gpu.process)
        size = of.feature_nm
        notes.append(f"{gpu.process}: F = {size:g} nm, from an SRAM cell of {of.cell_um2:g} um2 ({of.source})")
        if volts is None:
            volts = of.top_clock_v
    if voltage_v is None and gpu.power.voltage_v is not None:
        volts = float(np.max(gpu.power.voltage_v.value_at(gpu.clocks.max_hz)))
        notes.append(f"{volts:g} V at the top clock, published")
    elif voltage_v is None and volts is not None:
        notes.append(f"{volts:g} V at the top clock, a stand-in")
    lines, sector = int(assumed_value("line_byte")), int(assumed_value("sector_byte"))
    ways = int(assumed_value("cache_ways"))
    shared = _round_whole(gpu.need("sm.shared_byte"))
    words = int(assumed_value("warp_size"))
    unit = lines * ways
    banks, bank_bit = int(assumed_value("register_banks")), int(assumed_value("register_bank_bit"))
    memory = find_dram_energy(gpu.memory.kind)
    if memory.read_j_per_byte is None:
        notes.append(f"{gpu.memory.kind}: {memory.source}; device memory is left out")
    read, write = (
        None if joule is None else joule * sector for joule in (memory.read_j_per_byte, memory.write_j_per_byte)
    )
    l2_byte, l2_ways = _round_whole(gpu.need("l2.capacity_byte")), int(assumed_value("l2_ways"))
    slices = max(round(l2_byte / assumed_value("l2_slice_byte")), 1)
    slice_byte = max(l2_byte // slices // (lines * l2_ways), 1) * lines * l2_ways
    sms = _round_whole(gpu.sm_count)
    dies = read_shipped_table(technology.BOTTOM_UP_PACKAGE, "data", "dies.csv")
    die = next((row for row in dies if row["gpu"] == gpu.name), None)
    if die is not None:  # mean wire between SM and L2: a quarter of a square die's side each way to the middle
        link_um = 0.5e3 * sqrt(float(die["area_mm2"]))
        notes.append(f"die of {die['area_mm2']} mm2 ({die['source']}): wires between SMs and L2")
    else:
        link_um = 0.0
        notes.append("the die's area is not in the table: wires between SMs and L2 are left out")
    l1 = CacheShape(max(shared // 2 // unit, 1) * unit, lines, ways, 1, False, _NO_WRITE_BACK)
    constant_byte = int(assumed_value("constant_cache_byte"))
    return ChipDesign(
        gpu.name,
        size,
        sms,
        float(np.mean(gpu.clocks.max_hz)),
        RegisterFile(
            _round_whole(gpu.need("sm.register_count")),
            banks,
            bank_bit,
            int(assumed_value("collectors")),
            banks,
            arrays=int(assumed_value("partitions")) * words,
            operands=bank_bit / 32.0,
        ),
        CacheShape(int(assumed_value("instruction_cache_byte")), lines, ways, 1, False, _NO_WRITE_BACK),
        l1,
        CacheShape(constant_byte, 64, ways, 1, False, _NO_WRITE_BACK),
        l1,
        CacheShape(shared // words // 16 * 16, int(assumed_value("shared_bank_byte"))),
        CacheShape(slice_byte, lines, l2_ways, 1, True, _WRITE_BACK),
        slices,
        RouterShape(8 * sector, ceil(sms / 2), slices),
        1,
        _make_controller(gpu),
        read,
        write,
        0.0,
        voltage_v=volts,
        temperature_k=temperature_k if temperature_k is not None else assumed_value("temperature_k"),
        warps=max(_round_whole(gpu.need("sm.thread_count")) // words, 1),
        issue=int(assumed_value("partitions")),
        decode=1,
        depth=int(assumed_value("pipeline_depth")),
        instruction_bit=int(assumed_value("instruction_bit")),
        address_bit=int(assumed_value("address_bit")),
        lanes=max(_round_whole(gpu.pipes.cuda_flop_per_cycle.get(Dtype.FP32, 64.0)) // 2, 1),
        integer_lanes=_round_whole(gpu.pipes.int32_op_per_cycle or 32.0),
        sfu_lanes=_round_whole(gpu.pipes.sfu_op_per_cycle or 4.0),
        warp_size=words,
        pending=int(assumed_value("pending_requests")),
        words_of_access=words,
        crossbar_lanes=words,
        toggle=assumed_value("toggle"),
        fpu="fpu_dense",
        one_l1=True,
        link_um=link_um,
        notes=tuple(notes),
    )


def _make_controller(gpu: Gpu) -> MemoryController:
    """Return 64-bit controllers that share the bandwidth, at the rate their pins need for it."""
    bus = int(assumed_value("controller_bus_bit"))
    rate = float(np.mean(gpu.memory.byte_per_s))
    clock = float(np.mean(gpu.memory.clock_hz)) if gpu.memory.clock_hz is not None else 1e9
    count = max(round(rate / (2.0 * clock * bus / 8.0)), 1)
    queue = int(assumed_value("controller_queue"))
    address, sector = int(assumed_value("address_bit")), int(assumed_value("sector_byte"))
    return MemoryController(count, 1, bus, address, queue, queue, sector, rate / count / 1e6, 2.0 * clock)


def _round_whole(value: Sweepable) -> int:
    return round(float(np.mean(value)))
