"""Draw the plan that `wattcast lab kernels` measures, round by round: shapes around those of
published models.

Run: ``python -m wattcast.lab.campaigns.kernel_plan_draws`` (renews ``kernel_plan.jsonl.gz`` in
``measure/campaigns``).

Rows on file carry the ids of these operators, so a changed draw would be a new plan.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from wattcast.core.units import Dtype
from wattcast.lab.campaigns import kernel_plan
from wattcast.lab.campaigns.kernel_plan import (
    BINARY,
    LARGEST_BYTE,
    LONGEST_S,
    UNARY,
    OperatorSpec,
)

ROUNDS = 4


def pack_kernel_plan(rounds: int = ROUNDS) -> bytes:
    """Return the plan as it ships: an operator a line, with its round; defaults are left out."""
    usual = {
        "layout": "",
        "rotated": "none",
        "detail": {},
    }
    lines = []
    for number in range(1, rounds + 1):
        for spec in draw_kernel_plan(number):
            written: dict[str, Any] = {"family": spec.family, "operator": spec.operator}
            for name, default in usual.items():
                value = getattr(spec, name)
                if value != default:
                    written[name] = value
            line = json.dumps({"round": number, "spec": written}, separators=(",", ":"))
            lines.append(f"{line}\n")
    return gzip.compress("".join(lines).encode(), 9, mtime=0)


_FORMS = {
    "contiguous": (*UNARY, *BINARY, "copy", "cast", "cast"),
    "strided": ("copy", "copy", "add", "mul", "neg", "silu", "cat", "cat", "scale"),
    "broadcast": ("add", "add", "mul", "mul", "masked_fill", "where", "sub", "div"),
    "transposed": ("copy", "copy", "add", "mul", "cast"),
    "reduce": ("sum", "mean", "max"),
    "gather": ("gather",),
}
_WEIGHTS = [42, 14, 14, 12, 10, 8]


def plan_elementwise(random: Random) -> OperatorSpec:
    """Draw one random elementwise operator."""
    form = random.choices(list(_FORMS), _WEIGHTS)[0]
    function = random.choice(_FORMS[form])
    dtype = random.choices(["bf16", "fp32", "fp16"], [55, 30, 15])[0]
    rows, cols = _sizes(random)
    operator: dict[str, Any] = {
        "op": "elementwise",
        "function": function,
        "n": rows * cols,
        "dtype": dtype,
    }
    detail: dict[str, Any] = {
        "form": form,
        "rows": rows,
        "cols": cols,
    }
    if function == "cast":
        operator["out_dtype"] = random.choice([d for d in ("bf16", "fp32", "fp16") if d != dtype])
    layout = {"reduce": "contiguous", "gather": "strided"}.get(form, form)
    if form == "broadcast":
        detail["over"] = random.choice(["rows", "rows", "cols"])
    if form == "transposed":
        detail["inner"] = random.choice([d for d in (1, 1, 64, 128) if rows % max(d, 1) == 0])
    operator |= _bytes(
        function,
        form,
        dtype,
        rows,
        cols,
        detail,
    )
    if layout != "contiguous":
        operator["layout"] = layout
    return OperatorSpec(
        "elementwise",
        operator,
        layout,
        "all" if random.random() < 0.15 else "none",
        detail,
    )


def _sizes(random: Random) -> tuple[int, int]:
    """Rows and columns: hidden sizes of models, powers of two, or anything; 1 k to 400 M
    elements.
    """
    pick = random.random()
    if pick < 0.4:
        cols = random.choice(
            [768, 1024, 1280, 1536, 2048, 3072, 3584, 4096, 5120, 8192, 11008, 14336]
        )
    elif pick < 0.75:
        cols = 2 ** random.randint(5, 14)
    else:
        cols = random.randint(33, 20000)
    elements = 1e3 * (4e8 / 1e3) ** random.random()
    rows = max(int(elements / cols), 1)
    if random.random() < 0.5:
        rows = 2 ** (rows.bit_length() - 1)
    return rows, cols


def _bytes(
    function: str,
    form: str,
    dtype: str,
    rows: int,
    cols: int,
    detail: dict[str, Any],
) -> dict[str, int]:
    """Bytes read and written where the function's number of inputs times ``n`` does not say it."""
    width = Dtype(dtype).byte  # type: ignore[call-arg]
    n = rows * cols
    small = cols if detail.get("over") == "rows" else rows
    if form == "broadcast":
        mask = 1 if function in ("masked_fill", "where") else width
        extra_byte = small * mask + (n * width if function == "where" else 0)
        return {"read": n * width + extra_byte, "write": n * width}
    if form == "reduce":
        return {"read": n * width, "write": rows * width}
    if function == "gather":
        return {"read": n * width + 8 * rows, "write": n * width}
    return {}


SEED = 20260815

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


def draw_kernel_plan(round_: int = 1) -> list[OperatorSpec]:
    """Draw all operators of a round, families interleaved in proportion, none of an earlier
    round.
    """
    earlier_ids: set[str] = set()
    for earlier_round in range(1, round_):
        earlier_ids |= {spec.id for spec in draw_kernel_plan(earlier_round)}
    places: dict[tuple[float, str], OperatorSpec] = {}  # by share of the family before it
    for family, count in WANTED.items():
        random = Random(f"{SEED + round_ - 1}-{family}")
        drawn = _distinct(_MAKERS[family], random, count)
        chosen = [spec for spec in drawn if spec.id not in earlier_ids]
        for place, spec in enumerate(chosen):
            places[(place + 0.5) / len(chosen), family] = spec
    return [places[place] for place in sorted(places)]


def _distinct(
    make: Callable[[Random], OperatorSpec],
    random: Random,
    count: int,
) -> list[OperatorSpec]:
    specs: dict[str, OperatorSpec] = {}
    for _ in range(30 * count):
        if len(specs) == count:
            break
        spec = make(random)
        if spec.guessed_s <= LONGEST_S and spec.byte <= LARGEST_BYTE:
            specs.setdefault(spec.id, spec)
    return list(specs.values())


@cache
def read_transformers() -> list[dict[str, int | str]]:
    """Read ``transformer_shapes.csv``."""
    return _read_shapes("transformer_shapes.csv")


@cache
def read_convolutions() -> list[dict[str, int | str]]:
    """Read ``convolution_shapes.csv``."""
    return _read_shapes("convolution_shapes.csv")


def _read_shapes(name: str) -> list[dict[str, int | str]]:
    rows = csv.DictReader(Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines())
    shapes = []
    for row in rows:
        shape: dict[str, int | str] = {}
        for key, value in row.items():
            shape[key] = int(value) if value.isdigit() else value
        shapes.append(shape)
    return shapes


def draw_log_uniform(
    random: Random,
    low: int,
    high: int,
    multiple: int = 1,
) -> int:
    """Draw a whole number between ``low`` and ``high``, uniform in its logarithm, rounded to
    ``multiple``.
    """
    value: float = low * (high / low) ** random.random()
    return max(round(value / multiple), 1) * multiple


def draw_tokens(random: Random, high: int = 16384) -> int:
    """Draw a number of tokens: decode batches, prompts, vision patches, and odd counts."""
    pick = random.random()
    if pick < 0.25:
        return int(random.choice([1, 2, 4, 8, 16, 32, 64, 128, 3, 7, 12, 48, 96]))
    if pick < 0.65:
        return int(min(2 ** random.randint(7, 14), high))
    if pick < 0.75:
        return 197 * random.choice([1, 4, 8, 16, 32, 64])
    return draw_log_uniform(random, 1, high)


def _linear(random: Random) -> OperatorSpec:
    dtype = random.choices(["bf16", "fp16", "fp8", "tf32", "fp32"], [44, 19, 18, 10, 9])[0]
    model = random.choice(read_transformers())
    hidden = int(model["hidden"])
    inner = int(model["intermediate"])
    vocabulary = int(model["vocabulary"])
    head_dim = int(model["head_dim"])
    kv_heads = int(model["kv_heads"])
    m = draw_tokens(random, 4096 if dtype == "fp32" else 16384)
    if random.random() < 0.5:
        pairs = [(hidden, hidden), (inner, hidden), (hidden, inner), (kv_heads * head_dim, hidden)]
        pairs += [
            (hidden + 2 * kv_heads * head_dim, hidden),
            (2 * inner, hidden),
            (vocabulary, hidden),
        ]
        n, k = random.choice(pairs)
    else:
        step = random.choice([1, 8, 16, 64, 128]) if dtype != "fp8" else 16
        n = draw_log_uniform(random, 32, 24576, step)
        k = draw_log_uniform(random, 32, 24576, step)
    if dtype == "fp8":
        m = _round_up(m, 16)
        n = _round_up(n, 16)
        k = _round_up(k, 16)
    bias = random.random() < 0.4
    layout = "nn" if bias and dtype != "fp8" and random.random() < 0.4 else "nt"
    operator = {
        "op": "linear",
        "m": m,
        "n": n,
        "k": k,
        "bias": bias,
        "dtype": dtype,
    }
    if dtype == "fp8":
        operator["out_dtype"] = "bf16"
    return OperatorSpec("linear", operator, layout, "none" if random.random() < 0.12 else "weights")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _bmm(random: Random) -> OperatorSpec:
    dtype = random.choices(["bf16", "fp16", "tf32", "fp32"], [55, 20, 12, 13])[0]
    model = random.choice(read_transformers())
    heads = int(model["heads"])
    head_dim = int(model["head_dim"])
    if random.random() < 0.6:
        batch = random.choice([1, 1, 2, 4, 8, 16])
        length = random.choice([64, 128, 197, 256, 384, 512, 777, 1024, 2048, 4096])
        queries = 1 if random.random() < 0.2 else length
        are_scores = random.random() < 0.5  # q k' first, then weights v
        layout = "nt" if are_scores else "nn"
        shape = {
            "b": batch * heads,
            "m": queries,
            "n": length if are_scores else head_dim,
            "k": head_dim if are_scores else length,
        }
    else:
        step = random.choice([1, 8, 32])
        shape = {
            "b": draw_log_uniform(random, 1, 512),
            "m": draw_log_uniform(random, 16, 4096, step),
            "n": draw_log_uniform(random, 16, 4096, step),
            "k": draw_log_uniform(random, 16, 4096, step),
        }
        layout = random.choice(["nn", "nt"])
    return OperatorSpec(
        "bmm",
        {
            "op": "bmm",
            **shape,
            "dtype": dtype,
        },
        layout,
    )


def _conv2d(random: Random) -> OperatorSpec:
    dtype = random.choices(["bf16", "fp16", "tf32", "fp32"], [45, 25, 18, 12])[0]
    if random.random() < 0.6:
        row = random.choice(read_convolutions())
        c = int(row["c"])
        k = int(row["k"])
        size = int(row["size"])
        filter_ = int(row["filter"])
        stride = int(row["stride"])
        padding = int(row["padding"])
        groups = int(row["groups"])
    else:
        filter_ = random.choice([1, 1, 3, 3, 3, 5, 7])
        c = draw_log_uniform(random, 8, 1024, random.choice([1, 8, 32]))
        k = draw_log_uniform(random, 8, 1024, random.choice([1, 8, 32]))
        size = draw_log_uniform(random, 7, 224)
        stride = random.choice([1, 1, 1, 2])
        padding = filter_ // 2
        groups = 1
        if random.random() < 0.2:
            k = c
            groups = c
    batch = random.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 5, 24])
    operator = {
        "op": "conv2d",
        "n": batch,
        "c": c,
        "k": k,
        "h": size,
        "w": size,
        "r": filter_,
        "s": filter_,
    }
    operator |= {
        "stride": stride,
        "padding": padding,
        "groups": groups,
    }
    operator |= {"channels_last": random.random() < 0.5, "dtype": dtype}
    return OperatorSpec(
        "conv2d", operator, "nhwc" if operator["channels_last"] else "nchw", "weights"
    )


def _rows(random: Random, kind: str) -> OperatorSpec:
    model = random.choice(read_transformers())
    hidden = int(model["hidden"])
    heads = int(model["heads"])
    head_dim = int(model["head_dim"])
    dtype = random.choices(["bf16", "fp32", "fp16"], [50, 32, 18])[0]
    if kind == "softmax":
        dim = random.choice(
            [64, 128, 197, 256, 384, 512, 1000, 1024, 2048, 4096, 8192, 32000, 50257, 128256]
        )
        rows = heads * random.choice([1, 64, 128, 512, 1024, 2048]) * random.choice([1, 2, 4])
    else:
        dim = random.choice([hidden, hidden, head_dim])
        rows = draw_tokens(random, 32768)
        rows *= heads if dim == head_dim else 1
    if random.random() < 0.45:
        dim = draw_log_uniform(random, 16, 65536)
        rows = draw_log_uniform(random, 1, 262144)
    operator = {
        "op": kind,
        "rows": rows,
        "dim": dim,
        "dtype": dtype,
    }
    if kind == "softmax" and dtype != "fp32" and random.random() < 0.3:
        operator["out_dtype"] = "fp32"
    return OperatorSpec(kind, operator, "contiguous", "all" if random.random() < 0.15 else "none")


def _attention(random: Random) -> OperatorSpec:
    model = random.choice(read_transformers())
    heads = int(model["heads"])
    kv_heads = int(model["kv_heads"])
    head_dim = int(model["head_dim"])
    if random.random() < 0.4:
        head_dim = random.choice([64, 96, 128])
        kv_heads = random.choice([1, 2, 4, 8, 16])
        heads = kv_heads * random.choice([1, 2, 4, 7, 8])
    batch = random.choice([1, 1, 2, 4, 8, 16, 32, 64])
    lengths = [64, 128, 197, 256, 333, 512, 777, 1024, 1500, 2048, 4096, 8192, 16384]
    kv_len = (
        random.choice(lengths) if random.random() < 0.75 else draw_log_uniform(random, 16, 16384)
    )
    decode = random.random() < 0.35
    q_len = 1 if decode else kv_len
    causal = not decode and random.random() < 0.6
    operator = {
        "op": "attention",
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "q_len": q_len,
    }
    operator |= {
        "kv_len": kv_len,
        "head_dim": head_dim,
        "causal": causal,
    }
    operator |= {"dtype": random.choices(["bf16", "fp16"], [75, 25])[0]}
    backend = random.choices(["default", "flash", "cudnn"], [60, 15, 25])[0]
    return OperatorSpec(
        "attention",
        operator,
        "bhsd" if decode else "bshd",
        "all" if decode else "none",
        {"backend": backend},
    )


_MAKERS: dict[str, Callable[[Random], OperatorSpec]] = {
    "linear": _linear,
    "bmm": _bmm,
    "conv2d": _conv2d,
    "softmax": lambda random: _rows(random, "softmax"),
    "layernorm": lambda random: _rows(random, "layernorm"),
    "rmsnorm": lambda random: _rows(random, "rmsnorm"),
    "elementwise": plan_elementwise,
    "attention": _attention,
}


if __name__ == "__main__":
    Path(kernel_plan.__file__).with_name("kernel_plan.jsonl.gz").write_bytes(pack_kernel_plan())
