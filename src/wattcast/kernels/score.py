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
    """Weights folded together; candidates in an order in which those that split K come last."""

    back: _Index  # (candidate,) where each candidate lies in that order
    side: Array  # (side,) distinct sides of tiles: along outputs, then along tokens
    of: _Index  # (side,) 0: along outputs, 1: along tokens
    side_weight: Array  # (3, side) of the log of tiles along it, of a whole number of them, of one that holds it all
    at_n: _Index  # (candidate,) places among the sides
    at_m: _Index
    first_split: int
    capacity: Array  # (candidate,) tiles on the chip at a time
    cycles: Array  # of a step of K of all tiles on an SM
    loads: Array  # cycles to load what a tile needs of an element of K
    slant: Array  # log of how much longer a tile is along outputs
    weight: Array  # (7, 1, 1) of the terms that all candidates have
    split_weight: Array  # (5, 1, 1) of those that split K
    taste: Array  # (shape, candidate) of the shape
    constant: Array  # (candidate,)
    few: float  # tiles that leave half of the chip idle

    @classmethod
    def by(cls, kind: Any, sides: tuple[Array, Array], split: Any, weight: Array, own: Array, sms: float) -> Scorer:
        """From candidates, the weights of the terms, and those of the shape, ``(candidate, 1 + shape)``."""
        order = np.argsort(split, kind="stable")
        tile_n, tile_m = (side[order] for side in sides)
        held, step_cycles = scaffold(kind[order], tile_n, tile_m)
        (side_n, at_n), (side_m, at_m) = (np.unique(side, return_inverse=True) for side in (tile_n, tile_m))
        w, n = weight, len(side_n)
        capacity = sms * held
        constant = own[order, 0] + w[1] * np.log(tile_n) + w[2] * np.log(tile_m)
        constant += w[6] * np.log(held * step_cycles) + w[7] * np.log(capacity * (tile_n + tile_m))
        along = np.array([[w[1], w[9], 0.0]] * n + [[w[2], w[10], w[13]]] * len(side_m))
        shared = np.array([w[0], w[3] + w[6], w[5] + w[7] - w[3], -w[4] - w[5], w[8], w[11], w[12]])
        return cls(
            back=np.argsort(order),
            side=np.concatenate([side_n, side_m]),
            of=np.repeat([0, 1], [n, len(side_m)]),
            side_weight=along.T.copy(),
            at_n=at_n,
            at_m=at_m + n,
            first_split=int(np.count_nonzero(~split)),
            capacity=capacity,
            cycles=held * step_cycles,
            loads=(tile_n + tile_m) / LOADS,
            slant=np.log(tile_n / tile_m),
            weight=shared[:, np.newaxis, np.newaxis],
            split_weight=np.array([w[6], -w[7], w[14], w[15], w[16]])[:, np.newaxis, np.newaxis],
            taste=own[order, 1:].T.copy(),
            constant=constant,
            few=sms / 2.0,
        )

    def scores(self, b: Array, m: Array, n: Array, k: Array, shape: Array) -> Array:
        """Score of every candidate for every product, ``(row, candidate)``; sizes are ``(row,)``."""
        along, tiles = self._along(b, m, n)
        b, m, n, k = (size[:, np.newaxis] for size in (b, m, n, k))
        steps = np.ceil(k / STEP_K)
        full, compute = tiles / self.capacity, self.cycles * steps
        split, some = slice(self.first_split, None), tiles.shape[1] > self.first_split
        if some:
            parts = np.maximum(np.floor(self.capacity[split] / tiles[:, split]), 2.0)
            full[:, split] = tiles[:, split] * parts / self.capacity[split]
            shorter = np.ceil(k / parts / STEP_K)
            compute[:, split] = self.cycles[split] * shorter
        waves = np.ceil(full)
        cost = np.maximum(compute * waves, tiles * (self.loads * k))
        if some:
            cost[:, split] += SPLIT_CYCLES
        terms = np.empty((len(self.weight), *tiles.shape))
        np.log(cost, out=terms[0])
        np.log(waves, out=terms[1])
        np.log(full, out=terms[2])
        np.minimum(terms[2], 0.0, out=terms[3])
        np.subtract(np.log(np.minimum(n, LONGEST) / np.minimum(m, LONGEST)), self.slant, out=terms[4])
        np.abs(terms[4], out=terms[4])
        terms[5] = waves <= 1.0
        terms[6] = waves <= 2.0
        terms *= self.weight
        found = np.add.reduce(terms)
        found += along
        if some:
            found[:, split] += self._split(tiles[:, split], shorter / steps, parts, k)
        found += shape @ self.taste
        found += self.constant
        return np.asarray(found.take(self.back, axis=1))

    def _along(self, b: Array, m: Array, n: Array) -> tuple[Array, Array]:
        """What both sides of each tile add to its score, and how many tiles there are."""
        size = np.array([n, m]).T.take(self.of, axis=1)
        tiles = np.ceil(size / self.side)
        log, whole, within = self.side_weight
        found = np.log(tiles) * log
        found += (tiles * self.side == size) * whole
        found += (np.maximum(size, 8.0) <= self.side) * within
        both = found.take(self.at_n, axis=1)
        both += found.take(self.at_m, axis=1)
        across = b[:, np.newaxis] * tiles.take(self.at_n, axis=1)
        across *= tiles.take(self.at_m, axis=1)
        return both, across

    def _split(self, tiles: Array, steps: Array, parts: Array, k: Array) -> Array:
        """What candidates that split K have beyond the terms of all."""
        terms = np.empty((len(self.split_weight), *tiles.shape))
        np.log(steps, out=terms[0])
        np.log(parts, out=terms[1])
        terms[2] = np.log(k)
        np.log(tiles, out=terms[3])
        terms[4] = tiles <= self.few
        terms *= self.split_weight
        return np.asarray(np.add.reduce(terms))
