"""Power from kernel launches: counters once per kernel and launch configuration, reused afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput, ExitCode, MissingEvents, UnknownName
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.launch_power import (
    CounterBook,
    KernelLaunch,
    LaunchKey,
    estimate_launch_power,
    make_launch_key,
    read_counter_book,
)
from wattcast.power import power_model
from wattcast.power.rate_power import RatePower

MODEL = RatePower(10.0, {"int_instruction": 1e-9, "l2_read_sector": 1e-8})
DCT = LaunchKey("dct", (240, 1, 1), (64, 1, 1))
WIDE = LaunchKey("dct", (480, 1, 1), (64, 1, 1))
AT = OperatingPoint(clock_hz=1e9, memory_clock_hz=1e9)


def book() -> CounterBook:
    first = CounterBook().with_pass(DCT, {"int_instruction": 4e6, "core_cycle": 2e6})
    return first.with_pass(DCT, {"l2_read_sector": 1e5})


def test_a_key_is_the_kernel_and_its_configuration() -> None:
    """Figure 7: the same kernel with another grid is counted anew."""
    assert book().missing(DCT, MODEL.required_events) == ()
    assert set(book().missing(WIDE, MODEL.required_events)) == {"int_instruction", "l2_read_sector"}
    half = CounterBook().with_pass(DCT, {"int_instruction": 4e6})
    assert half.missing(DCT, MODEL.required_events) == ("l2_read_sector",)


def test_passes_are_averaged() -> None:
    twice = book().with_pass(DCT, {"int_instruction": 6e6})
    assert twice.count[DCT]["int_instruction"] == 5e6
    assert twice.count[DCT]["l2_read_sector"] == 1e5
    assert twice.passes[DCT] == {"int_instruction": 2, "core_cycle": 1, "l2_read_sector": 1}


def test_launches_and_gaps_become_power_over_time() -> None:
    launches = [KernelLaunch(DCT, 0.0, 1e-3), KernelLaunch(DCT, 3e-3, 2e-3)]
    found = estimate_launch_power(launches, book(), MODEL, AT)
    assert_allclose(found.start_s, [0.0, 1e-3, 3e-3])
    work_j = 4e6 * 1e-9 + 1e5 * 1e-8
    assert_allclose(found.power.total_w, [10.0 + work_j / 1e-3, 10.0, 10.0 + work_j / 2e-3])
    assert_allclose(found.energy_j, 10.0 * 5e-3 + 2 * work_j)
    assert_allclose(found.mean_w, found.energy_j / 5e-3)


def test_an_untimed_launch_takes_its_cycles_over_the_clock() -> None:
    """Eq. 11."""
    found = estimate_launch_power([KernelLaunch(DCT, 1.0)], book(), MODEL, AT)
    assert_allclose(found.activity.duration_s, [2e-3])
    slower = estimate_launch_power(
        [KernelLaunch(DCT, 1.0)], book(), MODEL, OperatingPoint(clock_hz=0.5e9, memory_clock_hz=1e9)
    )
    assert_allclose(slower.activity.duration_s, [4e-3])


def test_overlapping_launches_add_up() -> None:
    alone = estimate_launch_power([KernelLaunch(DCT, 0.0, 1e-3)], book(), MODEL, AT)
    both = estimate_launch_power(
        [KernelLaunch(DCT, 0.0, 1e-3), KernelLaunch(DCT, 0.5e-3, 1e-3)], book(), MODEL, AT
    )
    dynamic_w = alone.power.total_w[0] - 10.0
    assert_allclose(both.power.total_w, [10.0 + dynamic_w, 10.0 + 2 * dynamic_w, 10.0 + dynamic_w])


def test_kernels_without_counters_are_left_out_not_counted_as_idle() -> None:
    found = estimate_launch_power(
        [KernelLaunch(DCT, 0.0, 1e-3), KernelLaunch(WIDE, 1e-3, 9e-3)], book(), MODEL, AT
    )
    assert found.unknown == (WIDE,)
    assert found.counted.tolist() == [1.0, 0.0]
    assert_allclose(found.energy_j, 10.0 * 1e-3 + 4e-3 + 1e-3)


def test_what_goes_on_beside_the_kernels_is_given_as_background() -> None:
    """The Tegra K1 model needs the host's cycles, which no kernel counter shows."""
    model = power_model.load_saved_model(Path("tegra-k1")).model
    seen = {event: 1e6 for event in model.required_events if not event.startswith("host")}
    filled = CounterBook().with_pass(DCT, seen)
    at = OperatingPoint(clock_hz=852e6, memory_clock_hz=924e6)
    launches = [KernelLaunch(DCT, 0.0, 1e-3), KernelLaunch(DCT, 2e-3, 1e-3)]
    assert estimate_launch_power(launches, filled, model, at).unknown == (DCT,)
    beside = {"host_active_cycle": 5e8, "host_instruction_per_cycle": 0.8, "host_memory_cycle": 1e7}
    found = estimate_launch_power(launches, filled, model, at, beside)
    assert found.unknown == ()
    assert_allclose(found.power.part_power_w("host_active_cycle"), 166.62e-12 * 5e8 * 1.05**2)


FILED = """{"format": 1, "kernels": [{"kernel": "void dct(float*)", "grid": [240, 1, 1], "block": [64, 1, 1],
"count": {"int_instruction": 4000000.0, "core_cycle": 2000000.0, "l2_read_sector": 100000.0},
"passes": {"int_instruction": 1, "core_cycle": 1, "l2_read_sector": 1}, "shared_byte": 1024}]}"""


def test_a_book_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    path.write_text(FILED)
    assert read_counter_book(path) == book()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 1', '"format": 2', "format: expected 1"),
        ('"int_instruction": 4000000.0', '"int_instruction": -4.0', "zero or more"),
        ('"int_instruction"', '"int_instructions"', "int_instructions"),
        ('"kernel"', '"kernal"', "kernal"),
    ],
)
def test_a_bad_book_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "book.json"
    assert old in FILED
    path.write_text(FILED.replace(old, new))
    with pytest.raises((BadInput, UnknownName), match=words):
        read_counter_book(path)


def test_bad_launches_are_named() -> None:
    with pytest.raises(BadInput, match="at least one"):
        estimate_launch_power([], book(), MODEL, AT)
    with pytest.raises(BadInput, match="launch of dct: expected a duration above zero"):
        estimate_launch_power([KernelLaunch(DCT, 0.0, 0.0)], book(), MODEL, AT)
    with pytest.raises(MissingEvents, match="core_cycle"):
        estimate_launch_power([KernelLaunch(WIDE, 0.0)], book(), MODEL, AT)
    with pytest.raises(BadInput, match="wrap"):
        CounterBook().with_pass(DCT, {"int_instruction": -1.0})
    with pytest.raises(UnknownName, match="int_instruction"):
        CounterBook().with_pass(DCT, {"int_instructon": 1.0})


def test_many_launches_of_few_kernels_stay_cheap_in_memory() -> None:
    launches = [KernelLaunch(DCT, 1e-3 * i, 0.5e-3) for i in range(2000)]
    found = estimate_launch_power(launches, book(), MODEL, AT)
    assert found.start_s.size == 3999
    assert np.isfinite(found.power.part_w).all()


NVPROF = """==7== NVPROF is profiling process 7, command: ./a
==7== Metric result:
"Device","Kernel","Invocations","Metric Name","Metric Description","Min","Max","Avg"
"Tesla K20c (0)","void k(float*, int)",3,"inst_fp_32","FP Instructions(Single)",900,1100,1000
"Tesla K20c (0)","void k(float*, int)",3,"dram_read_transactions","Device Memory Read Transactions",2,2,2
"Tesla K20c (0)","void k(float*, int)",3,"branch_efficiency","Branch Efficiency",98.74%,98.74%,98.74%
"Tesla K20c (1)","void k(float*, int)",1,"inst_fp_32","FP Instructions(Single)",2000,2000,2000
"""


def test_metrics_of_nvprof_hold_for_every_launch_of_a_kernel(tmp_path: Path) -> None:
    path = tmp_path / "nvprof.csv"
    path.write_text(NVPROF)
    book = read_counter_book(path)
    counts = book.find_counts(make_launch_key("k(float*,int)", (7, 1, 1), (32, 1, 1)))
    assert counts == {
        "fp32_instruction": 1250.0,
        "dram_read_byte": 64.0,
    }  # means over all launches, of both devices
    assert book.missing(make_launch_key("other", (7, 1, 1), (32, 1, 1)), ["fp32_instruction"]) == (
        "fp32_instruction",
    )
    path.write_text("".join(NVPROF.splitlines(keepends=True)[:3]))
    with pytest.raises(BadInput, match="nvprof --csv"):
        read_counter_book(path)


def test_nvprof_counts_that_a_model_cannot_use_give_no_mean_power(call, tmp_path: Path) -> None:
    """The K1's preset with nvprof's counters gave 4.3 W, the idle alone, and exit code 0."""
    counters = tmp_path / "nvprof.csv"
    counters.write_text(NVPROF)
    kernel = {"ph": "X", "cat": "kernel", "name": "k(float*, int)", "ts": 1.0, "dur": 100.0}
    later = {**kernel, "ts": 300.0}
    size = {"args": {"grid": [7, 1, 1], "block": [32, 1, 1]}}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [kernel | size, later | size]}))
    argv = ["--model", "tegra-k1", "--counters", str(counters), "--clock", "852MHz"]
    argv += ["--memory-clock", "924MHz"]
    done = call("lab", "estimate", str(trace), *argv)
    assert done.code == ExitCode.PARTIAL
    assert "no mean power" in done.out
    assert "idle time between kernels" in done.out
    plain = json.loads(call("lab", "estimate", str(trace), *argv, "--json").out)
    assert plain["power_w"] is None
    assert plain["energy_j"] is None
    assert plain["missing_events"]
    assert plain["energy_at_least_j"] > 0
