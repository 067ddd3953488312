"""Equal latency, different power (paper 003, figure 2), as pairs of measured rows of the database.

Load imbalance: two products whose busiest SM has one tile in both, but with work on few SMs in one and on nearly
all in the other. L2 reuse: two kernels of one family with the same arithmetic, one of which finds its operands
in L2; the memory's own power tells them apart. All at the top clock, none capped, on random data. Pairs are
found by rule, not by hand; predictions are the held-out ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.fit import kernels_data
from wattcast.fit.kernels import random, settled
from wattcast.fit.kernels_data import Rows
from wattcast.fit.kernels_split import HeldOut
from wattcast.fitted import bundle_for
from wattcast.hardware import Gpu
from wattcast.kernels import kernels_of
from wattcast.kernels.names import KernelName, parse_kernel_name

NEAR = 0.05  # of latency, between the members of a pair
ARITHMETIC = 0.20  # of FLOPs, in the L2 pairs
MOST = 3


@dataclass(frozen=True)
class Member:
    """One row of a pair."""

    work: str
    latency_s: float
    power_w: float
    predicted_w: float
    memory_w: float
    tiles: float  # NaN: the kernel's name does not say
    flop: float


@dataclass(frozen=True)
class Cases:
    """Pairs, the one that draws less first; the largest difference first."""

    imbalance: tuple[tuple[Member, Member], ...]
    reuse: tuple[tuple[Member, Member], ...]


def cases(gpu: str, held: HeldOut) -> Cases:
    """The pairs in a GPU's database."""
    chip, rows = hardware.load(gpu), kernels_data.load(gpu)
    rows = rows.where(rows.is_kind("burst", "sustained") & rows.fit & (rows.repeat == 0))
    if len(rows) != len(held.work) or tuple(str(op) for op in rows.ops) != held.work:
        raise BadInput(f"the held-out predictions of {gpu} are not of the rows in its database. Fit again.")
    power_w, clock_hz, latency_s = settled(rows)
    top = clock_hz > 0.998 * float(np.mean(chip.clocks.max_hz))
    at = np.flatnonzero(rows.is_kind("sustained") & random(rows) & top & np.isfinite(power_w))
    tiles, names = _tiles(rows), [parse_kernel_name(n[0]) if n else None for n in rows.names]
    memory_w = rows.of("memory_power_w")
    found = [
        Member(
            str(rows.ops[i]),
            float(latency_s[i]),
            float(power_w[i]),
            float(held.predicted_power_w[i]),
            float(memory_w[i]),
            float(tiles[i]),
            rows.ops[i].flop,
        )
        for i in at
    ]
    families, sms = [rows.family[i] for i in at], float(np.mean(chip.sm_count))
    fast = [(name := names[i]) is not None and _plain(name, rows.ops[i].dtype.byte) for i in at]
    l2 = _l2_byte(rows, chip)[at]

    def unbalanced(a: int, b: int) -> bool:
        one_wave = max(found[a].tiles, found[b].tiles) <= sms
        return fast[a] and fast[b] and one_wave and found[b].tiles > 2.0 * found[a].tiles

    def reused(a: int, b: int) -> bool:
        same = families[a] == families[b] and families[a] in ("gemm", "attention", "conv2d")
        equal = same and found[a].flop > 0 and abs(found[b].flop / found[a].flop - 1.0) < ARITHMETIC
        return equal and 0.5 < l2[b] / l2[a] < 2.0 and found[b].memory_w > found[a].memory_w + 20.0

    return Cases(_pairs(found, unbalanced), _pairs(found, reused))


def _pairs(found: list[Member], wanted: Callable[[int, int], bool]) -> tuple[tuple[Member, Member], ...]:
    """Pairs of near-equal latency that fit the rule, the largest difference first, no row twice."""
    pairs = []
    for i, j in combinations(range(len(found)), 2):
        a, b = (i, j) if found[i].power_w < found[j].power_w else (j, i)
        if abs(found[b].latency_s / found[a].latency_s - 1.0) < NEAR and wanted(a, b):
            pairs.append((found[b].power_w - found[a].power_w, a, b))
    kept: list[tuple[Member, Member]] = []
    taken: set[int] = set()
    for _, a, b in sorted(pairs, reverse=True):
        if not {a, b} & taken:
            kept.append((found[a], found[b]))
            taken |= {a, b}
    return tuple(kept[:MOST])


def _plain(name: KernelName, width: int) -> bool:
    """Hopper's library in a 16-bit format, K in one piece: a block's time then follows its tile."""
    return name.library == "cublas" and name.tiled and not name.split_k and width == 2


def _tiles(rows: Rows) -> Array:
    """Tiles of each product by its kernel's name, which gives the side along outputs first; NaN elsewhere."""
    found = np.full(len(rows), np.nan)
    for i, (op, names) in enumerate(zip(rows.ops, rows.names, strict=True)):
        name = parse_kernel_name(names[0]) if names and op.kind in ("linear", "bmm") else None
        if name is not None and name.tile_m and name.tile_n:
            batch, m, n = (int(getattr(op, side, 1)) for side in ("b", "m", "n"))
            found[i] = batch * -(-n // name.tile_m) * -(-m // name.tile_n)
    return found


def _l2_byte(rows: Rows, gpu: Gpu) -> Array:
    return kernels_of(rows.ops, rows.conditions, gpu, bundle_for(gpu).reference, ()).work.l2_byte
