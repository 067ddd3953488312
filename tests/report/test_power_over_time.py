"""Power over time agrees with the prediction it draws."""

from __future__ import annotations

import pytest
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput
from wattcast.predictor import api
from wattcast.report import configuration_view as traces
from wattcast.report.configuration_view import GAP, view_configuration
from wattcast.workload.model_options import ModelOptions

CASES = [
    ("llama3-8b", "h200", {"batch": 8, "seq": 1024}),
    ("llama3-8b", "a10", {"batch": 1, "seq": 128, "phase": "decode"}),
    ("gpt2", "h200", {"batch": 1, "seq": 128, "phase": "train"}),
    ("resnet50", "a100-pcie-40gb", {"batch": 4}),
]


def seen(model: str, gpu: str, options: dict[str, object]):
    view = view_configuration(model, api.find_gpu(gpu), ModelOptions(**options))
    return view.prediction, view.trace


@pytest.mark.parametrize(("model", "gpu", "options"), CASES)
def test_length_and_energy_are_those_of_the_prediction(model, gpu, options) -> None:
    p, trace = seen(model, gpu, options)
    assert trace.whole
    assert_allclose(trace.duration_s, float(p.latency_s), rtol=1e-9)
    assert_allclose(trace.energy_j, float(p.energy_j), rtol=1e-9)
    waited_s = (trace.end_s - trace.start_s)[trace.idle].sum()
    assert_allclose(waited_s, float(p.latency_s - p.busy_s), rtol=1e-6, atol=1e-9)
    by_module = ((trace.end_s - trace.start_s)[:, None] * trace.part_w).sum(
        axis=0
    ) / trace.duration_s
    assert_allclose(by_module, [float(m.power_w) for m in p.modules], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("model", "gpu", "options"), CASES)
def test_intervals_follow_one_another(model, gpu, options) -> None:
    _, trace = seen(model, gpu, options)
    assert trace.start_s[0] == 0.0
    assert_allclose(trace.start_s[1:], trace.end_s[:-1], atol=1e-12)
    assert (trace.end_s > trace.start_s).all()
    assert (trace.part_w >= -1e-9).all()
    assert trace.labels[-1] == GAP


def test_a_host_bound_run_waits_and_draws_less_while_it_does() -> None:
    p, trace = seen("gpt2", "h200", {"batch": 1, "seq": 128, "stack": "eager"})
    assert trace.idle.sum() > 50
    watts = trace.part_w.sum(axis=-1)
    assert watts[trace.idle].max() < float(p.power_w) < watts[~trace.idle].max()


def test_bins_keep_the_energy_and_a_short_trace_stays_as_it_is() -> None:
    _, trace = seen(*CASES[0])
    coarse = trace.binned(100)
    assert len(coarse.start_s) == 100
    assert_allclose(coarse.energy_j, trace.energy_j, rtol=1e-9)
    assert_allclose(coarse.duration_s, trace.duration_s, rtol=1e-12)
    assert trace.binned(10**6) is trace
    part = trace.part(10, 20)
    assert_allclose(part.part_w, trace.part_w[10:20])


def test_too_many_launches_are_drawn_at_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    p, whole = seen(*CASES[0])
    monkeypatch.setattr(traces, "MOST_LAUNCHES", 100)
    _, coarse = seen(*CASES[0])
    assert not coarse.whole
    assert len(coarse.start_s) < 10 < len(whole.start_s)
    assert_allclose(coarse.duration_s, float(p.latency_s), rtol=0.01)
    assert_allclose(coarse.energy_j, float(p.energy_j), rtol=0.01)


def test_a_sweep_is_refused() -> None:
    swept = api.predict("gpt2", "h200", stack="eager", seq=128, clock=[1e9, 1.5e9])
    with pytest.raises(BadInput, match="single operating point"):
        traces.build_power_trace(swept)
