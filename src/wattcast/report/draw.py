"""The figures of one configuration, by name; what ``predict --plot``, reports and the page offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wattcast.errors import unknown_name
from wattcast.report import predicted
from wattcast.report.figure import breakdown, check_path, origin
from wattcast.report.look import Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(name: str, seen: Look) -> Figure:
    """The figure called ``name`` of one configuration."""
    return FIGURES[known(name)](seen)


def known(name: str) -> str:
    """``name`` if there is such a figure, or an error with the nearest."""
    if name not in FIGURES:
        raise unknown_name("figure", name, FIGURES, f"Known: {', '.join(FIGURES)}.")
    return name


def check(name: str, path: Path) -> None:
    """Both the figure's name and its file's, before anything is computed."""
    known(name)
    check_path(path)


def labels(seen: Sequence[Look]) -> list[str]:
    """What tells configurations apart: the GPU where that is enough, else the workload too, else a number."""
    gpus = [look.prediction.gpu for look in seen]
    if len({look.prediction.name for look in seen}) == 1 and len(set(gpus)) == len(gpus) > 1:
        return gpus
    names = [f"{look.prediction.name} on {look.prediction.gpu}" for look in seen]
    return [f"{i}: {name}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]


def clocks_of(seen: Sequence[Look]) -> Figure:
    """Clock curves of several configurations on the same axes."""
    named = dict(zip(labels(seen), seen, strict=True))
    sweeps = {label: look.clocks for label, look in named.items()}
    chosen = {label: look.prediction for label, look in named.items()}
    return predicted.clock_curves(sweeps, chosen, "; ".join(dict.fromkeys(origin(s.prediction) for s in seen)))


FIGURES: dict[str, Callable[[Look], Figure]] = {
    "breakdown": lambda seen: breakdown(seen.prediction),
    "timeline": lambda seen: predicted.timeline(seen.trace, seen.prediction),
    "roofline": lambda seen: predicted.roofline(seen.prediction, seen.gpu),
    "clocks": lambda seen: clocks_of([seen]),
}
