"""What was fitted, one bundle a device."""

from wattcast.fitted.bundle import Bundle, fitted
from wattcast.fitted.provisional import provisional
from wattcast.hardware import Gpu

__all__ = ["Bundle", "bundle_for", "fitted", "provisional"]


def bundle_for(gpu: Gpu) -> Bundle:
    """The shipped bundle of this GPU, or the provisional rule's."""
    return fitted(gpu.name) or provisional(gpu)
