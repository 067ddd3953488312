"""A fit from few rows: nothing to learn moves nothing, a card that differs is followed, and the
command does both.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.calibrate import kernel_rows
from wattcast.calibrate.forecast_shift import (
    ShrinkageLevel,
    move_forecast,
    scale_idle,
    shrink_towards_forecast,
)
from wattcast.calibrate.kernel_rows import assign_folds, on_random_data
from wattcast.calibrate.latency_fit import one_thread
from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.errors import WattcastError
from wattcast.core.row_tables import ROWS_FILE, database_folder, read_table, write_table
from wattcast.core.strict_files import FitStatus
from wattcast.hardware import load_gpu
from wattcast.lab.fit.few_rows_fit import FEW_BURSTS
from wattcast.lab.validate.long_checks.few_rows import Setting, distorted, drawn, errors
from wattcast.predictor.bundle.bundle_file import read_bundle, shipped_bundle
from wattcast.predictor.kernel_phases import Correction, find_correction


@pytest.fixture(scope="module")
def twin() -> Setting:
    """A card whose forecast is the shipped bundle: its rows have nothing new to say."""
    rows, shipped = kernel_rows.load_kernel_rows("h200"), shipped_bundle("h200")
    assert shipped is not None
    fold = assign_folds(rows)
    usable = rows.to_judge() & on_random_data(rows)
    own, test = (rows.select_rows(usable & (fold == k)) for k in (3, 4))
    test = test.select_rows(np.arange(len(test)) % 3 == 0)
    return Setting(load_gpu("h200"), shipped, own, test, kernel_rows.load_idle_rows("h200"))


def linear(count: int, shift: float, spread: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    slopes = rng.uniform(0, 1, (count, 3))
    return slopes, slopes @ np.array([shift, 0.0, 0.0]) + rng.normal(0, spread, count)


def test_rows_that_say_nothing_move_nothing() -> None:
    slopes, target = linear(50, 0.0, 0.1)
    found = shrink_towards_forecast(
        lambda t: target - slopes @ t,
        lambda _: slopes,
        [ShrinkageLevel(range(3), 0.1)],
        np.full(50, 0.1),
    )
    free = np.linalg.lstsq(slopes, target, rcond=None)[0]
    assert np.abs(found).max() < np.abs(free).max()
    assert np.abs(found).max() < 0.05


def test_a_clear_shift_is_followed() -> None:
    slopes, target = linear(80, 0.4, 0.05)
    found = shrink_towards_forecast(
        lambda t: target - slopes @ t,
        lambda _: slopes,
        [ShrinkageLevel(range(3), 0.1)],
        np.full(80, 0.1),
    )
    assert found == pytest.approx([0.4, 0.0, 0.0], abs=0.06)


def test_an_odd_row_does_not_rule() -> None:
    slopes, target = linear(60, 0.2, 0.03)
    target[0] += 5.0
    found = shrink_towards_forecast(
        lambda t: target - slopes @ t,
        lambda _: slopes,
        [ShrinkageLevel(range(3), 0.1)],
        np.full(60, 0.05),
    )
    assert found[0] == pytest.approx(0.2, abs=0.08)


@pytest.mark.slow  # by day: rows that say nothing move nothing, and fifty rows make a bundle
@pytest.mark.parametrize(("count", "draws"), [(100, 1), (50, 6)])
def test_a_twin_is_left_as_it_is(twin: Setting, count: int, draws: int) -> None:
    """Fifty rows have seventeen of power, and one draw in six moves it by more than the mean of the
    draws does.
    """
    before, after = errors(twin.parent, twin.test, twin.gpu), []
    for seed in range(draws):
        own = twin.card_rows.select_rows(drawn(twin.card_rows, count, seed))
        with one_thread():
            found = move_forecast(own, twin.gpu, twin.parent, twin.idle)
            after.append(errors(found.bundle, twin.test, twin.gpu))
    assert (np.mean(after, axis=0) < 1.05 * before).all()


@pytest.mark.slow
def test_fifty_rows_of_other_chips_halve_what_is_to_be_learned(twin: Setting) -> None:
    """Three chips are distorted, their forecast is not told; the twin's own error is what can be
    reached.
    """
    best = errors(twin.parent, twin.test, twin.gpu)
    before, after = [], []
    for seed in (1, 2, 3):
        some = replace(twin, card_rows=twin.card_rows.select_rows(drawn(twin.card_rows, 50, seed)))
        with one_thread():
            chip = distorted(some, seed)
            found = move_forecast(chip.card_rows, chip.gpu, chip.parent, chip.idle)
            before.append(errors(chip.parent, chip.test, chip.gpu))
            after.append(errors(found.bundle, chip.test, chip.gpu))
        assert (after[-1] < before[-1]).all()
        assert "card" in found.latency.levels
        assert found.latency.held_out < found.latency.forecast
    assert (np.mean(before, axis=0) > best + 2.0).all()
    assert (np.mean(after, axis=0) - best < 0.5 * (np.mean(before, axis=0) - best)).all()


def test_without_rows_the_forecast_stands(twin: Setting) -> None:
    nothing = twin.card_rows.select_rows(np.zeros(len(twin.card_rows), dtype=bool))
    found = move_forecast(nothing, twin.gpu, twin.parent, [])
    assert found.bundle.corrections == twin.parent.corrections
    assert found.latency.levels == found.power.levels == ()


def test_idle_rows_scale_the_idle_curve(twin: Setting) -> None:
    doubled = scale_idle(
        twin.parent, [(hz, 2.0 * watts, degrees) for hz, watts, degrees in twin.idle]
    )
    ratio = doubled.power.idle.power_w / scale_idle(twin.parent, twin.idle).power.idle.power_w  # type: ignore[attr-defined]
    assert ratio == pytest.approx(2.0)


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(list(argv), Environment(stdout=out, stderr=err, variables={}))
    return code, out.getvalue(), err.getvalue()


def few(folder: Path, count: int) -> Path:
    """A database with a few rows of the shipped one: two thirds bursts, a third sustained, and its
    idle rows.
    """
    rows = [row for row in read_table(database_folder("h200") / ROWS_FILE) if not row["error"]]
    rng = np.random.default_rng(5)

    def some(kind: str, n: int) -> list[dict[str, object]]:
        of_kind = [
            r
            for r in rows
            if r["kind"] == kind and r["data"] == "random" and not r["flags"] and not r["repeat"]
        ]
        return [of_kind[i] for i in rng.permutation(len(of_kind))[:n]]

    folder.mkdir()
    sustained = count // 3
    idle = [row for row in rows if row["kind"] == "idle"]
    write_table(
        folder / ROWS_FILE,
        [*some("burst", count - sustained), *some("sustained", sustained), *idle],
    )
    return folder


def test_fifty_rows_make_a_bundle_that_predicts(tmp_path: Path) -> None:
    database = few(tmp_path / "mine", 50)
    code, out, err = run(
        "lab", "fit", "kernels", str(database), "--gpu", "h200", "--out", str(tmp_path / "fitted")
    )
    assert code == 0, err
    found = read_bundle(tmp_path / "fitted")
    assert found.status is FitStatus.CALIBRATED
    assert "50 rows moved the forecast" in found.provenance.note
    assert found.provenance.device.startswith("NVIDIA H200")
    for family, residual in found.residuals.items():
        assert residual.latency[0] < 1 < residual.latency[1], family
    code, out, err = run(
        "predict", "gpt2", "--gpu", "h200", "--seq", "256", "--bundle", str(tmp_path / "fitted")
    )
    assert code == 0, err
    assert "W" in out


@pytest.mark.slow
def test_rows_of_another_kind_of_card_move_its_forecast(tmp_path: Path) -> None:
    """Rows of an H200 called those of an H100: memory is faster than the forecast thinks, and the
    fit follows.
    """
    database = few(tmp_path / "mine", 90)
    code, _, err = run(
        "lab",
        "fit",
        "kernels",
        str(database),
        "--gpu",
        "h100-sxm",
        "--out",
        str(tmp_path / "fitted"),
    )
    assert code == 0, err
    assert "time by card" in read_bundle(tmp_path / "fitted").provenance.note


def test_a_family_without_bursts_has_no_corrections_to_look_for() -> None:
    """Looking for them never ended."""
    with pytest.raises(WattcastError, match="conv2d"):
        find_correction("conv2d.point", {"gemm": Correction(1.0, 1.0, 1e-6)})


@pytest.mark.slow  # by day: such a family is refused (above), and fifty rows move a forecast
def test_few_rows_alone_refuse_or_fit_but_never_hang(tmp_path: Path) -> None:
    database = few(tmp_path / "mine", 60)
    code, _, err = run(
        "lab",
        "fit",
        "kernels",
        str(database),
        "--gpu",
        "h200",
        "--alone",
        "--out",
        str(tmp_path / "fitted"),
    )
    assert code == 0, err
    assert read_bundle(tmp_path / "fitted").status is FitStatus.MEASURED


def test_the_shipped_database_is_fitted_alone() -> None:
    rows = kernel_rows.load_kernel_rows("h200")
    assert (rows.is_kind("burst") & rows.fit).sum() > FEW_BURSTS
