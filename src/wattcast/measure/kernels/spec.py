"""What the campaign runs: an operator with its shape, dtype and how its operands lie in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from wattcast.dtypes import Dtype

# Rough rates that only keep over-long calls out of the plan; no result depends on them.
_PLANNING_FLOP_PER_S = {"bf16": 6e14, "fp16": 6e14, "fp8": 1.1e15, "tf32": 3e14, "fp32": 4e13}
_PLANNING_BYTE_PER_S = 3.5e12


@dataclass(frozen=True)
class Spec:
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
        return Dtype(self.operator["dtype"])

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
            case _:
                return float((4 if o.get("backward") else 2) * max(width, 4) * o["rows"] * o["dim"])

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
