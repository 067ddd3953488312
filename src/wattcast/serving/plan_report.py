"""Print and draw plans of a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from wattcast.core.units import show, show_plain
from wattcast.report.figure_style import (
    SERIES_COLOURS,
    Figure,
    add_caption,
    new_axes,
)
from wattcast.report.text_tables import print_notes, print_rows
from wattcast.serving.capacity_plan import PlanResult, list_plan_notes
from wattcast.serving.plan_options import MOST_TOKENS
from wattcast.serving.plan_search import ServingPlan
from wattcast.serving.service_demand import ServiceDemand
from wattcast.serving.speculation_trial import SpeculationTrial

MOST_LISTED = 6  # other plans, and reasons why replicas cannot serve

_COLUMNS = {
    "gpu": "gpu",
    "gpus": "GPUs",
    "layout": "replica",
    "setting": "at most",
    "max_seqs": "most seqs",
    "load_share": "load",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p99_s": "p99",
    "power_w": "power",
    "energy_j_per_token": "J/token",
}


def print_plan(console: Console, result: PlanResult) -> None:
    """Print the best plan in a sentence, then what it gives, and the best of each kind of GPU."""
    demand = result.demand
    currency = demand.prices.currency or "cost"
    has_several_kinds = len(result.kinds) > 1
    if not result.is_complete:
        console.print("[yellow]Interrupted: these are the plans so far.[/yellow]")
    _print_best_plan(console, demand, result.best.make_row(), currency, result.speculation)
    columns = {
        **_COLUMNS,
        "cost_per_million_tokens": f"{currency}/M tokens",
        "carbon_g_per_million_tokens": "g CO2e/M tokens",
        "binds": "limited by",
    }
    bests = [kind.best for kind in result.ranked_kinds if kind.best is not None]
    if has_several_kinds:
        title = "The best of each kind of GPU, best first"
        print_rows(console, _list_plan_rows(bests), columns, title)
        for kind in result.ranked_kinds:
            if kind.reason is not None:
                console.print(f"[bold]{escape(kind.gpu)}[/bold]: none. {escape(kind.reason)}")

    # other plans: the best of them, and those on the front of GPUs and energy
    more_plans = [plan for plan in result.plans if plan not in bests or not has_several_kinds]
    on_front = set(more_plans) & set(result.front)
    shown = set(more_plans[:MOST_LISTED]) | on_front
    if shown:
        title = "Other plans, best first" if has_several_kinds else "Plans, best first"
        ranked = [plan for plan in more_plans if plan in shown]
        print_rows(console, _list_plan_rows(ranked), columns, title)
    refused = [text for kind in result.kinds if kind.best is not None for text in kind.refused]
    for sentence in refused[:MOST_LISTED]:
        console.print(escape(sentence))
    print_notes(console, list_plan_notes(result))


def _print_best_plan(
    console: Console,
    demand: ServiceDemand,
    best: dict[str, Any],
    currency: str,
    speculation: SpeculationTrial | None,
) -> None:
    """Print the best plan, what it gives, and what more traffic and drafts would change."""
    risk = f" ([yellow]{escape(best['risk'])}[/yellow])" if best["risk"] else ""
    has_short_steps = best["max_batched_tokens"] < MOST_TOKENS[0]
    step = f" and {best['max_batched_tokens']} tokens a step" if has_short_steps else ""
    is_limit = best["setting"].endswith("W") and "Hz" not in best["setting"]
    kind = "power limit" if is_limit else "at most"
    console.print(
        f"[bold]{escape(demand.model.name)}[/bold] at {demand.rate_per_s:g} requests/s, "
        f"{demand.prompt} + {demand.output} tokens: "
        f"[bold]{best['gpus']} x {escape(best['gpu'])}[/bold] "
        f"({best['replicas']} x {best['layout']}), {kind} {best['setting']}{risk}, "
        f"at most {best['max_seqs']} sequences{step}"
    )
    cost = best["cost_per_million_tokens"]
    spent = (
        f", {show_plain(cost, 3)} {currency} a million output tokens" if cost is not None else ""
    )
    console.print(
        f"{show_plain(best['output_tokens_per_s'], 4)} output tokens/s, "
        f"{show(best['power_w'], 'W')} in all, "
        f"{show_plain(best['energy_j_per_token'], 3)} J/token{spent}; "
        f"running at {best['load_share']:.0%} of capacity; {describe_limit(best['binds'])}"
    )
    _print_hall(console, demand, best, currency)
    more = "; ".join(f"at {step['times']} times, {step['gpus']}" for step in best["growth"])
    console.print(f"GPUs if the traffic grows: {more}")
    if speculation is not None:
        console.print(escape(speculation.summary_line))


def _print_hall(
    console: Console,
    demand: ServiceDemand,
    best: dict[str, Any],
    currency: str,
) -> None:
    """Print what a hall holds of the plan's replicas, if there is a power budget."""
    hall = best["hall"]
    if hall is None:
        return
    cost = best["cost_per_million_tokens"]
    spent = (
        f", {show_plain(cost, 3)} {currency} a million output tokens" if cost is not None else ""
    )
    console.print(
        f"A hall of {show(hall['power_budget_w'], 'W')} at its meter holds "
        f"[bold]{hall['gpus']:,} x {escape(best['gpu'])}[/bold] at this load: "
        f"{hall['requests_per_s']:,.4g} requests/s, {hall['output_tokens_per_s']:,.4g} "
        "output tokens/s"
        f"{spent}. If all GPUs may draw their limit of {best['power_limit_w']:.0f} W at once: "
        f"{hall['safe_gpus']:,} GPUs, {hall['safe_output_tokens_per_s']:,.4g} output tokens/s"
    )


def describe_limit(binds: str) -> str:
    """Say what breaks first if the rate grows.

    >>> describe_limit("TPOT p99")
    'TPOT p99 is the limit'
    """
    return binds if binds.startswith("nothing") else f"{binds} is the limit"


def _list_plan_rows(plans: Sequence[ServingPlan]) -> list[dict[str, Any]]:
    """Return plans as rows of a table, with percentiles of latencies as columns."""
    rows = []
    for plan in plans:
        row = plan.make_row()
        for name in ("ttft", "tpot"):
            for percentile in ("p50", "p99"):
                row[f"{name}_{percentile}_s"] = row[f"{name}_s"][percentile]
        rows.append(row)
    return rows


def draw_plan(result: PlanResult) -> Figure:
    """Draw every simulated plan by GPUs and joules per output token, with the Pareto front."""
    figure, axes = new_axes(8.0, 4.5)
    by_kind: dict[str, list[ServingPlan]] = {}
    for plan in result.plans:
        by_kind.setdefault(plan.option.gpu.name, []).append(plan)
    for (kind, plans), colour in zip(by_kind.items(), SERIES_COLOURS, strict=False):
        axes.plot(
            *_place_plans(plans),
            "o",
            color=colour,
            alpha=0.7,
            label=kind,
        )
    label = "none is better in both"
    axes.plot(
        *_place_plans(result.front),
        "-",
        color="0.4",
        lw=1.0,
        label=label,
    )
    axes.plot(
        *_place_plans([result.best]),
        "o",
        ms=13,
        mfc="none",
        color="k",
        label="best",
    )
    axes.set(
        xlabel="GPUs",
        ylabel="Energy per output token (J)",
        xlim=(0, None),
    )
    axes.set_title(f"{result.demand.model.name} at {result.demand.rate_per_s:g} requests/s")
    axes.legend(frameon=False)
    return add_caption(figure, "; ".join(list_plan_notes(result)[:3]))


def _place_plans(plans: Sequence[ServingPlan]) -> tuple[list[int], list[float]]:
    return [plan.gpus for plan in plans], [plan.energy_j_per_token for plan in plans]
