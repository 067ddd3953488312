"""Tabulate what the steps of a serving engine cost on its GPU (``step_costs``).

Kernels over all tokens, the language-model head and the attention of either kind are predicted at
some sizes, all together in one table of kernels, and are linear between them.

An engine that spreads its weights over S pipeline stages runs S batches at once, each on another
stage. A batch meets all S stages one after the other and keeps each busy for 1/S of its time, so it
costs what ``tp`` GPUs would take for S times the layers of the largest stage: the engine is
simulated as S *lanes* of ``tp`` GPUs, which share weights and cache. Data-parallel engines that
share their experts are lanes with a cache of their own.

A draft model shares the GPUs and the cache of its target. Its passes have a table of their own.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Self

import numpy as np

from wattcast.coefficients.coefficient_files import list_changes
from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.hardware import Gpu
from wattcast.hardware.card_coefficients import CARDS
from wattcast.kernels import LibraryStyle
from wattcast.kernels.engine_fusions import fuse_operators
from wattcast.options.setting_options import (
    USUAL_MACHINE,
    MachineOptions,
    SettingOptions,
)
from wattcast.predictor.bundle import Bundle, bundle_for
from wattcast.predictor.engine_host import (
    ENGINE,
    HostTimes,
    load_host_times,
)
from wattcast.predictor.machine_factors import UNTOLD, find_machine_factors
from wattcast.predictor.pipeline import analyse_graphs, total_at_clock
from wattcast.predictor.run_settings import resolve_settings
from wattcast.predictor.runnable_checks import check_formats
from wattcast.serving.cache_size import USUAL_CACHE, CacheSetting, measure_cache
from wattcast.serving.draft_models import choose_draft_options
from wattcast.serving.step_costs import DraftPasses, StepCosts
from wattcast.workload.build_model import build_graph
from wattcast.workload.engine_operators import (
    GRAPH_SPLITS,
    GRAPH_TOKENS,
    LatentAttention,
    PagedAttention,
)
from wattcast.workload.engine_schedule import (
    ATTENTION,
    STEP_TOKENS,
    EngineLaunches,
)
from wattcast.workload.graph import Block, Graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import (
    ModelOptions,
    OutputHead,
    WorkloadPhase,
)
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Attention

# Shares of the top clock at which costs are tabulated.
CLOCK_SHARES = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.5, 0.35)

# Sizes beyond the captured ones: both sides of where one more token starts another row of tiles.
TOKEN_KNOTS = (
    *(513, 640, 768, 769, 1024, 1025, 1280, 1281, 1536, 1537, 2048, 2049, 2560, 2561, 3072),
    *(4096, 6144, 8192, 12288, 16384, 32768, 65536, 131072),
)
BATCH_KNOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096)
# Closer than those of batches, since one more sequence may start another wave of attention's tiles.
DECODE_KNOTS = (
    *(1, 2, 4, 8, 16, 20, 24, 32, 36, 48, 52, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    *(384, 512, 1024, 2048, 4096),
)
CONTEXT_KNOTS = (16, 256, 1024, 4096, 16384, 131072)
PROMPT_KNOTS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

CONTEXT_PARTS = 8  # groups into which uneven contexts of a batch fall, as in measured kernels
SHORT_CONTEXT = 64  # tokens: contexts up to here take one block of keys
PACKED_PROMPTS = 8  # in the step from which the attention of a further prompt is taken
EARLIER_TOKENS = 16384  # at which the slope of a prompt's attention over them is taken

# Notes of a graph that hold for the largest step of one engine only.
_NOTES_OF_ONE_STEP = re.compile("no padding|one of .* stages|one of .* replicas")


@dataclass(frozen=True)
class StepRange:
    """The steps for which costs are tabulated: the largest, and how uneven their contexts are."""

    max_tokens: int = STEP_TOKENS
    max_seqs: int = 256
    longest_context: int = 16384
    # standard deviation of the contexts of a batch over their mean: attention takes longer over
    # uneven ones
    context_spread: float = 0.0
    tokens_a_step: int = 1  # of a sequence that decodes, drafted ones counted
    draft: ModelSpec | None = None  # the model that drafts them; None: they come for nothing


_USUAL_STEPS = StepRange()


def tabulate_step_costs(
    model: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    steps: StepRange = _USUAL_STEPS,
    *,
    cache_setting: CacheSetting = USUAL_CACHE,
    clock_hz: float | None = None,
    power_limit_w: float | None = None,
    machine: MachineOptions = UNTOLD,
) -> StepCosts:
    """Predict the table of a model on a GPU, and that of its draft model if it has one.

    ``options`` give number format and parallelism. The cache takes what weights and the activations
    of the largest step leave of the memory that the engine uses. A set ``clock_hz`` is the highest
    clock; the power limit may still lower it. ``machine`` tells how its host and card differ from
    the usual ones, if not as measured here.
    """
    setting = _EngineSetting(cache_setting, clock_hz, power_limit_w, machine)
    costs = _tabulate_model(model, gpu, options, steps, setting)
    if steps.draft is None:
        return costs
    passes = _tabulate_model(
        steps.draft,
        gpu,
        choose_draft_options(options),
        _range_draft_steps(steps),
        setting,
    )
    return replace(costs, draft=DraftPasses(passes, steps.tokens_a_step - 1))


@dataclass(frozen=True)
class _EngineSetting:
    """How an engine and its card are set; ``tabulate_step_costs`` describes the fields."""

    cache: CacheSetting
    clock_hz: float | None
    power_limit_w: float | None
    machine: MachineOptions


def _tabulate_model(
    model: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    steps: StepRange,
    setting: _EngineSetting,
) -> StepCosts:
    """Predict the table of one model, whatever drafts for it."""
    bundle = bundle_for(gpu)
    launches = _count_launches(model, options)
    host = load_host_times()
    if launches.large_graphs:
        host = host.capture_large_graphs()
    cache = measure_cache(
        model,
        gpu,
        options,
        steps.max_tokens,
        setting.cache,
        steps.draft,
    )

    # tables of one stage
    sizes = _place_sizes(host, steps)
    clocks_hz = list_clocks(gpu, setting.clock_hz)
    stage = _EngineStage.describe(gpu, bundle, model, options, steps, sizes, clocks_hz)
    tables, graph_notes = _recall_stage(stage)

    # a lane takes the layers of all stages
    stages = options.pp
    idle_w = float(bundle.power.idle_power_w(clocks_hz)[0])
    waiting_w = idle_w * host.waiting_power
    head = _add_waiting_stages(tables.head, stages, waiting_w) if stages > 1 else tables.head
    counts = host.count_launches(launches, bundle.reference.style is LibraryStyle.HOPPER)

    limit_w = setting.power_limit_w
    if limit_w is None:
        limit_w = float(np.mean(gpu.power.limit_w))
    notes = [note for note in graph_notes if not _NOTES_OF_ONE_STEP.match(note)]
    notes.append(f"host times: {ENGINE}, one process, asynchronous scheduling")
    notes.append(cache.note)
    notes += _describe_lanes(options)
    factors = find_machine_factors(gpu.name, setting.machine)
    notes += factors.notes
    costs = StepCosts(
        clock_hz=clocks_hz,
        tokens=stages * tables.tokens,
        head=stages * head,
        decode=stages * tables.decode,
        contexts=tuple(map(float, sizes.contexts)),
        prompt=stages * tables.prompt,
        prompt_more=stages * tables.prompt_more,
        prompt_slope=stages * tables.prompt_slope,
        padded=_pad_steps(host.capture_sizes, sizes.largest),
        limit_w=limit_w * bundle.governor_share,
        idle_w=idle_w,
        waiting_w=waiting_w,
        layers=stages * launches.layers,
        loose_layers=stages * counts.loose_layers,
        same_loose_layers=stages * counts.same_loose_layers,
        cache_tokens=cache.tokens // stages,
        groups=cache.groups,
        cache_byte_per_token=stages * cache.byte_per_token,
        block_tokens=cache.groups.block_tokens,
        gpu_count=options.tp,
        gpu=gpu.name,
        model=model.name,
        host=host,
        assumptions=(*notes, *bundle.assumptions),
        stages=stages,
        lanes=stages * options.dp,
        scans=stages * counts.scans,
        expert_scans=stages * counts.expert_scans,
    )
    return costs.tell_factors(factors.host, factors.power)


def _range_draft_steps(steps: StepRange) -> StepRange:
    """Return the steps of a draft model: one token more for each sequence, and none drafted."""
    return replace(
        steps,
        max_tokens=steps.max_tokens + steps.max_seqs,
        tokens_a_step=1,
        draft=None,
    )


def _count_launches(model: ModelSpec, options: ModelOptions) -> EngineLaunches:
    """Return what the host launches in a step of one stage."""
    decode = replace(
        options,
        phase=WorkloadPhase.DECODE,
        batch=1,
        seq=CONTEXT_KNOTS[0],
    )
    step = build_graph(model, decode).blocks[0].step
    assert step is not None, "costs are those of an inference engine"
    return step.launches


def _describe_lanes(options: ModelOptions) -> list[str]:
    """Say what stages and engines that share experts assume."""
    notes = []
    stages = options.pp
    if stages > 1:
        notes.append(
            f"{stages} pipeline stages run {stages} batches at once, each with its part of "
            "the cache"
        )
    if options.dp > 1:
        notes.append(
            f"{options.dp} engines share the experts and have steps of one size; "
            "none waits for another"
        )
    return notes


# Sizes at which costs are predicted


def list_clocks(gpu: Gpu, clock_hz: float | None = None) -> Array:
    """Return the clocks at which costs are tabulated, falling from ``clock_hz`` or the top
    clock.
    """
    top_hz = float(np.max(gpu.clocks.max_hz)) if clock_hz is None else clock_hz
    if gpu.clocks.min_hz is None:
        least_hz = CARDS.lowest_clock * top_hz
    else:
        least_hz = min(float(np.min(gpu.clocks.min_hz)), top_hz)
    return np.unique(np.maximum(top_hz * np.array(CLOCK_SHARES), least_hz))[::-1]


@dataclass(frozen=True)
class _StepSizes:
    """The sizes at which steps are predicted, rising; the last is the largest that is needed."""

    tokens: tuple[int, ...]
    batches: tuple[int, ...]  # sequences of a decode step
    decodes: tuple[int, ...]  # sequences whose attention decodes
    prompts: tuple[int, ...]  # tokens of a prompt's chunk
    contexts: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The most tokens of a step."""
        return self.tokens[-1]


def _place_sizes(host: HostTimes, steps: StepRange) -> _StepSizes:
    """Return the sizes at which steps of a range are predicted."""
    most_tokens = max(steps.max_tokens, steps.max_seqs)
    longest_context = max(steps.longest_context, 2 * CONTEXT_KNOTS[0])
    return _StepSizes(
        tokens=_place_knots((*host.capture_sizes, *TOKEN_KNOTS), most_tokens),
        batches=_place_knots(BATCH_KNOTS, steps.max_seqs),
        decodes=_place_knots(DECODE_KNOTS, steps.max_seqs),
        prompts=_place_knots(PROMPT_KNOTS, steps.max_tokens),
        contexts=_place_knots(CONTEXT_KNOTS, longest_context),
    )


def _place_knots(knots: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the knots below ``most``, and ``most``."""
    return (*(knot for knot in knots if knot < most), most)


def _pad_steps(captured: Sequence[int], largest: int) -> tuple[int, ...]:
    """Return the size of the CUDA graph that holds each number of tokens, from 0 to ``largest``.

    A step beyond the largest graph is not padded.
    """
    padded = [0]
    for tokens in range(1, largest + 1):
        place = bisect_left(captured, tokens)
        size = captured[place] if place < len(captured) else tokens
        padded.append(min(size, largest))
    return tuple(padded)


# Graphs of steps and of their parts


class _StepGraphs:
    """The graphs whose costs are predicted: whole steps, and steps without or of attention only."""

    def __init__(
        self,
        model: ModelSpec,
        options: ModelOptions,
        sizes: _StepSizes,
        shares: Sequence[float],
        engine: str = "",
    ) -> None:
        self.engine = engine  # whose attention it is; what that does itself is left out
        self.model = model
        self.options = options
        self.sizes = sizes
        self.shares = shares  # contexts of a batch's parts over their mean
        self._prefills = {}
        for tokens in {*sizes.tokens, *sizes.prompts}:
            self._prefills[tokens] = self._build(WorkloadPhase.PREFILL, 1, tokens)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the largest step assumes."""
        return self._prefills[self.sizes.tokens[-1]].assumptions

    def list_steps_without_attention(self) -> list[Graph]:
        """Return steps over all tokens, by their number."""
        return [remove_attention(self._prefills[tokens]) for tokens in self.sizes.tokens]

    def list_decode_steps(self, head: OutputHead) -> list[Graph]:
        """Return decode steps at the shortest context, by batch."""
        context = self.sizes.contexts[0]
        batches = self.sizes.batches
        return [self._build(WorkloadPhase.DECODE, batch, context, head) for batch in batches]

    def list_decode_attention(self) -> list[Graph]:
        """Return attention that decodes, by sequences and then by context."""
        steps = [self._build(WorkloadPhase.DECODE, 1, context) for context in self.sizes.contexts]
        graphs = []
        for batch in self.sizes.decodes:
            graphs += [_extract_attention(step, batch=batch, shares=self.shares) for step in steps]
        return graphs

    def list_prompt_attention(self, before: int = 0) -> list[Graph]:
        """Return the attention of one chunk behind ``before`` tokens, by its size."""
        prompts = self.sizes.prompts
        return [_extract_attention(self._prefills[tokens], before=before) for tokens in prompts]

    def list_packed_attention(self) -> list[Graph]:
        """Return the attention of several chunks in one step, by the size of each."""
        steps = [
            self._build(WorkloadPhase.PREFILL, PACKED_PROMPTS, tokens)
            for tokens in self.sizes.prompts
        ]
        return [_extract_attention(step) for step in steps]

    def _build(
        self,
        phase: WorkloadPhase,
        batch: int,
        seq: int,
        head: OutputHead = OutputHead.NONE,
    ) -> Graph:
        options = replace(
            self.options,
            phase=phase,
            batch=batch,
            seq=seq,
            head=head,
        )
        return fuse_operators(build_graph(self.model, options), self.engine)


def remove_attention(graph: Graph) -> Graph:
    """Return a graph without its attention."""
    blocks = []
    for block in graph.blocks:
        ops = tuple(op for op in block.ops if not isinstance(op, ATTENTION))
        if ops:
            blocks.append(replace(block, ops=ops))
    return Graph(graph.name, tuple(blocks), stack=graph.stack)


def _extract_attention(
    graph: Graph,
    *,
    batch: int = 0,
    before: int = 0,
    shares: Sequence[float] = (1.0,),
) -> Graph:
    """Return the attention of a graph.

    With a ``batch``, that many sequences decode, behind contexts with these ``shares`` of the mean.
    Otherwise each sequence has ``before`` more keys.
    """
    blocks = []
    for block in graph.blocks:
        attention = [op for op in block.ops if isinstance(op, ATTENTION)]
        changed = tuple(_change_attention(op, batch, before, shares) for op in attention)
        if changed:
            blocks.append(Block(changed, block.repeat, block.label))
    if not blocks:
        expected = "a model with fused attention"
        raise bad_value(graph.name, expected, "none", "Use --attention flash.")
    return Graph(f"{graph.name} attention", tuple(blocks), stack=graph.stack)


def _change_attention(
    op: Operator,
    batch: int,
    before: int,
    shares: Sequence[float],
) -> Operator:
    """Return the attention of one sequence that decodes as that of ``batch`` of them.

    Without a batch each sequence has ``before`` more keys, or as many as a window lets through.
    """
    if isinstance(op, PagedAttention):
        if batch:
            return _spread_contexts(op, batch, shares)
        groups = tuple((count, q, kv + before) for count, q, kv in op.groups)
        return replace(op, groups=groups)
    assert isinstance(op, (Attention, LatentAttention))
    if batch:
        return replace(op, batch=batch)
    is_whole = op.kv_len >= op.q_len  # no window cuts the keys
    return replace(op, kv_len=op.kv_len + before if is_whole else op.kv_len)


def _spread_contexts(
    op: PagedAttention,
    batch: int,
    shares: Sequence[float],
) -> PagedAttention:
    """Return attention of one sequence for ``batch`` of them, in parts of equal size by context."""
    ((_, q, kv),) = op.groups
    parts = len(shares)
    counts = [batch * (i + 1) // parts - batch * i // parts for i in range(parts)]
    if kv <= SHORT_CONTEXT or batch < parts:
        counts = [batch]
        shares = (1.0,)
    groups = []
    for count, share in zip(counts, shares, strict=True):
        groups.append((count, q, max(round(kv * share), 1)))
    splits = GRAPH_SPLITS if batch <= GRAPH_TOKENS else 0
    return replace(op, groups=tuple(groups), splits=splits)


def _context_shares(spread: float) -> tuple[float, ...]:
    """Return the mean contexts of a batch's parts over the mean of all, shortest first.

    Contexts are lognormal. The part of a lognormal's mean that lies below its quantile z is
    Φ(z - σ), with σ² = ln(1 + spread²).
    """
    if not spread:
        return (1.0,)
    sigma = math.sqrt(math.log1p(spread**2))
    normal = NormalDist()
    quantiles = [normal.inv_cdf(part / CONTEXT_PARTS) for part in range(1, CONTEXT_PARTS)]
    below = [0.0, *(normal.cdf(z - sigma) for z in quantiles), 1.0]
    return tuple(CONTEXT_PARTS * (high - low) for low, high in pairwise(below))


# Costs at these sizes, and at all sizes between


def predict_rows(
    gpu: Gpu,
    clocks_hz: Array,
    **tables: Sequence[Graph],
) -> dict[str, Array]:
    """Return a row for each graph of several tables, whose kernels are analysed together."""
    graphs: list[Graph] = []
    for table in tables.values():
        graphs += table
    named = replace(graphs[0], name=graphs[0].name.split()[0])
    check_formats(named, gpu, "Choose another --quantization or --dtype.")
    _, at, bundle = resolve_settings(
        gpu,
        bundle_for(gpu),
        SettingOptions(clock_hz=clocks_hz, host_launch_s=0.0),
        USUAL_MACHINE,
    )

    rows = []
    for timeline in analyse_graphs(graphs, gpu, bundle):
        total = total_at_clock(timeline, at, bundle)
        rows.append(np.concatenate([total.latency_s, total.energy_j]))
    ends = np.cumsum([len(table) for table in tables.values()])
    return dict(zip(tables, np.split(np.array(rows), ends[:-1]), strict=True))


@dataclass(frozen=True)
class _StageTables:
    """The tables of ``StepCosts`` for one stage of a pipeline."""

    tokens: Array
    head: Array
    decode: Array
    prompt: Array
    prompt_more: Array
    prompt_slope: Array


@dataclass(frozen=True, eq=False)
class _EngineStage:
    """All that decides the tables of a stage; stages of equal descriptions have the same tables."""

    gpu: Gpu
    bundle: Bundle  # the very one: its key is its identity
    model: ModelSpec
    options: ModelOptions
    sizes: _StepSizes
    context_spread: float
    clocks_hz: tuple[float, ...]
    most_sampled: int
    changes: tuple[tuple[str, float], ...]  # of coefficients, in trials

    @classmethod
    def describe(
        cls,
        gpu: Gpu,
        bundle: Bundle,
        model: ModelSpec,
        options: ModelOptions,
        steps: StepRange,
        sizes: _StepSizes,
        clocks_hz: Array,
    ) -> Self:
        """Describe a stage whose steps are of these sizes."""
        return cls(
            gpu,
            bundle,
            model,
            options,
            sizes,
            steps.context_spread,
            tuple(clocks_hz.tolist()),
            steps.max_seqs * (steps.tokens_a_step + 1),
            list_changes(),
        )

    @cached_property
    def key(self) -> str:
        """Describe everything, floats to the last digit."""
        parts = (getattr(self, item.name) for item in fields(self) if item.name != "bundle")
        return repr((id(self.bundle), *parts))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _EngineStage) and self.key == other.key


# Engines whose tables are remembered, of some megabytes each: runs of one engine at other rates,
# limits or hosts take the same ones.
_REMEMBERED_ENGINES = 8


@lru_cache(maxsize=_REMEMBERED_ENGINES)
def _recall_stage(stage: _EngineStage) -> tuple[_StageTables, tuple[str, ...]]:
    """Tabulate a stage once; return its tables and what its graphs assume."""
    shares = _context_shares(stage.context_spread)
    graphs = _StepGraphs(stage.model, stage.options, stage.sizes, shares, stage.gpu.engine)
    clocks_hz = np.array(stage.clocks_hz)
    tables = _tabulate_stage(stage.gpu, clocks_hz, graphs, stage.most_sampled)
    for item in fields(tables):
        getattr(tables, item.name).flags.writeable = False
    return tables, graphs.assumptions


def _tabulate_stage(
    gpu: Gpu,
    clocks_hz: Array,
    graphs: _StepGraphs,
    most_sampled: int,
) -> _StageTables:
    """Predict all parts of steps, and interpolate them to every size.

    ``most_sampled`` is the most sequences that yield a token in one step, drafted tokens counted.
    """
    sizes = graphs.sizes
    rows = predict_rows(
        gpu,
        clocks_hz,
        tokens=graphs.list_steps_without_attention(),
        decode_with_head=graphs.list_decode_steps(OutputHead.LAST),
        decode_without_head=graphs.list_decode_steps(OutputHead.NONE),
        decode_attention=graphs.list_decode_attention(),
        prompt=graphs.list_prompt_attention(),
        packed_prompts=graphs.list_packed_attention(),
        later_prompt=graphs.list_prompt_attention(before=EARLIER_TOKENS),
    )
    tokens = _interpolate_rows(sizes.tokens, rows["tokens"], sizes.largest)

    # What a decode step takes beyond its tokens and attention: latent attention decodes another
    # way.
    attention = rows["decode_attention"].reshape(len(sizes.decodes), len(sizes.contexts), -1)
    places = [sizes.decodes.index(batch) for batch in sizes.batches]
    without_head = rows["decode_without_head"]
    beyond = without_head - tokens[list(sizes.batches)] - attention[places, 0]
    most_seqs = sizes.batches[-1]
    decode = _interpolate_rows(sizes.decodes, attention, most_seqs)
    decode += _interpolate_rows(sizes.batches, beyond, most_seqs)[:, np.newaxis]

    # prompts: what a further chunk of a step adds, and the slope over the tokens before a chunk
    prompt = rows["prompt"]
    further = (rows["packed_prompts"] - prompt) / (PACKED_PROMPTS - 1)
    slope = (rows["later_prompt"] - prompt) / EARLIER_TOKENS
    most_prompt = sizes.prompts[-1]
    more = np.clip(further, 0.0, prompt)
    head = rows["decode_with_head"] - without_head
    return _StageTables(
        tokens=tokens,
        head=_interpolate_rows(sizes.batches, head, most_sampled),
        decode=np.maximum(decode, 0.0),
        prompt=_interpolate_rows(sizes.prompts, prompt, most_prompt),
        prompt_more=_interpolate_rows(sizes.prompts, more, most_prompt),
        prompt_slope=_interpolate_rows(sizes.prompts, np.maximum(slope, 0.0), most_prompt),
    )


def _interpolate_rows(
    knots: Sequence[int],
    rows: Array,
    most: int,
) -> Array:
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


def _add_waiting_stages(
    head: Array,
    stages: int,
    waiting_w: float,
) -> Array:
    """Return the mean cost of the head over all stages: the others wait while the last has it."""
    head_s, head_j = np.split(head, 2, axis=-1)
    mean_j = (head_j + (stages - 1) * waiting_w * head_s) / stages
    return np.concatenate([head_s, mean_j], axis=-1)


# The cache
