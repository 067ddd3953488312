"""How elementwise operators say they walk: rows and runs, from strides, through templates and JSON."""

from __future__ import annotations

import json

import pytest

from wattcast.errors import BadInput
from wattcast.workload import Options, build
from wattcast.workload.from_json import parse, to_plain
from wattcast.workload.graph import Attention, Elementwise, Graph, Layout
from wattcast.workload.strides import contiguous, extent

SHAPE = (2, 8, 4, 16)


def test_a_slice_of_columns_lies_together_as_far_as_it_is_wide() -> None:
    rows, run = extent(Layout.STRIDED, (32, 16), (16, 1), [((32, 16), (48, 1))])
    assert (rows, run) == (32, None)


def test_a_mask_for_all_heads_serves_rows_of_whole_scores() -> None:
    mask = (2, 1, 4, 16)
    given = [(SHAPE, contiguous(SHAPE)), (mask, contiguous(mask))]
    assert extent(Layout.BROADCAST, SHAPE, contiguous(SHAPE), given) == (16, None)
    scale = (2, 8, 4, 1)
    given = [(SHAPE, contiguous(SHAPE)), (scale, contiguous(scale))]
    assert extent(Layout.BROADCAST, SHAPE, contiguous(SHAPE), given) == (64, None)


def test_a_plain_transpose_has_runs_of_one() -> None:
    assert extent(Layout.TRANSPOSED, (32, 16), (16, 1), [((32, 16), (1, 32))]) == (32, 1)


def of(name: str, function: str, label: str, **options: object) -> list[Elementwise]:
    graph = build(name, Options(**options))
    calls = (op for op, _ in graph.calls())
    return [op for op in calls if isinstance(op, Elementwise) and op.function == function and label in op.label]


def test_a_cache_is_told_from_halves_and_a_slice_from_a_whole() -> None:
    """GPT-2's new keys are a slice of one projection, Llama's are not; its rotary halves are strided."""
    (cache,) = set(of("gpt2", "cat", "cache", phase="decode", batch=4, seq=100))
    assert (cache.layout, cache.rows, cache.run) == (Layout.STRIDED, 4 * 12, 64)
    (cache,) = set(of("llama3-8b", "cat", "cache", phase="decode", batch=4, seq=100))
    assert (cache.layout, cache.rows, cache.run) == (Layout.CONTIGUOUS, 4 * 8, 128)
    halves = {op.run for op in of("llama3-8b", "cat", "attention", phase="prefill", batch=4, seq=100)}
    assert 64 in halves


def test_gradients_of_biases_are_sums_over_rows_and_means_are_not() -> None:
    biases = of("gpt2", "sum", "mlp.backward", phase="train", batch=2, seq=64)
    assert biases
    assert all(op.layout is Layout.TRANSPOSED for op in biases)
    means = of("llama3-8b", "mean", "norm", phase="prefill", batch=2, seq=64)
    assert means
    assert all(op.layout is Layout.CONTIGUOUS for op in means)


def test_batch_norm_says_channels_and_pixels() -> None:
    (stem, *_) = of("resnet50", "batchnorm", "", batch=2)
    assert (stem.n, stem.rows, stem.run) == (2 * 64 * 112 * 112, 64, 112 * 112)


@pytest.mark.parametrize(("phase", "dropped"), [("train", True), ("prefill", False)])
def test_attention_drops_weights_in_training_alone(phase: str, dropped: bool) -> None:
    graph = build("gpt2", Options(phase=phase, batch=1, seq=64))
    assert {op.dropout for op, _ in graph.calls() if isinstance(op, Attention)} == {dropped}


def test_walks_survive_a_file_and_are_checked() -> None:
    graph = Graph.of("x", [Elementwise("cat", 1024, rows=4, run=64), Elementwise("copy", 64, layout=Layout.STRIDED)])
    text = json.dumps(to_plain(graph)).encode()
    assert parse(text, "x") == graph
    assert b'"rows": 4' in text
    assert text.count(b"rows") == 1
    with pytest.raises(BadInput, match="1 to its 1024 elements"):
        Elementwise("cat", 1024, rows=2048)
