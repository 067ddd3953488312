"""A simulator that listens to its own power."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

from gpuwattch.conftest import COLUMNS, sample_rows
from wattcast.core.errors import BadInput, MissingEvents, UnknownName
from wattcast.lab.gpuwattch.component_build import (
    ClockSetting,
    PowerMeter,
    SamplePower,
    build_component_model,
)
from wattcast.lab.gpuwattch.component_set import read_component_set
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect
from wattcast.lab.gpuwattch.trace_run import run_trace

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def meter() -> PowerMeter:
    model = build_component_model(
        demo_architecture(), demo_energies(), read_component_set(SimulatorDialect.GPUWATTCH)
    ).model
    return PowerMeter(model, ClockSetting(1e9), SimulatorDialect.GPUWATTCH)


def counts(row: np.ndarray) -> dict[str, float]:
    return dict(zip(COLUMNS[:-1], row[:-1].tolist(), strict=True))


def test_sample_by_sample_is_the_trace(meter: PowerMeter, write_trace, demo_run) -> None:
    rows = sample_rows(9)
    seen: list[SamplePower] = []
    meter.listeners = (lambda s: seen.append(s),)  # type: ignore[func-returns-value,assignment,return-value]
    for row in rows:
        meter.sample(counts(row), 500)
    whole = run_trace(demo_run(write_trace(rows)))
    assert meter.energy_j == pytest.approx(whole.energy_j, rel=1e-12)
    assert meter.time_s == pytest.approx(whole.duration_s, rel=1e-12)
    assert [s.index for s in seen] == list(range(9))
    assert seen[0].power_w == pytest.approx(sum(seen[0].part_w.values()))


def test_a_listener_sets_the_next_sample(meter: PowerMeter) -> None:
    row = counts(sample_rows(1)[0])
    meter.listeners = (lambda s: ClockSetting(0.5e9, 0.5) if s.index == 0 else None,)
    assert meter.sample(row, 500) == ClockSetting(0.5e9, 0.5)
    first_s = meter.time_s
    meter.sample(row, 500)
    assert meter.time_s - first_s == pytest.approx(2 * first_s)
    assert meter.setting == ClockSetting(0.5e9, 0.5)


def test_bad_samples_are_refused(meter: PowerMeter) -> None:
    row = counts(sample_rows(1)[0])
    for cycles in (0, -1, float("nan")):
        with pytest.raises(BadInput, match="cycles above zero"):
            meter.sample(row, cycles)
    with pytest.raises(UnknownName, match="TOT_INST"):
        meter.sample(row | {"TOT_INTS": 1.0}, 500)
    with pytest.raises(BadInput, match="IC_H"):
        meter.sample(row | {"IC_H": -1.0}, 500)
    with pytest.raises(MissingEvents, match="icache_hit"):
        meter.sample({k: v for k, v in row.items() if k != "IC_H"}, 500)
    with pytest.raises(BadInput, match="clock"):
        ClockSetting(0.0)


def test_the_example_holds_its_limit() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "simulator_feedback.py"))
    free, held = example["simulate"](None), example["simulate"](26.0)
    assert held.energy_j / held.time_s < 26.0 < free.energy_j / free.time_s
    assert held.time_s > free.time_s
    assert held.energy_j < free.energy_j
