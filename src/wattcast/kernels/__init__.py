"""Graph -> Kernels."""

from wattcast.kernels.lower import lower
from wattcast.kernels.table import Kernels

__all__ = ["Kernels", "lower"]
