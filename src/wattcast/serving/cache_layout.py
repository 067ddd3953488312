"""Lay the cache of an engine out in blocks, as vLLM's manager of hybrid caches does.

Layers of one kind keep the same: *full* attention every token, attention with a *window* those that
it still sees, a *state* (of a linear layer) the same for any context. The layers fall into groups
of one size, each of one kind; a block holds some tokens of all layers of a group, or the states of
a request, so that all blocks have the same bytes. A request has a table of blocks for each group.

    group size = the least number of layers of a kind (the most, if that is less than 1.5 times it)
    block = group size · page; page = the largest of all kinds, to which others are padded

Where there are states, a block of attention takes as many tokens as make its page no smaller than a
state. With prefix caching a scan of Mamba keeps a state for each block, whose tokens are a multiple
of its chunk; other states are kept twice, now and at the end of a block. By itself vLLM caches no
prefixes of models with states. Models whose layers are all alike have one group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from wattcast.serving.step_coefficients import STEPS
from wattcast.workload.build_model import trace_pass
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import (
    ModelOptions,
    OutputHead,
    WorkloadPhase,
)

_FEW_TOKENS = 16  # fewer than any window
_LONGEST_WINDOW = 1 << 18


class CacheKind(StrEnum):
    """What the layers of a group keep of a request."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps, and how many layers are like it."""

    layers: int
    byte_per_token: int
    state_byte: int = 0
    window: int = 0  # tokens; 0: all
    chunk: int = 0  # tokens after which a state can be kept; 0: only the last ones

    @property
    def kind(self) -> CacheKind:
        """What it keeps."""
        if not self.byte_per_token:
            return CacheKind.STATE
        return CacheKind.WINDOW if self.window else CacheKind.FULL


@dataclass(frozen=True)
class CacheGroups:
    """The groups of layers that have blocks of their own."""

    block_tokens: int
    block_byte: float  # over all layers of a group
    full: int = 1  # groups that keep all tokens
    windows: tuple[int, ...] = ()  # tokens that a group keeps, by group
    states: int = 0  # blocks of states of a request

    @property
    def count(self) -> int:
        """The number of groups that keep tokens."""
        return self.full + len(self.windows)

    def count_kept_tokens(
        self,
        tokens: int,
        step_tokens: int = 1,
    ) -> int:
        """Return what windows and states keep behind so many tokens, in tokens of blocks.

        While a prompt is computed, a window holds the tokens of a step besides.
        """
        tokens_of_blocks = self.states * self.block_tokens
        for window in self.windows:
            tokens_of_blocks += min(tokens, window - 1 + step_tokens)
        return tokens_of_blocks

    def count_slots(self, tokens: float) -> float:
        """Return all that a request of so many tokens keeps, in tokens of blocks."""
        return self.full * tokens + self.count_kept_tokens(math.ceil(tokens))

    def count_request_blocks(
        self,
        tokens: int,
        step_tokens: int,
    ) -> int:
        """Return the blocks that an engine reckons with for a request of so many tokens."""
        blocks = self.full * -(-tokens // self.block_tokens) + self.states
        for window in self.windows:
            # one more, since a window may begin inside a block
            blocks += -(-min(window - 1 + step_tokens, tokens) // self.block_tokens) + 1
        return blocks

    def count_sequences(
        self,
        cache_byte: float,
        tokens: int,
        step_tokens: int,
    ) -> float:
        """Return how many requests of so many tokens fit, as the engine says when it starts."""
        return cache_byte // self.block_byte / self.count_request_blocks(tokens, step_tokens)

    def convert_engine_tokens(
        self,
        cache_tokens: int,
        longest: int,
        step_tokens: int,
    ) -> int:
        """Return the tokens of all blocks of a cache of which an engine says "so many tokens".

        An engine counts how many requests of its greatest length fit, times that length. Where a
        window keeps less of them, its blocks are fewer than those tokens of all groups.
        """
        if self.count == 1 and not self.windows and not self.states:
            return cache_tokens
        request_blocks = self.count_request_blocks(longest, step_tokens)
        return round(cache_tokens / longest * request_blocks) * self.block_tokens


def group_layers(
    caches: Sequence[LayerCache],
    block_tokens: int,
    *,
    prefix_caching: bool = True,
) -> CacheGroups:
    """Return the groups of layers with these caches.

    With prefix caching an engine keeps two states of a request: the one that is computed, and one
    at the end of a block. Where states come in chunks, it keeps one of every block.
    """
    layers_alike = _count_layers_alike(caches)
    states, attention = _part_states(caches)
    if len(layers_alike) == 1 and not states:
        return _make_one_group(caches, block_tokens)

    keeps_state_a_block = False
    if states and attention:
        keeps_state_a_block = prefix_caching and all(cache.chunk for cache in states)
        if keeps_state_a_block:
            block_tokens = math.lcm(block_tokens, *(cache.chunk for cache in states))
        block_tokens *= _count_blocks_a_state(states, attention, block_tokens)

    group_size = _choose_group_size(list(layers_alike.values()))
    pages_byte = [cache.state_byte for cache in states]
    pages_byte += [block_tokens * cache.byte_per_token for cache in attention]
    groups = CacheGroups(block_tokens, group_size * max(pages_byte), full=0)
    for (kind, window, _), layers in layers_alike.items():
        count = math.ceil(layers / group_size)
        if kind is CacheKind.WINDOW:
            groups = replace(groups, windows=groups.windows + count * (window,))
        elif kind is CacheKind.FULL or keeps_state_a_block:
            groups = replace(groups, full=groups.full + count)
        else:
            states_a_request = 1 + prefix_caching  # now, and at the end of a block
            groups = replace(groups, states=groups.states + count * states_a_request)
    return groups


def _count_layers_alike(
    caches: Sequence[LayerCache],
) -> dict[tuple[CacheKind, int, int], int]:
    """Return the number of layers by what they keep: kind, window and bytes a token."""
    layers: dict[tuple[CacheKind, int, int], int] = defaultdict(int)
    for cache in caches:
        layers[cache.kind, cache.window, cache.byte_per_token] += cache.layers
    return layers


def _part_states(
    caches: Sequence[LayerCache],
) -> tuple[list[LayerCache], list[LayerCache]]:
    """Part the caches of states from those of attention."""
    states: list[LayerCache] = []
    attention: list[LayerCache] = []
    for cache in caches:
        part = states if cache.kind is CacheKind.STATE else attention
        part.append(cache)
    return states, attention


def _make_one_group(caches: Sequence[LayerCache], block_tokens: int) -> CacheGroups:
    """Return the only group of a model whose layers all keep the same tokens."""
    byte_per_token = sum(cache.layers * cache.byte_per_token for cache in caches)
    window = caches[0].window
    if window:
        return CacheGroups(block_tokens, block_tokens * byte_per_token, 0, (window,))
    return CacheGroups(block_tokens, block_tokens * byte_per_token)


def _count_blocks_a_state(
    states: Sequence[LayerCache],
    attention: Sequence[LayerCache],
    block_tokens: int,
) -> int:
    """Return how many blocks of attention together are no smaller than a state."""
    largest_state_byte = max(cache.state_byte for cache in states)
    largest_block_byte = block_tokens * max(cache.byte_per_token for cache in attention)
    return max(math.ceil(largest_state_byte / largest_block_byte), 1)


def _choose_group_size(layers: Sequence[int]) -> int:
    """Return the layers of a group, from the numbers of layers that are alike.

    It is the least of them, or the most where that is hardly more: smaller groups are padded.
    """
    least = min(layers)
    most = max(layers)
    return most if most < STEPS.padded_layers * least else least


def has_mixed_caches(model: ModelSpec) -> bool:
    """Whether some layers keep something else than all tokens."""
    groups = getattr(model.dims, "layer_groups", ())
    return any(group.window or group.chunk or group.mixer != "attention" for group in groups)


def keeps_prefixes(model: ModelSpec) -> bool:
    """Whether vLLM caches prefixes of a model by itself: not where layers keep states."""
    groups = getattr(model.dims, "layer_groups", ())
    return all(group.mixer in ("attention", "none") for group in groups)


def measure_layer_caches(model: ModelSpec, options: ModelOptions) -> list[LayerCache]:
    """Return what the layers of a stage keep, from passes over few tokens and over one more."""
    few = _trace_caches(model, options, WorkloadPhase.PREFILL, _FEW_TOKENS)
    more = _trace_caches(model, options, WorkloadPhase.PREFILL, _FEW_TOKENS + 1)
    long = _trace_caches(model, options, WorkloadPhase.DECODE, _LONGEST_WINDOW)
    caches = []
    for (layers, first), (_, second), (_, last) in zip(few, more, long, strict=True):
        slope = second - first
        state = first - slope * _FEW_TOKENS
        seen_tokens = round((last - state) / slope) if slope else 0
        window = seen_tokens if 0 < seen_tokens < _LONGEST_WINDOW else 0
        if first:
            chunk = 0 if slope else _find_chunk(model)
            caches.append(
                LayerCache(
                    layers,
                    slope,
                    state,
                    window,
                    chunk,
                )
            )
    return caches


def _find_chunk(model: ModelSpec) -> int:
    """Return the tokens of a chunk of Mamba's scan; 0 for other rules, which keep the last
    states.
    """
    groups = getattr(model.dims, "layer_groups", ())
    rules = {group.mixer.split()[-1] for group in groups} - {"attention", "none"}
    if rules == {"mamba"}:
        return STEPS.mamba_chunk
    return int(model.dims.state.chunk) if rules == {"mamba2"} else 0


def _trace_caches(
    model: ModelSpec,
    options: ModelOptions,
    phase: WorkloadPhase,
    tokens: int,
) -> list[tuple[int, int]]:
    """Return the layers of each section of one pass, and the bytes that one of them keeps."""
    one_sequence = replace(
        options,
        phase=phase,
        batch=1,
        seq=tokens,
        head=OutputHead.NONE,
    )
    program = trace_pass(model, one_sequence)
    caches = [(section.repeat, section.tape.cache_byte) for section in program.sections]
    program.release()
    return caches
