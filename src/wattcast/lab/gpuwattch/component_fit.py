"""Fit the component model to measured power: scaling factors of components, or energies such as
DRAM's.

Both are bounded least squares on relative error,

    min_x  Σ_k ( (a_k·x − p_k) / p_k )² + w·Σ_j (x_j − x0_j)² / s_j²   with  l ≤ x ≤ u,  x_i ≤
    r·x_j,

with p_k the measured watts of kernel k, a_k its components' watts (x: factors, x0 = 1) or its event
rates (x: joules per event). The orderings express physics: a multiplication costs no less than an
addition. Without orderings this is scipy's ``lsq_linear``; with them it is a quadratic program for
Clarabel. GPUWattch's manual (section 2.3) drops kernels shorter than 0.5 ms, whose power is still
rising."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import (
    bad_value,
    check_names,
    import_extra,
    nearest_names,
)
from wattcast.core.option_declaration import Option
from wattcast.core.strict_files import (
    parse_csv,
    read_bytes,
    read_number,
)
from wattcast.lab.gpuwattch.architecture import ChipArchitecture
from wattcast.lab.gpuwattch.component_set import read_component_set
from wattcast.lab.gpuwattch.energy_table import DUTY, EnergyTable
from wattcast.lab.gpuwattch.trace_reading import dialect_counters

SHORTEST_KERNEL_S = 0.5e-3  # manual, section 2.3


@dataclass(frozen=True)
class ValueOrdering:
    """The constraint ``smaller`` ≤ ``ratio`` · ``larger``, for energies and factors alike."""

    smaller: str
    larger: str
    ratio: float = 1.0

    @classmethod
    def read(cls, text: str) -> ValueOrdering:
        """Read ``"SP_ACC<=FPU_ACC"`` or ``"SP_ACC<=1.5*FPU_ACC"``."""
        match = re.fullmatch(r"\s*(\w+)\s*<=\s*(?:([\d.eE+-]+)\s*\*\s*)?(\w+)\s*", text)
        if match is None:
            raise bad_value("ordering", "'A<=B' or 'A<=1.5*B'", text)
        return cls(match[1], match[3], float(match[2] or 1.0))


@dataclass(frozen=True)
class FitConstraints:
    """Bounds, orderings and priors that are declared before the fit; the defaults are of factors of
    watts.
    """

    bounds: tuple[float, float] = (0.5, 2.0)  # a factor of two either way
    # bounds of single names
    special: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    orders: tuple[ValueOrdering, ...] = ()
    start: float = 1.0  # which leaves the model as it stands
    prior_weight: float = 1e-3  # a factor wrong by 1 weighs as much as one kernel wrong by 3 %

    def limits(self, names: Sequence[str]) -> tuple[Array, Array]:
        """Return the lower and upper bound of each name."""
        check_names("component to bound", self.special, names, "")
        pairs = np.array([self.special.get(name, self.bounds) for name in names], dtype=np.float64)
        if not (pairs[:, 0] <= pairs[:, 1]).all() or not (pairs[:, 0] >= 0).all():
            raise bad_value(
                "bounds", "a lower bound of zero or more and an upper one above it", pairs.tolist()
            )
        return pairs[:, 0], pairs[:, 1]

    def rows(self, names: Sequence[str]) -> Array:
        """Return the orderings as rows G of G·x ≤ 0."""
        rows = np.zeros((len(self.orders), len(names)))
        for row, order in zip(rows, self.orders, strict=True):
            check_names("component to order", (order.smaller, order.larger), names, "")
            row[names.index(order.smaller)] = 1.0
            row[names.index(order.larger)] = -order.ratio
        return rows


# of joules per event, such as DRAM's precharge, read and write (manual, section 2.2.8); undriven
# ones stay at zero
ENERGY_CONSTRAINTS = FitConstraints((0.0, np.inf), start=0.0, prior_weight=1e-9)


@dataclass(frozen=True)
class ComponentFitErrors:
    """Mean absolute percentage errors of a fit, in sample and held out."""

    start: float  # before fitting
    in_sample: float
    leave_one_out: float
    leave_application_out: float
    constant: float  # the mean power of the other kernels, for every kernel


@dataclass(frozen=True)
class ComponentFit:
    """Fitted values with their errors."""

    names: tuple[str, ...]
    value: Array
    score: ComponentFitErrors
    kernels: int
    dropped: tuple[str, ...]  # kernels too short
    at_bound: tuple[str, ...]
    determined: tuple[str, ...]  # names the kernels drive at all

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for JSON and YAML."""
        return {
            "values": dict(zip(self.names, self.value.tolist(), strict=True)),
            "mape": vars(self.score).copy(),
            "kernels": self.kernels,
            "dropped": list(self.dropped),
            "at_bound": list(self.at_bound),
            "not_driven": [name for name in self.names if name not in self.determined],
        }


@dataclass(frozen=True)
class MeasuredKernels:
    """Kernels with the quantities that drive their power and their measured watts."""

    kernels: tuple[str, ...]
    applications: tuple[str, ...]
    names: tuple[str, ...]
    drive: Array  # (kernel, name): watts of components, or events per second
    measured_w: Array
    duration_s: Array | None = None  # None: not known, nothing is dropped
    offset_w: Array | float = 0.0  # watts that are not fitted

    def __post_init__(self) -> None:
        if self.drive.shape != (len(self.kernels), len(self.names)) or len(self.kernels) < 2:
            raise bad_value(
                "runs", "at least two kernels, each with every column", self.drive.shape
            )
        if not (
            (self.measured_w > 0).all()
            and np.isfinite(self.drive).all()
            and (self.drive >= 0).all()
        ):
            raise bad_value(
                "runs", "measured watts above zero and drives of zero or more", "others"
            )


def fit_components(
    runs: MeasuredKernels,
    constraints: FitConstraints,
    shortest_s: float = SHORTEST_KERNEL_S,
) -> ComponentFit:
    """Fit factors of components' watts, or with ``ENERGY_CONSTRAINTS`` joules per event, to kernels
    long enough.
    """
    is_long = np.ones(len(runs.kernels), dtype=np.bool_)
    if runs.duration_s is not None:
        is_long = np.asarray(runs.duration_s >= shortest_s)
    kernel_count = int(is_long.sum())
    if kernel_count < 2:
        expectation = f"at least two kernels of {shortest_s * 1e3:g} ms or more"
        raise bad_value("runs", expectation, kernel_count)

    problem = _FitProblem(runs, constraints, is_long)
    value = problem.solve(np.ones(kernel_count, dtype=np.bool_))
    start_w = problem.predict_w(problem.start)
    measured_w = problem.measured_w
    mean_of_others_w = (measured_w.sum() - measured_w) / (kernel_count - 1)
    score = ComponentFitErrors(
        start=problem.mean_error_percent(start_w) if start_w.any() else 100.0,
        in_sample=problem.mean_error_percent(problem.predict_w(value)),
        leave_one_out=problem.held_out_error_percent(range(kernel_count)),
        leave_application_out=problem.held_out_error_percent(
            list(compress(runs.applications, is_long))
        ),
        constant=problem.mean_error_percent(mean_of_others_w),
    )
    is_lowest = np.isclose(value, problem.lower, rtol=1e-6)
    is_highest = np.isclose(value, problem.upper, rtol=1e-6)
    at_bound = np.flatnonzero((is_lowest | is_highest) & (problem.lower < problem.upper))
    determined = np.flatnonzero(runs.drive[is_long].any(axis=0))
    return ComponentFit(
        names=runs.names,
        value=value,
        score=score,
        kernels=kernel_count,
        dropped=tuple(compress(runs.kernels, ~is_long)),
        at_bound=tuple(runs.names[i] for i in at_bound),
        determined=tuple(runs.names[i] for i in determined),
    )


class _FitProblem:
    """The least squares of the module's equation over the kernels that are long enough."""

    def __init__(
        self,
        runs: MeasuredKernels,
        constraints: FitConstraints,
        is_long: Mask,
    ) -> None:
        offset_w = np.asarray(runs.offset_w, dtype=np.float64)
        self.drive = runs.drive[is_long]
        self.measured_w = runs.measured_w[is_long]
        self.offset_w = np.broadcast_to(offset_w, is_long.shape)[is_long]
        self.start = np.full(len(runs.names), constraints.start)
        self.lower, self.upper = constraints.limits(runs.names)
        self.orders = constraints.rows(runs.names)
        self.prior_weight = np.sqrt(constraints.prior_weight)
        # s_j, the natural size of a value: 1 for a factor; for an energy the one that would explain
        # all the power
        largest = self.drive.max(axis=0)
        if (self.start > 0).all():
            self.size = np.ones(self.start.size)
        else:
            explains_all = self.measured_w.mean() / np.maximum(largest, 1e-300)
            self.size = np.where(largest > 0, explains_all, 1.0)

    def solve(self, rows: Mask) -> Array:
        """Return the best values for some of the kernels."""
        measured_w = self.measured_w[rows]
        relative_drive = self.drive[rows] * self.size / measured_w[:, np.newaxis]
        relative_target = 1.0 - (self.offset_w[rows] / measured_w)
        prior = self.prior_weight * np.eye(self.start.size)
        prior_target = self.prior_weight * self.start / self.size
        scaled_value = _solve_bounded(
            np.vstack([relative_drive, prior]),
            np.concatenate([relative_target, prior_target]),
            self.lower / self.size,
            self.upper / self.size,
            self.orders * self.size,
        )
        return self.size * scaled_value

    def predict_w(self, value: Array) -> Array:
        """Return the watts of each kernel."""
        return np.asarray(self.drive @ value + self.offset_w)

    def mean_error_percent(self, predicted_w: Array) -> float:
        """Return the mean absolute percentage error against the measured watts."""
        return float(np.mean(np.abs(predicted_w / self.measured_w - 1.0)) * 100.0)

    def held_out_error_percent(self, groups: Sequence[object]) -> float:
        """Return the error where each kernel is predicted by a fit that never saw its group; NaN
        where there is one group alone.
        """
        predicted_w = np.full(len(self.measured_w), np.nan)
        labels = list(dict.fromkeys(groups))
        if len(labels) > 1:
            for label in labels:
                is_out = np.array([group == label for group in groups])
                value = self.solve(~is_out)
                predicted_w[is_out] = self.drive[is_out] @ value + self.offset_w[is_out]
        return self.mean_error_percent(predicted_w)


def _solve_bounded(
    a: Array,
    b: Array,
    lower: Array,
    upper: Array,
    orders: Array,
) -> Array:
    """Minimise |a·x − b|² within bounds and orderings."""
    if not len(orders):
        return _solve_boxed(a, b, lower, upper)
    clarabel = import_extra("clarabel", "orderings need clarabel", "fit")
    from scipy import sparse

    # ½·xᵀ·P·x + qᵀ·x with P = 2·aᵀ·a and q = −2·aᵀ·b, under rows·x ≤ limits
    has_upper = np.isfinite(upper)
    identity = np.eye(a.shape[1])
    rows = np.vstack([orders, identity[has_upper], -identity])
    limits = np.concatenate([np.zeros(len(orders)), upper[has_upper], -lower])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solver = clarabel.DefaultSolver(
        sparse.csc_matrix(np.triu(2.0 * a.T @ a)),
        -2.0 * a.T @ b,
        sparse.csc_matrix(rows),
        limits,
        [clarabel.NonnegativeConeT(len(rows))],
        settings,
    )
    solution = solver.solve()
    if str(solution.status) not in ("Solved", "AlmostSolved"):
        do = "Do the orderings contradict the bounds?"
        raise bad_value("fit", "bounds and orderings that can all hold", str(solution.status), do)
    best: Array = np.clip(np.array(solution.x, dtype=np.float64), lower, upper)
    return best


def _solve_boxed(
    a: Array,
    b: Array,
    lower: Array,
    upper: Array,
) -> Array:
    """Minimise |a·x − b|² within bounds; a value without room between its bounds is fixed."""
    from scipy.optimize import lsq_linear

    is_free = upper > lower
    value = np.where(is_free, 0.0, lower)
    if is_free.any():
        solution = lsq_linear(
            a[:, is_free],
            b - a @ value,
            bounds=(lower[is_free], upper[is_free]),
            tol=1e-12,
        )
        value[is_free] = solution.x
    return np.asarray(value)


_MAX_BYTE = 256 << 20


@dataclass(frozen=True)
class KernelColumns:
    """The columns of a table of kernels."""

    measured: Annotated[str, Option("Column of measured watts.")]
    kernel: Annotated[str, Option("Column of kernel names.")] = "kernel"
    application: Annotated[
        str | None, Option("Column of programs; default: from the kernel's name.")
    ] = None
    duration: Annotated[str | None, Option("Column of seconds.")] = None
    cycles: Annotated[str | None, Option("Column of cycles, with --clock, instead of seconds.")] = (
        None
    )
    clock_hz: Annotated[float | None, Option("Core clock, such as 1447MHz.", unit="Hz")] = None
    prefix: Annotated[str, Option("Component columns start with this.")] = ""
    leave_out: Annotated[tuple[str, ...], Option("A column not to fit, such as a total.")] = ()


def read_measured_kernels(
    path: Path,
    columns: KernelColumns,
    names: Sequence[str] | None = None,
    rates: bool = False,
) -> MeasuredKernels:
    """Read kernels from a CSV: measured watts, and component watts or (with ``rates``) counts over
    the duration.
    """
    rows = parse_csv(read_bytes(path, _MAX_BYTE), path.name)
    where = path.name
    fitted_names = _choose_columns(list(rows[0]), columns, names, where)

    def read(column: str) -> Array:
        return np.array([read_number(row[column], f"{where}: {column}") for row in rows])

    drive = np.stack([read(columns.prefix + name) for name in fitted_names], axis=-1)
    duration_s = None
    if columns.duration is not None:
        duration_s = read(columns.duration)
    elif columns.cycles is not None and columns.clock_hz is not None:
        duration_s = read(columns.cycles) / columns.clock_hz
    if rates:
        if duration_s is None:
            raise bad_value(where, "a duration, to turn counts into rates", "none")
        drive = drive / duration_s[:, np.newaxis]
    kernels = tuple(row[columns.kernel] for row in rows)
    if columns.application:
        applications = tuple(row[columns.application] for row in rows)
    else:
        applications = tuple(application_of_kernel(kernel) for kernel in kernels)
    return MeasuredKernels(
        kernels,
        applications,
        fitted_names,
        drive,
        read(columns.measured),
        duration_s,
    )


def _choose_columns(
    header: list[str],
    columns: KernelColumns,
    names: Sequence[str] | None,
    where: str,
) -> tuple[str, ...]:
    """Return the columns to fit without their prefix: the named ones, or all that are not left
    out.
    """
    special = {
        columns.measured,
        columns.kernel,
        columns.application,
        columns.duration,
        columns.cycles,
    } - {None}
    for column in special:
        if column not in header:
            close = nearest_names(str(column), header)
            state = f"none; closest: {', '.join(close)}" if close else "none"
            raise bad_value(where, f"a column {column!r}", state)
    prefixed = [name for name in header if name.startswith(columns.prefix) and name not in special]
    drivers = [name.removeprefix(columns.prefix) for name in prefixed]
    listing = f"Columns to fit: {', '.join(drivers)}."
    check_names("column to leave out", columns.leave_out, drivers, listing)
    chosen = names or [name for name in drivers if name not in columns.leave_out]
    missing = [name for name in chosen if columns.prefix + name not in header]
    if not chosen or missing:
        raise bad_value(where, f"columns {columns.prefix}{', '.join(missing) or '*'}", "none")
    return tuple(chosen)


def rates_to_watts(runs: MeasuredKernels, table: EnergyTable) -> MeasuredKernels:
    """Multiply event rates with a table's joules, so that factors of the watts can be fitted.

    ``PIPE_A`` is a duty, not a rate, and costs watts. Constant power of the table (leakage, the
    memory controllers' constant) goes into the offset."""
    joule: dict[str, Array | float] = dict(table.energy_j)
    if runs.duration_s is not None:
        joule[DUTY] = table.duty_w * runs.duration_s  # rates were divided by it
    check_names("counter", runs.names, joule, "Name the columns to fit with --column.")
    drive = np.stack([runs.drive[:, i] * joule[name] for i, name in enumerate(runs.names)], axis=-1)
    leak_w = table.leakage.cores_w + table.leakage.rest_w if table.leakage else 0.0
    return replace(runs, drive=drive, offset_w=runs.offset_w + leak_w + table.mc_constant_w)


def application_of_kernel(kernel: str) -> str:
    """Return the program that a kernel belongs to, from names such as ``mergeSort_k2``.

    >>> names = ["mergeSort_k2", "sad_1", "hotspot"]
    >>> tuple(application_of_kernel(name) for name in names)
    ('mergeSort', 'sad', 'hotspot')
    """
    return re.sub(r"_k?\d+$", "", kernel)


def apply_factors(architecture: ChipArchitecture, factors: Mapping[str, float]) -> ChipArchitecture:
    """Multiply fitted factors of components into an architecture's scaling factors and powers.

    Memory-controller and coalescer factors share their counters with DRAM and the caches, whose
    factor holds."""
    scaling = dict(architecture.scaling)
    parameters = dict(architecture.parameters)
    static = dict(architecture.static)
    by_column = {c.column: c.scaling for c in dialect_counters(architecture.dialect)}
    for component in read_component_set(architecture.dialect).components:
        factor = factors.get(component.name, 1.0)
        if component.static:
            static = {name: value * factor for name, value in static.items()}
        elif component.constant in ("const_dynamic", "constant_power"):
            key = "CONST_DYNAMICN" if component.constant == "const_dynamic" else "constant_power"
            scaling[key] = scaling.get(key, 0.0) * factor
        elif component.name == "IDLE_COREP":
            parameters["idle_core_power"] = architecture.number("idle_core_power") * factor
        elif component.name not in ("MCP", "COALP"):
            for counter in component.terms:
                scaling[by_column[counter]] = architecture.scaling_of(by_column[counter]) * factor
    return replace(
        architecture,
        scaling=scaling,
        parameters=parameters,
        static=static,
    )
