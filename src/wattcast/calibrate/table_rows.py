"""Read public kernel tables, the format of NVIDIA's aiconfigurator, as rows that the kernel fit
takes.

A table is CSV (also called ``.txt``) or Parquet and is recognised by its columns: products
(``gemm_dtype``, m, n, k), attention (``attn_dtype``, ``batch_size``, ``isl``, ``step`` ...) and
experts (``moe_dtype`` ...). Latency is in milliseconds. Path or file name give system, engine and
version: ``SYSTEM.ENGINE-VERSION.TABLE.csv`` or ``SYSTEM/.../ENGINE/VERSION/TABLE.parquet``. Files
are scanned lazily and thinned while they stream, so that the full database of 24 million rows takes
memory for a few thousand.

Tables without a power column time a few replays: bursts at the top clock, which the governor has no
time to lower. Tables with one run for a second (``RUN_S``) and count as sustained. Watts are read
from ``gemm_power`` tables alone."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from wattcast.core.arrays import Array, Mask, sweep_values
from wattcast.core.errors import BadInput, UnknownName, bad_value
from wattcast.core.regular_files import check_regular
from wattcast.core.row_tables import catch_panics, import_polars
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu, load_gpu
from wattcast.hardware.catalogue_reader import strip_board
from wattcast.kernels import RunCondition
from wattcast.kernels.families.engine.fused_experts import has_tuned_tiles
from wattcast.workload import engine_operators, engine_row_operators
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Linear

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".csv", ".txt", ".parquet")
MOST_ROWS = 700  # of a table, a number format and a band of latency
BANDS_MS = (0.02, 0.1)  # between which rows are drawn in equal numbers
UNCAPPED_SHARE = 0.92  # of the power limit, below which a card runs at its top clock
HELD_OUT_PARTS = 5  # one shape in five is never fitted to
# of a row with watts, from the top clock on; shorter where 3,000 replays take less, which is not
# counted
RUN_S = 1.0
WEIGHT_COPIES = (
    6  # that the collector's products go round: weights come from device memory if these outgrow L2
)


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
    half_only: bool = (
        False  # narrow products are kernels of an engine's own, and another engine's are meant
    )


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
        at = np.flatnonzero(mask).tolist()
        beside = tuple(self.beside[i] for i in at)
        engine = tuple(self.engine[i] for i in at)
        return TableRows(self.rows.select_rows(mask), beside, engine, self.notes)


def held_out(ops: Iterable[Operator]) -> Mask:
    """Return which operators are held out of every fit: one in five, by the crc32 of the sizes
    alone.

    All formats, routings, windows and libraries of a shape are held out together.

    >>> held_out([Linear(m, 512, 512, dtype=Dtype.BF16) for m in (6, 7, 8, 9, 10, 12)]).tolist()
    [False, True, False, True, False, False]
    """
    return np.array(
        [zlib.crc32(_name_sizes(op).encode()) % HELD_OUT_PARTS == 0 for op in ops], dtype=bool
    )


def _name_sizes(op: Operator) -> str:
    if isinstance(
        op, engine_operators.FusedExperts
    ):  # tokens follow the routing where experts are on several GPUs
        return f"{op.elsewhere or op.picks} {op.hidden} {op.intermediate} {op.experts}"
    names = ("m", "n", "k", "groups", "heads", "kv_heads", "head_dim")
    return str([getattr(op, name) for name in names if hasattr(op, name)] or shape_name(op))


def read_tables(paths: Sequence[str | Path], gpu: Gpu, most: int = MOST_ROWS) -> TableRows:
    """Read tables of ``gpu``, or kernel rows of our own, from files and folders.

    Of each engine the newest version is taken; tables of other systems in a folder are passed over.
    """
    found, notes = find_tables(paths, gpu)
    parts = []
    for file in found:
        from polars.exceptions import PolarsError  # which is there, since tables were found

        try:
            with catch_panics():
                parts.append(_read_table(file, gpu, most))
        except (PolarsError, OSError) as error:
            raise bad_value(
                str(file.path), "a table as CSV or Parquet", str(error).splitlines()[0]
            ) from None
    for folder in filter(_is_kernel_database, map(Path, paths)):
        own = load_kernel_rows(folder)
        parts.append(TableRows(own, ((),) * len(own), ("",) * len(own), ()))
    notes += [note for part in parts for note in part.notes]
    if not any(len(part.rows) for part in parts):
        raise BadInput(
            f"no kernel table of the {gpu.name} in {', '.join(map(str, paths))}. Wanted: CSV or Parquet files with "
            "columns such as gemm_dtype, m, n, k, latency, named SYSTEM.ENGINE-VERSION.TABLE.csv or lying in folders "
            f"of those names, or a folder with rows.parquet of our own. {' '.join(notes)}"
        )
    return TableRows(
        _join_rows([part.rows for part in parts]),
        tuple(ops for part in parts for ops in part.beside),
        tuple(engine for part in parts for engine in part.engine),
        tuple(dict.fromkeys(notes)),
    )


def _is_kernel_database(path: Path) -> bool:
    return path.is_dir() and ((path / "rows.parquet").exists() or any(path.glob("*.jsonl")))


def find_tables(paths: Sequence[str | Path], gpu: Gpu) -> tuple[list[TableFile], list[str]]:
    """Find the tables of a GPU below files and folders: the newest version of each engine, and
    notes on the rest.
    """
    found: list[TableFile] = []
    notes: list[str] = []
    for given in map(Path, paths):
        if not given.exists():
            raise bad_value("table", "an existing file or folder", str(given))
        if _is_kernel_database(given):
            continue
        for path in (
            sorted(p for p in given.rglob("*") if p.suffix in SUFFIXES)
            if given.is_dir()
            else [given]
        ):
            file = _identify_table(path, given)
            if file is None:
                if not given.is_dir():
                    notes.append(f"{path.name}: columns of no known table; passed over.")
                continue
            system = _system_name(file.system)
            if system == strip_board(gpu.name) or (not system and not given.is_dir()):
                found.append(file)
            elif not given.is_dir():
                raise bad_value("table", f"one of the {gpu.name}", f"{path.name} of {file.system}")
    kept = []
    preferred = sorted(
        found, key=lambda f: _ENGINES.index(f.engine) if f.engine in _ENGINES else len(_ENGINES)
    )
    first = {file.table: file.engine for file in reversed(preferred)}
    for file in found:
        rivals = [
            f
            for f in found
            if (f.table, f.engine, f.sustained) == (file.table, file.engine, file.sustained)
        ]
        newest = max(rivals, key=lambda f: _version_key(f.version)).version
        other = file.engine != first[file.table]
        if other and file.table != "gemm":
            notes.append(
                f"{file.table} of {file.engine}: a bundle means one engine's kernels, {first[file.table]}'s."
            )
        elif file.version == newest:
            kept.append(replace(file, half_only=other))
        else:
            notes.append(f"{file.engine} {file.version}: {newest} is newer; passed over.")
    return kept, notes


def _system_name(system: str) -> str:
    """Return the catalogue's name of a table's system; empty where it has none."""
    spellings = (system, system.replace("_", "-"), system.partition("_")[0])
    for name in spellings if system else ():
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
_ENGINES = (
    "vllm",
    "trtllm",
    "sglang",
    "nccl",
)  # in the order in which one is taken for attention and experts


def _identify_table(path: Path, given: Path) -> TableFile | None:
    columns = tuple(_scan_table(path).collect_schema().names())
    table = next((name for name, wanted in _TABLES.items() if wanted <= set(columns)), None)
    if table is None:
        return None
    dotted = re.match(
        r"(?P<system>[^.]+)\.(?P<engine>[a-z]+)-(?P<version>.+)\.(?P<table>\w+)$", path.stem
    )
    if dotted:
        system = dotted["system"]
        engine = dotted["engine"]
        version = dotted["version"]
    else:
        folders = path.parts[:-1]
        place = next((i for i, part in enumerate(folders) if part.lower() in _ENGINES), None)
        engine = "" if place is None else folders[place].lower()
        version = folders[place + 1] if place is not None and place + 1 < len(folders) else ""
        named = [part for part in reversed(folders[:place]) if _system_name(part)]
        system = named[0] if named else ""
    sustained = "power" in columns
    trusted = sustained and "power" in path.stem.rpartition(".")[2]
    return TableFile(path, table, system, engine, version, sustained, trusted, columns)


def _scan_table(path: Path) -> pl.LazyFrame:
    polars = import_polars()
    check_regular(path)
    try:
        csv = path.suffix != ".parquet"
        frame: pl.LazyFrame = (
            polars.scan_csv(path, infer_schema_length=1000) if csv else polars.scan_parquet(path)
        )
        with catch_panics():
            frame.collect_schema()
    except (polars.exceptions.PolarsError, OSError) as error:
        raise bad_value(
            str(path), "a table as CSV or Parquet", str(error).splitlines()[0]
        ) from None
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


def _read_table(file: TableFile, gpu: Gpu, most: int) -> TableRows:
    """Read one table, thinned to ``most`` rows of each format and band of latency, chosen by a hash
    of the shape.
    """
    import polars as pl

    formats = [name for name in _FORMATS[file.table] if name in file.columns]
    shape = [name for name in _SHAPE[file.table] if name in file.columns]
    band = sum((pl.col("latency") >= edge).cast(pl.Int8) for edge in BANDS_MS)
    mixed = pl.lit(0xCBF29CE484222325, dtype=pl.UInt64)
    for name in shape:  # FNV-1a over whole numbers
        mixed = (mixed ^ pl.col(name).fill_null(0).cast(pl.UInt64)) * pl.lit(
            0x100000001B3, dtype=pl.UInt64
        )
    frame = (
        _scan_table(file.path)
        .filter(pl.col("latency") > 0)
        .with_columns(band=band, order=mixed // (1 << 20))
    )
    groups = frame.select(*formats, "band").unique().collect(engine="streaming").rows()
    made: list[tuple[Operator, RunCondition, tuple[Operator, ...]]] = []
    figures: list[tuple[float, float, float]] = []
    skipped: Counter[str] = Counter()
    for *words, place in sorted(groups):
        some = frame.filter(
            pl.col("band") == place, *(pl.col(n) == w for n, w in zip(formats, words, strict=True))
        )
        for plain in (
            some.bottom_k(most, by="order").collect(engine="streaming").iter_rows(named=True)
        ):
            row = _MAKERS[file.table](plain, file, gpu)
            if isinstance(row, str):
                skipped[row] += 1
                continue
            power_w = float(plain["power"]) if file.trusted_power else np.nan
            capped = not power_w < UNCAPPED_SHARE * float(plain.get("power_limit") or 0.0)
            clock_hz = (
                np.nan if capped else float(sweep_values(gpu.clocks.max_hz))
            )  # known below the power limit
            made.append(row)
            figures.append((float(plain["latency"]) * 1e-3, power_w, clock_hz))
    count = len(made)
    known = np.array(figures).reshape(count, 3).T
    number: dict[str, Array] = {name: np.full(count, np.nan) for name in ROW_NUMBERS}
    rows = KernelRows(
        kind=("sustained" if file.sustained else "burst",) * count,
        ops=tuple(op for op, _, _ in made),
        conditions=tuple(condition for _, condition, _ in made),
        data=("random",) * count,
        spec=("",) * count,
        repeat=np.zeros(count, dtype=np.int64),
        names=((),) * count,
        blocks=((),) * count,
        uuid=("",) * count,
        run=("",) * count,
        chosen=(PLANNED,) * count,
        number=number | dict(zip(("latency_s", "power_w", "sm_clock_hz"), known, strict=True)),
        fit=np.ones(count, dtype=bool),
        source=f"{file.engine} {file.version}",
        card=file.system,
    )
    notes = tuple(f"{file.path.name}: {n} rows passed over: {why}." for why, n in skipped.items())
    return TableRows(rows, tuple(beside for _, _, beside in made), (file.engine,) * count, notes)


_Made = tuple[Operator, RunCondition, tuple[Operator, ...]] | str  # text: why a row cannot be said
_HALF = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}
HOST_BOUND_MS = (
    0.3  # below which fp8_block products of vLLM, launched one by one, may be bound by the host
)


def _make_product(row: Mapping[str, Any], file: TableFile, gpu: Gpu) -> _Made:
    """Make the product of a row, with the quantising of its input beside it where the format has
    one.
    """
    word, (m, n, k) = row["gemm_dtype"], (int(row[name]) for name in "mnk")
    tensor = gpu.pipes.tensor_flop_per_cycle
    op: Operator
    beside: tuple[Operator, ...] = ()
    copies = WEIGHT_COPIES
    if word in _HALF:
        op = Linear(m, n, k, dtype=_HALF[word])
    elif file.half_only and word not in ("int8_wo", "int4_wo"):
        return f"{word} of {file.engine}, since a bundle means one engine's kernels"
    elif word == "fp8" and Dtype.FP8 in tensor:
        op = engine_operators.ScaledProduct(
            m, n, k, "token" if file.engine == "vllm" else "tensor", dtype=Dtype.FP8
        )
        beside = (engine_row_operators.Quantize(m, k, op.scales, dtype=Dtype.BF16),)
    elif word == "fp8_block" and Dtype.FP8 in tensor:
        if file.engine == "vllm" and row["latency"] < HOST_BOUND_MS:
            return "fp8_block bound by the host"
        kernel = "deepgemm" if "deepgemm" in str(row.get("kernel_source")).lower() else "cutlass"
        op = engine_operators.BlockProduct(m, n, k, kernel=kernel, dtype=Dtype.FP8)
        beside = (engine_row_operators.Quantize(m, k, "block", dtype=Dtype.BF16),)
        copies = 1
    elif word == "nvfp4" and Dtype.FP4 in tensor:
        op = engine_operators.BlockProduct(m, n, k, kernel="cutlass", bit=4.5, dtype=Dtype.FP4)
        beside = (engine_row_operators.Quantize(m, k, "block", dtype=Dtype.BF16),)
        copies = 1
    elif word in ("int8_wo", "int4_wo"):
        weights = word.partition("_")[0]
        group = 128 if weights == "int4" else -1
        op = engine_operators.WeightOnlyProduct(
            m, n, k, weights, group, kernel="cutlass", dtype=Dtype.BF16
        )
        copies = 1
    else:
        return f"format {word}"
    byte = op.read_byte - float(m) * k * op.dtype.byte
    l2_byte = 0.0 if gpu.l2.capacity_byte is None else float(sweep_values(gpu.l2.capacity_byte))
    # Weights come from device memory if the copies that the collector goes round outgrow L2. Beside
    # HBM it has two partitions, each of which keeps what its own SMs read (A100 whitepaper); beside
    # GDDR a slice
    # serves all SMs
    held_byte = l2_byte if gpu.memory.kind.startswith("GDDR") else 0.5 * l2_byte
    rotated = "none" if copies * byte <= held_byte else "weights"
    return op, RunCondition(rotated=rotated), beside


def _make_attention(row: Mapping[str, Any], file: TableFile, gpu: Gpu) -> _Made:
    """Make the attention of a row: prefill of ``isl`` tokens, or one token behind those cached,
    over paged caches.
    """
    cache = {**_HALF, "fp8": Dtype.FP8}.get(row["kv_cache_dtype"])
    able = cache in _HALF.values() or cache in gpu.pipes.tensor_flop_per_cycle
    if row["attn_dtype"] not in _HALF or cache is None or not able:
        return f"attention in {row['attn_dtype']} over a cache in {row['kv_cache_dtype']}"
    heads = int(row["num_heads"])
    dim = int(row["head_dim"])
    batch = int(row["batch_size"])
    length = int(row["isl"]) + int(row["step"] or 0)
    window = int(row.get("window_size") or 0)
    new = 1 if "generation" in file.path.stem else int(row["isl"])
    kv_heads = int(row.get("num_key_value_heads") or 0) or heads
    if heads % kv_heads:
        return "heads that key heads do not divide"
    op = engine_operators.PagedAttention(
        *(heads, kv_heads, dim, ((batch, new, length),), cache),
        # even one that holds all: FlashAttention 2 runs a slower kernel then, 4 times on an L40S
        window=window,
        splits=engine_operators.GRAPH_SPLITS if batch * new <= engine_operators.GRAPH_TOKENS else 0,
        bound=length,
        dtype=_HALF[row["attn_dtype"]],
    )
    writes = engine_row_operators.CacheWrite(
        batch * new, kv_heads * dim, 1, 1, kv_heads * dim, cache, dtype=op.dtype
    )
    return op, RunCondition(rotated="none"), (writes,)


LARGE_TILES = (
    (0, ""),
    (17, ""),
)  # version of vLLM since which experts without tuned tiles have larger ones
_EXPERTS = {  # format: weights, scales, arithmetic
    "bfloat16": ("bf16", "none", Dtype.BF16),
    "float16": ("fp16", "none", Dtype.FP16),
    "fp8": ("fp8", "tensor", Dtype.FP8),
    "fp8_block": ("fp8", "block", Dtype.FP8),
    "int4_wo": ("int4", "group", Dtype.BF16),
    "w4a16_mxfp4": ("fp4", "mx", Dtype.BF16),
}


def _make_experts(row: Mapping[str, Any], file: TableFile, gpu: Gpu) -> _Made:
    """Make the mixture layer of a row: one GPU's share of its experts and of their width."""
    weights, scales, dtype = _EXPERTS.get(row["moe_dtype"], ("", "", Dtype.BF16))
    if not weights or dtype not in gpu.pipes.tensor_flop_per_cycle:
        return f"experts in {row['moe_dtype']}"
    parallel = int(row.get("moe_ep_size") or 1)
    cut = int(row.get("moe_tp_size") or 1)
    source = str(row.get("kernel_source"))
    if "nongated" in source:
        return "experts without a gate"
    experts = max(int(row["num_experts"]) // parallel, 1)
    visits = int(row["topk"]) / parallel
    distribution = str(row.get("distribution") or "balanced")
    law = re.fullmatch(r"power_law_(\d+\.?\d*)", distribution)
    if (
        law
    ):  # the busiest GPU is timed; exponents and loads were compared on rows that are fitted to
        visits *= busiest_load(
            int(row["num_experts"]), int(row["topk"]), parallel, 2.0 / 3.0 * float(law[1])
        )
    elif distribution != "balanced":
        return f"experts routed by {distribution}"
    top_k = min(max(round(visits), 1), experts)  # of a token's experts, those on this GPU
    inner = max(int(row["inter_size"]) // cut, 1)
    kernel = next((name for name in engine_operators.EXPERT_LIBRARIES if name in source), "triton")
    old = file.engine == "vllm" and _version_key(file.version) < LARGE_TILES and scales == "none"
    if kernel == "triton" and old and not has_tuned_tiles(experts, inner, "half", gpu.name):
        kernel = engine_operators.SMALL_TILES
    op = engine_operators.FusedExperts(
        tokens=max(round(int(row["num_tokens"]) * visits / top_k), 1),
        experts=experts,
        top_k=top_k,
        hidden=int(row["hidden_size"]),
        intermediate=inner,
        weights=weights,
        scales=scales,
        routing="power" if law else "balanced",
        kernel=kernel,
        elsewhere=round(int(row["num_tokens"]) * int(row["topk"]) * (1.0 - 1.0 / parallel)),
        all_tokens=int(row["num_tokens"]),
        gpus=parallel,
        dtype=dtype,
    )
    return op, RunCondition(rotated="none"), ()


def busiest_load(experts: int, top_k: int, gpus: int, exponent: float) -> float:
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
    held = max(experts // gpus, 1)
    others = max(experts - 1, 1)
    popular = weight[0] + (held - 1) * (experts - weight[0]) / others
    spread = weight.std() * (held * (experts - held) / others) ** 0.5
    most = max(popular, held + spread * (2.0 * np.log(gpus)) ** 0.5) / held
    return float(min(most, experts / top_k))


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], TableFile, Gpu], _Made]] = {
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
        if isinstance(values[0], tuple):
            columns[item.name] = tuple(x for value in values for x in value)
        elif isinstance(values[0], dict):
            columns[item.name] = {
                name: np.concatenate([v[name] for v in values]) for name in values[0]
            }
        elif isinstance(values[0], str):
            columns[item.name] = ", ".join(dict.fromkeys(v for v in values if v))
        elif any(
            value is not None for value in values
        ):  # a source that names no held-out rows has none
            columns[item.name] = np.concatenate(
                [
                    np.zeros(len(part), dtype=bool) if v is None else v
                    for part, v in zip(parts, values, strict=True)
                ]
            )
    return KernelRows(**columns)
