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
    layers = getattr(dims, "layers", 1)
    kv_heads = getattr(dims, "kv_heads", heads)
    tps = [tp] if tp else [n for n in (1, 2, 4, 8) if n <= min(gpus, node_gpus) and heads % n == 0]
    pps = (
        [pp]
        if pp
        else [n for n in (1, 2, 4, 8, 16) if n <= layers and (n == 1 or gpus > node_gpus)]
    )
    if (pp or 1) > layers:
        raise bad_value("pp", f"at most the model's {layers} layers", pp)
    if given.interleave > 1 and (pp or 1) == 1:
        raise bad_value("interleave", "1 without pipeline stages", given.interleave, "Add --pp 4.")
    found: list[TrainingStrategy] = []
    for t, p in product(tps, pps):
        if heads % t or (kv_heads % t and t % kv_heads):
            raise bad_value("tp", f"a divisor of heads={heads}", t)
        dp, left = divmod(gpus, t * p * given.cp)
        if left:
            continue
        whole = max(-(-batch // dp), 1) * dp if free_batch else batch
        useful = [Sharding.ZERO1] if p > 1 else [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3]
        shards = [sharding] if sharding else useful if dp * given.cp > 1 else [Sharding.NONE]
        sizes = [
            size
            for size in ([micro_batch] if micro_batch else MICRO_BATCHES)
            if whole % (dp * size) == 0
        ]
        for zero, again, size in product(shards, recompute, sizes):
            shared = replace(given, dp=dp, tp=t, pp=p, sharding=zero, recompute=again)
            found.append(replace(shared, micro_batch=size, accumulation=whole // (dp * size)))
    if gpus % (group := (tp or 1) * (pp or 1) * given.cp):
        raise bad_value("gpus", f"a multiple of tp x pp x cp = {group}", gpus)
    if not found:
        wanted = f"sequences that {gpus} GPUs can share evenly with these options"
        do = "--micro-batch, --tp or --pp"
        raise bad_value("global_batch", wanted, batch, f"Change --global-batch, {do}.")
    return found
