"""What the vendor says a chip is, and how it is set."""

from wattcast.hardware.catalogue_reader import gpu_names, gpus, load_gpu, load_gpu_file
from wattcast.hardware.gpu import Gpu, OperatingPoint

__all__ = ["Gpu", "OperatingPoint", "gpu_names", "gpus", "load_gpu", "load_gpu_file"]
