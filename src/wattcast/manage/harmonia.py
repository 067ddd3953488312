"""The controller: coarse step from sensitivities, fine steps from feedback, memory per kernel and phase.

A pure state machine: :meth:`Harmonia.step` takes a state and an observation and returns the next state and the
settings for the next run of that kernel. No clock, no file, no random number. It follows section 5 of paper
004 (Algorithm 1 as its prose has it) and goes past it in three ways: steps are judged by the objective itself,
not by VALUBusy alone; scatter between equal runs is learned, and differences inside it are not acted upon;
steps that a measured or predicted sensitivity shows to be hopeless are not tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from wattcast.fit.sensitivity import SensitivityModel
from wattcast.manage import sensitivity
from wattcast.manage.beliefs import Beliefs
from wattcast.manage.knobs import Lattice, Settings
from wattcast.manage.ledger import Ledger
from wattcast.manage.objective import Objective
from wattcast.manage.observation import Observation
from wattcast.manage.problem import Problem
from wattcast.manage.search import Move, next_move, sense
from wattcast.manage.sensitivity import Bin, binned
from wattcast.manage.tuning import Tuning
from wattcast.manage.view import View, moved

CLOCK_TOLERANCE = 0.005  # of a clock; cards report theirs in steps of about this

NEW = Ledger()
Bins = tuple[Bin, Bin]  # compute, bandwidth


class Memory(NamedTuple):
    """What the controller knows of one kernel in its present phase."""

    at: Settings  # settings of the next run
    why: str = "start"
    ledger: Ledger = NEW
    beliefs: Beliefs | None = None  # from counters
    bins: Bins | None = None
    target: Settings | None = None  # of the coarse step
    last: Settings | None = None  # settings of the run before
    settled: bool = False
    rest: int = 0  # runs to stay before the ledger is looked at again
    odd: int = 0  # surprises in a row
    bad: int = 0  # unusable observations in a row


class State(NamedTuple):
    """Memories by kernel, and those of phases that may come back."""

    kernels: Mapping[str, Memory]
    shelf: Mapping[tuple[str, Bins], Memory]  # by kernel and bins


@dataclass(frozen=True)
class Harmonia:
    """The controller's fixed part. ``fine=False`` is the coarse step alone."""

    lattice: Lattice
    default: Settings
    objective: Objective = field(default_factory=Objective)
    model: SensitivityModel | None = None  # None: sensitivities are measured, not predicted
    tuning: Tuning = field(default_factory=Tuning)
    free: tuple[bool, ...] | None = None  # knobs it may turn; None: all
    fine: bool = True
    first: Settings | None = None  # of a kernel's first run; None: the default
    hint: Mapping[str, Settings] = field(default_factory=dict)  # kernel -> first guess, instead of a coarse step

    @cached_property
    def problem(self) -> Problem:
        free = self.free or (True,) * len(self.lattice.knobs)
        return Problem(self.lattice, self.default, self.first or self.default, self.objective, self.tuning, free)

    def start(self) -> State:
        """The first state. Tables that decisions look things up in are worked out here, not in the first decision."""
        self.problem.prepare()
        _ = self._targets
        return State({}, {})

    def settings(self, state: State, kernel: str) -> Settings:
        """Settings for the next run of a kernel."""
        memory = state.kernels.get(kernel)
        return self.problem.start if memory is None else memory.at

    def step(self, state: State, observation: Observation) -> tuple[State, Settings]:
        """The next state and the settings for this kernel's next run."""
        kernel = observation.kernel
        memory = state.kernels.get(kernel) or Memory(at=self.problem.start, target=self.hint.get(kernel))
        if not (
            observation.usable and (observation.settings == memory.at or self.lattice.inside(observation.settings))
        ):
            memory = self._unusable(memory)
            return State({**state.kernels, kernel: memory}, state.shelf), memory.at
        state, memory = self._phase(state, memory, observation)
        effective = self._effective(memory.ledger, observation)
        ledger = memory.ledger.record(observation, effective, self.problem.reckoned_along)
        memory = self._decide(memory, ledger, observation.settings)
        return State({**state.kernels, kernel: memory}, state.shelf), memory.at

    def _effective(self, ledger: Ledger, observation: Observation) -> Settings:
        """The settings the card really ran at: the lowest core clock that would have been the same state.

        A governor (power, heat) that holds the clock between two levels would hold it there for the upper one,
        too. A clock that wavers by one level between runs counts as the same.
        """
        at, which, clock_hz = observation.settings, self.problem.core, observation.core_hz
        if which is None:
            return at
        levels = self.lattice.knobs[which].levels
        if not clock_hz < levels[at[which]] * (1.0 - CLOCK_TOLERANCE):  # NaN: not told
            return at
        level = bisect_left(levels, clock_hz * (1.0 - CLOCK_TOLERANCE))
        before = ledger.held.get(at)
        if before is not None and abs(before[which] - level) <= 1:
            return before
        return moved(at, which, level)

    def _unusable(self, memory: Memory) -> Memory:
        """Stay; after several in a row fall back to the start settings, which need no reading to be safe."""
        bad = memory.bad + 1
        if bad < self.tuning.patience:
            return memory._replace(bad=bad)
        return memory._replace(bad=bad, at=self.problem.start, why="blind", settled=False, rest=0)

    def _phase(self, state: State, memory: Memory, observation: Observation) -> tuple[State, Memory]:
        """A new phase: bins changed though no knob did (with counters), or time did (without)."""
        counters = observation.usable_counters
        if self.model is None or counters is None:
            return state, self._surprised(memory, observation)
        if memory.bins is not None and memory.last != observation.settings:
            return state, memory  # sensitivities that moved with a knob say nothing of the program
        compute, bandwidth = sensitivity.predicted(self.model, counters)
        bins = (binned(compute), binned(bandwidth))
        if bins == memory.bins:
            return state, memory
        beliefs = Beliefs(compute, bandwidth, self.tuning.margin)
        if memory.bins is None:
            return state, memory._replace(beliefs=beliefs, bins=bins, target=self._target(bins))
        if memory.ledger.confirms(observation, self.tuning.resolution):
            return state, memory._replace(beliefs=beliefs)  # the same program: it looks different from other settings
        shelf = {**state.shelf, (observation.kernel, memory.bins): memory}
        known = shelf.get((observation.kernel, bins))
        if known is None:
            known = Memory(at=memory.at, beliefs=beliefs, bins=bins, target=self._target(bins))
        return State(state.kernels, shelf), known._replace(last=memory.last)

    def _surprised(self, memory: Memory, observation: Observation) -> Memory:
        odd = memory.ledger.surprise(observation, self.tuning.prior_sigma) > self.tuning.surprise
        if not odd:
            return memory if memory.odd == 0 else memory._replace(odd=0)
        if memory.odd + 1 < self.tuning.patience:
            return memory._replace(odd=memory.odd + 1)
        return Memory(at=self.problem.start, last=memory.last)  # what was learned belongs to a phase that is over

    @cached_property
    def _targets(self) -> dict[Bins, Settings | None]:
        return {(compute, bandwidth): self._coarse((compute, bandwidth)) for compute in Bin for bandwidth in Bin}

    def _target(self, bins: Bins) -> Settings | None:
        """Where the coarse step leads, from a table of all nine."""
        return self._targets[bins]

    def _coarse(self, bins: Bins) -> Settings | None:
        """No knob above its default, none that may not be turned."""
        wanted = self.tuning.coarse_target(self.lattice, *bins)
        kept = tuple(
            min(t, d) if free else d for t, d, free in zip(wanted, self.default, self.problem.free, strict=True)
        )
        return None if kept == self.default else kept

    def _decide(self, memory: Memory, ledger: Ledger, last: Settings) -> Memory:
        if memory.settled and memory.rest > 0:
            move, rest = Move(memory.at, True, memory.why), memory.rest - 1
        else:
            move, rest = self._move(memory, ledger), self.tuning.rest
        return Memory(
            move.settings,
            move.why,
            ledger,
            memory.beliefs,
            memory.bins,
            memory.target,
            last,
            move.settled,
            rest,
            memory.odd,
        )

    def _move(self, memory: Memory, ledger: Ledger) -> Move:
        if self.fine:
            return next_move(self.problem, ledger, memory.beliefs, memory.target)
        if memory.beliefs is not None:
            return Move(memory.target or self.default, True, "coarse")
        view = View(self.problem, ledger, None)
        probe = sense(view)
        if probe is not None and probe not in ledger.seen:
            return Move(probe, False, "sense")
        return Move(self._target(view.bins()) or self.default, True, "coarse")
