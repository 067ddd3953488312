"""Errors that a user can mend.

An error says what was wanted, what was found, and what to do next, in one paragraph. The command
line prints it without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import (
    Collection,
    Iterable,
    Mapping,
)
from difflib import get_close_matches
from enum import IntEnum
from importlib import import_module
from typing import Any


class ExitCode(IntEnum):
    """What the shell sees."""

    OK = 0
    FAILED = 1  # our own mistake, or something unforeseen
    BAD_INPUT = 2  # an option, a file, a name or a number the user gave is wrong
    PARTIAL = 3  # the answer is a lower bound: a part of the sum could not be seen
    MISSING = 4  # a tool, an extra, a device or a specification is not there
    REFUSED = 5  # a measurement that cannot be trusted, or an action not allowed
    INTERRUPTED = 130


OUT_OF_MEMORY = (
    "there is not enough memory. End other programs, or ask for less at once; "
    "files that stood before are as they were, or whole and new."
)


class WattcastError(Exception):
    """Base of all errors that are shown to users as one paragraph."""

    exit_code = ExitCode.FAILED


class BadInput(WattcastError):
    """A value or a file from the user is not what it has to be."""

    exit_code = ExitCode.BAD_INPUT


class CannotWrite(BadInput):
    """A file cannot be written: a full disk, a folder without permission, a name that is taken by a
    folder.
    """

    def __init__(
        self,
        path: object,
        error: OSError,
    ) -> None:
        super().__init__(f"{clip_text(path, 200)}: cannot be written ({error.strerror or error}).")


class UnitError(BadInput):
    """A quantity carries the wrong unit, or none."""


class UnknownName(BadInput):
    """A GPU, model, operator, field ... that nobody knows."""


class MissingSpecification(WattcastError):
    """The catalogue does not know a number that this question needs."""

    exit_code = ExitCode.MISSING


class MissingEvents(WattcastError):
    """A power model needs events its activity does not hold."""

    exit_code = ExitCode.MISSING


class MissingTool(WattcastError):
    """An optional library, a driver or a device is not there."""

    exit_code = ExitCode.MISSING


class Refused(WattcastError):
    """A measurement that cannot be trusted, or an action that is not allowed."""

    exit_code = ExitCode.REFUSED


def import_extra(
    module: str,
    why: str,
    extra: str,
) -> Any:
    """Import a module of a library that one of Wattcast's extras brings, or say what to install."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingTool(f"{why}. Install it: pip install 'wattcast[{extra}]'.") from None


def is_interrupt(error: BaseException | None) -> bool:
    """Say whether Ctrl-C lies behind an error: one that falls into a lock's own code ends as a
    RuntimeError of it.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def bad_value(
    where: str,
    wanted: str,
    found: object,
    do: str = "",
) -> BadInput:
    """Return the error ``where: expected wanted, got found. do``, the sentence that all readers
    share.
    """
    shown = repr(clip_text(found)) if isinstance(found, str) else clip_text(found)
    return BadInput(f"{where}: expected {wanted}, got {shown}.{' ' + do if do else ''}")


def bad_unit(
    where: str,
    wanted: str,
    found: object,
    do: str = "",
) -> UnitError:
    """Return the error of ``bad_value`` as one of units."""
    return UnitError(str(bad_value(where, wanted, found, do)))


def unknown_name(
    kind: str,
    found: str,
    known: Iterable[str],
    do: str = "",
) -> UnknownName:
    """Return the error ``unknown gpu 'h20'`` with the nearest known names."""
    hint = nearest_names(found, known)
    closest = f" Closest: {', '.join(hint)}." if hint else ""
    return UnknownName(f"unknown {kind} {clip_text(found)!r}.{closest}{' ' + do if do else ''}")


def check_names(
    kind: str,
    found: str | Iterable[str],
    known: Collection[str],
    do: str | None = None,
) -> None:
    """Raise ``unknown_name`` for the first of ``found`` that is not known; without ``do`` the error
    lists all.
    """
    for name in (found,) if isinstance(found, str) else found:
        if name not in known:
            raise unknown_name(
                kind, name, known, f"Known: {', '.join(known)}." if do is None else do
            )


def nearest_names(
    found: str,
    known: Iterable[str],
    most: int = 3,
) -> list[str]:
    """Return the known names most like ``found``, best first.

    >>> nearest_names("h10-sxm", ["h100-sxm", "a10", "b200"])
    ['h100-sxm']
    """
    by_lower = {name.lower(): name for name in known}
    typed = clip_text(found).lower()
    matches = get_close_matches(typed, by_lower, most, 0.6)
    if not matches:  # the letters o and l where digits are meant
        matches = get_close_matches(typed.translate(_DIGITS), by_lower, most, 0.6)
    return [by_lower[match] for match in matches]


_DIGITS = str.maketrans("ol", "01")


def bad_word(
    where: str,
    known: Iterable[str],
    found: object,
) -> BadInput:
    """Return the error of a word that is none of the known ones, with the nearest of them."""
    words = list(known)
    nearest = nearest_names(str(found), words, 1)
    if not nearest:  # decoding for decode, train for training
        folded = str(found).lower()[:4]
        nearest = [word for word in words if len(folded) == 4 and word.startswith(folded)][:1]
    do = f"Did you mean {nearest[0]}?" if nearest else ""
    return bad_value(where, f"one of {', '.join(words)}", found, do)


def clip_text(text: object, most: int = 80) -> str:
    """Return ``text`` cut to a length that fits a message; hostile input must not flood a
    terminal.
    """
    words = "".join(c if c.isprintable() else "?" for c in str(text)[: 4 * most])
    return words if len(words) <= most else words[: most - 1] + "…"


_DROPPED = str.maketrans("", "", "-_. ")


def fold_name(name: str) -> str:
    """Return ``name`` in lower case without dashes, dots and blanks, which do not matter.

    >>> fold_name("H100 SXM") == fold_name("h100-sxm")
    True
    """
    return name.lower().translate(_DROPPED)


def resolve_name(
    kind: str,
    found: str,
    known: Iterable[str],
    aliases: Mapping[str, str] | None = None,
) -> str:
    """Return the known name that ``found`` means, or raise ``UnknownName`` with the nearest."""
    names = list(known)
    if found in names:
        return found
    table = {fold_name(name): name for name in names} | {
        fold_name(a): n for a, n in (aliases or {}).items()
    }
    if (name := table.get(fold_name(found))) is not None:
        return name
    if (
        command := {
            "node": "gpus nodes",
            "gpu": "gpus",
            "model": "models",
        }.get(kind)
    ) is None:
        raise unknown_name(kind, found, names, f"Known: {', '.join(names)}.")
    folded = {
        "model": " A Hugging Face id or a config.json works too.",
        "gpu": " A YAML file of your own works too.",
    }
    raise unknown_name(
        kind, found, names, f"`wattcast {command}` lists all {len(names)}.{folded.get(kind, '')}"
    )
