"""Clients in a closed loop and conversations: what waits for what, worked out by hand and by laws
that hold for every run.
"""

from __future__ import annotations

import numpy as np
import pytest
from made_up_costs import make_costs, real_host

import wattcast
from wattcast.core.errors import BadInput, WattcastError
from wattcast.options.serving_options import Conversations, RequestShape, Traffic
from wattcast.serving.arrivals import draw_times, draw_trace, make_trace
from wattcast.serving.closed_loop import ServedSessions, list_route_keys, serve_sessions
from wattcast.serving.prefix_cache import SharedPath
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.request_sessions import draw_sessions, make_closed_loop, replay_users
from wattcast.serving.trace_files import parse_trace


def serve(traffic, shape=None, talk=None, costs=None, settings=None, **more) -> ServedSessions:
    sessions = draw_sessions(shape or RequestShape(), traffic, talk or Conversations(), None)
    costs = costs or make_costs(host=real_host())
    return serve_sessions(sessions, costs, settings or EngineSettings(), **more)


def count_in_engine(served: ServedSessions, moments_s: np.ndarray) -> np.ndarray:
    begun = np.searchsorted(np.sort(served.trace.arrival_s), moments_s, side="right")
    ended = np.searchsorted(np.sort(served.last_token_s), moments_s, side="right")
    return begun - ended


def test_two_clients_by_hand() -> None:
    """Steps of 1 ms and 0.1 ms a token. Both prompts of 4: 0 to 1.8 ms; a decode step to 3 ms.

    Both clients send their next request at once, and its prompt is in the next step, to 4.8 ms."""
    shape = RequestShape(prompt=4, output=2)
    served = serve(Traffic(concurrency=2, requests=4), shape, costs=make_costs())
    np.testing.assert_allclose(served.trace.arrival_s, [0, 0, 0.003, 0.003], atol=1e-12)
    np.testing.assert_allclose(served.first_token_s, [0.0018, 0.0018, 0.0048, 0.0048])
    np.testing.assert_allclose(served.last_token_s, [0.003, 0.003, 0.006, 0.006])


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "sticky"])
def test_so_many_clients_are_served_at_any_time(replicas: int, router: str) -> None:
    shape = RequestShape(prompt="lognormal:median=300,sigma=0.8", output="lognormal:median=60")
    traffic = Traffic(concurrency=24, requests=400)
    served = serve(traffic, shape, replicas=replicas, router=router)
    assert len(served.trace) == 400
    assert np.isfinite(served.last_token_s).all()
    moments_s = np.linspace(0.01, served.trace.arrival_s[-24], 500)
    assert count_in_engine(served, moments_s).max() <= 24
    assert count_in_engine(served, moments_s).min() >= 23
    assert len(served.runs) == replicas


def test_littles_law_holds_with_thinking_clients() -> None:
    """N = X (R + Z): clients, throughput, response and thinking time."""
    traffic = Traffic(concurrency=16, requests=1500, think_time="exponential:mean=0.5s")
    served = serve(traffic, RequestShape(prompt=200, output=40))
    response_s = (served.last_token_s - served.trace.arrival_s).mean()
    per_s = len(served.trace) / served.last_token_s.max()
    assert per_s * (response_s + 0.5) == pytest.approx(16, rel=0.05)


def test_a_turn_is_sent_a_pause_after_the_answer_with_all_that_was_said() -> None:
    talk = Conversations(turns=4, turn_prompt=30, turn_pause="0.25s", shared_prefix=64)
    served = serve(Traffic(rate_per_s=5.0, requests=40), RequestShape(100, 20), talk)
    trace = served.trace
    for session in range(40):
        rows = np.flatnonzero(trace.session == session)
        assert trace.turn[rows].tolist() == [0, 1, 2, 3]
        assert trace.prompt_tokens[rows].tolist() == [164, 214, 264, 314]
        gaps_s = trace.arrival_s[rows[1:]] - served.last_token_s[rows[:-1]]
        np.testing.assert_allclose(gaps_s, 0.25)


def test_later_turns_find_what_was_said_and_eviction_takes_it() -> None:
    talk = Conversations(turns=5, turn_prompt=32, turn_pause="exponential:mean=8s")
    traffic = Traffic(rate_per_s=20.0, requests=60)
    shape = RequestShape(1600, 32)
    roomy = serve(traffic, shape, talk)
    # of a prompt of n tokens, the blocks of the turn before are found: 1600 + 31 of 1664, ...
    said = roomy.trace.turn > 0
    expected = ((roomy.trace.prompt_tokens[said] - 33) // 16 * 16).sum()
    assert roomy.runs[0].found_tokens == expected
    tight = serve(traffic, shape, talk, costs=make_costs(cache_tokens=70_000, host=real_host()))
    assert 0 < tight.runs[0].found_tokens < 0.8 * expected
    cold = serve(traffic, shape, talk, settings=EngineSettings(prefix_caching=False))
    assert cold.runs[0].found_tokens == 0
    first_s = [(run.first_token_s - run.trace.arrival_s)[said].mean() for run in (roomy, cold)]
    assert first_s[0] < 0.5 * first_s[1]


def test_a_sticky_router_finds_more_than_turns_about() -> None:
    talk = Conversations(turns=6, turn_prompt=64, turn_pause="0.1s")
    hits = {}
    for router in ("sticky", "round-robin"):
        served = serve(
            Traffic(rate_per_s=20.0, requests=50),
            RequestShape(800, 16),
            talk,
            replicas=4,
            router=router,
        )
        hits[router] = sum(run.found_tokens for run in served.runs)
    assert hits["sticky"] > 2 * hits["round-robin"]


def test_a_ramp_starts_clients_and_rates_slowly() -> None:
    clients = serve(Traffic(concurrency=10, requests=50, ramp_s=10.0), RequestShape(50, 5))
    assert clients.trace.arrival_s.max() == pytest.approx(9.0, abs=0.1)
    rising = serve(Traffic(rate_per_s=50.0, seconds=40.0, ramp_s=20.0), RequestShape(20, 2))
    counts = np.histogram(rising.trace.arrival_s, bins=[0, 10, 20, 30, 40])[0]
    np.testing.assert_allclose(counts, [125, 375, 500, 500], rtol=0.2)


def test_clients_stop_when_the_time_is_up_however_many_sessions_it_takes() -> None:
    asked = {"concurrency": 4, "prompt": 20, "output": 2, "seconds": 12}
    found = wattcast.simulate("gpt2", "h200", **asked)
    assert found.trace.arrival_s[-1] < 12.0
    assert found.trace.arrival_s[-1] == pytest.approx(12.0, abs=0.2)
    assert found.requests > 1000  # more than are drawn at first
    assert found.summarise()["prefix_hit_share"] == 0.0


def test_a_conversation_ends_before_the_turn_that_is_too_long() -> None:
    asked = {"rate": 5, "requests": 20, "prompt": 100, "output": 50, "turns": 10}
    found = wattcast.simulate("llama3-8b", "h200", **asked, max_model_len=1000)
    total = found.trace.prompt_tokens + found.trace.output_tokens
    assert total.max() == 900
    assert found.requests == 20 * 6


def test_clients_take_the_requests_of_a_trace() -> None:
    trace = draw_trace(1.0, prompt="lognormal:median=80", output=10, requests=60)
    sessions = make_closed_loop(trace, Traffic(concurrency=5), None)
    served = serve_sessions(sessions, make_costs(), EngineSettings())
    assert sorted(served.trace.prompt_tokens) == sorted(trace.prompt_tokens)
    assert served.last_token_s.max() < trace.arrival_s[-1]


USERS = b"""arrival_s,prompt_tokens,output_tokens,user,turn,pause_s
0.0,4,2,ann,0,0
0.0,4,2,bob,0,0
9.0,8,1,ann,1,0.001
9.5,6,1,bob,0,0.5
"""


def test_users_of_a_trace_ask_what_they_asked_by_hand() -> None:
    """Steps as in ``test_two_clients_by_hand``: both have their answers after 3 ms.

    Ann's second turn is sent a millisecond later and runs alone: 1.8 ms for 8 tokens. Bob's next one
    is sent half a second after his answer. Neither comes when it once did, after 9 s.
    """
    sessions = replay_users(parse_trace(USERS, "log.csv"), None)
    served = serve_sessions(sessions, make_costs(), EngineSettings())
    np.testing.assert_allclose(served.trace.arrival_s, [0, 0, 0.004, 0.503])
    np.testing.assert_allclose(served.last_token_s, [0.003, 0.003, 0.0058, 0.5046])
    assert served.trace.session is not None
    assert served.trace.session.tolist() == [0, 1, 0, 2]


def test_a_faster_engine_is_asked_the_same_in_the_same_order() -> None:
    rows = b"arrival_s,prompt_tokens,output_tokens,user,pause_s\n"
    random = np.random.default_rng(3)
    for number in range(60):
        prompt, output = random.integers(8, 200, 2)
        rows += f"{number},{prompt},{output},{number % 5},{random.random():.3f}\n".encode()
    trace = parse_trace(rows, "log.csv")
    runs = [
        serve_sessions(replay_users(trace, None), costs, EngineSettings())
        for costs in (make_costs(), make_costs(host=real_host()))
    ]
    asked = []
    for served in runs:
        assert len(served.trace) == 60
        assert served.trace.user is not None
        own = served.trace.user == 2
        asked.append(served.trace.prompt_tokens[own].tolist())
        pauses_s = served.trace.arrival_s[own][1:] - served.last_token_s[own][:-1]
        assert served.trace.pause_s is not None
        np.testing.assert_allclose(pauses_s, served.trace.pause_s[own][1:], atol=1e-9)
    assert asked[0] == asked[1]
    assert not np.allclose(runs[0].last_token_s, runs[1].last_token_s)


def test_lines_of_json_name_users_as_tables_do() -> None:
    lines = (
        b'{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2, "user": "ann", "pause_s": 0}\n'
        b'{"arrival_s": 9, "prompt_tokens": 8, "output_tokens": 1, "user": "ann", "pause_s": 0.5}\n'
    )
    sessions = replay_users(parse_trace(lines, "log.jsonl"), None)
    served = serve_sessions(sessions, make_costs(), EngineSettings())
    assert served.trace.arrival_s[1] == pytest.approx(served.last_token_s[0] + 0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"concurrency": 2}, "nothing else about users"),
        ({"rate": 2.0}, "either a rate or a trace"),
        ({"turns": 3}, "nothing else about users"),
        ({"prefill_replicas": 1}, "compute prompts themselves"),
    ],
)
def test_a_trace_with_users_answers_all_about_them(tmp_path, options, says) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(USERS)
    with pytest.raises(BadInput, match=says):
        wattcast.simulate("llama3-8b", "h200", trace=path, **options)


def test_pauses_are_seconds_of_at_least_zero() -> None:
    with pytest.raises(BadInput, match="pause_s"):
        parse_trace(USERS.replace(b"0.5", b"-0.5"), "log.csv")
    with pytest.raises(BadInput, match="pause_s"):
        parse_trace(USERS.replace(b",0.5", b",soon"), "log.csv")


def test_seeds_draw_other_requests_and_one_seed_the_same() -> None:
    asked = {"concurrency": 3, "requests": 30, "prompt": "lognormal:median=90", "output": 8}
    one, same = (wattcast.simulate("gpt2", "h200", **asked) for _ in range(2))
    np.testing.assert_array_equal(one.last_token_s, same.last_token_s)
    other = wattcast.simulate("gpt2", "h200", **asked, seed=2)
    assert sorted(one.trace.prompt_tokens) != sorted(other.trace.prompt_tokens)


def test_a_preempted_request_finds_what_is_left_of_it() -> None:
    trace = make_trace(np.zeros(3), np.full(3, 160), np.full(3, 400))
    costs = make_costs(cache_tokens=1200)
    sessions = make_closed_loop(trace, Traffic(concurrency=3), None)
    kept, cold = (
        serve_sessions(sessions, costs, EngineSettings(prefix_caching=caching))
        for caching in (True, False)
    )
    for served in (kept, cold):
        assert served.runs[0].preemptions
        assert np.isfinite(served.last_token_s).all()
    computed = [served.runs[0].segments["prompt_tokens"].sum() for served in (kept, cold)]
    assert computed[0] <= computed[1]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"rate": 1, "concurrency": 2}, "either a rate or clients"),
        ({"rate": 1, "think_time": "2s"}, "clients that think"),
        ({"concurrency": 2, "prefill_replicas": 1}, "compute prompts themselves"),
        ({"concurrency": 2, "think_time": "later"}, "think_time"),
        ({"rate": 1, "turns": 0}, "turns"),
        ({"concurrency": 2, "max_model_len": 10**6}, "was made for"),
        ({"concurrency": 2, "prompt": 512, "max_model_len": 100}, "100 tokens"),
        ({"rate": 1, "prompt": 512, "max_model_len": 100}, "--max-model-len allows"),
    ],
)
def test_mistakes_are_told(asked, says) -> None:
    with pytest.raises((BadInput, WattcastError), match=says):
        wattcast.simulate("llama3-8b", "h200", **asked)


def test_times_are_drawn_with_their_mean() -> None:
    random = np.random.default_rng(0)
    assert draw_times("exponential:mean=200ms", "pause", random, 20_000).mean() == pytest.approx(
        0.2, rel=0.03
    )
    drawn_s = draw_times("lognormal:median=2s,sigma=0.5", "pause", random, 20_000)
    assert np.median(drawn_s) == pytest.approx(2.0, rel=0.03)
    assert draw_times("1.5", "pause", random, 2).tolist() == [1.5, 1.5]


def test_a_sticky_router_looks_past_what_all_prompts_share() -> None:
    """With the whole prompt as its key, each turn of a conversation went to an engine of its own."""
    paths = []
    for turn in (1, 2):
        for talk in (1, 2, 3):
            names = (0, talk, 10 * talk + turn)  # the system prompt, the conversation, the turn
            trunk = tuple((("hash", name), 32) for name in names)
            paths.append(SharedPath(trunk, len(paths)))
    keys = list_route_keys(paths, 3)
    assert keys == [("hash", 1), ("hash", 2), ("hash", 3)] * 2
