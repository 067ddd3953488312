"""Graph -> Kernels."""

from wattcast.kernels.lower import kernels_of, lower, lower_many, reference_of
from wattcast.kernels.table import Kernels
from wattcast.kernels.work import Condition, Reference, Style

__all__ = ["Condition", "Kernels", "Reference", "Style", "kernels_of", "lower", "lower_many", "reference_of"]
