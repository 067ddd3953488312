"""Run ``lab kernels``: steps that each measure their own operators of the plan and save a row for
each.

Steps may run in different calls; rows on file are not measured again. The file also reads and
writes lists of operators that take the place of the plan, and names the kernels of each operator by
PyTorch's profiler."""

from __future__ import annotations

import bisect
import contextlib
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from wattcast.core.errors import (
    BadInput,
    CannotWrite,
    bad_value,
    check_names,
)
from wattcast.core.measured_rows import NameRow, RowKind
from wattcast.core.row_journals import Journal, read_lines
from wattcast.core.whole_files import hold_folder, write_whole
from wattcast.lab.campaigns import operator_rows
from wattcast.lab.campaigns.campaign_engine import OperatorBench, list_trace_events
from wattcast.lab.campaigns.kernel_plan import (
    OperatorSpec,
    read_kernel_plan,
    spec_from_operator,
    take_subset,
)
from wattcast.lab.campaigns.operator_rows import (
    CampaignGpu,
    KernelCampaign,
    save_row,
)
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import say

# operators of each family that a step takes from the plan
SUSTAINED = {
    "linear": 100,
    "bmm": 20,
    "conv2d": 34,
    "softmax": 16,
    "layernorm": 12,
    "rmsnorm": 12,
}
SUSTAINED |= {"elementwise": 48, "attention": 38}
PATTERNS = {
    "linear": 12,
    "bmm": 3,
    "conv2d": 4,
    "attention": 4,
    "elementwise": 4,
}
PATTERNS |= {
    "softmax": 1,
    "layernorm": 1,
    "rmsnorm": 1,
}
CAPPED = {
    "linear": 40,
    "attention": 14,
    "conv2d": 8,
    "bmm": 2,
}
CLOCKED = {
    "linear": 40,
    "attention": 12,
    "conv2d": 10,
    "bmm": 6,
    "elementwise": 8,
}
DUTIES = (0.33, 0.50, 0.70)
CAPPED_WANTED = 40
BURST_REPEATS = 120
SUSTAINED_REPEATS = 34


def burst_step(campaign: KernelCampaign) -> None:
    """Measure a burst row of every operator of the plan."""
    specs = campaign.specs()
    reserve_s = (
        min(BURST_REPEATS * 0.15, 0.3 * campaign.left_s)
        if "repeat-burst" in campaign.ahead
        else 0.3
    )
    for spec in campaign.within(specs[campaign.after :], reserve_s, "burst"):
        save_row(campaign, RowKind.BURST, spec)


def sustained_step(campaign: KernelCampaign) -> None:
    """Measure sustained rows of a spread of the plan, most of them longer than a mere launch."""
    specs = campaign.specs(SUSTAINED, choose_sustained)
    warm_step(campaign)
    reserve_s = (
        min(SUSTAINED_REPEATS * 2.0, 0.4 * campaign.left_s)
        if "repeat-sustained" in campaign.ahead
        else 3.0
    )
    for spec in campaign.within(
        specs[:3] if campaign.few else specs[campaign.after :], reserve_s, "sustained"
    ):
        save_row(campaign, RowKind.SUSTAINED, spec)


def repeat_step(
    campaign: KernelCampaign,
    kind: RowKind,
    count: int,
    each_s: float,
) -> None:
    """Measure some rows of a kind a second time, for repeatability within a run."""
    if kind is RowKind.BURST:
        operator_rows.await_top_clock(campaign.bench, 1.5)
    again = spread_evenly(campaign.fresh.get(kind, []), count)
    for spec in campaign.within(again, each_s, f"repeat-{kind}"):
        save_row(campaign, kind, spec, repeat=1)


def warm_step(campaign: KernelCampaign, longest_s: float = 12.0) -> None:
    """Bring the card to its working temperature: leakage makes a cold card draw one or two percent
    less.
    """
    bench = campaign.bench
    with bench.gpu.prepare(
        take_subset(read_kernel_plan(), {"linear": 1}, is_likely_capped)[0]
    ) as graph:
        end_s = time.monotonic() + (0.5 if campaign.few else min(longest_s, 0.1 * campaign.left_s))
        while time.monotonic() < end_s:
            bench.gpu.timed(graph, 40)
    say(f"warm: {bench.sampler.since(bench.sampler.head - 100).last('temperature_c')} C")


def duty_step(campaign: KernelCampaign) -> None:
    """Measure kernels that meet the power cap sustained and at three duties (all listed, or likely
    ones).
    """
    bench = campaign.bench
    done = 0
    any_ = campaign.listed is not None
    candidates = campaign.specs(
        CAPPED, lambda spec: any_ or (is_likely_capped(spec) and spec.guessed_s < 1.5e-3)
    )
    most = campaign.few or (len(candidates) if any_ else CAPPED_WANTED)
    warm_idle_w = _warm_idle_w(campaign, "duty-begin", candidates)
    for spec in campaign.within(candidates, 9.0, "duty"):
        if done >= most:
            break
        save_row(campaign, RowKind.SUSTAINED, spec)
        row_id = operator_rows.make_row_id(RowKind.SUSTAINED, spec)
        sustained = find_last_row(campaign.journal(RowKind.SUSTAINED), row_id)
        if not campaign.few and "sw_power_cap" not in sustained.get("throttle", ()):
            campaign.counts["duty not capped"] += 1
            continue
        for duty in DUTIES:
            blank = operator_rows.make_blank_row(bench, RowKind.DUTY, spec, duty=duty)
            make = partial(
                operator_rows.measure_duty_row,
                bench,
                spec,
                duty,
                warm_idle_w,
            )
            campaign.measure(RowKind.DUTY, spec, blank, make)
        done += 1
    _warm_idle_w(campaign, "duty-end", candidates)


def _warm_idle_w(
    campaign: KernelCampaign,
    name: str,
    specs: list[OperatorSpec],
) -> float:
    """Measure idle power at the top clock right after a load, as it is in the gaps of a duty
    cycle.
    """
    bench = campaign.bench
    with contextlib.suppress(Exception):
        operator_rows.measure_burst_row(bench, specs[0])
    time.sleep(0.5)  # the governor answers a burst late
    operator_rows.await_top_clock(bench, 1.5)
    row = operator_rows.measure_idle_row(bench, name)
    campaign.journal(RowKind.IDLE).append(row)
    return row.power_w or float("nan")


def pattern_step(campaign: KernelCampaign) -> None:
    """Measure the same kernels on random values, zeros, ones and values after a ReLU."""
    bench = campaign.bench
    specs = campaign.specs(PATTERNS, choose_patterns)
    specs = specs[:2] if campaign.few else specs
    planned = campaign.specs(SUSTAINED, choose_sustained) if campaign.listed is None else []
    already = {spec.id for spec in planned}
    for pattern in ("zeros",) if campaign.few else ("zeros", "relu", "ones", "random"):
        bench.gpu.operands.fill(pattern)
        for spec in campaign.within(specs, 3.0, f"pattern {pattern}"):
            if pattern == "random" and spec.id in already:  # the sustained step has it
                continue
            save_row(campaign, RowKind.SUSTAINED, spec)
            save_row(campaign, RowKind.BURST, spec)


def clock_step(campaign: KernelCampaign) -> None:
    """Measure the effective clock in bursts, from elementwise kernels to the densest matrix
    products.
    """
    for spec in campaign.within(campaign.specs(CLOCKED, choose_sustained), 0.5, "clock"):
        save_row(campaign, RowKind.CLOCK, spec)


def idle_step(campaign: KernelCampaign) -> None:
    """Measure idle power right after work at the top clock, and again after the clock has
    fallen.
    """
    bench = campaign.bench
    specs = campaign.specs(keep=is_likely_capped)
    _warm_idle_w(campaign, "top", specs)
    if campaign.few:
        return
    # of the top clock, which many cards keep while a context is open
    began_s = time.monotonic()
    share = 1.0
    while share >= 0.5 and time.monotonic() - began_s < (25.0 if share < 0.9 else 3.0):
        time.sleep(0.2)
        clock_hz = bench.sampler.since(bench.sampler.head - 12).last("sm_clock_hz")
        share = clock_hz / bench.top_clock_hz if clock_hz else share
    time.sleep(1.0)
    campaign.journal(RowKind.IDLE).append(operator_rows.measure_idle_row(bench, "rest", 2.0))


def names_step(campaign: KernelCampaign) -> None:
    """Record the kernel names of every operator of the plan."""
    journal = campaign.journal("names", key="spec")
    specs = [spec for spec in campaign.specs() if spec.id not in journal.ids]
    size = 80
    # a process's first session may miss kernels
    profile_batch(campaign.bench.gpu, specs[:2], campaign.bench.run)
    for start in range(0, len(specs), size):
        if campaign.left_s < 15.0:
            say(f"names: budget spent after {start} of {len(specs)}")
            return
        for row in profile_batch(
            campaign.bench.gpu, specs[start : start + size], campaign.bench.run
        ):
            journal.append(row)
            campaign.counts["names errors" if row.error else "names"] += 1


STEPS: dict[str, Callable[[KernelCampaign], None]] = {
    "burst": burst_step,
    "sustained": sustained_step,
    "repeat-burst": partial(
        repeat_step,
        kind=RowKind.BURST,
        count=BURST_REPEATS,
        each_s=0.3,
    ),
    "repeat-sustained": partial(
        repeat_step,
        kind=RowKind.SUSTAINED,
        count=SUSTAINED_REPEATS,
        each_s=3.5,
    ),
    "duty": duty_step,
    "pattern": pattern_step,
    "clock": clock_step,
    "idle": idle_step,
    "names": names_step,
}
DEFAULT_STEPS = "idle,burst,repeat-burst,sustained,repeat-sustained,duty,pattern,clock,names"


def is_likely_capped(spec: OperatorSpec) -> bool:
    """Return whether a dense product is large enough to fill the card for tens of microseconds."""
    dense = spec.family in CAPPED and spec.operator.get("groups", 1) == 1
    narrow = spec.operator["dtype"] in ("bf16", "fp16", "fp8")
    return dense and narrow and spec.flop > 1.5e11 and spec.flop / max(spec.byte, 1.0) > 400.0


def choose_sustained(spec: OperatorSpec) -> bool:
    """Keep operators long enough that the power is the kernel's, and one in ten of the short
    ones.
    """
    return spec.guessed_s > 4e-6 or int(spec.id[0], 16) == 0


def choose_patterns(spec: OperatorSpec) -> bool:
    """Keep operators that run long enough for their data to matter."""
    return spec.guessed_s > 3e-5


def find_last_row(journal: Journal, row_id: str) -> dict[str, Any]:
    """Return the latest row on file with this id."""
    matching_rows = [row for row in read_lines(journal.path) if row.get("id") == row_id]
    return matching_rows[-1] if matching_rows else {}


def spread_evenly(specs: list[OperatorSpec], count: int) -> list[OperatorSpec]:
    """Choose ``count`` operators, spread evenly over the order they were measured in."""
    if len(specs) <= count:
        return specs
    return [specs[round(place * (len(specs) - 1) / (count - 1))] for place in range(count)]


def run_kernel_campaign(
    out: Path,
    steps: list[str],
    budget_s: float,
    few: int = 0,
    after: int = 0,
    listed: list[OperatorSpec] | None = None,
    round_: int = 1,
) -> Counter[str]:
    """Run ``steps`` one after another within ``budget_s``; returns how many rows of each kind.

    ``listed`` operators take the place of the plan's; a step then measures all of them that suit
    it."""
    check_names("step", steps, STEPS)
    began_s = time.monotonic()
    with hold_folder(out), Sampler("nvml") as sampler:
        bench = OperatorBench.open(CampaignGpu.open(), sampler, out)
        campaign = KernelCampaign(
            bench,
            out,
            began_s + budget_s,
            few=few,
            after=after,
            listed=listed,
            round_=round_,
        )
        bench.top_clock_hz = operator_rows.find_top_clock_hz(bench, read_kernel_plan()[0])
        say(
            f"ready after {time.monotonic() - began_s:.1f} s; top clock "
            f"{bench.top_clock_hz / 1e6:.0f} MHz"
        )
        for place, step in enumerate(steps):
            step_s = time.monotonic()
            campaign.ahead = steps[place + 1 :]
            try:
                STEPS[step](campaign)
            except CannotWrite:  # no later row could be kept either
                raise
            except Exception as error:
                campaign.counts[f"{step} step failed: {type(error).__name__}: {error}"[:300]] += 1
                traceback.print_exc(limit=6)
                if sampler.lost:
                    break
            say(f"{step}: {time.monotonic() - step_s:.1f} s")
        return campaign.finish(keep_samples=bool({"sustained", "duty", "pattern"} & set(steps)))


_FIELDS = ("family", "operator", "layout", "rotated", "detail", "chosen")


def read_listed(path: Path) -> list[OperatorSpec]:
    """Read the operators of a file, each once: as ``--suggest`` writes them, or as a workload file
    does.
    """
    if not path.is_file():
        do = (
            "`wattcast lab kernels --suggest N --out DIR` writes one; others are in "
            "src/wattcast/lab/campaigns/plans of the repository."
        )
        raise BadInput(f"--plan: there is no file {path}. {do}")
    specs: dict[str, OperatorSpec] = {}
    for number, line in enumerate(read_lines(path), start=1):
        fields = {name: line[name] for name in _FIELDS if name in line}
        spec = (
            OperatorSpec(**fields)
            if isinstance(fields.get("operator"), dict) and "family" in fields
            else None
        )
        with contextlib.suppress(
            ArithmeticError, LookupError, TypeError, ValueError
        ):  # sizes of another kind
            spec = spec_from_operator(line) if "op" in line else spec
        if spec is None:
            expectation = "an operator that can be run, and its family"
            raise bad_value(f"{path.name}: line {number}", expectation, ", ".join(line))
        specs.setdefault(spec.id, spec)
    if not specs:
        raise bad_value(path.name, "at least one operator", "none")
    return list(specs.values())


def write_listed(path: Path, specs: Iterable[tuple[OperatorSpec, dict[str, Any]]]) -> None:
    """Write operators, one a line, each with further fields such as why it was suggested."""
    lines = (
        json.dumps({name: getattr(spec, name) for name in _FIELDS} | more) + "\n"
        for spec, more in specs
    )
    write_whole(path, "".join(lines).encode())


PREFIX = "wattcast:"


def profile_batch(
    gpu: CampaignGpu,
    specs: list[OperatorSpec],
    run: str,
) -> list[NameRow]:
    """Record the kernels of each operator of a batch; an operator that fails gets a row with its
    error.
    """
    torch = gpu.torch
    ready: list[OperatorSpec] = []
    failed: list[NameRow] = []
    for spec in specs:
        try:
            gpu.build(spec).run(0)
            ready.append(spec)
        except Exception as error:
            failed.append(NameRow(spec.id, run=run, error=f"{type(error).__name__}: {error}"[:300]))
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for spec in ready:
            call = gpu.build(spec)
            torch.cuda.synchronize()  # building a mask or an index launches kernels too
            with torch.profiler.record_function(PREFIX + spec.id):
                call.run(0)
        torch.cuda.synchronize()
    events_of_spec = kernels_by_range(list_trace_events(profiler))
    rows = []
    for spec in ready:
        events = events_of_spec.get(spec.id, [])
        arguments = [event["args"] for event in events]
        rows.append(
            NameRow(
                spec.id,
                names=tuple(str(event["name"]) for event in events),
                grids=tuple(tuple(int(side) for side in a.get("grid", ())) for a in arguments),
                blocks=tuple(tuple(int(side) for side in a.get("block", ())) for a in arguments),
                kernel_s=tuple(float(event["dur"]) * 1e-6 for event in events),
                shared_byte=tuple(int(a.get("shared memory", 0)) for a in arguments),
                registers=tuple(int(a.get("registers per thread", 0)) for a in arguments),
                run=run,
                error="" if events else "no kernel seen",
            )
        )
    return rows + failed


def kernels_by_range(events: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Sort the kernel events of a chrome trace by the range that launched them, in launch order."""
    ranges: list[tuple[float, float, str]] = []
    launched: dict[int, float] = {}
    kernels: list[dict[str, Any]] = []
    for event in events:
        category = event.get("cat", "")
        if category == "user_annotation" and str(event.get("name", "")).startswith(PREFIX):
            begin = float(event["ts"])
            ranges.append((begin, begin + float(event["dur"]), event["name"].removeprefix(PREFIX)))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launched.setdefault(int(event["args"]["correlation"]), float(event["ts"]))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):  # a contiguous copy is no kernel
            kernels.append(event)
    ranges.sort()
    starts = [begin for begin, _, _ in ranges]
    events_of_range: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(kernels, key=lambda item: float(item["ts"])):
        at = launched.get(int(event.get("args", {}).get("correlation", -1)))
        place = bisect.bisect_right(starts, at) - 1 if at is not None else -1
        if at is not None and place >= 0 and at <= ranges[place][1]:
            events_of_range.setdefault(ranges[place][2], []).append(event)
    return events_of_range
