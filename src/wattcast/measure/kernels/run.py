"""One call of ``measure kernels``: the card, the sampler, the steps one after another within a budget."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wattcast.errors import unknown_name
from wattcast.measure.kernels import rows
from wattcast.measure.kernels.campaign import Campaign, say
from wattcast.measure.kernels.gpu import Gpu
from wattcast.measure.kernels.plan import plan
from wattcast.measure.kernels.rows import Bench
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.kernels.steps import STEPS
from wattcast.measure.sampler import Sampler
from wattcast.records import Journal, RunInfo


def run_campaign(
    out: Path,
    steps: list[str],
    budget_s: float,
    few: int = 0,
    after: int = 0,
    listed: list[Spec] | None = None,
    round_: int = 1,
) -> Counter[str]:
    """Run ``steps`` one after another within ``budget_s``; returns how many rows of each kind.

    ``listed`` operators take the place of the plan's; a step then measures all of them that suit it.
    """
    for step in steps:
        if step not in STEPS:
            raise unknown_name("step", step, STEPS, f"Known: {', '.join(STEPS)}.")
    began_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with Sampler("nvml") as sampler:
        gpu = Gpu.open()
        bench = _bench(gpu, sampler)
        campaign = Campaign(bench, out, began_s + budget_s, few, after, listed=listed, round_=round_)
        campaign.journals["run"] = Journal(out / "runs.jsonl", key="run")
        campaign.journals["run"].append(_run_info(bench))
        bench.top_clock_hz = rows.seen_top_clock_hz(bench, plan()[0])
        say(f"ready after {time.monotonic() - began_s:.1f} s; top clock {bench.top_clock_hz / 1e6:.0f} MHz")
        for step in steps:
            step_s = time.monotonic()
            try:
                STEPS[step](campaign)
            except Exception as error:
                campaign.counts[f"{step} step failed: {type(error).__name__}: {error}"[:300]] += 1
                traceback.print_exc(limit=6)
                if sampler.lost:
                    break
            say(f"{step}: {time.monotonic() - step_s:.1f} s")
        if {"sustained", "duty", "pattern"} & set(steps):
            rows.samples_of(bench).save(out / f"samples-{bench.run}.npz")
        campaign.counts["sampler read errors"] += sampler.errors
        for text, count in campaign.errors.most_common(15):
            say(f"{count} x {text}")
    return campaign.counts


def _bench(gpu: Gpu, sampler: Sampler) -> Bench:
    from wattcast.measure.spin import spinner

    run = datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
    bench = Bench(gpu, sampler, run, top_clock_hz=sampler.identity.top_clock_hz or 0.0)
    try:
        bench.spinner = spinner(gpu.torch)
    except Exception as error:
        say(f"no spin kernel: {type(error).__name__}: {error}")
    return bench


def _run_info(bench: Bench) -> RunInfo:
    from wattcast import __version__

    torch, identity = bench.gpu.torch, bench.sampler.identity
    properties = torch.cuda.get_device_properties(0)
    cublas = ".".join(str(part) for part in _cublas_version(torch))
    return RunInfo(
        bench.run,
        datetime.now(UTC).isoformat(timespec="seconds"),
        card_name=identity.name,
        card_uuid=identity.uuid,
        card_serial=identity.serial,
        driver=identity.driver,
        cuda=str(torch.version.cuda),
        torch=str(torch.__version__),
        cublas=cublas,
        cudnn=str(torch.backends.cudnn.version()),
        nvml=identity.library,
        wattcast=__version__,
        power_limit_w=identity.power_limit_w,
        sm_count=properties.multi_processor_count,
        l2_byte=properties.L2_cache_size,
        top_clock_hz=identity.top_clock_hz,
    )


def _cublas_version(torch: Any) -> tuple[int, ...]:
    """cuBLAS says its version through its own library, which PyTorch has loaded."""
    import ctypes

    for name in ("libcublas.so.13", "libcublas.so.12", "libcublas.so"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            values = []
            for item in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
                number = ctypes.c_int()
                library.cublasGetProperty(item, ctypes.byref(number))
                values.append(number.value)
            return tuple(values)
    return ()
