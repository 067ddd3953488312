"""Terms of a counter model, and the inference of voltages together with their costs.

Every kind of counter model is P = Σ_j c_j·V_rail(j)^q_j·x_j: a choice of terms x_j, the rail whose
voltage each feels, and the power q_j: 0 (base, offsets, and everything in a rate model), 1
(leakage) or 2 (clock and events) [Stokke2016]. P is linear in the costs c for given voltages and
nearly linear in V for given costs, so the two are fitted in turn [after Guerreiro2018]: a
Gauss-Newton step finds V (monotone in the clock, 1 at the reference clock) with c free to follow,
then c is solved exactly at that V. The core voltage may have a floor that depends on the memory
clock: V = max(V(f), floor(m))."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import BadInput
from wattcast.lab.counter_models.counter_table import (
    RAILS,
    CounterTable,
    LabelCodes,
)
from wattcast.power.hybrid_rail import RailVoltage

NO_RAIL = -1
INFERABLE = ("core", "memory")  # rails whose voltage follows a clock of the operating point
ACTIVE_CYCLE = "active_cycle"
TYPICAL_MISS = 0.10  # of a benchmark's power
TYPICAL_SPREAD = 0.25  # of the mean power
# added to a unit diagonal: lets an unseen column be factored; too small to move a seen one
GRAM_JITTER = 1e-12
# smallest eigenvalue of the Gram of unit columns that still counts as full rank
SINGULAR_EIGENVALUE = 1e-9
MOST_VOLTAGE_STEPS = 30
CONVERGED = 1e-6  # relative fall of the sum of squares
LEAST_VOLTAGE = 0.05  # relative; a step below it is shortened
STEP_SHARES = (1.0, 0.4, 0.1)  # of a step, tried in turn until the sum of squares falls
FIRST_DROP = 0.15  # of the voltage at the lowest clock, to start from
FIRST_RISE = 0.10


class CounterModelKind(StrEnum):
    """The kinds of counter model that are fitted side by side."""

    RATE = "rate"  # Stokke2016, Eq. 1
    LINEAR = "linear_with_clocks"  # Eq. 1 with both clocks as predictors
    ALPHA_C = "switched_capacitance"  # Eq. 3
    HYBRID = "hybrid_rail"  # Eq. 9 and 10


@dataclass(frozen=True)
class ModelTerms:
    """Columns of a design, each with its rail and its power q of the voltage."""

    names: tuple[str, ...]
    value: Array  # (row, term)
    exponent: LabelCodes  # (term,)
    rail: LabelCodes  # (term,), index into RAILS or NO_RAIL
    signed: tuple[bool, ...]  # whether a coefficient may be negative
    members: tuple[tuple[int, ...], ...]  # predictors of the table whose occurrences a term adds up

    def voltage_factors(self, voltage: Array) -> tuple[Array, Array]:
        """Return V^q of each term at each point, ``(point, term)``, and its derivative with respect
        to V.
        """
        feels = self.exponent > 0
        level = voltage[:, np.where(feels, self.rail, 0)]
        felt = np.where(feels, level**self.exponent, 1.0)
        slope = np.where(feels, self.exponent * level ** np.maximum(self.exponent - 1, 0), 0.0)
        return felt, slope


def build_terms(
    model: CounterModelKind,
    table: CounterTable,
    offset_hz: Iterable[float] = (),
    tied: bool = False,
) -> ModelTerms:
    """Return the terms of one kind of model on a table, without those that the table cannot
    identify.

    Clock and leakage terms need clocks that vary, the cost of being active needs an idle benchmark,
    an offset needs memory clocks that vary; ``describe_missing_terms`` explains the gaps. ``tied``
    gives all events of a family one coefficient."""
    builder = _TermBuilder(table)
    builder.add("base", np.ones(1))
    if model is CounterModelKind.LINEAR:
        builder.add_clocks()
    elif model is CounterModelKind.ALPHA_C:
        builder.add_rails(offset_hz, with_dynamic=True)
    elif model is CounterModelKind.HYBRID:
        builder.add_rails(offset_hz, with_dynamic=False)
        if has_idle_rows(table):
            active_cycles = table.busy() * table.clock_hz
            builder.add(ACTIVE_CYCLE, active_cycles, exponent=2, rail="core")
    if model is not CounterModelKind.ALPHA_C:
        exponent = 2 if model is CounterModelKind.HYBRID else 0
        builder.add_events(exponent, tied)
    return builder.build()


@dataclass(frozen=True)
class _Term:
    """One column of a design."""

    name: str
    value: Array  # (row,)
    exponent: int
    rail: int
    signed: bool
    members: tuple[int, ...]


class _TermBuilder:
    """Collects the terms of a model on one table."""

    def __init__(self, table: CounterTable) -> None:
        self.table = table
        self.clocks_hz = {
            "core": table.clock_hz,
            "memory": table.memory_clock_hz,
        }
        self.terms: list[_Term] = []

    def add(
        self,
        name: str,
        value: Array,
        exponent: int = 0,
        rail: str | None = None,
        signed: bool = False,
        members: tuple[int, ...] = (),
    ) -> None:
        """Add a term; a measured voltage is multiplied into its column."""
        value = np.broadcast_to(value, (self.table.rows,))
        measured_v = self.table.voltage_v.get(rail) if rail is not None else None
        if measured_v is not None:
            value = value * measured_v**exponent
            exponent = 0
        if rail not in INFERABLE:
            exponent = 0
        number = NO_RAIL if rail is None else RAILS.index(rail)
        self.terms.append(
            _Term(
                name,
                value,
                exponent,
                number,
                signed,
                members,
            )
        )

    def add_clocks(self) -> None:
        """Add each clock that varies, whatever the voltage."""
        for name, clock_hz in self.clocks_hz.items():
            if np.ptp(clock_hz) > 0:
                self.add(f"{name} clock", clock_hz)

    def add_rails(
        self,
        offset_hz: Iterable[float],
        with_dynamic: bool,
    ) -> None:
        """Add leakage, clock tree, offsets and, where wanted, one switched capacitance of each
        rail.
        """
        for rail in RAILS:
            self._add_leakage(rail)
            if rail in INFERABLE and np.ptp(self.clocks_hz[rail]) > 0:
                self.add(f"{rail} clock", self.clocks_hz[rail], exponent=2, rail=rail)
                if rail == "memory":
                    self._add_memory_offsets(offset_hz)
            if rail in INFERABLE and with_dynamic:
                self._add_dynamic(rail)

    def _add_leakage(self, rail: str) -> None:
        """Add leakage where a voltage that varies tells it from base power.

        A measured voltage varies by itself, that of the core with its clock; that of memory hardly
        moves [Stokke2016]."""
        varies = self.table.voltage_v.get(rail)
        if varies is None and rail == "core":
            varies = self.table.clock_hz
        if varies is not None and np.ptp(varies) > 0:
            self.add(f"{rail} leakage", np.ones(1), exponent=1, rail=rail)

    def _add_memory_offsets(self, offset_hz: Iterable[float]) -> None:
        """Add watts, of either sign, at the memory clocks whose power is off the line."""
        for clock_hz in offset_hz:
            is_at_clock = self.table.memory_clock_hz == clock_hz
            self.add(offset_name(clock_hz), is_at_clock * 1.0, signed=True)

    def _add_dynamic(self, rail: str) -> None:
        """Add the capacitance of a rail, switched in the share of cycles its busiest unit works."""
        if any(predictor.rail == rail for predictor in self.table.predictors):
            busy_cycles = self.table.share(rail) * self.clocks_hz[rail]
            self.add(f"{rail} dynamic", busy_cycles, exponent=2, rail=rail)

    def add_events(
        self,
        exponent: int,
        tied: bool,
    ) -> None:
        """Add the events of the table: each its own term, or those of a family tied to one."""
        members_of_term: dict[tuple[str, str], list[int]] = {}
        for index, predictor in enumerate(self.table.predictors):
            name = predictor.family if tied and predictor.family else predictor.event
            members_of_term.setdefault((predictor.rail, name), []).append(index)
        for (rail, family), members in members_of_term.items():
            is_single = len(members) == 1
            name = self.table.predictors[members[0]].event if is_single else f"{family} events"
            occurrence = self.table.occurrence[:, members].sum(axis=1)
            self.add(
                name,
                occurrence,
                exponent,
                rail,
                members=tuple(members),
            )

    def build(self) -> ModelTerms:
        """Return the columns side by side."""
        terms = self.terms
        return ModelTerms(
            names=tuple(term.name for term in terms),
            value=np.stack([term.value for term in terms], axis=1),
            exponent=np.array([term.exponent for term in terms]),
            rail=np.array([term.rail for term in terms]),
            signed=tuple(term.signed for term in terms),
            members=tuple(term.members for term in terms),
        )


def offset_name(clock_hz: float) -> str:
    """Return the name of the offset at a memory clock."""
    return f"memory offset {clock_hz / 1e6:g} MHz"


def describe_missing_terms(table: CounterTable) -> list[str]:
    """Return sentences on the terms that the table cannot identify."""
    words = []
    clocks_hz = {
        "core": table.clock_hz,
        "memory": table.memory_clock_hz,
    }
    for name, clock_hz in clocks_hz.items():
        if np.ptp(clock_hz) == 0:
            words.append(
                f"The {name} clock is the same in every row: leakage, clock power and voltage of "
                f"the {name} rail cannot be told from base power, and no voltage is inferred."
            )
    if not has_idle_rows(table):
        words.append(
            "No row shows an idle device: what being active costs by itself cannot be told "
            "from clock power."
        )
    return words


def has_idle_rows(table: CounterTable) -> bool:
    """Whether some rows, but not all, show a device without work."""
    busy = table.busy()
    return bool(busy.min() == 0.0 and busy.max() == 1.0)


@dataclass(frozen=True)
class GramCells:
    """XᵀX of each benchmark at each operating point; columns are divided by ``scale``, the last is
    the target, 1.
    """

    cell: Array  # (benchmark, point, term + 1, term + 1)
    count: Array  # (benchmark, point) rows
    scale: Array  # (term,)
    terms: ModelTerms
    clock_hz: Array  # (point,)
    memory_clock_hz: Array  # (point,)

    def summed(
        self,
        benchmarks: Mask,
        points: Mask | None = None,
    ) -> Array:
        """Sum over the chosen benchmarks, ``(point, term + 1, term + 1)``; points outside
        ``points`` are zero.
        """
        is_minority = int(benchmarks.sum()) <= benchmarks.size // 2
        if is_minority:
            total = self.cell[benchmarks].sum(axis=0)
        else:
            total = self.total - self.cell[~benchmarks].sum(axis=0)
        if points is not None:
            total = total * points[:, np.newaxis, np.newaxis]
        return np.asarray(total)

    @cached_property
    def total(self) -> Array:
        """Sum over all benchmarks."""
        return np.asarray(self.cell.sum(axis=0))


def operating_points(table: CounterTable) -> tuple[LabelCodes, Array, Array]:
    """Return the operating point of each row, and core and memory clock of each point, sorted."""
    pairs = np.stack([table.clock_hz, table.memory_clock_hz], axis=1)
    unique, index = np.unique(pairs, axis=0, return_inverse=True)
    return np.asarray(index, dtype=np.int64).reshape(-1), unique[:, 0], unique[:, 1]


def make_gram_cells(
    table: CounterTable,
    design: ModelTerms,
    weight: Array | None = None,
) -> GramCells:
    """Return Gram cells of relative errors: each row is divided by its power and weighted by
    ``weight``.
    """
    point, clock_hz, memory_clock_hz = operating_points(table)
    largest = np.abs(design.value).max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)
    relative = design.value / scale / table.power_w[:, np.newaxis]
    row = np.concatenate([relative, np.ones((table.rows, 1))], axis=1)  # the target is 1
    if weight is not None:
        row = row * np.sqrt(weight)[:, np.newaxis]

    width = row.shape[1]
    shape = (table.benchmarks, clock_hz.size)
    cell_of_row = table.benchmark * clock_hz.size + point
    cell = np.zeros((table.benchmarks * clock_hz.size, width, width))
    np.add.at(cell, cell_of_row, row[:, :, np.newaxis] * row[:, np.newaxis, :])
    count = np.bincount(cell_of_row, minlength=cell.shape[0]).astype(float)
    return GramCells(
        cell=cell.reshape(*shape, width, width),
        count=count.reshape(shape),
        scale=scale,
        terms=design,
        clock_hz=clock_hz,
        memory_clock_hz=memory_clock_hz,
    )


def shrinkage_penalty(
    table: CounterTable,
    design: ModelTerms,
    scale: Array,
    full: Array,
    mean_w: float,
    firmness: float,
) -> Array | None:
    """Return the quadratic penalty S that pulls the costs of like units together, cᵀ·S·c.

    Costs are compared in watts at full use: those of a family are pulled to the family's mean,
    family means to the rail's. ``full`` is each predictor's occurrence at full use, 0 where it was
    never seen and has no scale; ``mean_w`` is the mean power of the training rows; ``firmness`` is
    the strength times the rows of a benchmark. Strength 1 corresponds to benchmarks that deviate
    from the model by 10 % of their power, all rows alike, and to like units that differ by 25 % of
    the mean power. Both are guesses, so other strengths are tried."""
    if firmness <= 0:
        return None
    penalty = np.zeros((len(design.names), len(design.names)))
    full_of_term = [full[list(members)].max(initial=0.0) for members in design.members]
    for rail in np.unique(design.rail[design.rail >= 0]):
        terms = [
            term
            for term in range(len(design.names))
            if design.rail[term] == rail and full_of_term[term] > 0
        ]
        if len(terms) < 2:
            continue
        families = []
        for term in terms:
            first_member = design.members[term][0]
            families.append(table.predictors[first_member].family or design.names[term])
        at_full = np.array([full_of_term[term] for term in terms]) / scale[terms]
        pull = family_penalty(tuple(families))
        penalty[np.ix_(terms, terms)] = at_full[:, np.newaxis] * pull * at_full
    return penalty * firmness * (TYPICAL_MISS / TYPICAL_SPREAD / mean_w) ** 2


@cache
def family_penalty(families: tuple[str, ...]) -> Array:
    """Return S of the pull to family means and of those to the rail mean, with the means
    eliminated.

    >>> family_penalty(("a", "a")).round(3).tolist()
    [[0.5, -0.5], [-0.5, 0.5]]
    """
    names = list(dict.fromkeys(families))
    member = np.array([[family == name for name in names] for family in families], dtype=float)
    cost_count, family_count = member.shape
    # the unknowns are the costs, then the family means, then the rail's mean
    to_family = np.concatenate(
        [np.eye(cost_count), -member, np.zeros((cost_count, 1))],
        axis=1,
    )
    to_rail = np.concatenate(
        [np.zeros((family_count, cost_count)), np.eye(family_count), -np.ones((family_count, 1))],
        axis=1,
    )
    whole = to_family.T @ to_family + to_rail.T @ to_rail
    costs = slice(None, cost_count)
    means = slice(cost_count, None)
    eliminated = whole[costs, means] @ np.linalg.solve(whole[means, means], whole[means, costs])
    return np.asarray(whole[costs, costs] - eliminated)


def solve_costs(
    gram: Array,
    moment: Array,
    signed: Sequence[bool],
    penalty: Array | None = None,
) -> Array:
    """Return the coefficients that minimise cᵀ·G·c - 2·mᵀ·c + cᵀ·S·c, non-negative except where
    ``signed``.

    A column that is zero in every row gets coefficient zero unless the penalty ties it to others.
    """
    from scipy.linalg.lapack import dtrtrs
    from scipy.optimize import nnls

    full = gram if penalty is None else gram + penalty
    unit = _unit_lengths(full)
    correlation = full / unit / unit[:, np.newaxis]
    factor = np.linalg.cholesky(correlation + GRAM_JITTER * np.eye(unit.size)).T
    target = dtrtrs(factor, moment / unit, trans=1)[0]
    free = np.flatnonzero(signed)
    if free.size == unit.size:
        scaled = dtrtrs(factor, target)[0]
    else:
        # a cost of either sign is the difference of two that are not negative
        columns = np.concatenate([factor, -factor[:, free]], axis=1)
        parts, _ = nnls(columns, target, maxiter=100 * unit.size)
        scaled = parts[: unit.size]
        scaled[free] -= parts[unit.size :]
    return np.asarray(np.where(np.diag(full) > 0, scaled / unit, 0.0))


def check_rank(
    gram: Array,
    names: Sequence[str],
    where: str,
) -> None:
    """Refuse a design whose columns depend on one another, naming them."""
    unit = _unit_lengths(gram)
    empty = [names[column] for column in np.flatnonzero(np.diag(gram) == 0).tolist()]
    if empty:
        raise BadInput(
            f"{where}: {', '.join(empty)}: zero in every row. Leave it out, or measure "
            "work that uses it."
        )
    eigenvalues, eigenvectors = np.linalg.eigh(gram / unit / unit[:, np.newaxis])
    if eigenvalues[0] > SINGULAR_EIGENVALUE:
        return
    share = np.abs(eigenvectors[:, 0])
    involved = [names[column] for column in np.flatnonzero(share > 0.1 * share.max()).tolist()]
    raise BadInput(
        f"{where}: singular design: {', '.join(involved)} move together in every row, so "
        "their costs cannot be told apart. Leave one out, tie them as one family, or add a "
        "benchmark that moves one without the others."
    )


def _unit_lengths(gram: Array) -> Array:
    size = np.sqrt(np.diag(gram))
    return np.where(size > 0, size, 1.0)


@dataclass(frozen=True)
class ClockAxis:
    """The distinct clocks of a rail, rising, and whether its voltage over them is inferred."""

    hz: Array
    at: LabelCodes  # (point,)
    reference: int  # the clock at which the relative voltage is 1
    inferred: bool

    @property
    def rises(self) -> int:
        """Number of unknown rises of the voltage between neighbouring clocks."""
        return self.hz.size - 1 if self.inferred else 0

    @cached_property
    def steps(self) -> Array:
        """The matrix from rises between neighbours to the level over the reference, ``(clock,
        rise)``.
        """
        clock = np.arange(self.hz.size)[:, np.newaxis]
        rise = np.arange(self.hz.size - 1)
        above = (rise >= self.reference) & (clock > rise)
        below = (rise < self.reference) & (clock <= rise)
        return above * 1.0 - below * 1.0


@dataclass(frozen=True)
class VoltagePlan:
    """The unknown voltages. Parameters θ are rises between neighbouring clocks, all
    non-negative.
    """

    core: ClockAxis
    memory: ClockAxis
    floored: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of rises of the core curve, of its floor, and of the memory curve."""
        floor = self.memory.hz.size - 1 if self.floored and self.core.rises else 0
        return self.core.rises, floor, self.memory.rises

    def start(self) -> Array:
        """Return the straight line with which the inference begins."""
        core, floor, memory = self.sizes
        theta = np.zeros(core + floor + memory)
        below = self.core.reference
        theta[:below] = FIRST_DROP / max(below, 1)
        theta[below:core] = FIRST_RISE / max(core - below, 1)
        theta[core : core + floor] = FIRST_DROP / 4 / max(floor, 1)
        return theta

    def voltages(self, theta: Array) -> tuple[Array, Array]:
        """Return both rails' voltage at each point, ``(point, 2)``, and its derivative, ``(point,
        2, parameter)``.
        """
        core, floor, memory = self.sizes
        slope = np.zeros((self.core.at.size, 2, theta.size))
        if core:
            slope[:, 0, :core] = self.core.steps[self.core.at]
        if floor:
            drops = _floor_matrix(floor)[self.memory.at]
            higher = drops @ theta[core : core + floor] > slope[:, 0, :core] @ theta[:core]
            at_floor = (self.core.at < self.core.reference) & (self.memory.at > 0) & higher
            slope[at_floor, 0, :core] = 0.0
            slope[at_floor, 0, core : core + floor] = drops[at_floor]
        if memory:
            slope[:, 1, core + floor :] = self.memory.steps[self.memory.at]
        return 1.0 + slope @ theta, slope

    def curves(self, theta: Array) -> tuple[RailVoltage, RailVoltage]:
        """Return the voltage of the core and the memory rail as curves over their clocks."""
        core, floor, memory = self.sizes
        memory_curve = RailVoltage.constant()
        if memory:
            memory_level = 1.0 + self.memory.steps @ theta[core + floor :]
            memory_curve = RailVoltage(self.memory.hz, memory_level)
        if not core:
            return RailVoltage.constant(), memory_curve
        core_level = 1.0 + self.core.steps @ theta[:core]
        if not floor:
            return RailVoltage(self.core.hz, core_level), memory_curve
        floor_level = 1.0 + _floor_matrix(floor) @ theta[core : core + floor]
        floor_level = np.maximum(floor_level, core_level[0])
        floor_level[0] = core_level[0]
        core_curve = RailVoltage(self.core.hz, core_level, self.memory.hz, floor_level)
        return core_curve, memory_curve


@dataclass(frozen=True)
class InferredVoltages:
    """Coefficients (of the scaled columns) and the voltages inferred with them."""

    coefficient: Array  # (term,)
    theta: Array
    voltage: Array  # (point, 2)
    squares: float
    converged: bool = True


def plan_voltages(
    grams: GramCells,
    core_reference_hz: float,
    memory_reference_hz: float,
    floored: bool,
) -> VoltagePlan:
    """Plan the inference: a rail's voltage needs terms that depend on it and at least two
    clocks.
    """
    core = _make_axis(grams, RAILS.index("core"), grams.clock_hz, core_reference_hz)
    memory = _make_axis(grams, RAILS.index("memory"), grams.memory_clock_hz, memory_reference_hz)
    return VoltagePlan(core, memory, floored and memory.hz.size > 1)


def _make_axis(
    grams: GramCells,
    rail: int,
    clock_hz: Array,
    reference_hz: float,
) -> ClockAxis:
    """Return the clocks of a rail; its voltage is inferred where a term depends on it."""
    hz, at = np.unique(clock_hz, return_inverse=True)
    depends = (grams.terms.rail == rail) & (grams.terms.exponent > 0)
    return ClockAxis(
        hz=hz,
        at=at.reshape(-1),
        reference=int(np.abs(hz - reference_hz).argmin()),
        inferred=bool(depends.any()) and hz.size > 1,
    )


def infer_voltages(
    terms: ModelTerms,
    gram: Array,
    how: VoltagePlan,
    signed: tuple[bool, ...],
    penalty: Array | None,
) -> InferredVoltages:
    """Fit coefficients and voltages to the summed Gram of each point, ``(point, term + 1, term +
    1)``.

    Stops when the sum of squares falls by less than 1e-6 of itself, or after 30 steps
    (``converged`` False)."""

    theta = how.start()
    best = _solve_at(
        theta,
        terms,
        gram,
        how,
        signed,
        penalty,
    )
    if not theta.size:
        return best
    flags = (*signed, *(False,) * theta.size)
    wide = None if penalty is None else np.pad(penalty, (0, theta.size))
    for _ in range(MOST_VOLTAGE_STEPS):
        jacobian = fit_jacobian(terms, how, best.theta, best.coefficient)
        total = project_grams(gram, jacobian)
        costs_and_theta = solve_costs(total[:-1, :-1], total[:-1, -1], flags, wide)
        step = costs_and_theta[best.coefficient.size :] - best.theta
        lower = None
        for share in STEP_SHARES:
            trial = best.theta + share * step
            level, _ = how.voltages(trial)
            if level.min() <= LEAST_VOLTAGE:
                continue
            solution = _solve_at(
                trial,
                terms,
                gram,
                how,
                signed,
                penalty,
            )
            if solution.squares < best.squares:
                lower = solution
                break
        if lower is None:  # no share of the step lowers the sum of squares
            return best
        gain = (best.squares - lower.squares) / max(best.squares, 1e-300)
        best = lower
        if gain < CONVERGED:
            return best
    return replace(best, converged=False)


def _solve_at(
    theta: Array,
    terms: ModelTerms,
    gram: Array,
    how: VoltagePlan,
    signed: tuple[bool, ...],
    penalty: Array | None,
) -> InferredVoltages:
    """Solve the costs at the voltages of θ, and return them with the sum of squares."""
    voltage, _ = how.voltages(theta)
    total = sum_at_voltage(terms, gram, voltage)
    costs = solve_costs(total[:-1, :-1], total[:-1, -1], signed, penalty)
    error = np.append(-costs, 1.0)
    pull = float(costs @ penalty @ costs) if penalty is not None else 0.0
    return InferredVoltages(costs, theta, voltage, float(error @ total @ error) + pull)


def fit_jacobian(
    terms: ModelTerms,
    how: VoltagePlan,
    theta: Array,
    coefficient: Array,
) -> Array:
    """Return the fit's columns in terms of the raw columns, ``(point, term + 1, term + parameter +
    1)``.

    They are the derivatives of P with respect to costs and θ; the last is the linearised target P +
    J_θ·θ."""
    voltage, slope = how.voltages(theta)
    felt, derivative = terms.voltage_factors(voltage)
    width = coefficient.size
    rail = np.where(terms.exponent > 0, terms.rail, 0)
    by_voltage = (coefficient * derivative)[:, :, np.newaxis]
    by_theta = by_voltage * slope[:, rail, :]  # (point, term, parameter)
    columns = np.zeros((felt.shape[0], width + 1, width + theta.size + 1))
    index = np.arange(width)
    columns[:, index, index] = felt
    columns[:, :width, width:-1] = by_theta
    columns[:, :width, -1] = by_theta @ theta
    columns[:, width, -1] = 1.0
    return columns


def project_grams(gram: Array, columns: Array) -> Array:
    """Return Σ_p Mᵀ_p·G_p·M_p over the points p."""
    wide = (gram @ columns).reshape(-1, columns.shape[-1])
    return np.asarray(columns.reshape(-1, columns.shape[-1]).T @ wide)


def sum_at_voltage(
    terms: ModelTerms,
    gram: Array,
    voltage: Array,
) -> Array:
    """Return the Gram of all points at their voltages, ``(term + 1, term + 1)``; the target is
    last.
    """
    felt, _ = terms.voltage_factors(voltage)
    whole = np.concatenate([felt, np.ones((felt.shape[0], 1))], axis=1)
    return np.asarray((gram * whole[:, :, np.newaxis] * whole[:, np.newaxis, :]).sum(axis=0))


@cache
def _floor_matrix(count: int) -> Array:
    """Return the matrix from rises of the floor to the floor at each memory clock, ``(memory clock,
    rise)``.

    The floor never falls as memory speeds up; at the slowest memory clock there is none, because
    there the curve itself shows where the voltage stops falling."""
    return np.concatenate([np.zeros((1, count)), -np.triu(np.ones((count, count)))])
