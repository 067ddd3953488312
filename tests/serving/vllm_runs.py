"""Runs of vLLM's scheduler on made-up costs, written down to the last digit in ``vllm_runs.json``.

They were written before other engines had schedulers. ``python tests/serving/vllm_runs.py`` writes
them anew, which a change of vLLM's scheduler alone may need.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from made_up_costs import make_costs, real_host

from wattcast.options.serving_options import Conversations, RequestShape, Traffic
from wattcast.serving.arrivals import draw_trace
from wattcast.serving.closed_loop import serve_sessions
from wattcast.serving.engine_simulator import EngineReplica
from wattcast.serving.request_plan import EngineSettings, plan_requests
from wattcast.serving.request_sessions import draw_sessions

FILE = Path(__file__).with_name("vllm_runs.json")
_TIGHT = {"cache_tokens": 6000, "context_s": 2e-9}
# name -> (settings, costs, whether prompts were computed elsewhere)
_OPEN = {
    "usual": ({}, {"context_s": 2e-9}, False),
    "short steps": ({"max_batched_tokens": 256, "max_seqs": 16}, {"context_s": 2e-9}, False),
    "preemptions": ({"max_seqs": 24}, _TIGHT, False),
    "drafts": ({"speculative_tokens": 3, "acceptance_rate": 0.6}, {"context_s": 2e-9}, False),
    "prefix hits": ({"prefix_hit_rate": 0.5}, {"context_s": 2e-9}, False),
    "prompts from elsewhere": ({}, {"context_s": 2e-9}, True),
    "power limit": ({}, {"context_s": 2e-9, "limit_w": 350.0}, False),
}


def run_all() -> dict[str, dict[str, list[str]]]:
    """Return the moments and the sums of every run, in hexadecimal."""
    runs = {name: _run_open(*case) for name, case in _OPEN.items()}
    runs["conversations"] = _run_conversations()
    return runs


def _run_open(settings: dict, costs: dict, carried: bool) -> dict[str, list[str]]:
    engine_settings = EngineSettings(**settings)
    lengths = "lognormal:median=400,sigma=0.8", "lognormal:median=60,sigma=0.7"
    trace = draw_trace(40.0, *lengths, "poisson", 60.0, 60, 3)
    plan = plan_requests(trace, engine_settings, carried)
    engine = EngineReplica(make_costs(host=real_host(), **costs), engine_settings, plan)
    engine.submit(range(len(trace)))
    return _describe_runs([engine.finish()])


def _run_conversations() -> dict[str, list[str]]:
    talk = Conversations(turns=3, turn_pause=0.2, shared_prefix=200)
    traffic = Traffic(concurrency=6, seconds=6.0)
    sessions = draw_sessions(RequestShape("300", "40"), traffic, talk, 32768)
    costs = make_costs(host=real_host(), context_s=2e-9, cache_tokens=8000)
    served = serve_sessions(sessions, costs, EngineSettings(max_seqs=8), 2, "sticky")
    return _describe_runs(served.runs)


def _describe_runs(runs: list) -> dict[str, list[str]]:
    first_s = np.fmax.reduce([run.first_token_s for run in runs])
    last_s = np.fmax.reduce([run.last_token_s for run in runs])
    sums = [float(column.sum()) for run in runs for column in run.segments.values()]
    return {
        "first": [float(value).hex() for value in first_s],
        "last": [float(value).hex() for value in last_s],
        "sums": [value.hex() for value in sums],
        "preemptions": [str(run.preemptions) for run in runs],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(run_all(), indent=1) + "\n", encoding="utf-8")
