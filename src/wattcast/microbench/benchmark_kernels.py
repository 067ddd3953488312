"""Run one microbenchmark on a device: check its results, calibrate its length, and sustain it until settled."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.errors import Refused, WattcastError
from wattcast.core.measured_rows import Plain
from wattcast.measure.cuda_device import CudaDevice, CudaError, CudaKernel, DeviceEvent, compile_cubin
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import (
    SettledWindow,
    SettlingRule,
    describe_window,
    find_settled_window,
    take_window,
)
from wattcast.microbench.tensor_units import PRECISIONS, WGMMA_STEPS
from wattcast.microbench.unit_source import CHECK_SEED, SINK_WORDS, STAMP_WORDS, Benchmark

MAX_POWER_OF = "largest of the sensor's readings"


@dataclass(frozen=True)
class MicroRow:
    """One measurement. ``None`` means not measured, never zero."""

    id: str  # name, version and repeat: the same in every run
    name: str
    group: str  # arithmetic, tensor, memory, structure, mix, idle, multimedia
    operation: str = ""  # what is counted
    curve: str = ""
    at: float | None = None  # place on that curve
    repeat: int = 0
    version: int = 1  # of the kernel: rows of an older one are kept, and count only while there is no newer one
    specification: str = ""  # which of the vendor's rates it is held against
    run: str = ""
    date: str = ""
    threads: int | None = None
    blocks: int | None = None
    iterations: int | None = None
    operations: float | None = None  # of one launch, all threads
    parts: dict[str, float] = field(default_factory=dict)  # operations of every unit of a mix
    byte: float | None = None  # moved by one launch
    flop: float | None = None
    launches: int | None = None  # in the window
    launch_s: float | None = None  # mean time of a launch, by events
    launch_spread_s: float | None = None
    cycles: float | None = None  # of a launch on a multiprocessor, by its own counter
    active_sms: int | None = None
    operations_per_cycle_sm: float | None = None
    effective_clock_hz: float | None = None  # cycles over the nanosecond timer, or over the mean time where capped
    sm_clock_hz: float | None = None  # as NVML reports it
    duration_s: float | None = None  # of the window
    power_w: float | None = None
    power_spread_w: float | None = None
    max_power_w: float | None = None
    max_power_of: str = ""
    idle_power_w: float | None = None  # a context open, no work, near in time
    memory_power_w: float | None = None
    temperature_c: float | None = None
    ticks: int | None = None
    throttle: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    checked: str = ""  # "passed", or "" where no self-check applies
    error: str = ""

    def plain(self) -> Plain:
        """For JSON, without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "", (), {})}


RULE = SettlingRule(settle_s=0.35, least_ticks=8, longest_s=4.5)
LEAST_S = 1.2  # of load before a row may end: the memory sensor averages over a second
AGAIN_TICKS, AGAIN_S = 5, 0.85  # the same of a repetition, which says nothing of memory power
MEMORY_S = 1.1  # of load, below which the memory sensor's average holds what went before
LINGER_S = 0.25  # that the power cap of the load before may still be reported
CHUNK_S = 0.02
LOOK_S = 0.04  # between looks at the samples, which take the host a millisecond or more
AHEAD = 4  # chunks queued before the host waits


@dataclass
class DeviceLoad:
    """Something to run again and again. ``enqueue`` puts one unit of it on the stream."""

    device: CudaDevice
    enqueue: Callable[[], None]
    once_s: float  # how long a unit takes
    period_s: float = 0.0  # begin one unit every so often instead of back to back


@dataclass
class DeviceBench:
    """What measuring a row needs."""

    device: CudaDevice
    sampler: Sampler
    run: str
    idle_power_w: float | None = None
    rule: SettlingRule = field(default_factory=lambda: RULE)
    least_s: float = LEAST_S

    def again(self) -> DeviceBench:
        """The same for a repetition: shorter where the power cap is not met."""
        rule = replace(self.rule, least_ticks=min(self.rule.least_ticks, AGAIN_TICKS))
        return replace(self, rule=rule, least_s=min(self.least_s, AGAIN_S))


def sustain_load(bench: DeviceBench, load: DeviceLoad, row: MicroRow) -> MicroRow:
    """Return the row with time, power, clock and memory power of the settled load."""
    bench.sampler.check()
    mark = bench.sampler.head
    zero = load.device.mark()
    zero.synchronize()
    started_s = time.monotonic()
    kept = _keep_up(bench, load, mark, zero, started_s)
    load.device.synchronize()
    late = kept.held is None
    ended_s = time.monotonic()
    held = kept.held or take_window(
        bench.sampler.since(mark), started_s + bench.rule.capped_settle_s, ended_s, bench.rule
    )
    edges_s = started_s + np.array([zero.elapsed_time(event) for event in kept.marks]) / 1e3
    load.device.recycle(kept.marks)
    unit_s = held.whole(edges_s) / kept.per_chunk
    return _seen(bench, row, held, started_s, unit_s, late)


@dataclass
class _Kept:
    """Events at the chunks' ends, and the settled window if there was one."""

    marks: list[DeviceEvent]
    per_chunk: int
    held: SettledWindow | None = None


def _keep_up(bench: DeviceBench, load: DeviceLoad, mark: int, zero: DeviceEvent, started_s: float) -> _Kept:
    per_chunk = 1 if load.period_s else max(round(CHUNK_S / load.once_s), 1)
    kept = _Kept([zero], per_chunk)
    waiting: deque[DeviceEvent] = deque([zero])
    looked_s = started_s
    while time.monotonic() - started_s < bench.rule.longest_s:
        while len(waiting) < (1 if load.period_s else AHEAD) + 1:
            if load.period_s:
                time.sleep(max(0.0, started_s + (len(kept.marks) - 1) * load.period_s - time.monotonic()))
            for _ in range(per_chunk):
                load.enqueue()
            kept.marks.append(load.device.mark())
            waiting.append(kept.marks[-1])
        waiting.popleft().synchronize()
        bench.sampler.check()
        if time.monotonic() - started_s < bench.least_s or time.monotonic() - looked_s < LOOK_S:
            continue
        looked_s = time.monotonic()
        recent = bench.sampler.since(mark).between(started_s + LINGER_S, np.inf)
        kept.held = find_settled_window(recent, started_s, bench.rule)
        if kept.held is not None:
            break
    return kept


def _seen(
    bench: DeviceBench,
    row: MicroRow,
    held: SettledWindow,
    started_s: float,
    unit_s: npt.NDArray[np.float64],
    late: bool,
) -> MicroRow:
    fields = describe_micro_window(held)
    if held.end_s - started_s < MEMORY_S:
        fields["memory_power_w"] = None
    return replace(
        row,
        **(fields | {"flags": (*held.flags, *(("unsettled",) if late else ()))}),
        launches=len(unit_s),
        launch_s=float(unit_s.mean()),
        launch_spread_s=float(unit_s.std(ddof=1)) if len(unit_s) > 1 else None,
        idle_power_w=bench.idle_power_w,
    )


def describe_micro_window(held: SettledWindow) -> dict[str, Any]:
    """Return the fields that a row takes from its window, with the largest power among the sensor's readings."""
    instant = held.samples.known("instant_w")
    fields = describe_window(held)
    if len(instant):
        fields |= {"max_power_w": float(instant.max()), "max_power_of": MAX_POWER_OF}
    return fields


ROUNDS = 2  # iterations of a check
LOOKED_BYTE = 64 << 20  # of a copy, at its begin and at its end


class SelfCheckFailed(WattcastError):
    """A kernel's results are not what they must be."""


def run_self_check(ready: ReadyKernel) -> str:
    """Check a kernel's results; return ``passed``, or nothing where no check applies, and raise when wrong."""
    name = ready.benchmark.check
    if not name:
        return ""
    {"copy": _copy, "fold": _fold, "count": _count, "wgmma": _wgmma}[name](ready)
    return "passed"


def _size(ready: ReadyKernel) -> int:
    """Bytes that ``ROUNDS`` iterations of all blocks cover exactly once (one, where they cover all they may)."""
    size = ready.benchmark.unit.chunk * ready.blocks * _rounds(ready)
    if size > ready.buffers.size:
        raise SelfCheckFailed(f"{ready.benchmark.name}: its check needs {size} bytes, more than the buffer has.")
    return size


def _rounds(ready: ReadyKernel) -> int:
    return 1 if ready.benchmark.whole else ROUNDS


def _copy(ready: ReadyKernel) -> None:
    held, size = ready.buffers, _size(ready)
    device = held.device
    device.zero(held.b, size)
    ready.launch(_rounds(ready), size=size)
    wrong, looked = 0, min(size, LOOKED_BYTE)
    for at in {0, size - looked}:  # the begin and the end of what is too large to look at as a whole
        source, copied = (device.download(address + at, looked // 4, np.uint32) for address in (held.a, held.b))
        wrong += int((source != copied).sum())
    if wrong:
        raise SelfCheckFailed(f"{ready.benchmark.name} copied {wrong} of the words looked at wrongly.")


def _fold(ready: ReadyKernel) -> None:
    held, size = ready.buffers, _size(ready)
    threads = ready.blocks * ready.benchmark.threads
    held.device.zero(held.sink, 4 * threads)
    ready.launch(ROUNDS, seed=CHECK_SEED, size=size)
    seen = np.bitwise_xor.reduce(held.device.download(held.sink, threads, np.uint32))
    wanted = np.bitwise_xor.reduce(held.device.download(held.a, size // 4, np.uint32))
    if seen != wanted:
        raise SelfCheckFailed(f"{ready.benchmark.name} folded to {int(seen):#x}, its buffer to {int(wanted):#x}.")


def _count(ready: ReadyKernel) -> None:
    held, benchmark = ready.buffers, ready.benchmark
    threads = min(ready.blocks * benchmark.threads, ready.size // 4)
    held.device.zero(held.b, 4 * threads)
    ready.launch(ROUNDS)
    found = held.device.download(held.b, threads, np.uint32)
    wanted = ROUNDS * benchmark.operations
    if not (found == wanted).all():
        raise SelfCheckFailed(f"{benchmark.name} counted {int(found.min())} to {int(found.max())}, not {wanted}.")


def _wgmma(ready: ReadyKernel) -> None:
    """All operands 0.5 (1 for integers): every element of the product is steps x k x 0.25 (x 1)."""
    held, benchmark = ready.buffers, ready.benchmark
    precision = benchmark.name.removeprefix("wgmma_")
    form = PRECISIONS[precision]
    threads = ready.blocks * benchmark.threads
    held.device.zero(held.sink, 4 * threads)
    ready.launch(ROUNDS, seed=CHECK_SEED)
    bits = held.device.download(held.sink, threads, np.uint32)
    found = bits.view(np.int32).astype(float) if precision == "int8" else bits.view(np.float32).astype(float)
    wanted = WGMMA_STEPS * form.k * form.half**2
    if not np.allclose(found, wanted, rtol=1e-3):
        raise SelfCheckFailed(f"{benchmark.name} computed {found.min():g} to {found.max():g}, not {wanted:g}.")


@dataclass(frozen=True)
class LaunchCycles:
    """Of one launch."""

    per_sm: float  # median over multiprocessors: from its first block's begin to its last one's end
    clock_hz: float  # median over blocks: cycles over nanoseconds
    active_sms: int
    blocks_per_sm: float  # mean over the multiprocessors that had any


def read_stamps(words: npt.NDArray[np.uint64]) -> LaunchCycles:
    """Read the time stamps of all blocks; refuse when some block did not run to its end."""
    table = words.reshape(-1, STAMP_WORDS).astype(np.int64)
    sm, begin, end, begin_ns, end_ns = table.T
    if not ((end > begin) & (end_ns > begin_ns)).all():
        raise Refused(f"{int((end <= begin).sum())} of {len(table)} blocks did not write their begin and end.")
    order = np.unique(sm)
    spans = np.array([end[sm == s].max() - begin[sm == s].min() for s in order], dtype=float)
    counts = np.array([(sm == s).sum() for s in order], dtype=float)
    clock_hz = np.median((end - begin) / (end_ns - begin_ns)) * 1e9
    return LaunchCycles(float(np.median(spans)), float(clock_hz), len(order), float(counts.mean()))


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


def fill_pattern(words: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return what the fill kernel writes, computed on the host."""
    i = np.arange(words, dtype=np.uint64)
    x = (i * np.uint64(2654435761) + (i >> np.uint64(32)) + np.uint64(seed)).astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@dataclass
class DeviceBuffers:
    """What all kernels share: stamps, a sink, and two large buffers of random words."""

    device: CudaDevice
    stamps: int
    sink: int
    a: int
    b: int
    size: int  # of a and of b

    @classmethod
    def take(cls, device: CudaDevice, most: int = 4 << 30) -> DeviceBuffers:
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
            if not np.array_equal(device.download(address, 4096, np.uint32), fill_pattern(4096, seed)):
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
class ReadyKernel:
    """A benchmark that is loaded and whose launch shape is known."""

    benchmark: Benchmark
    buffers: DeviceBuffers
    kernel: CudaKernel
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


def prepare_benchmark(benchmark: Benchmark, buffers: DeviceBuffers, cubin: bytes) -> ReadyKernel:
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
    return ReadyKernel(benchmark, buffers, kernel, blocks, size, texture)


def calibrate_iterations(ready: ReadyKernel, wanted_s: float = LAUNCH_S) -> int:
    """Find the iterations that make a launch last ``wanted_s``, from below, so that none runs away."""
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


def make_blank_micro_row(bench: DeviceBench, benchmark: Benchmark, repeat: int, date: str) -> MicroRow:
    """Return a row that names what is to be measured."""
    return MicroRow(
        micro_row_id(benchmark.name, repeat, benchmark.version),
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


def micro_row_id(name: str, repeat: int, version: int = 1) -> str:
    """Return an id that is the same in every run until the kernel changes."""
    return name + (f"-v{version}" if version > 1 else "") + (f"-r{repeat}" if repeat else "")


def measure_benchmark(bench: DeviceBench, ready: ReadyKernel, row: MicroRow, iterations: int = 0) -> MicroRow:
    """Check the kernel once, calibrate its launch where needed, sustain it until settled, read the stamps."""
    benchmark = ready.benchmark
    checked = run_self_check(ready) if row.repeat == 0 else ""
    iterations = iterations or calibrate_iterations(ready)
    once_s = ready.timed_s(iterations)
    load = DeviceLoad(bench.device, lambda: ready.launch(iterations), once_s)
    row = sustain_load(bench, load, add_counts(row, benchmark, ready.blocks, iterations))
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


def add_counts(row: MicroRow, benchmark: Benchmark, blocks: int, iterations: int) -> MicroRow:
    """Add the counts of one launch, as far as the source tells."""
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


def make_copy_load(bench: DeviceBench, buffers: DeviceBuffers) -> tuple[Callable[[], None], float, float]:
    """Return the driver's own copy of a whole buffer: how to enqueue one, its seconds and its bytes."""
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
