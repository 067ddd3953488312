"""Choose how GPUs share a training job: check the memory of every way, time those that may be best.

Tracing a micro-batch is most of the work, and what a pass keeps in memory is a straight line over
the sequences of a micro-batch, but for buffers of embeddings. So the two smallest micro-batches of
a layout are traced; a larger one only if it is timed, or if that line ends near the card's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wattcast.core.arrays import Array
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.options.training_options import Recompute, TrainingRecipe
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import predict_graphs
from wattcast.training import section_costs, step_time
from wattcast.training.microbatch import (
    MicrobatchWork,
    TrainingMemory,
    measure_memory,
    trace_microbatch,
)
from wattcast.training.optimiser_work import optimiser_graph
from wattcast.training.training_coefficients import TRAINING
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.model_catalogue import ModelSpec

PROGRESS_S = 1.0  # between two messages about the search
TRACED_FIRST = 2  # micro-batches of a layout, through which the line over the others goes
NEAR = 0.05  # share of the usable memory to either side of it, where the line is not trusted
_GROWING_BYTE = (
    "input_byte",
    "saved_byte",
    "product_byte",
    "peak_byte",
    "token_byte",
    "key_byte",
)


@dataclass(frozen=True)
class JobSetting:
    """What a job trains and how, on which GPU and at which clock or power limit."""

    model: ModelSpec
    gpu: Gpu
    at: OperatingPoint
    bundle: Bundle
    recipe: TrainingRecipe
    length: int  # tokens of a sequence
    links: step_time.ClusterLinks
    node_gpus: int  # GPUs of a node

    @property
    def usable_byte(self) -> float:
        """Memory of a GPU that a job can use."""
        return float(np.mean(self.gpu.memory.capacity_byte)) * TRAINING.usable_memory

    @property
    def limit_w(self) -> float:
        """The power limit, the default one where none is given."""
        set_limit_w = self.at.power_limit_w
        return float(np.mean(self.gpu.power.limit_w if set_limit_w is None else set_limit_w))

    @property
    def clocks_hz(self) -> Array:
        """The clocks at which steps are costed."""
        return np.ravel(np.asarray(section_costs.sweep_clocks(self.gpu, self.at).clock_hz))

    @property
    def waiting_w(self) -> Array:
        """Power of a GPU that waits for others or for an exchange, at every clock."""
        return self.bundle.power.idle_power_w(self.clocks_hz)

    def trace(self, strategy: TrainingStrategy) -> MicrobatchWork:
        """Trace a micro-batch of a strategy."""
        return trace_microbatch(
            self.model,
            self.recipe,
            strategy.micro_batch,
            self.length,
            strategy.tp,
            strategy.cp,
            strategy.ep,
            strategy.sequence_parallel,
        )


@dataclass(frozen=True)
class Candidate:
    """A strategy, what it needs and how fast it is."""

    strategy: TrainingStrategy
    memory: TrainingMemory
    fits: bool
    step: step_time.StepTime | None  # None where it does not fit
    swept: step_time.StepTime | None = field(default=None, repr=False)  # the step at all clocks
    cost: section_costs.MicrobatchCost | None = field(default=None, repr=False)


@dataclass
class SearchProgress:
    """Tells how far the search is, once a second."""

    tell: Callable[[str], None] | None = None
    _reported_s: float = field(default_factory=time.monotonic)

    def report(self, sentence: str) -> None:
        """Tell a line, unless the last one, or the begin, was less than a second ago."""
        now_s = time.monotonic()
        if self.tell is None or now_s - self._reported_s < PROGRESS_S:
            return
        self._reported_s = now_s
        self.tell(sentence)


def evaluate_strategies(
    job: JobSetting,
    strategies: Sequence[TrainingStrategy],
    force: bool,
    progress: SearchProgress,
) -> list[Candidate]:
    """Check the memory of every strategy, and time those that may be the best."""
    works = _trace_strategies(job, strategies, progress)
    memories = [measure_memory(works[way], job.recipe, way) for way in strategies]
    timed = _choose_timed(strategies, memories, job.usable_byte)
    if force and not timed:
        leanest = min(range(len(strategies)), key=lambda place: memories[place].total_byte)
        timed = {strategies[leanest]}
    # Those whose memory alone is known are traced here
    timed_works = {way: job.trace(way) for way in strategies if way in timed}
    for place, way in enumerate(strategies):
        if way in timed_works:
            memories[place] = measure_memory(timed_works[way], job.recipe, way)
    progress.report(f"timing {len(timed)} of {len(strategies)} ways that fit")
    steps = _time_strategies(job, timed_works)
    candidates = []
    for strategy, memory in zip(strategies, memories, strict=True):
        fits = memory.total_byte <= job.usable_byte
        if strategy not in steps:
            candidates.append(Candidate(strategy, memory, fits, None))
            continue
        swept, cost = steps[strategy]
        step = swept.hold_power(job.limit_w * job.bundle.governor_share)
        candidates.append(
            Candidate(
                strategy,
                memory,
                fits,
                step,
                swept,
                cost,
            )
        )
    return candidates


def _trace_strategies(
    job: JobSetting,
    strategies: Sequence[TrainingStrategy],
    progress: SearchProgress,
) -> dict[TrainingStrategy, MicrobatchWork]:
    """Return a micro-batch of every strategy; of larger ones, memory may be all that is right."""
    works: dict[TrainingStrategy, MicrobatchWork] = {}
    for ways_of_size in _group_by_layout(strategies):
        traced: dict[int, MicrobatchWork] = {}
        for size, ways in sorted(ways_of_size.items()):
            progress.report(f"{len(works)} of {len(strategies)} ways traced")
            work = None
            if len(traced) >= TRACED_FIRST:
                line = extrapolate_memory(traced, size)
                if not _is_near_limit(job, line, ways):
                    work = line
            if work is None:
                work = job.trace(ways[0])
                traced[size] = work
            works |= dict.fromkeys(ways, work)
    return works


def _is_near_limit(
    job: JobSetting,
    work: MicrobatchWork,
    ways: Sequence[TrainingStrategy],
) -> bool:
    """Whether one of these ways hardly fits, or hardly does not."""
    shares = [measure_memory(work, job.recipe, way).total_byte / job.usable_byte for way in ways]
    return any(abs(share - 1.0) < NEAR for share in shares)


def _group_by_layout(
    strategies: Sequence[TrainingStrategy],
) -> Iterator[dict[int, list[TrainingStrategy]]]:
    """Yield the strategies that differ in no size of a pass but the micro-batch, by that."""
    layouts: dict[tuple[int, int, int, bool], dict[int, list[TrainingStrategy]]] = {}
    for way in strategies:
        layout = (way.tp, way.cp, way.ep, way.sequence_parallel)
        layouts.setdefault(layout, {}).setdefault(way.micro_batch, []).append(way)
    yield from layouts.values()


def extrapolate_memory(traced: dict[int, MicrobatchWork], size: int) -> MicrobatchWork:
    """Return a micro-batch of ``size`` sequences for its memory alone, from two traced ones.

    With the bytes b of micro-batches of m and n sequences, those of ``size`` are
    b_n + (size - n)·(b_n - b_m) / (n - m). Its operators are those of the larger traced one.
    """
    m, n = sorted(traced)[-TRACED_FIRST:]
    sections = []
    for smaller, larger in zip(traced[m].sections, traced[n].sections, strict=True):
        grown = {}
        for name in _GROWING_BYTE:
            first = getattr(smaller, name)
            second = getattr(larger, name)
            grown[name] = second + (size - n) * (second - first) // (n - m)
        sections.append(replace(larger, **grown))
    return replace(traced[n], sections=tuple(sections))


def _time_strategies(
    job: JobSetting,
    works: dict[TrainingStrategy, MicrobatchWork],
) -> dict[TrainingStrategy, tuple[step_time.StepTime, section_costs.MicrobatchCost]]:
    """Return the step at all clocks, and the cost of a micro-batch, of each strategy."""
    unique = {id(work): work for work in works.values()}
    costs = section_costs.cost_microbatches(
        list(unique.values()),
        job.recipe,
        job.gpu,
        job.at,
        job.bundle,
    )
    cost_of = dict(zip(unique, costs, strict=True))
    graphs = [optimiser_graph(work, job.recipe, way) for way, work in works.items()]
    clocks = section_costs.sweep_clocks(job.gpu, job.at)
    optimisers = predict_graphs(graphs, job.gpu, clocks, job.bundle, notes=False)
    steps = {}
    for (strategy, work), optimiser in zip(works.items(), optimisers, strict=True):
        cost = cost_of[id(work)]
        step = step_time.time_step(
            cost,
            job.recipe,
            strategy,
            job.links,
            optimiser,
            job.clocks_hz,
            job.waiting_w,
            job.bundle.cards.latency,
        )
        steps[strategy] = (step, cost)
    return steps


def _choose_timed(
    strategies: Sequence[TrainingStrategy],
    memories: Sequence[TrainingMemory],
    usable_byte: float,
) -> set[TrainingStrategy]:
    """Return the strategies that fit and may be best.

    They have the largest micro-batches and the least recomputation. Of strategies that differ in
    the micro-batch only, the two largest that fit are timed. More recomputation is timed only where
    less of it leaves room for a single sequence.
    """
    groups: dict[TrainingStrategy, dict[Recompute, list[TrainingStrategy]]] = {}
    for strategy, memory in zip(strategies, memories, strict=True):
        if memory.total_byte <= usable_byte:
            group_key = replace(
                strategy,
                micro_batch=1,
                accumulation=1,
                recompute=Recompute.NONE,
            )
            group = groups.setdefault(group_key, {})
            group.setdefault(strategy.recompute, []).append(strategy)
    timed: set[TrainingStrategy] = set()
    for group in groups.values():
        timed.update(_two_largest(group.pop(Recompute.OFFLOAD, [])))
        for recompute in Recompute:
            largest = _two_largest(group.get(recompute, []))
            timed.update(largest)
            if len(largest) > 1:
                break
    return timed


def _two_largest(strategies: Sequence[TrainingStrategy]) -> list[TrainingStrategy]:
    """Return the strategies of the two largest micro-batches."""
    return sorted(strategies, key=lambda strategy: strategy.micro_batch)[-2:]
