"""Run one microbenchmark on a device: check its results, calibrate its length, and sustain it until
settled.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cache, partial
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import Refused, files
from wattcast.core.errors import WattcastError
from wattcast.lab.microbench.arithmetic_units import (
    LINE_BYTE,
    RING_FACTOR,
    RING_STEP,
    WARM_HOPS,
)
from wattcast.lab.microbench.microbench_results import MicroRow, micro_row_id
from wattcast.lab.microbench.tensor_units import (
    PRECISIONS,
    ROW_TILES,
    TILE_BYTE,
    TILE_ROWS,
    WGMMA_STEPS,
)
from wattcast.lab.microbench.unit_source import (
    CHECK_SEED,
    SINK_WORDS,
    STAMP_WORDS,
    Benchmark,
)
from wattcast.measure.cuda_device import (
    CudaDevice,
    CudaError,
    CudaKernel,
    compile_cubin,
)
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import (
    CHUNKS_AHEAD,
    SettledWindow,
    SettlingRule,
    describe_window,
    hold_load,
)

MAX_POWER_OF = "largest of the sensor's readings"
# the memory sensor averages over a second, so a load lasts longer
RULE = SettlingRule(
    settle_s=0.35,
    least_ticks=8,
    longest_s=4.5,
    least_s=1.2,
    linger_s=0.25,
    look_s=0.04,
)
MEMORY_S = 1.1  # of load, below which the memory sensor's average holds what went before
CHUNK_S = 0.02
CHECK_ROUNDS = 2  # iterations of a check
COMPARED_BYTE = 64 << 20  # of a copy, at its begin and at its end
LAUNCH_S = 0.004  # a launch lasts about this long
LATENCY_LAUNCHES = 3
LONGEST_S = 0.5  # one iteration that takes longer is refused
MOST_BLOCKS = 1 << 17
RING_TYPES = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong)
FILL_TYPES = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint)


@dataclass
class DeviceBench:
    """The device, the sampler and the rule with which rows are measured."""

    device: CudaDevice
    sampler: Sampler
    run: str
    idle_power_w: float | None = None
    rule: SettlingRule = field(default_factory=lambda: RULE)


def sustain_load(
    bench: DeviceBench,
    row: MicroRow,
    enqueue: Callable[[], None],
    period_s: float = 0.0,
) -> MicroRow:
    """Return the row with time, power, clock and memory power of the settled load.

    ``enqueue`` puts one unit of the load on the stream. Units run back to back, or begin every
    ``period_s``."""
    per_chunk = 1 if period_s else max(round(CHUNK_S / time_unit_s(bench.device, enqueue)), 1)
    queued = 0
    began_s = time.monotonic()

    def queue_chunk() -> None:
        nonlocal queued
        if period_s:
            time.sleep(max(0.0, began_s + queued * period_s - time.monotonic()))
        for _ in range(per_chunk):
            enqueue()
        queued += 1

    ahead = 2 if period_s else CHUNKS_AHEAD
    load = hold_load(
        bench.sampler,
        bench.device,
        queue_chunk,
        bench.rule,
        ahead=ahead,
    )
    bench.device.recycle(list(load.marks))
    fields = describe_micro_window(load.window)
    unit_s = load.chunk_s / per_chunk
    if load.window.end_s - load.started_s < MEMORY_S:
        fields["memory_power_w"] = None
    return replace(
        row,
        **fields,
        launches=len(unit_s),
        launch_s=float(unit_s.mean()),
        launch_spread_s=float(unit_s.std(ddof=1)) if len(unit_s) > 1 else None,
        idle_power_w=bench.idle_power_w,
    )


def time_unit_s(device: CudaDevice, enqueue: Callable[[], None]) -> float:
    """Return the seconds of one unit once it is warm; the shorter of two, since a host that stalls
    makes one long.
    """
    enqueue()
    took_s = []
    for _ in range(2):
        begin = device.mark()
        enqueue()
        end = device.mark()
        end.synchronize()
        took_s.append(begin.elapsed_time(end) / 1e3)
        device.recycle([begin, end])
    return max(min(took_s), 1e-6)


def describe_micro_window(settled: SettledWindow) -> dict[str, Any]:
    """Return the fields that a row takes from its window, with the largest power among the sensor's
    readings.
    """
    instant = settled.samples.known("instant_w")
    largest = (
        {"max_power_w": float(instant.max()), "max_power_of": MAX_POWER_OF} if len(instant) else {}
    )
    return describe_window(settled) | largest


class SelfCheckFailed(WattcastError):
    """A kernel's results are not what they must be."""


def run_self_check(ready: ReadyKernel) -> str:
    """Check a kernel's results; return ``passed``, or nothing where no check applies, and raise
    when wrong.
    """
    benchmark = ready.benchmark
    rounds = 1 if benchmark.whole else CHECK_ROUNDS
    # bytes that all blocks cover exactly once
    covered = benchmark.unit.chunk * ready.blocks * rounds
    if benchmark.check in ("copy", "fold") and covered > ready.buffers.size:
        raise SelfCheckFailed(
            f"{benchmark.name}: its check needs {covered} bytes, more than the buffer has."
        )
    match benchmark.check:
        case "copy":
            _check_copied(ready, rounds, covered)
        case "fold":
            _check_folded(ready, rounds, covered)
        case "count":
            _check_counted(ready, rounds)
        case "wgmma":
            _check_products(ready, rounds)
    return "passed" if benchmark.check else ""


def _check_copied(
    ready: ReadyKernel,
    rounds: int,
    covered: int,
) -> None:
    """Compare the beginning and the end of a copy with its source."""
    buffers = ready.buffers
    buffers.device.zero(buffers.b, covered)
    ready.launch(rounds, size=covered)
    wrong = 0
    compared = min(covered, COMPARED_BYTE)
    for at in {0, covered - compared}:
        source = buffers.device.download(buffers.a + at, compared // 4, np.uint32)
        copied = buffers.device.download(buffers.b + at, compared // 4, np.uint32)
        wrong += int((source != copied).sum())
    if wrong:
        raise SelfCheckFailed(
            f"{ready.benchmark.name} copied {wrong} of the words looked at wrongly."
        )


def _check_folded(
    ready: ReadyKernel,
    rounds: int,
    covered: int,
) -> None:
    """Compare the exclusive or of what a kernel read with that of its buffer."""
    buffers = ready.buffers
    device = buffers.device
    threads = ready.blocks * ready.benchmark.threads
    device.zero(buffers.sink, 4 * threads)
    ready.launch(rounds, seed=CHECK_SEED, size=covered)
    folded = int(np.bitwise_xor.reduce(device.download(buffers.sink, threads, np.uint32)))
    expected = int(np.bitwise_xor.reduce(device.download(buffers.a, covered // 4, np.uint32)))
    if folded != expected:
        raise SelfCheckFailed(
            f"{ready.benchmark.name} folded to {folded:#x}, its buffer to {expected:#x}."
        )


def _check_counted(ready: ReadyKernel, rounds: int) -> None:
    """Check that every word was added to as often as the kernel says."""
    buffers = ready.buffers
    words = min(ready.blocks * ready.benchmark.threads, ready.size // 4)
    buffers.device.zero(buffers.b, 4 * words)
    ready.launch(rounds)
    counted = buffers.device.download(buffers.b, words, np.uint32)
    expected = rounds * ready.benchmark.operations
    if not (counted == expected).all():
        raise SelfCheckFailed(
            f"{ready.benchmark.name} counted {int(counted.min())} to {int(counted.max())}, "
            f"not {expected}."
        )


def _check_products(ready: ReadyKernel, rounds: int) -> None:
    """Check the elements of a product whose operands are all 0.5 (1 for integers)."""
    buffers = ready.buffers
    threads = ready.blocks * ready.benchmark.threads
    name = ready.benchmark.name
    precision = name.removeprefix("wgmma_").removeprefix("sparse_")
    buffers.device.zero(buffers.sink, 4 * threads)
    ready.launch(rounds, seed=CHECK_SEED)
    bits = buffers.device.download(buffers.sink, threads, np.uint32)
    computed = bits.view(np.int32 if precision == "int8" else np.float32).astype(float)
    element = WGMMA_STEPS * PRECISIONS[precision].k * PRECISIONS[precision].half ** 2
    if not np.allclose(computed, element, rtol=1e-3):
        raise SelfCheckFailed(
            f"{name} computed {computed.min():g} to {computed.max():g}, not {element:g}."
        )


@dataclass(frozen=True)
class LaunchCycles:
    """Cycles of one launch."""

    per_sm: float  # median over multiprocessors: from its first block's begin to its last one's end
    clock_hz: float  # median over blocks: cycles over nanoseconds
    active_sms: int
    blocks_per_sm: float  # mean over the multiprocessors that had any


def read_stamps(words: npt.NDArray[np.uint64]) -> LaunchCycles:
    """Read the time stamps of all blocks; refuse when some block did not run to its end."""
    table = words.reshape(-1, STAMP_WORDS).astype(np.int64)
    sm, begin, end, begin_ns, end_ns = table.T
    if not ((end > begin) & (end_ns > begin_ns)).all():
        raise Refused(
            f"{int((end <= begin).sum())} of {len(table)} blocks did not write their begin and end."
        )
    order, counts = np.unique(sm, return_counts=True)
    spans = [float(end[sm == s].max() - begin[sm == s].min()) for s in order]
    clock_hz = np.median((end - begin) / (end_ns - begin_ns)) * 1e9
    return LaunchCycles(float(np.median(spans)), float(clock_hz), len(order), float(counts.mean()))


def fill_pattern(words: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return what the fill kernel writes, computed on the host."""
    i = np.arange(words, dtype=np.uint64)
    x = (i * np.uint64(2654435761) + (i >> np.uint64(32)) + np.uint64(seed)).astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))


@dataclass
class DeviceBuffers:
    """Memory that all kernels share: stamps, a sink, and two large buffers of random words."""

    device: CudaDevice
    stamps: int
    sink: int
    a: int
    b: int
    size: int  # of a and of b

    @classmethod
    def allocate(
        cls,
        device: CudaDevice,
        most: int = 4 << 30,
    ) -> DeviceBuffers:
        """Allocate, fill and verify buffers of at most ``most`` bytes and a quarter of the free
        memory each.
        """
        # of the memory not yet taken
        size = min(most, int(device.call("cuMemGetInfo")) // 4) >> 21 << 21
        if size < 4 * device.l2_byte:
            raise CudaError(
                f"buffers of {size >> 20} MiB would fit into the free memory, and DRAM "
                "benchmarks need four "
                f"times the L2 ({4 * device.l2_byte >> 20} MiB). Free some memory first."
            )
        stamps = device.allocate(8 * STAMP_WORDS * MOST_BLOCKS)
        sink = device.allocate(4 * SINK_WORDS)
        buffers = cls(
            device,
            stamps,
            sink,
            device.allocate(size),
            device.allocate(size),
            size,
        )
        kernel = device.load(compile_buffer_kernels(device.architecture), "fill")
        for address, seed in ((buffers.a, 11), (buffers.b, 12)):
            device.launch(
                kernel,
                8 * device.sm_count,
                256,
                (address, size // 4, seed),
                FILL_TYPES,
            )
            if not np.array_equal(
                device.download(address, 4096, np.uint32), fill_pattern(4096, seed)
            ):
                raise CudaError("a buffer does not hold what was written to it.")
        return buffers

    def working_set_byte(
        self,
        working_set: str,
        blocks: int,
    ) -> int:
        """Return the bytes that a benchmark may touch."""
        sizes = {
            "dram": self.size,
            "l2": self.device.l2_byte // 4 >> 16 << 16,
            "l1": blocks * 65536,
        }
        return min(sizes[working_set], self.size) if working_set in sizes else 1 << 20


@dataclass
class ReadyKernel:
    """A benchmark that is loaded and whose launch shape is known."""

    benchmark: Benchmark
    buffers: DeviceBuffers
    kernel: CudaKernel
    blocks: int
    size: int
    b: int = 0  # what takes the place of the second buffer: a texture, a tensor map or a ring
    lent: tuple[int, ...] = ()  # memory of this kernel alone

    def launch(
        self,
        iterations: int,
        seed: int | None = None,
        size: int | None = None,
    ) -> None:
        """Put one launch on the stream."""
        buffers = self.buffers
        benchmark = self.benchmark
        chosen_seed = benchmark.seed if seed is None else seed
        values = (
            buffers.stamps,
            buffers.sink,
            buffers.a,
            self.b or buffers.b,
            size or self.size,
            chosen_seed,
            iterations,
        )
        buffers.device.launch(self.kernel, self.blocks, benchmark.threads, values)

    def read_cycles(self) -> LaunchCycles:
        """Read the time stamps of the last launch."""
        stamped = -(-self.blocks // self.benchmark.stamped)
        words = self.buffers.device.download(self.buffers.stamps, stamped * STAMP_WORDS, np.uint64)
        return read_stamps(words.astype(np.uint64))

    def discard(self) -> None:
        """Forget the kernel and give back its own memory."""
        self.buffers.device.synchronize(5.0)
        self.buffers.device.unload(self.kernel)
        for address in self.lent:
            self.buffers.device.free(address)


def prepare_benchmark(
    benchmark: Benchmark,
    buffers: DeviceBuffers,
    cubin: bytes,
) -> ReadyKernel:
    """Load a benchmark; as many blocks as it wants on each multiprocessor, all at once, or one for
    every chunk.

    A ring of addresses lies in the second buffer, or in memory of its own where that is too small.
    """
    device = buffers.device
    b = 0
    lent: tuple[int, ...] = ()
    kernel = device.load(cubin, benchmark.name, benchmark.shared_byte)
    fits = device.resident(kernel, benchmark.threads)
    if fits < 1:
        raise CudaError(f"{benchmark.name} does not fit on a multiprocessor.")
    sms = max(round(benchmark.share * device.sm_count), 1)
    blocks = sms * min(fits, benchmark.blocks_per_sm) * benchmark.turns
    blocks = max(blocks // benchmark.cluster, 1) * benchmark.cluster
    size = buffers.working_set_byte(benchmark.working_set, blocks)
    if benchmark.whole:
        blocks = min(size // benchmark.unit.chunk, MOST_BLOCKS * benchmark.stamped)
        size = blocks * benchmark.unit.chunk
    if benchmark.working_set == "texture":
        b = device.texture(buffers.a, 1 << 20)
    elif benchmark.tiles:
        row_byte = TILE_BYTE * ROW_TILES
        size = size // (row_byte * TILE_ROWS) * row_byte * TILE_ROWS
        b = device.allocate(128)
        lent = (b,)
        device.upload(
            b,
            device.tensor_map(
                buffers.a,
                row_byte // 2,
                size // row_byte,
                TILE_BYTE // 2,
                TILE_ROWS,
            ),
        )
    elif benchmark.timed and benchmark.ring[0]:
        nodes, stride = benchmark.ring
        b = buffers.b if nodes * stride <= buffers.size else device.allocate(nodes * stride)
        lent = () if b == buffers.b else (b,)
        link = device.load(compile_buffer_kernels(device.architecture), "link_ring")
        device.launch(
            link,
            8 * device.sm_count,
            256,
            (b, nodes, stride),
            RING_TYPES,
        )
    return ReadyKernel(
        benchmark,
        buffers,
        kernel,
        blocks,
        size,
        b,
        lent,
    )


@cache
def compile_buffer_kernels(architecture: str) -> bytes:
    """Compile the kernels that fill a buffer with random words and that link a ring in it."""
    text = Template(
        files("wattcast.lab.microbench").joinpath("buffers.cu").read_text(encoding="utf-8")
    )
    source = text.substitute(
        factor=RING_FACTOR,
        step=RING_STEP,
        line=LINE_BYTE,
    )
    return compile_cubin(source, architecture, "buffers.cu")


def calibrate_iterations(ready: ReadyKernel, wanted_s: float = LAUNCH_S) -> int:
    """Find the iterations that make a launch last ``wanted_s``, from below, so that none runs
    away.
    """
    if ready.benchmark.whole:
        return 1
    if ready.benchmark.ring[0]:
        return WARM_HOPS // ready.benchmark.steps
    iterations = 1
    for _ in range(8):
        took_s = time_unit_s(ready.buffers.device, partial(ready.launch, iterations))
        if took_s > LONGEST_S:
            raise CudaError(
                f"{iterations} iterations of {ready.benchmark.name} take {took_s:.2f} s."
            )
        if took_s > 0.6 * wanted_s:
            break
        iterations = int(iterations * min(max(0.9 * wanted_s / took_s, 1.5), 64.0)) + 1
    return max(round(iterations * wanted_s / took_s), 1)


def make_blank_row(
    run: str,
    benchmark: Benchmark,
    repeat: int,
) -> MicroRow:
    """Return a row that names what is to be measured."""
    b = benchmark
    what = micro_row_id(b.name, repeat, b.version), b.name, b.group, b.unit.operation, b.curve, b.at
    return MicroRow(
        *what,
        repeat,
        b.version,
        b.specification,
        run,
        threads=b.threads,
    )


def measure_benchmark(
    bench: DeviceBench,
    ready: ReadyKernel,
    row: MicroRow,
    iterations: int = 0,
) -> MicroRow:
    """Check the kernel once, calibrate its launch where needed, sustain it until settled, read the
    stamps.
    """
    benchmark = ready.benchmark
    checked = run_self_check(ready) if row.repeat == 0 else ""
    iterations = iterations or calibrate_iterations(ready)
    row = add_counts(row, benchmark, ready.blocks, iterations)
    if (
        benchmark.timed
    ):  # cycles from one operation to the next that waits for it: the fewest of a few launches
        readings = []
        for seed in range(1, LATENCY_LAUNCHES + 1):
            ready.launch(iterations, seed)
            readings.append(ready.read_cycles())
        cycles = min(readings, key=lambda cycles: cycles.per_sm)
        row = replace(row, latency_cycles=cycles.per_sm / (benchmark.operations * iterations))
    else:
        row = sustain_load(bench, row, partial(ready.launch, iterations))
        cycles = ready.read_cycles()
        per_block = benchmark.count(1, iterations) * benchmark.stamped
        row = replace(
            row,
            checked=checked,
            operations_per_cycle_sm=per_block * cycles.blocks_per_sm / cycles.per_sm,
        )
    # under the cap the clock wanders from launch to launch: cycles, which do not, over the mean
    # time
    capped = "sw_power_cap" in row.throttle
    clock_hz = cycles.per_sm / row.launch_s if capped and row.launch_s else cycles.clock_hz
    return replace(
        row,
        cycles=cycles.per_sm,
        active_sms=cycles.active_sms,
        effective_clock_hz=clock_hz,
    )


def add_counts(
    row: MicroRow,
    benchmark: Benchmark,
    blocks: int,
    iterations: int,
) -> MicroRow:
    """Add the counts of one launch, as far as the source tells."""
    counts = {
        unit: benchmark.count(blocks, iterations, part)
        for part, (unit, _) in enumerate(benchmark.parts)
    }
    return replace(
        row,
        blocks=blocks,
        iterations=iterations,
        operations=counts[benchmark.unit],
        parts={unit.name: n for unit, n in counts.items()} if len(counts) > 1 else {},
        byte=sum(unit.byte * n for unit, n in counts.items()) or None,
        flop=sum(unit.flop * n for unit, n in counts.items()) or None,
    )
