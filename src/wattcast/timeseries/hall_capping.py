"""What capping does in a hall: how often a limit is passed, how long GPUs are held, what it costs.

The controller looks at the mean of each second. Where it is above the limit, the GPUs below it are
held at less power from the next second on, for a fixed time; then it looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.timeseries.hall_file import ServingLoad, TrainingLoad
from wattcast.timeseries.hall_statistics import window_means_w
from wattcast.timeseries.load_library import LoadLibrary, rate_at

if TYPE_CHECKING:
    from wattcast.timeseries.hall_parts import GroupWork, HallWork

LATENCIES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")


@dataclass(frozen=True)
class CapFigures:
    """What a cap did over a span."""

    level: str
    limit_w: float
    gpu_limit_w: float
    over_before_s: float  # member-seconds above the limit without the cap
    over_after_s: float  # with it
    members: int  # racks, rows or the hall
    capped_rack_s: float  # rack-seconds in which GPUs were held
    saved_j: float
    groups: dict[str, dict[str, float]]  # by name: requests in capped time, latencies, progress


def hold_cap(
    power_w: Array,
    limit_w: float,
    hold_s: int,
) -> Mask:
    """Return the seconds in which a cap holds.

    >>> hold_cap(np.array([1.0, 3.0, 1.0, 3.0, 1.0]), 2.0, 1).tolist()
    [False, False, True, False, True]
    """
    mask = np.zeros(len(power_w), dtype=bool)
    free = 0  # the first second in which the controller looks again
    for second in np.flatnonzero(power_w > limit_w).tolist():
        if second < free:
            continue
        mask[second + 1 : second + 1 + hold_s] = True
        free = second + 1 + hold_s
    return mask


def describe_cap(
    work: HallWork,
    usual_j: Sequence[Array],
    drawn_j: Sequence[Array],
    capped_racks: Array,
) -> CapFigures:
    """Return what the cap did; series are those of the members of its level."""
    cap = work.plan.cap
    assert cap is not None, "a hall without a cap has nothing to describe"
    limit_w = work.plan.limits_w[cap.level]
    over_s = []
    for series in (usual_j, drawn_j):
        means_w = [window_means_w(np.asarray(j), work.bin_s, 1.0) for j in series]
        over_s.append(float(sum((watts > limit_w).sum() for watts in means_w)))
    usual_total_j = float(sum(j.sum() for j in usual_j))
    groups = {}
    for group, capped in zip(work.groups, capped_racks, strict=True):
        groups[group.group.name] = _describe_group(work, group, capped)
    return CapFigures(
        level=cap.level,
        limit_w=limit_w,
        gpu_limit_w=cap.gpu_limit_w,
        over_before_s=over_s[0],
        over_after_s=over_s[1],
        members=len(usual_j),
        capped_rack_s=float(capped_racks.sum()),
        saved_j=usual_total_j - float(sum(j.sum() for j in drawn_j)),
        groups=groups,
    )


def _describe_group(
    work: HallWork,
    group: GroupWork,
    capped_racks: Array,
) -> dict[str, float]:
    """Return what a cap did to the requests or to the progress of a group."""
    load = group.group.load
    if isinstance(load, ServingLoad):
        assert group.library is not None, "a serving group has its library"
        assert group.capped_library is not None, "a capped group has its library"
        times_s = np.asarray(work.begin_s + np.arange(float(work.seconds)) + 0.5)
        per_rack = group.group.nodes_per_rack * group.replicas_per_node
        rates_per_s = rate_at(load, times_s)
        requests = rates_per_s * per_rack * capped_racks
        figures = {"capped_requests": float(requests.sum())}
        if requests.sum() > 0:
            usual = _weigh_latencies(group.library, rates_per_s, requests)
            slowed = _weigh_latencies(group.capped_library, rates_per_s, requests)
            figures |= usual
            figures |= {f"capped_{name}": value for name, value in slowed.items()}
        return figures
    if isinstance(load, TrainingLoad):
        assert group.steps is not None, "a training group has its steps"
        assert group.capped_steps is not None, "a capped group has its steps"
        pace = group.capped_steps.tokens_per_s / group.steps.tokens_per_s
        share = float((capped_racks > 0).mean())
        return {"capped_share": share, "lost_progress": share * (1.0 - pace)}
    return {}


def _weigh_latencies(
    library: LoadLibrary,
    rates_per_s: Array,
    weights: Array,
) -> dict[str, float]:
    """Return latencies at the rates of each second, weighted by requests."""
    latencies = {}
    for name in LATENCIES:
        latencies[name] = float(np.average(library.average(name, rates_per_s), weights=weights))
    return latencies
