"""What a plan says of speculative decoding: the same as ``simulate``, and nothing that it cannot
know.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from made_up_costs import make_costs

import wattcast
from wattcast.core.errors import BadInput, ExitCode
from wattcast.serving.arrivals import make_trace
from wattcast.serving.capacity_plan import PlanResult
from wattcast.serving.engine_simulator import EngineReplica, Patience
from wattcast.serving.request_plan import EngineSettings, plan_requests

SERVED: dict[str, Any] = {"rate": "2/s", "prompt": 300, "output": 100, "requests": 100, "tp": "1"}
DRAFTS: dict[str, Any] = {"speculative_tokens": 3, "acceptance_rate": 0.7, "draft": "qwen3-0.6b"}


def plan(**options: Any) -> PlanResult:
    return wattcast.plan("qwen3-14b", "h200", **SERVED | options)


@pytest.fixture(scope="module")
def drafting() -> PlanResult:
    return plan(**DRAFTS)


def test_the_search_itself_knows_no_drafts(drafting: PlanResult) -> None:
    usual = plan()
    assert usual.speculation is None
    assert usual.to_dict()["speculation"] is None
    assert drafting.best.make_row() == usual.best.make_row()


def test_plan_and_simulate_say_the_same_of_drafts(drafting: PlanResult) -> None:
    assert drafting.speculation is not None
    tried = drafting.speculation.plan
    assert tried is not None
    simulated = wattcast.simulate(
        "qwen3-14b",
        "h200",
        trace=tried.result.trace,
        max_seqs=tried.option.max_seqs,
        seed=1,
        **DRAFTS,
    )
    assert simulated.tpot_s == pytest.approx(tried.result.tpot_s)
    assert simulated.energy_j == pytest.approx(tried.result.energy_j)


def test_drafts_that_cost_nothing_save_time_and_useless_ones_do_not() -> None:
    useful = plan(speculative_tokens=3, acceptance_rate=0.9).speculation
    assert useful is not None
    assert useful.plan is not None
    assert useful.plan.gpus <= useful.without.gpus
    tpots_s = [one.result.headline["tpot_s.p50"] for one in (useful.plan, useful.without)]
    assert tpots_s[0] < 0.6 * tpots_s[1]
    assert "the cost of drafting is not included" in useful.notes[0]
    useless = plan(**DRAFTS | {"acceptance_rate": 0.0}).speculation
    assert useless is not None
    assert useless.plan is not None
    assert useless.plan.gpus >= useless.without.gpus
    tpots_s = [one.result.headline["tpot_s.p50"] for one in (useless.plan, useless.without)]
    assert tpots_s[0] > tpots_s[1]


def test_drafts_that_break_a_bound_say_why() -> None:
    asked = {"tpot": "15ms", "rate": "0.5/s"}
    found = plan(**asked, **DRAFTS | {"acceptance_rate": 0.0}).speculation
    assert found is not None
    assert found.plan is None
    assert "TPOT" in found.reason
    assert "none serves" in found.summary_line
    assert found.notes == ()


def test_a_token_is_late_by_what_was_yielded_not_by_steps() -> None:
    """A step that yields four tokens counted as one: drafts that met a bound were said to break it.

    A step of 1.5 ms that yields three tokens takes 0.5 ms each, within a bound of 0.8 ms.
    """
    settings = EngineSettings(speculative_tokens=2, acceptance_rate=1.0)
    trace = make_trace(np.zeros(1), [4], [31])
    patience = Patience(token_s=8e-4, late_tokens=1)
    requests = plan_requests(trace, settings)
    engine = EngineReplica(make_costs(step_s=1.2e-3), settings, requests, patience)
    engine.submit([0])
    run = engine.finish()
    assert (run.last_token_s - run.first_token_s)[0] / 30 == pytest.approx(5e-4)


def test_the_command_prints_and_writes_what_drafts_change(call) -> None:
    argv = ["plan", "qwen3-14b", "--gpu", "h200", "--speculative-tokens", "3"]
    for name, value in SERVED.items():
        argv += [f"--{name}", str(value)]
    told = call(*argv, "--draft", "qwen3-0.6b")
    assert told.code == 0, told.err
    text = " ".join(told.out.split())
    assert "If qwen3-0.6b drafts 3 tokens a step, each kept in 70% of all cases" in text
    assert "no engine was measured with a draft model" in text
    row = json.loads(call(*argv, "--json").out)["speculation"]
    assert (row["speculative_tokens"], row["acceptance_rate"], row["draft"]) == (3, 0.7, None)
    assert row["plan"]["gpu"] == "h200"
    assert row["reason"] is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"draft": "qwen3-0.6b"}, "draft: expected tokens to draft beside it"),
        ({"draft": "llama3-8b", "speculative_tokens": 2}, "draft: expected a model with the"),
    ],
)
def test_what_cannot_draft_is_refused_before_the_search(
    wrong: dict[str, Any], sentence: str, call
) -> None:
    with pytest.raises(BadInput, match=sentence):
        plan(**wrong)
    argv = ["plan", "qwen3-14b", "--gpu", "h200", "--rate", "1/s", "--draft", wrong["draft"]]
    if "speculative_tokens" in wrong:
        argv += ["--speculative-tokens", "2"]
    refused = call(*argv)
    assert refused.code == ExitCode.BAD_INPUT
    assert sentence in refused.err


def test_a_pipeline_takes_no_draft_model() -> None:
    found = plan(**SERVED | DRAFTS | {"pp": "2"}).speculation
    assert found is not None
    assert found.plan is None
    assert "pipeline" in found.reason
