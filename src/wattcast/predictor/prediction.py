"""Predict a workload on a GPU: latency, power, energy and clock, with an interval and what was
assumed.

A prediction is computed once. Text, JSON, figures and reports take a ``Prediction``; its ``basis``
has the timeline and the detail by kernel for whoever shows more than its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Mask,
    sweep_values,
)
from wattcast.core.user_results import UserResult
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import run_governed
from wattcast.predictor.kernel_coefficients import CLOCK_LAW, MEMORY_KNEE
from wattcast.predictor.pipeline import (
    analyse_graph,
    analyse_graphs,
    total_at_clock,
)
from wattcast.predictor.prediction_basis import PredictionBasis
from wattcast.predictor.prediction_values import (
    ModuleShare,
    OperatorShare,
    PhaseShare,
    PredictionValues,
    to_plain,
)
from wattcast.predictor.timeline import Timeline, slow_memory_path
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Collective

__all__ = ["ModuleShare", "OperatorShare", "PhaseShare", "Prediction"]

TOGETHER = 128  # workloads, of some fifty kernels each, whose kernels are analysed in one table


@dataclass(frozen=True, repr=False)
class Prediction(PredictionValues, UserResult):
    """Latency, power, energy and clock of a workload: floats for one configuration, arrays
    ``(*sweep,)`` for a sweep.

    ``power_w``, ``energy_j`` and ``clock_hz`` are those of one GPU; ``total_power_w`` and
    ``total_energy_j`` are of all ``gpu_count`` GPUs, which are taken to draw the same. ``tokens``
    and ``items`` are counted over all GPUs.

    A token is a prompt token in prefill, a new token in decode (one a sequence) and in generate,
    where the prefill costs time and energy and its prompt does not count, and a token trained on in
    training. An item is a picture, a denoising step or an audio clip. Pipeline stages work on
    batches in turn: once the pipeline is full, one leaves it every ``latency_s``, so that tokens
    per second and joules per token are those of a full pipeline.

    Parts of the power, operators, interval and support are computed when they are read.
    """

    drawn_by = "wattcast.report.result_figures:draw_prediction"

    def __repr__(self) -> str:
        from wattcast.predictor.answer_lines import summarise_line

        return summarise_line(self)

    def _repr_html_(self) -> str:
        from wattcast.predictor.answer_lines import summarise_card

        return summarise_card(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: for one configuration what ``predict --json`` prints, for a sweep
        lists of numbers.
        """
        from wattcast.predictor.prediction_json import prediction_to_plain

        return prediction_to_plain(self)

    def table_rows(self) -> list[dict[str, Any]]:
        """Return a row for each configuration, in the order of the sweep's flattened shape."""
        from wattcast.predictor.prediction_json import list_prediction_rows

        return list_prediction_rows(self)


def predict_graph(
    graph: Graph,
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> Prediction:
    """Predict one workload: analyse its kernels, find the clock the governor allows, sum up at that
    clock.
    """
    return predict_timeline(
        analyse_graph(graph, gpu, bundle),
        graph,
        gpu,
        at,
        bundle,
    )


def predict_graphs(
    graphs: Sequence[Graph],
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
    *,
    notes: bool = True,
) -> list[Prediction]:
    """Predict many workloads, in order, with the kernels of ``TOGETHER`` of them in one table.

    Without ``notes`` they list no assumptions, which takes less time.
    """
    predictions = []
    for start in range(0, len(graphs), TOGETHER):
        some_graphs = graphs[start : start + TOGETHER]
        timelines = analyse_graphs(some_graphs, gpu, bundle)
        for timeline, graph in zip(timelines, some_graphs, strict=True):
            predictions.append(
                predict_timeline(
                    timeline,
                    graph,
                    gpu,
                    at,
                    bundle,
                    notes=notes,
                )
            )
    return predictions


def predict_timeline(
    timeline: Timeline,
    graph: Graph,
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
    *,
    notes: bool = True,
) -> Prediction:
    """Predict a workload whose timeline is known, and list its assumptions where ``notes`` says."""
    settled, totals, run = run_governed(timeline, gpu, at, bundle)
    power_w = totals.power_w
    is_sweep = power_w.ndim > 0
    basis = PredictionBasis(
        graph=graph,
        timeline=timeline,
        totals=totals,
        gpu=gpu,
        at=settled.at,
        bundle=bundle,
        asked_w=settled.asked_w,
        run=None if is_sweep else run,
        divisions=settled.divisions,
    )
    fits = None
    if graph.memory_byte is not None:
        fits = bool(np.all(graph.memory_byte <= np.asarray(gpu.memory.capacity_byte)))
    return Prediction(
        name=graph.name,
        gpu=gpu.name,
        latency_s=_broadcast_like(totals.latency_s, power_w),
        power_w=to_plain(power_w),
        energy_j=to_plain(totals.energy_j),
        clock_hz=_broadcast_like(sweep_values(settled.clock_hz), power_w),
        effective_clock_hz=_broadcast_like(totals.effective_hz, power_w),
        capped=_broadcast_like(settled.capped, power_w),
        busy_s=_broadcast_like(totals.busy_s, power_w),
        memory_byte=graph.memory_byte,
        fits=fits,
        assumptions=_list_assumptions(basis, settled.met, at) if notes else (),
        status=bundle.status,
        provenance=bundle.provenance,
        basis=basis,
    )


def _broadcast_like(values: npt.NDArray[Any], power_w: Array) -> Any:
    """Broadcast values to the shape of a prediction."""
    if values.shape != power_w.shape:
        values = np.broadcast_to(values, power_w.shape)
    return to_plain(values)


def _list_assumptions(
    basis: PredictionBasis,
    met: Mask,
    asked: OperatingPoint,
) -> tuple[str, ...]:
    timeline = basis.timeline
    notes = [*basis.graph.assumptions, *timeline.kernels.assumptions, *basis.bundle.assumptions]
    if not met.all():
        notes.append("the power limit cannot be met even at the lowest clock; that clock is given")
    if asked.clock_hz is not None or asked.power_limit_w is not None:
        notes += _note_slow_memory(basis)
    if timeline.kernels.link_byte.any():
        notes += _note_links(basis)
    return tuple(dict.fromkeys(notes))


def _note_slow_memory(basis: PredictionBasis) -> list[str]:
    """Say how much longer the run takes if the way to device memory follows a low clock."""
    slow_timeline = slow_memory_path(basis.timeline, basis.gpu.clocks.max_hz)
    slow_s = total_at_clock(slow_timeline, basis.at, basis.bundle).latency_s
    slowdown = float(np.max(slow_s / basis.totals.latency_s)) - 1.0
    if slowdown <= CLOCK_LAW.notable_slowdown:
        return []
    return [
        "clock: the way to device memory keeps up until L2 slows down; if it follows the clock "
        f"below {MEMORY_KNEE:.0%} of the top clock, as on a GTX Titan X, latency is up to "
        f"{slowdown:.0%} longer"
    ]


def _note_links(basis: PredictionBasis) -> list[str]:
    """Say how the GPUs are taken to be joined, and warn where fewer of them would be faster."""
    from wattcast.predictor.link_laws import describe_links, warn_of_slow_links

    timeline = basis.timeline
    ops = timeline.kernels.ops
    rows = [row for row, op in enumerate(ops) if isinstance(op, Collective)]
    collectives = [(cast(Collective, ops[row]), float(timeline.calls[row])) for row in rows]
    most_gpus = max(op.gpus for op, _ in collectives)
    notes = [describe_links(basis.gpu, most_gpus)]

    spent_s = (basis.detail.kernel_s * timeline.calls).reshape(-1, len(timeline.calls))
    if len(spent_s) == 1:  # of a sweep each point may differ
        collective_s = float(spent_s[0, rows].sum())
        other_s = float(spent_s.sum()) - collective_s
        warning = warn_of_slow_links(collectives, collective_s, other_s, basis.gpu)
        if warning is not None:
            notes.append(warning)
    return notes
