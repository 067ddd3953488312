"""Split the difference between two runs into contributions that add up exactly.

A run's time is calls x cycles of a call / clock, summed over its parts, plus gaps. Its energy is
GPUs x time x power while running, plus the energy of gaps. Its mean power is GPUs x share of time x
power while running, plus gaps. Energy and power are those of all GPUs of a run: four GPUs and eight
are compared by what they draw together. Sums split term by term. A product x = Π x_i that goes from
a to b splits by the logarithmic mean [Ang2005]:

    b - a = L(a, b)·Σ ln(b_i / a_i),   L(a, b) = (b - a) / ln(b / a),   L(a, a) = a

so that nothing is left over, and swapping the runs turns every sign. Work that only one run has is
a term of its own.
"""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)

import msgspec

from wattcast.core.user_results import UserResult
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_json import (
    OperatorOut,
    PredictionOut,
    predictions_to_output,
)
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
    the same.
    """

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
    def total_gap_j(self) -> float:
        """Joules of all GPUs that belong to no part."""
        return self.gpu_count * self.gap_j

    @property
    def total_module_j(self) -> dict[str, float]:
        """Joules of all GPUs by module."""
        return {name: self.gpu_count * joules for name, joules in self.module_j.items()}

    @property
    def has_energy(self) -> bool:
        """Whether the energy of every part is known."""
        return bool(self.parts) and all(part.joules is not None for part in self.parts)


def summarise_prediction(p: Prediction) -> RunSummary:
    """Summarise a prediction of one point, operator by operator."""
    return summarise_output(predictions_to_output([p]).predictions[0])


def summarise_output(p: PredictionOut) -> RunSummary:
    """Summarise a prediction as ``predict --json`` writes it."""
    gpus = f"{p.gpu_count} x {p.gpu}" if p.gpu_count > 1 else p.gpu
    notes = () if p.support.inside else (f"far from what was measured: {p.support.reason}",)
    return RunSummary(
        name=f"{p.name} on {gpus}",
        measured=False,
        latency_s=p.latency_s,
        power_w=p.power_w,
        clock_hz=p.clock_hz,
        effective_hz=p.effective_clock_hz,
        parts=tuple(_summarise_operator(op) for op in p.ops),
        module_j={module.name: module.power_w * p.latency_s for module in p.modules},
        notes=notes,
        gpu_count=p.gpu_count,
        tokens=p.tokens,
        items=p.items,
    )


def _summarise_operator(op: OperatorOut) -> RunPart:
    kinds = registered_operators()
    # elementwise operators have the names of their functions
    family = kinds[op.name].family if op.name in kinds else "elementwise"
    shape = msgspec.json.encode(op.shape, order="sorted").decode()
    words = [f"{key}={value}" for key, value in op.shape.items() if type(value) is not int]
    return RunPart(
        name=op.operator,
        key=(op.name, op.label, shape),
        place=(op.name, op.label),
        words=tuple(words),
        family=family,
        calls=float(op.count),
        seconds=op.latency_s,
        joules=op.energy_j,
        module_j={module.name: module.power_w * op.latency_s for module in op.modules},
    )


def group_by_family(side: RunSummary) -> RunSummary:
    """Add up the parts of a run by family, so that it compares with a run that knows only
    families.
    """
    families = []
    for members in _group_parts(side.parts, lambda part: part.family).values():
        family = members[0].family
        joules: float | None = sum(part.joules or 0.0 for part in members)
        if any(part.joules is None for part in members):
            joules = None
        families.append(
            RunPart(
                name=family,
                key=(family,),
                place=(family,),
                words=(),
                family=family,
                calls=sum(part.calls for part in members),
                seconds=sum(part.seconds for part in members),
                joules=joules,
                module_j=sum_terms([part.module_j for part in members]),
            )
        )
    return replace(side, parts=tuple(families))


def logarithmic_mean(a: float, b: float) -> float:
    """Return L(a, b) of two positive numbers.

    >>> round(logarithmic_mean(1.0, math.e), 6), logarithmic_mean(2.0, 2.0)
    (1.718282, 2.0)
    """
    log_ratio = math.log(b / a)
    if abs(log_ratio) < 1e-5:  # the quotient loses digits; the series does not
        return a * (1.0 + log_ratio / 2.0 + log_ratio * log_ratio / 6.0)
    return (b - a) / log_ratio


def split_difference(
    a: float,
    b: float,
    ratios: Mapping[str, float],
) -> dict[str, float]:
    """Split ``b - a`` among factors whose ratios b_i/a_i, ``ratios``, multiply to b/a.

    The product is taken to be exact: a rounding error goes to the largest contribution.
    """
    weight = logarithmic_mean(a, b)
    contributions = {name: weight * math.log(ratio) for name, ratio in ratios.items()}
    largest = max(contributions, key=lambda name: abs(contributions[name]))
    contributions[largest] += (b - a) - sum(contributions.values())
    return contributions


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
    "sums term by term; products by the logarithmic mean (LMDI): each factor gets (b - a) "
    "/ ln(b / a) x ln of its "
    "own ratio, so that contributions add up to the difference with nothing left over"
)


@dataclass(frozen=True)
class PartDifference:
    """A part of both runs, or of one only, with its contributions to each difference by term.

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


@dataclass(frozen=True, repr=False)
class RunComparison(UserResult):
    """Contributions to B - A.

    Those of ``operators`` and of gaps add up to the difference; so do those of modules. Energy and
    power are those of all GPUs.
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

    plain_by = "wattcast.report.comparison_report:comparison_to_plain"
    drawn_by = "wattcast.report.comparison_report:draw_difference"
    rows_in = "operators"

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        slower = self.b.latency_s / self.a.latency_s - 1.0
        percent = f"{abs(slower):.1%}"
        if percent == "0.0%":
            return f"{self.b.name} takes as long as {self.a.name}"
        change = "longer" if slower > 0.0 else "shorter"
        return f"{self.b.name} takes {percent} {change} than {self.a.name}"


def compare_runs(a: RunSummary, b: RunSummary) -> RunComparison:
    """Split what changed from run ``a`` to run ``b`` into contributions."""
    whole = _compare_totals(a, b)
    if not (a.parts and b.parts):
        names = dict.fromkeys(side.name for side in (a, b) if not side.parts)
        note = f"{' and '.join(names)}: totals only, so operators and gaps cannot be told apart"
        return replace(whole, notes=(*whole.notes, note))

    notes = list(whole.notes)
    if a.measured or b.measured:
        a = group_by_family(a)
        b = group_by_family(b)
        notes.append(
            "a measured side knows families of kernels, not operators: both are added up by family"
        )
    has_energy = a.has_energy and b.has_energy
    pairs = _match_parts(a.parts, b.parts)
    parts = tuple(
        _compare_parts(
            a,
            b,
            left_part,
            right,
            has_energy,
        )
        for left_part, right in pairs
    )
    latency = sum_terms([part.latency_s for part in parts]) | {GAPS: b.gap_s - a.gap_s}
    by_part = replace(
        whole,
        a=a,
        b=b,
        operators=parts,
        latency_s=latency,
    )
    if not has_energy:
        notes.append("no energy of kernels was measured: energy and power are split as a whole")
        return replace(by_part, notes=tuple(notes))

    gaps_w = b.total_gap_j / b.latency_s - a.total_gap_j / a.latency_s
    joules = sum_terms([part.total_energy_j for part in parts])
    watts = sum_terms([part.total_power_w for part in parts])
    return replace(
        by_part,
        total_energy_j=joules | {GAPS: b.total_gap_j - a.total_gap_j},
        total_power_w=watts | {GAPS: gaps_w},
        notes=tuple(notes),
    )


def _compare_totals(a: RunSummary, b: RunSummary) -> RunComparison:
    """Split the totals of two runs by clock, cycles and power, without their parts."""
    if a.effective_hz and b.effective_hz:
        clock_a_hz = a.effective_hz
        clock_b_hz = b.effective_hz
    else:
        clock_a_hz = a.clock_hz or 0.0
        clock_b_hz = b.clock_hz or 0.0
    # clock and cycles, or both together where a clock is not known
    ratios = {ALL: b.latency_s / a.latency_s}
    if clock_a_hz and clock_b_hz:
        cycles = b.latency_s * clock_b_hz / (a.latency_s * clock_a_hz)
        ratios = {CLOCK: clock_a_hz / clock_b_hz, ALL: cycles}
    power_ratios = {**_compare_counts(a, b), POWER: b.power_w / a.power_w}
    module_j, module_w = _compare_modules(a, b)
    return RunComparison(
        a=a,
        b=b,
        operators=(),
        latency_s=split_difference(a.latency_s, b.latency_s, ratios),
        total_energy_j=split_difference(
            a.total_energy_j, b.total_energy_j, {**ratios, **power_ratios}
        ),
        total_power_w=split_difference(a.total_power_w, b.total_power_w, power_ratios),
        module_j=module_j,
        module_w=module_w,
        notes=(*a.notes, *b.notes),
    )


def _compare_counts(a: RunSummary, b: RunSummary) -> dict[str, float]:
    """Return the factor of the number of GPUs, where it differs."""
    return {} if a.gpu_count == b.gpu_count else {GPUS: b.gpu_count / a.gpu_count}


def _compare_modules(a: RunSummary, b: RunSummary) -> tuple[dict[str, float], dict[str, float]]:
    """Return the difference of each module in joules and in mean watts, of all GPUs."""
    joules: dict[str, float] = {}
    watts: dict[str, float] = {}
    if not (a.module_j and b.module_j):
        return joules, watts
    joules_a = a.total_module_j
    joules_b = b.total_module_j
    for name in dict.fromkeys([*joules_a, *joules_b]):
        from_j = joules_a.get(name, 0.0)
        to_j = joules_b.get(name, 0.0)
        joules[name] = to_j - from_j
        watts[name] = to_j / b.latency_s - from_j / a.latency_s
    return joules, watts


def sum_terms(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up terms of the same name."""
    values: dict[str, list[float]] = {}
    for mapping in terms:
        for name, value in mapping.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(numbers) for name, numbers in values.items()}


# Pairs of parts

_Pair = tuple[RunPart | None, RunPart | None]
_Likeness = Callable[[RunPart], Hashable]  # equal for parts that are alike

# How parts are alike, the closest first, with whether a group must be as large on both sides.
_LIKENESS: tuple[tuple[bool, _Likeness], ...] = (
    (True, lambda part: (part.place, part.words)),
    (False, lambda part: part.key),
    (False, lambda part: (part.place, part.words, part.calls)),
    (False, lambda part: (part.place, part.words)),
    (False, lambda part: part.place),
)


def _match_parts(a: Sequence[RunPart], b: Sequence[RunPart]) -> list[_Pair]:
    """Pair the parts of two runs that do the same work.

    First come the same operators at the same place, in order, where both runs have equally many;
    of the others, equal work, and then whatever is most alike at the same place. Parts without a
    partner stand alone.
    """
    pairs: list[_Pair] = []
    single_a = list(a)
    single_b = list(b)
    for needs_equal_size, likeness in _LIKENESS:
        groups_a = _group_parts(single_a, likeness)
        groups_b = _group_parts(single_b, likeness)
        for name, members in groups_a.items():
            partners = groups_b.get(name, [])
            if not needs_equal_size or len(members) == len(partners):
                pairs += zip(members, partners, strict=False)
        paired = {id(part) for pair in pairs for part in pair}
        single_a = [part for part in single_a if id(part) not in paired]
        single_b = [part for part in single_b if id(part) not in paired]
    pairs += [(part, None) for part in single_a]
    pairs += [(None, part) for part in single_b]
    return pairs


def _group_parts(parts: Iterable[RunPart], likeness: _Likeness) -> dict[Hashable, list[RunPart]]:
    groups: dict[Hashable, list[RunPart]] = {}
    for part in parts:
        groups.setdefault(likeness(part), []).append(part)
    return groups


def _compare_parts(
    a: RunSummary,
    b: RunSummary,
    left: RunPart | None,
    right: RunPart | None,
    has_energy: bool,
) -> PartDifference:
    """Split the difference of a pair; a part without a partner is a difference as a whole."""
    if left is None or right is None or left.seconds <= 0.0 or right.seconds <= 0.0:
        return _describe_lone_part(
            a,
            b,
            left,
            right,
            has_energy,
        )

    # the reported clock: the mean effective one would move with the mix of operators
    clock = {CLOCK: a.clock_hz / b.clock_hz} if a.clock_hz and b.clock_hz else {}
    calls = right.calls / left.calls
    cycles = right.seconds / left.seconds / calls / clock.get(CLOCK, 1.0)
    ratios = {
        CALLS: calls,
        WORK: cycles,
        **clock,
    }
    difference = PartDifference(
        name=left.name if left.key == right.key else f"{left.name} -> {right.name}",
        family=left.family,
        a=left,
        b=right,
        latency_s=split_difference(left.seconds, right.seconds, ratios),
        total_energy_j={},
        total_power_w={},
    )
    if not (has_energy and left.joules and right.joules):
        return difference

    power = (right.joules / right.seconds) / (left.joules / left.seconds)
    share = (right.seconds / b.latency_s) / (left.seconds / a.latency_s)
    running = {**_compare_counts(a, b), POWER: power}
    from_j = a.gpu_count * left.joules
    to_j = b.gpu_count * right.joules
    from_w = from_j / a.latency_s
    to_w = to_j / b.latency_s
    return replace(
        difference,
        total_energy_j=split_difference(from_j, to_j, {**ratios, **running}),
        total_power_w=split_difference(from_w, to_w, {SHARE: share, **running}),
    )


def _describe_lone_part(
    a: RunSummary,
    b: RunSummary,
    left: RunPart | None,
    right: RunPart | None,
    has_energy: bool,
) -> PartDifference:
    """Return a part without a partner, all of which is a difference."""
    part = left or right
    assert part is not None
    seconds = (right.seconds if right else 0.0) - (left.seconds if left else 0.0)
    lone_j = {}
    lone_w = {}
    if has_energy:
        from_j = a.gpu_count * (left.joules or 0.0) if left else 0.0
        to_j = b.gpu_count * (right.joules or 0.0) if right else 0.0
        lone_j = {ONLY: to_j - from_j}
        lone_w = {ONLY: to_j / b.latency_s - from_j / a.latency_s}
    side = "only in A" if right is None else "only in B"
    name = f"{part.name} ({side})"
    return PartDifference(
        name,
        part.family,
        left,
        right,
        {ONLY: seconds},
        lone_j,
        lone_w,
    )
