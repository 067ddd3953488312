"""One child process that measures the multimedia workloads: back to back, at a fixed rate, and with frames moved.

``*_at_rate``: one pass over the clip every so often, the same for all DCT variants, so that what a variant
saves shows as power. ``move_frames``: frames go to the device and back, and no kernel is launched;
``*_moved`` does the same and launches one, so that the difference is the kernel's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from wattcast.measure.microbench.campaign import BROKEN, Campaign, Task, beat, now
from wattcast.measure.microbench.device import Device, DeviceFault
from wattcast.measure.microbench.kernels import row_id
from wattcast.measure.microbench.row import MicroRow
from wattcast.measure.microbench.session import idle_now_w, idle_task, info_of
from wattcast.measure.microbench.sustain import Bench, Load, sustain
from wattcast.measure.multimedia.reference import FRAME_BYTE, FRAMES, LUMA
from wattcast.measure.multimedia.workloads import DCTS, NAMES, THREADS, CheckFailed, Clip
from wattcast.measure.run_info import say
from wattcast.measure.sampler import Sampler
from wattcast.records import Journal

RATE_RESERVE = 1.3  # the period of a fixed rate over the time of the slowest variant
MOVED = ("rotate", "dct_fp32_cached", "dct_fp64_uncached")
MOVED_FRAMES = 8  # in one unit of the moving workloads
WARM_S = 3.0


def run_child(out: Path, repeats: int, budget_s: float, since: str, frames: int = FRAMES, quick: bool = False) -> int:
    """Measure all workloads; 0 when done, :data:`BROKEN` when the device context was lost."""
    campaign = Campaign(out, "multimedia", time.monotonic() + budget_s, since)
    with Sampler("nvml") as sampler:
        beat(out, "starting", "multimedia")
        device = Device.open()
        run = datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
        bench = Bench(device, sampler, run)
        campaign.bench = bench
        if quick:
            bench.least_s, bench.rule = 0.9, replace(bench.rule, least_ticks=5)
        Journal(out / "runs.jsonl", key="run").append(info_of(bench))
        try:
            clip = Clip.make(device, frames)
            for name in NAMES:  # before anything runs long; what fails here fails its own rows only
                beat(out, f"checking {name}", "multimedia")
                with contextlib.suppress(CheckFailed):
                    clip.check(name)
            beat(out, "warming up", "multimedia")
            _warm(clip, 0.3 if quick else WARM_S)
            bench.idle_power_w = idle_now_w(bench)
            for repeat in range(repeats):
                campaign.run(tasks(bench, clip, repeat))
            sampler.since(0).save(out / "samples-multimedia.npz")
        except DeviceFault as error:
            say(f"the device context is lost: {error}")
            return BROKEN
    return 0


def tasks(bench: Bench, clip: Clip, repeat: int) -> list[Task]:
    """All rows of one round."""
    made = [idle_task(bench.sampler, bench.run, "multimedia_idle", repeat)]
    made += [_task(bench, clip, repeat, name, partial(_back_to_back, clip, name), name) for name in NAMES]
    mover = Mover(clip)
    moved = min(MOVED_FRAMES, clip.frames)
    made.append(_task(bench, clip, repeat, "move_frames", partial(mover.load, ""), "", moved))
    made += [_task(bench, clip, repeat, f"{name}_moved", partial(mover.load, name), name, moved) for name in MOVED]
    made += [_task(bench, clip, repeat, f"{name}_at_rate", partial(_at_rate, clip, name), name) for name in DCTS]
    return made


def _task(
    bench: Bench, clip: Clip, repeat: int, name: str, load: Callable[[], Load], checked: str, frames: int = 0
) -> Task:
    def blank() -> MicroRow:
        return MicroRow(
            row_id(name, repeat),
            name,
            "multimedia",
            operation="frame",
            repeat=repeat,
            run=bench.run,
            date=now(),
            threads=THREADS if checked else None,
            blocks=-(-clip.items(checked, frames) // THREADS) if checked else None,
            operations=float(frames or clip.frames),
        )

    def make() -> MicroRow:
        passed = clip.check(checked) if checked else ""
        made = load()
        row = sustain(bench, made, replace(blank(), checked=passed))
        return replace(row, curve="rate", at=made.period_s) if made.period_s else row

    return Task(row_id(name, repeat), make, blank)


def _timed_s(device: Device, enqueue: Callable[[], None]) -> float:
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


def _back_to_back(clip: Clip, name: str) -> Load:
    def enqueue() -> None:
        clip.enqueue(name)

    return Load(clip.device, enqueue, _timed_s(clip.device, enqueue))


def _at_rate(clip: Clip, name: str) -> Load:
    slowest_s = max(_timed_s(clip.device, partial(clip.enqueue, other)) for other in DCTS)
    return replace(_back_to_back(clip, name), period_s=round(RATE_RESERVE * slowest_s, 4) or 1e-4)


def _warm(clip: Clip, length_s: float) -> None:
    end_s = time.monotonic() + length_s
    while time.monotonic() < end_s:
        clip.enqueue("dct_fp32_cached")
        clip.enqueue("motion")
        clip.device.synchronize()


@dataclass
class Mover:
    """Frames from page-locked host memory to the device and results back, a few at a time."""

    clip: Clip
    host: Any = None

    def load(self, name: str) -> Load:
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

        return Load(device, enqueue, _timed_s(device, enqueue))
