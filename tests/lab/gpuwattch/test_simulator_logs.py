"""Power reports, simulator logs and gem5 statistics as input; traces that grow; files that do not
belong together.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

from gpuwattch.conftest import COLUMNS, TraceMaker, sample_rows, trace_text
from gpuwattch.test_trace_run import KERNELS, with_ends
from wattcast.core.errors import BadInput
from wattcast.lab.gpuwattch.architecture import write_architecture
from wattcast.lab.gpuwattch.counted_kernel_power import compute_kernel_power
from wattcast.lab.gpuwattch.energy_table import format_energy_table
from wattcast.lab.gpuwattch.simulated_power import make_power_trace
from wattcast.lab.gpuwattch.simulator_logs import (
    CounterSource,
    find_source,
    read_accelsim,
    read_gem5_stats,
)
from wattcast.lab.gpuwattch.trace_request import TraceRequest
from wattcast.lab.gpuwattch.trace_statistics import read_kernel_list

QV100 = ("qv100_accelwattch", "accelwattch_ptx_sim")


@pytest.fixture
def chip(tmp_path: Path) -> list[str]:
    """Options that name the demo chip's files."""
    write_architecture(demo_architecture(), tmp_path / "demo.xml")
    (tmp_path / "energies.yaml").write_bytes(format_energy_table(demo_energies()))
    return ["--config", str(tmp_path / "demo.xml"), "--energies", str(tmp_path / "energies.yaml")]


def qv100(
    reference: Path, out: Path, trace: str = "metric_trace.log.gz", **more: object
) -> TraceRequest:
    folder = reference / "simulator_runs" / QV100[0]
    return TraceRequest(
        folder / trace, folder / f"{QV100[1]}.xml", None, out, figure=False, parquet=False, **more
    )


def test_bottom_up_energies_add_no_leakage_to_accelwattch(reference: Path, tmp_path: Path) -> None:
    """AccelWattch's static, idle and constant power hold the leakage; 152 W of it were once added
    on top.
    """
    job, result = make_power_trace(qv100(reference, tmp_path))
    assert "LEAKAGEP" not in job.model.parts
    assert result.energy_j / result.duration_s == pytest.approx(
        66.0, rel=0.02
    )  # 66.0 W with dumped energies
    with pytest.raises(BadInput, match="no further leakage"):
        make_power_trace(qv100(reference, tmp_path, gate_idle_sms=True))


def test_pipelines_count_the_sms_of_the_architecture_file(reference: Path, tmp_path: Path) -> None:
    """GPUWattch's McPAT has the 16 SMs of its XML file, although the simulator runs 15."""
    folder = reference / "simulator_runs" / "gtx480_gpuwattch"
    table = reference / "accelwattch" / "coefficients" / "gpuwattch_gtx480.csv"
    watts = []
    for energies in (None, table):
        asked = TraceRequest(
            folder / "metric_trace.log.gz", folder / "gpuwattch_gtx480.xml", energies, tmp_path
        )
        job, _ = make_power_trace(
            TraceRequest(*list(vars(asked).values())[:4], figure=False, parquet=False)
        )
        watts.append(next(t.value for t in job.model.terms if t.part == "PIPEP"))
    assert watts[0] / watts[1] == pytest.approx(0.95, abs=0.005)  # 0.89 with 15 SMs


def test_a_power_report_tells_the_lanes_of_divergent_samples(
    reference: Path, tmp_path: Path
) -> None:
    folder = reference / "simulator_runs" / QV100[0]
    _, alone = make_power_trace(qv100(reference, tmp_path))
    assert alone.doubtful == [130]
    assert any("1 divergent samples (130)" in note for note in alone.notes)
    _, told = make_power_trace(qv100(reference, tmp_path, kernels=folder / "power_report.log"))
    assert told.doubtful == []
    assert told.kernels[9].mean.thread == pytest.approx(
        1.15947, abs=1e-5
    )  # as the report prints it


def test_power_report_as_input(reference: Path, tmp_path: Path) -> None:
    folder = reference / "simulator_runs" / QV100[0]
    report = (folder / "power_report.log").read_text()
    printed = [
        float(line.split("=")[1])
        for line in report.splitlines()
        if line.startswith("kernel_avg_power")
    ]
    assert find_source(folder / "power_report.log") is CounterSource.POWER_REPORT
    table = reference / "accelwattch" / "coefficients" / f"{QV100[1]}.csv"
    from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect

    asked = qv100(reference, tmp_path, "power_report.log", compat=SimulatorDialect.ACCELWATTCH)
    found = compute_kernel_power(
        TraceRequest(*list(vars(asked).values())[:2], table, *list(vars(asked).values())[3:]),
        CounterSource.POWER_REPORT,
    )
    assert found.power.total_w == pytest.approx(np.array(printed), abs=1e-3)


def test_energies_of_another_chip_are_noticed(reference: Path, tmp_path: Path) -> None:
    xml, tables = reference / "accelwattch" / "xml", reference / "accelwattch" / "coefficients"
    trace = reference / "simulator_runs" / "gtx480_gpuwattch" / "metric_trace.log.gz"

    def run(energies: str) -> list[str]:
        files = (trace, xml / "gpuwattch_gtx480.xml", tables / f"{energies}.csv", tmp_path)
        return make_power_trace(TraceRequest(*files, figure=False, parquet=False))[1].notes

    assert not any("warning" in note for note in run("gpuwattch_gtx480"))
    assert any("are they of one chip" in note for note in run("gpuwattch_gtx1080Ti"))
    with pytest.raises(BadInput, match="another architecture file"):
        run("gpuwattch_quadrofx5600")
    with pytest.raises(BadInput, match="of the other dialect"):
        run("accelwattch_ptx_sim")


def test_files_are_named_as_the_manual_does(
    verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path
) -> None:
    trace, out = write_trace(with_ends(KERNELS)), tmp_path / "p"
    code, _, _ = verb(
        "lab", "power-trace", str(trace), *chip, "--out", str(out), "--date-stamp", "--no-figure"
    )
    assert code == 0
    for stem, end in (
        ("power_report", ".log"),
        ("power_trace", ".log.gz"),
        ("metric_trace", ".log.gz"),
        ("steady_state_tracking_report", ".log.gz"),
    ):
        assert len(list(out.glob(f"gpgpusim_{stem}_???-???-*{end}"))) == 1, stem


@pytest.mark.parametrize("members", [False, True])
def test_a_growing_trace_is_followed(
    verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path, members: bool
) -> None:
    whole = write_trace(with_ends(KERNELS), members=members).read_bytes()
    growing, half = tmp_path / ("g.log.gz" if members else "g.log"), len(whole) // 2
    growing.write_bytes(whole[:half])

    def grow() -> None:
        with growing.open("ab") as stream:
            stream.write(whole[half:])

    later = threading.Timer(0.4, grow)
    later.start()
    argv = [
        str(growing),
        *chip,
        "--out",
        str(tmp_path / "p"),
        "--follow",
        "3s",
        "--no-figure",
        "--no-parquet",
    ]
    code, said, notes = verb("lab", "power-trace", *argv)
    later.join()
    assert code == 0
    assert said.startswith("25 samples, ")
    assert "mean so far" in notes


LOG = """GPGPU-Sim uArch: something
kernel_name = one
kernel_launch_uid = 1
gpu_sim_cycle = 1000
gpu_tot_sim_cycle = 1000
gpgpu_n_tot_thrd_icount = 3200
gpgpu_n_tot_w_icount = 100
gpgpu_n_shmem_insn = 320
Warp Occupancy Distribution:
Stall:5\tW0_Idle:7\tW0_Scoreboard:9\tW1:0\tW16:0\tW32:100
total dram reads = 40
total dram writes = 10
icnt_total_pkts_mem_to_simt=60
icnt_total_pkts_simt_to_mem=40
kernel_name = two
kernel_launch_uid = 2
gpu_sim_cycle = 500
gpu_tot_sim_cycle = 1500
gpgpu_n_tot_thrd_icount = 4800
gpgpu_n_tot_w_icount = 200
gpgpu_n_shmem_insn = 320
Warp Occupancy Distribution:
Stall:5\tW0_Idle:7\tW0_Scoreboard:9\tW1:0\tW16:100\tW32:100
total dram reads = 100
total dram writes = 10
icnt_total_pkts_mem_to_simt=61
icnt_total_pkts_simt_to_mem=40
"""


def test_a_simulators_log_gives_kernels_as_differences(
    verb, chip: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "sim.log"
    log.write_text(LOG)
    assert find_source(log) is CounterSource.ACCELSIM
    found = read_accelsim(log, 1e9)
    assert found.names == ("one", "two")
    assert found.activity.duration_s.tolist() == [1e-6, 0.5e-6]
    assert found.activity.event_values("dram_read_access").tolist() == [40, 60]
    assert found.activity.event_values("noc_flit").tolist() == [100, 1]
    assert found.activity.event_values("active_thread").tolist() == [32, 16]
    assert not found.activity.has("int_access")  # absent is not zero
    code, said, notes = verb(
        "lab", "power-trace", str(log), *chip, "--out", str(tmp_path / "p"), "--json"
    )
    assert code == 3  # the sum lacks components
    plain = json.loads(said)
    assert [k["name"] for k in plain["kernels"]] == ["one", "two"]
    assert "SPP" in plain["parts_lost"]
    assert "no counter shows" in notes
    code, _, said = verb(
        "lab", "power-trace", str(log), *chip, "--follow", "3s", "--out", str(tmp_path / "p")
    )
    assert (code, "--follow: expected a metric trace" in said) == (
        2,
        True,
    )  # was ignored, or read as a broken trace
    log.write_text("gpu_sim_cycle = 3\n")
    with pytest.raises(BadInput, match="kernel_name"):
        read_accelsim(log, 1e9)


def test_a_table_of_statistics_has_a_row_a_kernel(tmp_path: Path) -> None:
    """The layout that Accel-Sim's get_stats.py prints: a section a statistic, named by the pattern
    that found it.
    """
    table = tmp_path / "stats.csv"
    sections = {
        r"gpu_sim_cycle\s*=\s*(.*)": (1000, 500),
        r"gpgpu_n_tot_w_icount\s*=\s*(.*)": (100, "NA"),
        r"\s+Total_core_cache_stats_breakdown\[GLOBAL_ACC_R\]\[HIT\]\s*=\s*(.*)": (7, 8),
        r"total dram reads\s*=\s*(.*)": (40, 60),
    }
    text = ""
    for name, (one, two) in sections.items():
        text += "-" * 100 + f",\n{name},\nAPPS,QV100-SASS,\napp--one,{one},\napp--two,{two},\n\n"
    table.write_text(text)
    assert find_source(table) is CounterSource.ACCELSIM
    found = read_accelsim(table, 1e9)
    assert found.names == ("app--one", "app--two")
    assert found.activity.event_values("dram_read_access").tolist() == [40, 60]
    assert not found.activity.has("warp_instruction")  # of one kernel it is not available
    assert not found.activity.has("l1_read_hit") or found.activity.event_values(
        "l1_read_hit"
    ).tolist() == [7, 8]


def test_a_log_tells_each_kernels_active_threads(tmp_path: Path) -> None:
    log = tmp_path / "sim.log"
    log.write_text(LOG)
    kernels = read_kernel_list(log, 500)
    assert [kernel.threads for kernel in kernels] == [32.0, 16.0]
    assert [kernel.samples for kernel in kernels] == [2, 1]


def test_gem5_statistics_add_up_over_compute_units(verb, chip: list[str], tmp_path: Path) -> None:
    block = "---------- Begin Simulation Statistics ----------\nsimSeconds 0.000001 # s\n"
    for unit in (0, 1):
        at = f"system.cpu3.CUs{unit}"
        for name, value in (
            ("totalCycles", 1000),
            ("numInstrExecuted", 50),
            ("numVecOpsExecuted", 640),
        ):
            block += f"{at}.{name} {value} # count\n"
        for kind, value in (("F16", 0), ("F32", 128), ("F64", 64)):
            block += f"{at}.numVecOpsExecuted{kind} {value} # count\n"
        block += f"system.mem_ctrls{unit}.readReqs 30 # count\nsystem.mem_ctrls{unit}.writeReqs 3 # count\n"
        block += f"system.ruby.tcp_cntrl{unit}.L1cache.m_demand_hits 7 # count\n"
        block += f"system.ruby.tcc_cntrl{unit}.L2cache.m_demand_hits 5 # count\n"
    stats = tmp_path / "stats.txt"
    stats.write_text(block)
    assert find_source(stats) is CounterSource.GEM5
    found = read_gem5_stats(stats)
    wanted = {
        "warp_instruction": 100,
        "fpu_access": 256,
        "int_access": 896,
        "l1_read_hit": 14,
        "l2_read_hit": 10,
    }
    assert {event: found.activity.event_values(event)[0] for event in wanted} == wanted
    assert found.activity.event_values("dram_read_access").tolist() == [60]
    assert np.asarray(found.activity.at.clock_hz) == pytest.approx(1e9)
    code, said, _ = verb("lab", "power-trace", str(stats), *chip, "--out", str(tmp_path / "p"))
    assert code == 3  # the sum lacks components
    assert said.startswith("dump 1")
    stats.write_text(re.sub(r"^.*CUs1.*\n", "", block, flags=re.MULTILINE).replace("CUs0", "CUs"))
    alone = read_gem5_stats(
        stats
    )  # was a division by zero: gem5 gives a unit that is alone no number
    assert np.asarray(alone.activity.at.clock_hz) == pytest.approx(1e9)
    stats.write_text(re.sub(r"(totalCycles\s+)\S+", r"\g<1>1.7e+308", block))
    with pytest.raises(BadInput, match="totalCycles: expected cycles of 1 to 1e"):
        read_gem5_stats(stats)
    stats.write_text(re.sub(r"(simSeconds\s+)\S+", r"\g<1>1e300", block))
    with pytest.raises(BadInput, match="simSeconds: expected from"):
        read_gem5_stats(stats)
    stats.write_text("---------- Begin Simulation Statistics ----------\nsimSeconds 1\n")
    with pytest.raises(BadInput, match="compute units"):
        read_gem5_stats(stats)


def test_an_empty_trace_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_text(trace_text(sample_rows(2), COLUMNS))
    assert find_source(path) is CounterSource.TRACE
