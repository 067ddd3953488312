"""Step costs with round numbers, so that schedules can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wattcast.predictor.engine_host import HostTimes, load_host_times
from wattcast.serving.step_costs import StepCosts

NO_HOST = HostTimes(
    schedule_s=0.0,
    schedule_per_sequence_s=0.0,
    launch_graph_s=0.0,
    launch_graph_per_sequence_s=0.0,
    launch_layer_s=0.0,
    launch_same_layer_s=0.0,
    launch_loose_layer_s=0.0,
    launch_same_loose_layer_s=0.0,
    launch_scan_s=0.0,
    launch_expert_scan_s=0.0,
    output_s=0.0,
    output_per_sequence_s=0.0,
    admit_s=0.0,
    switch_s=0.0,
    sample_s=0.0,
    governor_s=0.075,
    waiting_s=0.0,
    waiting_exponent=1.0,
    waiting_power=1.0,
    expert_layers=0.0,
    same_expert_layers=0.0,
    packed_expert_layers=0.0,
    latent_layers=0.0,
    shared_layers=0.0,
    scan_layers=1.0,
    expert_scan_layers=0.0,
    launch_spread=0.0,
    launch_memory=0.0,
    visible_memory=1.0,
    capture_sizes=tuple(range(1, 513)),
)


def make_costs(
    step_s: float = 1e-3,
    token_s: float = 1e-4,
    context_s: float = 0.0,
    power_w: float = 400.0,
    cache_tokens: int = 1 << 30,
    max_tokens: int = 8192,
    max_seqs: int = 256,
    host: HostTimes = NO_HOST,
    limit_w: float = 1e9,
) -> StepCosts:
    """A step takes ``step_s + token_s T + context_s Σ context`` at constant power; clock halves,
    time doubles.
    """

    def row(seconds: np.ndarray) -> np.ndarray:
        return np.stack([seconds, 2 * seconds, power_w * seconds, power_w * seconds], axis=-1)

    tokens = np.arange(max_tokens + 1)
    batch, contexts = np.arange(max_seqs + 1), np.array([0.0, 1e6])
    nothing = np.zeros((max_tokens + 1, 4))
    return StepCosts(
        clock_hz=np.array([2e9, 1e9]),
        tokens=row(np.where(tokens > 0, step_s + token_s * tokens, 0.0)),
        head=nothing[: 4 * max_seqs + 1],
        decode=row(context_s * batch[:, np.newaxis] * contexts),
        contexts=tuple(contexts.tolist()),
        prompt=nothing,
        prompt_more=nothing,
        prompt_slope=nothing,
        padded=tuple(tokens.tolist()),
        limit_w=limit_w,
        idle_w=100.0,
        waiting_w=100.0,
        layers=1,
        loose_layers=1.0,
        same_loose_layers=1.0,
        cache_tokens=cache_tokens,
        cache_byte_per_token=1e5,
        block_tokens=16,
        gpu_count=1,
        gpu="made up",
        model="made up",
        host=host,
        assumptions=(),
    )


def real_host(**changed: float) -> HostTimes:
    return replace(load_host_times(), **changed)
