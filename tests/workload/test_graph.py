"""Operators and blocks: what equals what, and what a name leaves out."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from wattcast.dtypes import Dtype
from wattcast.kernels.lower import _issued
from wattcast.workload.graph import Block, Bmm, Conv2d, Elementwise, Graph, LayerNorm, Layout, Linear, RmsNorm


def test_equal_operators_are_one_kernel_wherever_they_stand() -> None:
    first, other = Linear(8, 16, 32, label="a"), Elementwise("relu", 64)
    block = Block((first, other, Linear(8, 16, 32, label="b", count=3), other))
    ops, (segment,) = _issued(Graph("some", (block,)))
    assert ops == (first, other)
    assert segment.rows.tolist() == [0, 1, 0, 1]
    assert segment.counts.tolist() == [1.0, 1.0, 3.0, 1.0]


def test_the_same_operator_elsewhere_differs_in_its_label_alone() -> None:
    op = Elementwise("add", 64, dtype=Dtype.FP16, rows=4, label="here")
    again = op.again("there")
    assert again == op
    assert hash(again) == hash(op)
    assert (again.label, op.label, again.rows, again.dtype) == ("there", "here", 4, Dtype.FP16)


def test_another_size_of_an_operator_is_as_if_it_were_made_anew() -> None:
    op = Elementwise("add", 64, dtype=Dtype.FP16, layout=Layout.BROADCAST, read=5, rows=4, label="here")
    hash(op)
    other = op.sized("there", 32, rows=2, write=7)
    made = Elementwise("add", 32, dtype=Dtype.FP16, layout=Layout.BROADCAST, rows=2, write=7, label="there")
    assert repr(other) == repr(made)
    assert other == made != op
    assert hash(other) == hash(made) != hash(op)


def test_operators_of_two_classes_are_never_equal() -> None:
    assert LayerNorm(8, 16) != RmsNorm(8, 16)
    assert LayerNorm(8, 16) == LayerNorm(8, 16, label="elsewhere", count=2)
    assert (LayerNorm(8, 16) == "layernorm") is False


def test_the_hash_of_an_operator_is_kept_but_is_no_part_of_it() -> None:
    """It is worked out once; it stays behind when the operator changes or leaves for another process."""
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
