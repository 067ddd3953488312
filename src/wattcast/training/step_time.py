"""How long one training step takes on each GPU, where the time goes, and what it draws.

With M micro-batches a step over p pipeline stages of which each holds v chunks of the model,

    t_step = M·t_max + (Σ t_i - t_max) / v + exposed gradient exchange + optimiser

where t_i is the time stage i needs for one micro-batch, forward and backward [Narayanan2021]. A
stage computes its layers; exchanges between tensor-parallel GPUs wait for compute and compute waits
for them, except for a stated share. Weights that are gathered layer by layer (ZeRO-3) and gradients
that are scattered travel while other layers compute, so the longer of the two counts. Gradients of
the other strategies travel during the last backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import (
    dataclass,
    field,
    fields,
)
from statistics import NormalDist

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.options.training_options import (
    Recompute,
    Sharding,
    TrainingRecipe,
)
from wattcast.predictor.governor import REACTION_S
from wattcast.predictor.link_laws import collective_s
from wattcast.predictor.prediction import Prediction
from wattcast.training.microbatch import MicrobatchWork, SectionWork
from wattcast.training.section_costs import MicrobatchCost, SectionCost
from wattcast.training.training_coefficients import TRAINING
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.operator_types import Collective

# Before Hopper products come in waves, between which an exchange finds free SMs.
_WAVE_ARCHITECTURES = ("volta", "ampere", "ada")

_BYTE_BITS = 8
# Rings of keys in both directions: they are gathered, their gradients are summed up, and they are
# gathered again where activations are computed anew.
_GATHERED_AGAIN = 1.5
_BLOM = (0.375, 0.25)  # constants of Blom's formula


@dataclass(frozen=True)
class ClusterLinks:
    """Seconds of collectives among GPUs of a kind in their nodes, each computed once."""

    gpu: Gpu
    _seconds: dict[Collective, float] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    def exchange_s(
        self,
        collective: str,
        byte: float,
        gpus: int,
        stride: int = 1,
    ) -> float:
        """Return the seconds of a collective over ``byte`` of every GPU's whole buffer."""
        if gpus <= 1 or byte <= 0:
            return 0.0
        op = Collective(collective, int(byte), gpus, stride)
        if op not in self._seconds:
            self._seconds[op] = float(collective_s([op], self.gpu)[0])
        return self._seconds[op]


@dataclass(frozen=True)
class StepTime:
    """One step on the slowest GPU: seconds by part, joules of a mean GPU.

    Columns are ``(clock,)``, or numbers at one clock.
    """

    clock_hz: Array  # as set; where parts of a step have their own, the mean over the step
    compute_s: Array  # forward and backward of all micro-batches
    exchange_s: Array  # exposed: nothing computes meanwhile
    bubble_s: Array  # a pipeline stage waits for others
    optimiser_s: Array
    energy_j: Array  # of one GPU, mean over all
    # of the step, once all micro-batches are done: the last exchange, the bubble and the optimiser
    end_s: Array
    end_j: Array
    compute_w: Array  # while it computes
    waiting_w: Array  # while it exchanges or waits

    @property
    def latency_s(self) -> Array:
        """The whole step."""
        return self.compute_s + self.exchange_s + self.bubble_s + self.optimiser_s

    @property
    def power_w(self) -> Array:
        """Mean power of one GPU."""
        return self.energy_j / self.latency_s

    def hold_power(self, limit_w: Array | float) -> StepTime:
        """Return the step at the clock where its mean power meets the limit, or at the top clock.

        The governor averages over ``REACTION_S``: what waits for others, or for memory, leaves
        power to what computes. Where the end of a step takes longer than that, it and the
        micro-batches before it are each held at a clock of their own.
        """
        whole = self._interpolate(limit_w, self.power_w)
        start_s = self.latency_s - self.end_s
        if float(np.max(self.end_s[-1])) <= REACTION_S or float(start_s[-1]) <= REACTION_S:
            return StepTime(**whole)
        start = self._interpolate(limit_w, (self.energy_j - self.end_j) / start_s)
        end = self._interpolate(limit_w, self.end_j / self.end_s)
        return _join_parts(start, end)

    def _interpolate(
        self,
        limit_w: Array | float,
        power_w: Array,
    ) -> dict[str, Array]:
        """Return all columns at the clock where ``power_w`` meets the limit."""
        rising_w = np.maximum.accumulate(power_w)
        columns = {}
        for item in fields(self):
            column = np.broadcast_to(getattr(self, item.name), self.power_w.shape)
            columns[item.name] = np.asarray(np.interp(limit_w, rising_w, column))
        return columns


def _join_parts(start: dict[str, Array], end: dict[str, Array]) -> StepTime:
    """Join the micro-batches of a step at one clock and its end at another.

    At the end of a step the clock decides the optimiser only: the network and the other stages
    keep their pace.
    """
    whole_s = start["compute_s"] + start["exchange_s"] + start["bubble_s"] + start["optimiser_s"]
    start_s = whole_s - start["end_s"]
    end_s = start["end_s"] - start["optimiser_s"] + end["optimiser_s"]
    joined = {
        **start,
        "clock_hz": (start["clock_hz"] * start_s + end["clock_hz"] * end_s) / (start_s + end_s),
        "optimiser_s": end["optimiser_s"],
        "energy_j": start["energy_j"] - start["end_j"] + end["end_j"],
        "end_s": end_s,
        "end_j": end["end_j"],
    }
    return StepTime(**joined)


def time_step(
    cost: MicrobatchCost,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    links: ClusterLinks,
    optimiser: Prediction,
    clocks_hz: Array,
    waiting_w: Array,
    card_spread: float = 0.0,
) -> StepTime:
    """Combine the costs of a micro-batch to a step under a strategy."""
    stage = cost_stages(cost, recipe, strategy, links)
    m = strategy.accumulation
    slowest_s = stage.total_s.max(axis=0)
    bubble_s = (stage.total_s.sum(axis=0) - slowest_s) / strategy.interleave
    compute_s = m * np.minimum(stage.compute_s.max(axis=0), slowest_s)
    # every exchange waits for the slowest card
    straggle = expected_straggle(strategy.gpus, card_spread)
    lost_share = straggle + (recipe.loss_share if strategy.gpus > 1 else 0.0)
    exposed_s = _exposed_sync_s(
        stage,
        cost.work,
        recipe,
        strategy,
        links,
    )
    exchange_s = m * slowest_s - compute_s + exposed_s + compute_s * lost_share

    # energy: work at its own power, and waiting in between
    busy_j = m * stage.energy_j.mean(axis=0) + optimiser.energy_j
    busy_s = m * stage.compute_s.mean(axis=0) + optimiser.latency_s
    latency_s = compute_s + exchange_s + bubble_s + optimiser.latency_s
    waiting_j = waiting_w * np.maximum(latency_s - busy_s, 0.0)
    pause_s = exposed_s + bubble_s
    return StepTime(
        clock_hz=np.broadcast_to(clocks_hz, latency_s.shape),
        compute_s=compute_s,
        exchange_s=exchange_s,
        bubble_s=bubble_s,
        optimiser_s=np.asarray(optimiser.latency_s),
        energy_j=busy_j + waiting_j,
        end_s=pause_s + optimiser.latency_s,
        end_j=np.minimum(waiting_w * pause_s, waiting_j) + optimiser.energy_j,
        compute_w=busy_j / busy_s,
        waiting_w=np.broadcast_to(waiting_w, latency_s.shape),
    )


def _exposed_sync_s(
    stage: StageCosts,
    work: MicrobatchWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    links: ClusterLinks,
) -> Array:
    """Return what the exchange of gradients and weights once a step adds to the backward pass."""
    if strategy.dp * strategy.cp <= 1 or strategy.sharding is Sharding.ZERO3:
        return np.zeros(())
    # weights of the fullest stage
    weights = 0.0
    experts = 0.0
    for stage_number in range(strategy.pp):
        stage_weights = 0.0
        stage_experts = 0.0
        for section in work.sections:
            layers = _layers_here(work, section, stage_number, strategy)
            stage_weights += (section.trained - section.expert_trained) * layers
            stage_experts += section.expert_trained * layers
        weights = max(weights, stage_weights)
        experts = max(experts, stage_experts)

    def exchange(collective: str, byte: int) -> float:
        return _replica_exchange_s(
            collective,
            weights * byte,
            experts * byte,
            strategy,
            links,
        )

    gather_s = 0.0
    if strategy.sharding is Sharding.NONE:
        sync_s = exchange("all_reduce", recipe.gradient_byte)
    else:
        # ZeRO-2 has scattered its gradients micro-batch by micro-batch
        scatters = strategy.sharding is Sharding.ZERO1
        sync_s = exchange("reduce_scatter", recipe.gradient_byte) if scatters else 0.0
        gather_s = exchange("all_gather", recipe.dtype.byte)
    if strategy.tp > 1 and not strategy.sequence_parallel:
        # frameworks of that time began both after the last backward pass
        return np.asarray(sync_s + gather_s)
    slowed = _slowed_share(links.gpu)
    beside_s = stage.backward_s.max(axis=0)
    sync_exposed_s = overlapped_s(beside_s, sync_s, slowed) - beside_s
    gathering_s = overlapped_s(TRAINING.gather_beside * beside_s, gather_s, slowed)
    return np.asarray(sync_exposed_s + gathering_s - TRAINING.gather_beside * beside_s)


def expected_straggle(gpus: int, spread: float) -> float:
    """Return how much slower than the mean the slowest of ``gpus`` cards is expected to be.

    Speeds of cards are taken as normal with relative standard deviation ``spread``; the expected
    largest of n normal numbers is about Φ⁻¹((n - 0.375) / (n + 0.25)) [Blom1958].

    >>> round(expected_straggle(8, 0.01), 4), expected_straggle(1, 0.01)
    (0.0143, 0.0)
    """
    return spread * NormalDist().inv_cdf((gpus - _BLOM[0]) / (gpus + _BLOM[1])) if gpus > 1 else 0.0


@dataclass(frozen=True)
class StageCosts:
    """One micro-batch on each pipeline stage, arrays ``(stage, *sweep)``."""

    total_s: Array
    compute_s: Array
    energy_j: Array
    backward_s: Array  # of the layers alone, beside which gradients travel


def cost_stages(
    cost: MicrobatchCost,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    links: ClusterLinks,
) -> StageCosts:
    """Return what one micro-batch costs on each pipeline stage."""
    times = []
    for section, section_cost in zip(cost.work.sections, cost.sections, strict=True):
        times.append(
            _SectionTimer(
                section,
                section_cost,
                recipe,
                strategy,
                links,
            ).time()
        )
    stages = []
    for stage in range(strategy.pp):
        columns = [np.zeros(())] * len(fields(StageCosts))
        for section, section_time in zip(cost.work.sections, times, strict=True):
            layers = _layers_here(cost.work, section, stage, strategy)
            if layers:
                sums = zip(columns, section_time, strict=True)
                columns = [total + layers * value for total, value in sums]
        stages.append(columns)
    return StageCosts(
        *(np.stack(np.broadcast_arrays(*column)) for column in zip(*stages, strict=True))
    )


@dataclass(frozen=True)
class _SectionTimer:
    """Time one repetition of a section for one micro-batch, with the exchanges beside it."""

    section: SectionWork
    cost: SectionCost
    recipe: TrainingRecipe
    strategy: TrainingStrategy
    links: ClusterLinks

    def time(self) -> tuple[Array, Array, Array, Array]:
        """Return the columns of ``StageCosts`` for one repetition."""
        is_layer = self.section.is_layer
        again = self.cost.recomputed(self.strategy) if is_layer else np.zeros(())
        copies = self.cost.gathered_copies if self._gathers_weights else self.cost.copies
        forward_s, forward_j = self.cost.forward
        backward_s, backward_j = self.cost.backward + self._copied_share * copies + again

        # exchanges of weights and gradients travel beside compute, others between
        gather_s, scatter_s = self._weight_exchange_s()
        is_repeated = is_layer and self.strategy.recompute is Recompute.FULL
        inner_forward_s, inner_backward_s = _inner_exchange_s(
            self.section,
            self.recipe,
            self.strategy,
            self.links,
            is_repeated,
        )
        slowed = self._slowed
        total_forward_s = overlapped_s(forward_s, gather_s, slowed) + inner_forward_s
        total_backward_s = overlapped_s(backward_s, gather_s + scatter_s, slowed) + inner_backward_s
        if self.strategy.recompute is Recompute.OFFLOAD and is_layer:
            # copy engines, not SMs, move activations to the host
            away_byte = self.section.saved_byte - self.section.input_byte
            away_s = away_byte / host_byte_per_s(self.links.gpu)
            total_forward_s = total_forward_s + overlapped_s(forward_s, away_s, 0.0) - forward_s
            total_backward_s = total_backward_s + overlapped_s(backward_s, away_s, 0.0) - backward_s
        if self.section.chosen:
            total_forward_s, total_backward_s = self._add_experts(
                (forward_s, total_forward_s), (backward_s, total_backward_s)
            )
        return (
            total_forward_s + total_backward_s,
            forward_s + backward_s,
            forward_j + backward_j,
            backward_s if is_layer else np.zeros(()),
        )

    @property
    def _gathers_weights(self) -> bool:
        return self.strategy.sharding is Sharding.ZERO3

    @property
    def _slowed(self) -> float:
        """The share by which compute slows while an exchange runs."""
        return _slowed_share(self.links.gpu)

    @property
    def _copied_share(self) -> float:
        """The share of micro-batches whose gradients are copied.

        The first gradient of a step stays where it was written, if it has the format it is summed
        in.
        """
        same_format = self.recipe.gradient_byte == self.recipe.dtype.byte
        if self._gathers_weights or not same_format:
            return 1.0
        return (self.strategy.accumulation - 1) / self.strategy.accumulation

    def _weight_exchange_s(self) -> tuple[float, float]:
        """Return the seconds in which weights are gathered and gradients are scattered."""
        strategy = self.strategy
        is_sharded = strategy.sharding in (Sharding.ZERO2, Sharding.ZERO3)
        if not is_sharded or strategy.dp * strategy.cp <= 1:
            return 0.0, 0.0
        section = self.section
        experts = section.expert_trained
        shared = section.trained - experts
        gather_s = 0.0
        if self._gathers_weights:
            byte = self.recipe.dtype.byte
            stored = shared * byte + section.frozen * self.recipe.base_bits / _BYTE_BITS
            gather_s = _replica_exchange_s(
                "all_gather",
                stored,
                experts * byte,
                strategy,
                self.links,
            )
        byte = self.recipe.gradient_byte
        scatter_s = _replica_exchange_s(
            "reduce_scatter",
            shared * byte,
            experts * byte,
            strategy,
            self.links,
        )
        if strategy.pp > 1:
            # stages keep gathered weights and gradients for all micro-batches of a step
            return gather_s / strategy.accumulation, scatter_s / strategy.accumulation
        return gather_s, scatter_s

    def _add_experts(
        self,
        forward_s: tuple[Array, Array],
        backward_s: tuple[Array, Array],
    ) -> tuple[Array, Array]:
        """Return both passes with the exchange of tokens between experts and the host's launches.

        Each pass is its compute and its time so far.
        """
        totals_s = []
        for compute_s, total_s in (forward_s, backward_s):
            if self.strategy.ep > 1:  # there and back
                swap_s = 2 * _expert_swap_s(self.section, self.recipe, self.strategy, self.links)
                overlap = self.recipe.expert_overlap
                total_s = total_s + _exposed_swap_s(compute_s, swap_s, overlap, self._slowed)
            totals_s.append(total_s)
        total_forward_s, total_backward_s = totals_s
        if self.recipe.graphs:
            return total_forward_s, total_backward_s
        # the host waits for counts of tokens, so it is never ahead
        host_s = TRAINING.expert_host_s
        return (
            np.maximum(total_forward_s, TRAINING.forward_host * host_s),
            np.maximum(total_backward_s, (1.0 - TRAINING.forward_host) * host_s),
        )


def host_byte_per_s(gpu: Gpu) -> float:
    """Return what large copies reach of one direction of PCIe."""
    if gpu.links.pcie_byte_per_s is None:
        expected = f"a way other than offload: the PCIe link of the {gpu.name} is unknown"
        raise bad_value("recompute", expected, "offload")
    return TRAINING.host_link * float(np.mean(gpu.links.pcie_byte_per_s)) / 2.0


def _layers_here(
    work: MicrobatchWork,
    section: SectionWork,
    stage: int,
    strategy: TrainingStrategy,
) -> float:
    """Return how many repetitions of a section a stage has: layers evenly, the ends at the ends.

    Layers that stages cannot share evenly are laid out so that stages with an end have fewer: all
    take alike.
    """
    uneven = sum(layer.repeat for layer in work.layers) % strategy.pp > 0
    if section.is_layer or uneven:
        return section.repeat / strategy.pp
    return float(stage == (0 if section.label == "embedding" else strategy.pp - 1))


def _slowed_share(gpu: Gpu) -> float:
    """Return the share by which compute slows while an exchange runs."""
    is_in_waves = gpu.architecture in _WAVE_ARCHITECTURES
    return TRAINING.compute_slowed if is_in_waves else TRAINING.persistent_slowed


def overlapped_s(
    compute_s: Array,
    exchange_s: Array | float,
    slowed: float = TRAINING.compute_slowed,
) -> Array:
    """Return the time of compute with an exchange beside it.

    Compute slows by the share ``slowed`` while the exchange runs; what the exchange takes beyond
    ``TRAINING.overlap`` of the compute time is waited for.
    """
    beside_s = compute_s + slowed * np.minimum(exchange_s, compute_s)
    return np.asarray(beside_s + np.maximum(exchange_s - TRAINING.overlap * beside_s, 0.0))


def _replica_exchange_s(
    collective: str,
    byte: float,
    expert_byte: float,
    strategy: TrainingStrategy,
    links: ClusterLinks,
) -> float:
    """Return seconds of an exchange among copies of weights.

    Experts have fewer copies, ``ep`` GPUs apart.
    """
    stride = strategy.ep if strategy.ep > 1 else strategy.tp
    shared_s = links.exchange_s(collective, byte, strategy.dp * strategy.cp, strategy.tp)
    return shared_s + links.exchange_s(collective, expert_byte, strategy.expert_dp, stride)


def _inner_exchange_s(
    section: SectionWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    links: ClusterLinks,
    again: bool,
) -> tuple[float, float]:
    """Return exposed seconds of tensor and context exchanges of one repetition.

    They are those of the forward and of the backward pass, which repeats the forward one with
    ``again``.
    """
    forward_s = _sum_exchanges_s(section.forward_exchanges, links)
    backward_s = _sum_exchanges_s(section.backward_exchanges, links)
    if again:
        backward_s += forward_s
    # overlap and sequence parallelism both came to Megatron in 2022
    overlap = TRAINING.tensor_overlap if strategy.sequence_parallel else 0.0
    forward_s = (1.0 - overlap) * forward_s
    backward_s = (1.0 - overlap) * backward_s
    if strategy.pp > 1 and section.is_layer:
        send_s = links.exchange_s("send", section.input_byte, 2, strategy.gpus // strategy.pp)
        send_s /= section.repeat / strategy.pp / strategy.interleave
        forward_s = forward_s + send_s * 0.5
        backward_s = backward_s + send_s * 0.5
    if strategy.cp > 1 and section.is_layer:
        key_byte = section.key_byte * strategy.cp
        ring_s = links.exchange_s("all_gather", key_byte, strategy.cp, strategy.tp)
        forward_s = forward_s + 0.5 * ring_s
        backward_s = backward_s + (_GATHERED_AGAIN if again else 1.0) * ring_s
    return forward_s, backward_s


def _sum_exchanges_s(exchanges: Sequence[Collective], links: ClusterLinks) -> float:
    return sum(links.exchange_s(op.collective, op.bytes, op.gpus) for op in exchanges)


def _exposed_swap_s(
    compute_s: Array,
    swap_s: float,
    overlap: float,
    slowed: float,
) -> Array:
    """Return what an exchange of experts adds to the compute of another batch.

    The share ``overlap`` of the exchange is hidden.
    """
    hidden_s = np.minimum(overlap * swap_s, TRAINING.overlap * compute_s)
    return np.asarray(swap_s - hidden_s + slowed * hidden_s)


def _expert_swap_s(
    section: SectionWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    links: ClusterLinks,
) -> float:
    """Return the seconds in which tokens reach their experts on ``ep`` neighbouring GPUs.

    A token goes once to each node that has one of its experts, and from there once to each of their
    GPUs (DeepEP, HybridEP). Its k experts lie in n·(1 - (1 - 1/n)^k) different ones of n places.
    NCCL's all-to-all sends k copies. Tensor-parallel GPUs send a share of the tokens each. Both
    ways of travel run at the same time.
    """
    node = links.gpu.node or node_of_gpu(links.gpu.name)
    inside = min(node.gpu_count, strategy.ep)
    nodes = -(-strategy.ep // inside)
    byte = section.token_byte / strategy.tp
    if recipe.expert_copies:
        copies_inside = section.chosen / nodes
        copies_between = float(section.chosen)
    else:
        copies_inside = _count_places(strategy.ep, section.chosen)
        copies_between = _count_places(nodes, section.chosen)
    near_s = links.exchange_s("all_to_all", byte * copies_inside, inside)
    far_s = links.exchange_s("all_to_all", byte * copies_between, nodes, inside)
    return max(near_s, far_s)


def _count_places(places: int, chosen: int) -> float:
    """Return in how many of ``places`` the chosen experts of a token lie on average."""
    return places * (1.0 - (1.0 - 1.0 / places) ** chosen)
