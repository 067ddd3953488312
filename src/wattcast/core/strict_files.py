"""Strict readers: bytes a stranger wrote -> typed values, or one sentence that names the bad key.

Size, depth and YAML aliases are bounded before anything is built; unknown keys, duplicate keys,
NaN and infinity are refused. Writers stand in ``whole_files``.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wattcast.core import files
from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
    nearest_names,
)
from wattcast.core.regular_files import cannot_read, open_regular
from wattcast.core.regular_files import (
    read_shipped_table as read_shipped_table,  # for bare nodes, it stands there
)

T = TypeVar("T")

MAX_BYTE = 64 * 2**20
MAX_DEPTH = 64  # of YAML; JSON is bounded by the decoder itself


def read_bytes(path: Path, max_byte: int = MAX_BYTE) -> bytes:
    """Return the content of a regular file of at most ``max_byte``."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_byte:
                raise bad_value(path.name, f"at most {max_byte} bytes", f"{size} bytes")
            data = stream.read(max_byte + 1)  # a growing file has no honest size
    except OSError as error:
        raise cannot_read(path, error) from error
    if len(data) > max_byte:
        raise bad_value(path.name, f"at most {max_byte} bytes", "more")
    return data


def gunzip_bytes(
    data: bytes,
    where: str,
    max_byte: int,
) -> bytes:
    """Return gzip data unpacked, at most ``max_byte``; other data are returned as they are."""
    if data[:2] != b"\x1f\x8b":
        return data
    import gzip
    import zlib

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            plain = stream.read(max_byte + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{where}: not a whole gzip file ({error}).") from None
    if len(plain) > max_byte:
        raise bad_value(where, f"at most {max_byte} bytes unpacked", "more")
    return plain


def decode_json(
    data: bytes,
    kind: type[T],
    where: str,
) -> T:
    """Decode JSON into ``kind`` (a msgspec Struct or a plain type), naming the path of a bad
    key.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _explain_error(where, str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{where}: not valid JSON ({clip_text(str(error), 200)}). Is the file complete?"
        ) from None
    except RecursionError:  # the decoder counts its own depth against the interpreter's limit
        raise bad_value(
            where, "shallow nesting", "brackets nested a thousand deep or more"
        ) from None


def decode_text(data: bytes, where: str) -> str:
    """Decode UTF-8 text, with or without a mark of its byte order."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: not UTF-8 text (byte {error.start}).") from None


def decode_yaml(
    data: bytes,
    kind: type[T],
    where: str,
) -> T:
    """Decode YAML into ``kind``; tags, anchors and aliases, duplicate keys and deep nesting are
    refused.
    """
    import yaml

    try:
        plain = _build_plain(decode_text(data, where), where)
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # PyYAML lets bad dates and endless digits through as ValueError
        raise BadInput(
            f"{where}: not valid YAML ({clip_text(' '.join(str(error).split()), 200)})."
        ) from None
    except RecursionError:
        raise bad_value(where, f"at most {MAX_DEPTH} levels", "more") from None
    return _convert(plain, kind, where)


def read_shipped_yaml(
    kind: type[T],
    package: str,
    *place: str,
) -> T:
    """Read a YAML file that ships in a package into ``kind``."""
    return decode_yaml(files(package).joinpath(*place).read_bytes(), kind, place[-1])


def convert_plain(
    plain: object,
    kind: type[T],
    where: str,
) -> T:
    """Return plain mappings and lists as ``kind``, checked as the readers check files."""
    _check_floats(plain, where)
    return _convert(plain, kind, where)


def _convert(
    plain: object,
    kind: type[T],
    where: str,
) -> T:
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _explain_error(where, str(error), kind) from None


def parse_csv(data: bytes, where: str) -> list[dict[str, str]]:
    """Return the lines of a table below its header, of which there is one at least, all of the same
    width.
    """
    text = io.StringIO(data.decode("utf-8-sig", "replace"), newline=None)
    reader = csv.DictReader(text, skipinitialspace=True)
    rows: list[dict[str, str]] = []
    line_numbers: list[int] = []
    try:
        names = reader.fieldnames or ()
        for row in reader:  # which passes over empty lines
            rows.append(row)
            line_numbers.append(reader.line_num)
    except csv.Error as error:  # a field without an end
        raise bad_value(where, "a table with a header and commas", str(error)) from None
    if len(set(names)) != len(names):
        raise bad_value(f"{where}: line 1", "columns of different names", ",".join(names))
    for number, row in zip(line_numbers, rows, strict=True):
        if None in row or None in row.values():
            raise bad_value(f"{where}: line {number}", f"{len(names)} cells", "more or fewer")
    if not rows:
        raise bad_value(where, "rows below a header that names columns", "none")
    return rows


def encode_csv(rows: Iterable[Iterable[object]]) -> bytes:
    """Return a table as the bytes of a CSV file; its header is the first row."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def read_number(
    text: object,
    where: str,
    least: float = -math.inf,
) -> float:
    """Return a cell of a file as a finite number, not below ``least``."""
    try:
        number = float(str(text))
    except ValueError:
        raise bad_value(where, "a number", clip_text(text)) from None
    if not math.isfinite(number) or number < least:
        wanted = "a finite number"
        if least == 0.0:
            wanted += ", zero or more"
        elif least > -math.inf:
            wanted += f" of at least {least:g}"
        raise bad_value(where, wanted, clip_text(text))
    return number


def _build_plain(text: str, where: str) -> object:
    """Build the plain values of a YAML document in one pass over its events, as PyYAML's safe
    loader would.
    """
    import yaml

    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events = yaml.parse(text, Loader=kind)
    words = kind("")
    # what unquoted words say: keys and numbers come again and again
    values_of_words: dict[str, object] = {}

    def read_word(word: str) -> object:
        if word not in values_of_words:
            tag = words.resolve(yaml.ScalarNode, word, (True, False))
            plain_number = (
                tag.endswith(":float")
                and word[-1].isdigit()
                and "_" not in word
                and ":" not in word
            )
            values_of_words[word] = (
                float(word) if plain_number else words.construct_object(yaml.ScalarNode(tag, word))
            )
        return values_of_words[word]

    def build(event: Any, depth: int) -> object:
        if event.anchor or event.tag:  # an alias has an anchor too
            what = "an anchor or alias" if event.anchor else "a tag"
            raise bad_value(
                f"{where}: line {event.start_mark.line + 1}",
                "plain values",
                what,
                "Write the value out.",
            )
        if isinstance(event, yaml.ScalarEvent):
            return read_word(event.value) if event.implicit[0] else event.value
        if depth == MAX_DEPTH:
            raise bad_value(where, f"at most {MAX_DEPTH} levels of nesting", "more")
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := next(events), yaml.SequenceEndEvent):
                items.append(build(item, depth + 1))
            return items
        mapping: dict[object, object] = {}
        while not isinstance(item := next(events), yaml.MappingEndEvent):
            key = build(item, depth + 1)
            line = item.start_mark.line + 1
            if isinstance(key, (list, dict)):
                raise yaml.YAMLError(f"a key that is no word at line {line}")
            if key in mapping:
                raise yaml.YAMLError(
                    f"key {clip_text(key)!r} stands twice in a mapping, again at line {line}"
                )
            mapping[key] = build(next(events), depth + 1)
        return mapping

    documents = [
        build(next(events), 0) for event in events if isinstance(event, yaml.DocumentStartEvent)
    ]
    if len(documents) > 1:
        raise yaml.YAMLError("more than one document")
    if not all(
        math.isfinite(number) for number in values_of_words.values() if isinstance(number, float)
    ):
        _check_floats(documents[0], where)
    return documents[0] if documents else None


def _check_floats(plain: object, where: str) -> None:
    for path, number in _walk_floats(plain, ""):
        if not math.isfinite(number):
            place = f"{where}: {path}" if path else where
            raise bad_value(place, "a finite number", number)


def _walk_floats(plain: object, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(plain, float):
        yield path.lstrip("."), plain
    elif isinstance(plain, dict):
        for key, value in plain.items():
            yield from _walk_floats(value, f"{path}.{key}")
    elif isinstance(plain, list):
        for index, value in enumerate(plain):
            yield from _walk_floats(value, f"{path}[{index}]")


def _explain_error(
    where: str,
    message: str,
    kind: type,
) -> BadInput:
    """Say msgspec's ``Expected `int`, got `str` - at `$.a.b` `` in our words, with the nearest
    known key.
    """
    sentence, _, at = message.partition(" - at `")
    path = at.rstrip("`").removeprefix("$").lstrip(".")
    sentence = sentence[:1].lower() + sentence[1:]
    unknown = re.search(r"unknown field `(.*)`", sentence)
    hint = ""
    if unknown:
        close = nearest_names(unknown[1], _field_names(kind))
        hint = f" Closest: {', '.join(close)}." if close else ""
    return BadInput(f"{where}: {path + ': ' if path else ''}{clip_text(sentence, 200)}.{hint}")


def _field_names(kind: type, seen: frozenset[type] = frozenset()) -> set[str]:
    """Return all field names of a Struct and of the Structs inside it."""
    names: set[str] = set()
    for struct in _walk_structs(kind):
        if struct not in seen:
            for field in msgspec.structs.fields(struct):
                names |= {field.encode_name} | _field_names(field.type, seen | {struct})
    return names


def _walk_structs(kind: Any) -> Iterator[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in getattr(kind, "__args__", ()):
        yield from _walk_structs(inner)


class FitStatus(StrEnum):
    """What is known of a GPU: how its coefficients came about."""

    MEASURED = "measured"  # fitted to measurements of this kind of GPU
    CALIBRATED = "calibrated"  # carried over from another GPU, and moved by a few rows of this one
    # carried over from another GPU, or set from its specification: nothing was measured
    FORECAST = "forecast"


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Source, date and device of a fitted or measured set of numbers."""

    source: str
    date: str = ""
    device: str = ""
    note: str = ""


@dataclass(frozen=True)
class PublishedClaim:
    """A published number: who says so, and who says otherwise."""

    source: str
    note: str = ""
    disputed: tuple[tuple[str, str], ...] = ()  # (value as written, source)


REFERENCE_VARIABLE = "WATTCAST_REFERENCE"


def reference_folder(variables: Mapping[str, str], project: Path | None = None) -> Path | None:
    """Return the folder named by ``WATTCAST_REFERENCE``, else ``../shared/reference`` of the
    project, else None.
    """
    named = variables.get(REFERENCE_VARIABLE)
    if named:
        return Path(named) if Path(named).is_dir() else None
    beside = (project or Path.cwd()).resolve().parent / "shared" / "reference"
    return beside if beside.is_dir() else None
