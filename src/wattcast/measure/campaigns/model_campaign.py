"""Run ``measure models``: time, power and clock of whole models, a test set that is never used for fitting.

Each row is saved as soon as it is measured. Profiles of eager iterations come last, because the profiler's hooks
stay in the process; in them only shares of time count, since the clock is whatever it happened to be.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.errors import check_names, unknown_name
from wattcast.core.measured_rows import ModelKernels, ModelRow
from wattcast.core.whole_files import hold_folder
from wattcast.measure.campaigns import model_runs
from wattcast.measure.campaigns.campaign_engine import Campaign, OperatorBench, list_trace_events
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule, await_clock, hold_load, say

LONGEST_NAME = 200


def profile_iteration(device: Any, row_id: str, run: Callable[[], Any], bench_run: str) -> ModelKernels:
    """Record names and durations of the kernels of one iteration."""
    torch = device.torch
    device.warm(run)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        device.issue(run, 1)
        device.synchronize()
    return total_kernels(row_id, list_trace_events(profiler), bench_run)


def total_kernels(row_id: str, events: Iterable[dict[str, Any]], run: str) -> ModelKernels:
    """List the kernels of a chrome trace in the order they started."""
    kept = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    kept.sort(key=lambda event: float(event["ts"]))
    names: dict[str, int] = {}
    order = [names.setdefault(str(event["name"])[:LONGEST_NAME], len(names)) for event in kept]
    seconds = tuple(round(float(event["dur"]) * 1e-6, 9) for event in kept)
    return ModelKernels(row_id, tuple(names), tuple(order), seconds, run=run, error="" if kept else "no kernel seen")


CHUNK_S = 0.020  # iterations are queued in chunks of about this length, a few ahead
LONGEST_BURST_S = 0.060  # the governor answers after about 90 ms
BURST_S = 0.020
REST_S = 0.05  # before a burst
CLIMB_S = 1.2  # to wait for the top clock
TOP_SHARE = 0.995  # of the top clock, below which a burst was not at the top
SETTLE = SettlingRule(longest_s=5.0)


def make_blank_model_row(bench: OperatorBench, spec: model_runs.ModelRunSpec) -> ModelRow:
    """Return a row that names what is to be measured, with nothing measured yet."""
    told = {name: getattr(spec, name) for name in ("id", "model", "graph")} | spec.workload
    return ModelRow(**told, run=bench.run, date=datetime.now(UTC).isoformat(timespec="seconds"))


def measure_model(
    bench: OperatorBench, spec: model_runs.ModelRunSpec, built: model_runs.BuiltModel, run: Callable[[], Any]
) -> ModelRow:
    """Measure time, power and clock of one iteration, captured in a graph where asked and possible."""
    row, device = replace(make_blank_model_row(bench, spec), parameters=built.parameters), bench.gpu
    flags: tuple[str, ...] = ()
    once_s = device.warm(run)
    load = run
    if spec.graph:
        try:
            load = device.capture(run)
        except Exception as error:  # an operation that no graph can hold: the row is still worth having
            device.synchronize()
            flags = (f"not captured: {type(error).__name__}: {error}"[:200],)
            row = replace(row, graph=False)
    try:
        burst_s, once_s = _measure_burst(bench, load, once_s)
        row = _measure_sustained(bench, load, once_s, replace(row, burst_latency_s=burst_s))
    finally:
        getattr(load, "drop", lambda: None)()
    return replace(row, flags=(*flags, *row.flags), peak_memory_byte=device.peak_byte)


def _measure_burst(bench: OperatorBench, load: Callable[[], Any], guess_s: float) -> tuple[float | None, float]:
    """Return the median time of an iteration after a rest, None where one is too long, and a time to plan with."""
    device = bench.gpu
    device.issue(load, 1)
    device.synchronize()
    time.sleep(REST_S)
    top_hz = bench.sampler.identity.top_clock_hz
    at_top = not top_hz or await_clock(bench.sampler, TOP_SHARE * top_hz, CLIMB_S)
    count = int(min(max(BURST_S / max(guess_s, 1e-6), 2), 40))
    if guess_s * (count + 1) > LONGEST_BURST_S:
        count = 1
    device.issue(load, 1)
    marks = [device.mark()]
    for _ in range(count):
        device.issue(load, 1)
        marks.append(device.mark())
    marks[-1].synchronize()
    each_s = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    median_s = float(np.median(each_s))
    return (median_s if at_top and median_s * 2 <= LONGEST_BURST_S else None), median_s


def _measure_sustained(bench: OperatorBench, load: Callable[[], Any], once_s: float, row: ModelRow) -> ModelRow:
    device, per_chunk = bench.gpu, max(int(CHUNK_S / max(once_s, 1e-6)), 1)
    held = hold_load(bench.sampler, device, lambda: device.issue(load, per_chunk), bench.rule, bench.spinner)
    fields = held.describe(per_chunk)
    return replace(
        row, **fields, energy_j=fields["power_w"] * fields["latency_s"], iterations=per_chunk * held.chunks
    )


ROW_S, PROFILE_S = 6.0, 4.0  # time kept back for one more of each


@dataclass
class ModelCampaign(Campaign):
    """One call of ``measure models``. ``cut`` makes a model small, for tests."""

    cut: Callable[[model_runs.ModelDims], model_runs.ModelDims] = field(default=lambda dims: dims)
    built: model_runs.BuiltModel | None = None

    def prepared(self, spec: model_runs.ModelRunSpec) -> tuple[model_runs.BuiltModel, Callable[[], Any]]:
        """Return the module of a row, the one at hand where it serves, and one iteration of it."""
        device, dims = self.bench.gpu, self.cut(model_runs.find_dims(spec.model))
        if self.built is None or not model_runs.fits_model(self.built, spec):
            self.recover()
            self.built = model_runs.build_model(spec, device.torch, device.name, dims)
        return self.built, model_runs.make_iteration(self.built, spec, device.torch, device.name, dims)

    def recover(self) -> None:
        """Forget the module and give its memory back."""
        self.built = None
        super().recover()


def measure_step(campaign: ModelCampaign, specs: list[model_runs.ModelRunSpec]) -> None:
    """Measure a row of every planned workload that is not on file yet."""
    bench, done = campaign.bench, campaign.journal("models").ids

    def measure(spec: model_runs.ModelRunSpec) -> ModelRow:
        return measure_model(bench, spec, *campaign.prepared(spec))

    for spec in campaign.within([s for s in specs if s.id not in done], ROW_S, "models", every=1):
        began_s = time.monotonic()
        row = campaign.record("models", make_blank_model_row(bench, spec), partial(measure, spec))
        assert row is not None
        power = f"{row.power_w:.0f} W" if row.power_w else "no power"
        said = row.error or f"{1e3 * (row.latency_s or 0.0):.3f} ms, {power}, {len(row.flags)} flags"
        say(f"  {spec.id}: {said} ({time.monotonic() - began_s:.1f} s)")
        bench.gpu.recover()
    campaign.recover()


def profile_step(campaign: ModelCampaign, specs: list[model_runs.ModelRunSpec]) -> None:
    """Profile the kernels of each row's iteration, launched eagerly."""
    bench, done = campaign.bench, campaign.journal("model_kernels").ids

    def profile(spec: model_runs.ModelRunSpec) -> ModelKernels:
        return profile_iteration(bench.gpu, spec.id, campaign.prepared(spec)[1], bench.run)

    for spec in campaign.within([s for s in specs if s.id not in done], PROFILE_S, "profile", every=1):
        campaign.record("model_kernels", ModelKernels(spec.id, run=bench.run), partial(profile, spec))
        bench.gpu.recover()
    campaign.recover()


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
    check_names("step", steps, STEPS)
    specs = choose_model_specs(only, few, tier)
    began_s = time.monotonic()
    device = model_runs.ModelDevice.open()
    with hold_folder(out), Sampler("nvml") as sampler:
        campaign = ModelCampaign(OperatorBench.open(device, sampler, out, rule=SETTLE), out, began_s + budget_s)
        say(f"ready after {time.monotonic() - began_s:.1f} s; {len(specs)} rows planned")
        for step in steps:
            STEPS[step](campaign, specs)
        return campaign.finish()


def choose_model_specs(only: str = "", few: int = 0, tier: int = 0) -> list[model_runs.ModelRunSpec]:
    """Choose rows of the plan: all, those of one model or one tier, or the first few."""
    known = list(dict.fromkeys(spec.model for spec in model_runs.read_model_plan()))
    if only and only not in known:
        raise unknown_name("planned model", only, known, f"Planned: {', '.join(known)}.")
    tiers = sorted({spec.tier for spec in model_runs.read_model_plan()})
    if tier and tier not in tiers:
        raise unknown_name("tier", str(tier), map(str, tiers), f"Planned: {', '.join(map(str, tiers))}.")
    specs = [spec for spec in model_runs.read_model_plan() if only in ("", spec.model) and tier in (0, spec.tier)]
    return specs[:few] if few else specs
