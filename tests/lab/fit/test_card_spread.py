"""Another card of the same kind: components are found again, intervals widen by them and cover what
they say.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import KernelRows, on_random_data
from wattcast.core.errors import UnknownName, WattcastError
from wattcast.hardware import load_gpu
from wattcast.lab.fit.database_fit import (
    CardComponents,
    CardShift,
    combine_spread,
    residual_shifts,
    shipped_held_out,
    variance_components,
)
from wattcast.lab.fit.held_out import HeldOutRows
from wattcast.lab.validate.long_checks.learning_curves import measurement_noise
from wattcast.predictor import api
from wattcast.predictor.bundle import bundle_file
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.bundle.forecast import forecast_bundle
from wattcast.predictor.bundle.support_widening import (
    NORMAL_P90,
    THIS_CARD,
    CardSpread,
    learned_distances,
    published_spread,
)
from wattcast.predictor.prediction_interval import widen_log_ends


@pytest.fixture(scope="module")
def rows() -> KernelRows:
    return kernel_rows.load_kernel_rows("h200")


def on_cards(
    rows: KernelRows, count: int, card: float, by_kernel: float, noise: float, seed: int
) -> KernelRows:
    """The first rows of bursts, each twice on every card, with the deviations given."""
    rng = np.random.default_rng(seed)
    first = np.flatnonzero(
        rows.is_kind("burst") & rows.fit & (rows.repeat == 0) & on_random_data(rows)
    )[:150]
    mask = np.isin(np.arange(len(rows)), first)
    base = rows.select_rows(mask)
    true, names = np.log(base.column("latency_s")), []
    values, specs = [], []
    for c in range(count):
        shifted = true + rng.normal(0, card) + rng.normal(0, by_kernel, len(base))
        for _ in range(2):
            values.append(np.exp(shifted + rng.normal(0, noise, len(base))))
            names += [f"card {c}"] * len(base)
            specs += [f"{i}" for i in range(len(base))]
    times = 2 * count
    columns = {name: np.tile(v, times) for name, v in base.number.items()} | {
        "latency_s": np.concatenate(values)
    }
    settled = {"settled_power_w": np.full(times * len(base), np.nan)}
    return KernelRows(
        base.kind * times,
        base.ops * times,
        base.conditions * times,
        base.data * times,
        tuple(specs),
        np.tile(base.repeat, times),
        base.names * times,
        base.blocks * times,
        tuple(names),
        tuple(names),
        (kernel_rows.PLANNED,) * len(names),
        columns | settled,
        np.tile(base.fit, times),
        base.source,
        base.card,
    )


def test_components_are_found_again(rows: KernelRows) -> None:
    found = [
        variance_components(on_cards(rows, 6, 0.03, 0.01, 0.004, seed), "latency")
        for seed in range(12)
    ]
    known = [f for f in found if f is not None]
    assert len(known) == 12
    assert known[0].cards == 6
    assert np.sqrt(np.mean([f.card**2 for f in known])) == pytest.approx(0.03, rel=0.2)
    assert np.mean([f.card_by_kernel for f in known]) == pytest.approx(0.01, rel=0.1)
    assert np.mean([f.noise for f in known]) == pytest.approx(0.004, rel=0.1)


def test_cards_alike_are_not_told_apart_by_noise(rows: KernelRows) -> None:
    found = variance_components(on_cards(rows, 3, 0.0, 0.0, 0.01, 1), "latency")
    assert found is not None
    assert found.apart < 0.004


def test_one_card_takes_the_published_figures(rows: KernelRows) -> None:
    alone = replace(rows, uuid=("one",) * len(rows), run=("run",) * len(rows))
    assert variance_components(alone, "latency") is None
    assert residual_shifts(alone, "latency", shipped_held_out("h200")) == []
    taken = combine_spread({"latency": [], "power": []})
    known = published_spread()
    assert (taken.latency, taken.power, taken.cards) == (known.latency, known.power, 1)
    assert learned_distances().cards.source in taken.source


def test_measured_cards_are_weighed_with_the_published_figures() -> None:
    known = published_spread()
    wide = CardComponents("latency", 0.05, 0.0, 0.0, 3, 100)
    far = combine_spread({"latency": wide, "power": []})
    assert known.latency < far.latency < wide.apart
    assert far.power == known.power
    assert far.cards == 3
    near = combine_spread(
        {"latency": CardComponents("latency", 0.0, 0.0, 0.0, 3, 100), "power": []}
    )
    assert near.latency == pytest.approx(known.latency / 2**0.5)


def test_a_shift_of_residuals_widens_and_never_narrows() -> None:
    known = published_spread()
    small, large = (CardShift("b", shift, 0.005, 50) for shift in (0.001, 0.12))
    assert combine_spread({"latency": [], "power": [small]}).power == known.power
    assert combine_spread({"latency": [], "power": [large]}).power > 1.5 * known.power


def test_shifts_are_differences_of_the_residuals_of_random_rows(rows: KernelRows) -> None:
    """A second card that is 5 % slower, of every other row, shows as 5 %; rows chosen otherwise do
    not count.
    """
    rng = np.random.default_rng(0)
    second = rng.uniform(size=len(rows)) < 0.4
    odd = rng.uniform(size=len(rows)) < 0.2
    made = replace(
        rows,
        uuid=tuple("second" if s else "first" for s in second),
        chosen=tuple("suggested" if o else "plan" for o in odd),
    )
    wanted = np.flatnonzero(made.to_judge())
    slower = np.where(second, 1.05, 1.0) * np.where(odd & second, 3.0, 1.0)
    of_kind = rows.kind
    found = residual_shifts(
        made,
        "latency",
        _held(rows, wanted, (slower * rng.lognormal(0, 0.08, len(rows)))[wanted], of_kind),
    )
    (shift,) = found
    assert shift.card == "second"
    assert shift.shift == pytest.approx(np.log(1.05), abs=3 * shift.error)
    assert shift.error < 0.01


def _held(rows: KernelRows, wanted: np.ndarray, ratio: np.ndarray, kind: tuple[str, ...]) -> object:
    n = len(wanted)
    held = SimpleNamespace(
        kind=tuple(kind[i] for i in wanted),
        data=tuple(rows.data[i] for i in wanted),
        latency_s=ratio,
        predicted_latency_s=np.ones(n),
        power_w=np.full(n, np.nan),
        predicted_power_w=np.ones(n),
        clock_hz=np.full(n, 1.98e9),
    )
    held.is_random = partial(HeldOutRows.is_random, held)
    held.ratio = partial(HeldOutRows.ratio, held)
    return held


def test_the_database_says_which_card_measured_what(rows: KernelRows) -> None:
    assert len(rows.uuid) == len(rows.run) == len(rows.chosen) == len(rows)
    assert all(rows.uuid)
    noise = measurement_noise("h200")
    assert 0.1 < noise["burst", "all"] < 2.0  # percent
    assert 0.1 < noise["sustained", "all"] < 3.0


def test_moved_ends_cover_another_card() -> None:
    """Skewed residuals of one card, moved out by the spread, hold 85 to 95 % of other cards' rows
    on average.
    """
    rng = np.random.default_rng(4)

    def of_card(n: int) -> np.ndarray:
        return np.exp(rng.gamma(2.0, 0.02, n) - 0.03 + rng.normal(0, 0.01, n))

    ends = np.quantile(of_card(4000), [0.05, 0.95])
    spread = 0.04
    far = np.exp(widen_log_ends(np.log(ends), NORMAL_P90 * spread))
    seen, narrow = [], []
    for _ in range(400):
        other = of_card(200) * np.exp(rng.normal(0, spread))
        seen.append(((other >= far[0]) & (other <= far[1])).mean())
        narrow.append(((other >= ends[0]) & (other <= ends[1])).mean())
    assert 0.85 < np.mean(seen) < 0.95
    assert np.mean(narrow) < 0.80


def test_ends_on_one_side_of_the_prediction_move_apart() -> None:
    low, high = np.exp(widen_log_ends(np.log([1.1, 1.3]), 0.05))
    assert low < 1.1
    assert high > 1.3
    assert widen_log_ends(np.array([-0.1, 0.2]), 0.0).tolist() == [-0.1, 0.2]


def test_intervals_are_for_another_card_unless_told() -> None:
    other, this = (
        api.predict("gpt2", "h200", batch=1, seq=64, card=card) for card in ("another", "this")
    )
    assert float(other.latency_s) == float(this.latency_s)
    for name in ("latency_s", "power_w", "energy_j"):
        (low, high), (own_low, own_high) = (getattr(p.interval, name) for p in (other, this))
        assert low < own_low < own_high < high
    assert any("another card" in note for note in other.assumptions)
    assert not any("another card" in note for note in this.assumptions)
    with pytest.raises(UnknownName, match="card"):
        api.predict("gpt2", "h200", card="mine")


def test_a_bundle_keeps_its_spread(tmp_path: Path) -> None:
    shipped = shipped_bundle("h200")
    assert shipped is not None
    measured = CardSpread(0.02, 0.05, 3, "three cards")
    for found, wanted in ((replace(shipped, cards=measured), measured), (shipped, shipped.cards)):
        bundle_file.write_bundle(found, tmp_path / "bundle.json")
        assert bundle_file.read_bundle(tmp_path).cards == wanted
    assert shipped.for_this_card().cards == THIS_CARD
    assert forecast_bundle(load_gpu("h100-sxm")).cards == shipped.cards


def test_a_spread_out_of_reason_is_refused() -> None:
    with pytest.raises(WattcastError, match="standard deviation"):
        CardSpread(1.5, 0.1, 1, "")


def test_idle_rows_of_two_cards_keep_the_slope_of_each() -> None:
    """Pooled as they were, a cooler card that draws more hid that idle power grows with
    temperature.
    """
    degrees = np.array([34.0, 42.0, 43.0, 48.0])
    power_w = np.array([128.0, 132.8, 127.0, 130.0])  # 0.6 W a degree on both, 6.4 W apart
    found = kernel_rows._level_cards(power_w, degrees, ["a", "a", "b", "b"], {"a": 300, "b": 100})
    slope, at_zero = np.polyfit(degrees, found, 1)
    assert slope == pytest.approx(0.6, abs=1e-9)
    levels = (128.0 - 0.6 * 34, 127.0 - 0.6 * 43)
    assert at_zero == pytest.approx(0.75 * levels[0] + 0.25 * levels[1])
    assert kernel_rows._level_cards(power_w, degrees, ["a"] * 4, {}) is power_w
