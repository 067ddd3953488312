"""The repository's own habits: style, types, doctests, examples, and a README that tells the truth."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
WITH_DOCTESTS = sorted(p for p in SOURCE.rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "command",
    [
        *("ruff check .", "ruff format --check ."),
        pytest.param("mypy", marks=pytest.mark.slow),  # a minute: the workflow has a step for it
    ],
)
def test_style_and_types(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
)
def test_benchmarks_import(name: str) -> None:
    """A function that ``bench_manage`` took from the policies was folded away, and no test noticed."""
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("path", WITH_DOCTESTS, ids=lambda p: str(p.relative_to(SOURCE)))
def test_doctests(path: Path) -> None:
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_ci_runs_exactly_the_readme_test_command() -> None:
    command = next(block for block in blocks("sh") if "pytest" in block).strip()
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == command


def test_readme_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([\w./-]+)[\w#-]*\)", README):
        assert (ROOT / target).exists(), target


def test_every_package_of_the_tests_is_pinned_and_hashed() -> None:
    """``constraints.txt`` pinned one of 131 packages, so that a new release of any could fail the
    tests.
    """
    pinned = read_pins("constraints.txt")
    assert pinned == read_pins("requirements-dev.txt")
    (torch,) = pinned["torch"]
    assert f"torch=={torch} --index-url" in README
    assert "sha256:" in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]:
        asked = Requirement(line)
        if asked.name != "wattcast":
            assert all(
                asked.specifier.contains(v) for v in pinned[canonicalize_name(asked.name)]
            ), line


def read_pins(name: str) -> dict[str, set[str]]:
    """Return the versions of each package of a file of pins; Pythons and systems may differ in
    them.
    """
    found: dict[str, set[str]] = {}
    for package, version in re.findall(
        r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(encoding="utf-8"), re.M
    ):
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize(
    ("reason", "code"), [("no Chromium on this machine", 1), ("no reference data: set", 0)]
)
def test_a_skip_that_nobody_expects_fails_the_run(
    monkeypatch, pytestconfig, reason: str, code: int
) -> None:
    """A run without a browser or a compiler was green although it had left out a part of the suite."""
    said: list[str] = []
    report = SimpleNamespace(longrepr=("test_page.py", 1, f"Skipped: {reason}"))
    reporter = SimpleNamespace(
        stats={"skipped": [report]}, write_line=lambda line, **_: said.append(line)
    )
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _: reporter))
    session = SimpleNamespace(config=config, exitstatus=pytest.ExitCode.OK)
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    monkeypatch.delenv("WATTCAST_NO_SKIPS", raising=False)
    conftest.pytest_sessionfinish(session)
    assert (int(session.exitstatus), said) == (0, []), "only runs of CI ask for it"
    monkeypatch.setenv("WATTCAST_NO_SKIPS", "1")
    conftest.pytest_sessionfinish(session)
    assert (int(session.exitstatus), len(said)) == (code, code)


@pytest.mark.slow
def test_a_second_python_passes_the_tests() -> None:
    """``WATTCAST_SECOND_PYTHON`` names the Python of another environment; CONTRIBUTING.md says how
    to make one.
    """
    python = os.environ.get("WATTCAST_SECOND_PYTHON")
    if python is None:
        pytest.skip(
            "no second Python: WATTCAST_SECOND_PYTHON names that of an environment with wattcast[dev]"
        )
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "auto",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not realtime",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


def test_containers_and_workflows_call_what_exists(call) -> None:
    """Few machines can build these (``tests/test_containers.py``): every command line in them is
    one of ours.
    """
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    lines = [service["command"] for service in services.values() if "command" in service]
    lines.append(json.loads(re.search(r"^CMD (.*)$", dockerfile, re.MULTILINE)[1]))
    unit = (ROOT / "deploy" / "wattcast-exporter.service").read_text(encoding="utf-8")
    lines.append(re.search(r"^ExecStart=\S+/wattcast (.*)$", unit, re.MULTILINE)[1].split())
    assert len(lines) == 4
    for line in lines:
        done = call(*line, "--help")
        assert done.code == 0, (line, done.err)
    tests = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for part in re.search(r"^(python -m pip install -c.*)$", readme, re.MULTILINE)[1].split(" && "):
        assert f"- run: {part}\n" in tests
    assert yaml.safe_load(tests)["jobs"]["tests"]["env"] == {"WATTCAST_NO_SKIPS": "1"}, (
        "a green run hides nothing"
    )
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def test_version_citation_and_changelog_agree() -> None:
    """The tag of a release is made by hand (CONTRIBUTING.md), so these three must say the same."""
    import wattcast

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == wattcast.__version__
    heads = re.findall(
        r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert heads[:2] == ["Unreleased", f"{wattcast.__version__} - {citation['date-released']}"]
