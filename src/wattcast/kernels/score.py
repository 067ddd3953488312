"""Scores of all candidates of a class at once, for the choice of a kernel.

The same as the terms of :mod:`wattcast.kernels.candidates` times their weights, up to a constant of each row, which
changes neither which is highest nor any share. Terms are logarithms of products of the same few sizes: their
weights are added up beforehand, and sides of tiles that many candidates share are divided once. A kernel that does
not split K is one that makes a single part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.candidates import LOADS, LONGEST, SPLIT_CYCLES, STEP_K, scaffold

_Index = npt.NDArray[np.intp]
_LEAST_TOKENS = 8.0  # fewer count as so many: a narrower tile never holds them all


@dataclass(frozen=True)
class Scorer:
    """Weights folded together, ``(candidate,)`` where nothing else is said."""

    side: Array  # (side,) distinct sides of tiles: along outputs, then along tokens
    of: _Index  # (side,) 0: along outputs, 1: along tokens
    side_weight: Array  # (3, 1, side) of the log of tiles along it, of a whole number of them, of a single one
    at_n: _Index  # places among the sides
    at_m: _Index
    capacity: Array  # tiles on the chip at a time
    spare: Array  # the same of candidates that split K, which fill it; else none
    fewest: Array  # parts of K
    few: Array  # tiles that leave half of the chip idle, of candidates that split K; else none
    cycles: Array  # of a step of K of all tiles on an SM
    loads: Array  # cycles to load what a tile needs of an element of K
    more: Array  # cycles of a split
    slant: Array  # log of how much longer a tile is along outputs
    weight: Array  # (term,)
    full_weight: Array  # of how full the chip is
    k_weight: Array  # of the log of K
    taste: Array  # (shape, candidate)
    constant: Array

    @classmethod
    def by(cls, kind: Any, sides: tuple[Array, Array], split: Any, weight: Array, own: Array, sms: float) -> Scorer:
        """From candidates, the weights of the terms, and those of the shape, ``(candidate, 1 + shape)``."""
        tile_n, tile_m = sides
        held, step_cycles = scaffold(kind, tile_n, tile_m)
        (side_n, at_n), (side_m, at_m) = (np.unique(side, return_inverse=True) for side in sides)
        w, n, capacity, cycles = weight, len(side_n), sms * held, held * step_cycles
        constant = own[:, 0] + w[1] * np.log(tile_n) + w[2] * np.log(tile_m) + w[6] * np.log(cycles)
        constant += w[7] * np.log(tile_n + tile_m) + (w[7] + w[15] * split) * np.log(capacity)
        along = np.array([[w[1], w[9], 0.0]] * n + [[w[2], w[10], w[13]]] * len(side_m))
        along[n:][side_m < _LEAST_TOKENS, 2] = 0.0
        return cls(
            side=np.concatenate([side_n, side_m]),
            of=np.repeat([0, 1], [n, len(side_m)]),
            side_weight=along.T[:, np.newaxis].copy(),
            at_n=at_n,
            at_m=at_m + n,
            capacity=capacity,
            spare=np.where(split, capacity, 0.0),
            fewest=np.where(split, 2.0, 1.0),
            few=np.where(split, sms / 2.0, 0.0),
            cycles=cycles,
            loads=(tile_n + tile_m) / LOADS,
            more=np.where(split, SPLIT_CYCLES, 0.0),
            slant=np.log(tile_n / tile_m),
            weight=np.array([w[0], w[3] + w[6], 1.0, -w[7] - w[15], w[6], -w[4] - w[5], w[8], w[11], w[12], w[16]]),
            full_weight=w[5] + w[7] - w[3] + w[15] * split,
            k_weight=w[14] * split,
            taste=own[:, 1:].T.copy(),
            constant=constant,
        )

    def scores(self, b: Array, m: Array, n: Array, k: Array, shape: Array) -> Array:
        """Score of every candidate for every product, ``(row, candidate)``; sizes are ``(row,)``."""
        found, tiles = self._along(b, m, n)
        terms = np.empty((len(self.weight), *tiles.shape))
        cost, waves, full, parts, steps, below, sides, one_wave, two_waves, few = terms
        np.maximum(np.floor(self.spare / tiles), self.fewest, out=parts)
        np.divide(tiles * parts, self.capacity, out=full)
        np.ceil(full, out=waves)
        np.ceil(np.divide((k / STEP_K)[:, np.newaxis], parts, out=steps), out=steps)
        np.maximum(self.cycles * steps * waves, self.loads * k[:, np.newaxis] * tiles, out=cost)
        cost += self.more
        np.less_equal(waves, 1.0, out=one_wave)
        np.less_equal(waves, 2.0, out=two_waves)
        np.less_equal(tiles, self.few, out=few)
        np.log(terms[:5], out=terms[:5])
        np.minimum(full, 0.0, out=below)  # of the log, as it is by now
        full *= self.full_weight
        ratio = np.log(np.minimum(n, LONGEST) / np.minimum(m, LONGEST))
        np.abs(np.subtract(ratio[:, np.newaxis], self.slant, out=sides), out=sides)
        found += (self.weight @ terms.reshape(len(terms), -1)).reshape(found.shape)
        found += shape @ self.taste
        found += np.log(k)[:, np.newaxis] * self.k_weight
        found += self.constant
        return found

    def _along(self, b: Array, m: Array, n: Array) -> tuple[Array, Array]:
        """What both sides of each tile add to its score, and how many tiles there are."""
        ratio = np.array([n, m]).T.take(self.of, axis=1) / self.side
        tiles = np.ceil(ratio)
        terms = np.empty((3, *tiles.shape))
        np.log(tiles, out=terms[0])
        np.equal(tiles, ratio, out=terms[1])
        np.less_equal(tiles, 1.0, out=terms[2])
        terms *= self.side_weight
        both = np.array([np.add.reduce(terms), tiles])
        (found, across), (more, down) = both.take(self.at_n, axis=2), both.take(self.at_m, axis=2)
        found += more
        across *= down
        across *= b[:, np.newaxis]
        return found, across
