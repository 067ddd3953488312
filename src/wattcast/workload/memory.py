"""Bytes a run must hold: weights, cache, activations, optimiser state, workspace."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.workload.models import Model
from wattcast.workload.options import Options, Phase
from wattcast.workload.program import Program

# cuBLAS keeps this much a handle on Hopper (32 MiB); other chips less
WORKSPACE_BYTE = 32 * 2**20


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose."""

    weight_byte: int
    cache_byte: int
    activation_byte: int
    gradient_byte: int
    optimiser_byte: int
    workspace_byte: int

    @property
    def total_byte(self) -> int:
        return (
            self.weight_byte
            + self.cache_byte
            + self.activation_byte
            + self.gradient_byte
            + self.optimiser_byte
            + self.workspace_byte
        )


def of(model: Model, options: Options, program: Program) -> Footprint:
    """What ``program`` holds at its peak."""
    weights = program.parameter_byte
    training = options.phase is Phase.TRAIN
    return Footprint(
        weight_byte=weights,
        cache_byte=0,
        activation_byte=0,
        gradient_byte=weights if training else 0,
        optimiser_byte=2 * weights if training else 0,
        workspace_byte=WORKSPACE_BYTE,
    )
