"""Power over time of replicas that serve requests.

The simulation knows the seconds and joules of every run of equal steps, and how long the device
waited for the host before it. How the joules of a step fall on parts of the power is taken from the
mean step of its kind: one with prompts, or one that only decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.options.serving_options import SIMULATE
from wattcast.options.setting_options import SettingOptions
from wattcast.predictor.api import find_gpu, predict
from wattcast.predictor.bundle import bundle_for
from wattcast.serving.engine_simulator import ReplicaRun
from wattcast.serving.serving_result import ServingResult
from wattcast.timeseries.governor_ripple import add_ripple
from wattcast.timeseries.power_curve import (
    PowerCurve,
    join_pieces,
    state_code,
)
from wattcast.timeseries.step_power import split_idle_power
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_catalogue import ModelSpec, load_model
from wattcast.workload.model_options import (
    ModelOptions,
    SoftwareStack,
    WorkloadPhase,
)
from wattcast.workload.readers.load_workload import find_model


@dataclass(frozen=True)
class PowerSplit:
    """How the power of an engine's GPU falls on its parts: shares that add up to one."""

    parts: tuple[str, ...]
    idle: Array  # (part,)
    prefill: Array
    decode: Array


def trace_serving(result: ServingResult, split: PowerSplit) -> list[PowerCurve]:
    """Return the power curve of each replica of a simulation."""
    return [trace_replica(run, split) for run in result.runs]


def trace_replica(run: ReplicaRun, split: PowerSplit) -> PowerCurve:
    """Return the power curve of one replica.

    Every run of steps is two pieces: the wait for the host before it, and the steps.
    """
    columns = run.segments
    begin_s = columns["device_begin_s"]
    span_s = columns["device_end_s"] - begin_s
    waited_s = columns["device_waited_s"]
    waited_j = run.waiting_w * waited_s
    is_idle = columns["steps"] == 0
    has_prompts = columns["prompts"] > 0

    idle_part_w = run.idle_w * split.idle
    if not len(begin_s):
        nothing = np.zeros((0, len(split.parts)))
        empty = np.zeros(0, dtype=np.int8)
        return join_pieces(
            np.zeros(0),
            nothing,
            empty,
            split.parts,
            idle_part_w,
            run.gpu_count,
        )

    # (segment, 2): the wait, and the steps
    spans = np.stack([waited_s, span_s - waited_s], axis=-1).ravel()
    joules = np.stack([waited_j, columns["energy_j"] - waited_j], axis=-1).ravel()
    busy = np.where(has_prompts, state_code("prefill"), state_code("decode"))
    busy = np.where(is_idle, state_code("idle"), busy)
    waiting = np.full(len(busy), state_code("waiting"))
    states = np.stack([waiting, busy], axis=-1).ravel().astype(np.int8)

    # before the first segment the replica idles
    spans = np.concatenate([begin_s[:1], spans])
    joules = np.concatenate([run.idle_w * begin_s[:1], joules])
    states = np.concatenate([np.array([state_code("idle")], dtype=np.int8), states])
    shares = np.stack([split.idle, split.prefill, split.decode])
    rows = np.zeros(len(states), dtype=np.int64)
    rows[states == state_code("prefill")] = 1
    rows[states == state_code("decode")] = 2
    part_j = joules[:, np.newaxis] * shares[rows]
    curve = join_pieces(
        spans,
        part_j,
        states,
        split.parts,
        idle_part_w,
        run.gpu_count,
    )
    return add_ripple(curve, run.limit_w)


def split_engine_power(
    result: ServingResult,
    model: str | ModelSpec,
    gpu: str | Gpu,
    options: Mapping[str, Any],
) -> PowerSplit:
    """Return how the power of a simulation's mean steps falls on the parts of a GPU.

    ``options`` are those of ``simulate``.
    """
    chosen = SIMULATE.parse(options)
    settings = chosen[SettingOptions]
    chip = find_gpu(gpu, settings.node)
    spec = model if isinstance(model, ModelSpec) else find_model(str(model)) or load_model(model)
    engine = ModelOptions.from_names(
        **chosen.select_keywords(ModelOptions), stack=SoftwareStack.ENGINE
    )
    card: dict[str, Any] = {"host_launch": 0.0}
    for name in ("clock", "power_limit"):
        if options.get(name) is not None:
            card[name] = options[name]
    shapes = _mean_steps(result)
    shares = {}
    parts: tuple[str, ...] = ()
    for phase, (batch, seq) in shapes.items():
        step = replace(
            engine,
            phase=phase,
            batch=batch,
            seq=seq,
        )
        prediction = predict(build_graph(spec, step), chip, **card)
        part_j = np.asarray(prediction.basis.detail.part_j)
        parts = prediction.basis.detail.parts
        shares[phase] = part_j / part_j.sum()
    top_hz = float(np.max(chip.clocks.max_hz))
    _, idle_part_w = split_idle_power(bundle_for(chip), chip, top_hz)
    return PowerSplit(
        parts,
        idle_part_w / idle_part_w.sum(),
        shares[WorkloadPhase.PREFILL],
        shares[WorkloadPhase.DECODE],
    )


def _mean_steps(result: ServingResult) -> dict[WorkloadPhase, tuple[int, int]]:
    """Return batch and sequence of the mean step with prompts, and of the mean one without."""
    steps = _sum_columns(result.runs, "steps", "steps", False)
    decodes = _sum_columns(result.runs, "decodes", "steps", False)
    prompt_steps = _sum_columns(result.runs, "steps", "steps", True)
    prompt_tokens = _sum_columns(result.runs, "prompt_tokens", "steps", True)
    mean_context = float((result.trace.prompt_tokens + result.trace.output_tokens / 2).mean())
    batch = max(round(decodes / max(steps, 1.0)), 1)
    tokens = max(round(prompt_tokens / max(prompt_steps, 1.0)), 1)
    return {
        WorkloadPhase.PREFILL: (1, tokens),
        WorkloadPhase.DECODE: (batch, max(round(mean_context), 1)),
    }


def _sum_columns(
    runs: Sequence[ReplicaRun],
    column: str,
    weight: str,
    prompts: bool,
) -> float:
    """Return the sum of a column over steps with prompts or without, each step counted."""
    total = 0.0
    for run in runs:
        chosen = (run.segments["prompts"] > 0) == prompts
        values = run.segments[column][chosen]
        weights = np.ones(len(values)) if column == weight else run.segments[weight][chosen]
        total += float(values @ weights)
    return total
