"""Run lines of README with the packages that an install brings and no others.

``python run_with_extras.py plot,serve < tasks.json``: tasks are ``{"argv": [...]}`` or
``{"python": "..."}``. Importing a package that the install does not bring fails, as it does in an
environment that has nothing else. Answers are printed as JSON: ``[{"code": 0, "err": ""}, ...]``.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import io
import json
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def list_packages(extras: set[str]) -> set[str]:
    """Return the distributions that `pip install '.[extras]'` brings, those they need included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    packages: set[str] = set()
    waiting = [Requirement(line) for line in lines]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if name == "wattcast":
            for extra in wanted.extras:
                waiting += [Requirement(x) for x in project["optional-dependencies"][extra]]
        elif name not in packages:
            packages.add(name)
            waiting += read_requirements(name, wanted.extras)
    return packages


def read_requirements(name: str, extras: set[str]) -> list[Requirement]:
    """Return what an installed distribution needs, with some of its own extras."""
    found = []
    for line in importlib.metadata.requires(name) or ():
        wanted = Requirement(line)
        asked = ["", *sorted(extras)]
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": x}) for x in asked):
            wanted.marker = None
            found.append(wanted)
    return found


class AbsentPackages(importlib.abc.MetaPathFinder):
    """Refuse imports of modules that only other distributions hold."""

    def __init__(self, packages: set[str]) -> None:
        homes = importlib.metadata.packages_distributions()
        present = {*packages, "wattcast"}
        self.absent = {
            module
            for module, names in homes.items()
            if not {canonicalize_name(name) for name in names} & present
        }

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Run one command line or one block of Python."""
    if "python" in task:
        try:
            exec(compile(task["python"], "README.md", "exec"), {})
        except BaseException:
            return {"code": 1, "err": traceback.format_exc()}
        return {"code": 0, "err": ""}
    from wattcast.cli.command_output import Environment
    from wattcast.cli.main import main

    err = io.StringIO()
    code = main(task["argv"], Environment(io.StringIO(), err, {}))
    return {"code": int(code), "err": err.getvalue()}


if __name__ == "__main__":
    chosen = {name for name in sys.argv[1].split(",") if name}
    sys.meta_path.insert(0, AbsentPackages(list_packages(chosen)))
    tasks = json.load(sys.stdin)
    stdout, sys.stdout = sys.stdout, io.StringIO()
    answers = [run_task(task) for task in tasks]
    json.dump(answers, stdout)
