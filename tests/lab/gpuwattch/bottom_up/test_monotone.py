"""What physics says must rise, rises: energies, leakage and area with size, ports, node, voltage,
temperature.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from wattcast.lab.gpuwattch.bottom_up.bank_costs import ArrayPorts, bank_cost
from wattcast.lab.gpuwattch.bottom_up.chip_units import (
    RouterShape,
    crossbar_cost,
    functional_unit_cost,
    router_cost,
)
from wattcast.lab.gpuwattch.bottom_up.memory_array import (
    ArrayCost,
    SramArray,
    list_partitions,
    sram_cost,
)
from wattcast.lab.gpuwattch.bottom_up.searched_buffers import SearchedBuffer, searched_buffer_cost
from wattcast.lab.gpuwattch.bottom_up.technology import TransistorType, find_technology, to_float

NODES = (65.0, 45.0, 32.0, 22.0, 13.6, 11.99)  # the rows of the table
ENERGIES = ("read_j", "write_j")
STANDING = ("subthreshold_w", "gate_w", "area_um2")
arrays = st.builds(
    lambda node, block, ways, banks, sets, tag: (
        node,
        SramArray("array", block * ways * banks * sets, block, ways, banks, tag_bit=tag),
    ),
    st.sampled_from(NODES),
    st.sampled_from((4, 8, 16, 32, 64, 128)),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((16, 32, 64, 128, 256, 512)),
    st.sampled_from((0, 24)),
)
few = settings(max_examples=20, deadline=None)


def rises(less: ArrayCost, more: ArrayCost, names: tuple[str, ...], least: float = 1.0) -> None:
    for name in names:
        assert getattr(more, name) >= least * getattr(less, name), name


@given(arrays)
@few
def test_twice_the_capacity(case: tuple[float, SramArray]) -> None:
    tech, sram = find_technology(case[0]), case[1]
    twice = replace(sram, capacity_byte=2 * sram.capacity_byte)
    rises(sram_cost(tech, sram), sram_cost(tech, twice), ENERGIES + STANDING)


@given(arrays)
@few
def test_twice_the_width(case: tuple[float, SramArray]) -> None:
    tech, sram = find_technology(case[0]), case[1]
    wide = replace(sram, block_byte=2 * sram.block_byte, capacity_byte=2 * sram.capacity_byte)
    rises(sram_cost(tech, sram), sram_cost(tech, wide), ENERGIES + STANDING)


@given(arrays, st.sampled_from((ArrayPorts(1, 1, 0), ArrayPorts(1, 0, 1), ArrayPorts(2, 0, 0))))
@few
def test_further_ports(case: tuple[float, SramArray], ports: ArrayPorts) -> None:
    tech, sram = find_technology(case[0]), case[1]
    rises(sram_cost(tech, sram), sram_cost(tech, replace(sram, ports=ports)), ENERGIES + STANDING)


@given(arrays, st.integers(0, len(NODES) - 2))
@few
def test_a_coarser_node(case: tuple[float, SramArray], place: int) -> None:
    coarse, fine = (sram_cost(find_technology(NODES[place + i]), case[1]) for i in (0, 1))
    rises(fine, coarse, (*ENERGIES, "area_um2"))


@given(arrays, st.floats(0.6, 1.2), st.floats(1.01, 1.2))
@few
def test_voltage(case: tuple[float, SramArray], relative: float, more: float) -> None:
    node, sram = case
    nominal = find_technology(node).nominal_v
    low, high = (
        sram_cost(find_technology(node, voltage_v=nominal * r), sram)
        for r in (relative, relative * more)
    )
    rises(low, high, ENERGIES, least=more)  # more than in proportion: part of it goes as V²
    rises(low, high, ("subthreshold_w", "gate_w"))
    assert high.area_um2 == low.area_um2


@given(arrays, st.floats(300.0, 380.0))
@few
def test_temperature_leaks_and_moves_no_energy(
    case: tuple[float, SramArray], kelvin: float
) -> None:
    node, sram = case
    cool, warm = (
        sram_cost(find_technology(node, temperature_k=k), sram) for k in (kelvin, kelvin + 20.0)
    )
    assert warm.subthreshold_w > cool.subthreshold_w
    assert (warm.read_j, warm.write_j, warm.area_um2) == (cool.read_j, cool.write_j, cool.area_um2)


@given(
    st.sampled_from((4, 16, 64, 256)), st.sampled_from((64, 256, 1024)), st.sampled_from(NODES[:-1])
)
@few
def test_every_partition_costs_more_with_ports_voltage_and_node(
    rows: int, columns: int, node: float
) -> None:
    part = list_partitions(8 * rows, columns, 1, columns)
    bits = np.log2(8.0 * rows) * np.ones_like(part.row)
    finer = NODES[NODES.index(node) + 1]

    def read_j(feature_nm: float, ports: ArrayPorts, share: float) -> np.ndarray:
        volts = share * find_technology(feature_nm).nominal_v
        return bank_cost(
            find_technology(feature_nm, voltage_v=volts), ports, part, bits, columns, columns
        ).read_j

    plain = read_j(node, ArrayPorts(1), 1.0)
    assert (read_j(node, ArrayPorts(1, 1), 1.0) > plain).all()
    assert (read_j(node, ArrayPorts(1), 1.1) > plain).all()
    assert (read_j(finer, ArrayPorts(1), 1.0) < plain).all()


@given(st.integers(2, 32), st.integers(2, 32), st.sampled_from((8, 32, 128)))
@few
def test_crossbars_and_routers(inputs: int, outputs: int, bits: int) -> None:
    tech = find_technology(40.0)
    less = crossbar_cost(tech, inputs, outputs, bits)
    for more in (
        crossbar_cost(tech, 2 * inputs, outputs, bits),
        crossbar_cost(tech, inputs, 2 * outputs, bits),
        crossbar_cost(tech, inputs, outputs, 2 * bits),
    ):
        assert more.energy_j > less.energy_j
        assert more.area_um2 > less.area_um2
        assert more.subthreshold_w > less.subthreshold_w
    small, large = (
        sum(b.energy_j for b in router_cost(tech, RouterShape(bits, n, outputs)))
        for n in (inputs, 2 * inputs)
    )
    assert large > small


@given(st.sampled_from((8, 16, 32)), st.sampled_from((16, 40, 64)), st.sampled_from((32, 256)))
@few
def test_buffers_that_are_searched(entries: int, tag: int, data: int) -> None:
    tech = find_technology(32.0)
    less = searched_buffer_cost(tech, SearchedBuffer("buffer", entries, tag, data))
    for more in (
        SearchedBuffer("buffer", 2 * entries, tag, data),
        SearchedBuffer("buffer", entries, 2 * tag, data),
    ):
        found = searched_buffer_cost(tech, more)
        assert found.search_j > less.search_j
        assert found.area_um2 > less.area_um2
        assert found.subthreshold_w > less.subthreshold_w


def test_units_and_wires_shrink_with_the_node() -> None:
    for unit in ("alu", "fpu", "sfu"):
        costs = [functional_unit_cost(find_technology(node), unit) for node in NODES]
        assert all(a.energy_j > b.energy_j for a, b in pairwise(costs)), unit
        assert all(a.area_um2 > b.area_um2 for a, b in pairwise(costs)), unit
    wires = [
        to_float(find_technology(node).repeated_wire().cost(1000.0).energy_j) for node in NODES[:4]
    ]
    assert all(a > b for a, b in pairwise(wires))


def test_device_types_trade_leakage_for_speed() -> None:
    fast, low = (
        find_technology(32.0, device)
        for device in (TransistorType.HIGH_PERFORMANCE, TransistorType.LOW_STANDBY)
    )
    assert low.off_a_per_um < 0.01 * fast.off_a_per_um
    sram = SramArray("array", 16384, 32)
    assert sram_cost(low, sram).subthreshold_w < 0.02 * sram_cost(fast, sram).subthreshold_w
    assert sram_cost(low, sram).delay_s > sram_cost(fast, sram).delay_s
