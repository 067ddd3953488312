"""Answer what a hall draws over a day, or around one moment, for the page and other programs.

The hall is made of catalogue systems with one model: racks that serve, that train, and that idle. A
few rates of the day are simulated for some minutes each, where `wattcast hall` takes more of both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import BadInput, check_names
from wattcast.hardware.node_systems import system_names
from wattcast.timeseries.hall_combination import CombinedHall
from wattcast.timeseries.hall_file import HallPlan, parse_hall
from wattcast.timeseries.hall_report import summarise_hall
from wattcast.timeseries.hall_run import HallSpan, run_hall
from wattcast.timeseries.load_library import LibrarySize
from wattcast.web.request_schema import HallRequest

MOST_RACKS = 40  # each of up to 32 GPUs, a tenth of a second for a day
MOST_POINTS = 240  # of the series
ZOOM_S = 60  # seconds around a moment ...
ZOOM_GRID_S = 0.1  # ... and their grid
CHANCE = 1e-3  # of passing the hall's limit, for racks that still fit
_FEW = LibrarySize(rates=3, requests=600, least_s=300.0)
_PARTS = ("energy_j", "gpu_energy_j", "mean_w", "gpus", "racks", "diversity", "limits")


def answer_hall(asked: HallRequest) -> dict[str, Any]:
    """Return the power of a hall, its peaks, and how long which power is passed."""
    plan = _plan_hall(asked)
    hall = run_hall(plan, _choose_span(asked))
    summary = summarise_hall(hall, CHANCE)
    duration = summary["load_duration_w"]
    step = max(len(duration["share"]) // MOST_POINTS, 1)
    return {
        **{name: summary[name] for name in _PARTS},
        **summary["levels"]["hall"],
        "load_duration_w": {name: values[::step] for name, values in duration.items()},
        "over_time": _draw_points(hall),
        "assumptions": summary["assumptions"],
    }


def _plan_hall(asked: HallRequest) -> HallPlan:
    """Return the plan of the hall; files of halls have the same checks."""
    check_names("node system", asked.system, system_names())
    racks = asked.serving_racks + asked.training_racks + asked.idle_racks
    if not 1 <= racks <= MOST_RACKS:
        raise BadInput(
            f"racks: expected 1 to {MOST_RACKS} together, got {racks}. Use wattcast hall for more."
        )
    serve = {
        "model": asked.model,
        "rate": f"{asked.rate_per_s}/s",
        "tp": asked.tp,
        "prompt": asked.prompt,
        "output": asked.output,
        "day": asked.day,
    }
    loads: dict[str, tuple[int, dict[str, Any]]] = {
        "serving": (asked.serving_racks, {"serve": serve}),
        "training": (asked.training_racks, {"train": {"model": asked.model}}),
        "idle": (asked.idle_racks, {"idle": "loaded"}),
    }
    groups = [
        {"name": name, "system": asked.system, "racks": count, **load}
        for name, (count, load) in loads.items()
        if count
    ]
    file: dict[str, Any] = {"groups": groups}
    if asked.limit_w is not None:
        file["limits"] = {"hall": f"{asked.limit_w} W"}
    return parse_hall(msgspec.json.encode(file), "hall", Path())


def _choose_span(asked: HallRequest) -> HallSpan:
    """Return the whole day, or a minute around a moment."""
    if asked.around_s is None:
        return HallSpan(library=_FEW)
    begin_s = float(int(min(max(asked.around_s - ZOOM_S / 2, 0.0), 86400.0 - ZOOM_S)))
    return HallSpan(begin_s, float(ZOOM_S), ZOOM_GRID_S, _FEW)


def _draw_points(hall: CombinedHall) -> dict[str, Any]:
    """Return means of each group over equal intervals, and the moment of the highest power."""
    bins = hall.group_j.shape[-1]
    begins = np.unique(np.linspace(0, bins, MOST_POINTS, endpoint=False).astype(int))
    spans_s = np.diff(np.append(begins, bins)) * hall.work.bin_s
    watts = np.add.reduceat(hall.group_j, begins, axis=-1) / spans_s
    names = [work.group.name for work in hall.work.groups]
    start_s = hall.work.begin_s + begins * hall.work.bin_s
    peak_s = hall.work.begin_s + int(hall.power_w.argmax()) * hall.work.bin_s
    return {
        "start_s": (start_s - hall.work.begin_s).tolist(),
        "begin_s": hall.work.begin_s,
        "length_s": bins * hall.work.bin_s,
        "peak_at_s": peak_s,
        "group_w": dict(zip(names, watts.tolist(), strict=True)),
    }
