"""Bytes a run must hold: weights, cache, activations, gradients, optimiser state, workspace; what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from wattcast.errors import bad_value
from wattcast.workload.models import Model, load
from wattcast.workload.options import Options, Phase
from wattcast.workload.program import Program
from wattcast.workload.sizes import largest

# PyTorch's default cuBLAS workspace on Hopper, a handle and stream (CUBLAS_WORKSPACE_CONFIG, PyTorch notes)
WORKSPACE_BYTE = 32 * 2**20


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose, on one GPU. The CUDA context and the allocator's slack come on top."""

    weight_byte: int
    cache_byte: int
    activation_byte: int
    gradient_byte: int
    optimiser_byte: int
    workspace_byte: int

    @property
    def total_byte(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))

    def fits(self, capacity_byte: float) -> bool:
        """Whether all of it goes into ``capacity_byte``."""
        return self.total_byte <= capacity_byte


def footprint(model: str | Model, options: Options = Options()) -> Footprint:  # noqa: B008  (frozen)
    """What ``model`` holds at its peak under ``options``."""
    from wattcast.workload.build import programs  # which needs this module in turn
    from wattcast.workload.resolution import resolve

    model = load(model) if isinstance(model, str) else model
    options, _ = resolve(model, options)
    return of(options, programs(model, options))


def of(options: Options, programs: Sequence[Program]) -> Footprint:
    """What these passes hold at the worst moment of any of them.

    In training, activations are what the backward pass waits for (with recomputation: the input of
    each repeated layer, and one layer's worth) plus the most that is alive inside one section;
    gradients are as large as the weights, AdamW's two moments twice that.
    """
    training = options.phase is Phase.TRAIN
    weights = programs[0].parameter_byte
    activations = largest([_activation_byte(program, training, options.recompute) for program in programs])
    return Footprint(
        weight_byte=weights,
        cache_byte=max(program.cache_byte for program in programs),
        activation_byte=activations,
        gradient_byte=weights if training else 0,
        optimiser_byte=2 * weights if training else 0,
        workspace_byte=WORKSPACE_BYTE,
    )


def _activation_byte(program: Program, training: bool, recompute: bool) -> int:
    passing = largest([section.peak_byte for section in program.sections])
    if not training:
        return passing
    if not recompute:
        return passing + sum(section.saved_byte * section.repeat for section in program.sections)
    repeated = [section for section in program.sections if section.repeat > 1]
    single = sum(section.saved_byte for section in program.sections if section.repeat == 1)
    kept = sum(section.input_byte * section.repeat for section in repeated)
    return passing + single + kept + max((section.saved_byte for section in repeated), default=0)


def largest_batch(model: str | Model, options: Options, capacity_byte: float, most: int = 1 << 20) -> int:
    """The largest batch that fits into ``capacity_byte``, 0 when not even one does.

    The footprint grows with the batch, so the answer is bracketed by doubling and found by halving.
    """
    if not capacity_byte > 0:
        raise bad_value("capacity", "bytes above zero", capacity_byte)

    def fits(batch: int) -> bool:
        return footprint(model, replace(options, batch=batch)).fits(capacity_byte)

    if not fits(1):
        return 0
    low = 1
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    high = min(2 * low, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
