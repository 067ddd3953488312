"""Whatever a user calls a workload -> Graph: a model's name, a file, a mapping, or a Graph itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from wattcast.errors import bad_value
from wattcast.files import read_bytes
from wattcast.workload import from_json
from wattcast.workload.build import build
from wattcast.workload.graph import Graph
from wattcast.workload.options import Options


def load(workload: str | Path | Graph | Mapping[str, object], options: Options) -> Graph:
    """The operators of a workload. ``options`` matter to models; an operator list is taken as it is."""
    if isinstance(workload, Graph):
        return workload
    if isinstance(workload, Mapping):
        return _from_bytes(msgspec.json.encode(dict(workload)), "workload", options)
    if isinstance(workload, Path) or _looks_like_a_file(workload):
        path = Path(workload)
        return _from_bytes(read_bytes(path), path.name, options)
    return build(workload, options)


def _looks_like_a_file(name: str) -> bool:
    return name.lower().endswith(".json") or "/" in name or "\\" in name


def _from_bytes(data: bytes, where: str, options: Options) -> Graph:
    built = from_json.parse(data, where)
    if options != Options():
        raise bad_value(
            where, "no model options beside a list of operators", "some", "The list states its own sizes."
        )
    return built
