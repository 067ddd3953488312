"""Data flows one way: a package imports only what stands before it in this list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "wattcast"
ORDER = [
    *["errors", "units", "dtypes", "naming", "provenance", "files", "arrays", "reference", "records", "forest"],
    *["hardware", "workload", "kernels", "timeline", "activity", "power", "energy", "fitted"],
    *["flow", "equilibrium", "uncertainty", "prediction", "api"],
    *["fit", "validate", "explore", "manage", "report", "explain", "doctor"],
]
ONLY = {  # packages that see less than their place would allow, or more
    "workload": set(ORDER[: ORDER.index("hardware")]) - {"records"},
    "measure": {"errors", "units", "dtypes", "records"},
}
FREE = {"cli", "web", "__main__", "__init__"}
HARDWARE_LIBRARIES = {"pynvml", "amdsmi", "cuda"}


def allowed(package: str) -> set[str]:
    return ONLY.get(package, set(ORDER[: ORDER.index(package)]) if package in ORDER else set())


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_upwards(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert package in FREE | set(ORDER) | set(ONLY), f"{package} has no place in ORDER: give it one"
    for name in imports(path):
        if package not in FREE and name.startswith("wattcast.") and name != "wattcast.__version__":
            target = name.split(".")[1]
            assert target == package or target in allowed(package), f"{package} must not import {target} ({name})"
        if package != "measure":
            assert name.split(".")[0] not in HARDWARE_LIBRARIES, f"only measure/ touches a GPU, not {package}"
