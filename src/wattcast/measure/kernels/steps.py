"""The steps of a campaign, each over its own operators of the plan; they may run in different calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from wattcast.measure.kernels import rows
from wattcast.measure.kernels.campaign import Campaign, measure_burst
from wattcast.measure.kernels.chain import chain_step
from wattcast.measure.kernels.plan import plan, subset
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.kernels.stack import stack_step
from wattcast.measure.run_info import say
from wattcast.records import Journal, RowKind, read_lines

SUSTAINED = {
    "linear": 100,
    "bmm": 20,
    "conv2d": 34,
    "softmax": 16,
    "layernorm": 12,
    "rmsnorm": 12,
    "elementwise": 48,
    "attention": 38,
}
PATTERNS = {
    "linear": 12,
    "bmm": 3,
    "conv2d": 4,
    "attention": 4,
    "elementwise": 4,
    "softmax": 1,
    "layernorm": 1,
    "rmsnorm": 1,
}
CAPPED = {"linear": 40, "attention": 14, "conv2d": 8, "bmm": 2}
DUTIES = (0.33, 0.50, 0.70)
CAPPED_WANTED = 40
BURST_REPEATS = 120
SUSTAINED_REPEATS = 34


def burst_step(campaign: Campaign) -> None:
    """Burst rows over the whole plan."""
    specs = campaign.specs()
    reserve_s = 0.3 if campaign.few else min(BURST_REPEATS * 0.15, 0.3 * campaign.left_s)
    for spec in campaign.within(specs[campaign.after :], reserve_s, "burst"):
        measure_burst(campaign, spec)


def sustained_step(campaign: Campaign) -> None:
    """Sustained rows over a spread of the plan, most of them long enough to be more than a launch."""
    specs = campaign.specs(SUSTAINED, worth_sustaining)
    warm_step(campaign)
    reserve_s = 3.0 if campaign.few else min(SUSTAINED_REPEATS * 2.0, 0.4 * campaign.left_s)
    for spec in campaign.within(specs[:3] if campaign.few else specs[campaign.after :], reserve_s, "sustained"):
        _sustain(campaign, spec)


def _sustain(campaign: Campaign, spec: Spec, repeat: int = 0) -> None:
    bench = campaign.bench
    campaign.measure(
        rows.row_id(RowKind.SUSTAINED, spec, bench.gpu.operands.pattern, repeat=repeat),
        RowKind.SUSTAINED,
        spec,
        lambda: rows.sustained(bench, spec, repeat),
        lambda: rows.blank(bench, RowKind.SUSTAINED, spec, repeat),
    )


def repeat_burst_step(campaign: Campaign) -> None:
    """Burst rows measured a second time, for repeatability within a run."""
    rows.await_top(campaign.bench, 1.5)
    for spec in campaign.within(spread(campaign.fresh.get(RowKind.BURST, []), BURST_REPEATS), 0.3, "repeat-burst"):
        measure_burst(campaign, spec, repeat=1)


def repeat_sustained_step(campaign: Campaign) -> None:
    """Sustained rows measured a second time."""
    again = spread(campaign.fresh.get(RowKind.SUSTAINED, []), SUSTAINED_REPEATS)
    for spec in campaign.within(again, 3.5, "repeat-sustained"):
        _sustain(campaign, spec, repeat=1)


def warm_step(campaign: Campaign, longest_s: float = 12.0) -> None:
    """Bring the card to its working temperature: leakage makes a cold card draw one or two percent less."""
    bench = campaign.bench
    graph = bench.gpu.prepare(subset(plan(), {"linear": 1}, likely_capped)[0])
    end_s = time.monotonic() + (0.5 if campaign.few else min(longest_s, 0.1 * campaign.left_s))
    while time.monotonic() < end_s:
        bench.gpu.timed(graph, 40)
    graph.drop()
    say(f"warm: {bench.sampler.since(bench.sampler.head - 100).last('temperature_c')} C")


def duty_step(campaign: Campaign) -> None:
    """Sustained, then three duties, for kernels that meet the power cap: any listed, or likely ones of the plan."""
    bench, done, any_ = campaign.bench, 0, campaign.listed is not None
    candidates = campaign.specs(CAPPED, lambda spec: any_ or (likely_capped(spec) and spec.guessed_s < 1.5e-3))
    wanted = campaign.few or (len(candidates) if any_ else CAPPED_WANTED)
    warm_idle_w = _warm_idle_w(campaign, "duty-begin", candidates)
    for spec in campaign.within(candidates, 9.0, "duty"):
        if done >= wanted:
            break
        _sustain(campaign, spec)
        sustained = last_row(campaign.journal(RowKind.SUSTAINED), rows.row_id(RowKind.SUSTAINED, spec))
        if not campaign.few and "sw_power_cap" not in sustained.get("throttle", ()):
            campaign.counts["duty not capped"] += 1
            continue
        for duty in DUTIES:
            campaign.measure(
                rows.row_id(RowKind.DUTY, spec, duty=duty),
                RowKind.DUTY,
                spec,
                lambda spec=spec, duty=duty: rows.duty_cycled(bench, spec, duty, warm_idle_w),  # type: ignore[misc]
                lambda spec=spec, duty=duty: rows.blank(bench, RowKind.DUTY, spec, duty=duty),  # type: ignore[misc]
            )
        done += 1
    _warm_idle_w(campaign, "duty-end", candidates)


def _warm_idle_w(campaign: Campaign, name: str, specs: list[Spec]) -> float:
    """Idle power at the top clock, measured right after a load, as in the gaps of a duty cycle."""
    bench = campaign.bench
    with contextlib.suppress(Exception):
        rows.burst(bench, specs[0])
    time.sleep(0.5)  # the governor answers a burst late
    rows.await_top(bench, 1.5)
    row = rows.idle_row(bench, name)
    campaign.journal(RowKind.IDLE).append(row)
    return row.power_w or float("nan")


def pattern_step(campaign: Campaign) -> None:
    """The same kernels on random values, zeros, ones and values after a ReLU."""
    bench = campaign.bench
    specs = campaign.specs(PATTERNS, worth_patterns)
    specs = specs[:2] if campaign.few else specs
    planned = campaign.specs(SUSTAINED, worth_sustaining) if campaign.listed is None else []
    already = {spec.id for spec in planned}
    for pattern in ("zeros",) if campaign.few else ("zeros", "relu", "ones", "random"):
        bench.gpu.operands.fill(pattern)
        for spec in campaign.within(specs, 3.0, f"pattern {pattern}"):
            if pattern == "random" and spec.id in already:  # the sustained step has it
                continue
            _sustain(campaign, spec)
            measure_burst(campaign, spec)


def clock_step(campaign: Campaign) -> None:
    """Effective clock in bursts, from elementwise kernels to the densest matrix products."""
    bench = campaign.bench
    specs = campaign.specs(
        {"linear": 40, "attention": 12, "conv2d": 10, "bmm": 6, "elementwise": 8}, worth_sustaining
    )
    for spec in campaign.within(specs, 0.5, "clock"):
        campaign.measure(
            rows.row_id(RowKind.CLOCK, spec),
            RowKind.CLOCK,
            spec,
            lambda spec=spec: rows.clock_row(bench, spec),  # type: ignore[misc]
            lambda spec=spec: rows.blank(bench, RowKind.CLOCK, spec),  # type: ignore[misc]
        )


def idle_step(campaign: Campaign) -> None:
    """Idle power in two states: right after work at the top clock, and after the clock has fallen."""
    bench = campaign.bench
    specs = campaign.specs(keep=likely_capped)
    _warm_idle_w(campaign, "top", specs)
    if campaign.few:
        return
    deadline = time.monotonic() + 25.0
    while time.monotonic() < deadline:
        clock_hz = bench.sampler.since(bench.sampler.head - 12).last("sm_clock_hz")
        if clock_hz is not None and clock_hz < 0.5 * bench.top_clock_hz:
            time.sleep(1.0)
            break
        time.sleep(0.2)
    campaign.journal(RowKind.IDLE).append(rows.idle_row(bench, "rest", 2.0))


def names_step(campaign: Campaign) -> None:
    """Kernel names of every operator of the plan."""
    from wattcast.measure.kernels.names_step import profile_batch

    journal = campaign.journals.setdefault("names", Journal(campaign.out / "names.jsonl", key="spec"))
    specs = [spec for spec in campaign.specs() if spec.id not in journal.ids]
    size = 80
    profile_batch(
        campaign.bench.gpu, specs[:2], campaign.bench.run
    )  # the first session of a process may miss kernels
    for start in range(0, len(specs), size):
        if campaign.left_s < 15.0:
            say(f"names: budget spent after {start} of {len(specs)}")
            return
        for row in profile_batch(campaign.bench.gpu, specs[start : start + size], campaign.bench.run):
            journal.append(row)
            campaign.counts["names errors" if row.error else "names"] += 1


STEPS: dict[str, Callable[[Campaign], None]] = {
    "burst": burst_step,
    "sustained": sustained_step,
    "repeat-burst": repeat_burst_step,
    "repeat-sustained": repeat_sustained_step,
    "duty": duty_step,
    "pattern": pattern_step,
    "clock": clock_step,
    "idle": idle_step,
    "names": names_step,
    "chain": chain_step,
    "stack": stack_step,
}


def likely_capped(spec: Spec) -> bool:
    """Dense products large enough to fill the card for tens of microseconds."""
    dense = spec.family in ("linear", "bmm", "conv2d", "attention") and spec.operator["dtype"] in (
        "bf16",
        "fp16",
        "fp8",
    )
    return (
        dense
        and spec.flop > 1.5e11
        and spec.flop / max(spec.byte, 1.0) > 400.0
        and spec.operator.get("groups", 1) == 1
    )


def worth_sustaining(spec: Spec) -> bool:
    """Long enough that power is the kernel's; one in ten of the short ones stays in."""
    return spec.guessed_s > 4e-6 or int(spec.id[0], 16) == 0


def worth_patterns(spec: Spec) -> bool:
    """Long enough for data to matter."""
    return spec.guessed_s > 3e-5


def last_row(journal: Journal, row_id: str) -> dict[str, Any]:
    """The latest row on file with this id."""
    found: dict[str, Any] = {}
    for row in read_lines(journal.path):
        if row.get("id") == row_id:
            found = row
    return found


def spread(specs: list[Spec], count: int) -> list[Spec]:
    """``count`` of the operators, evenly over the order they were measured in."""
    if len(specs) <= count:
        return specs
    return [specs[round(place * (len(specs) - 1) / (count - 1))] for place in range(count)]
