"""The values of a prediction: latency, power, energy and clock, by module, operator and phase.

What writes a prediction as text, JSON or tables takes ``PredictionValues``; users meet it as
``Prediction``, which can also write itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    TypeAlias,
    cast,
)

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Mask,
    sweep_values,
)
from wattcast.core.strict_files import FitStatus, Provenance
from wattcast.power.activity import (
    Activity,
    ActivitySource,
    module_utilisation,
)
from wattcast.power.power_model import mean_power_w
from wattcast.predictor.governor import GovernedStretch
from wattcast.predictor.prediction_basis import PredictionBasis
from wattcast.predictor.prediction_interval import PredictionInterval, compute_interval
from wattcast.predictor.prices import Prices
from wattcast.predictor.support_distances import (
    Support,
    SupportDistance,
    judge_support,
    measure_distances,
)
from wattcast.workload.operator_base import Operator

if TYPE_CHECKING:
    from wattcast.predictor.part_shares import PartShare

# A float for one configuration, an array ``(*sweep,)`` for a sweep. A union would make users tell
# mypy which it is.
Values: TypeAlias = Any


@dataclass(frozen=True)
class ModuleShare:
    """Mean watts of one part of the power, and its utilisation where a peak is known."""

    name: str
    power_w: Values
    utilisation: Values | None


@dataclass(frozen=True)
class OperatorShare:
    """Calls of one distinct operator, and time, mean power and energy of all of them."""

    op: Operator
    count: int
    latency_s: Values
    power_w: Values
    energy_j: Values
    basis: PredictionBasis = field(repr=False, compare=False)
    row: int

    @property
    def modules(self) -> tuple[ModuleShare, ...]:
        """The power of the operator by module."""
        detail = self.basis.detail
        utilisation = self.basis.kernel_utilisation
        modules = []
        for part, name in enumerate(detail.parts):
            busy = utilisation[name][..., self.row] if name in utilisation else None
            power_w = detail.kernel_part_w[..., self.row, part]
            modules.append(_make_module_share(name, power_w, busy))
        return tuple(modules)


def _make_module_share(
    name: str,
    power_w: Array,
    busy: Array | None,
) -> ModuleShare:
    return ModuleShare(name, to_plain(power_w), None if busy is None else to_plain(busy))


@dataclass(frozen=True)
class PhaseShare:
    """A part of a run that the power governor holds at a clock of its own: a prefill, the decode
    steps after it.
    """

    name: str
    latency_s: Values
    power_w: Values  # mean over its time, of one GPU
    clock_hz: Values  # mean over its time
    capped: bool | Mask

    @property
    def energy_j(self) -> Values:
        """Joules of one GPU."""
        return self.power_w * self.latency_s


@dataclass(frozen=True, repr=False)
class PredictionValues:
    """Latency, power, energy and clock of a workload; ``Prediction`` says what each one means.

    Parts of the power, operators, interval and support are computed when they are read.
    """

    name: str
    gpu: str
    latency_s: Values
    power_w: Values
    energy_j: Values
    clock_hz: Values  # as NVML would report it
    effective_clock_hz: Values
    capped: bool | Mask
    busy_s: Values
    memory_byte: float | None
    fits: bool | None  # in the GPU's memory (in every point of a sweep); None: unknown
    assumptions: tuple[str, ...]
    status: FitStatus
    provenance: Provenance
    basis: PredictionBasis = field(repr=False, compare=False)
    prices: Prices = field(default_factory=Prices, repr=False)

    @property
    def stack(self) -> str:
        """The software that issues the kernels; empty where a list of operators does not say."""
        return self.basis.graph.stack

    @property
    def gpu_count(self) -> int:
        """GPUs that run the workload together."""
        return self.basis.graph.gpu_count

    @property
    def tokens(self) -> int | None:
        """Tokens of one run on all GPUs; None where the workload has none."""
        return self.basis.graph.tokens

    @property
    def items(self) -> int | None:
        """Pictures, denoising steps or audio clips of one run on all GPUs; None where there are
        none.
        """
        return self.basis.graph.items

    @property
    def tokens_per_s(self) -> Values | None:
        """Tokens per second of all GPUs together."""
        return None if self.tokens is None else self.tokens / self.latency_s

    @property
    def items_per_s(self) -> Values | None:
        """Items per second of all GPUs together."""
        return None if self.items is None else self.items / self.latency_s

    @property
    def total_power_w(self) -> Values:
        """Mean power of all GPUs."""
        return self.power_w * self.gpu_count

    @property
    def total_energy_j(self) -> Values:
        """Energy of one run on all GPUs."""
        return self.energy_j * self.gpu_count

    @property
    def energy_j_per_token(self) -> Values | None:
        """Joules of all GPUs per token."""
        return None if self.tokens is None else self.total_energy_j / self.tokens

    @property
    def energy_j_per_item(self) -> Values | None:
        """Joules of all GPUs per item."""
        return None if self.items is None else self.total_energy_j / self.items

    @property
    def cost(self) -> Values | None:
        """Money for one run on all GPUs, in ``prices.currency``; None where no price is known."""
        return self.prices.cost(self.gpu, self.total_energy_j, self.latency_s * self.gpu_count)

    @property
    def cost_per_million_tokens(self) -> Values | None:
        """Money for a million tokens; None where no price is known, or there are no tokens."""
        if self.cost is None or self.tokens is None:
            return None
        return self.cost / self.tokens * 1e6

    @property
    def carbon_g(self) -> Values | None:
        """Grams of CO2 equivalent of one run on all GPUs; None where no carbon intensity is
        known.
        """
        return self.prices.carbon_g(self.total_energy_j)

    @cached_property
    def peak_power_w(self) -> Values:
        """The most that any kernel draws, of one GPU."""
        return to_plain(np.broadcast_to(self.basis.detail.peak_w, np.shape(self.power_w)))

    @cached_property
    def modules(self) -> tuple[ModuleShare, ...]:
        """The power by module."""
        basis = self.basis
        totals = basis.totals
        run_as_one_interval = Activity(
            totals.latency_s[..., np.newaxis],
            basis.timeline.total[..., np.newaxis, :],
            basis.timeline.events,
            basis.at,
            ActivitySource.PREDICTED,
        )
        clock_hz = totals.effective_hz[..., np.newaxis]
        utilisation = module_utilisation(run_as_one_interval, basis.gpu, clock_hz)
        power_w = mean_power_w(basis.detail.part_j, totals.latency_s[..., np.newaxis])
        modules = []
        for part, name in enumerate(basis.detail.parts):
            busy = utilisation[name][..., 0] if name in utilisation else None
            modules.append(_make_module_share(name, power_w[..., part], busy))
        return tuple(modules)

    @cached_property
    def phases(self) -> tuple[PhaseShare, ...]:
        """The parts of one run that settle at clocks of their own, in order; empty where all of it
        has one clock.

        A sweep has none: its points may be divided in different ways.
        """
        divisions = self.basis.divisions
        if len(divisions) != 1 or self.basis.totals.power_w.ndim:
            return ()
        by_name: dict[str, list[GovernedStretch]] = {}
        for part in divisions[0].stretches:
            name = part.stretch.name
            if self.basis.graph.phase == "generate" and not self.basis.graph.parts:
                # what comes before the decode steps of a generation is its prefill
                name = name.replace("forward", "prefill")
            by_name.setdefault(name, []).append(part)
        return tuple(_sum_phase(name, parts) for name, parts in by_name.items())

    @cached_property
    def parts(self) -> tuple[PartShare, ...]:
        """The parts of a whole picture or clip, which add up to it; empty for other workloads."""
        if not self.basis.graph.parts:
            return ()
        from wattcast.predictor.part_shares import share_parts  # few predictions are of pictures

        return share_parts(self.basis)

    @cached_property
    def ops(self) -> tuple[OperatorShare, ...]:
        """The distinct operators, in order of appearance."""
        return self._share_operators(self.basis.timeline.kernels.appearance)

    def rank_ops(self, most: int | None = None) -> tuple[OperatorShare, ...]:
        """Return the distinct operators of one configuration that take most energy, the largest
        first.
        """
        rows = self.basis.timeline.kernels.appearance
        spent_j = (self.basis.detail.kernel_j * self.basis.timeline.calls)[rows]
        order = np.argsort(-spent_j, kind="stable")
        return self._share_operators(rows[order[:most]])

    def _share_operators(self, rows: npt.NDArray[np.intp]) -> tuple[OperatorShare, ...]:
        timeline = self.basis.timeline
        detail = self.basis.detail
        calls = timeline.calls[rows]
        spent_s = _split_columns(detail.kernel_s[..., rows] * calls)
        power_w = _split_columns(detail.kernel_part_w[..., rows, :].sum(axis=-1))
        spent_j = _split_columns(detail.kernel_j[..., rows] * calls)
        counts = calls.tolist()
        shares = []
        for place, row in enumerate(rows.tolist()):
            shares.append(
                OperatorShare(
                    timeline.kernels.ops[row],
                    int(counts[place]),
                    spent_s[place],
                    power_w[place],
                    spent_j[place],
                    self.basis,
                    row,
                )
            )
        return tuple(shares)

    @cached_property
    def interval(self) -> PredictionInterval:
        """How far off latency, power and energy may be."""
        return compute_interval(self.basis, self._distances)

    @cached_property
    def support(self) -> Support:
        """How far this is from what was measured: ``measured``, ``near`` or ``far``, and why."""
        return judge_support(self.basis, self._distances)

    @cached_property
    def _distances(self) -> tuple[SupportDistance, ...]:
        """The distance in each respect in which the workload differs from what was measured."""
        return measure_distances(self.basis)


def _split_columns(values: Array) -> Sequence[Values]:
    """Return the values of each kernel of ``(*sweep, kernel)``: floats, or arrays ``(*sweep,)``."""
    if values.ndim == 1:
        return cast("list[float]", values.tolist())
    return cast("Sequence[Array]", np.moveaxis(values, -1, 0))


def _sum_phase(name: str, parts: Sequence[GovernedStretch]) -> PhaseShare:
    """Add up stretches of one name."""
    latency_s = 0.0
    energy_j = 0.0
    cycles = 0.0
    capped = False
    for part in parts:
        part_s = float(part.totals.latency_s)
        latency_s += part_s
        energy_j += float(part.totals.energy_j)
        cycles += float(sweep_values(part.run.clock_hz)) * part_s
        capped = capped or bool(part.capped)
    return PhaseShare(
        name,
        latency_s,
        energy_j / latency_s,
        cycles / latency_s,
        capped,
    )


def to_plain(values: npt.NDArray[Any]) -> Any:
    """Return the number of one configuration as Python's own, and arrays of a sweep as they are."""
    return values.item() if values.ndim == 0 else values
