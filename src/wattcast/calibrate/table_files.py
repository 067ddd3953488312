"""Find public kernel tables below files and folders, and tell what each of them times.

A table is recognised by its columns. Path or file name give system, engine and version:
``SYSTEM.ENGINE-VERSION.TABLE.csv`` or ``SYSTEM/.../ENGINE/VERSION/TABLE.parquet``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from wattcast.calibrate.kit_files import is_kit
from wattcast.calibrate.other_tables import OTHER_TABLES
from wattcast.core.errors import (
    BadInput,
    UnknownName,
    WattcastError,
    bad_value,
    check_names,
)
from wattcast.core.regular_files import check_regular
from wattcast.core.row_tables import catch_panics, import_polars
from wattcast.hardware import Gpu, load_gpu
from wattcast.hardware.catalogue_reader import strip_board
from wattcast.options.setting_options import ENGINES

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".csv", ".csv.gz", ".txt", ".parquet")
_DOTTED_NAME = re.compile(r"(?P<system>[^.]+)\.(?P<engine>[a-z]+)-(?P<version>.+)\.(?P<table>\w+)$")

_INFERRED_ROWS = 1000  # from which the types of columns are told


@dataclass(frozen=True)
class TableFile:
    """One table: where it lies, what it times, and on which system, engine and version."""

    path: Path
    table: str  # gemm, attention, experts
    system: str
    engine: str
    version: str
    sustained: bool  # it has a power column, so that runs were long
    trusted_power: bool
    columns: tuple[str, ...]
    # narrow products are kernels of an engine's own, and another engine's are meant
    half_only: bool = False
    host_bound_ms: float = 0.0  # below which fp8_block products of vLLM say how fast the host is


def find_tables(
    paths: Sequence[str | Path],
    gpu: Gpu,
    engine: str | None = None,
) -> tuple[list[TableFile], list[str]]:
    """Find the tables of a GPU below files and folders: the newest version of each engine, or of
    the one that is named, and notes on the rest.
    """
    tables: list[TableFile] = []
    notes: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise bad_value("table", "an existing file or folder", str(path))
        if is_kernel_database(path):
            continue
        if path.is_dir():
            tables += _find_in_folder(path, gpu)
        else:
            tables += _find_file(path, gpu, notes)
    if engine is not None:
        check_names("engine", engine, ENGINES)
        tables = [table for table in tables if table.engine == engine]
    return _choose_engines(tables, notes), notes


def _find_in_folder(folder: Path, gpu: Gpu) -> list[TableFile]:
    """Find the tables of a GPU below a folder; those of other systems are passed over unread."""
    tables = []
    name = strip_board(gpu.name)
    find_name = cache(system_name)
    for path in sorted(folder.rglob("*")):
        if not path.name.endswith(SUFFIXES):
            continue
        if name not in map(find_name, _list_possible_systems(path)):
            continue
        file = _identify_table(path)
        if file is not None and system_name(file.system) == name:
            tables.append(file)
    return tables


def _list_possible_systems(path: Path) -> tuple[str, ...]:
    """Return the systems of which a file may be, by its name and folders; columns decide."""
    stem = _strip_suffix(path)
    dotted = _DOTTED_NAME.match(stem)
    if dotted is not None:
        return (dotted["system"],)
    by_folders, _, _ = _identify_folders(path.parts[:-1])
    return stem.partition(".")[0], by_folders


def _find_file(
    path: Path,
    gpu: Gpu,
    notes: list[str],
) -> list[TableFile]:
    """Return a table that was named, which has to be of the GPU or of no system that it names."""
    file = _identify_table(path)
    if file is None:
        notes.append(f"{path.name}: columns of no known table; passed over.")
        return []
    if system_name(file.system) not in ("", strip_board(gpu.name)):
        raise bad_value("table", f"one of the {gpu.name}", f"{path.name} of {file.system}")
    return [file]


def _choose_engines(tables: Sequence[TableFile], notes: list[str]) -> list[TableFile]:
    """Return the newest version of each engine's tables; of attention and experts, those of one
    engine alone.
    """
    engine_of: dict[str, str] = {}  # the engine that a kind of table is taken from
    for file in sorted(tables, key=lambda file: _rank_engine(file.engine)):
        engine_of.setdefault(file.table, file.engine)
    chosen = []
    for file in tables:
        newest = _newest_version(file, tables)
        engine = engine_of[file.table]
        is_other = file.engine != engine
        if is_other and file.table != "gemm":
            notes.append(
                f"{file.table} of {file.engine}: a bundle means one engine's kernels, {engine}'s."
            )
        elif file.version == newest:
            chosen.append(replace(file, half_only=is_other))
        else:
            notes.append(f"{file.engine} {file.version}: {newest} is newer; passed over.")
    return chosen


def _rank_engine(engine: str) -> int:
    return _ENGINES.index(engine) if engine in _ENGINES else len(_ENGINES)


def _newest_version(file: TableFile, tables: Sequence[TableFile]) -> str:
    """Return the newest version among the tables of the same kind and engine."""
    kind = (file.table, file.engine, file.sustained)
    rivals = [other for other in tables if (other.table, other.engine, other.sustained) == kind]
    return max(rivals, key=lambda rival: version_key(rival.version)).version


def system_name(system: str) -> str:
    """Return the catalogue's name of a table's system; empty where it has none."""
    words = system.split("_")
    shortened = ["-".join(words[:count]) for count in range(len(words), 0, -1)]
    for name in (system, *shortened) if system else ():
        try:
            return load_gpu(name).name
        except (UnknownName, BadInput):
            continue
    return ""


def version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Return a key under which versions sort: numbers by value, a release after its candidates."""
    parts = re.findall(r"\d+|[a-z]+", version.lower())
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in parts)


_TABLES = {
    "gemm": {"gemm_dtype", "m", "n", "k", "latency"},
    "attention": {
        "attn_dtype",
        "kv_cache_dtype",
        "batch_size",
        "isl",
        "num_heads",
        "head_dim",
        "step",
        "latency",
    },
    "experts": {
        "moe_dtype",
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "latency",
    },
}
# in the order in which one is taken for attention and experts
_ENGINES = ("vllm", "trtllm", "sglang", "nccl", "aiter")


def _identify_table(path: Path) -> TableFile | None:
    """Return what a file is by its columns and its name; None where its columns are of no table."""
    columns = tuple(scan_table(path).collect_schema().names())
    required = {**_TABLES, **{name: table.columns for name, table in OTHER_TABLES.items()}}
    kinds = [name for name, wanted in required.items() if wanted <= set(columns)]
    if not kinds:
        return None
    stem = _strip_suffix(path)
    dotted = _DOTTED_NAME.match(stem)
    if dotted is not None:
        system = dotted["system"]
        engine = dotted["engine"]
        version = dotted["version"]
    elif kinds[0] in OTHER_TABLES:
        system = stem.partition(".")[0]
        engine = OTHER_TABLES[kinds[0]].engine
        version = OTHER_TABLES[kinds[0]].version
    else:
        system, engine, version = _identify_folders(path.parts[:-1])
    sustained = "power" in columns
    return TableFile(
        path=path,
        table=kinds[0],
        system=system,
        engine=engine,
        version=version,
        sustained=sustained,
        trusted_power=sustained and "power" in stem.rpartition(".")[2],
        columns=columns,
    )


def _strip_suffix(path: Path) -> str:
    """Return the name of a table's file without its suffix, of which a compressed one has two."""
    return Path(path.name.removesuffix(".gz")).stem


def _identify_folders(folders: Sequence[str]) -> tuple[str, str, str]:
    """Return system, engine and version by the names of folders, SYSTEM/.../ENGINE/VERSION."""
    places = [place for place, folder in enumerate(folders) if folder.lower() in _ENGINES]
    engine = ""
    version = ""
    above = list(folders)
    if places:
        place = places[0]
        engine = folders[place].lower()
        above = list(folders[:place])
        if place + 1 < len(folders):
            version = folders[place + 1]
    systems = [folder for folder in reversed(above) if system_name(folder)]
    return (systems[0] if systems else ""), engine, version


def scan_table(path: Path) -> pl.LazyFrame:
    """Open a table lazily; its columns are read, its rows are not."""
    polars = import_polars()
    check_regular(path)
    frame: pl.LazyFrame
    try:
        if path.suffix == ".parquet":
            frame = polars.scan_parquet(path)
        else:
            frame = polars.scan_csv(path, infer_schema_length=_INFERRED_ROWS)
        with catch_panics():
            frame.collect_schema()
    except (polars.exceptions.PolarsError, OSError) as error:
        raise refuse_unreadable(path, error) from None
    return frame


def is_kernel_database(path: Path) -> bool:
    """Whether a folder has kernel rows of our own, or a card's kit."""
    if is_kit(path):
        return True
    return path.is_dir() and ((path / "rows.parquet").exists() or any(path.glob("*.jsonl")))


def refuse_unreadable(path: Path, error: Exception) -> WattcastError:
    """Return the error that names a table which cannot be read."""
    return bad_value(str(path), "a table as CSV or Parquet", str(error).splitlines()[0])
