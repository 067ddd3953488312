"""What a serving engine's scheduler decides, and what it sees of its engine.

``serving.engine_simulator`` lets time pass: requests arrive, steps run on host and device, tokens
go out. Between two steps it asks a scheduler which prompts are computed next, whether the requests
that decode take part in that step, and who gives up its cache where there is too little. Each
engine has a scheduler in a file of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from wattcast.serving.prefix_cache import SharedPath

UNTIL_AN_EVENT = 1 << 62  # decode steps before a scheduler decides anew


@dataclass(slots=True)
class ActiveRequest:
    """A request in the engine: its prompt is computed, then it decodes."""

    request: int
    shared: int  # tokens found in the cache, which others hold too
    # Tokens in the cache so far; of a request that decodes, those it attended to at first.
    context: float
    remaining: int  # tokens of the prompt that are still to be computed
    reserved: int  # tokens of cache that its prompt holds
    path: SharedPath  # where the prefix cache keeps it
    joined: int = 0  # tokens of cache that are in use from now on, since it shares them
    begun: int = 0  # decode step at which it began to decode
    kept: int = 0  # tokens of blocks that windows and states hold while it decodes

    @property
    def needed(self) -> int:
        """Tokens of cache that are in use once its prompt has been admitted."""
        return self.reserved + self.joined


PromptChunks = list[tuple[ActiveRequest, int]]  # a prompt, and how many of its tokens


class StepLimits(Protocol):
    """The most that a step of an engine holds."""

    @property
    def max_batched_tokens(self) -> int:
        """Tokens of a step; of prompts alone where these have steps of their own."""

    @property
    def max_seqs(self) -> int:
        """Sequences of a step."""


class EngineState(Protocol):
    """What a scheduler sees of its engine, and how it admits requests."""

    @property
    def settings(self) -> StepLimits:
        """The limits of the engine."""

    queue: deque[int]  # requests without a place, in order of arrival
    prompts: list[ActiveRequest]  # begun, in order of admission
    decoding: dict[int, ActiveRequest]  # in order of admission
    decode_step: int  # decode steps so far
    tokens_a_step: int  # of a sequence that decodes, drafted ones counted
    full_groups: int  # tokens of cache that a token takes: groups of layers that keep all
    unfilled_tokens: float  # of cache, in the last blocks of a sequence that decodes

    @property
    def running(self) -> int:
        """Count the requests that are computed."""

    def count_room(self) -> float:
        """Count the tokens of cache that are free after one more decode step."""

    def count_left(self, active: ActiveRequest) -> float:
        """Count the tokens that a request with a place is still to get."""

    def count_outputs(self, active: ActiveRequest) -> float:
        """Count the tokens that a request which decodes has got since it came in."""

    def count_wanted(self, request: int) -> float:
        """Count the tokens that a request is to get from where it came in, or comes in next."""

    def reserve_cache(self, request: int) -> ActiveRequest:
        """Return a request as it would come in: what the cache holds of it and what it needs."""

    def admit(self, prompt: ActiveRequest) -> bool:
        """Give the first request of the queue its place; False: it has no prompt to compute."""


class StepScheduler(Protocol):
    """Decides what the next step of one engine computes. It may remember what it decided."""

    mixes: bool  # a step that computes prompts also decodes
    requeues_first: bool  # a request that gave up its cache is the next to come in
    receives_always: bool  # requests are taken in before every step

    def receives(self, engine: EngineState) -> bool:
        """Whether requests that have arrived are taken in before the next step."""

    def schedule_prompts(self, engine: EngineState) -> PromptChunks:
        """Choose what the next step computes of prompts; nothing: it only decodes."""

    def count_steps_ahead(self, engine: EngineState) -> int:
        """Count the decode-only steps after which it decides anew, though nothing happened."""

    def choose_victim(self, engine: EngineState) -> ActiveRequest:
        """Choose who of the decoding requests gives up its cache and is computed anew later."""


StartScheduler = Callable[[], StepScheduler]  # a scheduler for one engine, with nothing decided
