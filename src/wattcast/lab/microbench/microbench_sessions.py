"""Run ``lab microbench`` and ``lab multimedia``: the parent's request, and the child that uses the
device.

A child measures idle rows, warms the card up, then measures the suite and the driver's own copy, or
the multimedia workloads back to back, at a fixed rate, and with frames moved to and from the host.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import partial
from pathlib import Path
from typing import Annotated

from wattcast.core.errors import (
    BadInput,
    WattcastError,
    bad_value,
)
from wattcast.core.option_declaration import Option
from wattcast.core.row_journals import Journal, read_lines
from wattcast.core.units import parse
from wattcast.core.whole_files import write_whole
from wattcast.lab.campaigns.campaign_verbs import Budget, Target
from wattcast.lab.microbench import (
    benchmark_kernels,
    microbench_campaign,
    multimedia_clip,
    unit_work,
)
from wattcast.lab.microbench.benchmark_kernels import (
    DeviceBench,
    DeviceBuffers,
    sustain_load,
)
from wattcast.lab.microbench.benchmark_suite import (
    find_benchmarks,
    list_launches,
    list_transfers,
)
from wattcast.lab.microbench.launch_times import LaunchTimer, blank_launch_row
from wattcast.lab.microbench.microbench_campaign import (
    CompiledKernels,
    MicroCampaign,
    MicroTask,
    write_heartbeat,
)
from wattcast.lab.microbench.microbench_results import MicroRow, micro_row_id
from wattcast.lab.microbench.unit_source import Benchmark
from wattcast.measure.cuda_device import CudaDevice, DeviceFault
from wattcast.measure.measure_verbs import VerbResult
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import (
    SettlingRule,
    make_run_info,
    make_run_name,
    say,
    take_window,
)

# least ticks and seconds of a repetition
AGAIN_TICKS = 5
AGAIN_S = 0.85
WARM_S = 6.0
MULTIMEDIA_WARM_S = 3.0
IDLE_S = 1.3
COPY_VERSION = 2  # of the driver's copy: a whole buffer, as ours
TRANSFER_BYTE = 256 << 20
RATE_RESERVE = 1.3  # the period of a fixed rate over the time of the slowest variant
MOVED = ("rotate", "dct_fp32_cached", "dct_fp64_uncached")
NOT_RUN = "; not yet run on a card"  # what `--list` says of a benchmark
MOVED_FRAMES = 8  # in one unit of the moving workloads


Rows = Annotated[
    Path | None, Option("Folder for rows, saved as they come; a re-run continues there.")
]
Repeats = Annotated[int, Option("Number of rounds; 2 measures everything a second time.")]
Before = Annotated[Path | None, Option("Folder with rows measured before, to go on from.", "from")]
Quick = Annotated[bool, Option("Shorter windows: a smoke test.")]
Child = Annotated[bool, Option("The process that uses the device.", hidden=True)]
Since = Annotated[str, Option("Rows older than this are measured again.", hidden=True)]


def microbench(
    out: Rows = None,
    budget: Budget = "480s",
    only: Annotated[str, Option("Names, groups or curves, comma-separated; see --list.")] = "",
    repeats: Repeats = 1,
    before: Before = None,
    listed: Annotated[bool, Option("Name the benchmarks.", "list")] = False,
    counters: Annotated[
        bool, Option("Hardware counters through ncu instead of time and power.")
    ] = False,
    quick: Quick = False,
    child: Child = False,
    target: Target = False,
    since: Since = "",
) -> VerbResult:
    """Time, power and energy of every unit of the GPU: arithmetic, memory, structure and mixes.

    Curves: --only intensity sweeps flops a byte; --only walk,walk_dram,dense,ring finds lines and
    sectors, --only ways_16k,ways_64k,ways_256k sets, --only lines,atomic_lines parts and slices of
    the L2, --only launch times launches and graphs. --show RESULTS says what they tell.
    """
    names = list(filter(None, only.split(",")))
    budget_s = parse(budget, "s", "--budget")
    if listed:
        return _list_benchmarks(names)
    folder = _open_folder(out, repeats, None if counters or target else before)
    if target:
        return VerbResult(
            note=f"counted {unit_work.count_kernels(folder, budget_s, names, before)} kernels"
        )
    if child:
        campaign = MicroCampaign(
            folder,
            "microbench",
            time.monotonic() + budget_s,
            since,
            repeats,
            quick,
        )
        return VerbResult(exit_code=run_child(campaign, names))
    find_benchmarks([name for name in names if name != "multimedia"])  # a wrong name costs nothing
    if counters:
        return VerbResult(unit_work.collect_unit_counters(folder, budget_s, names, before))
    options = ["--repeats", str(repeats)]
    if names:
        options += ["--only", only]
    if quick:
        options.append("--quick")
    return _supervise(folder, "microbench", options, budget_s)


def _list_benchmarks(names: list[str]) -> VerbResult:
    """Name the benchmarks and the copies by the driver, each with what it counts."""
    listed_names = []
    lines = []
    for benchmark in find_benchmarks(names):
        description = benchmark.unit.operation
        if benchmark.curve:
            description += f", {benchmark.curve} {benchmark.at:g}"
        if not benchmark.has_run:
            description += NOT_RUN
        listed_names.append(benchmark.name)
        lines.append(f"{benchmark.name:24} {benchmark.group:11} {description}")
    for name in list_transfers(names):
        listed_names.append(name)
        lines.append(f"{name:24} {'transfer':11} copy by the driver")
    for name in list_launches(names):
        listed_names.append(name)
        lines.append(f"{name:24} {'launch':11} launch by the driver{NOT_RUN}")
    return VerbResult(listed_names, "\n".join(lines))


def multimedia(
    out: Rows = None,
    budget: Budget = "240s",
    repeats: Repeats = 1,
    before: Before = None,
    frames: Annotated[int, Option("Frames of the clip.")] = multimedia_clip.FRAMES,
    quick: Quick = False,
    child: Child = False,
    since: Since = "",
) -> VerbResult:
    """Rotation, diamond motion search, 8x8 DCT and debarreling of an 80-frame full-HD clip, checked
    against NumPy.
    """
    budget_s = parse(budget, "s", "--budget")
    folder = _open_folder(out, repeats, before)
    if frames < 3:
        raise bad_value("--frames", "three frames or more", frames)
    if child:
        campaign = MicroCampaign(
            folder,
            "multimedia",
            time.monotonic() + budget_s,
            since,
            repeats,
            quick,
        )
        return VerbResult(exit_code=run_child(campaign, frames=frames))
    options = ["--repeats", str(repeats), "--frames", str(frames)]
    if quick:
        options.append("--quick")
    return _supervise(folder, "multimedia", options, budget_s)


def _open_folder(
    out: Path | None,
    repeats: int,
    before: Path | None,
) -> Path:
    """Make the folder for rows, with files of ``before`` that it does not have."""
    if out is None:
        raise BadInput("--out: expected a folder for the rows, got none.")
    if repeats < 1:
        raise bad_value("--repeats", "one round or more", repeats)
    if before is not None and not before.is_dir():
        raise WattcastError(f"{before} is no folder; --from names one with rows measured before.")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(before.glob("*.jsonl")) if before is not None else ():
        if not (out / path.name).exists():
            write_whole(out / path.name, path.read_bytes())
    return out


def _supervise(
    out: Path,
    verb: str,
    options: list[str],
    budget_s: float,
) -> VerbResult:
    """Measure in a child; failures go to stderr by name, and are no failure of the whole unless
    nothing is left.
    """
    command = [
        sys.executable,
        "-m",
        "wattcast.lab",
        verb,
        "--child",
        "--out",
        str(out),
        *options,
    ]
    counts = microbench_campaign.supervise_child(out, verb, command, budget_s)
    rows = read_lines(out / f"{verb}.jsonl", missing_ok=True)
    for name, error in {str(row.get("id")): str(row.get("error", "")) for row in rows}.items():
        if error:  # of the last row of this id
            say(f"failed: {name}: {error}")
    return VerbResult(dict(sorted(counts.items())), exit_code=0 if counts["measured"] else 4)


def run_child(
    campaign: MicroCampaign,
    names: Sequence[str] = (),
    frames: int = multimedia_clip.FRAMES,
) -> int:
    """Measure the suite or the workloads; return 0 when done, ``BROKEN`` when the device context
    was lost.
    """
    out = campaign.out
    kind = campaign.kind
    with Sampler("nvml") as sampler:
        write_heartbeat(out, "starting", kind)
        run = make_run_name()
        if kind == "microbench" and not names:  # before a context is opened
            busy = make_idle_task(
                sampler,
                run,
                "idle_host_busy",
                0,
                host_busy=True,
            )
            campaign.run([make_idle_task(sampler, run, "idle_context_off", 0), busy])
        device = CudaDevice.open()
        campaign.bench = bench = DeviceBench(device, sampler, run)
        if campaign.quick:
            bench.rule = replace(bench.rule, least_ticks=5, least_s=0.9)
        sms = device.sm_count
        l2_byte = device.l2_byte
        cuda = microbench_campaign.nvrtc_version()
        info = make_run_info(
            run,
            sampler.identity,
            sm_count=sms,
            l2_byte=l2_byte,
            cuda=cuda,
        )
        Journal(out / "runs.jsonl", key="run").append(info)
        try:
            if kind == "microbench":
                _measure_suite(campaign, bench, list(names))
            else:
                _measure_workloads(campaign, bench, frames)
            sampler.since(0).save(out / f"samples-{kind}.npz")
        except DeviceFault as error:
            say(f"the device context is lost: {error}")
            return microbench_campaign.BROKEN
    return 0


def make_idle_task(
    sampler: Sampler,
    run: str,
    name: str,
    repeat: int,
    length_s: float = IDLE_S,
    host_busy: bool = False,
) -> MicroTask:
    """Measure power with nothing to do on the device, the host asleep or counting."""

    def measure(row: MicroRow) -> MicroRow:
        mark = sampler.head
        began_s = time.monotonic()
        while host_busy and time.monotonic() - began_s < length_s:
            sum(range(1000))
        time.sleep(max(0.0, began_s + length_s - time.monotonic()))
        sampler.check()
        window = take_window(sampler.since(mark), began_s, time.monotonic(), SettlingRule())
        return replace(row, **benchmark_kernels.describe_micro_window(window))

    return MicroTask(
        MicroRow(
            micro_row_id(name, repeat),
            name,
            "idle",
            repeat=repeat,
            run=run,
        ),
        measure,
    )


def measure_idle_w(bench: DeviceBench) -> float | None:
    """Measure idle power with the context open, for the energies above idle of the rows that
    follow.
    """
    task = make_idle_task(
        bench.sampler,
        bench.run,
        "idle",
        0,
        0.9,
    )
    try:
        time.sleep(0.3)
        return task.measure(task.blank).power_w
    except Exception as error:
        say(f"idle power was not measured: {error}")
        return None


def _measure_suite(
    campaign: MicroCampaign,
    bench: DeviceBench,
    names: list[str],
) -> None:
    device = bench.device
    benchmarks = find_benchmarks(names)
    compiled = CompiledKernels(device.architecture)
    measured_ids = campaign.journal.ids
    missing = [b for b in benchmarks if micro_row_id(b.name, 0, b.version) not in measured_ids]
    if missing:
        compiled.start(missing, microbench_campaign.worker_count())
    try:
        supported = [b for b in benchmarks if b.supported(device.architecture)]
        say(
            f"{device.name}, {device.architecture}, {device.sm_count} SMs: "
            f"{len(supported)} benchmarks"
        )
        buffers = DeviceBuffers.allocate(device)
        write_heartbeat(campaign.out, "warming up", "microbench")
        _warm_up(campaign, buffers, compiled)
        bench.idle_power_w = measure_idle_w(bench)
        suite = SuiteRun(bench, buffers, compiled)
        transfers = _list_possible_transfers(device, names)
        idle_s = 0.75 if campaign.quick else IDLE_S
        for repeat in range(campaign.repeats):
            repeated = [b for b in supported if not (repeat and b.once)]
            tasks = [
                make_idle_task(
                    bench.sampler,
                    bench.run,
                    "idle_context_on",
                    repeat,
                    idle_s,
                )
            ]
            tasks += [make_benchmark_task(suite, benchmark, repeat) for benchmark in repeated]
            tasks[6:6] = [make_transfer_task(suite, name, repeat) for name in transfers]
            tasks += [
                make_launch_task(suite, name, repeat, campaign.quick)
                for name in list_launches(names)
            ]
            campaign.run(tasks)
    finally:
        compiled.stop()


@dataclass
class SuiteRun:
    """What the tasks of one run share."""

    bench: DeviceBench
    buffers: DeviceBuffers
    compiled: CompiledKernels
    rows: dict[str, MicroRow] = field(default_factory=dict)  # of an earlier round, by name


def _warm_up(
    campaign: MicroCampaign,
    buffers: DeviceBuffers,
    compiled: CompiledKernels,
) -> None:
    """Bring the card to its working temperature, since a cold one leaks less."""
    device = buffers.device
    (warming,) = find_benchmarks(["fp32_fma"])
    ready = benchmark_kernels.prepare_benchmark(warming, buffers, compiled.cubin(warming))
    iterations = benchmark_kernels.calibrate_iterations(ready, 0.02)
    end_s = time.monotonic() + (0.5 if campaign.quick else WARM_S)
    while time.monotonic() < end_s:
        for _ in range(5):
            ready.launch(iterations)
        device.synchronize()
    device.unload(ready.kernel)


def _list_possible_transfers(device: CudaDevice, names: list[str]) -> list[str]:
    """Return the copies by the driver; one to a second GPU only where there is one, or it is
    named.
    """
    transfers = list_transfers(names)
    is_alone = int(device.call("cuDeviceGetCount")) < 2
    if is_alone and "peer_copy" in transfers and "peer_copy" not in names:
        transfers.remove("peer_copy")
    return transfers


def choose_repeat_bench(bench: DeviceBench, before: MicroRow | None) -> DeviceBench:
    """Choose a shorter measurement for a repetition, except at the cap, which a short load may not
    reach.
    """
    if before is None or "sw_power_cap" in before.throttle:
        return bench
    rule = bench.rule  # a repetition gives no memory power
    ticks = min(rule.least_ticks, AGAIN_TICKS)
    least_s = min(rule.least_s, AGAIN_S)
    return replace(bench, rule=replace(rule, least_ticks=ticks, least_s=least_s))


def make_benchmark_task(
    suite: SuiteRun,
    benchmark: Benchmark,
    repeat: int,
) -> MicroTask:
    """Turn a benchmark into a task."""

    def measure(row: MicroRow) -> MicroRow:
        cubin = suite.compiled.cubin(benchmark)
        ready = benchmark_kernels.prepare_benchmark(benchmark, suite.buffers, cubin)
        before = suite.rows.get(benchmark.name)
        iterations = before.iterations if before is not None else None
        try:
            measured = benchmark_kernels.measure_benchmark(
                choose_repeat_bench(suite.bench, before), ready, row, iterations or 0
            )
        finally:
            # after a fault a further call would only hide its error
            with contextlib.suppress(DeviceFault):
                ready.discard()
        suite.rows[benchmark.name] = measured
        return measured

    blank = benchmark_kernels.make_blank_row(suite.bench.run, benchmark, repeat)
    return MicroTask(blank, measure)


def make_transfer_task(
    suite: SuiteRun,
    name: str,
    repeat: int,
) -> MicroTask:
    """Measure a copy by the driver: a whole buffer, to or from page-locked memory of the host, or
    to a second GPU.

    Joules are those of this card; the host's and a second card's are not in them.
    """
    is_local = name == "dram_memcpy"
    size = suite.buffers.size
    if not is_local:
        size = min(TRANSFER_BYTE, size)
    moves_twice = name in ("dram_memcpy", "pcie_both")
    byte = (2.0 if moves_twice else 1.0) * size
    version = COPY_VERSION if is_local else 1
    blank = MicroRow(
        micro_row_id(name, repeat, version),
        name,
        "memory" if is_local else "transfer",
        "byte",
        run=suite.bench.run,
        repeat=repeat,
        version=version,
        byte=byte,
        operations=byte,
    )

    def measure(row: MicroRow) -> MicroRow:
        device = suite.bench.device
        host_copies = None
        if name == "peer_copy":
            enqueue = _copy_to_peer(device, suite.buffers, size)
        elif is_local:
            enqueue = partial(device.copy, suite.buffers.b, suite.buffers.a, size)
        else:
            host_copies = HostCopies(device, suite.buffers, size, name)
            enqueue = host_copies.enqueue
        bench = choose_repeat_bench(suite.bench, suite.rows.get(name))
        suite.rows[name] = sustain_load(bench, row, enqueue)
        device.synchronize()
        if host_copies is not None:
            host_copies.free()
        return suite.rows[name]

    return MicroTask(blank, measure)


def make_launch_task(
    suite: SuiteRun,
    name: str,
    repeat: int,
    quick: bool,
) -> MicroTask:
    """Time launches of an empty kernel, or of a graph of them."""

    def measure(row: MicroRow) -> MicroRow:
        device = suite.bench.device
        timer = LaunchTimer.load(device, quick)
        try:
            return timer.measure(row)
        finally:
            with contextlib.suppress(DeviceFault):
                device.unload(timer.kernel)

    return MicroTask(blank_launch_row(name, suite.bench.run, repeat), measure)


def _copy_to_peer(
    device: CudaDevice,
    buffers: DeviceBuffers,
    size: int,
) -> Callable[[], None]:
    """Return what copies a buffer to memory of a second GPU, without going through the host."""
    call = device.call
    home = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0))
    away = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 1))
    call("cuCtxSetCurrent", away)
    destination = device.allocate(size)
    call("cuCtxSetCurrent", home)
    call("cuCtxEnablePeerAccess", away, 0)  # or the copy would go through the host
    return partial(device.copy, destination, buffers.a, size)


class HostCopies:
    """Copies between a buffer and page-locked memory of the host, one way or both at once."""

    def __init__(
        self,
        device: CudaDevice,
        buffers: DeviceBuffers,
        size: int,
        name: str,
    ) -> None:
        self.device = device
        self.buffers = buffers
        self.size = size
        self.both_ways = name == "pcie_both"
        self.to_device = self.both_ways or name == "pcie_to_device"
        self.to_host = self.both_ways or name == "pcie_to_host"
        call = device.call
        self.host = int(call("cuMemHostAlloc", 2 * size, 0))
        call("cuMemcpyDtoH", self.host, buffers.a, size)  # random words, to send again
        call("cuMemcpyDtoH", self.host + size, buffers.a, size)
        self.second_stream = call("cuStreamCreate", 1) if self.both_ways else device.stream
        self.began = call("cuEventCreate", 2)
        self.ended = call("cuEventCreate", 2)

    def enqueue(self) -> None:
        """Put one copy on the stream; the second stream begins with the first, which waits for its
        end.
        """
        call = self.device.call
        stream = self.device.stream
        if self.both_ways:
            call("cuEventRecord", self.began, stream)
            call("cuStreamWaitEvent", self.second_stream, self.began, 0)
        if self.to_device:
            call(
                "cuMemcpyHtoDAsync",
                self.buffers.b,
                self.host,
                self.size,
                stream,
            )
        if self.to_host:
            back = self.host + self.size
            call(
                "cuMemcpyDtoHAsync",
                back,
                self.buffers.a,
                self.size,
                self.second_stream,
            )
        if self.both_ways:
            call("cuEventRecord", self.ended, self.second_stream)
            call("cuStreamWaitEvent", stream, self.ended, 0)

    def free(self) -> None:
        """Give back the memory of the host."""
        self.device.call("cuMemFreeHost", self.host)


def _measure_workloads(
    campaign: MicroCampaign,
    bench: DeviceBench,
    frames: int,
) -> None:
    clip = multimedia_clip.MediaClip.make(bench.device, frames)
    for name in (
        multimedia_clip.NAMES
    ):  # before anything runs long; what fails here fails its own rows only
        write_heartbeat(campaign.out, f"checking {name}", "multimedia")
        with contextlib.suppress(multimedia_clip.ClipCheckFailed):
            clip.check(name)
    write_heartbeat(campaign.out, "warming up", "multimedia")
    end_s = time.monotonic() + (0.3 if campaign.quick else MULTIMEDIA_WARM_S)
    while time.monotonic() < end_s:
        clip.enqueue("dct_fp32_cached")
        clip.enqueue("motion")
        bench.device.synchronize()
    bench.idle_power_w = measure_idle_w(bench)
    for repeat in range(campaign.repeats):
        campaign.run(MultimediaRound(bench, clip, repeat).list_tasks())


class MultimediaRound:
    """The rows of one round over the clip: kernels alone, with frames moved, and at a fixed
    rate.
    """

    def __init__(
        self,
        bench: DeviceBench,
        clip: multimedia_clip.MediaClip,
        repeat: int,
    ) -> None:
        self.bench = bench
        self.clip = clip
        self.repeat = repeat
        self.moved_frames = min(MOVED_FRAMES, clip.frames)
        self.host = 0  # page-locked memory, once frames are moved

    def list_tasks(self) -> list[MicroTask]:
        """List all rows of the round."""
        bench = self.bench
        tasks = [make_idle_task(bench.sampler, bench.run, "multimedia_idle", self.repeat)]
        for name in multimedia_clip.NAMES:
            enqueue = partial(self.clip.enqueue, name)
            tasks.append(self._make_task(name, partial(self._measure, name, enqueue), name))
        measure = partial(self._measure, "", self.move_frames)
        tasks.append(self._make_task("move_frames", measure, "", self.moved_frames))
        for name in MOVED:
            measure = partial(self._measure, name, partial(self.move_frames, name))
            tasks.append(self._make_task(f"{name}_moved", measure, name, self.moved_frames))
        for name in multimedia_clip.DCTS:
            measure = partial(self._measure_at_rate, name)
            tasks.append(self._make_task(f"{name}_at_rate", measure, name))
        return tasks

    def move_frames(self, name: str = "") -> None:
        """Put frames in, a kernel (or none) over them, and as many frames of the result out on the
        stream.
        """
        device = self.clip.device
        size = self.moved_frames * multimedia_clip.FRAME_BYTE
        if not self.host:  # with the frames themselves, to send again
            self.host = int(device.call("cuMemHostAlloc", 2 * size, 0))
            device.call("cuMemcpyDtoH", self.host, self.clip.frames_at, size)
        device.call(
            "cuMemcpyHtoDAsync",
            self.clip.frames_at,
            self.host,
            size,
            device.stream,
        )
        if name:
            self.clip.enqueue(name, self.moved_frames)
        result_byte = min(size, self.clip.frames * multimedia_clip.LUMA * 2)
        result_host = self.host + size
        device.call(
            "cuMemcpyDtoHAsync",
            result_host,
            self.clip.result,
            result_byte,
            device.stream,
        )

    def _make_task(
        self,
        name: str,
        measure: Callable[[MicroRow], MicroRow],
        kernel: str,
        frames: int = 0,
    ) -> MicroTask:
        blank = MicroRow(
            micro_row_id(name, self.repeat),
            name,
            "multimedia",
            "frame",
            repeat=self.repeat,
            run=self.bench.run,
            operations=float(frames or self.clip.frames),
        )
        if kernel:
            threads = multimedia_clip.THREADS
            blocks = -(-self.clip.items(kernel, frames) // threads)
            blank = replace(blank, threads=threads, blocks=blocks)
        return MicroTask(blank, measure)

    def _measure(
        self,
        kernel: str,
        enqueue: Callable[[], None],
        row: MicroRow,
    ) -> MicroRow:
        """Measure units of a workload back to back, once its kernel has been checked."""
        checked = self.clip.check(kernel) if kernel else ""
        return sustain_load(self.bench, replace(row, checked=checked), enqueue)

    def _measure_at_rate(
        self,
        kernel: str,
        row: MicroRow,
    ) -> MicroRow:
        """Measure a variant of the DCT at a rate that the slowest of them can keep."""
        checked = self.clip.check(kernel)
        variants_s = []
        for name in multimedia_clip.DCTS:
            variant = partial(self.clip.enqueue, name)
            variants_s.append(benchmark_kernels.time_unit_s(self.clip.device, variant))
        period_s = round(RATE_RESERVE * max(variants_s), 4) or 1e-4
        row = replace(
            row,
            checked=checked,
            curve="rate",
            at=period_s,
        )
        return sustain_load(self.bench, row, partial(self.clip.enqueue, kernel), period_s)
