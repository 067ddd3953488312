"""Architecture + energies + components -> ComponentPower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wattcast.activity import events
from wattcast.activity.simulated import Dialect, counters
from wattcast.errors import MissingSpecification, bad_value, unknown_name
from wattcast.power.component.architecture import Architecture
from wattcast.power.component.components import Component, ComponentSet, Rail
from wattcast.power.component.energies import DUTY, EnergyTable, with_coalescer
from wattcast.power.component.lanes import LaneStatic
from wattcast.power.component.leakage import Leakage
from wattcast.power.component.model import ComponentPower, Drive, Part, Term
from wattcast.power.static import VoltageCurve

_EXPONENT = {Rail.CORE: 2, Rail.STATIC: 1, Rail.OWN: 0}
DUTY_CAP = 0.8  # GPGPU-Sim cuts its pipeline duty here


@dataclass(frozen=True)
class Built:
    """A model and what had to be assumed for it."""

    model: ComponentPower
    notes: tuple[str, ...]


def build(
    architecture: Architecture,
    table: EnergyTable,
    components: ComponentSet,
    *,
    sm_count: float | None = None,
    leakage: Leakage | None = None,
    voltage: VoltageCurve | None = None,
    threads: float | None = None,
    capped: bool | None = None,
) -> Built:
    """Fold energies and scaling factors into a model.

    ``sm_count`` is the simulator's number of SMs, which the architecture file does not always hold.
    ``threads`` is the assumed number of active threads of a warp where the trace does not say; default: all.
    ``capped`` cuts the pipeline duty as the simulator does; default: in compatibility mode. The originals do
    not cut duties that come from hardware counters.
    """
    table, said = with_coalescer(table, architecture.number("core_tech_node"))
    notes = [said] if said else []
    names = _energies(architecture, table)
    terms = [t for c in components.components for t in _terms(c, components, architecture, names, table.name)]
    constants = _constants(architecture, table)
    static, static_notes = _static(architecture, components, sm_count, threads)
    lasting = None if components.compat else leakage or table.leakage
    model = ComponentPower(
        tuple(_merged(terms)),
        tuple(_part(c, components, constants) for c in components.components),
        table.reference_clock_hz,
        _reference_voltage(architecture),
        voltage,
        static,
        lasting if lasting is None or sm_count is None else replace(lasting, sm_count=float(sm_count)),
        DUTY_CAP if (components.compat if capped is None else capped) else None,
    )
    return Built(model, (*notes, *static_notes))


def _energies(architecture: Architecture, table: EnergyTable) -> dict[str, float]:
    """Every name a term may use: the table's counters, and the shares that are booked apart."""
    assert table.coalescer_read_j is not None
    assert table.coalescer_write_j is not None
    return dict(table.energy_j) | {
        DUTY: table.duty_w,
        "coalescer_read": table.coalescer_read_j,
        "coalescer_write": table.coalescer_write_j,
        "dram_read": architecture.number("dram_rd_coeff"),
        "dram_write": architecture.number("dram_wr_coeff"),
        "idle_core_power": architecture.number("idle_core_power"),
    }


def _constants(architecture: Architecture, table: EnergyTable) -> dict[str, float]:
    dynamic = architecture.scaling_of("CONST_DYNAMICN") if architecture.dialect is Dialect.GPUWATTCH else 0.0
    return {
        "mc_constant": table.mc_constant_w,
        "const_dynamic": max(0.0, dynamic - table.mc_constant_w),
        "constant_power": architecture.scaling.get("constant_power", 0.0),
    }


def _terms(
    component: Component,
    components: ComponentSet,
    architecture: Architecture,
    names: Mapping[str, float],
    table: str,
) -> list[Term]:
    by_column = {c.column: c for c in counters(components.dialect)}
    found = []
    for column, energy in component.terms.items():
        counter = by_column.get(column)
        event = counter.event if counter else components.custom[column]
        scale = architecture.scaling_of(counter.scaling) if counter else 1.0
        value = scale * (energy if isinstance(energy, float) else _sum(energy, names, component.name, table))
        if value < 0:
            wanted = f"{' '.join(energy)} above zero" if not isinstance(energy, float) else "an energy above zero"
            raise bad_value(f"{component.name}: {column}", wanted, f"{value:g}")
        drive = Drive.COUNT
        if events()[event].is_mean:
            drive = Drive.DUTY if component.clocked else Drive.MEAN
        found.append(Term(event, component.name, value, drive))
    return found


def _sum(signed: tuple[str, ...], names: Mapping[str, float], component: str, table: str) -> float:
    total = 0.0
    for name in signed:
        key = name.removeprefix("-")
        if key not in names:
            known = {c.column for d in Dialect for c in counters(d)}
            if key in known:
                raise MissingSpecification(
                    f"energy table {table} has no energy for {key}, which {component} needs. Add it, or take the "
                    f"table of this architecture."
                )
            raise unknown_name("energy", key, names)
        total += -names[key] if name.startswith("-") else names[key]
    return total


def _merged(terms: list[Term]) -> list[Term]:
    """Terms of one event and part as one."""
    sums: dict[tuple[str, str, Drive], float] = {}
    for term in terms:
        key = (term.event, term.part, term.drive)
        sums[key] = sums.get(key, 0.0) + term.value
    return [Term(event, part, value, drive) for (event, part, drive), value in sums.items()]


def _part(component: Component, components: ComponentSet, constants: Mapping[str, float]) -> Part:
    exponent = _EXPONENT[component.rail]
    if components.compat:  # GPUWattch knows no voltage; AccelWattch scales all but leakage with its square
        plain = components.dialect is Dialect.GPUWATTCH
        exponent = 0 if plain else (1 if component.rail is Rail.STATIC else 2)
    watts = component.constant
    if isinstance(watts, str):
        if watts not in constants:
            raise unknown_name("constant", watts, constants)
        watts = constants[watts]
    clocked = component.clocked and not components.compat
    return Part(component.name, exponent, watts or 0.0, clocked, component.static)


def _static(
    architecture: Architecture, components: ComponentSet, sm_count: float | None, threads: float | None
) -> tuple[LaneStatic | None, list[str]]:
    if not any(c.static for c in components.components):
        return None, []
    count = sm_count or architecture.parameters.get("number_of_cores")
    if not isinstance(count, (int, float)):
        raise MissingSpecification(
            "static power needs the number of SMs, which this architecture file does not hold. Give "
            "--simulator-config gpgpusim.config, or --sms."
        )
    lanes = threads if threads is not None else architecture.number("warp_size")
    said = (
        f"active threads of a warp are taken as {lanes:g} wherever a unit worked, unless the trace has a column "
        "THREADS_PER_WARP; STATICP and the total depend on it"
    )
    return LaneStatic(architecture.static, float(count), float(lanes), components.compat), [said]


def _reference_voltage(architecture: Architecture) -> float:
    value = architecture.parameters.get("modeled_chip_voltage_ref", 1.0)
    assert isinstance(value, (int, float))
    return float(value)
