"""Operands of kernels whose first versions repeated or settled them, computed on the host as the
kernels do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from wattcast.lab.microbench.benchmark_suite import find_benchmarks
from wattcast.lab.microbench.tensor_units import PATH_STEPS, divergence_unit
from wattcast.lab.microbench.unit_source import BenchUnit

Floats = npt.NDArray[np.floating]
THREADS = 32
SUM = re.compile(r'(add|sub)\.rn\.f\d\d %0, (?:%0|u), %1;.*\(\w+?_?\w*?(\d)\) : "[fd]"\(\w+?(\d)\)')
PATH = re.compile(r'%1, 0f([0-9A-F]{8});" : "\+f"\(\w+?_\d+?(\d)\) : "f"\((-?)\w+_([gr])\)')


def unit_of(name: str) -> BenchUnit:
    (benchmark,) = find_benchmarks([name])
    return benchmark.unit


def bfloat(x: Floats) -> Floats:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def same(x: Floats) -> Floats:
    return x


def half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("turns", [300, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "convert", "begin"),
    [
        ("fp32_add", same, 1.0),
        ("fp64_add", same, 1.0),
        ("convert_fp64", same, 1e3),
        ("convert_fp16", half, 1e3),
        ("convert_bf16", bfloat, 1e3),
    ],
)
def test_sums_of_neighbours_stay_bounded_and_apart(
    name: str, convert: Callable[[Floats], Floats], begin: float, turns: int
) -> None:
    """The first versions added and took away one number, and converted one value again and again."""
    unit = unit_of(name)
    steps = [SUM.search(unit.step(i)) for i in range(16)]
    assert all(steps)
    assert unit.step(16).replace("\n", "") == unit.step(0)
    dtype = np.float64 if name == "fp64_add" else np.float32
    x = (begin * (1.0 + np.random.default_rng(1).random((8, THREADS)))).astype(dtype)
    written, seen = [], set()
    for turn in range(turns):
        for found in steps:
            assert found is not None
            to, other = int(found[2]), int(found[3])
            assert to != other
            sign = dtype(-1 if found[1] == "sub" else 1)
            x[to] = convert(x[to]) + sign * x[other]
            if turn == turns - 1:
                written.append(x[to].copy())
                seen.add(to)
    assert seen == set(range(8))  # every chain is written
    assert np.isfinite(x).all()
    assert 0.5 * begin < np.abs(x).min() < np.abs(x).max() < 6.0 * begin
    assert all(not np.array_equal(a, b) for a, b in pairwise(written))
    assert len(np.unique(np.abs(x))) > 0.9 * x.size


@pytest.mark.parametrize("ways", [1, 32])
def test_diverged_paths_neither_overflow_nor_settle(ways: int) -> None:
    """The first version multiplied by a and by -a, both above one: every value became infinite."""
    found = PATH.findall(divergence_unit(f"divergence_{ways}", ways).before)
    assert len(found) == PATH_STEPS * ways
    random = np.random.default_rng(2)
    g = (1.0 + 0.0625 * random.random(THREADS)).astype(np.float32)
    known = {"g": g, "r": (np.float32(0.999999) / g).astype(np.float32)}
    x = (1.0 + random.random((4, THREADS))).astype(np.float32)
    steps = []
    for bits, chain, sign, name in found[:PATH_STEPS]:
        addend = np.frombuffer(bytes.fromhex(bits), dtype=">f4")[0].astype(np.float32)
        steps.append((int(chain), np.float32(-1 if sign else 1) * known[name], addend))
    before = x.copy()
    for _ in range(4000):
        before = x.copy()
        for chain, factor, addend in steps:
            x[chain] = x[chain] * factor + addend
    assert np.isfinite(x).all()
    assert np.abs(x).max() < 100.0
    assert np.abs(x - before).min() > 1e-3 * np.abs(x).max()  # still going to and fro
    assert len(np.unique(x)) == x.size


def test_products_of_odd_numbers_never_become_zero() -> None:
    text = unit_of("int64_mul").declare
    assert text.count("| 1u;") == 8
    x = [((0x9E3779B97F4A7C15 * (i + 1)) % 2**64) | 1 for i in range(8)]
    for i in range(20000):
        x[i % 8] = x[i % 8] * x[(i + 1) % 8] % 2**64
    assert len({value >> 32 for value in x}) == 8
    assert "| 1u;" not in unit_of("int64_add").declare


def test_sines_never_settle() -> None:
    assert "0f40F00000" in unit_of("fp32_sin").step(0)  # 7.5
    random = np.random.default_rng(3)
    x, b = 1.0 + random.random((8, THREADS)), 1.0 + random.random(THREADS)
    seen = []
    for i in range(4000):
        x = (7.5 * np.sin(x) + b).astype(np.float32)
        if i >= 3936:
            seen.append(x.copy())
    kinds = [len(np.unique(np.stack(seen)[:, c, t])) for c in range(8) for t in range(THREADS)]
    assert np.median(kinds) == 64


def test_integers_of_a_conversion_fill_their_bits() -> None:
    text = unit_of("convert_int32").step(3)
    assert "cvt.rzi.s32.f32 t, %0; mad.lo.s32 t, t, %1, %2; cvt.rn.f32.s32 %0, t;" in text
    random = np.random.default_rng(4)
    k = (random.integers(0, 2**32, THREADS) & ~7) | 5
    c = random.integers(0, 2**32, THREADS) | 1
    x = (1e3 * (1.0 + random.random(THREADS))).astype(np.float32)
    seen = []
    for _ in range(500):
        t = np.clip(np.trunc(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1).astype(np.int64)
        t = (t * k + c + 2**31) % 2**32 - 2**31
        x = t.astype(np.float32)
        seen.append(x)
    last = np.stack(seen[-64:])
    assert np.mean([len(np.unique(last[:, t])) for t in range(THREADS)]) > 60
    assert 0.3 < np.abs(last).mean() / 2**31 < 0.7
