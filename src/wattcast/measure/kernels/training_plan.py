"""A second plan: what training, caches, batch norm and larger batches run beside the operators of the first.

As :mod:`~wattcast.measure.kernels.plan`: half the dimensions of real models, half random ones, a fixed order that
serves every kind early, none twice. Operators are written as a workload file has them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.measure.kernels.from_workload import from_operator
from wattcast.measure.kernels.plan import LARGEST_BYTE, LONGEST_S, convolutions, log_uniform, transformers
from wattcast.measure.kernels.spec import Spec

SEED = 20261115
Plain = dict[str, Any]
Maker = Callable[[Random], Plain]


def training_plan() -> list[Spec]:
    """All operators, kinds interleaved in proportion to their number."""
    placed: list[tuple[float, str, Spec]] = []
    for kind, (count, make) in WANTED.items():
        random = Random(f"{SEED}-{kind}")  # noqa: S311  (shapes, not secrets)
        found: dict[str, Spec] = {}
        for _ in range(40 * count):
            spec = from_operator(make(random))
            if spec is not None and spec.guessed_s <= LONGEST_S and spec.byte <= LARGEST_BYTE:
                found.setdefault(spec.id, spec)
            if len(found) == count:
                break
        placed += [((place + 0.5) / len(found), kind, spec) for place, spec in enumerate(found.values())]
    return [spec for _, _, spec in sorted(placed, key=lambda item: item[:2])]


def _dtype(random: Random, wide: int = 25) -> str:
    return random.choices(["bf16", "fp32", "fp16"], [85 - wide, wide, 15])[0]


def _model(random: Random) -> dict[str, int]:
    row = random.choice(transformers())
    return {name: int(value) for name, value in row.items() if isinstance(value, int)}


def _tokens(random: Random, low: int = 64, high: int = 32768) -> int:
    return 2 ** random.randint(low.bit_length() - 1, 15) if random.random() < 0.6 else log_uniform(random, low, high)


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
        [model["hidden"], model["intermediate"], model["hidden"] * 3, log_uniform(random, 32, 50000)]
    )
    length = _tokens(random)
    byte = Dtype(dtype).byte
    return {"op": "sum", "n": results * length, "write": results * byte, "layout": "transposed", "dtype": dtype}


def _picture(random: Random) -> tuple[int, int, int]:
    row = random.choice(convolutions())
    side = max(int(row["size"]) // int(row["stride"]), 1)
    return random.choice([1, 4, 8, 16, 32, 64, 128, 256]), int(row["k"]), side


def _batch_norm(function: str) -> Maker:
    def make(random: Random) -> Plain:
        pictures, channels, side = _picture(random)
        dtype = _dtype(random)
        n = pictures * channels * side * side
        operator = {"op": function, "n": n, "rows": channels, "run": side * side, "dtype": dtype}
        if function == "batchnorm_grad":
            operator["read"] = 4 * n * Dtype(dtype).byte
        return operator | ({"layout": "transposed"} if random.random() < 0.3 else {})

    return make


def _pool(function: str) -> Maker:
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
        rows, dim = _tokens(random), random.choice([model["hidden"], model["hidden"], log_uniform(random, 64, 16384)])
        if kind == "softmax":
            dim = random.choice(
                [128, 197, 256, 512, 1024, 2048, 4096, model["vocabulary"], log_uniform(random, 64, 65536)]
            )
            rows = rows if dim > 8192 else rows * model["heads"] // 4 + 1
        return {"op": kind, "rows": rows, "dim": dim, "dtype": dtype, "backward": True}

    return make


def _attention(**kind: bool) -> Maker:
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
        n = log_uniform(random, 4096, 200_000_000, random.choice([8, 256, 768, 1024]))
        more = ({"write": n * (byte + write)} if write else {}) | ({"read": n * (byte + read)} if read else {})
        return {"op": random.choice(functions), "n": n, "dtype": dtype, **more}

    return make


def _adamw(random: Random) -> Plain:
    dtype = random.choices(["bf16", "fp32"], [65, 35])[0]
    n = log_uniform(random, 100_000, 60_000_000)
    return {"op": "adamw", "n": n, "write": 3 * n * Dtype(dtype).byte, "dtype": dtype}


def _scatter(random: Random) -> Plain:
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
        m, n = (log_uniform(random, 64, 24576, random.choice([1, 2, 8, 64])) for _ in "mn")
    dtype = random.choices(["bf16", "fp16", "tf32", "fp32"], [65, 15, 12, 8])[0]
    return {"op": "linear", "m": m, "n": n, "k": _tokens(random), "turned": True, "dtype": dtype}


def _convolution(direction: str) -> Maker:
    def make(random: Random) -> Plain:
        row = random.choice(convolutions())
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
    "batchnorm": (50, _batch_norm("batchnorm")),
    "batchnorm.train": (25, _batch_norm("batchnorm_train")),
    "batchnorm.backward": (25, _batch_norm("batchnorm_grad")),
    "pool": (16, _pool("pool")),
    "pool.backward": (10, _pool("pool_grad")),
    "layernorm.backward": (50, _rows("layernorm")),
    "rmsnorm.backward": (30, _rows("rmsnorm")),
    "softmax.backward": (40, _rows("softmax")),
    "attention.backward": (70, _attention(backward=True)),
    "attention.dropout": (30, _attention(dropout=True)),
    "optimizer": (25, _adamw),
    "dropout": (20, _flat("dropout", write=1)),
    "dropout.backward": (15, _flat("dropout_grad", read=1)),
    "activation.backward": (45, _flat(*_GRADIENTS)),
    "flat": (25, _flat("shift", "cube", "fill", "sin", "cos")),
    "scatter": (20, _scatter),
    "weight": (90, _weight),
    "dgrad": (55, _convolution("dgrad")),
    "wgrad": (55, _convolution("wgrad")),
    "spread": (40, _spread),
}
