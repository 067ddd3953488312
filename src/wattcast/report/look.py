"""Everything there is to see of one configuration: the prediction, its course over time, its clock curve, its memory.

Reports, the page in the browser and ``--plot`` all draw from here, so that they show the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from wattcast import api
from wattcast.arrays import Array, swept
from wattcast.equilibrium import settle
from wattcast.fitted import Bundle, bundle_for
from wattcast.flow import analyse, at_clock
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.prediction import Prediction, predict_timeline
from wattcast.report.trace import PowerTrace, trace_at
from wattcast.timeline import Timeline
from wattcast.workload import memory, source
from wattcast.workload.graph import Graph
from wattcast.workload.models import Model
from wattcast.workload.options import Options

CLOCKS = 48  # points of a clock curve
LOWEST_SHARE = 0.3  # of the top clock, where the lowest is not published; as the governor's search assumes


@dataclass(frozen=True)
class Settings:
    """How the card and its host are set; None is the default. Strings carry their unit, numbers are SI."""

    clock: str | float | None = None
    power_limit: str | float | None = None
    host_launch: str | float | None = None
    temperature: str | float | None = None
    data: str = "random"


@dataclass(frozen=True)
class Room:
    """What the run holds in memory by purpose, and the largest batch that would fit. None: not known."""

    footprint: memory.Footprint | None
    capacity_byte: float
    largest_batch: int | None


@dataclass(frozen=True)
class Look:
    """One configuration, seen from all sides."""

    gpu: Gpu
    graph: Graph
    prediction: Prediction
    trace: PowerTrace
    clocks: Mapping[str, Array]  # asked_hz, clock_hz, latency_s, power_w, energy_j
    room: Room


def look(
    workload: str | Graph | Model | Mapping[str, object],
    gpu: Gpu,
    options: Options = Options(),  # noqa: B008  (frozen)
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    *,
    sized: bool = True,
    fitted: Bundle | None = None,
) -> Look:
    """Predict, then follow the run over time and over the clocks of the card; ``sized`` also asks what it holds.

    ``fitted`` is the GPU's own bundle, for those who keep it.
    """
    graph = source.load(workload, options)
    noted, _, wanted, bundle = api.asked(graph, gpu, fitted or bundle_for(gpu), **vars(settings))
    timeline = analyse(graph, gpu, bundle)
    prediction = predict_timeline(timeline, noted, gpu, wanted, bundle)
    at = replace(wanted, clock_hz=np.array([float(prediction.clock_hz)]))
    trace = trace_at(timeline, at, bundle)
    model = source.find_model(workload) if sized else None
    return Look(gpu, graph, prediction, trace, _clock_curve(timeline, gpu, at, bundle), room(model, gpu, options))


def _clock_curve(timeline: Timeline, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> dict[str, Array]:
    """The same run at clocks from the lowest to the highest, under the same power limit.

    Power rises with the clock, so the governor cuts every clock it cuts at all to the same one: it is sought once.
    """
    low_hz, high_hz = clock_span(gpu)
    asked_hz = np.linspace(low_hz, high_hz, CLOCKS)
    settled_hz = float(settle(timeline, gpu, replace(at, clock_hz=high_hz), bundle).clock_hz[..., 0])
    clock_hz = np.minimum(asked_hz, settled_hz)
    totals = at_clock(timeline, replace(at, clock_hz=swept(clock_hz)), bundle)
    return {
        "asked_hz": asked_hz,
        "clock_hz": clock_hz,
        "latency_s": np.array(np.broadcast_to(totals.latency_s, asked_hz.shape)),
        "power_w": np.array(totals.power_w),
        "energy_j": np.array(totals.energy_j),
    }


def clock_span(gpu: Gpu) -> tuple[float, float]:
    """Lowest and highest core clock; where the lowest is not published, a share of the highest."""
    high_hz = float(np.mean(gpu.clocks.max_hz))
    low = gpu.clocks.min_hz
    return (LOWEST_SHARE * high_hz if low is None else float(np.mean(low))), high_hz


def room(model: Model | None, gpu: Gpu, options: Options) -> Room:
    """What a model holds on a GPU; nothing known without a model."""
    capacity_byte = float(np.mean(gpu.memory.capacity_byte))
    if model is None:
        return Room(None, capacity_byte, None)
    largest = memory.largest_batch(model, options, capacity_byte)
    return Room(memory.footprint(model, options), capacity_byte, largest)
