"""What of a value decides results, and nothing else: its fingerprint, and its bytes for another process.

A bundle that was used keeps what it worked out: factors of kernels it met, its trees as questions, products of its
matrices. That is half as much again as the bundle itself, it differs from one run to the next, and a worker has it
again within milliseconds. So neither a fingerprint nor a message holds it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np


def fingerprint(value: Any) -> str:
    """A hash of everything that decides results: equal values have equal ones, in any process."""
    hashed = hashlib.sha256()
    _feed(hashed, value)
    return hashed.hexdigest()


def packed(value: Any) -> bytes:
    """A value as bytes. They are a pickle: read those of your own processes, and nobody else's."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return zlib.compress(stream.getvalue(), 1)


@lru_cache(maxsize=1)
def unpacked(data: bytes) -> Any:
    """The value again; the same bytes give the same object, which by then keeps what it worked out."""
    return pickle.loads(zlib.decompress(data))  # noqa: S301 - what this program packed


class _Pickler(pickle.Pickler):
    """Frozen dataclasses by the fields they are made from."""

    def reducer_override(self, value: Any) -> Any:
        """How a value is made again; ``NotImplemented``: as usual."""
        if not is_dataclass(value) or isinstance(value, type):
            return NotImplemented
        return _made, (type(value), _deciding(value))


def _made(kind: type, given: dict[str, Any]) -> Any:
    return kind(**given)


def _deciding(value: Any) -> dict[str, Any]:
    """The fields a dataclass is made from, without those it keeps things in."""
    names = (item.name for item in fields(value) if item.init and not item.name.startswith("_"))
    return {name: getattr(value, name) for name in names}


def _feed(hashed: Any, value: Any) -> None:
    """Every field of a value into a hash, arrays by their bytes."""
    hashed.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        hashed.update(str((value.dtype.str, value.shape)).encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Enum):
        hashed.update(str(value.value).encode())
    elif is_dataclass(value):
        for name, item in _deciding(value).items():
            hashed.update(name.encode())
            _feed(hashed, item)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            hashed.update(str(key).encode())
            _feed(hashed, value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            _feed(hashed, item)
    else:
        hashed.update(repr(value).encode() + b";")
