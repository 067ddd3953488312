"""Tensors without data, and the tape on which they write the operators that PyTorch would launch.

A model template is run on these tensors as if they were real. Views cost nothing, everything else
appends an operator to the tape and, in training, the rule by which gradients flow back."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from wattcast.core import Dtype
from wattcast.workload import memory_layout
from wattcast.workload.memory_layout import (
    Extents,
    Operand,
    Shape,
    contiguous_strides,
    describe_pointwise,
)
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Layout


@dataclass(eq=False, slots=True)
class Storage:
    """The bytes behind a tensor and its views.

    ``resident`` ones (weights, caches) outlive the pass.
    """

    byte: int
    resident: bool = False


@dataclass(eq=False, slots=True)
class Tensor:
    """A shape with strides over a storage, and the tape it writes its operators to."""

    tape: Tape
    shape: Shape
    strides: Shape
    dtype: Dtype
    storage: Storage
    needs_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def byte(self) -> int:
        """Bytes that a kernel reading all of it must fetch.

        Repeated dimensions (of stride 0) count once.
        """
        return memory_layout.count_byte(self.shape, self.strides, self.dtype)

    @property
    def operand(self) -> Operand:
        """Shape, strides and number format: all that decides how a kernel walks over it."""
        return self.shape, self.strides, self.dtype

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies in memory row by row, without holes."""
        row_major = self.strides == contiguous_strides(self.shape)
        return row_major or memory_layout.is_dense(self.shape, self.strides, exact=True)

    def on_tape(self, tape: Tape) -> Tensor:
        """Return the same tensor, which writes to another tape and needs no gradient."""
        return Tensor(
            tape,
            self.shape,
            self.strides,
            self.dtype,
            self.storage,
        )

    # Views: no operator, and the gradient is the inverse view.

    def view(self, *shape: int) -> Tensor:
        """Return another shape over the same memory; the strides must allow it."""
        out = self._try_view(shape)
        assert out is not None, f"view of {self.shape} strides {self.strides} as {shape}"
        return out

    def reshape(self, *shape: int) -> Tensor:
        """Return a view where the strides allow it, a copy where they do not."""
        return self._try_view(shape) or self.clone().view(*shape)

    def _try_view(self, shape: Shape) -> Tensor | None:
        product = prod(shape)
        if product < 0:  # -1 is one of the factors
            missing = self.numel // -product
            shape = tuple([missing if size == -1 else size for size in shape])
        assert prod(shape) == self.numel, f"{self.numel} elements as {shape}"
        strides = memory_layout.view_strides(self.shape, self.strides, shape)
        if strides is None:
            return None
        before = self.shape
        return self._view_as(shape, strides, lambda g: g.reshape(*before))

    def _view_as(
        self,
        shape: Shape,
        strides: Shape,
        rule: GradientRule,
    ) -> Tensor:
        out = Tensor(
            self.tape,
            shape,
            strides,
            self.dtype,
            self.storage,
        )
        return out.with_gradient(rule, self)

    def with_gradient(
        self,
        rule: GradientRule,
        *inputs: Tensor | None,
        save: Sequence[Tensor] = (),
    ) -> Tensor:
        """Note how the gradient flows back to the inputs, and return the tensor.

        ``save`` stays in memory until then.
        """
        self.tape.record((self,), inputs, rule, save)
        return self

    def transpose(
        self,
        a: int,
        b: int,
    ) -> Tensor:
        """Swap two dimensions."""
        order = list(range(len(self.shape)))
        order[a], order[b] = order[b], order[a]
        return self.permute(*order)

    def permute(self, *order: int) -> Tensor:
        """Put the dimensions into another order."""
        rank = len(order)
        axes = [axis % rank for axis in order]
        inverse = sorted(range(rank), key=axes.__getitem__)
        shape = tuple([self.shape[axis] for axis in order])
        strides = tuple([self.strides[axis] for axis in order])
        return self._view_as(shape, strides, lambda g: g.permute(*inverse))

    def unsqueeze(self, axis: int) -> Tensor:
        """Insert a dimension of size 1."""
        before = self.shape
        steps = self.strides
        axis %= len(before) + 1
        step = before[axis] * steps[axis] if axis < len(before) else 1
        shape = (*before[:axis], 1, *before[axis:])
        strides = (*steps[:axis], step, *steps[axis:])
        return self._view_as(shape, strides, lambda g: g.reshape(*before))

    def expand(self, *shape: int) -> Tensor:
        """Repeat dimensions of size 1 without memory; the gradient sums them."""
        before = self.shape
        if shape == before:
            return self._view_as(shape, self.strides, lambda g: g)
        new_dims = len(shape) - len(before)
        sizes = (1,) * new_dims + before
        strides = [0] * new_dims + list(self.strides)
        for axis, size in enumerate(shape):
            if sizes[axis] != size:
                strides[axis] = 0
        return self._view_as(shape, tuple(strides), lambda g: g.sum_to(before))

    def slice(
        self,
        axis: int,
        start: int,
        stop: int,
    ) -> Tensor:
        """Return ``self[..., start:stop, ...]``; the gradient is zeros with a copy inside."""
        before = self.shape
        axis %= len(before)
        shape = (*before[:axis], stop - start, *before[axis + 1 :])

        def back(g: Tensor) -> Tensor:
            return g if shape == before else g.pad_back(before)

        return self._view_as(shape, self.strides, back)

    def select(self, axis: int) -> Tensor:
        """Return one index of a dimension, which goes away."""
        before = self.shape
        steps = self.strides
        axis %= len(before)
        shape = (*before[:axis], *before[axis + 1 :])
        strides = (*steps[:axis], *steps[axis + 1 :])
        return self._view_as(shape, strides, lambda g: g.pad_back(before))

    def split(self, *sizes: int) -> tuple[Tensor, ...]:
        """Cut the last dimension into views; their gradients are concatenated again."""
        lead = self.shape[:-1]
        parts = tuple(
            [
                Tensor(
                    self.tape,
                    (*lead, size),
                    self.strides,
                    self.dtype,
                    self.storage,
                )
                for size in sizes
            ]
        )

        def back(*grads: Tensor | None) -> Tensor:
            whole = []
            for part, grad in zip(parts, grads, strict=True):
                # autograd fills in zeros for a part that nothing used
                whole.append(fill(self.tape, part.shape, part.dtype) if grad is None else grad)
            return cat(whole, -1)

        self.tape.record(parts, (self,), back)
        return parts

    # Methods that launch a kernel.

    def clone(self) -> Tensor:
        """Return a row-major copy."""
        out = self.tape.empty(self.shape, self.dtype)
        walk = (self.shape, self.strides)
        layout = memory_layout.classify_layout(self.shape, out.strides, [walk])
        self.tape.emit_pointwise("copy", (self,), out, layout)
        return out.with_gradient(lambda g: g, self)

    def contiguous(self) -> Tensor:
        """Return the tensor itself where it is row-major, a copy where it is not."""
        return self if self.is_contiguous else self.clone()

    def to(self, dtype: Dtype) -> Tensor:
        """Cast to another number format; nothing happens where it is the same."""
        if dtype is self.dtype:
            return self
        out = pointwise("cast", self, out_dtype=dtype)
        return out.with_gradient(lambda g: g.to(self.dtype), self)

    def sum_to(self, shape: Shape) -> Tensor:
        """Sum what was broadcast, so that ``shape`` is left.

        Nothing happens where that is the shape already.
        """
        if self.shape == shape:
            return self
        keeps_innermost = bool(shape) and shape[-1] == self.shape[-1] > 1
        return reduce("sum", self, shape, across=keeps_innermost)

    def pad_back(self, shape: Shape) -> Tensor:
        """Return zeros of ``shape`` with this tensor copied into a part of them.

        That is the gradient of a slice.
        """
        out = fill(self.tape, shape, self.dtype)
        op = describe_pointwise(
            "copy",
            (self.operand,),
            self.operand,
            self.dtype,
            Layout.STRIDED,
        )
        self.tape.emit(op, (self,), (out,))
        return out

    def __add__(self, other: Tensor | float) -> Tensor:
        if not isinstance(other, Tensor):
            return unary("shift", self, lambda g: g)

        def back(g: Tensor) -> list[Tensor | None]:
            return [g.sum_to(t.shape) if t.needs_grad else None for t in (self, other)]

        return pointwise("add", self, other).with_gradient(back, self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        if not isinstance(other, Tensor):
            return unary("scale", self, lambda g: g * other)

        def scale(
            g: Tensor,
            factor: Tensor,
            target: Tensor,
        ) -> Tensor | None:
            if not target.needs_grad:
                return None
            return pointwise("mul", g, factor).sum_to(target.shape).to(target.dtype)

        def back(g: Tensor) -> list[Tensor | None]:
            return [scale(g, other, self), scale(g, self, other)]

        return pointwise("mul", self, other).with_gradient(back, self, other, save=(self, other))

    def __neg__(self) -> Tensor:
        return unary("neg", self, lambda g: -g)


# Turns the gradients of results into those of the inputs; of one input into its gradient alone.
GradientRule: TypeAlias = Callable[..., Tensor | Sequence[Tensor | None]]


@dataclass(slots=True)
class GradientNode:
    """One step of the backward pass.

    ``rule`` turns gradients of ``outputs`` into gradients of ``inputs``.
    """

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor | None]
    rule: GradientRule
    label: str


@dataclass(slots=True)
class TapeEntry:
    """An emitted operator and the tensors it touched."""

    op: Operator
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


@dataclass
class Tape:
    """Operators in issue order, and what the backward pass needs to know about them."""

    training: bool = False
    tf32: bool = False
    entries: list[TapeEntry] = field(default_factory=list)
    nodes: list[GradientNode] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    tied: list[Tensor] = field(default_factory=list)
    saved: dict[int, Storage] = field(default_factory=dict)
    label: str = ""
    cache_byte: int = 0  # keys and values that outlive the pass
    frozen: bool = False  # weights get no gradient unless they are ``trainable``
    wide_norms: bool = False  # batch norms keep weights in fp32 beside activations in fp16
    channels_last: bool = False  # pictures lie in memory pixel by pixel
    # whether gradient rules are noted: in training, during the forward pass
    recording: bool = field(init=False)

    def __post_init__(self) -> None:
        self.recording = self.training

    @contextmanager
    def scope(self, word: str) -> Iterator[None]:
        """Give the operators emitted inside one more word in their label."""
        before = self.label
        self.label = f"{before}.{word}" if before else word
        try:
            yield
        finally:
            self.label = before

    def clear(self) -> None:
        """Forget all that was written, so that tensors and tape no longer refer to each other."""
        self.entries.clear()
        self.nodes.clear()
        self.parameters.clear()
        self.tied.clear()
        self.saved.clear()

    def math_dtype(self, dtype: Dtype) -> Dtype:
        """Return the format products are computed in.

        It is TF32 for fp32 tensors where the user allows it.
        """
        return Dtype.TF32 if self.tf32 and dtype is Dtype.FP32 else dtype

    def convolution_dtype(
        self,
        dtype: Dtype,
        *,
        depthwise: bool = False,
    ) -> Dtype:
        """Return the format convolutions are computed in.

        It is TF32 for fp32 tensors, whatever ``tf32`` says: PyTorch lets cuDNN round fp32 to TF32
        unless a user forbids it (``torch.backends.cudnn.allow_tf32`` is True), and does not let
        cuBLAS. Depthwise convolutions have no product in them and run on CUDA cores.
        """
        return Dtype.TF32 if dtype is Dtype.FP32 and not depthwise else dtype

    def empty(
        self,
        shape: Shape,
        dtype: Dtype,
        strides: Shape | None = None,
    ) -> Tensor:
        """Return a new tensor, row-major unless strides are stated."""
        storage = Storage(prod(shape) * dtype.byte)
        return Tensor(
            self,
            shape,
            strides or contiguous_strides(shape),
            dtype,
            storage,
        )

    def picture(self, shape: Shape, dtype: Dtype) -> Tensor:
        """Return a new picture ``[n, c, h, w]``, in the order of memory that pictures have here.

        Signals ``[n, c, length]`` are row-major in any case.
        """
        return self.empty(shape, dtype, self.picture_strides(shape))

    def picture_strides(self, shape: Shape) -> Shape | None:
        """Return the strides of a picture, None where it is row-major."""
        if not self.channels_last or len(shape) != 4:
            return None
        _, c, h, w = shape
        return c * h * w, 1, w * c, c

    def parameter(
        self,
        *shape: int,
        dtype: Dtype,
        tied: bool = False,
        trainable: bool = False,
    ) -> Tensor:
        """Return a weight of the model; a ``tied`` one is counted where it first appeared."""
        weight = self.empty(shape, dtype)
        weight.storage.resident = True
        weight.needs_grad = self.training and (trainable or not self.frozen)
        weights = self.tied if tied else self.parameters
        weights.append(weight)
        return weight

    def emit(
        self,
        op: Operator,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:
        """Append an operator, which must be new, under the current label."""
        op.__dict__["label"] = self.label
        self.entries.append(TapeEntry(op, tuple(reads), tuple(writes)))

    def launch(
        self,
        op: Operator,
        reads: Sequence[Tensor],
        shape: Shape,
        dtype: Dtype | None = None,
    ) -> Tensor:
        """Append an operator and return the new tensor that it writes.

        By default it is in the format of the first tensor read.
        """
        out = self.empty(shape, dtype or reads[0].dtype)
        self.emit(op, reads, (out,))
        return out

    def emit_pointwise(
        self,
        function: str,
        reads: Sequence[Tensor],
        out: Tensor,
        layout: Layout,
        extents: Extents | None = None,
    ) -> None:
        """Append the elementwise operator that computes ``out``.

        It computes in the number format of the first input.
        """
        operands = [tensor.operand for tensor in reads]
        dtype = reads[0].dtype
        op = describe_pointwise(
            function,
            operands,
            out.operand,
            dtype,
            layout,
            extents,
        )
        self.emit(op, reads, (out,))

    def record(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor | None],
        rule: GradientRule,
        save: Sequence[Tensor] = (),
    ) -> None:
        """Note how gradients flow back, when any input needs one.

        ``save`` stays in memory until then.
        """
        if not self.recording:
            return
        if not any(tensor is not None and tensor.needs_grad for tensor in inputs):
            return
        for out in outputs:
            out.needs_grad = True
        for tensor in save:
            self.saved[id(tensor.storage)] = tensor.storage
        self.nodes.append(GradientNode(outputs, inputs, rule, self.label))


def make_tensor(
    shape: Shape,
    dtype: Dtype,
    strides: Shape | None = None,
) -> Tensor:
    """Return a tensor that is known by its shape only, as readers of recorded calls need it."""
    return Tape().empty(shape, dtype, strides)


def pointwise(
    function: str,
    *inputs: Tensor,
    out_dtype: Dtype | None = None,
) -> Tensor:
    """Launch one elementwise kernel over broadcast inputs; the caller records the gradient."""
    tape = inputs[0].tape
    operands = tuple([(t.shape, t.strides, t.dtype) for t in inputs])
    shape, strides, dtype, op = memory_layout.plan_pointwise(function, operands, out_dtype)
    out = tape.empty(shape, dtype, strides)
    tape.entries.append(TapeEntry(op.with_label(tape.label), inputs, (out,)))
    return out


def unary(
    function: str,
    x: Tensor,
    back: Callable[[Tensor], Tensor],
    save: Sequence[Tensor] = (),
) -> Tensor:
    """Launch a pointwise function of one tensor whose gradient is ``back``."""
    return pointwise(function, x).with_gradient(back, x, save=save)


def fill(
    tape: Tape,
    shape: Shape,
    dtype: Dtype,
) -> Tensor:
    """Write a constant or a range; nothing is read."""
    out = tape.empty(shape, dtype)
    tape.emit(Elementwise("fill", out.numel or 1, dtype=dtype), (), (out,))
    return out


def add_into(total: Tensor, summand: Tensor) -> Tensor:
    """Compute ``total += summand``.

    Autograd gathers the gradients of a tensor that was used twice in this way."""
    walks = [(tensor.shape, tensor.strides) for tensor in (total, summand)]
    layout = memory_layout.classify_layout(total.shape, total.strides, walks)
    total.tape.emit_pointwise("add", (total, summand), total, layout)
    return total


def cat(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate along ``axis``; the gradients are views of the whole."""
    parts = [part for part in parts if part.numel]
    first = parts[0]
    axis %= len(first.shape)
    length = sum([part.shape[axis] for part in parts])
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    out = first.tape.empty(shape, first.dtype)
    layout, extents = describe_concatenation(parts, axis)
    first.tape.emit_pointwise(
        "cat",
        parts,
        out,
        layout,
        extents,
    )

    def back(g: Tensor) -> list[Tensor]:
        return [
            Tensor(
                g.tape,
                part.shape,
                g.strides,
                g.dtype,
                g.storage,
            )
            for part in parts
        ]

    return out.with_gradient(back, *parts)


def is_turned(a: Tensor, b: Tensor) -> bool:
    """Return whether both factors of a product lie with the dimension that is summed outermost."""
    if min(a.shape[-2:]) <= 1:
        return False
    return a.strides[-2] == 1 != a.strides[-1] and b.strides[-1] == 1


def describe_concatenation(parts: Sequence[Tensor], axis: int) -> tuple[Layout, tuple[int, int]]:
    """Return the layout, how often the parts follow one another, and the elements of the last part.

    A part alone stood beside an empty tensor, as the first of a cache does: PyTorch copies it
    element by element."""
    rows = max(prod(parts[0].shape[:axis]), 1)
    run = max(parts[-1].numel // rows, 1)
    is_whole = len(parts) > 1 and all(part.is_contiguous for part in parts)
    layout = Layout.CONTIGUOUS if is_whole else Layout.STRIDED
    return layout, (rows, run)


def reduce(
    function: str,
    x: Tensor,
    shape: Shape,
    *,
    across: bool = False,
) -> Tensor:
    """Make few elements out of many; ``n`` counts those read.

    ``across``: the innermost dimension stays.
    """
    out = x.tape.empty(shape, x.dtype)
    layout = Layout.CONTIGUOUS if x.is_contiguous else Layout.STRIDED
    if across and x.strides[-1] == 1:
        layout = Layout.TRANSPOSED
    op = Elementwise(
        function,
        x.numel,
        dtype=x.dtype,
        layout=layout,
        read=None if x.byte == x.numel * x.dtype.byte else x.byte,
        write=out.byte,
    )
    x.tape.emit(op, (x,), (out,))
    return out
