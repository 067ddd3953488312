"""Print what Stokke et al. (MMSys 2016) published of the Tegra K1, and draw rows that it would have.

Run ``python -m wattcast.lab.paper_figures.tegra_k1`` for Table 4, section 6.3 and figure 13, each
number beside the one that the saved model gives; ``--figure-13 FILE`` draws that figure.
``--measure FOLDER`` writes a board whose costs are known: a table
of microbenchmarks and mixtures over 30 pairs of clocks with the voltages of each rail (``k1.csv``),
programs apart (``programs.csv``), and the map of columns (``k1.yaml``). ``--truth MODEL`` then
says how far a model that ``wattcast lab fit counters`` found of it is from the truth, cost by cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import encode_csv
from wattcast.core.whole_files import write_whole
from wattcast.hardware import OperatingPoint
from wattcast.lab.module_commands import run_module
from wattcast.lab.paper_figures.tegra_k1_dct import VARIANTS, draw_figure_13, read_dct_events
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.hybrid_rail import HybridRail
from wattcast.power.power_model import load_saved_model
from wattcast.report.figure_style import save_figure

TOP_HZ = 852e6
LOW_HZ = 72e6
MEMORY_HZ = 924e6
CORE_CLOCKS_HZ = 1e6 * np.array([72.0, 252.0, 396.0, 540.0, 684.0, 852.0])
MEMORY_CLOCKS_HZ = 1e6 * np.array([204.0, 300.0, 396.0, 600.0, 924.0])
RAILS = ("core", "memory", "host")  # the GPU's, the memory's and the low-power core's
MIXTURES = 8
PROGRAMS = 6
SEED = 11
# what a second of full work does of each kind of event
FULL_RATES = {"instruction": 3e10, "cycle": 5e8}
FULL_OTHER = 3e7
FULL_PER_CYCLE = 1.0


@dataclass(frozen=True)
class PrintedCost:
    """A row of Table 4: energy of one transaction, and of a byte as the paper divides it."""

    event: str
    clock_hz: float
    byte: float
    printed_nj: float
    printed_nj_per_byte: float


TABLE_4 = (  # the L2 rows divide by 16 bytes though Table 1 counts 32: half is true
    PrintedCost("device_memory_cycle", TOP_HZ, 8.0, 3.96, 0.49),
    PrintedCost("l2_read_sector", LOW_HZ, 16.0, 6.73, 0.42),
    PrintedCost("l2_read_sector", TOP_HZ, 16.0, 11.89, 0.74),
    PrintedCost("l1_read_word", LOW_HZ, 4.0, 5.55, 1.38),
    PrintedCost("l1_read_word", TOP_HZ, 4.0, 9.81, 2.45),
)


def load_k1() -> HybridRail:
    """Load the published model."""
    model = load_saved_model(Path("tegra-k1")).model
    assert isinstance(model, HybridRail)
    return model


def compute_part_w(
    model: HybridRail,
    events: Mapping[str, float],
    clock_hz: float = TOP_HZ,
) -> dict[str, float]:
    """Return watts by part of one second with these counts."""
    counts = np.array([[events.get(name, 0.0) for name in model.required_events]])
    at = OperatingPoint(clock_hz=clock_hz, memory_clock_hz=MEMORY_HZ)
    activity = Activity(np.ones(1), counts, model.required_events, at, ActivitySource.PROFILED)
    power = model.power(activity)
    return dict(zip(power.parts, power.part_w[0].tolist(), strict=True))


def list_table_4() -> list[tuple[PrintedCost, float]]:
    """Return the rows of Table 4 with the nanojoules that the saved model gives."""
    model = load_k1()
    rows = []
    for cost in TABLE_4:
        watts = compute_part_w(model, {cost.event: 1e9}, cost.clock_hz)  # nJ, of 1e9 a second
        rows.append((cost, watts[cost.event]))
    return rows


def print_published() -> None:
    """Print Table 4 and section 6.3, printed and computed."""
    print("Table 4: energy of a transaction, nJ, and of a byte")
    for cost, nj in list_table_4():
        print(
            f"  {cost.event:22} {cost.clock_hz / 1e6:5.0f} MHz  printed {cost.printed_nj:6.2f}"
            f"  computed {nj:6.2f}   a byte {cost.printed_nj_per_byte:5.2f}  {nj / cost.byte:5.2f}"
        )
    print(
        "  (an L2 sector has 32 bytes by Table 1, so that half of what is printed a byte is true)"
    )
    parts = compute_part_w(load_k1(), {"host_active_cycle": 1092e6})
    print("Section 6.3: watts of clocks")
    for what, printed_w in (
        ("gpu clock", 1.97),
        ("memory clock", 0.43),
        ("host_active_cycle", 0.20),
    ):
        print(f"  {what:22} printed {printed_w:5.2f} W  computed {parts[what]:5.2f} W")
    print_dct()


def compute_dct_w() -> dict[str, dict[str, float]]:
    """Return the watts of the board by part, of each variant of figure 13."""
    model = load_k1()
    return {v.name: compute_part_w(model, read_dct_events(v.name)) for v in VARIANTS}


def print_dct() -> None:
    """Print the savings of figure 13, printed and computed."""
    watts = compute_dct_w()
    first = watts[VARIANTS[0].name]
    print("Figure 13: DCT at five frames a second, counts of our own DCT")
    for variant in VARIANTS:
        total_w = sum(watts[variant.name].values())
        line = f"  {variant.label:22} {total_w:5.2f} W"
        if variant.printed_saving is not None:
            saved = 1.0 - total_w / sum(first.values())
            line += f"  saves: printed {variant.printed_saving:.1%}  computed {saved:.1%}"
        print(line)
    ratio = first["fp64_instruction"] / watts[VARIANTS[1].name]["fp32_instruction"]
    print(f"  64 over 32 bits, arithmetic: printed above 3 times  computed {ratio:.2f} times")


@dataclass(frozen=True)
class BoardRows:
    """Rows of work at pairs of clocks, one second each."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    counts: Array  # (row, event)
    clock_hz: Array
    memory_hz: Array
    power_w: Array


def draw_work(model: HybridRail) -> tuple[list[str], list[str], Array]:
    """Return names, groups and counts at full clocks: idle, each event alone, mixtures, programs.

    Programs have all events at once and no row of theirs is trained on."""
    rng = np.random.default_rng(SEED)
    events = model.required_events
    full = np.array([_full_rate(event) for event in events])
    stress = full * rng.uniform(0.5, 1.0, len(events))
    mixed = stress * rng.uniform(0.0, 1.0, (MIXTURES, len(events)))
    programs = full * rng.uniform(0.1, 0.9, (PROGRAMS, len(events)))
    names = ["idle", *events, *(f"mixture_{i}" for i in range(MIXTURES))]
    groups = ["idle", *["alone"] * len(events), *["mixture"] * MIXTURES]
    names += [f"program_{i}" for i in range(PROGRAMS)]
    groups += ["program"] * PROGRAMS
    work = np.vstack([np.zeros(len(events)), np.diag(stress), mixed, programs])
    return names, groups, work


def _full_rate(event: str) -> float:
    if "per" in event.split("_"):
        return FULL_PER_CYCLE
    return FULL_RATES.get(event.split("_")[-1], FULL_OTHER)


def measure_board(noise: float) -> BoardRows:
    """Return what a meter of ``noise`` (a share of the power) reads of the board at 30 pairs of
    clocks.
    """
    model = load_k1()
    names, groups, work = draw_work(model)
    pairs = [a.ravel() for a in np.meshgrid(CORE_CLOCKS_HZ, MEMORY_CLOCKS_HZ, indexing="ij")]
    clock_hz, memory_hz = (np.tile(a, len(work)) for a in pairs)
    each = pairs[0].size
    on_host = np.array([event in model.rails[2].event_f for event in model.required_events])
    share = np.where(on_host, 1.0, (clock_hz / TOP_HZ)[:, np.newaxis])
    counts = np.repeat(work, each, axis=0) * share
    at = OperatingPoint(clock_hz[:, np.newaxis], memory_clock_hz=memory_hz[:, np.newaxis])
    activity = Activity(
        np.ones((len(counts), 1)),
        counts[:, np.newaxis, :],
        model.required_events,
        at,
        ActivitySource.PROFILED,
    )
    reading = 1.0 + noise * np.random.default_rng(SEED + 1).standard_normal(len(counts))
    return BoardRows(
        tuple(np.repeat(names, each)),
        tuple(np.repeat(groups, each)),
        counts,
        clock_hz,
        memory_hz,
        model.power(activity).total_w[:, 0] * reading,
    )


def write_board(folder: Path, noise: float) -> None:
    """Write the table of the board, that of its programs, and the map of their columns."""
    model = load_k1()
    rows = measure_board(noise)
    folder.mkdir(parents=True, exist_ok=True)
    volts = model.rails[0].voltage.level_at(rows.clock_hz)
    header = ["benchmark", "group", "watts", "seconds", "clock_mhz", "memory_mhz"]
    header += ["core_volts", "memory_volts", "host_volts", *model.required_events]
    tables: dict[str, list[list[Any]]] = {"k1.csv": [header], "programs.csv": [header]}
    for place, name in enumerate(rows.names):
        clocks = [rows.clock_hz[place] / 1e6, rows.memory_hz[place] / 1e6]
        line = [name, rows.groups[place], f"{rows.power_w[place]:.5f}", 1, *clocks]
        line += [volts[place], 1.35, 1.05, *rows.counts[place].tolist()]
        tables["programs.csv" if rows.groups[place] == "program" else "k1.csv"].append(line)
    for name, table in tables.items():
        write_whole(folder / name, encode_csv(table))
    write_whole(folder / "k1.yaml", make_column_map(model).encode())
    print(f"{len(tables['k1.csv']) - 1} rows and {len(tables['programs.csv']) - 1} of programs")


def make_column_map(model: HybridRail) -> str:
    """Return the map of columns of the board's tables."""
    lines = [
        "benchmark: benchmark",
        "group: {column: group}",
        "power: {column: watts, unit: W}",
        "duration: {column: seconds, unit: s}",
        "clock: {column: clock_mhz, unit: MHz}",
        "memory_clock: {column: memory_mhz, unit: MHz}",
        f"default: {{clock: {TOP_HZ / 1e6:.0f} MHz, memory_clock: {MEMORY_HZ / 1e6:.0f} MHz}}",
        "voltage:",
    ]
    lines += [f"  {rail}: {{column: {rail}_volts, unit: V}}" for rail in RAILS]
    lines.append("events:")
    for rail, name in zip(model.rails, RAILS, strict=True):
        lines += [f"  {event}: {{column: {event}, rail: {name}}}" for event in rail.event_f]
    return "\n".join(lines) + "\n"


def compare_costs(model_file: Path) -> list[tuple[str, float, float]]:
    """Return each cost of the truth, and what a model found of it."""
    found = load_saved_model(model_file).model
    if not isinstance(found, HybridRail):
        raise bad_value(str(model_file), "a model of rails with voltages", type(found).__name__)
    costs = {event: cost for rail in found.rails for event, cost in rail.event_f.items()}
    truth = {event: cost for rail in load_k1().rails for event, cost in rail.event_f.items()}
    return [(event, cost, costs.get(event, 0.0)) for event, cost in truth.items()]


def print_truth(model_file: Path) -> None:
    """Print how far each cost that a model found is from the truth."""
    for event, truth, found in compare_costs(model_file):
        print(f"{event:28} truth {truth:.4g} F  found {found:.4g} F  {found / truth - 1.0:+.1%}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--figure-13", type=Path, metavar="FILE", dest="figure_13")
    parser.add_argument("--measure", type=Path, metavar="FOLDER")
    parser.add_argument("--noise", type=float, default=0.01, help="of the meter, a share")
    parser.add_argument("--truth", type=Path, metavar="MODEL")
    options = parser.parse_args()
    if options.measure is not None:
        write_board(options.measure, options.noise)
    if options.truth is not None:
        print_truth(options.truth)
    if options.figure_13 is not None:
        save_figure(draw_figure_13(compute_dct_w()), options.figure_13)
    if options.measure is None and options.truth is None:
        print_published()


if __name__ == "__main__":
    run_module(main)
