"""Build the component power model from an architecture, energies and components, and run it sample
by sample.

A simulator written in Python hands each sample's counters to a ``PowerMeter`` [GPUWattch manual,
section 1.3]. Every listener sees the power of the sample and may answer with a new clock and
voltage for the samples that follow."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Mapping,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)

import numpy as np

from wattcast.core.errors import (
    MissingSpecification,
    WattcastError,
    bad_value,
    check_names,
    unknown_name,
)
from wattcast.hardware import OperatingPoint
from wattcast.lab.gpuwattch import energy_table
from wattcast.lab.gpuwattch.architecture import ChipArchitecture
from wattcast.lab.gpuwattch.component_set import ComponentRail, ComponentSet
from wattcast.lab.gpuwattch.energy_table import EnergyTable
from wattcast.lab.gpuwattch.trace_reading import (
    INSTRUCTIONS,
    THREADS,
    SimulatorCounter,
    SimulatorDialect,
    dialect_counters,
)
from wattcast.power.activity import (
    Activity,
    ActivitySource,
    known_events,
)
from wattcast.power.component_power import (
    ComponentPower,
    Drive,
    LaneStatic,
    Leakage,
    Part,
    Term,
)
from wattcast.power.power_model import VoltageCurve

DUTY_CAP = 0.8  # GPGPU-Sim cuts its pipeline duty here
_EXPONENT = {
    ComponentRail.CORE: 2,
    ComponentRail.STATIC: 1,
    ComponentRail.OWN: 0,
}


@dataclass(frozen=True)
class BuiltComponentModel:
    """A component model and the assumptions that were made to build it."""

    model: ComponentPower
    notes: tuple[str, ...]


def build_component_model(
    architecture: ChipArchitecture,
    table: EnergyTable,
    components: ComponentSet,
    *,
    sm_count: float | None = None,
    leakage: Leakage | None = None,
    voltage: VoltageCurve | None = None,
    threads: float | None = None,
    capped: bool | None = None,
) -> BuiltComponentModel:
    """Fold energies and scaling factors into a power model.

    The coefficient of a counter in a component is its scaling factor times the sum of the energies
    that the component names, in joules per count (watts for a duty). ``sm_count`` is the
    simulator's number of SMs, which the architecture file does not always hold. ``threads`` is the
    number of active threads of a warp where the trace does not hold it (default: all). ``capped``
    cuts the pipeline duty as the simulator does (default: in compatibility mode); the originals do
    not cut duties that come from hardware counters."""
    table, note = energy_table.with_coalescer(table, architecture.number("core_tech_node"))
    static = None
    if any(component.static for component in components.components):
        static = _build_static(architecture, components, sm_count, threads)
    added_leakage = None if components.compat else leakage or table.leakage
    if added_leakage is not None and sm_count is not None:
        added_leakage = replace(added_leakage, sm_count=float(sm_count))
    reference_v = architecture.parameters.get("modeled_chip_voltage_ref", 1.0)
    assert isinstance(reference_v, (int, float))
    is_capped = components.compat if capped is None else capped
    model = ComponentPower(
        _build_terms(architecture, table, components),
        _build_parts(architecture, table, components),
        table.reference_clock_hz,
        float(reference_v),
        voltage,
        static,
        added_leakage,
        DUTY_CAP if is_capped else None,
    )
    return BuiltComponentModel(model, (note,) if note else ())


def _build_static(
    architecture: ChipArchitecture,
    components: ComponentSet,
    sm_count: float | None,
    threads: float | None,
) -> LaneStatic:
    """Return AccelWattch's static power, which grows with SMs and active threads of a warp."""
    count = sm_count or architecture.parameters.get("number_of_cores")
    if not isinstance(count, (int, float)):
        raise MissingSpecification(
            "static power needs the number of SMs, which this architecture file does "
            "not hold. Give "
            "--simulator-config gpgpusim.config, or --sms."
        )
    lanes = threads if threads is not None else architecture.number("warp_size")
    return LaneStatic(architecture.static, float(count), float(lanes), components.compat)


def _build_terms(
    architecture: ChipArchitecture,
    table: EnergyTable,
    components: ComponentSet,
) -> tuple[Term, ...]:
    """Return one term per event and component, the energies of several counters added up."""
    energies = _name_energies(architecture, table)
    counter_of_column = {c.column: c for c in dialect_counters(components.dialect)}
    sums: dict[tuple[str, str, Drive], float] = {}
    for component in components.components:
        for column, energy in component.terms.items():
            if isinstance(energy, float):
                value = energy
            else:
                value = _sum_energies(table, component.name, energy, energies)
            counter = counter_of_column.get(column)
            if counter is None:
                event = components.custom[column]
            else:
                event = counter.event
                value *= architecture.scaling_of(counter.scaling)
            if value < 0:
                names = () if isinstance(energy, float) else energy
                raise bad_value(
                    f"{component.name}: {column}",
                    f"{' '.join(names) or 'an energy'} above zero",
                    f"{value:g}",
                    f"Was {table.name} dumped with another architecture file than "
                    f"{architecture.name}?",
                )
            drive = Drive.COUNT
            if known_events()[event].is_mean:
                drive = Drive.DUTY if component.clocked else Drive.MEAN
            key = (event, component.name, drive)
            sums[key] = sums.get(key, 0.0) + value
    return tuple(Term(event, part, value, drive) for (event, part, drive), value in sums.items())


def _name_energies(architecture: ChipArchitecture, table: EnergyTable) -> dict[str, float]:
    """Return the energies that components may name: joules a count, and watts of a duty."""
    assert table.coalescer_read_j is not None
    assert table.coalescer_write_j is not None
    return dict(table.energy_j) | {
        energy_table.DUTY: table.duty_w,
        "coalescer_read": table.coalescer_read_j,
        "coalescer_write": table.coalescer_write_j,
        "dram_read": architecture.number("dram_rd_coeff"),
        "dram_write": architecture.number("dram_wr_coeff"),
        "idle_core_power": architecture.number("idle_core_power"),
    }


def _sum_energies(
    table: EnergyTable,
    component: str,
    signed_names: tuple[str, ...],
    energies: Mapping[str, float],
) -> float:
    """Return the sum of named energies; those behind a minus sign are taken off."""
    total = 0.0
    for signed_name in signed_names:
        name = signed_name.removeprefix("-")
        if name not in energies and name in _all_columns():
            raise MissingSpecification(
                f"energy table {table.name} has no energy for {name}, which {component} needs. "
                "Add it, or take the table of this architecture."
            )
        check_names("energy", name, energies, "")
        total += energies[name] if signed_name == name else -energies[name]
    return total


def _all_columns() -> set[str]:
    """Return the columns of both dialects."""
    columns: set[str] = set()
    for dialect in SimulatorDialect:
        columns.update(counter.column for counter in dialect_counters(dialect))
    return columns


def _build_parts(
    architecture: ChipArchitecture,
    table: EnergyTable,
    components: ComponentSet,
) -> tuple[Part, ...]:
    """Return each component's constant watts and its power of the voltage."""
    dynamic_w = 0.0
    if architecture.dialect is SimulatorDialect.GPUWATTCH:
        dynamic_w = architecture.scaling_of("CONST_DYNAMICN")
    constants = {
        "mc_constant": table.mc_constant_w,
        "const_dynamic": max(0.0, dynamic_w - table.mc_constant_w),
        "constant_power": architecture.scaling.get("constant_power", 0.0),
    }
    parts = []
    for component in components.components:
        constant = component.constant
        if isinstance(constant, str):
            check_names("constant", constant, constants, "")
            constant = constants[constant]
        parts.append(
            Part(
                component.name,
                _voltage_exponent(component.rail, components),
                constant or 0.0,
                component.clocked and not components.compat,
                component.static,
            )
        )
    return tuple(parts)


def _voltage_exponent(rail: ComponentRail, components: ComponentSet) -> int:
    """Return the power of the core voltage that a component's watts follow.

    As the original, GPUWattch knows no voltage and AccelWattch scales all but leakage with its
    square."""
    if not components.compat:
        return _EXPONENT[rail]
    if components.dialect is SimulatorDialect.GPUWATTCH:
        return 0
    return 1 if rail is ComponentRail.STATIC else 2


@dataclass(frozen=True)
class ClockSetting:
    """The clock and voltage that a listener can ask for."""

    clock_hz: float
    voltage_v: float | None = None  # None: the model's reference, or its curve

    def __post_init__(self) -> None:
        if not self.clock_hz > 0 or (self.voltage_v is not None and not self.voltage_v > 0):
            raise bad_value(
                "setting",
                "a clock and a voltage above zero",
                f"{self.clock_hz} Hz, {self.voltage_v} V",
            )


@dataclass(frozen=True)
class SamplePower:
    """The power of one sample at the setting it ran at."""

    index: int
    duration_s: float
    power_w: float
    part_w: Mapping[str, float]
    setting: ClockSetting


PowerListener = Callable[[SamplePower], ClockSetting | None]


@dataclass
class PowerMeter:
    """Turns samples into power one at a time and asks the listeners for the next setting.

    With a ``dialect``, counters have the names of its simulator; without one they are Wattcast
    events."""

    model: ComponentPower
    setting: ClockSetting
    dialect: SimulatorDialect | None = None
    listeners: tuple[PowerListener, ...] = ()
    # factors of counters that are handed over already scaled
    scaling: Mapping[str, float] = field(default_factory=dict)
    energy_j: float = 0.0
    time_s: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        counters = dialect_counters(self.dialect) if self.dialect is not None else ()
        self._counter_of = {c.column: c for c in counters if c.event}
        self._counter_of[THREADS] = SimulatorCounter(THREADS, "active_thread", "", prescaled=False)
        # columns of a metric trace in which nothing is counted
        self._silent = {c.column for c in counters if not c.event} | {INSTRUCTIONS}

    def read_header(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the events that counters of these names show; an unknown name is an error."""
        readable = [*self._counter_of, *known_events(), *self._silent]
        events = []
        for name in names:
            check_names("counter", name, readable, "")
            if name in self._counter_of:
                events.append(self._counter_of[name].event)
            elif name not in self._silent:
                events.append(name)
        return tuple(events)

    def sample(
        self,
        counts: Mapping[str, float],
        cycles: float,
    ) -> ClockSetting:
        """Measure one sample of ``cycles`` core cycles at the present setting and return the next
        setting.
        """
        if not (np.isfinite(cycles) and cycles > 0):
            raise bad_value(f"sample {self.samples}", "cycles above zero", cycles)
        values: dict[str, float] = {}
        for name, count in counts.items():
            if name not in self._silent:
                event, unscaled = self._read_count(name, count)
                values[event] = unscaled
        if self.setting.voltage_v is not None:
            values["core_voltage"] = self.setting.voltage_v
        duration_s = cycles / self.setting.clock_hz
        activity = Activity(
            np.array([duration_s]),
            np.array([list(values.values())]),
            tuple(values),
            OperatingPoint(clock_hz=self.setting.clock_hz),
            ActivitySource.SIMULATED,
        )
        power = self.model.power(activity)
        watts = power.part_w[0].tolist()
        part_w = dict(zip(power.parts, watts, strict=True))
        measured = SamplePower(
            self.samples,
            duration_s,
            sum(watts),
            part_w,
            self.setting,
        )
        self.samples += 1
        self.time_s += duration_s
        self.energy_j += measured.power_w * duration_s
        for listener in self.listeners:
            self.setting = listener(measured) or self.setting
        return self.setting

    def _read_count(
        self,
        name: str,
        count: float,
    ) -> tuple[str, float]:
        """Return the event that a counter shows, and its count before any scaling factor."""
        counter = self._counter_of.get(name)
        event = counter.event if counter is not None else name
        if event not in known_events():
            raise unknown_name("counter", name, [*self._counter_of, *known_events()])
        if not (np.isfinite(count) and count >= 0):
            raise bad_value(f"sample {self.samples}: {name}", "a count, zero or more", count)
        if counter is None or not counter.prescaled:
            return event, count
        factor = self.scaling.get(counter.scaling, 1.0) or 1.0
        return event, count / factor


AT_LEAST = "power_at_least"  # the first name of an answer whose total lacks components


def answer_samples(
    meter: PowerMeter,
    lines: Iterable[str],
    answer: Callable[[str], None],
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve a simulator in another process, one line a sample (``wattcast_power.hpp`` is its side
    in C++).

    The first line names the counters, as a metric trace does. Each further line has the sample's
    cycles and counts, and optionally the clock in Hz and the voltage in V of the samples that
    follow, behind a ``|``. The answer is the sample's watts, then those of each part, in the order
    of the first answer. Where counters are missing, the total is called ``power_at_least`` and
    ``tell`` says what it lacks. A line that cannot be read is answered with ``error`` and ends it.
    """
    stream = iter(lines)
    names = next(stream, "").strip().rstrip(",").split(",")
    try:
        events = meter.read_header(names)
        model, lost, partial = meter.model.seen_by(events)
        meter.model = model
        is_partial = bool(lost or partial)
        if is_partial:
            missing = f"no counter of {', '.join(lost) or 'none'}"
            tell(f"the total is a lower bound: {missing}; in part: {', '.join(partial) or 'none'}")
        answer(",".join((AT_LEAST if is_partial else "power", *model.parts)))
        for line in stream:
            if not line.strip():
                return
            _answer_sample(meter, names, line, answer)
    except (WattcastError, ValueError) as error:
        answer("error " + str(error).replace("\n", " "))


def _answer_sample(
    meter: PowerMeter,
    names: list[str],
    line: str,
    answer: Callable[[str], None],
) -> None:
    """Answer one sample, and set clock and voltage of the next where the line asks for them."""
    counts, _, setting = line.strip().partition("|")
    cycles, *values = (float(text) for text in counts.rstrip(",").split(","))
    if len(values) != len(names):
        where = f"sample {meter.samples}"
        raise bad_value(where, f"cycles and {len(names)} counts", f"{len(values)} counts")
    seen: list[SamplePower] = []
    meter.listeners = (seen.append,)
    meter.sample(dict(zip(names, values, strict=True)), cycles)
    answer(",".join(f"{watts!r}" for watts in (seen[0].power_w, *seen[0].part_w.values())))
    if setting:
        clock_hz, *volts = (float(text) for text in setting.split(","))
        meter.setting = ClockSetting(clock_hz, volts[0] if volts else None)
