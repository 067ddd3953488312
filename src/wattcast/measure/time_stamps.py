"""Turn the time stamps of power logs into seconds, or refuse with the line that cannot be read.

Energy is power times time, so a stamp that is misread costs more than any sensor. Nothing here is
guessed: a stamp is used where it can mean one moment only, and otherwise the error names the line
and the option that settles it.

Stamps that are understood:

- numbers whose heading names the unit: ``Time (s)``, ``timestamp_ms``; or seconds, milliseconds,
  microseconds or nanoseconds since 1970, which their size tells apart;
- ``2026/10/25 02:59:00.100`` (nvidia-smi), ``2026-10-25T02:59:00.1+02:00`` (ISO 8601), ``20261025
  02:59:00`` (nvidia-smi dmon), ``10-25-2026 02:59:00`` (tegrastats), ``Sun Oct 25 02:59:00 2026``
  (ipmitool), ``02:59:00.1``;
- days and months in either order, where both orders give the same times.

Local times without a zone are counted as they are written. A clock that is set back shows as time
that runs backwards and is refused; one that is set forward shows as a gap, which ``power_logs``
flags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import (
    UTC,
    datetime,
    timedelta,
    timezone,
)

import numpy as np
import numpy.typing as npt

from wattcast.core.errors import BadInput, clip_text

Array = npt.NDArray[np.float64]
EPOCH = datetime(1970, 1, 1)
NUMBER_UNITS = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "ns": 1e-9,
}
OLDEST_S = 946_684_800.0  # 2000-01-01: a number without a unit that is older is no date
NEWEST_S = 4_102_444_800.0  # 2100-01-01
LONGEST_STEP_S = 60.0  # between lines of a log: a counter of microseconds steps further than this
MOST_BOUNDS = 500  # seconds that bound an interval: many thousands add nothing
WHAT_TO_DO = (
    "Say how times are written with --time-format, such as '%d/%m/%Y %H:%M:%S' or ms, "
    "or give the time between lines, such as --interval 100ms."
)

_HEADING_UNIT = re.compile(
    r"(?:^|[\s_(\[.])(s|secs?|seconds?|ms|msecs?|milliseconds?|us|µs|usecs?"
    r"|microseconds?|ns|nanoseconds?)[)\]]?$",
    re.IGNORECASE,
)
_DATE_AND_TIME = re.compile(
    r"(?:(?P<first>\d{1,4})(?P<separator>[-/.])(?P<second>\d{1,2})(?P=separator)"
    r"(?P<third>\d{1,4})[\sT]+"
    r"|(?P<compact>\d{8})[\sT]+)?"
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second_of>\d{2})(?:[.,](?P<fraction>\d{1,9}))?)?"
    r"\s*(?P<half>[AaPp][Mm])?\s*(?P<zone>Z|UTC|GMT|[+-]\d{2}:?\d{2})?"
)
_NAMED_MONTH = re.compile(
    r"(?:[A-Z][a-z]{2},?\s+)?(?P<month>[A-Z][a-z]{2})\s+(?P<day>\d{1,2})\s+"
    r"(?P<time>\d{1,2}:\d{2}:\d{2}(?:\.\d+)?)"
    r"(?:\s+(?P<zone>[A-Z]{1,5}))?\s+(?P<year>\d{4})"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ORDERS = {  # of the three numbers of a date, by which one has four digits: first, third, neither
    "first": (("year", "month", "day"),),
    "third": (("day", "month", "year"), ("month", "day", "year")),
    "neither": (("day", "month", "year"), ("month", "day", "year"), ("year", "month", "day")),
}


@dataclass(frozen=True)
class Stamp:
    """The text that a line of a log gives as its time."""

    line: int  # counted from 1
    text: str


@dataclass(frozen=True)
class StampTimes:
    """Seconds of each stamp from a common origin, and whether these were cut to whole seconds."""

    time_s: Array
    are_whole: bool


def read_stamps(
    stamps: Sequence[Stamp],
    where: str,
    heading: str = "",
    time_format: str = "",
    tool_format: str = "",
) -> StampTimes:
    """Return the seconds of every stamp.

    ``where`` names the file in errors. ``time_format`` is the user's: a unit of numbers (s, ms, us,
    ns) or a pattern of ``datetime.strptime``. ``tool_format`` is the pattern that the tool behind a
    log is known to write.
    """
    for stamp in stamps:
        if not stamp.text.strip():
            raise BadInput(
                f"{where}: line {stamp.line} has no time. Remove the line, or {_lower(WHAT_TO_DO)}"
            )
    if time_format in NUMBER_UNITS:
        return _read_numbers(stamps, where, NUMBER_UNITS[time_format])
    if time_format or tool_format:
        return _read_pattern(stamps, where, time_format or tool_format)
    if all(_is_number(stamp.text) for stamp in stamps):
        unit = _HEADING_UNIT.search(heading)
        if unit is not None:
            return _read_numbers(stamps, where, NUMBER_UNITS[_short_unit(unit[1])])
        return _read_numbers_since_1970(stamps, where, heading)
    return _read_dates(stamps, where)


def check_rising(
    time_s: Array,
    lines: Sequence[int],
    where: str,
) -> None:
    """Refuse times that run backwards, with the line at which they do."""
    falls = np.flatnonzero(np.diff(time_s) < 0.0)
    if not len(falls):
        return
    place = int(falls[0])
    back_s = float(time_s[place] - time_s[place + 1])
    raise BadInput(
        f"{where}: line {lines[place + 1]} is {back_s:.6g} s earlier than line {lines[place]}: "
        "the clock was set back (daylight saving?), midnight passed in a log without dates, or "
        "lines are out of order. Split the log there, or give the time between lines, "
        "such as --interval 100ms."
    )


def place_whole_seconds(time_s: Array) -> tuple[Array, float]:
    """Return the moments of evenly written lines whose stamps are cut to whole seconds, and their
    relative doubt.

    Line i was written at a + b·i, and its stamp s_i says s_i <= a + b·i < s_i + 1. Every pair of
    lines bounds b, and the middle of the remaining range is the best guess. The doubt is infinite
    where no b fits, because lines were not written evenly.

    >>> placed_s, doubt = place_whole_seconds(np.array([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]))
    >>> placed_s.tolist(), round(doubt, 3)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0], 0.2)
    """
    low_s, high_s = _bound_interval_s(time_s)
    if not low_s <= high_s < np.inf:
        return time_s, np.inf
    count = len(time_s)
    interval_s = 0.5 * (low_s + high_s)
    mean_s = float(time_s[-1] - time_s[0]) / (count - 1)
    if low_s <= mean_s <= high_s:
        interval_s = mean_s
    doubt = np.inf
    if interval_s > 0.0:
        doubt = max(high_s - interval_s, interval_s - low_s) / interval_s
    return time_s[0] + interval_s * np.arange(count), float(doubt)


def _bound_interval_s(time_s: Array) -> tuple[float, float]:
    """Return the shortest and the longest time between lines that whole seconds leave open."""
    firsts = np.flatnonzero(np.diff(time_s, prepend=-np.inf) > 0.0)  # first line of its second
    lasts = np.flatnonzero(np.diff(time_s, append=np.inf) > 0.0)  # last line of its second
    stride = max(len(firsts) // MOST_BOUNDS, 1)
    firsts = firsts[::stride]
    lasts = lasts[::stride]
    first_s = time_s[firsts][None, :]
    last_s = time_s[lasts][:, None]

    # From the last line of one second (rows) to the first line of another (columns), or back.
    apart = firsts[None, :] - lasts[:, None]
    is_later = apart > 0
    is_earlier = apart < 0
    least_s = (first_s - last_s - 1.0)[is_later] / apart[is_later]
    most_s = (last_s + 1.0 - first_s)[is_earlier] / -apart[is_earlier]
    return float(least_s.max(initial=0.0)), float(most_s.min(initial=np.inf))


def _read_numbers(
    stamps: Sequence[Stamp],
    where: str,
    scale: float,
) -> StampTimes:
    for stamp in stamps:
        if not _is_number(stamp.text):
            raise _unreadable(stamp, where)
    values = np.array([float(stamp.text) for stamp in stamps])
    has_fractions = any("." in stamp.text for stamp in stamps)
    origin = values[0] if len(values) else 0.0
    return StampTimes((values - origin) * scale, scale == 1.0 and not has_fractions)


def _read_numbers_since_1970(
    stamps: Sequence[Stamp],
    where: str,
    heading: str,
) -> StampTimes:
    """Read numbers without a unit, which are times since 1970 or refused."""
    values = np.array([float(stamp.text) for stamp in stamps])
    usual_step = 0.0
    if len(values) > 1:
        usual_step = float(np.median(np.abs(np.diff(values))))
    for scale in NUMBER_UNITS.values():
        are_dates = values.min() * scale >= OLDEST_S and values.max() * scale <= NEWEST_S
        if are_dates and usual_step * scale <= LONGEST_STEP_S:
            return _read_numbers(stamps, where, scale)
    raise BadInput(
        f"{where}: column {heading!r} has numbers without a unit, such as "
        f"{clip_text(stamps[0].text)} in line {stamps[0].line}. "
        "Say which with --time-format s (or ms, us, ns)."
    )


def _read_pattern(
    stamps: Sequence[Stamp],
    where: str,
    pattern: str,
) -> StampTimes:
    moments: list[datetime] = []
    for stamp in stamps:
        try:
            moments.append(datetime.strptime(stamp.text.strip(), pattern))
        except (ValueError, re.error):
            raise BadInput(
                f"{where}: line {stamp.line}: the time {clip_text(stamp.text)!r} is not written as "
                f"{clip_text(pattern)!r}. {WHAT_TO_DO}"
            ) from None
    return StampTimes(_count_seconds(moments, stamps, where), "%f" not in pattern)


def _read_dates(stamps: Sequence[Stamp], where: str) -> StampTimes:
    """Read dates and times of day.

    Every order of day, month and year that fits all lines must give the same times.
    """
    parts = [_split_stamp(stamp, where) for stamp in stamps]
    kind = parts[0].kind
    for stamp, part in zip(stamps, parts, strict=True):
        if part.kind != kind:
            reason = f"it is written differently from line {stamps[0].line}"
            raise _unreadable(stamp, where, reason)

    readings: list[Array] = []
    first_wrong: Stamp | None = None
    for order in _ORDERS.get(kind, (("year", "month", "day"),)):
        moments, wrong = _order_dates(parts, stamps, order)
        if wrong is None:
            readings.append(_count_seconds(moments, stamps, where))
        elif first_wrong is None:
            first_wrong = wrong
    if not readings:
        raise _unreadable(first_wrong or stamps[0], where)
    for time_s in readings[1:]:
        differing = np.flatnonzero(np.abs(time_s - readings[0]) > 1e-6)
        if len(differing):
            stamp = stamps[int(differing[0])]
            raise _unreadable(stamp, where, "its day and month could be either way round")
    return StampTimes(readings[0], not any(part.fraction for part in parts))


def _order_dates(
    parts: Sequence[_StampParts],
    stamps: Sequence[Stamp],
    order: tuple[str, str, str],
) -> tuple[list[datetime], Stamp | None]:
    """Return the moments of all lines for one order of a date, or the first line it does not
    fit.
    """
    moments = []
    for stamp, part in zip(stamps, parts, strict=True):
        moment = part.to_moment(order)
        if moment is None:
            return [], stamp
        moments.append(moment)
    return moments, None


@dataclass(frozen=True)
class _StampParts:
    """The numbers of a stamp, before their order is known."""

    kind: str  # which number of the date has four digits: first, third, neither; clock: no date
    numbers: tuple[int, int, int]
    hour: int
    minute: int
    second: int
    fraction: str
    zone: str

    def to_moment(self, order: tuple[str, str, str]) -> datetime | None:
        """Return the moment for one order of year, month and day.

        None where there is no such day.
        """
        date = dict(zip(order, self.numbers, strict=True))
        if self.kind == "neither":
            date["year"] += 2000
        microsecond = int((self.fraction + "000000")[:6])
        clock = (self.hour, self.minute, self.second, microsecond)
        try:
            moment = datetime(date["year"], date["month"], date["day"], *clock)
        except ValueError:
            return None
        return moment.replace(tzinfo=_read_zone(self.zone)) if self.zone else moment


def _split_stamp(stamp: Stamp, where: str) -> _StampParts:
    text = _number_month(stamp.text.strip().strip('"'))
    match = _DATE_AND_TIME.fullmatch(text)
    if match is None:
        raise _unreadable(stamp, where)
    kind, numbers = _split_date(match)
    hour = int(match["hour"])
    if match["half"]:
        if not 1 <= hour <= 12:
            raise _unreadable(stamp, where)
        afternoon = 12 if match["half"].lower() == "pm" else 0
        hour = hour % 12 + afternoon
    return _StampParts(
        kind,
        numbers,
        hour,
        minute=int(match["minute"]),
        second=int(match["second_of"] or 0),
        fraction=match["fraction"] or "",
        zone=match["zone"] or "",
    )


def _number_month(text: str) -> str:
    """Return a date with the name of its month in numbers; other texts as they are.

    >>> _number_month("Sun Oct 25 02:59:00 2026")
    '2026-10-25 02:59:00'
    """
    match = _NAMED_MONTH.fullmatch(text)
    if match is None or match["month"] not in _MONTHS:
        return text
    month = _MONTHS.index(match["month"]) + 1
    zone = "Z" if match["zone"] in ("UTC", "GMT", "Z") else ""
    return f"{match['year']}-{month}-{match['day']} {match['time']} {zone}".strip()


def _split_date(match: re.Match[str]) -> tuple[str, tuple[int, int, int]]:
    if match["compact"]:
        date = match["compact"]
        return "first", (int(date[:4]), int(date[4:6]), int(date[6:]))
    if not match["first"]:
        return "clock", (1970, 1, 1)
    numbers = (int(match["first"]), int(match["second"]), int(match["third"]))
    kind = "neither"
    if len(match["first"]) == 4:
        kind = "first"
    elif len(match["third"]) == 4:
        kind = "third"
    return kind, numbers


def _read_zone(text: str) -> timezone:
    if text in ("Z", "UTC", "GMT"):
        return UTC
    digits = text[1:].replace(":", "")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    limited = min(offset, timedelta(hours=23, minutes=59))
    return timezone(-limited if text[0] == "-" else limited)


def _count_seconds(
    moments: Sequence[datetime],
    stamps: Sequence[Stamp],
    where: str,
) -> Array:
    """Return seconds from the first moment; all or none must name their zone."""
    has_zone = [moment.tzinfo is not None for moment in moments]
    if any(has_zone) and not all(has_zone):
        stamp = stamps[has_zone.index(not has_zone[0])]
        raise _unreadable(stamp, where, "some lines name a time zone and others do not")
    if not moments:
        return np.zeros(0)
    origin = moments[0]
    return np.array([(moment - origin).total_seconds() for moment in moments])


def _unreadable(
    stamp: Stamp,
    where: str,
    reason: str = "",
) -> BadInput:
    because = f" ({reason})" if reason else ""
    return BadInput(
        f"{where}: line {stamp.line}: cannot read the time {clip_text(stamp.text)!r}{because}. "
        f"{WHAT_TO_DO}"
    )


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _short_unit(word: str) -> str:
    lower = word.lower().replace("µ", "u")
    for short, long in (("ms", "milli"), ("us", "micro"), ("ns", "nano")):
        if lower.startswith((short, long)):
            return short
    return "s"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
