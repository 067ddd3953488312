"""What was fitted, one bundle per device, and the forecast for a device that nobody measured."""

from __future__ import annotations

from dataclasses import replace

from wattcast.core import files
from wattcast.core.strict_files import FitStatus
from wattcast.hardware import Gpu, strip_board
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.bundle.forecast import forecast_bundle, forecast_rule

__all__ = ["Bundle", "bundle_for", "fit_status", "forecast_bundle", "shipped_bundle"]


def bundle_for(gpu: Gpu) -> Bundle:
    """Return the measured bundle that ships for this GPU, else its forecast, with the calibration
    that ships if one does.
    """
    if gpu.engine not in ("", "vllm"):
        # few runs name an engine
        from wattcast.kernels.kernel_table import ENGINE_OF_2025
        from wattcast.predictor.bundle.calibrated import engine_bundle, pad_experts

        if gpu.engine == ENGINE_OF_2025:
            return pad_experts(bundle_for(replace(gpu, engine="")), gpu)
        return engine_bundle(gpu)
    if gpu.board:
        # few GPUs have boards of their own
        from wattcast.predictor.bundle.calibrated import shipped_board_bundle

        return shipped_board_bundle(gpu.name, gpu.board)
    measured = shipped_bundle(gpu.name)
    if measured is not None:
        return measured
    calibrated = None
    if gpu.compute_capability in forecast_rule().same_processor:
        from wattcast.predictor.bundle.calibrated import calibrated_bundle  # few GPUs have one

        calibrated = calibrated_bundle(gpu)
    return calibrated or forecast_bundle(gpu)


def fit_status(gpu: str) -> FitStatus:
    """Return the status of a catalogue GPU's bundle from the file that ships for it, without
    reading it.
    """
    folder = files("wattcast.predictor.bundle").joinpath(strip_board(gpu))
    if folder.joinpath("bundle.json").is_file():
        return FitStatus.MEASURED
    if folder.joinpath("calibration.yaml").is_file():
        return FitStatus.CALIBRATED
    return FitStatus.FORECAST
