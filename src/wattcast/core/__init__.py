"""What every other package leans on: errors, units, number formats, strict readers, measured
rows.
"""

from pathlib import Path

from wattcast.core.errors import (
    BadInput,
    MissingTool,
    Refused,
    bad_value,
    bad_word,
    check_names,
    clip_text,
    unknown_name,
)
from wattcast.core.units import Dtype

__all__ = [
    "BadInput",
    "Dtype",
    "MissingTool",
    "Refused",
    "bad_value",
    "bad_word",
    "check_names",
    "clip_text",
    "files",
    "unknown_name",
]


def files(package: str) -> Path:
    """Return the folder of a package of Wattcast; ``importlib.resources`` says the same after 10 ms
    of imports.
    """
    return Path(__file__).parents[1].joinpath(*package.split(".")[1:])
