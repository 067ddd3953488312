"""What the vendor says a chip is, and how it is set."""

from wattcast.hardware.gpu import Gpu
from wattcast.hardware.operating_point import OperatingPoint
from wattcast.hardware.read import load, load_file, names

__all__ = ["Gpu", "OperatingPoint", "load", "load_file", "names"]
