"""Define what may be asked over HTTP, as strict structs from which the OpenAPI schema is made.

No field names a file: models and GPUs are catalogue names, and an upload travels inside the request.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from wattcast import hardware
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import decode_json
from wattcast.core.units import Dtype
from wattcast.report.figure_style import ENDINGS
from wattcast.report.prediction_figures import FIGURES
from wattcast.workload import model_catalogue
from wattcast.workload.model_options import (
    KV_DTYPES,
    RECIPES,
    RUNNABLE_DTYPES,
    WEIGHT_ONLY,
    AttentionMode,
    ModelOptions,
    OutputHead,
    SoftwareStack,
    WorkloadPhase,
)

MOST_BYTE = 2 << 20  # of a request; a configuration is a few kilobytes, an operator list some hundred
MOST_DEPTH = 32  # of an upload's nesting
MOST_ITEMS = 300_000  # brackets of an upload: entries it may hold
MOST_CONFIGURATIONS = 4

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Gpus = Annotated[int, Meta(ge=1, le=4096)]


def _one_of(names: Any) -> Meta:
    return Meta(extra_json_schema={"enum": [str(name) for name in names]}, max_length=64)


DATA = ("random", "zeros", "ones", "relu")


class Upload(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a config.json, a workload file, an EnergAIzer list or a profiler trace."""

    name: Annotated[str, Meta(max_length=120)]  # a label, never a path
    content: msgspec.Raw


class Configuration(msgspec.Struct, forbid_unknown_fields=True):
    """One workload on one GPU. Left out is the default; numbers are SI."""

    gpu: Annotated[str, _one_of(hardware.gpu_names())]
    model: Annotated[str, _one_of(model_catalogue.list_models())] | None = None
    file: Upload | None = None
    batch: Count = 1
    seq: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    tokens: Count | None = None
    phase: Annotated[str, _one_of(WorkloadPhase)] | None = None
    dtype: Annotated[str, _one_of(RUNNABLE_DTYPES)] = str(Dtype.BF16)
    attention: Annotated[str, _one_of(AttentionMode)] = str(AttentionMode.FLASH)
    head: Annotated[str, _one_of(OutputHead)] | None = None
    stack: Annotated[str, _one_of(SoftwareStack)] | None = None
    tp: Gpus = 1
    pp: Gpus = 1
    dp: Gpus = 1
    ep: Gpus = 1
    cp: Gpus = 1
    skew: Annotated[float, Meta(ge=0, le=1)] = 0.0
    recompute: bool = False
    image: Annotated[int, Meta(ge=1, le=16384)] | None = None
    quantization: Annotated[str, _one_of(RECIPES)] | None = None
    weights: Annotated[str, _one_of(WEIGHT_ONLY)] | None = None
    kv_dtype: Annotated[str, _one_of(KV_DTYPES)] | None = None
    clock_hz: Annotated[float, Meta(gt=0, le=1e10)] | None = None
    power_limit_w: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    host_launch_s: Annotated[float, Meta(ge=0, le=1)] | None = None
    temperature_c: Annotated[float, Meta(ge=0, le=110)] | None = None
    duration_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    data: Annotated[str, _one_of(DATA)] = "random"

    def options(self) -> ModelOptions:
        """Return the options of the model."""
        given = {name: getattr(self, name) for name in ModelOptions.__dataclass_fields__}
        return ModelOptions(**given)


class ConfigurationList(msgspec.Struct, forbid_unknown_fields=True):
    """Up to four configurations, in order."""

    configurations: Annotated[list[Configuration], Meta(min_length=1, max_length=MOST_CONFIGURATIONS)]


class FigureRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One figure; only ``clocks`` draws more than the first configuration."""

    configurations: Annotated[list[Configuration], Meta(min_length=1, max_length=MOST_CONFIGURATIONS)]
    figure: Annotated[str, _one_of(FIGURES)] = "breakdown"
    format: Annotated[str, _one_of(ENDINGS)] = "svg"


def read_request(data: bytes, kind: type[Any]) -> Any:
    """Read a request's body, or raise an error that names the bad key."""
    if len(data) > MOST_BYTE:
        raise bad_value("request", f"at most {MOST_BYTE} bytes", f"{len(data)} bytes")
    return decode_json(data, kind, "request")


_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def check_nesting(content: bytes, where: str) -> None:
    """Refuse an upload that is nested too deeply or holds too much, before anything is built from it."""
    depth = opened = 0
    for found in _BRACKET.finditer(content):
        mark = found[0]
        if mark in (b"[", b"{"):
            depth += 1
            opened += 1
        elif mark in (b"]", b"}"):
            depth -= 1
        if depth > MOST_DEPTH:
            raise bad_value(where, f"at most {MOST_DEPTH} levels of nesting", "more")
        if opened > MOST_ITEMS:
            raise bad_value(where, f"at most {MOST_ITEMS} lists and objects", "more")
