"""Look into one kernel: its tile and the alternatives, waves, bytes at every level, phases, watts.

Everything shown here was computed for the prediction; this module takes it apart. Phases of a
kernel follow one another, and within one the slowest resource decides:

    t_phase = max_r t_r,    E_phase = Σ_event E_event·n_event + P_idle·t_phase

Events go to the phase in which they happen: results that leave after the main loop to ``store``,
what kernels of one operator hand on to ``between``, all others to ``main``. Times of phases add up
to that of the kernel, and so do their energies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from wattcast.core.arrays import Array
from wattcast.hardware import OperatingPoint
from wattcast.kernels.families.matrix_products import pick_products
from wattcast.kernels.families.product_shapes import collect_shapes
from wattcast.kernels.families.product_tiles import count_label
from wattcast.kernels.kernel_labels import KernelLabel
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.power_model import Power, interval_energy_j
from wattcast.predictor.kernel_phases import find_scale
from wattcast.predictor.pipeline import BUSY_EVENT
from wattcast.predictor.prediction_basis import PredictionBasis
from wattcast.predictor.timeline import KernelPhase, count_waves
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Bmm, Linear

_MOST_ALTERNATIVES = 6
# Sides of tiles that are shown besides those that the library may take.
_USUAL_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (128, 64), (64, 64))
_LATE_PHASES = ("between", "store")


@dataclass(frozen=True)
class TileChoice:
    """A tile that a product may run, and what its arithmetic and its loads alone would take."""

    label: str
    likelihood: float | None  # of the library's choice; None: it was not said to be likely
    tiles: float  # times parts of K
    waves: float
    step_count: float  # steps of K that a tile walks through
    stages: float | None  # that shared memory holds; None: unknown
    compute_s: float
    load_s: float


@dataclass(frozen=True)
class PhaseView:
    """A stretch of a kernel's life: how long it takes, what bounds it, and what it draws."""

    name: str
    seconds: float
    bound: str
    resource_s: Mapping[str, float]  # what each resource alone would take
    part_w: Mapping[str, float]
    power_w: float
    energy_j: float


@dataclass(frozen=True)
class KernelView:
    """What one kernel does."""

    op: Operator
    gpu: str
    family: str
    calls: float
    seconds: float
    power_w: float
    energy_j: float
    effective_hz: float
    chosen: TileChoice | None  # None: not a product
    alternatives: tuple[TileChoice, ...]
    units: float  # blocks or tiles
    waves: float
    last_wave_share: float  # of the SMs that have work in the last wave
    active_share: float  # of the SMs, averaged over the kernel
    level_byte: Mapping[str, float]
    least_byte: Mapping[str, float]  # that any kernel must move: operands once, results once
    phases: tuple[PhaseView, ...]


def view_kernel(basis: PredictionBasis, row: int) -> KernelView:
    """Look into the kernel of a row of a prediction."""
    timeline = basis.timeline
    kernels = timeline.kernels
    work = kernels.work
    detail = basis.detail
    seconds = float(detail.kernel_s[row])
    effective_hz = float(np.broadcast_to(detail.effective_hz, detail.kernel_s.shape)[row])
    phases = _view_phases(basis, row, effective_hz)
    energy_j = sum(phase.energy_j for phase in phases)
    sms = float(np.ravel(basis.gpu.sm_count)[0])
    waves = float(count_waves(kernels, sms)[row])
    units = float(work.units[row])
    op = kernels.ops[row]
    choices = _view_tiles(basis, row, effective_hz)
    last_units = units - sms * np.floor(units / sms)
    l2_byte = work.l2_byte[row] + work.store_byte[row] + work.between_byte[row]
    half_between_byte = 0.5 * work.between_dram_byte[row]
    level_byte = {
        "shared": float(work.shared_byte[row]),
        "l2": float(l2_byte),
        "dram read": float(work.dram_read_byte[row] + half_between_byte),
        "dram write": float(work.dram_write_byte[row] + half_between_byte),
    }
    return KernelView(
        op=op,
        gpu=basis.gpu.name,
        family=kernels.work.kernel_family[row],
        calls=float(timeline.calls[row]),
        seconds=seconds,
        power_w=energy_j / seconds,
        energy_j=energy_j,
        effective_hz=effective_hz,
        chosen=choices[0] if choices else None,
        alternatives=choices[1:],
        units=units,
        waves=waves,
        last_wave_share=float(last_units / sms) if last_units else 1.0,
        active_share=float(timeline.active[row] / sms),
        level_byte=level_byte,
        least_byte={"dram read": float(op.read_byte), "dram write": float(op.write_byte)},
        phases=phases,
    )


def _view_phases(
    basis: PredictionBasis,
    row: int,
    effective_hz: float,
) -> tuple[PhaseView, ...]:
    """Return the phases that take time, with their bounds and their watts by part."""
    timeline = basis.timeline
    rows = np.array([row])
    phases = [phase.select_rows(rows) for phase in timeline.phases]
    cycles = np.array([_take_number(phase.cycles) for phase in phases])
    off_chip_s = np.array([_take_number(phase.seconds) for phase in phases])
    phase_s = np.maximum(cycles / effective_hz, off_chip_s)
    waiting_s = np.where(cycles > 0, np.maximum(off_chip_s - cycles / effective_hz, 0.0), 0.0)
    working_s = phase_s - (1.0 - timeline.waiting_sm) * waiting_s
    power = _phase_power(
        basis,
        row,
        phases,
        phase_s,
        working_s * effective_hz,
    )
    joules = interval_energy_j(power, phase_s)
    resources = _name_resources(basis, row, effective_hz)
    views = []
    # results leave after the main loop
    order = sorted(range(len(phases)), key=lambda place: phases[place].name in _LATE_PHASES)
    for place in order:
        phase = phases[place]
        if phase_s[place] <= 0.0:
            continue
        on_chip_s = float(cycles[place]) / effective_hz
        resource_s = _phase_resources(phase.name, resources, on_chip_s, float(off_chip_s[place]))
        parts = dict(zip(power.parts, power.part_w[place].tolist(), strict=True))
        views.append(
            PhaseView(
                name=phase.name,
                seconds=float(phase_s[place]),
                bound=max(resource_s, key=resource_s.__getitem__),
                resource_s=resource_s,
                part_w=parts,
                power_w=float(power.total_w[place]),
                energy_j=float(joules[place]),
            )
        )
    return tuple(views)


def _phase_power(
    basis: PredictionBasis,
    row: int,
    phases: list[KernelPhase],
    phase_s: Array,
    working_cycles: Array,
) -> Power:
    """Return the power of each phase of a kernel, by part of the GPU.

    SMs work in all phases but those before the first instruction.
    """
    timeline = basis.timeline
    events = _divide_events(basis, row, phases)
    is_working = np.array([phase.name not in ("fixed", "start") for phase in phases])
    busy_cycles = np.where(is_working, working_cycles, 0.0) * timeline.active[row]
    counts = np.concatenate([events, busy_cycles[:, np.newaxis]], axis=1)
    activity = Activity(
        duration_s=phase_s,
        value=counts * timeline.energy_factor[row],
        events=(*timeline.events, BUSY_EVENT),
        at=_set_point(basis.at),
        source=ActivitySource.PREDICTED,
    )
    return basis.bundle.power.power(activity)


def _set_point(at: OperatingPoint) -> OperatingPoint:
    return replace(at, clock_hz=float(np.ravel(np.asarray(at.clock_hz))[0]))


def _take_number(values: Array | None) -> float:
    return 0.0 if values is None else float(np.ravel(values)[0])


def _divide_events(
    basis: PredictionBasis,
    row: int,
    phases: list[KernelPhase],
) -> Array:
    """Return the counts of a kernel's events by phase, ``(phase, event)``; they add up to all."""
    timeline = basis.timeline
    work = timeline.kernels.work
    names = [phase.name for phase in phases]
    counts = np.zeros((len(phases), len(timeline.events)))
    counts[names.index("main")] = timeline.value[row]

    def move(
        phase: str,
        event: str,
        amount: float,
    ) -> None:
        if phase in names:
            place = timeline.events.index(event)
            counts[names.index(phase), place] += amount
            counts[names.index("main"), place] -= amount

    half_between = 0.5 * float(work.between_dram_byte[row])
    move("between", "l2_byte", float(work.between_byte[row]))
    move("between", "dram_read_byte", half_between)
    move("between", "dram_write_byte", half_between)
    store_byte = float(work.store_byte[row])
    move("store", "l2_byte", store_byte)
    if store_byte > 0:
        move("store", "dram_write_byte", float(work.dram_write_byte[row]))
    return np.maximum(counts, 0.0)


def _name_resources(
    basis: PredictionBasis,
    row: int,
    effective_hz: float,
) -> dict[str, float]:
    """Return the seconds that arithmetic and L2 alone take in the main loop."""
    timeline = basis.timeline
    kernels = timeline.kernels
    work = kernels.work
    scale = find_scale(kernels, basis.bundle.corrections, basis.bundle.learned)
    sms = float(np.ravel(basis.gpu.sm_count)[0])
    waves = float(count_waves(kernels, sms)[row])
    flop_per_cycle = np.ravel(np.broadcast_to(kernels.pipe_per_cycle, kernels.flop.shape))[row]
    scaled_flop = scale.time[row] * scale.compute[row] * work.unit_flop[row]
    arithmetic_cycles = waves * float(scaled_flop) / float(flop_per_cycle)
    l2_rate = basis.gpu.l2.byte_per_cycle
    if l2_rate is None:
        l2_rate = basis.bundle.reference.l2_byte_per_cycle
    loads = float(scale.time[row] * scale.l2[row] * work.l2_byte[row])
    l2_cycles = loads / float(np.ravel(l2_rate)[0])
    pipe = kernels.pipe_event[row].removesuffix("_flop").removesuffix("_op")
    return {pipe: arithmetic_cycles / effective_hz, "L2": l2_cycles / effective_hz}


def _phase_resources(
    name: str,
    main: Mapping[str, float],
    on_chip_s: float,
    off_chip_s: float,
) -> dict[str, float]:
    """Return what each resource alone takes in a phase; the longest is the phase's time."""
    if name in ("fixed", "start"):
        return {"launch": max(on_chip_s, off_chip_s)}
    if name == "serial":
        return {"latency": on_chip_s}
    if name != "main":
        return {"L2": on_chip_s, "device memory": off_chip_s}
    # corrections that came later stretch all resources on the chip alike
    longest_s = max(main.values())
    stretch = on_chip_s / longest_s if longest_s > 0 else 1.0
    resources = {resource: seconds * stretch for resource, seconds in main.items()}
    return resources | {"device memory": off_chip_s}


def _view_tiles(
    basis: PredictionBasis,
    row: int,
    effective_hz: float,
) -> tuple[TileChoice, ...]:
    """Return the tile that a product runs, then others; nothing for other operators."""
    kernels = basis.timeline.kernels
    op = kernels.ops[row]
    if not isinstance(op, Linear | Bmm):
        return ()
    reference = basis.bundle.reference
    rate = reference.per_cycle[kernels.pipe_event[row]]
    likely = pick_products(op, kernels.conditions[row], rate, reference)
    likelihood: dict[KernelLabel, float | None] = {}
    for label, label_share in likely:
        likelihood[label] = (likelihood.get(label) or 0.0) + label_share
    kind = likely[0][0].kind
    for tile_n, tile_m in _USUAL_TILES:
        likelihood.setdefault(KernelLabel(kind, tile_n, tile_m, split=False), None)
    scale = find_scale(kernels, basis.bundle.corrections, basis.bundle.learned)
    load_factor = float(scale.l2[row]) / (reference.l2_byte_per_cycle * effective_hz)
    compute_factor = float(scale.compute[row]) / (rate * effective_hz)
    sms = float(np.ravel(basis.gpu.sm_count)[0])
    shared_byte = basis.gpu.sm.shared_byte_per_block
    choices = []
    for label, share in list(likelihood.items())[:_MOST_ALTERNATIVES]:
        tile = count_label(collect_shapes([op]), label, rate, reference)
        stages = None
        if shared_byte is not None and tile["stage_byte"] > 0:
            stages = float(np.floor(np.ravel(shared_byte)[0] / tile["stage_byte"]))
        choices.append(
            TileChoice(
                label=str(label),
                likelihood=share,
                tiles=tile["units"],
                waves=tile["units"] / sms,
                step_count=tile["steps"],
                stages=stages,
                compute_s=float(np.ceil(tile["units"] / sms)) * tile["unit_flop"] * compute_factor,
                load_s=tile["load_byte"] * load_factor,
            )
        )
    return tuple(choices)
