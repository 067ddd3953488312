"""Count the kernels that cast operands of products to fp8 and fp4 in a training step.

Casts to fp8 whose scales are known from earlier steps are part of the kernels that write an operand
(``workload.tensor_functions.linear``). Here are those that need kernels of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from wattcast.core import Dtype
from wattcast.options.training_options import NVFP4_BIT, Fp8Scales, TrainingRecipe
from wattcast.training.training_coefficients import TRAINING
from wattcast.workload.model_options import SoftwareStack
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Attention, Bmm, Elementwise, Linear
from wattcast.workload.symbolic_tensor import TapeEntry

_BYTE_BITS = 8
_READ_AND_WRITTEN = 3.0  # a value that a kernel reads in two bytes and writes in one

# Bytes that casts with scales found anew move, beyond those of one kernel that casts both orders,
# for an element of tokens or of weights. Scales of a tensor or row: once more to find the largest
# value in either order, and once more to cast; of blocks: both orders by a kernel each.
_TOKEN_BYTE = {Fp8Scales.TENSOR: 4.0, Fp8Scales.ROW: 4.0, Fp8Scales.BLOCK: 2.0}
_WEIGHT_BYTE = {Fp8Scales.TENSOR: 4.0, Fp8Scales.ROW: 4.0, Fp8Scales.BLOCK: 3.0}


def cast_to_fp8_anew(ops: Sequence[Operator], recipe: TrainingRecipe) -> list[Operator]:
    """Return what casts of fp8 products move where scales are found before each product.

    Weights are cast forward and backward. Tokens count where they are multiplied: forward the
    input, backward the gradient of the result.
    """
    if recipe.fp8_scales is Fp8Scales.DELAYED:
        return []
    byte = 0.0
    for op in ops:
        if not isinstance(op, Linear | Bmm) or op.dtype is not Dtype.FP8 or op.turned:
            continue
        many = op.count * (op.b if isinstance(op, Bmm) else 1)
        byte += many * op.m * op.k * _TOKEN_BYTE[recipe.fp8_scales]
        byte += many * op.n * op.k * _WEIGHT_BYTE[recipe.fp8_scales]
    if recipe.stack is SoftwareStack.COMPILED:
        byte *= TRAINING.compiled_casts
    if not byte:
        return []
    written = byte / _READ_AND_WRITTEN
    n = int(written)
    return [
        Elementwise(
            "scale",
            n,
            dtype=recipe.dtype,
            read=int(byte - written),
            write=n,
            label="fp8 casts",
        )
    ]


FP4_CASTS = "nvfp4 casts"


def cast_to_fp4(entries: Sequence[TapeEntry], recipe: TrainingRecipe) -> list[Operator]:
    """Return the kernels that cast operands of products to NVFP4, each operand once.

    A tensor in NVFP4 has a scale of its own beside those of blocks: its largest value is found
    first, then it is cast in rows, and in columns after a Hadamard transform where the gradient of
    a weight needs it, by a kernel each [Transformer Engine, ``NVFP4Quantizer``]. Queries, keys and
    values share their input, and so do both halves of a gate. Under sequence parallelism GPUs cast
    their own tokens before they gather those of all.
    """
    if recipe.product_dtype is not Dtype.FP4:
        return []
    writer_of: dict[int, int] = {}
    elements_of: dict[tuple[int, tuple[int, ...]], int] = {}
    columns = set()
    for number, entry in enumerate(entries):
        if isinstance(entry.op, Linear | Bmm) and entry.op.dtype is Dtype.FP8:
            operand, *others = entry.reads
            key = (writer_of.get(id(operand.storage), number), operand.shape)
            if entry.op.turned or any(other.needs_grad for other in others):
                columns.add(key)
            if not entry.op.turned:
                elements_of[key] = operand.numel
        for tensor in entry.writes:
            writer_of[id(tensor.storage)] = number
    casts: list[Operator] = []
    for key, n in elements_of.items():
        largest = Elementwise("abs", n, dtype=recipe.dtype, write=0, label=FP4_CASTS)
        cast = Elementwise(
            "scale",
            n,
            dtype=recipe.dtype,
            write=int(n * NVFP4_BIT / _BYTE_BITS),
            count=2 if key in columns else 1,
            label=FP4_CASTS,
        )
        casts += [largest, cast]
    return casts


def is_cast_alone(entry: TapeEntry) -> bool:
    """Whether an operator does nothing but write narrow copies of a tensor."""
    is_scale = isinstance(entry.op, Elementwise) and entry.op.function == "scale"
    return is_scale and all(tensor.dtype is Dtype.FP8 for tensor in entry.writes)


def cast_around_attention(ops: Sequence[Operator], recipe: TrainingRecipe) -> list[Operator]:
    """Return the casts of queries, keys and values to fp8, and of results out of it.

    The backward pass narrows the gradient of the result and widens those of the three
    [Transformer Engine, ``FusedAttnFunc``].
    """
    if not recipe.fp8_attention:
        return []
    wide = recipe.dtype.byte
    casts: list[Operator] = []
    for op in ops:
        if not isinstance(op, Attention):
            continue
        tokens = op.batch * op.q_len
        value_dim = op.v_head_dim or op.head_dim
        operands = tokens * (op.heads * op.head_dim + op.kv_heads * (op.head_dim + value_dim))
        result = tokens * op.heads * value_dim
        narrowed, widened = (result, operands) if op.backward else (operands, result)
        for n, read, write in ((narrowed, wide, 1), (widened, 1, wide)):
            casts.append(
                Elementwise(
                    "scale",
                    n,
                    dtype=recipe.dtype,
                    read=n * read,
                    write=n * write,
                    count=op.count,
                    label="fp8 attention",
                )
            )
    return casts
