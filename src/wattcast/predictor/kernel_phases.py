"""Build the timeline of kernels: phases of each in cycles and seconds, with fitted corrections.

A kernel of U units on S SMs takes W = ⌈U/S⌉ waves (U/S where blocks are many and small). Its phases
[Lee2026, IV-B], each corrected by a λ of its group, follow one another:

    fixed   λ_f · launches                                   start and drain: seconds, or cycles as
    phase ``start`` serial  λ_s · steps · max(U/(S·slots), 1)                cycles: filling the
    pipeline, dependent steps between max(λ_2·B/β_L2, N/ν, λ_d·Q/β_DRAM)                layouts
    turned (N elements), partial sums, casts store   max(λ_2·B/β_L2, λ_d·Q/β_DRAM)
    results of tiles, which leave after the main loop main    max(λ_c·W·F_unit/π, λ_2·B_L2/β_L2,
    λ_d·Q/β_DRAM)   cycles on chip against seconds off it

and the whole is scaled by a learned residual of the shape (1 where nothing was learned). Units
whose rate nobody published do not bound anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array, Sweepable, map_distinct
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels
from wattcast.kernels.kernel_table import KernelWork
from wattcast.kernels.lowering import PIPE_EVENTS
from wattcast.predictor.learned_factors import (
    TURNS_PER_CYCLE,
    LearnedFactors,
    find_known_kind,
    late_dram_byte,
    load_imbalance,
    memory_tail,
)
from wattcast.predictor.timeline import (
    KernelPhase,
    Timeline,
    count_active_sms,
    count_rounds,
    count_waves,
)
from wattcast.workload.operator_base import index_words
from wattcast.workload.operator_types import Collective


@dataclass(frozen=True)
class Correction:
    """How far a group of kernels stays from the ideal: λ on cycles, DRAM and L2, fixed time, cycles
    a step.
    """

    compute: float
    memory: float
    fixed_s: float
    l2: float = 1.0
    serial_cycle: float = 0.0


@dataclass(frozen=True)
class LaunchCosts:
    """Seconds that the host takes per operator issued.

    ``host_weights`` are factors on the host's seconds by kind of operator, with ``other`` for the
    rest; without any, all operators cost the same. An inference engine replays CUDA graphs and
    prepares the next step while the GPU computes (``predictor.engine_host``), so that its operators
    cost the host nothing, and its steps ``engine_factor`` times what they cost the host that was
    measured. ``measured``: the cost is that of the user's own host, so that intervals do not hold
    how far hosts differ. ``start_hz``: the clock at which the fixed times of kernels hold, where
    they are cycles; None: they are seconds."""

    host_s_per_operator: Sweepable
    host_weights: Mapping[str, float] = field(default_factory=dict)
    engine_factor: Sweepable = 1.0
    measured: bool = False
    start_hz: float | None = None

    def host_s(self, kinds: Sequence[str]) -> Array:
        """Seconds the host takes to issue operators of these kinds, ``(*sweep, operator)``."""
        rest = self.host_weights.get("other", 1.0)
        weights = map_distinct(lambda kind: self.host_weights.get(kind, rest), kinds)
        return np.asarray(self.host_s_per_operator * weights)


def build_timeline(
    kernels: Kernels,
    gpu: Gpu,
    corrections: Mapping[str, Correction],
    launch: LaunchCosts,
    residuals: LearnedFactors | None = None,
    l2_byte_per_cycle: Sweepable | None = None,
) -> Timeline:
    """Build the clock-free timeline of ``kernels`` on ``gpu``; ``l2_byte_per_cycle`` is for a GPU
    that has none.
    """
    work = kernels.work
    l2_rate = l2_byte_per_cycle if gpu.l2.byte_per_cycle is None else gpu.l2.byte_per_cycle
    blended = blend_corrections(work, corrections)
    compute, memory, fixed_s, l2, serial = blended.T
    time_factor = energy_factor = off_chip = np.ones(len(kernels.ops))
    near = None
    if residuals is not None:
        time_factor, energy_factor, near = residuals.factors(kernels, blended)
        off_chip = residuals.off_chip(kernels, time_factor)
    late_byte = late_dram_byte(work)
    main_byte = memory_tail(kernels, gpu.sm_count) * (
        work.dram_read_byte + (work.dram_write_byte - late_byte)
    )
    off_chip_s = np.divide(off_chip * memory * main_byte, gpu.memory.byte_per_s, order="F")
    in_waves = count_waves(kernels, gpu.sm_count)
    factor = time_factor * compute
    on_chip = np.asarray(
        in_waves * (factor * work.unit_flop / kernels.pipe_per_cycle)
    )  # of the busiest SM
    if gpu.pipes.sfu_op_per_cycle is not None:
        sfu_per_cycle = gpu.sm_count * gpu.pipes.sfu_op_per_cycle
        on_chip = np.maximum(on_chip, np.divide(factor * kernels.sfu_op, sfu_per_cycle, order="F"))
    if l2_rate is not None:
        loaded_byte = (
            time_factor * l2 * work.l2_byte * load_imbalance(kernels, gpu.sm_count, in_waves)
        )
        on_chip = np.maximum(on_chip, np.divide(loaded_byte, l2_rate, order="F"))
    between = _add_moves(kernels, gpu, l2_rate, time_factor, l2, off_chip * memory, late_byte)
    events, value = count_events(kernels)
    tensor_rows = np.flatnonzero(map_distinct(_TENSOR.__contains__, kernels.pipe_event))
    tensor_rate = np.asarray(kernels.pipe_per_cycle).take(tensor_rows, axis=-1)
    tensor_each = (kernels.flop + work.padded_flop).take(tensor_rows) / tensor_rate
    start_s = time_factor * fixed_s * work.launches
    start: tuple[KernelPhase, ...] = (KernelPhase("fixed", None, start_s),)
    if launch.start_hz is not None:
        start = (
            KernelPhase("fixed", None, None),
            KernelPhase("start", start_s * launch.start_hz, None),
        )
    phases = (
        *start,
        KernelPhase(
            "serial",
            (time_factor * serial * work.steps) * count_rounds(kernels, gpu.sm_count),
            None,
        ),
        *between,
        KernelPhase("main", on_chip, np.maximum(off_chip_s, _link_s(kernels, gpu))),
    )
    return Timeline(
        kernels=kernels,
        phases=phases,
        tensor_rows=tensor_rows,
        tensor_cycles=np.divide(tensor_each, gpu.sm_count, order="F"),
        events=events,
        value=value,
        time_factor=time_factor,
        energy_factor=energy_factor,
        active=count_active_sms(kernels, in_waves),
        calls=kernels.calls,
        host_s=launch.host_s(index_words(kernels.ops, attrgetter("kind"))),
        near=near,
    )


def _add_moves(
    kernels: Kernels,
    gpu: Gpu,
    rate: Sweepable | None,
    time: Array,
    l2: Array,
    memory: Array,
    late_byte: Array,
) -> tuple[KernelPhase, ...]:
    """Return the phases in which an operator's kernels pass data on to one another and tiles store
    their results.
    """
    work = kernels.work

    def phase(name: str, byte: Array, dram_byte: Array, least: Array) -> KernelPhase:
        cycles = least if rate is None else np.maximum(np.divide(l2 * byte, rate, order="F"), least)
        off_chip_s = np.divide(memory * dram_byte, gpu.memory.byte_per_s, order="F")
        return KernelPhase(name, np.asarray(time * cycles), off_chip_s)

    phases = []
    if work.between_byte.any():
        turn = np.divide(work.turn_element, TURNS_PER_CYCLE * gpu.sm_count, order="F")
        phases.append(phase("between", work.between_byte, work.between_dram_byte, turn))
    if work.store_byte.any():  # nothing is turned: what does not vary over a sweep of SMs stays so
        phases.append(phase("store", work.store_byte, late_byte, np.zeros(())))
    return tuple(phases)


def blend_corrections(work: KernelWork, corrections: Mapping[str, Correction]) -> Array:
    """Return λ of compute, memory, fixed seconds, L2 and cycles a step of each kernel, ``(kernel,
    5)``.

    Where several kinds of kernel are likely, it is the mean of their logarithms.
    """
    groups = [name for name in work.features if name.startswith("is ")]
    share = np.concatenate([work.features[name] for name in groups]).reshape(len(groups), -1)
    of = [find_correction(name.removeprefix("is "), corrections) for name in groups]
    values = np.array([(c.compute, c.memory, c.fixed_s, c.l2, c.serial_cycle) for c in of])
    return np.asarray(np.exp(share.T @ np.log(np.maximum(values, _NOTHING))))


_NOTHING = 1e-300  # stands for a correction of zero in logs


def find_correction(group: str, corrections: Mapping[str, Correction]) -> Correction:
    """Find the corrections of a group, or of the nearest name above it: ``gemm.row`` falls back to
    ``gemm``.
    """
    if not (name := find_known_kind(group, corrections)):
        raise bad_value("corrections", f"{group}, or what it is a kind of", ", ".join(corrections))
    return corrections[name]


def _link_s(kernels: Kernels, gpu: Gpu) -> Sweepable:
    """Compute the seconds that kernels exchange data with other GPUs, ``(*sweep, kernel)``; zero
    where none does.
    """
    rows = np.flatnonzero(
        map_distinct(Collective.kind.__eq__, index_words(kernels.ops, attrgetter("kind")))
    )
    if not rows.size:
        return 0.0
    from wattcast.predictor.link_laws import collective_s  # most predictions are of one GPU

    taken_s = collective_s([kernels.ops[i] for i in rows.tolist()], gpu)  # type: ignore[misc]
    seconds = np.zeros((*taken_s.shape[:-1], len(kernels.ops)))
    seconds[..., rows] = taken_s
    return seconds


def count_events(kernels: Kernels) -> tuple[tuple[str, ...], Array]:
    """Count the events of one run of each kernel, ``(kernel, event)``.

    Every pipe has a column: that a kernel leaves a pipe alone is something the prediction knows.
    """
    work = kernels.work
    pipes = len(PIPE_EVENTS)
    value = np.zeros((len(kernels.ops), len(_EVENTS)))
    value[np.arange(len(value)), map_distinct(_PIPE_PLACE.get, kernels.pipe_event)] = (
        kernels.flop + work.padded_flop
    )
    l2_byte = work.l2_byte + work.store_byte + work.between_byte
    half_byte = 0.5 * work.between_dram_byte
    dram = work.dram_read_byte + half_byte, work.dram_write_byte + half_byte
    value[:, pipes:] = np.array(
        [kernels.sfu_op, work.shared_byte, l2_byte, *dram, kernels.link_byte]
    ).T
    return _EVENTS, value


_EVENTS = (
    *PIPE_EVENTS,
    "sfu_op",
    "shared_byte",
    "l2_byte",
    "dram_read_byte",
    "dram_write_byte",
    "link_byte",
)
_TENSOR = frozenset(event for event in PIPE_EVENTS if event.startswith("tensor"))
_PIPE_PLACE = {event: i for i, event in enumerate(PIPE_EVENTS)}
