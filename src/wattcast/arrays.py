"""The axis convention that lets one code path serve one point and a million.

Axes run ``(*sweep, interval)``, events or parts last. One configuration is the sweep of shape
``()``. A field of a GPU or an operating point is a float, or an array shaped ``(*sweep, 1)``, so
that it broadcasts against kernels on the last axis.

In memory it is the sweep that lies end to end (``order="F"`` where a field first meets the kernels; what is
computed from there keeps it): a step over a million points and forty kernels is forty long loops, not a
million short ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wattcast.errors import bad_value

Array: TypeAlias = npt.NDArray[np.float64]
Scalar: TypeAlias = float | Array  # a float, or (*sweep, 1)


def swept(values: npt.ArrayLike) -> Scalar:
    """Values over a sweep, shaped ``(*sweep, 1)``; a plain number stays one.

    >>> swept([1.0, 2.0]).shape, swept(3.0)
    ((2, 1), 3.0)
    """
    array = np.asarray(values, dtype=np.float64)
    return float(array) if array.ndim == 0 else array[..., np.newaxis]


def grid(**axes: npt.ArrayLike) -> dict[str, Scalar]:
    """All combinations of the named axes, each shaped ``(*sweep, 1)`` with one sweep axis per name.

    >>> {k: v.shape for k, v in grid(clock_hz=[1e9, 2e9, 3e9], sm_count=[64, 128]).items()}
    {'clock_hz': (3, 2, 1), 'sm_count': (3, 2, 1)}
    """
    values = [np.asarray(v, dtype=np.float64) for v in axes.values()]
    meshes = np.meshgrid(*values, indexing="ij") if values else []
    return {name: swept(mesh) for name, mesh in zip(axes, meshes, strict=True)}


def per_sweep(value: Scalar) -> Array:
    """``(*sweep, 1)`` -> ``(*sweep,)``; a float becomes an array of shape ()."""
    array = np.asarray(value, dtype=np.float64)
    return array[..., 0] if array.ndim else array


def check_positive(where: str, values: Mapping[str, Scalar | None]) -> None:
    """Every value is finite and above zero; None means unknown and passes."""
    for name, value in values.items():
        if value is None or (isinstance(value, float) and 0.0 < value < math.inf):
            continue
        array = np.asarray(value)
        if not (np.isfinite(array).all() and (array > 0).all()):
            bad = array[~(np.isfinite(array) & (array > 0))].flat[0] if array.ndim else array
            raise bad_value(f"{where}.{name}", "a finite number above zero", float(bad))
