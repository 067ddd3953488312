"""``wattcast lab power-trace`` and ``wattcast lab fit component``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

from gpuwattch.conftest import COLUMNS, TraceMaker, sample_rows, trace_text
from gpuwattch.test_trace_run import KERNELS, with_ends
from wattcast.lab.gpuwattch.architecture import read_architecture, write_architecture
from wattcast.lab.gpuwattch.energy_table import format_energy_table


@pytest.fixture
def chip(tmp_path: Path) -> list[str]:
    """Options that name the demo chip's files."""
    write_architecture(demo_architecture(), tmp_path / "demo.xml")
    (tmp_path / "energies.yaml").write_bytes(format_energy_table(demo_energies()))
    return ["--config", str(tmp_path / "demo.xml"), "--energies", str(tmp_path / "energies.yaml")]


def test_every_file_is_written(
    verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path
) -> None:
    trace = write_trace(with_ends(KERNELS))
    out = tmp_path / "power"
    code, said, notes = verb(
        "lab", "power-trace", str(trace), *chip, "--compat", "gpuwattch", "--out", str(out)
    )
    assert code == 0
    assert said.startswith("25 samples, ")
    for stem in ("power_report", "power_trace", "metric_trace", "steady_state"):
        assert len(list(out.glob(f"{stem}*"))) == 1, stem
    assert (out / "components.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "samples.parquet").exists()
    assert "kernel names" in notes
    assert "IPC" in notes


def test_json_says_it_all(verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("one\ntwo\nthree\nfour\n")
    trace = write_trace(with_ends(KERNELS))
    argv = [
        str(trace),
        *chip,
        "--out",
        str(tmp_path / "p"),
        "--kernels",
        str(names),
        "--no-figure",
        "--json",
    ]
    code, said, _ = verb("lab", "power-trace", *argv)
    assert code == 0
    found = json.loads(said)
    assert found["samples"] == 25
    assert [k["name"] for k in found["kernels"]] == ["one", "two", "three", "four"]
    assert found["mean_power_w"] == pytest.approx(found["energy_j"] / found["duration_s"])
    assert found["fault"] is None
    assert sum(found["kernels"][0]["mean_part_w"].values()) == pytest.approx(
        found["kernels"][0]["mean_w"]
    )


def test_a_damaged_trace_fails_after_writing_what_is_good(
    verb, chip: list[str], tmp_path: Path
) -> None:
    trace = tmp_path / "m.log"
    trace.write_text(trace_text(with_ends(KERNELS)) + "broken\n")
    out = tmp_path / "p"
    code, said, complaint = verb(
        "lab", "power-trace", str(trace), *chip, "--out", str(out), "--no-figure", "--no-parquet"
    )
    assert code == 2
    assert said.startswith("25 samples")
    assert "m.log: line 31" in complaint
    assert len((out / "power_trace.log").read_text().splitlines()) == 26


def test_simulator_configuration_beside_the_files_is_used(
    verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path
) -> None:
    (tmp_path / "gpgpusim.config").write_text(
        "-gpgpu_runtime_stat 1000\n-gpgpu_clock_domains 500:1:1:1\n"
        "-power_simulation_enabled 1\n-power_trace_enabled 1\n"
    )
    out = tmp_path / "p"
    argv = [
        str(write_trace(with_ends(KERNELS))),
        *chip,
        "--out",
        str(out),
        "--no-figure",
        "--no-parquet",
        "--json",
    ]
    code, said, notes = verb("lab", "power-trace", *argv)
    assert code == 0
    assert json.loads(said)["duration_s"] == pytest.approx(25 * 1000 / 500e6)
    assert "gpgpusim.config found" in notes
    assert list(out.glob("steady_state*"))
    named = ["--simulator-config", str(tmp_path / "gpgpusim.config"), "--out", str(tmp_path / "q")]
    code, _, notes = verb("lab", "power-trace", *argv, *named)
    assert code == 0
    assert "steady_power_levels_enabled off in gpgpusim.config" in notes
    assert not list((tmp_path / "q").glob("steady_state*"))
    code, said, _ = verb(
        "lab", "power-trace", *argv, "--clock", "1GHz", "--sample-cycles", "500", "--steady", "5:3"
    )
    assert json.loads(said)["duration_s"] == pytest.approx(25 * 500e-9)


def test_clock_steps_and_conversion(
    verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path
) -> None:
    steps = tmp_path / "steps.csv"
    steps.write_text("sample,clock,voltage\n0,1 GHz,1 V\n10,500 MHz,0.8 V\n")
    argv = [
        str(write_trace(with_ends(KERNELS))),
        *chip,
        "--out",
        str(tmp_path / "p"),
        "--no-figure",
        "--no-parquet",
    ]
    code, said, _ = verb(
        "lab",
        "power-trace",
        *argv,
        "--dvfs",
        str(steps),
        "--save-config",
        str(tmp_path / "again.xml"),
        "--json",
    )
    assert code == 0
    assert json.loads(said)["duration_s"] == pytest.approx(10 * 500e-9 + 15 * 1e-6)
    assert read_architecture(tmp_path / "again.xml").parameters == demo_architecture().parameters
    for text, complaint in (
        ("sample,clock\n5,1 GHz\n", "from 0 on"),
        ("sample,clock\n0,fast\n", "line 2: clock"),
        ("sample,clock\n0,0 Hz\n", "above zero"),
        ("time,clock\n0,1 GHz\n", "header"),
        ("sample,clock\n", "rows below a header"),
    ):
        steps.write_text(text)
        code, _, said = verb("lab", "power-trace", *argv, "--dvfs", str(steps))
        assert code == 2
        assert complaint in said


def test_own_components_and_gating(
    verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path
) -> None:
    extra = tmp_path / "ray.yaml"
    extra.write_text("components: [{name: RAYP, terms: {RAY_ACC: 2 nJ}}]\n")
    rows = np.column_stack([sample_rows(4), [100.0, 0.0, 50.0, 10.0]])
    trace = write_trace(rows, [*COLUMNS, "RAY_ACC"])
    argv = [
        str(trace),
        *chip,
        "--out",
        str(tmp_path / "p"),
        "--no-figure",
        "--no-parquet",
        "--json",
    ]
    code, said, _ = verb(
        "lab", "power-trace", *argv, "--components", str(extra), "--gate-idle-sms", "--sms", "8"
    )
    assert code == 0
    parts = json.loads(said)["kernels"][0]["mean_part_w"]
    assert parts["RAYP"] == pytest.approx(40 * 2e-9 / 500e-9)
    assert parts["LEAKAGEP"] < 10.0
    code, _, complaint = verb("lab", "power-trace", *argv)
    assert code == 2
    assert "RAY_ACC" in complaint


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--compat", "accelwattch"], "gpuwattch, as demo.xml is"),
        (["--compat", "mcpat"], "unknown compat"),
        (["--clock", "700"], "quantity in Hz"),
        (["--steady", "8"], "deviation:samples"),
        (["--counters", "perf"], "counter source"),
        (["--counters", "accelwattch-hw", "--sms", "8"], "--clock"),
    ],
)
def test_mistakes_are_one_paragraph(
    verb, chip: list[str], write_trace: TraceMaker, tmp_path: Path, argv: list[str], complaint: str
) -> None:
    code, _, said = verb(
        "lab",
        "power-trace",
        str(write_trace(sample_rows(3))),
        *chip,
        "--out",
        str(tmp_path / "p"),
        *argv,
    )
    assert code == 2
    assert complaint in said
    assert "\n" not in said.strip()


RUNS = "kernel,watts,seconds,part_RFP,part_L2CP\n" + "".join(
    f"app{i % 5}_k{i},{1.4 * (5 + i) + 0.7 * (20 - i)},{0.001 if i else 0.0001},{5 + i},{20 - i}\n"
    for i in range(15)
)


def test_fit_prints_held_out_errors_and_recalibrates(verb, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(RUNS)
    write_architecture(demo_architecture(), tmp_path / "demo.xml")
    argv = [str(table), "--measured", "watts", "--prefix", "part_", "--duration", "seconds"]
    code, said, notes = verb(
        "lab",
        "fit",
        "component",
        *argv,
        *["--architecture", str(tmp_path / "demo.xml"), "--out", str(tmp_path / "new.xml")],
    )
    assert code == 0
    assert "leave one out" in said
    assert "leave one application out" in said
    assert "1 kernels shorter than 0.5 ms dropped: app0_k0" in notes
    assert read_architecture(tmp_path / "new.xml").scaling["REG_RD"] == pytest.approx(1.4, rel=1e-2)
    code, said, _ = verb(
        "lab", "fit", "component", *argv, "--bound", "RFP=1:1", "--bounds", "0.1:10", "--json"
    )
    assert json.loads(said)["values"]["RFP"] == 1.0
    assert set(json.loads(said)["mape"]) >= {
        "in_sample",
        "leave_one_out",
        "leave_application_out",
        "constant",
    }


def test_fit_energies(verb, tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    counts = np.rint(10.0 ** random.uniform(4, 6, (12, 3)))
    watts = counts @ np.array([4e-9, 2.6e-8, 1.6e-8]) / 1e-3
    rows = [
        f"k{i},{w!r},0.001,{c[0]},{c[1]},{c[2]}"
        for i, (w, c) in enumerate(zip(watts.tolist(), counts, strict=True))
    ]
    table = tmp_path / "dram.csv"
    table.write_text("kernel,watts,seconds,MEM_PRE,MEM_RD,MEM_WR\n" + "\n".join(rows) + "\n")
    argv = [str(table), "--measured", "watts", "--duration", "seconds", "--energies", "--json"]
    for name in ("MEM_PRE", "MEM_RD", "MEM_WR"):
        argv += ["--column", name]
    code, said, _ = verb("lab", "fit", "component", *argv)
    assert code == 0
    assert json.loads(said)["values"] == pytest.approx(
        {"MEM_PRE": 4e-9, "MEM_RD": 2.6e-8, "MEM_WR": 1.6e-8}, rel=1e-3
    )


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--measured", "wats"], "closest: watts"),
        (["--measured", "watts", "--bounds", "wide"], "low:high"),
        (["--measured", "watts", "--bound", "RFP"], "NAME=low:high"),
        (["--measured", "watts", "--bounds", "2:0.5"], "lower bound"),
        (["--measured", "watts", "--out", "x.xml"], "both or neither"),
        (["--measured", "watts", "--order", "RFP<L2CP"], "A<=B"),
    ],
)
def test_fit_mistakes_are_one_paragraph(
    verb, tmp_path: Path, argv: list[str], complaint: str
) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(RUNS)
    code, _, said = verb("lab", "fit", "component", str(table), "--prefix", "part_", *argv)
    assert code == 2
    assert complaint in said
