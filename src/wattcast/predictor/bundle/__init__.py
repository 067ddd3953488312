"""What was fitted, one bundle a device; and the forecast for a device nobody measured."""

from __future__ import annotations

from wattcast.hardware import Gpu
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.bundle.forecast import forecast_bundle, starting_bundle

__all__ = ["Bundle", "bundle_for", "forecast_bundle", "shipped_bundle", "starting_bundle"]


def bundle_for(gpu: Gpu) -> Bundle:
    """The shipped bundle of this GPU, or a forecast."""
    return shipped_bundle(gpu.name) or forecast_bundle(gpu)
