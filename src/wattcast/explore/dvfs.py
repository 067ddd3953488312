"""Which clock: latency, power, energy and their products over all clocks and power limits of a card."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import units
from wattcast.api import find_gpu
from wattcast.errors import BadInput, MissingSpecification, bad_value
from wattcast.explore.api import Workload, study
from wattcast.explore.study import Columns, Study, table
from wattcast.fitted import Bundle
from wattcast.hardware import Gpu

MOST = 1_000_000  # clocks times power limits


class Objective(StrEnum):
    """What the best clock has least of."""

    ENERGY = "energy"
    ED = "ed"  # energy x delay
    ED2 = "ed2"  # energy x delay²
    LATENCY = "latency"


COLUMN = {
    Objective.ENERGY: "energy_j",
    Objective.ED: "energy_delay_js",
    Objective.ED2: "energy_delay2_js2",
    Objective.LATENCY: "latency_s",
}


@dataclass(frozen=True)
class Clocks:
    """Every clock and power limit, and the best by each objective among those within the bound."""

    study: Study
    columns: Columns
    best: dict[Objective, int]  # row of ``columns``
    bound: str


def clocks(
    workload: Workload,
    gpu: str | Path | Gpu,
    *,
    clock: str | None = None,
    power_limit: str | None = None,
    slowdown: str | None = None,
    latency: str | None = None,
    bundle: Bundle | None = None,
    **options: Any,
) -> Clocks:
    """The workload at every clock (``low:high:step`` or a list; default: all of the card) and power limit.

    The best clock is sought among those at most ``slowdown`` (``5%``) slower than the fastest, or within
    ``latency``. ED = E·t and ED² = E·t² [Gonzalez1996; Martin2001].
    """
    chip = find_gpu(gpu)
    vary = [f"clock={clock or _all_clocks(chip)}"] + ([f"power_limit={power_limit}"] if power_limit else [])
    found = study(workload, chip, vary, bundle=bundle, **options)
    if found.space.size > MOST:
        raise bad_value("clocks", f"at most {MOST:,} points", f"{found.space.size:,}", "Take larger steps.")
    columns = table(found, 0, found.space.size)
    columns |= products(columns)
    within, bound = _within(columns, slowdown, latency)
    rows = np.flatnonzero(within)
    best = {objective: int(rows[np.argmin(columns[name][rows])]) for objective, name in COLUMN.items()}
    return Clocks(found, columns, best, bound)


def products(columns: Columns) -> Columns:
    """Energy-delay products and slowdown against the fastest of these points."""
    latency_s, energy_j = columns["latency_s"], columns["energy_j"]
    return {
        "energy_delay_js": energy_j * latency_s,
        "energy_delay2_js2": energy_j * latency_s**2,
        "slowdown": latency_s / latency_s.min() - 1.0,
    }


def _all_clocks(gpu: Gpu) -> str:
    low, high, step = gpu.clocks.min_hz, gpu.clocks.max_hz, gpu.clocks.step_hz
    if low is None or step is None:
        raise MissingSpecification(
            f"{gpu.name}: its lowest clock or the step between clocks is not published. "
            "Say which clocks to try: --clocks 600MHz:1500MHz:15MHz."
        )
    return f"{float(low)!r}Hz:{float(high)!r}Hz:{float(step)!r}Hz"


def _within(columns: Columns, slowdown: str | None, latency: str | None) -> tuple[npt.NDArray[np.bool_], str]:
    if slowdown is not None and latency is not None:
        raise bad_value("bound", "a slowdown or a latency", "both")
    if slowdown is not None:
        most = units.parse(slowdown, "", "slowdown")
        if most < 0:
            raise bad_value("slowdown", "zero or more, such as 5%", slowdown)
        return columns["slowdown"] <= most, f"at most {most:.1%} slower than the fastest"
    if latency is not None:
        most = units.parse(latency, "s", "latency")
        within = columns["latency_s"] <= most
        if not within.any():
            least = float(columns["latency_s"].min())
            raise BadInput(f"latency: no clock meets {units.show(most, 's')}: the least is {units.show(least, 's')}.")
        return within, f"within {units.show(most, 's')}"
    return np.ones(len(columns["latency_s"]), dtype=bool), "without a bound"
