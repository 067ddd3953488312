"""The closed form of the two queues equals walking through them kernel by kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.kernels.kernel_table import Kernels
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.cold_cache import ColdCacheDelay
from wattcast.predictor.pipeline import analyse_graph
from wattcast.predictor.prediction import predict_graph
from wattcast.predictor.timeline import Timeline, compute_busy_s, compute_latency_s
from wattcast.workload import ModelOptions, build_graph
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


WRITTEN_OUT = (
    ("llama3-8b", {"phase": "decode", "stack": "engine", "batch": 4, "seq": 512, "tp": 2}),
    ("qwen3-30b-a3b", {"phase": "prefill", "stack": "engine", "batch": 1, "seq": 64}),
    ("gpt2", {"phase": "generate", "stack": "eager", "batch": 2, "seq": 64, "tokens": 5}),
    ("nemotron-h-8b", {"phase": "decode", "stack": "engine", "batch": 2, "seq": 64}),
    ("t5-small", {"phase": "train", "stack": "eager", "batch": 2, "seq": 64, "tp": 2}),
    ("bert-base", {"phase": "train", "stack": "compiled", "batch": 2, "seq": 128}),
    ("resnet50", {"phase": "forward", "stack": "compiled", "batch": 2}),
    ("deepseek-v2-lite", {"phase": "decode", "stack": "eager", "batch": 2, "seq": 64}),
)


@pytest.mark.parametrize(("name", "options"), WRITTEN_OUT)
@pytest.mark.parametrize("gpu", ["h200", "a100-sxm-80gb"])
def test_a_block_that_repeats_takes_what_it_takes_written_out(
    name: str, options: dict[str, Any], gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that walks blocks and forgets how often they repeat would count a layer once.

    Only the law of cold caches tells the two apart, on purpose: it counts the bytes that pass
    between two runs of one kernel in a block that repeats.
    """

    def no_delay(law: ColdCacheDelay, kernels: Kernels, l2_byte: float) -> np.ndarray:
        return np.zeros(len(kernels.ops))

    monkeypatch.setattr(ColdCacheDelay, "extra_s", no_delay)
    graph = build_graph(name, ModelOptions(**options))
    blocks = []
    for block in graph.blocks:
        blocks += [replace(block, repeat=1)] * block.repeat
    assert len(blocks) > len(graph.blocks)
    chip = load_gpu(gpu)
    at = OperatingPoint(clock_hz=1.2e9)
    short = predict_graph(graph, chip, at, bundle_for(chip))
    long = predict_graph(replace(graph, blocks=tuple(blocks)), chip, at, bundle_for(chip))
    for column in ("latency_s", "power_w", "energy_j", "busy_s"):
        assert getattr(long, column) == pytest.approx(getattr(short, column), rel=1e-9), column
