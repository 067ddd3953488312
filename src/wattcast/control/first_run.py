"""Walk an operator through the first run on a real card: read-only first, one card, one knob.

``look_at_card`` reads the card for some seconds and sets nothing. ``plan_first_run`` says what
would be set, and ``describe_plan`` how that is undone. ``run_first_control`` locks the core clock
through the daemon in blocks, with as many blocks as before between them, reads the card every
second, gives it back and compares it with what it was. Everything read is kept for a report, so
that whoever meets a fault has something to send.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast import __version__
from wattcast.control import card_notes
from wattcast.control.card_settings import CLOCK_TOLERANCE_HZ, LIMIT_TOLERANCE_W
from wattcast.control.daemon_client import DaemonCard
from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.core import (
    MissingTool,
    Refused,
    bad_value,
    units,
)
from wattcast.core.strict_files import encode_csv
from wattcast.core.whole_files import write_whole
from wattcast.measure.device_control import NvmlCard

LOOK_READINGS = 5
LOOK_PAUSE_S = 1.0
BLOCKS = 4  # as before and locked, each twice, at least
LEAST_S = BLOCKS * REHEARSAL.least_block_s
LONGEST_S = 600.0
NEEDED = {
    "power_w": "power",
    "energy_j": "the energy counter",
    "core_hz": "the core clock",
    "limit_w": "the power limit",
}
SENT = (
    "Send the folder with an issue, and the output of `wattcast doctor`, `wattcast manage status` "
    "and `nvidia-smi -q`. Send it when all went well, too: nobody has reported a real card yet."
)


@dataclass(frozen=True)
class CardLookOver:
    """What a card tells before, or after, it is set; NaN and None where it does not."""

    name: str
    uuid: str
    driver: str
    power_w: float
    energy_j: float
    core_hz: float
    memory_hz: float
    busy: float
    limit_w: float
    highest_hz: float
    clocks: int  # that can be locked
    has_counters: bool  # GPM

    @property
    def missing(self) -> list[str]:
        """Name what the card does not tell and a first run needs."""
        words = [word for name, word in NEEDED.items() if not math.isfinite(getattr(self, name))]
        return words if self.clocks > 1 else [*words, "clocks that can be locked"]


@dataclass(frozen=True)
class FirstRunPlan:
    """What is set on a card: one clock, by turns, for a while."""

    lock_hz: float
    seconds: float
    block_s: float

    @property
    def blocks(self) -> list[bool]:
        """Tell for each block whether the clock is locked in it; the first and last are as
        before.
        """
        pairs = max(round(self.seconds / self.block_s) // 2, 1)
        return [False, True] * pairs + [False]


@dataclass(frozen=True)
class FirstRunSample:
    """One reading while the card is controlled."""

    at_s: float
    is_locked: bool
    power_w: float
    core_hz: float
    memory_hz: float
    busy: float
    limit_w: float
    is_settled: bool


@dataclass(frozen=True)
class FirstRunFigures:
    """What came of a first run."""

    samples: tuple[FirstRunSample, ...]
    faults: tuple[str, ...]  # empty: everything was as expected
    is_back: bool

    def mean_power_w(self, is_locked: bool) -> float:
        """Return the mean power of settled readings with or without the lock."""
        powers_w = [s.power_w for s in self.samples if s.is_locked == is_locked and s.is_settled]
        return float(np.mean(powers_w)) if powers_w else math.nan


def look_at_card(card: NvmlCard, sleep: Callable[[float], None] = time.sleep) -> CardLookOver:
    """Read a card for some seconds; nothing is set."""
    readings = [card.read()]
    for _ in range(LOOK_READINGS - 1):
        sleep(LOOK_PAUSE_S)
        readings.append(card.read())
    last = readings[-1]
    core_levels_hz, _ = card.clocks_hz()
    limit_w = card.limit_w()
    return CardLookOver(
        name=card.name,
        uuid=card.uuid,
        driver=card.driver_version(),
        power_w=float(np.mean([reading.power_w for reading in readings])),
        energy_j=last.energy_j,
        core_hz=last.core_hz,
        memory_hz=last.memory_hz,
        busy=last.busy,
        limit_w=math.nan if limit_w is None else limit_w,
        highest_hz=core_levels_hz[-1] if core_levels_hz else math.nan,
        clocks=len(core_levels_hz),
        has_counters=math.isfinite(last.work_per_s),
    )


def plan_first_run(
    levels_hz: Sequence[float],
    seconds: float,
    clock_hz: float | None = None,
) -> FirstRunPlan:
    """Choose the clock to lock: the nearest that the card has to what is asked for, below the
    highest.
    """
    if not LEAST_S <= seconds <= LONGEST_S:
        expected = f"{LEAST_S:.0f} s to {LONGEST_S / 60:.0f} minutes for a first run"
        raise bad_value("--seconds", expected, units.show(seconds, "s"))
    if len(levels_hz) < 2:
        raise MissingTool("the driver names no clocks of this card that could be locked.")
    lowest_hz, highest_hz = levels_hz[0], levels_hz[-1]
    wanted_hz = REHEARSAL.lock_share * highest_hz if clock_hz is None else clock_hz
    if not lowest_hz - CLOCK_TOLERANCE_HZ <= wanted_hz < highest_hz:
        span = f"{units.show(lowest_hz, 'Hz')} up to below {units.show(highest_hz, 'Hz')}"
        raise bad_value("--lock", span, units.show(wanted_hz, "Hz"))
    below = np.asarray(levels_hz[:-1])
    lock_hz = float(below[np.argmin(abs(below - wanted_hz))])
    return FirstRunPlan(
        lock_hz, seconds, min(REHEARSAL.block_s, max(seconds / BLOCKS, REHEARSAL.least_block_s))
    )


def describe_look(look: CardLookOver) -> list[str]:
    """Say what a card tells."""
    busy = f"{look.busy:.0%} busy" if math.isfinite(look.busy) else "use not told"
    counters = "counters of its pipes (GPM)" if look.has_counters else "no counters of its pipes"
    lines = [
        f"1. Only read: {look.name}, {look.uuid}, driver {look.driver}",
        f"   {_show(look.power_w, 'W')}, core {_show(look.core_hz, 'Hz')} of "
        f"{_show(look.highest_hz, 'Hz')}, memory {_show(look.memory_hz, 'Hz')}, {busy}",
        f"   power limit {_show(look.limit_w, 'W')}, {look.clocks} core clocks, {counters}",
    ]
    if look.missing:
        lines.append(f"   STOP: the card does not tell {', '.join(look.missing)}.")
    return lines


def describe_plan(
    look: CardLookOver,
    plan: FirstRunPlan,
    device: int,
) -> list[str]:
    """Say what would be set and how that is undone."""
    locked = sum(plan.blocks)
    return [
        f"2. What is set: the core clock of card {device} alone, to {plan.lock_hz / 1e6:.0f} MHz, "
        f"{locked} times for {plan.block_s:.0f} s, as before between them; "
        f"{len(plan.blocks) * plan.block_s / 60:.1f} minutes in all.",
        "   Not touched: memory clock, power limit, other cards, what runs on this one.",
        "3. How it is undone: by itself at the end, on Ctrl-C, and when this program or the daemon "
        "dies; `wattcast manage restore` at any time.",
        f"   By hand, whatever happened: nvidia-smi -i {device} -rgc, and "
        f"nvidia-smi -i {device} -pl {look.limit_w:.0f}.",
        f"4. When something differs: {SENT}",
    ]


def _show(value: float, unit: str) -> str:
    return units.show(value, unit, 4) if math.isfinite(value) else "not told"


def run_first_control(
    card: DaemonCard,
    reader: NvmlCard,
    plan: FirstRunPlan,
    before: CardLookOver,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> FirstRunFigures:
    """Lock the clock by turns, read every second, and give the card back, whatever happens."""
    samples: list[FirstRunSample] = []
    faults: list[str] = []
    begin_s = time.monotonic()
    try:
        for block, is_locked in enumerate(plan.blocks):
            clock_hz = plan.lock_hz if is_locked else None
            card.apply(clock_hz, None, None)
            text = "as before" if clock_hz is None else f"core {clock_hz / 1e6:.0f} MHz"
            say(f"   block {block + 1} of {len(plan.blocks)}: {text}")
            for reading in range(max(round(plan.block_s / LOOK_PAUSE_S), 1)):
                if is_stopped():
                    raise _StoppedRun
                sleep(LOOK_PAUSE_S)
                card.beat()
                samples.append(_read_sample(reader, begin_s, is_locked, reading))
                faults += _check_sample(samples[-1], plan, before)
                if faults or card.is_adrift:
                    raise _StoppedRun
    except _StoppedRun:
        if card.is_adrift:
            faults.append("the daemon was lost")
        say("   stopped")
    except (Refused, MissingTool) as error:
        faults.append(str(error))
    finally:
        is_back = _give_back(card, faults)
    return FirstRunFigures(tuple(samples), tuple(faults), is_back)


class _StoppedRun(Exception):
    """A first run ends before its time."""


def _read_sample(
    reader: NvmlCard,
    begin_s: float,
    is_locked: bool,
    reading: int,
) -> FirstRunSample:
    now = reader.read()
    limit_w = reader.limit_w()
    return FirstRunSample(
        at_s=now.at_s - begin_s,
        is_locked=is_locked,
        power_w=now.power_w,
        core_hz=now.core_hz,
        memory_hz=now.memory_hz,
        busy=now.busy,
        limit_w=math.nan if limit_w is None else limit_w,
        is_settled=reading >= REHEARSAL.settle_readings,
    )


def _check_sample(
    sample: FirstRunSample,
    plan: FirstRunPlan,
    before: CardLookOver,
) -> list[str]:
    """Name what is not as it should be."""
    faults = []
    if (
        sample.is_settled
        and sample.is_locked
        and sample.core_hz > plan.lock_hz + CLOCK_TOLERANCE_HZ
    ):
        faults.append(
            f"the card runs at {units.show(sample.core_hz, 'Hz')}, above the lock at "
            f"{units.show(plan.lock_hz, 'Hz')}"
        )
    if abs(sample.limit_w - before.limit_w) > LIMIT_TOLERANCE_W:
        faults.append(
            f"the power limit is {units.show(sample.limit_w, 'W')}, and was "
            f"{units.show(before.limit_w, 'W')}"
        )
    return faults


def _give_back(card: DaemonCard, faults: list[str]) -> bool:
    """Give the card back, and tell whether nothing says that it is changed."""
    try:
        card.give_back()
    except (Refused, MissingTool) as error:
        faults.append(str(error))
    note = card_notes.read_note(card.uuid)
    return note is None or not note.is_changed


def compare_looks(before: CardLookOver, after: CardLookOver) -> list[str]:
    """Name what a card tells otherwise than before: its limit, or a clock below what it had while
    it works.
    """
    differences = []
    if abs(after.limit_w - before.limit_w) > LIMIT_TOLERANCE_W:
        differences.append(
            f"power limit {_show(after.limit_w, 'W')}, before {_show(before.limit_w, 'W')}"
        )
    if after.clocks != before.clocks:
        differences.append(f"{after.clocks} clocks, before {before.clocks}")
    return differences


def describe_figures(
    figures: FirstRunFigures,
    plan: FirstRunPlan,
    differences: Sequence[str],
) -> list[str]:
    """Say what came of a first run; no saving is claimed, as no work was counted."""
    usual_w = figures.mean_power_w(False)
    locked_w = figures.mean_power_w(True)
    lines = [
        f"5. Read: {_show(usual_w, 'W')} as before, {_show(locked_w, 'W')} at "
        f"{plan.lock_hz / 1e6:.0f} MHz ({len(figures.samples)} readings). No work was counted, "
        "so no saving is claimed.",
        "6. The card has back what it had."
        if figures.is_back
        else "6. THE CARD MAY NOT HAVE BACK WHAT IT HAD: undo it by hand (step 3).",
    ]
    lines += [f"   DIFFERS: {difference}" for difference in differences]
    lines += [f"   FAULT: {fault}" for fault in figures.faults]
    if not (differences or figures.faults) and figures.is_back:
        lines.append("   Nothing differs.")
    return lines


def write_report(
    folder: Path,
    before: CardLookOver,
    plan: FirstRunPlan | None = None,
    figures: FirstRunFigures | None = None,
    after: CardLookOver | None = None,
) -> dict[str, Any]:
    """Save everything that was read as ``report.json`` and ``samples.csv``; return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "wattcast": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "before": _without_nan(asdict(before)),
        "plan": None if plan is None else asdict(plan),
        "after": None if after is None else _without_nan(asdict(after)),
    }
    if figures is not None and after is not None:
        report |= {
            "is_back": figures.is_back,
            "faults": list(figures.faults),
            "differences": compare_looks(before, after),
            "readings": len(figures.samples),
            "power_as_before_w": _finite(figures.mean_power_w(False)),
            "power_locked_w": _finite(figures.mean_power_w(True)),
        }
        names = list(FirstRunSample.__dataclass_fields__)
        rows = [[f"{getattr(each, name):.6g}" for name in names] for each in figures.samples]
        write_whole(folder / "samples.csv", encode_csv([names, *rows]))
    write_whole(folder / "report.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return report


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    """Return a value for JSON, which has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
