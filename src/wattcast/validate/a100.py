"""Forecasts of whole models on other GPUs against published rows: nothing fitted, one row, eight rows, other clocks.

No row chooses anything in the forecast; the rule and its history are in ``docs/method/other-gpus.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array, per_sweep
from wattcast.fit.calibrate import calibrate, calibrate_rows
from wattcast.fit.calibrate_energaizer import GPU, RunRow, clean, others, published, rows
from wattcast.fit.calibrate_model import UNCAPPED_W, Measured, predict, rows_of
from wattcast.fit.calibrate_model import Row as AnalysedRow
from wattcast.fitted import Bundle, bundle_for
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.prediction import predict as predict_whole
from wattcast.validate.a100_floor import in_domain, transferred
from wattcast.validate.rows import Row, percent, row

DRAWS, ANCHORS, SEED = 20, 8, 6  # draws of eight rows; the seed was not varied
_EIGHT = "calibrated on 8 rows, mean of 20 draws"


def a100_rows(folder: Path) -> list[Row]:
    """Every set of whole-model rows that is here."""
    gpu = hardware.load(GPU)
    bundle = bundle_for(gpu)
    at_900 = clean(rows(folder, "900"))
    kept = [r for r in at_900 if r.model != "resnet101"]
    found = _zero_shot(kept, at_900, gpu, bundle)
    found += _anchored([as_measured(r, gpu) for r in kept], [r.model for r in kept], gpu, bundle)
    found += _clocks(folder, kept, gpu, bundle)
    for name, some in others(folder).items():
        chip = hardware.load(name)
        error = _errors([as_measured(r, chip) for r in some], {}, chip, bundle_for(chip))
        found += [
            row(f"{name} whole models, forecast", q, len(some), e) for q, e in zip(_QUANTITIES, error, strict=True)
        ]
    return found


def as_measured(r: RunRow, gpu: Gpu) -> Measured:
    """A published row as a calibration row, at the clock that really ran."""
    clock_hz = min(r.clock_hz, float(per_sweep(gpu.clocks.max_hz)))
    return Measured(r.name, r.graph, r.latency_s, r.power_w, clock_hz, r.temperature_c)


_QUANTITIES = ("latency", "power", "energy")


def _errors(
    measured: Sequence[Measured], factors: Mapping[str, float], gpu: Gpu, bundle: Bundle
) -> tuple[float | None, ...]:
    return _row_errors(rows_of(measured, gpu, bundle), factors, gpu, bundle)


def _row_errors(
    some: Sequence[AnalysedRow], factors: Mapping[str, float], gpu: Gpu, bundle: Bundle
) -> tuple[float | None, ...]:
    return _against([r.measured for r in some], *predict(some, factors, gpu, bundle))


def _against(measured: Sequence[Measured], seconds: Array, watts: Array) -> tuple[float | None, ...]:
    true_s, true_w = (np.array([getattr(m, n) for m in measured], dtype=float) for n in ("latency_s", "power_w"))
    return percent(seconds, true_s), percent(watts, true_w), percent(seconds * watts, true_s * true_w)


def _zero_shot(kept: list[RunRow], everything: list[RunRow], gpu: Gpu, bundle: Bundle) -> list[Row]:
    mine, all_rows = ([as_measured(r, gpu) for r in some] for some in (kept, everything))
    error, whole = _errors(mine, {}, gpu, bundle), _errors(all_rows, {}, gpu, bundle)
    floor = _against(mine, *transferred(mine, gpu))
    inside = _covered(mine, gpu, bundle)
    young = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=12e-6))
    faster = _errors(mine, {}, gpu, young)
    where = "A100 900 MHz, forecast, no A100 rows"
    wanted = (("11.7", 14.0, 11.0), ("8.3", 12.0, 8.0))
    return [
        row(
            where,
            quantity,
            len(mine),
            error[i],
            floor[i],
            f"{best} with an A100 kernel database",
            must,
            aim,
            coverage=_rounded(inside[i]),
            with_resnet=_rounded(whole[i]),
            host_12_us=_rounded(faster[i]),
        )
        for i, (quantity, (best, must, aim)) in enumerate(zip(_QUANTITIES, wanted, strict=False))
    ]


def _covered(measured: Sequence[Measured], gpu: Gpu, bundle: Bundle) -> tuple[float, float]:
    """Percent of rows inside the forecast's 90 % intervals of latency and of power."""
    latency, power = [], []
    for m in measured:
        at = OperatingPoint(m.clock_hz, UNCAPPED_W, m.temperature_c)
        ends = predict_whole(m.graph, gpu, at, bundle).interval
        latency.append(ends.latency_s[0] <= m.latency_s <= ends.latency_s[1])
        power.append(m.power_w is not None and ends.power_w[0] <= m.power_w <= ends.power_w[1])
    return 100.0 * float(np.mean(latency)), 100.0 * float(np.mean(power))


def _anchored(measured: list[Measured], family: list[str], gpu: Gpu, bundle: Bundle) -> list[Row]:
    floor = _against(measured, *in_domain(measured, family, gpu))
    count = len(measured)
    analysed, draw = rows_of(measured, gpu, bundle), np.random.default_rng(SEED)
    one = np.array([_drawn(analysed, [i], gpu, bundle) for i in range(count)])
    eight = np.array(
        [_drawn(analysed, draw.choice(count, ANCHORS, replace=False).tolist(), gpu, bundle) for _ in range(DRAWS)]
    )
    moved = _against(measured, *transferred(measured, gpu))
    anchor, eighths = "A100 900 MHz, one row as anchor, mean of all", f"A100 900 MHz, {_EIGHT}"
    said, left = eight.mean(axis=0), count - ANCHORS
    seconds = _rounded(one[:, 0].mean())
    return [
        row(anchor, "power", count - 1, float(one[:, 1].mean()), moved[1], None, 8.0, 6.0, latency=seconds),
        row(eighths, "latency", left, float(said[0]), floor[0], "11.7", 11.0, 8.0),
        row(eighths, "power", left, float(said[1]), floor[1], "8.3", 5.8, 4.5),
    ]


def _drawn(analysed: list[AnalysedRow], chosen: list[int], gpu: Gpu, bundle: Bundle) -> tuple[float | None, ...]:
    """Errors on the other rows after calibrating on some."""
    some = calibrate_rows([analysed[i] for i in chosen], gpu, bundle, "drawn rows")
    return _row_errors([r for i, r in enumerate(analysed) if i not in set(chosen)], some.factors, gpu, bundle)


def _clocks(folder: Path, kept: list[RunRow], gpu: Gpu, bundle: Bundle) -> list[Row]:
    clocks = clean(rows(folder, "clocks"))
    factors = calibrate([as_measured(r, gpu) for r in kept], gpu, bundle, "rows at 900 MHz").factors
    wanted = (("17.2", 13.0, 8.0), ("7.7", 6.8, 5.0), ("14.2", 11.0, 8.0))
    found = []
    for name, some in (("clean", clocks), ("of the paper", published(folder, clocks))):
        mine = [as_measured(r, gpu) for r in some]
        error, raw = _errors(mine, factors, gpu, bundle), _errors(mine, {}, gpu, bundle)
        floor = _against(mine, *in_domain(mine, [r.model for r in some], gpu))
        found += [
            row(
                f"A100 other clocks, calibrated at 900 MHz, rows {name}",
                quantity,
                len(mine),
                error[i],
                floor[i],
                best,
                must,
                aim,
                no_A100_rows=_rounded(raw[i]),
            )
            for i, (quantity, (best, must, aim)) in enumerate(zip(_QUANTITIES, wanted, strict=True))
        ]
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 2)
