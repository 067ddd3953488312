"""Where independent measurements lie, if they are here at all. They belong to others and stay outside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "WATTCAST_REFERENCE"


def reference_folder(variables: Mapping[str, str], project: Path | None = None) -> Path | None:
    """The folder named by ``WATTCAST_REFERENCE``, else ``../shared/reference`` beside the project, else None."""
    named = variables.get(VARIABLE)
    if named:
        return Path(named) if Path(named).is_dir() else None
    beside = (project or Path.cwd()).resolve().parent / "shared" / "reference"
    return beside if beside.is_dir() else None
