"""Lower a workload anew for designs: which program each kernel runs, and what it moves.

A design differs from the chip that was measured, the base, in SMs, caches, registers or rates. Each
kernel then may run another *program*: the base's own, one that the base's library would take on a
chip with more or fewer SMs, or one of larger tiles where registers and shared memory hold them. The
fastest runs:

    t(design) = min_c h_c·t_c(design),    h_c = max(1, max_f t_base(base, f) / t_c(base, f))

A program that seems faster than the base's own already on the base gets the handicap h: the library
had its reasons. So the base itself comes out as predicted, and since no resource slows any program
down, more of one never slows a design down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Mask,
    Sweepable,
    map_distinct,
    sweep_values,
)
from wattcast.explore.design_coefficients import DESIGNS
from wattcast.explore.design_programs import (
    DesignAxes,
    DesignKernels,
    RowIndex,
    lower_programs,
    on_tensor_cores,
)
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, lower_graph
from wattcast.kernels.kernel_table import KernelWork
from wattcast.kernels.lowering import PIPE_EVENTS
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.bundle.forecast import FORECAST, forecast_rule
from wattcast.predictor.ideal_terms import memory_tail
from wattcast.predictor.kernel_coefficients import KERNEL_TIMES
from wattcast.predictor.kernel_phases import (
    KernelScale,
    MainBounds,
    find_scale,
    lay_out_timeline,
)
from wattcast.predictor.pipeline import place_in_model, stretch_phases
from wattcast.predictor.timeline import (
    KernelPhase,
    Timeline,
    compute_effective_hz,
    compute_kernel_s,
    count_waves,
)
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Linear

Places = npt.NDArray[np.intp]  # of the program that each design runs among those of a kernel

_CLOCK_RATIOS = np.linspace(0.15, 1.5, 28)  # over the top clock, at which programs are compared
_TIE = 1.0 + 1e-9  # by which the base's program wins where two are equally fast


def lower_for_designs(
    graph: Graph,
    gpu: Gpu,
    bundle: Bundle,
    *,
    programs: bool,
    capacities: bool,
) -> DesignKernels:
    """Lower a workload for designs around ``gpu``.

    ``programs``: kernels may run other programs than the base's; ``capacities``: that of L2 varies.
    """
    design = lower_programs(
        graph,
        gpu,
        bundle,
        programs=programs,
        capacities=capacities,
    )
    return _with_handicaps(design, find_scale(design.kernels, bundle.corrections, bundle.learned))


def _with_handicaps(design: DesignKernels, scale: KernelScale) -> DesignKernels:
    """Return the programs with handicaps and shares of shared memory, both found on the base."""
    gpu = design.gpu
    axes = DesignAxes(sm_count=gpu.sm_count)
    timeline = _lay_out_programs(design, scale, gpu, axes)
    main = timeline.phases[-1]
    assert main.cycles is not None, "a main loop has cycles"
    cycles = main.cycles
    if design.padding is not None:
        cycles = cycles / design.padding.take(design.row_of)
    waves = count_waves(timeline.kernels, axes.sm_count)
    shared_cycles = _count_shared_cycles(timeline.kernels, gpu, axes, waves)
    share = np.ones(len(design.row_of))
    if shared_cycles is not None:
        share = np.minimum(cycles / np.maximum(shared_cycles, 1e-300), 1.0)

    clock_hz = design.bundle.reference.top_hz * _CLOCK_RATIOS[:, np.newaxis]
    times = compute_kernel_s(timeline.phases, clock_hz)
    own_times = times[:, design.row_of]
    ratio = (own_times / np.maximum(times, 1e-300)).max(axis=0)
    handicap = np.maximum(ratio * _TIE, 1.0)
    handicap[design.growth > 1.0] = 1.0  # no base runs them
    handicap[: len(design.kernels.ops)] = 1.0
    return replace(design, handicap=handicap, shared_share=share)


def keep_programs(design: DesignKernels, programs: RowIndex) -> DesignKernels:
    """Return the design with some of its programs, the base's own among them."""
    return replace(
        design,
        row_of=design.row_of[programs],
        work=design.work.select_rows(programs),
        growth=design.growth[programs],
        handicap=design.handicap[programs],
        shared_share=design.shared_share[programs],
    )


def find_used_programs(
    design: DesignKernels,
    chip: Gpu,
    axes: DesignAxes,
    clock_hz: Sweepable,
) -> RowIndex:
    """Return the base's own programs and those that any of these designs runs."""
    scale = find_scale(design.kernels, design.bundle.corrections, design.bundle.learned)
    timeline = _lay_out_programs(design, scale, chip, axes)
    effective_hz = compute_effective_hz(timeline, clock_hz, design.bundle.clock_law)
    program_s = compute_kernel_s(timeline.phases, effective_hz)
    is_missing = _find_missing(design, axes)
    used = np.arange(len(design.row_of)) < len(design.kernels.ops)
    for rows in design.groups:
        picks: list[Places] = []
        if _pick_fastest(program_s, is_missing, rows, picks):
            used[rows[np.unique(picks[0])]] = True
    return np.flatnonzero(used)


def analyse_design(
    design: DesignKernels,
    chip: Gpu,
    axes: DesignAxes,
    clock_hz: Sweepable,
) -> Timeline:
    """Return the timeline of a workload on designs; programs are chosen at ``clock_hz``."""
    bundle = design.bundle
    scale = find_scale(design.kernels, bundle.corrections, bundle.learned)
    timeline = _lay_out_programs(design, scale, chip, axes)
    timeline = _choose_programs(design, timeline, axes, clock_hz)
    if bundle.waiting_sm != 1.0:
        timeline = replace(timeline, waiting_sm=bundle.waiting_sm)
    cold_s = None
    if design.cold_s is not None:
        cold_s = _interpolate(design, design.cold_s, axes)
    return place_in_model(
        design.graph,
        timeline,
        chip,
        bundle,
        cold_s,
    )


def _interpolate(
    design: DesignKernels,
    table: Array,
    axes: DesignAxes,
) -> Array:
    """Return a table over capacities at those of the designs, ``(*sweep, kernel)``."""
    nodes = design.capacity_byte
    if axes.l2_byte is None or len(nodes) == 1:
        log_ratio = np.log(nodes / design.bundle.reference.l2_byte)
        nearest = int(np.argmin(np.abs(log_ratio)))
        return np.asarray(table[nearest])
    logs = np.log(nodes)
    log_l2_byte = np.log(sweep_values(axes.l2_byte))
    place = np.interp(log_l2_byte, logs, np.arange(len(nodes)))
    low = np.minimum(place.astype(np.intp), len(nodes) - 2)
    weight = place - low
    columns = table.T
    values = columns[:, low] * (1.0 - weight) + columns[:, low + 1] * weight
    return np.moveaxis(values, 0, -1)


def _lay_out_programs(
    design: DesignKernels,
    scale: KernelScale,
    chip: Gpu,
    axes: DesignAxes,
) -> Timeline:
    """Lay out the phases of all programs on designs, ``(*sweep, program)``."""
    rows = design.row_of
    ops = [design.kernels.ops[row] for row in rows.tolist()]
    pipes = lower_graph(design.graph, chip, design.bundle.reference).pipe_per_cycle
    programs = replace(
        design.kernels.select_rows(rows, tuple(ops)),
        work=design.work,
        pipe_per_cycle=pipes if isinstance(pipes, float) else pipes.take(rows, axis=-1),
    )
    swept_work = _design_work(design, axes)
    program_scale = _take_scale(design, scale, axes)
    bounds = _find_bounds(design, replace(programs, work=swept_work), chip, axes)
    l2_rate = design.bundle.reference.l2_byte_per_cycle
    timeline = lay_out_timeline(
        programs,
        chip,
        program_scale,
        design.bundle.launch,
        l2_rate,
        bounds,
        swept_work,
    )
    factor = design.handicap
    if design.padding is not None:
        factor = factor * design.padding.take(rows)
    return stretch_phases(timeline, factor)


def _take_scale(
    design: DesignKernels,
    scale: KernelScale,
    axes: DesignAxes,
) -> KernelScale:
    """Return the corrections of programs: those of their kernels.

    Kernels that compute addresses take as many cycles more as integer lanes are fewer.
    """
    columns: dict[str, Any] = {}
    for item in fields(KernelScale):
        values = getattr(scale, item.name)
        columns[item.name] = None if values is None else values.take(design.row_of, axis=-1)
    if np.ndim(axes.integer_rate) or axes.integer_rate != 1.0:
        groups = tuple(forecast_rule().integer_groups)
        is_integer = map_distinct(lambda name: name.startswith(groups), design.work.kernel_family)
        slower = np.where(is_integer, 1.0 / axes.integer_rate, 1.0)
        columns["compute"] = columns["compute"] * slower
        columns["serial"] = columns["serial"] * slower
    return KernelScale(**columns)


def _design_work(design: DesignKernels, axes: DesignAxes) -> KernelWork:
    """Return the work of programs on designs; what does not follow a design stays
    ``(program,)``.
    """
    work = design.work
    changes: dict[str, Any] = {}
    for name, table in design.l2_tables.items():
        gained = _interpolate(design, table, axes).T.take(design.row_of, axis=0).T
        changes[name] = np.maximum(getattr(work, name) + gained, 0.0)

    # Smaller tiles load more; kernels without tiles hold fewer blocks
    room = _tile_room(axes)
    is_tensor = on_tensor_cores(design.kernels).take(design.row_of)
    if np.ndim(room) or room != 1.0:
        shrunk = np.where(is_tensor, np.minimum(room, 1.0), 1.0)
        changes["l2_byte"] = work.l2_byte / np.sqrt(shrunk)
        changes["shared_byte"] = work.shared_byte / np.sqrt(shrunk)
    occupancy = np.minimum(axes.registers, axes.threads)
    if np.ndim(occupancy) or occupancy != 1.0:
        changes["slots"] = work.slots * np.where(is_tensor, 1.0, occupancy)
    sparsity = axes.weight_sparsity
    if np.ndim(sparsity) or sparsity != 1.0:
        _make_sparse(design, work, changes, sparsity)
    return replace(work, **changes) if changes else work


def _tile_room(axes: DesignAxes) -> Sweepable:
    """Return the area of tiles that registers and shared memory hold, over that of the base's.

    Results lie in registers, so that area goes with them; stages of operands lie in shared memory
    and go with the sides of a tile.
    """
    staged = (DESIGNS.shared_margin * axes.shared) ** 2
    return np.minimum(axes.registers, staged)


def _make_sparse(
    design: DesignKernels,
    work: KernelWork,
    changes: dict[str, Array],
    sparsity: Sweepable,
) -> None:
    """Put in what products of 2:4 weights take: half of the arithmetic and fewer bytes of
    weights.
    """
    weight_byte = _count_weight_byte(design.kernels).take(design.row_of)
    is_weight = (weight_byte > 0) & on_tensor_cores(design.kernels).take(design.row_of)
    saved = np.where(is_weight & (sparsity > 1.0), 1.0 - DESIGNS.sparse_weight_share, 0.0)
    read_byte = changes.get("dram_read_byte", work.dram_read_byte)
    changes["dram_read_byte"] = read_byte - saved * np.minimum(weight_byte, read_byte)
    l2_byte = changes.get("l2_byte", work.l2_byte)
    changes["l2_byte"] = l2_byte * (1.0 - 0.5 * saved)  # half of a square tile's loads are weights
    changes["unit_flop"] = work.unit_flop / np.where(saved > 0, sparsity, 1.0)


def _count_weight_byte(kernels: Kernels) -> Array:
    """Return the bytes of the weights of each product, ``(kernel,)``; zero where there are none."""
    counts = np.zeros(len(kernels.ops))
    for row, op in enumerate(kernels.ops):
        if isinstance(op, Linear) and not op.turned:
            width = op.dtype.byte if op.weight_dtype is None else op.weight_dtype.byte
            counts[row] = op.n * op.k * width
    return counts


def _find_bounds(
    design: DesignKernels,
    programs: Kernels,
    chip: Gpu,
    axes: DesignAxes,
) -> MainBounds:
    """Return what bounds the main loops of programs on designs."""
    base_sms = float(sweep_values(design.gpu.sm_count))
    waves = count_waves(programs, axes.sm_count)
    base_l2 = design.gpu.l2.byte_per_cycle
    if base_l2 is None:
        base_l2 = design.bundle.reference.l2_byte_per_cycle
    port = base_l2 * axes.l2_port
    is_convolution = map_distinct("conv2d".__eq__, programs.work.root_family)
    unevenness = waves * base_sms / np.maximum(programs.work.units, 1.0)
    uneven = np.where(is_convolution, unevenness, 0.0)
    link_s: Sweepable = 0.0
    if np.ndim(axes.die_link_s_per_byte) or axes.die_link_s_per_byte:
        link_s = axes.die_link_s_per_byte * programs.work.l2_byte
    shared_cycles = None
    share = design.shared_share
    if np.ndim(axes.shared_rate) or axes.shared_rate != 1.0:
        shared_cycles = _count_shared_cycles(programs, chip, axes, waves)
        shared_cycles = None if shared_cycles is None else share * shared_cycles
    return MainBounds(
        waves=waves,
        memory_tail=_design_tail(design, programs, axes),
        busiest_l2_byte=uneven * programs.work.l2_byte,
        l2_port=port,
        shared_cycles=shared_cycles,
        link_s=link_s,
    )


def _count_shared_cycles(
    programs: Kernels,
    chip: Gpu,
    axes: DesignAxes,
    waves: Array,
) -> Array | None:
    """Return the cycles in which the busiest SM moves data through shared memory, uncorrected."""
    rate = chip.sm.shared_byte_per_cycle
    if rate is None:
        return None
    unit_byte = programs.work.shared_byte / np.maximum(programs.work.units, 1.0)
    return np.asarray(waves * unit_byte / rate)


def _design_tail(
    design: DesignKernels,
    programs: Kernels,
    axes: DesignAxes,
) -> Sweepable:
    """Return the time in device memory over that of an even load, ``(*sweep, program)``.

    An SM reads at most κ times the even rate of the base, so S of them with work reach κ·S/S_base
    of the rate. Blocks that are few, or whose last wave is partly empty, are spread over no more
    SMs than their waves need, s = U/⌈U/S⌉; that falls with no SM more. What the base loses beyond
    is lost by every design.
    """
    work = programs.work
    base_sms = float(sweep_values(design.gpu.sm_count))
    lone_sm_share = design.bundle.reference.lone_sm_share
    base_tail = memory_tail(programs, base_sms, lone_sm_share)
    units = np.maximum(work.units, 1e-9)
    is_paged = map_distinct(
        lambda name: name.startswith("attention.engine.paged.decode"), work.kernel_family
    )
    is_any_paged = bool(np.any(is_paged))

    def spread_thin(sm_count: Sweepable, occupancy: Sweepable) -> Array:
        working_sms = np.minimum(units, sm_count)
        if is_any_paged:
            whole_waves = units / np.ceil(units / sm_count)
            working_sms = np.where(is_paged, whole_waves, working_sms)
        share = lone_sm_share or KERNEL_TIMES.lone_sm_share
        reach = share * occupancy * working_sms / base_sms
        return np.asarray(np.maximum(1.0 / reach, 1.0))

    occupancy: Sweepable = np.minimum(axes.registers, axes.threads)
    if np.ndim(occupancy) or occupancy != 1.0:
        occupancy = np.where(on_tensor_cores(programs), 1.0, occupancy)
    is_same = not np.ndim(axes.sm_count) and not np.ndim(occupancy)
    if is_same and axes.sm_count == base_sms and occupancy == 1.0:
        return base_tail
    return base_tail * spread_thin(axes.sm_count, occupancy) / spread_thin(base_sms, 1.0)


def _choose_programs(
    design: DesignKernels,
    timeline: Timeline,
    axes: DesignAxes,
    clock_hz: Sweepable,
) -> Timeline:
    """Return the timeline ``(*sweep, kernel)`` of the fastest programs at a set clock."""
    kernel_count = len(design.kernels.ops)
    groups = design.groups
    picks: list[Places] = []
    if groups:
        effective_hz = compute_effective_hz(
            timeline,
            clock_hz,
            design.bundle.clock_law,
            np.concatenate(groups),
        )
        program_s = compute_kernel_s(timeline.phases, effective_hz)
        is_missing = _find_missing(design, axes)
        groups = [rows for rows in groups if _pick_fastest(program_s, is_missing, rows, picks)]

    def choose(values: Array) -> Array:
        """Return values of programs as those of the chosen ones."""
        kernel_values = values[..., :kernel_count]
        differing = []
        for rows, pick in zip(groups, picks, strict=True):
            is_swept = values.ndim > 1
            if is_swept or (values[rows] != values[rows[0]]).any():
                differing.append((rows, pick))
        if not differing:
            return kernel_values
        shape = np.broadcast_shapes(
            kernel_values.shape[:-1], *(pick.shape for _, pick in differing)
        )
        chosen = np.empty((*shape, kernel_count), order="F")
        chosen[...] = kernel_values
        for rows, pick in differing:
            column = chosen[..., rows[0]]
            for place, row in enumerate(rows[1:].tolist(), 1):
                np.copyto(column, values[..., row], where=pick == place)
        return chosen

    def choose_or_none(values: Array | None) -> Array | None:
        if values is None or values.ndim == 0:
            return values
        return choose(np.broadcast_to(values, (*values.shape[:-1], len(design.row_of))))

    phases = tuple(
        KernelPhase(phase.name, choose_or_none(phase.cycles), choose_or_none(phase.seconds))
        for phase in timeline.phases
    )
    kernels = design.kernels
    tensor_rows = timeline.tensor_rows
    is_own = tensor_rows < kernel_count
    return replace(
        timeline,
        kernels=kernels,
        phases=phases,
        tensor_rows=tensor_rows[is_own],
        tensor_cycles=timeline.tensor_cycles[..., is_own],
        value=timeline.value[:kernel_count],
        time_factor=timeline.time_factor[..., :kernel_count],
        energy_factor=timeline.energy_factor[:kernel_count],
        active=choose(timeline.active),
        calls=kernels.calls,
        host_s=timeline.host_s[..., :kernel_count],
        near=None if timeline.near is None else timeline.near[..., :kernel_count],
        varied=_vary_events(design, timeline, choose, axes),
    )


def _pick_fastest(
    program_s: Array,
    is_missing: Mask | None,
    rows: RowIndex,
    picks: list[Places],
) -> bool:
    """Append the place of the fastest of some programs, ``(*sweep,)``, unless it is the first
    everywhere; tell whether it was appended.
    """
    least_s = program_s[..., rows[0]].copy()
    pick = np.zeros(least_s.shape, dtype=np.intp)
    for place, row in enumerate(rows[1:].tolist(), 1):
        is_faster = program_s[..., row] < least_s
        if is_missing is not None:
            is_faster &= ~is_missing[..., row]
        if is_faster.any():
            pick[is_faster] = place
            np.copyto(least_s, program_s[..., row], where=is_faster)
    if not pick.any():
        return False
    picks.append(pick)
    return True


def _find_missing(design: DesignKernels, axes: DesignAxes) -> Mask | None:
    """Tell which programs a design has no room for, ``(*sweep, program)``; None: none."""
    if (design.growth <= 1.0).all():
        return None
    room = _tile_room(replace(axes, shared=axes.shared / DESIGNS.shared_margin))
    return np.asarray((design.growth > 1.0) & (design.growth > room))


def _vary_events(
    design: DesignKernels,
    timeline: Timeline,
    choose: Callable[[Array], Array],
    axes: DesignAxes,
) -> dict[str, Array]:
    """Return the counts of one run that follow the design, ``(*sweep, kernel)``."""
    work = timeline.kernels.work
    half_between_byte = 0.5 * work.between_dram_byte
    l2_byte = work.l2_byte + work.store_byte + work.between_byte
    counts: dict[str, Array] = {
        "l2_byte": l2_byte,
        "shared_byte": work.shared_byte,
        "dram_read_byte": work.dram_read_byte + half_between_byte,
        "dram_write_byte": work.dram_write_byte + half_between_byte,
    }
    events = timeline.events
    if np.ndim(axes.dies) or axes.dies != 1.0:
        own_byte = timeline.value[:, events.index("link_byte")]
        crossing_share = 1.0 - 1.0 / axes.dies
        per_link_j = DESIGNS.die_link_energy_j_per_byte / FORECAST.link_energy_j_per_byte
        counts["link_byte"] = own_byte + per_link_j * crossing_share * work.l2_byte
    is_sparse = np.ndim(axes.weight_sparsity) or axes.weight_sparsity != 1.0
    for event in PIPE_EVENTS:
        event_values = timeline.value[:, events.index(event)]
        if event_values.any() and is_sparse and event.startswith("tensor"):
            counts[event] = (
                event_values * work.unit_flop / np.maximum(design.work.unit_flop, 1e-300)
            )
    varied = {}
    for event, values in counts.items():
        chosen = choose(np.asarray(values))
        event_values = timeline.value[: chosen.shape[-1], events.index(event)]
        if chosen.ndim > 1 or (chosen != event_values).any():
            varied[event] = chosen
    return varied
