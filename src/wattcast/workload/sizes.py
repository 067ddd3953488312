"""Sizes that know how they follow from the batch, and for which batches what was decided on the way holds.

A trace is a plain computation on sizes: shapes are multiplied, added, divided and compared. Run with a :class:`Size`
in place of the batch, every number comes out as a polynomial in the batch, exactly. A comparison has one outcome, that
for the batch at hand; it is noted in a :class:`Span`, which narrows to the batches for which it is the same. Whatever
no polynomial can answer raises :class:`NotPlain`, so nothing is ever taken for granted.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NoReturn, TypeAlias

Coefficients: TypeAlias = tuple[int, ...]  # of 1, batch, batch squared ...


class NotPlain(Exception):
    """Something was asked of a size that has no answer for all batches."""


class Span:
    """The batches for which every comparison so far comes out as for ``batch``."""

    __slots__ = ("batch", "high", "low", "without")

    def __init__(self, batch: int, most: int) -> None:
        self.batch, self.low, self.high = batch, 1, most
        self.without: set[int] = set()

    def holds(self, batch: int) -> bool:
        """Whether all comparisons come out the same for ``batch``."""
        return self.low <= batch <= self.high and batch not in self.without

    def sign(self, of: Coefficients, *, ordered: bool) -> int:
        """The sign of a polynomial; not ``ordered``: only whether it is zero matters.

        A batch is at least one, so coefficients of one sign decide; a straight line has one root, from which the
        batches keep to their side.

        >>> span = Span(8, 100)
        >>> span.sign((-384, 64), ordered=True), span.low, span.high
        (1, 7, 100)
        """
        if min(of) >= 0 or max(of) <= 0:
            return (max(of) > 0) - (min(of) < 0)
        if len(of) > 2:
            raise NotPlain
        constant, slope = of
        value = constant + slope * self.batch
        if value == 0:
            raise NotPlain
        root, rest = divmod(-constant, slope)
        if not ordered:
            if rest == 0:
                self.without.add(root)
        elif (value > 0) == (slope > 0):
            self.low = max(self.low, root + 1)
        else:
            self.high = min(self.high, root if rest else root - 1)
        return 1 if value > 0 else -1


class Size:
    """A whole number that is a polynomial in the batch, of one trace. What is constant is a plain number."""

    __slots__ = ("of", "span")

    def __init__(self, span: Span, of: Coefficients) -> None:
        self.span, self.of = span, of

    def at(self, batch: int) -> int:
        """Its value for a batch."""
        value = 0
        for factor in reversed(self.of):
            value = value * batch + factor
        return value

    def __add__(self, other: object) -> Size | int:
        pairs = zip_longest(self.of, self._of(other), fillvalue=0)
        return _simplest(self.span, [a + b for a, b in pairs])

    __radd__ = __add__

    def __sub__(self, other: object) -> Size | int:
        pairs = zip_longest(self.of, self._of(other), fillvalue=0)
        return _simplest(self.span, [a - b for a, b in pairs])

    def __rsub__(self, other: object) -> Size | int:
        pairs = zip_longest(self._of(other), self.of, fillvalue=0)
        return _simplest(self.span, [a - b for a, b in pairs])

    def __mul__(self, other: object) -> Size | int:
        factors = self._of(other)
        product = [0] * (len(self.of) + len(factors) - 1)
        for i, a in enumerate(self.of):
            for j, b in enumerate(factors):
                product[i + j] += a * b
        return _simplest(self.span, product)

    __rmul__ = __mul__

    def __neg__(self) -> Size | int:
        return self * -1

    def __floordiv__(self, other: object) -> Size | int:
        """Exact for every batch, or not plain: division by c·batchⁿ of terms that all have it in them."""
        *zeros, factor = self._of(other)
        shift = len(zeros)
        if any(zeros) or any(self.of[:shift]) or not factor or any(a % factor for a in self.of[shift:]):
            raise NotPlain
        return _simplest(self.span, [a // factor for a in self.of[shift:]])

    def __mod__(self, other: object) -> int:
        *zeros, factor = self._of(other)
        shift = len(zeros)
        if any(zeros) or any(self.of[:shift]) or not factor or any(a % factor for a in self.of[shift + 1 :]):
            raise NotPlain
        if shift and self.of[shift] % factor:
            raise NotPlain
        return self.of[shift] % factor

    def __eq__(self, other: object) -> bool:
        if other.__class__ is Size and other.span is not self.span:  # type: ignore[attr-defined]
            return False  # of another trace, met in a cache
        return self._compared(other, ordered=False) == 0

    def __lt__(self, other: object) -> bool:
        return self._compared(other) < 0

    def __le__(self, other: object) -> bool:
        return self._compared(other) <= 0

    def __gt__(self, other: object) -> bool:
        return self._compared(other) > 0

    def __ge__(self, other: object) -> bool:
        return self._compared(other) >= 0

    def __bool__(self) -> bool:
        return self != 0

    def __hash__(self) -> int:
        """As caches want it: never that of a plain number, nor that of another trace's size."""
        return hash((id(self.span), self.of))

    def _compared(self, other: object, *, ordered: bool = True) -> int:
        pairs = zip_longest(self.of, self._of(other), fillvalue=0)
        return self.span.sign(tuple([a - b for a, b in pairs]), ordered=ordered)

    def _of(self, other: object) -> Coefficients:
        if isinstance(other, Size) and other.span is self.span:
            return other.of
        if isinstance(other, int):
            return (other,)
        raise NotPlain

    def _refused(self, *_: object) -> NoReturn:
        raise NotPlain

    __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __pow__ = __rpow__ = _refused
    __index__ = __int__ = __float__ = __round__ = __format__ = _refused


def _simplest(span: Span, of: list[int]) -> Size | int:
    while len(of) > 1 and not of[-1]:
        of.pop()
    return of[0] if len(of) == 1 else Size(span, tuple(of))
