"""Tables of energies: for every GPU of the catalogue, with provenance, and back from YAML."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture

from wattcast import hardware
from wattcast.core.errors import BadInput
from wattcast.lab.gpuwattch.architecture import write_architecture
from wattcast.lab.gpuwattch.bottom_up.chip_design import (
    ChipDesign,
    build_chip,
    chip_area_mm2,
    chip_leakage,
    design_from_gpu,
    known_assumptions,
    list_chip_parts,
)
from wattcast.lab.gpuwattch.bottom_up.event_energies import (
    build_architecture_chip,
    compare_chips,
    counter_energies,
    energies_to_plain,
    make_energy_table,
    module_event_energies,
    pipeline_duty_w,
    scale_design,
)
from wattcast.lab.gpuwattch.bottom_up.technology import (
    BOTTOM_UP_PACKAGE,
    explain_feature,
    find_process,
    find_technology,
    read_feature_nm,
)
from wattcast.lab.gpuwattch.energy_table import format_energy_table, read_energies
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters

# 90 and 20 nm, chiplets of two processes, LPDDR5, or sizes of caches that nobody published: refused with
# the reason
REFUSED = {
    "quadro-fx-5600",
    "mi300x",
    "mi325x",
    "mi355x",
    "jetson-agx-orin",
    "jetson-nano",
    "jetson-orin-nano",
    "jetson-orin-nx",
    "jetson-thor",
    "b300",
    "gb300",
    "h20",
}
REFUSED |= {"rtx-5090", "rtx-pro-6000"}
GPUS = [name for name in hardware.gpu_names() if name not in REFUSED]


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_catalogue(name: str) -> None:
    gpu = hardware.load_gpu(name)
    found = build_chip(design_from_gpu(gpu))
    assert all(joule > 0.0 for joule in module_event_energies(found, gpu).values())
    for counter, joule in counter_energies(found).items():
        if counter not in ("MEM_PRE", "MEM_RD", "MEM_WR"):
            assert 1e-14 < joule < 1e-8, counter
    assert 20.0 < chip_area_mm2(found) < 2000.0
    assert 0.0 < chip_leakage(found).cores_w < 300.0
    assert "docs/method/component-energies.md" in found.provenance
    assert any("SRAM cell" in note for note in found.design.notes)


def test_newer_processes_cost_less_per_flop() -> None:
    gpus = [hardware.load_gpu(name) for name in ("v100-sxm", "h200")]
    old, new = (
        module_event_energies(build_chip(design_from_gpu(gpu)), gpu)["cuda_fp32_flop"]
        for gpu in gpus
    )
    assert new < old


@pytest.mark.parametrize("dialect", list(SimulatorDialect))
def test_a_table_names_the_counters_of_its_dialect(
    dialect: SimulatorDialect, tmp_path: Path
) -> None:
    table = make_energy_table(build_architecture_chip(demo_architecture()), dialect)
    constants = {"PIPE_A", "IDLE_CORE_N", "CONST_DYNAMICN", "constant_power"}
    assert set(table.energy_j) == {c.column for c in dialect_counters(dialect)} - constants
    path = tmp_path / "table.yaml"
    path.write_bytes(format_energy_table(table))
    again = read_energies(path)
    assert again.energy_j == pytest.approx(table.energy_j)
    assert again.duty_w == pytest.approx(table.duty_w)
    if (
        dialect is SimulatorDialect.ACCELWATTCH
    ):  # its static, idle and constant power hold the leakage
        assert again.leakage is None
        return
    assert again.leakage is not None
    leakage = chip_leakage(build_architecture_chip(demo_architecture()))
    assert again.leakage.cores_w == pytest.approx(leakage.cores_w)
    assert "bottom-up" in again.source


def test_parts_add_up(demo: ChipDesign) -> None:
    chip = build_chip(demo)
    found = energies_to_plain(build_architecture_chip(demo_architecture()))
    whole = sum(part.count * part.leakage_w for part in list_chip_parts(chip))
    assert chip_leakage(chip).cores_w + chip_leakage(chip).rest_w == pytest.approx(whole)
    assert found["leakage_w"] == pytest.approx(whole)
    assert found["area_mm2"] == pytest.approx(chip_area_mm2(chip))
    assert all(row["from"] for row in found["counters"])


def test_unified_and_separate_pipelines_differ(demo: ChipDesign) -> None:
    separate = counter_energies(build_chip(demo))
    unified = counter_energies(
        build_chip(replace(demo, registers=replace(demo.registers, read_share=0.55)))
    )
    assert unified["REG_RD"] > separate["REG_RD"]


def test_pipelines_follow_clock_and_sms(demo: ChipDesign) -> None:
    whole = pipeline_duty_w(build_chip(demo))
    assert pipeline_duty_w(build_chip(replace(demo, clock_hz=2 * demo.clock_hz))) == pytest.approx(
        2 * whole
    )
    assert pipeline_duty_w(build_chip(replace(demo, sm_count=2 * demo.sm_count))) == pytest.approx(
        2 * whole
    )


@pytest.mark.parametrize(
    ("knob", "moved"),
    [
        (
            "registers",
            {"REG_RD", "REG_WR", "pipelines"},
        ),  # their addresses are a bit wider in the latches
        ("l1", {"DC_RH", "DC_RM", "DC_WH", "DC_WM"}),
        ("shared", {"SHRD_ACC"}),
        ("l2", {"L2_RH", "L2_RM", "L2_WH", "L2_WM"}),
        ("sms", {"NOC_A", "pipelines"}),
    ],
)
def test_a_change_moves_what_it_should_and_nothing_else(
    demo: ChipDesign, knob: str, moved: set[str]
) -> None:
    changes = compare_chips(build_chip(demo), build_chip(scale_design(demo, {knob: 2.0})))
    up = {change.name for change in changes if change.ratio > 1.0}
    assert up == moved | {"leakage", "area"}
    assert not [change for change in changes if change.ratio < 1.0]


def test_every_number_has_a_source() -> None:
    import csv
    from importlib.resources import files

    for assumption in known_assumptions().values():
        assert len(assumption.source) > 5
    for name in ("devices", "wires", "nodes", "processes", "units", "dram", "dies"):
        text = files(BOTTOM_UP_PACKAGE).joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
        rows = list(csv.DictReader(text.splitlines()))
        assert rows
        assert all(row["source"] for row in rows), name


def test_a_node_between_rows_lies_between_them() -> None:
    coarse, middle, fine = (find_technology(node) for node in (45.0, 40.0, 32.0))
    assert fine.nominal_v < middle.nominal_v < coarse.nominal_v
    assert fine.gate_f_per_um != middle.gate_f_per_um
    assert "2010" in middle.source
    assert "2013" in middle.source


def test_a_process_is_named_and_a_number_is_a_feature_size() -> None:
    """``core_tech_node=12`` is TSMC's 5 nm class and not its 12 nm: 2.3 times off, silently."""
    assert read_feature_nm("TSMC 12 nm FFN", "node") == find_process("TSMC 12 nm FFN")[0] == 21.9
    assert read_feature_nm("tsmc 4n", "node") == find_process("TSMC 4N")[0]
    assert read_feature_nm("28nm", "node") == pytest.approx(28.0)
    with pytest.raises(BadInput, match="TSMC 7 nm N7"):
        read_feature_nm("Intel 4", "node")
    assert "TSMC 12 nm FFN" in explain_feature(12.0)
    assert "TSMC 16 nm FinFET" in explain_feature(16.0)
    assert explain_feature(21.9) == explain_feature(40.0) == explain_feature(45.0) == ""
    with pytest.raises(BadInput, match="name the process"):
        find_technology(7.0)


def test_an_architecture_file_may_name_its_process(call, tmp_path: Path) -> None:
    """The name gives the energies of its feature size; the bare number is warned of."""
    path = tmp_path / "demo.xml"
    write_architecture(demo_architecture(), path)
    text = path.read_text()
    for value, warned in (("TSMC 12 nm FFN", False), ("21.9", False), ("12", True)):
        path.write_text(re.sub(r'(name="core_tech_node" value=)"[^"]*"', rf'\1"{value}"', text))
        done = call("gpus", "show", str(path), "--energies", "--json")
        assert done.code == 0
        assert ("not as TSMC 12 nm FFN" in done.err) == warned
        size_nm = json.loads(done.out)["feature_nm"]
        assert size_nm == (12.0 if warned else 21.9)


def test_energies_of_a_gpu_are_written_in_the_dialect_asked_for(call, tmp_path: Path) -> None:
    """``--save`` wrote GPUWattch's counters alone, which no AccelWattch file takes."""
    for dialect, counter in (("gpuwattch", "SP_ACC"), ("accelwattch", "TENSOR_ACC")):
        path = tmp_path / f"{dialect}.yaml"
        argv = ["--energies", "--dialect", dialect, "--save", str(path)]
        assert call("gpus", "show", "v100", *argv).code == 0
        assert counter in read_energies(path).energy_j
    wrong = call("gpus", "show", "v100", "--energies", "--dialect", "mcpat")
    assert (wrong.code, "accelwattch" in wrong.err) == (2, True)
