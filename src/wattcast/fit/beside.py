"""Fits of the same rows, one after another or beside each other on all cores where each takes a while."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Found = TypeVar("_Found")
MANY_ROWS = 2000  # of a database, from which on a fit takes longer than starting a process


def each(step: Callable[..., _Found], work: Iterable[tuple[Any, ...]], rows: int) -> Iterable[_Found]:
    """What ``step`` finds for each of ``work``, in order, as it comes; ``rows`` is the size of the database.

    >>> list(each(pow, [(2, 3), (3, 2)], rows=10))
    [8, 9]
    """
    if rows < MANY_ROWS:
        return (step(*one) for one in work)
    joblib = importlib.import_module("joblib")  # comes with scikit-learn
    found: Iterable[_Found] = joblib.Parallel(n_jobs=-1, return_as="generator")(
        joblib.delayed(step)(*one) for one in work
    )
    return found
