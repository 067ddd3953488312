"""A server draws more than its GPUs: host, boards, fans and supplies, as an interval."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from wattcast.coefficients import coefficient_files
from wattcast.core import BadInput
from wattcast.core.errors import UnknownName
from wattcast.hardware.catalogue_reader import gpu_names, load_node
from wattcast.hardware.node_systems import (
    NodeSystem,
    find_system,
    load_supply_classes,
    load_system,
    parse_system,
    system_names,
)
from wattcast.timeseries.node_power import (
    NODE,
    PARTS,
    _class_loss_w,
    node_parts_w,
    tabulate_node,
    wall_power_w,
)
from wattcast.timeseries.node_report import describe_node

ALL_WORK = np.ones(())
SYSTEMS = [load_system(name) for name in system_names()]
LIMITED_SYSTEMS = [system for system in SYSTEMS if system.wall_limit_w is not None]


def draw_w(system: NodeSystem, each_w: float, level: float, **options: float) -> float:
    gpus_w = np.array(system.gpu_count * each_w)
    return float(wall_power_w(system, gpus_w, ALL_WORK, level=level, **options))


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_each_value_has_a_source_or_a_reason(system: NodeSystem) -> None:
    keys = {*system.claims, *system.unknown}
    assert {"gpu_count", "wall_limit", "cpu_count", "supply_rating", "supply_class"} <= keys
    assert not set(system.claims) & set(system.unknown)
    assert all(claim.source for claim in system.claims.values())
    assert set(system.gpus) <= set(gpu_names())
    assert load_node(system.node).gpu_count == system.gpu_count


def test_the_interval_holds_the_measured_node() -> None:
    """Latif et al. (arXiv:2412.08602) measured at most 8.4 kW of a node with eight H100, which
    trained with its GPUs "near full utilization".

    The draw of the GPUs is not given: 640 to 700 W each are taken.
    """
    system = load_system("dgx-h100")
    assert draw_w(system, 640.0, 0.0) < 8400.0 < draw_w(system, 700.0, 1.0)


def test_processors_follow_the_share_of_gpus_that_work() -> None:
    system = load_system("dgx-h100")
    idle, half, busy = node_parts_w(system, np.full(3, 3000.0), np.array([0.0, 0.5, 1.0]))[
        "processors"
    ]
    assert idle == pytest.approx(2 * 350.0 * 0.3)
    assert busy == pytest.approx(2 * 350.0 * 0.625)
    assert half == pytest.approx((idle + busy) / 2)


@pytest.mark.parametrize("system", LIMITED_SYSTEMS, ids=lambda system: system.name)
def test_the_full_node_stays_below_its_published_limit(system: NodeSystem) -> None:
    assert system.wall_limit_w is not None
    gpu_limit_w = describe_node(system).gpu_w
    most_w = draw_w(system, gpu_limit_w, 1.0, inlet_c=system.inlet_limit_c)
    assert 0.75 * system.wall_limit_w < most_w <= system.wall_limit_w


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_power_grows_with_gpus_and_level(system: NodeSystem) -> None:
    gpus_w = np.linspace(0.0, 1.2 * system.gpu_count * describe_node(system).gpu_w, 500)
    by_level = [
        wall_power_w(system, gpus_w, np.ones_like(gpus_w), level=level) for level in (0.0, 0.5, 1.0)
    ]
    for watts in by_level:
        assert (np.diff(watts) > 0).all()
        assert (watts > gpus_w).all()
    assert (by_level[0] < by_level[1]).all()
    assert (by_level[1] < by_level[2]).all()


def test_fans_follow_heat_and_inlet_temperature() -> None:
    system = load_system("dgx-h100")
    gpus_w = np.array([0.0, 2800.0, 5600.0])

    def fans(inlet_c: float) -> np.ndarray:
        return node_parts_w(system, gpus_w, np.ones(3), inlet_c)["fans"]

    at_rest, middle, full = fans(30.0)
    assert full == pytest.approx(0.10 * (5600.0 + 1596.0), rel=0.01)  # full speed, warmest air
    assert at_rest == pytest.approx(full * 0.3**3, rel=1e-9)
    assert at_rest < middle < full
    # affinity law: the flow goes as 1 / (T_out - T_in), the power as its cube
    cooler = fans(20.0)[2]
    assert cooler == pytest.approx(full * (25.0 / 35.0) ** 3, rel=1e-6)
    assert fans(NODE.inlet_c)[2] == pytest.approx(full * (25.0 / 31.0) ** 3, rel=1e-6)


def test_supplies_lose_what_their_class_allows() -> None:
    titanium = load_supply_classes()["titanium"]
    rating_w = 10_000.0
    for load, efficiency in ((0.1, 0.90), (0.2, 0.94), (0.5, 0.96), (1.0, 0.91)):
        output_w = np.array(load * rating_w)
        input_w = output_w + _class_loss_w(titanium, output_w, rating_w)
        assert float(output_w / input_w) == pytest.approx(efficiency, rel=1e-12)
    without_load = _class_loss_w(titanium, np.array(0.0), rating_w)
    assert float(without_load) == pytest.approx(0.5 * 1000.0 * (1 / 0.9 - 1))


def test_a_mesh_needs_no_switches() -> None:
    mesh = node_parts_w(load_system("mi300x-xe9680"), np.array(4000.0), ALL_WORK)["boards"]
    switched = node_parts_w(load_system("dgx-h100"), np.array(4000.0), ALL_WORK)["boards"]
    assert float(switched - mesh) == pytest.approx(8 * 42.5)


COEFFICIENT_PARTS = {
    "dimm_idle": ("memory", "dgx-h100"),
    "dimm_busy": ("memory", "dgx-h100"),
    "nic": ("network", "dgx-h100"),
    "dpu": ("network", "dgx-h100"),
    "drive": ("drives", "dgx-h100"),
    "board_per_gpu": ("boards", "dgx-h100"),
    "fan_share_liquid": ("fans", "gb200-nvl72"),
}


@pytest.mark.parametrize(("name", "place"), COEFFICIENT_PARTS.items())
def test_parts_grow_with_their_coefficients(name: str, place: tuple[str, str]) -> None:
    """Watts of each part in the middle, half of its GPUs at work, as the entries say."""
    part, system_name = place
    expected_w = {
        "memory": 32 * 0.5 * (3.0 + 7.0),
        "network": 8 * 20.5 + 2 * 57.5,
        "drives": 10 * 9.5,
        "boards": 8 * (27.5 + 42.5),
    }
    system = load_system(system_name)
    arguments = (system, np.array(0.5e3 * system.gpu_count), np.full((), 0.5))
    now_w = float(node_parts_w(*arguments)[part])
    if part in expected_w:
        assert now_w == pytest.approx(expected_w[part])
    else:
        # the cube of the flow, which is what half of the heat of 103 kW needs
        assert now_w == pytest.approx(0.0175 * 103e3 * 0.39**3, rel=0.1)
    with coefficient_files.change_coefficient(f"node_power.{name}", 1.33):
        assert float(node_parts_w(*arguments)[part]) > 1.05 * now_w


def test_a_table_of_a_node_is_the_node() -> None:
    for system in SYSTEMS:
        curve = tabulate_node(system)
        gpus_w = np.linspace(100.0, 6000.0, 97)
        share = np.linspace(0.0, 1.0, 97)
        exact_w = wall_power_w(system, gpus_w, share)
        np.testing.assert_allclose(gpus_w + curve.added_w(gpus_w, share), exact_w, rtol=3e-3)


def test_parts_and_their_sum(call) -> None:
    drawn = describe_node(load_system("dgx-b200"), 900.0, 27.0)
    assert set(drawn.part_w) == set(PARTS)
    done = call("gpus", "systems", "--system", "dgx-b200", "--gpu-power", "900W", "--inlet", "27C")
    assert done.code == 0, done.err
    assert "supply class: the guide names no" in done.out
    listed = call("gpus", "systems", "--json")
    assert [node["name"] for node in json.loads(listed.out)["systems"]] == system_names()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--system", "dgx-h1000"], "Closest: dgx-h100"),
        (["--system", "dgx-h100", "--inlet", "45C"], "air of -20 to 30"),
        (["--system", "dgx-h100", "--gpu-power", "5kW"], "about the limit of a h100-sxm"),
        (["--system", "absent.yaml"], "cannot be read"),
    ],
)
def test_wrong_input_gets_one_sentence(call, argv: list[str], sentence: str) -> None:
    done = call("gpus", "systems", *argv)
    assert done.code == 2
    assert sentence in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_file_of_yours(tmp_path: Path) -> None:
    shipped = Path(coefficient_files.FOLDER).parent / "hardware" / "systems" / "dgx-h100.yaml"
    text = shipped.read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("value: 32, source", "value: 16, source"), encoding="utf-8")
    mine = find_system("mine.yaml", tmp_path)
    assert (mine.name, mine.dimm_count) == ("mine", 16)
    start = text.index("supply_class:")
    end = text.index("inlet_limit:")
    misspelt = f"{text[:start]}supply_class: {{value: titanum, source: guide}}\n{text[end:]}"
    with pytest.raises(UnknownName, match="Closest: titanium"):
        parse_system(misspelt.encode(), "x", "x.yaml")
    with pytest.raises(BadInput, match=r"x.yaml: supply_count: expected a whole number, 1"):
        parse_system(
            text.replace("supply_count: {value: 6", "supply_count: {value: -6").encode(),
            "x",
            "x.yaml",
        )
