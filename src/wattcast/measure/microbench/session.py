"""One child process on the device: idle rows, warm-up, the suite, the driver's own copy."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from wattcast.measure.microbench import kernels
from wattcast.measure.microbench.campaign import BROKEN, Campaign, Task, beat, now
from wattcast.measure.microbench.compile import Compiled, cache_folder, nvrtc_version
from wattcast.measure.microbench.device import Device, DeviceFault
from wattcast.measure.microbench.kernels import Buffers, copy_load, row_id
from wattcast.measure.microbench.row import MAX_POWER_OF, MicroRow
from wattcast.measure.microbench.suite import named
from wattcast.measure.microbench.sustain import Bench, Load, sustain
from wattcast.measure.microbench.unit import Benchmark
from wattcast.measure.run_info import run_info, say
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady import Rule, window
from wattcast.records import Journal, RunInfo

WARM_S = 6.0
IDLE_S = 1.3
WORKERS = 6
COPY_VERSION = 2  # of the driver's copy: a whole buffer, as ours


def run_child(out: Path, only: Sequence[str], repeats: int, budget_s: float, since: str, quick: bool = False) -> int:
    """Measure the suite; 0 when done, :data:`BROKEN` when the device context was lost."""
    campaign = Campaign(out, "microbench", time.monotonic() + budget_s, since)
    benchmarks = named(list(only))
    with Sampler("nvml") as sampler:
        beat(out, "starting", "microbench")
        run = datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
        if not only:
            off = [idle_task(sampler, run, "idle_context_off", 0)]
            off += [idle_task(sampler, run, "idle_host_busy", 0, host_busy=True)]
            campaign.run(off)
        device = Device.open()
        bench = Bench(device, sampler, run)
        campaign.bench = bench
        if quick:
            bench.least_s, bench.rule = 0.9, replace(bench.rule, least_ticks=5)
        names = tuple(b.name for b in benchmarks) if only else ()
        compiled = Compiled(device.architecture, cache_folder(), names)
        compiled.start(worker_count())
        Journal(out / "runs.jsonl", key="run").append(info_of(bench))
        try:
            _measure(campaign, bench, benchmarks, compiled, repeats, quick)
            sampler.since(0).save(out / "samples-microbench.npz")
        except DeviceFault as error:
            say(f"the device context is lost: {error}")
            return BROKEN
        finally:
            compiled.stop()
    return 0


def worker_count() -> int:
    """Compiling processes that leave the measuring ones alone."""
    return min(WORKERS, max((os.cpu_count() or 2) - 2, 1))


def _measure(
    campaign: Campaign,
    bench: Bench,
    benchmarks: list[Benchmark],
    compiled: Compiled,
    repeats: int,
    quick: bool,
) -> None:
    device = bench.device
    supported = [b for b in benchmarks if b.supported(device.architecture)]
    say(f"{device.name}, {device.architecture}, {device.sm_count} SMs: {len(supported)} benchmarks")
    buffers = Buffers.take(device)
    beat(campaign.out, "warming up", "microbench")
    warm(bench, buffers, compiled, 0.5 if quick else WARM_S)
    bench.idle_power_w = idle_now_w(bench)
    seen: dict[str, MicroRow] = {}
    for repeat in range(repeats):
        wanted = [b for b in supported if not (repeat and b.once)]
        tasks = [idle_task(bench.sampler, bench.run, "idle_context_on", repeat, 0.75 if quick else IDLE_S)]
        tasks += [task_of(bench, buffers, compiled, b, repeat, seen) for b in wanted]
        tasks.insert(min(6, len(tasks)), copy_task(bench, buffers, repeat, seen))
        campaign.run(tasks)


def as_before(bench: Bench, before: MicroRow | None) -> Bench:
    """How to repeat a row: shorter, but not at the cap, which a short load may end before it is met."""
    return bench if before is None or "sw_power_cap" in before.throttle else bench.again()


def task_of(
    bench: Bench, buffers: Buffers, compiled: Compiled, benchmark: Benchmark, repeat: int, seen: dict[str, MicroRow]
) -> Task:
    """A benchmark as a task; ``seen`` are rows of an earlier round, with the iterations of a launch."""

    def make() -> MicroRow:
        ready = kernels.prepare(benchmark, buffers, compiled.cubin(benchmark))
        before = seen.get(benchmark.name)
        try:
            blank = kernels.blank(bench, benchmark, repeat, now())
            row = kernels.measure(as_before(bench, before), ready, blank, (before and before.iterations) or 0)
            seen[benchmark.name] = row
            return row
        finally:
            if not _lost(bench.device):
                bench.device.unload(ready.kernel)

    return Task(
        row_id(benchmark.name, repeat, benchmark.version),
        make,
        lambda: kernels.blank(bench, benchmark, repeat, now()),
    )


def _lost(device: Device) -> bool:
    """Whether the context is beyond use; a call after a fault would only hide its error."""
    try:
        device.synchronize(5.0)
    except DeviceFault:
        return True
    return False


def copy_task(bench: Bench, buffers: Buffers, repeat: int, seen: dict[str, MicroRow]) -> Task:
    """The driver's own copy, against which our DRAM copy is held."""

    name, row = "dram_memcpy", row_id("dram_memcpy", repeat, COPY_VERSION)

    def blank() -> MicroRow:
        return MicroRow(
            row, name, "memory", operation="byte", repeat=repeat, version=COPY_VERSION, run=bench.run, date=now()
        )

    def make() -> MicroRow:
        enqueue, once_s, byte = copy_load(bench, buffers)
        load, empty = Load(bench.device, enqueue, once_s), replace(blank(), byte=byte, operations=byte)
        seen[name] = sustain(as_before(bench, seen.get(name)), load, empty)
        return seen[name]

    return Task(row, make, blank)


def idle_task(
    sampler: Sampler, run: str, name: str, repeat: int, length_s: float = IDLE_S, host_busy: bool = False
) -> Task:
    """Power with nothing to do on the device, the host asleep or counting; the driver keeps the clock it likes."""

    def blank() -> MicroRow:
        return MicroRow(row_id(name, repeat), name, "idle", repeat=repeat, run=run, date=now())

    def make() -> MicroRow:
        mark, began_s = sampler.head, time.monotonic()
        while host_busy and time.monotonic() - began_s < length_s:
            sum(range(1000))
        time.sleep(max(0.0, began_s + length_s - time.monotonic()))
        sampler.check()
        held = window(sampler.since(mark), began_s, time.monotonic(), Rule())
        clock, instant = held.samples.known("sm_clock_hz"), held.samples.known("instant_w")
        return replace(
            blank(),
            duration_s=held.duration_s,
            power_w=held.ticks.power_w,
            power_spread_w=held.ticks.spread_w,
            max_power_w=float(instant.max()) if len(instant) else None,
            max_power_of=MAX_POWER_OF if len(instant) else "",
            memory_power_w=held.samples.last("memory_w"),
            sm_clock_hz=float(clock.mean()) if len(clock) else None,
            temperature_c=held.samples.mean("temperature_c"),
            ticks=held.ticks.intervals,
            throttle=held.samples.throttle,
            flags=held.flags,
        )

    return Task(row_id(name, repeat), make, blank)


def idle_now_w(bench: Bench) -> float | None:
    """Idle power with the context open, for the energies above idle of the rows that follow."""
    try:
        time.sleep(0.3)
        return idle_task(bench.sampler, bench.run, "idle", 0, 0.9).make().power_w
    except Exception as error:
        say(f"idle power was not measured: {error}")
        return None


def warm(bench: Bench, buffers: Buffers, compiled: Compiled, length_s: float) -> None:
    """Bring the card to its working temperature: a cold card leaks less."""
    (benchmark,) = named(["fp32_fma"])
    ready = kernels.prepare(benchmark, buffers, compiled.cubin(benchmark))
    iterations = kernels.calibrate(ready, 0.02)
    end_s = time.monotonic() + length_s
    while time.monotonic() < end_s:
        for _ in range(5):
            ready.launch(iterations)
        bench.device.synchronize()
    bench.device.unload(ready.kernel)


def info_of(bench: Bench) -> RunInfo:
    """Which card, which libraries."""
    device = bench.device
    return run_info(
        bench.run, bench.sampler.identity, sm_count=device.sm_count, l2_byte=device.l2_byte, cuda=nvrtc_version()
    )
