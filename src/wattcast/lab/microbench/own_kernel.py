"""Measure a kernel of the user's own as the microbenchmarks are measured: time, watts, joules.

A kernel of a CUDA source is compiled, its parameters are read from its signature, and launches run
back to back until power and clock have settled. What a pointer points to is a buffer of the size
that was told: numbers in [0, 1) where it holds floating-point numbers, zeros elsewhere, which are
safe as indices. Operands decide power, so that a kernel whose data look otherwise draws otherwise.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.errors import BadInput, bad_value
from wattcast.core.units import Dtype, parse
from wattcast.hardware import Gpu
from wattcast.lab.microbench.benchmark_kernels import DeviceBench, sustain_load
from wattcast.lab.microbench.microbench_results import MicroRow
from wattcast.measure.cuda_device import CudaDevice, CudaKernel, compile_cubin
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule, make_run_name, take_window

SCALARS: Mapping[str, Any] = {
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "signed char": ctypes.c_byte,
    "unsigned char": ctypes.c_ubyte,
    "short": ctypes.c_short,
    "unsigned short": ctypes.c_ushort,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "long": ctypes.c_long,
    "unsigned long": ctypes.c_ulong,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
REAL_TYPES = ("float", "double")
RANDOM_WORDS = 1 << 22  # numbers that are made once and repeated in larger buffers
IDLE_S = 0.9
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUALIFIER = re.compile(r"\b(const|volatile|restrict|__restrict__|__restrict|__grid_constant__)\b")


@dataclass(frozen=True)
class KernelParameter:
    """A parameter of a kernel as its signature has it."""

    name: str
    type: str  # of what a pointer points to, or of the value
    is_pointer: bool


@dataclass(frozen=True)
class LaunchShape:
    """Blocks and threads of a launch along three axes, and dynamic shared memory of a block."""

    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_byte: int = 0


@dataclass(frozen=True)
class OwnKernelResult:
    """What was measured of a kernel, and how many of its blocks fit on a multiprocessor."""

    row: MicroRow
    resident_blocks: int
    waves: float

    @property
    def energy_j(self) -> float:
        """Joules of a launch."""
        return (self.row.power_w or 0.0) * (self.row.launch_s or 0.0)

    @property
    def above_idle_j(self) -> float | None:
        """Joules of a launch above those of an idle device with a context."""
        if self.row.idle_power_w is None:
            return None
        return self.energy_j - self.row.idle_power_w * (self.row.launch_s or 0.0)


def parse_shape(text: str, option: str) -> tuple[int, int, int]:
    """Read ``"4096"``, ``"64x64"`` or ``"8x8x8"``."""
    try:
        sides = [int(side) for side in text.lower().split("x")]
    except ValueError:
        sides = []
    if not 1 <= len(sides) <= 3 or min(sides, default=0) < 1:
        raise bad_value(option, "one to three whole numbers, such as 4096 or 64x64", text)
    sides += [1] * (3 - len(sides))
    return (sides[0], sides[1], sides[2])


def find_parameters(source: str, kernel: str) -> tuple[KernelParameter, ...]:
    """Read the parameters of a kernel from its definition in a CUDA source."""
    text = _COMMENT.sub(" ", source)
    found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(kernel)}\s*\(([^)]*)\)", text)
    if found is None:
        names = sorted(set(re.findall(r"__global__[^;{}()]*?(\w+)\s*\(", text)))
        raise bad_value("--kernel", f"a __global__ function, one of {', '.join(names)}", kernel)
    listed = [part.strip() for part in found.group(1).split(",") if part.strip()]
    return tuple(_read_parameter(part, kernel) for part in listed if part != "void")


def _read_parameter(text: str, kernel: str) -> KernelParameter:
    plain = _QUALIFIER.sub(" ", text)
    is_pointer = "*" in plain or "[" in plain
    words = re.sub(r"[*&]|\[[^]]*\]", " ", plain).split()
    if len(words) < 2:
        raise bad_value(kernel, "a type and a name for each parameter", text)
    kind = " ".join(words[:-1])
    if not is_pointer and kind not in SCALARS:
        raise bad_value(f"{kernel}: {words[-1]}", f"one of {', '.join(SCALARS)}", kind)
    return KernelParameter(words[-1], kind, is_pointer)


def find_entry(cubin: bytes, kernel: str) -> str:
    """Return the name of a kernel in machine code: as it is, or as C++ mangles it."""
    names = re.findall(rb"\.text\.([\w$]+)", cubin)
    mangled = re.compile(rf"_Z{len(kernel)}{re.escape(kernel)}".encode())
    matches: list[str] = sorted({name.decode() for name in names if mangled.match(name)})
    if kernel.encode() in names:
        return kernel
    if len(matches) != 1:
        seen = ", ".join(sorted({name.decode() for name in names})) or "none"
        raise bad_value("--kernel", f"one kernel of that name (compiled: {seen})", kernel)
    return matches[0]


def read_settings(
    parameters: Sequence[KernelParameter],
    settings: Mapping[str, str],
) -> tuple[int | float, ...]:
    """Return the value of each parameter, and of pointers the bytes of their buffers.

    None is guessed: all that are not told are named at once."""
    known = [parameter.name for parameter in parameters]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise bad_value("--set", f"parameters of the kernel ({', '.join(known)})", unknown[0])
    lacking = [p for p in parameters if p.name not in settings]
    if lacking:
        examples = [f"--set {p.name}={'256MiB' if p.is_pointer else '1'}" for p in lacking]
        raise BadInput(
            "a value of every number and a size of every buffer is needed; not told: "
            f"{', '.join(p.name for p in lacking)}. For instance: {' '.join(examples)}"
        )
    return tuple(_read_setting(p, settings[p.name]) for p in parameters)


def _read_setting(parameter: KernelParameter, text: str) -> int | float:
    option = f"--set {parameter.name}"
    if parameter.is_pointer:
        byte = int(parse(text, "byte", option))
        if byte < 1:
            raise bad_value(option, "a size of at least one byte", text)
        return byte
    try:
        return float(text) if parameter.type in REAL_TYPES else int(text, 0)
    except ValueError:
        raise bad_value(option, f"a value of type {parameter.type}", text) from None


def make_operands(kind: str, byte: int) -> np.ndarray[Any, Any]:
    """Return what a buffer holds: numbers in [0, 1) of a floating-point type, else zeros."""
    if kind not in REAL_TYPES:
        return np.zeros(byte, dtype=np.uint8)
    dtype = np.float32 if kind == "float" else np.float64
    count = max(byte // np.dtype(dtype).itemsize, 1)
    some = np.random.default_rng(0).random(min(count, RANDOM_WORDS)).astype(dtype)
    return np.resize(some, count)


class OwnKernel:
    """A compiled kernel with its arguments in the device's memory."""

    def __init__(
        self,
        device: CudaDevice,
        source: Path,
        kernel: str,
        shape: LaunchShape,
        settings: Mapping[str, str],
    ) -> None:
        text = source.read_text(encoding="utf-8")
        parameters = find_parameters(text, kernel)
        values = read_settings(parameters, settings)
        cubin = compile_cubin(text, device.architecture, source.name)
        entry = find_entry(cubin, kernel)
        self.device = device
        self.shape = shape
        self.names = (kernel, entry)  # as its source and as the machine code have it
        self.kernel: CudaKernel = device.load(cubin, entry, shape.shared_byte)
        self.values: list[int | float] = []
        self.types: list[Any] = []
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.is_pointer:
                self.values.append(self._fill_buffer(parameter, int(value)))
                self.types.append(ctypes.c_void_p)
            else:
                self.values.append(value)
                self.types.append(SCALARS[parameter.type])

    def _fill_buffer(self, parameter: KernelParameter, byte: int) -> int:
        operands = make_operands(parameter.type, byte)
        address = self.device.allocate(max(byte, operands.nbytes))
        self.device.upload(address, operands)
        return address

    def launch(self) -> None:
        """Put one launch on the stream."""
        self.device.call(
            "cuLaunchKernel",
            self.kernel.function,
            *self.shape.blocks,
            *self.shape.threads,
            self.shape.shared_byte,
            self.device.stream,
            (tuple(self.values), tuple(self.types)),
            0,
        )

    def resident(self) -> int:
        """Blocks that fit on a multiprocessor at once."""
        return self.device.resident(self.kernel, int(np.prod(self.shape.threads)))


def launch_for_profiler(own: OwnKernel, launches: int) -> None:
    """Launch a kernel warm and then ``launches`` times, for a profiler that listens."""
    own.launch()
    own.device.synchronize()
    own.device.profile(True)
    for _ in range(launches):
        own.launch()
    own.device.synchronize()
    own.device.profile(False)


def measure_own_kernel(own: OwnKernel, quick: bool = False) -> OwnKernelResult:
    """Measure launches back to back until power and clock have settled."""
    shape = own.shape
    blocks = int(np.prod(shape.blocks))
    with Sampler("nvml") as sampler:
        bench = DeviceBench(own.device, sampler, make_run_name())
        if quick:
            bench.rule = replace(bench.rule, least_ticks=5, least_s=0.9)
        bench.idle_power_w = _measure_idle_w(sampler)
        row = MicroRow(
            own.names[0],
            own.names[0],
            "own",
            run=bench.run,
            threads=int(np.prod(shape.threads)),
            blocks=blocks,
        )
        row = sustain_load(bench, row, own.launch)
    resident = own.resident()
    waves = blocks / (own.device.sm_count * resident) if resident else float("inf")
    return OwnKernelResult(row, resident, waves)


def _measure_idle_w(sampler: Sampler) -> float:
    """Return the watts of the device with a context and nothing to do."""
    mark = sampler.head
    began_s = time.monotonic()
    time.sleep(IDLE_S)
    sampler.check()
    window = take_window(sampler.since(mark), began_s, time.monotonic(), SettlingRule())
    return float(window.ticks.power_w)


@dataclass(frozen=True)
class Roofline:
    """Where a kernel stands below the roofline of a device [Williams2009]."""

    flop: float
    dram_byte: float
    time_s: float
    peak_flop_per_s: float
    dram_byte_per_s: float
    precision: str

    @property
    def intensity(self) -> float:
        """FLOP for a byte of device memory."""
        return self.flop / self.dram_byte if self.dram_byte > 0.0 else float("inf")

    @property
    def bound(self) -> str:
        """The roof above the kernel."""
        ridge = self.peak_flop_per_s / self.dram_byte_per_s
        return "compute" if self.intensity >= ridge else "memory"

    @property
    def reached(self) -> float:
        """Share of the roof: the least time of the work over the measured one."""
        least_s = max(self.flop / self.peak_flop_per_s, self.dram_byte / self.dram_byte_per_s)
        return least_s / self.time_s


def make_roofline(
    gpu: Gpu,
    time_s: float,
    flop: Mapping[Dtype, float],
    dram_byte: float,
    clock_hz: float | None = None,
) -> Roofline:
    """Return the roofline of work in several precisions; each counts with its own peak.

    The clock is the measured one where there is one, else the device's highest."""
    hz = clock_hz or float(np.mean(gpu.need("clocks.boost_hz")))
    sms = float(np.mean(gpu.sm_count))
    rates = {
        dtype: sms * hz * float(np.mean(rate))
        for dtype, rate in gpu.pipes.cuda_flop_per_cycle.items()
    }
    lacking = [str(dtype) for dtype, count in flop.items() if count > 0.0 and dtype not in rates]
    if lacking:
        raise bad_value(gpu.name, f"a rate of {lacking[0]}", "none")
    total = sum(flop.values())
    least_s = sum(count / rates[dtype] for dtype, count in flop.items() if count > 0.0)
    names = [str(dtype) for dtype, count in flop.items() if count > 0.0]
    return Roofline(
        total,
        dram_byte,
        time_s,
        total / least_s if least_s > 0.0 else max(rates.values()),
        float(np.mean(gpu.need("memory.byte_per_s"))),
        ", ".join(names) or "none",
    )


FLOP_OF = {
    Dtype.FP32: (("fadd", 1.0), ("fmul", 1.0), ("ffma", 2.0)),
    Dtype.FP64: (("dadd", 1.0), ("dmul", 1.0), ("dfma", 2.0)),
}
_THREADS = "sass_thread_inst_executed_op_{}_pred_on.sum"


def count_flop(metrics: Mapping[str, float]) -> dict[Dtype, float]:
    """Count floating-point operations of a profiled launch, from sums or rates of threads.

    Tensor cores are not in them, nor are pairs of halves."""
    cycles = metrics.get("sm__cycles_elapsed.max", 0.0)
    counted = {}
    for dtype, kinds in FLOP_OF.items():
        total = 0.0
        for kind, each in kinds:
            name = _THREADS.format(kind)
            by_cycle = metrics.get(f"smsp__{name}.per_cycle_elapsed", 0.0) * cycles
            total += each * metrics.get(f"sm__{name}", metrics.get(f"smsp__{name}", by_cycle))
        counted[dtype] = total
    return counted
