"""Every decision of many controllers on cards that need no file: what ``decisions.json`` holds.

Made by ``python tests/control/decisions.py``. A change of it is a change of what the controller
does, and is explained in the commit; work on its speed changes nothing here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

from wattcast.control import hd7970
from wattcast.control.plants import Knob, KnobRole, Lattice, Observation, Settings, TablePlant
from wattcast.control.policies import Harmonia
from wattcast.control.search_problem import Goal, Objective
from wattcast.control.sensitivity_model import load_shipped_model

FILE = Path(__file__).with_name("decisions.json")
RUNS, SURFACES = 60, 40
CARD = {
    "free": Objective(),
    "150 W": Objective(cap_w=150.0),
    "180 W": Objective(cap_w=180.0),
    "energy, 5 % slower, 165 W": Objective(Goal.ENERGY, slowdown=0.05, cap_w=165.0),
}
LATTICES = (
    Lattice((Knob(KnobRole.CORE_CLOCK, tuple(6e8 + 6e7 * i for i in range(24))),)),
    Lattice(
        (
            Knob(KnobRole.CORE_CLOCK, tuple(6e8 + 4e7 * i for i in range(16))),
            Knob(KnobRole.MEMORY_CLOCK, (8e8, 3.3e9)),
        )
    ),
    hd7970.load_tables().lattice,
)


def digests(objectives: Sequence[str] = tuple(CARD), surfaces: int = SURFACES) -> dict[str, str]:
    """By case, how many decisions, the last one, and a digest of the settings and reasons of all."""
    return {name: _digest(path) for name, path in _cases(objectives, surfaces)}


def _digest(path: list[str]) -> str:
    return f"{len(path)}, last {path[-1]}, {sha256('|'.join(path).encode()).hexdigest()[:16]}"


def _cases(objectives: Sequence[str], surfaces: int) -> Iterator[tuple[str, list[str]]]:
    tables = hd7970.load_tables()
    for name in objectives:
        objective = CARD[name]
        for counters in (True, False):
            model = load_shipped_model("hd7970_simulated") if counters else None
            controller = Harmonia(tables.lattice, tables.default, objective, model)
            for application in tables.applications:
                run, state, path = TablePlant(tables, application), controller.start(), []
                while (kernel := run.next_kernel()) is not None:
                    state, at = controller.step(state, run.run(controller.settings(state, kernel)))
                    path.append(_said(kernel, at, state.kernels[kernel].why))
                yield f"{application}, {name}, {'counters' if counters else 'no counters'}", path
    for seed in range(surfaces):
        for lattice in LATTICES:
            yield f"surface {seed}, {len(lattice.knobs)} knobs", _surface(lattice, Random(seed))


def _surface(lattice: Lattice, draw: Random) -> list[str]:
    """A card whose time and power are powers of its knobs, with scatter, and a governor that may
    hold its clock.
    """
    slows, draws = [[draw.uniform(0.0, most) for _ in lattice.knobs] for most in (1.0, 1.5)]
    base_w, scatter = draw.uniform(50.0, 150.0), draw.choice([0.0, 0.002, 0.02])
    cap_w = draw.choice([None, 150.0, 200.0, 240.0])
    first = tuple(draw.randrange(n) for n in lattice.shape) if draw.random() < 0.3 else None
    core = lattice.find_knob(KnobRole.CORE_CLOCK)
    assert core is not None
    top = lattice.level_values(lattice.top)
    held_hz = draw.uniform(0.6, 1.0) * top[core] if draw.random() < 0.4 else math.inf
    told = draw.random() < 0.5
    controller = Harmonia(lattice, lattice.top, Objective(cap_w=cap_w), first=first)
    state, path = controller.start(), []
    for _ in range(RUNS):
        at = controller.settings(state, "k")
        values = list(lattice.level_values(at))
        values[core] = min(values[core], held_hz)
        time_s, watts = math.exp(draw.gauss(0.0, 0.1 * scatter)), 250.0 - base_w
        for value, most, slow, more in zip(values, top, slows, draws, strict=True):
            time_s, watts = time_s * (most / value) ** slow, watts * (value / most) ** more
        power_w = (base_w + watts) * math.exp(draw.gauss(0.0, scatter))
        seen = Observation("k", at, time_s, power_w, core_hz=values[core] if told else math.nan)
        state, _ = controller.step(state, seen)
        path.append(_said("k", state.kernels["k"].next_settings, state.kernels["k"].why))
    return path


def _said(kernel: str, at: Settings, why: str) -> str:
    return f"{kernel.rsplit('.', 1)[-1]} {'/'.join(map(str, at))} {why}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=0, sort_keys=True) + "\n", encoding="utf-8")
