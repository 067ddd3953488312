"""Give the time that an inference engine spends on its host: scheduling, launching kernels, handing
out tokens.

The host works while the GPU computes the step before (asynchronous scheduling), so a step takes the
longer of both times:

    t = max(t_GPU, schedule + launch + output + admit),   E = E_GPU + w·P_idle·(t - t_GPU)

Engines before that, and those that are told to, begin with a step when the one before has been
handed out (synchronous scheduling): t = max(t_GPU, layers) + w·b^e + admit of b sequences. What is
launched layer by layer runs beside the GPU, and so does most of a graph's launch, whose first
kernels start before its last are sent.

Steps that only decode replay one CUDA graph; a step with prompts of up to 512 tokens replays one
graph a layer; a larger step launches every operator by itself. ``predict`` and
``serving.engine_simulator`` both ask here, so that a step costs the same in both. Traffic launches
slower than a step that is repeated, and has host times of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from wattcast.coefficients import load_coefficients
from wattcast.core.arrays import Array
from wattcast.workload.engine_schedule import EngineLaunches, EngineStep

ENGINE = "vLLM 0.25.1"
# Tokens of the steps that vLLM captures as CUDA graphs by default (its ``cudagraph_capture_sizes``)
CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
# ... and besides for gpt-oss (its ``GptOssForCausalLMConfig``)
LARGE_CAPTURE_SIZES = (*CAPTURE_SIZES, *range(528, 1025, 16))


@dataclass(frozen=True)
class LaunchCounts:
    """What the host launches in a step, and how many dense layers that is worth without graphs."""

    layers: float
    loose_layers: float  # under traffic
    same_loose_layers: float  # in a step like the one before
    scans: float = 0.0  # layers whose scan no graph holds where there are prompts
    expert_scans: float = 0.0  # ... and which have experts, too


@dataclass(frozen=True)
class HostCoefficients:
    """Host times of one engine. Launches of layers come on top of ``launch_graph_s``.

    Without graphs, a layer with experts, latent attention or a scan counts as several dense ones:
    ``expert_layers`` and the like are layers on top of the one that holds them.
    """

    schedule_s: float
    schedule_per_sequence_s: float
    launch_graph_s: float
    launch_graph_per_sequence_s: float
    launch_layer_s: float  # of a step with prompts whose layers are graphs
    launch_same_layer_s: float  # of such a step, when the one before replayed the same graphs
    launch_loose_layer_s: float  # of a step without graphs
    launch_same_loose_layer_s: float  # of such a step, when the one before was alike
    launch_scan_s: float  # of a layer that scans a prompt, on top: no graph holds it
    launch_expert_scan_s: float  # of such a layer with experts, in a step of graphs
    output_s: float
    output_per_sequence_s: float
    admit_s: float  # to take in one request
    waiting_s: (
        float  # that the GPU waits for a step of one sequence where scheduling is synchronous
    )
    waiting_exponent: float  # ... and with which power of the sequences that grows
    switch_s: float  # GPU time that the first decode-only step after prompts takes longer
    sample_s: float  # GPU time of a step outside the model: sampling, bookkeeping
    governor_s: float  # time over which the power limit averages
    waiting_power: float  # power between kernels, as a multiple of idle power
    expert_layers: float  # fused experts
    same_expert_layers: float  # fused experts, in a step like the one before
    packed_expert_layers: float  # experts in mxfp4 (OpenAI's Triton kernels)
    latent_layers: float  # latent attention instead of plain attention
    shared_layers: float  # a shared expert
    scan_layers: float  # a layer with a scan, in all
    expert_scan_layers: float  # a scan, fused experts and a shared expert in one layer
    launch_spread: float  # standard deviation of the logarithm of a launch layer by layer
    launch_memory: float  # correlation of that logarithm with the one of the step before
    visible_memory: float  # memory an engine sees, as a multiple of the nominal one


_DEVICE_TIMES = ("switch_s", "sample_s", "governor_s")
# What the host does itself; the others are times of the GPU.
_OWN_TIMES = tuple(
    field.name
    for field in fields(HostCoefficients)
    if field.name.endswith("_s") and field.name not in _DEVICE_TIMES
)


@dataclass(frozen=True)
class HostTimes(HostCoefficients):
    """The time that the host of an engine takes for a step."""

    capture_sizes: tuple[int, ...] = CAPTURE_SIZES  # tokens of steps that one graph holds

    def launch_s(
        self,
        counts: LaunchCounts,
        tokens: int,
        decodes: int,
        layer_s: float,
        factor: float = 1.0,
    ) -> float:
        """Return the time to launch a step of traffic: a graph, and layers at ``layer_s`` each.

        A step of more tokens than any graph holds launches every operator. ``factor`` is how long
        layers take now.
        """
        loose_s = self.launch_loose_layer_s * counts.loose_layers
        return self._launch_s(
            counts,
            tokens,
            decodes,
            layer_s,
            loose_s,
            factor,
        )

    def repeated_step_s(
        self,
        counts: LaunchCounts,
        tokens: int,
        decodes: int,
        prompts: int,
        admitted: float,
    ) -> float:
        """Return the time for a step like the one before, which counts where the GPU takes less."""
        layer_s = self.launch_same_layer_s if prompts else 0.0
        loose_s = self.launch_same_loose_layer_s * counts.same_loose_layers
        launch_s = self._launch_s(
            counts,
            tokens,
            decodes,
            layer_s,
            loose_s,
        )
        sequences = decodes + prompts
        schedule_s = self.schedule_s + self.schedule_per_sequence_s * sequences
        output_s = self.output_s + self.output_per_sequence_s * sequences
        return schedule_s + self.admit_s * admitted + launch_s + output_s

    def launch_draft_s(
        self,
        counts: LaunchCounts,
        tokens: int,
        layer_s: float = 0.0,
    ) -> float:
        """Return the time to launch one pass of a draft model inside a step: one graph for each layer.

        ``layer_s`` is the time of a layer in a step with prompts. Without it the pass is like the
        one before, and its graphs stay loaded.
        """
        if layer_s > 0.0:
            loose_s = self.launch_loose_layer_s * counts.loose_layers
            return self._launch_layers_s(counts, tokens, layer_s, loose_s)
        loose_s = self.launch_same_loose_layer_s * counts.same_loose_layers
        return self._launch_layers_s(counts, tokens, self.launch_same_layer_s, loose_s)

    def _launch_s(
        self,
        counts: LaunchCounts,
        tokens: int,
        decodes: int,
        layer_s: float,
        loose_s: float,
        factor: float = 1.0,
    ) -> float:
        """Return the time to launch a step whose layers take ``loose_s`` in all without graphs."""
        layers_s = self._launch_layers_s(counts, tokens, layer_s, loose_s)
        return self.launch_graph_s + self.launch_graph_per_sequence_s * decodes + layers_s * factor

    def _launch_layers_s(
        self,
        counts: LaunchCounts,
        tokens: int,
        layer_s: float,
        loose_s: float,
    ) -> float:
        """Return the time to launch layers at ``layer_s`` each, or all without graphs."""
        loose = tokens > self.capture_sizes[-1]
        layers_s = loose_s if loose else layer_s * counts.layers
        if loose or layer_s > 0.0:
            layers_s += self.launch_scan_s * counts.scans
        if not loose and layer_s > 0.0:
            layers_s += self.launch_expert_scan_s * counts.expert_scans
        return layers_s

    def count_launches(
        self,
        launches: EngineLaunches,
        by_openai: bool,
    ) -> LaunchCounts:
        """Weigh what a step launches; ``by_openai``: packed experts run as OpenAI's kernels."""
        packed = launches.packed_experts and by_openai
        expert_scans = min(launches.scans, launches.experts)
        scans = launches.scans - expert_scans
        experts = launches.experts - expert_scans
        other_layers = launches.layers + (self.scan_layers - 1.0) * scans
        other_layers += self.expert_scan_layers * expert_scans
        other_layers += self.latent_layers * launches.latent

        def count_loose_layers(expert_layers: float) -> float:
            weight = self.packed_expert_layers if packed else expert_layers
            weight += self.shared_layers * launches.shared_expert
            return other_layers + weight * experts

        return LaunchCounts(
            layers=launches.layers,
            loose_layers=count_loose_layers(self.expert_layers),
            same_loose_layers=count_loose_layers(self.same_expert_layers),
            scans=scans,
            expert_scans=expert_scans,
        )

    def scale(self, factor: float) -> HostTimes:
        """Return the times of a host that takes ``factor`` times as long for all that it does."""
        times = {name: factor * getattr(self, name) for name in _OWN_TIMES}
        return replace(self, **times)

    def capture_large_graphs(self) -> HostTimes:
        """Return the times of an engine that captures steps of up to 1024 tokens."""
        return replace(self, capture_sizes=LARGE_CAPTURE_SIZES)


class HostBounds(NamedTuple):
    """What a host takes for a run of equal steps, each ``(*sweep,)``."""

    waiting_s: Array | float  # while the GPU waits
    beside_s: Array | float  # while the GPU computes

    def join(self, device_s: Array) -> Array:
        """Return the time of the steps if the GPU takes ``device_s`` for all of them."""
        return np.asarray(self.waiting_s + np.maximum(device_s, self.beside_s))


@dataclass(frozen=True)
class EngineHost:
    """The host of an engine on one kind of GPU, as a timeline needs it."""

    times: HostTimes
    by_openai: bool  # experts in mxfp4 run as OpenAI's kernels, as on Hopper
    factor: Array | float = 1.0  # (*sweep,) of this host's times over those that ship
    waits: bool = False  # for the GPU before it prepares the next step

    def bound_steps(
        self,
        step: EngineStep,
        count: Array | float,
    ) -> HostBounds:
        """Return what the host takes for ``count`` equal steps, whatever the GPU takes."""
        if not self.waits:
            return HostBounds(0.0, count * self.step_s(step))
        waiting_s = count * self.factor * self._waiting_s(step)
        return HostBounds(waiting_s, count * self.factor * self._layers_s(step))

    def _waiting_s(self, step: EngineStep) -> float:
        """Return how long the GPU waits for its next step where scheduling is synchronous."""
        sequences = max(step.decodes + step.prompts, 1)
        waiting_s = self.times.waiting_s * float(sequences) ** self.times.waiting_exponent
        return float(waiting_s) + self.times.admit_s * step.admitted

    def _layers_s(self, step: EngineStep) -> float:
        """Return what of a step is launched layer by layer, while the GPU computes."""
        times, counts = self._times_of(step)
        if step.tokens > times.capture_sizes[-1]:
            return times.launch_same_loose_layer_s * counts.same_loose_layers
        return times.launch_same_layer_s * counts.layers if step.prompts else 0.0

    def _times_of(self, step: EngineStep) -> tuple[HostTimes, LaunchCounts]:
        launches = step.launches
        times = self.times.capture_large_graphs() if launches.large_graphs else self.times
        return times, times.count_launches(launches, self.by_openai)

    def step_s(self, step: EngineStep) -> Array | float:
        """Return what the host takes for one step of a run of equal steps."""
        times, counts = self._times_of(step)
        return self.factor * times.repeated_step_s(
            counts,
            step.tokens,
            step.decodes,
            step.prompts,
            step.admitted,
        )


@cache
def load_host_times() -> HostTimes:
    """Read the host times that ship with Wattcast."""
    return HostTimes(**vars(load_coefficients("engine_host", HostCoefficients)))
