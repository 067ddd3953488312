"""What the project is built and run with: declared, bounded and with few rights."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# first version without a known fault that our use could meet, and what the fault was
FAULTLESS = {
    "starlette": ("0.49.1", "CVE-2025-62727"),
    "h11": ("0.16.0", "CVE-2025-43859"),
    "pyarrow": ("14.0.1", "CVE-2023-47248"),
    "torch": ("2.6.0", "CVE-2025-32434"),
    "onnx": ("1.17.0", "CVE-2024-7776"),
}


def read_minimums() -> dict[str, Version]:
    """Return the lowest version that is declared of each package."""
    project = PROJECT["project"]
    texts = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    lowest = {}
    for requirement in map(Requirement, texts):
        for part in requirement.specifier:
            if part.operator == ">=":
                lowest[requirement.name.lower()] = Version(part.version)
    return lowest


def test_what_the_server_imports_is_declared() -> None:
    """``h11`` was imported and came along with uvicorn by luck; so did Starlette."""
    declared = {
        Requirement(text).name for text in PROJECT["project"]["optional-dependencies"]["serve"]
    }
    imported = set()
    for path in (ROOT / "src/wattcast/web").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    libraries = imported & {"h11", "fastapi", "starlette", "uvicorn", "prometheus_client"}
    assert {name.replace("_", "-") for name in libraries} <= declared


@pytest.mark.parametrize("name", FAULTLESS)
def test_the_lowest_version_has_no_known_fault(name: str) -> None:
    """``fastapi>=0.115`` allowed a Starlette that anybody could keep busy."""
    version, fault = FAULTLESS[name]
    assert read_minimums()[name] >= Version(version), fault


def test_rich_is_as_new_as_typer_wants() -> None:
    """Typer wants rich 13.8; 13.7 was declared, and no installation could have both at their lowest."""
    assert read_minimums()["rich"] >= Version("13.8")


def test_the_source_distribution_is_whole() -> None:
    """Studies, docs and SECURITY.md were left out, and tests that read them failed."""
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert {"src", "tests", "studies", "docs", "examples", "SECURITY.md", "LICENSE"} <= included
    assert all((ROOT / name).exists() for name in included)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_names_its_actions_exactly(path: Path) -> None:
    """Workflows had the default rights of the token, and took whatever a moving tag pointed to."""
    plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert plain["permissions"] == {"contents": "read"}
    for job in plain["jobs"].values():
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step
    for line in path.read_text(encoding="utf-8").splitlines():
        assert "uses:" not in line or re.search(r"  # v\d+\.\d+\.\d+$", line), line


def test_packages_are_scanned_every_night() -> None:
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")
    assert "pip_audit" in nightly
    assert "piplicenses" in nightly
    assert "test_structured_files 200000" in nightly


def test_every_folder_with_slow_tests_runs_at_night() -> None:
    """Slow tests were run by hand, or by nobody."""
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    groups = nightly["jobs"]["slow"]["strategy"]["matrix"]["include"]
    named = " ".join(group["run"].partition(" --ignore")[0] for group in groups).split()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.slow" not in path.read_text(encoding="utf-8"):
            continue
        place = path.relative_to(ROOT)
        places = {str(place), *map(str, place.parents)}
        assert places & set(named) or place.match("tests/test_*.py"), place


def test_containers_have_few_rights() -> None:
    """Images had no version; the exporter could write everywhere and take all memory."""
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "mem_limit" in service, name
        assert service["image"] == "wattcast" or ":" in service["image"], name
    for name in ("page", "exporter"):
        assert services[name]["read_only"] is True
    images = re.findall(r"^FROM (\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in images)
