"""The order of packages, no import circles, names used once, and GPU libraries in one place.

A package imports only what stands before it in ``ORDER``; docs/architecture.md shows the same order
with reasons. Imports inside functions count; imports for type checkers do not."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "wattcast"
ORDER = [
    *[
        "core",
        "coefficients",
        "hardware",
        "options",
        "workload",
        "kernels",
        "power",
        "predictor",
    ],  # the spine
    *["calibrate", "report", "serving", "training", "timeseries", "explore"],
    *["measure", "control"],
    *["lab", "web", "cli"],
]
LAB_ORDER = [
    "module_commands",  # a file below all rooms: it runs a module as a command
    *["campaigns", "fit", "counter_models", "gpuwattch", "microbench"],
    *["validate", "paper_figures"],
]
PRODUCT = [package for package in ORDER if package not in ("lab", "cli")]
# Packages that see less than their place would allow; ``measure`` runs on a bare GPU node.
ONLY = {
    "measure": {"core", "coefficients"},
    "web": set(PRODUCT),
}
ENTRY_POINTS = {
    "__init__.py",
    "__main__.py",
}  # names that every package may have; mains may import what they run
TEXT_ENDINGS = {".py", ".yaml", ".csv", ".md", ".json", ".cu", ".html"}
HARDWARE_LIBRARIES = {"pynvml", "amdsmi", "cuda"}
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def scan_file(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a file imports when it runs, modules or names within them, and its public classes."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                found.update(f"{child.module}.{alias.name}" for alias in child.names)
            elif isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            walk(child)

    tree = ast.parse(path.read_text(encoding="utf-8"))
    walk(tree)
    classes = (
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return frozenset(found), frozenset(classes)


def own_modules(path: Path) -> set[str]:
    """The modules of Wattcast that a file imports."""
    names = {name if name in MODULES else name.rpartition(".")[0] for name in scan_file(path)[0]}
    return {name for name in names if name in MODULES and name != "wattcast"}


def test_imports_point_upwards() -> None:
    wrong = []
    for path in FILES:
        package = package_of(path)
        if path.name == "__main__.py" or path.parent == SOURCE:
            continue
        assert package in ORDER, f"{package} has no place in ORDER: give it one"
        allowed = ONLY.get(package, set(ORDER[: ORDER.index(package)])) | {package}
        wrong += [
            (path.name, name) for name in own_modules(path) if name.split(".")[1] not in allowed
        ]
    assert wrong == [], "files that must not import what they do"


def test_only_measure_touches_a_gpu() -> None:
    libraries = {
        path: {name.split(".")[0] for name in scan_file(path)[0]} & HARDWARE_LIBRARIES
        for path in FILES
    }
    assert {
        path.name: used
        for path, used in libraries.items()
        if used and package_of(path) != "measure"
    } == {}


def test_no_import_circle_between_files() -> None:
    try:
        TopologicalSorter(
            {name: own_modules(path) - {name} for name, path in MODULES.items()}
        ).prepare()
    except CycleError as error:
        pytest.fail("imports run in a circle: " + " -> ".join(error.args[1]))


def test_no_circle_between_files_when_imports_for_type_checkers_count() -> None:
    imports: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
        files = {each if each in MODULES else each.rpartition(".")[0] for each in names}
        imports[name] = {each for each in files if each in MODULES} - {name, "wattcast"}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("imports run in a circle: " + " -> ".join(error.args[1]))


def test_a_file_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        if path.name not in ENTRY_POINTS:
            places[path.name].append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_class_name_stands_in_one_package() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name in scan_file(path)[1]:
            places[name].add(package_of(path))
    assert {n: sorted(found) for n, found in places.items() if len(found) > 1} == {}


def test_the_product_does_not_import_the_lab() -> None:
    """A reader who wants to understand a prediction reads the product alone."""
    offenders = []
    for path in FILES:
        if package_of(path) not in ("lab", "cli"):
            offenders += [
                (path.name, name) for name in own_modules(path) if name.startswith("wattcast.lab")
            ]
    assert offenders == []


def test_rooms_of_the_lab_import_in_order() -> None:
    offenders = []
    for path in FILES:
        parts = path.relative_to(SOURCE).parts
        if parts[0] != "lab" or len(parts) < 3:
            continue
        allowed = LAB_ORDER[: LAB_ORDER.index(parts[1]) + 1]
        for name in own_modules(path):
            words = name.split(".")
            if words[1] == "lab" and len(words) > 2 and words[2] not in allowed:
                offenders.append((path.name, name))
    assert offenders == []


def test_nothing_names_the_studies_folder() -> None:
    """Scripts below ``studies/`` are not in the wheel, so a command that needs one fails after
    ``pip install``.
    """
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in SOURCE.rglob("*")
        if path.suffix in TEXT_ENDINGS
    }
    naming = [path.name for path, text in texts.items() if re.search(r"\bstudies[./]", text)]
    assert naming == []
