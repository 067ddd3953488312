"""The scheduler against schedules worked out by hand, queueing theory, and what must hold for every
run.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_costs import make_costs, real_host

from wattcast.core.errors import BadInput
from wattcast.predictor.api import find_gpu
from wattcast.serving.arrivals import draw_trace, make_trace
from wattcast.serving.engine_simulator import EngineReplica, ReplicaRun
from wattcast.serving.governed_steps import predict_steady_step
from wattcast.serving.request_plan import EngineSettings, plan_requests
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions


def serve(trace, costs=None, settings=None) -> ReplicaRun:
    settings = settings or EngineSettings()
    engine = EngineReplica(costs or make_costs(), settings, plan_requests(trace, settings))
    engine.submit(range(len(trace)))
    return engine.finish()


def test_schedule_of_two_requests_by_hand() -> None:
    """Steps of 1 ms and 0.1 ms a token; the second request arrives while the first decodes.

    Prompt of 4: 0 to 1.4 ms. Two decodes: to 2.5 and 3.6 ms. Tokens reach the host when their step
    has ended. The second arrives at 1.5 ms, when the step up to 3.6 ms is launched already: 3.6 to
    4.8 ms."""
    run = serve(make_trace([0.0, 0.0015], [4, 2], [3, 1]))
    np.testing.assert_allclose(run.first_token_s, [0.0014, 0.0048], rtol=1e-9)
    np.testing.assert_allclose(run.last_token_s, [0.0036, 0.0048], rtol=1e-9)


def test_prompt_shares_a_step_with_decodes() -> None:
    run = serve(make_trace([0.0, 0.0001], [10, 20], [50, 2]))
    mixed = (run.segments["prompts"] > 0) & (run.segments["decodes"] > 0)
    assert run.segments["prompt_tokens"][mixed].tolist() == [20.0]
    assert run.segments["decodes"][mixed].tolist() == [1.0]


def test_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    settings = EngineSettings(max_batched_tokens=512, max_seqs=8)
    run = serve(make_trace([0.0], [1200], [2]), settings=settings)
    prompts = run.segments["prompt_tokens"]
    assert prompts[prompts > 0].tolist() == [512.0, 512.0, 176.0]


def test_no_more_sequences_run_than_allowed() -> None:
    settings = EngineSettings(max_seqs=3)
    run = serve(make_trace(np.zeros(10), np.full(10, 8), np.full(10, 20)), settings=settings)
    assert run.segments["decodes"].max() <= 3
    assert np.isfinite(run.last_token_s).all()


def test_small_cache_preempts_and_every_request_still_ends() -> None:
    trace = make_trace([0.0, 0.0, 0.0], [16, 16, 16], [60, 60, 60])
    run = serve(trace, make_costs(cache_tokens=128))
    assert run.preemptions >= 1
    assert np.isfinite(run.last_token_s).all()
    assert run.segments["cache_use"].max() <= 1.1
    assert serve(trace, make_costs()).preemptions == 0


def test_prompt_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot hold a prompt of 500"):
        serve(make_trace([0.0], [500], [2]), make_costs(cache_tokens=256))


def test_mean_wait_follows_the_m_d_1_queue() -> None:
    """One request at a time, all alike: the mean wait is ρ D / (2 (1 - ρ)) (Pollaczek and
    Khinchine).

    The tolerance is three standard errors of 40,000 correlated waits.
    """
    service_s, load = 1e-3 + 10 * 1e-4, 0.7
    trace = draw_trace(load / service_s, 10, 1, requests=40_000, seed=3)
    run = serve(trace, settings=EngineSettings(max_seqs=1))
    wait_s = run.first_token_s - trace.arrival_s - service_s
    assert wait_s.min() > -1e-9
    assert wait_s.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.06)


def test_more_traffic_never_shortens_the_time_to_first_token() -> None:
    means = []
    for rate in (20.0, 60.0, 100.0, 140.0):
        trace = draw_trace(rate, 64, 32, requests=3000, seed=2)
        run = serve(trace, make_costs(host=real_host()))
        means.append(float((run.first_token_s - trace.arrival_s).mean()))
    assert means == sorted(means)


@given(
    st.lists(
        st.tuples(st.floats(0, 0.2), st.integers(1, 300), st.integers(1, 80)),
        min_size=1,
        max_size=30,
    ),
    st.integers(400, 3000),
    st.integers(1, 8),
    st.sampled_from([0, 3]),
)
def test_every_request_ends_once_and_tokens_add_up(rows, cache_tokens, max_seqs, drafted) -> None:
    arrival_s, prompt, output = zip(*rows, strict=True)
    trace = make_trace(arrival_s, prompt, output)
    settings = EngineSettings(256, max_seqs, speculative_tokens=drafted, acceptance_rate=0.6)
    run = serve(trace, make_costs(cache_tokens=cache_tokens, host=real_host()), settings)
    plan = plan_requests(trace, settings)
    assert np.isfinite(run.first_token_s).all()
    assert (run.first_token_s > trace.arrival_s).all()
    assert (run.last_token_s >= run.first_token_s).all()
    columns = run.segments
    if not run.preemptions:
        assert columns["prompt_tokens"].sum() == trace.prompt_tokens.sum()
    assert (columns["decodes"] * columns["steps"]).sum() == sum(plan.decode_steps)
    assert (np.diff(columns["device_end_s"]) >= 0).all()
    assert (columns["energy_j"] >= 0).all()


def test_runs_of_decode_steps_equal_single_steps() -> None:
    """Stopping an engine every millisecond, as a router does, ends every run after one step.

    Sums over a run are rounded differently, so a request may join the batch some steps sooner or
    later."""
    trace = draw_trace(40.0, 64, 64, requests=200, seed=4)
    settings, costs = EngineSettings(), make_costs(context_s=1e-7, host=real_host())
    stopped = EngineReplica(costs, settings, plan_requests(trace, settings))
    stopped.submit(range(len(trace)))
    for moment_s in np.arange(0.0, 8.0, 1e-3):
        stopped.run_until(float(moment_s))
    whole, split = serve(trace, costs), stopped.finish()
    assert len(split.segments["steps"]) > 2 * len(whole.segments["steps"])
    np.testing.assert_allclose(split.last_token_s, whole.last_token_s, atol=0.015)
    assert (split.last_token_s - trace.arrival_s).mean() == pytest.approx(
        (whole.last_token_s - trace.arrival_s).mean(), rel=4e-3
    )
    assert split.segments["energy_j"].sum() == pytest.approx(
        whole.segments["energy_j"].sum(), rel=2e-3
    )


def test_an_engine_that_waits_for_others_hands_out_its_last_tokens() -> None:
    """An engine whose last step was computed while requests still arrived elsewhere kept the tokens
    of that step: the last request of a replica never ended, with any router but round-robin.
    """
    trace = make_trace([0.0], [100], [2])
    plan = plan_requests(trace, EngineSettings())
    engine = EngineReplica(make_costs(), EngineSettings(), plan)
    engine.submit((0,))
    moment_s = 0.0
    while engine.outstanding:
        moment_s += 1e-4
        engine.run_until(moment_s)
    assert np.isfinite(engine.finish().last_token_s).all()


def test_power_limit_slows_steady_load_and_lets_a_burst_pass() -> None:
    """At 400 W and a limit of 300 W half the clock would do; the first steps after a pause run at
    the top clock.
    """
    costs = make_costs(limit_w=300.0)
    costs = costs.__class__(
        **{**costs.__dict__, "tokens": costs.tokens * np.array([1.0, 1.0, 1.0, 0.5])}
    )
    run = serve(make_trace([0.0], [8], [2000]), costs)
    power_w = run.segments["energy_j"].sum() / run.segments["device_end_s"][-1]
    assert power_w == pytest.approx(300.0, rel=0.02)
    burst = serve(make_trace([0.0], [8], [10]), costs)
    assert burst.segments["energy_j"].sum() / burst.segments["device_end_s"][-1] == pytest.approx(
        400.0, rel=0.01
    )


def test_prompts_of_layers_that_scan_are_held_up_by_the_host() -> None:
    """Steps of nemotron-h-8b in vLLM 0.25.1: 39 ms for a prompt of 256 tokens, of which the GPU
    computes 8.
    """
    model, options = load_model("nemotron-h-8b"), ModelOptions.from_names(stack="engine")
    costs = tabulate_step_costs(model, find_gpu("h200"), options, StepRange(longest_context=4096))
    assert predict_steady_step(costs, 0, 0.0, [(256, 0)], 1.0)[0] == pytest.approx(39.4e-3, rel=0.1)
    assert predict_steady_step(costs, 0, 0.0, [(2048, 0)], 1.0)[0] == pytest.approx(
        77.0e-3, rel=0.1
    )
    assert predict_steady_step(costs, 16, 512.0, ())[0] == pytest.approx(5.74e-3, rel=0.1), (
        "one graph holds all"
    )


def test_steps_of_gpt_oss_replay_graphs_up_to_1024_tokens() -> None:
    """A prompt of 512 tokens beside 64 decodes took 16.3 ms; launched layer by layer it would take
    74.
    """
    options = ModelOptions.from_names(stack="engine", quantization="mxfp4")
    costs = tabulate_step_costs(
        load_model("gpt-oss-20b"), find_gpu("h200"), options, StepRange(longest_context=4096)
    )
    assert predict_steady_step(costs, 64, 1024.0, [(512, 0)], 1.0)[0] == pytest.approx(
        16.3e-3, rel=0.15
    )
    assert predict_steady_step(costs, 64, 1024.0, [(2048, 0)], 1.0)[0] > 70e-3


def test_prefix_found_in_the_cache_is_not_computed() -> None:
    trace = make_trace([0.0, 1.0, 2.0], [100, 100, 100], [2, 2, 2], prefix_id=[5, 5, 5])
    assert serve(trace).segments["prompt_tokens"].sum() == 100 + 2 * (100 - 96)
    settings = EngineSettings()
    engines = [
        EngineReplica(make_costs(), settings, plan_requests(trace, settings)) for _ in range(2)
    ]
    engines[0].submit([0, 2])
    engines[1].submit([1])
    assert [engine.finish().segments["prompt_tokens"].sum() for engine in engines] == [104, 100]
    half = serve(make_trace([0.0], [100], [2]), settings=EngineSettings(prefix_hit_rate=0.5))
    assert half.segments["prompt_tokens"].sum() == 50


def test_accepted_drafts_save_steps() -> None:
    trace = make_trace(np.arange(50) * 1.0, np.full(50, 10), np.full(50, 101))
    settings = EngineSettings(speculative_tokens=3, acceptance_rate=0.5)
    steps = np.array(plan_requests(trace, settings).decode_steps)
    assert steps.mean() == pytest.approx(100 / (1 + 0.5 + 0.25 + 0.125), rel=0.03)
    assert np.isfinite(serve(trace, settings=settings).last_token_s).all()


def test_time_grows_linearly_with_requests() -> None:
    def spent_s(count: int) -> float:
        trace = draw_trace(60.0, 64, 32, requests=count, seed=1)
        began_s = time.process_time()
        serve(trace, make_costs(host=real_host()))
        return time.process_time() - began_s

    spent_s(500)
    small_s = min(spent_s(1000) for _ in range(3))
    assert any(spent_s(8000) < 8 * small_s * 2 for _ in range(4)), (
        "other work on the machine slows a run, not all"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_seqs": 0},
        {"max_seqs": 256, "max_batched_tokens": 100},
        {"prefix_hit_rate": 1.5},
        {"acceptance_rate": -0.1},
        {"speculative_tokens": -1},
    ],
)
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(BadInput):
        EngineSettings(**wrong)


def test_waits_for_the_host_are_a_part_of_their_segment() -> None:
    """A device that waits draws its waiting power, which is part of the energy of the segment."""
    trace = draw_trace(20.0, "200", "20", "poisson", seconds=10, seed=3)
    run = serve(trace, make_costs(host=real_host()))
    span_s = run.segments["device_end_s"] - run.segments["device_begin_s"]
    waited_s = run.segments["device_waited_s"]
    assert waited_s.max() > 0.0
    assert (waited_s <= span_s + 1e-12).all()
    assert (run.segments["energy_j"] >= run.waiting_w * waited_s - 1e-9).all()
    assert not waited_s[run.segments["steps"] == 0].any()
