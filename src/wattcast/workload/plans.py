"""What a model becomes for one batch after another: traced the first times, then read off a plan.

The operators of a model at another batch are the same ones with other sizes. So when a structure (a model under given
options, but for the batch) is asked for again and again, it is traced once more, with a batch that is a
:class:`~wattcast.workload.sizes.Size`. That costs some four ordinary traces, and yields every field of every operator
as a polynomial in the batch, with the batches for which these hold. From then on a graph is their values for a batch,
at about an eighth of the cost. For other batches, and where fields are no polynomials (tokens that experts cannot
share evenly, operators that a compiler fuses), the model is traced as ever: a graph is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from wattcast.workload.graph import Block, Operator
from wattcast.workload.models import Model
from wattcast.workload.options import MOST, Options
from wattcast.workload.sizes import Largest, NotPlain, Size, Span

Traced: TypeAlias = tuple[Sequence[Block], int]  # blocks, and the bytes they hold at their peak
WORTH = 3  # builds of a structure, the last of which is worth a plan
_MOST_TRIES = 3  # for plans of one structure, which may hold for batches apart, or not be possible
_MOST_STRUCTURES = 256


@dataclass(frozen=True)
class _Line:
    """An operator but for its sizes and its label; sizes are ``a + b·batch``, or polynomials of a higher degree."""

    kind: type[Operator]
    plain: dict[str, object]
    straight: tuple[tuple[str, int, int], ...]
    curved: tuple[tuple[str, Size], ...]

    def at(self, batch: int) -> Operator:
        """The operator for a batch."""
        op = object.__new__(self.kind)
        known = op.__dict__
        known.update(self.plain)
        for name, constant, slope in self.straight:
            known[name] = constant + slope * batch
        for name, size in self.curved:
            known[name] = size.at(batch)
        hash(op)  # once for all its copies
        return op


@dataclass(frozen=True)
class Plan:
    """A traced model as lines, and which of them stand in each block (under which label, where not its line's)."""

    span: Span
    lines: tuple[_Line, ...]
    blocks: tuple[tuple[tuple[tuple[int, str | None], ...], int, str], ...]
    held_byte: int | Size | Largest

    @classmethod
    def of(cls, span: Span, blocks: Sequence[Block], held_byte: int | Size | Largest) -> Plan:
        """The plan of a trace whose sizes know the batch."""
        first: dict[tuple[Operator, int], tuple[int, str]] = {}  # equal operators that run equally often are one line
        laid = []
        for block in blocks:
            rows: list[tuple[int, str | None]] = []
            for op in block.ops:
                row, label = first.setdefault((op, op.count), (len(first), op.label))
                rows.append((row, None if op.label == label else op.label))
            laid.append((tuple(rows), block.repeat, block.label))
        return cls(span, tuple([_line(op) for op, _ in first]), tuple(laid), held_byte)

    def at(self, batch: int) -> Traced:
        """What the trace would have given for ``batch``, which its span must hold."""
        ops = [line.at(batch) for line in self.lines]
        blocks = [
            Block(tuple([ops[row] if label is None else ops[row].again(label) for row, label in rows]), repeat, name)
            for rows, repeat, name in self.blocks
        ]
        held = self.held_byte
        return blocks, held if isinstance(held, int) else held.at(batch)


def _line(op: Operator) -> _Line:
    known = {name: value for name, value in op.__dict__.items() if name != "_identity"}
    sizes = {name: value for name, value in known.items() if isinstance(value, Size)}
    straight = tuple([(name, *size.of) for name, size in sizes.items() if len(size.of) == 2])
    curved = tuple([(name, size) for name, size in sizes.items() if len(size.of) > 2])
    return _Line(type(op), known, straight, curved)


@dataclass
class _Structure:
    """The plans of a structure; how often it was traced since the last try for one, and how many tries there were."""

    plans: list[Plan] = field(default_factory=list)
    traced: int = 0
    tries: int = 0

    def find(self, batch: int) -> Plan | None:
        """The plan that holds for a batch, if there is one."""
        for plan in self.plans:
            if plan.span.holds(batch):
                return plan
        return None

    def worth_a_plan(self, batch: int) -> bool:
        """Asked for often enough, and not for a batch of one, whose dimension has no say in how tensors lie."""
        return batch > 1 and self.traced + 1 >= WORTH and self.tries < _MOST_TRIES


_STRUCTURES: dict[tuple[object, ...], _Structure] = {}


def blocks_of(model: Model, options: Options, trace: Callable[[Model, Options], Traced]) -> Traced:
    """``trace(model, options)``, from a plan where there is one that holds."""
    structure, batch = _structure(model, options), options.batch
    plan = structure.find(batch)
    if plan is None and structure.worth_a_plan(batch):
        structure.traced, structure.tries = 0, structure.tries + 1
        plan = plan_of(model, options, trace)
        if plan is not None:
            structure.plans.append(plan)
    if plan is not None:
        return plan.at(batch)
    structure.traced += 1
    return trace(model, options)


def _structure(model: Model, options: Options) -> _Structure:
    known = options.__dict__
    key = (model, *[value for name, value in known.items() if name != "batch"])
    structure = _STRUCTURES.get(key)
    if structure is None:
        if len(_STRUCTURES) >= _MOST_STRUCTURES:
            _STRUCTURES.pop(next(iter(_STRUCTURES)), None)  # the oldest
        structure = _STRUCTURES[key] = _Structure()
    return structure


def plan_of(model: Model, options: Options, trace: Callable[[Model, Options], Traced]) -> Plan | None:
    """The plan of a structure, traced with a batch that leaves its marks; None where there can be none."""
    span = Span(options.batch, MOST)
    marked = object.__new__(Options)  # checked already, with a plain batch
    marked.__dict__.update(options.__dict__, batch=Size(span, (0, 1)))
    try:
        blocks, held = trace(model, marked)
    except NotPlain:
        return None
    return Plan.of(span, blocks, cast(Any, held))
