"""What a model becomes for one batch after another: traced the first times, then read off a plan.

Operators of a model at another batch are the same ones with other sizes. So when a structure (a model under given
options, but for the batch) is asked for again and again, it is traced once more with a batch that is a
:class:`~wattcast.workload.sizes.Size`. That trace costs several times an ordinary one, and yields every field of every
operator as a polynomial in the batch, with the batches for which these hold. From then on a graph is those polynomials'
values. Outside these batches, and for models whose operators are no polynomials (experts that share tokens unevenly),
the model is traced as ever: a graph is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from wattcast.workload.graph import Block, Operator
from wattcast.workload.models import Model
from wattcast.workload.options import MOST, Options
from wattcast.workload.sizes import NotPlain, Size, Span

Traced: TypeAlias = tuple[Sequence[Block], int]  # blocks, and the bytes they hold at their peak
WORTH = 3  # builds after which a structure is worth a plan
_MOST_PLANS = 3  # of one structure, for batches apart
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
    """A traced model as lines, and which of them stand in each block under which label."""

    span: Span
    lines: tuple[_Line, ...]
    blocks: tuple[tuple[tuple[tuple[int, str], ...], int, str], ...]
    held_byte: int | Size

    @classmethod
    def of(cls, span: Span, blocks: Sequence[Block], held_byte: int | Size) -> Plan:
        """The plan of a trace whose sizes know the batch."""
        place: dict[Operator, int] = {}
        laid = [
            (tuple([(place.setdefault(op, len(place)), op.label) for op in block.ops]), block.repeat, block.label)
            for block in blocks
        ]
        return cls(span, tuple([_line(op) for op in place]), tuple(laid), held_byte)

    def at(self, batch: int) -> Traced:
        """What the trace would have given for ``batch``, which its span must hold."""
        ops = [line.at(batch) for line in self.lines]
        blocks = [
            Block(tuple([ops[row].again(label) for row, label in rows]), repeat, name)
            for rows, repeat, name in self.blocks
        ]
        held = self.held_byte
        return blocks, held.at(batch) if isinstance(held, Size) else held


def _line(op: Operator) -> _Line:
    known = {name: value for name, value in op.__dict__.items() if name != "_identity"}
    sizes = {name: value for name, value in known.items() if isinstance(value, Size)}
    straight = tuple([(name, *size.of) for name, size in sizes.items() if len(size.of) == 2])
    curved = tuple([(name, size) for name, size in sizes.items() if len(size.of) > 2])
    return _Line(type(op), known, straight, curved)  # type: ignore[arg-type]  # two coefficients each


@dataclass
class _Structure:
    """How often a structure was traced, and the plans that came of it."""

    traced: int = 0
    plans: list[Plan] = field(default_factory=list)

    def find(self, batch: int) -> Plan | None:
        """The plan that holds for a batch, if there is one."""
        for plan in self.plans:
            if plan.span.holds(batch):
                return plan
        return None


_STRUCTURES: dict[tuple[object, ...], _Structure] = {}


def blocks_of(model: Model, options: Options, trace: Callable[[Model, Options], Traced]) -> Traced:
    """``trace(model, options)``, from a plan where there is one that holds."""
    structure, batch = _structure(model, options), options.batch
    plan = structure.find(batch)
    if plan is None and _worth(structure, batch):
        plan = _planned(model, options, trace)
        structure.traced = 0
        if plan is None:
            structure.traced = -(1 << 62)  # never again
        else:
            structure.plans.append(plan)
    if plan is not None:
        return plan.at(batch)
    structure.traced += 1
    return trace(model, options)


def _worth(structure: _Structure, batch: int) -> bool:
    """A batch of one is like no other: its dimension has no say in how tensors lie."""
    return batch > 1 and structure.traced + 1 >= WORTH and len(structure.plans) < _MOST_PLANS


def _structure(model: Model, options: Options) -> _Structure:
    known = options.__dict__
    key = (model, *[value for name, value in known.items() if name != "batch"])
    structure = _STRUCTURES.get(key)
    if structure is None:
        if len(_STRUCTURES) >= _MOST_STRUCTURES:
            _STRUCTURES.pop(next(iter(_STRUCTURES)), None)  # the oldest
        structure = _STRUCTURES[key] = _Structure()
    return structure


def _planned(model: Model, options: Options, trace: Callable[[Model, Options], Traced]) -> Plan | None:
    """The plan of a structure, traced with a batch that leaves its marks; None where there can be none."""
    span = Span(options.batch, MOST)
    marked = object.__new__(Options)  # checked already, with a plain batch
    marked.__dict__.update(options.__dict__, batch=Size(span, (0, 1)))
    try:
        blocks, held = trace(model, marked)
    except NotPlain:
        return None
    return Plan.of(span, blocks, cast(Any, held))
