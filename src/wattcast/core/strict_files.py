"""Read files that a stranger wrote into typed values, or say in one sentence which key is bad.

Size and depth are bounded before anything is built. Unknown and duplicate keys, YAML aliases, NaN
and infinity are refused. In all readers ``where`` is the name that an error begins with, mostly
the file's, and ``kind`` the type to read into. Writers are in ``whole_files``.

Three small records that many files carry are defined here too: how a GPU's coefficients came about
(``FitStatus``), where numbers are from (``Provenance``, ``PublishedClaim``).
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
    # defined there without msgspec, which bare GPU nodes may lack; most modules import it from here
    read_shipped_table as read_shipped_table,
)

T = TypeVar("T")

MAX_BYTE = 64 * 2**20  # of a file, where a reader does not set its own limit
MAX_DEPTH = 64  # nested levels of YAML; the JSON decoder has a limit of its own


def read_bytes(path: Path, max_byte: int = MAX_BYTE) -> bytes:
    """Return the content of a regular file of at most ``max_byte``."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_byte:
                raise bad_value(path.name, f"at most {max_byte} bytes", f"{size} bytes")
            data = stream.read(max_byte + 1)  # the file may have grown since
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
    """Return gzip data unpacked, at most ``max_byte``, and other data unchanged."""
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
    """Decode UTF-8 text, with or without a byte order mark."""
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
    """Read a YAML file that ships in a package; ``place`` is its path in parts."""
    return decode_yaml(files(package).joinpath(*place).read_bytes(), kind, place[-1])


def convert_plain(
    plain: object,
    kind: type[T],
    where: str,
) -> T:
    """Return plain mappings and lists as ``kind``; NaN and infinity are refused, as in files."""
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
    """Return the rows of a table by the names in its header.

    A table without rows and one with a row of another width are refused. Bytes that are not UTF-8
    are replaced, since other programs' tables may have another encoding; ``decode_text`` refuses
    them.
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
    except csv.Error as error:  # a field longer than 128 KiB, mostly for want of a closing quote
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


def encode_json(out: object) -> bytes:
    """Encode an output struct or plain mapping as JSON text; NaN and infinity never pass."""
    return msgspec.json.format(msgspec.json.encode(out), indent=1)


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
    """Return the plain values that PyYAML's safe loader would build from a YAML document.

    They are built in one pass over the parser's events, so that an alias or too deep nesting is
    refused before it takes memory.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events = yaml.parse(text, Loader=loader)
    resolver = loader("")  # says which words are numbers, dates, booleans
    # Unquoted keys and numbers come again and again: each is resolved once
    values_of_words: dict[str, object] = {}

    def read_word(word: str) -> object:
        if word not in values_of_words:
            # (True, False): neither quoted nor tagged
            tag = resolver.resolve(yaml.ScalarNode, word, (True, False))
            # Python reads these alike and faster; not 1_000.5, 1:30.5 (base 60) or .inf
            is_python_float = (
                tag.endswith(":float")
                and word[-1].isdigit()
                and "_" not in word
                and ":" not in word
            )
            if is_python_float:
                values_of_words[word] = float(word)
            else:
                values_of_words[word] = resolver.construct_object(yaml.ScalarNode(tag, word))
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

    # ``build`` takes the events of a document from the same iterator as this loop
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
    """Refuse NaN and infinity, with the path of keys to the first."""
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
    """Turn msgspec's ``Expected `int`, got `str` - at `$.a.b` `` into our error.

    The path comes first (``where: a.b: expected...``), and an unknown key gets the nearest ones of
    ``kind``.
    """
    sentence, _, place = message.partition(" - at `")
    path = place.rstrip("`").removeprefix("$").lstrip(".")
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
    """Yield a Struct, or those inside a type such as ``list[Struct] | None``."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in getattr(kind, "__args__", ()):
        yield from _walk_structs(inner)


class FitStatus(StrEnum):
    """What is known of a GPU: how its coefficients came about."""

    # Fitted to measurements of this kind of GPU
    MEASURED = "measured"
    # Carried over from another GPU, then moved by a few measured rows of this one
    CALIBRATED = "calibrated"
    # Carried over from another GPU, or set from its specification: nothing was measured
    FORECAST = "forecast"


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Source, date and device of a fitted or measured set of numbers."""

    source: str
    date: str = ""
    device: str = ""
    note: str = ""


@dataclass(frozen=True)
class PublishedClaim:
    """Who published a number, and who disputes it."""

    source: str
    note: str = ""
    disputed: tuple[tuple[str, str], ...] = ()  # (the other value as its source writes it, source)


# Environment variable with the folder of data that Wattcast is validated on and does not ship
REFERENCE_VARIABLE = "WATTCAST_REFERENCE"


def reference_folder(variables: Mapping[str, str], project: Path | None = None) -> Path | None:
    """Return the folder of reference data, or None where there is none.

    It is the one that ``WATTCAST_REFERENCE`` names among the environment ``variables``, else
    ``shared/reference`` next to the ``project``'s folder (default: the current one).
    """
    name = variables.get(REFERENCE_VARIABLE)
    if name:
        folder = Path(name)
    else:
        folder = (project or Path.cwd()).resolve().parent / "shared" / "reference"
    return folder if folder.is_dir() else None
