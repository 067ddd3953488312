"""vLLM's scheduler: one budget of tokens a step for requests that decode and for prompts.

Requests that decode come first, then prompts that were begun, then those that wait, each cut to
what is left of the budget (``max_num_batched_tokens``). A step holds both. Where the cache is too
small, the request that was admitted last gives up its blocks and comes back first.

Source: vLLM's documentation of chunked prefill and preemption (docs.vllm.ai, "Optimization and
Tuning"), and ``vllm/v1/core/sched/scheduler.py`` of vLLM 0.25.
"""

from __future__ import annotations

from wattcast.serving.engines.step_scheduler import (
    UNTIL_AN_EVENT,
    ActiveRequest,
    EngineState,
    PromptChunks,
)


class VllmScheduler:
    """Fills steps as vLLM does."""

    mixes = True
    requeues_first = True
    receives_always = True

    def receives(self, engine: EngineState) -> bool:
        """Requests are taken in before every step."""
        del engine
        return True

    def schedule_prompts(self, engine: EngineState) -> PromptChunks:
        """Choose prompt chunks for the next step: first those begun, then requests as they came."""
        budget = engine.settings.max_batched_tokens - len(engine.decoding) * engine.tokens_a_step
        room = engine.count_room()
        if room < 0 and engine.decoding:
            return []
        chunks = []
        for prompt in engine.prompts:
            tokens = min(prompt.remaining, budget)
            if tokens > 0:
                chunks.append((prompt, tokens))
                budget -= tokens
        queue = engine.queue
        max_seqs = engine.settings.max_seqs
        while queue and budget > 0:
            if engine.running >= max_seqs:
                break
            prompt = engine.reserve_cache(queue[0])
            needed = prompt.needed
            if needed > room:
                break
            room -= needed
            if not engine.admit(prompt):
                continue
            tokens = min(prompt.remaining, budget)
            budget -= tokens
            chunks.append((prompt, tokens))
        return chunks

    def count_steps_ahead(self, engine: EngineState) -> int:
        """Nothing changes before a request arrives, ends, or the cache is full."""
        del engine
        return UNTIL_AN_EVENT

    def choose_victim(self, engine: EngineState) -> ActiveRequest:
        """The request that was admitted last."""
        return engine.decoding[next(reversed(engine.decoding))]
