"""What one decision costs, without a clock: bytecodes are counted, which are the same on every
machine.

Microseconds are in docs/method/manage.md; ``python -m benchmarks.bench_manage`` prints them.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import decisions
import numpy as np
import pytest

from wattcast.control import hd7970, run_memory
from wattcast.control.plants import Observation, TablePlant
from wattcast.control.policies import ControllerState, Harmonia
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
    """Under a cap, the work of a decision is done by arrays of all settings."""
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
    governor's clock. Under a cap there are arrays, and nothing is predicted either.
    """
    tables = hd7970.load_tables()
    controller = Harmonia(
        tables.lattice,
        tables.default,
        Objective(),
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
    """On the simulated card without a cap and with one, with and without counters, and on random
    cards.
    """
    recorded = json.loads(decisions.FILE.read_text())
    some = decisions.digests(["free", "energy, 5 % slower, 165 W"], surfaces=2)
    assert len(some) > 40
    assert some == {name: recorded[name] for name in some}


@pytest.mark.slow
def test_all_decisions_are_those_of_the_version_before() -> None:
    """All of them, on the simulated card and on random ones, with and without a cap, counters and a
    governor.
    """
    assert decisions.digests() == json.loads(decisions.FILE.read_text())
