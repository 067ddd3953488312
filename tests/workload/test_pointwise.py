"""One pointwise kernel: operands that lie row by row go the short way, and come out as by the rules for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattcast.dtypes import Dtype
from wattcast.workload import pointwise as points
from wattcast.workload.graph import Layout
from wattcast.workload.pointwise import pointwise
from wattcast.workload.strides import contiguous, layout_of
from wattcast.workload.symbolic import Tape

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
def test_row_major_operands_come_out_as_by_the_rules_for_all(
    given: list[tuple[tuple[int, ...], Dtype]], out_dtype: Dtype | None
) -> None:
    tape = Tape(label="here")
    function = {1: "silu", 2: "add", 3: "where"}[len(given)]
    out = pointwise(function, *[tape.empty(shape, dtype) for shape, dtype in given], out_dtype=out_dtype)
    told = tuple((shape, contiguous(shape), dtype) for shape, dtype in given)
    shape, strides, dtype, op = points._planned(function, told, out_dtype)
    (entry,) = tape.entries
    assert entry.op == op
    assert entry.op.label == "here"
    assert (out.shape, out.strides, out.dtype) == (shape, strides, dtype)
    assert out.storage.byte == out.numel * dtype.byte


def test_adding_into_a_slice_walks_in_strides_unless_all_lie_alike() -> None:
    """The result need not be dense: a gradient is added into a part of another, whose rows are further apart."""
    shape, apart, dense = (3, 64, 8), (1024, 8, 1), (512, 8, 1)
    assert layout_of(shape, apart, [(shape, apart), (shape, dense)]) is Layout.STRIDED
    assert layout_of(shape, apart, [(shape, apart), (shape, apart)]) is Layout.CONTIGUOUS
    assert layout_of(shape, dense, [(shape, dense), (shape, dense)]) is Layout.CONTIGUOUS
