"""One prediction, and a million: as seconds, and as ratios against a plain roofline.

Run with ``asv run --python=same``. Ratios travel between machines; seconds do not.
"""

from __future__ import annotations

import time

import numpy as np

from wattcast.core.arrays import as_sweep
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_graph, total_at_clock
from wattcast.predictor.prediction import predict_graph
from wattcast.workload import ModelOptions, build_graph

POINTS = 1_000_000
CHUNK = 10_000


def sweep(graph, gpu, bundle, points: int, chunk: int = CHUNK) -> float:
    """Whole workload over clock, SM count and bandwidth with the governor, in chunks; sum of
    joules.
    """
    rng = np.random.default_rng(0)
    total_j = 0.0
    for _ in range(0, points, chunk):
        clock = as_sweep(rng.uniform(0.6e9, 1.98e9, chunk))
        chip = gpu.sweep(
            sm_count=rng.integers(64, 192, chunk), memory__byte_per_s=rng.uniform(2e12, 8e12, chunk)
        )
        timeline = analyse_graph(graph, chip, bundle)
        settled = run_governed(timeline, chip, OperatingPoint(clock_hz=clock), bundle)[0]
        total_j += float(total_at_clock(timeline, settled.at, bundle).energy_j.sum())
    return total_j


def roofline(graph, gpu, points: int) -> float:
    """The plainest thing that could answer: two divisions and a maximum per kernel and point."""
    rng = np.random.default_rng(0)
    calls = list(graph.calls())
    flop = np.array([op.flop * n for op, n in calls])
    byte = np.array([(op.read_byte + op.write_byte) * n for op, n in calls])
    total_s = 0.0
    for _ in range(0, points, CHUNK):
        rate = rng.uniform(64, 192, (CHUNK, 1)) * 4096 * rng.uniform(0.6e9, 1.98e9, (CHUNK, 1))
        total_s += float(np.maximum(flop / rate, byte / rng.uniform(2e12, 8e12, (CHUNK, 1))).sum())
    return total_s


class Predict:
    """A whole model, once loaded."""

    def setup(self) -> None:
        self.gpu = load_gpu("h100-sxm")
        self.bundle = bundle_for(self.gpu)
        self.graph = build_graph("llama3-8b", ModelOptions(batch=8, seq=1024, stack="eager"))

    def time_one_prediction(self) -> None:
        predict_graph(self.graph, self.gpu, OperatingPoint(), self.bundle)

    def time_million_points(self) -> None:
        sweep(self.graph, self.gpu, self.bundle, POINTS)

    time_million_points.timeout = 600
    time_million_points.number = 1
    time_million_points.repeat = (1, 3, 120.0)

    def track_million_points_over_roofline(self) -> float:
        """How many plain rooflines a full prediction with the governor costs, per point."""
        start = time.process_time()
        sweep(self.graph, self.gpu, self.bundle, 100_000)
        middle = time.process_time()
        roofline(self.graph, self.gpu, 100_000)
        return (middle - start) / (time.process_time() - middle)

    def track_loop_over_sweep(self) -> float:
        """How many times faster a sweep is than a Python loop over single predictions, per point."""
        start = time.process_time()
        for clock_hz in np.linspace(0.6e9, 1.98e9, 50):
            timeline = analyse_graph(self.graph, self.gpu, self.bundle)
            settled = run_governed(
                timeline, self.gpu, OperatingPoint(clock_hz=float(clock_hz)), self.bundle
            )[0]
            total_at_clock(timeline, settled.at, self.bundle)
        middle = time.process_time()
        sweep(self.graph, self.gpu, self.bundle, 50_000)
        return (middle - start) / 50 / ((time.process_time() - middle) / 50_000)
