"""Numbers that stand in functions of the product have a name, or one of few plain meanings.

A number that decides a prediction is a coefficient, and any other is a constant of its module with
a comment, so that a reader can tell what was chosen from what is physics. Functions may contain the
numbers that everybody understands where they stand; ``has_plain_meaning`` lists them by meaning.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "wattcast"
# Unnamed numbers that functions of a package still contain. These may only fall: name a new number,
# and lower the count of a package when you name an old one.
MOST_UNNAMED = {
    **{"cli": 16, "control": 2, "core": 10, "measure": 34, "options": 15, "report": 24},
    **{"serving": 4, "timeseries": 1, "web": 12, "workload": 46},
}

NEGLIGIBLE = 1e-6  # of a divisor that must not be zero, or of a comparison of floats
# Factors between units: percent, seconds, minutes, hours, days, joules, and powers of ten.
UNIT_FACTORS = {60, 100, 3600, 86400, 3.6e6} | {
    float(f"1e{exponent}") for exponent in range(-15, 16, 3)
}
HALF = 0.5
# Calls whose numbers are places of a tensor, digits and letters of a text, sizes of a cache or of a
# read, seconds of a short pause, percentiles, or the answer to a client.
PLAIN_CALLS = {
    *("reshape", "permute", "transpose", "unsqueeze", "select", "view", "swapaxes", "cat", "range"),
    *("show", "show_plain", "round", "clip_text", "lru_cache", "round_number", "get_close_matches"),
    *("read", "recv", "recv_into", "unpack_from", "to_bytes", "_read_exactly", "_read_fields"),
    *("sleep", "select", "settimeout", "umask", "chmod", "mkdir", "open", "Exit"),
    *("percentile", "nanpercentile", "Answer", "make_refusal", "HTTPException", "_plain_response"),
}
# Files that contain nothing but pictures, sizes of published networks, or a format of bytes.
PLAIN_FOLDERS = ("workload/models/",)
PLAIN_FILES = {"web/kubelet_pods.py", "measure/cuda_device.py"}
PICTURE_CALLS = {"new_axes", "new_figure"}

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Parents = dict[ast.AST, ast.AST]


def list_parents(node: ast.AST, parents: Parents) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Return each ancestor with its child that leads to the node, the nearest first."""
    while node in parents:
        yield parents[node], node
        node = parents[node]


def read_called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def is_in_arithmetic(number: ast.Constant, parent: ast.AST) -> bool:
    """Return whether a number converts a unit, takes a half, or stands for powers and bits."""
    if not isinstance(parent, ast.BinOp):
        return False
    if isinstance(parent.op, ast.LShift | ast.RShift | ast.BitAnd | ast.BitOr | ast.BitXor):
        return True
    if isinstance(parent.op, ast.Pow):  # roots, squares and cubes, powers of two and of ten
        return parent.right is number or number.value == 10
    is_factor = isinstance(parent.op, ast.Mult | ast.Div | ast.FloorDiv | ast.Mod)
    return is_factor and (number.value in UNIT_FACTORS or number.value == HALF)


def counts_items(comparison: ast.AST) -> bool:
    """Return whether something is compared with a length or with a code that a system gave."""
    if not isinstance(comparison, ast.Compare):
        return False
    for side in (comparison.left, *comparison.comparators):
        if isinstance(side, ast.Call) and read_called_name(side) == "len":
            return True
        if isinstance(side, ast.Attribute) and side.attr in ("ndim", "status", "returncode"):
            return True
    return False


def has_plain_meaning(number: ast.Constant, parents: Parents) -> bool:
    """Return whether a reader understands a number where it stands, without a name."""
    value = number.value
    if value in (0, 1, 2) or (isinstance(value, float) and value <= NEGLIGIBLE):
        return True
    for parent, child in list_parents(number, parents):
        if isinstance(child, ast.stmt):
            return False
        if is_in_arithmetic(number, parent) or counts_items(parent):
            return True
        if isinstance(parent, ast.Subscript) and child is parent.slice:
            return True
        if isinstance(parent, ast.FormattedValue | ast.JoinedStr):
            return True
        if isinstance(parent, ast.Call) and read_called_name(parent) in PLAIN_CALLS:
            return True
    return False


def draws(function: ast.AST) -> bool:
    """Return whether a function makes a picture, where numbers are sizes and widths of lines."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and read_called_name(node) in PICTURE_CALLS:
            return True
        if isinstance(node, ast.arg) and node.arg.endswith("axes"):
            return True
    return False


def find_unnamed(text: str) -> list[tuple[int, float]]:
    """Return line and value of each unnamed number in the functions of a source."""
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    draws_of: dict[ast.AST, bool] = {}
    unnamed = []
    for node in parents:
        if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
            continue
        if has_plain_meaning(node, parents):
            continue
        functions = [each for each, _ in list_parents(node, parents) if isinstance(each, FUNCTION)]
        for function in functions:
            if function not in draws_of:
                draws_of[function] = draws(function)
        if functions and not any(draws_of[function] for function in functions):
            unnamed.append((node.lineno, node.value))
    return sorted(unnamed)


def list_unnamed() -> list[tuple[str, int, float]]:
    """Return file, line and value of each unnamed number of the product."""
    unnamed = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        is_plain = name.startswith(PLAIN_FOLDERS) or name in PLAIN_FILES
        if name.startswith("lab/") or is_plain:
            continue
        text = path.read_text(encoding="utf-8")
        unnamed += [(name, line, value) for line, value in find_unnamed(text)]
    return unnamed


def test_no_function_has_a_new_unnamed_number() -> None:
    unnamed = list_unnamed()
    counts = Counter(name.partition("/")[0] for name, _, _ in unnamed)
    risen = {package for package in counts if counts[package] > MOST_UNNAMED.get(package, 0)}
    places = [each for each in unnamed if each[0].partition("/")[0] in risen]
    assert places == [], (
        f"{risen} contain more unnamed numbers than before: make a number that decides a prediction "
        "a coefficient (docs/coefficients.md), and name any other as a constant of its module"
    )


@pytest.mark.parametrize(
    "line",
    ["return 3 * x", "return x > 0.1", "return min(x, 64.0)", "return f(x, share=0.98)"],
)
def test_a_number_that_decides_something_is_found(line: str) -> None:
    assert len(find_unnamed(f"def f(x):\n    {line}\n")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "return x[3]",
        "return 1e-3 * x",
        "return 0.5 * (x + y)",
        "return 2.0**10 * x",
        "return show(x, 's', 3)",
        "return len(x) == 4",
        "return x / max(y, 1e-12)",
    ],
)
def test_a_number_with_a_plain_meaning_needs_no_name(line: str) -> None:
    assert find_unnamed(f"def f(x, y):\n    {line}\n") == []
