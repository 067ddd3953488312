"""Strides followed as PyTorch follows them: checked against PyTorch on random views."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")

from wattcast.workload.memory_layout import is_dense, output_strides, view_strides

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@st.composite
def views(draw: st.DrawFn, shape: list[int] | None = None):  # type: ignore[no-untyped-def]
    """A tensor after a random permutation, slice and expansion."""
    wanted = shape or draw(shapes)
    order = draw(st.sampled_from(list(permutations(range(len(wanted))))))
    pad = draw(st.lists(st.integers(0, 2), min_size=len(wanted), max_size=len(wanted)))
    ones = draw(st.lists(st.booleans(), min_size=len(wanted), max_size=len(wanted)))
    stored = [
        1 if flat else size + more for size, more, flat in zip(wanted, pad, ones, strict=True)
    ]
    base = torch.empty([stored[i] for i in order], device="meta")
    back = sorted(range(len(order)), key=order.__getitem__)
    tensor = base.permute(*back)
    for axis, (size, flat) in enumerate(zip(wanted, ones, strict=True)):
        tensor = tensor if flat else tensor.narrow(axis, 0, size)
    return tensor.expand(*wanted)


@given(st.data())
def test_the_output_of_a_pointwise_kernel_lies_where_pytorch_puts_it(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(views(shape)), data.draw(views(shape))
    expected = torch.add(a, b)
    found = output_strides(tuple(shape), [(tuple(t.shape), t.stride()) for t in (a, b)])
    relevant = [i for i, size in enumerate(shape) if size > 1]
    assert [found[i] for i in relevant] == [expected.stride()[i] for i in relevant]


@given(views(), st.data())
def test_a_view_is_possible_exactly_when_pytorch_says_so(tensor, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    sizes = list(tensor.shape)
    cuts = data.draw(st.lists(st.booleans(), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    wanted = [sizes[0]]
    for size, joined in zip(sizes[1:], cuts, strict=True):
        if joined:
            wanted[-1] *= size
        else:
            wanted.append(size)
    found = view_strides(tuple(sizes), tensor.stride(), tuple(wanted))
    try:
        expected = tensor.view(*wanted)
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    assert [s for s, n in zip(found, wanted, strict=True) if n > 1] == [
        s for s, n in zip(expected.stride(), wanted, strict=True) if n > 1
    ]


@given(views())
def test_contiguous_means_what_pytorch_means(tensor) -> None:  # type: ignore[no-untyped-def]
    assert is_dense(tuple(tensor.shape), tensor.stride(), exact=True) == tensor.is_contiguous()
