"""Nodes: how many GPUs stand together, the fabric between them, and the network beyond it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from wattcast.core import errors, units
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import PublishedClaim, decode_yaml, read_bytes

MAX_NODE_FILE_BYTE = 1 << 16


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
    claims: dict[str, PublishedClaim] = field(default_factory=dict, repr=False, compare=False)


class _Leaf(msgspec.Struct, forbid_unknown_fields=True):
    value: str | float | int | bool | None = None
    source: str = ""
    note: str = ""
    unknown: str = ""


class _NodeFile(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    sources: dict[str, str]
    gpu_count: _Leaf
    fabric: _Leaf
    multicast: _Leaf
    network: _Leaf
    network_per_gpu: _Leaf
    gpus: list[str] = []


def node_names() -> list[str]:
    """Return the names of the nodes in the catalogue."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


@cache
def load_node(name: str) -> Node:
    """Return the catalogue node of that name (case, ``-``, ``_``, ``.`` and blanks do not matter)."""
    found = errors.resolve_name("node", name, node_names(), {})
    return parse_node(_folder().joinpath(f"{found}.yaml").read_bytes(), found, f"{found}.yaml")


def load_node_file(path: Path) -> Node:
    """Return a node from a user's own YAML file in the form of the catalogue; its name is the file's."""
    return parse_node(read_bytes(path, MAX_NODE_FILE_BYTE), path.stem, path.name)


def node_of_gpu(gpu: str) -> Node:
    """Return the node that a catalogue GPU is usually built into, else a box of PCIe cards."""
    return load_node(_homes().get(gpu, "pcie-box"))


@cache
def _homes() -> dict[str, str]:
    return {gpu: node.name for node in map(load_node, node_names()) for gpu in node.gpus}


def parse_node(data: bytes, name: str, where: str) -> Node:
    """Return the node that the bytes of a node file describe; each value stands with its source."""
    file = decode_yaml(data, _NodeFile, where)
    claims: dict[str, PublishedClaim] = {}

    def read(key: str) -> Any:
        leaf: _Leaf = getattr(file, key)
        if bool(leaf.unknown) == (leaf.value is not None):
            found = "both" if leaf.unknown else "neither"
            raise bad_value(f"{where}: {key}", "either a value or `unknown: why`", found)
        if leaf.unknown:
            return None
        if leaf.source not in file.sources:
            raise bad_value(f"{where}: {key}.source", f"one of {', '.join(file.sources)}", leaf.source)
        claims[key] = PublishedClaim(file.sources[leaf.source], leaf.note)
        return leaf.value

    count, fabric, multicast, rate = map(read, ("gpu_count", "fabric", "multicast", "network_per_gpu"))
    if type(count) is not int or count < 1:
        raise bad_value(f"{where}: gpu_count", "a whole number of GPUs", count)
    if fabric not in list(Fabric):
        raise bad_value(f"{where}: fabric", f"one of {', '.join(Fabric)}", fabric)
    rate = None if rate is None else units.parse(rate, "byte/s", f"{where}: network_per_gpu")
    network = str(read("network") or "none")
    return Node(name, file.title, tuple(file.gpus), count, Fabric(fabric), multicast is True, network, rate, claims)


def _folder() -> Any:
    return files("wattcast.hardware").joinpath("nodes")
