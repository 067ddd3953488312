"""The closed form of the two queues equals walking through them kernel by kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.pipeline import analyse_graph
from wattcast.predictor.timeline import Timeline, compute_busy_s, compute_latency_s
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_types import Elementwise

SIZES = [10, 1000, 100_000, 10_000_000]


def walked(timeline: Timeline, each_s: np.ndarray) -> float:
    issued = end = 0.0
    for segment in timeline.kernels.segments:
        for _ in range(segment.repeat):
            for row, count in zip(segment.rows, segment.counts, strict=True):
                for _ in range(int(count)):
                    issued += float(timeline.host_s[row])
                    end = max(issued, end) + float(each_s[row])
    return end


ops = st.builds(
    lambda n, c: Elementwise("relu", n, count=c), st.sampled_from(SIZES), st.integers(1, 4)
)
blocks = st.builds(
    lambda o, r: Block(tuple(o), r), st.lists(ops, min_size=1, max_size=6), st.integers(1, 5)
)


@given(
    st.lists(blocks, min_size=1, max_size=4),
    st.lists(st.floats(1e-7, 1e-4), min_size=4, max_size=4),
)
def test_latency_is_what_a_walk_finds(found: list[Block], times: list[float]) -> None:
    gpu = load_gpu("h200")
    timeline = analyse_graph(Graph("g", tuple(found)), gpu, bundle_for(gpu))
    each_s = np.array(times)[: len(timeline.kernels.ops)]
    assert float(compute_latency_s(timeline, each_s)) == pytest.approx(
        walked(timeline, each_s), rel=1e-12
    )
    assert float(compute_busy_s(timeline, each_s)) <= float(compute_latency_s(timeline, each_s)) * (
        1 + 1e-12
    )


@given(
    st.lists(blocks, min_size=1, max_size=4),
    st.lists(st.lists(st.floats(1e-7, 1e-4), min_size=4, max_size=4), min_size=1, max_size=5),
    st.lists(st.floats(1e-7, 1e-4), min_size=5, max_size=5),
)
def test_a_sweep_is_what_a_walk_finds_at_each_of_its_points(
    found: list[Block], times: list[list[float]], host: list[float]
) -> None:
    """A sweep takes another way: kernel after kernel over all points, be the host's cost swept or
    not.
    """
    gpu = load_gpu("h200")
    timeline = analyse_graph(Graph("g", tuple(found)), gpu, bundle_for(gpu))
    each_s = np.array(times, order="F")[:, : len(timeline.kernels.ops)]
    swept_host_s = np.array(host[: len(each_s)])[:, np.newaxis] * np.ones(each_s.shape[1])
    varied = replace(timeline, host_s=swept_host_s)
    alike, apart = compute_latency_s(timeline, each_s), compute_latency_s(varied, each_s)
    for i, one_s in enumerate(each_s):
        assert alike[i] == pytest.approx(walked(timeline, one_s), rel=1e-12)
        assert apart[i] == pytest.approx(
            walked(replace(timeline, host_s=swept_host_s[i]), one_s), rel=1e-12
        )
