"""What to measure: how many clocks a training set really needs, and which benchmark to add next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.choose import Fit, Settings, Workbench
from wattcast.fit.gram import Mask
from wattcast.fit.heldout import INNER_FOLDS
from wattcast.fit.split import few_folds
from wattcast.fit.table import Predictor
from wattcast.fit.terms import ACTIVE, Model
from wattcast.fit.voltage import factors

ENOUGH = 1.05  # times the error with all clocks
COUNTS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class ClockSubset:
    """Error over the whole plane when training saw only some of its clocks."""

    core_hz: tuple[float, ...]
    memory_hz: tuple[float, ...]
    points: int
    mape: float
    anchored_mape: float | None


@dataclass(frozen=True)
class Candidate:
    """A benchmark that could be added, and what it would teach."""

    name: str
    determinant: float  # rise of log det of the information (D-optimality)
    variance: float  # share of the costs' summed variance that it takes away (A-optimality)


def training_clocks(bench: Workbench, model: Model, settings: Settings) -> list[ClockSubset]:
    """Held-out error by number of training clocks, evenly spread and always with the reference.

    Benchmarks are held out in a few folds with settings given, so that the clocks alone differ; costs
    and voltages are fitted at the training clocks, voltages between them lie on straight lines.
    """
    core, memory = np.unique(bench.clock_hz), np.unique(bench.memory_clock_hz)
    reference = bench.reference_hz
    sizes = [(a, b) for a in (*COUNTS, core.size) for b in (1, 2, memory.size) if a <= core.size and b <= memory.size]
    subsets = dict.fromkeys((_spread(core, a, reference[0]), _spread(memory, b, reference[1])) for a, b in sizes)
    out = []
    for core_hz, memory_hz in subsets:
        clocks = np.isin(bench.clock_hz, core_hz) & np.isin(bench.memory_clock_hz, memory_hz)
        mape, anchored = _error(bench, model, settings, clocks)
        out.append(ClockSubset(core_hz, memory_hz, int(clocks.sum()), mape, anchored))
    return sorted(out, key=lambda subset: subset.points)


def enough(subsets: list[ClockSubset]) -> ClockSubset:
    """The smallest set of training clocks whose error is within 5 % of that with all clocks."""
    whole = max(subsets, key=lambda subset: subset.points)
    close = [subset for subset in subsets if subset.mape <= ENOUGH * whole.mape]
    return min(close, key=lambda subset: (subset.points, subset.mape))


def next_benchmarks(bench: Workbench, fit: Fit, train: Mask) -> list[Candidate]:
    """Benchmarks worth adding, best first by the variance they take away.

    Candidates stress one predictor alone at full use, or two at half use each, at the reference
    clocks. A benchmark counts once however many clocks it is run at, since its rows err together.
    """
    table = bench.tables[fit.settings.variant]
    felt, _ = factors(fit.grams, fit.inferred.voltage)
    total = (fit.grams.summed(train)[:, :-1, :-1] * felt[:, :, np.newaxis] * felt[:, np.newaxis, :]).sum(axis=0)
    if fit.penalty is not None:
        total = total + fit.penalty
    unit = np.sqrt(np.diag(total))
    rows = float(fit.grams.count[train].sum()) / int(train.sum())
    information = total / unit / unit[:, np.newaxis] + 1e-10 * np.eye(unit.size)
    covariance = np.linalg.inv(information)
    events = np.array([bool(members) for members in fit.design.members])
    spread = float((np.diag(covariance) / unit**2)[events].sum())
    out = []
    for name, row in _candidates(bench, fit, table.full()):
        scaled = np.sqrt(rows) * row / unit
        reach = covariance @ scaled
        grown = 1.0 + float(scaled @ reach)
        taken = float(((reach / unit) ** 2)[events].sum()) / grown
        out.append(Candidate(name, float(np.log(grown)), taken / spread))
    return sorted(out, key=lambda candidate: -candidate.variance)


def _candidates(bench: Workbench, fit: Fit, full: Array) -> list[tuple[str, Array]]:
    """Weighted design rows at the reference clocks, by name."""
    core_hz, memory_hz = bench.reference_hz
    idle = np.zeros(fit.grams.width)
    for j, name in enumerate(fit.design.names):
        clock_hz = {"core clock": core_hz, "memory clock": memory_hz, ACTIVE: core_hz}.get(name, 0.0)
        idle[j] = 1.0 if name == "base" or name.endswith("leakage") else clock_hz
    predictors = bench.tables[fit.settings.variant].predictors
    rows = []
    for j, members in enumerate(fit.design.members):
        for k, others in enumerate(fit.design.members[: j + 1]):
            if not members or not others:
                continue
            row = idle.copy()
            row[j] += 0.5 * full[list(members)].max()
            row[k] += 0.5 * full[list(others)].max()
            label, other = (_label(fit, at, predictors) for at in (j, k))
            name = f"{label} alone" if j == k else f"{other} with {label}"
            rows.append((name, row / fit.grams.scale / max(float(row @ fit.coefficient), 1e-9)))
    return rows


def _label(fit: Fit, term: int, predictors: tuple[Predictor, ...]) -> str:
    members = fit.design.members[term]
    return fit.design.names[term] if len(members) > 1 else predictors[members[0]].column or fit.design.names[term]


def _error(bench: Workbench, model: Model, settings: Settings, clocks: Mask) -> tuple[float, float | None]:
    table = bench.table
    plain, known = np.zeros(table.rows), np.zeros(table.rows)
    for fold in few_folds(np.arange(table.benchmarks), INNER_FOLDS):
        fit = bench.fit(model, settings, ~fold, clocks)
        rows = fold[table.benchmark]
        plain[rows] = bench.predict(fit)[rows]
        if bench.anchor is not None:
            known[rows] = bench.anchored(fit)[rows]
    mape = 100.0 * float(np.abs(plain / table.power_w - 1.0).mean())
    return mape, 100.0 * float(np.abs(known / table.power_w - 1.0).mean()) if bench.anchor is not None else None


def _spread(clocks: Array, count: int, reference: float) -> tuple[float, ...]:
    """``count`` clocks: the reference, the extremes farthest from it first, the others evenly between."""
    at = int(np.abs(clocks - reference).argmin())
    if count == 1:
        return (float(clocks[at]),)
    if count == 2:
        far = int(np.abs(clocks - clocks[at]).argmax())
        return tuple(sorted((float(clocks[at]), float(clocks[far]))))
    index = np.round(np.linspace(0, clocks.size - 1, count)).astype(int)
    if at not in index:
        index[1 + np.abs(index[1:-1] - at).argmin()] = at
    return tuple(clocks[np.unique(index)].tolist())
