"""Energies of a card: physics carried over, weighed with watts of several kinds."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.calibrate.energy_evidence import PRODUCTS, SERVING, EnergyEvidence, weigh_energies
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import forecast_bundle

MODULES = ("tensor", "sm", "dram")
IDLE_W = 200.0
# watts of the prior in memory-bound products, and in served steps of large and small batches
MEMORY_BOUND = {"tensor": 10.0, "sm": 120.0, "dram": 400.0}
BUSY = {"tensor": 250.0, "sm": 130.0, "dram": 200.0}


def draw_rows(
    kind: str, watts: dict[str, float], factors: dict[str, float], count: int, scatter: float = 0.03
) -> list[EnergyEvidence]:
    """Draw runs of a card whose energies are ``factors`` times the prior's."""
    draw = np.random.default_rng(count)
    rows = []
    for _ in range(count):
        own = {module: watts[module] * draw.uniform(0.7, 1.3) for module in MODULES}
        true_w = IDLE_W + sum(factors[module] * own[module] for module in MODULES)
        measured_w = true_w * np.exp(scatter * draw.standard_normal())
        rows.append(EnergyEvidence(kind, float(measured_w), IDLE_W, own))
    return rows


def test_without_watts_the_physics_stands() -> None:
    found = weigh_energies([], MODULES)
    assert set(found.factors.values()) == {1.0}
    bundle = forecast_bundle(load_gpu("b200"))
    assert found.move(bundle) is bundle
    assert "no watts of this card" in found.describe()


@pytest.mark.parametrize("count", [28, 2800])
def test_rows_of_one_kind_never_set_all_energies_however_many(count: int) -> None:
    """On a B200, 28 products of low watts made every energy 0.27 times what it was."""
    low = dict.fromkeys(MODULES, 0.5)
    found = weigh_energies(draw_rows(PRODUCTS, MEMORY_BOUND, low, count), MODULES)
    assert all(0.55 < factor < 1.0 for factor in found.factors.values())
    assert found.deviation["tensor"] > 0.1


def test_watts_of_whole_runs_outweigh_those_of_products() -> None:
    products = draw_rows(PRODUCTS, MEMORY_BOUND, dict.fromkeys(MODULES, 0.6), 28)
    served = draw_rows(SERVING, BUSY, dict.fromkeys(MODULES, 1.3), 30)
    found = weigh_energies([*products, *served], MODULES)
    watts = IDLE_W * found.idle_factor + sum(found.factors[m] * BUSY[m] for m in MODULES)
    assert watts == pytest.approx(IDLE_W + 1.3 * sum(BUSY.values()), rel=0.08)
    assert found.rows == {PRODUCTS: 28, SERVING: 30}


def test_odd_rows_count_less() -> None:
    served = draw_rows(SERVING, BUSY, dict.fromkeys(MODULES, 1.2), 30)
    odd = [
        EnergyEvidence(SERVING, 3.0 * row.measured_w, IDLE_W, row.module_w) for row in served[:4]
    ]
    clean = weigh_energies(served, MODULES).factors["tensor"]
    assert weigh_energies([*served, *odd], MODULES).factors["tensor"] == pytest.approx(
        clean, rel=0.1
    )


def test_a_prior_of_the_same_processor_moves_less() -> None:
    low = draw_rows(PRODUCTS, MEMORY_BOUND, dict.fromkeys(MODULES, 0.5), 28)
    far = weigh_energies(low, MODULES)
    near = weigh_energies(low, MODULES, distance=0.25)
    assert all(far.factors[module] < near.factors[module] < 1.0 for module in MODULES)
    assert near.factors["dram"] > 0.93
