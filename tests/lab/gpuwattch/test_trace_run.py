"""A run over a trace: kernels, statistics, steady states, files; nothing depends on how the file is
cut in blocks.
"""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwattch.conftest import COLUMNS, TraceMaker, read_lines, read_table, sample_rows, trace_text
from wattcast.core.errors import BadInput, CannotWrite
from wattcast.lab.gpuwattch import trace_reading
from wattcast.lab.gpuwattch.simulator_config import (
    SimulatorConfig,
    SteadyStateDefinition,
    read_simulator_config,
)
from wattcast.lab.gpuwattch.trace_outputs import GrowingTextFile, restore_idle_sms
from wattcast.lab.gpuwattch.trace_reading import CLOCK, INSTRUCTIONS, VOLTAGE, TraceSampling
from wattcast.lab.gpuwattch.trace_run import FIGURE, LOGS, TABLE, run_trace
from wattcast.lab.gpuwattch.trace_statistics import (
    KernelEndFinder,
    ListedKernel,
    SteadyStateFinder,
    read_kernel_list,
)


def with_ends(kernels: list[np.ndarray]) -> np.ndarray:
    """Rows of kernels, each followed by its last row again, as the simulator writes."""
    return np.concatenate([np.concatenate([k, k[-1:]]) for k in kernels])


KERNELS = [sample_rows(n, seed) for seed, n in enumerate((5, 1, 12, 7))]


def test_kernels_end_at_repeated_rows(write_trace: TraceMaker, demo_run) -> None:
    result = run_trace(demo_run(write_trace(with_ends(KERNELS))))
    assert [k.samples for k in result.kernels] == [5, 1, 12, 7]
    assert result.samples == 25
    for kernel, rows in zip(result.kernels, KERNELS, strict=True):
        assert kernel.mean.counter == pytest.approx(rows.mean(axis=0))
        assert kernel.highest.counter in rows
    assert any("names" in note for note in result.notes)


def test_idle_rows_are_alike_without_ending_a_kernel() -> None:
    idle = np.zeros((4, 30))
    idle[:, COLUMNS.index("IDLE_CORE_N")] = 8.0
    busy = sample_rows(3)
    rows = np.concatenate([idle, busy, busy[-1:], idle])
    assert np.flatnonzero(KernelEndFinder(tuple(COLUMNS)).mark(rows, None)).tolist() == [7]


def test_of_several_equal_rows_the_last_ends_the_kernel() -> None:
    row = sample_rows(1)
    rows = np.repeat(row, 5, axis=0)
    assert np.flatnonzero(KernelEndFinder(tuple(COLUMNS)).mark(rows, None)).tolist() == [4]


@given(cut=st.integers(1, 28))
def test_kernel_ends_do_not_depend_on_blocks(cut: int) -> None:
    rows = with_ends(KERNELS)
    whole = KernelEndFinder(tuple(COLUMNS)).mark(rows, None)
    pieces = KernelEndFinder(tuple(COLUMNS))
    first = pieces.mark(rows[:cut], rows[cut])
    assert (np.concatenate([first, pieces.mark(rows[cut:], None)]) == whole).all()


def test_a_kernel_without_a_sample_is_a_row_of_zeros(write_trace: TraceMaker, demo_run) -> None:
    rows = np.concatenate([with_ends(KERNELS[:1]), np.zeros((1, 30)), with_ends(KERNELS[1:])])
    job = demo_run(write_trace(rows), compat=True)
    result = run_trace(job)
    assert [k.samples for k in result.kernels] == [5, 0, 1, 12, 7]
    _, watts = read_table(job.out / "power_trace.log")
    assert (watts[6, 1:] == 0).all()
    assert watts[6, 0] == watts[5, 0]  # the total of the sample before, as the simulator prints it
    text = (job.out / "power_report.log").read_text()
    assert text.count("gpu_avg_IBP, = -nan") == 1


def test_a_list_of_kernels_decides_where_rows_cannot(write_trace: TraceMaker, demo_run) -> None:
    """A kernel whose last sample is idle repeats an idle row: only its number of samples tells."""
    idle = np.zeros((3, 30))
    idle[:, COLUMNS.index("IDLE_CORE_N")] = 8.0
    rows = with_ends([np.concatenate([KERNELS[0], idle]), KERNELS[2]])
    path = write_trace(rows)
    unsure = run_trace(demo_run(path, kernels=(ListedKernel("a", 1), ListedKernel("b", 2))))
    assert len(unsure.kernels) == 1
    assert any("2 kernels are listed, 1 ended" in note for note in unsure.notes)
    listed = (ListedKernel("a", 1, samples=8), ListedKernel("b", 2, samples=12))
    assert [k.samples for k in run_trace(demo_run(path, kernels=listed)).kernels] == [8, 12]


def test_kernel_lists_in_every_form(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("first\nsecond\n")
    assert read_kernel_list(plain, 500) == (ListedKernel("first", 1), ListedKernel("second", 2))
    table = tmp_path / "b.csv"
    table.write_text("name,cycles,ipc\nfirst,1250,10.5\nsecond,300,2\nthird,900,\n")
    assert [(k.name, k.samples, k.ipc) for k in read_kernel_list(table, 500)] == [
        ("first", 2, 10.5),  # samples at 500, 1000
        ("second", 1, 2.0),  # at 1500
        ("third", 1, None),  # at 2000
    ]
    table.write_text("name,cycles,ipc\na,1250,10.5\nb, ,\n")
    blank = read_kernel_list(table, 500)
    assert [(k.name, k.samples) for k in blank] == [("a", None), ("b", None)]
    log = tmp_path / "c.log"
    log.write_text(
        "kernel_name = k1 \nkernel_launch_uid = 7 \nnoise\ngpu_sim_cycle = 1000\ngpu_ipc =  3.5\nkernel_name = k2\n"
    )
    assert [(k.name, k.uid, k.samples) for k in read_kernel_list(log, 500)] == [
        ("k1", 7, None),
        ("k2", 2, None),
    ]
    table.write_text("name,cycles\nx,-1\n")
    with pytest.raises(BadInput, match="line 2: cycles"):
        read_kernel_list(table, 500)
    table.write_text("name,cycels\nx,1\n")
    with pytest.raises(BadInput, match="cycels"):
        read_kernel_list(table, 500)


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("block", [400, 1500, 1 << 20])
def test_results_do_not_depend_on_blocks(
    write_trace: TraceMaker,
    demo_run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compat: bool,
    block: int,
) -> None:
    path = write_trace(with_ends(KERNELS))
    whole = demo_run(path, compat, out=tmp_path / "whole")
    run_trace(whole)
    real = trace_reading.TraceFile.blocks
    monkeypatch.setattr(trace_reading.TraceFile, "blocks", lambda self, size=0: real(self, block))
    pieces = replace(whole, out=tmp_path / "pieces")
    run_trace(pieces)
    for name in (
        "power_trace.log",
        "metric_trace.log",
        "steady_state_tracking.log",
        "power_report.log",
    ):
        assert (pieces.out / name).read_text() == (whole.out / name).read_text(), name


def test_default_files_are_clean_tables(write_trace: TraceMaker, demo_run) -> None:
    job = demo_run(write_trace(with_ends(KERNELS)))
    run_trace(job)
    metric = read_lines(job.out / "metric_trace.log")
    assert len(metric) == 26
    assert not any(line.endswith(",") for line in metric)
    _, values = read_table(job.out / "metric_trace.log")
    assert (values == np.concatenate(KERNELS)).all()
    names, watts = read_table(job.out / "power_trace.log")
    assert watts.shape == (25, len(names))
    assert watts[:, 1:].sum(axis=1) == pytest.approx(watts[:, 0], abs=2e-5)


def test_compressed_in_compressed_out(write_trace: TraceMaker, demo_run) -> None:
    job = demo_run(write_trace(with_ends(KERNELS), members=True))
    result = run_trace(job)
    assert {p.name for p in result.files} == {
        "power_trace.log.gz",
        "metric_trace.log.gz",
        "steady_state_tracking.log.gz",
        "power_report.log",
    }
    assert len(read_lines(job.out / "power_trace.log.gz")) == 26
    plain = replace(job, compress=False, out=job.out / "plain")
    run_trace(plain)
    assert (plain.out / "power_trace.log").exists()


def test_a_fault_keeps_what_came_before(tmp_path: Path, demo_run) -> None:
    path = tmp_path / "m.log"
    path.write_text(trace_text(with_ends(KERNELS)) + "1,2,3\n")
    job = demo_run(path)
    result = run_trace(job)
    assert "line 31" in str(result.fault)
    assert result.samples == 25
    assert len(read_lines(job.out / "power_trace.log")) == 26


def test_a_file_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    """A disk that was full at that moment kept a hidden file beside the outputs."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gzip, "GzipFile", fail)
    with pytest.raises(CannotWrite, match="No space left"):
        GrowingTextFile(tmp_path / "power.log", compress=True)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_kernel_is_reported_by_default_and_not_in_compatibility_mode(
    write_trace: TraceMaker, demo_run, tmp_path: Path
) -> None:
    path = write_trace(np.concatenate([with_ends(KERNELS[:1]), KERNELS[2]]))
    ours = run_trace(demo_run(path))
    assert [k.finished for k in ours.kernels] == [True, False]
    assert any("had not ended" in note for note in ours.notes)
    assert len(run_trace(demo_run(path, compat=True, out=tmp_path / "c")).kernels) == 1


def test_an_empty_trace_gives_headers(write_trace: TraceMaker, demo_run) -> None:
    job = demo_run(write_trace(np.zeros((0, 30))))
    result = run_trace(job)
    assert result.samples == 0
    assert len(read_lines(job.out / "power_trace.log")) == 1


def brute_force(
    power: np.ndarray, kernels: list[int], rule: SteadyStateDefinition
) -> list[tuple[int, int]]:
    """The rule of the manual, sample by sample."""
    found, start, region, index = [], 0, [], 0
    for count in kernels:
        for _ in range(count):
            p = power[index]
            if not region:
                start, region = index, [p]
            elif abs(p - sum(region) / len(region)) < rule.deviation_w:
                region.append(p)
            else:
                if len(region) > rule.minimum_sample:
                    found.append((start, index))
                region = []
            index += 1
        if len(region) > rule.minimum_sample:
            found.append((start, index))
        region = []
    return found


@given(
    steps=st.lists(st.floats(-9, 9), min_size=1, max_size=80),
    cuts=st.lists(st.integers(1, 79), max_size=6),
    ends=st.lists(st.integers(1, 79), max_size=3),
)
def test_steady_states_follow_the_rule_however_samples_arrive(
    steps: list[float], cuts: list[int], ends: list[int]
) -> None:
    power = 50.0 + np.cumsum(np.round(steps, 2)) * 0.5
    counter = np.arange(len(power), dtype=float)[:, np.newaxis]
    rule = SteadyStateDefinition(4.0, 3)
    edges = sorted({0, len(power), *(e for e in ends if e < len(power))})
    kernels = [b - a for a, b in pairwise(edges)]
    states = SteadyStateFinder(rule, 1)
    for a, b in pairwise(edges):
        inner = sorted({a, b, *(c for c in cuts if a < c < b)})
        for i, j in pairwise(inner):
            states.add(power[i:j], counter[i:j])
        states.end_kernel()
    found = [r for r in states.regions if r is not None]
    assert [(r.start, r.end) for r in found] == brute_force(power, kernels, rule)
    for region in found:
        assert region.counter[0] == pytest.approx(counter[region.start : region.end].mean())
        assert region.power_w == pytest.approx(power[region.start : region.end].mean())


def test_ipc_from_the_list_or_from_a_column(
    write_trace: TraceMaker, demo_run, tmp_path: Path
) -> None:
    steady = np.repeat(sample_rows(1), 8, axis=0)
    steady[:, 0] += np.arange(8)
    path = write_trace(with_ends([steady]))
    run_trace(demo_run(path, kernels=(ListedKernel("a", 1, ipc=12.5),)))
    assert (
        read_lines(tmp_path / "out" / "steady_state_tracking.log")[1].split(",")[3] == "12.500000"
    )
    wide = np.column_stack([with_ends([steady]), np.full(9, 6000.0)])
    job = demo_run(write_trace(wide, [*COLUMNS, INSTRUCTIONS], name="w.log"), out=tmp_path / "w")
    result = run_trace(job)
    assert read_lines(job.out / "steady_state_tracking.log")[1].split(",")[3] == "12.000000"
    assert not any("IPC" in note for note in result.notes)


def test_clock_and_voltage_per_sample(write_trace: TraceMaker, demo_run, tmp_path: Path) -> None:
    """Half the clock doubles a sample's time; counts stay; half the voltage quarters the core's
    dynamic power.
    """
    row = np.repeat(sample_rows(1), 4, axis=0)
    row[:, 0] += np.arange(4)  # no two alike
    steps = TraceSampling(
        500, 1e9, np.array([0.0, 2.0]), np.array([1e9, 0.5e9]), np.array([1.0, 0.5])
    )
    job = demo_run(write_trace(row), sampling=steps)
    result = run_trace(job)
    names, watts = read_table(job.out / "power_trace.log")
    column = dict(zip(names, watts.T, strict=True))
    assert result.duration_s == pytest.approx(2 * 500e-9 + 2 * 1000e-9)
    assert column["SHRDP"][2] == pytest.approx(column["SHRDP"][0] / 8, rel=1e-5)
    assert column["DRAMP"][2] == pytest.approx(column["DRAMP"][0] / 2, rel=1e-5)
    assert column["LEAKAGEP"][2] == pytest.approx(column["LEAKAGEP"][0] / 2, rel=1e-5)
    wide = np.column_stack([row, [1000, 1000, 500, 500], [1, 1, 0.5, 0.5]])
    inside = demo_run(
        write_trace(wide, [*COLUMNS, CLOCK, VOLTAGE], name="w.log"), out=tmp_path / "w"
    )
    run_trace(inside)
    assert read_table(inside.out / "power_trace.log")[1] == pytest.approx(watts, abs=1e-6)


def test_parquet_holds_every_sample(write_trace: TraceMaker, demo_run) -> None:
    pytest.importorskip("pyarrow")
    import polars as pl

    job = demo_run(write_trace(with_ends(KERNELS)), wanted=(*LOGS, TABLE, FIGURE))
    result = run_trace(job)
    frame = pl.read_parquet(job.out / "samples.parquet")
    assert frame.height == 25
    assert frame["kernel"].to_list() == [0] * 5 + [1] + [2] * 12 + [3] * 7
    assert frame["time_s"].to_numpy() == pytest.approx(np.arange(25) * 500e-9)
    energy = (frame["power_w"] * frame["duration_s"]).sum()
    assert energy == pytest.approx(result.energy_j)
    parts = frame.select(job.model.parts).sum_horizontal()
    assert parts.to_numpy() == pytest.approx(frame["power_w"].to_numpy())


def test_idle_sms_regain_the_digits_the_print_lost() -> None:
    """15 − 14.97 is 0.0299997 in float32; the trace prints 0.030000 and the report 0.0299997."""
    value = np.array([[0.03], [8.0], [0.0300404]])
    restored = restore_idle_sms(value, 0, 15, 500.0)[:, 0]
    assert f"{restored[0]:g}" == "0.0299997"
    assert restored[1] == 8.0
    assert restored[2] == 0.0300404  # no whole number of cycles: left alone


def test_figure_bins_keep_the_energy() -> None:
    from wattcast.lab.gpuwattch.trace_outputs import MOST_BINS, PowerBins, draw_component_power

    random = np.random.default_rng(5)
    part_w, duration_s = random.random((10_000, 3)), random.random(10_000)
    timeline = PowerBins(3)
    for a in range(0, 10_000, 777):
        timeline.add(part_w[a : a + 777], duration_s[a : a + 777])
    start_s, end_s, mean_w = timeline.mean()
    assert len(start_s) <= 2 * MOST_BINS
    assert end_s == pytest.approx(duration_s.sum())
    lengths = np.diff(np.append(start_s, end_s))
    assert (mean_w * lengths[:, np.newaxis]).sum(axis=0) == pytest.approx(
        (part_w * duration_s[:, np.newaxis]).sum(axis=0)
    )
    figure = draw_component_power(timeline, ("A", "B", "C"), "title", "caption")
    assert figure.axes[0].get_ylabel() == "Power (W)"


CONFIG = """
# a comment
-gpgpu_clock_domains 700.0:700.0:700.0:924.0
-gpgpu_n_clusters 15   # SMs
-gpgpu_n_cores_per_cluster 2
-gpgpu_dram_timing_opt "nbk=16:CCD=2:
                        CL=12"
-power_simulation_enabled 1
-power_trace_enabled 1
-steady_power_levels_enabled 1
-steady_state_definition 5:7
-gpgpu_runtime_stat 250:1
-gpuwattch_xml_file gpu.xml
"""


def test_simulator_configuration(tmp_path: Path) -> None:
    path = tmp_path / "gpgpusim.config"
    path.write_text(CONFIG)
    config = read_simulator_config(path)
    assert config == SimulatorConfig(
        clock_hz=700e6, sm_count=30, sample_cycle=250, steady=SteadyStateDefinition(5.0, 7)
    )
    path.write_text("-gpgpu_n_clusters 4\n-gpu_stat_sample_frequency 100\n")
    bare = read_simulator_config(path)
    assert (bare.sample_cycle, bare.power_trace_enabled, bare.steady_power_levels_enabled) == (
        100,
        False,
        False,
    )
    assert bare.sm_count == 4


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-gpgpu_runtime_stat 0", "gpgpu_runtime_stat.*above zero"),
        ("-power_trace_enabled yes", "0 or 1"),
        ("-steady_state_definition 8", "deviation:samples"),
        ("-steady_state_definition -1:4", "deviation above zero|deviation:samples"),
        ("-gpgpu_clock_domains fast:700", "in MHz"),
        ("-gpgpu_clock_domains 0:700", "in MHz"),
        ("-gpgpu_n_clusters none", "whole number"),
        ('-x "open', "quote is left open"),
        ("hello", "options such as"),
    ],
)
def test_bad_simulator_configurations_are_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "gpgpusim.config"
    path.write_text(text)
    with pytest.raises(BadInput, match=complaint):
        read_simulator_config(path)


MEASURE = """
import sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
import bench_trace
bench_trace._power_trace(Path(sys.argv[1]), Path(sys.argv[2]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_is_flat_in_the_length(tmp_path: Path) -> None:
    """Four times the trace, the same memory."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    peak = []
    for repeat in (1, 4):
        folder = tmp_path / str(repeat)
        folder.mkdir()
        body = trace_text(sample_rows(15_000)).split("\n", 1)
        (folder / "metric_trace.log").write_text(body[0] + "\n" + body[1] * (4 * repeat))
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder), str(folder)],
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
        peak.append(int(done.stdout))
    assert peak[1] < 1.25 * peak[0]
