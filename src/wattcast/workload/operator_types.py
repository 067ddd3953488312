"""The operators Wattcast knows: sizes, number formats, arithmetic and bytes of one call.

Bytes are those an operator must read and write when nothing is cached; a multiply-add counts as two
floating-point operations. Register another operator the same way, in a file of its own or here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

from wattcast.core import Dtype, bad_value
from wattcast.workload.operator_base import (
    Operator,
    OperatorWork,
    find_function,
    is_any,
    register_operator,
)


class Layout(StrEnum):
    """How an elementwise operator walks through memory."""

    CONTIGUOUS = "contiguous"
    STRIDED = "strided"
    BROADCAST = "broadcast"
    TRANSPOSED = "transposed"

    # It equals its word, so it must hash like it; this is faster than the hash of Enum.
    __hash__ = str.__hash__


@register_operator("linear", family="gemm")
class Linear(Operator):
    """``out[m, n] = in[m, k] @ weight[n, k]ᵀ (+ bias[n])``.

    There are m tokens, n output features and k input features.

    ``weight_dtype`` differs from ``dtype`` for int8 or fp8 weights that are narrow in memory.
    ``turned`` says that both operands lie in memory with k outermost (rows of m and n elements), as
    for the gradient of a weight."""

    is_product: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    m: int
    n: int
    k: int
    bias: bool = False
    weight_dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    turned: bool = False

    @property
    def form(self) -> str:
        return self.kind + " turned" * self.turned + _name_narrow_weights(self)

    @cached_property
    def work(self) -> OperatorWork:
        m = 1.0 * self.m
        n = 1.0 * self.n
        k = self.k
        weight_dtype = self.weight_dtype or self.dtype
        out_dtype = self.out_dtype or self.dtype
        input_byte = self.dtype.byte * (m * k + n * self.bias)
        weight_byte = weight_dtype.byte * n * k
        return OperatorWork(
            flop=2.0 * m * n * k,
            read_byte=input_byte + weight_byte,
            write_byte=out_dtype.byte * m * n,
        )


@register_operator("bmm", family="gemm")
class Bmm(Operator):
    """``b`` independent products ``[m, k] @ [k, n]``.

    ``weight_dtype`` and ``turned`` are those of ``Linear``.
    """

    is_product: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    b: int
    m: int
    n: int
    k: int
    out_dtype: Dtype | None = None
    weight_dtype: Dtype | None = None
    turned: bool = False

    @property
    def form(self) -> str:
        return self.kind + _name_narrow_weights(self)

    @cached_property
    def work(self) -> OperatorWork:
        b = 1.0 * self.b
        m = self.m
        n = self.n
        k = self.k
        weight_dtype = self.weight_dtype or self.dtype
        out_dtype = self.out_dtype or self.dtype
        return OperatorWork(
            flop=2.0 * b * m * n * k,
            read_byte=b * (self.dtype.byte * m + weight_dtype.byte * n) * k,
            write_byte=out_dtype.byte * b * m * n,
        )


def _name_narrow_weights(op: Linear | Bmm) -> str:
    narrow = op.weight_dtype is not None and op.weight_dtype != op.dtype
    return f" with {op.weight_dtype} weights" if narrow else ""


@register_operator("conv2d")
class Conv2d(Operator):
    """Convolve ``n`` images of ``c`` channels, ``h`` by ``w``, with ``k`` filters of ``r`` by
    ``s``.

    ``stride_w`` and ``padding_w`` are given where columns differ from rows (a convolution over time
    is one row high). ``direction`` is forward, ``dgrad`` (gradient of the input) or ``wgrad``
    (gradient of the weight). All three do the same arithmetic and move the same three tensors, but
    read and write different ones."""

    is_product: ClassVar[bool] = True
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "p", "q"})
    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {"direction": ("forward", "dgrad", "wgrad")}
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
        if self.p < 1 or self.q < 1:
            output = f"an output of {self.p} by {self.q}"
            raise bad_value("conv2d", "a filter that fits the padded image", output)

    @cached_property
    def p(self) -> int:
        """Rows of the output image."""
        covered = self.dilation * (self.r - 1) + 1
        return (self.h + 2 * self.padding - covered) // self.stride + 1

    @cached_property
    def q(self) -> int:
        """Columns of the output image."""
        padding = self.padding if self.padding_w is None else self.padding_w
        stride = self.stride if self.stride_w is None else self.stride_w
        covered = self.dilation * (self.s - 1) + 1
        return (self.w + 2 * padding - covered) // stride + 1

    @property
    def form(self) -> str:
        form = self.kind if self.direction == "forward" else f"{self.kind} {self.direction}"
        if self.groups > 1:
            form += " depthwise" if self.groups == self.c else " in groups"
        if self.dilation != 1:
            form += " dilated"
        return form

    @property
    def tensors_byte(self) -> tuple[float, float, float]:
        """Bytes of the images, of the filters and of the output."""
        image = float(self.n) * self.c * self.h * self.w
        weight = float(self.k) * (self.c // self.groups) * self.r * self.s
        out = float(self.n) * self.k * self.p * self.q
        byte = self.dtype.byte
        return image * byte, weight * byte, out * byte

    @cached_property
    def work(self) -> OperatorWork:
        image, weight, out = self.tensors_byte
        outputs = 2.0 * self.n * self.p * self.q * self.k
        flop = outputs * (self.c // self.groups) * self.r * self.s
        if self.direction == "forward":
            return OperatorWork(flop, read_byte=image + weight, write_byte=out)
        if self.direction == "dgrad":
            return OperatorWork(flop, read_byte=out + weight, write_byte=image)
        return OperatorWork(flop, read_byte=image + out, write_byte=weight)


@register_operator("attention")
class Attention(Operator):
    """Fused scaled-dot-product attention, whose scores never leave the chip.

    ``flop`` counts only the scores a causal mask keeps; ``flop_dense`` ignores the mask, as
    PyTorch's counter does. ``backward`` runs five products instead of two. ``dropout`` says that
    training drops weights at random."""

    is_product: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
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
        if is_any(self.heads % self.kv_heads):
            raise bad_value("attention.kv_heads", f"a divisor of heads={self.heads}", self.kv_heads)

    @property
    def form(self) -> str:
        form = self.kind
        if self.backward:
            form += " backward"
        if self.dropout:
            form += " with dropout"
        if self.v_head_dim is not None and self.v_head_dim != self.head_dim:
            form += " with values of another width"
        return form

    @property
    def _scores(self) -> float:
        return 1.0 * self.batch * self.heads * self.q_len * self.kv_len

    @property
    def flop_dense(self) -> float:
        """Arithmetic of the products with no mask: 2 (forward) or 5 (backward) of them."""
        qk = self.head_dim
        v = self.v_head_dim or self.head_dim
        width = (3 * qk + 2 * v) if self.backward else (qk + v)
        return 2.0 * self._scores * width

    @property
    def visible_share(self) -> float:
        """Share of the scores a causal mask keeps, aligned to the last key."""
        if not self.causal:
            return 1.0
        q = 1.0 * self.q_len
        kv = 1.0 * self.kv_len
        # Rows that see any key: the lesser of q and kv, of arrays as well
        rows = 0.5 * (q + kv - abs(q - kv))
        return rows * (2.0 * kv + 1.0 - rows) / (2.0 * q * kv)

    @cached_property
    def work(self) -> OperatorWork:
        qk = self.head_dim
        v = self.v_head_dim or self.head_dim
        queries = 1.0 * self.batch * self.heads * self.q_len
        keys = 1.0 * self.batch * self.kv_heads * self.kv_len
        qkv = self.dtype.byte * (queries * qk + keys * (qk + v))
        out = self.dtype.byte * queries * v
        return OperatorWork(
            flop=self.flop_dense * self.visible_share,
            read_byte=qkv + 2.0 * out if self.backward else qkv,
            write_byte=qkv if self.backward else out,
            sfu_op=self._scores * self.visible_share,
        )


@dataclass(frozen=True, eq=False, repr=False)
class RowReduction(Operator):
    """Softmax, layer norm or RMS norm over ``rows`` rows of ``dim`` elements; see the subclasses.

    ``read`` and ``write`` (bytes) are stated where other work is fused in: a residual added, a mask
    read."""

    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "read", "write"})
    form_words: ClassVar[Mapping[str, str]] = {"backward": " backward"}
    stacks: ClassVar[bool] = True
    flop_per_element: ClassVar[float] = 0.0
    sfu_per_element: ClassVar[float] = 0.0
    rows: int
    dim: int
    out_dtype: Dtype | None = None
    backward: bool = False
    read: int | None = None
    write: int | None = None

    @property
    def elements(self) -> float:
        """Elements read once by the forward pass."""
        return 1.0 * self.rows * self.dim

    @cached_property
    def work(self) -> OperatorWork:
        reads = self.elements * (2.0 if self.backward else 1.0)
        out_dtype = self.out_dtype or self.dtype
        usual_read = self.dtype.byte * reads
        usual_write = out_dtype.byte * self.elements
        return OperatorWork(
            flop=self.flop_per_element * reads,
            read_byte=usual_read if self.read is None else 1.0 * self.read,
            write_byte=usual_write if self.write is None else 1.0 * self.write,
            sfu_op=0.0 if self.backward else self.sfu_per_element * self.elements,
        )


@register_operator("softmax")
class Softmax(RowReduction):
    """Softmax over the last dimension; ``log``: its logarithm, as losses use it.

    ``masked`` is the share of the inputs that a mask has made so small that their results are zero.
    """

    flop_per_element: ClassVar[float] = 4.0
    sfu_per_element: ClassVar[float] = 1.0
    log: bool = False
    masked: float = 0.0


@register_operator("layernorm")
class LayerNorm(RowReduction):
    """Layer norm over the last dimension, with weight and bias."""

    flop_per_element: ClassVar[float] = 8.0


@register_operator("rmsnorm")
class RmsNorm(RowReduction):
    """RMS norm over the last dimension, as one fused kernel."""

    flop_per_element: ClassVar[float] = 5.0


@register_operator("elementwise")
class Elementwise(Operator):
    """Compute a pointwise ``function`` (a row of ``elementwise.csv``) of ``n`` output elements.

    ``read`` and ``write`` (bytes) are stated when they do not follow from ``n``: broadcasts,
    concatenations, gathers, reductions. ``out_dtype`` differs from ``dtype`` in casts.

    ``rows`` and ``run`` describe the walk through memory where the layout leaves it open (None: not
    known). ``rows`` is the outer of the two dimensions the shape folds into; ``run`` counts
    elements that are neighbours in memory:

    - strided: ``n / rows`` elements of the input are neighbours;
    - broadcast: the small input serves whole rows (it holds one row or several) or holds one
      element per row;
    - transposed: ``run`` elements are neighbours in input and output, and ``n / rows`` such runs
      follow one another in the output that do not in the input; 1 is a plain transpose;
    - cat: the parts follow one another ``rows`` times; ``run`` elements belong to the last part;
    - reductions: ``rows`` results; transposed, where neighbours in memory belong to different
      results;
    - batch norm: ``rows`` channels of ``run`` pixels; transposed, where channels are innermost;
    - pool: ``rows`` planes.
    """

    json_names: ClassVar[Mapping[str, str]] = {"function": "op"}
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "read", "write", "rows", "run"})
    stacks: ClassVar[bool] = True
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
        find_function(self.function)
        self._check_byte("read", self.read)
        self._check_byte("write", self.write)
        self._check_elements("rows", self.rows)
        self._check_elements("run", self.run)

    def _check_byte(
        self,
        name: str,
        value: int | None,
    ) -> None:
        if value is not None and value < 0:
            raise bad_value(f"{self.function}.{name}", "bytes, zero or more", value)

    def _check_elements(
        self,
        name: str,
        value: int | None,
    ) -> None:
        if value is not None and (value < 1 or is_any(self.n < value)):
            expected = f"from 1 to its {self.n} elements"
            raise bad_value(f"{self.function}.{name}", expected, value)

    @property
    def name(self) -> str:
        return self.function

    @cached_property
    def work(self) -> OperatorWork:
        function = find_function(self.function)
        n = self.n
        out_dtype = self.out_dtype or self.dtype
        usual_read = function.inputs * n * self.dtype.byte
        usual_write = n * out_dtype.byte
        return OperatorWork(
            flop=function.flop * n,
            read_byte=1.0 * (usual_read if self.read is None else self.read),
            write_byte=1.0 * (usual_write if self.write is None else self.write),
            sfu_op=function.sfu_op * n,
        )


@register_operator("collective")
class Collective(Operator):
    """Move ``bytes`` per GPU among ``gpus``: all_reduce, all_gather, reduce_scatter, all_to_all or
    send.

    ``stride`` says how GPUs of the group are numbered: neighbours (1), or every ``stride``-th, with
    other groups between them. ``software`` is nccl, or engine where a serving engine uses its own
    kernels. ``overlaps`` is how many of the operators issued next run at the same time."""

    json_names: ClassVar[Mapping[str, str]] = {"collective": "kind"}
    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "collective": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"),
        "software": ("nccl", "engine"),
    }
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "stride", "overlaps"})
    collective: str
    bytes: int
    gpus: int
    stride: int = 1
    software: str = "nccl"
    overlaps: int = 0

    @property
    def name(self) -> str:
        return self.collective

    @cached_property
    def work(self) -> OperatorWork:
        return OperatorWork(read_byte=float(self.bytes), write_byte=float(self.bytes))
