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

import zlib
from collections import Counter
from collections.abc import (
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
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.calibrate.kernel_rows import (
    PLANNED,
    ROW_NUMBERS,
    KernelRows,
    load_kernel_rows,
    shape_name,
)
from wattcast.calibrate.kit_files import is_kit, read_kit_rows
from wattcast.calibrate.other_tables import OTHER_TABLES, TableSample
from wattcast.calibrate.table_coefficients import TABLE
from wattcast.calibrate.table_files import (
    TableFile,
    find_tables,
    is_kernel_database,
    refuse_unreadable,
    scan_table,
)
from wattcast.calibrate.table_operators import make_sample
from wattcast.core.arrays import (
    Array,
    Mask,
    sweep_values,
)
from wattcast.core.errors import BadInput
from wattcast.core.row_tables import catch_panics
from wattcast.hardware import Gpu
from wattcast.workload import engine_operators
from wattcast.workload.operator_base import Operator

_FNV_START, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # hash of Fowler, Noll and Vo
_QUANTIZED_BYTE = 3.0  # of an input that is read as a half and written in fp8
MOST_ROWS = 700  # of a table, a number format and a band of latency
# of a row with watts, from the top clock on; shorter where 3,000 replays take less, which is not
# counted
RUN_S = 1.0


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

    >>> from wattcast.core import Dtype
    >>> from wattcast.workload.operator_types import Linear
    >>> held_out([Linear(m, 512, 512, dtype=Dtype.BF16) for m in (6, 7, 8, 9, 10, 12)]).tolist()
    [False, True, False, True, False, False]
    """
    return np.asarray(_hash_sizes(ops) % TABLE.held_out_parts == 0)


def halve_shapes(ops: Iterable[Operator]) -> Mask:
    """Return which operators are in the second of two halves by shape, of rows that are fitted to.

    >>> from wattcast.core import Dtype
    >>> from wattcast.workload.operator_types import Linear
    >>> halve_shapes([Linear(m, 512, 512, dtype=Dtype.BF16) for m in (6, 8, 10, 12)]).tolist()
    [False, False, True, True]
    """
    return np.asarray(_hash_sizes(ops) // TABLE.held_out_parts % 2 == 1)


def _hash_sizes(ops: Iterable[Operator]) -> npt.NDArray[np.int64]:
    """Return the crc32 of the sizes of each operator."""
    return np.array([zlib.crc32(_name_sizes(op).encode()) for op in ops], dtype=np.int64)


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
        if is_kernel_database(path):
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
    return replace(join_tables(parts), notes=tuple(dict.fromkeys(notes)))


def join_tables(parts: Sequence[TableRows]) -> TableRows:
    """Join the rows of several tables into one."""
    return TableRows(
        rows=_join_rows([part.rows for part in parts]),
        beside=tuple(ops for part in parts for ops in part.beside),
        engine=tuple(engine for part in parts for engine in part.engine),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
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
        raise refuse_unreadable(file.path, error) from None


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
    samples: list[TableSample] = []
    figures: list[tuple[float, float, float]] = []  # latency, power, clock
    skipped: Counter[str] = Counter()
    for plain in _draw_rows(file, most):
        sample = make_sample(plain, file, gpu)
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
        ops=tuple(sample.op for sample in samples),
        conditions=tuple(sample.condition for sample in samples),
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
    beside = tuple(sample.beside for sample in samples)
    notes = tuple(f"{file.path.name}: {n} rows passed over: {why}." for why, n in skipped.items())
    return TableRows(rows, beside, (file.engine,) * count, notes)


def _find_host_floor_ms(file: TableFile) -> float:
    """Return the latency below which a table's fp8_block products may be bound by the host."""
    import polars as pl

    m, n, k = (pl.col(name).cast(pl.Float64) for name in "mnk")
    flop = 2.0 * m * n * k
    moved_byte = n * k + _QUANTIZED_BYTE * m * k + 2.0 * m * n
    is_tiny = (flop < TABLE.host_bound_work_flop) & (moved_byte < TABLE.host_bound_size_byte)
    timed = pl.col("latency") > 0
    tiny = scan_table(file.path).filter(timed & is_tiny & (pl.col("gemm_dtype") == "fp8_block"))
    quantile = pl.col("latency").quantile(TABLE.host_bound_quantile)
    floor_ms = tiny.select(quantile).collect(engine="streaming").item()
    return max(1e3 * TABLE.least_host_bound_s, TABLE.host_bound_margin * (floor_ms or 0.0))


def _draw_rows(file: TableFile, most: int) -> Iterator[Mapping[str, Any]]:
    """Yield up to ``most`` rows of each format and band of latency, chosen by a hash of the
    shape.
    """
    import polars as pl

    shape, formats = _list_drawing_columns(file)
    # FNV-1a over whole numbers
    shape_hash = pl.lit(_FNV_START, dtype=pl.UInt64)
    prime = pl.lit(_FNV_PRIME, dtype=pl.UInt64)
    for name in shape:
        shape_hash = (shape_hash ^ pl.col(name).fill_null(0).cast(pl.UInt64)) * prime
    band = sum((pl.col("latency") >= edge).cast(pl.Int8) for edge in TABLE.bands_ms)
    table = scan_table(file.path)
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
    uncapped_w = TABLE.uncapped_share * float(plain.get("power_limit") or 0.0)
    clock_hz = float(sweep_values(gpu.clocks.max_hz)) if power_w < uncapped_w else np.nan
    return float(plain["latency"]) * 1e-3, power_w, clock_hz


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
