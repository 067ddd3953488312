"""Divide a predicted picture among its parts: text encoders, denoiser and decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.predictor.prediction_basis import PredictionBasis
from wattcast.predictor.timeline import compute_latency_s
from wattcast.workload.operator_base import select_operators
from wattcast.workload.picture_pipeline import PicturePart, part_of_label


@dataclass(frozen=True)
class PartShare:
    """Time and energy of one part of a picture, of one GPU; floats, or arrays ``(*sweep,)``."""

    name: str
    runs: int  # how often the part runs: the steps of a denoiser
    latency_s: Any
    energy_j: Any

    @property
    def power_w(self) -> Any:
        """Mean power of one GPU while the part runs."""
        return self.energy_j / self.latency_s


def share_parts(basis: PredictionBasis) -> tuple[PartShare, ...]:
    """Return the parts of a picture in their order; none of any other workload.

    They add up to the whole. Kernels count for the part that runs them. The time in which the GPU
    waits for the host, and the energy of it, go to parts as each of them would wait alone.
    """
    spent = [_sum_kernels(basis, part) for part in basis.graph.parts]
    if not spent:
        return ()
    busy_s = sum(part.busy_s for part in spent)
    waiting_s = sum(part.waiting_s for part in spent)
    gap_s = np.maximum(basis.totals.latency_s - busy_s, 0.0)

    shape = basis.totals.power_w.shape
    shares = []
    for part, kernels in zip(basis.graph.parts, spent, strict=True):
        even = np.full(np.shape(waiting_s), 1.0 / len(spent))
        gap_share = np.divide(
            kernels.waiting_s, waiting_s, out=even, where=np.asarray(waiting_s) > 0.0
        )
        part_s = np.broadcast_to(kernels.busy_s + gap_share * gap_s, shape)
        part_j = np.broadcast_to(kernels.kernel_j + gap_share * basis.detail.gap_j, shape)
        shares.append(PartShare(part.name, part.runs, _to_plain(part_s), _to_plain(part_j)))
    return tuple(shares)


@dataclass(frozen=True, eq=False)
class _PartKernels:
    """Time and energy of the kernels of a part, and how long it would wait for the host alone."""

    busy_s: Array
    kernel_j: Array
    waiting_s: Array


def _sum_kernels(basis: PredictionBasis, part: PicturePart) -> _PartKernels:
    timeline = basis.timeline
    detail = basis.detail
    segments = [
        segment
        for segment in timeline.kernels.segments
        if part_of_label(segment.label) == part.name
    ]
    rows = np.unique(np.concatenate([segment.rows for segment in segments]))
    local_segments = tuple(
        replace(segment, rows=rows.searchsorted(segment.rows)) for segment in segments
    )
    ops = select_operators(timeline.kernels.ops, rows)
    alone = timeline.select_rows(rows, ops, local_segments)

    kernel_s = detail.kernel_s[..., rows]
    busy_s = kernel_s @ alone.calls
    waiting_s = np.maximum(compute_latency_s(alone, kernel_s) - busy_s, 0.0)
    return _PartKernels(busy_s, detail.kernel_j[..., rows] @ alone.calls, waiting_s)


def _to_plain(values: Array) -> Any:
    return values if values.ndim else float(values)
