"""What is taken of cards and systems where nobody published it, beside what others published."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from wattcast.calibrate.kernel_rows import read_plain_rows
from wattcast.hardware import DEFAULT_TEMPERATURE_C
from wattcast.hardware.node_systems import load_system, parse_system, system_names

SYSTEMS = Path(__file__).resolve().parents[2] / "src/wattcast/hardware/systems"
TRAYS = 18  # of an NVL72


def test_an_unstated_temperature_is_that_of_a_card_in_light_use() -> None:
    """Bursts of a few milliseconds on an H200, with pauses between them."""
    rows = read_plain_rows("h200")
    temperatures_c = [row["temperature_c"] for row in rows if row["kind"] == "burst"]
    known_c = [value for value in temperatures_c if value is not None]
    coolest_c, warmest_c = np.percentile(known_c, [5, 95])
    assert coolest_c < DEFAULT_TEMPERATURE_C < warmest_c


def test_systems_that_do_not_say_it_let_in_air_as_warm_as_one_that_does() -> None:
    published_c = load_system("dgx-h100").inlet_limit_c
    for name in system_names():
        assert load_system(name).inlet_limit_c == published_c


def test_a_rack_without_a_list_of_parts_has_the_middle_of_what_can_be_ordered() -> None:
    """One or two data processing units a tray, and none to eight drives."""
    rack = load_system("gb200-nvl72")
    assert abs(rack.dpu_count / (1.5 * TRAYS) - 1.0) < 0.2
    assert abs(rack.drive_count / (4.0 * TRAYS) - 1.0) < 0.2


def test_shelves_of_a_rack_carry_it_when_every_second_one_fails() -> None:
    """Power shelves are there twice, and not much more than that."""
    rack = load_system("gb200-nvl72")
    times = rack.supply_count * rack.supply_rating_w / rack.wall_limit_w
    assert 1.7 < times < 2.6


def test_a_server_without_a_list_of_drives_has_as_many_as_others() -> None:
    text = (SYSTEMS / "mi300x-xe9680.yaml").read_text(encoding="utf-8")
    unknown = re.sub(r"^drive_count: .*$", 'drive_count: {unknown: "by order"}', text, flags=re.M)
    server = parse_system(unknown.encode(), "mi300x-xe9680", "a file")
    others = [load_system(name) for name in system_names()]
    published = [other.drive_count for other in others if other.gpu_count == 8]
    assert min(published) <= server.drive_count <= max(published)
