"""What is asked of a GPU: operators with shapes and dtypes, in issue order; nothing about any GPU.

A :class:`Graph` is a sequence of blocks, each repeated (a transformer's layer), so that a model of
eighty layers is as small as one of two. Each operator states the arithmetic it needs and the bytes
it must read and write when nothing is cached; FLOPs count a multiply-add as two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

from wattcast.dtypes import Dtype
from wattcast.errors import bad_value
from wattcast.workload.elementwise import function_of
from wattcast.workload.operators import Operator as Operator


class Layout(StrEnum):
    """How an elementwise operator walks through memory."""

    CONTIGUOUS = "contiguous"
    STRIDED = "strided"
    BROADCAST = "broadcast"
    TRANSPOSED = "transposed"

    __hash__ = str.__hash__  # as its word, which is what it equals


@dataclass(frozen=True)
class Linear(Operator):
    """``out[m, n] = in[m, k] @ weight[n, k]ᵀ (+ bias[n])``: m tokens, n out features, k in features.

    ``weight_dtype`` differs from ``dtype`` for int8 or fp8 weights kept narrow in memory. ``turned``: both
    operands lie in memory with k outermost, as for the gradient of a weight, so that their rows are m and n long.
    """

    kind: ClassVar[str] = "linear"
    m: int
    n: int
    k: int
    bias: bool = False
    weight_dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    turned: bool = False

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def read_byte(self) -> float:
        weight = (self.weight_dtype or self.dtype).byte * float(self.n) * self.k
        return self.dtype.byte * (float(self.m) * self.k + self.n * self.bias) + weight

    @property
    def write_byte(self) -> float:
        return (self.out_dtype or self.dtype).byte * float(self.m) * self.n


@dataclass(frozen=True)
class Bmm(Operator):
    """``b`` independent products ``[m, k] @ [k, n]``; ``weight_dtype`` is of the right factor, if narrower."""

    kind: ClassVar[str] = "bmm"
    b: int
    m: int
    n: int
    k: int
    out_dtype: Dtype | None = None
    weight_dtype: Dtype | None = None

    @property
    def flop(self) -> float:
        return 2.0 * self.b * self.m * self.n * self.k

    @property
    def read_byte(self) -> float:
        right = (self.weight_dtype or self.dtype).byte * float(self.n)
        return float(self.b) * (self.dtype.byte * self.m + right) * self.k

    @property
    def write_byte(self) -> float:
        return (self.out_dtype or self.dtype).byte * float(self.b) * self.m * self.n


@dataclass(frozen=True)
class Conv2d(Operator):
    """``n`` images of ``c`` channels, ``h`` by ``w``; ``k`` filters of ``r`` by ``s``.

    ``stride_w`` and ``padding_w`` are given where columns differ from rows (a convolution over time is
    one row high). ``direction`` is forward, ``dgrad`` (gradient of the input) or ``wgrad`` (of the weight); all
    three do the same arithmetic and move the same three tensors, read and written in other roles.
    """

    kind: ClassVar[str] = "conv2d"
    n: int
    c: int
    k: int
    h: int
    w: int
    r: int
    s: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    dilation: int = 1
    channels_last: bool = False
    direction: str = "forward"
    stride_w: int | None = None
    padding_w: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c % self.groups or self.k % self.groups:
            raise bad_value("conv2d.groups", f"a divisor of c={self.c} and k={self.k}", self.groups)
        known = self.__dict__
        known["p"], known["q"] = self._output()
        if self.p < 1 or self.q < 1:
            raise bad_value("conv2d", "a filter that fits the padded image", f"an output of {self.p} by {self.q}")
        if self.direction not in ("forward", "dgrad", "wgrad"):
            raise bad_value("conv2d.direction", "forward, dgrad or wgrad", self.direction)

    def _output(self) -> tuple[int, int]:
        """Rows and columns of the output image."""
        padding = self.padding if self.padding_w is None else self.padding_w
        stride = self.stride if self.stride_w is None else self.stride_w
        high = self.h + 2 * self.padding - self.dilation * (self.r - 1) - 1
        wide = self.w + 2 * padding - self.dilation * (self.s - 1) - 1
        return high // self.stride + 1, wide // stride + 1

    @cached_property
    def p(self) -> int:
        """Rows of the output image."""
        return self._output()[0]

    @cached_property
    def q(self) -> int:
        """Columns of the output image."""
        return self._output()[1]

    @property
    def flop(self) -> float:
        return 2.0 * self.n * self.p * self.q * self.k * (self.c // self.groups) * self.r * self.s

    @property
    def _tensors_byte(self) -> tuple[float, float, float]:
        image = float(self.n) * self.c * self.h * self.w
        weight = float(self.k) * (self.c // self.groups) * self.r * self.s
        out = float(self.n) * self.k * self.p * self.q
        return image * self.dtype.byte, weight * self.dtype.byte, out * self.dtype.byte

    @property
    def read_byte(self) -> float:
        image, weight, out = self._tensors_byte
        return {"forward": image + weight, "dgrad": out + weight, "wgrad": image + out}[self.direction]

    @property
    def write_byte(self) -> float:
        image, weight, out = self._tensors_byte
        return {"forward": out, "dgrad": image, "wgrad": weight}[self.direction]


@dataclass(frozen=True)
class Attention(Operator):
    """Fused scaled-dot-product attention: scores never leave the chip.

    ``flop`` counts the work a causal mask leaves; ``flop_dense`` ignores the mask, as PyTorch's
    counter does. ``backward`` runs five products in place of two. ``dropout``: weights are dropped at random, in
    training.
    """

    kind: ClassVar[str] = "attention"
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool = False
    v_head_dim: int | None = None
    backward: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise bad_value("attention.kv_heads", f"a divisor of heads={self.heads}", self.kv_heads)

    @property
    def _scores(self) -> float:
        return float(self.batch) * self.heads * self.q_len * self.kv_len

    @property
    def flop_dense(self) -> float:
        """Arithmetic of the products with no mask: 2 (forward) or 5 (backward) of them."""
        qk, v = self.head_dim, self.v_head_dim or self.head_dim
        products = (3 * qk + 2 * v) if self.backward else (qk + v)
        return 2.0 * self._scores * products

    @property
    def kept(self) -> float:
        """Share of the scores a causal mask keeps, aligned to the last key."""
        if not self.causal:
            return 1.0
        q, kv = float(self.q_len), float(self.kv_len)
        if q <= kv:
            return 1.0 - (q - 1.0) / (2.0 * kv)
        return (kv + 1.0) / (2.0 * q)

    @property
    def flop(self) -> float:
        return self.flop_dense * self.kept

    @property
    def sfu_op(self) -> float:
        return self._scores * self.kept

    @property
    def _qkvo_byte(self) -> tuple[float, float]:
        qk, v = self.head_dim, self.v_head_dim or self.head_dim
        queries = float(self.batch) * self.heads * self.q_len
        keys = float(self.batch) * self.kv_heads * self.kv_len
        return self.dtype.byte * (queries * qk + keys * (qk + v)), self.dtype.byte * queries * v

    @property
    def read_byte(self) -> float:
        qkv, out = self._qkvo_byte
        return qkv + 2.0 * out if self.backward else qkv

    @property
    def write_byte(self) -> float:
        qkv, out = self._qkvo_byte
        return qkv if self.backward else out


@dataclass(frozen=True)
class RowReduction(Operator):
    """Softmax, layer norm or RMS norm over ``rows`` rows of ``dim`` elements; see the subclasses.

    ``read`` and ``write`` (bytes) are given where other work is fused in: a residual added, a mask read.
    """

    rows: int
    dim: int
    out_dtype: Dtype | None = None
    backward: bool = False
    read: int | None = None
    write: int | None = None

    @property
    def elements(self) -> float:
        return float(self.rows) * self.dim

    @property
    def flop(self) -> float:
        return _ROW_FLOP[self.kind] * self.elements * (2.0 if self.backward else 1.0)

    @property
    def read_byte(self) -> float:
        plain = self.dtype.byte * self.elements * (2.0 if self.backward else 1.0)
        return plain if self.read is None else float(self.read)

    @property
    def write_byte(self) -> float:
        plain = (self.out_dtype or self.dtype).byte * self.elements
        return plain if self.write is None else float(self.write)


_ROW_FLOP = {"softmax": 4.0, "layernorm": 8.0, "rmsnorm": 5.0}


@dataclass(frozen=True)
class Softmax(RowReduction):
    """Softmax over the last dimension."""

    kind: ClassVar[str] = "softmax"

    @property
    def sfu_op(self) -> float:
        return 0.0 if self.backward else self.elements


@dataclass(frozen=True)
class LayerNorm(RowReduction):
    """Layer norm over the last dimension, with weight and bias."""

    kind: ClassVar[str] = "layernorm"


@dataclass(frozen=True)
class RmsNorm(RowReduction):
    """RMS norm over the last dimension, as one fused kernel."""

    kind: ClassVar[str] = "rmsnorm"


@dataclass(frozen=True)
class Elementwise(Operator):
    """A pointwise function of ``n`` output elements: ``function`` is a row of ``elementwise.csv``.

    ``read`` and ``write`` (bytes) are given when shapes do not follow from ``n``: broadcasts,
    concatenations, gathers, reductions. ``out_dtype`` differs from ``dtype`` in casts.

    ``rows`` and ``run`` say how it walks, where a layout leaves that open (None: not known). ``rows`` is the outer
    side of the two dimensions its shape folds into; ``run`` counts elements that lie together:

    - strided: ``n / rows`` elements of the input lie together;
    - broadcast: the small input serves whole rows (it holds a row, or several) or holds one element a row;
    - transposed: ``run`` elements lie together in input and output, and ``n / rows`` such runs follow one another in
      the output that do not in the input; 1 is a plain transpose;
    - cat: ``rows`` times, the parts follow one another; ``run`` elements are of the last part;
    - reductions: ``rows`` results; transposed, where neighbours in memory belong to different results;
    - batch norm: ``rows`` channels of ``run`` pixels; transposed, where channels are innermost;
    - pool: ``rows`` planes.
    """

    kind: ClassVar[str] = "elementwise"
    function: str
    n: int
    out_dtype: Dtype | None = None
    layout: Layout = Layout.CONTIGUOUS
    read: int | None = None
    write: int | None = None
    rows: int | None = None
    run: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        function_of(self.function)
        given, n = self.__dict__, self.n
        for item in ("read", "write"):
            if given[item] is not None and given[item] < 0:
                raise bad_value(f"{self.function}.{item}", "bytes, zero or more", given[item])
        for item in ("rows", "run"):
            if given[item] is not None and not 1 <= given[item] <= n:
                raise bad_value(f"{self.function}.{item}", f"from 1 to its {n} elements", given[item])

    def sized(
        self, label: str, n: int, read: int | None = None, rows: int | None = None, run: int | None = None,
        write: int | None = None,
    ) -> Elementwise:  # fmt: skip
        """The same function of another size, which the caller answers for; several times as fast as a new one.

        Most operators of most models are pointwise, and of sizes that follow from those of checked ones.
        """
        other = self.again(label)
        known = other.__dict__
        known.pop("_identity", None)
        known["n"], known["read"], known["write"], known["rows"], known["run"] = n, read, write, rows, run
        return other

    @property
    def name(self) -> str:
        return self.function

    @property
    def flop(self) -> float:
        return function_of(self.function).flop * self.n

    @property
    def sfu_op(self) -> float:
        return function_of(self.function).sfu_op * self.n

    @property
    def read_byte(self) -> float:
        return float(
            self.read if self.read is not None else function_of(self.function).inputs * self.n * self.dtype.byte
        )

    @property
    def write_byte(self) -> float:
        return float(self.write if self.write is not None else self.n * (self.out_dtype or self.dtype).byte)


@dataclass(frozen=True)
class Collective(Operator):
    """``bytes`` per GPU moved among ``gpus``: all_reduce, all_gather, reduce_scatter, all_to_all, send."""

    kind: ClassVar[str] = "collective"
    collective: str
    bytes: int
    gpus: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collective not in COLLECTIVES:
            raise bad_value("collective.kind", f"one of {', '.join(COLLECTIVES)}", self.collective)

    @property
    def name(self) -> str:
        return self.collective

    @property
    def read_byte(self) -> float:
        return float(self.bytes)

    @property
    def write_byte(self) -> float:
        return float(self.bytes)


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Block:
    """Operators issued in order, the whole ``repeat`` times over."""

    ops: tuple[Operator, ...]
    repeat: int = 1
    label: str = ""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise bad_value("block.repeat", "a whole number of at least 1", self.repeat)


@dataclass(frozen=True)
class Graph:
    """A workload: blocks of operators in issue order, and what holding it in memory takes."""

    name: str
    blocks: tuple[Block, ...]
    memory_byte: float | None = None  # weights, cache, activations, optimiser; None: unknown
    assumptions: tuple[str, ...] = ()  # every default taken on the way here

    def __post_init__(self) -> None:
        if not any(block.ops for block in self.blocks):
            raise bad_value(self.name or "workload", "at least one operator", "none")

    @classmethod
    def of(cls, name: str, ops: Iterable[Operator]) -> Graph:
        """A graph of one block."""
        return cls(name, (Block(tuple(ops)),))

    def calls(self) -> Iterator[tuple[Operator, int]]:
        """Each operator with how often it runs in all; equal ones are not merged."""
        for block in self.blocks:
            for op in block.ops:
                yield op, op.count * block.repeat

    @property
    def flop(self) -> float:
        """Floating-point operations of the whole workload."""
        return sum(op.flop * calls for op, calls in self.calls())

    @property
    def byte(self) -> float:
        """Bytes read and written by all operators when nothing is cached."""
        return sum((op.read_byte + op.write_byte) * calls for op, calls in self.calls())

    def named(self, name: str) -> Graph:
        """The same graph under another name."""
        return replace(self, name=name)
