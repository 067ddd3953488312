"""The order of packages, no import circles, names used once, and GPU libraries in one place.

A package imports only what stands before it in ``ORDER``; docs/architecture.md shows the same order
with reasons. Imports inside functions count; imports for type checkers do not."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class FileImports:
    """Names that a file imports, modules or names within them, and its public classes."""

    run: frozenset[str]  # when the file runs
    all: frozenset[str]  # for type checkers too
    classes: frozenset[str]


@cache
def scan_file(path: Path) -> FileImports:
    """Parse a file once for all tests here."""
    run: set[str] = set()
    others: set[str] = set()

    def walk(statements: list[ast.stmt], names: set[str]) -> None:
        for node in statements:
            if isinstance(node, ast.ImportFrom) and node.module:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            is_of_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for block in blocks_of(node):
                walk(block, others if is_of_checkers else names)

    tree = ast.parse(path.read_text(encoding="utf-8"))
    walk(tree.body, run)
    classes = (
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return FileImports(frozenset(run), frozenset(run | others), frozenset(classes))


def blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements within a statement: only they hold imports."""
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for name in ("handlers", "cases"):
        for part in getattr(statement, name, []):
            yield part.body


def own_modules(path: Path) -> set[str]:
    """The modules of Wattcast that a file imports."""
    names = {name if name in MODULES else name.rpartition(".")[0] for name in scan_file(path).run}
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
        path: {name.split(".")[0] for name in scan_file(path).run} & HARDWARE_LIBRARIES
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
        names = scan_file(path).all
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
        for name in scan_file(path).classes:
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
