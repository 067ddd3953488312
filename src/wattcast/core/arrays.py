"""The axis convention that lets one code path serve one point and a million.

Axes run ``(*sweep, interval)``, events or parts last. One configuration is the sweep of shape
``()``. A field of a GPU or an operating point is a float, or an array shaped ``(*sweep, 1)``, so
that it broadcasts against kernels on the last axis. In memory the sweep is the fastest axis
(``order="F"`` where a field first meets the kernels, and what is computed from there keeps it): a
step over a million points and forty kernels is forty long loops, not a million short ones."""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import (
    Any,
    TypeAlias,
    TypeVar,
)

import numpy as np
import numpy.typing as npt

from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
)

Array: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Sweepable: TypeAlias = float | Array  # a float, or (*sweep, 1)
_Value = TypeVar("_Value", bound=Hashable)


def as_sweep(values: npt.ArrayLike) -> Sweepable:
    """Return values over a sweep, shaped ``(*sweep, 1)``; a plain number stays one.

    >>> as_sweep([1.0, 2.0]).shape, as_sweep(3.0)
    ((2, 1), 3.0)
    """
    array = np.asarray(values, dtype=np.float64)
    return float(array) if array.ndim == 0 else array[..., np.newaxis]


def sweep_values(value: Sweepable) -> Array:
    """Return ``(*sweep,)`` from ``(*sweep, 1)``; a float becomes an array of shape ()."""
    array = np.asarray(value, dtype=np.float64)
    return array[..., 0] if array.ndim else array


def take_sweep(values: Array, points: npt.NDArray[np.intp], size: int) -> Array:
    """Return values ``(*sweep, ...)`` at some points of a sweep of ``size`` points; those that do
    not vary over it stay.

    >>> take_sweep(np.arange(3.0), np.array([2, 0]), 3).tolist(), take_sweep(np.ones(1), [2], 3)
    ([2.0, 0.0], array([1.]))
    """
    if not values.ndim or values.shape[0] != size:
        return values
    return values.T.take(points, axis=-1).T  # the sweep stays end to end in memory


def append_axes(values: npt.NDArray[Any], axes: int) -> npt.NDArray[Any]:
    """Return values ``(*sweep,)`` with axes of length one behind them, ``axes`` in all, to meet
    kernels or parts.

    >>> append_axes(np.zeros(3), 2).shape, append_axes(np.zeros(()), 1).shape
    ((3, 1), (1,))
    """
    return values[(..., *[np.newaxis] * (axes - values.ndim))]


class CodedColumn(Sequence[_Value]):
    """Values of many rows, few of them distinct: these, and the place of each row's value among
    them.

    >>> column = CodedColumn(["a", "b", "c"], np.array([2, 0, 2]))
    >>> list(column), column.values, column[1], list(column[1:])
    (['c', 'a', 'c'], ('a', 'c'), 'a', ['a', 'c'])
    """

    def __init__(
        self,
        values: Sequence[_Value],
        place: npt.NDArray[np.intp],
    ) -> None:
        """Keep the values that have a row."""
        used = np.flatnonzero(np.bincount(place, minlength=len(values)))
        self.values = tuple(map(values.__getitem__, used.tolist()))
        self.place = place if len(used) == len(values) else used.searchsorted(place)

    def __len__(self) -> int:
        return len(self.place)

    def __getitem__(self, row: Any) -> Any:
        place = self.place[row]
        return (
            CodedColumn(self.values, place) if isinstance(place, np.ndarray) else self.values[place]
        )

    def __iter__(self) -> Iterator[_Value]:
        return map(self.values.__getitem__, self.place.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    @classmethod
    def from_parts(
        cls,
        parts: Iterable[tuple[Any, Iterable[_Value]]],
        count: int,
    ) -> CodedColumn[_Value]:
        """Return the column of all rows from the values of some rows each."""
        values = list[_Value]()
        place = np.empty(count, np.intp)
        for rows, some in parts:
            distinct, code_of_part = index_distinct(some)
            place[rows] = code_of_part + len(values)
            values += distinct
        names, at = index_distinct(values)
        return cls(names, at.take(place))


def index_distinct(values: Iterable[_Value]) -> tuple[Sequence[_Value], npt.NDArray[np.intp]]:
    """Return the distinct values, in order of first use, and the place of each value among them.

    >>> index_distinct("abca")[0], index_distinct("abca")[1].tolist()
    (['a', 'b', 'c'], [0, 1, 2, 0])
    """
    if isinstance(values, CodedColumn):
        return values.values, values.place
    values = list(values)
    place = dict.fromkeys(values, 0)
    if len(place) in (1, len(values)):
        return list(place), np.arange(len(values)) * (len(place) > 1)
    place.update(zip(place, range(len(place)), strict=True))
    return list(place), np.fromiter(map(place.__getitem__, values), np.intp, len(values))


def split_rows(place: npt.NDArray[np.intp], count: int) -> list[npt.NDArray[np.intp]]:
    """Return the rows that have each of the places from zero to ``count``.

    >>> [rows.tolist() for rows in split_rows(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]
    """
    ends = np.bincount(place, minlength=count).cumsum()
    code = (
        place.astype(np.uint16) if count <= 2**16 else place
    )  # small ones are sorted several times as fast
    return np.split(np.argsort(code, kind="stable"), ends[:-1])[:count]


def find_equal(table: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return the first row that is equal to each row in all columns of whole numbers, ``(column,
    row)``.
    """
    key = np.zeros(table.shape[1], np.uint64)
    first = np.arange(table.shape[1])
    for column in table.astype(np.uint64):
        key = (key ^ (key >> np.uint64(32))) * _MIX + column
    for words in (key, table) if (np.diff(np.sort(key)) == 0).any() else ():
        _, rows, place = np.unique(
            words,
            axis=-1,
            return_index=True,
            return_inverse=True,
        )
        first = rows[place]
        if (table == table[:, first]).all():  # else two that differ have one key
            break
    return first


_MIX = np.uint64(
    0x9E3779B97F4A7C15
)  # an odd number whose bits look random: 2^64 over the golden ratio


def map_distinct(function: Callable[[_Value], Any], values: Iterable[_Value]) -> npt.NDArray[Any]:
    """Return what a function gives for each value, called once for each distinct one.

    >>> map_distinct(len, ["row", "tile", "row"]).tolist()
    [3, 4, 3]
    """
    distinct, place = index_distinct(values)
    return np.array([function(value) for value in distinct]).take(place, axis=0)


_MANY_ROWS = 8192  # from which threads gain more than starting them takes
_Result = TypeVar("_Result")


def map_blocks(
    work: Callable[[slice], _Result],
    rows: int,
    most: int = 2048,
) -> list[_Result]:
    """Return what ``work`` gives for each block of rows, on every core where there are many rows.

    NumPy computes without Python's lock, so threads are enough.
    """
    blocks = [slice(start, start + most) for start in range(0, rows, most)]
    if rows < _MANY_ROWS:
        return [work(block) for block in blocks]
    from concurrent.futures import ThreadPoolExecutor  # a small prediction starts without it

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(work, blocks))


def check_positive(where: str, values: Mapping[str, Sweepable | None]) -> None:
    """Raise an error unless every value is finite and above zero; None means unknown and passes."""
    for name, value in values.items():
        if value is None or (isinstance(value, float) and 0.0 < value < math.inf):
            continue
        array = np.asarray(value)
        if not (np.isfinite(array).all() and (array > 0).all()):
            bad = array[~(np.isfinite(array) & (array > 0))].flat[0] if array.ndim else array
            raise bad_value(f"{where}.{name}", "a finite number above zero", float(bad))


def pareto_front(objectives: Array) -> npt.NDArray[np.int64]:
    """Return the rows of ``(point, objective)`` on the front, in order of the first objective.

    A point is on the front when none is at least as good everywhere and better somewhere. Of points
    equal in all objectives the first is kept; objectives count as equal to ten digits, so that the
    last bits, which depend on how a sweep was cut into chunks, decide nothing.

    >>> points = [[1.0, 9.0], [2.0, 5.0], [3.0, 7.0], [4.0, 1.0], [4.0, 1.0]]
    >>> pareto_front(np.array(points)).tolist()
    [0, 1, 3]
    """
    mantissa, exponent = np.frexp(objectives)
    rounded = np.ldexp(np.round(mantissa * 2.0**33) / 2.0**33, exponent)
    order = np.lexsort(rounded.T[::-1])  # stable: equal points stay in order
    ranked = rounded[order]
    if ranked.shape[1] == 2:
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], ranked[:-1, 1]]))
        return order[ranked[:, 1] < best_before].astype(np.int64)
    open_rows = np.arange(len(ranked))
    front = []
    while open_rows.size:  # only a row that is earlier in lexicographic order can dominate another
        front.append(open_rows[0])
        open_rows = open_rows[1:][(ranked[open_rows[1:]] < ranked[open_rows[0]]).any(axis=-1)]
    return order[np.array(front, dtype=np.int64)].astype(np.int64)


def pareto_rows(
    columns: Mapping[str, npt.NDArray[Any]], objectives: Sequence[str]
) -> dict[str, npt.NDArray[Any]]:
    """Return the rows of a table that are on the front of the named columns."""
    rows = pareto_front(
        np.stack([np.asarray(columns[name], dtype=np.float64) for name in objectives], axis=-1)
    )
    return {name: values[rows] for name, values in columns.items()}


def table_rows(columns: Mapping[str, npt.NDArray[Any]]) -> list[dict[str, Any]]:
    """Return columns of one length as plain rows, for JSON and Parquet.

    >>> table_rows({"clock_hz": np.array([1e9, 2e9])})
    [{'clock_hz': 1000000000.0}, {'clock_hz': 2000000000.0}]
    """
    plain = {name: np.asarray(values).tolist() for name, values in columns.items()}
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


MOST_UNPACKED_BYTE = 2**30
_ARRAY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|]\w+)', 'fortran_order': (True|False), "
    rb"'shape': \(([\d, ]*)\), \} *\n",
    re.S,
)  # as NumPy writes it; its own reader parses Python, which takes a tenth of a cold command


def read_arrays(
    data: bytes,
    where: str,
    max_byte: int = MOST_UNPACKED_BYTE,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an ``.npz`` file of at most ``max_byte`` unpacked; sizes in it are not
    believed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
        total = sum(info.file_size for info in members)
        if total <= max_byte:
            return {
                info.filename.removesuffix(".npy"): _parse_array(_read_member(data, info))
                for info in members
            }
    except Exception as error:  # zipfile, zlib and NumPy raise a dozen kinds for damaged bytes
        raise BadInput(
            f"{where}: not a whole .npz file ({type(error).__name__}: {clip_text(error)})."
        ) from None
    raise bad_value(where, f"at most {max_byte} bytes unpacked", f"{total} bytes")


def _parse_array(plain: bytes) -> npt.NDArray[Any]:
    head = _ARRAY_HEADER.match(plain)
    if head is None or (dtype := np.dtype(head[1].decode())).hasobject:
        raise ValueError("an array that NumPy does not write")
    shape = tuple(int(size) for size in head[3].decode().split(",") if size.strip())
    if math.prod(shape) * dtype.itemsize != len(plain) - head.end():
        raise ValueError("an array whose size is not that of its data")
    return np.frombuffer(plain, dtype, offset=head.end()).reshape(
        shape, order="F" if head[2] == b"True" else "C"
    )


def _read_member(data: bytes, info: zipfile.ZipInfo) -> bytes:
    """Return the plain bytes of one member of an archive; opening it with ``zipfile`` takes five
    times as long.
    """
    name_byte, extra_byte = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + name_byte + extra_byte
    plain = data[start : start + info.compress_size]
    if info.compress_type == zipfile.ZIP_DEFLATED:
        plain = zlib.decompressobj(-zlib.MAX_WBITS).decompress(plain, info.file_size)
    if len(plain) != info.file_size or zlib.crc32(plain) != info.CRC:
        raise ValueError(f"{clip_text(info.filename)} is damaged")
    return plain
