"""How long one training step takes on each GPU, where the time goes, and what it draws.

With M micro-batches a step over p pipeline stages of which each holds v chunks of the model,

    t_step = M·t_max + (Σ t_i - t_max) / v + exposed gradient exchange + optimiser

where t_i is the time stage i needs for one micro-batch, forward and backward [Narayanan2021]. A
stage computes its layers; exchanges between tensor-parallel GPUs wait for compute and compute waits
for them, except for a stated share. Weights that are gathered layer by layer (ZeRO-3) and gradients
that are scattered travel while other layers compute, so the longer of the two counts. Gradients of
the other strategies travel during the last backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from wattcast.core import Dtype, bad_value
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import REACTION_S
from wattcast.predictor.link_laws import collective_s
from wattcast.predictor.prediction import Prediction, predict_graphs
from wattcast.training.microbatch import MicrobatchWork, SectionWork, copy_operators
from wattcast.training.training_strategy import (
    NVFP4_BIT,
    STATE_BYTE,
    ExpertKernels,
    Optimizer,
    Recompute,
    Sharding,
    TrainingRecipe,
    TrainingStrategy,
)
from wattcast.workload.engine_operators import BlockProduct, ScaledProduct
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Attention, Bmm, Collective, Elementwise, Layout, Linear
from wattcast.workload.program import optimiser_block

# Shares that no measurement here decides; docs/method/training-jobs.md says what each rests on.
OVERLAP = (
    0.9  # of compute time that an exchange beside it can use: the first and the last bucket wait
)
COMPUTE_SLOWED = (
    0.15  # compute slows by this share while an exchange runs: NCCL takes 16 to 24 of 132 SMs
)
# the same where products keep all SMs from start to end, as on Hopper: one wave becomes two
PERSISTENT_SLOWED = 0.5
EXPERT_HOST_S = 8e-3  # to launch a layer of experts, forward and backward, without CUDA graphs
TENSOR_OVERLAP = (
    0.3  # of exchanges between tensor-parallel GPUs hidden behind the products around them
)

# Time of attention on Blackwell over its forecast: cuDNN 9.13 reaches some 1240 TFLOP/s of bf16 on
# a B200, 1.3 times less than FlashAttention-4's 1613 [Zadouri2026]; the forecast from Hopper's
# kernels has 750 to
# 880.
BLACKWELL_ATTENTION = 0.65
NEWTON_SCHULZ = 5  # iterations of Muon
HOST_LINK_SHARE = 0.8  # of a PCIe direction's rate, reached by copies from pinned memory
CLOCK_SHARES = np.linspace(0.4, 1.0, 13)  # of the top clock, between which a step is interpolated
_NOTHING = (Elementwise("fill", 1),)  # stands where a section computes nothing


@dataclass(frozen=True)
class ClusterLinks:
    """Seconds of collectives among GPUs of a kind in their nodes, each computed once."""

    gpu: Gpu
    _known: dict[Collective, float] = field(default_factory=dict, repr=False, compare=False)

    def exchange_s(self, collective: str, byte: float, gpus: int, stride: int = 1) -> float:
        """Return the seconds of a collective over ``byte`` of every GPU's whole buffer."""
        if gpus <= 1 or byte <= 0:
            return 0.0
        op = Collective(collective, int(byte), gpus, stride)
        if op not in self._known:
            self._known[op] = float(collective_s([op], self.gpu)[0])
        return self._known[op]


@dataclass(frozen=True)
class SectionCost:
    """Seconds and joules of one repetition of a section, each ``(2, clock)``: rows are seconds and
    joules.
    """

    forward: Array
    backward: Array
    again: Array  # full recomputation that ends with the last tensor needed
    selective: Array
    copies: Array  # of weights and gradients
    gathered_copies: Array  # where weights are gathered

    def recomputed(self, strategy: TrainingStrategy) -> Array:
        """Return what is computed a second time: Megatron repeats the whole layer, PyTorch stops
        early.
        """
        if strategy.recompute is Recompute.FULL:
            return self.forward if strategy.tp * strategy.pp > 1 else self.again
        return (
            self.selective
            if strategy.recompute is Recompute.SELECTIVE
            else np.zeros_like(self.forward)
        )


@dataclass(frozen=True)
class MicrobatchCost:
    """Costs of every section of a micro-batch, and the predictions they were taken from."""

    work: MicrobatchWork
    sections: tuple[SectionCost, ...]
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class StepTime:
    """One step on the slowest GPU: seconds by part, joules of a mean GPU, each ``(clock,)``, or at
    one clock.
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
        """Return the step at the clock where its mean power meets the limit, the top clock where it
        is below.

        The governor averages over ``REACTION_S``: what waits for others, or for memory, leaves
        power to what computes. Where the end of a step takes longer than that, it and the
        micro-batches before it are each held at a clock of their own."""
        columns = {
            item.name: np.broadcast_to(getattr(self, item.name), self.power_w.shape)
            for item in fields(self)
        }

        def interpolate(power_w: Array) -> dict[str, Array]:
            rising_w = np.maximum.accumulate(power_w)
            return {
                name: np.asarray(np.interp(limit_w, rising_w, of)) for name, of in columns.items()
            }

        whole = interpolate(self.power_w)
        start_s = self.latency_s - self.end_s
        if float(np.max(self.end_s[-1])) <= REACTION_S or float(start_s[-1]) <= REACTION_S:
            return StepTime(**whole)
        start = interpolate((self.energy_j - self.end_j) / start_s)
        end = interpolate(self.end_j / self.end_s)
        return _join_parts(start, end)


def _join_parts(start: dict[str, Array], end: dict[str, Array]) -> StepTime:
    """Join the micro-batches of a step at one clock and its end at another.

    At the end of a step the clock decides the optimiser alone: the network and the other stages
    keep their pace."""
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


def sweep_clocks(gpu: Gpu, at: OperatingPoint) -> OperatingPoint:
    """Return the clocks at which costs are computed, without a power limit: a step holds the limit,
    not its parts.
    """
    top_hz = np.mean(gpu.clocks.max_hz if at.clock_hz is None else at.clock_hz)
    return replace(at, clock_hz=(float(top_hz) * CLOCK_SHARES)[:, np.newaxis], power_limit_w=1e6)


def cost_microbatches(
    works: Sequence[MicrobatchWork],
    recipe: TrainingRecipe,
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> list[MicrobatchCost]:
    """Predict the sections of several micro-batches at all clocks together; equal operators are
    analysed once.
    """
    graphs = []
    for section in (section for work in works for section in work.sections):
        again = (section.again, section.selective) if section.is_layer else ((), ())
        copies = [copy_operators(section, recipe, gathered) for gathered in (False, True)]
        for ops in (
            section.forward,
            section.backward,
            *again,
            *copies,
        ):  # in the order of SectionCost
            launched = (part for op in ops or _NOTHING for part in _as_launched(op, recipe, gpu))
            graphs.append(Graph("pass", (Block(tuple(launched), section.repeat),)))
    slower = recipe.attention_slowdown * (
        BLACKWELL_ATTENTION if gpu.architecture == "blackwell" else 1.0
    )
    unique = list(dict.fromkeys(graphs))  # copies of weights are the same for all micro-batches
    found = dict(
        zip(unique, predict_graphs(unique, gpu, sweep_clocks(gpu, at), bundle), strict=True)
    )
    predictions = iter([found[graph] for graph in graphs])
    costs = []
    for work in works:
        sections: list[SectionCost] = []
        taken: list[Prediction] = []
        for section in work.sections:
            here = [next(predictions) for _ in fields(SectionCost)]
            taken += here[:2]
            each = []
            for p in here:
                cost = np.stack([p.latency_s, p.energy_j])
                for op in p.ops if slower != 1.0 else ():  # attention of another era
                    if isinstance(op.op, Attention):
                        cost = cost + (slower - 1.0) * np.stack([op.latency_s, op.energy_j])
                each.append(cost / section.repeat)
            sections.append(SectionCost(*each))
        costs.append(MicrobatchCost(work, tuple(sections), tuple(taken)))
    return costs


def _as_launched(op: Operator, recipe: TrainingRecipe, gpu: Gpu) -> tuple[Operator, ...]:
    """Return a product as it runs: one for each expert where they are separate, in fp8 on Blackwell
    as engines do.

    Tables of Blackwell cards have the engines' fp8 and fp4 kernels, not those of training, so these
    stand for them. A tensor in NVFP4 has a scale of its own beside those of blocks: its largest
    value is found first, then it is cast in rows, and in columns after a Hadamard transform, by
    three kernels [Transformer Engine, ``NVFP4Quantizer``]."""
    if (
        isinstance(op, Bmm)
        and "experts" in op.label
        and recipe.expert_kernels is ExpertKernels.SEPARATE
    ):
        each = Linear(
            op.m,
            op.n,
            op.k,
            dtype=op.dtype,
            out_dtype=op.out_dtype,
            turned=op.turned,
            label=op.label,
        )
        op = replace(each, count=op.b * op.count)
    if recipe.product_dtype is Dtype.FP4 and isinstance(op, Linear | Bmm) and op.dtype is Dtype.FP8:
        times = op.count * (op.b if isinstance(op, Bmm) else 1)
        product = BlockProduct(
            op.m, op.n, op.k, bit=NVFP4_BIT, dtype=Dtype.FP4, count=times, label=op.label
        )
        if op.turned:  # of a weight's gradient, whose operands are cast already
            return (product,)
        n = op.m * op.k
        dtype = recipe.dtype
        largest = Elementwise("abs", n, dtype=dtype, write=0, count=times, label="largest value")
        cast = Elementwise(
            "scale", n, dtype=dtype, write=int(n * NVFP4_BIT / 8), count=2 * times, label="cast"
        )
        return product, largest, cast
    if isinstance(op, Linear) and op.dtype is Dtype.FP8 and gpu.architecture == "blackwell":
        return (ScaledProduct(op.m, op.n, op.k, dtype=Dtype.FP8, count=op.count, label=op.label),)
    return (op,)


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
    bubble_s = (stage.total_s.sum(axis=0) - stage.total_s.max(axis=0)) / strategy.interleave
    worst = stage.total_s.max(axis=0)
    compute_s = m * np.minimum(stage.compute_s.max(axis=0), worst)
    lost = expected_straggle(
        strategy.gpus, card_spread
    )  # every exchange waits for the slowest card
    waits_s = compute_s * (lost + (recipe.loss_share if strategy.gpus > 1 else 0.0))
    exposed_s = np.zeros(())  # of the exchange of gradients and weights once a step
    if strategy.dp * strategy.cp > 1 and strategy.sharding is not Sharding.ZERO3:
        work = cost.work
        number = range(strategy.pp)
        held = [[(s, _layers_here(work, s, i, strategy)) for s in work.sections] for i in number]
        weights = max(
            sum((s.trained - s.expert_trained) * layers for s, layers in each) for each in held
        )
        experts = max(sum(s.expert_trained * layers for s, layers in each) for each in held)

        def exchange(collective: str, byte: int) -> float:
            return _replica_exchange_s(collective, weights * byte, experts * byte, strategy, links)

        if strategy.sharding is Sharding.NONE:
            sync_s = exchange("all_reduce", recipe.gradient_byte)
            gather_s = 0.0
        else:  # ZeRO-2 has scattered its gradients micro-batch by micro-batch
            scatters = strategy.sharding is Sharding.ZERO1
            sync_s = exchange("reduce_scatter", recipe.gradient_byte) if scatters else 0.0
            gather_s = exchange("all_gather", recipe.dtype.byte)
        beside = stage.backward_s.max(axis=0)
        exposed_s = (
            overlapped_s(beside, sync_s)
            - beside
            + overlapped_s(0.5 * beside, gather_s)
            - 0.5 * beside
        )
    exchange_s = m * worst - compute_s + exposed_s + waits_s
    busy_j = m * stage.energy_j.mean(axis=0) + optimiser.energy_j
    spent_s = m * stage.compute_s.mean(axis=0) + optimiser.latency_s
    latency_s = compute_s + exchange_s + bubble_s + optimiser.latency_s
    waiting_j = waiting_w * np.maximum(latency_s - spent_s, 0.0)
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
        compute_w=busy_j / spent_s,
        waiting_w=np.broadcast_to(waiting_w, latency_s.shape),
    )


def expected_straggle(gpus: int, spread: float) -> float:
    """Return how much slower than the mean the slowest of ``gpus`` cards is expected to be.

    Speeds of cards are taken as normal with relative standard deviation ``spread``; the expected
    largest of n normal numbers is about Φ⁻¹((n - 0.375) / (n + 0.25)) [Blom1958].

    >>> round(expected_straggle(8, 0.01), 4), expected_straggle(1, 0.01)
    (0.0143, 0.0)
    """
    return spread * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) if gpus > 1 else 0.0


@dataclass(frozen=True)
class StageCosts:
    """One micro-batch on each pipeline stage, arrays ``(stage, *sweep)``."""

    total_s: Array
    compute_s: Array
    energy_j: Array
    backward_s: Array  # of the layers alone, beside which gradients travel


def cost_stages(
    cost: MicrobatchCost, recipe: TrainingRecipe, strategy: TrainingStrategy, links: ClusterLinks
) -> StageCosts:
    """Return what one micro-batch costs on each pipeline stage."""
    full = strategy.recompute is Recompute.FULL
    slowed = (
        COMPUTE_SLOWED
        if links.gpu.architecture in ("volta", "ampere", "ada")
        else PERSISTENT_SLOWED
    )
    sharded = strategy.sharding is Sharding.ZERO3
    # the first gradient of a step stays where it was written, if it has the format it is summed in
    copied = 1.0
    if not sharded and recipe.gradient_byte == recipe.dtype.byte:
        copied = (strategy.accumulation - 1) / strategy.accumulation
    rows = []
    for stage in range(strategy.pp):
        total_s = compute_s = energy_j = backward_s = np.zeros(())
        for section, each in zip(cost.work.sections, cost.sections, strict=True):
            share = _layers_here(cost.work, section, stage, strategy)
            if not share:
                continue
            repeated = section.is_layer
            again = each.recomputed(strategy) if repeated else np.zeros_like(each.forward)
            forward, forward_j = each.forward
            copies = each.gathered_copies if sharded else each.copies
            backward, backward_j = each.backward + copied * copies + again
            gather_s = scatter_s = 0.0
            if (
                strategy.sharding in (Sharding.ZERO2, Sharding.ZERO3)
                and strategy.dp * strategy.cp > 1
            ):
                experts = section.expert_trained
                shared = section.trained - experts
                byte = recipe.dtype.byte
                if sharded:
                    stored = shared * byte + section.frozen * recipe.base_bits / 8
                    gather_s = _replica_exchange_s(
                        "all_gather", stored, experts * byte, strategy, links
                    )
                summed = shared * recipe.gradient_byte
                byte = recipe.gradient_byte
                scatter_s = _replica_exchange_s(
                    "reduce_scatter", summed, experts * byte, strategy, links
                )
                if (
                    strategy.pp > 1
                ):  # stages keep gathered weights and gradients for all micro-batches of a step
                    gather_s = gather_s / strategy.accumulation
                    scatter_s = scatter_s / strategy.accumulation
            inner_f, inner_b = _inner_exchange_s(
                section, recipe, strategy, links, full and repeated
            )
            f_s = overlapped_s(forward, gather_s, slowed) + inner_f
            b_s = overlapped_s(backward, gather_s + scatter_s, slowed) + inner_b
            if strategy.recompute is Recompute.OFFLOAD and repeated:
                away_s = (section.saved_byte - section.input_byte) / _host_byte_per_s(links.gpu)
                f_s = (
                    f_s + overlapped_s(forward, away_s, 0.0) - forward
                )  # copy engines, not SMs, move them
                b_s = b_s + overlapped_s(backward, away_s, 0.0) - backward
            if strategy.ep > 1 and section.chosen:  # there and back
                swap_s = 2 * _expert_swap_s(section, recipe, strategy, links)
                f_s = f_s + _exposed_swap_s(forward, swap_s, recipe.expert_overlap, slowed)
                b_s = b_s + _exposed_swap_s(backward, swap_s, recipe.expert_overlap, slowed)
            if (
                section.chosen and not recipe.graphs
            ):  # the host waits for counts of tokens, so it is never ahead
                f_s = np.maximum(f_s, EXPERT_HOST_S / 3.0)
                b_s = np.maximum(b_s, EXPERT_HOST_S * 2.0 / 3.0)
            total_s = total_s + share * (f_s + b_s)
            compute_s = compute_s + share * (forward + backward)
            energy_j = energy_j + share * (forward_j + backward_j)
            backward_s = backward_s + (share * backward if repeated else 0.0)
        rows.append((total_s, compute_s, energy_j, backward_s))
    return StageCosts(
        *(np.stack(np.broadcast_arrays(*column)) for column in zip(*rows, strict=True))
    )


def _host_byte_per_s(gpu: Gpu) -> float:
    """Return what one direction of PCIe carries, of which large copies reach ``HOST_LINK_SHARE``."""
    if gpu.links.pcie_byte_per_s is None:
        raise bad_value(
            "recompute",
            f"a way other than offload: the PCIe link of the {gpu.name} is unknown",
            "offload",
        )
    return HOST_LINK_SHARE * float(np.mean(gpu.links.pcie_byte_per_s)) / 2.0


def _layers_here(
    work: MicrobatchWork, section: SectionWork, stage: int, strategy: TrainingStrategy
) -> float:
    """Return how many repetitions of a section a stage has: layers evenly, the ends at the ends.

    Layers that stages cannot share evenly are laid out so that stages with an end have fewer: all
    take alike."""
    uneven = sum(layer.repeat for layer in work.layers) % strategy.pp > 0
    if section.is_layer or uneven:
        return section.repeat / strategy.pp
    return float(stage == (0 if section.label == "embedding" else strategy.pp - 1))


def overlapped_s(
    compute_s: Array, exchange_s: Array | float, slowed: float = COMPUTE_SLOWED
) -> Array:
    """Return the time of compute with an exchange beside it.

    Compute slows by the share ``slowed`` while the exchange runs; what the exchange takes beyond
    ``OVERLAP`` of the compute time is waited for."""
    beside_s = compute_s + slowed * np.minimum(exchange_s, compute_s)
    return np.asarray(beside_s + np.maximum(exchange_s - OVERLAP * beside_s, 0.0))


def _replica_exchange_s(
    collective: str,
    byte: float,
    expert_byte: float,
    strategy: TrainingStrategy,
    links: ClusterLinks,
) -> float:
    """Return seconds of an exchange among copies of weights: experts have fewer copies, ``ep`` GPUs
    apart.
    """
    stride = strategy.ep if strategy.ep > 1 else strategy.tp
    return links.exchange_s(
        collective, byte, strategy.dp * strategy.cp, strategy.tp
    ) + links.exchange_s(collective, expert_byte, strategy.expert_dp, stride)


def _inner_exchange_s(
    section: SectionWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    links: ClusterLinks,
    again: bool,
) -> tuple[float, float]:
    """Return exposed seconds, forward and backward, of tensor and context exchanges of one
    repetition.
    """
    forward = sum(
        links.exchange_s(op.collective, op.bytes, op.gpus) for op in section.forward_exchanges
    )
    backward = sum(
        links.exchange_s(op.collective, op.bytes, op.gpus) for op in section.backward_exchanges
    )
    backward += forward if again else 0.0
    overlap = TENSOR_OVERLAP if strategy.sequence_parallel else 0.0  # both came to Megatron in 2022
    forward = (1.0 - overlap) * forward
    backward = (1.0 - overlap) * backward
    if strategy.pp > 1 and section.is_layer:
        send = links.exchange_s("send", section.input_byte, 2, strategy.gpus // strategy.pp)
        send /= section.repeat / strategy.pp / strategy.interleave
        forward = forward + send * 0.5
        backward = backward + send * 0.5
    if strategy.cp > 1 and section.is_layer:
        keys = section.key_byte * strategy.cp
        ring = links.exchange_s("all_gather", keys, strategy.cp, strategy.tp)
        forward = forward + 0.5 * ring
        backward = backward + ring
    return forward, backward


def _exposed_swap_s(compute_s: Array, swap_s: float, overlap: float, slowed: float) -> Array:
    """Return what an exchange of experts adds to the compute of another batch, of which it hides
    ``overlap``.
    """
    hidden_s = np.minimum(overlap * swap_s, OVERLAP * compute_s)
    return np.asarray(swap_s - hidden_s + slowed * hidden_s)


def _expert_swap_s(
    section: SectionWork, recipe: TrainingRecipe, strategy: TrainingStrategy, links: ClusterLinks
) -> float:
    """Return the seconds in which tokens reach their experts on ``ep`` neighbouring GPUs.

    A token goes once to each node that has one of its experts, and from there once to each of their
    GPUs (DeepEP, HybridEP). Its k experts lie in n·(1 - (1 - 1/n)^k) different ones of n places.
    NCCL's all-to-all sends k copies. Tensor-parallel GPUs send a share of the tokens each. Both
    ways of travel run at the same time."""
    node = links.gpu.node or node_of_gpu(links.gpu.name)
    inside = min(node.gpu_count, strategy.ep)
    nodes = -(-strategy.ep // inside)
    byte = section.token_byte / strategy.tp
    met_gpus, met_nodes = (
        n * (1.0 - (1.0 - 1.0 / n) ** section.chosen) for n in (strategy.ep, nodes)
    )
    if recipe.expert_copies:
        met_gpus = section.chosen / nodes
        met_nodes = section.chosen
    near_s = links.exchange_s("all_to_all", byte * met_gpus, inside)
    return max(near_s, links.exchange_s("all_to_all", byte * met_nodes, nodes, inside))


def optimiser_graph(
    work: MicrobatchWork, recipe: TrainingRecipe, strategy: TrainingStrategy
) -> Graph:
    """Return the optimiser's work on the weights that one GPU updates.

    A fused optimiser passes once over weights, gradients and state: AdamW with fp32 masters reads
    gradient, master and two moments, and writes those but the gradient, and the weight. Weights of
    fp8 products are written in fp8 as well, in both orders. Muon updates the matrices of layers
    operator by operator, AdamW all else; Adafactor all matrices so. GPUs that share the state take
    a share of the matrices."""
    whole = strategy.sharding is Sharding.NONE
    copies = {
        False: 1 if whole else strategy.dp * strategy.cp,
        True: 1 if whole else strategy.expert_dp,
    }
    fused = dict.fromkeys(copies, 0)  # weights of one pass: those of experts are True
    updates: list[Operator] = []
    for section in work.sections:
        fused[False] += (section.trained - section.expert_trained) * section.repeat
        fused[True] += section.expert_trained * section.repeat
        if recipe.optimizer is Optimizer.ADAFACTOR or (
            recipe.optimizer is Optimizer.MUON and section.is_layer
        ):
            for many, *sides in section.matrices:
                fused[many > 1] -= many * sides[0] * sides[1] * section.repeat
                times = max(round(many * section.repeat / strategy.pp / copies[many > 1]), 1)
                updates += [
                    replace(op, count=op.count * times) for op in _matrix_update(recipe, *sides)
                ]
    weights = max(int(sum(fused[of] / copies[of] for of in fused) / strategy.pp), 1)
    masters = recipe.has_masters
    byte = recipe.dtype.byte
    moments = (
        replace(recipe, optimizer=Optimizer.ADAMW) if recipe.optimizer is Optimizer.MUON else recipe
    )
    read = recipe.gradient_byte + moments.state_byte + (0 if masters else byte)
    written = moments.state_byte + byte + recipe.narrow_byte
    block = optimiser_block(weights, Dtype.FP32 if masters else recipe.dtype, read, written)
    return Graph("optimiser", (block, Block(tuple(updates), 1)) if updates else (block,))


def _matrix_update(recipe: TrainingRecipe, rows: int, columns: int) -> list[Operator]:
    """Return the operators that update a matrix, each a pass over its elements or a product.

    Muon (``torch.optim.Muon``) updates the moment, makes it orthogonal by five Newton-Schulz
    iterations X <- aX + (bA + cA²)X with A = XXᵀ, 4m²n + 2m³ operations each in bf16 for sides m <=
    n [Jordan2024], and adds it to the weight. Products that add to a matrix copy it first. A tall
    matrix is transposed in place: its first copy and the last sum cross it against the order in
    memory. Adafactor (``transformers.Adafactor``, without a first moment) works in fp32: it squares
    the gradient, averages squares by rows and columns, divides the gradient by the root of their
    product, a matrix made of a row and a column, then by its norm, a number that the GPU holds,
    scales, and adds; twelve steps more work on rows, columns and norms alone."""
    masters = recipe.has_masters
    grad = recipe.gradient_byte
    byte = recipe.dtype.byte
    own = 4 if masters else byte
    m = min(rows, columns)
    n = max(rows, columns)
    crossed: dict[str, Any] = (
        {"layout": Layout.TRANSPOSED, "rows": n, "run": 1} if rows > columns else {}
    )

    def walk(
        function: str,
        read: float,
        write: float,
        times: int = 1,
        size: int = m * n,
        written: int = 0,
        **walked: Any,
    ) -> Operator:
        wide = max(read / (1 + (function == "add")), write) > 2
        return Elementwise(
            function, size, dtype=Dtype.FP32 if wide else recipe.dtype, read=int(size * read),
            write=written or int(size * write), count=times, label="optimiser", **walked,
        )  # fmt: skip

    ops = [walk("cast", 4, byte + recipe.narrow_byte)] if masters or recipe.narrow else []
    if recipe.optimizer is Optimizer.ADAFACTOR:
        ops += (
            [walk("cast", byte, 4, (grad < 4) + (not masters))] if grad < 4 or not masters else []
        )
        ops += [
            walk("scale", 4, 4, 4),
            walk("add", 8, 4, 2),
            walk("abs", 4, 0, 3),
            walk("scale", 4, 4, 12, n),
        ]
        ops += [walk("mean", 4, 0, written=4 * columns, layout=Layout.TRANSPOSED)]
        ops += [
            walk(function, read, 4, layout=Layout.BROADCAST)
            for function, read in (("mul", 0), ("div", 4))
        ]
        return ops if masters else [*ops, walk("cast", 4, byte)]
    moment = STATE_BYTE[Optimizer.MUON] * own / 4
    ops += [walk("add", grad + moment, moment), walk("add", grad + moment, grad), walk("abs", 2, 0)]
    ops += [walk("cast", grad, 2)] if grad > 2 else []
    ops += [
        walk("div", 2, 2, layout=Layout.BROADCAST),
        walk("scale", own, own),
        walk("add", own + 2, own, **crossed),
    ]
    ops += [walk("copy", 2, 2, NEWTON_SCHULZ - 1), walk("copy", 2, 2, **crossed)]
    ops += [walk("copy", 2, 2, NEWTON_SCHULZ, m * m)]
    sizes = ((m, m, n), (m, m, m), (m, n, m))
    return [
        *ops,
        *(
            Linear(*of, dtype=Dtype.BF16, count=NEWTON_SCHULZ, label="newton-schulz")
            for of in sizes
        ),
    ]
