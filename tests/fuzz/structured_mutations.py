"""Hypothesis strategies that change documents without breaking their form.

A document is a tree: JSON and YAML as they are, a table as rows of cells, a log as lines of words
and numbers. An edit changes one place of the tree to something a writer could have meant: another
number of the same kind, a number scaled by powers of ten, a quantity in another unit, another word
that stands elsewhere in the same document, a key left out, an entry twice. So nearly every mutant
gets past the parser and meets the checks behind it, where random bytes hardly ever arrive."""

from __future__ import annotations

import csv
import io
import json
import math
import pathlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

Path = tuple[Any, ...]  # keys and places from the root of a tree to a value
NUMBERS = (
    *(0, 1, 2, 3, 7, 16, 100, 4096, 65_537, 2**31 - 1, 2**31, 2**53, 2**63, 10**19, 10**400),
    *(
        -1,
        -3,
        -(2**31),
        -(2**63),
        0.0,
        -0.0,
        0.5,
        1.5,
        1e-9,
        1e-300,
        5e-324,
        1e9,
        1e18,
        1e38,
        1e300,
    ),
    *(1.7e308, -22.0, -1e-9, -1e300, math.nan, math.inf, -math.inf),
)
FACTORS = (-1.0, 0.0, 1e-30, 1e-9, 1e-3, 0.1, 0.5, 1.01, 2.0, 10.0, 1e3, 1e6, 1e12, 1e30)
UNITS = (
    "W",
    "kW",
    "mW",
    "GHz",
    "MHz",
    "Hz",
    "s",
    "ms",
    "us",
    "byte",
    "GB",
    "TB/s",
    "V",
    "C",
    "J",
    "%",
    "",
)
WORDS = (
    *(
        "",
        " ",
        "x",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "-1",
        "0",
        "true",
        "null",
        "auto",
        "none",
        "0x10",
        "1_000",
    ),
    *(
        "x" * 300,
        "\x00",
        "\u00e9\u4e2d",
        "=1+1",
        "../../etc/passwd",
        "2026/10/25 02:59:00.100",
        "25.10.2026",
    ),
    *("1 W", "-1 W", "1e300 W", "3 parsecs", "12 12", "1,5", "W" + "9" * 400),
)
_NUMERIC = re.compile(r"[-+]?\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?")
_TOKEN = re.compile(r"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?|[A-Za-z_]\w*|\s+|.", re.DOTALL)


class Edit(NamedTuple):
    """A change of one place: which one, what is done there, and the number, factor and word to do
    it with.
    """

    place: int
    kind: int
    number: float
    factor: float
    word: int


numbers = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-10, 10_000),
    st.floats(allow_nan=False, allow_infinity=False),
)
edits = st.builds(
    Edit,
    st.integers(0, 1_000_000),
    st.integers(0, 15),
    numbers,
    st.sampled_from(FACTORS),
    st.integers(0, 1_000_000),
)
edit_lists = st.lists(edits, min_size=1, max_size=4)


def draw_edits(chance: random.Random) -> list[Edit]:
    """Draw changes as ``edit_lists`` does, some ten times as fast and without shrinking."""
    drawn = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        number: float = chance.choice(NUMBERS)
        if chance.random() < 0.3:
            number = chance.choice((chance.randint(-10, 10_000), chance.lognormvariate(0.0, 10.0)))
        place, word = chance.randrange(1_000_000), chance.randrange(1_000_000)
        drawn.append(Edit(place, chance.randrange(16), number, chance.choice(FACTORS), word))
    return drawn


def mutate(tree: Any, changes: list[Edit]) -> Any:
    """Apply changes one after another, each at a place of the tree as the one before left it."""
    words = [value for _, value in walk(tree) if isinstance(value, str)]
    for change in changes:
        places = [path for path, _ in walk(tree)]
        path = places[change.place % len(places)]
        tree = _replace_at(tree, path, lambda value, edit=change: _change(value, edit, words))
    return tree


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value of a tree with its path, leaves before what holds them."""
    children: Any = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list):
        children = enumerate(tree)
    for key, value in children:
        yield from walk(value, (*path, key))
    yield path, tree


def _replace_at(tree: Any, path: Path, make: Callable[[Any], Any]) -> Any:
    if not path:
        return make(tree)
    key, *rest = path
    changed = _replace_at(tree[key], tuple(rest), make)
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[key] = changed
    return copied


def _change(value: Any, edit: Edit, words: list[str]) -> Any:
    if isinstance(value, dict):
        return _change_mapping(value, edit)
    if isinstance(value, list):
        return _change_list(value, edit)
    if edit.kind == 15:  # another type altogether
        return ([], {}, None, True, "x", 5, [value], {"a": value})[edit.word % 8]
    if isinstance(value, bool) or value is None:
        return (not value, None, 1, "yes")[edit.kind % 4]
    if isinstance(value, (int, float)):
        return _change_number(value, edit)
    return _change_text(str(value), edit, words)


def _change_number(value: float, edit: Edit) -> Any:
    if edit.kind < 7:
        return edit.number
    try:
        scaled = value * edit.factor
        return int(scaled) if isinstance(value, int) and edit.kind < 13 else scaled
    except (OverflowError, ValueError):
        return edit.number


def _change_text(text: str, edit: Edit, words: list[str]) -> str:
    """Change a number inside the text, its unit, or the whole word."""
    match = _NUMERIC.search(text)
    if match is not None and edit.kind < 9:
        number = _change_number(float(match[0].replace("_", "")), edit)
        return f"{text[: match.start()]}{_write(number)}{text[match.end() :]}"
    if match is not None and edit.kind < 11:
        return f"{match[0]} {UNITS[edit.word % len(UNITS)]}"
    if edit.kind < 13 and words:
        return words[edit.word % len(words)]
    return WORDS[edit.word % len(WORDS)]


def _write(number: float) -> str:
    return repr(number) if isinstance(number, float) else str(number)


def _change_mapping(value: dict[Any, Any], edit: Edit) -> Any:
    if not value:
        return {"x": edit.number}
    key = list(value)[edit.word % len(value)]
    if edit.kind < 6:
        return {name: inner for name, inner in value.items() if name != key}
    if edit.kind < 9:
        return value | {f"{key}x": value[key]}
    other = list(value)[edit.place % len(value)]
    return value | {key: value[other]}


def _change_list(value: list[Any], edit: Edit) -> Any:
    if not value:
        return [edit.number]
    place = edit.word % len(value)
    if edit.kind < 4:
        return value[:place] + value[place + 1 :]
    if edit.kind < 8:
        return value[:place] + [value[place]] * (2 + edit.kind) + value[place + 1 :]
    if edit.kind < 11:
        return value[:place]
    other = edit.place % len(value)
    swapped = list(value)
    swapped[place], swapped[other] = value[other], value[place]
    return swapped


def encode_json(tree: Any) -> bytes:
    """Write a tree as JSON; NaN and infinity as Python writes them."""
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def encode_yaml(tree: Any) -> bytes:
    """Write a tree as YAML."""
    text: str = yaml.dump(
        tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False
    )
    return text.encode()


def encode_lines(tree: Any) -> bytes:
    """Write a list of values as JSON Lines."""
    lines = tree if isinstance(tree, list) else [tree]
    return b"".join(encode_json(line) + b"\n" for line in lines)


def split_table(data: bytes, delimiter: str = ",") -> list[list[str]]:
    """Return the cells of a table."""
    return list(csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter))


def encode_table(tree: Any, delimiter: str = ",") -> bytes:
    """Write cells as a table."""
    text = io.StringIO()
    rows = tree if isinstance(tree, list) else [tree]
    writer = csv.writer(text, lineterminator="\n", delimiter=delimiter)
    writer.writerows([row if isinstance(row, list) else [row] for row in rows])
    return text.getvalue().encode("utf-8", "replace")


def split_log(data: bytes) -> list[list[str]]:
    """Return the lines of a log as lists of numbers, words and what is between them."""
    return [_TOKEN.findall(line) for line in data.decode().splitlines()]


def encode_log(tree: Any) -> bytes:
    """Join the words and lines of a log."""
    lines = tree if isinstance(tree, list) else [tree]
    joined = ["".join(map(str, line)) if isinstance(line, list) else str(line) for line in lines]
    return "\n".join([*joined, ""]).encode("utf-8", "replace")


def _read_status_byte(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    value = next(line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(value.split()[1])


def begin_peak() -> int:
    """Forget the peak of this process's memory, and return what it holds now.

    A worker of the suite has run hundreds of other tests before, whose peak is not ours.
    """
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _read_status_byte("VmRSS")


def grown_byte(start_byte: int) -> int:
    """Return how much more memory than at ``begin_peak`` this process held at its peak."""
    return _read_status_byte("VmHWM") - start_byte
