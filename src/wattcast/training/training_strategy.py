"""How GPUs share a training job: the strategies that fit their number and their nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from wattcast.core import bad_value
from wattcast.options.training_options import Recompute, Sharding


@dataclass(frozen=True)
class TrainingStrategy:
    """How GPUs share a model and its batch: ``tp``·``pp``·``cp``·``dp`` GPUs; ``ep`` of them share
    the experts.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sharding: Sharding = Sharding.ZERO1
    recompute: Recompute = Recompute.NONE
    micro_batch: int = 1  # sequences that one GPU group computes at a time
    accumulation: int = 1  # micro-batches a step
    interleave: int = 1  # model chunks a pipeline stage holds
    sequence_parallel: bool = True  # tensor-parallel GPUs share the tokens outside products

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """GPUs that hold copies of the same experts, of which ``ep`` neighbours have one each
        [NVIDIA2026].
        """
        return max(self.dp * self.cp * self.tp // self.ep, 1) if self.ep > 1 else self.dp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences of one step."""
        return self.dp * self.micro_batch * self.accumulation

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("dp", "tp", "pp", "cp", "ep")
            if getattr(self, name) > 1
        ]
        words += [str(self.sharding)] if self.sharding is not Sharding.NONE and self.dp > 1 else []
        words += [f"recompute {self.recompute}"] if self.recompute is not Recompute.NONE else []
        words += [f"interleave {self.interleave}"] if self.interleave > 1 else []
        return " ".join([*words, f"micro-batch {self.micro_batch} x {self.accumulation}"])


TENSOR_WIDTHS = (1, 2, 4, 8)  # GPUs of a node that may share each layer
STAGE_COUNTS = (1, 2, 4, 8, 16)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class StrategySpace:
    """Everything a job may choose its strategy from; None leaves a choice open."""

    dims: Any  # of the model
    node_gpus: int
    fixed: TrainingStrategy  # cp, ep, interleave and sequence parallelism, which are never chosen
    batch: int  # sequences of a step
    batch_may_grow: bool  # nobody set the batch: it may grow to what the GPUs share evenly
    recompute: Sequence[Recompute]
    micro_batch: int | None = None
    tp: int | None = None
    pp: int | None = None
    sharding: Sharding | None = None

    @property
    def heads(self) -> int:
        """Attention heads of the model."""
        return int(getattr(self.dims, "heads", 1))

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return int(getattr(self.dims, "kv_heads", self.heads))

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(getattr(self.dims, "layers", 1))


def list_strategies(gpus: int, space: StrategySpace) -> list[TrainingStrategy]:
    """List every way in which ``gpus`` GPUs can share the model and its batch."""
    _check_stages(space)
    tensor_widths = [space.tp] if space.tp else _list_tensor_widths(gpus, space)
    stage_counts = [space.pp] if space.pp else _list_stage_counts(gpus, space)

    strategies: list[TrainingStrategy] = []
    for width, stages in product(tensor_widths, stage_counts):
        _check_tensor_width(width, space)
        replicas, unused = divmod(gpus, width * stages * space.fixed.cp)
        if not unused:
            layout = replace(
                space.fixed,
                dp=replicas,
                tp=width,
                pp=stages,
            )
            strategies += _list_ways_of_layout(layout, space)

    group = (space.tp or 1) * (space.pp or 1) * space.fixed.cp
    if gpus % group:
        raise bad_value("gpus", f"a multiple of tp x pp x cp = {group}", gpus)
    if not strategies:
        expected = f"sequences that {gpus} GPUs can share evenly with these options"
        do = "--micro-batch, --tp or --pp"
        raise bad_value("global_batch", expected, space.batch, f"Change --global-batch, {do}.")
    return strategies


def _check_stages(space: StrategySpace) -> None:
    """Raise an error if the model has too few layers, or too few stages to interleave."""
    stages = space.pp or 1
    if stages > space.layers:
        raise bad_value("pp", f"at most the model's {space.layers} layers", space.pp)
    interleave = space.fixed.interleave
    if interleave > 1 and stages == 1:
        raise bad_value("interleave", "1 without pipeline stages", interleave, "Add --pp 4.")


def _check_tensor_width(width: int, space: StrategySpace) -> None:
    """Raise an error if so many GPUs cannot share the heads of a layer evenly.

    Heads of keys and values are split evenly too, or copied evenly where they are fewer.
    """
    splits_kv_heads = space.kv_heads % width == 0
    copies_kv_heads = width % space.kv_heads == 0
    if space.heads % width or not (splits_kv_heads or copies_kv_heads):
        raise bad_value("tp", f"a divisor of heads={space.heads}", width)


def _list_ways_of_layout(
    layout: TrainingStrategy,
    space: StrategySpace,
) -> list[TrainingStrategy]:
    """List the strategies that lay replicas and stages out alike.

    They differ in sharding, in recomputation and in the micro-batch, which shares the batch evenly.
    """
    sequences = space.batch
    if space.batch_may_grow:
        sequences_a_replica = max(math.ceil(space.batch / layout.dp), 1)
        sequences = sequences_a_replica * layout.dp
    shardings = [space.sharding] if space.sharding else _list_shardings(layout)
    micro_batches = [space.micro_batch] if space.micro_batch else MICRO_BATCHES

    ways = []
    for sharding, recompute, micro_batch in product(shardings, space.recompute, micro_batches):
        accumulation, uneven = divmod(sequences, layout.dp * micro_batch)
        if not uneven:
            way = replace(
                layout,
                sharding=sharding,
                recompute=recompute,
                micro_batch=micro_batch,
                accumulation=accumulation,
            )
            ways.append(way)
    return ways


def _list_tensor_widths(gpus: int, space: StrategySpace) -> list[int]:
    """List how many GPUs of a node may share each layer: as many as share its heads evenly."""
    most = min(gpus, space.node_gpus)
    return [width for width in TENSOR_WIDTHS if width <= most and space.heads % width == 0]


def _list_stage_counts(gpus: int, space: StrategySpace) -> list[int]:
    """List how many pipeline stages a job may have: one, and more only across nodes."""
    if gpus <= space.node_gpus:
        return [1]
    return [stages for stages in STAGE_COUNTS if stages <= space.layers]


def _list_shardings(strategy: TrainingStrategy) -> list[Sharding]:
    """List how replicas may share weights, gradients and moments: not at all if there is but one,
    and moments alone with pipeline stages.
    """
    if strategy.dp * strategy.cp <= 1:
        return [Sharding.NONE]
    if strategy.pp > 1:
        return [Sharding.ZERO1]
    return [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3]
