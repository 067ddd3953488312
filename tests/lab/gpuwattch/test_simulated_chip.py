"""The files of one simulated chip are checked against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattcast.lab.gpuwattch.simulated_chip import read_chip
from wattcast.lab.gpuwattch.trace_request import TraceRequest


def read_notes(reference: Path, architecture: str, energies: str) -> str:
    folder = reference / "accelwattch"
    request = TraceRequest(
        trace=Path("trace.log"),
        architecture=folder / "xml" / f"{architecture}.xml",
        energies=folder / "coefficients" / f"{energies}.csv",
        clock_hz=1.447e9,
        sample_cycle=500,
    )
    return " ".join(read_chip(request).notes)


@pytest.mark.parametrize("name", ["accelwattch_ptx_sim", "accelwattch_sass_hw", "gpuwattch_gtx480"])
def test_a_table_dumped_with_its_own_architecture_is_not_warned_of(
    reference: Path, name: str
) -> None:
    """Factors have names of their own: that of FPU_ACC is called FP_ACC."""
    assert "other scaling factors" not in read_notes(reference, name, name)


def test_a_table_of_another_architecture_is_warned_of(reference: Path) -> None:
    notes = read_notes(reference, "accelwattch_ptx_sim", "accelwattch_ptx_sim_alt")
    assert "was dumped with other scaling factors" in notes
    assert "37 of 44 counters" in notes
