"""Run one microbenchmark on a device: check its results, calibrate its length, and sustain it until
settled.

A launch is one start of the kernel and lasts about ``LAUNCH_S``; its loop runs ``iterations`` times
and every thread does ``Benchmark.operations`` of the measured operation in each. A chunk is so many
launches between two marks (CUDA events) that it lasts about ``CHUNK_S``. Throughput kernels are
launched until power, clock and time have settled. Latency kernels (``Benchmark.timed``: one warp)
are launched ``LATENCY_LAUNCHES`` times and give cycles, no power.

Fields of a benchmark and the CUDA C of its kernel are in `unit_source`, the rows that come out in
`microbench_results`."""

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
    LINE_APART,
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

# what a row says of `max_power_w` in its field `max_power_of`
MAX_POWER_OF = "largest of the sensor's readings"
# `SettlingRule` tells what each field is. NVML's sensor of memory power gives the mean of the last
# second: a load lasts longer (`least_s`), or the mean holds what ran before. `linger_s` leaves out
# samples that may still report the power cap of the kernel before. A look at the samples costs the
# host a millisecond or more: it looks every 40 ms, while CHUNKS_AHEAD chunks of 20 ms are queued.
# 0.35 s, 8 stretches and 4.5 s were chosen by hand; no measurement of them is on record.
RULE = SettlingRule(
    settle_s=0.35,
    least_ticks=8,  # stretches between steps of the energy counter, of which a window is made
    longest_s=4.5,
    least_s=1.2,
    linger_s=0.25,
    look_s=0.04,
)
# of load: in a shorter one the one-second mean of the memory sensor holds power of before it, so
# that the row gets no memory power
MEMORY_S = 1.1
CHUNK_S = 0.02  # of launches between two marks, whose time is read
PACED_AHEAD = 2  # units queued before the host waits, where each begins at a time of its own
CHECK_ROUNDS = 2  # iterations of a check
COMPARED_BYTE = 64 << 20  # at the beginning of a copy, and as many at its end
LAUNCH_S = 0.004  # a launch lasts about this long
LATENCY_LAUNCHES = 3  # of which the fewest cycles count, so that the first may be a cold one
LONGEST_S = 0.5  # a launch that takes longer while iterations are sought is refused
MOST_STAMPS = 1 << 17  # blocks of a launch that can write their time stamps
TEXTURE_BYTE = 1 << 20  # of the buffer that a texture covers
TENSOR_MAP_BYTE = 128  # size of the descriptor by which the copy engine finds tiles
HALF_BYTE = 2  # tensor maps are made for elements of 16 bits
FILL_BLOCKS_PER_SM = 8  # enough to keep memory busy, of the kernels that fill and link buffers
FILL_THREADS = 256
RING_TYPES: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong)
PLAIN_RING_TYPES: tuple[Any, ...] = (*RING_TYPES, ctypes.c_uint)
FILL_TYPES = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint)


@dataclass
class DeviceBench:
    """The device, the sampler and the rule with which rows are measured."""

    device: CudaDevice
    sampler: Sampler
    run: str  # id of the campaign's run, for whoever makes the rows
    idle_power_w: float | None = None  # of an open context without work, copied into every row
    rule: SettlingRule = field(default_factory=lambda: RULE)


def sustain_load(
    bench: DeviceBench,
    row: MicroRow,
    enqueue: Callable[[], None],
    period_s: float = 0.0,
) -> MicroRow:
    """Return the row with time, power, clock and memory power of the settled load.

    ``enqueue`` puts one unit of the load on the stream: one launch, or one clip of frames. Units
    run back to back, or begin every ``period_s`` as frames of a video do. ``launches`` are the
    units inside the window, ``launch_s`` is their mean time, and ``launch_spread_s`` the standard
    deviation between chunks, whose launches are timed together."""
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

    ahead = PACED_AHEAD if period_s else CHUNKS_AHEAD
    load = hold_load(
        bench.sampler,
        bench.device,
        queue_chunk,
        bench.rule,
        ahead=ahead,
    )
    bench.device.recycle(list(load.marks))
    fields = describe_micro_window(load.window)
    unit_s = load.chunk_s / per_chunk  # mean of every chunk inside the window
    if load.window.end_s - load.started_s < MEMORY_S:
        fields["memory_power_w"] = None
    return replace(
        row,
        **fields,
        launches=len(unit_s) * per_chunk,
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
        took_s.append(begin.elapsed_time(end) / 1e3)  # from milliseconds
        device.recycle([begin, end])
    return max(min(took_s), 1e-6)


def describe_micro_window(settled: SettledWindow) -> dict[str, Any]:
    """Return fields of `MicroRow` from a window: those that every campaign writes down
    (`describe_window`) and the largest of the sensor's readings, where it gave any.
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

    ``Benchmark.check`` names the check: ``copy`` compares the copy with its source, ``fold`` the
    exclusive or of all words read with that of the buffer, ``count`` how often each word was
    incremented, ``wgmma`` the elements of a product. A kernel of a ``whole`` benchmark goes over
    the buffer once, without iterations."""
    benchmark = ready.benchmark
    rounds = 1 if benchmark.whole else CHECK_ROUNDS
    # bytes that all blocks together cover exactly once; a block covers `chunk` bytes an iteration
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
    """Compare the exclusive or of what a kernel read with that of its buffer.

    With ``CHECK_SEED`` every thread of a kernel stores its result in the sink."""
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
    """Check that every word was added to as often as the kernel says.

    Thread i adds ``operations`` times an iteration to word i modulo the words of the buffer: where
    there are more threads than words, some threads share a word and its count is their sum."""
    buffers = ready.buffers
    threads = ready.blocks * ready.benchmark.threads
    words = min(threads, ready.size // 4)
    buffers.device.zero(buffers.b, 4 * words)
    ready.launch(rounds)
    counted = buffers.device.download(buffers.b, words, np.uint32)
    threads_of_word = np.bincount(np.arange(threads) % words, minlength=words)
    expected = rounds * ready.benchmark.operations * threads_of_word
    if not (counted == expected).all():
        raise SelfCheckFailed(
            f"{ready.benchmark.name} counted {int(counted.min())} to {int(counted.max())}, "
            f"not {int(expected.min())} to {int(expected.max())}."
        )


def _check_products(ready: ReadyKernel, rounds: int) -> None:
    """Check the elements of a product whose operands are all alike: 0.5, or 1 for integers.

    A kernel takes such operands with ``CHECK_SEED`` (`tensor_units`). An element of C is then
    steps · k · operand², with k the depth of one instruction; ``TensorPrecision.half`` is the
    value of an operand. The first product of an iteration overwrites C, so that iterations do not
    add up. Half of a sparse A are zeros and its K is twice as deep, which gives the same
    element."""
    buffers = ready.buffers
    threads = ready.blocks * ready.benchmark.threads
    name = ready.benchmark.name
    precision = name.removeprefix("wgmma_").removeprefix("sparse_")
    buffers.device.zero(buffers.sink, 4 * threads)
    ready.launch(rounds, seed=CHECK_SEED)
    bits = buffers.device.download(buffers.sink, threads, np.uint32)
    computed = bits.view(np.int32 if precision == "int8" else np.float32).astype(float)
    operand = PRECISIONS[precision].half
    element = WGMMA_STEPS * PRECISIONS[precision].k * operand**2
    if not np.allclose(computed, element, rtol=1e-3):
        raise SelfCheckFailed(
            f"{name} computed {computed.min():g} to {computed.max():g}, not {element:g}."
        )


@dataclass(frozen=True)
class LaunchCycles:
    """Cycles of one launch, by the blocks with stamps (one of every ``Benchmark.stamped``)."""

    per_sm: float  # median over multiprocessors: from its first block's begin to its last one's end
    clock_hz: float  # median over blocks: cycles over nanoseconds of the global timer
    active_sms: int
    blocks_per_sm: float  # blocks with stamps, mean over the multiprocessors that had any


def read_stamps(words: npt.NDArray[np.uint64]) -> LaunchCycles:
    """Read the time stamps of all blocks; refuse when some block did not run to its end.

    A block writes five words (microbenchmark.cu): its multiprocessor, the cycle counter at its
    begin and end, and the nanosecond timer at its begin and end. The timer moves in coarser steps
    than cycles, so that clocks are good for blocks that run much longer."""
    table = words.reshape(-1, STAMP_WORDS).astype(np.int64)
    sm, begin, end, begin_ns, end_ns = table.T
    has_run = (end > begin) & (end_ns > begin_ns)
    if not has_run.all():
        raise Refused(
            f"{int((~has_run).sum())} of {len(table)} blocks did not write their begin and end."
        )
    order, counts = np.unique(sm, return_counts=True)
    spans = [float(end[sm == s].max() - begin[sm == s].min()) for s in order]
    clock_hz = np.median((end - begin) / (end_ns - begin_ns)) * 1e9
    return LaunchCycles(float(np.median(spans)), float(clock_hz), len(order), float(counts.mean()))


def fill_pattern(words: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return what the fill kernel writes, computed on the host.

    Its text is in buffers.cu: the index times a number near 2³² over the golden ratio [Knuth,
    TAOCP 6.4], then two rounds of exclusive or with a shifted self and a product, as hashes of
    integers mix their bits."""
    i = np.arange(words, dtype=np.uint64)
    x = (i * np.uint64(2654435761) + (i >> np.uint64(32)) + np.uint64(seed)).astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))


@dataclass
class DeviceBuffers:
    """Memory that all kernels share: stamps, a sink, and two large buffers of random words.

    A kernel that writes, and a ring of addresses, take the place of the random words in ``b``."""

    device: CudaDevice
    stamps: int  # addresses on the device
    sink: int  # a word for every thread, written in a check alone
    a: int
    b: int
    size: int  # bytes of a and of b each

    @classmethod
    def allocate(
        cls,
        device: CudaDevice,
        most: int = 4 << 30,
    ) -> DeviceBuffers:
        """Allocate, fill and verify buffers of at most ``most`` bytes and a quarter of the free
        memory each, in whole pages of 2 MiB.

        Smaller ones than four times the L2 are refused: the L2 would then hold a quarter of them or
        more, and what is meant to come from DRAM would come from there."""
        free_byte = int(device.call("cuMemGetInfo"))  # the first of its two values: free, total
        size = min(most, free_byte // 4) >> 21 << 21
        if size < 4 * device.l2_byte:
            raise CudaError(
                f"buffers of {size >> 20} MiB would fit into the free memory, and DRAM "
                "benchmarks need four "
                f"times the L2 ({4 * device.l2_byte >> 20} MiB). Free some memory first."
            )
        stamps = device.allocate(8 * STAMP_WORDS * MOST_STAMPS)
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
        # any two seeds do, as long as they differ
        for address, seed in ((buffers.a, 11), (buffers.b, 12)):
            device.launch(
                kernel,
                FILL_BLOCKS_PER_SM * device.sm_count,
                FILL_THREADS,
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
        """Return the bytes that a benchmark may touch.

        In DRAM it walks the whole buffer. In L2 it has a quarter of L2, which leaves room where
        both halves of the L2 keep copies of their own (an H200's do). In L1
        every block has 64 KiB of its own. Others (shared memory, textures, arithmetic) touch at
        most 1 MiB."""
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
    size: int  # bytes of the buffer that the kernel may touch
    # takes the place of the second buffer: the handle of a texture, or the address of a tensor map
    # or of a ring; 0 where the kernel gets the second buffer itself
    b: int = 0
    own_memory: tuple[int, ...] = ()  # addresses that `discard` frees

    def launch(
        self,
        iterations: int,
        seed: int | None = None,
        size: int | None = None,
    ) -> None:
        """Put one launch on the stream.

        ``seed`` starts the random numbers of a throughput kernel and the place on the ring of a
        latency kernel; ``CHECK_SEED`` makes it store its results."""
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
        self.buffers.device.synchronize(5.0)  # seconds; a launch takes thousandths
        self.buffers.device.unload(self.kernel)
        for address in self.own_memory:
            self.buffers.device.free(address)


def prepare_benchmark(
    benchmark: Benchmark,
    buffers: DeviceBuffers,
    cubin: bytes,
) -> ReadyKernel:
    """Load a benchmark, choose the blocks of a launch and lay out what takes the place of ``b``.

    ``blocks_per_sm`` blocks, or as many as fit, are at once on each of the multiprocessors that get
    any (``share`` of all). ``turns`` such fillings follow one another, rounded down to whole
    clusters. A ``whole`` benchmark instead has one block for every chunk of its buffer, as far as
    there is room for stamps; none of these has clusters."""
    device = buffers.device
    kernel = device.load(cubin, benchmark.name, benchmark.shared_byte)
    resident = device.resident(kernel, benchmark.threads)
    if resident < 1:
        raise CudaError(f"{benchmark.name} does not fit on a multiprocessor.")
    sms = max(round(benchmark.share * device.sm_count), 1)
    blocks = sms * min(resident, benchmark.blocks_per_sm) * benchmark.turns
    blocks = max(blocks // benchmark.cluster, 1) * benchmark.cluster
    size = buffers.working_set_byte(benchmark.working_set, blocks)
    if benchmark.whole:
        blocks = min(size // benchmark.unit.chunk, MOST_STAMPS * benchmark.stamped)
        size = blocks * benchmark.unit.chunk
    b = 0
    own_memory: tuple[int, ...] = ()
    if benchmark.working_set == "texture":
        b = device.texture(buffers.a, TEXTURE_BYTE)
    elif benchmark.tiles:
        row_byte = TILE_BYTE * ROW_TILES
        size = size // (row_byte * TILE_ROWS) * row_byte * TILE_ROWS
        b = _place_tensor_map(buffers, size // row_byte)
        own_memory = (b,)
    elif benchmark.timed and benchmark.ring[0]:
        b, own_memory = _place_ring(buffers, benchmark)
    return ReadyKernel(
        benchmark,
        buffers,
        kernel,
        blocks,
        size,
        b,
        own_memory,
    )


def _place_tensor_map(buffers: DeviceBuffers, rows: int) -> int:
    """Describe buffer ``a`` as a matrix of ``rows`` in tiles, and return where the description
    lies.
    """
    device = buffers.device
    address = device.allocate(TENSOR_MAP_BYTE)
    tensor_map = device.tensor_map(
        buffers.a,
        TILE_BYTE * ROW_TILES // HALF_BYTE,
        rows,
        TILE_BYTE // HALF_BYTE,
        TILE_ROWS,
    )
    device.upload(address, tensor_map)
    return address


def _place_ring(buffers: DeviceBuffers, benchmark: Benchmark) -> tuple[int, tuple[int, ...]]:
    """Link the ring of a benchmark as ``Benchmark.links`` says.

    Return where it lies, in the second buffer or in memory of its own where that is too small, and
    what of it is to be freed."""
    device = buffers.device
    nodes, stride = benchmark.ring
    size = nodes * stride
    own_memory: tuple[int, ...] = ()
    address = buffers.b + benchmark.line * LINE_APART
    if size > buffers.size:
        address = device.allocate(size)
        own_memory = (address,)
    cubin = compile_buffer_kernels(device.architecture)
    values: tuple[int, ...] = (address, nodes, stride)
    types = RING_TYPES
    if benchmark.links == "lines":
        link = device.load(cubin, "link_ring")
    else:
        link = device.load(cubin, "link_plain")
        values = (*values, int(benchmark.links == "walk"))
        types = PLAIN_RING_TYPES
    device.launch(
        link,
        FILL_BLOCKS_PER_SM * device.sm_count,
        FILL_THREADS,
        values,
        types,
    )
    return address, own_memory


@cache
def compile_buffer_kernels(architecture: str) -> bytes:
    """Compile the kernels that fill a buffer with random words and that link a ring in it.

    Node i of a ring leads to (i·``factor`` + ``step``) mod nodes, which visits every node once
    [Knuth, TAOCP 3.2.1.2]. Each node lies in another cache line of its stride (``line`` bytes)."""
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

    A try grows towards nine tenths of the wanted time, by 1.5 to 64 times; one that reaches six
    tenths is long enough to scale from. Eight tries reach any number an int holds. A ring is walked
    for ``WARM_HOPS`` steps, as many as warm it up before its first stamp."""
    benchmark = ready.benchmark
    if benchmark.whole:
        return 1
    if benchmark.ring[0]:
        return WARM_HOPS // benchmark.steps
    iterations = 1
    for _ in range(8):
        took_s = time_unit_s(ready.buffers.device, partial(ready.launch, iterations))
        if took_s > LONGEST_S:
            raise CudaError(f"{iterations} iterations of {benchmark.name} take {took_s:.2f} s.")
        if took_s > 0.6 * wanted_s:
            break
        iterations = int(iterations * min(max(0.9 * wanted_s / took_s, 1.5), 64.0)) + 1
    return max(round(iterations * wanted_s / took_s), 1)


def make_blank_row(
    run: str,
    benchmark: Benchmark,
    repeat: int,
) -> MicroRow:
    """Return a row that names what is to be measured: the benchmark, its place ``at`` on the
    ``curve`` that it is a point of, its version and the vendor's rate to compare with.
    """
    return MicroRow(
        id=micro_row_id(benchmark.name, repeat, benchmark.version),
        name=benchmark.name,
        group=benchmark.group,
        operation=benchmark.unit.operation,
        curve=benchmark.curve,
        at=benchmark.at,
        repeat=repeat,
        version=benchmark.version,
        specification=benchmark.specification,
        run=run,
        threads=benchmark.threads,
    )


def measure_benchmark(
    bench: DeviceBench,
    ready: ReadyKernel,
    row: MicroRow,
    iterations: int = 0,
) -> MicroRow:
    """Check the kernel in the first round, calibrate its launch where needed, sustain it until
    settled, read the stamps.

    A latency is the cycles from one operation to the next that waits for it, the fewest of a few
    launches: seeds begin at different places of a ring. The clock is cycles over the nanosecond
    timer of the last launch. Under the power cap it wanders from launch to launch while the cycles
    of a launch stay: there it is those cycles over the mean time of a launch, which is between
    marks and so includes the gaps between launches."""
    benchmark = ready.benchmark
    checked = run_self_check(ready) if row.repeat == 0 else ""
    iterations = iterations or calibrate_iterations(ready)
    row = add_counts(row, benchmark, ready.blocks, iterations)
    if benchmark.timed:
        cycles = _read_fewest_cycles(ready, iterations)
        row = replace(row, latency_cycles=cycles.per_sm / (benchmark.operations * iterations))
    else:
        row = sustain_load(bench, row, partial(ready.launch, iterations))
        cycles = ready.read_cycles()
        # `blocks_per_sm` has the blocks with stamps alone, each of which stands for `stamped`
        per_stamped_block = benchmark.count(1, iterations) * benchmark.stamped
        operations_of_sm = per_stamped_block * cycles.blocks_per_sm
        row = replace(row, operations_per_cycle_sm=operations_of_sm / cycles.per_sm)
    is_capped = "sw_power_cap" in row.throttle
    clock_hz = cycles.per_sm / row.launch_s if is_capped and row.launch_s else cycles.clock_hz
    return replace(
        row,
        checked=checked,
        cycles=cycles.per_sm,
        active_sms=cycles.active_sms,
        effective_clock_hz=clock_hz,
    )


def _read_fewest_cycles(ready: ReadyKernel, iterations: int) -> LaunchCycles:
    """Launch a latency kernel a few times and return the cycles of the fastest launch."""
    readings = []
    for seed in range(1, LATENCY_LAUNCHES + 1):
        ready.launch(iterations, seed)
        readings.append(ready.read_cycles())
    return min(readings, key=lambda cycles: cycles.per_sm)


def add_counts(
    row: MicroRow,
    benchmark: Benchmark,
    blocks: int,
    iterations: int,
) -> MicroRow:
    """Add the counts of one launch, as far as the source tells.

    ``benchmark.parts`` are pairs of a unit and its steps an iteration; the first is what is
    reported. ``parts`` of the row lists all where there is more than one. ``byte`` are those that
    the operations move, at whatever level they work (shared memory, L1, L2 or DRAM): a mix of
    levels has their sum."""
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
