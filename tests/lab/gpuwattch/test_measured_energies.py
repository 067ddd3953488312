"""Energies for AccelWattch from measurements, the XML files they go into, and the meter of
simulators in C++.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from gpuwattch.conftest import trace_text
from wattcast.core.errors import BadInput
from wattcast.core.row_tables import database_folder
from wattcast.lab.gpuwattch import measured_energies as measured
from wattcast.lab.gpuwattch.architecture import read_architecture
from wattcast.lab.gpuwattch.component_build import ClockSetting, PowerMeter, answer_samples
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters

METERED = [c.column for c in dialect_counters(SimulatorDialect.ACCELWATTCH) if c.event]
COLUMNS = [c.column for c in dialect_counters(SimulatorDialect.ACCELWATTCH)]


@pytest.mark.parametrize("name", [measured.PARENT, *measured.CARRIED])
def test_factors_give_the_measured_energies(name: str) -> None:
    chip = measured.measured_chip(name)
    architecture, table, _ = measured.measured_model(name)
    by_column = {c.column: c.scaling for c in dialect_counters(SimulatorDialect.ACCELWATTCH)}
    for key, term in measured.TERMS.items():
        for counter in term.counters:
            energy_j = table.energy_j[counter] * architecture.scaling_of(by_column[counter])
            assert energy_j == pytest.approx(chip.values[key].value)
            low_j, high_j = table.interval_j[counter]
            assert low_j <= table.energy_j[counter] <= high_j
        assert chip.values[key].low <= chip.values[key].value <= chip.values[key].high
    assert architecture.scaling_of("REG_RD") == 0.0  # registers are in the units that use them


def test_carried_energies_are_less_certain() -> None:
    own, other = (
        measured.measured_chip(name).values["INT_ACC"] for name in ("h200", "a100-sxm-80gb")
    )
    assert (other.high - other.low) / other.value > 2 * (own.high - own.low) / own.value
    with pytest.raises(BadInput, match="GPU with energies"):
        measured.measured_chip("l40s")


def test_the_shipped_fit_is_what_the_command_makes() -> None:
    again = measured.fit_measured_energies(database_folder("h200"))
    shipped = measured.measured_chip("h200").values
    for name, value in again.items():
        assert value.value == pytest.approx(shipped[name].value, rel=1e-3)
        assert value.high == pytest.approx(shipped[name].high, rel=0.02)


def test_operators_that_were_never_used() -> None:
    """The judgement that docs/method/component.md quotes; the split was fixed before any fit."""
    found = measured.judge_held_out(database_folder("h200"))
    assert (found.rows, found.operators) == (237, 101)
    assert found.mape == pytest.approx(5.05, abs=0.01)
    page = Path(__file__).parents[3].joinpath("docs", "method", "component.md").read_text()
    assert f"{found.mape:.2f} %" in page
    for family, (_, error) in found.by_family.items():
        assert f"{family} {error:.1f}" in page


def test_a_file_and_a_name_give_the_same_watts(verb, tmp_path: Path) -> None:
    """The XML and energies that the command writes are the model that --config h200 has."""
    rows = np.zeros((6, len(COLUMNS)))
    for column, value in (
        ("TOT_INST", 4e5),
        ("INT_ACC", 3e6),
        ("TENSOR_ACC", 5e5),
        ("MEM_RD", 900),
        ("L2_RH", 4e3),
    ):
        rows[:, COLUMNS.index(column)] = value * np.arange(1, 7)
    trace = tmp_path / "m.log"
    trace.write_text(trace_text(rows, COLUMNS))
    xml, yaml = tmp_path / "h.xml", tmp_path / "h.yaml"
    code, said, _ = verb("lab", "accelwattch", "h200", "--out", str(xml), "--energies", str(yaml))
    assert code == 0
    assert "pJ" in said
    assert "a count -->" in xml.read_text()  # an interval beside every energy
    watts = []
    for named in (["h200"], [str(xml), "--energies", str(yaml), "--clock", "1980MHz"]):
        argv = [
            str(trace),
            "--config",
            *named,
            "--out",
            str(tmp_path / "p"),
            "--no-figure",
            "--json",
        ]
        code, said, _ = verb("lab", "power-trace", *argv)
        assert code == 0
        watts.append(json.loads(said)["mean_power_w"])
    assert watts[0] == pytest.approx(watts[1], rel=1e-9)
    assert watts[0] > 124.0


def test_counters_hold_the_factors_of_the_file_the_simulator_ran_with(
    reference: Path, verb, tmp_path: Path
) -> None:
    run = reference / "simulator_runs" / "qv100_accelwattch"
    argv = [
        str(run / "metric_trace.log.gz"),
        "--config",
        "h200",
        "--out",
        str(tmp_path),
        "--no-figure",
        "--json",
    ]
    watts = []
    for more in ([], ["--ran-with", str(run / "accelwattch_ptx_sim.xml")]):
        code, said, notes = verb("lab", "power-trace", *argv, *more)
        assert code == 0
        assert ("--ran-with" in notes) == (not more)
        watts.append(json.loads(said)["mean_power_w"])
    assert watts[1] != pytest.approx(watts[0], rel=1e-3)


def test_a_simulators_own_tree_stays(reference: Path, verb, tmp_path: Path) -> None:
    base = reference / "accelwattch" / "xml" / "accelwattch_sass_sim.xml"
    out = tmp_path / "b200.xml"
    code, _, _ = verb("lab", "accelwattch", "b200", "--base", str(base), "--out", str(out))
    assert code == 0
    ours, theirs = read_architecture(out), read_architecture(base)
    assert ours.titles == theirs.titles
    assert ours.stats == theirs.stats
    assert ours.number("rf_banks") == theirs.number("rf_banks")
    assert ours.scaling_of("INT_ACC") != theirs.scaling_of("INT_ACC")


def meter() -> PowerMeter:
    architecture, _, built = measured.measured_model("h200")
    scaling = architecture.all_scaling()
    return PowerMeter(
        built.model, ClockSetting(1.98e9), SimulatorDialect.ACCELWATTCH, scaling=scaling
    )


def test_the_meter_answers_line_by_line() -> None:
    said: list[str] = []
    some = {"TOT_INST": "1000", "INT_ACC": "64000", "IDLE_CORE_N": "3"}
    row = ",".join(["500", *(some.get(name, "0") for name in METERED)])
    lines = [",".join(METERED), f"{row}|0.99e9", row, "500,1,2"]
    answer_samples(meter(), lines, said.append)
    assert said[0].startswith("power,IBP,")
    fast, slow = (np.array(line.split(","), float) for line in said[1:3])
    assert fast[0] == pytest.approx(fast[1:].sum())
    assert slow[0] < fast[0]  # twice the time and a lower voltage from the second sample on
    assert said[3].startswith("error sample 2: expected cycles and 43 counts")
    said.clear()
    answer_samples(meter(), ["NOTHING"], said.append)
    assert said[0].startswith("error unknown counter 'NOTHING'")


@pytest.mark.slow
def test_a_simulator_in_cpp_gets_the_same_watts(tmp_path: Path) -> None:
    header = files("wattcast.lab.gpuwattch").joinpath("wattcast_power.hpp")
    source, binary = Path(__file__).with_name("power_meter.cpp"), tmp_path / "meter"
    build = ["g++", "-std=c++11", "-Wall", "-Wextra", "-Werror", f"-I{Path(str(header)).parent}"]
    subprocess.run([*build, str(source), "-o", str(binary)], check=True)
    program = tmp_path / "wattcast"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m wattcast "$@"\n')
    program.chmod(0o755)
    where = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*more: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            [str(binary), *more],
            check=False,
            capture_output=True,
            text=True,
            env=where,
            timeout=120,
        )
        return done.returncode, done.stdout.splitlines()

    names = ",".join(METERED)
    code, lines = run("h200", str(program), names)
    assert code == 0
    own, said = meter(), []
    own.listeners = (lambda seen: said.append(seen.power_w),)
    for i in range(1, 6):
        counts = {
            "TOT_INST": 1000.0 * i,
            "INT_ACC": 32000.0 * i,
            "MEM_RD": 10.0,
            "IDLE_CORE_N": 2.0,
        }
        own.sample(dict.fromkeys(METERED, 0.0) | counts, 500)
        if i == 4:
            own.setting = ClockSetting(0.99e9)
    assert [float(line.split()[0]) for line in lines[1:]] == pytest.approx(said, rel=1e-12)
    wrong = run("h200", str(program), names, "wrong")[1][-1]
    assert wrong.startswith("wattcast: sample 2: expected cycles above zero")
    assert "the meter ended" in run("nothing", str(program), names)[1][-1]


def test_every_term_is_counted_by_its_name() -> None:
    """Counts once went by their order, which nothing tied to the rows of measured_terms.csv."""
    assert set(measured.count_accesses({})) == set(measured.TERMS)
    for name, term in measured.TERMS.items():
        assert term.counters[0] == name


def test_a_pair_of_halves_is_two_additions_and_no_product() -> None:
    """100 instructions of a warp in the tensor pipe for two cycles each, as an H200 counts them."""
    metrics = {
        "sm__inst_executed_pipe_tensor_op_hmma.sum": 100.0,
        "sm__pipe_tensor_cycles_active.sum": 200.0,
    }
    counts = measured.count_accesses(metrics)
    assert counts["TENSOR_ACC"] == 0.0
    assert counts["FPU_ACC"] == 100.0 * 2 * 32
    # mma.sync takes six cycles: 32 accesses are left of each
    counts = measured.count_accesses(metrics | {"sm__pipe_tensor_cycles_active.sum": 600.0})
    assert counts["TENSOR_ACC"] == 100.0 * 32


def test_a_counter_that_no_row_has_is_refused(monkeypatch, tmp_path: Path) -> None:
    """A column of zeros was divided by its largest entry."""
    counts = dict.fromkeys(measured.TERMS, 1.0) | {"DPU_ACC": 0.0}
    launch = measured.CountedLaunch(
        name="a0",
        family="bmm",
        power_w=300.0,
        duration_s=1.0,
        clock_hz=1e9,
        relative_voltage=1.0,
        active=1.0,
        counts=list(counts.values()),
    )
    launches = measured.CountedLaunches.gather([launch])
    monkeypatch.setattr(measured, "read_operators", lambda folder, gpu: launches)
    monkeypatch.setattr(measured, "read_benchmarks", lambda folder, gpu: launches)
    with pytest.raises(BadInput, match="no row counts DPU_ACC"):
        measured.fit_measured_energies(tmp_path)


def test_a_file_without_a_unit_keeps_no_measured_energy_back(monkeypatch) -> None:
    """Its factor was zero, and the simulator's watts were too low without a word."""
    chip = measured.measured_chip("h200")
    unscaled_table = measured._unscaled_table

    def without_fp64(*arguments):
        table = unscaled_table(*arguments)
        return replace(table, energy_j=table.energy_j | {"DPU_ACC": 0.0})

    monkeypatch.setattr(measured, "_unscaled_table", without_fp64)
    with pytest.raises(BadInput, match="DPU_ACC has no energy"):
        measured.measured_architecture(chip)


def test_a_carried_card_does_not_take_the_parents_error_for_its_own(call) -> None:
    """``--judge`` of the A100's file printed the H200's errors without a word."""
    carried = call("lab", "accelwattch", "a100-sxm-80gb", "--judge")
    assert "its own error is not known" in carried.out
    own = call("lab", "accelwattch", "h200", "--judge", "--json")
    assert json.loads(own.out)["held_out"]["gpu"] == "h200"
    assert "not known" not in own.out
