"""Make bundles for GPUs without measurements: forecasts from a measured parent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, TypeVar

import msgspec
import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import (
    Dtype,
    bad_value,
    units,
)
from wattcast.core.arrays import sweep_values
from wattcast.core.strict_files import (
    FitStatus,
    Provenance,
    read_shipped_yaml,
)
from wattcast.hardware import Gpu, load_gpu
from wattcast.kernels import LibraryStyle, reference_chip
from wattcast.kernels.families.engine.paged_attention import ENGINE_ATTENTION
from wattcast.power.activity import known_events
from wattcast.power.module_power import ModulePower, as_module_power
from wattcast.power.power_model import IdlePower, VoltageCurve
from wattcast.predictor.bundle.bundle_file import (
    Bundle,
    ResidualEnds,
    shipped_bundle,
)
from wattcast.predictor.bundle.support_widening import (
    ForecastEnds,
    default_widening,
    learned_distances,
)
from wattcast.predictor.kernel_coefficients import KERNEL_TIMES
from wattcast.predictor.kernel_phases import Correction, LaunchCosts
from wattcast.predictor.learned_factors import CarriedFactors
from wattcast.predictor.timeline import ClockLaw


class ForecastCoefficients(Coefficients):
    """What no vendor publishes of a chip, as far as it holds for all chips alike."""

    sm_alike: float  # of an SM's energy that every SM since Volta has alike
    sm_waiting: float  # of an SM's energy that it draws while it waits for memory
    memory_rail_j_per_byte: float  # of the parent's memory, on its own rail
    link_energy_j_per_byte: float
    fp32_instructions: float  # share of the instructions of programs that are the same everywhere
    issue_free: float  # λ of fp32 products where loads find free slots
    same_size: float  # difference in SMs, relative, between chips that have the same energies
    fp32_per_score: float  # fp32 instructions of FlashAttention 2 for a score
    score_head: float  # values of a head at which scores are weighed against products
    fed_products: float  # time of products over the tensor cores' own, where they alone limit it


FORECAST = load_coefficients("forecast", ForecastCoefficients)


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
    exposed_scores: list[str]  # groups whose programs hide no softmax behind products
    renamed: dict[str, str]


class ArchitectureRule(msgspec.Struct, forbid_unknown_fields=True):
    """How much an architecture inherits from the parent."""

    style: LibraryStyle
    whole: bool = False
    clock_law: bool = False
    # tensor kernels of long runs lose the cycles that the parent's lose at the least load
    tensor_share: bool = False
    sharing: dict[str, float] = {}  # of L2 loads beyond those of its style, by group


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
    """The rule by which a bundle is carried over to a GPU without measurements
    (``forecast.yaml``).
    """

    source: str
    date: str
    parent: str
    processes: list[ProcessRule]
    classes: dict[str, float]
    memory: dict[str, MemoryRule]
    formats: dict[str, Any]
    styles: dict[str, StyleRule]
    architectures: dict[str, ArchitectureRule]
    same_processor: dict[str, str]
    energies_from: dict[str, list[str]]
    same_programs: list[str]
    streaming: str
    l2_loads: dict[str, float]  # by compute capability; ``reached``: of a rate that was reached
    l2_bound: list[str]
    integer_groups: list[str]
    issue_bound: list[str]
    load_chains: list[str]
    host: dict[str, str]
    idle: IdleRule
    voltage: VoltageRule
    missing: dict[str, str]

    def architecture(self, name: str) -> ArchitectureRule:
        """Return what an architecture inherits; one that the rule does not name gets the
        default.
        """
        return self.architectures.get(name, self.architectures["default"])

    def process(self, gpu: Gpu) -> ProcessRule:
        """Return the process of a chip: the longest name that its catalogue entry contains."""
        matching = [rule for rule in self.processes if rule.name.lower() in gpu.process.lower()]
        if not matching:
            names = ", ".join(rule.name for rule in self.processes)
            expected = f"one the forecast knows ({names})"
            raise bad_value(f"{gpu.name}: process", expected, gpu.process)
        return max(matching, key=lambda rule: len(rule.name))


@cache
def forecast_rule() -> ForecastRule:
    """Return the rule that ships with Wattcast."""
    return read_shipped_yaml(ForecastRule, "wattcast.predictor.bundle", "forecast.yaml")


_Result = TypeVar("_Result")
_MOST_REMEMBERED = 64


def remember_by_gpu(compute: Callable[[Gpu], _Result]) -> Callable[[Gpu], _Result]:
    """Remember what a function computes of a GPU by all of its numbers; of a swept GPU nothing is
    remembered.

    A bundle is remembered with the learned factors of workloads met before.
    """
    results: dict[str, _Result] = {}

    @wraps(compute)
    def recall(gpu: Gpu) -> _Result:
        swept_fields = (gpu.sm_count, gpu.clocks.max_hz, gpu.power.limit_w)
        if any(isinstance(value, np.ndarray) for value in swept_fields):
            return compute(gpu)
        key = repr(gpu)
        if key not in results:
            if len(results) >= _MOST_REMEMBERED:
                results.clear()
            results[key] = compute(gpu)
        return results[key]

    return recall


@dataclass(frozen=True)
class _Forecast:
    """A GPU that is forecast, and what it is forecast from."""

    gpu: Gpu
    rule: ForecastRule
    parent: Bundle
    parent_chip: Gpu

    @property
    def architecture(self) -> ArchitectureRule:
        return self.rule.architecture(self.gpu.architecture)

    @property
    def style(self) -> StyleRule:
        return self.rule.styles[self.architecture.style]


@remember_by_gpu
def forecast_bundle(gpu: Gpu) -> Bundle:
    """Forecast the bundle of ``gpu`` from a measured parent; everything it assumes is in its
    assumptions.
    """
    rule = forecast_rule()
    parent = shipped_bundle(rule.parent)
    assert parent is not None, "the bundle that all forecasts inherit from ships"
    forecast = _Forecast(gpu, rule, parent, load_gpu(rule.parent))
    architecture = forecast.architecture
    parent_power = as_module_power(parent.power)
    idle, idle_note = _forecast_idle(gpu, rule, parent_power.idle)
    voltage, voltage_note = _forecast_voltage(forecast, parent_power.voltage)
    notes = [*_describe_rule(forecast), idle_note, voltage_note, *_list_missing(gpu, rule)]
    choice = parent.reference.choice if architecture.whole else None
    return Bundle(
        gpu=gpu.name,
        status=FitStatus.FORECAST,
        provenance=Provenance(rule.source, rule.date, note=f"parent: {parent.provenance.source}"),
        corrections=_carry_corrections(forecast),
        launch=_carry_launch(forecast),
        power=_forecast_power(
            gpu,
            rule,
            parent_power,
            idle,
            voltage,
        ),
        clock_law=_carry_clock_law(forecast),
        residuals=forecast_residuals(parent.residuals, learned_distances().forecast),
        toggling=parent.toggling,
        reference=replace(
            reference_chip(gpu),
            style=architecture.style,
            choice=choice,
            lone_sm_share=_carry_lone_share(forecast),
        ),
        learned=_carry_factors(forecast),
        seen=parent.seen,
        interval_level=parent.interval_level,
        waiting_sm=_waiting_sm(forecast),
        step_energy=parent.step_energy,
        assumptions=tuple(note for note in notes if note),
        cards=parent.cards,
        widening=default_widening().without_sizes(),
        cold=parent.cold,
    )


def _describe_rule(forecast: _Forecast) -> list[str]:
    """Say what the forecast is carried over from, and by which factors."""
    gpu = forecast.gpu
    parent_name = forecast.rule.parent
    logic = forecast.rule.process(gpu).logic
    memory = _find_memory_rule(gpu, forecast.rule).factor
    host_weights = forecast.parent.launch.host_weights
    weights = ", ".join(f"{weight:g} {kind}" for kind, weight in host_weights.items())
    return [
        f"forecast: no measurement of the {gpu.name}; carried over from the {parent_name} "
        "by specification",
        f"energy per operation: {logic:g} times the {parent_name}'s for logic ({gpu.process}), "
        f"{memory:g} for {gpu.memory.kind}",
        f"host: times the mean operator's cost {weights}",
    ]


def _list_missing(gpu: Gpu, rule: ForecastRule) -> list[str]:
    """Say which fields of the catalogue are missing, and what is taken instead."""
    missing = []
    for path, cost in rule.missing.items():
        if path in gpu.unknown:
            missing.append(f"{gpu.name}: {path} is unknown: {cost}")
    return missing


def _carry_launch(forecast: _Forecast) -> LaunchCosts:
    """Carry the host's times over: hosts are as old as the cards they are sold with."""
    rule = forecast.rule
    launch = forecast.parent.launch
    host = rule.host.get(forecast.gpu.architecture, rule.host["default"])
    host_s = launch.host_s_per_operator if host == "parent" else units.parse(host, "s")
    start_hz = None
    if not forecast.architecture.clock_law:
        start_hz = _take_scalar(forecast.gpu.clocks.max_hz)
    return replace(launch, host_s_per_operator=host_s, start_hz=start_hz)


def _carry_factors(forecast: _Forecast) -> CarriedFactors | None:
    """Carry the learned factors of kernels over that are the same programs on both chips."""
    learned = forecast.parent.learned
    if learned is None:
        return None
    time = dict(learned.time)
    if not forecast.architecture.whole:
        same_programs = forecast.rule.same_programs
        time = {name: model for name, model in time.items() if name in same_programs}
    return CarriedFactors(learned.reference, time, learned.energy)


def _forecast_power(
    gpu: Gpu,
    rule: ForecastRule,
    parent: ModulePower,
    idle: IdlePower,
    voltage: VoltageCurve,
) -> ModulePower:
    """Return the parent's joules per event at the card's top voltage, times the factor of the
    event's module.

    A byte of memory costs energy on its own rail and, at the interface, on the chip.
    """
    energy_j = dict(parent.energy_j)
    for event, format_rule in rule.formats.items():
        if event != "source" and event not in energy_j and format_rule["of"] in energy_j:
            energy_j[event] = float(format_rule["factor"]) * energy_j[format_rule["of"]]
    energy_j.setdefault("link_byte", FORECAST.link_energy_j_per_byte)

    factor = module_factors(gpu, rule)
    memory = _find_memory_rule(gpu, rule)
    dram_j = [joules for event, joules in parent.energy_j.items() if event.startswith("dram")]
    rail = min(FORECAST.memory_rail_j_per_byte / float(np.mean(dram_j)), 1.0)
    on_chip = (1.0 - rail) * memory.interface * factor["l2"]
    factor["dram"] = rail * memory.factor + on_chip

    events = known_events()
    for event in energy_j:
        energy_j[event] *= factor[events[event].module]
    return ModulePower(energy_j, idle, voltage, memory_on_core=on_chip / factor["dram"])


def module_factors(gpu: Gpu, rule: ForecastRule) -> dict[str, float]:
    """Return the energy per operation of each module relative to the parent's, both at their top
    voltage.
    """
    process = rule.process(gpu)
    style = rule.styles[rule.architecture(gpu.architecture).style]
    voltage_square = 1.0
    if process.nominal and gpu.power.voltage_v is not None:
        top_v = float(gpu.power.voltage_v.value.max())
        voltage_square = (top_v / units.parse(process.nominal, "V", "nominal")) ** 2
    factor = {}
    for module, exponent in rule.classes.items():
        factor[module] = voltage_square * process.logic**exponent
    factor["tensor"] *= style.tensor_delivery
    # the capacitance of a working SM: a fixed part, fp32 lanes and tensor cores
    mean_pipes = 0.5 * sum(_compare_pipes(gpu, rule))
    factor["sm"] *= FORECAST.sm_alike + (1.0 - FORECAST.sm_alike) * mean_pipes
    factor["link"] = 1.0
    return factor


def _waiting_sm(forecast: _Forecast) -> float:
    """Return the energy of an SM that waits for memory over that of one with work.

    An SM of the parent gets β/(S·f) bytes a cycle where memory bounds a kernel, and what its warps
    issue goes with that. One that gets less issues less; clocks and schedulers, ``sm_waiting`` of
    its energy, run on.
    """
    byte_share = _memory_byte_per_sm_cycle(forecast.gpu) / _memory_byte_per_sm_cycle(
        forecast.parent_chip
    )
    waiting = FORECAST.sm_waiting
    return waiting + (1.0 - waiting) * min(byte_share, 1.0)


def _carry_lone_share(forecast: _Forecast) -> float:
    """Return what a lone SM reads at over the memory's even rate.

    Bytes in flight over latency, the rate of an SM by itself, are much the same on all chips; its
    even share of the memory is not. No SM reads at less than its share.
    """
    if forecast.gpu.name == forecast.parent_chip.name:
        return 0.0
    even = _divide(forecast.gpu.memory.byte_per_s, forecast.gpu.sm_count)
    parent_even = _divide(forecast.parent_chip.memory.byte_per_s, forecast.parent_chip.sm_count)
    return max(KERNEL_TIMES.lone_sm_share * parent_even / even, 1.0)


def _memory_byte_per_sm_cycle(gpu: Gpu) -> float:
    sm_cycles_per_s = _take_scalar(gpu.sm_count) * _take_scalar(gpu.clocks.max_hz)
    return _take_scalar(gpu.memory.byte_per_s) / sm_cycles_per_s


def _compare_pipes(gpu: Gpu, rule: ForecastRule) -> tuple[float, float]:
    """Return the fp32 lanes and the tensor arithmetic of an SM in a cycle, relative to the
    parent's.
    """
    pipes = gpu.pipes
    parent_pipes = load_gpu(rule.parent).pipes
    lanes = _divide(
        pipes.cuda_flop_per_cycle[Dtype.FP32], parent_pipes.cuda_flop_per_cycle[Dtype.FP32]
    )
    tensor_flop = pipes.tensor_flop_per_cycle.get(Dtype.FP16, 0.0)
    return lanes, _divide(tensor_flop, parent_pipes.tensor_flop_per_cycle[Dtype.FP16])


def _find_memory_rule(gpu: Gpu, rule: ForecastRule) -> MemoryRule:
    for name, memory in rule.memory.items():
        if name.lower() == gpu.memory.kind.lower():
            return memory
    expected = f"one of {', '.join(rule.memory)}"
    raise bad_value(f"{gpu.name}: memory.kind", expected, gpu.memory.kind)


_WIDENING = "gemm.engine.weight_only"  # products that widen their weights


def _carry_corrections(forecast: _Forecast) -> dict[str, Correction]:
    """Carry the parent's λ over: older kernel styles without Hopper's penalties, fixed times as
    cycles.
    """
    carried = {}
    for group, correction in forecast.parent.corrections.items():
        carried[group] = _carry_correction(group, correction, forecast)
    for old, native in forecast.style.native.items():
        if old in carried and native in carried:
            carried[old] = carried[native]
    renamed = {}
    for new, old in forecast.style.renamed.items():
        if old in carried:
            renamed[new] = carried[old]
    return carried | renamed


def _carry_correction(
    group: str,
    c: Correction,
    forecast: _Forecast,
) -> Correction:
    """Carry the λ of a group of kernels over, by each rule that names the group."""
    gpu = forecast.gpu
    chip = forecast.parent_chip
    rule = forecast.rule
    style = forecast.style
    lanes, tensor = _compare_pipes(gpu, rule)

    changed = replace(c, fixed_s=c.fixed_s * _divide(chip.clocks.max_hz, gpu.clocks.max_hz))
    if group in style.old_groups:
        changed = replace(changed, compute=c.compute * style.mma_on_parent)
    sharing = style.sharing | forecast.architecture.sharing
    if group in sharing:
        changed = replace(changed, l2=c.l2 / sharing[group])
    if group in style.exposed_scores and gpu.vendor == chip.vendor:
        changed = replace(changed, compute=_expose_scores(c.compute, gpu))
    if group in style.load_bound:
        least = forecast.parent.corrections["gemm.tensor"].compute
        changed = replace(
            changed, compute=max(c.compute * tensor, least), l2=_carry_l2(c.l2, gpu, chip)
        )
        changed = _carry_streaming(changed, forecast)
    if group in rule.integer_groups:
        changed = replace(changed, compute=c.compute / _compare_integers(gpu, chip))
    if group in rule.issue_bound:
        crowded = float(np.clip(2.0 * lanes - 1.0, 0.0, 1.0))
        free = min(FORECAST.issue_free, c.compute)
        changed = replace(changed, compute=free + (c.compute - free) * crowded)
    if group.startswith(_WIDENING):
        # arithmetic, far below 1, did not bound them on the parent; here it may
        changed = replace(changed, compute=max(c.compute, 1.0))
    if group.startswith(tuple(rule.l2_bound)):
        changed = replace(changed, l2=changed.l2 / _compare_loads(gpu, rule))
    if group.partition(".")[0] in rule.same_programs:
        instructions = 1.0 - FORECAST.fp32_instructions + FORECAST.fp32_instructions / lanes
        if group in rule.load_chains:  # a load takes as many seconds on every card
            instructions = _divide(gpu.clocks.max_hz, chip.clocks.max_hz)
        changed = replace(
            changed,
            serial_cycle=c.serial_cycle * instructions,
            l2=_carry_l2(c.l2, gpu, chip),
        )
        changed = _carry_streaming(changed, forecast)
    return changed


def _compare_loads(gpu: Gpu, rule: ForecastRule) -> float:
    """Return what loads get of the rate that is taken for L2, over what they get on the parent.

    Where no rate is published beside GDDR, the one that is taken is a rate that was reached.
    """
    if gpu.l2.byte_per_cycle is None and gpu.memory.kind.startswith("GDDR"):
        return rule.l2_loads["reached"]
    return rule.l2_loads.get(gpu.compute_capability, 1.0)


_FLOP_PER_SCORE = 4.0  # and element of a head: two products of a multiply-add each


def _expose_scores(compute: float, gpu: Gpu) -> float:
    """Return λ of attention whose programs hide no score behind products, as FlashAttention 2.

    The count of a kernel's work has what FlashAttention 3 leaves of a score. Here it takes an SM a
    special function and its fp32 instructions.
    """
    rate = gpu.pipes.tensor_flop_per_cycle.get(Dtype.BF16)
    lanes = gpu.pipes.cuda_flop_per_cycle.get(Dtype.FP32)
    if rate is None or lanes is None or gpu.pipes.sfu_op_per_cycle is None:
        return compute
    product_cycles = _FLOP_PER_SCORE * FORECAST.score_head / _take_scalar(rate)
    fp32_cycles = FORECAST.fp32_per_score / (0.5 * _take_scalar(lanes))
    score_cycles = 1.0 / _take_scalar(gpu.pipes.sfu_op_per_cycle) + fp32_cycles
    counted_cycles = product_cycles + ENGINE_ATTENTION.score_cycles
    return (compute * product_cycles + score_cycles) / counted_cycles


def _compare_integers(gpu: Gpu, chip: Gpu) -> float:
    """Return the integer lanes of an SM relative to the parent's; unknown ones count as equal."""
    lanes = gpu.pipes.int32_op_per_cycle
    parent_lanes = chip.pipes.int32_op_per_cycle
    if lanes is None or parent_lanes is None:
        return 1.0
    return _divide(lanes, parent_lanes)


def _carry_l2(
    l2: float,
    gpu: Gpu,
    chip: Gpu,
) -> float:
    """Carry λ of L2 over. Beyond 1 the SMs ask slower than L2 answers: it follows their number, not
    L2's rate.

    Below 1, L2 did not bound the kernel on the parent; here it may.
    """
    if l2 <= 1.0 or gpu.l2.byte_per_cycle is None or chip.l2.byte_per_cycle is None:
        return max(l2, 1.0)
    rates = _divide(gpu.l2.byte_per_cycle, chip.l2.byte_per_cycle)
    return max(1.0, l2 * rates * _take_scalar(chip.sm_count) / _take_scalar(gpu.sm_count))


def _carry_streaming(c: Correction, forecast: _Forecast) -> Correction:
    """Carry λ of memory over for a kernel that the bytes in flight of the SMs bound on the parent.

    Little's law: rate = SMs · bytes in flight / latency, and a latency of memory is much the same
    in seconds. So λ_d·Q/β_DRAM on the parent takes as much longer here as there are fewer SMs,
    whatever the memory; no kernel streams faster than the plain ones. A λ below theirs says only
    that memory did not bound the kernel on the parent.
    """
    least = forecast.parent.corrections[forecast.rule.streaming].memory
    if c.memory <= least:
        return replace(c, memory=least)
    rates = _divide(forecast.gpu.memory.byte_per_s, forecast.parent_chip.memory.byte_per_s)
    fewer_sms = _divide(forecast.parent_chip.sm_count, forecast.gpu.sm_count)
    return replace(c, memory=max(least, c.memory * rates * fewer_sms))


def _carry_clock_law(forecast: _Forecast) -> ClockLaw | None:
    """Carry the parent's effective clock over: its whole law, or the share of tensor kernels
    alone.
    """
    law = forecast.parent.clock_law
    if law is None:
        return None
    if forecast.architecture.clock_law:
        return replace(law, top_hz=_take_scalar(forecast.gpu.clocks.max_hz))
    if not forecast.architecture.tensor_share:
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
    usual_power = ends["other"].power
    assert usual_power is not None, "power of other kernels stands for all"
    learned = {}
    for name, end in ends.items():
        learned[name] = ResidualEnds(end.latency, end.power or usual_power, end.rows)
    # a kind (a name with a dot) that none of them has takes the ends of the nearest name above it
    residuals = {}
    for family, residual in parent.items():
        if "." not in family:
            residuals[family] = residual if family == "collective" else learned["other"]
    return residuals | learned


def _forecast_idle(
    gpu: Gpu,
    rule: ForecastRule,
    parent: IdlePower,
) -> tuple[IdlePower, str]:
    """Return idle power as published, else as shares of the limit, and a note of the latter."""
    warming = {"reference_c": parent.reference_c, "per_c": parent.per_c}
    if gpu.power.idle_w is not None:
        return IdlePower(gpu.power.idle_w.clock_hz, gpu.power.idle_w.value, **warming), ""
    lowest = rule.idle.lowest
    top = rule.idle.top
    if gpu.memory.kind.startswith("GDDR"):
        lowest, top = rule.idle.graphics_memory
    limit_w = _take_scalar(gpu.power.limit_w)
    low_w = lowest * limit_w
    top_w = top * limit_w
    top_hz = _take_scalar(gpu.clocks.max_hz)
    low_hz = min(_take_scalar(gpu.clocks.lowest_hz), 0.5 * top_hz)
    clock_hz = np.array([low_hz, *(share * top_hz for share in rule.idle.clock_share)])
    power_w = low_w + (top_w - low_w) * np.array([0.0, *rule.idle.rise])
    note = (
        f"no idle power of the {gpu.name} is published: taken as {low_w:.0f} W at the lowest "
        f"clock, {top_w:.0f} W at the top; cards with a table lie within a quarter of that"
    )
    return IdlePower(clock_hz, power_w, **warming), note


def _forecast_voltage(forecast: _Forecast, parent: VoltageCurve) -> tuple[VoltageCurve, str]:
    """Return V(f) as published, else in the parent's shape on its architecture, else in the shape
    of the rule.
    """
    gpu = forecast.gpu
    rule = forecast.rule
    published = gpu.power.voltage_v
    if published is not None:
        rising = np.maximum.accumulate(published.value)
        return VoltageCurve(published.clock_hz, rising / rising[-1]), ""
    share = np.array(rule.voltage.clock_share)
    relative = np.array(rule.voltage.relative)
    shape = "of the A100-PCIE's table"
    if forecast.architecture.whole:
        share = parent.clock_hz / _take_scalar(forecast.parent_chip.clocks.max_hz)
        relative = parent.relative
        shape = f"inferred on the {rule.parent}"
    note = f"no V(f) of the {gpu.name} is published: the shape {shape}, over its own top clock"
    return VoltageCurve(share * _take_scalar(gpu.clocks.max_hz), relative), note


def _divide(value: object, by: object) -> float:
    """Return how many times a field of one chip is that of another."""
    return _take_scalar(value) / _take_scalar(by)


def _take_scalar(value: object) -> float:
    """Return the number of a field; a swept GPU has none, since energies belong to one real
    chip.
    """
    return float(sweep_values(value))  # type: ignore[arg-type]
