"""Split the difference between two runs into contributions that add up exactly.

A run's time is calls x cycles of a call / clock, summed over its parts, plus gaps. Its energy is
GPUs x time x power while running, plus the energy of gaps. Its mean power is GPUs x share of time x
power while running, plus gaps. Energy and power are those of all GPUs of a run: four GPUs and eight
are compared by what they draw together. Sums split term by term. A product x = Π x_i that goes from
a to b splits by the logarithmic mean [Ang2005]:

    b - a = L(a, b)·Σ ln(b_i / a_i),   L(a, b) = (b - a) / ln(b / a),   L(a, a) = a

so that nothing is left over, and swapping the runs turns every sign. Work that only one run has is
a term of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_json import PredictionOut, predictions_to_output
from wattcast.workload.operator_base import registered_operators


@dataclass(frozen=True)
class RunPart:
    """An operator with all its calls, or a family of kernels: a part of a run's time and energy."""

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
class RunSummary:
    """One iteration of a run, predicted or measured, and the parts it is made of.

    ``power_w``, ``energy_j`` and the parts are those of one GPU; all GPUs of a run are taken to do
    the same."""

    name: str
    measured: bool
    latency_s: float
    power_w: float
    clock_hz: float | None  # as NVML reports it
    effective_hz: float | None
    parts: tuple[RunPart, ...]
    module_j: Mapping[str, float]  # of one GPU
    notes: tuple[str, ...] = ()
    gpu_count: int = 1
    tokens: int | None = None  # of one iteration on all GPUs
    items: int | None = None

    @property
    def energy_j(self) -> float:
        """Joules of one iteration, of one GPU."""
        return self.power_w * self.latency_s

    @property
    def total_power_w(self) -> float:
        """Mean power of all GPUs."""
        return self.gpu_count * self.power_w

    @property
    def total_energy_j(self) -> float:
        """Joules of one iteration on all GPUs."""
        return self.gpu_count * self.energy_j

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all GPUs together; None where there are none."""
        return None if self.tokens is None else self.tokens / self.latency_s

    @property
    def energy_j_per_token(self) -> float | None:
        """Joules of all GPUs per token."""
        return None if self.tokens is None else self.total_energy_j / self.tokens

    @property
    def items_per_s(self) -> float | None:
        """Pictures or other items per second of all GPUs together; None where there are none."""
        return None if self.items is None else self.items / self.latency_s

    @property
    def energy_j_per_item(self) -> float | None:
        """Joules of all GPUs per item."""
        return None if self.items is None else self.total_energy_j / self.items

    @property
    def gap_s(self) -> float:
        """Seconds that belong to no part: the device waits."""
        return self.latency_s - sum(part.seconds for part in self.parts)

    @property
    def gap_j(self) -> float:
        """Joules that belong to no part."""
        return self.energy_j - sum(part.joules or 0.0 for part in self.parts)

    @property
    def has_energy(self) -> bool:
        """Whether the energy of every part is known."""
        return bool(self.parts) and all(part.joules is not None for part in self.parts)


def summarise_prediction(p: Prediction) -> RunSummary:
    """Summarise a prediction of one point, operator by operator."""
    return summarise_output(predictions_to_output([p]).predictions[0])


def summarise_output(p: PredictionOut) -> RunSummary:
    """Summarise a prediction as ``predict --json`` writes it."""
    kinds = registered_operators()
    parts = tuple(
        RunPart(
            op.operator,
            (op.name, op.label, msgspec.json.encode(op.shape, order="sorted").decode()),
            (op.name, op.label),
            tuple(f"{k}={v}" for k, v in op.shape.items() if type(v) is not int),
            kinds[op.name].family
            if op.name in kinds
            else "elementwise",  # which have the names of their functions
            float(op.count),
            op.latency_s,
            op.energy_j,
            {module.name: module.power_w * op.latency_s for module in op.modules},
        )
        for op in p.ops
    )
    module_j = {module.name: module.power_w * p.latency_s for module in p.modules}
    notes = () if p.support.inside else (f"far from what was measured: {p.support.reason}",)
    totals = (p.latency_s, p.power_w, p.clock_hz, p.effective_clock_hz)
    count = f"{p.gpu_count} x " if p.gpu_count > 1 else ""
    counted = (p.gpu_count, p.tokens, p.items)
    return RunSummary(
        f"{p.name} on {count}{p.gpu}", False, *totals, parts, module_j, notes, *counted
    )


def group_by_family(side: RunSummary) -> RunSummary:
    """Add up the parts of a run by family, so that it compares with a run that knows only families."""
    joined = []
    for members in _group_parts(side.parts, lambda part: part.family).values():
        name = members[0].family
        known = all(part.joules is not None for part in members)
        joules = sum(part.joules or 0.0 for part in members) if known else None
        calls = sum(part.calls for part in members)
        seconds = sum(part.seconds for part in members)
        module_j = sum_terms([part.module_j for part in members])
        joined.append(RunPart(name, (name,), (name,), (), name, calls, seconds, joules, module_j))
    return replace(side, parts=tuple(joined))


def logarithmic_mean(a: float, b: float) -> float:
    """Return L(a, b) of two positive numbers.

    >>> round(logarithmic_mean(1.0, math.e), 6), logarithmic_mean(2.0, 2.0)
    (1.718282, 2.0)
    """
    ratio = math.log(b / a)
    # near one the quotient loses digits; the series does not
    return a * (1.0 + ratio / 2.0 + ratio * ratio / 6.0) if abs(ratio) < 1e-5 else (b - a) / ratio


def split_difference(a: float, b: float, ratios: Mapping[str, float]) -> dict[str, float]:
    """Split ``b - a`` among factors whose ratios b_i/a_i, ``ratios``, multiply to b/a.

    The product is taken to be exact: a rounding error goes to the largest contribution.
    """
    weight = logarithmic_mean(a, b)
    found = {name: weight * math.log(ratio) for name, ratio in ratios.items()}
    largest = max(found, key=lambda name: abs(found[name]))
    found[largest] += (b - a) - sum(found.values())
    return found


CALLS = "calls"
WORK = "cycles of a call"
CLOCK = "clock"
POWER = "power while running"
SHARE = "share of time"
GAPS = "idle gaps"
ONLY = "operators on one side only"
ALL = "all kernels and gaps"
GPUS = "number of GPUs"
RULE = (
    "sums term by term; products by the logarithmic mean (LMDI): each factor gets (b - a) / ln(b / a) x ln of its "
    "own ratio, so that contributions add up to the difference with nothing left over"
)


@dataclass(frozen=True)
class PartDifference:
    """A part of both runs, or of one alone, with its contributions to each difference by term.

    Energy and power are those of all GPUs.
    """

    name: str
    family: str
    a: RunPart | None
    b: RunPart | None
    latency_s: dict[str, float]
    total_energy_j: dict[str, float]
    total_power_w: dict[str, float]

    def total(self, column: str) -> float:
        """Return the sum of one difference, such as that of ``latency_s``."""
        return float(sum(getattr(self, column).values()))


@dataclass(frozen=True)
class RunComparison:
    """Contributions to B - A. Those of ``operators`` and of gaps add up to the difference; so do
    those of modules.

    Energy and power are those of all GPUs.
    """

    a: RunSummary
    b: RunSummary
    operators: tuple[PartDifference, ...]
    latency_s: dict[str, float]  # by term
    total_energy_j: dict[str, float]
    total_power_w: dict[str, float]
    module_j: dict[str, float]  # by module; empty where a side does not know its modules
    module_w: dict[str, float]
    notes: tuple[str, ...]
    rule: str = RULE


def compare_runs(a: RunSummary, b: RunSummary) -> RunComparison:
    """Split what changed from run ``a`` to run ``b`` into contributions."""
    notes = [*a.notes, *b.notes]
    both = a.effective_hz and b.effective_hz
    pace_a, pace_b = (a.effective_hz, b.effective_hz) if both else (a.clock_hz, b.clock_hz)
    whole = {
        ALL: b.latency_s / a.latency_s
    }  # clock and cycles, or cycles alone where a clock is not known
    if pace_a and pace_b:
        whole = {CLOCK: pace_a / pace_b, ALL: b.latency_s * pace_b / (a.latency_s * pace_a)}
    more = _compare_counts(a, b)
    running = {**more, POWER: b.power_w / a.power_w}
    joules = split_difference(a.total_energy_j, b.total_energy_j, {**whole, **running})
    watts = split_difference(a.total_power_w, b.total_power_w, running)
    if not (
        a.parts and b.parts
    ):  # clock, cycles and power, where a run knows nothing below its totals
        which = " and ".join(dict.fromkeys(side.name for side in (a, b) if not side.parts))
        notes.append(f"{which}: totals alone, so operators and gaps cannot be told apart")
        latency = split_difference(a.latency_s, b.latency_s, whole)
        return RunComparison(
            a, b, (), latency, joules, watts, *_compare_modules(a, b), tuple(notes)
        )
    if a.measured or b.measured:
        a = group_by_family(a)
        b = group_by_family(b)
        notes.append(
            "a measured side knows families of kernels, not operators: both are added up by family"
        )
    energy = a.has_energy and b.has_energy
    pairs = tuple(
        _compare_parts(a, b, left, right, energy) for left, right in _match_parts(a.parts, b.parts)
    )
    latency = sum_terms([pair.latency_s for pair in pairs]) | {GAPS: b.gap_s - a.gap_s}
    if energy:
        from_j = a.gpu_count * a.gap_j
        to_j = b.gpu_count * b.gap_j
        joules = sum_terms([pair.total_energy_j for pair in pairs]) | {GAPS: to_j - from_j}
        gaps_w = to_j / b.latency_s - from_j / a.latency_s
        watts = sum_terms([pair.total_power_w for pair in pairs]) | {GAPS: gaps_w}
    else:
        notes.append("no energy of kernels was measured: energy and power are split as a whole")
    return RunComparison(a, b, pairs, latency, joules, watts, *_compare_modules(a, b), tuple(notes))


def _compare_counts(a: RunSummary, b: RunSummary) -> dict[str, float]:
    """Return the factor of the number of GPUs, where it differs."""
    return {} if a.gpu_count == b.gpu_count else {GPUS: b.gpu_count / a.gpu_count}


def sum_terms(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up terms of the same name."""
    names = dict.fromkeys(name for each in terms for name in each)
    return {name: math.fsum(each.get(name, 0.0) for each in terms) for name in names}


def _match_parts(
    a: tuple[RunPart, ...], b: tuple[RunPart, ...]
) -> list[tuple[RunPart | None, RunPart | None]]:
    """Pair the parts of two runs that do the same work.

    First come the same operators at the same place, in order, where both runs have equally many;
    then, of the rest, equal work, and whatever is most alike at the same place. Parts without a
    partner stand alone."""
    pairs: list[tuple[RunPart | None, RunPart | None]] = []
    left = list(a)
    right = list(b)
    for whole, likeness in _LIKENESS:
        mine = _group_parts(left, likeness)
        theirs = _group_parts(right, likeness)
        for name, members in mine.items():
            others = theirs.get(name, [])
            if not whole or len(members) == len(others):
                pairs += zip(members, others, strict=False)
        taken = {id(part) for pair in pairs for part in pair}
        left, right = ([part for part in side if id(part) not in taken] for side in (left, right))
    return pairs + [(part, None) for part in left] + [(None, part) for part in right]


_Likeness = Callable[[RunPart], Hashable]  # equal for parts that are alike


def _group_parts(parts: Iterable[RunPart], likeness: _Likeness) -> dict[Hashable, list[RunPart]]:
    found: dict[Hashable, list[RunPart]] = {}
    for part in parts:
        found.setdefault(likeness(part), []).append(part)
    return found


_LIKENESS: tuple[
    tuple[bool, _Likeness], ...
] = (  # with whether a group must be as large on both sides
    (True, lambda part: (part.place, part.words)),
    (False, lambda part: part.key),
    (False, lambda part: (part.place, part.words, part.calls)),
    (False, lambda part: (part.place, part.words)),
    (False, lambda part: part.place),
)


def _compare_parts(
    a: RunSummary, b: RunSummary, left: RunPart | None, right: RunPart | None, energy: bool
) -> PartDifference:
    if (
        left is None or right is None or left.seconds <= 0.0 or right.seconds <= 0.0
    ):  # all of it is the difference
        part = left or right
        assert part is not None
        from_s, from_j = (left.seconds, a.gpu_count * (left.joules or 0.0)) if left else (0.0, 0.0)
        to_s, to_j = (right.seconds, b.gpu_count * (right.joules or 0.0)) if right else (0.0, 0.0)
        lone_j = {ONLY: to_j - from_j} if energy else {}
        lone_w = {ONLY: to_j / b.latency_s - from_j / a.latency_s} if energy else {}
        name = f"{part.name} ({'only in A' if right is None else 'only in B'})"
        return PartDifference(name, part.family, left, right, {ONLY: to_s - from_s}, lone_j, lone_w)
    # the reported clock: the mean effective one would move with the mix of operators
    paced = {CLOCK: a.clock_hz / b.clock_hz} if a.clock_hz and b.clock_hz else {}
    calls = right.calls / left.calls
    each = right.seconds / left.seconds / calls / paced.get(CLOCK, 1.0)
    ratios = {CALLS: calls, WORK: each, **paced}
    name = left.name if left.key == right.key else f"{left.name} -> {right.name}"
    latency = split_difference(left.seconds, right.seconds, ratios)
    if not (energy and left.joules and right.joules):
        return PartDifference(name, left.family, left, right, latency, {}, {})
    running = {
        **_compare_counts(a, b),
        POWER: (right.joules / right.seconds) / (left.joules / left.seconds),
    }
    from_j = a.gpu_count * left.joules
    to_j = b.gpu_count * right.joules
    joules = split_difference(from_j, to_j, {**ratios, **running})
    share = (right.seconds / b.latency_s) / (left.seconds / a.latency_s)
    watts = split_difference(from_j / a.latency_s, to_j / b.latency_s, {SHARE: share, **running})
    return PartDifference(name, left.family, left, right, latency, joules, watts)


def _compare_modules(a: RunSummary, b: RunSummary) -> tuple[dict[str, float], dict[str, float]]:
    """Return the difference of each module in joules and in mean watts, of all GPUs."""
    if not (a.module_j and b.module_j):
        return {}, {}
    pairs = {}
    for name in dict.fromkeys([*a.module_j, *b.module_j]):
        from_j, to_j = (side.gpu_count * side.module_j.get(name, 0.0) for side in (a, b))
        pairs[name] = (from_j, to_j)
    watts = {n: to_j / b.latency_s - from_j / a.latency_s for n, (from_j, to_j) in pairs.items()}
    return {n: to_j - from_j for n, (from_j, to_j) in pairs.items()}, watts
