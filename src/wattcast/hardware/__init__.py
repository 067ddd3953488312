"""What the vendor says a chip is, and how it is set."""

from wattcast.hardware.catalogue_reader import (
    gpu_names,
    gpus,
    load_gpu,
    load_gpu_file,
    node_of_gpu,
    strip_board,
)
from wattcast.hardware.gpu import (
    DEFAULT_TEMPERATURE_C,
    Gpu,
    Node,
    OperatingPoint,
)

__all__ = ["DEFAULT_TEMPERATURE_C", "Gpu", "Node", "OperatingPoint"]
__all__ += ["gpu_names", "gpus", "load_gpu", "load_gpu_file", "node_of_gpu", "strip_board"]
