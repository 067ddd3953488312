"""Run ``lab microbench`` and ``lab multimedia``: the parent's request, and the child that uses the device.

A child measures idle rows, warms the card up, then measures the suite and the driver's own copy, or the multimedia
workloads back to back, at a fixed rate, and with frames moved to and from the host.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from wattcast.core.errors import BadInput, bad_value
from wattcast.core.measured_rows import Journal, RunInfo
from wattcast.core.units import parse
from wattcast.measure.cuda_device import CudaDevice, DeviceFault
from wattcast.measure.measure_verbs import Budget, Option, Target, VerbResult
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule, make_run_info, say, take_window
from wattcast.microbench import benchmark_kernels, microbench_campaign, unit_counters
from wattcast.microbench.benchmark_kernels import (
    DeviceBench,
    DeviceBuffers,
    DeviceLoad,
    MicroRow,
    describe_micro_window,
    make_copy_load,
    micro_row_id,
    sustain_load,
)
from wattcast.microbench.benchmark_suite import find_benchmarks
from wattcast.microbench.compile_ahead import CompiledKernels, cache_folder, nvrtc_version, worker_count
from wattcast.microbench.microbench_campaign import BROKEN, MicroCampaign, MicroTask, format_now, write_heartbeat
from wattcast.microbench.multimedia_clip import (
    DCTS,
    FRAME_BYTE,
    FRAMES,
    LUMA,
    NAMES,
    THREADS,
    ClipCheckFailed,
    MediaClip,
)
from wattcast.microbench.unit_source import Benchmark

WARM_S = 6.0
IDLE_S = 1.3
COPY_VERSION = 2  # of the driver's copy: a whole buffer, as ours


def run_microbench_child(
    out: Path, only: Sequence[str], repeats: int, budget_s: float, since: str, quick: bool = False
) -> int:
    """Measure the suite; 0 when done, ``BROKEN`` when the device context was lost."""
    campaign = MicroCampaign(out, "microbench", time.monotonic() + budget_s, since)
    benchmarks = find_benchmarks(list(only))
    with Sampler("nvml") as sampler:
        write_heartbeat(out, "starting", "microbench")
        run = datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
        if not only:
            off = [make_idle_task(sampler, run, "idle_context_off", 0)]
            off += [make_idle_task(sampler, run, "idle_host_busy", 0, host_busy=True)]
            campaign.run(off)
        device = CudaDevice.open()
        bench = DeviceBench(device, sampler, run)
        campaign.bench = bench
        if quick:
            bench.least_s, bench.rule = 0.9, replace(bench.rule, least_ticks=5)
        names = tuple(b.name for b in benchmarks) if only else ()
        compiled = CompiledKernels(device.architecture, cache_folder(), names)
        compiled.start(worker_count())
        Journal(out / "runs.jsonl", key="run").append(make_info(bench))
        try:
            _measure(campaign, bench, benchmarks, compiled, repeats, quick)
            sampler.since(0).save(out / "samples-microbench.npz")
        except DeviceFault as error:
            say(f"the device context is lost: {error}")
            return BROKEN
        finally:
            compiled.stop()
    return 0


def _measure(
    campaign: MicroCampaign,
    bench: DeviceBench,
    benchmarks: list[Benchmark],
    compiled: CompiledKernels,
    repeats: int,
    quick: bool,
) -> None:
    device = bench.device
    supported = [b for b in benchmarks if b.supported(device.architecture)]
    say(f"{device.name}, {device.architecture}, {device.sm_count} SMs: {len(supported)} benchmarks")
    buffers = DeviceBuffers.take(device)
    write_heartbeat(campaign.out, "warming up", "microbench")
    warm_card(bench, buffers, compiled, 0.5 if quick else WARM_S)
    bench.idle_power_w = measure_idle_w(bench)
    seen: dict[str, MicroRow] = {}
    for repeat in range(repeats):
        wanted = [b for b in supported if not (repeat and b.once)]
        tasks = [make_idle_task(bench.sampler, bench.run, "idle_context_on", repeat, 0.75 if quick else IDLE_S)]
        tasks += [make_benchmark_task(bench, buffers, compiled, b, repeat, seen) for b in wanted]
        tasks.insert(min(6, len(tasks)), make_copy_task(bench, buffers, repeat, seen))
        campaign.run(tasks)


def choose_repeat_bench(bench: DeviceBench, before: MicroRow | None) -> DeviceBench:
    """Choose a shorter measurement for a repetition, except at the cap, which a short load may not reach."""
    return bench if before is None or "sw_power_cap" in before.throttle else bench.again()


def make_benchmark_task(
    bench: DeviceBench,
    buffers: DeviceBuffers,
    compiled: CompiledKernels,
    benchmark: Benchmark,
    repeat: int,
    seen: dict[str, MicroRow],
) -> MicroTask:
    """Turn a benchmark into a task; ``seen`` holds rows of an earlier round."""

    def make() -> MicroRow:
        ready = benchmark_kernels.prepare_benchmark(benchmark, buffers, compiled.cubin(benchmark))
        before = seen.get(benchmark.name)
        try:
            blank = benchmark_kernels.make_blank_micro_row(bench, benchmark, repeat, format_now())
            row = benchmark_kernels.measure_benchmark(
                choose_repeat_bench(bench, before), ready, blank, (before and before.iterations) or 0
            )
            seen[benchmark.name] = row
            return row
        finally:
            if not _lost(bench.device):
                bench.device.unload(ready.kernel)

    return MicroTask(
        micro_row_id(benchmark.name, repeat, benchmark.version),
        make,
        lambda: benchmark_kernels.make_blank_micro_row(bench, benchmark, repeat, format_now()),
    )


def _lost(device: CudaDevice) -> bool:
    """Whether the context is beyond use; a call after a fault would only hide its error."""
    try:
        device.synchronize(5.0)
    except DeviceFault:
        return True
    return False


def make_copy_task(bench: DeviceBench, buffers: DeviceBuffers, repeat: int, seen: dict[str, MicroRow]) -> MicroTask:
    """Measure the driver's own copy, with which our DRAM copy is compared."""

    name, row = "dram_memcpy", micro_row_id("dram_memcpy", repeat, COPY_VERSION)

    def blank() -> MicroRow:
        return MicroRow(
            row,
            name,
            "memory",
            operation="byte",
            repeat=repeat,
            version=COPY_VERSION,
            run=bench.run,
            date=format_now(),
        )

    def make() -> MicroRow:
        enqueue, once_s, byte = make_copy_load(bench, buffers)
        load, empty = DeviceLoad(bench.device, enqueue, once_s), replace(blank(), byte=byte, operations=byte)
        seen[name] = sustain_load(choose_repeat_bench(bench, seen.get(name)), load, empty)
        return seen[name]

    return MicroTask(row, make, blank)


def make_idle_task(
    sampler: Sampler, run: str, name: str, repeat: int, length_s: float = IDLE_S, host_busy: bool = False
) -> MicroTask:
    """Measure power with nothing to do on the device, the host asleep or counting."""

    def blank() -> MicroRow:
        return MicroRow(micro_row_id(name, repeat), name, "idle", repeat=repeat, run=run, date=format_now())

    def make() -> MicroRow:
        mark, began_s = sampler.head, time.monotonic()
        while host_busy and time.monotonic() - began_s < length_s:
            sum(range(1000))
        time.sleep(max(0.0, began_s + length_s - time.monotonic()))
        sampler.check()
        held = take_window(sampler.since(mark), began_s, time.monotonic(), SettlingRule())
        return replace(blank(), **describe_micro_window(held))

    return MicroTask(micro_row_id(name, repeat), make, blank)


def measure_idle_w(bench: DeviceBench) -> float | None:
    """Measure idle power with the context open, for the energies above idle of the rows that follow."""
    try:
        time.sleep(0.3)
        return make_idle_task(bench.sampler, bench.run, "idle", 0, 0.9).make().power_w
    except Exception as error:
        say(f"idle power was not measured: {error}")
        return None


def warm_card(bench: DeviceBench, buffers: DeviceBuffers, compiled: CompiledKernels, length_s: float) -> None:
    """Bring the card to its working temperature: a cold card leaks less."""
    (benchmark,) = find_benchmarks(["fp32_fma"])
    ready = benchmark_kernels.prepare_benchmark(benchmark, buffers, compiled.cubin(benchmark))
    iterations = benchmark_kernels.calibrate_iterations(ready, 0.02)
    end_s = time.monotonic() + length_s
    while time.monotonic() < end_s:
        for _ in range(5):
            ready.launch(iterations)
        bench.device.synchronize()
    bench.device.unload(ready.kernel)


def make_info(bench: DeviceBench) -> RunInfo:
    """Describe card and libraries of the run."""
    device = bench.device
    return make_run_info(
        bench.run, bench.sampler.identity, sm_count=device.sm_count, l2_byte=device.l2_byte, cuda=nvrtc_version()
    )


Rows = Annotated[Path | None, Option("Folder for rows, saved as they come; a re-run continues there.")]
Repeats = Annotated[int, Option("Rounds; 2 measures everything a second time.")]
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
    counters: Annotated[bool, Option("Hardware counters through ncu instead of time and power.")] = False,
    quick: Quick = False,
    child: Child = False,
    target: Target = False,
    since: Since = "",
) -> VerbResult:
    """Time, power and energy of every unit of the GPU: arithmetic, memory, structure and mixes."""
    names, budget_s = [name for name in only.split(",") if name], parse(budget, "s", "--budget")
    if listed:
        found = find_benchmarks(names)
        told = (f"{b.unit.operation}{f', {b.curve} {b.at:g}' if b.curve else ''}" for b in found)
        lines = [f"{b.name:24} {b.group:11} {text}" for b, text in zip(found, told, strict=True)]
        return VerbResult([b.name for b in found], "\n".join(lines))
    folder = _open_folder(out, repeats, None if counters or target else before)
    if target:
        return VerbResult(note=f"counted {unit_counters.count_kernels(folder, budget_s, names, before)} kernels")
    if child:
        return VerbResult(exit_code=run_microbench_child(folder, names, repeats, budget_s, since, quick))
    find_benchmarks([name for name in names if name != "multimedia"])  # a wrong name costs nothing
    if counters:
        return VerbResult(unit_counters.collect_unit_counters(folder, budget_s, names, before))
    options = ["--repeats", str(repeats), *(["--only", only] if names else []), *(["--quick"] if quick else [])]
    return _supervise(folder, "microbench", options, budget_s)


def multimedia(
    out: Rows = None,
    budget: Budget = "240s",
    repeats: Repeats = 1,
    before: Before = None,
    frames: Annotated[int, Option("Frames of the clip.")] = FRAMES,
    quick: Quick = False,
    child: Child = False,
    since: Since = "",
) -> VerbResult:
    """Rotation, diamond motion search, 8x8 DCT and debarreling of an 80-frame full-HD clip, checked against NumPy."""
    budget_s, folder = parse(budget, "s", "--budget"), _open_folder(out, repeats, before)
    if frames < 3:
        raise bad_value("--frames", "three frames or more", frames)
    if child:
        return VerbResult(exit_code=run_multimedia_child(folder, repeats, budget_s, since, frames, quick))
    options = ["--repeats", str(repeats), "--frames", str(frames), *(["--quick"] if quick else [])]
    return _supervise(folder, "multimedia", options, budget_s)


def _open_folder(out: Path | None, repeats: int, before: Path | None) -> Path:
    """Make the folder for rows, with those of ``before`` in it."""
    if out is None:
        raise BadInput("--out: expected a folder for the rows, got none.")
    if repeats < 1:
        raise bad_value("--repeats", "one round or more", repeats)
    if before is not None:
        microbench_campaign.adopt_rows(before, out)
    out.mkdir(parents=True, exist_ok=True)
    return out


def _supervise(out: Path, verb: str, options: list[str], budget_s: float) -> VerbResult:
    """Measure in a child; failures go to stderr by name, and are no failure of the whole unless nothing is left."""
    command = [sys.executable, "-m", "wattcast.measure", verb, "--child", "--out", str(out), *options]
    counts = microbench_campaign.supervise_child(out, verb, command, budget_s)
    for name, error in microbench_campaign.list_failures(out / f"{verb}.jsonl").items():
        say(f"failed: {name}: {error}")
    return VerbResult(dict(sorted(counts.items())), exit_code=0 if counts["measured"] else 4)


RATE_RESERVE = 1.3  # the period of a fixed rate over the time of the slowest variant
MOVED = ("rotate", "dct_fp32_cached", "dct_fp64_uncached")
MOVED_FRAMES = 8  # in one unit of the moving workloads
MULTIMEDIA_WARM_S = 3.0


def run_multimedia_child(
    out: Path, repeats: int, budget_s: float, since: str, frames: int = FRAMES, quick: bool = False
) -> int:
    """Measure all workloads; 0 when done, ``BROKEN`` when the device context was lost."""
    campaign = MicroCampaign(out, "multimedia", time.monotonic() + budget_s, since)
    with Sampler("nvml") as sampler:
        write_heartbeat(out, "starting", "multimedia")
        device = CudaDevice.open()
        run = datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
        bench = DeviceBench(device, sampler, run)
        campaign.bench = bench
        if quick:
            bench.least_s, bench.rule = 0.9, replace(bench.rule, least_ticks=5)
        Journal(out / "runs.jsonl", key="run").append(make_info(bench))
        try:
            clip = MediaClip.make(device, frames)
            for name in NAMES:  # before anything runs long; what fails here fails its own rows only
                write_heartbeat(out, f"checking {name}", "multimedia")
                with contextlib.suppress(ClipCheckFailed):
                    clip.check(name)
            write_heartbeat(out, "warming up", "multimedia")
            _warm(clip, 0.3 if quick else MULTIMEDIA_WARM_S)
            bench.idle_power_w = measure_idle_w(bench)
            for repeat in range(repeats):
                campaign.run(list_multimedia_tasks(bench, clip, repeat))
            sampler.since(0).save(out / "samples-multimedia.npz")
        except DeviceFault as error:
            say(f"the device context is lost: {error}")
            return BROKEN
    return 0


def list_multimedia_tasks(bench: DeviceBench, clip: MediaClip, repeat: int) -> list[MicroTask]:
    """List all rows of one round."""
    made = [make_idle_task(bench.sampler, bench.run, "multimedia_idle", repeat)]
    made += [_task(bench, clip, repeat, name, partial(_back_to_back, clip, name), name) for name in NAMES]
    mover = FrameMover(clip)
    moved = min(MOVED_FRAMES, clip.frames)
    made.append(_task(bench, clip, repeat, "move_frames", partial(mover.load, ""), "", moved))
    made += [_task(bench, clip, repeat, f"{name}_moved", partial(mover.load, name), name, moved) for name in MOVED]
    made += [_task(bench, clip, repeat, f"{name}_at_rate", partial(_at_rate, clip, name), name) for name in DCTS]
    return made


def _task(
    bench: DeviceBench,
    clip: MediaClip,
    repeat: int,
    name: str,
    load: Callable[[], DeviceLoad],
    checked: str,
    frames: int = 0,
) -> MicroTask:
    def blank() -> MicroRow:
        return MicroRow(
            micro_row_id(name, repeat),
            name,
            "multimedia",
            operation="frame",
            repeat=repeat,
            run=bench.run,
            date=format_now(),
            threads=THREADS if checked else None,
            blocks=-(-clip.items(checked, frames) // THREADS) if checked else None,
            operations=float(frames or clip.frames),
        )

    def make() -> MicroRow:
        passed = clip.check(checked) if checked else ""
        made = load()
        row = sustain_load(bench, made, replace(blank(), checked=passed))
        return replace(row, curve="rate", at=made.period_s) if made.period_s else row

    return MicroTask(micro_row_id(name, repeat), make, blank)


def _timed_s(device: CudaDevice, enqueue: Callable[[], None]) -> float:
    """Seconds of one unit, once warm; the shorter of two."""
    enqueue()
    took = []
    for _ in range(2):
        begin = device.mark()
        enqueue()
        end = device.mark()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
        device.recycle([begin, end])
    return max(min(took), 1e-6)


def _back_to_back(clip: MediaClip, name: str) -> DeviceLoad:
    def enqueue() -> None:
        clip.enqueue(name)

    return DeviceLoad(clip.device, enqueue, _timed_s(clip.device, enqueue))


def _at_rate(clip: MediaClip, name: str) -> DeviceLoad:
    slowest_s = max(_timed_s(clip.device, partial(clip.enqueue, other)) for other in DCTS)
    return replace(_back_to_back(clip, name), period_s=round(RATE_RESERVE * slowest_s, 4) or 1e-4)


def _warm(clip: MediaClip, length_s: float) -> None:
    end_s = time.monotonic() + length_s
    while time.monotonic() < end_s:
        clip.enqueue("dct_fp32_cached")
        clip.enqueue("motion")
        clip.device.synchronize()


@dataclass
class FrameMover:
    """Frames from page-locked host memory to the device and results back, a few at a time."""

    clip: MediaClip
    host: Any = None

    def load(self, name: str) -> DeviceLoad:
        """One unit: frames in, a kernel (or none) over them, as many frames of the result out."""
        device, clip = self.clip.device, self.clip
        count = min(MOVED_FRAMES, clip.frames)
        size = count * FRAME_BYTE
        back = min(size, clip.frames * LUMA * 2)
        if self.host is None:
            self.host = device.call("cuMemHostAlloc", 2 * size, 0)
            device.call("cuMemcpyDtoH", int(self.host), clip.taken, size)  # the frames themselves, to send again
        to_device, to_host = int(self.host), int(self.host) + size

        def enqueue() -> None:
            device.call("cuMemcpyHtoDAsync", clip.taken, to_device, size, device.stream)
            if name:
                clip.enqueue(name, count)
            device.call("cuMemcpyDtoHAsync", to_host, clip.result, back, device.stream)

        return DeviceLoad(device, enqueue, _timed_s(device, enqueue))
