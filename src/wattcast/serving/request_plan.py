"""Work out how the requests of a trace go through an engine, before they are simulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.serving.arrivals import NO_PREFIX, Counts, Trace
from wattcast.workload.engine_schedule import STEP_TOKENS

_PREFIX_BLOCK_TOKENS = 16  # a shared prefix is found in whole blocks of the cache


@dataclass(frozen=True)
class EngineSettings:
    """Limits and features of one engine, named as vLLM names them."""

    max_batched_tokens: int = STEP_TOKENS
    max_seqs: int = 256
    prefix_hit_rate: float = 0.0  # share of every prompt that is found in the cache
    speculative_tokens: int = 0  # drafted per step
    acceptance_rate: float = 0.0  # chance that a drafted token is kept
    seed: int = 1

    def __post_init__(self) -> None:
        ranges = {
            "max_batched_tokens": (1, 1 << 20),
            "max_seqs": (1, 1 << 20),
            "speculative_tokens": (0, 64),
            "prefix_hit_rate": (0, 1),
            "acceptance_rate": (0, 1),
        }
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise bad_value(name, f"from {least} to {most}", getattr(self, name))
        if self.max_seqs * (1 + self.speculative_tokens) > self.max_batched_tokens:
            expected = "a token for each of max_seqs sequences"
            raise bad_value("max_batched_tokens", expected, self.max_batched_tokens)


@dataclass(frozen=True)
class RequestPlan:
    """How each request of a trace goes through an engine."""

    arrival_s: list[float]
    prompt_tokens: list[int]
    shared_tokens: list[int]  # of the prompt, found in the cache
    # The group of prompts that begin alike, whose first request on an engine finds nothing;
    # -1: the prompt shares no prefix.
    prefix_id: list[int]
    decode_steps: list[int]  # after the step that yields the first token
    growth: list[float]  # tokens that a decode step adds
    # Prompts were computed on another engine, and their cache is brought along.
    carried: bool = False


def plan_requests(trace: Trace, settings: EngineSettings, carried: bool = False) -> RequestPlan:
    """Draw how many steps each request decodes, and find what the cache holds of its prompt."""
    steps = _draw_decode_steps(trace.output_tokens, settings)
    later_tokens = trace.output_tokens - 1
    growth = np.divide(later_tokens, steps, out=np.ones(len(steps)), where=steps > 0)
    return RequestPlan(
        trace.arrival_s.tolist(),
        trace.prompt_tokens.tolist(),
        _count_shared_tokens(trace, settings.prefix_hit_rate).tolist(),
        trace.prefix_id.tolist(),
        steps.astype(np.int64).tolist(),
        growth.tolist(),
        carried,
    )


def _count_shared_tokens(trace: Trace, hit_rate: float) -> Counts:
    """Return the tokens of each prompt that the cache holds.

    Requests that share a prefix find it once the first of them has been on the same engine; its
    length is that of their shortest prompt, in whole blocks.
    """
    prompt = trace.prompt_tokens
    shared = np.floor(hit_rate * prompt).astype(np.int64)
    is_grouped = trace.prefix_id != NO_PREFIX
    if is_grouped.any():
        group = trace.prefix_id[is_grouped]
        shortest = np.full(group.max() + 1, np.iinfo(np.int64).max)
        np.minimum.at(shortest, group, prompt[is_grouped])
        prefix = shortest[group] // _PREFIX_BLOCK_TOKENS * _PREFIX_BLOCK_TOKENS
        shared[is_grouped] = np.maximum(shared[is_grouped], prefix)
    return np.asarray(np.minimum(shared, prompt - 1))


def _draw_decode_steps(output_tokens: Counts, settings: EngineSettings) -> Array:
    """Draw the steps that each request takes after its first token.

    A speculative step keeps i of γ drafted tokens with chance α^i (1 - α), so it yields
    (1 - α^(γ+1)) / (1 - α) on average.
    """
    steps: Array = (output_tokens - 1).astype(np.float64)
    if not settings.speculative_tokens:
        return steps
    places = np.arange(settings.speculative_tokens + 1)
    chance = settings.acceptance_rate**places  # that a step yields more tokens than ``places``
    mean = float(chance.sum())
    variance = max(float(2 * (places * chance).sum()) + mean - mean**2, 0.0)
    random = np.random.default_rng(settings.seed)
    noise = random.standard_normal(len(steps)) * np.sqrt(steps * variance / mean**3)
    least = np.ceil(steps / (settings.speculative_tokens + 1))
    return np.clip(np.rint(steps / mean + noise), least, steps)
