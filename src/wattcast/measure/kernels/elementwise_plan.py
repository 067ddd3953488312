"""Elementwise operators of the plan: contiguous, strided, broadcast and transposing forms.

``detail`` holds the two-dimensional sizes and the form; ``read`` and ``write`` are given where they do
not follow from ``n``.
"""

from __future__ import annotations

from random import Random
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.measure.kernels.spec import Spec

UNARY = ("scale", "gelu", "gelu_tanh", "silu", "relu", "tanh", "exp", "sigmoid", "neg", "square", "rsqrt", "pow")
BINARY = ("add", "mul", "sub", "div", "maximum")
MOVES = ("cast", "copy", "cat", "gather", "sum", "mean", "max", "masked_fill", "where")
_FORMS = {
    "contiguous": (*UNARY, *BINARY, "copy", "cast", "cast"),
    "strided": ("copy", "copy", "add", "mul", "neg", "silu", "cat", "cat", "scale"),
    "broadcast": ("add", "add", "mul", "mul", "masked_fill", "where", "sub", "div"),
    "transposed": ("copy", "copy", "add", "mul", "cast"),
    "reduce": ("sum", "mean", "max"),
    "gather": ("gather",),
}
_WEIGHTS = [42, 14, 14, 12, 10, 8]


def elementwise(random: Random) -> Spec:
    """One random elementwise operator."""
    form = random.choices(list(_FORMS), _WEIGHTS)[0]
    function = random.choice(_FORMS[form])
    dtype = random.choices(["bf16", "fp32", "fp16"], [55, 30, 15])[0]
    rows, cols = _sizes(random)
    operator: dict[str, Any] = {"op": "elementwise", "function": function, "n": rows * cols, "dtype": dtype}
    detail: dict[str, Any] = {"form": form, "rows": rows, "cols": cols}
    if function == "cast":
        operator["out_dtype"] = random.choice([d for d in ("bf16", "fp32", "fp16") if d != dtype])
    layout = {"reduce": "contiguous", "gather": "strided"}.get(form, form)
    if form == "broadcast":
        detail["over"] = random.choice(["rows", "rows", "cols"])
    if form == "transposed":
        detail["inner"] = random.choice([d for d in (1, 1, 64, 128) if rows % max(d, 1) == 0])
    operator |= _bytes(function, form, dtype, rows, cols, detail)
    if layout != "contiguous":
        operator["layout"] = layout
    return Spec("elementwise", operator, layout, "all" if random.random() < 0.15 else "none", detail)


def _sizes(random: Random) -> tuple[int, int]:
    """Rows and columns: hidden sizes of models, powers of two, or anything; 1 k to 400 M elements."""
    pick = random.random()
    if pick < 0.4:
        cols = random.choice([768, 1024, 1280, 1536, 2048, 3072, 3584, 4096, 5120, 8192, 11008, 14336])
    elif pick < 0.75:
        cols = 2 ** random.randint(5, 14)
    else:
        cols = random.randint(33, 20000)
    elements = 1e3 * (4e8 / 1e3) ** random.random()
    rows = max(int(elements / cols), 1)
    if random.random() < 0.5:
        rows = 2 ** (rows.bit_length() - 1)
    return rows, cols


def _bytes(function: str, form: str, dtype: str, rows: int, cols: int, detail: dict[str, Any]) -> dict[str, int]:
    """Bytes read and written where the function's number of inputs times ``n`` does not say it."""
    width, n = Dtype(dtype).byte, rows * cols
    small = cols if detail.get("over") == "rows" else rows
    if form == "broadcast":
        mask = 1 if function in ("masked_fill", "where") else width
        other = small * mask + (n * width if function == "where" else 0)
        return {"read": n * width + other, "write": n * width}
    if form == "reduce":
        return {"read": n * width, "write": rows * width}
    if function == "gather":
        return {"read": n * width + 8 * rows, "write": n * width}
    return {}
