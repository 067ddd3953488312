"""Pointwise kernels: the shape and layout of the result, and how they walk over memory (rows and
runs).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.core.errors import BadInput
from wattcast.core.units import Dtype
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.memory_layout import (
    classify_layout,
    contiguous_strides,
    measure_extent,
    promote_dtypes,
)
from wattcast.workload.operator_types import Attention, Elementwise, Layout
from wattcast.workload.readers.from_json import graph_to_plain, parse_workload
from wattcast.workload.symbolic_tensor import Tape, pointwise

SHAPE = (2, 8, 4, 16)
formats = st.sampled_from([Dtype.BF16, Dtype.FP32, Dtype.INT64, Dtype.BOOL])


@st.composite
def operands(draw: st.DrawFn) -> list[tuple[tuple[int, ...], Dtype]]:
    """Two or three shapes that broadcast, some of fewer dimensions, some of size one."""
    whole = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        shape = whole[draw(st.integers(0, len(whole))) :]
        ones = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
        sizes = tuple(1 if one else size for one, size in zip(ones, shape, strict=True))
        found.append((sizes, draw(formats)))
    return found


@given(operands(), st.sampled_from([None, Dtype.BOOL]))
def test_row_major_operands_give_a_row_major_result_of_their_common_shape(
    given: list[tuple[tuple[int, ...], Dtype]], out_dtype: Dtype | None
) -> None:
    tape = Tape(label="here")
    function = {1: "silu", 2: "add", 3: "where"}[len(given)]
    inputs = [tape.empty(shape, dtype) for shape, dtype in given]
    out = pointwise(function, *inputs, out_dtype=out_dtype)
    (entry,) = tape.entries
    assert entry.op.label == "here"
    assert out.shape == np.broadcast_shapes(*[shape for shape, _ in given])
    assert out.strides == contiguous_strides(out.shape)
    assert out.dtype is (out_dtype or promote_dtypes([t.operand for t in inputs]))
    assert out.storage.byte == out.numel * out.dtype.byte == entry.op.write_byte
    assert entry.op.read_byte == sum(t.byte for t in inputs)
    alike = all(t.numel in (1, out.numel) for t in inputs)
    assert entry.op.layout is (Layout.CONTIGUOUS if alike else Layout.BROADCAST)


def test_adding_into_a_slice_walks_in_strides_unless_all_lie_alike() -> None:
    """The result need not be dense: a gradient is added into a part of another, whose rows are
    further apart.
    """
    shape, apart, dense = (3, 64, 8), (1024, 8, 1), (512, 8, 1)
    assert classify_layout(shape, apart, [(shape, apart), (shape, dense)]) is Layout.STRIDED
    assert classify_layout(shape, apart, [(shape, apart), (shape, apart)]) is Layout.CONTIGUOUS
    assert classify_layout(shape, dense, [(shape, dense), (shape, dense)]) is Layout.CONTIGUOUS


def test_a_slice_of_columns_lies_together_as_far_as_it_is_wide() -> None:
    rows, run = measure_extent(Layout.STRIDED, (32, 16), (16, 1), [((32, 16), (48, 1))])
    assert (rows, run) == (32, None)


def test_a_mask_for_all_heads_serves_rows_of_whole_scores() -> None:
    mask = (2, 1, 4, 16)
    given = [(SHAPE, contiguous_strides(SHAPE)), (mask, contiguous_strides(mask))]
    assert measure_extent(Layout.BROADCAST, SHAPE, contiguous_strides(SHAPE), given) == (16, None)
    scale = (2, 8, 4, 1)
    given = [(SHAPE, contiguous_strides(SHAPE)), (scale, contiguous_strides(scale))]
    assert measure_extent(Layout.BROADCAST, SHAPE, contiguous_strides(SHAPE), given) == (64, None)


def test_a_plain_transpose_has_runs_of_one() -> None:
    assert measure_extent(Layout.TRANSPOSED, (32, 16), (16, 1), [((32, 16), (1, 32))]) == (32, 1)


def find_elementwise(name: str, function: str, label: str, **options: object) -> list[Elementwise]:
    graph = build_graph(name, ModelOptions(**{"stack": "eager"} | options))
    calls = (op for op, _ in graph.calls())
    return [
        op
        for op in calls
        if isinstance(op, Elementwise) and op.function == function and label in op.label
    ]


def test_a_cache_is_told_from_halves_and_a_slice_from_a_whole() -> None:
    """GPT-2's new keys are a slice of one projection, Llama's are not; its rotary halves are
    strided.
    """
    (cache,) = set(find_elementwise("gpt2", "cat", "cache", phase="decode", batch=4, seq=100))
    assert (cache.layout, cache.rows, cache.run) == (Layout.STRIDED, 4 * 12, 64)
    (cache,) = set(find_elementwise("llama3-8b", "cat", "cache", phase="decode", batch=4, seq=100))
    assert (cache.layout, cache.rows, cache.run) == (Layout.CONTIGUOUS, 4 * 8, 128)
    halves = {
        op.run
        for op in find_elementwise(
            "llama3-8b", "cat", "attention", phase="prefill", batch=4, seq=100
        )
    }
    assert 64 in halves


def test_gradients_of_biases_are_sums_over_rows_and_means_are_not() -> None:
    biases = find_elementwise("gpt2", "sum", "mlp.backward", phase="train", batch=2, seq=64)
    assert biases
    assert all(op.layout is Layout.TRANSPOSED for op in biases)
    means = find_elementwise("llama3-8b", "mean", "norm", phase="prefill", batch=2, seq=64)
    assert means
    assert all(op.layout is Layout.CONTIGUOUS for op in means)


def test_batch_norm_says_channels_and_pixels() -> None:
    (stem, *_) = find_elementwise("resnet50", "batchnorm", "", batch=2)
    assert (stem.n, stem.rows, stem.run) == (2 * 64 * 112 * 112, 64, 112 * 112)


@pytest.mark.parametrize(("phase", "dropped"), [("train", True), ("prefill", False)])
def test_attention_drops_weights_in_training_alone(phase: str, dropped: bool) -> None:
    graph = build_graph("gpt2", ModelOptions(stack="eager", phase=phase, batch=1, seq=64))
    assert {op.dropout for op, _ in graph.calls() if isinstance(op, Attention)} == {dropped}


def test_walks_survive_a_file_and_are_checked() -> None:
    graph = Graph.from_operators(
        "x",
        [Elementwise("cat", 1024, rows=4, run=64), Elementwise("copy", 64, layout=Layout.STRIDED)],
    )
    text = json.dumps(graph_to_plain(graph)).encode()
    assert parse_workload(text, "x") == graph
    assert b'"rows": 4' in text
    assert text.count(b"rows") == 1
    with pytest.raises(BadInput, match="1 to its 1024 elements"):
        Elementwise("cat", 1024, rows=2048)
