"""Models cut to a few layers, and graphs split for comparison."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from wattcast.workload import model_catalogue
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Softmax

LAYER_FIELDS = ("layers", "vision_layers", "text_layers", "encoder_layers", "decoder_layers")


def cut(name: str, layers: int = 2) -> ModelSpec:
    """A catalogue model with ``layers`` layers (of each kind)."""
    model = model_catalogue.load_model(name)
    dims = replace(
        model.dims, **{field: layers for field in LAYER_FIELDS if hasattr(model.dims, field)}
    )
    if hasattr(dims, "dense_layers"):
        dims = replace(dims, dense_layers=1)
    return replace(model, dims=dims)


def split(graph: Graph) -> tuple[Counter[Operator], Counter[Operator]]:
    """Products, attention, norms and softmax on one side; elementwise work on the other.

    A capture sees no values, so that it does not know how many scores a mask hides.
    """
    large: Counter[Operator] = Counter()
    small: Counter[Operator] = Counter()
    for op, calls in graph.calls():
        plain = replace(op, masked=0.0) if isinstance(op, Softmax) else op
        (small if isinstance(op, Elementwise) else large)[plain] += calls
    return large, small


def moved_byte(ops: Counter[Operator]) -> float:
    return sum((op.read_byte + op.write_byte) * calls for op, calls in ops.items())
