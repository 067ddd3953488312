"""The chip a bottom-up model builds: what an architecture file or the catalogue says, as structures with sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any, TypeVar

from wattcast.errors import bad_value
from wattcast.power.component.architecture import Architecture, Value
from wattcast.power.component.bottom_up.memory_controller import Controller
from wattcast.power.component.bottom_up.network import Router
from wattcast.power.component.bottom_up.technology import Device, Projection

Chosen = TypeVar("Chosen")
_BUFFERS = (16, 16, 16, 0)  # miss, fill, prefetch, write-back entries of a cache, where a file says nothing


@dataclass(frozen=True)
class Cache:
    """A cache, or shared memory, of one SM or one L2 slice."""

    capacity_byte: int
    block_byte: int
    ways: int = 1
    banks: int = 1
    write_back: bool = False
    buffers: tuple[int, int, int, int] = _BUFFERS

    def __post_init__(self) -> None:
        for what in ("capacity_byte", "block_byte", "ways", "banks"):
            if getattr(self, what) < 1:
                raise bad_value(f"cache: {what}", "at least one", getattr(self, what))
        if self.capacity_byte < self.block_byte * self.ways:
            wanted = f"at least one set of {self.ways} blocks of {self.block_byte} bytes"
            raise bad_value("cache: capacity", wanted, f"{self.capacity_byte} bytes")


@dataclass(frozen=True)
class RegisterFile:
    """Registers of an SM and the way to the operand collectors."""

    registers: int
    banks: int
    bank_bit: int
    collectors: int
    crossbar_ports: int  # banks and collectors that the crossbar joins at once
    read_share: float = 1.0  # of a bank's energy that an operand is charged
    arrays: int = 1  # the registers lie in so many arrays, each with its own banks and crossbar
    operands: float = 32.0  # that one passage through the crossbar and the arbiter carries


@dataclass(frozen=True)
class Design:
    """Everything that decides energies, leakage and area. Counts are of one SM unless they say otherwise."""

    name: str
    feature_nm: float
    sm_count: int
    clock_hz: float
    registers: RegisterFile
    instruction: Cache
    data: Cache
    constant: Cache
    texture: Cache
    shared: Cache
    l2: Cache | None
    l2_count: int
    router: Router
    router_count: int
    controller: Controller
    dram_read_j: float | None = None  # of a request
    dram_write_j: float | None = None
    dram_precharge_j: float | None = None
    device: Device = Device.HIGH_PERFORMANCE
    projection: Projection = Projection.AGGRESSIVE
    long_channel: bool = True
    temperature_k: float = 360.0
    voltage_v: float | None = None
    clock_ratio: float = 1.0  # of the units and registers, over the clock that counts
    unified: bool = False  # one pipeline for integer and floating point
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
        for what in ("sm_count", "warps", "issue", "lanes", "warp_size", "ports", "pending", "depth"):
            if getattr(self, what) < 1:
                raise bad_value(f"{self.name}: {what}", "at least one", getattr(self, what))
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


def from_architecture(architecture: Architecture, sm_count: int | None = None) -> Design:
    """The design an architecture file describes, as GPUWattch's McPAT reads it.

    What the file leaves out has McPAT's default. ``sm_count`` is the simulator's, where the file does not say.
    """
    p = _Parameters(architecture)
    kind = p.choice("architecture", {number: number for number in _SHARE})
    banks, collectors = int(p.number("rf_banks")), int(p.number("collector_units"))
    config = {name: p.config(f"{name}_config") for name in ("ccache", "tcache", "dcache", "sharedmemory", "L2")}
    l2s = int(p.number("number_of_L2s"))
    cores = sm_count or int(p.number("number_of_cores", 1))
    given = "target_core_clockrate" in architecture.parameters
    mhz = p.number("target_core_clockrate") if given else p.beside("system.core0", "clock_rate", 1000.0)
    ports = int(p.beside("system.NoC0", "input_ports", 6)), int(p.beside("system.NoC0", "output_ports", 6))
    return Design(
        architecture.name,
        p.number("core_tech_node"),
        cores,
        mhz * 1e6,
        RegisterFile(
            int(p.number("archi_Regs_IRF_size")),
            banks,
            _GPUWATTCH_BANK_BIT,
            collectors,
            banks // 2 if kind == 1 else banks,
            _SHARE[kind],
        ),
        p.cache("icache", p.config("icache_config", (16384, 32, 4, 1, 1, 3, 8, 0))),
        p.cache("dcache", config["dcache"]),
        p.cache("ccache", config["ccache"]),
        p.cache("tcache", config["tcache"]),
        p.cache("sharedmemory", config["sharedmemory"]),
        p.cache("L20", config["L2"]) if l2s else None,
        l2s,
        Router(
            int(p.beside("system.NoC0", "flit_bits", 32)),
            *ports,
            int(p.beside("system.NoC0", "virtual_channel_per_port", 1)),
            int(p.beside("system.NoC0", "input_buffer_entries_per_vc", 1)),
        ),
        int(p.number("horizontal_nodes")) * int(p.number("vertical_nodes")),
        Controller(
            int(p.beside("system.mc", "number_mcs", 1)),
            int(p.beside("system.mc", "memory_channels_per_mc", 1)),
            int(p.beside("system.mc", "databus_width", 64)),
            int(p.beside("system.mc", "addressbus_width", 32)),
            int(p.beside("system.mc", "req_window_size_per_channel", 32)),
            int(p.beside("system.mc", "IO_buffer_size_per_channel", 32)),
            int(p.beside("system.mc", "block_size", 64)),
            p.beside("system.mc", "peak_transfer_rate", 3200.0),
            2e6 * p.beside("system.mc", "mc_clock", 200.0),  # both edges
        ),
        p.number("dram_rd_coeff"),
        p.number("dram_wr_coeff"),
        p.number("dram_pre_coeff"),
        p.choice("device_type", dict(enumerate(Device))),
        p.choice("interconnect_projection_type", dict(enumerate(Projection))),
        bool(p.number("longer_channel_device")),
        p.number("temperature", 380.0),
        None,
        p.number("core_clock_ratio"),
        kind == 2,
        int(p.number("number_hardware_threads")),
        int(p.number("issue_width")),
        int(p.beside("system.core0", "decode_width", 1)),
        max(16, int(p.beside("system.core0", "instruction_window_size", 16))),
        int(_first(architecture.parameters["pipelines_per_core"])),
        int(p.beside("system.core0", "pipeline_depth", 8)),
        int(p.beside("system.core0", "opcode_width", 9)),
        int(p.beside("system.core0", "instruction_length", 32)),
        int(p.beside("system", "physical_address_width", 32)),
        max(int(p.number("FPU_per_core")), 1),
        int(p.number("ALU_per_core")),
        int(p.number("MUL_per_core")),
        int(p.number("warp_size")),
        int(p.number("memory_ports")),
        int(p.number("PRT_entries", 32)),
        crossbar_lanes=max(int(p.number("FPU_per_core")), 1),
        notes=tuple(p.defaults),
    )


def tag_bits(cache: Cache, address_bit: int) -> int:
    """Tag of a way: address less index and offset, five state bits, in whole groups of four (CACTI)."""
    sets = cache.capacity_byte // (cache.block_byte * cache.ways)
    bits = address_bit - ceil(log2(sets)) - ceil(log2(cache.block_byte)) + 5
    return 4 * ceil(max(bits, 1) / 4)


def changed(design: Design, **fields: Any) -> Design:
    """The design with some fields replaced, checked again."""
    return replace(design, **fields)


class _Parameters:
    """A file's numbers, with McPAT's defaults noted where it is silent."""

    def __init__(self, architecture: Architecture) -> None:
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

    def choice(self, name: str, of: Mapping[int, Chosen]) -> Chosen:
        """What a number of the file stands for."""
        number = self.number(name)
        if number not in of:
            raise bad_value(f"{self.architecture.name}: {name}", f"one of {', '.join(map(str, of))}", f"{number:g}")
        return of[int(number)]

    def beside(self, component: str, name: str, default: float) -> float:
        """A number the reader keeps as text because the component model does not need it."""
        text = self.architecture.other.get(component, {}).get(name)
        if text is None:
            self.defaults.append(f"{component}.{name} is not in the file: {default:g}")
            return default
        try:
            return float(text.split(",")[0])
        except ValueError:
            raise bad_value(f"{self.architecture.name}: {component}/{name}", "a number", text) from None

    def config(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self.architecture.parameters.get(name, default)
        assert isinstance(value, tuple)
        return value

    def cache(self, component: str, config: tuple[int, ...]) -> Cache:
        where = f"system.{component}" if component == "L20" else f"system.core0.{component}"
        text = self.architecture.other.get(where, {}).get("buffer_sizes", "")
        sizes = [int(piece) for piece in text.split(",") if piece.strip().isdigit()]
        a, b, c, d = sizes if len(sizes) == 4 else _BUFFERS
        capacity, block, ways, banks = config[:4]
        return Cache(capacity, block, max(ways, 1), banks, config[7] == 1, (a, b, c, d))


def _first(value: Value) -> float:
    return float(value[0]) if isinstance(value, tuple) else float(value)
