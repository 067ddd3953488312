"""YAML -> HallPlan: the racks of a hall, what runs in them, and its limits."""

from __future__ import annotations

import hashlib
import math
from dataclasses import (
    dataclass,
    field,
    replace,
)
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import (
    bad_value,
    check_names,
    units,
)
from wattcast.core.option_declaration import list_declared, parse_group
from wattcast.core.strict_files import decode_yaml, read_bytes
from wattcast.hardware.node_systems import NodeSystem, find_system
from wattcast.options.setting_options import MachineOptions
from wattcast.timeseries.node_power import NODE, check_inlet

MAX_HALL_FILE_BYTE = 1 << 20
MOST_RACKS = 100_000
MOST_IN_A_ROW = 1000  # nodes of a rack, and racks of a row
MOST_GPUS = 2_000_000
DAY_HOURS = 24.0
LEVELS = ("rack", "row", "hall")


class DayCoefficients(Coefficients):
    """Requests of each hour from midnight, relative to one another; ``_read_day`` divides by the
    mean.
    """

    office: tuple[float, ...]  # low at five in the morning, high from ten to four
    evening: tuple[float, ...]  # low at four, high at nine in the evening


DAY_SHAPES: dict[str, tuple[float, ...]] = {
    "flat": (1.0,) * 24,
    **vars(load_coefficients("hall_days", DayCoefficients)),
}


class IdleKind(StrEnum):
    """What stands in racks that compute nothing."""

    COLD = "cold"  # no program on the GPUs
    LOADED = "loaded"  # a model in memory, no requests


class JobStart(StrEnum):
    """How the jobs of a group lie to one another in time."""

    RANDOM = "random"  # as chance has it
    TOGETHER = "together"  # steps and checkpoints of all begin at once
    STAGGERED = "staggered"  # those of each a share of a step and of the time between later


class _ServeFile(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    rate: str
    tp: int = 1
    prompt: str | int = 512
    output: str | int = 128
    day: str | list[float] = "flat"
    options: dict[str, Any] = {}


class _TrainFile(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    jobs: int = 1
    checkpoint_every: str = "30min"
    checkpoint_takes: str = "60s"
    failures_per_gpu_day: float = 0.0
    restart: str = "10min"
    start: str = "random"
    floor: str | float = 0.0
    options: dict[str, Any] = {}


class _GroupFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    system: str
    racks: int
    nodes_per_rack: int = 4
    racks_per_row: int = 10
    gpu: str | None = None
    serve: _ServeFile | None = None
    train: _TrainFile | None = None
    idle: str | None = None


class _CapFile(msgspec.Struct, forbid_unknown_fields=True):
    level: str
    gpu: str
    hold: str = "60s"


class _HallFile(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[_GroupFile]
    title: str = "hall"
    hours: float = DAY_HOURS
    seed: int = 1
    inlet: str | None = None
    limits: dict[str, str] = {}
    cap: _CapFile | None = None


@dataclass(frozen=True)
class ServingLoad:
    """Replicas of a model, each with arrivals of its own at the same mean rate."""

    model: str
    rate_per_s: float  # of one replica, mean over the day
    tp: int
    prompt: str | int
    output: str | int
    day: tuple[float, ...]  # of equal parts of a day, over their mean
    options: dict[str, Any]

    @property
    def least_rate_per_s(self) -> float:
        """Requests of a replica in the quietest part of the day."""
        return self.rate_per_s * min(self.day)

    @property
    def most_rate_per_s(self) -> float:
        """Requests of a replica in the busiest part of the day."""
        return self.rate_per_s * max(self.day)


@dataclass(frozen=True)
class TrainingLoad:
    """Jobs that share the racks of a group; the GPUs of each run in step."""

    model: str
    jobs: int
    checkpoint_every_s: float
    checkpoint_takes_s: float
    failures_per_gpu_day: float
    restart_s: float
    options: dict[str, Any]
    start: JobStart = JobStart.RANDOM
    # share of its power limit below which no GPU of a job falls that waits or writes a checkpoint
    floor: float = 0.0


@dataclass(frozen=True)
class RackGroup:
    """Racks of one system with one load."""

    name: str
    system: NodeSystem
    gpu: str
    racks: int
    nodes_per_rack: int
    racks_per_row: int
    load: ServingLoad | TrainingLoad | IdleKind

    @property
    def gpus_per_rack(self) -> int:
        """GPUs of one rack."""
        return self.nodes_per_rack * self.system.gpu_count

    @property
    def gpus(self) -> int:
        """GPUs of all racks."""
        return self.racks * self.gpus_per_rack

    @property
    def rows(self) -> int:
        """Rows in which the racks stand; the last one may be shorter."""
        return math.ceil(self.racks / self.racks_per_row)


@dataclass(frozen=True)
class PowerCap:
    """What is done when a limit is passed: GPUs below it are held at less power for a while."""

    level: str
    gpu_limit_w: float
    hold_s: float


@dataclass(frozen=True)
class HallPlan:
    """All that decides the power of a hall."""

    title: str
    groups: tuple[RackGroup, ...]
    hours: float
    seed: int
    inlet_c: float
    limits_w: dict[str, float] = field(default_factory=dict)
    cap: PowerCap | None = None
    digest: str = ""  # of the file

    @property
    def gpus(self) -> int:
        """GPUs of the hall."""
        return sum(group.gpus for group in self.groups)

    @property
    def racks(self) -> int:
        """Racks of the hall."""
        return sum(group.racks for group in self.groups)


def tell_machine(plan: HallPlan, machine: MachineOptions) -> HallPlan:
    """Return a plan all of whose loads run on hosts and cards as told; their own options go
    first.
    """
    told = {name: value for name, value in vars(machine).items() if value is not None}
    groups = []
    for group in plan.groups:
        load = group.load
        if not isinstance(load, IdleKind):
            load = replace(load, options={**told, **load.options})
        groups.append(replace(group, load=load))
    return replace(plan, groups=tuple(groups))


def read_machine(load: ServingLoad | TrainingLoad) -> MachineOptions:
    """Return how the hosts and cards of a load differ from the usual ones, as its options tell."""
    names = [option.keyword for option in list_declared(MachineOptions)]
    told = {name: load.options[name] for name in names if name in load.options}
    return parse_group(MachineOptions, told)


def read_hall(path: Path) -> HallPlan:
    """Read the plan of a hall from its YAML file."""
    return parse_hall(read_bytes(path, MAX_HALL_FILE_BYTE), path.name, path.parent)


def parse_hall(
    data: bytes,
    where: str,
    folder: Path,
) -> HallPlan:
    """Read the plan of a hall from the bytes of its file."""
    file = decode_yaml(data, _HallFile, where)
    if not 0 < file.hours <= DAY_HOURS:
        hint = "A day has 24; run another one with another seed."
        raise bad_value(f"{where}: hours", "above 0, at most 24", file.hours, hint)
    if not file.groups:
        raise bad_value(f"{where}: groups", "one or more", "none")
    groups = [_read_group(group, where, folder) for group in file.groups]
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise bad_value(f"{where}: groups", "names that differ", name)
    inlet_c = NODE.inlet_c
    if file.inlet is not None:
        inlet_c = units.parse(file.inlet, "C", f"{where}: inlet")
    for group in groups:
        check_inlet(group.system, inlet_c)
    plan = HallPlan(
        title=file.title,
        groups=tuple(groups),
        hours=file.hours,
        seed=file.seed,
        inlet_c=inlet_c,
        limits_w=_read_limits(file.limits, where),
        cap=_read_cap(file, where),
        digest=hashlib.sha256(data).hexdigest(),
    )
    if plan.gpus > MOST_GPUS:
        raise bad_value(f"{where}: groups", f"at most {MOST_GPUS:,} GPUs", f"{plan.gpus:,}")
    return plan


def _read_group(
    file: _GroupFile,
    where: str,
    folder: Path,
) -> RackGroup:
    place = f"{where}: {file.name}"
    loads = [load for load in (file.serve, file.train, file.idle) if load is not None]
    if len(loads) != 1:
        raise bad_value(place, "one of serve, train and idle", len(loads) or "none")
    system = find_system(file.system, folder)
    for key, most in (
        ("racks", MOST_RACKS),
        ("nodes_per_rack", MOST_IN_A_ROW),
        ("racks_per_row", MOST_IN_A_ROW),
    ):
        count = getattr(file, key)
        if not 1 <= count <= most:
            raise bad_value(f"{place}: {key}", f"a whole number, 1 to {most}", count)
    gpu = system.gpus[0] if file.gpu is None else file.gpu
    check_names(f"GPU of {system.name}", gpu, system.gpus)
    load: ServingLoad | TrainingLoad | IdleKind
    if file.serve is not None:
        load = _read_serving(file.serve, f"{place}: serve", system)
    elif file.train is not None:
        load = _read_training(file.train, f"{place}: train", file.racks)
    else:
        check_names("kind of idle racks", str(file.idle), [str(kind) for kind in IdleKind])
        load = IdleKind(str(file.idle))
    return RackGroup(
        file.name,
        system,
        gpu,
        file.racks,
        file.nodes_per_rack,
        file.racks_per_row,
        load,
    )


def _read_serving(
    file: _ServeFile,
    where: str,
    system: NodeSystem,
) -> ServingLoad:
    if not 1 <= file.tp <= system.gpu_count:
        expected = f"1 to the {system.gpu_count} GPUs of a node"
        raise bad_value(f"{where}: tp", expected, file.tp)
    rate_per_s = units.parse_amount(file.rate, "/s", f"{where}: rate")
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise bad_value(f"{where}: rate", "requests per second above zero", file.rate)
    for name in ("pp", "dp", "ep", "replicas", "prefill_replicas", "trace", "concurrency"):
        if name in file.options:
            expected = "options of one engine on the GPUs of one node, with arrivals of its own"
            raise bad_value(f"{where}: options", expected, name)
    return ServingLoad(
        file.model,
        rate_per_s,
        file.tp,
        file.prompt,
        file.output,
        _read_day(file.day, f"{where}: day"),
        dict(file.options),
    )


def _read_day(day: str | list[float], where: str) -> tuple[float, ...]:
    """Return the requests of each part of a day over their mean.

    ``day`` is the name of a shape, or a number for each hour, half or quarter of one.
    """
    if isinstance(day, str):
        check_names("shape of a day", day, DAY_SHAPES)
        values = DAY_SHAPES[day]
    else:
        values = tuple(day)
        if len(values) not in (24, 48, 96):
            expected = "24 numbers (or 48, or 96), one for each part of a day"
            raise bad_value(where, expected, f"{len(values)} of them")
        if min(values) < 0 or not math.isfinite(sum(values)) or sum(values) <= 0:
            raise bad_value(where, "numbers of zero or more, not all zero", str(list(values)))
    mean = sum(values) / len(values)
    return tuple(value / mean for value in values)


def _read_training(
    file: _TrainFile,
    where: str,
    racks: int,
) -> TrainingLoad:
    if not 1 <= file.jobs <= racks or racks % file.jobs:
        expected = f"a number that divides the {racks} racks"
        raise bad_value(f"{where}: jobs", expected, file.jobs)
    every_s = _read_span(file.checkpoint_every, f"{where}: checkpoint_every", allows_zero=False)
    if not 0 <= file.failures_per_gpu_day <= 1:
        expected = "from 0 to 1 failures of a GPU in a day"
        raise bad_value(f"{where}: failures_per_gpu_day", expected, file.failures_per_gpu_day)
    for name in ("gpus", "tokens", "pause_share", "failures"):
        if name in file.options:
            expected = "options that the file of the hall does not decide itself"
            raise bad_value(f"{where}: options", expected, name)
    check_names(f"{where}: start", file.start, list(JobStart))
    floor = units.parse(str(file.floor), "", f"{where}: floor")
    if not 0.0 <= floor <= 1.0:
        raise bad_value(f"{where}: floor", "a share of the power limit, from 0 to 1", file.floor)
    return TrainingLoad(
        file.model,
        file.jobs,
        every_s,
        _read_span(file.checkpoint_takes, f"{where}: checkpoint_takes"),
        file.failures_per_gpu_day,
        _read_span(file.restart, f"{where}: restart"),
        dict(file.options),
        JobStart(file.start),
        floor,
    )


def _read_span(
    text: str,
    where: str,
    allows_zero: bool = True,
) -> float:
    seconds = units.parse(text, "s", where)
    is_long_enough = seconds >= 0 if allows_zero else seconds > 0
    if not (math.isfinite(seconds) and is_long_enough):
        expected = "a time of zero or more" if allows_zero else "a time above zero"
        raise bad_value(where, expected, text)
    return seconds


def _read_limits(limits: dict[str, str], where: str) -> dict[str, float]:
    """Return the limits of each level in watts."""
    limits_w = {}
    for level, text in limits.items():
        check_names("level of a limit", level, LEVELS)
        limit_w = units.parse(text, "W", f"{where}: limits: {level}")
        if limit_w <= 0:
            raise bad_value(f"{where}: limits: {level}", "a power above zero", text)
        limits_w[level] = limit_w
    return limits_w


def _read_cap(file: _HallFile, where: str) -> PowerCap | None:
    cap = file.cap
    if cap is None:
        return None
    check_names("level of the cap", cap.level, LEVELS)
    if cap.level not in file.limits:
        raise bad_value(f"{where}: cap", f"a limit of the {cap.level} under limits", "none")
    gpu_limit_w = units.parse(cap.gpu, "W", f"{where}: cap: gpu")
    if gpu_limit_w <= 0:
        raise bad_value(f"{where}: cap: gpu", "a power above zero", cap.gpu)
    hold_s = _read_span(cap.hold, f"{where}: cap: hold", allows_zero=False)
    whole_s = max(float(round(hold_s)), 1.0)  # limits are compared with power second by second
    return PowerCap(cap.level, gpu_limit_w, whole_s)
