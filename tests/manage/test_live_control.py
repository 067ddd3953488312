"""A card under control without a card: closed loop, faults, one controller at a time, leftovers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import BadInput, MissingTool, Refused
from wattcast.manage import clock_guard, live_control
from wattcast.manage.clock_guard import ClockGuard, LockNote, read_note, restore_leftover, run_watchdog
from wattcast.manage.knobs import KnobRole
from wattcast.manage.live_control import (
    MPS_PIPE,
    MPS_SHARE,
    PROGRAM_KERNEL,
    LivePlant,
    ProgressFile,
    SmCountFile,
    build_card_lattice,
    limit_sm_share,
)
from wattcast.manage.plants import play_plant
from wattcast.manage.policies import Harmonia
from wattcast.manage.search_problem import Goal, Objective
from wattcast.manage.watch_card import advise_clock, watch_card

CORE = tuple(float(c) for c in range(600_000_000, 1_981_000_000, 60_000_000))


@dataclass(frozen=True)
class Seen:
    at_s: float
    energy_j: float
    power_w: float
    core_hz: float
    memory_hz: float = 3.2e9
    busy: float = 1.0
    memory_busy: float = 0.9
    work_per_s: float = math.nan


@dataclass
class FakeCard:
    """A memory-bound program on a card whose time hardly follows the core clock and whose power does."""

    name: str = "Fake"
    uuid: str = "GPU-fake"
    now_s: float = 0.0
    energy_j: float = 0.0
    work: float = 0.0
    locked_hz: float | None = None
    calls: list[str] = field(default_factory=list)
    refuse: bool = False
    lost: bool = False
    frozen: bool = False

    def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return CORE, (3.2e9,)

    @property
    def clock_hz(self) -> float:
        return self.locked_hz or CORE[-1]

    def power(self) -> float:
        return 120.0 + 300.0 * (self.clock_hz / CORE[-1]) ** 2.5

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.energy_j += 0.0 if self.frozen else seconds * self.power()
        self.work += seconds * 100.0 * (self.clock_hz / CORE[-1]) ** 0.1

    def read(self) -> Seen:
        if self.lost:
            raise MissingTool("the card is lost.")
        return Seen(self.now_s, self.energy_j, self.power(), self.clock_hz, work_per_s=math.nan)

    def lock(self, core_hz: float, memory_hz: float | None = None) -> None:
        if self.refuse:
            raise Refused("no such clock.")
        self.calls.append(f"lock {core_hz / 1e6:.0f}")
        self.locked_hz = core_hz

    def reset(self, memory: bool = True) -> None:
        if self.lost:
            raise MissingTool("the card is lost.")
        self.calls.append("reset")
        self.locked_hz = None


class Told(ProgressFile):
    def __init__(self, card: FakeCard) -> None:
        self._card = card

    def count(self) -> float:
        return self._card.work


def live(card: FakeCard, until_s: float, dry: bool = False) -> LivePlant:
    return LivePlant(
        card,
        build_card_lattice(*card.clocks_hz()),
        1.0,
        lambda: card.now_s < until_s,
        card.pass_time,
        Told(card),
        dry,
    )


def test_knobs_of_a_card_are_its_own_clocks_and_not_too_many() -> None:
    lattice = build_card_lattice(CORE, (3.2e9,))
    assert [k.role for k in lattice.knobs] == [KnobRole.CORE_CLOCK]
    assert len(lattice.knobs[0].levels) <= 16
    assert lattice.knobs[0].levels[-1] == CORE[-1]
    assert set(lattice.knobs[0].levels) <= set(CORE)
    assert len(build_card_lattice(CORE, (0.8e9, 3.5e9)).knobs) == 2
    with pytest.raises(MissingTool, match="no core clock"):
        build_card_lattice((), ())


def test_the_controller_finds_the_frugal_clock_of_a_live_card() -> None:
    card = FakeCard()
    plant = live(card, 80.0)
    state = play_plant(plant, Harmonia(plant.lattice, plant.default))
    clocks = np.asarray(plant.lattice.knobs[0].levels)
    power = 120.0 + 300.0 * (clocks / CORE[-1]) ** 2.5
    ed2 = power * (CORE[-1] / clocks) ** (3 * 0.1)
    chosen = state.kernels[PROGRAM_KERNEL].next_settings[0]
    assert state.kernels[PROGRAM_KERNEL].settled
    assert ed2[chosen] <= 1.01 * ed2.min()


@pytest.mark.parametrize(
    ("busy", "core_hz", "told"),
    [(1.0, 1.5e9, True), (0.1, 1.5e9, False), (math.nan, 1.5e9, False), (1.0, 0.3e9, False)],
)
def test_a_clock_is_the_governors_only_while_the_card_works(busy: float, core_hz: float, told: bool) -> None:
    """An idle card falls to a low clock by itself; taken for the governor's it would lead to the lowest setting."""

    class Idle(FakeCard):
        def read(self) -> Seen:
            return replace(super().read(), busy=busy, core_hz=core_hz)

    plant = live(Idle(), 5.0)
    seen = plant.run(plant.default)
    assert (seen.core_hz == core_hz) is told
    assert math.isnan(seen.core_hz) is not told


def test_a_dry_plant_never_touches_the_card() -> None:
    card = FakeCard()
    plant = live(card, 20.0, dry=True)
    play_plant(plant, Harmonia(plant.lattice, plant.default))
    assert card.calls == []


@pytest.mark.parametrize("fault", ["refuse", "lost"])
def test_a_fault_ends_control_but_not_the_program(fault: str) -> None:
    card = FakeCard()
    logged: list[str] = []
    plant = LivePlant(
        card,
        build_card_lattice(*card.clocks_hz()),
        1.0,
        lambda: card.now_s < 30.0,
        card.pass_time,
        Told(card),
        dry=False,
        log=lambda at, why: logged.append(why),
    )
    controller = Harmonia(plant.lattice, plant.default)
    state = controller.start()
    while (kernel := plant.next_kernel()) is not None:
        if card.now_s >= 2.0:  # the search is under way
            setattr(card, fault, True)
        state, _ = controller.step(state, plant.run(controller.settings(state, kernel)))
    assert card.now_s >= 30.0
    assert not plant.controlled
    assert sum("control ends" in why for why in logged) == 1
    if fault == "refuse":
        assert card.locked_hz is None  # the driver has its clocks back


def test_a_counter_that_stands_still_is_stale_and_leads_back_to_the_default() -> None:
    card = FakeCard()
    plant = live(card, 60.0)
    controller = Harmonia(plant.lattice, plant.default)
    state = controller.start()
    while (kernel := plant.next_kernel()) is not None:
        card.frozen = card.now_s >= 50.0
        seen = plant.run(controller.settings(state, kernel))
        assert seen.stale is card.frozen
        state, _ = controller.step(state, seen)
    assert state.kernels[PROGRAM_KERNEL].why == "blind"
    assert state.kernels[PROGRAM_KERNEL].next_settings == plant.default


def test_a_program_that_tells_nothing_is_not_tuned() -> None:
    card = FakeCard()
    said: list[str] = []
    lattice = build_card_lattice(*card.clocks_hz())
    alive, log = (lambda: card.now_s < 20), (lambda at, why: said.append(why))
    plant = LivePlant(card, lattice, 1.0, alive, card.pass_time, None, False, log)
    state = play_plant(plant, Harmonia(plant.lattice, plant.default))
    assert state.kernels[PROGRAM_KERNEL].next_settings == plant.default
    assert set(card.calls) <= {"reset"}
    assert sum("nothing is tuned" in why for why in said) == 1


def test_progress_is_the_size_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "done"
    assert ProgressFile(path).count() == 0.0
    path.write_bytes(b"...")
    assert ProgressFile(path).count() == 3.0


# -- the guard ---------------------------------------------------------------------------------------------


def guarded(card: FakeCard, folder: Path) -> tuple[ClockGuard, list[str]]:
    said: list[str] = []
    return ClockGuard(card, folder, said.append), said


def test_clocks_are_reset_and_the_note_is_gone_however_the_block_ends(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for error in (None, ValueError, KeyboardInterrupt):
        card = FakeCard()
        held, _ = guarded(card, folder)
        try:
            with held:
                card.lock(1e9)
                assert read_note(folder / "GPU-fake.json") is not None
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert card.calls[-1] == "reset"
        assert not (folder / "GPU-fake.json").exists()


def test_a_second_controller_is_refused_while_the_first_holds_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_guard, "LOCK_WAIT_S", 0.1)
    first, _ = guarded(FakeCard(), tmp_path / "state")
    second, _ = guarded(other := FakeCard(), tmp_path / "state")
    with first:
        with pytest.raises(Refused, match="another controller"), second:
            pass
        assert other.calls == []
        assert read_note(tmp_path / "state" / "GPU-fake.json") is not None
    with guarded(FakeCard(), tmp_path / "state")[0]:
        pass


def leave_note(folder: Path, uuid: str = "GPU-fake") -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "GPU-fake.json"
    path.write_text(json.dumps({"format": 1, "uuid": uuid, "pid": 4242, "began": "yesterday"}))
    path.chmod(0o600)
    return path


def test_what_a_crash_left_is_found_and_restored(tmp_path: Path) -> None:
    path = leave_note(tmp_path / "state")
    card = FakeCard()
    held, said = guarded(card, tmp_path / "state")
    with held:
        assert card.calls == ["reset"]
        assert "4242" in said[0]
    assert not path.exists()


def test_a_note_behind_a_link_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps({"format": 1, "uuid": "GPU-fake", "pid": 1, "began": ""}))
    (folder / "GPU-fake.json").symlink_to(elsewhere)
    card = FakeCard()
    held, _ = guarded(card, folder)
    with pytest.raises(Refused, match="cannot be trusted"), held:
        pass
    assert card.calls == []
    assert elsewhere.exists()


def test_a_note_with_a_second_name_is_not_trusted(tmp_path: Path) -> None:
    path = leave_note(tmp_path / "state")
    os.link(path, tmp_path / "second")
    with pytest.raises(Refused, match="plain file"):
        read_note(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_note_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    path = leave_note(tmp_path / "state")
    os.chown(path, 12345, 12345)
    with pytest.raises(Refused, match="this user"):
        read_note(path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 9, "uuid": "a", "pid": 1, "began": ""}', "\x00"])
def test_a_note_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = leave_note(tmp_path / "state")
    path.write_text(text)
    with pytest.raises(Refused, match="not a note"):
        read_note(path)


def test_a_note_about_another_card_is_left_alone(tmp_path: Path) -> None:
    path = leave_note(tmp_path / "state", uuid="GPU-other")
    card = FakeCard()
    with pytest.raises(Refused, match="GPU-other"):
        restore_leftover(card, path, lambda text: None)
    assert card.calls == []
    assert path.exists()


@pytest.mark.parametrize("kind", ["link", "shared"])
def test_a_state_folder_others_could_write_to_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "state"
    if kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(Refused, match="folder of this user"), guarded(FakeCard(), folder)[0]:
        pass


def test_a_lost_card_leaves_the_note_for_the_next_start(tmp_path: Path) -> None:
    card = FakeCard()
    held, said = guarded(card, tmp_path / "state")
    with held:
        card.lock(1e9)
        card.lost = True
    assert "could not be reset" in said[-1]
    assert read_note(tmp_path / "state" / "GPU-fake.json") is not None
    back = FakeCard()
    with guarded(back, tmp_path / "state")[0]:
        assert back.calls[0] == "reset"


def test_the_watchdog_resets_only_when_the_note_is_still_there(tmp_path: Path) -> None:
    path = leave_note(tmp_path / "state")
    for expected in (True, False):
        card = FakeCard()
        reader, writer = os.pipe()
        os.close(writer)
        assert run_watchdog(card, path, reader) is expected
        assert card.calls == (["reset"] if expected else [])
        os.close(reader)
    assert not path.exists()


def test_notes_are_for_this_format() -> None:
    assert LockNote(1, "a", 1, "").format == clock_guard.FORMAT


# -- programs ----------------------------------------------------------------------------------------------


@dataclass
class TimedCard(FakeCard):
    """The fake card on the machine's own clock."""

    def read(self) -> Seen:
        self.pass_time(0.05)
        return super().read()


def controlled(card: FakeCard, folder: Path, *command: str, **more: object) -> live_control.EndedProgram:
    return live_control.run_controlled_program(
        card, command, Objective(), folder, 0.05, more.pop("say", lambda text: None), dict(os.environ), **more
    )


def test_a_program_runs_to_its_end_and_its_code_is_ours(tmp_path: Path) -> None:
    """On a busy machine a program may be over before a period has told anything; that is said, and tried again."""
    script = (
        "import os, time\n"
        "with open(os.environ['WATTCAST_PROGRESS'], 'ab', buffering=0) as f:\n"
        "    for _ in range(60):\n        f.write(b'.' * 5)\n        time.sleep(0.01)\n"
        "raise SystemExit(7)"
    )
    for attempt in range(5):
        card, folder, said = TimedCard(), tmp_path / str(attempt), list[str]()
        command = (sys.executable, "-c", script)
        ended = controlled(card, folder, *command, progress=tmp_path / f"progress{attempt}", say=said.append)
        if "Nothing was learned" not in said[-1]:
            break
    assert ended.code == 7
    assert said[-1].startswith(f"clocks reset after {ended.changes} change")
    assert "against the driver's own" in said[-1] or "were best" in said[-1]
    assert ended.controlled
    assert ended.changes >= 2
    assert card.calls[-1] == "reset"
    assert card.locked_hz is None


def test_permission_denied_is_known_before_the_program_starts(tmp_path: Path) -> None:
    card = TimedCard(refuse=True)
    mark = tmp_path / "started"
    with pytest.raises(Refused):
        controlled(card, tmp_path / "state", sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    assert not mark.exists()
    assert card.calls == []
    assert not list((tmp_path / "state").glob("*.json"))


def test_a_program_that_cannot_be_started_leaves_nothing_changed(tmp_path: Path) -> None:
    card = TimedCard()
    with pytest.raises(MissingTool, match="cannot be started"):
        controlled(card, tmp_path / "state", "/nonexistent/program")
    assert card.calls[-1] == "reset"


def test_a_signal_at_any_moment_of_the_wait_is_only_remembered() -> None:
    """An Event set by a handler while the same thread waits on it never returned: the lock inside is held by the
    code that was interrupted. What a handler touches must have no lock."""
    signals = live_control._Signals()
    assert not [value for value in vars(signals).values() if hasattr(value, "wait") or hasattr(value, "acquire")]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as process, signals:
        signals.pass_on_to(process)
        for _ in range(200):
            signals._came(signal.SIGTERM, None)
        assert signals.came
        assert process.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_program_and_clocks_are_reset(tmp_path: Path, number: signal.Signals) -> None:
    card = TimedCard()
    waker = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.6); os.kill({os.getpid()}, {int(number)})"]
    )
    ended = controlled(card, tmp_path / "state", sys.executable, "-c", "import time; time.sleep(30)")
    waker.wait()
    assert ended.code != 0
    assert card.calls[-1] == "reset"


def test_a_share_of_the_units_needs_an_mps_server(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="MPS"):
        limit_sm_share(50, {MPS_PIPE: str(tmp_path)})
    (tmp_path / "control").touch()
    assert limit_sm_share(50, {MPS_PIPE: str(tmp_path)}) == {MPS_SHARE: "50"}
    with pytest.raises(BadInput, match="1 to 100"):
        limit_sm_share(0, {MPS_PIPE: str(tmp_path)})


@dataclass
class SlicedCard(FakeCard):
    """A program that keeps to the SMs it is told: memory holds it, so fewer of them draw less and lose nothing."""

    units: SmCountFile | None = None

    def share(self) -> float:
        assert self.units is not None
        return float(self.units.path.read_text()) / self.units.total

    def power(self) -> float:
        return 120.0 + (100.0 + 200.0 * self.share()) * (self.clock_hz / CORE[-1]) ** 2.5


def test_sms_are_a_knob_where_the_program_turns_it(tmp_path: Path) -> None:
    units = SmCountFile(tmp_path / "units", 132)
    assert units.levels == (64.0, 80.0, 96.0, 112.0, 132.0)
    units.reset()
    card = SlicedCard(units=units)
    lattice = build_card_lattice(*card.clocks_hz(), units.levels)
    alive = lambda: card.now_s < 120.0  # noqa: E731
    plant = LivePlant(card, lattice, 1.0, alive, card.pass_time, Told(card), dry=False, units=units)
    state = play_plant(plant, Harmonia(lattice, lattice.top))
    memory = state.kernels[PROGRAM_KERNEL]
    assert memory.settled
    assert lattice.level_values(memory.next_settings)[1] == units.levels[0]
    assert float(units.path.read_text()) == units.levels[0]
    with pytest.raises(BadInput, match="--sms"):
        SmCountFile(tmp_path / "units", 8)


def test_sms_that_a_program_does_not_turn_stay_as_they_were(tmp_path: Path) -> None:
    units = SmCountFile(tmp_path / "units", 132)
    card = FakeCard()
    lattice = build_card_lattice(*card.clocks_hz(), units.levels)
    alive = lambda: card.now_s < 120.0  # noqa: E731
    plant = LivePlant(card, lattice, 1.0, alive, card.pass_time, Told(card), dry=False, units=units)
    memory = play_plant(plant, Harmonia(lattice, lattice.top)).kernels[PROGRAM_KERNEL]
    assert memory.settled
    clocks = np.asarray(lattice.knobs[0].levels)
    ed2 = (120.0 + 300.0 * (clocks / CORE[-1]) ** 2.5) * (CORE[-1] / clocks) ** (3 * 0.1)
    assert ed2[memory.next_settings[0]] <= 1.01 * ed2.min()


def test_all_sms_are_given_back_when_the_program_ends(tmp_path: Path) -> None:
    units = SmCountFile(tmp_path / "units", 132)
    script = "import os; assert open(os.environ['WATTCAST_UNITS']).read() == '132\\n'"
    ended = controlled(TimedCard(), tmp_path / "state", sys.executable, "-c", script, units=units)
    assert ended.code == 0
    assert units.path.read_text() == "132\n"


# -- watching ----------------------------------------------------------------------------------------------


def test_watching_advises_a_lower_clock_when_memory_is_what_holds_the_program() -> None:
    card = FakeCard()
    found = watch_card(card, 1.0, 3, Objective(), None, lambda text: None, card.pass_time)
    assert card.calls == []
    assert found["readings"] == 3
    assert found["power_w"] == pytest.approx(card.power())
    assert found["advice"]["core_hz"] < CORE[-1]
    assert found["advice"]["ed2_gain"] > 0
    assert "nothing was set" in found["advice"]["assumptions"][0]


def test_advice_keeps_the_clock_of_a_compute_bound_program_and_needs_readings() -> None:
    levels = np.asarray(CORE)
    busy = advise_clock(400.0, CORE[-1], 0.0, levels, Objective())
    assert busy is not None
    assert busy.core_hz == CORE[-1]
    frugal = advise_clock(400.0, CORE[-1], 0.0, levels, Objective(Goal.ENERGY, slowdown=0.1))
    assert frugal is not None
    assert 0 < frugal.slowdown <= 0.1 + 1e-9
    assert advise_clock(math.nan, CORE[-1], 0.5, levels, Objective()) is None
    assert advise_clock(400.0, CORE[-1], math.nan, levels, Objective()) is None


def test_bad_knob_values_do_not_reach_a_card() -> None:
    with pytest.raises(BadInput):
        Objective(cap_w=-1.0)
