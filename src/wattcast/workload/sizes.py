"""Sizes that know how they follow from the batch, and for which batches what was decided on the way holds.

A trace is a plain computation on sizes: they are multiplied, added, divided and compared. Run with a :class:`Size` in
place of the batch, every number comes out as a polynomial in the batch, exactly. A comparison has one outcome, that
for the batch at hand; it is noted in a :class:`Span`, which narrows to the batches for which it is the same. What no
polynomial can answer raises :class:`NotPlain`, so that nothing is taken for granted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import NoReturn, TypeAlias, cast

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

        A batch is at least one, so coefficients of one sign decide. A polynomial that only rises, or only falls, has
        one root, and the batches keep to their side of it.

        >>> span = Span(8, 100)
        >>> span.sign((-384, 64), ordered=True), span.low, span.high
        (1, 7, 100)
        """
        if min(of) >= 0 or max(of) <= 0:
            return (max(of) > 0) - (min(of) < 0)
        while not of[0]:  # a factor that is the batch has no say
            of = of[1:]
        rising = max(of[1:]) > 0
        value = _value(of, self.batch)
        if value == 0 or (rising and min(of[1:]) < 0):
            raise NotPlain
        root = _root(of if rising else tuple([-factor for factor in of]), self.high)
        met = _value(of, root) == 0
        if not ordered:
            if met:
                self.without.add(root)
        elif (value > 0) == rising:
            self.low = max(self.low, root + 1)
        else:
            self.high = min(self.high, root - 1 if met else root)
        return 1 if value > 0 else -1


def _root(of: Coefficients, most: int) -> int:
    """The last batch, up to ``most``, at which a rising polynomial has not passed zero."""
    if len(of) == 2:
        return -of[0] // of[1]
    return bisect_right(range(most + 1), 0, key=partial(_value, of)) - 1


class Size:
    """A whole number that is a polynomial in the batch, of one trace. What is constant is a plain number."""

    __slots__ = ("of", "span")

    def __init__(self, span: Span, of: Coefficients) -> None:
        self.span, self.of = span, of

    def at(self, batch: int) -> int:
        """Its value for a batch."""
        return _value(self.of, batch)

    def __add__(self, other: object) -> Size | int:
        if isinstance(other, Largest):
            return NotImplemented  # which knows how
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
        if other.__class__ is Size and other.span is not self.span:
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
        if isinstance(other, Size) and other.span is not self.span:
            raise NotPlain
        return _of(other)

    def _refused(self, *_: object) -> NoReturn:
        raise NotPlain

    __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __pow__ = __rpow__ = _refused
    __index__ = __int__ = __float__ = __round__ = __format__ = _refused


class Largest:
    """The largest of several sizes, which of them being left open: no comparison narrows the span."""

    __slots__ = ("among",)

    def __init__(self, among: Iterable[Coefficients]) -> None:
        found = list(dict.fromkeys(among))
        self.among = [of for of in found if not any(_below(of, other) for other in found if other != of)]

    def at(self, batch: int) -> int:
        """Its value for a batch."""
        return max([_value(of, batch) for of in self.among])

    def __add__(self, other: object) -> Largest:
        more = _of(other)
        return Largest(tuple([a + b for a, b in zip_longest(of, more, fillvalue=0)]) for of in self.among)

    __radd__ = __add__


def largest(values: Sequence[int]) -> int:
    """``max(values)``; of sizes that follow from the batch, one that is found once the batch is known."""
    if set(map(type, values)) == {int}:
        return max(values)
    among = [of for value in values for of in (value.among if isinstance(value, Largest) else [_of(value)])]
    return cast(int, Largest(among))


def _below(of: Coefficients, other: Coefficients) -> bool:
    """Whether a polynomial is at most the other for every batch, as far as its coefficients tell."""
    return all(a <= b for a, b in zip_longest(of, other, fillvalue=0))


def _of(value: object) -> Coefficients:
    if isinstance(value, Size):
        return value.of
    if isinstance(value, int):
        return (value,)
    raise NotPlain


def _value(of: Coefficients, batch: int) -> int:
    value = 0
    for factor in reversed(of):
        value = value * batch + factor
    return value


def _simplest(span: Span, of: list[int]) -> Size | int:
    while len(of) > 1 and not of[-1]:
        of.pop()
    return of[0] if len(of) == 1 else Size(span, tuple(of))
