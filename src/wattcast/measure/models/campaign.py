"""``measure models``: every planned whole model, a row saved as soon as it is measured, within a time budget.

A row that fails is recorded with its error and costs nothing but itself; a row on file is skipped, so a
stopped campaign continues. Rows of a model share one module. Kernel profiles come last.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wattcast.errors import Refused, unknown_name
from wattcast.measure.models import rows
from wattcast.measure.models.build import Built, build, iteration, serves
from wattcast.measure.models.device import Device
from wattcast.measure.models.plan import Dims, ModelSpec, dims_of, plan
from wattcast.measure.models.profile import profile
from wattcast.measure.models.rows import Bench
from wattcast.measure.run_info import run_name, say, spinner_if_any, torch_run_info
from wattcast.measure.sampler import Sampler
from wattcast.records import Journal, ModelKernels

ROW_S, PROFILE_S = 8.0, 6.0  # time kept back for one more of each


@dataclass
class Campaign:
    """One call of ``measure models``: where rows go and when to stop. ``cut`` makes a model small, for tests."""

    bench: Bench
    out: Path
    deadline_s: float
    cut: Callable[[Dims], Dims] = field(default=lambda dims: dims)
    counts: Counter[str] = field(default_factory=Counter)
    built: Built | None = None

    @property
    def left_s(self) -> float:
        """Time until the budget is spent."""
        return self.deadline_s - time.monotonic()

    def module(self, spec: ModelSpec) -> Built:
        """The module of a row: the one at hand where it serves, else a fresh one."""
        if not serves(self.built, spec):
            self.drop()
            device = self.bench.device
            self.built = build(spec, device.torch, device.name, self.cut(dims_of(spec.model)))
        assert self.built is not None
        return self.built

    def prepared(self, spec: ModelSpec) -> tuple[Built, Callable[[], Any]]:
        """The module of a row and one iteration of it."""
        built, device = self.module(spec), self.bench.device
        return built, iteration(built, spec, device.torch, device.name, self.cut(dims_of(spec.model)))

    def drop(self) -> None:
        """Forget the module and give its memory back."""
        self.built = None
        self.bench.device.free()

    def mend(self, error: Exception) -> None:
        """Bring device and sampler back to a clean state; a dead context ends the campaign."""
        if isinstance(error, Refused) and self.bench.sampler.lost:
            raise error
        self.drop()
        if not self.bench.sampler.healthy:
            self.bench.sampler.restart()


def measure_step(campaign: Campaign, specs: list[ModelSpec]) -> None:
    """A row of every planned workload that is not on file yet."""
    journal = Journal(campaign.out / "models.jsonl")
    for spec in _within(campaign, [s for s in specs if s.id not in journal.ids], ROW_S, "models"):
        began_s = time.monotonic()
        try:
            built, run = campaign.prepared(spec)
            row = rows.measure(campaign.bench, spec, built, run)
            del run
            campaign.counts["measured"] += 1
        except Exception as error:
            row = replace(rows.blank(campaign.bench, spec), error=f"{type(error).__name__}: {error}"[:400])
            campaign.counts["failed"] += 1
            journal.append(row)
            say(f"  {spec.id}: {row.error}")
            campaign.mend(error)
            continue
        journal.append(row)
        power = f"{row.power_w:.0f} W" if row.power_w else "no power"
        said = f"{1e3 * (row.latency_s or 0.0):.3f} ms, {power}, {len(row.flags)} flags"
        say(f"  {spec.id}: {said} ({time.monotonic() - began_s:.1f} s)")
        campaign.bench.device.free()
    campaign.drop()


def profile_step(campaign: Campaign, specs: list[ModelSpec]) -> None:
    """Kernels of each row's iteration, launched eagerly."""
    journal = Journal(campaign.out / "model_kernels.jsonl")
    for spec in _within(campaign, [s for s in specs if s.id not in journal.ids], PROFILE_S, "profile"):
        try:
            _, run = campaign.prepared(spec)
            found = profile(campaign.bench.device, spec.id, run, campaign.bench.run)
            del run
            campaign.bench.device.free()
        except Exception as error:
            found = ModelKernels(spec.id, run=campaign.bench.run, error=f"{type(error).__name__}: {error}"[:400])
            campaign.mend(error)
        journal.append(found)
        campaign.counts["profile failed" if found.error else "profiled"] += 1
    campaign.drop()


STEPS = {"models": measure_step, "profile": profile_step}


def run_models(
    out: Path,
    budget_s: float,
    steps: tuple[str, ...] = ("models", "profile"),
    only: str = "",
    few: int = 0,
    tier: int = 0,
) -> Counter[str]:
    """Measure the plan within ``budget_s``; ``only`` keeps one model, ``tier`` one tier, ``few`` so many rows."""
    for step in steps:
        if step not in STEPS:
            raise unknown_name("step", step, STEPS, f"Known: {', '.join(STEPS)}.")
    specs = chosen(only, few, tier)
    began_s = time.monotonic()
    device = Device.open()
    out.mkdir(parents=True, exist_ok=True)
    with Sampler("nvml") as sampler:
        bench = Bench(device, sampler, run_name())
        bench.spinner = spinner_if_any(device.torch)
        Journal(out / "runs.jsonl", key="run").append(torch_run_info(bench.run, sampler.identity, device.torch))
        campaign = Campaign(bench, out, began_s + budget_s)
        say(f"ready after {time.monotonic() - began_s:.1f} s; {len(specs)} rows planned")
        for step in steps:
            STEPS[step](campaign, specs)
        sampler.since(0).save(out / f"samples-{bench.run}.npz")
        campaign.counts["sampler read errors"] += sampler.errors
    return campaign.counts


def chosen(only: str = "", few: int = 0, tier: int = 0) -> list[ModelSpec]:
    """Rows of the plan, or of one model, or of one tier, or the first few."""
    known = list(dict.fromkeys(spec.model for spec in plan()))
    if only and only not in known:
        raise unknown_name("planned model", only, known, f"Planned: {', '.join(known)}.")
    tiers = sorted({spec.tier for spec in plan()})
    if tier and tier not in tiers:
        raise unknown_name("tier", str(tier), map(str, tiers), f"Planned: {', '.join(map(str, tiers))}.")
    specs = [spec for spec in plan() if only in ("", spec.model) and tier in (0, spec.tier)]
    return specs[:few] if few else specs


def _within(campaign: Campaign, specs: list[ModelSpec], each_s: float, label: str) -> Iterator[ModelSpec]:
    for place, spec in enumerate(specs):
        if campaign.left_s < each_s:
            say(f"{label}: budget spent after {place} of {len(specs)}")
            campaign.counts[f"{label} left for another call"] += len(specs) - place
            return
        say(f"{label}: {place + 1} of {len(specs)}, {campaign.left_s:.0f} s left")
        yield spec
