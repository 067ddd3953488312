"""Bytes of a training run on one GPU, by purpose, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from wattcast.training.microbatch import MicrobatchWork
from wattcast.training.training_strategy import Recompute, Sharding, TrainingRecipe, TrainingStrategy

USABLE_SHARE = 0.94  # of the card's memory: the CUDA context, NCCL's buffers and the allocator's gaps take the rest


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the fullest GPU."""

    weight_byte: float
    gradient_byte: float
    optimiser_byte: float  # moments and master weights
    activation_byte: float  # kept for the backward pass, by all micro-batches in flight
    passing_byte: float  # alive inside one section, gathered weights included

    @property
    def total_byte(self) -> float:
        """Sum of all purposes."""
        return sum(getattr(self, item.name) for item in fields(self))


def measure_memory(work: MicrobatchWork, recipe: TrainingRecipe, strategy: TrainingStrategy) -> TrainingMemory:
    """Return the memory of the fullest pipeline stage.

    Stage i of p keeps the activations of p - i micro-batches (1F1B) [Narayanan2021], a little more when stages are
    interleaved: p·(1 + (p-1)/(p·v)). Sharded bytes are divided by the data-parallel GPUs; weights that are gathered
    for use (ZeRO-3) are there for two repetitions at a time, the one that computes and the next.
    """
    shards = strategy.dp * strategy.cp
    zero = strategy.sharding
    of_state = shards if zero is not Sharding.NONE else 1
    of_gradient = shards if zero in (Sharding.ZERO2, Sharding.ZERO3) else 1
    of_weight = shards if zero is Sharding.ZERO3 else 1
    worst: TrainingMemory | None = None
    for stage in {0, strategy.pp - 1}:
        flight = min(strategy.pp - stage, strategy.accumulation)
        if strategy.interleave > 1 and stage == 0:
            flight *= 1.0 + (strategy.pp - 1) / (strategy.pp * strategy.interleave)
        trained = frozen = kept = 0.0
        largest_weight = 0.0
        for section in work.sections:
            last = section.label != "embedding"
            share = section.repeat / strategy.pp if section.repeat > 1 else float((stage == 0) != last or strategy.pp == 1)
            trained += section.trained * share
            frozen += section.frozen * share
            if section.repeat > 1:
                kept += share * flight * section.kept_byte(strategy.recompute)
                largest_weight = max(largest_weight, float(section.weights))
            else:
                kept += share * section.saved_byte
        again = max((section.saved_byte for section in work.layers), default=0)
        here = [s for s in work.sections if stage or s.label != "head" or strategy.pp == 1]
        passing = max(max(s.peak_byte - s.saved_byte, s.input_byte) for s in here)  # saved bytes are counted already
        gathered = 2 * largest_weight * recipe.dtype.byte if of_weight > 1 else 0.0
        found = TrainingMemory(
            weight_byte=trained * recipe.dtype.byte / of_weight + frozen * recipe.base_bits / 8 / of_weight,
            gradient_byte=trained * recipe.gradient_byte / of_gradient,
            optimiser_byte=trained * recipe.state_byte / of_state,
            activation_byte=kept + (again if strategy.recompute is not Recompute.NONE else 0),
            passing_byte=passing + gathered,
        )
        if worst is None or found.total_byte > worst.total_byte:
            worst = found
    assert worst is not None
    return worst
