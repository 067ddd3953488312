"""Hardware counters become Activity: AccelWattch's columns and Nsight Compute exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattcast.core.errors import BadInput
from wattcast.lab.counter_models.profiler_counters import read_accelwattch_hw, read_ncu
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters
from wattcast.power.activity import known_events

HW = (
    "Benchmark,Kernel,L1_RH,L1_RM,L1_WH,L1_WM,CC_ACC,SHRD_ACC,DRAM_Rd,DRAM_Wr,L2_RH,L2_RM,L2_WH,L2_WM,NOC,"
    "Pipeline_Duty,Num_Idle_SMs,Elapsed_Cycles,Chip Voltage\n"
    "app,kern,1,2,3,4,5,6,7,8,9,10,11,12,13,0.9,2.5,1000,1.0\n"
)
METRICS = (
    "gpu__time_duration",
    "sm__cycles_elapsed",
    "sm__cycles_active",
    "dram__bytes_read",
    "sm__inst_executed",
)
TITLES = ",".join(f'"{m}.{"max" if "elapsed" in m else "sum"}"' for m in METRICS)
WIDE = f"""==PROF== Disconnected from process 1
"ID","Kernel Name",{TITLES}
"","","usecond","cycle","cycle","Mbyte","inst"
"0","first","10","14,000","1,120,000","2.5","300"
"1","second","20","28000","560000","1","400"
"""
LONG = """"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","first","gpu__time_duration.sum","nsecond","10000"
"0","first","sm__cycles_elapsed.max","cycle","14,000"
"0","first","sm__cycles_active.sum","cycle","1,120,000"
"0","first","dram__bytes_read.sum","Kbyte","2,500"
"1","second","gpu__time_duration.sum","msecond","0.02"
"1","second","sm__cycles_elapsed.max","cycle","28000"
"1","second","sm__cycles_active.sum","cycle","560000"
"1","second","dram__bytes_read.sum","Mbyte","1"
"""


def test_maps_name_known_events_once() -> None:
    for dialect in SimulatorDialect:
        named = [c.event for c in dialect_counters(dialect) if c.event]
        assert len(set(named)) == len(named)
        assert set(named) <= set(known_events())
    assert len(dialect_counters(SimulatorDialect.GPUWATTCH)) == 30
    assert len(dialect_counters(SimulatorDialect.ACCELWATTCH)) == 44


def test_accelwattch_hw_counters(tmp_path: Path) -> None:
    path = tmp_path / "hw.csv"
    path.write_text(HW)
    names, activity = read_accelwattch_hw(path, 1e9)
    assert names == ("kern",)
    assert activity.duration_s[0] == pytest.approx(1e-6)
    assert activity.event_values("l1_write_miss")[0] == 4.0
    assert activity.event_values("pipe_duty")[0] == 0.9
    assert not activity.has("icache_hit")  # no counter for it: absent, not zero


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("L1_RM", "L1_RN", "columns L1_RM"),
        (",1000,", ",0,", "above zero"),
        (",1000,", ",many,", "a number"),
        (",1000,", ",-4,", "zero or more"),
        ("app,kern", "", "19 cells"),
    ],
)
def test_bad_hw_counters_are_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "hw.csv"
    path.write_text(HW.replace(old, new))
    with pytest.raises(BadInput, match=complaint):
        read_accelwattch_hw(path, 1e9)


SHORT = LONG.replace("nsecond", "ns").replace("msecond", "ms")  # units as newer versions write them


@pytest.mark.parametrize("text", [WIDE, LONG, WIDE.replace("usecond", "us"), SHORT])
def test_ncu_exports(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(text)
    launches, activity = read_ncu(path, sm_count=80)
    assert [launch.kernel for launch in launches] == ["first", "second"]
    assert activity.duration_s == pytest.approx([1e-5, 2e-5])
    assert activity.at.clock_hz == pytest.approx([1.4e9, 1.4e9])
    assert activity.event_values("dram_read_byte") == pytest.approx([2.5e6, 1e6])
    assert activity.event_values("idle_sm") == pytest.approx([0.0, 60.0])
    assert not activity.has("pipe_duty")  # its metrics were not collected
    assert not activity.has("scheduled_instruction")  # some of its metrics were not


@pytest.mark.parametrize("cell", ["n/a", ""])
def test_a_metric_that_one_kernel_lacks_is_named(tmp_path: Path, cell: str) -> None:
    """An empty cell became NaN and then nan W; now the kernel is named."""
    path = tmp_path / "ncu.csv"
    path.write_text(WIDE.replace('"560000","1",', f'"560000","{cell}",'))
    with pytest.raises(
        BadInput, match=r"kernel 2: expected a number for dram__bytes_read.sum, got 'none in 1 of 2"
    ):
        read_ncu(path)


@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        '"ID","Kernel Name"\n"0","k"\n',
        WIDE.split('"0"')[0],
        LONG.replace("gpu__time", "gpu__tame"),
    ],
)
def test_bad_exports_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(text)
    with pytest.raises(BadInput):
        read_ncu(path)
