"""What each kernel asks of the chip, before any clock or bandwidth is known, and the shape features of it.

A kernel is ``units`` equal pieces (tiles, blocks, rows) that SMs take one after another, each
``unit_flop`` of arithmetic (padding included) in ``steps`` dependent steps, plus traffic at each
level of memory. The families fill these columns; ``timeline/`` turns them into cycles and seconds.
The cut into units is chosen as on the reference chip, the one the bundle was fitted on, so that a
sweep over chips repeats the arithmetic but not the choice.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.choose import NOT_RUN, Choice, Ran

Columns = dict[str, Array]
Flags = npt.NDArray[np.bool_]


class Style(StrEnum):
    """How a library's products feed the tensor cores."""

    HOPPER = (
        "hopper"  # clusters share loads, tiles a few tokens wide exist, operands come straight from shared memory
    )
    AMPERE = "ampere"  # every block loads for itself, every warp its own operands from shared memory


@dataclass(frozen=True)
class Reference:
    """The chip whose library chose the kernels: SMs, L2 and arithmetic per cycle and SM, by event."""

    sm_count: float
    l2_byte: float
    l2_byte_per_cycle: float
    dram_byte_per_cycle: float  # at the top clock
    top_hz: float
    sfu_per_cycle: float  # of an SM; 0: unknown
    per_cycle: Mapping[str, float]
    style: Style = Style.HOPPER
    # how its library picks kernels; None: unknown
    choice: Choice | None = field(default=None, compare=False, repr=False)
    # work of operators met before: it depends on nothing that a sweep changes
    kept: dict[Hashable, Work] = field(default_factory=dict, init=False, compare=False, repr=False)


@dataclass(frozen=True)
class Condition:
    """How an operator is run, where its form does not say. Empty text: as frameworks usually do."""

    layout: str = ""  # of a product: nt (weights as PyTorch keeps them) or nn; of attention: bshd or bhsd
    rotated: str = ""  # which operands come from device memory: none, weights, all, or as a profiler counts
    backend: str = ""  # of attention: default, cudnn, flash
    rows: int = 0  # of an elementwise operator over two dimensions; 0: not said
    run: int = 0  # elements of a turned operand that stay together; 1: a plain transpose; 0: not said
    kernels: tuple[str, ...] = ()  # names of those that ran; empty: let the choice decide
    parts: int = 0  # of K that the kernel that ran made, by its grid; 0: as its name says


USUAL = Condition()
COUNTED = "counted"  # of ``rotated``: a profiler that runs a kernel again for each of its passes


@dataclass(frozen=True)
class Told:
    """What the conditions of all rows say, each ``(row,)``."""

    usual: bool  # nothing of any row
    cold: Flags  # all operands come from device memory
    warm: Flags  # none does
    counted: Flags
    straight: Flags  # of a product: its right operand lies with k outermost
    split_heads: Flags  # of attention: heads outside of positions
    flash: Flags
    cudnn: Flags
    rows: Array  # 0: not said
    run: Array
    ran: Sequence[Ran]

    @classmethod
    def by(cls, conditions: Sequence[Condition]) -> Told:
        """Read off conditions; those of a whole workload are usual, and need not be looked at."""
        if conditions.count(USUAL) == len(conditions):
            return _told_nothing(len(conditions))
        return _told(conditions)

    def at(self, rows: npt.NDArray[np.intp]) -> Told:
        """Of some rows."""
        if self.usual:
            return _told_nothing(len(rows))
        columns = {name: values[rows] for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        return Told(usual=False, ran=[self.ran[i] for i in rows.tolist()], **columns)


def _told(conditions: Sequence[Condition]) -> Told:
    rotated, layout, backend = zip(*((c.rotated, c.layout, c.backend) for c in conditions), strict=True)

    def flags(words: Sequence[str], wanted: str) -> Flags:
        return np.array([word == wanted for word in words], dtype=bool)

    return Told(
        usual=False,
        cold=flags(rotated, "all"),
        warm=flags(rotated, "none"),
        counted=flags(rotated, COUNTED),
        straight=flags(layout, "nn"),
        split_heads=flags(layout, "bhsd"),
        flash=flags(backend, "flash"),
        cudnn=flags(backend, "cudnn"),
        rows=np.array([float(c.rows) for c in conditions]),
        run=np.array([float(c.run) for c in conditions]),
        ran=[(c.kernels, c.parts) for c in conditions],
    )


@lru_cache(maxsize=1024)
def _told_nothing(count: int) -> Told:
    no, zero = np.zeros(count, dtype=bool), np.zeros(count)
    no.flags.writeable = zero.flags.writeable = False
    return Told(True, no, no, no, no, no, no, no, zero, zero, (NOT_RUN,) * count)


@dataclass(frozen=True)
class Work:
    """Columns of all kernels, each ``(kernel,)``."""

    group: tuple[str, ...]  # kernels alike enough to share corrections, e.g. "gemm.unaligned"
    units: Array
    unit_flop: Array
    steps: Array  # dependent steps of one unit
    launches: Array  # kernels the operator becomes, those that start faster as part of one
    l2_byte: Array
    shared_byte: Array
    dram_read_byte: Array
    dram_write_byte: Array
    store_byte: Array  # of the result through L2, where a kernel stores after its main loop; else among l2_byte
    between_byte: Array  # written and read again between the kernels of one operator: casts, layouts, partial sums
    turn_element: Array  # elements that layout kernels turn, each as dear as one of a plain transpose
    between_dram_byte: Array  # the part of that which L2 cannot hold
    slots: Array  # units an SM holds at a time
    features: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def learner(self) -> tuple[str, ...]:
        """Kernels that learn from one another: the first word of each group, depthwise convolutions apart.

        A point convolution is a ``gemm``.
        """
        return tuple([learner_of(group) for group in self.group])

    def at(self, rows: npt.NDArray[np.intp]) -> Work:
        """The work of some kernels."""
        values = self._table.take(rows, axis=1)
        return Work(
            group=tuple([self.group[i] for i in rows.tolist()]),
            features=dict(zip(self.features, values[len(WORK_COLUMNS) :], strict=True)),
            **dict(zip(WORK_COLUMNS, values, strict=False)),
        )

    @cached_property
    def _table(self) -> Array:
        """Columns and features, ``(column, kernel)``, for those who take rows of them again and again."""
        return np.array([*(getattr(self, name) for name in WORK_COLUMNS), *self.features.values()])


class Part(NamedTuple):
    """What a family knows of its rows: groups, columns of work, and features.

    Sizes of which features are logarithms or alignments are given as they are: that is done once for all families.
    """

    group: Sequence[str]
    work: Columns
    plain: Columns
    logs: Columns
    aligned: Columns


@cache
def learner_of(group: str) -> str:
    """Whose residual a group learns.

    >>> learner_of("gemm.row"), learner_of("conv2d.depthwise.last.plain")
    ('gemm', 'depthwise')
    """
    return "depthwise" if ".depthwise" in group else group.partition(".")[0]


WORK_COLUMNS = (
    "units",
    "unit_flop",
    "steps",
    "launches",
    "l2_byte",
    "shared_byte",
    "dram_read_byte",
    "dram_write_byte",
    "store_byte",
    "between_byte",
    "turn_element",
    "between_dram_byte",
    "slots",
)


def columns_of(rows: Sequence[Sequence[float]]) -> Array:
    """Numbers of each row as columns, ``(column, row)``."""
    flat = np.fromiter(chain.from_iterable(rows), np.float64, len(rows) * len(rows[0]))
    return flat.reshape(len(rows), -1).T.copy()


def log2(values: npt.ArrayLike) -> Array:
    """Logarithm to base 2, zero taken as one."""
    return np.asarray(np.log2(np.maximum(np.asarray(values, dtype=np.float64), 1.0)))


def fill(units: Array, slots: Array | float) -> Array:
    """Share of the last wave's slots that have work, averaged over waves: units over whole waves.

    >>> float(fill(np.array(198.0), 132.0))
    0.75
    """
    waves = units / slots
    return np.asarray(waves / np.maximum(np.ceil(waves), 1.0))


def resident(byte: Array, l2_byte: float) -> Array:
    """Share of a working set that L2 keeps from one kernel to the next, 1 to 0.

    All of it up to a third of the capacity, none beyond it, linear between: the hash over two
    partitions and other traffic leave less than the capacity.
    """
    return _share(l2_byte - byte, l2_byte * _SOME_RESIDENT)


def resident_share(byte: float, l2_byte: float) -> float:
    """:func:`resident` of one kernel."""
    return min(max((l2_byte - byte) / (l2_byte * _SOME_RESIDENT), 0.0), 1.0)


_SOME_RESIDENT = 1.0 - 1.0 / 3.0  # of the capacity


def kept(byte: Array, l2_byte: float) -> Array:
    """The same for kernels that stream through all of it once: the least recent goes first, so less survives.

    From times of elementwise bursts on an H200 (60 MB of L2): none beyond 48 MB, half at 27 MB.

    >>> float(kept(np.array(50e6), 62.9e6)), float(kept(np.array(4e6), 62.9e6))
    (0.0, 1.0)
    """
    return _share(_NONE_KEPT * l2_byte - byte, (_NONE_KEPT - _ALL_KEPT) * l2_byte)


def kept_share(byte: float, l2_byte: float) -> float:
    """:func:`kept` of one kernel."""
    return min(max((_NONE_KEPT * l2_byte - byte) / ((_NONE_KEPT - _ALL_KEPT) * l2_byte), 0.0), 1.0)


_ALL_KEPT, _NONE_KEPT = 0.1, 0.77  # of the capacity


def _share(room: Array, whole: float) -> Array:
    """A part of a whole drawn in to 0 and 1, as ``np.clip`` does in four times as long."""
    return np.minimum(np.maximum(room / whole, 0.0), 1.0)


def alignment(size: npt.ArrayLike, most: int = 16) -> Array:
    """Log2 of the largest power of two that divides a size, up to ``most``."""
    whole = np.maximum(np.asarray(size, dtype=np.int64), 1)  # of less than one element nothing is known
    return np.asarray(np.log2(np.minimum(whole & -whole, most)), dtype=np.float64)
