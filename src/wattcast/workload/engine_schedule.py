"""Cut a pass of a model into the steps of an inference engine, as the engine's host sees them.

An engine computes at most ``STEP_TOKENS`` tokens in a step, so that a longer prompt, or more
prompts, take several. ``predictor.engine_host`` says how long the host takes for a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from wattcast.core import bad_value
from wattcast.workload.engine_operators import (
    FusedExperts,
    LatentAttention,
    PagedAttention,
)
from wattcast.workload.model_options import ModelOptions, WorkloadPhase
from wattcast.workload.operator_base import MOST_CALLS, Operator
from wattcast.workload.operator_types import Attention
from wattcast.workload.scan_operators import StateScan

# The most that vLLM computes in a step by default (max_num_batched_tokens).
STEP_TOKENS = 8192
ATTENTION = (Attention, PagedAttention, LatentAttention)


@dataclass(frozen=True)
class EngineLaunches:
    """What the host of an engine launches one by one in a step that no CUDA graph holds."""

    layers: int  # with attention of any kind, or with a scan
    experts: int = 0  # layers with fused experts
    latent: int = 0  # of the layers, those with latent attention
    scans: int = 0  # of the layers, those with a scan
    shared_expert: bool = False  # beside the experts of a layer
    packed_experts: bool = False  # in mxfp4, as gpt-oss was published
    large_graphs: bool = False  # vLLM captures larger steps of gpt-oss than of others


@dataclass(frozen=True)
class EngineStep:
    """A step of an inference engine as its host sees it, and how often it is repeated."""

    launches: EngineLaunches
    tokens: int  # computed in one step
    decodes: int  # sequences that decode
    prompts: int  # sequences with prompt tokens in one step
    admitted: float  # requests that are taken in, a step
    count: int = 1  # of steps
    place: int = 0  # among the steps of a workload

    def __post_init__(self) -> None:
        launches = self.launches
        sizes = {
            "tokens": self.tokens,
            "decodes": self.decodes,
            "prompts": self.prompts,
            "admitted": self.admitted,
            "count": self.count,
            "place": self.place,
            "layers": launches.layers,
            "experts": launches.experts,
            "latent": launches.latent,
            "scans": launches.scans,
        }
        for name, size in sizes.items():
            if not 0 <= size <= MOST_CALLS:
                raise bad_value(f"step.{name}", f"a number from 0 to {MOST_CALLS:,}", size)


def count_launches(
    calls: Iterable[tuple[Operator, int]],
    dims: Any,
    options: ModelOptions,
) -> EngineLaunches:
    """Count the layers of a pass, given as operators with their numbers of runs."""
    attention = 0
    experts = 0
    latent = 0
    scans = 0
    for op, count in calls:
        attention += count * isinstance(op, ATTENTION)
        experts += count * isinstance(op, FusedExperts)
        latent += count * isinstance(op, LatentAttention)
        scans += count * isinstance(op, StateScan)
    return EngineLaunches(
        layers=attention + scans,
        experts=experts,
        latent=latent,
        scans=scans,
        shared_expert=bool(getattr(dims, "shared_intermediate", 0)),
        packed_experts=bool(getattr(options.recipe, "experts_alone", False)),
        large_graphs=bool(getattr(dims, "sink", False)),
    )


def schedule_pass(launches: EngineLaunches, options: ModelOptions) -> EngineStep:
    """Return the steps of a prompt pass, or the one step of a decode."""
    if options.phase is WorkloadPhase.DECODE:
        return schedule_decodes(launches, options, 1, 0)
    tokens = options.batch * -(-(options.seq or 1) // options.cp)
    count = -(-tokens // STEP_TOKENS)
    return EngineStep(
        launches,
        tokens=-(-tokens // count),
        decodes=0,
        prompts=max(options.batch // count, 1),
        admitted=options.batch / count,
        count=count,
    )


def schedule_decodes(
    launches: EngineLaunches,
    options: ModelOptions,
    count: int,
    place: int,
) -> EngineStep:
    """Return ``count`` steps in which every sequence yields a token."""
    batch = options.batch
    return EngineStep(
        launches,
        tokens=batch,
        decodes=batch,
        prompts=0,
        admitted=0.0,
        count=count,
        place=place,
    )
