"""Scores of all candidates of a class at once, for the choice of a kernel.

The same as the terms of :mod:`wattcast.kernels.candidates` times their weights, up to a constant of each row, which
changes neither which is highest nor any share. Terms are logarithms of products of the same few sizes: their
weights are added up beforehand, sides of tiles that many candidates share are divided once, and what
only candidates that split K have is worked out for those alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.candidates import LOADS, LONGEST, SPLIT_CYCLES, STEP_K, scaffold

_Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Scorer:
    """Weights folded together; candidates in an order in which those that split K come last, ``(candidate,)``."""

    back: _Index  # where each candidate lies in that order
    first_split: int
    side: Array  # (side,) distinct sides of tiles: along outputs, then along tokens
    of: _Index  # (side,) 0: along outputs, 1: along tokens
    side_weight: Array  # (3, side) of the log of tiles along it, of a whole number of them, of one that is enough
    at_n: _Index  # places among the sides
    at_m: _Index
    capacity: Array  # tiles on the chip at a time
    few: float  # tiles that leave half of the chip idle
    cycles: Array  # of a step of K of all tiles on an SM
    loads: Array  # cycles to load what a tile needs of an element of K
    slant: Array  # log of how much longer a tile is along outputs
    weight: Array  # (term,) that all candidates have
    split_weight: Array  # (term,) of those that split K
    taste: Array  # (shape, candidate) of the shape
    constant: Array

    @classmethod
    def by(cls, kind: Any, sides: tuple[Array, Array], split: Any, weight: Array, own: Array, sms: float) -> Scorer:
        """From candidates, the weights of the terms, and those of the shape, ``(candidate, 1 + shape)``."""
        order = np.argsort(split, kind="stable")
        tile_n, tile_m = (side[order] for side in sides)
        held, step_cycles = scaffold(kind[order], tile_n, tile_m)
        (side_n, at_n), (side_m, at_m) = (np.unique(side, return_inverse=True) for side in (tile_n, tile_m))
        w, n, capacity, cycles = weight, len(side_n), sms * held, held * step_cycles
        constant = own[order, 0] + w[1] * np.log(tile_n) + w[2] * np.log(tile_m)
        constant += w[6] * np.log(cycles) + w[7] * np.log(capacity * (tile_n + tile_m))
        along = np.array([[w[1], w[9], 0.0]] * n + [[w[2], w[10], w[13]]] * len(side_m))
        return cls(
            back=np.argsort(order),
            first_split=int(np.count_nonzero(~split)),
            side=np.concatenate([side_n, side_m]),
            of=np.repeat([0, 1], [n, len(side_m)]),
            side_weight=along.T.copy(),
            at_n=at_n,
            at_m=at_m + n,
            capacity=capacity,
            few=sms / 2.0,
            cycles=cycles,
            loads=(tile_n + tile_m) / LOADS,
            slant=np.log(tile_n / tile_m),
            weight=np.array([w[0], w[3] + w[6], w[5] + w[7] - w[3], -w[4] - w[5], w[8], w[11], w[12]]),
            split_weight=np.array([w[6], -w[7], w[15], w[14], w[16]]),
            taste=own[order, 1:].T.copy(),
            constant=constant,
        )

    def scores(self, b: Array, m: Array, n: Array, k: Array, shape: Array) -> Array:
        """Score of every candidate for every product, ``(row, candidate)``; sizes are ``(row,)``."""
        found, tiles = self._along(b, m, n)
        k, ratio = k[:, np.newaxis], np.log(np.minimum(n, LONGEST) / np.minimum(m, LONGEST))
        terms, steps = np.empty((len(self.weight), *tiles.shape)), np.ceil(k / STEP_K)
        cost, waves, full, below, sides, one_wave, two_waves = terms
        np.divide(tiles, self.capacity, out=full)
        cycles = self.cycles * steps
        if self.first_split < len(self.back):
            at = (slice(None), slice(self.first_split, None))
            capacity, some = self.capacity[at[1]], tiles[at]
            parts = np.maximum(np.floor(capacity / some), 2.0)
            np.divide(some * parts, capacity, out=full[at])
            fewer = np.ceil(k / parts / STEP_K)
            np.multiply(self.cycles[at[1]], fewer, out=cycles[at])
            found[at] += self._split(some, fewer / steps, parts, k)
        np.ceil(full, out=waves)
        cycles *= waves
        tiles *= self.loads * k
        np.maximum(cycles, tiles, out=cost)
        cost[:, self.first_split :] += SPLIT_CYCLES
        np.less_equal(waves, 1.0, out=one_wave)
        np.less_equal(waves, 2.0, out=two_waves)
        np.log(terms[:3], out=terms[:3])
        np.minimum(full, 0.0, out=below)  # by now its log
        np.subtract(ratio[:, np.newaxis], self.slant, out=sides)
        np.abs(sides, out=sides)
        found += (self.weight @ terms.reshape(len(terms), -1)).reshape(found.shape)
        found += shape @ self.taste
        found += self.constant
        return np.asarray(found.take(self.back, axis=1))

    def _along(self, b: Array, m: Array, n: Array) -> tuple[Array, Array]:
        """What both sides of each tile add to its score, and how many tiles there are."""
        size = np.array([n, m]).T.take(self.of, axis=1)
        both = np.empty((2, *size.shape))
        found, tiles = both
        np.ceil(np.divide(size, self.side, out=tiles), out=tiles)
        log, whole, enough = self.side_weight
        np.multiply(np.log(tiles), log, out=found)
        found += (tiles * self.side == size) * whole
        found += (np.maximum(size, 8.0) <= self.side) * enough
        (by_n, across), (by_m, down) = both.take(self.at_n, axis=2), both.take(self.at_m, axis=2)
        by_n += by_m
        across *= down
        across *= b[:, np.newaxis]
        return by_n, across

    def _split(self, tiles: Array, steps: Array, parts: Array, k: Array) -> Array:
        """What candidates that split K have beyond the terms of all."""
        terms = np.empty((len(self.split_weight), *tiles.shape))
        terms[0], terms[1], terms[2], terms[3] = steps, parts, tiles, k
        np.log(terms[:4], out=terms[:4])
        np.less_equal(tiles, self.few, out=terms[4])
        return np.asarray((self.split_weight @ terms.reshape(len(terms), -1)).reshape(tiles.shape))
