"""Draw requests that wait for one another: clients in a closed loop, conversations and agents.

A *session* is a conversation: its turns are requests, and a turn is sent a pause after the answer
to the turn before. Its prompt is all that was said so far, and new text. A session of one turn is a
plain request. Sessions begin at times of their own (an open loop), or a fixed number of *clients*
takes them one after another (a closed loop): a client that had the last answer of a session thinks
for a while and takes the next session that nobody has taken. Users of a trace take their own
sessions in the order in which they did.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array, Mask
from wattcast.options.serving_options import (
    Conversations,
    RequestShape,
    Traffic,
)
from wattcast.serving.arrivals import (
    MOST_REQUESTS,
    Counts,
    Trace,
    draw_arrivals,
    draw_lengths,
    draw_times,
    make_trace,
)
from wattcast.serving.prefix_cache import SharedPath

MOST_TURNS = 10_000
_LEAST_SESSIONS = 1000  # that a closed loop draws where a time is asked for
_SESSIONS_PER_CLIENT = 32
# Sessions that are drawn at once for a time: no Poisson process passes eight deviations.
_SURE_DEVIATIONS, _SURE_MORE = 8, 16
_SHARED_TEXT = "shared text"  # the stretch of the cache before all conversations


@dataclass(frozen=True)
class Sessions:
    """Requests by session and turn, and when each is sent."""

    requests: Trace  # in the order of sessions and turns; arrivals are not known yet
    session: Counts  # (request,)
    pause_s: Array  # (request,) after the turn before; of a first turn, before a client sends it
    # (session,) in an open loop; of users, infinite where a session waits for the one before
    begin_s: Array | None
    clients: int = 0  # of a closed loop
    ramp_s: float = 0.0  # in which clients begin, evenly spread
    stop_s: float = math.inf  # from when on nothing is sent
    shared_tokens: int = 0  # of text that all prompts begin with
    redraw: Callable[[int], Sessions] | None = None  # so many sessions, where more may be needed
    user: Counts | None = None  # (session,) who alone takes it, one after another

    @property
    def first_requests(self) -> Counts:
        """The first request of each session."""
        changes = np.flatnonzero(np.diff(self.session, prepend=-1))
        return np.asarray(changes, dtype=np.int64)


def is_interactive(traffic: Traffic, talk: Conversations) -> bool:
    """Whether requests wait for one another, share text or begin slowly."""
    if traffic.think_time not in (0, 0.0, "0") and traffic.concurrency is None:
        raise bad_value("think_time", "clients that think (--concurrency)", "none")
    has_turns = str(talk.turns).strip() != "1"
    is_closed = traffic.concurrency is not None or has_users(traffic)
    return bool(is_closed or traffic.ramp_s or talk.shared_prefix or has_turns)


def has_users(traffic: Traffic) -> bool:
    """Whether a trace says who asked, and how long after the answer before."""
    return isinstance(traffic.trace, Trace) and traffic.trace.pause_s is not None


def replay_users(trace: Trace, most_tokens: int | None) -> Sessions:
    """Let the users of a trace ask what they asked, each as long after an answer as they did."""
    if most_tokens is not None:
        trace = trace.select(trace.prompt_tokens + trace.output_tokens <= most_tokens)
    assert trace.user is not None
    rows = np.lexsort((trace.arrival_s, trace.user))
    ordered = trace.reorder(rows, np.zeros(len(rows)))
    user, turn, pause_s = ordered.user, ordered.turn, ordered.pause_s
    assert user is not None
    assert turn is not None
    assert pause_s is not None
    is_other_user = np.diff(user, prepend=-1) != 0
    is_first = is_other_user | (turn == 0)
    session = np.cumsum(is_first) - 1
    begin_s = np.where(is_other_user, trace.arrival_s[rows], np.inf)[is_first]
    return Sessions(
        replace(ordered, session=session),
        session,
        pause_s,
        begin_s,
        user=user[is_first],
    )


def make_closed_loop(
    trace: Trace,
    traffic: Traffic,
    most_tokens: int | None,
) -> Sessions:
    """Let clients take the requests of a trace one after another, whenever these arrived."""
    if most_tokens is not None:
        trace = trace.select(trace.prompt_tokens + trace.output_tokens <= most_tokens)
    if traffic.requests is not None:
        trace = trace.select(np.arange(len(trace)) < traffic.requests)
    count = len(trace)
    pauses = draw_times(traffic.think_time, "think_time", np.random.default_rng(1), count)
    return Sessions(
        trace,
        np.arange(count),
        pauses,
        None,
        traffic.concurrency or 0,
        traffic.ramp_s,
    )


def draw_sessions(
    shape: RequestShape,
    traffic: Traffic,
    talk: Conversations,
    most_tokens: int | None,
    sessions: int | None = None,
) -> Sessions:
    """Draw sessions at a rate, or those that so many clients take.

    One generator, seeded by ``shape.seed``, draws in this order: arrivals (at a rate), turns, first
    prompts, outputs, texts of later turns, pauses between turns, thinking times. A turn that would
    pass ``most_tokens`` ends its session before it. ``sessions`` replaces their number.
    """
    random = np.random.default_rng(shape.seed)
    count = sessions or _count_sessions(traffic)
    begin_s = None
    if traffic.rate_per_s is not None:
        begin_s = draw_arrivals(shape.arrivals, random, count, traffic.rate_per_s)
        begin_s = ramp_arrivals(begin_s, traffic.ramp_s)
        if traffic.requests is None and sessions is None:
            begin_s = begin_s[begin_s < traffic.seconds]
            count = len(begin_s)
    if not count:
        raise bad_value("rate", "at least one arrival", "none", "Raise the rate or the time.")

    turns = np.minimum(draw_lengths(talk.turns, "turns", random, count), MOST_TURNS)
    total = int(turns.sum())
    if total > MOST_REQUESTS:
        raise bad_value("requests", f"at most {MOST_REQUESTS} in all turns", total)
    session = np.repeat(np.arange(count), turns)
    starts = np.cumsum(turns) - turns
    turn = np.arange(total) - starts[session]
    text = np.empty(total, dtype=np.int64)
    text[starts] = draw_lengths(shape.prompt, "prompt", random, count) + talk.shared_prefix
    output = draw_lengths(shape.output, "output", random, total)
    is_later = turn > 0
    later_text = talk.turn_prompt if talk.turn_prompt is not None else shape.prompt
    text[is_later] = draw_lengths(later_text, "turn_prompt", random, int(is_later.sum()))
    pause_s = np.zeros(total)
    pause_s[is_later] = draw_times(talk.turn_pause, "turn_pause", random, int(is_later.sum()))
    pause_s[starts] = draw_times(traffic.think_time, "think_time", random, count)

    prompt = _sum_history(text, output, starts[session])
    is_sent = np.ones(total, dtype=bool)
    if most_tokens is not None:
        is_sent = prompt + output <= most_tokens
        is_sent = _keep_until_first_gap(is_sent, starts[session])
    if not is_sent.any():
        expected = f"at most {most_tokens:,} tokens, prompt and output together"
        raise bad_value("prompt", expected, int((prompt + output).min()))
    requests = make_trace(np.zeros(total), prompt, output, name=_describe(shape, traffic, talk))
    requests = replace(requests, session=session, turn=turn).select(is_sent)
    assert requests.session is not None
    numbers = np.unique(requests.session, return_inverse=True)
    if begin_s is not None:
        begin_s = begin_s[numbers[0]]
    return Sessions(
        replace(requests, session=numbers[1]),
        numbers[1],
        pause_s[is_sent],
        begin_s,
        traffic.concurrency or 0,
        traffic.ramp_s,
        traffic.seconds if _is_stopped(traffic) else math.inf,
        talk.shared_prefix,
        partial(
            draw_sessions,
            shape,
            traffic,
            talk,
            most_tokens,
        )
        if _is_stopped(traffic)
        else None,
    )


def ramp_arrivals(arrival_s: Array, ramp_s: float) -> Array:
    """Return arrivals whose rate rises from zero to its value within ``ramp_s``.

    By then half as many have arrived as at the full rate: Λ(t) = r t² / (2 R) up to R.
    """
    if not ramp_s:
        return arrival_s
    return np.where(
        arrival_s < 0.5 * ramp_s, np.sqrt(2.0 * ramp_s * arrival_s), arrival_s + 0.5 * ramp_s
    )


def list_paths(sessions: Sessions, block_tokens: int) -> list[SharedPath] | None:
    """Return what each request shares: the text before all sessions, then its own session.

    The requests of a trace share what the trace says.
    """
    if sessions.requests.session is None:
        return None
    blocks = sessions.shared_tokens // block_tokens
    trunk = ((_SHARED_TEXT, blocks),) if blocks else ()
    return [SharedPath(trunk, session) for session in sessions.session.tolist()]


def _is_stopped(traffic: Traffic) -> bool:
    """Whether a closed loop ends by the clock."""
    return traffic.concurrency is not None and traffic.requests is None


def _count_sessions(traffic: Traffic) -> int:
    """Return how many sessions are drawn; of a closed loop by time, as many as may do."""
    if traffic.requests is not None:
        count = traffic.requests
    elif traffic.rate_per_s is not None:
        expected = traffic.rate_per_s * traffic.seconds
        count = int(expected + _SURE_DEVIATIONS * expected**0.5 + _SURE_MORE)
    else:
        count = max(_LEAST_SESSIONS, _SESSIONS_PER_CLIENT * (traffic.concurrency or 1))
    if not 0 < count <= MOST_REQUESTS:
        raise bad_value("requests", f"from 1 to {MOST_REQUESTS}", count)
    return count


def _sum_history(
    text: Counts,
    output: Counts,
    start: Counts,
) -> Counts:
    """Return the prompt of each turn: all texts so far, and the answers to the turns before."""
    history = np.cumsum(text + output) - output
    before = history - text
    return np.asarray(history - before[start])


def _keep_until_first_gap(is_short: Mask, start: Counts) -> Mask:
    """Return the turns before the first one of a session that is too long."""
    gaps = np.cumsum(~is_short, dtype=np.int64)
    before = np.asarray(gaps - ~is_short)
    return np.asarray(gaps == before[start])


def _describe(
    shape: RequestShape,
    traffic: Traffic,
    talk: Conversations,
) -> str:
    """Name the traffic."""
    loop = f"{traffic.concurrency} clients"
    if traffic.rate_per_s is not None:
        loop = f"{shape.arrivals} at {traffic.rate_per_s:g}/s"
    turns = "" if str(talk.turns) == "1" else f", {talk.turns} turns"
    return f"{loop}, prompt {shape.prompt}, output {shape.output}{turns}, seed {shape.seed}"


class SessionRun:
    """Say which request is sent next, and when."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._session = sessions.session.tolist()
        self._pause_s = sessions.pause_s.tolist()
        self._first = sessions.first_requests.tolist()
        self._user = None if sessions.user is None else sessions.user.tolist()
        self._next = 0  # session that no client has taken
        self.is_exhausted = False  # a client found no session left

    def list_first(self) -> list[tuple[float, int]]:
        """Return the requests that wait for no other, with the moments they are sent."""
        begin_s = self.sessions.begin_s
        if begin_s is not None:
            beginning = zip(begin_s.tolist(), self._first, strict=True)
            return [(moment_s, request) for moment_s, request in beginning if moment_s < math.inf]
        clients = self.sessions.clients
        ramp_s = self.sessions.ramp_s
        starting = [
            (ramp_s * client / clients, request)
            for client, request in enumerate(self._first[:clients])
        ]
        self._next = len(starting)
        return starting

    def find_next(
        self,
        request: int,
        ended_s: float,
    ) -> tuple[float, int] | None:
        """Return the request that follows one with its last token, and when it is sent."""
        later = request + 1
        is_turn = later < len(self._session) and self._session[later] == self._session[request]
        if not is_turn and self._user is not None:
            if later == len(self._session):
                return None
            if self._user[self._session[later]] != self._user[self._session[request]]:
                return None
        elif not is_turn:
            if not self.sessions.clients:
                return None
            if self._next == len(self._first):
                self.is_exhausted = True
                return None
            later = self._first[self._next]
        sent_s = ended_s + self._pause_s[later]
        if sent_s >= self.sessions.stop_s:
            return None
        self._next += not is_turn
        return sent_s, later


class SentRequests:
    """Requests on their way to a router, in order of time."""

    def __init__(
        self,
        run: SessionRun,
        arrival_s: list[float],
    ) -> None:
        self._run = run
        self._arrival_s = arrival_s  # of each request, filled in as it is sent
        self._coming: list[tuple[float, int]] = []
        for moment_s, request in run.list_first():
            self._send(moment_s, request)

    @property
    def next_s(self) -> float:
        """When the next request arrives; infinite where none is on its way."""
        return self._coming[0][0] if self._coming else math.inf

    def pop(self) -> int:
        """Take the next request."""
        return heapq.heappop(self._coming)[1]

    def follow(
        self,
        request: int,
        ended_s: float,
    ) -> None:
        """Send what waited for the end of a request."""
        following = self._run.find_next(request, ended_s)
        if following is not None:
            self._send(*following)

    def _send(
        self,
        moment_s: float,
        request: int,
    ) -> None:
        self._arrival_s[request] = moment_s
        heapq.heappush(self._coming, (moment_s, request))
