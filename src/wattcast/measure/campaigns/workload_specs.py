"""Turn an operator of a workload file into one that the campaign can run, and plan the training operators.

Weights of linear layers and convolutions and the cache of decode come from DRAM, as in a model. An elementwise
operator that is not contiguous is accepted where it states how it walks memory (``rows`` and ``run``).
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from random import Random
from typing import Any

from wattcast.core.measured_rows import find_measured_call
from wattcast.core.units import Dtype
from wattcast.measure.campaigns.kernel_plan import (
    LARGEST_BYTE,
    LONGEST_S,
    OperatorSpec,
    draw_log_uniform,
    read_convolutions,
    read_transformers,
)

FORMATS = ("bf16", "fp16", "fp32", "tf32", "fp8")  # of the operand pools
_LEAST_PAST = 4  # times the new part: a cache, rather than two halves laid side by side
Plain = dict[str, Any]


def spec_from_operator(plain: Plain) -> OperatorSpec | None:
    """Return the operator as the campaign runs it, or None where the campaign cannot."""
    operator = {k: v for k, v in plain.items() if k not in ("count", "label")}
    if not {operator.get(name, "bf16") for name in ("dtype", "out_dtype", "weight_dtype")} <= set(FORMATS):
        return None
    match operator["op"]:
        case "linear":
            return _linear(operator)
        case "bmm":
            wide = operator["dtype"] == "tf32" and operator.pop("out_dtype", None)
            return (
                None
                if {"weight_dtype", "out_dtype"} & set(operator) and not wide
                else OperatorSpec("bmm", operator, "nn")
            )
        case "conv2d":
            return _convolution(operator)
        case "softmax" | "layernorm" | "rmsnorm":
            fused = {"read", "write"} & set(operator)
            return None if fused else OperatorSpec(operator["op"], operator, "contiguous")
        case "attention":
            return _attention(operator)
        case "collective":
            return None
        case kind if find_measured_call(kind) is not None:
            return OperatorSpec(kind, operator)
    return _elementwise(operator)


def _linear(operator: Plain) -> OperatorSpec | None:
    given = {"bias": False, **operator}
    if given["dtype"] == "tf32":
        given.pop("out_dtype", None)  # fp32, as its operands
    narrow = given["dtype"] == "fp8" and given.get("out_dtype") == "bf16"
    if "weight_dtype" in given or ("out_dtype" in given and not narrow):
        return None
    if given["dtype"] == "fp8" and (not narrow or any(given[name] % 16 for name in "mnk")):
        return None
    if given.get("turned"):
        return None if given["dtype"] == "fp8" or given["bias"] else OperatorSpec("linear", given, "tn")
    return OperatorSpec("linear", given, "nt", "weights")


_CONVOLUTION = ("op", "n", "c", "k", "h", "w", "r", "s", "stride", "padding", "groups", "channels_last", "dtype")
_MORE_CONVOLUTION = ("direction", "stride_w", "padding_w", "dilation")


def _convolution(operator: Plain) -> OperatorSpec | None:
    given = {"stride": 1, "padding": 0, "groups": 1, "channels_last": False, **operator}
    if set(given) - {*_CONVOLUTION, *_MORE_CONVOLUTION}:
        return None
    rotated = "none" if given.get("direction") == "wgrad" else "weights"
    return OperatorSpec("conv2d", given, "nhwc" if given["channels_last"] else "nchw", rotated)


def _attention(operator: Plain) -> OperatorSpec | None:
    if "v_head_dim" in operator or operator["dtype"] not in ("bf16", "fp16"):
        return None
    decode = operator["q_len"] == 1
    if decode and operator.get("backward"):
        return None
    layout, rotated = ("bhsd", "all") if decode else ("bshd", "none")
    return OperatorSpec("attention", {"causal": False, **operator}, layout, rotated, {"backend": "default"})


def _elementwise(operator: Plain) -> OperatorSpec | None:
    """By how its operands lie; each form knows the sizes it needs."""
    name = operator["op"]
    given = {**operator, "op": "elementwise", "function": name}
    width = Dtype(given["dtype"]).byte
    if name in _OWN:
        return _OWN[name](given, width)
    if name in ("sum", "mean", "max"):
        return _reduction(given, width)
    if name == "cat":
        return _cat(given)
    layout = given.get("layout", "contiguous")
    if layout == "broadcast":
        return _broadcast(given, width)
    if name not in _plain_functions() or {"read", "write"} & set(given):
        return None
    if layout == "contiguous":
        columns = given["n"] & -given["n"]  # the largest power of two in it
        return _spec(given, "contiguous", rows=given["n"] // columns, cols=columns)
    rows = given.get("rows")
    if not rows or given["n"] % rows:
        return None
    cols = given["n"] // rows
    if layout == "strided":
        return _spec(given, "strided", rows=rows, cols=cols)
    run = given.get("run", 0)
    return _spec(given, "transposed", rows=rows, cols=cols, inner=run) if run and rows % run == 0 else None


def _plain_functions() -> tuple[str, ...]:
    from wattcast.measure.campaigns.elementwise_calls import GRADIENTS, MORE_UNARY
    from wattcast.measure.campaigns.kernel_plan import BINARY, UNARY

    return (*UNARY, *MORE_UNARY, *BINARY, *GRADIENTS, "cast", "copy")


def _spec(given: Plain, form: str, rotated: str = "none", *, layout: str = "", **detail: Any) -> OperatorSpec:
    layout = layout or given.get("layout", "contiguous")
    return OperatorSpec("elementwise", given, layout, rotated, {"form": form, **detail})


def _reduction(given: Plain, width: int) -> OperatorSpec | None:
    results = given.get("write", 0) // width
    if "read" in given or not results or given["n"] % results or "out_dtype" in given:
        return None
    layout = given.get("layout", "contiguous")
    if layout == "strided":
        return None
    return _spec(given, "columns" if layout == "transposed" else "reduce", rows=results, cols=given["n"] // results)


def _cat(given: Plain) -> OperatorSpec | None:
    rows, last = given.get("rows"), given.get("run")
    if {"read", "write"} & set(given) or not rows or not last or given["n"] % rows:
        return None
    cols = given["n"] // rows
    if cols >= (_LEAST_PAST + 1) * last and cols % last == 0:  # a cache differs from layer to layer
        return _spec(given, "append", "all", rows=rows, cols=cols, last=last)
    strided = given.get("layout") == "strided" and last < cols
    return _spec(given, "strided" if strided else "join", rows=rows, cols=cols, last=last)


def _broadcast(given: Plain, width: int) -> OperatorSpec | None:
    """The small operand holds one element a row, or rows that serve several each."""
    name, rows, n = given["function"], given.get("rows"), given["n"]
    both = name in ("add", "mul", "sub", "div", "maximum")
    if not (both or name in ("copy", "scale")) or not rows or n % rows or "out_dtype" in given:
        return None
    cols = n // rows
    small = (given.get("read", 2 * n * width) - both * n * width) // width
    if small == rows and small != cols:
        return _spec(given, "broadcast", rows=rows, cols=cols, over="cols")
    if small % cols == 0 and rows % (small // cols) == 0:
        groups: Plain = {"groups": small // cols} if small > cols else {}
        return _spec(given, "broadcast", over="rows", rows=rows, cols=cols, **groups)
    if both and small > 1 and rows % small == 0:  # an element a channel, for every picture
        return _spec(given, "broadcast", over="cols", rows=rows, cols=cols, groups=rows // small)
    return None


def _gather(given: Plain, width: int) -> OperatorSpec | None:
    rows = (given.get("read", 0) - given["n"] * width) // 8
    if rows < 1 or given["n"] % rows or "write" in given or given["n"] < 8 * rows:
        return None
    return _spec(given, "gather", layout="strided", rows=rows, cols=given["n"] // rows)


def _scatter(given: Plain, width: int) -> OperatorSpec | None:
    rows = (given.get("read", 0) - 2 * given["n"] * width) // 8
    if rows < 1 or given["n"] % rows or given["n"] < 8 * rows:
        return None
    return _spec(given, "scatter", rows=rows, cols=given["n"] // rows)


def _batch_norm(given: Plain, width: int) -> OperatorSpec | None:
    channels, pixels = given.get("rows"), given.get("run")
    if not channels or not pixels or given["n"] % (channels * pixels):
        return None
    high = next(side for side in range(isqrt(pixels), 0, -1) if pixels % side == 0)
    layout = "nhwc" if given.get("layout") == "transposed" else "nchw"
    pictures = given["n"] // (channels * pixels)
    return _spec(
        given, "batchnorm", layout=layout, pictures=pictures, channels=channels, high=high, wide=pixels // high
    )


def _pool(given: Plain, width: int) -> OperatorSpec | None:
    """Square windows over square planes, of a size that gives as many results as are written (with their places)."""
    planes = given.get("rows")
    moved = given.get("write" if given["function"] == "pool" else "read")
    if not planes or not moved or moved % (width + 8):
        return None
    side, out = isqrt(given["n"] // planes), isqrt(moved // (width + 8) // planes)
    if side * side * planes != given["n"] or not out:
        return None
    stride = max(round(side / out), 1)
    for size, padding in ((3, 1), (2, 0), (3, 0), (stride, 0), (stride + 1, stride // 2)):
        if (side + 2 * padding - size) // stride + 1 == out:
            return _spec(
                given, "pool", planes=planes, side=side, size=size, stride=stride, padding=padding
            )  # fmt: skip
    return None


def _dropout(given: Plain, width: int) -> OperatorSpec | None:
    columns = given["n"] & -given["n"]
    if given.get("layout", "contiguous") != "contiguous":
        return None
    return _spec(given, "dropout", rows=given["n"] // columns, cols=columns)


def _adamw(given: Plain, width: int) -> OperatorSpec | None:
    return _spec(given, "adamw")


_OWN: dict[str, Callable[[Plain, int], OperatorSpec | None]] = {
    "gather": _gather,
    "scatter_add": _scatter,
    "batchnorm": _batch_norm,
    "batchnorm_train": _batch_norm,
    "batchnorm_grad": _batch_norm,
    "pool": _pool,
    "pool_grad": _pool,
    "dropout": _dropout,
    "dropout_grad": _dropout,
    "adamw": _adamw,
}


SEED = 20261115
Maker = Callable[[Random], Plain]


def make_training_plan() -> list[OperatorSpec]:
    """Return all training operators, kinds interleaved in proportion to their number."""
    placed: list[tuple[float, str, OperatorSpec]] = []
    for kind, (count, make) in WANTED.items():
        random = Random(f"{SEED}-{kind}")  # noqa: S311  (shapes, not secrets)
        found: dict[str, OperatorSpec] = {}
        for _ in range(40 * count):
            spec = spec_from_operator(make(random))
            if spec is not None and spec.guessed_s <= LONGEST_S and spec.byte <= LARGEST_BYTE:
                found.setdefault(spec.id, spec)
            if len(found) == count:
                break
        placed += [((place + 0.5) / len(found), kind, spec) for place, spec in enumerate(found.values())]
    return [spec for _, _, spec in sorted(placed, key=lambda item: item[:2])]


def _dtype(random: Random, wide: int = 25) -> str:
    return random.choices(["bf16", "fp32", "fp16"], [85 - wide, wide, 15])[0]


def _model(random: Random) -> dict[str, int]:
    row = random.choice(read_transformers())
    return {name: int(value) for name, value in row.items() if isinstance(value, int)}


def _tokens(random: Random, low: int = 64, high: int = 32768) -> int:
    return (
        2 ** random.randint(low.bit_length() - 1, 15)
        if random.random() < 0.6
        else draw_log_uniform(random, low, high)
    )


def _append(random: Random) -> Plain:
    model = _model(random)
    heads, dim = model["kv_heads"], model["head_dim"]
    batch = random.choice([1, 2, 4, 8, 16, 32, 64, 128, 5, 24])
    length = random.choice([64, 128, 256, 512, 1024, 2048, 4096]) + random.choice([0, 0, 1, 37])
    rows = batch * heads
    operator = {"op": "cat", "n": rows * (length + 1) * dim, "rows": rows, "run": dim, "dtype": _dtype(random, 5)}
    return operator | ({"layout": "strided"} if random.random() < 0.55 else {})


def _columns(random: Random) -> Plain:
    model, dtype = _model(random), _dtype(random)
    results = random.choice(
        [model["hidden"], model["intermediate"], model["hidden"] * 3, draw_log_uniform(random, 32, 50000)]
    )
    length = _tokens(random)
    byte = Dtype(dtype).byte
    return {"op": "sum", "n": results * length, "write": results * byte, "layout": "transposed", "dtype": dtype}


def _picture(random: Random) -> tuple[int, int, int]:
    row = random.choice(read_convolutions())
    side = max(int(row["size"]) // int(row["stride"]), 1)
    return random.choice([1, 4, 8, 16, 32, 64, 128, 256]), int(row["k"]), side


def _plan_batch_norm(function: str) -> Maker:
    def make(random: Random) -> Plain:
        pictures, channels, side = _picture(random)
        dtype = _dtype(random)
        n = pictures * channels * side * side
        operator = {"op": function, "n": n, "rows": channels, "run": side * side, "dtype": dtype}
        if function == "batchnorm_grad":
            operator["read"] = 4 * n * Dtype(dtype).byte
        return operator | ({"layout": "transposed"} if random.random() < 0.3 else {})

    return make


def _plan_pooling(function: str) -> Maker:
    def make(random: Random) -> Plain:
        pictures, channels, side = _picture(random)
        dtype, side = _dtype(random), max(side // 2 * 2, 4)
        planes = pictures * channels
        moved = planes * (side // 2) ** 2 * (Dtype(dtype).byte + 8)
        named = {"pool": "write", "pool_grad": "read"}[function]
        return {"op": function, "n": planes * side * side, "rows": planes, named: moved, "dtype": dtype}

    return make


def _rows(kind: str) -> Maker:
    def make(random: Random) -> Plain:
        model, dtype = _model(random), _dtype(random, 35)
        rows, dim = (
            _tokens(random),
            random.choice([model["hidden"], model["hidden"], draw_log_uniform(random, 64, 16384)]),
        )
        if kind == "softmax":
            dim = random.choice(
                [128, 197, 256, 512, 1024, 2048, 4096, model["vocabulary"], draw_log_uniform(random, 64, 65536)]
            )
            rows = rows if dim > 8192 else rows * model["heads"] // 4 + 1
        return {"op": kind, "rows": rows, "dim": dim, "dtype": dtype, "backward": True}

    return make


def _plan_attention(**kind: bool) -> Maker:
    def make(random: Random) -> Plain:
        model = _model(random)
        length = random.choice([64, 128, 197, 256, 384, 512, 777, 1024, 2048, 4096, 8192])
        heads = {name: model[name] for name in ("heads", "kv_heads", "head_dim")}
        if random.random() < 0.7:
            heads["kv_heads"] = heads["heads"]
        batch = random.choice([1, 2, 4, 8, 16, 32])
        shape = {"batch": batch, "q_len": length, "kv_len": length, **heads}
        dropped = {"dropout": True} if random.random() < 0.3 else {}
        causal = random.random() < 0.6
        return {"op": "attention", **shape, "causal": causal, "dtype": _dtype(random, 0), **dropped, **kind}

    return make


def _flat(*functions: str, write: int = 0, read: int = 0) -> Maker:
    """Contiguous; ``read`` and ``write`` are bytes an element beside its format's, where they are more."""

    def make(random: Random) -> Plain:
        dtype = _dtype(random)
        byte = Dtype(dtype).byte
        n = draw_log_uniform(random, 4096, 200_000_000, random.choice([8, 256, 768, 1024]))
        more = ({"write": n * (byte + write)} if write else {}) | ({"read": n * (byte + read)} if read else {})
        return {"op": random.choice(functions), "n": n, "dtype": dtype, **more}

    return make


def _plan_adamw(random: Random) -> Plain:
    dtype = random.choices(["bf16", "fp32"], [65, 35])[0]
    n = draw_log_uniform(random, 100_000, 60_000_000)
    return {"op": "adamw", "n": n, "write": 3 * n * Dtype(dtype).byte, "dtype": dtype}


def _plan_scatter(random: Random) -> Plain:
    model, dtype, rows = _model(random), _dtype(random), _tokens(random)
    n = rows * model["hidden"]
    byte = n * Dtype(dtype).byte
    return {"op": "scatter_add", "n": n, "read": 2 * byte + 8 * rows, "write": byte, "dtype": dtype}


def _weight(random: Random) -> Plain:
    model = _model(random)
    pairs = [(model["hidden"], model["hidden"]), (model["intermediate"], model["hidden"])]
    pairs += [(model["hidden"], model["intermediate"]), (model["vocabulary"], model["hidden"])]
    m, n = random.choice(pairs)
    if random.random() < 0.4:
        m, n = (draw_log_uniform(random, 64, 24576, random.choice([1, 2, 8, 64])) for _ in "mn")
    dtype = random.choices(["bf16", "fp16", "tf32", "fp32"], [65, 15, 12, 8])[0]
    return {"op": "linear", "m": m, "n": n, "k": _tokens(random), "turned": True, "dtype": dtype}


def _plan_convolution(direction: str) -> Maker:
    def make(random: Random) -> Plain:
        row = random.choice(read_convolutions())
        places = {name: int(row[name]) for name in ("c", "k", "stride", "padding", "groups")}
        size, taps = int(row["size"]), int(row["filter"])
        shape = {"n": random.choice([1, 4, 8, 16, 32, 64, 128]), "h": size, "w": size, "r": taps, "s": taps}
        dtype = random.choices(["bf16", "fp16", "tf32"], [70, 15, 15])[0]
        last = {"channels_last": True} if random.random() < 0.4 else {}
        return {"op": "conv2d", **shape, **places, "direction": direction, "dtype": dtype, **last}

    return make


def _spread(random: Random) -> Plain:
    """Keys and values repeated for every query head, and tables that serve many rows."""
    model, dtype = _model(random), _dtype(random)
    length, batch = random.choice([128, 197, 512, 1024, 2048]), random.choice([1, 2, 4, 8, 16])
    cols, groups, times = length * model["head_dim"], batch * model["kv_heads"], random.choice([2, 4, 8, 12])
    n, byte = groups * times * cols, Dtype(dtype).byte
    spread = {"n": n, "rows": groups * times, "layout": "broadcast", "dtype": dtype}
    if random.random() < 0.4:
        return {"op": "copy", "read": groups * cols * byte, **spread}
    return {"op": random.choice(["add", "mul"]), "read": (n + groups * cols) * byte, **spread}


_GRADIENTS = ("gelu_grad", "gelu_tanh_grad", "silu_grad", "tanh_grad", "relu_grad", "sigmoid_grad")
WANTED: dict[str, tuple[int, Maker]] = {
    "append": (90, _append),
    "columns": (80, _columns),
    "batchnorm": (50, _plan_batch_norm("batchnorm")),
    "batchnorm.train": (25, _plan_batch_norm("batchnorm_train")),
    "batchnorm.backward": (25, _plan_batch_norm("batchnorm_grad")),
    "pool": (16, _plan_pooling("pool")),
    "pool.backward": (10, _plan_pooling("pool_grad")),
    "layernorm.backward": (50, _rows("layernorm")),
    "rmsnorm.backward": (30, _rows("rmsnorm")),
    "softmax.backward": (40, _rows("softmax")),
    "attention.backward": (70, _plan_attention(backward=True)),
    "attention.dropout": (30, _plan_attention(dropout=True)),
    "optimizer": (25, _plan_adamw),
    "dropout": (20, _flat("dropout", write=1)),
    "dropout.backward": (15, _flat("dropout_grad", read=1)),
    "activation.backward": (45, _flat(*_GRADIENTS)),
    "flat": (25, _flat("shift", "cube", "fill", "sin", "cos")),
    "scatter": (20, _plan_scatter),
    "weight": (90, _weight),
    "dgrad": (55, _plan_convolution("dgrad")),
    "wgrad": (55, _plan_convolution("wgrad")),
    "spread": (40, _spread),
}
