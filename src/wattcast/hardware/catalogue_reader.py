"""YAML -> Gpu or Node.

Each number stands with its source, an unknown one says why, and an error names the bad key.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import (
    Dtype,
    bad_value,
    errors,
    files,
    units,
)
from wattcast.core.strict_files import (
    PublishedClaim,
    decode_yaml,
    read_bytes,
    read_shipped_table,
)
from wattcast.hardware import gpu as chip
from wattcast.hardware.gpu import (
    CardUse,
    ClockCurve,
    Fabric,
    Gpu,
    Node,
)

MAX_GPU_FILE_BYTE = 1 << 20
MAX_NODE_FILE_BYTE = 1 << 16
MOST_NODE_GPUS = 65_536


class _Disputed(msgspec.Struct, forbid_unknown_fields=True):
    value: str | float | int
    source: str


class _Leaf(msgspec.Struct, forbid_unknown_fields=True):
    """One number: ``{value, source}``, or ``{unknown: why}``; ``disputed``: who says otherwise."""

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


# Where the number of a key in the file goes in ``Gpu``, and its unit; without those needed nothing
# can be predicted
_NUMBERS = {row["key"]: row for row in read_shipped_table("wattcast.hardware", "gpu_fields.csv")}
# Boards of a GPU that were measured apart: name -> name of the GPU and part number
_BOARDS = {row["name"]: row for row in read_shipped_table("wattcast.hardware", "gpu_boards.csv")}
# What people say for a catalogue name; beyond these, only the names themselves are understood
GPU_ALIASES = {
    row["alias"]: row["gpu"] for row in read_shipped_table("wattcast.hardware", "gpu_aliases.csv")
}
_MAKERS = re.compile(r"^\s*(?:(?:nvidia|geforce|tesla|amd|instinct)\s+)+", re.IGNORECASE)
GPU_ALIASES |= {name: name for name in _BOARDS}
GPU_ALIASES |= {row["part_number"]: name for name, row in _BOARDS.items()}


# What a number of one GPU can be, by its unit: far beyond every card that was built, and near
# enough that a slip of a prefix or a made-up 1e300 is told where it stands.
_RANGES = {
    "": (1.0, 1e8),
    "op/cycle": (1e-3, 1e7),
    "flop/cycle": (1e-3, 1e7),
    "byte": (1.0, 1e16),
    "byte/cycle": (1e-2, 1e8),
    "byte/s": (1e6, 1e17),
    "Hz": (1e3, 1e11),
    "W": (1e-2, 1e5),
    "V": (1e-2, 1e2),
}


def _make_group_type(name: str, *others: tuple[Any, ...]) -> type[msgspec.Struct]:
    """Return the type of a mapping in the file: a leaf for each of its numbers, and other keys."""
    leaves = [(key.rpartition(".")[2], _Leaf) for key in _NUMBERS if key.startswith(f"{name}.")]
    return msgspec.defstruct(f"_{name.title()}", [*leaves, *others], forbid_unknown_fields=True)


_Rates = dict[str, _Leaf]  # by number format
_GpuFile = msgspec.defstruct(
    "_GpuFile",
    [
        *((name, str) for name in ("title", "vendor", "architecture", "compute_capability")),
        ("process", _Leaf),
        ("sources", dict[str, str]),
        ("sm_count", _Leaf),
        (
            "pipes",
            _make_group_type(
                "pipes", ("cuda_per_cycle_sm", _Rates), ("tensor_per_cycle_sm", _Rates, {})
            ),
        ),
        ("sm", _make_group_type("sm")),
        ("l2", _make_group_type("l2")),
        ("memory", _make_group_type("memory", ("kind", _Leaf))),
        ("links", _make_group_type("links")),
        ("clocks", _make_group_type("clocks", ("memory", list[_Leaf], []))),
        ("power", _make_group_type("power", ("idle", _CurveLeaf), ("voltage", _CurveLeaf))),
        ("use", CardUse, CardUse.DATA_CENTRE),
    ],
    forbid_unknown_fields=True,
)


def _list_files(folder: str) -> list[str]:
    return sorted(path.stem for path in files("wattcast.hardware").joinpath(folder).glob("*.yaml"))


def gpu_names() -> list[str]:
    """Return the names of the GPUs in the catalogue."""
    return _list_files("catalogue")


def gpus() -> list[Gpu]:
    """Return all GPUs of the catalogue, by name.

    >>> import wattcast
    >>> [gpu.name for gpu in wattcast.gpus() if gpu.architecture == "blackwell"]
    ['b200', 'b300', 'gb200', 'gb300', 'jetson-thor']
    """
    return [load_gpu(name) for name in gpu_names()]


def load_gpu(name: str) -> Gpu:
    """Return the catalogue GPU of that name (case, ``-``, ``_``, ``.`` and blanks do not matter).

    A board that was measured apart has a name of its own, and answers to its part number.

    >>> load_gpu("692-2G520-0282-000").name
    'h200-000'
    """
    return _load_by_name(resolve_gpu_name(name))


def list_boards(gpu: str = "") -> dict[str, str]:
    """Return names and part numbers of boards that were measured apart, of one GPU or of all."""
    return {name: row["part_number"] for name, row in _BOARDS.items() if gpu in ("", row["gpu"])}


def strip_board(name: str) -> str:
    """Return the name of the GPU that a board carries; that of a GPU stays as it is.

    >>> strip_board("h200-000"), strip_board("h200")
    ('h200', 'h200')
    """
    return _BOARDS[name]["gpu"] if name in _BOARDS else name


@lru_cache(maxsize=256)
def resolve_gpu_name(name: str) -> str:
    """Return the name in the catalogue, of a GPU or a board, that ``name`` means."""
    if name in node_names():
        node = load_node(name)
        examples = ", ".join(node.gpus) or "l40s"
        expected = f"a GPU, such as {examples}, with `--node {name}`"
        raise errors.bad_value("gpu", expected, f"a node ({node.title})")
    # drivers print "NVIDIA H100 PCIe" and "Tesla T4"
    named_by_driver = _MAKERS.sub("", name)
    return errors.resolve_name("gpu", named_by_driver, gpu_names(), GPU_ALIASES)


@cache
def _load_by_name(name: str) -> Gpu:
    if name in _BOARDS:
        gpu = _load_by_name(_BOARDS[name]["gpu"])
        part = _BOARDS[name]["part_number"]
        return replace(
            gpu,
            name=name,
            title=f"{gpu.title}, board {part}",
            board=part,
        )
    return load_gpu_file(files("wattcast.hardware").joinpath("catalogue", f"{name}.yaml"))


def load_gpu_file(path: Path) -> Gpu:
    """Return a GPU from a user's own YAML file like the catalogue's; its name is the file's."""
    return parse_gpu(read_bytes(path, MAX_GPU_FILE_BYTE), path.stem, path.name)


def parse_gpu(
    data: bytes,
    name: str,
    where: str,
) -> Gpu:
    """Return the GPU that the bytes of a GPU file describe."""
    return _Reader(decode_yaml(data, _GpuFile, where), where).read_gpu(name)


class _Reader:
    """Walks one file, turning leaves into SI numbers and remembering who published each."""

    def __init__(
        self,
        file: Any,
        where: str,
    ) -> None:
        self.file = file
        self.where = where
        self.claims: dict[str, PublishedClaim] = {}
        self.unknown: dict[str, str] = {}

    def read_gpu(self, name: str) -> Gpu:
        file = self.file
        groups = defaultdict[str, dict[str, Any]](dict)
        for key, row in _NUMBERS.items():
            group, _, last = row["field"].rpartition(".")
            place = (key, row["unit"], row["field"])
            leaf = attrgetter(key)(file)
            groups[group][last] = self.number(leaf, *place, needed=bool(row["needed"]))
        sm_count = groups[""]["sm_count"]
        if not sm_count.is_integer():
            raise bad_value(f"{self.where}: sm_count", "a whole number", sm_count)
        memory_hz = []
        for i, leaf in enumerate(file.clocks.memory):
            key = f"clocks.memory[{i}]"
            memory_hz.append(
                self.number(
                    leaf,
                    key,
                    "Hz",
                    f"clocks.memory_hz[{i}]",
                    needed=True,
                )
            )
        return Gpu(
            name=name,
            title=file.title,
            vendor=file.vendor,
            architecture=file.architecture,
            compute_capability=file.compute_capability,
            use=file.use,
            process=self.text(file.process, "process"),
            sm_count=sm_count,
            pipes=chip.Pipes(
                self.rates(file.pipes.tensor_per_cycle_sm, "pipes.tensor"),
                self.rates(file.pipes.cuda_per_cycle_sm, "pipes.cuda"),
                **groups["pipes"],
            ),
            sm=chip.Sm(**groups["sm"]),
            l2=chip.L2Cache(**groups["l2"]),
            memory=chip.DeviceMemory(
                kind=self.text(file.memory.kind, "memory.kind"), **groups["memory"]
            ),
            links=chip.Links(**groups["links"]),
            clocks=chip.ClockRange(**groups["clocks"], memory_hz=tuple(memory_hz)),
            power=chip.PowerSpec(
                **groups["power"],
                idle_w=self.curve(file.power.idle, "power.idle", "W", "power.idle_w"),
                voltage_v=self.curve(file.power.voltage, "power.voltage", "V", "power.voltage_v"),
            ),
            claims=self.claims,
            unknown=self.unknown,
        )

    def rates(
        self,
        leaves: dict[str, _Leaf],
        key: str,
    ) -> dict[Dtype, Any]:
        """Return rates per cycle and SM by number format."""
        rates = {}
        for name, leaf in leaves.items():
            if name not in list(Dtype):
                expected = f"formats among {', '.join(Dtype)}"
                raise bad_value(f"{self.where}: {key}_per_cycle_sm", expected, name)
            unit = "op/cycle" if name.startswith("int") else "flop/cycle"
            field = f"{key}_flop_per_cycle.{name}"
            rates[Dtype.parse(name)] = self.number(
                leaf,
                f"{key}_per_cycle_sm.{name}",
                unit,
                field,
                needed=True,
            )
        if key == "pipes.cuda" and Dtype.FP32 not in rates:
            expected = "the rate of fp32, to which all others are compared"
            raise bad_value(f"{self.where}: {key}_per_cycle_sm", expected, "none")
        return rates

    def number(
        self,
        leaf: _Leaf,
        key: str,
        unit: str,
        field: str,
        needed: bool = False,
    ) -> Any:
        """Return a number above zero, or None where nobody published it."""
        if self.published(leaf, key, field) is None:
            if needed:
                hint = "Without it nothing can be predicted."
                raise bad_value(f"{self.where}: {key}", "a value", "unknown", hint)
            return None
        disputed = [(dispute.value, f"{self.where}: {key}.disputed") for dispute in leaf.disputed]
        for text, where in (*disputed, (leaf.value, f"{self.where}: {key}")):
            value = units.parse(text, unit, where)
            if value <= 0:
                raise bad_value(where, "a number above zero", text)
            low, high = _RANGES[unit]
            if not low <= value <= high:
                raise bad_value(where, f"from {low:g} to {high:g} {unit}".rstrip(), text)
        return value

    def text(
        self,
        leaf: _Leaf,
        key: str,
    ) -> str:
        value = self.published(leaf, key, key)
        return "unknown" if value is None else str(value)

    def curve(
        self,
        leaf: _CurveLeaf,
        key: str,
        unit: str,
        field: str,
    ) -> ClockCurve | None:
        if self.published(leaf, key, field) is None:
            return None
        if len(leaf.clock) != len(leaf.value):
            expected = f"{len(leaf.clock)} values, one a clock"
            raise bad_value(f"{self.where}: {key}", expected, len(leaf.value))
        clocks_hz = self._parse_all(leaf.clock, "Hz", f"{key}.clock")
        values = self._parse_all(leaf.value, unit, f"{key}.value")
        low, high = _RANGES[unit]
        for value in values:
            if not low <= value <= high:
                expected = f"from {low:g} to {high:g} {unit}"
                raise bad_value(f"{self.where}: {key}.value", expected, value)
        are_rising = all(earlier < later for earlier, later in pairwise(clocks_hz))
        are_possible = 0.0 < clocks_hz[0] <= clocks_hz[-1] <= _RANGES["Hz"][1]
        if not (are_rising and are_possible):
            raise bad_value(f"{self.where}: {key}.clock", "rising clocks", ", ".join(leaf.clock))
        return ClockCurve(np.array(clocks_hz), np.array(values))

    def _parse_all(
        self,
        texts: list[str],
        unit: str,
        key: str,
    ) -> list[float]:
        numbers = []
        for i, text in enumerate(texts):
            numbers.append(units.parse(text, unit, f"{self.where}: {key}[{i}]"))
        return numbers

    def published(
        self,
        leaf: _Leaf | _CurveLeaf,
        key: str,
        field: str,
    ) -> Any:
        """Return the value of a leaf, remembering who published it and who says otherwise.

        It is None where the leaf gives the reason why nobody published it.
        """
        has_value = leaf.value not in (None, [])
        where = f"{self.where}: {key}"
        if bool(leaf.unknown) == has_value:
            problem = "both" if leaf.unknown else "neither"
            raise bad_value(where, "either a value or `unknown: why`", problem)
        if leaf.unknown:
            self.unknown[field] = leaf.unknown
            return None
        if not leaf.source:
            raise bad_value(where, "a source beside the value", "none")
        statements = []
        for dispute in leaf.disputed if isinstance(leaf, _Leaf) else ():
            source = self.cite(dispute.source, f"{key}.disputed")
            statements.append((str(dispute.value), source))
        source = self.cite(leaf.source, key)
        self.claims[field] = PublishedClaim(source, leaf.note, tuple(statements))
        return leaf.value

    def cite(
        self,
        source: str,
        key: str,
    ) -> str:
        if source not in self.file.sources:
            expected = f"one of {', '.join(self.file.sources)}"
            raise bad_value(f"{self.where}: {key}.source", expected, source)
        return str(self.file.sources[source])


class _NodeLeaf(_Leaf):
    value: str | float | int | bool | None = None


class _NodeFile(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    sources: dict[str, str]
    gpu_count: _NodeLeaf
    fabric: _NodeLeaf
    multicast: _NodeLeaf
    network: _NodeLeaf
    network_per_gpu: _NodeLeaf
    gpus: list[str] = []
    switch_gpus: _NodeLeaf | None = None
    socket_gpus: _NodeLeaf | None = None
    socket_link: _NodeLeaf | None = None
    timed: _NodeLeaf | None = None


def node_names() -> list[str]:
    """Return the names of the nodes in the catalogue."""
    return _list_files("nodes")


@cache
def load_node(name: str) -> Node:
    """Return the catalogue node of that name (case, ``-``, ``_``, ``.`` and blanks do not
    matter).
    """
    catalogue_name = errors.resolve_name("node", name, node_names(), {})
    return load_node_file(files("wattcast.hardware").joinpath("nodes", f"{catalogue_name}.yaml"))


def load_node_file(path: Path) -> Node:
    """Return a node from a user's own YAML file like the catalogue's; its name is the file's."""
    return parse_node(read_bytes(path, MAX_NODE_FILE_BYTE), path.stem, path.name)


@cache
def node_of_gpu(gpu: str) -> Node:
    """Return the node that a catalogue GPU is usually built into, else a box of PCIe cards."""
    chip_name = strip_board(gpu)
    for name in node_names():
        node = load_node(name)
        if chip_name in node.gpus:
            return node
    return load_node("pcie-box")


def parse_node(
    data: bytes,
    name: str,
    where: str,
) -> Node:
    """Return the node that the bytes of a node file describe; each value stands with its source."""
    file = decode_yaml(data, _NodeFile, where)
    reader = _Reader(file, where)

    def read(key: str) -> Any:
        return reader.published(getattr(file, key), key, key)

    count = read("gpu_count")
    fabric = read("fabric")
    multicast = read("multicast")
    rate = read("network_per_gpu")
    if type(count) is not int or not 1 <= count <= MOST_NODE_GPUS:
        expected = f"a whole number of GPUs, 1 to {MOST_NODE_GPUS}"
        raise bad_value(f"{where}: gpu_count", expected, count)
    if fabric not in list(Fabric):
        raise bad_value(f"{where}: fabric", f"one of {', '.join(Fabric)}", fabric)
    return Node(
        name=name,
        title=file.title,
        gpus=tuple(file.gpus),
        gpu_count=count,
        fabric=Fabric(fabric),
        multicast=multicast is True,
        network=str(read("network") or "none"),
        network_byte_per_s=_parse_node_rate(rate, f"{where}: network_per_gpu"),
        claims=reader.claims,
        **_read_pcie_tree(file, reader, count),
    )


def _read_pcie_tree(
    file: _NodeFile,
    reader: _Reader,
    count: int,
) -> dict[str, Any]:
    """Return how PCIe joins the cards of a node, as far as its file says so."""
    tree: dict[str, Any] = {}
    for key in ("switch_gpus", "socket_gpus"):
        leaf = getattr(file, key)
        value = None if leaf is None else reader.published(leaf, key, key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= count:
            expected = f"a whole number of cards, 1 to {count}"
            raise bad_value(f"{reader.where}: {key}", expected, value)
        tree[key] = value
    if file.socket_link is not None:
        rate = reader.published(file.socket_link, "socket_link", "socket_link")
        tree["socket_byte_per_s"] = _parse_node_rate(rate, f"{reader.where}: socket_link")
    if file.timed is not None:
        tree["is_timed"] = reader.published(file.timed, "timed", "timed") is True
    return tree


def _parse_node_rate(rate: str | None, where: str) -> float | None:
    if rate is None:
        return None
    byte_per_s = units.parse(rate, "byte/s", where)
    low, high = _RANGES["byte/s"]
    if not low <= byte_per_s <= high:
        raise bad_value(where, f"from {low:g} to {high:g} byte/s", byte_per_s)
    return byte_per_s
