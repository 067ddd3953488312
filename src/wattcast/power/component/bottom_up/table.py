"""Per-event energies as a table with its provenance, for a reader and for ``power-trace`` and ``fit component``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattcast.activity.simulated import Dialect, counters
from wattcast.hardware import Gpu
from wattcast.power.component.architecture import Architecture
from wattcast.power.component.architecture_yaml import read_architecture
from wattcast.power.component.bottom_up.catalogue import from_gpu
from wattcast.power.component.bottom_up.chip import Chip, build_chip
from wattcast.power.component.bottom_up.design import Design, changed, from_architecture
from wattcast.power.component.bottom_up.events import duty_w, energies
from wattcast.power.component.bottom_up.logic import unit_cost, units
from wattcast.power.component.bottom_up.modules import module_energies
from wattcast.power.component.bottom_up.parts import area_mm2, leakage, parts
from wattcast.power.component.bottom_up.what_if import with_changes
from wattcast.power.component.energies import EnergyTable

METHOD = "bottom-up from the architecture (docs/method/component-energies.md)"
# AccelWattch knows more units than GPUWattch; it charges all but additions the energy of the SFU or the FPU
_FPU = ("FPU_ACC", "DPU_ACC")
_STANDS_ON = {
    "TOT_INST": "instruction buffer: a read and a write",
    "FP_INT": "instruction window: read, two searches, a write; selection of a warp",
    "IC_H": "instruction cache: tags and all ways",
    "IC_M": "instruction cache read and filled; miss, fill and prefetch buffers",
    "DC_RH": "L1 data cache read, crossbar, coalescing logic",
    "DC_RM": "L1 data cache read, buffers, coalescing logic",
    "DC_WH": "L1 data cache written, crossbar, coalescing logic",
    "DC_WM": "L1 data cache written, tags read, coalescing logic",
    "TC_H": "texture cache read, crossbar, coalescing logic",
    "TC_M": "texture cache read, buffers, coalescing logic",
    "CC_H": "constant cache read, crossbar, coalescing logic",
    "CC_M": "constant cache read, buffers, coalescing logic",
    "SHRD_ACC": "shared-memory bank and crossbar",
    "REG_RD": "register bank, crossbar, arbiter, operand collector, for one thread",
    "REG_WR": "register bank, for one thread",
    "NON_REG_OPs": "crossbar, arbiter and operand collector, for one thread",
    "SP_ACC": "integer unit (published synthesis)",
    "SFU_ACC": "special-function unit (published synthesis)",
    "FPU_ACC": "floating-point unit (published synthesis)",
    "MEM_RD": "memory controller and device memory (empirical)",
    "MEM_WR": "memory controller and device memory (empirical)",
    "MEM_PRE": "device memory (empirical)",
    "L2_RH": "L2: tags, then one way",
    "L2_RM": "L2: tags",
    "L2_WH": "L2: tags, then one way",
    "L2_WM": "L2 written, its tags and buffers",
    "NOC_A": "router: buffer, crossbar, arbiters; wires of the chip where the die is known",
}


@dataclass(frozen=True)
class BottomUp:
    """A built chip, and for a catalogue GPU the events of the module model too."""

    chip: Chip
    modules: Mapping[str, float]  # event -> J; empty for an architecture file
    gpu: Gpu | None = None  # of the catalogue

    @property
    def design(self) -> Design:
        """What was built."""
        return self.chip.design

    @property
    def provenance(self) -> str:
        """One sentence for whoever meets these numbers later."""
        tech, design = self.chip.tech, self.design
        return (
            f"{METHOD}; {design.name}, F = {design.feature_nm:g} nm {tech.device.value}, {tech.voltage_v:.4g} V, "
            f"{tech.temperature_k:g} K, {tech.projection.value} wires; devices: {tech.source}"
        )


def of_architecture(
    architecture: Architecture, sm_count: int | None = None, clock_hz: float | None = None, **fields: Any
) -> BottomUp:
    """Energies of an architecture file; ``fields`` replace those of the design (``voltage_v=0.9``)."""
    design = from_architecture(architecture, sm_count)
    if clock_hz is not None:
        fields["clock_hz"] = clock_hz
    return BottomUp(build_chip(changed(design, **fields)), {})


def of_gpu(
    gpu: Gpu, feature_nm: float | None = None, voltage_v: float | None = None, temperature_k: float | None = None
) -> BottomUp:
    """Energies of a GPU of the catalogue."""
    chip = build_chip(from_gpu(gpu, feature_nm, voltage_v, temperature_k))
    return BottomUp(chip, module_energies(chip, gpu), gpu)


def of_file(
    path: Path, feature_nm: float | None = None, voltage_v: float | None = None, temperature_k: float | None = None
) -> tuple[BottomUp, Dialect]:
    """Energies of an architecture file on disk, and the dialect it speaks."""
    architecture = read_architecture(path)
    given: dict[str, Any] = {"feature_nm": feature_nm, "voltage_v": voltage_v, "temperature_k": temperature_k}
    fields = {name: value for name, value in given.items() if value is not None}
    return of_architecture(architecture, **fields), architecture.dialect


def with_sizes(found: BottomUp, factors: Mapping[str, float]) -> BottomUp:
    """The same with some sizes multiplied: registers, l1, shared, l2, sms."""
    chip = build_chip(with_changes(found.design, factors))
    return BottomUp(chip, module_energies(chip, found.gpu) if found.gpu is not None else {}, found.gpu)


def energy_table(found: BottomUp, dialect: Dialect = Dialect.GPUWATTCH) -> EnergyTable:
    """As a component model takes it: joules per counter of a dialect, pipeline watts, leakage."""
    chip = found.chip
    table = energies(chip)
    if dialect is Dialect.ACCELWATTCH:
        table |= {"INT_ACC": table.pop("SP_ACC")}
        sfu_j, fpu_j = table.pop("SFU_ACC"), table["FPU_ACC"]
        units = [c.column for c in counters(dialect) if c.prescaled and c.column != "INT_ACC"]
        table |= {name: fpu_j if name in _FPU else sfu_j for name in units}
    return EnergyTable(
        f"{found.design.name}-bottom-up",
        table,
        duty_w(chip),
        found.design.clock_hz,
        chip.controller.constant_w,
        chip.coalescer_read_j,
        chip.coalescer_write_j,
        leakage(chip),
        source=found.provenance,
    )


def plain(found: BottomUp) -> dict[str, Any]:
    """Everything, for JSON."""
    chip, tech = found.chip, found.chip.tech
    return {
        "name": found.design.name,
        "provenance": found.provenance,
        "notes": list(found.design.notes),
        "feature_nm": found.design.feature_nm,
        "voltage_v": tech.voltage_v,
        "temperature_k": tech.temperature_k,
        "counters": [
            {"counter": name, "energy_j": joule, "from": _STANDS_ON[name]} for name, joule in energies(chip).items()
        ],
        "events": [{"event": name, "energy_j": joule} for name, joule in found.modules.items()],
        "units": [
            {"unit": name, "energy_j": unit_cost(tech, name).energy_j, "source": unit.source}
            for name, unit in units().items()
        ],
        "pipelines_w": duty_w(chip),
        "memory_controller_w": chip.controller.constant_w,
        "coalescer": {"read_j": chip.coalescer_read_j, "write_j": chip.coalescer_write_j},
        "parts": [
            {
                "part": part.name,
                "count": part.count,
                "subthreshold_w": part.subthreshold_w,
                "gate_w": part.gate_w,
                "area_mm2": part.area_mm2,
            }
            for part in parts(chip)
        ],
        "leakage_w": leakage(chip).cores_w + leakage(chip).rest_w,
        "area_mm2": area_mm2(chip),
    }
