"""Where a number came from, and how far to trust it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a set of coefficients came about."""

    FITTED = "fitted"  # to measurements of this very device
    INHERITED = "inherited"  # carried over from another device's measurements
    PROVISIONAL = "provisional"  # rough numbers that keep the path whole until they are replaced


@dataclass(frozen=True)
class Provenance:
    """Source, date and device of a fitted or measured set of numbers."""

    source: str
    date: str = ""
    device: str = ""
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A published number: who says so, and who says otherwise."""

    source: str
    note: str = ""
    disputed: tuple[tuple[str, str], ...] = ()  # (value as written, source)
