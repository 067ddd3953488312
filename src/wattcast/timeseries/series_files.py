"""Write the power over time that a command asked for with ``--power-out``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wattcast.core import units
from wattcast.hardware import Gpu
from wattcast.options.power_series_options import PowerOutput
from wattcast.predictor.api import find_gpu
from wattcast.timeseries.power_curve import PowerCurve
from wattcast.timeseries.power_sensor import (
    SensorKind,
    read_sensor,
    sensor_window_s,
)
from wattcast.timeseries.power_series import (
    PowerSeries,
    check_series_path,
    sample_curves,
)

_LONGEST_LOG_S = 1.0  # grid, beyond which a mean and a sensor's reading hardly differ


def sample_as_asked(
    curves: Sequence[PowerCurve],
    output: PowerOutput,
    gpu: str | Gpu,
    length_s: float,
) -> PowerSeries:
    """Return curves on the grid that was asked for, with the sensor that was asked for."""
    if output.power_span_s is not None:
        length_s = min(length_s, output.power_span_s)
    series = sample_curves(curves, output.grid_s, length_s)
    if output.sensor is None:
        return series
    chip = find_gpu(gpu)
    window_s = sensor_window_s(SensorKind(output.sensor), chip.name, chip.architecture)
    return replace(series, sensor_w=read_sensor(curves, series.start_s, window_s))


def write_as_asked(
    curves: Sequence[PowerCurve],
    output: PowerOutput,
    gpu: str | Gpu,
    length_s: float,
) -> str:
    """Write curves to the file that was asked for, and return a line that describes it."""
    assert output.power_out is not None, "no file was asked for"
    check_series_path(output.power_out)
    series = sample_as_asked(curves, output, gpu, length_s)
    series.write(output.power_out)
    line = f"power over time written: {output.power_out}, {series.describe()}"
    if output.grid_s > _LONGEST_LOG_S:
        return line
    shown = series
    if output.sensor is None:
        shown = sample_as_asked(curves, replace(output, sensor="nvml"), gpu, length_s)
    assert shown.sensor_w is not None, "a sensor was asked for"
    p95_w = units.show(float(np.percentile(shown.sensor_w, 95)), "W")
    name = output.sensor or "nvml"
    kind = "nvidia-smi" if name == "nvml" else f"its {name} reading"
    return f"{line}; a log of {kind} shows p95 {p95_w} (column sensor_w, --sensor {name})"
