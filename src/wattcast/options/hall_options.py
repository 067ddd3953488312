"""The options of ``hall``: which part of the day, on which grid, and where it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from wattcast.core import bad_value, units
from wattcast.core.option_declaration import Option

ENDINGS = ("csv", "parquet")
_RUN_PANEL = "How it is computed"


def parse_moment(value: Any, where: str) -> float:
    """Return seconds since midnight of ``14:30`` or of a time such as ``2h``.

    >>> parse_moment("14:30", "--begin")
    52200.0
    """
    text = str(value).strip()
    hours, colon, minutes = text.partition(":")
    if not colon:
        return units.parse_seconds(value, where)
    if not (hours.isdigit() and minutes.isdigit() and int(minutes) < 60):
        raise bad_value(where, "a moment such as 14:30, or a time such as 2h", text)
    return 3600.0 * int(hours) + 60.0 * int(minutes)


@dataclass(frozen=True)
class HallOptions:
    """What of a hall is computed, and what is asked of it."""

    begin_s: Annotated[
        float,
        Option("Time of day to begin at: 14:30, 2h.", "begin", keyword="begin", parse=parse_moment),
    ] = 0.0
    span_s: Annotated[
        float | None,
        Option("How long to simulate: 10min; default: to the end of the day.", unit="s", above=0),
    ] = None
    grid_s: Annotated[
        float, Option("Interval of the series: 20ms, 1s, 15min.", "grid", unit="s", above=0)
    ] = 1.0
    chance: Annotated[
        float,
        Option("Chance of passing the hall's limit, for racks that still fit.", unit="", above=0),
    ] = 1e-3
    out: Annotated[
        Path | None,
        Option("Folder of the series and the summary; the same command continues there."),
    ] = None
    format: Annotated[str, Option("Format of the series: csv|parquet.", choices=ENDINGS)] = "csv"


@dataclass(frozen=True)
class SheddingOptions:
    """A grid's request to draw less for a while."""

    shed_w: Annotated[
        float | None,
        Option("Power to save from --begin on, for --span.", unit="W", above=0),
    ] = None
    slowdown: Annotated[
        float, Option("Growth of p99 latencies that --shed may cost: 50%.", unit="")
    ] = 0.5


@dataclass(frozen=True)
class HallRun:
    """Where a hall is computed."""

    workers: Annotated[
        int | None,
        Option("Number of processes; default: one per core.", panel=_RUN_PANEL, least=1),
    ] = None
    cluster: Annotated[
        str | None,
        Option("Dask scheduler you trust, such as tcp://host:8786, or local.", panel=_RUN_PANEL),
    ] = None
