"""The ledger of engine kernels: rows held out of the fit stay out of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from wattcast import hardware
from wattcast.calibrate.kernel_rows import load_kernel_rows
from wattcast.calibrate.row_prediction import predict_with_bundle
from wattcast.hardware import OperatingPoint
from wattcast.lab.campaigns.engine_campaign import choose_models
from wattcast.lab.fit.engine_fit import (
    MeasuredStep,
    find_step_energy,
    is_engine_family,
    load_fitting_steps,
    without_engine,
)
from wattcast.lab.validate.kernel_checks import engine_kernel_rows
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions


@pytest.fixture(scope="module")
def ledger() -> dict[str, dict]:
    return {row["quantity"]: row for row in engine_kernel_rows("h200")}


def test_every_held_out_row_is_judged_and_none_was_fitted(ledger: dict[str, dict]) -> None:
    rows = load_kernel_rows("h200/engine")
    assert rows.held_out is not None
    bundle = shipped_bundle("h200")
    assert bundle is not None
    fitted = sum(
        residual.rows for name, residual in bundle.residuals.items() if is_engine_family(name)
    )
    bursts = rows.is_kind("burst")
    assert fitted == int((bursts & ~rows.held_out).sum())
    assert ledger["latency"]["n"] == int((bursts & rows.held_out).sum())


def test_held_out_errors_are_those_written_down(ledger: dict[str, dict]) -> None:
    """The figures of docs/method/engine-kernels.md, judged once a fit; a refit that changes them
    says so there.
    """
    assert ledger["latency"]["mape"] == pytest.approx(7.3, abs=0.3)
    assert ledger["latency, fp8"]["mape"] == pytest.approx(6.9, abs=0.3)
    assert ledger["latency, engine_experts"]["mape"] == pytest.approx(6.9, abs=0.3)
    assert ledger["power"]["mape"] == pytest.approx(4.6, abs=0.3)


def test_a_bundle_without_engine_rows_falls_back_to_the_families_above() -> None:
    bundle = shipped_bundle("h200")
    assert bundle is not None
    bare = without_engine(bundle)
    assert not any(map(is_engine_family, [*bare.corrections, *bare.seen]))
    rows = load_kernel_rows("h200/engine")
    some = rows.select_rows(rows.is_kind("burst") & (np.arange(len(rows)) % 40 == 0))
    ratio = predict_with_bundle(bare, some, hardware.load_gpu("h200"))[:, 0] / some.column(
        "latency_s"
    )
    assert (ratio > 0.2).all()
    assert (ratio < 5.0).all()


def test_kernels_draw_less_in_an_engines_step_than_alone() -> None:
    """The factor that steps of fitting models teach scales their dynamic energy, and nothing
    else's.
    """
    gpu = hardware.load_gpu("h200")
    bundle = bundle_for(gpu)
    assert 0.93 < bundle.step_energy < 0.99
    at = OperatingPoint(power_limit_w=7000.0)
    idle_w = float(np.ravel(bundle.power.idle_power_w(1.98e9, at.temperature_c))[0])
    dynamic_j: dict[str, list[float]] = {}
    for stack in ("engine", "eager"):
        options = ModelOptions.from_names(stack=stack, phase="decode", batch=8, seq=4096)
        graph = build_graph(load_model("llama3-8b"), options)
        for one in (bundle, replace(bundle, step_energy=1.0)):
            found = predict_graph(graph, gpu, at, one)
            dynamic_j.setdefault(stack, []).append(
                float(found.energy_j) - idle_w * float(found.latency_s)
            )
    assert dynamic_j["engine"][0] / dynamic_j["engine"][1] == pytest.approx(
        bundle.step_energy, rel=0.002
    )
    assert dynamic_j["eager"][0] == dynamic_j["eager"][1]


def test_a_card_of_known_level_says_what_steps_draw_and_an_unknown_one_hardly() -> None:
    gpu, bundle = (
        hardware.load_gpu("h200"),
        replace(bundle_for(hardware.load_gpu("h200")), step_energy=1.0),
    )
    options = ModelOptions.from_names(stack="engine", phase="decode", batch=8, seq=4096)
    graph = build_graph(load_model("llama3-8b"), options)
    alone = predict_graph(graph, gpu, OperatingPoint(power_limit_w=7000.0), bundle)
    idle_w = float(np.ravel(bundle.power.idle_power_w(1.98e9, OperatingPoint().temperature_c))[0])

    def draw(card: float, level: float, share: float) -> MeasuredStep:
        power_w = idle_w + share * (float(alone.power_w) * math.exp(level) - idle_w)
        return MeasuredStep(graph, "llama-3.1-8b", card, power_w, float(alone.latency_s))

    levels = {1.0: (0.05, 0.0)}
    known = [draw(1.0, 0.05, 0.9)] * 9
    assert find_step_energy(bundle, known, levels, gpu) == pytest.approx(0.9, rel=0.01)
    both = find_step_energy(bundle, [*known, *[draw(2.0, 0.0, 1.2)] * 9], levels, gpu)
    assert 0.9 < both < 0.95


def test_steps_of_held_out_models_are_never_fitted_to() -> None:
    held = {model.name for model in choose_models() if model.held_out}
    steps = load_fitting_steps("h200", 1.98e9)
    assert len(steps) >= 20
    assert not held & {step.model for step in steps}
