"""Keep results on disk as a folder of Parquet parts with a manifest, so that a killed run continues where it stood.

A part is written whole or not at all, under a name that says which points it holds, so no result is lost or doubled.
``--out NAME.parquet|.csv|.json`` keeps its parts in ``NAME.parquet.parts`` until all are there, then joins them into
the one file. ``--out FOLDER`` stays a folder of parts, which polars, pandas, DuckDB and Spark read as one table.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast import __version__
from wattcast.core.errors import BadInput, CannotWrite, MissingTool, Refused, bad_value
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.core.whole_files import replace_whole, write_whole

ENDINGS = (".parquet", ".csv", ".json")
_MANIFEST = "manifest.json"
_FORMAT = 1


class StoreManifest(msgspec.Struct, forbid_unknown_fields=True):
    """Say what a folder of parts holds."""

    format: int
    wattcast: str
    study: str  # the fingerprint of the study
    about: str
    points: int
    part_points: int


@dataclass(frozen=True)
class ResultStore:
    """Hold the parts of one study, and the file they end up in."""

    folder: Path
    target: Path | None  # the one file they are joined into; None: they stay

    @property
    def compression(self) -> str:
        """Return the compression of parts: small where they stay, fast where they are read once and go."""
        return "zstd" if self.target is None else "lz4"

    def finished(self) -> set[int]:
        """Return the numbers of the parts that are there."""
        numbers = (path.stem.removeprefix("part-") for path in self.folder.glob("part-*.parquet"))
        return {int(number) for number in numbers if number.isascii() and number.isdigit()}

    def write(self, index: int, data: bytes) -> None:
        """Write one part, whole."""
        write_whole(self.part(index), data)

    def read(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Read the columns of a finished part."""
        try:
            return {c.name: c.to_numpy() for c in import_polars().read_parquet(self.part(index)).get_columns()}
        except (OSError, import_polars().exceptions.PolarsError) as error:
            do = "Delete it; the same command computes it again."
            raise BadInput(f"{self.part(index)}: not a readable part ({error}). {do}") from None

    def part(self, index: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"part-{index:06d}.parquet"

    def join(self, parts: int) -> None:
        """Join all parts, in order, into the one file asked for, and remove them."""
        if self.target is None:
            return
        paths = [self.part(index) for index in range(parts)]
        try:
            with replace_whole(self.target) as part_file:
                _WRITERS[self.target.suffix.lower()](paths, part_file)
        except (CannotWrite, import_polars().exceptions.PolarsError) as error:
            kept = f"All parts are kept in {self.folder}."
            raise BadInput(f"{self.target}: cannot be written ({error}). {kept}") from None
        for path in (*paths, self.folder / _MANIFEST):
            path.unlink()
        self.folder.rmdir()


def open_store(out: Path, study: str, about: str, points: int, part_points: int) -> ResultStore:
    """Open a store for this study at ``out``; one that was begun is continued, another study's is refused."""
    import_polars()
    ending = out.suffix.lower()
    if ending and ending not in ENDINGS and not out.is_dir():
        raise bad_value(str(out), f"a folder, or a name that ends in {', '.join(ENDINGS)}", out.name)
    single = ending in ENDINGS
    if single and out.is_dir():
        raise bad_value(str(out), "a file", "a folder", "Choose another name.")
    if not single and out.is_file():
        raise bad_value(str(out), "a folder", "a file", "Choose another name.")
    store = ResultStore(out.with_name(out.name + ".parts"), out) if single else ResultStore(out, None)
    manifest = StoreManifest(_FORMAT, __version__, study, about, points, part_points)
    path = store.folder / _MANIFEST
    if path.exists():
        found = decode_json(read_bytes(path), StoreManifest, str(path))
        if found.format != _FORMAT:
            raise bad_value(
                f"{store.folder / _MANIFEST}: format", str(_FORMAT), found.format, "Choose another folder."
            )
        if (found.study, found.points, found.part_points) != (manifest.study, manifest.points, manifest.part_points):
            raise Refused(
                f"{store.folder}: holds results of another study ({found.about}, Wattcast {found.wattcast}), "
                f"not of this one ({manifest.about}). Choose another --out, or delete the folder."
            )
    elif store.folder.is_dir() and any(store.folder.iterdir()):
        raise Refused(f"{store.folder}: holds other files and no {_MANIFEST}. Choose an empty folder.")
    else:
        write_whole(path, msgspec.json.encode(manifest))
    return store


def encode_parquet(columns: Mapping[str, npt.NDArray[Any]], compression: str = "zstd") -> bytes:
    """Encode columns as a Parquet file."""
    buffer = io.BytesIO()
    level = 1 if compression == "zstd" else None
    import_polars().DataFrame(dict(columns)).write_parquet(buffer, compression=compression, compression_level=level)
    return buffer.getvalue()


def import_polars() -> Any:
    """Import polars, or say what to install."""
    try:
        import polars as library
    except ImportError:
        raise MissingTool("tables need polars. Install it: pip install 'wattcast[explore]'.") from None
    return library


def table_rows(columns: Mapping[str, npt.NDArray[Any]]) -> list[dict[str, Any]]:
    """Return columns as plain rows, for JSON."""
    plain = {name: np.asarray(values).tolist() for name, values in columns.items()}
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


def _json(paths: list[Path], out: Path) -> None:
    """A list of objects, one part at a time."""
    with out.open("wb") as stream:
        stream.write(b"[")
        begun = False
        for path in paths:
            inner = import_polars().read_parquet(path).write_json().encode()[1:-1]
            stream.write((b",\n" if begun and inner else b"") + inner)
            begun = begun or bool(inner)
        stream.write(b"]\n")


_WRITERS: dict[str, Callable[[list[Path], Path], Any]] = {
    ".parquet": lambda paths, out: (
        import_polars().scan_parquet(paths).sink_parquet(out, compression="zstd", compression_level=1)
    ),
    ".csv": lambda paths, out: import_polars().scan_parquet(paths).sink_csv(out),
    ".json": _json,
}
