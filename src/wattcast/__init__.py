"""Wattcast: how fast a GPU workload runs and how many watts and joules it takes, before anyone runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
__all__ = [
    "Gpu",
    "Graph",
    "OperatingPoint",
    "Prediction",
    "capture",
    "load_gpu",
    "predict",
    "predict_many",
    "simulate",
    "train",
]

if TYPE_CHECKING:
    from wattcast.hardware import Gpu, OperatingPoint, load_gpu
    from wattcast.predictor.api import predict, predict_many
    from wattcast.predictor.prediction import Prediction
    from wattcast.serving.simulate_serving import simulate
    from wattcast.training.train_job import train
    from wattcast.workload.graph import Graph
    from wattcast.workload.readers.from_torch import capture

_HOMES = {
    "Gpu": ("wattcast.hardware", "Gpu"),
    "Graph": ("wattcast.workload.graph", "Graph"),
    "OperatingPoint": ("wattcast.hardware", "OperatingPoint"),
    "Prediction": ("wattcast.predictor.prediction", "Prediction"),
    "capture": ("wattcast.workload.readers.from_torch", "capture"),
    "load_gpu": ("wattcast.hardware", "load_gpu"),
    "predict": ("wattcast.predictor.api", "predict"),
    "predict_many": ("wattcast.predictor.api", "predict_many"),
    "simulate": ("wattcast.serving.simulate_serving", "simulate"),
    "train": ("wattcast.training.train_job", "train"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: ``import wattcast`` itself costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wattcast' has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
