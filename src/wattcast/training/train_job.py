"""Predict a training job: choose how GPUs share it, and say how long it takes, what it draws and
what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack, overload

import numpy as np

from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    units,
)
from wattcast.core.arrays import Array
from wattcast.core.units import show_plain
from wattcast.core.user_results import ResultList, UserResult, find_notebook_progress
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.options.keywords import TrainKeywords
from wattcast.options.setting_options import (
    MachineOptions,
    PriceOptions,
    SettingOptions,
)
from wattcast.options.training_options import (
    TRAIN,
    GpuSharing,
    JobLosses,
    Recompute,
    TrainingJob,
    TrainingRecipe,
)
from wattcast.options.verb_options import ParsedOptions
from wattcast.predictor.api import (
    SeveralGpus,
    find_bundle,
    find_gpu,
)
from wattcast.predictor.prices import Prices, read_prices
from wattcast.predictor.run_settings import resolve_settings
from wattcast.predictor.runnable_checks import (
    FORCE,
    check_context,
    check_power_limit,
)
from wattcast.training import (
    section_costs,
    step_time,
    training_strategy,
)
from wattcast.training.checkpoint_log import WrittenCheckpoint, read_checkpoint_log
from wattcast.training.microbatch import (
    TrainingMemory,
    measure_memory,
)
from wattcast.training.strategy_search import (
    Candidate,
    JobSetting,
    SearchProgress,
    evaluate_strategies,
)
from wattcast.training.training_coefficients import TRAINING
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.model_catalogue import (
    ModelKind,
    ModelSpec,
    load_model,
)
from wattcast.workload.model_options import (
    count_positions,
)
from wattcast.workload.readers.load_workload import find_model

Tell = Callable[[str], None]

# Tokens of a step where no batch is given: half a million, usual for models of a few billion.
STEP_TOKENS = 524_288
SECTIONS = (
    "a step is the sum of its sections, each timed by itself, at a clock between tabulated ones; "
    "`predict --phase train` runs it in one piece: within 1% where the GPU decides, 4% where the "
    "host does"
)
# Shares of the power limit on the curve of time against energy.
LIMIT_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
USUAL_SEQ = 4096  # tokens of a sequence where no length is given
SHORTEST_SEQ = 512  # tokens of a sequence that is proposed where a job does not fit

MINUTES_A_DAY = 24 * 60
# Adapters that are proposed where all weights do not fit: options, and bits of the frozen weights.
_PROPOSED_RANK = 16
_PROPOSED_ADAPTERS = (
    (f"--lora {_PROPOSED_RANK}", 16),
    (f"--lora {_PROPOSED_RANK} --base-bits 4", 4),
)


@dataclass(frozen=True, repr=False)
class TrainingResult(UserResult):
    """A training job: its strategy, one step of it, and the whole of it."""

    plain_by = "wattcast.training.training_report:summarise_training"
    drawn_by = "wattcast.training.training_report:draw_training"

    model: str
    gpu: str
    gpus: int
    seq: int
    tokens: float
    recipe: TrainingRecipe
    strategy: TrainingStrategy
    memory: TrainingMemory
    capacity_byte: float
    step: step_time.StepTime
    relative_interval: tuple[float, float]  # low and high end of the step time, over the prediction
    flop_per_token: float
    peak_flop_per_s: float
    padding: float
    pause_share: float
    failure_share: float
    checkpoint_every: int  # steps; 0: none
    checkpoint_s: float  # that the GPUs wait for each, on average
    checkpoint_log: tuple[WrittenCheckpoint, ...]  # where each of them was told
    host_share: float
    prices: Prices
    # (power limit W, clock Hz, hours, kWh at the GPUs)
    curve: tuple[tuple[float, float, float, float], ...]
    slack_kwh: float  # that slower clocks on waiting pipeline stages would save
    candidates: tuple[Candidate, ...]  # the best first
    reason: str  # why the strategy was chosen
    assumptions: tuple[str, ...]

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        return (
            f"{self.model} on {self.gpus} x {self.gpu}: {show_plain(self.tokens, 3)} tokens in "
            f"{show_plain(self.hours, 3)} h, {show_plain(self.energy_kwh, 3)} kWh, "
            f"{self.tokens_per_s:,.0f} tokens/s"
        )

    @property
    def step_s(self) -> float:
        """Seconds of one optimiser step."""
        return float(self.step.latency_s)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, padding included."""
        return self.strategy.global_batch * self.seq

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all GPUs train on in a second, between pauses."""
        return self.step_tokens * (1.0 - self.padding) / self.step_s

    @property
    def mfu(self) -> float:
        """Share of the GPUs' dense peak that the model's own arithmetic takes.

        Nothing recomputed counts.
        """
        computed_per_s = self.tokens_per_s / (1.0 - self.padding)
        return computed_per_s * self.flop_per_token / (self.gpus * self.peak_flop_per_s)

    @property
    def steps(self) -> float:
        """Steps from the first to the last; pauses and repeated work count as steps."""
        shares = (self.padding, self.pause_share, self.failure_share)
        return _count_steps(self.tokens, self.step_tokens, *shares)

    @property
    def checkpoints(self) -> int:
        """Checkpoints that the GPUs wait for."""
        if self.checkpoint_log:
            return len(self.checkpoint_log)
        return _count_checkpoints(self.steps, self.checkpoint_every)

    @property
    def checkpoint_hours(self) -> float:
        """Hours in which the GPUs wait for checkpoints, idle with their memory full."""
        return self.checkpoints * self.checkpoint_s / 3600.0

    @property
    def hours(self) -> float:
        """Hours from the first step to the last; pauses, checkpoints, repeated work included."""
        return self.steps * self.step_s / 3600.0 + self.checkpoint_hours

    @property
    def hours_interval(self) -> tuple[float, float]:
        """Ends of the hours; how long checkpoints take was told."""
        low, high = self.relative_interval
        step_hours = self.hours - self.checkpoint_hours
        return step_hours * low + self.checkpoint_hours, step_hours * high + self.checkpoint_hours

    @property
    def gpu_hours(self) -> float:
        """Hours times GPUs."""
        return self.hours * self.gpus

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs from the first step to the last, checkpoints included."""
        waiting_share = self.checkpoint_hours / self.hours
        step_w = (1.0 - waiting_share) * float(self.step.power_w)
        return (step_w + waiting_share * self.waiting_w) * self.gpus

    @property
    def waiting_w(self) -> float:
        """Power of a GPU while it waits for a checkpoint."""
        return float(self.step.waiting_w)

    @property
    def peak_power_w(self) -> float:
        """Most power of all GPUs over a step, all computing at once."""
        return float(np.maximum(self.step.compute_w, self.step.power_w)) * self.gpus

    @property
    def energy_kwh(self) -> float:
        """Energy of all GPUs."""
        return self.power_w * self.hours / 1000.0

    @property
    def energy_interval_kwh(self) -> tuple[float, float]:
        """Ends of the energy of all GPUs, those of the time at the predicted power."""
        low, high = self.relative_interval
        checkpoint_kwh = self.waiting_w * self.gpus * self.checkpoint_hours / 1000.0
        step_kwh = self.energy_kwh - checkpoint_kwh
        return step_kwh * low + checkpoint_kwh, step_kwh * high + checkpoint_kwh

    @property
    def site_energy_kwh(self) -> float:
        """Energy at the meter: GPUs, the stated share of hosts, network and fans, times PUE."""
        return self.energy_kwh * (1.0 + self.host_share) * self.prices.pue

    @property
    def cost(self) -> float | None:
        """Rent of the GPUs and energy, where prices are known."""
        return self.prices.cost(self.gpu, self._node_energy_j, self.gpu_hours * 3600.0)

    @property
    def carbon_kg(self) -> float | None:
        """Kilograms of CO2 equivalent, where the intensity is known."""
        grams = self.prices.carbon_g(self._node_energy_j)
        return None if grams is None else grams / 1000.0

    @property
    def _node_energy_j(self) -> float:
        return self.energy_kwh * (1.0 + self.host_share) * 3.6e6


@overload
def train(
    model: str | ModelSpec,
    gpu: str | Path | Gpu,
    *,
    progress: Tell | None = None,
    **options: Unpack[TrainKeywords],
) -> TrainingResult: ...


@overload
def train(
    model: str | ModelSpec,
    gpu: SeveralGpus,
    *,
    progress: Tell | None = None,
    **options: Unpack[TrainKeywords],
) -> ResultList[TrainingResult]: ...


@TRAIN.sign
def train(
    model: str | ModelSpec,
    gpu: str | Path | Gpu | SeveralGpus,
    *,
    progress: Tell | None = None,
    **options: Unpack[TrainKeywords],
) -> TrainingResult | ResultList[TrainingResult]:
    """Predict a training job; what is not given is chosen so that it fits and takes the least time,
    energy or money. With a list of GPUs, return a result for each kind.

    ``tokens`` is a number or ``1B``; ``seq`` tokens make a sequence. ``graphs``: CUDA graphs replay
    the step. ``offload``: activations may wait in the host's memory instead of being computed
    again, where that is faster. ``loss_share`` of the compute time is lost on several GPUs to
    input, logging and uneven clocks. ``expert_overlap`` of the exchanges between experts hides
    behind the work of other micro-batches; ``expert_copies``: tokens travel once to each expert
    (NCCL's all-to-all), not once to each GPU (DeepEP, HybridEP); ``expert_kernels``: grouped,
    separate (a product for each expert) or fused (activations inside grouped products).
    ``attention_slowdown`` is the time of your attention kernel over that of cuDNN in 2026, on which
    rates rest. ``node`` is a catalogue node or your own YAML file, by default the usual one of the
    GPU; ``network`` replaces its bandwidth for each GPU and direction. ``failures_per_gpu_day`` and
    ``lost_minutes`` (work repeated after each) add the time of restarts: a share
    failures·gpus·minutes of all time is lost; ``pause_share`` is the share of evaluation and other
    work that draws as much as steps do. After every ``checkpoint_every`` steps the GPUs wait
    ``checkpoint_time`` for a checkpoint and draw what idle GPUs do, or as a ``checkpoint_log``
    says.

    ``progress`` is called with a line about the search once a second; a notebook shows that line
    below its cell where no other ``progress`` is given."""
    if isinstance(gpu, list | tuple):
        return ResultList(train(model, kind, progress=progress, **options) for kind in gpu)
    chosen = TRAIN.parse(options)
    order = chosen[TrainingJob]
    losses = chosen[JobLosses]
    prices = read_prices(chosen[PriceOptions])
    spec = model if isinstance(model, ModelSpec) else find_model(model) or load_model(model)
    job = _set_up_job(spec, find_gpu(gpu), chosen)
    failure_share = _share_of_failures(order.gpus, losses)
    if order.minimise == "cost" and prices.cost(job.gpu.name, 1.0, 1.0) is None:
        do = "Add --price 2.50/h or --electricity."
        raise bad_value("minimise", "a price for cost", "none", do)

    score = _make_score(order.minimise, job.gpu.name, losses.host_share, prices)
    search = SearchProgress(progress or find_notebook_progress())
    candidates = _rank_strategies(job, chosen, score, search)
    reason = _say_why(candidates, order.minimise, score)
    return _describe_job(
        job,
        chosen,
        candidates,
        reason,
        prices,
        failure_share,
    )


def _rank_strategies(
    job: JobSetting,
    chosen: ParsedOptions,
    score: Callable[[Candidate], float],
    search: SearchProgress,
) -> list[Candidate]:
    """Return the ways to share a job, the best first; raise an error if none fits."""
    gpus = chosen[TrainingJob].gpus
    list_ways = _make_lister(job, chosen[TrainingJob], chosen[GpuSharing])
    force = chosen[SettingOptions].force
    candidates = evaluate_strategies(job, list_ways(gpus), force, search)
    if not any(candidate.step for candidate in candidates):
        raise _explain_misfit(job, gpus, candidates, list_ways)
    return sorted(candidates, key=score)


def _describe_job(
    job: JobSetting,
    chosen: ParsedOptions,
    candidates: Sequence[Candidate],
    reason: str,
    prices: Prices,
    failure_share: float,
) -> TrainingResult:
    """Return the result of a job that runs in the first of these ways."""
    order = chosen[TrainingJob]
    losses = chosen[JobLosses]
    best = candidates[0]
    strategy = best.strategy
    cost = best.cost
    swept = best.swept
    assert best.step is not None
    assert cost is not None
    assert swept is not None

    shares = (losses.padding, losses.pause_share, failure_share)
    steps = _count_steps(order.tokens, strategy.global_batch * job.length, *shares)
    written = _place_checkpoints(losses, steps)
    clock_place = int(np.argmin(np.abs(swept.latency_s - best.step.latency_s)))
    stages = step_time.cost_stages(cost, job.recipe, strategy, job.links)
    is_free_batch = order.global_batch is None
    return TrainingResult(
        model=job.model.name,
        gpu=job.gpu.name,
        gpus=order.gpus,
        seq=job.length,
        tokens=order.tokens,
        recipe=job.recipe,
        strategy=strategy,
        memory=best.memory,
        capacity_byte=job.usable_byte,
        step=best.step,
        relative_interval=widen_interval(
            relative_interval(cost, best.step, order.gpus, job.node_gpus), order.gpus
        ),
        flop_per_token=cost.work.flop_per_token,
        peak_flop_per_s=_peak_flop_per_s(job.gpu, job.recipe),
        padding=losses.padding,
        pause_share=losses.pause_share,
        failure_share=failure_share,
        checkpoint_every=losses.checkpoint_every,
        checkpoint_s=written.mean_s,
        checkpoint_log=written.log,
        host_share=losses.host_share,
        prices=prices,
        curve=_trade_curve(
            job,
            swept,
            order.gpus,
            steps,
            written.number * written.mean_s,
        ),
        slack_kwh=_slack_kwh(
            stages,
            clock_place,
            job.waiting_w,
            strategy,
            steps,
        ),
        candidates=tuple(candidates),
        reason=reason,
        assumptions=_list_assumptions(
            job,
            best,
            order.gpus,
            is_free_batch,
            losses.host_share,
        ),
    )


def _make_score(
    minimise: str,
    gpu: str,
    host_share: float,
    prices: Prices,
) -> Callable[[Candidate], float]:
    """Return a function of what a sequence takes of the time, energy or money that is minimised."""

    def score(candidate: Candidate) -> float:
        if candidate.step is None:
            return float("inf")
        energy_j = float(candidate.step.energy_j)
        seconds = float(candidate.step.latency_s)
        spent = {"time": seconds, "energy": energy_j}.get(minimise)
        if not spent:
            node_j = energy_j * (1.0 + host_share)
            spent = prices.cost(gpu, node_j, seconds) or 0.0
        return spent / candidate.strategy.global_batch

    return score


def _set_up_job(
    spec: ModelSpec,
    chip: Gpu,
    chosen: ParsedOptions,
) -> JobSetting:
    """Return what a job trains and how, on which GPU, in which node, at which clock."""
    order = chosen[TrainingJob]
    recipe = chosen[TrainingRecipe]
    settings = chosen[SettingOptions]
    bundle = find_bundle(settings.bundle, chip)
    if recipe.graphs:
        bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    tensor_formats = chip.pipes.tensor_flop_per_cycle or {}
    if recipe.product_dtype is Dtype.FP4 and Dtype.FP4 not in tensor_formats:
        expected = f"a format the {chip.name} multiplies, such as fp8 or bf16"
        raise bad_value("dtype", expected, f"{recipe.precision} (fp4)")
    if spec.kind is ModelKind.VISION:
        do = "Use predict --phase train for pictures."
        raise bad_value("model", "a language model or an encoder", spec.name, do)
    length = order.seq or min(USUAL_SEQ, count_positions(spec) or USUAL_SEQ)
    if not settings.force:
        check_context(spec, length, FORCE)

    node = find_gpu(chip, settings.node).node or node_of_gpu(chip.name)
    network_byte_per_s = order.network_byte_per_s or node.network_byte_per_s
    if network_byte_per_s is None and order.gpus > node.gpu_count:
        do = "Give --network 50GB/s."
        raise bad_value("network", f"the network of a {node.name}", "unknown", do)
    links = replace(chip, node=replace(node, network_byte_per_s=network_byte_per_s))

    card = SettingOptions(clock_hz=settings.clock_hz, power_limit_w=settings.power_limit_w)
    _, at, bundle = resolve_settings(chip, bundle, card, chosen[MachineOptions])
    if not settings.force:
        check_power_limit(chip, at)
    cluster = step_time.ClusterLinks(links)
    return JobSetting(
        spec,
        chip,
        at,
        bundle,
        recipe,
        length,
        cluster,
        node.gpu_count,
    )


def _share_of_failures(gpus: int, losses: JobLosses) -> float:
    """Return the share of all time that is lost to failures and the work repeated after each."""
    per_day = gpus * losses.failures_per_gpu_day
    share = per_day * losses.lost_minutes / MINUTES_A_DAY
    if share >= 1.0:
        every = units.show(86400.0 / per_day, "s", 3)
        expected = f"fewer than one in {losses.lost_minutes:g} min, which each loses"
        raise bad_value("failures", expected, f"one every {every}")
    return share


def _count_steps(
    tokens: float,
    step_tokens: float,
    padding: float,
    pause_share: float,
    failure_share: float,
) -> float:
    """Return the steps of a job; pauses and work that failures repeat count as steps.

    >>> _count_steps(1000.0, 100.0, 0.5, 0.1, 0.0)
    22.0
    """
    needed = tokens / (step_tokens * (1.0 - padding))
    return needed * (1.0 + pause_share) / (1.0 - failure_share)


def _count_checkpoints(steps: float, every: int) -> int:
    """Return the checkpoints of a job; the last one is written where most of its steps are done.

    >>> _count_checkpoints(19.0, 8), _count_checkpoints(23.0, 8), _count_checkpoints(19.0, 0)
    (2, 3, 0)
    """
    return round(steps / every) if every else 0


class _Checkpoints(NamedTuple):
    """The checkpoints of a job."""

    number: int
    mean_s: float
    log: tuple[WrittenCheckpoint, ...] = ()


def _place_checkpoints(losses: JobLosses, steps: float) -> _Checkpoints:
    """Return how many checkpoints a job of so many steps waits for, and how long."""
    log = read_checkpoint_log(losses.checkpoint_log)
    if not log:
        count = _count_checkpoints(steps, losses.checkpoint_every)
        return _Checkpoints(count, losses.checkpoint_time_s)
    last = max(round(steps), 1)
    if log[-1].step > last:
        raise bad_value("checkpoint-log", f"steps of this job, at most {last}", log[-1].step)
    mean_s = sum(checkpoint.seconds for checkpoint in log) / len(log)
    return _Checkpoints(len(log), mean_s, log)


def _make_lister(
    job: JobSetting,
    order: TrainingJob,
    sharing: GpuSharing,
) -> Callable[[int], list[TrainingStrategy]]:
    """Return what lists the strategies of so many GPUs that the options leave open."""
    if sharing.recompute is not None:
        recompute = [sharing.recompute]
    else:
        recompute = [way for way in Recompute if sharing.offload or way is not Recompute.OFFLOAD]
    space = training_strategy.StrategySpace(
        dims=job.model.dims,
        node_gpus=job.node_gpus,
        fixed=TrainingStrategy(
            cp=sharing.cp,
            ep=sharing.ep,
            interleave=sharing.interleave,
            sequence_parallel=sharing.sequence_parallel,
        ),
        batch=order.global_batch or max(STEP_TOKENS // job.length, 1),
        batch_may_grow=order.global_batch is None,
        recompute=recompute,
        micro_batch=sharing.micro_batch,
        tp=sharing.tp,
        pp=sharing.pp,
        sharding=sharing.sharding,
    )
    return partial(training_strategy.list_strategies, space=space)


def _say_why(
    candidates: Sequence[Candidate],
    minimise: str,
    score: Callable[[Candidate], float],
) -> str:
    """Return among how many ways a strategy is the best, and how much more the next one takes."""
    if len(candidates) < 2:
        return "as given"
    if candidates[1].step is None:
        return f"the only way that fits, of {len(candidates)}"
    more = score(candidates[1]) / score(candidates[0]) - 1.0
    ways = sum(candidate.fits for candidate in candidates)
    return f"least {minimise} of {ways} ways that fit; next {candidates[1].strategy} ({more:+.1%})"


def _trade_curve(
    job: JobSetting,
    swept: step_time.StepTime,
    gpus: int,
    steps: float,
    checkpoints_s: float,
) -> tuple[tuple[float, float, float, float], ...]:
    """Return clock, hours and kWh of the GPUs at several power limits, that of the job first."""
    limit_w = job.limit_w
    lowest = job.gpu.power.min_limit_w
    least_w = min(0.0 if lowest is None else float(np.mean(lowest)), limit_w)
    limits_w = limit_w * np.array(LIMIT_SHARES)
    limits_w = limits_w[limits_w >= least_w]
    step = swept.hold_power(limits_w * job.bundle.governor_share)
    hours = (step.latency_s * steps + checkpoints_s) / 3600.0
    energies_kwh = (step.energy_j * steps + step.waiting_w * checkpoints_s) * gpus / 3.6e6
    points = []
    for watts, clock_hz, hour, kwh in zip(
        limits_w,
        step.clock_hz,
        hours,
        energies_kwh,
        strict=True,
    ):
        points.append((float(watts), float(clock_hz), float(hour), float(kwh)))
    return tuple(points)


def _slack_kwh(
    stages: step_time.StageCosts,
    clock: int,
    waiting_w: Array,
    strategy: TrainingStrategy,
    steps: float,
) -> float:
    """Return kWh saved by lower clocks on stages that wait for the slowest one [Chung2024].

    The slowest stage keeps its clock. ``clock`` is the place, in the clocks that stages were costed
    at, of the one that the power limit allows.
    """
    if strategy.pp == 1:
        return 0.0
    longest_s = stages.total_s[:, clock].max()
    total_j = stages.energy_j + waiting_w * np.maximum(longest_s - stages.total_s, 0.0)
    least_j = np.where(stages.total_s <= longest_s, total_j, np.inf).min(axis=1)
    saved_j = np.maximum(total_j[:, clock] - least_j, 0.0).sum() * strategy.accumulation
    return float(saved_j) * steps * strategy.gpus / strategy.pp / 3.6e6


def relative_interval(
    cost: section_costs.MicrobatchCost,
    step: step_time.StepTime,
    gpus: int,
    node_gpus: int,
) -> tuple[float, float]:
    """Return the ends of the step time over the prediction.

    They are the predictor's for compute, and wide ones for exchanges.
    """
    total_s = 0.0
    low_s = 0.0
    high_s = 0.0
    for prediction in cost.predictions:
        total_s += float(prediction.latency_s[-1])
        low_s += float(prediction.interval.latency_s[-1, 0])
        high_s += float(prediction.interval.latency_s[-1, 1])
    low = low_s / total_s
    high = high_s / total_s
    waiting = float((step.exchange_s + step.bubble_s) / step.latency_s)
    spread = TRAINING.node_spread if gpus <= node_gpus else TRAINING.cluster_spread
    compute = 1.0 - waiting
    return compute * low + waiting * (1.0 - spread), compute * high + waiting * (1.0 + spread)


def widen_interval(ends: tuple[float, float], gpus: int) -> tuple[float, float]:
    """Return the ends of a job's interval, from those of its kernels and exchanges.

    Frameworks on several GPUs differ in more than a prediction is told.
    """
    if gpus == 1:
        return ends
    low, high = ends
    return low**TRAINING.job_interval, high**TRAINING.job_interval


def _peak_flop_per_s(chip: Gpu, recipe: TrainingRecipe) -> float:
    rates = chip.pipes.tensor_flop_per_cycle or chip.pipes.cuda_flop_per_cycle
    rate = rates.get(recipe.product_dtype) or rates.get(recipe.dtype)
    if rate is None:
        raise bad_value("precision", f"a format the {chip.name} has units for", recipe.precision)
    cycles_per_s = float(np.mean(chip.sm_count)) * float(np.mean(chip.clocks.boost_hz))
    return float(np.mean(rate)) * cycles_per_s


def _explain_misfit(
    job: JobSetting,
    gpus: int,
    candidates: Sequence[Candidate],
    list_ways: Callable[[int], list[TrainingStrategy]],
) -> BadInput:
    """Return an error with the memory of the leanest way, and with changes that make it fit."""
    leanest = min(candidates, key=lambda candidate: candidate.memory.total_byte)

    def fits(
        recipe: TrainingRecipe = job.recipe,
        length: int = job.length,
        n: int = gpus,
    ) -> bool:
        try:
            ways = list_ways(n)
        except BadInput:  # a batch or a layout that so many GPUs cannot share
            return False
        return _fits_somehow(replace(job, recipe=recipe, length=length), ways)

    changes = []
    for doubling in range(1, 8):
        count = gpus * 2**doubling
        if fits(n=count):
            changes.append(f"on {count} GPUs")
            break
    for halving in range(1, 24):
        length = job.length // 2**halving
        if length >= SHORTEST_SEQ and fits(length=length):
            changes.append(f"with --seq {length}")
            break
    if not job.recipe.lora_rank:
        for words, bits in _PROPOSED_ADAPTERS:
            if fits(replace(job.recipe, lora_rank=_PROPOSED_RANK, base_bits=bits)):
                changes.append(f"with {words}")
                break
    purposes = []
    for item in fields(leanest.memory):
        amount = units.show(getattr(leanest.memory, item.name), "byte", 3)
        purposes.append(f"{item.name.removesuffix('_byte')} {amount}")
    none_fits = "neither on more GPUs nor with a shorter --seq or --lora"
    return bad_value(
        f"{job.model.name} on {gpus} x {job.gpu.name}",
        f"at most the {units.show(job.usable_byte, 'byte', 3)} usable of a GPU",
        units.show(leanest.memory.total_byte, "byte", 3),
        f"It fits {', or '.join(changes) or none_fits}. "
        f"The leanest way is {leanest.strategy}: {', '.join(purposes)}.",
    )


def _fits_somehow(job: JobSetting, ways: Sequence[TrainingStrategy]) -> bool:
    """Whether any way of the smallest micro-batch fits into memory."""
    smallest = min(way.micro_batch for way in ways)
    for way in ways:
        if way.micro_batch == smallest:
            memory = measure_memory(job.trace(way), job.recipe, way)
            if memory.total_byte <= job.usable_byte:
                return True
    return False


def _list_assumptions(
    job: JobSetting,
    best: Candidate,
    gpus: int,
    free_batch: bool,
    host_share: float,
) -> tuple[str, ...]:
    recipe = job.recipe
    node = job.links.gpu.node
    batch = best.strategy.global_batch
    masters = ", fp32 masters" if recipe.master_weights else ""
    notes = [f"{recipe.precision}{masters}, {recipe.optimizer}, {recipe.stack} kernels"]
    positions = count_positions(job.model)
    if positions is not None and job.length > positions:
        longer = f"{job.length} positions are more than the {positions} this model was made for"
        notes.insert(0, longer)
    if free_batch:
        notes.append(f"batch: {batch} sequences a step, about {STEP_TOKENS} tokens (default)")
    if node is not None and gpus > node.gpu_count and node.network_byte_per_s:
        wire = units.show(node.network_byte_per_s, "byte/s")
        notes.append(f"nodes: {node.title}, {wire} for each GPU and direction")
    if gpus > 1:
        notes.append(
            "exchanges overlap with compute as docs/method/training-jobs.md states; no "
            "cluster was measured"
        )
    notes.append(f"hosts, network and fans draw {host_share:.0%} on top of the GPUs")
    notes.append(SECTIONS)
    if best.cost is not None:
        notes += best.cost.list_assumptions()
    return tuple(dict.fromkeys(notes))
