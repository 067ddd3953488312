"""Kernels: what the device is asked to run, as a table with one row per distinct operator.

Equal operators become one row; the order of issue says how often and when each runs. Work is stated
before any clock is known; ``predictor/timeline.py`` turns it into cycles and seconds.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    fields,
)
from enum import StrEnum
from functools import (
    cache,
    cached_property,
    lru_cache,
)
from itertools import accumulate, chain
from typing import (
    Any,
    NamedTuple,
    TypeVar,
)

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    Mask,
    Sweepable,
    index_distinct,
    map_distinct,
)
from wattcast.kernels.kernel_choice import KernelChoice
from wattcast.kernels.kernel_labels import NOT_RUN, KernelsRun
from wattcast.workload.engine_schedule import EngineStep
from wattcast.workload.operator_base import (
    Operator,
    OperatorColumns,
    select_operators,
)

Columns = dict[str, Array]  # each ``(row,)``
RowIndex = npt.NDArray[np.int64]
_Rows = npt.NDArray[np.intp]
_Names = tuple[str, ...]


class KernelWorkCoefficients(Coefficients):
    """What kernels of all families have in common."""

    block_cycles: float  # of an SM for a block, however small
    # Shares of L2's capacity up to which it keeps all of a working set from one kernel to the next,
    # and beyond which it keeps nothing: where kernels read at random, and where they stream
    resident_limit: float
    streamed_limit: float
    streamed_end: float
    profiled_write_share: float  # of L2's capacity that holds the results of a profiled kernel
    # Of an L2 whose rate nobody published: bytes a cycle and SM beside HBM, and times the rate of
    # device memory beside GDDR
    l2_byte_per_cycle: float
    l2_over_gddr: float


WORK = load_coefficients("kernel_work", KernelWorkCoefficients)

SM_THREADS = 2048.0
SM_BLOCKS = 32.0  # that an SM holds at most
WARP_THREADS = 32.0
SUM_BYTE = 4.0  # of a sum, in fp32
MOVED_SUM_BYTE = 2.0 * SUM_BYTE  # of a sum that one kernel writes and another reads


class LibraryStyle(StrEnum):
    """How a library's products feed the tensor cores."""

    # Clusters share loads, tiles a few tokens wide exist, operands come straight from shared
    # memory.
    HOPPER = "hopper"
    # Every block loads for itself, every warp its own operands from shared memory.
    AMPERE = "ampere"


ENGINE_OF_2025 = "vllm-2025"  # vLLM up to 0.11


@dataclass(frozen=True)
class ReferenceChip:
    """The chip whose library chose the kernels: SMs, L2 and arithmetic per cycle and SM, by
    event.
    """

    sm_count: float
    l2_byte: float
    l2_byte_per_cycle: float
    dram_byte_per_cycle: float  # at the top clock
    top_hz: float
    sfu_per_cycle: float  # of an SM; 0: unknown
    per_cycle: Mapping[str, float]
    style: LibraryStyle = LibraryStyle.HOPPER
    shared_byte: float = 0.0  # that the blocks of an SM share; 0: unknown
    # of the memory's even rate: what an SM reads at when few others do; 0: the usual
    lone_sm_share: float = 0.0
    engine: str = ""  # whose kernels run; empty: those of today's vLLM
    # how its library picks kernels; None: unknown
    choice: KernelChoice | None = field(
        default=None,
        compare=False,
        repr=False,
    )
    # work of operators met before: it depends on nothing that a sweep changes
    known_work: dict[Hashable, KernelWork] = field(
        default_factory=dict,
        init=False,
        compare=False,
        repr=False,
    )

    @property
    def is_blackwell(self) -> bool:
        """Whether it runs the libraries of Blackwell's data-centre chips.

        Their kernels need tensor memory, which graphics chips of Blackwell lack: those multiply fp4
        too, but run the kernels of Ampere and Ada.
        """
        return "tensor_fp4_flop" in self.per_cycle and self.style is LibraryStyle.HOPPER

    @property
    def has_tf32(self) -> bool:
        """Whether its tensor cores multiply fp32 rounded to TF32."""
        return "tensor_tf32_flop" in self.per_cycle


@dataclass(frozen=True)
class RunCondition:
    """How an operator is run, where the operator does not say so itself.

    Empty text stands for what frameworks usually do, zero for what is not stated.
    """

    # Of a product: nt (weights as PyTorch keeps them) or nn; of attention: bshd or bhsd
    layout: str = ""
    # Which operands come from device memory: none, weights, all, or as a profiler counts
    rotated: str = ""
    backend: str = ""  # of attention: default, cudnn, flash
    rows: int = 0  # of an elementwise operator over two dimensions
    run: int = 0  # elements of a turned operand that stay together; 1: a plain transpose
    kernels: tuple[str, ...] = ()  # names of those that ran; empty: let the choice decide
    parts: int = 0  # of K that the kernel that ran made, by its grid; 0: as its name says


USUAL_CONDITION = RunCondition()
# Of ``rotated``: a profiler that runs a kernel again for each of its passes
COUNTED_ROTATION = "counted"


@dataclass(frozen=True, eq=False, repr=False)
class ConditionColumns:
    """The conditions of all rows as columns, each ``(row,)``."""

    usual: bool  # all rows run as usual
    cold: Mask  # all operands come from device memory
    warm: Mask  # none does
    counted: Mask  # device memory as a profiler counts it
    straight: Mask  # of a product: its right operand lies with k outermost
    split_heads: Mask  # of attention: heads outside of positions
    flash: Mask
    cudnn: Mask
    rows: Array  # 0: not said
    run: Array
    ran: Sequence[KernelsRun]

    @classmethod
    def from_conditions(cls, conditions: Sequence[RunCondition]) -> ConditionColumns:
        """Return conditions as columns; those of a whole workload are usual, which is quick."""
        if conditions.count(USUAL_CONDITION) == len(conditions):
            return _usual_columns(len(conditions))
        words = np.array([(c.rotated, c.layout, c.backend) for c in conditions])
        return cls(
            usual=False,
            cold=words[:, 0] == "all",
            warm=words[:, 0] == "none",
            counted=words[:, 0] == COUNTED_ROTATION,
            straight=words[:, 1] == "nn",
            split_heads=words[:, 1] == "bhsd",
            flash=words[:, 2] == "flash",
            cudnn=words[:, 2] == "cudnn",
            rows=np.array([float(c.rows) for c in conditions]),
            run=np.array([float(c.run) for c in conditions]),
            ran=[(c.kernels, c.parts) for c in conditions],
        )

    def select_rows(self, rows: _Rows) -> ConditionColumns:
        """Return the conditions of some rows."""
        if self.usual:
            return _usual_columns(len(rows))
        columns = {}
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                columns[name] = values[rows]
        kernels_run = [self.ran[row] for row in rows.tolist()]
        return ConditionColumns(
            usual=False,
            ran=kernels_run,
            **columns,
        )


@lru_cache(maxsize=1024)
def _usual_columns(count: int) -> ConditionColumns:
    no = np.zeros(count, dtype=bool)
    no.flags.writeable = False
    zero = np.zeros(count)
    zero.flags.writeable = False
    return ConditionColumns(
        usual=True,
        cold=no,
        warm=no,
        counted=no,
        straight=no,
        split_heads=no,
        flash=no,
        cudnn=no,
        rows=zero,
        run=zero,
        ran=(NOT_RUN,) * count,
    )


@dataclass(frozen=True, eq=False, repr=False)
class KernelWork:
    """Work of all kernels before any clock is known, each column ``(kernel,)``."""

    kernel_family: CodedColumn[str]  # kernels alike enough to share corrections, e.g. "gemm.row"
    units: Array  # blocks, or tiles of a product
    unit_flop: Array
    steps: Array  # dependent steps of one unit
    launches: Array  # kernels the operator becomes, those that start faster as part of one
    l2_byte: Array
    shared_byte: Array
    dram_read_byte: Array
    dram_write_byte: Array
    # of the result through L2, where a kernel stores after its main loop; else among l2_byte
    store_byte: Array
    # written and read again between the kernels of one operator: casts, layouts, partial sums
    between_byte: Array
    # elements that layout kernels turn, each as dear as one of a plain transpose
    turn_element: Array
    between_dram_byte: Array  # the part of ``between_byte`` that L2 cannot hold
    slots: Array  # units an SM holds at a time
    # arithmetic on rows that only fill a tile up, which the operator does not count
    padded_flop: Array
    # of shapes alone, for learned residuals
    features: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def root_family(self) -> CodedColumn[str]:
        """The family whose measurements each kernel learns from.

        That of a point convolution is ``gemm``.
        """
        names, place = index_distinct(map(root_family, self.kernel_family.values))
        return CodedColumn(names, place.take(self.kernel_family.place))

    def select_rows(self, rows: _Rows) -> KernelWork:
        """Return the work of some kernels."""
        values = self._table.take(rows, axis=1)
        return KernelWork(
            kernel_family=self.kernel_family[rows],
            features=dict(zip(self.features, values[len(WORK_COLUMNS) :], strict=True)),
            **dict(zip(WORK_COLUMNS, values, strict=False)),
        )

    @cached_property
    def _table(self) -> Array:
        """Columns and features, ``(column, kernel)``, of which many graphs take their rows."""
        return np.array([*(getattr(self, name) for name in WORK_COLUMNS), *self.features.values()])


def join_work(parts: list[KernelWork]) -> KernelWork:
    """Return the work of all parts, one behind the other, and empty the list.

    Features that a part lacks are zero.
    """
    ends = list(accumulate(len(part.units) for part in parts))
    count = ends[-1]
    places = [slice(end - len(part.units), end) for part, end in zip(parts, ends, strict=True)]
    families = [part.kernel_family for part in parts]
    kernel_family = CodedColumn.from_parts(zip(places, families, strict=True), count)
    feature_names = dict.fromkeys(chain.from_iterable(part.features for part in parts))
    features = {name: np.zeros(count) for name in feature_names}
    columns = {name: np.empty(count) for name in WORK_COLUMNS}
    while parts:
        part = parts.pop()
        place = places.pop()
        for name, values in part.features.items():
            features[name][place] = values
        for name, column in columns.items():
            column[place] = getattr(part, name)
    return KernelWork(kernel_family, features=features, **columns)


WORK_COLUMNS = tuple(
    item.name for item in fields(KernelWork) if item.name not in ("kernel_family", "features")
)


@cache
def root_family(kernel_family: str) -> str:
    """Return the first word of a kernel family.

    Depthwise convolutions, which are no products, stand alone. Kernels of an inference engine are
    ``FAMILY.engine.KIND...``, so that a device without measurements of them falls back to the
    family, and learn by kind.

    >>> root_family("gemm.row"), root_family("conv2d.depthwise.last.plain")
    ('gemm', 'depthwise')
    >>> root_family("gemm.engine.experts.fp8")
    'engine_experts'
    """
    if ".depthwise" in kernel_family:
        return "depthwise"
    words = kernel_family.split(".")
    if words[1:2] == ["engine"]:
        return f"engine_{words[2]}"
    return words[0]


@dataclass(frozen=True, eq=False, repr=False)
class IssueSegment:
    """A stretch of the issue order that runs ``repeat`` times: rows of ``Kernels`` and counts."""

    rows: RowIndex  # (position,)
    counts: Array  # (position,) how often in a row each is issued
    repeat: int
    label: str = ""  # of the block that it was made from
    step: EngineStep | None = None  # of an inference engine, that the stretch belongs to
    step_share: Array | float = 1.0  # (*sweep,) of the step's time, where the step was divided


@dataclass(frozen=True, eq=False, repr=False)
class Kernels:
    """Distinct kernels on the last axis, and the order in which the host issues them."""

    ops: Sequence[Operator]  # what each row stands for: a tuple, or columns where there are many
    # of the operator: gemm, conv2d, attention, softmax, layernorm, rmsnorm, ...
    family: CodedColumn[str]
    # the event that counts each row's arithmetic, e.g. "tensor_fp16_flop"
    pipe_event: CodedColumn[str]
    pipe_per_cycle: Sweepable  # (*sweep, kernel) arithmetic of one SM per cycle on that pipe
    flop: Array  # (kernel,)
    sfu_op: Array  # (kernel,)
    work: KernelWork  # columns (kernel,)
    link_byte: Array  # (kernel,) bytes that leave the device
    segments: tuple[IssueSegment, ...]
    conditions: tuple[RunCondition, ...]
    notes: CodedColumn[str]  # what had to be assumed of each row; empty: nothing

    @cached_property
    def key(self) -> Hashable:
        """Operators and how they run, under which what follows from them alone is kept."""
        return self.ops, self.conditions

    @property
    def assumptions(self) -> tuple[str, ...]:
        """All that had to be assumed."""
        return tuple(note for note in self.notes.values if note)

    def select_rows(
        self,
        rows: RowIndex,
        ops: Sequence[Operator],
        segments: tuple[IssueSegment, ...] = (),
    ) -> Kernels:
        """Return some rows as kernels of their own; ``ops`` equal theirs under other labels."""
        rate = self.pipe_per_cycle
        return Kernels(
            ops=ops,
            family=self.family[rows],
            pipe_event=self.pipe_event[rows],
            pipe_per_cycle=rate if isinstance(rate, float) else rate.take(rows, axis=-1),
            flop=self.flop.take(rows),
            sfu_op=self.sfu_op.take(rows),
            work=self.work.select_rows(rows),
            link_byte=self.link_byte.take(rows),
            segments=segments,
            conditions=tuple([self.conditions[i] for i in rows.tolist()]),
            notes=self.notes[rows],
        )

    @cached_property
    def fills_sm(self) -> Mask:
        """Kernels whose units fill an SM each, ``(kernel,)``.

        A mean of several likely products has no whole number of tiles, and so no last wave that is
        partly empty: 128 tiles of a kernel that is 98 % likely must not take two waves of 132 SMs
        because the mean has 137. Held out, products in fp32 are 14.1 % off instead of 17.2;
        convolutions fit better with whole waves.
        """
        has_whole_units = self.work.units == np.rint(self.work.units)
        is_convolution = map_distinct("conv2d".__eq__, self.family)
        is_product = map_distinct("gemm".__eq__, self.family)
        return np.asarray(is_convolution | (is_product & has_whole_units))

    @property
    def appearance(self) -> RowIndex:
        """The rows in the order in which each is first issued."""
        issued = np.concatenate([segment.rows for segment in self.segments])[::-1]
        first = np.empty(len(self.ops), np.int64)
        first[issued] = np.arange(len(issued), 0, -1)
        return np.argsort(first)

    @cached_property
    def calls(self) -> Array:
        """How often each row runs in the whole workload, ``(kernel,)``."""
        return self.sum_over_runs([1.0] * len(self.segments))

    def sum_over_runs(self, each: Sequence[float]) -> Array:
        """Return a value of each segment, added up over all runs of each row, ``(kernel,)``."""
        if not self.segments:
            return np.zeros(len(self.ops))
        rows = np.concatenate([segment.rows for segment in self.segments])
        runs = []
        for value, segment in zip(each, self.segments, strict=True):
            runs.append(value * segment.repeat * segment.counts)
        sums = np.bincount(rows, np.concatenate(runs), len(self.ops))
        return np.asarray(sums, dtype=np.float64)


class FamilyColumns(NamedTuple):
    """What a family counts for its rows: kernel families, columns of work, and features.

    Sizes that become logarithms or alignments stand here as they are: that is done once for all
    families.
    """

    kernel_family: Sequence[str]
    work: Columns
    plain: Columns
    logs: Columns
    aligned: Columns


def merge_families(
    parts: Sequence[tuple[_Rows, FamilyColumns]], count: int
) -> tuple[Columns, Columns, _Names]:
    """Return work and features of all operators.

    The names returned last are those of features that say how likely a row is of a kernel family. A
    column that a family does not have is zero in its rows.
    """
    plain = _merge_names(part.plain for _, part in parts)
    logs = _merge_names(part.logs for _, part in parts)
    aligned = _merge_names(part.aligned for _, part in parts)
    names = (*WORK_COLUMNS, *logs, *aligned, *plain)
    place = {name: i for i, name in enumerate(names)}
    table = np.zeros((len(names), count))
    for rows, part in parts:
        for columns in (part.work, part.plain, part.logs, part.aligned):
            for name, values in columns.items():
                table[place[name], rows] = values

    work = table[: len(WORK_COLUMNS)]
    features = table[len(WORK_COLUMNS) :]
    features[: len(logs)] = log2_size(features[: len(logs)])
    by_alignment = features[len(logs) : len(logs) + len(aligned)]
    by_alignment[:] = log2_alignment(by_alignment)
    feature_columns = dict(zip((*logs, *aligned, *plain), features, strict=True))
    likelihoods = tuple(name for name in plain if name.startswith("is "))
    return dict(zip(WORK_COLUMNS, work, strict=True)), feature_columns, likelihoods


def _merge_names(columns: Iterable[Columns]) -> _Names:
    """Return the names of all columns, each once, in order of first use."""
    return tuple(dict.fromkeys(chain.from_iterable(columns)))


def family_likelihood(kernel_family: Sequence[str], likelihoods: Columns) -> Columns:
    """Return columns ``is FAMILY``, how likely each row is of it, from 0 to 1.

    ``likelihoods`` are those of rows whose kernel the choice is not sure of; other rows are of one
    family for certain.
    """
    names, place = index_distinct(kernel_family)
    alike = np.equal(np.arange(len(names))[:, np.newaxis], place).astype(np.float64)
    columns = {f"is {name}": values for name, values in zip(names, alike, strict=True)}
    if likelihoods:
        is_shared = np.add.reduce(list(likelihoods.values())) > 0
        alike *= ~is_shared
        for name in columns.keys() & likelihoods.keys():
            columns[name] += likelihoods[name]
    return columns


class LaunchGrid(NamedTuple):
    """How the work of one operator is cut into blocks."""

    units: float  # blocks
    steps: float  # dependent steps of one
    slots: float  # blocks an SM holds
    launches: float = 1.0  # kernels
    between_byte: float = 0.0  # that kernels hand one another
    sm_cycle: float = 0.0  # that the blocks cost the busiest SM; 0: as their elements say
    once: bool = False  # ``sm_cycle`` includes the steps of all rounds but the first


_Steps = TypeVar("_Steps", float, Array)


def steps_with_misses(steps: _Steps, missing: _Steps) -> _Steps:
    """Return steps counted in loads from L2: a load from device memory takes about twice as long.

    >>> steps_with_misses(10.0, 0.5)
    15.0
    """
    return steps * (1.0 + missing)


def as_columns(rows: Sequence[Sequence[float]]) -> Array:
    """Return the numbers of each row as columns, ``(column, row)``."""
    flat = np.fromiter(chain.from_iterable(rows), np.float64, len(rows) * len(rows[0]))
    return flat.reshape(len(rows), -1).T.copy()


def group_forms(ops: Sequence[Operator]) -> Sequence[_Rows]:
    """Return the rows of each form of operator: those of one form differ in sizes alone."""
    if isinstance(ops, OperatorColumns):
        return ops.rows_by_form
    rows_of: dict[Hashable, list[int]] = {}
    for row, op in enumerate(ops):
        form: Hashable = row
        if op.stacks:
            form = (op.kind, op.__class__.read_words(op))
        rows_of.setdefault(form, []).append(row)
    return [np.array(rows) for rows in rows_of.values()]


_MANY_OPS = 64  # that are faster in arrays than one by one


def count_columns(ops: Sequence[Any], count: Callable[[Any], Sequence[Any]]) -> Array:
    """Return the numbers that ``count`` gives for each operator as columns, ``(column, operator)``.

    Many operators of one form are counted as one, whose sizes are arrays.
    """
    if len(ops) < _MANY_OPS:
        return as_columns([count(op) for op in ops])
    parts: list[tuple[Any, Any]] = []
    single_rows: list[int] = []
    for rows in group_forms(ops):
        if len(rows) < _MANY_OPS:
            single_rows += rows.tolist()
        else:
            columns = OperatorColumns.from_operators(select_operators(ops, rows))
            (stacked,) = columns.stack_forms()
            parts.append((rows, count(stacked)))
    if single_rows:
        parts.append((single_rows, as_columns([count(ops[row]) for row in single_rows])))

    table = np.empty((len(parts[0][1]), len(ops)))
    for place, columns in parts:
        for column, values in zip(table, columns, strict=True):
            column[place] = values
    return table


def wave_fill(units: Array, slots: Array | float) -> Array:
    """Return the share of slots that have work over all waves, U / (S·⌈U/S⌉), with U units and S
    slots.

    >>> float(wave_fill(np.array(198.0), 132.0))
    0.75
    """
    waves = units / slots
    return np.asarray(waves / np.maximum(np.ceil(waves), 1.0))


def resident_share(byte: Array | float, l2_byte: float) -> Array:
    """Return the share of a working set that L2 keeps from one kernel to the next, from 1 to 0.

    All of it up to a third of the capacity, none beyond the capacity, linear between: the hash over
    two partitions and other traffic leave less than the capacity.
    """
    span_byte = l2_byte * (1.0 - WORK.resident_limit)
    return np.minimum(np.maximum((l2_byte - byte) / span_byte, 0.0), 1.0)


def streamed_share(byte: Array | float, l2_byte: float) -> Array:
    """Return the share that L2 keeps where kernels stream through a working set once, from 1 to 0.

    The least recent line goes first, so less survives than in ``resident_share``.

    >>> float(streamed_share(50e6, 62.9e6)), float(streamed_share(4e6, 62.9e6))
    (0.0, 1.0)
    """
    span_byte = (WORK.streamed_end - WORK.streamed_limit) * l2_byte
    return np.minimum(np.maximum((WORK.streamed_end * l2_byte - byte) / span_byte, 0.0), 1.0)


def log2_size(values: npt.ArrayLike) -> Array:
    """Return the logarithm to base 2, with zero taken as one."""
    return np.asarray(np.log2(np.maximum(np.asarray(values, dtype=np.float64), 1.0)))


_WIDEST_ALIGNMENT = 16  # elements of a size that any kernel asks for


def log2_alignment(size: npt.ArrayLike, most: int = _WIDEST_ALIGNMENT) -> Array:
    """Return log2 of the largest power of two that divides a size, up to ``most``."""
    # Sizes below one element count as one.
    whole = np.maximum(np.asarray(size, dtype=np.int64), 1)
    return np.asarray(np.log2(np.minimum(whole & -whole, most)), dtype=np.float64)
