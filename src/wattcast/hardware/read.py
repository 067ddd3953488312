"""YAML -> Gpu. Each number stands with its source; an unknown one says why; a bad key is named."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast import naming, units
from wattcast.dtypes import Dtype
from wattcast.errors import bad_value
from wattcast.files import from_yaml, read_bytes
from wattcast.hardware.gpu import L2, Clocks, Curve, Gpu, Links, Memory, Pipes, PowerSpec, Sm
from wattcast.provenance import Claim

MAX_GPU_FILE_BYTE = 1 << 20


class _Disputed(msgspec.Struct, forbid_unknown_fields=True):
    value: str | float | int
    source: str


class _Leaf(msgspec.Struct, forbid_unknown_fields=True):
    """One number: ``{value, source}``, or ``{unknown: why}``; ``disputed`` lists who says otherwise."""

    value: str | float | int | None = None
    source: str = ""
    note: str = ""
    unknown: str = ""
    disputed: list[_Disputed] = []


class _CurveLeaf(msgspec.Struct, forbid_unknown_fields=True):
    """A table by core clock, or ``{unknown: why}``."""

    clock: list[str] = []
    value: list[str] = []
    source: str = ""
    note: str = ""
    unknown: str = ""


class _Pipes(msgspec.Struct, forbid_unknown_fields=True):
    cuda_per_cycle_sm: dict[str, _Leaf]
    int32_per_cycle_sm: _Leaf
    sfu_per_cycle_sm: _Leaf
    tensor_per_cycle_sm: dict[str, _Leaf] = {}


class _Sm(msgspec.Struct, forbid_unknown_fields=True):
    shared_capacity: _Leaf
    shared_capacity_block: _Leaf
    shared_per_cycle: _Leaf
    registers: _Leaf
    threads: _Leaf
    blocks: _Leaf


class _L2(msgspec.Struct, forbid_unknown_fields=True):
    capacity: _Leaf
    per_cycle: _Leaf


class _Memory(msgspec.Struct, forbid_unknown_fields=True):
    kind: _Leaf
    capacity: _Leaf
    bandwidth: _Leaf
    clock: _Leaf


class _Links(msgspec.Struct, forbid_unknown_fields=True):
    nvlink: _Leaf
    pcie: _Leaf


class _Clocks(msgspec.Struct, forbid_unknown_fields=True):
    boost: _Leaf
    max: _Leaf
    min: _Leaf
    step: _Leaf
    base: _Leaf
    memory: list[_Leaf] = []


class _Power(msgspec.Struct, forbid_unknown_fields=True):
    limit: _Leaf
    min_limit: _Leaf
    max_limit: _Leaf
    idle: _CurveLeaf
    voltage: _CurveLeaf


class _GpuFile(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    vendor: str
    architecture: str
    compute_capability: str
    process: _Leaf
    sources: dict[str, str]
    sm_count: _Leaf
    pipes: _Pipes
    sm: _Sm
    l2: _L2
    memory: _Memory
    links: _Links
    clocks: _Clocks
    power: _Power


def names() -> list[str]:
    """Catalogue GPUs, by name."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def load(name: str) -> Gpu:
    """The catalogue GPU of that name (case, ``-``, ``_``, ``.`` and blanks do not matter)."""
    return _load(_known(name))


@lru_cache(maxsize=256)
def _known(name: str) -> str:
    return naming.resolve("gpu", name, names(), ALIASES)


def load_file(path: Path) -> Gpu:
    """A GPU from a user's own YAML file, in the catalogue's form; its name is the file's."""
    return parse(read_bytes(path, MAX_GPU_FILE_BYTE), path.stem, path.name)


def parse(data: bytes, name: str, where: str) -> Gpu:
    """The bytes of a GPU file -> Gpu."""
    return _Reader(from_yaml(data, _GpuFile, where), where).gpu(name)


# What people say for a catalogue name; beyond these, only the names themselves are understood.
ALIASES = {
    "h100": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h200-sxm": "h200",
    "v100": "v100-sxm",
    "a100": "a100-sxm-80gb",
    "a100-sxm": "a100-sxm-80gb",
    "a100-pcie": "a100-pcie-40gb",
    "titan-x": "gtx-titan-x",
    "gv100": "quadro-gv100",
    "tk1": "tegra-k1",
}


def _folder() -> Any:
    return files("wattcast.hardware").joinpath("catalogue")


@cache
def _load(name: str) -> Gpu:
    return parse(_folder().joinpath(f"{name}.yaml").read_bytes(), name, f"{name}.yaml")


class _Reader:
    """Walks one file, turning leaves into SI numbers and remembering who said so."""

    def __init__(self, file: _GpuFile, where: str) -> None:
        self.file, self.where = file, where
        self.claims: dict[str, Claim] = {}
        self.unknown: dict[str, str] = {}

    def gpu(self, name: str) -> Gpu:
        file = self.file
        sm_count = self.need(file.sm_count, "sm_count", "")
        if not sm_count.is_integer():
            raise bad_value(f"{self.where}: sm_count", "a whole number", sm_count)
        return Gpu(
            name=name,
            title=file.title,
            vendor=file.vendor,
            architecture=file.architecture,
            compute_capability=file.compute_capability,
            process=self.text(file.process, "process"),
            sm_count=sm_count,
            pipes=self.pipes(file.pipes),
            sm=self.sm(file.sm),
            l2=L2(
                self.number(file.l2.capacity, "l2.capacity", "byte", "l2.capacity_byte"),
                self.number(file.l2.per_cycle, "l2.per_cycle", "byte/cycle", "l2.byte_per_cycle"),
            ),
            memory=self.memory(file.memory),
            links=Links(
                self.number(file.links.nvlink, "links.nvlink", "byte/s", "links.nvlink_byte_per_s"),
                self.number(file.links.pcie, "links.pcie", "byte/s", "links.pcie_byte_per_s"),
            ),
            clocks=self.clocks(file.clocks),
            power=self.power(file.power),
            claims=self.claims,
            unknown=self.unknown,
        )

    def pipes(self, group: _Pipes) -> Pipes:
        return Pipes(
            self.by_dtype(group.tensor_per_cycle_sm, "pipes.tensor", "flop"),
            self.by_dtype(group.cuda_per_cycle_sm, "pipes.cuda", "flop"),
            self.number(group.int32_per_cycle_sm, "pipes.int32_per_cycle_sm", "op/cycle", "pipes.int32_op_per_cycle"),
            self.number(group.sfu_per_cycle_sm, "pipes.sfu_per_cycle_sm", "op/cycle", "pipes.sfu_op_per_cycle"),
        )

    def by_dtype(self, leaves: dict[str, _Leaf], path: str, unit: str) -> dict[Dtype, Any]:
        rates = {}
        for key, leaf in leaves.items():
            at = f"{path}_{unit}_per_cycle.{key}"
            per_cycle = "op/cycle" if key.startswith("int") else "flop/cycle"
            if key not in list(Dtype):
                raise bad_value(f"{self.where}: {path}_per_cycle_sm", f"formats among {', '.join(Dtype)}", key)
            rates[Dtype(key)] = self.need(leaf, f"{path}_per_cycle_sm.{key}", per_cycle, at)
        return rates

    def sm(self, group: _Sm) -> Sm:
        number = self.number
        return Sm(
            shared_byte=number(group.shared_capacity, "sm.shared_capacity", "byte", "sm.shared_byte"),
            shared_byte_per_block=number(
                group.shared_capacity_block, "sm.shared_capacity_block", "byte", "sm.shared_byte_per_block"
            ),
            shared_byte_per_cycle=number(
                group.shared_per_cycle, "sm.shared_per_cycle", "byte/cycle", "sm.shared_byte_per_cycle"
            ),
            register_count=number(group.registers, "sm.registers", "", "sm.register_count"),
            thread_count=number(group.threads, "sm.threads", "", "sm.thread_count"),
            block_count=number(group.blocks, "sm.blocks", "", "sm.block_count"),
        )

    def memory(self, group: _Memory) -> Memory:
        return Memory(
            kind=self.text(group.kind, "memory.kind"),
            capacity_byte=self.need(group.capacity, "memory.capacity", "byte", "memory.capacity_byte"),
            byte_per_s=self.need(group.bandwidth, "memory.bandwidth", "byte/s", "memory.byte_per_s"),
            clock_hz=self.number(group.clock, "memory.clock", "Hz", "memory.clock_hz"),
        )

    def clocks(self, group: _Clocks) -> Clocks:
        return Clocks(
            boost_hz=self.need(group.boost, "clocks.boost", "Hz", "clocks.boost_hz"),
            max_hz=self.need(group.max, "clocks.max", "Hz", "clocks.max_hz"),
            min_hz=self.number(group.min, "clocks.min", "Hz", "clocks.min_hz"),
            step_hz=self.number(group.step, "clocks.step", "Hz", "clocks.step_hz"),
            base_hz=self.number(group.base, "clocks.base", "Hz", "clocks.base_hz"),
            memory_hz=tuple(
                self.need(leaf, f"clocks.memory[{i}]", "Hz", f"clocks.memory_hz[{i}]")
                for i, leaf in enumerate(group.memory)
            ),
        )

    def power(self, group: _Power) -> PowerSpec:
        return PowerSpec(
            limit_w=self.need(group.limit, "power.limit", "W", "power.limit_w"),
            min_limit_w=self.number(group.min_limit, "power.min_limit", "W", "power.min_limit_w"),
            max_limit_w=self.number(group.max_limit, "power.max_limit", "W", "power.max_limit_w"),
            idle_w=self.curve(group.idle, "power.idle", "W", "power.idle_w"),
            voltage_v=self.curve(group.voltage, "power.voltage", "V", "power.voltage_v"),
        )

    def need(self, leaf: _Leaf, path: str, unit: str, name: str = "") -> float:
        number = self.number(leaf, path, unit, name)
        if number is None:
            raise bad_value(f"{self.where}: {path}", "a value", "unknown", "Without it nothing can be predicted.")
        return number

    def number(self, leaf: _Leaf, path: str, unit: str, name: str = "") -> float | None:
        name = name or path
        if self.missing(leaf.unknown, leaf.value is not None, leaf.source, path, name):
            return None
        self.claims[name] = Claim(
            self.cite(leaf.source, path),
            leaf.note,
            tuple((str(d.value), self.cite(d.source, f"{path}.disputed")) for d in leaf.disputed),
        )
        for other in leaf.disputed:
            self.positive(other.value, unit, f"{self.where}: {path}.disputed")
        return self.positive(leaf.value, unit, f"{self.where}: {path}")

    def positive(self, text: str | float | int | None, unit: str, where: str) -> float:
        value = units.parse(text, unit, where)
        if value <= 0:
            raise bad_value(where, "a number above zero", text)
        return value

    def text(self, leaf: _Leaf, path: str) -> str:
        if self.missing(leaf.unknown, leaf.value is not None, leaf.source, path, path):
            return "unknown"
        others = tuple((str(d.value), self.cite(d.source, f"{path}.disputed")) for d in leaf.disputed)
        self.claims[path] = Claim(self.cite(leaf.source, path), leaf.note, others)
        return str(leaf.value)

    def curve(self, leaf: _CurveLeaf, path: str, unit: str, name: str) -> Curve | None:
        if self.missing(leaf.unknown, bool(leaf.value), leaf.source, path, name):
            return None
        self.claims[name] = Claim(self.cite(leaf.source, path), leaf.note)
        if len(leaf.clock) != len(leaf.value):
            raise bad_value(f"{self.where}: {path}", f"{len(leaf.clock)} values, one a clock", len(leaf.value))
        clock = [units.parse(c, "Hz", f"{self.where}: {path}.clock[{i}]") for i, c in enumerate(leaf.clock)]
        value = [units.parse(v, unit, f"{self.where}: {path}.value[{i}]") for i, v in enumerate(leaf.value)]
        if any(number <= 0 for number in value):
            raise bad_value(f"{self.where}: {path}.value", "numbers above zero", min(value))
        if any(b <= a for a, b in pairwise(clock)):
            raise bad_value(f"{self.where}: {path}.clock", "rising clocks", ", ".join(leaf.clock))
        return Curve(np.array(clock), np.array(value))

    def missing(self, unknown: str, has_value: bool, source: str, path: str, name: str) -> bool:
        if bool(unknown) == has_value:
            raise bad_value(
                f"{self.where}: {path}", "either a value or `unknown: why`", "both" if unknown else "neither"
            )
        if has_value and not source:
            raise bad_value(f"{self.where}: {path}", "a source beside the value", "none")
        if unknown:
            self.unknown[name] = unknown
        return bool(unknown)

    def cite(self, source: str, path: str) -> str:
        if source not in self.file.sources:
            raise bad_value(f"{self.where}: {path}.source", f"one of {', '.join(self.file.sources)}", source)
        return self.file.sources[source]
