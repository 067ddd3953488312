"""Power over time of one predicted run, kernel by kernel."""

from __future__ import annotations

import numpy as np

from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.power.activity import Activity, ActivitySource
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import Prediction
from wattcast.report.configuration_view import build_power_trace
from wattcast.timeseries.power_curve import (
    PowerCurve,
    StateCodes,
    join_pieces,
    state_code,
)
from wattcast.workload.operator_types import Collective

_PHASE_STATES = {
    "prefill": "prefill",
    "decode": "decode",
    "generate": "prefill",
}


def trace_prediction(prediction: Prediction) -> PowerCurve:
    """Return the power curve of a prediction of one configuration."""
    trace = build_power_trace(prediction)
    by_row = _find_row_states(prediction)
    gap = len(trace.labels) - 1
    state_of_which = np.append(by_row, state_code("waiting")).astype(np.int8)
    states = np.where(trace.which < 0, by_row[0], state_of_which[np.minimum(trace.which, gap)])
    spans_s = trace.end_s - trace.start_s
    return join_pieces(
        spans_s,
        trace.part_w * spans_s[:, np.newaxis],
        states.astype(np.int8),
        trace.parts,
        split_idle_power(prediction.basis.bundle, prediction.basis.gpu, float(prediction.clock_hz))[
            1
        ],
        prediction.gpu_count,
    )


def _find_row_states(prediction: Prediction) -> StateCodes:
    """Return the state of each kernel: an exchange, or the part of the run that it belongs to."""
    timeline = prediction.basis.timeline
    words = prediction.name.split()
    usual = _PHASE_STATES.get(words[1] if len(words) > 1 else "", "compute")
    if prediction.basis.graph.parts:  # a picture has no prompt
        usual = "compute"
    codes = np.full(len(timeline.kernels.ops), state_code(usual), dtype=np.int8)
    for segment in timeline.kernels.segments:
        if segment.label == "optimiser":
            codes[segment.rows] = state_code("optimiser")
        elif segment.step is not None:
            is_prompt = segment.step.prompts > 0
            codes[segment.rows] = state_code("prefill" if is_prompt else "decode")
        elif segment.label.startswith("decode."):
            codes[segment.rows] = state_code("decode")
    for row, op in enumerate(timeline.kernels.ops):
        if isinstance(op, Collective):
            codes[row] = state_code("exchange")
    return codes


def split_idle_power(
    bundle: Bundle,
    gpu: Gpu,
    clock_hz: float,
) -> tuple[tuple[str, ...], Array]:
    """Return the names of the parts of power, and the watts of each on an idle GPU."""
    from wattcast.options.setting_options import SettingOptions
    from wattcast.predictor.run_settings import resolve_settings

    _, at, _ = resolve_settings(gpu, bundle, SettingOptions(clock_hz=clock_hz))
    names = bundle.power.required_events
    nothing = np.zeros((1, len(names)))
    activity = Activity(
        np.ones(1),
        nothing,
        names,
        at,
        ActivitySource.PREDICTED,
    )
    power = bundle.power.power(activity)
    part_w = power.part_w[0]
    idle_w = float(bundle.power.idle_power_w(clock_hz))
    return power.parts, part_w * (idle_w / part_w.sum())
