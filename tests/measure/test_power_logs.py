"""Watts from logs of other tools.

The files are made up in the forms that the tools' documentation shows.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import BadInput
from wattcast.measure.power_logs import read_power_log
from wattcast.measure.time_stamps import place_whole_seconds

ORIN = (  # NVIDIA, Appendix TegraStats; a line of an AGX Orin is in GDWR/jetson_exporter, issue 14
    "04-11-2025 10:36:{s:02d} RAM 4321/62801MB (lfb 1759x4MB) SWAP 19/31400MB (cached 0MB) "
    "CPU [0%@729,off] EMC_FREQ 0%@2133 GR3D_FREQ 0%@[0,0] GPU@-256C "
    "VDD_GPU_SOC {mw}mW/2340mW VIN_SYS_5V0 4025mW/4025mW NC 0mW/0mW"
)
TX2 = (
    "RAM 2020/7852MB (lfb 1164x4MB) CPU [9%@345,off] GR3D_FREQ 0% "
    "VDD_SYS_GPU {mw}/158 VDD_IN 3140/3208"
)
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
DMON = """#Date       Time        gpu   pwr gtemp mtemp    sm   mem
#YYYYMMDD   HH:MM:SS    Idx     W     C     C     %     %
 20261025   02:59:00      0   300    45     -    99    10
 20261025   02:59:00      1   100    45     -     0     0
 20261025   02:59:01      0   300    45     -    99    10
 20261025   02:59:01      1   100    45     -     0     0
 20261025   02:59:02      0   300    45     -    99    10
 20261025   02:59:02      1     -    45     -     0     0
 20261025   02:59:03      0   300    45     -    99    10
 20261025   02:59:03      1   100    45     -     0     0
"""
AMD_MONITOR = """ TIMESTAMP  GPU  POWER  GPU_TEMP
1740686195    0    80 W     28 C
1740686196    0    80 W     28 C
1740686197    0    80 W     28 C
"""
AMD_METRIC = """timestamp,gpu,socket_power,gfx_voltage
1740686195,0,500,780
1740686195,1,600,780
1740686196,0,500,780
1740686196,1,600,780
"""
ROCM = "device,Average Graphics Package Power (W)\ncard0,94.0\ncard1,N/A\n"
IPMI = """
    Instantaneous power reading:                   220 Watts
    Minimum during sampling period:                 10 Watts
    IPMI timestamp:                           Sun Oct 25 02:59:{:02d} 2026
    Power reading state is:                   activated
"""
TEN_SECONDS = [0.1 * n for n in range(101)]  # at 300 W: 3,000 J


def write(folder: Path, text: str) -> Path:
    path = folder / "power.log"
    path.write_text(text)
    return path


def make_log(
    pattern: str, seconds: list[float] = TEN_SECONDS, heading: str = "timestamp", cut: int = 0
) -> str:
    """Write 300 W at moments after 2026-10-25 02:59:00, as nvidia-smi does.

    ``cut`` digits leave milliseconds.
    """
    begin = datetime(2026, 10, 25, 2, 59)
    rows = []
    for second in seconds:
        stamp = (begin + timedelta(seconds=second)).strftime(pattern)
        rows.append(f"{stamp[: len(stamp) - cut]}, 300.00 W")
    return "\n".join([f"{heading}, power.draw [W]", *rows]) + "\n"


NVIDIA_SMI = make_log("%Y/%m/%d %H:%M:%S.%f", cut=3)


@pytest.mark.parametrize(
    "text",
    [
        NVIDIA_SMI,
        make_log("%Y-%m-%dT%H:%M:%S.%fZ"),
        make_log("%Y-%m-%dT%H:%M:%S.%f+02:00"),
        make_log('"%Y-%m-%d %H:%M:%S,%f"'),
        make_log("%d/%m/%Y %H:%M:%S.%f"),  # one day: the order of day and month does not matter
        make_log("%m/%d/%y %I:%M:%S.%f %p"),
        make_log("%d.%m.%Y %H:%M:%S.%f"),
        make_log("%H:%M:%S.%f"),
        make_log("%a %b %d %H:%M:%S.%f %Y"),
        make_log("%Y/%m/%d %H:%M:%S"),  # ten lines a second, in whole seconds
    ],
)
def test_ten_seconds_at_300_w_are_3000_j_however_times_are_written(
    tmp_path: Path, call, text: str
) -> None:
    """A stamp that was not understood was ignored, each line taken for a second: 30,000 J."""
    done = call("measure", "log", str(write(tmp_path, text)), "--json")
    (rail,) = json.loads(done.out)["rails"].values()
    assert (done.code, rail["flags"]) == (0, [])
    assert rail["energy_j"] == pytest.approx(3000.0, rel=0.011)
    assert rail["duration_s"] == pytest.approx(10.0, rel=0.011)


def _replace_line(text: str, number: int, old: str, new: str) -> str:
    lines = text.splitlines()
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    return "\n".join(lines) + "\n"


AUTUMN = [
    *(0.5 * n for n in range(120)),
    *(0.5 * n - 3600.0 for n in range(120, 240)),
]  # set back at 03:00
NEW_MONTH = """timestamp,Power (W)
01/02/2026 23:59:59.5,300
02/02/2026 00:00:00.0,300
02/02/2026 00:00:00.5,300
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_replace_line(NVIDIA_SMI, 7, "2026/10/25 02:59:00.500", ""), "line 7 has no time"),
        (_replace_line(NVIDIA_SMI, 7, "00.500", "00.300"), "line 7 is 0.1 s earlier than line 6"),
        (
            _replace_line(NVIDIA_SMI, 7, "2026/10", "2026/13"),
            "line 7: cannot read the time '2026/13",
        ),
        (
            _replace_line(NVIDIA_SMI, 7, "2026/10/25 02:59:00.500", "later"),
            "line 7: cannot read the time 'later'",
        ),
        (_replace_line(NVIDIA_SMI, 7, ".500", ".500Z"), "line 7.*name a time zone"),
        (make_log("%Y/%m/%d %H:%M:%S.%f", AUTUMN), "line 122 is 3599.5 s earlier.*daylight saving"),
        (NEW_MONTH, "line 3.*day and month could be either way"),
        (NVIDIA_SMI + "2026/10/25 02:5", "line 103: expected 2 values, got 1"),
        ("time,Power (W)\n0,10\n100,30\n200,30\n", "numbers without a unit.*--time-format s"),
        (ROCM * 3, "no time.*--interval"),
        (DCGM, "no time.*--interval"),
        (NVIDIA_SMI.replace("timestamp, power.draw [W]\n", ""), "headings"),
        ("Time (s);Power (W)\n0.0;10,5\n2.0;30,5\n", "line 2: expected a number, got '10,5'"),
        ("time_s,Power (MW)\n0.0,10\n2.0,30\n", "milli or mega"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(
    tmp_path: Path, call, text: str, words: str
) -> None:
    """All of these were summed up, each line a second, with exit code 0."""
    done = call("measure", "log", str(write(tmp_path, text)))
    assert done.code == 2
    with pytest.raises(BadInput, match=words):
        read_power_log(write(tmp_path, text))


def test_the_user_settles_what_the_log_leaves_open(tmp_path: Path, call) -> None:
    path = str(write(tmp_path, NEW_MONTH))
    assert (
        "300 J in 1 s" in call("measure", "log", path, "--time-format", "%d/%m/%Y %H:%M:%S.%f").out
    )
    assert "300 J in 1 s" in call("measure", "log", path, "--interval", "500ms").out
    path = str(write(tmp_path, "time,Power (W)\n0,10\n100,30\n200,30\n"))
    assert "5 J in 0.2 s" in call("measure", "log", path, "--time-format", "ms").out
    assert call("measure", "log", path, "--time-format", "%Q").code == 2
    assert call("measure", "log", path, "--interval", "0s").code == 2
    against = call("measure", "log", str(write(tmp_path, NVIDIA_SMI)), "--interval", "1s")
    assert against.code == 5
    assert "0.1 s apart" in against.out


SPRING = [*(0.5 * n for n in range(120)), *(0.5 * n + 3600.0 for n in range(120, 240))]


@pytest.mark.parametrize(
    ("text", "flag", "energy_j"),
    [
        (
            _replace_line(NVIDIA_SMI, 50, "300.00 W", "-300.00 W"),
            "left out, the first -300 W in line 50",
            3000.0,
        ),
        (
            _replace_line(NVIDIA_SMI, 50, "300.00 W", "4294967.00 W"),
            "4.29497e+06 W in line 50",
            3000.0,
        ),
        (
            _replace_line(NVIDIA_SMI, 7, "00.500", "00.400"),
            "stand twice, the first in lines 6 and 7",
            3000.0,
        ),
        (
            make_log("%Y/%m/%d %H:%M:%S.%f", SPRING),
            "no readings for 3600.5 s after line 121",
            300.0 * 119.0,
        ),
    ],
    ids=["negative", "absurd", "twice", "clock set forward"],
)
def test_doubtful_readings_are_flagged_and_not_used(
    tmp_path: Path, call, text: str, flag: str, energy_j: float
) -> None:
    done = call("measure", "log", str(write(tmp_path, text)), "--json")
    (rail,) = json.loads(done.out)["rails"].values()
    assert done.code == 5
    assert flag in rail["flags"][0]
    assert rail["energy_j"] == pytest.approx(energy_j, rel=1e-6)
    assert rail["largest_w"] == 300.0


@pytest.mark.parametrize(
    ("text", "form", "rails"),
    [
        (DMON, "nvidia-smi dmon", {"GPU 0": (300.0, 3.0), "GPU 1": (100.0, 3.0)}),
        (AMD_MONITOR, "amd-smi", {"GPU 0": (80.0, 2.0)}),
        (AMD_METRIC, "amd-smi", {"GPU 0": (500.0, 1.0), "GPU 1": (600.0, 1.0)}),
        ("".join(IPMI.format(n) for n in range(5)), "IPMI", {"power reading": (220.0, 4.0)}),
        (
            "timestamp, index, power.draw [W], power.limit [W]\n"
            + "".join(
                f"2026/10/25 02:59:0{n}.1{g}, {g}, {100 + g}.0 W, 700.0 W\n"
                for n in range(4)
                for g in (0, 1)
            ),
            "nvidia-smi",
            {"GPU 0": (100.0, 3.0), "GPU 1": (101.0, 3.0)},
        ),
    ],
    ids=["dmon", "amd-smi monitor", "amd-smi metric", "ipmitool", "nvidia-smi, two GPUs"],
)
def test_logs_of_vendors_tools(
    tmp_path: Path, text: str, form: str, rails: dict[str, tuple[float, float]]
) -> None:
    log = read_power_log(write(tmp_path, text))
    assert log.form == form
    seen = {name: (rail.power_w, rail.duration_s) for name, rail in log.summarise().items()}
    assert seen == {name: pytest.approx(values) for name, values in rails.items()}


def test_rocm_smi_in_a_loop_writes_its_headings_again(tmp_path: Path) -> None:
    found = read_power_log(write(tmp_path, ROCM * 3), 0.5)
    assert found.form == "rocm-smi"
    assert found.summarise()["GPU card0"].energy_j == pytest.approx(94.0)
    assert set(found.summarise()) == {"GPU card0"}


def test_whole_seconds_place_lines_evenly_and_know_their_doubt() -> None:
    """The first and the last of 101 lines lie up to a second beside the second that they say."""
    for phase_s in np.linspace(0.0, 0.99, 12):
        true_s = 0.0997 * np.arange(101) + phase_s
        placed_s, doubt = place_whole_seconds(np.floor(true_s))
        assert np.ptp(placed_s) == pytest.approx(np.ptp(true_s), rel=doubt + 1e-9)
        assert doubt < 0.03
    uneven = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 6.0, 60.0])
    assert place_whole_seconds(uneven)[1] == np.inf


def test_tegrastats_of_newer_and_older_boards(tmp_path: Path) -> None:
    lines = [ORIN.format(s=27 + n // 2, mw=1000 + 500 * n) for n in range(21)]  # two a second
    found = read_power_log(write(tmp_path, "\n".join(lines))).summarise()
    assert set(found) == {"VDD_GPU_SOC", "VIN_SYS_5V0"}  # nothing on NC
    assert found["VDD_GPU_SOC"].duration_s == pytest.approx(10.0)
    assert found["VDD_GPU_SOC"].energy_j == pytest.approx(60.0)
    assert found["VIN_SYS_5V0"].power_w == pytest.approx(4.025)
    few = read_power_log(write(tmp_path, "\n".join(lines[:5]))).summarise()
    assert "whole seconds leave the time open" in few["VDD_GPU_SOC"].flags[0]
    torn = "\n".join([*lines[:3], lines[3].removeprefix("04-11-2025 "), *lines[4:]])
    with pytest.raises(BadInput, match="line 4 has no time"):
        read_power_log(write(tmp_path, torn))
    older = read_power_log(
        write(tmp_path, "\n".join(TX2.format(mw=mw) for mw in (100, 300))), interval_s=0.1
    )
    assert older.form == "tegrastats"
    assert older.summarise()["VDD_SYS_GPU"].energy_j == pytest.approx(0.02)


def test_tegrastats_with_three_values_a_rail(tmp_path: Path) -> None:
    """Some logs have a third value behind now and mean; the first is the one of this moment."""
    lines = [ORIN.format(s=27 + n // 2, mw=1000 + 500 * n) for n in range(21)]
    three = [re.sub(r"(\d+mW/\d+mW)", r"\1/9999mW", line) for line in lines]
    assert three[0] != lines[0]
    plain = read_power_log(write(tmp_path, "\n".join(lines))).summarise()
    found = read_power_log(write(tmp_path, "\n".join(three))).summarise()
    assert set(found) == set(plain)
    for rail, summary in plain.items():
        assert found[rail].energy_j == pytest.approx(summary.energy_j)


def test_dcgm_prints_its_heading_again_and_again(tmp_path: Path) -> None:
    found = read_power_log(write(tmp_path, DCGM), interval_s=0.5).summarise()
    first = found["GPU 0"]
    assert (first.power_w, first.largest_w, first.energy_j) == pytest.approx((200.0, 300.0, 200.0))
    assert (first.duration_s, first.samples, first.flags) == (1.0, 3, ())
    assert found["GPU 1"].samples == 2
    newer = DCGM.replace("#Entity", "# Entity")  # NVIDIA, DCGM 3.1 feature overview
    assert read_power_log(write(tmp_path, newer), interval_s=0.5).summarise() == found
    later = read_power_log(write(tmp_path, DCGM), interval_s=0.5).summarise(0.4)
    assert later["GPU 0"].power_w == pytest.approx(250.0)


@pytest.mark.parametrize(
    ("text", "rail", "power_w", "duration_s"),
    [
        (JTOP, "Power TOT", 5.0, 0.5),
        ("Time (s);Power (W)\n0.0;10\n2.0;30\n", "Power (W)", 20.0, 2.0),
        ("time_s,watts\n0,10\n2,30\n", "watts", 20.0, 2.0),
        ("timestamp,watts\n1763481600,10\n1763481602,30\n", "watts", 20.0, 2.0),
        ("timestamp,watts\n1763481600000,10\n1763481602000,30\n", "watts", 20.0, 2.0),
        (
            "Date,Time,Power (kW)\n25.10.2026,02:59:00,1\n25.10.2026,02:59:02,3\n",
            "Power (kW)",
            2000.0,
            2.0,
        ),
        ("timestamp_ms,power_mw\n0,1000\n500,3000\n", "power_mw", 2.0, 0.5),
        (
            "time_s,in1_input,curr1_input\n0,5000,400\n1,5000,400\n",
            "in1_input · curr1_input",
            2.0,
            1.0,
        ),
        ("t_s,Voltage (V),Current (A)\n0,12,2\n1,12,2\n", "Voltage (V) · Current (A)", 24.0, 1.0),
    ],
)
def test_tables(tmp_path: Path, text: str, rail: str, power_w: float, duration_s: float) -> None:
    found = read_power_log(write(tmp_path, text)).summarise()[rail]
    assert found.power_w == pytest.approx(power_w)
    assert found.duration_s == pytest.approx(duration_s)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Power"),
        ("a,b\n1,2\n", "a, b"),
        ("#Entity SMCLK\nGPU 0 1410\n", "POWER"),
        ("time_s,Power (W)\n0,5\n", "two readings"),
    ],
)
def test_what_holds_no_watts_says_what_was_wanted(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_power_log(write(tmp_path, text)).summarise()


def test_the_command_prints_each_rail(tmp_path: Path, call) -> None:
    done = call("measure", "log", str(write(tmp_path, DCGM)), "--interval", "500ms", "--to", "1s")
    assert (done.code, done.err) == (0, "power.log: DCGM\n")
    assert "GPU 0: 200 W, at most 300 W, 200 J in 1 s" in done.out


@pytest.mark.parametrize(("lines", "is_flagged"), [(12, False), (17, False), (25, True)])
def test_a_third_of_a_minute_in_whole_seconds_contradicts_an_interval(
    tmp_path: Path, lines: int, is_flagged: bool
) -> None:
    """Twenty seconds know their interval to a twentieth, since each end may be a second off."""
    text = make_log("%Y/%m/%d %H:%M:%S", [float(second) for second in range(lines)])
    (rail,) = read_power_log(write(tmp_path, text), interval_s=0.5).rails.values()
    assert any("times are 1 s apart" in flag for flag in rail.time_flags) is is_flagged
