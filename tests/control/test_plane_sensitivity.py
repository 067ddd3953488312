"""Harmonia as it was meant, on a card: counters over a plane of clocks, a model of them, used live."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from standin_node import PATIENCE_S, USUAL, wait_for

from wattcast.cli.main import main
from wattcast.control.job_cards import combine_readings
from wattcast.control.sensitivity_model import (
    SensitivityBin,
    bin_sensitivity,
    read_sensitivity_model,
    read_sensitivity_table,
)
from wattcast.measure.device_control import GPM_COUNTERS, NvmlReading

if TYPE_CHECKING:
    from pathlib import Path

    from standin_node import Node

COMPUTE_GPM = "gpm 95 10 80 5"
MEMORY_GPM = "gpm 95 90 5 5"
BOTH_GPM = "gpm 95 10 20 5"
# Reports units for two seconds, the faster the higher the clock, or always as fast.
FOLLOWS = (
    "import os, sys, time\n"
    "core, follows = float(sys.argv[1]), int(sys.argv[2])\n"
    "unit_s = 0.02 * (1980 / core if follows else 1)\n"
    "begin = time.monotonic()\n"
    "done = 0\n"
    "while time.monotonic() - begin < 5.0:\n"
    "    time.sleep(0.005)\n"
    "    due = int((time.monotonic() - begin) / unit_s)\n"
    "    open(os.environ['WATTCAST_PROGRESS'], 'ab').write(b'.' * (due - done)); done = due\n"
)


def visit(node: Node, table: Path, name: str, follows: bool) -> None:
    """Run a program at three core clocks and add what it took to a table."""
    node.standin.follow(
        USUAL, "utilisation 100", "follow 1.5", COMPUTE_GPM if follows else MEMORY_GPM
    )
    options = ("--apply", "--cores", "3", "--table", str(table), "--name", name)
    progress = ("--progress", str(node.folder / f"{name}-progress"))
    program = (sys.executable, "-c", FOLLOWS, "{core}", str(int(follows)))
    done = node.call("plane", *options, *progress, "--", *program)
    assert done.returncode == 0, done.stderr
    assert not node.is_set


def test_a_plane_of_two_programs_gives_a_model_that_runs_live(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "plane.csv"
    visit(node, table, "gemm", True)
    visit(node, table, "stream", False)
    with table.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["kernel"] for row in rows] == ["gemm"] * 3 + ["stream"] * 3
    assert set(GPM_COUNTERS) < set(rows[0])
    assert float(rows[0]["TensorBusy"]) == pytest.approx(0.8)
    assert float(rows[0]["power_w"]) > float(rows[2]["power_w"]) > 50.0

    read = read_sensitivity_table(table)
    compute = dict(zip(read.kernels, read.sensitivity["compute"], strict=True))
    # It is 1 and 0; a busy machine stops programs now and then, so that the bins are asked for.
    assert bin_sensitivity(compute["gemm"]) is SensitivityBin.HIGH
    assert bin_sensitivity(compute["stream"]) is SensitivityBin.LOW
    assert not np.any(read.sensitivity["bandwidth"])  # the memory clock was not turned

    model = tmp_path / "model.yaml"
    assert main(["lab", "sensitivity", str(table), "--out", str(model)]) == 0
    capsys.readouterr()
    fitted = read_sensitivity_model(model)
    memory_bound = dict.fromkeys(GPM_COUNTERS, 0.0) | {"SmBusy": 0.95, "DramBusy": 0.9}
    memory_bound |= {"TensorBusy": 0.05, "Fp32Busy": 0.05}
    assert fitted.predict(memory_bound)[0] < 0.3
    assert fitted.bandwidth.coefficients == {}

    # Live: the counters call a program half bound by compute. Its first step is the coarse one of
    # the middle bin (`coarse_clock_alone`); one that only senses would go down to 1.755 GHz.
    node.standin.follow(USUAL, "utilisation 100", "follow 1.5", BOTH_GPM)
    process = node.control("--sensitivity", str(model), by_daemon=False)
    wait_for(lambda: "set" in node.said())
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3
    first = next(line for line in node.said().splitlines() if line.endswith(": set"))
    clock_hz = float(first.split(" GHz")[0]) * 1e9
    assert clock_hz == pytest.approx(1.905e9)  # the lowest level of 0.95 times the highest or more
    assert not node.is_set


def test_a_card_without_counters_says_so(node: Node, tmp_path: Path) -> None:
    node.standin.follow(USUAL)
    table = tmp_path / "plane.csv"
    done = node.call("plane", "--apply", "--cores", "2", "--table", str(table), "--", "sleep", "2")
    assert done.returncode != 0
    assert "tells no counters" in done.stderr
    assert not node.is_set
    assert not table.exists()
    model = tmp_path / "model.yaml"
    model.write_text(
        "format: 1\nname: m\nsource: s\ncompute: {intercept: 0.5, coefficients: {}}\n"
        "bandwidth: {intercept: 0.0, coefficients: {}}\n"
    )
    done = node.call("run", "--sensitivity", str(model), "--", "true")
    assert done.returncode != 0
    assert "leave --sensitivity out" in done.stderr


def test_a_model_of_other_counters_is_refused_before_anything_runs(
    node: Node, tmp_path: Path
) -> None:
    node.standin.follow(USUAL, MEMORY_GPM)
    ran = tmp_path / "ran"
    done = node.call(
        "run",
        "--apply",
        "--sensitivity",
        "src/wattcast/control/data/hd7970_simulated.yaml",
        "--",
        "touch",
        str(ran),
    )
    assert done.returncode == 4
    assert "icActivity" in done.stderr
    assert not ran.exists()


def test_a_table_is_not_written_over(node: Node, tmp_path: Path) -> None:
    table = tmp_path / "plane.csv"
    table.write_text("kernel,core_clock,memory_clock,time_s,power_w\ntrue,1e9,3e9,1,100\n")
    done = node.call("plane", "--table", str(table), "--", "true")
    assert done.returncode == 2
    assert "--name" in done.stderr
    table.write_text("a,b\n1,2\n")
    done = node.call("plane", "--table", str(table), "--", "true")
    assert done.returncode == 2
    assert "manage plane wrote" in done.stderr


def test_counters_of_a_job_are_means_of_its_cards() -> None:
    def reading(dram: float | None) -> NvmlReading:
        counters = None if dram is None else {"DramBusy": dram}
        return NvmlReading(0.0, 1.0, 1.0, 1e9, 1e9, counters=counters)

    assert combine_readings([reading(0.2), reading(0.6)]).counters == {
        "DramBusy": pytest.approx(0.4)
    }
    assert combine_readings([reading(0.2), reading(None)]).counters is None


def test_counters_are_taken_where_a_controller_first_reads_them(tmp_path: Path) -> None:
    """Means over all settings misread what the controller sees at its first run."""
    table = tmp_path / "table.csv"
    table.write_text(
        "kernel,time_s,core_clock,memory_clock,Busy\n"
        "a,1,2e9,3e9,10\na,2,1e9,3e9,90\na,1,2e9,1e9,50\nb,1,2e9,3e9,30\nb,1,1e9,3e9,70\nb,3,2e9,1e9,0\n"
    )
    read = read_sensitivity_table(table)
    assert read.counters["Busy"].tolist() == [10.0, 30.0]
