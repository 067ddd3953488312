"""Bridge of ``measure kernels --suggest``: candidates from the catalogue's models and the plan, ranked by the fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.errors import WattcastError
from wattcast.fit import kernels_data
from wattcast.fit.kernels_data import Rows
from wattcast.fit.model_operators import operators_of_models
from wattcast.fit.suggest import Candidate, Suggestion, suggest
from wattcast.fitted import bundle_for
from wattcast.fitted.forecast_rule import rule
from wattcast.kernels.work import Condition
from wattcast.measure.kernels.from_workload import from_operator
from wattcast.measure.kernels.listed import write_listed
from wattcast.measure.kernels.plan import LARGEST_BYTE, LONGEST_S, plan
from wattcast.measure.kernels.spec import Spec
from wattcast.workload.from_json import operator_to_plain

ROUNDS = 4  # rounds of the plan that candidates come from


def suggestions(
    count: int, gpu: str, database: str, tell: Callable[[str], None]
) -> tuple[list[Suggestion], list[Spec]]:
    """The rows worth most that are not in the database yet, and how the campaign runs each."""
    chip = hardware.load(gpu)
    rows, bundle = _measured(gpu, database, tell), bundle_for(chip)
    measured = set(rows.spec)
    known: dict[str, Spec] = {}
    candidates: list[Candidate] = []
    shares, left_out = _operators_of_models(gpu, tell)
    spread = (replace(spec, chosen="suggested") for round_ in range(1, ROUNDS + 1) for spec in plan(round_))
    for spec, share, source in [*shares, *((spec, 0.0, "plan") for spec in spread)]:
        fits = spec.guessed_s <= LONGEST_S and spec.byte <= LARGEST_BYTE
        if spec.id not in measured and spec.id not in known and fits:
            known[spec.id] = spec
            candidates.append(_candidate(spec, share, source))
    tell(f"{len(candidates)} candidates; {left_out:.1%} of the models' time is in operators no row can stand for")
    found = suggest(candidates, count, rows, chip, bundle)
    place = {id(candidate): spec for candidate, spec in zip(candidates, known.values(), strict=True)}
    return found, [place[id(suggestion.candidate)] for suggestion in found]


def _measured(gpu: str, database: str, tell: Callable[[str], None]) -> Rows:
    """The rows so far; of a GPU that no database ships for, and none is named, there are none."""
    try:
        return kernels_data.load(database)
    except WattcastError:
        if database != gpu:
            raise
        tell(f"no database of the {gpu} was named or ships: as if nothing was measured")
        known = kernels_data.load(rule().parent)
        return known.where(np.zeros(len(known), dtype=bool))


def write(out: Path, found: list[Suggestion], specs: list[Spec]) -> Path:
    """The list for ``measure kernels --plan``."""
    path = out / "plan.jsonl"
    write_listed(
        path, [(s, {"why": f.candidate.source, "score": f.score}) for s, f in zip(specs, found, strict=True)]
    )
    return path


def _candidate(spec: Spec, share: float, source: str) -> Candidate:
    operator = dict(spec.operator)
    if operator["op"] == "elementwise":
        operator["op"] = operator.pop("function")
    backend = str(spec.detail.get("backend", ""))
    return Candidate(operator, Condition(spec.layout, spec.rotated, backend), share, source)


def _operators_of_models(gpu: str, tell: Callable[[str], None]) -> tuple[list[tuple[Spec, float, str]], float]:
    """Operators of the catalogue's models with the share of time they take, and the share that cannot be measured."""
    shares: dict[str, float] = {}
    specs: dict[str, tuple[Spec, str]] = {}
    found = operators_of_models(gpu, tell)
    lost = 0.0
    for item in found:
        spec = from_operator(_plain(operator_to_plain(item.op)))
        if spec is None:
            lost += item.share
            continue
        spec = replace(spec, chosen="models")
        shares[spec.id] = shares.get(spec.id, 0.0) + item.share
        specs.setdefault(spec.id, (spec, item.run))
    listed = [(spec, shares[key], source) for key, (spec, source) in specs.items()]
    return listed, lost / max(sum(item.share for item in found), 1e-30)


def _plain(operator: dict[str, Any]) -> dict[str, Any]:
    return {name: str(v) if isinstance(v, str) else v for name, v in operator.items()}
