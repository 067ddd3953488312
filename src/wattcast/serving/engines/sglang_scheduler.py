"""SGLang's scheduler: prompts before decoding, each in steps of their own.

As long as prompts wait and fit, steps compute prompts alone, at most ``chunked_prefill_size``
tokens each, and the requests that decode stand still; then steps only decode. With
``enable_mixed_chunk`` a step of prompts also decodes. A prompt is cut where the step is full, one
at a time.

A request comes in where the cache holds its prompt, all of its output, and of every other request
the share ``new_token_ratio`` of what it is still to get. That ratio falls with every decode step
and is estimated anew where the cache was too small after all and requests had to be retracted:
those with the fewest tokens first, which join the end of the queue.

With ``scheduler_recv_interval`` requests are taken in only every so many decode steps, or after a
step of prompts.

Sources: SGLang's documentation of server arguments and hyperparameter tuning (docs.sglang.io);
``get_next_batch_to_run``, ``PrefillAdder``, ``retract_decode`` and ``SchedulerRecvSkipper`` of
``python/sglang/srt/managers`` of SGLang 0.5. The scheduler prepares a step while the device runs
the one before (``event_loop_overlap``), as the simulated host does for every engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from wattcast.serving.engines.scheduler_coefficients import SCHEDULERS
from wattcast.serving.engines.step_scheduler import (
    UNTIL_AN_EVENT,
    ActiveRequest,
    EngineState,
    PromptChunks,
    StartScheduler,
)


@dataclass(frozen=True)
class SglangArguments:
    """Server arguments of SGLang that change what its scheduler decides, by their own names."""

    enable_mixed_chunk: bool = False
    schedule_conservativeness: float = 1.0
    scheduler_recv_interval: int = 1

    @property
    def start(self) -> StartScheduler:
        """Start a scheduler with these arguments."""
        return partial(SglangScheduler, self)


class SglangScheduler:
    """Fills steps as SGLang does."""

    requeues_first = False

    def __init__(self, arguments: SglangArguments) -> None:
        self.mixes = arguments.enable_mixed_chunk
        self.receives_always = arguments.scheduler_recv_interval <= 1
        self._interval = max(arguments.scheduler_recv_interval, 1)
        self._highest = min(
            SCHEDULERS.sglang_new_token_ratio * arguments.schedule_conservativeness, 1.0
        )
        self._lowest = self._highest * SCHEDULERS.sglang_least_ratio
        self.new_token_ratio = self._highest
        self._ratio_step = 0  # decode step at which the ratio was noted
        self._prompt_step = 0  # decode step at which prompts were computed last
        self._refuses = False  # the first of the queue did not fit

    def receives(self, engine: EngineState) -> bool:
        """Requests are taken in every so many decode steps, after prompts, and when idle."""
        if self.receives_always or not engine.running:
            return True
        return (engine.decode_step - self._prompt_step) % self._interval == 0

    def schedule_prompts(self, engine: EngineState) -> PromptChunks:
        """Fill a step with prompts: the one that was cut first, then requests as they came."""
        self._refuses = False
        if not engine.running:
            self._note_ratio(engine, self._highest)
        budget = engine.settings.max_batched_tokens
        if self.mixes:
            budget -= len(engine.decoding) * engine.tokens_a_step
        chunks: PromptChunks = []
        for prompt in engine.prompts:
            tokens = min(prompt.remaining, budget)
            if tokens > 0:
                chunks.append((prompt, tokens))
                budget -= tokens
        queue = engine.queue
        room = engine.count_room() - self._count_ahead(engine) if queue else 0.0
        while queue and budget > 0 and engine.running < engine.settings.max_seqs:
            prompt = engine.reserve_cache(queue[0])
            wanted = min(engine.count_wanted(prompt.request), SCHEDULERS.sglang_clipped_tokens)
            needed = prompt.needed + engine.full_groups * wanted
            if needed > room:
                self._refuses = True
                break
            room -= needed
            if not engine.admit(prompt):
                continue
            tokens = min(prompt.remaining, budget)
            budget -= tokens
            chunks.append((prompt, tokens))
        if chunks:
            self._prompt_step = engine.decode_step + self.mixes
        return chunks

    def count_steps_ahead(self, engine: EngineState) -> int:
        """Until requests are taken in, or the falling ratio may admit the first that waits."""
        if self._refuses and self.new_token_ratio > self._lowest:
            return 1
        if self.receives_always:
            return UNTIL_AN_EVENT
        return self._interval - (engine.decode_step - self._prompt_step) % self._interval

    def choose_victim(self, engine: EngineState) -> ActiveRequest:
        """The request with the fewest tokens, and of equals the one with the longest prompt."""
        requests = engine.decoding.values()
        decoded = sum(engine.count_outputs(item) for item in requests)
        wanted = sum(engine.count_wanted(item.request) for item in requests)
        ahead = decoded + SCHEDULERS.sglang_retract_steps * len(requests)
        self._note_ratio(engine, min(ahead / (wanted + 1.0), 1.0))
        return min(requests, key=lambda item: (engine.count_outputs(item), -item.context))

    def _count_ahead(self, engine: EngineState) -> float:
        """Count the cache that is kept free for what requests with a place are still to get."""
        clipped = SCHEDULERS.sglang_clipped_tokens
        active = (*engine.prompts, *engine.decoding.values())
        left = sum(min(engine.count_left(item), clipped) for item in active)
        return self._lower_ratio(engine) * engine.full_groups * left

    def _note_ratio(self, engine: EngineState, ratio: float) -> None:
        self.new_token_ratio = ratio
        self._ratio_step = engine.decode_step

    def _lower_ratio(self, engine: EngineState) -> float:
        """Return the ratio after the decode steps since it was noted."""
        steps = engine.decode_step - self._ratio_step
        fall = (self._highest - self._lowest) / SCHEDULERS.sglang_ratio_steps
        self._note_ratio(engine, max(self.new_token_ratio - steps * fall, self._lowest))
        return self.new_token_ratio
