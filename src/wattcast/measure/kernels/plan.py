"""The plan of a campaign: thousands of operators in a fixed random order that serves every family early.

Shapes are half real model dimensions, half log-uniform random ones with odd sizes among them. The
seed fixes the plan, so that a stopped campaign continues where it was and another card measures the
same rows. Further rounds are other operators by the same rules.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from random import Random

from wattcast.measure.kernels.elementwise_plan import elementwise
from wattcast.measure.kernels.spec import Spec

SEED = 20260815
LONGEST_S = 0.012  # of one call, by the planning estimate
LARGEST_BYTE = 6e9

# Rows wanted per family, before operators that are too large or met twice fall out.
WANTED = {
    "linear": 1050,
    "bmm": 260,
    "conv2d": 430,
    "softmax": 250,
    "layernorm": 190,
    "rmsnorm": 190,
    "elementwise": 900,
    "attention": 430,
}


def plan(round_: int = 1) -> list[Spec]:
    """All operators of a round, families interleaved in proportion, none twice and none of an earlier round."""
    earlier = {spec.id for before in range(1, round_) for spec in plan(before)}
    placed: list[tuple[float, str, Spec]] = []
    for family, count in WANTED.items():
        random = Random(f"{SEED + round_ - 1}-{family}")  # noqa: S311  (shapes, not secrets)
        chosen = [spec for spec in _distinct(_MAKERS[family], random, count) if spec.id not in earlier]
        placed += [((place + 0.5) / len(chosen), family, spec) for place, spec in enumerate(chosen)]
    return [spec for _, _, spec in sorted(placed, key=lambda item: item[:2])]


def subset(specs: list[Spec], wanted: dict[str, int], keep: Callable[[Spec], bool] = lambda spec: True) -> list[Spec]:
    """The first operators of each family that pass ``keep``, families interleaved in proportion."""
    placed: list[tuple[float, str, Spec]] = []
    for family, count in wanted.items():
        chosen = [spec for spec in specs if spec.family == family and keep(spec)][:count]
        placed += [((place + 0.5) / len(chosen), family, spec) for place, spec in enumerate(chosen)]
    return [spec for _, _, spec in sorted(placed, key=lambda item: item[:2])]


def _distinct(make: Callable[[Random], Spec], random: Random, count: int) -> list[Spec]:
    found: dict[str, Spec] = {}
    for _ in range(30 * count):
        if len(found) == count:
            break
        spec = make(random)
        if spec.guessed_s <= LONGEST_S and spec.byte <= LARGEST_BYTE:
            found.setdefault(spec.id, spec)
    return list(found.values())


@cache
def transformers() -> list[dict[str, int | str]]:
    """Rows of ``transformer_shapes.csv``."""
    return [_numbers(row) for row in _table("transformer_shapes.csv")]


@cache
def convolutions() -> list[dict[str, int | str]]:
    """Rows of ``convolution_shapes.csv``."""
    return [_numbers(row) for row in _table("convolution_shapes.csv")]


def _table(name: str) -> list[dict[str, str]]:
    text = files("wattcast.measure.kernels").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _numbers(row: dict[str, str]) -> dict[str, int | str]:
    return {name: int(value) if value.isdigit() else value for name, value in row.items()}


def log_uniform(random: Random, low: int, high: int, multiple: int = 1) -> int:
    """A whole number between ``low`` and ``high``, even in its logarithm, rounded to ``multiple``."""
    value: float = low * (high / low) ** random.random()
    return max(round(value / multiple), 1) * multiple


def tokens(random: Random, high: int = 16384) -> int:
    """Tokens in a batch: decode batches, prompts, vision patches, and odd counts."""
    pick = random.random()
    if pick < 0.25:
        return int(random.choice([1, 2, 4, 8, 16, 32, 64, 128, 3, 7, 12, 48, 96]))
    if pick < 0.65:
        return int(min(2 ** random.randint(7, 14), high))
    if pick < 0.75:
        return 197 * random.choice([1, 4, 8, 16, 32, 64])
    return log_uniform(random, 1, high)


def _linear(random: Random) -> Spec:
    dtype = random.choices(["bf16", "fp16", "fp8", "tf32", "fp32"], [44, 19, 18, 10, 9])[0]
    model = random.choice(transformers())
    hidden, inner, vocabulary = int(model["hidden"]), int(model["intermediate"]), int(model["vocabulary"])
    head_dim, kv_heads = int(model["head_dim"]), int(model["kv_heads"])
    m = tokens(random, 4096 if dtype == "fp32" else 16384)
    if random.random() < 0.5:
        pairs = [(hidden, hidden), (inner, hidden), (hidden, inner), (kv_heads * head_dim, hidden)]
        pairs += [(hidden + 2 * kv_heads * head_dim, hidden), (2 * inner, hidden), (vocabulary, hidden)]
        n, k = random.choice(pairs)
    else:
        step = random.choice([1, 8, 16, 64, 128]) if dtype != "fp8" else 16
        n, k = log_uniform(random, 32, 24576, step), log_uniform(random, 32, 24576, step)
    if dtype == "fp8":
        m, n, k = (-(-size // 16) * 16 for size in (m, n, k))
    bias = random.random() < 0.4
    layout = "nn" if bias and dtype != "fp8" and random.random() < 0.4 else "nt"
    operator = {"op": "linear", "m": m, "n": n, "k": k, "bias": bias, "dtype": dtype}
    if dtype == "fp8":
        operator["out_dtype"] = "bf16"
    return Spec("linear", operator, layout, "none" if random.random() < 0.12 else "weights")


def _bmm(random: Random) -> Spec:
    dtype = random.choices(["bf16", "fp16", "tf32", "fp32"], [55, 20, 12, 13])[0]
    model = random.choice(transformers())
    heads, head_dim = int(model["heads"]), int(model["head_dim"])
    if random.random() < 0.6:
        batch = random.choice([1, 1, 2, 4, 8, 16])
        length = random.choice([64, 128, 197, 256, 384, 512, 777, 1024, 2048, 4096])
        queries = 1 if random.random() < 0.2 else length
        scores = random.random() < 0.5  # q k' first, then weights v
        n, k, layout = (length, head_dim, "nt") if scores else (head_dim, length, "nn")
        shape = {"b": batch * heads, "m": queries, "n": n, "k": k}
    else:
        step = random.choice([1, 8, 32])
        shape = {"b": log_uniform(random, 1, 512)}
        shape |= {name: log_uniform(random, 16, 4096, step) for name in "mnk"}
        layout = random.choice(["nn", "nt"])
    return Spec("bmm", {"op": "bmm", **shape, "dtype": dtype}, layout)


def _conv2d(random: Random) -> Spec:
    dtype = random.choices(["bf16", "fp16", "tf32", "fp32"], [45, 25, 18, 12])[0]
    if random.random() < 0.6:
        row = random.choice(convolutions())
        c, k, size, filter_, stride, padding, groups = (
            int(row[name]) for name in ("c", "k", "size", "filter", "stride", "padding", "groups")
        )
    else:
        filter_ = random.choice([1, 1, 3, 3, 3, 5, 7])
        c, k = (log_uniform(random, 8, 1024, random.choice([1, 8, 32])) for _ in "ck")
        size, stride, padding = log_uniform(random, 7, 224), random.choice([1, 1, 1, 2]), filter_ // 2
        groups = 1
        if random.random() < 0.2:
            k, groups = c, c
    batch = random.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 5, 24])
    operator = {"op": "conv2d", "n": batch, "c": c, "k": k, "h": size, "w": size, "r": filter_, "s": filter_}
    operator |= {"stride": stride, "padding": padding, "groups": groups}
    operator |= {"channels_last": random.random() < 0.5, "dtype": dtype}
    return Spec("conv2d", operator, "nhwc" if operator["channels_last"] else "nchw", "weights")


def _rows(random: Random, kind: str) -> Spec:
    model = random.choice(transformers())
    hidden, heads, head_dim = int(model["hidden"]), int(model["heads"]), int(model["head_dim"])
    dtype = random.choices(["bf16", "fp32", "fp16"], [50, 32, 18])[0]
    if kind == "softmax":
        dim = random.choice([64, 128, 197, 256, 384, 512, 1000, 1024, 2048, 4096, 8192, 32000, 50257, 128256])
        rows = heads * random.choice([1, 64, 128, 512, 1024, 2048]) * random.choice([1, 2, 4])
    else:
        dim, rows = random.choice([hidden, hidden, head_dim]), tokens(random, 32768)
        rows *= heads if dim == head_dim else 1
    if random.random() < 0.45:
        dim, rows = log_uniform(random, 16, 65536), log_uniform(random, 1, 262144)
    operator = {"op": kind, "rows": rows, "dim": dim, "dtype": dtype}
    if kind == "softmax" and dtype != "fp32" and random.random() < 0.3:
        operator["out_dtype"] = "fp32"
    return Spec(kind, operator, "contiguous", "all" if random.random() < 0.15 else "none")


def _attention(random: Random) -> Spec:
    model = random.choice(transformers())
    heads, kv_heads, head_dim = (int(model[name]) for name in ("heads", "kv_heads", "head_dim"))
    if random.random() < 0.4:
        head_dim, kv_heads = random.choice([64, 96, 128]), random.choice([1, 2, 4, 8, 16])
        heads = kv_heads * random.choice([1, 2, 4, 7, 8])
    batch = random.choice([1, 1, 2, 4, 8, 16, 32, 64])
    lengths = [64, 128, 197, 256, 333, 512, 777, 1024, 1500, 2048, 4096, 8192, 16384]
    kv_len = random.choice(lengths) if random.random() < 0.75 else log_uniform(random, 16, 16384)
    decode = random.random() < 0.35
    q_len = 1 if decode else kv_len
    causal = not decode and random.random() < 0.6
    operator = {"op": "attention", "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len}
    operator |= {"kv_len": kv_len, "head_dim": head_dim, "causal": causal}
    operator |= {"dtype": random.choices(["bf16", "fp16"], [75, 25])[0]}
    backend = random.choices(["default", "flash", "cudnn"], [60, 15, 25])[0]
    return Spec(
        "attention", operator, "bhsd" if decode else "bshd", "all" if decode else "none", {"backend": backend}
    )


_MAKERS: dict[str, Callable[[Random], Spec]] = {
    "linear": _linear,
    "bmm": _bmm,
    "conv2d": _conv2d,
    "softmax": lambda random: _rows(random, "softmax"),
    "layernorm": lambda random: _rows(random, "layernorm"),
    "rmsnorm": lambda random: _rows(random, "rmsnorm"),
    "elementwise": elementwise,
    "attention": _attention,
}
