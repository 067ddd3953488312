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
from dataclasses import dataclass
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
GRAM_JITTER = (
    1e-12  # of a unit diagonal: lets an unseen column be factored; too small to move a seen one
)
SINGULAR_EIGENVALUE = (
    1e-9  # smallest eigenvalue of the Gram of unit columns that still counts as full rank
)
MOST_VOLTAGE_STEPS = 30
CONVERGED = 1e-6  # relative fall of the sum of squares
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
    rows: list[tuple[str, Array, int, int, bool, tuple[int, ...]]] = []

    def add(
        name: str,
        value: Array,
        power: int = 0,
        rail: int = NO_RAIL,
        signed: bool = False,
        members: tuple[int, ...] = (),
    ) -> None:
        """Add a term; a measured voltage is multiplied into its column."""
        value = np.broadcast_to(value, (table.rows,))
        measured_v = table.voltage_v.get(RAILS[rail]) if rail != NO_RAIL else None
        if measured_v is not None:
            value = value * measured_v**power
            power = 0
        rows.append((name, value, 0 if rail >= len(INFERABLE) else power, rail, signed, members))

    add("base", np.ones(1))
    clocks = {"core": table.clock_hz, "memory": table.memory_clock_hz}
    on_rails = model in (CounterModelKind.ALPHA_C, CounterModelKind.HYBRID)
    if model is CounterModelKind.LINEAR:
        for name, clock_hz in clocks.items():
            if np.ptp(clock_hz) > 0:
                add(f"{name} clock", clock_hz)
    for rail, name in enumerate(RAILS) if on_rails else ():
        # leakage is told from base power by a voltage that varies; that of memory hardly moves
        # [Stokke2016]
        varies = table.voltage_v.get(name, table.clock_hz if name == "core" else np.ones(1))
        if np.ptp(varies) > 0:
            add(f"{name} leakage", np.ones(1), 1, rail)
        if name not in INFERABLE:
            continue
        if np.ptp(clocks[name]) > 0:
            add(f"{name} clock", clocks[name], 2, rail)
            for named_hz in offset_hz if name == "memory" else ():
                add(offset_name(named_hz), (clocks[name] == named_hz) * 1.0, signed=True)
        if model is CounterModelKind.ALPHA_C and any(p.rail == name for p in table.predictors):
            add(f"{name} dynamic", table.share(name) * clocks[name], 2, rail)
    if model is CounterModelKind.HYBRID and has_idle_rows(table):
        add(ACTIVE_CYCLE, table.busy() * table.clock_hz, 2, RAILS.index("core"))
    if model is not CounterModelKind.ALPHA_C:
        keys = [(p.rail, p.family if tied and p.family else p.event) for p in table.predictors]
        for key in dict.fromkeys(keys):
            members = tuple(i for i, other_key in enumerate(keys) if other_key == key)
            name = table.predictors[members[0]].event if len(members) == 1 else f"{key[1]} events"
            value = table.occurrence[:, list(members)].sum(axis=1)
            add(name, value, 2 if on_rails else 0, RAILS.index(key[0]), members=members)
    names, values, powers, rails, signs, sources = zip(*rows, strict=True)
    return ModelTerms(
        names, np.stack(values, axis=1), np.array(powers), np.array(rails), signs, sources
    )


def offset_name(clock_hz: float) -> str:
    """Return the name of the offset at a memory clock."""
    return f"memory offset {clock_hz / 1e6:g} MHz"


def describe_missing_terms(table: CounterTable) -> list[str]:
    """Return sentences on the terms that the table cannot identify."""
    words = []
    for name, clock_hz in (("core", table.clock_hz), ("memory", table.memory_clock_hz)):
        if np.ptp(clock_hz) == 0:
            words.append(
                f"The {name} clock is the same in every row: leakage, clock power and "
                f"voltage of the {name} rail "
                "cannot be told from base power, and no voltage is inferred."
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
        few = int(benchmarks.sum()) <= benchmarks.size // 2
        total = (
            self.cell[benchmarks].sum(axis=0)
            if few
            else self.total - self.cell[~benchmarks].sum(axis=0)
        )
        return np.asarray(total if points is None else total * points[:, np.newaxis, np.newaxis])

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
    scale = np.abs(design.value).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    row = np.concatenate(
        [design.value / scale / table.power_w[:, np.newaxis], np.ones((table.rows, 1))], axis=1
    )
    if weight is not None:
        row = row * np.sqrt(weight)[:, np.newaxis]
    shape = (table.benchmarks, clock_hz.size)
    at = table.benchmark * clock_hz.size + point
    cell = np.zeros((shape[0] * shape[1], row.shape[1], row.shape[1]))
    np.add.at(cell, at, row[:, :, np.newaxis] * row[:, np.newaxis, :])
    count = np.bincount(at, minlength=shape[0] * shape[1]).astype(float)
    return GramCells(
        cell.reshape(*shape, *cell.shape[1:]),
        count.reshape(shape),
        scale,
        design,
        clock_hz,
        memory_clock_hz,
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
    out = np.zeros((len(design.names), len(design.names)))
    for rail in np.unique(design.rail[design.rail >= 0]):
        on = [j for j, members in enumerate(design.members) if members and design.rail[j] == rail]
        term = [j for j in on if full[list(design.members[j])].max() > 0]
        if len(term) < 2:
            continue
        families = tuple(
            table.predictors[design.members[j][0]].family or design.names[j] for j in term
        )
        at_full = np.array([full[list(design.members[j])].max() for j in term]) / scale[term]
        out[np.ix_(term, term)] = at_full[:, np.newaxis] * family_penalty(families) * at_full
    return out * firmness * (TYPICAL_MISS / TYPICAL_SPREAD / mean_w) ** 2


@cache
def family_penalty(families: tuple[str, ...]) -> Array:
    """Return S of the pull to family means and of those to the rail mean, with the means
    eliminated.

    >>> family_penalty(("a", "a")).round(3).tolist()
    [[0.5, -0.5], [-0.5, 0.5]]
    """
    names = list(dict.fromkeys(families))
    member = np.array([[family == name for name in names] for family in families], dtype=float)
    k, f = member.shape
    # unknowns: w (k), family means (f), rail mean (1)
    to_family = np.concatenate([np.eye(k), -member, np.zeros((k, 1))], axis=1)
    to_rail = np.concatenate([np.zeros((f, k)), np.eye(f), -np.ones((f, 1))], axis=1)
    whole = to_family.T @ to_family + to_rail.T @ to_rail
    return np.asarray(whole[:k, :k] - whole[:k, k:] @ np.linalg.solve(whole[k:, k:], whole[k:, :k]))


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
    factor = np.linalg.cholesky(
        full / unit / unit[:, np.newaxis] + GRAM_JITTER * np.eye(unit.size)
    ).T
    target = dtrtrs(factor, moment / unit, trans=1)[0]
    free = np.flatnonzero(signed)
    if free.size == unit.size:
        scaled = dtrtrs(factor, target)[0]
    else:
        parts, _ = nnls(
            np.concatenate([factor, -factor[:, free]], axis=1), target, maxiter=100 * unit.size
        )
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
    empty = [name for name, size in zip(names, np.diag(gram), strict=True) if size == 0]
    if empty:
        raise BadInput(
            f"{where}: {', '.join(empty)}: zero in every row. Leave it out, or measure "
            "work that uses it."
        )
    value, vector = np.linalg.eigh(gram / unit / unit[:, np.newaxis])
    if value[0] > SINGULAR_EIGENVALUE:
        return
    share = np.abs(vector[:, 0])
    involved = [name for name, s in zip(names, share, strict=True) if s > 0.1 * share.max()]
    raise BadInput(
        f"{where}: singular design: {', '.join(involved)} move together in every row, so "
        "their costs cannot be told "
        "apart. Leave one out, tie them as one family, or add a benchmark that moves one "
        "without the others."
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
        flat = of_memory = RailVoltage.constant()
        if memory:
            of_memory = RailVoltage(self.memory.hz, 1.0 + self.memory.steps @ theta[core + floor :])
        if not core:
            return flat, of_memory
        core_level = 1.0 + self.core.steps @ theta[:core]
        if not floor:
            return RailVoltage(self.core.hz, core_level), of_memory
        memory_level = np.maximum(
            1.0 + _floor_matrix(floor) @ theta[core : core + floor], core_level[0]
        )
        memory_level[0] = core_level[0]
        return RailVoltage(self.core.hz, core_level, self.memory.hz, memory_level), of_memory


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
    axes = []
    clocks = (grams.clock_hz, core_reference_hz), (grams.memory_clock_hz, memory_reference_hz)
    for rail, (clock_hz, reference_hz) in enumerate(clocks):
        hz, at = np.unique(clock_hz, return_inverse=True)
        felt = bool(((grams.terms.rail == rail) & (grams.terms.exponent > 0)).any())
        axes.append(
            ClockAxis(
                hz, at.reshape(-1), int(np.abs(hz - reference_hz).argmin()), felt and hz.size > 1
            )
        )
    core, memory = axes
    return VoltagePlan(core, memory, floored and memory.hz.size > 1)


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

    def solve_at(voltage: Array) -> tuple[Array, float]:
        total = sum_at_voltage(terms, gram, voltage)
        costs = solve_costs(total[:-1, :-1], total[:-1, -1], signed, penalty)
        error = np.append(-costs, 1.0)
        pull = float(costs @ penalty @ costs) if penalty is not None else 0.0
        return costs, float(error @ total @ error) + pull

    theta = how.start()
    voltage, _ = how.voltages(theta)
    coefficient, squares = solve_at(voltage)
    flags = (*signed, *(False,) * theta.size)
    wide = None if penalty is None else np.pad(penalty, (0, theta.size))
    for _ in range(MOST_VOLTAGE_STEPS if theta.size else 0):
        total = project_grams(gram, fit_jacobian(terms, how, theta, coefficient))
        aim = solve_costs(total[:-1, :-1], total[:-1, -1], flags, wide)[coefficient.size :]
        for share in STEP_SHARES:
            trial = theta + share * (aim - theta)
            level, _ = how.voltages(trial)
            if level.min() <= 0.05:
                continue
            tried, fallen = solve_at(level)
            if fallen < squares:
                break
        else:
            break  # no share of the step lowers the sum
        gain = (squares - fallen) / max(squares, 1e-300)
        theta = trial
        voltage = level
        coefficient = tried
        squares = fallen
        if gain < CONVERGED:
            break
    else:
        return InferredVoltages(coefficient, theta, voltage, squares, converged=theta.size == 0)
    return InferredVoltages(coefficient, theta, voltage, squares)


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
    by_theta = (coefficient * derivative)[:, :, np.newaxis] * slope[
        :, rail, :
    ]  # (point, term, parameter)
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
