"""Long lists of operators lie in columns: they hold, merge and say what a tuple of operators does."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

from wattcast.core import arrays
from wattcast.core.errors import BadInput
from wattcast.core.units import Dtype
from wattcast.workload.graph import Block, Graph, compute_totals
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.operator_base import MANY_OPS, OperatorColumns
from wattcast.workload.operator_types import Attention, Conv2d, Elementwise, Linear, Softmax
from wattcast.workload.readers.from_json import graph_to_plain, parse_workload
from wattcast.workload.readers.load_workload import load_workload

MIXED = [
    *(
        Linear(1 + i, 64, 32 * (1 + i % 3), bias=i % 2 > 0, label=f"layer {i % 5}", count=1 + i % 4)
        for i in range(40)
    ),
    *(Conv2d(1, 8, 16, 9 + i % 4, 9, 3, 3, label="image") for i in range(8)),
    *(Attention(2, 8, 4, 1 + i, 7 + i, 64, causal=True) for i in range(9)),
    *(Elementwise("add", 100 + i, read=800 + i % 2, layout="strided", rows=4) for i in range(9)),  # type: ignore[arg-type]
    *(Softmax(3 + i % 5, 1000, dtype=Dtype.FP32) for i in range(11)),
    *(Linear(1 + i, 64, 32, label="again", count=7) for i in range(3)),
]


def test_operators_come_out_as_they_went_in() -> None:
    columns = OperatorColumns.from_operators(MIXED)
    assert columns == tuple(MIXED)
    assert hash(columns) == hash(tuple(MIXED))
    assert [(op.label, op.count) for op in columns] == [(op.label, op.count) for op in MIXED]
    assert [op.work for op in columns] == [op.work for op in MIXED]
    assert columns.describe() == [str(op) for op in MIXED]
    assert columns[3:7] == tuple(MIXED[3:7])
    assert columns[np.array([50, 2])] == (MIXED[50], MIXED[2])


@pytest.mark.parametrize(
    "mix", [arrays._MIX, np.uint64(0)]
)  # the second gives many operators one key
def test_equal_operators_merge_and_those_of_a_form_lie_together(
    mix: np.uint64, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features that a form lacks then take no memory: of a million operators in turn they took 0.4
    GB.
    """
    monkeypatch.setattr(arrays, "_MIX", mix)
    distinct, place = OperatorColumns.from_operators(MIXED).merge_equal()
    kinds = list(dict.fromkeys(map(type, MIXED)))
    words = list(dict.fromkeys(type(op).read_words(op) for op in MIXED))
    expected = sorted(
        dict.fromkeys(MIXED),
        key=lambda op: (kinds.index(type(op)), words.index(type(op).read_words(op))),
    )
    assert len(expected) < len(MIXED)
    assert distinct == tuple(expected)
    assert [op.label for op in distinct] == [op.label for op in expected]
    assert place.tolist() == [expected.index(op) for op in MIXED]


def test_a_long_file_is_read_into_columns_and_written_back() -> None:
    ops = list(chain(*(MIXED for _ in range(1 + MANY_OPS // len(MIXED)))))
    of_objects = Graph.from_operators("long", ops)
    read = load_workload(graph_to_plain(of_objects), ModelOptions())
    assert isinstance(read.blocks[0].ops, OperatorColumns)
    assert read == of_objects
    assert graph_to_plain(read) == graph_to_plain(of_objects)
    assert compute_totals(read) == compute_totals(of_objects)
    several = Graph("blocks", (Block(tuple(MIXED[:2])), Block(ops, 3, "many")))
    assert load_workload(graph_to_plain(several), ModelOptions()).blocks[1].ops == tuple(ops)


PLACES = (0, 1, 2999, MANY_OPS)
WRONG_ENTRIES = [
    (
        '{"op": "linear", "m": 0, "n": 1, "k": 1}',
        r"linear\.m: expected a whole number of at least 1",
    ),
    (
        '{"op": "relu", "n": 8, "count": 0}',
        r"relu\.count: expected a whole number of at least 1",
    ),
    ('{"op": "relu", "n": 8, "rows": 9}', r"relu\.rows: expected from 1 to its 8 elements"),
    ('{"op": "linear", "m": 35184372088832, "n": 2, "k": 1}', r"at most 2\^40"),
    (f'{{"op": "linear", "m": {10**400}, "n": 2, "k": 1}}', r"at most 2\^40"),
    ('{"op": "lineer"}', "unknown operator 'lineer'"),
    (
        '{"op": "attention", "batch": 1, "heads": 7, "kv_heads": 2, "q_len": 1, "kv_len": 1, "head_dim": 4}',
        "a divisor of heads=7",
    ),
]


def list_wrong_places() -> list[Any]:
    """Return every wrong entry at every place; by day each entry stands at one of them."""
    cases = []
    for number, (entry, said) in enumerate(WRONG_ENTRIES):
        for place in PLACES:
            by_day = place == PLACES[number % len(PLACES)]
            marks = () if by_day else pytest.mark.slow
            cases.append(pytest.param(place, entry, said, marks=marks))
    return cases


@pytest.mark.parametrize(("place", "entry", "said"), list_wrong_places())
def test_the_first_wrong_entry_of_many_is_named(place: int, entry: str, said: str) -> None:
    entries = [f'{{"op": "linear", "m": {1 + i}, "n": 8, "k": 8}}' for i in range(MANY_OPS + 1)]
    entries[place] = entries[-1] = entry
    data = f'{{"name": "long", "ops": [{", ".join(entries)}]}}'.encode()
    with pytest.raises(BadInput, match=rf"ops\[{place}\]: .*{said}"):
        parse_workload(data, "long.json")
