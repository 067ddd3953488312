"""What single coefficients of calibrating on public tables mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wattcast.calibrate import table_fit
from wattcast.calibrate.table_fit import _choose_rows, _keep_common_kinds
from wattcast.calibrate.table_rows import (
    TableFile,
    _draw_rows,
    _find_host_floor_ms,
    held_out,
    read_tables,
)
from wattcast.core.errors import BadInput
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.kernel_phases import find_correction
from wattcast.workload.operator_types import Linear

GPU = load_gpu("h200")
HEAD = "kernel_source,gemm_dtype,m,n,k,latency"


def write_products(folder: Path, rows: list[str], head: str = HEAD, table: str = "gemm") -> Path:
    path = folder / f"h200_sxm.vllm-0.24.0.{table}.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


@pytest.mark.parametrize(("rows", "is_enough"), [(37, False), (46, True)])
def test_a_table_of_two_score_products_calibrates_a_card(
    tmp_path: Path, rows: int, is_enough: bool
) -> None:
    """With fewer rows the forecast stays as it is."""
    shapes = [Linear(64 * m, 512, 512) for m in range(1, 200)]
    fitted = [op for op, is_out in zip(shapes, held_out(shapes), strict=True) if not is_out]
    lines = [f"torch,bfloat16,{op.m},{op.n},{op.k},0.05" for op in fitted[:rows]]
    table = read_tables([write_products(tmp_path, lines)], GPU)
    assert len(table.rows) == rows
    if is_enough:
        assert len(_choose_rows(table, GPU).fitted.rows) == rows
        return
    with pytest.raises(BadInput, match="are needed"):
        _choose_rows(table, GPU)


@pytest.mark.parametrize(
    ("latency_ms", "band"),
    [(0.016, 0), (0.023, 1), (0.08, 1), (0.12, 2)],
)
def test_rows_are_drawn_from_the_bands_that_reports_name(
    tmp_path: Path, latency_ms: float, band: int
) -> None:
    """Of two rows of a band one is drawn where one is asked for."""
    middles_ms = (0.004, 0.05, 1.0)
    latencies_ms = (*middles_ms, latency_ms)
    lines = [f"torch,bfloat16,{64 * n},512,512,{time}" for n, time in enumerate(latencies_ms, 1)]
    path = write_products(tmp_path, lines)
    columns = tuple(HEAD.split(","))
    file = TableFile(path, "gemm", "h200_sxm", "vllm", "0.24.0", False, False, columns)
    drawn_ms = {row["latency"] for row in _draw_rows(file, 1)}
    assert len(drawn_ms) == 3
    others_ms = {time for place, time in enumerate(middles_ms) if place != band}
    assert others_ms < drawn_ms


def test_a_fifth_of_all_shapes_is_held_out() -> None:
    shapes = [Linear(m, n, 512) for m in range(1, 60) for n in (256, 512, 768, 1024)]
    assert float(np.mean(held_out(shapes))) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(("power_w", "is_at_top"), [(500.0, True), (625.0, True), (660.0, False)])
def test_a_card_well_below_its_limit_ran_at_its_top_clock(
    tmp_path: Path, power_w: float, is_at_top: bool
) -> None:
    """A governor holds a card at 92 to 98 % of its limit: there the clock is not known."""
    head = f"{HEAD},power,power_limit"
    lines = [f"torch,bfloat16,512,8192,8192,1.0,{power_w},700"]
    table = read_tables([write_products(tmp_path, lines, head, "gemm_power")], GPU)
    (clock_hz,) = table.rows.column("sm_clock_hz")
    assert bool(np.isfinite(clock_hz)) is is_at_top


def find_floor_ms(folder: Path, shapes: list[tuple[int, int, int, float]]) -> float:
    """Return the latency below which fp8_block products may be bound by the host."""
    lines = [f"cutlass,fp8_block,{m},{n},{k},{latency}" for m, n, k, latency in shapes]
    path = write_products(folder, lines)
    columns = tuple(HEAD.split(","))
    file = TableFile(path, "gemm", "h200_sxm", "vllm", "0.24.0", False, False, columns)
    return _find_host_floor_ms(replace(file))


@pytest.mark.parametrize(
    ("shape", "tells"),
    [
        ((1400, 2560, 2560), True),  # 18 GFLOP: 10 us of an H200 at its peak
        ((1700, 2560, 2560), False),  # 22 GFLOP
        ((64, 6720, 6720), True),  # 47 MB
        ((64, 7360, 7360), False),  # 57 MB: 12 us of its memory
    ],
)
def test_products_of_some_microseconds_show_how_long_the_host_takes(
    tmp_path: Path, shape: tuple[int, int, int], tells: bool
) -> None:
    assert (find_floor_ms(tmp_path, [(*shape, 1.0)]) > 1.0) is tells


def test_rows_beyond_nearly_all_small_ones_by_a_fifth_are_not_bound_by_the_host(
    tmp_path: Path,
) -> None:
    """Of 200 small products one took 9 ms once, the others up to 0.6 ms."""
    usual = [(64, 256, 64 * place, 0.4 + 0.001 * place) for place in range(1, 200)]
    floor_ms = find_floor_ms(tmp_path, [*usual, (64, 512, 512, 9.0)])
    assert floor_ms == pytest.approx(1.2 * 0.6, rel=0.05)


def test_a_host_takes_a_third_of_a_millisecond_where_no_small_row_tells(tmp_path: Path) -> None:
    assert 0.25 < find_floor_ms(tmp_path, [(8192, 8192, 8192, 2.0)]) < 0.35


def refit_quantising(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int = 30,
    latency_s: float = 1e-4,
    predicted: float = 0.7,
    own: float = 0.4,
) -> np.ndarray | None:
    """Return what the quantising beside fp8 products is fitted to, None where it is left alone.

    ``predicted`` and ``own`` are what it and the product are predicted to take of the latency.
    """
    shapes = [(64 * place, 256, 4096) for place in range(1, rows + 1)]
    lines = [f"cutlass,fp8,{m},{n},{k},{1e3 * latency_s}" for m, n, k in shapes]
    table = read_tables([write_products(folder, lines)], GPU)
    assert len(table.rows) == rows
    fitted_to: list[np.ndarray] = []

    def refit(terms: Any, seconds: np.ndarray, clock_hz: Any, begin: Any) -> Any:
        fitted_to.append(seconds)
        return begin

    def predict_own(bundle: Any, chosen: Any, gpu: Any, run_s: float) -> np.ndarray:
        return np.full((len(chosen), 1), own * latency_s)

    monkeypatch.setattr(table_fit, "refit_correction", refit)
    monkeypatch.setattr(table_fit, "predict_with_bundle", predict_own)
    monkeypatch.setattr(
        table_fit,
        "predict_bursts_s",
        lambda kernels, gpu, bundle: np.full(len(kernels.ops), predicted * latency_s),
    )
    start = bundle_for(GPU)
    table_fit.fit_beside(table, GPU, start, start)
    return fitted_to[0] if fitted_to else None


@pytest.mark.parametrize(("predicted", "is_fitted"), [(0.4, False), (0.6, True)])
def test_quantising_that_takes_most_of_a_row_is_fitted_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, predicted: float, is_fitted: bool
) -> None:
    seconds = refit_quantising(tmp_path, monkeypatch, predicted=predicted)
    assert (seconds is not None) is is_fitted


@pytest.mark.parametrize(
    ("latency_s", "own", "is_fitted"),
    [(2e-4, 0.3, True), (2e-4, 0.6, False), (5e-5, 0.3, False)],
)
def test_quantising_is_fitted_where_the_product_leaves_most_of_a_long_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    latency_s: float,
    own: float,
    is_fitted: bool,
) -> None:
    """What is known of it may be far too little: vLLM 0.24 on Blackwell takes three times that."""
    seconds = refit_quantising(
        tmp_path,
        monkeypatch,
        predicted=0.2,
        latency_s=latency_s,
        own=own,
    )
    assert (seconds is not None) is is_fitted


def test_long_rows_of_quantising_do_not_lengthen_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that a fit made longer would lengthen products of some microseconds by it, and a
    step of seven times as long did: Llama in fp8 on a B200 went from 3 to 17 % too fast.
    """
    start = bundle_for(GPU)
    group = "elementwise.engine.rows.quantize.token"
    known = find_correction(group, start.corrections)

    def refit(terms: Any, seconds: np.ndarray, clock_hz: Any, begin: Any) -> Any:
        return replace(
            begin,
            compute=2.0 * begin.compute,
            fixed_s=10.0 * begin.fixed_s,
            serial_cycle=7.0 * begin.serial_cycle,
        )

    monkeypatch.setattr(table_fit, "refit_correction", refit)
    lines = [f"cutlass,fp8,{64 * place},256,4096,0.2" for place in range(1, 31)]
    table = read_tables([write_products(tmp_path, lines)], GPU)
    fitted = table_fit.fit_beside(table, GPU, start, start).corrections[group]
    assert fitted.compute == pytest.approx(2.0 * known.compute)
    assert fitted.fixed_s == known.fixed_s
    assert fitted.serial_cycle == known.serial_cycle


@pytest.mark.parametrize(("latency_s", "is_fitted"), [(17e-6, False), (24e-6, True)])
def test_rows_of_less_than_some_launches_say_nothing_of_what_ran_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency_s: float, is_fitted: bool
) -> None:
    """A launch takes 2 to 5 us, and these rows have two."""
    seconds = refit_quantising(tmp_path, monkeypatch, latency_s=latency_s)
    assert (seconds is not None) is is_fitted


@pytest.mark.parametrize(("rows", "is_kept"), [(12, False), (18, True)])
def test_a_dozen_rows_do_not_change_what_is_known_of_a_kind_of_products(
    tmp_path: Path, rows: int, is_kept: bool
) -> None:
    """Products with a single row, which have kernels of their own, are few beside fifty others."""
    lines = [f"torch,bfloat16,{512 * place},4096,4096,1.0" for place in range(1, 51)]
    lines += [f"torch,bfloat16,1,{512 * place},4096,1.0" for place in range(1, rows + 1)]
    table = read_tables([write_products(tmp_path, lines)], GPU)
    assert len(table.rows) == 50 + rows
    kept = _keep_common_kinds(table, GPU, bundle_for(GPU))
    assert len(kept.rows) == 50 + rows * is_kept


@pytest.mark.parametrize(("rows", "is_fitted"), [(12, False), (18, True)])
def test_a_dozen_rows_do_not_change_what_is_known_of_quantising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, is_fitted: bool
) -> None:
    assert (refit_quantising(tmp_path, monkeypatch, rows=rows) is not None) is is_fitted


def test_what_a_product_leaves_of_a_latency_is_not_believed_below_a_third_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where products seem to take 90 % of a latency, the forecast of products may be wrong."""
    half = refit_quantising(tmp_path, monkeypatch, own=0.5)
    least = refit_quantising(tmp_path, monkeypatch, own=0.9)
    assert half is not None
    assert least is not None
    assert 0.25 < 0.5 * float(np.median(least / half)) < 0.37
