"""Read a kernel database as arrays, and split, select and parse its rows."""

from __future__ import annotations

import importlib
import json
import math
import zlib
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import (
    ROWS_FILE,
    database_folder,
    read_table,
)
from wattcast.kernels import Kernels
from wattcast.kernels.kernel_table import RunCondition
from wattcast.workload.operator_base import Operator, select_operators
from wattcast.workload.readers import from_json

# Flags that make a row unfit: the campaign saw the figures move while it measured.
UNFIT_FLAGS = ("unsettled", "clock_low", "clock_drift", "period_beats_with_sensor")
ROW_NUMBERS = (
    "latency_s",
    "power_w",
    "sm_clock_hz",
    "effective_clock_hz",
    "memory_power_w",
    "on_power_w",
    "settled_power_w",
    "settled_clock_hz",
    "temperature_c",
    "duty",
    "idle_power_w",
    "power_limit_w",
)


@dataclass(frozen=True)
class KernelRows:
    """Rows of a kernel database; arrays are ``(row,)``, NaN where a row has no such figure."""

    kind: tuple[str, ...]
    ops: tuple[Operator, ...]
    conditions: tuple[RunCondition, ...]
    data: tuple[str, ...]
    spec: tuple[str, ...]
    repeat: npt.NDArray[np.int64]
    names: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[int, ...], ...]  # of each named kernel
    uuid: tuple[str, ...]  # of the card
    run: tuple[str, ...]
    chosen: tuple[str, ...]  # why a row was measured
    number: dict[str, Array]
    fit: Mask  # not flagged
    source: str
    card: str
    held_out: Mask | None = None  # rows that must never be fitted to; None: the database names none

    def __len__(self) -> int:
        return len(self.ops)

    def column(self, name: str) -> Array:
        """Return one measured column."""
        return self.number[name]

    def select_rows(self, mask: Mask) -> KernelRows:
        """Return the rows of a mask."""
        places = np.flatnonzero(mask)
        columns: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, np.ndarray):
                columns[item.name] = value[places]
            elif isinstance(value, dict):
                columns[item.name] = {name: column[places] for name, column in value.items()}
            elif isinstance(value, tuple):
                columns[item.name] = tuple(value[place] for place in places.tolist())
        return replace(self, **columns)

    def is_kind(self, *kinds: str) -> Mask:
        """Return the mask of rows that were measured in one of these ways."""
        return np.array([kind in kinds for kind in self.kind], dtype=bool)

    def to_judge(self) -> Mask:
        """Return the mask of the bursts and sustained rows by which fits are judged, each once."""
        first = self.is_kind("burst", "sustained") & self.fit & (self.repeat == 0)
        return np.asarray(first & ~np.isin(self.chosen, TO_LEARN_FROM))

    @cached_property
    def family(self) -> tuple[str, ...]:
        """The family of each row, as predictions name it."""
        return tuple(op.family for op in self.ops)


def load_kernel_rows(database: str | Path) -> KernelRows:
    """Load every row with an operator and a figure; idle rows come from ``load_idle_rows``.

    A database that ships is read once a process, and its rows are shared: change none in place.
    """
    written_ns = _stamp_shipped_table(database)
    if written_ns is None:
        return _read_kernel_rows(database)
    return _read_shipped_rows(str(database), written_ns)


def _stamp_shipped_table(database: str | Path) -> int | None:
    """Return when the rows of a database that is named were written; None for files and folders."""
    if Path(database).exists():
        return None
    return (database_folder(str(database)) / ROWS_FILE).stat().st_mtime_ns


@lru_cache(maxsize=4)
def _read_shipped_rows(database: str, _written_ns: int) -> KernelRows:
    return _read_kernel_rows(database)


def _read_kernel_rows(database: str | Path) -> KernelRows:
    plain = [row for row in read_plain_rows(database) if _is_measured_operator(row)]
    if not plain:
        raise BadInput(f"{database}: no measured rows. Pack a campaign with `wattcast lab pack`.")
    entries = [row["operator"] for row in plain]
    uuid = _read_text_column(plain, "card_uuid")
    numbers = {name: _read_number_column(plain, name) for name in ROW_NUMBERS}
    numbers[CARD] = np.array([number_card(name) for name in uuid])
    return KernelRows(
        kind=tuple(row["kind"] for row in plain),
        ops=parse_operators(entries, str(database)),
        conditions=tuple(map(read_condition, plain)),
        data=_read_text_column(plain, "data", "random"),
        spec=tuple(map(_read_spec, plain)),
        repeat=np.array([int(row.get("repeat") or 0) for row in plain]),
        names=tuple(map(_read_kernel_names, plain)),
        blocks=tuple(map(_count_blocks, plain)),
        uuid=uuid,
        run=_read_text_column(plain, "run"),
        chosen=_read_text_column(plain, "chosen", PLANNED),
        number=numbers,
        fit=np.array(list(map(_is_fit, plain)), dtype=bool),
        source=Path(str(database)).name,
        card=_describe_card(plain[0]),
        held_out=_find_held_out(plain),
    )


def _is_measured_operator(row: Plain) -> bool:
    """Whether a row has an operator and a figure: it is not idle and did not fail."""
    return row.get("kind") != "idle" and not row.get("error")


def _read_text_column(
    plain: Sequence[Plain],
    name: str,
    default: str = "",
) -> tuple[str, ...]:
    """Return a column of words; the default where a row has none."""
    return tuple(str(row.get(name) or default) for row in plain)


def _read_number_column(plain: Sequence[Plain], name: str) -> Array:
    """Return a column of numbers; NaN where a row has none."""
    values = np.full(len(plain), np.nan)
    for place, row in enumerate(plain):
        value = row.get(name)
        if isinstance(value, (int, float)):
            values[place] = float(value)
    return values


def _read_detail(row: Plain) -> Plain:
    return row.get("detail") or {}


def _read_spec(row: Plain) -> str:
    """Return the name of what was measured; older rows keep it in their detail."""
    spec: str = row.get("spec") or _read_detail(row).get("spec", "")
    return spec


def _read_kernel_names(row: Plain) -> tuple[str, ...]:
    """Return the names of the kernels that a row ran."""
    return tuple(row.get("kernel_names") or ())


def _count_blocks(row: Plain) -> tuple[int, ...]:
    """Return the blocks of each kernel that a row ran."""
    return tuple(math.prod(grid) for grid in row.get("kernel_grids") or ())


def _is_fit(row: Plain) -> bool:
    """Whether the campaign raised no flag that makes the figures of a row unfit."""
    flags = row.get("flags") or ()
    return not any(flag in UNFIT_FLAGS for flag in flags)


def _find_held_out(plain: Sequence[Plain]) -> Mask | None:
    """Return the mask of rows that must never be fitted to; None where the database names none."""
    held_out = np.array([bool(_read_detail(row).get("held_out")) for row in plain])
    return held_out if held_out.any() else None


def _describe_card(row: Plain) -> str:
    """Return the name of the card and its driver, as far as a row names them."""
    words = [row.get("card_name"), row.get("driver")]
    return " ".join(str(word) for word in words if word)


PLANNED = "plan"  # why a row was measured: drawn at random
# why rows were measured that are learned from and not judged by: they were picked to teach, or
# repeat a kernel on another card
TO_LEARN_FROM = ("learning", "common")
CARD = "card"  # column: a number that stands for the card of a row, the same in every database


def number_card(uuid: str) -> float:
    """Return the number that stands for a card in tables of numbers."""
    return float(zlib.crc32(uuid.encode()))


def read_condition(row: Plain) -> RunCondition:
    """Return how a row was run."""
    detail = _read_detail(row)
    return RunCondition(
        str(row.get("layout") or ""),
        str(row.get("rotated") or ""),
        str(detail.get("backend") or ""),
        int(detail.get("rows") or 0),
        int(detail.get("inner") or 0),
    )


def load_idle_rows(database: str | Path) -> list[tuple[float, float, float]]:
    """Load clock (Hz), power (W) and temperature (C) of the idle rows.

    Those of a database that ships are read once a process.
    """
    written_ns = _stamp_shipped_table(database)
    if written_ns is None:
        return _read_idle_rows(database)
    return list(_read_shipped_idle_rows(str(database), written_ns))


@lru_cache(maxsize=4)
def _read_shipped_idle_rows(
    database: str, _written_ns: int
) -> tuple[tuple[float, float, float], ...]:
    return tuple(_read_idle_rows(database))


def _read_idle_rows(database: str | Path) -> list[tuple[float, float, float]]:
    plain = read_plain_rows(database)
    idle = [row for row in plain if row.get("kind") == "idle" and row.get("power_w")]
    sustained = [row for row in plain if row.get("kind") == "sustained"]
    power_w = np.array([float(row["power_w"]) for row in idle])
    temperature_c = np.array([float(row["temperature_c"]) for row in idle])
    clock_hz = [float(row["sm_clock_hz"]) for row in idle]
    levelled_w = _level_cards(
        power_w,
        temperature_c,
        _read_text_column(idle, "card_uuid"),
        Counter(_read_text_column(sustained, "card_uuid")),
    )
    return list(zip(clock_hz, levelled_w.tolist(), temperature_c.tolist(), strict=True))


def _level_cards(
    power_w: Array,
    temperature_c: Array,
    cards: Sequence[str],
    weight: Mapping[str, float],
) -> Array:
    """Level the idle power of several cards: P = level of the card + slope · T, with levels
    averaged by ``weight``.

    Cards differ by some watts and were measured at different temperatures, so the slope of pooled
    rows is that of none of them.
    """
    names = list(dict.fromkeys(cards))
    if len(names) < 2:
        return power_w
    number = np.array([names.index(card) for card in cards])
    is_of_card = np.eye(len(names))[number]  # (row, card)
    row_count = is_of_card.sum(axis=0)
    mean_w = (is_of_card.T @ power_w) / row_count
    mean_c = (is_of_card.T @ temperature_c) / row_count

    warmer_c = temperature_c - is_of_card @ mean_c
    more_w = power_w - is_of_card @ mean_w
    slope_w_per_c = float(warmer_c @ more_w) / max(float(warmer_c @ warmer_c), 1e-9)
    level_w = mean_w - slope_w_per_c * mean_c
    weights = np.array([float(weight.get(name, 0)) for name in names])
    common_w = float(level_w.mean())
    if weights.sum() > 0:
        common_w = float(level_w @ weights / weights.sum())
    return np.asarray(power_w + common_w - is_of_card @ level_w)


def read_plain_rows(
    database: str | Path,
    table: str = ROWS_FILE,
    record: str = "row",
) -> list[Plain]:
    """Read every row of a database as plain mappings.

    ``database`` is a folder with the ``table``, that file, the name of a database that ships, or a
    folder of journals (``*.jsonl``) as a campaign leaves them, whose records of one kind count once
    each, as last written.
    """
    path = Path(database)
    if path.is_dir() and not (path / table).exists():
        return _read_journals(path, record)
    if path.is_dir():
        path = path / table
    elif not path.exists():
        path = database_folder(str(database)) / table
    return read_table(path)


def _read_journals(folder: Path, record: str) -> list[Plain]:
    """Read the records of one kind from the journals of a campaign, each as last written."""
    latest: dict[tuple[Any, Any], Plain] = {}
    for file in sorted(folder.rglob("*.jsonl")):
        for row in read_lines(file):
            if row.get("record") == record:
                latest[row.get("id"), row.get("run")] = row
    return list(latest.values())


def parse_operators(entries: Sequence[Plain], where: str = "candidates") -> tuple[Operator, ...]:
    """Parse one operator per entry through the workload reader, so that a row means what a workload
    file means.
    """
    named = []
    for entry in entries:
        if entry.get("op") == "elementwise":
            sizes = {name: value for name, value in entry.items() if name != "function"}
            entry = {**sizes, "op": entry["function"]}
        named.append(entry)
    text = json.dumps({"name": where, "ops": named})
    graph = from_json.parse_workload(text.encode(), where)
    return tuple(op for block in graph.blocks for op in block.ops)


def on_random_data(rows: KernelRows) -> Mask:
    """Return the mask of rows on random data."""
    return np.array([data == "random" for data in rows.data], dtype=bool)


def settled_figures(rows: KernelRows) -> tuple[Array, Array, Array]:
    """Return power, reported clock and latency of each row, settled ones where a capped row has
    them.

    A capped row's first second runs above the limit; its latency is carried to the settled clock by
    the ratio of the clocks, as for a kernel bound on chip.
    """
    is_duty = rows.is_kind("duty")
    settled_w = rows.column("settled_power_w")
    settled_hz = rows.column("settled_clock_hz")
    first_hz = rows.column("sm_clock_hz")
    is_settled = np.isfinite(settled_w) & np.isfinite(settled_hz) & ~is_duty
    power_w = np.where(is_settled, settled_w, rows.column("power_w"))
    power_w = np.where(is_duty, rows.column("on_power_w"), power_w)
    clock_hz = np.where(is_settled, settled_hz, first_hz)
    slower = np.where(is_settled, first_hz / clock_hz, 1.0)
    return power_w, clock_hz, rows.column("latency_s") * slower


def select_kernels(kernels: Kernels, mask: Mask) -> Kernels:
    """Return the kernels of a mask, without any issue order."""
    rows = np.flatnonzero(mask)
    return kernels.select_rows(rows, select_operators(kernels.ops, rows))


FOLDS = 5


def shape_name(op: Operator) -> str:
    """Name the shape of an operator: its kind and sizes, whatever the number format."""
    sizes = []
    for item in fields(op):
        is_size = item.name not in ("dtype", "out_dtype", "count", "label")
        if is_size and not item.name.startswith(("read", "write")):
            sizes.append(f"{item.name}={getattr(op, item.name)}")
    return f"{op.name} {' '.join(sizes)}"


def assign_folds(
    rows: KernelRows,
    folds: int = FOLDS,
    seed: int = 0,
) -> npt.NDArray[np.int64]:
    """Assign a fold to each row; all rows of a shape share one.

    scikit-learn's GroupKFold balances folds by size instead; the shipped errors were measured with
    these folds.
    """
    _, shape = np.unique([shape_name(op) for op in rows.ops], return_inverse=True)
    order = np.random.default_rng(seed).permutation(int(shape.max()) + 1)
    return np.asarray(order[shape] % folds)


_Result = TypeVar("_Result")
PARALLEL_ROWS = 2000  # from which on a fit takes longer than starting a process


def run_each(
    step: Callable[..., _Result],
    work: Iterable[tuple[Any, ...]],
    rows: int,
) -> Iterable[_Result]:
    """Yield ``step(*arguments)`` for each of ``work``, in order, on all cores where a database has
    many ``rows``.

    >>> list(run_each(pow, [(2, 3), (3, 2)], rows=10))
    [8, 9]
    """
    if rows < PARALLEL_ROWS:
        return (step(*arguments) for arguments in work)
    joblib = importlib.import_module("joblib")  # comes with scikit-learn
    delayed_calls = (joblib.delayed(step)(*arguments) for arguments in work)
    run_parallel = joblib.Parallel(n_jobs=-1, return_as="generator")
    results: Iterable[_Result] = run_parallel(delayed_calls)
    return results
