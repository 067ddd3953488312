"""A run that is longer than the governor's window: each long stretch settles at its own clock."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.kernels.kernel_table import IssueSegment
from wattcast.predictor import run_stretches
from wattcast.predictor import timeline as timelines
from wattcast.predictor.answer_lines import describe_cap
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.governor import REACTION_S, run_governed
from wattcast.predictor.pipeline import TimelineRunner, analyse_graph
from wattcast.predictor.run_stretches import MOST_STRETCHES, divide_run
from wattcast.predictor.timeline import compute_latency_s
from wattcast.report.configuration_view import CLOCK_POINTS, build_power_trace, view_configuration
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Elementwise, Linear
from wattcast.workload.readers.from_huggingface import parse_huggingface

GENERATE: dict[str, Any] = {"phase": "generate", "batch": 16, "seq": 4096, "tokens": 256}
HELD = 1.0 + 1e-6


def longest_excess_s(p: wattcast.Prediction, limit_w: float) -> float:
    """Return the longest time over which the mean power of a run, averaged over the window, exceeds
    the limit.
    """
    trace = build_power_trace(p)
    edges = np.arange(0.0, trace.duration_s, REACTION_S)
    spent_j = np.concatenate(
        [[0.0], np.cumsum((trace.end_s - trace.start_s) * trace.part_w.sum(axis=-1))]
    )
    known_s = np.concatenate([trace.start_s, trace.end_s[-1:]])
    window_w = np.diff(np.interp(edges, known_s, spent_j)) / REACTION_S
    longest = here = 0
    for over in window_w > 1.05 * limit_w:
        here = here + 1 if over else 0
        longest = max(longest, here)
    return longest * REACTION_S


@pytest.mark.parametrize("gpu", ["h200", "h100-sxm", "l40s"])
def test_the_prefill_of_a_generation_is_held_by_itself(gpu: str) -> None:
    """The limit once held the mean of prefill and decode.

    A generation of qwen3-32b on an H200 drew 692 W on average, but its prefill ran operators of 770
    to 850 W for seven seconds on a card of 700 W, since the decode steps after it drew less."""
    p = wattcast.predict("qwen3-32b", gpu, force=True, **GENERATE)
    limit_w = load_gpu(gpu).power.limit_w
    prefill, decode = p.phases
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.capped
    assert prefill.power_w <= HELD * p.basis.bundle.governor_share * limit_w
    assert decode.power_w < prefill.power_w
    assert decode.clock_hz > prefill.clock_hz
    assert longest_excess_s(p, limit_w) <= REACTION_S


def test_a_prefill_inside_a_generation_is_the_prefill_alone() -> None:
    """Two commands that answer the same question give the same number: the prefill of ``generate``
    is ``prefill``.
    """
    whole = wattcast.predict("qwen3-32b", "h200", **GENERATE)
    alone = wattcast.predict("qwen3-32b", "h200", batch=16, seq=4096, phase="prefill")
    prefill = whole.phases[0]
    assert prefill.latency_s == pytest.approx(alone.latency_s, rel=1e-6)
    assert prefill.power_w == pytest.approx(alone.power_w, rel=1e-6)
    assert prefill.clock_hz == pytest.approx(alone.clock_hz, rel=1e-6)


@pytest.mark.parametrize("gpu", ["h200", "a100-sxm-80gb", "l40s"])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_parts_add_up_over_stretches(gpu: str, limit: float | None) -> None:
    limit_w = None if limit is None else limit * float(load_gpu(gpu).power.limit_w)
    p = wattcast.predict("qwen3-8b", gpu, power_limit=limit_w, force=True, **GENERATE)
    assert sum(phase.latency_s for phase in p.phases) == pytest.approx(p.latency_s, rel=1e-9)
    assert sum(phase.energy_j for phase in p.phases) == pytest.approx(p.energy_j, rel=1e-9)
    assert sum(op.energy_j for op in p.ops) == pytest.approx(p.energy_j, rel=1e-9)
    assert sum(op.latency_s for op in p.ops) == pytest.approx(p.latency_s, rel=1e-9)
    assert sum(module.power_w for module in p.modules) == pytest.approx(p.power_w, rel=1e-9)
    assert p.interval.power_w[0] <= p.power_w <= p.interval.power_w[1]
    assert p.interval.latency_s[0] <= p.latency_s <= p.interval.latency_s[1]
    assert build_power_trace(p).energy_j == pytest.approx(p.energy_j, rel=1e-9)


def test_a_sweep_does_what_each_of_its_points_would_alone() -> None:
    limits = np.array([350.0, 500.0, 700.0])
    swept = wattcast.predict("qwen3-8b", "h200", power_limit=limits, **GENERATE)
    for place, limit_w in enumerate(limits):
        alone = wattcast.predict("qwen3-8b", "h200", power_limit=limit_w, **GENERATE)
        for name in (
            "latency_s",
            "power_w",
            "energy_j",
            "clock_hz",
            "effective_clock_hz",
            "peak_power_w",
        ):
            assert getattr(swept, name)[place] == pytest.approx(getattr(alone, name), rel=1e-9)
        assert bool(swept.capped[place]) == alone.capped
        assert_allclose(swept.interval.power_w[place], alone.interval.power_w, rtol=1e-9)
        assert_allclose(swept.interval.latency_s[place], alone.interval.latency_s, rtol=1e-9)


def test_points_of_a_sweep_are_divided_each_by_itself() -> None:
    """On a slow memory an operator outlasts the window that it does not on a fast one."""
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    graph = Graph.from_operators(
        "mixed", [Linear(8192, 8192, 8192, count=90), Elementwise("copy", 1 << 28, count=300)]
    )
    speeds = np.array([2.4e12, 4.8e12, 9.6e12])
    swept = gpu.with_fields({"memory.byte_per_s": speeds})
    point, totals, _ = run_governed(
        analyse_graph(graph, swept, bundle), swept, OperatingPoint(), bundle
    )
    assert len(point.divisions) > 1
    for place, speed in enumerate(speeds):
        one = gpu.with_fields({"memory.byte_per_s": float(speed)})
        alone_point, alone, _ = run_governed(
            analyse_graph(graph, one, bundle), one, OperatingPoint(), bundle
        )
        assert totals.latency_s[place] == pytest.approx(float(alone.latency_s), rel=1e-9)
        assert totals.power_w[place] == pytest.approx(float(alone.power_w), rel=1e-9)
        assert point.clock_hz[place, 0] == pytest.approx(
            float(alone_point.clock_hz[..., 0]), rel=1e-9
        )


def test_kernels_that_follow_one_another_fast_share_a_clock() -> None:
    """A step with an optimiser of 57 ms drew 688 to 691 W over the whole step: the window is longer
    than that.
    """
    p = wattcast.predict(
        "gpt2", "h200", phase="train", batch=64, seq=512, stack="eager", host_launch="0us"
    )
    assert p.latency_s > REACTION_S
    names = [phase.name for phase in p.phases]
    assert not any(name == "optimiser" for name in names)


def test_operators_in_a_row_that_outlast_the_window_have_their_own_clock() -> None:
    heavy = {"op": "linear", "m": 8192, "n": 8192, "k": 8192, "count": 1000}
    light = {"op": "copy", "n": 100_000_000, "count": 3000}
    p = wattcast.predict({"name": "both", "ops": [heavy, light]}, "h200")
    alone = [wattcast.predict({"name": "one", "ops": [op]}, "h200") for op in (heavy, light)]
    assert [phase.capped for phase in p.phases] == [True, False]
    for phase, single in zip(p.phases, alone, strict=True):
        assert phase.power_w == pytest.approx(
            single.power_w, rel=1e-3
        )  # alone, the cache is in another state
        assert phase.clock_hz == pytest.approx(single.clock_hz, rel=1e-3)


def test_the_host_runs_ahead_across_stretches() -> None:
    """Stretches of an eager run take together what the run takes: the host's lead is not lost
    between them.
    """
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    graph = build_graph(
        "llama3-8b", ModelOptions.from_names(phase="train", stack="eager", batch=1, seq=4096)
    )
    timeline = analyse_graph(graph, gpu, bundle)
    assert timeline.host_s.any()
    at = OperatingPoint(power_limit_w=400.0)
    point, totals, ran = run_governed(timeline, gpu, at, bundle)
    assert len(point.divisions[0].stretches) > 1
    held_w = bundle.governor_share * 400.0
    for part in point.divisions[0].stretches:
        assert float(part.totals.power_w) == pytest.approx(held_w, rel=1e-6)
    assert float(totals.latency_s) >= float(totals.busy_s)
    assert float(ran.kernel_s @ timeline.calls) == pytest.approx(float(totals.busy_s), rel=1e-9)


def test_a_day_of_work_is_divided_into_few_stretches() -> None:
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    ops = [Linear(8192, 8192, 8192 - 64 * (i % 3), count=500 + i) for i in range(300)]
    timeline = analyse_graph(Graph.from_operators("long", ops), gpu, bundle)
    kernel_s = np.full(len(timeline.calls), 1e-3)
    (division,) = divide_run(timeline, kernel_s, np.asarray(kernel_s @ timeline.calls), REACTION_S)
    assert 1 < len(division.stretches) <= MOST_STRETCHES
    assert sum(part.timeline.calls.sum() for part in division.stretches) == timeline.calls.sum()


def test_a_burst_is_not_divided() -> None:
    p = wattcast.predict("qwen3-8b", "h200", duration="50ms", **GENERATE)
    assert p.phases == ()
    assert not p.capped


def test_the_clock_curve_ends_at_the_prediction() -> None:
    gpu = load_gpu("h200")
    view = view_configuration("qwen3-8b", gpu, ModelOptions.from_names(**GENERATE))
    p = view.prediction
    assert p.phases
    for name in ("latency_s", "power_w", "energy_j", "clock_hz"):
        assert view.clocks[name][-1] == pytest.approx(getattr(p, name), rel=1e-9)


def test_json_and_text_name_the_phases() -> None:
    p = wattcast.predict("qwen3-32b", "h200", **GENERATE)
    out = p.to_dict()
    assert [phase["name"] for phase in out["phases"]] == ["prefill", "decode"]
    uncapped = wattcast.predict("gpt2", "h200")
    assert uncapped.to_dict()["phases"] == []
    assert describe_cap(p) == "the power limit holds the clock down in prefill"
    assert describe_cap(uncapped) == ""


@pytest.mark.parametrize("kind", ["smollm3", "minimax"])
def test_an_engine_step_that_is_divided_still_waits_for_its_host(kind: str) -> None:
    """Parts of a divided step forgot the step, and its host with it.

    A prompt through SmolLM3 took a jump at 1,296 layers. A MiniMax of 200 layers took less time
    than its interval allowed, whose ends knew the host."""
    sizes: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 128256}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 11008}
    if kind == "minimax":
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "block_size": 256}
        sizes |= {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    took_s = {}
    for layers in (64, 300, 1300):
        config = json.dumps({"model_type": kind, "num_hidden_layers": layers, **sizes}).encode()
        graph = parse_huggingface(config, where="config.json", name="mine")
        p = wattcast.predict(graph, "h200", force=True)
        low, high = p.interval.latency_s
        assert low <= p.latency_s <= high, layers
        took_s[layers] = float(p.latency_s)
    layer_s = (took_s[300] - took_s[64]) / (300 - 64)
    assert took_s[1300] == pytest.approx(took_s[300] + 1000 * layer_s, rel=0.01)


def test_a_divided_step_shares_its_host_among_its_parts() -> None:
    """The parts of a step that waits wait in sum as long as the whole step, and share the host."""
    graph = build_graph("qwen3-30b-a3b", ModelOptions(batch=1, seq=2048))
    bundle = bundle_for(load_gpu("h200"))
    timeline = analyse_graph(graph, load_gpu("h200"), bundle)
    kernel_s = np.full(len(timeline.calls), 1e-6)
    whole_s = float(compute_latency_s(timeline, kernel_s))
    assert whole_s > 2.0 * float(kernel_s @ timeline.calls)  # it waits
    (division,) = divide_run(timeline, kernel_s, np.asarray(whole_s), 2e-6)
    assert len(division.stretches) > 3
    parts_s = [
        float(compute_latency_s(part.timeline, kernel_s[part.rows])) for part in division.stretches
    ]
    assert sum(parts_s) == pytest.approx(whole_s, rel=1e-9)


def test_a_clock_curve_searches_each_point_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for ``sdxl-unet`` on a Quadro RTX 6000 held a worker for 7 to 10 s.

    Its run is divided otherwise at each of 48 clocks, and each of these divisions was searched for
    the clocks of all points: 9,559 runs of a stretch."""
    runs = 0
    run_at = TimelineRunner.run_at

    def count_run(runner: TimelineRunner, clock_hz: Any) -> Any:
        nonlocal runs
        runs += 1
        return run_at(runner, clock_hz)

    monkeypatch.setattr(TimelineRunner, "run_at", count_run)
    seen = view_configuration("sdxl-unet", load_gpu("quadro-rtx-6000"), force=True)
    assert len(seen.clocks["power_w"]) == CLOCK_POINTS
    assert 100 < runs < 4000


def test_steps_that_lie_in_one_stretch_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a generation was once divided for every stretch: 256 times for this run, which
    took half of its 42 ms.
    """
    divided = []
    divide_step = run_stretches._divide_step

    def count_calls(*arguments: Any) -> list[IssueSegment]:
        divided.append(arguments)
        return divide_step(*arguments)

    monkeypatch.setattr(run_stretches, "_divide_step", count_calls)
    options = ModelOptions(phase="generate", batch=16, seq=4096, tokens=256)
    gpu = load_gpu("h200")
    timeline = analyse_graph(build_graph("qwen3-32b", options), gpu, bundle_for(gpu))
    run = TimelineRunner(timeline, OperatingPoint(), bundle_for(gpu)).run_at(np.array([1.98e9]))
    (division,) = divide_run(timeline, run.kernel_s, run.latency_s, REACTION_S)
    assert len(division.stretches) >= 10
    assert len(divided) <= 2 * len(division.stretches)


def test_a_segment_takes_as_long_by_rows_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(48)
    segment = IssueSegment(np.arange(9), draw.integers(1, 4, 9).astype(float), 3)
    kernel_s = draw.random((4, 9))
    host_s = draw.random(9)
    at_once = timelines._run_segment(segment, host_s, kernel_s)
    monkeypatch.setattr(timelines, "SMALL_SWEEP", 0)
    by_rows = timelines._run_segment(segment, host_s, kernel_s)
    for left, right in zip(at_once, by_rows, strict=True):
        assert_allclose(np.broadcast_to(left, 4), np.broadcast_to(right, 4), rtol=1e-12)
