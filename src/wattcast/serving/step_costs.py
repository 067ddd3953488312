"""Tabulate what one step of a serving engine costs on its GPU, so that a simulation looks up and
never predicts.

A step computes T tokens: B sequences decode behind a mean context c, and prompt chunks of q tokens
come behind the p tokens of theirs that were computed before. Its kernels add up:

    cost = tokens(T) + head(rows) + decode(B, c) + Σ prompt(q, p)

``tokens`` are the products and elementwise kernels over all tokens together, ``head`` the
language-model head over the sequences that yield a token, ``decode`` and ``prompt`` the attention
of either kind; prompts share one kernel, so that a further one costs less than the first. Each cost
is a row of latencies at several clocks followed by energies at the same clocks; between the clocks,
and between tabulated sizes, costs are linear. Decode-only steps are padded to the size of a
captured CUDA graph.

An engine that spreads its weights over S pipeline stages runs S batches at once, each on another
stage. A batch meets all S stages one after the other and keeps each busy for 1/S of its time, so it
costs what ``tp`` GPUs would take for S times the layers of the largest stage: the engine is
simulated as S *lanes* of ``tp`` GPUs, which share weights and cache. Data-parallel engines that
share their experts are lanes with a cache of their own."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import WattcastError, bad_value
from wattcast.hardware import Gpu
from wattcast.kernels import LibraryStyle
from wattcast.predictor.api import check_formats, resolve_settings
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.engine_host import HostTimes, LaunchCounts, load_host_times
from wattcast.predictor.pipeline import analyse_graphs, total_at_clock
from wattcast.workload import engine_operators as engine
from wattcast.workload.build_model import build_graph, compute_footprint
from wattcast.workload.engine_operators import LatentAttention, PagedAttention
from wattcast.workload.engine_schedule import ATTENTION
from wattcast.workload.graph import Block, Graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions, OutputHead, WorkloadPhase
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Attention

CLOCK_SHARES = (
    1.0,
    0.92,
    0.84,
    0.76,
    0.68,
    0.6,
    0.5,
    0.35,
)  # of the top clock, where costs are tabulated
# beyond captured sizes: both sides of where one more token starts another row of tiles
TOKEN_KNOTS = (
    *(
        513,
        640,
        768,
        769,
        1024,
        1025,
        1280,
        1281,
        1536,
        1537,
        2048,
        2049,
        2560,
        2561,
        3072,
        4096,
        6144,
        8192,
        12288,
    ),
    *(16384, 32768, 65536, 131072),
)
BATCH_KNOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096)
DECODE_KNOTS = (  # closer, since one more sequence may start another wave of attention's tiles
    *(
        1,
        2,
        4,
        8,
        16,
        20,
        24,
        32,
        36,
        48,
        52,
        64,
        72,
        80,
        96,
        112,
        128,
        160,
        192,
        224,
        256,
        320,
        384,
        512,
        1024,
    ),
    *(2048, 4096),
)
CONTEXT_KNOTS = (16, 256, 1024, 4096, 16384, 131072)
PROMPT_KNOTS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CONTEXT_PARTS = 8  # into which the uneven contexts of a batch are grouped, as in measured kernels
SHORT_CONTEXT = 64  # tokens: one block of keys, whatever the spread
PACKED_PROMPTS = 8  # of a step, by which the attention of a further one is taken
EARLIER_TOKENS = (
    16384  # context at which the slope of prompt attention over earlier tokens is taken
)


# of a step: tokens in all, sequences that decode, their mean context, chunks of prompts (tokens,
# and tokens computed before them), sequences that yield a token
StepShape = tuple[int, int, float, Sequence[tuple[int, float]], int]


@dataclass(frozen=True)
class StepCosts:
    """Costs of steps of one model on one GPU of a replica. A row holds latencies, then energies, by
    clock.
    """

    clock_hz: Array  # (clock,), falling
    tokens: Array  # (tokens + 1, row)
    head: Array  # (tokens sampled + 1, row)
    decode: Array  # (sequences + 1, context knot, row)
    contexts: tuple[float, ...]  # (context knot,)
    prompt: Array  # (tokens + 1, row) a chunk with nothing before it
    prompt_more: (
        Array  # (tokens + 1, row) a further one: the chunks of a step share one attention kernel
    )
    prompt_slope: Array  # (tokens + 1, row) per token computed before
    padded: tuple[
        int, ...
    ]  # (tokens + 1,) size of the graph that holds so many tokens, or the tokens
    limit_w: float  # mean power the governor holds
    idle_w: float  # no request in the engine
    waiting_w: float  # between kernels
    layers: int
    loose_layers: float  # that a step without graphs launches, with what experts add
    same_loose_layers: float  # the same in a step like the one before
    cache_tokens: int  # room of the paged cache
    cache_byte_per_token: float  # on one GPU, or one of each stage
    block_tokens: int
    gpu_count: int  # of a lane
    gpu: str
    model: str
    host: HostTimes
    assumptions: tuple[str, ...]
    stages: int = 1  # of the pipeline, each with a batch of its own
    lanes: int = 1  # stages times data-parallel engines that share experts
    scans: int = 0  # layers whose scan no graph holds where there are prompts

    @property
    def clocks(self) -> int:
        """Number of clocks in a row."""
        return len(self.clock_hz)

    def cap_clock(self, clock_hz: float, gpu: Gpu) -> StepCosts:
        """Return the costs where the clock is set to ``clock_hz`` at most, at which a pause draws
        less too.
        """
        if clock_hz >= self.clock_hz[0]:
            return self
        idle_w = float(bundle_for(gpu).power.idle_power_w(clock_hz))
        capped: dict[str, Any] = {
            n: _cap_columns(table, self.clock_hz, clock_hz) for n, table in self._tables.items()
        }
        capped["clock_hz"] = np.append(clock_hz, self.clock_hz[self.clock_hz < clock_hz])
        return replace(self, **capped, idle_w=idle_w, waiting_w=idle_w * self.host.waiting_power)

    def count_governed_clocks(self) -> int:
        """Count the clocks, from the highest, to which the power limit can drive a step.

        The rest are never needed: a step draws no more than the part of it that draws most, and
        the mean power before is within the limit.
        """
        return int(np.argmax(np.append(self.part_power_w, 0.0) <= self.limit_w)) + 1

    @cached_property
    def part_power_w(self) -> Array:
        """The most power that a part of a step draws at each clock, ``(clock,)``."""
        most_w = np.zeros(self.clocks)
        for table in self._tables.values():
            seconds, joules = np.split(table.reshape(-1, 2 * self.clocks), 2, axis=-1)
            idle_w = np.where(joules > 0.0, np.inf, 0.0)
            power_w = np.divide(joules, seconds, out=idle_w, where=seconds > 0.0)
            most_w = np.maximum(most_w, power_w.max(axis=0))
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
        self, tokens: int, decodes: int, layer_s: float = 0.0, factor: float = 1.0
    ) -> float:
        """Return the host's time to launch a step of traffic: a graph, and layers at ``layer_s``
        each.

        ``factor`` is how long layers take now.
        """
        return self.host.launch_s(self.launches, tokens, decodes, layer_s, factor)

    @cached_property
    def launches(self) -> LaunchCounts:
        """What the host launches in a step."""
        return LaunchCounts(self.layers, self.loose_layers, self.same_loose_layers, self.scans)

    def mixed_cost(self, *step: *StepShape) -> Array:
        """Return the cost of a step, padded to a captured size.

        A sequence that only pads the graph has no context, so attention passes over it.
        """
        return np.asarray(self._add_costs(list(self._tables.values()), step))

    def decode_cost(self, tokens: int, decodes: int, context: float) -> Array:
        """Return the cost of a step in which ``decodes`` sequences yield ``tokens`` and nothing
        else happens.
        """
        return self.mixed_cost(tokens, decodes, context, (), tokens)

    def cost_at_top(self, *step: *StepShape) -> complex:
        """Return ``mixed_cost`` at the top clock as seconds + i·joules, several times as fast."""
        cost: complex = self._add_costs(self._top, step)
        return cost

    def _add_costs(self, tables: Sequence[Any], step: StepShape) -> Any:
        """Add up the entries of a step, rows or numbers; beyond the last context the line of
        attention goes on.
        """
        by_tokens, head, decode, prompt, more, slope = tables
        tokens, decodes, context, chunks, sampled = step
        cost = by_tokens[self.padded[tokens]] + head[sampled]
        if decodes:
            place = min(max(bisect_left(self.contexts, context), 1), len(self.contexts) - 1)
            low = self.contexts[place - 1]
            high = self.contexts[place]
            share = (context - low) / (high - low)
            attention = decode[decodes]
            cost = cost + ((1.0 - share) * attention[place - 1] + share * attention[place])
        for place, (chunk, before) in enumerate(chunks):
            cost = cost + ((more if place else prompt)[chunk] + before * slope[chunk])
        return cost

    @cached_property
    def _tables(self) -> dict[str, Array]:
        return {
            name: getattr(self, name)
            for name in ("tokens", "head", "decode", "prompt", "prompt_more", "prompt_slope")
        }

    @cached_property
    def _top(self) -> list[Any]:
        """Seconds + i·joules at the top clock as lists, which Python reads several times as fast as
        arrays.
        """
        return [
            (table[..., 0] + 1j * table[..., self.clocks]).tolist()
            for table in self._tables.values()
        ]


@dataclass(frozen=True)
class TokenCost:
    """Cost of a token in the largest step, attention left out, by clock."""

    clock_hz: Array  # (clock,), falling
    row: Array  # latencies, then energies

    def least_cost(self, clock_hz: float) -> tuple[float, float]:
        """Return the least seconds and joules at clocks of ``clock_hz`` at most."""
        seconds, joules = np.split(_cap_columns(self.row, self.clock_hz, clock_hz), 2)
        return float(seconds.min()), float(joules.min())


def predict_token_cost(
    model: ModelSpec, gpu: Gpu, options: ModelOptions, max_tokens: int = 8192
) -> TokenCost:
    """Predict the cost of a token on a lane: on one of its GPUs, or one in each stage."""
    _cache_tokens(model, gpu, options, max_tokens, 16, 0.9)
    largest = replace(
        options, phase=WorkloadPhase.PREFILL, batch=1, seq=max_tokens, head=OutputHead.NONE
    )
    clocks_hz = _list_clocks(gpu)
    (row,) = _predict_rows(gpu, clocks_hz, [_without_attention(build_graph(model, largest))])[0]
    return TokenCost(clocks_hz, options.pp * row / max_tokens)


@dataclass(frozen=True)
class LoneRequest:
    """Time of a request that is alone in its engine, by clock: no plan can do better."""

    clock_hz: Array  # (clock,), falling
    first_token_s: Array  # (clock,) kernels of the prompt
    next_token_s: Array  # (clock,) kernels of a decode step

    def least_s(self, clock_hz: float) -> tuple[float, float]:
        """Return the least seconds of the first and of a further token at ``clock_hz`` at most."""
        both = np.stack([self.first_token_s, self.next_token_s])
        doubled = np.concatenate([both, both], axis=-1)  # ``_cap_columns`` wants pairs of halves
        first, later = np.split(_cap_columns(doubled, self.clock_hz, clock_hz), 2, axis=-1)[0]
        return float(first.min()), float(later.min())


def predict_lone_request(
    model: ModelSpec, gpu: Gpu, options: ModelOptions, prompt: int, context: int
) -> LoneRequest:
    """Predict a prompt of so many tokens, and a decode step of one sequence behind a context.

    Only kernels are counted, without the head, the host and the sampling of a token. The stages
    of a pipeline work one after the other on a request that is alone.
    """
    alone = replace(options, batch=1, head=OutputHead.NONE)
    first = build_graph(model, replace(alone, phase=WorkloadPhase.PREFILL, seq=prompt))
    later = build_graph(model, replace(alone, phase=WorkloadPhase.DECODE, seq=context))
    clocks_hz = _list_clocks(gpu)
    (rows,) = _predict_rows(gpu, clocks_hz, [first, later])
    first_s, later_s = options.pp * rows[:, : len(clocks_hz)]
    return LoneRequest(clocks_hz, first_s, later_s)


def _cap_columns(table: Array, clocks_hz: Array, clock_hz: float) -> Array:
    """Return a table's rows at ``clock_hz``, linear between clocks, and at the clocks below it."""
    place = int(np.argmax(np.append(clocks_hz, 0.0) < clock_hz))
    if place == 0:
        return table
    low = min(place, len(clocks_hz) - 1)
    share = (clock_hz - clocks_hz[low]) / (clocks_hz[low - 1] - clocks_hz[low])
    capped = []
    for half in np.split(table, 2, axis=-1):
        capped += [
            (1.0 - share) * half[..., low : low + 1] + share * half[..., low - 1 : low],
            half[..., place:],
        ]
    return np.concatenate(capped, axis=-1)


def _list_clocks(gpu: Gpu, clock_hz: float | None = None) -> Array:
    """Return the clocks at which costs are tabulated, falling from ``clock_hz`` or the top clock."""
    top_hz = float(np.max(gpu.clocks.max_hz)) if clock_hz is None else clock_hz
    least_hz = min(
        float(np.min(gpu.clocks.min_hz)) if gpu.clocks.min_hz is not None else 0.3 * top_hz, top_hz
    )
    return np.unique(np.maximum(top_hz * np.array(CLOCK_SHARES), least_hz))[::-1]


def tabulate_step_costs(
    model: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    *,
    max_tokens: int = 8192,
    max_seqs: int = 256,
    longest_context: int = 16384,
    context_spread: float = 0.0,
    tokens_a_step: int = 1,
    block_tokens: int = 16,
    memory_utilisation: float = 0.9,
    clock_hz: float | None = None,
    power_limit_w: float | None = None,
) -> StepCosts:
    """Predict the table of a model on a GPU. ``options`` give number format and parallelism.

    The cache takes what is left of ``memory_utilisation`` of the visible memory after weights and
    the activations of the largest step. ``context_spread`` is the standard deviation of the
    contexts in a batch over their mean: attention takes longer over uneven contexts. A set
    ``clock_hz`` is the highest clock; the power limit may still lower it."""
    host = load_host_times()
    bundle = bundle_for(gpu)
    step = (
        build_graph(model, replace(options, phase=WorkloadPhase.DECODE, batch=1, seq=16))
        .blocks[0]
        .step
    )
    assert step is not None, "costs are those of an inference engine"
    launches = step.launches
    if launches.large_graphs:
        host = host.capture_large_graphs()
    clocks_hz = _list_clocks(gpu, clock_hz)
    limit_w = float(np.mean(gpu.power.limit_w)) if power_limit_w is None else power_limit_w
    cache_tokens, cache_byte_per_token, cache_note = _cache_tokens(
        model, gpu, options, max_tokens, block_tokens, memory_utilisation
    )

    def graph(phase: WorkloadPhase, batch: int, seq: int, head: OutputHead) -> Graph:
        return build_graph(model, replace(options, phase=phase, batch=batch, seq=seq, head=head))

    largest = max(max_tokens, max_seqs)
    captured = host.capture_sizes
    padded = (
        captured[bisect_left(captured, n)] if n <= captured[-1] else n
        for n in range(1, largest + 1)
    )
    token_knots = _place_knots((*captured, *TOKEN_KNOTS), largest)
    batch_knots = _place_knots(BATCH_KNOTS, max_seqs)
    decode_knots = _place_knots(DECODE_KNOTS, max_seqs)
    prompt_knots = _place_knots(PROMPT_KNOTS, max_tokens)
    contexts = np.array(_place_knots(CONTEXT_KNOTS, max(longest_context, 32)))
    prefills = {
        t: graph(WorkloadPhase.PREFILL, 1, t, OutputHead.NONE)
        for t in {*token_knots, *prompt_knots}
    }
    whole = prefills[token_knots[-1]]
    steps = [graph(WorkloadPhase.DECODE, 1, int(c), OutputHead.NONE) for c in contexts]
    kinds = (OutputHead.LAST, OutputHead.NONE)
    shares = _context_shares(context_spread)
    tokens, whole_steps, headless, decode, attention, packed, later = _predict_rows(
        gpu,
        clocks_hz,
        [_without_attention(prefills[t]) for t in token_knots],
        *(
            [graph(WorkloadPhase.DECODE, b, int(contexts[0]), kind) for b in batch_knots]
            for kind in kinds
        ),
        [_only_attention(step, batch=b, shares=shares) for b in decode_knots for step in steps],
        [_only_attention(prefills[t]) for t in prompt_knots],
        [
            _only_attention(graph(WorkloadPhase.PREFILL, PACKED_PROMPTS, t, OutputHead.NONE))
            for t in prompt_knots
        ],
        [_only_attention(prefills[t], before=EARLIER_TOKENS) for t in prompt_knots],
    )
    tokens_dense = _interpolate_rows(token_knots, tokens, largest)
    decode = decode.reshape(len(decode_knots), len(contexts), -1)
    places = [decode_knots.index(b) for b in batch_knots]
    other = (
        headless - tokens_dense[list(batch_knots)] - decode[places, 0]
    )  # latent attention decodes another way
    decode = _interpolate_rows(decode_knots, decode, max_seqs)
    decode += _interpolate_rows(batch_knots, other, max_seqs)[:, np.newaxis]
    slope = np.maximum((later - attention) / EARLIER_TOKENS, 0.0)
    more = np.clip((packed - attention) / (PACKED_PROMPTS - 1), 0.0, attention)
    sampled = max_seqs * (tokens_a_step + 1)
    head_dense = _interpolate_rows(batch_knots, whole_steps - headless, sampled)
    resting_w = bundle.power.idle_power_w(clocks_hz)
    idle_w = float(resting_w[0])
    stages = options.pp
    watts = idle_w * host.waiting_power
    if stages > 1:  # while the last stage has its head, the others wait
        alone_s, alone_j = np.split(head_dense, 2, axis=-1)
        head_dense = np.concatenate(
            [alone_s, (alone_j + (stages - 1) * watts * alone_s) / stages], axis=-1
        )
    by_openai = bundle.reference.style is LibraryStyle.HOPPER
    counts = host.count_launches(launches, by_openai)
    alone = re.compile("no padding|one of .* stages|one of .* replicas")
    notes = [note for note in whole.assumptions if not alone.match(note)]
    notes.append(f"host times: {host.engine}, one process, asynchronous scheduling")
    shared = []
    if stages > 1:
        shared.append(
            f"{stages} pipeline stages run {stages} batches at once, each with its part of the cache"
        )
    if options.dp > 1:
        shared.append(
            f"{options.dp} engines share the experts and have steps of one size; none waits for another"
        )
    return StepCosts(
        clock_hz=clocks_hz,
        tokens=stages * tokens_dense,
        head=stages * head_dense,
        decode=stages * np.maximum(decode, 0.0),
        contexts=tuple(contexts.tolist()),
        prompt=stages * _interpolate_rows(prompt_knots, attention, max_tokens),
        prompt_more=stages * _interpolate_rows(prompt_knots, more, max_tokens),
        prompt_slope=stages * _interpolate_rows(prompt_knots, slope, max_tokens),
        padded=(0, *(min(size, largest) for size in padded)),
        limit_w=limit_w * bundle.governor_share,
        idle_w=idle_w,
        waiting_w=watts,
        layers=stages * launches.layers,
        loose_layers=stages * counts.loose_layers,
        same_loose_layers=stages * counts.same_loose_layers,
        cache_tokens=cache_tokens // stages,
        cache_byte_per_token=stages * cache_byte_per_token,
        block_tokens=block_tokens,
        gpu_count=options.tp,
        gpu=gpu.name,
        model=model.name,
        host=host,
        assumptions=(*notes, cache_note, *shared, *bundle.assumptions),
        stages=stages,
        lanes=stages * options.dp,
        scans=stages * launches.scans,
    )


def _predict_rows(gpu: Gpu, clocks_hz: Array, *tables: Sequence[Graph]) -> list[Array]:
    """Return the rows of several tables of graphs, whose kernels are analysed together."""
    graphs = [graph for table in tables for graph in table]
    named = replace(graphs[0], name=graphs[0].name.split()[0])
    check_formats(named, gpu, "Choose another --quantization or --dtype.")
    _, at, bundle = resolve_settings(gpu, bundle_for(gpu), clock=clocks_hz, host_launch=0.0)
    totals = [
        total_at_clock(timeline, at, bundle) for timeline in analyse_graphs(graphs, gpu, bundle)
    ]
    rows = np.array([np.concatenate([one.latency_s, one.energy_j]) for one in totals])
    return np.split(rows, np.cumsum([len(table) for table in tables])[:-1])


def _place_knots(known: Sequence[int], most: int) -> tuple[int, ...]:
    return (*(knot for knot in known if knot < most), most)


def _interpolate_rows(knots: Sequence[int], rows: Array, most: int) -> Array:
    """Interpolate rows at ``knots`` to every size from 0 to ``most``; nothing costs nothing."""
    sizes = np.arange(most + 1)
    dense = np.repeat(rows[:1], most + 1, axis=0)
    if len(knots) > 1:
        place = np.clip(np.searchsorted(knots, sizes), 1, len(knots) - 1)
        low = np.array(knots)[place - 1]
        high = np.array(knots)[place]
        share = ((sizes - low) / (high - low)).reshape(-1, *[1] * (rows.ndim - 1))
        dense = rows[place - 1] + share * (rows[place] - rows[place - 1])
    dense[0] = 0.0
    return np.asarray(dense)


def _without_attention(graph: Graph) -> Graph:
    kept = [
        (block, tuple(op for op in block.ops if not isinstance(op, ATTENTION)))
        for block in graph.blocks
    ]
    blocks = tuple(replace(block, ops=ops) for block, ops in kept if ops)
    return Graph(graph.name, blocks, stack=graph.stack)


def _context_shares(spread: float) -> tuple[float, ...]:
    """Return the mean contexts of a batch's parts, shortest first, over the mean of all, if they
    are lognormal.

    The part of a lognormal's mean that lies below its quantile z is Φ(z - σ), with σ² = ln(1 +
    spread²)."""
    sigma = math.sqrt(math.log1p(spread**2))
    normal = NormalDist()
    inner = (
        normal.cdf(normal.inv_cdf(part / CONTEXT_PARTS) - sigma) for part in range(1, CONTEXT_PARTS)
    )
    shares = (CONTEXT_PARTS * (high - low) for low, high in pairwise((0.0, *inner, 1.0)))
    return tuple(shares) if spread else (1.0,)


def _only_attention(
    graph: Graph, *, batch: int = 0, before: int = 0, shares: Sequence[float] = (1.0,)
) -> Graph:
    """Keep attention alone: of ``batch`` sequences that decode behind contexts with these
    ``shares`` of the mean, or with ``before`` more keys for each sequence.
    """
    blocks = []
    for block in graph.blocks:
        ops = (op for op in block.ops if isinstance(op, ATTENTION))
        if kept := tuple(_change_attention(op, batch, before, shares) for op in ops):
            blocks.append(Block(kept, block.repeat, block.label))
    if not blocks:
        raise bad_value(
            graph.name, "a model with fused attention", "none", "Use --attention flash."
        )
    return Graph(f"{graph.name} attention", tuple(blocks), stack=graph.stack)


def _change_attention(op: Operator, batch: int, before: int, shares: Sequence[float]) -> Operator:
    """Return the attention of one sequence that decodes as that of ``batch``, whose contexts have
    these shares.

    Without a batch each sequence has ``before`` more keys, or as many as a window lets through.
    """
    if isinstance(op, PagedAttention):
        if not batch:
            return replace(op, groups=tuple((count, q, kv + before) for count, q, kv in op.groups))
        ((_, q, kv),), parts = op.groups, len(shares)
        counts = [batch * (i + 1) // parts - batch * i // parts for i in range(parts)]
        if kv <= SHORT_CONTEXT or batch < parts:
            counts = [batch]
            shares = (1.0,)
        groups = tuple(
            (count, q, max(round(kv * share), 1))
            for count, share in zip(counts, shares, strict=True)
        )
        return replace(
            op, groups=groups, splits=engine.GRAPH_SPLITS if batch <= engine.GRAPH_TOKENS else 0
        )
    assert isinstance(op, (Attention, LatentAttention))
    if batch:
        return replace(op, batch=batch)
    return replace(op, kv_len=op.kv_len + before if op.kv_len >= op.q_len else op.kv_len)


def _cache_tokens(
    model: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    max_tokens: int,
    block_tokens: int,
    utilisation: float,
) -> tuple[int, float, str]:
    """Return the tokens that fit into the cache, the bytes of one, and a sentence.

    tokens = (u M - weights - activations - workspace) / bytes a token
    """
    largest = replace(
        options, phase=WorkloadPhase.PREFILL, batch=1, seq=max_tokens, head=OutputHead.LAST
    )
    need = compute_footprint(model, largest)
    room = load_host_times().visible_memory * float(np.min(gpu.memory.capacity_byte)) * utilisation
    left = room - need.weight_byte - need.activation_byte - need.workspace_byte
    per_token = need.cache_byte / max_tokens
    tokens = int(left / per_token // block_tokens * block_tokens) if per_token else 1 << 40
    if tokens < block_tokens:
        raise WattcastError(
            f"{model.name}: weights of {1e-9 * need.weight_byte:.1f} GB leave no room for a cache in "
            f"{1e-9 * room:.1f} GB of {'the' if options.gpu_count == 1 else 'each'} {gpu.name}. "
            "Use more GPUs (tp, pp) or a smaller number format (--quantization)."
        )
    note = f"cache: {tokens} tokens, {utilisation:.0%} of the memory less weights and activations"
    return tokens, per_token, note
