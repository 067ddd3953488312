"""Operators that a file lists, one JSON object a line, in place of the plan: what ``--suggest`` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from wattcast.errors import BadInput, bad_value
from wattcast.measure.kernels.chain import members
from wattcast.measure.kernels.from_workload import from_operator
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.kernels.training_plan import training_plan
from wattcast.records import read_lines

__all__ = ["NAMED", "from_operator", "read_listed", "write_listed"]

_FIELDS = ("family", "operator", "layout", "rotated", "detail", "chosen")


def read_listed(path: Path) -> list[Spec]:
    """The operators of a file, none twice, or of a plan that has a name."""
    if str(path) in NAMED:
        return NAMED[str(path)]()
    if not path.is_file():
        raise BadInput(
            f"--plan: there is no file {path}. `wattcast measure kernels --suggest N --out DIR` writes one; "
            "`training` is the plan of gradients, caches and batch norm, `chains` the members of chains, `common` "
            "and `common-sustained` what is measured on every card, to tell cards apart."
        )
    return _read(path)


def _read(path: Path) -> list[Spec]:
    found: dict[str, Spec] = {}
    for number, line in enumerate(read_lines(path), start=1):
        given = {name: line[name] for name in _FIELDS if name in line}
        if not isinstance(given.get("operator"), dict) or "family" not in given:
            raise bad_value(f"{path.name}: line {number}", "an operator and its family", ", ".join(line))
        spec = Spec(**given)
        found.setdefault(spec.id, spec)
    if not found:
        raise bad_value(path.name, "at least one operator", "none")
    return list(found.values())


def _shipped(name: str) -> list[Spec]:
    return _read(Path(str(files("wattcast.measure.kernels").joinpath(name))))


NAMED: dict[str, Callable[[], list[Spec]]] = {
    "training": training_plan,
    "chains": members,
    "common": partial(_shipped, "common_burst.jsonl"),
    "common-sustained": partial(_shipped, "common_sustained.jsonl"),
}


def write_listed(path: Path, specs: Iterable[tuple[Spec, dict[str, Any]]]) -> None:
    """Operators and what is to be said of each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as stream:
        for spec, more in specs:
            stream.write(json.dumps({name: getattr(spec, name) for name in _FIELDS} | more) + "\n")
