"""The whole campaign on a stand-in GPU, through NVIDIA's real bindings: rows, failures, hangs,
going on.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_machine import stand_in_machine

from wattcast.core.errors import Refused
from wattcast.core.measured_rows import row_to_plain
from wattcast.core.strict_files import convert_plain
from wattcast.lab.__main__ import main
from wattcast.lab.microbench import benchmark_kernels, unit_work
from wattcast.lab.microbench.benchmark_kernels import (
    DeviceBench,
    fill_pattern,
    read_stamps,
    sustain_load,
)
from wattcast.lab.microbench.benchmark_suite import LAUNCHES, list_benchmarks
from wattcast.lab.microbench.curve_findings import list_findings
from wattcast.lab.microbench.microbench_results import MicroRow
from wattcast.lab.microbench.microbench_sessions import choose_repeat_bench


def micro_row(plain: dict[str, Any]) -> MicroRow:
    return convert_plain(plain, MicroRow, "row")


QUICK = ("--quick", "--budget", "600s")  # more time than a busy machine takes
UNITS = ("dram_copy", "dram_memcpy", "fp32_fma", "l2_read", "conflicts_0")
LATENCIES = (
    *(
        "latency_fp32_fma",
        "latency_ring_128",
        "latency_pages_32768",
        "cluster_read_2",
        "tile_copy_l2",
    ),
    *("wgmma_sparse_fp8", "transfer", "intensity_8", "latency_walk_32", "latency_ways_16k_3"),
    "latency_line_5",
    "launch",
)


@pytest.fixture(scope="module")
def measured(libraries: Path, shared_folder) -> Path:
    """The folder of one campaign on a bare node, which lacks msgspec."""
    with shared_folder("campaign") as folder:
        if not (folder / "done").exists():
            run_campaign(libraries, folder)
            (folder / "done").touch()
    return folder / "out"


def run_campaign(libraries: Path, folder: Path) -> None:
    machine = stand_in_machine(libraries, folder)
    (folder / "bare").mkdir()
    (folder / "bare" / "msgspec.py").write_text("raise ModuleNotFoundError('msgspec')\n")
    path, only = (
        f"{folder / 'bare'}:{machine.environment['PYTHONPATH']}",
        ",".join(UNITS + LATENCIES),
    )
    arguments = ("--out", str(folder / "out"), "--only", only, *QUICK)
    done = machine.measure("microbench", *arguments, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def test_rows_have_time_cycles_power_and_what_was_checked(measured: Path, rows) -> None:
    plain = {row["id"]: row for row in rows(measured / "microbench.jsonl")}
    names = {row["name"] for row in plain.values()} - {
        "pcie_to_device",
        "pcie_to_host",
        "pcie_both",
    }
    expected = {"idle_context_on", *UNITS, *LATENCIES, *LAUNCHES}
    assert names == expected - {"transfer", "launch"}
    found = {name: micro_row(row) for name, row in plain.items()}
    fma, copy = found["fp32_fma-v2"], found["dram_copy"]
    assert (fma.name, fma.version, copy.version) == ("fp32_fma", 2, 1)
    assert copy.checked == "passed"
    assert fma.power_w == pytest.approx(300.0, rel=0.02)
    assert fma.effective_clock_hz == pytest.approx(1.75e9, rel=1e-3)
    assert fma.active_sms == 4
    # two blocks of 512 threads, 512 instructions each, in 2 us of 1.75 GHz
    assert fma.operations_per_cycle_sm == pytest.approx(2 * 512 * 512 / (2e-6 * 1.75e9), rel=0.01)
    assert fma.launch_s == pytest.approx(0.004, rel=0.01)
    assert fma.max_power_of == "largest of the sensor's readings"
    assert fma.memory_power_w in (None, 60.0)  # a quick row is longer on a busy machine
    assert copy.byte == pytest.approx(16.0 * copy.operations)
    (run,) = rows(measured / "runs.jsonl")
    assert run["sm_count"] == 4


def test_latencies_clusters_tiles_and_transfers_without_msgspec(measured: Path, rows) -> None:
    """A ring that does not fit into the memory costs its row alone."""
    plain = {row["id"]: row for row in rows(measured / "microbench.jsonl")}
    assert "65536 MiB" in plain.pop("latency_pages_32768-v2")["error"]
    found = {name: micro_row(row) for name, row in plain.items()}
    assert not any(row.error for row in found.values())
    assert found["latency_fp32_fma"].latency_cycles == pytest.approx(2e-6 * 1.75e9 / 256, rel=0.01)
    assert found["latency_ring_128-v2"].power_w is None
    assert found["cluster_read_2"].blocks == 4 * 2 * 16  # a whole number of clusters
    assert found["wgmma_sparse_fp8"].checked == "passed"
    assert found["pcie_to_device"].byte_per_s
    assert found["pcie_to_device"].power_w
    assert found["pcie_both"].byte == 2 * found["pcie_to_host"].byte
    assert "peer_copy" not in found  # one GPU alone


def test_launches_and_graphs_take_the_time_of_the_stand_in(measured: Path, rows) -> None:
    """An empty kernel takes 5 us in a queue; a graph 8 us and 1.5 us a node (cuda.c)."""
    found = {r["name"]: micro_row(r) for r in rows(measured / "microbench.jsonl")}
    assert found["launch_queued"].launch_s == pytest.approx(5e-6, rel=0.01)
    waited = found["launch_waited"]
    assert waited.launch_s is not None
    assert 5e-6 < waited.launch_s < 5e-3  # and what the host needs
    for nodes in (1, 4, 16, 64, 256, 1024):
        row = found[f"launch_graph_{nodes}"]
        assert (row.group, row.at, row.operations, row.power_w) == ("launch", nodes, nodes, None)
        assert row.launch_s == pytest.approx(8e-6 + 1.5e-6 * nodes, rel=0.01)
    told = {item.name: item.value for item in list_findings(list(found.values()))}
    assert told["node of a graph"] == pytest.approx(1.5e-6, rel=0.02)
    assert told["launch of a graph"] == pytest.approx(8e-6, rel=0.05)


def test_a_sweep_and_rings_of_today_run_on_the_stand_in(measured: Path, rows) -> None:
    found = {r["name"]: micro_row(r) for r in rows(measured / "microbench.jsonl")}
    point = found["intensity_8"]
    assert point.flop == 8.0 * point.byte
    assert point.power_w == pytest.approx(300.0, rel=0.02)
    assert found["latency_walk_32"].at == 32.0
    assert found["latency_ways_16k_3"].at == 3 * 16384
    assert found["latency_ways_16k_3"].latency_cycles


def test_what_lives_in_l2_gets_many_blocks_one_after_another(measured: Path, rows) -> None:
    blocks = {
        row["name"]: row["blocks"]
        for row in rows(measured / "microbench.jsonl")
        if row.get("blocks")
    }
    assert blocks["l2_read"] == 16 * 4 * 2
    assert blocks["conflicts_0"] <= 4 * 2


@pytest.mark.slow
def test_under_the_cap_the_clock_is_cycles_over_the_mean_time(
    machine, tmp_path: Path, rows
) -> None:
    machine.nvml.follow("at -10 690 1500 4 60 100")
    out = tmp_path / "out"
    done = machine.measure(
        "microbench", "--out", str(out), "--only", "conflicts_0", "--budget", "60s"
    )
    assert done.returncode == 0, done.stderr
    row = next(micro_row(r) for r in rows(out / "microbench.jsonl") if r["name"] == "conflicts_0")
    assert row.throttle == ("sw_power_cap",)
    assert row.memory_power_w == 100.0
    assert row.ticks >= 20
    assert row.effective_clock_hz == pytest.approx(row.cycles / row.launch_s)


def test_a_failed_kernel_a_lost_device_and_a_second_call(machine, tmp_path: Path, rows) -> None:
    """A wrong result costs its row; an illegal address also costs the process; both are tried again
    later.
    """
    out = tmp_path / "out"
    only = ("--only", "dram_copy,dram_read,conflicts_0")
    faults = {"STANDIN_CUDA_FAULT": "dram_read", "STANDIN_CUDA_WRONG": "dram_copy"}
    done = machine.measure("microbench", "--out", str(out), *only, *QUICK, **faults)
    assert done.returncode == 0, done.stderr
    errors = {row["id"]: row.get("error", "") for row in rows(out / "microbench.jsonl")}
    assert "copied" in errors["dram_copy"]
    assert "ILLEGAL_ADDRESS" in errors["dram_read"]
    assert errors["conflicts_0"] == ""
    assert "failed: dram_read" in done.stderr
    again = machine.measure(
        "microbench", "--out", str(tmp_path / "again"), "--from", str(out), *only, *QUICK
    )
    assert again.returncode == 0, again.stderr
    assert "conflicts_0," not in again.stderr  # on file already
    latest = {
        row["id"]: row.get("error", "") for row in rows(tmp_path / "again" / "microbench.jsonl")
    }
    assert set(latest.values()) == {""}


@pytest.mark.slow
def test_a_kernel_that_never_ends_is_one_failed_row(machine, tmp_path: Path, rows) -> None:
    out = tmp_path / "out"
    text = (
        "import sys; from pathlib import Path; from wattcast.measure import cuda_device\n"
        "cuda_device.WAIT_S = 1.0\n"
        "from wattcast.lab.microbench.microbench_campaign import supervise_child\n"
        f"command = [sys.executable, '-m', 'wattcast.lab', 'microbench', '--child', '--out', {str(out)!r}, "
        "'--only', 'conflicts_0,conflicts_1', '--quick']\n"
        f"print(dict(supervise_child(Path({str(out)!r}), 'microbench', command, 45.0, stall_s=9.0)))\n"
    )
    done = machine.python(text, STANDIN_CUDA_HANG="conflicts_0")
    assert done.returncode == 0, done.stderr
    found = {row["id"]: row.get("error", "") for row in rows(out / "microbench.jsonl")}
    assert "in time" in found["conflicts_0"] or "still busy" in found["conflicts_0"]
    assert found["conflicts_1"] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("microbench", "--out", "x", "--only", "dram_copi"), "Closest: dram_copy"),
        (("microbench",), "expected a folder"),
        (("microbench", "--out", "x", "--repeats", "0"), "one round or more"),
        (("multimedia", "--out", "x", "--frames", "1"), "three frames"),
        (("microbench", "--out", "x", "--counters"), "Nsight Compute"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, arguments, said: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    code = main([str(tmp_path / "out") if part == "x" else part for part in arguments])
    assert code != 0
    assert said in capsys.readouterr().err


def test_no_device_is_a_sentence(machine, tmp_path: Path) -> None:
    only = ("--only", "fp32_fma")
    done = machine.measure(
        "microbench", "--out", str(tmp_path / "out"), *only, STANDIN_CUDA_NONE="1"
    )
    assert done.returncode != 0
    assert "need an NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_driver_at_all_is_a_sentence(machine, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    text = "from wattcast.measure.cuda_device import CudaDevice\ntry: CudaDevice.open()\nexcept Exception as e: print(e)"
    done = machine.python(text, LD_LIBRARY_PATH=str(empty))
    assert "need an NVIDIA GPU and its driver" in done.stdout


NCU = """#!{python}
import subprocess, sys
arguments = sys.argv[1:]
if "--query-metrics" in arguments:
    print("gpu__time_duration   Counter   ns  time")
    print("sm__cycles_elapsed   Counter   cycle  cycles")
    sys.exit()
wanted = arguments[arguments.index("--metrics") + 1].split(",")
assert wanted == ["gpu__time_duration.sum", "sm__cycles_elapsed.max", "sm__cycles_elapsed.sum", *wanted[3:]], wanted
assert all(name.startswith("launch__") for name in wanted[3:])
assert arguments[arguments.index("--clock-control") + 1] == "none"
assert arguments[arguments.index("--profile-from-start") + 1] == "off"
target = arguments[arguments.index("--profile-from-start") + 2 :]
code = subprocess.run(target).returncode
with open(arguments[arguments.index("--log-file") + 1], "w") as stream:
    stream.write('"ID","Kernel Name","gpu__time_duration.sum","sm__cycles_elapsed.max"\\n"","","ns","cycle"\\n')
    stream.write('"0","conflicts_0","400000","700000"\\n')
sys.exit(code)
"""


def test_counters_are_collected_through_ncu(machine, tmp_path: Path, rows) -> None:
    """A stand-in ncu that checks how it is called, runs the target and writes a table."""
    (tmp_path / "bin").mkdir()
    ncu = tmp_path / "bin" / "ncu"
    ncu.write_text(NCU.format(python=sys.executable))
    ncu.chmod(0o755)
    out = tmp_path / "out"
    arguments = (
        "microbench",
        "--counters",
        "--out",
        str(out),
        "--only",
        "conflicts_0",
        "--budget",
        "600s",
    )
    done = machine.measure(*arguments, PATH=f"{ncu.parent}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert "counted 1 kernels" in done.stderr
    (row,) = rows(out / "microbench_counters.jsonl")
    assert row["metrics"] == {
        "gpu__time_duration.sum": 400000.0,
        "sm__cycles_elapsed.max": 700000.0,
    }


def test_a_counter_table_is_read_by_kernel_name() -> None:
    lines = [
        "==PROF== Connected to process 1",
        '"ID","Process ID","Kernel Name","gpu__time_duration.sum","sm__cycles_elapsed.max","unknown__metric"',
        '"","","","nsecond","cycle",""',
        '"0","1","fp32_fma","400,000","700000","1"',
        '"1","1","media_rotate(const unsigned char *)","n/a","5",""',
    ]
    fma, rotate = unit_work.read_unit_table(lines)
    assert fma == {
        "id": "fp32_fma",
        "kernel": "fp32_fma",
        "version": 2,
        "metrics": {"gpu__time_duration.sum": 400000.0, "sm__cycles_elapsed.max": 700000.0},
    }
    assert rotate["id"] == "rotate"
    assert rotate["metrics"] == {"sm__cycles_elapsed.max": 5.0}


def test_a_kernel_that_has_changed_is_counted_again(tmp_path: Path) -> None:
    path = tmp_path / "microbench_counters.jsonl"
    path.write_text(
        '{"id":"fp32_fma","metrics":{}}\n{"id":"fp32_mul","metrics":{}}\n{"id":"rotate","metrics":{}}\n'
    )
    assert unit_work.read_counted_ids(tmp_path) == {"fp32_mul", "rotate"}
    with path.open("a") as stream:
        stream.write('{"id":"fp32_fma","version":2,"metrics":{}}\n')
    assert unit_work.read_counted_ids(tmp_path) == {"fp32_mul", "rotate", "fp32_fma"}


def test_what_was_counted_before_is_counted_last() -> None:
    ordered = [
        b.name
        for b in unit_work.order_benchmarks(list_benchmarks(), {"int32_add", "dram_copy_bulk"})
    ]
    assert ordered[-2:] == ["int32_add", "dram_copy_bulk"]
    assert ordered.index("icache_12288") < ordered.index(
        "dram_copy_whole"
    )  # one of several ways to the same end


@pytest.mark.slow
def test_a_second_round_follows_the_first_and_is_shorter(machine, tmp_path: Path, rows) -> None:
    """No second checks and no second calibration; ways to copy once; what was counted before is no
    reason to skip.
    """
    out = tmp_path / "out"
    only = (
        "--only",
        "conflicts_0,dram_copy_whole,dram_memcpy",
        "--repeats",
        "2",
        "--budget",
        "60s",
    )
    done = machine.measure("microbench", "--out", str(out), *only)
    assert done.returncode == 0, done.stderr
    found = [micro_row(row) for row in rows(out / "microbench.jsonl")]
    assert [row.repeat for row in found] == sorted(row.repeat for row in found)
    names = [row.id for row in found if row.group == "memory"]
    assert names == [
        "dram_copy_whole",
        "conflicts_0",
        "dram_memcpy-v2",
        "conflicts_0-r1",
        "dram_memcpy-v2-r1",
    ]
    by_id = {row.id: row for row in found}
    one, two, whole = (by_id[name] for name in ("conflicts_0", "conflicts_0-r1", "dram_copy_whole"))
    assert (one.ticks, two.ticks) == (8, 5)
    assert one.iterations == two.iterations
    assert (one.memory_power_w, two.memory_power_w) == (60.0, None)
    assert (whole.checked, whole.iterations) == ("passed", 1)
    assert whole.byte == pytest.approx(2 * 32768 * whole.blocks)


def test_cycles_come_from_the_stamps_of_each_multiprocessor() -> None:
    """Two blocks on SM 0 (one starts 100 cycles late), one on SM 7; 2 cycles a nanosecond."""
    table = np.array(
        [[0, 1000, 3000, 10, 1010], [0, 1100, 3100, 60, 1060], [7, 50, 2050, 10, 1010]],
        dtype=np.uint64,
    )
    found = read_stamps(table.ravel())
    assert found.active_sms == 2
    assert found.per_sm == pytest.approx((2100 + 2000) / 2)
    assert found.clock_hz == pytest.approx(2e9)
    table[1, 2] = 0
    with pytest.raises(Refused, match="1 of 3 blocks"):
        read_stamps(table.ravel())


def test_a_block_without_its_last_nanoseconds_is_counted_as_unfinished() -> None:
    """The message once counted cycle stamps alone and said that 0 of 2 blocks had not run."""
    table = np.array([[0, 1000, 3000, 10, 1010], [7, 50, 2050, 10, 0]], dtype=np.uint64)
    with pytest.raises(Refused, match="1 of 2 blocks"):
        read_stamps(table.ravel())


@pytest.mark.parametrize(("words", "counts"), [(8, [6] * 8), (3, [18, 18, 12])])
def test_threads_that_share_a_word_all_count(words, counts) -> None:
    """A card with a small L2 has more threads than words there: its sums were taken for wrong."""
    device = SimpleNamespace(
        zero=lambda address, size: None,
        download=lambda address, length, kind: np.array(counts[:length], dtype=kind),
    )
    ready = SimpleNamespace(
        blocks=2,
        size=4 * words,
        buffers=SimpleNamespace(device=device, b=0),
        benchmark=SimpleNamespace(
            name="atomic",
            threads=4,
            operations=3,
            check="count",
            whole=False,
            unit=SimpleNamespace(chunk=0),
        ),
        launch=lambda rounds: None,
    )
    assert benchmark_kernels.run_self_check(ready) == "passed"
    counts[0] -= 1
    with pytest.raises(benchmark_kernels.SelfCheckFailed, match=f"not {min(counts[1:])} to"):
        benchmark_kernels.run_self_check(ready)


def test_an_sm_that_is_served_sooner_counts_with_the_blocks_it_took() -> None:
    """Three blocks on SM 0 and one on SM 7, all within 3,000 cycles: two blocks an SM."""
    times = [(0, 0, 1000), (0, 1000, 2000), (0, 2000, 3000), (7, 0, 3000)]
    found = read_stamps(np.array([[sm, b, e, b, e] for sm, b, e in times], dtype=np.uint64).ravel())
    assert (found.blocks_per_sm, found.per_sm) == (2.0, 3000.0)


def test_a_row_at_the_cap_is_repeated_at_its_full_length() -> None:
    """A short load may end before the governor has cut the clock: 715 W for 0.8 s on an H200 that
    holds 697.
    """
    bench = DeviceBench(None, None, "run")
    row = MicroRow("a", "a", "arithmetic")
    assert choose_repeat_bench(bench, None) is bench
    assert choose_repeat_bench(bench, replace(row, throttle=("sw_power_cap",))) is bench
    assert choose_repeat_bench(bench, row).rule.least_ticks < bench.rule.least_ticks


@pytest.mark.parametrize(("lasted_s", "memory_w"), [(1.0, None), (1.2, 60.0)])
def test_a_load_shorter_than_the_memory_sensors_average_has_no_memory_power(
    monkeypatch, lasted_s, memory_w
) -> None:
    window = SimpleNamespace(end_s=5.0 + lasted_s)
    load = SimpleNamespace(window=window, started_s=5.0, chunk_s=np.array([0.02, 0.02]), marks=())
    monkeypatch.setattr(benchmark_kernels, "hold_load", lambda *given, **named: load)
    monkeypatch.setattr(benchmark_kernels, "time_unit_s", lambda *given: 0.004)
    monkeypatch.setattr(
        benchmark_kernels, "describe_micro_window", lambda held: {"memory_power_w": 60.0}
    )
    bench = DeviceBench(SimpleNamespace(recycle=lambda marks: None), None, "run")
    row = sustain_load(bench, MicroRow("a", "a", "arithmetic"), lambda: None)
    assert row.memory_power_w == memory_w
    assert row.launch_s == pytest.approx(0.004)
    assert row.launches == 10  # two chunks of five: the row once had the number of chunks


def test_the_host_knows_what_the_fill_kernel_writes() -> None:
    words = fill_pattern(3, seed=11)
    x = (2 * 2654435761 + 11) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> shift
        x = x * factor & 0xFFFFFFFF
    assert int(words[2]) == x ^ (x >> 16)


def test_a_row_goes_to_json_and_back() -> None:
    row = MicroRow("a", "a", "memory", flags=("unsettled",), parts={"x": 2.0}, at=0.0, power_w=1.0)
    assert micro_row(row_to_plain(asdict(row))) == row
