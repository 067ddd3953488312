"""Impossible chips and nodes off the table are refused, with what was wanted and found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture

from wattcast import hardware
from wattcast.core.errors import BadInput, MissingSpecification, UnknownName, WattcastError
from wattcast.lab.gpuwattch.bottom_up.bank_costs import ArrayPorts
from wattcast.lab.gpuwattch.bottom_up.chip_design import ChipDesign, build_chip, design_from_gpu
from wattcast.lab.gpuwattch.bottom_up.chip_units import RouterShape, crossbar_cost
from wattcast.lab.gpuwattch.bottom_up.event_energies import build_architecture_chip, scale_design
from wattcast.lab.gpuwattch.bottom_up.memory_array import SramArray
from wattcast.lab.gpuwattch.bottom_up.searched_buffers import SearchedBuffer
from wattcast.lab.gpuwattch.bottom_up.technology import find_process, find_technology


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"banks": 3}, "divide"),
        ({"ways": 3}, "divide"),
        ({"banks": 0}, "banks"),
        ({"capacity_byte": 0}, "capacity"),
        ({"block_byte": -4}, "block"),
        ({"ports": ArrayPorts(0, 0, 0)}, "ports"),
        ({"ports": ArrayPorts(0, 0, 1)}, "read"),
        ({"output_bit": 0}, "output"),
    ],
)
def test_arrays(fields: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        SramArray(**({"name": "cache", "capacity_byte": 16384, "block_byte": 32} | fields))


def test_ports() -> None:
    with pytest.raises(BadInput, match="zero or more of each kind"):
        ArrayPorts(2, -1, 0)


def test_buffers_crossbars_and_routers() -> None:
    with pytest.raises(BadInput, match="entries"):
        SearchedBuffer("buffer", 0, 32, 64)
    with pytest.raises(BadInput, match="search ports"):
        SearchedBuffer("buffer", 16, 32, 64, ArrayPorts(1, 0, 0, 0))
    with pytest.raises(BadInput, match="inputs"):
        crossbar_cost(find_technology(40.0), 0, 4, 32)
    with pytest.raises(BadInput, match="outputs"):
        RouterShape(32, 6, 0)


@pytest.mark.parametrize("node", [90.0, 66.0, 11.0, 3.0, 0.0, -5.0])
def test_nodes_outside_the_table(node: float) -> None:
    with pytest.raises(BadInput, match=r"11\.99 to 65 nm"):
        find_technology(node)


def test_voltage_and_temperature_outside_the_table() -> None:
    with pytest.raises(BadInput, match="voltage"):
        find_technology(40.0, voltage_v=3.3)
    with pytest.raises(BadInput, match="300 to 400 K"):
        find_technology(40.0, temperature_k=450.0)


def test_processes() -> None:
    with pytest.raises(UnknownName, match="TSMC"):
        find_process("TSMC 4")
    with pytest.raises(MissingSpecification, match="node inside the table"):
        design_from_gpu(hardware.load_gpu("quadro-fx-5600"))
    assert design_from_gpu(hardware.load_gpu("quadro-fx-5600"), feature_nm=65.0).feature_nm == 65.0


def test_chips(demo: ChipDesign) -> None:
    with pytest.raises(BadInput, match="register file"):
        replace(demo, registers=replace(demo.registers, banks=7))
    with pytest.raises(BadInput, match="sm_count"):
        replace(demo, sm_count=0)
    with pytest.raises(BadInput, match="divide"):
        build_chip(replace(demo, data=replace(demo.data, banks=3)))


BAD = [
    ("architecture", 3.0, "one of 1, 2"),
    ("device_type", 5.0, "one of 0, 1, 2"),
    ("interconnect_projection_type", 2.0, "one of 0, 1"),
    ("core_tech_node", 90.0, "65 nm"),
    ("core_tech_node", 3.0, "65 nm"),
    ("rf_banks", 0.0, "register file|rf_banks"),
    ("memory_ports", 0.0, "ports"),
    ("dcache_config", (16384, -1, 4, 1, 1, 3, 8, 0), "block"),
    ("dcache_config", (16384, 32, 4, 3, 1, 3, 8, 0), "divide"),
    ("L2_config", (64, 128, 8, 1, 4, 20, 64, 1), "set"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_architecture_files(name: str, value: float | tuple[int, ...], said: str) -> None:
    good = demo_architecture()
    with pytest.raises(WattcastError, match=said):
        build_architecture_chip(replace(good, parameters={**good.parameters, name: value}))


def test_changes(demo: ChipDesign) -> None:
    with pytest.raises(UnknownName, match="part to change"):
        scale_design(demo, {"register": 2.0})
    with pytest.raises(BadInput, match="above zero"):
        scale_design(demo, {"l2": 0.0})
    with pytest.raises(BadInput, match="whole number"):
        scale_design(demo, {"sms": 0.3})
    with pytest.raises(BadInput, match="none"):
        scale_design(replace(demo, l2=None, l2_count=0), {"l2": 2.0})
