"""Work out how the requests of a trace go through an engine, before they are simulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.serving.arrivals import (
    NO_PREFIX,
    Counts,
    Trace,
)
from wattcast.serving.engines.step_scheduler import StartScheduler
from wattcast.serving.engines.vllm_scheduler import VllmScheduler
from wattcast.serving.prefix_cache import SharedPath, Stretch
from wattcast.workload.engine_schedule import STEP_TOKENS

MOST_DRAFTED = 64  # tokens of a step


@dataclass(frozen=True)
class EngineSettings:
    """Limits and features of one engine, named as vLLM names them."""

    max_batched_tokens: int = STEP_TOKENS
    max_seqs: int = 256
    prefix_hit_rate: float = 0.0  # share of every prompt that is found in the cache
    speculative_tokens: int = 0  # drafted per step
    acceptance_rate: float = 0.0  # chance that a drafted token is kept
    seed: int = 1
    prefix_caching: bool = True  # whether prompts are kept for later ones
    block_tokens: int = 16  # of the paged cache
    scheduler: StartScheduler = VllmScheduler  # of the engine, one for each replica

    def __post_init__(self) -> None:
        ranges = {
            "max_batched_tokens": (1, 1 << 20),
            "max_seqs": (1, 1 << 20),
            "speculative_tokens": (0, MOST_DRAFTED),
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
    shared_tokens: list[int]  # of the prompt, found in the cache in any case
    decode_steps: list[int]  # after the step that yields the first token
    growth: list[float]  # tokens that a decode step adds
    paths: list[SharedPath] | None = None  # what prompts share; None: nothing
    # Prompts were computed on another engine, and their cache is brought along.
    carried: bool = False


def plan_requests(
    trace: Trace,
    settings: EngineSettings,
    carried: bool = False,
    paths: list[SharedPath] | None = None,
) -> RequestPlan:
    """Draw how many steps each request decodes, and find what its prompt shares with others.

    ``paths`` say so, or the groups and hashes of the trace.
    """
    steps = _draw_decode_steps(trace.output_tokens, settings)
    later_tokens = trace.output_tokens - 1
    growth = np.divide(later_tokens, steps, out=np.ones(len(steps)), where=steps > 0)
    return RequestPlan(
        trace.arrival_s.tolist(),
        trace.prompt_tokens.tolist(),
        _count_shared_tokens(trace, settings.prefix_hit_rate).tolist(),
        steps.astype(np.int64).tolist(),
        growth.tolist(),
        paths or _list_paths(trace, settings.block_tokens),
        carried,
    )


def _count_shared_tokens(trace: Trace, hit_rate: float) -> Counts:
    """Return the tokens of each prompt that are found; the last one never is."""
    cached_tokens = np.floor(hit_rate * trace.prompt_tokens).astype(np.int64)
    return np.asarray(np.minimum(cached_tokens, trace.prompt_tokens - 1))


def _list_paths(trace: Trace, block_tokens: int) -> list[SharedPath] | None:
    """Return what the prompts of a trace share: blocks of equal hashes, or the text of a group."""
    if trace.hash_ids is not None:
        return _list_hash_paths(trace, block_tokens)
    if (trace.prefix_id == NO_PREFIX).all():
        return None
    sizes = _measure_groups(trace) // block_tokens
    paths = []
    for request, group in enumerate(trace.prefix_id.tolist()):
        trunk: tuple[Stretch, ...] = ()
        if group != NO_PREFIX and sizes[group]:
            trunk = ((("group", group), int(sizes[group])),)
        paths.append(SharedPath(trunk, request))
    return paths


def _measure_groups(trace: Trace) -> Counts:
    """Return the tokens that the prompts of each group share: those of the shortest."""
    is_grouped = trace.prefix_id != NO_PREFIX
    group = trace.prefix_id[is_grouped]
    shortest = np.full(group.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, group, trace.prompt_tokens[is_grouped])
    return np.asarray(shortest, dtype=np.int64)


def _list_hash_paths(trace: Trace, block_tokens: int) -> list[SharedPath]:
    """Return a stretch for each hash of a prompt; of its last one, the blocks that are full."""
    assert trace.hash_ids is not None
    paths = []
    rows = zip(trace.hash_ids, trace.prompt_tokens.tolist(), strict=True)
    for request, (hashes, tokens) in enumerate(rows):
        trunk = []
        for place, name in enumerate(hashes):
            covered = min(tokens - place * trace.hash_tokens, trace.hash_tokens)
            if covered >= block_tokens:
                trunk.append((("hash", name), covered // block_tokens))
        paths.append(SharedPath(tuple(trunk), request))
    return paths


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
