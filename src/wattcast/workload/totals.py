"""Sums over a graph, and its operators with equal ones merged."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.workload.graph import Attention, Bmm, Conv2d, Graph, Linear, Operator


@dataclass(frozen=True)
class Row:
    """A distinct operator and how often the graph calls it."""

    op: Operator
    count: int


@dataclass(frozen=True)
class Totals:
    """Work of a whole graph. Products are matrix products, convolutions and attention.

    ``product_flop`` leaves out what a causal mask skips; ``product_flop_dense`` counts it, as
    PyTorch's FLOP counter does.
    """

    calls: int
    flop: float
    product_flop: float
    product_flop_dense: float
    byte: float


def distinct(graph: Graph) -> list[Row]:
    """Each distinct operator once, in order of first use."""
    count: dict[Operator, int] = {}
    for op, calls in graph.calls():
        count[op] = count.get(op, 0) + calls
    return [Row(op, calls) for op, calls in count.items()]


def totals(graph: Graph) -> Totals:
    """Sums over all calls."""
    rows = distinct(graph)
    products = [row for row in rows if isinstance(row.op, (Linear, Bmm, Conv2d, Attention))]
    return Totals(
        calls=sum(row.count for row in rows),
        flop=graph.flop,
        product_flop=sum(row.op.flop * row.count for row in products),
        product_flop_dense=sum(dense_flop(row.op) * row.count for row in products),
        byte=graph.byte,
    )


def dense_flop(op: Operator) -> float:
    """Arithmetic when no mask is taken into account."""
    return op.flop_dense if isinstance(op, Attention) else op.flop
