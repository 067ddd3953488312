"""How GPUs share a training job: the strategies that fit their number and their nodes."""

from __future__ import annotations

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


MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


def list_strategies(
    gpus: int,
    dims: Any,
    node_gpus: int,
    given: TrainingStrategy,
    batch: int,
    free_batch: bool,
    recompute: Sequence[Recompute],
    micro_batch: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    sharding: Sharding | None = None,
) -> list[TrainingStrategy]:
    """List every way in which ``gpus`` GPUs, ``node_gpus`` to a node, can share a model of these
    dimensions.

    ``given`` holds what is never chosen. Of the rest, what is None is open. A ``free_batch`` was
    not given: it may grow to what GPUs can share."""
    heads = getattr(dims, "heads", 1)
    kv_heads = getattr(dims, "kv_heads", heads)
    layers = getattr(dims, "layers", 1)
    if (pp or 1) > layers:
        raise bad_value("pp", f"at most the model's {layers} layers", pp)
    if given.interleave > 1 and (pp or 1) == 1:
        raise bad_value("interleave", "1 without pipeline stages", given.interleave, "Add --pp 4.")
    tensor_widths = [tp] if tp else _list_tensor_widths(min(gpus, node_gpus), heads)
    stage_counts = [pp] if pp else _list_stage_counts(layers, gpus > node_gpus)
    strategies: list[TrainingStrategy] = []
    for width, stages in product(tensor_widths, stage_counts):
        if heads % width or (kv_heads % width and width % kv_heads):
            raise bad_value("tp", f"a divisor of heads={heads}", width)
        replicas, unused = divmod(gpus, width * stages * given.cp)
        if unused:
            continue
        shared = replace(
            given,
            dp=replicas,
            tp=width,
            pp=stages,
        )
        sequences = max(-(-batch // replicas), 1) * replicas if free_batch else batch
        shardings = [sharding] if sharding else _list_shardings(shared)
        sizes = [micro_batch] if micro_batch else list(MICRO_BATCHES)
        even_sizes = [size for size in sizes if sequences % (replicas * size) == 0]
        for zero, again, size in product(shardings, recompute, even_sizes):
            steps = sequences // (replicas * size)
            way = replace(shared, sharding=zero, recompute=again)
            strategies.append(replace(way, micro_batch=size, accumulation=steps))
    group = (tp or 1) * (pp or 1) * given.cp
    if gpus % group:
        raise bad_value("gpus", f"a multiple of tp x pp x cp = {group}", gpus)
    if not strategies:
        wanted = f"sequences that {gpus} GPUs can share evenly with these options"
        do = "--micro-batch, --tp or --pp"
        raise bad_value("global_batch", wanted, batch, f"Change --global-batch, {do}.")
    return strategies


def _list_tensor_widths(most: int, heads: int) -> list[int]:
    """List how many GPUs of a node may share each layer: as many as share its heads evenly."""
    return [width for width in (1, 2, 4, 8) if width <= most and heads % width == 0]


def _list_stage_counts(layers: int, has_nodes: bool) -> list[int]:
    """List how many pipeline stages a job may have: one, and more only across nodes."""
    if not has_nodes:
        return [1]
    return [stages for stages in (1, 2, 4, 8, 16) if stages <= layers]


def _list_shardings(strategy: TrainingStrategy) -> list[Sharding]:
    """List how replicas may share weights, gradients and moments: not at all if there is but one,
    and moments alone with pipeline stages.
    """
    if strategy.dp * strategy.cp <= 1:
        return [Sharding.NONE]
    if strategy.pp > 1:
        return [Sharding.ZERO1]
    return [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3]
