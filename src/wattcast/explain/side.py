"""One side of a comparison: totals, and parts (operators, or families of kernels) that add up to them.

A prediction knows its operators, their energy and its modules. A measured whole model knows how long its
families of kernels ran, where the profiler saw them. A measured run knows its totals alone. What a side
does not know is None or empty, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wattcast.prediction import Prediction


@dataclass(frozen=True)
class Part:
    """An operator (all its calls), or a family of kernels."""

    name: str  # for people: the operator and its sizes, or the family
    key: tuple[str, ...]  # equal on both sides where it is the same work: name and shape
    place: tuple[str, ...]  # name and where in the model, for work whose shape changed
    words: tuple[str, ...]  # what of the shape is no size: format, layout
    family: str
    calls: float
    seconds: float
    joules: float | None = None
    module_j: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """Totals of one iteration and what they are made of."""

    name: str
    measured: bool
    latency_s: float
    power_w: float
    clock_hz: float | None  # as NVML reports it
    effective_hz: float | None
    parts: tuple[Part, ...]
    module_j: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def energy_j(self) -> float:
        """Joules of one iteration."""
        return self.power_w * self.latency_s

    @property
    def gap_s(self) -> float:
        """Time in no part: the device waits."""
        return self.latency_s - sum(part.seconds for part in self.parts)

    @property
    def gap_j(self) -> float:
        """Energy in no part."""
        return self.energy_j - sum(part.joules or 0.0 for part in self.parts)

    @property
    def has_energy(self) -> bool:
        """Whether every part says what it takes."""
        return bool(self.parts) and all(part.joules is not None for part in self.parts)


_FAMILY = {"linear": "gemm", "bmm": "gemm"}


def of_prediction(p: Prediction) -> Side:
    """A prediction of one point."""
    parts = []
    for share in p.ops:
        seconds, op = float(share.latency_s), share.op
        parts.append(
            Part(
                str(op),
                (op.name, repr(op)),
                (op.name, op.label),
                tuple(f"{k}={v}" for k, v in vars(op).items() if type(v) is not int and k != "label"),
                _FAMILY.get(op.kind, op.kind),
                float(share.count),
                seconds,
                float(share.energy_j),
                {module.name: float(module.power_w) * seconds for module in share.modules},
            )
        )
    latency_s = float(p.latency_s)
    return Side(
        f"{p.name} on {p.gpu}",
        False,
        latency_s,
        float(p.power_w),
        float(p.clock_hz),
        float(p.effective_clock_hz),
        tuple(parts),
        {module.name: float(module.power_w) * latency_s for module in p.modules},
        () if p.support.inside else (f"outside what was measured: {p.support.reason}",),
    )


def by_family(side: Side) -> Side:
    """The same side with its parts added up by family, to set beside one that knows only those."""
    found: dict[str, list[Part]] = {}
    for part in side.parts:
        found.setdefault(part.family, []).append(part)
    parts = tuple(_family(name, members) for name, members in found.items())
    return Side(
        side.name,
        side.measured,
        side.latency_s,
        side.power_w,
        side.clock_hz,
        side.effective_hz,
        parts,
        side.module_j,
        side.notes,
    )


def _family(name: str, members: list[Part]) -> Part:
    known = all(part.joules is not None for part in members)
    joules = sum(part.joules or 0.0 for part in members) if known else None
    calls, seconds = sum(part.calls for part in members), sum(part.seconds for part in members)
    modules = dict.fromkeys(module for part in members for module in part.module_j)
    module_j = {module: sum(part.module_j.get(module, 0.0) for part in members) for module in modules}
    return Part(name, (name,), (name,), (), name, calls, seconds, joules, module_j)
