"""The operators that the kernel campaign measures: shapes, number formats and layouts of operands.

``wattcast/lab/campaigns/kernel_plan_draws.py`` drew the plan (``kernel_plan.jsonl.gz``): thousands
of operators in a fixed random order in which every family appears early, so that a campaign may
stop at any time.

``spec_from_operator`` takes an operator of a workload file. Weights of linear layers and
convolutions and the cache of decode come from DRAM, as in a model. An elementwise operator that is
not contiguous is accepted where it states how it walks memory (``rows`` and ``run``)."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from typing import Any

from wattcast.core import (
    Dtype,
    bad_value,
    files,
)
from wattcast.core.measured_calls import find_measured_call
from wattcast.core.measured_rows import Plain

# Rough rates that only keep over-long calls out of the plan; no result depends on them.
_PLANNING_FLOP_PER_S = {
    "bf16": 6e14,
    "fp16": 6e14,
    "fp8": 1.1e15,
    "tf32": 3e14,
    "fp32": 4e13,
}
_PLANNING_BYTE_PER_S = 3.5e12


@dataclass(frozen=True)
class OperatorSpec:
    """One operator of the campaign. ``operator`` is the workload-file form, ``detail`` what it
    leaves open.
    """

    family: str
    operator: dict[str, Any]
    layout: str = ""
    rotated: str = "none"
    detail: dict[str, Any] = field(default_factory=dict)
    # why it is measured; changes nothing of what runs
    chosen: str = field(default="plan", compare=False)

    @property
    def id(self) -> str:
        """Stable name: a digest of everything that changes what runs."""
        text = json.dumps(
            [self.family, self.operator, self.layout, self.rotated, self.detail], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def dtype(self) -> Dtype:
        """Format of the operands."""
        return Dtype.parse(self.operator["dtype"])

    @property
    def byte(self) -> float:
        """Bytes of all operands and outputs, roughly; for planning alone."""
        o = self.operator
        width = self.dtype.byte
        match o["op"]:
            case "linear":
                return float(
                    width * (o["m"] * o["k"] + o["n"] * o["k"]) + 2 * width * o["m"] * o["n"]
                )
            case "bmm":
                return float(width * o["b"] * (o["m"] * o["k"] + o["n"] * o["k"] + o["m"] * o["n"]))
            case "conv2d":
                image = o["n"] * o["h"] * o["w"] * o["c"]
                return float(width * (image + image * o["k"] / o["c"] / o["stride"] ** 2))
            case "attention":
                heads = 2 * o["heads"] * o["q_len"] + 2 * o["kv_heads"] * o["kv_len"]
                return float(width * o["batch"] * o["head_dim"] * heads)
            case "elementwise":
                return float((7 if o["function"] == "adamw" else 3) * max(width, 4) * o["n"])
            case "softmax" | "layernorm" | "rmsnorm":
                return float((4 if o.get("backward") else 2) * max(width, 4) * o["rows"] * o["dim"])
            case _:  # a registered operator does not say
                return 0.0

    @property
    def flop(self) -> float:
        """Arithmetic of the products; for planning alone."""
        o = self.operator
        match o["op"]:
            case "linear" | "bmm":
                return float(2.0 * o.get("b", 1) * o["m"] * o["n"] * o["k"])
            case "conv2d":
                per_pixel = o["k"] * o["c"] / o["groups"] * o["r"] * o["s"]
                return float(2.0 * o["n"] * o["h"] * o["w"] / o["stride"] ** 2 * per_pixel)
            case "attention":
                products = 10.0 if o.get("backward") else 4.0
                return float(
                    products * o["batch"] * o["heads"] * o["q_len"] * o["kv_len"] * o["head_dim"]
                )
            case _:
                return 0.0

    @property
    def guessed_s(self) -> float:
        """A lower bound for planning: roofline with round rates."""
        rate = _PLANNING_FLOP_PER_S.get(self.dtype.value, 4e13)
        return max(self.flop / rate, self.byte / _PLANNING_BYTE_PER_S)


UNARY = (
    "scale",
    "gelu",
    "gelu_tanh",
    "silu",
    "relu",
    "tanh",
    "exp",
    "sigmoid",
    "neg",
    "square",
    "rsqrt",
    "pow",
)
MORE_UNARY = ("shift", "cube", "sqrt", "log", "abs", "sin", "cos", "hardswish", "fill")
BINARY = ("add", "mul", "sub", "div", "maximum")
GRADIENTS = (
    "relu_grad",
    "tanh_grad",
    "sigmoid_grad",
    "gelu_grad",
    "gelu_tanh_grad",
    "silu_grad",
    "hardswish_grad",
)
LONGEST_S = 0.012  # of one call, by the planning estimate
LARGEST_BYTE = 6e9


@cache
def read_kernel_plan(round_: int = 1) -> tuple[OperatorSpec, ...]:
    """Read all operators of a round, families interleaved in proportion, none of an earlier
    round.
    """
    packed = files("wattcast.lab.campaigns").joinpath("kernel_plan.jsonl.gz").read_bytes()
    lines = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    last = lines[-1]["round"]
    if not 1 <= round_ <= last:
        raise bad_value("--round", f"a round of the plan, 1 to {last}", round_)
    return tuple(OperatorSpec(**line["spec"]) for line in lines if line["round"] == round_)


def take_subset(
    specs: Sequence[OperatorSpec],
    counts: dict[str, int],
    keep: Callable[[OperatorSpec], bool] = lambda spec: True,
) -> list[OperatorSpec]:
    """Take the first operators of each family that pass ``keep``, families interleaved in
    proportion.
    """
    placed: list[tuple[float, str, OperatorSpec]] = []
    for family, count in counts.items():
        chosen = [spec for spec in specs if spec.family == family and keep(spec)][:count]
        placed += [((place + 0.5) / len(chosen), family, spec) for place, spec in enumerate(chosen)]
    return [spec for _, _, spec in sorted(placed, key=lambda item: item[:2])]


FORMATS = ("bf16", "fp16", "fp32", "tf32", "fp8")  # of the operand pools
_PLAIN_FUNCTIONS = (*UNARY, *MORE_UNARY, *BINARY, *GRADIENTS, "cast", "copy")
_LEAST_PAST = 4  # times the new part: a cache, rather than two halves laid side by side


def spec_from_operator(plain: Plain) -> OperatorSpec | None:
    """Return the operator as the campaign runs it, or None where the campaign cannot."""
    operator = {name: value for name, value in plain.items() if name not in ("count", "label")}
    formats = {operator.get(name, "bf16") for name in ("dtype", "out_dtype", "weight_dtype")}
    if not formats <= set(FORMATS):
        return None
    match operator["op"]:
        case "linear":
            return _spec_linear(operator)
        case "bmm":
            return _spec_batched_product(operator)
        case "conv2d":
            return _spec_convolution(operator)
        case "softmax" | "layernorm" | "rmsnorm":
            is_fused = {"read", "write"} & set(operator)
            return None if is_fused else OperatorSpec(operator["op"], operator, "contiguous")
        case "attention":
            return _spec_attention(operator)
        case "collective":
            return None
        case kind if find_measured_call(kind) is not None:
            return OperatorSpec(kind, operator)
    return _spec_elementwise(operator)


def _spec_linear(operator: Plain) -> OperatorSpec | None:
    """Return a linear layer; one in fp8 yields bf16 and has sizes that are multiples of 16."""
    fields = {"bias": False, **operator}
    if fields["dtype"] == "tf32":
        fields.pop("out_dtype", None)  # fp32, as its operands
    is_fp8 = fields["dtype"] == "fp8"
    yields_bf16 = is_fp8 and fields.get("out_dtype") == "bf16"
    if "weight_dtype" in fields or ("out_dtype" in fields and not yields_bf16):
        return None
    if is_fp8 and (not yields_bf16 or any(fields[name] % 16 for name in "mnk")):
        return None
    if not fields.get("turned"):
        return OperatorSpec("linear", fields, "nt", "weights")
    if is_fp8 or fields["bias"]:
        return None
    return OperatorSpec("linear", fields, "tn")


def _spec_batched_product(operator: Plain) -> OperatorSpec | None:
    """Return a batched product whose operands and results are of one format."""
    yields_fp32 = operator["dtype"] == "tf32" and operator.pop("out_dtype", None)
    if {"weight_dtype", "out_dtype"} & set(operator) and not yields_fp32:
        return None
    return OperatorSpec("bmm", operator, "tn" if operator.get("turned") else "nn")


def _spec_convolution(operator: Plain) -> OperatorSpec | None:
    fields = {
        "stride": 1,
        "padding": 0,
        "groups": 1,
        "channels_last": False,
        **operator,
    }
    if set(fields) - {*_CONVOLUTION, *_MORE_CONVOLUTION}:
        return None
    rotated = "none" if fields.get("direction") == "wgrad" else "weights"
    layout = "nhwc" if fields["channels_last"] else "nchw"
    return OperatorSpec("conv2d", fields, layout, rotated)


def _spec_attention(operator: Plain) -> OperatorSpec | None:
    """Return attention of prompts, or of one token over a cache, which has no gradient."""
    is_decode = operator["q_len"] == 1
    if "v_head_dim" in operator or operator["dtype"] not in ("bf16", "fp16"):
        return None
    if is_decode and operator.get("backward"):
        return None
    layout, rotated = ("bhsd", "all") if is_decode else ("bshd", "none")
    fields = {"causal": False, **operator}
    return OperatorSpec(
        "attention",
        fields,
        layout,
        rotated,
        {"backend": "default"},
    )


_CONVOLUTION = (
    "op",
    "n",
    "c",
    "k",
    "h",
    "w",
    "r",
    "s",
    "stride",
    "padding",
    "groups",
    "channels_last",
    "dtype",
)
_MORE_CONVOLUTION = ("direction", "stride_w", "padding_w", "dilation")


def _spec_elementwise(operator: Plain) -> OperatorSpec | None:
    """Return an elementwise operator by how its operands lie; each form knows the sizes it
    needs.
    """
    name = operator["op"]
    fields = {
        **operator,
        "op": "elementwise",
        "function": name,
    }
    width = Dtype.parse(fields["dtype"]).byte
    if name in _OWN:
        return _OWN[name](fields, width)
    layout = fields.get("layout", "contiguous")
    drops = name in ("dropout", "dropout_grad")
    if layout == "broadcast" and not drops:
        return _spec_broadcast(fields, width)
    if not drops and (name not in _PLAIN_FUNCTIONS or {"read", "write"} & set(fields)):
        return None
    if layout == "contiguous":
        columns = fields["n"] & -fields["n"]  # the largest power of two in it
        return _make_spec(
            fields, "dropout" if drops else layout, rows=fields["n"] // columns, cols=columns
        )
    if drops:
        return None
    rows = fields.get("rows")
    if not rows or fields["n"] % rows:
        return None
    cols = fields["n"] // rows
    if layout == "strided":
        return _make_spec(fields, "strided", rows=rows, cols=cols)
    run = fields.get("run", 0)
    return (
        _make_spec(
            fields,
            "transposed",
            rows=rows,
            cols=cols,
            inner=run,
        )
        if run and rows % run == 0
        else None
    )


def _make_spec(
    fields: Plain,
    form: str,
    rotated: str = "none",
    *,
    layout: str = "",
    **detail: Any,
) -> OperatorSpec:
    layout = layout or fields.get("layout", "contiguous")
    return OperatorSpec(
        "elementwise",
        fields,
        layout,
        rotated,
        {"form": form, **detail},
    )


def _spec_reduction(fields: Plain, width: int) -> OperatorSpec | None:
    results = fields.get("write", 0) // width
    if "read" in fields or not results or fields["n"] % results or "out_dtype" in fields:
        return None
    forms = {
        "contiguous": "reduce",
        "transposed": "columns",
        "broadcast": "reduce",
    }
    form = forms.get(fields.get("layout", "contiguous"))
    return _make_spec(fields, form, rows=results, cols=fields["n"] // results) if form else None


def _spec_concatenation(fields: Plain, width: int) -> OperatorSpec | None:
    rows = fields.get("rows")
    last = fields.get("run")
    if {"read", "write"} & set(fields) or not rows or not last or fields["n"] % rows:
        return None
    cols = fields["n"] // rows
    if cols >= (_LEAST_PAST + 1) * last and cols % last == 0:  # a cache differs from layer to layer
        return _make_spec(
            fields,
            "append",
            "all",
            rows=rows,
            cols=cols,
            last=last,
        )
    strided = fields.get("layout") == "strided" and last < cols
    return _make_spec(
        fields,
        "strided" if strided else "join",
        rows=rows,
        cols=cols,
        last=last,
    )


def _spec_broadcast(fields: Plain, width: int) -> OperatorSpec | None:
    """Return a broadcast, whose small operand holds one element a row, or rows that serve several
    each.
    """
    name = fields["function"]
    rows = fields.get("rows")
    n = fields["n"]
    is_binary = name in BINARY
    if (
        not (is_binary or name in ("copy", "scale"))
        or not rows
        or n % rows
        or "out_dtype" in fields
    ):
        return None
    cols = n // rows
    small = (fields.get("read", 2 * n * width) - is_binary * n * width) // width
    if small == rows and small != cols:
        return _make_spec(
            fields,
            "broadcast",
            rows=rows,
            cols=cols,
            over="cols",
        )
    if small % cols == 0 and rows % (small // cols) == 0:
        groups: Plain = {"groups": small // cols} if small > cols else {}
        return _make_spec(
            fields,
            "broadcast",
            over="rows",
            rows=rows,
            cols=cols,
            **groups,
        )
    if is_binary and small > 1 and rows % small == 0:  # an element a channel, for every picture
        return _make_spec(
            fields,
            "broadcast",
            over="cols",
            rows=rows,
            cols=cols,
            groups=rows // small,
        )
    return None


def _spec_picked_rows(fields: Plain, width: int) -> OperatorSpec | None:
    """Return rows that are picked from a table, or added to one, by an index of eight bytes
    each.
    """
    gathers = fields["function"] == "gather"
    rows = (fields.get("read", 0) - (1 if gathers else 2) * fields["n"] * width) // 8
    if rows < 1 or fields["n"] % rows or fields["n"] < 8 * rows or (gathers and "write" in fields):
        return None
    layout = "strided" if gathers else ""
    return _make_spec(
        fields,
        "gather" if gathers else "scatter",
        layout=layout,
        rows=rows,
        cols=fields["n"] // rows,
    )


def _batch_norm(fields: Plain, width: int) -> OperatorSpec | None:
    channels = fields.get("rows")
    pixels = fields.get("run")
    if not channels or not pixels or fields["n"] % (channels * pixels):
        return None
    high = next(side for side in range(isqrt(pixels), 0, -1) if pixels % side == 0)
    layout = "nhwc" if fields.get("layout") == "transposed" else "nchw"
    pictures = fields["n"] // (channels * pixels)
    return _make_spec(
        fields,
        "batchnorm",
        layout=layout,
        pictures=pictures,
        channels=channels,
        high=high,
        wide=pixels // high,
    )


def _spec_pool(fields: Plain, width: int) -> OperatorSpec | None:
    """Return a pool of square windows over square planes that gives as many results as are
    written.
    """
    planes = fields.get("rows")
    moved = fields.get("write" if fields["function"] == "pool" else "read")
    if not planes or not moved or moved % (width + 8):
        return None
    side = isqrt(fields["n"] // planes)
    out = isqrt(moved // (width + 8) // planes)
    if side * side * planes != fields["n"] or not out:
        return None
    stride = max(round(side / out), 1)
    for size, padding in ((3, 1), (2, 0), (3, 0), (stride, 0), (stride + 1, stride // 2)):
        if (side + 2 * padding - size) // stride + 1 == out:
            return _make_spec(
                fields,
                "pool",
                planes=planes,
                side=side,
                size=size,
                stride=stride,
                padding=padding,
            )
    return None


_OWN: dict[str, Callable[[Plain, int], OperatorSpec | None]] = {
    **dict.fromkeys(("gather", "scatter_add"), _spec_picked_rows),
    **dict.fromkeys(("batchnorm", "batchnorm_train", "batchnorm_grad"), _batch_norm),
    **dict.fromkeys(("pool", "pool_grad"), _spec_pool),
    **dict.fromkeys(("sum", "mean", "max"), _spec_reduction),
    "cat": _spec_concatenation,
    "adamw": lambda given, width: _make_spec(given, "adamw"),
}
