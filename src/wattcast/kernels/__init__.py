"""Graph -> Kernels."""

from wattcast.kernels.lower import kernels_of, lower, reference_of
from wattcast.kernels.table import Kernels
from wattcast.kernels.work import Condition, Reference

__all__ = ["Condition", "Kernels", "Reference", "kernels_of", "lower", "reference_of"]
