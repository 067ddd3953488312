"""What every other package leans on: errors, units, number formats, strict readers, measured rows."""

from pathlib import Path


def files(package: str) -> Path:
    """Return the folder of a package of Wattcast; ``importlib.resources`` says the same after 10 ms of imports."""
    return Path(__file__).parents[1].joinpath(*package.split(".")[1:])
