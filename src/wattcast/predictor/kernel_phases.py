"""Build the timeline of kernels: phases of each in cycles and seconds, with fitted corrections.

A kernel of U units on S SMs takes W = ⌈U/S⌉ waves (U/S where blocks are many and small). Its phases
[Lee2026, IV-B], each corrected by a λ of its group, follow one another:

    fixed    λ_f · launches                                start and drain: seconds, or cycles of
                                                           a phase ``start``
    serial   λ_s · steps · max(U/(S·slots), 1)             cycles: filling the pipeline, dependent
                                                           steps
    between  max(λ_2·B/β_L2, N/ν, λ_d·Q/β_DRAM)            layouts turned (N elements), partial
                                                           sums, casts
    store    max(λ_2·B/β_L2, λ_d·Q/β_DRAM)                 results of tiles, which leave after the
                                                           main loop
    main     max(λ_c·W·F_unit/π, λ_2·B_L2/β_L2, λ_d·Q/β_DRAM)    cycles on chip against seconds off
                                                           it

and the whole is scaled by a learned residual of the shape (1 where nothing was learned). Units
whose rate nobody published do not bound anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from operator import attrgetter
from typing import cast

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import (
    Array,
    Sweepable,
    map_distinct,
)
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels
from wattcast.kernels.kernel_table import KernelWork
from wattcast.kernels.lowering import PIPE_EVENTS
from wattcast.predictor.ideal_terms import (
    late_dram_byte,
    load_imbalance,
    memory_tail,
)
from wattcast.predictor.kernel_coefficients import KERNEL_TIMES
from wattcast.predictor.learned_factors import LearnedFactors, find_known_kind
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


# Operators that carry what a layer costs the host in Python: modules, views, masks
_LAYER_KINDS = ("attention", "bmm")


@dataclass(frozen=True)
class LaunchCosts:
    """Seconds that the host takes per operator issued.

    ``host_weights`` are factors on the host's seconds by kind of operator, with ``other`` for all
    kinds that have none; without any, all operators cost the same. An inference engine replays CUDA
    graphs and prepares the next step while the GPU computes (``predictor.engine_host``), so that
    its operators cost the host nothing, and its steps ``engine_factor`` times what they cost the
    host that was measured; with ``engine_waits`` it prepares a step after the one before.
    ``measured``: the cost is that of the user's own host, so that intervals do not hold how far
    hosts differ. ``start_hz``: the clock at which the fixed times of kernels hold, where they are
    cycles; None: they are seconds.
    """

    host_s_per_operator: Sweepable
    host_weights: Mapping[str, float] = field(default_factory=dict)
    engine_factor: Sweepable = 1.0
    engine_waits: bool = False
    measured: bool = False
    start_hz: float | None = None

    def host_s(self, kinds: Sequence[str], layer_host: float = 1.0) -> Array:
        """Return the seconds the host takes to issue operators of these kinds, ``(*sweep,
        operator)``; ``layer_host`` is a factor on what a layer costs besides its operators.
        """
        usual = self.host_weights.get("other", 1.0)

        def weigh(kind: str) -> float:
            weight = self.host_weights.get(kind, usual)
            if kind not in _LAYER_KINDS:
                return weight
            return usual + layer_host * (weight - usual)

        weights = map_distinct(weigh, kinds)
        return np.asarray(self.host_s_per_operator * weights)


def build_timeline(
    kernels: Kernels,
    gpu: Gpu,
    corrections: Mapping[str, Correction],
    launch: LaunchCosts,
    residuals: LearnedFactors | None = None,
    l2_byte_per_cycle: Sweepable | None = None,
    lone_sm_share: float = 0.0,
) -> Timeline:
    """Build the clock-free timeline of ``kernels`` on ``gpu``; ``l2_byte_per_cycle`` is for a GPU
    that has none.
    """
    scale = find_scale(kernels, corrections, residuals)
    return lay_out_timeline(
        kernels,
        gpu,
        scale,
        launch,
        l2_byte_per_cycle,
        lone_sm_share=lone_sm_share,
    )


@dataclass(frozen=True, eq=False, repr=False)
class MainBounds:
    """What bounds the main loop of kernels; each broadcasts to ``(*sweep, kernel)``.

    ``memory_tail`` is the time in device memory over that of an even load. The busiest SMs load
    ``busiest_l2_byte`` at the rate ``l2_port``; where that is not the rate of L2 itself, all loads
    are bound by L2 too. ``shared_cycles`` are those in which the busiest SM moves data through
    shared memory, with all corrections; None: nobody asks.
    """

    waves: Array
    memory_tail: Sweepable
    busiest_l2_byte: Array
    l2_port: Sweepable | None
    shared_cycles: Array | None
    link_s: Sweepable = 0.0  # seconds of what crosses between dies


def lay_out_timeline(
    kernels: Kernels,
    gpu: Gpu,
    scale: KernelScale,
    launch: LaunchCosts,
    l2_byte_per_cycle: Sweepable | None = None,
    bounds: MainBounds | None = None,
    swept_work: KernelWork | None = None,
    lone_sm_share: float = 0.0,
) -> Timeline:
    """Lay the phases of kernels end to end with corrections that were found before.

    ``swept_work`` is the work where columns of it are ``(*sweep, kernel)``; events are counted from
    that of ``kernels``.
    """
    events, value = count_events(kernels)
    if swept_work is not None:
        kernels = replace(kernels, work=swept_work)
    work = kernels.work
    l2_rate = l2_byte_per_cycle if gpu.l2.byte_per_cycle is None else gpu.l2.byte_per_cycle
    waves = count_waves(kernels, gpu.sm_count)
    serial_cycles = scale.time * scale.serial * work.steps
    if bounds is None:
        bounds = _published_bounds(
            kernels,
            gpu,
            l2_rate,
            waves,
            lone_sm_share,
        )
    phases = (
        *_start_phases(scale.time * scale.fixed_s * work.launches, launch),
        KernelPhase("serial", serial_cycles * count_rounds(kernels, gpu.sm_count), None),
        *_move_phases(kernels, gpu, l2_rate, scale),
        _main_phase(
            kernels,
            gpu,
            l2_rate,
            scale,
            bounds,
        ),
    )

    # cycles in which the tensor pipes are busy, for the effective clock
    is_tensor = map_distinct(_TENSOR.__contains__, kernels.pipe_event)
    tensor_rows = np.flatnonzero(is_tensor)
    tensor_flop = (kernels.flop + work.padded_flop).take(tensor_rows)
    tensor_rate = np.asarray(kernels.pipe_per_cycle).take(tensor_rows, axis=-1)
    tensor_cycles = np.divide(tensor_flop / tensor_rate, gpu.sm_count, order="F")

    return Timeline(
        kernels=kernels,
        phases=phases,
        tensor_rows=tensor_rows,
        tensor_cycles=tensor_cycles,
        events=events,
        value=value,
        time_factor=scale.time,
        energy_factor=scale.energy,
        active=count_active_sms(kernels, waves),
        calls=kernels.calls,
        host_s=launch.host_s(index_words(kernels.ops, attrgetter("kind"))),
        near=scale.near,
    )


@dataclass(frozen=True, eq=False, repr=False)
class KernelScale:
    """The fitted λ and the learned factors of each kernel, ``(kernel,)``."""

    compute: Array
    memory: Array
    fixed_s: Array
    l2: Array
    serial: Array
    time: Array  # learned factor on time
    energy: Array  # learned factor on energy
    off_chip: Array  # the part of the factor on time that seconds of device memory take
    near: Array | None  # (2, kernel) nearness to rows the factors were learned from


def find_scale(
    kernels: Kernels,
    corrections: Mapping[str, Correction],
    residuals: LearnedFactors | None,
) -> KernelScale:
    """Find the fitted λ and the learned factors of each kernel."""
    blended = blend_corrections(kernels.work, corrections)
    time = energy = off_chip = np.ones(len(kernels.ops))
    near = None
    if residuals is not None:
        time, energy, near = residuals.factors(kernels, blended)
        off_chip = residuals.off_chip(kernels, time)
    compute, memory, fixed_s, l2, serial = blended.T
    return KernelScale(
        compute,
        memory,
        fixed_s,
        l2,
        serial,
        time,
        energy,
        off_chip,
        near,
    )


def _start_phases(start_s: Array, launch: LaunchCosts) -> tuple[KernelPhase, ...]:
    """Return the phases of starting and draining; the first has seconds alone."""
    if launch.start_hz is None:
        return (KernelPhase("fixed", None, start_s),)
    return (
        KernelPhase("fixed", None, None),
        KernelPhase("start", start_s * launch.start_hz, None),
    )


def _move_phases(
    kernels: Kernels,
    gpu: Gpu,
    l2_rate: Sweepable | None,
    scale: KernelScale,
) -> tuple[KernelPhase, ...]:
    """Return the phases in which an operator's kernels pass data on to one another and tiles store
    their results.
    """
    work = kernels.work

    def make_phase(
        name: str,
        byte: Array,
        dram_byte: Array,
        least_cycles: Array,
    ) -> KernelPhase:
        cycles = least_cycles
        if l2_rate is not None:
            l2_cycles = np.divide(scale.l2 * byte, l2_rate, order="F")
            cycles = np.maximum(l2_cycles, least_cycles)
        memory_byte = scale.off_chip * scale.memory * dram_byte
        seconds = np.divide(memory_byte, gpu.memory.byte_per_s, order="F")
        return KernelPhase(name, np.asarray(scale.time * cycles), seconds)

    phases = []
    if work.between_byte.any():
        turn_rate = KERNEL_TIMES.turns_per_cycle * gpu.sm_count
        turn_cycles = np.divide(work.turn_element, turn_rate, order="F")
        between = make_phase("between", work.between_byte, work.between_dram_byte, turn_cycles)
        phases.append(between)
    if work.store_byte.any():  # nothing is turned: what does not vary over a sweep of SMs stays so
        store = make_phase("store", work.store_byte, late_dram_byte(work), np.zeros(()))
        phases.append(store)
    return tuple(phases)


def _published_bounds(
    kernels: Kernels,
    gpu: Gpu,
    l2_rate: Sweepable | None,
    waves: Array,
    lone_sm_share: float,
) -> MainBounds:
    """Return the bounds of the main loop on a chip that exists."""
    busiest_byte = kernels.work.l2_byte * load_imbalance(kernels, gpu.sm_count, waves)
    return MainBounds(
        waves,
        memory_tail(kernels, gpu.sm_count, lone_sm_share),
        busiest_byte,
        l2_rate,
        None,
    )


def _main_phase(
    kernels: Kernels,
    gpu: Gpu,
    l2_rate: Sweepable | None,
    scale: KernelScale,
    bounds: MainBounds,
) -> KernelPhase:
    """Return the phase of the main loop: arithmetic and loads from L2 against memory and links."""
    work = kernels.work
    factor = scale.time * scale.compute
    waves = bounds.waves
    # arithmetic of the busiest SM
    cycles = np.asarray(waves * (factor * work.unit_flop / kernels.pipe_per_cycle))
    if gpu.pipes.sfu_op_per_cycle is not None:
        sfu_rate = gpu.sm_count * gpu.pipes.sfu_op_per_cycle
        cycles = np.maximum(cycles, np.divide(factor * kernels.sfu_op, sfu_rate, order="F"))
    if l2_rate is not None and bounds.l2_port is not None:
        busiest_byte = scale.time * scale.l2 * bounds.busiest_l2_byte
        cycles = np.maximum(cycles, np.divide(busiest_byte, bounds.l2_port, order="F"))
        if bounds.l2_port is not l2_rate:
            l2_byte = scale.time * scale.l2 * work.l2_byte
            cycles = np.maximum(cycles, np.divide(l2_byte, l2_rate, order="F"))
    if bounds.shared_cycles is not None:
        cycles = np.maximum(cycles, bounds.shared_cycles)

    early_byte = work.dram_read_byte + (work.dram_write_byte - late_dram_byte(work))
    dram_byte = bounds.memory_tail * early_byte
    memory_byte = scale.off_chip * scale.memory * dram_byte
    seconds = np.divide(memory_byte, gpu.memory.byte_per_s, order="F")
    link_s = np.maximum(_link_s(kernels, gpu), bounds.link_s)
    return KernelPhase("main", cycles, np.maximum(seconds, link_s))


def _link_s(kernels: Kernels, gpu: Gpu) -> Sweepable:
    """Compute the seconds that kernels exchange data with other GPUs, ``(*sweep, kernel)``; zero
    where none does.
    """
    kinds = index_words(kernels.ops, attrgetter("kind"))
    rows = np.flatnonzero(map_distinct(Collective.kind.__eq__, kinds))
    if not rows.size:
        return 0.0
    from wattcast.predictor.link_laws import collective_s  # most predictions are of one GPU

    collectives = [cast(Collective, kernels.ops[row]) for row in rows.tolist()]
    exchange_s = collective_s(collectives, gpu)
    seconds = np.zeros((*exchange_s.shape[:-1], len(kernels.ops)))
    seconds[..., rows] = exchange_s
    return seconds


def blend_corrections(work: KernelWork, corrections: Mapping[str, Correction]) -> Array:
    """Return λ of compute, memory, fixed seconds, L2 and cycles a step of each kernel, ``(kernel,
    5)``.

    Where several kinds of kernel are likely, it is the mean of their logarithms.
    """
    columns = [name for name in work.features if name.startswith("is ")]
    share = np.concatenate([work.features[name] for name in columns]).reshape(len(columns), -1)
    values = []
    for name in columns:
        c = find_correction(name.removeprefix("is "), corrections)
        values.append((c.compute, c.memory, c.fixed_s, c.l2, c.serial_cycle))
    logs = np.log(np.maximum(np.array(values), _NOTHING))
    return np.asarray(np.exp(share.T @ logs))


_NOTHING = 1e-300  # stands for a correction of zero in logs


def find_correction(group: str, corrections: Mapping[str, Correction]) -> Correction:
    """Find the corrections of a group, or of the nearest name above it: ``gemm.row`` falls back to
    ``gemm``.
    """
    name = find_known_kind(group, corrections)
    if not name:
        raise bad_value("corrections", f"{group}, or what it is a kind of", ", ".join(corrections))
    return corrections[name]


def count_events(kernels: Kernels) -> tuple[tuple[str, ...], Array]:
    """Count the events of one run of each kernel, ``(kernel, event)``.

    Every pipe has a column: that a kernel leaves a pipe alone is something the prediction knows.
    """
    work = kernels.work
    count = len(kernels.ops)
    value = np.zeros((count, len(_EVENTS)))
    pipe = map_distinct(_PIPE_PLACE.get, kernels.pipe_event)
    value[np.arange(count), pipe] = kernels.flop + work.padded_flop

    half_between_byte = 0.5 * work.between_dram_byte
    counts = {
        "sfu_op": kernels.sfu_op,
        "shared_byte": work.shared_byte,
        "l2_byte": work.l2_byte + work.store_byte + work.between_byte,
        "dram_read_byte": work.dram_read_byte + half_between_byte,
        "dram_write_byte": work.dram_write_byte + half_between_byte,
        "link_byte": kernels.link_byte,
    }
    columns = [counts[event] for event in _OTHER_EVENTS]
    value[:, len(PIPE_EVENTS) :] = np.array(columns).T
    return _EVENTS, value


_OTHER_EVENTS = (
    "sfu_op",
    "shared_byte",
    "l2_byte",
    "dram_read_byte",
    "dram_write_byte",
    "link_byte",
)
_EVENTS = (*PIPE_EVENTS, *_OTHER_EVENTS)
_TENSOR = frozenset(event for event in PIPE_EVENTS if event.startswith("tensor"))
_PIPE_PLACE = {event: place for place, event in enumerate(PIPE_EVENTS)}
