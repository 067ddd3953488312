"""Plan the operators that the kernel campaign measures: shapes, number formats and layouts of operands.

``studies/kernel_plan_draws.py`` drew the plan (``kernel_plan.jsonl.gz``): thousands of operators in a fixed random
order in which every family appears early, so that a campaign may stop at any time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from wattcast.core.errors import bad_value
from wattcast.core.units import Dtype

# Rough rates that only keep over-long calls out of the plan; no result depends on them.
_PLANNING_FLOP_PER_S = {"bf16": 6e14, "fp16": 6e14, "fp8": 1.1e15, "tf32": 3e14, "fp32": 4e13}
_PLANNING_BYTE_PER_S = 3.5e12


@dataclass(frozen=True)
class OperatorSpec:
    """One operator of the campaign. ``operator`` is the workload-file form, ``detail`` what it leaves open."""

    family: str
    operator: dict[str, Any]
    layout: str = ""
    rotated: str = "none"
    detail: dict[str, Any] = field(default_factory=dict)
    chosen: str = field(default="plan", compare=False)  # why it is measured; changes nothing of what runs

    @property
    def id(self) -> str:
        """Stable name: a digest of everything that changes what runs."""
        text = json.dumps([self.family, self.operator, self.layout, self.rotated, self.detail], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def dtype(self) -> Dtype:
        """Format of the operands."""
        return Dtype.parse(self.operator["dtype"])

    @property
    def byte(self) -> float:
        """Bytes of all operands and outputs, roughly; for planning alone."""
        o, width = self.operator, self.dtype.byte
        match o["op"]:
            case "linear":
                return float(width * (o["m"] * o["k"] + o["n"] * o["k"]) + 2 * width * o["m"] * o["n"])
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
            case "linear":
                return float(2.0 * o["m"] * o["n"] * o["k"])
            case "bmm":
                return float(2.0 * o["b"] * o["m"] * o["n"] * o["k"])
            case "conv2d":
                per_pixel = o["k"] * o["c"] / o["groups"] * o["r"] * o["s"]
                return float(2.0 * o["n"] * o["h"] * o["w"] / o["stride"] ** 2 * per_pixel)
            case "attention":
                products = 10.0 if o.get("backward") else 4.0
                return float(products * o["batch"] * o["heads"] * o["q_len"] * o["kv_len"] * o["head_dim"])
            case _:
                return 0.0

    @property
    def guessed_s(self) -> float:
        """A lower bound for planning: roofline with round rates."""
        rate = _PLANNING_FLOP_PER_S.get(self.dtype.value, 4e13)
        return max(self.flop / rate, self.byte / _PLANNING_BYTE_PER_S)


UNARY = ("scale", "gelu", "gelu_tanh", "silu", "relu", "tanh", "exp", "sigmoid", "neg", "square", "rsqrt", "pow")
BINARY = ("add", "mul", "sub", "div", "maximum")
LONGEST_S = 0.012  # of one call, by the planning estimate
LARGEST_BYTE = 6e9


@cache
def read_kernel_plan(round_: int = 1) -> tuple[OperatorSpec, ...]:
    """Read all operators of a round, families interleaved in proportion, none of an earlier round."""
    packed = files("wattcast.measure.campaigns").joinpath("kernel_plan.jsonl.gz").read_bytes()
    lines = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    last = lines[-1]["round"]
    if not 1 <= round_ <= last:
        raise bad_value("--round", f"a round of the plan, 1 to {last}", round_)
    return tuple(OperatorSpec(**line["spec"]) for line in lines if line["round"] == round_)


def take_subset(
    specs: Sequence[OperatorSpec], wanted: dict[str, int], keep: Callable[[OperatorSpec], bool] = lambda spec: True
) -> list[OperatorSpec]:
    """Take the first operators of each family that pass ``keep``, families interleaved in proportion."""
    placed: list[tuple[float, str, OperatorSpec]] = []
    for family, count in wanted.items():
        chosen = [spec for spec in specs if spec.family == family and keep(spec)][:count]
        placed += [((place + 0.5) / len(chosen), family, spec) for place, spec in enumerate(chosen)]
    return [spec for _, _, spec in sorted(placed, key=lambda item: item[:2])]
