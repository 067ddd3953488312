"""Compute joules per counter of a simulator and per event of the module model from a built chip,
and check them.

They are compared with energies fitted to a measured GPU, which must lie within a factor of 3.
``wattcast/lab/validate/public_checks/dumped_energies.py`` compares them with energies that a
simulator dumped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import (
    ceil,
    prod,
    sqrt,
)
from typing import TYPE_CHECKING, Any

from wattcast.calibrate.scoring import LedgerRow, make_ledger_row
from wattcast.core.errors import (
    BadInput,
    bad_value,
    check_names,
)
from wattcast.core.strict_files import read_shipped_table
from wattcast.core.units import show
from wattcast.hardware import Gpu, load_gpu
from wattcast.lab.gpuwattch.architecture import ChipArchitecture
from wattcast.lab.gpuwattch.bottom_up import chip_design
from wattcast.lab.gpuwattch.bottom_up.chip_design import ChipDesign
from wattcast.lab.gpuwattch.bottom_up.chip_units import (
    find_dram_energy,
    functional_unit_cost,
    functional_units,
)
from wattcast.lab.gpuwattch.bottom_up.technology import BOTTOM_UP_PACKAGE
from wattcast.lab.gpuwattch.energy_table import EnergyTable
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.power.module_power import as_module_power
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.report.figure_style import add_caption, new_figure
from wattcast.report.text_tables import new_table, print_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

LEAKAGE = "leakage"
AREA = "area"
PIPELINES = "pipelines"
# a core's latches belong to fetch, load-store, memory management and execution
_UNITS_OF_PIPELINE = 4.0
_BUSY_UNITS = 3.0  # of which three work for a duty of one (GPUWattch)
_FITTED_MUST = 3.0
_LEAST_CHANGE = 5e-4  # a smaller relative change is not printed
_LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = ("o", "s", "^", "D")
_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)
_PANELS = {  # size to change -> title, and the figures that show its effect
    "registers": ("registers of an SM", ("REG_RD", "REG_WR", LEAKAGE, AREA)),
    "l1": ("L1 data cache", ("DC_RH", "DC_RM", "DC_WH", "DC_WM")),
    "l2": ("L2 slice", ("L2_RH", "L2_RM", "L2_WH", LEAKAGE)),
    "sms": ("SMs, and the network's ports", ("NOC_A", PIPELINES, LEAKAGE, AREA)),
}


def counter_energies(chip: chip_design.BuiltChip) -> dict[str, float]:
    """Return joules per count of GPUWattch's counters, with device memory where the design has its
    energy.

    Each counter adds up the accesses that GPUWattch's McPAT charges it for. ``data/counters.csv``
    lists them as sums of products of numbers and figures of the chip; what a chip lacks (an L2,
    known device memory) costs nothing."""

    def find_figure(name: str) -> float:
        value: Any = chip
        for attribute in () if name.isdigit() else name.split("."):
            value = None if value is None else getattr(value, attribute)
        return float(name if value is chip else value or 0.0)

    energy_j = {}
    for row in read_shipped_table(BOTTOM_UP_PACKAGE, "data", "counters.csv"):
        products = [prod(map(find_figure, term.split("*"))) for term in row["joules"].split(" + ")]
        energy_j[row["counter"]] = sum(products)
    return energy_j


def pipeline_duty_w(chip: chip_design.BuiltChip) -> float:
    """Return the watts of all SMs' pipelines at duty one: three quarters of their latches switch
    every cycle.
    """
    d = chip.design
    cycle_j = chip.latches * chip.latch.energy_j * d.pipelines
    return float(cycle_j) * d.sm_count * _BUSY_UNITS / _UNITS_OF_PIPELINE * d.clock_hz


_WIDTH_BIT = {
    "tensor_tf32_flop": 32,
    "tensor_fp16_flop": 16,
    "tensor_fp8_flop": 8,
    "tensor_int8_op": 8,
}
_FP16_BIT = 16
_FLOP_PER_FMA = 2.0


def module_event_energies(chip: chip_design.BuiltChip, gpu: Gpu) -> dict[str, float]:
    """Return joules per event of the module model at the design's voltage, for random data.

    An operation costs its unit, its operands in the register file and its share of issuing the
    instruction. An event without a published source (tensor flop, device memory of an unknown kind)
    is left out."""
    design = chip.design
    counts = counter_energies(chip)
    assumed = chip_design.list_assumed_values()
    # an instruction's share of one thread
    issue_j = 1.0 / design.warp_size * (counts["TOT_INST"] + counts["FP_INT"] + counts["IC_H"])
    fma_j = counts["FPU_ACC"] + assumed["fma_reads"] * counts["REG_RD"] + counts["REG_WR"] + issue_j
    scaling_j = assumed["sfu_multiplies"] * fma_j  # brings an SFU's argument to base two
    l2_j_per_byte = counts["L2_RH"] / (design.l2.block_byte / 2.0) if design.l2 else 0.0
    energies = {
        "cuda_fp32_flop": fma_j / _FLOP_PER_FMA,
        # two lanes and two registers, one instruction
        "cuda_fp64_flop": (2.0 * fma_j - issue_j) / _FLOP_PER_FMA,
        "int32_op": counts["SP_ACC"] + 2.0 * counts["REG_RD"] + counts["REG_WR"] + issue_j,
        "sfu_op": counts["SFU_ACC"] + counts["REG_RD"] + counts["REG_WR"] + issue_j + scaling_j,
        "shared_byte": counts["SHRD_ACC"] / (design.words_of_access * 4.0),
        "l2_byte": l2_j_per_byte + counts["NOC_A"] / assumed["sector_byte"],
        "busy_sm_cycle": chip.latches * chip.latch.energy_j * design.pipelines,
    }
    if gpu.pipes.tensor_flop_per_cycle:
        word_byte = 4.0
        register_j_per_byte = (counts["REG_RD"] + counts["REG_WR"]) / 2.0 / word_byte
        flop_j = functional_unit_cost(chip.tech, "tensor_fp16").energy_j
        operand_j = assumed["tensor_register_byte_per_flop"] * register_j_per_byte
        for name, bits in _WIDTH_BIT.items():
            energies[name] = (flop_j + operand_j) * bits / _FP16_BIT
    read_j, write_j, _ = find_dram_energy(gpu.memory.kind)
    if read_j is not None and write_j is not None:
        block = design.controller.block_byte
        energies["dram_read_byte"] = read_j + chip.controller.read_j / block
        energies["dram_write_byte"] = write_j + chip.controller.write_j / block
    return energies


SIZE_KNOBS = {
    "registers": "registers of an SM, in as many banks as before",
    "l1": "bytes of the L1 data cache",
    "shared": "bytes of shared memory",
    "l2": "bytes of every L2 slice",
    "sms": "SMs, and the ports of the network with them",
}
# knob -> field of the design, and the size in it
_RESIZED = {
    "registers": ("registers", "registers"),
    "l1": ("data", "capacity_byte"),
    "shared": ("shared", "capacity_byte"),
    "l2": ("l2", "capacity_byte"),
}


@dataclass(frozen=True)
class EnergyRatio:
    """One of our figures and the corresponding one of another source, or of the chip before a
    change.
    """

    where: str  # file or GPU
    group: str  # component class, or the chip that was changed
    name: str
    unit: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs


def scale_design(
    design: chip_design.ChipDesign, factors: Mapping[str, float]
) -> chip_design.ChipDesign:
    """Multiply some sizes of a design; a size that does not come out whole is refused."""
    for name, factor in factors.items():
        check_names("part to change", name, SIZE_KNOBS, "")
        if not factor > 0.0:
            raise bad_value(f"{name}: factor", "above zero", factor)
    scaled = design
    for name, (field, size) in _RESIZED.items():
        if name in factors:
            scaled = _resize_part(
                scaled,
                name,
                field,
                size,
                factors[name],
            )
    if "sms" in factors:
        count = _scale_whole("sms", design.sm_count, factors["sms"])
        ports = ceil(design.router.inputs * count / design.sm_count)
        scaled = replace(scaled, sm_count=count, router=replace(design.router, inputs=ports))
    if scaled.link_um:
        # wires grow with the die's side
        after_mm2 = chip_design.chip_area_mm2(chip_design.build_chip(scaled))
        before_mm2 = chip_design.chip_area_mm2(chip_design.build_chip(design))
        scaled = replace(scaled, link_um=design.link_um * sqrt(after_mm2 / before_mm2))
    return scaled


def _resize_part(
    design: chip_design.ChipDesign,
    name: str,
    field: str,
    size: str,
    factor: float,
) -> chip_design.ChipDesign:
    part = getattr(design, field)
    if part is None:
        raise bad_value("l2", "a design with an L2 cache", f"{design.name}, which has none")
    whole = _scale_whole(name, getattr(part, size), factor)
    resized: dict[str, Any] = {field: replace(part, **{size: whole})}
    return replace(design, **resized)


def compare_chips(
    before: chip_design.BuiltChip, after: chip_design.BuiltChip
) -> tuple[EnergyRatio, ...]:
    """Compare every counter's joules, the pipelines' watts, leakage and area of two chips, the
    second as ours.
    """

    def list_figures(chip: chip_design.BuiltChip) -> dict[tuple[str, str], float]:
        leakage = chip_design.chip_leakage(chip)
        figures = {(name, "J"): joule for name, joule in counter_energies(chip).items()}
        figures |= {
            (PIPELINES, "W"): pipeline_duty_w(chip),
            (LEAKAGE, "W"): leakage.cores_w + leakage.rest_w,
        }
        return figures | {(AREA, "mm2"): chip_design.chip_area_mm2(chip)}

    old = list_figures(before)
    new = list_figures(after)
    where = after.design.name
    group = "size"
    return tuple(
        EnergyRatio(
            where,
            group,
            *key,
            new[key],
            value,
        )
        for key, value in old.items()
        if value > 0.0
    )


def _scale_whole(
    name: str,
    size: int,
    factor: float,
) -> int:
    scaled = size * factor
    if abs(scaled - round(scaled)) > 1e-9 * scaled:
        raise bad_value(f"{name} times {factor:g}", "a whole number", scaled)
    return round(scaled)


# AccelWattch knows more units than GPUWattch; it charges all but additions the energy of the SFU or
# the FPU
_FPU = ("FPU_ACC", "DPU_ACC")


def build_architecture_chip(
    architecture: ChipArchitecture,
    sm_count: int | None = None,
    clock_hz: float | None = None,
    **fields: Any,
) -> chip_design.BuiltChip:
    """Build the chip of an architecture; ``fields`` that are not None replace those of its
    design.
    """
    design = chip_design.design_from_architecture(architecture, sm_count)
    fields["clock_hz"] = clock_hz
    replacements = {name: value for name, value in fields.items() if value is not None}
    return chip_design.build_chip(replace(design, **replacements))


def make_energy_table(
    chip: chip_design.BuiltChip, dialect: SimulatorDialect = SimulatorDialect.GPUWATTCH
) -> EnergyTable:
    """Return an energy table for the component model: joules per counter of a dialect, pipeline
    watts, leakage.

    AccelWattch's static, idle and constant power hold the leakage already, so that its table has
    none."""
    table = counter_energies(chip)
    if dialect is SimulatorDialect.ACCELWATTCH:
        table |= {"INT_ACC": table.pop("SP_ACC")}
        sfu_j = table.pop("SFU_ACC")
        fpu_j = table["FPU_ACC"]
        for counter in dialect_counters(dialect):
            if counter.prescaled and counter.column != "INT_ACC":
                table[counter.column] = fpu_j if counter.column in _FPU else sfu_j
    leakage = chip_design.chip_leakage(chip) if dialect is SimulatorDialect.GPUWATTCH else None
    return EnergyTable(
        name=f"{chip.design.name}-bottom-up",
        energy_j=table,
        duty_w=pipeline_duty_w(chip),
        reference_clock_hz=chip.design.clock_hz,
        mc_constant_w=chip.controller.constant_w,
        coalescer_read_j=chip.coalescer.read_j,
        coalescer_write_j=chip.coalescer.write_j,
        leakage=leakage,
        source=chip.provenance,
    )


def energies_to_plain(chip: chip_design.BuiltChip, gpu: Gpu | None = None) -> dict[str, Any]:
    """Return all energies, leakage and area as plain values for JSON; with a catalogue GPU also
    those of modules.
    """
    tech = chip.tech
    leakage = chip_design.chip_leakage(chip)
    modules = module_event_energies(chip, gpu) if gpu is not None else {}
    charged = read_shipped_table(BOTTOM_UP_PACKAGE, "data", "counters.csv")
    accesses = {row["counter"]: row["accesses"] for row in charged}
    counters = [
        {
            "counter": name,
            "energy_j": joule,
            "from": accesses[name],
        }
        for name, joule in counter_energies(chip).items()
    ]
    units = []
    for name, unit in functional_units().items():
        energy_j = functional_unit_cost(tech, name).energy_j
        units.append(
            {
                "unit": name,
                "energy_j": energy_j,
                "source": unit.source,
            }
        )
    parts = []
    for part in chip_design.list_chip_parts(chip):
        figures = dict(vars(part))
        del figures["group"]
        parts.append({"part": figures.pop("name"), **figures})
    return {
        "name": chip.design.name,
        "provenance": chip.provenance,
        "notes": list(chip.design.notes),
        "feature_nm": chip.design.feature_nm,
        "voltage_v": tech.voltage_v,
        "temperature_k": tech.temperature_k,
        "counters": counters,
        "events": [{"event": name, "energy_j": joule} for name, joule in modules.items()],
        "units": units,
        "pipelines_w": pipeline_duty_w(chip),
        "memory_controller_w": chip.controller.constant_w,
        "coalescer": {"read_j": chip.coalescer.read_j, "write_j": chip.coalescer.write_j},
        "parts": parts,
        "leakage_w": leakage.cores_w + leakage.rest_w,
        "area_mm2": chip_design.chip_area_mm2(chip),
    }


def fitted_ratios(name: str = "h200") -> list[EnergyRatio]:
    """Compare the energies of a catalogue GPU with those fitted to its measured power."""
    bundle = shipped_bundle(name)
    if bundle is None:
        raise BadInput(f"no energies were fitted for {name}: there is nothing to compare with.")
    gpu = load_gpu(name)
    theirs = as_module_power(bundle.power).energy_j
    ours = module_event_energies(chip_design.build_chip(chip_design.design_from_gpu(gpu)), gpu)
    ratios = []
    for event, joule in ours.items():
        fitted_j = theirs.get(event, 0.0)
        if fitted_j > 0.0:
            ratios.append(
                EnergyRatio(
                    name,
                    "module",
                    event,
                    "J",
                    joule,
                    fitted_j,
                )
            )
    return ratios


def make_energy_rows(gpu: str = "h200") -> list[LedgerRow]:
    """Return ledger rows of a fitted GPU's energies."""
    if shipped_bundle(gpu) is None:
        return []
    return [
        make_ratio_row(
            f"{gpu} fitted",
            r.name,
            1,
            r.ratio,
            _FITTED_MUST,
        )
        for r in fitted_ratios(gpu)
    ]


def make_ratio_row(
    where: str,
    quantity: str,
    n: int,
    ratio: float,
    must: float | None,
    aim: float | None = None,
) -> LedgerRow:
    """Return a ledger row of a ratio: its distance from one, and the factor within which it must
    lie.
    """
    goals: dict[str, Any] = {"factor_must": must, "factor_aim": aim}
    return make_ledger_row(
        where,
        quantity,
        n,
        100.0 * abs(ratio - 1.0),
        ratio=round(ratio, 3),
        **goals,
    )


def print_energies(console: Console, plain: dict[str, Any]) -> None:
    """Print energies by counter and by event, leakage and area by part, and their sources."""
    from rich.markup import escape

    console.print(
        f"[bold]{escape(plain['name'])}[/bold]  {escape(plain['provenance'])}", highlight=False
    )
    counted = [
        (row["counter"], show(row["energy_j"], "J"), row["from"]) for row in plain["counters"]
    ]
    pipes = ("PIPE_A", show(plain["pipelines_w"], "W"), "pipeline latches of all SMs at duty one")
    console.print(
        new_table(
            "counter",
            "energy",
            "from",
            rows=[*counted, pipes],
            left=("from",),
        )
    )
    if plain["events"]:
        print_rows(console, plain["events"], {"event": "event", "energy_j": "energy"})
    published = {
        "unit": "unit",
        "energy_j": "operation at this node and voltage",
        "source": "source",
    }
    print_rows(console, plain["units"], published, left=("source",))
    pieces = new_table("part", "count", "leakage of one", "area of one")
    for row in plain["parts"]:
        leak_w = row["subthreshold_w"] + row["gate_w"]
        pieces.add_row(
            row["part"], str(row["count"]), show(leak_w, "W", 3), f"{row['area_mm2']:.4g} mm2"
        )
    pieces.add_row(
        "whole chip", "", show(plain["leakage_w"], "W", 4), f"{plain['area_mm2']:.4g} mm2"
    )
    console.print(pieces)
    for note in plain["notes"]:
        console.print(f"note: {escape(note)}", style="dim", highlight=False)


def print_changes(console: Console, changes: Sequence[EnergyRatio]) -> None:
    """Print the figures that changed, before and after."""
    moved = [c for c in changes if abs(c.ratio - 1.0) >= _LEAST_CHANGE]
    rows = []
    for change in moved:
        before = _format_quantity(change.theirs, change.unit)
        after = _format_quantity(change.ours, change.unit)
        rows.append((change.name, before, after, f"{change.ratio:.3f}"))
    console.print(
        new_table(
            "figure",
            "before",
            "after",
            "ratio",
            rows=rows,
        )
    )


def print_ratios(console: Console, ratios: Sequence[EnergyRatio]) -> None:
    """Print every ratio on a line of its own."""
    rows = []
    for r in ratios:
        ours = _format_quantity(r.ours, r.unit)
        theirs = _format_quantity(r.theirs, r.unit)
        rows.append((r.where, r.group, r.name, ours, theirs, f"{r.ratio:.3f}"))
    console.print(
        new_table(
            "where",
            "class",
            "name",
            "bottom up",
            "theirs",
            "ratio",
            rows=rows,
        )
    )


def _format_quantity(value: float, unit: str) -> str:
    return f"{value:.4g} mm2" if unit == "mm2" else show(value, unit, 4)


def draw_size_changes(design: ChipDesign) -> Figure:
    """Draw energies, leakage and area of a chip relative to its own, as one size after another is
    multiplied.
    """
    figure = new_figure(9.0, 6.0)
    panels = figure.subplots(2, 2, sharex=True)
    base = chip_design.build_chip(design)
    for axes, (knob, (title, names)) in zip(panels.flat, _PANELS.items(), strict=True):
        ratio_tables = []
        for step in _STEPS:
            chip = chip_design.build_chip(scale_design(design, {knob: step}))
            changes = compare_chips(base, chip)
            ratio_tables.append({change.name: change.ratio for change in changes})
        _draw_panel(axes, names, ratio_tables)
        axes.set_title(title)
        axes.legend(frameon=False)
    figure.supylabel("relative to the chip as it is")
    note = f"{design.name}, F = {design.feature_nm:g} nm, bottom-up; one size changes, others stay"
    return add_caption(figure, note)


def _draw_panel(
    axes: Any,
    names: Sequence[str],
    ratio_tables: Sequence[Mapping[str, float]],
) -> None:
    """Draw the named ratios over the steps of one size, on axes of powers of two."""
    every_ratio: list[float] = []
    for place, name in enumerate(names):
        ratios = [table[name] for table in ratio_tables]
        every_ratio += ratios
        line = "--" if name in (LEAKAGE, AREA) else "-"
        axes.plot(
            _STEPS,
            ratios,
            f"{_MARKS[place]}{line}",
            color=_LINE_COLOURS[place],
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(_STEPS, [f"{step:g}x" for step in _STEPS])
    lowest = 0.7 * min(every_ratio)
    highest = 1.4 * max(every_ratio)
    ticks = [step for step in _STEPS if lowest <= step <= highest]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.axhline(1.0, color="#999999", linewidth=0.8)
