"""Wattcast: how fast a GPU workload runs and how many watts and joules it takes, before anyone runs
it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from wattcast.calibrate.calibration_rows import calibrate as calibrate
    from wattcast.explore.explorations import explore as explore
    from wattcast.hardware import Gpu as Gpu
    from wattcast.hardware import OperatingPoint as OperatingPoint
    from wattcast.hardware import gpus as gpus
    from wattcast.hardware import load_gpu as load_gpu
    from wattcast.measure.measured_run import measure as measure
    from wattcast.predictor.api import predict as predict
    from wattcast.predictor.api import predict_many as predict_many
    from wattcast.predictor.prediction import Prediction as Prediction
    from wattcast.report.comparison_sides import compare as compare
    from wattcast.serving.capacity_plan import plan as plan
    from wattcast.serving.simulate_serving import simulate as simulate
    from wattcast.training.train_job import train as train
    from wattcast.workload.graph import Graph as Graph
    from wattcast.workload.model_catalogue import models as models
    from wattcast.workload.readers.from_torch import capture as capture

_HOMES = {  # name -> the module it lives in; the verbs are those of the command line
    "Gpu": "hardware",
    "Graph": "workload.graph",
    "OperatingPoint": "hardware",
    "Prediction": "predictor.prediction",
    "calibrate": "calibrate",
    "capture": "workload.readers.from_torch",
    "compare": "report.comparison_sides",
    "explore": "explore",
    "gpus": "hardware",
    "load_gpu": "hardware",
    "measure": "measure",
    "models": "workload.model_catalogue",
    "plan": "serving.capacity_plan",
    "predict": "predictor.api",
    "predict_many": "predictor.api",
    "simulate": "serving.simulate_serving",
    "train": "training.train_job",
}
__all__ = list(_HOMES)


class VerbPackage(ModuleType):
    """A package that is called like its verb: ``wattcast.explore(...)`` is
    ``wattcast.explore.explore(...)``.

    Importing a submodule sets ``wattcast.explore`` to the package, so the package itself has to
    answer (docs/decisions/0007-verbs-and-packages.md)."""

    def __call__(
        self,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Call the function that has the package's name."""
        return self._verb(*args, **options)

    @property
    def _verb(self) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._verb)


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: ``import wattcast`` itself costs next to
    nothing.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'wattcast' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"wattcast.{_HOMES[name]}")
    return module if isinstance(module, VerbPackage) else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
