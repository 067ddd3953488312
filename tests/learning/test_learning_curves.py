"""Learning curves: the law is found again, subsets are nested, results are kept, and the limit is named rightly."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from wattcast.fit import kernels_data
from wattcast.fit.kernels_data import Rows
from wattcast.fit.kernels_split import folds_of, shape_of
from wattcast.fit.power_law import Law, Learned, fit_law, learned
from wattcast.report.learning import learning_curves
from wattcast.validate import learning
from wattcast.validate.learning import Curve
from wattcast.validate.rows import Row, row


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Every fifth row: enough of every family."""
    whole = kernels_data.load("h200")
    return whole.where(np.arange(len(whole)) % 5 == 0)


@pytest.fixture
def kept(tmp_path: object) -> dict[str, str]:
    return {"WATTCAST_CACHE": str(tmp_path)}


@pytest.mark.parametrize(("floor", "scale", "rate"), [(4.0, 60.0, 0.5), (0.0, 40.0, 0.3), (9.0, 200.0, 1.0)])
def test_a_law_is_found_again(floor: float, scale: float, rate: float) -> None:
    count = np.array([50.0, 100.0, 200.0, 400.0, 800.0])
    law = fit_law(count, floor + scale * count**-rate)
    assert law.rate == pytest.approx(rate, abs=0.03)
    assert law.at(1600.0) == pytest.approx(floor + scale * 1600.0**-rate, rel=0.01)


def test_an_error_that_does_not_fall_is_all_floor() -> None:
    law = fit_law(np.array([50.0, 100.0, 200.0]), np.array([7.0, 7.0, 7.0]))
    assert law.at(1e6) == pytest.approx(7.0, rel=1e-6)


def test_an_error_that_rises_is_not_extrapolated_upwards() -> None:
    law = fit_law(np.array([50.0, 100.0, 200.0]), np.array([6.0, 7.0, 8.0]))
    assert law.scale == 0.0
    assert 6.0 < law.floor < 8.0


def test_intervals_hold_the_truth_and_narrow_with_rows() -> None:
    rng = np.random.default_rng(3)
    count = np.array([50.0, 100.0, 200.0, 400.0, 800.0])
    mean = 3.0 + 50.0 * count**-0.5

    def from_rows(n: int) -> Learned:
        return learned(count, mean * rng.exponential(1.0, (n, 1)) * rng.lognormal(0, 0.3, (n, 5)), np.arange(n))

    few, many = from_rows(60), from_rows(4000)
    truth = 3.0 + 50.0 * 1600.0**-0.5
    assert many.doubled_ends[0] < truth * np.exp(0.5 * 0.3**2) < many.doubled_ends[1]
    assert np.ptp(many.doubled_ends) < 0.4 * np.ptp(few.doubled_ends)


def test_subsets_are_nested_and_keep_shapes_whole(rows: Rows) -> None:
    place = learning.nested(rows, 0, 1)
    assert ((place >= 0) & (place < 1)).all()
    of: dict[str, set[float]] = {}
    for op, at in zip(rows.ops, place.tolist(), strict=True):
        of.setdefault(shape_of(op), set()).add(at)
    assert all(len(at) == 1 for at in of.values())
    assert (place < 1 / 8).mean() == pytest.approx(1 / 8, abs=0.04)
    assert not np.array_equal(place, learning.nested(rows, 0, 0))


def made_up(rows: Rows, floor: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A fit whose error follows a law of the training rows; returns the sizes it was called with."""
    called: list[int] = []

    def fitted(chip: object, idle: object, train: Rows, test: Rows) -> np.ndarray:
        called.append(len(train))
        off = 1.0 + floor + 2.0 * len(train) ** -0.5
        power_w, clock_hz, latency_s = learning.settled(test)
        return np.column_stack([latency_s * off, power_w * off, clock_hz])

    monkeypatch.setattr(learning, "_fitted", fitted)
    monkeypatch.setattr(learning.kernels_data, "load", lambda _: rows)
    monkeypatch.setattr(learning, "noise", lambda _: {("burst", "all"): 0.5})
    return called


def test_curves_show_the_law_and_are_made_once(
    rows: Rows, kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = made_up(rows, 0.05, monkeypatch)
    said: list[str] = []
    found = {(c.quantity, c.family): c for c in learning.curves("h200", kept, said.append)}
    assert len(called) == learning.ORDERS * 5 * len(learning.SHARES) - 5 * (learning.ORDERS - 1)
    assert len(said) == len(called)
    whole = found["latency", "all"]
    assert whole.law.law.floor == pytest.approx(5.0, abs=0.5)  # rates are on a grid
    assert whole.law.doubled == pytest.approx(
        5.0 + 200.0 * (2 * max(called)) ** -0.5, rel=0.02
    )  # subsets vary in size
    assert whole.law.law.rate == pytest.approx(0.5, abs=0.06)
    assert (np.diff(whole.rows) > 0).all()
    assert (np.diff(whole.error) < 0).all()
    assert found["power", "all"].tested < whole.tested
    assert sum(c.tested for key, c in found.items() if key[0] == "latency") == 2 * whole.tested
    again = learning.curves("h200", kept, said.append)
    assert len(said) == len(called)  # kept: nothing was made
    assert again[0].error == pytest.approx(whole.error)
    figure = learning_curves(again, "h200")
    assert len([axes for axes in figure.axes if axes.get_visible()]) == 8
    assert figure.axes[0].get_ylabel() == "Held-out error (%)"


def test_training_rows_never_have_a_held_out_shape(
    rows: Rows, kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = folds_of(rows)

    def predict(train: Rows, test: Rows) -> np.ndarray:
        assert not {shape_of(op) for op in train.ops} & {shape_of(op) for op in test.ops}
        return np.ones((len(test), 3))

    assert len(learning._one(rows, fold, 2, 0, predict, lambda _: None)) == len(learning.SHARES)


def test_what_was_not_made_says_how(kept: dict[str, str]) -> None:
    (found,) = learning.learning_rows("h200", kept, lambda _: None, long=False)
    assert "--learning" in found["missing"]


def curve(error: float, noise: float | None, buys: tuple[float, float]) -> Curve:
    law = Learned(Law(1.0, 1.0, 0.5), (0.0, 2.0), error, (0.0, error), float(np.mean(buys)), buys)
    count = np.array([1.0, 2.0])
    return Curve("latency", "gemm", 10, count, np.array([2 * error, error]), np.zeros(2), law, noise)


@pytest.mark.parametrize(
    ("error", "noise", "buys", "limit"),
    [
        (1.0, 0.7, (0.1, 0.2), "noise"),
        (8.0, 0.7, (0.1, 0.2), "rows"),
        (8.0, None, (0.01, 0.05), "model"),
        (8.0, 0.7, (0.01, 0.2), "rows or model"),
    ],
)
def test_the_limit_is_named(error: float, noise: float | None, buys: tuple[float, float], limit: str) -> None:
    assert curve(error, noise, buys).limited_by == limit


def test_asking_for_learning_runs_every_study_once(kept: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def study(name: str) -> object:
        def rows(gpu: str, *_: object) -> list[Row]:
            made.append(name)
            return [row(f"{gpu} {name}", "a quantity", 1, 2.0)]

        return rows

    whole = importlib.import_module("wattcast.validate.ledger")
    for name in ("suggest_rows", "few_rows", "coverage_rows", "unseen_rows", "learning_rows"):
        monkeypatch.setattr(whole, name, study(name))
    for name in ("model_rows", "energy_rows", "choice_rows", "counter_rows", "_forecasts", "kernel_rows", "coverage"):
        monkeypatch.setattr(whole, name, lambda *_: [])  # which are not this test's business
    quick = whole.ledger(variables=kept)
    assert made == ["learning_rows"]  # which looks by itself whether it was asked for
    assert sum("--learning" in str(r.get("missing")) for r in quick) == 6
    for _ in range(2):
        sets = [r["set"] for r in whole.ledger(learning=True, variables=kept)]
        assert {"h200 suggest_rows", "h200 few_rows", "h200 coverage_rows"} <= set(sets)
    assert made.count("few_rows") == 3  # a card each, kept the second time
    assert made.count("suggest_rows") == made.count("coverage_rows") == 1
