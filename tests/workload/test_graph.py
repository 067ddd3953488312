"""Operators and blocks: what equals what, and what a name leaves out."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace

import pytest

from wattcast.core.errors import BadInput
from wattcast.core.units import Dtype
from wattcast.kernels.lowering import _distinct_operators
from wattcast.workload.graph import Block, Graph, compute_totals
from wattcast.workload.operator_base import _REGISTRY, Operator, register_operator
from wattcast.workload.operator_types import Bmm, Conv2d, Elementwise, LayerNorm, Linear, RmsNorm
from wattcast.workload.readers.from_json import graph_to_plain, parse_workload


def test_equal_operators_are_one_kernel_wherever_they_stand() -> None:
    first, other = Linear(8, 16, 32, label="a"), Elementwise("relu", 64)
    block = Block((first, other, Linear(8, 16, 32, label="b", count=3), other))
    ops, (segment,) = _distinct_operators(Graph("some", (block,)))
    assert ops == (first, other)
    assert segment.rows.tolist() == [0, 1, 0, 1]
    assert segment.counts.tolist() == [1.0, 1.0, 3.0, 1.0]


def test_the_same_operator_elsewhere_differs_in_its_label_alone() -> None:
    op = Elementwise("add", 64, dtype=Dtype.FP16, rows=4, label="here")
    again = op.with_label("there")
    assert again == op
    assert hash(again) == hash(op)
    assert (again.label, op.label, again.rows, again.dtype) == ("there", "here", 4, Dtype.FP16)


def test_operators_of_two_classes_are_never_equal() -> None:
    assert LayerNorm(8, 16) != RmsNorm(8, 16)
    assert LayerNorm(8, 16) == LayerNorm(8, 16, label="elsewhere", count=2)
    assert (LayerNorm(8, 16) == "layernorm") is False


def test_operators_hash_by_what_one_call_costs() -> None:
    op = Linear(8, 16, 32)
    name, other = str(op), replace(op, m=9)
    assert hash(op) == hash(Linear(8, 16, 32, label="elsewhere"))
    assert hash(other) != hash(op) == hash(replace(other, m=8))
    assert str(op) == name
    assert pickle.loads(pickle.dumps(op)) == op
    assert vars(pickle.loads(pickle.dumps(op))).keys() == vars(Linear(8, 16, 32)).keys()
    assert len({Linear(8, 16, 32), Linear(8, 16, 32, turned=True), Bmm(1, 8, 16, 32)}) == 3


def test_what_was_worked_out_of_a_convolution_is_not_part_of_its_name() -> None:
    op = Conv2d(1, 3, 64, 224, 224, 7, 7, stride=2, padding=3)
    name = str(op)
    assert (op.p, op.q) == (112, 112)
    assert str(op) == name
    assert op == Conv2d(1, 3, 64, 224, 224, 7, 7, stride=2, padding=3)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_format_is_found_by_its_word(dtype: Dtype) -> None:
    assert {dtype: dtype.byte}[str(dtype)] == dtype.byte > 0


def test_a_made_up_operator_registers_in_one_place() -> None:
    """Its JSON form, its name in reports and its part in the totals follow from the dataclass."""

    @register_operator("histogram", family="reduction")
    @dataclass(frozen=True)
    class Histogram(Operator):
        n: int
        bins: int = 256

        @property
        def read_byte(self) -> float:
            return float(self.n * self.dtype.byte)

    try:
        graph = Graph.from_operators("counts", [Histogram(1000, count=3), Histogram(1000, bins=8)])
        assert [str(op) for op, _ in graph.calls()] == [
            "histogram 1000x256 bf16",
            "histogram 1000x8 bf16",
        ]
        assert graph_to_plain(graph)["ops"][1] == {
            "op": "histogram",
            "n": 1000,
            "bins": 8,
            "dtype": "bf16",
        }
        assert parse_workload(json.dumps(graph_to_plain(graph)).encode(), "counts") == graph
        assert compute_totals(graph).byte == 4 * 2000
        assert Histogram(1).family == "reduction"
        with pytest.raises(BadInput, match=r"histogram\.n: .*at least 1"):
            Histogram(0)
    finally:
        _REGISTRY.pop("histogram")


def test_a_hundred_thousand_equal_entries_are_one_operator() -> None:
    """A list of 300,000 operators took minutes to read: each entry looked up all names of operators
    anew.
    """
    import wattcast
    from wattcast.workload.readers.from_json import parse_workload

    entries = b",".join([b'{"op": "linear", "m": 8, "n": 8, "k": 8}'] * 100_000)
    graph = parse_workload(b'{"name": "w", "ops": [' + entries + b"]}", "w.json")
    (only,) = wattcast.predict(graph, "h200").ops
    assert only.count == 100_000
