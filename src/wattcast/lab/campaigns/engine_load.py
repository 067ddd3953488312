"""Load an engine as people load it: arrivals whose rate swings, users who wait for their answers,
and conversations whose prompts grow.

A *source* hands out requests when they are due and is told when one has ended. Open arrivals are
drawn beforehand. A user of a closed loop sends the next request a pause after the last token of the
one before. In a conversation each prompt repeats everything said so far, so that an engine with a
prefix cache computes only what is new.

Every random number comes from the seed of the point and, for users, from the user's number. What a
user asks therefore does not depend on how fast the engine answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from wattcast.core.errors import bad_value, check_names
from wattcast.lab.campaigns.length_distribution import LengthDistribution

WHOLE_MODEL = 2**30  # a length that no model reaches


@dataclass
class ServedRequest:
    """One request as it went; times from the beginning of the run."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    added_s: float = float("nan")
    token_s: list[float] = field(default_factory=list)  # when each token was handed out
    finished: bool = False
    user: int = 0
    turn: int = 0  # of a conversation, from 0
    pause_s: float | None = None  # of a user, after the answer before
    cached_tokens: int = 0  # of the prompt, as the engine says
    ids: list[int] = field(default_factory=list)  # of the prompt, where it must be a certain one
    made_ids: list[int] = field(default_factory=list)

    def plain(
        self,
        run: str,
        number: int,
    ) -> dict[str, Any]:
        """Return the request for JSON, to the microsecond; the pauses between tokens as their
        median and largest.
        """
        gaps_s = np.diff(self.token_s)
        row: dict[str, Any] = {
            "run": run,
            "number": number,
            "arrival_s": round(self.arrival_s, 6),
        }
        row |= {"added_s": round(self.added_s, 6), "prompt_tokens": self.prompt_tokens}
        row |= {
            "output_tokens": self.output_tokens,
            "made_tokens": len(self.token_s),
            "finished": self.finished,
        }
        if self.turn or self.user or self.cached_tokens:
            row |= {
                "user": self.user,
                "turn": self.turn,
                "cached_tokens": self.cached_tokens,
            }
        if self.pause_s is not None:
            row["pause_s"] = round(self.pause_s, 6)
        if self.token_s:
            row |= {
                "first_token_s": round(self.token_s[0], 6),
                "last_token_s": round(self.token_s[-1], 6),
            }
        if len(gaps_s):
            row |= {
                "gap_median_s": round(float(np.median(gaps_s)), 6),
                "gap_most_s": round(float(gaps_s.max()), 6),
            }
        return row


class RequestSource(Protocol):
    """Where requests come from."""

    def next_due_s(self) -> float:
        """Return when the next request is due; infinity where none is before another ends."""
        ...

    def take_due(self, now_s: float) -> list[ServedRequest]:
        """Return the requests that are due and were not handed out before."""
        ...

    def end_request(
        self,
        request: ServedRequest,
        now_s: float,
    ) -> None:
        """Note that the engine has handed out the last token of a request."""
        ...


class PlannedArrivals:
    """Requests that come at planned times, whatever the engine does."""

    def __init__(self, requests: Sequence[ServedRequest]) -> None:
        self.requests = requests
        self._place = 0

    def next_due_s(self) -> float:
        if self._place == len(self.requests):
            return float("inf")
        return self.requests[self._place].arrival_s

    def take_due(self, now_s: float) -> list[ServedRequest]:
        first = self._place
        while self.next_due_s() <= now_s:
            self._place += 1
        return list(self.requests[first : self._place])

    def end_request(
        self,
        request: ServedRequest,
        now_s: float,
    ) -> None:
        return None


@dataclass(frozen=True)
class LoadPoint:
    """One run under load: either users in a closed loop, or arrivals whose rate swings."""

    shape: str  # its name in the plan
    duration_s: float
    prompt: LengthDistribution  # new tokens of a request or of a turn
    output: LengthDistribution
    users: int = 0  # that wait for their answers; 0: arrivals that wait for nothing
    think_s: float = 0.0  # mean of a user's pause after an answer
    pause: str = "exponential"  # how pauses are spread; ``fixed``: all alike
    ramp_s: float = 0.0  # in which the users begin, one after another
    turns: int = 1  # of a conversation
    load: float = 0.0  # mean rate of arrivals as a share of the engine's capacity
    swing: float = 0.0  # of the rate around its mean, as a share of it: a sine
    period_s: float = 30.0  # of the swing
    drain_s: float = 6.0  # after the last arrival, then requests under way are given up
    seed: int = 1
    why: str = ""

    def __post_init__(self) -> None:
        is_closed = self.users > 0
        if is_closed == (self.load > 0.0):
            raise bad_value("a load", "users or a rate of arrivals", self.shape)
        if not 0.0 <= self.swing <= 1.0:
            raise bad_value("the swing of a load", "a share from 0 to 1", self.swing)
        check_names("spread of pauses", (self.pause,), ("exponential", "fixed"))

    @property
    def kind(self) -> str:
        """``load``, as rows are called."""
        return "load"

    @property
    def id(self) -> str:
        """The same in every run, so that a campaign can be continued."""
        return f"load-{self.shape}-{self.duration_s:g}s-s{self.seed}"

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> LoadPoint:
        """Build a point from a line of the plan, or from a request that another process sent."""
        lengths = {}
        for part in ("prompt", "output"):
            values = plain[part]
            if isinstance(values, dict):
                lengths[part] = LengthDistribution(**values)
            else:
                lengths[part] = LengthDistribution(*values)
        return cls(**plain | lengths)


def make_source(
    point: LoadPoint,
    capacity_per_s: float,
    draw_prompt: Callable[[int], list[int]],
    max_model_len: int = WHOLE_MODEL,
) -> RequestSource:
    """Return where the requests of a point come from."""
    if point.users:
        return WaitingUsers(point, draw_prompt, max_model_len)
    return PlannedArrivals(draw_swinging_arrivals(point, capacity_per_s, max_model_len))


def draw_swinging_arrivals(
    point: LoadPoint,
    capacity_per_s: float,
    max_model_len: int = WHOLE_MODEL,
) -> list[ServedRequest]:
    """Draw arrivals with the rate r(t) = r (1 + swing sin(2 pi t / period)), by thinning.

    Arrivals at the highest rate are drawn, and each stays with the chance r(t) / highest rate.
    """
    random = np.random.default_rng(point.seed)
    mean_per_s = point.load * capacity_per_s
    highest_per_s = mean_per_s * (1.0 + point.swing)
    count = int(highest_per_s * point.duration_s * 1.5) + 50
    time_s = np.cumsum(random.standard_exponential(count)) / highest_per_s
    rate_per_s = mean_per_s * (1.0 + point.swing * np.sin(2.0 * np.pi * time_s / point.period_s))
    stays = random.random(count) * highest_per_s < rate_per_s
    stays &= time_s < point.duration_s
    arrival_s = time_s[stays].tolist()
    output_tokens = point.output.draw(random, len(arrival_s))
    prompt_tokens = point.prompt.draw(random, len(arrival_s))
    prompt_tokens = np.minimum(prompt_tokens, max_model_len - output_tokens - 1)
    columns = zip(arrival_s, prompt_tokens.tolist(), output_tokens.tolist(), strict=True)
    return [ServedRequest(*column) for column in columns]


class WaitingUsers:
    """Users of a closed loop: each sends a request a pause after the answer to the one before."""

    def __init__(
        self,
        point: LoadPoint,
        draw_prompt: Callable[[int], list[int]],
        max_model_len: int = WHOLE_MODEL,
    ) -> None:
        self._point = point
        self._draw_prompt = draw_prompt
        self._max_model_len = max_model_len
        self._randoms = [np.random.default_rng([point.seed, user]) for user in range(point.users)]
        self._context: list[list[int]] = [[] for _ in range(point.users)]
        self._turn = [0] * point.users
        self._pause_s = [0.0] * point.users
        starts_s = np.linspace(0.0, point.ramp_s, point.users, endpoint=False)
        self._due_s: dict[int, float] = dict(enumerate(starts_s.tolist()))

    def next_due_s(self) -> float:
        return min(self._due_s.values(), default=float("inf"))

    def take_due(self, now_s: float) -> list[ServedRequest]:
        ready = sorted((due_s, user) for user, due_s in self._due_s.items() if due_s <= now_s)
        return [self._ask(user, due_s) for due_s, user in ready]

    def end_request(
        self,
        request: ServedRequest,
        now_s: float,
    ) -> None:
        user = request.user
        is_last = request.turn + 1 >= self._point.turns
        self._turn[user] = 0 if is_last else request.turn + 1
        self._context[user] = [] if is_last else [*request.ids, *request.made_ids]
        is_fixed = self._point.pause == "fixed"
        spread = 1.0 if is_fixed else float(self._randoms[user].standard_exponential())
        self._pause_s[user] = self._point.think_s * spread
        self._due_s[user] = now_s + self._pause_s[user]

    def _ask(
        self,
        user: int,
        due_s: float,
    ) -> ServedRequest:
        """Return the next request of a user; a conversation too long for the model begins anew."""
        del self._due_s[user]
        random = self._randoms[user]
        new_tokens = int(self._point.prompt.draw(random, 1)[0])
        output_tokens = int(self._point.output.draw(random, 1)[0])
        context = self._context[user]
        if len(context) + new_tokens + output_tokens >= self._max_model_len:
            context = []
            self._turn[user] = 0
        new_tokens = min(new_tokens, self._max_model_len - output_tokens - 1)
        ids = [*context, *self._draw_prompt(new_tokens)]
        return ServedRequest(
            due_s,
            len(ids),
            output_tokens,
            user=user,
            turn=self._turn[user],
            pause_s=self._pause_s[user],
            ids=ids,
        )
