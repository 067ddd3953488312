"""Learn the intervals of models in fp32 and TF32 from published whole models on the same GPU.

Public tables have no products in fp32 or TF32, so that models with them tell what their kernels
cannot. A network errs as a whole, at all batches and clocks: networks count alike, whatever they
have of rows, and each is judged by the half-width of the others on its GPU. Power needs none of
this: its ends are those of whole models in every format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Mask
from wattcast.lab.fit.held_out import weighted_quantile
from wattcast.lab.validate.typed_commands import JudgedRow
from wattcast.predictor.bundle.support_widening import LatencySpread
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_interval import compute_interval

LEVEL = 0.9
OTHER = "other"  # GPUs without such models
_MOST = 0.5  # half-width that is looked at
_STEP = 1e-3


@dataclass(frozen=True)
class WideRows:
    """Models in fp32 with the seconds that they took; ``(row,)`` each."""

    network: npt.NDArray[np.str_]
    predictions: tuple[Prediction, ...]
    measured_s: Array

    @classmethod
    def from_judged(
        cls,
        rows: Sequence[JudgedRow],
        predictions: Sequence[Prediction],
    ) -> WideRows:
        """Take rows of the ledger with the answers to their commands."""
        return cls(
            np.array([row.command.subject for row in rows]),
            tuple(predictions),
            np.array([row.measured["latency"] for row in rows]),
        )

    @cached_property
    def gpu(self) -> npt.NDArray[np.str_]:
        """The GPU of each row."""
        return np.array([prediction.basis.gpu.name for prediction in self.predictions])

    @cached_property
    def needed(self) -> Array:
        """The least half-width of latency at which each row lies inside its interval."""
        pairs = zip(self.predictions, self.measured_s, strict=True)
        return np.array([_find_needed_width(prediction, seconds) for prediction, seconds in pairs])


def _find_needed_width(prediction: Prediction, measured_s: float) -> float:
    """Find the least half-width at which a row lies inside, by bisection."""
    least = 0.0
    most = _MOST
    while most - least > _STEP:
        middle = 0.5 * (least + most)
        low_s, high_s = find_ends_s(prediction, LatencySpread(middle, 0, ""))
        is_inside = low_s <= measured_s <= high_s
        least, most = (least, middle) if is_inside else (middle, most)
    return most


def find_ends_s(prediction: Prediction, spread: LatencySpread) -> Array:
    """Find low and high end of the latency for a spread of whole models."""
    distances = prediction.support.distances
    return compute_interval(prediction.basis, distances, wide=spread).latency_s


def learn_wide_spread(rows: WideRows, chosen: Mask) -> LatencySpread:
    """Learn the least half-width at which nine in ten of some rows lie inside; GPUs count alike,
    and so do the networks of each.
    """
    names = list(zip(rows.gpu[chosen].tolist(), rows.network[chosen].tolist(), strict=True))
    row_counts = Counter(names)
    network_counts = Counter(gpu for gpu, _ in row_counts)
    weight = np.array([1.0 / (row_counts[name] * network_counts[name[0]]) for name in names])
    half_width = weighted_quantile(rows.needed[chosen], weight, LEVEL)
    gpus = ", ".join(sorted(network_counts))
    source = f"models in fp32 on {gpus}: {len(row_counts)} networks, which count alike"
    return LatencySpread(round(half_width, 4), len(names), source)


def learn_wide_spreads(rows: WideRows) -> dict[str, LatencySpread]:
    """Learn the half-width of each GPU, and that of a GPU without such rows."""
    spreads = {}
    for gpu in dict.fromkeys(rows.gpu.tolist()):
        spreads[gpu] = learn_wide_spread(rows, rows.gpu == gpu)
    spreads[OTHER] = learn_wide_spread(rows, np.ones(len(rows.gpu), dtype=bool))
    return spreads


def find_ends_without_networks(rows: WideRows) -> Array:
    """Find the ends of latency that are learned without the network of each row, ``(row, 2)``."""
    ends_s = []
    names = zip(rows.gpu, rows.network, strict=True)
    for prediction, (gpu, network) in zip(rows.predictions, names, strict=True):
        others = (rows.gpu == gpu) & (rows.network != network)
        ends_s.append(find_ends_s(prediction, learn_wide_spread(rows, others)))
    return np.array(ends_s)
