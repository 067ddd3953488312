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
from wattcast.workload.models import load as named
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


def find_model(workload: str | Path | Graph | Model | Mapping[str, object]) -> Model | None:
    """The model behind a workload, or None where it is a list of operators and has none."""
    if isinstance(workload, (Graph, Model)):
        return workload if isinstance(workload, Model) else None
    if isinstance(workload, str) and not _looks_like_a_file(workload):
        return named(workload)
    if isinstance(workload, Mapping):
        return _configured(msgspec.json.encode(dict(workload)), Path("workload"))
    path = Path(workload)
    if path.name.lower().endswith((".onnx", ".gz")):
        return None
    return _configured(read_bytes(path), path)


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
    model = _configured(data, path)
    if model is not None:
        return build(model, options)
    if "traceEvents" in _keys(data):
        from wattcast.workload import from_profiler

        return _plain(from_profiler.parse(data, path.name).graph, path, options)
    return _plain(from_json.parse(data, path.name), path, options)


def _configured(data: bytes, path: Path) -> Model | None:
    """The model of a Hugging Face configuration, or None where the data is something else."""
    if not _keys(data) & {"model_type", "architectures"}:
        return None
    from wattcast.workload import from_huggingface

    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return from_huggingface.parse(data, path.name, name)


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
