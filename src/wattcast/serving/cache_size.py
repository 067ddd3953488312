"""How much memory weights and steps of an engine leave for its cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.predictor.engine_host import load_host_times
from wattcast.serving.cache_layout import (
    CacheGroups,
    group_layers,
    has_mixed_caches,
    keeps_prefixes,
    measure_layer_caches,
)
from wattcast.serving.draft_models import choose_draft_options
from wattcast.serving.engines.engine_defaults import MemoryShare
from wattcast.serving.step_coefficients import STEPS
from wattcast.workload.build_model import compute_footprint
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions, OutputHead, WorkloadPhase

BLOCK_TOKENS = STEPS.block_tokens
MEMORY_UTILISATION = STEPS.memory_utilisation
_NO_ATTENTION_LIMIT = 1 << 40  # tokens of a model that keeps no cache


@dataclass(frozen=True)
class CacheSetting:
    """How an engine lays its cache out, and how much memory it takes in all."""

    block_tokens: int = BLOCK_TOKENS
    memory_utilisation: float = MEMORY_UTILISATION
    prefix_caching: bool | None = None  # None: as the engine decides for the model
    share: MemoryShare = MemoryShare.ALL  # what that share of the memory holds


USUAL_CACHE = CacheSetting()


@dataclass(frozen=True)
class CacheSize:
    """The paged cache of an engine."""

    tokens: int  # of all blocks, each for one group of layers
    byte_per_token: float  # of a long request, over all layers
    note: str
    groups: CacheGroups


def measure_cache(
    model: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    max_tokens: int,
    setting: CacheSetting = USUAL_CACHE,
    draft: ModelSpec | None = None,
) -> CacheSize:
    """Return the size of the cache that memory leaves, or raise an error where it leaves none.

    tokens = (u M - weights - activations - workspace) / bytes a token

    Engines differ in what their share u holds: SGLang leaves activations out of it, and
    TensorRT-LLM's is one of the memory that all else leaves.
    Where layers keep different things, tokens are those of the blocks that groups of layers share.
    The weights and layers of a ``draft`` model count as more of the model's own. Both compute in
    turn, so that the larger activations count.
    """
    members = [(model, options)]
    if draft is not None:
        members.append((draft, choose_draft_options(options)))
    needs = [compute_footprint(one, _largest_step(run, max_tokens)) for one, run in members]
    weight_byte = sum(need.weight_byte for need in needs)
    step_byte = max(need.activation_byte + need.workspace_byte for need in needs)
    memory_byte = load_host_times().visible_memory * float(np.min(gpu.memory.capacity_byte))
    cache_byte = _leave_for_cache(memory_byte, weight_byte, step_byte, setting)
    byte_per_token = sum(need.cache_byte for need in needs) / max_tokens
    tokens = _NO_ATTENTION_LIMIT
    prefix_caching = setting.prefix_caching
    groups = CacheGroups(setting.block_tokens, setting.block_tokens * byte_per_token)
    if any(has_mixed_caches(one) for one, _ in members):
        if prefix_caching is None:
            prefix_caching = keeps_prefixes(model)
        layers = [layer for one, run in members for layer in measure_layer_caches(one, run)]
        groups = group_layers(layers, setting.block_tokens, prefix_caching=prefix_caching)
    if byte_per_token:
        tokens = int(cache_byte // groups.block_byte) * groups.block_tokens
    if tokens < groups.block_tokens:
        cards = "the" if options.gpu_count == 1 else "each"
        owner = model.name if draft is None else f"{model.name} and its draft {draft.name}"
        usable_byte = memory_byte * setting.memory_utilisation
        raise WattcastError(
            f"{owner}: weights of {1e-9 * weight_byte:.1f} GB leave no room for "
            "a cache in "
            f"{1e-9 * usable_byte:.1f} GB of {cards} {gpu.name}. "
            "Use more GPUs (tp, pp) or a smaller number format (--quantization)."
        )
    content = _describe_tokens(tokens, groups, prefix_caching)
    owners = "" if draft is None else " of both models"
    note = f"cache: {content}, {_describe_share(setting, owners)}"
    return CacheSize(tokens, byte_per_token, note, groups)


def _leave_for_cache(
    memory_byte: float,
    weight_byte: float,
    step_byte: float,
    setting: CacheSetting,
) -> float:
    """Return the memory that an engine leaves for its cache, by what its share holds."""
    usable_byte = memory_byte * setting.memory_utilisation
    if setting.share is MemoryShare.ALL:
        return usable_byte - weight_byte - step_byte
    if setting.share is MemoryShare.STATIC:
        return usable_byte - weight_byte
    free_byte = memory_byte - weight_byte - step_byte
    return setting.memory_utilisation * free_byte


def _describe_tokens(
    tokens: int,
    groups: CacheGroups,
    prefix_caching: bool | None,
) -> str:
    """Say how many tokens a cache holds, or blocks where layers keep different things."""
    if groups.count == 1 and not groups.states:
        return f"{tokens} tokens"
    blocks = f"{tokens // groups.block_tokens} blocks of {groups.block_tokens} tokens"
    prefixes = "" if prefix_caching else ", without a cache of prefixes"
    group_count = groups.count + groups.states
    return f"{blocks} of one of {group_count} groups of layers{prefixes}"


def _largest_step(options: ModelOptions, max_tokens: int) -> ModelOptions:
    return replace(
        options,
        phase=WorkloadPhase.PREFILL,
        batch=1,
        seq=max_tokens,
        head=OutputHead.LAST,
    )


def _describe_share(setting: CacheSetting, owners: str = "") -> str:
    """Say what of the memory is the cache; ``owners`` are those of the weights."""
    share = f"{setting.memory_utilisation:.0%} of the memory"
    if setting.share is MemoryShare.STATIC:
        return f"{share} less weights{owners}"
    if setting.share is MemoryShare.FREE:
        return f"{share} that weights and activations{owners} leave"
    return f"{share} less weights and activations{owners}"
