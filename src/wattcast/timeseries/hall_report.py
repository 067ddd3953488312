"""Text, JSON and tables of a simulated hall."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.strict_files import encode_json
from wattcast.core.whole_files import write_whole
from wattcast.predictor.machine_factors import find_machine_factors
from wattcast.report.text_tables import new_table, print_notes
from wattcast.serving.plan_coefficients import PLAN
from wattcast.timeseries.hall_capping import CapFigures
from wattcast.timeseries.hall_combination import CombinedHall
from wattcast.timeseries.hall_file import (
    ServingLoad,
    TrainingLoad,
    read_machine,
)
from wattcast.timeseries.hall_parts import percentile_of_counts
from wattcast.timeseries.hall_statistics import (
    PERCENTS,
    list_windows,
    load_duration_w,
    racks_that_fit,
    window_means_w,
)
from wattcast.timeseries.power_series import write_columns

LEVELS = ("card", "node", "rack", "row", "hall")
DATE = datetime(2026, 1, 1)
_RACK_GRID_S = 60.0  # of the series of single racks, at least: hundreds of columns


def summarise_hall(hall: CombinedHall, chance: float) -> dict[str, Any]:
    """Return the names and numbers of ``hall --json``."""
    plan = hall.work.plan
    return {
        "title": plan.title,
        "racks": plan.racks,
        "gpus": plan.gpus,
        "begin_s": hall.work.begin_s,
        "seconds": hall.work.seconds,
        "grid_s": hall.grid_s,
        "energy_j": hall.energy_j,
        "gpu_energy_j": math.fsum(hall.gpu_j.tolist()),
        "mean_w": hall.energy_j / hall.work.seconds,
        "levels": _summarise_levels(hall),
        "diversity": list_diversity(hall),
        "groups": _summarise_groups(hall),
        "limits": _summarise_limits(hall, chance),
        "cap": None if hall.cap is None else _plain_cap(hall.cap),
        "load_duration_w": _plain_duration(hall),
        "assumptions": list_assumptions(hall),
    }


def _plain_cap(cap: CapFigures) -> dict[str, Any]:
    return dict(vars(cap))


def _plain_duration(hall: CombinedHall) -> dict[str, list[float]]:
    shares, watts = load_duration_w(hall.power_w)
    return {"share": shares.tolist(), "power_w": watts.tolist()}


def _summarise_levels(hall: CombinedHall) -> dict[str, Any]:
    """Return percentiles of each level; cards and nodes by their histogram over the bin."""
    work = hall.work
    window = f"{work.bin_s:g}s"
    levels: dict[str, Any] = {}
    for level, counts, most_w in (
        ("card", hall.card_counts, work.most_card_w),
        ("node", hall.node_counts, work.most_node_w),
    ):
        peaks = {f"p{p:g}": percentile_of_counts(counts, most_w, p) for p in PERCENTS}
        levels[level] = {"peaks_w": {window: peaks}}
    for level, figures in hall.levels.items():
        levels[level] = {
            "mean_w": figures.mean_w,
            "peaks_w": figures.peaks_w,
            "ramp_w_per_min": figures.ramp_w_per_min,
            "step_w": figures.step_w,
        }
    return levels


def list_diversity(hall: CombinedHall) -> dict[str, float]:
    """Return the sum of the peaks of a level's members over the peak of the hall.

    Peaks of cards are without what their nodes add: they are compared with the hall's GPUs.
    """
    hall_peak_w = hall.peak_sums_w["hall"]
    gpu_peak_w = float(hall.gpu_j.max()) / hall.work.bin_s
    factors = {level: hall.peak_sums_w[level] / hall_peak_w for level in ("node", "rack", "row")}
    return {"card": hall.peak_sums_w["card"] / gpu_peak_w, **factors}


def _summarise_groups(hall: CombinedHall) -> list[dict[str, Any]]:
    groups = []
    for place, work in enumerate(hall.work.groups):
        group = work.group
        joules = math.fsum(hall.group_j[place].tolist())
        plain: dict[str, Any] = {
            "name": group.name,
            "system": group.system.name,
            "racks": group.racks,
            "gpus": group.gpus,
            "energy_j": joules,
            "mean_w": joules / hall.work.seconds,
            "peak_w": float(hall.group_j[place].max()) / hall.work.bin_s,
        }
        if isinstance(group.load, ServingLoad) and work.library is not None:
            busiest = work.library.stretches[-1]
            plain["replicas"] = group.racks * group.nodes_per_rack * work.replicas_per_node
            plain["busiest_rate_per_s"] = busiest.rate_per_s
            plain["busiest"] = busiest.figures
        if isinstance(group.load, TrainingLoad) and work.steps is not None:
            timelines = [
                hall.work.draw_timeline(place, group.load, job) for job in range(group.load.jobs)
            ]
            plain["step_s"] = work.steps.step_s
            plain["failures"] = sum(timeline.failures for timeline in timelines)
            plain["lost_s"] = sum(timeline.lost_s for timeline in timelines)
        groups.append(plain)
    return groups


def _summarise_limits(hall: CombinedHall, chance: float) -> dict[str, Any]:
    """Return how often each limit is passed, and how many more racks the hall's limit holds."""
    work = hall.work
    series = {
        "rack": hall.rack_j,
        "row": hall.row_j,
        "hall": hall.hall_j[np.newaxis],
    }
    summary: dict[str, Any] = {}
    for level, limit_w in work.plan.limits_w.items():
        over = {}
        for window_s in list_windows(work.bin_s, work.seconds):
            means_w = window_means_w(series[level], work.bin_s, window_s)
            over[f"{window_s:g}s"] = float((means_w > limit_w).mean())
        summary[level] = {"limit_w": limit_w, "share_above": over}
        if level == "hall":
            summary[level]["chance"] = chance
            summary[level]["more_racks"] = _count_more_racks(hall, limit_w, chance)
    return summary


def _count_more_racks(
    hall: CombinedHall,
    limit_w: float,
    chance: float,
) -> dict[str, dict[str, int]]:
    """Return how many more racks of each group fit under the hall's limit, by window."""
    work = hall.work
    counts: dict[str, dict[str, int]] = {}
    for place, group in enumerate(work.groups):
        by_window = {}
        for window_s in list_windows(work.bin_s, work.seconds):
            hall_w = window_means_w(hall.hall_j, work.bin_s, window_s)
            racks = hall.racks[place, window_s]
            by_window[f"{window_s:g}s"] = racks_that_fit(hall_w, limit_w, racks, chance)
        counts[group.group.name] = by_window
    return counts


def list_assumptions(hall: CombinedHall) -> list[str]:
    """Return what a hall takes for granted."""
    notes = [
        "servers: the middle of their interval (wattcast gpus systems); cards of a kind are alike",
        "cooling and distribution of the building are not included",
    ]
    for work in hall.work.groups:
        load = work.group.load
        if isinstance(load, ServingLoad) and work.library is not None:
            seconds = sum(stretch.seconds for stretch in work.library.stretches)
            notes.append(
                f"{work.group.name}: replicas are pieces of five minutes of "
                f"{units.show(float(seconds), 's', 3)} simulated at {len(work.library.stretches)} "
                "rates"
            )
            busiest = work.library.stretches[-1]
            if busiest.figures["served_per_s"] < PLAN.busy_most * busiest.rate_per_s:
                notes.append(
                    f"{work.group.name}: at {busiest.rate_per_s:.3g} requests/s a replica serves "
                    f"{busiest.figures['served_per_s']:.3g}; its queue grows at the busiest hour"
                )
        if isinstance(load, ServingLoad | TrainingLoad):
            factors = find_machine_factors(work.group.gpu, read_machine(load))
            notes += [f"{work.group.name}: {note}" for note in factors.notes]
        for key, reason in work.group.system.unknown.items():
            notes.append(f"{work.group.system.name}: {key.replace('_', ' ')}: {reason}")
    return list(dict.fromkeys(notes))


def print_hall(
    console: Console,
    hall: CombinedHall,
    chance: float,
) -> None:
    """Print energy and peaks by level, limits, and what capping does."""
    summary = summarise_hall(hall, chance)
    span = units.show(float(hall.work.seconds), "s", 3)
    console.print(
        f"[bold]{summary['title']}[/bold]: {summary['gpus']:,} GPUs in {summary['racks']:,} racks, "
        f"{span} from {_clock(hall.work.begin_s)}"
    )
    energy = f"{hall.energy_j / 3.6e9:,.4g} MWh"
    mean = units.show(summary["mean_w"], "W", 4)
    peak = units.show(hall.peak_sums_w["hall"], "W", 4)
    ramp = summary["levels"]["hall"]["ramp_w_per_min"] / 1e6
    console.print(f"{energy}, mean {mean}, peak {peak}, steepest ramp {ramp:.3g} MW/min")
    console.print(_peak_table(summary))
    factors = ", ".join(f"{level}s {value:.3f}" for level, value in summary["diversity"].items())
    console.print(f"diversity (sum of peaks over the peak of all): {factors}")
    for group in summary["groups"]:
        console.print(_describe_group(group))
    for level, limit in summary["limits"].items():
        console.print(_describe_limit(level, limit))
    if hall.cap is not None:
        _print_cap(console, hall.cap)
    print_notes(console, summary["assumptions"])


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600):02d}:{int(seconds % 3600 // 60):02d}"


def _peak_table(summary: dict[str, Any]) -> Any:
    table = new_table("level", "window", *(f"P{p:g}" for p in PERCENTS), "most")
    for level in LEVELS:
        for window, peaks in summary["levels"][level]["peaks_w"].items():
            watts = [units.show(peaks[f"p{p:g}"], "W", 4) for p in PERCENTS]
            most = units.show(peaks["max"], "W", 4) if "max" in peaks else ""
            table.add_row(level, window, *watts, most)
    return table


def _describe_group(group: dict[str, Any]) -> str:
    mean = units.show(group["mean_w"], "W", 3)
    peak = units.show(group["peak_w"], "W", 3)
    text = f"{group['name']}: {group['racks']} racks, mean {mean}, peak {peak}"
    if "busiest" in group:
        ttft = units.show(group["busiest"]["ttft_p99_s"], "s", 3)
        tpot = units.show(group["busiest"]["tpot_p99_s"], "s", 3)
        text += f"; at the busiest rate p99 TTFT {ttft}, TPOT {tpot}"
    if "failures" in group:
        step = units.show(group["step_s"], "s", 3)
        text += f"; steps of {step}, {group['failures']} failures in the day"
    return text


def _describe_limit(level: str, limit: dict[str, Any]) -> str:
    shares = [f"{share:.2%} of {window}" for window, share in limit["share_above"].items()]
    watts = units.show(limit["limit_w"], "W", 4)
    text = f"{level} limit {watts}: passed in {', '.join(shares)}"
    if "more_racks" in limit:
        fits = []
        for name, counts in limit["more_racks"].items():
            fits.append(f"{min(counts.values())} to {max(counts.values())} of {name}")
        text += f"; more racks at a chance of {limit['chance']:.2%}: {', '.join(fits)}"
    return text


def _print_cap(console: Console, cap: CapFigures) -> None:
    limit = units.show(cap.limit_w, "W", 4)
    gpu_limit = units.show(cap.gpu_limit_w, "W")
    saved = units.show(cap.saved_j / 3600.0, "Wh", 3) if cap.saved_j else "nothing"
    console.print(
        f"cap of the {cap.level} at {limit}: above it for "
        f"{cap.over_before_s:g} s without, {cap.over_after_s:g} s with GPUs held at "
        f"{gpu_limit} for {cap.capped_rack_s:g} rack-seconds; {saved} less"
    )
    for name, figures in cap.groups.items():
        if "capped_ttft_p99_s" in figures:
            before = units.show(figures["ttft_p99_s"], "s", 3)
            after = units.show(figures["capped_ttft_p99_s"], "s", 3)
            tokens = units.show(figures["tpot_p99_s"], "s", 3)
            slowed = units.show(figures["capped_tpot_p99_s"], "s", 3)
            console.print(
                f"  {name}: {figures['capped_requests']:,.0f} requests meanwhile; p99 TTFT "
                f"{before} to {after}, TPOT {tokens} to {slowed}"
            )
        elif "lost_progress" in figures:
            console.print(f"  {name}: {figures['lost_progress']:.2%} less progress")


def write_hall(
    hall: CombinedHall,
    folder: Path,
    ending: str,
    chance: float,
) -> list[Path]:
    """Write series and summary into a folder, and return the files.

    ``power`` has the hall, its GPUs, groups and rows; ``racks`` every rack, in means of a minute at
    least; ``profiles`` the rows in MW by step, as pandapower's controllers read them. Energy has
    all its digits, watts have three behind the point.
    """
    duration_s = hall.grid_duration_s
    columns = _list_times(hall)
    hall_j = hall.on_grid(hall.hall_j)
    columns["power_w"] = hall_j / duration_s
    columns["energy_j"] = hall_j
    columns["gpu_w"] = hall.on_grid(hall.gpu_j) / duration_s
    for work, joules in zip(hall.work.groups, hall.group_j, strict=True):
        columns[f"{work.group.name}_w"] = hall.on_grid(joules) / duration_s
    row_w = hall.on_grid(hall.row_j) / duration_s
    profiles: dict[str, Any] = {"time_step": np.arange(len(duration_s))}
    for place, watts in enumerate(row_w):
        columns[f"row{place}_w"] = watts
        profiles[f"row{place}_p_mw"] = np.round(watts / 1e6, 9)
    columns = {name: _round_watts(name, values) for name, values in columns.items()}

    minutes = replace(hall, grid_s=max(hall.grid_s, min(_RACK_GRID_S, hall.work.seconds)))
    rack_w = minutes.on_grid(hall.rack_j) / minutes.grid_duration_s
    racks = _list_times(minutes)
    racks |= {f"rack{place}_w": np.round(watts, 3) for place, watts in enumerate(rack_w)}

    written = []
    for name, table in (("power", columns), ("racks", racks), ("profiles", profiles)):
        path = folder / f"{name}{ending}"
        write_columns(path, table)
        written.append(path)
    path = folder / "summary.json"
    write_whole(path, encode_json(summarise_hall(hall, chance)))
    return [*written, path]


def _list_times(hall: CombinedHall) -> dict[str, Any]:
    """Return the columns that say when each interval is."""
    return {
        "time": _list_dates(hall.grid_begin_s),
        "time_s": hall.grid_begin_s,
        "duration_s": hall.grid_duration_s,
    }


def _round_watts(name: str, values: Any) -> Any:
    """Return watts rounded to milliwatts, which makes files a third as long."""
    return np.round(values, 3) if name.endswith("_w") else values


def _list_dates(times_s: Array) -> list[str]:
    """Return times of a day with a date, as Grafana and pandas read them."""
    dates = (DATE + timedelta(seconds=float(time_s)) for time_s in times_s.tolist())
    return [date.isoformat(timespec="milliseconds") for date in dates]
