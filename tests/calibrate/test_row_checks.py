"""Which rows of whole models are refused, noted or taken for bound by the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from wattcast.calibrate import calibration_rows, whole_models
from wattcast.calibrate.calibration import (
    AnalysedModel,
    MeasuredModel,
    analyse_models,
    predict_models,
)
from wattcast.calibrate.calibration_rows import check_calibration_rows
from wattcast.core.errors import BadInput
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_options import ModelOptions

GPU = load_gpu("a100-sxm-80gb")
BUNDLE = bundle_for(GPU)


@pytest.fixture(scope="module")
def forecast_row() -> AnalysedModel:
    """A row that says what its forecast says."""
    graph = build_graph("gpt2", ModelOptions(batch=8, seq=128))
    measured = MeasuredModel(graph.name, graph, 1.0, None, None, 45.0)
    (analysed,) = analyse_models([measured], GPU, BUNDLE)
    seconds, _ = predict_models([analysed], {}, GPU, BUNDLE)
    return replace(analysed, measured=replace(measured, latency_s=float(seconds[0])))


def slow_down(row: AnalysedModel, factor: float) -> AnalysedModel:
    latency_s = factor * row.measured.latency_s
    return replace(row, measured=replace(row.measured, latency_s=latency_s))


@pytest.mark.parametrize("direction", [1, -1])
def test_a_row_further_from_its_forecast_than_errors_of_units_leave_room_for_is_refused(
    forecast_row: AnalysedModel, direction: int
) -> None:
    """A busy host may take fifteen times as long; 25 times is sooner another unit or model."""
    slow = slow_down(forecast_row, 15.0**direction)
    assert check_calibration_rows([slow], GPU, BUNDLE) == ()
    with pytest.raises(BadInput, match="a calibration does not reach that far"):
        check_calibration_rows([slow_down(forecast_row, 25.0**direction)], GPU, BUNDLE)


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.1, "used"), (1.2, "noted"), (1.4, "noted"), (1.6, "refused")],
)
def test_rows_of_one_run_are_used_noted_or_refused_by_how_far_they_are_apart(
    forecast_row: AnalysedModel, factor: float, verdict: str
) -> None:
    rows = [forecast_row, slow_down(forecast_row, factor)]
    if verdict == "refused":
        with pytest.raises(BadInput, match="two rows of the same run"):
            check_calibration_rows(rows, GPU, BUNDLE)
        return
    notes = check_calibration_rows(rows, GPU, BUNDLE)
    assert [note.endswith("both are used") for note in notes] == [True] * (verdict == "noted")


@pytest.mark.parametrize(("error", "agrees"), [(0.0, True), (0.04, True), (0.06, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_energy_and_power_of_a_row_agree_as_well_as_sensors_do(
    error: float, agrees: bool, sign: int
) -> None:
    """NVML states a board's power to within a twentieth."""
    energy_j = 300.0 * 0.02 * (1.0 + sign * error)
    quantities = {"latency": 0.02, "power": 300.0, "energy": energy_j}
    if agrees:
        assert calibration_rows._find_power(quantities, "row 1") == 300.0
        return
    with pytest.raises(BadInput, match="energy = power x latency"):
        calibration_rows._find_power(quantities, "row 1")


@pytest.mark.parametrize(("host_share", "tells"), [(0.18, False), (0.25, True)])
def test_a_row_tells_the_cost_of_launches_where_they_are_a_fifth_of_it(
    monkeypatch: pytest.MonkeyPatch, host_share: float, tells: bool
) -> None:
    """A thousand launches of 5 us run after kernels that take the rest of the latency."""
    launches = 1000
    host_s = 5e-6 * launches
    measured_s = host_s / host_share

    def predict_latency(_timeline: Any, cost_s: float, _gpu: Any, _bundle: Any) -> float:
        return measured_s - host_s + launches * cost_s

    monkeypatch.setattr(whole_models, "_predict_latency", predict_latency)
    cost_s = whole_models._cost_of_row(cast(Any, None), measured_s, GPU, BUNDLE)
    assert (cost_s is not None) is tells
    if cost_s is not None:
        assert np.isclose(cost_s, 5e-6)


def check_one_row(clock_hz: float | None, power_w: float | None) -> bool:
    """Return whether a card that publishes no lowest clock may have run like this."""
    gpu = replace(GPU, clocks=replace(GPU.clocks, min_hz=None))
    graph = build_graph("gpt2", ModelOptions(batch=8, seq=128))
    row = MeasuredModel(graph.name, graph, 1.0, power_w, clock_hz, 45.0)
    try:
        calibration_rows._check_measured(row, "row 1", gpu)
    except BadInput:
        return False
    return True


def test_a_clock_below_a_twentieth_of_the_highest_is_refused() -> None:
    """Megahertz that somebody takes for gigahertz are refused, and slow clocks are not."""
    top_hz = float(np.max(GPU.clocks.max_hz))
    assert [check_one_row(share * top_hz, None) for share in (0.04, 0.06)] == [False, True]


def test_watts_below_a_fiftieth_of_the_limit_are_refused() -> None:
    limit_w = float(np.max(GPU.power.limit_w))
    assert [check_one_row(None, share * limit_w) for share in (0.016, 0.024)] == [False, True]


def test_watts_half_again_above_the_limit_are_refused() -> None:
    limit_w = float(np.max(GPU.power.limit_w))
    assert [check_one_row(None, share * limit_w) for share in (1.3, 1.7)] == [True, False]
