"""Text and figure of a plan to draw less for a while.

Energy lost is what the same work takes more than usual: it is negative where lower clocks do the
work with less.
"""

from __future__ import annotations

from rich.console import Console

from wattcast.core import units
from wattcast.report.figure_style import (
    SERIES_COLOURS,
    Figure,
    new_figure,
)
from wattcast.report.text_tables import new_table
from wattcast.timeseries.demand_response import DemandResponse, ShedPoint

_JOULE_PER_KWH = 3.6e6


def print_response(console: Console, response: DemandResponse) -> None:
    """Print what each policy sheds and costs, and the plan."""
    usual = units.show(response.usual_w, "W", 4)
    console.print(f"[bold]{response.title}[/bold]: {usual} at the plug as usual")
    table = new_table(
        *("group", "policy", "sheds", "requests lost", "p99 TTFT", "p99 TPOT", "kWh lost"),
        left=("policy",),
    )
    for points_of_group in response.groups:
        for point in points_of_group:
            table.add_row(*_list_cells(point))
    console.print(table)
    plan = response.plan
    console.print(
        f"[bold]plan[/bold]: sheds {units.show(plan.shed_w, 'W', 3)} of "
        f"{units.show(response.asked_w, 'W', 3)} asked, loses {plan.requests_lost:,.0f} requests "
        f"and {plan.lost_j / _JOULE_PER_KWH:.3g} kWh (negative: the same work takes less)"
    )
    for step in response.list_steps():
        console.print(f"  {step}")


def _list_cells(point: ShedPoint) -> list[str]:
    """Return a row of the table of policies.

    The depth of a policy is a power limit, a clock, or the share of the replicas that are drained.
    """
    depth = {
        "cap": units.show(point.depth, "W", 3),
        "clock": units.show(point.depth, "Hz", 4),
        "usual": "",
    }.get(point.policy, f"{point.depth:.0%}")
    pair = (point.ttft_p99_s, point.tpot_p99_s)
    latencies = ["" if value is None else units.show(value, "s", 3) for value in pair]
    return [
        point.group,
        f"{point.policy} {depth}".strip(),
        units.show(point.shed_w, "W", 3),
        f"{point.requests_lost:,.0f}",
        *latencies,
        f"{point.lost_j / _JOULE_PER_KWH:.3g}",
    ]


def draw_response(response: DemandResponse) -> Figure:
    """Draw the energy that each policy loses over the power that it sheds.

    A point whose policy loses requests says how many.
    """
    figure = new_figure(9.0, 5.0)
    axes = figure.subplots()
    curves: dict[tuple[str, str], list[ShedPoint]] = {}
    for points_of_group in response.groups:
        for point in points_of_group:
            if point.policy != "usual":
                curves.setdefault((point.group, point.policy), []).append(point)
    for place, ((group, policy), of_policy) in enumerate(curves.items()):
        ordered = sorted(of_policy, key=lambda point: point.shed_w)
        shed_kw = [0.0] + [point.shed_w / 1e3 for point in ordered]
        lost_kwh = [0.0] + [point.lost_j / _JOULE_PER_KWH for point in ordered]
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        axes.plot(
            shed_kw,
            lost_kwh,
            marker="o",
            ms=4,
            color=colour,
            label=f"{group}: {policy}",
        )
        for point in ordered:
            if point.requests_lost >= 1:
                text = f"{point.requests_lost:,.0f} requests lost"
                place_at = (point.shed_w / 1e3, point.lost_j / _JOULE_PER_KWH)
                axes.annotate(
                    text,
                    place_at,
                    fontsize=8,
                    xytext=(4, 4),
                    textcoords="offset points",
                )
    axes.axvline(
        response.asked_w / 1e3,
        color="#000000",
        ls="--",
        lw=1.0,
        label="asked",
    )
    axes.axhline(0.0, color="#999999", lw=0.8)
    axes.set(xlabel="Power shed (kW)", ylabel="Energy lost (kWh)")
    axes.legend(frameon=False, fontsize=9)
    figure.suptitle(f"{response.title}: what shedding costs")
    return figure
