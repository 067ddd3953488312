"""Read what the files of a request say about the simulated chip.

Architecture, simulator configuration, clock, energies and components are read together and checked
against each other. Every choice that was not the user's leaves a note."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from wattcast.core import units
from wattcast.core.errors import bad_value
from wattcast.lab.gpuwattch import measured_energies
from wattcast.lab.gpuwattch.architecture import ChipArchitecture, read_architecture
from wattcast.lab.gpuwattch.component_set import ComponentSet, read_component_set
from wattcast.lab.gpuwattch.energy_table import EnergyTable, read_energies
from wattcast.lab.gpuwattch.simulator_config import (
    SimulatorConfig,
    SteadyStateDefinition,
    read_simulator_config,
)
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.lab.gpuwattch.trace_request import TraceRequest
from wattcast.power.power_model import VoltageCurve

SIMULATOR_CONFIG_FILE = "gpgpusim.config"
_SAME_FACTOR = 1e-4  # files print factors with five digits and more
_MOST_SHOWN = 3  # factors that a warning names


@dataclass(frozen=True)
class SimulatedChip:
    """What the files of a request hold about the chip."""

    architecture: ChipArchitecture
    config: SimulatorConfig
    table: EnergyTable
    clock_hz: float
    components: ComponentSet
    notes: list[str]  # on every choice that was not the user's
    # where the architecture is a GPU's name
    measured: measured_energies.MeasuredChip | None = None

    @property
    def voltage(self) -> VoltageCurve | None:
        """Core voltage by clock, where it was measured."""
        return None if self.measured is None else self.measured.voltage

    def trace_scaling(self, request: TraceRequest) -> dict[str, float]:
        """Return the scaling factors that the simulator has multiplied its unit counters by."""
        if request.ran_with is not None:
            return read_architecture(request.ran_with).all_scaling()
        if self.measured is not None:
            self.notes.append(
                "unit counters are taken as scaled by this GPU's own file (lab "
                "accelwattch); --ran-with names another"
            )
        return self.architecture.all_scaling()


def read_chip(request: TraceRequest) -> SimulatedChip:
    """Read architecture, simulator configuration and energies, and check that they belong
    together.
    """
    notes: list[str] = []
    measured = find_measured_chip(request.architecture)
    if measured is None:
        architecture = read_architecture(request.architecture)
    else:
        architecture = measured_energies.measured_architecture(measured)
    dialect = architecture.dialect
    if request.compat is not None and request.compat is not dialect:
        do = f"Leave --compat out or say --compat {dialect}."
        expectation = f"{dialect}, as {request.architecture.name} is"
        raise bad_value("--compat", expectation, request.compat.value, do)

    config = _find_config(request, notes)
    if measured is not None and config.sm_count is None:
        config = replace(config, sm_count=measured.design.sm_count)

    clock_hz = _find_clock_hz(request, architecture, config)
    if request.energies is not None:
        table = read_energies(request.energies, config.sample_cycle, clock_hz)
    elif measured is not None:
        table = measured_energies.measured_table(measured, architecture)
        notes.append(f"{table.name}: {measured.source}")
    else:
        table = _build_energies(architecture, config, clock_hz, notes)
    if clock_hz is None:
        clock_hz = table.reference_clock_hz
        origin = "the sample time of" if measured is None else "the top clock of"
        notes.append(f"core clock {units.show(clock_hz, 'Hz', 6)}, from {origin} {table.name}")

    _check_dialect(architecture, table)
    if warning := _compare_factors(architecture, table):
        notes.append(warning)
    components = read_component_set(dialect, request.compat is not None, request.components)
    return SimulatedChip(
        architecture,
        config,
        table,
        clock_hz,
        components,
        notes,
        measured,
    )


def find_measured_chip(name: Path) -> measured_energies.MeasuredChip | None:
    """Return the measured GPU that ``--config`` names instead of a file; None for a file."""
    if name.exists() or name.suffix or len(name.parts) > 1:
        return None
    return measured_energies.measured_chip(name.name)


def _find_config(request: TraceRequest, notes: list[str]) -> SimulatorConfig:
    """Return the simulator's configuration: the named file or the one next to the input, with the
    options on top.
    """
    path = request.simulator_config
    for file in (request.architecture, request.trace):
        neighbour = file.parent / SIMULATOR_CONFIG_FILE
        if path is None and neighbour.is_file():
            path = neighbour
            notes.append(f"{SIMULATOR_CONFIG_FILE} found beside {file.name} and read")
    config = read_simulator_config(path) if path else SimulatorConfig()
    if request.sm_count is not None:
        config = replace(config, sm_count=request.sm_count)
    if request.sample_cycle is not None:
        config = replace(config, sample_cycle=request.sample_cycle)
    elif path is None:
        notes.append(f"samples of {config.sample_cycle} cycles, the simulator's default")
    if request.steady is not None:
        config = replace(config, steady=SteadyStateDefinition.read(request.steady, "--steady"))
    return config


def _find_clock_hz(
    request: TraceRequest,
    architecture: ChipArchitecture,
    config: SimulatorConfig,
) -> float | None:
    """Return the core clock that the user or a file gives.

    GPUWattch's power model takes its clock from the architecture file, AccelWattch's from the
    configuration."""
    listed_mhz = architecture.parameters.get("target_core_clockrate")
    listed_hz = listed_mhz * 1e6 if isinstance(listed_mhz, (int, float)) else None
    if request.clock_hz:
        return request.clock_hz
    if request.compat is SimulatorDialect.GPUWATTCH:
        return listed_hz or config.clock_hz
    return config.clock_hz or listed_hz


def _build_energies(
    architecture: ChipArchitecture,
    config: SimulatorConfig,
    clock_hz: float | None,
    notes: list[str],
) -> EnergyTable:
    """Build energies bottom-up from the architecture, and note what was assumed."""
    from wattcast.lab.gpuwattch.bottom_up.event_energies import (
        build_architecture_chip,
        make_energy_table,
    )
    from wattcast.lab.gpuwattch.bottom_up.technology import explain_feature

    sm_count = int(config.sm_count) if config.sm_count else None
    chip = build_architecture_chip(architecture, sm_count, clock_hz)
    notes.append(f"no table of energies: {chip.provenance}")
    if other_process := explain_feature(chip.design.feature_nm):
        notes.append(f"warning: {other_process}")
    if missing := chip.design.notes:
        notes.append(
            f"{len(missing)} numbers the architecture file leaves out have McPAT's defaults"
        )
    return make_energy_table(chip, architecture.dialect)


def _check_dialect(architecture: ChipArchitecture, table: EnergyTable) -> None:
    """Refuse energies of counters that belong to the other dialect."""
    columns = {counter.column for counter in dialect_counters(architecture.dialect)}
    foreign = [name for name in table.energy_j if name not in columns]
    if foreign:
        raise bad_value(
            f"energies {table.name}",
            f"energies of {architecture.dialect} counters for {architecture.name}",
            f"{', '.join(foreign[:4])} of the other dialect",
            f"Take the energies dumped with {architecture.name}, or leave --energies out.",
        )


def _compare_factors(architecture: ChipArchitecture, table: EnergyTable) -> str:
    """Return a warning where the table was dumped with other scaling factors; otherwise nothing."""
    scaling_of_column = {c.column: c.scaling for c in dialect_counters(architecture.dialect)}
    differences = []
    compared = 0
    for column, dumped in table.scaling.items():
        if column not in scaling_of_column:
            continue
        compared += 1
        name = scaling_of_column[column]
        listed = architecture.scaling_of(name)
        if abs(dumped - listed) > _SAME_FACTOR * max(dumped, listed):
            differences.append(f"{name} {dumped:g} instead of {listed:g}")
    if not differences:
        return ""
    shown = ", ".join(differences[:_MOST_SHOWN])
    if len(differences) > _MOST_SHOWN:
        shown += " ..."
    return (
        f"warning: {table.name} was dumped with other scaling factors than "
        f"{architecture.name} has in {len(differences)} of {compared} counters ({shown}): "
        "are they of one chip? The architecture's are used"
    )
