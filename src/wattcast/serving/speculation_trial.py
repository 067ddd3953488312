"""Try speculative decoding on the best replica of a plan: what it changes at an acceptance rate.

The search of a plan knows no drafts, whose acceptance rate nobody knows before they run. Its best
replica is therefore sized again with drafts: as many replicas as then keep all bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from wattcast.core import BadInput, units
from wattcast.core.units import show_plain
from wattcast.serving.option_bounds import tabulate_setting
from wattcast.serving.plan_options import (
    MOST_SEQUENCES,
    Speculation,
    StepTables,
)
from wattcast.serving.plan_search import (
    UNBEATEN,
    ServingPlan,
    size_option,
)


@dataclass(frozen=True, eq=False)
class SpeculationTrial:
    """The best plan with drafts, or why there is none."""

    speculation: Speculation
    without: ServingPlan  # the best plan
    plan: ServingPlan | None = None  # the same replica with drafts
    reason: str = ""  # why it cannot serve with drafts

    @property
    def summary_line(self) -> str:
        """Say in a sentence what drafts change."""
        tokens = self.speculation.tokens
        draft = self.speculation.draft
        drafting = f"{tokens} tokens a step are drafted at no cost"
        if draft is not None:
            drafting = f"{draft.name} drafts {tokens} tokens a step"
        asked = f"If {drafting}, each kept in {self.speculation.acceptance_rate:.0%} of all cases"
        if self.plan is None:
            return f"{asked}: none serves. {self.reason}"
        changes = [
            f"{after} ({before})"
            for after, before in zip(
                _list_answers(self.plan), _list_answers(self.without), strict=True
            )
        ]
        return f"{asked} (in brackets: without drafts): {', '.join(changes)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trial assumes."""
        if self.plan is None:
            return ()
        assumptions = self.plan.result.assumptions
        return tuple(note for note in assumptions if note.startswith("speculative decoding"))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        draft = self.speculation.draft
        return {
            "speculative_tokens": self.speculation.tokens,
            "acceptance_rate": self.speculation.acceptance_rate,
            "draft": None if draft is None else draft.name,
            "plan": None if self.plan is None else self.plan.make_row(),
            "reason": self.reason or None,
        }


def try_speculation(best: ServingPlan, speculation: Speculation) -> SpeculationTrial:
    """Size the replica of the best plan again with drafts, at every batch limit that plans try."""
    trial = SpeculationTrial(speculation, best)
    if speculation.draft is not None and best.option.shared.pp > 1:
        return replace(trial, reason="a draft model is not split into pipeline stages.")
    demand = best.demand
    tables = StepTables()
    plans: list[ServingPlan] = []
    reason = ""
    for max_seqs in MOST_SEQUENCES if demand.bounds_tokens else MOST_SEQUENCES[:1]:
        option = replace(
            best.option,
            speculation=speculation,
            max_seqs=max_seqs,
            most_per_s=math.inf,
            least_j=0.0,
        )
        try:
            costs = tabulate_setting(demand, option, tables)
            plan = size_option(demand, replace(option, costs=costs), UNBEATEN)
        except BadInput as error:
            reason = reason or str(error)
            continue
        if plan is not None:
            plans.append(plan)
    if not plans:
        return replace(trial, reason=reason)
    return replace(trial, plan=min(plans, key=lambda plan: plan.rank))


def _list_answers(plan: ServingPlan) -> tuple[str, str, str]:
    gpus = f"{plan.gpus} GPU" if plan.gpus == 1 else f"{plan.gpus} GPUs"
    tpot = units.show(plan.result.headline["tpot_s.p50"], "s", 2)
    return gpus, f"{tpot} TPOT p50", f"{show_plain(plan.energy_j_per_token, 3)} J/token"
