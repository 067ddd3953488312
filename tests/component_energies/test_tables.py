"""Tables of energies: for every GPU of the catalogue, with provenance, and back from YAML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wattcast import hardware
from wattcast.activity.simulated import Dialect, counters
from wattcast.power.component.bottom_up.catalogue import assumptions
from wattcast.power.component.bottom_up.chip import build_chip
from wattcast.power.component.bottom_up.design import Design, changed
from wattcast.power.component.bottom_up.events import duty_w, energies
from wattcast.power.component.bottom_up.parts import area_mm2, leakage, parts
from wattcast.power.component.bottom_up.table import energy_table, of_architecture, of_gpu, plain
from wattcast.power.component.bottom_up.technology import PACKAGE, technology
from wattcast.power.component.bottom_up.what_if import compare, with_changes
from wattcast.power.component.demo import demo_architecture
from wattcast.power.component.energies import read_energies, to_yaml

GPUS = [name for name in hardware.names() if name != "quadro-fx-5600"]  # 90 nm: refused


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_catalogue(name: str) -> None:
    found = of_gpu(hardware.load(name))
    assert all(joule > 0.0 for joule in found.modules.values())
    for counter, joule in energies(found.chip).items():
        if counter not in ("MEM_PRE", "MEM_RD", "MEM_WR"):
            assert 1e-14 < joule < 1e-8, counter
    assert 20.0 < area_mm2(found.chip) < 2000.0
    assert 0.0 < leakage(found.chip).cores_w < 300.0
    assert "docs/method/component-energies.md" in found.provenance
    assert any("SRAM cell" in note for note in found.design.notes)


def test_newer_processes_cost_less_per_flop() -> None:
    old, new = (of_gpu(hardware.load(name)).modules["cuda_fp32_flop"] for name in ("v100-sxm", "h200"))
    assert new < old


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_table_names_the_counters_of_its_dialect(dialect: Dialect, tmp_path: Path) -> None:
    table = energy_table(of_architecture(demo_architecture()), dialect)
    constants = {"PIPE_A", "IDLE_CORE_N", "CONST_DYNAMICN", "constant_power"}
    assert set(table.energy_j) == {c.column for c in counters(dialect)} - constants
    path = tmp_path / "table.yaml"
    path.write_bytes(to_yaml(table))
    again = read_energies(path)
    assert again.energy_j == pytest.approx(table.energy_j)
    assert again.duty_w == pytest.approx(table.duty_w)
    assert again.leakage is not None
    assert again.leakage.cores_w == pytest.approx(leakage(of_architecture(demo_architecture()).chip).cores_w)
    assert "bottom-up" in again.source


def test_parts_add_up(demo: Design) -> None:
    chip = build_chip(demo)
    found = plain(of_architecture(demo_architecture()))
    whole = sum(part.count * part.leakage_w for part in parts(chip))
    assert leakage(chip).cores_w + leakage(chip).rest_w == pytest.approx(whole)
    assert found["leakage_w"] == pytest.approx(whole)
    assert found["area_mm2"] == pytest.approx(area_mm2(chip))
    assert all(row["from"] for row in found["counters"])


def test_unified_and_separate_pipelines_differ(demo: Design) -> None:
    separate = energies(build_chip(demo))
    unified = energies(build_chip(changed(demo, registers=replace(demo.registers, read_share=0.55))))
    assert unified["REG_RD"] > separate["REG_RD"]


def test_pipelines_follow_clock_and_sms(demo: Design) -> None:
    whole = duty_w(build_chip(demo))
    assert duty_w(build_chip(changed(demo, clock_hz=2 * demo.clock_hz))) == pytest.approx(2 * whole)
    assert duty_w(build_chip(changed(demo, sm_count=2 * demo.sm_count))) == pytest.approx(2 * whole)


@pytest.mark.parametrize(
    ("knob", "moved"),
    [
        ("registers", {"REG_RD", "REG_WR", "pipelines"}),  # their addresses are a bit wider in the latches
        ("l1", {"DC_RH", "DC_RM", "DC_WH", "DC_WM"}),
        ("shared", {"SHRD_ACC"}),
        ("l2", {"L2_RH", "L2_RM", "L2_WH", "L2_WM"}),
        ("sms", {"NOC_A", "pipelines"}),
    ],
)
def test_a_change_moves_what_it_should_and_nothing_else(demo: Design, knob: str, moved: set[str]) -> None:
    changes = compare(build_chip(demo), build_chip(with_changes(demo, {knob: 2.0})))
    up = {change.name for change in changes if change.ratio > 1.0}
    assert up == moved | {"leakage", "area"}
    assert not [change for change in changes if change.ratio < 1.0]


def test_every_number_has_a_source() -> None:
    import csv
    from importlib.resources import files

    for assumption in assumptions().values():
        assert len(assumption.source) > 5
    for name in ("devices", "wires", "nodes", "processes", "units", "dram", "dies"):
        text = files(PACKAGE).joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
        rows = list(csv.DictReader(text.splitlines()))
        assert rows
        assert all(row["source"] for row in rows), name


def test_a_node_between_rows_lies_between_them() -> None:
    coarse, middle, fine = (technology(node) for node in (45.0, 40.0, 32.0))
    assert fine.nominal_v < middle.nominal_v < coarse.nominal_v
    assert fine.gate_f_per_um != middle.gate_f_per_um
    assert "2010" in middle.source
    assert "2013" in middle.source
