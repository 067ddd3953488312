"""Read watts over time from logs that other tools wrote, and integrate them to joules.

``power_log_forms`` lists the tools and reads their lines, and ``time_stamps`` their times. Energy
is the integral of power by trapezoids, so a sensor that reads seldom misses what happens in
between. A stretch without readings is left out of the integral and flagged, and so is a reading
that no card can have drawn. A stamp or a value that cannot be read is refused with its line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.errors import BadInput, bad_value
from wattcast.core.regular_files import open_regular
from wattcast.measure.power_log_forms import (
    GPU_FORMS,
    LogLine,
    LogLines,
    read_log_lines,
)
from wattcast.measure.time_stamps import (
    Array,
    Stamp,
    StampTimes,
    check_rising,
    place_whole_seconds,
    read_stamps,
)
from wattcast.measure.window_summary import WINDOWS


class PowerLogCoefficients(Coefficients):
    """Which readings and times of a power log are used."""

    most_rail_w: float  # that a rail may draw
    most_gpu_w: float  # that a GPU board may draw
    gap_intervals: float  # usual intervals, beyond which a pause between readings is a gap
    least_whole_seconds: int  # lines with whole seconds that are needed to tell their interval


LOGS = load_coefficients("power_logs", PowerLogCoefficients)


MOST_BYTE = 2**28  # of a log: a device that is read as one has no end
GAPS_NAMED = 3  # gaps that are flagged one by one
WHAT_TO_DO = "Give the time between lines, such as --interval 100ms."


@dataclass(frozen=True)
class RailReadings:
    """Watts of one rail, card or meter over time, and what is wrong with its times."""

    time_s: Array  # from the first line of the log
    watts: Array  # NaN where a line did not say
    lines: tuple[int, ...]
    time_flags: tuple[str, ...] = ()
    most_w: float = LOGS.most_rail_w

    def find_inside(
        self,
        start_s: float,
        end_s: float,
    ) -> np.ndarray:
        """Tell which readings lie between two moments."""
        return (self.time_s >= start_s) & (self.time_s <= end_s)

    @property
    def has_drawn(self) -> bool:
        """Tell whether a reading differs from zero."""
        return bool(np.nanmax(np.abs(self.watts), initial=0.0) > 0.0)


@dataclass(frozen=True)
class RailSummary:
    """Joules and watts of one rail between two moments; ``flags`` say why they may be wrong."""

    power_w: float
    largest_w: float
    energy_j: float
    duration_s: float  # that readings cover, without the gaps
    samples: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class PowerLog:
    """A log of one form: readings of every rail that drew power."""

    form: str
    rails: Mapping[str, RailReadings]
    notes: tuple[str, ...] = field(default=())

    def summarise(
        self,
        start_s: float = 0.0,
        end_s: float = np.inf,
    ) -> dict[str, RailSummary]:
        """Return mean and largest watts, joules and seconds of every rail between two moments."""
        summaries = {}
        lines = 0
        for name, rail in self.rails.items():
            lines += int(rail.find_inside(start_s, end_s).sum())
            summary = summarise_rail(rail, start_s, end_s)
            if summary is not None:
                summaries[name] = summary
        if not summaries:
            raise bad_value("log", "two readings or more between --from and --to", f"{lines} lines")
        return summaries


def summarise_rail(
    rail: RailReadings,
    start_s: float,
    end_s: float,
) -> RailSummary | None:
    """Integrate a rail by trapezoids over all stretches without a gap.

    None where fewer than two readings are usable.
    """
    is_inside = rail.find_inside(start_s, end_s)
    is_read = is_inside & np.isfinite(rail.watts)
    is_beyond = (rail.watts < 0.0) | (rail.watts > rail.most_w)
    is_impossible = is_read & is_beyond
    is_used = is_read & ~is_impossible
    if is_used.sum() < 2:
        return None

    places = np.flatnonzero(is_used)
    watts = rail.watts[places]
    step_s = np.diff(rail.time_s[places])
    is_gap = _find_gaps(rail.time_s[is_inside], step_s)
    covered_s = float(step_s[~is_gap].sum())
    if covered_s <= 0.0:
        return None
    trapezoids_j = 0.5 * (watts[1:] + watts[:-1]) * step_s
    energy_j = float(trapezoids_j[~is_gap].sum())
    flags = [
        *rail.time_flags,
        *_flag_impossible(rail, is_impossible),
        *_flag_gaps(rail, places, step_s, is_gap),
    ]
    return RailSummary(
        power_w=energy_j / covered_s,
        largest_w=float(watts.max()),
        energy_j=energy_j,
        duration_s=covered_s,
        samples=int(is_used.sum()),
        flags=tuple(flags),
    )


def _find_gaps(line_s: Array, step_s: Array) -> np.ndarray:
    """Tell which steps between readings are much longer than the usual one between lines."""
    between_s = np.diff(line_s)
    between_s = between_s[between_s > 0.0]
    if len(between_s) < 2:
        return np.zeros(len(step_s), dtype=bool)
    return step_s > LOGS.gap_intervals * float(np.median(between_s))


def _flag_impossible(rail: RailReadings, is_impossible: np.ndarray) -> list[str]:
    """Return a flag for readings that no card can have drawn."""
    places = np.flatnonzero(is_impossible)
    if not len(places):
        return []
    first = int(places[0])
    reading = f"{rail.watts[first]:.6g} W in line {rail.lines[first]}"
    return [f"{len(places)} impossible readings left out, the first {reading}"]


def _flag_gaps(
    rail: RailReadings,
    places: np.ndarray,
    step_s: Array,
    is_gap: np.ndarray,
) -> list[str]:
    """Return a flag for each of the first gaps between readings, and one for all."""
    gaps = np.flatnonzero(is_gap)
    flags = []
    for gap in gaps[:GAPS_NAMED]:
        line = rail.lines[places[gap]]
        flags.append(
            f"no readings for {step_s[gap]:.6g} s after line {line}, left out "
            "(a pause, or a clock that was set forward)"
        )
    if len(gaps) > GAPS_NAMED:
        flags.append(f"{len(gaps)} such gaps, {step_s[gaps].sum():.6g} s in all")
    return flags


def read_power_log(
    path: Path,
    interval_s: float | None = None,
    time_format: str = "",
) -> PowerLog:
    """Read a log of any form above.

    ``interval_s`` is the time between lines, in place of their own times; it is needed where lines
    have none. ``time_format`` says how times are written where that can be read in several ways.
    """
    if interval_s is not None and not 0.0 < interval_s < np.inf:
        raise bad_value("--interval", "a time above zero, such as 100ms", interval_s)
    log = read_log_lines(_read_lines(path), path.name)
    if interval_s is None:
        rails = _make_stamped_rails(log, path.name, time_format)
    else:
        rails = _make_even_rails(log, interval_s, time_format)
    return PowerLog(log.form, {name: rail for name, rail in rails.items() if rail.has_drawn})


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file that are not empty, with their numbers."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MOST_BYTE)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}.") from None
    if len(data) == MOST_BYTE:
        raise bad_value(path.name, f"a log of less than {MOST_BYTE} bytes", "more")
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    numbered = enumerate(text.splitlines(), start=1)
    return [(number, line) for number, line in numbered if line.strip()]


def _make_stamped_rails(
    log: LogLines,
    name: str,
    time_format: str,
) -> dict[str, RailReadings]:
    """Return the readings of each rail at the times that the log gives."""
    if not _has_stamps(log.rows):
        raise BadInput(f"{name}: its lines have no time. {WHAT_TO_DO}")
    stamps = _list_stamps(log.rows)
    times = read_stamps(
        stamps,
        name,
        log.heading,
        time_format,
        log.tool_format,
    )
    rails = {}
    for rail in _list_rails(log.rows):
        places = [place for place, row in enumerate(log.rows) if rail in row.watts]
        rows = [log.rows[place] for place in places]
        lines = tuple(row.line for row in rows)
        time_s, flags = _check_times(times, places, lines, name)
        rails[rail] = _make_rail(
            rail,
            rows,
            time_s,
            flags,
            log.form,
        )
    return rails


def _make_even_rails(
    log: LogLines,
    interval_s: float,
    time_format: str,
) -> dict[str, RailReadings]:
    """Return the readings of each rail, one every ``interval_s``."""
    has_stamps = _has_stamps(log.rows)
    rails = {}
    for rail in _list_rails(log.rows):
        rows = [row for row in log.rows if rail in row.watts]
        flags: tuple[str, ...] = ()
        if has_stamps:
            flags = _compare_interval(rows, interval_s, log.heading, time_format)
        time_s = interval_s * np.array([row.turn for row in rows], dtype=np.float64)
        rails[rail] = _make_rail(
            rail,
            rows,
            time_s,
            flags,
            log.form,
        )
    return rails


def _has_stamps(rows: Sequence[LogLine]) -> bool:
    return any(row.stamp is not None for row in rows)


def _list_stamps(rows: Sequence[LogLine]) -> list[Stamp]:
    return [Stamp(row.line, row.stamp or "") for row in rows]


def _list_rails(rows: Sequence[LogLine]) -> list[str]:
    """Return the names of all rails in the order in which the log names them."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.watts)
    return list(names)


def _make_rail(
    rail: str,
    rows: Sequence[LogLine],
    time_s: Array,
    flags: tuple[str, ...],
    form: str,
) -> RailReadings:
    watts = np.array([row.watts[rail] for row in rows])
    lines = tuple(row.line for row in rows)
    most_w = LOGS.most_gpu_w if form in GPU_FORMS else LOGS.most_rail_w
    return RailReadings(
        time_s,
        watts,
        lines,
        flags,
        most_w,
    )


def _compare_interval(
    rows: Sequence[LogLine],
    interval_s: float,
    heading: str,
    time_format: str,
) -> tuple[str, ...]:
    """Flag an interval that the times in the log contradict, where these can be read."""
    try:
        times = read_stamps(_list_stamps(rows), "log", heading, time_format)
    except BadInput:
        return ()
    steps_s = np.diff(times.time_s)
    if not len(steps_s) or (times.are_whole and len(steps_s) < LOGS.least_whole_seconds):
        return ()
    usual_s = float(np.mean(steps_s) if times.are_whole else np.median(steps_s))
    if abs(usual_s - interval_s) <= WINDOWS.doubtful_share * interval_s:
        return ()
    return (
        f"the log's own times are {usual_s:.6g} s apart, not the {interval_s:.6g} s of --interval",
    )


def _check_times(
    times: StampTimes,
    places: list[int],
    lines: tuple[int, ...],
    name: str,
) -> tuple[Array, tuple[str, ...]]:
    """Return the times of one rail with the reasons to doubt them.

    Times that run backwards are refused.
    """
    time_s = times.time_s[places]
    check_rising(time_s, lines, name)
    steps_s = np.diff(time_s)
    if times.are_whole and len(time_s) > 2 and np.ptp(steps_s) > 0.0:
        placed_s, doubt = place_whole_seconds(time_s)
        if doubt <= WINDOWS.doubtful_share:
            return placed_s, ()
        if np.isfinite(doubt):
            flag = f"whole seconds leave the time open by {100 * doubt:.0f} %. {WHAT_TO_DO}"
            return placed_s, (flag,)
    repeated = np.flatnonzero(steps_s == 0.0)
    if len(repeated):
        first = int(repeated[0])
        pair = f"{lines[first]} and {lines[first + 1]}"
        return time_s, (f"{len(repeated)} times stand twice, the first in lines {pair}",)
    return time_s, ()
