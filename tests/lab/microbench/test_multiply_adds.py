"""Chains of multiply-adds, computed on the host from the kernels' own text: they stay bounded,
apart and random.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest

from wattcast.lab.microbench.arithmetic_units import CHAINS, multiply_adds

Floats = npt.NDArray[np.floating]
OPERANDS = re.compile(r'"[fd]"\((-?)\w+_([gi])\)(?:, "f"\(\w+_([bd])\))?')
STATED = re.compile(r"0[fd]([0-9A-F]+);")


def rounds(kind: str, chains: int, steps: int) -> list[tuple[str, float, str, float]]:
    """Of each round: the multiplier's name and sign, and the addend's name or value."""
    unit = multiply_adds("x", kind, chains)
    found = []
    for i in range(0, steps, chains):
        alike = {unit.step(j).replace(f"(x{j % chains})", "(x)") for j in range(i, i + chains)}
        (text,) = alike  # all chains of a round do the same
        sign, name, addend = OPERANDS.search(text).groups()
        bits = STATED.search(text)
        value = 0.0
        if bits is not None:
            value = float(
                np.frombuffer(bytes.fromhex(bits[1]), dtype=">f8" if kind == "f64" else ">f4")[0]
            )
        found.append((name, -1.0 if sign else 1.0, addend or "", value))
    return found


def run(
    kind: str, chains: int, steps: int, iterations: int, threads: int = 64
) -> tuple[Floats, float]:
    """Values of all threads and chains at the end, and the largest on the way."""
    random = np.random.default_rng(1)
    dtype = np.float64 if kind == "f64" else np.float32

    def unit_floats(*shape: int) -> Floats:
        return (np.float32(1) + random.random(shape, dtype=np.float32)).astype(dtype)

    x, a, b = unit_floats(threads, chains), unit_floats(threads, 1), unit_floats(threads, 1)
    g = dtype(1) + (a - dtype(1)) * dtype(0.0625)
    known = {"g": g, "i": dtype(0.99999) / g, "b": b, "d": -b}
    body = [
        (dtype(s) * known[n], known[c] if c else dtype(v))
        for n, s, c, v in rounds(kind, chains, steps)
    ]
    largest = 0.0
    for _ in range(iterations):
        for multiplier, addend in body:
            x = x * multiplier + addend
        largest = max(largest, float(np.abs(x).max()))
    return x, largest


@pytest.mark.parametrize(
    ("kind", "chains", "steps"), [("f32", CHAINS, 512), ("f64", CHAINS, 256), ("f32", 1, 512)]
)
def test_values_stay_bounded_and_as_random_as_they_began(
    kind: str, chains: int, steps: int
) -> None:
    """A launch has under 2,000 iterations of a body; neighbouring chains of it differ in half of
    their upper bits.
    """
    x, largest = run(kind, chains, steps, 2000 if chains > 1 else 300)
    assert np.isfinite(x).all()
    assert largest < 1e5
    assert len(np.unique(x)) == x.size
    bits = x.astype(np.float32).view(np.uint32) >> 8 & 0x7FFF  # of the mantissa, the upper ones
    other = np.roll(bits, 1, axis=1 if chains > 1 else 0)
    toggled = ((bits ^ other)[..., None] >> np.arange(15, dtype=np.uint32) & 1).mean()
    assert toggled == pytest.approx(0.5, abs=0.1)


def test_the_multiplier_is_held_and_the_last_round_turns_the_sign() -> None:
    found = rounds("f32", CHAINS, 256)
    names = [name for name, _, _, _ in found]
    assert names == ["g"] * 16 + ["i"] * 16
    assert [sign for _, sign, _, _ in found] == [1.0] * 31 + [-1.0]
    assert {(name, addend) for name, _, addend, _ in found} == {("g", "b"), ("i", "d")}
    stated = sorted({value for _, _, _, value in rounds("f64", CHAINS, 256)})
    assert stated == pytest.approx([-(2**0.5), 2**0.5], rel=1e-6)
