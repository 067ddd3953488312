"""What the vendor says a chip is. Numbers about the world only; nothing fitted lives here.

Every numeric field is a float, or an array shaped ``(*sweep, 1)`` in a sweep (``arrays.py``); None
means that nobody published it. Rates are per core-clock cycle, so they hold at any clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array, Scalar, check_positive, swept
from wattcast.dtypes import Dtype
from wattcast.errors import MissingSpecification, bad_value, unknown_name
from wattcast.provenance import Claim


@dataclass(frozen=True)
class Pipes:
    """Operations per cycle and SM of each execution pipe (a multiply-add counts as two)."""

    tensor_flop_per_cycle: Mapping[Dtype, Scalar]  # dense, by input format; empty without tensor cores
    cuda_flop_per_cycle: Mapping[Dtype, Scalar]
    int32_op_per_cycle: Scalar | None
    sfu_op_per_cycle: Scalar | None


@dataclass(frozen=True)
class Sm:
    """What one streaming multiprocessor (or compute unit) holds."""

    shared_byte: Scalar | None  # shared memory and L1 together where they are one array
    shared_byte_per_block: Scalar | None
    shared_byte_per_cycle: Scalar | None
    register_count: Scalar | None
    thread_count: Scalar | None
    block_count: Scalar | None


@dataclass(frozen=True)
class L2:
    """The last-level cache; bandwidth is of the whole chip, reads, per core cycle."""

    capacity_byte: Scalar | None
    byte_per_cycle: Scalar | None


@dataclass(frozen=True)
class Memory:
    """Device memory: a domain of its own, with its own clock."""

    kind: str
    capacity_byte: Scalar
    byte_per_s: Scalar
    clock_hz: Scalar | None


@dataclass(frozen=True)
class Links:
    """Ways off the chip, both directions added up."""

    nvlink_byte_per_s: Scalar | None
    pcie_byte_per_s: Scalar | None


@dataclass(frozen=True)
class Clocks:
    """Core clocks a driver can set. Rates in a datasheet are stated at ``boost_hz``."""

    boost_hz: Scalar
    max_hz: Scalar
    min_hz: Scalar | None
    step_hz: Scalar | None
    base_hz: Scalar | None
    memory_hz: tuple[float, ...] = ()


@dataclass(frozen=True)
class Curve:
    """A published relation to the core clock, linear between points and flat beyond them."""

    clock_hz: Array
    value: Array

    def __post_init__(self) -> None:
        if self.clock_hz.ndim != 1 or self.clock_hz.shape != self.value.shape or self.clock_hz.size == 0:
            raise bad_value("curve", "as many values as clocks", f"{self.value.shape} and {self.clock_hz.shape}")
        if not (np.diff(self.clock_hz) > 0).all():
            raise bad_value("curve.clock", "rising clocks", self.clock_hz.tolist())

    def at(self, clock_hz: Scalar) -> Array:
        """The value at each clock."""
        return np.asarray(np.interp(clock_hz, self.clock_hz, self.value))


@dataclass(frozen=True)
class PowerSpec:
    """Board power limits, and what is published about idle power and voltage."""

    limit_w: Scalar  # the default limit
    min_limit_w: Scalar | None = None
    max_limit_w: Scalar | None = None
    idle_w: Curve | None = None
    voltage_v: Curve | None = None


@dataclass(frozen=True)
class Gpu:
    """One chip as its vendor describes it."""

    name: str
    title: str
    vendor: str
    architecture: str
    compute_capability: str
    process: str
    sm_count: Scalar
    pipes: Pipes
    sm: Sm
    l2: L2
    memory: Memory
    links: Links
    clocks: Clocks
    power: PowerSpec
    claims: Mapping[str, Claim] = field(default_factory=dict, repr=False)  # dotted path -> who says so
    unknown: Mapping[str, str] = field(default_factory=dict, repr=False)  # dotted path -> why

    def __post_init__(self) -> None:
        check_positive(self.name, dict(numbers(self)))

    def need(self, path: str) -> Scalar:
        """The number at a dotted path, or an error that says it is not published and why.

        >>> from wattcast.hardware import load
        >>> load("h200").need("memory.byte_per_s")
        4800000000000.0
        """
        value: Any = self
        for part in path.split("."):
            value = value[Dtype.of(part)] if isinstance(value, Mapping) else getattr(value, part)
        if value is None:
            why = self.unknown.get(path, "not published")
            raise MissingSpecification(
                f"{self.name}: {path} is unknown ({why}). Give it in your own GPU file, or choose another GPU."
            )
        return value  # type: ignore[no-any-return]

    def sweep(self, **changes: npt.ArrayLike) -> Gpu:
        """This GPU with fields replaced by values over a sweep: ``gpu.sweep(sm_count=[64, 132])``.

        Dotted paths write a double underscore: ``memory__byte_per_s``. All arrays broadcast to one
        sweep shape.
        """
        return self.with_fields({name.replace("__", "."): value for name, value in changes.items()})

    def with_fields(self, changes: Mapping[str, npt.ArrayLike]) -> Gpu:
        """Like :meth:`sweep`, with dotted paths as keys."""
        gpu = self
        for path, values in changes.items():
            gpu = _replaced(gpu, path.split("."), swept(values), path)
        return gpu


def _replaced(node: Any, parts: list[str], value: Scalar, path: str) -> Any:
    head, rest = parts[0], parts[1:]
    names = [f.name for f in fields(node)]
    if head not in names or head in ("claims", "unknown"):
        known = [p for p, _ in numbers(node)]
        raise unknown_name("GPU field", path, known, f"Known here: {', '.join(known)}.")
    child = getattr(node, head)
    if not rest:
        if is_dataclass(child) or isinstance(child, (str, Mapping)):
            raise bad_value(path, "a single number", "a group of fields")
        return replace(node, **{head: value})
    if isinstance(child, Mapping):
        return replace(node, **{head: {**child, Dtype.of(rest[0]): value}})
    if not is_dataclass(child):
        raise unknown_name("GPU field", path, names)
    return replace(node, **{head: _replaced(child, rest, value, path)})


def numbers(node: Any, prefix: str = "") -> list[tuple[str, Scalar]]:
    """Dotted path and value of every known number below ``node``."""
    found: list[tuple[str, Scalar]] = []
    for item in fields(node):
        value, path = getattr(node, item.name), f"{prefix}{item.name}"
        if isinstance(value, Curve) or item.name in ("claims", "unknown", "memory_hz"):
            continue
        if is_dataclass(value):
            found += numbers(value, f"{path}.")
        elif isinstance(value, Mapping):
            found += [(f"{path}.{key}", number) for key, number in value.items()]
        elif isinstance(value, (int, float, np.ndarray)):
            found.append((path, value))
    return found
