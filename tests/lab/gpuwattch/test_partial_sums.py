"""A sum that lacks a part is "at least", never a total: logs, reports, traces, hardware counters, gem5."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

from gpuwattch.conftest import COLUMNS, sample_rows, trace_text
from gpuwattch.test_simulator_logs import LOG
from wattcast.core.errors import ExitCode
from wattcast.lab.gpuwattch.architecture import write_architecture
from wattcast.lab.gpuwattch.energy_table import format_energy_table
from wattcast.lab.gpuwattch.simulator_logs import CounterSource, find_source, read_accelsim

LOGS = ("regular_test", "shm_bm_tm1", "shm_image2")
REPORTED_W = 101.703  # kernel_avg_power of power_report.log, whose counters are those of one log
GEM5 = """---------- Begin Simulation Statistics ----------
simSeconds 0.000001 # s
system.cpu3.CUs0.totalCycles 1000 # count
system.cpu3.CUs0.numInstrExecuted 50 # count
"""


@pytest.fixture
def chip(tmp_path: Path) -> list[str]:
    """Options that name the demo chip's files."""
    write_architecture(demo_architecture(), tmp_path / "demo.xml")
    (tmp_path / "energies.yaml").write_bytes(format_energy_table(demo_energies()))
    return ["--config", str(tmp_path / "demo.xml"), "--energies", str(tmp_path / "energies.yaml")]


def public_run(reference: Path) -> Path:
    """Return the folder of a public run of GPGPU-Sim."""
    return reference / "simulator_runs" / "public_gtx480"


@pytest.mark.parametrize("name", LOGS)
def test_a_packed_log_is_recognised(reference: Path, name: str) -> None:
    """Packed logs were taken for metric traces and refused."""
    log = public_run(reference) / f"{name}.stdout.txt.gz"
    assert find_source(log) is CounterSource.ACCELSIM


def test_a_log_holds_the_counters_of_its_report(reference: Path) -> None:
    """Counters of the report are means over 291 samples; the log has their totals.

    Reads, writes and precharges of the DRAM partitions stood unread in the log, and zeros that
    GPGPU-Sim does not print were taken for missing.
    """
    folder = public_run(reference)
    activity = read_accelsim(folder / "regular_test.stdout.txt.gz", 700e6).activity
    report = (folder / "power_report.log").read_text()
    for column, event in (
        ("MEM_RD", "dram_read_access"),
        ("MEM_WR", "dram_write_access"),
        ("MEM_PRE", "dram_precharge"),
        ("DC_RH", "l1_read_hit"),
        ("DC_RM", "l1_read_miss"),
        ("L2_RH", "l2_read_hit"),
        ("L2_RM", "l2_read_miss"),
        ("L2_WH", "l2_write_hit"),
        ("CC_H", "constant_hit"),
        ("IC_H", "icache_hit"),
        ("NOC_A", "noc_flit"),
        ("TC_H", "texture_hit"),
    ):
        line = next(row for row in report.splitlines() if row.startswith(f"gpu_avg_{column},"))
        mean = float(line.split("=")[1])
        assert activity.event_values(event)[0] / 291 == pytest.approx(mean, rel=2e-3, abs=1e-6)


def test_a_log_with_a_report_is_at_least_and_about_its_power(
    verb, reference: Path, tmp_path: Path
) -> None:
    """The log gave 30 W as if it were the total; its report says 101.7 W."""
    folder = public_run(reference)
    coefficients = reference / "accelwattch" / "coefficients" / "gpuwattch_gtx480.csv"
    argv = [str(folder / "regular_test.stdout.txt.gz"), "--energies", str(coefficients)]
    argv += ["--config", str(folder / "gpuwattch_gtx480.xml"), "--out", str(tmp_path)]
    code, said, notes = verb("lab", "power-trace", *argv, "--compat", "gpuwattch", "--json")
    assert code == ExitCode.PARTIAL
    plain = json.loads(said)
    kernel = plain["kernels"][0]
    assert plain["at_least"]
    assert kernel["power_w"] is None
    assert kernel["power_at_least_w"] < REPORTED_W
    assert kernel["power_at_least_w"] == pytest.approx(sum(kernel["part_w"].values()))
    assert kernel["estimate_low_w"] <= REPORTED_W <= kernel["estimate_high_w"]
    assert kernel["estimate_w"] == pytest.approx(REPORTED_W, rel=0.25)
    assert "lower bounds, not totals" in notes
    header = (tmp_path / "kernel_power.csv").read_text().splitlines()[0]
    assert "power_at_least_w" in header.split(",")
    assert "power_w" not in header.split(",")


def test_a_report_that_shows_everything_is_a_total(verb, reference: Path, tmp_path: Path) -> None:
    folder = public_run(reference)
    coefficients = reference / "accelwattch" / "coefficients" / "gpuwattch_gtx480.csv"
    argv = [str(folder / "power_report.log"), "--energies", str(coefficients), "--json"]
    argv += ["--config", str(folder / "gpuwattch_gtx480.xml"), "--out", str(tmp_path)]
    code, said, _ = verb("lab", "power-trace", *argv, "--compat", "gpuwattch")
    assert code == ExitCode.OK
    kernel = json.loads(said)["kernels"][0]
    assert kernel["power_w"] == pytest.approx(REPORTED_W, rel=0.05)
    assert kernel["reported_w"] == REPORTED_W


def test_other_energies_are_told_beside_the_reports_own_watts(
    verb, reference: Path, tmp_path: Path
) -> None:
    """Energies from the architecture without the original's quirks gave 139.6 W, no word of 101.7."""
    folder = public_run(reference)
    argv = [str(folder / "power_report.log"), "--out", str(tmp_path)]
    code, said, _ = verb(
        *("lab", "power-trace", *argv, "--config", str(folder / "gpuwattch_gtx480.xml"))
    )
    assert code == ExitCode.OK
    assert "the report says 101.703 W" in said


def test_accelwattchs_own_hardware_counters(verb, reference: Path, tmp_path: Path) -> None:
    """AccelWattch's file is read as it is; half of the watts were printed as the total.

    AccelWattch itself, which also had the instructions of a simulator, is 7.5 % off on these.
    """
    folder = reference / "accelwattch"
    argv = [str(folder / "artifact_hw_perf.csv"), "--clock", "1447MHz", "--sms", "80", "--json"]
    argv += ["--config", str(folder / "xml" / "accelwattch_sass_hw.xml"), "--out", str(tmp_path)]
    code, said, _ = verb("lab", "power-trace", *argv)
    assert code == ExitCode.PARTIAL
    kernels = json.loads(said)["kernels"]
    with (folder / "volta_hw_counters_power_components.csv").open() as stream:
        measured = {row["hw_Elapsed_Cycles"]: row for row in csv.DictReader(stream)}
    with (folder / "artifact_hw_perf.csv").open() as stream:
        rows = [measured[row["Elapsed_Cycles"]] for row in csv.DictReader(stream)]
    measured_w = np.array([float(row["hw_total_W"]) for row in rows])
    theirs_w = np.array([float(row["accelwattch_HW_total_W"]) for row in rows])
    seen_w = np.array([kernel["power_at_least_w"] for kernel in kernels])
    about_w = np.array([kernel["estimate_w"] for kernel in kernels])
    assert len(rows) == 25
    assert (seen_w < measured_w).all()
    theirs = np.abs(theirs_w / measured_w - 1).mean()
    assert theirs == pytest.approx(0.0746, abs=1e-3)
    assert np.abs(about_w / measured_w - 1).mean() < theirs + 0.02


@pytest.mark.parametrize("left_out", ["total dram reads", "icnt_total_pkts", "n_shmem_insn"])
def test_a_log_with_a_part_left_out_is_at_least(
    verb, chip: list[str], tmp_path: Path, left_out: str
) -> None:
    log = tmp_path / "sim.log"
    log.write_text("".join(line for line in LOG.splitlines(True) if left_out not in line))
    code, said, _ = verb("lab", "power-trace", str(log), *chip, "--out", str(tmp_path / "p"))
    assert code == ExitCode.PARTIAL
    assert said.startswith("one")
    assert "at least" in said.splitlines()[0]


def test_a_dump_of_gem5_is_at_least(verb, chip: list[str], tmp_path: Path) -> None:
    stats = tmp_path / "stats.txt"
    stats.write_text(GEM5)
    code, said, _ = verb("lab", "power-trace", str(stats), *chip, "--out", str(tmp_path / "p"))
    assert code == ExitCode.PARTIAL
    assert "at least" in said.splitlines()[0]


@pytest.mark.parametrize("left_out", ["gpu_avg_MEM_RD,", "gpu_avg_NOC_A,", "gpu_avg_PIPE_A,"])
def test_a_report_with_a_counter_left_out_has_no_total(
    verb, reference: Path, tmp_path: Path, left_out: str
) -> None:
    """Every counter of a report is printed, zeros too: one that is not there is a fault."""
    folder = public_run(reference)
    lines = (folder / "power_report.log").read_text().splitlines(True)
    report = tmp_path / "report.log"
    report.write_text("".join(line for line in lines if not line.startswith(left_out)))
    assert len(report.read_text()) < sum(map(len, lines))
    coefficients = reference / "accelwattch" / "coefficients" / "gpuwattch_gtx480.csv"
    argv = [str(report), "--energies", str(coefficients), "--compat", "gpuwattch"]
    argv += ["--config", str(folder / "gpuwattch_gtx480.xml"), "--out", str(tmp_path / "p")]
    code, said, notes = verb("lab", "power-trace", *argv)
    assert code == ExitCode.BAD_INPUT
    assert not said
    assert left_out.rstrip(",") in notes


@pytest.mark.parametrize("left_out", ["DRAM_Rd", "NOC", "L1_RH", "Num_Idle_SMs", "Chip Voltage"])
def test_hardware_counters_with_a_column_left_out_have_no_total(
    verb, reference: Path, tmp_path: Path, left_out: str
) -> None:
    """A column of AccelWattch's own file that is not there is named, not taken for zero."""
    folder = reference / "accelwattch"
    with (folder / "artifact_hw_perf.csv").open(newline="") as stream:
        rows = list(csv.reader(stream))
    place = rows[0].index(left_out)
    counters = tmp_path / "hw.csv"
    with counters.open("w", newline="") as stream:
        csv.writer(stream).writerows([row[:place] + row[place + 1 :] for row in rows])
    argv = [str(counters), "--clock", "1447MHz", "--sms", "80", "--out", str(tmp_path / "p")]
    argv += ["--config", str(folder / "xml" / "accelwattch_sass_hw.xml")]
    code, said, notes = verb("lab", "power-trace", *argv)
    assert code == ExitCode.BAD_INPUT
    assert not said
    assert left_out in notes


@pytest.mark.parametrize("left_out", [0, 5, 20])
def test_a_metric_trace_with_a_column_left_out_has_no_total(
    verb, chip: list[str], tmp_path: Path, left_out: int
) -> None:
    """A trace without one of its counters is refused, and the counter named."""
    names = [name for place, name in enumerate(COLUMNS) if place != left_out]
    trace = tmp_path / "gpgpusim_metric_trace.log"
    rows = np.delete(sample_rows(3), left_out, axis=1)
    trace.write_text(trace_text(rows, names))
    code, said, notes = verb("lab", "power-trace", str(trace), *chip, "--out", str(tmp_path / "p"))
    assert code == ExitCode.MISSING
    assert not said
    assert COLUMNS[left_out] in notes
