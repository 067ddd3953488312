"""The ledger of engine kernels: rows held out of the fit stay out of it."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast import hardware
from wattcast.fit.engine_fit import is_engine_family, judge_engine_rows, load_fitting_steps, without_engine
from wattcast.fit.kernel_rows import load_kernel_rows
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_table import RunCondition
from wattcast.measure.campaigns.engine_campaign import choose_models
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.kernel_phases import blend_corrections
from wattcast.validate.kernel_checks import engine_kernel_rows
from wattcast.workload.engine_operators import PagedAttention


@pytest.fixture(scope="module")
def ledger() -> dict[str, dict]:
    return {row["quantity"]: row for row in engine_kernel_rows("h200")}


def test_every_held_out_row_is_judged_and_none_was_fitted(ledger: dict[str, dict]) -> None:
    rows = load_kernel_rows("h200/engine")
    assert rows.held_out is not None
    bundle = shipped_bundle("h200")
    assert bundle is not None
    fitted = sum(residual.rows for name, residual in bundle.residuals.items() if is_engine_family(name))
    bursts = rows.is_kind("burst")
    assert fitted == int((bursts & ~rows.held_out).sum())
    assert ledger["latency"]["n"] == int((bursts & rows.held_out).sum())


def test_held_out_errors_are_those_written_down(ledger: dict[str, dict]) -> None:
    """The figures of docs/method/engine-kernels.md, judged once a fit; a refit that changes them says so there."""
    assert ledger["latency"]["mape"] == pytest.approx(7.8, abs=0.3)
    assert ledger["latency, fp8"]["mape"] == pytest.approx(6.6, abs=0.3)
    assert ledger["latency, engine_experts"]["mape"] == pytest.approx(5.6, abs=0.3)
    assert ledger["power"]["mape"] == pytest.approx(5.5, abs=0.3)


def test_a_bundle_without_engine_rows_falls_back_to_the_families_above() -> None:
    bundle = shipped_bundle("h200")
    assert bundle is not None
    bare = without_engine(bundle)
    assert not any(map(is_engine_family, [*bare.corrections, *bare.seen]))
    rows = load_kernel_rows("h200/engine")
    some = rows.select_rows(rows.is_kind("burst") & (np.arange(len(rows)) % 40 == 0))
    judged = judge_engine_rows(bare, some, hardware.load_gpu("h200"))
    ratio = judged.predicted_latency_s / judged.latency_s
    assert (ratio > 0.2).all()
    assert (ratio < 5.0).all()


def test_attention_draws_less_inside_a_step_than_alone() -> None:
    """Decode attention learns from steps of fitting models: there it draws about a tenth less than repeated alone."""
    gpu = hardware.load_gpu("h200")
    bundle = bundle_for(gpu)
    assert bundle.learned is not None
    op = PagedAttention(32, 8, 128, ((8, 1, 4096),), splits=32)
    energy = []
    for how in (RunCondition(), RunCondition(rotated="all")):
        kernels = build_kernels((op,), (how,), gpu, bundle.reference, ())
        energy.append(bundle.learned.factors(kernels, blend_corrections(kernels.work, bundle.corrections))[1].item())
    assert 0.8 < energy[0] / energy[1] < 0.98


def test_steps_of_held_out_models_are_never_fitted_to() -> None:
    held = {model.name for model in choose_models() if model.held_out}
    steps = load_fitting_steps("h200", 1.98e9)
    assert len(steps) >= 20
    assert not held & {step.run.split()[0] for step in steps}
