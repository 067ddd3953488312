"""What was fitted, one bundle a device; and the forecast for a device nobody measured."""

from wattcast.fitted.bundle import Bundle, fitted
from wattcast.fitted.forecast import forecast
from wattcast.fitted.provisional import provisional
from wattcast.hardware import Gpu

__all__ = ["Bundle", "bundle_for", "fitted", "forecast", "provisional"]


def bundle_for(gpu: Gpu) -> Bundle:
    """The shipped bundle of this GPU, or a forecast."""
    return fitted(gpu.name) or forecast(gpu)
