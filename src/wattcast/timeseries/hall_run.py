"""Simulate a hall: ``run_hall`` computes rows of racks, stores them, and puts them together.

Finished rows stay in the folder of the results; the same command continues where another ended.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
)
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from wattcast import __version__
from wattcast.core import bad_value, units
from wattcast.hardware.catalogue_reader import load_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.timeseries.hall_combination import CombinedHall, combine_parts
from wattcast.timeseries.hall_file import (
    HallPlan,
    IdleKind,
    RackGroup,
    ServingLoad,
    TrainingLoad,
)
from wattcast.timeseries.hall_parts import (
    GroupWork,
    HallWork,
    PartSeries,
    list_rows,
)
from wattcast.timeseries.job_timeline import plan_steps
from wattcast.timeseries.load_library import (
    LibrarySize,
    build_library,
)
from wattcast.timeseries.node_power import tabulate_node, wall_power_w
from wattcast.timeseries.part_store import (
    PartStore,
    StoredWork,
    keep_parts,
)

ComputedPart = tuple[int, PartSeries | None]  # a number, and a row that still has to be kept
Runner = Callable[[StoredWork, Iterable[int]], Iterator[ComputedPart]]
ReportProgress = Callable[[str], None]

MOST_VALUES = 60_000_000  # bins of all racks together
LEAST_BIN_S = 1e-3
_MOST_OVER_LIMIT = 1.6  # of a card's limit, up to which histograms reach: short peaks pass it
_SLACK = 1e-9


@dataclass(frozen=True)
class HallSpan:
    """The part of the day that is computed, and its grid."""

    begin_s: float = 0.0
    span_s: float | None = None  # to the end of the hall's hours
    grid_s: float = 1.0
    library: LibrarySize = field(default_factory=LibrarySize)


def run_hall(
    plan: HallPlan,
    span: HallSpan | None = None,
    out: Path | None = None,
    runner: Runner | None = None,
    progress: ReportProgress | None = None,
) -> CombinedHall:
    """Return the power of a hall; parts are kept below ``out``, and those found there are used.

    ``runner`` computes the parts: in this process by default, or on processes or a Dask cluster
    (``explore.sweep`` has them).
    """
    span = span or HallSpan()
    _check_span(plan, span)
    tell = progress or _tell_nobody
    check_limits(plan)
    work = prepare_work(plan, span, tell)
    if out is not None:
        return _run_in_folder(
            work,
            span.grid_s,
            out / "parts",
            runner or run_here,
            tell,
        )
    with tempfile.TemporaryDirectory(prefix="wattcast-hall-") as folder:
        return _run_in_folder(
            work,
            span.grid_s,
            Path(folder),
            runner or run_here,
            tell,
        )


def run_here(work: StoredWork, indices: Iterable[int]) -> Iterator[ComputedPart]:
    """Compute parts one after the other in this process."""
    return map(work.compute_part, indices)


def _tell_nobody(_: str) -> None:
    """Report nothing."""


def _check_span(plan: HallPlan, span: HallSpan) -> None:
    """Raise an error where the span lies outside the day, or its grid does not fit a second."""
    day_s = plan.hours * 3600.0
    if not 0 <= span.begin_s < day_s or span.begin_s % 1.0:
        expected = f"a whole second of the hall's {plan.hours:g} hours"
        raise bad_value("--begin", expected, units.show(span.begin_s, "s"))
    left_s = day_s - span.begin_s
    span_s = left_s if span.span_s is None else span.span_s
    is_inside = 1 <= span_s <= left_s
    if span.span_s is not None and not (is_inside and span_s.is_integer()):
        expected = f"whole seconds up to the end of the hall's {plan.hours:g} hours"
        raise bad_value("--span", expected, units.show(span.span_s, "s"))
    seconds = _count_seconds(plan, span)
    parts = 1.0 / span.grid_s if span.grid_s < 1.0 else span.grid_s
    is_whole = abs(parts - round(parts)) < _SLACK * parts
    if not is_whole or not LEAST_BIN_S <= span.grid_s <= seconds:
        expected = f"whole seconds up to {seconds}, or a whole part of one (20ms, 100ms, 250ms)"
        raise bad_value("--grid", expected, units.show(span.grid_s, "s"))
    values = plan.racks * seconds / min(span.grid_s, 1.0)
    if values > MOST_VALUES:
        most_s = MOST_VALUES * min(span.grid_s, 1.0) / plan.racks
        expected = (
            f"a --span of {max(int(most_s), 1)} s at most with this grid, or a coarser --grid"
        )
        raise bad_value("hall", expected, f"{seconds} s of {plan.racks} racks")


def _count_seconds(plan: HallPlan, span: HallSpan) -> int:
    whole_s = plan.hours * 3600.0 - span.begin_s if span.span_s is None else span.span_s
    return max(int(whole_s), 1)


def prepare_work(
    plan: HallPlan,
    span: HallSpan,
    tell: ReportProgress,
) -> HallWork:
    """Simulate the loads of a hall, and return what its rows need."""
    bin_s = min(span.grid_s, 1.0)
    bin_s = 1.0 / round(1.0 / bin_s)
    groups = []
    for place, group in enumerate(plan.groups):
        groups.append(
            _prepare_group(
                plan,
                group,
                bin_s,
                plan.seed + 1000 * place,
                tell,
                span.library,
            )
        )
    limits_w = [float(np.max(load_gpu(group.gpu).power.limit_w)) for group in plan.groups]
    return HallWork(
        plan=plan,
        groups=tuple(groups),
        begin_s=int(span.begin_s),
        seconds=_count_seconds(plan, span),
        bin_s=bin_s,
        most_card_w=_MOST_OVER_LIMIT * max(limits_w),
        rows=list_rows(plan.groups),
    )


def _prepare_group(
    plan: HallPlan,
    group: RackGroup,
    bin_s: float,
    seed: int,
    tell: ReportProgress,
    size: LibrarySize,
) -> GroupWork:
    """Simulate the load of a group, with and without the cap."""
    cap_w = None if plan.cap is None else plan.cap.gpu_limit_w
    work = prepare_group(plan, group)
    load = group.load
    if isinstance(load, ServingLoad):
        library = build_library(
            load,
            group.gpu,
            bin_s,
            seed,
            progress=tell,
            size=size,
        )
        capped = None
        if cap_w is not None:
            capped = build_library(
                load,
                group.gpu,
                bin_s,
                seed,
                cap_w,
                tell,
                size,
            )
        return replace(work, library=library, capped_library=capped)
    if isinstance(load, TrainingLoad):
        tell(f"{load.model}: a step of training")
        gpus = group.gpus // load.jobs
        steps = plan_steps(load, group.gpu, gpus)
        slow = None if cap_w is None else plan_steps(load, group.gpu, gpus, cap_w)
        return replace(work, steps=steps, capped_steps=slow)
    return work


def prepare_group(plan: HallPlan, group: RackGroup) -> GroupWork:
    """Return a group with its nodes and idle cards, without a simulated load."""
    chip = load_gpu(group.gpu)
    bundle = bundle_for(chip)
    top_hz = float(np.max(chip.clocks.max_hz))
    least_hz = top_hz if chip.clocks.min_hz is None else float(np.min(chip.clocks.min_hz))
    return GroupWork(
        group=group,
        node=tabulate_node(group.system, plan.inlet_c),
        cold_w=float(bundle.power.idle_power_w(least_hz)),
        loaded_w=float(bundle.power.idle_power_w(top_hz)),
    )


def check_limits(plan: HallPlan) -> None:
    """Raise an error where a limit is below what the level draws while all of it idles."""
    if not plan.limits_w:
        return
    idle_w: dict[str, list[float]] = {
        "rack": [],
        "row": [],
        "hall": [0.0],
    }
    for group in plan.groups:
        work = prepare_group(plan, group)
        each_w = work.cold_w if group.load is IdleKind.COLD else work.loaded_w
        gpus_w = np.array(group.system.gpu_count * each_w)
        node_w = float(wall_power_w(group.system, gpus_w, np.zeros(()), plan.inlet_c))
        rack_w = group.nodes_per_rack * node_w
        idle_w["rack"].append(rack_w)
        idle_w["row"].append(min(group.racks, group.racks_per_row) * rack_w)
        idle_w["hall"][0] += group.racks * rack_w
    for level, limit_w in plan.limits_w.items():
        least_w = max(idle_w[level])
        if limit_w < least_w:
            expected = f"more than the {units.show(least_w, 'W', 3)} that an idle {level} draws"
            raise bad_value(f"limits: {level}", expected, units.show(limit_w, "W"))


def digest_work(work: HallWork) -> str:
    """Hash all that decides the results, so that no part of another hall is taken."""
    hashed = hashlib.sha256()
    span = (work.begin_s, work.seconds, work.bin_s)
    hashed.update(f"{__version__} {work.plan.digest} {span}".encode())
    for group in work.groups:
        hashed.update(group.node.working_w.tobytes())
        for library in (group.library, group.capped_library):
            for stretch in () if library is None else library.stretches:
                hashed.update(stretch.bin_j.tobytes())
        for steps in (group.steps, group.capped_steps):
            hashed.update(b"" if steps is None else steps.step.joules.tobytes())
    return hashed.hexdigest()[:16]


def _run_in_folder(
    work: HallWork,
    grid_s: float,
    folder: Path,
    runner: Runner,
    tell: ReportProgress,
) -> CombinedHall:
    """Compute the parts that are missing in a folder, and put all together."""
    store = PartStore(folder, digest_work(work))
    missing = [index for index in range(work.part_count) if not store.is_finished(index)]
    done = work.part_count - len(missing)
    if done:
        tell(f"{done} of {work.part_count} rows were there before")
    with keep_parts(work, store) as stored_work:
        for _, part in runner(stored_work, missing):
            if part is not None:
                store.write(part)
            done += 1
            tell(f"{done} of {work.part_count} rows of racks")
    return combine_parts(work, grid_s, store.read)
