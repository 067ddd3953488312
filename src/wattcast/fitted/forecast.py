"""A bundle for a GPU nobody here has measured: what the H200 taught, carried over by its catalogue entry alone.

Rates come from the specification. Corrections of kernels are kept where the kernels are the same programs; the
rest changes with the kernel style of the architecture. Energy per operation is the parent's times one factor
per class of module, from process, voltage and memory. ``forecast.yaml`` holds every number of the rule and
where it is from; ``docs/method/other-gpus.md`` the reasons [Lee2026, VI-C].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from wattcast import units
from wattcast.activity import events
from wattcast.arrays import per_sweep
from wattcast.dtypes import Dtype
from wattcast.errors import bad_value
from wattcast.fitted.bundle import Bundle, Residual, fitted
from wattcast.fitted.forecast_rule import Architecture, MemoryKind, Rule, rule
from wattcast.hardware import Gpu, load
from wattcast.kernels import reference_of
from wattcast.power.module import ModulePower
from wattcast.power.static import IdlePower, VoltageCurve
from wattcast.provenance import Provenance, Status
from wattcast.timeline.carried import Carried
from wattcast.timeline.clock import ClockLaw
from wattcast.timeline.phases import Correction, Launch
from wattcast.timeline.residual import Residuals


def forecast(gpu: Gpu) -> Bundle:
    """The forecast bundle of ``gpu``; everything it assumes is in its assumptions."""
    if all(not isinstance(value, np.ndarray) for value in (gpu.sm_count, gpu.clocks.max_hz, gpu.power.limit_w)):
        return _kept(gpu.name, _Key(gpu))
    return _forecast(gpu)


class _Key:
    """A GPU as a key of a cache: the same object, or one equal in all that is printed of it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.text = gpu, repr(gpu)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@lru_cache(maxsize=64)
def _kept(name: str, key: _Key) -> Bundle:
    return _forecast(key.gpu)


def _forecast(gpu: Gpu) -> Bundle:
    the = rule()
    parent, chip = parent_bundle(), load(the.parent)
    kind = the.architecture(gpu.architecture)
    power = parent.power
    assert isinstance(power, ModulePower), "the parent of forecasts has a module model"
    idle, idle_note = _idle(gpu, the, power.idle)
    voltage, voltage_note = _voltage(gpu, chip, the, kind, power.voltage)
    missing = [f"{gpu.name}: {path} is unknown: {cost}" for path, cost in the.missing.items() if path in gpu.unknown]
    process = the.process(gpu)
    notes = (
        f"forecast: no measurement of the {gpu.name}; carried over from the {the.parent} by specification",
        f"energy per operation: {process.logic:g} times the {the.parent}'s for logic ({gpu.process}), "
        f"{_memory(gpu, the).factor:g} for {gpu.memory.kind}",
        "host: times the mean operator's cost " + ", ".join(f"{w:g} {kind}" for kind, w in the.host_weights.items()),
        idle_note,
        voltage_note,
        *missing,
    )
    return Bundle(
        gpu=gpu.name,
        status=Status.INHERITED,
        provenance=Provenance(the.source, the.date, note=f"parent: {parent.provenance.source}"),
        corrections=_corrections(parent, gpu, chip, the, kind),
        launch=_launch(parent, gpu, the),
        power=_power(gpu, the, power, idle, voltage),
        clock_law=_law(parent, gpu) if kind.clock_law else None,
        residuals=_residuals(parent, the, kind),
        toggling=parent.toggling,
        reference=replace(
            reference_of(gpu), style=kind.style, choice=parent.reference.choice if kind.whole else None
        ),
        learned=_learned(parent, the, kind),
        seen=parent.seen,
        interval_level=parent.interval_level,
        assumptions=tuple(note for note in notes if note),
        cards=parent.cards,
        widening=parent.widening,
        cold=parent.cold,
    )


def parent_bundle() -> Bundle:
    """The fitted bundle all forecasts inherit from."""
    found = fitted(rule().parent)
    if found is None:
        raise bad_value("forecast", f"the fitted bundle of the {rule().parent}", "none", "Install Wattcast whole.")
    return found


def energies(gpu: Gpu, the: Rule, parent_j: Mapping[str, float]) -> dict[str, float]:
    """Joules per event at the card's top voltage: the parent's, times the factor of the event's class of module."""
    filled = dict(parent_j)
    for event, how in the.formats.items():
        if event != "source" and event not in filled and how["of"] in filled:
            filled[event] = float(how["factor"]) * filled[how["of"]]
    filled.setdefault("link_byte", the.link_energy_j_per_byte)
    factor, known = module_factors(gpu, the), events()
    factor["dram"], _ = _memory_factor(gpu, the, parent_j)
    return {event: joules * factor[known[event].module] for event, joules in filled.items()}


def module_factors(gpu: Gpu, the: Rule) -> dict[str, float]:
    """Energy per operation of each class of module against the parent's, both at their top voltage."""
    process, style = the.process(gpu), the.styles[the.architecture(gpu.architecture).style]
    volts = 1.0
    if process.nominal and gpu.power.voltage_v is not None:
        volts = (float(gpu.power.voltage_v.value.max()) / units.parse(process.nominal, "V", "nominal")) ** 2
    factor = {module: volts * process.logic**power for module, power in the.classes.items()}
    factor["tensor"] *= style.tensor_delivery
    factor["sm"] *= _sm_width(gpu, the)
    factor["link"] = 1.0
    return factor


def _power(gpu: Gpu, the: Rule, parent: ModulePower, idle: IdlePower, voltage: VoltageCurve) -> ModulePower:
    joules = energies(gpu, the, parent.energy_j)
    memory = [event for event in joules if event.startswith("dram")]
    _, on_core = _memory_factor(gpu, the, parent.energy_j)
    return ModulePower(joules, idle, voltage, 1.0, on_core if memory else 0.0)


def _memory_factor(gpu: Gpu, the: Rule, parent_j: Mapping[str, float]) -> tuple[float, float]:
    """Energy of a byte of device memory against the parent's, and the share of it spent on the chip."""
    mean_j = float(np.mean([joules for event, joules in parent_j.items() if event.startswith("dram")]))
    rail = min(the.memory_rail_j_per_byte / mean_j, 1.0)
    kind = _memory(gpu, the)
    on_chip = (1.0 - rail) * kind.interface * module_factors(gpu, the)["l2"]
    whole = rail * kind.factor + on_chip
    return whole, on_chip / whole


def _sm_width(gpu: Gpu, the: Rule) -> float:
    """Capacitance of a working SM against the parent's: what all have alike, and its fp32 lanes."""
    return the.sm_alike + (1.0 - the.sm_alike) * _lanes(gpu, the)


def _lanes(gpu: Gpu, the: Rule) -> float:
    """fp32 lanes of an SM against the parent's."""
    own, parents = (float(per_sweep(g.pipes.cuda_flop_per_cycle[Dtype.FP32])) for g in (gpu, load(the.parent)))
    return own / parents


def _integers(gpu: Gpu, chip: Gpu) -> float:
    """Integer lanes of an SM against the parent's; unknown ones are as many."""
    own, parents = gpu.pipes.int32_op_per_cycle, chip.pipes.int32_op_per_cycle
    return 1.0 if own is None or parents is None else float(per_sweep(own)) / float(per_sweep(parents))


def _memory(gpu: Gpu, the: Rule) -> MemoryKind:
    kinds = {name.lower(): kind for name, kind in the.memory.items()}
    found = kinds.get(gpu.memory.kind.lower())
    if found is None:
        raise bad_value(f"{gpu.name}: memory.kind", f"one of {', '.join(the.memory)}", gpu.memory.kind)
    return found


def _corrections(parent: Bundle, gpu: Gpu, chip: Gpu, the: Rule, kind: Architecture) -> dict[str, Correction]:
    """The parent's λ; kernels of an older style without what Hopper takes from them, fixed times by the clock."""
    style = the.styles[kind.style]
    clocks = float(per_sweep(chip.clocks.max_hz)) / float(per_sweep(gpu.clocks.max_hz))
    slower = 1.0 - the.fixed_clock_share + the.fixed_clock_share * clocks
    lanes = 1.0 - the.fp32_instructions + the.fp32_instructions / _lanes(gpu, the)
    found = {}
    for name, c in parent.corrections.items():
        changed = replace(c, fixed_s=c.fixed_s * slower)
        if name in style.old_groups:
            changed = replace(changed, compute=c.compute * style.mma_on_parent)
        if name in the.integer_groups:
            changed = replace(changed, compute=c.compute / _integers(gpu, chip))
        if name in the.issue_bound:
            crowded = float(np.clip(2.0 * _lanes(gpu, the) - 1.0, 0.0, 1.0))
            free = min(the.issue_free, c.compute)
            changed = replace(changed, compute=free + (c.compute - free) * crowded)
        if name.partition(".")[0] in the.same_programs:
            changed = replace(changed, serial_cycle=c.serial_cycle * lanes, l2=_asked(c.l2, gpu, chip))
            changed = _streaming(changed, parent, gpu, chip, the)
        found[name] = changed
    for old, new in style.native.items():
        if old in found and new in found:
            cycles = found.get(style.native_cycles, found[old]).compute
            found[old] = replace(found[new], compute=cycles, l2=found[new].l2 / style.sharing)
    return found | {new: found[old] for new, old in style.renamed.items() if old in found}


def _asked(l2: float, gpu: Gpu, chip: Gpu) -> float:
    """λ of L2 beyond 1: the SMs ask slower than L2 could answer, so it goes with their number, not with L2's rate.

    Below 1, L2 did not bound the kernel on the parent; here it may.
    """
    if l2 <= 1.0 or gpu.l2.byte_per_cycle is None or chip.l2.byte_per_cycle is None:
        return max(l2, 1.0)
    rates = float(per_sweep(gpu.l2.byte_per_cycle)) / float(per_sweep(chip.l2.byte_per_cycle))
    return max(1.0, l2 * rates * float(per_sweep(chip.sm_count)) / float(per_sweep(gpu.sm_count)))


def _streaming(c: Correction, parent: Bundle, gpu: Gpu, chip: Gpu, the: Rule) -> Correction:
    """A kernel slower than plain streaming on the parent: bound there by the bytes its SMs have in flight.

    Little's law: rate = SMs · bytes in flight / latency, and a latency of memory is much the same in seconds. So
    λ_d·Q/β_DRAM on the parent takes as much longer here as there are fewer SMs, whatever the memory; no kernel
    streams faster than the plain ones. A λ below theirs says only that memory did not bound the kernel on the parent.
    """
    least = parent.corrections[the.streaming].memory
    if c.memory <= least:
        return replace(c, memory=least)
    slower = float(per_sweep(chip.sm_count)) / float(per_sweep(gpu.sm_count))
    rates = float(per_sweep(gpu.memory.byte_per_s)) / float(per_sweep(chip.memory.byte_per_s))
    return replace(c, memory=max(least, c.memory * rates * slower))


def _launch(parent: Bundle, gpu: Gpu, the: Rule) -> Launch:
    told = the.host.get(gpu.architecture, the.host["default"])
    host_s = parent.launch.host_s_per_operator if told == "parent" else units.parse(told, "s")
    return replace(parent.launch, host_s_per_operator=host_s, host_weights=the.host_weights)


def _law(parent: Bundle, gpu: Gpu) -> ClockLaw | None:
    """The parent's effective clock, over this card's own top clock."""
    law = parent.clock_law
    return None if law is None else replace(law, top_hz=float(per_sweep(gpu.clocks.max_hz)))


def _learned(parent: Bundle, the: Rule, kind: Architecture) -> Residuals | None:
    if parent.learned is None:
        return None
    keep = None if kind.whole else set(the.same_programs)
    time, energy = (
        {family: model for family, model in models.items() if keep is None or family in keep}
        for models in (parent.learned.time, parent.learned.energy)
    )
    return Carried(parent.learned.reference, time, energy)


def _residuals(parent: Bundle, the: Rule, kind: Architecture) -> dict[str, Residual]:
    """The parent's held-out residuals, widened by what the carrying adds, in quadrature of logs."""
    spread = the.spread["whole" if kind.whole else "other"]

    def wider(ends: tuple[float, float], factor: float) -> tuple[float, float]:
        low, high = (float(np.hypot(np.log(end), np.log(factor))) for end in ends)
        return float(np.exp(-low)), float(np.exp(high))

    return {
        family: Residual(wider(r.latency, spread.latency), wider(r.power, spread.power), r.rows)
        for family, r in parent.residuals.items()
    }


def _idle(gpu: Gpu, the: Rule, parent: IdlePower) -> tuple[IdlePower, str]:
    warming = {"reference_c": parent.reference_c, "per_c": parent.per_c}
    if gpu.power.idle_w is not None:
        return IdlePower(gpu.power.idle_w.clock_hz, gpu.power.idle_w.value, **warming), ""
    limit_w, top_hz = float(per_sweep(gpu.power.limit_w)), float(per_sweep(gpu.clocks.max_hz))
    low_hz = float(per_sweep(gpu.clocks.min_hz)) if gpu.clocks.min_hz is not None else 0.3 * top_hz
    low_w, top_w = the.idle.lowest * limit_w, the.idle.top * limit_w
    clock_hz = np.array([min(low_hz, 0.5 * top_hz), *(share * top_hz for share in the.idle.clock_share)])
    power_w = low_w + (top_w - low_w) * np.array([0.0, *the.idle.rise])
    note = (
        f"no idle power of the {gpu.name} is published: taken as {low_w:.0f} W at the lowest clock, {top_w:.0f} W at "
        f"the top; cards with a table lie within a quarter of that"
    )
    return IdlePower(clock_hz, power_w, **warming), note


def _voltage(gpu: Gpu, chip: Gpu, the: Rule, kind: Architecture, parent: VoltageCurve) -> tuple[VoltageCurve, str]:
    """Published, or the parent's own shape on its architecture, or the shape of the rule."""
    published = gpu.power.voltage_v
    if published is not None:
        return VoltageCurve(published.clock_hz, np.maximum.accumulate(published.value) / published.value.max()), ""
    top_hz = float(per_sweep(gpu.clocks.max_hz))
    if kind.whole:
        share = parent.clock_hz / float(per_sweep(chip.clocks.max_hz))
        return VoltageCurve(share * top_hz, parent.relative), (
            f"no V(f) of the {gpu.name} is published: the shape inferred on the {the.parent}, over its own top clock"
        )
    return VoltageCurve(np.array(the.voltage.clock_share) * top_hz, np.array(the.voltage.relative)), (
        f"no V(f) of the {gpu.name} is published: the shape of the A100-PCIE's table, over its own top clock"
    )
