"""Microbenchmarks on a device: buffers, launch shape, length of a launch, self-check, sustained row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wattcast.measure.microbench import checks
from wattcast.measure.microbench.device import Device, Kernel
from wattcast.measure.microbench.row import MicroRow
from wattcast.measure.microbench.stamps import read_stamps
from wattcast.measure.microbench.sustain import Bench, Load, sustain
from wattcast.measure.microbench.unit import SINK_WORDS, STAMP_WORDS, Benchmark
from wattcast.measure.nvrtc import CudaError, compile_cubin

LAUNCH_S = 0.004  # a launch lasts about this long
LONGEST_S = 0.5  # one iteration that takes longer is refused
MOST_BLOCKS = 1 << 17
FILL = r"""
extern "C" __global__ void fill(unsigned *out, unsigned long long words, unsigned seed)
{
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
    unsigned x = (unsigned)i * 2654435761u + (unsigned)(i >> 32) + seed;
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; out[i] = x ^ (x >> 16);
  }
}
"""
FILL_TYPES = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint)


def filled(words: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """What the fill kernel writes, on the host."""
    i = np.arange(words, dtype=np.uint64)
    x = (i * np.uint64(2654435761) + (i >> np.uint64(32)) + np.uint64(seed)).astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@dataclass
class Buffers:
    """What all kernels share: stamps, a sink, and two large buffers of random words."""

    device: Device
    stamps: int
    sink: int
    a: int
    b: int
    size: int  # of a and of b

    @classmethod
    def take(cls, device: Device, most: int = 4 << 30) -> Buffers:
        """At most ``most`` bytes each, a quarter of what is free at most, filled and looked at."""
        size = min(most, device.free_byte // 4) >> 21 << 21
        if size < 4 * device.l2_byte:
            raise CudaError(
                f"buffers of {size >> 20} MiB would fit into the free memory, and DRAM benchmarks need four "
                f"times the L2 ({4 * device.l2_byte >> 20} MiB). Free some memory first."
            )
        stamps, sink = device.allocate(8 * STAMP_WORDS * MOST_BLOCKS), device.allocate(4 * SINK_WORDS)
        buffers = cls(device, stamps, sink, device.allocate(size), device.allocate(size), size)
        kernel = device.load(compile_cubin(FILL, device.architecture, "fill.cu"), "fill")
        for address, seed in ((buffers.a, 11), (buffers.b, 12)):
            device.launch(kernel, 8 * device.sm_count, 256, (address, size // 4, seed), FILL_TYPES)
        for address, seed in ((buffers.a, 11), (buffers.b, 12)):
            if not np.array_equal(device.download(address, 4096, np.uint32), filled(4096, seed)):
                raise CudaError("a buffer does not hold what was written to it.")
        return buffers

    def size_of(self, working_set: str, blocks: int) -> int:
        """Bytes a benchmark may touch."""
        match working_set:
            case "dram":
                return self.size
            case "l2":
                return min(self.device.l2_byte // 4 >> 16 << 16, self.size)
            case "l1":
                return min(blocks * 65536, self.size)
            case _:
                return 1 << 20


@dataclass
class Ready:
    """A benchmark that is loaded and whose launch shape is known."""

    benchmark: Benchmark
    buffers: Buffers
    kernel: Kernel
    blocks: int
    size: int
    texture: int = 0

    def launch(self, iterations: int, seed: int | None = None, size: int | None = None) -> None:
        """One launch on the stream."""
        held, benchmark = self.buffers, self.benchmark
        second = self.texture or held.b
        wanted = benchmark.seed if seed is None else seed
        values = (held.stamps, held.sink, held.a, second, size or self.size, wanted, iterations)
        held.device.launch(self.kernel, self.blocks, benchmark.threads, values)

    def timed_s(self, iterations: int) -> float:
        """Seconds of one launch."""
        device = self.buffers.device
        begin = device.mark()
        self.launch(iterations)
        end = device.mark()
        end.synchronize()
        took_s = begin.elapsed_time(end) / 1e3
        device.recycle([begin, end])
        return took_s


def prepare(benchmark: Benchmark, buffers: Buffers, cubin: bytes) -> Ready:
    """Load a benchmark; as many blocks as it wants on each multiprocessor, all at once, or one for every chunk."""
    device = buffers.device
    kernel = device.load(cubin, benchmark.name, benchmark.shared_byte)
    fits = device.resident(kernel, benchmark.threads)
    if fits < 1:
        raise CudaError(f"{benchmark.name} does not fit on a multiprocessor.")
    sms = max(round(benchmark.share * device.sm_count), 1)
    blocks = sms * min(fits, benchmark.blocks_per_sm) * benchmark.turns
    size = buffers.size_of(benchmark.working_set, blocks)
    if benchmark.whole:
        blocks = min(size // benchmark.unit.chunk, MOST_BLOCKS * benchmark.stamped)
        size = blocks * benchmark.unit.chunk
    texture = device.texture(buffers.a, 1 << 20) if benchmark.working_set == "texture" else 0
    return Ready(benchmark, buffers, kernel, blocks, size, texture)


def calibrate(ready: Ready, wanted_s: float = LAUNCH_S) -> int:
    """Iterations that make a launch last about ``wanted_s``; approached from below, so that none runs away."""
    if ready.benchmark.whole:
        return 1
    iterations, took_s = 1, ready.timed_s(1)
    for _ in range(8):
        took_s = min(ready.timed_s(iterations) for _ in range(2))  # a host that stalls makes one look long
        if took_s > LONGEST_S:
            raise CudaError(f"{iterations} iterations of {ready.benchmark.name} take {took_s:.2f} s.")
        if took_s > 0.6 * wanted_s:
            break
        grow = min(max(0.9 * wanted_s / max(took_s, 1e-6), 1.5), 64.0)
        iterations = int(iterations * grow) + 1
    return max(round(iterations * wanted_s / took_s), 1)


def blank(bench: Bench, benchmark: Benchmark, repeat: int, date: str) -> MicroRow:
    """A row that says what is to be measured."""
    return MicroRow(
        row_id(benchmark.name, repeat, benchmark.version),
        benchmark.name,
        benchmark.group,
        operation=benchmark.unit.operation,
        curve=benchmark.curve,
        at=benchmark.at if benchmark.curve else None,
        repeat=repeat,
        version=benchmark.version,
        specification=benchmark.specification,
        run=bench.run,
        date=date,
        threads=benchmark.threads,
    )


def row_id(name: str, repeat: int, version: int = 1) -> str:
    """The same in every run, so that a campaign can be continued; another one for a kernel that has changed."""
    return name + (f"-v{version}" if version > 1 else "") + (f"-r{repeat}" if repeat else "")


def measure(bench: Bench, ready: Ready, row: MicroRow, iterations: int = 0) -> MicroRow:
    """Check once, find the length of a launch where it is not known, keep it up until settled, read the stamps."""
    benchmark = ready.benchmark
    checked = checks.run(ready) if row.repeat == 0 else ""
    iterations = iterations or calibrate(ready)
    once_s = ready.timed_s(iterations)
    load = Load(bench.device, lambda: ready.launch(iterations), once_s)
    row = sustain(bench, load, with_counts(row, benchmark, ready.blocks, iterations))
    stamped = -(-ready.blocks // benchmark.stamped)
    words = bench.device.download(ready.buffers.stamps, stamped * STAMP_WORDS, np.uint64)
    cycles = read_stamps(words.astype(np.uint64))
    per_block = benchmark.count(1, iterations) * benchmark.stamped
    # under the cap the clock wanders from launch to launch: cycles, which do not, over the mean time
    capped = "sw_power_cap" in row.throttle
    clock_hz = cycles.per_sm / row.launch_s if capped and row.launch_s else cycles.clock_hz
    return replace(
        row,
        checked=checked,
        cycles=cycles.per_sm,
        active_sms=cycles.active_sms,
        effective_clock_hz=clock_hz,
        operations_per_cycle_sm=per_block * cycles.blocks_per_sm / cycles.per_sm,
    )


def with_counts(row: MicroRow, benchmark: Benchmark, blocks: int, iterations: int) -> MicroRow:
    """What one launch does, as far as the source tells."""
    counts = [benchmark.count(blocks, iterations, part) for part in range(len(benchmark.parts))]
    units = [unit for unit, _ in benchmark.parts]
    return replace(
        row,
        blocks=blocks,
        iterations=iterations,
        operations=counts[0],
        parts={unit.name: n for unit, n in zip(units, counts, strict=True)} if len(units) > 1 else {},
        byte=sum(unit.byte * n for unit, n in zip(units, counts, strict=True)) or None,
        flop=sum(unit.flop * n for unit, n in zip(units, counts, strict=True)) or None,
    )


def copy_load(bench: Bench, buffers: Buffers) -> tuple[Callable[[], None], float, float]:
    """The driver's own copy of a whole buffer: how to enqueue one, its seconds and the bytes it reads and writes."""
    device, size = bench.device, buffers.size

    def enqueue() -> None:
        device.copy(buffers.b, buffers.a, size)

    begin = device.mark()
    enqueue()
    end = device.mark()
    end.synchronize()
    took_s = begin.elapsed_time(end) / 1e3
    device.recycle([begin, end])
    return enqueue, max(took_s, 1e-5), 2.0 * size
