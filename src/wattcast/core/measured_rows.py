"""The records that measurements leave: what ran, how it was run, and what was measured.

A row says what ran (operator and shape under the field names of the operator's dataclass), how it
was run (kind, data, rotation, duty) and what was measured. A run says on which card and with which
libraries; every row names its run. ``row_journals`` and ``row_tables`` write and read the files.
Only the standard library is needed: this module also runs on a bare GPU node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import (
    asdict,
    dataclass,
    field,
    fields,
)
from enum import StrEnum
from typing import Any, TypeVar

from wattcast.core.column_ranges import check_values
from wattcast.core.errors import (
    BadInput,
    check_names,
    clip_text,
)

Plain = dict[str, Any]
T = TypeVar("T", bound="KernelRow | RunInfo | NameRow | ModelRow | ModelKernels | ChainRow")


class RowKind(StrEnum):
    """How a row was measured; see docs/method/measuring.md."""

    BURST = "burst"  # tens of milliseconds after a pause: latency at the top set clock
    SUSTAINED = "sustained"  # governor settled: power, clock and latency together
    DUTY = "duty"  # bursts with idle gaps: power while on, above the cap
    CLOCK = "clock"  # effective clock by a spin kernel beside the load
    IDLE = "idle"  # a context open, no work
    CHAIN = "chain"  # a burst of several operators one after another, in a table of their own


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
    """What rows of operators, chains and models have in common; None means not measured."""

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
    # What the operator form leaves open: backend, two-dimensional sizes.
    detail: Plain = field(default_factory=dict)
    rotated: str = "none"  # none | weights | all: which operands change from copy to copy
    sets: int = 1  # distinct operand sets the copies walk through
    footprint_byte: int | None = None  # bytes of operands and outputs all copies touch
    # plan: at random; models: an operator of real models; suggested: by expected uncertainty.
    chosen: str = "plan"
    repeat: int = 0
    copies: int | None = None  # calls in the captured graph
    replays: int | None = None
    duty: float | None = None  # share of time busy, as measured
    busy_s: float | None = None
    period_s: float | None = None
    idle_power_w: float | None = None
    on_power_w: float | None = None
    # Of capped rows: mean over at least one cycle of the governor.
    settled_power_w: float | None = None
    settled_clock_hz: float | None = None
    settled_ticks: int | None = None


@dataclass(frozen=True)
class NameRow:
    """Kernels one call of an operator launches, in order, as the profiler names them."""

    spec: str
    names: tuple[str, ...] = ()
    grids: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    kernel_s: tuple[float, ...] = ()  # duration of every kernel in one eager call
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
    # Of one iteration after a pause, before the governor answers.
    burst_latency_s: float | None = None
    energy_j: float | None = None  # of one iteration


@dataclass(frozen=True)
class ModelKernels:
    """Kernels of one eager iteration as the profiler saw them.

    Kernel ``i`` is called ``names[order[i]]`` and took ``kernel_s[i]``.
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
    # Of the members, in order; their own rows have these in ``spec``.
    specs: tuple[str, ...] = ()
    # Latency of every member measured separately in the same run; empty: not all were measured.
    alone_s: tuple[float, ...] = ()
    # Of the members, JSON as in a workload file, where no rows of theirs are stored.
    operators: tuple[str, ...] = ()
    handed_on: bool = False  # every member reads what the one before wrote, as in a model
    copies: int | None = None
    replays: int | None = None


Record = KernelRow | RunInfo | NameRow | ModelRow | ModelKernels | ChainRow


RECORDS: dict[str, type] = {  # by the word that a line carries
    "run": RunInfo,
    "row": KernelRow,
    "names": NameRow,
    "model": ModelRow,
    "model_kernels": ModelKernels,
    "chain": ChainRow,
}
_WORD_OF_RECORD = {kind: word for word, kind in RECORDS.items()}
_EMPTY_VALUES: tuple[Any, ...] = (None, "", (), {})


def row_to_plain(row: Record | Plain) -> Plain:
    """Return a row as a mapping ready for JSON; empty fields and NaN are left out."""
    if isinstance(row, dict):
        complete = row
    else:
        complete = {"record": _WORD_OF_RECORD[type(row)], **asdict(row)}
    plain: Plain = {}
    for name, value in complete.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if is_finite and value not in _EMPTY_VALUES:
            plain[name] = value
    return plain


def row_from_plain(
    plain: Mapping[str, Any],
    kind: type[T],
    where: str = "row",
) -> T:
    """Return a mapping that was read back as ``kind``.

    Unknown keys, and values of another type or range than their column's, are refused by name.
    """
    types = {item.name: str(item.type) for item in fields(kind)}
    values = dict(plain)
    values.pop("record", None)
    check_names("field", values, types, f"Found in {where}.")
    check_values(values, types, where)
    if kind is KernelRow and "kind" in values:
        check_names(f"kind of row in {where}:", values["kind"], list(RowKind))
    for name, value in values.items():
        if types[name].startswith("tuple"):
            values[name] = _to_tuples(value)
    try:
        return kind(**values)
    except TypeError as error:
        raise BadInput(f"{where}: {clip_text(error, 200)}.") from None


def _to_tuples(value: Any) -> Any:
    """Return lists, and lists within lists, as tuples."""
    if not isinstance(value, list):
        return value
    return tuple(_to_tuples(item) for item in value)
