"""AMD through a fake ``amdsmi``, CPUs through a fake powercap tree, and the choice among sources."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from wattcast.core.errors import MissingTool, UnknownName
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.energy_sources import AmdSource, RaplSource, ReadError, open_source
from wattcast.measure.polling_process import PollingPace


def package(root: Path, name: str, energy_uj: int, range_uj: int = 65_532_610_987) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder / "energy_uj"


def test_rapl_adds_packages_and_unwraps_each(tmp_path: Path) -> None:
    first, second = (
        package(tmp_path, "intel-rapl:0", 5_000_000),
        package(tmp_path, "intel-rapl:1", 65_532_000_000),
    )
    package(tmp_path, "intel-rapl:0:0", 999)  # a core domain, counted in its package
    source = RaplSource(root=tmp_path)
    assert "2 package" in source.open().name
    begin_j = source.energy_j()
    first.write_text("6000000\n")
    second.write_text("389013\n")  # wrapped: 0.610987 J to the top, then 0.389013 J
    assert source.energy_j() - begin_j == pytest.approx(1.0 + 1.0, rel=1e-6)
    assert math.isnan(source.sm_clock_hz())
    second.unlink()
    with pytest.raises(ReadError, match="RAPL"):
        source.energy_j()


def test_a_rapl_counter_that_restarts_has_not_wrapped(tmp_path: Path) -> None:
    """Every fall was taken for a wrap: a restart at 30 kJ added 35 kJ."""
    path = package(tmp_path, "intel-rapl:0", 30_000_000_000)
    source = RaplSource(root=tmp_path)
    source.open()
    assert source.energy_j() == pytest.approx(30_000.0)
    path.write_text("5000000\n")
    assert source.energy_j() == pytest.approx(5.0)


def test_rapl_is_one_device(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 5_000_000)
    assert "1 package" in RaplSource(0, tmp_path).open().name
    with pytest.raises(MissingTool, match="no number 1"):
        RaplSource(1, tmp_path).open()


def test_rapl_without_counters_or_rights_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingTool, match="no RAPL counter"):
        RaplSource(root=tmp_path).open()


class AmdError(Exception):
    pass


def fake_amdsmi(gpus: int = 1) -> ModuleType:
    module = ModuleType("amdsmi")
    values = {
        "AmdSmiException": AmdError,
        "AmdSmiClkType": SimpleNamespace(GFX="gfx", MEM="mem"),
        "AmdSmiTemperatureType": SimpleNamespace(HOTSPOT="hot"),
        "AmdSmiTemperatureMetric": SimpleNamespace(CURRENT="now"),
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: list(range(gpus)),
        "amdsmi_get_gpu_asic_info": lambda h: {
            "market_name": "Instinct MI300X",
            "asic_serial": "0xabc",
        },
        "amdsmi_get_gpu_device_uuid": lambda h: "uuid-0",
        "amdsmi_get_gpu_driver_info": lambda h: {"driver_version": "6.10"},
        "amdsmi_get_energy_count": lambda h: {
            "energy_accumulator": 2_000_000,
            "counter_resolution": 15.3,
        },
        "amdsmi_get_clock_info": lambda h, domain: {"clk": 2100 if domain == "gfx" else 1300},
        "amdsmi_get_temp_metric": lambda h, kind, metric: 61,
        "amdsmi_get_power_info": lambda h: {
            "current_socket_power": 655,
            "average_socket_power": "N/A",
        },
    }
    for name, value in values.items():
        setattr(module, name, value)
    return module


def test_amd_reads_energy_power_clock_and_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi())
    source, identity = open_source("amd")
    assert (identity.name, identity.driver, identity.serial) == ("Instinct MI300X", "6.10", "0xabc")
    assert source.energy_j() == pytest.approx(30.6)  # 2e6 counts of 15.3 uJ
    assert source.sm_clock_hz() == 2.1e9
    slow = source.slow()
    assert (slow.instant_w, slow.temperature_c, slow.memory_clock_hz) == (655.0, 61.0, 1.3e9)
    assert math.isnan(slow.average_w)  # amdsmi says N/A
    source.close()


def test_amd_without_its_library_or_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(MissingTool, match="amdsmi is not installed"):
        AmdSource().open()
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(gpus=1))
    with pytest.raises(MissingTool, match="no number 3"):
        AmdSource(3).open()


def test_a_source_without_the_card_that_was_asked_for_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library stayed open for good where it had no card of that number."""
    module = fake_amdsmi(gpus=1)
    closed = []
    monkeypatch.setattr(module, "amdsmi_shut_down", lambda: closed.append(True))
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    with pytest.raises(MissingTool, match="no number 3"):
        open_source("amd", 3)
    assert closed


def test_an_amd_reading_that_fails_is_an_error_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_amdsmi()

    def broken(*arguments: object) -> None:
        raise AmdError("device is busy")

    module.amdsmi_get_energy_count = broken
    module.amdsmi_get_clock_info = broken
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    source, _ = open_source("amd")
    with pytest.raises(ReadError, match="busy"):
        source.energy_j()
    assert math.isnan(source.sm_clock_hz())


def test_an_unknown_source_is_named() -> None:
    with pytest.raises(UnknownName, match="nvml"):
        open_source("nvm")


def test_the_pace_learns_the_step_and_then_rests() -> None:
    """Beside a program of a minute: a few readings a second, and now and then a sharp one."""
    pace, now_s, reads, sharp = PollingPace(0.05, relaxed=True), 0.0, 0, 0
    previous_s = 0.0
    while now_s < 60.0:
        step = math.floor(now_s / 0.1)
        sharp += now_s > 10.0 and step != math.floor(previous_s / 0.1) and now_s - previous_s < 0.01
        reads += now_s > 10.0
        previous_s = now_s
        now_s += max(pace.wait_s(now_s, 30.0 * step), 1e-3)
    assert reads / 50.0 < 6.0
    assert sharp >= 6


def test_the_pace_is_quick_when_asked() -> None:
    pace, now_s = PollingPace(0.05), 0.0
    for _ in range(2000):
        now_s += pace.wait_s(now_s, 30.0 * math.floor(now_s / 0.1))
    assert pace.wait_s(now_s, 30.0 * math.floor(now_s / 0.1), quick=True) < 0.003


def _relaxed_run(phase_s: float, seed: int, length_s: float = 24.0) -> EnergySamples:
    """A relaxed sampler beside a program of loads and rests; each reading of the counter takes
    about 3.5 ms.
    """
    random = np.random.default_rng(seed)
    steps_s = np.arange(0.0, length_s + 1.0, 0.1) + phase_s
    busy = (steps_s > 4.1) & ((steps_s - 4.1) % 6.3 < 5.3)
    energy_j = np.concatenate([[0.0], np.cumsum(np.where(busy, 690.0, 130.0)) * 0.1])
    pace, now_s = PollingPace(0.05, relaxed=True), 0.0
    rows = np.full((0, len(COLUMNS)), np.nan)
    while now_s < length_s:
        took_s = 0.0035 * random.uniform(0.8, 1.2)
        row = np.full((1, len(COLUMNS)), np.nan)
        row[0, 0] = now_s + 0.5 * took_s
        row[0, COLUMNS.index("energy_j")] = energy_j[
            int((now_s + 0.9 * took_s - phase_s) // 0.1) + 1
        ]
        rows = np.concatenate([rows, row])
        now_s = max(
            row[0, 0] + pace.wait_s(row[0, 0], row[0, COLUMNS.index("energy_j")]), now_s + took_s
        )
    return EnergySamples(rows)


def test_a_relaxed_sampler_keeps_the_counters_phase_for_many_seconds() -> None:
    """Its first guess at the period is a percent off; readings half a second apart must still be
    placed.
    """
    found = [find_ticks(_relaxed_run(0.003 * number, number)) for number in range(30)]
    known = [t for t in found if t.step_s is not None and abs(t.step_s - 0.1) < 2e-4]
    assert len(known) >= 28
    for t in known:
        inside = t.between(5.3, 9.3)
        assert inside.power_w == pytest.approx(690.0, rel=0.005)
