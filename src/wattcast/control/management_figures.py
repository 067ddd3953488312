"""Draw run-time management like figures 10 to 13 and 18 of paper 004. One function draws one
figure.

Every caption says what the plant is: simulated, predicted, or replayed from which file. Figures 1
to 9 and 14 to 17, of the paper's card alone, are drawn by
``wattcast/lab/paper_figures/hd7970_figures.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from wattcast.control.hd7970 import STRESS_APPLICATIONS
from wattcast.control.plants import KnobRole, PlantTables
from wattcast.control.policies import (
    PolicyName,
    PolicyRun,
    PolicySetup,
    score_tables,
)
from wattcast.control.policy_comparison import PolicyComparison, geometric_mean_gain
from wattcast.control.search_problem import Objective
from wattcast.report.figure_style import (
    FigureMaker,
    add_caption,
    new_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR = {  # of Okabe and Ito (2008), one per policy everywhere
    PolicyName.DEFAULT: "#999999",
    PolicyName.RACE_TO_IDLE: "#F0E442",
    PolicyName.CORE_CLOCK: "#56B4E9",
    PolicyName.COARSE: "#E69F00",
    PolicyName.PRINTED: "#0072B2",
    PolicyName.STATIC: "#CC79A7",
    PolicyName.PREDICTIVE: "#D55E00",
    PolicyName.GUIDED: "#8B4513",
    PolicyName.HARMONIA: "#009E73",
    PolicyName.ORACLE: "#000000",
}
COMPARED = (PolicyName.COARSE, PolicyName.PREDICTIVE, PolicyName.HARMONIA, PolicyName.ORACLE)
GREY = "#999999"


def draw_gains(
    comparison: PolicyComparison,
    field: str,
    label: str,
    source: str,
    policies: Sequence[PolicyName] = COMPARED,
) -> Figure:
    """Draw one quantity per application and policy, with both geometric means at the end (figures
    10 to 13).

    With the coarse step and the controller alone it shows what the fine steps add (figure 18).
    """
    outcomes = {}
    for policy in policies:
        rows = comparison.for_policy(policy)
        if rows:
            outcomes[policy] = rows
    applications = [outcome.application for outcome in next(iter(outcomes.values()))]
    without = STRESS_APPLICATIONS
    means: dict[str, tuple[str, ...]] = {"geo. mean": ()}
    caption = source
    if set(without) & set(applications):
        means["geo. mean 2"] = without
        caption = f"{source}; mean 2, as in the paper, leaves out {', '.join(without)}"
    names = [*applications, *means]
    figure, axes = new_axes(max(7.0, 0.6 * len(names)), 4.2)

    # A group of bars for each application and each mean.
    width = 0.8 / len(outcomes)
    for place, (policy, rows) in enumerate(outcomes.items()):
        values = [outcome.shares[field] for outcome in rows]
        values += [geometric_mean_gain(rows, left_out, field) for left_out in means.values()]
        x = np.arange(len(names)) + width * (place - 0.5 * (len(outcomes) - 1))
        axes.bar(
            x,
            np.multiply(100, values),
            width,
            label=str(policy),
            color=COLOUR[policy],
        )
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.axhline(0.0, color="black", lw=0.5)
    axes.legend(frameon=False)
    axes.set_ylabel(label)
    return add_caption(figure, caption)


def draw_convergence(
    tables: PlantTables,
    run: PolicyRun,
    objective: Objective,
) -> Figure:
    """Draw how far each run of an application is from its oracle, over time."""
    figure, axes = new_axes(6.5, 3.6)
    table = score_tables(tables, objective)
    played = run.played
    gap = 100 * np.expm1(table[played.phase, played.chosen] - table.min(axis=-1)[played.phase])
    names = np.array(tables.kernels)[played.phase]
    for kernel in dict.fromkeys(names.tolist()):
        axes.plot(
            np.arange(int((names == kernel).sum())),
            gap[names == kernel],
            marker=".",
            lw=0.8,
            label=kernel,
        )
    axes.set(
        title=played.application,
        xlabel="Iteration",
        ylabel=f"{objective.goal.label} over oracle (%)",
    )
    axes.legend(frameon=False)
    return add_caption(figure, tables.source)


def draw_picked_clocks(
    tables: PlantTables,
    comparison: PolicyComparison,
    objective: Objective,
) -> Figure:
    """Draw what every core clock of a replayed card gives, and which one was picked before anything
    ran.
    """
    figure, axes = new_axes(7.0, 4.2)
    clock_mhz = tables.lattice.knob_values(KnobRole.CORE_CLOCK) / 1e6
    table = score_tables(tables, Objective(objective.goal))
    for i, (application, order) in enumerate(tables.applications.items()):
        row = table[order[0]]
        over = 100 * np.expm1(row - row.min())
        measured = "measured, by workload" if i == 0 else None
        axes.plot(
            clock_mhz,
            over,
            "o-",
            color=GREY,
            markersize=3,
            lw=0.6,
            label=measured,
        )
        at = int(comparison.runs[PolicyName.PREDICTIVE, application].converged[order[0]])
        picked = "picked by the predictor" if i == 0 else None
        axes.plot(
            clock_mhz[at],
            over[at],
            "D",
            color=COLOUR[PolicyName.PREDICTIVE],
            markersize=5,
            label=picked,
        )
    shown = clock_mhz > 0.65 * clock_mhz.max()
    axes.set(
        xlabel="Core clock set (MHz)", ylabel=f"{objective.goal.label} over the best clock's (%)"
    )
    axes.set(xlim=(clock_mhz[shown].min() - 10, clock_mhz.max() + 20), ylim=(-0.5, 16))
    axes.legend(frameon=False)
    return add_caption(figure, tables.source)


def list_management_figures(
    plants: Sequence[PlantTables],
    comparison: PolicyComparison,
    setup: PolicySetup,
) -> dict[str, FigureMaker]:
    """Return all figures that the plants allow, by name."""
    source = "; ".join(tables.source for tables in plants)
    makers: dict[str, FigureMaker] = {
        f"figure_{number}_{field}": partial(
            draw_gains,
            comparison,
            field,
            label,
            source,
        )
        for number, (field, label) in enumerate(GAINS.items(), start=10)
    }
    if comparison.for_policy(PolicyName.COARSE):
        added = (PolicyName.COARSE, PolicyName.HARMONIA)
        makers["figure_18_contributions"] = partial(
            draw_gains,
            comparison,
            *next(iter(GAINS.items())),
            source,
            added,
        )
    for tables in plants:
        first = next(iter(tables.applications))
        objective = setup.objective
        run = comparison.runs[PolicyName.HARMONIA, first]
        makers[f"convergence_{first}"] = partial(draw_convergence, tables, run, objective)
        is_predicted = all(
            (PolicyName.PREDICTIVE, app) in comparison.runs for app in tables.applications
        )
        if len(tables.lattice.knobs) == 1 and is_predicted:
            makers[f"picks_{first}"] = partial(draw_picked_clocks, tables, comparison, objective)
    return makers


GAINS = {
    "ed2_gain_over_default_with_probing": "ED² gain over default (%)",
    "energy_saving_with_probing": "Energy saved (%)",
    "power_saving_with_probing": "Power saved (%)",
    "slowdown_with_probing": "Slowdown (%)",
}
