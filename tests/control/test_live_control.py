"""A card under control without a card: closed loop, faults, one controller at a time, leftovers."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.calibrate.calibration_rows import read_calibration_rows
from wattcast.control import clock_plane, live_control, program_files
from wattcast.control.card_settings import RefusedKnob
from wattcast.control.live_control import control_plant
from wattcast.control.live_plant import PROGRAM_KERNEL, LivePlant
from wattcast.control.plants import KnobRole, Observation, Settings, build_card_lattice, play_plant
from wattcast.control.policies import Harmonia
from wattcast.control.program_files import (
    MPS_PIPE,
    MPS_SHARE,
    ProgressFile,
    SmCountFile,
    limit_sm_share,
)
from wattcast.control.search_problem import Goal, Objective
from wattcast.control.watch_card import advise_clock, follow_clock, watch_card
from wattcast.core.errors import BadInput, CannotWrite, MissingTool, Refused
from wattcast.measure.device_control import NvmlReading
from wattcast.measure.measured_run import PassedSignals
from wattcast.predictor.api import find_gpu
from wattcast.predictor.kernel_coefficients import MEMORY_KNEE

CORE = tuple(float(c) for c in range(600_000_000, 1_981_000_000, 60_000_000))


@dataclass(frozen=True)
class Seen(NvmlReading):
    memory_hz: float = 3.2e9
    busy: float = 1.0
    memory_busy: float = 0.9


@dataclass
class FakeCard:
    """A memory-bound program on a card whose time hardly follows the core clock and whose power
    does.
    """

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

    def limits_w(self) -> tuple[float, float, float] | None:
        return 700.0, 200.0, 700.0

    def read(self) -> Seen:
        if self.lost:
            raise MissingTool("the card is lost.")
        return Seen(self.now_s, self.energy_j, self.power(), self.clock_hz, work_per_s=math.nan)

    @property
    def count(self) -> int:
        return 1

    @property
    def losses(self) -> int:
        return 0

    @property
    def is_adrift(self) -> bool:
        return False

    def read_each(self) -> tuple[Any, ...]:
        return (self.read(),)

    def beat(self) -> None:
        pass

    def apply(self, core_hz: float | None, memory_hz: float | None, limit_w: float | None) -> None:
        if self.refuse:
            raise Refused("taken back.")
        self.calls.append(f"core {core_hz or 0 / 1e6:.0f}")
        self.locked_hz = core_hz

    def give_back(self) -> None:
        if self.lost:
            raise Refused("the card is lost.")
        self.calls.append("reset")
        self.locked_hz = None


class Told(ProgressFile):
    def __init__(self, card: FakeCard) -> None:
        self._card = card

    def count(self) -> float:
        return self._card.work


def live(card: FakeCard, until_s: float, log: Any = lambda text: None) -> LivePlant:
    lattice = build_card_lattice(*card.clocks_hz())
    return LivePlant(
        card, lattice, 1.0, lambda: card.now_s < until_s, card.pass_time, Told(card), log
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
def test_a_clock_is_the_governors_only_while_the_card_works(
    busy: float, core_hz: float, told: bool
) -> None:
    """An idle card falls to a low clock by itself; taken for the governor's it would lead to the
    lowest setting.
    """

    class Idle(FakeCard):
        def read(self) -> Seen:
            return replace(super().read(), busy=busy, core_hz=core_hz)

    plant = live(Idle(), 5.0)
    seen = plant.run(plant.default)
    assert (seen.core_hz == core_hz) is told
    assert math.isnan(seen.core_hz) is not told


@pytest.mark.parametrize("fault", ["refuse", "lost"])
def test_a_fault_ends_control_but_not_the_program(fault: str) -> None:
    card, logged = FakeCard(), list[str]()
    plant = live(card, 30.0, logged.append)
    run = plant.run

    def run_with_fault(settings: Settings) -> Observation:
        if card.now_s >= 3.0:  # the search is under way
            setattr(card, fault, True)
        return run(settings)

    plant.run = run_with_fault  # type: ignore[method-assign]
    assert control_plant(plant, Objective()) is None
    assert card.now_s >= 30.0
    assert not plant.controlled
    assert sum("control ends" in why for why in logged) == 1
    if fault == "refuse":
        assert card.locked_hz is None  # the card has back what it had


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
    card, said = FakeCard(), list[str]()
    lattice = build_card_lattice(*card.clocks_hz())
    plant = LivePlant(
        card, lattice, 1.0, lambda: card.now_s < 20, card.pass_time, None, said.append
    )
    assert control_plant(plant, Objective()) is None
    assert card.calls == []
    assert sum("nothing is tuned" in why for why in said) == 1


@pytest.mark.parametrize("busy", [0.4, 0.6, 0.9])
def test_a_card_that_waits_for_work_is_not_slowed(busy: float) -> None:
    """At 30 to 50 % load throughput does not fall with the clock: the controller walked to the
    floor, and response times rose 2.5 to 6 times."""

    class Waiting(FakeCard):
        def read(self) -> Seen:
            return replace(super().read(), busy=busy)

        def pass_time(self, seconds: float) -> None:
            super().pass_time(seconds)
            self.work = 100.0 * self.now_s  # what comes in is done, at any clock

    card, said = Waiting(), list[str]()
    assert (
        control_plant(live(card, 60.0, said.append), Objective(Goal.ENERGY, slowdown=0.05)) is None
    )
    assert card.locked_hz is None
    assert sum("waits for work" in why for why in said) == 1


def test_knobs_that_are_refused_are_left_out_and_control_goes_on() -> None:
    @dataclass
    class Particular(FakeCard):
        """Memory clocks are listed and cannot be locked, core clocks above 1.5 GHz are not allowed."""

        def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
            return CORE, (0.8e9, 3.2e9)

        @property
        def clock_hz(self) -> float:
            return self.locked_hz or 1.5e9

        def pass_time(self, seconds: float) -> None:
            self.now_s += seconds
            self.energy_j += seconds * self.power()
            self.work += seconds * 100.0 * (self.clock_hz / 1.5e9) ** 0.6

        def apply(
            self, core_hz: float | None, memory_hz: float | None, limit_w: float | None
        ) -> None:
            if memory_hz is not None:
                raise RefusedKnob("memory", "memory clocks cannot be locked.")
            if core_hz is not None and core_hz > 1.5e9:
                raise RefusedKnob("core", "too high.", (0.0, 1.5e9))
            super().apply(core_hz, memory_hz, limit_w)

    card = Particular()
    plant = live(card, 120.0)
    plant.run((plant.default[0], 0))
    plant.run((plant.default[0] - 1,))
    found = control_plant(plant, Objective(Goal.ENERGY))
    assert plant.controlled
    assert [knob.role for knob in plant.lattice.knobs] == [KnobRole.CORE_CLOCK]
    assert max(plant.lattice.knobs[0].levels) <= 1.5e9
    assert found is not None
    assert found.energy.is_shown


def test_rows_of_a_controlled_program_are_those_that_calibrate_reads(tmp_path: Path) -> None:
    """One row per clock: seconds and watts of a unit of work, here 1 / (100·(f / top)^0.1) s."""
    plant = live(FakeCard(), 80.0)
    control_plant(plant, Objective(Goal.ENERGY))
    path = tmp_path / "rows.csv"
    count = live_control.write_calibration_rows(
        plant, {"workload": "llama3-8b", "batch": 8, "phase": "decode"}, path
    )
    rows = read_calibration_rows(path, find_gpu("h200"))
    assert count == len(rows) > 3
    clocks = np.array([row.clock_hz for row in rows], dtype=float)
    assert_allclose([row.latency_s for row in rows], 0.01 * (CORE[-1] / clocks) ** 0.1, rtol=0.05)
    assert_allclose(
        np.array([row.power_w for row in rows], dtype=float),
        120.0 + 300.0 * (clocks / CORE[-1]) ** 2.5,
        rtol=0.02,
    )


def test_rows_that_cannot_be_saved_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "rows.csv"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match="No space left"):
        live_control.write_calibration_rows(live(FakeCard(), 80.0), {"workload": "llama3-8b"}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]
    assert path.read_text() == "old"


def test_progress_is_the_size_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "done"
    assert ProgressFile(path).count() == 0.0
    path.write_bytes(b"...")
    assert ProgressFile(path).count() == 3.0


def test_progress_in_lines_adds_amounts_up_and_ignores_what_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "done"
    monkeypatch.setenv(program_files.PROGRESS_VARIABLE, str(path))
    live_control.report_work(4096)
    told = ProgressFile(path)
    assert told.count() == 4096.0
    with path.open("ab") as stream:
        stream.write(b"+nan\nhello\n+-7\n+1.5\n+2")  # the last line is not whole yet
    assert told.count() == 4097.5
    with path.open("ab") as stream:
        stream.write(b"0\n")
    assert told.count() == 4117.5


# -- programs
# ----------------------------------------------------------------------------------------------


@dataclass
class TimedCard(FakeCard):
    """The fake card on the machine's own clock."""

    def read(self) -> Seen:
        self.pass_time(0.05)
        return super().read()


def controlled(card: FakeCard, *command: str, **more: Any) -> int:
    say, task = (
        more.pop("say", lambda text: None),
        live_control.ControlTask(Objective(), 0.05, **more),
    )
    return live_control.run_controlled_program(card, command, task, say, dict(os.environ))


def test_a_program_runs_to_its_end_and_its_code_is_ours(tmp_path: Path) -> None:
    script = (
        "import os, time\n"
        "with open(os.environ['WATTCAST_PROGRESS'], 'ab', buffering=0) as f:\n"
        "    for _ in range(60):\n        f.write(b'.' * 5)\n        time.sleep(0.01)\n"
        "raise SystemExit(7)"
    )
    card, said = TimedCard(), list[str]()
    code = controlled(
        card, sys.executable, "-c", script, progress=tmp_path / "progress", say=said.append
    )
    assert code == 7
    assert said[-1].startswith("the card has back what it had.")
    assert not [text for text in said if "control ends" in text]
    assert card.calls[-1] == "reset"
    assert card.locked_hz is None


def test_a_card_that_is_not_given_back_is_an_error(tmp_path: Path) -> None:
    class Stuck(TimedCard):
        def give_back(self) -> None:
            raise Refused("the card is still set to core 990 MHz.")

    with pytest.raises(Refused, match="still set"):
        controlled(Stuck(), sys.executable, "-c", "pass")


def test_a_program_that_cannot_be_started_leaves_nothing_changed(tmp_path: Path) -> None:
    card = TimedCard()
    with pytest.raises(MissingTool, match="cannot be started"):
        controlled(card, "/nonexistent/program")
    assert card.calls == []


def test_a_signal_at_any_moment_of_the_wait_is_only_remembered() -> None:
    """An Event set by a handler while the same thread waits on it never returned: the lock inside
    is held by the code that was interrupted. What a handler touches must have no lock."""
    signals = PassedSignals()
    assert not [
        value
        for value in vars(signals).values()
        if hasattr(value, "wait") or hasattr(value, "acquire")
    ]
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as process,
        signals,
    ):
        signals.process = process
        for _ in range(200):
            signals._note_signal(signal.SIGTERM, None)
        assert signals.came
        assert process.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_program_and_clocks_are_reset(number: signal.Signals) -> None:
    """The program itself sends the signal: one that came before we listen would end the tests."""
    card = TimedCard()
    script = (
        f"import os, time; time.sleep(0.3); os.kill({os.getpid()}, {int(number)}); time.sleep(30)"
    )
    assert controlled(card, sys.executable, "-c", script) != 0
    assert card.calls[-1] == "reset"


def test_clocks_that_are_refused_and_programs_that_fail_are_told(tmp_path: Path) -> None:
    class Particular(TimedCard):
        given_back = 0

        def apply(
            self, core_hz: float | None, memory_hz: float | None, limit_w: float | None
        ) -> None:
            if core_hz == 1e9:
                raise RefusedKnob("core", "1000 MHz will not be set")

        def give_back(self) -> None:
            self.given_back += 1

    card, said = Particular(), list[str]()
    fails_at_2000 = [sys.executable, "-c", "raise SystemExit({core} == 2000)"]
    plane = [(2e9, 3e9), (1e9, 3e9), (0.5e9, 3e9)]
    assert list(
        clock_plane.visit_clock_plane(card, plane, fails_at_2000, said.append, os.environ).values()
    ) == [*(1, None, 0)]
    assert said == ["1000 and 3000 MHz are left out: 1000 MHz will not be set"]
    with pytest.raises(MissingTool, match="cannot be started"):
        clock_plane.visit_clock_plane(card, plane, ["/nowhere"], said.append, os.environ)
    assert card.given_back == 2
    with pytest.raises(MissingTool, match="no clocks"):
        clock_plane.choose_clock_plane([], [], 2, 1)


def test_a_share_of_the_units_needs_an_mps_server(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="MPS"):
        limit_sm_share(50, {MPS_PIPE: str(tmp_path)})
    (tmp_path / "control").touch()
    assert limit_sm_share(50, {MPS_PIPE: str(tmp_path)}) == {MPS_SHARE: "50"}
    with pytest.raises(BadInput, match="1 to 100"):
        limit_sm_share(0, {MPS_PIPE: str(tmp_path)})


@dataclass
class SlicedCard(FakeCard):
    """A program that keeps to the SMs it is told: memory holds it, so fewer of them draw less and
    lose nothing.
    """

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
    plant = LivePlant(
        card, lattice, 1.0, lambda: card.now_s < 120.0, card.pass_time, Told(card), units=units
    )
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
    plant = LivePlant(
        card, lattice, 1.0, lambda: card.now_s < 120.0, card.pass_time, Told(card), units=units
    )
    memory = play_plant(plant, Harmonia(lattice, lattice.top)).kernels[PROGRAM_KERNEL]
    assert memory.settled
    clocks = np.asarray(lattice.knobs[0].levels)
    ed2 = (120.0 + 300.0 * (clocks / CORE[-1]) ** 2.5) * (CORE[-1] / clocks) ** (3 * 0.1)
    assert ed2[memory.next_settings[0]] <= 1.01 * ed2.min()


def test_all_sms_are_given_back_when_the_program_ends(tmp_path: Path) -> None:
    units = SmCountFile(tmp_path / "units", 132)
    script = "import os; assert open(os.environ['WATTCAST_UNITS']).read() == '132\\n'"
    assert controlled(TimedCard(), sys.executable, "-c", script, units=units) == 0
    assert units.path.read_text() == "132\n"


# -- watching
# ----------------------------------------------------------------------------------------------


def test_watching_advises_a_lower_clock_when_memory_is_what_holds_the_program() -> None:
    card = FakeCard()
    found = watch_card(card, 1.0, 3, Objective(), None, lambda text: None, card.pass_time)
    assert card.calls == []
    assert found["readings"] == 3
    assert found["phases"] == {}  # no performance monitoring
    assert found["power_w"] == pytest.approx(card.power())
    assert found["advice"]["core_hz"] < CORE[-1]
    assert found["advice"]["ed2_gain"] > 0
    assert "nothing was set" in found["advice"]["assumptions"][0]


@pytest.mark.parametrize("name", ["h200", "a100-sxm-80gb", "l40s"])
def test_watching_a_card_and_predicting_it_follow_one_law(name: str) -> None:
    """Of a program that memory holds back, ``watch`` said "time +0.0 %" at 1,005 MHz of an H200.

    ``predict`` said +21 % of a decode step on the same card.
    """
    gpu = find_gpu(name)
    top_hz = float(gpu.clocks.max_hz)
    clocks = np.array([0.508 * top_hz, top_hz])
    goal = Objective(Goal.ENERGY)
    found = advise_clock(0.7 * float(gpu.power.limit_w), top_hz, 1.0, clocks[:1], goal, gpu)
    assert found is not None
    shared: dict[str, Any] = {"clock": clocks, "power_limit": 1e6, "force": True}
    step = wattcast.predict("llama3-8b", gpu, phase="decode", batch=8, seq=1024, **shared)
    slower = step.latency_s[0] / step.latency_s[1] - 1.0
    assert found["slowdown"] == pytest.approx(slower, rel=1e-9)
    assert slower > 0.02
    busy = advise_clock(0.7 * float(gpu.power.limit_w), top_hz, 0.0, clocks[:1], goal, gpu)
    assert busy is not None
    assert busy["slowdown"] > found["slowdown"]
    assert "as predicted for the" in found["assumptions"][0]


def test_memory_of_an_unknown_card_follows_the_clock_below_a_knee() -> None:
    clocks_hz = np.array([1.0e9, 1.9e9, 2.0e9])
    slower, said = follow_clock(clocks_hz, 1.0, 2.0e9, None)
    assert_allclose(slower, [2.0 * MEMORY_KNEE, 1.0, 1.0])
    assert "below 86%" in said
    half, _ = follow_clock(clocks_hz, 0.5, 2.0e9, None)
    assert_allclose(half, [0.5 * (2.0 * MEMORY_KNEE + 2.0), 0.5 * (1.0 + 2.0 / 1.9), 1.0])


def test_advice_keeps_the_clock_of_a_compute_bound_program_and_needs_readings() -> None:
    levels = np.asarray(CORE)
    busy = advise_clock(400.0, CORE[-1], 0.0, levels, Objective())
    assert busy is not None
    assert busy["core_hz"] == CORE[-1]
    frugal = advise_clock(400.0, CORE[-1], 0.0, levels, Objective(Goal.ENERGY, slowdown=0.1))
    assert frugal is not None
    assert 0 < frugal["slowdown"] <= 0.1 + 1e-9
    assert advise_clock(math.nan, CORE[-1], 0.5, levels, Objective()) is None
    assert advise_clock(400.0, CORE[-1], math.nan, levels, Objective()) is None


def test_bad_knob_values_do_not_reach_a_card() -> None:
    with pytest.raises(BadInput):
        Objective(cap_w=-1.0)
