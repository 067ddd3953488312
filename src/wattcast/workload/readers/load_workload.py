"""Whatever a user calls a workload -> Graph.

It may be a model's name, a file, a mapping, or a Graph itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from wattcast.core import bad_value, unknown_name
from wattcast.core.errors import fold_name
from wattcast.core.strict_files import read_bytes
from wattcast.workload.build_model import build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import (
    ModelSpec,
    load_aliases,
    load_model,
)
from wattcast.workload.model_options import ModelOptions

Workload: TypeAlias = str | Path | Graph | ModelSpec | Mapping[str, object]

LONGEST_NAME = 4096  # of a path, on any system we know
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.gz)(?<!\.onnx)")
# Python writes Infinity into JSON, as in the limits of Mamba's time steps.
_INFINITE = re.compile(rb"(?<=[\[,:\s])Infinity(?=[\],}\s])")


def load_workload(workload: Workload, options: ModelOptions) -> Graph:
    """Return the operators of a workload. ``options`` matter to models; an operator list is taken
    as it is.

    A file is recognised by its content: workload JSON, an EnergAIzer list, a Hugging Face
    configuration, a PyTorch profiler trace; or by its ending: ``.onnx``, ``.json.gz`` (a trace).
    """
    if isinstance(workload, Graph):
        return workload
    is_name = isinstance(workload, str) and not _looks_like_a_file(workload)
    if isinstance(workload, ModelSpec):
        return build_graph(workload, options)
    if is_name:
        return build_graph(str(workload), options)

    path, data = _read_content(find_cached(workload))
    model = _find_configured_model(path, data)
    if model is not None:
        return build_graph(model, options)
    graph = _read_operators(path, data)
    if options != ModelOptions():
        expected = "no model options beside a list of operators"
        raise bad_value(path.name, expected, "some", "The list states its own sizes.")
    return graph


def _read_operators(path: Path, data: bytes) -> Graph:
    """Read a file that is no model; ``data`` is empty where only the path tells what it is."""
    name = path.name.lower()
    if name.endswith(".onnx"):
        from wattcast.workload.readers.from_onnx import read_onnx

        return read_onnx(path)
    if name.endswith(".gz") or _find_keys(data, "traceEvents"):
        from wattcast.workload.readers.from_profiler import parse_profile, read_profile

        return parse_profile(data, path.name) if data else read_profile(path)
    from wattcast.workload.readers.from_json import parse_workload

    return parse_workload(data, path.name)


def capture_workload(
    module: Any,
    inputs: Any,
    options: Mapping[str, Any],
) -> Graph:
    """Capture a module; of the options only the phase has a meaning, and only that of training."""
    if not callable(module) or inputs is None:
        expected = "a torch.nn.Module with inputs=..., or a model's name, file or Graph without"
        with_inputs = "without" if inputs is None else "with"
        raise bad_value("workload", expected, f"{type(module).__name__} {with_inputs} inputs")
    phase = options.get("phase")
    has_others = {**options, "phase": "train"} != {"phase": "train"}
    if has_others or phase not in (None, "forward", "train"):
        advice = "A module states its own sizes and formats; phase may be forward or train."
        raise bad_value("options", "none beside a module", ", ".join(options), advice)
    from wattcast.workload.readers.from_torch import capture

    return capture(module, inputs, train=phase == "train")


def find_model(workload: Workload) -> ModelSpec | None:
    """Return the model behind a workload, or None where it is a list of operators and has none."""
    if isinstance(workload, (Graph, ModelSpec)):
        return workload if isinstance(workload, ModelSpec) else None
    if isinstance(workload, str) and not _looks_like_a_file(workload):
        return load_model(workload)
    return _find_configured_model(*_read_content(find_cached(workload)))


def find_cached(workload: Workload) -> Workload:
    """Return the configuration that a Hugging Face id names in the local cache; anything else as it
    is.

    ``meta-llama/Llama-3.1-8B-Instruct`` is in the catalogue; an id that is not is looked up where
    the Hugging Face libraries keep what they downloaded (``HF_HUB_CACHE``, ``HF_HOME/hub`` or
    ``~/.cache/huggingface/hub``)."""
    if isinstance(workload, str) and len(workload) > LONGEST_NAME:
        raise bad_value("workload", f"a name of at most {LONGEST_NAME} characters", workload)
    if isinstance(workload, (str, Path)) and Path(workload).is_dir():
        return Path(workload) / "config.json"
    if not (isinstance(workload, str) and _HUB_ID.fullmatch(workload)) or Path(workload).exists():
        return workload
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = f"models--{workload.replace('/', '--')}"
    configs = sorted(cache.glob(f"{folder}/snapshots/*/config.json"))
    if configs:
        return max(configs, key=lambda path: path.stat().st_mtime)
    advice = (
        f"It is neither in the catalogue nor in {cache}. Fetch its sizes with "
        f"`hf download {workload} config.json`, or give a config.json, or a model of the same "
        "sizes (`wattcast models`)."
    )
    raise unknown_name("model", workload, load_aliases(), advice)


def _find_configured_model(path: Path, data: bytes) -> ModelSpec | None:
    """Return the model of a Hugging Face configuration or of a file of sizes, else None."""
    if _find_keys(data, "architecture", "dims") == {"architecture", "dims"}:
        from wattcast.workload.readers.from_json import parse_sizes

        return parse_sizes(data, path)
    if not _find_keys(data, "model_type", "architectures"):
        return None
    from wattcast.workload.readers.from_huggingface import name_model, parse_huggingface

    return parse_huggingface(data, path.name, name_model(path))


def _looks_like_a_file(name: str) -> bool:
    if name.lower().endswith((".json", ".json.gz", ".onnx")):
        return True
    if "/" not in name and "\\" not in name:
        return False
    return fold_name(name) not in {fold_name(alias) for alias in load_aliases()}


def _read_content(workload: Workload) -> tuple[Path, bytes]:
    """Return the path of a file or mapping and its JSON.

    The JSON is empty where only the path tells what it is.
    """
    if isinstance(workload, Mapping):
        return Path("workload"), msgspec.json.encode(dict(workload))
    assert isinstance(workload, (str, Path))
    path = Path(workload)
    if path.name.lower().endswith((".onnx", ".gz")):
        return path, b""
    data = read_bytes(path)
    if b"Infinity" in data:
        data = _INFINITE.sub(b"1e300", data)
    return path, data


def _find_keys(data: bytes, *names: str) -> set[str]:
    """Return which names are keys of a JSON object.

    There are none where the data is not an object; the readers will say why.
    """
    # A long list takes a while to decode, and has none of the names
    if not any(name.encode() in data for name in names):
        return set()
    try:
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, RecursionError):
        return set()
    return set(names) & keys
