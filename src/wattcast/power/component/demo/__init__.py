"""A made-up chip with round numbers, for examples, tests and benchmarks."""

from __future__ import annotations

from importlib.resources import as_file, files

from wattcast.power.component.architecture import Architecture
from wattcast.power.component.architecture_yaml import read_yaml
from wattcast.power.component.energies import EnergyTable, read_energies


def demo_architecture() -> Architecture:
    """Eight SMs at 1 GHz."""
    with as_file(files(__name__).joinpath("architecture.yaml")) as path:
        return read_yaml(path)


def demo_energies() -> EnergyTable:
    """Energies for it."""
    with as_file(files(__name__).joinpath("energies.yaml")) as path:
        return read_energies(path)
