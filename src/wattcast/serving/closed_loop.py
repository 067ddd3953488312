"""Serve requests that wait for one another (``request_sessions``) on one or several engines.

The engines share one clock. The engine that is furthest behind goes on until the next request
arrives, until it ends a request, which may bring another, or until it is a moment ahead of the
others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import (
    Callable,
    Hashable,
    Sequence,
)
from dataclasses import dataclass, replace

import numpy as np

from wattcast.core import BadInput
from wattcast.serving.arrivals import Trace
from wattcast.serving.engine_simulator import EngineReplica, ReplicaRun
from wattcast.serving.prefix_cache import SharedPath
from wattcast.serving.request_plan import EngineSettings, plan_requests
from wattcast.serving.request_sessions import (
    SentRequests,
    SessionRun,
    Sessions,
    list_paths,
)
from wattcast.serving.step_costs import StepCosts

_AHEAD_S = 0.005  # about a step: how far an engine may be ahead of the others

Route = Callable[[int], EngineReplica]


@dataclass(frozen=True)
class ServedSessions:
    """The requests that were sent, in order of arrival, and what the engines did."""

    trace: Trace
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    runs: list[ReplicaRun]
    is_exhausted: bool  # a client found no session left


def serve_sessions(
    sessions: Sessions,
    costs: StepCosts,
    settings: EngineSettings,
    replicas: int = 1,
    router: str = "round-robin",
) -> ServedSessions:
    """Serve sessions on engines behind a router."""
    paths = list_paths(sessions, costs.block_tokens)
    plan = plan_requests(sessions.requests, settings, paths=paths)
    plan.arrival_s[:] = [math.inf] * len(plan.arrival_s)
    run = SessionRun(sessions)
    sent = SentRequests(run, plan.arrival_s)
    engines = [EngineReplica(costs, settings, plan, tell_end=sent.follow) for _ in range(replicas)]
    route = make_router(router, engines, sessions.session.tolist())
    serve_jointly(engines, sent, route)
    runs = [engine.finish() for engine in engines]

    arrival_s = np.array(plan.arrival_s)
    rows = np.argsort(arrival_s, kind="stable")
    rows = rows[np.isfinite(arrival_s[rows])]
    if not len(rows):
        raise BadInput("no request is sent before the time is up. Raise --seconds.")
    first_s = np.fmax.reduce([replica.first_token_s for replica in runs])
    last_s = np.fmax.reduce([replica.last_token_s for replica in runs])
    trace = sessions.requests.reorder(rows, arrival_s[rows])
    shrunk = [
        replace(r, first_token_s=r.first_token_s[rows], last_token_s=r.last_token_s[rows])
        for r in runs
    ]
    return ServedSessions(
        trace,
        first_s[rows],
        last_s[rows],
        shrunk,
        run.is_exhausted,
    )


def serve_jointly(
    engines: Sequence[EngineReplica],
    sent: SentRequests,
    route: Route,
) -> None:
    """Run engines on one clock until all requests have ended."""
    while True:
        busy = sorted(
            (engine.now_s, place) for place, engine in enumerate(engines) if engine.is_busy
        )
        next_s = sent.next_s
        if busy and busy[0][0] < next_s:
            others_s = busy[1][0] if len(busy) > 1 else math.inf
            until_s = min(next_s, others_s + _AHEAD_S)
            engines[busy[0][1]].run_until(until_s, stops_at_end=True)
            continue
        if next_s == math.inf:
            return
        request = sent.pop()
        route(request).submit((request,))


def list_route_keys(paths: Sequence[SharedPath], engines: int) -> list[Hashable]:
    """Return what a sticky router keeps together, for each request of a trace.

    That is the first stretch of a prompt that no more requests share than an engine's part of all:
    what comes before, such as a system prompt, is of every engine.

    >>> words = [(("hash", 0), 32), (("hash", 1), 32)]
    >>> list_route_keys([SharedPath(tuple(words), 0), SharedPath(tuple(words[:1]), 1)], 2)[0]
    ('hash', 1)
    """
    counts = Counter(name for path in paths for name, _ in path.trunk)
    most = len(paths) / engines
    keys: list[Hashable] = []
    for path in paths:
        rare = (name for name, _ in path.trunk if counts[name] <= most)
        keys.append(next(rare, path.trunk))
    return keys


def make_router(
    router: str,
    engines: Sequence[EngineReplica],
    keys: Sequence[Hashable],
) -> Route:
    """Return what chooses the engine of a request.

    ``keys`` name what a sticky router keeps together, by request.
    """
    turns = 0
    homes: dict[Hashable, EngineReplica] = {}

    def take_least_loaded(request: int) -> EngineReplica:
        # the engine with the least load, in turns where several have
        nonlocal turns
        turn = turns % len(engines)
        turns += 1
        return min((*engines[turn:], *engines[:turn]), key=lambda engine: engine.load)

    def take_next(request: int) -> EngineReplica:
        nonlocal turns
        turns += 1
        return engines[(turns - 1) % len(engines)]

    def take_home(request: int) -> EngineReplica:
        key = keys[request]
        if key not in homes:
            homes[key] = take_least_loaded(request)
        return homes[key]

    return {
        "round-robin": take_next,
        "least-loaded": take_least_loaded,
        "sticky": take_home,
    }[router]
