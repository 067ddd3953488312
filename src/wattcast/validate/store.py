"""Ledger rows that take minutes, kept between calls: one JSON file a section, named by what it depends on.

A change of the database, of a bundle or of any module that fitting and prediction run through gives another
name, so a kept result is never stale. The folder is ``WATTCAST_CACHE``, or ``wattcast`` in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from wattcast.files import write_whole
from wattcast.validate.rows import Row

VARIABLE = "WATTCAST_CACHE"
_PACKAGE = Path(__file__).parents[1]
# what a held-out error follows from, below the package
_INGREDIENTS = ("kernels", "timeline", "activity", "power", "fit", "fitted", "hardware", "database", "workload")
_MAKERS = (
    "ablations.py",
    "cards.py",
    "cards_left_out.py",
    "floors.py",
    "learning.py",
    "power_baselines.py",
    "pretended.py",
    "published.py",
    "suggesting.py",
    "unseen.py",
    "walltime.py",
    "walltime.csv",
    "volta.yaml",
)


def kept(section: str, make: Callable[[], list[Row]], variables: Mapping[str, str], again: bool = False) -> list[Row]:
    """The rows of a section: read where they were kept, else made and kept."""
    path = folder(variables) / f"{section}-{digest()}.json"
    if path.is_file() and not again:
        try:
            return list(json.loads(path.read_bytes())["rows"])
        except (ValueError, KeyError, TypeError):  # half a file: make it again
            pass
    rows = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"rows": rows}, indent=1).encode())
    return rows


def seen(section: str, variables: Mapping[str, str]) -> bool:
    """Whether a section's rows are at hand without the work."""
    return (folder(variables) / f"{section}-{digest()}.json").is_file()


def folder(variables: Mapping[str, str]) -> Path:
    """Where results are kept."""
    if variables.get(VARIABLE):
        return Path(variables[VARIABLE])
    base = variables.get("XDG_CACHE_HOME") or os.path.join(variables.get("HOME", "."), ".cache")
    return Path(base) / "wattcast"


def digest() -> str:
    """A name for the state of everything a result depends on."""
    found = hashlib.sha256()
    inside = [path for part in _INGREDIENTS for path in sorted((_PACKAGE / part).rglob("*"))]
    makers = [_PACKAGE / "uncertainty.py", *(Path(__file__).parent / name for name in _MAKERS)]
    for path in [*inside, *makers]:
        if path.is_file() and path.suffix in (".py", ".yaml", ".csv", ".npz", ".parquet"):
            found.update(path.relative_to(_PACKAGE).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
