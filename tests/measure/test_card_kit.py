"""The kit for cards of others: with stand-ins for a card, NVML, amdsmi and a Jetson's files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wattcast.calibrate.kit_files import read_kit_rows
from wattcast.calibrate.table_rows import read_tables
from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import RunInfo
from wattcast.hardware import load_gpu
from wattcast.lab.campaigns.card_kit import PowerReader, list_operators, run_kit, write_kit
from wattcast.measure.energy_sources import (
    DeviceIdentity,
    EnergySource,
    JetsonSource,
    SlowReadings,
)
from wattcast.measure.shared_cards import describe_amd_sharing, describe_nvidia_sharing

CALL_S = 5e-5
WATTS = 240.0


class StandInDevice:
    """A card on which every operator takes as long; products of one size fail."""

    dtype = "bf16"
    memory_byte = 24e9

    def build(self, operator: Mapping[str, Any]) -> Callable[[], None]:
        if operator.get("m") == 4096:
            raise RuntimeError("out of memory")
        return lambda: None

    def calls(self) -> int:
        return 20

    def time_s(self, run: Callable[[], None], times: int) -> float:
        run()
        time.sleep(min(times * 20 * CALL_S, 0.03))
        return times * 20 * CALL_S

    def describe(self) -> dict[str, str]:
        return {"torch": "2.9", "cuda": "13.0"}


class StandInSource(EnergySource):
    """A card without an energy counter that draws the same watts all the time."""

    def open(self) -> DeviceIdentity:
        return DeviceIdentity("stand-in")

    def energy_j(self) -> float:
        return math.nan

    def sm_clock_hz(self) -> float:
        return 1.5e9

    def slow(self) -> SlowReadings:
        return SlowReadings(instant_w=WATTS)

    def close(self) -> None:
        pass


class CountingSource(StandInSource):
    """A card whose energy counter runs."""

    def energy_j(self) -> float:
        return 100.0 * time.monotonic()


def _measure(tmp_path: Path, few: int = 30, shared: tuple[str, ...] = ()) -> Path:
    rows = run_kit(StandInDevice(), PowerReader(StandInSource()), "run-1", 60.0, few)
    info = RunInfo(
        run="run-1", date="2026-11-19", card_name="NVIDIA GeForce RTX 4090", driver="580"
    )
    path = tmp_path / "mine.kit.json.gz"
    write_kit(path, info, rows, shared)
    return path


def test_rows_of_a_kit_are_those_of_the_card(tmp_path: Path) -> None:
    """Bursts have the card's time, sustained rows its watts; what failed is left out."""
    rows = read_kit_rows(_measure(tmp_path))
    burst = rows.is_kind("burst")
    assert 20 <= burst.sum() <= 30
    np.testing.assert_allclose(rows.column("latency_s"), CALL_S, rtol=1e-9)
    sustained = rows.is_kind("sustained")
    assert sustained.sum() >= 5
    np.testing.assert_allclose(rows.column("power_w")[sustained], WATTS, rtol=1e-9)
    assert rows.card == "NVIDIA GeForce RTX 4090 580"
    assert all(getattr(op, "m", 0) != 4096 for op in rows.ops)


def test_calibrate_takes_the_file(tmp_path: Path) -> None:
    """A kit is one of the tables of ``wattcast calibrate --table``."""
    table = read_tables([_measure(tmp_path)], load_gpu("rtx-4090"))
    assert {op.kind for op in table.rows.ops} >= {"linear"}
    assert table.rows.fit.all()


def test_a_shared_card_is_refused(tmp_path: Path) -> None:
    """Watts of a card that others use are not those of the program; a slice is not the card."""
    path = _measure(tmp_path, few=2, shared=("MIG is enabled: programs run on slices of the card",))
    with pytest.raises(BadInput, match="MIG is enabled"):
        read_kit_rows(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.kit.json.gz"
    path.write_bytes(b"nothing compressed")
    with pytest.raises(BadInput, match="lab kit"):
        read_kit_rows(path)


def test_energy_counters_come_before_sensors() -> None:
    reader = PowerReader(CountingSource())
    watts = reader.measure(lambda: time.sleep(0.2))
    assert watts == pytest.approx(100.0, rel=0.05)
    assert reader.clock_hz == pytest.approx(1.5e9)


def test_the_plan_fits_small_cards() -> None:
    """A Jetson Nano of 4 GB gets no operator that takes more than a fifth of it, in every size."""
    small = list_operators("fp16", 4e9)
    assert small != sorted(small, key=str)
    assert 40 <= len(small) <= len(list_operators("bf16", 80e9))
    for item in small:
        if item["op"] == "linear":
            m, n, k = (item[name] for name in "mnk")
            assert 2.0 * (m * k + n * k + m * n) < 0.8e9


class _NvmlError(Exception):
    pass


def _make_nvml(mig: int | None, users: list[int]) -> SimpleNamespace:
    def ask_mig(handle: object) -> tuple[int, int]:
        if mig is None:
            raise _NvmlError("not supported")
        return mig, mig

    return SimpleNamespace(
        NVMLError=_NvmlError,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMigMode=ask_mig,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=user) for user in users
        ],
    )


def test_slices_and_other_users_of_nvidia_cards_are_told() -> None:
    import os

    assert describe_nvidia_sharing(_make_nvml(None, []), 0) == ()
    assert describe_nvidia_sharing(_make_nvml(0, [os.getpid()]), 0) == ()
    (slices,) = describe_nvidia_sharing(_make_nvml(1, []), 0)
    assert "MIG" in slices
    (others,) = describe_nvidia_sharing(_make_nvml(0, [1, 2]), 0)
    assert others.startswith("2 other processes")


def test_partitions_of_amd_cards_are_told() -> None:
    smi = SimpleNamespace(
        AmdSmiException=_NvmlError,
        amdsmi_get_processor_handles=lambda: ["card"],
        amdsmi_get_gpu_compute_partition=lambda handle: "CPX",
        amdsmi_get_gpu_process_list=lambda handle: [{"pid": 1}],
    )
    reasons = describe_amd_sharing(smi, 0)
    assert len(reasons) == 2
    assert "CPX" in reasons[0]
    smi.amdsmi_get_gpu_compute_partition = lambda handle: "SPX"
    smi.amdsmi_get_gpu_process_list = lambda handle: []
    assert describe_amd_sharing(smi, 0) == ()


def _make_jetson(root: Path, rails: Mapping[str, tuple[int, int]]) -> None:
    folder = root / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    folder.mkdir(parents=True)
    for number, (name, (millivolt, milliampere)) in enumerate(rails.items(), start=1):
        (folder / f"in{number}_label").write_text(f"{name}\n")
        (folder / f"in{number}_input").write_text(f"{millivolt}\n")
        (folder / f"curr{number}_input").write_text(f"{milliampere}\n")
    gpu = root / "sys/class/devfreq/17000000.gpu"
    gpu.mkdir(parents=True)
    (gpu / "cur_freq").write_text("612000000\n")
    (gpu / "max_freq").write_text("1020000000\n")
    model = root / "proc/device-tree"
    model.mkdir(parents=True)
    (model / "model").write_text("NVIDIA Jetson Orin Nano Developer Kit\0")


def test_a_jetson_tells_watts_without_privileges(tmp_path: Path) -> None:
    """The rail of the module counts alone where there is one, else all rails do."""
    _make_jetson(tmp_path, {"VDD_IN": (5000, 2400), "VDD_CPU_GPU_CV": (5000, 1000)})
    source = JetsonSource(root=tmp_path)
    identity = source.open()
    assert identity.name == "NVIDIA Jetson Orin Nano Developer Kit"
    assert identity.top_clock_hz == 1.02e9
    assert source.slow().instant_w == pytest.approx(12.0)
    assert source.sm_clock_hz() == 6.12e8
    _make_jetson(tmp_path / "orin", {"VDD_GPU_SOC": (19000, 1000), "VDD_CPU_CV": (19000, 500)})
    other = JetsonSource(root=tmp_path / "orin")
    other.open()
    assert other.slow().instant_w == pytest.approx(28.5)
