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
from wattcast.lab.gpuwattch.energy_table import (
    ComponentRail,
    ComponentSet,
    EnergyTable,
)
from wattcast.lab.gpuwattch.trace_reading import (
    INSTRUCTIONS,
    THREADS,
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
    notes = [note] if note else []
    static = None
    if any(c.static for c in components.components):
        count = sm_count or architecture.parameters.get("number_of_cores")
        if not isinstance(count, (int, float)):
            raise MissingSpecification(
                "static power needs the number of SMs, which this architecture file does "
                "not hold. Give "
                "--simulator-config gpgpusim.config, or --sms."
            )
        lanes = threads if threads is not None else architecture.number("warp_size")
        static = LaneStatic(architecture.static, float(count), float(lanes), components.compat)
    lasting = None if components.compat else leakage or table.leakage
    if lasting is not None and sm_count is not None:
        lasting = replace(lasting, sm_count=float(sm_count))
    reference_v = architecture.parameters.get("modeled_chip_voltage_ref", 1.0)
    assert isinstance(reference_v, (int, float))
    model = ComponentPower(
        _build_terms(architecture, table, components),
        _build_parts(architecture, table, components),
        table.reference_clock_hz,
        float(reference_v),
        voltage,
        static,
        lasting,
        DUTY_CAP if (components.compat if capped is None else capped) else None,
    )
    return BuiltComponentModel(model, tuple(notes))


def _build_terms(
    architecture: ChipArchitecture,
    table: EnergyTable,
    components: ComponentSet,
) -> tuple[Term, ...]:
    """Return one term per event and component, the energies of several counters added up."""
    assert table.coalescer_read_j is not None
    assert table.coalescer_write_j is not None
    energies = dict(table.energy_j) | {
        energy_table.DUTY: table.duty_w,
        "coalescer_read": table.coalescer_read_j,
        "coalescer_write": table.coalescer_write_j,
        "dram_read": architecture.number("dram_rd_coeff"),
        "dram_write": architecture.number("dram_wr_coeff"),
        "idle_core_power": architecture.number("idle_core_power"),
    }
    by_column = {c.column: c for c in dialect_counters(components.dialect)}
    every = {c.column for d in SimulatorDialect for c in dialect_counters(d)}
    sums: dict[tuple[str, str, Drive], float] = {}
    for component in components.components:
        for column, energy in component.terms.items():
            counter = by_column.get(column)
            event = counter.event if counter else components.custom[column]
            value, names = (energy, ()) if isinstance(energy, float) else (0.0, energy)
            for name in names:
                key = name.removeprefix("-")
                if key not in energies and key in every:
                    said = (
                        f"energy table {table.name} has no energy for {key}, which "
                        f"{component.name} needs."
                    )
                    raise MissingSpecification(
                        f"{said} Add it, or take the table of this architecture."
                    )
                check_names("energy", key, energies, "")
                value += energies[key] if name == key else -energies[key]
            value *= architecture.scaling_of(counter.scaling) if counter else 1.0
            if value < 0:
                wanted = f"{' '.join(names) or 'an energy'} above zero"
                do = (
                    f"Was {table.name} dumped with another architecture file than "
                    f"{architecture.name}?"
                )
                raise bad_value(f"{component.name}: {column}", wanted, f"{value:g}", do)
            drive = Drive.COUNT
            if known_events()[event].is_mean:
                drive = Drive.DUTY if component.clocked else Drive.MEAN
            sums[event, component.name, drive] = (
                sums.get((event, component.name, drive), 0.0) + value
            )
    return tuple(Term(event, part, value, drive) for (event, part, drive), value in sums.items())


def _build_parts(
    architecture: ChipArchitecture,
    table: EnergyTable,
    components: ComponentSet,
) -> tuple[Part, ...]:
    """Return each component's constant watts and its power of the voltage."""
    of_gpuwattch = architecture.dialect is SimulatorDialect.GPUWATTCH
    dynamic_w = architecture.scaling_of("CONST_DYNAMICN") if of_gpuwattch else 0.0
    constants = {
        "mc_constant": table.mc_constant_w,
        "const_dynamic": max(0.0, dynamic_w - table.mc_constant_w),
        "constant_power": architecture.scaling.get("constant_power", 0.0),
    }
    found = []
    for component in components.components:
        exponent = _EXPONENT[component.rail]
        if (
            components.compat
        ):  # GPUWattch knows no voltage; AccelWattch scales all but leakage with its square
            plain = components.dialect is SimulatorDialect.GPUWATTCH
            exponent = 0 if plain else (1 if component.rail is ComponentRail.STATIC else 2)
        watts = component.constant
        if isinstance(watts, str):
            check_names("constant", watts, constants, "")
            watts = constants[watts]
        clocked = component.clocked and not components.compat
        found.append(Part(component.name, exponent, watts or 0.0, clocked, component.static))
    return tuple(found)


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
    scaling: Mapping[str, float] = field(
        default_factory=dict
    )  # for counters handed over already scaled
    energy_j: float = 0.0
    time_s: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        known = dialect_counters(self.dialect) if self.dialect is not None else ()
        self._event_of = {c.column: (c.event, c.prescaled, c.scaling) for c in known if c.event}
        self._event_of[THREADS] = ("active_thread", False, "")
        # columns of a metric trace in which nothing is counted
        self._silent = {c.column for c in known if not c.event} | {INSTRUCTIONS}

    def read_header(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the events that counters of these names show; an unknown name is an error."""
        known = [*self._event_of, *known_events(), *self._silent]
        events = []
        for name in names:
            check_names("counter", name, known, "")
            if name not in self._silent:
                events.append(self._event_of.get(name, (name, False, ""))[0])
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
            if name in self._silent:
                continue
            event, prescaled, factor = self._event_of.get(name, (name, False, ""))
            if event not in known_events():
                raise unknown_name("counter", name, [*self._event_of, *known_events()])
            if not (np.isfinite(count) and count >= 0):
                raise bad_value(f"sample {self.samples}: {name}", "a count, zero or more", count)
            values[event] = count / (self.scaling.get(factor, 1.0) or 1.0) if prescaled else count
        if self.setting.voltage_v is not None:
            values["core_voltage"] = self.setting.voltage_v
        duration_s = cycles / self.setting.clock_hz
        value = np.array([list(values.values())])
        at = OperatingPoint(clock_hz=self.setting.clock_hz)
        activity = Activity(
            np.array([duration_s]), value, tuple(values), at, ActivitySource.SIMULATED
        )
        power = self.model.power(activity)
        watts = power.part_w[0].tolist()
        parts = dict(zip(power.parts, watts, strict=True))
        seen = SamplePower(self.samples, duration_s, sum(watts), parts, self.setting)
        self.samples += 1
        self.time_s += duration_s
        self.energy_j += seen.power_w * duration_s
        for listener in self.listeners:
            self.setting = listener(seen) or self.setting
        return self.setting


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
