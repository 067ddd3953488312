"""Speculative decoding with a draft model: schedules by hand, closed forms, memory of a public run,
and what must hold of every draft.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_costs import make_costs, real_host

import wattcast
from wattcast.core.errors import BadInput, ExitCode, WattcastError
from wattcast.hardware import load_gpu
from wattcast.serving.arrivals import make_trace
from wattcast.serving.cache_size import measure_cache
from wattcast.serving.draft_models import choose_draft_options
from wattcast.serving.engine_simulator import EngineReplica, ReplicaRun
from wattcast.serving.request_plan import EngineSettings, plan_requests
from wattcast.serving.step_costs import DraftPasses, StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.build_model import compute_footprint
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions

TARGET = "qwen3-8b"
DRAFTS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")  # rising in size
ENGINE = ModelOptions.from_names(stack="engine")
ALONE: dict[str, Any] = {"concurrency": 1, "requests": 20, "prompt": 200, "output": 400}


def simulate(**options: Any) -> dict[str, Any]:
    return wattcast.simulate(TARGET, "h200", **ALONE | options).summarise()


def add_draft(costs: StepCosts, count: int, **draft: Any) -> StepCosts:
    passes = make_costs(max_tokens=8192 + 256, **draft)
    return replace(costs, draft=DraftPasses(passes, count))


def serve(trace, costs: StepCosts, settings: EngineSettings) -> ReplicaRun:
    engine = EngineReplica(costs, settings, plan_requests(trace, settings))
    engine.submit(range(len(trace)))
    return engine.finish()


# Schedules by hand


def test_a_schedule_with_a_draft_model_by_hand() -> None:
    """A step takes 1 ms and 0.1 ms a token, a pass of the draft model 0.2 ms and 0.01 ms a token.

    The prompt of 4 takes 1.4 ms. Two tokens are drafted behind it, by a pass of 5 tokens and one of
    1: 0.25 and 0.21 ms. The step that verifies them has 3 tokens and takes 1.3 ms. All are kept, so
    it yields the last two of the answer; its own drafts, 0.24 and 0.21 ms, are of no use."""
    settings = EngineSettings(speculative_tokens=2, acceptance_rate=1.0)
    costs = add_draft(make_costs(), 2, step_s=2e-4, token_s=1e-5, power_w=200.0)
    run = serve(make_trace([0.0], [4], [3]), costs, settings)
    assert run.first_token_s[0] == pytest.approx(1.86e-3)
    assert run.last_token_s[0] == pytest.approx(3.61e-3)
    energy_j = 400.0 * (1.4e-3 + 1.3e-3) + 200.0 * (0.46e-3 + 0.45e-3)
    assert run.segments["energy_j"].sum() == pytest.approx(energy_j)


def test_the_host_launches_every_pass_layer_by_layer() -> None:
    host = real_host()
    costs = add_draft(make_costs(host=host), 3, host=host)
    launches = replace(costs.draft.costs, layers=28, same_loose_layers=28.0, loose_layers=28.0)
    costs = replace(costs, draft=DraftPasses(launches, 3))
    graph_s = host.launch_graph_s + 8 * host.launch_graph_per_sequence_s
    layers_s = 3 * 28 * host.launch_same_layer_s
    assert costs.launch_s(32, 8) == pytest.approx(graph_s + layers_s)
    assert replace(costs, draft=None).launch_s(32, 8) == pytest.approx(graph_s)
    # the first pass of 128 sequences has more tokens than any graph holds, the later ones do not
    large_s = 28 * (host.launch_same_loose_layer_s + 2 * host.launch_same_layer_s)
    target_s = replace(costs, draft=None).launch_s(512, 128)
    assert costs.launch_s(512, 128) == pytest.approx(target_s + large_s)
    # prompts, which change the size of the first pass, launch it as slowly as their own step
    changing_s = 28 * (host.launch_layer_s + 2 * host.launch_same_layer_s)
    own_s = host.launch_s(costs.launches, 100, 8, host.launch_layer_s)
    assert costs.launch_s(100, 8, host.launch_layer_s) == pytest.approx(own_s + changing_s)


@given(
    st.integers(0, 64),
    st.floats(1.0, 4000.0),
    st.lists(st.tuples(st.integers(1, 512), st.integers(0, 2048)), max_size=4),
    st.integers(1, 8),
)
def test_a_step_costs_what_its_parts_cost(decodes, context, chunks, count) -> None:
    """Time and energy of a step are those of the target and of each pass, at every clock."""
    if not decodes and not chunks:
        return
    plain = make_costs(context_s=1e-8)
    costs = add_draft(plain, count, step_s=2e-4, token_s=1e-5, context_s=1e-9, power_w=150.0)
    draft = costs.draft.costs
    tokens = decodes * (1 + count) + sum(chunk for chunk, _ in chunks)
    shape = (tokens, decodes, context, chunks, decodes * (1 + count) + len(chunks))
    first, later = costs.draft.shape_passes(shape)
    assert first[0] == tokens + decodes + len(chunks)  # and a token that was just drawn of each
    assert later[0] == later[1] == decodes + len(chunks)
    parts = [plain.mixed_cost(*shape), draft.mixed_cost(*first)]
    parts += [draft.mixed_cost(*later)] * (count - 1)
    np.testing.assert_allclose(costs.mixed_cost(*shape), np.sum(parts, axis=0), rtol=1e-12)
    row = costs.mixed_cost(*shape)
    for place in range(costs.clocks):
        cost = costs.cost_at_clock(shape, place)
        assert cost.real == pytest.approx(row[place])
        assert cost.imag == pytest.approx(row[costs.clocks + place])
    if not chunks:
        alone = (decodes * (1 + count), decodes, context)
        assert costs.decode_cost_at_top(*alone) == pytest.approx(
            complex(costs.decode_cost(*alone)[0], costs.decode_cost(*alone)[costs.clocks])
        )


def test_a_draft_keeps_to_the_clock_and_the_limit_of_its_target() -> None:
    gpu = load_gpu("h200")
    passes = make_costs(max_tokens=8448, power_w=900.0)
    costs = replace(make_costs(), gpu="h200", draft=DraftPasses(passes, 2))
    assert costs.part_power_w.max() == pytest.approx(900.0)
    capped = costs.cap_clock(1.5e9, gpu)
    assert capped.clock_hz[0] == capped.draft.costs.clock_hz[0] == 1.5e9


# Laws of real models


@pytest.mark.parametrize("clients", [1, 64])
@pytest.mark.parametrize("drafted", [1, 4])
def test_a_draft_of_which_nothing_is_kept_is_never_faster(clients: int, drafted: int) -> None:
    traffic = {"concurrency": clients, "requests": 4 * clients, "output": 100}
    plain = simulate(**traffic)
    useless = {"speculative_tokens": drafted, "acceptance_rate": 0.0}
    for draft in DRAFTS[:2]:
        found = simulate(**traffic, **useless, draft=draft)
        assert found["output_tokens_per_s"] <= plain["output_tokens_per_s"] * (1.0 + 1e-9)
        assert found["tpot_s"]["mean"] >= plain["tpot_s"]["mean"] * (1.0 - 1e-9)
        assert found["ttft_s"]["mean"] >= plain["ttft_s"]["mean"] * (1.0 - 1e-9)
        assert found["energy_j_per_token"] >= plain["energy_j_per_token"] * (1.0 - 1e-9)


@pytest.mark.parametrize(("drafted", "acceptance"), [(1, 0.9), (3, 0.7), (5, 0.8)])
def test_time_per_token_follows_the_closed_form(drafted: int, acceptance: float) -> None:
    """t = (γ·t_draft + t_verify) / ((1 - α^(γ+1)) / (1 - α)) at a batch of one [Leviathan2023].

    Both times are those of ``predict``, with γ + 1 sequences for the tokens that are verified. The
    context is short, and the host fast enough to count for nothing.
    """
    fast = {"host_factor": 0.01, "power_limit": "700W"}
    found = simulate(
        speculative_tokens=drafted,
        acceptance_rate=acceptance,
        draft="qwen3-1.7b",
        **fast,
    )

    def predict_s(model: str, batch: int) -> float:
        step = {"phase": "decode", "stack": "engine", "seq": 400, "batch": batch}
        return float(wattcast.predict(model, "h200", host_launch=0.0, **step).latency_s)

    tokens = (1.0 - acceptance ** (drafted + 1)) / (1.0 - acceptance)
    step_s = drafted * predict_s("qwen3-1.7b", 1) + predict_s(TARGET, drafted + 1)
    assert found["inter_token_s"]["p50"] == pytest.approx(step_s, rel=0.02)
    # steps a request are drawn: the mean of 20 requests
    assert found["tpot_s"]["mean"] == pytest.approx(step_s / tokens, rel=0.03)


def test_a_larger_draft_model_costs_more_and_leaves_less_cache() -> None:
    drafting = {"speculative_tokens": 3, "acceptance_rate": 0.7}
    costs = [simulate(**drafting, draft=draft, host_factor=0.01) for draft in (None, *DRAFTS)]
    for name in ("energy_j_per_token",):
        values = [cost[name] for cost in costs]
        assert values == sorted(values)
        assert len(set(values)) == len(values)
    times_s = [cost["tpot_s"]["mean"] for cost in costs]
    assert times_s == sorted(times_s)
    gpu = load_gpu("h200")
    drafts = [None, *(load_model(name) for name in DRAFTS)]
    rooms = [measure_cache(load_model(TARGET), gpu, ENGINE, 8192, draft=one) for one in drafts]
    tokens = [room.tokens for room in rooms]
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize("context", [256, 1024])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_predict_and_simulate_agree_on_a_drafted_token(batch: int, context: int) -> None:
    """A pass of the draft model costs what ``predict`` says of its decode step.

    Energies differ by what the card is warmer in a step that is repeated for long.
    """
    steps = StepRange(max_seqs=64, longest_context=2048, tokens_a_step=4)
    steps = replace(steps, draft=load_model("qwen3-1.7b"))
    costs = tabulate_step_costs(load_model(TARGET), load_gpu("h200"), ENGINE, steps)
    shorter = replace(costs, draft=replace(costs.draft, count=2))
    shape = (4 * batch, batch, float(context), (), 4 * batch)
    # a further pass, without what the passes before do to the context
    _, later = shorter.draft.shape_passes(shape)
    assert later[2] == context + 1.0
    one_token = costs.draft.costs.decode_cost(batch, batch, context)
    step = {"phase": "decode", "stack": "engine", "batch": batch, "seq": context}
    alone = wattcast.predict(
        "qwen3-1.7b", "h200", host_launch=0.0, power_limit="5kW", force=True, **step
    )
    assert one_token[0] == pytest.approx(float(alone.latency_s), rel=0.005)
    assert one_token[costs.clocks] == pytest.approx(float(alone.energy_j), rel=0.03)
    more = costs.cost_at_top(*shape) - shorter.cost_at_top(*shape)
    assert more.real == pytest.approx(one_token[0], rel=0.01)


STEPS = Path(__file__).parents[2] / "studies" / "drafted_steps.csv"


def test_steps_of_a_public_run_are_inside_of_the_interval() -> None:
    """Steps of vLLM on an H100 that draft one to eight tokens, which nothing was fitted to.

    Each may be off by as much as the predictor's interval, 6 %; by 3 % on average.
    """
    lines = STEPS.read_text(encoding="utf-8").splitlines()
    errors = []
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        found = wattcast.simulate(
            "qwen3-32b",
            "h100-sxm",
            **ALONE | {"requests": 1, "prompt": 183, "output": 877},
            max_seqs=1,
            max_batched_tokens=5000,
            speculative_tokens=int(row["drafted"]),
            draft="qwen3-1.7b",
        )
        step_s = found.summarise()["inter_token_s"]["p50"]
        errors.append(step_s / (1e-3 * float(row["step_ms"])) - 1.0)
    assert len(errors) == 8
    assert max(map(abs, errors)) < 0.06
    assert np.mean(np.abs(errors)) < 0.03


# Memory


def test_memory_of_a_public_run_of_two_models() -> None:
    """A log of vLLM on an H200, Qwen3 32B with Qwen3 1.7B as its draft, of February 2026
    (github.com/tomasruizt/vllm-scripts, server-qwen3-32b-spec-main-rerun.log): weights of 64.24
    GiB, and a cache of 152,320 tokens in 53.46 GiB.

    The room that is left for the cache is predicted within a seventh: that engine held back more
    for activations and graphs.
    """
    target = load_model("qwen3-32b")
    draft = load_model("qwen3-1.7b")
    room = measure_cache(target, load_gpu("h200"), ENGINE, 8192, draft=draft)
    gib = float(1 << 30)
    tokens = int(53.46 * gib // room.groups.block_byte) * room.groups.block_tokens
    assert tokens == pytest.approx(152_320, abs=16)
    step = replace(ENGINE, phase="prefill", batch=1, seq=8192)
    weights = [compute_footprint(model, step).weight_byte for model in (target, draft)]
    assert sum(weights) / gib == pytest.approx(64.24, rel=2e-3)
    assert room.tokens == pytest.approx(152_320, rel=1 / 7)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_cache_shrinks_by_the_weights_and_the_cache_of_the_draft(draft: str) -> None:
    target = load_model(TARGET)
    gpu = load_gpu("h200")
    alone = measure_cache(target, gpu, ENGINE, 8192)
    both = measure_cache(target, gpu, ENGINE, 8192, draft=load_model(draft))
    step = replace(ENGINE, phase="prefill", batch=1, seq=8192)
    need = compute_footprint(load_model(draft), step)
    token_byte = need.cache_byte / 8192
    assert both.byte_per_token == pytest.approx(alone.byte_per_token + token_byte)
    left_byte = alone.tokens * alone.byte_per_token - both.tokens * both.byte_per_token
    block_byte = both.groups.block_byte
    assert left_byte == pytest.approx(need.weight_byte, abs=block_byte)
    assert "of both models" in both.note
    assert "of both models" not in alone.note


def test_layers_that_are_alike_share_their_blocks_with_those_of_the_draft() -> None:
    """gpt-oss has two groups of layers, with windows and without. So has its draft: a block holds
    tokens of 18 layers of the one and 12 of the other."""
    gpu = load_gpu("h200")
    target = load_model("gpt-oss-120b")
    alone = measure_cache(target, gpu, ENGINE, 8192)
    both = measure_cache(target, gpu, ENGINE, 8192, draft=load_model("gpt-oss-20b"))
    assert both.groups.count == alone.groups.count == 2
    assert both.groups.block_byte == pytest.approx(alone.groups.block_byte * (18 + 12) / 18)
    assert both.tokens * both.groups.block_byte < alone.tokens * alone.groups.block_byte


def test_two_models_that_do_not_fit_are_refused_together() -> None:
    with pytest.raises(WattcastError, match="llama3-70b and its draft llama3-8b: weights of 157"):
        wattcast.simulate("llama3-70b", "h200", rate=1.0, speculative_tokens=2, draft="llama3-8b")


def test_a_draft_model_has_the_formats_of_its_own_weights() -> None:
    served = ModelOptions.from_names(
        stack="engine", dtype="fp8", kv_dtype="fp8", tp=4, lora=16, sampling="top-p"
    )
    drafting = choose_draft_options(served)
    assert (drafting.dtype, drafting.kv_dtype, drafting.tp) == ("bf16", "fp8", 4)
    assert drafting.lora is None
    assert drafting.sampling is None  # it takes the likeliest word
    assert choose_draft_options(replace(ENGINE, dtype="fp16")).dtype == "fp16"


# What people ask, and what they are told

REFUSED = {
    "without tokens": ({"draft": "qwen3-0.6b"}, "draft: expected tokens to draft beside it"),
    "unknown": ({"draft": "qwen3-0.7b", "speculative_tokens": 2}, "unknown model 'qwen3-0.7b'"),
    "no language": ({"draft": "resnet50", "speculative_tokens": 2}, "draft: expected a language"),
    "another vocabulary": (
        {"draft": "llama3-8b", "speculative_tokens": 2},
        "draft: expected a model with the 151,936 words of qwen3-8b, got 'llama3-8b with 128,256'",
    ),
    "a pipeline": (
        {"draft": "qwen3-0.6b", "speculative_tokens": 2, "pp": 2},
        "pp: expected one stage beside a draft model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_draft_is_refused_in_one_sentence(case: str, call) -> None:
    options, sentence = REFUSED[case]
    with pytest.raises(BadInput, match=sentence.replace("(", r"\(")):
        wattcast.simulate(TARGET, "h200", rate="1/s", seconds=5, **options)
    words = [word for name, value in options.items() for word in (name, value)]
    argv = [
        f"--{word.replace('_', '-')}" if place % 2 == 0 else str(word)
        for place, word in enumerate(words)
    ]
    refused = call("simulate", TARGET, "--gpu", "h200", "--rate", "1/s", *argv)
    assert refused.code == ExitCode.BAD_INPUT
    assert sentence in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.parametrize("traffic", [("--rate", "2/s"), ("--concurrency", "2")])
def test_nobody_takes_a_free_draft_for_granted(traffic: tuple[str, str], call) -> None:
    """Clients that wait were served with drafts for nothing, and no line said so."""
    argv = ("simulate", TARGET, "--gpu", "h200", *traffic, "--requests", "5", "--json")
    drafting = ("--speculative-tokens", "3")
    plain = json.loads(call(*argv).out)["assumptions"]
    assert not any("draft" in note for note in plain)
    free = json.loads(call(*argv, *drafting).out)["assumptions"]
    (note,) = (note for note in free if "draft" in note)
    assert "the cost of drafting is not included" in note
    assert "n-grams" in note
    counted = json.loads(call(*argv, *drafting, "--draft", "qwen3-0.6b").out)["assumptions"]
    notes = [note for note in counted if note.startswith("speculative decoding")]
    assert "qwen3-0.6b drafts 3 tokens" in notes[0]
    assert "no engine was measured with a draft model" in notes[1]


def test_a_draft_model_is_read_from_a_configuration(tmp_path) -> None:
    path = tmp_path / "config.json"
    config = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }
    path.write_text(json.dumps(config))
    drafting = {"speculative_tokens": 2, "requests": 3}
    read = simulate(**drafting, draft=path)
    named = simulate(**drafting, draft="Qwen/Qwen3-0.6B")
    assert read["tpot_s"] == pytest.approx(named["tpot_s"])
