"""Bottom-up energies beside those dumped from McPAT, its leakage and area, and those fitted to a
measured GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast.lab.gpuwattch.architecture import read_architecture
from wattcast.lab.gpuwattch.bottom_up.event_energies import (
    EnergyRatio,
    build_architecture_chip,
    fitted_ratios,
    make_energy_rows,
)
from wattcast.lab.validate.public_checks.dumped_energies import (
    DUMPED_FILES,
    class_medians,
    dumped_ratios,
    leakage_area_ratios,
    rank_correlation,
)


@pytest.fixture(scope="module")
def dumped(reference: Path) -> list[EnergyRatio]:
    return dumped_ratios(reference)


def test_every_counter_of_every_file_has_a_ratio(dumped: list[EnergyRatio]) -> None:
    for name, count in zip(DUMPED_FILES, (30, 24, 30, 32), strict=True):
        assert sum(r.where == name for r in dumped) == count, name
    assert len({(r.where, r.name) for r in dumped}) == len(dumped)


def test_medians_of_component_classes(dumped: list[EnergyRatio]) -> None:
    for group, median in class_medians(dumped).items():
        assert 1 / 1.5 < median < 1.5, group
        assert abs(median - 1.0) < 0.25, group  # the aim


def test_no_single_ratio_is_far_off(dumped: list[EnergyRatio]) -> None:
    for r in dumped:
        assert 1 / 1.5 < r.ratio < 1.5, r


def test_ranks_in_every_file(dumped: list[EnergyRatio]) -> None:
    for name in DUMPED_FILES:
        own = [r for r in dumped if r.where == name]
        assert rank_correlation(own) > 0.95, name
        arrays = [r for r in own if r.group not in ("functional units", "memory controller")]
        assert rank_correlation(arrays) > 0.95, (
            name
        )  # without what stands on the same published constants


def test_leakage_and_area_of_a_gtx480(reference: Path) -> None:
    found = {(r.group, r.name): r.ratio for r in leakage_area_ratios(reference)}
    assert 1 / 1.5 < found["whole chip", "leakage"] < 1.5
    assert 1 / 1.5 < found["whole chip", "area"] < 1.5
    for group in ("sm", "l2", "memory controller"):
        for name in ("leakage", "area"):
            assert 1 / 1.5 < found[group, name] < 1.5, (group, name)
    assert 1 / 1.5 < found["noc", "area"] < 1.5
    assert found["noc", "leakage"] < 0.5  # known: McPAT counts a crossbar's wires once a crosspoint


def test_energies_of_a_measured_gpu() -> None:
    found = {r.name: r.ratio for r in fitted_ratios("h200")}
    assert len(found) == 10
    for name, ratio in found.items():
        assert 1 / 3 < ratio < 3, name


def test_a_file_alone_decides_its_energies(reference: Path) -> None:
    """No constant belongs to a file: the same design under another name has the same energies."""
    path = reference / "accelwattch" / "xml" / "gpuwattch_gtx480.xml"
    one = build_architecture_chip(read_architecture(path))
    placeholder = build_architecture_chip(
        read_architecture(path.with_name("gpuwattch_gtx750Ti.xml"))
    )
    assert one.data == placeholder.data


def test_rank_correlation_shares_ranks_of_equal_values() -> None:
    ours, theirs = [1.0, 2.0, 2.0, 5.0, 4.0], [3.0, 3.0, 4.0, 9.0, 9.0]
    shared = np.corrcoef([0.0, 1.5, 1.5, 4.0, 3.0], [0.5, 0.5, 2.0, 3.5, 3.5])[0, 1]
    ratios = [EnergyRatio("a", "b", "c", "J", a, b) for a, b in zip(ours, theirs, strict=True)]
    assert rank_correlation(ratios) == pytest.approx(shared)


def test_rows_for_the_ledger() -> None:
    rows = make_energy_rows()
    assert {row["set"] for row in rows} == {"h200 fitted"}
    assert all(np.isfinite(row["mape"]) and row["factor_must"] == 3.0 for row in rows)
