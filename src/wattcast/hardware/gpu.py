"""What vendors say a chip and a node of chips are: numbers about the world, nothing fitted.

Every numeric field is a float, or an array shaped ``(*sweep, 1)`` in a sweep (``arrays.py``); None
means that nobody published it. Rates are per core-clock cycle, so they hold at any clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import (
    dataclass,
    field,
    fields,
    is_dataclass,
    replace,
)
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import (
    Dtype,
    bad_value,
    unknown_name,
)
from wattcast.core.arrays import (
    Array,
    Sweepable,
    as_sweep,
    check_positive,
)
from wattcast.core.errors import MissingSpecification
from wattcast.core.strict_files import PublishedClaim
from wattcast.hardware.card_coefficients import CARDS


class Fabric(StrEnum):
    """What joins the GPUs of a node."""

    SWITCH = "switch"  # every GPU reaches every other at the full rate of its links
    MESH = "mesh"  # a link to each other GPU: a group of n uses n - 1 of them
    BRIDGE = "bridge"  # pairs of cards; larger groups go over PCIe
    PCIE = "pcie"  # no link but PCIe, through switches and host memory


@dataclass(frozen=True)
class Node:
    """GPUs that share a fabric, and the network cards that join them to other nodes."""

    name: str
    title: str
    gpus: tuple[str, ...]  # catalogue names of the GPUs it is built with; none: any card
    gpu_count: int  # that the fabric joins
    fabric: Fabric
    multicast: bool  # the switch adds up and repeats what it is sent (NVLink SHARP)
    network: str  # what the network is
    network_byte_per_s: float | None  # one direction, per GPU; None: no network known
    claims: dict[str, PublishedClaim] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )
    switch_gpus: int = 1  # cards below one PCIe switch; 1: none
    socket_gpus: int | None = None  # cards of one processor socket; None: all
    socket_byte_per_s: float | None = None  # one direction between sockets; None: by generation
    is_timed: bool = False  # the public timings of PCIe cards come from this very node


@dataclass(frozen=True)
class Pipes:
    """Operations per cycle and SM of each execution pipe (a multiply-add counts as two)."""

    # dense, by input format; empty without tensor cores
    tensor_flop_per_cycle: Mapping[Dtype, Sweepable]
    cuda_flop_per_cycle: Mapping[Dtype, Sweepable]
    int32_op_per_cycle: Sweepable | None
    sfu_op_per_cycle: Sweepable | None


@dataclass(frozen=True)
class Sm:
    """What one streaming multiprocessor (or compute unit) holds."""

    shared_byte: Sweepable | None  # shared memory and L1 together where they are one array
    shared_byte_per_block: Sweepable | None
    shared_byte_per_cycle: Sweepable | None
    register_count: Sweepable | None
    thread_count: Sweepable | None
    block_count: Sweepable | None


@dataclass(frozen=True)
class L2Cache:
    """The last-level cache; bandwidth is of the whole chip, reads, per core cycle."""

    capacity_byte: Sweepable | None
    byte_per_cycle: Sweepable | None


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory: a domain of its own, with its own clock."""

    kind: str
    capacity_byte: Sweepable
    byte_per_s: Sweepable
    clock_hz: Sweepable | None


@dataclass(frozen=True)
class Links:
    """Ways off the chip, both directions added up."""

    nvlink_byte_per_s: Sweepable | None
    pcie_byte_per_s: Sweepable | None


@dataclass(frozen=True)
class ClockRange:
    """Core clocks a driver can set. Rates in a datasheet are stated at ``boost_hz``."""

    boost_hz: Sweepable
    max_hz: Sweepable
    min_hz: Sweepable | None
    step_hz: Sweepable | None
    base_hz: Sweepable | None
    memory_hz: tuple[float, ...] = ()

    @property
    def lowest_hz(self) -> Sweepable:
        """The lowest clock; a share of the highest where it is not published."""
        return CARDS.lowest_clock * self.max_hz if self.min_hz is None else self.min_hz

    def snap_to_steps(self, clock_hz: Array) -> Array:
        """Return the clocks nearest to ``clock_hz`` that a driver sets, where their step is
        published.
        """
        if self.step_hz is None:
            return clock_hz
        high = float(np.max(self.max_hz))
        step = float(np.min(self.step_hz))
        return high - step * np.round((high - clock_hz) / step)


@dataclass(frozen=True)
class ClockCurve:
    """A published relation to the core clock, linear between points and flat beyond them."""

    clock_hz: Array  # rising
    value: Array

    def value_at(self, clock_hz: Sweepable) -> Array:
        """Return the value at each clock."""
        return np.asarray(np.interp(clock_hz, self.clock_hz, self.value))


@dataclass(frozen=True)
class PowerSpec:
    """Board power limits, and what is published about idle power and voltage."""

    limit_w: Sweepable  # the default limit
    min_limit_w: Sweepable | None = None
    max_limit_w: Sweepable | None = None
    idle_w: ClockCurve | None = None
    voltage_v: ClockCurve | None = None


class CardUse(StrEnum):
    """Where a card is found."""

    DATA_CENTRE = "data-centre"
    WORKSTATION = "workstation"  # desktops and embedded modules too
    MUSEUM = "museum"  # measured by the papers that Wattcast follows


@dataclass(frozen=True)
class Gpu:
    """One chip as its vendor describes it."""

    name: str
    title: str
    vendor: str
    architecture: str
    compute_capability: str
    process: str
    sm_count: Sweepable
    pipes: Pipes
    sm: Sm
    l2: L2Cache
    memory: DeviceMemory
    links: Links
    clocks: ClockRange
    power: PowerSpec
    use: CardUse = CardUse.DATA_CENTRE
    node: Node | None = None  # where it stands; None: in the node it is usually built into
    board: str = ""  # part number, where boards of this GPU were measured apart; empty: any of them
    engine: str = ""  # whose kernels it runs; empty: vLLM's, as far as an engine runs at all
    # By dotted path: who says so, and why nobody does
    claims: Mapping[str, PublishedClaim] = field(default_factory=dict, repr=False)
    unknown: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_positive(self.name, dict(number_fields(self)))

    def need(self, path: str) -> Sweepable:
        """Return the number at a dotted path, or raise an error that says why it is unknown.

        >>> from wattcast.hardware import load_gpu
        >>> load_gpu("h200").need("memory.byte_per_s")
        4800000000000.0
        """
        value: Any = self
        for part in path.split("."):
            is_mapping = isinstance(value, Mapping)
            value = value[Dtype.parse(part)] if is_mapping else getattr(value, part)
        if value is None:
            why = self.unknown.get(path, "not published")
            raise MissingSpecification(
                f"{self.name}: {path} is unknown ({why}). Give it in your own GPU file, or choose "
                "another GPU."
            )
        return value  # type: ignore[no-any-return]

    def sweep(self, **changes: npt.ArrayLike) -> Gpu:
        """Return this GPU with fields replaced by values over a sweep.

        An example is ``gpu.sweep(sm_count=[64, 132])``. Dotted paths write a double underscore:
        ``memory__byte_per_s``. All arrays broadcast to one sweep shape.
        """
        return self.with_fields({name.replace("__", "."): value for name, value in changes.items()})

    def with_fields(self, changes: Mapping[str, npt.ArrayLike]) -> Gpu:
        """Return this GPU with fields replaced, as ``sweep`` does, with dotted paths as keys."""
        gpu = self
        for path, values in changes.items():
            gpu = _replace_field(gpu, path.split("."), as_sweep(values), path)
        return gpu


def _replace_field(
    node: Any,
    parts: list[str],
    value: Sweepable,
    path: str,
) -> Any:
    head = parts[0]
    inner_parts = parts[1:]
    names = [item.name for item in fields(node)]
    if head not in names or head in ("claims", "unknown", "node"):
        paths = [number_path for number_path, _ in number_fields(node)]
        raise unknown_name("GPU field", path, paths, f"Known here: {', '.join(paths)}.")
    child = getattr(node, head)
    if not inner_parts:
        if is_dataclass(child) or isinstance(child, (str, Mapping)):
            raise bad_value(path, "a single number", "a group of fields")
        return replace(node, **{head: value})
    if isinstance(child, Mapping):
        return replace(node, **{head: {**child, Dtype.parse(inner_parts[0]): value}})
    if not is_dataclass(child):
        raise unknown_name("GPU field", path, names)
    return replace(node, **{head: _replace_field(child, inner_parts, value, path)})


def number_fields(node: Any, prefix: str = "") -> list[tuple[str, Sweepable]]:
    """Return the dotted path and value of every known number below ``node``."""
    numbers: list[tuple[str, Sweepable]] = []
    for item in fields(node):
        value = getattr(node, item.name)
        path = f"{prefix}{item.name}"
        if isinstance(value, ClockCurve) or item.name in ("claims", "unknown", "memory_hz", "node"):
            continue
        if is_dataclass(value):
            numbers += number_fields(value, f"{path}.")
        elif isinstance(value, Mapping):
            numbers += [(f"{path}.{key}", number) for key, number in value.items()]
        elif isinstance(value, (int, float, np.ndarray)):
            numbers.append((path, value))
    return numbers


def list_published_numbers(gpu: Gpu) -> list[dict[str, Any]]:
    """Return every known number of a GPU with its source, a note, and what others say instead."""
    rows = []
    for path, value in number_fields(gpu):
        claim = vars(gpu.claims.get(path, PublishedClaim("")))
        disputed = [list(statement) for statement in claim["disputed"]]
        rows.append(
            {
                "field": path,
                "value": float(value),
                **claim,
                "disputed": disputed,
            }
        )
    return rows


DEFAULT_TEMPERATURE_C = CARDS.usual_temperature_c


@dataclass(frozen=True)
class OperatingPoint:
    """Settings of a card, each a float or ``(*sweep, 1)``.

    ``clock_hz`` None leaves the core clock to the governor: the highest at which the workload's
    mean power meets ``power_limit_w`` (None: the card's default limit). A locked clock is lowered
    too when the limit does not allow it, as cards do. ``duration_s`` is how long the work goes on
    after a pause; None: until the governor has settled.
    """

    clock_hz: Sweepable | None = None
    power_limit_w: Sweepable | None = None
    temperature_c: Sweepable = DEFAULT_TEMPERATURE_C
    memory_clock_hz: Sweepable | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        settings = {
            "clock_hz": self.clock_hz,
            "power_limit_w": self.power_limit_w,
            "duration_s": self.duration_s,
        }
        check_positive("operating point", settings)
