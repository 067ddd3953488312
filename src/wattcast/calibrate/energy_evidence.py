"""Weigh what is known of a card's energies: physics carried over, and watts of several kinds.

The prior is the card's forecast: energies of another card, carried over by process, voltage, kind
of memory and width of an SM. Its own watts are evidence. With r_m the factor of module m on the
prior's energies and r_0 that of idle power,

    log P_i = log(r_0·P_idle,i + Σ_m r_m·P_m,i) + b_kind(i) + ε_i
    log r_m = c + d_m,   c ~ N(0, τ_c²),   d_m ~ N(0, τ_m²),   log r_0 ~ N(0, τ_0²)
    b_kind ~ N(0, σ_kind²),   ε_i ~ Student's t of width σ

P_m,i are watts of the prior at the time and clock that were measured, so that errors of time stay
out. Rows of one kind share an error b: operands of zeros, a sensor that lags behind short runs, a
prompt whose length nobody published. However many rows there are of one kind, they cannot say more
than σ_kind allows, so a few products never set the energies of everything that a card runs. Modules
that the rows do not exercise keep the prior, moved by what the card as a whole shows.

The answer is the r of highest posterior density, by Gauss and Newton, with its covariance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.calibrate.kernel_rows import KernelRows, settled_figures
from wattcast.calibrate.row_prediction import measure_parts
from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.predictor.bundle.bundle_file import Bundle

STEPS = 30
_FARTHEST = 0.3  # of one step, in logs
PRODUCTS = "products"
SERVING = "serving"


class EnergyEvidenceCoefficients(Coefficients):
    """How far a forecast of energies may be off, and how far watts of one kind of run, in logs."""

    card: float
    module: float
    idle: float
    same_processor: float
    kind_kernels: float
    kind_steps: float
    kind_serving: float
    row: float
    student_freedom: float


EVIDENCE = load_coefficients("energy_evidence", EnergyEvidenceCoefficients)


@dataclass(frozen=True)
class EnergyEvidence:
    """The watts of one run, and the watts of each part by the prior at the run's own time."""

    kind: str  # what its error is shared with: a family of kernels, steps, serving
    measured_w: float
    idle_w: float
    module_w: Mapping[str, float]

    @property
    def kind_spread(self) -> float:
        """Return how far watts of this kind may be off together, as a deviation of logs."""
        if self.kind == SERVING:
            return EVIDENCE.kind_serving
        return EVIDENCE.kind_steps if self.kind == "steps" else EVIDENCE.kind_kernels


@dataclass(frozen=True)
class EnergyPosterior:
    """Factors on a prior's energies that its evidence supports, and how sure each is."""

    factors: Mapping[str, float]  # by module
    idle_factor: float
    deviation: Mapping[str, float]  # of the logarithm of each, idle power among them
    rows: Mapping[str, int]  # of each kind

    def move(self, bundle: Bundle) -> Bundle:
        """Return a bundle with these factors on its energies; without evidence it stays as it
        is.
        """
        if not self.rows:
            return bundle
        power = bundle.power.scale_energy(self.factors, idle_factor=self.idle_factor)
        return replace(bundle, power=power)

    def describe(self) -> str:
        """Say in a few words what was weighed and what came of it."""
        if not self.rows:
            return "energies: carried over, no watts of this card are known"
        kinds = ", ".join(f"{count} of {kind}" for kind, count in self.rows.items())
        factors = list(self.factors.values())
        reach = f"{min(factors):.2f} to {max(factors):.2f}"
        return (
            f"energies: carried over and weighed with watts of {sum(self.rows.values())} runs "
            f"({kinds}), which move them by {reach}, idle power by {self.idle_factor:.2f}"
        )


def weigh_energies(
    evidence: Sequence[EnergyEvidence],
    modules: Sequence[str],
    distance: float = 1.0,
) -> EnergyPosterior:
    """Return the factors on the energies of modules that the prior and its evidence make likeliest.

    ``distance`` scales how far the prior may be off: 1 for energies carried over by physics, less
    for those of a card with the same processor.
    """
    kinds = list(dict.fromkeys(item.kind for item in evidence))
    problem = _make_problem(evidence, tuple(modules), kinds, distance)
    theta = np.zeros(len(problem.prior))
    weight = np.ones(len(evidence))
    for _ in range(STEPS):
        residual, jacobian = problem.linearise(theta)
        hessian = (jacobian * weight[:, None]).T @ jacobian + np.diag(problem.prior**-2.0)
        slope = jacobian.T @ (weight * residual) - theta * problem.prior**-2.0
        step = np.clip(np.linalg.solve(hessian, slope), -_FARTHEST, _FARTHEST)
        theta = theta + step
        residual, _ = problem.linearise(theta)
        freedom = EVIDENCE.student_freedom
        weight = (freedom + 1.0) / (freedom + residual**2)
        if np.abs(step).max() < 1e-6:
            break

    _, jacobian = problem.linearise(theta)
    hessian = (jacobian * weight[:, None]).T @ jacobian + np.diag(problem.prior**-2.0)
    covariance = np.linalg.inv(hessian)
    shift = np.exp(theta[0] + theta[1 : 1 + len(modules)])
    deviation = {"idle": float(np.sqrt(covariance[-1 - len(kinds), -1 - len(kinds)]))}
    for place, module in enumerate(modules, start=1):
        variance = covariance[0, 0] + covariance[place, place] + 2.0 * covariance[0, place]
        deviation[module] = float(np.sqrt(variance))
    return EnergyPosterior(
        factors=dict(zip(modules, shift.tolist(), strict=True)),
        idle_factor=float(np.exp(theta[1 + len(modules)])),
        deviation=deviation,
        rows={kind: sum(item.kind == kind for item in evidence) for kind in kinds},
    )


@dataclass(frozen=True)
class _Problem:
    """Rows as arrays, and the prior deviations of all parameters: card, modules, idle, kinds."""

    log_measured: Array  # (row,)
    idle_w: Array  # (row,)
    module_w: Array  # (row, module)
    of_kind: Array  # (row, kind)
    prior: Array  # (parameter,)

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Return the residuals over their own deviation, and their slopes with the sign of the
        model's.
        """
        modules = self.module_w.shape[1]
        moved_w = self.module_w * np.exp(theta[0] + theta[1 : 1 + modules])
        still_w = self.idle_w * np.exp(theta[1 + modules])
        total_w = still_w + moved_w.sum(axis=-1)
        error = self.of_kind @ theta[2 + modules :]
        residual = self.log_measured - np.log(total_w) - error
        share = moved_w / total_w[:, None]
        columns = (
            share.sum(axis=-1, keepdims=True),
            share,
            (still_w / total_w)[:, None],
            self.of_kind,
        )
        return residual / EVIDENCE.row, np.concatenate(columns, axis=-1) / EVIDENCE.row


def _make_problem(
    evidence: Sequence[EnergyEvidence],
    modules: tuple[str, ...],
    kinds: Sequence[str],
    distance: float,
) -> _Problem:
    spread_of = {item.kind: item.kind_spread for item in evidence}
    module_w = [[item.module_w.get(module, 0.0) for module in modules] for item in evidence]
    of_kind = [[float(item.kind == kind) for kind in kinds] for item in evidence]
    deviations = np.array([EVIDENCE.card, *[EVIDENCE.module] * len(modules), EVIDENCE.idle])
    prior = distance * deviations
    return _Problem(
        log_measured=np.log([item.measured_w for item in evidence]),
        idle_w=np.array([item.idle_w for item in evidence]),
        module_w=np.array(module_w).reshape(len(evidence), len(modules)),
        of_kind=np.array(of_kind).reshape(len(evidence), len(kinds)),
        prior=np.array([*prior, *(spread_of[kind] for kind in kinds)]),
    )


def scalable_modules(bundle: Bundle) -> tuple[str, ...]:
    """Return the parts of a bundle's power that are joules of events, and not idle power."""
    power = bundle.power
    return tuple(part for part in power.parts if part in power.scalable_parts)


def kernel_evidence(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
) -> list[EnergyEvidence]:
    """Return the evidence that sustained rows of kernels hold; the prior is the bundle's power."""
    measured_w, _, _ = settled_figures(rows)
    part_w = measure_parts(rows, gpu, bundle)
    modules = scalable_modules(bundle)
    evidence = []
    for row, family in enumerate(rows.family):
        watts = dict(zip(bundle.power.parts, part_w[row].tolist(), strict=True))
        module_w = {module: watts.pop(module) for module in modules}
        kind = PRODUCTS if family == "gemm" else family
        evidence.append(EnergyEvidence(kind, float(measured_w[row]), sum(watts.values()), module_w))
    return evidence
