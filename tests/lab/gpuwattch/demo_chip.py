"""The made-up chip of ``examples/made_up_chip``, on which tests of the component model run."""

from __future__ import annotations

from pathlib import Path

from wattcast.lab.gpuwattch.architecture import ChipArchitecture, read_architecture
from wattcast.lab.gpuwattch.energy_table import EnergyTable, read_energies

FOLDER = Path(__file__).parents[3] / "examples" / "made_up_chip"


def demo_architecture() -> ChipArchitecture:
    """Return a made-up chip of eight SMs at 1 GHz."""
    return read_architecture(FOLDER / "architecture.xml")


def demo_energies() -> EnergyTable:
    """Return made-up energies of that chip."""
    return read_energies(FOLDER / "energies.yaml")
