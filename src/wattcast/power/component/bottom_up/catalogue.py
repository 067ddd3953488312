"""A GPU of the catalogue as a design: vendor's numbers, a process, and one set of assumptions for the rest."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from math import ceil, sqrt

import msgspec
import numpy as np

from wattcast.arrays import Scalar
from wattcast.dtypes import Dtype
from wattcast.files import from_yaml
from wattcast.hardware import Gpu
from wattcast.power.component.bottom_up.design import Cache, Design, RegisterFile
from wattcast.power.component.bottom_up.memory_controller import Controller, dram
from wattcast.power.component.bottom_up.network import Router
from wattcast.power.component.bottom_up.technology import PACKAGE, process

_NO_WRITE_BACK = (16, 16, 16, 0)
_WRITE_BACK = (16, 16, 16, 16)


class Assumed(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One assumption."""

    value: float
    source: str


@cache
def assumptions() -> dict[str, Assumed]:
    """What the catalogue does not say, by name."""
    data = files(PACKAGE).joinpath("data", "assumed.yaml").read_bytes()
    return from_yaml(data, dict[str, Assumed], "assumed.yaml")


def assumed(name: str) -> float:
    """One of them."""
    return assumptions()[name].value


def from_gpu(
    gpu: Gpu, feature_nm: float | None = None, voltage_v: float | None = None, temperature_k: float | None = None
) -> Design:
    """The design of a catalogue GPU.

    Node from its process (or ``feature_nm``). Voltage: as given, else published for its top clock, else the process's
    stand-in, else nominal. A number the catalogue does not know is an error that names it.
    """
    notes: list[str] = []
    size, volts = _node(gpu, feature_nm, voltage_v, notes)
    lines, sector = int(assumed("line_byte")), int(assumed("sector_byte"))
    ways = int(assumed("cache_ways"))
    shared = _whole(gpu.need("sm.shared_byte"))
    words = int(assumed("warp_size"))
    unit = lines * ways
    banks, bank_bit = int(assumed("register_banks")), int(assumed("register_bank_bit"))
    memory = dram(gpu.memory.kind)
    if memory.read_j_per_byte is None:
        notes.append(f"{gpu.memory.kind}: {memory.source}; device memory is left out")
    read, write = (
        None if joule is None else joule * sector for joule in (memory.read_j_per_byte, memory.write_j_per_byte)
    )
    slices, slice_byte = _slices(gpu)
    sms = _whole(gpu.sm_count)
    link_um = _link_um(gpu, notes)
    l1 = Cache(max(shared // 2 // unit, 1) * unit, lines, ways, 1, False, _NO_WRITE_BACK)
    constant_byte = int(assumed("constant_cache_byte"))
    return Design(
        gpu.name,
        size,
        sms,
        float(np.mean(gpu.clocks.max_hz)),
        RegisterFile(
            _whole(gpu.need("sm.register_count")),
            banks,
            bank_bit,
            int(assumed("collectors")),
            banks,
            arrays=int(assumed("partitions")) * words,
            operands=bank_bit / 32.0,
        ),
        Cache(int(assumed("instruction_cache_byte")), lines, ways, 1, False, _NO_WRITE_BACK),
        l1,
        Cache(constant_byte, 64, ways, 1, False, _NO_WRITE_BACK),
        l1,
        Cache(shared // words // 16 * 16, int(assumed("shared_bank_byte"))),
        Cache(slice_byte, lines, int(assumed("l2_ways")), 1, True, _WRITE_BACK),
        slices,
        Router(8 * sector, ceil(sms / 2), slices),
        1,
        _controller(gpu),
        read,
        write,
        0.0,
        voltage_v=volts,
        temperature_k=temperature_k if temperature_k is not None else assumed("temperature_k"),
        warps=max(_whole(gpu.need("sm.thread_count")) // words, 1),
        issue=int(assumed("partitions")),
        decode=1,
        depth=int(assumed("pipeline_depth")),
        instruction_bit=int(assumed("instruction_bit")),
        address_bit=int(assumed("address_bit")),
        lanes=max(_whole(gpu.pipes.cuda_flop_per_cycle.get(Dtype.FP32, 64.0)) // 2, 1),
        integer_lanes=_whole(gpu.pipes.int32_op_per_cycle or 32.0),
        sfu_lanes=_whole(gpu.pipes.sfu_op_per_cycle or 4.0),
        warp_size=words,
        pending=int(assumed("pending_requests")),
        words_of_access=words,
        crossbar_lanes=words,
        toggle=assumed("toggle"),
        fpu="fpu_dense",
        one_l1=True,
        link_um=link_um,
        notes=tuple(notes),
    )


def _node(
    gpu: Gpu, feature_nm: float | None, voltage_v: float | None, notes: list[str]
) -> tuple[float, float | None]:
    """Feature size and voltage, with a note on each that was not the user's."""
    size, volts = feature_nm, voltage_v
    if size is None:
        of = process(gpu.process)
        size = of.feature_nm
        notes.append(f"{gpu.process}: F = {size:g} nm, from an SRAM cell of {of.cell_um2:g} um2 ({of.source})")
        if volts is None:
            volts = of.top_clock_v
    if voltage_v is None and gpu.power.voltage_v is not None:
        volts = float(np.max(gpu.power.voltage_v.at(gpu.clocks.max_hz)))
        notes.append(f"{volts:g} V at the top clock, published")
    elif voltage_v is None and volts is not None:
        notes.append(f"{volts:g} V at the top clock, a stand-in")
    return size, volts


def _slices(gpu: Gpu) -> tuple[int, int]:
    """L2 slices of about the assumed size, and the bytes of each in whole sets."""
    capacity = _whole(gpu.need("l2.capacity_byte"))
    count = max(round(capacity / assumed("l2_slice_byte")), 1)
    whole = int(assumed("line_byte") * assumed("l2_ways"))
    return count, max(capacity // count // whole, 1) * whole


def _controller(gpu: Gpu) -> Controller:
    """Controllers of 64 bits that share the bandwidth, at the rate a pin of theirs would need."""
    bus = int(assumed("controller_bus_bit"))
    rate = float(np.mean(gpu.memory.byte_per_s))
    clock = float(np.mean(gpu.memory.clock_hz)) if gpu.memory.clock_hz is not None else 1e9
    count = max(round(rate / (2.0 * clock * bus / 8.0)), 1)
    queue = int(assumed("controller_queue"))
    address, sector = int(assumed("address_bit")), int(assumed("sector_byte"))
    return Controller(count, 1, bus, address, queue, queue, sector, rate / count / 1e6, 2.0 * clock)


def _link_um(gpu: Gpu, notes: list[str]) -> float:
    """From an SM to the crossbar in the middle of a square die: a quarter of its side each way, on average."""
    text = files(PACKAGE).joinpath("data", "dies.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if row["gpu"] == gpu.name:
            notes.append(f"die of {row['area_mm2']} mm2 ({row['source']}): wires between SMs and L2")
            return 0.5e3 * sqrt(float(row["area_mm2"]))
    notes.append("the die's area is not in the table: wires between SMs and L2 are left out")
    return 0.0


def _whole(value: Scalar) -> int:
    return round(float(np.mean(value)))
