"""Read public kernel tables, the format of NVIDIA's aiconfigurator, as rows that the kernel fit
takes.

A table is CSV (also called ``.txt``, or compressed as ``.csv.gz``) or Parquet and is recognised by
its columns: products (``gemm_dtype``, m, n, k), attention (``attn_dtype``, ``batch_size``, ``isl``,
``step`` ...) and experts (``moe_dtype`` ...). Latency is in milliseconds. Path or file name give
system, engine and version: ``SYSTEM.ENGINE-VERSION.TABLE.csv`` or
``SYSTEM/.../ENGINE/VERSION/TABLE.parquet``. Files are scanned lazily and thinned while they stream,
so that the full database of 24 million rows takes memory for a few thousand.

Tables without a power column time a few replays: bursts at the top clock, which the governor has no
time to lower. Tables with one run for a second (``RUN_S``) and count as sustained. Watts are read
from ``gemm_power`` tables alone."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.calibrate.kernel_rows import (
    PLANNED,
    ROW_NUMBERS,
    KernelRows,
    load_kernel_rows,
    shape_name,
)
from wattcast.calibrate.kit_files import is_kit, read_kit_rows
from wattcast.calibrate.other_tables import OTHER_TABLES, place_weights
from wattcast.core.arrays import (
    Array,
    Mask,
    sweep_values,
)
from wattcast.core.errors import (
    BadInput,
    UnknownName,
    WattcastError,
    bad_value,
    check_names,
)
from wattcast.core.regular_files import check_regular
from wattcast.core.row_tables import catch_panics, import_polars
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu, load_gpu
from wattcast.hardware.catalogue_reader import strip_board
from wattcast.kernels import RunCondition
from wattcast.kernels.families.engine.fused_experts import has_tuned_tiles
from wattcast.options.setting_options import ENGINES
from wattcast.workload import engine_operators, engine_row_operators
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Linear

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".csv", ".csv.gz", ".txt", ".parquet")
MOST_ROWS = 700  # of a table, a number format and a band of latency
BANDS_MS = (0.02, 0.1)  # between which rows are drawn in equal numbers
UNCAPPED_SHARE = 0.92  # of the power limit, below which a card runs at its top clock
HELD_OUT_PARTS = 5  # one shape in five is never fitted to
# of a row with watts, from the top clock on; shorter where 3,000 replays take less, which is not
# counted
RUN_S = 1.0
# that the collector's products go round: weights come from device memory if these outgrow L2
WEIGHT_COPIES = 6


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


@dataclass(frozen=True)
class TableRows:
    """Rows of tables, with the operators that each was timed together with, and what was left out
    and why.
    """

    rows: KernelRows
    beside: tuple[tuple[Operator, ...], ...]  # operators inside the latency besides the row's own
    engine: tuple[str, ...]
    notes: tuple[str, ...]

    def select_rows(self, mask: Mask) -> TableRows:
        """Return the rows of a mask."""
        places = np.flatnonzero(mask).tolist()
        beside = tuple(self.beside[place] for place in places)
        engine = tuple(self.engine[place] for place in places)
        return TableRows(self.rows.select_rows(mask), beside, engine, self.notes)


def held_out(ops: Iterable[Operator]) -> Mask:
    """Return which operators are held out of every fit: one in five, by the crc32 of the sizes
    alone.

    All formats, routings, windows and libraries of a shape are held out together.

    >>> held_out([Linear(m, 512, 512, dtype=Dtype.BF16) for m in (6, 7, 8, 9, 10, 12)]).tolist()
    [False, True, False, True, False, False]
    """
    codes = [zlib.crc32(_name_sizes(op).encode()) for op in ops]
    return np.asarray(np.array(codes, dtype=np.int64) % HELD_OUT_PARTS == 0)


def _name_sizes(op: Operator) -> str:
    """Return the sizes of an operator, by which it is held out."""
    if isinstance(op, engine_operators.FusedExperts):
        # tokens follow the routing where experts are on several GPUs
        return f"{op.elsewhere or op.picks} {op.hidden} {op.intermediate} {op.experts}"
    names = ("m", "n", "k", "groups", "heads", "kv_heads", "head_dim")
    sizes = [getattr(op, name) for name in names if hasattr(op, name)]
    return str(sizes or shape_name(op))


def read_tables(
    paths: Sequence[str | Path],
    gpu: Gpu,
    most: int = MOST_ROWS,
    engine: str | None = None,
) -> TableRows:
    """Read tables of ``gpu``, or kernel rows of our own, from files and folders.

    Of each engine the newest version is taken; tables of other systems in a folder are passed over,
    and those of other engines where one is named.
    """
    files, notes = find_tables(paths, gpu, engine)
    parts = [_read_whole_table(file, gpu, most) for file in files]
    for path in map(Path, paths):
        if _is_kernel_database(path):
            own_rows = read_kit_rows(path) if is_kit(path) else load_kernel_rows(path)
            no_engines = ("",) * len(own_rows)
            parts.append(TableRows(own_rows, ((),) * len(own_rows), no_engines, ()))
    for part in parts:
        notes += part.notes
    if not any(len(part.rows) for part in parts):
        places = ", ".join(str(path) for path in paths)
        maker = f" by {engine}" if engine else ""
        raise BadInput(
            f"no kernel table of the {gpu.name}{maker} in {places}. Wanted: CSV or Parquet "
            "files with "
            "columns such as gemm_dtype, m, n, k, latency, named SYSTEM.ENGINE-VERSION.TABLE.csv "
            "or lying in folders of those names, or a folder with rows.parquet of our own. "
            f"{' '.join(notes)}"
        )
    return TableRows(
        rows=_join_rows([part.rows for part in parts]),
        beside=tuple(ops for part in parts for ops in part.beside),
        engine=tuple(engine for part in parts for engine in part.engine),
        notes=tuple(dict.fromkeys(notes)),
    )


def _read_whole_table(
    file: TableFile,
    gpu: Gpu,
    most: int,
) -> TableRows:
    """Read a table; one that is damaged is refused by name."""
    from polars.exceptions import PolarsError  # which is there, since tables were found

    try:
        with catch_panics():
            return _read_table(file, gpu, most)
    except (PolarsError, OSError) as error:
        raise _unreadable_table(file.path, error) from None


def _unreadable_table(path: Path, error: Exception) -> WattcastError:
    return bad_value(str(path), "a table as CSV or Parquet", str(error).splitlines()[0])


def _is_kernel_database(path: Path) -> bool:
    if is_kit(path):
        return True
    return path.is_dir() and ((path / "rows.parquet").exists() or any(path.glob("*.jsonl")))


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
        if _is_kernel_database(path):
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
    """Find the tables of a GPU below a folder; those of other systems are passed over."""
    tables = []
    for path in sorted(folder.rglob("*")):
        file = _identify_table(path) if path.name.endswith(SUFFIXES) else None
        if file is not None and system_name(file.system) == strip_board(gpu.name):
            tables.append(file)
    return tables


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
    return max(rivals, key=lambda rival: _version_key(rival.version)).version


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


def _version_key(version: str) -> tuple[tuple[int, str], ...]:
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
    columns = tuple(_scan_table(path).collect_schema().names())
    required = {**_TABLES, **{name: table.columns for name, table in OTHER_TABLES.items()}}
    kinds = [name for name, wanted in required.items() if wanted <= set(columns)]
    if not kinds:
        return None
    pattern = r"(?P<system>[^.]+)\.(?P<engine>[a-z]+)-(?P<version>.+)\.(?P<table>\w+)$"
    stem = _strip_suffix(path)
    dotted = re.match(pattern, stem)
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


def _scan_table(path: Path) -> pl.LazyFrame:
    polars = import_polars()
    check_regular(path)
    frame: pl.LazyFrame
    try:
        if path.suffix == ".parquet":
            frame = polars.scan_parquet(path)
        else:
            frame = polars.scan_csv(path, infer_schema_length=1000)
        with catch_panics():
            frame.collect_schema()
    except (polars.exceptions.PolarsError, OSError) as error:
        raise _unreadable_table(path, error) from None
    return frame


_SHAPE = {
    "gemm": ("m", "n", "k"),
    "attention": ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "step"),
    "experts": (
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "moe_tp_size",
        "moe_ep_size",
    ),
}
_FORMATS = {
    "gemm": ("gemm_dtype",),
    "attention": ("attn_dtype", "kv_cache_dtype"),
    "experts": ("moe_dtype",),
}


def _read_table(
    file: TableFile,
    gpu: Gpu,
    most: int,
) -> TableRows:
    """Read one table, thinned to ``most`` rows of each format and band of latency, chosen by a hash
    of the shape.
    """
    if file.table == "gemm" and file.engine == "vllm":
        file = replace(file, host_bound_ms=_find_host_floor_ms(file))
    samples: list[_Sample] = []
    figures: list[tuple[float, float, float]] = []  # latency, power, clock
    skipped: Counter[str] = Counter()
    for plain in _draw_rows(file, most):
        sample = _make_sample(plain, file, gpu)
        if isinstance(sample, str):
            skipped[sample] += 1
        else:
            samples.append(sample)
            figures.append(_read_figures(plain, file, gpu))

    count = len(samples)
    number: dict[str, Array] = {name: np.full(count, np.nan) for name in ROW_NUMBERS}
    columns = np.array(figures).reshape(count, 3).T
    number["latency_s"], number["power_w"], number["sm_clock_hz"] = columns
    rows = KernelRows(
        kind=("sustained" if file.sustained else "burst",) * count,
        ops=tuple(op for op, _, _ in samples),
        conditions=tuple(condition for _, condition, _ in samples),
        data=("random",) * count,
        spec=("",) * count,
        repeat=np.zeros(count, dtype=np.int64),
        names=((),) * count,
        blocks=((),) * count,
        uuid=("",) * count,
        run=("",) * count,
        chosen=(PLANNED,) * count,
        number=number,
        fit=np.ones(count, dtype=bool),
        source=f"{file.engine} {file.version}",
        card=file.system,
    )
    beside = tuple(ops for _, _, ops in samples)
    notes = tuple(f"{file.path.name}: {n} rows passed over: {why}." for why, n in skipped.items())
    return TableRows(rows, beside, (file.engine,) * count, notes)


def _make_sample(
    plain: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> _Sample | str:
    """Make the operator of a row, or say why it cannot be made."""
    if file.table in OTHER_TABLES:
        return OTHER_TABLES[file.table].make(plain, gpu)
    return _MAKERS[file.table](plain, file, gpu)


def _find_host_floor_ms(file: TableFile) -> float:
    """Return the latency below which a table's fp8_block products may be bound by the host."""
    import polars as pl

    m, n, k = (pl.col(name).cast(pl.Float64) for name in "mnk")
    is_tiny = (2.0 * m * n * k < HOST_BOUND_FLOP) & (
        n * k + 3.0 * m * k + 2.0 * m * n < HOST_BOUND_BYTE
    )
    timed = pl.col("latency") > 0
    tiny = _scan_table(file.path).filter(timed & is_tiny & (pl.col("gemm_dtype") == "fp8_block"))
    quantile = pl.col("latency").quantile(HOST_BOUND_QUANTILE)
    floor_ms = tiny.select(quantile).collect(engine="streaming").item()
    return max(HOST_BOUND_MS, HOST_BOUND_MARGIN * (floor_ms or 0.0))


def _draw_rows(file: TableFile, most: int) -> Iterator[Mapping[str, Any]]:
    """Yield up to ``most`` rows of each format and band of latency, chosen by a hash of the
    shape.
    """
    import polars as pl

    shape, formats = _list_drawing_columns(file)
    # FNV-1a over whole numbers
    shape_hash = pl.lit(0xCBF29CE484222325, dtype=pl.UInt64)
    prime = pl.lit(0x100000001B3, dtype=pl.UInt64)
    for name in shape:
        shape_hash = (shape_hash ^ pl.col(name).fill_null(0).cast(pl.UInt64)) * prime
    band = sum((pl.col("latency") >= edge).cast(pl.Int8) for edge in BANDS_MS)
    table = _scan_table(file.path)
    if file.table in OTHER_TABLES:
        microseconds = pl.col(OTHER_TABLES[file.table].time)
        table = table.with_columns(latency=1e-3 * microseconds)
    timed = table.filter(pl.col("latency") > 0)
    frame = timed.with_columns(band=band, order=shape_hash // (1 << 20))

    groups = frame.select(*formats, "band").unique().collect(engine="streaming").rows()
    for group in sorted(groups):
        conditions = [
            pl.col(name) == value for name, value in zip((*formats, "band"), group, strict=True)
        ]
        drawn = frame.filter(*conditions).bottom_k(most, by="order")
        yield from drawn.collect(engine="streaming").iter_rows(named=True)


def _list_drawing_columns(file: TableFile) -> tuple[list[str], list[str]]:
    """Return the columns by whose hash rows are drawn, and those of each value of which as many."""
    if file.table in OTHER_TABLES:
        table = OTHER_TABLES[file.table]
        return list(table.shape), list(table.formats)
    shape = [name for name in _SHAPE[file.table] if name in file.columns]
    formats = [name for name in _FORMATS[file.table] if name in file.columns]
    return shape, formats


def _read_figures(
    plain: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> tuple[float, float, float]:
    """Return latency, power and clock of a row; the clock is known below the power limit alone."""
    power_w = float(plain["power"]) if file.trusted_power else np.nan
    uncapped_w = UNCAPPED_SHARE * float(plain.get("power_limit") or 0.0)
    clock_hz = float(sweep_values(gpu.clocks.max_hz)) if power_w < uncapped_w else np.nan
    return float(plain["latency"]) * 1e-3, power_w, clock_hz


# the operator of a row, how it ran, and what was timed beside it
_Sample = tuple[Operator, RunCondition, tuple[Operator, ...]]
_HALF = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}
# vLLM's fp8_block products are launched one by one. Those that take a card some microseconds show
# how long the host takes; rows that are not beyond nearly all of these may be bound by it.
HOST_BOUND_FLOP = 2e10
HOST_BOUND_BYTE = 5e7
HOST_BOUND_QUANTILE = 0.99
HOST_BOUND_MARGIN = 1.2
HOST_BOUND_MS = 0.3  # at the least


def _make_product(
    row: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> _Sample | str:
    """Make the product of a row, with the quantising of its input beside it where the format has
    one; or say why it cannot be made.
    """
    word = row["gemm_dtype"]
    m = int(row["m"])
    n = int(row["n"])
    k = int(row["k"])
    if word in _HALF:
        op: Operator = Linear(m, n, k, dtype=_HALF[word])
        return op, place_weights(op, m, k, WEIGHT_COPIES, gpu), ()
    if word in ("int8_wo", "int4_wo"):
        weights = word.partition("_")[0]
        group = 128 if weights == "int4" else -1
        op = engine_operators.WeightOnlyProduct(
            m, n, k, weights, group, kernel="cutlass", dtype=Dtype.BF16
        )
        return op, place_weights(op, m, k, 1, gpu), ()
    if file.half_only:
        return f"{word} of {file.engine}, since a bundle means one engine's kernels"
    tensor = gpu.pipes.tensor_flop_per_cycle
    if word == "fp8" and Dtype.FP8 in tensor:
        scales = "token" if file.engine == "vllm" else "tensor"
        op = engine_operators.ScaledProduct(m, n, k, scales, dtype=Dtype.FP8)
        quantising = engine_row_operators.Quantize(m, k, scales, dtype=Dtype.BF16)
        return op, place_weights(op, m, k, WEIGHT_COPIES, gpu), (quantising,)
    is_block = (word == "fp8_block" and Dtype.FP8 in tensor) or (
        word == "nvfp4" and Dtype.FP4 in tensor
    )
    if not is_block:
        return f"format {word}"
    if word == "fp8_block":
        if file.engine == "vllm" and row["latency"] < file.host_bound_ms:
            return "fp8_block bound by the host"
        kernel = "deepgemm" if "deepgemm" in str(row.get("kernel_source")).lower() else "cutlass"
        op = engine_operators.BlockProduct(m, n, k, kernel=kernel, dtype=Dtype.FP8)
    else:
        op = engine_operators.BlockProduct(
            m,
            n,
            k,
            kernel="cutlass",
            bit=4.5,
            dtype=Dtype.FP4,
        )
    mode = "fp4" if op.dtype is Dtype.FP4 else "block"
    quantising = engine_row_operators.Quantize(m, k, mode, dtype=Dtype.BF16)
    return op, place_weights(op, m, k, 1, gpu), (quantising,)


# Attention backends in an engine's tables besides the one that it takes by itself: SGLang takes
# FlashAttention 3 on Hopper and TensorRT-LLM's kernels on Blackwell (docs.sglang.ai, attention
# backend).
_OTHER_BACKENDS = {"sglang": ("triton", "flashinfer")}


def _make_attention(
    row: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> _Sample | str:
    """Make the attention of a row: prefill of ``isl`` tokens, or one token behind those cached,
    over paged caches.
    """
    cache = {**_HALF, "fp8": Dtype.FP8}.get(row["kv_cache_dtype"])
    able = cache in _HALF.values() or cache in gpu.pipes.tensor_flop_per_cycle
    source = str(row.get("kernel_source"))
    if file.engine in _OTHER_BACKENDS and source in _OTHER_BACKENDS[file.engine]:
        return f"attention of {source}, which {file.engine} does not take by itself"
    # the backends that an engine takes by itself multiply in fp8 where the cache is in fp8
    in_fp8 = row["attn_dtype"] == "fp8" and file.engine in _OTHER_BACKENDS
    if not (row["attn_dtype"] in _HALF or in_fp8) or cache is None or not able:
        return f"attention in {row['attn_dtype']} over a cache in {row['kv_cache_dtype']}"
    heads = int(row["num_heads"])
    dim = int(row["head_dim"])
    batch = int(row["batch_size"])
    length = int(row["isl"]) + int(row["step"] or 0)
    window = int(row.get("window_size") or 0)
    new = 1 if "generation" in file.path.name else int(row["isl"])
    kv_heads = int(row.get("num_key_value_heads") or 0) or heads
    if heads % kv_heads:
        return "heads that key heads do not divide"
    in_graph = batch * new <= engine_operators.GRAPH_TOKENS
    op = engine_operators.PagedAttention(
        heads,
        kv_heads,
        dim,
        ((batch, new, length),),
        cache,
        # even one that holds all: FlashAttention 2 runs a slower kernel then, 4 times on an L40S
        window=window,
        splits=engine_operators.GRAPH_SPLITS if in_graph else 0,
        bound=length,
        dtype=_HALF.get(row["attn_dtype"], Dtype.BF16),
    )
    writes = engine_row_operators.CacheWrite(
        batch * new, kv_heads * dim, 1, 1, kv_heads * dim, cache, dtype=op.dtype
    )
    return op, RunCondition(rotated="none"), (writes,)


# version of vLLM since which experts without tuned tiles have larger ones
LARGE_TILES = ((0, ""), (17, ""))
_EXPERTS = {  # format: weights, scales, arithmetic
    "bfloat16": ("bf16", "none", Dtype.BF16),
    "float16": ("fp16", "none", Dtype.FP16),
    "fp8": ("fp8", "tensor", Dtype.FP8),
    "fp8_block": ("fp8", "block", Dtype.FP8),
    "int4_wo": ("int4", "group", Dtype.BF16),
    "w4a16_mxfp4": ("fp4", "mx", Dtype.BF16),
}


def _make_experts(
    row: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> _Sample | str:
    """Make the mixture layer of a row, one GPU's share of its experts and of their width; or say
    why it cannot be made.
    """
    weights, scales, dtype = _EXPERTS.get(row["moe_dtype"], ("", "", Dtype.BF16))
    if not weights or dtype not in gpu.pipes.tensor_flop_per_cycle:
        return f"experts in {row['moe_dtype']}"
    source = str(row.get("kernel_source"))
    if "nongated" in source:
        return "experts without a gate"
    distribution = str(row.get("distribution") or "balanced")
    law = re.fullmatch(r"power_law_(\d+\.?\d*)", distribution)
    if law is None and distribution != "balanced":
        return f"experts routed by {distribution}"

    gpus = int(row.get("moe_ep_size") or 1)
    tokens = int(row["num_tokens"])
    every_expert = int(row["num_experts"])
    picks = int(row["topk"])
    experts = max(every_expert // gpus, 1)
    visits = picks / gpus
    if law is not None:
        # the busiest GPU is timed; exponents and loads were compared on rows that are fitted to
        visits *= busiest_load(every_expert, picks, gpus, _POPULARITY_EXPONENT * float(law[1]))
    top_k = min(max(round(visits), 1), experts)  # of a token's experts, those on this GPU
    inner = max(int(row["inter_size"]) // int(row.get("moe_tp_size") or 1), 1)

    libraries = [name for name in engine_operators.EXPERT_LIBRARIES if name in source]
    kernel = libraries[0] if libraries else "triton"
    is_old = file.engine == "vllm" and _version_key(file.version) < LARGE_TILES
    has_small_tiles = is_old and scales == "none" and kernel == "triton"
    if has_small_tiles and not has_tuned_tiles(experts, inner, "half", gpu.name):
        kernel = engine_operators.SMALL_TILES
    op = engine_operators.FusedExperts(
        tokens=max(round(tokens * visits / top_k), 1),
        experts=experts,
        top_k=top_k,
        hidden=int(row["hidden_size"]),
        intermediate=inner,
        weights=weights,
        scales=scales,
        routing="power" if law else "balanced",
        kernel=kernel,
        elsewhere=round(tokens * picks * (1.0 - 1.0 / gpus)),
        all_tokens=tokens,
        gpus=gpus,
        dtype=dtype,
    )
    return op, RunCondition(rotated="none"), ()


_POPULARITY_EXPONENT = 2.0 / 3.0  # of experts, over the exponent that a table names


def busiest_load(
    experts: int,
    top_k: int,
    gpus: int,
    exponent: float,
) -> float:
    """Return the visits to the busiest of ``gpus`` over the mean, for a power law and experts dealt
    at random.

    With the popularity w of the experts (rank^-exponent, mean 1) and n of N experts on a GPU, the
    busiest has either the most popular expert, w_1 + (n - 1)·(N - w_1)/(N - 1), or a draw of n that
    is the largest of G: n + √(2·ln G)·σ, σ² = var(w)·n·(N - n)/(N - 1). An expert gets each token
    once at most.

    >>> [round(busiest_load(128, 8, gpus, 0.75), 2) for gpus in (1, 16)]
    [1.0, 2.39]
    """
    weight = np.arange(1.0, experts + 1.0) ** -exponent
    weight /= weight.mean()
    on_gpu = max(experts // gpus, 1)
    other_experts = max(experts - 1, 1)
    with_popular = weight[0] + (on_gpu - 1) * (experts - weight[0]) / other_experts
    spread = weight.std() * (on_gpu * (experts - on_gpu) / other_experts) ** 0.5
    largest_draw = on_gpu + spread * (2.0 * np.log(gpus)) ** 0.5
    most = max(with_popular, largest_draw) / on_gpu
    return float(min(most, experts / top_k))


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], TableFile, Gpu], _Sample | str]] = {
    "gemm": _make_product,
    "attention": _make_attention,
    "experts": _make_experts,
}


def _join_rows(parts: Sequence[KernelRows]) -> KernelRows:
    """Join rows of several sources into one table."""
    if len(parts) == 1:
        return parts[0]

    columns: dict[str, Any] = {}
    for item in fields(KernelRows):
        values = [getattr(part, item.name) for part in parts]
        if item.name == "held_out":
            columns[item.name] = _join_held_out(parts)
        elif isinstance(values[0], tuple):
            columns[item.name] = tuple(chain.from_iterable(values))
        elif isinstance(values[0], str):
            columns[item.name] = ", ".join(dict.fromkeys(value for value in values if value))
        elif isinstance(values[0], dict):
            columns[item.name] = {
                name: np.concatenate([value[name] for value in values]) for name in values[0]
            }
        else:
            columns[item.name] = np.concatenate(values)
    return KernelRows(**columns)


def _join_held_out(parts: Sequence[KernelRows]) -> Mask | None:
    """Join which rows are held out; a source that names none has none."""
    if all(part.held_out is None for part in parts):
        return None
    masks = []
    for part in parts:
        mask = part.held_out
        masks.append(np.zeros(len(part), dtype=bool) if mask is None else mask)
    return np.concatenate(masks)
