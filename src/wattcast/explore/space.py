"""A search space: axes with values, taken as a grid or sampled. Points are made by number, never all at once.

    clock=600MHz:1980MHz:15MHz        a range with a step, both ends included
    l2.capacity=25MB,50MB,100MB       a list
    sm_count=64:192:random:20         twenty values at random (a grid axis like any other)
    memory.bandwidth=2TB/s:8TB/s      a continuous range, for samples

A grid is every combination, the last axis fastest. ``random:N`` and ``sobol:N`` sample N points of
the whole space instead: uniformly in ranges, evenly among listed values. The same seed gives the same
points, however they are chunked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from wattcast import units
from wattcast.arrays import Array
from wattcast.errors import BadInput, MissingTool, bad_value, clip
from wattcast.explore.fields import Field, find
from wattcast.hardware import Gpu

MOST_VALUES = 10_000_000  # of one axis
_BLOCK = 4096  # points drawn together by one seed
_SOBOL_MOST = 1 << 30  # SciPy's 30-bit sequence


class Method(StrEnum):
    """How points are taken from the axes."""

    GRID = "grid"
    RANDOM = "random"
    SOBOL = "sobol"


@dataclass(frozen=True)
class Axis:
    """One field with its values, or the two ends of a continuous range."""

    field: Field
    values: Array
    continuous: bool = False

    def at(self, share: Array) -> Array:
        """The values at shares 0 <= u < 1 of the axis."""
        if not self.continuous:
            return self.values[np.minimum((share * self.values.size).astype(np.int64), self.values.size - 1)]
        drawn = self.values[0] + share * (self.values[1] - self.values[0])
        return np.asarray(np.round(drawn) if self.field.whole else drawn)


@dataclass(frozen=True)
class Space:
    """Axes and how their points are taken."""

    axes: tuple[Axis, ...]
    method: Method = Method.GRID
    samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.axes:
            raise bad_value("vary", "at least one field to vary", "none", "Add --vary clock=600MHz:1980MHz:15MHz.")
        columns = [axis.field.column for axis in self.axes]
        twice = [axis.field.name for axis in self.axes if columns.count(axis.field.column) > 1]
        if twice:
            raise bad_value("vary", "each field once", f"{twice[0]} twice")
        if self.size >= 1 << 62:
            raise bad_value("vary", "fewer than 4.6e18 points", f"{self.size:.1e}", "Take larger steps.")
        if {"asked_clock_hz", "clocks.max_hz"} <= set(columns):
            raise bad_value("vary", "clock or clocks.max, not both", "both")
        for axis in self.axes:
            if axis.continuous and self.method is Method.GRID:
                do = "Add a step, or sample the space: --sample sobol:4096."
                raise bad_value(f"vary {axis.field.name}", "a step in a grid", "a range without one", do)

    @property
    def size(self) -> int:
        """How many points there are."""
        return math.prod(axis.values.size for axis in self.axes) if self.method is Method.GRID else self.samples

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of each axis, in order."""
        return tuple(axis.field.column for axis in self.axes)

    def points(self, start: int, stop: int) -> dict[str, Array]:
        """Values of points ``start`` to ``stop``, by column."""
        if self.method is Method.GRID:
            return self._grid(np.arange(start, stop))
        share = self._random(start, stop) if self.method is Method.RANDOM else self._sobol(start, stop)
        return {axis.field.column: axis.at(share[:, i]) for i, axis in enumerate(self.axes)}

    def some(self, most: int) -> dict[str, Array]:
        """At most that many points, spread over the space."""
        if self.method is not Method.GRID or self.size <= most:
            return self.points(0, min(self.size, most))
        return self._grid(np.random.default_rng(self.seed).integers(0, self.size, most))

    def _grid(self, number: npt.NDArray[np.int64]) -> dict[str, Array]:
        index = np.unravel_index(number, tuple(axis.values.size for axis in self.axes))
        return {a.field.column: a.values[i] for a, i in zip(self.axes, index, strict=True)}

    def _random(self, start: int, stop: int) -> Array:
        """Uniform shares, drawn in numbered blocks so that any range of points can be had alone."""
        first, last = start // _BLOCK, -(-stop // _BLOCK)
        count = len(self.axes)
        drawn = [np.random.default_rng([self.seed, block]).random((_BLOCK, count)) for block in range(first, last)]
        return np.concatenate(drawn)[start - first * _BLOCK : stop - first * _BLOCK]

    def _sobol(self, start: int, stop: int) -> Array:
        """A scrambled Sobol sequence [Sobol1967; Owen1998]."""
        try:
            from scipy.stats import qmc
        except ImportError:
            raise MissingTool("Sobol samples need SciPy. Install it: pip install 'wattcast[explore]'.") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other counts than powers of two balance less well is documented
            engine = qmc.Sobol(len(self.axes), scramble=True, seed=self.seed)
            if start:
                engine.fast_forward(start)
            return np.asarray(engine.random(stop - start))


def parse(specs: Sequence[str], gpu: Gpu, sample: str | None = None, seed: int = 0) -> Space:
    """``["clock=600MHz:1980MHz:15MHz", ...]`` -> Space; ``sample`` is ``random:N`` or ``sobol:N``."""
    if seed < 0:
        raise bad_value("seed", "zero or more", seed)
    method, samples = _sample(sample)
    return Space(tuple(_axis(spec, gpu, seed) for spec in specs), method, samples, seed)


def _sample(text: str | None) -> tuple[Method, int]:
    if text is None:
        return Method.GRID, 0
    word, _, count = text.partition(":")
    if word not in (Method.RANDOM, Method.SOBOL) or not count.isascii() or not count.isdigit() or int(count) < 1:
        raise bad_value("sample", "random:N or sobol:N, such as sobol:4096", text)
    if word == Method.SOBOL and int(count) > _SOBOL_MOST:
        raise bad_value("sample", f"at most {_SOBOL_MOST} Sobol points", text)
    return Method(word), int(count)


def _axis(spec: str, gpu: Gpu, seed: int) -> Axis:
    name, equals, text = spec.partition("=")
    if not equals or not name.strip() or not text.strip():
        raise bad_value("vary", "name=values, such as clock=600MHz:1980MHz:15MHz", spec)
    field = find(name.strip(), gpu)
    values, continuous = _values(text.strip(), field.unit, f"vary {field.name}", seed)
    if field.whole and not continuous:
        values = np.round(values) if ":random:" in text else values
        if (values != np.round(values)).any():
            raise bad_value(f"vary {field.name}", "whole numbers", text)
    if not (values > 0).all() and field.name != "temperature":
        raise bad_value(f"vary {field.name}", "numbers above zero", text)
    _check(field, values, gpu)
    return Axis(field, values, continuous)


def _values(text: str, unit: str, where: str, seed: int) -> tuple[Array, bool]:
    """Values of a list or a range, or its two ends and True."""
    if ":" not in text:
        listed = np.array([units.parse(piece.strip(), unit, where) for piece in text.split(",")])
        if np.unique(listed).size != listed.size:
            raise bad_value(where, "each value once", text)
        return listed, False
    pieces = [piece.strip() for piece in text.split(":")]
    low, high = units.parse(pieces[0], unit, where), units.parse(pieces[1], unit, where)
    if not low <= high:
        raise bad_value(where, "a range whose first end is the lower one", text, "As it stands it has no values.")
    if len(pieces) == 2:
        return np.array([low, high]), True
    if len(pieces) == 4 and pieces[2] == "random" and pieces[3].isascii() and pieces[3].isdigit():
        count = _few_enough(int(pieces[3]), where)
        rng = np.random.default_rng([seed, *where.encode()])
        return np.sort(rng.uniform(low, high, count)), False
    if len(pieces) != 3:
        raise bad_value(where, "low:high:step, low:high:random:N, low:high or a list", text)
    step = units.parse(pieces[2], unit, where)
    if step <= 0:
        raise bad_value(where, "a step above zero", text)
    count = _few_enough(int(min((high - low) / step * (1 + 1e-12) + 1e-9, 2.0 * MOST_VALUES)) + 1, where)
    return low + step * np.arange(count, dtype=np.float64), False


def _few_enough(count: int, where: str) -> int:
    if not 1 <= count <= MOST_VALUES:
        raise BadInput(f"{where}: expected from 1 to {MOST_VALUES:,} values, got {clip(count)}. Take a larger step.")
    return count


def _check(field: Field, values: Array, gpu: Gpu) -> None:
    """Settings stay within what the card can be set to; a design may be anything."""
    low: float
    high: float
    if field.name == "clock":
        low, high = float(gpu.clocks.min_hz or 1.0), float(gpu.clocks.max_hz)
        do = f"Vary clocks.max for another chip than the {gpu.name}."
    elif field.name == "temperature":
        low, high, do = 0.0, 110.0, ""
    else:
        return
    if values.min() < low * (1 - 1e-9) or values.max() > high * (1 + 1e-9):
        span = f"{units.show(low, field.unit)} to {units.show(high, field.unit)}"
        worst = values.max() if values.max() > high else values.min()
        raise bad_value(f"vary {field.name}", f"values from {span}", units.show(float(worst), field.unit), do)
