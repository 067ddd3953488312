"""Kernels: what the device will be asked to run, as a struct of arrays.

Equal operators become one row; the issue order keeps how often and when each runs. Work is stated
before any clock is known; ``timeline/`` turns it into cycles and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array, Scalar
from wattcast.kernels.work import USUAL, Condition, Work
from wattcast.workload.graph import Operator

Index = npt.NDArray[np.int64]
_FILLING = ("gemm", "conv2d")  # families whose units fill an SM each


@dataclass(frozen=True)
class Segment:
    """A stretch of the issue order that runs ``repeat`` times: rows of ``Kernels`` with their counts."""

    rows: Index  # (position,)
    counts: Array  # (position,) how often in a row each is issued
    repeat: int

    @cached_property
    def many(self) -> bool:
        """Whether any kernel is issued several times in a row."""
        return bool((self.counts > 1).any())


class Memo:
    """What the shapes of all rows follow from, for finding them again; hashed once."""

    __slots__ = ("_hash", "conditions", "ops")

    def __init__(self, ops: tuple[Operator, ...], conditions: tuple[Condition, ...]) -> None:
        self.ops, self.conditions = ops, conditions
        usual = conditions.count(USUAL) == len(conditions)
        self._hash = hash((ops, () if usual else conditions))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Memo], tuple[tuple[Operator, ...], tuple[Condition, ...]]]:
        return Memo, (self.ops, self.conditions)  # another process hashes words otherwise

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Memo) or self._hash != other._hash:
            return False
        return self.ops == other.ops and self.conditions == other.conditions


@dataclass(frozen=True)
class Kernels:
    """Distinct kernels on the last axis, and the order in which the host issues them."""

    ops: tuple[Operator, ...]  # what each row stands for
    family: tuple[str, ...]  # gemm, conv2d, attention, softmax, layernorm, rmsnorm, elementwise, collective
    pipe_event: tuple[str, ...]  # the event that counts each row's arithmetic, e.g. "tensor_fp16_flop"
    pipe_per_cycle: Scalar  # (*sweep, kernel) arithmetic of one SM per cycle on that pipe
    flop: Array  # (kernel,)
    sfu_op: Array  # (kernel,)
    work: Work  # columns (kernel,)
    link_byte: Array  # (kernel,) bytes that leave the device
    link_hops: Array  # (kernel,) messages in sequence
    segments: tuple[Segment, ...]
    memo: Memo  # of ops and conditions
    conditions: tuple[Condition, ...] = ()
    notes: tuple[str, ...] = ()  # what had to be assumed of each row; empty: nothing

    @property
    def assumptions(self) -> tuple[str, ...]:
        """All that had to be assumed."""
        return tuple(dict.fromkeys(note for note in self.notes if note))

    def at(self, rows: Index, ops: tuple[Operator, ...], segments: tuple[Segment, ...] = ()) -> Kernels:
        """Some rows as kernels of their own; ``ops`` equal theirs under other labels, ``segments`` count in them."""
        some = rows.tolist()
        family, events, conditions, notes = (
            tuple([of[i] for i in some]) for of in (self.family, self.pipe_event, self.conditions, self.notes)
        )
        rate = self.pipe_per_cycle
        return Kernels(
            ops=ops,
            family=family,
            pipe_event=events,
            pipe_per_cycle=rate if isinstance(rate, float) else rate.take(rows, axis=-1),
            flop=self.flop.take(rows),
            sfu_op=self.sfu_op.take(rows),
            work=self.work.at(rows),
            link_byte=self.link_byte.take(rows),
            link_hops=self.link_hops.take(rows),
            segments=segments,
            memo=Memo(ops, conditions),
            conditions=conditions,
            notes=notes,
        )

    @cached_property
    def fills(self) -> npt.NDArray[np.bool_]:
        """Kernels whose units fill an SM each, ``(kernel,)``."""
        return np.array([family in _FILLING for family in self.family], dtype=np.bool_)

    @cached_property
    def calls(self) -> Array:
        """How often each row runs in the whole workload, ``(kernel,)``."""
        return self.added_up([1.0] * len(self.segments))

    def added_up(self, each: Sequence[float]) -> Array:
        """A value of each segment, added up over all runs of each row, ``(kernel,)``."""
        if not self.segments:
            return np.zeros(len(self.ops))
        rows = np.concatenate([segment.rows for segment in self.segments])
        runs = [value * s.repeat * s.counts for value, s in zip(each, self.segments, strict=True)]
        return np.asarray(np.bincount(rows, np.concatenate(runs), len(self.ops)), dtype=np.float64)
