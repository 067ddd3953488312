"""Figures of run-time management, like figures 3 to 18 of paper 004. One function, one figure; none saves or shows.

Every caption says what the plant is: simulated, predicted, or replayed from which file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.fit.sensitivity import SensitivityModel, predict_all
from wattcast.manage import sensitivity
from wattcast.manage.hd7970 import STRESS
from wattcast.manage.knobs import Role
from wattcast.manage.objective import Goal, Objective
from wattcast.manage.outcome import Comparison, Outcome
from wattcast.manage.plant import Tables
from wattcast.manage.policies import Name, Run, Setup, scores
from wattcast.manage.simulate import Played, residency
from wattcast.report.figure import COLOUR as MODULE
from wattcast.report.figure import Maker, caption, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR = {  # of Okabe and Ito (2008), one per policy everywhere
    Name.DEFAULT: "#999999",
    Name.RACE_TO_IDLE: "#F0E442",
    Name.CORE_CLOCK: "#56B4E9",
    Name.COARSE: "#E69F00",
    Name.STATIC: "#CC79A7",
    Name.PREDICTIVE: "#D55E00",
    Name.GUIDED: "#8B4513",
    Name.HARMONIA: "#009E73",
    Name.ORACLE: "#000000",
}
_GOALS = {Goal.ED2: "ED²", Goal.ED: "ED", Goal.ENERGY: "Energy"}
BESIDE: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.0),
    "frameon": False,
}  # of the axes: bars fill them
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"


def balance_curves(tables: Tables, kernels: Sequence[str]) -> Figure:
    """Figure 3: performance over the card's ops per byte, one curve per memory clock; both relative to the lowest."""
    figure = new_figure(4.2 * len(kernels), 3.8)
    compute = tables.lattice.table(Role.COMPUTE_UNITS) * tables.lattice.table(Role.CORE_CLOCK)
    memory = tables.lattice.table(Role.MEMORY_CLOCK)
    ratio = (compute / compute.min()) / (memory / memory.min())
    for axes, kernel in zip(np.atleast_1d(figure.subplots(1, len(kernels))), kernels, strict=True):
        time_s = tables.time_s[tables.kernels.index(kernel)]
        speed = time_s[tables.lattice.flat(tables.lattice.bottom)] / time_s
        for i, hz in enumerate(np.unique(memory)):
            here = memory == hz
            order = np.argsort(ratio[here], kind="stable")
            x, y = ratio[here][order], speed[here][order]
            axes.plot(x, y, marker=".", markersize=3, lw=0.8, color=_shade(i, 7), label=f"{hz / 1e6:.0f}")
        axes.set(title=kernel, xlabel="Ops per byte of the card (lowest = 1)", ylabel="Performance (lowest = 1)")
    axes.legend(title="memory MHz", fontsize=6, **BESIDE)
    return caption(figure, tables.source)


def power_over_compute(tables: Tables, kernel: str) -> Figure:
    """Figure 4: board power over compute settings at the highest memory clock, relative to the lowest settings."""
    figure = new_figure(6.0, 4.0)
    axes = figure.subplots()
    row = tables.power_w[tables.kernels.index(kernel)] / tables.power_w[tables.kernels.index(kernel), 0]
    units, core = tables.lattice.table(Role.COMPUTE_UNITS), tables.lattice.table(Role.CORE_CLOCK)
    full = tables.lattice.table(Role.MEMORY_CLOCK) == tables.lattice.table(Role.MEMORY_CLOCK).max()
    for i, count in enumerate(np.unique(units)):
        here = full & (units == count)
        x = units[here] * core[here] / 1e9
        axes.plot(x, row[here], marker=".", color=_shade(i, 8), label=f"{count:.0f} units")
    axes.set(title=kernel, xlabel="Compute units × core clock (GHz)", ylabel="Board power (lowest settings = 1)")
    axes.legend(fontsize=6, **BESIDE)
    return caption(figure, tables.source)


def power_over_memory(tables: Tables, kernel: str) -> Figure:
    """Figure 5: board power over the memory clock at the highest compute settings."""
    figure = new_figure(5.0, 3.6)
    axes = figure.subplots()
    which = tables.lattice.index(Role.MEMORY_CLOCK)
    assert which is not None, "the plant has no memory clock to turn"
    top = tables.lattice.top
    levels = tables.lattice.knobs[which].levels
    flat = [tables.lattice.flat((*top[:which], i, *top[which + 1 :])) for i in range(len(levels))]
    axes.plot(np.asarray(levels) / 1e6, tables.power_w[tables.kernels.index(kernel), flat], marker="o", color=BLUE)
    axes.set(title=kernel, xlabel="Memory clock (MHz)", ylabel="Board power (W)")
    axes.set_ylim(0, 1.1 * float(tables.power_w[tables.kernels.index(kernel), flat].max()))
    return caption(figure, tables.source)


def metric_comparison(tables: Tables, kernels: Sequence[str]) -> Figure:
    """Figure 6: what the settings best for energy, ED² and performance give, relative to the fastest."""
    figure = new_figure(4.5 * len(kernels), 3.6)
    for axes, kernel in zip(np.atleast_1d(figure.subplots(1, len(kernels))), kernels, strict=True):
        k = tables.kernels.index(kernel)
        time_s, energy = tables.time_s[k], tables.energy_j[k]
        fastest = int(time_s.argmin())
        best = {"energy": int(energy.argmin()), "ED²": int((energy * time_s**2).argmin()), "performance": fastest}
        quantities = {"performance": 1 / time_s, "energy": energy, "ED²": energy * time_s**2, "ED": energy * time_s}
        for i, (name, at) in enumerate(best.items()):
            values = [float(q[at] / q[fastest]) for q in quantities.values()]
            axes.bar(np.arange(4) + 0.27 * (i - 1), values, 0.27, label=f"best {name}", color=(BLUE, GREEN, GREY)[i])
        axes.set_xticks(range(4), list(quantities))
        axes.set(title=kernel, ylabel="Relative to the fastest settings")
        axes.axhline(1.0, color="black", lw=0.5)
        axes.set_ylim(0, 1.35)
    axes.legend(fontsize=7, ncols=3, loc="upper center", frameon=False)
    return caption(figure, tables.source)


def sensitivity_cases(tables: Tables, kernels: Sequence[str]) -> Figure:
    """Figures 7 to 9: measured sensitivities of kernels beside the counters that explain them."""
    figure = new_figure(8.0, 4.0)
    left, right = figure.subplots(1, 2)
    found = sensitivity.of_tables(tables)
    rows = [tables.kernels.index(k) for k in kernels]
    for i, knob in enumerate(tables.lattice.knobs):
        left.bar(np.arange(len(rows)) + 0.25 * (i - 1), found[knob.role][rows], 0.25, label=str(knob.role),
                 color=(BLUE, ORANGE, GREEN)[i])  # fmt: skip
    shown = {"NormVGPR": 1.0, "VALUUtilization": 0.01, "icActivity": 1.0}
    top = tables.lattice.flat(tables.lattice.top)
    for i, (name, scale) in enumerate(shown.items()):
        right.bar(np.arange(len(rows)) + 0.25 * (i - 1), scale * tables.counters[name][rows, top], 0.25, label=name,
                  color=("#56B4E9", "#CC79A7", GREY)[i])  # fmt: skip
    for axes, label in ((left, "Sensitivity"), (right, "Counter (of 1)")):
        axes.set_xticks(range(len(rows)), [k.split(".")[-1] for k in kernels], rotation=30, ha="right", fontsize=7)
        axes.set(ylabel=label, ylim=(0, 1.25))
        axes.legend(fontsize=7, ncols=3, loc="upper center", frameon=False)
    return caption(figure, tables.source)


def gains(comparison: Comparison, field: str, label: str, source: str, without: Sequence[str] = STRESS) -> Figure:
    """Figures 10 to 13: one quantity per application and policy, with both geometric means at the end."""
    shown = [p for p in (Name.COARSE, Name.PREDICTIVE, Name.HARMONIA, Name.ORACLE) if comparison.of(p)]
    applications = [o.application for o in comparison.of(shown[0])]
    both: list[tuple[str, tuple[str, ...]]] = [("geo. mean", ())]
    if set(without) & set(applications):
        both.append(("geo. mean 2", tuple(without)))
    names = [*applications, *(name for name, _ in both)]
    figure = new_figure(max(7.0, 0.6 * len(names)), 4.2)
    axes = figure.subplots()
    width = 0.8 / len(shown)
    for i, policy in enumerate(shown):
        rows = comparison.of(policy)
        values = [getattr(o, field) for o in rows] + [_geometric(rows, field, left_out) for _, left_out in both]
        axes.bar(np.arange(len(names)) + width * (i - 0.5 * (len(shown) - 1)), np.multiply(100, values), width,
                 label=str(policy), color=COLOUR[policy])  # fmt: skip
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
    axes.axhline(0.0, color="black", lw=0.5)
    axes.set_ylabel(label)
    axes.legend(fontsize=7, frameon=False)
    return caption(
        figure, f"{source}; mean 2, as in the paper, leaves out {', '.join(without)}" if len(both) > 1 else source
    )


def phases(tables: Tables, kernel: str) -> Figure:
    """Figure 14: work and memory share of a kernel's successive iterations."""
    rows = [i for i, name in enumerate(tables.kernels) if name == kernel]
    figure = new_figure(6.0, 3.6)
    axes = figure.subplots()
    work = tables.work[rows] if tables.work is not None else np.ones(len(rows))
    axes.bar(range(1, len(rows) + 1), work, color=BLUE)
    axes.set(title=kernel, xlabel="Iteration", ylabel="Instructions (mean = 1)")
    busy = axes.twinx()
    top = tables.lattice.flat(tables.lattice.top)
    busy.plot(range(1, len(rows) + 1), tables.counters["MemUnitBusy"][rows, top], "o-", color=ORANGE)
    busy.set(ylabel="Memory unit busy (%)", ylim=(0, 100))
    return caption(figure, tables.source)


def residency_of(tables: Tables, played: Played, kernel: str | None = None) -> Figure:
    """Figures 15 and 16: share of time at each level of each knob; of one kernel, or of the application."""
    figure = new_figure(6.0, 4.0)
    axes = figure.subplots()
    kept = played if kernel is None else _only(tables, played, kernel)
    shares = residency(tables, kept)
    for i, (role, levels) in enumerate(shares.items()):
        bottom = 0.0
        for j, (level, share) in enumerate(levels.items()):
            if share > 0:
                axes.bar(i, 100 * share, bottom=100 * bottom, color=str(0.95 - 0.8 * j / max(len(levels) - 1, 1)))
                text = f"{level:.0f}" if role == Role.COMPUTE_UNITS else f"{level / 1e6:.0f} MHz"
                if share > 0.04:
                    axes.text(i, 100 * (bottom + share / 2), text, ha="center", va="center", fontsize=7, color=ORANGE)
                bottom += share
    axes.set_xticks(range(len(shares)), list(shares))
    axes.set(title=kernel or played.application, ylabel="Share of time (%)")
    return caption(figure, tables.source)


def power_shared(tables: Tables, comparison: Comparison, applications: Sequence[str]) -> Figure:
    """Figure 17: power of chip and memory under default and controller, relative to the default's sum."""
    figure = new_figure(max(6.0, 0.8 * len(applications)), 4.0)
    axes = figure.subplots()
    for i, application in enumerate(applications):
        base = shared_w(tables, comparison.runs[Name.DEFAULT, application])
        for j, policy in enumerate((Name.DEFAULT, Name.HARMONIA)):
            gpu, memory = (100 * w / sum(base) for w in shared_w(tables, comparison.runs[policy, application]))
            x = i + 0.38 * (j - 0.5)
            axes.bar(x, gpu, 0.36, color=MODULE["sm"], label="chip" if i == j == 0 else None)
            axes.bar(x, memory, 0.36, bottom=gpu, color=MODULE["dram"], label="memory" if i == j == 0 else None)
    axes.set_xticks(range(len(applications)), applications, rotation=45, ha="right", fontsize=7)
    axes.set_ylabel("Power of chip and memory (default = 100)")
    axes.legend(fontsize=7, **BESIDE)
    return caption(figure, f"{tables.source}; left bar default, right bar controller; rest of the board not shown")


def shared_w(tables: Tables, run: Run) -> tuple[float, float]:
    """Mean power of chip and of memory in a run; needs a plant that tells them apart."""
    assert tables.memory_w is not None, "the plant does not tell memory power apart"
    played = run.played
    memory_j = float((tables.memory_w[played.phase, played.chosen] * played.time_s).sum())
    board_j = (tables.board_w or 0.0) * played.total_s
    return (played.total_j - memory_j - board_j) / played.total_s, memory_j / played.total_s


def contributions(comparison: Comparison, source: str) -> Figure:
    """Figure 18: what the coarse step brings alone, and what the fine steps add."""
    coarse, full = comparison.of(Name.COARSE), comparison.of(Name.HARMONIA)
    figure = new_figure(max(6.0, 0.6 * len(full)), 4.0)
    axes = figure.subplots()
    first = np.array([100 * o.ed2_gain_over_default_with_probing for o in coarse])
    both = np.array([100 * o.ed2_gain_over_default_with_probing for o in full])
    axes.bar(np.arange(len(full)) - 0.2, first, 0.4, label="coarse alone", color=COLOUR[Name.COARSE])
    axes.bar(np.arange(len(full)) + 0.2, both, 0.4, label="coarse and fine", color=COLOUR[Name.HARMONIA])
    axes.set_xticks(range(len(full)), [o.application for o in full], rotation=45, ha="right", fontsize=7)
    axes.axhline(0.0, color="black", lw=0.5)
    axes.set_ylabel("ED² gain over default (%)")
    axes.legend(fontsize=7, **BESIDE)
    return caption(figure, source)


def convergence(tables: Tables, run: Run, objective: Objective) -> Figure:
    """How far each run of an application is from its oracle, over time."""
    figure = new_figure(6.5, 3.6)
    axes = figure.subplots()
    table = scores(tables, objective)
    played = run.played
    gap = 100 * np.expm1(table[played.phase, played.chosen] - table.min(axis=-1)[played.phase])
    names = np.array(tables.kernels)[played.phase]
    for kernel in dict.fromkeys(names.tolist()):
        axes.plot(np.arange(int((names == kernel).sum())), gap[names == kernel], marker=".", lw=0.8, label=kernel)
    axes.set(title=played.application, xlabel="Iteration", ylabel=f"{_GOALS[objective.goal]} over oracle (%)")
    axes.legend(fontsize=7, frameon=False)
    return caption(figure, tables.source)


def picks(tables: Tables, comparison: Comparison, objective: Objective) -> Figure:
    """What every core clock of a replayed card gives, and which one was picked before anything ran."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    clock_mhz = tables.lattice.table(Role.CORE_CLOCK) / 1e6
    table = scores(tables, Objective(objective.goal))
    for i, (application, order) in enumerate(tables.applications.items()):
        row = table[order[0]]
        over = 100 * np.expm1(row - row.min())
        measured = "measured, by workload" if i == 0 else None
        axes.plot(clock_mhz, over, "o-", color=GREY, markersize=3, lw=0.6, label=measured)
        at = int(comparison.runs[Name.PREDICTIVE, application].converged[order[0]])
        picked = "picked by the predictor" if i == 0 else None
        axes.plot(clock_mhz[at], over[at], "D", color=COLOUR[Name.PREDICTIVE], markersize=5, label=picked)
    shown = clock_mhz > 0.65 * clock_mhz.max()
    axes.set(xlabel="Core clock set (MHz)", ylabel=f"{_GOALS[objective.goal]} over the best clock's (%)")
    axes.set(xlim=(clock_mhz[shown].min() - 10, clock_mhz.max() + 20), ylim=(-0.5, 16))
    axes.legend(fontsize=7, frameon=False)
    return caption(figure, tables.source)


def predictor_accuracy(tables: Tables, models: Mapping[str, SensitivityModel]) -> Figure:
    """Section 7.2: predicted against measured sensitivities of all kernels, compute and bandwidth."""
    figure = new_figure(8.0, 4.0)
    truth, columns = sensitivity.of_tables(tables), sensitivity.mean_counters(tables)
    for axes, which in zip(figure.subplots(1, 2), ("compute", "bandwidth"), strict=True):
        for (name, model), colour in zip(models.items(), (BLUE, ORANGE, GREEN), strict=False):
            guess = predict_all(getattr(model, which), columns)
            error = float(np.mean(np.abs(guess - truth[which])))
            axes.plot(truth[which], guess, "o", markersize=4, color=colour, label=f"{name}: mean error {error:.1%}")
        axes.plot([0, 1], [0, 1], color="black", lw=0.5)
        axes.set(title=f"{which} sensitivity", xlabel="Measured", ylabel="Predicted")
        axes.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
        axes.legend(fontsize=7, frameon=False)
    return caption(figure, f"{tables.source}; the paper states 5.71 % and 3.03 % on the real card")


def all_figures(plants: Sequence[Tables], comparison: Comparison, setup: Setup) -> dict[str, Maker]:
    """All figures that the plants allow, by name."""
    source = "; ".join(tables.source for tables in plants)
    made: dict[str, Maker] = {
        f"figure_{number}_{field}": _gains(comparison, field, label, source)
        for number, (field, label) in enumerate(GAINS.items(), start=10)
    }
    if comparison.of(Name.COARSE):
        made["figure_18_contributions"] = lambda: contributions(comparison, source)
    for tables in plants:
        made |= _of_plant(tables, comparison, setup)
    return made


GAINS = {
    "ed2_gain_over_default_with_probing": "ED² gain over default (%)",
    "energy_saving_with_probing": "Energy saved (%)",
    "power_saving_with_probing": "Power saved (%)",
    "slowdown_with_probing": "Slowdown (%)",
}


def _gains(comparison: Comparison, field: str, label: str, source: str) -> Maker:
    return lambda: gains(comparison, field, label, source)


def _of_plant(tables: Tables, comparison: Comparison, setup: Setup) -> dict[str, Maker]:
    first = next(iter(tables.applications))
    made: dict[str, Maker] = {
        f"convergence_{first}": lambda: convergence(tables, comparison.runs[Name.HARMONIA, first], setup.objective)
    }
    if len(tables.lattice.knobs) == 1 and all(
        (Name.PREDICTIVE, app) in comparison.runs for app in tables.applications
    ):
        made[f"picks_{first}"] = lambda: picks(tables, comparison, setup.objective)
    if "Graph500" not in tables.applications:
        return made
    graph = comparison.runs[Name.HARMONIA, "Graph500"].played
    kernel, stress = "Graph500.BottomStepUp", ("MaxFlops.MulMAdd", "DeviceMemory.ReadGlobal", "LUD.Internal")
    cases = ("Sort.BottomScan", "CoMD.AdvanceVelocity", "SRAD.Prepare", "DeviceMemory.ReadGlobal")
    models = {m.name: m for m in (setup.model, sensitivity.preset()) if m is not None}
    return made | {
        "figure_03_balance": lambda: balance_curves(tables, stress),
        "figure_04_power_compute": lambda: power_over_compute(tables, stress[1]),
        "figure_05_power_memory": lambda: power_over_memory(tables, stress[0]),
        "figure_06_metrics": lambda: metric_comparison(tables, stress[1:]),
        "figure_07_09_sensitivity": lambda: sensitivity_cases(tables, cases),
        "figure_14_phases": lambda: phases(tables, kernel),
        "figure_15_residency_kernel": lambda: residency_of(tables, graph, kernel),
        "figure_16_residency": lambda: residency_of(tables, graph),
        "figure_17_power_shared": lambda: power_shared(tables, comparison, list(tables.applications)),
        "predictor_accuracy": lambda: predictor_accuracy(tables, models),
    }


def _shade(i: int, count: int) -> tuple[float, float, float]:
    """Of an ordered series: dark blue to light orange, told apart in grey as well."""
    low, high = np.array([0.0, 0.2, 0.4]), np.array([0.95, 0.75, 0.3])
    r, g, b = low + (high - low) * i / max(count - 1, 1)
    return float(r), float(g), float(b)


def _geometric(rows: Sequence[Outcome], field: str, without: Sequence[str]) -> float:
    """Geometric mean of the ratio behind a gain, a saving or a slowdown."""
    sign = 1.0 if "slowdown" in field or "over_oracle" in field else -1.0
    ratios = [1.0 + sign * getattr(o, field) for o in rows if o.application not in without]
    return sign * (float(np.exp(np.mean(np.log(ratios)))) - 1.0)


def _only(tables: Tables, played: Played, kernel: str) -> Played:
    here = np.array([tables.kernels[p] == kernel for p in played.phase])
    columns = (played.chosen[here], played.phase[here], played.time_s[here], played.energy_j[here])
    return Played(played.application, *columns)
