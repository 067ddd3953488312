"""How engines keep weights in narrow formats: what the words of ``quantization`` and ``weights``
mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wattcast.core import Dtype


@dataclass(frozen=True)
class WeightRecipe:
    """How an engine keeps the weights of linear layers and experts, and what multiplies them.

    ``bit`` counts scales and zero points. With ``activations`` tokens are quantized to that format
    before each product (``mode``: a scale for a token or for 128 values of it); without, weights
    are widened on chip."""

    weights: str  # fp8, int8, int4 or fp4
    bit: float
    kernel: str
    activations: Dtype | None = None
    mode: str = ""
    expert_scales: str = ""
    group: int = -1  # weights that share a scale; -1: a whole row
    zero_points: bool = False
    experts_alone: bool = False  # only the experts are narrow, as gpt-oss was published


# a scale of 16 bit, a zero of 4, for 128
_INT4_BIT = 4.0 + 16.0 / 128.0
_AWQ_BIT = 4.0 + (16.0 + 4.0) / 128.0
RECIPES = {
    "fp8": WeightRecipe(
        "fp8",
        8.0,
        "cutlass",
        Dtype.FP8,
        "token",
        "tensor",
    ),
    "fp8-block": WeightRecipe(
        "fp8",
        8.0 + 32.0 / 128.0**2,
        "deepgemm",
        Dtype.FP8,
        "block",
        "block",
    ),
    "w8a8": WeightRecipe(
        "int8",
        8.0,
        "cutlass",
        Dtype.INT8,
        "token",
        "tensor",
    ),
    "awq": WeightRecipe(
        "int4",
        _AWQ_BIT,
        "machete",
        None,
        "",
        "group",
        128,
        True,
    ),
    "gptq": WeightRecipe(
        "int4",
        _INT4_BIT,
        "machete",
        None,
        "",
        "group",
        128,
    ),
    "gptq-8bit": WeightRecipe(
        "fp8",
        8.0 + 16.0 / 128.0,
        "marlin",
        None,
        "",
        "group",
        128,
    ),
    "mxfp4": WeightRecipe(
        "fp4",
        4.0 + 8.0 / 32.0,
        "marlin",
        None,
        "",
        "mx",
        32,
        experts_alone=True,
    ),
    "nvfp4": WeightRecipe(
        "fp4",
        4.0 + 8.0 / 16.0,
        "cutlass",
        Dtype.FP4,
        "block",
        "nv",
        16,
    ),
}
UNQUANTIZED = "none"  # for a model whose published weights are narrow
WEIGHT_ONLY = {  # --weights
    "int4": RECIPES["gptq"],
    "fp8": WeightRecipe("fp8", 8.0, "marlin"),
    "fp4": replace(RECIPES["mxfp4"], experts_alone=False),
}
