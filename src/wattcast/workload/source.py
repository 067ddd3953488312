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
from wattcast.workload.models import Model, aliases
from wattcast.workload.options import Options


def load(workload: str | Path | Graph | Model | Mapping[str, object], options: Options) -> Graph:
    """The operators of a workload. ``options`` matter to models; an operator list is taken as it is.

    A file is told by what is in it: workload JSON, an EnergAIzer list, a Hugging Face
    configuration, a PyTorch profiler trace; or by its ending: ``.onnx``, ``.json.gz`` (a trace).
    """
    if isinstance(workload, Graph):
        return workload
    if isinstance(workload, Model):
        return build(workload, options)
    if isinstance(workload, Mapping):
        return _from_bytes(msgspec.json.encode(dict(workload)), Path("workload"), options)
    if isinstance(workload, Path) or _looks_like_a_file(workload):
        return _from_file(Path(workload), options)
    return build(workload, options)


def _looks_like_a_file(name: str) -> bool:
    if name.lower().endswith((".json", ".json.gz", ".onnx")):
        return True
    return ("/" in name or "\\" in name) and name not in aliases()


def _from_file(path: Path, options: Options) -> Graph:
    name = path.name.lower()
    if name.endswith(".onnx"):
        from wattcast.workload import from_onnx

        return _plain(from_onnx.read(path), path, options)
    if name.endswith(".gz"):
        from wattcast.workload import from_profiler

        return _plain(from_profiler.read(path).graph, path, options)
    return _from_bytes(read_bytes(path), path, options)


def _from_bytes(data: bytes, path: Path, options: Options) -> Graph:
    keys = _keys(data)
    if "model_type" in keys or "architectures" in keys:
        from wattcast.workload import from_huggingface

        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return build(from_huggingface.parse(data, path.name, name), options)
    if "traceEvents" in keys:
        from wattcast.workload import from_profiler

        return _plain(from_profiler.parse(data, path.name).graph, path, options)
    return _plain(from_json.parse(data, path.name), path, options)


def _plain(graph: Graph, path: Path, options: Options) -> Graph:
    if options != Options():
        raise bad_value(
            path.name, "no model options beside a list of operators", "some", "The list states its own sizes."
        )
    return graph


class _Keys(msgspec.Struct):
    model_type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    architectures: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    traceEvents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _keys(data: bytes) -> set[str]:
    """Which telling keys a JSON object has; none where it is not one (the readers will say why)."""
    if data.lstrip()[:1] != b"{":
        return set()
    try:
        found = msgspec.json.decode(data, type=_Keys)
    except (msgspec.DecodeError, RecursionError):
        return set()
    return {name for name in _Keys.__struct_fields__ if getattr(found, name) is not msgspec.UNSET}
