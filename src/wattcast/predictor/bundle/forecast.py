"""Make bundles for GPUs without measurements: forecasts from a measured parent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, wraps
from typing import Any, TypeVar

import msgspec
import numpy as np

from wattcast.core import Dtype, bad_value, units
from wattcast.core.arrays import sweep_values
from wattcast.core.strict_files import FitStatus, Provenance, read_shipped_yaml
from wattcast.hardware import Gpu, load_gpu
from wattcast.kernels import LibraryStyle, reference_chip
from wattcast.power.activity import known_events
from wattcast.power.module_power import ModulePower
from wattcast.power.power_model import IdlePower, VoltageCurve
from wattcast.predictor.bundle.bundle_file import Bundle, ResidualEnds, shipped_bundle
from wattcast.predictor.bundle.support_widening import (
    ForecastEnds,
    default_widening,
    learned_distances,
)
from wattcast.predictor.kernel_phases import Correction
from wattcast.predictor.learned_factors import CarriedFactors
from wattcast.predictor.timeline import ClockLaw


class ProcessRule(msgspec.Struct, forbid_unknown_fields=True):
    """Energy of logic on a process relative to the parent's, at the top voltage ``nominal`` where
    it is known.
    """

    name: str
    logic: float
    source: str
    nominal: str = ""


class MemoryRule(msgspec.Struct, forbid_unknown_fields=True):
    """Energy per byte of a kind of memory relative to the parent's."""

    factor: float
    source: str
    interface: float = 1.0


class StyleRule(msgspec.Struct, forbid_unknown_fields=True):
    """What changes with the way kernels feed the tensor cores."""

    tensor_delivery: float
    sharing: dict[str, float]  # of L2 loads among the blocks of a cluster, by group
    native: dict[str, str]  # the group whose corrections a native kernel takes
    mma_on_parent: float
    old_groups: list[str]
    load_bound: list[str]  # groups that take as many cycles of an SM as on the parent
    renamed: dict[str, str]


class ArchitectureRule(msgspec.Struct, forbid_unknown_fields=True):
    """How much an architecture inherits from the parent."""

    style: LibraryStyle
    whole: bool = False
    clock_law: bool = False
    # tensor kernels of long runs lose the cycles that the parent's lose at the least load
    tensor_share: bool = False


class IdleRule(msgspec.Struct, forbid_unknown_fields=True):
    """Idle power to assume where none is published: shares of the limit, and the shape of the rise
    between them.
    """

    lowest: float
    top: float
    graphics_memory: tuple[float, float]  # lowest and top of cards with GDDR
    clock_share: list[float]
    rise: list[float]


class VoltageRule(msgspec.Struct, forbid_unknown_fields=True):
    """Relative voltage to assume where none is published."""

    clock_share: list[float]
    relative: list[float]


class ForecastRule(msgspec.Struct, forbid_unknown_fields=True):
    """The rule by which a bundle is carried over to a GPU without measurements (``forecast.yaml``)."""

    source: str
    date: str
    parent: str
    processes: list[ProcessRule]
    classes: dict[str, float]
    sm_alike: float
    sm_waiting: float
    memory_rail_j_per_byte: float
    memory: dict[str, MemoryRule]
    formats: dict[str, Any]
    link_energy_j_per_byte: float
    styles: dict[str, StyleRule]
    architectures: dict[str, ArchitectureRule]
    same_processor: dict[str, str]
    same_programs: list[str]
    fp32_instructions: float
    streaming: str
    l2_loads: dict[str, float]  # by compute capability
    l2_bound: list[str]
    integer_groups: list[str]
    issue_bound: list[str]
    issue_free: float
    host: dict[str, str]
    idle: IdleRule
    voltage: VoltageRule
    missing: dict[str, str]

    def architecture(self, name: str) -> ArchitectureRule:
        """Return what an architecture inherits; one that the rule does not name gets the default."""
        return self.architectures.get(name, self.architectures["default"])

    def process(self, gpu: Gpu) -> ProcessRule:
        """Return the process of a chip: the longest name that its catalogue entry contains."""
        found = [p for p in self.processes if p.name.lower() in gpu.process.lower()]
        if not found:
            known = ", ".join(p.name for p in self.processes)
            raise bad_value(
                f"{gpu.name}: process", f"one the forecast knows ({known})", gpu.process
            )
        return max(found, key=lambda p: len(p.name))


@cache
def forecast_rule() -> ForecastRule:
    """Return the rule that ships with Wattcast."""
    return read_shipped_yaml(ForecastRule, "wattcast.predictor.bundle", "forecast.yaml")


_Made = TypeVar("_Made")
_MOST_KEPT = 64


def keep_by_gpu(make: Callable[[Gpu], _Made]) -> Callable[[Gpu], _Made]:
    """Keep what a function makes of a GPU by all of its numbers; of a swept GPU nothing is kept.

    A bundle is kept with the learned factors of workloads met before.
    """
    kept: dict[str, _Made] = {}

    @wraps(make)
    def find(gpu: Gpu) -> _Made:
        if any(
            isinstance(value, np.ndarray)
            for value in (gpu.sm_count, gpu.clocks.max_hz, gpu.power.limit_w)
        ):
            return make(gpu)
        if (key := repr(gpu)) not in kept:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[key] = make(gpu)
        return kept[key]

    return find


@keep_by_gpu
def forecast_bundle(gpu: Gpu) -> Bundle:
    """Forecast the bundle of ``gpu`` from a measured parent; everything it assumes is in its
    assumptions.
    """
    the = forecast_rule()
    parent = shipped_bundle(the.parent)
    chip = load_gpu(the.parent)
    assert parent is not None, "the bundle that all forecasts inherit from ships"
    kind = the.architecture(gpu.architecture)
    power = parent.power.as_module_power()
    idle, idle_note = _forecast_idle(gpu, the, power.idle)
    voltage, voltage_note = _forecast_voltage(gpu, chip, the, kind, power.voltage)
    missing = [
        f"{gpu.name}: {path} is unknown: {cost}"
        for path, cost in the.missing.items()
        if path in gpu.unknown
    ]
    process = the.process(gpu)
    host = the.host.get(gpu.architecture, the.host["default"])
    weights = ", ".join(f"{w:g} {kind}" for kind, w in parent.launch.host_weights.items())
    learned = None
    if (of := parent.learned) is not None:
        same = {
            name: model
            for name, model in of.time.items()
            if kind.whole or name in the.same_programs
        }
        learned = CarriedFactors(of.reference, same, of.energy)
    notes = (
        f"forecast: no measurement of the {gpu.name}; carried over from the {the.parent} by specification",
        f"energy per operation: {process.logic:g} times the {the.parent}'s for logic ({gpu.process}), "
        f"{_find_memory_rule(gpu, the).factor:g} for {gpu.memory.kind}",
        f"host: times the mean operator's cost {weights}",
        idle_note,
        voltage_note,
        *missing,
    )
    return Bundle(
        gpu=gpu.name,
        status=FitStatus.FORECAST,
        provenance=Provenance(the.source, the.date, note=f"parent: {parent.provenance.source}"),
        corrections=_carry_corrections(parent, gpu, chip, the, kind),
        launch=replace(
            parent.launch,
            host_s_per_operator=parent.launch.host_s_per_operator
            if host == "parent"
            else units.parse(host, "s"),
            start_hz=None if kind.clock_law else _take_scalar(gpu.clocks.max_hz),
        ),
        power=_forecast_power(gpu, the, power, idle, voltage),
        clock_law=_carry_clock_law(parent, gpu, kind),
        residuals=forecast_residuals(parent.residuals, learned_distances().forecast),
        toggling=parent.toggling,
        reference=replace(
            reference_chip(gpu),
            style=kind.style,
            choice=parent.reference.choice if kind.whole else None,
        ),
        learned=learned,
        seen=parent.seen,
        interval_level=parent.interval_level,
        waiting_sm=_waiting_sm(gpu, chip, the),
        step_energy=parent.step_energy,
        assumptions=tuple(note for note in notes if note),
        cards=parent.cards,
        widening=default_widening().without_sizes(),
        cold=parent.cold,
    )


def _forecast_power(
    gpu: Gpu, the: ForecastRule, parent: ModulePower, idle: IdlePower, voltage: VoltageCurve
) -> ModulePower:
    """Return the parent's joules per event at the card's top voltage, times the factor of the
    event's module.

    A byte of memory costs energy on its own rail and, at the interface, on the chip.
    """
    filled = dict(parent.energy_j)
    for event, how in the.formats.items():
        if event != "source" and event not in filled and how["of"] in filled:
            filled[event] = float(how["factor"]) * filled[how["of"]]
    filled.setdefault("link_byte", the.link_energy_j_per_byte)
    factor = module_factors(gpu, the)
    known = known_events()
    memory = _find_memory_rule(gpu, the)
    mean_j = float(
        np.mean([joules for event, joules in parent.energy_j.items() if event.startswith("dram")])
    )
    rail = min(the.memory_rail_j_per_byte / mean_j, 1.0)
    on_chip = (1.0 - rail) * memory.interface * factor["l2"]
    factor["dram"] = rail * memory.factor + on_chip
    joules = {event: each * factor[known[event].module] for event, each in filled.items()}
    return ModulePower(joules, idle, voltage, memory_on_core=on_chip / factor["dram"])


def module_factors(gpu: Gpu, the: ForecastRule) -> dict[str, float]:
    """Return the energy per operation of each module relative to the parent's, both at their top
    voltage.
    """
    process = the.process(gpu)
    style = the.styles[the.architecture(gpu.architecture).style]
    volts = 1.0
    if process.nominal and gpu.power.voltage_v is not None:
        volts = (
            float(gpu.power.voltage_v.value.max()) / units.parse(process.nominal, "V", "nominal")
        ) ** 2
    factor = {module: volts * process.logic**power for module, power in the.classes.items()}
    factor["tensor"] *= style.tensor_delivery
    # the capacitance of a working SM: a fixed part, fp32 lanes and tensor cores
    factor["sm"] *= the.sm_alike + (1.0 - the.sm_alike) * 0.5 * sum(_compare_pipes(gpu, the))
    factor["link"] = 1.0
    return factor


def _waiting_sm(gpu: Gpu, chip: Gpu, the: ForecastRule) -> float:
    """Return the energy of an SM that waits for memory over that of one with work.

    An SM of the parent gets β/(S·f) bytes a cycle where memory bounds a kernel, and what its warps
    issue goes with that. One that gets less issues less; clocks and schedulers, ``sm_waiting`` of
    its energy, run on."""
    own, parents = (
        _take_scalar(g.memory.byte_per_s)
        / (_take_scalar(g.sm_count) * _take_scalar(g.clocks.max_hz))
        for g in (gpu, chip)
    )
    return the.sm_waiting + (1.0 - the.sm_waiting) * min(own / parents, 1.0)


def _compare_pipes(gpu: Gpu, the: ForecastRule) -> tuple[float, float]:
    """Return the fp32 lanes and the tensor arithmetic of an SM in a cycle, relative to the
    parent's.
    """
    own = gpu.pipes
    parents = load_gpu(the.parent).pipes
    lanes = _divide(own.cuda_flop_per_cycle[Dtype.FP32], parents.cuda_flop_per_cycle[Dtype.FP32])
    return lanes, _divide(
        own.tensor_flop_per_cycle.get(Dtype.FP16, 0.0), parents.tensor_flop_per_cycle[Dtype.FP16]
    )


def _find_memory_rule(gpu: Gpu, the: ForecastRule) -> MemoryRule:
    for name, kind in the.memory.items():
        if name.lower() == gpu.memory.kind.lower():
            return kind
    raise bad_value(f"{gpu.name}: memory.kind", f"one of {', '.join(the.memory)}", gpu.memory.kind)


_WIDENING = "gemm.engine.weight_only"  # products that widen their weights


def _carry_corrections(
    parent: Bundle, gpu: Gpu, chip: Gpu, the: ForecastRule, kind: ArchitectureRule
) -> dict[str, Correction]:
    """Carry the parent's λ over: older kernel styles without Hopper's penalties, fixed times as
    cycles.
    """
    style = the.styles[kind.style]
    slower = _divide(chip.clocks.max_hz, gpu.clocks.max_hz)
    lanes, tensor = _compare_pipes(gpu, the)
    instructions = 1.0 - the.fp32_instructions + the.fp32_instructions / lanes
    # unknown ones count as equal
    own = gpu.pipes.int32_op_per_cycle
    parents = chip.pipes.int32_op_per_cycle
    integers = 1.0 if own is None or parents is None else _divide(own, parents)
    found = {}
    for name, c in parent.corrections.items():
        changed = replace(c, fixed_s=c.fixed_s * slower)
        if name in style.old_groups:
            changed = replace(changed, compute=c.compute * style.mma_on_parent)
        if name in style.sharing:
            changed = replace(changed, l2=c.l2 / style.sharing[name])
        if name in style.load_bound:
            compute = max(c.compute * tensor, parent.corrections["gemm.tensor"].compute)
            changed = replace(changed, compute=compute, l2=_carry_l2(c.l2, gpu, chip))
            changed = _carry_streaming(changed, parent, gpu, chip, the)
        if name in the.integer_groups:
            changed = replace(changed, compute=c.compute / integers)
        if name in the.issue_bound:
            crowded = float(np.clip(2.0 * lanes - 1.0, 0.0, 1.0))
            free = min(the.issue_free, c.compute)
            changed = replace(changed, compute=free + (c.compute - free) * crowded)
        if name.startswith(
            _WIDENING
        ):  # arithmetic, far below 1, did not bound them on the parent; here it may
            changed = replace(changed, compute=max(c.compute, 1.0))
        if name.startswith(tuple(the.l2_bound)):
            changed = replace(changed, l2=c.l2 / the.l2_loads.get(gpu.compute_capability, 1.0))
        if name.partition(".")[0] in the.same_programs:
            changed = replace(
                changed, serial_cycle=c.serial_cycle * instructions, l2=_carry_l2(c.l2, gpu, chip)
            )
            changed = _carry_streaming(changed, parent, gpu, chip, the)
        found[name] = changed
    for old, new in style.native.items():
        if old in found and new in found:
            found[old] = found[new]
    return found | {new: found[old] for new, old in style.renamed.items() if old in found}


def _carry_l2(l2: float, gpu: Gpu, chip: Gpu) -> float:
    """Carry λ of L2 over. Beyond 1 the SMs ask slower than L2 answers: it follows their number, not
    L2's rate.

    Below 1, L2 did not bound the kernel on the parent; here it may.
    """
    if l2 <= 1.0 or gpu.l2.byte_per_cycle is None or chip.l2.byte_per_cycle is None:
        return max(l2, 1.0)
    rates = _divide(gpu.l2.byte_per_cycle, chip.l2.byte_per_cycle)
    return max(1.0, l2 * rates * _take_scalar(chip.sm_count) / _take_scalar(gpu.sm_count))


def _carry_streaming(
    c: Correction, parent: Bundle, gpu: Gpu, chip: Gpu, the: ForecastRule
) -> Correction:
    """Carry λ of memory over for a kernel that the bytes in flight of the SMs bound on the parent.

    Little's law: rate = SMs · bytes in flight / latency, and a latency of memory is much the same
    in seconds. So λ_d·Q/β_DRAM on the parent takes as much longer here as there are fewer SMs,
    whatever the memory; no kernel streams faster than the plain ones. A λ below theirs says only
    that memory did not bound the kernel on the parent."""
    least = parent.corrections[the.streaming].memory
    if c.memory <= least:
        return replace(c, memory=least)
    rates = _divide(gpu.memory.byte_per_s, chip.memory.byte_per_s)
    return replace(c, memory=max(least, c.memory * rates * _divide(chip.sm_count, gpu.sm_count)))


def _carry_clock_law(parent: Bundle, gpu: Gpu, kind: ArchitectureRule) -> ClockLaw | None:
    """Carry the parent's effective clock over: its whole law, or the share of tensor kernels alone."""
    law = parent.clock_law
    if law is None:
        return None
    if kind.clock_law:
        return replace(law, top_hz=_take_scalar(gpu.clocks.max_hz))
    if not kind.tensor_share:
        return None
    least_load = law.activity[:1]
    share = law.ratio[:1]
    return ClockLaw(1.0, least_load, share, in_bursts=False)


def forecast_residuals(
    parent: Mapping[str, ResidualEnds], ends: Mapping[str, ForecastEnds]
) -> dict[str, ResidualEnds]:
    """Return the ends of a forecast: those of GPUs that were left out, which say more than the
    parent's own rows.
    """
    rest = ends["other"]
    assert rest.power is not None, "power of other kernels stands for all"
    named = {
        name: ResidualEnds(e.latency, e.power or rest.power, e.rows) for name, e in ends.items()
    }
    # a kind (a name with a dot) that none of them has takes the ends of the nearest name above it
    return {
        f: r if f == "collective" else named["other"] for f, r in parent.items() if "." not in f
    } | named


def _forecast_idle(gpu: Gpu, the: ForecastRule, parent: IdlePower) -> tuple[IdlePower, str]:
    warming = {"reference_c": parent.reference_c, "per_c": parent.per_c}
    if gpu.power.idle_w is not None:
        return IdlePower(gpu.power.idle_w.clock_hz, gpu.power.idle_w.value, **warming), ""
    limit_w, low_hz, top_hz = map(
        _take_scalar, (gpu.power.limit_w, gpu.clocks.lowest_hz, gpu.clocks.max_hz)
    )
    lowest, top = (
        the.idle.graphics_memory
        if gpu.memory.kind.startswith("GDDR")
        else (the.idle.lowest, the.idle.top)
    )
    low_w = lowest * limit_w
    top_w = top * limit_w
    clock_hz = np.array(
        [min(low_hz, 0.5 * top_hz), *(share * top_hz for share in the.idle.clock_share)]
    )
    power_w = low_w + (top_w - low_w) * np.array([0.0, *the.idle.rise])
    note = (
        f"no idle power of the {gpu.name} is published: taken as {low_w:.0f} W at the lowest clock, {top_w:.0f} W at "
        f"the top; cards with a table lie within a quarter of that"
    )
    return IdlePower(clock_hz, power_w, **warming), note


def _forecast_voltage(
    gpu: Gpu, chip: Gpu, the: ForecastRule, kind: ArchitectureRule, parent: VoltageCurve
) -> tuple[VoltageCurve, str]:
    """Return V(f) as published, else in the parent's shape on its architecture, else in the shape
    of the rule.
    """
    published = gpu.power.voltage_v
    if published is not None:
        rising = np.maximum.accumulate(published.value)
        return VoltageCurve(published.clock_hz, rising / rising[-1]), ""
    share = np.array(the.voltage.clock_share)
    relative = np.array(the.voltage.relative)
    shape = "of the A100-PCIE's table"
    if kind.whole:
        share = parent.clock_hz / _take_scalar(chip.clocks.max_hz)
        relative = parent.relative
        shape = f"inferred on the {the.parent}"
    note = f"no V(f) of the {gpu.name} is published: the shape {shape}, over its own top clock"
    return VoltageCurve(share * _take_scalar(gpu.clocks.max_hz), relative), note


def _divide(value: object, by: object) -> float:
    """Return how many times a field of one chip is that of another."""
    return _take_scalar(value) / _take_scalar(by)


def _take_scalar(value: object) -> float:
    """Return the number of a field; a swept GPU has none, since energies belong to one real chip."""
    return float(sweep_values(value))  # type: ignore[arg-type]
