"""Sizes that follow from the batch: exact for every batch they hold for, and silent about none."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.workload.sizes import Largest, NotPlain, Size, Span, largest

MOST = 1 << 20
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
lines = st.tuples(st.integers(-50, 50), st.integers(-50, 50))


def value(size: Any, batch: int) -> int:
    return size if isinstance(size, int) else size.at(batch)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), lines, st.integers(2, 40), st.integers(1, 500))
def test_arithmetic_is_that_of_whole_numbers_for_every_batch(
    shape: list[int], line: tuple[int, int], at: int, other: int
) -> None:
    batch: Any = Size(Span(at, MOST), (0, 1))

    def worked(b: Any) -> Any:
        whole = prod([*shape, b])
        return (whole + line[0]) * (3 - b) + line[1] * b - (whole * 6) // 6 + (whole * 2 * b) // (2 * b) + -b

    assert value(worked(batch), other) == worked(other)


@given(lines, lines, st.sampled_from(COMPARISONS), st.integers(2, 60), st.integers(1, 300))
def test_a_comparison_holds_for_all_batches_of_its_span(
    a: tuple[int, int], b: tuple[int, int], compare: Callable[[Any, Any], bool], at: int, other: int
) -> None:
    span = Span(at, MOST)
    batch: Any = Size(span, (0, 1))
    try:
        found = compare(a[0] + a[1] * batch, b[0] + b[1] * batch)
    except NotPlain:  # equal here, and nowhere else
        assert a[0] + a[1] * at == b[0] + b[1] * at
        return
    assert span.holds(at)
    assert found == compare(a[0] + a[1] * at, b[0] + b[1] * at)
    if span.holds(other):
        assert found == compare(a[0] + a[1] * other, b[0] + b[1] * other)


def test_a_curve_keeps_to_its_side_as_well() -> None:
    span = Span(40, MOST)
    batch: Any = Size(span, (0, 1))
    assert batch * batch > 1024
    assert (span.low, span.high) == (33, MOST)
    assert batch * batch != 51 * 51
    assert not span.holds(51)
    assert span.holds(50)
    assert batch * batch * 3 > batch  # whatever the batch: nothing to note
    assert (span.low, span.high) == (33, MOST)


@pytest.mark.parametrize(
    "asked",
    [
        lambda b: b * 0.5,
        lambda b: b / 2,
        lambda b: (3 * b) // 2,
        lambda b: (3 * b + 1) // 3,
        lambda b: (3 * b) % 2,
        lambda b: 100 // b,
        lambda b: round(b),
        lambda b: float(b),
        lambda b: int(b),
        lambda b: list(range(b)),
        lambda b: [0] * b,
        lambda b: f"{b}",
        lambda b: b == 8,
        lambda b: b * b - 20 * b + 3 > 0,
        lambda b: b + Size(Span(8, MOST), (0, 1)),
    ],
)
def test_what_has_no_answer_for_all_batches_is_refused(asked: Callable[[Any], object]) -> None:
    with pytest.raises(NotPlain):
        asked(Size(Span(8, MOST), (0, 1)))


def test_what_is_constant_is_a_plain_number() -> None:
    batch: Any = Size(Span(8, MOST), (0, 1))
    assert type(batch - batch + 3) is int
    assert type((5 * batch) // batch) is int
    assert (12 * batch) % 4 == 0
    assert (12 * batch + 7) % 4 == 3


def test_sizes_of_two_traces_are_never_taken_for_one_another() -> None:
    """Caches outlive a trace; what one holds for a batch of 8 must not answer for a batch of 9."""
    one, other = Size(Span(8, MOST), (0, 1)), Size(Span(9, MOST), (0, 1))
    assert one != other
    assert len({one, other, Size(one.span, (0, 1))}) == 2


@given(st.lists(st.one_of(lines, st.integers(0, 99)), min_size=1, max_size=6), st.integers(1, 200))
def test_the_largest_is_found_once_the_batch_is_known(sizes: list[tuple[int, int] | int], batch: int) -> None:
    span = Span(8, MOST)
    b: Any = Size(span, (0, 1))

    def all_of(b: Any) -> list[Any]:
        return [size if isinstance(size, int) else size[0] + size[1] * b for size in sizes]

    found: Any = 5 + largest([largest(all_of(b)[:2]), *all_of(b)]) + b
    assert value(found, batch) == 5 + max(all_of(batch)) + batch
    assert (span.low, span.high, span.without) == (1, MOST, set())


def test_what_can_never_be_the_largest_is_forgotten() -> None:
    assert Largest([(3, 4), (2, 4), (9, 1), (3, 4), (9,)]).among == [(3, 4), (9, 1)]
