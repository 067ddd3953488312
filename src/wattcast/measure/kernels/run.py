"""One call of ``measure kernels``: the card, the sampler, the steps one after another within a budget."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from pathlib import Path

from wattcast.errors import unknown_name
from wattcast.measure.kernels import rows
from wattcast.measure.kernels.campaign import Campaign
from wattcast.measure.kernels.gpu import Gpu
from wattcast.measure.kernels.plan import plan
from wattcast.measure.kernels.rows import Bench
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.kernels.steps import STEPS
from wattcast.measure.run_info import run_name, say, spinner_if_any, torch_run_info
from wattcast.measure.sampler import Sampler
from wattcast.records import Journal


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
        bench = Bench(gpu, sampler, run_name(), top_clock_hz=sampler.identity.top_clock_hz or 0.0)
        bench.spinner = spinner_if_any(gpu.torch)
        campaign = Campaign(bench, out, began_s + budget_s, few, after, listed=listed, round_=round_)
        campaign.journals["run"] = Journal(out / "runs.jsonl", key="run")
        campaign.journals["run"].append(torch_run_info(bench.run, sampler.identity, gpu.torch))
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
