"""One rule for names people type: case, ``-``, ``_``, ``.`` and blanks do not matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wattcast.errors import unknown_name

_DROPPED = str.maketrans("", "", "-_. ")


def fold(name: str) -> str:
    """``name`` without what does not matter.

    >>> fold("H100 SXM") == fold("h100-sxm")
    True
    """
    return name.lower().translate(_DROPPED)


def resolve(kind: str, found: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """The known name that ``found`` means, or :class:`~wattcast.errors.UnknownName` with the nearest."""
    names = list(known)
    if found in names:
        return found
    table = {fold(name): name for name in names} | {fold(a): n for a, n in (aliases or {}).items()}
    if (name := table.get(fold(found))) is not None:
        return name
    raise unknown_name(kind, found, names, f"`wattcast {kind}s` lists all {len(names)}.")
