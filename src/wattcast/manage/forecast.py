"""Our own predictor as a plant, and as a policy: the clock chosen before the kernel runs.

The plant gives any catalogue GPU and any workload to the controller; the policy predicts time and power over
a card's clocks and takes the best by the objective, without having run anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import api
from wattcast.arrays import Array
from wattcast.errors import BadInput, UnknownName, bad_value
from wattcast.hardware import Gpu
from wattcast.manage import foresight
from wattcast.manage.foresight import Curves
from wattcast.manage.knobs import Knob, Lattice, Role, Settings
from wattcast.manage.objective import Objective
from wattcast.manage.plant import Tables
from wattcast.manage.tuning import Tuning
from wattcast.manage.view import moved
from wattcast.workload.graph import Graph

ITERATIONS = 100
NO_LIMIT_W = 1e6
EQUAL = 1e-6  # of the score: what the search for the governor's clock leaves open
LEVELS = 24  # of the core clock, where the catalogue's steps are finer
_NAMED = re.compile(
    r"(?P<family>[a-z0-9]+)model_(?P<model>[\w.-]+?)_p(?P<dtype>bf16|fp16|fp32)_b(?P<batch>\d+)_s(?P<seq>\d+)"
    r"_mode(?P<phase>prefill|decode)(?:_attn(?P<attention>eager|flash))?"
)
_FAMILY_SIZES = {"bert": "bert-{}"}  # families whose size alone stands in a run's name


@dataclass(frozen=True)
class Forecast:
    """Predicted time and power of one application over a card's core clocks, ``(level,)``."""

    time_s: Array
    power_w: Array
    clock_hz: Array  # as the card would report it: below the one set where the power limit holds it
    workload: str
    status: str  # of the coefficients behind it
    curves: Curves  # without the power limit

    def best(self, objective: Objective, default_level: int) -> int:
        """The level the objective asks for if the prediction is right; of equal ones the lowest clock."""
        scores = objective.scores(self.time_s, self.power_w, self.time_s[default_level])
        return int(np.nonzero(scores <= scores.min() + EQUAL)[0][0])


def core_clocks(gpu: Gpu, levels: int = LEVELS) -> tuple[float, ...]:
    """Core clocks of a catalogue GPU, on its own steps where they are published."""
    low, high = gpu.clocks.min_hz, float(np.max(gpu.clocks.max_hz))
    step = gpu.clocks.step_hz
    lowest = float(np.min(low)) if low is not None else 0.3 * high
    wanted = np.linspace(max(lowest, 0.3 * high), high, levels)
    if step is not None:
        wanted = high - np.round((high - wanted) / float(np.min(step))) * float(np.min(step))
    return tuple(float(v) for v in np.unique(wanted))


def plant(
    workloads: Mapping[str, str | Path | Graph],
    gpu: Gpu,
    options: Mapping[str, object] | None = None,
    iterations: int = ITERATIONS,
) -> Tables:
    """A catalogue GPU as a plant: every workload is an application, run over and over, its clock the knob."""
    lattice = Lattice((Knob(Role.CORE_CLOCK, core_clocks(gpu)),))
    found = [predicted(w, gpu, lattice.knobs[0].levels, options) for w in workloads.values()]
    return Tables(
        name=gpu.name,
        lattice=lattice,
        default=lattice.top,
        kernels=tuple(workloads),
        time_s=np.stack([f.time_s for f in found]),
        power_w=np.stack([f.power_w for f in found]),
        applications={name: np.full(iterations, i, dtype=np.int64) for i, name in enumerate(workloads)},
        idle_w=_idle_w(gpu),
        clock_hz=np.stack([f.clock_hz for f in found]),
        source=f"predicted by Wattcast ({found[0].status} coefficients)",
    )


def predicted(
    workload: str | Path | Graph, gpu: Gpu, clocks_hz: Sequence[float], options: Mapping[str, object] | None = None
) -> Forecast:
    """One workload over a card's clocks; a power limit lowers the clocks it forbids, as the card would."""
    clocks = np.asarray(clocks_hz)
    more: dict[str, Any] = dict(options or {})
    p = api.predict(workload, gpu, clock=clocks, **more)
    grid = np.linspace(clocks[0], clocks[-1], foresight.POINTS)
    free = api.predict(workload, gpu, clock=grid, power_limit=NO_LIMIT_W, **more)
    idle = gpu.power.idle_w
    curves = Curves(
        clock_hz=grid,
        time_s=np.asarray(free.latency_s),
        power_w=np.asarray(free.power_w),
        idle_w=np.zeros(grid.shape) if idle is None else np.minimum(idle.at(grid), free.power_w),
        limit_w=float(np.min(gpu.power.limit_w)),
    )
    return Forecast(
        np.asarray(p.latency_s), np.asarray(p.power_w), np.asarray(p.clock_hz), p.name, str(p.status), curves
    )


def forecasts(tables: Tables, gpu: Gpu, folder: Path | None = None) -> tuple[dict[str, Forecast], dict[str, str]]:
    """Predictions for the applications of a replayed table, and why the others have none.

    An application's operators are read from ``folder`` (``NAME.json``, with or without the attention's tag)
    where there; else its name is taken apart and the model's own template is used.
    """
    which = tables.lattice.index(Role.CORE_CLOCK)
    if which is None:
        raise bad_value(tables.name, "a table over core clocks", "none")
    clocks = tables.lattice.knobs[which].levels
    found: dict[str, Forecast] = {}
    missing: dict[str, str] = {}
    for name in tables.applications:
        try:
            workload, options = workload_of(name, folder)
            found[name] = predicted(workload, gpu, clocks, options)
        except (BadInput, UnknownName) as error:
            missing[name] = str(error)
    return found, missing


def workload_of(name: str, folder: Path | None) -> tuple[str | Path, dict[str, object]]:
    """The workload behind a run's name: its operator list, or a model and options."""
    stems = [name, re.sub(r"_attn(eager|flash)$", "", name)]
    for stem in stems:
        path = None if folder is None else folder / f"{stem}.json"
        if path is not None and path.is_file():
            return path, {}
    match = _NAMED.fullmatch(name)
    if match is None:
        wanted = "its operator list in --workloads, or a name such as gpt2model_gpt2_pbf16_b8_s128_modeprefill"
        raise bad_value("application", wanted, name)
    size = re.sub(r"(?<=\d)p(?=\d)", ".", match["model"])  # opt-1p3b
    return _FAMILY_SIZES.get(match["family"], "{}").format(size), {
        "batch": int(match["batch"]),
        "seq": int(match["seq"]),
        "dtype": match["dtype"],
        "phase": match["phase"],
        "attention": match["attention"] or "eager",
        "head": "none",
    }


def choices(
    tables: Tables, found: Mapping[str, Forecast], objective: Objective, worth: float | None = None
) -> dict[str, Settings]:
    """The settings each forecast picks, with what the predictor does not know (:mod:`wattcast.manage.foresight`)."""
    which = tables.lattice.index(Role.CORE_CLOCK)
    assert which is not None
    default, levels = tables.default, np.asarray(tables.lattice.knobs[which].levels)
    least = Tuning().worth if worth is None else worth
    return {
        name: moved(default, which, foresight.best(f.curves, levels, objective, default[which], least))
        for name, f in found.items()
    }


def _idle_w(gpu: Gpu) -> float | None:
    curve = gpu.power.idle_w
    return None if curve is None else float(np.min(curve.at(float(np.min(gpu.clocks.min_hz or gpu.clocks.max_hz)))))
