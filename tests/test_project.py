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
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
WITH_DOCTESTS = sorted(p for p in SOURCE.rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_style_and_types(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_readme_python_runs() -> None:
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})


def test_readme_commands_run(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line.split("#")[0] for block in blocks("sh") for line in block.splitlines()]
    commands = [line.split("wattcast ", 1)[1].split() for line in lines if "wattcast " in line]
    assert len(commands) >= 7
    for argv in commands:
        done = call(*argv)
        assert done.code == 0, done.err


def test_readme_workload_and_links(call, tmp_path: Path) -> None:
    (workload,) = blocks("json")
    path = tmp_path / "mlp.json"
    path.write_text(workload)
    assert call("predict", str(path), "--gpu", "h200").code == 0
    for target in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_package_of_the_tests_is_pinned_and_hashed() -> None:
    """``constraints.txt`` pinned one of 131 packages, so that a new release of any could fail the tests."""
    import importlib.metadata as metadata

    pinned = read_pins("constraints.txt")
    locked = read_pins("requirements-dev.txt")
    assert pinned.keys() == locked.keys()
    assert "2.13.0" in pinned["torch"]
    assert "sha256:" in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    ours = metadata.metadata("wattcast").get_all("Requires-Dist") or []
    asked = {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in ours} - {"wattcast"}
    assert asked <= pinned.keys(), asked - pinned.keys()


def read_pins(name: str) -> dict[str, set[str]]:
    """Return the versions of each package of a file of pins; Pythons and systems may differ in them."""
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(encoding="utf-8"), re.M):
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.slow
def test_a_second_python_passes_the_tests() -> None:
    """``WATTCAST_SECOND_PYTHON`` names the Python of another environment; CONTRIBUTING.md says how to make one."""
    python = os.environ.get("WATTCAST_SECOND_PYTHON")
    if python is None:
        pytest.skip("no second Python: WATTCAST_SECOND_PYTHON names that of an environment with wattcast[dev]")
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
    """Few machines can build these (``tests/test_containers.py``): every command line in them is one of ours."""
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"]
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
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def test_version_citation_and_changelog_agree() -> None:
    """The tag of a release is made by hand (CONTRIBUTING.md), so these three must say the same."""
    import wattcast

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == wattcast.__version__
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads[:2] == ["Unreleased", f"{wattcast.__version__} - {citation['date-released']}"]
