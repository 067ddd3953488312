"""What one decision costs, without a clock: bytecodes are counted, which are the same on every
machine.

Microseconds are in docs/method/manage.md; ``python -m benchmarks.bench_manage`` prints them.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import decisions
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattcast.control import hd7970, run_memory
from wattcast.control.controller_coefficients import CONTROLLER
from wattcast.control.plants import Observation, Settings, TablePlant
from wattcast.control.policies import ControllerState, Harmonia
from wattcast.control.run_memory import RunMemory
from wattcast.control.search_problem import Objective
from wattcast.control.sensitivity_model import load_shipped_model

MANAGE = Path(run_memory.__file__).parent


def bytecodes(work: Callable[[], object]) -> Counter[str]:
    """How many bytecodes a piece of work runs, by file."""
    found: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        found[frame.f_code.co_filename] += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # others hang Python code on collections
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return found


def made(
    controller: Harmonia, applications: tuple[str, ...]
) -> Iterator[tuple[ControllerState, Observation]]:
    """Every state and observation of some applications of the simulated card."""
    for application in applications:
        run, state = TablePlant(hd7970.load_tables(), application), controller.start()
        while (kernel := run.next_kernel()) is not None:
            seen = run.run(controller.settings(state, kernel))
            yield state, seen
            state, _ = controller.step(state, seen)


@pytest.mark.parametrize(
    ("cap_w", "most", "usual"), [(None, 4_000, 1_000), (150.0, 5_900, 3_700), (180.0, 6_400, 1_000)]
)
def test_no_decision_runs_more_than_a_few_thousand_bytecodes(
    cap_w: float | None, most: int, usual: int
) -> None:
    """Trades are looked for in decisions of their own, one knob at a time: at 150 W some ran 9,900
    before that.
    """
    tables = hd7970.load_tables()
    controller = Harmonia(
        tables.lattice,
        tables.default,
        Objective(cap_w=cap_w),
        load_shipped_model("hd7970_simulated"),
    )
    costs = []
    for state, seen in made(controller, ("CoMD", "Graph500", "BPT")):
        found = bytecodes(lambda s=state, o=seen: controller.step(s, o))  # type: ignore[misc]
        costs.append(sum(found.values()))
    assert max(costs) < most
    assert (
        np.median(costs) < usual
    )  # most decisions leave a settled kernel alone, but at 150 W they search


def test_a_decision_predicts_nothing_and_solves_nothing() -> None:
    """It runs code of the controller and of the linear sensitivity model alone: no array, no
    governor's clock.
    """
    tables = hd7970.load_tables()
    controller = Harmonia(
        tables.lattice,
        tables.default,
        Objective(cap_w=150.0),
        load_shipped_model("hd7970_simulated"),
    )
    ran: Counter[str] = Counter()
    for state, seen in made(controller, ("Graph500",)):
        ran += bytecodes(lambda s=state, o=seen: controller.step(s, o))  # type: ignore[misc]
    package = MANAGE.parent
    files = {Path(name) for name in ran if Path(name).is_relative_to(package)}
    assert {path.parent for path in files} == {MANAGE}
    assert {path.name for path in files} >= {"policies.py", "run_memory.py", "setting_search.py"}
    assert not [name for name in ran if "numpy" in name or "scipy" in name]


def test_decisions_are_those_of_the_version_before() -> None:
    """All of them, on the simulated card and on random ones, with and without a cap, counters and a
    governor.
    """
    assert decisions.digests() == json.loads(decisions.FILE.read_text())


def least_expected(memory: RunMemory, to: Settings) -> float:
    """What ``PowerCapCheck.permits`` compares with the cap, worked out from the memory with nothing
    kept.
    """
    lattice, seen, expected = decisions.LATTICES[-1], memory.seen, []
    if to in seen:
        return seen[to].log_power
    ups, downs = [], []
    for which, knob in enumerate(lattice.knobs):
        slopes = []
        for at, here in seen.items():
            above = [
                s
                for s in seen
                if s[:which] + s[which + 1 :] == at[:which] + at[which + 1 :] and s > at
            ]
            if above:
                next_up = min(above)
                ratio = math.log(knob.levels[next_up[which]]) - math.log(knob.levels[at[which]])
                slopes.append((seen[next_up].log_power - here.log_power) / ratio)
        up, down = run_memory.POWER_EXPONENTS[knob.role]
        if slopes:
            up = CONTROLLER.steeper_rise * max(*slopes, 0.0) + CONTROLLER.least_exponent
            down = CONTROLLER.fall_credit * max(min(slopes), 0.0)
        ups.append(up)
        downs.append(down)
    for at, here in seen.items():
        reckoned = here.log_power
        for knob, a, b, up, down in zip(lattice.knobs, at, to, ups, downs, strict=True):
            reckoned += (up if b > a else down) * (
                math.log(knob.levels[b]) - math.log(knob.levels[a])
            )
        expected.append(reckoned)
    return min(expected)


SETTINGS = st.tuples(*(st.integers(0, n - 1) for n in decisions.LATTICES[-1].shape))
RUNS = st.lists(st.tuples(SETTINGS, st.floats(60.0, 300.0)), min_size=1, max_size=25)


@settings(deadline=None, max_examples=200)
@given(
    runs=RUNS,
    asked=st.lists(SETTINGS, min_size=1, max_size=12),
    cap_w=st.floats(70.0, 280.0),
    near=st.booleans(),
)
def test_kept_columns_permit_what_the_plain_rule_permits(
    runs: list[tuple[Settings, float]], asked: list[Settings], cap_w: float, near: bool
) -> None:
    """Any order, any power; ``near`` keeps runs on few lines, where slopes are known. Each setting
    is run once:
    slopes are those measured when a setting was run, which repeats may move."""
    lattice, memory = decisions.LATTICES[-1], RunMemory()
    for at, power_w in runs:
        place = (at[0] % 2, at[1] % 2, at[2]) if near else at
        if place not in memory.seen:
            memory = memory.record(Observation("k", place, 1.0, power_w), place, lattice.log_levels)
    reckoned = run_memory.PowerCapCheck(lattice, memory, math.log(cap_w))
    for to in asked:
        room = math.log(cap_w) - least_expected(memory, to)
        assert abs(room) < 1e-9 or reckoned.permits(to) == (room > 0), to
