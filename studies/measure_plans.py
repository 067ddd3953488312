"""Write the plans that `wattcast lab kernels --plan` and
``src/wattcast/lab/campaigns/kernel_chains.py`` read.

Run: ``python studies/measure_plans.py`` (renews ``training.jsonl`` and ``chains.jsonl`` in
``src/wattcast/lab/campaigns/plans``).

The training plan draws gradients, caches, batch norm and optimiser steps around the sizes of
published models. A chain is a part of a layer of two models at several numbers of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from wattcast.core.units import Dtype
from wattcast.lab.campaigns.kernel_plan import LARGEST_BYTE, LONGEST_S, spec_from_operator

try:
    from wattcast.lab.campaigns.kernel_plan_draws import (
        draw_log_uniform,
        read_convolutions,
        read_transformers,
    )
except ModuleNotFoundError:  # run as a script
    from wattcast.lab.campaigns.kernel_plan_draws import (
        draw_log_uniform,
        read_convolutions,
        read_transformers,
    )

Plain = dict[str, Any]
MODELS = ("gpt2", "llama3-8b")
TOKENS = (1, 16, 128, 2048)
SEED = 20261115
Maker = Callable[[Random], Plain]


def make_training_plan() -> list[Plain]:
    """Return all training operators, kinds interleaved in proportion to their number."""
    placed: list[tuple[float, str, Plain]] = []
    for kind, (count, make) in WANTED.items():
        random = Random(f"{SEED}-{kind}")
        found: dict[str, Plain] = {}
        for _ in range(40 * count):
            operator = make(random)
            spec = spec_from_operator(operator)
            if spec is not None and spec.guessed_s <= LONGEST_S and spec.byte <= LARGEST_BYTE:
                found.setdefault(spec.id, operator)
            if len(found) == count:
                break
        placed += [
            ((place + 0.5) / len(found), kind, plain) for place, plain in enumerate(found.values())
        ]
    return [plain for _, _, plain in sorted(placed, key=lambda item: item[:2])]


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
    operator = {
        "op": "cat",
        "n": rows * (length + 1) * dim,
        "rows": rows,
        "run": dim,
        "dtype": _dtype(random, 5),
    }
    return operator | ({"layout": "strided"} if random.random() < 0.55 else {})


def _columns(random: Random) -> Plain:
    model, dtype = _model(random), _dtype(random)
    results = random.choice(
        [
            model["hidden"],
            model["intermediate"],
            model["hidden"] * 3,
            draw_log_uniform(random, 32, 50000),
        ]
    )
    length = _tokens(random)
    byte = Dtype(dtype).byte
    return {
        "op": "sum",
        "n": results * length,
        "write": results * byte,
        "layout": "transposed",
        "dtype": dtype,
    }


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
        return {
            "op": function,
            "n": planes * side * side,
            "rows": planes,
            named: moved,
            "dtype": dtype,
        }

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
                [
                    128,
                    197,
                    256,
                    512,
                    1024,
                    2048,
                    4096,
                    model["vocabulary"],
                    draw_log_uniform(random, 64, 65536),
                ]
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
        return {
            "op": "attention",
            **shape,
            "causal": causal,
            "dtype": _dtype(random, 0),
            **dropped,
            **kind,
        }

    return make


def _flat(*functions: str, write: int = 0, read: int = 0) -> Maker:
    """Contiguous; ``read`` and ``write`` are bytes an element beside its format's, where they are
    more.
    """

    def make(random: Random) -> Plain:
        dtype = _dtype(random)
        byte = Dtype(dtype).byte
        n = draw_log_uniform(random, 4096, 200_000_000, random.choice([8, 256, 768, 1024]))
        more = ({"write": n * (byte + write)} if write else {}) | (
            {"read": n * (byte + read)} if read else {}
        )
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
        shape = {
            "n": random.choice([1, 4, 8, 16, 32, 64, 128]),
            "h": size,
            "w": size,
            "r": taps,
            "s": taps,
        }
        dtype = random.choices(["bf16", "fp16", "tf32"], [70, 15, 15])[0]
        last = {"channels_last": True} if random.random() < 0.4 else {}
        return {"op": "conv2d", **shape, **places, "direction": direction, "dtype": dtype, **last}

    return make


def _spread(random: Random) -> Plain:
    """Keys and values repeated for every query head, and tables that serve many rows."""
    model, dtype = _model(random), _dtype(random)
    length, batch = random.choice([128, 197, 512, 1024, 2048]), random.choice([1, 2, 4, 8, 16])
    cols, groups, times = (
        length * model["head_dim"],
        batch * model["kv_heads"],
        random.choice([2, 4, 8, 12]),
    )
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


def make_chains() -> list[Plain]:
    """Return parts of a layer at several numbers of tokens, small ones first."""
    found = []
    for tokens in TOKENS:
        for row in (row for row in read_transformers() if row["model"] in MODELS):
            sizes = {
                name: int(row[name])
                for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim")
            }
            for name, make in _PARTS.items():
                members = [{"dtype": "bf16", **plain} for plain in make(tokens, **sizes)]
                found.append({"name": f"{name} {row['model']} {tokens}", "members": members})
    return found


def _linear(m: int, n: int, k: int, **more: Any) -> Plain:
    return {"op": "linear", "m": m, "n": n, "k": k, **more}


def _norm(tokens: int, hidden: int, **_: int) -> list[Plain]:
    """An RMS norm spelled out, as Hugging Face's models run it: eight kernels over little data."""
    n, wide = tokens * hidden, {"dtype": "fp32"}
    by_row = {"layout": "broadcast", "rows": tokens, "read": 4 * (n + tokens), **wide}
    by_column = {"layout": "broadcast", "rows": tokens, "read": 2 * (n + hidden)}
    return [
        {"op": "cast", "n": n, "out_dtype": "fp32"},
        {"op": "square", "n": n, **wide},
        {"op": "mean", "n": n, "write": 4 * tokens, **wide},
        {"op": "shift", "n": tokens, **wide},
        {"op": "rsqrt", "n": tokens, **wide},
        {"op": "mul", "n": n, **(by_row if tokens > 1 else wide)},
        {"op": "cast", "n": n, "out_dtype": "bf16", **wide},
        {"op": "mul", "n": n, **(by_column if tokens > 1 else {})},
    ]


def _rotary(tokens: int, heads: int, head_dim: int, **_: int) -> list[Plain]:
    """Rotary embedding of the queries: x·cos + rotate_half(x)·sin."""
    n, rows = tokens * heads * head_dim, tokens * heads
    spread = {
        "op": "mul",
        "n": n,
        "layout": "broadcast",
        "rows": rows,
        "read": 2 * (n + tokens * head_dim),
    }
    return [
        spread,
        {"op": "neg", "n": n // 2, "layout": "strided", "rows": rows},
        {"op": "cat", "n": n, "layout": "strided", "rows": rows, "run": head_dim // 2},
        spread,
        {"op": "add", "n": n},
        {"op": "scale", "n": n},
    ]


def _mlp(tokens: int, hidden: int, intermediate: int, **_: int) -> list[Plain]:
    """Layer norm, two products with bias, gelu, residual."""
    return [
        {"op": "layernorm", "rows": tokens, "dim": hidden},
        _linear(tokens, intermediate, hidden, bias=True),
        {"op": "gelu", "n": tokens * intermediate},
        _linear(tokens, hidden, intermediate, bias=True),
        {"op": "add", "n": tokens * hidden},
        {"op": "layernorm", "rows": tokens, "dim": hidden},
    ]


def _gated(tokens: int, hidden: int, intermediate: int, **_: int) -> list[Plain]:
    """A gated feed-forward block."""
    return [
        {"op": "rmsnorm", "rows": tokens, "dim": hidden},
        _linear(tokens, intermediate, hidden),
        {"op": "silu", "n": tokens * intermediate},
        _linear(tokens, intermediate, hidden),
        {"op": "mul", "n": tokens * intermediate},
        _linear(tokens, hidden, intermediate),
        {"op": "add", "n": tokens * hidden},
    ]


def _attention_part(
    tokens: int, hidden: int, heads: int, kv_heads: int, head_dim: int, **_: int
) -> list[Plain]:
    """Projections and fused attention: of a prompt, or of one token each behind a cache of 512."""
    few = tokens < 64
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    length = (
        {"batch": tokens, "q_len": 1, "kv_len": 512}
        if few
        else {"batch": 1, "q_len": tokens, "kv_len": tokens}
    )
    kv = kv_heads * head_dim
    return [
        {"op": "rmsnorm", "rows": tokens, "dim": hidden},
        _linear(tokens, heads * head_dim, hidden),
        _linear(tokens, kv, hidden),
        _linear(tokens, kv, hidden),
        {"op": "attention", "causal": not few, **shape, **length},
        _linear(tokens, hidden, heads * head_dim),
        {"op": "add", "n": tokens * hidden},
    ]


def _backward(tokens: int, hidden: int, intermediate: int, **_: int) -> list[Plain]:
    """Gradients of a feed-forward block: products of both kinds, sums over rows, gelu's and the
    norm's.
    """
    bias = {"op": "sum", "n": tokens * hidden, "write": 2 * hidden, "layout": "transposed"}
    return [
        bias,
        _linear(tokens, intermediate, hidden),
        _linear(hidden, intermediate, tokens, turned=True),
        {"op": "gelu_grad", "n": tokens * intermediate},
        _linear(tokens, hidden, intermediate),
        _linear(intermediate, hidden, tokens, turned=True),
        {"op": "layernorm", "rows": tokens, "dim": hidden, "backward": True},
        {"op": "add", "n": tokens * hidden},
    ]


_PARTS: dict[str, Callable[..., list[Plain]]] = {
    "norm": _norm,
    "rotary": _rotary,
    "mlp": _mlp,
    "gated": _gated,
    "attention": _attention_part,
    "backward": _backward,
}


FOLDER = Path(__file__).resolve().parents[1] / "src/wattcast/lab/campaigns/plans"
PLANS: dict[str, Callable[[], list[Plain]]] = {
    "training.jsonl": make_training_plan,
    "chains.jsonl": make_chains,
}


def make_lines(name: str) -> str:
    """Return the text of one plan file."""
    return "".join(json.dumps(line) + "\n" for line in PLANS[name]())


if __name__ == "__main__":
    for _name in PLANS:
        (FOLDER / _name).write_text(make_lines(_name), encoding="utf-8")
