"""Look up what one step of a serving engine costs on its GPU.

A step computes T tokens: B sequences decode behind a mean context c, and prompt chunks of q tokens
come behind the p tokens of theirs that were computed before. The costs of its kernels add up:

    cost = tokens(T) + head(rows) + decode(B, c) + Σ prompt(q, p)

``tokens`` are the products and elementwise kernels over all tokens together, ``head`` the
language-model head over the sequences that yield a token, ``decode`` and ``prompt`` the attention
of either kind. Prompts share one kernel, so that a further one costs less than the first. Each cost
is a row of latencies at several clocks followed by energies at the same clocks; between the clocks,
and between tabulated sizes, costs are linear. Decode-only steps are padded to the size of a
captured CUDA graph.

A draft model adds its passes (``DraftPasses``) to every step.

The tables are predicted once (``step_tabulation``), so that a simulation looks costs up and never
predicts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.engine_host import HostTimes, LaunchCounts
from wattcast.serving.cache_layout import CacheGroups

# A step as (tokens in all, sequences that decode, their mean context, chunks of prompts as tokens
# and the tokens computed before them, sequences that yield a token).
StepShape = tuple[int, int, float, Sequence[tuple[int, float]], int]

_ONE_GROUP = CacheGroups(16, 0.0)
_TABLES = ("tokens", "head", "decode", "prompt", "prompt_more", "prompt_slope")


@dataclass(frozen=True)
class StepCosts:
    """Costs of the steps of one model on one GPU of a replica.

    A row of a table holds latencies by clock, then energies by clock.
    """

    clock_hz: Array  # (clock,), falling
    tokens: Array  # (tokens + 1, row)
    head: Array  # (tokens sampled + 1, row)
    decode: Array  # (sequences + 1, context knot, row)
    contexts: tuple[float, ...]  # (context knot,)
    prompt: Array  # (tokens + 1, row) of a chunk with nothing before it
    # (tokens + 1, row) of a further chunk: the chunks of a step share one attention kernel
    prompt_more: Array
    prompt_slope: Array  # (tokens + 1, row) per token computed before
    # (tokens + 1,) the size of the graph that holds so many tokens, or the tokens themselves
    padded: tuple[int, ...]
    limit_w: float  # the mean power to which the governor limits the GPU
    idle_w: float  # no request is in the engine
    waiting_w: float  # between kernels
    layers: int
    loose_layers: float  # that a step without graphs launches, with what experts add
    same_loose_layers: float  # the same in a step like the one before
    cache_tokens: int  # of all blocks of the paged cache, each for one group of layers
    cache_byte_per_token: float  # on one GPU, or on one of each stage
    block_tokens: int
    gpu_count: int  # of a lane
    gpu: str
    model: str
    host: HostTimes
    assumptions: tuple[str, ...]
    stages: int = 1  # of the pipeline, each with a batch of its own
    lanes: int = 1  # stages times data-parallel engines that share experts
    scans: float = 0.0  # layers whose scan no graph holds where there are prompts
    expert_scans: float = 0.0  # ... and which have experts, too
    groups: CacheGroups = _ONE_GROUP  # of layers, with blocks of their own
    draft: DraftPasses | None = None  # in every step, besides what the tables hold

    @property
    def clocks(self) -> int:
        """Number of clocks in a row."""
        return len(self.clock_hz)

    def cap_clock(
        self,
        clock_hz: float,
        gpu: Gpu,
    ) -> StepCosts:
        """Return the costs where the clock is set to ``clock_hz`` at most.

        A pause draws less too at a lower clock.
        """
        if clock_hz >= self.clock_hz[0]:
            return self
        idle_w = float(bundle_for(gpu).power.idle_power_w(clock_hz))
        capped: dict[str, Any] = {}
        for name, table in self._tables.items():
            capped[name] = cap_columns(table, self.clock_hz, clock_hz)
        capped["clock_hz"] = np.append(clock_hz, self.clock_hz[self.clock_hz < clock_hz])
        if self.draft is not None:
            draft_costs = self.draft.costs.cap_clock(clock_hz, gpu)
            capped["draft"] = replace(self.draft, costs=draft_costs)
        return replace(
            self,
            **capped,
            idle_w=idle_w,
            waiting_w=idle_w * self.host.waiting_power,
        )

    def tell_factors(self, host: float, power: float) -> StepCosts:
        """Return the costs on a host and a card that take more or less than the usual ones.

        ``host`` scales what the host does in a step, ``power`` the joules of a step. The idle power
        of cards differs less, and stays.
        """
        if host == power == 1.0:
            return self
        told: dict[str, Any] = {}
        for name, table in self._tables.items():
            seconds, joules = np.split(table, 2, axis=-1)
            told[name] = np.concatenate([seconds, power * joules], axis=-1)
        return replace(self, **told, host=self.host.scale(host))

    def limit_power(self, limit_w: float) -> StepCosts:
        """Return the costs under another power limit, with what was derived from the tables."""
        limited = replace(self, limit_w=limit_w)
        for name in ("part_power_w", "token_line", "_lists_by_clock"):
            vars(limited)[name] = getattr(self, name)
        return limited

    def count_governed_clocks(self) -> int:
        """Count the clocks, from the highest, to which the power limit can drive a step.

        No lower clock is ever needed: a step draws no more than the part of it that draws most, and
        the mean power before is within the limit.
        """
        return int(np.argmax(np.append(self.part_power_w, 0.0) <= self.limit_w)) + 1

    @cached_property
    def part_power_w(self) -> Array:
        """The most power that a part of a step draws at each clock, ``(clock,)``."""
        most_w = np.zeros(self.clocks)
        for table in self._tables.values():
            seconds, joules = np.split(table.reshape(-1, 2 * self.clocks), 2, axis=-1)
            instant_w = np.where(joules > 0.0, np.inf, 0.0)  # where a part takes no time
            power_w = np.divide(joules, seconds, out=instant_w, where=seconds > 0.0)
            most_w = np.maximum(most_w, power_w.max(axis=0))
        if self.draft is not None:
            most_w = np.maximum(most_w, self.draft.costs.part_power_w)
        return most_w

    @cached_property
    def token_line(self) -> tuple[Array, Array]:
        """Cost of a step and of a token in it, such that no step costs less than their sum.

        A step over T tokens costs at least a + b T, where b is a token's cost in the largest step.
        """
        sizes = np.arange(1, len(self.tokens))[:, np.newaxis]
        per_token = self.tokens[-1] / sizes[-1]
        per_step = np.maximum((self.tokens[1:] - per_token * sizes).min(axis=0), 0.0)
        return per_step, per_token

    def count_transfer_s(self, byte_per_s: float) -> float:
        """Return the seconds that the cache of a token takes to another engine."""
        return self.cache_byte_per_token * self.gpu_count / byte_per_s

    def launch_s(
        self,
        tokens: int,
        decodes: int,
        layer_s: float = 0.0,
        factor: float = 1.0,
    ) -> float:
        """Return the host's time to launch a step of traffic: a graph, and layers at ``layer_s``.

        ``factor`` says how much longer than usual the layers take at this moment.
        """
        launch_s = self.host.launch_s(
            self.launches,
            tokens,
            decodes,
            layer_s,
            factor,
        )
        if self.draft is not None:
            launch_s += self.draft.launch_s(tokens, decodes, layer_s, factor)
        return launch_s

    @cached_property
    def launches(self) -> LaunchCounts:
        """What the host launches in a step."""
        return LaunchCounts(
            layers=self.layers,
            loose_layers=self.loose_layers,
            same_loose_layers=self.same_loose_layers,
            scans=self.scans,
            expert_scans=self.expert_scans,
        )

    def mixed_cost(self, *step: *StepShape) -> Array:
        """Return the cost of a step, padded to a captured size.

        A sequence that only pads the graph has no context, so attention passes over it.
        """
        tables = list(self._tables.values())
        cost = np.asarray(self._add_costs(tables, step))
        if self.draft is not None:
            cost = cost + self.draft.mixed_cost(step)
        return cost

    def decode_cost(
        self,
        tokens: int,
        decodes: int,
        context: float,
    ) -> Array:
        """Return the cost of a decode-only step, in which ``decodes`` sequences yield
        ``tokens``.
        """
        return self.mixed_cost(
            tokens,
            decodes,
            context,
            (),
            tokens,
        )

    def cost_at_top(self, *step: *StepShape) -> complex:
        """Return ``mixed_cost`` at the top clock as seconds + i·joules, several times as fast."""
        return self.cost_at_clock(step, 0)

    def cost_at_clock(self, step: StepShape, place: int) -> complex:
        """Return ``mixed_cost`` at one clock, counted from the top, as seconds + i·joules."""
        cost: complex = self._add_costs(self._list_tables(place), step)
        if self.draft is not None:
            cost += self.draft.cost_at_clock(step, place)
        return cost

    def decode_cost_at_top(
        self,
        tokens: int,
        decodes: int,
        context: float,
    ) -> complex:
        """Return ``decode_cost`` at the top clock, which a simulation asks for in every event."""
        by_tokens, head, decode, _, _, _ = self._top
        cost: complex = by_tokens[self.padded[tokens]] + head[tokens]
        contexts = self.contexts
        place = bisect_left(contexts, context, 1, len(contexts) - 1)
        low = contexts[place - 1]
        share = (context - low) / (contexts[place] - low)
        attention = decode[decodes]
        cost += (1.0 - share) * attention[place - 1] + share * attention[place]
        if self.draft is not None:
            cost += self.draft.cost_at_clock((tokens, decodes, context, (), tokens), 0)
        return cost

    def _add_costs(
        self,
        tables: Sequence[Any],
        step: StepShape,
    ) -> Any:
        """Add up the entries of a step, which are rows or complex numbers.

        Beyond the last context knot the line of attention goes on.
        """
        by_tokens, head, decode, prompt, more, slope = tables
        tokens, decodes, context, chunks, sampled = step
        cost = by_tokens[self.padded[tokens]] + head[sampled]
        if decodes:
            place = bisect_left(self.contexts, context, 1, len(self.contexts) - 1)
            low = self.contexts[place - 1]
            share = (context - low) / (self.contexts[place] - low)
            attention = decode[decodes]
            cost = cost + ((1.0 - share) * attention[place - 1] + share * attention[place])
        by_chunk = prompt
        for chunk, before in chunks:
            chunk_cost = by_chunk[chunk]
            if before:
                chunk_cost = chunk_cost + before * slope[chunk]
            cost = cost + chunk_cost
            by_chunk = more
        return cost

    @cached_property
    def _tables(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in _TABLES}

    @cached_property
    def _top(self) -> list[Any]:
        """The tables at the top clock, as seconds + i·joules."""
        return self._list_tables(0)

    def _list_tables(self, place: int) -> list[Any]:
        """Return the tables at one clock, as seconds + i·joules.

        They are lists, which Python reads several times as fast as arrays.
        """
        lists = self._lists_by_clock.get(place)
        if lists is None:
            lists = []
            for table in self._tables.values():
                complex_table = table[..., place] + 1j * table[..., self.clocks + place]
                lists.append(complex_table.tolist())
            self._lists_by_clock[place] = lists
        return lists

    @cached_property
    def _lists_by_clock(self) -> dict[int, list[Any]]:
        return {}


@dataclass(frozen=True)
class DraftPasses:
    """The passes of a draft model in each step of its target, on the same GPUs.

    To draft γ tokens of each sequence takes γ passes. The first computes all tokens of the step,
    which the draft model has not seen either, and the token of each sequence that the target has
    just drawn. Each later one computes one token of each sequence.
    """

    costs: StepCosts  # of one pass
    count: int  # γ

    def shape_passes(self, step: StepShape) -> tuple[StepShape, StepShape]:
        """Return the shapes of the first pass, and of a later one."""
        tokens, decodes, context, chunks, _ = step
        sequences = decodes + len(chunks)
        contexts = decodes * context + sum(chunk + before for chunk, before in chunks)
        mean_context = contexts / sequences + 0.5 * self.count
        first = (tokens + sequences, decodes, context, chunks, sequences)
        return first, (sequences, sequences, mean_context, (), sequences)

    def add_passes(self, step: StepShape, cost_of: Callable[[StepShape], Any]) -> Any:
        """Add up the costs of all passes of a step."""
        first, later = self.shape_passes(step)
        cost = cost_of(first)
        if self.count > 1:
            cost = cost + (self.count - 1) * cost_of(later)
        return cost

    def mixed_cost(self, step: StepShape) -> Array:
        """Return the cost of all passes of a step."""
        return np.asarray(self.add_passes(step, lambda one: self.costs.mixed_cost(*one)))

    def cost_at_clock(self, step: StepShape, place: int) -> complex:
        """Return ``mixed_cost`` at one clock, counted from the top, as seconds + i·joules."""
        cost: complex = self.add_passes(step, lambda one: self.costs.cost_at_clock(one, place))
        return cost

    def launch_s(
        self,
        tokens: int,
        decodes: int,
        layer_s: float = 0.0,
        factor: float = 1.0,
    ) -> float:
        """Return the host's time to launch all passes of a step, as ``StepCosts.launch_s`` does."""
        host = self.costs.host
        launches = self.costs.launches
        first_s = factor * host.launch_draft_s(launches, tokens + decodes, layer_s)
        later_s = host.launch_draft_s(launches, max(decodes, 1))
        return first_s + (self.count - 1) * later_s


def cap_columns(
    table: Array,
    clocks_hz: Array,
    clock_hz: float,
) -> Array:
    """Return a table's rows at ``clock_hz``, linear between clocks, and at the clocks below it."""
    place = int(np.argmax(np.append(clocks_hz, 0.0) < clock_hz))
    if place == 0:
        return table
    low = min(place, len(clocks_hz) - 1)
    share = (clock_hz - clocks_hz[low]) / (clocks_hz[low - 1] - clocks_hz[low])
    capped = []
    for half in np.split(table, 2, axis=-1):
        at_clock = (1.0 - share) * half[..., low : low + 1] + share * half[..., low - 1 : low]
        capped += [at_clock, half[..., place:]]
    return np.concatenate(capped, axis=-1)
