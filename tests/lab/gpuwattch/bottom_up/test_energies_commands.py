"""``gpus show --energies``, ``lab check-energies``, ``lab power-trace`` and ``lab fit component``
without a table.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture

from wattcast.lab.gpuwattch.architecture import write_architecture
from wattcast.lab.gpuwattch.bottom_up.event_energies import (
    build_architecture_chip,
    make_energy_table,
)
from wattcast.lab.gpuwattch.energy_table import read_energies
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters


@pytest.fixture
def chip(tmp_path: Path) -> Path:
    path = tmp_path / "demo.xml"
    write_architecture(demo_architecture(), path)
    return path


def test_a_catalogue_gpu(verb) -> None:
    code, said, _ = verb("gpus", "show", "h200", "--energies")
    assert code == 0
    for word in (
        "REG_RD",
        "cuda_fp32_flop",
        "register-file banks",
        "whole chip",
        "bottom-up",
        "SRAM cell",
    ):
        assert word in said


def test_voltage_node_and_temperature(verb) -> None:
    def found(*options: str) -> dict:
        code, said, _ = verb("gpus", "show", "h200", "--energies", "--json", *options)
        assert code == 0
        return json.loads(said)

    plain = found()
    assert found("--voltage", "0.8V")["events"][0]["energy_j"] < plain["events"][0]["energy_j"]
    assert found("--temperature", "30C")["leakage_w"] < plain["leakage_w"]
    assert found("--feature-size", "22nm")["area_mm2"] > plain["area_mm2"]


def test_an_architecture_file_has_the_energies_of_its_chip(verb, chip: Path) -> None:
    code, text, _ = verb("gpus", "show", str(chip), "--energies", "--json")
    assert code == 0
    energies = make_energy_table(build_architecture_chip(demo_architecture())).energy_j
    shown = json.loads(text)["counters"]
    assert {row["counter"]: row["energy_j"] for row in shown}.items() >= energies.items()


def test_a_change_and_a_table(verb, chip: Path, tmp_path: Path) -> None:
    table = tmp_path / "energies.yaml"
    argv = (
        "gpus",
        "show",
        str(chip),
        "--energies",
        "--change",
        "registers=2",
        "--change",
        "sms=2",
        "--save",
        str(table),
    )
    code, said, _ = verb(*argv)
    assert code == 0
    assert "before" in said
    own = make_energy_table(build_architecture_chip(demo_architecture()))
    saved = read_energies(table)
    assert saved.energy_j["REG_RD"] > own.energy_j["REG_RD"]
    assert saved.energy_j["IC_H"] == pytest.approx(own.energy_j["IC_H"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("h200", "--energies", "--feature-size", "90nm"), "11.99 to 65 nm"),
        (("h200", "--energies", "--change", "registers"), "PART=FACTOR"),
        (("h200", "--energies", "--change", "cores=2"), "part to change"),
        (("h200", "--energies", "--voltage", "12V"), "voltage"),
        (("quadro-fx-5600", "--energies"), "node inside the table"),
        (("h200", "--feature-size", "28nm"), "--energies as well"),
    ],
)
def test_refusals(verb, argv: tuple[str, ...], said: str) -> None:
    code, _, complaint = verb("gpus", "show", *argv)
    assert code != 0
    assert said in complaint


def test_the_check_prints_every_ratio(verb) -> None:
    code, said, _ = verb("lab", "check-energies", "--json")
    assert code == 0
    found = json.loads(said)
    assert {"h200"} <= {r["where"] for r in found["ratios"]}
    assert len([r for r in found["ratios"] if r["where"] == "h200"]) == 10
    assert found["rows"]
    code, _, complaint = verb("lab", "check-energies", "--reference", "nowhere")
    assert code != 0
    assert "accelwattch" in complaint


def test_figures(verb, chip: Path, tmp_path: Path, reference: Path) -> None:
    sizes, ratios = tmp_path / "sizes.png", tmp_path / "ratios.svg"
    assert verb("gpus", "show", str(chip), "--energies", "--plot", str(sizes))[0] == 0
    assert sizes.read_bytes().startswith(b"\x89PNG")
    argv = ("lab", "check-energies", "--reference", str(reference), "--plot", str(ratios))
    code, said, _ = verb(*argv)
    assert code == 0
    assert b"<svg" in ratios.read_bytes()
    assert said.count("gpuwattch_gtx480") > 29
    assert "GTX480 leakage and area" in said


def test_power_trace_without_a_table(verb, chip: Path, tmp_path: Path) -> None:
    columns = [c.column for c in dialect_counters(SimulatorDialect.GPUWATTCH)]
    random = np.random.default_rng(3)
    rows = np.rint(random.exponential(100.0, (6, len(columns))))
    rows[:, columns.index("PIPE_A")] = 0.5
    rows[:, columns.index("IDLE_CORE_N")] = 0.0
    rows[:, columns.index("CONST_DYNAMICN")] = 0.0
    trace = tmp_path / "m.log"
    trace.write_text(
        "\n".join([",".join(columns), *("".join(f"{v:f}," for v in row) for row in rows)]) + "\n"
    )
    common = [str(trace), "--config", str(chip), "--no-figure", "--no-parquet", "--json"]
    code, said, notes = verb("lab", "power-trace", *common, "--out", str(tmp_path / "a"))
    assert code == 0
    assert "no table of energies: bottom-up" in notes
    assert "McPAT's defaults" in notes
    table = tmp_path / "saved.yaml"
    assert verb("gpus", "show", str(chip), "--energies", "--save", str(table))[0] == 0
    code, again, _ = verb(
        "lab", "power-trace", *common, "--energies", str(table), "--out", str(tmp_path / "b")
    )
    assert code == 0
    assert json.loads(said)["mean_power_w"] == pytest.approx(
        json.loads(again)["mean_power_w"], rel=1e-6
    )


def test_fit_component_without_a_table(verb, chip: Path, tmp_path: Path) -> None:
    """Kernels made with known factors on the bottom-up energies: the fit finds them."""
    table = make_energy_table(build_architecture_chip(demo_architecture()))
    names, factors = ("REG_RD", "FPU_ACC", "L2_RH", "PIPE_A"), (1.4, 0.7, 1.2, 0.9)
    random = np.random.default_rng(5)
    counts = random.uniform(0.0, 1e9, (26, 3)) * np.array([1.0, 0.3, 0.1])
    duty = random.uniform(0.1, 0.9, 26)
    assert table.leakage is not None
    constant_w = table.leakage.cores_w + table.leakage.rest_w + table.mc_constant_w
    seconds = 1e-3
    joules = np.array([table.energy_j[name] for name in names[:3]])
    watts = (
        counts / seconds * joules @ np.array(factors[:3])
        + factors[3] * duty * table.duty_w
        + constant_w
    )
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["kernel", "seconds", "watts", *names])
        for i, (row, d, w) in enumerate(zip(counts, duty, watts, strict=True)):
            writer.writerow(
                [
                    f"k{chr(97 + i)}",
                    seconds,
                    repr(float(w)),
                    *map(repr, row.tolist()),
                    repr(float(d)),
                ]
            )
    argv = [
        str(path),
        "--measured",
        "watts",
        "--duration",
        "seconds",
        "--bottom-up",
        str(chip),
        "--json",
    ]
    code, said, notes = verb("lab", "fit", "component", *argv)
    assert code == 0
    assert "bottom-up" in notes
    found = json.loads(said)
    assert [found["values"][name] for name in names] == pytest.approx(factors, rel=0.02)
    assert found["mape"]["in_sample"] < 1.0
    code, _, complaint = verb("lab", "fit", "component", *argv, "--energies")
    assert code != 0
    assert "one of them" in complaint
