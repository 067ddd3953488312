"""The schedulers of engines on traces worked out by hand, what holds for each, and vLLM's as it was.

Steps take 1 ms and 0.1 ms a token where nothing else is said.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import vllm_runs
from hypothesis import given
from hypothesis import strategies as st
from made_up_costs import make_costs

import wattcast
from wattcast.core.errors import BadInput, UnknownName
from wattcast.hardware import load_gpu
from wattcast.options.serving_options import EngineOptions
from wattcast.serving.arrivals import make_trace
from wattcast.serving.engine_simulator import EngineReplica, ReplicaRun
from wattcast.serving.engines.engine_defaults import (
    MemoryShare,
    describe_scheduler,
    fill_limits,
    start_scheduler,
)
from wattcast.serving.request_plan import EngineSettings, plan_requests

ENGINES = ("vllm", "sglang", "trtllm")
GIB = float(1 << 30)


def serve(engine: str, trace, costs=None, arguments=None, **settings) -> ReplicaRun:
    start = start_scheduler(engine, arguments)
    chosen = EngineSettings(scheduler=start, **settings)
    replica = EngineReplica(costs or make_costs(), chosen, plan_requests(trace, chosen))
    replica.submit(range(len(trace)))
    return replica.finish()


def list_steps(run: ReplicaRun) -> list[tuple[int, int, int, int]]:
    """Steps, decodes in each, prompts, their tokens of every segment that computed something."""
    columns = ("steps", "decodes", "prompts", "prompt_tokens")
    rows = zip(*(run.segments[name].astype(int).tolist() for name in columns), strict=True)
    return [row for row in rows if row[0]]


def test_vllm_serves_as_it_did_before_other_engines_came() -> None:
    """Seven open loops and conversations, written down from the code that knew vLLM alone."""
    before = json.loads(vllm_runs.FILE.read_text(encoding="utf-8"))
    now = vllm_runs.run_all()
    assert now.keys() == before.keys()
    for name, run in now.items():
        assert run["preemptions"] == before[name]["preemptions"], name
        for part in ("first", "last", "sums"):
            numbers = [float.fromhex(text) for text in run[part]]
            expected = [float.fromhex(text) for text in before[name][part]]
            # the same to the last digit but for another library of logarithms
            np.testing.assert_allclose(numbers, expected, rtol=1e-12, err_msg=f"{name}, {part}")


def test_a_prompt_meets_a_request_that_decodes_in_one_step_but_in_sglang() -> None:
    """The second prompt arrives while the first request decodes.

    vLLM and TensorRT-LLM compute it in a step that decodes too. SGLang computes it alone, then both
    requests decode; the first has waited.
    """
    trace = make_trace([0.0, 0.0025], [10, 20], [6, 2])
    mixed = (1, 1, 1, 20)
    alone = (1, 0, 1, 20)
    assert mixed in list_steps(serve("vllm", trace))
    assert mixed in list_steps(serve("trtllm", trace))
    steps = list_steps(serve("sglang", trace))
    assert alone in steps
    assert mixed not in steps
    assert steps[-1][1] == 1
    assert sum(count * decodes for count, decodes, _, _ in steps) == 5 + 1


def test_sglang_mixes_where_it_is_told_to() -> None:
    trace = make_trace([0.0, 0.0025], [10, 20], [6, 2])
    steps = list_steps(serve("sglang", trace, arguments="enable_mixed_chunk=true"))
    assert (1, 1, 1, 20) in steps


def test_sglang_computes_all_prompts_that_wait_before_it_decodes() -> None:
    """Four prompts of 100 at once in steps of 250: the third is cut, the fourth waits.

    vLLM decodes the first two in the second step; SGLang none before all prompts are computed.
    """
    trace = make_trace(np.zeros(4), np.full(4, 100), np.full(4, 3))
    settings = {"max_batched_tokens": 250, "max_seqs": 8}
    steps = list_steps(serve("sglang", trace, **settings))
    assert steps[:2] == [(1, 0, 3, 250), (1, 0, 2, 150)]
    assert steps[2:] == [(2, 4, 0, 0)]
    assert list_steps(serve("vllm", trace, **settings))[1] == (1, 2, 2, 150)


def test_tensorrt_llm_computes_prompts_whole() -> None:
    """Three prompts of 100 in steps of 250: two, then the third beside the two that decode."""
    trace = make_trace(np.zeros(3), np.full(3, 100), np.full(3, 3))
    settings = {"max_batched_tokens": 250, "max_seqs": 8}
    steps = list_steps(serve("trtllm", trace, **settings))
    assert steps[:2] == [(1, 0, 2, 200), (1, 2, 1, 100)]
    cut = list_steps(serve("trtllm", trace, arguments="enable_chunked_prefill=true", **settings))
    assert cut[:2] == [(1, 0, 3, 250), (1, 2, 1, 50)]


def test_tensorrt_llm_refuses_a_prompt_longer_than_a_step() -> None:
    trace = make_trace([0.0], [300], [3])
    with pytest.raises(BadInput, match="enable_chunked_prefill=true"):
        serve("trtllm", trace, max_batched_tokens=250, max_seqs=8)
    run = serve(
        "trtllm", trace, None, "enable_chunked_prefill=true", max_batched_tokens=250, max_seqs=8
    )
    assert np.isfinite(run.last_token_s).all()


def test_tensorrt_llm_evicts_nobody_and_vllm_does() -> None:
    """Prompts of 16 and outputs of 60 in a cache of 176 tokens, in blocks of 16.

    Three prompts fit, but only two requests with all their output (five blocks each). vLLM takes
    three and preempts; TensorRT-LLM lets the third wait, unless it may use all of the cache.
    """
    trace = make_trace(np.zeros(3), np.full(3, 16), np.full(3, 60))
    costs = make_costs(cache_tokens=176)
    assert serve("vllm", trace, costs).preemptions > 0
    run = serve("trtllm", trace, costs)
    assert run.preemptions == 0
    assert run.most_running == 2
    greedy = serve("trtllm", trace, costs, "capacity_scheduler_policy=MAX_UTILIZATION")
    assert greedy.preemptions > 0
    assert greedy.most_running == 3


def test_tensorrt_llm_lets_prompts_wait_for_others() -> None:
    """The second prompt arrives while the first request decodes, and waits for ten steps.

    It would not wait if the step were full enough, or nobody decoded.
    """
    trace = make_trace([0.0, 0.0025], [10, 20], [40, 2])
    waiting = "batch_wait_timeout_iters=10,batch_wait_max_tokens_ratio=0.9"
    usual = serve("trtllm", trace)
    run = serve("trtllm", trace, None, waiting)
    later_s = run.first_token_s[1] - usual.first_token_s[1]
    assert later_s == pytest.approx(10 * 1.1e-3, rel=0.01)
    assert run.first_token_s[0] == usual.first_token_s[0]
    full = "batch_wait_timeout_iters=10,batch_wait_max_tokens_ratio=0.002"  # 17 of 8192 tokens
    assert serve("trtllm", trace, None, full).first_token_s[1] == usual.first_token_s[1]


def test_sglang_takes_requests_in_every_so_many_steps() -> None:
    """The first prompt ends at 2 ms; decode steps take 1.1 ms. With an interval of ten, the second
    request, there at 2.5 ms, comes in after ten of them.
    """
    trace = make_trace([0.0, 0.0025], [10, 20], [40, 2])
    steps = list_steps(serve("sglang", trace, None, "scheduler_recv_interval=10"))
    place = steps.index((1, 0, 1, 20))
    assert sum(row[0] for row in steps[1:place]) == 10
    at_once = list_steps(serve("sglang", trace))
    assert sum(row[0] for row in at_once[1 : at_once.index((1, 0, 1, 20))]) < 3


def test_sglang_keeps_cache_for_a_share_of_what_others_will_get() -> None:
    """Requests of 10 + 90 tokens in a cache of 1,010.

    Within one step every request takes its whole 100 tokens, so that ten come in. With a step for
    two prompts, each of n before takes 12 + 0.7 * 90 = 75 (its first token and the next are there):
    another comes in while 75 n + 100 <= 1010, so that there are 13.
    """
    trace = make_trace(np.zeros(40), np.full(40, 10), np.full(40, 91))
    costs = replace(make_costs(cache_tokens=1010), block_tokens=1)
    run = serve("sglang", trace, costs, max_batched_tokens=512, block_tokens=1)
    assert run.segments["prompts"][0] == 10
    settings = {"max_batched_tokens": 20, "max_seqs": 20, "block_tokens": 1}
    run = serve("sglang", trace, costs, **settings)
    prompts = run.segments["prompts"]
    assert prompts[: int(np.argmax(prompts == 0))].sum() == 13


def test_the_share_falls_with_every_decode_step_to_its_least() -> None:
    """One request decodes 2,000 tokens in a cache of 2,310; another of 10 + 1,000 waits for it.

    It comes in when 10 + n + r (2000 - n) + 1010 <= 2310 with r = 0.7 - 0.602 n / 600 until it is
    0.098 after 600 steps: after 203 steps, long before the 1,111 that r = 0.7 would need.
    """
    trace = make_trace([0.0, 0.001], [10, 10], [2001, 1001])
    costs = replace(make_costs(cache_tokens=2310), block_tokens=1)
    run = serve("sglang", trace, costs, block_tokens=1)
    steps = list_steps(run)
    place = steps.index((1, 0, 1, 10), 1)
    waited = sum(row[0] for row in steps[1:place])
    lacking = [10 + n + max(0.7 - 0.602 * n / 600, 0.098) * (2000 - n) > 1300 for n in range(999)]
    assert waited == pytest.approx(lacking.index(False), abs=3)


def test_no_more_output_is_expected_of_a_request_than_is_clipped() -> None:
    """A request of 10 + 8,000 tokens comes into a cache of 4,200, and into none of 4,100."""
    trace = make_trace([0.0], [10], [8001])
    for cache_tokens, fits in ((8300, True), (4200, True), (4100, False)):
        costs = replace(make_costs(cache_tokens=cache_tokens), block_tokens=1)
        start = start_scheduler("sglang", None)
        settings = EngineSettings(scheduler=start, block_tokens=1)
        engine = EngineReplica(costs, settings, plan_requests(trace, settings))
        engine.submit([0])
        if not fits:
            with pytest.raises(BadInput, match="no request can be admitted"):
                engine.run_until(0.01)
        else:
            engine.run_until(0.01)
            assert engine.running == 1


def test_a_retraction_estimates_the_share_anew() -> None:
    """Of two equal requests that outgrow the cache, the one with the longer prompt is retracted.

    Then the share is (decoded + 20 a request) / wanted, which is more than it had fallen to.
    """
    trace = make_trace([0.0, 0.0], [20, 30], [3001, 3001])
    costs = replace(make_costs(cache_tokens=4500), block_tokens=1)
    settings = EngineSettings(
        scheduler=start_scheduler("sglang", "schedule_conservativeness=0.3"), block_tokens=1
    )
    engine = EngineReplica(costs, settings, plan_requests(trace, settings))
    engine.submit([0, 1])
    while not engine.preemptions:
        engine.run_until(engine.now_s + 0.01)
    assert list(engine.queue) == [1]
    decoded = engine.decode_step + 1
    assert engine.scheduler.new_token_ratio == pytest.approx(
        (2 * decoded + 2 * 20) / 6001, rel=0.002
    )


@given(
    st.lists(
        st.tuples(st.floats(0, 0.2), st.integers(1, 200), st.integers(1, 40)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(["vllm", "sglang", "trtllm"]),
    st.sampled_from([1024, 100_000]),
    st.sampled_from([2, 64]),
)
def test_every_request_ends_once_and_every_token_is_served_once(
    rows, engine, cache_tokens, max_seqs
) -> None:
    rows = sorted(rows)
    trace = make_trace([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    costs = make_costs(cache_tokens=cache_tokens)
    run = serve(engine, trace, costs, max_seqs=max_seqs)
    assert np.isfinite(run.last_token_s).all()
    assert (run.last_token_s >= run.first_token_s).all()
    assert (run.first_token_s > trace.arrival_s).all()
    assert run.segments["decodes"].max() <= max_seqs
    if not run.preemptions:
        decoded = (run.segments["steps"] * run.segments["decodes"]).sum()
        assert decoded == (trace.output_tokens - 1).sum()
        assert run.segments["prompt_tokens"].sum() == trace.prompt_tokens.sum()
    else:
        assert engine != "trtllm"
        assert run.segments["prompt_tokens"].sum() > trace.prompt_tokens.sum()


def test_engines_have_their_own_defaults() -> None:
    """What each takes by its documentation on an H200, and SGLang's chunks on other cards."""
    options = EngineOptions()
    h200 = load_gpu("h200")
    vllm = fill_limits(options, h200, 1)
    assert (vllm.max_batched_tokens, vllm.max_seqs, vllm.block_tokens) == (8192, 256, 16)
    assert (vllm.memory_utilisation, vllm.memory_share) == (0.9, MemoryShare.ALL)
    trtllm = fill_limits(options, replace(h200, engine="trtllm"), 1)
    assert (trtllm.max_batched_tokens, trtllm.max_seqs) == (8192, 2048)
    assert (trtllm.block_tokens, trtllm.memory_utilisation) == (32, 0.9)
    assert trtllm.memory_share is MemoryShare.FREE
    sglang = fill_limits(options, replace(h200, engine="sglang"), 1)
    assert (sglang.max_batched_tokens, sglang.max_seqs, sglang.block_tokens) == (8192, 2048, 1)
    chunks = {"rtx-4090": 2048, "l40s": 4096, "h100-sxm": 8192, "b200": 16384}
    for name, chunk in chunks.items():
        gpu = replace(load_gpu(name), engine="sglang")
        assert fill_limits(options, gpu, 1).max_batched_tokens == chunk, name


def test_sglang_takes_the_share_of_an_h200_that_its_formula_gives() -> None:
    """512 MiB, 1.5 MiB for each of 8,192 tokens, 2 MiB for each of 512 sequences, eight GPUs."""
    h200 = replace(load_gpu("h200"), engine="sglang")
    limits = fill_limits(EngineOptions(), h200, 8)
    reserved_byte = (512 + 1.5 * 8192 + 2 * 512 + 8 * 128) * (1 << 20)
    share = 1.0 - reserved_byte / float(np.min(h200.memory.capacity_byte))
    assert limits.memory_utilisation == pytest.approx(share, abs=0.0006)
    assert limits.memory_share is MemoryShare.STATIC
    assert fill_limits(EngineOptions(), h200, 1).memory_utilisation > limits.memory_utilisation


def test_limits_that_are_set_are_taken() -> None:
    options = EngineOptions(max_batched_tokens=1024, memory_utilisation=0.8)
    limits = fill_limits(options, replace(load_gpu("h200"), engine="trtllm"), 1)
    assert (limits.max_batched_tokens, limits.max_seqs) == (1024, 1024)
    assert limits.memory_utilisation == 0.8


def test_arguments_of_engines_are_read_by_their_own_names() -> None:
    spelled = start_scheduler("sglang", "--scheduler-recv-interval=30 enable_mixed_chunk=true")()
    assert spelled.mixes
    assert not spelled.receives_always


@pytest.mark.parametrize(
    ("engine", "arguments", "error"),
    [
        ("sglang", "scheduler_recv_intervall=3", UnknownName),
        ("sglang", "scheduler_recv_interval", BadInput),
        ("sglang", "scheduler_recv_interval=often", BadInput),
        ("sglang", "scheduler_recv_interval=-1", BadInput),
        ("sglang", "enable_mixed_chunk=1", BadInput),
        ("trtllm", "capacity_scheduler_policy=STATIC", UnknownName),
        ("", "enable_mixed_chunk=true", BadInput),
    ],
)
def test_wrong_arguments_of_an_engine_are_refused(engine, arguments, error) -> None:
    with pytest.raises(error):
        start_scheduler(engine, arguments)


def test_simulate_chooses_the_scheduler_of_the_engine() -> None:
    """SGLang's steps of prompts decode nothing; the others' do. Notes say whose scheduler it is."""
    requests = {"rate": "20/s", "requests": 60, "prompt": 1024, "output": 64}
    for engine in ENGINES:
        result = wattcast.simulate("llama3-8b", "h200", engine=engine, **requests)
        segments = result.runs[0].segments
        mixed = (segments["prompts"] > 0) & (segments["decodes"] > 0)
        assert mixed.any() == (engine != "sglang"), engine
        for note in describe_scheduler(engine):
            assert note in result.assumptions
        assert bool(describe_scheduler(engine)) == (engine != "vllm")


def test_simulate_passes_an_engine_its_arguments() -> None:
    requests = {"rate": "20/s", "requests": 60, "prompt": 1024, "output": 64}
    usual = wattcast.simulate("llama3-8b", "h200", engine="sglang", **requests)
    rare = wattcast.simulate(
        "llama3-8b", "h200", engine="sglang", engine_args="scheduler_recv_interval=30", **requests
    )
    assert rare.ttft_s.mean() > 1.5 * usual.ttft_s.mean()
