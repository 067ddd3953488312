"""TensorRT-LLM's scheduler: whole prompts beside requests that decode, and no request evicted.

A step holds the requests that decode and as many prompts as fit in ``max_num_tokens``, each as a
whole unless ``enable_chunked_prefill`` cuts them (it is off by default).

``GUARANTEED_NO_EVICT``, the default, gives a request its place only where the cache holds all of
it, prompt and output, beside all that requests with a place are still to fill. ``MAX_UTILIZATION``
asks for the prompt alone, and pauses the request that came last where the cache is full.

With ``batch_wait_timeout_iters`` and ``batch_wait_max_tokens_ratio`` prompts wait so many steps, or
until they fill that share of ``max_num_tokens`` together with the requests that decode.

Sources: TensorRT-LLM's documentation ("Useful Runtime Options", "Tuning Max Batch Size and Max Num
Tokens", "Scheduler" at nvidia.github.io/TensorRT-LLM) and ``_waiting_requests`` of
``tensorrt_llm/_torch/pyexecutor/py_executor.py`` (1.0). The overlap scheduler, on by default,
prepares a step while the device runs the one before, as the simulated host does for every engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from wattcast.core.errors import BadInput
from wattcast.serving.engines.step_scheduler import (
    UNTIL_AN_EVENT,
    ActiveRequest,
    EngineState,
    PromptChunks,
    StartScheduler,
)


class CapacityPolicy(StrEnum):
    """When a request gets its place in the cache."""

    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"


@dataclass(frozen=True)
class TrtllmArguments:
    """Arguments of TensorRT-LLM that change what its scheduler decides, by their own names."""

    enable_chunked_prefill: bool = False
    capacity_scheduler_policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0

    @property
    def start(self) -> StartScheduler:
        """Start a scheduler with these arguments."""
        return partial(TrtllmScheduler, self)


class TrtllmScheduler:
    """Fills steps as TensorRT-LLM does."""

    mixes = True
    requeues_first = True
    receives_always = True

    def __init__(self, arguments: TrtllmArguments) -> None:
        self._arguments = arguments
        self._keeps_all = arguments.capacity_scheduler_policy is CapacityPolicy.GUARANTEED_NO_EVICT
        self._waits_since: int | None = None  # decode step at which prompts began to wait

    def receives(self, engine: EngineState) -> bool:
        """Requests are taken in before every step."""
        del engine
        return True

    def schedule_prompts(self, engine: EngineState) -> PromptChunks:
        """Choose whole prompts for the next step, in order of arrival."""
        budget = engine.settings.max_batched_tokens - len(engine.decoding) * engine.tokens_a_step
        if engine.queue and self._waits(engine, budget):
            return []
        chunks: PromptChunks = []
        for prompt in engine.prompts:
            tokens = min(prompt.remaining, budget)
            if tokens > 0:
                chunks.append((prompt, tokens))
                budget -= tokens
        queue = engine.queue
        room = self._count_room(engine) if queue else 0.0
        while queue and budget > 0 and engine.running < engine.settings.max_seqs:
            prompt = engine.reserve_cache(queue[0])
            needed = self._count_needed(engine, prompt)
            if needed > room or not self._fits_step(engine, prompt, budget):
                break
            room -= needed
            if not engine.admit(prompt):
                continue
            tokens = min(prompt.remaining, budget)
            budget -= tokens
            chunks.append((prompt, tokens))
        return chunks

    def count_steps_ahead(self, engine: EngineState) -> int:
        """Until prompts have waited long enough, if they wait for others."""
        if self._waits_since is None:
            return UNTIL_AN_EVENT
        waited = engine.decode_step - self._waits_since
        return max(self._arguments.batch_wait_timeout_iters - waited, 1)

    def choose_victim(self, engine: EngineState) -> ActiveRequest:
        """The request that was admitted last."""
        return engine.decoding[next(reversed(engine.decoding))]

    def _count_room(self, engine: EngineState) -> float:
        """Count the cache that no request with a place uses, or will use."""
        room = engine.count_room()
        if not self._keeps_all:
            return room
        active = (*engine.prompts, *engine.decoding.values())
        left = sum(engine.count_left(item) for item in active)
        unfilled = engine.unfilled_tokens * len(engine.prompts)
        return room - engine.full_groups * (left + len(engine.prompts)) - unfilled

    def _count_needed(self, engine: EngineState, prompt: ActiveRequest) -> float:
        """Count the cache that a request must find to get its place."""
        if not self._keeps_all:
            return prompt.needed
        wanted = engine.count_wanted(prompt.request) + 1.0  # the first token, too
        return prompt.needed + engine.full_groups * wanted + engine.unfilled_tokens

    def _fits_step(self, engine: EngineState, prompt: ActiveRequest, budget: int) -> bool:
        """Whether a prompt fits in what is left of a step; without chunks all of it must."""
        if self._arguments.enable_chunked_prefill or prompt.remaining <= budget:
            return True
        most = engine.settings.max_batched_tokens
        if prompt.remaining > most:
            raise BadInput(
                f"TensorRT-LLM computes a prompt in one step, and this one has {prompt.remaining} "
                f"tokens where a step has at most {most}. Raise --max-batched-tokens, or give "
                "--engine-args enable_chunked_prefill=true."
            )
        return False

    def _waits(self, engine: EngineState, budget: int) -> bool:
        """Whether prompts that would fit wait for more of them, while others decode."""
        arguments = self._arguments
        if not arguments.batch_wait_timeout_iters or not engine.decoding or engine.prompts:
            self._waits_since = None
            return False
        most = engine.settings.max_batched_tokens
        tokens = self._count_fitting(engine, budget) + most - budget
        if tokens == most - budget:  # nothing could come in
            return False
        since = engine.decode_step if self._waits_since is None else self._waits_since
        is_long = engine.decode_step - since >= arguments.batch_wait_timeout_iters
        if is_long or tokens >= arguments.batch_wait_max_tokens_ratio * most:
            self._waits_since = None
            return False
        self._waits_since = since
        return True

    def _count_fitting(self, engine: EngineState, budget: int) -> int:
        """Count the tokens of waiting prompts that fit in the next step."""
        room = self._count_room(engine)
        places = engine.settings.max_seqs - engine.running
        tokens = 0
        for request in engine.queue:
            prompt = engine.reserve_cache(request)
            room -= self._count_needed(engine, prompt)
            places -= 1
            if room < 0 or places < 0 or tokens + prompt.remaining > budget:
                break
            tokens += prompt.remaining
        return tokens
