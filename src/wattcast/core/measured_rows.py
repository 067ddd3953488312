"""Rows that were measured, and the files that hold them: JSON Lines while measuring, Parquet to
keep.

A row says what ran (operator and shape under the field names of the operator's dataclass), how it
was run (kind, data, rotation, duty) and what was seen. A run says on which card and with which
libraries; every row names its run. Appending a row never rewrites another, so a crash loses at most
the line that was being written.

Operators beyond those that the campaign builds in register here how they are called in PyTorch.
Only the standard library is needed: this module also runs on a bare GPU node."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from wattcast.core import files
from wattcast.core.column_ranges import check_table, check_values
from wattcast.core.errors import (
    BadInput,
    bad_value,
    check_names,
    clip_text,
    import_extra,
    unknown_name,
)
from wattcast.core.regular_files import open_regular

Plain = dict[str, Any]
T = TypeVar("T", bound="KernelRow | RunInfo | NameRow | ModelRow | ModelKernels | ChainRow")


class RowKind(StrEnum):
    """How a row was measured; see docs/method/measuring.md."""

    BURST = "burst"  # tens of milliseconds after a pause: latency at the top set clock
    SUSTAINED = "sustained"  # governor settled: power, clock and latency together
    DUTY = "duty"  # bursts with idle gaps: power while on, above the cap
    CLOCK = "clock"  # effective clock by a spin kernel beside the load
    IDLE = "idle"  # a context open, no work
    CHAIN = "chain"  # a burst of several operators one after another, kept in a table of its own


@dataclass(frozen=True)
class RunInfo:
    """One run of the measuring code: which card, which libraries, when."""

    run: str
    date: str  # UTC, ISO 8601
    card_name: str = ""
    card_uuid: str = ""
    card_serial: str = ""
    card_board: str = ""  # part number
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    cublas: str = ""
    cudnn: str = ""
    nvml: str = ""
    wattcast: str = ""
    power_limit_w: float | None = None
    sm_count: int | None = None
    l2_byte: int | None = None
    top_clock_hz: float | None = None


@dataclass(frozen=True, kw_only=True)
class TimedRow:
    """What rows of operators, chains and models have in common. ``None`` means not measured, never
    zero.
    """

    run: str = ""
    date: str = ""
    latency_s: float | None = None  # of one call, chain or iteration
    latency_spread_s: float | None = None  # standard deviation over replays
    sm_clock_hz: float | None = None  # as NVML reports it, mean over the window
    temperature_c: float | None = None
    flags: tuple[str, ...] = ()  # why a careful reader may leave this row out
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class PoweredRow(TimedRow):
    """What rows with power have in common: those of operators and of models."""

    data: str = "random"
    duration_s: float | None = None  # length of the window the figures come from
    power_w: float | None = None
    power_spread_w: float | None = None  # standard deviation over counter ticks
    ticks: int | None = None  # counter tick intervals inside the window
    memory_power_w: float | None = None
    sm_clock_spread_hz: float | None = None
    effective_clock_hz: float | None = None
    throttle: tuple[str, ...] = ()  # clock event reasons seen in the window


@dataclass(frozen=True)
class KernelRow(PoweredRow):
    """One measurement of one operator, back to back in a CUDA graph."""

    id: str  # of kind, operator, data, duty and repeat; the same in every run
    kind: str
    family: str
    operator: Plain  # {"op": "linear", "m": ..., "dtype": "bf16"}: the workload-file form
    layout: str = ""
    detail: Plain = field(
        default_factory=dict
    )  # what the operator form leaves open (backend, two-dimensional sizes)
    rotated: str = "none"  # none | weights | all: which operands change from copy to copy
    sets: int = 1  # distinct operand sets the copies walk through
    footprint_byte: int | None = None  # bytes of operands and outputs all copies touch
    # plan: at random; models: an operator of real models; suggested: by expected uncertainty
    chosen: str = "plan"
    repeat: int = 0
    copies: int | None = None  # calls in the captured graph
    replays: int | None = None
    duty: float | None = None  # share of time busy, as measured
    busy_s: float | None = None
    period_s: float | None = None
    idle_power_w: float | None = None
    on_power_w: float | None = None
    settled_power_w: float | None = (
        None  # capped rows: mean over at least one cycle of the governor
    )
    settled_clock_hz: float | None = None
    settled_ticks: int | None = None


@dataclass(frozen=True)
class NameRow:
    """Kernels one call of an operator launches, in order, as the profiler names them."""

    spec: str
    names: tuple[str, ...] = ()
    grids: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    kernel_s: tuple[float, ...] = ()  # each kernel's own duration in one eager call
    shared_byte: tuple[int, ...] = ()
    registers: tuple[int, ...] = ()
    run: str = ""
    error: str = ""


@dataclass(frozen=True)
class ModelRow(PoweredRow):
    """One whole model measured; the first fields are the options of ``wattcast predict``."""

    id: str
    model: str
    phase: str
    batch: int
    dtype: str
    attention: str
    stack: str
    graph: bool  # one CUDA graph an iteration; false: the host launched every operator
    seq: int | None = None  # None: a model of pictures
    head: str = ""  # empty: the model has no language head
    parameters: int | None = None
    peak_memory_byte: int | None = None
    iterations: int | None = None
    burst_latency_s: float | None = (
        None  # of one iteration after a pause, before the governor answers
    )
    energy_j: float | None = None  # of one iteration


@dataclass(frozen=True)
class ModelKernels:
    """Kernels of one eager iteration as the profiler saw them: ``names[order[i]]`` took
    ``kernel_s[i]``.
    """

    id: str  # of the row it belongs to
    names: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    kernel_s: tuple[float, ...] = ()
    run: str = ""
    error: str = ""


@dataclass(frozen=True)
class ChainRow(TimedRow):
    """Several operators one after another in one graph."""

    id: str
    name: str
    specs: tuple[str, ...] = ()  # of the members, in order; their own rows have these in ``spec``
    alone_s: tuple[
        float, ...
    ] = ()  # latency of each member by itself, measured in the same run; empty: not of all
    operators: tuple[
        str, ...
    ] = ()  # of the members, JSON as in a workload file, where no rows of theirs are kept
    handed_on: bool = False  # each member reads what the one before wrote, as in a model
    copies: int | None = None
    replays: int | None = None


Record = KernelRow | RunInfo | NameRow | ModelRow | ModelKernels | ChainRow


class Journal:
    """An append-only JSON Lines file; knows the ids it already holds."""

    def __init__(self, path: Path, key: str = "id") -> None:
        self.path = path
        self.key = key
        self._ids: set[str] | None = None

    @property
    def ids(self) -> set[str]:
        """Ids of complete rows without an error; a re-run skips these."""
        if self._ids is None:
            rows = read_lines(self.path, missing_ok=True)
            self._ids = {
                str(row[self.key]) for row in rows if row.get(self.key) and not row.get("error")
            }
        return self._ids

    def append(self, row: Record | Plain) -> None:
        """Write one row; it is on the disk when this returns."""
        plain = row_to_plain(row)
        ids = self.ids
        append_rows(self.path, [plain])
        if plain.get(self.key) and not plain.get("error"):
            ids.add(str(plain[self.key]))


def append_rows(path: Path, rows: Iterable[Plain]) -> None:
    """Append rows to a JSON Lines file; all are on the disk when this returns, or none."""
    from wattcast.core.whole_files import append_whole  # predictions only read

    lines = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n" for row in rows)
    append_whole(path, "".join(lines).encode())


def row_to_plain(row: Record | Plain) -> Plain:
    """Return a row as a mapping ready for JSON; empty fields and NaN are left out."""
    plain = row if isinstance(row, dict) else {"record": _RECORD[type(row)], **asdict(row)}
    finite = (
        (name, v) for name, v in plain.items() if not isinstance(v, float) or math.isfinite(v)
    )
    return {name: v for name, v in finite if v not in (None, "", (), {})}


def row_from_plain(plain: Mapping[str, Any], kind: type[T], where: str = "row") -> T:
    """Return a mapping that was read back as ``kind``.

    Unknown keys, and values of another type or range than their column's, are refused by name.
    """
    known = {item.name: str(item.type) for item in fields(kind)}
    given = {name: value for name, value in plain.items() if name != "record"}
    check_names("field", given, known, f"Found in {where}.")
    check_values(given, known, where)
    if kind is KernelRow and "kind" in given:
        kinds = [each.value for each in RowKind]
        check_names(f"kind of row in {where}:", given["kind"], kinds)
    values = {
        name: _to_tuples(v) if known[name].startswith("tuple") else v for name, v in given.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise BadInput(f"{where}: {clip_text(error, 200)}.") from None


def read_shipped_table(package: str, *place: str) -> list[dict[str, str]]:
    """Read the rows of a CSV table that ships in a package; lines with a # say where it is from."""
    text = files(package).joinpath(*place).read_text(encoding="utf-8")
    return list(
        csv.DictReader((line for line in text.splitlines() if not line.startswith("#")), restval="")
    )


def read_lines(path: Path, missing_ok: bool = False) -> Iterator[Plain]:
    """Yield the rows of a JSON Lines file; a line torn by a crash is passed over, other damage is
    not.
    """
    if missing_ok and not path.exists():
        return
    with open_regular(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_MOST_BYTE), b""), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                if not _is_torn(line):
                    raise BadInput(f"{path.name}: line {number} is not valid JSON.") from None
                continue
            if not isinstance(row, dict):
                raise bad_value(f"{path.name}: line {number}", "an object", type(row).__name__)
            yield row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _is_torn(line: bytes) -> bool:
    """Tell whether a line ends inside an object or a text, as one that was cut short does wherever
    it was cut.
    """
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", line)
    return b'"' in outside or outside.count(b"{") + outside.count(b"[") > outside.count(
        b"}"
    ) + outside.count(b"]")


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value


RECORDS: dict[str, type] = {  # by the word that a line says
    "run": RunInfo, "row": KernelRow, "names": NameRow, "model": ModelRow, "model_kernels": ModelKernels,
    "chain": ChainRow,
}  # fmt: skip
_RECORD = {kind: word for word, kind in RECORDS.items()}


def database_folder(gpu: str) -> Path:
    """Return the folder of the kernel database that ships with Wattcast for ``gpu``."""
    folder = Path(__file__).parents[1] / "database" / gpu
    if not (folder / ROWS_FILE).exists():
        known = sorted(path.parent.name for path in folder.parent.glob(f"*/{ROWS_FILE}"))
        raise unknown_name("kernel database", gpu, known, f"Known: {', '.join(known)}.")
    return folder


ROWS_FILE = "rows.parquet"
COUNTERS_FILE = "counters.parquet"
MODELS_FILE = "models.parquet"
MODEL_KERNELS_FILE = "model_kernels.parquet"
STEPS_FILE = (
    "engine_steps.parquet"  # one row a step point, a traffic run, an idle period, an engine
)
CHAINS_FILE = "chains.parquet"
_JSON_COLUMNS = ("operator", "detail")
_CHECKSUM = "wattcast.sha256"
_STDERR = threading.RLock()  # of the process: one at a time puts another file in its place
# of a table: a few bytes may claim billions of equal values
_MOST_BYTE = 2**28
_MOST_VALUES = 2**25


def read_table(path: Path) -> list[Plain]:
    """Return the rows of a Parquet file of ours as mappings, JSON columns opened; needs polars."""
    polars = import_polars()
    try:
        with open_regular(path) as stream:
            data = stream.read(_MOST_BYTE)
        with catch_panics():
            wanted = polars.read_parquet_metadata(io.BytesIO(data)).get(_CHECKSUM)
            if wanted is not None and wanted != _columns_checksum(data):
                raise BadInput(
                    f"{clip_text(path, 200)}: damaged, its checksum differs. Pack the campaigns again."
                )
            lazy = polars.scan_parquet(io.BytesIO(data))
            if (
                count := lazy.select(polars.len()).collect().item() * len(lazy.collect_schema())
            ) > _MOST_VALUES:
                raise bad_value(
                    clip_text(path, 200), f"at most {_MOST_VALUES} values", f"{count} values"
                )
            table = lazy.collect()
            check_table(table, clip_text(path, 200))
            rows: list[Plain] = table.to_dicts()
        for row in rows:
            for name in _JSON_COLUMNS:
                if isinstance(row.get(name), str):
                    row[name] = json.loads(row[name])
    except (OSError, ValueError, polars.exceptions.PolarsError) as error:
        raise BadInput(
            f"{clip_text(path, 200)}: cannot be read as a table ({clip_text(error, 200)})."
        ) from None
    return rows


@contextmanager
def catch_panics() -> Iterator[None]:
    """Raise ``OSError`` where polars panics on a damaged file; stderr stays free of what its
    threads print then.
    """
    with _STDERR:
        said = (
            os.memfd_create("said")
            if hasattr(os, "memfd_create")
            else os.open(os.devnull, os.O_RDWR)
        )
        kept = -1
        try:
            kept = os.dup(2)
            os.dup2(said, 2)
            yield
            os.write(kept, os.pread(said, 2**20, 0))
        except import_polars().exceptions.PanicException as error:
            raise OSError(f"polars panicked: {error}") from None
        finally:
            if kept >= 0:
                os.dup2(kept, 2)
                os.close(kept)
            os.close(said)


def write_table(path: Path, rows: list[Plain]) -> None:
    """Write mappings as Parquet, nested ones as JSON text, with a checksum; whole or not at all.
    Needs polars.
    """
    from wattcast.core.whole_files import write_whole  # predictions only read

    flat = [
        {
            name: json.dumps(v, sort_keys=True) if isinstance(v, dict) else v
            for name, v in row.items()
        }
        for row in rows
    ]
    polars = import_polars()
    try:
        table = polars.DataFrame(flat, infer_schema_length=None)
    except (TypeError, ValueError, OverflowError, polars.exceptions.PolarsError) as error:
        raise BadInput(
            f"{clip_text(path, 200)}: a column mixes kinds of values ({clip_text(error, 200)})."
        ) from None
    check_table(table, clip_text(path, 200))
    plain = io.BytesIO()
    checked = io.BytesIO()
    table.write_parquet(plain, compression="zstd", compression_level=15)
    checksum = {_CHECKSUM: _columns_checksum(plain.getvalue())}
    table.write_parquet(checked, compression="zstd", compression_level=15, metadata=checksum)
    write_whole(path, checked.getvalue())


def _columns_checksum(data: bytes) -> str:
    """Return the SHA-256 of a Parquet file up to its footer, whose length stands before the last
    four bytes.
    """
    import hashlib  # predictions start without it

    return hashlib.sha256(
        data[: max(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), 0)]
    ).hexdigest()


def import_polars() -> Any:
    """Import polars, or say what to install."""
    return import_extra("polars", "tables need polars", "measure")


# (torch, take, operator as in workload JSON) -> a function that runs the operator once.
# ``take(dtype, *shape)`` hands out a tensor on the device, filled with the data of the row.
CallBuilder: TypeAlias = Callable[[Any, Callable[..., Any], Mapping[str, Any]], Callable[[], Any]]
_BUILDERS: dict[str, CallBuilder] = {}


def register_measured_call(kind: str, builder: CallBuilder) -> None:
    """Register how the operator called ``kind`` in workload JSON is called in PyTorch."""
    _BUILDERS[kind] = builder


def find_measured_call(kind: str) -> CallBuilder | None:
    """Return how the operator called ``kind`` is called in PyTorch, or None where nobody registered
    it.
    """
    return _BUILDERS.get(kind)
