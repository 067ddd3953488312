"""Folds of a kernel database: all rows of a shape lie in one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from wattcast.fit.kernels_data import Rows
from wattcast.workload.graph import Operator

FOLDS = 5


def shape_of(op: Operator) -> str:
    """What makes two rows the same shape: the operator and its sizes, whatever the number format."""
    whole = (
        (f.name, getattr(op, f.name)) for f in fields(op) if f.name not in ("dtype", "out_dtype", "count", "label")
    )
    sizes = [f"{name}={value}" for name, value in whole if not name.startswith(("read", "write"))]
    return f"{op.name} {' '.join(sizes)}"


def folds_of(rows: Rows, folds: int = FOLDS, seed: int = 0) -> npt.NDArray[np.int64]:
    """Fold of each row; a shape lies in one fold."""
    _, shape = np.unique([shape_of(op) for op in rows.ops], return_inverse=True)
    return np.asarray(np.random.default_rng(seed).permutation(int(shape.max()) + 1)[shape] % folds)
