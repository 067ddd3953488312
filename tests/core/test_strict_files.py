"""Files from strangers: malformed, truncated, huge, nested, full of aliases. One sentence each."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.core.errors import BadInput
from wattcast.core.strict_files import decode_json, decode_yaml, parse_csv, read_bytes, read_number
from wattcast.core.whole_files import write_whole


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    capacity: int


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    memory: Inner
    ratio: float = 1.0


BOMB = b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"name: x\nmemory: {capacity: big}\n", r"f\.yaml: memory\.capacity: expected `int`"),
        (b"name: x\nmemory: {capacty: 1}\n", r"capacity"),
        (
            b"name: x\nmemory: {capacity: 1}\nmemroy: 1\n",
            r"unknown field `memroy`\. Closest: memory",
        ),
        (b"name: x\nname: y\nmemory: {capacity: 1}\n", r"stands twice"),
        (
            b"name: x\nmemory: {capacity: 1}\nratio: .nan\n",
            r"^f\.yaml: ratio: expected a finite number",
        ),
        (
            b"name: x\nmemory: {capacity: 1}\nratio: .inf\n",
            r"^f\.yaml: ratio: expected a finite number",
        ),
        (b".nan\n", r"^f\.yaml: expected a finite number"),
        (b"name: [", r"not valid YAML"),
        (b"\xff\xfe", r"not UTF-8"),
        (BOMB, r"anchor or alias"),
        (b"[" * 5000 + b"]" * 5000, r"levels of nesting|not valid YAML"),
        (b"- !!python/object/apply:os.system [x]\n", r"got .a tag"),
        (b"", r"expected `object`, got `null`"),
        (b"name: 2001-99-99\nmemory: {capacity: 1}\n", r"not valid YAML"),
        (b"name: x\nmemory: {capacity: " + b"9" * 5000 + b"}\n", r"not valid YAML"),
    ],
)
def test_bad_yaml_is_named(data: bytes, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        decode_yaml(data, Outer, "f.yaml")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"name": "x", "memory": {"capacity": 1.5}}', r"memory\.capacity: expected `int`"),
        (b'{"name": "x"', r"not valid JSON .* complete"),
        (b'{"name": "x", "memory": {"capacity": 1}, "ratio": NaN}', r"not valid JSON"),
        (b'{"name": "x", "memory": {"capacity": 1}, "ratio": 1e999}', r"ratio"),
        (b'{"name": ' + b"[" * 100_000, r"expected `str`"),
        (b"", r"not valid JSON"),
    ],
)
def test_bad_json_is_named(data: bytes, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        decode_json(data, Outer, "f.json")


def test_nesting_deeper_than_any_workload_is_refused() -> None:
    with pytest.raises(BadInput, match="shallow nesting"):
        decode_json(b"[" * 100_000 + b"]" * 100_000, list[msgspec.Raw], "f.json")


@given(st.binary(max_size=200))
def test_no_bytes_escape_as_another_error(data: bytes) -> None:
    for read in (decode_json, decode_yaml):
        with contextlib.suppress(BadInput):
            assert isinstance(read(data, Outer, "f"), Outer)


@pytest.mark.parametrize(("data", "line"), [(b"a,b\n1,2\n\n\n3\n", 5), (b'a,b\n"1\n1",2\n3\n', 4)])
def test_a_row_of_another_width_is_named_by_its_line(data: bytes, line: int) -> None:
    """Rows were counted in place of lines, so an empty line or one inside quotes misled."""
    with pytest.raises(BadInput, match=f"f.csv: line {line}: expected 2 cells"):
        parse_csv(data, "f.csv")


@pytest.mark.parametrize(
    ("least", "bound"), [(0.0, "number, zero or more"), (2.0, "at least 2"), (-1.0, "at least -1")]
)
def test_a_number_below_its_least_value_is_told_which(least: float, bound: str) -> None:
    """Every bound of zero or more was said to be zero, and one below zero not said."""
    with pytest.raises(BadInput, match=bound):
        read_number("-3", "f.csv", least)


def test_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_bytes(b" " * 1001)
    with pytest.raises(BadInput, match="at most 1000 bytes"):
        read_bytes(path, 1000)
    with pytest.raises(BadInput, match="cannot be read"):
        read_bytes(tmp_path / "absent.json")
    with pytest.raises(BadInput, match="a folder"):
        read_bytes(tmp_path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wattcast.core.whole_files.os.replace", fail)
    with pytest.raises(BadInput, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
