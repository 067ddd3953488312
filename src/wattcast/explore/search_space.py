"""Define what an exploration varies: fields of a GPU and settings of a card, constraints on them,
and points.

Names are those of the catalogue's YAML. A field's column name ends in its unit; for a field of the
chip it is the dotted path of ``Gpu``, so that ``Gpu.with_fields`` takes the column back. On the
command line an axis is written ``clock=600MHz:1980MHz:15MHz``, ``clock=1GHz,1.5GHz``,
``clock=1GHz:2GHz:random:9`` or, in samples, ``clock=1GHz:2GHz``; a constraint is written
``power_w<=400`` or ``latency<=50ms``."""

from __future__ import annotations

import math
import operator
import re
import warnings
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    clip_text,
    errors,
    units,
    unknown_name,
)
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import import_extra
from wattcast.core.strict_files import read_shipped_table
from wattcast.explore.design_physics import memory_kinds
from wattcast.hardware import Gpu
from wattcast.predictor.run_settings import HIGHEST_C
from wattcast.workload.model_options import OPTION_NAMES


class FieldKind(StrEnum):
    """Say what a field belongs to."""

    CHIP = "chip"  # a number of the Gpu, at its dotted path
    SETTING = "setting"  # of the OperatingPoint
    SCALE = "scale"  # a factor on several numbers of the chip or its bundle
    CHOICE = "choice"  # one of several words; its column holds their numbers


@dataclass(frozen=True)
class VariedField:
    """Name one thing that can be varied, its unit and the column that holds its values."""

    name: str
    unit: str
    kind: FieldKind
    column: str
    whole: bool = False  # only whole numbers make sense
    short: str = ""  # another name that people use
    choices: tuple[str, ...] = ()  # words that the numbers of its column stand for


def list_fields(gpu: Gpu) -> dict[str, VariedField]:
    """Return every field that can be varied on this GPU, by name."""
    fields = {}
    for row in read_shipped_table("wattcast.explore", "varied_fields.csv"):
        fields[row["name"]] = msgspec.convert(row, VariedField, strict=False)
    fields["memory.kind"] = replace(fields["memory.kind"], choices=memory_kinds())
    pipes = {"tensor": gpu.pipes.tensor_flop_per_cycle, "cuda": gpu.pipes.cuda_flop_per_cycle}
    for head, rates in pipes.items():
        for dtype in rates:
            is_lane = head == "cuda" and dtype not in (Dtype.FP32, Dtype.FP64)
            if is_lane and dtype in gpu.pipes.tensor_flop_per_cycle:
                continue  # products run on tensor cores, all else in fp32: no kernel uses it
            name = f"pipes.{head}_per_cycle_sm.{dtype}"
            unit = "op" if dtype.startswith("int") else "flop"
            column = f"pipes.{head}_flop_per_cycle.{dtype}"
            fields[name] = VariedField(name, f"{unit}/cycle", FieldKind.CHIP, column)
    return fields


def find_field(name: str, gpu: Gpu) -> VariedField:
    """Find a field by its name in the catalogue, its column, or a short name."""
    fields = list_fields(gpu)
    field_of_word = {}
    shorts = []
    for field in fields.values():
        for word in (field.name, field.column, field.short):
            if word:
                field_of_word[errors.fold_name(word)] = field
        if field.short:
            shorts.append(field.short)
    match = field_of_word.get(errors.fold_name(name))
    if match is None and errors.fold_name(name) in OPTION_NAMES:
        do = "`explore sweep` varies the workload."
        raise bad_value("vary", "a field of the GPU or a setting", name, do)
    if match is None:
        raise unknown_name("field", name, [*fields, *shorts], f"Known: {', '.join(fields)}.")
    if match.name == "tensor" and not gpu.pipes.tensor_flop_per_cycle:
        # what is not published may vary, what is absent may not
        raise bad_value("vary tensor", "a GPU with tensor cores", gpu.name)
    return match


RESULT_UNITS = {  # column -> unit
    "latency_s": "s",
    "power_w": "W",
    "energy_j": "J",
    "total_power_w": "W",
    "total_energy_j": "J",
    "clock_hz": "Hz",
    "effective_clock_hz": "Hz",
    "busy_s": "s",
}
_SHORT = {
    "latency": "latency_s",
    "power": "power_w",
    "energy": "energy_j",
    "total_power": "total_power_w",
    "total_energy": "total_energy_j",
    "busy": "busy_s",
}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_FORM = re.compile(r"\s*([\w.\- ]+?)\s*(<=|>=|==|<|>)\s*(\S.*?)\s*")


@dataclass(frozen=True)
class Constraint:
    """Bound a column: ``column sign bound``, the bound in the column's own unit."""

    column: str
    sign: str
    bound: float
    unit: str

    def holds(self, columns: Mapping[str, npt.NDArray[Any]]) -> Mask:
        """Tell which points meet the constraint."""
        return np.asarray(_OPERATORS[self.sign](columns[self.column], self.bound))

    def closest_value(self, values: npt.NDArray[Any]) -> float:
        """Return the value that comes closest to meeting the constraint."""
        if self.sign == "==":
            return float(values[np.argmin(np.abs(values - self.bound))])
        return float(values.min() if self.sign.startswith("<") else values.max())

    def __str__(self) -> str:
        bound = units.show(self.bound, self.unit) if self.unit else f"{self.bound:g}"
        return f"{self.column}{self.sign}{bound}"


def parse_constraints(
    texts: Sequence[str],
    gpu: Gpu,
    axes: Iterable[str],
) -> tuple[Constraint, ...]:
    """Parse constraints as people type them; ``axes`` are the columns that vary.

    A bare number is taken where the name typed carries the unit: ``power_w<=400``.
    """
    varied = tuple(axes)
    constraints = []
    for text in texts:
        match = _FORM.fullmatch(text) if len(text) <= 200 else None
        if match is None:
            expected = "name, <= < >= > or ==, and a value, such as power_w<=400"
            raise bad_value("where", expected, text)
        name, sign, bound = match.groups()
        column, unit = find_column(name, gpu, varied)
        names_unit = errors.fold_name(name) == errors.fold_name(column)
        is_bare = names_unit and _NUMBER.fullmatch(bound) is not None
        value = units.parse(bound, "" if is_bare else unit, f"where {name}")
        constraints.append(Constraint(column, sign, value, unit))
    return tuple(constraints)


def find_column(
    name: str,
    gpu: Gpu,
    axes: tuple[str, ...],
) -> tuple[str, str]:
    """Find column and unit of the result or the axis that a person means."""
    columns = {errors.fold_name(column): column for column in RESULT_UNITS}
    columns |= {errors.fold_name(short): column for short, column in _SHORT.items()}
    column = columns.get(errors.fold_name(name))
    if column is not None:
        return column, RESULT_UNITS[column]
    candidates = [*RESULT_UNITS, *axes]
    listing = ", ".join(candidates)
    try:
        field = find_field(name, gpu)
    except BadInput:
        raise unknown_name("column", name, candidates, f"Known here: {listing}.") from None
    if field.column not in axes:
        raise bad_value("column", f"a result or a field that varies ({listing})", name)
    return field.column, field.unit


MOST_VALUES = 10_000_000  # of one axis
_BLOCK = 4096  # points drawn together by one seed
_SOBOL_MOST = 1 << 30  # SciPy's 30-bit sequence


class SamplingMethod(StrEnum):
    """Say how points are taken from the axes."""

    GRID = "grid"
    RANDOM = "random"
    SOBOL = "sobol"


@dataclass(frozen=True)
class SpaceAxis:
    """Hold one field with its values, or the two ends of a continuous range."""

    field: VariedField
    values: Array
    continuous: bool = False

    def pick_values(self, share: Array) -> Array:
        """Return the values at shares from 0 to 1 of the range, or of the list."""
        if not self.continuous:
            places = (share * self.values.size).astype(np.int64)
            return np.asarray(self.values[np.minimum(places, self.values.size - 1)])
        low, high = self.values
        values = low + share * (high - low)
        return np.asarray(np.round(values) if self.field.whole else values)


@dataclass(frozen=True)
class SearchSpace:
    """Hold the axes and how their points are taken."""

    axes: tuple[SpaceAxis, ...]
    method: SamplingMethod = SamplingMethod.GRID
    samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.axes:
            do = "Add --vary clock=600MHz:1980MHz:15MHz."
            raise bad_value("vary", "at least one field to vary", "none", do)
        columns = [axis.field.column for axis in self.axes]
        twice = [axis.field.name for axis in self.axes if columns.count(axis.field.column) > 1]
        if twice:
            raise bad_value("vary", "each field once", f"{twice[0]} twice")
        if self.size >= 1 << 62:
            count = f"{self.size:.1e}"
            raise bad_value("vary", "fewer than 4.6e18 points", count, "Take larger steps.")
        if {"asked_clock_hz", "clocks.max_hz"} <= set(columns):
            raise bad_value("vary", "clock or clocks.max, not both", "both")
        for axis in self.axes:
            if axis.continuous and self.method is SamplingMethod.GRID:
                do = "Add a step, or sample the space: --sample sobol:4096."
                name = f"vary {axis.field.name}"
                raise bad_value(name, "a step in a grid", "a range without one", do)

    @property
    def size(self) -> int:
        """Count the points."""
        if self.method is not SamplingMethod.GRID:
            return self.samples
        return math.prod(axis.values.size for axis in self.axes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the column of each axis, in order."""
        return tuple(axis.field.column for axis in self.axes)

    def points(
        self,
        start: int,
        stop: int,
    ) -> dict[str, Array]:
        """Return the values of points ``start`` to ``stop``, by column."""
        if self.method is SamplingMethod.GRID:
            return self._pick_grid(np.arange(start, stop))
        if self.method is SamplingMethod.RANDOM:
            shares = self._draw_random(start, stop)
        else:
            shares = self._draw_sobol(start, stop)
        columns = {}
        for axis, share in zip(self.axes, shares.T, strict=True):
            columns[axis.field.column] = axis.pick_values(share)
        return columns

    def _draw_random(
        self,
        start: int,
        stop: int,
    ) -> Array:
        """Draw shares of the axes, ``(point, axis)``.

        They are drawn in numbered blocks, so that any range of points can be drawn by itself.
        """
        first = start // _BLOCK
        shape = (_BLOCK, len(self.axes))
        numbers = range(first, -(-stop // _BLOCK))
        blocks = [np.random.default_rng([self.seed, number]).random(shape) for number in numbers]
        shares = np.concatenate(blocks)
        return shares[start - first * _BLOCK : stop - first * _BLOCK]

    def _draw_sobol(
        self,
        start: int,
        stop: int,
    ) -> Array:
        """Take shares of the axes from a scrambled Sobol sequence [Sobol1967; Owen1998]."""
        qmc = import_extra("scipy.stats.qmc", "Sobol samples need SciPy", "explore")
        with warnings.catch_warnings():
            # that other counts than powers of two balance less is documented
            warnings.simplefilter("ignore")
            engine = qmc.Sobol(len(self.axes), scramble=True, seed=self.seed)
            if start:
                engine.fast_forward(start)
            return np.asarray(engine.random(stop - start))

    def spread_points(self, most: int) -> dict[str, Array]:
        """Return at most that many points, spread over the space."""
        if self.method is not SamplingMethod.GRID or self.size <= most:
            return self.points(0, min(self.size, most))
        return self._pick_grid(np.random.default_rng(self.seed).integers(0, self.size, most))

    def _pick_grid(self, number: npt.NDArray[np.int64]) -> dict[str, Array]:
        places = np.unravel_index(number, tuple(axis.values.size for axis in self.axes))
        columns = {}
        for axis, place in zip(self.axes, places, strict=True):
            columns[axis.field.column] = axis.values[place]
        return columns


def parse_space(
    specs: Sequence[str],
    gpu: Gpu,
    sample: str | None = None,
    seed: int = 0,
) -> SearchSpace:
    """Parse axes as people type them.

    ``sample`` is ``random:N`` or ``sobol:N`` points instead of the grid.
    """
    if seed < 0:
        raise bad_value("seed", "zero or more", seed)
    method = SamplingMethod.GRID
    samples = 0
    if sample is not None:
        word, _, count = sample.partition(":")
        samples = int(count) if count.isascii() and count.isdigit() else 0
        if word not in (SamplingMethod.RANDOM, SamplingMethod.SOBOL) or samples < 1:
            raise bad_value("sample", "random:N or sobol:N, such as sobol:4096", sample)
        method = SamplingMethod(word)
        if method is SamplingMethod.SOBOL and samples > _SOBOL_MOST:
            raise bad_value("sample", f"at most {_SOBOL_MOST} Sobol points", sample)
    return SearchSpace(tuple(_parse_axis(spec, gpu, seed) for spec in specs), method, samples, seed)


def _parse_axis(
    spec: str,
    gpu: Gpu,
    seed: int,
) -> SpaceAxis:
    name, equals, text = spec.partition("=")
    if not equals or not name.strip() or not text.strip():
        raise bad_value("vary", "name=values, such as clock=600MHz:1980MHz:15MHz", spec)
    field = find_field(name.strip(), gpu)
    where = f"vary {field.name}"
    if field.choices:
        return SpaceAxis(field, _parse_choices(text, field, where))
    values, continuous = parse_values(text.strip(), field.unit, where, seed)
    if field.whole and not continuous:
        values = np.round(values) if ":random:" in text else values
        if (values != np.round(values)).any():
            raise bad_value(where, "whole numbers", text)
    if not (values > 0).all() and field.name != "temperature":
        raise bad_value(where, "numbers above zero", text)
    _check_range(values, field, gpu)
    return SpaceAxis(field, values, continuous)


def _check_range(
    values: Array,
    field: VariedField,
    gpu: Gpu,
) -> None:
    """Raise an error for settings that the card cannot have; a design may be anything."""
    ranges = {
        "sparsity": (1.0, 2.0),
        "clock": (float(gpu.clocks.min_hz or 1.0), float(gpu.clocks.max_hz)),
        "temperature": (0.0, HIGHEST_C),
    }
    low, high = ranges.get(field.name, (-math.inf, math.inf))
    if values.min() < low * (1 - 1e-9) or values.max() > high * (1 + 1e-9):
        span = f"{units.show(low, field.unit)} to {units.show(high, field.unit)}"
        worst = values.max() if values.max() > high else values.min()
        do = ""
        if field.name == "clock":
            do = f"Vary clocks.max for another chip than the {gpu.name}."
        value = units.show(float(worst), field.unit)
        raise bad_value(f"vary {field.name}", f"values from {span}", value, do)


def _parse_choices(
    text: str,
    field: VariedField,
    where: str,
) -> Array:
    """Return the numbers of the words of an axis."""
    place = {errors.fold_name(word): number for number, word in enumerate(field.choices)}
    numbers = []
    for word in text.split(","):
        number = place.get(errors.fold_name(word.strip()))
        if number is None:
            choices = ", ".join(field.choices)
            raise unknown_name(where, word.strip(), field.choices, f"Known: {choices}.")
        numbers.append(float(number))
    if len(set(numbers)) != len(numbers):
        raise bad_value(where, "each value once", text)
    return np.array(numbers)


def parse_values(
    text: str,
    unit: str,
    where: str,
    seed: int = 0,
) -> tuple[Array, bool]:
    """Return the values of a list or a range, or its two ends and True."""
    if ":" not in text:
        numbers = [units.parse(piece.strip(), unit, where) for piece in text.split(",")]
        listed = np.array(numbers)
        if np.unique(listed).size != listed.size:
            raise bad_value(where, "each value once", text)
        return listed, False
    pieces = [piece.strip() for piece in text.split(":")]
    low = units.parse(pieces[0], unit, where)
    high = units.parse(pieces[1], unit, where)
    if not low <= high:
        expected = "a range whose first end is the lower one"
        raise bad_value(where, expected, text, "As it stands it has no values.")
    if len(pieces) == 2:
        return np.array([low, high]), True
    is_random = len(pieces) == 4 and pieces[2] == "random"
    if is_random and pieces[3].isascii() and pieces[3].isdigit():
        count = int(pieces[3])
    elif len(pieces) == 3:
        step = units.parse(pieces[2], unit, where)
        if step <= 0:
            raise bad_value(where, "a step above zero", text)
        steps = (high - low) / step * (1 + 1e-12) + 1e-9  # rounding must not lose the last one
        count = int(min(steps, 2.0 * MOST_VALUES)) + 1
    else:
        raise bad_value(where, "low:high:step, low:high:random:N, low:high or a list", text)
    if not 1 <= count <= MOST_VALUES:
        expected = f"from 1 to {MOST_VALUES:,} values"
        raise BadInput(f"{where}: expected {expected}, got {clip_text(count)}. Take a larger step.")
    if is_random:
        random = np.random.default_rng([seed, *where.encode()])
        return np.sort(random.uniform(low, high, count)), False
    return low + step * np.arange(count, dtype=np.float64), False
