"""Fitting stages on made-up rows whose truth is known, and the split."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.calibrate.kernel_rows import (
    KernelRows,
    assign_folds,
    load_kernel_rows,
    settled_figures,
    shape_name,
)
from wattcast.calibrate.latency_fit import ResidualSample, fit_corrections, fit_residuals
from wattcast.calibrate.row_prediction import conformal_ends, loaded_clock_hz
from wattcast.core.errors import WattcastError
from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import RunCondition, build_kernels, reference_chip
from wattcast.lab.fit.held_out import power_ends
from wattcast.lab.fit.kernel_fit import (
    VOLTAGE_KNOTS_HZ,
    CardRows,
    PowerRows,
    find_card_levels,
    fit_clock_law,
    fit_governor_share,
    fit_idle_curve,
    fit_module_power,
    starting_rule,
)
from wattcast.power.power_model import IdlePower
from wattcast.predictor.bundle.bundle_file import FAMILIES
from wattcast.predictor.ideal_terms import IdealTerms
from wattcast.predictor.kernel_phases import Correction
from wattcast.predictor.learned_factors import evaluate_factors
from wattcast.predictor.timeline import ClockLaw
from wattcast.workload.operator_types import Linear


@pytest.fixture(scope="module")
def database() -> KernelRows:
    return load_kernel_rows("h200")


def test_corrections_are_found_again() -> None:
    rng = np.random.default_rng(0)
    n = 300
    terms = IdealTerms(
        compute_cycle=10 ** rng.uniform(3, 6, n),
        l2_cycle=10 ** rng.uniform(2, 5, n),
        dram_s=10 ** rng.uniform(-7, -3.5, n),
        serial_step=rng.uniform(1, 200, n),
        launches=np.ones(n),
        between_cycle=np.zeros(n),
        between_s=np.zeros(n),
        turn_cycle=np.zeros(n),
        store_cycle=np.zeros(n),
        store_s=np.zeros(n),
    )
    truth = Correction(1.5, 1.2, 3e-6, 1.0, 30.0)
    clock = np.full(n, 1.8e9)
    latency = terms.seconds(np.log(list(vars(truth).values())), clock) * rng.lognormal(0, 0.01, n)
    found = fit_corrections(terms, ["gemm.x"] * n, latency, clock)["gemm.x"]
    assert found.compute == pytest.approx(1.5, rel=0.03)
    assert found.memory == pytest.approx(1.2, rel=0.03)
    assert found.fixed_s == pytest.approx(3e-6, rel=0.1)


def test_energies_voltage_and_toggling_are_found_again() -> None:
    rng = np.random.default_rng(1)
    n = 400
    events = ("tensor_fp16_flop", "dram_read_byte", "busy_sm_cycle")
    energy = np.array([5e-13, 5e-11, 8e-10])
    rate = rng.uniform(0, 1, (n, 3)) * np.array([8e14, 4e12, 2.5e11])
    clock = np.where(rng.uniform(size=n) < 0.5, 1.98e9, rng.uniform(1.36e9, 1.98e9, n))
    volts = np.interp(clock, VOLTAGE_KNOTS_HZ, [0.80, 0.84, 0.88, 0.93, 1.0])
    data = ["zeros" if x < 0.1 else "random" for x in rng.uniform(size=n)]
    factor = np.array([0.4 if d == "zeros" else 1.0 for d in data])
    idle = IdlePower(np.array([345e6, 1.98e9]), np.array([80.0, 130.0]), 45.0)
    core = rate[:, 0] * energy[0] * factor + rate[:, 2] * energy[2]
    power = idle.power_at(clock, 45.0) + volts**2 * core + rate[:, 1] * energy[1] * factor
    model, toggling = fit_module_power(
        PowerRows(
            rate,
            events,
            ("tensor", "dram", "sm"),
            clock,
            power,
            data,
            np.zeros(n),
            np.ones(n, bool),
        ),
        idle,
        45.0,
    )
    assert_allclose([model.energy_j[e] for e in events], energy, rtol=0.05)
    assert_allclose(
        model.voltage.level_at(np.array([1.4e9, 1.8e9])),
        np.interp([1.4e9, 1.8e9], VOLTAGE_KNOTS_HZ, [0.80, 0.84, 0.88, 0.93, 1.0]),
        atol=0.02,
    )
    assert toggling["zeros"] == pytest.approx(0.4, abs=0.05)


def _card_rows(
    levels: dict[float, tuple[float, float]], counts: list[int], common: int
) -> CardRows:
    """Make rows of cards that draw more by ``u + v * memory``; the first ``common`` kernels ran on
    every card.
    """
    rng = np.random.default_rng(4)
    memory = rng.uniform(0.0, 0.6, 4000)
    kernel_error = 0.06 * rng.normal(size=4000)
    placed = [(card, k) for card in levels for k in range(common)]
    start = common
    for card, count in zip(levels, counts, strict=True):
        placed += [(card, k) for k in range(start, start + count)]
        start += count
    card, kernel = np.array([c for c, _ in placed]), np.array([k for _, k in placed])
    u, v = np.array([levels[c] for c in card]).T
    log_ratio = 0.05 - 0.1 * memory[kernel] + kernel_error[kernel] + u + v * memory[kernel]
    log_ratio += 0.01 * rng.normal(size=len(card))
    families = tuple(f"family {k % 3}" for k in kernel)
    return CardRows(
        card, memory[kernel], log_ratio, families, tuple(map(str, kernel)), np.ones(len(card), bool)
    )


def test_levels_of_cards_are_found_whatever_the_number_of_their_rows() -> None:
    made = {1.0: (0.02, -0.1), 2.0: (-0.02, 0.1), 3.0: (0.0, -0.1), 4.0: (0.0, 0.1)}
    rows = _card_rows(made, [900, 60, 30, 0], common=30)
    found = find_card_levels(rows)
    for card, (u, v) in made.items():
        assert found[card] == (pytest.approx(u, abs=0.01), pytest.approx(v, abs=0.03))
    level = rows.compute_level(found)
    assert level[rows.card == 1.0].mean() == pytest.approx(np.exp(0.02 - 0.1 * 0.3), abs=0.01)


def test_one_card_is_the_mean_card() -> None:
    rows = _card_rows({7.0: (0.1, 0.2)}, [300], common=0)
    assert_allclose(rows.compute_level(find_card_levels(rows)), 1.0, atol=1e-3)


def test_the_clock_law_never_rises_with_load() -> None:
    rng = np.random.default_rng(2)
    load_, tensor = rng.uniform(0, 1, 200), np.arange(200) % 4 != 0
    clock = np.full(200, 1.98e9)
    effective = clock * np.where(tensor, 0.92 - 0.15 * load_**2, 0.998)
    law = fit_clock_law(load_, clock, effective, tensor, 1.98e9)
    assert (np.diff(law.ratio) <= 0).all()
    assert law.without == pytest.approx(0.998)
    assert_allclose(np.interp(0.75, law.activity, law.ratio), 0.92 - 0.15 * 0.75**2, atol=0.01)


def test_conformal_ends_cover_what_they_say() -> None:
    rng = np.random.default_rng(5)
    covered = []
    for _ in range(200):
        low, high = conformal_ends(rng.lognormal(0, 0.2, 100), 0.9)
        fresh = rng.lognormal(0, 0.2, 100)
        covered.append(((fresh >= low) & (fresh <= high)).mean())
    assert 0.89 < np.mean(covered) < 0.94


def test_a_family_of_few_rows_gets_ends_of_its_own_width() -> None:
    """Twenty rows of softmax erred more than those of norms, and shared their ends: too narrow for
    it.
    """
    rng = np.random.default_rng(6)
    covered: dict[str, list[float]] = {"softmax": [], "rmsnorm": []}
    spread = {"softmax": 0.15, "layernorm": 0.06, "rmsnorm": 0.06}
    family = np.repeat(list(spread), 24)
    for _ in range(300):
        ratio = np.exp(rng.normal(size=72) * np.array([spread[f] for f in family]))
        for name, found in covered.items():
            low, high = power_ends(ratio, family, name)
            fresh = np.exp(rng.normal(size=200) * spread[name])
            found.append(float(((fresh >= low) & (fresh <= high)).mean()))
    assert all(0.86 < np.mean(found) < 0.95 for found in covered.values())
    alone = np.exp(rng.normal(size=50))
    assert power_ends(alone, np.repeat("gemm", 50), "gemm") == conformal_ends(alone, 0.9)


def test_the_busier_a_kernels_tensor_units_the_lower_its_clock() -> None:
    gpu = load_gpu("h200")
    kernels = build_kernels(
        (Linear(8192, 8192, 8192),), (RunCondition(),), gpu, reference_chip(gpu), ()
    )
    law = ClockLaw(1.0, np.array([0.0, 1.0]), np.array([0.95, 0.75]), top_hz=1.98e9)
    rate = float(np.asarray(kernels.pipe_per_cycle)[0]) * 132.0
    found = [
        float(
            loaded_clock_hz(law, kernels, kernels.flop / rate / (activity * 1.98e9), 1.98e9, 132.0)[
                0
            ]
        )
        for activity in (0.1, 0.5, 0.9)
    ]
    assert 0.95 * 1.98e9 > found[0] > found[1] > found[2] > 0.75 * 1.98e9


def test_a_row_may_count_as_it_ran_and_as_it_is_chosen() -> None:
    """Both samples say the same of a shape; the factor learned from both is that."""
    gpu = load_gpu("h200")
    rng = np.random.default_rng(7)
    ops = tuple(
        Linear(int(m), 1024, 8 * int(k))
        for m, k in zip(*(2 ** rng.uniform(4, 11, (2, 60))), strict=True)
    )
    kernels = build_kernels(ops, (RunCondition(),) * 60, gpu, reference_chip(gpu), ())
    ratio = np.exp(0.1 * kernels.work.features["log_m"] - 0.5)
    learned = fit_residuals(
        [ResidualSample(kernels, ratio), ResidualSample(kernels, ratio, again=True)]
    )["gemm"]
    found, _ = evaluate_factors({"gemm": learned}, kernels.work.root_family, kernels.work.features)
    error = found / ratio - 1.0
    assert np.abs(error).mean() < 0.05


def test_the_governor_settles_a_little_below_the_limit(database: KernelRows) -> None:
    assert 0.985 < fit_governor_share(database, load_gpu("h200")) < 1.0


def test_every_row_of_a_shape_lies_in_one_fold(database: KernelRows) -> None:
    fold = assign_folds(database)
    of: dict[str, set[int]] = {}
    for op, k in zip(database.ops, fold, strict=True):
        of.setdefault(shape_name(op), set()).add(int(k))
    assert all(len(folds) == 1 for folds in of.values())
    assert set(fold) == set(range(5))


def test_a_shape_is_the_same_in_every_format() -> None:
    assert shape_name(Linear(1, 2, 3)) == shape_name(Linear(1, 2, 3, dtype=Dtype.FP8))
    assert shape_name(Linear(1, 2, 3)) != shape_name(Linear(1, 2, 4))


def test_the_database_has_what_the_fit_needs(database: KernelRows) -> None:
    assert database.is_kind("burst").sum() > 3000
    power_w, clock_hz, latency_s = settled_figures(database)
    sustained = database.is_kind("sustained")
    assert np.isfinite(power_w[sustained]).all()
    assert (clock_hz[sustained] <= 1.981e9).all()
    assert (latency_s[sustained] > 0).all()


def test_a_folder_of_journals_is_read_once_each(tmp_path: Path) -> None:
    operator = {"op": "elementwise", "function": "exp", "n": 4096, "dtype": "fp32"}
    line = {
        "record": "row",
        "id": "burst-a",
        "run": "1",
        "kind": "burst",
        "family": "elementwise",
        "operator": operator,
    }
    text = json.dumps({**line, "latency_s": 1e-6, "sm_clock_hz": 1.98e9}) + "\n"
    for name in ("early", "late"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "burst.jsonl").write_text(text)
    rows = load_kernel_rows(tmp_path)
    assert len(rows) == 1
    assert rows.ops[0].name == "exp"


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WattcastError, match="no measured rows"):
        load_kernel_rows(tmp_path)


def test_idle_power_grows_with_clock_and_warmth() -> None:
    idle = fit_idle_curve([(1.98e9, 128.0, 34.0), (1.98e9, 133.0, 42.0)], load_gpu("h200"))
    assert idle.power_at(1.98e9, 42.0) == pytest.approx(133.0, abs=0.5)
    assert idle.power_at(345e6, 42.0) < idle.power_at(1.98e9, 42.0)


def test_the_rule_that_a_fit_starts_from_has_every_family() -> None:
    """Where rows are silent a fit takes the rule, which must not lean on what is being fitted."""
    assert set(starting_rule().read_corrections()) == set(FAMILIES)
