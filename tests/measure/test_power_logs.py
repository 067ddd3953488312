"""Watts from logs of other tools; the files are made up in the forms that the tools' documentation shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattcast.core.errors import BadInput
from wattcast.measure.energy_samples import read_power_log

ORIN = (  # NVIDIA, Appendix TegraStats; a line of an AGX Orin is in GDWR/jetson_exporter, issue 14
    "04-11-2025 10:36:{s:02d} RAM 4321/62801MB (lfb 1759x4MB) SWAP 19/31400MB (cached 0MB) CPU [0%@729,off] "
    "EMC_FREQ 0%@2133 GR3D_FREQ 0%@[0,0] GPU@-256C VDD_GPU_SOC {mw}mW/2340mW VIN_SYS_5V0 4025mW/4025mW NC 0mW/0mW"
)
TX2 = "RAM 2020/7852MB (lfb 1164x4MB) CPU [9%@345,off] GR3D_FREQ 0% VDD_SYS_GPU {mw}/158 VDD_IN 3140/3208"
DCGM = """#Entity   POWER    TOTEC     SMCLK
ID        W        mJ        MHz
GPU 0     100.0    1000      1410
GPU 1     50.0     1000      1410
#Entity   POWER    TOTEC     SMCLK
ID        W        mJ        MHz
GPU 0     200.0    2000      1410
GPU 1     N/A      2000      1410
GPU 0     300.0    3000      1410
GPU 1     70.0     2000      1410
"""
JTOP = """time,uptime,GPU,Power VDD_IN,Power TOT
2026-11-16 10:00:00.0,1,0,4000,5000
2026-11-16 10:00:00.5,1,0,4000,5000
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "power.log"
    path.write_text(text)
    return path


def test_tegrastats_of_newer_and_older_boards(tmp_path: Path) -> None:
    lines = [ORIN.format(s=27 + n // 2, mw=1000 + 500 * n) for n in range(5)]  # two a second
    found = read_power_log(write(tmp_path, "\n".join(lines))).summarise()
    assert set(found) == {"VDD_GPU_SOC", "VIN_SYS_5V0"}  # nothing on NC
    assert found["VDD_GPU_SOC"]["duration_s"] == pytest.approx(2.0)
    assert found["VDD_GPU_SOC"]["energy_j"] == pytest.approx(4.0)
    assert found["VIN_SYS_5V0"]["power_w"] == pytest.approx(4.025)
    older = read_power_log(write(tmp_path, "\n".join(TX2.format(mw=mw) for mw in (100, 300))), interval_s=0.1)
    assert older.form == "tegrastats"
    assert older.summarise()["VDD_SYS_GPU"]["energy_j"] == pytest.approx(0.02)


def test_dcgm_prints_its_heading_again_and_again(tmp_path: Path) -> None:
    found = read_power_log(write(tmp_path, DCGM), interval_s=0.5).summarise()
    assert found["GPU 0"] == pytest.approx(
        {"power_w": 200.0, "largest_w": 300.0, "energy_j": 200.0, "duration_s": 1.0, "samples": 3}
    )
    assert found["GPU 1"]["samples"] == 2
    newer = DCGM.replace("#Entity", "# Entity")  # NVIDIA, DCGM 3.1 feature overview
    assert read_power_log(write(tmp_path, newer), interval_s=0.5).summarise() == found
    later = read_power_log(write(tmp_path, DCGM), interval_s=0.5).summarise(0.4)
    assert later["GPU 0"]["power_w"] == pytest.approx(250.0)


@pytest.mark.parametrize(
    ("text", "rail", "power_w", "duration_s"),
    [
        (JTOP, "Power TOT", 5.0, 0.5),
        ("Time (s);Power (W)\n0.0;10\n2.0;30\n", "Power (W)", 20.0, 2.0),
        ("time,watts\n0,10\n2,30\n", "watts", 20.0, 2.0),
        ("timestamp_ms,power_mw\n0,1000\n500,3000\n", "power_mw", 2.0, 0.5),
        ("time,in1_input,curr1_input\n0,5000,400\n1,5000,400\n", "in1_input · curr1_input", 2.0, 1.0),
        ("Voltage (V),Current (A)\n12,2\n12,2\n", "Voltage (V) · Current (A)", 24.0, 1.0),
    ],
    ids=["jtop", "meter", "a unit alone", "meter in milliwatts", "INA3221", "volts and amperes"],
)
def test_tables(tmp_path: Path, text: str, rail: str, power_w: float, duration_s: float) -> None:
    found = read_power_log(write(tmp_path, text)).summarise()[rail]
    assert found["power_w"] == pytest.approx(power_w)
    assert found["duration_s"] == pytest.approx(duration_s)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Power"),
        ("a,b\n1,2\n", "a, b"),
        ("#Entity SMCLK\nGPU 0 1410\n", "POWER"),
        ("time,Power (W)\n0,5\n", "two readings"),
    ],
)
def test_what_holds_no_watts_says_what_was_wanted(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_power_log(write(tmp_path, text)).summarise()


def test_the_command_prints_each_rail(tmp_path: Path, call) -> None:
    done = call("measure", "log", str(write(tmp_path, DCGM)), "--interval", "500ms", "--to", "1s")
    assert (done.code, done.err) == (0, "power.log: DCGM\n")
    assert "GPU 0: 200 W, at most 300 W, 200 J in 1 s" in done.out
