"""Draw the simulated HD 7970 like figures 1, 3 to 9, 14 to 17 of paper 004, and how its
sensitivities are predicted.

Run: ``python -m wattcast.lab.paper_figures.hd7970_figures FOLDER`` (draws eleven figures as PNG).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.control import hd7970
from wattcast.control.plants import (
    KnobRole,
    PlantTables,
    PlayedRun,
    move_knob,
)
from wattcast.control.policies import (
    PolicyName,
    PolicyRun,
    PolicySetup,
)
from wattcast.control.policy_comparison import PolicyComparison, compare_policies
from wattcast.control.sensitivity_model import (
    SensitivityModel,
    combine_knobs,
    load_shipped_model,
    measure_sensitivity,
    with_intensity,
)
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.strict_files import decode_yaml
from wattcast.report.figure_style import MODULE_COLOURS as MODULE
from wattcast.report.figure_style import (
    FigureMaker,
    add_caption,
    new_axes,
    new_figure,
    save_figures,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_RIGHT: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.0),
    "frameon": False,
}
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
GREY = "#999999"
LEAST_LABELLED_SHARE = 0.04  # of the time; smaller bars have no room for words


def measure_table_sensitivities(tables: PlantTables) -> dict[str, Array]:
    """Measure the sensitivities of every phase, ``(phase,)``: by knob, and combined as compute and
    bandwidth.

    Each is the mean of finite differences over the whole range of a knob, with the other knobs at
    their highest (section 4.1: "CU frequency and memory bandwidth are set to their maximum possible
    values")."""
    lattice = tables.lattice
    top = lattice.flat_index(lattice.top)
    sensitivities: dict[str, Array] = {}
    for place, knob in enumerate(lattice.knobs):
        lower_levels = range(len(knob.levels) - 1)
        lower = [lattice.flat_index(move_knob(lattice.top, place, level)) for level in lower_levels]
        values = np.asarray(knob.levels)
        by_level = measure_sensitivity(
            tables.time_s[:, lower],
            tables.time_s[:, [top]],
            values[:-1],
            values[-1:],
        )
        sensitivities[knob.role] = by_level.mean(axis=-1)
    return sensitivities | combine_knobs(sensitivities)


def average_counters(tables: PlantTables) -> dict[str, Array]:
    """Average the counters of each phase over all settings (section 4.2), compute-to-memory
    intensity included.
    """
    return {name: table.mean(axis=-1) for name, table in with_intensity(tables.counters).items()}


def draw_power_breakdown(tables: PlantTables, application: str) -> Figure:
    """Draw the shares of chip, memory and the rest of the card in board power at the default
    settings (figure 1).
    """
    assert tables.memory_w is not None
    assert tables.board_w is not None
    figure, axes = new_axes(5.0, 3.6)
    order = tables.order(application)
    at = tables.lattice.flat_index(tables.default)
    whole, memory = (
        np.average(table[order, at], weights=tables.time_s[order, at])
        for table in (tables.power_w, tables.memory_w)
    )
    watts = [whole - memory - tables.board_w, memory, tables.board_w]
    names = ("GPU chip", "memory and its PHYs", "rest of the card")
    labels = [f"{name}\n{w:.0f} W" for name, w in zip(names, watts, strict=True)]
    axes.pie(
        watts,
        labels=labels,
        autopct="%.0f %%",
        colors=[BLUE, ORANGE, GREY],
    )
    axes.set_title(f"{application}, default settings")
    return add_caption(figure, f"{tables.source}; the paper's is measured")


def draw_balance_curves(tables: PlantTables, kernels: Sequence[str]) -> Figure:
    """Draw performance over the card's ops per byte, a curve per memory clock, relative to the
    lowest (figure 3).
    """
    lattice = tables.lattice
    units = lattice.knob_values(KnobRole.COMPUTE_UNITS)
    compute_hz = units * lattice.knob_values(KnobRole.CORE_CLOCK)
    memory_hz = lattice.knob_values(KnobRole.MEMORY_CLOCK)
    balance = (compute_hz / compute_hz.min()) / (memory_hz / memory_hz.min())
    bottom = lattice.flat_index(lattice.bottom)
    figure = new_figure(4.2 * len(kernels), 3.8)
    panels = np.atleast_1d(figure.subplots(1, len(kernels)))
    for axes, kernel in zip(panels, kernels, strict=True):
        time_s = tables.time_s[tables.kernels.index(kernel)]
        speed = time_s[bottom] / time_s
        for number, clock_hz in enumerate(np.unique(memory_hz)):
            here = memory_hz == clock_hz
            order = np.argsort(balance[here], kind="stable")
            axes.plot(
                balance[here][order],
                speed[here][order],
                marker=".",
                markersize=3,
                lw=0.8,
                color=_shade(number, 7),
                label=f"{clock_hz / 1e6:.0f}",
            )
        axes.set(
            title=kernel,
            xlabel="Ops per byte of the card (lowest = 1)",
            ylabel="Performance (lowest = 1)",
        )
    axes.legend(title="memory MHz", **LEGEND_RIGHT)
    return add_caption(figure, tables.source)


def draw_power_over_compute(tables: PlantTables, kernel: str) -> Figure:
    """Draw board power over compute settings at the top memory clock, relative to the lowest
    settings (figure 4).
    """
    figure, axes = new_axes(6.0, 4.0)
    kernel_w = tables.power_w[tables.kernels.index(kernel)]
    units = tables.lattice.knob_values(KnobRole.COMPUTE_UNITS)
    core_hz = tables.lattice.knob_values(KnobRole.CORE_CLOCK)
    memory_hz = tables.lattice.knob_values(KnobRole.MEMORY_CLOCK)
    at_top_memory = memory_hz == memory_hz.max()
    for number, count in enumerate(np.unique(units)):
        here = at_top_memory & (units == count)
        axes.plot(
            units[here] * core_hz[here] / 1e9,
            (kernel_w / kernel_w[0])[here],
            marker=".",
            color=_shade(number, 8),
            label=f"{count:.0f} units",
        )
    axes.set(
        title=kernel,
        xlabel="Compute units × core clock (GHz)",
        ylabel="Board power (lowest settings = 1)",
    )
    axes.legend(**LEGEND_RIGHT)
    return add_caption(figure, tables.source)


def draw_power_over_memory(tables: PlantTables, kernel: str) -> Figure:
    """Draw board power over the memory clock at the highest compute settings (figure 5)."""
    figure, axes = new_axes(5.0, 3.6)
    which = tables.lattice.find_knob(KnobRole.MEMORY_CLOCK)
    assert which is not None, "the plant has no memory clock to turn"
    lattice = tables.lattice
    levels_hz = lattice.knobs[which].levels
    settings = [
        lattice.flat_index(move_knob(lattice.top, which, level)) for level in range(len(levels_hz))
    ]
    power_w = tables.power_w[tables.kernels.index(kernel), settings]
    axes.plot(
        np.asarray(levels_hz) / 1e6,
        power_w,
        marker="o",
        color=BLUE,
    )
    axes.set(
        title=kernel,
        xlabel="Memory clock (MHz)",
        ylabel="Board power (W)",
    )
    axes.set_ylim(0, 1.1 * float(power_w.max()))
    return add_caption(figure, tables.source)


def draw_metric_comparison(tables: PlantTables, kernels: Sequence[str]) -> Figure:
    """Draw what the settings best for energy, ED² and performance give, relative to the fastest
    (figure 6).
    """
    figure = new_figure(4.5 * len(kernels), 3.6)
    panels = np.atleast_1d(figure.subplots(1, len(kernels)))
    for axes, kernel in zip(panels, kernels, strict=True):
        place = tables.kernels.index(kernel)
        time_s = tables.time_s[place]
        energy_j = tables.energy_j[place]
        quantities = {
            "performance": 1 / time_s,
            "energy": energy_j,
            "ED²": energy_j * time_s**2,
            "ED": energy_j * time_s,
        }
        fastest = int(time_s.argmin())
        settings = {
            "energy": (int(energy_j.argmin()), BLUE),
            "ED²": (int(quantities["ED²"].argmin()), GREEN),
            "performance": (fastest, GREY),
        }
        for number, (name, (setting, colour)) in enumerate(settings.items()):
            relative = [float(q[setting] / q[fastest]) for q in quantities.values()]
            axes.bar(
                np.arange(len(relative)) + 0.27 * (number - 1),
                relative,
                0.27,
                label=f"best {name}",
                color=colour,
            )
        axes.set_xticks(range(len(quantities)), list(quantities))
        axes.set(title=kernel, ylabel="Relative to the fastest settings")
        axes.axhline(1.0, color="black", lw=0.5)
        axes.set_ylim(0, 1.15)
    figure.legend(
        *axes.get_legend_handles_labels(),
        ncols=3,
        loc="outside upper center",
        frameon=False,
    )
    return add_caption(figure, tables.source)


def draw_sensitivity_cases(tables: PlantTables, kernels: Sequence[str]) -> Figure:
    """Draw measured sensitivities of kernels and the counters that explain them (figures 7 to
    9).
    """
    figure = new_figure(10.5, 4.4)
    sensitivity_axes, counter_axes = figure.subplots(1, 2)
    rows = [tables.kernels.index(kernel) for kernel in kernels]
    sensitivities = measure_table_sensitivities(tables)
    roles = [knob.role for knob in tables.lattice.knobs]
    by_role = {str(role): sensitivities[role][rows] for role in roles}
    _draw_groups(sensitivity_axes, by_role, (BLUE, ORANGE, GREEN))
    top = tables.lattice.flat_index(tables.lattice.top)
    shares = {
        "NormVGPR": tables.counters["NormVGPR"][rows, top],
        "VALUUtilization": 0.01 * tables.counters["VALUUtilization"][rows, top],
        "icActivity": tables.counters["icActivity"][rows, top],
    }
    _draw_groups(counter_axes, shares, ("#56B4E9", "#CC79A7", GREY))
    for axes, label in ((sensitivity_axes, "Sensitivity"), (counter_axes, "Counter (of 1)")):
        axes.set_xticks(
            range(len(rows)), [k.split(".")[-1] for k in kernels], rotation=30, ha="right"
        )
        axes.set(ylabel=label, ylim=(0, 1.05))
        axes.legend(
            ncols=3,
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            frameon=False,
        )
    return add_caption(figure, tables.source)


def _draw_groups(
    axes: Axes,
    values_of_name: Mapping[str, Array],
    colours: Sequence[str],
) -> None:
    """Draw bars of three series side by side, a group for each kernel."""
    series = zip(values_of_name.items(), colours, strict=True)
    for number, ((name, values), colour) in enumerate(series):
        axes.bar(
            np.arange(len(values)) + 0.25 * (number - 1),
            values,
            0.25,
            label=name,
            color=colour,
        )


def draw_phases(tables: PlantTables, kernel: str) -> Figure:
    """Draw work and memory share of a kernel's successive iterations (figure 14)."""
    rows = [i for i, name in enumerate(tables.kernels) if name == kernel]
    figure, axes = new_axes(6.0, 3.6)
    work = tables.work[rows] if tables.work is not None else np.ones(len(rows))
    axes.bar(range(1, len(rows) + 1), work, color=BLUE)
    axes.set(
        title=kernel,
        xlabel="Iteration",
        ylabel="Instructions (mean = 1)",
    )
    busy = axes.twinx()
    top = tables.lattice.flat_index(tables.lattice.top)
    busy.plot(
        range(1, len(rows) + 1), tables.counters["MemUnitBusy"][rows, top], "o-", color=ORANGE
    )
    busy.set(ylabel="Memory unit busy (%)", ylim=(0, 100))
    return add_caption(figure, tables.source)


def _shade(i: int, count: int) -> tuple[float, float, float]:
    """Return a colour of an ordered series from dark blue to light orange, which differ in grey as
    well.
    """
    low = np.array([0.0, 0.2, 0.4])
    high = np.array([0.95, 0.75, 0.3])
    r, g, b = low + (high - low) * i / max(count - 1, 1)
    return float(r), float(g), float(b)


def draw_power_shares(
    tables: PlantTables,
    comparison: PolicyComparison,
    applications: Sequence[str],
) -> Figure:
    """Draw power of chip and memory under default and controller, relative to the default's sum
    (figure 17).
    """
    figure, axes = new_axes(max(6.0, 0.8 * len(applications)), 4.0)
    for place, application in enumerate(applications):
        default_run = comparison.runs[PolicyName.DEFAULT, application]
        default_w = sum(chip_and_memory_w(tables, default_run))
        for side, policy in enumerate((PolicyName.DEFAULT, PolicyName.HARMONIA)):
            chip_w, memory_w = chip_and_memory_w(tables, comparison.runs[policy, application])
            chip_percent = 100 * chip_w / default_w
            is_first = place == side == 0
            x = place + 0.38 * (side - 0.5)
            axes.bar(
                x,
                chip_percent,
                0.36,
                color=MODULE["sm"],
                label="chip" if is_first else None,
            )
            axes.bar(
                x,
                100 * memory_w / default_w,
                0.36,
                bottom=chip_percent,
                color=MODULE["dram"],
                label="memory" if is_first else None,
            )
    axes.set_xticks(range(len(applications)), applications, rotation=45, ha="right")
    axes.set_ylabel("Power, relative to default (%)")
    axes.legend(**LEGEND_RIGHT)
    return add_caption(
        figure, f"{tables.source}; chip and memory alone, left bar default, right bar controller"
    )


def chip_and_memory_w(tables: PlantTables, run: PolicyRun) -> tuple[float, float]:
    """Return the mean power of chip and of memory in a run; needs a plant that tells them apart."""
    assert tables.memory_w is not None, "the plant does not tell memory power apart"
    played = run.played
    memory_j = float((tables.memory_w[played.phase, played.chosen] * played.time_s).sum())
    board_j = (tables.board_w or 0.0) * played.total_s
    return (played.total_j - memory_j - board_j) / played.total_s, memory_j / played.total_s


def draw_predictor_accuracy(tables: PlantTables, models: Mapping[str, SensitivityModel]) -> Figure:
    """Draw predicted against measured sensitivities of all kernels, compute and bandwidth (section
    7.2).
    """
    figure = new_figure(8.0, 4.0)
    truth = measure_table_sensitivities(tables)
    columns = average_counters(tables)
    for axes, which in zip(figure.subplots(1, 2), ("compute", "bandwidth"), strict=True):
        for (name, model), colour in zip(models.items(), (BLUE, ORANGE, GREEN), strict=False):
            guess = getattr(model, which).predict_columns(columns)
            error = float(np.mean(np.abs(guess - truth[which])))
            axes.plot(
                truth[which],
                guess,
                "o",
                markersize=4,
                color=colour,
                label=f"{name}: mean error {error:.1%}",
            )
        axes.plot([0, 1], [0, 1], color="black", lw=0.5)
        axes.set(
            title=f"{which} sensitivity",
            xlabel="Measured",
            ylabel="Predicted",
        )
        axes.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
        axes.legend(frameon=False)
    return add_caption(
        figure, f"{tables.source}; the paper states 5.71 % and 3.03 % on the real card"
    )


def draw_residency(
    tables: PlantTables,
    played: PlayedRun,
    kernel: str | None = None,
    paper: Mapping[str, Mapping[float, float]] | None = None,
) -> Figure:
    """Draw the share of time at each level of each knob, of a kernel or of the application (figures
    15 and 16).

    The ``paper``'s shares are drawn beside ours; what they leave of the time is blank.
    """
    figure, axes = new_axes(6.0 if paper is None else 9.0, 4.0)
    if kernel is not None:
        played = _select_kernel(tables, played, kernel)
    shares = compute_residency(tables, played)
    drawn: dict[str, Mapping[str, Mapping[float, float]]] = {"ours": shares}
    if paper is not None:
        drawn["the paper's"] = paper
    names: list[str] = []
    for role, own_shares in shares.items():
        levels = list(own_shares)
        unit = 1.0 if role == KnobRole.COMPUTE_UNITS else 1e6
        suffix = "" if role == KnobRole.COMPUTE_UNITS else " MHz"
        for whose, by_role in drawn.items():
            bars = [
                (level, share, f"{level / unit:.0f}{suffix}")
                for level, share in sorted(by_role[role].items())
            ]
            _stack_levels(axes, len(names), levels, bars)
            names.append(f"{role}\n{whose}")
    axes.set_xticks(range(len(names)), names)
    axes.set(title=kernel or played.application, ylabel="Share of time (%)")
    return add_caption(figure, tables.source)


def _select_kernel(
    tables: PlantTables,
    played: PlayedRun,
    kernel: str,
) -> PlayedRun:
    """Return the phases of a run that are of one kernel."""
    here = np.array([tables.kernels[phase] == kernel for phase in played.phase])
    return PlayedRun(
        played.application,
        played.chosen[here],
        played.phase[here],
        played.time_s[here],
        played.energy_j[here],
    )


def _stack_levels(
    axes: Axes,
    place: int,
    levels: Sequence[float],
    bars: Sequence[tuple[float, float, str]],
) -> None:
    """Stack the shares of a knob's levels, higher levels darker; small shares stay unlabelled."""
    bottom = 0.0
    for level, share, text in bars:
        grey = 0.95 - 0.8 * levels.index(level) / max(len(levels) - 1, 1)
        axes.bar(place, 100 * share, bottom=100 * bottom, color=str(grey))
        if share > LEAST_LABELLED_SHARE:
            axes.text(
                place,
                100 * (bottom + share / 2),
                text,
                ha="center",
                va="center",
                color=ORANGE,
            )
        bottom += share


def compute_residency(tables: PlantTables, played: PlayedRun) -> dict[str, dict[float, float]]:
    """Return the share of time spent at each level of each knob."""
    residency: dict[str, dict[float, float]] = {}
    for knob in tables.lattice.knobs:
        values = tables.lattice.knob_values(knob.role)[played.chosen]
        shares = {
            level: float(played.time_s[values == level].sum() / played.total_s)
            for level in knob.levels
        }
        residency[str(knob.role)] = shares
    return residency


def read_paper_residency() -> dict[str, dict[float, float]]:
    """Return the shares of time that figure 16 of the paper gives for levels of each knob
    (Graph500).
    """
    residency = {}
    path = Path(__file__).with_name("hd7970_residency.yaml")
    for role, shares in decode_yaml(path.read_bytes(), dict[str, Any], path.name).items():
        unit = "" if role == KnobRole.COMPUTE_UNITS else "Hz"
        residency[role] = {
            units.parse(level, unit, role): share for level, share in shares["value"].items()
        }
    return residency


def list_figures(
    tables: PlantTables,
    comparison: PolicyComparison,
    models: Mapping[str, SensitivityModel],
) -> dict[str, FigureMaker]:
    """Return all figures of the plant, by name."""
    stress = ("MaxFlops.MulMAdd", "DeviceMemory.ReadGlobal", "LUD.Internal")
    cases = ("Sort.BottomScan", "CoMD.AdvanceVelocity", "SRAD.Prepare", "DeviceMemory.ReadGlobal")
    graph = comparison.runs[PolicyName.HARMONIA, "Graph500"].played
    stepped = "Graph500.BottomStepUp"
    return {
        "figure_01_power_breakdown": partial(draw_power_breakdown, tables, "XSBench"),
        "figure_03_balance": partial(draw_balance_curves, tables, stress),
        "figure_04_power_compute": partial(draw_power_over_compute, tables, stress[1]),
        "figure_05_power_memory": partial(draw_power_over_memory, tables, stress[0]),
        "figure_06_metrics": partial(draw_metric_comparison, tables, stress[1:]),
        "figure_07_09_sensitivity": partial(draw_sensitivity_cases, tables, cases),
        "figure_14_phases": partial(draw_phases, tables, stepped),
        "figure_15_residency_kernel": partial(draw_residency, tables, graph, stepped),
        "figure_16_residency": partial(draw_residency, tables, graph, paper=read_paper_residency()),
        "figure_17_power_shared": partial(
            draw_power_shares, tables, comparison, list(tables.applications)
        ),
        "predictor_accuracy": partial(draw_predictor_accuracy, tables, models),
    }


if __name__ == "__main__":
    plant = hd7970.load_tables()
    shipped = [load_shipped_model(n) for n in ("hd7970_simulated", "hd7970_table3")]
    played = compare_policies(
        [plant], PolicySetup(model=shipped[0]), [PolicyName.DEFAULT, PolicyName.HARMONIA]
    )
    save_figures(
        list_figures(plant, played, {m.name: m for m in shipped}), Path(sys.argv[1]), "png"
    )
