"""Tensors without data: shapes, strides, number formats, and which operators touched them.

Templates are written against these as one writes eager PyTorch. Views cost nothing; whatever
PyTorch would launch a kernel for is emitted as an operator, copies of awkwardly strided tensors
included, because the strides are followed as PyTorch follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TypeAlias

from wattcast.dtypes import Dtype
from wattcast.workload.graph import Operator
from wattcast.workload.strides import contiguous, dense, view_strides

Shape: TypeAlias = tuple[int, ...]


def held_byte(shape: Shape, strides: Shape, dtype: Dtype) -> int:
    """Bytes of a tensor, repeated (stride 0) dimensions once."""
    if 0 not in strides:
        return prod(shape) * dtype.byte
    return prod(size for size, stride in zip(shape, strides, strict=True) if stride) * dtype.byte


class Storage:
    """The bytes behind a tensor and its views; ``resident`` ones (weights, caches) outlive the pass."""

    __slots__ = ("byte", "resident")

    def __init__(self, byte: int, resident: bool = False) -> None:
        self.byte = byte
        self.resident = resident


@dataclass(eq=False, slots=True)
class Tensor:
    """A shape with strides over a storage; the tape it writes its operators to."""

    tape: Tape
    shape: Shape
    strides: Shape
    dtype: Dtype
    storage: Storage
    needs_grad: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def byte(self) -> int:
        """Bytes that a kernel reading all of it must fetch: repeated (stride 0) dimensions once."""
        return held_byte(self.shape, self.strides, self.dtype)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == contiguous(self.shape) or dense(self.shape, self.strides, exact=True)

    # Views: no operator, and the gradient is the inverse view.

    def view(self, *shape: int) -> Tensor:
        """Another shape over the same memory; the strides must allow it."""
        wanted, strides = _viewed(self.shape, self.strides, shape)
        assert strides is not None, f"view of {self.shape} strides {self.strides} as {wanted}"
        before = self.shape
        return self.tape.viewed(self, wanted, strides, lambda g: (g.reshape(*before),))

    def reshape(self, *shape: int) -> Tensor:
        """A view where the strides allow it, a copy where they do not."""
        wanted, strides = _viewed(self.shape, self.strides, shape)
        if strides is None:
            return self.clone().view(*wanted)
        before = self.shape
        return self.tape.viewed(self, wanted, strides, lambda g: (g.reshape(*before),))

    def transpose(self, a: int, b: int) -> Tensor:
        return self.permute(*_swapped(len(self.shape), a, b))

    def permute(self, *order: int) -> Tensor:
        order, back = _ordered(order)
        shape, strides = tuple(map(self.shape.__getitem__, order)), tuple(map(self.strides.__getitem__, order))
        return self.tape.viewed(self, shape, strides, lambda g: (g.permute(*back),))

    def unsqueeze(self, axis: int) -> Tensor:
        before, steps = self.shape, self.strides
        axis %= len(before) + 1
        shape = (*before[:axis], 1, *before[axis:])
        step = before[axis] * steps[axis] if axis < len(before) else 1
        strides = (*steps[:axis], step, *steps[axis:])
        return self.tape.viewed(self, shape, strides, lambda g: (g.reshape(*before),))

    def expand(self, *shape: int) -> Tensor:
        """Repeat dimensions of size 1 without memory; the gradient sums them."""
        before = self.shape
        lead = len(shape) - len(before)
        wanted = tuple([before[i - lead] if size == -1 else size for i, size in enumerate(shape)])
        if wanted == before:
            return self.tape.viewed(self, wanted, self.strides, lambda g: (g,))
        padded = (1,) * lead + before, (0,) * lead + self.strides
        strides = tuple([0 if have != want else step for have, step, want in zip(*padded, wanted, strict=True)])
        return self.tape.viewed(self, wanted, strides, lambda g: (g.sum_to(before),))

    def slice(self, axis: int, start: int, stop: int) -> Tensor:
        """``self[..., start:stop, ...]``; the gradient is zeros with a copy inside."""
        before = self.shape
        axis %= len(before)
        shape = (*before[:axis], stop - start, *before[axis + 1 :])
        if shape == before:
            return self.tape.viewed(self, shape, self.strides, lambda g: (g,))
        return self.tape.viewed(self, shape, self.strides, lambda g: (g.pad_back(before),))

    def select(self, axis: int) -> Tensor:
        """One index of a dimension, which goes away."""
        before = self.shape
        axis %= len(before)
        shape = (*before[:axis], *before[axis + 1 :])
        strides = (*self.strides[:axis], *self.strides[axis + 1 :])
        return self.tape.viewed(self, shape, strides, lambda g: (g.pad_back(before),))

    def pairs(self) -> Tensor:
        """The last dimension as pairs of neighbours, a view."""
        return self.view(*self.shape[:-1], self.shape[-1] // 2, 2)

    def split(self, *sizes: int) -> tuple[Tensor, ...]:
        """Views of the last dimension, side by side; their gradients are laid side by side again."""
        tape, strides, dtype, storage = self.tape, self.strides, self.dtype, self.storage
        lead = self.shape[:-1]
        parts = tuple([Tensor(tape, (*lead, size), strides, dtype, storage) for size in sizes])
        tape.record(parts, (self,), lambda *grads: (functional.cat([g for g in grads if g is not None], -1),))
        return parts

    # What launches a kernel.

    def clone(self) -> Tensor:
        return functional.clone(self)

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous else self.clone()

    def to(self, dtype: Dtype) -> Tensor:
        return functional.cast(self, dtype)

    def sum_to(self, shape: Shape) -> Tensor:
        return functional.sum_to(self, shape)

    def pad_back(self, shape: Shape) -> Tensor:
        return functional.pad_back(self, shape)

    def __add__(self, other: Tensor | float) -> Tensor:
        return functional.add(self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return functional.mul(self, other)

    def __neg__(self) -> Tensor:
        return functional.unary("neg", self, lambda g: -g)


Rule: TypeAlias = Callable[..., Sequence[Tensor | None]]


@dataclass(slots=True)
class Node:
    """One step of the backward pass: gradients of ``outputs`` -> gradients of ``inputs``."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor | None]
    rule: Rule
    label: str


@dataclass(slots=True)
class Entry:
    """An emitted operator and the tensors it touched."""

    op: Operator
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


@dataclass
class Tape:
    """Operators in issue order, and what the backward pass needs to know about them."""

    training: bool = False
    tf32: bool = False
    entries: list[Entry] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    tied: list[Tensor] = field(default_factory=list)
    saved: dict[int, Storage] = field(default_factory=dict)
    label: str = ""
    cache_byte: int = 0  # keys and values that outlive the pass
    recording: bool = field(init=False)  # how gradients will flow back: in training, while it runs forward

    def __post_init__(self) -> None:
        self.recording = self.training

    def at(self, label: str) -> Labelled:
        """Label what is emitted inside."""
        return Labelled(self, label)

    def clear(self) -> None:
        """Forget all that was written."""
        for written in (self.entries, self.nodes, self.parameters, self.tied):
            written.clear()
        self.saved.clear()

    def math(self, dtype: Dtype) -> Dtype:
        """The format products are computed in: TF32 for fp32 tensors where the user allows it."""
        return Dtype.TF32 if self.tf32 and dtype is Dtype.FP32 else dtype

    def empty(self, shape: Shape, dtype: Dtype, strides: Shape | None = None) -> Tensor:
        """A new tensor, contiguous unless strides are given."""
        storage = Storage(prod(shape) * dtype.byte)
        return Tensor(self, shape, strides or contiguous(shape), dtype, storage)

    def parameter(self, *shape: int, dtype: Dtype, tied: bool = False) -> Tensor:
        """A weight of the model; a ``tied`` one is counted where it first appeared."""
        storage = Storage(prod(shape) * dtype.byte, resident=True)
        weight = Tensor(self, shape, contiguous(shape), dtype, storage, needs_grad=self.training)
        (self.tied if tied else self.parameters).append(weight)
        return weight

    def leaf(self, tensor: Tensor) -> Tensor:
        """``tensor`` as it enters this tape from another."""
        wants = self.training and tensor.needs_grad
        return Tensor(self, tensor.shape, tensor.strides, tensor.dtype, tensor.storage, wants)

    def emit(self, op: Operator, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        op.__dict__["label"] = self.label  # the operator is new and nobody else's yet
        self.entries.append(Entry(op, tuple(reads), tuple(writes)))

    def viewed(self, base: Tensor, shape: Shape, strides: Shape, rule: Rule) -> Tensor:
        """``base`` in another shape, without an operator; ``rule`` leads its gradient back."""
        out = Tensor(self, shape, strides, base.dtype, base.storage)
        if self.recording and base.needs_grad:
            out.needs_grad = True
            self.nodes.append(Node((out,), (base,), rule, self.label))
        return out

    def record(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], rule: Rule, save: Sequence[Tensor] = ()
    ) -> None:
        """Note how gradients flow back, when any input wants one; ``save`` is kept until then."""
        if not self.recording:
            return
        for tensor in inputs:
            if tensor is not None and tensor.needs_grad:
                break
        else:
            return
        for out in outputs:
            out.needs_grad = True
        for tensor in save:
            self.saved[id(tensor.storage)] = tensor.storage
        self.nodes.append(Node(outputs, inputs, rule, self.label))


class Labelled:
    """A stretch of a tape whose operators have one more word in their label."""

    __slots__ = ("before", "tape", "word")

    def __init__(self, tape: Tape, word: str) -> None:
        self.tape, self.word, self.before = tape, word, tape.label

    def __enter__(self) -> None:
        self.tape.label = f"{self.before}.{self.word}" if self.before else self.word

    def __exit__(self, *_: object) -> None:
        self.tape.label = self.before


@lru_cache
def _ordered(order: Shape) -> tuple[Shape, Shape]:
    """An order of dimensions counted from the first, and the one that leads back."""
    rank = len(order)
    order = tuple([axis % rank for axis in order])
    return order, tuple(sorted(range(rank), key=order.__getitem__))


@lru_cache
def _swapped(rank: int, a: int, b: int) -> Shape:
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


@lru_cache(maxsize=4096)
def _viewed(shape: Shape, strides: Shape, asked: Shape) -> tuple[Shape, Shape | None]:
    """The shape asked for, what ``-1`` leaves open filled in, and the strides of a view where one is possible."""
    numel, known = prod(shape), prod(asked)
    wanted = asked
    if known < 0:  # -1 is one of the factors
        wanted = tuple([numel // -known if size == -1 else size for size in asked])
    assert prod(wanted) == numel, f"{numel} elements as {asked}"
    if numel and shape and strides == contiguous(shape):
        return wanted, contiguous(wanted)
    return wanted, view_strides(shape, strides, wanted)


import wattcast.workload.functional as functional  # noqa: E402  # which needs all of this module
