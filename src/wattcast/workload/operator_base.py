"""The base class of operators, their registry by name, many of them in columns, and pointwise
functions.

A new operator is one class under ``@register_operator("its name")``, which makes it a frozen
dataclass. It gives its sizes, its arithmetic and its bytes; its JSON form follows from its fields,
and readers, graphs and totals find it in the registry. Nothing here depends on a GPU."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    fields,
)
from functools import cache, cached_property
from operator import attrgetter
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    TypeVar,
    dataclass_transform,
)

import numpy as np
import numpy.typing as npt

from wattcast.core import (
    Dtype,
    bad_value,
    clip_text,
    unknown_name,
)
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    find_equal,
    index_distinct,
    split_rows,
)
from wattcast.core.strict_files import read_shipped_table

_OperatorType = TypeVar("_OperatorType", bound="Operator")
_Word = TypeVar("_Word", bound=Hashable)


class OperatorWork(NamedTuple):
    """What one call computes, reads and writes when nothing is cached."""

    flop: float = 0.0  # a multiply-add counts as two
    read_byte: float = 0.0
    write_byte: float = 0.0
    sfu_op: float = 0.0  # exponentials, reciprocals, tanh


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """One call that the host issues.

    ``count`` says how often in a row it is issued, ``label`` where in the model. Neither changes
    the cost of one call, so neither takes part in equality. All operators share the methods that
    compare and show them: Python takes long to make some of their own for each of thirty classes.
    """

    # the registered name, which is "op" in workload JSON
    kind: ClassVar[str] = ""
    # operators of one family run on the same kind of kernel; mostly the kind itself
    family: ClassVar[str] = ""
    # text of ``form``, with fields as ``{op.mode}``
    form_text: ClassVar[str] = "{op.name}"
    # words that follow the text where a field is neither 0 nor empty
    form_words: ClassVar[Mapping[str, str]] = {}
    # matrix products, convolutions, attention: what PyTorch's FLOP counter counts
    is_product: ClassVar[bool] = False
    # fields that have another key in workload JSON
    json_names: ClassVar[Mapping[str, str]] = {}
    # words that a field may hold
    allowed: ClassVar[Mapping[str, Collection[str]]] = {}
    # whole numbers that ``str()`` leaves out
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count"})

    # whether sizes change neither form nor kernels, and ``work`` takes arrays of them
    stacks: ClassVar[bool] = False
    # count and, where it stacks, whole numbers that decide the cost
    size_names: ClassVar[tuple[str, ...]] = ()
    # returns everything else that decides the cost
    read_words: ClassVar[Callable[[Any], Hashable]]

    # fields and the least value of each
    _whole_numbers: ClassVar[tuple[tuple[str, int], ...]] = ()
    # returns what equal operators share: all fields but count and label
    _read_compared: ClassVar[Callable[[Any], Hashable]]

    dtype: Dtype = field(default=Dtype.BF16, kw_only=True)
    count: int = field(
        default=1,
        kw_only=True,
        compare=False,
    )
    label: str = field(
        default="",
        kw_only=True,
        compare=False,
    )

    def __post_init__(self) -> None:
        values = self.__dict__
        for name, least in self._whole_numbers:
            value = values[name]
            if not isinstance(value, (int, np.ndarray)) or is_any(value < least):
                raise bad_value(f"{self.name}.{name}", f"a whole number of at least {least}", value)
        for name, words in self.allowed.items():
            if values[name] not in words:
                where = f"{self.kind}.{self.json_names.get(name, name)}"
                raise bad_value(where, f"one of {', '.join(words)}", values[name])

    def __eq__(self, other: object) -> bool:
        kind = type(self)
        if type(other) is not kind:
            return NotImplemented
        return kind._read_compared(self) == kind._read_compared(other)

    def __hash__(self) -> int:
        return hash(type(self)._read_compared(self))

    def __repr__(self) -> str:
        values = [f"{item.name}={getattr(self, item.name)!r}" for item in fields(self)]
        return f"{type(self).__qualname__}({', '.join(values)})"

    def with_label(self: _OperatorType, label: str) -> _OperatorType:
        """Return the same operator under another label, without checking its fields again."""
        twin = object.__new__(self.__class__)
        twin.__dict__.update(self.__dict__, label=label)
        return twin

    def with_sizes(self: _OperatorType, sizes: Mapping[str, object]) -> _OperatorType:
        """Return the operator with other sizes, which may be arrays; nothing checks them."""
        twin = object.__new__(self.__class__)
        twin.__dict__.update(self.__dict__, **sizes)
        twin.__dict__.pop("work", None)  # the cached work of the old sizes
        return twin

    @property
    def name(self) -> str:
        """Return the name that people see: the kind, or for elementwise operators the function."""
        return self.kind

    @property
    def math_dtype(self) -> Dtype:
        """Return the format that products are computed in."""
        return self.dtype

    @property
    def form(self) -> str:
        """Return a label of everything except size that needs its own measurement.

        A prediction of a form that was never measured says so.
        """
        words = [word for name, word in self.form_words.items() if getattr(self, name)]
        return "".join([self.form_text, *words]).format(op=self)

    def __str__(self) -> str:
        """Return name, sizes and number format, such as ``linear 8192x4096x4096 bf16``."""
        sizes = []
        for name, value in vars(self).items():
            if type(value) is int and name not in self.hidden_sizes:
                sizes.append(str(value))
        return f"{self.name} {'x'.join(sizes)} {self.dtype}"

    @cached_property
    def work(self) -> OperatorWork:
        """Work of one call; an operator defines this, or the properties below."""
        return OperatorWork()

    @property
    def flop(self) -> float:
        """Floating-point operations of one call; a multiply-add counts as two."""
        return self.work.flop

    @property
    def flop_dense(self) -> float:
        """Floating-point operations of one call when no mask is taken into account."""
        return self.flop

    @property
    def sfu_op(self) -> float:
        """Special-function operations (exponentials, reciprocals, tanh) of one call."""
        return self.work.sfu_op

    @property
    def read_byte(self) -> float:
        """Bytes one call reads when nothing is cached."""
        return self.work.read_byte

    @property
    def write_byte(self) -> float:
        """Bytes one call writes."""
        return self.work.write_byte


def is_any(flag: Any) -> bool:
    """Tell whether a condition holds; of arrays of sizes, in any row."""
    return bool(flag.any() if isinstance(flag, np.ndarray) else flag)


MOST_BYTE = 8.0 * 2**40  # of 2^40 elements of 64 bits
MOST_SIZE = 2**40
MOST_CALLS = 10**10  # of one operator in one run: at a microsecond each they take three hours


def check_size(op: Operator) -> None:
    """Raise an error for an operator beyond all reason, which is a slip of the finger."""
    try:
        byte = np.max(op.read_byte + op.write_byte)
    except OverflowError:  # of sizes that no float holds
        byte = np.inf
    for name, size in op.__dict__.items():
        is_size = isinstance(size, (int, np.ndarray)) and not isinstance(size, bool)
        if is_size and is_any(size > MOST_SIZE):
            expected = "a whole number of at most 2^40"
            raise bad_value(f"{op.name}.{name}", expected, np.max(size), "Check its sizes.")
    if is_any(op.count > MOST_CALLS):
        raise bad_value(f"{op.name}.count", f"at most {MOST_CALLS:,} calls", np.max(op.count))
    if byte > MOST_BYTE:
        where = clip_text(op, 200)
        raise bad_value(where, "at most 2^40 elements", f"{byte:.3g} bytes", "Check its sizes.")


MANY_OPS = 4096  # from so many on, columns gain more than making them takes
RowIndex = npt.NDArray[np.intp]
# Rows, their class, and objects that have its fields.
OperatorRecords = tuple[RowIndex, type[Operator], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class OperatorColumns(Sequence[Operator]):
    """Many operators in columns; one is made when somebody looks at it.

    Operators of a form differ in sizes alone.
    """

    forms: CodedColumn[Operator]  # one operator for each form
    sizes: Array  # (size, row) as ``size_names`` of the form has them
    labels: CodedColumn[str]

    @classmethod
    def from_records(
        cls,
        parts: Sequence[OperatorRecords],
        make: Callable[[type, Any], Operator],
    ) -> OperatorColumns:
        """Stack records of all rows; ``make`` returns the operator of one."""
        count = sum(len(records) for _, _, records in parts)
        sizes = np.zeros((max(len(kind.size_names) for _, kind, _ in parts), count))
        form = np.empty(count, np.intp)
        examples = list[Operator]()
        labels = []
        for rows, kind, records in parts:
            _, place = index_distinct(map(kind.read_words, records))
            form[rows] = place + len(examples)
            _, first_places = np.unique(place, return_index=True)
            examples += [make(kind, records[i]) for i in first_places.tolist()]
            for column, name in zip(sizes, kind.size_names, strict=False):
                values = map(attrgetter(name), records)
                column[rows] = np.fromiter(values, np.float64, len(records))
            labels.append((rows, map(attrgetter("label"), records)))
        return cls(CodedColumn(examples, form), sizes, CodedColumn.from_parts(labels, count))

    @classmethod
    def from_operators(cls, ops: Sequence[Operator]) -> OperatorColumns:
        """Stack operators, unless they are stacked already."""
        if isinstance(ops, OperatorColumns):
            return ops
        kinds, place = index_distinct(map(type, ops))
        parts = []
        for rows, kind in zip(split_rows(place, len(kinds)), kinds, strict=True):
            parts.append((rows, kind, select_operators(ops, rows)))
        return cls.from_records(parts, lambda _, op: op)

    def __len__(self) -> int:
        return len(self.forms)

    def __getitem__(self, row: Any) -> Any:
        if not isinstance(row, (int, np.integer)):
            return self.select_rows(row)
        form = self.forms[row]
        values = map(int, self.sizes[:, row].tolist())
        sizes = dict(zip(form.size_names, values, strict=False))
        return form.with_sizes(sizes | {"label": self.labels[row]})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def select_rows(self, rows: RowIndex | slice) -> OperatorColumns:
        """Return some of the operators."""
        return OperatorColumns(self.forms[rows], self.sizes[:, rows], self.labels[rows])

    @cached_property
    def rows_by_form(self) -> list[RowIndex]:
        """The rows of each form."""
        return split_rows(self.forms.place, len(self.forms.values))

    def stack_forms(self) -> Iterator[Operator]:
        """Yield one operator for each form, whose sizes are arrays of those of all its rows."""
        for form, rows in zip(self.forms.values, self.rows_by_form, strict=True):
            sizes = dict(zip(form.size_names, self.sizes[:, rows], strict=False))
            yield form.with_sizes(sizes)

    def merge_equal(self) -> tuple[OperatorColumns, RowIndex]:
        """Return the distinct operators and the place of each operator among them.

        Those of a form follow one another.
        """
        first = find_equal(np.array([self.forms.place, *self.sizes[1:]]))
        by_form = np.concatenate(self.rows_by_form)
        order = by_form[first[by_form] == by_form]
        place = np.empty(len(first), np.intp)
        place[order] = np.arange(len(order))
        return self.select_rows(order), place[first]

    def describe(self) -> list[str]:
        """Return the text of each operator."""
        texts = np.empty(len(self), object)
        for form, rows in zip(self.forms.values, self.rows_by_form, strict=True):
            # The text of a form, with marks in place of its sizes
            marks = {name: _FIRST_MARK + i for i, name in enumerate(form.size_names)}
            text = str(form.with_sizes(marks))
            for i, mark in enumerate(marks.values()):
                text = text.replace(str(mark), f"{{{i}}}")
            sizes = self.sizes[: len(marks), rows].astype(np.int64)
            texts[rows] = list(map(text.format, *sizes.tolist()))
        return texts.tolist()


_FIRST_MARK = 10**15  # no operator is as large


def index_words(ops: Sequence[Any], read: Callable[[Any], _Word]) -> CodedColumn[_Word]:
    """Return what ``read`` returns for each operator, where sizes do not change it."""
    if not isinstance(ops, OperatorColumns):
        return CodedColumn(*index_distinct(map(read, ops)))
    words, place = index_distinct(map(read, ops.forms.values))
    return CodedColumn(words, place.take(ops.forms.place))


def select_operators(ops: Sequence[Operator], rows: RowIndex) -> Sequence[Operator]:
    """Return some of the operators, in columns where all are."""
    if isinstance(ops, OperatorColumns):
        return ops.select_rows(rows)
    return tuple([ops[i] for i in rows.tolist()])


_REGISTRY: dict[str, type[Operator]] = {}
# The least values of some fields; other whole numbers are at least 1.
_MAY_BE_ZERO = (
    "padding",
    "bytes",
    "overlaps",
    "window",
    "splits",
    "elsewhere",
    "all_tokens",
    "all_picks",
)
_LEAST = dict.fromkeys(_MAY_BE_ZERO, 0) | {"group": -1}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register_operator(
    kind: str, family: str = ""
) -> Callable[[type[_OperatorType]], type[_OperatorType]]:
    """Make a class a frozen dataclass and register it as an operator under ``kind``.

    That is the word for it in workload JSON.

    >>> @register_operator("sort")
    ... class Sort(Operator):
    ...     n: int
    >>> str(Sort(8)), _REGISTRY.pop("sort").family
    ('sort 8 bf16', 'sort')
    """

    def register(cls: type[_OperatorType]) -> type[_OperatorType]:
        assert kind not in _REGISTRY, f"two operators are called {kind}"
        if "__dataclass_fields__" not in vars(cls):
            # A base class that is a dataclass of its own compares its own fields only
            makes_methods = cls.__eq__ is not Operator.__eq__
            cls = dataclass(frozen=True, eq=makes_methods, repr=makes_methods)(cls)
        cls.kind = kind
        cls.family = family or kind

        whole_numbers = [item.name for item in fields(cls) if item.type == "int"]
        cls._whole_numbers = tuple([(name, _LEAST.get(name, 1)) for name in whole_numbers])

        # Fields that decide the cost: sizes, where many operators stack, and words
        compared = [item.name for item in fields(cls) if item.compare]
        sizes = [name for name in compared if cls.stacks and name in whole_numbers]
        words = [name for name in compared if name not in sizes]
        cls.size_names = ("count", *sizes)
        cls.read_words = staticmethod(attrgetter(*words))
        cls._read_compared = staticmethod(attrgetter(*compared))
        _REGISTRY[kind] = cls
        return cls

    return register


def registered_operators() -> Mapping[str, type[Operator]]:
    """Return all operator classes by kind, in order of registration."""
    return _REGISTRY


@dataclass(frozen=True)
class PointwiseFunction:
    """One row of ``elementwise.csv``; work is per output element."""

    name: str
    inputs: int
    flop: float
    sfu_op: float
    meaning: str


@cache
def load_functions() -> dict[str, PointwiseFunction]:
    """Read all pointwise functions, by name."""
    functions = {}
    for row in read_shipped_table("wattcast.workload", "elementwise.csv"):
        name, inputs, flop, sfu_op, meaning = row.values()
        functions[name] = PointwiseFunction(
            name,
            int(inputs),
            float(flop),
            float(sfu_op),
            meaning,
        )
    return functions


def find_function(name: str) -> PointwiseFunction:
    """Return the pointwise function called ``name``, or raise an error with the nearest names."""
    table = load_functions()
    if name not in table:
        advice = f"Known: {', '.join(sorted(table))}."
        raise unknown_name("elementwise function", name, table, advice)
    return table[name]
