"""Operators of the catalogue's models, with the share of time each takes: what predictions are asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wattcast import api
from wattcast.errors import WattcastError
from wattcast.workload import models
from wattcast.workload.architectures import Kind
from wattcast.workload.graph import Operator

_Runs = tuple[dict[str, Any], ...]
LANGUAGE: _Runs = (
    {"batch": 4, "phase": "prefill"},
    {"batch": 16, "phase": "decode"},
    {"batch": 4, "attention": "eager"},
    {"batch": 64, "phase": "decode"},
    {"batch": 4, "phase": "train", "seq": 512},
)
VISION: _Runs = ({"batch": 1}, {"batch": 32}, {"batch": 128}, {"batch": 32, "phase": "train"})
ENCODER: _Runs = ({"batch": 16}, {"batch": 16, "attention": "eager"}, {"batch": 16, "phase": "train"})


@dataclass(frozen=True)
class ModelOperator:
    """An operator, the share of one run's time in kernels it is predicted to take, and the run."""

    op: Operator
    share: float
    run: str


def operators_of_models(gpu: str, tell: Callable[[str], None]) -> list[ModelOperator]:
    """Every operator of every model and run; the shares of a run add up to one."""
    found = []
    for name in models.names():
        kind = models.load(name).kind
        for options in {Kind.VISION: VISION, Kind.ENCODER: ENCODER}.get(kind, LANGUAGE):
            try:
                p = api.predict(name, gpu, host_launch=0.0, **options)
            except WattcastError as error:  # a model that knows no such phase
                tell(f"{name}: {error}")
                continue
            found += [ModelOperator(o.op, float(o.latency_s) / float(p.busy_s), p.name) for o in p.ops]
    return found
