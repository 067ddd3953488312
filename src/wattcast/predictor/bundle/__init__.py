"""What was fitted, one bundle a device; and the forecast for a device nobody measured."""

from __future__ import annotations

from wattcast.hardware import Gpu
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.bundle.forecast import forecast_bundle, forecast_rule, starting_bundle

__all__ = ["Bundle", "bundle_for", "forecast_bundle", "shipped_bundle", "starting_bundle"]


def bundle_for(gpu: Gpu) -> Bundle:
    """The measured bundle that ships for this GPU, else its forecast, with the calibration that ships if one does."""
    return fitted_bundle(gpu) or forecast_bundle(gpu)


def fitted_bundle(gpu: Gpu) -> Bundle | None:
    """The bundle that rests on measurements of this very GPU; None: it is forecast."""
    found = shipped_bundle(gpu.name)
    if found is None and gpu.compute_capability in forecast_rule().same_processor:
        from wattcast.predictor.bundle.calibrated import calibrated_bundle  # few GPUs have one

        found = calibrated_bundle(gpu)
    return found
